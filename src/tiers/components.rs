//! Pools of the components besides Full: windows and states. Who owns their pages, and how room is made for them.
//!
//! The tree says where a component page lies and when nobody needs it any more; here are the allocators. Losing a
//! component page only shortens matches, so room is made by giving up what was not used for longest, with no copy first.

use super::action::PoolKind;
use super::config::CoreConfig;
use super::core::{Core, CoreError, pool_of};
use super::outcome::{PageCounts, RequestComponents};
use super::request::RequestId;
use crate::base::{PageId, Tier};
use crate::pool::PagePool;
use crate::tree::{Component, ComponentCopy, ComponentPages, TreeError};

/// All components, in the order of [`PoolKind`] and of lists by component.
pub(super) const COMPONENTS: [Component; 2] = [Component::Window, Component::State];

/// The pool of a component.
pub(super) fn pool_kind(c: Component) -> PoolKind {
    match c {
        Component::Window => PoolKind::Window,
        Component::State => PoolKind::State,
    }
}

/// Allocators of one component.
#[derive(Debug)]
struct Pools {
    device: PagePool,
    host: PagePool,
    /// Device pages handed out since the last write-ahead.
    taken: u32,
}

/// Allocators of all components that are configured.
#[derive(Debug)]
pub(super) struct ComponentPools {
    pools: [Option<Pools>; 2],
    /// Pages on their way from the tree to the pools; empty between calls.
    freed: ComponentPages,
}

impl ComponentPools {
    pub(super) fn new(config: &CoreConfig) -> ComponentPools {
        let pools = |device, host| Pools { device: pool_of(device), host: pool_of(host), taken: 0 };
        ComponentPools {
            pools: [
                config.window.map(|w| pools(w.device, w.host)),
                config.state.map(|s| pools(s.device, s.host)),
            ],
            freed: ComponentPages::default(),
        }
    }

    /// Empty host pools of other sizes.
    pub(super) fn renew_host(&mut self, config: &CoreConfig) {
        let sizes = [config.window.map(|w| w.host), config.state.map(|s| s.host)];
        for (pools, size) in self.pools.iter_mut().zip(sizes) {
            if let (Some(pools), Some(size)) = (pools, size) {
                pools.host = pool_of(size);
            }
        }
    }

    pub(super) fn has(&self, c: Component) -> bool {
        self.pools[c as usize].is_some()
    }

    /// Without components, nothing here does anything.
    pub(super) fn any(&self) -> bool {
        self.pools.iter().any(Option::is_some)
    }

    pub(super) fn configured(&self) -> impl Iterator<Item = Component> + use<> {
        let has = COMPONENTS.map(|c| self.has(c));
        COMPONENTS.into_iter().filter(move |&c| has[c as usize])
    }

    pub(super) fn pool(&self, c: Component, tier: Tier) -> Option<&PagePool> {
        let pools = self.pools[c as usize].as_ref()?;
        Some(if tier == Tier::Device { &pools.device } else { &pools.host })
    }

    fn pool_mut(&mut self, c: Component, tier: Tier) -> Option<&mut PagePool> {
        let pools = self.pools[c as usize].as_mut()?;
        Some(if tier == Tier::Device { &mut pools.device } else { &mut pools.host })
    }

    /// How many pages of a component to have copies of before they are evicted: what was taken since this was asked last
    /// will be taken again, and nobody waits for the copy of a window. At least the share that is configured.
    pub(super) fn write_ahead_pages(&mut self, c: Component, percent: u32) -> u32 {
        let Some(pools) = &mut self.pools[c as usize] else { return 0 };
        let share = u64::from(pools.device.capacity()) * u64::from(percent) / 100;
        let deep = std::mem::take(&mut pools.taken).max(share as u32);
        deep.saturating_sub(pools.device.free_pages())
    }

    pub(super) fn free_pages(&self, c: Component, tier: Tier) -> u32 {
        self.pool(c, tier).map_or(0, PagePool::free_pages)
    }
}

