//! The anchor of a prefetch between its issue and the commit: merges, evictions, and its repair.

use sapwood::base::{Tier, Time};
use sapwood::sim::{Call, Pending, Rig};
use sapwood::tiers::{
    Alloc, CoreConfig, Prefetch, PrefetchEnd, PrefetchPolicy, PrefetchState, Refusal, RequestId, WritePolicy,
};

use crate::common::{WT1, WT2, config, found, store_with, t, t1, with_store};

fn stocked(config: CoreConfig, prompt: &str) -> Rig {
    let mut rig = Rig::new(with_store(config));
    rig.inherit_store(&store_with(&[prompt]));
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
        PrefetchState::Ended(end) => end,
        other => panic!("{other:?}"),
    }
}

/// The anchor becomes one node with what is computed below it, and its id dies. Its place is still there.
#[test]
fn an_anchor_that_was_merged_takes_the_refill() {
    let mut rig = stocked(config(16, 16, WritePolicy::None), "ABCD");
    rig.serve(&t("AB"));
    let request = start(&mut rig, "ABCD");
    let merges = rig.core.tree().stats().merges;
    rig.serve(&t("ABX"));
    // A look at AB makes it and X neighbours in age: all that a merge needs.
    let reader = rig.request();
    rig.match_prefix(reader, &t("AB")).unwrap();
    rig.abort(reader).unwrap();
    assert!(rig.core.tree().stats().merges > merges, "the story needs a merge");
    rig.drain();
    assert_eq!(ended(&mut rig, request).loaded_tokens, 8);
    assert_eq!((found(&rig, "ABCD"), found(&rig, "ABX")), ((2, 2), (3, 0)));
    rig.abort(request).unwrap();
    rig.assert_quiet();
}

/// Others want the anchor's host pages while the store is being read. They are what the refill will hang under.
#[test]
fn an_anchor_on_the_host_is_not_evicted_under_its_prefetch() {
    let mut rig = stocked(config(4, 6, WT1), "ABCDE");
    rig.serve(&t("AB"));
    rig.drain();
    let flush = rig.request();
    assert_eq!(rig.alloc(flush, 4), Ok(Alloc::Granted));
    rig.abort(flush).unwrap();
    let request = start(&mut rig, "ABCDE");
    rig.complete(0, &Call::Well);
    rig.serve(&t("XY"));
    rig.drain();
    assert_eq!(ended(&mut rig, request).loaded_tokens, 12);
    assert_eq!(found(&rig, "ABCDE"), (0, 5));
    // Afterwards it is as evictable as anything.
    rig.abort(request).unwrap();
    rig.assert_quiet();
}

fn repairing(config: CoreConfig, ms: u64) -> CoreConfig {
    let mut config = config;
    config.prefetch.repair_ms = ms;
    config
}

/// Anchor repair: the un-backed anchor is written to the host, and the refill waits for that.
#[test]
fn an_unbacked_anchor_is_repaired() {
    for policy in [PrefetchPolicy::WaitComplete, PrefetchPolicy::BestEffort] {
        let mut rig = stocked(repairing(config(8, 8, WT2), 50), "ABCD");
        rig.serve(&t("AB"));
        let request = start(&mut rig, "ABCD");
        rig.complete(0, &Call::Well);
        rig.complete(0, &Call::Well);
        assert!(matches!(rig.pending[..], [Pending::ToHost(..)]), "{:?}", rig.pending);
        rig.core.set_prefetch_policy(policy);
        assert_eq!(rig.poll_prefetch(request), Ok(PrefetchState::Pending));
        assert_eq!(rig.core.next_timeout(), Some(Time::from_millis(50)));
        rig.complete(0, &Call::Well);
        assert_eq!(ended(&mut rig, request).loaded_tokens, 8);
        assert_eq!(rig.core.stats().anchor_repairs, 1);
        assert_eq!(found(&rig, "ABCD"), (2, 2));
        rig.abort(request).unwrap();
        rig.drain();
        rig.assert_quiet();
    }
}

/// The copy fails, or takes longer than the bound, or there is no host page for it, or the request goes: dropped, and
/// every page comes back.
#[test]
fn a_repair_that_does_not_come_ends_as_a_drop() {
    for how in ["fails", "late", "full", "abort", "stopped"] {
        let host = if how == "full" { 3 } else { 8 };
        let mut config = repairing(config(8, host, WT2), 50);
        if how == "stopped" {
            config.prefetch.policy = PrefetchPolicy::Timeout { base_ms: 10, per_ki_token_ms: 0 };
        }
        let mut rig = stocked(config, "ABCD");
        rig.serve(&t("AB"));
        let request = start(&mut rig, "ABCD");
        assert_eq!(rig.poll_prefetch(request), Ok(PrefetchState::Pending), "{how}");
        rig.complete(0, &Call::Well);
        rig.complete(0, &Call::Well);
        match how {
            "fails" => rig.complete(0, &Call::Fails),
            "late" => rig.tick(Time::from_millis(51)),
            "stopped" => rig.tick(Time::from_millis(10)),
            "abort" => rig.abort(request).unwrap(),
            _ => assert!(rig.pending.is_empty(), "two pages are free no more"),
        }
        if how != "abort" {
            let end = ended(&mut rig, request);
            assert_eq!((end.loaded_tokens, end.lost_tokens), (0, 8), "{how}");
            let waiting = matches!(how, "late" | "stopped");
            let want = if waiting { Refusal::BackupInFlight } else { Refusal::AnchorNotBackedUp };
            assert_eq!(end.reason, Some(want), "{how}");
            rig.abort(request).unwrap();
        }
        rig.drain();
        let backed_up = rig.core.page_counts(Tier::Host).cached_pages;
        assert_eq!(backed_up, if matches!(how, "fails" | "full") { 0 } else { 2 }, "{how}");
        rig.assert_quiet();
    }
}
