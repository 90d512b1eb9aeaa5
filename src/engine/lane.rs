//! The store's worker threads: blocking calls in, events out.

mod work;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};

use self::work::{Counters, Shared};
use super::builder::ModelIdentity;
use super::draft::DraftPlan;
use super::executor::Bell;
use super::registration::{RankVotes, Registered, RegistrationError};
use super::report::{PlaneReport, StoreReport};
use crate::backend::host::HostArena;
use crate::backend::identity::{DescriptorDigest, NamespaceDigest, Space};
use crate::backend::store::{Cancel, RegionToken, Store};
use crate::base::containers::Map;
use crate::base::{NamespaceId, OpId, PageId};
use crate::key::PageHash;
use crate::pool::{Geometry, PlaneId, PlaneKind, PlaneSet, PoolKind};
use crate::tiers::{Event, RegistrationPolicy, StoreItem};

/// How long a dropped lane waits for calls that were told to end.
const LEAVE_BEHIND_AFTER: Duration = Duration::from_secs(5);

/// A plane as the store knows it.
#[derive(Clone, Copy, Debug)]
pub(super) struct StoredPlane {
    pub(super) plane: PlaneId,
    pub(super) kind: PlaneKind,
    pub(super) pool: PoolKind,
    pub(super) descriptor: DescriptorDigest,
    pub(super) region: RegionToken,
    /// A page without it is no page.
    pub(super) required: bool,
}

/// Planes that a page lacks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gap {
    pub(super) pool: PoolKind,
    pub(super) page: PageId,
    pub(super) planes: PlaneSet,
}

#[derive(Debug)]
enum Work {
    Query {
        hashes: Arc<[PageHash]>,
        pools: Vec<PoolKind>,
    },
    Get {
        batch: u32,
        items: Vec<StoreItem>,
    },
    /// Nobody waits for it.
    Touch {
        hashes: Vec<PageHash>,
    },
    /// `lacking`: planes that pages of the batch do not have, and that must not be stored.
    Put {
        batch: u32,
        items: Vec<StoreItem>,
        lacking: Vec<Gap>,
    },
}

#[derive(Debug)]
struct Job {
    op: OpId,
    spaces: Arc<[Space]>,
    cancel: Cancel,
    work: Work,
}

/// An end.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) event: Event,
    /// Of the pages that were read: which planes each lacks.
    pub(super) read: Vec<Gap>,
    /// Bytes moved.
    pub(super) bytes: u64,
}

/// What a lane leaves when it ends: everything that was asked has an end, and the store is free. Or the lane itself,
/// if a call does not return.
pub(super) type Detached = Result<(Vec<Ended>, Arc<dyn Store>), Box<StoreLane>>;

/// What a lane is made with, now and at the next attach.
#[derive(Clone, Debug)]
pub(super) struct LaneConfig {
    pub(super) threads: usize,
    pub(super) call_budget: Option<Duration>,
    pub(super) bell: Bell,
    pub(super) identity: ModelIdentity,
    pub(super) draft: DraftPlan,
    pub(super) policy: RegistrationPolicy,
}

impl LaneConfig {
    /// Registers the memory of all planes.
    pub(super) fn register(
        &self,
        arena: &HostArena,
        store: &dyn Store,
        votes: &mut dyn RankVotes,
    ) -> Result<Registered, RegistrationError> {
        let geometry = arena.geometry();
        let name = |plane: PlaneId| {
            let plane = &geometry.planes()[usize::from(plane.0)];
            let mut descriptor = self.identity.descriptor(geometry, plane);
            self.draft.name(plane, &mut descriptor);
            descriptor.digest()
        };
        Registered::attach((geometry, arena), store, name, self.draft, self.policy, votes)
    }

    /// Pools besides Full of which every plane may be missing.
    fn optional_pools(&self, geometry: &Geometry) -> [bool; 3] {
        PoolKind::ALL.map(|pool| {
            let mut planes = geometry.planes_of(pool, PlaneSet::ALL);
            pool != PoolKind::Full && planes.all(|(_, plane)| self.draft.may_miss(plane.kind()))
        })
    }
}

