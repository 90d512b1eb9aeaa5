//! Every device there is, with the means to drive it.

use std::sync::Arc;

use sapwood::backend::device::driver::Capabilities;
use sapwood::backend::device::kernels::{Ring, Side};
use sapwood::backend::device::plan::{CopyPolicy, CostModel, PlanOptions};
use sapwood::backend::device::{
    Completion, CopyJob, CopyPart, Device, DeviceError, DevicePlane, Direction, Mode, SoftDevice,
    SoftOptions, StreamDevice, Submit, Transfer,
};
use sapwood::backend::host::{HostArena, Order};
use sapwood::base::{Fence, OpId, PageId, Tier};
use sapwood::pool::{Capacities, Capacity, Geometry, Plane, PlaneId, PlaneSet, PoolKind};

use crate::fake::{COMPUTE, FakeDriver};

pub(crate) const DEVICE_PAGES: u32 = 24;
pub(crate) const HOST_PAGES: u32 = 40;

pub(crate) fn geometry() -> Arc<Geometry> {
    let g = Geometry::builder(4)
        .plane(Plane::target(3, 48))
        .plane(Plane::draft(1, 16).on_model_layers([2]))
        .plane(Plane::latent(2, 33).in_pool(PoolKind::Window).on_model_layers([0, 3]))
        .plane(Plane::state(2, 1000).on_model_layers([1, 3]));
    Arc::new(g.build().unwrap())
}

pub(crate) fn capacities(n: u32) -> Capacities {
    let n = Capacity::Pages(n);
    Capacities { full: n, window: n, state: n }
}

