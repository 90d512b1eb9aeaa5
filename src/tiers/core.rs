//! The core: tree, pools and ledgers under one owner. It decides; executors execute.
//!
//! Calls fall in four groups. *Requests*: [`request`](Core::request), [`match_prefix`](Core::match_prefix),
//! [`prefetch`](Core::prefetch), [`load_back`](Core::load_back), [`alloc`](Core::alloc),
//! [`checkpoint`](Core::checkpoint), [`finish`](Core::finish), [`abort`](Core::abort). *Events in*:
//! [`handle`](Core::handle), [`tick`](Core::tick). *Work out*: [`take_actions`](Core::take_actions), to be
//! carried out in order after every call of the first two groups. *Getters*. Time must not go back. No call
//! waits for anything.

use super::action::{Action, Event, PoolKind};
use super::components::{COMPONENTS, ComponentPools, pool_kind};
use super::config::{ConfigError, CoreConfig, PrefetchPolicy, Rates, WritePolicy};
use super::mirror::Mirrors;
use super::oplog::{Op, OpLog};
use super::outcome::{PageCounts, Refusal};
use super::request::{Request, RequestId};
use super::stats::Stats;
use super::{hold::Holds, load::Loads, prefetch::Prefetches, storage::Storage, write::Backups};
use crate::base::slab::Slab;
use crate::base::{Digest, Fence, NamespaceId, OpId, PageId, Tier, Time, Violation};
use crate::key::{Namespace, NamespaceError};
use crate::pool::{Capacity, Extent, PagePool, PoolError, extents_of};
use crate::tree::adaptive::AdaptiveStats;
use crate::tree::{DeviceEviction, InsertOut, Tree, TreeError};

/// Why a call failed. The request keeps what it held before the call, except where a variant says otherwise.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CoreError {
    /// No such request: finished, aborted, or of another core.
    #[error("no such request")]
    UnknownRequest,
    /// A match was asked for while the request owns pages beyond its match.
    #[error("the request owns {own_pages} pages beyond its match; finish or abort it first")]
    RequestHasPages {
        /// Pages it owns.
        own_pages: u32,
    },
    /// Fewer tokens than the request has published already.
    #[error("{tokens} tokens given, {published} are published already")]
    TokensShorter {
        /// Tokens given.
        tokens: usize,
        /// Tokens published.
        published: usize,
    },
    /// More whole pages of tokens than the request has pages.
    #[error("{tokens} tokens need {needed_pages} pages, the request has {pages}")]
    PagesMissing {
        /// Tokens given.
        tokens: usize,
        /// Whole pages of them.
        needed_pages: u32,
        /// Pages in the table.
        pages: u32,
    },
    /// The request's match has ended by itself; match again.
    #[error("the request's match has ended; match again")]
    MatchEnded,
    /// Requests are alive or operations in flight.
    #[error("{requests} requests are alive and {operations} operations in flight")]
    InUse {
        /// Requests alive.
        requests: usize,
        /// Operations in flight.
        operations: usize,
    },
    /// There is a host tier already.
    #[error("there is a host tier already; detach it first")]
    HostPresent,
    /// A load that the request rests on failed; match again.
    #[error("a load that the request rests on failed")]
    LoadFailed,
    /// A configuration that makes no sense.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The tree refused.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// A pool refused to take pages: our bug, counted.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// A run of pages that became free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Freed {
    /// Device or host.
    pub tier: Tier,
    /// Which pool of the tier.
    pub pool: PoolKind,
    /// The pages.
    pub pages: Extent,
}

