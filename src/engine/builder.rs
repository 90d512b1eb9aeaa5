//! Putting a cache together.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::cache::PrefixCache;
use super::delivery::Delivery;
use super::executor::{Bell, Executor};
use super::lane::{StoreLane, StoredPlane};
use crate::backend::device::{Device, DeviceError};
use crate::backend::host::{HostArena, MemoryError};
use crate::backend::identity::{
    ByteOrder, Content, Descriptor, DescriptorError, Dtype, Plane as StorePlane, Shard,
};
use crate::backend::store::{RegisterError, Store};
use crate::base::{PageId, Tier};
use crate::pool::{Capacities, Capacity, Geometry, Plane, PlaneKind, PoolKind};
use crate::tiers::{ConfigError, Core, CoreConfig, PrefetchConfig, StoreConfig, WritePolicy};

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
        let (store_plane, content) = match plane.kind() {
            PlaneKind::Target => (StorePlane::Target, kv(row_bytes)),
            PlaneKind::Draft => (StorePlane::Draft, kv(row_bytes)),
            PlaneKind::Latent => (StorePlane::Target, Content::Mla { row_bytes }),
            PlaneKind::Index => (StorePlane::Index, Content::Rows { row_bytes }),
            PlaneKind::Scale => (StorePlane::Scale, Content::Rows { row_bytes }),
            PlaneKind::State => (StorePlane::State, Content::State { state_bytes: plane.page_bytes() }),
            PlaneKind::Other(n) => (StorePlane::Other(u16::from(n)), Content::Rows { row_bytes }),
        };
        Descriptor {
            model: self.model.clone(),
            revision: self.revision.clone(),
            weights_epoch: self.weights_epoch,
            dtype: self.dtype,
            content,
            order: ByteOrder::PageLayerKv,
            plane: store_plane,
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
    #[error("{asked} device pages asked for, the device has {present}")]
    DevicePages {
        /// Asked for.
        asked: u32,
        /// Present.
        present: u32,
    },
    /// Host memory could not be had.
    #[error("host memory: {0}")]
    Host(#[from] MemoryError),
    /// The device refused the host memory.
    #[error("device: {0}")]
    Device(#[from] DeviceError),
    /// The store refused the host memory.
    #[error("store: {0}")]
    Store(#[from] RegisterError),
    /// The identity can not be written down.
    #[error("identity: {0}")]
    Identity(#[from] DescriptorError),
    /// A worker thread could not be started.
    #[error("cannot start a worker thread: {0}")]
    Thread(std::io::Error),
}

/// Called for every page that a pool takes back.
pub(super) struct Scrub(pub(super) Box<dyn FnMut(Tier, PageId) + Send>);

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
    store: Option<Arc<dyn Store>>,
    store_config: StoreConfig,
    store_threads: usize,
    store_call_budget: Option<Duration>,
    identity: ModelIdentity,
    write: WritePolicy,
    prefetch: PrefetchConfig,
    loads_in_flight_max: u32,
    delivery: Delivery,
    waker: Option<Arc<dyn Fn() + Send + Sync>>,
    scrub: Option<Scrub>,
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
            store: None,
            store_config: StoreConfig::default(),
            store_threads: 2,
            store_call_budget: Some(Duration::from_secs(30)),
            identity: ModelIdentity::whole("unnamed", ""),
            write: WritePolicy::None,
            prefetch: plain.prefetch,
            loads_in_flight_max: plain.loads_in_flight_max,
            delivery: Delivery::AsCompleted,
            waker: None,
            scrub: None,
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

    /// Called with every page of device and host that goes back to its pool, before anything can be written to it
    /// again: the place to erase or poison. Runs on the scheduler's thread.
    pub fn on_free(mut self, scrub: impl FnMut(Tier, PageId) + Send + 'static) -> Self {
        self.scrub = Some(Scrub(Box::new(scrub)));
        self
    }

    /// Checks everything, takes memory, starts the threads.
    pub fn build(self) -> Result<PrefixCache, BuildError> {
        let mut device = self.device.ok_or(BuildError::NoDevice)?;
        let present = device.pages(PoolKind::Full);
        let device_pages = match self.device_pages {
            Capacity::Unlimited => present,
            Capacity::Pages(asked) if asked > present => {
                return Err(BuildError::DevicePages { asked, present });
            }
            Capacity::Pages(asked) => asked,
        };
        let mut config = CoreConfig {
            page_size: self.geometry.page_size_tokens(),
            device: Capacity::Pages(device_pages),
            host: self.host_pages,
            store: self.store.as_ref().map(|_| self.store_config),
            write: self.write,
            prefetch: self.prefetch,
            loads_in_flight_max: self.loads_in_flight_max,
        };
        config.validate()?;
        let arena = Arc::new(HostArena::new(Arc::clone(&self.geometry), Capacities::full(config.host))?);
        config.host = Capacity::Pages(arena.pages(PoolKind::Full));
        let core = Core::new(config)?;
        if arena.pages(PoolKind::Full) > 0 {
            device.attach_host(Arc::clone(&arena))?;
        }
        let (bell, heard) = Bell::new(self.waker);
        let device_bell = bell.clone();
        device.set_waker(Some(Arc::new(move || device_bell.ring())));
        let threads = match self.delivery {
            Delivery::AsCompleted => self.store_threads,
            Delivery::Modelled(_) => 1,
        };
        let lane = match self.store {
            Some(store) => {
                let planes = store_planes(&self.identity, &self.geometry, &arena, store.as_ref())?;
                Some(
                    StoreLane::start(
                        store,
                        Arc::clone(&arena),
                        planes,
                        threads,
                        self.store_call_budget,
                        bell,
                    )
                    .map_err(BuildError::Thread)?,
                )
            }
            None => None,
        };
        let page_bytes = self.geometry.page_bytes(PoolKind::Full);
        let layers = self.geometry.model_layers();
        let executor = Executor::new(device, lane, page_bytes, layers, self.delivery, heard);
        Ok(PrefixCache::assemble(self.geometry, arena, core, executor, self.scrub))
    }
}

/// Registers the memory of every plane with the store and names its objects. On failure what was registered is
/// taken back in reverse order.
fn store_planes(
    identity: &ModelIdentity,
    geometry: &Geometry,
    arena: &HostArena,
    store: &dyn Store,
) -> Result<Vec<StoredPlane>, BuildError> {
    let mut planes: Vec<StoredPlane> = Vec::new();
    let mut register = || -> Result<(), BuildError> {
        for (plane, region) in arena.regions() {
            let Some(shape) = geometry.plane(plane).filter(|p| p.pool() == PoolKind::Full) else { continue };
            let descriptor = identity.descriptor(geometry, shape).digest()?;
            let region = store.register(region)?;
            planes.push(StoredPlane { plane, descriptor, region });
        }
        Ok(())
    };
    if let Err(error) = register() {
        for plane in planes.iter().rev() {
            // The first cause is what the caller hears.
            let _ = store.unregister(plane.region);
        }
        return Err(error);
    }
    Ok(planes)
}
