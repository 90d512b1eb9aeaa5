//! Memory of the simulated ranks: cells of eight bytes that hold labels, and pages that have owners.

use std::collections::BTreeMap;

use crate::pd::ids::{RoomKey, Serial};
use crate::pd::layout::{
    Component, Entry, EntryId, Group, HeadOrder, Layout, Role, Shape, TokenSplit, pages_of, window_first_page,
};
use crate::pd::plan::Copy;
use crate::pd::topo::{Rank, Topology, heads_of};

pub(super) const CELL: u64 = 8;
pub(super) const PAGE_TOKENS: u32 = 2;
pub(super) const WINDOW_TOKENS: u32 = 3;
pub(super) const HEADS: u32 = 2;
/// Behind the entries of every rank: buffers on a prefill rank, the ring on a decode rank.
pub(super) const STAGE_BYTES: u64 = 2048;
/// The largest block: two pages of four layers, K and V, both heads.
pub(super) const BLOCK_BYTES: u64 = 512;

/// What the model of a seed is made of.
#[derive(Clone, Debug)]
pub(super) struct Model {
    pub(super) layers: u32,
    pub(super) state: bool,
    pub(super) window: bool,
    pub(super) draft_on_decode: bool,
}

/// Whose a unit (page or slot) is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Owner {
    Free,
    /// Source of a room on a prefill rank.
    Source(RoomKey),
    /// Granted on a decode rank.
    Grant(Serial),
    /// Committed; the tree holds it for a while.
    Tree(RoomKey),
}

/// The memory of one process life.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) layout: Layout,
    pub(super) topo: Topology,
    pub(super) rank: Rank,
    pub(super) cells: Vec<u64>,
    /// Owners of full pages, window pages and state slots.
    pub(super) owners: [Vec<Owner>; 3],
    /// Whose block lies in a cell of the ring and has not been scattered.
    pub(super) ring: BTreeMap<u64, Serial>,
}

fn slot(c: Component) -> usize {
    match c {
        Component::Full => 0,
        Component::Window => 1,
        Component::State | Component::Ring => 2,
    }
}

fn hash(words: &[u64]) -> u64 {
    let mut d = crate::base::Digest::default();
    words.iter().for_each(|&w| d.mix(w));
    d.value()
}

/// What belongs into a cell: a function of what it is, nowhere of where it lies.
pub(super) fn label(key: RoomKey, id: EntryId, token: u32, elem: u32) -> u64 {
    let role = match id.role {
        Role::K => 1,
        Role::V => 2,
        Role::Latent => 3,
        Role::Other(n) => 4 + u64::from(n),
    };
    hash(&[key.room, u64::from(key.epoch), u64::from(id.layer), role, u64::from(token), u64::from(elem)])
}

pub(super) fn layout(
    model: &Model,
    topo: &Topology,
    rank: Rank,
    pages: u32,
    slots: u32,
    decode: bool,
) -> Layout {
    let mut entries = Vec::new();
    let mut base = 0;
    let mut add = |id: EntryId, component: Component, shape: Shape, unit_bytes: u64, units: u32| {
        let e = Entry { id, component, region: 0, base, units, unit_bytes, shape, ring_slots: 0 };
        base += unit_bytes * u64::from(units);
        entries.push(e);
    };
    let heads = heads_of(HEADS, topo.tp, rank.tp).map_or(1, |h| h.1);
    let shape = Shape::Heads { total: HEADS, head_bytes: CELL as u32, order: HeadOrder::TokenHead };
    let page = u64::from(PAGE_TOKENS * heads) * CELL;
    let (lo, hi) = topo.stage_range(rank.pp);
    for role in [Role::K, Role::V] {
        for layer in lo..hi {
            let windowed = model.window && layer == 1;
            let c = if windowed { Component::Window } else { Component::Full };
            add(EntryId { group: Group::Target, layer, role }, c, shape, page, pages);
        }
    }
    for layer in lo..hi {
        if model.state && layer.is_multiple_of(2) {
            let id = EntryId { group: Group::Target, layer, role: Role::Other(0) };
            let shape = Shape::Axis { groups: [4, 4, 8, 0], outer: 1, elem_bytes: CELL as u32 };
            add(id, Component::State, shape, 16 / u64::from(topo.tp) * CELL, slots);
        }
    }
    if decode && model.draft_on_decode && rank.pp + 1 == topo.pp() {
        for role in [Role::K, Role::V] {
            add(EntryId { group: Group::Draft, layer: 0, role }, Component::Full, shape, page, pages);
        }
    }
    Layout {
        model: 1,
        page_tokens: PAGE_TOKENS,
        window_tokens: WINDOW_TOKENS,
        split: TokenSplit::NONE,
        regions: vec![base + STAGE_BYTES],
        entries,
    }
}

