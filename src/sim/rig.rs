//! The rig of the scenarios: one core, symbolic memories, a manual executor.
//!
//! Every page of every memory holds a [`Stamp`]: the name of the token prefix it was computed for. A copy reads its
//! source and writes its destination at the moment the test completes it, so a page that changed owner too early
//! shows as a wrong stamp. Freed pages are poisoned at once.

use std::collections::BTreeMap;

use crate::base::{Digest, Fence, NamespaceId, OpId, PageId, Tier, Time};
use crate::key::{Namespace, PageHash};
use crate::tiers::{
    Action, Alloc, Checkpoint, Core, CoreConfig, CoreError, Event, LoadBack, LoadState, MatchInfo,
    PageOutcome, PagePair, Prefetch, PrefetchState, RequestId, StoreItem,
};

/// Content of a page: a name of namespace and whole token prefix up to the page's end.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Stamp(pub u64);

impl Stamp {
    /// What freed pages hold.
    pub const POISON: Stamp = Stamp(0xDEAD_DEAD_DEAD_DEAD);

    /// The stamp of the page that ends `prefix`.
    #[must_use]
    pub fn of(namespace: NamespaceId, prefix: &[u32]) -> Stamp {
        let mut digest = Digest::default();
        digest.mix(u64::from(namespace.0));
        prefix.iter().for_each(|&token| digest.mix(u64::from(token)));
        Stamp(digest.value())
    }
}

/// One piece of work that the core asked for and that has not ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Pending {
    /// Device to host.
    ToHost(OpId, Vec<PagePair>),
    /// Host to device.
    ToDevice(OpId, Vec<PagePair>),
    /// Which of these does the store hold?
    Query(OpId, Vec<PageHash>),
    /// Read from the store.
    Get(OpId, u32, Vec<StoreItem>),
    /// Write to the store.
    Put(OpId, u32, Vec<StoreItem>),
}

impl Pending {
    /// The operation.
    #[must_use]
    pub fn op(&self) -> OpId {
        match self {
            Pending::ToHost(op, _)
            | Pending::ToDevice(op, _)
            | Pending::Query(op, _)
            | Pending::Get(op, _, _)
            | Pending::Put(op, _, _) => *op,
        }
    }
}

/// How a piece of work ends.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Call {
    /// As it should.
    Well,
    /// Not at all; destinations hold garbage.
    Fails,
    /// Page by page: the outcomes given; what is missing at the end counts as failed.
    Each(Vec<PageOutcome>),
}

/// A core with memories and a manual executor. Methods panic on what a correct core can not do: they are checks.
#[derive(Debug)]
pub struct Rig {
    /// The core.
    pub core: Core,
    /// Work in flight, oldest first.
    pub pending: Vec<Pending>,
    /// Operations whose result is not wanted any more.
    pub cancelled: Vec<OpId>,
    device: Vec<Stamp>,
    host: Vec<Stamp>,
    store: BTreeMap<PageHash, Stamp>,
    page_size: usize,
    garbage: u64,
}

impl Rig {
    /// A rig around a fresh core.
    ///
    /// # Panics
    /// If the configuration is refused.
    #[must_use]
    pub fn new(config: CoreConfig) -> Rig {
        let core = Core::new(config).expect("a valid configuration");
        Rig {
            core,
            pending: Vec::new(),
            cancelled: Vec::new(),
            device: Vec::new(),
            host: Vec::new(),
            store: BTreeMap::new(),
            page_size: config.page_size as usize,
            garbage: 0,
        }
    }

    /// A namespace by salt.
    ///
    /// # Panics
    /// If the table is full.
    pub fn namespace(&mut self, salt: &str) -> NamespaceId {
        let namespace = Namespace { salt: Some(salt.to_owned()), ..Namespace::default() };
        self.core.namespace(&namespace).expect("a short name")
    }

    /// Opens a request in the default namespace.
    pub fn request(&mut self) -> RequestId {
        self.core.request(NamespaceId::DEFAULT)
    }

    /// Matches, then verifies the stamps of what it handed out.
    pub fn match_prefix(&mut self, request: RequestId, tokens: &[u32]) -> Result<MatchInfo, CoreError> {
        let found = self.core.match_prefix(request, tokens);
        self.after();
        if found.is_ok() {
            self.verify(request, tokens);
        }
        found
    }

