//! What every store keeps. Each function is run once per store and per wrapper.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sapwood::backend::store::fault::Faulty;
use sapwood::backend::store::file::{FileConfig, FileStore, IoEngine, IoMode};
use sapwood::backend::store::group::Grouped;
use sapwood::backend::store::mem::MemStore;
use sapwood::backend::store::wrap::{Breaker, Deadlines, Detached, Limit, Retry, Wrapped};
use sapwood::backend::store::{Call, Cancel, Health, Item, Outcome, RegionToken, RegisterError, Span, Store};

use crate::kit::{Arena, Fixture, Rng, bytes_of, item, key, namespace_of, page, region_for, space, space_of};

const KIB: usize = 1024;

fn unlimited() -> Call {
    Call::unbounded()
}

/// Puts page `n` with `len` bytes through `arena[0..len]`.
fn put(store: &dyn Store, arena: &Arena, n: u64, len: usize) -> Outcome {
    arena.write(0, &bytes_of(n, len));
    store.put(&[item(n, arena.span(0, len))], &unlimited())[0]
}

/// Gets page `n` and compares what came.
fn got(store: &dyn Store, arena: &Arena, n: u64, len: usize) -> Outcome {
    arena.write(0, &vec![0xEE; len]);
    let outcome = store.get(&[item(n, arena.span(0, len))], &unlimited())[0];
    if outcome.is_ok() {
        assert_eq!(outcome, Outcome::Ok(len));
        assert!(arena.read(0, len) == bytes_of(n, len), "page {n} came with wrong bytes");
    }
    outcome
}

fn round_trip_of_every_length(store: &dyn Store) {
    let a = Arena::new(store, 256 * KIB);
    let lens = [0, 1, 7, 127, 128, 129, 511, 512, 513, 4095, 4096, 4097, 65_535, 65_536, 131_072, 200_001];
    for (n, len) in (0..).zip(lens) {
        assert_eq!(put(store, &a, n, len), Outcome::Ok(len));
    }
    for (n, len) in (0..).zip(lens) {
        assert_eq!(got(store, &a, n, len), Outcome::Ok(len));
        assert_eq!(store.query(&[key(n)], &unlimited()), [Outcome::Ok(len)]);
    }
}

fn an_empty_batch_is_nothing(store: &dyn Store) {
    assert!(store.get(&[], &unlimited()).is_empty());
    assert!(store.put(&[], &unlimited()).is_empty());
    assert!(store.query(&[], &unlimited()).is_empty());
    assert!(store.remove(&[], &unlimited()).is_empty());
}

fn presence_is_per_key_with_holes(store: &dyn Store) {
    let a = Arena::new(store, 4 * KIB);
    for n in [0, 2, 5] {
        assert!(put(store, &a, n, 100 + n as usize).is_ok());
    }
    let keys: Vec<_> = (0..7).map(key).collect();
    let want: Vec<_> = (0..7)
        .map(|n| if [0, 2, 5].contains(&n) { Outcome::Ok(100 + n) } else { Outcome::Missing })
        .collect();
    assert_eq!(store.query(&keys, &unlimited()), want);
}

fn a_batch_has_an_outcome_per_item_in_order(store: &dyn Store) {
    let a = Arena::new(store, 512 * KIB);
    let len = 2 * KIB;
    let puts: Vec<_> = (0..64u64)
        .map(|n| {
            a.write(n as usize * len, &bytes_of(n, len));
            item(n, a.span(n as usize * len, len))
        })
        .collect();
    assert_eq!(store.put(&puts, &unlimited()), [Outcome::Ok(len); 64]);
    let b = Arena::new(store, 512 * KIB);
    let at = |i: u64| i as usize * 4 * KIB;
    let gets: Vec<_> = (0..64u64)
        .map(|i| match i % 4 {
            0 => item(i, b.span(at(i), len)),
            1 => item(1000 + i, b.span(at(i), len)),
            2 => item(i, b.span(at(i), len + 1)),
            _ => item(i, Span { region: RegionToken(u64::MAX), offset: 0, len }),
        })
        .collect();
    for (i, outcome) in (0..).zip(store.get(&gets, &unlimited())) {
        let want = match i % 4 {
            0 => Outcome::Ok(len),
            1 => Outcome::Missing,
            2 => Outcome::SizeMismatch { stored: len },
            _ => Outcome::AddressLost,
        };
        assert_eq!(outcome, want, "item {i}");
        if i % 4 == 0 {
            assert!(b.read(at(i), len) == bytes_of(i, len), "item {i}");
        }
    }
}

