//! Nodes and runs, and the arena that holds them.
//!
//! A **run** is what one insert brought: tokens, and per page a device page, a host page, a hash and a stored mark. A
//! **node** is a range of a run. So a split makes one small node and copies nothing, and a chain that grows by appends
//! stays one run. Nodes of one run always form a path, and they die tail first, so a run shrinks from its end.

use std::ops::Range;
use std::sync::Arc;

use crate::base::prefetch::prefetch;
use crate::base::{NamespaceId, NodeId, PageId, Tier};
use crate::key::{PageHash, PageNames};

use super::component::{COMPONENTS, Lists};
use super::rows::{Memory, Row, Rows};

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
    pub(super) first_child: u32,
    pub(super) generation: u32,
    pub(super) device: Residency,
    pub(super) host: Residency,
    pub(super) listed: Listed,
    pub(super) mirrored: bool,
    pub(super) order: Links,
    /// Own locks plus children with any: a lock walks up only to the first node that had one.
    pub(super) locks: u32,
    pub(super) kids: u32,
    pub(super) tick: u64,
    /// Children whose device copy is not absent.
    pub(super) kids_device: u32,
    /// Session ends at this node plus children with any, as `locks`.
    pub(super) refs: u32,
    // ---- second line ----
    pub(super) created: u64,
    /// Under which the child table finds it.
    pub(super) tag: u32,
    pub(super) own_locks: u32,
    pub(super) own_pins: u32,
    pub(super) mirror: Links,
    pub(super) ns: NamespaceId,
    pub(super) sibling: Links,
    /// As `locks`, of host pins.
    pub(super) pins: u32,
    /// Slot of the backup or load in flight.
    pub(super) op: u32,
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

/// Shared payload of a path of nodes; one cache line. Rows other than `tokens` are none until something is put into them.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(super) struct Run {
    /// Raw tokens: one per unit, and one more in the bigram view.
    pub(super) tokens: Row,
    pub(super) device: Row,
    pub(super) host: Row,
    pub(super) hashes: Row,
    pub(super) pages: u32,
    /// Nodes that are ranges of this run.
    pub(super) nodes: u32,
    rare: Option<Box<Rare>>,
}

const _: () = assert!(size_of::<Run>() == 64);

/// What most runs do not have.
#[derive(Clone, Debug, Default)]
pub(super) struct Rare {
    /// One bit per page.
    stored: Vec<u64>,
    /// Component lists; none in a tree without components.
    pub(super) components: Option<Box<[Lists; COMPONENTS]>>,
}

impl Run {
    const EMPTY: Run = Run {
        tokens: Row::NONE,
        device: Row::NONE,
        host: Row::NONE,
        hashes: Row::NONE,
        pages: 0,
        nodes: 0,
        rare: None,
    };

    pub(super) fn rare(&self) -> Option<&Rare> {
        self.rare.as_deref()
    }

    pub(super) fn rare_mut(&mut self) -> &mut Rare {
        self.rare.get_or_insert_default()
    }

    pub(super) fn is_stored(&self, page: usize) -> bool {
        self.rare()
            .is_some_and(|rare| rare.stored.get(page / 64).is_some_and(|word| word >> (page % 64) & 1 == 1))
    }

    /// True if all of these pages are. O(pages / 64).
    pub(super) fn are_stored(&self, pages: Range<usize>) -> bool {
        let Some(rare) = self.rare() else { return pages.is_empty() };
        let mut page = pages.start;
        while page < pages.end {
            let (from, to) = (page % 64, (pages.end - page + page % 64).min(64));
            let want = u64::MAX >> (64 - (to - from)) << from;
            if rare.stored.get(page / 64).is_none_or(|word| word & want != want) {
                return false;
            }
            page += to - from;
        }
        true
    }

    pub(super) fn set_stored(&mut self, page: usize, stored: bool) {
        if stored || self.is_stored(page) {
            let words = (self.pages as usize).div_ceil(64);
            let bits = &mut self.rare_mut().stored;
            bits.resize(words, 0);
            let bit = 1 << (page % 64);
            bits[page / 64] = if stored { bits[page / 64] | bit } else { bits[page / 64] & !bit };
        }
    }

    pub(super) fn forget_stored(&mut self) {
        if let Some(rare) = &mut self.rare {
            rare.stored.clear();
        }
    }

    /// Forgets the marks and components of the pages from `pages` on.
    fn truncate_rare(&mut self) {
        let pages = self.pages as usize;
        self.truncate_components(pages);
        if let Some(rare) = &mut self.rare {
            rare.stored.truncate(pages.div_ceil(64));
            if let Some(last) = rare.stored.get_mut(pages / 64) {
                *last &= (1 << (pages % 64)) - 1;
            }
        }
    }
}

/// Copies `range` of `from` behind the first `used` elements of `row`, making room by at least a quarter if there is none, or
/// none that may be written.
fn append<T: Copy, M: Memory<T>>(
    rows: &mut Rows<T, M>,
    row: &mut Row,
    used: usize,
    from: Row,
    range: Range<usize>,
) {
    let need = used + range.len();
    if need > row.capacity() || rows.is_shared(*row) {
        rows.resize(row, used, need.max(used + used / 4));
    }
    if !from.is_none() {
        rows.copy(from, range, *row, used);
    }
}

