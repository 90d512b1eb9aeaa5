//! Host to store: what is backed up is written once, parents before children, a bounded number of pages at a
//! time.
//!
//! The queue holds nodes, and an entry means "the path down to this node": fragments that a split made in the
//! meantime lie on that path and are written too (B36). A page counts as stored only when the store said so
//! (B37); a node with failed pages is tried again with growing waits while it still has its host copy. The windows and
//! states that a request at the end of a node needs go with it; a page of which they could not be written is not stored.

use std::collections::{BTreeMap, VecDeque};

use super::action::{Action, PageOutcome, PoolKind, StoreItem};
use super::components::pool_kind;
use super::config::StoreConfig;
use super::core::Core;
use crate::base::containers::{Map, Set};
use crate::base::plant::{Plant, is_planted};
use crate::base::{NamespaceId, NodeId, OpId, Time};
use crate::tree::{StorePlan, TreeError};

/// A node whose last write failed.
#[derive(Clone, Copy, Debug)]
struct Failing {
    /// Failed writes in a row. At the configured most the node is given up, and with it what lies below.
    attempts: u32,
    /// No write before.
    until: Time,
}

/// One node being written.
#[derive(Debug)]
struct Write {
    node: NodeId,
    /// The entry it is written for: its node, or one below it.
    entry: NodeId,
    namespace: NamespaceId,
    /// What is written: the pages of the plan, then those of components.
    items: Vec<StoreItem>,
    /// Places of the pages of the plan, counted from the root, then those of components.
    positions: Vec<u32>,
    /// Pages of the plan.
    full: usize,
    outcomes: Vec<Option<PageOutcome>>,
    /// First page of each batch issued, with whether it has ended.
    batches: Vec<(usize, bool)>,
    next_page: usize,
}

/// Store writes in flight and waiting.
#[derive(Debug, Default)]
pub(super) struct Storage {
    queue: VecDeque<NodeId>,
    retries: BTreeMap<(Time, u64), NodeId>,
    /// The entries of `retries`: one retry stands for a whole path, however many of its nodes failed.
    retrying: Set<NodeId>,
    /// By node, not by entry: a node above many entries is tried as often as any other. Only looked up, never
    /// walked in an order that counts.
    failing: Map<NodeId, Failing>,
    /// Nodes of `failing` that are given up.
    given_up: u32,
    retry_seq: u64,
    writes: Map<OpId, Write>,
    /// Writes with pages not issued yet, oldest first.
    unissued: VecDeque<OpId>,
    pages_in_flight: u32,
}

impl Storage {
    pub(super) fn has(&self, op: OpId) -> bool {
        self.writes.contains_key(&op)
    }

    pub(super) fn writes_in_flight(&self) -> usize {
        self.writes.len()
    }

    pub(super) fn next_retry(&self) -> Option<Time> {
        self.retries.first_key_value().map(|((at, _), _)| *at)
    }

    /// Nothing is being written and nothing waits.
    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.retries.is_empty() && self.writes.is_empty()
    }
}

impl Core {
    /// Whether nodes are due for a copy that the next [`tick`](Core::tick) plans.
    #[must_use]
    pub fn backups_are_due(&self) -> bool {
        self.backups.are_due()
    }

    /// Whether every page that is due for a copy has one or is on its way there, and every backed-up page has been written
    /// to the store or given up.
    #[must_use]
    pub fn writes_are_idle(&self) -> bool {
        self.storage.is_idle() && !self.backups_are_due()
    }

    /// A node got its host copy: what is worth it of the path down to it is queued for the store.
    pub(super) fn store_node(&mut self, node: NodeId) {
        let Some(config) = self.config.store else { return };
        let mut at = Some(node);
        while let Some(node) = at.filter(|&node| !self.is_worth_a_write(node, &config)) {
            self.stats.store_not_yet_pages += u64::from(self.tree.node_pages(node).unwrap_or(0));
            at = self.tree.parent(node).ok().flatten().filter(|&up| self.tree.is_stored(up) == Ok(false));
        }
        at.into_iter().for_each(|node| self.queue_for_store(node, &config));
    }

    /// A request went through `node`: what it was the deciding use of is queued for the store. O(nodes used for the first
    /// time).
    pub(super) fn store_reused(&mut self, node: NodeId) {
        let Some(config) = self.config.store.filter(|config| config.uses_min > 1) else { return };
        let mut at = Some(node);
        while let Some(node) = at.filter(|&node| self.tree.hits(node).is_ok_and(|n| n < config.uses_min)) {
            at = self.tree.parent(node).ok().flatten();
        }
        let Some(node) = at.filter(|&node| node != self.tree.root()) else { return };
        let due = self.tree.is_backed_up(node) == Ok(true) && self.tree.is_stored(node) == Ok(false);
        // Once: a write that fails is tried again on its own.
        if due && self.tree.hits(node) == Ok(config.uses_min) && self.is_worth_a_write(node, &config) {
            self.queue_for_store(node, &config);
        }
    }

