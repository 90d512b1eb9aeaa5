//! Calls that pass through to the core or to the device.

use std::sync::Arc;
use std::time::Duration;

use sapwood::backend::device::SoftDevice;
use sapwood::backend::store::Store;
use sapwood::backend::store::file::{FileConfig, FileStore};
use sapwood::backend::store::mem::MemStore;
use sapwood::base::{Fence, NamespaceId, PageId, Time};
use sapwood::engine::{CacheError, ComputeError, PrefixCache, Request, TierError};
use sapwood::key::Namespace;
use sapwood::pool::{Capacities, Capacity, Plane, PlaneId, PlaneSet, PoolKind};
use sapwood::tiers::{
    Alloc, CoreError, HostTier, LoadBack, LoadState, OpLog, Prefetch, PrefetchPolicy, PrefetchState, Rates,
    Refusal, StateConfig, WindowConfig, WritePolicy,
};

use crate::kit::{Choices, Engine, PAGE_TOKENS, SPAN_PAGES, Shape, Sizes, builder, prompt};

/// For waits that end long before.
const LONG: Duration = Duration::from_secs(60);

/// What a scheduler did replays to the same decisions, through the text of the log.
#[test]
fn the_log_of_a_cache_replays_to_the_same_decisions() {
    let store: Arc<dyn Store> = Arc::new(MemStore::new(1 << 22));
    let (b, device) = builder(Shape::ALL, Sizes::TIGHT, (0, 1), Some(store));
    let mut engine = Engine::of(b.record_ops(true).build().unwrap(), device, 0);
    let mut choices = Choices(11);
    for _ in 0..30 {
        let pages = 2 + choices.below(6) as usize;
        engine.run(&prompt(choices.below(5) as u32, pages));
    }
    engine.cache.set_prefetch_policy(PrefetchPolicy::Adaptive);
    engine.cache.set_rates(Rates { compute_ns_per_token: 1, load_ns_per_token: 1, load_latency_us: 1 });
    engine.settle();
    let log = engine.cache.op_log().unwrap();
    let read: OpLog = log.to_string().parse().unwrap();
    assert_eq!(read, log);
    let replayed = read.replay(false).unwrap();
    assert_eq!((replayed.digest(), replayed.sanity()), (engine.cache.digest(), Vec::new()));
    assert_eq!(replayed.stats(), engine.cache.stats());
    let (b, _) = builder(Shape::FULL, Sizes::TIGHT, (0, 1), None);
    assert!(b.build().unwrap().op_log().is_none());
}

/// What the model computes at the end of page `i` of a prompt: one value for each plane and layer.
fn value(plane: PlaneId, i: usize, layer: u32) -> u8 {
    1 + (u32::from(plane.0) * 32 + i as u32 * 4 + layer) as u8
}

/// The planes of a pool.
fn planes_of(cache: &PrefixCache, pool: PoolKind) -> Vec<(PlaneId, Plane)> {
    let planes = cache.geometry().planes_of(pool, PlaneSet::ALL);
    planes.map(|(id, plane)| (id, plane.clone())).collect()
}

/// Pages of the request by pool, with the page of the prompt at whose end each lies.
fn pages_of(cache: &PrefixCache, request: &Request, state: Option<PageId>) -> Vec<(PoolKind, usize, PageId)> {
    let table = cache.pages(request).unwrap();
    let parts = cache.components(request).unwrap();
    let full = table.iter().enumerate().map(|(i, &page)| (PoolKind::Full, i, page));
    let window = (parts.window_from as usize..).zip(&parts.window);
    let window = window.map(|(i, &page)| (PoolKind::Window, i, page));
    full.chain(window).chain(state.map(|page| (PoolKind::State, table.len() - 1, page))).collect()
}

