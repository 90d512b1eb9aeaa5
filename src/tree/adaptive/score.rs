//! How likely a use is to be followed by another, learned while serving.
//!
//! An additive model of the log odds that a prefix is used again at an age, given that it was not used before that
//! age. Every feature is a bucket with a weight; there is one offset per age bin. Trained by gradient steps of
//! adaptive size as ages pass, so an unused prefix teaches from its first bin on, and nobody waits for a horizon.
//! Only `+ - * /` and `sqrt` are used: the same history gives the same weights bit for bit.

use super::age::BINS;
use super::signal::{SIGNALS, Signals, WEIGHTS};

/// Step size: 0.1 and 0.2 are within 0.3 points of each other on all traces, 0.05 learns the synthetic one too late.
const STEP: f64 = 0.2;
/// Start of the sum of squares, in squared pages; keeps the first steps small.
const SQUARES_START: f64 = 1.0;

#[derive(Clone, Copy, Debug)]
struct Weight {
    value: f64,
    squares: f64,
}

impl Weight {
    #[inline]
    fn step(&mut self, gradient: f64) {
        self.squares += gradient * gradient;
        self.value += STEP * gradient / self.squares.sqrt();
    }
}

/// The model.
#[derive(Clone, Debug)]
pub(super) struct Scorer {
    offset: [Weight; BINS],
    weights: Vec<Weight>,
}

impl Scorer {
    pub(super) fn new() -> Scorer {
        let zero = Weight { value: 0.0, squares: SQUARES_START };
        Scorer { offset: [Weight { value: -3.0, ..zero }; BINS], weights: vec![zero; WEIGHTS] }
    }

    /// Log odds without the offset of an age: what orders prefixes of equal age. O(signals).
    #[inline]
    pub(super) fn score(&self, signals: &Signals) -> f64 {
        signals.0.iter().map(|&at| self.weights[at as usize].value).sum()
    }

    /// One step: the prefix was used in this bin of its age, or it was not. `times` makes one use stand for several.
    /// O(signals).
    pub(super) fn learn(&mut self, signals: &Signals, bin: usize, pages: u32, times: f64, used: bool) {
        let z = self.offset[bin].value + self.score(signals);
        let gradient = (f64::from(u8::from(used)) - sigmoid(z)) * f64::from(pages).sqrt() * times;
        self.offset[bin].step(gradient);
        for &at in &signals.0 {
            self.weights[at as usize].step(gradient);
        }
    }

    /// Lets old steps count less, so that the step size does not die.
    pub(super) fn fade(&mut self, by: f64) {
        for weight in self.weights.iter_mut().chain(&mut self.offset) {
            weight.squares = (weight.squares * by).max(SQUARES_START);
        }
    }

    /// Spread of the weights of each signal, for `stats`.
    pub(super) fn spreads(&self) -> [f32; SIGNALS] {
        std::array::from_fn(|signal| {
            let values = self.weights[Signals::range(signal)].iter().map(|w| w.value);
            let (low, high) = values.fold((0.0f64, 0.0f64), |(l, h), v| (l.min(v), h.max(v)));
            (high - low) as f32
        })
    }
}

/// `1 / (1 + 2^-1.4427z)` without a library call, since `exp` is not the same everywhere: 2^x from the exponent bits
/// and a cubic on the fraction. Within 2e-4 of the true value.
fn sigmoid(z: f64) -> f64 {
    let x = (-z * std::f64::consts::LOG2_E).clamp(-60.0, 60.0);
    let whole = x.floor();
    let part = x - whole;
    let fraction = 1.0 + part * (0.695_502 + part * (0.226_175 + part * 0.078_323));
    let power = f64::from_bits(((whole as i64 + 1023) as u64) << 52);
    1.0 / (1.0 + power * fraction)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::adaptive::signal::{Place, Request};

    #[test]
    fn the_sigmoid_is_close() {
        for k in -400..=400 {
            let z = f64::from(k) / 10.0;
            assert!((sigmoid(z) - 1.0 / (1.0 + (-z).exp())).abs() < 2e-4, "{z}");
        }
        assert!(sigmoid(f64::NEG_INFINITY) >= 0.0 && sigmoid(f64::INFINITY) <= 1.0);
    }

    #[test]
    fn a_signal_that_tells_is_learned() {
        let of = |answer_tokens| {
            let request = Request { answer_tokens, prompt_pages: 10, ..Request::default() };
            Signals::new(&request, &Place { pages: 1, ..Place::default() }, None)
        };
        let mut scorer = Scorer::new();
        let (short, long) = (of(4), of(400));
        for _ in 0..200 {
            scorer.learn(&short, 3, 4, 1.0, true);
            scorer.learn(&long, 3, 4, 1.0, false);
        }
        assert!(scorer.score(&short) > scorer.score(&long) + 1.0);
        let spreads = scorer.spreads();
        assert!(spreads[3] > 1.0, "the answer's length tells: {spreads:?}");
        assert!(spreads[0] < spreads[3], "the turn does not: {spreads:?}");
    }
}
