//! Device copies, and loads from the host. The only writer of device presence.
//!
//! The mirror image of `backup`: `Absent -> Pending(op) -> Present`, and the set of device copies is closed towards the
//! root. An insert cannot overtake a load: whoever waits for the load has its pages in a page table. The same goes for the
//! pages of components that a load brings: each has its place from the start of the load, and a load that ends well finds
//! all of them still open and under a copy of Full.

use crate::base::plant::{Plant, is_planted};
use crate::base::{NodeId, OpId, PageId, Tier};

use super::backup::Verdict;
use super::lock::Holder;
use super::node::{NIL, NO_PAGE, ROOT, Residency};
use super::op::OpKind;
use super::{LoadEnd, LoadOutcome, LoadPlan, Tree, TreeError, forget_pages};

impl Tree {
    /// Plans the copies that bring the path to `node` onto the device: the nodes with only a host copy, root first, and the
    /// component pages that a request at its end needs. Loads in flight that bring some of it are listed in `joins`, and that
    /// is not planned again. Empty if all is there or under way. O(nodes above `node` that are not on the device + spans).
    ///
    /// # Errors
    /// Unknown node, the root.
    pub fn plan_load(&self, node: NodeId, plan: &mut LoadPlan) -> Result<(), TreeError> {
        (plan.later_pages, plan.target) = (0, Some(node));
        plan.copies.clear();
        plan.nodes.clear();
        plan.node_pages.clear();
        plan.host_pages.clear();
        plan.joins.clear();
        let target = self.slot_below_root(node)?;
        let mut at = target;
        let mut below_load = false;
        while at != ROOT {
            let node = &self.arena.nodes[at as usize];
            match node.device {
                Residency::Present => break,
                Residency::Pending => {
                    let op = self.ops.get(node.op).id;
                    if !plan.joins.contains(&op) {
                        plan.joins.push(op);
                    }
                    below_load = true;
                }
                Residency::Absent => {
                    // Above a load whose own upper part failed: that part goes first, the rest is for a later plan.
                    if below_load {
                        for id in plan.nodes.drain(..) {
                            plan.later_pages += self.arena.nodes[id.index as usize].pages;
                        }
                        below_load = false;
                    }
                    plan.nodes.push(self.arena.id(at));
                }
            }
            at = node.parent;
        }
        plan.nodes.reverse();
        plan.joins.reverse();
        for id in &plan.nodes {
            let node = &self.arena.nodes[id.index as usize];
            plan.node_pages.push(node.pages);
            plan.host_pages.extend_from_slice(self.arena.pages(id.index, Tier::Host));
        }
        if self.has_components() {
            self.plan_component_load(target, &mut plan.copies, &mut plan.joins);
            self.leave_out_later_copies(plan);
        }
        Ok(())
    }

    /// Component pages whose Full copy comes with a load below the nodes of the plan: that load waits for this one, so this
    /// one can not wait for it. It has lost its upper part to a failure, which is rare, and they are for a later plan.
    fn leave_out_later_copies(&self, plan: &mut LoadPlan) {
        let Some(last) = plan.nodes.last() else { return };
        let end = self.arena.nodes[last.index as usize].end();
        let all = plan.copies.len();
        plan.copies.retain(|copy| copy.position < end);
        plan.later_pages += (all - plan.copies.len()) as u32;
    }

    /// Appends the device pages of the path to `node` from page `from` of the path on, those being loaded included:
    /// the rest of a page table whose head the caller has. O(pages appended + nodes they lie in).
    ///
    /// # Errors
    /// Unknown node, or a node on that part of the path that has no device copy and none under way; then nothing is
    /// appended.
    pub fn path_pages(&self, node: NodeId, from: u32, out: &mut Vec<PageId>) -> Result<(), TreeError> {
        let mut at = self.slot(node)?;
        let end = self.arena.nodes[at as usize].end();
        let start = out.len();
        out.resize(start + end.saturating_sub(from) as usize, NO_PAGE);
        while at != ROOT && self.arena.nodes[at as usize].end() > from {
            let node = &self.arena.nodes[at as usize];
            if node.device == Residency::Absent {
                out.truncate(start);
                return Err(TreeError::NotOnDevice(self.arena.id(at)));
            }
            let skipped = from.saturating_sub(node.depth);
            let pages = &self.arena.pages(at, Tier::Device)[skipped as usize..];
            let into = start + (node.depth + skipped - from) as usize;
            out[into..into + pages.len()].copy_from_slice(pages);
            at = node.parent;
        }
        Ok(())
    }

