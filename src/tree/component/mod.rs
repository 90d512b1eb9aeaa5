//! Components besides Full: sliding-window attention and recurrent state.
//!
//! Both are page lists beside the Full lists of a run, with holes. What tells them apart is one number, the **span**: a
//! prefix of `d` pages can be used if its last `min(d, span)` pages all have the component. A window's span is the window;
//! a state lies at the end of a page, so its span is 1. Everything is per page, so a split hands nothing over and a
//! tombstone is a hole.
//!
//! A copy on the device needs the Full copy there, and one on the host a Full copy anywhere: when that goes, the component's
//! page goes with it. The other way round they are free: losing a component shortens matches and leaves Full alone. A window
//! page that is evicted takes the state at the same place on the same tier with it, unless somebody holds that: no request
//! could go on there. Pages that became free are collected and
//! handed out by [`Tree::drain_freed`]; until then the tree still lists them as its own.
//!
//! A page that a load brings has its place from the start of the load, and requests that wait for the load are shown it there.
//! So the place stays open for it: no insert fills it, and no other load brings a page to it.
//!
//! Here: lists, usable prefixes, holds, presence. `flow` moves pages in, between tiers and out.

mod flow;

use std::ops::Range;

use crate::base::plant::{Plant, is_planted};
use crate::base::{NodeId, OpId, PageId, Tier};
use crate::key::PageHash;

use super::node::{Arena, NIL, NO_PAGE, Node, ROOT, Run};
use super::op::Place;
use super::order::Orders;
use super::{DeviceLock, Tree, TreeError};

/// A component besides Full.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub enum Component {
    /// Sliding-window attention.
    Window,
    /// Recurrent state: one slot at the end of a page.
    State,
}

/// How many there are.
pub(super) const COMPONENTS: usize = 2;

const ALL: [Component; COMPONENTS] = [Component::Window, Component::State];

/// A list per component.
pub type PerComponent<T> = [T; COMPONENTS];

/// One page of a component to copy from tier to tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ComponentCopy {
    /// Which component.
    pub component: Component,
    /// Place of the page, counted from the root.
    pub position: u32,
    /// Page to read.
    pub source: PageId,
}

/// One page of a component to write to a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ComponentPut {
    /// Which component.
    pub component: Component,
    /// Place of the page, counted from the root.
    pub position: u32,
    /// Host page to read.
    pub host_page: PageId,
    /// Name of the place; with the component it names the content.
    pub hash: PageHash,
}

/// Pages of components that nobody needs any more.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ComponentPages {
    /// Device pages (or slots) by component.
    pub device: PerComponent<Vec<PageId>>,
    /// Host pages (or slots) by component.
    pub host: PerComponent<Vec<PageId>>,
}

/// Pages of components that come with an insert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InsertComponents<'a> {
    /// First page of the key that has a window page: below it the request has let go of its window.
    pub window_from: u32,
    /// One window page per page of the key from there on; empty if there are none.
    pub window: &'a [PageId],
    /// State at the end of the last whole page.
    pub state: Option<PageId>,
}

/// Lists of one component in a run; each is empty or has one entry per page.
#[derive(Clone, Debug, Default)]
pub(super) struct Lists {
    device: Vec<PageId>,
    host: Vec<PageId>,
    /// Locks, pins and operations that need the page, on whichever tier.
    holds: Vec<u32>,
    /// Ends of sessions that will need the page.
    kept: Vec<u32>,
}

impl Lists {
    fn get(list: &[PageId], page: usize) -> Option<PageId> {
        list.get(page).copied().filter(|&p| p != NO_PAGE)
    }

    fn tier(&self, tier: Tier) -> &[PageId] {
        if tier == Tier::Device { &self.device } else { &self.host }
    }

    fn tier_mut(&mut self, tier: Tier) -> &mut Vec<PageId> {
        if tier == Tier::Device { &mut self.device } else { &mut self.host }
    }
}

impl Run {
    pub(super) fn lists(&self, c: Component) -> Option<&Lists> {
        self.rare()?.components.as_ref().map(|lists| &lists[c as usize])
    }