/// Slots of nodes and runs. Freed slots are used again, nodes with a new generation.
#[derive(Clone, Debug)]
pub(super) struct Arena {
    pub(super) nodes: Vec<Node>,
    free_nodes: Vec<u32>,
    pub(super) runs: Vec<Run>,
    free_runs: Vec<u32>,
    token_rows: Rows<u32, Arc<[u32]>>,
    /// Device and host lists.
    page_rows: Rows<PageId>,
    hash_rows: Rows<PageHash, Arc<[PageHash]>>,
}

impl Arena {
    pub(super) fn new() -> Arena {
        Arena {
            nodes: vec![Node::root()],
            free_nodes: Vec::new(),
            runs: Vec::new(),
            free_runs: Vec::new(),
            token_rows: Rows::new(0),
            page_rows: Rows::new(NO_PAGE),
            hash_rows: Rows::new(PageHash([0; 32])),
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

    /// True if every page of the node is in the store (and for the root). O(pages / 64).
    pub(super) fn is_stored(&self, slot: u32) -> bool {
        let node = &self.nodes[slot as usize];
        slot == ROOT || self.runs[node.run as usize].are_stored(node.range())
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

    /// One node less in a run. The run goes with its last node.
    pub(super) fn release_run(&mut self, at: u32) {
        let run = &mut self.runs[at as usize];
        run.nodes -= 1;
        if run.nodes == 0 {
            self.token_rows.free(&mut run.tokens);
            self.page_rows.free(&mut run.device);
            self.page_rows.free(&mut run.host);
            self.hash_rows.free(&mut run.hashes);
            (run.pages, run.rare) = (0, None);
            self.free_runs.push(at);
        }
    }

    /// A new run of one node, with tokens and nothing else. Amortised O(tokens), and no allocation in the long run.
    pub(super) fn add_run(&mut self, tokens: &[u32], pages: u32) -> u32 {
        let row = self.token_rows.alloc(tokens.len());
        self.token_rows.slice_mut(row)[..tokens.len()].copy_from_slice(tokens);
        self.put_run(row, pages)
    }

    /// The same for pages of a prompt whose names are kept: `tokens` is their place in its row. Tokens and hashes are shared
    /// with the names if that does not hold too much memory. `parent` may be of the same prompt. O(1), or O(tokens).
    pub(super) fn add_run_of(
        &mut self,
        names: &PageNames,
        tokens: Range<usize>,
        pages: Range<u32>,
        parent: u32,
    ) -> u32 {
        let near = self.runs.get(self.nodes[parent as usize].run as usize);
        let (near_tokens, near_hashes) = near.map_or((Row::NONE, Row::NONE), |run| (run.tokens, run.hashes));
        let run = match self.token_rows.share(names.row(), tokens.clone(), near_tokens) {
            Some(row) => self.put_run(row, pages.len() as u32),
            None => self.add_run(&names.row()[tokens], pages.len() as u32),
        };
        let hashes = (pages.start - names.first_page()) as usize..(pages.end - names.first_page()) as usize;
        match self.hash_rows.share(names.hashes(), hashes.clone(), near_hashes) {
            Some(row) => self.runs[run as usize].hashes = row,
            None => self.set_hashes(run, 0, &names.hashes()[hashes]),
        }
        run
    }

    fn put_run(&mut self, row: Row, pages: u32) -> u32 {
        let run = Run { tokens: row, pages, nodes: 1, ..Run::EMPTY };
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

    /// A range of the tokens of a run.
    #[inline]
    pub(super) fn tokens(&self, run: u32, range: Range<usize>) -> &[u32] {
        self.token_rows.part(self.runs[run as usize].tokens, range)
    }

    /// Tokens of a run, with whatever room there is behind them.
    #[inline]
    pub(super) fn run_tokens(&self, run: u32) -> &[u32] {
        self.token_rows.slice(self.runs[run as usize].tokens)
    }

    #[cfg(test)]
    pub(super) fn run_tokens_mut(&mut self, run: u32) -> &mut [u32] {
        self.token_rows.slice_mut(self.runs[run as usize].tokens)
    }

    /// The node will be read soon.
    #[inline]
    pub(super) fn prefetch_node(&self, at: u32) {
        if let Some(node) = self.nodes.get(at as usize) {
            prefetch(node);
        }
    }

    /// A look-up will find this node: its pages are fetched while its tokens are compared, and its neighbours in the
    /// order of eviction, which a touch or a lock changes.
    #[inline]
    pub(super) fn prefetch_match(&self, at: u32) {
        let node = &self.nodes[at as usize];
        self.prefetch_node(node.order.older);
        self.prefetch_node(node.order.newer);
        if let Some(first) = self.pages(at, Tier::Device).first() {
            prefetch(first);
        }
    }

    /// The run of a node that is at hand will be read soon.
    #[inline]
    pub(super) fn prefetch_run(&self, node: &Node) {
        if let Some(run) = self.runs.get(node.run as usize) {
            prefetch(run);
        }
    }

    /// Pages of a node on the device or the host; empty without such a list.
    #[inline]
    pub(super) fn pages(&self, at: u32, tier: Tier) -> &[PageId] {
        let node = &self.nodes[at as usize];
        let run = &self.runs[node.run as usize];
        self.page_rows.part(if tier == Tier::Device { run.device } else { run.host }, node.range())
    }

    /// The same, to change; the node has such a list.
    pub(super) fn pages_mut(&mut self, at: u32, tier: Tier) -> &mut [PageId] {
        let node = &self.nodes[at as usize];
        let run = &self.runs[node.run as usize];
        let row = if tier == Tier::Device { run.device } else { run.host };
        self.page_rows.slice_mut(row).get_mut(node.range()).unwrap_or_default()
    }

    /// Writes the pages of a node on a tier. `pages` is as long as the node.
    pub(super) fn set_pages(&mut self, at: u32, tier: Tier, pages: &[PageId]) {
        let node = &self.nodes[at as usize];
        let (run, range) = (&mut self.runs[node.run as usize], node.range());
        let len = run.pages as usize;
        let row = if tier == Tier::Device { &mut run.device } else { &mut run.host };
        if row.is_none() {
            *row = self.page_rows.alloc(len);
            self.page_rows.slice_mut(*row).fill(NO_PAGE);
        }
        self.page_rows.slice_mut(*row)[range].copy_from_slice(pages);
    }

    /// Page hashes of a node, if its run has any.
    pub(super) fn hashes(&self, at: u32) -> Option<&[PageHash]> {
        let node = &self.nodes[at as usize];
        let row = self.runs.get(node.run as usize)?.hashes;
        (!row.is_none()).then(|| self.hash_rows.part(row, node.range()))
    }

    /// Writes the hashes of a range of a run.
    pub(super) fn set_hashes(&mut self, run: u32, from: u32, hashes: &[PageHash]) {
        let run = &mut self.runs[run as usize];
        if run.hashes.is_none() {
            run.hashes = self.hash_rows.alloc(run.pages as usize);
        }
        let from = from as usize;
        self.hash_rows.slice_mut(run.hashes)[from..from + hashes.len()].copy_from_slice(hashes);
    }

    /// Forgets the pages of a run from `pages` on. Memory is given back when three quarters of it are idle.
    pub(super) fn truncate_run(&mut self, run: u32, pages: u32, tokens: usize) {
        let run = &mut self.runs[run as usize];
        run.pages = pages;
        run.truncate_rare();
        if tokens * 4 < run.tokens.capacity() {
            let pages = pages as usize;
            self.token_rows.resize(&mut run.tokens, tokens, tokens);
            for row in [&mut run.device, &mut run.host].into_iter().filter(|row| !row.is_none()) {
                self.page_rows.resize(row, pages, pages);
            }
            if !run.hashes.is_none() {
                self.hash_rows.resize(&mut run.hashes, pages, pages);
            }
        }
    }

    /// Appends the content of a run to another; `overlap` tokens at its start are there already. The other is empty then.
    pub(super) fn append_run(&mut self, to: u32, from: u32, page_size: usize, overlap: usize) {
        let tail = std::mem::replace(&mut self.runs[from as usize], Run { nodes: 1, ..Run::EMPTY });
        let run = &mut self.runs[to as usize];
        let (before, more) = (run.pages as usize, tail.pages as usize);
        let after = before + more;
        run.pages = after as u32;
        let (old, new) = (before * page_size + overlap, after * page_size + overlap);
        let mut tokens = tail.tokens;
        if !self.token_rows.join(&mut run.tokens, old, &mut tokens, overlap) {
            append(&mut self.token_rows, &mut run.tokens, old, tokens, overlap..new - old + overlap);
        }
        for (row, other) in [(&mut run.device, tail.device), (&mut run.host, tail.host)] {
            if row.is_none() && !other.is_none() {
                *row = self.page_rows.alloc(after);
                self.page_rows.slice_mut(*row).fill(NO_PAGE);
            }
            if !row.is_none() {
                append(&mut self.page_rows, row, before, other, 0..more);
                if other.is_none() {
                    self.page_rows.slice_mut(*row)[before..after].fill(NO_PAGE);
                }
            }
        }
        let mut hashes = tail.hashes;
        if !hashes.is_none() && !self.hash_rows.join(&mut run.hashes, before, &mut hashes, 0) {
            append(&mut self.hash_rows, &mut run.hashes, before, hashes, 0..more);
        }
        run.extend_components(before, &tail);
        for page in (0..more).filter(|&page| tail.is_stored(page)) {
            run.set_stored(before + page, true);
        }
        let Run { mut device, mut host, .. } = tail;
        self.token_rows.free(&mut tokens);
        self.page_rows.free(&mut device);
        self.page_rows.free(&mut host);
        self.hash_rows.free(&mut hashes);
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
