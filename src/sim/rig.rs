//! The rig of the scenarios: one core, symbolic memories, a manual executor.
//!
//! Every page of every memory holds a [`Stamp`]: the name of the token prefix it was computed for. A copy reads its
//! source and writes its destination at the moment the test completes it, so a page that changed owner too early
//! shows as a wrong stamp. Freed pages are poisoned at once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::base::{Digest, Fence, NamespaceId, OpId, PageId, Tier, Time};
use crate::key::{Key, Namespace, PageHash, hash_pages};
use crate::tiers::{
    Action, Alloc, Checkpoint, Core, CoreConfig, CoreError, Event, HostTier, LoadBack, LoadState, MatchInfo,
    PageCounts, PageOutcome, PagePair, PoolKind, Prefetch, PrefetchState, RequestId, StoreConfig, StoreItem,
    WritePolicy,
};
use crate::tree::Component;

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

    /// The stamp of the page of a pool that ends `prefix`.
    #[must_use]
    pub fn in_pool(pool: PoolKind, namespace: NamespaceId, prefix: &[u32]) -> Stamp {
        let Stamp(full) = Stamp::of(namespace, prefix);
        Stamp(full.wrapping_add(pool.index() as u64))
    }
}

/// One piece of work that the core asked for and that has not ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Pending {
    /// Device to host.
    ToHost(OpId, Vec<PagePair>),
    /// Host to device.
    ToDevice(OpId, Vec<PagePair>),
    /// Which of these does the store hold, in each of the pools?
    Query(OpId, Arc<[PageHash]>, Vec<PoolKind>),
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
            | Pending::Query(op, _, _)
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

/// What a request was shown when its load began.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Shown {
    pages: Vec<PageId>,
    window_from: u32,
    window: Vec<PageId>,
    state: Option<PageId>,
}

/// Name of a page in a store: the index of its pool, and its hash.
type Name = (usize, PageHash);

