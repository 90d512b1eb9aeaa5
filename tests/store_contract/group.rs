//! Small pages in groups: every page keeps its name, whatever becomes of its neighbours, over every kind of store.
//!
//! A new wrapper over the same store is another process, or the same one after a restart: it remembers nothing.

use std::collections::BTreeMap;
use std::slice::from_ref;
use std::sync::Arc;

use sapwood::backend::identity::{LINKS, NamespaceDigest, Space, StoreKey};
use sapwood::backend::store::fault::{Fault, Faulty, When};
use sapwood::backend::store::group::{Grouped, Names};
use sapwood::backend::store::mem::MemStore;
use sapwood::backend::store::stats::OpKind;
use sapwood::backend::store::{Call, Item, Outcome, Span, Store, TransportCause};
use sha2::{Digest as _, Sha256};

use crate::kit::{Arena, Fixture, Rng, bytes_of, descriptor, item, key, namespace_of, page, space, space_of};

const LEN: usize = 4096;
/// Pages of a group of such pages: their links are an eighth of their bytes.
const GROUP: usize = 12;
const OBJECT: usize = 64 << 10;

type Inner = Arc<dyn Store>;

fn call() -> Call {
    Call::unbounded()
}

/// Another process with the same store.
fn process(inner: &Inner) -> Grouped<Inner> {
    Grouped::with_object_bytes(Arc::clone(inner), OBJECT)
}

fn items(a: &Arena, pages: impl IntoIterator<Item = u64>) -> Vec<Item> {
    pages.into_iter().enumerate().map(|(i, n)| item(n, a.span(i * LEN, LEN))).collect()
}

/// Fewer steps for a store that takes 40 ms a request.
fn steps(inner: &Inner, n: usize) -> usize {
    if inner.caps().name == "object" { n / 6 } else { n }
}

/// Puts pages in one batch.
fn put(store: &dyn Store, pages: impl IntoIterator<Item = u64>) -> Vec<Outcome> {
    let pages: Vec<u64> = pages.into_iter().collect();
    let a = Arena::new(store, pages.len() * LEN);
    pages.iter().enumerate().for_each(|(i, &n)| a.write(i * LEN, &bytes_of(n, LEN)));
    store.put(&items(&a, pages), &call())
}

/// Gets pages in one batch and compares what came.
fn got(store: &dyn Store, pages: impl IntoIterator<Item = u64>) -> Vec<Outcome> {
    let pages: Vec<u64> = pages.into_iter().collect();
    let a = Arena::new(store, pages.len() * LEN);
    let out = store.get(&items(&a, pages.iter().copied()), &call());
    for (i, (n, outcome)) in pages.iter().zip(&out).enumerate() {
        if outcome.is_ok() {
            assert!(*outcome == Outcome::Ok(LEN) && a.read(i * LEN, LEN) == bytes_of(*n, LEN), "page {n}");
        }
    }
    out
}

fn query(store: &dyn Store, pages: std::ops::Range<u64>) -> Vec<Outcome> {
    store.query(&pages.map(key).collect::<Vec<_>>(), &call())
}

const OK: Outcome = Outcome::Ok(LEN);
const GONE: Outcome = Outcome::Missing;

fn link_bytes(members: usize) -> usize {
    80 + 40 * members
}

/// Name of the group that the link of a page leads to.
fn group_of(inner: &Inner, page: u64, members: usize) -> StoreKey {
    let a = Arena::new(&**inner, link_bytes(members));
    let spans = [a.span(0, link_bytes(members))].into_iter().collect();
    let link = Item { key: key(page), space: Space::new(LINKS, NamespaceDigest::DEFAULT), spans };
    assert_eq!(inner.get(&[link], &call()), [Outcome::Ok(link_bytes(members))]);
    let digest =
        Sha256::new().chain_update(b"sapwood-group-v1").chain_update(space().descriptor().0).finalize();
    let group = sapwood::backend::identity::DescriptorDigest(digest.into());
    let link = a.read(0, link_bytes(members));
    Space::new(group, space().namespace()).key(&Sha256::digest(link).into())
}

