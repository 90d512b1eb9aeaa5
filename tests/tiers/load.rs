//! Host to device.

use sapwood::base::{NamespaceId, OpId, Tier, Time};
use sapwood::sim::{Call, Pending, Rig};
use sapwood::tiers::{Alloc, CoreError, Event, LoadBack, LoadState, Prefetch, Refusal, WritePolicy};

use crate::common::{WT1, config, flush_device, found, t, t1, with_store};

/// A rig whose host holds `prompts` and whose device holds nothing.
fn on_host(device: u32, host: u32, write: WritePolicy, prompts: &[&str]) -> Rig {
    let mut rig = Rig::new(config(device, host, write));
    for prompt in prompts {
        rig.serve(&t(prompt));
        rig.drain();
    }
    flush_device(&mut rig, device);
    rig
}

#[test]
fn a_load_restores_what_was_written() {
    for write in [WT1, WritePolicy::WriteBack] {
        let mut rig = on_host(4, 8, write, &["ABCD"]);
        let request = rig.request();
        let m = rig.match_prefix(request, &t("ABCD")).unwrap();
        assert_eq!((m.device_tokens, m.host_tokens), (0, 16), "{write:?}");
        assert_eq!(rig.load_back(request), Ok(LoadBack::Started { tokens: 16 }));
        assert_eq!(rig.core.load_state(request), Ok(LoadState::Pending { layers: 0 }));
        rig.drain();
        assert_eq!(rig.core.load_state(request), Ok(LoadState::Ready));
        rig.verify(request, &t("ABCD"));
        rig.abort(request).unwrap();
        rig.assert_quiet();
    }
}

/// sgl#27631 (B09): making room for a load evicted, which wrote back, which evicted the very host pages of the load.
#[test]
fn b09_making_room_never_takes_from_the_load() {
    let mut rig = on_host(4, 4, WritePolicy::WriteBack, &["ABCD"]);
    rig.serve(&t("EFGH"));
    let request = rig.request();
    assert_eq!(rig.match_prefix(request, &t("ABCD")).unwrap().host_tokens, 16);
    // The host is full of the pages to restore, so EFGH can only be dropped.
    assert_eq!(rig.load_back(request), Ok(LoadBack::Started { tokens: 16 }));
    rig.drain();
    rig.verify(request, &t("ABCD"));
    rig.abort(request).unwrap();
    rig.assert_quiet();
}

/// The asynchronous form: the copy is in flight, the request has gone, and host pages are wanted.
#[test]
fn b09_host_pages_of_a_load_in_flight_stay() {
    let mut rig = on_host(8, 4, WT1, &["ABCD"]);
    let request = rig.request();
    rig.match_prefix(request, &t("ABCD")).unwrap();
    rig.load_back(request).unwrap();
    rig.abort(request).unwrap();
    // Backing up EFGH wants four host pages; the four there are being read.
    rig.serve(&t("EFGH"));
    let load = rig.pending.iter().position(|p| matches!(p, Pending::ToDevice(..))).unwrap();
    rig.complete(load, &Call::Well);
    rig.drain();
    let reader = rig.request();
    rig.match_prefix(reader, &t("ABCD")).unwrap();
    rig.abort(reader).unwrap();
    rig.assert_quiet();
}

/// vllm#39702 (B15): a look-up is a reservation. What it found is still there when it is used, whatever happened
/// in between; dropping it makes the pages evictable again (lmc#1034, B06).
#[test]
fn b15_what_a_match_found_stays_until_it_is_used_or_dropped() {
    let mut rig = on_host(8, 4, WT1, &["ABCD"]);
    let request = rig.request();
    assert_eq!(rig.match_prefix(request, &t("ABCD")).unwrap().host_tokens, 16);
    rig.serve(&t("EF"));
    rig.drain();
    assert_eq!(rig.load_back(request), Ok(LoadBack::Started { tokens: 16 }));
    rig.drain();
    rig.abort(request).unwrap();

    let mut rig = on_host(8, 4, WT1, &["ABCD"]);
    let request = rig.request();
    rig.match_prefix(request, &t("ABCD")).unwrap();
    rig.abort(request).unwrap();
    rig.serve(&t("EF"));
    rig.drain();
    assert_eq!(rig.core.stats().backed_up_pages, 6, "the host made room for EF");
    rig.assert_quiet();
}

