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
    /// Calls pass; so many have failed in a row, and so long was waited in vain since the last answer.
    Closed { failures: u32, vain: Duration },
    /// Calls are refused until then.
    Open { until: Instant },
    /// One call is on its way to find out; the others are refused.
    Probing,
}

const WELL: State = State::Closed { failures: 0, vain: Duration::ZERO };

/// What a call has told about the store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Told {
    /// It answers.
    Well,
    /// It fails.
    Failed,
    /// No answer in the time that the caller had.
    Silent(Duration),
}

/// A circuit breaker: after some failed calls in a row, calls end as `Busy` at once; after a pause, one call
/// is let through, and its success closes the breaker again.
///
/// A call fails if an item ends as `Transport`, or if the store has answered for no item within its *patience*. A miss,
/// a full store or a caller's mistake is an answer like another. A caller who gave it less time than that, or who
/// cancelled, has learned nothing about the store, and nor has the breaker; but the time that such callers waited adds
/// up until somebody gets an answer, so that a store that is dead to hurried callers is found out too.
#[derive(Debug)]
pub struct Breaker {
    failures_max: u32,
    pause: Duration,
    patience: Duration,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
    busy: AtomicU64,
}

/// Longer than any healthy store takes for a batch.
const PATIENCE: Duration = Duration::from_secs(1);

impl Breaker {
    /// Opens after `failures_max` (0 is 1) failed calls in a row, probes after `pause`. Patience is a second.
    #[must_use]
    pub fn new(failures_max: u32, pause: Duration) -> Breaker {
        Breaker::with_clock(failures_max, pause, Arc::new(SystemClock))
    }

    /// The same with another clock.
    #[must_use]
    pub fn with_clock(failures_max: u32, pause: Duration, clock: Arc<dyn Clock>) -> Breaker {
        let (failures_max, state) = (failures_max.max(1), Mutex::new(WELL));
        Breaker { failures_max, pause, patience: PATIENCE, clock, state, busy: AtomicU64::new(0) }
    }

    /// The same with another patience: how long a call without any answer is not yet a failure.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Breaker {
        Breaker { patience, ..self }
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

    fn learn(&self, told: Told) {
        let mut state = locked(&self.state);
        let (failures, vain) = match (*state, told) {
            (_, Told::Well) => (0, Duration::ZERO),
            (State::Closed { failures, vain }, Told::Silent(waited)) => match vain.saturating_add(waited) {
                vain if vain < self.patience => (failures, vain),
                _ => (failures.saturating_add(1), Duration::ZERO),
            },
            (State::Closed { failures, .. }, Told::Failed) => (failures.saturating_add(1), Duration::ZERO),
            // The probe has found nothing out; the next call probes.
            (State::Probing, Told::Silent(waited)) if waited < self.patience => {
                *state = State::Open { until: self.clock.now() };
                return;
            }
            (State::Open { .. }, Told::Silent(_)) => return,
            // The probe failed, or a call that began before the breaker opened.
            (State::Open { .. } | State::Probing, _) => (self.failures_max, Duration::ZERO),
        };
        *state = if failures >= self.failures_max {
            tracing::warn!(pause = ?self.pause, "store breaker open");
            State::Open { until: self.clock.now() + self.pause }
        } else {
            State::Closed { failures, vain }
        };
    }
}

/// What a batch has told, after so long.
fn told(out: &[Outcome], waited: Duration) -> Told {
    let answered = |o: &Outcome| o.is_ok() || o.is_miss() || *o == Outcome::NoSpace;
    if out.iter().any(|o| matches!(o, Outcome::Transport(_))) {
        Told::Failed
    } else if out.iter().any(answered) {
        Told::Well
    } else {
        // A flag that was set, or a store that sheds load, does not make the wait one in vain.
        let timed_out = out.contains(&Outcome::Timeout);
        Told::Silent(if timed_out { waited } else { Duration::ZERO })
    }
}

/// A probe that panics on its way must not leave the breaker waiting for its answer.
struct Answer<'a> {
    breaker: &'a Breaker,
    told: Told,
}

impl Drop for Answer<'_> {
    fn drop(&mut self) {
        self.breaker.learn(self.told);
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
        let mut answer = Answer { breaker: self, told: Told::Failed };
        let start = self.clock.now();
        let out = down(&batch.every(), batch.call);
        answer.told = told(&out, self.clock.now().saturating_duration_since(start));
        out
    }

    fn admit(&self, call: &Call) -> Result<Call, StoreError> {
        if self.may_pass() { Ok(call.clone()) } else { Err(StoreError::Busy) }
    }

    fn ended(&self, error: Option<&StoreError>) {
        self.learn(match error {
            None | Some(StoreError::Unsupported { .. }) => Told::Well,
            Some(StoreError::Io { .. } | StoreError::Remote { .. }) => Told::Failed,
            // The caller's limits, or nobody was asked.
            Some(StoreError::Timeout | StoreError::Cancelled | StoreError::Busy | StoreError::Closed) => {
                Told::Silent(Duration::ZERO)
            }
        });
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