fn another_length_is_a_mismatch_and_nothing_is_written(store: &dyn Store) {
    let a = Arena::new(store, 64 * KIB);
    assert!(put(store, &a, 1, 8 * KIB).is_ok());
    for len in [0, 1, 8 * KIB - 1, 8 * KIB + 1, 16 * KIB] {
        a.write(0, &vec![0x77; 16 * KIB]);
        let outcome = store.get(&[item(1, a.span(0, len))], &unlimited())[0];
        assert_eq!(outcome, Outcome::SizeMismatch { stored: 8 * KIB }, "asked for {len}");
        assert!(a.read(0, 16 * KIB).iter().all(|&b| b == 0x77), "asked for {len}");
    }
    assert_eq!(got(store, &a, 1, 8 * KIB), Outcome::Ok(8 * KIB));
    assert_eq!(store.stats().size_mismatch_total, 5);
}

fn a_put_with_another_length_replaces(store: &dyn Store) {
    let a = Arena::new(store, 64 * KIB);
    assert!(put(store, &a, 1, 8 * KIB).is_ok());
    assert!(put(store, &a, 1, 4 * KIB).is_ok());
    assert_eq!(got(store, &a, 1, 4 * KIB), Outcome::Ok(4 * KIB));
}

fn another_identity_misses_and_harms_nothing(store: &dyn Store) {
    let a = Arena::new(store, 64 * KIB);
    assert!(put(store, &a, 1, KIB).is_ok());
    let mut wrong = item(1, a.span(0, KIB));
    wrong.space = space_of(9);
    assert_eq!(store.get(&[wrong], &unlimited()), [Outcome::Missing]);
    assert_eq!(
        store.get(&[Item::one(&space_of(9), &page(1), a.span(0, KIB))], &unlimited()),
        [Outcome::Missing]
    );
    assert_eq!(got(store, &a, 1, KIB), Outcome::Ok(KIB));
}

fn pages_in_pieces(store: &dyn Store) {
    let a = Arena::new(store, 64 * KIB);
    let b = Arena::new(store, 64 * KIB);
    let len = 10_000;
    let whole = bytes_of(3, len);
    a.write(5000, &whole[..3000]);
    a.write(100, &whole[3000..3001]);
    b.write(0, &whole[3001..]);
    let spans = [a.span(5000, 3000), a.span(100, 1), a.span(0, 0), b.span(0, len - 3001)];
    let put = Item::scattered(&space(), &page(3), spans);
    assert_eq!(store.put(&[put], &unlimited()), [Outcome::Ok(len)]);
    assert_eq!(got(store, &a, 3, len), Outcome::Ok(len));
    let spans = [b.span(4096, 4096), b.span(100, 4), b.span(20_000, len - 4100)];
    let get = Item::scattered(&space(), &page(3), spans);
    assert_eq!(store.get(&[get], &unlimited()), [Outcome::Ok(len)]);
    let mut back = b.read(4096, 4096);
    back.extend(b.read(100, 4));
    back.extend(b.read(20_000, len - 4100));
    assert!(back == whole);
}

/// Devices cannot write 4096 sectors with one buffer; nor may a store refuse a page because of it.
fn pages_in_very_many_pieces(store: &dyn Store) {
    let a = Arena::new(store, 64 * KIB);
    let len = 3000 * 20;
    a.write(0, &bytes_of(4, len));
    let spans = (0..3000).map(|i| a.span(i * 20, 20));
    assert_eq!(
        store.put(&[Item::scattered(&space(), &page(4), spans.clone())], &unlimited()),
        [Outcome::Ok(len)]
    );
    a.write(0, &vec![0; len]);
    assert_eq!(store.get(&[Item::scattered(&space(), &page(4), spans)], &unlimited()), [Outcome::Ok(len)]);
    assert!(a.read(0, len) == bytes_of(4, len));
}

