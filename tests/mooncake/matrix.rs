//! The regression matrix of the failure in which a draft pool in the wrong memory stopped every scheduler at its
//! start (sgl#28873): with and without draft, with and without the real client, several ranks, several processes.

use std::process::Command;
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use sapwood::backend::device::SoftDevice;
use sapwood::backend::store::fault::Faulty;
use sapwood::backend::store::group::Grouped;
use sapwood::backend::store::mem::MemStore;
use sapwood::backend::store::mooncake::{MooncakeConfig, MooncakeStore};
use sapwood::backend::store::{Call, Store};
use sapwood::engine::{BuildError, Builder, DraftPlan, PrefixCache, RankVotes, RegistrationError, TierError};
use sapwood::pool::{PlaneKind, PoolKind};
use sapwood::tiers::registration::{Cause, Stage, Vote};
use sapwood::tiers::{RegistrationPolicy, RegistrationState};

use crate::engine::{Engine, Found, builder, geometry, prompt};
use crate::kit::{Left, alone, assert_left, mapped_by, until};
use crate::refusing::Refusing;
use crate::service::Service;

const PAGES: usize = 12;
/// Of a prompt that is all there the last page is computed again: a model needs a token to begin with.
const FOUND: usize = PAGES - 1;
const ALONE: (u32, u32) = (0, 1);
const NOTHING: Left = Left { threads: 0, descriptors: 0, mappings: 0 };

fn mooncake(service: &Service) -> Arc<dyn Store> {
    Arc::new(MooncakeStore::open(MooncakeConfig::at(service.address())).unwrap())
}

fn all() -> Found {
    Found { pages: FOUND, without_draft: 0 }
}

/// Computes two prompts, restarts, and finds both in the store, every byte as computed.
fn survives_a_restart(draft: bool, rank: (u32, u32), store: impl Fn() -> Arc<dyn Store>) {
    let geometry = geometry(draft);
    let mut before = Engine::new(&geometry, rank, Some(store()));
    assert_eq!(before.cache.store_report().state, Some(RegistrationState::Committed));
    for n in 1..3 {
        assert_eq!(before.run(&prompt(n, PAGES)), Found::default());
    }
    drop(before);
    let mut after = Engine::new(&geometry, rank, Some(store()));
    for n in 1..3 {
        assert_eq!(after.run(&prompt(n, PAGES)), all());
    }
    let report = after.cache.store_report();
    assert!(report.planes.iter().all(|p| p.got_pages == 2 * FOUND as u64), "{report:?}");
    assert_eq!(report.draft_store_disabled(), 0);
}

#[test]
fn r0_a_draft_without_a_store() {
    let _alone = alone();
    let mut engine = Engine::new(&geometry(true), ALONE, None);
    assert_eq!(engine.run(&prompt(1, PAGES)), Found::default());
    let on_device = Found { pages: PAGES, without_draft: 0 };
    assert_eq!(engine.run(&prompt(1, PAGES)), on_device);
    assert_eq!(engine.cache.store_report().state, None);
}

#[test]
fn r1_the_target_alone_on_the_real_client() {
    let _alone = alone();
    let Some(service) = Service::start("64 MB") else { return };
    survives_a_restart(false, ALONE, || mooncake(&service));
}

/// Against a stand-in: no registry carries the library. What is shown is our side of its interface.
#[cfg(feature = "mooncake-capi")]
#[test]
fn r2_a_draft_on_the_embedded_library_stand_in() {
    use crate::stand_in;
    let _alone = alone();
    let pool = stand_in::pool();
    survives_a_restart(true, ALONE, || Arc::new(stand_in::open(&pool)));
    // The store's own memory is its first registration, the target the second, the draft the third.
    for (refusing, plane) in [("refuse-2", PlaneKind::Target), ("refuse-3", PlaneKind::Draft)] {
        let store = Arc::new(Refusing::nth(stand_in::open(refusing), 99));
        let (b, _) = builder(&geometry(true), ALONE, Some(Arc::clone(&store) as Arc<dyn Store>));
        let RegistrationError::Failed { plane: failed, failure, .. } = refused(b) else {
            panic!("another error")
        };
        let plane = Some((plane, PoolKind::Full));
        assert_eq!((failed, failure.cause), (plane, Cause::Refused { code: -1 }));
        assert_eq!(store.registered(), 0);
    }
}

