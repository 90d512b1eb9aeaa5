//! Store to host: ask, allocate, read in a window of batches, commit or drop.
//!
//! ```text
//! Asking --answer--> Reading --all batches ended, or the policy says stop--> (committed) --last batch--> gone
//!    |                  |
//!    +--nothing---------+--abort--> Draining --last batch ended--> gone
//! ```
//! Host pages belong to the operation from allocation on. Pages `0..completed` leave it at the commit (into the
//! tree or back to the pool, each exactly once); a page of a batch in flight leaves it when that batch has
//! ended, in every exit.

use super::action::{Action, PageOutcome, StoreItem};
use super::config::PrefetchPolicy;
use super::core::{Core, CoreError};
use super::oplog::Op;
use super::outcome::{Prefetch, PrefetchEnd, PrefetchState, Refusal};
use super::request::RequestId;
use crate::base::containers::Map;
use crate::base::{NamespaceId, NodeId, OpId, PageId, Time};
use crate::key::{Key, PageHash, hash_pages};
use crate::pool::Capacity;
use crate::tree::DropReason;

/// One read batch: a range of the operation's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Batch {
    InFlight,
    Ended,
}

#[derive(Debug)]
struct PrefetchOp {
    request: Option<RequestId>,
    namespace: NamespaceId,
    /// Deepest node of the match when the operation was issued. Checked again at the commit, never relied on.
    anchor: NodeId,
    /// Tokens behind the anchor, whole pages.
    tokens: Vec<u32>,
    hashes: Vec<PageHash>,
    /// Pages the store says it holds, from the anchor on; `None` until it has answered.
    hit_pages: Option<u32>,
    /// One page per page to read; a page given back or away is `None`.
    host_pages: Vec<Option<PageId>>,
    outcomes: Vec<Option<PageOutcome>>,
    batches: Vec<Batch>,
    in_flight: u32,
    /// No further batch is issued.
    stopped: Option<Refusal>,
    /// Host pages were fewer than the hit.
    host_short: bool,
    committed: bool,
    /// When the scheduler first had to wait for it.
    blocked_since: Option<Time>,
}

impl PrefetchOp {
    /// Pages read without a gap from the anchor on.
    fn completed(&self) -> usize {
        self.outcomes.iter().take_while(|o| **o == Some(PageOutcome::Done)).count()
    }

    fn held(&self) -> u32 {
        self.host_pages.iter().flatten().count() as u32
    }
}

/// Prefetches in flight.
#[derive(Debug, Default)]
pub(super) struct Prefetches {
    ops: Map<OpId, PrefetchOp>,
    /// Host pages held by all of them.
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

    /// For audits, where order does not matter.
    pub(super) fn for_each_host_page(&self, mut f: impl FnMut(PageId)) {
        self.ops.values().flat_map(|p| p.host_pages.iter().flatten()).for_each(|&page| f(page));
    }
}

impl Core {
    /// Looks for more of `tokens` in the store than device and host hold, and brings it to the host. The request
    /// may match, run and finish meanwhile. Hashes the span looked up: O(tokens).
    pub fn prefetch(&mut self, id: RequestId, tokens: &[u32]) -> Result<Prefetch, CoreError> {
        self.record(|| Op::Prefetch(id, tokens.to_vec()));
        let request = self.request_ref(id)?;
        let (namespace, running) = (request.namespace, request.prefetch.is_some());
        if self.config.store.is_none() {
            return Ok(Prefetch::Refused(Refusal::NoStore));
        }
        if running {
            return Ok(Prefetch::Refused(self.refused(Refusal::AlreadyPrefetching)));
        }
        let page_size = self.config.page_size as usize;
        // At least one token is always computed, so the last page is worth nothing if it ends the prompt.
        let whole = tokens.len().saturating_sub(1) / page_size * page_size;
        let found = self.tree.match_prefix(Key::new(namespace, &tokens[..whole]), &mut Vec::new());
        let rest = &tokens[found.depth_pages() as usize * page_size..whole];
        if rest.is_empty() || rest.len() < self.config.prefetch.threshold_tokens as usize {
            return Ok(Prefetch::Refused(self.refused(Refusal::BelowThreshold)));
        }
        let mut hashes = Vec::with_capacity(rest.len() / page_size);
        let seed = self.tree.namespaces().seed(namespace);
        let prior = self.tree.last_hash(found.node)?.map(|hash| hash.0).or(seed);
        hash_pages(Key::new(namespace, rest), self.config.page_size, prior, &mut hashes);
        let op = self.new_op();
        self.stats.prefetches += 1;
        let action = Action::StoreQuery { op, namespace, hashes: hashes.clone() };
        self.prefetches.ops.insert(
            op,
            PrefetchOp {
                request: Some(id),
                namespace,
                anchor: found.node,
                tokens: rest.to_vec(),
                hashes,
                hit_pages: None,
                host_pages: Vec::new(),
                outcomes: Vec::new(),
                batches: Vec::new(),
                in_flight: 0,
                stopped: None,
                host_short: false,
                committed: false,
                blocked_since: None,
            },
        );
        let request = self.request_mut(id)?;
        request.prefetch = Some(op);
        request.prefetch_end = None;
        self.act(action);
        Ok(Prefetch::Started { op, tokens: rest.len() as u64 })
    }

