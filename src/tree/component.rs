//! Components besides Full: sliding-window attention and recurrent state.
//!
//! Both are page lists beside the Full lists of a run, with holes. What tells them apart is one number, the **span**: a
//! prefix of `d` pages can be used if its last `min(d, span)` pages all have the component. A window's span is the window;
//! a state lies at the end of a page, so its span is 1. Everything is per page, so a split hands nothing over and a
//! tombstone is a hole.
//!
//! A copy on a tier needs the Full copy on that tier: when that goes, the component's page goes with it. The other way
//! round they are free: losing a component shortens matches and leaves Full alone. Pages that became free are collected and
//! handed out by [`Tree::drain_freed`]; until then the tree still lists them as its own.

use std::ops::Range;

use crate::base::{NodeId, PageId, Tier, Violation};

use super::node::{Arena, NIL, NO_PAGE, ROOT, Residency, Run};
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
        self.components.as_ref().map(|lists| &lists[c as usize])
    }

    fn lists_mut(&mut self, c: Component) -> &mut Lists {
        &mut self.components.get_or_insert_default()[c as usize]
    }

    fn component_page(&self, c: Component, tier: Tier, page: usize) -> Option<PageId> {
        Lists::get(self.lists(c)?.tier(tier), page)
    }

    fn set_component_page(&mut self, c: Component, tier: Tier, page: usize, to: PageId) {
        let pages = self.pages as usize;
        let list = self.lists_mut(c).tier_mut(tier);
        list.resize(pages, NO_PAGE);
        list[page] = to;
    }

    fn is_held(&self, c: Component, page: usize) -> bool {
        self.lists(c).is_some_and(|lists| lists.holds.get(page).is_some_and(|&n| n > 0))
    }

    pub(super) fn truncate_components(&mut self, pages: usize) {
        for lists in self.components.iter_mut().flat_map(|all| all.iter_mut()) {
            lists.device.truncate(pages);
            lists.host.truncate(pages);
            lists.holds.truncate(pages);
        }
    }

    /// Appends the lists of the run that follows.
    pub(super) fn extend_components(&mut self, before: usize, tail: &Run) {
        if self.components.is_none() && tail.components.is_none() {
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
            if !mine.holds.is_empty() || !more.holds.is_empty() {
                mine.holds.resize(before, 0);
                mine.holds.extend_from_slice(&more.holds);
                mine.holds.resize(after, 0);
            }
        }
    }
}

impl Orders {
    /// Brings the component orders in line with a node: in if it has any page of the component on the tier. Victims go by
    /// last use, then the shallower first: what lies outside every useful window lies shallow.
    pub(super) fn refresh_components(&mut self, arena: &Arena, at: u32) {
        let node = &arena.nodes[at as usize];
        for c in ALL {
            for tier in [Tier::Device, Tier::Host] {
                let heap = &mut self.components[c as usize][tier as usize];
                let any = node.run != NIL
                    && arena.runs[node.run as usize].lists(c).is_some_and(|lists| {
                        lists.tier(tier).get(node.range()).is_some_and(|l| l.iter().any(|&p| p != NO_PAGE))
                    });
                if any {
                    heap.set(at, (node.tick, u64::from(node.depth)));
                } else {
                    heap.remove(at);
                }
            }
        }
    }

    /// After a touch: only nodes that are in have a key to change.
    pub(super) fn rekey_components(&mut self, arena: &Arena, at: u32) {
        let node = &arena.nodes[at as usize];
        for heap in self.components.iter_mut().flatten() {
            if heap.key(at).is_some() {
                heap.set(at, (node.tick, u64::from(node.depth)));
            }
        }
    }