/// A store with the threads that call it. The number of calls in flight is bounded by the core, so the channels
/// are not.
#[derive(Debug)]
pub(super) struct StoreLane {
    shared: Arc<Shared>,
    registered: Option<Registered>,
    jobs: Option<Sender<Job>>,
    done: Receiver<Ended>,
    threads: Vec<JoinHandle<()>>,
    spaces: Map<NamespaceId, Arc<[Space]>>,
    cancels: Map<OpId, Cancel>,
}

impl StoreLane {
    /// Starts the workers. The registration comes back if the system has no threads.
    pub(super) fn start(
        config: &LaneConfig,
        store: Arc<dyn Store>,
        arena: Arc<HostArena>,
        registered: Registered,
    ) -> Result<StoreLane, Box<(std::io::Error, Registered)>> {
        let planes = registered.planes();
        let counters = planes.iter().map(|_| Counters::default()).collect();
        let (call_budget, bell) = (config.call_budget, config.bell.clone());
        let absent = registered.absent_planes();
        let optional = config.optional_pools(arena.geometry());
        let shared = Arc::new(Shared { store, arena, planes, counters, absent, optional, call_budget, bell });
        let (jobs, work) = unbounded::<Job>();
        let (report, done) = unbounded();
        let threads = (0..config.threads.max(1))
            .map(|i| {
                let (shared, work, report) = (Arc::clone(&shared), work.clone(), report.clone());
                std::thread::Builder::new().name(format!("sapwood-store-{i}")).spawn(move || {
                    for job in work {
                        let Some(ended) = shared.run(job) else { continue };
                        if report.send(ended).is_err() {
                            return;
                        }
                        shared.bell.ring();
                    }
                })
            })
            .collect::<std::io::Result<Vec<_>>>();
        match threads {
            Ok(threads) => Ok(StoreLane {
                shared,
                registered: Some(registered),
                jobs: Some(jobs),
                done,
                threads,
                spaces: Map::default(),
                cancels: Map::default(),
            }),
            Err(error) => Err(Box::new((error, registered))),
        }
    }

    /// What the store has of the cache's planes.
    pub(super) fn report(&self) -> StoreReport {
        let planes = self.shared.planes.iter().zip(&self.shared.counters);
        let of = |c: &AtomicU64| c.load(Relaxed);
        let registered = self.registered.as_ref();
        StoreReport {
            store: self.shared.store.caps().name,
            state: registered.map(Registered::state),
            failure: registered.and_then(Registered::failure).cloned(),
            planes: planes
                .map(|(p, c)| PlaneReport {
                    kind: p.kind,
                    pool: p.pool,
                    required: p.required,
                    got_pages: of(&c.got),
                    not_got_pages: of(&c.not_got),
                    put_pages: of(&c.put),
                    not_put_pages: of(&c.not_put),
                })
                .collect(),
            not_stored: registered.map(Registered::not_stored).unwrap_or_default(),
        }
    }

