//! Store to host: ask, allocate, read in a window of batches, commit or drop.
//!
//! ```text
//! Asking --answer--> Reading --all read, or the policy says stop--> Holding --> (committed) --last batch--> gone
//!    |                  |                                              |
//!    +--nothing---------+--abort---------------------------------------+--> Draining --last batch ended--> gone
//! ```
//! *Holding* happens only where anchor repair is on and the anchor has no host copy yet. Host pages belong to the
//! operation from allocation on. Those of the stop point that is committed leave it at the commit (into the tree or
//! back to the pool, each exactly once); a page of a batch in flight leaves it when that batch has ended, in every exit.
//!
//! With windows or states a request can not go on from every page: the store is asked for *sets*, and the stop points
//! are those at whose end all components are there. If reads fail, the operation retreats to the best one left.
//!
//! Here: what it is, and the calls. `read` brings pages, `commit` hands them over.

mod commit;
mod read;

use std::collections::BTreeSet;
use std::sync::Arc;

use super::action::{Action, PageOutcome, PoolKind};
use super::components::pool_kind;
use super::config::PrefetchPolicy;
use super::core::{Core, CoreError};
use super::oplog::Op;
use super::outcome::{Prefetch, PrefetchEnd, PrefetchState, Refusal};
use super::request::RequestId;
use crate::base::containers::Map;
use crate::base::{NamespaceId, NodeId, OpId, PageId, Time};
use crate::key::{Key, PageNames};
use crate::tree::HostPin;

/// One page to read.
#[derive(Debug)]
struct Item {
    pool: PoolKind,
    /// Place behind the anchor, in pages.
    at: u32,
    /// Host page; `None` once it was given away or back.
    page: Option<PageId>,
    outcome: Option<PageOutcome>,
}

/// One read batch: a range of the operation's items.
#[derive(Clone, Copy, Debug)]
struct Batch {
    first: usize,
    last: usize,
    in_flight: bool,
}

/// What the store says it holds behind the anchor, less what could not be read since.
#[derive(Debug, Default)]
struct Presence([Vec<bool>; 3]);

impl Presence {
    fn has(&self, pool: PoolKind, at: u32) -> bool {
        self.0[pool.index()].get(at as usize).is_some_and(|&p| p)
    }

    fn lose(&mut self, pool: PoolKind, at: u32) {
        if let Some(p) = self.0[pool.index()].get_mut(at as usize) {
            *p = false;
        }
    }
}

#[derive(Debug)]
struct PrefetchOp {
    request: Option<RequestId>,
    namespace: NamespaceId,
    /// Deepest node of the match when the operation was issued. Looked at again at the commit.
    anchor: NodeId,
    /// Pages from the root to its end.
    anchor_pages: u32,
    /// Keeps the host copies up to the anchor, if it had one, until the commit (where parents need none, also what of that
    /// path is only on the device).
    pin: Option<HostPin>,
    /// Tokens from the root on, whole pages, and the names of the pages behind the anchor.
    names: PageNames,
    present: Presence,
    /// Pages the store says it holds, from the anchor on; `None` until it has answered.
    hit_pages: Option<u32>,
    /// What to read: the pages of Full in order, then those of components.
    items: Vec<Item>,
    /// First item that was not issued.
    next_item: usize,
    batches: Vec<Batch>,
    in_flight: u32,
    /// Why less is kept than was found.
    stopped: Option<Refusal>,
    /// Host pages were fewer than the hit.
    host_short: bool,
    committed: bool,
    /// Waits for a host copy of its anchor, at most until then.
    hold_until: Option<Time>,
}

/// Prefetches in flight.
#[derive(Debug, Default)]
pub(super) struct Prefetches {
    ops: Map<OpId, PrefetchOp>,
    /// Those that wait for a host copy of their anchor.
    holding: BTreeSet<OpId>,
    /// Host pages of Full held by all of them.
    held_pages: u32,
}

impl Prefetches {
    pub(super) fn has(&self, op: OpId) -> bool {
        self.ops.contains_key(&op)
    }

    pub(super) fn len(&self) -> usize {
        self.ops.len()
    }

    pub(super) fn host_pages(&self) -> u32 {
        self.held_pages
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.holding.iter().filter_map(|op| self.ops.get(op)?.hold_until).min()
    }

