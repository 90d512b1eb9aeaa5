//! Host to device: a load restores everything a match promised, or nothing.

use smallvec::SmallVec;

use super::action::{Action, PagePair, PoolKind};
use super::components::pool_kind;
use super::core::{Core, CoreError};
use super::oplog::Op;
use super::outcome::{LoadBack, LoadState, Refusal};
use super::request::RequestId;
use crate::base::containers::Map;
use crate::base::{NodeId, OpId, PageId, Tier};
use crate::tree::{DeviceLock, LoadEnd, LoadOutcome, LoadPlan};

/// One load in flight.
#[derive(Debug)]
struct Load {
    pages: u32,
    layers: u32,
    copied: bool,
    waiting: SmallVec<[RequestId; 2]>,
}

/// Loads in flight.
#[derive(Debug, Default)]
pub(super) struct Loads {
    ops: Map<OpId, Load>,
}

impl Loads {
    pub(super) fn contains(&self, op: OpId) -> bool {
        self.ops.get(&op).is_some_and(|l| !l.copied)
    }

    pub(super) fn has(&self, op: OpId) -> bool {
        self.ops.contains_key(&op)
    }

    pub(super) fn len(&self) -> usize {
        self.ops.len()
    }
}

/// Why a load did not start.
enum LoadRefused {
    Refused(Refusal),
    Error(CoreError),
}

impl<E: Into<CoreError>> From<E> for LoadRefused {
    fn from(error: E) -> LoadRefused {
        LoadRefused::Error(error.into())
    }
}

impl Core {
    /// Restores the host part of the request's match to the device. On [`LoadBack::Started`] the pages stand in
    /// the request's table at once, windows and states among its [components](Core::request_components);
    /// [`load_state`](Core::load_state) says which layers may be read. What an earlier load already brings is shared with
    /// it. May evict. O(pages + nodes of the host part).
    pub fn load_back(&mut self, id: RequestId) -> Result<LoadBack, CoreError> {
        self.load_back_within(id, u32::MAX)
    }

    /// [`load_back`](Core::load_back) for a request that may take at most so many device pages now: those the load needs
    /// and those that nobody held before and that it will hold. Refused whole if it needs more; the match stays.
    pub fn load_back_within(&mut self, id: RequestId, budget_pages: u32) -> Result<LoadBack, CoreError> {
        self.record(|| Op::LoadBack(id, budget_pages));
        let request = self.request_ref(id)?;
        request.check_usable()?;
        let Some(host) = &request.host else { return Ok(LoadBack::Nothing) };
        let (node, host_pages) = (host.node, host.pages);
        // Before the load is planned: a backup makes host room, and could take what the plan reads.
        self.write_due();
        let request = self.request_ref(id)?;
        if !request.own().is_empty() {
            return Err(CoreError::RequestHasPages { own_pages: request.own().len() as u32 });
        }
        if self.loads.len() >= self.config.loads_in_flight_max as usize {
            return Ok(LoadBack::Refused(self.refused(Refusal::LoadsInFlight)));
        }
        let protected = self.tree.stats().device_pages_protected;
        // Held from here on: what lies on the device below the match must stay, or the plan would be stale.
        let lock = self.tree.lock(node)?;
        let newly_held = self.tree.stats().device_pages_protected - protected;
        match self.try_load(id, node, budget_pages.saturating_sub(newly_held)) {
            Ok(waits_for) => {
                self.hold_on(id);
                self.adopt_loaded_path(id, node, lock, waits_for)?;
                let tokens = self.tokens_of(host_pages);
                Ok(LoadBack::Started { tokens })
            }
            Err(LoadRefused::Refused(reason)) => {
                self.tree.unlock(lock)?;
                Ok(LoadBack::Refused(self.refused(reason)))
            }
            Err(LoadRefused::Error(error)) => {
                self.tree.unlock(lock)?;
                Err(error)
            }
        }
    }

    /// Starts what is missing on the path to `node`. Returns the loads to wait for.
    fn try_load(
        &mut self,
        id: RequestId,
        node: NodeId,
        budget_pages: u32,
    ) -> Result<SmallVec<[OpId; 2]>, LoadRefused> {
        let mut plan = LoadPlan::default();
        self.tree.plan_load(node, &mut plan)?;
        if plan.later_pages > 0 {
            // A part above a load in flight has lost its copy; what lies below that load comes after it.
            return Err(LoadRefused::Refused(Refusal::LoadPending));
        }
        let pages = plan.host_pages.len() as u32;
        if pages > budget_pages {
            return Err(LoadRefused::Refused(Refusal::OverBudget));
        }
        // The path is locked and its host part pinned by the request, so this cannot take from the plan.
        let room = self.make_device_room(pages);
        self.settle_components();
        if !room {
            return Err(LoadRefused::Refused(Refusal::NoDevicePages));
        }
        let mut waits_for: SmallVec<[OpId; 2]> = plan.joins.iter().copied().collect();
        if pages > 0 || !plan.copies.is_empty() {
            let Some(component_pages) = self.alloc_copies(Tier::Device, &plan.copies) else {
                return Err(LoadRefused::Refused(Refusal::NoComponentPages));
            };
            waits_for.push(self.start_load(id, &plan, component_pages)?);
        }
        for op in &plan.joins {
            if let Some(load) = self.loads.ops.get_mut(op) {
                load.waiting.push(id);
            }
        }
        Ok(waits_for)
    }