/// The tiers of one rank: a pure state machine. See the module page for the order of calls.
#[derive(Debug)]
pub struct Core {
    pub(super) config: CoreConfig,
    pub(super) tree: Tree,
    pub(super) device: PagePool,
    pub(super) host: PagePool,
    pub(super) components: ComponentPools,
    pub(super) requests: Slab<Request>,
    pub(super) backups: Backups,
    pub(super) loads: Loads,
    pub(super) prefetches: Prefetches,
    pub(super) storage: Storage,
    pub(super) holds: Holds,
    pub(super) actions: Vec<Action>,
    pub(super) stats: Stats,
    pub(super) digest: Digest,
    pub(super) now: Time,
    /// Inputs since the core was made, if they are recorded.
    log: Option<OpLog>,
    /// Latest use by compute that the embedder told of; copies issued from now on come after it.
    pub(super) fence: Fence,
    /// Pages freed since the last look, for an embedder that scrubs them.
    freed: Option<Vec<Freed>>,
    /// Requests have taken or let go of device pages since the last write-ahead.
    pub(super) ahead_due: bool,
    /// Nodes used up to this tick of the tree were next in line to leave the device, at the last write-ahead.
    pub(super) ahead_used: u64,
    pub(super) mirrors: Mirrors,
    /// Measured speeds.
    pub(super) rates: Rates,
    next_op: u64,
    pub(super) scratch: Scratch,
}

/// Lists that every call fills anew, kept for their memory.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    pub(super) gone: DeviceEviction,
    pub(super) inserted: InsertOut,
    pub(super) host_pages: Vec<PageId>,
}

pub(super) fn pool_of(capacity: Capacity) -> PagePool {
    match capacity {
        Capacity::Pages(pages) => PagePool::new(pages),
        Capacity::Unlimited => PagePool::unlimited(),
    }
}

impl Core {
    /// An empty cache. O(pages) memory for the pools.
    pub fn new(config: CoreConfig) -> Result<Core, ConfigError> {
        config.validate()?;
        let tree = Tree::new(config.tree_config())?;
        Ok(Core {
            config,
            tree,
            device: pool_of(config.device),
            host: pool_of(config.host),
            components: ComponentPools::new(&config),
            requests: Slab::default(),
            backups: Backups::default(),
            loads: Loads::default(),
            prefetches: Prefetches::default(),
            storage: Storage::default(),
            holds: Holds::default(),
            actions: Vec::new(),
            stats: Stats::default(),
            digest: Digest::default(),
            now: Time::ZERO,
            fence: Fence::SETTLED,
            freed: None,
            log: None,
            ahead_due: false,
            ahead_used: 0,
            mirrors: Mirrors::default(),
            rates: Rates::default(),
            next_op: 0,
            scratch: Scratch::default(),
        })
    }

    /// Records every input from now on. Call it on a fresh core, or the log can not be replayed.
    pub fn start_log(&mut self) {
        self.log = Some(OpLog { config: self.config, ops: Vec::new() });
    }

    /// The inputs recorded since [`start_log`](Core::start_log), with the configuration that it had; recording goes on.
    #[must_use]
    pub fn log(&self) -> Option<OpLog> {
        self.log.clone()
    }

    pub(super) fn record(&mut self, op: impl FnOnce() -> Op) {
        if let Some(log) = &mut self.log {
            log.ops.push(op());
        }
    }

    /// Interns a namespace. Equal fields give equal ids.
    pub fn namespace(&mut self, namespace: &Namespace) -> Result<NamespaceId, NamespaceError> {
        self.record(|| Op::Namespace(namespace.clone()));
        self.tree.intern(namespace)
    }

    /// Tells the time and does what has become due: backups of what the step has published, store writes that wait for a
    /// retry, refills that waited for their anchor.
    pub fn tick(&mut self, now: Time) {
        self.record(|| Op::Tick(now));
        self.now = self.now.max(now);
        self.end_holds();
        self.write_due();
        self.write_ahead();
        self.settle_holding();
        self.settle_components();
        self.pump_storage();
    }

    /// Tells the speeds measured last, for [`PrefetchPolicy::Adaptive`].
    pub fn set_rates(&mut self, rates: Rates) {
        self.record(|| Op::Rates(rates));
        self.rates = rates;
    }

