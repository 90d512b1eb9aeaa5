//! Transfers through `io_uring`: one ring per running call, completions handled on the calling thread.
#![expect(unsafe_code, reason = "queues addresses of region memory with the kernel")]

use std::io;
use std::sync::{Arc, Mutex};

use io_uring::{IoUring, opcode, types};

use super::io_threads::{Batch, Course, Engine, Op, Way};
use crate::backend::store::gate::locked;

/// Rings and how many transfers each keeps in flight.
pub(super) struct Uring {
    depth: usize,
    idle: Mutex<Vec<IoUring>>,
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring").field("depth", &self.depth).finish_non_exhaustive()
    }
}

impl Uring {
    /// Makes one ring, so that a system without them is found out here.
    pub(super) fn new(depth: usize) -> io::Result<Uring> {
        let depth = depth.clamp(1, 1024);
        let first = IoUring::new(depth as u32)?;
        Ok(Uring { depth, idle: Mutex::new(vec![first]) })
    }
}

/// A transfer that the kernel may be working on.
struct Flight {
    item: usize,
    op: Op,
    course: Course,
}

/// A ring in use. Dropping it waits for everything in flight: the memory belongs to the caller again only
/// when the kernel has let go of it.
struct Flights<'a> {
    ring: Option<IoUring>,
    slots: Vec<Option<Flight>>,
    flying: usize,
    home: &'a Mutex<Vec<IoUring>>,
}

impl Flights<'_> {
    fn launch(&mut self, slot: usize) -> io::Result<()> {
        let (Some(ring), Some(flight)) = (&mut self.ring, &self.slots[slot]) else { return Ok(()) };
        let Some((vectors, count)) = flight.course.rest(usize::MAX) else { return Ok(()) };
        let fd = types::Fd(flight.course.fd);
        let entry = match flight.op.way {
            Way::Read => opcode::Readv::new(fd, vectors, count as u32).offset(flight.course.offset).build(),
            Way::Write => opcode::Writev::new(fd, vectors, count as u32).offset(flight.course.offset).build(),
        };
        // SAFETY: descriptors, head and regions are owned by the flight, which stays in its slot until its
        // completion was seen: slots are emptied only there, and dropping `self` waits for all of them.
        let pushed = unsafe { ring.submission().push(&entry.user_data(slot as u64)) };
        // The ring has at least as many entries as there are slots.
        pushed.map_err(|_| io::Error::other("submission queue full"))?;
        self.flying += 1;
        Ok(())
    }

    /// Gives what was launched to the kernel, waits for `least` completions, and takes all there are.
    fn reap(&mut self, least: usize) -> io::Result<Vec<(usize, i32)>> {
        let Some(ring) = &mut self.ring else { return Ok(vec![]) };
        match ring.submit_and_wait(least) {
            Err(e) if e.kind() != io::ErrorKind::Interrupted => return Err(e),
            _ => {}
        }
        let completed: Vec<_> = ring.completion().map(|c| (c.user_data() as usize, c.result())).collect();
        self.flying -= completed.len();
        Ok(completed)
    }

    /// Starts an item in a free slot, or nothing if its outcome is known.
    fn start(&mut self, batch: &dyn Batch, item: usize) {
        let Some(op) = batch.begin(item) else { return };
        let Some(slot) = self.slots.iter().position(Option::is_none) else {
            batch.done(item, &op, Err(io::Error::other("no free slot")));
            return;
        };
        let course = op.course(usize::MAX);
        self.slots[slot] = Some(Flight { item, op, course });
        if let Err(e) = self.launch(slot)
            && let Some(flight) = self.slots[slot].take()
        {
            batch.done(flight.item, &flight.op, Err(e));
        }
    }

    /// Notes a completion. The flight comes back when it is over.
    fn landed(&mut self, slot: usize, result: i32) -> Option<(Flight, io::Result<Option<u32>>)> {
        let flight = self.slots.get_mut(slot)?.as_mut()?;
        let over = match usize::try_from(result) {
            Ok(n) => flight.course.advance(n).map(|()| flight.course.rest(usize::MAX).is_none()),
            Err(_) if -result == libc::EINTR || -result == libc::EAGAIN => Ok(false),
            Err(_) => Err(io::Error::from_raw_os_error(-result)),
        };
        let end = match over {
            Ok(true) => Ok(None),
            Ok(false) => match self.launch(slot) {
                Ok(()) => return None,
                Err(e) => Err(e),
            },
            Err(e) => Err(e),
        };
        self.slots[slot].take().map(|flight| (flight, end))
    }
}

impl Drop for Flights<'_> {
    fn drop(&mut self) {
        while self.flying > 0 {
            if self.reap(1).is_err() {
                // The kernel will not say when it is done with the memory. Never let go of it then.
                std::mem::forget(std::mem::take(&mut self.slots));
                std::mem::forget(self.ring.take());
                return;
            }
        }
        if let Some(ring) = self.ring.take() {
            locked(self.home).push(ring);
        }
    }
}

impl Engine for Uring {
    fn run(&self, batch: Arc<dyn Batch>) {
        let idle = locked(&self.idle).pop();
        let ring = idle.map_or_else(|| IoUring::new(self.depth as u32), Ok);
        let Ok(ring) = ring else {
            return one_by_one(&*batch, 0);
        };
        let depth = self.depth.min(batch.len());
        let slots = (0..depth).map(|_| None).collect();
        let mut flights = Flights { ring: Some(ring), slots, flying: 0, home: &self.idle };
        let mut next = 0;
        while next < batch.len() || flights.flying > 0 {
            while next < batch.len() && flights.flying < depth {
                flights.start(&*batch, next);
                next += 1;
            }
            if flights.flying == 0 {
                continue;
            }
            let Ok(completed) = flights.reap(1) else {
                // What flies keeps its memory (see `Flights::drop`); the rest goes the plain way.
                drop(flights);
                return one_by_one(&*batch, next);
            };
            let over: Vec<_> =
                completed.into_iter().filter_map(|(slot, result)| flights.landed(slot, result)).collect();
            // Checking a page takes time that the disk shall not wait for: first its successors set off.
            while next < batch.len() && flights.flying < depth {
                flights.start(&*batch, next);
                next += 1;
            }
            let reaped = flights.reap(0);
            for (flight, end) in over {
                batch.done(flight.item, &flight.op, end);
            }
            match reaped {
                Ok(early) => {
                    for (slot, result) in early {
                        if let Some((flight, end)) = flights.landed(slot, result) {
                            batch.done(flight.item, &flight.op, end);
                        }
                    }
                }
                Err(_) => {
                    drop(flights);
                    return one_by_one(&*batch, next);
                }
            }
        }
    }

    fn kind(&self) -> super::IoEngine {
        super::IoEngine::Uring
    }
}

fn one_by_one(batch: &dyn Batch, from: usize) {
    for item in from..batch.len() {
        if let Some(op) = batch.begin(item) {
            let result = op.run();
            batch.done(item, &op, result);
        }
    }
}
