//! The store's worker threads: blocking calls in, events out.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};

use super::builder::ModelIdentity;
use super::draft::DraftPlan;
use super::executor::Bell;
use super::registration::{RankVotes, Registered, RegistrationError};
use super::report::{PlaneReport, StoreReport};
use crate::backend::host::{Access, HostArena, PageClaim};
use crate::backend::identity::{DescriptorDigest, NamespaceDigest, Space};
use crate::backend::store::{Call, Cancel, Item, Outcome, RegionToken, Span, Store, TransportCause};
use crate::base::containers::Map;
use crate::base::{NamespaceId, OpId, PageId};
use crate::key::PageHash;
use crate::pool::{PlaneId, PlaneKind, PlaneSet, PoolKind};
use crate::tiers::{Event, PageOutcome, RegistrationPolicy, StoreItem};

/// How long a dropped lane waits for calls that were told to end.
const LEAVE_BEHIND_AFTER: Duration = Duration::from_secs(5);

/// A plane as the store knows it.
#[derive(Clone, Copy, Debug)]
pub(super) struct StoredPlane {
    pub(super) plane: PlaneId,
    pub(super) kind: PlaneKind,
    pub(super) descriptor: DescriptorDigest,
    pub(super) region: RegionToken,
    /// A page without it is no page.
    pub(super) required: bool,
}

/// Planes that a page lacks, and the page.
pub(super) type Gap = (PageId, PlaneSet);

#[derive(Debug)]
enum Work {
    Query {
        hashes: Arc<[PageHash]>,
    },
    Get {
        batch: u32,
        items: Vec<StoreItem>,
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

/// An end, and for pages that were read: which planes each lacks.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) event: Event,
    pub(super) read: Vec<Gap>,
}

/// What a lane leaves when it ends: everything that was asked has an end, and the store is free. Or the lane itself,
/// if a call does not return.
pub(super) type Detached = Result<(Vec<Ended>, Arc<dyn Store>), Box<StoreLane>>;

/// What became of the pages of one plane.
#[derive(Debug, Default)]
struct Counters {
    got: AtomicU64,
    not_got: AtomicU64,
    put: AtomicU64,
    not_put: AtomicU64,
}

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
}

