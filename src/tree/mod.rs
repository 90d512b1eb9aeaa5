//! Floor 2: the radix tree. Which prefix lies where, who holds it, who goes next.
//!
//! The tree allocates no page and moves no byte: it is given pages and gives pages back. Whatever needs pages is a plan
//! and a commit. It reads no clock; an integer ticks per call. Every refusal comes before any mutation.
//!
//! | file | decides |
//! |---|---|
//! | `node`, `rows` | what a node is; runs, and their memory |
//! | `walk` | look-ups |
//! | `shape` | split, merge, removal: the only writer of links between nodes |
//! | `lock` | locks and pins |
//! | `order` | who can be evicted, in which order |
//! | `insert` | hand-over of device pages |
//! | `backup` | host copies: the only writer of host presence, and the backed-up-parent rule |
//! | `load` | the only writer of device presence; loads from the host |
//! | `refill` | hand-over of pages that came from a store |
//! | `evict`, `evict_plan` | device and host eviction, at once or as plan and commit |
//! | `session` | what conversations will come back for |
//! | `waiting` | what waiting requests will use |
//! | `kept` | what goes last for the sake of both |
//! | `store` | hashes and store presence |
//! | `component` | windows and states |
//! | `event` | the stream of residency |
//! | `sanity`, `dump` | every broken rule; pictures |

pub mod adaptive;
mod backup;
mod component;
mod dump;
mod error;
mod event;
mod evict;
mod evict_plan;
mod insert;
mod kept;
mod load;
mod lock;
mod node;
mod op;
mod order;
mod policy;
mod refill;
mod rows;
mod sanity;
mod session;
mod shape;
mod store;
#[cfg(test)]
mod tests;
mod types;
mod waiting;
mod walk;

pub use component::{Component, ComponentCopy, ComponentPages, ComponentPut, InsertComponents, PerComponent};
pub use error::{TreeConfigError, TreeError};
pub use event::TreeEvent;
pub use evict_plan::{EvictionPlan, Fate, Victim};
pub use policy::{EvictionPolicy, NodeFacts, Policy};
pub use session::SessionId;
pub use types::*;
pub use waiting::WaiterId;

use crate::base::limits::PAGE_SIZE_MAX;
use crate::base::tag_table::TagTable;
use crate::base::{NamespaceId, NodeId, PageId, Tier};
use crate::key::{Key, KeyView, Namespace, NamespaceError, Namespaces, PageHash};

use node::{Arena, NO_PAGE, ROOT, Residency};
use op::Ops;
use order::Orders;
use session::Sessions;
use waiting::Waiting;

/// A prefix tree over one set of namespaces and one device pool. One owner drives it; nothing is re-entrant.
#[derive(Clone, Debug)]
pub struct Tree {
    page_size: u32,
    view: KeyView,
    rule: BackupRule,
    write_threshold: u32,
    hits_cap: u32,
    merge: bool,
    hashing: bool,
    arena: Arena,
    table: TagTable,
    orders: Orders,
    ops: Ops,
    namespaces: Namespaces,
    sessions: Sessions,
    waiting: Waiting,
    stats: TreeStats,
    /// Pages of a match that must have the component, by component; 0: not configured.
    spans: PerComponent<u32>,
    /// Pages in place, by component and tier (device, host).
    component_pages: PerComponent<[u32; 2]>,
    /// Component pages to hand out.
    freed: ComponentPages,
    with_events: bool,
    events: Vec<TreeEvent>,
    /// What the adaptive order was asked about last, to be spared by `reclaim_mirrors`.
    ahead: Vec<NodeId>,
    /// Path of the walk in progress; kept for its memory.
    path: Vec<u32>,
    /// Hashes of the insert in progress; kept for its memory.
    hashed: Vec<PageHash>,
}