    /// [`begin_load`](Tree::begin_load) with the component pages of the plan: one device page for each of `plan.copies`,
    /// which has its place from now on
    /// ([`component_device_pages_with`](Tree::component_device_pages_with)). A plan may consist of component pages only.
    ///
    /// # Errors
    /// As `begin_load`, and a plan is stale also when one of its places was filled or another load brings a page there; both
    /// lists come back.
    pub fn begin_load_with(
        &mut self,
        op: OpId,
        plan: &LoadPlan,
        device_pages: Vec<PageId>,
        component_pages: Vec<PageId>,
    ) -> Result<(), (TreeError, Vec<PageId>, Vec<PageId>)> {
        let anchor = plan.target.or(plan.nodes.last().copied()).unwrap_or(self.root());
        if let Err(refusal) = self.check_copies(anchor, Tier::Host, &plan.copies, &component_pages) {
            return Err((refusal, device_pages, component_pages));
        }
        if let Err(refusal) = self.check_load(op, plan, &device_pages, !plan.copies.is_empty()) {
            return Err((refusal, device_pages, component_pages));
        }
        let slot = self.commit_load(op, plan, anchor.index, &device_pages);
        self.begin_copies(slot, &plan.copies, &component_pages);
        Ok(())
    }

    /// Starts a load of the Full pages only: the nodes of the plan own `device_pages` from now on, pending; their host copies and the path above
    /// stay in place until [`end_load`](Tree::end_load).
    ///
    /// # Errors
    /// The id is in flight, the plan is empty or stale, or the page count is wrong. The pages come back and nothing is
    /// changed.
    pub fn begin_load(
        &mut self,
        op: OpId,
        plan: &LoadPlan,
        device_pages: Vec<PageId>,
    ) -> Result<(), (TreeError, Vec<PageId>)> {
        if let Err(refusal) = self.check_load(op, plan, &device_pages, false) {
            return Err((refusal, device_pages));
        }
        self.commit_load(op, plan, plan.nodes[plan.nodes.len() - 1].index, &device_pages);
        Ok(())
    }

    fn commit_load(&mut self, op: OpId, plan: &LoadPlan, last: u32, device_pages: &[PageId]) -> u32 {
        let end = self.arena.nodes[last as usize].end();
        let first = plan.nodes.first().map_or(end, |id| self.arena.nodes[id.index as usize].depth);
        let slot = self.ops.add(op, OpKind::Load, last, first);
        self.stats.ops += 1;
        self.lock_path(last);
        self.pin_path(last);
        let mut pages = device_pages;
        for id in &plan.nodes {
            let node = &mut self.arena.nodes[id.index as usize];
            let (mine, rest) = pages.split_at(node.pages as usize);
            pages = rest;
            node.op = slot;
            self.arena.set_pages(id.index, Tier::Device, mine);
            self.set_device(id.index, Residency::Pending);
        }
        slot
    }

    fn check_load(
        &self,
        op: OpId,
        plan: &LoadPlan,
        device_pages: &[PageId],
        may_be_empty: bool,
    ) -> Result<(), TreeError> {
        if self.ops.contains(op) {
            return Err(TreeError::OpInFlight(op));
        }
        if may_be_empty && plan.nodes.is_empty() && device_pages.is_empty() {
            return Ok(());
        }
        let pages = self.check_chain(&plan.nodes, &plan.node_pages)?;
        if device_pages.len() != pages as usize {
            return Err(TreeError::PageCount { want: pages, got: device_pages.len() });
        }
        for &id in &plan.nodes {
            let node = &self.arena.nodes[id.index as usize];
            if node.device != Residency::Absent {
                return Err(TreeError::AlreadyOnDevice(id));
            }
            if node.host != Residency::Present {
                return Err(TreeError::NotBackedUp(id));
            }
        }
        let top = &self.arena.nodes[plan.nodes[0].index as usize];
        if self.arena.nodes[top.parent as usize].device == Residency::Absent {
            return Err(TreeError::StalePlan(plan.nodes[0]));
        }
        Ok(())
    }

