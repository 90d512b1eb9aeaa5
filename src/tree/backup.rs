//! Host copies. The only writer of host presence, and the keeper of the backed-up-parent rule.
//!
//! `Absent -> Pending(op) -> Present`. A pending copy lets a child be planned and keeps the device copy in place; only a
//! present one counts. A backup that ends before its parent's does waits inside the tree and ends with it.

use crate::base::invariant::violated;
use crate::base::plant::{Plant, is_planted};
use crate::base::{NodeId, OpId, PageId, Tier};

use super::lock::Holder;
use super::node::{NIL, ROOT, Residency};
use super::op::OpKind;
use super::{BackupEnd, BackupOutcome, BackupPlan, BackupRule, Tree, TreeError, forget_pages};

/// Whether a finished operation can be settled.
pub(super) enum Verdict {
    Publish,
    Fail,
    /// Wait for the operation in this slot.
    Wait(u32),
}

impl Tree {
    /// Plans the copies that `node` needs to be backed up: under `BackedUpParent` the chain of its ancestors without one,
    /// root first, then the node; under `Free` the node alone. Empty if it is backed up or about to be. The chain stops
    /// below a copy that is there or under way. O(nodes planned).
    ///
    /// # Errors
    /// Unknown node, the root, or a node that is not on the device.
    pub fn plan_backup(&self, node: NodeId, plan: &mut BackupPlan) -> Result<(), TreeError> {
        plan.clear_for(node);
        plan.target = None;
        let mut at = self.slot_below_root(node)?;
        if self.arena.nodes[at as usize].device != Residency::Present {
            return Err(TreeError::NotOnDevice(node));
        }
        while at != ROOT && self.arena.nodes[at as usize].host == Residency::Absent {
            plan.nodes.push(self.arena.id(at));
            if self.rule == BackupRule::Free {
                break;
            }
            at = self.arena.nodes[at as usize].parent;
        }
        plan.nodes.reverse();
        for id in &plan.nodes {
            let node = &self.arena.nodes[id.index as usize];
            plan.node_pages.push(node.pages);
            plan.device_pages.extend_from_slice(self.arena.pages(id.index, Tier::Device));
        }
        self.plan_component_backup(&plan.nodes, &mut plan.copies);
        Ok(())
    }

    /// Plans what a request at the end of a backed-up `node` needs of components and the host lacks: they were computed
    /// again after the node was written. Empty if nothing lacks. O(window).
    ///
    /// # Errors
    /// Unknown node, the root, or a node that is not backed up.
    pub fn plan_component_catch_up(&self, node: NodeId, plan: &mut BackupPlan) -> Result<(), TreeError> {
        plan.clear_for(node);
        let at = self.slot_below_root(node)?;
        if self.arena.nodes[at as usize].host != Residency::Present {
            return Err(TreeError::NotBackedUp(node));
        }
        self.plan_component_holes(at, &mut plan.copies);
        Ok(())
    }

    /// [`begin_backup`](Tree::begin_backup) with the component pages of the plan: one host page for each of `plan.copies`. A
    /// plan may consist of component pages only.
    ///
    /// # Errors
    /// As `begin_backup`; both lists come back.
    pub fn begin_backup_with(
        &mut self,
        op: OpId,
        plan: &BackupPlan,
        host_pages: Vec<PageId>,
        component_pages: Vec<PageId>,
    ) -> Result<(), (TreeError, Vec<PageId>, Vec<PageId>)> {
        let anchor = plan.nodes.last().copied().or(plan.target).unwrap_or(self.root());
        if let Err(refusal) = self.check_copies(anchor, Tier::Device, &plan.copies, &component_pages) {
            return Err((refusal, host_pages, component_pages));
        }
        if plan.nodes.is_empty() && host_pages.is_empty() && !plan.copies.is_empty() {
            if self.ops.contains(op) {
                return Err((TreeError::OpInFlight(op), host_pages, component_pages));
            }
            let end = self.arena.nodes[anchor.index as usize].end();
            let slot = self.ops.add(op, OpKind::Backup, anchor.index, end);
            self.stats.ops += 1;
            self.lock_path(anchor.index);
            self.begin_copies(slot, &plan.copies, &component_pages);
            return Ok(());
        }
        if let Err((refusal, host_pages)) = self.begin_backup(op, plan, host_pages) {
            return Err((refusal, host_pages, component_pages));
        }
        if let Some(slot) = self.ops.find(op, OpKind::Backup) {
            self.begin_copies(slot, &plan.copies, &component_pages);
        }
        Ok(())
    }

