//! A driver whose work is over at once and was never done. Shared with `benches/host_copy.rs`.

use std::ffi::c_void;
use std::ptr::NonNull;

use sapwood::backend::device::driver::{Capabilities, Driver, DriverError, EventId, StreamId};
use sapwood::backend::device::kernels::{Kernel, Ring};
use sapwood::backend::device::{Direction, Waker};

/// A driver whose work is over at once and was never done.
#[derive(Default)]
pub(crate) struct Null(u32);

// SAFETY: it touches no memory at all.
unsafe impl Driver for Null {
    fn capabilities(&self) -> Capabilities {
        Capabilities { kernels: true, ring: None, large_params: true, processors: 100 }
    }

    fn create_event(&mut self) -> Result<EventId, DriverError> {
        self.0 += 1;
        Ok(EventId(self.0))
    }

    fn record(&mut self, _: EventId, _: StreamId) -> Result<(), DriverError> {
        Ok(())
    }

    fn is_done(&mut self, _: EventId) -> Result<bool, DriverError> {
        Ok(true)
    }

    fn wait(&mut self, _: StreamId, _: EventId) -> Result<(), DriverError> {
        Ok(())
    }

    fn register_host(&mut self, base: NonNull<u8>, _: usize) -> Result<u64, DriverError> {
        Ok(base.as_ptr() as u64)
    }

    fn unregister_host(&mut self, _: NonNull<u8>, _: usize) -> Result<(), DriverError> {
        Ok(())
    }

    fn abandon(&mut self) {}

    fn notify(&mut self, _: StreamId, _: &Waker) -> Result<(), DriverError> {
        Ok(())
    }

    unsafe fn copy(
        &mut self,
        _: Direction,
        _: &mut [u64],
        _: &mut [u64],
        _: &mut [usize],
        _: bool,
    ) -> Result<(), DriverError> {
        Ok(())
    }

    unsafe fn launch(
        &mut self,
        _: Direction,
        _: Kernel,
        _: bool,
        _: *mut c_void,
        _: Option<Ring>,
        _: u32,
    ) -> Result<(), DriverError> {
        Ok(())
    }
}