    /// Ends all work: calls under way are told to end, everything that was asked is answered, the store lets go of
    /// the memory. `Err` if a call does not return by `until`; the lane then takes no new work and can be asked again.
    pub(super) fn detach(mut self, until: Instant) -> Detached {
        self.cancels.values().for_each(Cancel::cancel);
        self.jobs = None;
        while self.threads.iter().any(|t| !t.is_finished()) {
            if Instant::now() >= until {
                return Err(Box::new(self));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut ended = Vec::new();
        self.drain(|e| ended.push(e));
        if let Some(registered) = self.registered.take() {
            registered.detach(&self.shared.arena, self.shared.store.as_ref());
        }
        let store = Arc::clone(&self.shared.store);
        Ok((ended, store))
    }

    pub(super) fn store(&self) -> &Arc<dyn Store> {
        &self.shared.store
    }

    /// Makes the spaces of a namespace known, once.
    pub(super) fn learn(&mut self, namespace: NamespaceId, seed: Option<[u8; 32]>) {
        let digest = seed.map_or(NamespaceDigest::DEFAULT, NamespaceDigest);
        self.spaces
            .entry(namespace)
            .or_insert_with(|| self.shared.planes.iter().map(|p| Space::new(p.descriptor, digest)).collect());
    }

    pub(super) fn query(
        &mut self,
        op: OpId,
        namespace: NamespaceId,
        hashes: Arc<[PageHash]>,
        pools: Vec<PoolKind>,
    ) {
        self.send(op, namespace, Work::Query { hashes, pools });
    }

    pub(super) fn get(&mut self, op: OpId, namespace: NamespaceId, batch: u32, items: Vec<StoreItem>) {
        self.send(op, namespace, Work::Get { batch, items });
    }

    /// Whether telling the store of uses elsewhere can make a difference.
    pub(super) fn takes_touches(&self) -> bool {
        self.is_open() && self.shared.store.caps().evicts
    }

    /// Pages used elsewhere; see [`Store::touch`]. `waiting_max`: left out if so many calls wait for a worker.
    pub(super) fn touch(&mut self, namespace: NamespaceId, hashes: Vec<PageHash>, waiting_max: usize) {
        if self.jobs.as_ref().is_some_and(|jobs| jobs.len() < waiting_max) {
            self.send(OpId(u64::MAX), namespace, Work::Touch { hashes });
        }
    }

    pub(super) fn put(
        &mut self,
        op: OpId,
        namespace: NamespaceId,
        batch: u32,
        items: Vec<StoreItem>,
        lacking: Vec<Gap>,
    ) {
        self.send(op, namespace, Work::Put { batch, items, lacking });
    }

    /// Calls of the operation end as soon as the store can; their events still come.
    pub(super) fn cancel(&mut self, op: OpId) {
        if let Some(cancel) = self.cancels.remove(&op) {
            cancel.cancel();
        }
    }

    fn send(&mut self, op: OpId, namespace: NamespaceId, work: Work) {
        let spaces = self.spaces.get(&namespace).cloned().unwrap_or_else(|| Arc::from([]));
        let cancel = match work {
            Work::Put { .. } | Work::Touch { .. } => Cancel::new(),
            Work::Query { .. } | Work::Get { .. } => self.cancels.entry(op).or_default().clone(),
        };
        if let Some(jobs) = &self.jobs {
            // The workers hold the other end until they are joined.
            let _ = jobs.send(Job { op, spaces, cancel, work });
        }
    }

    /// Whether it takes work.
    pub(super) fn is_open(&self) -> bool {
        self.jobs.is_some()
    }

    /// What has ended since the last call.
    pub(super) fn drain(&mut self, mut each: impl FnMut(Ended)) {
        while let Ok(ended) = self.done.try_recv() {
            each(ended);
        }
    }

    /// Forgets the cancel flag of an operation that has ended.
    pub(super) fn forget(&mut self, op: OpId) {
        self.cancels.remove(&op);
    }
}

impl Drop for StoreLane {
    /// Takes no more work, tells running calls to end, and waits a moment for the workers. One whose store does not
    /// return is left behind: it holds the arena, so the memory it may still write stays mapped.
    fn drop(&mut self) {
        for cancel in self.cancels.values() {
            cancel.cancel();
        }
        self.jobs = None;
        let until = Instant::now() + LEAVE_BEHIND_AFTER;
        let mut left_behind = false;
        for thread in self.threads.drain(..) {
            while !thread.is_finished() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
            if thread.is_finished() {
                // A worker that panicked has nothing left to do; the store's contract forbids it.
                let _ = thread.join();
            } else {
                tracing::warn!("sapwood: a store call did not return; its worker is left behind");
                left_behind = true;
            }
        }
        if let Some(registered) = self.registered.take()
            && !left_behind
        {
            registered.detach(&self.shared.arena, self.shared.store.as_ref());
        }
    }
}
