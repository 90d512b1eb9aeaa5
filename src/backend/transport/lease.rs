//! A page pool over registered memory that keeps to the grant contract: a page is free, held here, or out
//! with remote writers, and its bytes can be touched here only while it is held. Small: every list is
//! scanned. It serves tests and `pd-demo`; the cache has its own implementation.
#![expect(unsafe_code, reason = "slices of pages whose state says that nobody else uses them")]

use super::memory::Memory;
use crate::pd::grant::{Committed, Destination, GrantPool, Granted, Released, ReserveRefused, Want};
use crate::pd::ids::RoomKey;
use crate::pd::layout::{Component, Entry, Layout};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Free,
    /// Held by this process: sources being filled or sent, or pages that arrived.
    Held,
    /// Granted to remote writers, or in quarantine.
    Out,
}

/// Full-attention pages of one rank.
#[derive(Debug)]
pub struct LeasePool {
    memory: Memory,
    layout: Layout,
    pages: Vec<State>,
}

impl LeasePool {
    /// All pages of the layout, free. The memory must have the regions of the layout.
    #[must_use]
    pub fn new(memory: Memory, layout: Layout) -> LeasePool {
        let n = layout.units(Component::Full) as usize;
        LeasePool { memory, layout, pages: vec![State::Free; n] }
    }

    /// The layout.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The memory.
    #[must_use]
    pub fn memory(&self) -> Memory {
        self.memory.clone()
    }

    /// Free, held, out.
    #[must_use]
    pub fn counts(&self) -> (usize, usize, usize) {
        let n = |s| self.pages.iter().filter(|p| **p == s).count();
        (n(State::Free), n(State::Held), n(State::Out))
    }

    fn take(&mut self, n: u32, to: State) -> Option<Vec<u32>> {
        let free = (0u32..).zip(&self.pages).filter(|(_, s)| **s == State::Free).map(|(i, _)| i);
        let got: Vec<u32> = free.take(n as usize).collect();
        if got.len() < n as usize {
            return None;
        }
        got.iter().for_each(|&p| self.pages[p as usize] = to);
        Some(got)
    }

    /// Takes pages for sources.
    pub fn hold(&mut self, n: u32) -> Option<Vec<u32>> {
        self.take(n, State::Held)
    }

    /// Gives held pages back; others are left as they are. Returns how many were held.
    pub fn free(&mut self, pages: &[u32]) -> usize {
        let mut n = 0;
        for &p in pages {
            if let Some(s) = self.pages.get_mut(p as usize)
                && *s == State::Held
            {
                *s = State::Free;
                n += 1;
            }
        }
        n
    }

    fn is_held(&self, page: u32) -> bool {
        self.pages.get(page as usize) == Some(&State::Held)
    }

    fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.layout.entries.iter().filter(|e| e.component == Component::Full)
    }

    /// Writes a held page that has not been offered to a sender yet, entry by entry. False if it is not held.
    pub fn fill(&mut self, page: u32, mut f: impl FnMut(&Entry, &mut [u8])) -> bool {
        if !self.is_held(page) {
            return false;
        }
        for e in self.entries() {
            let at = e.base + u64::from(page) * e.unit_bytes;
            let Ok(to) = self.memory.at(e.region, at, e.unit_bytes) else { return false };
            // SAFETY: inside the region; a held page is not granted, so no remote writer has it, and `&mut
            // self` keeps everyone else of this process out.
            f(e, unsafe { std::slice::from_raw_parts_mut(to.as_ptr(), e.unit_bytes as usize) });
        }
        true
    }

    /// Reads a held page, entry by entry. False if it is not held.
    pub fn read(&self, page: u32, mut f: impl FnMut(&Entry, &[u8])) -> bool {
        if !self.is_held(page) {
            return false;
        }
        for e in self.entries() {
            let at = e.base + u64::from(page) * e.unit_bytes;
            // SAFETY: as in `fill`; shared access only.
            let Ok(bytes) = (unsafe { self.memory.slice(e.region, at, e.unit_bytes) }) else { return false };
            f(e, bytes);
        }
        true
    }

    fn back(&mut self, d: &Destination, to: State) {
        for &p in &d.full {
            if let Some(s) = self.pages.get_mut(p as usize)
                && *s == State::Out
            {
                *s = to;
            }
        }
    }
}

impl GrantPool for LeasePool {
    fn reserve(&mut self, _key: RoomKey, want: &Want) -> Result<Granted, ReserveRefused> {
        let full = self.take(want.full, State::Out).ok_or(ReserveRefused::NoPages)?;
        Ok(Granted::new(Destination { full, ..Destination::default() }))
    }

    fn commit(&mut self, _key: RoomKey, pages: Committed) {
        self.back(&pages.into_destination(), State::Held);
    }

    fn release(&mut self, _key: RoomKey, pages: Released) {
        self.back(&pages.into_destination(), State::Free);
    }
}
