//! A model with any of the pools, small pools, and requests that check every byte they are handed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sapwood::backend::device::SoftDevice;
use sapwood::backend::identity::Shard;
use sapwood::backend::store::Store;
use sapwood::base::{PageId, Tier, Time};
use sapwood::engine::{Builder, MissingPlane, ModelIdentity, PrefixCache, Request};
use sapwood::key::Namespace;
use sapwood::pool::{Capacities, Capacity, Geometry, Plane, PlaneId, PlaneKind, PoolKind};
use sapwood::tiers::{
    Alloc, LoadBack, LoadState, Prefetch, PrefetchConfig, PrefetchPolicy, PrefetchState, StateConfig,
    StoreConfig, WindowConfig, WritePolicy,
};
use sapwood::tree::Component;

pub(crate) const PAGE_TOKENS: usize = 4;
pub(crate) const SPAN_PAGES: u32 = 2;

/// What a model has beside full attention, and whether every pool also holds planes of a draft.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Shape {
    pub(crate) window: bool,
    pub(crate) state: bool,
    pub(crate) draft: bool,
}

impl Shape {
    pub(crate) const FULL: Shape = Shape { window: false, state: false, draft: false };
    pub(crate) const ALL: Shape = Shape { window: true, state: true, draft: false };
    pub(crate) const EACH: [Shape; 4] = [
        Shape::FULL,
        Shape { window: true, ..Shape::FULL },
        Shape { state: true, ..Shape::FULL },
        Shape::ALL,
    ];

    pub(crate) fn with_draft(self) -> Shape {
        Shape { draft: true, ..self }
    }

    pub(crate) fn geometry(self) -> Arc<Geometry> {
        let mut planes = vec![Plane::target(2, 64).on_model_layers([0, 2])];
        let draft = |kind, parts| Plane::new(kind, 1, parts, 24).on_model_layers([4]);
        let drafts = |pool| {
            [(PlaneKind::Draft, 2), (PlaneKind::DraftIndex, 1)].map(|(k, p)| draft(k, p).in_pool(pool))
        };
        if self.draft {
            planes.extend(drafts(PoolKind::Full));
        }
        if self.window {
            planes.push(Plane::target(2, 32).in_pool(PoolKind::Window).on_model_layers([1, 3]));
            planes.extend(drafts(PoolKind::Window).into_iter().filter(|_| self.draft));
        }
        if self.state {
            planes.push(Plane::state(1, 200).on_model_layers([3]));
            planes.extend(drafts(PoolKind::State).into_iter().filter(|_| self.draft));
        }
        let geometry = Geometry::builder(PAGE_TOKENS as u32);
        Arc::new(planes.into_iter().fold(geometry, |g, plane| g.plane(plane)).build().unwrap())
    }
}

/// Pages of the pools, of device and host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) device: [u32; 3],
    pub(crate) host: [u32; 3],
}

impl Sizes {
    pub(crate) const AMPLE: Sizes = Sizes { device: [64, 64, 32], host: [96, 96, 48] };
    /// A few prompts fit the device, a few more the host.
    pub(crate) const TIGHT: Sizes = Sizes { device: [20, 14, 5], host: [44, 30, 16] };
}

pub(crate) fn builder(
    shape: Shape,
    sizes: Sizes,
    (rank, ranks): (u32, u32),
    store: Option<Arc<dyn Store>>,
) -> (Builder, SoftDevice) {
    let geometry = shape.geometry();
    let pages = Capacity::Pages;
    let [full, window, state] = sizes.device.map(pages);
    let device = SoftDevice::threaded(Arc::clone(&geometry), Capacities { full, window, state }).unwrap();
    let shard = Shard::Rank { tensor: (rank, ranks), pipeline: (0, 1), context: (0, 1) };
    let prefetch = PrefetchConfig {
        policy: PrefetchPolicy::WaitComplete,
        threshold_tokens: 1,
        batch_pages: 3,
        window_batches: 2,
        ..PrefetchConfig::default()
    };
    let mut builder = PrefixCache::builder(geometry)
        .device(device.clone())
        .host_pages(pages(sizes.host[0]))
        .identity(ModelIdentity { shard, ..ModelIdentity::whole("hybrid", "1") })
        .write_policy(WritePolicy::WriteThrough { threshold: 1 })
        .prefetch(prefetch)
        .store_config(StoreConfig { retry_ms: 1, ..StoreConfig::default() });
    if shape.window {
        let (device, host) = (Capacity::Unlimited, pages(sizes.host[1]));
        builder = builder.window(WindowConfig { span_pages: SPAN_PAGES, device, host });
    }
    if shape.state {
        builder = builder.state(StateConfig { device: Capacity::Unlimited, host: pages(sizes.host[2]) });
    }
    // Whatever is read although nobody wrote it shows.
    let memory = device.clone();
    builder = builder.on_free(move |tier, pool, page| {
        if tier == Tier::Device {
            let _ = memory.poison(pool, page);
        }
    });
    if let Some(store) = store {
        builder = builder.store(store);
    }
    (builder, device)
}

