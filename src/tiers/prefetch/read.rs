//! The answer of the store, host pages, and the read batches.

use super::super::action::{Action, PageOutcome, PoolKind, StoreItem};
use super::super::components::{COMPONENTS, pool_kind};
use super::super::config::PrefetchPolicy;
use super::super::core::Core;
use super::super::outcome::{PrefetchEnd, Refusal};
use super::{Batch, Item, PrefetchOp};
use crate::base::plant::{Plant, is_planted};
use crate::base::{OpId, PageId, Tier};
use crate::pool::Capacity;
use crate::tree::Component;

impl PrefetchOp {
    /// Pages of Full read without a gap from the anchor on.
    pub(super) fn completed(&self) -> u32 {
        let full = self.items.iter().take_while(|item| item.pool == PoolKind::Full);
        full.take_while(|item| item.outcome == Some(PageOutcome::Done)).count() as u32
    }

    /// Whether a page was read and is still held.
    fn is_read(&self, pool: PoolKind, at: u32) -> bool {
        self.find_read(pool, at).is_some()
    }

    /// The item that brought a page.
    pub(super) fn find_read(&self, pool: PoolKind, at: u32) -> Option<usize> {
        let done = |item: &Item| {
            (item.pool, item.at) == (pool, at)
                && item.outcome == Some(PageOutcome::Done)
                && item.page.is_some()
        };
        match pool {
            PoolKind::Full => self.items.get(at as usize).is_some_and(done).then_some(at as usize),
            _ => self.items.iter().rposition(done),
        }
    }

    fn ended(&self) -> bool {
        self.in_flight == 0 && self.next_item == self.items.len()
    }
}

impl Core {
    /// Deepest place of at most `most` pages behind an anchor from which a request can go on, given which pages there are.
    /// What lies above the anchor was enough to go on from there.
    pub(super) fn best_stop(&self, most: u32, has: impl Fn(PoolKind, u32) -> bool) -> u32 {
        let span = self.config.window.map_or(0, |w| w.span_pages);
        let (mut best, mut run) = (0, span);
        for at in 0..most {
            if !has(PoolKind::Full, at) {
                break;
            }
            run = if span > 0 && !has(PoolKind::Window, at) { 0 } else { run.saturating_add(1) };
            if run >= span && (self.config.state.is_none() || has(PoolKind::State, at)) {
                best = at + 1;
            }
        }
        best
    }

    /// Places behind the anchor that a request at `stop` needs of a component.
    pub(super) fn places_for(&self, c: Component, stop: u32) -> std::ops::Range<u32> {
        let span = match c {
            Component::Window => self.config.window.map_or(0, |w| w.span_pages),
            Component::State => u32::from(self.config.state.is_some()),
        };
        stop - span.min(stop)..stop
    }

    /// The store has answered the query.
    pub(in crate::tiers) fn queried(&mut self, op: OpId, present: Option<&[bool]>) {
        let Some(p) = self.prefetches.ops.get_mut(&op).filter(|p| p.hit_pages.is_none()) else {
            self.stats.stray_events += 1;
            return;
        };
        let asked = p.names.hashes().len();
        let mut answers = present.unwrap_or_default().chunks(asked.max(1));
        for pool in std::iter::once(PoolKind::Full).chain(self.components.configured().map(pool_kind)) {
            p.present.0[pool.index()] = answers.next().unwrap_or_default().to_vec();
        }
        let hit = (0..asked as u32).take_while(|&at| p.present.has(PoolKind::Full, at)).count() as u32;
        p.hit_pages = Some(hit);
        let committed = p.committed;
        self.digest.mix(op.0);
        self.digest.mix(u64::from(hit));
        if committed {
            return self.retire_prefetch(op);
        }
        let hit_tokens = self.tokens_of(hit);
        self.stats.prefetch_hit_tokens += hit_tokens;
        let stop = self.present_stop(op, hit);
        self.digest.mix(u64::from(stop));
        let slower = self.config.prefetch.policy == PrefetchPolicy::Adaptive
            && self.rates.are_known()
            && self.rates.load_us(self.tokens_of(stop)) >= self.rates.compute_us(self.tokens_of(stop));
        let reason = match (present, hit) {
            (None, _) => Refusal::StoreFailed,
            (_, 0) => Refusal::NotInStore,
            _ if hit_tokens < u64::from(self.config.prefetch.threshold_tokens) => Refusal::BelowThreshold,
            _ if stop == 0 => Refusal::NotRestorable,
            _ if self.tokens_of(stop) < u64::from(self.config.prefetch.threshold_tokens) => {
                Refusal::BelowThreshold
            }
            _ if slower => Refusal::SlowerThanCompute,
            _ => return self.allocate_and_read(op, hit, stop),
        };
        self.end_empty(op, hit_tokens, reason);
    }