fn memory_that_is_not_registered_is_lost(store: &dyn Store) {
    let a = Arena::new(store, 64 * KIB);
    assert!(put(store, &a, 1, KIB).is_ok());
    for span in [
        Span { region: RegionToken(0), offset: 0, len: KIB },
        Span { region: RegionToken(77_777), offset: 0, len: KIB },
        a.span(64 * KIB - 1, KIB),
        a.span(usize::MAX, KIB),
    ] {
        assert_eq!(store.get(&[item(1, span)], &unlimited()), [Outcome::AddressLost]);
        assert_eq!(store.put(&[item(2, span)], &unlimited()), [Outcome::AddressLost]);
    }
    assert_eq!(store.query(&[key(2)], &unlimited()), [Outcome::Missing]);
    store.unregister(a.token).unwrap();
    assert_eq!(store.get(&[item(1, a.span(0, KIB))], &unlimited()), [Outcome::AddressLost]);
    assert!(matches!(store.unregister(a.token), Err(RegisterError::Unknown(_))));
    assert!(matches!(store.unregister(RegionToken(0)), Err(RegisterError::Unknown(_))));
}

fn registering_twice_counts(store: &dyn Store) {
    let region = region_for(store, 4 * KIB);
    let first = store.register(&region).unwrap();
    assert_eq!(store.register(&region).unwrap(), first);
    store.unregister(first).unwrap();
    let span = Span { region: first, offset: 0, len: 16 };
    assert_eq!(store.put(&[item(1, span)], &unlimited()), [Outcome::Ok(16)]);
    store.unregister(first).unwrap();
    assert_eq!(store.put(&[item(2, span)], &unlimited()), [Outcome::AddressLost]);
}

fn a_second_put_keeps_the_page_readable(store: &dyn Store) {
    let a = Arena::new(store, 64 * KIB);
    for _ in 0..3 {
        assert_eq!(put(store, &a, 1, KIB), Outcome::Ok(KIB));
    }
    let twice = [item(2, a.span(0, KIB)), item(2, a.span(0, KIB))];
    a.write(0, &bytes_of(2, KIB));
    assert_eq!(store.put(&twice, &unlimited()), [Outcome::Ok(KIB); 2]);
    assert_eq!(got(store, &a, 1, KIB), Outcome::Ok(KIB));
    assert_eq!(got(store, &a, 2, KIB), Outcome::Ok(KIB));
}

fn removing_removes(store: &dyn Store) {
    let a = Arena::new(store, 64 * KIB);
    for n in 0..4 {
        assert!(put(store, &a, n, KIB).is_ok());
    }
    let removed = store.remove(&[key(1), key(9), key(3)], &unlimited());
    assert_eq!(removed, [Outcome::Ok(KIB), Outcome::Missing, Outcome::Ok(KIB)]);
    let want = [Outcome::Ok(KIB), Outcome::Missing, Outcome::Ok(KIB), Outcome::Missing];
    assert_eq!((0..4).map(|n| got(store, &a, n, KIB)).collect::<Vec<_>>(), want);
    assert!(put(store, &a, 1, KIB).is_ok());
    assert_eq!(got(store, &a, 1, KIB), Outcome::Ok(KIB));
}

fn clearing_touches_one_namespace(store: &dyn Store) {
    let a = Arena::new(store, 64 * KIB);
    let in_ns = |ns: u8, n: u64| Item::one(&space_of(ns), &page(n), a.span(0, KIB));
    for ns in 0..3 {
        for n in 0..5 {
            a.write(0, &bytes_of(n, KIB));
            assert!(store.put(&[in_ns(ns, n)], &unlimited())[0].is_ok());
        }
    }
    assert_eq!(store.clear(namespace_of(1), &unlimited()).unwrap(), 5);
    assert_eq!(store.clear(namespace_of(1), &unlimited()).unwrap(), 0);
    assert_eq!(store.clear(namespace_of(200), &unlimited()).unwrap(), 0);
    for ns in 0..3 {
        for n in 0..5 {
            let outcome = store.get(&[in_ns(ns, n)], &unlimited())[0];
            assert_eq!(outcome, if ns == 1 { Outcome::Missing } else { Outcome::Ok(KIB) }, "{ns} {n}");
            if ns != 1 {
                assert!(a.read(0, KIB) == bytes_of(n, KIB));
            }
        }
    }
}

