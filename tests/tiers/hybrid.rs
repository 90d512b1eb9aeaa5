//! Windows and states beside full attention, through every flow. The rig verifies their stamps wherever a request is
//! handed something, and counts every page of every pool.

use sapwood::base::{NamespaceId, Tier, Time};
use sapwood::pool::Capacity;
use sapwood::sim::{Call, Pending, Rig};
use sapwood::tiers::{
    Alloc, CoreConfig, Event, LoadBack, LoadState, PageOutcome, PoolKind, Prefetch, PrefetchEnd,
    PrefetchPolicy, PrefetchState, Refusal, RequestComponents, RequestId, StateConfig, Votes, WindowConfig,
    WritePolicy,
};
use sapwood::tree::Component;

use crate::common::{WT1, WT2, config, flush_device, found, t, t1, with_store};

fn hybrid(mut config: CoreConfig) -> CoreConfig {
    let pages = |n| Capacity::Pages(n);
    config.window = Some(WindowConfig { span_pages: 2, device: pages(16), host: pages(16) });
    config.state = Some(StateConfig { device: pages(8), host: pages(8) });
    config
}

/// A rig whose store holds every page of every pool of a prompt.
fn stocked(config: CoreConfig, prompt: &str) -> Rig {
    let mut rig = Rig::new(hybrid(with_store(config)));
    rig.store_from_elsewhere(NamespaceId::DEFAULT, &t(prompt), || false);
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

/// The pools that the reads in flight ask for.
fn asked(rig: &Rig) -> Vec<PoolKind> {
    rig.pending
        .iter()
        .flat_map(|p| if let Pending::Get(_, _, items) = p { items.clone() } else { Vec::new() })
        .map(|item| item.pool)
        .collect()
}

fn host_free(rig: &Rig) -> [u32; 3] {
    [
        rig.core.page_counts(Tier::Host).free_pages,
        rig.core.component_counts(Component::Window, Tier::Host).free_pages,
        rig.core.component_counts(Component::State, Tier::Host).free_pages,
    ]
}

#[test]
fn what_leaves_the_device_comes_back_with_its_window_and_state() {
    for write in [WT1, WritePolicy::WriteBack] {
        let mut rig = Rig::new(hybrid(config(8, 16, write)));
        rig.serve(&t("ABCD"));
        rig.drain();
        flush_device(&mut rig, 8);
        assert_eq!(found(&rig, "ABCD"), (0, 4), "{write:?}");
        // `serve` loads back and verifies all three pools.
        assert_eq!(rig.serve(&t("ABCDE")).host_tokens, 16);
        rig.drain();
        rig.assert_quiet();
    }
}

/// Windows have less room on the device than Full, so they go first. Under the policies that write what leaves they are
/// written ahead, on their own, or the host would keep prefixes from which nobody can go on.
#[test]
fn windows_that_leave_before_their_pages_are_written() {
    for (write, exclusive) in [(WritePolicy::WriteBack, false), (WT1, true)] {
        let mut config = hybrid(config(16, 16, write));
        (config.exclusive, config.write_ahead_percent) = (exclusive, 0);
        config.window = Some(WindowConfig { device: Capacity::Pages(8), ..config.window.unwrap() });
        let mut rig = Rig::new(config);
        for (at, prompt) in ["ABCD", "EFGH", "IJKL", "MNOP", "QRST"].into_iter().enumerate() {
            rig.serve(&t(prompt));
            rig.tick(Time(at as u64));
            rig.drain();
        }
        let windows = rig.core.component_counts(Component::Window, Tier::Device).cached_pages;
        assert_eq!((windows, found(&rig, "MNOP").0), (8, 4), "the others have no window on the device");
        assert_eq!(found(&rig, "ABCD"), (0, 4), "{write:?}");
        // Loads back and verifies.
        assert_eq!(rig.serve(&t("ABCDE")).host_tokens, 16);
        rig.drain();
        rig.assert_quiet();
    }
}

/// A copy of the window or the state alone: Full is on the device still.
#[test]
fn a_state_alone_is_loaded_back() {
    let mut rig = Rig::new(hybrid(config(16, 16, WT1)));
    rig.serve(&t("ABCD"));
    rig.drain();
    // Requests that compute take all slots, and the one of ABCD goes.
    let crowd: Vec<RequestId> = (0..8).map(|_| rig.request()).collect();
    for &id in &crowd {
        assert_eq!(rig.alloc(id, 1), Ok(Alloc::Granted));
    }
    assert_eq!(rig.core.component_counts(Component::State, Tier::Device).cached_pages, 0);
    let ninth = rig.request();
    assert!(matches!(rig.alloc(ninth, 1), Ok(Alloc::Refused { .. })), "nobody takes a slot in use");
    rig.abort(ninth).unwrap();
    for &id in &crowd[1..] {
        rig.abort(id).unwrap();
    }
    let request = rig.request();
    let m = rig.match_prefix(request, &t("ABCD")).unwrap();
    assert_eq!((m.device_tokens, m.host_tokens), (0, 16));
    assert_eq!(rig.load_back(request), Ok(LoadBack::Started { tokens: 16 }));
    let Pending::ToDevice(_, pairs) = &rig.pending[0] else { panic!("{:?}", rig.pending) };
    assert_eq!(pairs.iter().map(|p| p.pool).collect::<Vec<_>>(), [PoolKind::State]);
    rig.drain();
    rig.verify(request, &t("ABCD"));
    rig.abort(request).unwrap();
    rig.abort(crowd[0]).unwrap();
    rig.assert_quiet();
}

/// One request loads a prompt, another one its beginning, for which only the window is missing. The window arrives before the
/// pages it belongs to: it has to wait for them.
#[test]
fn a_window_that_arrives_before_its_pages_waits_for_them() {
    for pages_come in [true, false] {
        let mut windowed = hybrid(config(12, 16, WT1));
        windowed.state = None;
        let mut rig = Rig::new(windowed);
        rig.serve(&t("ABCD"));
        rig.drain();
        flush_device(&mut rig, 12);
        let (long, short) = (rig.request(), rig.request());
        rig.match_prefix(long, &t("ABCD")).unwrap();
        assert_eq!(rig.load_back(long), Ok(LoadBack::Started { tokens: 16 }));
        rig.match_prefix(short, &t("AB")).unwrap();
        assert_eq!(rig.load_back(short), Ok(LoadBack::Started { tokens: 8 }));
        let Pending::ToDevice(_, pairs) = &rig.pending[1] else { panic!("{:?}", rig.pending) };
        assert!(pairs.iter().all(|p| p.pool == PoolKind::Window), "{pairs:?}");
        rig.complete(1, &Call::Well);
        // What is all there holds up nobody who follows the other load layer by layer.
        let op = rig.pending[0].op();
        rig.feed(Event::LayerCopied { op, layers: 3 });
        assert_eq!(rig.core.load_state(short), Ok(LoadState::Pending { layers: 3 }));
        rig.complete(0, if pages_come { &Call::Well } else { &Call::Fails });
        if pages_come {
            rig.verify(short, &t("AB"));
            rig.verify(long, &t("ABCD"));
        }
        let state = if pages_come { LoadState::Ready } else { LoadState::Failed };
        assert_eq!(rig.core.load_state(short), Ok(state));
        rig.abort(short).unwrap();
        rig.abort(long).unwrap();
        rig.assert_quiet();
    }
}

/// Full with a window, with a state, with both.
fn shapes() -> [CoreConfig; 3] {
    let all = hybrid(config(8, 16, WT1));
    [CoreConfig { state: None, ..all }, CoreConfig { window: None, ..all }, all]
}

fn shown(rig: &Rig, request: RequestId) -> RequestComponents {
    rig.core.request_components(request).expect("a live request")
}

/// A rig with `ABCD` on the host alone, and a request that has begun to load it.
fn loading(config: CoreConfig) -> (Rig, RequestId) {
    let mut rig = Rig::new(config);
    rig.serve(&t("ABCD"));
    rig.drain();
    flush_device(&mut rig, 8);
    assert_eq!(found(&rig, "ABCD"), (0, 4));
    let request = rig.request();
    rig.match_prefix(request, &t("ABCD")).expect("a live request");
    assert_eq!(rig.load_back(request), Ok(LoadBack::Started { tokens: 16 }));
    (rig, request)
}

/// A rig with `ABCD` on the device but for what it has besides Full, which lies on the host alone.
fn without_components(mut config: CoreConfig) -> Rig {
    config.device = Capacity::Pages(64);
    let mut rig = Rig::new(config);
    rig.serve(&t("ABCD"));
    rig.drain();
    // Requests that compute take all window pages and slots.
    let crowd: Vec<RequestId> = (0..8).map(|_| rig.request()).collect();
    for &id in &crowd {
        assert_eq!(rig.alloc(id, 2), Ok(Alloc::Granted));
    }
    for id in crowd {
        rig.abort(id).expect("a live request");
    }
    for c in [Component::Window, Component::State] {
        assert_eq!(rig.core.component_counts(c, Tier::Device).cached_pages, 0);
    }
    rig
}

/// The same, and a request that has begun to load what is missing.
fn loading_components(config: CoreConfig) -> (Rig, RequestId) {
    let mut rig = without_components(config);
    let request = rig.request();
    let m = rig.match_prefix(request, &t("ABCD")).expect("a live request");
    assert_eq!((m.device_tokens, m.host_tokens), (0, 16));
    assert_eq!(rig.load_back(request), Ok(LoadBack::Started { tokens: 16 }));
    (rig, request)
}

/// Whoever follows a load layer by layer needs the windows and states of a layer with its pages: all of them are in the
/// request's view as soon as the load is under way, and are the same when it has ended.
#[test]
fn windows_and_states_of_a_load_are_shown_from_its_start() {
    for config in shapes() {
        let (mut rig, request) = loading(config);
        let start = shown(&rig, request);
        let windows = if config.window.is_some() { 2 } else { 0 };
        assert!(start.complete);
        assert_eq!(
            (start.window.len(), start.window_from, start.own_window_from),
            (windows, 4 - windows as u32, 4)
        );
        assert_eq!(start.state_in.is_some(), config.state.is_some());
        let Pending::ToDevice(_, pairs) = &rig.pending[0] else { panic!("{:?}", rig.pending) };
        let brought = |pool| pairs.iter().filter(|p| p.pool == pool).map(|p| p.target).collect::<Vec<_>>();
        assert_eq!(start.window, brought(PoolKind::Window));
        assert_eq!(start.state_in.as_slice(), brought(PoolKind::State));
        // Its own pages stand behind them.
        assert_eq!(rig.alloc(request, 1), Ok(Alloc::Granted));
        let own = shown(&rig, request);
        assert_eq!((&own.window[..windows], own.state_in), (&start.window[..], start.state_in));
        assert_eq!((own.window_from, own.own_window_from), (start.window_from, 4));
        assert_eq!(own.window.len(), windows + windows.min(1));
        rig.drain();
        assert_eq!(shown(&rig, request), own);
        rig.verify(request, &t("ABCD"));
        rig.compute(request, &t("ABCDE"), NamespaceId::DEFAULT);
        assert_eq!(rig.finish(request, &t("ABCDE")).unwrap().published_tokens, 20);
        rig.drain();
        rig.assert_quiet();
    }
}

/// Two loads never bring one place: the second request waits for the first one's load and is shown the same pages.
#[test]
fn a_second_request_joins_a_load_and_sees_the_same_pages() {
    for config in shapes() {
        let (mut rig, first) = loading(config);
        let second = rig.request();
        rig.match_prefix(second, &t("ABCD")).unwrap();
        assert_eq!(rig.load_back(second), Ok(LoadBack::Started { tokens: 16 }));
        assert_eq!(rig.pending.len(), 1, "{:?}", rig.pending);
        assert_eq!(shown(&rig, second), shown(&rig, first));
        assert_eq!(rig.core.loads(second), rig.core.loads(first));
        // The first one leaves; the second one keeps what both have seen.
        let seen = shown(&rig, second);
        rig.abort(first).unwrap();
        rig.drain();
        assert_eq!((rig.core.load_state(second), shown(&rig, second)), (Ok(LoadState::Ready), seen));
        rig.verify(second, &t("ABCD"));
        rig.abort(second).unwrap();
        rig.assert_quiet();
    }
}

/// The same where Full is on the device and only the rest is missing.
#[test]
fn a_load_of_windows_and_states_alone_is_joined() {
    for config in shapes() {
        let (mut rig, first) = loading_components(config);
        let second = rig.request();
        rig.match_prefix(second, &t("ABCD")).unwrap();
        assert_eq!(rig.load_back(second), Ok(LoadBack::Started { tokens: 16 }));
        let requests = [first, second];
        for id in requests {
            assert!(matches!(rig.core.load_state(id), Ok(LoadState::Pending { .. })));
        }
        assert_eq!(rig.pending.len(), 1, "{:?}", rig.pending);
        let seen = shown(&rig, requests[0]);
        assert_eq!(shown(&rig, requests[1]), seen);
        rig.drain();
        for id in requests {
            assert_eq!(shown(&rig, id), seen);
            rig.verify(id, &t("ABCD"));
            rig.abort(id).unwrap();
        }
        rig.assert_quiet();
    }
}

/// A request needs one window page that another one's load brings, and one that is its own to load.
#[test]
fn a_window_comes_in_part_from_the_load_of_another_request() {
    for (first_ends, fails) in [(true, false), (false, false), (true, true)] {
        let (mut rig, long) = loading(CoreConfig { state: None, ..hybrid(config(8, 16, WT1)) });
        let short = rig.request();
        rig.match_prefix(short, &t("ABC")).unwrap();
        assert_eq!(rig.load_back(short), Ok(LoadBack::Started { tokens: 12 }));
        let Pending::ToDevice(_, pairs) = &rig.pending[1] else { panic!("{:?}", rig.pending) };
        assert_eq!(pairs.iter().map(|p| p.pool).collect::<Vec<_>>(), [PoolKind::Window], "that of B");
        let seen = [shown(&rig, short), shown(&rig, long)];
        assert_eq!(seen[0].window, [pairs[0].target, seen[1].window[0]]);
        rig.complete(usize::from(!first_ends), if fails { &Call::Fails } else { &Call::Well });
        rig.drain();
        for (id, seen, prompt) in [(short, &seen[0], "ABC"), (long, &seen[1], "ABCD")] {
            if fails {
                assert_eq!(rig.core.load_state(id), Ok(LoadState::Failed));
            } else {
                assert_eq!(&shown(&rig, id), seen);
                rig.verify(id, &t(prompt));
            }
            rig.abort(id).unwrap();
        }
        rig.assert_quiet();
    }
}

/// Somebody computes what a load is bringing. Its pages would be duplicates of pages that others may already be computing
/// on, so they have to wait until the load has ended.
#[test]
fn what_a_load_brings_is_not_inserted_meanwhile() {
    for ends_well in [true, false] {
        for config in shapes() {
            let mut rig = without_components(config);
            let [computes, loads] = [rig.request(), rig.request()];
            assert_eq!(rig.alloc(computes, 5), Ok(Alloc::Granted));
            rig.match_prefix(loads, &t("ABCD")).unwrap();
            assert_eq!(rig.load_back(loads), Ok(LoadBack::Started { tokens: 16 }));
            let seen = shown(&rig, loads);
            rig.compute(computes, &t("ABCD"), NamespaceId::DEFAULT);
            let before = (shown(&rig, computes), rig.core.pages(computes).unwrap().to_vec());
            let refused = rig.checkpoint(computes, &t("ABCD")).unwrap();
            assert_eq!((refused.refused, refused.published_tokens), (Some(Refusal::LoadPending), 0));
            assert_eq!((shown(&rig, computes), rig.core.pages(computes).unwrap().to_vec()), before);
            assert_eq!(shown(&rig, loads), seen);
            rig.complete(0, if ends_well { &Call::Well } else { &Call::Fails });
            if ends_well {
                assert_eq!(shown(&rig, loads), seen);
                rig.verify(loads, &t("ABCD"));
            }
            let published = rig.checkpoint(computes, &t("ABCD")).unwrap();
            assert_eq!((published.refused, published.published_tokens), (None, 16));
            assert_eq!(rig.alloc(computes, 0), Ok(Alloc::Granted));
            rig.compute(computes, &t("ABCDE"), NamespaceId::DEFAULT);
            assert_eq!(rig.finish(computes, &t("ABCDE")).unwrap().published_tokens, 20);
            rig.abort(loads).unwrap();
            rig.drain();
            assert_eq!(found(&rig, "ABCDE").0, 5);
            rig.assert_quiet();
        }
    }
}

/// A load does not hold up what has no page for its places, nor what gives up and goes.
#[test]
fn an_insert_beside_the_places_of_a_load_goes_through() {
    let mut rig = without_components(CoreConfig { window: None, ..hybrid(config(8, 16, WT1)) });
    let [computes, leaves, loads] = [rig.request(), rig.request(), rig.request()];
    for id in [computes, leaves] {
        assert_eq!(rig.alloc(id, 5), Ok(Alloc::Granted));
    }
    rig.match_prefix(loads, &t("ABCD")).unwrap();
    assert_eq!(rig.load_back(loads), Ok(LoadBack::Started { tokens: 16 }));
    let seen = shown(&rig, loads);
    // The state of E, not that of D.
    rig.compute(computes, &t("ABCDE"), NamespaceId::DEFAULT);
    assert_eq!(rig.finish(computes, &t("ABCDE")).unwrap().refused, None);
    rig.compute(leaves, &t("ABCD"), NamespaceId::DEFAULT);
    assert_eq!(rig.finish(leaves, &t("ABCD")).unwrap().refused, Some(Refusal::LoadPending));
    assert_eq!(shown(&rig, loads), seen);
    rig.drain();
    assert_eq!(shown(&rig, loads), seen);
    rig.verify(loads, &t("ABCD"));
    rig.abort(loads).unwrap();
    rig.drain();
    rig.assert_quiet();
}

/// What a request goes on with in its own slot is not mixed up with what others load at the place where it published.
#[test]
fn a_request_is_shown_only_what_its_own_loads_bring() {
    let mut rig = without_components(CoreConfig { window: None, ..hybrid(config(8, 16, WT1)) });
    let [computes, loads] = [rig.request(), rig.request()];
    assert_eq!(rig.alloc(computes, 5), Ok(Alloc::Granted));
    // Off a page border: the state stays with the request.
    rig.compute(computes, &t1("ABCD"), NamespaceId::DEFAULT);
    assert_eq!(rig.checkpoint(computes, &t1("ABCD")).unwrap().published_tokens, 16);
    rig.match_prefix(loads, &t("ABCD")).unwrap();
    assert_eq!(rig.load_back(loads), Ok(LoadBack::Started { tokens: 16 }));
    assert!(shown(&rig, loads).state_in.is_some());
    let own = shown(&rig, computes);
    assert_eq!((rig.core.load_state(computes), own.state_in), (Ok(LoadState::Ready), None));
    rig.drain();
    rig.abort(loads).unwrap();
    rig.abort(computes).unwrap();
    rig.assert_quiet();
}

/// A load fails: its pages of all pools are free, and whoever was shown them starts over.
#[test]
fn a_failed_load_takes_back_what_it_has_shown() {
    for config in shapes() {
        let (mut rig, first) = loading(config);
        let second = rig.request();
        rig.match_prefix(second, &t("ABCD")).unwrap();
        rig.load_back(second).unwrap();
        assert_eq!(rig.alloc(first, 1), Ok(Alloc::Granted));
        rig.complete(0, &Call::Fails);
        for id in [first, second] {
            assert_eq!(rig.core.load_state(id), Ok(LoadState::Failed));
            let left = shown(&rig, id);
            assert!(!left.complete, "it lists only what is the request's own");
            let own = if id == first && config.window.is_some() { 1 } else { 0 };
            assert_eq!((left.window.len(), left.state_in), (own, None));
            assert_eq!(left.state.is_some(), id == first && config.state.is_some());
        }
        for c in [Component::Window, Component::State] {
            assert_eq!(rig.core.component_counts(c, Tier::Device).cached_pages, 0);
        }
        // Again from the start, and this time it comes.
        for id in [first, second] {
            rig.match_prefix(id, &t("ABCD")).unwrap();
            assert_eq!(rig.load_back(id), Ok(LoadBack::Started { tokens: 16 }));
            assert!(shown(&rig, id).complete);
        }
        rig.drain();
        for id in [first, second] {
            rig.verify(id, &t("ABCD"));
            rig.abort(id).unwrap();
        }
        rig.assert_quiet();
    }
}

/// Another request parts from the path of a load, once inside its window and once above.
#[test]
fn a_split_under_a_load_leaves_its_places_alone() {
    for (prompt, ends_well) in [("ABCX", true), ("ABX", true), ("AX", true), ("ABCX", false)] {
        for config in shapes() {
            for (mut rig, loads) in [loading(config), loading_components(config)] {
                let (seen, splits) = (shown(&rig, loads), rig.core.tree().stats().splits);
                let parts = rig.request();
                rig.match_prefix(parts, &t(prompt)).unwrap();
                assert!(rig.core.tree().stats().splits > splits);
                assert_eq!(shown(&rig, loads), seen);
                rig.complete(0, if ends_well { &Call::Well } else { &Call::Fails });
                if ends_well {
                    assert_eq!(shown(&rig, loads), seen);
                    rig.verify(loads, &t("ABCD"));
                } else {
                    assert_eq!(rig.core.load_state(loads), Ok(LoadState::Failed));
                }
                rig.abort(parts).unwrap();
                rig.abort(loads).unwrap();
                rig.assert_quiet();
            }
        }
    }
}

/// The upper part of a path fails while the load of its lower part is in flight. A request that ends inside the lower part
/// needs windows there that this load does not bring. They can come neither before its pages, which wait for the upper part,
/// nor with that: the request has to ask again.
#[test]
fn windows_under_the_pages_of_a_load_that_waits_come_later() {
    let config = CoreConfig { state: None, ..hybrid(config(16, 16, WT1)) };
    let mut rig = Rig::new(config);
    rig.serve(&t("ABCDEF"));
    rig.drain();
    flush_device(&mut rig, 16);
    let [upper, lower, between, whole] = [(); 4].map(|()| rig.request());
    for (id, prompt) in [(upper, "A"), (lower, "ABCDEF")] {
        rig.match_prefix(id, &t(prompt)).unwrap();
        assert!(matches!(rig.load_back(id), Ok(LoadBack::Started { .. })));
    }
    rig.complete(0, &Call::Fails);
    rig.match_prefix(between, &t("ABC")).unwrap();
    assert_eq!(rig.load_back(between), Ok(LoadBack::Refused(Refusal::LoadPending)));
    // This one needs the windows that the lower load brings, and loads the upper part again.
    rig.match_prefix(whole, &t("ABCDEF")).unwrap();
    assert_eq!(rig.load_back(whole), Ok(LoadBack::Started { tokens: 24 }));
    assert_eq!(rig.load_back(between), Ok(LoadBack::Started { tokens: 12 }));
    let seen = [shown(&rig, between), shown(&rig, whole)];
    // The lower part, the windows of the one between, and at last the upper part.
    for last in [0, 1, 0] {
        rig.complete(last, &Call::Well);
    }
    assert!(rig.pending.is_empty());
    assert_eq!([shown(&rig, between), shown(&rig, whole)], seen);
    rig.verify(between, &t("ABC"));
    rig.verify(whole, &t("ABCDEF"));
    for id in [upper, lower, between, whole] {
        rig.abort(id).unwrap();
    }
    rig.assert_quiet();
}

/// Without a host slot the state is lost with the device copy: the match is cut, nothing is wrong, nothing leaks.
#[test]
fn a_lost_state_only_shortens_the_match() {
    let mut poor = hybrid(config(8, 16, WT1));
    poor.state = Some(StateConfig { device: Capacity::Pages(8), host: Capacity::Pages(0) });
    let mut rig = Rig::new(poor);
    rig.serve(&t("ABCD"));
    rig.drain();
    assert_eq!(rig.core.stats().component_unsaved_pages, 1);
    flush_device(&mut rig, 8);
    assert_eq!(found(&rig, "ABCD"), (0, 0));
    rig.serve(&t("ABCD"));
    rig.drain();
    assert_eq!(found(&rig, "ABCD"), (4, 0), "computed again, and the host pages are taken up");
    rig.assert_quiet();
}

/// A state is computed again after its node was backed up without one: it follows to the host on its own.
#[test]
fn a_state_that_was_computed_again_follows_its_node_to_the_host() {
    let mut rig = Rig::new(hybrid(config(8, 16, WT1)));
    // Off a page border there is no state to publish.
    let mut tokens = t("ABCD");
    tokens.push(7);
    rig.serve(&tokens);
    rig.drain();
    assert_eq!(rig.core.component_counts(Component::State, Tier::Host).cached_pages, 0);
    rig.serve(&t("ABCD"));
    let Pending::ToHost(_, pairs) = &rig.pending[0] else { panic!("{:?}", rig.pending) };
    assert_eq!(pairs.iter().map(|p| p.pool).collect::<Vec<_>>(), [PoolKind::State]);
    rig.drain();
    flush_device(&mut rig, 8);
    assert_eq!(found(&rig, "ABCD"), (0, 4));
    rig.serve(&t("ABCD"));
    rig.drain();
    rig.assert_quiet();
}

/// A failed copy of any kind gives all of all pools back.
#[test]
fn a_failed_copy_gives_every_pool_back() {
    let mut rig = Rig::new(hybrid(config(8, 16, WT1)));
    rig.serve(&t("ABCD"));
    rig.complete(0, &Call::Fails);
    assert_eq!(host_free(&rig), [16, 16, 8]);
    rig.serve(&t("ABCD"));
    rig.drain();
    flush_device(&mut rig, 8);
    let request = rig.request();
    rig.match_prefix(request, &t("ABCD")).unwrap();
    rig.load_back(request).unwrap();
    rig.complete(0, &Call::Fails);
    rig.abort(request).unwrap();
    let free =
        [Component::Window, Component::State].map(|c| rig.core.component_counts(c, Tier::Device).free_pages);
    assert_eq!(free, [16, 8]);
    rig.assert_quiet();
}

/// What was computed elsewhere came with the end of its window: the rest of the window is not published, and a prompt
/// that would need it is cut.
#[test]
fn a_window_whose_beginning_was_let_go_is_published_from_where_it_is() {
    let mut rig = Rig::new(hybrid(config(8, 16, WT1)));
    let request = rig.request();
    assert_eq!(rig.alloc(request, 4), Ok(Alloc::Granted));
    rig.compute(request, &t("ABCD"), NamespaceId::DEFAULT);
    rig.core.let_window_go(request, 2).unwrap();
    let parts = rig.core.request_components(request).unwrap();
    assert_eq!((parts.window_from, parts.own_window_from, parts.window.len()), (2, 2, 2));
    let counts = rig.core.component_counts(Component::Window, Tier::Device);
    assert_eq!((counts.request_pages, counts.free_pages, counts.leaked_pages), (2, 14, 0));
    // Less than was let go already, and more than there is.
    rig.core.let_window_go(request, 1).unwrap();
    assert_eq!(rig.core.component_counts(Component::Window, Tier::Device).request_pages, 2);
    rig.finish(request, &t("ABCD")).unwrap();
    rig.drain();
    assert_eq!(rig.core.component_counts(Component::Window, Tier::Device).cached_pages, 2);
    assert_eq!((found(&rig, "ABCD"), found(&rig, "ABC")), ((4, 0), (0, 0)));
    assert_eq!(rig.serve(&t("ABCDE")).device_tokens, 16);
    let none = rig.request();
    assert_eq!(rig.alloc(none, 2), Ok(Alloc::Granted));
    rig.core.let_window_go(none, 99).unwrap();
    assert!(rig.core.request_components(none).unwrap().window.is_empty());
    rig.abort(none).unwrap();
    rig.drain();
    rig.assert_quiet();
}

/// A load fails under a request that owns pages already. Another one that matched what is there and owns what is missing
/// goes on with them.
#[test]
fn a_request_goes_on_with_what_another_one_owned() {
    let mut rig = Rig::new(hybrid(config(8, 16, WT1)));
    rig.serve(&t("ABCD"));
    rig.drain();
    flush_device(&mut rig, 8);
    let failed = rig.request();
    rig.match_prefix(failed, &t("ABCD")).unwrap();
    assert!(matches!(rig.load_back(failed), Ok(LoadBack::Started { tokens: 16 })));
    assert_eq!(rig.alloc(failed, 1), Ok(Alloc::Granted));
    rig.complete(0, &Call::Fails);
    assert_eq!(rig.core.load_state(failed), Ok(LoadState::Failed));
    let again = rig.request();
    assert_eq!(rig.alloc(again, 4), Ok(Alloc::Granted));
    let table = [rig.core.pages(again).unwrap(), &rig.core.pages(failed).unwrap()[4..]].concat();
    let state = rig.core.request_components(failed).unwrap().state;
    rig.core.take_over(again, failed).unwrap();
    rig.core.take_over(again, again).unwrap();
    assert_eq!(rig.core.pages(again).unwrap(), table);
    let parts = rig.core.request_components(again).unwrap();
    assert_eq!((parts.own_window_from, parts.window.len(), parts.state), (0, 5, state));
    rig.abort(failed).unwrap();
    rig.compute(again, &t("ABCDE"), NamespaceId::DEFAULT);
    assert_eq!(rig.finish(again, &t("ABCDE")).unwrap().published_tokens, 20);
    rig.drain();
    assert_eq!(rig.serve(&t("ABCDEF")).device_tokens, 20);
    // A giver without its whole window leaves no hole in that of the taker.
    let [taker, giver] = [rig.request(), rig.request()];
    assert_eq!((rig.alloc(taker, 1), rig.alloc(giver, 1)), (Ok(Alloc::Granted), Ok(Alloc::Granted)));
    rig.core.let_window_go(giver, 1).unwrap();
    rig.core.take_over(taker, giver).unwrap();
    let parts = rig.core.request_components(taker).unwrap();
    assert_eq!((parts.own_window_from, parts.window.len()), (2, 0));
    rig.abort(taker).unwrap();
    rig.abort(giver).unwrap();
    rig.drain();
    rig.assert_quiet();
}

/// Through a store and a restart: one process writes, the next one prefetches, loads and goes on.
#[test]
fn a_restart_finds_windows_and_states_in_the_store() {
    let mut before = Rig::new(hybrid(with_store(config(16, 16, WT1))));
    before.serve(&t("ABCDEF"));
    before.drain();
    let mut rig = Rig::new(hybrid(with_store(config(16, 16, WT1))));
    rig.inherit_store(&before);
    let request = start(&mut rig, "ABCDEF");
    rig.drain();
    assert_eq!(ended(&mut rig, request).loaded_tokens, 24);
    assert_eq!(rig.core.stats().component_prefetched_pages, 3, "a window of two pages, and a state");
    let m = rig.match_prefix(request, &t("ABCDEF")).unwrap();
    assert_eq!(m.host_tokens, 24);
    rig.load_back(request).unwrap();
    rig.drain();
    rig.verify(request, &t("ABCDEF"));
    rig.abort(request).unwrap();
    rig.assert_quiet();
}

/// sgl#30057, sgl#31108 (B28): the pools are asked together, and the stop point is one at which all have what a request
/// needs: here a state is missing at the end, further up the window has a hole.
#[test]
fn b28_the_stop_point_is_one_that_all_pools_have() {
    let mut rig = Rig::new(hybrid(with_store(config(16, 16, WT1))));
    let mut page = 0;
    rig.store_from_elsewhere(NamespaceId::DEFAULT, &t("ABCDEF"), || {
        page += 1;
        // Pools take turns: the state of F, the window of D (and with it stop points D and E).
        [6 * 3, 4 * 3 - 1].contains(&page)
    });
    let request = start(&mut rig, "ABCDEF");
    rig.drain();
    let end = ended(&mut rig, request);
    assert_eq!((end.hit_tokens, end.loaded_tokens, end.lost_tokens), (24, 12, 12));
    assert_eq!(end.reason, Some(Refusal::NotRestorable));
    assert_eq!(found(&rig, "ABCDEF"), (0, 3));
    rig.abort(request).unwrap();
    rig.assert_quiet();
}

/// A page of Full can not be read after all: the prefetch goes back to the best stop point before it, and reads the window
/// and the state of that one instead of throwing everything away.
#[test]
fn a_shortfall_retreats_to_the_best_stop_point_left() {
    for bad in 0..6usize {
        let mut rig = stocked(config(16, 16, WT1), "ABCDEF");
        let request = start(&mut rig, "ABCDEF");
        rig.complete(0, &Call::Well);
        let mut full = 0;
        while !rig.pending.is_empty() {
            let Pending::Get(_, _, items) = &rig.pending[0] else { panic!("{:?}", rig.pending) };
            let outcomes = items.iter().map(|item| {
                let place = full;
                full += usize::from(item.pool == PoolKind::Full);
                let hit = item.pool == PoolKind::Full && place == bad;
                if hit { PageOutcome::Corrupt } else { PageOutcome::Done }
            });
            let how = Call::Each(outcomes.collect());
            rig.complete(0, &how);
        }
        let end = ended(&mut rig, request);
        assert_eq!(end.loaded_tokens, 4 * bad as u64, "page {bad}");
        assert_eq!(end.reason, Some(Refusal::StoreFailed));
        let m = rig.match_prefix(request, &t("ABCDEF")).unwrap();
        assert_eq!(m.host_tokens, 4 * bad as u64);
        if bad > 0 {
            rig.load_back(request).unwrap();
            rig.drain();
            rig.verify(request, &t("ABCDEF"));
        }
        rig.abort(request).unwrap();
        rig.assert_quiet();
    }
}

/// A window or state that can not be read: the next stop point further up is tried, and in the end nothing is kept.
#[test]
fn a_component_that_can_not_be_read_is_not_the_end() {
    let mut rig = stocked(config(16, 16, WT1), "ABCD");
    let request = start(&mut rig, "ABCD");
    rig.complete(0, &Call::Well);
    let mut tried = 0;
    while !rig.pending.is_empty() {
        let Pending::Get(_, _, items) = &rig.pending[0] else { panic!("{:?}", rig.pending) };
        let outcomes = items.iter().map(|item| match item.pool {
            PoolKind::State => {
                tried += 1;
                PageOutcome::Missing
            }
            _ => PageOutcome::Done,
        });
        let how = Call::Each(outcomes.collect());
        rig.complete(0, &how);
    }
    assert_eq!(tried, 4, "the states of D, C, B and A");
    let end = ended(&mut rig, request);
    assert_eq!((end.hit_tokens, end.loaded_tokens, end.lost_tokens), (16, 0, 16));
    rig.abort(request).unwrap();
    assert_eq!(host_free(&rig), [16, 16, 8]);
    rig.assert_quiet();
}

/// sgl#31902 (B01, with side pools of other page counts): a dropped refill gives back all pages of all pools.
#[test]
fn b01_a_dropped_refill_gives_back_every_pool() {
    let mut rig = stocked(config(16, 16, WT2), "ABCDEF");
    rig.serve(&t("AB"));
    let before = host_free(&rig);
    let request = start(&mut rig, "ABCDEF");
    rig.drain();
    let end = ended(&mut rig, request);
    assert_eq!((end.loaded_tokens, end.lost_tokens), (0, 16));
    assert_eq!(end.reason, Some(Refusal::AnchorNotBackedUp));
    assert_eq!(host_free(&rig), before);
    rig.abort(request).unwrap();
    rig.assert_quiet();
}

/// sgl#9874 (B04) with side pools: an abort in every state of a hybrid prefetch.
#[test]
fn b04_an_abort_in_every_state_gives_every_pool_back() {
    for steps in 0..8 {
        for fails in [false, true] {
            let mut rig = stocked(config(16, 16, WT1), "ABCDEF");
            let before = host_free(&rig);
            let request = start(&mut rig, "ABCDEF");
            for _ in 0..steps {
                if !rig.pending.is_empty() {
                    rig.complete(0, if fails && steps > 1 { &Call::Fails } else { &Call::Well });
                }
            }
            let whole =
                matches!(rig.poll_prefetch(request), Ok(PrefetchState::Ended(e)) if e.loaded_tokens > 0);
            rig.abort(request).unwrap();
            rig.drain();
            if !whole {
                assert_eq!(host_free(&rig), before, "after {steps} steps");
            }
            rig.assert_quiet();
        }
    }
}

/// sgl#27550 (B17): best effort stops while the window is still being read. Nothing of it becomes visible, and the pages of
/// the read stay with it until that has ended, on every rank alike.
#[test]
fn b17_a_stop_before_the_window_has_arrived_shows_nothing() {
    let mut eager = hybrid(with_store(config(16, 16, WT1)));
    eager.prefetch.policy = PrefetchPolicy::BestEffort;
    eager.prefetch.batch_pages = 4;
    let mut ranks: Vec<Rig> = (0..2).map(|_| Rig::new(eager)).collect();
    let mut votes = Votes::new(2);
    let mut requests = Vec::new();
    for rig in &mut ranks {
        rig.store_from_elsewhere(NamespaceId::DEFAULT, &t("ABCD"), || false);
        requests.push(start(rig, "ABCD"));
    }
    // The query on both, the batch of Full on both, the batch of components on one rank only.
    for (rank, work) in [(0, 0), (1, 0), (0, 0), (1, 0), (0, 0)] {
        let event = ranks[rank].perform(work, &Call::Well);
        votes.cast(rank as u32, event);
        let mut agreed = Vec::new();
        votes.settle(&mut agreed);
        for event in agreed {
            ranks.iter_mut().for_each(|rig| rig.feed(event.clone()));
        }
    }
    for (rig, &request) in ranks.iter_mut().zip(&requests) {
        let end = ended(rig, request);
        assert_eq!((end.loaded_tokens, end.reason), (0, Some(Refusal::OutOfTime)));
        assert_eq!(found(rig, "ABCD"), (0, 0));
        assert_eq!(host_free(rig), [16, 14, 7], "the read may still write there");
    }
    let event = ranks[1].perform(0, &Call::Well);
    votes.cast(1, event);
    let mut agreed = Vec::new();
    votes.settle(&mut agreed);
    for (rig, request) in ranks.iter_mut().zip(requests) {
        rig.feed(agreed[0].clone());
        assert_eq!(host_free(rig), [16, 16, 8]);
        rig.abort(request).unwrap();
        rig.assert_quiet();
    }
    assert_eq!(ranks[0].core.digest(), ranks[1].core.digest());
}

/// Ranks hold different states: they stop where both can go on.
#[test]
fn ranks_meet_at_a_stop_point_of_both() {
    let mut votes = Votes::new(2);
    let mut ranks = Vec::new();
    let mut requests = Vec::new();
    // States at the ends of B and D, and at the ends of B and C.
    for missing in [[1, 3, 5], [1, 4, 5]] {
        let mut rig = Rig::new(hybrid(with_store(config(16, 16, WT1))));
        let mut page = 0;
        rig.store_from_elsewhere(NamespaceId::DEFAULT, &t("ABCDE"), || {
            page += 1;
            page % 3 == 0 && missing.contains(&(page / 3))
        });
        requests.push(start(&mut rig, "ABCDE"));
        let event = rig.perform(0, &Call::Well);
        votes.cast(ranks.len() as u32, event);
        ranks.push(rig);
    }
    let mut agreed = Vec::new();
    votes.settle(&mut agreed);
    for (rig, request) in ranks.iter_mut().zip(requests) {
        rig.feed(agreed[0].clone());
        let pools = [PoolKind::Full, PoolKind::Full, PoolKind::Window, PoolKind::Window];
        assert_eq!(asked(rig), pools, "the state comes when the window of batches moves on");
        rig.drain();
        assert_eq!(ended(rig, request).loaded_tokens, 8);
        rig.abort(request).unwrap();
        rig.assert_quiet();
    }
    assert_eq!(ranks[0].core.digest(), ranks[1].core.digest());
}

/// A page is stored when all of it is: a state that the store did not take is tried again with its page.
#[test]
fn b37_a_state_that_was_not_stored_is_tried_again() {
    let mut rig = Rig::new(hybrid(with_store(config(16, 16, WT1))));
    rig.serve(&t("AB"));
    rig.drain_kind(|p| matches!(p, Pending::ToHost(..)));
    while let Some(Pending::Put(_, _, items)) = rig.pending.first() {
        let each = items.iter().map(|item| match item.pool {
            PoolKind::State => PageOutcome::Refused,
            _ => PageOutcome::Done,
        });
        let how = Call::Each(each.collect());
        rig.complete(0, &how);
    }
    rig.tick(rig.core.next_timeout().expect("a retry is due"));
    rig.drain();
    let mut next = Rig::new(hybrid(with_store(config(16, 16, WT1))));
    next.inherit_store(&rig);
    let request = start(&mut next, "AB");
    next.drain();
    assert_eq!(ended(&mut next, request).loaded_tokens, 8);
    next.abort(request).unwrap();
    rig.assert_quiet();
}
