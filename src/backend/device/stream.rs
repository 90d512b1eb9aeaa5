//! A device behind a driver with streams and events.
//!
//! One stream per direction. A submission orders its stream behind the fence, enqueues what the planner
//! made, and records events; nothing in it waits. Pages of a transfer are claimed until its last event has
//! been seen. The first driver call that fails ends the device: what was in flight is reported as failed
//! without proof of its end.
#![expect(unsafe_code, reason = "hands page addresses to the driver under the claims of the transfer")]

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::driver::{Driver, DriverError, EventId, StreamId};
use super::job::{CopyJob, Direction, JobError};
use super::kernels::{PAIRS_LARGE, PAIRS_SMALL, PageJob, PageJobLarge, PageJobSmall, PlaneAddress, Side};
use super::plan::{Lists, PlanOptions, PlanStep, PlanePlaces, Planner};
use super::transfer::{Completion, CopyFault, Outcome, Record, Transfer, TransferId, TransferState};
use super::{CloseReport, Device, DeviceError, Refusal, Submit, Waker};
use crate::backend::host::{Access, HostArena, MemoryError, Order};
use crate::base::{Fence, PageId, Tier};
use crate::pool::{Geometry, PoolKind};

/// Most jobs in flight per direction.
const QUEUE_LIMIT: u32 = 64;
/// One registration of host memory; a call for half a TiB or more fails on current drivers.
const REGISTER_BYTES: u64 = 64 << 30;

/// Where a plane lies in device memory.
#[derive(Clone, Debug)]
pub struct DevicePlane {
    /// Base and distances; with `bases`, `side.table` is the address of the same table on the device.
    pub side: Side,
    /// Base per (layer, part), where they are not regularly spaced.
    pub bases: Option<Box<[u64]>>,
}

impl DevicePlane {
    fn address(&self) -> PlaneAddress<'_> {
        PlaneAddress { side: self.side, bases: self.bases.as_deref() }
    }
}

/// Host memory as this device sees it.
struct HostSide {
    arena: Arc<HostArena>,
    /// Per plane: sides for the copy engine and for kernels.
    sides: Vec<(Side, Side)>,
}

struct InFlight {
    record: Record,
    last: EventId,
    layers: VecDeque<(u32, EventId)>,
}

/// A device behind a [`Driver`].
pub struct StreamDevice<D: Driver> {
    driver: D,
    geometry: Arc<Geometry>,
    pages: [u32; 3],
    planes: Vec<DevicePlane>,
    /// Claims on device pages: readers, or `u16::MAX`. Only this device looks at them.
    claims: [Vec<u16>; 3],
    host: Option<HostSide>,
    planner: Planner,
    queues: [VecDeque<InFlight>; 3],
    spare: Vec<InFlight>,
    events: Vec<EventId>,
    compute: VecDeque<(u64, EventId)>,
    compute_last: u64,
    next_transfer: u64,
    small: Box<PageJobSmall>,
    large: Box<PageJobLarge>,
    waker: Option<Waker>,
    closed: bool,
    failed: Option<DriverError>,
    reported: bool,
}

impl<D: Driver> StreamDevice<D> {
    /// A device over memory that the embedder owns: `pages` per pool, one entry of `planes` per plane of
    /// the geometry. `options` is limited to what the driver can do.
    ///
    /// # Safety
    /// For as long as the device lives, every page of every plane is memory of the device, and whoever else
    /// touches a page while a transfer has it obeys the rules of [`Device`].
    pub unsafe fn new(
        driver: D,
        geometry: Arc<Geometry>,
        pages: [u32; 3],
        planes: Vec<DevicePlane>,
        mut options: PlanOptions,
    ) -> Result<StreamDevice<D>, DeviceError> {
        if planes.len() != geometry.planes().len() {
            return Err(DeviceError::GeometryMismatch);
        }
        for (plane, p) in planes.iter().zip(geometry.planes()) {
            let wanted = p.layers() as usize * p.parts() as usize;
            if plane.bases.as_ref().is_some_and(|b| b.len() != wanted) {
                return Err(DeviceError::GeometryMismatch);
            }
        }
        let can = driver.capabilities();
        options.ring = options.ring.and(can.ring);
        options.large_params &= can.large_params;
        options.staging_bytes *= u64::from(can.kernels);
        options.kernels &= can.kernels;
        Ok(StreamDevice {
            driver,
            geometry,
            pages,
            planes,
            claims: pages.map(|n| vec![0; n as usize]),
            host: None,
            planner: Planner::new(options),
            queues: Default::default(),
            spare: Vec::new(),
            events: Vec::new(),
            compute: VecDeque::new(),
            compute_last: 0,
            next_transfer: 0,
            small: Box::default(),
            large: Box::default(),
            waker: None,
            closed: false,
            failed: None,
            reported: false,
        })
    }