fn a_passed_deadline_or_a_cancelled_call_does_nothing(store: &dyn Store) {
    let a = Arena::new(store, 64 * KIB);
    assert!(put(store, &a, 1, KIB).is_ok());
    let late = Call { deadline: Some(Instant::now()), cancel: Cancel::new() };
    let cancel = Cancel::new();
    cancel.cancel();
    let cancelled = Call::within(Duration::from_secs(600)).with_cancel(&cancel);
    for (call, want) in [(late, Outcome::Timeout), (cancelled, Outcome::Cancelled)] {
        a.write(0, &[0x11; KIB]);
        assert_eq!(store.get(&[item(1, a.span(0, KIB))], &call), [want]);
        assert!(a.read(0, KIB).iter().all(|&b| b == 0x11));
        assert_eq!(store.put(&[item(2, a.span(0, KIB)), item(3, a.span(0, KIB))], &call), [want; 2]);
        assert_eq!(store.query(&[key(1)], &call), [want]);
        assert_eq!(store.remove(&[key(1)], &call), [want]);
    }
    assert_eq!(store.query(&[key(2), key(3)], &unlimited()), [Outcome::Missing; 2]);
    assert_eq!(got(store, &a, 1, KIB), Outcome::Ok(KIB));
}

fn closed_is_closed(store: &dyn Store) {
    let a = Arena::new(store, 64 * KIB);
    assert!(put(store, &a, 1, KIB).is_ok());
    store.sync(&unlimited()).unwrap();
    assert_eq!(store.health(), Health::Up);
    let soon = Instant::now() + Duration::from_secs(60);
    store.close(soon).unwrap();
    store.close(soon).unwrap();
    assert_eq!(store.health(), Health::Closed);
    assert_eq!(store.get(&[item(1, a.span(0, KIB))], &unlimited()), [Outcome::Closed]);
    assert_eq!(store.put(&[item(1, a.span(0, KIB))], &unlimited()), [Outcome::Closed]);
    assert_eq!(store.query(&[key(1)], &unlimited()), [Outcome::Closed]);
    assert_eq!(store.remove(&[key(1)], &unlimited()), [Outcome::Closed]);
    assert!(store.clear(namespace_of(0), &unlimited()).is_err());
    assert!(store.sync(&unlimited()).is_err());
    let region = region_for(store, KIB);
    assert!(matches!(store.register(&region), Err(RegisterError::Closed)));
}

fn counters_count(store: &dyn Store) {
    let a = Arena::new(store, 64 * KIB);
    for n in 0..3 {
        assert!(put(store, &a, n, KIB).is_ok());
    }
    let _ = got(store, &a, 0, KIB);
    let _ = got(store, &a, 50, KIB);
    let s = store.stats();
    assert_eq!((s.put_ok_total, s.put_bytes_total), (3, 3 * KIB as u64));
    assert_eq!((s.get_ok_total, s.get_bytes_total, s.get_missing_total), (1, KIB as u64, 1));
}

/// Random operations against a map; every byte compared.
fn agrees_with_a_map(store: &dyn Store) {
    let mut rng = Rng::seeded(0xC0FFEE);
    let a = Arena::new(store, 16 * KIB);
    let mut model = std::collections::BTreeMap::new();
    for step in 0..400 {
        let n = rng.below(24) as u64;
        let len = 64 + 97 * n as usize;
        match rng.below(8) {
            0..3 => {
                assert_eq!(put(store, &a, n, len), Outcome::Ok(len), "step {step}");
                model.insert(n, len);
            }
            3..6 => {
                let want = model.get(&n).map_or(Outcome::Missing, |&l| Outcome::Ok(l));
                assert_eq!(got(store, &a, n, len), want, "step {step}");
            }
            6 => {
                let want = model.remove(&n).map_or(Outcome::Missing, Outcome::Ok);
                assert_eq!(store.remove(&[key(n)], &unlimited()), [want], "step {step}");
            }
            _ => {
                let keys: Vec<_> = (0..24).map(key).collect();
                let want: Vec<_> =
                    (0..24).map(|n| model.get(&n).map_or(Outcome::Missing, |&l| Outcome::Ok(l))).collect();
                assert_eq!(store.query(&keys, &unlimited()), want, "step {step}");
            }
        }
    }
}

