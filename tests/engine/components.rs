//! Windows and states through every tier of the engine: whatever a request is handed carries the bytes computed for it.
//!
//! `SAPWOOD_SEED=17 cargo test --test engine` starts the random histories at 17.

use std::sync::Arc;

use sapwood::backend::store::fault::{Fault, Faulty, When};
use sapwood::backend::store::mem::MemStore;
use sapwood::backend::store::stats::OpKind;
use sapwood::backend::store::{Outcome, Store};
use sapwood::engine::{BuildError, MissingPlane};
use sapwood::pool::{PlaneKind, PoolKind};
use sapwood::tiers::WritePolicy;

use crate::kit::{Choices, Engine, PAGE_TOKENS, Shape, Sizes, builder, prompt};

fn mem() -> Arc<Faulty<MemStore>> {
    Arc::new(Faulty::new(MemStore::new(16 << 20)))
}

fn seed() -> u64 {
    let seed = std::env::var("SAPWOOD_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
    println!("SAPWOOD_SEED={seed}");
    seed
}

/// Prompts that share prefixes, in small pools.
fn history(engine: &mut Engine, choices: &mut Choices, requests: usize) -> [u64; 2] {
    let mut tokens = [0; 2];
    for _ in 0..requests {
        let mut p = prompt(choices.below(5) as u32, 2 + choices.below(6) as usize);
        if choices.below(3) == 0 {
            let at = choices.below(p.len() as u64) as usize;
            p[at] = 7_000_000 + choices.below(2) as u32;
        }
        let odd = choices.below(PAGE_TOKENS as u64) as usize;
        p.truncate(p.len() - odd);
        let found = engine.run(&p);
        tokens[0] += found.device_tokens;
        tokens[1] += found.host_tokens;
        if choices.below(8) == 0 {
            engine.settle();
        }
    }
    engine.settle();
    tokens
}

/// Each tier is used, and after a restart the store alone.
#[test]
fn every_pool_comes_back_from_every_tier() {
    let seed = seed();
    let policies = [
        (WritePolicy::WriteThrough { threshold: 1 }, false),
        (WritePolicy::WriteThrough { threshold: 1 }, true),
        (WritePolicy::WriteBack, false),
    ];
    for (shape, draft) in Shape::EACH.into_iter().flat_map(|s| [(s, false), (s, true)]) {
        for (write, exclusive) in policies {
            let case = (shape, draft, write, exclusive);
            let shape = if draft { shape.with_draft() } else { shape };
            let store = mem();
            let engine = |store: &Arc<Faulty<MemStore>>| {
                let store = Arc::clone(store) as Arc<dyn Store>;
                let (b, device) = builder(shape, Sizes::TIGHT, (0, 1), Some(store));
                let cache = b.write_policy(write).exclusive(exclusive).build().unwrap();
                Engine::of(cache, device, 0)
            };
            let mut choices = Choices(seed);
            let mut before = engine(&store);
            let [device, host] = history(&mut before, &mut choices, 80);
            assert!(device > 0 && host > 0, "{case:?}: {device} {host}");
            let moved = before.cache.bytes_moved();
            assert!(moved.d2h > 0 && moved.h2d > 0 && moved.store_put > 0, "{case:?}: {moved:?}");
            drop(before);
            let mut after = engine(&store);
            let [_, host] = history(&mut after, &mut choices, 40);
            let report = after.cache.store_report();
            // Write-back stores little: only what left the device.
            let enough =
                write == WritePolicy::WriteBack || host > 0 && report.planes.iter().all(|p| p.got_pages > 0);
            assert!(enough, "{case:?}: {report:?}");
            assert!(report.planes.iter().all(|p| p.not_got_pages == 0), "{case:?}: {report:?}");
        }
    }
}

/// All that a restarted engine finds comes from the store: the whole prompt but its last page, with its window and the state
/// at that place.
#[test]
fn a_restart_finds_windows_and_states_in_the_store() {
    for shape in Shape::EACH.map(Shape::with_draft) {
        let store = mem();
        let new = || Engine::new(shape, Sizes::AMPLE, Some(Arc::clone(&store) as Arc<dyn Store>));
        let mut before = new();
        // States lie where a checkpoint ended: every third page.
        before.run(&prompt(1, 9));
        before.settle();
        drop(before);
        let mut after = new();
        let found = after.run(&prompt(1, 9));
        // Of a window the store keeps what a request at the end of a node needs.
        let want = if shape.state || shape.window { 6 } else { 8 };
        assert_eq!((found.pages, found.missing.as_slice()), (want, [].as_slice()), "{shape:?}");
        after.settle();
    }
}

/// The store loses a plane of the draft in every pool. The hit stays as long as it was; what is missing is counted by plane and
/// pool, and goes to host and store only as missing.
#[test]
fn a_draft_that_the_store_lost_shortens_no_hit_in_any_pool() {
    let store = mem();
    let shape = Shape::ALL.with_draft();
    let new = || Engine::new(shape, Sizes::AMPLE, Some(Arc::clone(&store) as Arc<dyn Store>));
    let mut before = new();
    before.run(&prompt(1, 9));
    before.settle();
    drop(before);
    let objects = store.inner().stats().objects;
    // Of the reads, those of the draft fail: told by their size.
    let drafts = remove_drafts(&store, &prompt(1, 9));
    assert!(drafts > 6, "{drafts}");
    let mut after = new();
    let found = after.run(&prompt(1, 9));
    let lacks = |kind, pool, pages| MissingPlane { kind, pool, pages };
    let mut want = vec![
        lacks(PlaneKind::Draft, PoolKind::Full, 6),
        lacks(PlaneKind::Draft, PoolKind::Window, 2),
        lacks(PlaneKind::Draft, PoolKind::State, 1),
    ];
    want.sort_by_key(|m| m.pool);
    let mut missing = found.missing.clone();
    missing.sort_by_key(|m| m.pool);
    assert_eq!((found.pages, missing), (6, want));
    // Through the host and back: pages of the device are taken by others.
    after.settle();
    for n in 10..18 {
        after.run(&prompt(n, 9));
    }
    after.settle();
    let again = after.run(&prompt(1, 7));
    assert!(again.host_tokens > 0 && !again.missing.is_empty(), "{again:?}");
    after.settle();
    assert!(store.inner().stats().objects > objects, "others were stored");
    assert_eq!(remove_drafts(&store, &prompt(1, 6)), 0, "nothing was written for what is missing");
}

fn remove_drafts(store: &Faulty<MemStore>, tokens: &[u32]) -> usize {
    use sapwood::backend::identity::NamespaceDigest;
    use sapwood::backend::store::Call;
    use sapwood::engine::{DraftPlan, ModelIdentity};
    use sapwood::key::{Key, hash_pages};
    let geometry = Shape::ALL.with_draft().geometry();
    assert!(matches!(DraftPlan::of(&geometry), DraftPlan::Sidecar { shard: None, .. }));
    let mut hashes = Vec::new();
    hash_pages(Key::new(sapwood::base::NamespaceId::DEFAULT, tokens), PAGE_TOKENS as u32, None, &mut hashes);
    let mut keys = Vec::new();
    for plane in geometry.planes().iter().filter(|p| p.kind() == PlaneKind::Draft) {
        let identity = ModelIdentity::whole("hybrid", "1");
        let space = identity.descriptor(&geometry, plane).space(NamespaceDigest::DEFAULT).unwrap();
        keys.extend(hashes.iter().map(|h| space.key(&h.0)));
    }
    store.inner().remove(&keys, &Call::unbounded()).iter().filter(|o| o.is_ok()).count()
}

/// A store that loses, fails and damages objects of every pool: less is found, and nothing wrong.
#[test]
fn a_bad_store_costs_hits_and_nothing_else() {
    let seed = seed();
    for shape in [Shape::ALL, Shape::ALL.with_draft()] {
        for fault in
            [Fault::Fail(Outcome::Missing), Fault::Fail(Outcome::Corrupt), Fault::Fail(Outcome::Timeout)]
        {
            let store = mem();
            for every in [0, 5, 3] {
                store.heal();
                store.add(OpKind::Get, When::Every(every), fault);
                store.add(OpKind::Put, When::Every(every * 2), Fault::Fail(Outcome::NoSpace));
                let mut engine = Engine::new(shape, Sizes::TIGHT, Some(Arc::clone(&store) as Arc<dyn Store>));
                history(&mut engine, &mut Choices(seed + every), 40);
            }
            assert!(store.struck() > 0);
        }
    }
}

/// Planes of a pool and the configuration of the pool go together, and a device that is too small says which pool.
#[test]
fn pools_that_do_not_go_together_are_refused_by_name() {
    let window = Shape { window: true, ..Shape::FULL };
    let state = Shape { state: true, ..Shape::FULL };
    for (shape, pool) in [(window, PoolKind::Window), (state, PoolKind::State)] {
        let (b, _) = builder(shape, Sizes::AMPLE, (0, 1), None);
        assert!(b.build().is_ok());
        let device = sapwood::backend::device::SoftDevice::threaded(
            shape.geometry(),
            sapwood::pool::Capacities::full(sapwood::pool::Capacity::Pages(8)),
        );
        let b = sapwood::engine::PrefixCache::builder(shape.geometry()).device(device.unwrap());
        match b.build() {
            Err(BuildError::Component { pool: named }) => assert_eq!(named, pool),
            other => panic!("{other:?}"),
        }
    }
    let (b, _) = builder(Shape::FULL, Sizes::AMPLE, (0, 1), None);
    let pages = sapwood::pool::Capacity::Pages;
    let b = b.window(sapwood::tiers::WindowConfig { span_pages: 2, device: pages(4), host: pages(4) });
    assert!(matches!(b.build(), Err(BuildError::Component { pool: PoolKind::Window })));
    let (b, _) = builder(window, Sizes::AMPLE, (0, 1), None);
    let b = b.window(sapwood::tiers::WindowConfig { span_pages: 2, device: pages(65), host: pages(4) });
    match b.build() {
        Err(BuildError::DevicePages { pool: PoolKind::Window, asked: 65, present: 64 }) => {}
        other => panic!("{other:?}"),
    }
}
