use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::backend::device::{CopyFault, SoftDevice, SoftFault};
use crate::base::{Tier, Time};
use crate::pd::receiver::{Event, Receiver, ReceiverConfig, RecvSpec};
use crate::pd::topo::{Rank, Topology};
use crate::pd::wire::Prompt;
use crate::pd::{Incarnation, PeerId};
use crate::pool::{Capacities, Capacity, PlaneId};
use crate::tiers::{StateConfig, WindowConfig, WritePolicy};
use crate::tree::Component as TreeComponent;

const PAGES: u32 = 8;

fn geometry() -> Arc<Geometry> {
    Arc::new(Geometry::builder(4).plane(Plane::target(2, 16)).build().unwrap())
}

fn cache(host_pages: u32) -> (SoftDevice, DecodeCache) {
    let g = geometry();
    let device = SoftDevice::inline(g.clone(), Capacities::full(Capacity::Pages(PAGES))).unwrap();
    let mut builder = PrefixCache::builder(g).device(device.clone());
    if host_pages > 0 {
        builder = builder
            .host_pages(Capacity::Pages(host_pages))
            .write_policy(WritePolicy::WriteThrough { threshold: 1 });
    }
    (device, DecodeCache::new(builder.build().unwrap()))
}

fn key(room: u64) -> RoomKey {
    RoomKey { room, epoch: 1 }
}

fn tokens(n: u32, salt: u32) -> Vec<u32> {
    (0..n).map(|i| i * 7 + salt).collect()
}

fn shape() -> ModelShape {
    ModelShape { model: 1, heads_total: 2, heads_here: 2, first_layer: 0, window_tokens: 0 }
}

fn want(full: u32) -> Want {
    Want { full, ..Want::default() }
}

/// Grants, as a receiver would, and commits all of it.
fn arrive(c: &mut DecodeCache, k: RoomKey, t: &[u32]) -> Prefix {
    let prefix = c.open(k, NamespaceId::DEFAULT, t).unwrap();
    let n = (t.len() as u32).div_ceil(4) - prefix.pages;
    let mut granted = c.reserve(k, &want(n)).unwrap();
    let all = granted.commit(0..n as usize).unwrap();
    c.commit(k, all);
    prefix
}

fn free(c: &DecodeCache) -> u32 {
    c.cache().page_counts(Tier::Device).free_pages
}

/// A draft that only the decode side has: nobody sends its K and V, so its plane holds what lay there before. That shows
/// nowhere but in how often the draft guesses right, so whoever asks is told, also after the pages went to the host and back.
#[test]
fn what_comes_without_the_draft_is_known_to_lack_it() {
    let draft = Plane::new(PlaneKind::Draft, 1, 2, 8);
    let g = Arc::new(Geometry::builder(4).plane(Plane::target(2, 16)).plane(draft).build().unwrap());
    let device = SoftDevice::inline(g.clone(), Capacities::full(Capacity::Pages(PAGES))).unwrap();
    let cache = PrefixCache::builder(g).device(device).host_pages(Capacity::Pages(16));
    let cache = cache.write_policy(WritePolicy::WriteThrough { threshold: 1 }).build().unwrap();
    let mut c = DecodeCache::new(cache).unsent(PlaneSet::one(PlaneId(1)));
    arrive(&mut c, key(1), &tokens(16, 0));
    c.finish(key(1), Fence::SETTLED).unwrap();
    settle(&mut c);
    let missing = |c: &mut DecodeCache, t: &[u32]| {
        let mut request = c.cache_mut().request(NamespaceId::DEFAULT);
        let found = c.cache_mut().match_prefix(&mut request, t).unwrap();
        if found.host_tokens > 0 {
            c.cache_mut().load_back(&mut request).unwrap();
            settle(c);
        }
        let missing = c.cache().missing_planes(&request).unwrap();
        (
            found.device_tokens,
            found.host_tokens,
            missing.iter().map(|m| (m.kind, m.pages)).collect::<Vec<_>>(),
        )
    };
    assert_eq!(missing(&mut c, &tokens(16, 0)), (16, 0, vec![(PlaneKind::Draft, 4)]));
    settle(&mut c);
    // What is computed here takes the place of what was sent, and lacks nothing.
    let mut own = c.cache_mut().request(NamespaceId::DEFAULT);
    assert_eq!(c.cache_mut().alloc(&mut own, PAGES).unwrap(), Alloc::Granted);
    c.cache_mut().finish(own, &tokens(32, 500), Fence::SETTLED).unwrap();
    settle(&mut c);
    assert_eq!(missing(&mut c, &tokens(32, 500)), (32, 0, vec![]));
    settle(&mut c);
    assert_eq!(missing(&mut c, &tokens(16, 0)), (0, 16, vec![(PlaneKind::Draft, 4)]));
}

