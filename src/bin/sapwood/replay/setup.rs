//! From options to a workload and a cache.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use sapwood::backend::device::SoftDevice;
use sapwood::backend::host::HostArena;
use sapwood::backend::identity::Shard;
use sapwood::backend::store::Store;
use sapwood::backend::store::file::{FileConfig, FileStore};
use sapwood::backend::store::mem::MemStore;
use sapwood::base::{PageId, Tier};
use sapwood::engine::{CostModel, Delivery, DraftPlan, ModelIdentity, PrefixCache, group};
use sapwood::key::Namespace;
use sapwood::pool::{Capacities, Capacity, Geometry, GeometryError, Plane, PlaneKind, PoolKind};
use sapwood::tiers::{
    Eviction, PrefetchConfig, PrefetchPolicy, Rates, StateConfig, StoreConfig, WindowConfig, WritePolicy,
};

use super::args::{self, Args, DevicePages, Draft, Part, Policy, Prefetch, StoreChoice};
use super::calls::{Calls, PoisonTime};
use super::complain;
use super::error::InputError;
use super::model::Model;
use super::session::end_tokens;
use super::trace;
use super::workload::{ADAPTERS, BUILT_IN_REQUESTS, Job, built_in};

/// Cap of a store in memory when `--store-bytes` says nothing.
const MEM_STORE_BYTES_MAX: u64 = 1 << 30;
/// Cap of a store in a directory.
const FILE_STORE_BYTES_MAX: u64 = 64 << 30;
/// Bytes of one state.
const STATE_BYTES: u32 = 256;
/// All ranks are driven by one thread, so none keeps another waiting.
const RANK_WAIT_MAX: Duration = Duration::ZERO;
/// Faults of scrubbing told in words; the rest is counted.
const SCRUB_FAULTS_MAX: usize = 5;

/// What is replayed.
pub(crate) struct Input {
    pub(crate) jobs: Vec<Job>,
    pub(crate) skipped_lines: usize,
}

/// Checks the options and reads or makes the workload.
pub(crate) fn input(args: &Args) -> Result<Input, InputError> {
    args.check()?;
    let Some(path) = &args.trace else {
        let jobs = built_in(args.requests.unwrap_or(BUILT_IN_REQUESTS), args.seed);
        return Ok(Input { jobs, skipped_lines: 0 });
    };
    let trace = trace::read(path, args.lenient, args.requests.unwrap_or(usize::MAX))?;
    if trace.skipped_lines > 0 {
        complain(&format!("{}: {} malformed lines skipped", path.display(), trace.skipped_lines));
    }
    if trace.ids_with_two_parents > 0 {
        complain(&format!(
            "{}: {} ids follow different ids in different lines; they are taken as different blocks there",
            path.display(),
            trace.ids_with_two_parents
        ));
    }
    Ok(Input { jobs: trace.jobs, skipped_lines: trace.skipped_lines })
}

/// The caches of all ranks and the models beside them.
pub(crate) struct Machine {
    pub(crate) calls: Calls,
    pub(crate) models: Vec<Model>,
    /// The device of rank 0, for tests that damage it.
    #[cfg(test)]
    pub(crate) device: SoftDevice,
    pub(crate) scrub_faults: ScrubFaults,
}

/// Freed pages that could not be poisoned, because somebody still reads or writes them.
#[derive(Clone, Default)]
pub(crate) struct ScrubFaults(Arc<Mutex<(u64, Vec<String>)>>);

impl ScrubFaults {
    fn add(&self, fault: String) {
        let mut faults = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        faults.0 += 1;
        if faults.1.len() < SCRUB_FAULTS_MAX {
            faults.1.push(fault);
        }
    }

    /// All of them, in words.
    pub(crate) fn take(&self) -> Vec<String> {
        let mut faults = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (all, mut told) = std::mem::take(&mut *faults);
        if all > told.len() as u64 {
            told.push(format!("{all} freed pages in all could not be poisoned"));
        }
        told
    }
}

