//! A cache on a software device whose pages carry stamps, and the life of one request in it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sapwood::backend::device::SoftDevice;
use sapwood::backend::identity::Shard;
use sapwood::backend::store::Store;
use sapwood::base::{PageId, Time};
use sapwood::engine::{Builder, ModelIdentity, PrefixCache, Request};
use sapwood::key::Namespace;
use sapwood::pool::{Capacities, Capacity, Geometry, Plane, PlaneId};
use sapwood::tiers::{
    Alloc, LoadBack, LoadState, Prefetch, PrefetchConfig, PrefetchPolicy, PrefetchState, WritePolicy,
};

pub(crate) const PAGE_TOKENS: usize = 4;
pub(crate) const DRAFT: PlaneId = PlaneId(1);

/// A model: a target, with or without a draft beside it.
pub(crate) fn geometry(draft: bool) -> Arc<Geometry> {
    let g = Geometry::builder(PAGE_TOKENS as u32).plane(Plane::target(3, 64));
    Arc::new(if draft { g.plane(Plane::draft(1, 32)) } else { g }.build().unwrap())
}

pub(crate) struct Engine {
    pub(crate) cache: PrefixCache,
    device: SoftDevice,
    rank: u32,
}

/// What a request found before it computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Found {
    pub(crate) pages: usize,
    pub(crate) without_draft: u32,
}

/// A builder for one rank of `ranks`.
pub(crate) fn builder(
    geometry: &Arc<Geometry>,
    (rank, ranks): (u32, u32),
    store: Option<Arc<dyn Store>>,
) -> (Builder, SoftDevice) {
    let pages = Capacity::Pages(64);
    let device = SoftDevice::threaded(Arc::clone(geometry), Capacities::full(pages)).unwrap();
    let shard = Shard::Rank { tensor: (rank, ranks), pipeline: (0, 1), context: (0, 1) };
    let prefetch = PrefetchConfig {
        policy: PrefetchPolicy::WaitComplete,
        threshold_tokens: 1,
        ..PrefetchConfig::default()
    };
    let mut builder = PrefixCache::builder(Arc::clone(geometry))
        .device(device.clone())
        .host_pages(pages)
        .identity(ModelIdentity { shard, ..ModelIdentity::whole("matrix", "1") })
        .write_policy(WritePolicy::WriteThrough { threshold: 1 })
        .prefetch(prefetch);
    if let Some(store) = store {
        builder = builder.store(store);
    }
    (builder, device)
}

impl Engine {
    pub(crate) fn new(geometry: &Arc<Geometry>, rank: (u32, u32), store: Option<Arc<dyn Store>>) -> Engine {
        let (builder, device) = builder(geometry, rank, store);
        Engine { cache: builder.build().unwrap(), device, rank: rank.0 }
    }

    pub(crate) fn of(cache: PrefixCache, device: SoftDevice, rank: u32) -> Engine {
        Engine { cache, device, rank }
    }

    fn turn(&mut self, what: &str, mut done: impl FnMut(&mut PrefixCache) -> bool) {
        let (start, end) = (Instant::now(), Instant::now() + Duration::from_secs(60));
        while !done(&mut self.cache) {
            assert!(Instant::now() < end, "does not come: {what}");
            std::thread::sleep(Duration::from_millis(1));
            self.cache.tick(Time(start.elapsed().as_micros() as u64 + 1)).unwrap();
        }
    }

