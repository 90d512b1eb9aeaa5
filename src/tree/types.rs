//! What goes into the tree and what comes out of it.

use smallvec::SmallVec;

use crate::base::{NodeId, OpId, PageId};
use crate::key::{KeyView, PageHash, PageNames};

use super::component::{Component, ComponentCopy, PerComponent};
use super::policy::Policy;

/// Which nodes may hold a host copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum BackupRule {
    /// Only under a root or a parent that holds one (all write-through kinds).
    #[default]
    BackedUpParent,
    /// Any node (write-back, or no host tier).
    Free,
}

/// What is fixed when a tree is made, except where a setter says otherwise.
#[derive(Clone, Debug)]
pub struct TreeConfig {
    /// Logical units per page, 1 to 512.
    pub page_size: u32,
    /// How keys are counted.
    pub view: KeyView,
    /// Which nodes may hold a host copy ([`Tree::set_rule`](super::Tree::set_rule) changes it).
    pub rule: BackupRule,
    /// Order of eviction, on the device and on the host.
    pub policy: Policy,
    /// Components besides Full.
    pub components: Components,
    /// Inserts through a node until it is due for a backup; 0: never.
    pub write_threshold: u32,
    /// Inserts through a node are counted up to here at least ([`Tree::hits`](super::Tree::hits)); the threshold and some
    /// policies ask for more.
    pub hits_counted: u32,
    /// Keep page hashes ([`Tree::set_hashing`](super::Tree::set_hashing) turns it on later).
    pub hashing: bool,
    /// Record [`TreeEvent`](super::TreeEvent)s; implies `hashing`.
    pub events: bool,
    /// Merge a node into its only child where nothing can tell the difference, so that a growing session stays one
    /// node. An id that is held without a lock or pin may then vanish.
    pub merge: bool,
}

impl Default for TreeConfig {
    fn default() -> Self {
        TreeConfig {
            page_size: 16,
            view: KeyView::Plain,
            rule: BackupRule::BackedUpParent,
            policy: Policy::Lru,
            components: Components::default(),
            write_threshold: 1,
            hits_counted: 0,
            hashing: false,
            events: false,
            merge: true,
        }
    }
}

/// Components besides Full, which is always there.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Components {
    /// Sliding-window attention: the window in pages, rounded up.
    pub window_pages: Option<u32>,
    /// Recurrent state: one slot at the end of a node.
    pub state: bool,
}

/// What a look-up found. Pages are counted from the root; `device_pages + host_pages` is the depth of the match.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Matched {
    /// Deepest node of the match on any tier; the root if nothing matched. In the splitting variants it ends where
    /// the match ends.
    pub node: NodeId,
    /// Deepest node of the match that is on the device; the root if none.
    pub device_node: NodeId,
    /// Pages on the device.
    pub device_pages: u32,
    /// Pages right below them with a published host copy (restorable by a load).
    pub host_pages: u32,
    /// Loads in flight for some of those host pages, each once, top down. Waiting for them is cheaper than loading.
    pub loading: SmallVec<[OpId; 2]>,
    /// Host pages that are being loaded.
    pub loading_pages: u32,
    /// Pages of the key that have a Full copy on some tier. More than the depth of the match if a component cut it.
    pub full_pages: u32,
    /// The component that cut the match, if one did.
    pub cut_by: Option<Component>,
    /// Pages of `node` past the match. Only [`Tree::peek`](super::Tree::peek) reports any: a lock on `node` would
    /// pin that much more than was matched.
    pub spare_pages: u32,
}

impl Matched {
    /// Pages from the root to the end of the match.
    #[must_use]
    pub fn depth_pages(&self) -> u32 {
        self.device_pages + self.host_pages
    }
}

/// Receipt of a device lock: the path from the root to the end of its node stays where it is. Give it back with
/// [`Tree::unlock`](super::Tree::unlock); a receipt that is dropped keeps the path locked for good.
#[must_use = "a dropped receipt keeps its path locked for good"]
#[derive(Debug, PartialEq, Eq)]
pub struct DeviceLock {
    pub(super) node: NodeId,
    /// Pages of each component that it holds, counted back from the end of the node.
    pub(super) held: PerComponent<u32>,
}

impl DeviceLock {
    /// The node whose path is locked. A split never takes this id away from the deep end.
    #[must_use]
    pub fn node(&self) -> NodeId {
        self.node
    }
}

