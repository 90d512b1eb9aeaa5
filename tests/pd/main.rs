#![expect(clippy::unwrap_used, reason = "helpers of tests, outside the test functions themselves")]
//! Prefill to decode: frames, plans, scenarios, simulation.

mod net;
mod open_rows;
mod oracle;
mod plan;
mod scenarios;
mod sim;
mod wire;

/// Seed of random tests: `SAPWOOD_SEED`, or the fixed one. Printed by every test that uses it.
pub(crate) fn seed(default: u64) -> u64 {
    let seed = std::env::var("SAPWOOD_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(default);
    println!("SAPWOOD_SEED={seed}");
    seed
}

/// splitmix64: enough for test inputs, same on every machine.
pub(crate) struct Rng(pub u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in `0..n`.
    pub(crate) fn below(&mut self, n: u32) -> u32 {
        (((self.next() >> 32) * u64::from(n)) >> 32) as u32
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u32) as usize]
    }

    pub(crate) fn chance(&mut self, percent: u32) -> bool {
        self.below(100) < percent
    }

    /// `n` distinct numbers below `below`, in random order.
    pub(crate) fn distinct(&mut self, n: u32, below: u32) -> Vec<u32> {
        let mut all: Vec<u32> = (0..below).collect();
        for i in 0..n.min(below) {
            let j = i + self.below(below - i);
            all.swap(i as usize, j as usize);
        }
        all.truncate(n as usize);
        all
    }
}
