//! Uses that are followed until they are answered or forgotten: the lessons.
//!
//! A sample stands in the queue of the octave of its age. When it leaves the octave unused it teaches that and goes to the
//! next queue; when its node is used again it teaches that and is closed. At first every use is a sample, then fewer
//! and fewer: the tables need some ten thousand of them and then only news.

use std::collections::VecDeque;

use super::age::{Ages, OCTAVES};
use super::ghosts::NO_SAMPLE;
use super::signal::Signals;

/// Samples kept; an older one is dropped for a new one.
const SAMPLES: u32 = 1 << 13;
/// Samples taken until one in two, then four and so on, uses is one.
const PER_STAGE: u32 = 1 << 11;
/// Least share of uses that are samples: one in 2^4.
const STAGES: u32 = 4;

/// One use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    id: u32,
    pub(super) pages: u32,
    pub(super) tick: u64,
    pub(super) signals: Signals,
    pub(super) class: u8,
    /// Octave of age that it is in.
    pub(super) octave: u8,
    open: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Samples {
    ring: Vec<Sample>,
    queues: [VecDeque<u32>; OCTAVES],
    next: u32,
    uses: u32,
    open: usize,
}

impl Samples {
    pub(super) fn new() -> Samples {
        Samples { ring: Vec::new(), queues: Default::default(), next: 0, uses: 0, open: 0 }
    }

    /// One in 2^k uses is a sample now; k.
    pub(super) fn stage(&self) -> u32 {
        (self.next / PER_STAGE).min(STAGES)
    }

    pub(super) fn len(&self) -> usize {
        self.open
    }

    /// True if the use that happens now is to be a sample.
    #[inline]
    pub(super) fn wants(&mut self) -> bool {
        self.uses = self.uses.wrapping_add(1);
        // Spread by a hash, so that no period of the workload meets the period of the samples.
        let spread = self.uses.wrapping_mul(0x9E37_79B9) >> 16;
        spread & ((1 << self.stage()) - 1) == 0
    }

    /// Follows a use of age `age`; its number. O(1).
    pub(super) fn push(
        &mut self,
        tick: u64,
        age: u64,
        pages: u32,
        class: u8,
        signals: Signals,
        ages: Ages,
    ) -> u32 {
        let id = self.next;
        // Numbers do not wrap: ids stop naming anything before they would.
        self.next = (id + 1).min(NO_SAMPLE - 1);
        let octave = ages.octave(age) as u8;
        let sample = Sample { id, tick, pages, class, signals, octave, open: true };
        let at = (id % SAMPLES) as usize;
        match self.ring.get_mut(at) {
            Some(old) => {
                self.open -= usize::from(old.open);
                *old = sample;
            }
            None => self.ring.push(sample),
        }
        self.open += 1;
        self.queues[usize::from(octave)].push_back(id);
        id
    }

    fn at(&mut self, id: u32) -> Option<&mut Sample> {
        self.ring.get_mut((id % SAMPLES) as usize).filter(|s| s.id == id && s.open)
    }

    /// The sample of that number, to be changed, if it is open still.
    pub(super) fn get(&mut self, id: u32) -> Option<&mut Sample> {
        if id == NO_SAMPLE { None } else { self.at(id) }
    }

    /// Closes a sample. O(1).
    pub(super) fn close(&mut self, id: u32) -> Option<Sample> {
        let found = self.get(id)?;
        found.open = false;
        let sample = *found;
        self.open -= 1;
        Some(sample)
    }

    /// Shows every sample that has left its octave unused by `now`. O(samples shown + octaves).
    pub(super) fn cross(&mut self, now: u64, ages: Ages, mut show: impl FnMut(&Sample)) {
        for octave in 0..OCTAVES {
            let end = ages.octave_end(octave);
            while let Some(&id) = self.queues[octave].front() {
                let open = self.ring.get_mut((id % SAMPLES) as usize).filter(|s| s.id == id && s.open);
                if let Some(sample) = open {
                    if sample.tick.saturating_add(end) > now {
                        break;
                    }
                    show(sample);
                    if octave + 1 == OCTAVES {
                        sample.open = false;
                        self.open -= 1;
                    } else {
                        sample.octave = octave as u8 + 1;
                        self.queues[octave + 1].push_back(id);
                    }
                }
                self.queues[octave].pop_front();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(n: u64) -> (Samples, Ages) {
        let (mut samples, ages) = (Samples::new(), Ages::new(128 * 16));
        for k in 0..n {
            samples.push(k, 0, 1, 0, Signals::default(), ages);
        }
        (samples, ages)
    }

    #[test]
    fn each_octave_is_passed_once() {
        let (mut samples, ages) = samples(1);
        let mut seen = Vec::new();
        for now in 0..100_000 {
            samples.cross(now, ages, |s| seen.push(s.octave));
        }
        assert!(seen.is_sorted() && seen.len() > 8, "{seen:?}");
        assert_eq!(seen, (0..seen.len() as u8).collect::<Vec<_>>());
        samples.cross(u64::MAX, ages, |_| {});
        assert_eq!(samples.len(), 0);
    }

    #[test]
    fn an_answered_sample_is_silent_and_old_ones_are_dropped() {
        let (mut samples, ages) = samples(u64::from(SAMPLES) + 10);
        assert_eq!(samples.len(), SAMPLES as usize);
        assert!(samples.close(5).is_none(), "dropped");
        assert!(samples.close(100).is_some() && samples.close(100).is_none());
        assert!(samples.close(NO_SAMPLE).is_none());
        let mut shown = 0;
        samples.cross(u64::MAX, ages, |_| shown += 1);
        assert_eq!(shown % OCTAVES, 0);
        assert_eq!(samples.len(), 0);
    }

    #[test]
    fn samples_become_rarer() {
        let (mut samples, _) = samples(0);
        assert!((0..1_000).all(|_| samples.wants()));
        let (mut samples, _) = self::samples(u64::from(4 * PER_STAGE));
        let taken = (0..8_000).filter(|_| samples.wants()).count();
        assert!((450..550).contains(&taken), "{taken}");
    }
}
