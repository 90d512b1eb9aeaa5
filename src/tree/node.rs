//! Nodes and runs, and the arena that holds them.
//!
//! A **run** is what one insert brought: tokens, and per page a device page, a host page, a hash and a stored mark. A
//! **node** is a range of a run. So a split makes one small node and copies nothing, and a chain that grows by appends
//! stays one run. Nodes of one run always form a path, and they die tail first, so a run shrinks from its end.

use std::ops::Range;

use crate::base::{NamespaceId, NodeId, PageId};
use crate::key::PageHash;

use super::component::{COMPONENTS, Lists};

/// No node, run or operation.
pub(super) const NIL: u32 = u32::MAX;
/// The root's slot.
pub(super) const ROOT: u32 = 0;
/// Stands in a page list where there is no page.
pub(super) const NO_PAGE: PageId = PageId(u32::MAX);

/// Whether a node has a copy on a tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Residency {
    Absent,
    /// An operation in flight owns the pages; nobody may read them.
    Pending,
    Present,
}

/// Which eviction order a node stands in. Each tier has two: what a session will come back for goes after all the rest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Listed {
    Device,
    DeviceKept,
    Host,
    HostKept,
    Nowhere,
}

/// The orders of the device, in the order in which they are emptied.
pub(super) const DEVICE_ORDERS: [Listed; 2] = [Listed::Device, Listed::DeviceKept];
/// Those of the host.
pub(super) const HOST_ORDERS: [Listed; 2] = [Listed::Host, Listed::HostKept];

/// Links of an intrusive list. `newer` leads to the most recently used end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Links {
    pub(super) older: u32,
    pub(super) newer: u32,
}

impl Links {
    pub(super) const NONE: Links = Links { older: NIL, newer: NIL };
}

/// One edge of the tree: two cache lines, of which a look-up, a touch and a lock need the first.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(super) struct Node {
    pub(super) parent: u32,
    pub(super) run: u32,
    /// First page in the run.
    pub(super) from: u32,
    pub(super) pages: u32,
    /// Pages from the root to the start of the node.
    pub(super) depth: u32,
    pub(super) ns: NamespaceId,
    pub(super) generation: u32,
    pub(super) device: Residency,
    pub(super) host: Residency,
    pub(super) listed: Listed,
    pub(super) mirrored: bool,
    pub(super) order: Links,
    /// Own locks plus children with any: a lock walks up only to the first node that had one.
    pub(super) locks: u32,
    /// The same for host pins.
    pub(super) pins: u32,
    pub(super) tick: u64,
    /// Children whose device copy is not absent.
    pub(super) kids_device: u32,
    /// Slot of the backup or load in flight.
    pub(super) op: u32,
    // ---- second line ----
    pub(super) created: u64,
    /// Under which the child table finds it.
    pub(super) tag: u32,
    pub(super) own_locks: u32,
    pub(super) own_pins: u32,
    pub(super) mirror: Links,
    pub(super) first_child: u32,
    pub(super) sibling: Links,
    pub(super) kids: u32,
    /// Session ends at this node plus children with any, as `locks`.
    pub(super) refs: u32,
    /// Children whose host copy is not absent.
    pub(super) kids_host: u32,
    /// Inserts counted, saturating at what policy and threshold can tell apart.
    pub(super) hits: u32,
    pub(super) priority: i32,
    /// Deepest page end that an insert through this node ever had.
    pub(super) reach: u32,
}

const _: () = assert!(size_of::<Node>() == 128);

impl Node {
    pub(super) fn range(&self) -> Range<usize> {
        self.from as usize..(self.from + self.pages) as usize
    }

    /// Pages from the root to the end of the node.
    pub(super) fn end(&self) -> u32 {
        self.depth + self.pages
    }

    pub(super) fn root() -> Node {
        Node {
            parent: NIL,
            run: NIL,
            from: 0,
            pages: 0,
            depth: 0,
            ns: NamespaceId::DEFAULT,
            tag: 0,
            generation: 0,
            device: Residency::Present,
            host: Residency::Present,
            listed: Listed::Nowhere,
            mirrored: false,
            order: Links::NONE,
            mirror: Links::NONE,
            first_child: NIL,
            sibling: Links::NONE,
            kids: 0,
            refs: 0,
            kids_device: 0,
            kids_host: 0,
            locks: 0,
            own_locks: 0,
            pins: 0,
            own_pins: 0,
            op: NIL,
            hits: 0,
            priority: 0,
            reach: 0,
            tick: 0,
            created: 0,
        }
    }
}

/// Shared payload of a path of nodes. Lists other than `tokens` are empty until something is put into them.
#[derive(Clone, Debug, Default)]
#[repr(C)]
pub(super) struct Run {
    /// Raw tokens: one per unit, and one more in the bigram view.
    pub(super) tokens: Vec<u32>,
    pub(super) device: Vec<PageId>,
    pub(super) host: Vec<PageId>,
    pub(super) hashes: Vec<PageHash>,
    /// One bit per page.
    pub(super) stored: Vec<u64>,
    /// Component lists; none in a tree without components.
    pub(super) components: Option<Box<[Lists; COMPONENTS]>>,
    pub(super) pages: u32,
    /// Nodes that are ranges of this run.
    pub(super) nodes: u32,
}

impl Run {
    pub(super) fn set_device(&mut self, range: Range<usize>, pages: &[PageId]) {
        self.device.resize(self.pages as usize, NO_PAGE);
        self.device[range].copy_from_slice(pages);
    }

