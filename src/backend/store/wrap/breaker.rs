//! Stops calling a store that fails.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::{Around, Down, Passing};
use crate::backend::store::StoreError;
use crate::backend::store::batch::{Call, Outcome};
use crate::backend::store::clock::{Clock, SystemClock};
use crate::backend::store::gate::locked;
use crate::backend::store::stats::Health;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Calls pass; so many have failed in a row.
    Closed { failures: u32 },
    /// Calls are refused until then.
    Open { until: Instant },
    /// One call is on its way to find out; the others are refused.
    Probing,
}

/// A circuit breaker: after some failed calls in a row, calls end as `Busy` at once; after a pause, one call
/// is let through, and its success closes the breaker again.
///
/// A call fails if an item ends as `Transport` or `Timeout`. A miss, a full store or a caller's mistake says
/// nothing about the store.
#[derive(Debug)]
pub struct Breaker {
    failures_max: u32,
    pause: Duration,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
    busy: AtomicU64,
}

impl Breaker {
    /// Opens after `failures_max` (0 is 1) failed calls in a row, probes after `pause`.
    #[must_use]
    pub fn new(failures_max: u32, pause: Duration) -> Breaker {
        Breaker::with_clock(failures_max, pause, Arc::new(SystemClock))
    }

    /// The same with another clock.
    #[must_use]
    pub fn with_clock(failures_max: u32, pause: Duration, clock: Arc<dyn Clock>) -> Breaker {
        let state = Mutex::new(State::Closed { failures: 0 });
        Breaker { failures_max: failures_max.max(1), pause, clock, state, busy: AtomicU64::new(0) }
    }

    /// Whether a call may pass.
    fn may_pass(&self) -> bool {
        let mut state = locked(&self.state);
        match *state {
            State::Closed { .. } => true,
            State::Open { until } if self.clock.now() >= until => {
                *state = State::Probing;
                true
            }
            State::Open { .. } | State::Probing => false,
        }
    }

    fn learn(&self, failed: bool) {
        let mut state = locked(&self.state);
        let failures = match *state {
            _ if !failed => {
                *state = State::Closed { failures: 0 };
                return;
            }
            State::Closed { failures } => failures.saturating_add(1),
            // The probe failed, or a call that began before the breaker opened.
            State::Open { .. } | State::Probing => self.failures_max,
        };
        *state = if failures >= self.failures_max {
            tracing::warn!(pause = ?self.pause, "store breaker open");
            State::Open { until: self.clock.now() + self.pause }
        } else {
            State::Closed { failures }
        };
    }
}

/// A probe that panics on its way must not leave the breaker waiting for its answer.
struct Answer<'a> {
    breaker: &'a Breaker,
    failed: bool,
}

impl Drop for Answer<'_> {
    fn drop(&mut self) {
        self.breaker.learn(self.failed);
    }
}

impl Around for Breaker {
    fn batch(&self, batch: &Passing<'_>, down: &mut Down<'_>) -> Vec<Outcome> {
        // A caller who is too late learns nothing about the store, nor does the breaker.
        if let Some(stopped) = batch.call.stopped() {
            return batch.all(stopped);
        }
        if !self.may_pass() {
            self.busy.fetch_add(batch.bytes.len() as u64, Relaxed);
            return batch.all(Outcome::Busy);
        }
        let mut answer = Answer { breaker: self, failed: true };
        let out = down(&batch.every(), batch.call);
        answer.failed = out.iter().any(|o| o.is_store_failure());
        out
    }

    fn admit(&self, call: &Call) -> Result<Call, StoreError> {
        if self.may_pass() { Ok(call.clone()) } else { Err(StoreError::Busy) }
    }

    fn ended(&self, failed: bool) {
        self.learn(failed);
    }

    fn health(&self, inner: Health) -> Health {
        match (*locked(&self.state), inner) {
            (_, Health::Closed) => Health::Closed,
            (State::Closed { .. }, inner) => inner,
            (State::Open { .. } | State::Probing, _) => Health::Down,
        }
    }

    fn busy_total(&self) -> u64 {
        self.busy.load(Relaxed)
    }
}