    /// The driver, for what goes beyond [`Device`].
    pub fn driver_mut(&mut self) -> &mut D {
        &mut self.driver
    }

    /// How copies are planned; may be changed between jobs.
    pub fn options_mut(&mut self) -> &mut PlanOptions {
        self.planner.options_mut()
    }

    /// The fence behind everything that was submitted to a compute stream so far. The stream is a raw
    /// handle of the driver and must be alive.
    pub fn note_compute(&mut self, stream: u64) -> Result<Fence, DeviceError> {
        self.check_alive()?;
        let event = self.event()?;
        if let Err(e) = self.driver.record(event, StreamId::Compute(stream)) {
            self.events.push(event);
            return Err(self.fail(e));
        }
        self.compute_last += 1;
        self.compute.push_back((self.compute_last, event));
        Ok(Fence::after(self.compute_last))
    }

    /// Lets later work of a compute stream wait until the layers `..=layer` of a load are there, without
    /// waiting here. Once per layer, on every stream and before every use of the layer's planes.
    pub fn wait_layer(&mut self, load: &Transfer, layer: u32, stream: u64) -> Result<(), DeviceError> {
        self.check_alive()?;
        if load.layers_ready() > layer || load.state() == TransferState::Done {
            return Ok(());
        }
        let flight = self.queues.iter().flatten().find(|f| f.record.id == load.id());
        // Not in flight and not done: it failed, and the caller will learn so from its completion.
        let Some(flight) = flight else { return Err(DeviceError::TransferFailed) };
        let event = flight.layers.iter().find(|(end, _)| *end > layer).map_or(flight.last, |&(_, e)| e);
        self.driver.wait(StreamId::Compute(stream), event).map_err(|e| self.fail(e))
    }

    fn check_alive(&self) -> Result<(), DeviceError> {
        match self.failed {
            Some(e) => Err(e.into()),
            None if self.closed => Err(DeviceError::Closed),
            None => Ok(()),
        }
    }

    fn fail(&mut self, e: DriverError) -> DeviceError {
        self.failed.get_or_insert(e);
        e.into()
    }

    fn event(&mut self) -> Result<EventId, DeviceError> {
        match self.events.pop() {
            Some(event) => Ok(event),
            None => self.driver.create_event().map_err(|e| self.fail(e)),
        }
    }

    /// Claims the pages of both sides, or none.
    fn claim(&mut self, job: &CopyJob<'_>) -> Result<(), DeviceError> {
        for (i, part) in job.parts.iter().enumerate() {
            if let Err(e) = self.claim_part(job.direction, part.pool, part.src, part.dst) {
                for part in &job.parts[..i] {
                    self.release(job.direction, part.pool, part.src, part.dst);
                }
                return Err(e);
            }
        }
        Ok(())
    }

    fn claim_part(
        &mut self,
        direction: Direction,
        pool: PoolKind,
        src: &[PageId],
        dst: &[PageId],
    ) -> Result<(), DeviceError> {
        self.claim_side(direction.source(), pool, src, Access::Shared)?;
        let second = self.claim_side(direction.destination(), pool, dst, Access::Exclusive);
        if second.is_err() {
            self.release_side(direction.source(), pool, src, Access::Shared);
        }
        second
    }