/// lmc#1034, lmc#2017 (B06): the scheduler forgot requests that had looked something up, and the pool ended with every
/// page pinned. A match may have an end; it is counted, and the request has to match again.
#[test]
fn b06_a_match_may_have_an_end() {
    let mut rig = on_host(8, 4, WT1, &["ABCD"]);
    let (forgotten, late, used) = (rig.request(), rig.request(), rig.request());
    for request in [forgotten, late, used] {
        assert_eq!(rig.match_prefix(request, &t("ABCD")).unwrap().host_tokens, 16);
        rig.core.hold_until(request, Time(100)).unwrap();
    }
    rig.core.hold_until(late, Time(200)).unwrap();
    assert_eq!(rig.core.next_timeout(), Some(Time(100)));
    assert!(matches!(rig.load_back(used), Ok(LoadBack::Started { .. })));
    rig.drain();
    rig.tick(Time(100));
    assert_eq!((rig.core.stats().matches_ended, rig.core.next_timeout()), (1, Some(Time(200))));
    rig.tick(Time(200));
    assert_eq!((rig.core.stats().matches_ended, rig.core.next_timeout()), (2, None));
    rig.verify(used, &t("ABCD"));

    // What held nothing any more can not be computed on by mistake.
    assert_eq!(rig.load_back(late), Err(CoreError::MatchEnded));
    assert_eq!(rig.alloc(late, 1), Err(CoreError::MatchEnded));
    assert_eq!(rig.checkpoint(late, &t("ABCD")), Err(CoreError::MatchEnded));
    assert_eq!(rig.match_prefix(late, &t("ABCD")).unwrap().device_tokens, 16);
    rig.alloc(late, 1).unwrap();
    rig.core.hold_until(late, Time(300)).unwrap();
    rig.tick(Time(300));
    assert_eq!(rig.core.stats().matches_ended, 2, "a request with pages of its own is in use");
    for request in [forgotten, late, used] {
        rig.abort(request).unwrap();
    }
    flush_device(&mut rig, 8);
    assert_eq!(rig.core.page_counts(Tier::Host).free_pages, 0);
    rig.serve(&t("EFGH"));
    rig.drain();
    assert_eq!(rig.core.tree().stats().host_pages_mirrored, 4, "the host made room");
    rig.assert_quiet();
}

/// sgl#26792 (B30): new weights. Device and host forget everything, but not under a request that computes on the old
/// weights, and not before what is in flight has ended; what ends late changes nothing.
#[test]
fn b30_new_weights_find_nothing_of_the_old() {
    let mut rig = Rig::new(with_store(config(8, 8, WT1)));
    let request = rig.request();
    rig.match_prefix(request, &t("AB")).unwrap();
    rig.alloc(request, 2).unwrap();
    rig.compute(request, &t("AB"), NamespaceId::DEFAULT);
    rig.checkpoint(request, &t("AB")).unwrap();
    let in_use = |rig: &mut Rig| matches!(rig.core.reset(), Err(CoreError::InUse { .. }));
    assert!(in_use(&mut rig));
    rig.finish(request, &t("AB")).unwrap();
    assert!(in_use(&mut rig), "a copy is in flight");
    rig.drain();
    let asking = rig.request();
    assert!(matches!(rig.prefetch(asking, &t1("ABCD")), Ok(Prefetch::Started { .. })));
    rig.abort(asking).unwrap();
    assert!(in_use(&mut rig), "a query is in flight");
    rig.drain();
    rig.core.reset().unwrap();
    rig.core.handle(Event::Copied { op: OpId(1), ok: true });
    assert_eq!(found(&rig, "AB"), (0, 0));
    rig.assert_quiet();
    rig.serve(&t("AB"));
    rig.drain();
    assert_eq!((found(&rig, "AB"), rig.core.tree().stats().host_pages_mirrored), ((2, 0), 2));
    rig.assert_quiet();
}