    /// Changes when a waiting request goes on, also for prefetches in flight.
    pub fn set_prefetch_policy(&mut self, policy: PrefetchPolicy) {
        self.record(|| Op::PrefetchPolicy(policy));
        self.config.prefetch.policy = policy;
    }

    /// Changes the write policy, and whether the host is exclusive. Copies in flight end by the new rule; what was written
    /// stays. O(nodes).
    ///
    /// # Errors
    /// A policy that this configuration can not have, or one that asks for backed-up parents while a node has a host copy
    /// under a parent without one (named; it goes when it is evicted, or when the parent is backed up). Nothing changes.
    pub fn set_write_policy(&mut self, write: WritePolicy, exclusive: bool) -> Result<(), CoreError> {
        self.record(|| Op::WritePolicy(write, exclusive));
        let config = CoreConfig { write, exclusive, ..self.config };
        config.validate()?;
        let tree = config.tree_config();
        self.tree.set_rule(tree.rule)?;
        self.tree.set_write_threshold(tree.write_threshold, tree.hits_counted);
        self.config = config;
        self.ahead_due = true;
        self.settle_holding();
        Ok(())
    }

    /// When the core wants to be ticked although nothing happens; `None`: not before the next event.
    #[must_use]
    pub fn next_timeout(&self) -> Option<Time> {
        let backups = self.backups.are_due().then_some(self.now);
        let due = [backups, self.storage.next_retry(), self.prefetches.next_timeout(), self.holds.next_end()];
        due.into_iter().flatten().min()
    }

    /// Forgets everything that is cached: the weights have changed. What a store holds stays there, under names that a
    /// later epoch does not ask for. O(nodes).
    ///
    /// # Errors
    /// A request is alive or an operation in flight: what they hold rests on the old weights. Nothing changes.
    pub fn reset(&mut self) -> Result<(), CoreError> {
        self.record(|| Op::Reset);
        let (requests, operations) = (self.requests.len(), self.operations());
        if requests > 0 || operations > 0 {
            return Err(CoreError::InUse { requests, operations });
        }
        let (mut device, mut host) = (Vec::new(), Vec::new());
        self.tree.reset(&mut device, &mut host)?;
        self.free_device(&device);
        self.free_host(&host);
        self.settle_components();
        (self.storage, self.mirrors) = (Storage::default(), Mirrors::default());
        self.backups.forget_due();
        self.ahead_used = 0;
        Ok(())
    }

    /// Takes in one event. Events of operations that do not exist (late, doubled) are counted and ignored.
    pub fn handle(&mut self, event: Event) {
        self.record(|| Op::Event(event.clone()));
        match event {
            Event::Copied { op, ok } => self.copied(op, ok),
            Event::LayerCopied { op, layers } => self.layer_copied(op, layers),
            Event::Queried { op, present } => self.queried(op, present.as_deref()),
            Event::Got { op, batch, outcomes } => self.got(op, batch, &outcomes),
            Event::Put { op, batch, outcomes } => self.put_done(op, batch, &outcomes),
        }
        self.settle_holding();
        self.pump_storage();
    }

    fn copied(&mut self, op: OpId, ok: bool) {
        if self.backups.contains(op) {
            self.backup_copied(op, ok);
        } else if self.loads.contains(op) {
            self.load_copied(op, ok);
        } else {
            self.stats.stray_events += 1;
        }
    }

    /// The actions decided since the last call, oldest first.
    pub fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// Whether there are actions to take.
    #[must_use]
    pub fn has_actions(&self) -> bool {
        !self.actions.is_empty()
    }

    /// From now on every freed page is noted for [`take_freed`](Core::take_freed).
    pub fn note_freed(&mut self) {
        self.freed.get_or_insert_default();
    }

