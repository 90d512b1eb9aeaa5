//! What a worker does: pages in, store objects out, one outcome per page.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::{Ended, Gap, Job, StoredPlane, Work};
use crate::backend::host::{Access, HostArena, PageClaim};
use crate::backend::identity::Space;
use crate::backend::store::{Call, Item, Outcome, Span, Store, TransportCause};
use crate::base::PageId;
use crate::engine::executor::Bell;
use crate::key::PageHash;
use crate::pool::{PlaneId, PlaneSet, PoolKind};
use crate::tiers::{Event, PageOutcome, StoreItem};

/// What became of the pages of one plane.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) got: AtomicU64,
    pub(super) not_got: AtomicU64,
    pub(super) put: AtomicU64,
    pub(super) not_put: AtomicU64,
}

/// What the workers share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) store: Arc<dyn Store>,
    pub(super) arena: Arc<HostArena>,
    pub(super) planes: Vec<StoredPlane>,
    pub(super) counters: Vec<Counters>,
    /// Planes that the store does not have: every page of their pools from there lacks them.
    pub(super) absent: Vec<PlaneId>,
    /// Pools of which every plane may be missing: where the prefix is, they are.
    pub(super) optional: [bool; 3],
    pub(super) call_budget: Option<Duration>,
    pub(super) bell: Bell,
}

/// One object of a batch.
struct Object {
    /// Position of its page in the batch.
    page: usize,
    /// Position of its plane among those that are stored.
    plane: usize,
    item: Item,
}

/// The memory of the pages of a batch, pool by pool.
struct Claimed {
    pools: [Option<PageClaim>; 3],
    /// Position of each page of the batch among those of its pool.
    places: Vec<usize>,
}

impl Claimed {
    fn zero(&mut self, item: &StoreItem, page: usize, plane: PlaneId) -> bool {
        let claim = self.pools[item.pool.index()].as_mut();
        match claim.map(|claim| claim.block_mut(plane, self.places[page])) {
            Some(Ok(block)) => {
                block.fill(0);
                true
            }
            _ => false,
        }
    }
}

impl Shared {
    /// The end of the job, if anybody waits for it.
    pub(super) fn run(&self, job: Job) -> Option<Ended> {
        let Job { op, spaces, cancel, work } = job;
        let call = match self.call_budget {
            Some(budget) => Call::within(budget).with_cancel(&cancel),
            None => Call::unbounded().with_cancel(&cancel),
        };
        let mut read = Vec::new();
        let mut bytes = 0;
        let event = match work {
            Work::Query { hashes, pools } => {
                Event::Queried { op, present: self.query(&spaces, &pools, &hashes, &call) }
            }
            Work::Touch { hashes } => {
                let keys: Vec<_> =
                    hashes.iter().flat_map(|h| spaces.iter().map(|space| space.key(&h.0))).collect();
                self.store.touch(&keys, &call);
                return None;
            }
            Work::Get { batch, items } => {
                let outcomes = self.get(&spaces, &items, &call, &mut read, &mut bytes);
                Event::Got { op, batch, outcomes }
            }
            Work::Put { batch, items, lacking } => {
                let outcomes = self.put(&spaces, &items, &lacking, &call, &mut bytes);
                Event::Put { op, batch, outcomes }
            }
        };
        Some(Ended { event, read, bytes })
    }