#[test]
fn what_arrived_shortens_the_next_room() {
    let (_d, mut c) = cache(0);
    assert_eq!(arrive(&mut c, key(1), &tokens(14, 0)), Prefix { pages: 0, restoring: false });
    assert_eq!(c.pages(key(1)).len(), 4);
    let published = c.finish(key(1), Fence::SETTLED).unwrap().unwrap();
    assert_eq!((published.published_tokens, c.rooms(), free(&c)), (12, 0, 5));
    assert_eq!(arrive(&mut c, key(2), &tokens(20, 0)), Prefix { pages: 3, restoring: false });
    c.finish(key(2), Fence::SETTLED).unwrap();
    assert!(c.cache().sanity().is_empty());
}

/// Granted pages are nobody else's, however much they are wanted, and come back through the receiver only.
#[test]
fn granted_pages_leave_by_a_proof() {
    let (_d, mut c) = cache(0);
    let l = layer_first_layout(c.cache().geometry(), |_| PAGES, shape()).unwrap();
    let topo = Topology::single(2);
    let rank = Rank::default();
    let config = ReceiverConfig::default();
    let mut r = Receiver::new(Incarnation(1), config, 1, topo, rank, l, Vec::new()).unwrap();
    let t = tokens(24, 0);
    let spec = RecvSpec { prompt: Prompt { tokens: 24, digest: 1 }, contacts: vec![PeerId(0)] };
    r.open(Time(1), key(1), spec).unwrap();
    c.open(key(1), NamespaceId::DEFAULT, &t).unwrap();
    let granted = c.reserve(key(1), &r.want(24, 0)).unwrap();
    assert!(matches!(c.reserve(key(1), &want(1)), Err(ReserveRefused::NoPages)));
    r.grant(Time(2), key(1), granted, 0, false).unwrap();
    let mut other = c.cache_mut().request(NamespaceId::DEFAULT);
    assert!(matches!(c.cache_mut().alloc(&mut other, 3), Ok(Alloc::Refused { short_pages: 1, .. })));
    assert!(!c.give_up(key(1)));
    // Opening it again must not drop the request that the pages belong to.
    c.open(key(1), NamespaceId::DEFAULT, &t).unwrap();
    assert_eq!(free(&c), 2);
    r.abort(Time(3), key(1)).unwrap();
    while let Some(e) = r.poll_event() {
        if let Event::Released { key, pages } = e {
            c.release(key, pages);
        }
    }
    assert_eq!((c.rooms(), free(&c)), (0, PAGES));
    assert_eq!(c.cache_mut().alloc(&mut other, 3).unwrap(), Alloc::Granted);
    drop(other);
    c.cache_mut().tick(Time(4)).unwrap();
    assert_eq!(free(&c), PAGES);
}

/// Puts a prompt on the host and pushes it off the device.
fn demoted(c: &mut DecodeCache) {
    arrive(c, key(1), &tokens(16, 0));
    c.finish(key(1), Fence::SETTLED).unwrap();
    settle(c);
    arrive(c, key(2), &tokens(32, 1000));
    c.finish(key(2), Fence::SETTLED).unwrap();
    settle(c);
}

fn settle(c: &mut DecodeCache) {
    for i in 0..64 {
        c.cache_mut().tick(Time::from_millis(i)).unwrap();
    }
}

#[test]
fn a_prefix_on_the_host_is_restored_and_not_sent() {
    let (_d, mut c) = cache(32);
    demoted(&mut c);
    let prefix = arrive(&mut c, key(3), &tokens(20, 0));
    assert_eq!(prefix, Prefix { pages: 4, restoring: true });
    settle(&mut c);
    assert_eq!(c.restore(key(3)).unwrap(), Restore::Ready);
    assert_eq!(c.pages(key(3)).len(), 5);
    assert!(c.finish(key(3), Fence::SETTLED).unwrap().is_some());
    assert!(c.cache().sanity().is_empty());
}