    /// Host pages of one pool. For audits, where order does not matter.
    pub(super) fn for_each_page(&self, pool: PoolKind, mut f: impl FnMut(PageId)) {
        let items = self.ops.values().flat_map(|p| &p.items).filter(|item| item.pool == pool);
        items.filter_map(|item| item.page).for_each(&mut f);
    }
}

impl Core {
    /// Looks for more of `tokens` in the store than device and host hold, and brings it to the host. The request
    /// may match, run and finish meanwhile. A request asks again no sooner than the configured pause after the end of its
    /// last prefetch, except where [`MatchInfo::lost_tokens`](super::MatchInfo::lost_tokens) says that what that one
    /// counted on is gone, and so often at most; the head of a queue should rather go on than ask again. Hashes the
    /// span looked up: O(tokens).
    pub fn prefetch(&mut self, id: RequestId, tokens: &[u32]) -> Result<Prefetch, CoreError> {
        self.record(|| Op::Prefetch(id, tokens.to_vec()));
        let request = self.request_ref(id)?;
        let namespace = request.namespace;
        let refused = if self.config.store.is_none() {
            return Ok(Prefetch::Refused(Refusal::NoStore));
        } else if request.prefetch.is_some() {
            Some(Refusal::AlreadyPrefetching)
        } else if request.prefetch_attempts >= self.config.prefetch.attempts_max {
            Some(Refusal::AttemptsUsed)
        } else if self.now < request.prefetch_not_before {
            Some(Refusal::Paced)
        } else {
            None
        };
        if let Some(reason) = refused {
            return Ok(Prefetch::Refused(self.refused(reason)));
        }
        let page_size = self.config.page_size as usize;
        // At least one token is always computed, so the last page is worth nothing if it ends the prompt.
        let whole = tokens.len().saturating_sub(1) / page_size * page_size;
        let found = self.tree.match_prefix(Key::new(namespace, &tokens[..whole]), &mut Vec::new());
        let anchor_pages = found.depth_pages();
        let rest = &tokens[anchor_pages as usize * page_size..whole];
        if rest.is_empty() || rest.len() < self.config.prefetch.threshold_tokens as usize {
            return Ok(Prefetch::Refused(self.refused(Refusal::BelowThreshold)));
        }
        let seed = self.tree.namespaces().seed(namespace);
        let prior = self.tree.last_hash(found.node)?.map(|hash| hash.0).or(seed);
        let whole = Key::new(namespace, &tokens[..whole]);
        let known = self.request_ref(id)?.names.as_ref();
        let names = PageNames::new(whole, self.config.page_size, anchor_pages, prior, known);
        let op = self.new_op();
        self.stats.prefetches += 1;
        self.stats.hashed_pages += u64::from(names.computed());
        let pools =
            std::iter::once(PoolKind::Full).chain(self.components.configured().map(pool_kind)).collect();
        let action = Action::StoreQuery { op, namespace, hashes: Arc::clone(names.hashes()), pools };
        let started = Prefetch::Started { op, tokens: rest.len() as u64 };
        self.prefetches.ops.insert(
            op,
            PrefetchOp {
                request: Some(id),
                namespace,
                anchor: found.node,
                anchor_pages,
                pin: self.tree.pin_host(found.node).ok(),
                names: names.clone(),
                present: Presence::default(),
                hit_pages: None,
                items: Vec::new(),
                next_item: 0,
                batches: Vec::new(),
                in_flight: 0,
                stopped: None,
                host_short: false,
                committed: false,
                hold_until: None,
            },
        );
        let request = self.request_mut(id)?;
        request.names = Some(names);
        request.prefetch = Some(op);
        request.prefetch_end = None;
        request.prefetch_attempts += 1;
        self.act(action);
        Ok(started)
    }