#[cfg(feature = "mooncake-capi")]
#[test]
fn a_library_that_is_not_one_is_an_error() {
    use sapwood::backend::store::mooncake::MooncakeError;
    use sapwood::backend::store::mooncake::embedded::{EmbeddedConfig, EmbeddedStore};
    let _alone = alone();
    let open = |library: std::path::PathBuf, pool: &str| {
        EmbeddedStore::open(&EmbeddedConfig::at(library, "127.0.0.1:1", pool)).err()
    };
    let missing = open("/no/such/library.so".into(), "pool");
    assert!(matches!(missing, Some(MooncakeError::Library { .. })), "{missing:?}");
    // A library without the functions: the C library itself.
    let other = open("libm.so.6".into(), "pool");
    assert!(matches!(other, Some(MooncakeError::Library { .. })), "{other:?}");
    let nowhere = open(crate::stand_in::library(), "nowhere");
    assert!(matches!(nowhere, Some(MooncakeError::Setup { code: -1 })), "{nowhere:?}");
}

#[test]
fn r3_a_draft_on_the_real_client() {
    let _alone = alone();
    let Some(service) = Service::start("64 MB") else { return };
    survives_a_restart(true, ALONE, || mooncake(&service));
    let engine = Engine::new(&geometry(true), ALONE, Some(mooncake(&service)));
    assert_eq!(mapped_by(service.client_pid()), 3, "headers, target, draft");
    drop(engine);
    assert_left(NOTHING);
    assert_eq!(mapped_by(service.client_pid()), 0);
}

/// A model with windows and states, and planes of a draft in every pool: nine planes, each a segment of its own.
#[test]
fn r3_every_pool_with_its_draft_on_the_real_client() {
    use crate::pools::{self, Shape, Sizes};
    let _alone = alone();
    let Some(service) = Service::start("64 MB") else { return };
    let shape = Shape::ALL.with_draft();
    let engine = || pools::Engine::new(shape, Sizes::AMPLE, Some(mooncake(&service)));
    let mut before = engine();
    assert_eq!(mapped_by(service.client_pid()), 1 + 9, "headers and planes");
    before.run(&pools::prompt(1, 9));
    before.settle();
    drop(before);
    let mut after = engine();
    let found = after.run(&pools::prompt(1, 9));
    // The last place of which the store has the state as well: every third page.
    assert_eq!((found.pages, found.missing.as_slice()), (6, [].as_slice()));
    after.settle();
    assert!(after.cache.store_report().planes.iter().all(|p| p.got_pages > 0 && p.not_got_pages == 0));
    drop(after);
    assert_left(NOTHING);
    assert_eq!(mapped_by(service.client_pid()), 0);
}

/// The real client dies while an engine stores: requests go on with what device and host have, no page of any pool is lost, and
/// once it is back what is computed then is stored again.
#[test]
fn an_engine_outlives_its_real_client() {
    use crate::pools::{self, Shape, Sizes};
    use sapwood::backend::store::Health;
    let _alone = alone();
    let Some(mut service) = Service::start("64 MB") else { return };
    let shape = Shape::ALL.with_draft();
    let store = mooncake(&service);
    let mut engine = pools::Engine::new(shape, Sizes::TIGHT, Some(Arc::clone(&store)));
    for n in 1..6 {
        // Not settled: writes are under way when it dies.
        engine.run(&pools::prompt(n, 6));
    }
    service.kill_client();
    for n in 1..12 {
        engine.run(&pools::prompt(n, 6));
    }
    engine.settle();
    assert!(engine.cache.store_report().planes.iter().any(|p| p.not_put_pages > 0), "nobody noticed");
    assert!(service.start_client());
    until("the store is back", Duration::from_secs(10), || store.health() == Health::Up);
    // The master places objects with the dead client until it notices.
    let mut last = 20;
    until("it stores again", Duration::from_secs(10), || {
        let failed = |e: &pools::Engine| -> u64 {
            e.cache.store_report().planes.iter().map(|p| p.not_put_pages).sum()
        };
        let before = failed(&engine);
        last += 1;
        engine.run(&pools::prompt(last, 9));
        engine.settle();
        failed(&engine) == before
    });
    drop(engine);
    drop(store);
    let mut after = pools::Engine::new(shape, Sizes::AMPLE, Some(mooncake(&service)));
    let found = after.run(&pools::prompt(last, 9));
    assert_eq!((found.pages, found.missing.as_slice()), (6, [].as_slice()));
    after.settle();
    drop(after);
    assert_left(NOTHING);
}

