//! Putting a cache together.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::cache::{Parts, PrefixCache};
use super::delivery::Delivery;
use super::draft::{DraftPlan, DraftPlanError};
use super::executor::{Bell, Executor};
use super::lane::{LaneConfig, StoreLane};
use super::names::store_plane;
use super::registration::{AloneVotes, RankVotes, Registered, RegistrationError};
use crate::backend::device::{Device, DeviceError};
use crate::backend::host::{HostArena, MemoryError, MemoryPlan};
use crate::backend::identity::{ByteOrder, Content, Descriptor, DescriptorError, Dtype, Shard};
use crate::backend::region::{HugePages, Mapping, Sharing};
use crate::backend::store::{ArenaNeed, Store};
use crate::base::{PageId, Tier};
use crate::pool::{Capacities, Capacity, Geometry, Plane, PlaneKind, PoolKind};
use crate::tiers::{
    Agreement, ConfigError, Core, CoreConfig, Eviction, PrefetchConfig, RegistrationPolicy, Solo,
    StateConfig, StoreConfig, WindowConfig, WritePolicy,
};

/// What is stored under which name: pages of another model, revision or weights epoch can never be hit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ModelIdentity {
    /// Model, as the operator names it.
    pub model: String,
    /// Revision of its files.
    pub revision: String,
    /// Bumped when weights change in place.
    pub weights_epoch: u64,
    /// Element type of the pages.
    pub dtype: Dtype,
    /// Part of the model that this rank holds.
    pub shard: Shard,
}

impl ModelIdentity {
    /// One rank that holds everything, bytes of no particular type.
    #[must_use]
    pub fn whole(model: &str, revision: &str) -> Self {
        ModelIdentity {
            model: model.to_owned(),
            revision: revision.to_owned(),
            weights_epoch: 0,
            dtype: Dtype::Opaque,
            shard: Shard::Rank { tensor: (0, 1), pipeline: (0, 1), context: (0, 1) },
        }
    }

    /// The descriptor of one plane of pages in the crate's default order.
    #[must_use]
    pub fn descriptor(&self, geometry: &Geometry, plane: &Plane) -> Descriptor {
        let row_bytes = plane.row_bytes();
        let content = match plane.kind() {
            PlaneKind::Draft if plane.parts() == 1 => Content::Mla { row_bytes },
            PlaneKind::Target | PlaneKind::Draft => kv(row_bytes),
            PlaneKind::Latent => Content::Mla { row_bytes },
            PlaneKind::State => Content::State { state_bytes: plane.page_bytes() },
            PlaneKind::Index | PlaneKind::DraftIndex | PlaneKind::Scale | PlaneKind::Other(_) => {
                Content::Rows { row_bytes }
            }
        };
        Descriptor {
            model: self.model.clone(),
            revision: self.revision.clone(),
            weights_epoch: self.weights_epoch,
            dtype: self.dtype,
            content,
            order: ByteOrder::PageLayerKv,
            plane: store_plane(plane.kind(), plane.pool()),
            shard: self.shard,
            page_tokens: geometry.page_size_tokens(),
            layers: plane.layers(),
            draft_layers: 0,
        }
    }
}

/// Rows of K and V whose split into heads only the model knows: one head of that many bytes.
fn kv(row_bytes: u32) -> Content {
    Content::Mha { heads: 1, key_dim: row_bytes, value_dim: row_bytes }
}

