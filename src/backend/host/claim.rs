//! Claims: who may touch the bytes of a page right now.
//!
//! The tree and the core decide who owns a page; a claim is how memory enforces it. Every access through a
//! safe function takes one, and every transfer holds one for each of its pages, so that a mistake upstairs
//! is an error value here and not a torn page.
#![expect(unsafe_code, reason = "reads page bytes that the claim guards, and its counters in a lazy mapping")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::arena::{HostArena, MemoryError};
use crate::backend::region::{Region, RegionError};
use crate::base::PageId;
use crate::pool::{PlaneId, PoolKind};

/// What a claim allows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Reading; others may read too.
    Shared,
    /// Writing; nobody else touches the page.
    Exclusive,
}

/// Pages per word of claims: a byte each.
const LANES: u32 = 8;
/// Value of a lane that is held exclusively; below it counts readers.
const EXCLUSIVE: u64 = 0xFF;
/// Most readers of a page.
const READERS_MAX: u64 = EXCLUSIVE - 1;

/// One byte per page: readers, or `EXCLUSIVE`. Eight pages share a word, so that a run of pages costs one
/// atomic operation per eight. The words lie in a mapping: those of a huge reserved pool cost nothing until
/// a page is used.
#[derive(Debug)]
pub(super) struct Guards {
    words: Region,
    pages: u32,
}

/// Pages of a list that follow each other there and share a word: the word and a one in each of their
/// lanes.
struct Group {
    word: usize,
    ones: u64,
    len: usize,
}

impl Group {
    /// The group at the start of a list that is not empty. A page that comes twice starts another group.
    fn first(pages: &[PageId]) -> Group {
        let word = pages[0].0 / LANES;
        let mut ones = 0;
        let mut len = 0;
        for page in pages {
            let one = 1u64 << (8 * (page.0 % LANES));
            if page.0 / LANES != word || ones & one != 0 {
                break;
            }
            ones |= one;
            len += 1;
        }
        Group { word: word as usize, ones, len }
    }
}

impl Guards {
    pub(super) fn new(pages: u32) -> Result<Guards, RegionError> {
        let words = pages.div_ceil(LANES) as usize;
        Ok(Guards { words: Region::anonymous(words * size_of::<AtomicU64>())?, pages })
    }

    fn word(&self, word: usize) -> Option<&AtomicU64> {
        if word >= self.pages.div_ceil(LANES) as usize {
            return None;
        }
        // SAFETY: the mapping holds that many words from an aligned base, zero is a valid one, they are only
        // touched as atomics of this size, and the mapping lives as long as `self`.
        Some(unsafe { &*self.words.base().cast::<AtomicU64>().as_ptr().add(word) })
    }

    /// Claims all pages or none; the position of one that cannot be had. A page past the end never can.
    pub(super) fn take(&self, pages: &[PageId], access: Access) -> Result<(), usize> {
        let mut at = 0;
        while at < pages.len() {
            let group = Group::first(&pages[at..]);
            let inside = pages[at..at + group.len].iter().all(|p| p.0 < self.pages);
            let taken =
                inside && self.word(group.word).is_some_and(|word| take_lanes(word, group.ones, access));
            if !taken {
                self.give(&pages[..at], access);
                let held = self.word(group.word).map_or(u64::MAX, |word| word.load(Ordering::Relaxed));
                let refuses = |p: &PageId| {
                    let lane = held >> (8 * (p.0 % LANES)) & EXCLUSIVE;
                    p.0 >= self.pages || !free(lane, access)
                };
                let group = &pages[at..at + group.len];
                return Err(at + group.iter().position(refuses).unwrap_or(0));
            }
            at += group.len;
        }
        Ok(())
    }

    /// Undoes a successful `take`.
    pub(super) fn give(&self, pages: &[PageId], access: Access) {
        let mut at = 0;
        while at < pages.len() {
            let group = Group::first(&pages[at..]);
            if let Some(word) = self.word(group.word) {
                let before = match access {
                    Access::Exclusive => word.fetch_and(!(group.ones * EXCLUSIVE), Ordering::Release),
                    Access::Shared => word.fetch_sub(group.ones, Ordering::Release),
                };
                debug_assert!((0..LANES).filter(|l| group.ones >> (8 * l) & 1 == 1).all(|l| {
                    let lane = before >> (8 * l) & EXCLUSIVE;
                    (lane == EXCLUSIVE) == (access == Access::Exclusive) && lane != 0
                }));
            }
            at += group.len;
        }
    }
}

fn free(lane: u64, access: Access) -> bool {
    match access {
        Access::Exclusive => lane == 0,
        Access::Shared => lane < READERS_MAX,
    }
}

/// Claims the lanes in `ones`, all or none.
fn take_lanes(word: &AtomicU64, ones: u64, access: Access) -> bool {
    let lanes = ones * EXCLUSIVE;
    let next = |held: u64| match access {
        Access::Exclusive => (held & lanes == 0).then_some(held | lanes),
        Access::Shared => {
            let full = held & lanes != 0
                && (0..LANES).any(|l| ones >> (8 * l) & 1 == 1 && held >> (8 * l) & EXCLUSIVE >= READERS_MAX);
            (!full).then(|| held + ones)
        }
    };
    word.fetch_update(Ordering::Acquire, Ordering::Relaxed, next).is_ok()
}

/// A claim on some pages of one pool of an arena, released when dropped. Gives safe slices of them.
#[derive(Debug)]
#[must_use]
pub struct PageClaim {
    arena: Arc<HostArena>,
    pool: PoolKind,
    pages: Vec<PageId>,
    access: Access,
}

