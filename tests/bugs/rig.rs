//! A tree with a device pool and a host pool. Letters are page contents: `"ABC"` is a prefix of three pages.

use sapwood::base::{NamespaceId, OpId, PageId, Tier};
use sapwood::key::{Key, hash_pages};
use sapwood::pool::{Ledger, PagePool};
use sapwood::tree::*;

pub(crate) const P: u32 = 4;

pub(crate) fn row(text: &str) -> Vec<u32> {
    text.bytes().flat_map(|b| (0..P).map(move |i| u32::from(b) * 10 + i)).collect()
}

pub(crate) fn key(tokens: &[u32]) -> Key<'_> {
    Key::new(NamespaceId::DEFAULT, tokens)
}

pub(crate) struct Rig {
    pub(crate) tree: Tree,
    pub(crate) device: PagePool,
    pub(crate) host: PagePool,
    next_op: u64,
}

impl Rig {
    pub(crate) fn new(rule: BackupRule, device: u32, host: u32) -> Rig {
        Rig::with(TreeConfig { page_size: P, rule, ..TreeConfig::default() }, device, host)
    }

    pub(crate) fn with(config: TreeConfig, device: u32, host: u32) -> Rig {
        let tree = Tree::new(config).unwrap();
        Rig { tree, device: PagePool::new(device), host: PagePool::new(host), next_op: 0 }
    }

    pub(crate) fn op(&mut self) -> OpId {
        self.next_op += 1;
        OpId(self.next_op)
    }

    /// Inserts a prefix the way a request does: hit, lock, allocate, insert, unlock.
    pub(crate) fn ins(&mut self, text: &str) -> NodeIdOf {
        let tokens = row(text);
        self.insert(key(&tokens))
    }

    pub(crate) fn insert(&mut self, key: Key<'_>) -> NodeIdOf {
        let mut pages = Vec::new();
        let (found, lock, pin) = self.tree.match_and_lock(key, &mut pages);
        let need = key.pages(self.tree.page_size()) - found.device_pages;
        assert!(self.device.alloc(need, &mut pages), "the story leaves room");
        let mut out = InsertOut::default();
        let opts = InsertOpts { priority: 0, count_hits_from: Some(0), names: None };
        let done = self.tree.insert(key, &pages, found.device_pages, opts, &mut out).unwrap();
        self.device.free(&out.returned).unwrap();
        self.tree.unlock(lock).unwrap();
        pin.into_iter().for_each(|pin| self.tree.unpin_host(pin).unwrap());
        self.check();
        done.node
    }

    pub(crate) fn hit(&self, text: &str) -> Matched {
        self.tree.peek(key(&row(text)))
    }

    pub(crate) fn plan(&self, node: NodeIdOf) -> BackupPlan {
        let mut plan = BackupPlan::default();
        self.tree.plan_backup(node, &mut plan).unwrap();
        plan
    }

    pub(crate) fn begin_backup(&mut self, node: NodeIdOf) -> OpId {
        let plan = self.plan(node);
        let mut pages = Vec::new();
        assert!(self.host.alloc(plan.device_pages.len() as u32, &mut pages), "the story leaves room");
        let op = self.op();
        self.tree.begin_backup(op, &plan, pages).unwrap();
        self.check();
        op
    }

    pub(crate) fn end_backup(&mut self, op: OpId, ok: bool) -> Vec<BackupEnd> {
        let mut out = Vec::new();
        self.tree.end_backup(op, ok, &mut out).unwrap();
        for end in &out {
            if let BackupOutcome::Failed { returned } = &end.outcome {
                self.host.free(returned).unwrap();
            }
        }
        self.check();
        out
    }

    pub(crate) fn backup(&mut self, node: NodeIdOf) {
        let op = self.begin_backup(node);
        self.end_backup(op, true);
    }

    pub(crate) fn evict(&mut self, want: u32, unbacked: Unbacked) -> DeviceEviction {
        let mut out = DeviceEviction::default();
        self.tree.evict_device(want, unbacked, &mut out);
        self.free(&out);
        self.check();
        out
    }

    pub(crate) fn free(&mut self, out: &DeviceEviction) {
        self.device.free(&out.freed_device).unwrap();
        self.host.free(&out.freed_host).unwrap();
    }

    pub(crate) fn evict_host(&mut self, want: u32) -> u32 {
        let mut freed = Vec::new();
        self.tree.evict_host(want, &mut freed);
        self.host.free(&freed).unwrap();
        self.check();
        freed.len() as u32
    }

    /// A store delivers the pages of `key` below `anchor`, which ends at page `depth`.
    pub(crate) fn refill(&mut self, anchor: NodeIdOf, depth: u32, key: Key<'_>) -> HostInsert {
        let p = self.tree.page_size();
        let rest = key.from_page(depth, p);
        let mut pages = Vec::new();
        assert!(self.host.alloc(rest.pages(p), &mut pages), "the story leaves room");
        let mut hashes = Vec::new();
        if self.tree.hashing() {
            hash_pages(key, p, self.tree.namespaces().seed(key.ns), &mut hashes);
            hashes.drain(..depth as usize);
        }
        let mut back = Vec::new();
        let done = self.tree.insert_host(anchor, rest, &pages, &hashes, &mut back).unwrap();
        self.host.free(&back).unwrap();
        self.check();
        done
    }

    /// I1 to I6: nothing broken in the tree, every page with one owner.
    pub(crate) fn check(&self) {
        let found = self.tree.sanity();
        assert!(found.is_empty(), "{found:#?}\n{}", self.tree.dump_text());
        for (tier, pool) in [(Tier::Device, &self.device), (Tier::Host, &self.host)] {
            let mut ledger = Ledger::new();
            self.tree.for_each_page(tier, |id, page| ledger.own(page, format!("node {id}")));
            assert_eq!(ledger.check(pool), []);
        }
    }
}

pub(crate) type NodeIdOf = sapwood::base::NodeId;

pub(crate) fn pages(ids: std::ops::Range<u32>) -> Vec<PageId> {
    ids.map(PageId).collect()
}
