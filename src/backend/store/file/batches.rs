//! Batches of gets and puts as transfers of an [`Engine`](super::io_threads::Engine).

use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};

use super::io_threads::{Batch, Engine, Head, Op, Way};
use super::log::{Loc, Place};
use super::{Inner, io_outcome, outcome_of};
use crate::backend::store::batch::{Call, Item, Outcome};
use crate::backend::store::envelope::{Header, payload_crc};
use crate::backend::store::gate::locked;
use crate::backend::store::regions::HeldSpans;
use crate::backend::store::sealed;

/// What an item has come to.
#[derive(Debug)]
enum Slot {
    /// Not begun, or being transferred.
    Open,
    /// Being read from there.
    Reading(Loc),
    /// Being written there.
    Writing(Place),
    /// Over.
    Over(Outcome),
    /// Read from there, and it failed its checks.
    Suspect(Loc),
}

struct Job {
    inner: Arc<Inner>,
    items: Vec<Item>,
    call: Call,
    slots: Mutex<Vec<Slot>>,
}

impl Job {
    fn new(inner: &Arc<Inner>, items: &[Item], call: &Call) -> Job {
        let slots = Mutex::new(items.iter().map(|_| Slot::Open).collect());
        Job { inner: Arc::clone(inner), items: items.to_vec(), call: call.clone(), slots }
    }

    fn set(&self, i: usize, slot: Slot) {
        locked(&self.slots)[i] = slot;
    }

    fn take(&self, i: usize) -> Slot {
        std::mem::replace(&mut locked(&self.slots)[i], Slot::Open)
    }
}

/// Runs a batch of gets.
pub(super) fn get(engine: &dyn Engine, inner: &Arc<Inner>, items: &[Item], call: &Call) -> Vec<Outcome> {
    let job = Arc::new(Get(Job::new(inner, items, call)));
    engine.run(Arc::clone(&job) as Arc<dyn Batch>);
    let slots = std::mem::take(&mut *locked(&job.0.slots));
    let settle = |(item, slot): (&Item, Slot)| match slot {
        Slot::Over(outcome) => outcome,
        Slot::Suspect(loc) => settle_suspect(inner, item, loc),
        // The engine has lost the item.
        Slot::Open | Slot::Reading(_) | Slot::Writing(_) => {
            Outcome::Transport(super::TransportCause::Protocol)
        }
    };
    items.iter().zip(slots).map(settle).collect()
}

/// A page that failed its checks is corrupt, unless it was removed or evicted while it was read.
fn settle_suspect(inner: &Inner, item: &Item, loc: Loc) -> Outcome {
    let still = locked(&inner.log.index).pages.get(&item.key) == Some(&loc);
    if !still {
        return Outcome::Missing;
    }
    inner.put_aside(&item.key, item.space, loc);
    Outcome::Corrupt
}

struct Get(Job);

impl Get {
    fn plan(&self, i: usize) -> Result<(Loc, Op), Outcome> {
        let Job { inner, items, call, .. } = &self.0;
        let item = &items[i];
        if let Some(stopped) = call.stopped() {
            return Err(stopped);
        }
        let payload = inner.regions.resolve(&item.spans)?;
        let index = locked(&inner.log.index);
        let loc = index.pages.get(&item.key).copied().ok_or(Outcome::Missing)?;
        if index.space(loc.space) != Some(item.space) {
            return Err(Outcome::Missing);
        }
        if loc.payload as usize != payload.len() {
            return Err(Outcome::SizeMismatch { stored: loc.payload as usize });
        }
        let segment = index.segments.get(&loc.segment).cloned().ok_or(Outcome::Missing)?;
        drop(index);
        segment.touch(loc.unit);
        let offset = u64::from(loc.unit) * u64::from(segment.head.align);
        let head = Head::new(&[], segment.head.header_bytes() as usize);
        Ok((loc, Op { segment, way: Way::Read, offset, head, payload }))
    }

    fn check(&self, i: usize, op: &Op, crc: Option<u32>) -> Result<usize, Outcome> {
        let item = &self.0.items[i];
        let header = Header::decode(op.head.bytes()).map_err(sealed::outcome_of)?;
        header.check(&item.key, &item.space).map_err(sealed::outcome_of)?;
        let len = op.payload.len();
        let holds = header.place == op.segment.head.place(op.offset)
            && header.payload_bytes == len as u64
            && header.payload_crc == crc.unwrap_or_else(|| payload_crc(op.payload.runs()));
        if holds { Ok(len) } else { Err(Outcome::Corrupt) }
    }
}

impl Batch for Get {
    fn len(&self) -> usize {
        self.0.items.len()
    }