impl PageClaim {
    pub(super) fn new(
        arena: Arc<HostArena>,
        pool: PoolKind,
        pages: &[PageId],
        access: Access,
    ) -> Result<PageClaim, MemoryError> {
        arena.take(pool, pages, access)?;
        Ok(PageClaim { arena, pool, pages: pages.to_vec(), access })
    }

    /// The pages.
    #[must_use]
    pub fn pages(&self) -> &[PageId] {
        &self.pages
    }

    /// The block of plane `plane` of the `index`-th page.
    pub fn block(&self, plane: PlaneId, index: usize) -> Result<&[u8], MemoryError> {
        let range = self.range(plane, index)?;
        // SAFETY: the claim keeps writers other than `&mut self` away for as long as it is borrowed.
        Ok(unsafe { range.region.slice(range.offset, range.len)? })
    }

    /// The same to write; only under [`Access::Exclusive`].
    pub fn block_mut(&mut self, plane: PlaneId, index: usize) -> Result<&mut [u8], MemoryError> {
        let range = self.range(plane, index)?;
        if self.access != Access::Exclusive {
            return Err(MemoryError::Busy { pool: self.pool, page: self.pages[index] });
        }
        // SAFETY: the claim is exclusive and mutably borrowed for as long as the slice lives; the region
        // lives as long as the arena, which the claim holds.
        Ok(unsafe { range.region.slice_mut(range.offset, range.len)? })
    }

    fn range(&self, plane: PlaneId, index: usize) -> Result<super::PageRange<'_>, MemoryError> {
        let page = self.pages.get(index).copied().unwrap_or(PageId(u32::MAX));
        let range = self.arena.range(plane, page)?;
        match self.arena.geometry().plane(plane) {
            Some(p) if p.pool() == self.pool => Ok(range),
            _ => Err(MemoryError::NoSuchPlane { plane }),
        }
    }

    /// Never releases the pages: for an access whose end cannot be proved.
    pub fn quarantine(mut self) {
        self.pages.clear();
    }
}

impl Drop for PageClaim {
    fn drop(&mut self) {
        self.arena.give(self.pool, &self.pages, self.access);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(pages: &[u32]) -> Vec<PageId> {
        pages.iter().map(|&p| PageId(p)).collect()
    }

    /// Random claims against a plain list of counts.
    #[test]
    fn claims_follow_a_model() {
        let mut seed = 0x5EED_u64;
        let mut below = |n: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % n
        };
        let guards = Guards::new(21).unwrap();
        let mut model = [0u32; 21];
        let mut held: Vec<(Vec<PageId>, Access)> = Vec::new();
        let mut refused = 0;
        for _ in 0..20_000 {
            if below(2) == 0 && !held.is_empty() {
                let (pages, access) = held.swap_remove(below(held.len() as u64) as usize);
                guards.give(&pages, access);
                for p in &pages {
                    let count = &mut model[p.0 as usize];
                    *count = if access == Access::Exclusive { 0 } else { *count - 1 };
                }
                continue;
            }
            let access = if below(3) == 0 { Access::Exclusive } else { Access::Shared };
            let first = below(23) as u32;
            let pages: Vec<PageId> = match below(2) {
                0 => (first..(first + below(12) as u32).min(24)).map(PageId).collect(),
                _ => (0..below(6)).map(|_| PageId(below(22) as u32)).collect(),
            };
            let mut after = model;
            let mut want = Ok(());
            for (i, p) in pages.iter().enumerate() {
                let count = after.get_mut(p.0 as usize);
                match (count, access) {
                    (Some(n), Access::Exclusive) if *n == 0 => *n = 255,
                    (Some(n), Access::Shared) if *n < 254 => *n += 1,
                    _ => {
                        want = Err(i);
                        break;
                    }
                }
            }
            assert_eq!(guards.take(&pages, access).is_ok(), want.is_ok(), "{pages:?} {access:?} {model:?}");
            match want {
                Ok(()) => {
                    model = after;
                    held.push((pages, access));
                }
                Err(_) => refused += 1,
            }
        }
        assert!(refused > 1000);
    }

    #[test]
    fn the_page_that_refuses_is_named() {
        let guards = Guards::new(20).unwrap();
        guards.take(&ids(&[3, 12]), Access::Exclusive).unwrap();
        assert_eq!(guards.take(&ids(&[0, 1, 2, 3, 4]), Access::Shared), Err(3));
        assert_eq!(guards.take(&ids(&[8, 12]), Access::Exclusive), Err(1));
        assert_eq!(guards.take(&ids(&[18, 19, 20]), Access::Shared), Err(2));
        assert_eq!(guards.take(&ids(&[5, 5]), Access::Exclusive), Err(1));
        assert_eq!(guards.take(&ids(&[u32::MAX]), Access::Shared), Err(0));
        guards.take(&ids(&[0, 1, 2, 4, 5, 8, 18, 19]), Access::Exclusive).unwrap();
    }

    #[test]
    fn readers_are_counted_up_to_a_limit() {
        let guards = Guards::new(8).unwrap();
        (0..254).for_each(|_| guards.take(&ids(&[7, 6]), Access::Shared).unwrap());
        assert_eq!(guards.take(&ids(&[7]), Access::Shared), Err(0));
        guards.give(&ids(&[7]), Access::Shared);
        guards.take(&ids(&[7]), Access::Shared).unwrap();
        (0..254).for_each(|_| guards.give(&ids(&[7, 6]), Access::Shared));
        guards.take(&ids(&[5, 6, 7]), Access::Exclusive).unwrap();
    }
}