pub(crate) struct Engine {
    pub(crate) cache: PrefixCache,
    pub(crate) device: SoftDevice,
    rank: u32,
    /// What is computed depends on it.
    pub(crate) weights: u64,
    now: Instant,
}

/// What a request found before it computed.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Found {
    pub(crate) device_tokens: u64,
    pub(crate) host_tokens: u64,
    pub(crate) pages: usize,
    pub(crate) missing: Vec<MissingPlane>,
}

impl Engine {
    pub(crate) fn new(shape: Shape, sizes: Sizes, store: Option<Arc<dyn Store>>) -> Engine {
        let (builder, device) = builder(shape, sizes, (0, 1), store);
        Engine::of(builder.build().unwrap(), device, 0)
    }

    pub(crate) fn of(cache: PrefixCache, device: SoftDevice, rank: u32) -> Engine {
        Engine { cache, device, rank, weights: 0, now: Instant::now() }
    }

    pub(crate) fn turn(&mut self, what: &str, mut done: impl FnMut(&mut PrefixCache) -> bool) {
        let end = Instant::now() + Duration::from_secs(60);
        while !done(&mut self.cache) {
            assert!(Instant::now() < end, "does not come: {what}");
            std::thread::sleep(Duration::from_micros(200));
            self.cache.tick(Time(self.now.elapsed().as_micros() as u64 + 1)).unwrap();
        }
    }

    /// Opens a request and brings everything that the tiers have of its prompt. Every byte is checked.
    pub(crate) fn open(&mut self, tokens: &[u32]) -> (Request, Found) {
        let namespace = self.cache.namespace(&Namespace::default()).unwrap();
        let mut request = self.cache.request(namespace);
        let mut m = self.cache.match_prefix(&mut request, tokens).unwrap();
        if let Prefetch::Started { .. } = self.cache.prefetch(&mut request, tokens).unwrap() {
            self.turn("prefetch", |c| {
                !matches!(c.poll_prefetch(&mut request).unwrap(), PrefetchState::Pending)
            });
            m = self.cache.match_prefix(&mut request, tokens).unwrap();
        }
        if let LoadBack::Started { .. } = self.cache.load_back(&mut request).unwrap() {
            let told = |c: &PrefixCache| {
                (
                    c.components(&request).unwrap(),
                    c.missing_planes(&request).unwrap(),
                    c.pages(&request).unwrap().to_vec(),
                )
            };
            let at_once = told(&self.cache);
            self.turn("load", |c| match c.load_state(&request).unwrap() {
                LoadState::Ready => true,
                LoadState::Pending { .. } => false,
                LoadState::Failed => panic!("a load failed"),
            });
            assert_eq!(told(&self.cache), at_once, "what a load brings is known when it begins");
        }
        let pages = self.cache.pages(&request).unwrap().len();
        let missing = self.cache.missing_planes(&request).unwrap();
        self.check(&request, tokens, &missing);
        let found = Found { device_tokens: m.device_tokens, host_tokens: m.host_tokens, pages, missing };
        (request, found)
    }

    /// Computes up to the end of `tokens`, in chunks of pages, and publishes each.
    pub(crate) fn compute(&mut self, request: &mut Request, tokens: &[u32], chunk_pages: usize) {
        loop {
            let have = self.cache.pages(request).unwrap().len();
            let want = tokens.len().div_ceil(PAGE_TOKENS).min(have + chunk_pages);
            if want == have {
                return;
            }
            self.turn("room", |c| c.alloc(request, (want - have) as u32).unwrap() == Alloc::Granted);
            let end = tokens.len().min(want * PAGE_TOKENS);
            self.write(request, &tokens[..end], have);
            let fence = self.device.fence();
            self.cache.checkpoint(request, &tokens[..end], fence).unwrap();
        }
    }

    /// A request from its arrival to its end.
    pub(crate) fn run(&mut self, tokens: &[u32]) -> Found {
        let (mut request, found) = self.open(tokens);
        self.compute(&mut request, tokens, 3);
        let fence = self.device.fence();
        self.cache.finish(request, tokens, fence).unwrap();
        found
    }

    /// Waits until nothing is in flight; then nothing is broken and no page of any pool is lost.
    pub(crate) fn settle(&mut self) {
        self.turn("idle", |c| c.is_idle());
        assert!(self.cache.sanity().is_empty(), "{:?}", self.cache.sanity());
        for tier in [Tier::Device, Tier::Host] {
            let counts = [
                self.cache.page_counts(tier),
                self.cache.component_counts(Component::Window, tier),
                self.cache.component_counts(Component::State, tier),
            ];
            for counts in counts {
                assert_eq!((counts.leaked_pages, counts.request_pages, counts.in_flight_pages), (0, 0, 0));
            }
        }
    }

