//! Transfers: the handle of a job in flight and the report of its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};

use super::job::{CopyJob, Direction};
use crate::backend::host::Access;
use crate::base::{OpId, PageId, Tier};
use crate::pool::PoolKind;

/// A transfer of one device. Never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct TransferId(pub u64);

/// Where a transfer stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TransferState {
    /// Queued or running.
    Pending,
    /// Every byte is where it belongs.
    Done,
    /// It failed; the completion says how.
    Failed,
}

/// Why a copy failed and what that means for its pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("copy failed with code {code}{}", if *.quiescent { "" } else { ", its end cannot be proved" })]
pub struct CopyFault {
    /// The driver's number, or the one a test injected.
    pub code: i32,
    /// Whether the device proved that it no longer touches the pages. If not, they must go to quarantine,
    /// not back to a pool. Destination bytes are undefined either way.
    pub quiescent: bool,
}

/// How a transfer ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Every byte is where it belongs.
    Done,
    /// It failed as a whole.
    Failed(CopyFault),
}

/// Pages of a transfer whose handle was dropped before it ended: nobody else may know them any more.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Parked {
    /// Pool, pages read, pages written.
    pub parts: Vec<(PoolKind, Vec<PageId>, Vec<PageId>)>,
}

/// The end of a transfer. From here on its pages are the caller's again.
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use]
pub struct Completion {
    /// The transfer.
    pub transfer: TransferId,
    /// The caller's name of the job.
    pub op: OpId,
    /// Which way it copied.
    pub direction: Direction,
    /// Bytes it moved, or was to move.
    pub bytes: u64,
    /// How it ended.
    pub outcome: Outcome,
    /// The pages, if the handle was dropped before the end.
    pub parked: Option<Box<Parked>>,
}

// 0 is pending, the default.
const DONE: u8 = 1;
const FAILED: u8 = 2;

/// What handle and device share.
#[derive(Debug, Default)]
pub(crate) struct Cell {
    state: AtomicU8,
    layers_ready: AtomicU32,
    dropped: AtomicBool,
}

impl Cell {
    /// Layers `0..layers` may be used. `Release`: who sees the count sees the bytes.
    pub(crate) fn set_layers_ready(&self, layers: u32) {
        self.layers_ready.store(layers, Ordering::Release);
    }

    /// Ends the transfer. `model_layers` become ready if it is done.
    pub(crate) fn end(&self, outcome: Outcome, model_layers: u32) {
        match outcome {
            Outcome::Done => {
                self.layers_ready.store(model_layers, Ordering::Release);
                self.state.store(DONE, Ordering::Release);
            }
            Outcome::Failed(_) => self.state.store(FAILED, Ordering::Release),
        }
    }

    /// Whether the handle is gone.
    pub(crate) fn dropped(&self) -> bool {
        self.dropped.load(Ordering::Acquire)
    }
}

/// The handle of a transfer. Reading it costs an atomic load and needs no device. Dropping it before the
/// end parks the pages: they come back in the [`Completion`].
#[derive(Debug)]
#[must_use = "dropping it early hands the pages to the completion"]
pub struct Transfer {
    id: TransferId,
    cell: Arc<Cell>,
}

impl Transfer {
    pub(crate) fn new(id: TransferId, cell: Arc<Cell>) -> Transfer {
        Transfer { id, cell }
    }

    /// Its name.
    #[must_use]
    pub fn id(&self) -> TransferId {
        self.id
    }

    /// Where it stands. Terminal states show at the latest when the completion is polled.
    #[must_use]
    pub fn state(&self) -> TransferState {
        match self.cell.state.load(Ordering::Acquire) {
            DONE => TransferState::Done,
            FAILED => TransferState::Failed,
            _ => TransferState::Pending,
        }
    }

    /// How many layers of the model, from layer 0 on, are complete in every plane of the job.
    #[must_use]
    pub fn layers_ready(&self) -> u32 {
        self.cell.layers_ready.load(Ordering::Acquire)
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.cell.dropped.store(true, Ordering::Release);
    }
}

/// The device's copy of a job in flight, enough to report and to park it.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) id: TransferId,
    pub(crate) op: OpId,
    pub(crate) direction: Direction,
    pub(crate) bytes: u64,
    pub(crate) pages: Parked,
    pub(crate) cell: Arc<Cell>,
}

impl Record {
    pub(crate) fn new(id: TransferId, job: &CopyJob<'_>, bytes: u64) -> Record {
        let parts = job.parts.iter().map(|p| (p.pool, p.src.to_vec(), p.dst.to_vec())).collect();
        let cell = Arc::<Cell>::default();
        Record { id, op: job.op, direction: job.direction, bytes, pages: Parked { parts }, cell }
    }

    /// The claims of the transfer on a page in device memory.
    pub(crate) fn device_claims(&self, pool: PoolKind, page: PageId) -> impl Iterator<Item = Access> {
        let reads = self.direction.source() == Tier::Device;
        let writes = self.direction.destination() == Tier::Device;
        self.pages.parts.iter().filter(move |part| part.0 == pool).flat_map(move |(_, src, dst)| {
            let of = |on: bool, list: &[PageId], access| (on && list.contains(&page)).then_some(access);
            [of(reads, src, Access::Shared), of(writes, dst, Access::Exclusive)].into_iter().flatten()
        })
    }

    /// The handle for the caller. Once per record.
    pub(crate) fn handle(&self) -> Transfer {
        Transfer::new(self.id, Arc::clone(&self.cell))
    }

    /// Whether nobody holds the handle any more, so that the record can be used again.
    pub(crate) fn is_free(&mut self) -> bool {
        Arc::get_mut(&mut self.cell).is_some()
    }

    /// Makes the record that of another job, keeping its buffers. Only when it [is free](Self::is_free).
    pub(crate) fn reuse(&mut self, id: TransferId, job: &CopyJob<'_>, bytes: u64) {
        (self.id, self.op, self.direction, self.bytes) = (id, job.op, job.direction, bytes);
        match Arc::get_mut(&mut self.cell) {
            Some(cell) => *cell = Cell::default(),
            None => self.cell = Arc::default(),
        }
        self.pages.parts.resize_with(job.parts.len(), || (PoolKind::Full, Vec::new(), Vec::new()));
        for ((pool, src, dst), part) in self.pages.parts.iter_mut().zip(job.parts) {
            *pool = part.pool;
            src.clear();
            src.extend_from_slice(part.src);
            dst.clear();
            dst.extend_from_slice(part.dst);
        }
    }

    /// Ends the transfer and makes the report. The pages move into it if the handle was dropped.
    pub(crate) fn complete(&mut self, outcome: Outcome, model_layers: u32) -> Completion {
        self.cell.end(outcome, model_layers);
        let parked = self.cell.dropped().then(|| Box::new(std::mem::take(&mut self.pages)));
        Completion {
            transfer: self.id,
            op: self.op,
            direction: self.direction,
            bytes: self.bytes,
            outcome,
            parked,
        }
    }
}