/// The restore breaks: the gap gets pages of its own, in their place in the table, and the room is published like any
/// other: the next one finds all of it on the device.
#[test]
fn a_broken_restore_is_topped_up_and_published() {
    let (d, mut c) = cache(32);
    demoted(&mut c);
    d.inject(SoftFault { skip_jobs: 0, after_units: 1, fault: CopyFault { code: 5, quiescent: true } });
    let t = tokens(20, 0);
    let prefix = c.open(key(3), NamespaceId::DEFAULT, &t).unwrap();
    assert_eq!(prefix, Prefix { pages: 4, restoring: true });
    let mut granted = c.reserve(key(3), &want(1)).unwrap();
    assert!(matches!(c.reserve_gap(key(3), &want(4)), Err(ReserveRefused::NoPages)));
    settle(&mut c);
    let Restore::Failed { from } = c.restore(key(3)).unwrap() else { panic!("the copy was to fail") };
    assert_eq!(from, 0);
    assert!(matches!(c.reserve_gap(key(3), &want(3)), Err(ReserveRefused::NoPages)));
    let gap = c.reserve_gap(key(3), &want(4)).unwrap();
    assert!(matches!(c.reserve_gap(key(3), &want(4)), Err(ReserveRefused::NoPages)));
    assert_eq!(c.restore(key(3)).unwrap(), Restore::Ready);
    let table = c.pages(key(3));
    let own: Vec<u32> = gap.destination().full.iter().chain(&granted.destination().full).copied().collect();
    assert_eq!(numbers(&table), own);
    let mut distinct = own.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), 5);
    // The receiver would put the gap in front of the grant; here its pages end with it.
    let all = granted.commit(0..1).unwrap();
    c.commit(key(3), all);
    assert_eq!(numbers(&c.pages(key(3))), own);
    assert_eq!(c.finish(key(3), Fence::SETTLED).unwrap().unwrap().published_tokens, 20);
    drop(gap);
    settle(&mut c);
    let counts = c.cache().page_counts(Tier::Device);
    assert_eq!((counts.request_pages, counts.in_flight_pages, counts.leaked_pages), (0, 0, 0));
    assert!(c.cache().sanity().is_empty());
    let again = c.open(key(4), NamespaceId::DEFAULT, &t).unwrap();
    assert_eq!((again, numbers(&c.pages(key(4)))), (Prefix { pages: 5, restoring: false }, own));
    assert!(c.give_up(key(4)));
    c.cache_mut().close(Duration::from_secs(1));
}

/// A room that was to be topped up and fails instead gives back the gap and the grant.
#[test]
fn a_room_that_fails_with_its_gap_out_gives_everything_back() {
    let (d, mut c) = cache(32);
    demoted(&mut c);
    d.inject(SoftFault { skip_jobs: 0, after_units: 1, fault: CopyFault { code: 5, quiescent: true } });
    let (topo, rank) = (Topology::single(2), Rank::default());
    let l = layer_first_layout(c.cache().geometry(), |_| PAGES, shape()).unwrap();
    let mut r =
        Receiver::new(Incarnation(1), ReceiverConfig::default(), 1, topo, rank, l, Vec::new()).unwrap();
    let t = tokens(20, 0);
    let spec = RecvSpec { prompt: Prompt { tokens: 20, digest: 1 }, contacts: vec![PeerId(0)] };
    r.open(Time(1), key(3), spec).unwrap();
    let prefix = c.open(key(3), NamespaceId::DEFAULT, &t).unwrap();
    let granted = c.reserve(key(3), &r.want(20, prefix.pages)).unwrap();
    r.grant(Time(2), key(3), granted, prefix.pages, true).unwrap();
    settle(&mut c);
    let Restore::Failed { from } = c.restore(key(3)).unwrap() else { panic!("the copy was to fail") };
    let gap = c.reserve_gap(key(3), &r.want_topup(key(3), from).unwrap()).unwrap();
    r.handle_restore_failed(Time(3), key(3), from, Some(gap)).unwrap();
    r.abort(Time(4), key(3)).unwrap();
    while let Some(e) = r.poll_event() {
        if let Event::Released { key, pages } = e {
            c.release(key, pages);
        }
    }
    settle(&mut c);
    let counts = c.cache().page_counts(Tier::Device);
    assert_eq!((c.rooms(), counts.request_pages, counts.leaked_pages), (0, 0, 0));
    assert!(c.cache().sanity().is_empty());
}

