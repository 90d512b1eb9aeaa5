//! The page allocator: a stack of free ids and a bitmap that knows which ids are out.
//!
//! Allocation and release cost about a nanosecond a page. The bitmap is what makes a double release, or the release
//! of a page this pool never made, an error instead of a corrupted list.

use crate::base::PageId;
use crate::base::limits::POOL_PAGES_MAX;

/// A page that cannot be released.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PoolError {
    /// The id is not of this pool.
    #[error("{page:?} is not a page of this pool")]
    Foreign {
        /// The id.
        page: PageId,
    },
    /// The page is free already, or is listed twice.
    #[error("{page:?} is already free or listed twice")]
    NotAllocated {
        /// The id.
        page: PageId,
    },
}

/// Allocator of page ids `0..capacity`.
#[derive(Clone, Debug)]
pub struct PagePool {
    /// Ids that were out once and are free now; the last one goes out first.
    stack: Vec<PageId>,
    /// One bit per id below `fresh`: set = handed out.
    out: Vec<u64>,
    /// Ids from here to `capacity` were never handed out.
    fresh: u32,
    capacity: u32,
}

impl PagePool {
    /// A pool of `capacity` pages (more than the limit is cut to it). O(1) memory until pages go out.
    #[must_use]
    pub fn new(capacity: u32) -> PagePool {
        PagePool { stack: Vec::new(), out: Vec::new(), fresh: 0, capacity: capacity.min(POOL_PAGES_MAX) }
    }

    /// A pool that grows on demand up to the limit of the id type.
    #[must_use]
    pub fn unlimited() -> PagePool {
        PagePool::new(POOL_PAGES_MAX)
    }

    /// Pages in all.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Pages that can be handed out now.
    #[must_use]
    pub fn free_pages(&self) -> u32 {
        self.capacity - self.used_pages()
    }

    /// Ids handed out so far, free ones included: every id at or above it was never used.
    #[must_use]
    pub fn issued_pages(&self) -> u32 {
        self.fresh
    }

    /// Pages that are out.
    #[must_use]
    pub fn used_pages(&self) -> u32 {
        self.fresh - self.stack.len() as u32
    }

    /// True for a page of this pool that is not out.
    #[must_use]
    pub fn is_free(&self, page: PageId) -> bool {
        page.0 < self.capacity && !self.is_out(page)
    }

    /// Appends `n` pages to `into`, or none of them: false if fewer are free. Reused ids first, last freed first.
    #[must_use]
    pub fn alloc(&mut self, n: u32, into: &mut Vec<PageId>) -> bool {
        if n > self.free_pages() {
            return false;
        }
        let reused = (n as usize).min(self.stack.len());
        let at = into.len();
        into.extend(self.stack.drain(self.stack.len() - reused..).rev());
        let new = n - reused as u32;
        into.extend((self.fresh..self.fresh + new).map(PageId));
        self.fresh += new;
        self.out.resize((self.fresh as usize).div_ceil(64), 0);
        for page in &into[at..] {
            self.out[page.0 as usize / 64] |= 1 << (page.0 % 64);
        }
        true
    }

    /// Takes pages back.
    ///
    /// # Errors
    /// The first page that is not out, or not of this pool, or listed twice; then nothing was released.
    pub fn free(&mut self, pages: &[PageId]) -> Result<(), PoolError> {
        for (i, &page) in pages.iter().enumerate() {
            if !self.is_out(page) {
                // Clearing as we go is what finds a page listed twice; undo it.
                pages[..i].iter().for_each(|p| self.out[p.0 as usize / 64] |= 1 << (p.0 % 64));
                let foreign = page.0 >= self.capacity;
                return Err(if foreign {
                    PoolError::Foreign { page }
                } else {
                    PoolError::NotAllocated { page }
                });
            }
            self.out[page.0 as usize / 64] &= !(1 << (page.0 % 64));
        }
        self.stack.extend_from_slice(pages);
        Ok(())
    }

    fn is_out(&self, page: PageId) -> bool {
        page.0 < self.fresh && self.out[page.0 as usize / 64] >> (page.0 % 64) & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_or_nothing_and_reuse_in_stack_order() {
        let mut pool = PagePool::new(4);
        let mut got = Vec::new();
        assert!(pool.alloc(3, &mut got));
        assert_eq!(got, [PageId(0), PageId(1), PageId(2)]);
        assert!(!pool.alloc(2, &mut got));
        assert_eq!((got.len(), pool.free_pages(), pool.used_pages()), (3, 1, 3));
        pool.free(&[PageId(2), PageId(0)]).unwrap();
        got.clear();
        assert!(pool.alloc(3, &mut got));
        assert_eq!(got, [PageId(0), PageId(2), PageId(3)]);
        assert_eq!(pool.free_pages(), 0);
        assert!(pool.alloc(0, &mut got));
    }

    #[test]
    fn a_bad_release_changes_nothing() {
        let mut pool = PagePool::new(200);
        let mut got = Vec::new();
        assert!(pool.alloc(130, &mut got));
        pool.free(&[PageId(5)]).unwrap();
        let cases = [
            (vec![PageId(1), PageId(5)], PoolError::NotAllocated { page: PageId(5) }),
            (vec![PageId(1), PageId(2), PageId(1)], PoolError::NotAllocated { page: PageId(1) }),
            (vec![PageId(1), PageId(150)], PoolError::NotAllocated { page: PageId(150) }),
            (vec![PageId(1), PageId(200)], PoolError::Foreign { page: PageId(200) }),
            (vec![PageId(u32::MAX)], PoolError::Foreign { page: PageId(u32::MAX) }),
        ];
        for (pages, want) in cases {
            assert_eq!(pool.free(&pages), Err(want));
            assert_eq!(pool.free_pages(), 71);
            assert!(!pool.is_free(PageId(1)) && pool.is_free(PageId(5)) && pool.is_free(PageId(199)));
            assert!(!pool.is_free(PageId(200)));
        }
        pool.free(&got.into_iter().filter(|p| p.0 != 5).collect::<Vec<_>>()).unwrap();
        assert_eq!(pool.free_pages(), 200);
    }

    #[test]
    fn unlimited_grows_on_demand() {
        let mut pool = PagePool::unlimited();
        let mut got = Vec::new();
        assert!(pool.alloc(100_000, &mut got));
        assert_eq!(pool.free_pages(), POOL_PAGES_MAX - 100_000);
        assert!(pool.out.len() < 2_000);
    }
}
