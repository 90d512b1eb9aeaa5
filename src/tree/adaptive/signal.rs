//! What is known of a use when it happens, in buckets.

use super::Mark;
use super::age::half_octave;

/// What the scheduler knows of a request once it is answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Request {
    /// Whole pages of the prompt.
    pub prompt_pages: u32,
    /// Of those, pages that nobody had asked for before (as far as the tree and its ghosts remember).
    pub new_pages: u32,
    /// Of those, pages that were found in the cache.
    pub hit_pages: u32,
    /// Tokens of the answer; 0 while it is unknown.
    pub answer_tokens: u32,
    /// Requests before this one in its conversation: one more than the turn of the deepest known node of its path.
    pub turn: u32,
    /// Any number that prompts of one kind share and others do not, such as the tag of the first page. 0: none.
    pub family: u32,
}

/// Where in the request's path a node lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Place {
    /// Pages of the node.
    pub pages: u32,
    /// Pages from the root to its start.
    pub depth_pages: u32,
    /// Pages from its end to the end of the prompt.
    pub after_pages: u32,
    /// Ways in which requests have gone on from its end, as far as known.
    pub kids: u32,
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
    ["turn", "prompt", "new", "answer", "uses", "kids", "gap", "mean_gap", "after", "depth", "family"];

/// One weight per signal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Signals(pub(super) [u16; SIGNALS]);

impl Signals {
    /// `mark` is the node's own past, before this use. O(1).
    pub(super) fn new(request: &Request, place: &Place, mark: Option<&Mark>) -> Signals {
        let (uses, gap, mean_gap) = mark.map_or((0, 0, 0), |m| (u64::from(m.uses), m.gap, m.mean_gap()));
        // Gaps in 1/4 octaves would be too sparse and pages too small: buckets of an octave of 16 pages.
        let coarse = |gap: u64| half_octave(gap >> 4) / 2 + u16::from(gap > 0);
        let buckets = [
            request.turn.min(15) as u16,
            half_octave(request.prompt_pages.into()),
            half_octave(request.new_pages.into()),
            half_octave(request.answer_tokens.into()),
            half_octave(uses),
            place.kids.min(7) as u16,
            coarse(gap),
            coarse(mean_gap),
            half_octave(place.after_pages.into()),
            half_octave(place.depth_pages.into()),
            family(request.family),
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

/// Fibonacci hashing to 1..=255; 0 stays 0.
fn family(of: u32) -> u16 {
    if of == 0 { 0 } else { 1 + ((of.wrapping_mul(0x9E37_79B9) >> 16) % (FAMILIES as u32 - 1)) as u16 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bucket_has_its_weight() {
        let most = Request {
            prompt_pages: u32::MAX,
            new_pages: u32::MAX,
            hit_pages: u32::MAX,
            answer_tokens: u32::MAX,
            turn: u32::MAX,
            family: u32::MAX,
        };
        let place = Place { pages: 1, depth_pages: u32::MAX, after_pages: u32::MAX, kids: u32::MAX };
        let mark = Mark { uses: u32::MAX, gap: u64::MAX, born: 0, last: u64::MAX, ..Mark::default() };
        for signals in [
            Signals::new(&most, &place, Some(&mark)),
            Signals::new(&Request::default(), &Place::default(), None),
        ] {
            for (signal, &at) in signals.0.iter().enumerate() {
                assert!(Signals::range(signal).contains(&(at as usize)), "signal {signal}: {at}");
                assert!((at as usize) < WEIGHTS);
            }
        }
    }

    #[test]
    fn a_silent_signal_tells_nothing() {
        let of = |turn| {
            let mut s = Signals::new(&Request { turn, ..Request::default() }, &Place::default(), None);
            s.silence(0);
            s
        };
        assert_eq!(of(1), of(9));
    }
}