    /// Ends a load whose copies are done (`ok`) or failed. What is settled by that is appended to `out`: this load, unless
    /// it has to wait for one above it, and those that waited for it, parents first.
    ///
    /// # Errors
    /// No such load is in flight (a second end included).
    pub fn end_load(&mut self, op: OpId, ok: bool, out: &mut Vec<LoadEnd>) -> Result<(), TreeError> {
        let slot = self.ops.find(op, OpKind::Load).ok_or(TreeError::UnknownOp(op))?;
        if self.ops.get(slot).waiting {
            return Err(TreeError::UnknownOp(op));
        }
        let mut queue = vec![(slot, ok)];
        let mut next = 0;
        while let Some(&(slot, ok)) = queue.get(next) {
            next += 1;
            // A tick each, so that no two leaves are equally old.
            self.tick();
            let mine = self.still_loading(slot);
            let verdict = if ok { self.judge_load(slot, &mine) } else { Verdict::Fail };
            if let Verdict::Wait(on) = verdict {
                self.ops.get_mut(slot).waiting = true;
                self.ops.get_mut(on).waiters.push(slot);
                continue;
            }
            let done = self.ops.remove(slot);
            self.stats.ops -= 1;
            let published = matches!(verdict, Verdict::Publish);
            let outcome = if published {
                for &at in &mine {
                    self.arena.nodes[at as usize].op = NIL;
                    self.set_device(at, Residency::Present);
                }
                LoadOutcome::Published { nodes: mine.iter().map(|&at| self.arena.id(at)).collect() }
            } else {
                let mut returned = Vec::new();
                for &at in mine.iter().rev() {
                    self.arena.nodes[at as usize].op = NIL;
                    self.drop_device(at, &mut returned);
                }
                LoadOutcome::Failed { returned }
            };
            self.end_copies(done.node, Tier::Device, &done.copies, published);
            self.unpin_path(done.node, Holder::Operation);
            self.unlock_path(done.node, Holder::Operation);
            queue.extend(done.waiters.iter().map(|&waiter| (waiter, true)));
            out.push(LoadEnd { op: done.id, outcome });
        }
        Ok(())
    }

    /// The nodes of a load. (Its deepest node may lie below them, if only a component is loaded for it.)
    fn still_loading(&self, slot: u32) -> Vec<u32> {
        let mut nodes = self.ops.fragments(&self.arena, slot);
        nodes.retain(|&at| self.arena.nodes[at as usize].op == slot);
        nodes
    }

    fn judge_load(&self, slot: u32, mine: &[u32]) -> Verdict {
        // Without nodes it brings component pages for the end of a path that others may still be loading.
        let rests_on = match mine.first() {
            Some(&top) => self.arena.nodes[top as usize].parent,
            None => self.ops.get(slot).node,
        };
        let rests_on = &self.arena.nodes[rests_on as usize];
        match rests_on.device {
            Residency::Present => Verdict::Publish,
            Residency::Pending => Verdict::Wait(rests_on.op),
            Residency::Absent if is_planted(Plant::LoadOnNothing) => Verdict::Publish,
            Residency::Absent => Verdict::Fail,
        }
    }

    /// Gives up the device copy of a node: its pages are appended to `into`.
    pub(super) fn drop_device(&mut self, at: u32, into: &mut Vec<PageId>) {
        forget_pages(self.arena.pages_mut(at, Tier::Device), into);
        self.drop_components(at, Tier::Device);
        self.set_device(at, Residency::Absent);
    }

    pub(super) fn set_device(&mut self, at: u32, to: Residency) {
        self.account(at, false);
        let node = &mut self.arena.nodes[at as usize];
        let parent = node.parent;
        let (was, is) = (node.device != Residency::Absent, to != Residency::Absent);
        let before = std::mem::replace(&mut node.device, to);
        self.account(at, true);
        self.note(at, Tier::Device, before == Residency::Present, to == Residency::Present);
        let up = &mut self.arena.nodes[parent as usize];
        match (was, is) {
            (false, true) => up.kids_device += 1,
            (true, false) => up.kids_device -= 1,
            _ => {}
        }
        self.refresh(at);
        self.refresh(parent);
    }
}