    /// Runs a request: everything the tiers have is brought and checked byte by byte, the rest is computed and
    /// published, and what has to be stored is stored.
    pub(crate) fn run(&mut self, tokens: &[u32]) -> Found {
        let namespace = self.cache.namespace(&Namespace::default()).unwrap();
        let mut request = self.cache.request(namespace);
        self.cache.match_prefix(&mut request, tokens).unwrap();
        if let Prefetch::Started { .. } = self.cache.prefetch(&mut request, tokens).unwrap() {
            self.turn("prefetch", |c| {
                matches!(
                    c.poll_prefetch(&mut request).unwrap(),
                    PrefetchState::Ended(_) | PrefetchState::Idle
                )
            });
            self.cache.match_prefix(&mut request, tokens).unwrap();
        }
        if let LoadBack::Started { .. } = self.cache.load_back(&mut request).unwrap() {
            self.turn("load", |c| match c.load_state(&request).unwrap() {
                LoadState::Ready => true,
                LoadState::Pending { .. } => false,
                failed => panic!("{failed:?}"),
            });
        }
        let pages = self.cache.pages(&request).unwrap().len();
        let missing = self.cache.missing_planes(&request).unwrap();
        let without_draft = missing.iter().map(|m| m.pages).sum();
        self.check(&request, tokens, pages, without_draft == 0);
        let more = tokens.len() / PAGE_TOKENS - pages;
        let granted = self.cache.alloc(&mut request, more as u32).unwrap();
        assert_eq!(granted, Alloc::Granted);
        self.compute(&request, tokens, pages);
        let fence = self.device.fence();
        self.cache.finish(request, tokens, fence).unwrap();
        self.turn("idle", |c| c.is_idle());
        assert!(self.cache.sanity().is_empty(), "{:?}", self.cache.sanity());
        Found { pages, without_draft }
    }

    fn planes(&self) -> Vec<(PlaneId, usize)> {
        let planes = self.cache.geometry().planes().iter();
        (0..).map(PlaneId).zip(planes.map(|p| p.page_bytes() as usize)).collect()
    }

    fn check(&self, request: &Request, tokens: &[u32], pages: usize, draft_too: bool) {
        let table = self.cache.pages(request).unwrap();
        for (plane, bytes) in self.planes() {
            for (i, &page) in table.iter().take(pages).enumerate() {
                let want = self.stamp(plane, tokens, i, bytes);
                let got = self.read(plane, page, bytes);
                let zeroed = got.iter().all(|&b| b == 0);
                assert!(got == want || (plane == DRAFT && !draft_too && zeroed), "plane {plane:?} page {i}");
            }
        }
    }

    fn compute(&self, request: &Request, tokens: &[u32], first: usize) {
        let table = self.cache.pages(request).unwrap();
        for (plane, bytes) in self.planes() {
            for (i, &page) in table.iter().enumerate().skip(first) {
                let stamp = self.stamp(plane, tokens, i, bytes);
                self.device.memory().write(plane, page, 0, &stamp).unwrap();
            }
        }
    }

    fn read(&self, plane: PlaneId, page: PageId, bytes: usize) -> Vec<u8> {
        let mut out = vec![0; bytes];
        self.device.memory().read(plane, page, 0, &mut out).unwrap();
        out
    }

    /// Bytes that only this plane of this page of this prefix on this rank has, none of them zero.
    fn stamp(&self, plane: PlaneId, tokens: &[u32], page: usize, bytes: usize) -> Vec<u8> {
        let prefix = &tokens[..(page + 1) * PAGE_TOKENS];
        let seed = prefix
            .iter()
            .fold(0xcbf2_9ce4_8422_2325_u64, |h, &t| (h ^ u64::from(t)).wrapping_mul(0x0100_0000_01b3));
        let mut x = seed ^ u64::from(plane.0) << 32 ^ u64::from(self.rank) << 40 | 1;
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

/// Names of the pages of a prompt, as a rank without others stores them.
pub(crate) fn keys_of(
    tokens: &[u32],
    kind: sapwood::pool::PlaneKind,
) -> Vec<sapwood::backend::identity::StoreKey> {
    use sapwood::backend::identity::NamespaceDigest;
    use sapwood::key::{Key, hash_pages};
    let geometry = geometry(true);
    let plane = geometry.planes().iter().find(|p| p.kind() == kind).unwrap();
    let identity = ModelIdentity::whole("matrix", "1");
    let space = identity.descriptor(&geometry, plane).space(NamespaceDigest::DEFAULT).unwrap();
    let mut hashes = Vec::new();
    hash_pages(Key::new(sapwood::base::NamespaceId::DEFAULT, tokens), PAGE_TOKENS as u32, None, &mut hashes);
    hashes.iter().map(|h| space.key(&h.0)).collect()
}