    fn has_components(&self) -> bool {
        self.rare().is_some_and(|rare| rare.components.is_some())
    }

    fn lists_mut(&mut self, c: Component) -> &mut Lists {
        &mut self.rare_mut().components.get_or_insert_default()[c as usize]
    }

    pub(super) fn component_page(&self, c: Component, tier: Tier, page: usize) -> Option<PageId> {
        Lists::get(self.lists(c)?.tier(tier), page)
    }

    fn set_component_page(&mut self, c: Component, tier: Tier, page: usize, to: PageId) {
        let pages = self.pages as usize;
        let list = self.lists_mut(c).tier_mut(tier);
        list.resize(pages, NO_PAGE);
        list[page] = to;
    }

    pub(super) fn is_held(&self, c: Component, page: usize) -> bool {
        self.lists(c).is_some_and(|lists| lists.holds.get(page).is_some_and(|&n| n > 0))
    }

    pub(super) fn is_kept(&self, c: Component, page: usize) -> bool {
        self.lists(c).is_some_and(|lists| lists.kept.get(page).is_some_and(|&n| n > 0))
    }

    pub(super) fn truncate_components(&mut self, pages: usize) {
        if !self.has_components() {
            return;
        }
        for lists in self.rare_mut().components.iter_mut().flat_map(|all| all.iter_mut()) {
            lists.device.truncate(pages);
            lists.host.truncate(pages);
            lists.holds.truncate(pages);
            lists.kept.truncate(pages);
        }
    }

    /// Appends the lists of the run that follows.
    pub(super) fn extend_components(&mut self, before: usize, tail: &Run) {
        if !self.has_components() && !tail.has_components() {
            return;
        }
        let after = self.pages as usize;
        for c in ALL {
            let empty = Lists::default();
            let more = tail.lists(c).unwrap_or(&empty);
            let mine = self.lists_mut(c);
            for tier in [Tier::Device, Tier::Host] {
                if !mine.tier(tier).is_empty() || !more.tier(tier).is_empty() {
                    mine.tier_mut(tier).resize(before, NO_PAGE);
                    mine.tier_mut(tier).extend_from_slice(more.tier(tier));
                    mine.tier_mut(tier).resize(after, NO_PAGE);
                }
            }
            for (mine, more) in [(&mut mine.holds, &more.holds), (&mut mine.kept, &more.kept)] {
                if !mine.is_empty() || !more.is_empty() {
                    mine.resize(before, 0);
                    mine.extend_from_slice(more);
                    mine.resize(after, 0);
                }
            }
        }
    }
}

/// Whether a node has pages of a component that no session will need, and such as one will.
fn any_pages(arena: &Arena, node: &Node, c: Component, tier: Tier) -> [bool; 2] {
    let mut any = [false; 2];
    if node.run != NIL {
        let run = &arena.runs[node.run as usize];
        for page in node.range() {
            any[usize::from(run.is_kept(c, page))] |= run.component_page(c, tier, page).is_some();
        }
    }
    any
}

impl Orders {
    /// Brings the component orders in line with a node: in if it has any page of the component on the tier. Victims go by
    /// last use, then the shallower first: what lies outside every useful window lies shallow. A node with pages that a
    /// session will need and others stands in both orders.
    pub(super) fn refresh_components(&mut self, arena: &Arena, at: u32) {
        let node = &arena.nodes[at as usize];
        for c in ALL {
            for tier in [Tier::Device, Tier::Host] {
                let any = any_pages(arena, node, c, tier);
                for (heap, any) in self.components[c as usize][tier as usize].iter_mut().zip(any) {
                    if any {
                        heap.set(at, (node.tick, u64::from(node.depth)));
                    } else {
                        heap.remove(at);
                    }
                }
            }
        }
    }

