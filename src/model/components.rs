//! Components in the model: per page, with holes. Component 0 is the window, 1 the state; tier 0 the device, 1 the host.

use std::collections::BTreeSet;

use super::{At, Model, Slot};

/// A page that something needs: component and page.
pub type Hold = (usize, At);

/// A component page to copy: component, page of the model, page id to read.
pub type Copy = (usize, At, u32);

impl Model {
    /// The last pages of a path that a prefix ending there needs of a component.
    pub(super) fn needed(&self, at: At, c: usize) -> Vec<At> {
        self.up(at).into_iter().take(self.spans[c] as usize).collect()
    }

    /// Deepest usable part of a path.
    pub(super) fn usable(&self, path: &[At], on_host_too: bool) -> usize {
        let has = |c: usize, at: &At| {
            let [device, host] = self.pages[at].components[c];
            device.is_some() || on_host_too && host.is_some()
        };
        let fits = |depth: &usize| {
            (0..2).all(|c| {
                let from = depth - (*depth).min(self.spans[c] as usize);
                path[from..*depth].iter().all(|at| has(c, at))
            })
        };
        (0..=path.len()).rev().find(fits).unwrap_or(0)
    }

    /// What a lock or pin at the end of a path holds.
    pub fn hold(&mut self, at: At) -> Vec<Hold> {
        let held: Vec<Hold> =
            (0..2).flat_map(|c| self.needed(at, c).into_iter().map(move |at| (c, at))).collect();
        self.holds.extend(&held);
        held
    }

    /// Gives holds back.
    pub fn release(&mut self, held: &[Hold]) {
        for hold in held {
            let i = self.holds.iter().position(|h| h == hold).expect("release what was held");
            self.holds.swap_remove(i);
        }
    }

    /// The page of a component.
    #[must_use]
    pub fn component(&self, at: At, c: usize, tier: usize) -> Option<u32> {
        self.pages[&at].components[c][tier]
    }

    /// Fills a hole, or frees the page.
    pub fn adopt(&mut self, at: At, c: usize, tier: usize, page: u32) {
        let free = self.pages[&at].components[c][tier].is_none();
        if free { self.page(at).components[c][tier] = Some(page) } else { self.freed[c][tier].push(page) }
    }

    /// The Full copy on a tier is gone.
    pub(super) fn drop_components(&mut self, at: At, tier: usize) {
        for c in 0..2 {
            let page = self.page(at).components[c][tier].take();
            self.freed[c][tier].extend(page);
        }
    }

    /// Pages that became free since the last call.
    pub fn drain_freed(&mut self) -> [[BTreeSet<u32>; 2]; 2] {
        std::mem::take(&mut self.freed).map(|tiers| tiers.map(|pages| pages.into_iter().collect()))
    }

    /// Every page of a component on a tier, those of copies in flight included.
    #[must_use]
    pub fn component_held(&self, c: usize, tier: usize) -> BTreeSet<u32> {
        let flying =
            self.ops.values().filter(|op| usize::from(!op.load) == tier).flat_map(|op| op.copies.iter());
        let flying = flying.filter(|(copy, _)| copy.0 == c).map(|(_, page)| *page);
        self.pages.values().filter_map(|p| p.components[c][tier]).chain(flying).collect()
    }

    /// Component pages to back up with `pages`.
    #[must_use]
    pub fn plan_component_backup(&self, pages: &[At]) -> Vec<Copy> {
        let Some(&end) = pages.last() else { return vec![] };
        let mut found = Vec::new();
        for c in (0..2).filter(|&c| self.spans[c] > 0) {
            let needed = self.needed(end, c);
            for at in self.up(end).into_iter().rev() {
                let [device, host] = self.pages[&at].components[c];
                let above = needed.contains(&at) && self.pages[&at].host.there();
                if let (Some(source), None, true) = (device, host, pages.contains(&at) || above) {
                    found.push((c, at, source));
                }
            }
        }
        found
    }

    /// The load in flight that brings a component of a page, and the page it brings.
    #[must_use]
    pub fn coming(&self, at: At, c: usize) -> Option<(u64, u32)> {
        let loads = self.ops.iter().filter(|(_, op)| op.load);
        let mut brought = loads.flat_map(|(op, record)| record.copies.iter().map(move |copy| (*op, copy)));
        let found = brought.find(|(_, (copy, _))| (copy.0, copy.1) == (c, at));
        found.map(|(op, (_, page))| (op, *page))
    }