    /// Runs of pages freed since the last call, in order. Take them before the actions: a page may have a new owner, but
    /// nothing has been written to it, and no action that names it has started.
    pub fn take_freed(&mut self) -> Vec<Freed> {
        self.freed.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Counters so far.
    #[must_use]
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// What the order that learns says of itself; `None` under another. O(ghosts + weights).
    #[must_use]
    pub fn eviction_stats(&self) -> Option<AdaptiveStats> {
        self.tree.adaptive_stats()
    }

    /// The tree, read-only.
    #[must_use]
    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &CoreConfig {
        &self.config
    }

    /// Digest of every decision so far: equal inputs give equal values.
    #[must_use]
    pub fn digest(&self) -> u64 {
        self.digest.value()
    }

    /// Operations in flight.
    #[must_use]
    pub fn operations(&self) -> usize {
        self.backups.len() + self.loads.len() + self.prefetches.len() + self.storage.writes_in_flight()
    }

    /// Whether the operation has not ended.
    #[must_use]
    pub fn is_in_flight(&self, op: OpId) -> bool {
        self.backups.has(op) || self.loads.has(op) || self.prefetches.has(op) || self.storage.has(op)
    }

    /// Requests alive.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.requests.len()
    }

    /// Who owns the pages of a tier. Host and device only; the store is not counted in pages. O(pages).
    #[must_use]
    pub fn page_counts(&self, tier: Tier) -> PageCounts {
        let (pool, request_pages, in_flight_pages) = match tier {
            Tier::Device => {
                let own: usize = self.requests.iter().map(|(_, r)| r.own().len()).sum();
                (&self.device, own as u32, 0)
            }
            Tier::Host => (&self.host, 0, self.prefetches.host_pages()),
            Tier::Store => return PageCounts::default(),
        };
        let mut cached = 0u32;
        self.tree.for_each_page(tier, |_, _| cached += 1);
        let sum = pool.free_pages() + cached + request_pages + in_flight_pages;
        PageCounts {
            capacity_pages: pool.capacity(),
            free_pages: pool.free_pages(),
            cached_pages: cached,
            request_pages,
            in_flight_pages,
            leaked_pages: i64::from(pool.capacity()) - i64::from(sum),
        }
    }

    /// Whether a page of device or host is free.
    #[must_use]
    pub fn is_free(&self, tier: Tier, page: PageId) -> bool {
        match tier {
            Tier::Device => self.device.is_free(page),
            Tier::Host => self.host.is_free(page),
            Tier::Store => false,
        }
    }

    /// Every broken rule of tree, pools and ledgers; empty is healthy. O(everything): for tests, simulation and
    /// idle moments.
    #[must_use]
    pub fn sanity(&self) -> Vec<Violation> {
        let mut found = self.tree.sanity();
        for tier in [Tier::Device, Tier::Host] {
            let pool = if tier == Tier::Device { &self.device } else { &self.host };
            let mut owners = Vec::new();
            self.tree.for_each_page(tier, |_, page| owners.push((page, "tree")));
            match tier {
                Tier::Device => {
                    let own = self.requests.iter().flat_map(|(_, r)| r.own());
                    owners.extend(own.map(|&page| (page, "request")));
                }
                _ => self.prefetches.for_each_page(PoolKind::Full, |page| owners.push((page, "prefetch"))),
            }
            audit_owners(tier, PoolKind::Full, pool, &owners, &mut found);
            for c in COMPONENTS {
                let Some(pool) = self.components.pool(c, tier) else { continue };
                let mut owners = Vec::new();
                self.tree.for_each_component_page(c, tier, |page| owners.push((page, "tree")));
                self.for_each_own_component_page(c, tier, |page, who| owners.push((page, who)));
                audit_owners(tier, pool_kind(c), pool, &owners, &mut found);
            }
        }
        found
    }

    pub(super) fn new_op(&mut self) -> OpId {
        self.next_op += 1;
        OpId(self.next_op)
    }