/// The same with small pages in groups: pages of target and draft keep their names, and nothing is left behind.
#[test]
fn r3_a_draft_on_the_real_client_in_groups() {
    let _alone = alone();
    let Some(service) = Service::start("64 MB") else { return };
    let grouped = || Arc::new(Grouped::with_object_bytes(mooncake(&service), 8 << 10)) as Arc<dyn Store>;
    survives_a_restart(true, ALONE, grouped);
    assert_left(NOTHING);
    assert_eq!(mapped_by(service.client_pid()), 0);
    // Written in groups, read by an engine that does not group: misses, and no wrong byte.
    let mut plain = Engine::new(&geometry(true), ALONE, Some(mooncake(&service)));
    assert_eq!(plain.run(&prompt(1, PAGES)).pages, 0);
}

/// Votes of ranks in threads of one process.
#[derive(Clone)]
struct Threads {
    votes: Arc<Mutex<Option<Vote>>>,
    barrier: Arc<Barrier>,
}

impl Threads {
    fn of(ranks: usize) -> Threads {
        Threads { votes: Arc::default(), barrier: Arc::new(Barrier::new(ranks)) }
    }
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

#[test]
fn r4_two_ranks_with_a_draft_share_no_key_and_no_pointer() {
    let _alone = alone();
    let Some(service) = Service::start("64 MB") else { return };
    let votes = Threads::of(2);
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (service, votes) = (&service, votes.clone());
            scope.spawn(move || {
                let (b, device) = builder(&geometry(true), (rank, 2), Some(mooncake(service)));
                let mut engine = Engine::of(b.rank_votes(votes).build().unwrap(), device, rank);
                assert_eq!(engine.run(&prompt(1, PAGES)), Found::default());
                drop(engine);
                // The stamps hold the rank: bytes of the other one would not pass.
                let mut again = Engine::new(&geometry(true), (rank, 2), Some(mooncake(service)));
                assert_eq!(again.run(&prompt(1, PAGES)), all());
            });
        }
    });
    // Another topology is another name.
    let mut alone = Engine::new(&geometry(true), ALONE, Some(mooncake(&service)));
    assert_eq!(alone.run(&prompt(1, PAGES)).pages, 0);
}

const ROLE: &str = "SAPWOOD_TEST_ROLE";

/// What each process of the next test runs.
#[test]
#[ignore = "run by r5_one_prefill_and_two_decode_processes_with_a_restart, in processes of its own"]
fn r5_process() {
    let role = std::env::var(ROLE).unwrap();
    let (address, want) = role.split_once(' ').unwrap();
    let store = MooncakeStore::open(MooncakeConfig::at(address.parse().unwrap())).unwrap();
    let mut engine = Engine::new(&geometry(true), ALONE, Some(Arc::new(store)));
    for n in 1..4 {
        let found = engine.run(&prompt(n, PAGES));
        assert_eq!(found, if want == "nothing" { Found::default() } else { all() }, "prompt {n}");
    }
    println!("found {want}");
}

fn process(service: &Service, want: &str) -> std::process::Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["matrix::r5_process", "--exact", "--ignored", "--nocapture"])
        .env(ROLE, format!("{} {want}", service.address()))
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap()
}

fn ended_well(child: std::process::Child, want: &str) {
    let out = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success() && text.contains(&format!("found {want}")), "{text}");
}

/// The prefill process computes and stores; two decode processes load it back, together, and again after a
/// restart. What they hand to each other directly is not part of this.
#[test]
fn r5_one_prefill_and_two_decode_processes_with_a_restart() {
    let _alone = alone();
    let Some(service) = Service::start("64 MB") else { return };
    ended_well(process(&service, "nothing"), "nothing");
    for _restart in 0..2 {
        let decoders = [process(&service, "all"), process(&service, "all")];
        for decoder in decoders {
            ended_well(decoder, "all");
        }
    }
    assert_eq!(mapped_by(service.client_pid()), 0);
}

