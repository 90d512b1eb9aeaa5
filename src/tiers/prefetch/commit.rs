//! Handing what was read to the tree: the one place where a refill is kept or dropped.
//!
//! The anchor is looked at now, not when the prefetch was issued: if it is gone, or holds no host copy where the write
//! policy demands one, everything goes back (B01). With anchor repair, a device-only anchor is backed up first, and the
//! refill waits for that within its bound.

use super::super::components::{COMPONENTS, pool_kind};
use super::super::core::Core;
use super::super::outcome::{PrefetchEnd, Refusal};
use crate::base::plant::{Plant, is_planted};
use crate::base::{NodeId, OpId, PageId, Tier};
use crate::key::Key;
use crate::tree::{BackupPlan, DropReason, HostInsert};

/// How far the host copy of an anchor is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AnchorCopy {
    /// There, or not asked for.
    Fine,
    /// On its way.
    Coming,
    /// Not there and not on its way.
    Lacking,
}

/// Pages that leave a prefetch at its commit.
struct Taken {
    full: Vec<PageId>,
    /// In the order of [`COMPONENTS`].
    components: [Vec<PageId>; 2],
}

impl Core {
    /// Commits what was read, or holds it for the repair of the anchor unless somebody stops it.
    pub(super) fn commit_prefetch(&mut self, op: OpId, stopped_by: Option<Refusal>) {
        let stop = self.read_stop(op);
        let anchor = self.anchor_now(op);
        if stop > 0 && stopped_by.is_none() && self.hold_for_repair(op, anchor) {
            return;
        }
        self.prefetches.holding.remove(&op);
        let taken = self.take_committed(op, stop);
        let Some(p) = self.prefetches.ops.get_mut(&op) else { return };
        (p.committed, p.hold_until) = (true, None);
        let hit_pages = p.hit_pages.unwrap_or(0);
        let short_reason = match (stopped_by.or(p.stopped), p.host_short) {
            (Some(reason), _) => Some(reason),
            (None, true) => Some(Refusal::NoHostPages),
            (None, false) if stop < hit_pages => Some(Refusal::NotRestorable),
            (None, false) => None,
        };
        let inserted = self.insert_refill(op, anchor, stop, taken);
        let kept = inserted.refilled_pages + inserted.attached_pages;
        let redundant = inserted.redundant_pages;
        let mut end = PrefetchEnd {
            hit_tokens: self.tokens_of(hit_pages),
            loaded_tokens: self.tokens_of(kept),
            redundant_tokens: self.tokens_of(redundant),
            lost_tokens: self.tokens_of(hit_pages - kept - redundant),
            reason: short_reason,
        };
        let short_tokens = self.tokens_of(hit_pages - stop);
        if let Some(reason) = short_reason {
            self.stats.drop_tokens(reason, short_tokens);
        }
        if let Some(reason) = inserted.dropped.map(reason_of) {
            let tokens = self.tokens_of(inserted.dropped_pages);
            self.stats.drop_tokens(reason, tokens);
            end.reason = Some(reason);
            tracing::info!(tokens, node = %anchor, reason = reason.name(), "sapwood: prefetch refill dropped");
        }
        self.stats.prefetch_loaded_tokens += end.loaded_tokens;
        self.stats.prefetch_redundant_tokens += end.redundant_tokens;
        self.digest.mix(u64::from(kept) << 32 | u64::from(redundant));
        self.report_end(op, end);
        self.release_idle_pages(op);
        self.unpin_anchor(op);
        self.settle_components();
    }

    /// The node that ends where the anchor ended. Its id may have died in a merge; where it lies has not changed.
    fn anchor_now(&mut self, op: OpId) -> NodeId {
        let Some(p) = self.prefetches.ops.get_mut(&op) else { return self.tree.root() };
        if self.tree.depth_pages(p.anchor).is_err() {
            let tokens = &p.names.row()[..p.anchor_pages as usize * self.config.page_size as usize];
            if let Some(node) = self.tree.node_at(Key::new(p.namespace, tokens)) {
                p.anchor = node;
            }
        }
        p.anchor
    }

    /// The pages of the committed stop point leave the operation.
    fn take_committed(&mut self, op: OpId, stop: u32) -> Taken {
        let mut taken = Taken { full: Vec::with_capacity(stop as usize), components: Default::default() };
        let places = COMPONENTS.map(|c| self.places_for(c, stop));
        let Some(p) = self.prefetches.ops.get_mut(&op) else { return taken };
        taken.full.extend(p.items.iter_mut().take(stop as usize).filter_map(|item| item.page.take()));
        self.prefetches.held_pages -= taken.full.len() as u32;
        for (c, places) in COMPONENTS.into_iter().zip(places) {
            for at in places {
                let found = p.find_read(pool_kind(c), at);
                taken.components[c as usize].extend(found.and_then(|i| p.items[i].page.take()));
            }
        }
        taken
    }

