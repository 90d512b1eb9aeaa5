//! A region: one stable block of memory that copies read and write by byte range.
//!
//! Arenas are made of regions, devices and stores are handed ranges of them. A region knows nothing of
//! pages. Two accesses to one range at a time are the caller's fault, which is why the slices are `unsafe`:
//! the operation that owns a page is the only one that may touch its bytes (`docs/ARCHITECTURE.md`, idea 2).
#![expect(unsafe_code, reason = "maps memory and hands out slices of it; each block says why it is sound")]

use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Why a region could not be made or a range not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// The system refused the mapping.
    #[error("cannot map {bytes} bytes: {source}")]
    Map {
        /// Bytes asked for.
        bytes: usize,
        /// What the system said.
        source: std::io::Error,
    },
    /// The range does not lie inside the region.
    #[error("range {offset}+{len} outside a region of {region_len} bytes")]
    OutOfRange {
        /// First byte.
        offset: usize,
        /// Bytes.
        len: usize,
        /// Bytes of the region.
        region_len: usize,
    },
}

/// An anonymous private mapping. Pages of the system are committed when first touched, so a large region
/// costs address space only.
#[derive(Debug)]
pub struct Region {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is owned by this value, not by a thread; all access goes through the unsafe slices,
// whose contract forbids conflicting use.
unsafe impl Send for Region {}
// SAFETY: as above; `&Region` offers no access that is not under that contract.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `len` bytes of zeroed private memory, nothing committed. `len == 0` is a region without bytes.
    pub fn anonymous(len: usize) -> Result<Region, RegionError> {
        if len == 0 {
            return Ok(Region { base: NonNull::dangling(), len: 0 });
        }
        // SAFETY: a fresh private mapping at an address the kernel chooses aliases nothing.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        match base.map(|p| NonNull::new(p.cast::<u8>())) {
            Ok(Some(base)) => Ok(Region { base, len }),
            Ok(None) => {
                Err(RegionError::Map { bytes: len, source: std::io::Error::other("mapped at address zero") })
            }
            Err(e) => Err(RegionError::Map { bytes: len, source: e.into() }),
        }
    }

    /// Asks the system for huge pages: random access to gigabytes spends much of its time on translation
    /// otherwise. A hint; where the system does not take it nothing changes.
    pub fn advise_huge(&self) {
        if self.len != 0 {
            // SAFETY: the whole mapping is ours; the advice changes no content.
            let taken =
                unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.len, Advice::LinuxHugepage) };
            if let Err(e) = taken {
                tracing::debug!(error = %e, bytes = self.len, "no huge pages");
            }
        }
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the region has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// First byte, for registration with a device or a store.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Whether `offset..offset + len` lies inside.
    pub fn check(&self, offset: usize, len: usize) -> Result<(), RegionError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(()),
            _ => Err(RegionError::OutOfRange { offset, len, region_len: self.len }),
        }
    }

    /// The bytes of a range.
    ///
    /// # Safety
    /// For the life of the slice nobody writes the range.
    pub unsafe fn slice(&self, offset: usize, len: usize) -> Result<&[u8], RegionError> {
        self.check(offset, len)?;
        // SAFETY: in bounds by the check, mapped and initialised (zero or written) for the life of `self`;
        // the caller excludes writers.
        Ok(unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset), len) })
    }

    /// The bytes of a range, to write.
    ///
    /// # Safety
    /// For the life of the slice nobody else reads or writes the range.
    #[expect(clippy::mut_from_ref, reason = "interior memory; exclusivity is the caller's contract")]
    pub unsafe fn slice_mut(&self, offset: usize, len: usize) -> Result<&mut [u8], RegionError> {
        self.check(offset, len)?;
        // SAFETY: in bounds by the check, mapped for the life of `self`; the caller excludes everybody else.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().add(offset), len) })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.len != 0 {
            // SAFETY: `base` and `len` are those of the mapping made in `anonymous`, unmapped only here; no
            // slice can outlive `self`.
            let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
            debug_assert!(unmapped.is_ok(), "munmap of our own mapping");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_checked_and_bytes_stay() {
        let r = Region::anonymous(8192).unwrap();
        // SAFETY: one thread, one slice at a time.
        unsafe {
            r.slice_mut(4096, 4).unwrap().copy_from_slice(&[1, 2, 3, 4]);
            assert_eq!(r.slice(4094, 4).unwrap(), &[0, 0, 1, 2]);
            assert!(r.slice(8190, 3).is_err());
            assert!(r.slice(usize::MAX, 2).is_err());
        }
        let empty = Region::anonymous(0).unwrap();
        empty.advise_huge();
        assert!(empty.is_empty());
        r.advise_huge();
        // SAFETY: as above.
        assert_eq!(unsafe { r.slice(4096, 2).unwrap() }, &[1, 2]);
    }

    #[test]
    fn an_absurd_size_is_an_error_value() {
        assert!(matches!(Region::anonymous(usize::MAX - 4095), Err(RegionError::Map { .. })));
    }
}