    /// Starts a load.
    pub fn load_back(&mut self, request: RequestId) -> Result<LoadBack, CoreError> {
        let started = self.core.load_back(request);
        self.after();
        started
    }

    /// Allocates pages.
    pub fn alloc(&mut self, request: RequestId, pages: u32) -> Result<Alloc, CoreError> {
        let granted = self.core.alloc(request, pages);
        self.after();
        granted
    }

    /// Starts a prefetch.
    pub fn prefetch(&mut self, request: RequestId, tokens: &[u32]) -> Result<Prefetch, CoreError> {
        let started = self.core.prefetch(request, tokens);
        self.after();
        started
    }

    /// Asks how a prefetch is.
    pub fn poll_prefetch(&mut self, request: RequestId) -> Result<PrefetchState, CoreError> {
        let state = self.core.poll_prefetch(request);
        self.after();
        state
    }

    /// Computes the pages of `tokens` that the request owns: writes their stamps.
    ///
    /// # Panics
    /// If the request is unknown.
    pub fn compute(&mut self, request: RequestId, tokens: &[u32], namespace: NamespaceId) {
        let pages = self.core.pages(request).expect("a live request").to_vec();
        let own = self.own_from(request);
        for (i, page) in pages.iter().enumerate().skip(own) {
            let end = ((i + 1) * self.page_size).min(tokens.len());
            if end > i * self.page_size {
                slot(&mut self.device, *page, Stamp::of(namespace, &tokens[..end]));
            }
        }
    }

    fn own_from(&self, request: RequestId) -> usize {
        self.core.shared_pages(request).map_or(0, |pages| pages as usize)
    }

    /// Publishes.
    pub fn checkpoint(&mut self, request: RequestId, tokens: &[u32]) -> Result<Checkpoint, CoreError> {
        let published = self.core.checkpoint(request, tokens, Fence::SETTLED);
        self.after();
        if published.is_ok() {
            self.verify(request, tokens);
        }
        published
    }

    /// Publishes and closes.
    pub fn finish(&mut self, request: RequestId, tokens: &[u32]) -> Result<Checkpoint, CoreError> {
        let published = self.core.finish(request, tokens, Fence::SETTLED);
        self.after();
        published
    }

    /// Closes without publishing.
    pub fn abort(&mut self, request: RequestId) -> Result<(), CoreError> {
        let aborted = self.core.abort(request, Fence::SETTLED);
        self.after();
        aborted
    }

    /// Tells the time.
    pub fn tick(&mut self, now: Time) {
        self.core.tick(now);
        self.after();
    }

    /// A request that matches, loads what it can (completing copies), computes the rest, publishes and closes.
    /// Returns what the match found.
    ///
    /// # Panics
    /// If the core can not grant the pages.
    pub fn serve(&mut self, tokens: &[u32]) -> MatchInfo {
        let request = self.request();
        let found = self.match_prefix(request, tokens).expect("a match");
        if found.host_tokens > 0 && matches!(self.load_back(request), Ok(LoadBack::Started { .. })) {
            self.drain_kind(|p| matches!(p, Pending::ToDevice(..)));
            assert_eq!(self.core.load_state(request), Ok(LoadState::Ready));
            self.verify(request, tokens);
        }
        let have = self.core.pages(request).expect("a live request").len();
        let want = tokens.len().div_ceil(self.page_size) - have;
        let mut granted = self.alloc(request, want as u32).expect("a live request");
        while let Alloc::Refused { coming_pages, .. } = granted {
            assert!(coming_pages > 0, "no device pages for {want}");
            self.drain_kind(|p| matches!(p, Pending::ToHost(..)));
            granted = self.alloc(request, want as u32).expect("a live request");
        }
        self.compute(request, tokens, NamespaceId::DEFAULT);
        self.finish(request, tokens).expect("pages for every token");
        found
    }

    /// Pages of `tokens` that a look-up finds on device and host, without touching anything.
    #[must_use]
    pub fn peek(&self, tokens: &[u32]) -> (u32, u32) {
        let found = self.core.tree().peek(crate::key::Key::new(NamespaceId::DEFAULT, tokens));
        (found.device_pages, found.host_pages)
    }

    /// Ends the `index`-th piece of work and tells the core.
    ///
    /// # Panics
    /// If there is none, or the core broke a rule.
    pub fn complete(&mut self, index: usize, how: &Call) {
        let event = self.perform(index, how);
        self.feed(event);
    }

