//! The page allocator: 64 pages out, a random older 64 back, in a pool of a million; and the extents of what it hands out.
#![expect(clippy::unwrap_used, reason = "a bench that cannot go on should stop")]

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};

use sapwood::base::PageId;
use sapwood::pool::{PagePool, extents_of};

fn pool(c: &mut Criterion) {
    let mut group = c.benchmark_group("pool");
    group.sample_size(20).measurement_time(Duration::from_secs(1)).warm_up_time(Duration::from_millis(300));
    group.throughput(Throughput::Elements(64));
    let mut pool = PagePool::new(1 << 20);
    let mut held: Vec<Vec<PageId>> = Vec::new();
    for _ in 0..(1 << 20) / 64 - 1 {
        let mut pages = Vec::with_capacity(64);
        assert!(pool.alloc(64, &mut pages));
        held.push(pages);
    }
    let mut x = 1usize;
    group.bench_function("alloc-free-64", |b| {
        b.iter(|| {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let n = held.len();
            let old = &mut held[(x >> 33) % n];
            pool.free(old).unwrap();
            old.clear();
            assert!(pool.alloc(64, old));
        });
    });
    group.bench_function("extents-of-64", |b| b.iter(|| black_box(extents_of(&held[7])).count()));
    group.finish();
}

criterion_group!(benches, pool);
criterion_main!(benches);