    /// Puts the pages into the tree. Every page goes into it or back to its pool, whatever happens.
    fn insert_refill(&mut self, op: OpId, anchor: NodeId, stop: u32, taken: Taken) -> HostInsert {
        let nothing = HostInsert {
            node: anchor,
            refilled_pages: 0,
            attached_pages: 0,
            redundant_pages: 0,
            dropped_pages: stop,
            dropped: (stop > 0).then_some(DropReason::AnchorGone),
        };
        let Some(p) = self.prefetches.ops.get(&op).filter(|_| stop > 0) else { return nothing };
        let page_size = self.config.page_size as usize;
        let from = p.anchor_pages as usize * page_size;
        let key = Key::new(p.namespace, &p.names.row()[from..from + stop as usize * page_size]);
        let end = p.anchor_pages + stop;
        let mut returned = Vec::new();
        let done = match self.tree.insert_host_named(anchor, key, &taken.full, &p.names, &mut returned) {
            Ok(done) => done,
            Err(error) => {
                tracing::error!(%error, "sapwood: a refill was refused");
                self.violation("a refill was refused");
                returned.clone_from(&taken.full);
                nothing
            }
        };
        self.free_host(&returned);
        let whole = done.dropped.is_none() && self.tree.depth_pages(done.node) == Ok(end);
        for c in COMPONENTS {
            let pages = &taken.components[c as usize];
            if pages.is_empty() {
                continue;
            }
            let adopted = if whole { self.tree.adopt_component_host(done.node, c, pages).ok() } else { None };
            match adopted {
                Some(kept) => self.stats.component_prefetched_pages += u64::from(kept),
                None if is_planted(Plant::SkipComponentOnDrop) => {}
                None => self.free_component(c, Tier::Host, pages),
            }
        }
        // Not below a node that is not stored: it may be a hole, and what comes below must see it.
        if !self.components.any() && self.tree.is_stored(anchor) == Ok(true) {
            self.mark_read_as_stored(done.node, end - stop);
        }
        done
    }

    /// What was read from the store need not be written to it: the nodes from `node` up to page `above` of its path. Not with
    /// components, of which the store may hold less.
    fn mark_read_as_stored(&mut self, node: NodeId, above: u32) {
        let mut at = Some(node);
        while let Some(node) = at
            && self.tree.depth_pages(node).is_ok_and(|end| end > above)
        {
            if self.tree.mark_stored(node, true).is_err() {
                return;
            }
            at = self.tree.parent(node).ok().flatten();
        }
    }

    fn anchor_copy(&self, anchor: NodeId) -> AnchorCopy {
        if !self.config.write.needs_backed_parent() || self.tree.is_backed_up(anchor) == Ok(true) {
            return AnchorCopy::Fine;
        }
        let mut plan = BackupPlan::default();
        match self.tree.plan_backup(anchor, &mut plan) {
            Ok(()) if plan.nodes.is_empty() => AnchorCopy::Coming,
            _ => AnchorCopy::Lacking,
        }
    }

    /// Starts the backup that the anchor lacks and keeps the refill until it has ended, if that is wanted and possible.
    fn hold_for_repair(&mut self, op: OpId, anchor: NodeId) -> bool {
        let bound_us = self.config.prefetch.repair_ms.saturating_mul(1000);
        let Some(held_already) = self.prefetches.ops.get(&op).map(|p| p.hold_until.is_some()) else {
            return false;
        };
        if bound_us == 0 || held_already {
            return false;
        }
        if self.anchor_copy(anchor) == AnchorCopy::Lacking {
            self.write_through(anchor);
        }
        if self.anchor_copy(anchor) != AnchorCopy::Coming {
            return false;
        }
        self.stats.anchor_repairs += 1;
        let until = self.now + bound_us;
        if let Some(p) = self.prefetches.ops.get_mut(&op) {
            p.hold_until = Some(until);
        }
        self.prefetches.holding.insert(op);
        true
    }

    /// Commits the refills whose anchor has its copy, will not get it, or has taken too long.
    pub(in crate::tiers) fn settle_holding(&mut self) {
        let holding: Vec<OpId> = self.prefetches.holding.iter().copied().collect();
        for op in holding {
            let anchor = self.anchor_now(op);
            let due = self.prefetches.ops.get(&op).and_then(|p| p.hold_until).is_none_or(|at| at <= self.now);
            if due || self.anchor_copy(anchor) != AnchorCopy::Coming {
                self.commit_prefetch(op, None);
                self.retire_prefetch(op);
            }
        }
    }

    /// The anchor may go.
    pub(super) fn unpin_anchor(&mut self, op: OpId) {
        self.prefetches.holding.remove(&op);
        let pin = self.prefetches.ops.get_mut(&op).and_then(|p| p.pin.take());
        if pin.is_some_and(|pin| self.tree.unpin_host_unused(pin).is_err()) {
            self.violation("the pin of an anchor is unknown");
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