    fn claim_side(
        &mut self,
        tier: Tier,
        pool: PoolKind,
        pages: &[PageId],
        access: Access,
    ) -> Result<(), DeviceError> {
        if tier == Tier::Host {
            let host = self.host.as_ref().ok_or(DeviceError::NoHostArena)?;
            return host.arena.take(pool, pages, access).map_err(|e| match e {
                MemoryError::Busy { pool, page } => JobError::PageBusy { tier, pool, page }.into(),
                other => other.into(),
            });
        }
        // Page numbers were checked.
        let claims = &mut self.claims[pool.index()][..];
        let taken = match access {
            Access::Shared => take_all(claims, pages, |n| (n < u16::MAX - 1).then(|| n + 1)),
            Access::Exclusive => take_all(claims, pages, |n| (n == 0).then_some(u16::MAX)),
        };
        taken.map_err(|at| {
            self.release_side(tier, pool, &pages[..at], access);
            JobError::PageBusy { tier, pool, page: pages[at] }.into()
        })
    }

    fn release(&mut self, direction: Direction, pool: PoolKind, src: &[PageId], dst: &[PageId]) {
        self.release_side(direction.source(), pool, src, Access::Shared);
        self.release_side(direction.destination(), pool, dst, Access::Exclusive);
    }

    fn release_side(&mut self, tier: Tier, pool: PoolKind, pages: &[PageId], access: Access) {
        match (tier, &self.host) {
            (Tier::Host, Some(host)) => host.arena.give(pool, pages, access),
            (Tier::Host, None) => {}
            _ => {
                let claims = &mut self.claims[pool.index()];
                for page in pages {
                    let count = &mut claims[page.0 as usize];
                    *count = if access == Access::Shared { count.saturating_sub(1) } else { 0 };
                }
            }
        }
    }

    /// Orders the stream behind the fence, plans, enqueues, records. An error leaves the job half enqueued.
    fn enqueue(&mut self, job: &CopyJob<'_>, after: Fence, flight: &mut InFlight) -> Result<(), DeviceError> {
        let stream = StreamId::Copy(job.direction);
        for i in 0..self.compute.len() {
            let (number, event) = self.compute[i];
            if number <= after.number() {
                self.driver.wait(stream, event).map_err(|e| self.fail(e))?;
            }
        }
        self.plan(job);
        for i in 0..self.planner.plan_mut().steps.len() {
            match self.planner.plan_mut().steps[i] {
                PlanStep::LayersDone(layers) => {
                    let event = self.event()?;
                    flight.layers.push_back((layers, event));
                    self.driver.record(event, stream).map_err(|e| self.fail(e))?;
                }
                step => self.run_step(job, step).map_err(|e| self.fail(e))?,
            }
        }
        self.driver.record(flight.last, stream).map_err(|e| self.fail(e))?;
        if let Some(waker) = &self.waker {
            self.driver.notify(stream, waker).map_err(|e| {
                self.failed.get_or_insert(e);
                DeviceError::from(e)
            })?;
        }
        Ok(())
    }

