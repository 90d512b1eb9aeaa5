//! Component pages on the move: in with an insert or from a store, between tiers with an operation, out with an eviction.

use crate::base::plant::{Plant, is_planted};
use crate::base::{NodeId, OpId, PageId, Tier, Violation};

use super::super::node::{NIL, NO_PAGE, ROOT, Residency};
use super::super::{BackupPlan, Tree, TreeError};
use super::{ALL, Component, ComponentCopy, InsertComponents, any_pages};

impl Tree {
    // ---- insert ----

    pub(in crate::tree) fn check_components(
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
        if window {
            for (at, page, position) in self.positions(last, given.window_from.max(owned_from)..matched) {
                let theirs = given.window[(position - given.window_from) as usize];
                self.check_place(Component::Window, at, page, theirs)?;
            }
        }
        if let Some(theirs) = given.state.filter(|_| matched == whole) {
            for (at, page, _) in self.positions(last, whole - 1..whole) {
                self.check_place(Component::State, at, page, theirs)?;
            }
        }
        Ok(())
    }

    /// Whether an insert may bring a page to a place that the tree knows. Where a load in flight brings one it may not: the
    /// load's page would find its place taken at the end, and requests may be computing on it by then.
    fn check_place(&self, c: Component, at: u32, page: usize, theirs: PageId) -> Result<(), TreeError> {
        let run = &self.arena.runs[self.arena.nodes[at as usize].run as usize];
        if run.component_page(c, Tier::Device, page) == Some(theirs) {
            return Err(TreeError::NotYours { page: theirs });
        }
        let comes = self.ops.places_coming() > 0 && self.coming(c, at, page).is_some();
        if comes && !is_planted(Plant::OvertakeLoad) {
            return Err(TreeError::LoadInFlight(self.arena.id(at)));
        }
        Ok(())
    }

