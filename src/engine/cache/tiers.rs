//! The lower tiers of a living cache: taken away, given back, and asked under other names when the weights change.
//!
//! These calls may wait; no other call of the cache does. With several ranks, all call them at the same place.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::builder::{BuildError, host_arena};
use super::super::registration::RegistrationError;
use super::{CacheError, PrefixCache};
use crate::backend::device::DeviceError;
use crate::backend::store::Store;
use crate::base::Tier;
use crate::pool::{Capacities, Capacity};
use crate::tiers::{CoreError, HostTier};

/// Why the tiers of a living cache could not be changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TierError {
    /// Requests are alive or operations do not end ([`CoreError::InUse`]), what would go is held by a request, there is a
    /// host tier already, or the ranks can not go on together. Device and host are as they were.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The store did not take the memory. What was asked for besides has been done; the cache has no store.
    #[error(transparent)]
    Registration(#[from] RegistrationError),
    /// The memory of the host tier could not be had. The cache has no host tier.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The device did not take the memory of the host tier, or did not let go of it. The cache has no host tier.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl From<CoreError> for TierError {
    fn from(error: CoreError) -> TierError {
        TierError::Cache(error.into())
    }
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

    /// Gives the cache a store. The whole registration runs anew; a store that can not address the memory of the host tier is
    /// refused. What the store has is remembered if it is the one that was taken away last. Another one, or the first, is
    /// taken for empty, and what the host holds is written to it; the first one also costs the names of all that is
    /// cached, O(tokens). `Ok(false)` if there is a store already.
    ///
    /// # Errors
    /// See [`TierError`]; there must be a host tier.
    pub fn attach_store(&mut self, store: Arc<dyn Store>) -> Result<bool, TierError> {
        if self.executor.lane().is_some() {
            return Ok(false);
        }
        self.take_events(self.now)?;
        let is_new = self.core.config().store.is_none() || !self.executor.had_store(&store);
        if is_new {
            self.core.check_new_store(self.store_config)?;
        }
        self.executor.attach_store(store, &self.arena)?;
        if is_new {
            self.core.new_store(self.store_config)?;
            self.touched.clear();
            self.run_actions(self.now);
        }
        Ok(true)
    }

    /// Takes the host tier away, with its memory, and the store with it. What is on the device is served on; what is only on
    /// the host is forgotten. Waits up to `wait_max` for what is in flight. Returns what there was, for
    /// [`attach_host`](Self::attach_host).
    ///
    /// # Errors
    /// Operations do not end, or a request holds what is only on the host; nothing changes then, except that a store is
    /// registered anew.
    pub fn detach_host(
        &mut self,
        wait_max: Duration,
    ) -> Result<(HostTier, Option<Arc<dyn Store>>), TierError> {
        let until = Instant::now() + wait_max;
        let store = self.store_out_of_the_way(until)?;
        let was = match self.come_to_rest(until).and_then(|()| Ok(self.core.detach_host()?)) {
            Ok(was) => was,
            Err(error) => {
                if let Some(store) = store {
                    self.attach_store(store)?;
                }
                return Err(error.into());
            }
        };
        self.run_actions(self.now);
        self.touched.clear();
        self.arena = host_arena(&self.geometry, Capacities::full(Capacity::Pages(0)), &self.memory, None)?;
        self.executor.detach_host()?;
        Ok((was, store))
    }

    /// Gives a cache without a host tier one, and a store behind it if there is one; `tier.store` says only how it is written
    /// to. Its memory comes by the [plan](super::super::Builder::memory) that the cache was built with. Copies start by the policy as nodes are
    /// used.
    ///
    /// # Errors
    /// There is a host tier, or the memory, the device or the store do not go with it.
    pub fn attach_host(&mut self, tier: HostTier, store: Option<Arc<dyn Store>>) -> Result<(), TierError> {
        if self.core.page_counts(Tier::Host).capacity_pages > 0 {
            return Err(CoreError::HostPresent.into());
        }
        let config = *self.core.config();
        let beside = |has: bool, pages| if has { pages } else { Capacity::Pages(0) };
        let sizes = Capacities {
            full: tier.pages,
            window: beside(config.window.is_some(), tier.window),
            state: beside(config.state.is_some(), tier.state),
        };
        let arena = host_arena(&self.geometry, sizes, &self.memory, store.as_ref())?;
        let [pages, window, state] =
            crate::pool::PoolKind::ALL.map(|pool| Capacity::Pages(arena.pages(pool)));
        let written = tier.store.unwrap_or(self.store_config);
        let tier = HostTier { pages, window, state, store: store.is_some().then_some(written), ..tier };
        self.core.attach_host(tier)?;
        if let Err(error) = self.executor.attach_host(&arena) {
            self.core.detach_host()?;
            return Err(error.into());
        }
        self.arena = arena;
        if let Some(store) = store {
            if !self.executor.had_store(&store) {
                self.core.new_store(written)?;
            }
            self.executor.attach_store(store, &self.arena)?;
        }
        Ok(())
    }

    /// Tells that the weights have changed in place: nothing that was computed before is found any more, on the device, on
    /// the host, or in the store, which keeps it under the names of the old epoch. Waits up to `wait_max` for what is in
    /// flight; a store write of the old weights that ends meanwhile goes under their name. Not to be called where the
    /// weights are the same (after a sleep): everything stays valid.
    ///
    /// # Errors
    /// Requests are alive, operations do not end, or the store does not come back.
    pub fn set_weights_epoch(&mut self, epoch: u64, wait_max: Duration) -> Result<(), TierError> {
        self.take_drops();
        let requests = self.core.requests();
        if requests > 0 {
            return Err(CoreError::InUse { requests, operations: self.core.operations() }.into());
        }
        let until = Instant::now() + wait_max;
        let store = self.store_out_of_the_way(until)?;
        let emptied = self.come_to_rest(until).and_then(|()| Ok(self.core.reset()?));
        self.run_actions(self.now);
        if emptied.is_ok() {
            self.executor.set_weights_epoch(epoch);
            self.touched.clear();
        }
        if let Some(store) = store {
            self.executor.attach_store(store, &self.arena)?;
        }
        Ok(emptied?)
    }

    /// Takes the store away, if there is one.
    fn store_out_of_the_way(&mut self, until: Instant) -> Result<Option<Arc<dyn Store>>, TierError> {
        let had_store = self.executor.lane().is_some();
        let store = self.executor.detach_store(until);
        if had_store && store.is_none() {
            let (requests, operations) = (self.core.requests(), self.core.operations());
            return Err(CoreError::InUse { requests, operations }.into());
        }
        Ok(store)
    }

    /// Lets what is in flight end, by `until`.
    fn come_to_rest(&mut self, until: Instant) -> Result<(), CacheError> {
        let mut now = self.now;
        while self.core.operations() > 0 && Instant::now() < until {
            self.tick(now)?;
            if self.core.operations() > 0 {
                // Modelled ends are waited for in their own time, real ones in ours.
                now = self.next_due().unwrap_or(now).max(now);
                self.executor.wait_a_moment();
            }
        }
        Ok(())
    }
}