    /// Deepest stop point within `most` pages by what the store says it holds.
    fn present_stop(&self, op: OpId, most: u32) -> u32 {
        let Some(p) = self.prefetches.ops.get(&op) else { return 0 };
        self.best_stop(most, |pool, at| p.present.has(pool, at))
    }

    /// Deepest stop point of which every page was read.
    pub(super) fn read_stop(&self, op: OpId) -> u32 {
        let Some(p) = self.prefetches.ops.get(&op) else { return 0 };
        self.best_stop(p.completed(), |pool, at| p.is_read(pool, at))
    }

    /// Takes host pages for the hit, or for as much of it as can be had, and starts reading.
    fn allocate_and_read(&mut self, op: OpId, hit: u32, stop: u32) {
        let share = match self.config.host {
            Capacity::Unlimited => u32::MAX,
            Capacity::Pages(n) => {
                (u64::from(n) * u64::from(self.config.prefetch.host_share_percent) / 100) as u32
            }
        };
        let allowed = stop.min(share.saturating_sub(self.prefetches.held_pages));
        self.make_host_room(allowed);
        self.settle_components();
        let room = allowed.min(self.host.free_pages());
        let take = if room < stop { self.present_stop(op, room) } else { stop };
        let enough = take > 0 && self.tokens_of(take) >= u64::from(self.config.prefetch.threshold_tokens);
        if !enough || !self.want_components(op, take) {
            let reason = match (enough, allowed < stop) {
                (false, true) => Refusal::PrefetchShare,
                (false, false) => Refusal::NoHostPages,
                (true, _) => Refusal::NoComponentPages,
            };
            let hit_tokens = self.tokens_of(hit);
            return self.end_empty(op, hit_tokens, reason);
        }
        let mut pages: Vec<PageId> = Vec::with_capacity(take as usize);
        if !self.host.alloc(take, &mut pages) {
            self.violation("host room was made and is not there");
        }
        self.prefetches.held_pages += take;
        if let Some(p) = self.prefetches.ops.get_mut(&op) {
            p.host_short = take < stop;
            let full = (0..).zip(pages).map(|(at, page)| Item {
                pool: PoolKind::Full,
                at,
                page: Some(page),
                outcome: None,
            });
            p.items.splice(0..0, full);
        }
        self.read_more(op);
    }

    /// Adds the component pages that a request at `stop` needs to what is to be read. All or nothing.
    fn want_components(&mut self, op: OpId, stop: u32) -> bool {
        let mut wanted: Vec<Item> = Vec::new();
        for c in COMPONENTS {
            let Some(p) = self.prefetches.ops.get(&op) else { return false };
            let places: Vec<u32> =
                self.places_for(c, stop).filter(|&at| !p.is_read(pool_kind(c), at)).collect();
            let mut pages = Vec::new();
            if !self.alloc_component(c, Tier::Host, places.len() as u32, &mut pages) {
                for item in wanted {
                    let c = COMPONENTS[item.pool.index() - 1];
                    self.free_component(c, Tier::Host, item.page.as_slice());
                }
                return false;
            }
            let items = places.into_iter().zip(pages);
            wanted.extend(items.map(|(at, page)| Item {
                pool: pool_kind(c),
                at,
                page: Some(page),
                outcome: None,
            }));
        }
        if let Some(p) = self.prefetches.ops.get_mut(&op) {
            p.items.append(&mut wanted);
        }
        true
    }

