//! Bytes per second through the real client of Mooncake, beside one plain copy of the same bytes in the same run.
//!
//! Ends with status 1 if a direction stays below `SAPWOOD_RATIO_MIN` (default 0.8) of the copy.
#![expect(clippy::unwrap_used, reason = "a measurement that cannot go on has failed")]
#![expect(unsafe_code, reason = "reads and writes its own regions from one thread")]

#[path = "../tests/mooncake/service.rs"]
mod service;

mod kit {
    pub(crate) fn skip(what: &str) {
        assert!(std::env::var_os("SAPWOOD_REQUIRE_SERVICES").is_none(), "needs {what}");
        println!("SKIPPED: needs {what}");
    }
}

use std::sync::Arc;
use std::time::Instant;

use sapwood::backend::identity::{DescriptorDigest, NamespaceDigest, Space};
use sapwood::backend::region::{Mapping, Region, Sharing};
use sapwood::backend::store::mooncake::{MooncakeConfig, MooncakeStore};
use sapwood::backend::store::{Call, Item, RegionToken, Span, Store};

const BATCH_BYTES: usize = 64 << 20;
const ROUNDS: u64 = 7;

struct Rates {
    copy: f64,
    put: f64,
    get: f64,
}

/// Best of [`ROUNDS`], in bytes per second.
fn measure(store: &MooncakeStore, region: &Region, token: RegionToken, object_bytes: usize) -> Rates {
    let space = Space::new(DescriptorDigest([1; 32]), NamespaceDigest([2; 32]));
    let n = BATCH_BYTES / object_bytes;
    let mut best = Rates { copy: 0.0, put: 0.0, get: 0.0 };
    let rate = |start: Instant| BATCH_BYTES as f64 / start.elapsed().as_secs_f64();
    for round in 0..ROUNDS {
        let item = |half: usize, i: usize| {
            let mut hash = [0; 32];
            hash[..8].copy_from_slice(&(round * 1_000_000 + object_bytes as u64).to_le_bytes());
            hash[8..16].copy_from_slice(&(i as u64).to_le_bytes());
            let offset = half * BATCH_BYTES + i * object_bytes;
            Item::one(&space, &hash, Span { region: token, offset, len: object_bytes })
        };
        // SAFETY: one thread, no call is running, and the halves do not overlap.
        unsafe {
            let from = region.slice_mut(0, BATCH_BYTES).unwrap();
            from.iter_mut().step_by(64).for_each(|b| *b = b.wrapping_add(1 + round as u8));
            let to = region.slice_mut(BATCH_BYTES, BATCH_BYTES).unwrap();
            let start = Instant::now();
            for (to, from) in to.chunks_mut(object_bytes).zip(from.chunks(object_bytes)) {
                to.copy_from_slice(from);
            }
            best.copy = best.copy.max(rate(start));
            to.fill(0);
        }
        let puts: Vec<_> = (0..n).map(|i| item(0, i)).collect();
        let start = Instant::now();
        let outcomes = store.put(&puts, &Call::unbounded());
        best.put = best.put.max(rate(start));
        assert!(outcomes.iter().all(|o| o.is_ok()), "{outcomes:?}");
        let gets: Vec<_> = (0..n).map(|i| item(1, i)).collect();
        let start = Instant::now();
        let outcomes = store.get(&gets, &Call::unbounded());
        best.get = best.get.max(rate(start));
        assert!(outcomes.iter().all(|o| o.is_ok()), "{outcomes:?}");
        // SAFETY: as above.
        unsafe {
            assert!(region.slice(0, BATCH_BYTES).unwrap() == region.slice(BATCH_BYTES, BATCH_BYTES).unwrap());
        }
        let keys: Vec<_> = puts.iter().map(|i| i.key).collect();
        store.remove(&keys, &Call::unbounded());
    }
    best
}

fn main() {
    let Some(service) = service::Service::start("1 GB") else { return };
    let store = MooncakeStore::open(MooncakeConfig::at(service.address())).unwrap();
    let mapping = Mapping { sharing: Sharing::Shared, ..Mapping::default() };
    let region = Arc::new(Region::map(2 * BATCH_BYTES, mapping).unwrap());
    region.touch(2).unwrap();
    let token = store.register(&region).unwrap();
    let least = std::env::var("SAPWOOD_RATIO_MIN").ok().and_then(|s| s.parse().ok()).unwrap_or(0.8);
    let mut ok = true;
    println!("object   copy GB/s   put GB/s (ratio)   get GB/s (ratio)");
    for object_bytes in [64 << 10, 256 << 10, 1 << 20, 2 << 20] {
        let r = measure(&store, &region, token, object_bytes);
        let (put, get) = (r.put / r.copy, r.get / r.copy);
        println!(
            "{:5} KiB {:9.2} {:10.2} ({put:.2}) {:11.2} ({get:.2})",
            object_bytes >> 10,
            r.copy / 1e9,
            r.put / 1e9,
            r.get / 1e9
        );
        ok &= object_bytes != 1 << 20 || put.min(get) >= least;
    }
    store.close(Instant::now() + std::time::Duration::from_secs(10)).unwrap();
    drop(service);
    if !ok {
        println!("below {least} of a copy at 1024 KiB");
        std::process::exit(1);
    }
}