/// Four threads over few keys: whatever is found is whole and right.
fn threads_never_see_a_wrong_byte(store: &dyn Store) {
    let len = 3 * KIB;
    let arenas: Vec<_> = (0..4).map(|_| Arena::new(store, len)).collect();
    std::thread::scope(|s| {
        for (t, a) in arenas.iter().enumerate() {
            s.spawn(move || {
                let mut rng = Rng::seeded(77 + t as u64);
                for _ in 0..120 {
                    let n = rng.below(6) as u64;
                    match rng.below(5) {
                        0 | 1 => assert_eq!(put(store, a, n, len), Outcome::Ok(len)),
                        2 | 3 => {
                            let outcome = got(store, a, n, len);
                            assert!(outcome.is_ok() || outcome == Outcome::Missing, "{outcome:?}");
                        }
                        _ => {
                            let outcome = store.remove(&[key(n)], &unlimited())[0];
                            assert!(outcome.is_ok() || outcome == Outcome::Missing, "{outcome:?}");
                        }
                    }
                }
            });
        }
    });
    assert_eq!(store.stats().corrupt_total, 0);
}

/// Writes the suite out for one way to make a store. `None` from the maker is a skip that it has named.
macro_rules! suite {
    ($($name:ident: $make:expr;)+) => {$(
        mod $name {
            use super::*;

            fn with(test: fn(&dyn Store)) {
                let fixture: Option<Fixture> = $make;
                if let Some(f) = fixture {
                    test(&*f.store);
                }
            }

            suite!(@tests
                round_trip_of_every_length an_empty_batch_is_nothing presence_is_per_key_with_holes
                a_batch_has_an_outcome_per_item_in_order another_length_is_a_mismatch_and_nothing_is_written
                a_put_with_another_length_replaces another_identity_misses_and_harms_nothing
                pages_in_pieces pages_in_very_many_pieces memory_that_is_not_registered_is_lost
                registering_twice_counts a_second_put_keeps_the_page_readable removing_removes
                clearing_touches_one_namespace a_passed_deadline_or_a_cancelled_call_does_nothing
                closed_is_closed counters_count agrees_with_a_map threads_never_see_a_wrong_byte);
        }
    )+};
    (@tests $($test:ident)+) => {$(
        #[test]
        fn $test() {
            with(super::$test);
        }
    )+};
}

const ROOMY: usize = 64 << 20;

/// A file store on `io_uring`, if this build and this system have it.
fn ring(change: impl FnOnce(&mut FileConfig)) -> Option<Fixture> {
    if !cfg!(feature = "uring") {
        crate::kit::skip("the feature uring");
        return None;
    }
    let mut engine = IoEngine::Threads;
    let fixture = file_seen(
        |c| {
            c.engine = IoEngine::Uring;
            change(c);
        },
        |store| engine = store.engine(),
    );
    if engine != IoEngine::Uring {
        crate::kit::skip("io_uring (the system refuses it)");
        return None;
    }
    Some(fixture)
}

/// A real client that runs two calls at a time, so that one meets what another is writing.
#[cfg(feature = "mooncake")]
pub(crate) fn mooncake() -> Option<Fixture> {
    crate::service::Service::start_as("64 MB", true).map(mooncake_with)
}

/// With room for measurements.
#[cfg(feature = "mooncake")]
pub(crate) fn mooncake_large() -> Option<Fixture> {
    crate::service::Service::start("1 GB").map(mooncake_with)
}

#[cfg(feature = "mooncake")]
fn mooncake_with(service: crate::service::Service) -> Fixture {
    use sapwood::backend::store::mooncake::{MooncakeConfig, MooncakeStore};
    let store = MooncakeStore::open(MooncakeConfig::at(service.address())).unwrap();
    Fixture::new(store).keeping(service)
}