    /// Tells the core of an event.
    ///
    /// # Panics
    /// If the core broke a rule.
    pub fn feed(&mut self, event: Event) {
        self.core.handle(event);
        self.after();
    }

    /// Ends the `index`-th piece of work: moves what it moves, and returns what there is to tell.
    ///
    /// # Panics
    /// If there is none.
    pub fn perform(&mut self, index: usize, how: &Call) -> Event {
        match self.pending.remove(index) {
            Pending::ToHost(op, pairs) => self.copy(op, &pairs, Tier::Host, how),
            Pending::ToDevice(op, pairs) => self.copy(op, &pairs, Tier::Device, how),
            Pending::Query(op, hashes) => Event::Queried {
                op,
                present: (*how != Call::Fails)
                    .then(|| hashes.iter().map(|h| self.store.contains_key(h)).collect()),
            },
            Pending::Get(op, batch, items) => {
                let outcomes = items.iter().enumerate().map(|(i, item)| self.get(i, item, how)).collect();
                Event::Got { op, batch, outcomes }
            }
            Pending::Put(op, batch, items) => {
                let outcomes = items.iter().enumerate().map(|(i, item)| self.put(i, item, how)).collect();
                Event::Put { op, batch, outcomes }
            }
        }
    }

    fn copy(&mut self, op: OpId, pairs: &[PagePair], to: Tier, how: &Call) -> Event {
        for pair in pairs {
            let (from, into) = match to {
                Tier::Host => (&self.device, &mut self.host),
                _ => (&self.host, &mut self.device),
            };
            let stamp = from.get(pair.source.0 as usize).copied().unwrap_or(Stamp::POISON);
            self.garbage += 1;
            slot(into, pair.target, if *how == Call::Well { stamp } else { Stamp(self.garbage) });
        }
        Event::Copied { op, ok: *how == Call::Well }
    }

    fn get(&mut self, index: usize, item: &StoreItem, how: &Call) -> PageOutcome {
        let outcome = outcome_of(how, index);
        let stored = self.store.get(&item.hash).copied();
        self.garbage += 1;
        match (outcome, stored) {
            (PageOutcome::Done, Some(stamp)) => slot(&mut self.host, item.host_page, stamp),
            _ => slot(&mut self.host, item.host_page, Stamp(self.garbage)),
        }
        match stored {
            None => PageOutcome::Missing,
            Some(_) => outcome,
        }
    }

    fn put(&mut self, index: usize, item: &StoreItem, how: &Call) -> PageOutcome {
        let outcome = outcome_of(how, index);
        if outcome == PageOutcome::Done {
            let stamp = self.host.get(item.host_page.0 as usize).copied().unwrap_or(Stamp::POISON);
            let before = self.store.insert(item.hash, stamp);
            assert!(before.is_none_or(|b| b == stamp), "a page hash names one content");
        }
        outcome
    }

    /// Ends everything well, oldest first, until nothing is in flight.
    pub fn drain(&mut self) {
        self.drain_kind(|_| true);
    }

    /// Ends well, oldest first, what `wanted` picks, until nothing of it is in flight.
    pub fn drain_kind(&mut self, wanted: impl Fn(&Pending) -> bool) {
        while let Some(index) = self.pending.iter().position(&wanted) {
            self.complete(index, &Call::Well);
        }
    }

    /// Stamps the store holds.
    #[must_use]
    pub fn stored(&self) -> Vec<Stamp> {
        self.store.values().copied().collect()
    }

    /// The store loses the `n`-th of its pages, by its own choice.
    pub fn lose_stored(&mut self, n: usize) {
        if let Some(&hash) = self.store.keys().nth(n) {
            self.store.remove(&hash);
        }
    }

    /// Forgets what the store holds.
    pub fn clear_store(&mut self) {
        self.store.clear();
    }

    /// Takes over the store of another rig: a restart.
    pub fn inherit_store(&mut self, other: &Rig) {
        self.store = other.store.clone();
    }

