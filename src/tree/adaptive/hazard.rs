//! What a page is worth by class and age: the return on the memory that it takes.
//!
//! Classes are quantiles of the score. For each class and age bin the table counts pages that came to that age unused
//! (`exposed`) and pages used within it (`used`); their ratio is the hazard. From the hazards follows the **gain**: the
//! best rate, over all times to stop waiting, of expected hits per page and per volume of work
//!
//! `gain(b) = max over e >= b of (chance of a use in b..=e) / (expected volume until that use or the end of e)`
//!
//! which is the Gittins index of a page that either pays once or never. It sees a peak ahead: a conversation whose user
//! is still reading is kept although nobody returns within the next seconds.

use super::age::{Ages, BINS};

/// Classes by score. 4, 8 and 16 are within noise of each other; 1 is useless.
pub(super) const CLASSES: usize = 8;
/// Chance of a use per half octave before anything is known: the same at every age, which makes the order LRU. The first
/// bin is wider than the second, so it gets more.
const fn prior_hazard(bin: usize) -> f64 {
    if bin == 0 { 0.3 } else { 0.1 }
}

/// Hazards and gains.
#[derive(Clone, Debug)]
pub(super) struct Hazards {
    used: [[f64; BINS]; CLASSES],
    exposed: [[f64; BINS]; CLASSES],
    gain: [[f64; BINS]; CLASSES],
    /// Pages of evidence that the prior is worth: for the shape that all classes share.
    prior_all: f64,
    /// The same for a class, against that shape.
    prior_class: f64,
}

impl Hazards {
    pub(super) fn new(capacity_pages: u64, ages: Ages) -> Hazards {
        let capacity = capacity_pages as f64;
        let zero = [[0.0; BINS]; CLASSES];
        // Chosen on the first thirds of the traces and on generated workloads: see docs/EVICTION.md, "Parameters".
        let (prior_all, prior_class) = (capacity, capacity / 8.0);
        let mut hazards = Hazards { used: zero, exposed: zero, gain: zero, prior_all, prior_class };
        hazards.rebuild(ages);
        hazards
    }

    /// Pages came to the end of a bin unused.
    #[inline]
    pub(super) fn passed(&mut self, class: u8, bin: usize, pages: f64) {
        self.exposed[class as usize][bin] += pages;
    }

    /// Pages were used within a bin; on average in its middle.
    #[inline]
    pub(super) fn used(&mut self, class: u8, bin: usize, pages: f64) {
        self.used[class as usize][bin] += pages;
        self.exposed[class as usize][bin] += 0.5 * pages;
    }

    /// Uses per page and volume that keeping a page of this class and age brings. O(1).
    #[inline]
    pub(super) fn gain(&self, class: u8, bin: usize) -> f64 {
        self.gain[class as usize][bin]
    }

    /// Lets old evidence count less.
    pub(super) fn fade(&mut self, by: f64) {
        for row in self.used.iter_mut().chain(&mut self.exposed) {
            row.iter_mut().for_each(|x| *x *= by);
        }
    }

    /// Works out the gains from the counts. O(classes x bins).
    pub(super) fn rebuild(&mut self, ages: Ages) {
        let shape = self.shape();
        let hazards: [[f64; BINS]; CLASSES] = std::array::from_fn(|class| self.class_hazard(class, &shape));
        for (gain, hazard) in self.gain.iter_mut().zip(&hazards) {
            *gain = gains(hazard, ages);
        }
    }

    /// Hazard by age of all classes together.
    fn shape(&self) -> [f64; BINS] {
        let sum = |table: &[[f64; BINS]; CLASSES], bin| table.iter().map(|row| row[bin]).sum::<f64>();
        std::array::from_fn(|bin| {
            (sum(&self.used, bin) + prior_hazard(bin) * self.prior_all)
                / (sum(&self.exposed, bin) + self.prior_all)
        })
    }

    /// Hazard of a class: its own counts and some of its neighbours', pulled towards the common shape times how much
    /// more often than the others the class is used.
    fn class_hazard(&self, class: usize, shape: &[f64; BINS]) -> [f64; BINS] {
        let (used, exposed) = (smooth(&self.used, class), smooth(&self.exposed, class));
        let expected: f64 = (0..BINS).map(|b| exposed[b] * shape[b]).sum();
        let pull = self.prior_class;
        let ratio = (used.iter().sum::<f64>() + 0.2 * pull) / (expected + 0.2 * pull);
        std::array::from_fn(|b| ((used[b] + pull * shape[b] * ratio) / (exposed[b] + pull)).min(0.95))
    }
}

/// A row of a table mixed with its neighbours 1 : 2 : 1 in class and in age. Worth 1 point on the synthetic trace, whose
/// long documents make the counts noisy, and nothing elsewhere.
fn smooth(table: &[[f64; BINS]; CLASSES], class: usize) -> [f64; BINS] {
    let rows = [class.saturating_sub(1), class, class, (class + 1).min(CLASSES - 1)];
    std::array::from_fn(|bin| {
        let bins = [bin.saturating_sub(1), bin, bin, (bin + 1).min(BINS - 1)];
        rows.iter().map(|&row| bins.iter().map(|&b| table[row][b]).sum::<f64>()).sum::<f64>() / 16.0
    })
}