/// A core with memories and a manual executor. Methods panic on what a correct core can not do: they are checks.
#[derive(Debug)]
pub struct Rig {
    /// The core.
    pub core: Core,
    /// Work in flight, oldest first.
    pub pending: Vec<Pending>,
    /// Operations whose result is not wanted any more.
    pub cancelled: Vec<OpId>,
    /// Whether each publication ends a step, so that a tick follows it at the time told last.
    steps: bool,
    now: Time,
    /// By pool.
    device: [Vec<Stamp>; 3],
    host: [Vec<Stamp>; 3],
    store: BTreeMap<Name, Stamp>,
    /// What the store lost by its own choice.
    lost: BTreeSet<Name>,
    /// What requests have matched last.
    matched: BTreeMap<RequestId, Vec<u32>>,
    /// Of requests whose loads are in flight.
    shown: BTreeMap<RequestId, Shown>,
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
            steps: true,
            now: Time::ZERO,
            device: Default::default(),
            host: Default::default(),
            store: BTreeMap::new(),
            lost: BTreeSet::new(),
            matched: BTreeMap::new(),
            shown: BTreeMap::new(),
            page_size: config.page_size as usize,
            garbage: 0,
        }
    }

    /// For whoever ticks on his own: a publication does not end a step.
    #[must_use]
    pub fn ticked_by_hand(self) -> Rig {
        Rig { steps: false, ..self }
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
        if found.is_ok() {
            self.shown.remove(&request);
            self.matched.insert(request, tokens.to_vec());
        }
        self.after();
        if found.is_ok() {
            self.verify(request, tokens);
        }
        found
    }

    /// Starts a load.
    pub fn load_back(&mut self, request: RequestId) -> Result<LoadBack, CoreError> {
        self.load_back_within(request, u32::MAX)
    }

    /// Starts a load that may take so many pages.
    pub fn load_back_within(&mut self, request: RequestId, budget_pages: u32) -> Result<LoadBack, CoreError> {
        let started = self.core.load_back_within(request, budget_pages);
        if matches!(started, Ok(LoadBack::Started { .. })) {
            let shown = self.see(request);
            self.shown.insert(request, shown);
        }
        self.after();
        started
    }

    /// What the request is shown of its shared prefix.
    fn see(&self, request: RequestId) -> Shown {
        let parts =
            self.core.request_components(request).expect("the needed part of a shared prefix is there");
        assert!(parts.complete, "no load of {request:?} has failed");
        let mut pages = self.core.pages(request).expect("a live request").to_vec();
        pages.truncate(self.own_from(request));
        let mut window = parts.window;
        window.truncate((parts.own_window_from - parts.window_from) as usize);
        Shown { pages, window_from: parts.window_from, window, state: parts.state_in }
    }

    /// From the start of its loads to their end a request is shown the same pages, and none of them is free.
    fn check_shown(&mut self) {
        let shown = std::mem::take(&mut self.shown);
        self.shown =
            shown.into_iter().filter(|(request, shown)| self.check_shown_to(*request, shown)).collect();
    }

    /// Whether its loads are in flight still.
    fn check_shown_to(&self, request: RequestId, shown: &Shown) -> bool {
        let state = self.core.load_state(request);
        if !matches!(state, Ok(LoadState::Pending { .. } | LoadState::Ready)) {
            // It has failed, or the request has gone.
            return false;
        }
        assert_eq!(self.see(request), *shown, "{request:?} is shown something else, {state:?}");
        let pools = [&shown.pages, &shown.window, &shown.state.into_iter().collect()];
        for (pool, pages) in PoolKind::ALL.into_iter().zip(pools) {
            for &page in pages {
                let free = is_free(&self.core, Tier::Device, pool, page);
                assert!(!free, "{pool:?} {page:?} is shown to {request:?} and free");
            }
        }
        if state != Ok(LoadState::Ready) {
            return true;
        }
        if let Some(tokens) = self.matched.get(&request) {
            self.verify(request, tokens);
        }
        false
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
        let parts = self.core.request_components(request).expect("a live request");
        let window = &parts.window[parts.window.len() - pages[own..].len().min(parts.window.len())..];
        for (i, page) in pages.iter().enumerate().skip(own) {
            let end = ((i + 1) * self.page_size).min(tokens.len());
            if end <= i * self.page_size {
                break;
            }
            slot(&mut self.device[0], *page, Stamp::of(namespace, &tokens[..end]));
            if let Some(&page) = window.get(i - own) {
                slot(&mut self.device[1], page, Stamp::in_pool(PoolKind::Window, namespace, &tokens[..end]));
            }
        }
        if self.core.config().state.is_some() {
            let page = parts.state.expect("a request that computes owns a state slot");
            slot(&mut self.device[2], page, Stamp::in_pool(PoolKind::State, namespace, tokens));
        }
    }

    fn own_from(&self, request: RequestId) -> usize {
        self.core.shared_pages(request).map_or(0, |pages| pages as usize)
    }

    /// Publishes.
    pub fn checkpoint(&mut self, request: RequestId, tokens: &[u32]) -> Result<Checkpoint, CoreError> {
        let published = self.core.checkpoint(request, tokens, Fence::SETTLED);
        self.step();
        if published.is_ok() {
            self.verify(request, tokens);
        }
        published
    }

    /// Publishes and closes.
    pub fn finish(&mut self, request: RequestId, tokens: &[u32]) -> Result<Checkpoint, CoreError> {
        let published = self.core.finish(request, tokens, Fence::SETTLED);
        if published.is_ok() {
            self.matched.remove(&request);
        }
        self.step();
        published
    }

    /// Closes without publishing.
    pub fn abort(&mut self, request: RequestId) -> Result<(), CoreError> {
        let aborted = self.core.abort(request, Fence::SETTLED);
        self.matched.remove(&request);
        self.after();
        aborted
    }

    /// Changes the write policy.
    pub fn set_write_policy(&mut self, write: WritePolicy, exclusive: bool) -> Result<(), CoreError> {
        let changed = self.core.set_write_policy(write, exclusive);
        self.after();
        changed
    }

    /// Takes the host tier away.
    pub fn detach_host(&mut self) -> Result<HostTier, CoreError> {
        let was = self.core.detach_host();
        self.after();
        was
    }

    /// Gives a host tier again.
    pub fn attach_host(&mut self, tier: HostTier) -> Result<(), CoreError> {
        let attached = self.core.attach_host(tier);
        self.after();
        attached
    }

    /// Puts an empty store behind the host.
    pub fn new_store(&mut self, store: StoreConfig) -> Result<(), CoreError> {
        let changed = self.core.new_store(store);
        if changed.is_ok() {
            self.store.clear();
            self.lost.clear();
        }
        self.after();
        changed
    }

    /// Tells the time.
    pub fn tick(&mut self, now: Time) {
        self.now = self.now.max(now);
        self.core.tick(now);
        self.after();
    }

    fn step(&mut self) {
        self.after();
        if self.steps {
            self.tick(self.now);
        }
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
        let found = self.core.tree().peek(Key::new(NamespaceId::DEFAULT, tokens));
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
            Pending::Query(op, hashes, pools) => {
                let names = pools.iter().flat_map(|pool| hashes.iter().map(|h| (pool.index(), *h)));
                let present = names.map(|name| self.store.contains_key(&name)).collect();
                Event::Queried { op, present: (*how != Call::Fails).then_some(present) }
            }
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
            let pool = pair.pool.index();
            let (from, into) = match to {
                Tier::Host => (&self.device[pool], &mut self.host[pool]),
                _ => (&self.host[pool], &mut self.device[pool]),
            };
            let stamp = from.get(pair.source.0 as usize).copied().unwrap_or(Stamp::POISON);
            self.garbage += 1;
            slot(into, pair.target, if *how == Call::Well { stamp } else { Stamp(self.garbage) });
        }
        Event::Copied { op, ok: *how == Call::Well }
    }

    fn get(&mut self, index: usize, item: &StoreItem, how: &Call) -> PageOutcome {
        let outcome = outcome_of(how, index);
        let pool = item.pool.index();
        let stored = self.store.get(&(pool, item.hash)).copied();
        self.garbage += 1;
        match (outcome, stored) {
            (PageOutcome::Done, Some(stamp)) => slot(&mut self.host[pool], item.host_page, stamp),
            _ => slot(&mut self.host[pool], item.host_page, Stamp(self.garbage)),
        }
        match stored {
            None => PageOutcome::Missing,
            Some(_) => outcome,
        }
    }

    fn put(&mut self, index: usize, item: &StoreItem, how: &Call) -> PageOutcome {
        let outcome = outcome_of(how, index);
        if outcome == PageOutcome::Done {
            let pool = item.pool.index();
            let stamp = self.host[pool].get(item.host_page.0 as usize).copied().unwrap_or(Stamp::POISON);
            let before = self.store.insert((pool, item.hash), stamp);
            self.lost.remove(&(pool, item.hash));
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
        if let Some(&name) = self.store.keys().nth(n) {
            self.store.remove(&name);
            self.lost.insert(name);
        }
    }

    /// Somebody else writes the pages of `tokens` to the store, except where `skips` says no.
    pub fn store_from_elsewhere(
        &mut self,
        namespace: NamespaceId,
        tokens: &[u32],
        mut skips: impl FnMut() -> bool,
    ) {
        let seed = self.core.tree().namespaces().seed(namespace);
        let mut hashes = Vec::new();
        hash_pages(Key::new(namespace, tokens), self.page_size as u32, seed, &mut hashes);
        for (i, hash) in hashes.into_iter().enumerate() {
            for pool in PoolKind::ALL {
                if !skips() {
                    let stamp = Stamp::in_pool(pool, namespace, &tokens[..(i + 1) * self.page_size]);
                    self.store.insert((pool.index(), hash), stamp);
                }
            }
        }
    }

    /// Forgets what the store holds.
    pub fn clear_store(&mut self) {
        self.lost.extend(self.store.keys());
        self.store.clear();
    }

    /// Everything that the core believes to be in the store is there, or was lost by the store's own choice.
    ///
    /// # Panics
    /// If a page is not.
    pub fn assert_stored(&self) {
        let tree = self.core.tree();
        let mut nodes = BTreeSet::new();
        tree.for_each_page(Tier::Device, |node, _| _ = nodes.insert(node));
        tree.for_each_page(Tier::Host, |node, _| _ = nodes.insert(node));
        for node in nodes.into_iter().filter(|&node| tree.is_stored(node) == Ok(true)) {
            for hash in tree.hashes(node).expect("a stored node has names") {
                let name = (PoolKind::Full.index(), *hash);
                assert!(
                    self.store.contains_key(&name) || self.lost.contains(&name),
                    "a page of node {node} counts as stored and is not in the store"
                );
            }
        }
    }

    /// Takes over the store of another rig: a restart.
    pub fn inherit_store(&mut self, other: &Rig) {
        self.store.clone_from(&other.store);
        self.lost.clone_from(&other.lost);
    }

    /// Takes the core's actions, poisons what became free, checks every rule.
    fn after(&mut self) {
        for action in self.core.take_actions() {
            match action {
                Action::CopyToHost { op, pairs, .. } => self.pending.push(Pending::ToHost(op, pairs)),
                Action::CopyToDevice { op, pairs, .. } => self.pending.push(Pending::ToDevice(op, pairs)),
                Action::StoreQuery { op, hashes, pools, .. } => {
                    self.pending.push(Pending::Query(op, hashes, pools));
                }
                Action::StoreGet { op, batch, items, .. } => {
                    self.pending.push(Pending::Get(op, batch, items))
                }
                Action::StorePut { op, batch, items, .. } => {
                    self.pending.push(Pending::Put(op, batch, items))
                }
                Action::StoreCancel { op } => self.cancelled.push(op),
            }
        }
        for pool in PoolKind::ALL {
            for tier in [Tier::Device, Tier::Host] {
                let memory = if tier == Tier::Device { &mut self.device } else { &mut self.host };
                for (index, stamp) in memory[pool.index()].iter_mut().enumerate() {
                    if is_free(&self.core, tier, pool, PageId(index as u32)) {
                        *stamp = Stamp::POISON;
                    }
                }
            }
        }
        self.check_shown();
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
            for (pool, counts) in self.counts(tier) {
                assert_eq!(counts.leaked_pages, 0, "{tier:?} {pool:?} leaks: {counts:?}");
            }
        }
        for pending in &self.pending {
            let mut held: Vec<(Tier, PoolKind, PageId)> = Vec::new();
            match pending {
                Pending::ToHost(_, pairs) => pairs.iter().for_each(|p| {
                    held.extend([(Tier::Device, p.pool, p.source), (Tier::Host, p.pool, p.target)]);
                }),
                Pending::ToDevice(_, pairs) => pairs.iter().for_each(|p| {
                    held.extend([(Tier::Host, p.pool, p.source), (Tier::Device, p.pool, p.target)]);
                }),
                Pending::Query(..) => {}
                Pending::Get(_, _, items) | Pending::Put(_, _, items) => {
                    held.extend(items.iter().map(|i| (Tier::Host, i.pool, i.host_page)));
                }
            }
            for (tier, pool, page) in held {
                let free = is_free(&self.core, tier, pool, page);
                assert!(!free, "{tier:?} {pool:?} {page:?} is free under {pending:?}");
            }
        }
    }

    /// Owners of the pages of every pool of a tier.
    fn counts(&self, tier: Tier) -> Vec<(PoolKind, PageCounts)> {
        let mut all = vec![(PoolKind::Full, self.core.page_counts(tier))];
        all.extend(COMPONENTS.map(|(pool, c)| (pool, self.core.component_counts(c, tier))));
        all
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
        let shared = self.own_from(request);
        for (i, page) in pages.iter().enumerate().take(shared) {
            self.verify_page(PoolKind::Full, *page, namespace, &tokens[..(i + 1) * self.page_size]);
        }
        let parts =
            self.core.request_components(request).expect("the needed part of a shared prefix is there");
        let places = (parts.window_from as usize..shared).zip(&parts.window);
        for (i, page) in places {
            self.verify_page(PoolKind::Window, *page, namespace, &tokens[..(i + 1) * self.page_size]);
        }
        if let Some(page) = parts.state_in {
            self.verify_page(PoolKind::State, page, namespace, &tokens[..shared * self.page_size]);
        }
    }

    fn verify_page(&self, pool: PoolKind, page: PageId, namespace: NamespaceId, prefix: &[u32]) {
        let seen = self.device[pool.index()].get(page.0 as usize).copied();
        assert_eq!(
            seen,
            Some(Stamp::in_pool(pool, namespace, prefix)),
            "{pool:?} {page:?} at the end of {} tokens\n{}",
            prefix.len(),
            self.core.tree().dump_text()
        );
    }

    /// Nothing is held by anybody but the tree (I7).
    ///
    /// # Panics
    /// If something is.
    pub fn assert_quiet(&self) {
        assert_eq!((self.core.operations(), self.core.requests()), (0, 0));
        assert!(self.core.writes_are_idle());
        assert!(self.pending.is_empty());
        for tier in [Tier::Device, Tier::Host] {
            for (pool, counts) in self.counts(tier) {
                let held = (counts.request_pages, counts.in_flight_pages, counts.leaked_pages);
                assert_eq!(held, (0, 0, 0), "{tier:?} {pool:?}");
            }
        }
        let mut tree = self.core.tree().clone();
        assert_eq!(tree.detach_host(&mut Vec::new()), Ok(()), "a pin was not given back");
        for (_, c) in COMPONENTS {
            for tier in [Tier::Device, Tier::Host] {
                tree.evict_component(c, tier, u32::MAX);
                assert_eq!(tree.component_pages(c, tier), 0, "{c:?} on {tier:?} is held by nobody");
            }
        }
        assert_eq!(self.core.tree().stats().device_pages_protected, 0, "a lock was not given back");
    }
}

const COMPONENTS: [(PoolKind, Component); 2] =
    [(PoolKind::Window, Component::Window), (PoolKind::State, Component::State)];

fn is_free(core: &Core, tier: Tier, pool: PoolKind, page: PageId) -> bool {
    match pool {
        PoolKind::Full => core.is_free(tier, page),
        PoolKind::Window => core.is_component_free(Component::Window, tier, page),
        PoolKind::State => core.is_component_free(Component::State, tier, page),
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
