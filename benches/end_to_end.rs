//! The whole cache as a scheduler uses it: what a turn of a chat costs its thread, and how fast pages come back from the
//! host and from a store, beside one memcpy of the same bytes in the same run.
//!
//! `cargo bench --bench end_to_end`. The device is host memory, so a load-back is at best a memcpy here; on a real link
//! the copy engines decide (`benches/gpu`).
#![expect(clippy::unwrap_used, reason = "a bench that cannot go on should stop")]

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};

use sapwood::backend::device::SoftDevice;
use sapwood::backend::store::file::{FileConfig, FileStore};
use sapwood::base::{Fence, NamespaceId, Time};
use sapwood::engine::{PrefixCache, Request};
use sapwood::pool::{Capacities, Capacity, Geometry, Plane};
use sapwood::tiers::{Alloc, LoadBack, LoadState, Prefetch, PrefetchState, WritePolicy};

const PAGE: usize = 64;
/// 4 layers of K and V, 1 KiB each a token: 512 KiB a page, the proportions of a model with grouped queries.
const PAGE_BYTES: usize = PAGE * 4 * 2 * 1024;
/// Tokens of the prompt that is brought back: 32 pages, 16 MiB.
const PROMPT: usize = 32 * PAGE;

fn prompt(seed: u64, n: usize) -> Vec<u32> {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x % 128_000) as u32
    };
    (0..n).map(|_| next()).collect()
}

struct Server {
    cache: PrefixCache,
    started: Instant,
}

impl Server {
    fn new(device_pages: u32, host_pages: u32, store: Option<FileStore>) -> Server {
        let geometry =
            Arc::new(Geometry::builder(PAGE as u32).plane(Plane::target(4, 1024)).build().unwrap());
        let pages = Capacities::full(Capacity::Pages(device_pages));
        let device = SoftDevice::threaded(Arc::clone(&geometry), pages).unwrap();
        let mut builder = PrefixCache::builder(geometry).device(device);
        if host_pages > 0 {
            builder = builder
                .host_pages(Capacity::Pages(host_pages))
                .write_policy(WritePolicy::WriteThrough { threshold: 1 });
        }
        if let Some(store) = store {
            builder = builder.store(Arc::new(store));
        }
        Server { cache: builder.build().unwrap(), started: Instant::now() }
    }

    fn tick(&mut self) {
        self.cache.tick(Time(self.started.elapsed().as_micros() as u64)).unwrap();
    }

    /// Everything a scheduler asks of the cache for one turn of a chat; nothing is computed.
    fn turn(&mut self, tokens: &[u32]) {
        self.tick();
        let mut request = self.cache.request(NamespaceId::DEFAULT);
        self.cache.match_prefix(&mut request, &tokens[..tokens.len() - 1]).unwrap();
        let have = self.cache.pages(&request).unwrap().len();
        self.grant(&mut request, tokens.len().div_ceil(PAGE) - have);
        self.cache.finish(request, tokens, Fence::SETTLED).unwrap();
    }

    fn grant(&mut self, request: &mut Request, pages: usize) {
        while self.cache.alloc(request, pages as u32).unwrap() != Alloc::Granted {
            std::thread::yield_now();
            self.tick();
        }
    }

    fn settle(&mut self) {
        while !self.cache.is_idle() {
            std::thread::yield_now();
            self.tick();
        }
    }

    /// Pushes everything unlocked off the device.
    fn flood(&mut self, seed: u64, pages: usize) {
        self.turn(&prompt(seed, pages * PAGE));
        self.settle();
    }

    /// Floods the device (and a small host), then times the way back of `tokens`.
    fn timed_restore(&mut self, tokens: &[u32], seed: &mut u64, from_store: bool) -> Duration {
        for _ in 0..if from_store { 4 } else { 1 } {
            *seed += 1;
            self.flood(*seed, 64);
        }
        let start = Instant::now();
        if from_store {
            self.fetch(tokens);
        }
        self.restore(tokens);
        start.elapsed()
    }

