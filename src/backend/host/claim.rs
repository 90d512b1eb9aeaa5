//! Claims: who may touch the bytes of a page right now.
//!
//! The tree and the core decide who owns a page; a claim is how memory enforces it. Every access through a
//! safe function takes one, and every transfer holds one for each of its pages, so that a mistake upstairs
//! is an error value here and not a torn page.
#![expect(unsafe_code, reason = "reads page bytes that the claim guards, and its counters in a lazy mapping")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

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

const EXCLUSIVE: u16 = u16::MAX;

/// One counter per page: readers, or `EXCLUSIVE`. They lie in a mapping, so that the counters of a huge
/// reserved pool cost nothing until a page is used.
#[derive(Debug)]
pub(super) struct Guards {
    cells: Region,
    pages: u32,
}

impl Guards {
    pub(super) fn new(pages: u32) -> Result<Guards, RegionError> {
        Ok(Guards { cells: Region::anonymous(pages as usize * size_of::<AtomicU16>())?, pages })
    }

    fn cell(&self, page: PageId) -> Option<&AtomicU16> {
        if page.0 >= self.pages {
            return None;
        }
        // SAFETY: the mapping holds `pages` counters from an aligned base, zero is a valid one, they are only
        // touched as atomics, and the mapping lives as long as `self`.
        Some(unsafe { &*self.cells.base().cast::<AtomicU16>().as_ptr().add(page.0 as usize) })
    }

    /// Takes the page if `access` is compatible with the claims on it. Pages past the end are never taken.
    pub(super) fn take(&self, page: PageId, access: Access) -> bool {
        let Some(cell) = self.cell(page) else { return false };
        match access {
            Access::Exclusive => {
                cell.compare_exchange(0, EXCLUSIVE, Ordering::Acquire, Ordering::Relaxed).is_ok()
            }
            Access::Shared => cell
                .fetch_update(Ordering::Acquire, Ordering::Relaxed, |n| (n < EXCLUSIVE - 1).then(|| n + 1))
                .is_ok(),
        }
    }

    /// Undoes one successful `take`.
    pub(super) fn give(&self, page: PageId, access: Access) {
        let Some(cell) = self.cell(page) else { return };
        let before = match access {
            Access::Exclusive => cell.swap(0, Ordering::Release),
            Access::Shared => cell.fetch_sub(1, Ordering::Release),
        };
        debug_assert!(match access {
            Access::Exclusive => before == EXCLUSIVE,
            Access::Shared => before != 0 && before != EXCLUSIVE,
        });
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