/// Eight pages on a device that copies when it is told to; the prompt lies on the host only.
fn on_the_host(shape: Shape) -> (PrefixCache, SoftDevice, Request, Vec<u32>) {
    let geometry = shape.geometry();
    let pages = Capacity::Pages;
    let capacities = Capacities { full: pages(8), window: pages(8), state: pages(4) };
    let device = SoftDevice::manual(Arc::clone(&geometry), capacities).unwrap();
    let mut builder = PrefixCache::builder(geometry)
        .device(device.clone())
        .host_pages(pages(16))
        .write_policy(WritePolicy::WriteThrough { threshold: 1 });
    if shape.window {
        let (device, host) = (Capacity::Unlimited, pages(16));
        builder = builder.window(WindowConfig { span_pages: SPAN_PAGES, device, host });
    }
    if shape.state {
        builder = builder.state(StateConfig { device: Capacity::Unlimited, host: pages(4) });
    }
    let mut cache = builder.build().unwrap();
    let tokens = prompt(1, 4);
    let mut first = cache.request(NamespaceId::DEFAULT);
    assert_eq!(cache.alloc(&mut first, 4).unwrap(), Alloc::Granted);
    let state = cache.components(&first).unwrap().state;
    for (pool, i, page) in pages_of(&cache, &first, state) {
        for (id, plane) in planes_of(&cache, pool) {
            for layer in 0..plane.layers() {
                let bytes = vec![value(id, i, layer); plane.layer_bytes() as usize];
                device.write_rows(id, page, layer, 0, &bytes).unwrap();
            }
        }
    }
    let computed = cache.note_compute(0).unwrap();
    assert_eq!(computed, device.fence());
    cache.finish(first, &tokens, computed).unwrap();
    cache.tick(Time(1)).unwrap();
    device.finish_all();
    cache.tick(Time(2)).unwrap();
    let mut all = cache.request(NamespaceId::DEFAULT);
    assert_eq!(cache.alloc(&mut all, 8).unwrap(), Alloc::Granted);
    cache.abort(all, Fence::SETTLED).unwrap();
    let mut request = cache.request(NamespaceId::DEFAULT);
    let found = cache.match_prefix(&mut request, &tokens).unwrap();
    assert_eq!((found.device_tokens, found.host_tokens), (0, 4 * PAGE_TOKENS as u64));
    (cache, device, request, tokens)
}

#[test]
fn a_load_takes_what_its_budget_allows_or_nothing() {
    let (mut cache, device, mut request, _) = on_the_host(Shape::FULL);
    let over = LoadBack::Refused(Refusal::OverBudget);
    assert_eq!(cache.load_back_within(&mut request, 3).unwrap(), over);
    assert_eq!(cache.pages(&request).unwrap(), []);
    let started = LoadBack::Started { tokens: 4 * PAGE_TOKENS as u64 };
    assert_eq!(cache.load_back_within(&mut request, 4).unwrap(), started);
    device.finish_all();
    assert_eq!(cache.load_state(&request).unwrap(), LoadState::Ready);
}

/// A layer is there when the copy has brought it, and not before.
#[test]
fn layers_of_a_load_are_waited_for_one_by_one() {
    let (mut cache, device, mut request, _) = on_the_host(Shape::FULL);
    assert!(cache.wait_layer(&request, 0, 0).unwrap(), "nothing is being loaded");
    assert!(matches!(cache.load_back(&mut request).unwrap(), LoadBack::Started { .. }));
    let load = device.runnable()[0];
    // Four pages in each of three layers.
    for copied in 0..12 {
        let there = |cache: &mut PrefixCache, layer| cache.wait_layer(&request, layer, 0).unwrap();
        assert_eq!(there(&mut cache, 0), copied >= 4, "{copied}");
        assert!(!there(&mut cache, 2), "{copied}");
        device.step(load, 0);
    }
    device.finish_all();
    assert_eq!(cache.load_state(&request).unwrap(), LoadState::Ready);
    assert!(cache.wait_layer(&request, 2, 0).unwrap());
    let fault = sapwood::backend::device::CopyFault { code: 7, quiescent: true };
    let (mut cache, device, mut request, _) = on_the_host(Shape::FULL);
    device.inject(sapwood::backend::device::SoftFault { skip_jobs: 0, after_units: 0, fault });
    assert!(matches!(cache.load_back(&mut request).unwrap(), LoadBack::Started { .. }));
    device.finish_all();
    assert_eq!(cache.load_state(&request).unwrap(), LoadState::Failed);
    match cache.wait_layer(&request, 0, 0) {
        Err(ComputeError::Core(CoreError::LoadFailed)) => {}
        other => panic!("{other:?}"),
    }
}

