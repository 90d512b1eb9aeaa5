//! What is counted: the workloads of `benches/tree.rs`, small enough for an interpreter of machine code.

use std::hint::black_box;

use sapwood::base::{NamespaceId, PageId};
use sapwood::key::{Key, hash_pages, tokens_from_i64};
use sapwood::pool::PagePool;
use sapwood::tree::adaptive::AdaptiveConfig;
use sapwood::tree::*;

use crate::measured;

/// One count.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// Operations inside [`measured`], to print instructions per operation.
    pub(crate) operations: u32,
    pub(crate) run: fn(),
}

const fn case(name: &'static str, operations: u32, run: fn()) -> Case {
    Case { name, operations, run }
}

pub(crate) const CASES: &[Case] = &[
    case("floor-compare-32768-tokens", 1, floor),
    case("w1-lookup-one-node", 1, || lookup(32_768)),
    case("w1-lookup-128-nodes", 1, || lookup(256)),
    case("w1-rematch-128-nodes", 1, rematch),
    case("w2-chat-turn", 400, || chat_turns(LRU)),
    case("w2-chat-turn-learned", 400, || chat_turns(LEARNED)),
    case("w4-miss-evict-insert", 200, || misses(LRU)),
    case("w4-miss-evict-insert-learned", 200, || misses(LEARNED)),
    case("w5-session-of-10-hops-in-20k-nodes", 500, || sessions(false, LRU)),
    case("w5-session-merged", 500, || sessions(true, LRU)),
    case("w5-session-merged-learned", 500, || sessions(true, LEARNED)),
    case("evict-lru-1k-leaves", 200, || evict(Policy::Lru, 1_000)),
    case("evict-lru-50k-leaves", 200, || evict(Policy::Lru, 50_000)),
    case("evict-learned-1k-leaves", 200, || evict(LEARNED(32_000), 1_000)),
    case("evict-learned-50k-leaves", 200, || evict(LEARNED(1_600_000), 50_000)),
    case("evict-priority-1k-leaves", 200, || evict(Policy::Priority, 1_000)),
    case("evict-priority-50k-leaves", 200, || evict(Policy::Priority, 50_000)),
    case("pool-free-and-alloc-64-pages", 64, pool),
    case("hash-2048-pages", 2_048, hash),
    case("narrow-32768-tokens", 1, narrow),
];

/// The order of eviction of a memory of so many tokens.
type Order = fn(u32) -> Policy;
const LRU: Order = |_| Policy::Lru;
const LEARNED: Order = |tokens| Policy::Adaptive(AdaptiveConfig::new(u64::from(tokens) / 16, 16));

fn mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn tokens(seed: u64, n: usize) -> Vec<u32> {
    let s = mix(seed);
    (0..n as u64).map(|i| (mix(s.wrapping_add(i)) % 128_000) as u32).collect()
}

fn key(tokens: &[u32]) -> Key<'_> {
    Key::new(NamespaceId::DEFAULT, tokens)
}

/// What a scheduler does around the tree.
struct Cache {
    tree: Tree,
    pool: PagePool,
    pages: Vec<PageId>,
    out: InsertOut,
    gone: DeviceEviction,
}

impl Cache {
    fn new(merge: bool, capacity_tokens: u32, order: Order) -> Cache {
        let policy = order(capacity_tokens);
        let config = TreeConfig { page_size: 16, merge, policy, ..TreeConfig::default() };
        Cache {
            tree: Tree::new(config).unwrap(),
            pool: PagePool::new(capacity_tokens / 16),
            pages: Vec::new(),
            out: InsertOut::default(),
            gone: DeviceEviction::default(),
        }
    }

    fn find(&mut self, tokens: &[u32]) -> u32 {
        self.pages.clear();
        let (found, lock, _) = self.tree.match_and_lock(key(tokens), &mut self.pages);
        self.tree.unlock(lock).unwrap();
        black_box(&self.pages);
        found.device_pages
    }

    /// Hit, lock, allocate (evicting if need be), insert, unlock.
    fn turn(&mut self, tokens: &[u32]) {
        self.pages.clear();
        let (found, lock, _) = self.tree.match_and_lock(key(tokens), &mut self.pages);
        let need = key(tokens).pages(16) - found.device_pages;
        let short = need.saturating_sub(self.pool.free_pages());
        if short > 0 {
            self.gone.clear();
            self.tree.evict_device(short, Unbacked::Delete, &mut self.gone);
            self.pool.free(&self.gone.freed_device).unwrap();
        }
        assert!(self.pool.alloc(need, &mut self.pages));
        let opts = InsertOpts { priority: 0, count_hits_from: Some(found.device_pages), names: None };
        self.tree.insert(key(tokens), &self.pages, found.device_pages, opts, &mut self.out).unwrap();
        self.tree.unlock(lock).unwrap();
    }
}

