//! Bytes per second through the real client, beside one plain copy of the same bytes in the same run.
//!
//! Not part of a normal run: it says something only on a machine that does nothing else, because the real client and
//! the store need a core each.
#![expect(unsafe_code, reason = "reads and writes its own region from one thread")]

use std::time::Instant;

use sapwood::backend::region::Region;
use sapwood::backend::store::envelope::payload_crc;
use sapwood::backend::store::mooncake::{MooncakeConfig, MooncakeStore};
use sapwood::backend::store::{Call, Store};

use crate::kit::{Arena, alone};
use crate::service::Service;

const BATCH_BYTES: usize = 64 << 20;
const ROUNDS: u64 = 21;

/// Bytes per second of every round. A put and a get are each measured right behind a copy and a sum of as many bytes, since
/// what a machine that others use gives to memory changes from one tenth of a second to the next.
#[derive(Debug, Default)]
struct Rates {
    copy: [Vec<f64>; 2],
    sum: Vec<f64>,
    put: Vec<f64>,
    get: Vec<f64>,
}

fn best(rates: &[f64]) -> f64 {
    rates.iter().copied().fold(0.0, f64::max)
}

/// Median over the rounds of how a rate compares with that of the copy just before.
fn beside(rates: &[f64], copies: &[f64]) -> f64 {
    let mut ratios: Vec<f64> = rates.iter().zip(copies).map(|(rate, copy)| rate / copy).collect();
    ratios.sort_by(f64::total_cmp);
    ratios[ratios.len() / 2]
}

fn copied(region: &Region, object_bytes: usize) -> f64 {
    // SAFETY: one thread, no call is running, and the halves do not overlap.
    let (from, to) = unsafe {
        (region.slice(0, BATCH_BYTES).unwrap(), region.slice_mut(BATCH_BYTES, BATCH_BYTES).unwrap())
    };
    let start = Instant::now();
    for (to, from) in to.chunks_mut(object_bytes).zip(from.chunks(object_bytes)) {
        to.copy_from_slice(from);
    }
    rate(start)
}

fn summed(region: &Region) -> f64 {
    // SAFETY: one thread, no call is running.
    let bytes = unsafe { region.slice(0, BATCH_BYTES).unwrap() };
    let start = Instant::now();
    std::hint::black_box(payload_crc([bytes]));
    rate(start)
}

fn rate(start: Instant) -> f64 {
    BATCH_BYTES as f64 / start.elapsed().as_secs_f64()
}

fn measure(store: &MooncakeStore, arena: &Arena, object_bytes: usize) -> Rates {
    let n = BATCH_BYTES / object_bytes;
    let mut rates = Rates::default();
    for round in 0..ROUNDS {
        let item = |half: usize, i: usize| {
            let name = (round << 48) + ((object_bytes as u64) << 16) + i as u64;
            arena.item(name, half * BATCH_BYTES + i * object_bytes, object_bytes)
        };
        arena.fill(round, 0, BATCH_BYTES);
        rates.sum.push(summed(&arena.region));
        rates.copy[0].push(copied(&arena.region, object_bytes));
        let puts: Vec<_> = (0..n).map(|i| item(0, i)).collect();
        let start = Instant::now();
        let outcomes = store.put(&puts, &Call::unbounded());
        rates.put.push(rate(start));
        assert!(outcomes.iter().all(|o| o.is_ok()), "{outcomes:?}");
        rates.copy[1].push(copied(&arena.region, object_bytes));
        arena.fill(round + 1, BATCH_BYTES, BATCH_BYTES);
        let gets: Vec<_> = (0..n).map(|i| item(1, i)).collect();
        let start = Instant::now();
        let outcomes = store.get(&gets, &Call::unbounded());
        rates.get.push(rate(start));
        assert!(outcomes.iter().all(|o| o.is_ok()), "{outcomes:?}");
        assert!(arena.holds(round, BATCH_BYTES, BATCH_BYTES));
        let keys: Vec<_> = puts.iter().map(|i| i.key).collect();
        store.remove(&keys, &Call::unbounded());
    }
    rates
}

/// All object sizes with one way to start the real client; the lesser of the shares at 1 MiB.
fn table(advised: bool) -> Option<f64> {
    let service = Service::start_as("1 GB", advised)?;
    let store = MooncakeStore::open(MooncakeConfig::at(service.address())).unwrap();
    let arena = Arena::new(&store, 2 * BATCH_BYTES);
    let mut ratio = 0.0;
    println!("the real client {}", if advised { "as docs/MOONCAKE.md advises" } else { "as it comes" });
    println!("object        copy    sum     put (share)     get (share)");
    for object_bytes in [64 << 10, 256 << 10, 1 << 20, 2 << 20] {
        let r = measure(&store, &arena, object_bytes);
        let (put, get) = (beside(&r.put, &r.copy[0]), beside(&r.get, &r.copy[1]));
        let [copy, sum, put_best, get_best] =
            [best(&r.copy.concat()), best(&r.sum), best(&r.put), best(&r.get)].map(|rate| rate / 1e9);
        let size = object_bytes >> 10;
        println!("{size:5} KiB {copy:7.2} {sum:6.2} {put_best:7.2} ({put:.2}) {get_best:8.2} ({get:.2})");
        if object_bytes == 1 << 20 {
            ratio = put.min(get);
        }
    }
    Some(ratio)
}

/// `SAPWOOD_RATIO_MIN` is the least share of the copy's rate at objects of 1 MiB; default 0.8.
#[test]
#[ignore = "a measurement: needs a machine that does nothing else"]
fn throughput_beside_one_copy() {
    let _alone = alone();
    let least = std::env::var("SAPWOOD_RATIO_MIN").ok().and_then(|s| s.parse().ok()).unwrap_or(0.8);
    println!("best GB/s, and the median share of the copy just before");
    let [_, Some(ratio)] = [false, true].map(table) else { return };
    assert!(ratio >= least, "{ratio:.2} of a copy at 1 MiB, {least} is demanded");
}