fn pages_come_back_one_by_one_in_any_order_after_a_restart(inner: &Inner) {
    assert_eq!(put(&process(inner), 0..40), [OK; 40]);
    for n in [39, 0, 17, 11, 12, 36, 35] {
        let after = process(inner);
        assert_eq!(got(&after, [n]), [OK], "page {n}");
        assert_eq!(query(&after, n..n + 1), [OK], "page {n}");
    }
    let after = process(inner);
    assert_eq!(query(&after, 0..45), [vec![OK; 40], vec![GONE; 5]].concat());
    assert_eq!(got(&after, (0..40).rev()), [OK; 40]);
    // Every second page, and one that is not there.
    let after = process(inner);
    assert_eq!(got(&after, (0..40).step_by(2).chain([99])), [vec![OK; 20], vec![GONE]].concat());
}

fn groups_are_as_large_as_their_pages_allow(inner: &Inner) {
    let store = process(inner);
    assert_eq!(put(&store, 0..40), [OK; 40]);
    for (first, members) in [(0, GROUP), (12, GROUP), (24, GROUP), (36, 4)] {
        let group = group_of(inner, first, members);
        assert_eq!(inner.query(&[group], &call()), [Outcome::Ok(members * LEN)]);
        assert_eq!(group_of(inner, first + members as u64 - 1, members), group);
    }
    // Two make a group, one does not.
    assert_eq!(put(&store, 50..52), [OK; 2]);
    assert_eq!(put(&store, 60..61), [OK]);
    group_of(inner, 50, 2);
    assert_eq!(query(&**inner, 60..61), [OK]);
    assert_eq!(got(&process(inner), [50, 51, 60]), [OK; 3]);
}

fn what_is_there_is_not_put_again_and_fills_no_gap_of_another(inner: &Inner) {
    assert_eq!(put(&process(inner), [0, 1, 2, 3, 6, 7]), [OK; 6]);
    let other = process(inner);
    assert_eq!(put(&other, 0..8), [OK; 8]);
    assert_eq!(other.stats().put_present_total, 6);
    group_of(inner, 4, 2);
    assert_eq!(got(&process(inner), 0..8), [OK; 8]);
}

fn a_link_that_is_gone_costs_its_page_only(inner: &Inner) {
    assert_eq!(put(&process(inner), 0..12), [OK; 12]);
    let half: Vec<_> = (0..12).step_by(2).map(key).collect();
    assert!(inner.remove(&half, &call()).iter().all(|o| o.is_ok()));
    let after = process(inner);
    let want: Vec<_> = (0..12).map(|n| if n % 2 == 0 { GONE } else { OK }).collect();
    assert_eq!(query(&after, 0..12), want);
    assert_eq!(got(&after, 0..12), want);
    assert_eq!(put(&after, 0..12), [OK; 12]);
    assert_eq!(after.stats().put_present_total, 6 + inner.stats().put_present_total);
    assert_eq!(got(&process(inner), 0..12), [OK; 12]);
    assert_eq!(got(&after, 0..12), [OK; 12]);
}

fn a_group_that_is_gone_costs_its_pages_and_can_be_put_again(inner: &Inner) {
    let before = process(inner);
    assert_eq!(put(&before, 0..24), [OK; 24]);
    let first = group_of(inner, 0, GROUP);
    assert!(inner.remove(&[first], &call())[0].is_ok());
    let want = [vec![GONE; 12], vec![OK; 12]].concat();
    let after = process(inner);
    for store in [&after, &before] {
        assert_eq!(got(store, 0..24), want);
        assert_eq!(query(store, 0..24), want);
    }
    // The links are still there, and are as long as the new ones.
    assert_eq!(put(&after, 0..24), [OK; 24]);
    for store in [&after, &before, &process(inner)] {
        assert_eq!(got(store, 0..24), [OK; 24]);
        assert_eq!(query(store, 0..24), [OK; 24]);
    }
}