impl Tree {
    /// An empty tree.
    ///
    /// # Errors
    /// A configuration that makes no sense.
    pub fn new(config: TreeConfig) -> Result<Tree, TreeConfigError> {
        if config.page_size == 0 || config.page_size > PAGE_SIZE_MAX {
            return Err(TreeConfigError::PageSize(config.page_size));
        }
        if config.components.window_pages == Some(0) {
            return Err(TreeConfigError::Window);
        }
        if config.components.state && config.view == KeyView::Bigram {
            return Err(TreeConfigError::BigramState);
        }
        let spans = [config.components.window_pages.unwrap_or(0), u32::from(config.components.state)];
        let hits_cap = config.policy.hits_cap().max(config.write_threshold).max(config.hits_counted);
        Ok(Tree {
            page_size: config.page_size,
            view: config.view,
            rule: config.rule,
            write_threshold: config.write_threshold,
            hits_cap,
            merge: config.merge,
            hashing: config.hashing || config.events,
            arena: Arena::new(),
            table: TagTable::default(),
            orders: Orders::new(config.policy, spans != [0; 2]),
            ops: Ops::default(),
            namespaces: Namespaces::new(),
            sessions: Sessions::default(),
            waiting: Waiting::default(),
            stats: TreeStats::default(),
            spans,
            component_pages: [[0; 2]; 2],
            freed: ComponentPages::default(),
            with_events: config.events,
            events: Vec::new(),
            ahead: Vec::new(),
            path: Vec::new(),
            hashed: Vec::new(),
        })
    }

    /// Units per page.
    #[must_use]
    pub fn page_size(&self) -> u32 {
        self.page_size
    }

    /// How keys are counted.
    #[must_use]
    pub fn view(&self) -> KeyView {
        self.view
    }

    /// Which nodes may hold a host copy.
    #[must_use]
    pub fn rule(&self) -> BackupRule {
        self.rule
    }

    /// The root: an anchor of every namespace, on the device and backed up by definition, without pages.
    #[must_use]
    pub fn root(&self) -> NodeId {
        self.arena.id(ROOT)
    }

    /// The id of a namespace, made on first use. The tree owns the table because hash chains start from its seeds.
    ///
    /// # Errors
    /// A field too long, or too many namespaces.
    pub fn intern(&mut self, ns: &Namespace) -> Result<NamespaceId, NamespaceError> {
        self.namespaces.intern(ns)
    }

    /// The namespaces of this tree.
    #[must_use]
    pub fn namespaces(&self) -> &Namespaces {
        &self.namespaces
    }

    /// Changes the rule.
    ///
    /// # Errors
    /// To `BackedUpParent` while a node has a host copy below a parent whose copy is not there, or awaits one below a parent
    /// that does not: names the node. O(nodes).
    pub fn set_rule(&mut self, rule: BackupRule) -> Result<(), TreeError> {
        if rule == BackupRule::BackedUpParent {
            for at in self.arena.live().filter(|&at| at != ROOT) {
                let node = &self.arena.nodes[at as usize];
                let parent = &self.arena.nodes[node.parent as usize];
                // A parent's copy in flight may fail; what is there already can not wait for it.
                let fits = match node.host {
                    Residency::Absent => true,
                    Residency::Pending => parent.host != Residency::Absent,
                    Residency::Present => parent.host == Residency::Present,
                };
                if !fits {
                    return Err(TreeError::RuleNotMet(self.arena.id(at)));
                }
            }
        }
        self.rule = rule;
        for at in 1..self.arena.nodes.len() as u32 {
            if self.arena.is_live(at) {
                self.refresh(at);
            }
        }
        Ok(())
    }

    /// Changes how many inserts make a node due for a backup (0: never), and up to which number they are counted at least.
    /// Hits counted so far stay.
    pub fn set_write_threshold(&mut self, threshold: u32, hits_counted: u32) {
        self.write_threshold = threshold;
        self.hits_cap = self.orders.policy.hits_cap().max(threshold).max(hits_counted);
    }

    /// Inserts through a node that were counted, up to what somebody wants to know.
    ///
    /// # Errors
    /// Unknown node.
    pub fn hits(&self, node: NodeId) -> Result<u32, TreeError> {
        Ok(self.arena.nodes[self.slot(node)? as usize].hits)
    }

