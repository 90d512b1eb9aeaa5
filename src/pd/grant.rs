//! The contract with the cache. Pages enter a grant by [`Granted::new`] and leave it in two ways only: as
//! [`Committed`], into the tree, or as [`Released`], back to the pool, and nothing makes a `Released` without
//! a [`Proof`]. The constructors are private to this floor, so the rule is checked by the compiler; time
//! alone proves nothing.

use std::ops::Range;

use crate::pd::ids::{RoomKey, Serial};

/// Why a decode rank may reuse the pages of a grant: no write for it can land any more.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum How {
    /// The pages were never shown to anyone.
    Unpublished,
    /// Every rank reported its writes complete and settled.
    Settled,
    /// Every rank answered that nothing is posted and nothing will be.
    Acked,
    /// The target refuses writes of the grant from now on.
    Revoked,
    /// The connection to the writer is destroyed and the transport vouches that nothing of it can land.
    Fenced,
    /// The operating system says that the writer is gone, on this host.
    Dead,
}

/// Evidence that covers all writers of one grant. Made by the receiver only.
#[derive(Debug, PartialEq, Eq)]
pub struct Proof {
    serial: Serial,
    how: How,
}

impl Proof {
    pub(super) fn new(serial: Serial, how: How) -> Proof {
        Proof { serial, how }
    }

    /// The weakest evidence in it (the latest rung of the ladder).
    #[must_use]
    pub fn how(&self) -> How {
        self.how
    }
}

/// Pages, slots and rows of one request on a decode rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Destination {
    /// Pages of the prompt after the prefix.
    pub full: Vec<u32>,
    /// Pages of the trailing window.
    pub window: Vec<u32>,
    /// State slots.
    pub state: Vec<u32>,
    /// Ring rows.
    pub ring: Vec<u32>,
}

impl Destination {
    /// Pages, slots and rows.
    #[must_use]
    pub fn units(&self) -> u32 {
        (self.full.len() + self.window.len() + self.state.len() + self.ring.len()) as u32
    }
}

/// How many of each a room needs on this rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Want {
    /// Full-attention pages.
    pub full: u32,
    /// Window pages.
    pub window: u32,
    /// State slots.
    pub state: u32,
    /// Ring rows.
    pub ring: u32,
}

/// Why the cache gave no pages. An ordinary outcome.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ReserveRefused {
    /// Not enough free pages, even after eviction.
    NoPages,
    /// Not enough free slots.
    NoSlots,
    /// The layout of the rank has components that the cache has no pool for, or the other way round. No memory will
    /// change that.
    NoSuchPool,
}

/// The cache side of the contract, implemented by whoever owns the pools. Eviction, demotion and compaction
/// must skip every page that `reserve` handed out until `commit` or `release` brings it back: granted and
/// quarantined pages look the same from there.
pub trait GrantPool {
    /// Takes pages out of the pool for a room.
    fn reserve(&mut self, key: RoomKey, want: &Want) -> Result<Granted, ReserveRefused>;
    /// Moves written pages into the tree.
    fn commit(&mut self, key: RoomKey, pages: Committed);
    /// Returns pages that nothing can write any more to the free list.
    fn release(&mut self, key: RoomKey, pages: Released);
}

/// Pages that a remote rank may write. Owned by the receiver until they leave by one of the two doors.
#[derive(Debug)]
#[must_use = "dropping a grant leaks its pages"]
pub struct Granted {
    dest: Destination,
}

/// Pages whose bytes are complete.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "committed pages belong into the tree"]
pub struct Committed {
    dest: Destination,
}

/// Pages that no write can reach any more.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "released pages belong into the pool"]
pub struct Released {
    dest: Destination,
    proof: Proof,
}

impl Granted {
    /// Takes pages that their owner has just taken out of its pool.
    pub fn new(dest: Destination) -> Granted {
        Granted { dest }
    }

    /// What is in it.
    #[must_use]
    pub fn destination(&self) -> &Destination {
        &self.dest
    }

    /// Adds pages in front of both lists of pages, for a prefix that broke.
    pub(super) fn prepend(&mut self, pages: Granted) {
        let Destination { mut full, mut window, .. } = pages.dest;
        full.append(&mut self.dest.full);
        window.append(&mut self.dest.window);
        (self.dest.full, self.dest.window) = (full, window);
    }

    /// Moves full-attention pages of the range out as complete; slots and window pages go with the last of
    /// them. `None` if the range is not inside.
    pub fn commit(&mut self, range: Range<usize>) -> Option<Committed> {
        if range.start > range.end || range.end > self.dest.full.len() {
            return None;
        }
        let full: Vec<u32> = self.dest.full.drain(range).collect();
        let rest =
            if self.dest.full.is_empty() { std::mem::take(&mut self.dest) } else { Destination::default() };
        Some(Committed { dest: Destination { full, ..rest } })
    }

    /// Gives everything back to the pool, with the proof that nothing can land on it.
    pub fn release(self, proof: Proof) -> Released {
        Released { dest: self.dest, proof }
    }
}

impl Committed {
    /// What is in it.
    #[must_use]
    pub fn destination(&self) -> &Destination {
        &self.dest
    }

    /// The pages.
    #[must_use]
    pub fn into_destination(self) -> Destination {
        self.dest
    }
}

impl Released {
    /// Why they may be reused.
    #[must_use]
    pub fn how(&self) -> How {
        self.proof.how
    }

    /// The grant they were.
    #[must_use]
    pub fn serial(&self) -> Serial {
        self.proof.serial
    }

    /// The pages.
    #[must_use]
    pub fn into_destination(self) -> Destination {
        self.dest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_by_ranges_gives_every_page_once_and_slots_with_the_last() {
        let dest = Destination { full: vec![5, 6, 7], state: vec![1], ..Destination::default() };
        let mut g = Granted::new(dest);
        assert_eq!(
            g.commit(0..2).unwrap().into_destination(),
            Destination { full: vec![5, 6], ..Destination::default() }
        );
        assert!(g.commit(0..2).is_none());
        let last = g.commit(0..1).unwrap().into_destination();
        assert_eq!((last.full, last.state), (vec![7], vec![1]));
        let r = g.release(Proof::new(Serial(3), How::Acked));
        assert_eq!((r.how(), r.into_destination().units()), (How::Acked, 0));
    }
}
