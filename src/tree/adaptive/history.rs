//! The uses of the recent past, oldest first, those of evicted nodes included.
//!
//! A use is open until its node is used again. Ages pass for all uses in the same order, so one cursor per age bin
//! finds who crossed into the next bin: a use costs O(bins) over its life, amortised, and no timer exists. The open uses,
//! read from the newest back, are also the stack of an LRU cache; one more cursor marks where such a cache of the same
//! capacity would end. That makes an exact shadow of LRU for the price of a sum.

use std::collections::VecDeque;

use crate::base::containers::Map;

use super::Mark;
use super::age::{Ages, BINS};
use super::signal::Signals;

/// Owner of a use whose node is gone.
const GHOST: u32 = u32::MAX;

/// One use of one node: 56 bytes.
#[derive(Clone, Debug)]
pub(super) struct Use {
    at: u64,
    /// Of a ghost: under which key it waits.
    key: u64,
    pub(super) signals: Signals,
    pub(super) pages: u32,
    owner: u32,
    pub(super) class: u8,
    open: bool,
}

/// A use that came to the end of an age bin unused.
pub(super) struct Crossing {
    pub(super) number: u64,
    pub(super) signals: Signals,
    pub(super) pages: u32,
    pub(super) class: u8,
    pub(super) bin: usize,
    /// The node, if it is still there.
    pub(super) owner: Option<u32>,
}

/// What became of a use that was used again.
pub(super) struct Answered {
    pub(super) signals: Signals,
    pub(super) pages: u32,
    pub(super) class: u8,
    pub(super) at: u64,
    /// An LRU cache of the same capacity would still hold it.
    pub(super) in_lru: bool,
}

#[derive(Clone, Debug)]
pub(super) struct History {
    uses: VecDeque<Use>,
    /// Number of the first use in `uses`.
    first: u64,
    /// By bin: number of the first use that has not left the bin.
    cursors: [u64; BINS - 1],
    /// Number of the first use inside the shadow of LRU, and the open pages from there on.
    lru: u64,
    lru_pages: u64,
    lru_capacity: u64,
    ghosts: Map<u64, Mark>,
    uses_max: usize,
}

impl History {
    pub(super) fn new(capacity_pages: u64, uses_max: usize) -> History {
        History {
            uses: VecDeque::new(),
            first: 0,
            cursors: [0; BINS - 1],
            lru: 0,
            lru_pages: 0,
            lru_capacity: capacity_pages,
            ghosts: Map::default(),
            uses_max: uses_max.max(1),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.uses.len()
    }

    pub(super) fn ghosts(&self) -> usize {
        self.ghosts.len()
    }

    fn end(&self) -> u64 {
        self.first + self.uses.len() as u64
    }

    fn at(&mut self, number: u64) -> Option<&mut Use> {
        let index = number.checked_sub(self.first)?;
        self.uses.get_mut(usize::try_from(index).ok()?)
    }

    /// Files a use; its number. Amortised O(1).
    pub(super) fn push(&mut self, at: u64, owner: u32, pages: u32, class: u8, signals: Signals) -> u64 {
        if self.uses.len() >= self.uses_max {
            self.drop_first();
        }
        let number = self.end();
        self.uses.push_back(Use { at, key: 0, signals, pages, owner, class, open: true });
        self.lru_pages += u64::from(pages);
        number
    }

    /// Brings the shadow of LRU down to its capacity: between requests, since a running request is pinned.
    pub(super) fn settle_lru(&mut self) {
        while self.lru_pages > self.lru_capacity {
            let number = self.lru;
            self.lru += 1;
            let left = self.at(number).filter(|u| u.open).map_or(0, |u| u64::from(u.pages));
            self.lru_pages -= left;
        }
    }

    fn drop_first(&mut self) {
        let Some(gone) = self.uses.pop_front() else { return };
        self.first += 1;
        if gone.open && self.first > self.lru {
            self.lru_pages -= u64::from(gone.pages);
        }
        self.lru = self.lru.max(self.first);
        for cursor in &mut self.cursors {
            *cursor = (*cursor).max(self.first);
        }
        if gone.open && gone.owner == GHOST {
            self.ghosts.remove(&gone.key);
        }
    }

    /// Closes a use because its node was used again. `None` if it is too old to be known.
    pub(super) fn answer(&mut self, number: u64) -> Option<Answered> {
        let in_lru = number >= self.lru;
        let found = self.at(number).filter(|u| u.open)?;
        found.open = false;
        let answered =
            Answered { signals: found.signals, pages: found.pages, class: found.class, at: found.at, in_lru };
        if in_lru {
            self.lru_pages -= u64::from(answered.pages);
        }
        Some(answered)
    }

    /// Closes a use without an answer.
    pub(super) fn forget(&mut self, number: u64) {
        self.answer(number);
    }

    /// Takes pages out of an open use; what they would have answered.
    pub(super) fn divide(&mut self, number: u64, pages: u32) -> Option<Answered> {
        let in_lru = number >= self.lru;
        let found = self.at(number).filter(|u| u.open)?;
        let pages = pages.min(found.pages);
        found.pages -= pages;
        let part = Answered { signals: found.signals, pages, class: found.class, at: found.at, in_lru };
        if in_lru {
            self.lru_pages -= u64::from(pages);
        }
        Some(part)
    }

    /// Turns a use into a ghost that waits under `key`.
    pub(super) fn bury(&mut self, mark: Mark, key: u64) {
        let Some(found) = self.at(mark.number).filter(|u| u.open) else { return };
        (found.owner, found.key) = (GHOST, key);
        if let Some(other) = self.ghosts.insert(key, mark) {
            self.forget(other.number);
        }
    }

    /// The mark of the ghost that waits under `key`; it waits no longer.
    pub(super) fn dig(&mut self, key: u64) -> Option<Mark> {
        self.ghosts.remove(&key)
    }

    /// Reports every use that has come to the end of a bin by `now`. O(uses reported + bins).
    pub(super) fn cross(&mut self, now: u64, ages: Ages, mut report: impl FnMut(Crossing)) {
        for bin in 0..BINS - 1 {
            let width = ages.edge(bin + 1);
            let mut number = self.cursors[bin];
            let from = (number - self.first) as usize;
            for found in self.uses.range(from..).take_while(|u| u.at.saturating_add(width) <= now) {
                if found.open {
                    let owner = (found.owner != GHOST).then_some(found.owner);
                    let Use { signals, pages, class, .. } = *found;
                    report(Crossing { number, signals, pages, class, bin, owner });
                }
                number += 1;
            }
            self.cursors[bin] = number;
        }
        // Whoever left the last closed bin has nothing more to tell.
        while self.first < self.cursors[BINS - 2] {
            self.drop_first();
        }
    }
}
