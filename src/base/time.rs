//! Time as an argument. Floors 0 to 3 never read a clock: whoever drives them says what time it is.

use std::fmt;
use std::ops::{Add, Sub};

/// Microseconds since an origin that the driver chooses (start of the process, start of the replay).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Time(pub u64);

impl Time {
    /// The origin.
    pub const ZERO: Time = Time(0);

    /// `ms` milliseconds after the origin. Saturates.
    #[must_use]
    pub const fn from_millis(ms: u64) -> Time {
        Time(ms.saturating_mul(1_000))
    }

    /// Microseconds from `earlier` to `self`; zero if `earlier` is later.
    #[must_use]
    pub const fn since(self, earlier: Time) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<u64> for Time {
    type Output = Time;
    /// `us` microseconds later. Saturates.
    fn add(self, us: u64) -> Time {
        Time(self.0.saturating_add(us))
    }
}

impl Sub<u64> for Time {
    type Output = Time;
    /// `us` microseconds earlier. Saturates at the origin.
    fn sub(self, us: u64) -> Time {
        Time(self.0.saturating_sub(us))
    }
}

impl fmt::Debug for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:06}s", self.0 / 1_000_000, self.0 % 1_000_000)
    }
}