    /// Issues read batches up to the window.
    fn read_more(&mut self, op: OpId) {
        let (batch_pages, window) =
            (self.config.prefetch.batch_pages as usize, self.config.prefetch.window_batches);
        loop {
            let Some(p) = self.prefetches.ops.get_mut(&op) else { return };
            let first = p.next_item;
            if p.committed || p.in_flight >= window || first >= p.items.len() {
                return;
            }
            let last = (first + batch_pages).min(p.items.len());
            let items = p.items[first..last]
                .iter()
                .filter_map(|item| {
                    let (pool, hash) = (item.pool, p.names.hashes()[item.at as usize]);
                    item.page.map(|host_page| StoreItem { pool, hash, host_page })
                })
                .collect();
            let (batch, namespace) = (p.batches.len() as u32, p.namespace);
            p.batches.push(Batch { first, last, in_flight: true });
            p.next_item = last;
            p.in_flight += 1;
            self.act(Action::StoreGet { op, namespace, batch, items });
        }
    }

    /// A read batch has ended.
    pub(in crate::tiers) fn got(&mut self, op: OpId, batch: u32, outcomes: &[PageOutcome]) {
        let ends = |p: &&mut PrefetchOp| p.batches.get(batch as usize).is_some_and(|b| b.in_flight);
        let Some(p) = self.prefetches.ops.get_mut(&op).filter(ends) else {
            self.stats.stray_events += 1;
            return;
        };
        let Batch { first, last, .. } = p.batches[batch as usize];
        p.batches[batch as usize].in_flight = false;
        p.in_flight -= 1;
        let mut hole = false;
        for (i, item) in p.items[first..last].iter_mut().enumerate() {
            let outcome = outcomes.get(i).copied().unwrap_or(PageOutcome::Failed);
            item.outcome = Some(outcome);
            match outcome {
                PageOutcome::Done => self.stats.store_got_pages += 1,
                PageOutcome::Corrupt => self.stats.store_corrupt_pages += 1,
                _ => {}
            }
            if outcome != PageOutcome::Done {
                p.present.lose(item.pool, item.at);
                hole = true;
            }
        }
        if hole {
            // What lies behind a hole can not be used, and what was to complete it is of no use.
            p.stopped.get_or_insert(Refusal::StoreFailed);
            p.next_item = p.items.len();
        }
        self.digest.mix(op.0);
        self.digest.mix(u64::from(batch));
        self.read_more(op);
        let Some(p) = self.prefetches.ops.get(&op) else { return };
        if p.committed {
            self.release_idle_pages(op);
            self.retire_prefetch(op);
        } else if p.ended() {
            self.reads_ended(op);
        }
    }

    /// Nothing is in flight: commit, or retreat to the best stop point of what was read and what may still be had.
    fn reads_ended(&mut self, op: OpId) {
        let Some(p) = self.prefetches.ops.get(&op) else { return };
        let stop = self.present_stop(op, p.completed());
        if stop > self.read_stop(op) && self.want_components(op, stop) {
            self.stats.prefetch_retreats += 1;
            return self.read_more(op);
        }
        self.commit_prefetch(op, None);
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
        self.unpin_anchor(op);
        self.retire_prefetch(op);
    }

    /// Gives back the pages that no batch in flight can write any more.
    pub(super) fn release_idle_pages(&mut self, op: OpId) {
        let Some(p) = self.prefetches.ops.get_mut(&op) else { return };
        let mut idle: [Vec<PageId>; 3] = Default::default();
        let mut next = 0;
        for batch in p.batches.iter().filter(|b| b.in_flight && !is_planted(Plant::FreeOnSubmit)) {
            take_pages(&mut p.items[next..batch.first], &mut idle);
            next = batch.last;
        }
        take_pages(&mut p.items[next..], &mut idle);
        self.prefetches.held_pages -= idle[0].len() as u32;
        let [full, window, state] = idle;
        self.free_host(&full);
        self.free_component(Component::Window, Tier::Host, &window);
        self.free_component(Component::State, Tier::Host, &state);
    }

    /// Removes the record once nothing can come for it any more.
    pub(super) fn retire_prefetch(&mut self, op: OpId) {
        let Some(p) = self.prefetches.ops.get(&op) else { return };
        if p.committed && p.in_flight == 0 && p.hit_pages.is_some() {
            self.release_idle_pages(op);
            self.prefetches.ops.remove(&op);
        }
    }
}

/// Moves the pages of items to the lists of their pools.
fn take_pages(items: &mut [Item], into: &mut [Vec<PageId>; 3]) {
    for item in items {
        into[item.pool.index()].extend(item.page.take());
    }
}
