//! What a scheduler does around the tree, and the prompts that benches give it.
#![expect(clippy::unwrap_used, reason = "a bench that cannot go on should stop")]

use std::hint::black_box;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use sapwood::base::{NamespaceId, PageId};
use sapwood::key::Key;
use sapwood::pool::PagePool;
use sapwood::tree::adaptive::AdaptiveConfig;
use sapwood::tree::*;

/// Processor time of this thread: on a shared machine the wall clock measures the neighbours.
pub fn cpu_now() -> Duration {
    let t = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

pub fn mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

pub fn tokens(seed: u64, n: usize) -> Vec<u32> {
    let s = mix(seed);
    (0..n as u64).map(|i| (mix(s.wrapping_add(i)) % 128_000) as u32).collect()
}

pub fn key(tokens: &[u32]) -> Key<'_> {
    Key::new(NamespaceId::DEFAULT, tokens)
}

/// What a scheduler does around the tree.
pub struct Cache {
    pub tree: Tree,
    pub pool: PagePool,
    pages: Vec<PageId>,
    out: InsertOut,
    gone: DeviceEviction,
}

impl Cache {
    pub fn new(page_size: u32, merge: bool, policy: Policy, capacity_tokens: usize) -> Cache {
        let config = TreeConfig { page_size, merge, policy, ..TreeConfig::default() };
        Cache {
            tree: Tree::new(config).unwrap(),
            pool: PagePool::new((capacity_tokens / page_size as usize) as u32),
            pages: Vec::new(),
            out: InsertOut::default(),
            gone: DeviceEviction::default(),
        }
    }

    pub fn find(&mut self, tokens: &[u32]) -> u32 {
        self.pages.clear();
        let (found, lock, _) = self.tree.match_and_lock(key(tokens), &mut self.pages);
        self.tree.unlock(lock).unwrap();
        black_box(&self.pages);
        found.device_pages
    }

    /// Hit, lock, allocate (evicting if need be), insert, unlock.
    pub fn turn(&mut self, tokens: &[u32]) {
        self.pages.clear();
        let (found, lock, _) = self.tree.match_and_lock(key(tokens), &mut self.pages);
        let need = key(tokens).pages(self.tree.page_size()) - found.device_pages;
        let short = need.saturating_sub(self.pool.free_pages());
        if short > 0 {
            self.gone.clear();
            self.tree.evict_device(short, Unbacked::Delete, &mut self.gone);
            self.pool.free(&self.gone.freed_device).unwrap();
        }
        assert!(self.pool.alloc(need, &mut self.pages), "tokens in the tree + free = capacity");
        let opts = InsertOpts { priority: 0, count_hits_from: Some(found.device_pages), names: None };
        self.tree.insert(key(tokens), &self.pages, found.device_pages, opts, &mut self.out).unwrap();
        self.tree.unlock(lock).unwrap();
    }

    pub fn check(&self) {
        let s = self.tree.stats();
        let held = s.device_pages_evictable + s.device_pages_protected;
        assert_eq!(
            held + self.pool.free_pages(),
            self.pool.capacity(),
            "tokens in the tree + free = capacity"
        );
    }
}

/// LRU or the order that learns.
pub fn policy_of(learns: bool, capacity_tokens: usize) -> Policy {
    if learns { Policy::Adaptive(AdaptiveConfig::new(capacity_tokens as u64 / 16, 16)) } else { Policy::Lru }
}

/// Turns of 2,000 chats under 20 system prompts, mixed: of the same chat the same number of turns each, in order.
pub struct Chats {
    /// Each chat as a whole.
    pub rows: Vec<Vec<u32>>,
    /// Chat and turn.
    pub turns: Vec<(usize, usize)>,
}

impl Chats {
    pub const TURNS: usize = 8;
    pub const SYSTEM_LEN: usize = 2_048;
    const TURN_LEN: usize = 200;

    pub fn new() -> Chats {
        let rows: Vec<Vec<u32>> = (0..2_000)
            .map(|chat| {
                let mut row = tokens((2 << 56) + chat % 20, Chats::SYSTEM_LEN);
                row.extend(tokens((3 << 56) + chat, Chats::TURNS * Chats::TURN_LEN));
                row
            })
            .collect();
        let mut order: Vec<(u64, usize)> = (0..rows.len() * Chats::TURNS)
            .map(|i| (mix(mix(7).wrapping_add(i as u64)), i % rows.len()))
            .collect();
        order.sort_unstable();
        let mut done = vec![0; rows.len()];
        let turn = |(_, chat): (u64, usize)| {
            done[chat] += 1;
            (chat, done[chat])
        };
        let turns = order.into_iter().map(turn).collect();
        Chats { rows, turns }
    }

    /// What the request of a turn asks, its answer included.
    pub fn prompt(&self, (chat, turn): (usize, usize)) -> &[u32] {
        &self.rows[chat][..Chats::SYSTEM_LEN + turn * Chats::TURN_LEN]
    }
}

/// Prompts of about 2,048 tokens of which none comes twice.
pub struct Misses {
    prompts: Vec<Vec<u32>>,
    next: usize,
}

impl Misses {
    pub fn new() -> Misses {
        let prompts = (0..256).map(|i| tokens((4 << 56) + i, 1_920 + 16 * (i as usize % 17))).collect();
        Misses { prompts, next: 0 }
    }

    pub fn next(&mut self) -> &[u32] {
        let all = self.prompts.len();
        let prompt = &mut self.prompts[self.next % all];
        prompt[0] = self.next as u32;
        self.next += 1;
        prompt
    }
}

/// All of a session of ten steps of 32 tokens.
pub fn session(which: u64) -> Vec<u32> {
    tokens((5 << 56) + which, 320)
}
