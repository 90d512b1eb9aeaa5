//! Bytes per second through the real client, beside one plain copy of the same bytes in the same run.
//!
//! Not part of a normal run: it says something only on a machine that does nothing else, because the real client and
//! the store need a core each.
#![expect(unsafe_code, reason = "reads and writes its own region from one thread")]

use std::time::Instant;

use sapwood::backend::region::Region;
use sapwood::backend::store::mooncake::{MooncakeConfig, MooncakeStore};
use sapwood::backend::store::{Call, Store};

use crate::kit::{Arena, alone};
use crate::service::Service;

const BATCH_BYTES: usize = 64 << 20;
const ROUNDS: u64 = 15;

/// Bytes per second, best of [`ROUNDS`].
#[derive(Debug, Default)]
struct Rates {
    copy: f64,
    put: f64,
    get: f64,
}

fn copied(region: &Region, object_bytes: usize) -> Instant {
    // SAFETY: one thread, no call is running, and the halves do not overlap.
    let (from, to) = unsafe {
        (region.slice(0, BATCH_BYTES).unwrap(), region.slice_mut(BATCH_BYTES, BATCH_BYTES).unwrap())
    };
    let start = Instant::now();
    for (to, from) in to.chunks_mut(object_bytes).zip(from.chunks(object_bytes)) {
        to.copy_from_slice(from);
    }
    start
}

fn measure(store: &MooncakeStore, arena: &Arena, object_bytes: usize) -> Rates {
    let n = BATCH_BYTES / object_bytes;
    let mut best = Rates::default();
    let rate = |start: Instant| BATCH_BYTES as f64 / start.elapsed().as_secs_f64();
    for round in 0..ROUNDS {
        let item = |half: usize, i: usize| {
            let name = (round << 48) + ((object_bytes as u64) << 16) + i as u64;
            arena.item(name, half * BATCH_BYTES + i * object_bytes, object_bytes)
        };
        arena.fill(round, 0, BATCH_BYTES);
        best.copy = best.copy.max(rate(copied(&arena.region, object_bytes)));
        let puts: Vec<_> = (0..n).map(|i| item(0, i)).collect();
        let start = Instant::now();
        let outcomes = store.put(&puts, &Call::unbounded());
        best.put = best.put.max(rate(start));
        assert!(outcomes.iter().all(|o| o.is_ok()), "{outcomes:?}");
        arena.fill(round + 1, BATCH_BYTES, BATCH_BYTES);
        let gets: Vec<_> = (0..n).map(|i| item(1, i)).collect();
        let start = Instant::now();
        let outcomes = store.get(&gets, &Call::unbounded());
        best.get = best.get.max(rate(start));
        assert!(outcomes.iter().all(|o| o.is_ok()), "{outcomes:?}");
        assert!(arena.holds(round, BATCH_BYTES, BATCH_BYTES));
        let keys: Vec<_> = puts.iter().map(|i| i.key).collect();
        store.remove(&keys, &Call::unbounded());
    }
    best
}

/// `SAPWOOD_RATIO_MIN` is the least share of the copy's rate at objects of 1 MiB; default 0.8.
#[test]
#[ignore = "a measurement: needs a machine that does nothing else"]
fn throughput_beside_one_copy() {
    let _alone = alone();
    let Some(service) = Service::start("1 GB") else { return };
    let store = MooncakeStore::open(MooncakeConfig::at(service.address())).unwrap();
    let arena = Arena::new(&store, 2 * BATCH_BYTES);
    let least = std::env::var("SAPWOOD_RATIO_MIN").ok().and_then(|s| s.parse().ok()).unwrap_or(0.8);
    let mut ratio = 0.0;
    println!("object   copy GB/s   put GB/s (ratio)   get GB/s (ratio)");
    for object_bytes in [64 << 10, 256 << 10, 1 << 20, 2 << 20] {
        let r = measure(&store, &arena, object_bytes);
        let (put, get) = (r.put / r.copy, r.get / r.copy);
        println!(
            "{:5} KiB {:9.2} {:10.2} ({put:.2}) {:11.2} ({get:.2})",
            object_bytes >> 10,
            r.copy / 1e9,
            r.put / 1e9,
            r.get / 1e9
        );
        if object_bytes == 1 << 20 {
            ratio = put.min(get);
        }
    }
    assert!(ratio >= least, "{ratio:.2} of a copy at 1 MiB, {least} is demanded");
}
