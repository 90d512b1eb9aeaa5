//! Device to host: write-through when a node is due, write-back when it is evicted.
//!
//! A backup is `None -> Pending(op) -> Present` in the tree; this file owns the operations. The host pages of a
//! backup lie in the tree from its start (marked pending), so there is nothing here that could leak them: the
//! end of the operation either publishes them or gets them back.

use super::action::{Action, PagePair, PoolKind};
use super::components::pool_kind;
use super::core::Core;
use super::outcome::Refusal;
use super::room::HostRoom;
use crate::base::containers::Map;
use crate::base::{NodeId, OpId, PageId, Tier};
use crate::tree::{BackupEnd, BackupOutcome, BackupPlan, DeviceEviction};

/// One backup in flight.
#[derive(Debug)]
struct Backup {
    pages: u32,
    /// Pages of components.
    copies: u32,
    /// The copy has ended; the tree holds the publication until the parent's has.
    copied: bool,
    why: Why,
}

/// What a copy to the host is made for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Why {
    /// The write policy: the node is due.
    Due,
    /// The node is among the next to leave the device.
    Ahead,
    /// The node leaves the device when its host copy is there.
    Victim(NodeId),
}

/// Backups in flight.
#[derive(Debug, Default)]
pub(super) struct Backups {
    ops: Map<OpId, Backup>,
    /// Nodes that are due for a copy and have none planned yet.
    due: Vec<NodeId>,
    /// Device pages that copies in flight read.
    held_pages: u32,
    /// Those among them that leave the device when the copy has ended.
    leaving_pages: u32,
    /// Those among them that are copied because of their age.
    old_pages: u32,
    /// Pages of components that copies in flight read.
    held_copies: u32,
}

impl Backups {
    pub(super) fn contains(&self, op: OpId) -> bool {
        self.ops.get(&op).is_some_and(|b| !b.copied)
    }

    pub(super) fn has(&self, op: OpId) -> bool {
        self.ops.contains_key(&op)
    }

    pub(super) fn len(&self) -> usize {
        self.ops.len()
    }

    /// What was due is gone, or the host it was to go to.
    pub(super) fn forget_due(&mut self) {
        self.due.clear();
    }

    /// Whether nodes wait for the tick to be written.
    pub(super) fn are_due(&self) -> bool {
        !self.due.is_empty()
    }

    pub(super) fn held_pages(&self) -> u32 {
        self.held_pages
    }

    pub(super) fn old_pages(&self) -> u32 {
        self.old_pages
    }

    pub(super) fn held_copies(&self) -> u32 {
        self.held_copies
    }

    fn count(&mut self, backup: &Backup, add: bool) {
        let change = |n: &mut u32, by| *n = if add { *n + by } else { *n - by };
        change(&mut self.held_pages, backup.pages);
        change(&mut self.held_copies, backup.copies);
        if backup.why != Why::Due {
            change(&mut self.old_pages, backup.pages);
        }
        if matches!(backup.why, Why::Victim(_)) {
            change(&mut self.leaving_pages, backup.pages);
        }
    }
}

impl Core {
    /// Write-through: windows and states that were computed again after their node was backed up follow it to the host.
    pub(super) fn catch_up_components(&mut self, node: NodeId) {
        let mut plan = BackupPlan::default();
        if !self.components.any()
            || self.config.write.threshold() == 0
            || self.tree.plan_component_catch_up(node, &mut plan).is_err()
        {
            return;
        }
        if !plan.copies.is_empty() {
            self.start_backup(&mut plan, Why::Due);
        }
    }

    /// Write-through: `node` is due. What a step makes due is planned at its tick, or when device room is made before that:
    /// off the path that the step waits for, and once for what several calls have added to one node.
    pub(super) fn note_due(&mut self, node: NodeId) {
        if self.backups.due.last() != Some(&node) {
            self.backups.due.push(node);
        }
    }

    /// Starts the backups of what has become due, the last first: it lies deepest, and one copy covers the chain above it. If
    /// that finds no room, a part of it may.
    pub(super) fn write_due(&mut self) {
        let mut due = std::mem::take(&mut self.backups.due);
        for node in due.drain(..).rev() {
            // The policy may have changed meanwhile; a node that is gone, or was written with one below it, plans nothing.
            if self.config.write.threshold() > 0 {
                self.write_through(node);
            }
        }
        self.backups.due = due;
    }

    /// Write-through: backs up `node` and its un-backed ancestors, parents first, in one operation.
    pub(super) fn write_through(&mut self, node: NodeId) {
        let Some(mut plan) = self.plan_with_room(node, HostRoom::Due) else { return };
        if !self.start_backup(&mut plan, Why::Due) {
            self.refused(Refusal::NoHostPages);
        }
    }

    /// The same ahead of need. False: there is no room for that.
    pub(super) fn back_up_ahead(&mut self, node: NodeId) -> bool {
        if self.is_outlived(node, false) {
            return true;
        }
        let plan = self.plan_with_room(node, HostRoom::Ahead);
        plan.is_none_or(|mut plan| self.start_backup(&mut plan, Why::Ahead))
    }

    /// Windows and states that are next to leave the device, on their own: they have less room than Full has, and go before
    /// it. Without a copy the host would keep prefixes from which nobody can go on.
    pub(super) fn components_ahead(&mut self) {
        for c in self.components.configured() {
            let deep = self.components.write_ahead_pages(c, self.config.write_ahead_percent);
            let mut nodes = Vec::new();
            self.tree.components_ahead(c, deep, &mut nodes);
            for node in nodes {
                let mut plan = BackupPlan::default();
                if self.tree.plan_components_ahead(node, &mut plan).is_ok() && !plan.copies.is_empty() {
                    self.start_backup(&mut plan, Why::Ahead);
                }
            }
        }
    }