    /// Appends an action and puts its decision into the digest.
    pub(super) fn act(&mut self, action: Action) {
        self.digest.mix(action.op().0);
        match &action {
            Action::CopyToHost { pairs, .. } | Action::CopyToDevice { pairs, .. } => {
                for pair in pairs {
                    self.digest.mix(u64::from(pair.source.0) << 32 | u64::from(pair.target.0));
                    self.digest.mix(pair.pool.index() as u64);
                }
            }
            Action::StoreQuery { hashes, .. } => self.digest.mix(hashes.len() as u64),
            Action::StoreGet { items, .. } | Action::StorePut { items, .. } => {
                for item in items {
                    self.digest.mix(u64::from(item.host_page.0) | (item.pool.index() as u64) << 32);
                }
            }
            Action::StoreCancel { .. } => self.digest.mix(0),
        }
        self.actions.push(action);
    }

    pub(super) fn request_ref(&self, id: RequestId) -> Result<&Request, CoreError> {
        self.requests.get(id.0).ok_or(CoreError::UnknownRequest)
    }

    pub(super) fn request_mut(&mut self, id: RequestId) -> Result<&mut Request, CoreError> {
        self.requests.get_mut(id.0).ok_or(CoreError::UnknownRequest)
    }

    /// Gives device pages back. A refusal of the pool is a bug of ours: counted, and the pages stay out.
    pub(super) fn free_device(&mut self, pages: &[PageId]) {
        for &page in pages {
            self.digest.mix(u64::from(page.0));
        }
        self.note(Tier::Device, PoolKind::Full, pages);
        if self.device.free(pages).is_err() {
            self.violation("device pages freed twice");
        }
    }

    /// Gives host pages back; see [`free_device`](Core::free_device).
    pub(super) fn free_host(&mut self, pages: &[PageId]) {
        for &page in pages {
            self.digest.mix(u64::from(page.0) | 1 << 32);
        }
        self.note(Tier::Host, PoolKind::Full, pages);
        if self.host.free(pages).is_err() {
            self.violation("host pages freed twice");
        }
    }

    /// Notes pages that are about to be freed, for an embedder that wants to know.
    pub(super) fn note(&mut self, tier: Tier, pool: PoolKind, pages: &[PageId]) {
        if let Some(freed) = &mut self.freed {
            freed.extend(extents_of(pages).map(|pages| Freed { tier, pool, pages }));
        }
    }

    /// Counts a broken rule; stops a debug, test or `strict` build.
    pub(super) fn violation(&mut self, what: &str) {
        self.stats.violations += 1;
        let broken = crate::base::invariant::violated("core", what.to_owned());
        tracing::error!(%broken, "sapwood: violation");
    }

    pub(super) fn tokens_of(&self, pages: u32) -> u64 {
        u64::from(pages) * u64::from(self.config.page_size)
    }

    pub(super) fn refused(&mut self, reason: Refusal) -> Refusal {
        self.stats.refuse(reason)
    }
}

/// Every page of a pool has exactly one owner.
fn audit_owners(
    tier: Tier,
    kind: PoolKind,
    pool: &PagePool,
    owners: &[(PageId, &'static str)],
    found: &mut Vec<Violation>,
) {
    let mut owner: Vec<Option<&'static str>> = vec![None; pool.issued_pages() as usize];
    let mut broken = |rule, detail| found.push(Violation { rule, detail });
    for &(page, who) in owners {
        match owner.get_mut(page.0 as usize) {
            None => broken("page-owner", format!("{tier:?} {kind:?} {page:?} of {who} was never handed out")),
            Some(Some(first)) => {
                broken("page-owner", format!("{tier:?} {kind:?} {page:?} is owned by {first} and by {who}"));
            }
            Some(slot) => *slot = Some(who),
        }
    }
    for (index, who) in owner.iter().enumerate() {
        let page = PageId(index as u32);
        match (who, pool.is_free(page)) {
            (None, false) => {
                broken("page-leak", format!("{tier:?} {kind:?} {page:?} is neither free nor owned"));
            }
            (Some(who), true) => {
                broken("page-owner", format!("{tier:?} {kind:?} {page:?} is free and owned by {who}"));
            }
            _ => {}
        }
    }
}
