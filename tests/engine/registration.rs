//! The registration of every plane of every pool with a store, as the engine carries it out: each of them refused in turn,
//! under both policies, on each of two ranks. The table is that of `docs/INVARIANTS.md`.

use std::sync::{Arc, Barrier, Mutex};

use sapwood::backend::store::Store;
use sapwood::backend::store::fault::Faulty;
use sapwood::backend::store::mem::MemStore;
use sapwood::engine::{BuildError, RankVotes, RegistrationError};
use sapwood::pool::{PlaneKind, PoolKind};
use sapwood::tiers::registration::{Cause, Stage, Vote};
use sapwood::tiers::{RegistrationPolicy, RegistrationState};

use crate::kit::{Engine, Shape, Sizes, builder, prompt};

const RANKS: u32 = 2;

/// Votes of ranks in threads.
#[derive(Clone)]
struct Threads {
    votes: Arc<Mutex<Option<Vote>>>,
    barrier: Arc<Barrier>,
}

impl RankVotes for Threads {
    fn exchange(&mut self, vote: Vote) -> Option<Vote> {
        {
            let mut all = self.votes.lock().unwrap();
            *all = Some(all.map_or(vote, |v| v.and(vote)));
        }
        self.barrier.wait();
        let all = *self.votes.lock().unwrap();
        self.barrier.wait();
        all
    }
}

type Names = Vec<(PlaneKind, PoolKind)>;

/// The planes in the order in which they are registered: those of the draft last.
fn planes(shape: Shape) -> Names {
    let mut names: Names = shape.geometry().planes().iter().map(|p| (p.kind(), p.pool())).collect();
    names.sort_by_key(|(kind, _)| kind.is_draft());
    names
}

/// Registers on two ranks while `refused` of rank `at` is refused, and looks at the end.
fn attempt(shape: Shape, policy: RegistrationPolicy, at: u32, refused: Option<usize>) {
    let votes = Threads { votes: Arc::default(), barrier: Arc::new(Barrier::new(RANKS as usize)) };
    let names = planes(shape);
    std::thread::scope(|scope| {
        for rank in 0..RANKS {
            let (votes, names) = (votes.clone(), names.clone());
            scope.spawn(move || {
                let store = Arc::new(Faulty::new(MemStore::new(1 << 20)));
                if let Some(nth) = refused.filter(|_| rank == at) {
                    store.refuse_registration(nth as u64 + 1, -7);
                }
                let case = (shape, policy, at, refused.map(|n| names[n]), rank);
                let shared = Arc::clone(&store) as Arc<dyn Store>;
                let (b, device) = builder(shape, Sizes::AMPLE, (rank, RANKS), Some(shared));
                let built = b.registration(policy).rank_votes(votes).build();
                let cause = if rank == at { Cause::Refused { code: -7 } } else { Cause::OtherRank };
                let required = names.iter().filter(|(kind, _)| !kind.is_draft()).count();
                let fallback = policy == RegistrationPolicy::AllowDraftStoreFallback;
                match (refused, built) {
                    (Some(nth), Ok(cache)) if fallback && names[nth].0.is_draft() => {
                        let report = cache.store_report();
                        assert_eq!(report.state, Some(RegistrationState::FallbackHost), "{case:?}");
                        assert_eq!(report.failure.as_ref().map(|f| f.cause), Some(cause), "{case:?}");
                        assert_eq!(report.not_stored, names[required..], "{case:?}");
                        assert_eq!((report.draft_store_disabled(), report.planes.len()), (1, required));
                        assert_eq!(store.registrations(), required, "{case:?}");
                        falls_back_to_the_host(Engine::of(cache, device, rank));
                    }
                    (Some(nth), Err(BuildError::Store(RegistrationError::Failed { plane, failure, .. }))) => {
                        assert!(!fallback || !names[nth].0.is_draft(), "{case:?}");
                        assert_eq!(plane, (rank == at).then_some(names[nth]), "{case:?}");
                        let stage = if rank == at { Stage::Register } else { Stage::Agree };
                        assert_eq!((failure.stage, failure.cause), (stage, cause), "{case:?}");
                        assert_eq!(store.registrations(), 0, "{case:?}");
                    }
                    (None, Ok(cache)) => {
                        let report = cache.store_report();
                        assert_eq!(report.state, Some(RegistrationState::Committed));
                        assert_eq!((report.draft_store_disabled(), report.planes.len()), (0, names.len()));
                        assert_eq!(store.registrations(), names.len());
                    }
                    (_, built) => panic!("{case:?}: {:?}", built.map(|_| ())),
                }
                assert_eq!(store.registrations(), 0, "nothing is left: {case:?}");
            });
        }
    });
}