/// Splitmix64: the tests print their seed and take one from the environment.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn new(default: u64) -> Random {
        let given = std::env::var("SAPWOOD_SEED").ok().and_then(|s| s.parse().ok());
        let seed = given.unwrap_or(default);
        eprintln!("SAPWOOD_SEED={seed}");
        Random(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// One of the devices.
enum Kind {
    Soft(SoftDevice),
    Stream(Box<StreamDevice<FakeDriver>>, FakeDriver, Arc<HostArena>),
}

pub(crate) struct Rig {
    pub(crate) name: String,
    pub(crate) geometry: Arc<Geometry>,
    kind: Kind,
    pub(crate) arena: Arc<HostArena>,
    pub(crate) next_op: u64,
    random: Random,
    /// Memory for staging and tables, alive as long as the device.
    _keep: (Vec<u128>, Vec<Vec<u64>>),
}

pub(crate) fn rigs() -> Vec<Rig> {
    let mut rigs = Vec::new();
    for mode in [Mode::Manual, Mode::Threaded, Mode::Inline] {
        for order in [Order::PageFirst, Order::LayerFirst] {
            rigs.push(Rig::soft(SoftOptions { order, queue_limit: 4, ..SoftOptions::new(mode) }));
        }
    }
    rigs.extend(stream_rigs());
    rigs
}

/// Stream devices that are led to each engine of the planner, in each order of memory.
pub(crate) fn stream_rigs() -> Vec<Rig> {
    let engine = CostModel { link_bytes_per_us: 1000, descriptor_ns: 1, kernel_bytes_per_us: 1 };
    let kernel = CostModel { link_bytes_per_us: 1, descriptor_ns: 1, kernel_bytes_per_us: 1_000_000 };
    let ring = Some(Ring { stages: 3, stage_bytes: 1024 });
    let base = PlanOptions {
        policy: CopyPolicy::Throughput,
        to_host: engine,
        to_device: engine,
        ..PlanOptions::default()
    };
    let options = [
        ("copy engine", base),
        ("no kernels", PlanOptions { kernels: false, ..base }),
        ("kernels", PlanOptions { to_host: kernel, to_device: kernel, ..base }),
        ("ring", PlanOptions { to_host: kernel, to_device: kernel, ring, ..base }),
        ("slices", PlanOptions { slice_bytes: 700, large_params: false, ..base }),
        (
            "kernel slices",
            PlanOptions {
                to_host: kernel,
                to_device: kernel,
                slice_bytes: 1500,
                large_params: false,
                ..base
            },
        ),
        ("staged", PlanOptions { policy: CopyPolicy::Latency, staging_bytes: 4096, ..base }),
        ("chunked", PlanOptions { host_chunk_pages: 2, ..base }),
    ];
    let mut rigs = Vec::new();
    for (name, options) in options {
        for (order, table) in
            [(Order::PageFirst, false), (Order::LayerFirst, false), (Order::LayerFirst, true)]
        {
            rigs.push(Rig::stream(name, options, order, table));
        }
    }
    rigs
}

impl Rig {
    pub(crate) fn soft(options: SoftOptions) -> Rig {
        let geometry = geometry();
        let mut device = SoftDevice::new(Arc::clone(&geometry), capacities(DEVICE_PAGES), options).unwrap();
        let arena = Arc::new(HostArena::new(Arc::clone(&geometry), capacities(HOST_PAGES)).unwrap());
        device.attach_host(Arc::clone(&arena)).unwrap();
        let kind = Kind::Soft(device);
        let name = format!("{options:?}");
        Rig { name, geometry, kind, arena, next_op: 1, random: Random(1), _keep: Default::default() }
    }

    pub(crate) fn stream(name: &str, mut options: PlanOptions, order: Order, table: bool) -> Rig {
        let geometry = geometry();
        let memory = HostArena::with_order(Arc::clone(&geometry), capacities(DEVICE_PAGES), order).unwrap();
        let memory = Arc::new(memory);
        let mut tables = Vec::new();
        let planes = memory.regions().map(|(id, region)| {
            let p = &geometry.planes()[usize::from(id.0)];
            let base = region.base().as_ptr() as u64;
            let n = u64::from(DEVICE_PAGES);
            let mut side = match order {
                Order::PageFirst => (p.page_bytes(), p.layer_bytes(), p.part_bytes()),
                Order::LayerFirst => (p.part_bytes(), n * p.layer_bytes(), n * p.part_bytes()),
            };
            let mut bases = None;
            let mut address = 0;
            if table {
                let runs = u64::from(p.layers() * p.parts());
                let list: Vec<u64> = (0..runs).map(|i| base + i * side.2).collect();
                address = list.as_ptr() as u64;
                bases = Some(list.clone().into_boxed_slice());
                tables.push(list);
                side = (side.0, 0xBAD, 0xBAD);
            }
            let base = if table { 0xDEAD } else { base };
            let (page_step, layer_step, part_step) = side;
            DevicePlane { side: Side { base, page_step, layer_step, part_step, table: address }, bases }
        });
        let planes: Vec<_> = planes.collect();
        let mut staging = vec![0u128; options.staging_bytes as usize / 16];
        options.staging = staging.as_mut_ptr() as u64;
        let can = Capabilities {
            kernels: true,
            ring: Some(Ring { stages: 3, stage_bytes: 1024 }),
            large_params: true,
            processors: 4,
        };
        let driver = FakeDriver::new(can);
        // SAFETY: the planes lie in `memory`, which the rig keeps.
        let device = unsafe {
            StreamDevice::new(driver.clone(), Arc::clone(&geometry), [DEVICE_PAGES; 3], planes, options)
        };
        let mut device = Box::new(device.unwrap());
        let arena = Arc::new(HostArena::new(Arc::clone(&geometry), capacities(HOST_PAGES)).unwrap());
        device.attach_host(Arc::clone(&arena)).unwrap();
        if options.host_chunk_pages != 0 {
            device.options_mut().host_chunk_pages = options.host_chunk_pages;
        }
        let name = format!("stream {name} {order:?} table {table}");
        let kind = Kind::Stream(device, driver, memory);
        Rig { name, geometry, kind, arena, next_op: 1, random: Random(2), _keep: (staging, tables) }
    }

    pub(crate) fn device(&mut self) -> &mut dyn Device {
        match &mut self.kind {
            Kind::Soft(device) => device,
            Kind::Stream(device, ..) => device.as_mut(),
        }
    }

    pub(crate) fn is_soft(&self) -> bool {
        matches!(self.kind, Kind::Soft(_))
    }

    pub(crate) fn soft_device(&self) -> &SoftDevice {
        match &self.kind {
            Kind::Soft(device) => device,
            Kind::Stream(..) => panic!("{} is no soft device", self.name),
        }
    }

    pub(crate) fn stream_device(&mut self) -> (&mut StreamDevice<FakeDriver>, &FakeDriver) {
        match &mut self.kind {
            Kind::Soft(_) => panic!("{} is no stream device", self.name),
            Kind::Stream(device, driver, _) => (device, driver),
        }
    }

    pub(crate) fn device_memory(&self) -> &HostArena {
        match &self.kind {
            Kind::Soft(device) => device.memory(),
            Kind::Stream(_, _, memory) => memory,
        }
    }

    /// Lets the device run until nothing more can.
    pub(crate) fn drive(&mut self) {
        match &self.kind {
            Kind::Soft(device) => device.finish_all(),
            Kind::Stream(_, driver, _) => {
                while !driver.idle() {
                    driver.run(50, &mut self.random);
                }
            }
        }
    }

    /// Lets the device run a little, where the test decides how far.
    pub(crate) fn drive_some(&mut self, random: &mut Random) {
        match &self.kind {
            Kind::Soft(device) => {
                let heads = device.runnable();
                if !heads.is_empty() {
                    device.step(heads[random.below(heads.len() as u64) as usize], random.next());
                }
            }
            Kind::Stream(_, driver, _) => driver.run(1 + random.below(6) as u32, random),
        }
    }

    pub(crate) fn compute_begin(&mut self) -> Fence {
        match &mut self.kind {
            Kind::Soft(device) => device.compute_begin(),
            Kind::Stream(device, driver, _) => {
                driver.gate(device.launched().number() + 1);
                device.note_compute(COMPUTE).unwrap()
            }
        }
    }

    pub(crate) fn compute_end(&mut self, piece: Fence) {
        match &mut self.kind {
            Kind::Soft(device) => device.compute_end(piece),
            Kind::Stream(_, driver, _) => driver.open(piece.number()),
        }
    }

    pub(crate) fn memory(&self, tier: Tier) -> &HostArena {
        match tier {
            Tier::Device => self.device_memory(),
            _ => &self.arena,
        }
    }

    /// Fills all planes of a page with bytes of (stamp, plane, offset).
    pub(crate) fn stamp(&self, tier: Tier, pool: PoolKind, page: u32, stamp: u64) {
        for (id, plane) in self.geometry.planes_of(pool, PlaneSet::ALL) {
            let bytes = stamped(stamp, id, plane.page_bytes());
            self.memory(tier).write(id, PageId(page), 0, &bytes).unwrap();
        }
    }

    pub(crate) fn assert_stamp(&self, tier: Tier, pool: PoolKind, page: u32, stamp: u64) {
        for (id, plane) in self.geometry.planes_of(pool, PlaneSet::ALL) {
            let mut got = vec![0; plane.page_bytes() as usize];
            self.memory(tier).read(id, PageId(page), 0, &mut got).unwrap();
            let want = stamped(stamp, id, plane.page_bytes());
            assert!(got == want, "{}: {tier:?} {pool:?} page {page} plane {id:?}", self.name);
        }
    }

    pub(crate) fn try_submit(
        &mut self,
        direction: Direction,
        parts: &[CopyPart<'_>],
        by_layer: bool,
        after: Fence,
    ) -> Result<Submit, DeviceError> {
        let op = OpId(self.next_op);
        self.next_op += 1;
        self.device().submit(&CopyJob { op, direction, parts, by_layer }, after)
    }

    pub(crate) fn submit(
        &mut self,
        direction: Direction,
        parts: &[CopyPart<'_>],
        by_layer: bool,
    ) -> Transfer {
        match self.try_submit(direction, parts, by_layer, Fence::SETTLED) {
            Ok(Submit::Started(t)) => t,
            other => panic!("{}: {other:?}", self.name),
        }
    }

    /// Drives the device until `n` jobs have ended.
    pub(crate) fn wait(&mut self, n: usize) -> Vec<Completion> {
        let mut out = Vec::new();
        while out.len() < n {
            self.drive();
            self.device().poll(&mut out).unwrap();
            std::thread::yield_now();
        }
        assert_eq!(out.len(), n, "{}", self.name);
        out
    }
}

pub(crate) fn stamped(stamp: u64, plane: PlaneId, bytes: u64) -> Vec<u8> {
    let mut r = Random(stamp ^ (u64::from(plane.0) << 56));
    (0..bytes).map(|_| r.next() as u8).collect()
}

pub(crate) fn ids(pages: &[u32]) -> Vec<PageId> {
    pages.iter().map(|&p| PageId(p)).collect()
}

pub(crate) fn in_pool<'a>(pool: PoolKind, src: &'a [PageId], dst: &'a [PageId]) -> CopyPart<'a> {
    CopyPart { pool, ..CopyPart::full(src, dst) }
}
