//! The tree at work, beside its floor in the same run: comparing the same tokens as 4-byte words and writing the same page
//! list. Workloads: W1 whole look-ups of 32,768 tokens; W2 turns of a chat; W4 misses at capacity; W5 sessions of ten steps
//! in trees of up to a million nodes; eviction by leaves of the tree. See `docs/PERFORMANCE.md` for how to read them.
#![expect(clippy::unwrap_used, reason = "a bench that cannot go on should stop")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::measurement::{Measurement, ValueFormatter};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

use sapwood::base::PageId;
use sapwood::tree::*;

mod common;

use common::{Cache, Chats, Misses, cpu_now, key, mix, policy_of, session, tokens};

/// CPU time of this thread: on a shared machine the wall clock measures the neighbours.
struct CpuTime;

impl Measurement for CpuTime {
    type Intermediate = Duration;
    type Value = Duration;

    fn start(&self) -> Duration {
        cpu_now()
    }

    fn end(&self, start: Duration) -> Duration {
        cpu_now() - start
    }

    fn add(&self, a: &Duration, b: &Duration) -> Duration {
        *a + *b
    }

    fn zero(&self) -> Duration {
        Duration::ZERO
    }

    fn to_f64(&self, value: &Duration) -> f64 {
        value.as_nanos() as f64
    }

    fn formatter(&self) -> &dyn ValueFormatter {
        &Microseconds
    }
}

/// Everything in one unit, so that columns can be compared by eye.
struct Microseconds;

impl ValueFormatter for Microseconds {
    fn scale_values(&self, _: f64, values: &mut [f64]) -> &'static str {
        values.iter_mut().for_each(|v| *v /= 1e3);
        "us cpu"
    }

    fn scale_throughputs(&self, _: f64, _: &Throughput, values: &mut [f64]) -> &'static str {
        values.iter_mut().for_each(|v| *v /= 1e3);
        "us cpu"
    }

    fn scale_for_machines(&self, _: &mut [f64]) -> &'static str {
        "ns cpu"
    }
}

type Bench = Criterion<CpuTime>;

fn w1(c: &mut Bench) {
    let mut group = c.benchmark_group("w1");
    group
        .sample_size(20)
        .measurement_time(Duration::from_millis(1_500))
        .warm_up_time(Duration::from_millis(300));
    let prompts: Vec<Vec<u32>> = (0..16).map(|k| tokens((1 << 56) + k, 32_768)).collect();
    let copies = prompts.clone();
    for page in [1u32, 16, 64] {
        let list: Vec<PageId> = (0..32_768 / page).map(PageId).collect();
        let mut into = Vec::new();
        let mut i = 0;
        group.bench_function(BenchmarkId::new("floor", page), |b| {
            b.iter(|| {
                i = (i + 1) % 16;
                assert!(black_box(&prompts[i]) == black_box(&copies[i]));
                into.clear();
                into.extend_from_slice(black_box(&list));
                black_box(&into);
            });
        });
        for (shape, step, merge) in
            [("one-node", 32_768, false), ("128-nodes", 256, false), ("128-steps-merged", 256, true)]
        {
            let mut cache = Cache::new(page, merge, Policy::Lru, 1 << 20);
            for prompt in &prompts {
                (step..=prompt.len()).step_by(step).for_each(|end| cache.turn(&prompt[..end]));
            }
            cache.check();
            group.bench_function(BenchmarkId::new(shape, page), |b| {
                b.iter(|| {
                    i = (i + 1) % 16;
                    assert_eq!(cache.find(&copies[i]), 32_768 / page);
                });
            });
            if step == 256 && !merge {
                let mut pages = Vec::new();
                let (_, lock, _) = cache.tree.match_and_lock(key(&prompts[0]), &mut pages);
                group.bench_function(BenchmarkId::new("rematch-128-nodes", page), |b| {
                    b.iter(|| {
                        let found = cache.tree.match_from(&lock, key(&prompts[0]), &mut pages).unwrap();
                        assert_eq!(found.device_pages, 32_768 / page);
                    });
                });
                cache.tree.unlock(lock).unwrap();
            }
        }
    }
    group.finish();
}

fn w2(c: &mut Bench) {
    let mut group = c.benchmark_group("w2");
    group.sample_size(10).measurement_time(Duration::from_secs(3)).warm_up_time(Duration::from_millis(500));
    let chats = Chats::new();
    for (name, capacity, learns) in [
        ("chat-turn", 1 << 23, false),
        ("chat-turn-adaptive", 1 << 23, true),
        ("chat-turn-short", 1 << 21, false),
        ("chat-turn-short-adaptive", 1 << 21, true),
    ] {
        group.bench_function(name, |b| {
            b.iter_custom(|iters| {
                let mut spent = Duration::ZERO;
                let mut left = iters;
                while left > 0 {
                    let mut cache = Cache::new(16, true, policy_of(learns, capacity), capacity);
                    let n = left.min(chats.turns.len() as u64) as usize;
                    let start = cpu_now();
                    chats.turns[..n].iter().for_each(|&turn| cache.turn(chats.prompt(turn)));
                    spent += cpu_now() - start;
                    cache.check();
                    left -= n as u64;
                }
                spent
            });
        });
    }
    let mut i = 0;
    let rows = &chats.rows;
    let copies = rows.clone();
    group.bench_function("floor", |b| {
        b.iter(|| {
            i = (i + 1) % rows.len();
            assert!(black_box(&rows[i][..2_850]) == black_box(&copies[i][..2_850]));
        });
    });
    group.finish();
}

