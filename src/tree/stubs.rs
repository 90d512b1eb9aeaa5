//! Signatures ahead of their bodies.
use crate::base::{NamespaceId, NodeId, OpId, PageId, Tier, Violation};
use crate::key::{Key, Namespace, NamespaceError, Namespaces, PageHash};

use super::*;

/// The tree.
#[derive(Debug)]
pub struct Tree;

macro_rules! stubs {
    ($($(#[$m:meta])* fn $name:ident $args:tt $(-> $ret:ty)?;)*) => {
        #[expect(unused_variables, reason = "signatures only")]
        impl Tree { $($(#[$m])* pub fn $name $args $(-> $ret)? { unimplemented!() })* }
    };
}

stubs! {
    /// Makes an empty tree.
    fn new(config: TreeConfig) -> Result<Tree, TreeConfigError>;
    /// The root, anchor of every namespace.
    fn root(&self) -> NodeId;
    /// Interns a namespace; the tree owns the table because it needs the seeds.
    fn intern(&mut self, ns: &Namespace) -> Result<NamespaceId, NamespaceError>;
    /// The namespaces of this tree.
    fn namespaces(&self) -> &Namespaces;
    /// Changes the rule; to `BackedUpParent` only if it holds.
    fn set_rule(&mut self, rule: BackupRule) -> Result<(), TreeError>;
    /// Changes the write threshold.
    fn set_write_threshold(&mut self, threshold: u32);
    /// Turns hashes on and fills them in.
    fn set_hashing(&mut self);
    /// Drops everything; pages of both tiers come back.
    fn reset(&mut self, device: &mut Vec<PageId>, host: &mut Vec<PageId>) -> Result<(), TreeError>;
    /// Longest prefix; splits, touches, appends the device pages.
    fn match_prefix(&mut self, key: Key<'_>, pages: &mut Vec<PageId>) -> Matched;
    /// The same and locks it, in one walk.
    fn match_and_lock(&mut self, key: Key<'_>, pages: &mut Vec<PageId>) -> (Matched, DeviceLock, Option<HostPin>);
    /// Longest prefix, read only.
    fn peek(&self, key: Key<'_>) -> Matched;
    /// Locks root..node.
    fn lock(&mut self, node: NodeId) -> Result<DeviceLock, TreeError>;
    /// Gives a lock back.
    fn unlock(&mut self, lock: DeviceLock) -> Result<(), TreeError>;
    /// Pins the host copies of root..node.
    fn pin_host(&mut self, node: NodeId) -> Result<HostPin, TreeError>;
    /// Gives a pin back.
    fn unpin_host(&mut self, pin: HostPin) -> Result<(), TreeError>;
    /// Hands pages over.
    fn insert(&mut self, key: Key<'_>, pages: &[PageId], owned_from: u32, opts: InsertOpts, out: &mut InsertOut) -> Result<Inserted, TreeError>;
    /// What to back up so that `node` is; empty if it is or will be.
    fn plan_backup(&self, node: NodeId, plan: &mut BackupPlan) -> Result<(), TreeError>;
    /// Commits a plan.
    fn begin_backup(&mut self, op: OpId, plan: &BackupPlan, host_pages: Vec<PageId>) -> Result<(), (TreeError, Vec<PageId>)>;
    /// Ends a backup; others that waited for it may end too.
    fn end_backup(&mut self, op: OpId, ok: bool, out: &mut Vec<BackupEnd>) -> Result<(), TreeError>;
    /// What to load so that `node` is on the device.
    fn plan_load(&self, node: NodeId, plan: &mut LoadPlan) -> Result<(), TreeError>;
    /// Commits a plan.
    fn begin_load(&mut self, op: OpId, plan: &LoadPlan, device_pages: Vec<PageId>) -> Result<(), (TreeError, Vec<PageId>)>;
    /// Ends a load; others that waited for it may end too.
    fn end_load(&mut self, op: OpId, ok: bool, out: &mut Vec<LoadEnd>) -> Result<(), TreeError>;
    /// Takes pages that came from the store.
    fn insert_host(&mut self, anchor: NodeId, rest: Key<'_>, host_pages: &[PageId], hashes: &[PageHash], out: &mut Vec<PageId>) -> Result<HostInsert, TreeError>;
    /// Evicts device pages, exactly `want_pages` if there are as many.
    fn evict_device(&mut self, want_pages: u32, unbacked: Unbacked, out: &mut DeviceEviction);
    /// Frees the device copy of a backed-up device leaf.
    fn demote(&mut self, node: NodeId, out: &mut DeviceEviction) -> Result<(), TreeError>;
    /// Deletes a device leaf and its host-only subtree.
    fn delete_leaf(&mut self, node: NodeId, out: &mut DeviceEviction) -> Result<(), TreeError>;
    /// Evicts host-only pages.
    fn evict_host(&mut self, want_pages: u32, out: &mut Vec<PageId>) -> HostEviction;
    /// Gives up host copies of nodes that are on the device too.
    fn reclaim_mirrors(&mut self, want_pages: u32, out: &mut Vec<PageId>) -> HostEviction;
    /// Page hashes of a node.
    fn hashes(&self, node: NodeId) -> Result<&[PageHash], TreeError>;
    /// Hash of the last page of a node; `None` for the root.
    fn last_hash(&self, node: NodeId) -> Result<Option<PageHash>, TreeError>;
    /// Pages from the root to the end of a node.
    fn depth_pages(&self, node: NodeId) -> Result<u32, TreeError>;
    /// Pages of the node itself.
    fn node_pages(&self, node: NodeId) -> Result<u32, TreeError>;
    /// Raw tokens of a node (one more than its units in the bigram view).
    fn tokens(&self, node: NodeId) -> Result<&[u32], TreeError>;
    /// Namespace of a node; `None` for the root.
    fn namespace_of(&self, node: NodeId) -> Result<Option<NamespaceId>, TreeError>;
    /// Device pages of a node; empty if it has no published device copy.
    fn device_pages(&self, node: NodeId) -> Result<&[PageId], TreeError>;
    /// Host pages of a node; empty if it has no published host copy.
    fn host_pages(&self, node: NodeId) -> Result<&[PageId], TreeError>;
    /// True for the root and for nodes with a published host copy.
    fn is_backed_up(&self, node: NodeId) -> Result<bool, TreeError>;
    /// True for the root and for nodes with a published device copy.
    fn is_on_device(&self, node: NodeId) -> Result<bool, TreeError>;
    /// Parent; `None` for the root.
    fn parent(&self, node: NodeId) -> Result<Option<NodeId>, TreeError>;
    /// Starts a store write; pins the host copies.
    fn begin_store(&mut self, op: OpId, node: NodeId) -> Result<StorePlan, TreeError>;
    /// Ends a store write: one outcome per page of the plan. Returns the pages that are stored now.
    fn end_store(&mut self, op: OpId, stored: &[bool]) -> Result<u32, TreeError>;
    /// True if every page of the node is in the store.
    fn is_stored(&self, node: NodeId) -> Result<bool, TreeError>;
    /// Every page that the tree owns on a tier, those of operations in flight included.
    fn for_each_page(&self, tier: Tier, f: impl FnMut(NodeId, PageId));
    /// Sizes and counters.
    fn stats(&self) -> TreeStats;
    /// Every broken rule.
    fn sanity(&self) -> Vec<Violation>;
    /// Text dump.
    fn dump_text(&self) -> String;
    /// Graphviz dump.
    fn dump_dot(&self) -> String;
}
