//! The store of a living cache: taken away, given back, and asked under other names when the weights change.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::registration::RegistrationError;
use super::{CacheError, PrefixCache};
use crate::backend::store::Store;
use crate::tiers::CoreError;

/// Why the weights can not be changed now.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NewWeightsError {
    /// Requests are alive or operations do not end ([`CoreError::InUse`]), or the ranks can not go on together. The cache is
    /// as it was.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The store did not take the memory again. Device and host have been emptied; the cache has no store.
    #[error(transparent)]
    Registration(#[from] RegistrationError),
}

impl PrefixCache {
    /// Takes the store away: its calls are told to end, what they brought is taken in, and the store lets go of the
    /// memory. From then on the store tier answers nothing. `Ok(None)` if a call did not end within `wait_max` (it
    /// can be tried again) or if there is no store.
    pub fn detach_store(&mut self, wait_max: Duration) -> Result<Option<Arc<dyn Store>>, CacheError> {
        let store = self.executor.detach_store(Instant::now() + wait_max);
        self.take_events(self.now)?;
        Ok(store)
    }

    /// Gives the cache a store again, or another one. The whole registration runs anew; a store that can not
    /// address the memory of the host tier is refused. `Ok(false)` if there is one already. A cache that was built
    /// without a store keeps no hashes and can not be given one.
    pub fn attach_store(&mut self, store: Arc<dyn Store>) -> Result<bool, RegistrationError> {
        if self.core.config().store.is_none() {
            return Ok(false);
        }
        self.executor.attach_store(store, &self.arena)
    }

    /// Tells that the weights have changed in place: nothing that was computed before is found any more, on the device, on
    /// the host, or in the store, which keeps it under the names of the old epoch. Waits up to `wait_max` for what is in
    /// flight; a store write of the old weights that ends meanwhile goes under their name. Not to be called where the
    /// weights are the same (after a sleep): everything stays valid. With several ranks, all call it at the same place.
    ///
    /// # Errors
    /// See [`NewWeightsError`].
    pub fn set_weights_epoch(&mut self, epoch: u64, wait_max: Duration) -> Result<(), NewWeightsError> {
        self.take_drops();
        let requests = self.core.requests();
        let in_use = |operations| NewWeightsError::Cache(CoreError::InUse { requests, operations }.into());
        if requests > 0 {
            return Err(in_use(self.core.operations()));
        }
        let until = Instant::now() + wait_max;
        let had_store = self.executor.lane().is_some();
        let store = self.executor.detach_store(until);
        let emptied = match had_store && store.is_none() {
            true => Err(in_use(self.core.operations())),
            false => self.empty(until).map_err(NewWeightsError::Cache),
        };
        if emptied.is_ok() {
            self.executor.set_weights_epoch(epoch);
            self.touched.clear();
        }
        if let Some(store) = store {
            self.executor.attach_store(store, &self.arena)?;
        }
        emptied
    }

    /// Lets what is in flight end, then forgets everything.
    fn empty(&mut self, until: Instant) -> Result<(), CacheError> {
        let mut now = self.now;
        while self.core.operations() > 0 && Instant::now() < until {
            self.tick(now)?;
            if self.core.operations() > 0 {
                // Modelled ends are waited for in their own time, real ones in ours.
                now = self.next_due().unwrap_or(now).max(now);
                self.executor.wait_a_moment();
            }
        }
        self.core.reset()?;
        self.run_actions(self.now);
        Ok(())
    }
}