    /// Starts a backup of the Full pages only: the nodes of the plan own `host_pages` from now on, pending, and stay on the device until
    /// [`end_backup`](Tree::end_backup).
    ///
    /// # Errors
    /// The id is in flight, the plan is empty or stale, the page count is wrong, or the rule forbids it. The pages come
    /// back and nothing is changed.
    pub fn begin_backup(
        &mut self,
        op: OpId,
        plan: &BackupPlan,
        host_pages: Vec<PageId>,
    ) -> Result<(), (TreeError, Vec<PageId>)> {
        if let Err(refusal) = self.check_backup(op, plan, &host_pages) {
            return Err((refusal, host_pages));
        }
        let (first, last) = (plan.nodes[0].index, plan.nodes[plan.nodes.len() - 1].index);
        let first = self.arena.nodes[first as usize].depth;
        let slot = self.ops.add(op, OpKind::Backup, last, first);
        self.stats.ops += 1;
        self.lock_path(last);
        let mut pages = &host_pages[..];
        for id in &plan.nodes {
            let node = &mut self.arena.nodes[id.index as usize];
            let (mine, rest) = pages.split_at(node.pages as usize);
            pages = rest;
            node.op = slot;
            self.arena.set_pages(id.index, Tier::Host, mine);
            self.set_host(id.index, Residency::Pending);
        }
        Ok(())
    }

    fn check_backup(&self, op: OpId, plan: &BackupPlan, host_pages: &[PageId]) -> Result<(), TreeError> {
        if self.ops.contains(op) {
            return Err(TreeError::OpInFlight(op));
        }
        let pages = self.check_chain(&plan.nodes, &plan.node_pages)?;
        if host_pages.len() != pages as usize {
            return Err(TreeError::PageCount { want: pages, got: host_pages.len() });
        }
        for &id in &plan.nodes {
            let node = &self.arena.nodes[id.index as usize];
            if node.host != Residency::Absent {
                return Err(TreeError::AlreadyBackedUp(id));
            }
            if node.device != Residency::Present {
                return Err(TreeError::NotOnDevice(id));
            }
        }
        let top = &self.arena.nodes[plan.nodes[0].index as usize];
        if self.rule == BackupRule::BackedUpParent
            && self.arena.nodes[top.parent as usize].host == Residency::Absent
        {
            return Err(TreeError::ParentNotBackedUp(plan.nodes[0]));
        }
        Ok(())
    }

    /// Checks that a plan is a chain of live nodes with the lengths it says. Returns its pages.
    pub(super) fn check_chain(&self, nodes: &[NodeId], node_pages: &[u32]) -> Result<u32, TreeError> {
        if nodes.is_empty() {
            return Err(TreeError::EmptyPlan);
        }
        let mut above = None;
        let mut pages = 0;
        for (i, &id) in nodes.iter().enumerate() {
            let at = self.slot_below_root(id)?;
            let node = &self.arena.nodes[at as usize];
            let chained = above.is_none_or(|up| node.parent == up);
            if !chained || node_pages.get(i) != Some(&node.pages) {
                return Err(TreeError::StalePlan(id));
            }
            pages += node.pages;
            above = Some(at);
        }
        Ok(pages)
    }

    /// Ends a backup whose copies are done (`ok`) or failed. What is settled by that is appended to `out`: this backup,
    /// unless it has to wait for its parent's, and those that waited for it, parents first.
    ///
    /// # Errors
    /// No such backup is in flight (a second end included).
    pub fn end_backup(&mut self, op: OpId, ok: bool, out: &mut Vec<BackupEnd>) -> Result<(), TreeError> {
        let slot = self.ops.find(op, OpKind::Backup).ok_or(TreeError::UnknownOp(op))?;
        if self.ops.get(slot).waiting {
            return Err(TreeError::UnknownOp(op));
        }
        let mut queue = vec![(slot, ok)];
        let mut next = 0;
        while let Some(&(slot, ok)) = queue.get(next) {
            next += 1;
            self.tick();
            let verdict = if ok { self.judge_backup(slot) } else { Verdict::Fail };
            let outcome = match verdict {
                Verdict::Wait(on) => {
                    self.ops.get_mut(slot).waiting = true;
                    self.ops.get_mut(on).waiters.push(slot);
                    continue;
                }
                Verdict::Publish => self.publish_backup(slot),
                Verdict::Fail => self.fail_backup(slot),
            };
            let done = self.ops.remove(slot);
            self.stats.ops -= 1;
            let published = matches!(outcome, BackupOutcome::Published { .. });
            self.end_copies(done.node, Tier::Host, &done.copies, published);
            self.unlock_path(done.node, Holder::Operation);
            queue.extend(done.waiters.iter().map(|&waiter| (waiter, true)));
            if let BackupOutcome::Published { nodes } = &outcome
                && let Some(top) = nodes.first()
            {
                // Those of the operation keep their ids: they are named in what comes back.
                self.try_merge_settled(top.index);
            }
            out.push(BackupEnd { op: done.id, outcome });
        }
        Ok(())
    }

