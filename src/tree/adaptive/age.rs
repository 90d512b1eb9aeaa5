//! Ages in half octaves.
//!
//! Time here is the volume of work: pages of all prompts so far. It is what memory is paid in (a page that stays for
//! a volume of V keeps V other pages out), it needs no clock, and on the traces it ranks as well as seconds do.

/// Age bins. The last one is open.
pub(super) const BINS: usize = 30;
/// Octaves of age: bin 0, then pairs of bins. The last one is a single bin.
pub(super) const OCTAVES: usize = BINS / 2 + 1;

/// Maps ages to bins that widen by half an octave each. The first bin ends at 1/64 of the capacity.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ages {
    shift: u32,
}

impl Ages {
    pub(super) fn new(capacity_pages: u64) -> Ages {
        Ages { shift: (capacity_pages / 128).max(1).ilog2() }
    }

    /// The bin of an age. O(1), no floating point.
    #[inline]
    pub(super) fn bin(self, age: u64) -> usize {
        let x = age >> self.shift;
        if x < 2 {
            return 0;
        }
        let octave = x.ilog2();
        let half = (x >> (octave - 1)) & 1;
        ((2 * octave - 1) as usize + half as usize).min(BINS - 1)
    }

    /// The octave of an age.
    #[inline]
    pub(super) fn octave(self, age: u64) -> usize {
        self.bin(age).div_ceil(2)
    }

    /// Where an octave ends.
    pub(super) fn octave_end(self, octave: usize) -> u64 {
        if octave + 1 >= OCTAVES { u64::MAX } else { self.edge(2 * octave + 1) }
    }

    /// Least difference of age that is told apart: half of bin 0.
    pub(super) fn quantum(self) -> u64 {
        1 << self.shift
    }

    /// Where a bin starts.
    #[inline]
    pub(super) fn edge(self, bin: usize) -> u64 {
        if bin == 0 {
            return 0;
        }
        let octave = bin.div_ceil(2) as u32;
        let half = bin as u64 & 1 ^ 1;
        ((2 + half) << (octave - 1)) << self.shift
    }
}

/// A size in half octaves: 0, 1, 2, 3, 4 to 5, 6 to 7, 8 to 11, ... At most 63 for sizes below 2^32.
#[inline]
pub(super) fn half_octave(x: u64) -> u16 {
    // Without a branch: nobody can guess which.
    let octave = x.max(1).ilog2();
    let half = (x >> octave.saturating_sub(1)) as u32 & 1;
    (2 * octave + half).min(63) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_and_edges_agree() {
        for capacity in [1, 100, 16_384, 1 << 20] {
            let ages = Ages::new(capacity);
            for bin in 0..BINS {
                let start = ages.edge(bin);
                assert_eq!(ages.bin(start), bin);
                if bin > 0 {
                    assert_eq!(ages.bin(start - 1), bin - 1, "bin {bin} of {capacity}");
                }
            }
            assert_eq!(ages.bin(u64::MAX), BINS - 1);
            for octave in 0..OCTAVES - 1 {
                assert_eq!(ages.octave(ages.octave_end(octave) - 1), octave);
                assert_eq!(ages.octave(ages.octave_end(octave)), octave + 1);
            }
        }
    }

    #[test]
    fn sizes_in_half_octaves() {
        let got: Vec<u16> = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12].map(half_octave).into();
        assert_eq!(got, [0, 1, 2, 3, 4, 4, 5, 5, 6, 7]);
        assert!((0..1 << 12).is_sorted_by_key(half_octave));
        assert_eq!(half_octave(u64::MAX), 63);
    }
}
