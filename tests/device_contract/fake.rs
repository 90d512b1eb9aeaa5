//! A driver made of queues: it copies host memory, when and in what order the test says.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard};

use sapwood::backend::device::driver::{Capabilities, Driver, DriverError, EventId, StreamId};
use sapwood::backend::device::kernels::{Head, Kernel, PAIRS_LARGE, PAIRS_SMALL, PageJob, Ring, Side};
use sapwood::backend::device::{Direction, Waker};

use crate::rig::Random;

enum Op {
    Record(EventId, u64),
    Wait(EventId, u64),
    Copy(u64, u64, usize),
    Launch(Kernel, Box<PageJob<PAIRS_LARGE>>, Option<Ring>, u32),
    Notify(Waker),
    /// Compute work: runs when the test has ended it.
    Gate(u64),
}

#[derive(Default)]
struct State {
    streams: BTreeMap<u64, VecDeque<Op>>,
    /// Per event: records so far, records reached.
    events: Vec<(u64, u64)>,
    gates: BTreeMap<u64, bool>,
    registered: Vec<(usize, usize)>,
    fail_in: Option<u32>,
    calls: u32,
    launches: u32,
    copies: u32,
}

/// The driver; a clone drives it.
#[derive(Clone)]
pub(crate) struct FakeDriver {
    state: Arc<Mutex<State>>,
    can: Capabilities,
}

pub(crate) const COMPUTE: u64 = 100;

fn key(stream: StreamId) -> u64 {
    match stream {
        StreamId::Copy(d) => d.index() as u64,
        StreamId::Compute(handle) => handle,
    }
}

impl FakeDriver {
    /// Pieces of host memory that are registered.
    pub(crate) fn registered(&self) -> usize {
        self.lock().registered.len()
    }

    pub(crate) fn new(can: Capabilities) -> FakeDriver {
        FakeDriver { state: Arc::default(), can }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn call(&self, call: &'static str) -> Result<MutexGuard<'_, State>, DriverError> {
        let mut s = self.lock();
        s.calls += 1;
        match &mut s.fail_in {
            Some(0) => return Err(DriverError { call, code: 700 }),
            Some(n) => *n -= 1,
            None => {}
        }
        Ok(s)
    }

    /// Every call from the `n`-th on fails.
    pub(crate) fn fail_in(&self, n: u32) {
        self.lock().fail_in = Some(n);
    }

    /// Copies and launches so far.
    pub(crate) fn work(&self) -> (u32, u32) {
        let s = self.lock();
        (s.copies, s.launches)
    }

    pub(crate) fn gate(&self, n: u64) {
        let mut s = self.lock();
        s.gates.insert(n, false);
        s.streams.entry(COMPUTE).or_default().push_back(Op::Gate(n));
    }

    pub(crate) fn open(&self, n: u64) {
        self.lock().gates.insert(n, true);
    }

    /// Runs up to `n` operations, each at the head of a stream picked at random.
    pub(crate) fn run(&self, n: u32, random: &mut Random) {
        for _ in 0..n {
            let mut s = self.lock();
            let ready: Vec<u64> = s.streams.iter().filter(|(_, q)| s.ready(q)).map(|(&k, _)| k).collect();
            if ready.is_empty() {
                return;
            }
            let stream = ready[random.below(ready.len() as u64) as usize];
            let Some(op) = s.streams.get_mut(&stream).and_then(VecDeque::pop_front) else { return };
            match op {
                Op::Record(event, n) => s.events[event.0 as usize].1 = n,
                Op::Wait(..) | Op::Gate(_) => {}
                // SAFETY: the device under test owns the pages until it has seen the event behind this.
                Op::Copy(from, to, len) => unsafe {
                    std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, len);
                },
                Op::Launch(kernel, job, ring, grid) => launch(kernel, &job, ring, grid),
                Op::Notify(waker) => {
                    drop(s);
                    waker();
                }
            }
        }
    }

    pub(crate) fn idle(&self) -> bool {
        let s = self.lock();
        !s.streams.values().any(|q| s.ready(q))
    }
}

impl State {
    fn ready(&self, queue: &VecDeque<Op>) -> bool {
        match queue.front() {
            None => false,
            Some(Op::Wait(event, n)) => self.events[event.0 as usize].1 >= *n,
            Some(Op::Gate(n)) => self.gates[n],
            Some(_) => true,
        }
    }
}

/// The kernel itself where it is compiled in, else what it is documented to do.
fn launch(kernel: Kernel, job: &PageJob<PAIRS_LARGE>, ring: Option<Ring>, grid: u32) {
    #[cfg(feature = "cpu-kernels")]
    {
        use sapwood::backend::device::cpu::{CpuMode, launch_pages};
        let ring = ring.unwrap_or(Ring { stages: 0, stage_bytes: 0 });
        let mode = CpuMode { late_loads: true, late_stores: true, ..CpuMode::default() };
        // SAFETY: as for a copy.
        assert!(unsafe { launch_pages(kernel, job, grid, kernel.block_threads(), ring, mode) });
    }
    #[cfg(not(feature = "cpu-kernels"))]
    {
        let _ = (kernel, ring, grid);
        let Head { src, dst, run_bytes, pairs, layers, parts, .. } = job.head;
        let at = |s: &Side, page: u32, layer: u32, part: u32| {
            let inner = match s.table {
                0 => s.base + u64::from(layer) * s.layer_step + u64::from(part) * s.part_step,
                // SAFETY: tables of the test rigs live as long as the device.
                table => unsafe {
                    let row = (job.head.first_layer + layer) * job.head.table_parts + part;
                    *(table as *const u64).add(row as usize)
                },
            };
            inner + u64::from(page) * s.page_step
        };
        for i in 0..pairs as usize {
            for layer in 0..layers {
                for part in 0..parts {
                    let (from, to) = (at(&src, job.src[i], layer, part), at(&dst, job.dst[i], layer, part));
                    // SAFETY: as for a copy.
                    unsafe {
                        std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, run_bytes as usize);
                    }
                }
            }
        }
    }
}

