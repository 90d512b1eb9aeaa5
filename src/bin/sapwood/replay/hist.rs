//! Histograms of call times: fixed size, no allocation while counting.

use std::time::Duration;

/// Buckets per power of two: the value that a quantile reports is at most 1/32 too high.
const SUB: u64 = 32;
/// Largest power of two kept apart, in nanoseconds: 2^42 is 73 minutes.
const POWERS: u64 = 43;
const BUCKETS: usize = (SUB * POWERS) as usize;

/// Counts of durations in logarithmic buckets.
pub(crate) struct Histogram {
    buckets: Vec<u64>,
    count: u64,
    sum_ns: u64,
    max_ns: u64,
}

/// What a histogram says, in microseconds.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub(crate) struct Quantiles {
    pub(crate) count: u64,
    pub(crate) mean: f64,
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) max: f64,
}

impl Histogram {
    pub(crate) fn new() -> Histogram {
        Histogram { buckets: vec![0; BUCKETS], count: 0, sum_ns: 0, max_ns: 0 }
    }

    /// Counts one duration.
    pub(crate) fn add(&mut self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.buckets[bucket(ns)] += 1;
        self.count += 1;
        self.sum_ns = self.sum_ns.saturating_add(ns);
        self.max_ns = self.max_ns.max(ns);
    }

    /// Smallest bucket bound that `q` of all values do not exceed, never above the maximum.
    fn quantile_ns(&self, q: f64) -> u64 {
        let rank = ((self.count as f64 * q).ceil() as u64).max(1);
        let mut below = 0;
        for (index, n) in self.buckets.iter().enumerate() {
            below += n;
            if below >= rank {
                return upper_bound(index).min(self.max_ns);
            }
        }
        self.max_ns
    }

    pub(crate) fn quantiles(&self) -> Quantiles {
        let us = |ns: u64| ns as f64 / 1_000.0;
        Quantiles {
            count: self.count,
            mean: us(self.sum_ns / self.count.max(1)),
            p50: us(self.quantile_ns(0.5)),
            p99: us(self.quantile_ns(0.99)),
            max: us(self.max_ns),
        }
    }
}

/// Values below `SUB` have a bucket each; above, the top five bits below the leading one choose.
fn bucket(ns: u64) -> usize {
    if ns < SUB {
        return ns as usize;
    }
    let power = u64::from(ns.ilog2()) - 5;
    let index = (power + 1) * SUB + (ns >> power) - SUB;
    (index as usize).min(BUCKETS - 1)
}

fn upper_bound(index: usize) -> u64 {
    let (index, sub) = (index as u64 / SUB, index as u64 % SUB);
    if index == 0 {
        return sub;
    }
    ((SUB + sub + 1) << (index - 1)) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_contiguous_and_narrow() {
        let mut previous = 0;
        for index in 1..BUCKETS {
            let bound = upper_bound(index);
            assert!(bound > previous);
            assert_eq!(bucket(previous + 1), index);
            assert_eq!(bucket(bound), index);
            assert!(bound - previous <= previous / SUB + 1, "bucket {index} is too wide");
            previous = bound;
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn quantiles_of_known_values() {
        let mut histogram = Histogram::new();
        assert_eq!(histogram.quantiles().p99, 0.0);
        (1..=1000).for_each(|us| histogram.add(Duration::from_micros(us)));
        let q = histogram.quantiles();
        assert_eq!((q.count, q.mean, q.max), (1000, 500.5, 1000.0));
        assert!((500.0..516.0).contains(&q.p50), "{}", q.p50);
        assert!((990.0..1000.1).contains(&q.p99), "{}", q.p99);
    }
}
