//! sgl#38371, sgl#38454, omni#1723, sgl#14339: every eviction call built a heap over all leaves; with 41,000 of them the
//! scheduler spent 95 % of its time there. Counted here: how often the policy is asked for a key.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::rig::{P, key};
use sapwood::base::PageId;
use sapwood::tree::*;

#[derive(Debug, Default)]
struct Counting(AtomicU64);

impl EvictionPolicy for Counting {
    fn key(&self, facts: &NodeFacts) -> (u64, u64) {
        self.0.fetch_add(1, Ordering::Relaxed);
        (0, facts.used)
    }
}

/// Keys asked for per call that evicts one page and inserts one.
fn keys_per_call(leaves: u32) -> f64 {
    let policy = Arc::new(Counting::default());
    let config = TreeConfig { page_size: P, policy: Policy::Custom(policy.clone()), ..TreeConfig::default() };
    let mut tree = Tree::new(config).unwrap();
    let mut out = InsertOut::default();
    let mut put = |tree: &mut Tree, id: u32, page: PageId| {
        let row = [id, 1, 2, 3];
        tree.insert(key(&row), &[page], 0, InsertOpts::default(), &mut out).unwrap();
    };
    (0..leaves).for_each(|id| put(&mut tree, id, PageId(id)));
    let before = policy.0.load(Ordering::Relaxed);
    let mut gone = DeviceEviction::default();
    for call in 0..500 {
        gone.clear();
        tree.evict_device(1, Unbacked::Delete, &mut gone);
        // Least recently used: in order of insertion.
        assert_eq!(gone.freed_device, [PageId(call)]);
        put(&mut tree, leaves + call, PageId(call));
    }
    (policy.0.load(Ordering::Relaxed) - before) as f64 / 500.0
}

#[test]
fn a_call_costs_the_same_with_fifty_thousand_leaves() {
    let (few, many) = (keys_per_call(1_000), keys_per_call(50_000));
    assert!(many <= 8.0 && many <= few, "{few} keys a call with 1,000 leaves, {many} with 50,000");
}