fn a_page_that_moved_to_another_group_is_found_by_who_remembers_the_old_one(inner: &Inner) {
    let (mover, reader) = (process(inner), process(inner));
    assert_eq!(put(&mover, 0..4), [OK; 4]);
    assert_eq!(got(&reader, 0..4), [OK; 4]);
    let keys: Vec<_> = (0..4).map(key).collect();
    assert_eq!(mover.remove(&keys, &call()), [OK; 4]);
    assert_eq!(put(&mover, [1, 3, 5, 7]), [OK; 4]);
    assert_eq!(got(&reader, 0..8), [GONE, OK, GONE, OK, GONE, OK, GONE, OK]);
    // By itself, too.
    assert_eq!(mover.remove(&[key(1), key(3), key(5), key(7)], &call()), [OK; 4]);
    assert_eq!(put(&mover, [3]), [OK]);
    assert_eq!(got(&reader, [1, 3, 5]), [GONE, OK, GONE]);
}

fn removing_takes_one_page_and_the_last_takes_the_group(inner: &Inner) {
    let store = process(inner);
    assert_eq!(put(&store, 0..4), [OK; 4]);
    let group = group_of(inner, 0, 4);
    assert_eq!(store.remove(&[key(1), key(9), key(2)], &call()), [OK, GONE, OK]);
    for store in [&store, &process(inner)] {
        assert_eq!(query(store, 0..4), [OK, GONE, GONE, OK]);
        assert_eq!(got(store, 0..4), [OK, GONE, GONE, OK]);
    }
    assert!(inner.query(&[group], &call())[0].is_ok());
    assert_eq!(process(inner).remove(&[key(0), key(3)], &call()), [OK; 2]);
    assert_eq!(inner.query(&[group], &call()), [GONE]);
    assert_eq!(got(&process(inner), 0..4), [GONE; 4]);
}

fn clearing_takes_links_and_groups_of_one_namespace(inner: &Inner) {
    let store = process(inner);
    let a = Arena::new(&store, 12 * LEN);
    let batch = |ns: u8| -> Vec<Item> {
        (0..12).map(|n| Item::one(&space_of(ns), &page(n), a.span(n as usize * LEN, LEN))).collect()
    };
    (0..12).for_each(|n| a.write(n as usize * LEN, &bytes_of(n, LEN)));
    for ns in 0..3 {
        assert_eq!(store.put(&batch(ns), &call()), [OK; 12]);
    }
    assert_eq!(store.clear(namespace_of(1), &call()).unwrap(), 13, "a group and a link a page");
    assert_eq!(store.clear(namespace_of(1), &call()).unwrap(), 0);
    for store in [&store, &process(inner)] {
        let a = Arena::new(store, 12 * LEN);
        for ns in 0..3 {
            let batch: Vec<Item> =
                (0..12).map(|n| Item::one(&space_of(ns), &page(n), a.span(n as usize * LEN, LEN))).collect();
            assert_eq!(store.get(&batch, &call()), if ns == 1 { [GONE; 12] } else { [OK; 12] });
            let keys: Vec<_> = batch.iter().map(|i| i.key).collect();
            assert_eq!(store.query(&keys, &call()), if ns == 1 { [GONE; 12] } else { [OK; 12] });
        }
    }
}

fn planes_that_alternate_have_groups_of_their_own(inner: &Inner) {
    let store = process(inner);
    let mut draft = descriptor();
    draft.plane = sapwood::backend::identity::Plane::Draft;
    let draft = draft.space(namespace_of(0)).unwrap();
    let a = Arena::new(&store, 16 * LEN);
    let batch = |a: &Arena| -> Vec<Item> {
        let span = |i: u64| a.span(i as usize * LEN, LEN);
        (0..8).flat_map(|n| [item(n, span(2 * n)), Item::one(&draft, &page(n), span(2 * n + 1))]).collect()
    };
    (0..16).for_each(|i| a.write(i as usize * LEN, &bytes_of(100 + i, LEN)));
    assert_eq!(store.put(&batch(&a), &call()), [OK; 16]);
    group_of(inner, 0, 8);
    let after = process(inner);
    let b = Arena::new(&after, 16 * LEN);
    assert_eq!(after.get(&batch(&b), &call()), [OK; 16]);
    assert!((0..16).all(|i| b.read(i as usize * LEN, LEN) == bytes_of(100 + i, LEN)));
    // The right name with the identity of another plane.
    let wrong = Item { space: draft, ..item(3, b.span(0, LEN)) };
    assert_eq!(after.get(&[wrong], &call()), [GONE]);
    assert_eq!(got(&process(inner), [99]), [GONE]);
}

