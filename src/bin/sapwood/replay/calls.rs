//! The cache as the scheduler calls it: the same call on every rank, with the same answer, or the replay stops. Every
//! call on the scheduler's thread is timed by kind, on rank 0.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use sapwood::base::{Fence, NamespaceId, PageId, Tier, Time};
use sapwood::engine::{CacheError, PrefixCache, Request};
use sapwood::tiers::{Alloc, Checkpoint, LoadBack, LoadState, MatchInfo, Prefetch, PrefetchState};

use super::error::RunError;
use super::hist::{Histogram, Quantiles};
use super::model::Places;

/// Kinds of calls, in the order of [`NAMES`].
#[derive(Clone, Copy)]
enum Kind {
    Match,
    Hint,
    Prefetch,
    PollPrefetch,
    LoadBack,
    LoadState,
    Alloc,
    Checkpoint,
    Finish,
    Abort,
    Tick,
}

const NAMES: [&str; 11] = [
    "match",
    "hint",
    "prefetch",
    "poll_prefetch",
    "load_back",
    "load_state",
    "alloc",
    "checkpoint",
    "finish",
    "abort",
    "tick",
];

/// What a request costs the scheduler's thread from its match to its end: finding and locking the prefix, publishing,
/// letting go. Loads and room for new pages are counted by their own kinds.
const REQUEST: &str = "request";
/// The same in processor time, which does not grow when others use the machine.
const REQUEST_CPU: &str = "request_cpu";

/// One request, on every rank.
pub(crate) struct OnRanks {
    ranks: Vec<Request>,
    /// Time of its calls of [`Kind::Match`], [`Kind::Checkpoint`] and [`Kind::Finish`] so far.
    spent: Spent,
}

/// Time of calls: by the clock without poisoning, and of the processor with it.
#[derive(Clone, Copy, Default)]
struct Spent {
    wall: Duration,
    cpu: Duration,
}

impl Spent {
    fn add(&mut self, more: Spent) {
        self.wall += more.wall;
        self.cpu += more.cpu;
    }
}

/// Processor time of this thread.
fn thread_cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// What reading the clocks adds to the processor time of a measured call: the median of a thousand calls of nothing. Reading
/// this clock is a system call of half a microsecond or more, and a call of the cache takes two.
fn clock_cost() -> Duration {
    let mut costs: Vec<Duration> = (0..1001)
        .map(|_| {
            let cpu = thread_cpu();
            let _ = std::hint::black_box(Instant::now()).elapsed();
            thread_cpu().saturating_sub(cpu)
        })
        .collect();
    costs.sort_unstable();
    costs[costs.len() / 2]
}

/// Time that goes into poisoning freed pages, in nanoseconds: the replay's own, though spent inside calls.
pub(crate) type PoisonTime = Arc<AtomicU64>;

/// See the module.
pub(crate) struct Calls {
    ranks: Vec<PrefixCache>,
    namespaces: Vec<NamespaceId>,
    histograms: Vec<Histogram>,
    requests: [Histogram; 2],
    clock_cost: Duration,
    poison: PoisonTime,
}

impl Calls {
    /// Wraps the caches of all ranks, at least one; `namespaces` are those of the tenants.
    pub(crate) fn new(ranks: Vec<PrefixCache>, namespaces: Vec<NamespaceId>, poison: PoisonTime) -> Calls {
        let histograms = NAMES.iter().map(|_| Histogram::new()).collect();
        let requests = [Histogram::new(), Histogram::new()];
        Calls { ranks, namespaces, histograms, requests, clock_cost: clock_cost(), poison }
    }

    /// The cache of rank 0, for everything that is not a scheduler's call.
    pub(crate) fn cache(&self) -> &PrefixCache {
        &self.ranks[0]
    }

    /// The caches of all ranks.
    pub(crate) fn ranks(&self) -> &[PrefixCache] {
        &self.ranks
    }

    /// The caches of all ranks, to be closed.
    pub(crate) fn ranks_mut(&mut self) -> &mut [PrefixCache] {
        &mut self.ranks
    }

