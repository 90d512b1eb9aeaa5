//! The CUDA device under the same contract, on a real driver or on `kernels/mock_driver.cpp`.
//!
//! Its "device memory" is registered host memory here, so that the tests can look at it; a copy between two
//! registered areas takes the same calls. `benches/gpu` checks real device memory byte by byte.

use std::collections::BTreeSet;
use std::sync::{Arc, Condvar, Mutex};

use sapwood::backend::device::cuda::{CudaDevice, CudaDriver, devices};
use sapwood::backend::device::driver::{Driver, StreamId};
use sapwood::backend::device::plan::PlanOptions;
use sapwood::backend::device::{Device, Direction, StreamDevice, Waker};
use sapwood::backend::host::{HostArena, Order};
use sapwood::base::Fence;
use sapwood::pool::Geometry;

use crate::rig::{DEVICE_PAGES, capacities, planes_of};

type Gates = Arc<(Mutex<BTreeSet<u64>>, Condvar)>;

pub(crate) struct Cuda {
    pub(crate) device: CudaDevice,
    pub(crate) memory: Arc<HostArena>,
    gates: Gates,
}

/// Whether there is a driver with a device. `SAPWOOD_REQUIRE_CUDA=1` makes its absence a failure.
pub(crate) fn available() -> bool {
    let why = match devices() {
        Ok(found) if !found.is_empty() => return true,
        Ok(_) => "no device".to_string(),
        Err(e) => e.to_string(),
    };
    assert!(std::env::var_os("SAPWOOD_REQUIRE_CUDA").is_none(), "SAPWOOD_REQUIRE_CUDA is set, and: {why}");
    eprintln!("skipped: CUDA devices ({why})");
    false
}

impl Cuda {
    pub(crate) fn new(geometry: &Arc<Geometry>, mut options: PlanOptions, order: Order, table: bool) -> Cuda {
        let memory = HostArena::with_order(Arc::clone(geometry), capacities(DEVICE_PAGES), order).unwrap();
        let mut driver = CudaDriver::open(0).unwrap();
        let mut addresses = Vec::new();
        for (_, region) in memory.regions() {
            addresses.push(driver.register_host(region.base(), region.len()).unwrap());
        }
        let (planes, tables) = planes_of(&memory, order, table, |id| addresses[usize::from(id.0)]);
        // A kernel reads the tables: they have to be reachable from a device too.
        for list in tables {
            let list = list.leak();
            let base = std::ptr::NonNull::from(&mut list[0]).cast();
            if let Err(e) = driver.register_host(base, size_of_val(list)) {
                eprintln!("table not registered: {e}");
            }
        }
        let staging = options.staging_bytes as usize;
        options.staging = if staging > 0 { driver.alloc(staging).unwrap() } else { 0 };
        let can = driver.capabilities();
        assert!(can.kernels && can.large_params, "{can:?}");
        options.ring = options.ring.and(can.ring);
        // SAFETY: the planes lie in `memory`, which lives as long.
        let device =
            unsafe { StreamDevice::new(driver, Arc::clone(geometry), [DEVICE_PAGES; 3], planes, options) };
        Cuda { device: device.unwrap(), memory: Arc::new(memory), gates: Arc::default() }
    }

    /// A piece of compute work that ends when its gate is opened: a host function that blocks its stream.
    pub(crate) fn compute_begin(&mut self) -> Fence {
        let n = self.device.launched().number() + 1;
        let gates = Arc::clone(&self.gates);
        let block: Waker = Arc::new(move || {
            let (open, changed) = &*gates;
            let mut open = open.lock().unwrap();
            while !open.contains(&n) {
                open = changed.wait(open).unwrap();
            }
        });
        self.device.driver_mut().notify(StreamId::Compute(0), &block).unwrap();
        self.device.note_compute(0).unwrap()
    }

    pub(crate) fn open_gate(&self, n: u64) {
        self.gates.0.lock().unwrap().insert(n);
        self.gates.1.notify_all();
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // What is still in flight runs on after the gates open, so its memory has to stay.
        std::mem::forget(Arc::clone(&self.memory));
        (1..=self.device.launched().number()).for_each(|n| self.open_gate(n));
    }
}

#[test]
fn calibration_measures_both_directions() {
    if !available() {
        return;
    }
    let mut driver = CudaDriver::open(0).unwrap();
    driver.check_context().unwrap();
    for direction in [Direction::DeviceToHost, Direction::HostToDevice] {
        let cost = driver.measure(direction, 2).unwrap();
        assert!(cost.link_bytes_per_us > 1 && cost.kernel_bytes_per_us > 1, "{cost:?}");
    }
    assert!(CudaDriver::open(99).is_err());
}