    /// Whether the request may go on, by the policy; ends a prefetch that has used up its time. The time is the
    /// request's: it starts when it first has to wait and goes on through further prefetches. O(1) while it waits.
    pub fn poll_prefetch(&mut self, id: RequestId) -> Result<PrefetchState, CoreError> {
        self.record(|| Op::PollPrefetch(id));
        let now = self.now;
        let request = self.request_mut(id)?;
        if let Some(end) = request.prefetch_end {
            return Ok(PrefetchState::Ended(end));
        }
        let Some(op) = request.prefetch else { return Ok(PrefetchState::Idle) };
        let since = *request.blocked_since.get_or_insert(now);
        let Some(prefetch) = self.prefetches.ops.get(&op) else { return Ok(PrefetchState::Idle) };
        let holding = prefetch.hold_until.is_some();
        let stop = match self.config.prefetch.policy {
            // A refill that waits for its anchor has its own bound.
            PrefetchPolicy::BestEffort => !holding,
            _ => self.wait_budget_us(prefetch).is_some_and(|budget| now.since(since) >= budget),
        };
        if !stop {
            return Ok(PrefetchState::Pending);
        }
        self.stop_prefetch(op, Refusal::OutOfTime);
        Ok(self.request_ref(id)?.prefetch_end.map_or(PrefetchState::Pending, PrefetchState::Ended))
    }

    /// When the policy will let the request go on although nothing happens.
    #[must_use]
    pub fn prefetch_deadline(&self, id: RequestId) -> Option<Time> {
        let request = self.requests.get(id.0)?;
        let prefetch = self.prefetches.ops.get(&request.prefetch?)?;
        Some(request.blocked_since? + self.wait_budget_us(prefetch)?)
    }

    /// How long a request waits for a prefetch by the policy; `None`: as long as it takes.
    fn wait_budget_us(&self, prefetch: &PrefetchOp) -> Option<u64> {
        let looked_up = self.tokens_of(prefetch.names.hashes().len() as u32);
        let by_formula = |base_ms: u64, per_ki_token_ms: u64| {
            let ki_tokens_ms = per_ki_token_ms.saturating_mul(looked_up) / 1024;
            base_ms.saturating_add(ki_tokens_ms).saturating_mul(1000)
        };
        match self.config.prefetch.policy {
            PrefetchPolicy::BestEffort => Some(0),
            PrefetchPolicy::WaitComplete => None,
            PrefetchPolicy::Timeout { base_ms, per_ki_token_ms } => {
                Some(by_formula(base_ms, per_ki_token_ms))
            }
            // Waiting longer than computing takes is never worth it.
            PrefetchPolicy::Adaptive if self.rates.are_known() => {
                let hit = prefetch.hit_pages.map_or(looked_up, |pages| self.tokens_of(pages));
                Some(self.rates.compute_us(hit))
            }
            PrefetchPolicy::Adaptive => {
                let PrefetchPolicy::Timeout { base_ms, per_ki_token_ms } = PrefetchPolicy::TIMEOUT_DEFAULT
                else {
                    return None;
                };
                Some(by_formula(base_ms, per_ki_token_ms))
            }
        }
    }

    /// The request does not want it any more. Idempotent.
    pub(super) fn abort_prefetch(&mut self, op: OpId) {
        let Some(prefetch) = self.prefetches.ops.get_mut(&op) else { return };
        prefetch.request = None;
        if prefetch.committed {
            return;
        }
        prefetch.committed = true;
        prefetch.stopped = Some(Refusal::Aborted);
        let hit = prefetch.hit_pages.unwrap_or(0);
        let tokens = self.tokens_of(hit);
        self.stats.drop_tokens(Refusal::Aborted, tokens);
        self.act(Action::StoreCancel { op });
        self.release_idle_pages(op);
        self.unpin_anchor(op);
        self.retire_prefetch(op);
    }

    /// The policy says go on: commit what is there; batches in flight end on their own.
    fn stop_prefetch(&mut self, op: OpId, reason: Refusal) {
        let Some(p) = self.prefetches.ops.get_mut(&op).filter(|p| !p.committed) else { return };
        p.stopped.get_or_insert(reason);
        self.act(Action::StoreCancel { op });
        self.commit_prefetch(op, Some(reason));
        self.retire_prefetch(op);
    }

    fn report_end(&mut self, op: OpId, end: PrefetchEnd) {
        let not_before = self.now + self.config.prefetch.retry_ms.saturating_mul(1000);
        let Some(p) = self.prefetches.ops.get_mut(&op) else { return };
        let anchor_tokens = u64::from(self.config.page_size) * u64::from(p.anchor_pages);
        let counted_on = anchor_tokens + end.loaded_tokens + end.redundant_tokens;
        let Some(id) = p.request.take() else { return };
        if let Some(request) = self.requests.get_mut(id.0) {
            request.prefetch_end = Some(end);
            request.prefetch = None;
            request.prefetch_not_before = not_before;
            request.counted_on_tokens = counted_on;
        }
    }
}
