//! The software device: host memory posing as device memory, and queues posing as streams.
//!
//! It moves real bytes at the moment a real device might: a copy reads its source and writes its
//! destination when it runs, not when it is submitted. Who makes it run is the [`Mode`].
#![expect(unsafe_code, reason = "copies pages between arenas; the claims taken at submission make it sound")]

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::job::{CopyJob, Direction, JobError};
use super::transfer::{Completion, CopyFault, Outcome, Record, TransferId};
use super::{CloseReport, Device, DeviceError, Refusal, Submit, Waker};
use crate::backend::host::{Access, HostArena, MemoryError, MemoryPlan, Order, copy_layers};
use crate::backend::region::Mapping;
use crate::base::containers::Map;
use crate::base::{Fence, PageId, Tier};
use crate::pool::{Capacities, Geometry, PlaneId, PlaneSet, PoolKind};

/// Who makes copies run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// The driver of a test or a simulation, page by page, in any order a device could choose:
    /// [`SoftDevice::runnable`], [`SoftDevice::step`], [`SoftDevice::finish`].
    Manual,
    /// One worker thread per direction.
    Threaded,
    /// Submission runs the copy, or a later poll where the fence was not reached.
    Inline,
}

/// How a software device is made.
#[derive(Clone, Copy, Debug)]
pub struct SoftOptions {
    /// Who makes copies run.
    pub mode: Mode,
    /// Order of bytes in device memory.
    pub order: Order,
    /// Most jobs in flight per direction; more are refused.
    pub queue_limit: u32,
    /// How device memory is mapped: shared, where other processes are to write it.
    pub mapping: Mapping,
}

impl SoftOptions {
    /// Layer-first private memory, 64 jobs per direction.
    #[must_use]
    pub const fn new(mode: Mode) -> SoftOptions {
        SoftOptions { mode, order: Order::LayerFirst, queue_limit: 64, mapping: Mapping::PRIVATE }
    }
}

/// A copy that shall fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SoftFault {
    /// Jobs submitted after the injection that are spared.
    pub skip_jobs: u64,
    /// Pages (or layers of pages, in a job by layer) that are still copied.
    pub after_units: u32,
    /// What the completion reports.
    pub fault: CopyFault,
}

/// What one [`SoftDevice::step`] did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// The transfer does not exist, is not at the head of its queue, or waits for its fence.
    NotRunnable,
    /// One page (or one layer of one page) was copied; so many are left.
    Copied {
        /// Units left.
        left: u64,
    },
    /// The transfer ended; its completion can be polled.
    Ended,
}

/// A job in a queue.
struct Running {
    record: Record,
    planes: Vec<PlaneSet>,
    fence: Fence,
    /// The layers of the model that are copied together, one step after the other.
    steps: u32,
    step: u32,
    /// Units of the current step not copied yet: (part, pair).
    units: Vec<(u32, u32)>,
    copied: u32,
    fault: Option<(u32, CopyFault)>,
}

impl Running {
    /// Makes the units of the current step; the last of the list is the first in order.
    fn fill(&mut self) {
        let parts = self.record.pages.parts.iter().enumerate();
        let units = parts.flat_map(|(p, (_, src, _))| (0..src.len() as u32).map(move |i| (p as u32, i)));
        self.units.extend(units);
        self.units.reverse();
    }

    /// Goes to the next step that has units. `true` at the end of the job.
    fn advance(&mut self) -> bool {
        while self.units.is_empty() {
            self.step += 1;
            if self.step >= self.steps {
                return true;
            }
            self.record.cell.set_layers_ready(self.step);
            self.fill();
        }
        false
    }

    /// The injected fault, if it is due now.
    fn due_fault(&self) -> Option<CopyFault> {
        self.fault.filter(|&(after, _)| self.copied >= after).map(|(_, fault)| fault)
    }

    fn left(&self) -> u64 {
        let pages: usize = self.record.pages.parts.iter().map(|(_, src, _)| src.len()).sum();
        self.units.len() as u64 + u64::from(self.steps.saturating_sub(self.step + 1)) * pages as u64
    }
}