#[cfg(feature = "cpu-kernels")]
const _: fn(&Head, &Side) = |_, _| {};

// SAFETY: operations run in stream order, waits are honoured, an event is done when its record was reached.
unsafe impl Driver for FakeDriver {
    fn capabilities(&self) -> Capabilities {
        self.can
    }

    fn create_event(&mut self) -> Result<EventId, DriverError> {
        let mut s = self.call("create")?;
        s.events.push((0, 0));
        Ok(EventId(s.events.len() as u32 - 1))
    }

    fn record(&mut self, event: EventId, stream: StreamId) -> Result<(), DriverError> {
        let mut s = self.call("record")?;
        let recorded = &mut s.events[event.0 as usize];
        assert_eq!(recorded.0, recorded.1, "an event is used again before it was reached");
        recorded.0 += 1;
        let n = recorded.0;
        s.streams.entry(key(stream)).or_default().push_back(Op::Record(event, n));
        Ok(())
    }

    fn is_done(&mut self, event: EventId) -> Result<bool, DriverError> {
        let s = self.call("query")?;
        let (recorded, reached) = s.events[event.0 as usize];
        Ok(recorded == reached)
    }

    fn wait(&mut self, stream: StreamId, event: EventId) -> Result<(), DriverError> {
        let mut s = self.call("wait")?;
        let n = s.events[event.0 as usize].0;
        s.streams.entry(key(stream)).or_default().push_back(Op::Wait(event, n));
        Ok(())
    }

    fn register_host(&mut self, base: NonNull<u8>, len: usize) -> Result<u64, DriverError> {
        self.call("register")?.registered.push((base.as_ptr() as usize, len));
        Ok(base.as_ptr() as u64)
    }

    fn unregister_host(&mut self, base: NonNull<u8>, len: usize) -> Result<(), DriverError> {
        let mut s = self.lock();
        let at = s.registered.iter().position(|r| *r == (base.as_ptr() as usize, len));
        let at = at.ok_or(DriverError { call: "unregister", code: 1 })?;
        s.registered.remove(at);
        Ok(())
    }

    fn abandon(&mut self) {}

    fn notify(&mut self, stream: StreamId, waker: &Waker) -> Result<(), DriverError> {
        let mut s = self.call("notify")?;
        s.streams.entry(key(stream)).or_default().push_back(Op::Notify(Arc::clone(waker)));
        Ok(())
    }

    unsafe fn copy(
        &mut self,
        direction: Direction,
        src: &mut [u64],
        dst: &mut [u64],
        len: &mut [usize],
        _settled: bool,
    ) -> Result<(), DriverError> {
        let mut s = self.call("copy")?;
        s.copies += src.len() as u32;
        let queue = s.streams.entry(direction.index() as u64).or_default();
        // Copies of a batch have no order: reverse it.
        for i in (0..src.len()).rev() {
            queue.push_back(Op::Copy(src[i], dst[i], len[i]));
        }
        Ok(())
    }

    unsafe fn launch(
        &mut self,
        direction: Direction,
        kernel: Kernel,
        large: bool,
        record: *mut c_void,
        ring: Option<Ring>,
        grid: u32,
    ) -> Result<(), DriverError> {
        let mut s = self.call("launch")?;
        s.launches += 1;
        let mut job = Box::<PageJob<PAIRS_LARGE>>::default();
        if large {
            // SAFETY: the device passes a record of the length it says.
            *job = unsafe { *record.cast::<PageJob<PAIRS_LARGE>>() };
        } else {
            // SAFETY: as above.
            let small = unsafe { *record.cast::<PageJob<PAIRS_SMALL>>() };
            job.head = small.head;
            job.src[..PAIRS_SMALL].copy_from_slice(&small.src);
            job.dst[..PAIRS_SMALL].copy_from_slice(&small.dst);
        }
        let op = Op::Launch(kernel, job, ring, grid);
        s.streams.entry(direction.index() as u64).or_default().push_back(op);
        Ok(())
    }
}