    /// Before a node is deleted.
    pub(super) fn forget_components(&mut self, at: u32) {
        for heap in self.components.iter_mut().flatten() {
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
        let span = self.span(c);
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
        if self.arena.runs[node.run as usize].components.is_none() {
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
    /// Appended to `out`. For a state this is the slot to copy from before it is changed.
    ///
    /// # Errors
    /// Unknown node, a component that is not configured, or pages that are not there.
    pub fn component_device_pages(
        &self,
        node: NodeId,
        c: Component,
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
            match run.component_page(c, Tier::Device, page) {
                Some(id) => out.push(id),
                None => {
                    out.truncate(start);
                    return Err(TreeError::NotOnDevice(node));
                }
            }
        }
        Ok(())
    }

    // ---- insert ----

    pub(super) fn check_components(
        &self,
        path: &[u32],
        matched: u32,
        whole: u32,
        owned_from: u32,
        given: InsertComponents<'_>,
    ) -> Result<(), TreeError> {
        let (window, state) = (!given.window.is_empty(), given.state.is_some());
        if window && self.span(Component::Window) == 0 || state && self.span(Component::State) == 0 {
            return Err(TreeError::NoComponent);
        }
        let want = whole.saturating_sub(given.window_from);
        if window && given.window.len() != want as usize || state && whole == 0 {
            return Err(TreeError::PageCount { want, got: given.window.len() });
        }
        let mine = (given.window_from.max(owned_from) - given.window_from) as usize;
        let handed = given.window.get(mine..).unwrap_or_default();
        if let Some(&page) = handed.iter().chain(&given.state).find(|&&page| page == NO_PAGE) {
            return Err(TreeError::NotYours { page });
        }
        let Some(&last) = path.last() else { return Ok(()) };
        let same = |c: Component, at: u32, page: usize, theirs: PageId| {
            let run = &self.arena.runs[self.arena.nodes[at as usize].run as usize];
            run.component_page(c, Tier::Device, page) == Some(theirs)
        };
        if window {
            for (at, page, position) in self.positions(last, given.window_from.max(owned_from)..matched) {
                let theirs = given.window[(position - given.window_from) as usize];
                if same(Component::Window, at, page, theirs) {
                    return Err(TreeError::NotYours { page: theirs });
                }
            }
        }
        if let Some(theirs) = given.state.filter(|_| matched == whole) {
            for (at, page, _) in self.positions(last, whole - 1..whole) {
                if same(Component::State, at, page, theirs) {
                    return Err(TreeError::NotYours { page: theirs });
                }
            }
        }
        Ok(())
    }

    /// Fills holes with the caller's pages; what finds none goes back.
    pub(super) fn adopt_components(
        &mut self,
        last: u32,
        whole: u32,
        owned_from: u32,
        given: InsertComponents<'_>,
    ) {
        let mut touched = NIL;
        let mut put = |tree: &mut Tree, c: Component, (at, page, _): (u32, usize, u32), id: PageId| {
            if tree.has(c, at, page, false) {
                tree.freed_list(c, Tier::Device).push(id);
                return;
            }
            tree.set_component(c, Tier::Device, at, page, id);
            if std::mem::replace(&mut touched, at) != at {
                tree.orders.refresh_components(&tree.arena, at);
            }
        };
        if !given.window.is_empty() {
            for place in self.positions(last, given.window_from.max(owned_from)..whole) {
                let id = given.window[(place.2 - given.window_from) as usize];
                put(self, Component::Window, place, id);
            }
        }
        if let Some(id) = given.state {
            for place in self.positions(last, whole - 1..whole) {
                put(self, Component::State, place, id);
            }
        }
        if touched != NIL {
            self.orders.refresh_components(&self.arena, touched);
        }
    }

    // ---- copies between tiers ----

    /// Component pages to back up with a plan: those of its nodes, and what a request at its end needs of the nodes above.
    pub(super) fn plan_component_backup(&self, nodes: &[NodeId], copies: &mut Vec<ComponentCopy>) {
        copies.clear();
        let (true, Some(first), Some(last)) = (self.has_components(), nodes.first(), nodes.last()) else {
            return;
        };
        let (first, last) = (self.arena.nodes[first.index as usize].depth, last.index);
        let depth = self.arena.nodes[last as usize].end();
        for c in ALL.into_iter().filter(|&c| self.span(c) > 0) {
            let from = first.min(self.needed(c, depth).start);
            for (at, page, position) in self.positions(last, from..depth) {
                let node = &self.arena.nodes[at as usize];
                let run = &self.arena.runs[node.run as usize];
                let covered = position >= first || node.host == Residency::Present;
                if covered && run.component_page(c, Tier::Host, page).is_none() {
                    let source = run.component_page(c, Tier::Device, page);
                    copies.extend(source.map(|source| ComponentCopy { component: c, position, source }));
                }
            }
        }
    }

    /// Component pages to load so that a request can go on at the end of `target`.
    pub(super) fn plan_component_load(&self, target: u32, copies: &mut Vec<ComponentCopy>) {
        copies.clear();
        let depth = self.arena.nodes[target as usize].end();
        for c in ALL.into_iter().filter(|&c| self.span(c) > 0) {
            for (at, page, position) in self.positions(target, self.needed(c, depth)) {
                let run = &self.arena.runs[self.arena.nodes[at as usize].run as usize];
                if run.component_page(c, Tier::Device, page).is_none() {
                    let source = run.component_page(c, Tier::Host, page);
                    copies.extend(source.map(|source| ComponentCopy { component: c, position, source }));
                }
            }
        }
    }

    /// Checks that the copies of a plan still read what they say, and that there is a page for each.
    pub(super) fn check_copies(
        &self,
        anchor: NodeId,
        from: Tier,
        copies: &[ComponentCopy],
        pages: &[PageId],
    ) -> Result<(), TreeError> {
        if copies.len() != pages.len() {
            return Err(TreeError::PageCount { want: copies.len() as u32, got: pages.len() });
        }
        for copy in copies {
            let place = self.positions(self.slot(anchor)?, copy.position..copy.position.saturating_add(1));
            let there = place.first().is_some_and(|&(at, page, _)| {
                let run = &self.arena.runs[self.arena.nodes[at as usize].run as usize];
                run.component_page(copy.component, from, page) == Some(copy.source)
            });
            if !there {
                return Err(TreeError::StalePlan(anchor));
            }
        }
        Ok(())
    }

    pub(super) fn begin_copies(&mut self, slot: u32, copies: &[ComponentCopy], pages: &[PageId]) {
        let anchor = self.ops.get(slot).node;
        for (copy, &page) in copies.iter().zip(pages) {
            self.hold(copy.component, anchor, copy.position..copy.position + 1, true);
            self.ops.get_mut(slot).copies.push((*copy, page));
        }
    }

    /// Ends the component copies of an operation: published where the Full copy is there and the hole still is; freed
    /// otherwise.
    pub(super) fn end_copies(
        &mut self,
        anchor: u32,
        to: Tier,
        copies: &[(ComponentCopy, PageId)],
        publish: bool,
    ) {
        for &(copy, id) in copies {
            let c = copy.component;
            self.hold(c, anchor, copy.position..copy.position + 1, false);
            let place = self.positions(anchor, copy.position..copy.position + 1);
            let Some(&(at, page, _)) = place.first() else { continue };
            let node = &self.arena.nodes[at as usize];
            let full = if to == Tier::Device { node.device } else { node.host };
            let hole = self.arena.runs[node.run as usize].component_page(c, to, page).is_none();
            if publish && hole && full == Residency::Present {
                self.set_component(c, to, at, page, id);
                self.orders.refresh_components(&self.arena, at);
            } else {
                self.freed_list(c, to).push(id);
            }
        }
    }

    /// Takes component pages that came from a store: `pages` are those of the last `pages.len()` pages of `node`'s path. All
    /// or nothing: they are kept only if every one of them lies under a published host copy; a page whose place is taken
    /// is freed. Returns the pages kept.
    ///
    /// # Errors
    /// Unknown node, a component that is not configured, or more pages than the path has. Nothing is handed over.
    pub fn adopt_component_host(
        &mut self,
        node: NodeId,
        c: Component,
        pages: &[PageId],
    ) -> Result<u32, TreeError> {
        let at = self.slot(node)?;
        if self.span(c) == 0 {
            return Err(TreeError::NoComponent);
        }
        let depth = self.arena.nodes[at as usize].end();
        if pages.len() > depth as usize {
            return Err(TreeError::PageCount { want: depth, got: pages.len() });
        }
        if let Some(&page) = pages.iter().find(|&&page| page == NO_PAGE) {
            return Err(TreeError::NotYours { page });
        }
        let places = self.positions(at, depth - pages.len() as u32..depth);
        let backed = places.iter().all(|&(at, ..)| self.arena.nodes[at as usize].host == Residency::Present);
        let mut kept = 0;
        for (&(at, page, _), &id) in places.iter().zip(pages) {
            let run = &self.arena.runs[self.arena.nodes[at as usize].run as usize];
            if backed && run.component_page(c, Tier::Host, page).is_none() {
                self.set_component(c, Tier::Host, at, page, id);
                self.orders.refresh_components(&self.arena, at);
                kept += 1;
            } else {
                self.freed_list(c, Tier::Host).push(id);
            }
        }
        Ok(kept)
    }

    // ---- eviction ----

    /// Frees `want_pages` pages of a component on a tier, or all that nobody holds if that is less; Full copies stay. Least
    /// recently used first, then the shallowest. Freed pages come with [`drain_freed`](Tree::drain_freed). Returns their
    /// number. O((pages freed + nodes held) x log nodes).
    pub fn evict_component(&mut self, c: Component, tier: Tier, want_pages: u32) -> u32 {
        if tier == Tier::Store {
            return 0;
        }
        let (mut freed, mut aside) = (0, Vec::new());
        while freed < want_pages {
            let Some(at) = self.orders.components[c as usize][tier as usize].peek() else { break };
            for page in self.arena.nodes[at as usize].range() {
                let run = self.arena.nodes[at as usize].run as usize;
                if freed < want_pages && !self.arena.runs[run].is_held(c, page) {
                    freed += u32::from(self.free_component(c, tier, at, page));
                }
            }
            if freed < want_pages {
                // Whatever is left of it is held.
                self.orders.components[c as usize][tier as usize].remove(at);
                aside.push(at);
            } else {
                self.orders.refresh_components(&self.arena, at);
            }
        }
        for at in aside {
            self.orders.refresh_components(&self.arena, at);
        }
        freed
    }

    /// Keeps at most `cap` states on the device on the path to `node`: the shallowest go first, except at forks, at the end of
    /// `node`, and where one is held. Host copies stay. Returns the states freed. O(path).
    ///
    /// # Errors
    /// Unknown node, or no State component.
    pub fn cap_states(&mut self, node: NodeId, cap: u32) -> Result<u32, TreeError> {
        let end = self.slot(node)?;
        if self.span(Component::State) == 0 {
            return Err(TreeError::NoComponent);
        }
        let depth = self.arena.nodes[end as usize].end();
        let c = Component::State;
        let states: Vec<_> = self
            .positions(end, 0..depth)
            .into_iter()
            .filter(|&(at, page, _)| self.has(c, at, page, false))
            .collect();
        let mut excess = (states.len() as u32).saturating_sub(cap);
        let mut freed = 0;
        for (at, page, position) in states {
            let n = &self.arena.nodes[at as usize];
            let fork = position + 1 == n.end() && n.kids != 1;
            let held = self.arena.runs[n.run as usize].is_held(c, page);
            if excess == 0 || position + 1 == depth {
                break;
            }
            if !fork && !held && self.free_component(c, Tier::Device, at, page) {
                self.orders.refresh_components(&self.arena, at);
                freed += 1;
                excess -= 1;
            }
        }
        Ok(freed)
    }

    // ---- sanity ----

    /// Broken rules of one node's components, and of the counters if `at` is the root.
    pub(super) fn component_faults(&self, at: u32) -> Vec<Violation> {
        let mut found = Vec::new();
        let mut must = |ok: bool, rule: &'static str, detail: String| {
            if !ok {
                found.push(Violation { rule, detail });
            }
        };
        if at == ROOT {
            for c in ALL {
                for tier in [Tier::Device, Tier::Host] {
                    let mut count = 0;
                    for run in &self.arena.runs {
                        let pages = run.lists(c).map_or(&[][..], |lists| lists.tier(tier));
                        count += pages.iter().filter(|&&page| page != NO_PAGE).count() as u32;
                    }
                    let kept = self.component_pages[c as usize][tier as usize];
                    must(
                        count == kept,
                        "component-counters",
                        format!("{c:?} {tier:?}: {kept}, found {count}"),
                    );
                }
            }
            return found;
        }
        let node = &self.arena.nodes[at as usize];
        let run = &self.arena.runs[node.run as usize];
        for c in ALL {
            for (tier, full) in [(Tier::Device, node.device), (Tier::Host, node.host)] {
                let any = node.range().any(|page| run.component_page(c, tier, page).is_some());
                let ok = !any || full == Residency::Present && self.span(c) > 0;
                must(ok, "component-under-full", format!("node {at}: {c:?} on {tier:?} under {full:?}"));
                let key = self.orders.components[c as usize][tier as usize].key(at);
                let want = any.then_some((node.tick, u64::from(node.depth)));
                must(
                    key == want,
                    "component-order",
                    format!("node {at}: {c:?} {tier:?} {key:?}, not {want:?}"),
                );
            }
        }
        found
    }
}