/// Builds device, store and cache of every rank.
pub(crate) fn machine(args: &Args, jobs: &[Job]) -> Result<Machine, InputError> {
    let geometry = Arc::new(geometry(args)?);
    let device_pages = device_pages(args, jobs);
    let (window, state) = components(args, device_pages);
    let capacities = Capacities {
        full: Capacity::Pages(device_pages),
        window: window.map_or(Capacity::Pages(0), |w| w.device),
        state: state.map_or(Capacity::Pages(0), |s| s.device),
    };
    let scrub_faults = ScrubFaults::default();
    let poison_time = PoisonTime::default();
    let (mut caches, mut devices, mut namespaces) = (Vec::new(), Vec::new(), Vec::new());
    for (rank, member) in group(args.ranks, RANK_WAIT_MAX).into_iter().enumerate() {
        let device = SoftDevice::threaded(Arc::clone(&geometry), capacities)?;
        let host: Arc<OnceLock<Arc<HostArena>>> = Arc::default();
        let on_free = poison(device.clone(), Arc::clone(&host), scrub_faults.clone(), poison_time.clone());
        let mut builder = PrefixCache::builder(Arc::clone(&geometry))
            .device(device.clone())
            .host_pages(Capacity::Pages(args.host_pages))
            .identity(identity(rank as u32, args.ranks))
            .draft(draft_plan(args))
            .write_policy(write_policy(args))
            .exclusive(args.exclusive)
            .write_ahead_percent(args.write_ahead_percent)
            .eviction(eviction(args))
            .prefetch(PrefetchConfig { policy: prefetch_policy(args), ..PrefetchConfig::default() })
            .store_config(StoreConfig {
                uses_min: args.store_uses,
                tokens_min: args.store_tokens,
                ..StoreConfig::default()
            })
            .delivery(Delivery::Modelled(cost_model(args, rank)));
        if !args.no_poison {
            builder = builder.on_free(on_free);
        }
        if args.ranks > 1 {
            builder = builder.agreement(member);
        }
        if let Some(window) = window {
            builder = builder.window(window);
        }
        if let Some(state) = state {
            builder = builder.state(state);
        }
        if let Some(store) = open_store(args, rank)? {
            builder = builder.store(store);
        }
        let mut cache = builder.build()?;
        cache.set_rates(rates(args));
        // Set once, right here; before the build there is no host memory that could be freed.
        let _ = host.set(Arc::clone(cache.host_memory()));
        namespaces.clear();
        for adapter in ADAPTERS {
            let namespace = Namespace { adapter: adapter.map(str::to_owned), ..Namespace::default() };
            namespaces.push(cache.namespace(&namespace)?);
        }
        caches.push(cache);
        devices.push(device);
    }
    let models = devices.iter().enumerate().map(|(rank, d)| Model::new(d.clone(), &geometry, rank)).collect();
    Ok(Machine {
        calls: Calls::new(caches, namespaces, poison_time),
        #[cfg(test)]
        device: devices[0].clone(),
        models,
        scrub_faults,
    })
}

/// Ranks hold shards of the model, so none can take another's pages for its own.
fn identity(rank: u32, ranks: u32) -> ModelIdentity {
    let shard = Shard::Rank { tensor: (rank, ranks), pipeline: (0, 1), context: (0, 1) };
    ModelIdentity { shard, ..ModelIdentity::whole("sapwood-replay", "stamps-1") }
}

/// The target, and beside or behind it one layer of a draft. K and V where the bytes of a token can be halved, a
/// latent where not.
fn geometry(args: &Args) -> Result<Geometry, GeometryError> {
    let layers = args.layers + u32::from(args.draft == Draft::Packed);
    let (target, draft) = match args.bytes_per_token_layer {
        bytes if bytes.is_multiple_of(2) => (Plane::target(layers, bytes / 2), Plane::draft(1, bytes / 2)),
        bytes => (Plane::latent(layers, bytes), Plane::new(PlaneKind::Draft, 1, 1, bytes)),
    };
    let mut builder = Geometry::builder(args.page_size).plane(target);
    if args.draft == Draft::Sidecar {
        builder = builder.plane(draft);
    }
    if args.has(Part::Window) {
        let window = Plane::new(PlaneKind::Target, 1, 1, args.bytes_per_token_layer);
        builder = builder.plane(window.in_pool(PoolKind::Window).on_model_layers([layers]));
    }
    if args.has(Part::State) {
        builder = builder.plane(Plane::state(1, STATE_BYTES).on_model_layers([layers]));
    }
    builder.build()
}