/// Receipt of a host pin: the host copies on the path to its node stay where they are. Give it back with
/// [`Tree::unpin_host`](super::Tree::unpin_host).
#[must_use = "a dropped receipt keeps its path pinned for good"]
#[derive(Debug, PartialEq, Eq)]
pub struct HostPin {
    pub(super) node: NodeId,
    /// A node on the path may have no host copy: any under [`BackupRule::Free`], the last one where a match needs only a
    /// component from the host. A lock keeps such nodes alive.
    pub(super) locked: bool,
    pub(super) held: PerComponent<u32>,
}

impl HostPin {
    /// The node whose host path is pinned.
    #[must_use]
    pub fn node(&self) -> NodeId {
        self.node
    }
}

/// How an insert is counted.
#[derive(Clone, Copy, Debug, Default)]
pub struct InsertOpts<'a> {
    /// Raises the priority of the whole path to at least this.
    pub priority: i32,
    /// Pages from here on count one hit (a request that inserts in chunks counts each page once). `None`: no hit.
    pub count_hits_from: Option<u32>,
    /// Hashes of pages of the key, where the caller has them: these are not computed again.
    pub names: Option<&'a PageNames>,
}

/// Page lists of an insert, cleared by it. Keep one and reuse it.
#[derive(Clone, Debug, Default)]
pub struct InsertOut {
    /// Pages of the caller that the tree did not need; they are the caller's to free, each exactly once.
    pub returned: Vec<PageId>,
    /// The tree's pages for `owned_from..`, one per page of the key: what the caller's table must say now.
    pub canonical: Vec<PageId>,
}

/// What an insert did.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Inserted {
    /// Node that ends where the key's whole pages end; the root for a key shorter than a page.
    pub node: NodeId,
    /// Pages that were on the device already.
    pub matched_pages: u32,
    /// Pages that were only on the host and took the caller's pages.
    pub revived_pages: u32,
    /// Pages that were new.
    pub new_pages: u32,
    /// Deepest node that is due for a backup: at the write threshold, on the device, no host copy.
    pub due: Option<NodeId>,
}

/// Nodes to copy to the host. Reuse one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BackupPlan {
    /// Root first; a chain of parent and child.
    pub nodes: Vec<NodeId>,
    /// Pages of each node.
    pub node_pages: Vec<u32>,
    /// Device pages to read, in order.
    pub device_pages: Vec<PageId>,
    /// Component pages to read.
    pub copies: Vec<ComponentCopy>,
    /// Of a plan without nodes: the node at whose end the component pages are needed.
    pub target: Option<NodeId>,
}

impl BackupPlan {
    /// Empties it, for component pages of `target` alone.
    pub(super) fn clear_for(&mut self, target: NodeId) {
        self.nodes.clear();
        self.node_pages.clear();
        self.device_pages.clear();
        self.copies.clear();
        self.target = Some(target);
    }
}

/// Nodes to copy to the device. Reuse one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadPlan {
    /// Nodes whose host copy is there and whose device copy is not; root first, a chain of parent and child.
    pub nodes: Vec<NodeId>,
    /// Pages of each node.
    pub node_pages: Vec<u32>,
    /// Host pages to read, in order.
    pub host_pages: Vec<PageId>,
    /// The node to be reached; set by the planner.
    pub target: Option<NodeId>,
    /// Component pages to read, but for those that loads in flight bring.
    pub copies: Vec<ComponentCopy>,
    /// Loads in flight that bring nodes of the path or component pages that its end needs; what is loaded becomes usable only
    /// when those have ended well.
    pub joins: Vec<OpId>,
    /// Pages further down, of Full or of a component, that cannot be planned yet: a load above them failed while one below
    /// it goes on. Plan again when that has ended. Normally 0.
    pub later_pages: u32,
}

/// How one backup ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BackupEnd {
    /// The operation.
    pub op: OpId,
    /// What became of it.
    pub outcome: BackupOutcome,
}

/// See [`BackupEnd`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum BackupOutcome {
    /// The host copies are there.
    Published {
        /// Root first, splits since the start included.
        nodes: Vec<NodeId>,
    },
    /// Nothing was published.
    Failed {
        /// Every host page of the operation.
        returned: Vec<PageId>,
    },
}

/// How one load ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LoadEnd {
    /// The operation.
    pub op: OpId,
    /// What became of it.
    pub outcome: LoadOutcome,
}