    /// Fills holes with the caller's pages; what finds none goes back.
    pub(in crate::tree) fn adopt_components(
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
            // A node's pages come one after the other; it is filed when all of them are there.
            let before = std::mem::replace(&mut touched, at);
            if before != at && before != NIL {
                tree.orders.refresh_components(&tree.arena, before);
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
    pub(in crate::tree) fn plan_component_backup(&self, nodes: &[NodeId], copies: &mut Vec<ComponentCopy>) {
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

    /// Component pages that a request at the end of a backed-up node needs and that lie on the device and not on the
    /// host, except those that a copy in flight brings.
    pub(in crate::tree) fn plan_component_holes(&self, end: u32, copies: &mut Vec<ComponentCopy>) {
        for (c, at, page, position) in self.needed_places(end) {
            let node = &self.arena.nodes[at as usize];
            let run = &self.arena.runs[node.run as usize];
            let hole = node.host == Residency::Present && run.component_page(c, Tier::Host, page).is_none();
            if let (true, Some(source)) = (hole, run.component_page(c, Tier::Device, page)) {
                let copy = ComponentCopy { component: c, position, source };
                let backups = self.ops.iter().filter(|op| op.target() == Tier::Host);
                let coming = backups.flat_map(|op| &op.copies).any(|(other, _)| *other == copy);
                copies.extend((!coming).then_some(copy));
            }
        }
    }

    /// Lists the nodes that hold the first `within_pages` pages of a component to be evicted from the device, as far as
    /// some of them have no copy on the host. O(k log k) for k nodes.
    pub fn components_ahead(&self, c: Component, within_pages: u32, out: &mut Vec<NodeId>) {
        let mut left = within_pages;
        for order in &self.orders.components[c as usize][Tier::Device as usize] {
            for at in order.in_order() {
                if left == 0 {
                    return;
                }
                let node = &self.arena.nodes[at as usize];
                let run = &self.arena.runs[node.run as usize];
                let goes = |&page: &usize| {
                    run.component_page(c, Tier::Device, page).is_some() && !run.is_held(c, page)
                };
                let bare = |page: usize| run.component_page(c, Tier::Host, page).is_none();
                let (pages, lacks) = node
                    .range()
                    .filter(goes)
                    .fold((0, false), |(n, lacks), page| (n + 1, lacks || bare(page)));
                left = left.saturating_sub(pages);
                if lacks {
                    out.push(self.arena.id(at));
                }
            }
        }
    }

    /// Plans copies to the host of the component pages of `node` that nobody holds and that have none there: of all components,
    /// as a window page takes the state at its place along. Full stays where it is: a component's page may lie on the
    /// host as long as Full lies anywhere. O(pages of the node).
    ///
    /// # Errors
    /// Unknown node, the root, or a node that is not on the device.
    pub fn plan_components_ahead(&self, node: NodeId, plan: &mut BackupPlan) -> Result<(), TreeError> {
        plan.clear_for(node);
        let at = self.slot_below_root(node)?;
        let n = &self.arena.nodes[at as usize];
        if n.device != Residency::Present {
            return Err(TreeError::NotOnDevice(node));
        }
        let run = &self.arena.runs[n.run as usize];
        let pages = ALL.into_iter().flat_map(|c| n.range().map(move |page| (c, page)));
        for (c, page) in pages.filter(|&(c, page)| !run.is_held(c, page)) {
            if let (Some(source), None) =
                (run.component_page(c, Tier::Device, page), run.component_page(c, Tier::Host, page))
            {
                let position = n.depth + (page - n.from as usize) as u32;
                plan.copies.push(ComponentCopy { component: c, position, source });
            }
        }
        Ok(())
    }

    /// Component pages to load so that a request can go on at the end of `target`. Those that loads in flight bring are not
    /// loaded again; those loads are added to `joins`.
    pub(in crate::tree) fn plan_component_load(
        &self,
        target: u32,
        copies: &mut Vec<ComponentCopy>,
        joins: &mut Vec<OpId>,
    ) {
        copies.clear();
        let depth = self.arena.nodes[target as usize].end();
        for c in ALL.into_iter().filter(|&c| self.span(c) > 0) {
            for (at, page, position) in self.positions(target, self.needed(c, depth)) {
                let run = &self.arena.runs[self.arena.nodes[at as usize].run as usize];
                if run.component_page(c, Tier::Device, page).is_some() {
                    continue;
                }
                let coming = self.coming(c, at, page).filter(|_| !is_planted(Plant::LoadTwice));
                if let Some((load, _)) = coming {
                    let op = self.ops.get(load).id;
                    if !joins.contains(&op) {
                        joins.push(op);
                    }
                } else {
                    let source = run.component_page(c, Tier::Host, page);
                    copies.extend(source.map(|source| ComponentCopy { component: c, position, source }));
                }
            }
        }
    }

    /// Checks that the copies of a plan still read what they say, that there is a page for each, and for those to the device
    /// that nothing has or will have come to their places without them.
    pub(in crate::tree) fn check_copies(
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
                let open = || {
                    run.component_page(copy.component, Tier::Device, page).is_none()
                        && self.coming(copy.component, at, page).is_none()
                };
                run.component_page(copy.component, from, page) == Some(copy.source)
                    && (from == Tier::Device || open())
            });
            if !there {
                return Err(TreeError::StalePlan(anchor));
            }
        }
        Ok(())
    }

    pub(in crate::tree) fn begin_copies(&mut self, slot: u32, copies: &[ComponentCopy], pages: &[PageId]) {
        let anchor = self.ops.get(slot).node;
        let load = self.ops.get(slot).target() == Tier::Device;
        for (copy, &id) in copies.iter().zip(pages) {
            let range = copy.position..copy.position + 1;
            self.hold(copy.component, anchor, range.clone(), true);
            for (at, page, _) in self.positions(anchor, range).into_iter().filter(|_| load) {
                let place = self.place(copy.component, at, page);
                self.ops.set_coming(place, Some((slot, id)));
            }
            self.ops.get_mut(slot).copies.push((*copy, id));
        }
    }