fn lengths_pieces_and_pages_asked_for_twice(inner: &Inner) {
    let store = process(inner);
    assert_eq!(put(&store, 0..6), [OK; 6]);
    for store in [&store, &process(inner)] {
        let a = Arena::new(store, 8 * LEN);
        // Before anything of the page is remembered, and after.
        for _ in 0..2 {
            for len in [1, 1000, LEN - 1, LEN + 1, 2 * LEN] {
                let outcome = store.get(&[item(2, a.span(0, len))], &call());
                assert_eq!(outcome, [Outcome::SizeMismatch { stored: LEN }], "{len}");
            }
        }
        let twice = [item(1, a.span(0, LEN)), item(1, a.span(LEN, LEN)), item(1, a.span(2 * LEN, LEN))];
        assert_eq!(store.get(&twice, &call()), [OK; 3]);
        assert!((0..3).all(|i| a.read(i * LEN, LEN) == bytes_of(1, LEN)));
        let pieces = [a.span(5 * LEN, 1000), a.span(4 * LEN, 1), a.span(0, 0), a.span(0, LEN - 1001)];
        assert_eq!(store.get(&[Item::scattered(&space(), &page(4), pieces)], &call()), [OK]);
        let mut all = a.read(5 * LEN, 1000);
        all.extend(a.read(4 * LEN, 1));
        all.extend(a.read(0, LEN - 1001));
        assert!(all == bytes_of(4, LEN));
        let lost = [item(3, a.span(0, LEN)), item(4, Span { offset: 8 * LEN, ..a.span(0, LEN) })];
        assert_eq!(store.get(&lost, &call()), [OK, Outcome::AddressLost]);
    }
    // A page as long as a link, by itself, is not taken for one.
    let a = Arena::new(&store, LEN);
    a.write(0, &bytes_of(70, 160));
    assert_eq!(store.put(&[item(70, a.span(0, 160))], &call()), [Outcome::Ok(160)]);
    for store in [&store, &process(inner)] {
        assert_eq!(query(store, 70..71), [Outcome::Ok(160)]);
        let a = Arena::new(store, LEN);
        assert_eq!(store.get(&[item(70, a.span(0, 160))], &call()), [Outcome::Ok(160)]);
        assert!(a.read(0, 160) == bytes_of(70, 160));
    }
    // A page of another length takes the place of one in a group, and that of one takes its.
    for len in [2 * LEN, 40_000, LEN / 2] {
        let store = process(inner);
        let a = Arena::new(&store, 128 << 10);
        let batch = [item(0, a.span(0, len)), item(1, a.span(50_000, len))];
        a.write(0, &bytes_of(500, len));
        a.write(50_000, &bytes_of(501, len));
        assert_eq!(store.put(&batch, &call()), [Outcome::Ok(len); 2]);
        a.write(0, &vec![0; 100_000]);
        assert_eq!(store.get(&batch, &call()), [Outcome::Ok(len); 2]);
        assert!(a.read(0, len) == bytes_of(500, len) && a.read(50_000, len) == bytes_of(501, len));
        let other = process(inner);
        assert_eq!(query(&other, 0..3), [Outcome::Ok(len), Outcome::Ok(len), OK]);
    }
}

