//! The page allocator beside its floor in the same run: 64 pages out, a random older 64 back, in a pool of a million; and
//! the extents of what it hands out. The floor does to memory what any allocator must: it reads and clears one bit of
//! ownership a page, pushes the pages on a stack, and takes as many off.
#![expect(clippy::unwrap_used, reason = "a bench that cannot go on should stop")]

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};

use sapwood::base::PageId;
use sapwood::pool::{PagePool, extents_of};

const PAGES: u32 = 1 << 20;
const BATCH: u32 = 64;

/// The same numbers for both.
fn next(x: &mut usize, n: usize) -> usize {
    *x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*x >> 33) % n
}

fn pool(c: &mut Criterion) {
    let mut group = c.benchmark_group("pool");
    group.sample_size(20).measurement_time(Duration::from_secs(1)).warm_up_time(Duration::from_millis(300));
    group.throughput(Throughput::Elements(u64::from(BATCH)));

    let mut owned = vec![u64::MAX; PAGES as usize / 64];
    let mut stack: Vec<PageId> = (0..BATCH).map(PageId).collect();
    let mut held: Vec<Vec<PageId>> =
        (1..PAGES / BATCH).map(|i| (i * BATCH..(i + 1) * BATCH).map(PageId).collect()).collect();
    let mut x = 1usize;
    group.bench_function("floor-64", |b| {
        b.iter(|| {
            let n = held.len();
            let old = &mut held[next(&mut x, n)];
            for &page in old.iter() {
                owned[page.0 as usize / 64] &= !(1 << (page.0 % 64));
            }
            stack.append(old);
            old.extend(stack.drain(stack.len() - BATCH as usize..));
            for &page in old.iter() {
                owned[page.0 as usize / 64] |= 1 << (page.0 % 64);
            }
        });
    });

    let mut pool = PagePool::new(PAGES);
    let mut held: Vec<Vec<PageId>> = Vec::new();
    for _ in 0..PAGES / BATCH - 1 {
        let mut pages = Vec::with_capacity(BATCH as usize);
        assert!(pool.alloc(BATCH, &mut pages));
        held.push(pages);
    }
    let mut x = 1usize;
    group.bench_function("alloc-free-64", |b| {
        b.iter(|| {
            let n = held.len();
            let old = &mut held[next(&mut x, n)];
            pool.free(old).unwrap();
            old.clear();
            assert!(pool.alloc(BATCH, old));
        });
    });

    // Reading the list once.
    group.bench_function("extents-floor-64", |b| {
        b.iter(|| black_box(held[7].iter().fold(0u32, |sum, page| sum.wrapping_add(page.0))));
    });
    group.bench_function("extents-of-64", |b| b.iter(|| black_box(extents_of(&held[7])).count()));
    group.finish();
}

criterion_group!(benches, pool);
criterion_main!(benches);