    fn judge_backup(&self, slot: u32) -> Verdict {
        if self.rule == BackupRule::Free {
            return Verdict::Publish;
        }
        // Without nodes it is about components, which find their places themselves.
        let Some(&top) = self.ops.fragments(&self.arena, slot).first() else { return Verdict::Publish };
        let parent = &self.arena.nodes[self.arena.nodes[top as usize].parent as usize];
        match parent.host {
            Residency::Present => Verdict::Publish,
            Residency::Pending => Verdict::Wait(parent.op),
            Residency::Absent => Verdict::Fail,
        }
    }

    fn publish_backup(&mut self, slot: u32) -> BackupOutcome {
        let mut nodes = self.ops.fragments(&self.arena, slot);
        if is_planted(Plant::ForgetSplit) && !nodes.is_empty() {
            nodes = vec![self.ops.get(slot).node];
        }
        for &at in &nodes {
            self.arena.nodes[at as usize].op = NIL;
            self.set_host(at, Residency::Present);
        }
        BackupOutcome::Published { nodes: nodes.iter().map(|&at| self.arena.id(at)).collect() }
    }

    fn fail_backup(&mut self, slot: u32) -> BackupOutcome {
        let mut returned = Vec::new();
        for &at in self.ops.fragments(&self.arena, slot).iter().rev() {
            self.arena.nodes[at as usize].op = NIL;
            self.drop_host(at, &mut returned);
        }
        BackupOutcome::Failed { returned }
    }

    /// Gives up the host copy of a node: its pages are appended to `into`. Components stay on the host as long as the node
    /// does.
    pub(super) fn drop_host(&mut self, at: u32, into: &mut Vec<PageId>) {
        forget_pages(self.arena.pages_mut(at, Tier::Host), into);
        self.set_host(at, Residency::Absent);
    }

    /// True if the rule lets a child of `parent` hold a published host copy.
    pub(super) fn may_hold_host(&self, parent: u32) -> bool {
        self.rule == BackupRule::Free
            || self.arena.nodes[parent as usize].host == Residency::Present
            || is_planted(Plant::NoAnchorCheck)
    }

    /// A node without a host copy takes one that came from elsewhere (a store). The caller has asked `may_hold_host`.
    pub(super) fn adopt_host(&mut self, at: u32, pages: &[PageId]) -> Result<(), TreeError> {
        let node = &self.arena.nodes[at as usize];
        let parent = node.parent;
        if node.host != Residency::Absent || !self.may_hold_host(parent) {
            return Err(violated("backed-up-parent", format!("{} cannot adopt", self.arena.id(at))).into());
        }
        self.arena.set_pages(at, Tier::Host, pages);
        self.set_host(at, Residency::Present);
        Ok(())
    }

    fn set_host(&mut self, at: u32, to: Residency) {
        self.account(at, false);
        let node = &mut self.arena.nodes[at as usize];
        let parent = node.parent;
        let (was, is) = (node.host != Residency::Absent, to != Residency::Absent);
        let before = std::mem::replace(&mut node.host, to);
        self.account(at, true);
        self.note(at, Tier::Host, before == Residency::Present, to == Residency::Present);
        let up = &mut self.arena.nodes[parent as usize];
        match (was, is) {
            (false, true) => up.kids_host += 1,
            (true, false) => up.kids_host -= 1,
            _ => {}
        }
        self.refresh(at);
        self.refresh(parent);
    }
}