    /// Drops every node; the pages of both tiers are appended to the lists (those of components: `drain_freed`). Ids, locks and pins of before are void.
    ///
    /// # Errors
    /// Operations in flight own pages; they must end first.
    pub fn reset(&mut self, device: &mut Vec<PageId>, host: &mut Vec<PageId>) -> Result<(), TreeError> {
        if self.stats.ops > 0 {
            return Err(TreeError::OpsInFlight(self.stats.ops));
        }
        self.for_each_page(Tier::Device, |_, page| device.push(page));
        self.for_each_page(Tier::Host, |_, page| host.push(page));
        for at in 1..self.arena.nodes.len() as u32 {
            if self.arena.is_live(at) {
                self.drop_components(at, Tier::Device);
                self.drop_components(at, Tier::Host);
            }
        }
        self.arena.clear();
        self.sessions.forget_ends();
        self.waiting.forget_ends();
        if self.with_events {
            self.events.push(TreeEvent::Cleared);
        }
        self.table = TagTable::default();
        let tick = self.orders.tick;
        let policy = std::mem::take(&mut self.orders.policy);
        self.orders = Orders { tick, ..Orders::new(policy, self.has_components()) };
        let TreeStats { splits, merges, refill_pages_dropped, hashed_pages, .. } = self.stats;
        self.stats = TreeStats { splits, merges, refill_pages_dropped, hashed_pages, ..TreeStats::default() };
        Ok(())
    }

    /// Pages from the root to the end of a node.
    ///
    /// # Errors
    /// Unknown node.
    pub fn depth_pages(&self, node: NodeId) -> Result<u32, TreeError> {
        Ok(self.arena.nodes[self.slot(node)? as usize].end())
    }

    /// Pages of the node itself.
    ///
    /// # Errors
    /// Unknown node.
    pub fn node_pages(&self, node: NodeId) -> Result<u32, TreeError> {
        Ok(self.arena.nodes[self.slot(node)? as usize].pages)
    }

    /// Pages from the root to the end of a node.
    ///
    /// # Errors
    /// Unknown node.
    pub fn pages_to_end(&self, node: NodeId) -> Result<u32, TreeError> {
        Ok(self.arena.nodes[self.slot(node)? as usize].end())
    }

    /// Raw tokens of a node: one more than its units in the bigram view.
    ///
    /// # Errors
    /// Unknown node.
    pub fn tokens(&self, node: NodeId) -> Result<&[u32], TreeError> {
        let at = self.slot(node)?;
        Ok(if at == ROOT { &[] } else { self.tokens_of(at) })
    }

    /// Namespace of a node; `None` for the root.
    ///
    /// # Errors
    /// Unknown node.
    pub fn namespace_of(&self, node: NodeId) -> Result<Option<NamespaceId>, TreeError> {
        let at = self.slot(node)?;
        Ok((at != ROOT).then(|| self.arena.nodes[at as usize].ns))
    }

    /// Parent of a node; `None` for the root.
    ///
    /// # Errors
    /// Unknown node.
    pub fn parent(&self, node: NodeId) -> Result<Option<NodeId>, TreeError> {
        let at = self.slot(node)?;
        Ok((at != ROOT).then(|| self.arena.id(self.arena.nodes[at as usize].parent)))
    }

    /// Device pages of a node; empty if it has no published device copy.
    ///
    /// # Errors
    /// Unknown node.
    pub fn device_pages(&self, node: NodeId) -> Result<&[PageId], TreeError> {
        let n = &self.arena.nodes[self.slot(node)? as usize];
        let there = n.device == Residency::Present && n.pages > 0;
        Ok(if there { self.arena.pages(node.index, Tier::Device) } else { &[] })
    }

    /// Host pages of a node; empty if it has no published host copy.
    ///
    /// # Errors
    /// Unknown node.
    pub fn host_pages(&self, node: NodeId) -> Result<&[PageId], TreeError> {
        let n = &self.arena.nodes[self.slot(node)? as usize];
        let there = n.host == Residency::Present && n.pages > 0;
        Ok(if there { self.arena.pages(node.index, Tier::Host) } else { &[] })
    }

    /// Tick of the last use of a node: greater is later, and nothing else follows from it.
    ///
    /// # Errors
    /// Unknown node.
    pub fn last_used(&self, node: NodeId) -> Result<u64, TreeError> {
        Ok(self.arena.nodes[self.slot(node)? as usize].tick)
    }

    /// True for the root and for nodes with a published host copy.
    ///
    /// # Errors
    /// Unknown node.
    pub fn is_backed_up(&self, node: NodeId) -> Result<bool, TreeError> {
        Ok(self.arena.nodes[self.slot(node)? as usize].host == Residency::Present)
    }

    /// True for the root and for nodes with a published device copy.
    ///
    /// # Errors
    /// Unknown node.
    pub fn is_on_device(&self, node: NodeId) -> Result<bool, TreeError> {
        Ok(self.arena.nodes[self.slot(node)? as usize].device == Residency::Present)
    }