    /// Takes the core's actions, poisons what became free, checks every rule.
    fn after(&mut self) {
        for action in self.core.take_actions() {
            match action {
                Action::CopyToHost { op, pairs, .. } => self.pending.push(Pending::ToHost(op, pairs)),
                Action::CopyToDevice { op, pairs, .. } => self.pending.push(Pending::ToDevice(op, pairs)),
                Action::StoreQuery { op, hashes, .. } => self.pending.push(Pending::Query(op, hashes)),
                Action::StoreGet { op, batch, items, .. } => {
                    self.pending.push(Pending::Get(op, batch, items))
                }
                Action::StorePut { op, batch, items, .. } => {
                    self.pending.push(Pending::Put(op, batch, items))
                }
                Action::StoreCancel { op } => self.cancelled.push(op),
            }
        }
        for (index, stamp) in self.device.iter_mut().enumerate() {
            if self.core.is_free(Tier::Device, PageId(index as u32)) {
                *stamp = Stamp::POISON;
            }
        }
        for (index, stamp) in self.host.iter_mut().enumerate() {
            if self.core.is_free(Tier::Host, PageId(index as u32)) {
                *stamp = Stamp::POISON;
            }
        }
        self.check();
    }

    /// Sanity of the core, conservation of pages, and that no page of work in flight is free (I1, I2, I5, I6).
    ///
    /// # Panics
    /// If a rule is broken.
    pub fn check(&self) {
        let broken = self.core.sanity();
        assert!(broken.is_empty(), "broken rules: {broken:#?}\n{}", self.core.tree().dump_text());
        for tier in [Tier::Device, Tier::Host] {
            let counts = self.core.page_counts(tier);
            assert_eq!(counts.leaked_pages, 0, "{tier:?} leaks: {counts:?}");
        }
        for pending in &self.pending {
            let (device, host): (Vec<PageId>, Vec<PageId>) = match pending {
                Pending::ToHost(_, p) => p.iter().map(|p| (p.source, p.target)).unzip(),
                Pending::ToDevice(_, p) => p.iter().map(|p| (p.target, p.source)).unzip(),
                Pending::Query(..) => (Vec::new(), Vec::new()),
                Pending::Get(_, _, i) | Pending::Put(_, _, i) => {
                    (Vec::new(), i.iter().map(|i| i.host_page).collect())
                }
            };
            for (tier, pages) in [(Tier::Device, device), (Tier::Host, host)] {
                for page in pages {
                    assert!(!self.core.is_free(tier, page), "{tier:?} {page:?} is free under {pending:?}");
                }
            }
        }
    }

    /// Every shared page of the request that may be read carries the right stamp (I8).
    ///
    /// # Panics
    /// If one does not.
    pub fn verify(&self, request: RequestId, tokens: &[u32]) {
        if self.core.load_state(request) != Ok(LoadState::Ready) {
            return;
        }
        let Ok(pages) = self.core.pages(request) else { return };
        let namespace = self.core.namespace_of(request).unwrap_or(NamespaceId::DEFAULT);
        for (i, page) in pages.iter().enumerate().take(self.own_from(request)) {
            let want = Stamp::of(namespace, &tokens[..(i + 1) * self.page_size]);
            let seen = self.device.get(page.0 as usize).copied();
            assert_eq!(
                seen,
                Some(want),
                "page {i} of {request:?} in {page:?}\n{}",
                self.core.tree().dump_text()
            );
        }
    }

    /// Nothing is held by anybody but the tree (I7).
    ///
    /// # Panics
    /// If something is.
    pub fn assert_quiet(&self) {
        assert_eq!((self.core.operations(), self.core.requests()), (0, 0));
        assert!(self.core.store_is_idle());
        assert!(self.pending.is_empty());
        for tier in [Tier::Device, Tier::Host] {
            let counts = self.core.page_counts(tier);
            assert_eq!((counts.request_pages, counts.in_flight_pages, counts.leaked_pages), (0, 0, 0));
        }
        assert_eq!(self.core.tree().stats().device_pages_protected, 0, "a lock was not given back");
    }
}

fn outcome_of(how: &Call, index: usize) -> PageOutcome {
    match how {
        Call::Well => PageOutcome::Done,
        Call::Fails => PageOutcome::Failed,
        Call::Each(outcomes) => outcomes.get(index).copied().unwrap_or(PageOutcome::Failed),
    }
}

fn slot(memory: &mut Vec<Stamp>, page: PageId, stamp: Stamp) {
    let index = page.0 as usize;
    if memory.len() <= index {
        memory.resize(index + 1, Stamp::POISON);
    }
    memory[index] = stamp;
}
