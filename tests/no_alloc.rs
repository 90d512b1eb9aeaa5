//! Heap allocations of the tree, counted. A look-up, a lock, a release and a touch make none; an insert makes less
//! than one per new node, amortised, and none per page. And the bytes it keeps per token; `SAPWOOD_MEMORY_NODES` says
//! in a tree of how many nodes (20,000 unless told; the figure of docs/performance/tree.md is for a million).
#![expect(unsafe_code, reason = "a counting allocator is an unsafe trait")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use sapwood::base::{NamespaceId, OpId, PageId};
use sapwood::key::Key;
use sapwood::tree::*;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
    static BYTES: Cell<i64> = const { Cell::new(0) };
}

struct Counting;

fn count() {
    let _ = COUNT.try_with(|c| c.set(c.get() + 1));
}

fn hold(bytes: i64) {
    let _ = BYTES.try_with(|b| b.set(b.get() + bytes));
}

// SAFETY: every call is passed on to the system allocator unchanged; counting touches no memory it manages.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        hold(layout.size() as i64);
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        hold(-(layout.size() as i64));
        // SAFETY: `ptr` came from `alloc` or `realloc` above, which are the system's.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        hold(size as i64 - layout.size() as i64);
        // SAFETY: as above.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(f: impl FnOnce()) -> u64 {
    let before = COUNT.with(Cell::get);
    f();
    COUNT.with(Cell::get) - before
}

fn session(s: u32, turns: u32) -> Vec<u32> {
    (0..turns * 64).map(|i| s * 1_000_000 + i).collect()
}

fn tree(policy: Policy) -> Tree {
    let mut tree = Tree::new(TreeConfig { policy, ..TreeConfig::default() }).unwrap();
    let mut out = InsertOut::default();
    for s in 0..100 {
        for turn in 1..6 {
            let row = session(s, turn);
            let pages: Vec<PageId> = (0..turn * 4).map(|i| PageId(s * 100 + i)).collect();
            let key = Key::new(NamespaceId::DEFAULT, &row);
            let owned = (turn - 1) * 4;
            tree.insert(key, &pages, owned, InsertOpts::default(), &mut out).unwrap();
        }
    }
    tree
}

#[test]
fn look_ups_and_locks_allocate_nothing() {
    for policy in [Policy::Lru, Policy::Lfu, Policy::Priority] {
        let mut tree = tree(policy);
        let rows: Vec<Vec<u32>> = (0..100).map(|s| session(s, 5)).collect();
        let mut pages = Vec::with_capacity(64);
        let mut round = |tree: &mut Tree, cut: usize| {
            for row in &rows {
                pages.clear();
                let key = Key::new(NamespaceId::DEFAULT, &row[..cut]);
                let (found, lock, pin) = tree.match_and_lock(key, &mut pages);
                assert_eq!(found.device_pages as usize, cut / 16);
                assert_eq!(tree.peek(key).device_pages, found.device_pages);
                tree.unlock(lock).unwrap();
                assert!(pin.is_none());
            }
        };
        round(&mut tree, 320);
        assert_eq!(allocations(|| round(&mut tree, 320)), 0);
        // The first partial look-up splits, which grows the arena now and then; after that there is nothing to make.
        round(&mut tree, 200);
        assert_eq!(allocations(|| round(&mut tree, 200)), 0);
        assert_eq!(allocations(|| round(&mut tree, 320)), 0);
    }
}

#[test]
fn an_insert_allocates_less_than_once_a_node_and_never_per_page() {
    let mut tree = tree(Policy::Lru);
    let mut out = InsertOut::default();
    let mut cost = |first: u32, pages: u32| {
        let rows: Vec<Vec<u32>> =
            (first..first + 64).map(|s| (0..pages * 16).map(|i| s * 1_000_000 + i).collect()).collect();
        let ids: Vec<PageId> = (0..pages).map(|i| PageId(1_000_000 + first * 1_000 + i)).collect();
        out.canonical.reserve(1_000);
        allocations(|| {
            for row in &rows {
                let key = Key::new(NamespaceId::DEFAULT, row);
                tree.insert(key, &ids, 0, InsertOpts::default(), &mut out).unwrap();
            }
        })
    };
    let (short, long) = (cost(1_000, 1), cost(2_000, 500));
    // Lists are cut out of segments. 64 prompts of a page take a segment now and then, as the arena and the table double;
    // of 500 pages, eight lists of tokens fit into one. One allocation a node would be 64.
    println!("64 nodes of 1 page: {short} allocations, of 500 pages: {long}");
    assert!(short <= 32, "{short}");
    assert!(long <= 32, "{long}");
}

#[test]
fn a_cache_at_capacity_replaces_without_allocating() {
    let mut tree = tree(Policy::Lru);
    let (mut out, mut gone) = (InsertOut::default(), DeviceEviction::default());
    let mut row: Vec<u32> = vec![0; 320];
    let mut round = |first: u32| {
        for s in first..first + 200 {
            gone.clear();
            tree.evict_device(20, Unbacked::Delete, &mut gone);
            assert_eq!(gone.freed_device.len(), 20);
            row.iter_mut().enumerate().for_each(|(i, t)| *t = s * 1_000_000 + i as u32);
            let key = Key::new(NamespaceId::DEFAULT, &row);
            tree.insert(key, &gone.freed_device, 0, InsertOpts::default(), &mut out).unwrap();
        }
    };
    round(1_000);
    assert_eq!(allocations(|| round(2_000)), 0);
}

/// Sessions of 320 tokens that grow in ten steps, on the device and the host. Keys, both lists, orders and tables.
#[test]
fn a_token_costs_at_most_ten_bytes() {
    let nodes: u32 =
        std::env::var("SAPWOOD_MEMORY_NODES").ok().and_then(|n| n.parse().ok()).unwrap_or(20_000);
    let before = BYTES.with(Cell::get);
    let mut tree = Tree::new(TreeConfig::default()).unwrap();
    let (mut out, mut plan, mut ends) = (InsertOut::default(), BackupPlan::default(), Vec::new());
    let mut row = [0; 320];
    for s in 0..nodes {
        row.iter_mut().zip(0..).for_each(|(t, i)| *t = s ^ (i << 20));
        let mut end = None;
        for step in 1..=10 {
            let pages: Vec<PageId> = (0..2 * step).map(|i| PageId(s * 20 + i)).collect();
            let key = Key::new(NamespaceId::DEFAULT, &row[..step as usize * 32]);
            end =
                Some(tree.insert(key, &pages, 2 * (step - 1), InsertOpts::default(), &mut out).unwrap().node);
        }
        tree.plan_backup(end.unwrap(), &mut plan).unwrap();
        tree.begin_backup(OpId(u64::from(s)), &plan, plan.device_pages.clone()).unwrap();
        ends.clear();
        tree.end_backup(OpId(u64::from(s)), true, &mut ends).unwrap();
    }
    let tokens = u64::from(nodes) * 320;
    let bytes = (BYTES.with(Cell::get) - before) as f64 / tokens as f64;
    println!("{} nodes, {tokens} tokens on device and host: {bytes:.2} bytes a token", tree.stats().nodes);
    assert_eq!(tree.stats().nodes, nodes);
    assert!(bytes <= 10.0, "{bytes}");
}
