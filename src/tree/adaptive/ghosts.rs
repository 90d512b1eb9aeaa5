//! What is remembered of evicted nodes: 32 bytes each, in a table that never fills. A name has two places in one cache
//! line; the older of two goes.

use crate::base::prefetch::prefetch;

/// No sample.
pub(super) const NO_SAMPLE: u32 = u32::MAX;

/// An evicted node. Names are hashes: an error costs a lesson, never a byte.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Ghost {
    /// When it was used last.
    pub(super) tick: u64,
    /// Rest of the name of its first page at its depth; 0: no ghost.
    pub(super) rest: u32,
    /// Name of its last page; 0: unknown.
    pub(super) end: u32,
    pub(super) pages: u32,
    /// Its use among the samples.
    pub(super) sample: u32,
    pub(super) mean_gap: u32,
    pub(super) uses: u8,
    pub(super) turn: u8,
}

impl Ghost {
    pub(super) const NONE: Ghost =
        Ghost { tick: 0, rest: 0, end: 0, pages: 0, sample: NO_SAMPLE, mean_gap: 0, uses: 0, turn: 0 };
}

/// Both places of a name.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Pair([Ghost; 2]);

const _: () = assert!(size_of::<Pair>() == 64);

/// Pairs of a table that is new.
const PAIRS_MIN: usize = 1 << 7;
/// A table grows until it has so many pairs for each leaf that is held, [`PAIRS_ENOUGH`] at least. Who comes back after more
/// than some four times what memory holds teaches little, and in a table of 4 MB every eviction waits for the address of its page,
/// for 90 ns. On both traces at seven capacities this table hits 342.4 % in sum, one of 2^17 entries 341.8, which is luck; half as
/// many pairs without a least number are half a percent worse.
const PAIRS_PER_LEAF: usize = 2;
const PAIRS_ENOUGH: usize = 1 << 10;

#[derive(Clone, Debug)]
pub(super) struct Ghosts {
    pairs: Vec<Pair>,
    /// The latest one and its name (0: none), not written yet: what is evicted piece by piece is dug up at once, and where it is
    /// written is fetched until the next.
    latest: (u64, Ghost),
    /// Entries written since the table grew.
    written: usize,
    pairs_max: usize,
}

/// Which pair, and what is compared in it.
fn split(name: u64) -> (usize, u32) {
    ((name >> 32) as usize, (name as u32).max(1))
}

impl Ghosts {
    /// At most `most` entries, rounded up to a power of two.
    pub(super) fn new(most: usize) -> Ghosts {
        let pairs_max = most.div_ceil(2).clamp(1, 1 << 25).next_power_of_two();
        Ghosts { pairs: Vec::new(), latest: (0, Ghost::NONE), written: 0, pairs_max }
    }

    /// Remembers a node under its name, while so many leaves are held; forgets the older of the two in its place. O(1),
    /// amortised where the table grows.
    #[inline]
    pub(super) fn bury(&mut self, name: u64, ghost: Ghost, leaves: usize) {
        self.prefetch(name);
        let (before, older) = std::mem::replace(&mut self.latest, (name, ghost));
        if before != 0 && before != name {
            self.write(before, older, leaves);
        }
    }

    #[inline]
    fn write(&mut self, name: u64, ghost: Ghost, leaves: usize) {
        // Three in one pair lose one: a pair for two entries would lose one in twelve.
        let pairs_max = self.pairs_max.min(PAIRS_ENOUGH.max(leaves.saturating_mul(PAIRS_PER_LEAF)));
        if 2 * self.written >= self.pairs.len() && self.pairs.len() < pairs_max {
            self.grow();
        }
        self.written += 1;
        let (at, rest) = split(name);
        let mask = self.pairs.len() - 1;
        place(&mut self.pairs[at & mask], Ghost { rest, ..ghost });
    }

    /// Doubles the table. An entry may belong into either half, which its name no longer says: it stands in both, and
    /// the wrong one is soon overwritten.
    fn grow(&mut self) {
        if self.pairs.is_empty() {
            self.pairs = vec![Pair([Ghost::NONE; 2]); PAIRS_MIN.min(self.pairs_max)];
        } else {
            self.pairs.extend_from_within(..);
        }
        self.written = 0;
    }