/// The window and the state of a layer are there with its pages, in the pages that the request is shown when the load
/// begins: it can compute layer by layer on all of them.
#[test]
fn windows_and_states_of_a_load_are_read_layer_by_layer() {
    for shape in Shape::EACH {
        let (mut cache, device, mut request, _) = on_the_host(shape);
        assert!(matches!(cache.load_back(&mut request).unwrap(), LoadBack::Started { .. }));
        let parts = cache.components(&request).unwrap();
        assert!(parts.complete);
        let shown = pages_of(&cache, &request, parts.state_in);
        let components = if shape.window { SPAN_PAGES } else { 0 } + u32::from(shape.state);
        assert_eq!(shown.len(), 4 + components as usize, "{shape:?}");
        let (load, layers) = (device.runnable()[0], cache.geometry().model_layers());
        for copied in 0..shown.len() * layers as usize {
            for layer in 0..layers {
                let there = cache.wait_layer(&request, layer, 0).unwrap();
                assert_eq!(there, copied >= shown.len() * (layer as usize + 1), "{shape:?} {copied} {layer}");
                same_layer(&cache, &device, &shown, layer, there);
            }
            device.step(load, 0);
        }
        assert_eq!(cache.load_state(&request).unwrap(), LoadState::Ready);
        assert_eq!(cache.components(&request).unwrap(), parts);
        (0..layers).for_each(|layer| same_layer(&cache, &device, &shown, layer, true));
        cache.abort(request, Fence::SETTLED).unwrap();
        assert!(cache.sanity().is_empty());
    }
}

/// What the pages hold on a layer of the model: what was computed for them, if it is there.
fn same_layer(
    cache: &PrefixCache,
    device: &SoftDevice,
    shown: &[(PoolKind, usize, PageId)],
    layer: u32,
    there: bool,
) {
    for &(pool, i, page) in shown {
        for (id, plane) in planes_of(cache, pool) {
            for mine in plane.layers_within(layer, layer + 1) {
                let mut bytes = vec![0; plane.layer_bytes() as usize];
                let read = device.read_rows(id, page, mine, 0, &mut bytes);
                assert_eq!(read.is_ok(), there, "{pool:?} {page:?} layer {layer}: {read:?}");
                assert!(!there || bytes.iter().all(|&byte| byte == value(id, i, mine)), "{pool:?} {page:?}");
            }
        }
    }
}

/// What the store holds is read where that was measured to be faster than computing it.
#[test]
fn rates_decide_whether_a_prefetch_is_worth_it() {
    let store: Arc<dyn Store> = Arc::new(MemStore::new(1 << 20));
    let tokens = prompt(1, 6);
    let mut before = Engine::new(Shape::FULL, Sizes::AMPLE, Some(Arc::clone(&store)));
    before.run(&tokens);
    before.settle();
    drop(before);
    for (load_ns_per_token, reason) in [(10_000_000_000, Some(Refusal::SlowerThanCompute)), (1, None)] {
        let (b, device) = builder(Shape::FULL, Sizes::AMPLE, (0, 1), Some(Arc::clone(&store)));
        let mut engine = Engine::of(b.build().unwrap(), device, 0);
        engine.cache.set_prefetch_policy(PrefetchPolicy::Adaptive);
        engine.cache.set_rates(Rates {
            compute_ns_per_token: 1_000_000,
            load_ns_per_token,
            load_latency_us: 0,
        });
        let mut request = engine.cache.request(NamespaceId::DEFAULT);
        let started = engine.cache.prefetch(&mut request, &tokens).unwrap();
        assert!(matches!(started, Prefetch::Started { .. }));
        let mut end = None;
        engine.turn("prefetch", |c| match c.poll_prefetch(&mut request).unwrap() {
            PrefetchState::Ended(ended) => {
                end = Some(ended);
                true
            }
            _ => false,
        });
        let end = end.unwrap();
        assert_eq!((end.hit_tokens, end.reason), (5 * PAGE_TOKENS as u64, reason));
    }
}

