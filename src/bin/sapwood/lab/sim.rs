//! One tier: what a policy hits with a given number of pages.

use sapwood::base::heap::{HeapKey, IndexHeap};

use super::work::{Step, Work};

/// What a policy sees of the request being served.
pub(crate) struct Now<'a> {
    pub(crate) work: &'a Work,
    /// Number of the request.
    pub(crate) number: usize,
    pub(crate) path: &'a [Step],
}

/// Decides who goes first. The simulation keeps the heap of leaves.
pub(crate) trait Policy {
    /// A request comes; nodes whose key has changed are appended to `due`.
    fn request(&mut self, now: &Now<'_>, due: &mut Vec<u32>);
    /// The request uses a step of its path; called deepest first, before anything is evicted for it.
    fn touch(&mut self, now: &Now<'_>, step: &Step);
    /// The smallest key is evicted first.
    fn key(&self, work: &Work, node: u32) -> HeapKey;
    /// The last page of a node is gone.
    fn evicted(&mut self, _node: u32) {}
    /// One line about itself.
    fn say(&self) -> Option<String> {
        None
    }
}

/// What came out of a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    /// Hits by request, in pages.
    pub(crate) hits: Vec<u32>,
    /// Least cost of what was hit, in pages at depth 0; see [`cost`].
    pub(crate) saved: f64,
}

impl Outcome {
    pub(crate) fn pages(&self) -> u64 {
        self.hits.iter().map(|&h| u64::from(h)).sum()
    }

    /// Percent of prompt tokens hit, of all requests but the first `skip`.
    pub(crate) fn percent_after(&self, work: &Work, skip: usize) -> f64 {
        let hits: u64 = self.hits[skip..].iter().map(|&h| u64::from(h)).sum();
        let tokens: u64 = work.jobs[skip..].iter().map(|j| u64::from(j.input_tokens)).sum();
        100.0 * (hits * u64::from(work.page_tokens)) as f64 / tokens.max(1) as f64
    }
}

/// Work that the first `pages` pages of a prompt are, in pages at depth 0, if a page at depth `knee` costs twice as
/// much as one at depth 0. Attention over all earlier tokens makes that linear in depth.
pub(crate) fn cost(pages: u32, knee: f64) -> f64 {
    let n = f64::from(pages);
    n + n * n / (2.0 * knee)
}

/// Pages resident, by node, and the leaves among them.
pub(crate) struct Residents {
    pub(crate) pages: Vec<u32>,
    kids: Vec<u32>,
    pub(crate) leaves: IndexHeap,
    pub(crate) used: u64,
}

impl Residents {
    pub(crate) fn new(work: &Work) -> Residents {
        let none = vec![0; work.nodes.len()];
        Residents { pages: none.clone(), kids: none, leaves: IndexHeap::default(), used: 0 }
    }

    /// Pages of the path found from its start without a gap, and pages missing.
    pub(crate) fn find(&self, path: &[Step]) -> (u32, u32) {
        let (mut hit, mut missing, mut whole) = (0, 0, true);
        for step in path {
            let have = self.pages[step.node as usize].min(step.pages);
            if whole {
                hit += have;
            }
            whole &= have == step.pages;
            missing += step.pages - have;
        }
        (hit, missing)
    }

    /// True if nothing resident lies below a resident node.
    pub(crate) fn is_end(&self, node: u32) -> bool {
        self.kids[node as usize] == 0 && self.pages[node as usize] > 0
    }

    /// Takes the path out of the leaves, so that none of it is evicted.
    pub(crate) fn pin(&mut self, path: &[Step]) {
        for step in path {
            self.leaves.remove(step.node);
        }
    }

    /// Makes the path resident.
    pub(crate) fn fill(&mut self, work: &Work, path: &[Step]) {
        for step in path {
            let at = step.node as usize;
            if self.pages[at] == 0 {
                self.kids[work.nodes[at].parent as usize] += 1;
            }
            let more = step.pages.saturating_sub(self.pages[at]);
            self.pages[at] += more;
            self.used += u64::from(more);
        }
    }

    /// Puts the end of the path back among the leaves.
    pub(crate) fn unpin(&mut self, work: &Work, path: &[Step], policy: &dyn Policy) {
        for step in path {
            if self.is_end(step.node) {
                self.leaves.set(step.node, policy.key(work, step.node));
            }
        }
    }

    /// Cuts up to `most` pages off the end of a leaf; how many. A parent outside `path` may become a leaf.
    pub(crate) fn trim(
        &mut self,
        work: &Work,
        node: u32,
        most: u64,
        path: &[Step],
        policy: &dyn Policy,
    ) -> u32 {
        let at = node as usize;
        let cut = most.min(u64::from(self.pages[at])) as u32;
        self.pages[at] -= cut;
        self.used -= u64::from(cut);
        if self.pages[at] == 0 {
            self.leaves.remove(node);
            let parent = work.nodes[at].parent;
            self.kids[parent as usize] -= 1;
            if parent != 0 && self.kids[parent as usize] == 0 && path.iter().all(|s| s.node != parent) {
                self.leaves.set(parent, policy.key(work, parent));
            }
        }
        cut
    }

