//! When a request may ask the store again, how long it waits, and whether it asks at all.

use sapwood::base::Time;
use sapwood::sim::{Call, Rig};
use sapwood::tiers::{
    Alloc, CoreConfig, LoadBack, Prefetch, PrefetchEnd, PrefetchPolicy, PrefetchState, Rates, Refusal,
    RequestId,
};

use crate::common::{WT1, config, store_with, t, t1, with_store};

fn rig(change: impl FnOnce(&mut CoreConfig), stored: &[&str]) -> Rig {
    let mut config = with_store(config(16, 16, WT1));
    change(&mut config);
    let mut rig = Rig::new(config);
    rig.inherit_store(&store_with(stored));
    rig
}

fn ended(rig: &mut Rig, request: RequestId) -> PrefetchEnd {
    match rig.poll_prefetch(request).expect("a live request") {
        PrefetchState::Ended(end) => end,
        other => panic!("{other:?}"),
    }
}

fn refused(rig: &mut Rig, request: RequestId, prompt: &str) -> Option<Refusal> {
    match rig.prefetch(request, &t1(prompt)).expect("a live request") {
        Prefetch::Refused(reason) => Some(reason),
        Prefetch::Started { .. } => None,
    }
}

#[test]
fn a_request_asks_again_after_a_pause_and_not_for_ever() {
    let mut rig = rig(|c| (c.prefetch.retry_ms, c.prefetch.attempts_max) = (100, 3), &[]);
    let request = rig.request();
    for attempt in 0..3 {
        let now = Time::from_millis(attempt * 100);
        rig.tick(now);
        assert_eq!(refused(&mut rig, request, "ABCD"), None, "attempt {attempt}");
        rig.drain();
        assert_eq!(ended(&mut rig, request).reason, Some(Refusal::NotInStore));
        if attempt < 2 {
            rig.tick(Time(now.0 + 99_999));
            assert_eq!(refused(&mut rig, request, "ABCD"), Some(Refusal::Paced));
        }
    }
    rig.tick(Time::from_millis(60_000));
    assert_eq!(refused(&mut rig, request, "ABCD"), Some(Refusal::AttemptsUsed));
    rig.abort(request).unwrap();
    // The next request starts anew.
    let request = rig.request();
    assert_eq!(refused(&mut rig, request, "ABCD"), None);
    rig.drain();
    rig.abort(request).unwrap();
    rig.assert_quiet();
}

/// What the prefetch counted on was evicted while the request waited: it may ask again at once.
#[test]
fn a_lost_prefix_is_worth_asking_again() {
    let mut rig = rig(|c| c.prefetch.retry_ms = 1_000_000, &["ABCD"]);
    let request = rig.request();
    assert_eq!(refused(&mut rig, request, "ABCD"), None);
    rig.drain();
    assert_eq!(ended(&mut rig, request).loaded_tokens, 16);
    assert_eq!(refused(&mut rig, request, "ABCDE"), Some(Refusal::Paced));
    for prompt in ["EFGH", "IJKL", "MNOP", "QRST"] {
        rig.serve(&t(prompt));
        rig.drain();
    }
    let m = rig.match_prefix(request, &t("ABCD")).unwrap();
    assert_eq!((m.device_tokens + m.host_tokens, m.lost_tokens), (0, 16));
    assert_eq!(refused(&mut rig, request, "ABCD"), None);
    rig.drain();
    assert_eq!(ended(&mut rig, request).loaded_tokens, 16);
    assert_eq!(rig.match_prefix(request, &t("ABCD")).unwrap().lost_tokens, 0);
    rig.abort(request).unwrap();
    rig.assert_quiet();
}

/// One budget per request: a second prefetch does not get a second one.
#[test]
fn the_time_to_wait_is_the_requests() {
    let policy = PrefetchPolicy::Timeout { base_ms: 10, per_ki_token_ms: 0 };
    let mut rig = rig(|c| c.prefetch.policy = policy, &["ABCD"]);
    let request = rig.request();
    assert_eq!(refused(&mut rig, request, "ABCD"), None);
    assert_eq!(rig.poll_prefetch(request), Ok(PrefetchState::Pending));
    rig.complete(0, &Call::Fails);
    assert_eq!(ended(&mut rig, request).reason, Some(Refusal::StoreFailed));
    rig.tick(Time::from_millis(8));
    assert_eq!(refused(&mut rig, request, "ABCD"), None);
    assert_eq!(rig.core.prefetch_deadline(request), Some(Time::from_millis(10)));
    rig.tick(Time::from_millis(10));
    assert_eq!(ended(&mut rig, request).reason, Some(Refusal::OutOfTime));
    rig.abort(request).unwrap();
    rig.drain();
    rig.assert_quiet();
}

