//! The three numbers of the cost model, measured once when a device is opened for real work.

use std::ffi::c_void;
use std::ptr::NonNull;

use super::api::Handle;
use super::{CudaDriver, Current, check};
use crate::backend::device::driver::{Driver, DriverError};
use crate::backend::device::job::Direction;
use crate::backend::device::kernels::{Kernel, PageJobLarge, PlaneAddress, PlaneCopy, Side};
use crate::backend::device::plan::CostModel;
use crate::backend::region::Region;
use crate::pool::{Geometry, Plane, PlaneKind};

/// Bytes of the large copy.
const BYTES: usize = 64 << 20;
/// Descriptors of the batch, of one run each.
const RUNS: usize = 4096;
const RUN_BYTES: usize = BYTES / RUNS;

/// Why the measurement did not take place.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MeasureError {
    /// The driver refused.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// Host memory could not be had.
    #[error(transparent)]
    Region(#[from] crate::backend::region::RegionError),
}

impl CudaDriver {
    /// Measures link rate, cost of a descriptor and rate of the register kernel with `quota_blocks`, to the
    /// device or to the host. Takes about 50 ms and 128 MiB for a moment; the device should be idle. It
    /// waits, and is meant for the start.
    pub fn measure(&mut self, direction: Direction, quota_blocks: u32) -> Result<CostModel, MeasureError> {
        let host = Region::anonymous(BYTES)?;
        let device = self.alloc(BYTES)?;
        let mapped = self.register_host(host.base(), BYTES)?;
        let result = self.measure_with(direction, quota_blocks, &host, mapped, device);
        self.unregister_host(host.base(), BYTES)?;
        self.free(device)?;
        Ok(result?)
    }

    fn free(&mut self, address: u64) -> Result<(), DriverError> {
        self.owned.retain(|&a| a != address);
        let _current = Current::new(&self.api, self.context)?;
        // SAFETY: allocated by `alloc`, nothing in flight: every timing below has waited.
        check("cuMemFree", unsafe { (self.api.mem_free)(address) })
    }

    fn measure_with(
        &mut self,
        direction: Direction,
        quota: u32,
        host: &Region,
        mapped: u64,
        device: u64,
    ) -> Result<CostModel, DriverError> {
        let host_base: NonNull<u8> = host.base();
        let of = |at: usize| (host_base.as_ptr() as u64 + at as u64, device + at as u64);
        let sides = |at: usize| match direction {
            Direction::DeviceToHost => (of(at).1, of(at).0),
            _ => of(at),
        };
        let (from, to) = sides(0);
        let link_us = self.best_us(direction, |driver| {
            // SAFETY: both ends are BYTES long and used for nothing else.
            unsafe { driver.copy(direction, &mut [from], &mut [to], &mut [BYTES], false) }
        })?;
        let mut src = vec![0; RUNS];
        let mut dst = vec![0; RUNS];
        let mut len = vec![RUN_BYTES; RUNS];
        for i in 0..RUNS {
            // Neighbours are swapped, so that no driver can merge them.
            (src[i], dst[i]) = sides((i ^ 1) * RUN_BYTES);
        }
        let batch_us = self.best_us(direction, |driver| {
            // SAFETY: as above.
            unsafe { driver.copy(direction, &mut src, &mut dst, &mut len, false) }
        })?;
        let kernel_us = match self.functions[Kernel::Copy16Wide as usize][1].is_null() {
            true => f64::INFINITY,
            false => self.kernel_us(direction, quota, mapped, device)?,
        };
        let rate = |us: f64| (BYTES as f64 / us.max(1.0)).max(1.0) as u32;
        Ok(CostModel {
            link_bytes_per_us: rate(link_us),
            descriptor_ns: ((batch_us - link_us).max(0.0) * 1000.0 / RUNS as f64) as u32,
            kernel_bytes_per_us: rate(kernel_us),
        })
    }

    fn kernel_us(
        &mut self,
        direction: Direction,
        quota: u32,
        mapped: u64,
        device: u64,
    ) -> Result<f64, DriverError> {
        let rows = Plane::new(PlaneKind::Other(0), 1, 1, RUN_BYTES as u32);
        let Ok(geometry) = Geometry::builder(1).plane(rows).build() else { return Ok(f64::INFINITY) };
        let plane = &geometry.planes()[0];
        let page_step = RUN_BYTES as u64;
        let at = |base| PlaneAddress { side: Side { base, page_step, ..Side::default() }, bases: None };
        let (from, to) = match direction {
            Direction::DeviceToHost => (at(device), at(mapped)),
            _ => (at(mapped), at(device)),
        };
        let pages = RUNS.min(crate::backend::device::kernels::PAIRS_LARGE);
        let kernel = Kernel::Copy16Wide;
        let copy = PlaneCopy::new(plane, 0..1, &from, &to);
        let mut job = Box::<PageJobLarge>::default();
        job.head = copy.launch(kernel, pages as u32, true, kernel.segment_bytes());
        for i in 0..pages {
            (job.src[i], job.dst[i]) = (i as u32, i as u32);
        }
        let record: *mut c_void = (&raw mut *job).cast();
        let us = self.best_us(direction, |driver| {
            // SAFETY: the record is a long one; its pages lie in the two areas.
            unsafe { driver.launch(direction, kernel, true, record, None, quota) }
        })?;
        Ok(us * RUNS as f64 / pages as f64)
    }

    /// Microseconds of the fastest of five runs of `work` on the stream of the direction, by the clock of
    /// the device. Waits.
    pub fn best_us(
        &mut self,
        direction: Direction,
        mut work: impl FnMut(&mut CudaDriver) -> Result<(), DriverError>,
    ) -> Result<f64, DriverError> {
        let stream = self.streams[direction.index()];
        let (begin, end) = (self.timed_event()?, self.timed_event()?);
        let mut best = f64::INFINITY;
        for _ in 0..5 {
            self.mark(begin, stream)?;
            work(self)?;
            self.mark(end, stream)?;
            let _current = Current::new(&self.api, self.context)?;
            let mut ms = 0f32;
            // SAFETY: both events are ours and recorded.
            unsafe {
                check("cuEventSynchronize", (self.api.event_synchronize)(end))?;
                check("cuEventElapsedTime", (self.api.event_elapsed)(&mut ms, begin, end))?;
            }
            best = best.min(f64::from(ms) * 1000.0);
        }
        Ok(best)
    }

    /// An event with a time stamp; destroyed with the driver.
    fn timed_event(&mut self) -> Result<Handle, DriverError> {
        let _current = Current::new(&self.api, self.context)?;
        let mut event = std::ptr::null_mut();
        // SAFETY: a valid out pointer.
        check("cuEventCreate", unsafe { (self.api.event_create)(&mut event, 0) })?;
        self.timers.push(event);
        Ok(event)
    }

    fn mark(&mut self, event: Handle, stream: Handle) -> Result<(), DriverError> {
        let _current = Current::new(&self.api, self.context)?;
        // SAFETY: both are ours.
        check("cuEventRecord", unsafe { (self.api.event_record)(event, stream) })
    }
}