/// What the workers share.
#[derive(Debug)]
struct Shared {
    store: Arc<dyn Store>,
    arena: Arc<HostArena>,
    planes: Vec<StoredPlane>,
    counters: Vec<Counters>,
    /// Planes that the store does not have: every page from there lacks them.
    absent: Vec<PlaneId>,
    call_budget: Option<Duration>,
    bell: Bell,
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
        let shared = Arc::new(Shared { store, arena, planes, counters, absent, call_budget, bell });
        let (jobs, work) = unbounded::<Job>();
        let (report, done) = unbounded();
        let threads = (0..config.threads.max(1))
            .map(|i| {
                let (shared, work, report) = (Arc::clone(&shared), work.clone(), report.clone());
                std::thread::Builder::new().name(format!("sapwood-store-{i}")).spawn(move || {
                    for job in work {
                        let ended = shared.run(job);
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

    pub(super) fn query(&mut self, op: OpId, namespace: NamespaceId, hashes: Arc<[PageHash]>) {
        self.send(op, namespace, Work::Query { hashes });
    }

    pub(super) fn get(&mut self, op: OpId, namespace: NamespaceId, batch: u32, items: Vec<StoreItem>) {
        self.send(op, namespace, Work::Get { batch, items });
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
            Work::Put { .. } => Cancel::new(),
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

impl Shared {
    fn run(&self, job: Job) -> Ended {
        let Job { op, spaces, cancel, work } = job;
        let call = match self.call_budget {
            Some(budget) => Call::within(budget).with_cancel(&cancel),
            None => Call::unbounded().with_cancel(&cancel),
        };
        let mut read = Vec::new();
        let event = match work {
            Work::Query { hashes } => Event::Queried { op, present: self.query(&spaces, &hashes, &call) },
            Work::Get { batch, items } => {
                let outcomes = self.get(&spaces, &items, &call, &mut read);
                Event::Got { op, batch, outcomes }
            }
            Work::Put { batch, items, lacking } => {
                Event::Put { op, batch, outcomes: self.put(&spaces, &items, &lacking, &call) }
            }
        };
        Ended { event, read }
    }

    fn required(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.planes.len()).filter(|&i| self.planes[i].required)
    }

    /// A page is present if all planes it can not do without are. `None` if that is not known for any page.
    fn query(&self, spaces: &[Space], hashes: &[PageHash], call: &Call) -> Option<Vec<bool>> {
        if spaces.len() != self.planes.len() {
            return None;
        }
        let planes = self.required().count();
        let keys: Vec<_> = hashes.iter().flat_map(|h| self.required().map(|i| spaces[i].key(&h.0))).collect();
        let outcomes = self.store.query(&keys, call);
        let known = outcomes.iter().any(|o| o.is_ok() || o.is_miss());
        if planes == 0 || (!known && !hashes.is_empty()) {
            return None;
        }
        let mut present: Vec<bool> = outcomes
            .chunks(planes)
            .map(|page| page.len() == planes && page.iter().all(|o| o.is_ok()))
            .collect();
        present.resize(hashes.len(), false);
        Some(present)
    }

    /// Reads pages. What a page may miss and does miss is zeroed, so that nobody ever reads what lay there before,
    /// and noted in `read`.
    fn get(
        &self,
        spaces: &[Space],
        items: &[StoreItem],
        call: &Call,
        read: &mut Vec<Gap>,
    ) -> Vec<PageOutcome> {
        let Some(mut claim) = self.claim(items, Access::Exclusive) else {
            return vec![PageOutcome::Failed; items.len()];
        };
        let Some(objects) = self.objects(spaces, items, &[]) else {
            return vec![PageOutcome::Failed; items.len()];
        };
        let outcomes = self.transfer(&objects, |batch| self.store.get(batch, call));
        let mut pages = vec![PageOutcome::Done; items.len()];
        let mut gaps = vec![PlaneSet::NONE; items.len()];
        for ((page, plane, _), outcome) in objects.iter().zip(outcomes) {
            let (stored, counters) = (self.planes[*plane], &self.counters[*plane]);
            if outcome.is_ok() {
                counters.got.fetch_add(1, Relaxed);
                continue;
            }
            counters.not_got.fetch_add(1, Relaxed);
            match stored.required {
                true => pages[*page] = pages[*page].max(page_outcome(outcome)),
                false => gaps[*page] = gaps[*page].with(stored.plane),
            }
        }
        for page in 0..items.len() {
            gaps[page] = self.absent.iter().fold(gaps[page], |gap, plane| gap.with(*plane));
            let lacking = (0..self.arena.geometry().planes().len()).map(|i| PlaneId(i as u8));
            for plane in lacking.filter(|plane| gaps[page].contains(*plane)) {
                match claim.block_mut(plane, page) {
                    Ok(block) => block.fill(0),
                    Err(_) => pages[page] = PageOutcome::Failed,
                }
            }
        }
        let done = items.iter().zip(gaps).zip(&pages).filter(|(_, o)| **o == PageOutcome::Done);
        read.extend(done.map(|((item, gap), _)| (item.host_page, gap)));
        pages
    }

    /// Writes pages. A plane that may be missing does not decide whether the page is stored.
    fn put(&self, spaces: &[Space], items: &[StoreItem], lacking: &[Gap], call: &Call) -> Vec<PageOutcome> {
        let claim = self.claim(items, Access::Shared);
        let objects = self.objects(spaces, items, lacking);
        let (Some(claim), Some(objects)) = (claim, objects) else {
            return vec![PageOutcome::Failed; items.len()];
        };
        let outcomes = self.transfer(&objects, |batch| self.store.put(batch, call));
        drop(claim);
        let mut pages = vec![PageOutcome::Done; items.len()];
        for ((page, plane, _), outcome) in objects.iter().zip(outcomes) {
            let counters = &self.counters[*plane];
            let count = if outcome.is_ok() { &counters.put } else { &counters.not_put };
            count.fetch_add(1, Relaxed);
            if self.planes[*plane].required {
                pages[*page] = pages[*page].max(page_outcome(outcome));
            }
        }
        pages
    }

    /// Claims the memory of the pages. The operation owns them, so a claim can only fail by a bug; then nothing is
    /// touched.
    fn claim(&self, items: &[StoreItem], access: Access) -> Option<PageClaim> {
        let pages: Vec<PageId> = items.iter().map(|i| i.host_page).collect();
        match self.arena.claim(PoolKind::Full, &pages, access) {
            Ok(claim) => Some(claim),
            Err(error) => {
                tracing::error!(%error, "sapwood: a store batch names pages that are in use");
                None
            }
        }
    }

    /// One outcome per object; a store that answers less has failed the rest.
    fn transfer(
        &self,
        objects: &[(usize, usize, Item)],
        call: impl FnOnce(&[Item]) -> Vec<Outcome>,
    ) -> Vec<Outcome> {
        let batch: Vec<Item> = objects.iter().map(|(_, _, item)| item.clone()).collect();
        let mut outcomes = call(&batch);
        outcomes.resize(objects.len(), Outcome::Transport(TransportCause::Protocol));
        outcomes
    }

    /// The objects of the pages: position of the page, of the plane, and what the store is given.
    fn objects(
        &self,
        spaces: &[Space],
        items: &[StoreItem],
        lacking: &[Gap],
    ) -> Option<Vec<(usize, usize, Item)>> {
        if spaces.len() != self.planes.len() || spaces.is_empty() {
            return None;
        }
        let lacks = |page: PageId, plane: PlaneId| {
            lacking.iter().any(|(p, planes)| *p == page && planes.contains(plane))
        };
        let mut objects = Vec::with_capacity(items.len() * self.planes.len());
        for (page, item) in items.iter().enumerate() {
            for (i, (plane, space)) in self.planes.iter().zip(spaces).enumerate() {
                if lacks(item.host_page, plane.plane) {
                    continue;
                }
                let range = self.arena.range(plane.plane, item.host_page).ok()?;
                let span = Span { region: plane.region, offset: range.offset, len: range.len };
                objects.push((page, i, Item::one(space, &item.hash.0, span)));
            }
        }
        Some(objects)
    }
}

fn page_outcome(outcome: Outcome) -> PageOutcome {
    match outcome {
        Outcome::Ok(_) => PageOutcome::Done,
        Outcome::Missing => PageOutcome::Missing,
        o if o.is_miss() => PageOutcome::Corrupt,
        Outcome::NoSpace | Outcome::Busy => PageOutcome::Refused,
        _ => PageOutcome::Failed,
    }
}