    /// One call on every rank; all must answer alike. Returns the answer, and how long rank 0 took.
    fn on_all<T: PartialEq>(
        &mut self,
        kind: Kind,
        mut call: impl FnMut(&mut PrefixCache, usize) -> Result<T, CacheError>,
    ) -> Result<(T, Spent), RunError> {
        let poisoned = self.poison.load(Ordering::Relaxed);
        let counted = matches!(kind, Kind::Match | Kind::Checkpoint | Kind::Finish);
        let cpu = if counted { thread_cpu() } else { Duration::ZERO };
        let start = Instant::now();
        let first = call(&mut self.ranks[0], 0)?;
        let own = Duration::from_nanos(self.poison.load(Ordering::Relaxed) - poisoned);
        let wall = start.elapsed().saturating_sub(own);
        let cpu = if counted { thread_cpu() } else { Duration::ZERO }.saturating_sub(cpu + self.clock_cost);
        self.histograms[kind as usize].add(wall);
        for (rank, cache) in self.ranks.iter_mut().enumerate().skip(1) {
            if call(cache, rank)? != first {
                return Err(RunError::Answers { rank, call: NAMES[kind as usize] });
            }
        }
        Ok((first, Spent { wall, cpu }))
    }

    fn on_request<T: PartialEq>(
        &mut self,
        kind: Kind,
        request: &mut OnRanks,
        mut call: impl FnMut(&mut PrefixCache, &mut Request) -> Result<T, CacheError>,
    ) -> Result<T, RunError> {
        let (answer, took) = self.on_all(kind, |cache, rank| call(cache, &mut request.ranks[rank]))?;
        if matches!(kind, Kind::Match | Kind::Checkpoint) {
            request.spent.add(took);
        }
        Ok(answer)
    }

    pub(crate) fn request(&mut self, tenant: usize) -> OnRanks {
        let namespace = self.namespaces[tenant];
        let ranks = self.ranks.iter_mut().map(|cache| cache.request(namespace)).collect();
        OnRanks { ranks, spent: Spent::default() }
    }

    pub(crate) fn match_prefix(
        &mut self,
        request: &mut OnRanks,
        tokens: &[u32],
    ) -> Result<MatchInfo, RunError> {
        self.on_request(Kind::Match, request, |cache, request| cache.match_prefix(request, tokens))
    }

    pub(crate) fn expect_prefix(&mut self, request: &mut OnRanks, tokens: &[u32]) -> Result<(), RunError> {
        self.on_request(Kind::Hint, request, |cache, request| cache.expect_prefix(request, tokens))
    }

    /// How long the answer was that is not cached.
    pub(crate) fn answered(&mut self, request: &mut OnRanks, tokens: u32) -> Result<(), RunError> {
        self.on_request(Kind::Hint, request, |cache, request| cache.answered(request, tokens))
    }

    /// `true`: the store is being asked.
    pub(crate) fn prefetch(&mut self, request: &mut OnRanks, tokens: &[u32]) -> Result<bool, RunError> {
        let started =
            self.on_request(Kind::Prefetch, request, |cache, request| cache.prefetch(request, tokens))?;
        Ok(matches!(started, Prefetch::Started { .. }))
    }

    pub(crate) fn poll_prefetch(&mut self, request: &mut OnRanks) -> Result<PrefetchState, RunError> {
        self.on_request(Kind::PollPrefetch, request, PrefixCache::poll_prefetch)
    }

    /// When the policy lets the request go on although nothing happens.
    pub(crate) fn prefetch_deadline(&self, request: &OnRanks) -> Option<Time> {
        self.ranks[0].prefetch_deadline(&request.ranks[0])
    }

    pub(crate) fn load_back(&mut self, request: &mut OnRanks) -> Result<LoadBack, RunError> {
        self.on_request(Kind::LoadBack, request, PrefixCache::load_back)
    }

    pub(crate) fn load_state(&mut self, request: &mut OnRanks) -> Result<LoadState, RunError> {
        self.on_request(Kind::LoadState, request, |cache, request| cache.load_state(request))
    }