    /// After a touch: only nodes that are in have a key to change.
    pub(super) fn rekey_components(&mut self, arena: &Arena, at: u32) {
        let node = &arena.nodes[at as usize];
        for heap in self.components.iter_mut().flatten().flatten() {
            if heap.key(at).is_some() {
                heap.set(at, (node.tick, u64::from(node.depth)));
            }
        }
    }

    /// Before a node is deleted.
    pub(super) fn forget_components(&mut self, at: u32) {
        for heap in self.components.iter_mut().flatten().flatten() {
            heap.remove(at);
        }
    }
}

impl Tree {
    /// Span of a component in pages; 0 if the tree does not have it.
    pub(super) fn span(&self, c: Component) -> u32 {
        self.spans[c as usize]
    }

    pub(super) fn has_components(&self) -> bool {
        self.spans != [0; COMPONENTS]
    }

    /// Positions that a prefix of `depth` pages needs.
    fn needed(&self, c: Component, depth: u32) -> Range<u32> {
        depth - depth.min(self.span(c))..depth
    }

    /// Calls `f` with the run and the page in it for every position of a range above the end of `anchor`, deepest first,
    /// until it returns false.
    fn for_positions(&self, anchor: u32, range: Range<u32>, mut f: impl FnMut(u32, usize, u32) -> bool) {
        let mut at = anchor;
        while at != ROOT {
            let node = &self.arena.nodes[at as usize];
            if node.end() <= range.start {
                return;
            }
            let (from, to) = (range.start.max(node.depth), range.end.min(node.end()));
            for position in (from..to).rev() {
                if !f(at, (node.from + position - node.depth) as usize, position) {
                    return;
                }
            }
            at = node.parent;
        }
    }

    fn positions(&self, anchor: u32, range: Range<u32>) -> Vec<(u32, usize, u32)> {
        let mut found = Vec::new();
        self.for_positions(anchor, range, |at, page, position| {
            found.push((at, page, position));
            true
        });
        found.reverse();
        found
    }

    /// What a request at the end of `end` needs of all components: component, node, page in its run, position.
    pub(super) fn needed_places(&self, end: u32) -> Vec<(Component, u32, usize, u32)> {
        let depth = self.arena.nodes[end as usize].end();
        let present = ALL.into_iter().filter(|&c| self.span(c) > 0);
        present
            .flat_map(|c| {
                let places = self.positions(end, self.needed(c, depth));
                places.into_iter().map(move |(at, page, position)| (c, at, page, position))
            })
            .collect()
    }

    fn has(&self, c: Component, at: u32, page: usize, on_host_too: bool) -> bool {
        let run = &self.arena.runs[self.arena.nodes[at as usize].run as usize];
        run.component_page(c, Tier::Device, page).is_some()
            || on_host_too && run.component_page(c, Tier::Host, page).is_some()
    }

    /// Deepest usable prefix of at most `depth` pages above the end of `anchor`, and the component that cut it first.
    pub(super) fn usable(&self, anchor: u32, depth: u32, on_host_too: bool) -> (u32, Option<Component>) {
        let (mut depth, mut cut) = (depth, None);
        loop {
            let before = depth;
            for c in ALL.into_iter().filter(|&c| self.span(c) > 0) {
                let shorter = self.usable_for(c, anchor, depth, on_host_too);
                if shorter < depth {
                    cut = cut.or(Some(c));
                    depth = shorter;
                }
            }
            if depth == before {
                return (depth, cut);
            }
        }
    }

    /// One component: going up, a run of pages that is long enough, or that reaches the root.
    fn usable_for(&self, c: Component, anchor: u32, depth: u32, on_host_too: bool) -> u32 {
        let span = self.span(c) - u32::from(is_planted(Plant::ShortWindow) && self.span(c) > 1);
        let (mut end, mut run) = (depth, 0);
        self.for_positions(anchor, 0..depth, |at, page, position| {
            if run == span {
                return false;
            }
            if self.has(c, at, page, on_host_too) {
                run += 1;
            } else {
                (end, run) = (position, 0);
            }
            true
        });
        end
    }