    /// Copies victims to the host so that they can leave; those that find no host page are dropped. Stops when what is
    /// leaving covers `short_pages`.
    pub(super) fn write_back(&mut self, victims: &[NodeId], short_pages: u32) {
        let mut freed = 0;
        for &node in victims {
            if freed + self.backups.leaving_pages >= short_pages {
                return;
            }
            // A backed-up node above an un-backed victim is listed too; it leaves by demotion when its child has.
            if self.is_outlived(node, true) {
                freed += self.drop_leaf(node, Refusal::Outlived);
                continue;
            }
            let Some(mut plan) = self.plan_with_room(node, HostRoom::Now) else { continue };
            if !self.start_backup(&mut plan, Why::Victim(node)) {
                freed += self.drop_leaf(node, Refusal::NoHostPages);
            }
        }
    }

    /// What to copy so that `node` is backed up, after host room was made for it as far as possible. The copies that the
    /// plan rests on are pinned meanwhile: room would else be made by giving up the parent's, and the plan would grow
    /// faster than the room. `None`: nothing to do.
    fn plan_with_room(&mut self, node: NodeId, for_whom: HostRoom) -> Option<BackupPlan> {
        let mut plan = BackupPlan::default();
        self.tree.plan_backup(node, &mut plan).ok()?;
        if plan.device_pages.is_empty() {
            return None;
        }
        let above = self.tree.parent(*plan.nodes.first()?).ok()??;
        // Without a copy there is nothing to pin (write-back), and one in flight is pinned by its operation.
        let pin = self.tree.pin_host(above).ok();
        self.make_host_room_for(plan.device_pages.len() as u32, for_whom);
        if pin.is_some_and(|pin| self.tree.unpin_host_unused(pin).is_err()) {
            self.violation("a fresh pin is unknown");
        }
        Some(plan)
    }

    /// A victim that can have no host copy leaves for good (B02: never demote what was not written).
    fn drop_leaf(&mut self, node: NodeId, reason: Refusal) -> u32 {
        let mut gone = DeviceEviction::default();
        if self.tree.delete_leaf(node, &mut gone).is_err() {
            return 0;
        }
        self.take_evicted(&gone, reason);
        gone.freed_device.len() as u32
    }

    /// False: no host pages; nothing changed.
    fn start_backup(&mut self, plan: &mut BackupPlan, why: Why) -> bool {
        let pages = plan.device_pages.len() as u32;
        let mut host_pages: Vec<PageId> = Vec::with_capacity(pages as usize);
        if !self.host.alloc(pages, &mut host_pages) {
            return false;
        }
        let component_pages = self.alloc_copies_that_fit(Tier::Host, &mut plan.copies);
        if pages == 0 && component_pages.is_empty() {
            return false;
        }
        let full = plan.device_pages.iter().zip(&host_pages);
        let full = full.map(|(&source, &target)| PagePair { pool: PoolKind::Full, source, target });
        let copies = plan.copies.iter().zip(&component_pages);
        let copies = copies.map(|(copy, &target)| PagePair {
            pool: pool_kind(copy.component),
            source: copy.source,
            target,
        });
        let pairs = full.chain(copies).collect();
        let op = self.new_op();
        if let Err((error, host_pages, component_pages)) =
            self.tree.begin_backup_with(op, plan, host_pages, component_pages)
        {
            self.free_host(&host_pages);
            self.free_copies(Tier::Host, &plan.copies, &component_pages);
            self.violation(&format!("a fresh backup plan was refused: {error}"));
            return false;
        }
        let backup = Backup { pages, copies: plan.copies.len() as u32, copied: false, why };
        self.backups.count(&backup, true);
        self.backups.ops.insert(op, backup);
        let after = self.fence;
        self.act(Action::CopyToHost { op, pairs, after });
        true
    }

    /// The copy of a backup has ended.
    pub(super) fn backup_copied(&mut self, op: OpId, ok: bool) {
        if let Some(backup) = self.backups.ops.get_mut(&op) {
            backup.copied = true;
        }
        let mut ends: Vec<BackupEnd> = Vec::new();
        if self.tree.end_backup(op, ok, &mut ends).is_err() {
            self.violation("a backup in flight is unknown to the tree");
            return;
        }
        for end in ends {
            self.backup_ended(end);
        }
        self.settle_components();
    }

    fn backup_ended(&mut self, end: BackupEnd) {
        let Some(backup) = self.backups.ops.remove(&end.op) else {
            self.violation("the tree ended a backup that is not in flight");
            return;
        };
        self.backups.count(&backup, false);
        self.digest.mix(end.op.0);
        match end.outcome {
            BackupOutcome::Failed { returned } => {
                self.stats.backup_failed_pages += returned.len() as u64;
                self.free_host(&returned);
                if let Why::Victim(victim) = backup.why {
                    // Whoever waits for its pages would else wait for ever, if copies keep failing.
                    self.drop_leaf(victim, Refusal::NotBackedUp);
                }
            }
            BackupOutcome::Published { nodes } => {
                self.stats.backed_up_pages += u64::from(backup.pages);
                if let Why::Victim(victim) = backup.why {
                    self.demote_if_idle(victim);
                }
                for node in nodes {
                    self.store_node(node);
                }
            }
        }
    }

    /// Demotes a node that was written to leave, unless somebody has come to use it meanwhile.
    fn demote_if_idle(&mut self, node: NodeId) {
        let mut gone = DeviceEviction::default();
        let above = self.tree.parent(node).ok().flatten();
        if self.tree.demote(node, &mut gone).is_ok() {
            above.into_iter().for_each(|above| self.note_blocked(above));
            self.take_evicted(&gone, Refusal::NotBackedUp);
        }
    }
}