impl Core {
    /// Component pages that the tree let go of go back to their pools. After every call that can evict, insert or end an
    /// operation; O(pages), nothing without components.
    pub(super) fn settle_components(&mut self) {
        if !self.components.any() {
            return;
        }
        let mut freed = std::mem::take(&mut self.components.freed);
        self.tree.drain_freed(&mut freed);
        for c in COMPONENTS {
            for (tier, lists) in [(Tier::Device, &mut freed.device), (Tier::Host, &mut freed.host)] {
                let mut pages = std::mem::take(&mut lists[c as usize]);
                self.free_component(c, tier, &pages);
                pages.clear();
                lists[c as usize] = pages;
            }
        }
        self.components.freed = freed;
    }

    /// Gives component pages back.
    pub(super) fn free_component(&mut self, c: Component, tier: Tier, pages: &[PageId]) {
        if pages.is_empty() {
            return;
        }
        for page in pages {
            self.digest.mix(u64::from(page.0) | (2 + c as u64) << 33);
        }
        self.note(tier, pool_kind(c), pages);
        let done = self.components.pool_mut(c, tier).is_some_and(|pool| pool.free(pages).is_ok());
        if !done {
            self.violation("component pages freed twice");
        }
    }

    /// Makes `want` pages of a component free, as far as nobody holds what is there. O(pages given up x log nodes).
    pub(super) fn make_component_room(&mut self, c: Component, tier: Tier, want: u32) -> bool {
        self.settle_components();
        let free = self.components.free_pages(c, tier);
        if free >= want {
            return true;
        }
        if tier == Tier::Device {
            // See `make_device_room`.
            self.write_due();
        }
        let gone = self.tree.evict_component(c, tier, want - free);
        self.stats.component_evicted_pages += u64::from(gone);
        self.settle_components();
        self.components.free_pages(c, tier) >= want
    }

    /// Appends `n` pages of a component, making room. All or nothing.
    pub(super) fn alloc_component(
        &mut self,
        c: Component,
        tier: Tier,
        n: u32,
        into: &mut Vec<PageId>,
    ) -> bool {
        if n == 0 {
            return true;
        }
        let room = self.make_component_room(c, tier, n);
        if let (Tier::Device, Some(pools)) = (tier, &mut self.components.pools[c as usize]) {
            pools.taken = pools.taken.saturating_add(n);
        }
        room && self.components.pool_mut(c, tier).is_some_and(|pool| pool.alloc(n, into))
    }

    /// One target page for each copy of a plan, in its order, or none at all.
    pub(super) fn alloc_copies(&mut self, tier: Tier, copies: &[ComponentCopy]) -> Option<Vec<PageId>> {
        let mut pages: [Vec<PageId>; 2] = Default::default();
        for c in COMPONENTS {
            let want = copies.iter().filter(|copy| copy.component == c).count() as u32;
            if !self.alloc_component(c, tier, want, &mut pages[c as usize]) {
                COMPONENTS.into_iter().for_each(|c| self.free_component(c, tier, &pages[c as usize]));
                return None;
            }
        }
        let mut pages = pages.map(Vec::into_iter);
        copies.iter().map(|copy| pages[copy.component as usize].next()).collect()
    }

    /// The same where less will do: leaves out the copies that find no page, the shallowest first, since a request at the
    /// end of the plan can do without them or with none.
    pub(super) fn alloc_copies_that_fit(
        &mut self,
        tier: Tier,
        copies: &mut Vec<ComponentCopy>,
    ) -> Vec<PageId> {
        for c in COMPONENTS {
            let want = copies.iter().filter(|copy| copy.component == c).count() as u32;
            if want > 0 && !self.make_component_room(c, tier, want) {
                let mut excess = want.saturating_sub(self.components.free_pages(c, tier));
                self.stats.component_unsaved_pages += u64::from(excess);
                copies.retain(|copy| {
                    let out = copy.component == c && excess > 0;
                    excess -= u32::from(out);
                    !out
                });
            }
        }
        let pages = self.alloc_copies(tier, copies);
        pages.unwrap_or_else(|| {
            self.violation("component room was made and is not there");
            copies.clear();
            Vec::new()
        })
    }

