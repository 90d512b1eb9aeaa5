//! The cache as the scheduler calls it, with every call on the scheduler's thread timed by kind.

use std::collections::BTreeMap;

use sapwood::base::{Fence, NamespaceId, PageId, Tier, Time};
use sapwood::engine::{CacheError, PrefixCache, Request};
use sapwood::tiers::{Alloc, Checkpoint, LoadBack, LoadState, MatchInfo, Prefetch, PrefetchState};

use super::hist::{Histogram, Quantiles};

/// Kinds of calls, in the order of [`NAMES`].
#[derive(Clone, Copy)]
enum Kind {
    Match,
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

const NAMES: [&str; 10] = [
    "match",
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

/// See the module.
pub(crate) struct Calls {
    cache: PrefixCache,
    namespaces: Vec<NamespaceId>,
    histograms: Vec<Histogram>,
}

impl Calls {
    /// Wraps a cache; `namespaces` are those of the tenants.
    pub(crate) fn new(cache: PrefixCache, namespaces: Vec<NamespaceId>) -> Calls {
        Calls { cache, namespaces, histograms: NAMES.iter().map(|_| Histogram::new()).collect() }
    }

    /// The cache, for everything that is not a scheduler's call.
    pub(crate) fn cache(&self) -> &PrefixCache {
        &self.cache
    }

    /// The cache, to be closed.
    pub(crate) fn cache_mut(&mut self) -> &mut PrefixCache {
        &mut self.cache
    }

    fn timed<T>(&mut self, kind: Kind, call: impl FnOnce(&mut PrefixCache) -> T) -> T {
        let cache = &mut self.cache;
        self.histograms[kind as usize].time(|| call(cache))
    }

    pub(crate) fn request(&mut self, tenant: usize) -> Request {
        self.cache.request(self.namespaces[tenant])
    }

    pub(crate) fn match_prefix(
        &mut self,
        request: &mut Request,
        tokens: &[u32],
    ) -> Result<MatchInfo, CacheError> {
        self.timed(Kind::Match, |cache| cache.match_prefix(request, tokens))
    }

    /// `true`: the store is being asked.
    pub(crate) fn prefetch(&mut self, request: &mut Request, tokens: &[u32]) -> Result<bool, CacheError> {
        let started = self.timed(Kind::Prefetch, |cache| cache.prefetch(request, tokens))?;
        Ok(matches!(started, Prefetch::Started { .. }))
    }

    pub(crate) fn poll_prefetch(&mut self, request: &mut Request) -> Result<PrefetchState, CacheError> {
        self.timed(Kind::PollPrefetch, |cache| cache.poll_prefetch(request))
    }

    pub(crate) fn load_back(&mut self, request: &mut Request) -> Result<LoadBack, CacheError> {
        self.timed(Kind::LoadBack, |cache| cache.load_back(request))
    }

    pub(crate) fn load_state(&mut self, request: &Request) -> Result<LoadState, CacheError> {
        self.timed(Kind::LoadState, |cache| cache.load_state(request))
    }

    pub(crate) fn alloc(&mut self, request: &mut Request, pages: u32) -> Result<Alloc, CacheError> {
        self.timed(Kind::Alloc, |cache| cache.alloc(request, pages))
    }

    pub(crate) fn pages(&self, request: &Request) -> Result<&[PageId], CacheError> {
        self.cache.pages(request)
    }

    pub(crate) fn checkpoint(
        &mut self,
        request: &mut Request,
        tokens: &[u32],
        last_use: Fence,
    ) -> Result<Checkpoint, CacheError> {
        self.timed(Kind::Checkpoint, |cache| cache.checkpoint(request, tokens, last_use))
    }

    pub(crate) fn finish(
        &mut self,
        request: Request,
        tokens: &[u32],
        last_use: Fence,
    ) -> Result<(), CacheError> {
        self.timed(Kind::Finish, |cache| cache.finish(request, tokens, last_use))?;
        Ok(())
    }

    /// Gives a request up. What it computed has been computed: its stamps are written before a step returns.
    pub(crate) fn abort(&mut self, request: Request) -> Result<(), CacheError> {
        self.timed(Kind::Abort, |cache| cache.abort(request, Fence::SETTLED))
    }

    pub(crate) fn tick(&mut self, now: Time) -> Result<(), CacheError> {
        self.timed(Kind::Tick, |cache| cache.tick(now))
    }

    /// Pages of device and host that are not free. O(pages).
    pub(crate) fn pages_in_use(&self) -> (u64, u64) {
        let used = |tier| {
            let counts = self.cache.page_counts(tier);
            u64::from(counts.capacity_pages - counts.free_pages)
        };
        (used(Tier::Device), used(Tier::Host))
    }

    /// Call times by kind; kinds that were never called are left out.
    pub(crate) fn quantiles(&self) -> BTreeMap<&'static str, Quantiles> {
        let all = NAMES.iter().zip(&self.histograms).map(|(name, histogram)| (*name, histogram.quantiles()));
        all.filter(|(_, q)| q.count > 0).collect()
    }
}