/// Pools of windows and states. A window has half as many pages as full attention, on each tier: of a cached prompt it
/// keeps the end.
fn components(args: &Args, device_pages: u32) -> (Option<WindowConfig>, Option<StateConfig>) {
    let span_pages = args.window_tokens.div_ceil(args.page_size);
    let window = WindowConfig {
        span_pages,
        device: Capacity::Pages((device_pages / 2).max(span_pages + 1)),
        host: Capacity::Pages(args.host_pages / 2),
    };
    let state = StateConfig {
        device: Capacity::Pages(args.state_slots),
        host: Capacity::Pages(args.state_slots.saturating_mul(4)),
    };
    (args.has(Part::Window).then_some(window), args.has(Part::State).then_some(state))
}

fn draft_plan(args: &Args) -> DraftPlan {
    match args.draft {
        Draft::None => DraftPlan::None,
        Draft::Packed => DraftPlan::Packed { layers: 1 },
        // Every plane of every page is compared, so every plane has to be there.
        Draft::Sidecar => DraftPlan::Sidecar { shard: None, required: true },
    }
}

/// Poisons pages as they are freed. A page that is still claimed by a transfer at that moment is a fault.
fn poison(
    device: SoftDevice,
    host: Arc<OnceLock<Arc<HostArena>>>,
    faults: ScrubFaults,
    time: PoisonTime,
) -> impl FnMut(Tier, PoolKind, PageId) + Send {
    move |tier, pool, page| {
        let start = Instant::now();
        let poisoned = match (tier, host.get()) {
            (Tier::Device, _) => device.poison(pool, page),
            (_, Some(host)) => host.poison(pool, page),
            (_, None) => Ok(()),
        };
        if let Err(error) = poisoned {
            faults.add(format!("freed {tier:?} {pool:?} page {}: {error}", page.0));
        }
        let took = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        time.fetch_add(took, Ordering::Relaxed);
    }
}

/// Pages of the device. `unlimited` is as many as the whole workload could ever fill: nothing is evicted, and
/// memory is taken as it is touched.
fn device_pages(args: &Args, jobs: &[Job]) -> u32 {
    match args.device_pages {
        DevicePages::Pages(pages) => pages,
        DevicePages::Unlimited => {
            let need = |job: &Job| end_tokens(job, !args.no_decode).div_ceil(args.page_size as usize) as u64;
            let pages: u64 = jobs.iter().map(need).sum();
            u32::try_from(pages).unwrap_or(u32::MAX).min(sapwood::base::limits::POOL_PAGES_MAX)
        }
    }
}

fn eviction(args: &Args) -> Eviction {
    match args.policy {
        args::Order::Lru => Eviction::Lru,
        args::Order::Adaptive => Eviction::Adaptive,
    }
}

fn write_policy(args: &Args) -> WritePolicy {
    match args.write_policy {
        Policy::WriteThrough => WritePolicy::WriteThrough { threshold: 1 },
        Policy::WriteThroughSelective => WritePolicy::WriteThroughSelective,
        Policy::WriteBack => WritePolicy::WriteBack,
        Policy::None => WritePolicy::None,
    }
}

fn prefetch_policy(args: &Args) -> PrefetchPolicy {
    match args.prefetch {
        Prefetch::BestEffort => PrefetchPolicy::BestEffort,
        Prefetch::WaitComplete => PrefetchPolicy::WaitComplete,
        Prefetch::Timeout => PrefetchPolicy::TIMEOUT_DEFAULT,
        Prefetch::Adaptive => PrefetchPolicy::Adaptive,
    }
}