    /// The place of a page of a run, as operations name it.
    fn place(&self, c: Component, at: u32, page: usize) -> Place {
        (c, self.arena.nodes[at as usize].run, page as u32)
    }

    /// What a load in flight brings to a place: the load, as a slot, and the device page. O(1).
    fn coming(&self, c: Component, at: u32, page: usize) -> Option<(u32, PageId)> {
        self.ops.coming(self.place(c, at, page))
    }

    // ---- holds ----

    pub(super) fn hold(&mut self, c: Component, anchor: u32, range: Range<u32>, add: bool) {
        for (at, page, _) in self.positions(anchor, range) {
            let run = &mut self.arena.runs[self.arena.nodes[at as usize].run as usize];
            let pages = run.pages as usize;
            let holds = &mut run.lists_mut(c).holds;
            holds.resize(pages, 0);
            holds[page] = if add { holds[page].saturating_add(1) } else { holds[page].saturating_sub(1) };
        }
    }

    /// Holds what a request at the end of `anchor` needs; how many pages of each component.
    pub(super) fn hold_spans(&mut self, anchor: u32) -> PerComponent<u32> {
        let mut held = [0; COMPONENTS];
        if self.has_components() {
            let depth = self.arena.nodes[anchor as usize].end();
            for c in ALL {
                let range = self.needed(c, depth);
                held[c as usize] = range.end - range.start;
                self.hold(c, anchor, range, true);
            }
        }
        held
    }

    pub(super) fn release_spans(&mut self, anchor: u32, held: PerComponent<u32>) {
        let depth = self.arena.nodes[anchor as usize].end();
        for c in ALL.into_iter().filter(|&c| held[c as usize] > 0) {
            self.hold(c, anchor, depth.saturating_sub(held[c as usize])..depth, false);
        }
    }

    /// Notes that one more session (or one less) will need what a request at the end of `end` needs.
    pub(super) fn keep_spans(&mut self, end: u32, add: bool) {
        if !self.has_components() {
            return;
        }
        let depth = self.arena.nodes[end as usize].end();
        for c in ALL {
            for (at, page, _) in self.positions(end, self.needed(c, depth)) {
                let run = &mut self.arena.runs[self.arena.nodes[at as usize].run as usize];
                let pages = run.pages as usize;
                let kept = &mut run.lists_mut(c).kept;
                kept.resize(pages, 0);
                kept[page] = if add { kept[page].saturating_add(1) } else { kept[page].saturating_sub(1) };
                self.orders.refresh_components(&self.arena, at);
            }
        }
    }

    /// Gives back what a lock holds of one component before the lock itself: a request that has computed past its window no
    /// longer needs the old one. Once per lock; later calls do nothing.
    ///
    /// # Errors
    /// A receipt of another tree, or of before a reset.
    pub fn release_component(&mut self, lock: &mut DeviceLock, c: Component) -> Result<(), TreeError> {
        let at = self.slot(lock.node)?;
        if self.arena.nodes[at as usize].own_locks == 0 {
            return Err(TreeError::ForeignReceipt(lock.node));
        }
        let mut held = [0; COMPONENTS];
        held[c as usize] = std::mem::take(&mut lock.held[c as usize]);
        self.release_spans(at, held);
        Ok(())
    }

    // ---- presence ----

    fn set_component(&mut self, c: Component, tier: Tier, at: u32, page: usize, to: PageId) {
        let run = self.arena.nodes[at as usize].run as usize;
        self.arena.runs[run].set_component_page(c, tier, page, to);
        let count = &mut self.component_pages[c as usize][tier as usize];
        *count = if to == NO_PAGE { *count - 1 } else { *count + 1 };
    }

    /// Frees one page of a component, if it is there.
    fn free_component(&mut self, c: Component, tier: Tier, at: u32, page: usize) -> bool {
        let run = self.arena.nodes[at as usize].run as usize;
        let Some(id) = self.arena.runs[run].component_page(c, tier, page) else { return false };
        self.set_component(c, tier, at, page, NO_PAGE);
        self.freed_list(c, tier).push(id);
        true
    }