    /// Component pages to load with `pages` so that a request can go on at the end of a path. What comes with a load already
    /// is left out, and what lies below `pages`: its Full copy comes with a load that waits for this one.
    #[must_use]
    pub fn plan_component_load(&self, end: At, pages: &[At]) -> Vec<Copy> {
        let above = pages.last().map(|&last| self.up(last));
        let mut found = Vec::new();
        for c in 0..2 {
            for at in self.needed(end, c).into_iter().rev() {
                let now = above.as_ref().is_none_or(|above| above.contains(&at));
                if let ([None, Some(source)], None, true) =
                    (self.pages[&at].components[c], self.coming(at, c), now)
                {
                    found.push((c, at, source));
                }
            }
        }
        found
    }

    /// Loads in flight that bring something of what a request needs to go on at the end of a path.
    #[must_use]
    pub fn joins(&self, end: At) -> BTreeSet<u64> {
        let missing = self.up(end).into_iter().take_while(|at| !self.pages[at].device.there());
        let full = missing.filter_map(|at| match self.pages[&at].device {
            Slot::Flying { op, .. } => Some(op),
            _ => None,
        });
        let places = (0..2).flat_map(|c| self.needed(end, c).into_iter().map(move |at| (at, c)));
        full.chain(places.filter_map(|(at, c)| Some(self.coming(at, c)?.0))).collect()
    }

    /// What a request at the end of a path that waits for `loads` is shown of a component, root first: what is there, and
    /// what those bring. `None` if that is not all it needs.
    #[must_use]
    pub fn shown(&self, end: At, c: usize, loads: &[u64]) -> Option<Vec<u32>> {
        let brought = |at| self.coming(at, c).filter(|(op, _)| loads.contains(op)).map(|(_, page)| page);
        let needed = self.needed(end, c).into_iter().rev();
        needed.map(|at| self.component(at, c, 0).or_else(|| brought(at))).collect()
    }

    /// Adds component copies to an operation that has begun.
    pub fn begin_copies(&mut self, op: u64, copies: &[Copy], pages: &[u32]) {
        for (copy, &page) in copies.iter().zip(pages) {
            self.holds.push((copy.0, copy.1));
            self.ops.get_mut(&op).expect("in flight").copies.push((*copy, page));
        }
    }

    pub(super) fn end_copies(&mut self, load: bool, copies: &[(Copy, u32)], publish: bool) {
        let tier = usize::from(!load);
        for &((c, at, _), page) in copies {
            self.release(&[(c, at)]);
            let p = &self.pages[&at];
            let is_there = |slot| matches!(slot, Slot::There(_));
            // Whoever was shown the page while it came goes on with it.
            let open = is_there(p.device) && p.components[c][tier].is_none();
            assert!(!load || !publish || open, "what a load brings has its place from the start");
            if publish && (is_there(p.device) || !load && is_there(p.host)) {
                self.adopt(at, c, tier, page);
            } else {
                self.freed[c][tier].push(page);
            }
        }
    }

    /// Pages of a component on a tier that nobody holds, oldest first, then shallowest.
    #[must_use]
    pub fn component_victims(&self, c: usize, tier: usize) -> Vec<u32> {
        let kept = self.kept_of(c);
        let mut found: Vec<(bool, u64, u32, u32)> = Vec::new();
        for (at, p) in self.pages.iter().filter(|(at, _)| !self.holds.contains(&(c, **at))) {
            found.extend(
                p.components[c][tier]
                    .filter(|_| *at != 0)
                    .map(|page| (kept.contains(at), p.used, p.depth, page)),
            );
        }
        found.sort_unstable();
        found.into_iter().map(|(.., page)| page).collect()
    }

    /// Gives up one page of a component; a window takes the state at its place along.
    pub fn evict_component(&mut self, c: usize, tier: usize, page: u32) {
        for (at, p) in self.pages.iter_mut().filter(|(_, p)| p.components[c][tier] == Some(page)) {
            p.components[c][tier] = None;
            if c == 0 && !self.holds.contains(&(1, *at)) {
                self.freed[1][tier].extend(p.components[1][tier].take());
            }
        }
        self.freed[c][tier].push(page);
    }
}