    pub(crate) fn alloc(&mut self, request: &mut OnRanks, pages: u32) -> Result<Alloc, RunError> {
        self.on_request(Kind::Alloc, request, |cache, request| cache.alloc(request, pages))
    }

    /// The page table on rank 0; it is the same on all.
    pub(crate) fn pages(&self, request: &OnRanks) -> Result<&[PageId], CacheError> {
        self.ranks[0].pages(&request.ranks[0])
    }

    /// Where the pages of a request lie, on each rank.
    pub(crate) fn places<'a>(
        &'a self,
        request: &'a OnRanks,
    ) -> impl Iterator<Item = Result<Places<'a>, CacheError>> {
        self.ranks.iter().zip(&request.ranks).map(|(cache, request)| {
            let config = cache.core().config();
            let components = match config.window.is_some() || config.state.is_some() {
                true => Some(cache.components(request)?),
                false => None,
            };
            Ok(Places { table: cache.pages(request)?, components })
        })
    }

    /// Whether the request has to be given a slot for its state before it computes.
    pub(crate) fn lacks_state(&self, request: &OnRanks) -> Result<bool, CacheError> {
        let cache = &self.ranks[0];
        Ok(cache.core().config().state.is_some() && cache.components(&request.ranks[0])?.state.is_none())
    }

    /// `last_use` is one fence for each rank.
    pub(crate) fn checkpoint(
        &mut self,
        request: &mut OnRanks,
        tokens: &[u32],
        last_use: &[Fence],
    ) -> Result<Checkpoint, RunError> {
        let mut fences = last_use.iter().copied();
        self.on_request(Kind::Checkpoint, request, |cache, request| {
            cache.checkpoint(request, tokens, fences.next().unwrap_or(Fence::SETTLED))
        })
    }

    pub(crate) fn finish(
        &mut self,
        request: OnRanks,
        tokens: &[u32],
        last_use: &[Fence],
    ) -> Result<(), RunError> {
        let OnRanks { ranks, mut spent } = request;
        let mut ranks = ranks.into_iter().zip(last_use);
        let (_, took) = self.on_all(Kind::Finish, |cache, _| match ranks.next() {
            Some((request, fence)) => Ok(Some(cache.finish(request, tokens, *fence)?)),
            None => Ok(None),
        })?;
        spent.add(took);
        self.requests[0].add(spent.wall);
        self.requests[1].add(spent.cpu);
        Ok(())
    }

    /// Gives a request up. What it computed has been computed: its stamps are written before a step returns.
    pub(crate) fn abort(&mut self, request: OnRanks) -> Result<(), RunError> {
        let mut ranks = request.ranks.into_iter();
        self.on_all(Kind::Abort, |cache, _| {
            ranks.next().map_or(Ok(()), |request| cache.abort(request, Fence::SETTLED))
        })?;
        Ok(())
    }

    pub(crate) fn tick(&mut self, now: Time) -> Result<(), RunError> {
        self.on_all(Kind::Tick, |cache, _| cache.tick(now))?;
        Ok(())
    }

    /// When something may happen on some rank although the scheduler does nothing.
    pub(crate) fn next_due(&self) -> Option<Time> {
        self.ranks.iter().filter_map(PrefixCache::next_due).min()
    }

    /// Pages of device and host that are not free. O(pages).
    pub(crate) fn pages_in_use(&self) -> (u64, u64) {
        let used = |tier| {
            let counts = self.cache().page_counts(tier);
            u64::from(counts.capacity_pages - counts.free_pages)
        };
        (used(Tier::Device), used(Tier::Host))
    }

    /// Call times by kind; kinds that were never called are left out.
    pub(crate) fn quantiles(&self) -> BTreeMap<&'static str, Quantiles> {
        let kinds = NAMES.iter().zip(&self.histograms).map(|(name, histogram)| (*name, histogram));
        let all = kinds
            .chain([REQUEST, REQUEST_CPU].into_iter().zip(&self.requests))
            .map(|(name, h)| (name, h.quantiles()));
        all.filter(|(_, q)| q.count > 0).collect()
    }
}
