//! The facade: one object, one owner, no call that waits.

mod tiers;

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, unbounded};

use super::builder::{Builder, Scrub};
use super::executor::{BytesMoved, Executor};
use super::report::{MissingPlane, StoreReport};
use super::request::Request;
use crate::backend::device::DeviceError;
use crate::backend::host::{HostArena, MemoryPlan};
use crate::backend::store::Store;
use crate::base::containers::Map;
use crate::base::{Fence, NamespaceId, NodeId, OpId, PageId, Tier, Time, Violation};
use crate::key::{Namespace, NamespaceError};
use crate::pool::{Geometry, Plane, PlaneId, PlaneSet, PoolKind};
use crate::tiers::{
    AgreeError, Agreement, Alloc, Checkpoint, Core, CoreError, LoadBack, LoadState, MatchInfo, OpLog,
    PageCounts, Prefetch, PrefetchPolicy, PrefetchState, Rates, RequestComponents, RequestId, Stats,
    StoreConfig, WritePolicy,
};
use crate::tree::adaptive::AdaptiveStats;
use crate::tree::{Component, SessionId};

pub use tiers::TierError;

/// Why a call failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// The core refused; the request keeps what it held.
    #[error(transparent)]
    Core(#[from] CoreError),
    /// The ranks can not go on together.
    #[error(transparent)]
    Agree(#[from] AgreeError),
    /// Under modelled delivery, an operation did not end although everything was done to end it.
    #[error("{op:?} does not end")]
    Stuck {
        /// The operation.
        op: OpId,
    },
}

/// Why a compute stream could not be tied to a copy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ComputeError {
    /// The request is unknown, or a load that it rests on failed.
    #[error(transparent)]
    Core(#[from] CoreError),
    /// The device.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Why a request was not finished. It is given back, with everything it holds.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct FinishError {
    /// What is wrong.
    pub error: CacheError,
    /// The request.
    pub request: Request,
}

impl From<FinishError> for CacheError {
    /// Drops, and so aborts, the request.
    fn from(failed: FinishError) -> CacheError {
        failed.error
    }
}

/// A prefix cache: tree, pools, policies, and the executors that move the bytes.
///
/// The life of a request: [`request`](Self::request), [`match_prefix`](Self::match_prefix), perhaps
/// [`prefetch`](Self::prefetch) and another match when it has ended, [`load_back`](Self::load_back),
/// [`alloc`](Self::alloc), compute, [`checkpoint`](Self::checkpoint) as often as wanted,
/// [`finish`](Self::finish). Call [`tick`](Self::tick) once per scheduler step.
///
/// ```
/// use std::sync::Arc;
/// use sapwood::backend::device::SoftDevice;
/// use sapwood::base::{Fence, NamespaceId};
/// use sapwood::engine::PrefixCache;
/// use sapwood::pool::{Capacities, Capacity, Geometry, Plane};
/// use sapwood::tiers::Alloc;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let geometry = Arc::new(Geometry::builder(4).plane(Plane::target(2, 64)).build()?);
/// let device = SoftDevice::threaded(Arc::clone(&geometry), Capacities::full(Capacity::Pages(8)))?;
/// let mut cache = PrefixCache::builder(geometry).device(device).build()?;
///
/// let mut first = cache.request(NamespaceId::DEFAULT);
/// assert_eq!(cache.alloc(&mut first, 3)?, Alloc::Granted);
/// cache.finish(first, &[1, 2, 3, 4, 5, 6, 7, 8, 9], Fence::SETTLED)?;
///
/// let mut second = cache.request(NamespaceId::DEFAULT);
/// let found = cache.match_prefix(&mut second, &[1, 2, 3, 4, 5, 6, 7, 8, 30])?;
/// assert_eq!((found.device_tokens, cache.pages(&second)?.len()), (8, 2));
/// drop(second); // aborts it; what it held is back at the next call
///
/// fn can_move_between_threads<T: Send>(_: &T) {}
/// can_move_between_threads(&cache);
/// # Ok(())
/// # }
/// ```
/// `docs/EMBEDDING.md` goes through every step.
#[derive(Debug)]
pub struct PrefixCache {
    geometry: Arc<Geometry>,
    arena: Arc<HostArena>,
    /// How the memory of a host tier is had.
    memory: MemoryPlan,
    core: Core,
    /// How a store that comes later is written to.
    store_config: StoreConfig,
    executor: Executor,
    agreement: Box<dyn Agreement>,
    dropped: Receiver<RequestId>,
    drops: Sender<RequestId>,
    scrub: Option<Scrub>,
    /// When the store was last told that a node is used.
    touched: Map<NodeId, Time>,
    now: Time,
}

/// What a [`PrefixCache`] is put together from.
pub(super) struct Parts {
    pub(super) geometry: Arc<Geometry>,
    pub(super) arena: Arc<HostArena>,
    pub(super) memory: MemoryPlan,
    pub(super) core: Core,
    pub(super) store_config: StoreConfig,
    pub(super) executor: Executor,
    pub(super) agreement: Box<dyn Agreement>,
    pub(super) scrub: Option<Scrub>,
}

/// A node's pages are touched in the store at most so often, in microseconds.
const TOUCH_EVERY_US: u64 = 5_000_000;
/// Nodes whose last touch is remembered; then all are forgotten, and touched once more.
const TOUCHED_MAX: usize = 65_536;

impl PrefixCache {
    /// Starts putting a cache together.
    pub fn builder(geometry: Arc<Geometry>) -> Builder {
        Builder::new(geometry)
    }

    pub(super) fn assemble(parts: Parts) -> Self {
        let Parts { geometry, arena, memory, mut core, store_config, executor, agreement, scrub } = parts;
        if scrub.is_some() {
            core.note_freed();
        }
        let (drops, dropped) = unbounded();
        PrefixCache {
            geometry,
            arena,
            memory,
            core,
            store_config,
            executor,
            agreement,
            dropped,
            drops,
            scrub,
            touched: Map::default(),
            now: Time::ZERO,
        }
    }

    /// Interns a namespace. Equal fields give equal ids.
    pub fn namespace(&mut self, namespace: &Namespace) -> Result<NamespaceId, NamespaceError> {
        let id = self.core.namespace(namespace)?;
        let seed = self.core.tree().namespaces().seed(id);
        self.executor.learn(id, seed);
        Ok(id)
    }

    /// Opens a request. It holds nothing until it matches or allocates.
    pub fn request(&mut self, namespace: NamespaceId) -> Request {
        let seed = self.core.tree().namespaces().seed(namespace);
        self.executor.learn(namespace, seed);
        Request::new(self.core.request(namespace), self.drops.clone())
    }

    /// See [`Core::match_prefix`].
    pub fn match_prefix(&mut self, request: &mut Request, tokens: &[u32]) -> Result<MatchInfo, CacheError> {
        self.take_drops();
        if self.core.load_state(request.id()) == Ok(LoadState::Failed) {
            // It gives its own pages back, and what was launched on them may still run.
            self.core.launched(self.executor.launched());
        }
        let found = self.core.match_prefix(request.id(), tokens);
        self.run_actions(self.now);
        if let Ok(found) = &found
            && self.executor.takes_touches()
        {
            self.touch_store(request, found.node);
        }
        Ok(found?)
    }

    /// Tells a store that evicts by use that what a match found is used, although it was not read there. The nodes of the
    /// path that are stored, each at most once in [`TOUCH_EVERY_US`]. O(pages of the path).
    fn touch_store(&mut self, request: &Request, node: NodeId) {
        let Ok(namespace) = self.core.namespace_of(request.id()) else { return };
        if self.touched.len() > TOUCHED_MAX {
            self.touched.clear();
        }
        let tree = self.core.tree();
        let (mut hashes, mut at) = (Vec::new(), Some(node));
        while let Some(node) = at.filter(|node| *node != tree.root()) {
            let due = self.touched.get(&node).is_none_or(|last| self.now.since(*last) >= TOUCH_EVERY_US);
            if due && tree.is_stored(node) == Ok(true) {
                self.touched.insert(node, self.now);
                hashes.extend_from_slice(tree.hashes(node).unwrap_or_default());
            }
            at = tree.parent(node).ok().flatten();
        }
        if !hashes.is_empty() {
            self.executor.touch(namespace, hashes);
        }
    }

    /// See [`Core::hold_until`].
    pub fn hold_until(&mut self, request: &mut Request, until: Time) -> Result<(), CacheError> {
        Ok(self.core.hold_until(request.id(), until)?)
    }

    /// See [`Core::open_session`].
    pub fn open_session(&mut self) -> SessionId {
        self.core.open_session()
    }

    /// See [`Core::close_session`].
    pub fn close_session(&mut self, session: SessionId) -> Result<(), CacheError> {
        Ok(self.core.close_session(session)?)
    }

    /// See [`Core::set_session`].
    pub fn set_session(&mut self, request: &mut Request, session: SessionId) -> Result<(), CacheError> {
        Ok(self.core.set_session(request.id(), session)?)
    }

    /// See [`Core::will_not_return`].
    pub fn will_not_return(&mut self, request: &mut Request) -> Result<(), CacheError> {
        Ok(self.core.will_not_return(request.id())?)
    }

    /// See [`Core::answered`].
    pub fn answered(&mut self, request: &mut Request, tokens: u32) -> Result<(), CacheError> {
        Ok(self.core.answered(request.id(), tokens)?)
    }

    /// See [`Core::expect_prefix`].
    pub fn expect_prefix(&mut self, request: &mut Request, tokens: &[u32]) -> Result<(), CacheError> {
        Ok(self.core.expect_prefix(request.id(), tokens)?)
    }

    /// See [`Core::prefetch`].
    pub fn prefetch(&mut self, request: &mut Request, tokens: &[u32]) -> Result<Prefetch, CacheError> {
        let started = self.core.prefetch(request.id(), tokens);
        self.run_actions(self.now);
        Ok(started?)
    }

    /// See [`Core::poll_prefetch`].
    pub fn poll_prefetch(&mut self, request: &mut Request) -> Result<PrefetchState, CacheError> {
        self.take_events(self.now)?;
        let state = self.core.poll_prefetch(request.id());
        self.run_actions(self.now);
        Ok(state?)
    }

    /// See [`Core::prefetch_deadline`].
    #[must_use]
    pub fn prefetch_deadline(&self, request: &Request) -> Option<Time> {
        self.core.prefetch_deadline(request.id())
    }

    /// See [`Core::load_back`].
    pub fn load_back(&mut self, request: &mut Request) -> Result<LoadBack, CacheError> {
        self.load_back_within(request, u32::MAX)
    }

    /// See [`Core::load_back_within`].
    pub fn load_back_within(
        &mut self,
        request: &mut Request,
        budget_pages: u32,
    ) -> Result<LoadBack, CacheError> {
        self.take_events(self.now)?;
        let started = self.core.load_back_within(request.id(), budget_pages);
        self.run_actions(self.now);
        Ok(started?)
    }

    /// See [`Core::load_state`]. Takes in what has ended first.
    pub fn load_state(&mut self, request: &Request) -> Result<LoadState, CacheError> {
        self.take_events(self.now)?;
        Ok(self.core.load_state(request.id())?)
    }

    /// The fence behind everything that was submitted to a compute stream so far, for [`checkpoint`](Self::checkpoint)
    /// and the like; see [`Device::note_compute`](crate::backend::device::Device::note_compute).
    pub fn note_compute(&mut self, stream: u64) -> Result<Fence, DeviceError> {
        self.executor.note_compute(stream)
    }

    /// Lets later work of a compute stream wait until the layers `..=layer` of all that the request waits for are there,
    /// without waiting here. Once per layer and stream, before the first use of the layer. `Ok(false)`: the device has not
    /// taken a load yet, or has no streams; ask again, or follow [`load_state`](Self::load_state). It goes for the pages of
    /// the request's table and for its windows and states ([`components`](Self::components)) alike: both are listed from the
    /// start of the load. O(loads of the request).
    pub fn wait_layer(&mut self, request: &Request, layer: u32, stream: u64) -> Result<bool, ComputeError> {
        let mut all = true;
        for &op in self.core.loads(request.id())? {
            all &= self.executor.wait_layer(op, layer, stream)?;
        }
        Ok(all)
    }

    /// See [`Core::alloc`]. Takes in what has ended first, so that a scheduler that only decodes can not starve.
    pub fn alloc(&mut self, request: &mut Request, pages: u32) -> Result<Alloc, CacheError> {
        self.take_events(self.now)?;
        let granted = self.core.alloc(request.id(), pages);
        if granted == Ok(Alloc::Granted) && self.executor.has_device_gaps() {
            self.will_compute(request, pages as usize)?;
        }
        self.run_actions(self.now);
        if granted != Ok(Alloc::Granted) {
            // What would make room may wait for the end of the step.
            self.executor.flush();
        }
        Ok(granted?)
    }

    /// The last pages of the request's table, its window pages and its state are going to be written anew.
    fn will_compute(&mut self, request: &Request, pages: usize) -> Result<(), CacheError> {
        let table = self.core.pages(request.id())?;
        self.executor.handed_out(PoolKind::Full, &table[table.len().saturating_sub(pages)..]);
        let own = self.core.request_components(request.id())?;
        self.executor.handed_out(PoolKind::Window, &own.window[own.window.len().saturating_sub(pages)..]);
        self.executor.handed_out(PoolKind::State, own.state.as_slice());
        Ok(())
    }

    /// Window pages and states of a request, those that its loads in flight bring included; see
    /// [`Core::request_components`]. O(window x loads of the request).
    pub fn components(&self, request: &Request) -> Result<RequestComponents, CacheError> {
        Ok(self.core.request_components(request.id())?)
    }

    /// Pages that somebody else fills, without some planes.
    pub(super) fn will_lack(
        &mut self,
        pool: PoolKind,
        pages: impl Iterator<Item = PageId>,
        planes: PlaneSet,
    ) {
        let of_pool = (0_u8..).map(PlaneId).zip(self.geometry.planes());
        let of_pool = of_pool.filter(|(id, plane)| plane.pool() == pool && planes.contains(*id));
        let lacking = of_pool.fold(PlaneSet::NONE, |set, (id, _)| set.with(id));
        if lacking != PlaneSet::NONE {
            self.executor.will_lack(pool, pages, lacking);
        }
    }

    /// The page table of a request; see [`Core::pages`].
    pub fn pages(&self, request: &Request) -> Result<&[PageId], CacheError> {
        Ok(self.core.pages(request.id())?)
    }

    /// See [`Core::checkpoint`]. Backups that this makes due start at the next [`tick`](Self::tick), or when
    /// [`alloc`](Self::alloc) finds too little room: those of a step leave together.
    pub fn checkpoint(
        &mut self,
        request: &mut Request,
        tokens: &[u32],
        last_use: Fence,
    ) -> Result<Checkpoint, CacheError> {
        self.take_events(self.now)?;
        let were_due = self.core.backups_are_due();
        let published = self.core.checkpoint(request.id(), tokens, last_use);
        self.run_actions(self.now);
        self.ask_for_a_tick(were_due);
        Ok(published?)
    }

    /// Whoever only ticks when he is woken has to be, if there are backups to plan that there were not.
    fn ask_for_a_tick(&self, were_due: bool) {
        if !were_due && self.core.backups_are_due() {
            self.executor.ring();
        }
    }

    /// See [`Core::finish`]. On failure the request comes back with the error.
    pub fn finish(
        &mut self,
        request: Request,
        tokens: &[u32],
        last_use: Fence,
    ) -> Result<Checkpoint, FinishError> {
        let were_due = self.core.backups_are_due();
        let published = self
            .take_events(self.now)
            .and_then(|()| self.core.finish(request.id(), tokens, last_use).map_err(CacheError::from));
        self.run_actions(self.now);
        self.ask_for_a_tick(were_due);
        match published {
            Ok(published) => {
                request.disarm();
                Ok(published)
            }
            Err(error) => Err(FinishError { error, request }),
        }
    }

    /// See [`Core::abort`]. Dropping the request does the same at the next call.
    pub fn abort(&mut self, request: Request, last_use: Fence) -> Result<(), CacheError> {
        let aborted = self.core.abort(request.disarm(), last_use);
        self.run_actions(self.now);
        Ok(aborted?)
    }

    /// See [`Core::let_window_go`].
    pub(super) fn let_window_go(&mut self, request: &Request, first: u32) -> Result<(), CacheError> {
        Ok(self.core.let_window_go(request.id(), first)?)
    }

    /// See [`Core::take_over`].
    pub(super) fn take_over(&mut self, to: &mut Request, from: &mut Request) -> Result<(), CacheError> {
        Ok(self.core.take_over(to.id(), from.id())?)
    }

    /// Tells the time, takes in what has ended and starts what that allows. Time must not go back. With several ranks
    /// this is a round of their [`Agreement`], and the only call that takes in what has ended.
    pub fn tick(&mut self, now: Time) -> Result<(), CacheError> {
        let now = now.max(self.now);
        self.executor.flush();
        self.take_events(now)?;
        if self.agreement.ranks() > 1 {
            self.agree(now)?;
        }
        self.now = now;
        self.core.tick(now);
        self.run_actions(now);
        self.executor.flush();
        Ok(())
    }

    /// When a [`tick`](Self::tick) will find something although the scheduler does nothing: the next modelled
    /// completion or retry, or backups that wait for the end of the step. Under [`Delivery::AsCompleted`](super::Delivery::AsCompleted) completions are not
    /// known ahead; use the waker.
    #[must_use]
    pub fn next_due(&self) -> Option<Time> {
        if self.agreement.owes() || self.executor.holds() {
            return Some(self.now);
        }
        match (self.executor.next_due(), self.core.next_timeout()) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    fn take_drops(&mut self) {
        while let Ok(id) = self.dropped.try_recv() {
            // What was launched for the request may still run: its pages come back behind all of it.
            let launched = self.executor.launched();
            if let Err(error) = self.core.abort(id, launched) {
                tracing::error!(%error, "sapwood: a dropped request is unknown");
            }
        }
    }

    /// Feeds the core what has ended by `now`, each event at its own moment.
    fn take_events(&mut self, now: Time) -> Result<(), CacheError> {
        self.take_drops();
        self.run_actions(self.now);
        if self.agreement.ranks() > 1 {
            return Ok(());
        }
        loop {
            let next = self.executor.next_event(now).map_err(|stuck| CacheError::Stuck { op: stuck.op })?;
            let Some((at, event)) = next else { return Ok(()) };
            let op = event.op();
            self.core.tick(at);
            self.core.handle(event);
            if !self.core.is_in_flight(op) {
                self.executor.forget(op);
            }
            self.run_actions(at);
        }
    }

    /// One round: reports what has ended here, and takes in what has ended on all ranks.
    fn agree(&mut self, now: Time) -> Result<(), CacheError> {
        let (mut ended, mut agreed) = (Vec::new(), Vec::new());
        while let Some((_, event)) =
            self.executor.next_event(now).map_err(|stuck| CacheError::Stuck { op: stuck.op })?
        {
            ended.push(event);
        }
        self.agreement.exchange(self.core.digest(), &mut ended, &mut agreed)?;
        self.core.tick(now);
        for event in agreed {
            let op = event.op();
            self.core.handle(event);
            if !self.core.is_in_flight(op) {
                self.executor.forget(op);
            }
            self.run_actions(now);
        }
        Ok(())
    }

    fn run_actions(&mut self, now: Time) {
        if let Some(scrub) = &mut self.scrub {
            for freed in self.core.take_freed() {
                let first = freed.pages.first.0;
                (first..first + freed.pages.pages)
                    .for_each(|page| scrub.0(freed.tier, freed.pool, PageId(page)));
            }
        }
        while self.core.has_actions() {
            for action in self.core.take_actions() {
                self.executor.start(action, now);
            }
        }
    }

    /// Counters of the core.
    #[must_use]
    pub fn stats(&self) -> &Stats {
        self.core.stats()
    }

    /// What the order of eviction that learns says of itself: how much of the memory it rules, what it hit, and what LRU would
    /// have hit in the same memory. `None` under another order. O(ghosts + weights).
    #[must_use]
    pub fn eviction_stats(&self) -> Option<AdaptiveStats> {
        self.core.eviction_stats()
    }

    /// Bytes moved, per direction.
    #[must_use]
    pub fn bytes_moved(&self) -> BytesMoved {
        self.executor.bytes()
    }

    /// Copies that the device refused or failed.
    #[must_use]
    pub fn device_faults(&self) -> u64 {
        self.executor.device_faults()
    }

    /// Digest of every decision so far.
    #[must_use]
    pub fn digest(&self) -> u64 {
        self.core.digest()
    }

    /// Who owns the pages of a tier. O(pages).
    #[must_use]
    pub fn page_counts(&self, tier: Tier) -> PageCounts {
        self.core.page_counts(tier)
    }

    /// Who owns the pages of a window or the slots of a state. O(pages).
    #[must_use]
    pub fn component_counts(&self, component: Component, tier: Tier) -> PageCounts {
        self.core.component_counts(component, tier)
    }

    /// Every broken rule; empty is healthy. O(everything).
    #[must_use]
    pub fn sanity(&self) -> Vec<Violation> {
        self.core.sanity()
    }

    /// The core, read-only.
    #[must_use]
    pub fn core(&self) -> &Core {
        &self.core
    }

    /// The geometry of the pages.
    #[must_use]
    pub fn geometry(&self) -> &Arc<Geometry> {
        &self.geometry
    }

    /// The host tier's memory.
    #[must_use]
    pub fn host_memory(&self) -> &Arc<HostArena> {
        &self.arena
    }

    /// The store.
    #[must_use]
    pub fn store(&self) -> Option<&Arc<dyn Store>> {
        self.executor.lane().map(super::lane::StoreLane::store)
    }

    /// What the store has of the planes: which are stored, which are not and why, and how many pages of each.
    #[must_use]
    pub fn store_report(&self) -> StoreReport {
        self.executor.report()
    }

    /// How many pages of the request lack which plane: they came from the store without it. Only planes of a draft can
    /// be missing; its guesses will be worse there, the answer is the same. What a load in flight brings is counted as it
    /// will be. O(pages x planes).
    pub fn missing_planes(&self, request: &Request) -> Result<Vec<MissingPlane>, CacheError> {
        let table = self.core.pages(request.id())?;
        if !self.executor.has_device_gaps() {
            return Ok(Vec::new());
        }
        let held = self.core.request_components(request.id())?;
        let missing = |(i, plane): (u8, &Plane)| {
            let pool = plane.pool();
            let pages = match pool {
                PoolKind::Full => table,
                PoolKind::Window => &held.window,
                PoolKind::State => held.state_in.as_slice(),
            };
            let lacks = |page: &&PageId| self.executor.device_gap(pool, **page).contains(PlaneId(i));
            let pages = pages.iter().filter(lacks).count() as u32;
            (pages > 0).then_some(MissingPlane { kind: plane.kind(), pool, pages })
        };
        Ok((0_u8..).zip(self.geometry.planes()).filter_map(missing).collect())
    }

    /// Changes the write policy while requests run, and whether the host tier is exclusive; see
    /// [`Core::set_write_policy`]. Refused, with nothing changed, as long as the tree holds what the new policy forbids.
    pub fn set_write_policy(&mut self, write: WritePolicy, exclusive: bool) -> Result<(), CacheError> {
        self.take_events(self.now)?;
        let changed = self.core.set_write_policy(write, exclusive);
        self.run_actions(self.now);
        Ok(changed?)
    }

    /// Changes when a request that waits for a prefetch goes on; see [`Core::set_prefetch_policy`].
    pub fn set_prefetch_policy(&mut self, policy: PrefetchPolicy) {
        self.core.set_prefetch_policy(policy);
    }

    /// Tells the speeds measured last; see [`Core::set_rates`]. With several ranks all of them must be told the same, before
    /// the same call.
    pub fn set_rates(&mut self, rates: Rates) {
        self.core.set_rates(rates);
    }

    /// All inputs of the core so far, for `sapwood check`, if the builder was told to
    /// [record](super::Builder::record_ops) them. O(inputs).
    #[must_use]
    pub fn op_log(&self) -> Option<OpLog> {
        self.core.log()
    }

    /// Whether nothing is in flight and nothing waits to be written to the store.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.core.operations() == 0
            && self.core.writes_are_idle()
            && self.dropped.is_empty()
            && !self.agreement.owes()
    }

    /// Waits, up to `wait_max`, until copies in flight have ended, and takes no more. Returns how many have not.
    pub fn close(&mut self, wait_max: Duration) -> u32 {
        self.executor.close(wait_max)
    }
}