/// Random batches by one process and another that comes and goes, against a map; every byte compared.
fn agrees_with_a_map(inner: &Inner) {
    let mut rng = Rng::seeded(0x6E0C);
    let mut store = process(inner);
    let mut there: BTreeMap<u64, ()> = BTreeMap::new();
    for step in 0..steps(inner, 120) {
        if rng.below(6) == 0 {
            store = process(inner);
        }
        let (first, n) = (rng.below(30) as u64, 1 + rng.below(16) as u64);
        let mut pages: Vec<u64> = (first..first + n).filter(|_| rng.below(4) > 0).collect();
        pages.push(first + n);
        let want: Vec<_> = pages.iter().map(|n| if there.contains_key(n) { OK } else { GONE }).collect();
        match rng.below(8) {
            0..3 => {
                assert_eq!(put(&store, pages.iter().copied()), vec![OK; pages.len()], "step {step}");
                there.extend(pages.iter().map(|n| (*n, ())));
            }
            3..6 => assert_eq!(got(&store, pages), want, "step {step}"),
            6 => {
                let keys: Vec<_> = pages.iter().map(|&n| key(n)).collect();
                assert_eq!(store.remove(&keys, &call()), want, "step {step}");
                pages.iter().for_each(|n| {
                    there.remove(n);
                });
            }
            _ => {
                let keys: Vec<_> = pages.iter().map(|&n| key(n)).collect();
                assert_eq!(store.query(&keys, &call()), want, "step {step}");
            }
        }
    }
}

fn threads_never_see_a_wrong_byte(inner: &Inner) {
    let stores = [process(inner), process(inner)];
    std::thread::scope(|s| {
        for t in 0..4 {
            let store = &stores[t % 2];
            s.spawn(move || {
                let mut rng = Rng::seeded(41 + t as u64);
                for _ in 0..steps(inner, 24) {
                    let first = rng.below(6) as u64;
                    let pages = first..first + 2 + rng.below(5) as u64;
                    let fine = |o: &Outcome| matches!(o, Outcome::Ok(LEN) | Outcome::Missing);
                    let out = match rng.below(5) {
                        0 | 1 => put(store, pages),
                        2 | 3 => got(store, pages),
                        _ => store.remove(&pages.map(key).collect::<Vec<_>>(), &call()),
                    };
                    assert!(out.iter().all(fine), "{out:?}");
                }
            });
        }
    });
    assert_eq!(inner.stats().corrupt_total, 0);
}

macro_rules! over {
    (@with $($test:ident)+; $($name:ident: $make:expr;)+) => {
        over! { @each [$($test)+] $($name: $make;)+ }
    };
    (@each $tests:tt $($name:ident: $make:expr;)+) => {$(
        mod $name {
            use super::*;

            fn with(test: fn(&Inner)) {
                let fixture: Option<Fixture> = $make;
                if let Some(f) = fixture {
                    test(&f.store);
                }
            }

            over!(@tests $tests);
        }
    )+};
    (@tests [$($test:ident)+]) => {$(
        #[test]
        fn $test() {
            with(super::$test);
        }
    )+};
}

over! { @with
                pages_come_back_one_by_one_in_any_order_after_a_restart groups_are_as_large_as_their_pages_allow
                what_is_there_is_not_put_again_and_fills_no_gap_of_another a_link_that_is_gone_costs_its_page_only
                a_group_that_is_gone_costs_its_pages_and_can_be_put_again
                a_page_that_moved_to_another_group_is_found_by_who_remembers_the_old_one
                removing_takes_one_page_and_the_last_takes_the_group
                clearing_takes_links_and_groups_of_one_namespace planes_that_alternate_have_groups_of_their_own
                lengths_pieces_and_pages_asked_for_twice agrees_with_a_map threads_never_see_a_wrong_byte;
    mem: Some(Fixture::new(MemStore::new(64 << 20)));
    files: Some(crate::contract::file(|_| {}));
    redis: crate::remote::redis_fixture(true);
    bucket: crate::remote::bucket_fixture();
    mooncake: crate::contract::mooncake();
}

/// Another process that leaves a link for the first page of a group only.
fn sparing(inner: &Inner) -> Grouped<Inner> {
    process(inner).with_names(Names::FirstPage)
}

