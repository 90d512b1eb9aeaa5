//! The tree itself, run on a workload: one page is one token, so a request costs about a microsecond and no byte is moved,
//! while nodes, splits, merges, locks and orders are those of service.

use std::collections::VecDeque;

use sapwood::base::{NamespaceId, PageId};
use sapwood::key::{Key, KeyView};
use sapwood::pool::PagePool;
use sapwood::tree::adaptive::{AdaptiveStats, Hint, SIGNAL_NAMES};
use sapwood::tree::{DeviceEviction, InsertOpts, InsertOut, Policy, Tree, TreeConfig, Unbacked, WaiterId};

use super::sim::{Outcome, cost};
use super::work::{Job, Work};

/// The pages of each node as tokens.
pub(crate) struct Text {
    /// First token by node.
    first: Vec<u32>,
}

impl Text {
    pub(crate) fn new(work: &Work) -> Text {
        let mut next = 1;
        let mut take = |pages: u32| {
            let first = next;
            next += pages;
            first
        };
        Text { first: work.nodes.iter().map(|node| take(node.pages)).collect() }
    }

    /// The prompt of a request.
    pub(crate) fn write(&self, work: &Work, job: &Job, out: &mut Vec<u32>) {
        out.clear();
        for step in work.path(job) {
            let first = self.first[step.node as usize];
            out.extend(first..first + step.pages);
        }
    }
}

pub(crate) fn key(tokens: &[u32]) -> Key<'_> {
    Key { ns: NamespaceId::DEFAULT, tokens, view: KeyView::Plain }
}

/// Tokens of a prompt that are computed, and published, at a time. What the order learns must not hang on it.
const CHUNK_TOKENS: u32 = 2_048;

/// One tier and a tree.
struct Cache {
    tree: Tree,
    pool: PagePool,
    pages: Vec<PageId>,
    out: InsertOut,
    gone: DeviceEviction,
}

impl Cache {
    /// Serves a request, in chunks of so many pages; pages hit.
    fn serve(&mut self, tokens: &[u32], output_tokens: u32, chunk: u32, waiter: Option<WaiterId>) -> u32 {
        self.pages.clear();
        let (found, mut lock, _) = self.tree.match_and_lock(key(tokens), &mut self.pages);
        if let Some(waiter) = waiter {
            self.tree.stop_waiting(waiter).expect("it waited until now");
        }
        let mut have = found.device_pages;
        let all = tokens.len() as u32;
        let node = loop {
            let need = chunk.min(all - have);
            let short = need.saturating_sub(self.pool.free_pages());
            if short > 0 {
                self.gone.clear();
                self.tree.evict_device(short, Unbacked::Delete, &mut self.gone);
                self.pool.free(&self.gone.freed_device).expect("the tree owned them");
            }
            assert!(self.pool.alloc(need, &mut self.pages), "pages in the tree + free = capacity");
            let opts = InsertOpts { priority: 0, count_hits_from: Some(have), names: None };
            let tokens = &tokens[..(have + need) as usize];
            let inserted = self
                .tree
                .insert(key(tokens), &self.pages, have, opts, &mut self.out)
                .expect("the look-up was of this tree");
            lock = self.tree.move_lock(lock, inserted.node).map_err(|(error, _)| error).expect("just made");
            have += need;
            // A prompt that is there as a whole is published, too: that is what a request does when it ends.
            if have == all {
                break inserted.node;
            }
        };
        if output_tokens > 0 {
            self.tree.hint(node, Hint::Answered(output_tokens)).expect("just made");
        }
        self.tree.unlock(lock).expect("the lock is of this tree");
        found.device_pages
    }
}

/// Serves the whole workload with `capacity` pages. `ahead`: how many requests wait behind the one that is served, and
/// are told to the order.
pub(crate) fn run(
    work: &Work,
    capacity: u64,
    knee: f64,
    policy: Policy,
    ahead: usize,
) -> (Outcome, Option<AdaptiveStats>) {
    let config = TreeConfig { page_size: 1, policy, ..TreeConfig::default() };
    let mut cache = Cache {
        tree: Tree::new(config).expect("a page of one token is allowed"),
        pool: PagePool::new(capacity as u32),
        pages: Vec::new(),
        out: InsertOut::default(),
        gone: DeviceEviction::default(),
    };
    let text = Text::new(work);
    let mut outcome = Outcome { hits: vec![0; work.jobs.len()], saved: 0.0 };
    let (mut tokens, mut told, mut queue) = (Vec::new(), 0, VecDeque::new());
    for (number, job) in work.jobs.iter().enumerate() {
        while ahead > 0 && told < work.jobs.len().min(number + 1 + ahead) {
            text.write(work, &work.jobs[told], &mut tokens);
            queue.push_back(cache.tree.wait_for(key(&tokens)).expect("a key of this tree"));
            told += 1;
        }
        let waiter = queue.pop_front();
        if u64::from(job.pages) >= capacity || job.pages == 0 {
            if let Some(waiter) = waiter {
                cache.tree.stop_waiting(waiter).expect("it waited until now");
            }
            continue;
        }
        text.write(work, job, &mut tokens);
        let hit = cache.serve(&tokens, job.output_tokens, CHUNK_TOKENS / work.page_tokens, waiter);
        outcome.hits[number] = hit;
        outcome.saved += cost(hit, knee);
    }
    (outcome, cache.tree.adaptive_stats())
}

/// What the order learned, in a line.
pub(crate) fn say(s: &AdaptiveStats) -> String {
    let told = SIGNAL_NAMES.iter().zip(s.spreads).map(|(name, spread)| format!("{name} {spread:.1}"));
    format!(
        "{} leaves, {} ghosts, {} samples (1 in {}), stake {:.2}, hits {} against {} of LRU, fresh gain {:.1} to {:.1}, spread: {}",
        s.leaves[0],
        s.ghosts,
        s.samples,
        1 << s.sample_stage,
        s.stake,
        s.hit_pages,
        s.lru_hit_pages,
        s.gain_fresh.0,
        s.gain_fresh.1,
        told.collect::<Vec<_>>().join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::generate::{Kind, generate};
    use crate::lab::policies;

    /// What is evicted piece by piece, comes back in chunks and goes on differently is still known for what it was: else
    /// LRU looks worse than it is, and the guard does not hold.
    #[test]
    fn the_shadow_hits_what_lru_hits() {
        for (kind, capacity) in
            [(Kind::Chats, 16_384), (Kind::Documents, 16_384), (Kind::Agents, 4_096), (Kind::Noise, 4_096)]
        {
            let work = generate(kind, 3, 6_000, 64);
            let order: policies::Kind = "adaptive".parse().unwrap();
            let (policy, ahead) = policies::live(order, &work, capacity, 512).unwrap();
            let (outcome, stats) = run(&work, capacity, 512.0, policy, ahead);
            let stats = stats.unwrap();
            assert_eq!(outcome.pages(), stats.hit_pages);
            let lru = crate::lab::run_one("lru".parse().unwrap(), &work, capacity, 512.0).0.pages();
            let off = stats.lru_hit_pages as f64 / lru as f64 - 1.0;
            assert!(off.abs() < 0.02, "{kind:?}: {} pages, LRU hits {lru}", stats.lru_hit_pages);
        }
    }
}