    /// Ends the component copies of an operation: published where there is a Full copy for them to lie under (on the device
    /// for those on the device, on either tier for those on the host) and the hole still is; freed otherwise.
    pub(in crate::tree) fn end_copies(
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
            if to == Tier::Device {
                self.ops.set_coming(self.place(c, at, page), None);
            }
            let node = &self.arena.nodes[at as usize];
            let under =
                node.device == Residency::Present || to == Tier::Host && node.host == Residency::Present;
            let hole = self.arena.runs[node.run as usize].component_page(c, to, page).is_none();
            if publish && hole && under {
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

    /// Frees `want_pages` pages of a component on a tier, or all that nobody holds if that is less; Full copies stay, and the
    /// state at the place of a window page goes with it, beyond what was wanted. Least recently used first, then the
    /// shallowest. Freed pages come with [`drain_freed`](Tree::drain_freed). Returns their
    /// number. O((pages freed + nodes held) x log nodes).
    pub fn evict_component(&mut self, c: Component, tier: Tier, want_pages: u32) -> u32 {
        if tier == Tier::Store {
            return 0;
        }
        let mut freed = 0;
        for kept in [false, true] {
            freed += self.evict_component_pages(c, tier, kept, want_pages - freed);
        }
        freed
    }

    /// The pages that a session will need, or the others.
    fn evict_component_pages(&mut self, c: Component, tier: Tier, kept: bool, want_pages: u32) -> u32 {
        let (mut freed, mut aside) = (0, Vec::new());
        while freed < want_pages {
            let order = &mut self.orders.components[c as usize][tier as usize][usize::from(kept)];
            let Some(at) = order.peek() else { break };
            for page in self.arena.nodes[at as usize].range() {
                let run = &self.arena.runs[self.arena.nodes[at as usize].run as usize];
                let goes = !run.is_held(c, page) && run.is_kept(c, page) == kept;
                let with_state = c == Component::Window
                    && !run.is_held(Component::State, page)
                    && !is_planted(Plant::WindowGoesAlone);
                if freed < want_pages && goes && self.free_component(c, tier, at, page) {
                    freed += 1;
                    if with_state {
                        self.free_component(Component::State, tier, at, page);
                    }
                }
            }
            if freed < want_pages {
                // Whatever is left of it in this order is held.
                self.orders.components[c as usize][tier as usize][usize::from(kept)].remove(at);
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

    /// What loads bring has its places, each open and of one load only.
    fn coming_faults(&self) -> Vec<Violation> {
        let (mut found, mut places) = (Vec::new(), 0);
        for op in self.ops.iter().filter(|op| op.target() == Tier::Device) {
            for &(copy, id) in &op.copies {
                places += 1;
                let c = copy.component;
                let place = self.positions(op.node, copy.position..copy.position + 1);
                let open = place.first().is_some_and(|&(at, page, _)| {
                    let mine = self.coming(c, at, page).is_some_and(|(load, to)| {
                        self.ops.is_live(load) && self.ops.get(load).id == op.id && to == id
                    });
                    mine && !self.has(c, at, page, false)
                });
                if !open {
                    let detail = format!("{:?} brings {id:?} to {copy:?}, which has no room for it", op.id);
                    found.push(Violation { rule: "component-coming", detail });
                }
            }
        }
        if places != self.ops.places_coming() {
            let detail = format!("{places} places, {} noted", self.ops.places_coming());
            found.push(Violation { rule: "component-coming", detail });
        }
        found
    }

    /// Broken rules of one node's components, and of the counters if `at` is the root.
    pub(in crate::tree) fn component_faults(&self, at: u32) -> Vec<Violation> {
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
            found.extend(self.coming_faults());
            return found;
        }
        let node = &self.arena.nodes[at as usize];
        for c in ALL {
            for (tier, full) in [(Tier::Device, node.device), (Tier::Host, node.host)] {
                let by_order = any_pages(&self.arena, node, c, tier);
                let any = by_order != [false; 2];
                let full = full == Residency::Present || node.device == Residency::Present;
                let ok = !any || full && self.span(c) > 0;
                must(ok, "component-under-full", format!("node {at}: {c:?} on {tier:?} without full"));
                for (heap, any) in self.orders.components[c as usize][tier as usize].iter().zip(by_order) {
                    let key = heap.key(at);
                    let want = any.then_some((node.tick, u64::from(node.depth)));
                    must(
                        key == want,
                        "component-order",
                        format!("node {at}: {c:?} {tier:?} {key:?}, not {want:?}"),
                    );
                }
            }
        }
        found
    }
}
