//! Claims: who may touch the bytes of a page right now.
//!
//! The tree and the core decide who owns a page; a claim is how memory enforces it. Every access through a
//! safe function takes one, and every transfer holds one for each of its pages, so that a mistake upstairs
//! is an error value here and not a torn page.
#![expect(unsafe_code, reason = "reads page bytes that the claim guards, and its counters in a lazy mapping")]

use std::sync::{Arc, Mutex, PoisonError};

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

/// Value of a lane that is held exclusively; below it counts readers.
const EXCLUSIVE: u8 = u8::MAX;
/// Most readers of a page.
const READERS_MAX: u8 = EXCLUSIVE - 1;

/// One byte per page: readers, or `EXCLUSIVE`. The bytes lie in a mapping: those of a huge reserved pool cost
/// nothing until a page is used.
///
/// Behind a lock and not atomic: 4,096 scattered pages take one locked instruction instead of 4,096, which
/// was three quarters of a submission. It is held for about a nanosecond a page and never across a call.
#[derive(Debug)]
pub(super) struct Guards {
    lanes: Mutex<Region>,
    pages: u32,
}

impl Guards {
    pub(super) fn new(pages: u32) -> Result<Guards, RegionError> {
        Ok(Guards { lanes: Mutex::new(Region::anonymous(pages as usize)?), pages })
    }

    fn with<R>(&self, f: impl FnOnce(&mut [u8]) -> R) -> R {
        // Nothing below panics while it holds the lock, and a lane is valid after every step.
        let lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the mapping is at least `pages` bytes long and lives as long as the guard, and only the
        // holder of the lock touches it.
        f(unsafe { std::slice::from_raw_parts_mut(lanes.base().as_ptr(), self.pages as usize) })
    }

    /// Claims all pages or none; the position of one that cannot be had. A page past the end never can.
    pub(super) fn take(&self, pages: &[PageId], access: Access) -> Result<(), usize> {
        self.with(|lanes| {
            let refused = match access {
                Access::Exclusive => first_refused(lanes, pages, |n| (n == 0).then_some(EXCLUSIVE)),
                Access::Shared => first_refused(lanes, pages, |n| (n < READERS_MAX).then(|| n + 1)),
            };
            if let Some(at) = refused {
                give(lanes, &pages[..at], access);
            }
            refused.map_or(Ok(()), Err)
        })
    }

    /// Undoes a successful `take`.
    pub(super) fn give(&self, pages: &[PageId], access: Access) {
        self.with(|lanes| give(lanes, pages, access));
    }
}

/// Takes claims in order up to the first that cannot be had.
fn first_refused(lanes: &mut [u8], pages: &[PageId], take: impl Fn(u8) -> Option<u8>) -> Option<usize> {
    pages.iter().position(|page| match lanes.get_mut(page.0 as usize) {
        Some(lane) => take(*lane).map(|taken| *lane = taken).is_none(),
        None => true,
    })
}

fn give(lanes: &mut [u8], pages: &[PageId], access: Access) {
    for page in pages {
        let Some(lane) = lanes.get_mut(page.0 as usize) else { continue };
        debug_assert!(*lane != 0 && (*lane == EXCLUSIVE) == (access == Access::Exclusive));
        *lane = if access == Access::Shared { lane.saturating_sub(1) } else { 0 };
    }
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