    fn planes(&self, pool: PoolKind) -> Vec<(PlaneId, PlaneKind, usize)> {
        let planes = (0..).map(PlaneId).zip(self.cache.geometry().planes());
        let of_pool = planes.filter(|(_, plane)| plane.pool() == pool);
        of_pool.map(|(id, plane)| (id, plane.kind(), plane.page_bytes() as usize)).collect()
    }

    /// Pages that the request may read, with the page of the prompt at whose end each lies.
    fn readable(&self, request: &Request) -> Vec<(PoolKind, usize, PageId)> {
        let table = self.cache.pages(request).unwrap();
        let parts = self.cache.components(request).unwrap();
        assert!(parts.complete);
        let full = table.iter().enumerate().map(|(i, &page)| (PoolKind::Full, i, page));
        let window = parts.window.iter().enumerate();
        let window = window.map(|(i, &page)| (PoolKind::Window, parts.window_from as usize + i, page));
        let state = parts.state_in.map(|page| (PoolKind::State, table.len() - 1, page));
        full.chain(window).chain(state).collect()
    }

    fn check(&self, request: &Request, tokens: &[u32], missing: &[MissingPlane]) {
        let readable = self.readable(request);
        let pages = self.cache.pages(request).unwrap().len();
        let has = |pool| readable.iter().filter(|(p, ..)| *p == pool).count();
        if pages > 0 && self.cache.geometry().has_pool(PoolKind::Window) {
            assert_eq!(has(PoolKind::Window), pages.min(SPAN_PAGES as usize), "the whole window");
        }
        if pages > 0 && self.cache.geometry().has_pool(PoolKind::State) {
            assert_eq!(has(PoolKind::State), 1, "a state to go on from");
        }
        let mut zeroed: Vec<MissingPlane> = Vec::new();
        for (pool, i, page) in readable {
            for (plane, kind, bytes) in self.planes(pool) {
                let mut got = vec![0; bytes];
                self.device.memory().read(plane, page, 0, &mut got).unwrap();
                if got.iter().all(|&b| b == 0) {
                    match zeroed.iter_mut().find(|m| (m.kind, m.pool) == (kind, pool)) {
                        Some(m) => m.pages += 1,
                        None => zeroed.push(MissingPlane { kind, pool, pages: 1 }),
                    }
                } else {
                    let stamp = self.stamp(plane, &tokens[..(i + 1) * PAGE_TOKENS], bytes);
                    assert!(got == stamp, "{pool:?} {plane:?} {page:?}, page {i} of the prompt");
                }
            }
        }
        let by_name = |mut list: Vec<MissingPlane>| {
            list.sort_by_key(|m| (m.kind, m.pool));
            list
        };
        assert_eq!(by_name(zeroed), by_name(missing.to_vec()), "what is missing is said, and only that");
    }

    /// What the model computes from page `first` of the prompt on.
    fn write(&self, request: &Request, tokens: &[u32], first: usize) {
        let table = self.cache.pages(request).unwrap();
        let parts = self.cache.components(request).unwrap();
        let put = |pool, page, prefix: &[u32]| {
            for (plane, _, bytes) in self.planes(pool) {
                let stamp = self.stamp(plane, prefix, bytes);
                self.device.memory().write(plane, page, 0, &stamp).unwrap();
            }
        };
        for (i, &page) in table.iter().enumerate().skip(first) {
            let prefix = &tokens[..tokens.len().min((i + 1) * PAGE_TOKENS)];
            put(PoolKind::Full, page, prefix);
            if let Some(&page) = i.checked_sub(parts.window_from as usize).and_then(|w| parts.window.get(w)) {
                put(PoolKind::Window, page, prefix);
            }
        }
        if let Some(page) = parts.state {
            put(PoolKind::State, page, tokens);
        }
    }

    /// Bytes that only this plane of this prefix on this rank has, none of them zero.
    fn stamp(&self, plane: PlaneId, prefix: &[u32], bytes: usize) -> Vec<u8> {
        let seed = prefix
            .iter()
            .fold(0xcbf2_9ce4_8422_2325_u64, |h, &t| (h ^ u64::from(t)).wrapping_mul(0x0100_0000_01b3));
        let mut x = seed ^ u64::from(plane.0) << 32 ^ u64::from(self.rank) << 40 ^ self.weights << 48 | 1;
        (0..bytes)
            .map(|_| {
                x ^= x << 13;
                x ^= x >> 7;
                x ^= x << 17;
                (x % 255) as u8 + 1
            })
            .collect()
    }
}

/// A prompt of so many pages.
pub(crate) fn prompt(n: u32, pages: usize) -> Vec<u32> {
    (0..(pages * PAGE_TOKENS) as u32).map(|i| n * 100_000 + i).collect()
}

/// A seeded choice of numbers below a bound.
pub(crate) struct Choices(pub(crate) u64);

impl Choices {
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}