/// A page waits along one curve of volume spent and uses brought, whatever the bin it starts in; the best rate from a bin
/// on is the steepest chord from there, so the upper hull from the right gives them all. O(bins).
fn gains(hazard: &[f64; BINS], ages: Ages) -> [f64; BINS] {
    let (mut left, mut at) = (1.0, (0.0, 0.0));
    let curve: [(f64, f64); BINS] = std::array::from_fn(|bin| {
        let here = at;
        if bin + 1 < BINS {
            let width = (ages.edge(bin + 1) - ages.edge(bin)) as f64;
            at = (here.0 + left * width * (1.0 - 0.5 * hazard[bin]), here.1 + left * hazard[bin]);
            left *= 1.0 - hazard[bin];
        }
        here
    });
    let slope =
        |a: usize, b: usize| (curve[b].1 - curve[a].1) / (curve[b].0 - curve[a].0).max(f64::MIN_POSITIVE);
    let mut gains = [0.0; BINS];
    // The hull, leftmost point last, each with its slope to the next.
    let mut hull = [(BINS - 1, 0.0); BINS];
    let mut points = 1;
    for from in (0..BINS - 1).rev() {
        let mut best = slope(from, hull[points - 1].0);
        while points > 1 && best <= hull[points - 1].1 {
            points -= 1;
            best = slope(from, hull[points - 1].0);
        }
        hull[points] = (from, best);
        points += 1;
        gains[from] = best;
    }
    gains
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPACITY: u64 = 16_384;

    fn learned(at: impl Fn(usize, usize) -> (u32, u32)) -> Hazards {
        let ages = Ages::new(CAPACITY);
        let mut hazards = Hazards::new(CAPACITY, ages);
        for class in 0..CLASSES {
            for bin in 0..BINS - 1 {
                let (used, passed) = at(class, bin);
                hazards.used(class as u8, bin, used.into());
                hazards.passed(class as u8, bin, passed.into());
            }
        }
        hazards.fade(1.0);
        hazards.rebuild(ages);
        hazards
    }

    #[test]
    fn without_evidence_the_order_is_lru() {
        let hazards = Hazards::new(CAPACITY, Ages::new(CAPACITY));
        for bin in 1..BINS {
            // Equal bins of one octave are ordered by the number of the use.
            assert!(hazards.gain(0, bin) <= 1.000_001 * hazards.gain(0, bin - 1), "bin {bin}");
            assert!(bin < 2 || hazards.gain(0, bin) < hazards.gain(0, bin - 2), "bin {bin}");
        }
    }

    #[test]
    fn a_class_that_returns_is_worth_more() {
        let hazards = learned(|class, _| if class == 7 { (300_000, 700_000) } else { (1_000, 999_000) });
        for bin in 0..BINS - 1 {
            assert!(hazards.gain(7, bin) > 10.0 * hazards.gain(0, bin));
        }
    }

    #[test]
    fn a_peak_ahead_is_seen() {
        // Nobody returns before bin 12, half of them do in it.
        let hazards = learned(|_, bin| if bin == 12 { (5_000_000, 5_000_000) } else { (0, 10_000_000) });
        for bin in 1..=12 {
            assert!(hazards.gain(0, bin) > hazards.gain(0, bin - 1), "bin {bin}");
        }
        assert!(hazards.gain(0, 15) < hazards.gain(0, 0) / 10.0);
    }

    #[test]
    fn the_gain_is_the_best_stopping_rate() {
        let ages = Ages::new(128);
        let mut hazard = [0.0; BINS];
        (hazard[0], hazard[1]) = (0.25, 0.5);
        // Stopping after bin 0: 0.25 / (2 * 0.875); after bin 1: (0.25 + 0.375) / (1.75 + 0.75 * 0.75).
        let by_hand = (0.25f64 / 1.75).max(0.625 / (1.75 + 0.5625));
        assert!((gains(&hazard, ages)[0] - by_hand).abs() < 1e-12);
        // Against every time to stop, for any hazards.
        let mut state = 5u64;
        for _ in 0..200 {
            let hazard: [f64; BINS] = std::array::from_fn(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 40) as f64 / (1u64 << 24) as f64 * 0.4
            });
            for (from, &got) in gains(&hazard, ages).iter().enumerate() {
                let (mut left, mut uses, mut volume, mut best) = (1.0, 0.0, 0.0, 0.0f64);
                for (bin, &chance) in hazard.iter().enumerate().take(BINS - 1).skip(from) {
                    let width = (ages.edge(bin + 1) - ages.edge(bin)) as f64;
                    uses += left * chance;
                    volume += left * width * (1.0 - 0.5 * chance);
                    left *= 1.0 - chance;
                    best = best.max(uses / volume);
                }
                assert!((got - best).abs() <= 1e-4 * best, "bin {from}: {got}, not {best}");
            }
        }
    }
}
