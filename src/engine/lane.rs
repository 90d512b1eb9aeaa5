//! The store's worker threads: blocking calls in, events out.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};

use super::executor::Bell;
use crate::backend::host::{Access, HostArena};
use crate::backend::identity::{DescriptorDigest, NamespaceDigest, Space};
use crate::backend::store::{Call, Cancel, Item, Outcome, RegionToken, Span, Store};
use crate::base::containers::Map;
use crate::base::{NamespaceId, OpId, PageId};
use crate::key::PageHash;
use crate::pool::{PlaneId, PoolKind};
use crate::tiers::{Event, PageOutcome, StoreItem};

/// How long a dropped lane waits for calls that were told to end.
const LEAVE_BEHIND_AFTER: Duration = Duration::from_secs(5);

/// A plane as the store knows it.
#[derive(Clone, Copy, Debug)]
pub(super) struct StoredPlane {
    pub(super) plane: PlaneId,
    pub(super) descriptor: DescriptorDigest,
    pub(super) region: RegionToken,
}

#[derive(Debug)]
enum Work {
    Query { hashes: Vec<PageHash> },
    Get { batch: u32, items: Vec<StoreItem> },
    Put { batch: u32, items: Vec<StoreItem> },
}

#[derive(Debug)]
struct Job {
    op: OpId,
    spaces: Arc<[Space]>,
    cancel: Cancel,
    work: Work,
}

/// What the workers share.
#[derive(Debug)]
struct Shared {
    store: Arc<dyn Store>,
    arena: Arc<HostArena>,
    planes: Vec<StoredPlane>,
    call_budget: Option<Duration>,
    bell: Bell,
}

/// A store with the threads that call it. The number of calls in flight is bounded by the core, so the channels
/// are not.
#[derive(Debug)]
pub(super) struct StoreLane {
    shared: Arc<Shared>,
    jobs: Option<Sender<Job>>,
    done: Receiver<Event>,
    threads: Vec<JoinHandle<()>>,
    spaces: Map<NamespaceId, Arc<[Space]>>,
    cancels: Map<OpId, Cancel>,
}

impl StoreLane {
    pub(super) fn start(
        store: Arc<dyn Store>,
        arena: Arc<HostArena>,
        planes: Vec<StoredPlane>,
        threads: usize,
        call_budget: Option<Duration>,
        bell: Bell,
    ) -> std::io::Result<StoreLane> {
        let shared = Arc::new(Shared { store, arena, planes, call_budget, bell });
        let (jobs, work) = unbounded::<Job>();
        let (report, done) = unbounded();
        let threads = (0..threads.max(1))
            .map(|i| {
                let (shared, work, report) = (Arc::clone(&shared), work.clone(), report.clone());
                std::thread::Builder::new().name(format!("sapwood-store-{i}")).spawn(move || {
                    for job in work {
                        let event = shared.run(job);
                        if report.send(event).is_err() {
                            return;
                        }
                        shared.bell.ring();
                    }
                })
            })
            .collect::<std::io::Result<Vec<_>>>()?;
        Ok(StoreLane {
            shared,
            jobs: Some(jobs),
            done,
            threads,
            spaces: Map::default(),
            cancels: Map::default(),
        })
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

    pub(super) fn query(&mut self, op: OpId, namespace: NamespaceId, hashes: Vec<PageHash>) {
        self.send(op, namespace, Work::Query { hashes });
    }

    pub(super) fn get(&mut self, op: OpId, namespace: NamespaceId, batch: u32, items: Vec<StoreItem>) {
        self.send(op, namespace, Work::Get { batch, items });
    }

    pub(super) fn put(&mut self, op: OpId, namespace: NamespaceId, batch: u32, items: Vec<StoreItem>) {
        self.send(op, namespace, Work::Put { batch, items });
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

    /// What has ended since the last call.
    pub(super) fn drain(&mut self, mut each: impl FnMut(Event)) {
        while let Ok(event) = self.done.try_recv() {
            each(event);
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
        for thread in self.threads.drain(..) {
            while !thread.is_finished() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
            if thread.is_finished() {
                // A worker that panicked has nothing left to do; the store's contract forbids it.
                let _ = thread.join();
            } else {
                tracing::warn!("sapwood: a store call did not return; its worker is left behind");
            }
        }
    }
}

impl Shared {
    fn run(&self, job: Job) -> Event {
        let Job { op, spaces, cancel, work } = job;
        let call = match self.call_budget {
            Some(budget) => Call::within(budget).with_cancel(&cancel),
            None => Call::unbounded().with_cancel(&cancel),
        };
        match work {
            Work::Query { hashes } => Event::Queried { op, present: self.query(&spaces, &hashes, &call) },
            Work::Get { batch, items } => {
                let outcomes =
                    self.transfer(&spaces, &items, Access::Exclusive, |i| self.store.get(i, &call));
                Event::Got { op, batch, outcomes }
            }
            Work::Put { batch, items } => {
                let outcomes = self.transfer(&spaces, &items, Access::Shared, |i| self.store.put(i, &call));
                Event::Put { op, batch, outcomes }
            }
        }
    }

    /// A page is present if all its planes are. `None` if that is not known for any page.
    fn query(&self, spaces: &[Space], hashes: &[PageHash], call: &Call) -> Option<Vec<bool>> {
        let planes = spaces.len();
        let keys: Vec<_> = hashes.iter().flat_map(|h| spaces.iter().map(|s| s.key(&h.0))).collect();
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

    /// Runs `call` over the objects of the pages, under a claim on their memory, and folds the planes of a page
    /// into one outcome.
    fn transfer(
        &self,
        spaces: &[Space],
        items: &[StoreItem],
        access: Access,
        call: impl FnOnce(&[Item]) -> Vec<Outcome>,
    ) -> Vec<PageOutcome> {
        let pages: Vec<PageId> = items.iter().map(|i| i.host_page).collect();
        // The operation owns the pages, so a claim can only fail by a bug; then nothing is touched.
        let claim = match self.arena.claim(PoolKind::Full, &pages, access) {
            Ok(claim) => claim,
            Err(error) => {
                tracing::error!(%error, "sapwood: a store batch names pages that are in use");
                return vec![PageOutcome::Failed; items.len()];
            }
        };
        let Some(objects) = self.objects(spaces, items) else {
            return vec![PageOutcome::Failed; items.len()];
        };
        let outcomes = call(&objects);
        drop(claim);
        let planes = self.planes.len();
        (0..items.len())
            .map(|page| match outcomes.get(page * planes..(page + 1) * planes) {
                Some(planes) => planes.iter().map(|&o| page_outcome(o)).max().unwrap_or(PageOutcome::Failed),
                None => PageOutcome::Failed,
            })
            .collect()
    }

    fn objects(&self, spaces: &[Space], items: &[StoreItem]) -> Option<Vec<Item>> {
        let mut objects = Vec::with_capacity(items.len() * self.planes.len());
        for item in items {
            for (plane, space) in self.planes.iter().zip(spaces) {
                let range = self.arena.range(plane.plane, item.host_page).ok()?;
                let span = Span { region: plane.region, offset: range.offset, len: range.len };
                objects.push(Item::one(space, &item.hash.0, span));
            }
        }
        (objects.len() == items.len() * self.planes.len()).then_some(objects)
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