    fn begin(&self, i: usize) -> Option<Op> {
        match self.plan(i) {
            Ok((loc, op)) => {
                self.0.set(i, Slot::Reading(loc));
                Some(op)
            }
            Err(outcome) => {
                self.0.set(i, Slot::Over(outcome));
                None
            }
        }
    }

    fn done(&self, i: usize, op: &Op, result: io::Result<Option<u32>>) {
        let Slot::Reading(loc) = self.0.take(i) else { return };
        let slot = match result {
            Ok(crc) => match self.check(i, op, crc) {
                Ok(len) => Slot::Over(Outcome::Ok(len)),
                Err(Outcome::VersionMismatch { found }) => Slot::Over(Outcome::VersionMismatch { found }),
                Err(_) => Slot::Suspect(loc),
            },
            // The file is shorter than the record: cut behind our back.
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Slot::Suspect(loc),
            Err(e) => Slot::Over(io_outcome(&e)),
        };
        self.0.set(i, slot);
    }
}

/// Runs a batch of puts.
pub(super) fn put(engine: &dyn Engine, inner: &Arc<Inner>, items: &[Item], call: &Call) -> Vec<Outcome> {
    let _with_others = inner.log.barrier.read().unwrap_or_else(PoisonError::into_inner);
    let job = Arc::new(Put(Job::new(inner, items, call)));
    engine.run(Arc::clone(&job) as Arc<dyn Batch>);
    let slots = std::mem::take(&mut *locked(&job.0.slots));
    let settle = |slot| match slot {
        Slot::Over(outcome) => outcome,
        // The engine has lost the item. Its segment must not wait for it for ever.
        Slot::Writing(place) => {
            place.segment.end_write(None);
            Outcome::Transport(super::TransportCause::Protocol)
        }
        Slot::Open | Slot::Reading(_) | Slot::Suspect(_) => {
            Outcome::Transport(super::TransportCause::Protocol)
        }
    };
    slots.into_iter().map(settle).collect()
}

struct Put(Job);

impl Put {
    fn plan(&self, i: usize) -> Result<(Place, Op), Outcome> {
        let Job { inner, items, call, .. } = &self.0;
        let item = &items[i];
        if let Some(stopped) = call.stopped() {
            return Err(stopped);
        }
        let payload = inner.regions.resolve(&item.spans)?;
        if self.is_there(item, &payload) {
            inner.log.counters.put_present.fetch_add(1, Relaxed);
            return Err(Outcome::Ok(payload.len()));
        }
        let bytes = u64::from(u32::try_from(payload.len()).map_err(|_| Outcome::NoSpace)?);
        let crc = payload_crc(payload.runs());
        let (place, spent) = inner.log.place(bytes).map_err(outcome_of)?;
        if spent.is_some() {
            inner.seal_later(spent);
            inner.rescue();
        }
        let at = place.segment.head.place(place.offset);
        let header = Header { place: at, ..Header::new(item.key, item.space, bytes, crc) };
        let head = Head::new(&header.encode(), place.segment.head.header_bytes() as usize);
        let segment = Arc::clone(&place.segment);
        let offset = place.offset;
        Ok((place, Op { segment, way: Way::Write, offset, head, payload }))
    }

    /// A key names its content, so a page that is there need not be written again.
    fn is_there(&self, item: &Item, payload: &HeldSpans) -> bool {
        let index = locked(&self.0.inner.log.index);
        index
            .pages
            .get(&item.key)
            .is_some_and(|l| l.payload as usize == payload.len() && index.space(l.space) == Some(item.space))
    }
}

impl Batch for Put {
    fn len(&self) -> usize {
        self.0.items.len()
    }

    fn begin(&self, i: usize) -> Option<Op> {
        match self.plan(i) {
            Ok((place, op)) => {
                self.0.set(i, Slot::Writing(place));
                Some(op)
            }
            Err(outcome) => {
                self.0.set(i, Slot::Over(outcome));
                None
            }
        }
    }

    fn done(&self, i: usize, op: &Op, result: io::Result<Option<u32>>) {
        let Slot::Writing(place) = self.0.take(i) else { return };
        let outcome = match result {
            Ok(_) => {
                op.testify();
                let item = &self.0.items[i];
                let len = op.payload.len();
                // The length was checked to fit when the place was given out.
                let published = self.0.inner.log.commit(&place, item.key, item.space, len as u32);
                if published { Outcome::Ok(len) } else { Outcome::NoSpace }
            }
            Err(e) => {
                place.segment.end_write(None);
                io_outcome(&e)
            }
        };
        self.0.set(i, Slot::Over(outcome));
    }
}
