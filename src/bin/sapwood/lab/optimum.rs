//! What no policy can beat: the page whose next use is farthest goes first.
//!
//! A page's next use is never before that of the page above it, so this order never asks for a page whose
//! ancestors are gone: on prefix trees the plain rule is the optimum among those that keep the running request
//! resident.

use std::collections::BinaryHeap;

use super::sim::{Outcome, Residents, cost};
use super::work::Work;

const NEVER: u32 = u32::MAX;

/// By request and step: the number of the next request that uses the node. O(steps).
pub(crate) fn next_uses(work: &Work) -> Vec<Vec<u32>> {
    let mut next = vec![NEVER; work.nodes.len()];
    let mut uses = vec![Vec::new(); work.jobs.len()];
    for (number, job) in work.jobs.iter().enumerate().rev() {
        let path = work.path(job);
        uses[number] = path.iter().map(|s| next[s.node as usize]).collect();
        path.iter().for_each(|s| next[s.node as usize] = number as u32);
    }
    uses
}

/// Hits of the optimum with `capacity` pages. O(steps log steps).
pub(crate) fn run(work: &Work, capacity: u64, knee: f64) -> Outcome {
    let uses = next_uses(work);
    let mut next = vec![NEVER; work.nodes.len()];
    let mut residents = Residents::new(work);
    let mut outcome = Outcome { hits: vec![0; work.jobs.len()], saved: 0.0 };
    let mut heap: BinaryHeap<(u32, u32, u32)> = BinaryHeap::new();
    let mut aside = Vec::new();
    for (number, job) in work.jobs.iter().enumerate() {
        let path = work.path(job);
        if u64::from(job.pages) > capacity {
            continue;
        }
        let (hit, missing) = residents.find(path);
        outcome.hits[number] = hit;
        outcome.saved += cost(hit, knee);
        for (step, &at) in path.iter().zip(&uses[number]) {
            next[step.node as usize] = at;
        }
        while residents.used + u64::from(missing) > capacity {
            let Some((at, depth, node)) = heap.pop() else { break };
            let have = residents.pages[node as usize];
            if have == 0 || next[node as usize] != at {
                continue;
            }
            if path.iter().any(|s| s.node == node) {
                aside.push((at, depth, node));
                continue;
            }
            let most = residents.used + u64::from(missing) - capacity;
            let cut = most.min(u64::from(have)) as u32;
            residents.pages[node as usize] -= cut;
            residents.used -= u64::from(cut);
            if cut < have {
                heap.push((at, depth, node));
            }
        }
        heap.extend(aside.drain(..));
        residents.fill(work, path);
        let keys = path.iter().zip(&uses[number]);
        heap.extend(keys.map(|(s, &at)| (at, work.nodes[s.node as usize].depth, s.node)));
    }
    outcome
}