/// A draft pool refused by the store: at the first buffer, at the last of many, by kind of memory.
fn refused(b: Builder) -> RegistrationError {
    match b.build() {
        Err(BuildError::Store(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_refused_draft_closes_or_falls_back_as_configured() {
    let _alone = alone();
    for plane in [0, 1] {
        let store = Arc::new(Refusing::nth(MemStore::new(1 << 20), plane + 1));
        let (b, _) = builder(&geometry(true), ALONE, Some(Arc::clone(&store) as Arc<dyn Store>));
        match refused(b) {
            RegistrationError::Failed { store: "mem", plane: failed, failure, .. } => {
                let kind = [PlaneKind::Target, PlaneKind::Draft][plane];
                assert_eq!(failed, Some((kind, PoolKind::Full)));
                assert_eq!((failure.stage, failure.cause), (Stage::Register, Cause::Refused { code: -1 }));
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(store.registered(), 0, "everything was taken back");
        assert_left(NOTHING);
    }
    let store = Arc::new(Refusing::nth(MemStore::new(1 << 20), 2));
    let mut engine = fallback(Arc::clone(&store) as Arc<dyn Store>);
    assert_eq!(store.registered(), 1);
    assert_eq!(engine.run(&prompt(1, PAGES)), Found::default());
    // The host tier has the draft, the store has not.
    assert_eq!(engine.run(&prompt(1, PAGES)).without_draft, 0);
    drop(engine);
    let mut engine = fallback(Arc::new(Refusing::nth(store.into_inner(), 2)));
    let report = engine.cache.store_report();
    assert_eq!(report.state, Some(RegistrationState::FallbackHost));
    assert_eq!(
        (report.draft_store_disabled(), report.not_stored),
        (1, vec![(PlaneKind::Draft, PoolKind::Full)])
    );
    // A plane that the store does not have is missing from every page that comes from there, and that is said.
    assert_eq!(engine.run(&prompt(1, PAGES)), Found { pages: FOUND, without_draft: FOUND as u32 });
}

fn fallback(store: Arc<dyn Store>) -> Engine {
    let (b, device) = builder(&geometry(true), ALONE, Some(store));
    let cache = b.registration(RegistrationPolicy::AllowDraftStoreFallback).build().unwrap();
    Engine::of(cache, device, 0)
}

/// The same against the real client: it answers -1 to a descriptor that it can not write to.
#[test]
fn a_draft_refused_by_the_real_client_is_taken_back_there() {
    let _alone = alone();
    let Some(service) = Service::start("64 MB") else { return };
    for (policy, mapped) in
        [(RegistrationPolicy::FailClosed, 0), (RegistrationPolicy::AllowDraftStoreFallback, 2)]
    {
        let store = Refusing::read_only_nth(mooncake(&service), 2);
        let (b, device) = builder(&geometry(true), ALONE, Some(Arc::new(store)));
        match (policy, b.registration(policy).build()) {
            (
                RegistrationPolicy::FailClosed,
                Err(BuildError::Store(RegistrationError::Failed { failure, .. })),
            ) => {
                assert_eq!(failure.cause, Cause::Refused { code: -1 });
                drop(device);
                assert_eq!(mapped_by(service.client_pid()), mapped);
            }
            (RegistrationPolicy::AllowDraftStoreFallback, Ok(cache)) => {
                assert_eq!(cache.store_report().draft_store_disabled(), 1);
                assert_eq!(mapped_by(service.client_pid()), mapped, "headers and target");
                assert_eq!(Engine::of(cache, device, 0).run(&prompt(5, PAGES)), Found::default());
            }
            (_, other) => panic!("{other:?}"),
        }
        assert_left(NOTHING);
    }
}

/// One rank fails, both roll back.
#[test]
fn one_rank_that_is_refused_takes_the_other_back() {
    let _alone = alone();
    let votes = Threads::of(2);
    let stores: Vec<_> = (0..2)
        .map(|rank| Arc::new(Refusing::nth(MemStore::new(1 << 20), if rank == 1 { 2 } else { 99 })))
        .collect();
    std::thread::scope(|scope| {
        for (rank, store) in (0..).zip(&stores) {
            let votes = votes.clone();
            scope.spawn(move || {
                let (b, _) = builder(&geometry(true), (rank, 2), Some(Arc::clone(store) as Arc<dyn Store>));
                let RegistrationError::Failed { failure, .. } = refused(b.rank_votes(votes)) else {
                    panic!("another error");
                };
                let want = [Cause::OtherRank, Cause::Refused { code: -1 }][rank as usize];
                assert_eq!(failure.cause, want);
            });
        }
    });
    assert!(stores.iter().all(|s| s.registered() == 0));
}

/// A store that came later, and memory that it can not address: refused with what to change, and the cache runs on.
#[test]
fn a_store_attached_later_is_checked_like_the_first() {
    let _alone = alone();
    let Some(service) = Service::start("64 MB") else { return };
    let mut private = Engine::new(&geometry(true), ALONE, Some(Arc::new(MemStore::new(1 << 22))));
    assert_eq!(private.run(&prompt(1, PAGES)), Found::default());
    let first = detach(&mut private.cache);
    match private.cache.attach_store(mooncake(&service)) {
        Err(TierError::Registration(RegistrationError::Failed { failure, .. })) => {
            assert!(matches!(failure.cause, Cause::Domain { .. }), "{failure:?}");
            assert_eq!(failure.stage, Stage::PreCheck);
        }
        other => panic!("{other:?}"),
    }
    assert!(private.cache.attach_store(first).unwrap());
    // Pages of a prompt that the tree has lost come back from the store that was put back.
    assert_eq!(private.cache.store_report().state, Some(RegistrationState::Committed));
    let mut shared = Engine::new(&geometry(true), ALONE, Some(mooncake(&service)));
    assert_eq!(shared.run(&prompt(2, PAGES)), Found::default());
    let store = detach(&mut shared.cache);
    assert_eq!(mapped_by(service.client_pid()), 1, "the headers, no arena");
    assert_eq!(shared.run(&prompt(3, PAGES)), Found::default(), "a cache without its store is a cache");
    assert!(shared.cache.attach_store(store).unwrap());
    drop(shared);
    let mut again = Engine::new(&geometry(true), ALONE, Some(mooncake(&service)));
    assert_eq!(again.run(&prompt(2, PAGES)), all());
}

fn detach(cache: &mut PrefixCache) -> Arc<dyn Store> {
    cache.detach_store(Duration::from_secs(10)).unwrap().unwrap()
}

/// Draft pages vanish from the store one by one; the target's hit stays whole, what is missing is said, and is
/// never written back as if it were there.
#[test]
fn a_missing_draft_page_does_not_shorten_the_hit() {
    let _alone = alone();
    let store = Arc::new(Faulty::new(MemStore::new(1 << 22)));
    let mut before = Engine::new(&geometry(true), ALONE, Some(Arc::clone(&store) as Arc<dyn Store>));
    assert_eq!(before.run(&prompt(1, PAGES)), Found::default());
    let objects = store.stats().objects;
    assert_eq!(objects, 2 * PAGES as u64);
    drop(before);
    let removed = remove_drafts(store.inner(), 5);
    assert_eq!(removed, 5);
    let mut after = Engine::new(&geometry(true), ALONE, Some(Arc::clone(&store) as Arc<dyn Store>));
    assert_eq!(after.run(&prompt(1, PAGES)), Found { pages: FOUND, without_draft: 5 });
    let longer = prompt(1, PAGES + 2);
    let found = after.run(&longer);
    assert_eq!(found.without_draft, 5, "on the device they still lack it");
    assert_eq!(store.stats().objects, objects - 5 + 4, "two new pages, nothing for what is missing");
    drop(after);
    let (b, device) = builder(&geometry(true), ALONE, Some(Arc::clone(&store) as Arc<dyn Store>));
    let required = DraftPlan::Sidecar { shard: None, required: true };
    let mut strict = Engine::of(b.draft(required).build().unwrap(), device, 0);
    let found = strict.run(&prompt(1, PAGES));
    assert!(found.pages < FOUND && found.without_draft == 0, "{found:?}");
}

/// Removes so many objects of the draft, told by their length.
fn remove_drafts(store: &MemStore, n: usize) -> usize {
    let draft_bytes = geometry(true).planes()[1].page_bytes() as usize;
    let keys: Vec<_> = crate::engine::keys_of(&prompt(1, PAGES), PlaneKind::Draft);
    let call = Call::unbounded();
    let present = store.query(&keys, &call);
    assert!(present.iter().all(|o| *o == sapwood::backend::store::Outcome::Ok(draft_bytes)), "{present:?}");
    store.remove(&keys[2..2 + n], &call).iter().filter(|o| o.is_ok()).count()
}

#[test]
fn packed_drafts_travel_with_the_target_under_names_of_their_own() {
    let _alone = alone();
    let Some(service) = Service::start("64 MB") else { return };
    let cache_with = |plan: DraftPlan| -> (PrefixCache, SoftDevice) {
        let (b, device) = builder(&geometry(false), ALONE, Some(mooncake(&service)));
        (b.draft(plan).build().unwrap(), device)
    };
    let run = |plan, want| {
        let (cache, device) = cache_with(plan);
        let mut engine = Engine::of(cache, device, 0);
        assert_eq!(engine.run(&prompt(9, PAGES)).pages, want, "{plan:?}");
    };
    run(DraftPlan::Packed { layers: 1 }, 0);
    run(DraftPlan::Packed { layers: 1 }, FOUND);
    run(DraftPlan::None, 0);
    run(DraftPlan::None, FOUND);
}