    /// Every page that the tree owns on the device or the host, with the node it lies under, those of operations in
    /// flight included. Slot order.
    pub fn for_each_page(&self, tier: Tier, mut f: impl FnMut(NodeId, PageId)) {
        for at in self.arena.live().filter(|&at| at != ROOT) {
            let node = &self.arena.nodes[at as usize];
            let state = match tier {
                Tier::Device => node.device,
                Tier::Host => node.host,
                Tier::Store => return,
            };
            if state != Residency::Absent {
                self.arena.pages(at, tier).iter().for_each(|&page| f(self.arena.id(at), page));
            }
        }
    }

    /// What the scheduler knows of the use of a prefix that ends with `node`. Void under any policy but
    /// [`Policy::Adaptive`]. O(1).
    ///
    /// # Errors
    /// Unknown node, the root.
    pub fn hint(&mut self, node: NodeId, hint: adaptive::Hint) -> Result<(), TreeError> {
        let at = self.slot_below_root(node)?;
        self.orders.hint(&mut self.arena, at, hint);
        Ok(())
    }

    /// What the adaptive order says about itself; `None` under any other policy.
    #[must_use]
    pub fn adaptive_stats(&self) -> Option<adaptive::AdaptiveStats> {
        self.orders.adaptive.as_ref().map(|a| a.stats())
    }

    /// Sizes and counters. O(1).
    #[must_use]
    pub fn stats(&self) -> TreeStats {
        TreeStats { nodes: self.arena.len() as u32 - 1, ..self.stats }
    }

    // ---- shared by the files of this module ----

    fn slot(&self, id: NodeId) -> Result<u32, TreeError> {
        self.arena.slot(id).ok_or(TreeError::UnknownNode(id))
    }

    /// Slot of a node that is not the root.
    fn slot_below_root(&self, id: NodeId) -> Result<u32, TreeError> {
        match self.slot(id)? {
            ROOT => Err(TreeError::Root),
            at => Ok(at),
        }
    }

    #[inline]
    fn tokens_of(&self, at: u32) -> &[u32] {
        let node = &self.arena.nodes[at as usize];
        let p = self.page_size as usize;
        let (from, to) = (node.from as usize * p, (node.from + node.pages) as usize * p);
        self.arena.tokens(node.run, from..to + self.view.overlap())
    }

    fn refresh(&mut self, at: u32) {
        self.orders.refresh(&mut self.arena, self.rule, at);
    }

    /// Starts a mutating call.
    fn tick(&mut self) {
        self.orders.tick += 1;
    }

    /// Marks the path to a node as just used, deepest first.
    fn touch_path(&mut self, from: u32) {
        let mut at = from;
        while at != ROOT {
            self.orders.touch(&mut self.arena, at);
            at = self.arena.nodes[at as usize].parent;
        }
    }

    /// Adds (or takes) a node's pages to the counters of its present state. Every change of state is taken, changed,
    /// added: no counter can drift from the states.
    fn account(&mut self, at: u32, add: bool) {
        let node = &self.arena.nodes[at as usize];
        let s = &mut self.stats;
        let pages = node.pages;
        let count = |counter: &mut u32| *counter = if add { *counter + pages } else { *counter - pages };
        match node.device {
            Residency::Present if node.locks > 0 => count(&mut s.device_pages_protected),
            Residency::Present => count(&mut s.device_pages_evictable),
            Residency::Pending => count(&mut s.device_pages_loading),
            Residency::Absent => {}
        }
        match node.host {
            Residency::Present => {
                count(&mut s.host_pages);
                if node.device == Residency::Present {
                    count(&mut s.host_pages_mirrored);
                }
            }
            Residency::Pending => count(&mut s.host_pages_pending),
            Residency::Absent => {}
        }
    }

    /// Refuses a key that this tree cannot hold.
    fn check_key(&self, key: Key<'_>) -> Result<(), TreeError> {
        if key.view != self.view {
            return Err(TreeError::ViewMismatch);
        }
        if self.namespaces.get(key.ns).is_none() {
            return Err(TreeError::UnknownNamespace(key.ns));
        }
        Ok(())
    }
}

/// Overwrites a page list that has been given away, so that a stale read shows.
fn forget_pages(list: &mut [PageId], into: &mut Vec<PageId>) {
    into.extend_from_slice(list);
    list.fill(NO_PAGE);
}