fn chains_are_found_from_their_beginning_after_a_restart(inner: &Inner) {
    assert_eq!(put(&sparing(inner), 0..40), [OK; 40]);
    let after = sparing(inner);
    assert_eq!(query(&after, 0..45), [vec![OK; 40], vec![GONE; 5]].concat());
    assert_eq!(got(&after, 0..40), [OK; 40]);
    assert_eq!(got(&after, [17, 39, 3]), [OK; 3]);
    // At once, and with every page asked for.
    assert_eq!(got(&sparing(inner), (0..45).rev()), [vec![GONE; 5], vec![OK; 40]].concat());
    // A branch: the first pages of a chain, then others.
    let branch = sparing(inner);
    assert_eq!(put(&branch, (0..15).chain(100..110)), [OK; 25]);
    assert_eq!(branch.stats().put_present_total - inner.stats().put_present_total, 15);
    assert_eq!(got(&sparing(inner), (0..15).chain(100..110)), [OK; 25]);
}

fn a_page_in_the_middle_is_found_by_who_has_met_the_first(inner: &Inner) {
    assert_eq!(put(&sparing(inner), 0..12), [OK; 12]);
    let stranger = sparing(inner);
    assert_eq!((got(&stranger, [5]), query(&stranger, 5..6)), (vec![GONE], vec![GONE]));
    assert_eq!(query(&stranger, 0..1), [OK]);
    assert_eq!((got(&stranger, [5]), query(&stranger, 5..6)), (vec![OK], vec![OK]));
    // Who misses it puts it again, and then has it twice.
    let other = sparing(inner);
    assert_eq!(put(&other, 5..9), [OK; 4]);
    assert_eq!(got(&other, 5..9), [OK; 4]);
    assert_eq!(got(&sparing(inner), 0..12), [OK; 12]);
    assert_eq!(got(&sparing(inner), 5..9), [OK; 4]);
}

fn a_group_without_its_link_or_without_its_bytes_can_be_put_again(inner: &Inner) {
    let before = sparing(inner);
    assert_eq!(put(&before, 0..24), [OK; 24]);
    let want = [vec![GONE; 12], vec![OK; 12]].concat();
    for what in [key(0), group_of(inner, 0, GROUP)] {
        assert!(inner.remove(&[what], &call())[0].is_ok());
        let after = sparing(inner);
        assert_eq!(got(&after, 0..24), want);
        assert_eq!(query(&after, 0..24), want);
        assert_eq!(put(&after, 0..24), [OK; 24]);
        for store in [&after, &before, &sparing(inner)] {
            assert_eq!(got(store, 0..24), [OK; 24]);
            assert_eq!(query(store, 0..24), [OK; 24]);
        }
    }
}

fn removing_a_page_takes_its_group(inner: &Inner) {
    let store = sparing(inner);
    assert_eq!(put(&store, (0..24).chain([50])), [OK; 25]);
    assert_eq!(store.remove(&[key(3), key(4), key(50), key(99)], &call()), [OK, OK, OK, GONE]);
    for store in [&store, &sparing(inner)] {
        assert_eq!(got(store, 0..24), [vec![GONE; 12], vec![OK; 12]].concat());
        assert_eq!(query(store, 50..51), [GONE]);
    }
    assert_eq!(put(&store, 0..24), [OK; 24]);
    // The two kinds of links read each other.
    assert_eq!(got(&process(inner), [0, 12]), [OK; 2]);
    assert_eq!(put(&process(inner), 60..72), [OK; 12]);
    let reader = sparing(inner);
    assert_eq!(got(&reader, [65]), [OK]);
    assert_eq!(reader.remove(&[key(65)], &call()), [OK]);
    assert_eq!(got(&process(inner), 60..72), [GONE; 12]);
}

