//! Wrappers that compose: each is a store around a store.
//!
//! ```text
//! Breaker::new(8, 5 s) around Retry::new(3, 10 ms) around Limit::new(..) around a backend
//! ```
//! What a wrapper does to a batch is an [`Around`]; [`Wrapped`] makes it a [`Store`]. The order is the
//! operator's choice, with one rule of thumb: what shall count as one call for the breaker goes inside it.
//! [`Detached`] stands apart, because it has memory of its own.

use std::sync::Arc;
use std::time::Instant;

mod breaker;
mod deadline;
mod detached;
mod limit;
mod retry;

pub use breaker::Breaker;
pub use deadline::Deadlines;
pub use detached::Detached;
pub use limit::Limit;
pub use retry::Retry;

use super::batch::{Call, Item, Outcome};
use super::regions::{RegionToken, RegisterError};
use super::stats::{Health, OpKind, StoreStats};
use super::{Caps, Store, StoreEpoch, StoreError, TransportCause};
use crate::backend::identity::{NamespaceDigest, StoreKey};
use crate::backend::region::Region;

/// A batch on its way down.
#[derive(Clone, Copy, Debug)]
pub struct Passing<'a> {
    /// Operation.
    pub op: OpKind,
    /// Payload bytes of each item; 0 for operations on keys.
    pub bytes: &'a [usize],
    /// Limits of the caller.
    pub call: &'a Call,
}

impl Passing<'_> {
    /// The same outcome for every item.
    #[must_use]
    pub fn all(&self, outcome: Outcome) -> Vec<Outcome> {
        vec![outcome; self.bytes.len()]
    }

    /// The numbers of all items.
    #[must_use]
    pub fn every(&self) -> Vec<usize> {
        (0..self.bytes.len()).collect()
    }
}

/// Runs the items with these numbers on the wrapped store; outcomes in that order.
pub type Down<'a> = dyn FnMut(&[usize], &Call) -> Vec<Outcome> + 'a;

/// What a wrapper does.
pub trait Around: Send + Sync + std::fmt::Debug {
    /// Takes a batch through, in one call to `down`, several, or none. One outcome per item.
    fn batch(&self, batch: &Passing<'_>, down: &mut Down<'_>) -> Vec<Outcome>;

    /// Lets a call without items pass, perhaps with other limits, or refuses it.
    fn admit(&self, call: &Call) -> Result<Call, StoreError> {
        Ok(call.clone())
    }

    /// Learns how such a call ended: with this error, or well.
    fn ended(&self, _error: Option<&StoreError>) {}

    /// The health to report.
    fn health(&self, inner: Health) -> Health {
        inner
    }

    /// Items that the wrapper itself ended as `Busy`.
    fn busy_total(&self) -> u64 {
        0
    }
}

/// A store in a wrapper.
#[derive(Debug)]
pub struct Wrapped<S, A> {
    inner: S,
    around: A,
}

impl<S: Store, A: Around> Wrapped<S, A> {
    /// Puts `around` around `inner`.
    #[must_use]
    pub fn new(inner: S, around: A) -> Wrapped<S, A> {
        Wrapped { inner, around }
    }

    /// The wrapped store.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    /// The wrapper.
    pub fn around(&self) -> &A {
        &self.around
    }

    fn pass<T: Clone>(
        &self,
        op: OpKind,
        of: &[T],
        call: &Call,
        bytes: impl Fn(&T) -> usize,
        down: impl Fn(&[T], &Call) -> Vec<Outcome>,
    ) -> Vec<Outcome> {
        if of.is_empty() {
            return vec![];
        }
        let bytes: Vec<_> = of.iter().map(bytes).collect();
        let mut down = |which: &[usize], call: &Call| {
            if which.len() == of.len() {
                return down(of, call);
            }
            let some: Vec<T> = which.iter().filter_map(|&i| of.get(i).cloned()).collect();
            down(&some, call)
        };
        let mut out = self.around.batch(&Passing { op, bytes: &bytes, call }, &mut down);
        // A store that answers too little has not said what became of the rest.
        out.resize(of.len(), Outcome::Transport(TransportCause::Protocol));
        out
    }

    fn single<R>(
        &self,
        call: &Call,
        down: impl FnOnce(&Call) -> Result<R, StoreError>,
    ) -> Result<R, StoreError> {
        let result = down(&self.around.admit(call)?);
        self.around.ended(result.as_ref().err());
        result
    }
}

impl<S: Store, A: Around> Store for Wrapped<S, A> {
    fn caps(&self) -> Caps {
        self.inner.caps()
    }

    fn register(&self, region: &Arc<Region>) -> Result<RegionToken, RegisterError> {
        self.inner.register(region)
    }

    fn unregister(&self, token: RegionToken) -> Result<(), RegisterError> {
        self.inner.unregister(token)
    }

    fn query(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
        self.pass(OpKind::Query, keys, call, |_| 0, |keys, call| self.inner.query(keys, call))
    }

    /// Not through the layers: a hint that is lost costs nothing.
    fn touch(&self, keys: &[StoreKey], call: &Call) {
        self.inner.touch(keys, call);
    }

    fn get(&self, items: &[Item], call: &Call) -> Vec<Outcome> {
        self.pass(OpKind::Get, items, call, Item::len, |items, call| self.inner.get(items, call))
    }

    fn put(&self, items: &[Item], call: &Call) -> Vec<Outcome> {
        self.pass(OpKind::Put, items, call, Item::len, |items, call| self.inner.put(items, call))
    }

    fn remove(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
        self.pass(OpKind::Remove, keys, call, |_| 0, |keys, call| self.inner.remove(keys, call))
    }

    fn clear(&self, namespace: NamespaceDigest, call: &Call) -> Result<u64, StoreError> {
        self.single(call, |call| self.inner.clear(namespace, call))
    }

    fn sync(&self, call: &Call) -> Result<(), StoreError> {
        self.single(call, |call| self.inner.sync(call))
    }

    fn health(&self) -> Health {
        self.around.health(self.inner.health())
    }

    fn stats(&self) -> StoreStats {
        let mut stats = self.inner.stats();
        stats.busy_total += self.around.busy_total();
        stats
    }

    fn epoch(&self) -> StoreEpoch {
        self.inner.epoch()
    }

    fn close(&self, deadline: Instant) -> Result<(), StoreError> {
        self.inner.close(deadline)
    }
}