    fn plan(&mut self, job: &CopyJob<'_>) {
        let mut places: SmallVec<[PlanePlaces<'_>; 8]> = SmallVec::new();
        for (i, plane) in self.planes.iter().enumerate() {
            let (host, mapped) = match &self.host {
                Some(host) => host.sides[i],
                None => Default::default(),
            };
            places.push(PlanePlaces {
                device: plane.address(),
                host: PlaneAddress { side: host, bases: None },
                host_mapped: PlaneAddress { side: mapped, bases: None },
            });
        }
        self.planner.plan(job, &self.geometry, &places);
    }

    fn run_step(&mut self, job: &CopyJob<'_>, step: PlanStep) -> Result<(), DriverError> {
        match step {
            PlanStep::LayersDone(_) => Ok(()),
            PlanStep::Batch { first, count } => {
                let plan = self.planner.plan_mut();
                let range = first..first + count;
                let (src, dst) = (&mut plan.src[range.clone()], &mut plan.dst[range.clone()]);
                let len = &mut plan.len[range];
                // Host pages under our shared claim are settled; device pages are written by compute that
                // the stream has to wait for.
                let settled = job.direction == Direction::HostToDevice;
                // SAFETY: addresses come from planes of the device and regions of the arena, page numbers
                // were checked; the transfer holds claims on all pages until its last event is done.
                unsafe { self.driver.copy(job.direction, src, dst, len, settled) }
            }
            PlanStep::Launch { kernel, ring, grid, part, first_pair, lists, head } => {
                let n = head.pairs as usize;
                let pages = job.parts[part];
                let src = &pages.src[first_pair..first_pair + n];
                let dst = &pages.dst[first_pair..first_pair + n];
                let large = n > PAIRS_SMALL;
                let record = if large {
                    self.large.head = head;
                    fill::<PAIRS_LARGE>(&mut self.large, src, dst, lists)
                } else {
                    self.small.head = head;
                    fill::<PAIRS_SMALL>(&mut self.small, src, dst, lists)
                };
                // SAFETY: the record is of the length that `large` says; addresses as above.
                unsafe { self.driver.launch(job.direction, kernel, large, record, ring, grid) }
            }
        }
    }

    /// Takes a record from the spare ones, or makes one.
    fn flight(&mut self, job: &CopyJob<'_>) -> Result<InFlight, DeviceError> {
        self.next_transfer += 1;
        let id = TransferId(self.next_transfer);
        let bytes = job.bytes(&self.geometry);
        let last = self.event()?;
        if let Some(at) = self.spare.iter_mut().position(|f| f.record.is_free()) {
            let mut flight = self.spare.swap_remove(at);
            flight.record.reuse(id, job, bytes);
            flight.last = last;
            return Ok(flight);
        }
        Ok(InFlight { record: Record::new(id, job, bytes), last, layers: VecDeque::new() })
    }

    /// Reports the end of a transfer and keeps its buffers.
    fn end(&mut self, mut flight: InFlight, outcome: Outcome, out: &mut Vec<Completion>) {
        let proved = !matches!(outcome, Outcome::Failed(CopyFault { quiescent: false, .. }));
        if proved {
            let pages = std::mem::take(&mut flight.record.pages.parts);
            for (pool, src, dst) in &pages {
                self.release(flight.record.direction, *pool, src, dst);
            }
            flight.record.pages.parts = pages;
            self.events.push(flight.last);
            self.events.extend(flight.layers.drain(..).map(|(_, event)| event));
        }
        flight.layers.clear();
        out.push(flight.record.complete(outcome, self.geometry.model_layers()));
        if self.spare.len() < QUEUE_LIMIT as usize {
            self.spare.push(flight);
        }
    }

    fn poll_queue(&mut self, q: usize, out: &mut Vec<Completion>) -> Result<(), DriverError> {
        while let Some(flight) = self.queues[q].front_mut() {
            while let Some(&(layers, event)) = flight.layers.front() {
                if !self.driver.is_done(event)? {
                    return Ok(());
                }
                flight.record.cell.set_layers_ready(layers);
                flight.layers.pop_front();
                self.events.push(event);
            }
            if !self.driver.is_done(flight.last)? {
                return Ok(());
            }
            if let Some(flight) = self.queues[q].pop_front() {
                self.end(flight, Outcome::Done, out);
            }
        }
        Ok(())
    }

    fn poll_all(&mut self, out: &mut Vec<Completion>) -> Result<(), DriverError> {
        while let Some(&(_, event)) = self.compute.front() {
            if !self.driver.is_done(event)? {
                break;
            }
            self.compute.pop_front();
            self.events.push(event);
        }
        (0..3).try_for_each(|q| self.poll_queue(q, out))
    }
}

/// Takes claims in order; the position of the first that cannot be had.
fn take_all(claims: &mut [u16], pages: &[PageId], take: impl Fn(u16) -> Option<u16>) -> Result<(), usize> {
    for (at, page) in pages.iter().enumerate() {
        let count = &mut claims[page.0 as usize];
        *count = take(*count).ok_or(at)?;
    }
    Ok(())
}

/// Pages of one registration of host memory, a power of two so that planes of all sizes share the borders
/// of the plane with the largest pages.
fn pages_per_registration(page_bytes: u64) -> u64 {
    let fit = (REGISTER_BYTES / page_bytes).max(1);
    1 << fit.ilog2()
}

/// Puts page numbers into a launch record.
fn fill<const N: usize>(
    job: &mut PageJob<N>,
    src: &[PageId],
    dst: &[PageId],
    lists: Lists,
) -> *mut std::ffi::c_void {
    for (to, page) in job.src.iter_mut().zip(src) {
        *to = page.0;
    }
    match lists {
        Lists::Pages => job.dst.iter_mut().zip(dst).for_each(|(to, page)| *to = page.0),
        Lists::ToStaging => job.dst.iter_mut().zip(0..src.len() as u32).for_each(|(to, i)| *to = i),
    }
    (&raw mut *job).cast()
}

impl<D: Driver> Device for StreamDevice<D> {
    fn note_compute(&mut self, stream: u64) -> Result<Fence, DeviceError> {
        StreamDevice::note_compute(self, stream)
    }