    /// Brings `tokens` from the store into the host.
    fn fetch(&mut self, tokens: &[u32]) {
        let mut request = self.cache.request(NamespaceId::DEFAULT);
        let started = self.cache.prefetch(&mut request, tokens).unwrap();
        assert!(matches!(started, Prefetch::Started { .. }), "{started:?}");
        loop {
            if let PrefetchState::Ended(end) = self.cache.poll_prefetch(&mut request).unwrap() {
                assert_eq!(end.loaded_tokens, PROMPT as u64, "{end:?} {started:?}");
                return;
            }
            std::thread::yield_now();
            self.tick();
        }
    }

    /// A request for `tokens` whose pages are all on the device at the end.
    fn restore(&mut self, tokens: &[u32]) {
        let mut request = self.cache.request(NamespaceId::DEFAULT);
        self.cache.match_prefix(&mut request, tokens).unwrap();
        let LoadBack::Started { tokens } = self.cache.load_back(&mut request).unwrap() else {
            panic!("nothing to load");
        };
        assert_eq!(tokens as usize, PROMPT);
        while self.cache.load_state(&request).unwrap() != LoadState::Ready {
            std::thread::yield_now();
            self.tick();
        }
    }
}

fn turns(c: &mut Criterion) {
    let mut group = c.benchmark_group("end_to_end/turn");
    group.sample_size(20).measurement_time(Duration::from_secs(2)).warm_up_time(Duration::from_millis(500));
    let chats: Vec<Vec<u32>> = (0..64).map(|chat| prompt(chat + 1, 40 * PAGE)).collect();
    for (name, host_pages) in [("device", 0), ("device-and-host", 1_024)] {
        let mut server = Server::new(1_024, host_pages, None);
        let mut n = 0;
        // Turns of two new pages over 20 to 40 pages of history, at capacity.
        group.bench_function(name, |b| {
            b.iter(|| {
                let (chat, turn) = (n % chats.len(), n / chats.len() % 10);
                server.turn(&chats[chat][..(22 + 2 * turn) * PAGE]);
                n += 1;
            });
        });
        server.settle();
        assert!(server.cache.sanity().is_empty());
    }
    group.finish();
}

fn restores(c: &mut Criterion) {
    let mut group = c.benchmark_group("end_to_end/bring-back");
    group.sample_size(20).measurement_time(Duration::from_secs(3)).warm_up_time(Duration::from_millis(500));
    group.throughput(Throughput::Bytes((PROMPT / PAGE * PAGE_BYTES) as u64));
    let (from, mut to) = (vec![1u8; PROMPT / PAGE * PAGE_BYTES], vec![2u8; PROMPT / PAGE * PAGE_BYTES]);
    group.bench_function("floor-memcpy", |b| b.iter(|| black_box(&mut to).copy_from_slice(black_box(&from))));

    // One token more than whole pages: one at least has to be computed, so the last page would not be fetched.
    let tokens = prompt(77, PROMPT + 1);
    let mut server = Server::new(64, 1_024, None);
    server.turn(&tokens);
    server.settle();
    let mut seed = 1_000;
    group.bench_function("from-host", |b| {
        b.iter_custom(|n| (0..n).map(|_| server.timed_restore(&tokens, &mut seed, false)).sum());
    });

    // A host that forgets between two uses, so that every page comes through the store.
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(FileConfig::new(dir.path(), 1 << 30)).unwrap();
    let mut server = Server::new(64, 160, Some(store));
    server.turn(&tokens);
    server.settle();
    group.bench_function("from-file-store", |b| {
        b.iter_custom(|n| (0..n).map(|_| server.timed_restore(&tokens, &mut seed, true)).sum());
    });
    group.finish();
}

criterion_group!(benches, turns, restores);
criterion_main!(benches);