fn w4(c: &mut Bench) {
    let mut group = c.benchmark_group("w4");
    group.sample_size(20).measurement_time(Duration::from_secs(2)).warm_up_time(Duration::from_millis(500));
    for (name, learns) in [("miss-evict-insert", false), ("miss-evict-insert-adaptive", true)] {
        let mut cache = Cache::new(16, true, policy_of(learns, 1 << 20), 1 << 20);
        let mut misses = Misses::new();
        // Past the first lessons.
        (0..40_000).for_each(|_| cache.turn(misses.next()));
        group.bench_function(name, |b| b.iter(|| cache.turn(misses.next())));
        cache.check();
    }
    group.finish();
}

fn evict(c: &mut Bench) {
    let mut group = c.benchmark_group("evict-per-node");
    group.sample_size(10).measurement_time(Duration::from_secs(1)).warm_up_time(Duration::from_millis(300));
    for (name, policy) in
        [("list", Policy::Lru), ("heap", Policy::Priority), ("adaptive", policy_of(true, 1 << 20))]
    {
        for leaves in [1_000u32, 10_000, 100_000, 1_000_000] {
            let policy = match policy {
                Policy::Adaptive(_) => policy_of(true, leaves as usize * 32),
                ref policy => policy.clone(),
            };
            let config = TreeConfig { page_size: 16, policy: policy.clone(), ..TreeConfig::default() };
            let mut tree = Tree::new(config).unwrap();
            let mut out = InsertOut::default();
            let mut row = [0u32; 32];
            let mut put = |tree: &mut Tree, id: u32, pages: &[PageId]| {
                row.iter_mut().enumerate().for_each(|(i, t)| *t = id.wrapping_mul(2_654_435_761) ^ i as u32);
                tree.insert(key(&row), pages, 0, InsertOpts::default(), &mut out).unwrap();
            };
            (0..leaves).for_each(|id| put(&mut tree, id, &[PageId(2 * id), PageId(2 * id + 1)]));
            let mut gone = DeviceEviction::default();
            let mut id = leaves;
            group.bench_function(BenchmarkId::new(name, leaves), |b| {
                b.iter_custom(|iters| {
                    let mut spent = Duration::ZERO;
                    for _ in 0..iters.div_ceil(100) {
                        gone.clear();
                        let start = cpu_now();
                        // A call per node, the way an allocator asks.
                        for _ in 0..100 {
                            tree.evict_device(2, Unbacked::Delete, &mut gone);
                        }
                        spent += cpu_now() - start;
                        assert_eq!(gone.deleted_nodes, 100);
                        for pages in gone.freed_device.chunks(2) {
                            put(&mut tree, id, pages);
                            id += 1;
                        }
                    }
                    spent * iters as u32 / (iters.div_ceil(100) * 100) as u32
                });
            });
        }
    }
    group.finish();
}

fn w5(c: &mut Bench) {
    let mut group = c.benchmark_group("w5");
    group.sample_size(20).measurement_time(Duration::from_secs(1)).warm_up_time(Duration::from_millis(300));
    for (name, merge, learns) in
        [("session", true, false), ("session-adaptive", true, true), ("session-unmerged", false, false)]
    {
        let capacity = 1_000_000 * 32 + (1 << 16);
        let mut cache = Cache::new(16, merge, policy_of(learns, capacity), capacity);
        let mut sessions = 0u64;
        for steps in [1_000u64, 10_000, 100_000, 1_000_000] {
            while sessions * 10 < steps {
                let row = session(sessions);
                (1..=10).for_each(|d| cache.turn(&row[..d * 32]));
                sessions += 1;
            }
            let picked: Vec<Vec<u32>> = (0..4_000).map(|i| session(mix(steps + i) % sessions)).collect();
            let mut i = 0;
            group.bench_function(BenchmarkId::new(name, steps), |b| {
                b.iter(|| {
                    i = (i + 1) % picked.len();
                    assert_eq!(cache.find(&picked[i]), 20);
                });
            });
        }
        cache.check();
    }
    group.finish();
}

/// What the slowest of a hundred look-ups costs, by the wall clock (reading the other one costs as much as a look-up): of
/// the same 64 sessions over and over, and of any session after the caches have seen something else.
fn p99(c: &mut Bench) {
    let mut group = c.benchmark_group("w5-p99");
    group.sample_size(10).measurement_time(Duration::from_secs(1)).warm_up_time(Duration::from_millis(300));
    // More than the last cache holds.
    let mut other = vec![1u64; 64 << 17];
    for steps in [10_000u64, 1_000_000] {
        let capacity = steps as usize * 32 + (1 << 16);
        let mut cache = Cache::new(16, true, Policy::Lru, capacity);
        let sessions = steps / 10;
        for which in 0..sessions {
            let row = session(which);
            (1..=10).for_each(|d| cache.turn(&row[..d * 32]));
        }
        let picked: Vec<Vec<u32>> = (0..4_000).map(|i| session(mix(steps + i) % sessions)).collect();
        for (name, keys, cold) in [("warm", 64, false), ("cold", picked.len(), true)] {
            let mut i = 0;
            group.bench_function(BenchmarkId::new(name, steps), |b| {
                b.iter_custom(|iters| {
                    let calls = if cold { 200 } else { 20_000 };
                    let mut took: Vec<Duration> = (0..calls)
                        .map(|_| {
                            i = (i + 1) % keys;
                            if cold {
                                other.iter_mut().step_by(8).for_each(|word| *word = word.wrapping_add(1));
                            }
                            let start = Instant::now();
                            assert_eq!(cache.find(&picked[i]), 20);
                            start.elapsed()
                        })
                        .collect();
                    took.sort_unstable();
                    took[calls * 99 / 100] * iters as u32
                });
            });
        }
        cache.check();
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().with_measurement(CpuTime);
    targets = w1, w2, w4, evict, w5, p99
}
criterion_main!(benches);