    pub(crate) fn rekey(&mut self, work: &Work, due: &mut Vec<u32>, policy: &dyn Policy) {
        for node in due.drain(..) {
            if self.leaves.key(node).is_some() {
                self.leaves.set(node, policy.key(work, node));
            }
        }
    }
}

/// Serves the whole workload one request after the other with `capacity` pages. A running request is resident; one
/// that does not fit passes by. O(nodes touched and evicted, times log of the leaves).
pub(crate) fn run(work: &Work, capacity: u64, knee: f64, policy: &mut dyn Policy) -> Outcome {
    let mut residents = Residents::new(work);
    let mut outcome = Outcome { hits: vec![0; work.jobs.len()], saved: 0.0 };
    let mut due = Vec::new();
    for (number, job) in work.jobs.iter().enumerate() {
        let path = work.path(job);
        if u64::from(job.pages) >= capacity || path.is_empty() {
            continue;
        }
        let (hit, missing) = residents.find(path);
        outcome.hits[number] = hit;
        outcome.saved += cost(hit, knee);
        let now = Now { work, number, path };
        policy.request(&now, &mut due);
        residents.pin(path);
        residents.rekey(work, &mut due, policy);
        path.iter().rev().for_each(|step| policy.touch(&now, step));
        while residents.used + u64::from(missing) > capacity {
            let Some(victim) = residents.leaves.peek() else { break };
            let most = residents.used + u64::from(missing) - capacity;
            residents.trim(work, victim, most, path, policy);
            if residents.pages[victim as usize] == 0 {
                policy.evicted(victim);
            }
        }
        residents.fill(work, path);
        residents.unpin(work, path, policy);
        debug_assert!(residents.used <= capacity);
    }
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::generate::{Kind, generate};
    use crate::lab::optimum;
    use crate::lab::policies::{self, Kind as Order};

    const ORDERS: [&str; 11] = [
        "lru",
        "tree-lru",
        "fifo",
        "lfu",
        "lfu-aged",
        "slru",
        "lru2",
        "adaptive",
        "whether",
        "queue-16",
        "adaptive-flat",
    ];

    fn hits(work: &Work, order: &str, capacity: u64) -> u64 {
        let order: Order = order.parse().unwrap();
        crate::lab::run_one(order, work, capacity, 512.0).0.pages()
    }

    #[test]
    fn nobody_beats_the_optimum_and_it_not_the_unlimited() {
        for kind in [Kind::Chats, Kind::Documents, Kind::Mixed, Kind::Sweeps] {
            let work = generate(kind, 5, 1_500, 64);
            for capacity in [3_000, 16_384] {
                let best = optimum::run(&work, capacity, 512.0).pages();
                assert!(best <= work.unlimited());
                for order in ORDERS {
                    let got = hits(&work, order, capacity);
                    assert!(got <= best, "{order} on {kind:?}: {got} > {best}");
                }
            }
        }
    }

    #[test]
    fn with_room_for_all_everything_hits() {
        let work = generate(Kind::Mixed, 5, 800, 64);
        for order in ORDERS {
            assert_eq!(hits(&work, order, 1 << 30), work.unlimited(), "{order}");
        }
        assert_eq!(optimum::run(&work, 1 << 30, 512.0).pages(), work.unlimited());
    }

    #[test]
    fn lru_by_hand() {
        use crate::lab::work::{Builder, Span};
        let mut builder = Builder::new();
        // Three prompts of 4 pages in room for 10: the third cuts 2 pages off the tail of the first.
        for (at, id) in [1, 2, 3, 1, 2].into_iter().enumerate() {
            builder.push(at as u64, 256, 1, &[Span { id, pages: 4 }]);
        }
        let work = builder.build("by hand", 64);
        let outcome = run(&work, 10, 512.0, &mut *policies::make(Order::Lru, &work));
        assert_eq!(outcome.hits, [0, 0, 0, 2, 2]);
    }

    #[test]
    fn the_learned_order_stays_near_lru_at_worst_and_far_above_at_best() {
        let mut lines = Vec::new();
        for kind in [Kind::Flips, Kind::Echoes, Kind::Noise, Kind::Chats, Kind::Scans, Kind::Documents] {
            let (mut lru, mut ours) = (0, 0);
            for seed in 1..=3 {
                let work = generate(kind, seed, 6_000, 64);
                lru += hits(&work, "lru", 16_384);
                ours += hits(&work, "adaptive", 16_384);
            }
            let gain = ours as f64 / lru as f64 - 1.0;
            lines.push((kind, gain));
            assert!(gain > -0.01, "{kind:?} {gain}");
        }
        let of = |kind| lines.iter().find(|l| l.0 == kind).map_or(0.0, |l| l.1);
        assert!(of(Kind::Documents) > 0.3, "{lines:?}");
        assert!(of(Kind::Scans) > 0.15, "{lines:?}");
    }

    #[test]
    fn the_same_input_gives_the_same_decisions() {
        let work = generate(Kind::Mixed, 9, 3_000, 64);
        let once = || crate::lab::run_one("adaptive".parse().unwrap(), &work, 8_000, 512.0).0;
        assert_eq!(once().hits, once().hits);
    }

    #[test]
    fn deep_pages_cost_more() {
        assert_eq!(cost(512, 512.0), 768.0);
        assert_eq!(cost(10, f64::INFINITY), 10.0);
    }
}