/// Speeds of the modelled machine, as an engine would have measured them.
fn rates(args: &Args) -> Rates {
    let over = |gb_per_s: f64| f64::from(args.modelled_bytes_per_token) / gb_per_s;
    Rates {
        compute_ns_per_token: (args.prefill_us_per_token * 1e3) as u64,
        load_ns_per_token: (over(args.get_gb_per_s) + over(args.h2d_gb_per_s)) as u64,
        load_latency_us: CostModel::default().store_latency_us,
    }
}

/// The modelled machine moves `modelled_bytes_per_token` where this process moves a few bytes, so its rates are
/// scaled down by that factor. Every rank is a little slower than the one before, so that their copies end apart.
fn cost_model(args: &Args, rank: usize) -> CostModel {
    let real_bytes_per_token = f64::from(args.layers) * f64::from(args.bytes_per_token_layer);
    let scale =
        1e9 * real_bytes_per_token / f64::from(args.modelled_bytes_per_token) / (1.0 + 0.07 * rank as f64);
    let rate = |gb_per_s: f64| ((gb_per_s * scale) as u64).max(1);
    CostModel {
        d2h_bytes_per_s: rate(args.d2h_gb_per_s),
        h2d_bytes_per_s: rate(args.h2d_gb_per_s),
        store_get_bytes_per_s: rate(args.get_gb_per_s),
        store_put_bytes_per_s: rate(args.put_gb_per_s),
        ..CostModel::default()
    }
}

/// A rank's own connection to the store, or its own directory: what they share is told apart by the identity.
fn open_store(args: &Args, rank: usize) -> Result<Option<Arc<dyn Store>>, InputError> {
    match args.store_choice() {
        StoreChoice::None => Ok(None),
        StoreChoice::Mem => {
            let bytes_max = args.store_bytes.unwrap_or(MEM_STORE_BYTES_MAX);
            Ok(Some(Arc::new(MemStore::new(usize::try_from(bytes_max).unwrap_or(usize::MAX)))))
        }
        StoreChoice::Dir(path) => {
            let path = if args.ranks > 1 { path.join(format!("rank-{rank}")) } else { path };
            let config = FileConfig::new(&path, args.store_bytes.unwrap_or(FILE_STORE_BYTES_MAX));
            let store = FileStore::open(config).map_err(|error| InputError::StoreDir { path, error })?;
            Ok(Some(Arc::new(store)))
        }
        StoreChoice::Service(url) => Ok(Some(url.open()?)),
    }
}

/// Capacities for the chart.
pub(crate) fn capacities(args: &Args) -> super::chart::Capacities {
    let device_pages = match args.device_pages {
        DevicePages::Pages(pages) => Some(u64::from(pages)),
        DevicePages::Unlimited => None,
    };
    super::chart::Capacities { device_pages, host_pages: u64::from(args.host_pages) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn args(line: &str) -> Args {
        Args::parse_from(std::iter::once("replay").chain(line.split_whitespace()))
    }

    #[test]
    fn unlimited_holds_everything_the_workload_computes() {
        let jobs = built_in(20, 1);
        let all = args("--device-pages unlimited --page-size 16");
        let tokens: usize = jobs.iter().map(|j| end_tokens(j, true)).sum();
        let pages = device_pages(&all, &jobs) as usize;
        assert!(pages * 16 >= tokens && pages * 16 < tokens + 20 * 16);
        assert_eq!(device_pages(&args("--device-pages 7"), &jobs), 7);
    }

    #[test]
    fn rates_are_scaled_to_the_bytes_that_really_move() {
        let args =
            args("--layers 2 --bytes-per-token-layer 32 --modelled-bytes-per-token 64000 --h2d-gb-per-s 10");
        assert_eq!(cost_model(&args, 0).h2d_bytes_per_s, 10_000_000);
        assert!(cost_model(&args, 3).h2d_bytes_per_s < 10_000_000);
    }

    #[test]
    fn scrub_faults_are_counted_beyond_those_told() {
        let faults = ScrubFaults::default();
        (0..9).for_each(|i| faults.add(format!("page {i}")));
        let told = faults.take();
        assert_eq!(told.len(), SCRUB_FAULTS_MAX + 1);
        assert!(told[SCRUB_FAULTS_MAX].starts_with("9 freed pages"));
        assert!(faults.take().is_empty());
    }
}
