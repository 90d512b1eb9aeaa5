//! What is known of a use, in buckets.

use super::age::half_octave;
use super::mark::Mark;
use crate::tree::waiting::Turn;

/// What the tree knows of a leaf when it enters an order. Pages count from the root.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(in crate::tree) struct Leaf {
    /// Time of the last use.
    pub(in crate::tree) tick: u64,
    /// Pages from the root to its start.
    pub(in crate::tree) depth: u32,
    /// Pages of the node.
    pub(in crate::tree) pages: u32,
    /// Deepest end of a request through it.
    pub(in crate::tree) reach: u32,
    /// Children, on lower tiers.
    pub(in crate::tree) kids: u32,
    /// Highest priority of a request through it.
    pub(in crate::tree) priority: i32,
    /// The next tier holds all of it: to evict it costs a fetch, not a computation.
    pub(in crate::tree) copied: bool,
    /// Kept: the turn of the first waiting request that will use it, the last turn there is if it is for sessions only.
    pub(in crate::tree) kept: Option<Turn>,
}

/// Number of signals.
pub(super) const SIGNALS: usize = 11;
/// Buckets of a signal other than the family.
const BUCKETS: usize = 64;
/// Buckets of the family, the last signal.
const FAMILIES: usize = 256;
/// Weights of all signals.
pub(super) const WEIGHTS: usize = (SIGNALS - 1) * BUCKETS + FAMILIES;

/// Names of the signals, in order, for `stats`.
pub const SIGNAL_NAMES: [&str; SIGNALS] =
    ["turn", "prompt", "new", "answer", "uses", "kids", "mean_gap", "after", "depth", "priority", "family"];

/// One weight per signal.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Signals(pub(super) [u16; SIGNALS]);

impl Signals {
    /// O(1).
    #[inline]
    pub(super) fn new(leaf: &Leaf, mark: &Mark) -> Signals {
        let end = leaf.depth.saturating_add(leaf.pages);
        let prompt = leaf.reach.max(end);
        // Gaps in half octaves of pages would be too sparse: octaves of 16 pages.
        let gap = half_octave(u64::from(mark.mean_gap) >> 4) / 2 + u16::from(mark.mean_gap > 0);
        let buckets = [
            u16::from(mark.turn.min(15)),
            half_octave(prompt.into()),
            half_octave(mark.new_pages.into()),
            u16::from(mark.answer),
            half_octave(mark.uses.into()),
            leaf.kids.min(7) as u16,
            gap,
            half_octave((prompt - end).into()),
            half_octave(mark.base.into()),
            (leaf.priority.clamp(-2, 2) + 2) as u16,
            u16::from(mark.family),
        ];
        Signals(std::array::from_fn(|signal| Self::range(signal).start as u16 + buckets[signal]))
    }

    /// Weights of one signal.
    pub(super) fn range(signal: usize) -> std::ops::Range<usize> {
        let start = signal * BUCKETS;
        start..start + if signal + 1 == SIGNALS { FAMILIES } else { BUCKETS }
    }

    /// Sends a signal to its first bucket, so that it tells nothing: for ablations.
    pub(super) fn silence(&mut self, signal: usize) {
        self.0[signal] = Self::range(signal).start as u16;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bucket_has_its_weight() {
        let most = Leaf {
            tick: u64::MAX,
            depth: u32::MAX,
            pages: u32::MAX,
            reach: u32::MAX,
            kids: u32::MAX,
            priority: i32::MAX,
            copied: true,
            kept: Some(0),
        };
        let mark = Mark {
            mean_gap: u32::MAX,
            new_pages: u16::MAX,
            uses: u8::MAX,
            turn: u8::MAX,
            family: u8::MAX,
            answer: 63,
            ..Mark::default()
        };
        let least = Leaf { priority: i32::MIN, ..Leaf::default() };
        for signals in [Signals::new(&most, &mark), Signals::new(&least, &Mark::default())] {
            for (signal, &at) in signals.0.iter().enumerate() {
                assert!(Signals::range(signal).contains(&(at as usize)), "signal {signal}: {at}");
                assert!((at as usize) < WEIGHTS);
            }
        }
    }

    #[test]
    fn a_silent_signal_tells_nothing() {
        let of = |turn| {
            let mut s = Signals::new(&Leaf::default(), &Mark { turn, ..Mark::default() });
            s.silence(0);
            s
        };
        assert_eq!(of(1), of(9));
    }
}
