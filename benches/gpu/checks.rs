//! Every byte, before anything is timed: pages go to the device by one engine and come back by another, so
//! that a mistake that two engines do not share cannot cancel.

use std::sync::Arc;
use std::time::Duration;

use sapwood::backend::device::cuda::{CudaDevice, CudaDriver};
use sapwood::backend::device::driver::Driver;
use sapwood::backend::device::kernels::{Head, Kernel, PAIRS_LARGE, PageJob, Ring, Side};
use sapwood::backend::device::plan::{CopyPolicy, CostModel, PlanOptions};
use sapwood::backend::device::{CopyJob, CopyPart, Device, Direction, Outcome, Submit};
use sapwood::backend::host::{HostArena, Order, page_sum};
use sapwood::backend::region::Region;
use sapwood::base::{Fence, OpId, PageId};
use sapwood::pool::{Capacities, Capacity, Geometry, Plane, PlaneId, PlaneKind, PlaneSet, PoolKind};

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next() as u8).collect()
    }

    fn pages(&mut self, of: u32, n: usize) -> Vec<PageId> {
        let mut all: Vec<PageId> = (0..of).map(PageId).collect();
        (0..n).for_each(|i| all.swap(i, i + self.next() as usize % (of as usize - i)));
        all.truncate(n);
        all
    }
}

fn wait(device: &mut CudaDevice) {
    let mut ended = Vec::new();
    while ended.is_empty() {
        device.poll(&mut ended).unwrap();
        std::thread::sleep(Duration::from_micros(50));
    }
    assert_eq!(ended[0].outcome, Outcome::Done);
}

fn submit(device: &mut CudaDevice, direction: Direction, src: &[PageId], dst: &[PageId], by_layer: bool) {
    let parts = [CopyPart::full(src, dst)];
    let job = CopyJob { op: OpId(0), direction, parts: &parts, by_layer };
    let submitted = device.submit(&job, Fence::SETTLED).unwrap();
    assert!(matches!(submitted, Submit::Started(_)));
    wait(device);
}

/// Returns the number of pages that were compared.
pub(crate) fn all() -> u64 {
    let mut random = Random(0x5EED);
    let shapes: [(u32, Vec<Plane>); 5] = [
        (64, vec![Plane::target(4, 1024)]),
        (16, vec![Plane::latent(6, 656), Plane::new(PlaneKind::Index, 6, 1, 132)]),
        (1, vec![Plane::target(3, 256)]),
        (7, vec![Plane::new(PlaneKind::Other(0), 2, 1, 33), Plane::draft(2, 8)]),
        (128, vec![Plane::latent(2, 1152)]),
    ];
    let mut compared = 0;
    for (page_size, planes) in shapes {
        let builder = planes.into_iter().fold(Geometry::builder(page_size), |b, p| b.plane(p));
        let geometry = Arc::new(builder.build().unwrap());
        for order in [Order::PageFirst, Order::LayerFirst] {
            compared += shape(&geometry, order, &mut random);
        }
    }
    compared + sums(&mut random)
}

fn engines() -> Vec<PlanOptions> {
    let engine = CostModel { link_bytes_per_us: 1000, descriptor_ns: 0, kernel_bytes_per_us: 1 };
    let kernel = CostModel { link_bytes_per_us: 1, descriptor_ns: 1000, kernel_bytes_per_us: 1_000_000 };
    let base = PlanOptions {
        policy: CopyPolicy::Throughput,
        to_host: engine,
        to_device: engine,
        ..PlanOptions::default()
    };
    let kernels = PlanOptions { to_host: kernel, to_device: kernel, ..base };
    let ring = Some(Ring { stages: 6, stage_bytes: 32 << 10 });
    vec![
        base,
        kernels,
        PlanOptions { ring, ..kernels },
        PlanOptions { policy: CopyPolicy::Latency, staging_bytes: 16 << 20, ..base },
    ]
}

