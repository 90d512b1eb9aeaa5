//! Variants of known faults that the stories of the flows leave out, and those that need several ranks.

use sapwood::base::{NamespaceId, Tier, Time};
use sapwood::sim::{Call, Pending, Rig, Stamp, Weather, World};
use sapwood::tiers::{
    Alloc, LoadBack, PageOutcome, Prefetch, PrefetchState, Refusal, RequestId, Votes, WritePolicy,
};

use crate::common::{WT1, config, found, store_with, t, t1, with_store};

const WB: WritePolicy = WritePolicy::WriteBack;

fn grab(rig: &mut Rig, pages: u32) -> RequestId {
    let request = rig.request();
    while rig.alloc(request, pages).expect("a live request") != Alloc::Granted {
        assert!(!rig.pending.is_empty(), "nothing more can come");
        rig.drain();
    }
    request
}

/// sgl#27108 (B02): the host is full for the first victim and has room for the second.
#[test]
fn b02_room_that_comes_between_two_victims_is_used() {
    let mut rig = Rig::new(config(6, 2, WB));
    rig.serve(&t("AB"));
    let first = grab(&mut rig, 6);
    rig.abort(first).unwrap();
    let reader = rig.request();
    assert_eq!(rig.match_prefix(reader, &t("AB")).unwrap().host_tokens, 8);
    for prompt in ["CD", "EF"] {
        rig.serve(&t(prompt));
    }
    let hungry = rig.request();
    assert_eq!(rig.alloc(hungry, 4), Ok(Alloc::Granted), "CD has no room on the host and is dropped");
    assert_eq!((found(&rig, "CD"), found(&rig, "EF")), ((0, 0), (2, 0)));
    assert_eq!(rig.core.stats().dropped_tokens[&Refusal::NoHostPages], 8);
    rig.abort(reader).unwrap();
    let more = grab(&mut rig, 2);
    assert_eq!(found(&rig, "EF"), (0, 2), "EF takes the place that AB no longer needs");
    rig.abort(hungry).unwrap();
    rig.abort(more).unwrap();
    rig.assert_quiet();
}

/// lmc#1034 (B06): a request uses less than it looked up.
#[test]
fn b06_what_a_look_up_pinned_and_did_not_use_is_free_again() {
    let mut rig = Rig::new(config(8, 8, WT1));
    rig.serve(&t("ABCDEFGH"));
    rig.drain();
    let flush = grab(&mut rig, 8);
    rig.abort(flush).unwrap();
    let request = rig.request();
    assert_eq!(rig.match_prefix(request, &t("ABCDEFGH")).unwrap().host_tokens, 32);
    // It settles for three pages, and then for none.
    assert_eq!(rig.match_prefix(request, &t("ABC")).unwrap().host_tokens, 12);
    assert_eq!(rig.load_back(request), Ok(LoadBack::Started { tokens: 12 }));
    rig.abort(request).unwrap();
    rig.drain();
    rig.assert_quiet();
    rig.serve(&t("IJKLMNOP"));
    rig.drain();
    assert_eq!(rig.core.stats().backed_up_pages, 16, "all eight host pages could go");
}

/// sgl#38480 (B10) under write-back: both halves of a node that is split under its store write stay until that has ended,
/// whatever asks for host pages, also when it is split twice, at its ends, and when the lower part is deleted first.
#[test]
fn b10_splits_under_a_store_write_in_write_back() {
    for cuts in [&["AB"][..], &["A"], &["ABC"], &["AB", "A"], &["ABC", "AB", "A"]] {
        let mut rig = Rig::new(with_store(config(4, 4, WB)));
        rig.serve(&t("ABCD"));
        let flush = grab_copies(&mut rig, 4);
        rig.abort(flush).unwrap();
        assert!(rig.pending.iter().all(|p| matches!(p, Pending::Put(..))), "{:?}", rig.pending);
        for cut in cuts {
            let request = rig.request();
            assert!(rig.match_prefix(request, &t(cut)).unwrap().host_tokens > 0);
            rig.abort(request).unwrap();
        }
        // Whoever wants the host now gets nothing of it.
        rig.serve(&t("XY"));
        let hungry = rig.request();
        while rig.alloc(hungry, 4).unwrap() != Alloc::Granted {
            drain_copies(&mut rig);
        }
        rig.abort(hungry).unwrap();
        rig.drain();
        let stored = rig.stored();
        for n in 1..=4 {
            let stamp = Stamp::of(NamespaceId::DEFAULT, &t("ABCD")[..n * 4]);
            assert!(stored.contains(&stamp), "page {n}, cuts {cuts:?}");
        }
        rig.assert_quiet();
    }
}

fn drain_copies(rig: &mut Rig) {
    rig.drain_kind(|p| matches!(p, Pending::ToHost(..) | Pending::ToDevice(..)));
}

fn grab_copies(rig: &mut Rig, pages: u32) -> RequestId {
    let request = rig.request();
    while rig.alloc(request, pages).expect("a live request") != Alloc::Granted {
        drain_copies(rig);
    }
    request
}

