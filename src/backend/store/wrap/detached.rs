//! Bounded calls to a store that may hang: the inner call runs on a thread of its own, in memory of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crossbeam_channel::RecvTimeoutError;
use smallvec::SmallVec;

use crate::backend::identity::{NamespaceDigest, StoreKey};
use crate::backend::region::Region;
use crate::backend::store::batch::{Call, Item, Outcome};
use crate::backend::store::regions::{HeldSpans, RegionToken, Regions, RegisterError};
use crate::backend::store::stage::{Stage, Stages};
use crate::backend::store::stats::{Counters, Health, OpKind, StoreStats};
use crate::backend::store::{Caps, Store, StoreEpoch, StoreError, TransportCause};

/// Returns from every call by its deadline, whatever the inner store does.
///
/// A time-out is not the end of a transfer, so the caller's memory is never lent to the inner store: data
/// passes through memory of the wrapper, which a hanging call keeps until it ends. That costs one copy per
/// byte. At most `calls_max` inner calls run or hang at a time; beyond that, items end as `Busy`.
#[derive(Debug)]
pub struct Detached<S: Store> {
    inner: Arc<S>,
    budget: Duration,
    calls_max: usize,
    calls: Arc<AtomicUsize>,
    regions: Regions,
    stages: Stages<S>,
    counters: Counters,
    abandoned: AtomicU64,
    closed: std::sync::atomic::AtomicBool,
}

/// Counts an inner call while it runs, also if it panics.
struct Running(Arc<AtomicUsize>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

impl<S: Store + 'static> Detached<S> {
    /// Calls without a deadline get `budget`.
    #[must_use]
    pub fn new(inner: S, budget: Duration, calls_max: usize) -> Detached<S> {
        let inner = Arc::new(inner);
        Detached {
            stages: Stages::new(Arc::clone(&inner)),
            inner,
            budget,
            calls_max: calls_max.max(1),
            calls: Arc::default(),
            regions: Regions::default(),
            counters: Counters::default(),
            abandoned: AtomicU64::new(0),
            closed: std::sync::atomic::AtomicBool::new(false),
        }
    }

    /// The wrapped store.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    /// Inner calls that run or hang now.
    pub fn calls_running(&self) -> usize {
        self.calls.load(Relaxed)
    }

    /// Calls that were left to themselves at their deadline.
    pub fn abandoned_total(&self) -> u64 {
        self.abandoned.load(Relaxed)
    }

    /// Runs `work` on its own thread and waits for it until the deadline.
    fn bounded<R: Send + 'static>(
        &self,
        call: &Call,
        work: impl FnOnce(&S, &Call) -> R + Send + 'static,
    ) -> Result<R, Outcome> {
        if self.closed.load(Relaxed) {
            return Err(Outcome::Closed);
        }
        if let Some(stopped) = call.stopped() {
            return Err(stopped);
        }
        if self.calls.fetch_add(1, Relaxed) >= self.calls_max {
            self.calls.fetch_sub(1, Relaxed);
            return Err(Outcome::Busy);
        }
        let running = Running(Arc::clone(&self.calls));
        let deadline = call.deadline.or_else(|| Instant::now().checked_add(self.budget));
        let inner_call = Call { deadline, cancel: call.cancel.clone() };
        let (tx, rx) = crossbeam_channel::bounded(1);
        let inner = Arc::clone(&self.inner);
        let spawned = std::thread::Builder::new().name("store-detached".into()).spawn(move || {
            let answer = work(&inner, &inner_call);
            drop(running);
            // Nobody waits any more: the answer is of no use.
            let _ = tx.send(answer);
        });
        if spawned.is_err() {
            return Err(Outcome::Busy);
        }
        let answer = match deadline {
            Some(at) => rx.recv_deadline(at),
            None => rx.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        answer.map_err(|e| match e {
            RecvTimeoutError::Timeout => {
                self.abandoned.fetch_add(1, Relaxed);
                Outcome::Timeout
            }
            // The inner store panicked.
            RecvTimeoutError::Disconnected => Outcome::Transport(TransportCause::Protocol),
        })
    }

    fn counted(&self, op: OpKind, out: Vec<Outcome>) -> Vec<Outcome> {
        self.counters.count(op, &out);
        out
    }

    /// Plans where the items lie in the stage. An item whose own memory is lost has no place.
    fn lay_out(&self, items: &[Item], stage: &Stage<S>) -> Layout {
        let mut at = 0;
        let mut layout = Layout { items: Vec::new(), memory: Vec::new(), which: Vec::new() };
        for (i, item) in items.iter().enumerate() {
            if let Ok(memory) = self.regions.resolve(&item.spans) {
                let span = stage.span(at, memory.len());
                at += memory.len();
                layout.items.push(Item { spans: SmallVec::from_buf([span]), ..item.clone() });
                layout.memory.push(memory);
                layout.which.push(i);
            }
        }
        layout
    }

    /// Takes a batch through a stage: bytes to put are copied in before, bytes got are copied out after, on
    /// the caller's thread and only if the call has ended.
    fn through(
        &self,
        op: OpKind,
        items: &[Item],
        call: &Call,
        run: fn(&S, &[Item], &Call) -> Vec<Outcome>,
    ) -> Vec<Outcome> {
        let mut out = vec![Outcome::AddressLost; items.len()];
        if items.is_empty() {
            return out;
        }
        let total = items.iter().fold(0usize, |n, i| n.saturating_add(i.len()));
        let stage = match self.stages.take(total) {
            Ok(stage) => stage,
            Err(why) => {
                return vec![if self.closed.load(Relaxed) { Outcome::Closed } else { why }; items.len()];
            }
        };
        let Layout { items: inner_items, memory, which } = self.lay_out(items, &stage);
        let Ok(held) = stage.held(0, total) else { return out };
        if op == OpKind::Put {
            for (user, item) in memory.iter().zip(&inner_items) {
                user.runs().fold(place_of(item), |at, run| {
                    held.fill(at, run);
                    at + run.len()
                });
            }
        }
        let answer = self.bounded(call, move |inner, call| {
            let out = run(inner, &inner_items, call);
            (out, inner_items, stage)
        });
        match answer {
            Ok((answers, inner_items, stage)) => {
                for ((&i, &outcome), (user, item)) in
                    which.iter().zip(&answers).zip(memory.iter().zip(&inner_items))
                {
                    out[i] = outcome;
                    if op == OpKind::Get && outcome.is_ok() {
                        held.copy_to(place_of(item), user);
                    }
                }
                if !self.closed.load(Relaxed) {
                    self.stages.give_back(stage);
                }
            }
            Err(why) => which.iter().for_each(|&i| out[i] = why),
        }
        out
    }

    fn keys(
        &self,
        keys: &[StoreKey],
        call: &Call,
        run: fn(&S, &[StoreKey], &Call) -> Vec<Outcome>,
    ) -> Vec<Outcome> {
        if keys.is_empty() {
            return vec![];
        }
        let owned = keys.to_vec();
        self.bounded(call, move |inner, call| run(inner, &owned, call))
            .unwrap_or_else(|why| vec![why; keys.len()])
    }
}