/// flex#263 (B07): matching again replaces what the request held.
#[test]
fn b07_a_second_match_releases_the_first() {
    let mut rig = on_host(8, 8, WT1, &["ABCD"]);
    let request = rig.request();
    for prompt in ["A", "AB", "ABC"] {
        rig.match_prefix(request, &t(prompt)).unwrap();
    }
    rig.abort(request).unwrap();
    rig.assert_quiet();
    flush_device(&mut rig, 8);
}

/// bd#508 (B08): a match inside a node locks exactly what it matched.
#[test]
fn b08_a_partial_match_locks_what_it_matched() {
    let mut rig = Rig::new(config(6, 8, WritePolicy::None));
    rig.serve(&t("ABCDEF"));
    let request = rig.request();
    assert_eq!(rig.match_prefix(request, &t("ABCX")).unwrap().device_tokens, 12);
    let hungry = rig.request();
    assert_eq!(rig.alloc(hungry, 3), Ok(Alloc::Granted), "DEF is not locked");
    rig.abort(hungry).unwrap();
    assert_eq!(found(&rig, "ABCDEF"), (3, 0));
    rig.serve(&t("ABCY"));
    rig.abort(request).unwrap();
    let all = rig.request();
    assert_eq!(rig.alloc(all, 6), Ok(Alloc::Granted), "everything is evictable again");
    rig.abort(all).unwrap();
    rig.assert_quiet();
}

/// A second request for the same prefix waits for the load in flight instead of starting another.
#[test]
fn a_load_in_flight_is_shared() {
    let mut rig = on_host(8, 8, WT1, &["ABCD"]);
    let (a, b) = (rig.request(), rig.request());
    rig.match_prefix(a, &t("ABCD")).unwrap();
    rig.load_back(a).unwrap();
    let m = rig.match_prefix(b, &t("ABCD")).unwrap();
    assert_eq!((m.device_tokens, m.host_tokens), (0, 16));
    assert_eq!(rig.load_back(b), Ok(LoadBack::Started { tokens: 16 }));
    assert_eq!(rig.pending.len(), 1);
    assert_eq!(rig.core.pages(a), rig.core.pages(b));
    rig.drain();
    for id in [a, b] {
        assert_eq!(rig.core.load_state(id), Ok(LoadState::Ready));
        rig.verify(id, &t("ABCD"));
        rig.abort(id).unwrap();
    }
    rig.assert_quiet();
}

/// dyn#15079 (B27): a copy that failed was counted as done. Here nothing of it can be matched, its pages come back,
/// and everybody who waited is told.
#[test]
fn b27_a_failed_load_is_not_a_completed_one() {
    let mut rig = on_host(8, 8, WT1, &["ABCD"]);
    let (a, b) = (rig.request(), rig.request());
    for id in [a, b] {
        rig.match_prefix(id, &t("ABCD")).unwrap();
        rig.load_back(id).unwrap();
    }
    rig.complete(0, &Call::Fails);
    assert_eq!(found(&rig, "ABCD"), (0, 4), "still on the host, not on the device");
    for id in [a, b] {
        assert_eq!(rig.core.load_state(id), Ok(LoadState::Failed));
        assert_eq!(rig.checkpoint(id, &t("ABCD")), Err(CoreError::LoadFailed));
    }
    // One tries again, the other gives up.
    assert_eq!(rig.match_prefix(a, &t("ABCD")).unwrap().host_tokens, 16);
    rig.load_back(a).unwrap();
    rig.drain();
    rig.verify(a, &t("ABCD"));
    rig.abort(a).unwrap();
    rig.abort(b).unwrap();
    rig.assert_quiet();
}

/// All or nothing: a load that does not fit changes nothing.
#[test]
fn a_load_without_room_is_refused_whole() {
    let mut rig = on_host(4, 8, WT1, &["ABCD"]);
    let holder = rig.request();
    rig.alloc(holder, 1).unwrap();
    let request = rig.request();
    rig.match_prefix(request, &t("ABCD")).unwrap();
    assert_eq!(rig.load_back(request), Ok(LoadBack::Refused(Refusal::NoDevicePages)));
    assert!(rig.pending.is_empty());
    rig.abort(holder).unwrap();
    assert_eq!(rig.load_back(request), Ok(LoadBack::Started { tokens: 16 }));
    rig.drain();
    rig.abort(request).unwrap();
    rig.assert_quiet();
}

