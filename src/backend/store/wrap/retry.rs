//! Tries again what may succeed.

use std::sync::Arc;
use std::time::Duration;

use super::{Around, Down, Passing};
use crate::backend::store::batch::Outcome;
use crate::backend::store::clock::{Clock, SystemClock};

/// Repeats the items of a batch that ended as `Busy` or `Transport`, and only those, with pauses that double.
/// All operations can be repeated: a key names its content.
#[derive(Clone, Debug)]
pub struct Retry {
    attempts: u32,
    pause: Duration,
    clock: Arc<dyn Clock>,
}

impl Retry {
    /// At most `attempts` in all (0 is 1), the first pause being `pause`.
    #[must_use]
    pub fn new(attempts: u32, pause: Duration) -> Retry {
        Retry::with_clock(attempts, pause, Arc::new(SystemClock))
    }

    /// The same with another clock.
    #[must_use]
    pub fn with_clock(attempts: u32, pause: Duration, clock: Arc<dyn Clock>) -> Retry {
        Retry { attempts, pause, clock }
    }
}

impl Around for Retry {
    fn batch(&self, batch: &Passing<'_>, down: &mut Down<'_>) -> Vec<Outcome> {
        let mut which = batch.every();
        let mut out = down(&which, batch.call);
        let mut pause = self.pause;
        for _ in 1..self.attempts {
            which.retain(|&i| out.get(i).is_some_and(|o| o.is_transient()));
            let in_time = batch.call.left().is_none_or(|left| left > pause);
            if which.is_empty() || batch.call.stopped().is_some() || !in_time {
                break;
            }
            self.clock.sleep(pause);
            pause = pause.saturating_mul(2);
            for (&i, outcome) in which.iter().zip(down(&which, batch.call)) {
                out[i] = outcome;
            }
        }
        out
    }
}