    fn is_worth_a_write(&self, node: NodeId, config: &StoreConfig) -> bool {
        let used = config.uses_min <= 1 || self.tree.hits(node).is_ok_and(|n| n >= config.uses_min);
        let tokens = self.tree.pages_to_end(node).map_or(0, |pages| self.tokens_of(pages));
        used && tokens >= u64::from(config.tokens_min)
    }

    /// Queues the path down to `node`.
    fn queue_for_store(&mut self, node: NodeId, config: &StoreConfig) {
        if self.storage.queue.len() >= config.queue_nodes_max as usize {
            self.stats.store_queue_full_nodes += 1;
            return;
        }
        self.storage.queue.push_back(node);
        self.pump_storage();
    }

    /// Issues as much as the bound on pages in flight allows.
    pub(super) fn pump_storage(&mut self) {
        let Some(config) = self.config.store else { return };
        while let Some((&(at, seq), _)) = self.storage.retries.first_key_value() {
            if at > self.now {
                break;
            }
            if let Some(due) = self.storage.retries.remove(&(at, seq)) {
                self.storage.retrying.remove(&due);
                self.storage.queue.push_back(due);
            }
        }
        while self.storage.pages_in_flight + config.batch_pages <= config.pages_in_flight_max {
            if let Some(&op) = self.storage.unissued.front() {
                self.issue_write(op, config.batch_pages as usize);
            } else if let Some(entry) = self.storage.queue.pop_front() {
                self.begin_writes(entry, config.attempts_max);
            } else {
                return;
            }
        }
    }

    /// Starts a write for every node on the path that needs one, from the root down. Waits while one of them must
    /// not be tried yet; drops the entry if one of them is given up, because nothing below a hole is ever found.
    fn begin_writes(&mut self, entry: NodeId, attempts_max: u32) {
        let Ok(path) = self.unstored_path(entry) else { return };
        let path = path.filter(|path| self.storage.failing_on(path).all(|f| f.attempts < attempts_max));
        let Some(path) = path else {
            let pages = self.tree.node_pages(entry).unwrap_or(0);
            self.stats.store_put_dropped_pages += u64::from(pages);
            return;
        };
        let until = self.storage.failing_on(&path).map(|f| f.until).max().unwrap_or(Time::ZERO);
        if until > self.now {
            self.storage.retry(entry, until);
            return;
        }
        for &node in path.iter().rev() {
            let op = self.new_op();
            match self.tree.begin_store(op, node) {
                Ok(plan) => {
                    let write = self.new_write(node, entry, plan);
                    self.storage.writes.insert(op, write);
                    self.storage.unissued.push_back(op);
                }
                // Being written already, by an operation that will say how it went.
                Err(TreeError::AlreadyStoring(_)) => {}
                Err(_) => self.violation("a node on an unstored path can not be written"),
            }
        }
    }

    fn new_write(&mut self, node: NodeId, entry: NodeId, plan: StorePlan) -> Write {
        let namespace = self.tree.namespace_of(node).ok().flatten().unwrap_or(NamespaceId::DEFAULT);
        let full = plan.host_pages.len();
        let pages = plan.hashes.iter().zip(&plan.host_pages);
        let mut items: Vec<StoreItem> =
            pages.map(|(&hash, &host_page)| StoreItem { pool: PoolKind::Full, hash, host_page }).collect();
        let mut positions = plan.positions;
        let mut parts = Vec::new();
        if self.components.any() && self.tree.component_store_plan(node, &mut parts).is_err() {
            self.violation("a node that is being stored has no hashes");
        }
        for part in parts {
            let pool = pool_kind(part.component);
            items.push(StoreItem { pool, hash: part.hash, host_page: part.host_page });
            positions.push(part.position);
        }
        let outcomes = vec![None; items.len()];
        Write { node, entry, namespace, items, positions, full, outcomes, batches: Vec::new(), next_page: 0 }
    }

    /// The nodes from `node` up that are not stored, deepest first. `None`: one of them holds no host copy, so
    /// nothing below it could ever be found in the store. An error: the node is gone, and with it the reason.
    fn unstored_path(&self, node: NodeId) -> Result<Option<Vec<NodeId>>, TreeError> {
        let mut path = Vec::new();
        let mut at = Some(node);
        while let Some(node) = at
            && node != self.tree.root()
            && !self.tree.is_stored(node)?
        {
            if !self.tree.is_backed_up(node)? {
                return Ok(None);
            }
            path.push(node);
            at = self.tree.parent(node)?;
        }
        Ok(Some(path))
    }