/// A cache of a model with sliding windows of two pages and a recurrent state.
fn hybrid() -> (SoftDevice, DecodeCache) {
    let window = Plane::target(1, 16).in_pool(PoolKind::Window).on_model_layers([1]);
    let state = Plane::state(1, 64).on_model_layers([2]);
    let target = Plane::target(1, 16).on_model_layers([0]);
    let g = Arc::new(Geometry::builder(4).plane(target).plane(window).plane(state).build().unwrap());
    let pages = Capacity::Pages(PAGES);
    let of = Capacities { full: pages, window: pages, state: Capacity::Pages(4) };
    let device = SoftDevice::inline(g.clone(), of).unwrap();
    let host = Capacity::Pages(16);
    let cache = PrefixCache::builder(g)
        .device(device.clone())
        .window(WindowConfig { span_pages: 2, device: Capacity::Unlimited, host })
        .state(StateConfig { device: Capacity::Unlimited, host })
        .host_pages(host)
        .write_policy(WritePolicy::WriteThrough { threshold: 1 });
    (device, DecodeCache::new(cache.build().unwrap()))
}

fn hybrid_want(full: u32, window: u32) -> Want {
    Want { full, window, state: 1, ring: 0 }
}

/// Grants and commits a prompt of `pages` whole pages, of which none is there.
fn arrive_hybrid(c: &mut DecodeCache, k: RoomKey, pages: u32, salt: u32) -> Destination {
    let prefix = c.open(k, NamespaceId::DEFAULT, &tokens(pages * 4, salt)).unwrap();
    assert_eq!(prefix.pages, 0);
    let mut granted = c.reserve(k, &hybrid_want(pages, 2)).unwrap();
    let dest = granted.destination().clone();
    let all = granted.commit(0..pages as usize).unwrap();
    c.commit(k, all);
    dest
}

fn nothing_is_lost(c: &mut DecodeCache) {
    settle(c);
    for pool in [TreeComponent::Window, TreeComponent::State] {
        let n = c.cache().core().component_counts(pool, Tier::Device);
        assert_eq!((n.request_pages, n.in_flight_pages, n.leaked_pages), (0, 0, 0), "{pool:?}");
    }
    let n = c.cache().page_counts(Tier::Device);
    assert_eq!((n.request_pages, n.in_flight_pages, n.leaked_pages), (0, 0, 0));
    assert!(c.cache().sanity().is_empty());
}

/// What came along is published with its pages: the end of the window and the state, and no window page that did not come.
#[test]
fn the_window_and_the_state_of_a_room_are_published() {
    let (_d, mut c) = hybrid();
    let shape = ModelShape { window_tokens: 8, ..shape() };
    let l = layer_first_layout(c.cache().geometry(), |_| PAGES, shape).unwrap();
    let topo = Topology::single(3);
    assert_eq!(l.validate(&topo, Rank::default()), Ok(()));
    let r = Receiver::new(Incarnation(1), ReceiverConfig::default(), 1, topo, Rank::default(), l, Vec::new());
    assert_eq!(r.unwrap().want(20, 0), hybrid_want(5, 2));
    let dest = arrive_hybrid(&mut c, key(1), 5, 0);
    assert_eq!((dest.full.len(), dest.window.len(), dest.state.len()), (5, 2, 1));
    let parts = c.components(key(1)).unwrap();
    assert_eq!((parts.window_from, numbers(&parts.window)), (3, dest.window));
    assert_eq!(parts.state.map(|s| s.0), Some(dest.state[0]));
    assert_eq!(c.finish(key(1), Fence::SETTLED).unwrap().unwrap().published_tokens, 20);
    let cached = |c: &DecodeCache, pool| c.cache().core().component_counts(pool, Tier::Device).cached_pages;
    assert_eq!((cached(&c, TreeComponent::Window), cached(&c, TreeComponent::State)), (2, 1));
    // All of it is a prefix of a longer prompt, but not its beginning, where the window is not.
    assert_eq!(c.open(key(2), NamespaceId::DEFAULT, &tokens(24, 0)).unwrap().pages, 5);
    assert_eq!(c.open(key(3), NamespaceId::DEFAULT, &tokens(12, 0)).unwrap().pages, 0);
    assert!(c.give_up(key(2)) && c.give_up(key(3)));
    nothing_is_lost(&mut c);
}