/// Why a cache could not be put together.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// No device was given.
    #[error("a cache needs a device")]
    NoDevice,
    /// The configuration makes no sense.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The device has fewer pages than the cache shall use.
    #[error("{asked} device pages asked for in pool {pool:?}, the device has {present}")]
    DevicePages {
        /// Of which pool.
        pool: PoolKind,
        /// Asked for.
        asked: u32,
        /// Present.
        present: u32,
    },
    /// The geometry has planes in the pool, and the configuration does not say how to use it, or the other way round.
    #[error("pool {pool:?}: planes in the geometry and a configuration of the pool go together")]
    Component {
        /// Window or state.
        pool: PoolKind,
    },
    /// Host memory could not be had.
    #[error("host memory: {0}")]
    Host(#[from] MemoryError),
    /// The device refused the host memory.
    #[error("device: {0}")]
    Device(#[from] DeviceError),
    /// The store could not take the host memory; what it had taken was given back.
    #[error(transparent)]
    Store(#[from] RegistrationError),
    /// The store allocates its memory itself, which this build can not use.
    #[error("store {store} addresses only memory that it allocates itself")]
    BackendAllocated {
        /// Name of the store.
        store: &'static str,
    },
    /// The draft plan does not go with the geometry.
    #[error("draft: {0}")]
    Draft(#[from] DraftPlanError),
    /// The identity can not be written down.
    #[error("identity: {0}")]
    Identity(#[from] DescriptorError),
    /// A worker thread could not be started.
    #[error("cannot start a worker thread: {0}")]
    Thread(std::io::Error),
}

/// Called for every page that a pool takes back.
pub(super) struct Scrub(pub(super) Box<dyn FnMut(Tier, PoolKind, PageId) + Send>);

impl fmt::Debug for Scrub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Scrub")
    }
}

/// Collects what a [`PrefixCache`] is made of. Only a device is required.
#[must_use]
pub struct Builder {
    geometry: Arc<Geometry>,
    device: Option<Box<dyn Device>>,
    device_pages: Capacity,
    host_pages: Capacity,
    window: Option<WindowConfig>,
    state: Option<StateConfig>,
    store: Option<Arc<dyn Store>>,
    store_config: StoreConfig,
    store_threads: usize,
    store_call_budget: Option<Duration>,
    identity: ModelIdentity,
    write: WritePolicy,
    prefetch: PrefetchConfig,
    exclusive: bool,
    eviction: Eviction,
    write_ahead_percent: u32,
    loads_in_flight_max: u32,
    delivery: Delivery,
    waker: Option<Arc<dyn Fn() + Send + Sync>>,
    memory: MemoryPlan,
    draft: Option<DraftPlan>,
    registration: RegistrationPolicy,
    votes: Box<dyn RankVotes>,
    agreement: Box<dyn Agreement>,
    scrub: Option<Scrub>,
    record_ops: bool,
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder").field("geometry", &self.geometry).finish_non_exhaustive()
    }
}

impl Builder {
    pub(super) fn new(geometry: Arc<Geometry>) -> Self {
        let plain = CoreConfig::device_only(1, Capacity::Unlimited);
        Builder {
            geometry,
            device: None,
            device_pages: Capacity::Unlimited,
            host_pages: Capacity::Pages(0),
            window: None,
            state: None,
            store: None,
            store_config: StoreConfig::default(),
            store_threads: 2,
            store_call_budget: Some(Duration::from_secs(30)),
            identity: ModelIdentity::whole("unnamed", ""),
            write: WritePolicy::None,
            prefetch: plain.prefetch,
            exclusive: plain.exclusive,
            eviction: plain.eviction,
            write_ahead_percent: plain.write_ahead_percent,
            loads_in_flight_max: plain.loads_in_flight_max,
            delivery: Delivery::AsCompleted,
            waker: None,
            memory: huge_where_there_are_any(),
            draft: None,
            registration: RegistrationPolicy::default(),
            votes: Box::new(AloneVotes),
            agreement: Box::new(Solo),
            scrub: None,
            record_ops: false,
        }
    }

    /// The device that holds the pages.
    pub fn device(mut self, device: impl Device + 'static) -> Self {
        self.device = Some(Box::new(device));
        self
    }

    /// How many of the device's pages the cache may use. Default: all.
    pub fn device_pages(mut self, pages: Capacity) -> Self {
        self.device_pages = pages;
        self
    }

    /// Size of the host tier. Default: none.
    pub fn host_pages(mut self, pages: Capacity) -> Self {
        self.host_pages = pages;
        self
    }

    /// The model has sliding-window layers: planes of the pool `Window`. Without a limit on the device all of the
    /// device's window pages are used.
    pub fn window(mut self, window: WindowConfig) -> Self {
        self.window = Some(window);
        self
    }

    /// The model has recurrent layers: planes of the pool `State`. Without a limit on the device all of its slots are
    /// used.
    pub fn state(mut self, state: StateConfig) -> Self {
        self.state = Some(state);
        self
    }

    /// The store behind the host tier. Default: none.
    pub fn store(mut self, store: Arc<dyn Store>) -> Self {
        self.store = Some(store);
        self
    }

    /// Bounds of the store backup.
    pub fn store_config(mut self, config: StoreConfig) -> Self {
        self.store_config = config;
        self
    }

    /// Threads that call the store. Default 2; modelled delivery uses one, so that calls happen in order.
    pub fn store_threads(mut self, threads: usize) -> Self {
        self.store_threads = threads;
        self
    }

    /// Time one store call may take. Default 30 s; `None`: no limit.
    pub fn store_call_budget(mut self, budget: Option<Duration>) -> Self {
        self.store_call_budget = budget;
        self
    }

    /// What the stored pages belong to.
    pub fn identity(mut self, identity: ModelIdentity) -> Self {
        self.identity = identity;
        self
    }

    /// When nodes get a host copy. Default: never.
    pub fn write_policy(mut self, policy: WritePolicy) -> Self {
        self.write = policy;
        self
    }

    /// Store prefetch settings.
    pub fn prefetch(mut self, config: PrefetchConfig) -> Self {
        self.prefetch = config;
        self
    }

    /// See [`CoreConfig::eviction`]. Default: the order that learns.
    pub fn eviction(mut self, eviction: Eviction) -> Self {
        self.eviction = eviction;
        self
    }

    /// See [`CoreConfig::exclusive`]. Default: off.
    pub fn exclusive(mut self, exclusive: bool) -> Self {
        self.exclusive = exclusive;
        self
    }

    /// See [`CoreConfig::write_ahead_percent`]. Default: 2.
    pub fn write_ahead_percent(mut self, percent: u32) -> Self {
        self.write_ahead_percent = percent;
        self
    }

    /// Loads in flight; more are refused.
    pub fn loads_in_flight_max(mut self, loads: u32) -> Self {
        self.loads_in_flight_max = loads;
        self
    }

    /// When completions reach the core.
    pub fn delivery(mut self, delivery: Delivery) -> Self {
        self.delivery = delivery;
        self
    }

    /// Called from worker threads when a [`tick`](PrefixCache::tick) would find something; must not block.
    pub fn waker(mut self, waker: Arc<dyn Fn() + Send + Sync>) -> Self {
        self.waker = Some(waker);
        self
    }

    /// Where the memory of the host tier comes from: page size, NUMA node, budget, first touch. Default: huge pages where
    /// the system has any. Whether it is shared is not for the caller to say: it is, if the store needs it.
    pub fn memory(mut self, plan: MemoryPlan) -> Self {
        self.memory = plan;
        self
    }

    /// Where the draft model's KV lies. Default: what the geometry suggests, see [`DraftPlan::of`].
    pub fn draft(mut self, plan: DraftPlan) -> Self {
        self.draft = Some(plan);
        self
    }

    /// What to do when the store can not take the planes of the draft. Default: fail.
    pub fn registration(mut self, policy: RegistrationPolicy) -> Self {
        self.registration = policy;
        self
    }

    /// The ranks that register their memory together. Default: none but this one.
    pub fn rank_votes(mut self, votes: impl RankVotes + 'static) -> Self {
        self.votes = Box::new(votes);
        self
    }

    /// The ranks that decide together, each with a cache of its own and a shard of the same pages; see
    /// [`Agreement`] for what that asks of the caller, and [`group`](super::group) for the ranks of one process. Default:
    /// none but this one.
    pub fn agreement(mut self, member: impl Agreement + 'static) -> Self {
        self.agreement = Box::new(member);
        self
    }

    /// Called with every page of device and host that goes back to its pool, before anything can be written to it
    /// again: the place to erase or poison. Runs on the scheduler's thread.
    pub fn on_free(mut self, scrub: impl FnMut(Tier, PoolKind, PageId) + Send + 'static) -> Self {
        self.scrub = Some(Scrub(Box::new(scrub)));
        self
    }

    /// Keeps every input of the core, tokens included, for [`PrefixCache::op_log`]: the log of an incident replays to the
    /// same decisions. Memory grows with every call. Default: off.
    pub fn record_ops(mut self, record: bool) -> Self {
        self.record_ops = record;
        self
    }

    /// Checks everything, takes memory, starts the threads.
    pub fn build(mut self) -> Result<PrefixCache, BuildError> {
        let mut device = self.device.take().ok_or(BuildError::NoDevice)?;
        let draft = self.draft.unwrap_or_else(|| DraftPlan::of(&self.geometry));
        draft.check(&self.geometry)?;
        let mut config = self.core_config(device.as_ref())?;
        let arena = host_arena(&self.geometry, host_capacities(&config), &self.memory, self.store.as_ref())?;
        let mapped = |pool| Capacity::Pages(arena.pages(pool));
        config.host = mapped(PoolKind::Full);
        config.window = config.window.map(|w| WindowConfig { host: mapped(PoolKind::Window), ..w });
        config.state = config.state.map(|s| StateConfig { host: mapped(PoolKind::State), ..s });
        let mut core = Core::new(config)?;
        if self.record_ops {
            core.start_log();
        }
        if arena.pages(PoolKind::Full) > 0 {
            device.attach_host(Arc::clone(&arena))?;
        }
        let (bell, heard) = Bell::new(self.waker.take());
        let device_bell = bell.clone();
        device.set_waker(Some(Arc::new(move || device_bell.ring())));
        let lane_config = LaneConfig {
            threads: match self.delivery {
                Delivery::AsCompleted => self.store_threads,
                Delivery::Modelled(_) => 1,
            },
            call_budget: self.store_call_budget,
            bell,
            identity: self.identity,
            draft,
            policy: self.registration,
        };
        let lane = match self.store.take() {
            Some(store) => {
                let registered = lane_config.register(&arena, store.as_ref(), self.votes.as_mut())?;
                Some(start_lane(&lane_config, store, &arena, registered)?)
            }
            None => None,
        };
        let store = (lane, lane_config, self.votes);
        let executor = Executor::new(device, store, Arc::clone(&self.geometry), self.delivery, heard);
        Ok(PrefixCache::assemble(Parts {
            geometry: self.geometry,
            arena,
            memory: self.memory,
            core,
            store_config: self.store_config,
            executor,
            agreement: self.agreement,
            scrub: self.scrub,
        }))
    }

    fn core_config(&self, device: &dyn Device) -> Result<CoreConfig, BuildError> {
        for (pool, configured) in
            [(PoolKind::Window, self.window.is_some()), (PoolKind::State, self.state.is_some())]
        {
            if configured != self.geometry.has_pool(pool) {
                return Err(BuildError::Component { pool });
            }
        }
        let pages = |pool, asked| device_pages(device, pool, asked);
        let window =
            self.window.map(|w| pages(PoolKind::Window, w.device).map(|device| WindowConfig { device, ..w }));
        let state =
            self.state.map(|s| pages(PoolKind::State, s.device).map(|device| StateConfig { device, ..s }));
        let config = CoreConfig {
            page_size: self.geometry.page_size_tokens(),
            device: pages(PoolKind::Full, self.device_pages)?,
            host: self.host_pages,
            store: self.store.as_ref().map(|_| self.store_config),
            write: self.write,
            prefetch: self.prefetch,
            exclusive: self.exclusive,
            write_ahead_percent: self.write_ahead_percent,
            loads_in_flight_max: self.loads_in_flight_max,
            window: window.transpose()?,
            state: state.transpose()?,
            eviction: self.eviction,
        };
        config.validate()?;
        Ok(config)
    }
}

/// Memory for a host tier of these sizes, where the store, if there is one, can reach it.
pub(super) fn host_arena(
    geometry: &Arc<Geometry>,
    sizes: Capacities,
    plan: &MemoryPlan,
    store: Option<&Arc<dyn Store>>,
) -> Result<Arc<HostArena>, BuildError> {
    let mut plan = plan.clone();
    if let Some(store) = store {
        let caps = store.caps();
        match (caps.arena, plan.mapping.sharing) {
            (ArenaNeed::SharedFd, Sharing::Private) => plan.mapping.sharing = Sharing::Shared,
            (ArenaNeed::BackendAllocated, _) => {
                return Err(BuildError::BackendAllocated { store: caps.name });
            }
            _ => {}
        }
    }
    Ok(Arc::new(HostArena::with_plan(Arc::clone(geometry), sizes, &plan)?))
}

/// First touch of host memory is three times as fast in huge pages, and copies need fewer translations.
fn huge_where_there_are_any() -> MemoryPlan {
    let mapping = Mapping { huge_pages: HugePages::Advise, ..Mapping::PRIVATE };
    MemoryPlan { mapping, ..MemoryPlan::default() }
}

/// Pages of a pool that the cache uses on the device.
fn device_pages(device: &dyn Device, pool: PoolKind, asked: Capacity) -> Result<Capacity, BuildError> {
    let present = device.pages(pool);
    match asked {
        Capacity::Unlimited => Ok(Capacity::Pages(present)),
        Capacity::Pages(asked) if asked > present => Err(BuildError::DevicePages { pool, asked, present }),
        Capacity::Pages(asked) => Ok(Capacity::Pages(asked)),
    }
}

/// What to map: windows and states lie on the host only under pages that do.
fn host_capacities(config: &CoreConfig) -> Capacities {
    let beside = |host: Option<Capacity>| match config.host {
        Capacity::Pages(0) => Capacity::Pages(0),
        _ => host.unwrap_or(Capacity::Pages(0)),
    };
    Capacities {
        full: config.host,
        window: beside(config.window.map(|w| w.host)),
        state: beside(config.state.map(|s| s.host)),
    }
}

/// Starts the workers; on failure what was registered is given back.
fn start_lane(
    config: &LaneConfig,
    store: Arc<dyn Store>,
    arena: &Arc<HostArena>,
    registered: Registered,
) -> Result<StoreLane, BuildError> {
    StoreLane::start(config, Arc::clone(&store), Arc::clone(arena), registered).map_err(|failed| {
        let (error, registered) = *failed;
        registered.detach(arena, store.as_ref());
        BuildError::Thread(error)
    })
}