/// More loads than the bound: back-pressure, not an assertion.
#[test]
fn loads_in_flight_are_bounded() {
    let mut narrow = config(16, 16, WT1);
    narrow.loads_in_flight_max = 1;
    let mut rig = Rig::new(narrow);
    for prompt in ["AB", "CD"] {
        rig.serve(&t(prompt));
        rig.drain();
    }
    flush_device(&mut rig, 16);
    let (a, b) = (rig.request(), rig.request());
    rig.match_prefix(a, &t("AB")).unwrap();
    rig.match_prefix(b, &t("CD")).unwrap();
    rig.load_back(a).unwrap();
    assert_eq!(rig.load_back(b), Ok(LoadBack::Refused(Refusal::LoadsInFlight)));
    rig.drain();
    assert_eq!(rig.load_back(b), Ok(LoadBack::Started { tokens: 8 }));
    rig.drain();
    rig.abort(a).unwrap();
    rig.abort(b).unwrap();
    rig.assert_quiet();
}

/// A checkpoint while the prefix is still being loaded publishes nothing and says so.
#[test]
fn a_checkpoint_waits_for_the_load_it_rests_on() {
    let mut rig = on_host(8, 8, WT1, &["AB"]);
    let request = rig.request();
    rig.match_prefix(request, &t("AB")).unwrap();
    rig.load_back(request).unwrap();
    rig.alloc(request, 1).unwrap();
    rig.compute(request, &t("ABC"), NamespaceId::DEFAULT);
    let refused = rig.checkpoint(request, &t("ABC")).unwrap();
    assert_eq!((refused.published_tokens, refused.refused), (8, Some(Refusal::LoadPending)));
    rig.drain();
    assert_eq!(rig.finish(request, &t("ABC")).unwrap().published_tokens, 12);
    rig.drain();
    assert_eq!(found(&rig, "ABC").0, 3);
    rig.assert_quiet();
}

/// A request computes what another is loading, and publishes first. The load's pages stand in the page table of the one
/// that waits, so they can not be replaced under it: the publication is put off until the load has ended.
#[test]
fn an_insert_does_not_overtake_a_load() {
    let mut rig = on_host(12, 8, WT1, &["AB"]);
    let waiting = rig.request();
    rig.match_prefix(waiting, &t("AB")).unwrap();
    let computing = rig.request();
    rig.match_prefix(computing, &[]).unwrap();
    rig.alloc(computing, 3).unwrap();
    rig.compute(computing, &t("ABC"), NamespaceId::DEFAULT);
    rig.load_back(waiting).unwrap();
    let put_off = rig.checkpoint(computing, &t("ABC")).unwrap();
    assert_eq!((put_off.published_tokens, put_off.refused), (0, Some(Refusal::LoadPending)));
    rig.drain();
    rig.verify(waiting, &t("AB"));
    let published = rig.checkpoint(computing, &t("ABC")).unwrap();
    assert_eq!((published.published_tokens, published.duplicate_pages), (12, 2));
    for id in [waiting, computing] {
        rig.abort(id).unwrap();
    }
    rig.drain();
    rig.assert_quiet();
}

/// trt#8830 (B26): with one page on each side, loading A while B is the next victim must never hand out B's bytes.
/// All sizes from 1 to 3 on both sides, all orders of use, both write policies.
#[test]
fn b26_tiny_pools_in_every_order() {
    for (device, host) in (1..=3).flat_map(|d| (1..=3).map(move |h| (d, h))) {
        for order in 0..3u32.pow(5) {
            for write in [WT1, WritePolicy::WriteBack] {
                let mut rig = Rig::new(config(device, host, write));
                let mut digits = order;
                for _ in 0..5 {
                    let prompt = ["A", "B", "C"][(digits % 3) as usize];
                    digits /= 3;
                    // `serve` verifies the stamps of everything it was handed.
                    rig.serve(&t(prompt));
                }
                rig.drain();
                rig.assert_quiet();
            }
        }
    }
}
