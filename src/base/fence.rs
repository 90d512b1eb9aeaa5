//! Fences: points on the timeline of a device's compute work.

/// The last use of some pages by compute. A copy that must not overtake that use carries the fence.
///
/// A device numbers the pieces of compute work it is told of; a fence says "everything up to and including
/// this number". So fences are plain numbers, the later of two covers both, and a page table can remember
/// one per page. The type has no default on purpose: whoever submits a copy has to say which use it follows.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Fence(u64);

impl Fence {
    /// No compute that was launched and is not finished touches the pages. The caller vouches for it.
    pub const SETTLED: Fence = Fence(0);

    /// The point after piece number `n` of the device's compute work. For device backends.
    #[must_use]
    pub const fn after(n: u64) -> Fence {
        Fence(n)
    }

    /// Number of the last piece of work covered; 0 covers none.
    #[must_use]
    pub const fn number(self) -> u64 {
        self.0
    }

    /// The fence that covers both.
    #[must_use]
    pub fn and(self, other: Fence) -> Fence {
        self.max(other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_later_fence_covers_both() {
        assert_eq!(Fence::after(3).and(Fence::after(7)), Fence::after(7));
        assert_eq!(Fence::SETTLED.and(Fence::after(1)).number(), 1);
    }
}