    /// Takes the ghost of that name out. O(1).
    #[inline]
    pub(super) fn dig(&mut self, name: u64) -> Option<Ghost> {
        self.dig_if(name, |_| true)
    }

    /// The same if it is as it is wanted.
    #[inline]
    pub(super) fn dig_if(&mut self, name: u64, wanted: impl Fn(&Ghost) -> bool) -> Option<Ghost> {
        if self.latest.0 == name && wanted(&self.latest.1) {
            self.latest.0 = 0;
            return Some(self.latest.1);
        }
        let (at, rest) = split(name);
        let mask = self.pairs.len().checked_sub(1)?;
        let found = self.pairs[at & mask].0.iter_mut().find(|g| g.rest == rest && wanted(g))?;
        Some(std::mem::replace(found, Ghost::NONE))
    }

    /// A name will be looked for or written soon: in a full table of 4 MB its pair is not at hand.
    #[inline]
    pub(super) fn prefetch(&self, name: u64) {
        if let Some(mask) = self.pairs.len().checked_sub(1) {
            prefetch(&self.pairs[split(name).0 & mask]);
        }
    }

    /// Entries in use. O(entries).
    pub(super) fn len(&self) -> usize {
        let written = self.pairs.iter().flat_map(|p| p.0).filter(|g| g.rest != 0).count();
        written + usize::from(self.latest.0 != 0)
    }
}

#[inline]
fn place(pair: &mut Pair, ghost: Ghost) {
    let [a, b] = pair.0;
    let second = b.rest == ghost.rest || a.rest != ghost.rest && b.tick < a.tick;
    pair.0[usize::from(second)] = ghost;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(n: u64) -> u64 {
        n.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1
    }

    fn bury(ghosts: &mut Ghosts, n: u64, pages: u32) {
        ghosts.bury(name(n), Ghost { tick: n, pages, ..Ghost::NONE }, usize::MAX);
    }

    #[test]
    fn the_newest_are_remembered_and_memory_is_bounded() {
        let mut ghosts = Ghosts::new(1 << 12);
        (1..100_000).for_each(|n| bury(&mut ghosts, n, 1));
        assert!(ghosts.pairs.len() == 1 << 11 && ghosts.len() > 3_500);
        let found = (99_000..100_000).filter(|&n| ghosts.dig(name(n)).is_some_and(|g| g.tick == n)).count();
        assert!(found > 800, "{found} of the last thousand");
        assert!(ghosts.dig(name(1)).is_none());
    }

    #[test]
    fn a_small_memory_remembers_a_few_times_what_it_holds() {
        for (leaves, pairs) in [(0, 1 << 10), (500, 1 << 10), (1_000, 1 << 11), (5_000, 1 << 14)] {
            let mut ghosts = Ghosts::new(1 << 17);
            (1..100_000).for_each(|n| ghosts.bury(name(n), Ghost { tick: n, ..Ghost::NONE }, leaves));
            assert_eq!(ghosts.pairs.len(), pairs, "{leaves} leaves");
        }
    }

    #[test]
    fn growing_forgets_little() {
        let mut ghosts = Ghosts::new(1 << 20);
        (1..2_000).for_each(|n| bury(&mut ghosts, n, 1));
        let found = (1..2_000).filter(|&n| ghosts.dig(name(n)).is_some()).count();
        assert!(found > 1_500, "{found}");
    }

    #[test]
    fn a_name_is_there_once() {
        let mut ghosts = Ghosts::new(16);
        bury(&mut ghosts, 3, 1);
        ghosts.bury(name(3), Ghost { tick: 50, pages: 9, ..Ghost::NONE }, usize::MAX);
        assert_eq!(ghosts.dig(name(3)).map(|g| g.pages), Some(9));
        assert_eq!(ghosts.dig(name(3)), None);
        assert_eq!(Ghosts::new(16).dig(5), None);
    }
}
