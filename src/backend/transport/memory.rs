//! The regions a transport reads from or writes to.
#![expect(unsafe_code, reason = "copies between registered memory; each block says why it is sound")]

use std::ptr::NonNull;
use std::sync::Arc;

use super::TransportError;
use crate::backend::host::HostArena;
use crate::backend::region::Region;
use crate::pd::plan::Copy;

/// A block of memory that stays where it is for as long as the value lives.
///
/// # Safety
/// `base..base + len` is mapped, readable and writable, for the life of the value.
pub unsafe trait Bytes: Send + Sync {
    /// First byte.
    fn base(&self) -> NonNull<u8>;
    /// Bytes.
    fn len(&self) -> usize;
    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

// SAFETY: a region is one mapping, unmapped when it is dropped.
unsafe impl Bytes for Region {
    fn base(&self) -> NonNull<u8> {
        Region::base(self)
    }

    fn len(&self) -> usize {
        Region::len(self)
    }
}

/// The regions of one rank, in the order of its layout.
#[derive(Clone, Default)]
pub struct Memory {
    regions: Vec<Arc<dyn Bytes>>,
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.regions.iter().map(|r| r.len())).finish()
    }
}

impl Memory {
    /// The regions of a layout, in order.
    #[must_use]
    pub fn new(regions: Vec<Arc<dyn Bytes>>) -> Memory {
        Memory { regions }
    }

    /// The regions of a device or an arena, one per plane.
    #[must_use]
    pub fn of(arena: &HostArena) -> Memory {
        Memory::new(arena.regions().map(|(_, r)| r.clone() as Arc<dyn Bytes>).collect())
    }

    /// The same with one more region behind the others, for a staging ring or its buffers.
    #[must_use]
    pub fn with(mut self, region: Arc<dyn Bytes>) -> Memory {
        self.regions.push(region);
        self
    }

    /// Lengths in bytes.
    #[must_use]
    pub fn lens(&self) -> Vec<u64> {
        self.regions.iter().map(|r| r.len() as u64).collect()
    }

    /// Address and length of each, for a library that registers memory.
    #[cfg(feature = "nixl")]
    pub(super) fn ranges(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.regions.iter().map(|r| (r.base().as_ptr() as usize, r.len()))
    }

    /// First byte of a range, if it lies inside its region.
    pub fn at(&self, region: u32, offset: u64, len: u64) -> Result<NonNull<u8>, TransportError> {
        let err = TransportError::Range { region, offset, len };
        let Some(r) = self.regions.get(region as usize) else { return Err(err) };
        match offset.checked_add(len) {
            Some(end) if end <= r.len() as u64 => {
                // SAFETY: inside the mapping by the check; one past the end for an empty range is allowed.
                Ok(unsafe { r.base().add(offset as usize) })
            }
            _ => Err(err),
        }
    }

    /// Copies bytes into a range.
    ///
    /// # Safety
    /// Nobody else reads or writes the range meanwhile: the caller holds the grant it belongs to.
    pub unsafe fn write(&self, region: u32, offset: u64, bytes: &[u8]) -> Result<(), TransportError> {
        let to = self.at(region, offset, bytes.len() as u64)?;
        // SAFETY: `to` has room for the bytes, and a slice of ours cannot overlap memory nobody else uses.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies a range into bytes.
    ///
    /// # Safety
    /// Nobody writes the range meanwhile: the caller holds the read pin it belongs to.
    pub unsafe fn read(&self, region: u32, offset: u64, bytes: &mut [u8]) -> Result<(), TransportError> {
        let from = self.at(region, offset, bytes.len() as u64)?;
        // SAFETY: as in `write`, the other way round.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Looks at a range while nothing writes it.
    #[cfg(test)]
    pub(crate) fn peek(&self, region: u32, offset: u64, out: &mut [u8]) {
        // SAFETY: tests look between writes, from the one thread that makes them.
        unsafe { self.read(region, offset, out).unwrap() };
    }

    /// Fills a range before anything else uses the memory.
    #[cfg(test)]
    pub(crate) fn poke(&self, region: u32, offset: u64, bytes: &[u8]) {
        // SAFETY: tests fill from the one thread that exists then.
        unsafe { self.write(region, offset, bytes).unwrap() };
    }

    /// Copies within this rank, as [`Action::Gather`](crate::pd::sender::Action::Gather) and
    /// [`Action::Scatter`](crate::pd::receiver::Action::Scatter) ask. Like a transport it relies on what the machines
    /// promise: nobody writes the sources of such an action before its end is reported, and nobody else uses the
    /// destinations. On an error some may have been copied. O(bytes).
    pub fn copy_within(&self, copies: &[Copy]) -> Result<(), TransportError> {
        for c in copies {
            let from = self.at(c.src_region, c.src_off, c.len)?;
            let to = self.at(c.dst_region, c.dst_off, c.len)?;
            // SAFETY: both ranges lie in their regions, and are the action's; `copy` allows that they overlap.
            unsafe { std::ptr::copy(from.as_ptr(), to.as_ptr(), c.len as usize) };
        }
        Ok(())
    }

    /// The bytes of a range, for a call that only reads them.
    ///
    /// # Safety
    /// Nobody writes the range for the life of the slice.
    pub unsafe fn slice(&self, region: u32, offset: u64, len: u64) -> Result<&[u8], TransportError> {
        let from = self.at(region, offset, len)?;
        // SAFETY: inside the mapping, which lives as long as `self`; no writer by contract.
        Ok(unsafe { std::slice::from_raw_parts(from.as_ptr(), len as usize) })
    }
}
