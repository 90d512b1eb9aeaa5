//! The seam below a stream device: what a vendor's driver has to offer.
//!
//! It is as narrow as the device needs, so that the device's own logic (order, fences, parking, failure)
//! runs in tests on a driver made of queues.

use std::ffi::c_void;
use std::ptr::NonNull;

use super::job::Direction;
use super::kernels::{Kernel, Ring};
use super::{DeviceError, Waker};

/// A driver call that failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("driver call {call} failed with code {code}")]
pub struct DriverError {
    /// Name of the call.
    pub call: &'static str,
    /// The driver's number.
    pub code: i32,
}

impl From<DriverError> for DeviceError {
    fn from(e: DriverError) -> DeviceError {
        DeviceError::Driver { call: e.call, code: e.code }
    }
}

/// A stream: work of one runs in order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StreamId {
    /// The device's own stream for a direction.
    Copy(Direction),
    /// A stream of the embedder, by raw handle.
    Compute(u64),
}

/// An event of the driver, a marker in a stream.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct EventId(pub u32);

/// What the planner may use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Capabilities {
    /// Register kernels can be launched.
    pub kernels: bool,
    /// The ring kernel can be launched, with this ring.
    pub ring: Option<Ring>,
    /// Launches take 32 KiB of parameters.
    pub large_params: bool,
    /// Processors of the device.
    pub processors: u32,
}

/// A driver with one stream per direction. Calls return without waiting for the device.
///
/// # Safety
/// Work submitted to a stream reads and writes exactly the memory it names, no earlier than everything
/// before it in the stream and every event the stream waits for, and `is_done` is true only when all work
/// before the record is over.
#[expect(unsafe_code, reason = "the device trusts what an implementation reports about memory in flight")]
pub unsafe trait Driver: Send {
    /// What can be used.
    fn capabilities(&self) -> Capabilities;

    /// Makes an event. Events are never destroyed before the driver is.
    fn create_event(&mut self) -> Result<EventId, DriverError>;

    /// Records the event at the end of the stream as it is now.
    fn record(&mut self, event: EventId, stream: StreamId) -> Result<(), DriverError>;

    /// Whether everything before the last record is over.
    fn is_done(&mut self, event: EventId) -> Result<bool, DriverError>;

    /// Lets later work of the stream wait for the last record of the event.
    fn wait(&mut self, stream: StreamId, event: EventId) -> Result<(), DriverError>;

    /// Makes host memory reachable and returns its address as kernels see it.
    fn register_host(&mut self, base: NonNull<u8>, len: usize) -> Result<u64, DriverError>;

    /// Undoes `register_host`; nothing is in flight.
    fn unregister_host(&mut self, base: NonNull<u8>, len: usize) -> Result<(), DriverError>;

    /// Work may be in flight for ever: nothing that it could touch may be given back when the driver is
    /// dropped, and dropping must not wait.
    fn abandon(&mut self);

    /// Calls the waker when the stream gets here.
    fn notify(&mut self, stream: StreamId, waker: &Waker) -> Result<(), DriverError>;

    /// Copies `len[i]` bytes from `src[i]` to `dst[i]`, in any order among themselves. `settled`: the
    /// sources may be read before earlier work of the stream is over.
    ///
    /// # Safety
    /// The addresses are valid until the stream has got past the copies, and nobody else writes what they
    /// read or touches what they write meanwhile.
    unsafe fn copy(
        &mut self,
        direction: Direction,
        src: &mut [u64],
        dst: &mut [u64],
        len: &mut [usize],
        settled: bool,
    ) -> Result<(), DriverError>;

    /// Launches a page kernel. The record is read before the call returns.
    ///
    /// # Safety
    /// `record` points to the launch record that the kernel and `large` ask for; for its addresses the same
    /// holds as for `copy`.
    unsafe fn launch(
        &mut self,
        direction: Direction,
        kernel: Kernel,
        large: bool,
        record: *mut c_void,
        ring: Option<Ring>,
        grid: u32,
    ) -> Result<(), DriverError>;
}
