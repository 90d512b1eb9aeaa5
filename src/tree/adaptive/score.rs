//! How likely a leaf is to be used again, learned while serving.
//!
//! An additive model of the log odds that a leaf is used in an octave of its age, given that it was not used before.
//! Every signal is a bucket with a weight; there is one offset per octave. Trained by gradient steps of adaptive size as
//! ages pass, so an unused leaf teaches from its first octave on, and nobody waits for a horizon. Only `+ - * /` and
//! `sqrt` are used: the same history gives the same weights bit for bit.

use super::age::OCTAVES;
use super::hazard::CLASSES;
use super::signal::{SIGNALS, Signals, WEIGHTS};

/// Step size: 0.1 and 0.2 are within 0.3 points of each other on all traces, 0.05 learns the synthetic one too late.
const STEP: f32 = 0.2;
/// Start of the sum of squares, in squared pages; keeps the first steps small.
const SQUARES_START: f32 = 1.0;
/// Log odds of a use in an octave of age before anything is known; chosen as the priors of `hazard` were.
const OFFSET_START: f32 = -2.0;
/// Room for all weights, so that no index needs a check.
const WEIGHTS_MAX: usize = WEIGHTS.next_power_of_two();
/// Scores are counted from -RANGE to RANGE in so many buckets.
const BUCKETS: usize = 256;
const RANGE: f32 = 8.0;

#[derive(Clone, Copy, Debug)]
struct Weight {
    value: f32,
    squares: f32,
}

/// The model, and the classes that its scores are cut into.
#[derive(Clone, Debug)]
pub(super) struct Scorer {
    offset: [Weight; OCTAVES],
    weights: Box<[Weight; WEIGHTS_MAX]>,
    /// Pages by score, fading.
    counts: Vec<f32>,
    /// Class by score.
    classes: Vec<u8>,
}

impl Scorer {
    pub(super) fn new() -> Scorer {
        let zero = Weight { value: 0.0, squares: SQUARES_START };
        Scorer {
            offset: [Weight { value: OFFSET_START, ..zero }; OCTAVES],
            weights: Box::new([zero; WEIGHTS_MAX]),
            counts: vec![0.0; BUCKETS],
            classes: vec![0; BUCKETS],
        }
    }

    /// Log odds without the offset of an age: what orders leaves of equal age. O(signals).
    #[inline]
    fn score(&self, signals: &Signals) -> f32 {
        let mut values = [0.0; SIGNALS + 1];
        for (value, &at) in values.iter_mut().zip(&signals.0) {
            *value = self.weights[usize::from(at) % WEIGHTS_MAX].value;
        }
        sum(&values)
    }

    /// The class of a new use of so many pages. O(signals).
    #[inline]
    pub(super) fn classify(&mut self, signals: &Signals, pages: u32) -> u8 {
        let score = self.score(signals);
        // Through `i32`: to `usize` takes four times the instructions.
        let bucket = ((score + RANGE) * (BUCKETS as f32 / (2.0 * RANGE))) as i32;
        let bucket = bucket.clamp(0, BUCKETS as i32 - 1) as usize;
        self.counts[bucket] += pages as f32;
        self.classes[bucket]
    }

    /// One step: a leaf was used in this octave of its age, or it was not. O(signals).
    pub(super) fn learn(&mut self, signals: &Signals, octave: usize, pages: u32, used: bool) {
        let offset = &mut self.offset[octave];
        // The offset is the last of them.
        let (mut values, mut squares) = ([offset.value; SIGNALS + 1], [offset.squares; SIGNALS + 1]);
        for (signal, &at) in signals.0.iter().enumerate() {
            let weight = self.weights[usize::from(at) % WEIGHTS_MAX];
            (values[signal], squares[signal]) = (weight.value, weight.squares);
        }
        let z = offset.value + sum(&values);
        let gradient = (f32::from(u8::from(used)) - sigmoid(z)) * (pages as f32).sqrt();
        step(gradient, &mut squares, &mut values);
        *offset = Weight { value: values[SIGNALS], squares: squares[SIGNALS] };
        for (signal, &at) in signals.0.iter().enumerate() {
            let weight = Weight { value: values[signal], squares: squares[signal] };
            self.weights[usize::from(at) % WEIGHTS_MAX] = weight;
        }
    }