    fn issue_write(&mut self, op: OpId, batch_pages: usize) {
        let Some(write) = self.storage.writes.get_mut(&op) else {
            self.storage.unissued.pop_front();
            return;
        };
        let first = write.next_page;
        let last = (first + batch_pages).min(write.outcomes.len());
        let items = write.items[first..last].to_vec();
        let (batch, namespace) = (write.batches.len() as u32, write.namespace);
        write.batches.push((first, false));
        write.next_page = last;
        if last == write.outcomes.len() {
            self.storage.unissued.pop_front();
        }
        self.storage.pages_in_flight += (last - first) as u32;
        self.act(Action::StorePut { op, namespace, batch, items });
    }

    /// A write batch has ended.
    pub(super) fn put_done(&mut self, op: OpId, batch: u32, outcomes: &[PageOutcome]) {
        let Some(config) = self.config.store else {
            self.stats.stray_events += 1;
            return;
        };
        let write = self.storage.writes.get_mut(&op).and_then(|w| {
            let (first, ended) = w.batches.get_mut(batch as usize)?;
            let first = *first;
            (!std::mem::replace(ended, true)).then_some((first, w))
        });
        let Some((first, write)) = write else {
            self.stats.stray_events += 1;
            return;
        };
        let last = (first + config.batch_pages as usize).min(write.outcomes.len());
        for (i, slot) in write.outcomes[first..last].iter_mut().enumerate() {
            *slot = Some(outcomes.get(i).copied().unwrap_or(PageOutcome::Failed));
        }
        self.storage.pages_in_flight -= (last - first) as u32;
        self.digest.mix(op.0);
        if write.outcomes.iter().all(Option::is_some) {
            self.write_ended(op, &config);
        }
    }

    fn write_ended(&mut self, op: OpId, config: &StoreConfig) {
        let Some(write) = self.storage.writes.remove(&op) else { return };
        let acked =
            |o: &Option<PageOutcome>| *o == Some(PageOutcome::Done) || is_planted(Plant::AckFailedPut);
        let mut stored: Vec<bool> = write.outcomes.iter().map(acked).collect();
        let done = stored.iter().filter(|&&s| s).count();
        let failed = stored.len() - done;
        // A page is stored when all of it is: else the place would be found, and nobody could go on from it.
        for at in write.full..stored.len() {
            let place = write.positions[..write.full].iter().position(|p| *p == write.positions[at]);
            if let (false, Some(place)) = (stored[at], place) {
                stored[place] = false;
            }
        }
        stored.truncate(write.full);
        self.stats.store_put_pages += done as u64;
        self.stats.store_put_failed_pages += failed as u64;
        if self.tree.end_store(op, &stored).is_err() {
            self.violation("a store write in flight is unknown to the tree");
        }
        if failed == 0 {
            self.storage.succeeded(write.node, config.attempts_max);
            return;
        }
        match self.storage.failed(write.node, self.now, config) {
            Some(until) => self.storage.retry(write.entry, until),
            None => self.stats.store_put_dropped_pages += failed as u64,
        }
    }
}

impl Storage {
    fn failing_on(&self, path: &[NodeId]) -> impl Iterator<Item = &Failing> {
        path.iter().filter_map(|node| self.failing.get(node))
    }

    /// Queues an entry again at `at`, unless it waits already.
    fn retry(&mut self, entry: NodeId, at: Time) {
        if self.retrying.insert(entry) {
            self.retry_seq += 1;
            self.retries.insert((at, self.retry_seq), entry);
        }
    }

    /// The store takes pages: what was given up may be tried again by those who come for it.
    fn succeeded(&mut self, node: NodeId, attempts_max: u32) {
        self.failing.remove(&node);
        if self.given_up > 0 {
            self.failing.retain(|_, f| f.attempts < attempts_max);
            self.given_up = 0;
        }
    }

    /// When the node may be tried again; `None`: it is given up.
    fn failed(&mut self, node: NodeId, now: Time, config: &StoreConfig) -> Option<Time> {
        // Nodes that were evicted meanwhile leave their record behind; start anew rather than grow.
        if self.failing.len() >= config.queue_nodes_max as usize {
            self.failing.clear();
            self.given_up = 0;
        }
        let record = self.failing.entry(node).or_insert(Failing { attempts: 0, until: now });
        record.attempts += 1;
        let wait_ms = config.retry_ms.saturating_mul(1 << record.attempts.min(16));
        record.until = now + wait_ms.saturating_mul(1000);
        if record.attempts < config.attempts_max {
            return Some(record.until);
        }
        self.given_up += 1;
        None
    }
}