/// Whatever is found has the right bytes, and what one process put it finds, until somebody removes it.
fn random_batches_of_several_processes(inner: &Inner) {
    let mut rng = Rng::seeded(0xF125);
    let stores = [sparing(inner), process(inner), sparing(inner)];
    let mut there: BTreeMap<u64, ()> = BTreeMap::new();
    for step in 0..steps(inner, 90) {
        let store = &stores[rng.below(3)];
        let (first, n) = (rng.below(30) as u64, 1 + rng.below(16) as u64);
        match rng.below(6) {
            0..3 => {
                assert_eq!(put(store, first..first + n), vec![OK; n as usize], "step {step}");
                assert_eq!(got(store, first..first + n), vec![OK; n as usize], "step {step}");
                there.extend((first..first + n).map(|n| (n, ())));
            }
            3..5 => {
                for (n, outcome) in (first..first + n).zip(got(store, first..first + n)) {
                    assert!(outcome == GONE || outcome == OK && there.contains_key(&n), "step {step}: {n}");
                }
            }
            _ => {
                let keys: Vec<_> = (0..46).map(key).collect();
                for store in &stores {
                    let out = store.remove(&keys, &call());
                    assert!(out.iter().all(|o| matches!(o, Outcome::Ok(_) | Outcome::Missing)), "{out:?}");
                }
                let left = got(&sparing(inner), 0..46);
                assert!(left.iter().all(|o| *o == GONE), "step {step}: {left:?}");
                there.clear();
            }
        }
    }
}

mod sparing_names {
    use super::*;

    over! { @with
        chains_are_found_from_their_beginning_after_a_restart
        a_page_in_the_middle_is_found_by_who_has_met_the_first
        a_group_without_its_link_or_without_its_bytes_can_be_put_again
        removing_a_page_takes_its_group random_batches_of_several_processes;
        mem: Some(Fixture::new(MemStore::new(64 << 20)));
        files: Some(crate::contract::file(|_| {}));
        redis: crate::remote::redis_fixture(true);
        bucket: crate::remote::bucket_fixture();
        mooncake: crate::contract::mooncake();
    }
}

/// A group in memory, whose bytes a test can reach.
fn in_memory(pages: std::ops::Range<u64>) -> (Arc<MemStore>, Inner) {
    let mem = Arc::new(MemStore::new(1 << 24));
    let inner: Inner = Arc::clone(&mem) as Inner;
    let n = (pages.end - pages.start) as usize;
    assert_eq!(put(&process(&inner), pages), vec![OK; n]);
    (mem, inner)
}

#[test]
fn a_damaged_group_costs_its_pages_and_no_other() {
    let (mem, inner) = in_memory(0..24);
    let group = group_of(&inner, 0, GROUP);
    assert!(mem.tamper(&group, |bytes| bytes[128 + 5 * LEN + 7] ^= 2));
    let store = process(&inner);
    assert_eq!(got(&store, 0..24), [vec![Outcome::Corrupt; 12], vec![OK; 12]].concat());
    assert_eq!(store.stats().corrupt_total, 12);
    assert_eq!(got(&store, 0..24), [vec![GONE; 12], vec![OK; 12]].concat());
    assert_eq!(put(&store, 0..24), [OK; 24]);
    assert_eq!(got(&process(&inner), 0..24), [OK; 24]);
}

#[test]
fn a_damaged_link_costs_one_page_and_no_other() {
    let (mem, inner) = in_memory(0..12);
    assert!(mem.tamper(&key(3), |bytes| bytes[200] ^= 1));
    let store = process(&inner);
    let one = |n, outcome| (0..12).map(|i| if i == n { outcome } else { OK }).collect::<Vec<_>>();
    assert_eq!(got(&store, [3]), [Outcome::Corrupt]);
    assert_eq!(got(&store, 0..12), one(3, GONE));
    assert_eq!(put(&store, 0..12), [OK; 12]);
    assert_eq!(got(&process(&inner), 0..12), [OK; 12]);
}

/// Links are few bytes, so reading a chain must not read one a page: 3 links and 3 groups for 36 pages.
#[test]
fn a_chain_costs_one_link_and_one_object_a_group() {
    let (mem, inner) = in_memory(0..36);
    let before = mem.stats();
    assert_eq!(before.objects, 36 + 3);
    let store = process(&inner);
    assert_eq!(query(&store, 0..36), [OK; 36]);
    assert_eq!(mem.stats().get_ok_total - before.get_ok_total, 3);
    assert_eq!(got(&store, 0..36), [OK; 36]);
    assert_eq!(mem.stats().get_ok_total - before.get_ok_total, 6);
    // What is remembered is not asked for again.
    assert_eq!(got(&store, 12..24), [OK; 12]);
    assert_eq!(mem.stats().get_ok_total - before.get_ok_total, 7);
}