    pub(super) fn set_host(&mut self, range: Range<usize>, pages: &[PageId]) {
        self.host.resize(self.pages as usize, NO_PAGE);
        self.host[range].copy_from_slice(pages);
    }

    pub(super) fn is_stored(&self, page: usize) -> bool {
        self.stored.get(page / 64).is_some_and(|word| word >> (page % 64) & 1 == 1)
    }

    pub(super) fn set_stored(&mut self, page: usize) {
        self.stored.resize((self.pages as usize).div_ceil(64), 0);
        self.stored[page / 64] |= 1 << (page % 64);
    }

    fn clear(&mut self) {
        self.tokens.clear();
        self.device.clear();
        self.host.clear();
        self.hashes.clear();
        self.stored.clear();
        self.components = None;
        (self.pages, self.nodes) = (0, 0);
    }

    /// Forgets the pages from `pages` on. Memory is given back when three quarters of it are idle.
    pub(super) fn truncate(&mut self, pages: u32, tokens: usize) {
        self.pages = pages;
        let pages = pages as usize;
        self.tokens.truncate(tokens);
        self.device.truncate(pages);
        self.host.truncate(pages);
        self.hashes.truncate(pages);
        self.truncate_components(pages);
        self.stored.truncate(pages.div_ceil(64));
        if let Some(last) = self.stored.get_mut(pages / 64) {
            *last &= (1 << (pages % 64)) - 1;
        }
        if tokens * 4 < self.tokens.capacity() {
            self.tokens.shrink_to_fit();
            self.device.shrink_to_fit();
            self.host.shrink_to_fit();
            self.hashes.shrink_to_fit();
        }
    }
}

/// Slots of nodes and runs. Freed slots are used again, nodes with a new generation.
#[derive(Clone, Debug)]
pub(super) struct Arena {
    pub(super) nodes: Vec<Node>,
    free_nodes: Vec<u32>,
    pub(super) runs: Vec<Run>,
    free_runs: Vec<u32>,
    /// Emptied runs, kept for their memory: a cache at capacity then allocates nothing to replace what it evicts.
    spare_runs: Vec<Run>,
}

/// Most emptied runs kept, and the most tokens one may have room for: 16 MiB in all.
const SPARE_RUNS_MAX: usize = 256;
const SPARE_RUN_TOKENS_MAX: usize = 16 * 1024;

impl Arena {
    pub(super) fn new() -> Arena {
        Arena {
            nodes: vec![Node::root()],
            free_nodes: Vec::new(),
            runs: Vec::new(),
            free_runs: Vec::new(),
            spare_runs: Vec::new(),
        }
    }

    /// Nodes in use, the root included.
    pub(super) fn len(&self) -> usize {
        self.nodes.len() - self.free_nodes.len()
    }

    pub(super) fn is_live(&self, slot: u32) -> bool {
        slot == ROOT || self.nodes.get(slot as usize).is_some_and(|n| n.run != NIL)
    }

    pub(super) fn live(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.nodes.len() as u32).filter(|&i| self.is_live(i))
    }

    pub(super) fn id(&self, slot: u32) -> NodeId {
        NodeId { index: slot, generation: self.nodes[slot as usize].generation }
    }

    pub(super) fn slot(&self, id: NodeId) -> Option<u32> {
        let node = self.nodes.get(id.index as usize)?;
        (node.generation == id.generation && self.is_live(id.index)).then_some(id.index)
    }

    pub(super) fn add_node(&mut self, mut node: Node) -> u32 {
        match self.free_nodes.pop() {
            Some(slot) => {
                node.generation = self.nodes[slot as usize].generation;
                self.nodes[slot as usize] = node;
                slot
            }
            None => {
                node.generation = 0;
                self.nodes.push(node);
                self.nodes.len() as u32 - 1
            }
        }
    }

    /// Takes a node out of its run and frees its slot. The run goes with its last node.
    pub(super) fn remove_node(&mut self, slot: u32) {
        let node = &mut self.nodes[slot as usize];
        let run = std::mem::replace(&mut node.run, NIL);
        // A slot whose generations are used up stays empty rather than make an alias.
        if let Some(next) = node.generation.checked_add(1) {
            node.generation = next;
            self.free_nodes.push(slot);
        }
        self.release_run(run);
    }

    pub(super) fn release_run(&mut self, run: u32) {
        let r = &mut self.runs[run as usize];
        r.nodes -= 1;
        if r.nodes == 0 {
            let mut old = std::mem::take(r);
            self.free_runs.push(run);
            let fits = old.tokens.capacity() <= SPARE_RUN_TOKENS_MAX;
            if fits && self.spare_runs.len() < SPARE_RUNS_MAX {
                old.clear();
                self.spare_runs.push(old);
            }
        }
    }

    /// An empty run, with the memory of an old one if there is any.
    pub(super) fn take_run(&mut self) -> Run {
        self.spare_runs.pop().unwrap_or_default()
    }

    pub(super) fn add_run(&mut self, run: Run) -> u32 {
        match self.free_runs.pop() {
            Some(slot) => {
                self.runs[slot as usize] = run;
                slot
            }
            None => {
                self.runs.push(run);
                self.runs.len() as u32 - 1
            }
        }
    }

    /// Every id of every node dies; generations go on.
    pub(super) fn clear(&mut self) {
        for slot in 1..self.nodes.len() as u32 {
            if self.is_live(slot) {
                self.remove_node(slot);
            }
        }
        let generation = self.nodes[ROOT as usize].generation.wrapping_add(1);
        self.nodes[ROOT as usize] = Node { generation, ..Node::root() };
    }
}