/// The draft's planes are not in the store: what comes from there lacks them, and what comes from the host does not.
fn falls_back_to_the_host(mut engine: Engine) {
    engine.run(&prompt(1, 6));
    engine.settle();
    let found = engine.run(&prompt(1, 6));
    assert_eq!(found.missing, [], "device and host have the draft");
    engine.settle();
}

#[test]
fn every_plane_refused_on_every_rank_ends_as_the_table_says() {
    let policies = [RegistrationPolicy::FailClosed, RegistrationPolicy::AllowDraftStoreFallback];
    let mut cases = 0;
    for shape in Shape::EACH.map(Shape::with_draft) {
        for (policy, at) in policies.into_iter().flat_map(|p| (0..RANKS).map(move |at| (p, at))) {
            for refused in std::iter::once(None).chain((0..planes(shape).len()).map(Some)) {
                attempt(shape, policy, at, refused);
                cases += 1;
            }
        }
    }
    // 3, 6, 6 and 9 planes, and none refused.
    assert_eq!(cases, (4 + 7 + 7 + 10) * 4);
}

/// With windows that only the draft has: the store may be without them, and the target's hits stay.
#[test]
fn a_pool_of_the_draft_alone_may_be_missing_whole() {
    use sapwood::backend::device::SoftDevice;
    use sapwood::engine::PrefixCache;
    use sapwood::pool::{Capacities, Capacity, Geometry, Plane};
    use sapwood::tiers::{PrefetchConfig, PrefetchPolicy, WindowConfig, WritePolicy};
    let pages = Capacity::Pages(64);
    let geometry = Geometry::builder(4)
        .plane(Plane::target(2, 64))
        .plane(Plane::draft(1, 24).in_pool(PoolKind::Window))
        .build();
    let geometry = Arc::new(geometry.unwrap());
    let store = Arc::new(Faulty::new(MemStore::new(1 << 20)));
    let engine = |policy| {
        let capacities = Capacities { full: pages, window: pages, state: Capacity::Pages(0) };
        let device = SoftDevice::threaded(Arc::clone(&geometry), capacities).unwrap();
        let prefetch = PrefetchConfig {
            policy: PrefetchPolicy::WaitComplete,
            threshold_tokens: 1,
            ..PrefetchConfig::default()
        };
        let cache = PrefixCache::builder(Arc::clone(&geometry))
            .device(device.clone())
            .host_pages(pages)
            .window(WindowConfig { span_pages: 2, device: pages, host: pages })
            .write_policy(WritePolicy::WriteThrough { threshold: 1 })
            .prefetch(prefetch)
            .registration(policy)
            .store(Arc::clone(&store) as Arc<dyn Store>)
            .build();
        Engine::of(cache.unwrap(), device, 0)
    };
    let mut before = engine(RegistrationPolicy::FailClosed);
    before.run(&prompt(1, 9));
    before.settle();
    drop(before);
    for refuse in [false, true] {
        if refuse {
            store.refuse_registration(2, -7);
        }
        let mut after = engine(RegistrationPolicy::AllowDraftStoreFallback);
        assert_eq!(after.cache.store_report().draft_store_disabled(), u64::from(refuse));
        let found = after.run(&prompt(1, 9));
        // Any page is a place to go on from. Of the window at its end, pages 6 and 7, the store keeps the second, which also
        // belongs to the window at the end of the prompt.
        assert_eq!(found.pages, 8, "{found:?}");
        let missing: u32 = found.missing.iter().map(|m| m.pages).sum();
        assert_eq!(missing, if refuse { 2 } else { 1 }, "{found:?}");
        after.settle();
    }
}