/// The library itself can not be had; its stand-in answers as it does.
#[cfg(feature = "mooncake-capi")]
fn mooncake_embedded() -> Option<Fixture> {
    Some(Fixture::new(crate::stand_in::open(&crate::stand_in::pool())))
}

#[cfg(not(feature = "mooncake-capi"))]
fn mooncake_embedded() -> Option<Fixture> {
    crate::kit::skip("the feature mooncake-capi");
    None
}

/// The contract needs the feature and the service.
#[cfg(not(feature = "mooncake"))]
pub(crate) fn mooncake() -> Option<Fixture> {
    crate::kit::skip("the feature mooncake");
    None
}

#[cfg(not(feature = "mooncake"))]
pub(crate) fn mooncake_large() -> Option<Fixture> {
    mooncake()
}

const TICK: Duration = Duration::from_millis(1);
const LONG: Duration = Duration::from_secs(600);

/// Everything around a file store, as an operator might put it.
fn stacked() -> Fixture {
    let dir = tempfile::tempdir().unwrap();
    let config = FileConfig { free_bytes_min: 0, ..FileConfig::new(dir.path().join("store"), ROOMY as u64) };
    let files = Wrapped::new(FileStore::open(config).unwrap(), Retry::new(2, TICK));
    let detached = Detached::new(Wrapped::new(files, Breaker::new(8, TICK)), LONG, 8);
    Fixture::new(Wrapped::new(detached, Deadlines::new(LONG))).keeping(dir)
}

/// The same store with small pages in groups.
fn grouped(fixture: Fixture) -> Fixture {
    Fixture::new(Grouped::with_object_bytes(Arc::clone(&fixture.store), 64 * KIB)).keeping(fixture)
}

/// A file store in a directory of its own, with segments so small that the suite fills several.
pub(crate) fn file(change: impl FnOnce(&mut FileConfig)) -> Fixture {
    file_seen(change, |_| {})
}

fn file_seen(change: impl FnOnce(&mut FileConfig), see: impl FnOnce(&FileStore)) -> Fixture {
    let dir = tempfile::tempdir().unwrap();
    let mut config = FileConfig::new(dir.path().join("store"), ROOMY as u64);
    config.segment_bytes = 1 << 20;
    config.free_bytes_min = 0;
    change(&mut config);
    let store = FileStore::open(config).unwrap();
    see(&store);
    Fixture::new(store).keeping(dir)
}

suite! {
    mem: Some(Fixture::new(MemStore::new(ROOMY)));
    file_buffered: Some(file(|_| {}));
    file_direct: Some(file(|c| c.io = IoMode::Direct));
    file_packed: Some(file(|c| c.align = 64));
    uring_buffered: ring(|_| {});
    uring_direct: ring(|c| c.io = IoMode::Direct);
    uring_shallow: ring(|c| c.depth = 1);
    redis_socket: crate::remote::redis_fixture(true);
    redis_tcp: crate::remote::redis_fixture(false);
    bucket: crate::remote::bucket_fixture();
    retried: Some(Fixture::new(Wrapped::new(MemStore::new(ROOMY), Retry::new(3, TICK))));
    guarded: Some(Fixture::new(Wrapped::new(MemStore::new(ROOMY), Breaker::new(3, TICK))));
    limited: Some(Fixture::new(Wrapped::new(MemStore::new(ROOMY), Limit::new(1 << 40, 1 << 40, TICK))));
    bounded: Some(Fixture::new(Wrapped::new(MemStore::new(ROOMY), Deadlines::new(LONG))));
    detached: Some(Fixture::new(Detached::new(MemStore::new(ROOMY), LONG, 8)));
    stacked: Some(stacked());
    mooncake: mooncake();
    mooncake_embedded_stand_in: mooncake_embedded();
    grouped: Some(Fixture::new(Grouped::with_object_bytes(MemStore::new(ROOMY), 16 * KIB)));
    grouped_files: Some(grouped(file(|_| {})));
    grouped_redis: crate::remote::redis_fixture(true).map(grouped);
    grouped_bucket: crate::remote::bucket_fixture().map(grouped);
    grouped_mooncake: mooncake().map(grouped);
    fault_free: Some(Fixture::new(Faulty::new(MemStore::new(ROOMY))));
}
