//! Store to host.

use sapwood::base::{NamespaceId, Tier, Time};
use sapwood::sim::{Call, Pending, Rig};
use sapwood::tiers::{
    Alloc, PageOutcome, Prefetch, PrefetchEnd, PrefetchPolicy, PrefetchState, Refusal, RequestId, WritePolicy,
};

use crate::common::{WT1, WT2, config, found, store_with, t, t1, with_store};

fn rig(device: u32, host: u32, write: WritePolicy, stored: &[&str]) -> Rig {
    let mut rig = Rig::new(with_store(config(device, host, write)));
    rig.inherit_store(&store_with(stored));
    rig
}

fn start(rig: &mut Rig, prompt: &str) -> RequestId {
    let request = rig.request();
    let started = rig.prefetch(request, &t1(prompt)).expect("a live request");
    assert!(matches!(started, Prefetch::Started { .. }), "{started:?}");
    request
}

fn ended(rig: &mut Rig, request: RequestId) -> PrefetchEnd {
    match rig.poll_prefetch(request).expect("a live request") {
        PrefetchState::Ended(end) => {
            assert_eq!(
                end.hit_tokens,
                end.loaded_tokens + end.redundant_tokens + end.lost_tokens,
                "every token found has one end (B45)"
            );
            end
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_prefetch_brings_what_a_load_then_restores() {
    let mut rig = rig(8, 8, WT1, &["ABCDE"]);
    let request = start(&mut rig, "ABCDE");
    rig.drain();
    assert_eq!(ended(&mut rig, request).loaded_tokens, 20);
    let m = rig.match_prefix(request, &t("ABCDE")).unwrap();
    assert_eq!((m.device_tokens, m.host_tokens), (0, 20));
    rig.load_back(request).unwrap();
    rig.drain();
    rig.verify(request, &t("ABCDE"));
    rig.abort(request).unwrap();
    // What came from the store is not written to it again.
    assert!(rig.pending.is_empty());
    rig.assert_quiet();
}

/// The name of a page costs a SHA-256. A prompt was hashed when the store was asked, again when the answer was attached and
/// again when it was published; now its request keeps the names, and each page is hashed once.
#[test]
fn a_prompt_is_hashed_once() {
    let mut rig = rig(16, 16, WT1, &["ABC"]);
    let request = start(&mut rig, "ABCDEF");
    rig.drain();
    assert_eq!(ended(&mut rig, request).loaded_tokens, 12);
    rig.match_prefix(request, &t("ABCDEF")).unwrap();
    rig.load_back(request).unwrap();
    rig.drain();
    assert_eq!(rig.alloc(request, 4), Ok(Alloc::Granted));
    // In chunks, and with a page that was not part of the prompt.
    for published in ["ABCD", "ABCDEFG"] {
        rig.compute(request, &t(published), NamespaceId::DEFAULT);
        assert_eq!(
            rig.checkpoint(request, &t(published)).unwrap().published_tokens,
            t(published).len() as u64
        );
    }
    rig.finish(request, &t("ABCDEFG")).unwrap();
    rig.drain();
    let hashed = (rig.core.stats().hashed_pages, rig.core.tree().stats().hashed_pages);
    assert_eq!(hashed, (6, 1), "six of the prompt, one of what was generated");
    rig.assert_stored();
    rig.assert_quiet();
}

/// A long prompt is published chunk by chunk, and each publication goes through the nodes of its path: forty chunks were forty
/// nodes until the request ended, and after it. What has come to rest of them is one node, although the request holds it.
#[test]
fn the_chunks_of_a_running_request_are_one_node() {
    const CHUNKS: usize = 12;
    for (letters, merged) in [("ABCDEFGHIJKL", true), ("AB", true), ("ABCDEFGHIJKL", false)] {
        let mut rig = rig(32, 32, WT1, &[]);
        let request = start(&mut rig, letters);
        rig.drain();
        assert_eq!(ended(&mut rig, request).loaded_tokens, 0);
        // Another one holds the first half of it.
        let half = rig.request();
        assert_eq!(rig.alloc(request, CHUNKS as u32), Ok(Alloc::Granted));
        for chunks in 1..=CHUNKS {
            let published = t(&"ABCDEFGHIJKL"[..chunks]);
            rig.compute(request, &published, NamespaceId::DEFAULT);
            rig.checkpoint(request, &published).unwrap();
            if !merged && chunks == CHUNKS / 2 {
                rig.match_prefix(half, &published).unwrap();
            }
            rig.drain();
        }
        assert_eq!(rig.core.tree().stats().nodes, if merged { 1 } else { 2 }, "{letters}");
        rig.assert_stored();
        rig.abort(half).unwrap();
        rig.finish(request, &t("ABCDEFGHIJKL")).unwrap();
        rig.drain();
        assert_eq!(found(&rig, "ABCDEFGHIJKL"), (12, 0));
        rig.assert_quiet();
    }
}

/// sgl#31902, sgl#30106 (B01): the anchor of a refill was device-only when the data arrived. Hanging a host child
/// under it corrupts the tree later. The refill is dropped, all of it goes back, a counter says so.
#[test]
fn b01_a_refill_under_an_unbacked_anchor_is_dropped() {
    let mut rig = rig(8, 8, WT2, &["ABCD"]);
    rig.serve(&t("AB"));
    let request = start(&mut rig, "ABCD");
    let nodes = rig.core.tree().stats().nodes;
    rig.drain();
    let end = ended(&mut rig, request);
    assert_eq!((end.loaded_tokens, end.lost_tokens), (0, 8));
    assert_eq!(end.reason, Some(Refusal::AnchorNotBackedUp));
    assert_eq!(rig.core.tree().stats().nodes, nodes);
    assert_eq!(rig.core.page_counts(Tier::Host).free_pages, 8);
    assert_eq!(rig.core.stats().dropped_tokens[&Refusal::AnchorNotBackedUp], 8);
    rig.abort(request).unwrap();
    let hungry = rig.request();
    assert_eq!(rig.alloc(hungry, 8), Ok(Alloc::Granted), "AB leaves cleanly");
    rig.abort(hungry).unwrap();
    rig.assert_quiet();
}

/// The same with a device-only child below the un-backed anchor: the child must not be refilled either, or it would
/// be a backed-up node below one that is not.
#[test]
fn b01_a_device_only_child_of_an_unbacked_anchor_is_not_refilled() {
    let mut rig = rig(8, 8, WritePolicy::WriteThrough { threshold: 3 }, &["ABCD"]);
    rig.serve(&t("AB"));
    let request = start(&mut rig, "ABCD");
    rig.serve(&t("ABCD"));
    rig.drain();
    let end = ended(&mut rig, request);
    assert_eq!((end.loaded_tokens, end.redundant_tokens, end.lost_tokens), (0, 0, 8));
    assert_eq!(end.reason, Some(Refusal::AnchorNotBackedUp));
    assert_eq!(rig.core.page_counts(Tier::Host).cached_pages, 0);
    rig.abort(request).unwrap();
    rig.assert_quiet();
}

/// Write-back has no parent rule: the refill is kept and matches.
#[test]
fn b01_write_back_keeps_the_refill() {
    let mut rig = rig(8, 8, WritePolicy::WriteBack, &["ABCD"]);
    rig.serve(&t("AB"));
    let request = start(&mut rig, "ABCD");
    rig.drain();
    assert_eq!(ended(&mut rig, request).loaded_tokens, 8);
    assert_eq!(found(&rig, "ABCD"), (2, 2));
    rig.abort(request).unwrap();
    rig.assert_quiet();
}

/// The anchor becomes backed up between issue and arrival: kept.
#[test]
fn b01_an_anchor_that_is_backed_up_in_time_takes_the_refill() {
    let mut rig = rig(8, 8, WT2, &["ABCD"]);
    rig.serve(&t("AB"));
    let request = start(&mut rig, "ABCD");
    rig.serve(&t("AB"));
    rig.drain_kind(|p| matches!(p, Pending::ToHost(..)));
    rig.drain();
    assert_eq!(ended(&mut rig, request).loaded_tokens, 8);
    assert_eq!(found(&rig, "ABCD"), (2, 2));
    rig.abort(request).unwrap();
    rig.assert_quiet();
}

/// The anchor is split, or evicted, between issue and arrival.
#[test]
fn b01_an_anchor_that_changed_is_looked_at_again() {
    let mut split = rig(16, 16, WT1, &["ABCD"]);
    split.serve(&t("AB"));
    let request = start(&mut split, "ABCD");
    split.serve(&t("AX"));
    split.drain();
    assert_eq!(ended(&mut split, request).loaded_tokens, 8, "the deep end keeps its name");
    split.abort(request).unwrap();
    split.assert_quiet();

    let mut gone = rig(4, 8, WT2, &["ABCD"]);
    gone.serve(&t("AB"));
    let request = start(&mut gone, "ABCD");
    let hungry = gone.request();
    assert_eq!(gone.alloc(hungry, 4), Ok(Alloc::Granted));
    gone.abort(hungry).unwrap();
    gone.drain();
    assert_eq!(ended(&mut gone, request).reason, Some(Refusal::AnchorGone));
    assert_eq!(gone.core.page_counts(Tier::Host).free_pages, 8);
    gone.abort(request).unwrap();
    gone.assert_quiet();
}

/// Nodes that were inserted meanwhile adopt the pages they lack; pages the tree has go back.
#[test]
fn a_refill_meets_what_was_computed_meanwhile() {
    let mut rig = rig(16, 16, WT1, &["ABCDEF"]);
    let request = start(&mut rig, "ABCDEF");
    rig.serve(&t("ABC"));
    rig.drain_kind(|p| matches!(p, Pending::ToHost(..)));
    rig.drain();
    let end = ended(&mut rig, request);
    assert_eq!((end.loaded_tokens, end.redundant_tokens, end.lost_tokens), (12, 12, 0));
    assert_eq!(found(&rig, "ABCDEF"), (3, 3));
    rig.abort(request).unwrap();
    rig.assert_quiet();
}

/// sgl#9874, sgl#30053 (B04): every exit path of every state gives everything back, a thousand times over; late
/// answers touch nothing; a second abort is refused and harmless.
#[test]
fn b04_abort_in_every_state() {
    let mut rig = rig(16, 16, WT1, &["ABCDEFGH"]);
    for round in 0..1000 {
        let request = start(&mut rig, "ABCDEFGH");
        for _ in 0..round % 6 {
            if !rig.pending.is_empty() {
                rig.complete(0, &Call::Well);
            }
        }
        rig.abort(request).unwrap();
        assert!(rig.abort(request).is_err());
        rig.drain();
        rig.assert_quiet();
        if rig.peek(&t("ABCDEFGH")).1 > 0 {
            // The one that had arrived whole stays; make the next one start from nothing.
            let stored = store_with(&["ABCDEFGH"]);
            rig = Rig::new(with_store(config(16, 16, WT1)));
            rig.inherit_store(&stored);
        }
    }
}

/// sgl#16747 (B19): fewer hits than the threshold end the prefetch at the answer, under every policy.
#[test]
fn b19_a_short_hit_ends_at_once() {
    for policy in [
        PrefetchPolicy::BestEffort,
        PrefetchPolicy::WaitComplete,
        PrefetchPolicy::Timeout { base_ms: 1, per_ki_token_ms: 1 },
    ] {
        let mut strict = with_store(config(8, 8, WT1));
        strict.prefetch.threshold_tokens = 16;
        strict.prefetch.policy = policy;
        let mut rig = Rig::new(strict);
        rig.inherit_store(&store_with(&["AB"]));
        let request = start(&mut rig, "ABCDEF");
        rig.complete(0, &Call::Well);
        let end = ended(&mut rig, request);
        assert_eq!((end.hit_tokens, end.loaded_tokens, end.reason), (8, 0, Some(Refusal::BelowThreshold)));
        rig.abort(request).unwrap();
        rig.assert_quiet();
    }
}

/// sgl#40193 (B45): the store holds eight pages, the host has room for three: the answer says both.
#[test]
fn b45_a_short_host_is_named() {
    let mut rig = rig(16, 3, WT1, &["ABCDEFGH"]);
    let request = start(&mut rig, "ABCDEFGH");
    rig.drain();
    let end = ended(&mut rig, request);
    assert_eq!((end.hit_tokens, end.loaded_tokens, end.lost_tokens), (32, 12, 20));
    assert_eq!(end.reason, Some(Refusal::NoHostPages));
    rig.abort(request).unwrap();
    rig.assert_quiet();
}

/// dyn#15079 (B27), lmc#2420: only the pages before the first one that did not verify are kept; wrong bytes, short
/// answers and failures at every page.
#[test]
fn b27_only_the_verified_head_is_kept() {
    for bad in 0..4 {
        for outcome in [PageOutcome::Missing, PageOutcome::Corrupt, PageOutcome::Failed, PageOutcome::Refused]
        {
            let mut rig = rig(8, 8, WT1, &["ABCD"]);
            let request = start(&mut rig, "ABCD");
            rig.complete(0, &Call::Well);
            // Two batches of two pages are in flight.
            for batch in 0..2 {
                let each = (0..2).map(|i| if batch * 2 + i == bad { outcome } else { PageOutcome::Done });
                rig.complete(0, &Call::Each(each.collect()));
            }
            let end = ended(&mut rig, request);
            assert_eq!(end.loaded_tokens, u64::from(bad as u32) * 4);
            assert_eq!(found(&rig, "ABCD"), (0, bad as u32));
            let m = rig.match_prefix(request, &t("ABCD")).unwrap();
            if m.host_tokens > 0 {
                rig.load_back(request).unwrap();
                rig.drain();
                rig.verify(request, &t("ABCD"));
            }
            rig.abort(request).unwrap();
            rig.assert_quiet();
        }
    }
}

/// sgl#38428 (B35): an answer of the wrong length is a failure of what it leaves out, not a crash.
#[test]
fn b35_answers_of_the_wrong_length() {
    let mut rig = rig(8, 8, WT1, &["ABCD"]);
    let request = start(&mut rig, "ABCD");
    rig.complete(0, &Call::Well);
    rig.complete(0, &Call::Each(vec![PageOutcome::Done]));
    rig.complete(0, &Call::Each(vec![PageOutcome::Done; 9]));
    assert_eq!(ended(&mut rig, request).loaded_tokens, 4);
    rig.abort(request).unwrap();
    rig.assert_quiet();
}

/// Batches may end in any order; nothing is visible before all that is wanted has ended (sgl#27550, B17).
#[test]
fn b17_batches_end_in_any_order() {
    let mut rig = rig(16, 16, WT1, &["ABCDEFGH"]);
    let request = start(&mut rig, "ABCDEFGH");
    rig.complete(0, &Call::Well);
    assert_eq!(rig.pending.len(), 2, "a window of two batches");
    rig.complete(1, &Call::Well);
    assert_eq!(found(&rig, "ABCDEFGH"), (0, 0));
    assert_eq!(rig.pending.len(), 2, "the window moves on");
    while !rig.pending.is_empty() {
        rig.complete(rig.pending.len() - 1, &Call::Well);
    }
    assert_eq!(ended(&mut rig, request).loaded_tokens, 32);
    rig.abort(request).unwrap();
    rig.assert_quiet();
}

/// Best effort goes on with what is there; pages of batches in flight stay with the operation until those end
/// (peg#403, B14).
#[test]
fn b14_a_stopped_prefetch_keeps_the_pages_that_may_still_be_written() {
    let mut eager = with_store(config(16, 8, WT1));
    eager.prefetch.policy = PrefetchPolicy::BestEffort;
    let mut rig = Rig::new(eager);
    rig.inherit_store(&store_with(&["ABCDEFGH"]));
    let request = start(&mut rig, "ABCDEFGH");
    rig.complete(0, &Call::Well);
    rig.complete(0, &Call::Well);
    let end = ended(&mut rig, request);
    assert_eq!((end.loaded_tokens, end.lost_tokens), (8, 24));
    assert_eq!(rig.cancelled.len(), 1);
    let in_flight =
        rig.pending.iter().map(|p| if let Pending::Get(_, _, i) = p { i.len() } else { 0 }).sum::<usize>();
    assert_eq!(rig.core.page_counts(Tier::Host).in_flight_pages as usize, in_flight);
    rig.abort(request).unwrap();
    // The late writes land on pages that nobody else can have been given: the rig checks that on every step.
    rig.serve(&t("XY"));
    rig.drain();
    rig.assert_quiet();
}

/// The time-out starts when the scheduler first has to wait, and what has arrived by then is kept.
#[test]
fn a_timeout_keeps_what_has_arrived() {
    let mut timed = with_store(config(16, 8, WT1));
    timed.prefetch.policy = PrefetchPolicy::Timeout { base_ms: 10, per_ki_token_ms: 0 };
    let mut rig = Rig::new(timed);
    rig.inherit_store(&store_with(&["ABCD"]));
    let request = start(&mut rig, "ABCD");
    rig.tick(Time::from_millis(500));
    assert_eq!(rig.poll_prefetch(request), Ok(PrefetchState::Pending), "the clock starts now");
    rig.complete(0, &Call::Well);
    rig.complete(0, &Call::Well);
    rig.tick(Time::from_millis(509));
    assert_eq!(rig.poll_prefetch(request), Ok(PrefetchState::Pending));
    assert_eq!(rig.core.prefetch_deadline(request), Some(Time::from_millis(510)));
    rig.tick(Time::from_millis(510));
    let end = ended(&mut rig, request);
    assert_eq!((end.loaded_tokens, end.reason), (8, Some(Refusal::OutOfTime)));
    rig.abort(request).unwrap();
    rig.drain();
    rig.assert_quiet();
}

/// sgl#26747 (B46): another namespace never hits the pages of this one.
#[test]
fn b46_namespaces_do_not_meet_in_the_store() {
    let mut rig = rig(8, 8, WT1, &["ABCD"]);
    let salted = rig.namespace("tenant");
    let request = rig.core.request(salted);
    assert!(matches!(rig.prefetch(request, &t1("ABCD")), Ok(Prefetch::Started { .. })));
    rig.drain();
    assert_eq!(ended(&mut rig, request).reason, Some(Refusal::NotInStore));
    rig.abort(request).unwrap();
    assert_ne!(salted, NamespaceId::DEFAULT);
    rig.assert_quiet();
}

/// vllm#49176 (B21): one failed read is a miss for this request, which goes on by computing; the object stays, and
/// the next request hits it.
#[test]
fn b21_a_failed_read_does_not_loop() {
    let mut rig = rig(8, 8, WT1, &["ABCD"]);
    let request = start(&mut rig, "ABCD");
    rig.complete(0, &Call::Well);
    rig.complete(0, &Call::Fails);
    rig.drain();
    assert_eq!(ended(&mut rig, request).reason, Some(Refusal::StoreFailed));
    rig.abort(request).unwrap();
    let request = start(&mut rig, "ABCD");
    rig.drain();
    assert_eq!(ended(&mut rig, request).loaded_tokens, 16);
    rig.abort(request).unwrap();
    rig.assert_quiet();
}

/// A store that does not answer the query.
#[test]
fn a_silent_query_is_a_miss() {
    let mut rig = rig(8, 8, WT1, &["ABCD"]);
    let request = start(&mut rig, "ABCD");
    rig.complete(0, &Call::Fails);
    assert_eq!(ended(&mut rig, request).reason, Some(Refusal::StoreFailed));
    assert!(matches!(rig.prefetch(request, &t1("ABCD")), Ok(Prefetch::Started { .. })), "it may ask again");
    rig.abort(request).unwrap();
    rig.drain();
    rig.assert_quiet();
}
