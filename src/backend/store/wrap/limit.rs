//! Bounds the bytes per second, so that a store tier does not take the disk or the network from others.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::{Around, Down, Passing};
use crate::backend::store::batch::{Call, Outcome};
use crate::backend::store::clock::{Clock, SystemClock};
use crate::backend::store::gate::locked;
use crate::backend::store::stats::OpKind;

/// A rate, as the time at which everything taken so far is paid for.
#[derive(Debug)]
struct Meter {
    bytes_per_s: u64,
    paid_at: Mutex<Option<Instant>>,
}

impl Meter {
    /// Takes `bytes` and says how long to wait for them; `None` if that is longer than `patience`.
    fn take(
        &self,
        bytes: u64,
        burst: Duration,
        patience: Option<Duration>,
        now: Instant,
    ) -> Option<Duration> {
        if self.bytes_per_s == 0 {
            return Some(Duration::ZERO);
        }
        let mut paid_at = locked(&self.paid_at);
        // Time not used is credit, up to the burst.
        let from = paid_at.map_or(now, |at| at.max(now.checked_sub(burst).unwrap_or(at)));
        let wait = from.saturating_duration_since(now);
        if patience.is_some_and(|p| wait >= p && !wait.is_zero()) {
            return None;
        }
        let cost_us = u128::from(bytes) * 1_000_000 / u128::from(self.bytes_per_s);
        *paid_at = Some(from + Duration::from_micros(u64::try_from(cost_us).unwrap_or(u64::MAX / 2)));
        Some(wait)
    }
}

/// Bounds the payload bytes per second of gets and of puts. A call waits for its turn; if its deadline comes
/// first, its items end as `Busy` and cost nothing.
#[derive(Debug)]
pub struct Limit {
    get: Meter,
    put: Meter,
    burst: Duration,
    clock: Arc<dyn Clock>,
    busy: AtomicU64,
}

impl Limit {
    /// Bytes per second of gets and puts, 0 being no limit; credit for up to `burst` of idle time.
    #[must_use]
    pub fn new(get_bytes_per_s: u64, put_bytes_per_s: u64, burst: Duration) -> Limit {
        Limit::with_clock(get_bytes_per_s, put_bytes_per_s, burst, Arc::new(SystemClock))
    }

    /// The same with another clock.
    #[must_use]
    pub fn with_clock(get: u64, put: u64, burst: Duration, clock: Arc<dyn Clock>) -> Limit {
        let meter = |bytes_per_s| Meter { bytes_per_s, paid_at: Mutex::new(None) };
        Limit { get: meter(get), put: meter(put), burst, clock, busy: AtomicU64::new(0) }
    }

    /// Waits, unless the call is stopped meanwhile. A flag has no bell, so it is looked at now and then.
    fn wait(&self, mut wait: Duration, call: &Call) -> Option<Outcome> {
        const LOOK: Duration = Duration::from_millis(50);
        while !wait.is_zero() {
            if let Some(stopped) = call.stopped() {
                return Some(stopped);
            }
            let now = wait.min(LOOK);
            self.clock.sleep(now);
            wait -= now;
        }
        None
    }
}

impl Around for Limit {
    fn batch(&self, batch: &Passing<'_>, down: &mut Down<'_>) -> Vec<Outcome> {
        let meter = match batch.op {
            OpKind::Get => &self.get,
            OpKind::Put => &self.put,
            OpKind::Query | OpKind::Remove => return down(&batch.every(), batch.call),
        };
        if let Some(stopped) = batch.call.stopped() {
            return batch.all(stopped);
        }
        let bytes = batch.bytes.iter().fold(0u64, |n, &b| n.saturating_add(b as u64));
        match meter.take(bytes, self.burst, batch.call.left(), self.clock.now()) {
            Some(wait) => match self.wait(wait, batch.call) {
                None => down(&batch.every(), batch.call),
                Some(stopped) => batch.all(stopped),
            },
            None => {
                self.busy.fetch_add(batch.bytes.len() as u64, Relaxed);
                batch.all(Outcome::Busy)
            }
        }
    }

    fn busy_total(&self) -> u64 {
        self.busy.load(Relaxed)
    }
}
