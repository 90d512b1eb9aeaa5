//! Time for the wrappers, so that tests can turn it by hand.

use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// Reads and spends time.
pub trait Clock: Send + Sync + Debug {
    /// Now.
    fn now(&self) -> Instant;
    /// Returns when `time` has passed.
    fn sleep(&self, time: Duration);
}

/// The machine's monotonic clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn sleep(&self, time: Duration) {
        std::thread::sleep(time);
    }
}

/// A clock that stands still until told: sleeping moves it and returns at once.
#[derive(Debug)]
pub struct ManualClock {
    origin: Instant,
    ahead_us: AtomicU64,
    slept_us: AtomicU64,
}

impl Default for ManualClock {
    fn default() -> Self {
        ManualClock { origin: Instant::now(), ahead_us: AtomicU64::new(0), slept_us: AtomicU64::new(0) }
    }
}

impl ManualClock {
    /// Moves it.
    pub fn advance(&self, time: Duration) {
        self.ahead_us.fetch_add(us(time), SeqCst);
    }

    /// Sum of all sleeps.
    #[must_use]
    pub fn slept(&self) -> Duration {
        Duration::from_micros(self.slept_us.load(SeqCst))
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Instant {
        self.origin + Duration::from_micros(self.ahead_us.load(SeqCst))
    }

    fn sleep(&self, time: Duration) {
        self.slept_us.fetch_add(us(time), SeqCst);
        self.advance(time);
    }
}

fn us(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