/// See [`LoadEnd`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LoadOutcome {
    /// The device copies are there.
    Published {
        /// Root first, splits since the start included.
        nodes: Vec<NodeId>,
    },
    /// Nothing was published.
    Failed {
        /// Every device page of the operation.
        returned: Vec<PageId>,
    },
}

/// Why a refill, or part of it, was not kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DropReason {
    /// The anchor is neither the root nor backed up, and the rule asks for it.
    AnchorNotBackedUp,
    /// The anchor was evicted or merged.
    AnchorGone,
    /// A node on the way has a backup in flight; its children wait for that.
    BackupInFlight,
}

/// What a refill did. `refilled + attached + redundant + dropped` is what was passed in, and the last two are in `out`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostInsert {
    /// Deepest node on the path that holds a host copy now; the anchor if none below it does.
    pub node: NodeId,
    /// Pages that became the host copy of nodes that had none.
    pub refilled_pages: u32,
    /// Pages that became a new host-only node.
    pub attached_pages: u32,
    /// Pages whose host copy the tree had already (or has under way).
    pub redundant_pages: u32,
    /// Pages that found no place.
    pub dropped_pages: u32,
    /// Why pages were dropped.
    pub dropped: Option<DropReason>,
}

/// What to do with an eviction victim that has no host copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unbacked {
    /// Delete it.
    Delete,
    /// Leave it and report it, so that the caller can back it up and demote it; delete it if its hits are below the
    /// write threshold (0 under write-back: everything is worth a copy).
    Report,
}

/// One batch of device eviction. Appended to; reuse one and [`clear`](DeviceEviction::clear) it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceEviction {
    /// Device pages to free.
    pub freed_device: Vec<PageId>,
    /// Host pages to free (host copies below deleted nodes).
    pub freed_host: Vec<PageId>,
    /// Device pages whose host copy was kept.
    pub demoted_pages: u32,
    /// Device pages whose node was deleted.
    pub deleted_pages: u32,
    /// Nodes deleted, host-only ones included.
    pub deleted_nodes: u32,
    /// Victims that were left in place, in the order in which they should be backed up and demoted. A node with a
    /// host copy is listed if one without lies below it.
    pub needs_backup: Vec<NodeId>,
    /// Their device pages.
    pub needs_backup_pages: u32,
}

impl DeviceEviction {
    /// Empties the lists, keeps their memory.
    pub fn clear(&mut self) {
        self.freed_device.clear();
        self.freed_host.clear();
        self.needs_backup.clear();
        (self.demoted_pages, self.deleted_pages, self.deleted_nodes, self.needs_backup_pages) = (0, 0, 0, 0);
    }
}

/// What a host eviction or a mirror reclaim did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HostEviction {
    /// Host pages given up.
    pub freed_pages: u32,
    /// Nodes deleted with them.
    pub deleted_nodes: u32,
}

/// What to write to the store for one node: its pages that are not stored yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorePlan {
    /// The node.
    pub node: NodeId,
    /// Place of each page, counted from the root.
    pub positions: Vec<u32>,
    /// Host page of each.
    pub host_pages: Vec<PageId>,
    /// Name of each.
    pub hashes: Vec<PageHash>,
}

/// Sizes and counters. Pages unless said otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TreeStats {
    /// Nodes, the root not counted.
    pub nodes: u32,
    /// On the device, not locked.
    pub device_pages_evictable: u32,
    /// On the device, on a locked path.
    pub device_pages_protected: u32,
    /// Being loaded: owned, not usable.
    pub device_pages_loading: u32,
    /// Published host copies.
    pub host_pages: u32,
    /// Host copies in flight.
    pub host_pages_pending: u32,
    /// Published host copies of nodes that are on the device too.
    pub host_pages_mirrored: u32,
    /// Operations in flight: backups, loads, store writes (count).
    pub ops: u32,
    /// Splits since the tree was made (count).
    pub splits: u64,
    /// Merges since the tree was made (count).
    pub merges: u64,
    /// Refilled pages that were dropped since the tree was made.
    pub refill_pages_dropped: u64,
    /// Page hashes computed since the tree was made.
    pub hashed_pages: u64,
}

impl TreeStats {
    /// Pages that have room on both tiers, copies in flight included.
    pub(super) fn doubled_pages(&self) -> u32 {
        self.host_pages_mirrored + self.host_pages_pending + self.device_pages_loading
    }
}