    /// Gives the pages of copies back that were not begun.
    pub(super) fn free_copies(&mut self, tier: Tier, copies: &[ComponentCopy], pages: &[PageId]) {
        for (copy, page) in copies.iter().zip(pages) {
            self.free_component(copy.component, tier, std::slice::from_ref(page));
        }
    }

    /// What the request has of the components besides Full. What its loads in flight bring is listed from their start, at
    /// its place, and [`load_state`](Core::load_state) says on which layers it may be read. O(window x loads of the request).
    pub fn request_components(&self, id: RequestId) -> Result<RequestComponents, CoreError> {
        let request = self.request_ref(id)?;
        let complete = !request.load_failed;
        let mut found = RequestComponents {
            window_from: request.shared,
            own_window_from: if self.components.has(Component::Window) {
                request.own_window_from()
            } else {
                request.shared
            },
            complete,
            window: Vec::new(),
            state_in: None,
            state: request.state,
        };
        // Behind a hole the shared window serves nobody.
        let hole = found.own_window_from > request.shared;
        if hole {
            found.window_from = found.own_window_from;
        }
        if let Some(lock) = request.lock.as_ref().filter(|_| complete && request.shared > 0) {
            for c in self.components.configured().filter(|&c| c == Component::State || !hole) {
                let mut pages = Vec::new();
                match self.tree.component_device_pages_with(lock.node(), c, &request.loads, &mut pages) {
                    Ok(()) => {}
                    // Published off a page border: the state has moved on, in the request's own slot.
                    Err(TreeError::NotOnDevice(_)) if c == Component::State && request.state.is_some() => {}
                    Err(error) => return Err(error.into()),
                }
                match c {
                    Component::Window => {
                        found.window_from -= pages.len() as u32;
                        found.window = pages;
                    }
                    Component::State => found.state_in = pages.last().copied(),
                }
            }
        }
        found.window.extend_from_slice(&request.window);
        Ok(found)
    }

    /// Who owns the pages of a component, as [`page_counts`](Core::page_counts). O(pages).
    #[must_use]
    pub fn component_counts(&self, c: Component, tier: Tier) -> PageCounts {
        let Some(pool) = self.components.pool(c, tier) else { return PageCounts::default() };
        let (mut cached_pages, mut request_pages, mut in_flight_pages) = (0, 0, 0);
        self.tree.for_each_component_page(c, tier, |_| cached_pages += 1);
        self.for_each_own_component_page(c, tier, |_, who| match who {
            "request" => request_pages += 1,
            _ => in_flight_pages += 1,
        });
        let sum = pool.free_pages() + cached_pages + request_pages + in_flight_pages;
        PageCounts {
            capacity_pages: pool.capacity(),
            free_pages: pool.free_pages(),
            cached_pages,
            request_pages,
            in_flight_pages,
            leaked_pages: i64::from(pool.capacity()) - i64::from(sum),
        }
    }

    /// Whether a component page is free.
    #[must_use]
    pub fn is_component_free(&self, c: Component, tier: Tier, page: PageId) -> bool {
        self.components.pool(c, tier).is_some_and(|pool| pool.is_free(page))
    }

    /// Component pages of requests and prefetches, with a word for the owner.
    pub(super) fn for_each_own_component_page(
        &self,
        c: Component,
        tier: Tier,
        mut f: impl FnMut(PageId, &'static str),
    ) {
        match tier {
            Tier::Device => {
                for (_, request) in self.requests.iter() {
                    match c {
                        Component::Window => request.window.iter().for_each(|&page| f(page, "request")),
                        Component::State => request.state.iter().for_each(|&page| f(page, "request")),
                    }
                }
            }
            Tier::Host => self.prefetches.for_each_page(pool_kind(c), |page| f(page, "prefetch")),
            Tier::Store => {}
        }
    }
}