    fn wait_layer(&mut self, load: &Transfer, layer: u32, stream: u64) -> Result<bool, DeviceError> {
        StreamDevice::wait_layer(self, load, layer, stream).map(|()| true)
    }

    fn geometry(&self) -> &Arc<Geometry> {
        &self.geometry
    }

    fn pages(&self, pool: PoolKind) -> u32 {
        self.pages[pool.index()]
    }

    fn attach_host(&mut self, arena: Arc<HostArena>) -> Result<(), DeviceError> {
        self.check_alive()?;
        if self.host.is_some() {
            return Err(DeviceError::HostArenaTwice);
        }
        if **arena.geometry() != *self.geometry || arena.order() != Order::PageFirst {
            return Err(DeviceError::GeometryMismatch);
        }
        let mut sides = Vec::with_capacity(self.planes.len());
        for ((_, region), plane) in arena.regions().zip(self.geometry.planes()) {
            let page = plane.page_bytes();
            // Whole pages per registration: no copy may span two.
            let chunk = pages_per_registration(page) * page;
            let (mut at, mut mapped) = (0u64, None);
            while at < region.len() as u64 {
                let len = chunk.min(region.len() as u64 - at) as usize;
                let base = region.base().map_addr(|a| a.saturating_add(at as usize));
                let address = self.driver.register_host(base, len)?;
                mapped.get_or_insert(address);
                at += len as u64;
            }
            let side = |base| Side {
                base,
                page_step: page,
                layer_step: plane.layer_bytes(),
                part_step: plane.part_bytes(),
                table: 0,
            };
            let base = region.base().as_ptr() as u64;
            sides.push((side(base), side(mapped.unwrap_or(base))));
        }
        let pages = self.geometry.planes().iter().map(|p| pages_per_registration(p.page_bytes())).min();
        // Where one registration holds more pages than a pool can have, the mask has no effect.
        let mask = pages.unwrap_or(1).saturating_sub(1);
        self.planner.options_mut().host_chunk_mask = u32::try_from(mask).unwrap_or(u32::MAX);
        self.host = Some(HostSide { arena, sides });
        Ok(())
    }

    fn detach_host(&mut self) -> Result<(), DeviceError> {
        self.check_alive()?;
        let jobs = self.in_flight();
        if jobs > 0 {
            return Err(DeviceError::HostInUse { jobs });
        }
        let Some(host) = self.host.take() else { return Ok(()) };
        match self.unregister(&host.arena) {
            Ok(()) => Ok(()),
            Err(error) => {
                // The driver may still map it.
                std::mem::forget(host.arena);
                Err(error.into())
            }
        }
    }