impl Memory {
    pub(super) fn new(layout: Layout, topo: Topology, rank: Rank, pages: u32, slots: u32) -> Memory {
        let cells = vec![0; (layout.regions[0] / CELL) as usize];
        let free = |n: u32| vec![Owner::Free; n as usize];
        Memory {
            layout,
            topo,
            rank,
            cells,
            owners: [free(pages), free(pages), free(slots)],
            ring: BTreeMap::new(),
        }
    }

    /// Where the bytes for staging begin.
    pub(super) fn stage_base(&self) -> u64 {
        stage_base(&self.layout)
    }

    pub(super) fn has(&self, c: Component) -> bool {
        self.layout.has(c)
    }

    pub(super) fn take(&mut self, c: Component, n: u32, owner: Owner) -> Option<Vec<u32>> {
        let list = &mut self.owners[slot(c)];
        let free: Vec<u32> = (0u32..)
            .zip(list.iter())
            .filter(|(_, o)| **o == Owner::Free)
            .map(|(i, _)| i)
            .take(n as usize)
            .collect();
        if free.len() < n as usize {
            return None;
        }
        free.iter().for_each(|&i| list[i as usize] = owner);
        Some(free)
    }

    pub(super) fn set_owner(&mut self, c: Component, units: &[u32], owner: Owner) {
        units.iter().for_each(|&i| self.owners[slot(c)][i as usize] = owner);
    }

    pub(super) fn count(&self, f: impl Fn(Owner) -> bool) -> usize {
        self.owners.iter().flatten().filter(|o| f(**o)).count()
    }

    /// Calls `f(cell index, token, element)` for every cell of a unit.
    fn each_cell(&self, e: &Entry, unit: u32, mut f: impl FnMut(usize, u32, u32)) {
        let at = ((e.base + u64::from(unit) * e.unit_bytes) / CELL) as usize;
        match e.shape {
            Shape::Heads { total, .. } => {
                let (first, n) = heads_of(total, self.topo.tp, self.rank.tp).unwrap_or((0, 1));
                for t in 0..PAGE_TOKENS {
                    for h in 0..n {
                        f(at + (t * n + h) as usize, t, first + h);
                    }
                }
            }
            Shape::Axis { groups, .. } => {
                let (mut here, mut full) = (0, 0);
                for g in groups {
                    let n = g / self.topo.tp;
                    for i in 0..n {
                        f(at + (here + i) as usize, 0, full + self.rank.tp * n + i);
                    }
                    (here, full) = (here + n, full + g);
                }
            }
            Shape::Replicated => (0..e.unit_bytes / CELL).for_each(|i| f(at + i as usize, 0, i as u32)),
        }
    }

    /// Fills units of a component with the labels of a room; positions count from `first`.
    pub(super) fn fill(&mut self, key: RoomKey, c: Component, units: &[u32], first: u32) {
        let entries: Vec<Entry> = self.layout.entries.iter().filter(|e| e.component == c).copied().collect();
        for e in entries {
            for (pos, &u) in (first..).zip(units) {
                let mut put = Vec::new();
                let base = if c == Component::State { 0 } else { pos * PAGE_TOKENS };
                self.each_cell(&e, u, |i, t, el| put.push((i, label(key, e.id, base + t, el))));
                put.into_iter().for_each(|(i, v)| self.cells[i] = v);
            }
        }
    }

