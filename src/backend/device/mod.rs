//! Devices: memory the model computes on, and the copies between it and host memory.
//!
//! A [`Device`] executes copy jobs. A job names whole pages; the device owns them, on both sides, from
//! [`Device::submit`] until it reports the job's [`Completion`]. There is no cancel: a copy that runs can
//! only be waited for, and a [`Transfer`] handle that is dropped early changes who is told, not who owns.
//!
//! Order. Jobs of one direction start in the order they were submitted. Nothing orders two directions but
//! the pages: a job that touches a page which another job writes, or writes a page which another job
//! reads, is an error until that one has completed. Nothing orders a copy and the model's compute but the
//! [`Fence`], which is therefore an argument.

#[cfg(feature = "cpu-kernels")]
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod driver;
mod job;
pub mod kernels;
pub mod plan;
mod soft;
mod stream;
mod transfer;

pub use job::{CopyJob, CopyPart, Direction, JobError};
pub use soft::{Mode, SoftDevice, SoftFault, SoftOptions, Step};
pub use stream::{DevicePlane, StreamDevice};
pub use transfer::{Completion, CopyFault, Outcome, Parked, Transfer, TransferId, TransferState};

use std::sync::Arc;
use std::time::Duration;

use crate::backend::host::HostArena;
use crate::base::Fence;
use crate::pool::{Geometry, PoolKind};

/// What became of a submission.
#[derive(Debug)]
#[must_use]
pub enum Submit {
    /// The job runs; the device owns its pages until its completion is reported.
    Started(Transfer),
    /// The job was not taken, nothing changed, try again after a [`Device::poll`].
    Refused(Refusal),
}

/// Why a job was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Refusal {
    /// As many jobs of this direction are in flight as the device takes.
    QueueFull {
        /// How many that is.
        limit: u32,
    },
}

/// Why a device refused a call for good.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The device was closed.
    #[error("the device is closed")]
    Closed,
    /// A job with host pages came before [`Device::attach_host`].
    #[error("no host arena is attached")]
    NoHostArena,
    /// A second arena was attached.
    #[error("a host arena is attached already")]
    HostArenaTwice,
    /// The host arena is to go while jobs are in flight.
    #[error("{jobs} jobs may use the host arena")]
    HostInUse {
        /// Jobs whose completion was not reported.
        jobs: u32,
    },
    /// The arena holds other planes or another page size than the device.
    #[error("the host arena has another geometry than the device")]
    GeometryMismatch,
    /// The fence lies ahead of the compute work the device was told of.
    #[error("fence {fence} is ahead of the last piece of compute work, {last}")]
    FenceAhead {
        /// Number in the fence.
        fence: u64,
        /// Last number given out.
        last: u64,
    },
    /// The job is malformed.
    #[error(transparent)]
    Job(#[from] JobError),
    /// The memory of the device or of the arena could not be had.
    #[error(transparent)]
    Memory(#[from] crate::backend::host::MemoryError),
    /// The transfer failed; its completion says how.
    #[error("the transfer failed")]
    TransferFailed,
    /// A worker thread could not be started.
    #[error("cannot start a worker thread: {source}")]
    Thread {
        /// What the system said.
        source: std::io::Error,
    },
    /// There is no CUDA device to be had.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(cuda::CudaError),
    /// The driver failed; the device takes no more work.
    #[error("driver call {call} failed with code {code}")]
    Driver {
        /// Name of the call.
        call: &'static str,
        /// The driver's number.
        code: i32,
    },
}

/// What was left when a device was closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CloseReport {
    /// Jobs that had not ended. Their pages must never be used again while the memory is mapped.
    pub unfinished: u32,
}

/// Called when a completion may be waiting, from any thread; must not block.
pub type Waker = Arc<dyn Fn() + Send + Sync>;

/// A device. One owner drives it; nothing in here waits for a copy except [`Device::close`].
pub trait Device: Send {
    /// Planes and page size.
    fn geometry(&self) -> &Arc<Geometry>;

    /// Pages of a pool. Valid page ids are below it.
    fn pages(&self, pool: PoolKind) -> u32;

    /// Makes the arena the host side of all later jobs, until [`detach_host`](Device::detach_host). May register memory with a
    /// driver and take milliseconds per GiB.
    fn attach_host(&mut self, arena: Arc<HostArena>) -> Result<(), DeviceError>;

    /// Lets go of the arena, if there is one: what the driver knows of its memory is forgotten, and another one can be
    /// attached. Refused while a job's completion was not reported. If the driver does not let go, the memory stays mapped
    /// for the life of the process.
    fn detach_host(&mut self) -> Result<(), DeviceError>;

    /// Starts a job behind `after`, the last use of its device pages by compute: for a copy to the host the
    /// work that writes them, for a copy to the device all work that may still read or write them.
    ///
    /// O(pages). On `Refused` and on an error nothing changed and the pages are the caller's.
    fn submit(&mut self, job: &CopyJob<'_>, after: Fence) -> Result<Submit, DeviceError>;

    /// The fence behind all compute work launched so far: for pages whose last use nobody can name.
    fn launched(&self) -> Fence;

    /// The fence behind everything that was submitted to a compute stream so far. The stream is a raw handle of the
    /// driver and must be alive; a device without streams gives the fence behind all work that it was told of.
    fn note_compute(&mut self, stream: u64) -> Result<Fence, DeviceError> {
        let _ = stream;
        Ok(self.launched())
    }

    /// Lets later work of a compute stream wait until the layers `..=layer` of a load are there, without waiting here.
    /// `Ok(false)`: they are not, and the device has no streams that could wait for them.
    fn wait_layer(&mut self, load: &Transfer, layer: u32, stream: u64) -> Result<bool, DeviceError> {
        let _ = stream;
        match load.state() {
            TransferState::Done => Ok(true),
            TransferState::Pending => Ok(load.layers_ready() > layer),
            TransferState::Failed => Err(DeviceError::TransferFailed),
        }
    }

    /// Appends the jobs that ended since the last call, in the order they ended.
    fn poll(&mut self, out: &mut Vec<Completion>) -> Result<(), DeviceError>;

    /// Jobs of a direction that could be submitted now.
    fn room(&self, direction: Direction) -> u32;

    /// Jobs whose completion was not reported yet.
    fn in_flight(&self) -> u32;

    /// Sets what is called when a completion may be waiting.
    fn set_waker(&mut self, waker: Option<Waker>);

    /// Takes no more jobs and waits up to `wait_max` for those in flight; completions of jobs that end can
    /// still be polled. Idempotent.
    fn close(&mut self, wait_max: Duration) -> CloseReport;
}