/// The share of the host is charged with what was found. A long span of which the store holds little blocks nobody.
#[test]
fn the_share_is_charged_with_the_hit() {
    let mut rig = rig(|c| c.prefetch.host_share_percent = 25, &["ABCD", "WX"]);
    let (long, short) = (rig.request(), rig.request());
    assert_eq!(refused(&mut rig, long, "WXABCDEFGHIJKLMN"), None);
    rig.complete(0, &Call::Well);
    // Two of four pages are taken, not fourteen.
    assert_eq!(refused(&mut rig, short, "ABCD"), None);
    rig.complete(rig.pending.len() - 1, &Call::Well);
    rig.drain();
    assert_eq!(ended(&mut rig, long).loaded_tokens, 8);
    let end = ended(&mut rig, short);
    assert_eq!((end.hit_tokens, end.loaded_tokens, end.reason), (16, 8, Some(Refusal::NoHostPages)));
    rig.abort(long).unwrap();
    rig.abort(short).unwrap();
    rig.assert_quiet();
}

/// Adaptive: loaded is what is predicted to come sooner than it can be computed, and waited for is no longer than that.
#[test]
fn adaptive_loads_only_what_is_faster_than_computing() {
    let rates = |compute, load, latency| Rates {
        compute_ns_per_token: compute,
        load_ns_per_token: load,
        load_latency_us: latency,
    };
    for (rates, loads) in [
        // 16 tokens: 1,600 us to compute.
        (rates(100_000, 50_000, 700), true),
        (rates(100_000, 50_000, 900), false),
        (rates(100_000, 100_000, 0), false),
        (rates(100_000, 99_000, 0), true),
        // Unknown rates decide nothing.
        (rates(0, 99_000, 0), true),
        (rates(100_000, 0, 9_999), true),
    ] {
        let mut rig = rig(|c| c.prefetch.policy = PrefetchPolicy::Adaptive, &["ABCD"]);
        rig.core.set_rates(rates);
        let request = rig.request();
        assert_eq!(refused(&mut rig, request, "ABCD"), None);
        rig.complete(0, &Call::Well);
        assert_eq!(!rig.pending.is_empty(), loads, "{rates:?}");
        if loads {
            assert_eq!(rig.poll_prefetch(request), Ok(PrefetchState::Pending));
            let budget_us = if rates.are_known() { 1_600 } else { 1_000_000 + 3_000 };
            assert_eq!(rig.core.prefetch_deadline(request), Some(Time(budget_us)), "{rates:?}");
            rig.drain();
            assert_eq!(ended(&mut rig, request).loaded_tokens, 16);
        } else {
            assert_eq!(ended(&mut rig, request).reason, Some(Refusal::SlowerThanCompute));
        }
        rig.abort(request).unwrap();
        rig.assert_quiet();
    }
}

/// A load that would take more of the device than the request may have now is refused whole, and the match stays.
#[test]
fn a_load_keeps_within_the_budget_of_its_request() {
    let mut rig = Rig::new(config(8, 8, WT1));
    rig.serve(&t("ABCD"));
    rig.drain();
    let flush = rig.request();
    assert_eq!(rig.alloc(flush, 8), Ok(Alloc::Granted));
    rig.abort(flush).unwrap();
    let request = rig.request();
    assert_eq!(rig.match_prefix(request, &t("ABCD")).unwrap().host_tokens, 16);
    assert_eq!(rig.load_back_within(request, 3), Ok(LoadBack::Refused(Refusal::OverBudget)));
    rig.check();
    assert_eq!(rig.load_back_within(request, 4), Ok(LoadBack::Started { tokens: 16 }));
    rig.abort(request).unwrap();
    rig.complete(0, &Call::Fails);
    rig.assert_quiet();
}
