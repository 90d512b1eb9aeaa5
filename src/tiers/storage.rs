//! Host to store: what is backed up is written once, parents before children, a bounded number of pages at a
//! time.
//!
//! The queue holds nodes, and an entry means "the path down to this node": fragments that a split made in the
//! meantime lie on that path and are written too (B36). A page counts as stored only when the store said so
//! (B37); a node with failed pages is tried again with growing waits while it still has its host copy.

use std::collections::{BTreeMap, VecDeque};

use super::action::{Action, PageOutcome, StoreItem};
use super::core::Core;
use crate::base::containers::{Map, Set};
use crate::base::{NamespaceId, NodeId, OpId, Time};
use crate::tree::{StorePlan, TreeError};

#[derive(Clone, Copy, Debug)]
struct Queued {
    node: NodeId,
    attempt: u32,
}

/// One node being written.
#[derive(Debug)]
struct Write {
    /// The entry it is written for: its node, or one below it.
    queued: Queued,
    namespace: NamespaceId,
    plan: StorePlan,
    outcomes: Vec<Option<PageOutcome>>,
    /// First page of each batch issued, with whether it has ended.
    batches: Vec<(usize, bool)>,
    next_page: usize,
}

/// Store writes in flight and waiting.
#[derive(Debug, Default)]
pub(super) struct Storage {
    queue: VecDeque<Queued>,
    retries: BTreeMap<(Time, u64), Queued>,
    /// Nodes of `retries`. One retry stands for a whole path, however many of its nodes failed: with one for
    /// each, every round would multiply them by the length of the path.
    retrying: Set<NodeId>,
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
    /// Whether every backed-up page has been written to the store or given up.
    #[must_use]
    pub fn store_is_idle(&self) -> bool {
        self.storage.is_idle()
    }

    /// Queues the path down to `node` for the store.
    pub(super) fn store_node(&mut self, node: NodeId) {
        let Some(config) = self.config.store else { return };
        if self.storage.queue.len() >= config.queue_nodes_max as usize {
            self.stats.store_queue_full_nodes += 1;
            return;
        }
        self.storage.queue.push_back(Queued { node, attempt: 0 });
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
                self.storage.retrying.remove(&due.node);
                self.storage.queue.push_back(due);
            }
        }
        while self.storage.pages_in_flight + config.batch_pages <= config.pages_in_flight_max {
            if let Some(&op) = self.storage.unissued.front() {
                self.issue_write(op, config.batch_pages as usize);
            } else if let Some(queued) = self.storage.queue.pop_front() {
                self.begin_writes(queued);
            } else {
                return;
            }
        }
    }

    /// Starts a write for every node on the path that needs one, from the root down.
    fn begin_writes(&mut self, queued: Queued) {
        let Ok(path) = self.unstored_path(queued.node) else { return };
        let Some(path) = path else {
            let pages = self.tree.node_pages(queued.node).unwrap_or(0);
            self.stats.store_put_dropped_pages += u64::from(pages);
            return;
        };
        for &node in path.iter().rev() {
            let op = self.new_op();
            match self.tree.begin_store(op, node) {
                Ok(plan) => {
                    let pages = plan.host_pages.len();
                    let namespace =
                        self.tree.namespace_of(node).ok().flatten().unwrap_or(NamespaceId::DEFAULT);
                    self.storage.writes.insert(
                        op,
                        Write {
                            queued,
                            namespace,
                            plan,
                            outcomes: vec![None; pages],
                            batches: Vec::new(),
                            next_page: 0,
                        },
                    );
                    self.storage.unissued.push_back(op);
                }
                // Being written already, by an operation that will say how it went.
                Err(TreeError::AlreadyStoring(_)) => {}
                Err(_) => self.violation("a node on an unstored path can not be written"),
            }
        }
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
        let items = (first..last)
            .map(|i| StoreItem { hash: write.plan.hashes[i], host_page: write.plan.host_pages[i] })
            .collect();
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
            self.write_ended(op, config.attempts_max, config.retry_ms);
        }
    }

    fn write_ended(&mut self, op: OpId, attempts_max: u32, retry_ms: u64) {
        let Some(write) = self.storage.writes.remove(&op) else { return };
        let stored: Vec<bool> = write.outcomes.iter().map(|o| *o == Some(PageOutcome::Done)).collect();
        let done = stored.iter().filter(|&&s| s).count();
        let failed = stored.len() - done;
        self.stats.store_put_pages += done as u64;
        self.stats.store_put_failed_pages += failed as u64;
        if self.tree.end_store(op, &stored).is_err() {
            self.violation("a store write in flight is unknown to the tree");
        }
        if failed == 0 {
            return;
        }
        let attempt = write.queued.attempt + 1;
        if attempt >= attempts_max {
            self.stats.store_put_dropped_pages += failed as u64;
            return;
        }
        if !self.storage.retrying.insert(write.queued.node) {
            return;
        }
        let wait_ms = retry_ms.saturating_mul(1 << attempt.min(16));
        let at = self.now + wait_ms.saturating_mul(1000);
        self.storage.retry_seq += 1;
        let seq = self.storage.retry_seq;
        self.storage.retries.insert((at, seq), Queued { attempt, ..write.queued });
    }
}