struct Layout {
    items: Vec<Item>,
    memory: Vec<HeldSpans>,
    which: Vec<usize>,
}

/// Where an item of [`Layout`] lies in the stage.
fn place_of(item: &Item) -> usize {
    item.spans.first().map_or(0, |s| s.offset)
}

fn error_of(why: Outcome) -> StoreError {
    match why {
        Outcome::Timeout => StoreError::Timeout,
        Outcome::Cancelled => StoreError::Cancelled,
        Outcome::Closed => StoreError::Closed,
        _ => StoreError::Busy,
    }
}

impl<S: Store + 'static> Store for Detached<S> {
    fn caps(&self) -> Caps {
        Caps { zero_copy: false, align: 1, ..self.inner.caps() }
    }

    fn register(&self, region: &Arc<Region>) -> Result<RegionToken, RegisterError> {
        if self.closed.load(Relaxed) {
            return Err(RegisterError::Closed);
        }
        Ok(self.regions.register(region))
    }

    fn unregister(&self, token: RegionToken) -> Result<(), RegisterError> {
        self.regions.unregister(token)
    }

    fn query(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
        let out = self.keys(keys, call, |inner, keys, call| inner.query(keys, call));
        self.counted(OpKind::Query, out)
    }

    fn touch(&self, keys: &[StoreKey], call: &Call) {
        self.keys(keys, call, |inner, keys, call| {
            inner.touch(keys, call);
            vec![Outcome::Missing; keys.len()]
        });
    }

    fn get(&self, items: &[Item], call: &Call) -> Vec<Outcome> {
        let out = self.through(OpKind::Get, items, call, |inner, items, call| inner.get(items, call));
        self.counted(OpKind::Get, out)
    }

    fn put(&self, items: &[Item], call: &Call) -> Vec<Outcome> {
        let out = self.through(OpKind::Put, items, call, |inner, items, call| inner.put(items, call));
        self.counted(OpKind::Put, out)
    }

    fn remove(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
        let out = self.keys(keys, call, |inner, keys, call| inner.remove(keys, call));
        self.counted(OpKind::Remove, out)
    }

    fn clear(&self, namespace: NamespaceDigest, call: &Call) -> Result<u64, StoreError> {
        self.bounded(call, move |inner, call| inner.clear(namespace, call)).map_err(error_of)?
    }

    fn sync(&self, call: &Call) -> Result<(), StoreError> {
        self.bounded(call, |inner, call| inner.sync(call)).map_err(error_of)?
    }

    fn health(&self) -> Health {
        let hanging = self.calls.load(Relaxed) >= self.calls_max;
        if hanging { Health::Down } else { self.inner.health() }
    }

    /// Gauges of the inner store, outcomes as the callers here saw them.
    fn stats(&self) -> StoreStats {
        let inner = self.inner.stats();
        StoreStats {
            objects: inner.objects,
            bytes: inner.bytes,
            bytes_max: inner.bytes_max,
            put_present_total: inner.put_present_total,
            evicted_total: inner.evicted_total,
            removed_total: inner.removed_total,
            ..self.counters.snapshot()
        }
    }

    fn epoch(&self) -> StoreEpoch {
        self.inner.epoch()
    }

    fn close(&self, deadline: Instant) -> Result<(), StoreError> {
        self.closed.store(true, Relaxed);
        self.regions.clear();
        self.stages.clear();
        // The inner store waits for its calls at most so long; its own thread, in case it does not.
        let (tx, rx) = crossbeam_channel::bounded(1);
        let inner = Arc::clone(&self.inner);
        let closer = std::thread::Builder::new().name("store-close".into());
        let spawned = closer.spawn(move || tx.send(inner.close(deadline)).is_ok());
        if spawned.is_err() {
            return Err(StoreError::Busy);
        }
        rx.recv_deadline(deadline).unwrap_or(Err(StoreError::Timeout))
    }
}