/// A prompt that the device always has is never read from the store; it stays there all the same, because the store is told.
#[test]
fn what_is_hit_on_the_device_keeps_its_place_in_the_store() {
    // A store moves what is used as far as a quarter of a segment holds it, here four pages, in the order of the file. A
    // fifth would leave it to the store's threads, which write a batch in any order, which of the pages is lost.
    const USED_PAGES: usize = 4;
    let dir = tempfile::tempdir().unwrap();
    let mut config = FileConfig::new(dir.path().join("s"), 512 << 10);
    (config.segment_bytes, config.free_bytes_min) = (128 << 10, 0);
    assert!(config.segment_bytes / 4 >= USED_PAGES as u64 * 2 * u64::from(config.align));
    let new = || {
        let store: Arc<dyn Store> = Arc::new(FileStore::open(config.clone()).unwrap());
        Engine::new(Shape::FULL, Sizes::AMPLE, Some(store))
    };
    let (used, once) = (prompt(1, USED_PAGES), |n| prompt(n, 5));
    let mut engine = new();
    for n in 2..62 {
        // Told again after five seconds at the earliest.
        engine.cache.tick(Time(u64::from(n) * 6_000_000)).unwrap();
        engine.run(&used);
        engine.run(&once(n));
        engine.settle();
    }
    assert_eq!(engine.cache.bytes_moved().store_get, 0);
    engine.cache.detach_store(std::time::Duration::from_secs(60)).unwrap().unwrap();
    drop(engine);
    let mut after = new();
    // The last page of a prompt is computed, whatever is there.
    assert_eq!((after.run(&used).pages, after.run(&once(2)).pages), (USED_PAGES - 1, 0));
}

/// sgl#26792 (B30): weights were updated in place, device and host were flushed, and the next request was served from the
/// store with what the old weights had computed. A new epoch asks under other names; the old ones stay for whoever still
/// runs the old weights.
#[test]
fn nothing_of_the_old_weights_is_found_after_an_update() {
    for shape in Shape::EACH {
        let store: Arc<dyn Store> = Arc::new(MemStore::new(1 << 22));
        let mut engine = Engine::new(shape, Sizes::AMPLE, Some(Arc::clone(&store)));
        let (old, new) = (prompt(1, 6), prompt(2, 6));
        engine.run(&old);
        engine.settle();
        // A request that computes on the old weights is in the way.
        let namespace = engine.cache.namespace(&Namespace::default()).unwrap();
        let request = engine.cache.request(namespace);
        let in_the_way = engine.cache.set_weights_epoch(1, Duration::from_secs(10));
        let in_use = CacheError::Core(CoreError::InUse { requests: 1, operations: 0 });
        assert!(matches!(in_the_way, Err(TierError::Cache(e)) if e == in_use));
        engine.cache.abort(request, Fence::SETTLED).unwrap();
        assert_eq!(engine.run(&old).device_tokens, 24);

        // Its writes to host and store are in flight at the update.
        engine.run(&new);
        engine.cache.set_weights_epoch(1, Duration::from_secs(10)).unwrap();
        engine.weights = 1;
        for tokens in [&old, &new] {
            let found = engine.run(tokens);
            assert_eq!((found.device_tokens, found.host_tokens, found.pages), (0, 0, 0), "{shape:?}");
        }
        engine.settle();

        // Another instance of the old weights still finds what it wrote, one of the new weights what those did.
        let mut before = Engine::new(shape, Sizes::AMPLE, Some(Arc::clone(&store)));
        assert!(before.run(&old).host_tokens > 0, "{shape:?}");
        before.cache.set_weights_epoch(1, Duration::from_secs(10)).unwrap();
        before.weights = 1;
        assert!(before.run(&old).host_tokens > 0, "{shape:?}");
    }
}

/// Pages that a second cache finds of a prompt in the store of one that had it from the start: where a state is kept decides.
fn engine_alone(shape: Shape, tokens: &[u32]) -> usize {
    let store: Arc<dyn Store> = Arc::new(MemStore::new(1 << 22));
    let mut engine = Engine::new(shape, Sizes::AMPLE, Some(Arc::clone(&store)));
    engine.run(tokens);
    engine.settle();
    let pages = Engine::new(shape, Sizes::AMPLE, Some(store)).run(tokens).pages;
    assert!(pages > 0, "{shape:?}");
    pages
}