    /// Overwrites units with noise, as the next user of the page would.
    pub(super) fn scramble(&mut self, c: Component, units: &[u32], noise: u64) {
        let entries: Vec<Entry> = self.layout.entries.iter().filter(|e| e.component == c).copied().collect();
        for e in entries {
            for &u in units {
                let mut cells = Vec::new();
                self.each_cell(&e, u, |i, _, _| cells.push(i));
                cells.into_iter().for_each(|i| self.cells[i] = noise);
            }
        }
    }

    /// Compares units with what a room must hold. Draft entries have no source and must not change.
    pub(super) fn verify(
        &self,
        key: RoomKey,
        tokens: u32,
        c: Component,
        units: &[u32],
        first: u32,
    ) -> Option<String> {
        for e in self.layout.entries.iter().filter(|e| e.component == c && e.id.group == Group::Target) {
            for (pos, &u) in (first..).zip(units) {
                let base = if c == Component::State { 0 } else { pos * PAGE_TOKENS };
                let mut wrong = None;
                self.each_cell(e, u, |i, t, el| {
                    let inside = c == Component::State || base + t < tokens;
                    if inside && self.cells[i] != label(key, e.id, base + t, el) && wrong.is_none() {
                        wrong = Some(format!("{:?} unit {u} token {} element {el}", e.id, base + t));
                    }
                });
                if wrong.is_some() {
                    return wrong;
                }
            }
        }
        None
    }

    /// The (component, unit) a cell belongs to.
    fn unit_of(&self, off: u64) -> Option<(Component, u32)> {
        self.layout
            .entries
            .iter()
            .find(|e| off >= e.base && off < e.base + e.unit_bytes * u64::from(e.units))
            .map(|e| (e.component, ((off - e.base) / e.unit_bytes) as u32))
    }

    /// Owners of the units a byte range touches.
    pub(super) fn owners_of(&self, off: u64, len: u64) -> Vec<(Component, u32, Owner)> {
        let mut out: Vec<(Component, u32, Owner)> = Vec::new();
        for o in (off..off + len).step_by(CELL as usize) {
            if let Some((c, u)) = self.unit_of(o)
                && !out.iter().any(|x| (x.0, x.1) == (c, u))
            {
                out.push((c, u, self.owners[slot(c)][u as usize]));
            }
        }
        out
    }

    /// A block lands in the ring. Gives whose it was that lay there, if it was another's.
    pub(super) fn land_in_ring(&mut self, off: u64, len: u64, serial: Serial) -> Option<Serial> {
        let cells = (off..off + len).step_by(CELL as usize);
        cells.filter_map(|cell| self.ring.insert(cell, serial)).find(|old| *old != serial)
    }

    /// A block was taken out of the ring.
    pub(super) fn leave_ring(&mut self, off: u64, len: u64) {
        (off..off + len).step_by(CELL as usize).for_each(|cell| {
            self.ring.remove(&cell);
        });
    }

    pub(super) fn read(&self, c: &Copy) -> Vec<u64> {
        let at = (c.src_off / CELL) as usize;
        self.cells[at..at + (c.len / CELL) as usize].to_vec()
    }

    pub(super) fn write(&mut self, c: &Copy, data: &[u64]) {
        let at = (c.dst_off / CELL) as usize;
        self.cells[at..at + data.len()].copy_from_slice(data);
    }
}

/// Where the bytes for staging begin.
pub(super) fn stage_base(l: &Layout) -> u64 {
    l.regions[0] - STAGE_BYTES
}

/// First page of the window of a prompt on a rank that has `prefix` pages.
pub(super) fn window_first(prefix: u32, tokens: u32) -> u32 {
    window_first_page(prefix, tokens, WINDOW_TOKENS, PAGE_TOKENS)
}

/// Pages of a prompt.
pub(super) fn pages(tokens: u32) -> u32 {
    pages_of(tokens, PAGE_TOKENS)
}