    /// Planes without which a page of the pool is no page.
    fn required(&self, pool: PoolKind) -> impl Iterator<Item = usize> + '_ {
        (0..self.planes.len()).filter(move |&i| self.planes[i].required && self.planes[i].pool == pool)
    }

    /// For every pool in turn one flag per hash: a page is present if all planes it can not do without are. `None` if
    /// that is not known for any page.
    fn query(
        &self,
        spaces: &[Space],
        pools: &[PoolKind],
        hashes: &[PageHash],
        call: &Call,
    ) -> Option<Vec<bool>> {
        if spaces.len() != self.planes.len() {
            return None;
        }
        let mut keys = Vec::new();
        for &pool in pools {
            keys.extend(hashes.iter().flat_map(|h| self.required(pool).map(|i| spaces[i].key(&h.0))));
        }
        let outcomes = self.store.query(&keys, call);
        let known = outcomes.iter().any(|o| o.is_ok() || o.is_miss());
        if !known && !hashes.is_empty() {
            return None;
        }
        let mut outcomes = outcomes.iter();
        let mut present = Vec::with_capacity(pools.len() * hashes.len());
        for &pool in pools {
            let planes = self.required(pool).count();
            for _ in hashes {
                let there = outcomes.by_ref().take(planes).filter(|o| o.is_ok()).count();
                present.push(if planes == 0 { self.optional[pool.index()] } else { there == planes });
            }
        }
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
        bytes: &mut u64,
    ) -> Vec<PageOutcome> {
        let claimed = self.claim(items, Access::Exclusive);
        let objects = self.objects(spaces, items, &[]);
        let (Some(mut claimed), Some(objects)) = (claimed, objects) else {
            return vec![PageOutcome::Failed; items.len()];
        };
        let outcomes = self.transfer(&objects, |batch| self.store.get(batch, call));
        let mut pages = vec![PageOutcome::Done; items.len()];
        let mut gaps = vec![PlaneSet::NONE; items.len()];
        for (object, outcome) in objects.iter().zip(outcomes) {
            let (stored, counters) = (self.planes[object.plane], &self.counters[object.plane]);
            if outcome.is_ok() {
                counters.got.fetch_add(1, Relaxed);
                *bytes += object.item.len() as u64;
                continue;
            }
            counters.not_got.fetch_add(1, Relaxed);
            match stored.required {
                true => pages[object.page] = pages[object.page].max(page_outcome(outcome)),
                false => gaps[object.page] = gaps[object.page].with(stored.plane),
            }
        }
        let geometry = self.arena.geometry();
        for (page, item) in items.iter().enumerate() {
            let absent = self.absent.iter().fold(gaps[page], |gap, plane| gap.with(*plane));
            gaps[page] = PlaneSet::NONE;
            for (plane, _) in geometry.planes_of(item.pool, absent) {
                gaps[page] = gaps[page].with(plane);
                if !claimed.zero(item, page, plane) {
                    pages[page] = PageOutcome::Failed;
                }
            }
        }
        let done = items.iter().zip(gaps).zip(&pages).filter(|(_, o)| **o == PageOutcome::Done);
        read.extend(done.map(|((item, planes), _)| Gap { pool: item.pool, page: item.host_page, planes }));
        pages
    }

    /// Writes pages. A plane that may be missing does not decide whether the page is stored.
    fn put(
        &self,
        spaces: &[Space],
        items: &[StoreItem],
        lacking: &[Gap],
        call: &Call,
        bytes: &mut u64,
    ) -> Vec<PageOutcome> {
        let claimed = self.claim(items, Access::Shared);
        let objects = self.objects(spaces, items, lacking);
        let (Some(claimed), Some(objects)) = (claimed, objects) else {
            return vec![PageOutcome::Failed; items.len()];
        };
        let outcomes = self.transfer(&objects, |batch| self.store.put(batch, call));
        drop(claimed);
        let mut pages = vec![PageOutcome::Done; items.len()];
        for (object, outcome) in objects.iter().zip(outcomes) {
            let counters = &self.counters[object.plane];
            let count = if outcome.is_ok() { &counters.put } else { &counters.not_put };
            count.fetch_add(1, Relaxed);
            *bytes += if outcome.is_ok() { object.item.len() as u64 } else { 0 };
            if self.planes[object.plane].required {
                pages[object.page] = pages[object.page].max(page_outcome(outcome));
            }
        }
        pages
    }

    /// Claims the memory of the pages. The operation owns them, so a claim can only fail by a bug; then nothing is
    /// touched.
    fn claim(&self, items: &[StoreItem], access: Access) -> Option<Claimed> {
        let mut pages: [Vec<PageId>; 3] = Default::default();
        let places = items.iter().map(|item| {
            let of_pool = &mut pages[item.pool.index()];
            of_pool.push(item.host_page);
            of_pool.len() - 1
        });
        let places = places.collect();
        let mut pools = [None, None, None];
        for pool in PoolKind::ALL.into_iter().filter(|pool| !pages[pool.index()].is_empty()) {
            match self.arena.claim(pool, &pages[pool.index()], access) {
                Ok(claim) => pools[pool.index()] = Some(claim),
                Err(error) => {
                    tracing::error!(%error, "sapwood: a store batch names pages that are in use");
                    return None;
                }
            }
        }
        Some(Claimed { pools, places })
    }

    /// One outcome per object; a store that answers less has failed the rest.
    fn transfer(&self, objects: &[Object], call: impl FnOnce(&[Item]) -> Vec<Outcome>) -> Vec<Outcome> {
        let batch: Vec<Item> = objects.iter().map(|object| object.item.clone()).collect();
        let mut outcomes = call(&batch);
        outcomes.resize(objects.len(), Outcome::Transport(TransportCause::Protocol));
        outcomes
    }

    /// The objects of the pages: one per plane that is stored of the page's pool, but for those that the page lacks.
    fn objects(&self, spaces: &[Space], items: &[StoreItem], lacking: &[Gap]) -> Option<Vec<Object>> {
        if spaces.len() != self.planes.len() || spaces.is_empty() {
            return None;
        }
        let lacks = |item: &StoreItem, plane: PlaneId| {
            let of_page = |gap: &&Gap| gap.pool == item.pool && gap.page == item.host_page;
            lacking.iter().filter(of_page).any(|gap| gap.planes.contains(plane))
        };
        let mut objects = Vec::with_capacity(items.len() * self.planes.len());
        for (page, item) in items.iter().enumerate() {
            let of_pool =
                self.planes.iter().zip(spaces).enumerate().filter(|(_, (p, _))| p.pool == item.pool);
            for (i, (plane, space)) in of_pool {
                if lacks(item, plane.plane) {
                    continue;
                }
                let range = self.arena.range(plane.plane, item.host_page).ok()?;
                let span = Span { region: plane.region, offset: range.offset, len: range.len };
                objects.push(Object { page, plane: i, item: Item::one(space, &item.hash.0, span) });
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