fn shape(geometry: &Arc<Geometry>, order: Order, random: &mut Random) -> u64 {
    const PAGES: u32 = 96;
    let arena = HostArena::new(Arc::clone(geometry), Capacities::full(Capacity::Pages(PAGES))).unwrap();
    let arena = Arc::new(arena);
    let mut compared = 0;
    let options = engines();
    let base = PlanOptions { staging_bytes: 16 << 20, ..PlanOptions::default() };
    let mut device = CudaDevice::open(0, Arc::clone(geometry), [PAGES, 0, 0], order, base).unwrap();
    device.attach_host(Arc::clone(&arena)).unwrap();
    let fixed = *device.options_mut();
    for i in 0..options.len() {
        for j in 0..options.len() {
            let use_engine = |device: &mut CudaDevice, o: &PlanOptions| {
                let ring = o.ring.and(fixed.ring);
                let staging = (fixed.staging, o.staging_bytes);
                *device.options_mut() = PlanOptions { ring, host_chunk_mask: fixed.host_chunk_mask, ..*o };
                (device.options_mut().staging, device.options_mut().staging_bytes) = staging;
            };
            let n = 30;
            let (first, on, back) = (random.pages(48, n), random.pages(PAGES, n), random.pages(48, n));
            let back: Vec<PageId> = back.into_iter().map(|p| PageId(p.0 + 48)).collect();
            let mut want = Vec::new();
            for &page in &first {
                for (id, plane) in geometry.planes_of(PoolKind::Full, PlaneSet::ALL) {
                    let bytes = random.bytes(plane.page_bytes() as usize);
                    arena.write(id, page, 0, &bytes).unwrap();
                    want.push(bytes);
                }
            }
            (48..PAGES).for_each(|p| arena.poison(PoolKind::Full, PageId(p)).unwrap());
            use_engine(&mut device, &options[i]);
            submit(&mut device, Direction::HostToDevice, &first, &on, j % 2 == 0);
            use_engine(&mut device, &options[j]);
            submit(&mut device, Direction::DeviceToHost, &on, &back, false);
            let mut want = want.into_iter();
            for &page in &back {
                for (id, plane) in geometry.planes_of(PoolKind::Full, PlaneSet::ALL) {
                    let mut got = vec![0; plane.page_bytes() as usize];
                    arena.read(id, page, 0, &mut got).unwrap();
                    assert!(
                        got == want.next().unwrap(),
                        "{order:?} {geometry:?} engine {i} out, {j} back, {page:?}"
                    );
                    compared += 1;
                }
            }
            untouched(&arena, &back);
        }
    }
    compared
}

/// Pages that no job named still hold what they held.
fn untouched(arena: &HostArena, named: &[PageId]) {
    for page in (48..arena.pages(PoolKind::Full)).map(PageId).filter(|p| !named.contains(p)) {
        let mut got = vec![0; arena.geometry().planes()[0].page_bytes() as usize];
        arena.read(PlaneId(0), page, 0, &mut got).unwrap();
        assert!(got.iter().all(|&b| b == sapwood::backend::host::POISON_BYTE), "{page:?} was touched");
    }
}

/// The summing kernel on the device against the CPU's sums.
fn sums(random: &mut Random) -> u64 {
    let (pages, bytes) = (64usize, 48 << 10);
    let mut driver = CudaDriver::open(0).unwrap();
    let host = Region::anonymous(pages * bytes + pages * 8).unwrap();
    let data = random.bytes(pages * bytes);
    // SAFETY: the region is longer and ours.
    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), host.base().as_ptr(), data.len()) };
    let mapped = driver.register_host(host.base(), host.len()).unwrap();
    let device = driver.alloc(pages * bytes).unwrap();
    let side = |base| Side { base, page_step: bytes as u64, ..Side::default() };
    let head = Head {
        src: side(mapped),
        dst: side(device),
        run_bytes: bytes as u64,
        sums: mapped + (pages * bytes) as u64,
        pairs: pages as u32,
        layers: 1,
        parts: 1,
        segments: (bytes as u32).div_ceil(4096),
        segment_bytes: 4096,
        flags: 2,
        ..Head::default()
    };
    let mut job = Box::new(PageJob::<PAIRS_LARGE> { head, ..Default::default() });
    for i in 0..pages {
        (job.src[i], job.dst[i]) = (i as u32, (pages - 1 - i) as u32);
    }
    let done = driver.create_event().unwrap();
    let direction = Direction::HostToDevice;
    // SAFETY: pages and sums lie in the two areas, which nobody else uses.
    unsafe {
        let record = (&raw mut *job).cast();
        driver.launch(direction, Kernel::CopySum, true, record, None, 4).unwrap();
    }
    driver.record(done, sapwood::backend::device::driver::StreamId::Copy(direction)).unwrap();
    while !driver.is_done(done).unwrap() {}
    for i in 0..pages {
        let mut sum = [0; 8];
        // SAFETY: the kernel is over; the sums lie behind the pages.
        unsafe {
            let at = host.base().as_ptr().add(pages * bytes + 8 * i);
            std::ptr::copy_nonoverlapping(at, sum.as_mut_ptr(), 8);
        }
        assert_eq!(u64::from_le_bytes(sum), page_sum(&data[i * bytes..][..bytes]), "sum of page {i}");
    }
    driver.unregister_host(host.base(), host.len()).unwrap();
    pages as u64
}