    /// Lets old steps count less, so that the step size does not die, and cuts the scores into classes of equal pages.
    /// (By pages, not by leaves: a system prompt in every path would fill a third of the classes by itself.)
    /// O(weights).
    pub(super) fn rebuild(&mut self, fade: f32, fade_scores: f32) {
        for weight in self.weights.iter_mut().chain(&mut self.offset) {
            weight.squares = (weight.squares * fade).max(SQUARES_START);
        }
        let total: f32 = self.counts.iter().sum();
        let mut below = 0.0;
        for (count, class) in self.counts.iter_mut().zip(&mut self.classes) {
            // The class of a bucket is that of its middle page.
            let middle = (below + 0.5 * *count) * CLASSES as f32 / total.max(1.0);
            *class = (middle as usize).min(CLASSES - 1) as u8;
            below += *count;
            *count *= fade_scores;
        }
    }

    /// Spread of the weights of each signal, for `stats`.
    pub(super) fn spreads(&self) -> [f32; SIGNALS] {
        std::array::from_fn(|signal| {
            let values = self.weights[Signals::range(signal)].iter().map(|w| w.value);
            let (low, high) = values.fold((0.0f32, 0.0f32), |(l, h), v| (l.min(v), h.max(v)));
            high - low
        })
    }
}

/// Adds a gradient to sums of squares, and the steps that follow to values. A call of its own, so that the compiler takes four roots
/// and quotients at once: one by one they were half of a lesson.
#[inline(never)]
fn step(gradient: f32, squares: &mut [f32; SIGNALS + 1], values: &mut [f32; SIGNALS + 1]) {
    for (squares, value) in squares.iter_mut().zip(values) {
        *squares += gradient * gradient;
        *value += STEP * gradient / squares.sqrt();
    }
}

/// Of all but the last, in four sums, which do not wait for one another.
#[inline]
fn sum(values: &[f32; SIGNALS + 1]) -> f32 {
    let mut sums = [0.0; 4];
    for (signal, value) in values[..SIGNALS].iter().enumerate() {
        sums[signal % 4] += value;
    }
    sums[0] + sums[1] + (sums[2] + sums[3])
}

/// `1 / (1 + 2^-1.4427z)` without a library call, since `exp` is not the same everywhere: 2^x from the exponent bits
/// and a cubic on the fraction. Within 2e-4 of the true value.
fn sigmoid(z: f32) -> f32 {
    let x = (-z * std::f32::consts::LOG2_E).clamp(-60.0, 60.0);
    // Rounded down; `floor` is a call.
    let whole = (x + 64.0) as i32 - 64;
    let part = x - whole as f32;
    let fraction = 1.0 + part * (0.695_502 + part * (0.226_175 + part * 0.078_323));
    let power = f32::from_bits(((whole + 127) as u32) << 23);
    1.0 / (1.0 + power * fraction)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::adaptive::mark::Mark;
    use crate::tree::adaptive::signal::Leaf;

    #[test]
    fn the_sigmoid_is_close() {
        for k in -400..=400 {
            let z = k as f32 / 10.0;
            assert!((sigmoid(z) - 1.0 / (1.0 + (-z).exp())).abs() < 3e-4, "{z}");
        }
        assert!(sigmoid(f32::NEG_INFINITY) >= 0.0 && sigmoid(f32::INFINITY) <= 1.0);
    }

    #[test]
    fn a_signal_that_tells_is_learned_and_makes_classes() {
        let of =
            |answer| Signals::new(&Leaf { pages: 1, ..Leaf::default() }, &Mark { answer, ..Mark::default() });
        let mut scorer = Scorer::new();
        let (short, long) = (of(4), of(17));
        assert_eq!(scorer.classify(&short, 1), scorer.classify(&long, 1), "nothing is known");
        for _ in 0..200 {
            scorer.learn(&short, 3, 4, true);
            scorer.learn(&long, 3, 4, false);
            scorer.classify(&short, 1);
            scorer.classify(&long, 1);
        }
        scorer.rebuild(0.9, 0.9);
        assert!(scorer.classify(&short, 1) > scorer.classify(&long, 1));
        let spreads = scorer.spreads();
        assert!(spreads[3] > 1.0, "the answer's length tells: {spreads:?}");
        assert!(spreads[0] < spreads[3], "the turn does not: {spreads:?}");
    }
}