/// The host tier goes while requests run, its memory with it, and comes back in another size; the bytes that the model is
/// handed are right throughout.
#[test]
fn the_host_tier_goes_and_comes_while_requests_run() {
    for shape in Shape::EACH {
        let store: Arc<dyn Store> = Arc::new(MemStore::new(1 << 22));
        let mut engine = Engine::new(shape, Sizes::AMPLE, Some(Arc::clone(&store)));
        let (old, new) = (prompt(1, 6), prompt(2, 6));
        engine.run(&old);
        engine.settle();
        engine.run(&prompt(3, 6));
        let mut alive = engine.cache.request(NamespaceId::DEFAULT);
        engine.cache.match_prefix(&mut alive, &old).unwrap();
        let mapped = engine.cache.host_memory().pages(PoolKind::Full);
        let (tier, taken) = engine.cache.detach_host(LONG).unwrap();
        assert!(Arc::ptr_eq(&taken.unwrap(), &store));
        assert_eq!((mapped, engine.cache.host_memory().pages(PoolKind::Full)), (96, 0));
        assert_eq!(engine.run(&old).device_tokens, 24, "{shape:?}: the device serves on");
        engine.run(&new);
        assert!(engine.cache.is_idle(), "nothing is copied anywhere");
        engine.cache.abort(alive, Fence::SETTLED).unwrap();
        assert!(matches!(
            engine.cache.attach_store(Arc::clone(&store)),
            Err(TierError::Cache(CacheError::Core(CoreError::Config(_))))
        ));

        let smaller = HostTier { pages: Capacity::Pages(48), ..tier };
        engine.cache.attach_host(smaller, Some(Arc::clone(&store))).unwrap();
        let again = engine.cache.attach_host(tier, None);
        assert!(matches!(again, Err(TierError::Cache(CacheError::Core(CoreError::HostPresent)))));
        engine.run(&new);
        engine.settle();
        // What was computed without a host tier has reached the store.
        let mut other = Engine::new(shape, Sizes::AMPLE, Some(store));
        for tokens in [&new, &old] {
            assert!(other.run(tokens).pages >= engine_alone(shape, tokens), "{shape:?}");
        }

        // Another store behind the next host tier: that the first one has it counts for nothing.
        let second: Arc<dyn Store> = Arc::new(MemStore::new(1 << 22));
        let (tier, _) = engine.cache.detach_host(LONG).unwrap();
        engine.cache.attach_host(tier, Some(Arc::clone(&second))).unwrap();
        engine.run(&new);
        engine.settle();
        let mut other = Engine::new(shape, Sizes::AMPLE, Some(second));
        assert!(other.run(&new).pages >= engine_alone(shape, &new), "{shape:?}");
    }
}

/// A store comes to a cache that was built without one: what the host holds is stored under the names that another cache
/// asks for. A second store gets it, too.
#[test]
fn a_store_comes_to_a_cache_that_had_none() {
    for shape in Shape::EACH {
        let mut engine = Engine::new(shape, Sizes::AMPLE, None);
        let tokens = prompt(1, 6);
        engine.run(&tokens);
        engine.settle();
        for _ in 0..2 {
            let store: Arc<dyn Store> = Arc::new(MemStore::new(1 << 22));
            assert!(engine.cache.attach_store(Arc::clone(&store)).unwrap());
            engine.settle();
            let put = engine.cache.bytes_moved().store_put;
            // The same one again: it is known to have everything.
            engine.cache.detach_store(LONG).unwrap().unwrap();
            assert!(engine.cache.attach_store(Arc::clone(&store)).unwrap());
            engine.settle();
            assert_eq!(engine.cache.bytes_moved().store_put, put, "{shape:?}");
            engine.cache.detach_store(LONG).unwrap().unwrap();
            let mut other = Engine::new(shape, Sizes::AMPLE, Some(store));
            assert_eq!(other.run(&tokens).pages, engine_alone(shape, &tokens), "{shape:?}");
        }
    }
}