    fn freed_list(&mut self, c: Component, tier: Tier) -> &mut Vec<PageId> {
        if tier == Tier::Device {
            &mut self.freed.device[c as usize]
        } else {
            &mut self.freed.host[c as usize]
        }
    }

    /// The Full copies of a node on a tier are gone: so are its components there.
    pub(super) fn drop_components(&mut self, at: u32, tier: Tier) {
        let node = &self.arena.nodes[at as usize];
        if !self.arena.runs[node.run as usize].has_components() {
            return;
        }
        for page in node.range() {
            for c in ALL {
                self.free_component(c, tier, at, page);
            }
        }
        self.orders.refresh_components(&self.arena, at);
    }

    /// Moves the pages of components that became free to `into`, which the caller frees. Call it after any call that can
    /// evict, end an operation or insert.
    pub fn drain_freed(&mut self, into: &mut ComponentPages) {
        for c in 0..COMPONENTS {
            into.device[c].append(&mut self.freed.device[c]);
            into.host[c].append(&mut self.freed.host[c]);
        }
    }

    /// Every page of a component that the tree owns on a tier: in place, with operations in flight, or freed and not drained.
    pub fn for_each_component_page(&self, c: Component, tier: Tier, mut f: impl FnMut(PageId)) {
        for run in &self.arena.runs {
            if let Some(lists) = run.lists(c) {
                lists.tier(tier).iter().filter(|&&page| page != NO_PAGE).for_each(|&page| f(page));
            }
        }
        for op in self.ops.iter().filter(|op| op.target() == tier) {
            op.copies.iter().filter(|(copy, _)| copy.component == c).for_each(|&(_, page)| f(page));
        }
        let freed = if tier == Tier::Device { &self.freed.device } else { &self.freed.host };
        freed[c as usize].iter().for_each(|&page| f(page));
    }

    /// Pages of a component in place on a tier.
    #[must_use]
    pub fn component_pages(&self, c: Component, tier: Tier) -> u32 {
        if tier == Tier::Store { 0 } else { self.component_pages[c as usize][tier as usize] }
    }

    /// What a request at the end of `node` uses of a component on the device, in order: its last `min(depth, span)` pages.
    /// Appended to `out`. For a state this is the slot to copy from before it is changed. O(nodes above + pages).
    ///
    /// # Errors
    /// Unknown node, a component that is not configured, or pages that are not there.
    pub fn component_device_pages(
        &self,
        node: NodeId,
        c: Component,
        out: &mut Vec<PageId>,
    ) -> Result<(), TreeError> {
        self.component_device_pages_with(node, c, &[], out)
    }

    /// [`component_device_pages`](Tree::component_device_pages) for a request that waits for `loads`: the pages that those
    /// bring stand in their places from the start of the load. What other loads bring does not count: the request would
    /// not know when it may read that. O(nodes above + pages x loads).
    ///
    /// # Errors
    /// Unknown node, a component that is not configured, or pages that are neither there nor brought by one of `loads`;
    /// then nothing is appended.
    pub fn component_device_pages_with(
        &self,
        node: NodeId,
        c: Component,
        loads: &[OpId],
        out: &mut Vec<PageId>,
    ) -> Result<(), TreeError> {
        let at = self.slot(node)?;
        if self.span(c) == 0 {
            return Err(TreeError::NoComponent);
        }
        let depth = self.arena.nodes[at as usize].end();
        let start = out.len();
        for (at, page, _) in self.positions(at, self.needed(c, depth)) {
            let run = &self.arena.runs[self.arena.nodes[at as usize].run as usize];
            let there = run.component_page(c, Tier::Device, page);
            let brought = || {
                let (load, id) = self.coming(c, at, page)?;
                loads.contains(&self.ops.get(load).id).then_some(id)
            };
            match there.or_else(brought) {
                Some(id) => out.push(id),
                None => {
                    out.truncate(start);
                    return Err(TreeError::NotOnDevice(node));
                }
            }
        }
        Ok(())
    }
}