/// The restore of a prompt with window and state breaks and is topped up: what came in two parts is published as one.
#[test]
fn a_topped_up_room_with_window_and_state_is_published() {
    let (d, mut c) = hybrid();
    arrive_hybrid(&mut c, key(1), 4, 0);
    c.finish(key(1), Fence::SETTLED).unwrap();
    settle(&mut c);
    arrive_hybrid(&mut c, key(2), 8, 1000);
    c.finish(key(2), Fence::SETTLED).unwrap();
    settle(&mut c);
    d.inject(SoftFault { skip_jobs: 0, after_units: 1, fault: CopyFault { code: 5, quiescent: true } });
    let t = tokens(20, 0);
    let prefix = c.open(key(3), NamespaceId::DEFAULT, &t).unwrap();
    assert_eq!(prefix, Prefix { pages: 4, restoring: true });
    let mut granted = c.reserve(key(3), &hybrid_want(1, 1)).unwrap();
    settle(&mut c);
    assert_eq!(c.restore(key(3)).unwrap(), Restore::Failed { from: 0 });
    let gap = c.reserve_gap(key(3), &Want { full: 4, window: 1, state: 0, ring: 0 }).unwrap();
    let part = |list: fn(&Destination) -> &Vec<u32>| {
        [list(gap.destination()).clone(), list(granted.destination()).clone()].concat()
    };
    let (full, window, state) = (part(|d| &d.full), part(|d| &d.window), part(|d| &d.state));
    assert_eq!((full.len(), window.len(), state.len()), (5, 2, 1));
    let all = granted.commit(0..1).unwrap();
    c.commit(key(3), all);
    let parts = c.components(key(3)).unwrap();
    assert_eq!((parts.window_from, numbers(&parts.window)), (3, window));
    assert_eq!(parts.state.map(|s| s.0), Some(state[0]));
    assert_eq!(c.finish(key(3), Fence::SETTLED).unwrap().unwrap().published_tokens, 20);
    drop(gap);
    settle(&mut c);
    assert_eq!(c.open(key(4), NamespaceId::DEFAULT, &t).unwrap(), Prefix { pages: 5, restoring: false });
    assert_eq!(numbers(&c.pages(key(4))), full);
    assert!(c.give_up(key(4)));
    nothing_is_lost(&mut c);
    c.cache_mut().close(Duration::from_secs(1));
}

/// A layout with what the cache has no pool for, or without what it has: refused by name, and nothing is held.
#[test]
fn components_that_only_one_side_has_are_refused() {
    for (mut c, wants) in [
        (
            cache(0).1,
            [Want { window: 1, ..want(1) }, Want { state: 1, ..want(1) }, Want { ring: 1, ..want(1) }],
        ),
        (hybrid().1, [want(1), Want { window: 1, ..want(1) }, Want { state: 1, ..want(1) }]),
    ] {
        c.open(key(1), NamespaceId::DEFAULT, &tokens(4, 0)).unwrap();
        for w in wants {
            assert!(matches!(c.reserve(key(1), &w), Err(ReserveRefused::NoSuchPool)), "{w:?}");
        }
        assert!(c.give_up(key(1)));
        nothing_is_lost(&mut c);
    }
}

#[test]
fn a_layout_has_every_layer_and_part_once_inside_its_region() {
    let g = Geometry::builder(4)
        .plane(Plane::target(3, 16))
        .plane(Plane::draft(1, 16))
        .plane(Plane::latent(3, 8))
        .build()
        .unwrap();
    let shape = ModelShape { heads_total: 4, heads_here: 4, ..shape() };
    let l = layer_first_layout(&g, |_| 10, shape).unwrap();
    assert_eq!(l.validate(&Topology::single(3), Rank::default()), Ok(()));
    assert_eq!((l.entries.len(), l.regions.len()), (3 * 2 + 2 + 3, 3));
    let device = SoftDevice::inline(Arc::new(g.clone()), Capacities::full(Capacity::Pages(10))).unwrap();
    let lens: Vec<u64> = device.memory().regions().map(|(_, r)| r.len() as u64).collect();
    assert_eq!(l.regions, lens);
    // What the layout calls V of layer 2, page 7, is where the device keeps it.
    let want: Vec<u8> = (0..128).collect();
    device.write_rows(crate::pool::PlaneId(0), PageId(7), 2, 0, &want).unwrap();
    let v = l
        .entries
        .iter()
        .find(|e| (e.id.layer, e.id.role, e.id.group) == (2, Role::V, Group::Target))
        .unwrap();
    let at = (v.base + 7 * v.unit_bytes) as usize;
    let mut got = vec![0; 64];
    let memory = crate::backend::transport::Memory::of(device.memory());
    memory.peek(0, at as u64, &mut got);
    assert_eq!(got, want[64..]);
    let odd = ModelShape { heads_here: 3, ..shape };
    assert_eq!(layer_first_layout(&g, |_| 10, odd), Err(Incompatible::HeadSplit));
    // Only the model knows how a state is cut.
    let state = Geometry::builder(4).plane(Plane::target(1, 16)).plane(Plane::state(1, 8)).build().unwrap();
    let part = ModelShape { heads_here: 2, ..shape };
    assert_eq!(layer_first_layout(&state, |_| 4, part), Err(Incompatible::EntryShape));
}
