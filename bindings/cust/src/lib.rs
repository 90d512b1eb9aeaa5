#![doc = include_str!("../README.md")]

use cust::memory::{DeviceBuffer, DeviceCopy};
use cust::stream::Stream;
use sapwood::backend::device::cuda::{CudaDevice, CudaError};
use sapwood::backend::device::kernels::Side;
use sapwood::backend::device::{DeviceError, DevicePlane, Transfer};
use sapwood::backend::host::Order;
use sapwood::base::Fence;
use sapwood::pool::Plane;

/// Why something of cust could not be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InteropError {
    /// The device refused, among others because the current context is not its own.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The buffer is shorter than the pages of the plane.
    #[error("a buffer of {bytes} bytes for {needed} bytes of pages")]
    BufferTooShort {
        /// Bytes of the buffer.
        bytes: u64,
        /// Bytes of the pages.
        needed: u64,
    },
}

impl From<CudaError> for InteropError {
    fn from(e: CudaError) -> InteropError {
        InteropError::Device(e.into())
    }
}

/// The fence behind everything that was submitted to the stream so far.
///
/// # Errors
/// If the current context is not the device's, or the driver fails.
pub fn note_compute(device: &mut CudaDevice, stream: &Stream) -> Result<Fence, InteropError> {
    device.driver_mut().check_context()?;
    Ok(device.note_compute(stream.as_inner() as u64)?)
}

/// Lets later work of the stream wait until layers `..=layer` of a load are there, without waiting here.
///
/// # Errors
/// As [`note_compute`], and if the load has failed.
pub fn wait_layer(
    device: &mut CudaDevice,
    load: &Transfer,
    layer: u32,
    stream: &Stream,
) -> Result<(), InteropError> {
    device.driver_mut().check_context()?;
    Ok(device.wait_layer(load, layer, stream.as_inner() as u64)?)
}

/// The pages of a plane in a buffer of cust. The buffer must outlive the device that is made of it, which
/// is part of the contract of `StreamDevice::new`.
///
/// # Errors
/// If the buffer is too short.
pub fn device_plane<T: DeviceCopy>(
    buffer: &DeviceBuffer<T>,
    plane: &Plane,
    pages: u32,
    order: Order,
) -> Result<DevicePlane, InteropError> {
    let bytes = (buffer.len() * size_of::<T>()) as u64;
    plane_at(buffer.as_device_ptr().as_raw(), bytes, plane, pages, order)
}

/// [`device_plane`] by address and length.
fn plane_at(base: u64, bytes: u64, plane: &Plane, pages: u32, order: Order) -> Result<DevicePlane, InteropError> {
    let n = u64::from(pages);
    let needed = n.saturating_mul(plane.page_bytes());
    if bytes < needed {
        return Err(InteropError::BufferTooShort { bytes, needed });
    }
    let (page_step, layer_step, part_step) = match order {
        Order::PageFirst => (plane.page_bytes(), plane.layer_bytes(), plane.part_bytes()),
        Order::LayerFirst => (plane.part_bytes(), n * plane.layer_bytes(), n * plane.part_bytes()),
    };
    Ok(DevicePlane { side: Side { base, page_step, layer_step, part_step, table: 0 }, bases: None })
}

#[cfg(test)]
mod tests {
    use super::*;
    use sapwood::pool::Geometry;

    #[test]
    fn a_plane_covers_its_buffer_and_no_more() {
        let g = Geometry::builder(16).plane(Plane::target(4, 128)).build().expect("a plain geometry");
        let p = &g.planes()[0];
        let needed = 10 * p.page_bytes();
        assert!(matches!(
            plane_at(4096, needed - 1, p, 10, Order::LayerFirst),
            Err(InteropError::BufferTooShort { .. })
        ));
        for order in [Order::LayerFirst, Order::PageFirst] {
            let side = plane_at(4096, needed, p, 10, order).expect("long enough").side;
            let last = side.base + 9 * side.page_step + 3 * side.layer_step + side.part_step;
            assert_eq!(last + p.part_bytes(), 4096 + needed);
        }
    }
}