/// sgl#33862 (B20): a host smaller than the device is full of mirrors; a prefetch gets its pages all the same.
#[test]
fn b20_a_prefetch_finds_room_among_mirrors() {
    let mut rig = Rig::new(with_store(config(8, 4, WT1)));
    rig.inherit_store(&store_with(&["XY"]));
    for prompt in ["AB", "CD", "EF", "GH"] {
        rig.serve(&t(prompt));
        rig.drain();
    }
    assert_eq!(rig.core.page_counts(Tier::Host).free_pages, 0);
    let request = rig.request();
    assert!(matches!(rig.prefetch(request, &t1("XY")), Ok(Prefetch::Started { .. })));
    rig.drain();
    assert!(matches!(rig.poll_prefetch(request), Ok(PrefetchState::Ended(end)) if end.loaded_tokens == 8));
    rig.abort(request).unwrap();
    rig.assert_quiet();
}

/// vllm#49176 (B21): a store that says yes and then can not read. The request asks a bounded number of times and goes on.
#[test]
fn b21_a_store_that_always_fails_is_asked_a_bounded_number_of_times() {
    let mut stubborn = with_store(config(8, 8, WT1));
    stubborn.prefetch.attempts_max = 2;
    let mut rig = Rig::new(stubborn);
    rig.inherit_store(&store_with(&["AB"]));
    let request = rig.request();
    let mut asked = 0;
    while matches!(rig.prefetch(request, &t1("AB")), Ok(Prefetch::Started { .. })) {
        asked += 1;
        rig.complete(0, &Call::Well);
        rig.complete(0, &Call::Fails);
        let Ok(PrefetchState::Ended(end)) = rig.poll_prefetch(request) else { panic!("it has ended") };
        assert_eq!((end.loaded_tokens, end.reason), (0, Some(Refusal::StoreFailed)));
    }
    assert_eq!(asked, 2);
    assert_eq!(rig.stored().len(), 2, "the objects are not deleted for it");
    rig.abort(request).unwrap();
    rig.serve(&t("AB"));
    rig.drain();
    rig.assert_quiet();
}

/// sgl#30760 (B24): four ranks, ten thousand steps, ends in any order on each: the same decisions after every step. No
/// rank ever waits for another inside a call, because no call asks another rank anything.
#[test]
fn b24_four_ranks_decide_alike_for_ten_thousand_steps() {
    let mut shared = with_store(config(12, 16, WT1));
    shared.prefetch.host_share_percent = 50;
    World::new(30_760, 4, shared, Weather::FOUL).run(10_000);
}

/// bd#748 (B25): two ranks under write-back; the store of one fails half of each batch; a request holds the common ancestor.
/// No lock but its own operation's is given back, and both ranks count alike.
#[test]
fn b25_partial_failures_of_one_rank_move_no_lock() {
    let mut ranks: Vec<Rig> = (0..2).map(|_| Rig::new(with_store(config(8, 12, WB)))).collect();
    let mut votes = Votes::new(2);
    let mut holders = Vec::new();
    for rig in &mut ranks {
        rig.serve(&t("ABCD"));
        rig.serve(&t("ABEF"));
        let holder = rig.request();
        assert_eq!(rig.match_prefix(holder, &t("AB")).unwrap().device_tokens, 8);
        holders.push(holder);
    }
    let protected = ranks[0].core.tree().stats().device_pages_protected;
    assert_eq!(protected, 2);
    for round in 0..40u64 {
        for rig in &mut ranks {
            let hungry = rig.request();
            let _ = rig.alloc(hungry, 6).unwrap();
            rig.abort(hungry).unwrap();
            rig.tick(Time::from_millis(round * 50));
        }
        while let Some(rank) = (0..2).find(|&rank| !ranks[rank].pending.is_empty()) {
            let how = match &ranks[rank].pending[0] {
                Pending::Put(_, _, items) if rank == 1 => {
                    let half = |i| if i % 2 == 0 { PageOutcome::Done } else { PageOutcome::Failed };
                    Call::Each((0..items.len()).map(half).collect())
                }
                _ => Call::Well,
            };
            let event = ranks[rank].perform(0, &how);
            votes.cast(rank as u32, event);
            let mut agreed = Vec::new();
            votes.settle(&mut agreed);
            for event in agreed {
                ranks.iter_mut().for_each(|rig| rig.feed(event.clone()));
            }
            for rig in &ranks {
                let still = rig.core.tree().stats().device_pages_protected;
                assert!(still >= protected, "somebody gave back a lock of the holder");
            }
        }
        assert_eq!(ranks[0].core.digest(), ranks[1].core.digest());
    }
    for (rig, holder) in ranks.iter_mut().zip(holders) {
        assert_eq!(rig.core.tree().stats().device_pages_protected, protected);
        rig.verify(holder, &t("AB"));
        rig.abort(holder).unwrap();
        rig.assert_quiet();
    }
}
