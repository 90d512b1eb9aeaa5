//! Memory of a wrapper, of the kind that the wrapped store can address, registered there as long as it lives.

use std::sync::{Arc, Mutex};

use super::batch::{Outcome, Span};
use super::gate::locked;
use super::regions::{HeldSpans, RegionToken, Regions};
use super::{ArenaNeed, Store};
use crate::backend::region::{Mapping, Region, Sharing};

/// Stages kept for the next call.
const SPARE_MAX: usize = 4;

/// One block of memory.
#[derive(Debug)]
pub(super) struct Stage<S: Store> {
    inner: Arc<S>,
    token: RegionToken,
    bytes: usize,
    own: Regions,
    own_token: RegionToken,
}

impl<S: Store> Stage<S> {
    /// A range as the wrapped store is told of it.
    pub(super) fn span(&self, offset: usize, len: usize) -> Span {
        Span { region: self.token, offset, len }
    }

    /// The same range to read and write here.
    pub(super) fn held(&self, offset: usize, len: usize) -> Result<HeldSpans, Outcome> {
        self.own.resolve(&[Span { region: self.own_token, offset, len }])
    }
}

impl<S: Store> Drop for Stage<S> {
    fn drop(&mut self) {
        // A store that was closed has forgotten it already.
        let _ = self.inner.unregister(self.token);
    }
}

/// Stages of one wrapper.
#[derive(Debug)]
pub(super) struct Stages<S: Store> {
    inner: Arc<S>,
    spare: Mutex<Vec<Stage<S>>>,
}

impl<S: Store> Stages<S> {
    pub(super) fn new(inner: Arc<S>) -> Stages<S> {
        Stages { inner, spare: Mutex::default() }
    }

    /// At least so many bytes; `Busy` if there is no memory or the store does not take it.
    pub(super) fn take(&self, bytes: usize) -> Result<Stage<S>, Outcome> {
        let found = {
            let mut spare = locked(&self.spare);
            let at = spare.iter().position(|s| s.bytes >= bytes);
            at.map(|i| spare.swap_remove(i))
        };
        if let Some(stage) = found {
            return Ok(stage);
        }
        let sharing = match self.inner.caps().arena {
            ArenaNeed::SharedFd => Sharing::Shared,
            ArenaNeed::AnyMemory | ArenaNeed::BackendAllocated => Sharing::Private,
        };
        let mapping = Mapping { sharing, ..Mapping::default() };
        let region = Region::map(bytes.next_power_of_two().max(4096), mapping).map_err(|_| Outcome::Busy)?;
        let region = Arc::new(region);
        let token = self.inner.register(&region).map_err(|_| Outcome::Busy)?;
        let own = Regions::default();
        let own_token = own.register(&region);
        Ok(Stage { inner: Arc::clone(&self.inner), token, bytes: region.len(), own, own_token })
    }

    /// For the next call.
    pub(super) fn give_back(&self, stage: Stage<S>) {
        let mut spare = locked(&self.spare);
        if spare.len() < SPARE_MAX {
            spare.push(stage);
        }
    }

    /// Lets go of what waits for the next call.
    pub(super) fn clear(&self) {
        locked(&self.spare).clear();
    }
}
