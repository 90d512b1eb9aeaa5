//! Planning and submitting allocate nothing once their buffers have grown.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use sapwood::backend::device::kernels::Side;
use sapwood::backend::device::plan::{CopyPolicy, PlanOptions};
use sapwood::backend::device::{CopyJob, CopyPart, Device, DevicePlane, Direction, StreamDevice, Submit};
use sapwood::backend::host::HostArena;
use sapwood::base::{Fence, OpId, PageId};
use sapwood::pool::{Capacities, Capacity, Geometry, Plane};

use crate::null::Null;

/// Counts the allocations of each thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

#[global_allocator]
static COUNTING: Counting = Counting;

// SAFETY: hands everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that is ending has no counter any more.
        let _ = ALLOCATIONS.try_with(|n| n.set(n.get() + 1));
        // SAFETY: the caller's layout.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: allocated by `alloc` with this layout.
        unsafe { System.dealloc(at, layout) }
    }
}

#[test]
fn plan_and_submit_allocate_nothing_after_warm_up() {
    let g = Arc::new(Geometry::builder(64).plane(Plane::target(4, 1024)).build().unwrap());
    let arena = Arc::new(HostArena::new(Arc::clone(&g), Capacities::full(Capacity::Pages(8192))).unwrap());
    let p = &g.planes()[0];
    let n = 8192u64;
    let side = Side {
        base: 1 << 44,
        page_step: p.part_bytes(),
        layer_step: n * p.layer_bytes(),
        part_step: n * p.part_bytes(),
        table: 0,
    };
    for policy in [CopyPolicy::Auto, CopyPolicy::Latency, CopyPolicy::Throughput] {
        let options = PlanOptions { policy, ..PlanOptions::default() };
        let plane = DevicePlane { side, bases: None };
        // SAFETY: the driver touches no memory.
        let device =
            unsafe { StreamDevice::new(Null::default(), Arc::clone(&g), [8192, 0, 0], vec![plane], options) };
        let mut device = device.unwrap();
        device.attach_host(Arc::clone(&arena)).unwrap();
        let src: Vec<PageId> = (0..4096).map(|i| PageId(i * 5 % 8192)).collect();
        let dst: Vec<PageId> = (0..4096).map(|i| PageId(i * 3 % 8192)).collect();
        let mut ended = Vec::with_capacity(8);
        for round in 0..20 {
            let before = ALLOCATIONS.with(Cell::get);
            for (direction, by_layer) in [(Direction::DeviceToHost, false), (Direction::HostToDevice, true)] {
                let parts = match direction {
                    Direction::DeviceToHost => [CopyPart::full(&src, &dst)],
                    _ => [CopyPart::full(&dst, &src)],
                };
                let job = CopyJob { op: OpId(round), direction, parts: &parts, by_layer };
                let started = device.submit(&job, Fence::SETTLED).unwrap();
                ended.clear();
                device.poll(&mut ended).unwrap();
                assert_eq!(ended.len(), 1);
                assert!(matches!(started, Submit::Started(_)));
            }
            let allocations = ALLOCATIONS.with(Cell::get) - before;
            assert!(round < 4 || allocations == 0, "{policy:?} round {round}: {allocations} allocations");
        }
    }
}