#[test]
fn a_page_is_in_when_its_link_is_in() {
    let broken = Outcome::Transport(TransportCause::Injected);
    let faulty = Arc::new(Faulty::new(MemStore::new(1 << 24)));
    let inner: Inner = Arc::clone(&faulty) as Inner;
    let store = process(&inner);
    // The group of 12 is the first object, the links follow.
    faulty.add(OpKind::Put, When::Nth(5), Fault::Fail(broken));
    let want: Vec<_> = (0..12).map(|n| if n == 3 { broken } else { OK }).collect();
    assert_eq!(put(&store, 0..12), want);
    let missing: Vec<_> = (0..12).map(|n| if n == 3 { GONE } else { OK }).collect();
    for store in [&store, &process(&inner)] {
        assert_eq!(query(store, 0..12), missing);
        assert_eq!(got(store, 0..12), missing);
    }
    faulty.heal();
    assert_eq!(put(&store, 0..12), [OK; 12]);
    faulty.add(OpKind::Put, When::Nth(15), Fault::Fail(Outcome::NoSpace));
    assert_eq!(put(&store, 20..32), [Outcome::NoSpace; 12], "the group did not fit");
    assert_eq!(query(&store, 20..32), [GONE; 12]);
    // A caller who gives up between the group and its links has put nothing, and can try again.
    faulty.heal();
    let cancelled = call();
    cancelled.cancel.cancel();
    let a = Arena::new(&store, LEN);
    assert_eq!(store.put(from_ref(&item(50, a.span(0, LEN))), &cancelled), [Outcome::Cancelled]);
    assert_eq!(got(&process(&inner), 0..12), [OK; 12]);
}

/// Another process removes a page between the look at its name and the reading of its link, and puts it again. For a moment
/// the name looked like that of a page as long as a link, and a removal said that it had removed so many bytes.
#[test]
fn a_link_that_went_and_came_back_is_not_a_page_of_its_length() {
    for nth in 1..3 {
        let faulty = Arc::new(Faulty::new(MemStore::new(1 << 24)));
        let inner: Inner = faulty.clone();
        assert_eq!(put(&process(&inner), 0..2), [OK; 2]);
        faulty.add(OpKind::Get, When::Nth(nth), Fault::Fail(Outcome::Missing));
        let keys = [key(0), key(1)];
        assert_eq!(process(&inner).query(&keys, &call()), [OK; 2]);
        assert_eq!(faulty.struck(), u64::from(nth == 1));
        assert_eq!(process(&inner).remove(&keys, &call()), [OK; 2]);
        assert_eq!(faulty.struck(), 1);
    }
}

/// Whoever does not group misses the pages of a group, and reads no link for a page.
#[test]
fn without_the_wrapper_a_link_is_a_miss() {
    let (_, inner) = in_memory(0..2);
    let a = Arena::new(&*inner, LEN);
    for len in [LEN, link_bytes(2)] {
        assert_eq!(inner.get(&[item(0, a.span(0, len))], &call()), [GONE]);
    }
}

/// A clearing is a record of the log: after opening again it holds for links as well.
#[test]
fn a_clearing_of_links_holds_after_a_restart_of_the_file_store() {
    use sapwood::backend::store::file::{FileConfig, FileStore};
    let dir = tempfile::tempdir().unwrap();
    let open = || -> Inner {
        let mut config = FileConfig::new(dir.path().join("s"), 64 << 20);
        config.free_bytes_min = 0;
        Arc::new(FileStore::open(config).unwrap())
    };
    let inner = open();
    let store = process(&inner);
    assert_eq!(put(&store, 0..12), [OK; 12]);
    assert_eq!(store.clear(namespace_of(0), &call()).unwrap(), 13);
    assert_eq!(put(&store, 6..18), [OK; 12]);
    drop((store, inner));
    let inner = open();
    assert_eq!(got(&process(&inner), 0..18), [vec![GONE; 6], vec![OK; 12]].concat());
    assert_eq!(inner.stats().objects, 13);
}