struct State {
    host: Option<Arc<HostArena>>,
    queues: [VecDeque<Box<Running>>; 3],
    /// Set while a worker runs the head of the queue, which it took out.
    taken: [bool; 3],
    ended: VecDeque<(Record, Outcome)>,
    in_flight: [u32; 3],
    next_transfer: u64,
    compute_last: u64,
    compute_open: BTreeSet<u64>,
    /// Last use of device pages by open compute work, where the device was told.
    uses: Map<(PoolKind, PageId), u64>,
    faults: Vec<SoftFault>,
    waker: Option<Waker>,
    closed: bool,
    stop: bool,
}

impl State {
    fn reached(&self, fence: Fence) -> bool {
        self.compute_open.first().is_none_or(|&open| open > fence.number())
    }

    /// Whether the head of a queue may run.
    fn head_runs(&self, d: Direction) -> bool {
        let q = d.index();
        !self.taken[q] && self.queues[q].front().is_some_and(|r| self.reached(r.fence))
    }

    /// Whether the fence covers every use of the job's device pages that is known.
    fn check_uses(&self, job: &CopyJob<'_>, after: Fence) -> Result<(), JobError> {
        if self.uses.is_empty() {
            return Ok(());
        }
        for part in job.parts {
            let (src, dst) = (job.direction.source(), job.direction.destination());
            let sides = [(src, part.src), (dst, part.dst)];
            for &page in sides.iter().filter(|(tier, _)| *tier == Tier::Device).flat_map(|(_, pages)| *pages)
            {
                match self.uses.get(&(part.pool, page)) {
                    Some(&last_use) if last_use > after.number() => {
                        let fence = after.number();
                        return Err(JobError::FenceTooEarly { pool: part.pool, page, fence, last_use });
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    fn unended(&self) -> u32 {
        let queued: usize = self.queues.iter().map(VecDeque::len).sum();
        queued as u32 + self.taken.iter().filter(|&&t| t).count() as u32
    }
}

struct Shared {
    memory: Arc<HostArena>,
    options: SoftOptions,
    state: Mutex<State>,
    /// Something to run in that direction, or the end.
    work: [Condvar; 3],
    /// A job ended.
    idle: Condvar,
}

/// The software device. A clone is another handle of the same device: give one to the cache as its
/// [`Device`], keep one to read and write rows as the model would.
#[derive(Clone)]
pub struct SoftDevice {
    owner: Arc<Owner>,
}

/// Stops the workers when the last handle goes.
struct Owner {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl std::fmt::Debug for SoftDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SoftDevice").field("options", &self.owner.shared.options).finish_non_exhaustive()
    }
}

impl SoftDevice {
    /// A device with memory for `capacities`, nothing committed.
    pub fn new(
        geometry: Arc<Geometry>,
        capacities: Capacities,
        options: SoftOptions,
    ) -> Result<SoftDevice, DeviceError> {
        let plan = MemoryPlan { mapping: options.mapping, ..MemoryPlan::default() };
        let memory = Arc::new(HostArena::build(geometry, capacities, options.order, &plan)?);
        let state = State {
            host: None,
            queues: Default::default(),
            taken: [false; 3],
            ended: VecDeque::new(),
            in_flight: [0; 3],
            next_transfer: 0,
            compute_last: 0,
            compute_open: BTreeSet::new(),
            uses: Map::default(),
            faults: Vec::new(),
            waker: None,
            closed: false,
            stop: false,
        };
        let shared = Shared {
            memory,
            options,
            state: Mutex::new(state),
            work: Default::default(),
            idle: Condvar::new(),
        };
        let mut owner = Owner { shared: Arc::new(shared), workers: Vec::new() };
        if options.mode == Mode::Threaded {
            for direction in Direction::ALL {
                let shared = Arc::clone(&owner.shared);
                let builder = std::thread::Builder::new().name(format!("sapwood-{direction:?}"));
                let worker = builder.spawn(move || work(&shared, direction));
                owner.workers.push(worker.map_err(|source| DeviceError::Thread { source })?);
            }
        }
        Ok(SoftDevice { owner: Arc::new(owner) })
    }

    /// Shorthand: worker threads, default options.
    pub fn threaded(geometry: Arc<Geometry>, capacities: Capacities) -> Result<SoftDevice, DeviceError> {
        SoftDevice::new(geometry, capacities, SoftOptions::new(Mode::Threaded))
    }

    /// Shorthand: driven by hand, default options.
    pub fn manual(geometry: Arc<Geometry>, capacities: Capacities) -> Result<SoftDevice, DeviceError> {
        SoftDevice::new(geometry, capacities, SoftOptions::new(Mode::Manual))
    }

    /// Shorthand: copies inside the calls, default options.
    pub fn inline(geometry: Arc<Geometry>, capacities: Capacities) -> Result<SoftDevice, DeviceError> {
        SoftDevice::new(geometry, capacities, SoftOptions::new(Mode::Inline))
    }

    /// The device memory. Its functions refuse pages that a transfer in flight owns.
    #[must_use]
    pub fn memory(&self) -> &Arc<HostArena> {
        &self.owner.shared.memory
    }

    /// Writes rows as the model would: see [`HostArena::write_rows`]. Work whose fence has not passed may
    /// also write pages of copies that wait for that fence.
    pub fn write_rows(
        &self,
        plane: PlaneId,
        page: PageId,
        layer: u32,
        first_token: u32,
        bytes: &[u8],
    ) -> Result<(), MemoryError> {
        self.ahead_of_copies(page, None, || self.memory().write_rows(plane, page, layer, first_token, bytes))
    }

    /// Reads rows as the model would: see [`HostArena::read_rows`] and [`SoftDevice::write_rows`]. Of a load that is stepped
    /// by hand, the layers that have arrived may be read while the others are copied.
    pub fn read_rows(
        &self,
        plane: PlaneId,
        page: PageId,
        layer: u32,
        first_token: u32,
        out: &mut [u8],
    ) -> Result<(), MemoryError> {
        let arrived = self.memory().geometry().plane(plane).map(|plane| plane.model_layer(layer));
        self.ahead_of_copies(page, arrived, || self.memory().read_rows(plane, page, layer, first_token, out))
    }

    /// Runs an access; if copies that wait for their fence hold the page, or one that has brought the model's layer
    /// `arrived`, runs it ahead of them. Their claims are lifted under the lock without which none of them can go on.
    fn ahead_of_copies(
        &self,
        page: PageId,
        arrived: Option<u32>,
        mut access: impl FnMut() -> Result<(), MemoryError>,
    ) -> Result<(), MemoryError> {
        let first = access();
        let Err(MemoryError::Busy { pool, .. }) = first else { return first };
        let s = self.lock();
        let has_brought = |r: &Running| arrived.is_some_and(|layer| r.step > layer);
        let waiting = s.queues.iter().flatten().filter(|r| !s.reached(r.fence) || has_brought(r));
        let lifted: Vec<Access> = waiting.flat_map(|r| r.record.device_claims(pool, page)).collect();
        lifted.iter().for_each(|&claim| self.memory().give(pool, &[page], claim));
        let result = access();
        for claim in lifted {
            // Only another access to these rows can be in the way, and that one ends.
            while self.memory().take(pool, &[page], claim).is_err() {
                std::hint::spin_loop();
            }
        }
        result
    }

    /// Fills a page with [`POISON_BYTE`](crate::backend::host::POISON_BYTE).
    pub fn poison(&self, pool: PoolKind, page: PageId) -> Result<(), MemoryError> {
        self.memory().poison(pool, page)
    }

    /// Begins a piece of compute work. Copies submitted behind the fence wait until it ends.
    #[must_use = "work that never ends holds back every copy behind it"]
    pub fn compute_begin(&self) -> Fence {
        let mut s = self.lock();
        s.compute_last += 1;
        let n = s.compute_last;
        s.compute_open.insert(n);
        Fence::after(n)
    }

    /// Begins a piece of compute work on the given device pages. Until it ends, a job that touches one of them
    /// behind an earlier fence is refused with [`JobError::FenceTooEarly`]: on a real device it would be
    /// the silent kind of wrong.
    #[must_use = "work that never ends holds back every copy behind it"]
    pub fn compute_begin_on(&self, pages: &[(PoolKind, PageId)]) -> Fence {
        let fence = self.compute_begin();
        let mut s = self.lock();
        for &page in pages {
            s.uses.insert(page, fence.number());
        }
        fence
    }

    /// Ends a piece of compute work. A second end of the same piece has no effect.
    pub fn compute_end(&self, piece: Fence) {
        let mut s = self.lock();
        s.compute_open.remove(&piece.number());
        s.uses.retain(|_, &mut last| last != piece.number());
        self.owner.shared.wake_workers(s);
    }

    /// The fence behind all compute work begun so far.
    #[must_use]
    pub fn fence(&self) -> Fence {
        Fence::after(self.lock().compute_last)
    }

    /// Makes a later job fail.
    pub fn inject(&self, fault: SoftFault) {
        self.lock().faults.push(fault);
    }

    /// Transfers a manual driver may step now, at most one per direction.
    #[must_use]
    pub fn runnable(&self) -> Vec<TransferId> {
        let s = self.lock();
        let heads = Direction::ALL.into_iter().filter(|&d| s.head_runs(d));
        heads.filter_map(|d| s.queues[d.index()].front().map(|r| r.record.id)).collect()
    }

    /// Copies one page of a transfer (one layer of it, in a job by layer): the one that `choice` picks
    /// among those a device might copy next, as `choice` modulo their number.
    pub fn step(&self, transfer: TransferId, choice: u64) -> Step {
        let mut s = self.lock();
        let Some(d) = s.manual_head(transfer) else { return Step::NotRunnable };
        let Some(mut running) = s.queues[d.index()].pop_front() else { return Step::NotRunnable };
        match self.owner.shared.copy_unit(s.host.as_ref(), &mut running, choice) {
            None => {
                let left = running.left();
                s.queues[d.index()].push_front(running);
                Step::Copied { left }
            }
            Some(outcome) => {
                self.owner.shared.ended(s, running.record, outcome);
                Step::Ended
            }
        }
    }

    /// Steps a transfer to its end, in order. `false` if it cannot run now.
    pub fn finish(&self, transfer: TransferId) -> bool {
        loop {
            match self.step(transfer, 0) {
                Step::NotRunnable => return false,
                Step::Copied { .. } => {}
                Step::Ended => return true,
            }
        }
    }

    /// Finishes every transfer that can run, round by round, until none can.
    pub fn finish_all(&self) {
        loop {
            let ids = self.runnable();
            if ids.is_empty() || !ids.into_iter().any(|id| self.finish(id)) {
                return;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.owner.shared.lock()
    }
}

impl State {
    fn manual_head(&self, transfer: TransferId) -> Option<Direction> {
        Direction::ALL.into_iter().find(|&d| {
            self.head_runs(d) && self.queues[d.index()].front().is_some_and(|r| r.record.id == transfer)
        })
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic under the lock is a test's assertion in a waker; the state is consistent between statements.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sides<'a>(&'a self, host: Option<&'a Arc<HostArena>>, tier: Tier) -> Option<&'a Arc<HostArena>> {
        match tier {
            Tier::Device => Some(&self.memory),
            Tier::Host | Tier::Store => host,
        }
    }

    /// Copies one unit of `running`; the outcome if that was the last or the one that fails.
    fn copy_unit(
        &self,
        host: Option<&Arc<HostArena>>,
        running: &mut Running,
        choice: u64,
    ) -> Option<Outcome> {
        if let Some(fault) = running.due_fault() {
            return Some(Outcome::Failed(fault));
        }
        if !running.units.is_empty() {
            let from_the_end = (choice % running.units.len() as u64) as usize;
            let (part, pair) = running.units.remove(running.units.len() - 1 - from_the_end);
            running.copied += 1;
            if self.copy_pages(host, running, part as usize, pair as usize).is_err() {
                return Some(Outcome::Failed(CopyFault { code: -1, quiescent: true }));
            }
        }
        match running.advance() {
            true => Some(running.due_fault().map_or(Outcome::Done, Outcome::Failed)),
            false => None,
        }
    }

    /// Copies one pair of pages, all layers or the layer of the current step.
    fn copy_pages(
        &self,
        host: Option<&Arc<HostArena>>,
        running: &Running,
        part: usize,
        pair: usize,
    ) -> Result<(), DeviceError> {
        let direction = running.record.direction;
        let from = self.sides(host, direction.source()).ok_or(DeviceError::NoHostArena)?;
        let to = self.sides(host, direction.destination()).ok_or(DeviceError::NoHostArena)?;
        let (pool, src, dst) = &running.record.pages.parts[part];
        let geometry = self.memory.geometry();
        let (first, end) = match running.steps {
            1 => (0, geometry.model_layers()),
            _ => (running.step, running.step + 1),
        };
        for (id, plane) in geometry.planes_of(*pool, running.planes[part]) {
            let layers = plane.layers_within(first, end);
            // SAFETY: geometries are equal (checked when the arena was attached); the job holds a shared
            // claim on the source page and an exclusive one on the destination page until it is polled.
            unsafe { copy_layers((from, src[pair]), (to, dst[pair]), id, layers)? };
        }
        Ok(())
    }

    /// Books the end of a job and wakes whoever waits.
    fn ended(&self, mut s: MutexGuard<'_, State>, record: Record, outcome: Outcome) {
        s.ended.push_back((record, outcome));
        let waker = s.waker.clone();
        drop(s);
        self.idle.notify_all();
        if let Some(wake) = waker {
            wake();
        }
    }

    /// Wakes the workers that have something to run and do not run already: a wake-up costs the caller microseconds.
    fn wake_workers(&self, s: MutexGuard<'_, State>) {
        let runs = Direction::ALL.map(|d| s.head_runs(d));
        drop(s);
        for (work, _) in self.work.iter().zip(runs).filter(|(_, runs)| *runs) {
            work.notify_one();
        }
    }

    /// Runs everything that can run. For the inline mode.
    fn run_inline(&self) {
        loop {
            let mut s = self.lock();
            let Some(d) = Direction::ALL.into_iter().find(|&d| s.head_runs(d)) else { return };
            let Some(mut running) = s.queues[d.index()].pop_front() else { return };
            let outcome = loop {
                if let Some(outcome) = self.copy_unit(s.host.as_ref(), &mut running, 0) {
                    break outcome;
                }
            };
            self.ended(s, running.record, outcome);
        }
    }

    fn take_claims(&self, host: Option<&Arc<HostArena>>, job: &CopyJob<'_>) -> Result<(), DeviceError> {
        let (from, to) = (job.direction.source(), job.direction.destination());
        let src = self.sides(host, from).ok_or(DeviceError::NoHostArena)?;
        let dst = self.sides(host, to).ok_or(DeviceError::NoHostArena)?;
        for (i, part) in job.parts.iter().enumerate() {
            let taken =
                src.take(part.pool, part.src, Access::Shared).map_err(|e| busy(from, e)).and_then(|()| {
                    dst.take(part.pool, part.dst, Access::Exclusive).map_err(|e| {
                        src.give(part.pool, part.src, Access::Shared);
                        busy(to, e)
                    })
                });
            if let Err(e) = taken {
                for part in &job.parts[..i] {
                    src.give(part.pool, part.src, Access::Shared);
                    dst.give(part.pool, part.dst, Access::Exclusive);
                }
                return Err(e);
            }
        }
        Ok(())
    }

    fn give_claims(&self, host: Option<&Arc<HostArena>>, record: &Record) {
        let src = self.sides(host, record.direction.source());
        let dst = self.sides(host, record.direction.destination());
        for (pool, from, to) in &record.pages.parts {
            if let (Some(src), Some(dst)) = (src, dst) {
                src.give(*pool, from, Access::Shared);
                dst.give(*pool, to, Access::Exclusive);
            }
        }
    }
}

fn busy(tier: Tier, e: MemoryError) -> DeviceError {
    match e {
        MemoryError::Busy { pool, page } => JobError::PageBusy { tier, pool, page }.into(),
        MemoryError::NoSuchPage { pool, page, pages } => {
            JobError::NoSuchPage { tier, pool, page, pages }.into()
        }
        other => other.into(),
    }
}

/// A worker: runs the head of its queue, outside the lock, until the device goes.
fn work(shared: &Shared, direction: Direction) {
    let q = direction.index();
    loop {
        let mut s = shared.lock();
        while !s.stop && !s.head_runs(direction) {
            s = shared.work[q].wait(s).unwrap_or_else(PoisonError::into_inner);
        }
        if s.stop {
            return;
        }
        let Some(mut running) = s.queues[q].pop_front() else { continue };
        s.taken[q] = true;
        let host = s.host.clone();
        drop(s);
        let outcome = loop {
            if let Some(outcome) = shared.copy_unit(host.as_ref(), &mut running, 0) {
                break outcome;
            }
        };
        let mut s = shared.lock();
        s.taken[q] = false;
        shared.ended(s, running.record, outcome);
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.work.iter().for_each(Condvar::notify_all);
        let here = std::thread::current().id();
        for worker in self.workers.drain(..) {
            // The last handle may go inside a waker, on a worker; that one ends by itself.
            if worker.thread().id() != here {
                let joined = worker.join();
                debug_assert!(joined.is_ok(), "a worker panicked");
            }
        }
    }
}

impl Device for SoftDevice {
    fn launched(&self) -> Fence {
        self.fence()
    }

    fn geometry(&self) -> &Arc<Geometry> {
        self.memory().geometry()
    }

    fn pages(&self, pool: PoolKind) -> u32 {
        self.memory().pages(pool)
    }

    fn attach_host(&mut self, arena: Arc<HostArena>) -> Result<(), DeviceError> {
        if **arena.geometry() != **self.geometry() {
            return Err(DeviceError::GeometryMismatch);
        }
        let mut s = self.lock();
        if s.host.is_some() {
            return Err(DeviceError::HostArenaTwice);
        }
        s.host = Some(arena);
        Ok(())
    }

    fn detach_host(&mut self) -> Result<(), DeviceError> {
        let mut s = self.lock();
        let jobs = s.in_flight.iter().sum();
        if jobs > 0 {
            return Err(DeviceError::HostInUse { jobs });
        }
        s.host = None;
        Ok(())
    }

    fn submit(&mut self, job: &CopyJob<'_>, after: Fence) -> Result<Submit, DeviceError> {
        let shared = &self.owner.shared;
        let mut s = shared.lock();
        if s.closed {
            return Err(DeviceError::Closed);
        }
        if after.number() > s.compute_last {
            return Err(DeviceError::FenceAhead { fence: after.number(), last: s.compute_last });
        }
        let pages = |tier| {
            let side = shared.sides(s.host.as_ref(), tier).cloned();
            move |pool| side.as_ref().map_or(0, |a| a.pages(pool))
        };
        if s.host.is_none() && job.direction != Direction::DeviceToDevice {
            return Err(DeviceError::NoHostArena);
        }
        job.check(pages(job.direction.source()), pages(job.direction.destination()))?;
        s.check_uses(job, after)?;
        let q = job.direction.index();
        let limit = shared.options.queue_limit;
        if s.in_flight[q] >= limit {
            return Ok(Submit::Refused(Refusal::QueueFull { limit }));
        }
        shared.take_claims(s.host.as_ref(), job)?;
        s.next_transfer += 1;
        s.in_flight[q] += 1;
        let model_layers = shared.memory.geometry().model_layers();
        let record = Record::new(TransferId(s.next_transfer), job, job.bytes(shared.memory.geometry()));
        let handle = record.handle();
        let mut running = Box::new(Running {
            record,
            planes: job.parts.iter().map(|p| p.planes).collect(),
            fence: after,
            steps: if job.by_layer { model_layers } else { 1 },
            step: 0,
            units: Vec::new(),
            copied: 0,
            fault: next_fault(&mut s.faults),
        });
        running.fill();
        s.queues[q].push_back(running);
        match shared.options.mode {
            Mode::Manual => {}
            Mode::Threaded => shared.wake_workers(s),
            Mode::Inline => {
                drop(s);
                shared.run_inline();
            }
        }
        Ok(Submit::Started(handle))
    }

    fn poll(&mut self, out: &mut Vec<Completion>) -> Result<(), DeviceError> {
        let shared = &self.owner.shared;
        if shared.options.mode == Mode::Inline {
            shared.run_inline();
        }
        let mut s = shared.lock();
        let model_layers = shared.memory.geometry().model_layers();
        while let Some((mut record, outcome)) = s.ended.pop_front() {
            s.in_flight[record.direction.index()] -= 1;
            // An end that is not proved keeps its claims: the memory refuses those pages from now on.
            if !matches!(outcome, Outcome::Failed(CopyFault { quiescent: false, .. })) {
                shared.give_claims(s.host.as_ref(), &record);
            }
            out.push(record.complete(outcome, model_layers));
        }
        Ok(())
    }

    fn room(&self, direction: Direction) -> u32 {
        let s = self.lock();
        match s.closed {
            true => 0,
            false => self.owner.shared.options.queue_limit.saturating_sub(s.in_flight[direction.index()]),
        }
    }

    fn in_flight(&self) -> u32 {
        self.lock().in_flight.iter().sum()
    }

    fn set_waker(&mut self, waker: Option<Waker>) {
        self.lock().waker = waker;
    }

    fn close(&mut self, wait_max: Duration) -> CloseReport {
        let shared = &self.owner.shared;
        shared.lock().closed = true;
        if shared.options.mode == Mode::Inline {
            shared.run_inline();
        }
        let mut s = shared.lock();
        let deadline = Instant::now().checked_add(wait_max);
        // Only workers go on by themselves; there is nobody to wait for in the other modes.
        while shared.options.mode == Mode::Threaded && s.unended() > 0 {
            let left = deadline.map_or(wait_max, |d| d.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                break;
            }
            s = shared.idle.wait_timeout(s, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        CloseReport { unfinished: s.unended() }
    }
}

/// The fault for the job that is being submitted, if one is due.
fn next_fault(faults: &mut Vec<SoftFault>) -> Option<(u32, CopyFault)> {
    let due = faults.iter().position(|f| f.skip_jobs == 0);
    for fault in faults.iter_mut() {
        fault.skip_jobs = fault.skip_jobs.saturating_sub(1);
    }
    due.map(|i| faults.remove(i)).map(|f| (f.after_units, f.fault))
}

#[cfg(test)]
mod tests {
    use super::super::job::CopyPart;
    use super::*;
    use crate::base::OpId;
    use crate::pool::{Capacity, Plane};

    #[test]
    fn compute_touches_pages_of_copies_behind_it_and_of_no_others() {
        let geometry = Arc::new(Geometry::builder(2).plane(Plane::target(1, 4)).build().unwrap());
        let capacities = Capacities::full(Capacity::Pages(4));
        let device = SoftDevice::manual(Arc::clone(&geometry), capacities).unwrap();
        let host = Arc::new(HostArena::new(geometry, capacities).unwrap());
        let mut owner: Box<dyn Device> = Box::new(device.clone());
        owner.attach_host(Arc::clone(&host)).unwrap();
        let write = |page: u32, byte: u8| device.write_rows(PlaneId(0), PageId(page), 0, 0, &[byte; 16]);
        let mut submit = |op, direction, src: u32, dst: u32, after| {
            let (src, dst) = ([PageId(src)], [PageId(dst)]);
            let parts = [CopyPart::full(&src, &dst)];
            let job = CopyJob { op: OpId(op), direction, parts: &parts, by_layer: false };
            assert!(matches!(owner.submit(&job, after), Ok(Submit::Started(_))));
        };
        host.write(PlaneId(0), PageId(2), 0, &[9; 16]).unwrap();
        let work = device.compute_begin();
        submit(1, Direction::DeviceToHost, 0, 1, work);
        submit(2, Direction::HostToDevice, 2, 3, work);
        // A backup reads what the work writes although the backup was asked for first; a load is not overwritten.
        write(0, 7).unwrap();
        write(3, 7).unwrap();
        let mut seen = [0; 16];
        device.read_rows(PlaneId(0), PageId(3), 0, 0, &mut seen).unwrap();
        assert_eq!(seen, [7; 16]);
        device.compute_end(work);
        // From here on the copies may run, so their pages are theirs.
        assert!(matches!(write(0, 8), Err(MemoryError::Busy { .. })));
        assert!(matches!(write(3, 8), Err(MemoryError::Busy { .. })));
        device.finish_all();
        let mut ended = Vec::new();
        owner.poll(&mut ended).unwrap();
        assert_eq!(ended.len(), 2);
        host.read(PlaneId(0), PageId(1), 0, &mut seen).unwrap();
        assert_eq!(seen, [7; 16]);
        device.read_rows(PlaneId(0), PageId(3), 0, 0, &mut seen).unwrap();
        assert_eq!(seen, [9; 16]);
        write(0, 8).unwrap();
    }
}
