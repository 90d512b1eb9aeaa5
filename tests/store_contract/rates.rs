//! What grouping is worth over each service: pages per second with and without it, in turns in one run.
//!
//! Not part of a normal run: it says something only on a machine that does nothing else.

use std::sync::Arc;
use std::time::Instant;

use sapwood::backend::store::group::{Grouped, Names};
use sapwood::backend::store::{Call, Item, Store};

use crate::kit::{Arena, Fixture, bytes_of, item};

const ROUNDS: u64 = 4;
/// Bytes of a batch, and pages at most.
const BATCH_BYTES: usize = 8 << 20;
const PAGES_MAX: usize = 256;

/// Seconds: of a put, of the first query and get of a process, of a get of one that remembers.
type Times = [f64; 3];

fn items(arena: &Arena, round: u64, len: usize, pages: usize) -> Vec<Item> {
    (0..pages).map(|i| item((len as u64) << 32 | round << 16 | i as u64, arena.span(i * len, len))).collect()
}

fn measure(store: &dyn Store, fresh: &dyn Store, round: u64, len: usize, pages: usize) -> Times {
    let arena = Arena::new(store, len * pages);
    (0..pages).for_each(|i| arena.write(i * len, &bytes_of(round * 1000 + i as u64, len)));
    let batch = items(&arena, round, len, pages);
    let timed = |run: &dyn Fn() -> bool| {
        let start = Instant::now();
        assert!(run());
        start.elapsed().as_secs_f64()
    };
    let put = timed(&|| store.put(&batch, &Call::unbounded()).iter().all(|o| o.is_ok()));
    let arena = Arena::new(fresh, len * pages);
    let batch = items(&arena, round, len, pages);
    let keys: Vec<_> = batch.iter().map(|i| i.key).collect();
    let first = timed(&|| {
        fresh.query(&keys, &Call::unbounded()).iter().all(|o| o.is_ok())
            && fresh.get(&batch, &Call::unbounded()).iter().all(|o| o.is_ok())
    });
    assert!((0..pages).all(|i| arena.read(i * len, len) == bytes_of(round * 1000 + i as u64, len)));
    let again = timed(&|| fresh.get(&batch, &Call::unbounded()).iter().all(|o| o.is_ok()));
    fresh.remove(&keys, &Call::unbounded());
    [put, first, again]
}

fn table(name: &str, make: fn() -> Option<Fixture>) {
    // Servers are shared while one fixture lives; every store has names of its own.
    let Some(plain) = make() else { return };
    println!("\n{name}: GB/s plain, in groups with a link a page, with one a group (ratios)");
    println!("{:16}{:>30}{:>36}{:>36}", "", "put", "query + get", "get again");
    for len in [4 << 10, 16 << 10, 64 << 10, 256 << 10] {
        let pages = (BATCH_BYTES / len).min(PAGES_MAX);
        let mut best = [[f64::MAX; 3]; 3];
        for round in 0..ROUNDS {
            let inner = Arc::clone(&plain.store);
            let process = |names| {
                let bytes = inner.caps().object_bytes_efficient.max(256 << 10);
                Grouped::with_object_bytes(Arc::clone(&inner), bytes).with_names(names)
            };
            let measure_grouped =
                |names, n| measure(&process(names), &process(names), 3 * round + n, len, pages);
            let times = [
                measure(&*inner, &*inner, 3 * round, len, pages),
                measure_grouped(Names::EveryPage, 1),
                measure_grouped(Names::FirstPage, 2),
            ];
            for (best, times) in best.iter_mut().zip(times) {
                best.iter_mut().zip(times).for_each(|(b, t)| *b = b.min(t));
            }
        }
        print!("  {:>4} KiB x {pages:>3}", len >> 10);
        let rate = |t: f64| (len * pages) as f64 / t / 1e9;
        for ((plain, every), first) in best[0].iter().zip(&best[1]).zip(&best[2]) {
            print!("   {:>6.3}", rate(*plain));
            for grouped in [every, first] {
                print!(" {:>6.3} ({:.2})", rate(*grouped), plain / grouped);
            }
        }
        println!();
    }
}

macro_rules! measurements {
    ($($name:ident: $what:literal, $make:expr;)+) => {$(
        #[test]
        #[ignore = "a measurement: needs a machine that does nothing else"]
        fn $name() {
            table($what, $make);
        }
    )+};
}

measurements! {
    groups_over_redis_socket: "redis, socket", || crate::remote::redis_fixture(true);
    groups_over_redis_tcp: "redis, TCP", || crate::remote::redis_fixture(false);
    groups_over_s3: "S3 server", crate::remote::bucket_fixture;
    groups_over_mooncake: "mooncake", crate::contract::mooncake_large;
}