    /// Whether the request may go on, by the policy; ends a prefetch that has used up its time. O(1) while it
    /// waits.
    pub fn poll_prefetch(&mut self, id: RequestId) -> Result<PrefetchState, CoreError> {
        self.record(|| Op::PollPrefetch(id));
        let request = self.request_ref(id)?;
        if let Some(end) = request.prefetch_end {
            return Ok(PrefetchState::Ended(end));
        }
        let Some(op) = request.prefetch else { return Ok(PrefetchState::Idle) };
        let now = self.now;
        let Some(prefetch) = self.prefetches.ops.get_mut(&op) else { return Ok(PrefetchState::Idle) };
        let stop = match self.config.prefetch.policy {
            PrefetchPolicy::BestEffort => true,
            PrefetchPolicy::WaitComplete => false,
            PrefetchPolicy::Timeout { base_ms, per_ki_token_ms } => {
                let since = *prefetch.blocked_since.get_or_insert(now);
                let ki_tokens_ms = per_ki_token_ms.saturating_mul(prefetch.tokens.len() as u64) / 1024;
                now.since(since) >= base_ms.saturating_add(ki_tokens_ms).saturating_mul(1000)
            }
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
        let prefetch = self.prefetches.ops.get(&self.requests.get(id.0)?.prefetch?)?;
        match self.config.prefetch.policy {
            PrefetchPolicy::Timeout { base_ms, per_ki_token_ms } => {
                let ki_tokens_ms = per_ki_token_ms.saturating_mul(prefetch.tokens.len() as u64) / 1024;
                prefetch.blocked_since.map(|t| t + base_ms.saturating_add(ki_tokens_ms).saturating_mul(1000))
            }
            _ => None,
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
        self.release_idle_pages(op, 0);
        self.retire_prefetch(op);
    }

    /// The store has answered the query.
    pub(super) fn queried(&mut self, op: OpId, present: Option<&[bool]>) {
        let Some(prefetch) = self.prefetches.ops.get_mut(&op).filter(|p| p.hit_pages.is_none()) else {
            self.stats.stray_events += 1;
            return;
        };
        let asked = prefetch.hashes.len();
        let hit = present.map_or(0, |p| p.iter().take(asked).take_while(|&&x| x).count() as u32);
        prefetch.hit_pages = Some(hit);
        self.digest.mix(op.0);
        self.digest.mix(u64::from(hit));
        if self.prefetches.ops[&op].committed {
            return self.retire_prefetch(op);
        }
        let hit_tokens = self.tokens_of(hit);
        self.stats.prefetch_hit_tokens += hit_tokens;
        if hit == 0 || hit_tokens < u64::from(self.config.prefetch.threshold_tokens) {
            let reason = match (present, hit) {
                (None, _) => Refusal::StoreFailed,
                (_, 0) => Refusal::NotInStore,
                _ => Refusal::BelowThreshold,
            };
            return self.end_empty(op, hit_tokens, reason);
        }
        self.allocate_and_read(op, hit);
    }

    /// Takes host pages for the hit, or for as much of it as can be had, and starts reading.
    fn allocate_and_read(&mut self, op: OpId, hit: u32) {
        let share = match self.config.host {
            Capacity::Unlimited => u32::MAX,
            Capacity::Pages(n) => {
                (u64::from(n) * u64::from(self.config.prefetch.host_share_percent) / 100) as u32
            }
        };
        let allowed = hit.min(share.saturating_sub(self.prefetches.held_pages));
        self.make_host_room(allowed);
        let take = allowed.min(self.host.free_pages());
        if self.tokens_of(take) < u64::from(self.config.prefetch.threshold_tokens.max(1)) {
            let reason = if allowed < hit { Refusal::PrefetchShare } else { Refusal::NoHostPages };
            let hit_tokens = self.tokens_of(hit);
            return self.end_empty(op, hit_tokens, reason);
        }
        let mut pages: Vec<PageId> = Vec::with_capacity(take as usize);
        if !self.host.alloc(take, &mut pages) {
            self.violation("host room was made and is not there");
        }
        self.prefetches.held_pages += take;
        let batch_pages = self.config.prefetch.batch_pages;
        if let Some(prefetch) = self.prefetches.ops.get_mut(&op) {
            prefetch.host_pages = pages.into_iter().map(Some).collect();
            prefetch.outcomes = vec![None; take as usize];
            prefetch.host_short = take < hit;
            prefetch.batches = Vec::with_capacity(take.div_ceil(batch_pages) as usize);
        }
        self.read_more(op);
    }

    /// Issues read batches up to the window.
    fn read_more(&mut self, op: OpId) {
        let (batch_pages, window) =
            (self.config.prefetch.batch_pages as usize, self.config.prefetch.window_batches);
        loop {
            let Some(p) = self.prefetches.ops.get_mut(&op) else { return };
            let first = p.batches.len() * batch_pages;
            if p.stopped.is_some() || p.in_flight >= window || first >= p.host_pages.len() {
                return;
            }
            let last = (first + batch_pages).min(p.host_pages.len());
            let items = (first..last)
                .filter_map(|i| p.host_pages[i].map(|host_page| StoreItem { hash: p.hashes[i], host_page }))
                .collect();
            let (batch, namespace) = (p.batches.len() as u32, p.namespace);
            p.batches.push(Batch::InFlight);
            p.in_flight += 1;
            self.act(Action::StoreGet { op, namespace, batch, items });
        }
    }

    /// A read batch has ended.
    pub(super) fn got(&mut self, op: OpId, batch: u32, outcomes: &[PageOutcome]) {
        let batch_pages = self.config.prefetch.batch_pages as usize;
        let slot = self
            .prefetches
            .ops
            .get_mut(&op)
            .filter(|p| p.batches.get(batch as usize).is_some_and(|b| *b == Batch::InFlight));
        let Some(p) = slot else {
            self.stats.stray_events += 1;
            return;
        };
        p.batches[batch as usize] = Batch::Ended;
        p.in_flight -= 1;
        let first = batch as usize * batch_pages;
        let last = (first + batch_pages).min(p.outcomes.len());
        let mut failed = false;
        for (i, slot) in p.outcomes[first..last].iter_mut().enumerate() {
            let outcome = outcomes.get(i).copied().unwrap_or(PageOutcome::Failed);
            *slot = Some(outcome);
            match outcome {
                PageOutcome::Done => self.stats.store_got_pages += 1,
                PageOutcome::Corrupt => self.stats.store_corrupt_pages += 1,
                _ => {}
            }
            failed |= outcome != PageOutcome::Done;
        }
        if failed && p.stopped.is_none() {
            // What lies behind a hole can not be used.
            p.stopped = Some(Refusal::StoreFailed);
        }
        self.digest.mix(op.0);
        self.digest.mix(u64::from(batch));
        self.read_more(op);
        let Some(p) = self.prefetches.ops.get(&op) else { return };
        if p.committed {
            self.release_idle_pages(op, 0);
            self.retire_prefetch(op);
        } else if p.in_flight == 0 {
            self.commit_prefetch(op, None);
            self.retire_prefetch(op);
        }
    }

    /// The policy says go on: commit what is there; batches in flight end on their own.
    fn stop_prefetch(&mut self, op: OpId, reason: Refusal) {
        let Some(p) = self.prefetches.ops.get_mut(&op).filter(|p| !p.committed) else { return };
        p.stopped.get_or_insert(reason);
        self.act(Action::StoreCancel { op });
        self.commit_prefetch(op, Some(reason));
        self.retire_prefetch(op);
    }

    /// Ends a prefetch that brings nothing.
    fn end_empty(&mut self, op: OpId, hit_tokens: u64, reason: Refusal) {
        if let Some(p) = self.prefetches.ops.get_mut(&op) {
            p.committed = true;
            p.stopped = Some(reason);
        }
        self.stats.drop_tokens(reason, hit_tokens);
        self.refused(reason);
        let end = PrefetchEnd {
            hit_tokens,
            lost_tokens: hit_tokens,
            reason: Some(reason),
            ..PrefetchEnd::default()
        };
        self.report_end(op, end);
        self.retire_prefetch(op);
    }

    /// Hands the completed pages to the tree. The anchor is looked at now: if it is gone, or holds no host copy
    /// where the write policy demands one, everything goes back (B01).
    fn commit_prefetch(&mut self, op: OpId, stopped_by: Option<Refusal>) {
        let Some(p) = self.prefetches.ops.get_mut(&op) else { return };
        p.committed = true;
        let completed = p.completed();
        let hit_pages = p.hit_pages.unwrap_or(0);
        let pages: Vec<PageId> = p.host_pages[..completed].iter_mut().filter_map(Option::take).collect();
        self.prefetches.held_pages -= completed as u32;
        let p = &self.prefetches.ops[&op];
        let key = Key::new(p.namespace, &p.tokens[..completed * self.config.page_size as usize]);
        let (anchor, short_reason) = (
            p.anchor,
            match (stopped_by.or(p.stopped), p.host_short) {
                (Some(reason), _) => Some(reason),
                (None, true) => Some(Refusal::NoHostPages),
                (None, false) => None,
            },
        );
        let mut returned = Vec::new();
        let inserted = self.tree.insert_host(anchor, key, &pages, &p.hashes[..completed], &mut returned);
        let (kept, redundant, dropped) = match inserted {
            Ok(done) => {
                let kept = done.refilled_pages + done.attached_pages;
                (kept, done.redundant_pages, done.dropped.map(|d| (done.dropped_pages, reason_of(d))))
            }
            Err(error) => {
                tracing::error!(%error, "sapwood: a refill was refused");
                self.violation("a refill was refused");
                returned = pages;
                (0, 0, Some((completed as u32, Refusal::AnchorGone)))
            }
        };
        self.free_host(&returned);
        let mut end = PrefetchEnd {
            hit_tokens: self.tokens_of(hit_pages),
            loaded_tokens: self.tokens_of(kept),
            redundant_tokens: self.tokens_of(redundant),
            lost_tokens: self.tokens_of(hit_pages - kept - redundant),
            reason: short_reason,
        };
        let short_tokens = self.tokens_of(hit_pages - completed as u32);
        if let Some(reason) = short_reason {
            self.stats.drop_tokens(reason, short_tokens);
        }
        if let Some((pages, reason)) = dropped {
            let tokens = self.tokens_of(pages);
            self.stats.drop_tokens(reason, tokens);
            end.reason = Some(reason);
            tracing::info!(tokens, node = %anchor, reason = reason.name(), "sapwood: prefetch refill dropped");
        }
        self.stats.prefetch_loaded_tokens += end.loaded_tokens;
        self.stats.prefetch_redundant_tokens += end.redundant_tokens;
        self.digest.mix(u64::from(kept) << 32 | u64::from(redundant));
        self.report_end(op, end);
        self.release_idle_pages(op, completed);
    }

    /// Gives back the pages from `from` on that no batch in flight can write any more.
    fn release_idle_pages(&mut self, op: OpId, from: usize) {
        let batch_pages = self.config.prefetch.batch_pages as usize;
        let Some(p) = self.prefetches.ops.get_mut(&op) else { return };
        let mut idle = Vec::new();
        for (i, slot) in p.host_pages.iter_mut().enumerate().skip(from) {
            if p.batches.get(i / batch_pages) != Some(&Batch::InFlight) {
                idle.extend(slot.take());
            }
        }
        self.prefetches.held_pages -= idle.len() as u32;
        self.free_host(&idle);
    }

    fn report_end(&mut self, op: OpId, end: PrefetchEnd) {
        let Some(id) = self.prefetches.ops.get_mut(&op).and_then(|p| p.request.take()) else { return };
        if let Some(request) = self.requests.get_mut(id.0) {
            request.prefetch_end = Some(end);
            request.prefetch = None;
        }
    }

    /// Removes the record once nothing can come for it any more.
    fn retire_prefetch(&mut self, op: OpId) {
        let Some(p) = self.prefetches.ops.get(&op) else { return };
        if p.committed && p.in_flight == 0 && p.hit_pages.is_some() {
            if p.held() != 0 {
                self.release_idle_pages(op, 0);
            }
            self.prefetches.ops.remove(&op);
        }
    }
}

fn reason_of(dropped: DropReason) -> Refusal {
    match dropped {
        DropReason::AnchorNotBackedUp => Refusal::AnchorNotBackedUp,
        DropReason::AnchorGone => Refusal::AnchorGone,
        DropReason::BackupInFlight => Refusal::BackupInFlight,
    }
}