    fn start_load(
        &mut self,
        id: RequestId,
        plan: &LoadPlan,
        component_pages: Vec<PageId>,
    ) -> Result<OpId, CoreError> {
        let pages = plan.host_pages.len() as u32;
        let mut device_pages: Vec<PageId> = Vec::with_capacity(pages as usize);
        if !self.device.alloc(pages, &mut device_pages) {
            self.violation("device room was made and is not there");
        }
        let full = plan.host_pages.iter().zip(&device_pages);
        let full = full.map(|(&source, &target)| PagePair { pool: PoolKind::Full, source, target });
        let copies = plan.copies.iter().zip(&component_pages);
        let copies = copies.map(|(copy, &target)| PagePair {
            pool: pool_kind(copy.component),
            source: copy.source,
            target,
        });
        let pairs = full.chain(copies).collect();
        let op = self.new_op();
        if let Err((error, device_pages, component_pages)) =
            self.tree.begin_load_with(op, plan, device_pages, component_pages)
        {
            self.free_device(&device_pages);
            self.free_copies(Tier::Device, &plan.copies, &component_pages);
            return Err(error.into());
        }
        self.loads
            .ops
            .insert(op, Load { pages, layers: 0, copied: false, waiting: SmallVec::from_elem(id, 1) });
        let after = self.fence;
        self.act(Action::CopyToDevice { op, pairs, after });
        Ok(op)
    }

    /// Moves the request's lock down to `node` and appends the pages being loaded to its table.
    fn adopt_loaded_path(
        &mut self,
        id: RequestId,
        node: NodeId,
        lock: DeviceLock,
        waits_for: SmallVec<[OpId; 2]>,
    ) -> Result<(), CoreError> {
        let request = self.requests.get_mut(id.0).ok_or(CoreError::UnknownRequest)?;
        self.tree.path_pages(node, request.shared, &mut request.pages)?;
        request.shared = request.pages.len() as u32;
        request.loads = waits_for;
        let old_lock = request.lock.replace(lock);
        let old_host = request.host.take();
        if let Some(old) = old_lock {
            self.tree.unlock(old)?;
        }
        if let Some(old) = old_host {
            self.tree.unpin_host(old.pin)?;
        }
        Ok(())
    }

    /// How far the loads are that the request waits for. O(loads of the request).
    pub fn load_state(&self, id: RequestId) -> Result<LoadState, CoreError> {
        let request = self.request_ref(id)?;
        if request.load_failed {
            return Ok(LoadState::Failed);
        }
        let layers = request.loads.iter().filter_map(|op| self.loads.ops.get(op)).map(|l| l.layers).min();
        Ok(layers.map_or(LoadState::Ready, |layers| LoadState::Pending { layers }))
    }

    /// The loads that the request waits for.
    pub fn loads(&self, id: RequestId) -> Result<&[OpId], CoreError> {
        let request = self.request_ref(id)?;
        match request.load_failed {
            true => Err(CoreError::LoadFailed),
            false => Ok(&request.loads),
        }
    }

    pub(super) fn layer_copied(&mut self, op: OpId, layers: u32) {
        match self.loads.ops.get_mut(&op) {
            Some(load) => load.layers = load.layers.max(layers),
            None => self.stats.stray_events += 1,
        }
    }

    /// The copy of a load has ended.
    pub(super) fn load_copied(&mut self, op: OpId, ok: bool) {
        if let Some(load) = self.loads.ops.get_mut(&op) {
            load.copied = true;
            if ok {
                // It may have to wait for another load, whose layers then decide.
                load.layers = u32::MAX;
            }
        }
        let mut ends: Vec<LoadEnd> = Vec::new();
        if self.tree.end_load(op, ok, &mut ends).is_err() {
            self.violation("a load in flight is unknown to the tree");
            return;
        }
        for end in ends {
            self.load_ended(end);
        }
        self.settle_components();
    }

    fn load_ended(&mut self, end: LoadEnd) {
        let Some(load) = self.loads.ops.remove(&end.op) else {
            self.violation("the tree ended a load that is not in flight");
            return;
        };
        self.digest.mix(end.op.0);
        let failed = match end.outcome {
            LoadOutcome::Published { nodes } => {
                self.stats.loaded_pages += u64::from(load.pages);
                nodes.into_iter().for_each(|node| self.note_blocked(node));
                false
            }
            LoadOutcome::Failed { returned } => {
                self.stats.load_failed_pages += returned.len() as u64;
                self.free_device(&returned);
                true
            }
        };
        for id in load.waiting {
            // The request may have gone; the load does not depend on it.
            if let Some(request) = self.requests.get_mut(id.0) {
                request.loads.retain(|op| *op != end.op);
                request.load_failed |= failed;
            }
        }
    }
}
