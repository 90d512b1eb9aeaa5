//! The tiers below the device come and go while the device goes on serving: memory that the operator wants back, a store
//! that was not there when the engine started, another store than before.

use super::components::COMPONENTS;
use super::config::{CoreConfig, StateConfig, StoreConfig, WindowConfig, WritePolicy};
use super::core::{Core, CoreError, pool_of};
use super::mirror::Mirrors;
use super::oplog::Op;
use super::storage::Storage;
use crate::base::Tier;
use crate::pool::Capacity;

/// What lies below the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostTier {
    /// Host pool, at least a page.
    pub pages: Capacity,
    /// Host pool of the window component; of no meaning without one.
    pub window: Capacity,
    /// Host pool of the state component; of no meaning without one.
    pub state: Capacity,
    /// See [`CoreConfig::write`].
    pub write: WritePolicy,
    /// See [`CoreConfig::exclusive`].
    pub exclusive: bool,
    /// Whether a store is behind it.
    pub store: Option<StoreConfig>,
}

impl HostTier {
    const NONE: HostTier = HostTier {
        pages: Capacity::Pages(0),
        window: Capacity::Pages(0),
        state: Capacity::Pages(0),
        write: WritePolicy::None,
        exclusive: false,
        store: None,
    };

    /// What a configuration says of it.
    #[must_use]
    pub fn of(config: &CoreConfig) -> HostTier {
        let none = Capacity::Pages(0);
        HostTier {
            pages: config.host,
            window: config.window.map_or(none, |w| w.host),
            state: config.state.map_or(none, |s| s.host),
            write: config.write,
            exclusive: config.exclusive,
            store: config.store,
        }
    }

    fn below(self, config: &CoreConfig) -> CoreConfig {
        CoreConfig {
            host: self.pages,
            window: config.window.map(|w| WindowConfig { host: self.window, ..w }),
            state: config.state.map(|s| StateConfig { host: self.state, ..s }),
            write: self.write,
            exclusive: self.exclusive,
            store: self.store,
            ..*config
        }
    }
}

impl Core {
    /// Takes the host tier away, and with it the store tier. What is on the device stays and is served; what is only on the
    /// host is forgotten. Returns what there was, for [`attach_host`](Core::attach_host). O(nodes).
    ///
    /// # Errors
    /// An operation is in flight, or a request holds what is only on the host (it matched it and has not loaded it).
    /// Nothing changes.
    pub fn detach_host(&mut self) -> Result<HostTier, CoreError> {
        self.record(|| Op::DetachHost);
        self.refuse_operations()?;
        let mut pages = Vec::new();
        self.tree.detach_host(&mut pages)?;
        self.free_host(&pages);
        self.settle_components();
        let pools = COMPONENTS.map(|c| self.components.pool(c, Tier::Host));
        let leaks = pools.into_iter().flatten().chain([&self.host]).any(|p| p.free_pages() != p.capacity());
        if leaks {
            self.violation("a host page is owned by nothing in the tree");
        }
        let was = HostTier::of(&self.config);
        self.set_below(HostTier::NONE)?;
        Ok(was)
    }

    /// Gives a cache without a host tier one, with a store behind it or without. Copies start by the policy as nodes are
    /// used. The adaptive eviction keeps the scale of the sizes that the core was made with. O(pages of the pools), and
    /// with a store O(tokens of the tree) the first time, for the hashes.
    ///
    /// # Errors
    /// There is a host tier, or the whole makes a configuration that [`CoreConfig::validate`] refuses. Nothing changes.
    pub fn attach_host(&mut self, tier: HostTier) -> Result<(), CoreError> {
        self.record(|| Op::AttachHost(tier));
        if self.config.host != Capacity::Pages(0) {
            return Err(CoreError::HostPresent);
        }
        self.set_below(tier)
    }

    /// The store behind the host is another one from now on, or the first: nothing counts as stored, and what the host
    /// holds is queued to be written. O(nodes), and the first time O(tokens of the tree) for their hashes.
    ///
    /// # Errors
    /// A call of the store before is in flight, or there is no host tier. Nothing changes.
    pub fn new_store(&mut self, store: StoreConfig) -> Result<(), CoreError> {
        self.record(|| Op::NewStore(store));
        let config = self.check_new_store(store)?;
        self.config = config;
        let tree = config.tree_config();
        self.tree.set_write_threshold(tree.write_threshold, tree.hits_counted);
        self.tree.set_hashing();
        self.storage = Storage::default();
        self.tree.forget_stored()?;
        let mut ends = Vec::new();
        self.tree.host_ends(&mut ends);
        ends.into_iter().for_each(|end| self.store_node(end));
        Ok(())
    }

    /// Whether [`new_store`](Core::new_store) would be refused; what the configuration would be.
    pub(crate) fn check_new_store(&self, store: StoreConfig) -> Result<CoreConfig, CoreError> {
        let operations = self.prefetches.len() + self.storage.writes_in_flight();
        if operations > 0 {
            return Err(CoreError::InUse { requests: self.requests(), operations });
        }
        let config = CoreConfig { store: Some(store), ..self.config };
        config.validate()?;
        Ok(config)
    }

    fn refuse_operations(&self) -> Result<(), CoreError> {
        match self.operations() {
            0 => Ok(()),
            operations => Err(CoreError::InUse { requests: self.requests(), operations }),
        }
    }

    /// Swaps the empty lower tiers for others, empty too.
    fn set_below(&mut self, tier: HostTier) -> Result<(), CoreError> {
        let config = tier.below(&self.config);
        config.validate()?;
        let tree = config.tree_config();
        self.tree.set_rule(tree.rule)?;
        self.tree.set_write_threshold(tree.write_threshold, tree.hits_counted);
        if tree.hashing {
            self.tree.set_hashing();
        }
        self.host = pool_of(config.host);
        self.components.renew_host(&config);
        (self.storage, self.mirrors) = (Storage::default(), Mirrors::default());
        self.backups.forget_due();
        self.config = config;
        self.ahead_due = true;
        Ok(())
    }
}