    fn submit(&mut self, job: &CopyJob<'_>, after: Fence) -> Result<Submit, DeviceError> {
        self.check_alive()?;
        if after.number() > self.compute_last {
            return Err(DeviceError::FenceAhead { fence: after.number(), last: self.compute_last });
        }
        let host_pages = self.host.as_ref().map(|h| PoolKind::ALL.map(|p| h.arena.pages(p)));
        if host_pages.is_none() && job.direction != Direction::DeviceToDevice {
            return Err(DeviceError::NoHostArena);
        }
        let of = |tier| if tier == Tier::Host { host_pages.unwrap_or_default() } else { self.pages };
        let (src, dst) = (of(job.direction.source()), of(job.direction.destination()));
        job.check(|pool| src[pool.index()], |pool| dst[pool.index()])?;
        let q = job.direction.index();
        if self.queues[q].len() >= QUEUE_LIMIT as usize {
            return Ok(Submit::Refused(Refusal::QueueFull { limit: QUEUE_LIMIT }));
        }
        self.claim(job)?;
        let mut flight = match self.flight(job) {
            Ok(flight) => flight,
            Err(e) => {
                job.parts.iter().for_each(|p| self.release(job.direction, p.pool, p.src, p.dst));
                return Err(e);
            }
        };
        let handle = flight.record.handle();
        // A failure half-way has put the device out of service, but what was enqueued may run: the job
        // counts as started, and the next poll reports it as failed without proof of its end.
        let _half_way = self.enqueue(job, after, &mut flight);
        self.queues[q].push_back(flight);
        Ok(Submit::Started(handle))
    }

    /// Covers what [`StreamDevice::note_compute`] was told of.
    fn launched(&self) -> Fence {
        Fence::after(self.compute_last)
    }

    fn poll(&mut self, out: &mut Vec<Completion>) -> Result<(), DeviceError> {
        if self.failed.is_none()
            && let Err(e) = self.poll_all(out)
        {
            self.failed = Some(e);
        }
        let Some(e) = self.failed else { return Ok(()) };
        for q in 0..3 {
            while let Some(flight) = self.queues[q].pop_front() {
                self.end(flight, Outcome::Failed(CopyFault { code: e.code, quiescent: false }), out);
            }
        }
        match std::mem::replace(&mut self.reported, true) {
            false => Err(e.into()),
            true => Ok(()),
        }
    }

    fn room(&self, direction: Direction) -> u32 {
        match self.check_alive() {
            Ok(()) => QUEUE_LIMIT - self.queues[direction.index()].len() as u32,
            Err(_) => 0,
        }
    }

    fn in_flight(&self) -> u32 {
        self.queues.iter().map(|q| q.len() as u32).sum()
    }

    fn set_waker(&mut self, waker: Option<Waker>) {
        self.waker = waker;
    }

    fn close(&mut self, wait_max: Duration) -> CloseReport {
        self.closed = true;
        let deadline = Instant::now().checked_add(wait_max);
        loop {
            let unfinished = self.unended();
            if unfinished == 0 || deadline.is_some_and(|d| Instant::now() >= d) || self.failed.is_some() {
                return CloseReport { unfinished };
            }
            // There is no call that waits with a limit; this is the way out, not the hot path.
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

impl<D: Driver> StreamDevice<D> {
    /// Undoes what `attach_host` registered, all of it, and returns the first failure.
    fn unregister(&mut self, arena: &HostArena) -> Result<(), DriverError> {
        let mut result = Ok(());
        for ((_, region), plane) in arena.regions().zip(self.geometry.planes()) {
            let page = plane.page_bytes();
            let chunk = (pages_per_registration(page) * page) as usize;
            for at in (0..region.len()).step_by(chunk) {
                let base = region.base().map_addr(|a| a.saturating_add(at));
                result = result.and(self.driver.unregister_host(base, chunk.min(region.len() - at)));
            }
        }
        result
    }

    /// Transfers whose last event is not done.
    fn unended(&mut self) -> u32 {
        let mut n = 0;
        for q in 0..3 {
            for i in 0..self.queues[q].len() {
                let event = self.queues[q][i].last;
                match self.driver.is_done(event) {
                    Ok(true) => {}
                    Ok(false) => n += 1,
                    Err(e) => {
                        self.failed.get_or_insert(e);
                        n += 1;
                    }
                }
            }
        }
        n
    }
}

impl<D: Driver> Drop for StreamDevice<D> {
    fn drop(&mut self) {
        let quiet = self.unended() == 0 && self.failed.is_none();
        if !quiet {
            // The device may still write there: the memory must stay mapped for the life of the process.
            self.driver.abandon();
            std::mem::forget(self.host.take().map(|host| host.arena));
            return;
        }
        let Some(host) = self.host.take() else { return };
        let undone = self.unregister(&host.arena);
        debug_assert!(undone.is_ok(), "unregistering what was registered: {undone:?}");
    }
}