fn floor() {
    let (a, b) = (tokens(1, 32_768), tokens(1, 32_768));
    let list: Vec<PageId> = (0..2_048).map(PageId).collect();
    let mut into = Vec::with_capacity(list.len());
    measured(|| {
        assert!(black_box(&a) == black_box(&b));
        into.extend_from_slice(black_box(&list));
    });
}

fn long_prompt(step: usize) -> (Cache, Vec<u32>) {
    let prompt = tokens(1, 32_768);
    let mut cache = Cache::new(false, 1 << 17, LRU);
    (step..=prompt.len()).step_by(step).for_each(|end| cache.turn(&prompt[..end]));
    (cache, prompt)
}

fn lookup(step: usize) {
    let (mut cache, prompt) = long_prompt(step);
    cache.find(&prompt);
    assert_eq!(measured(|| cache.find(&prompt)), 2_048);
}

fn rematch() {
    let (mut cache, prompt) = long_prompt(256);
    let mut pages = Vec::new();
    let (_, lock, _) = cache.tree.match_and_lock(key(&prompt), &mut pages);
    let found = measured(|| cache.tree.match_from(&lock, key(&prompt), &mut pages).unwrap());
    assert_eq!(found.device_pages, 2_048);
    cache.tree.unlock(lock).unwrap();
}

fn chat_turns(order: Order) {
    let rows: Vec<Vec<u32>> = (0..100u64)
        .map(|s| {
            let mut row = tokens(100 + s % 5, 2_048);
            row.extend(tokens(200 + s, 5 * 200));
            row
        })
        .collect();
    let mut cache = Cache::new(true, 1 << 20, order);
    let turn = |cache: &mut Cache, t: usize| rows.iter().for_each(|row| cache.turn(&row[..2_048 + t * 200]));
    turn(&mut cache, 1);
    measured(|| (2..6).for_each(|t| turn(&mut cache, t)));
}

fn misses(order: Order) {
    let prompts: Vec<Vec<u32>> = (0..464).map(|i| tokens(300 + i, 2_048)).collect();
    let mut cache = Cache::new(true, 1 << 18, order);
    prompts[..264].iter().for_each(|prompt| cache.turn(prompt));
    measured(|| prompts[264..].iter().for_each(|prompt| cache.turn(prompt)));
}

fn sessions(merge: bool, order: Order) {
    let row = |s: u64| tokens(1_000 + s, 320);
    let mut cache = Cache::new(merge, 2_000 * 320 + 1_024, order);
    for s in 0..2_000 {
        let row = row(s);
        (1..=10).for_each(|d| cache.turn(&row[..d * 32]));
    }
    let picked: Vec<Vec<u32>> = (0..500).map(|i| row(mix(i) % 2_000)).collect();
    measured(|| picked.iter().for_each(|row| assert_eq!(cache.find(row), 20)));
}

fn evict(policy: Policy, leaves: u32) {
    let config = TreeConfig { page_size: 16, policy, ..TreeConfig::default() };
    let mut tree = Tree::new(config).unwrap();
    let mut out = InsertOut::default();
    for id in 0..leaves {
        let row: [u32; 32] = std::array::from_fn(|i| id.wrapping_mul(2_654_435_761) ^ i as u32);
        tree.insert(key(&row), &[PageId(2 * id), PageId(2 * id + 1)], 0, InsertOpts::default(), &mut out)
            .unwrap();
    }
    let mut gone = DeviceEviction::default();
    // A call per node, the way an allocator asks.
    let mut call = || {
        tree.evict_device(2, Unbacked::Delete, &mut gone);
    };
    (0..200).for_each(|_| call());
    measured(|| (0..200).for_each(|_| call()));
    assert_eq!(gone.deleted_nodes, 400);
}

fn pool() {
    let mut pool = PagePool::new(1 << 16);
    let mut held = Vec::new();
    assert!(pool.alloc(4_096, &mut held));
    let mut some: Vec<PageId> = held.iter().step_by(61).copied().take(64).collect();
    measured(|| {
        pool.free(&some).unwrap();
        some.clear();
        assert!(pool.alloc(64, &mut some));
    });
}

fn hash() {
    let tokens = tokens(5, 32_768);
    let mut out = Vec::with_capacity(2_048);
    measured(|| hash_pages(key(&tokens), 16, None, &mut out));
    assert_eq!(out.len(), 2_048);
}

fn narrow() {
    let wide: Vec<i64> = tokens(6, 32_768).into_iter().map(i64::from).collect();
    let mut narrow = Vec::with_capacity(wide.len());
    measured(|| tokens_from_i64(black_box(&wide), &mut narrow).unwrap());
}
