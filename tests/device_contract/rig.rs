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
    #[cfg(feature = "cuda")]
    Cuda(Box<crate::cuda::Cuda>),
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
    rigs.extend(cuda_rigs());
    rigs
}

/// CUDA devices led to each engine, none where there is no driver.
pub(crate) fn cuda_rigs() -> Vec<Rig> {
    #[cfg(feature = "cuda")]
    if crate::cuda::available() {
        let all = plan_options().into_iter();
        let orders = [(Order::PageFirst, false), (Order::LayerFirst, false), (Order::LayerFirst, true)];
        let each = |(name, options)| orders.map(|(order, table)| Rig::cuda(name, options, order, table));
        return all.flat_map(each).collect();
    }
    Vec::new()
}

/// Plans that lead to each engine, by name.
pub(crate) fn plan_options() -> Vec<(&'static str, PlanOptions)> {
    let engine = CostModel { link_bytes_per_us: 1000, descriptor_ns: 1, kernel_bytes_per_us: 1 };
    let kernel = CostModel { link_bytes_per_us: 1, descriptor_ns: 1, kernel_bytes_per_us: 1_000_000 };
    let ring = Some(Ring { stages: 3, stage_bytes: 1024 });
    let base = PlanOptions {
        policy: CopyPolicy::Throughput,
        to_host: engine,
        to_device: engine,
        ..PlanOptions::default()
    };
    let kernels = PlanOptions { to_host: kernel, to_device: kernel, ..base };
    vec![
        ("copy engine", base),
        ("no kernels", PlanOptions { kernels: false, ..base }),
        ("kernels", kernels),
        ("ring", PlanOptions { ring, ..kernels }),
        ("slices", PlanOptions { slice_bytes: 700, large_params: false, ..base }),
        ("kernel slices", PlanOptions { slice_bytes: 1500, large_params: false, ..kernels }),
        ("staged", PlanOptions { policy: CopyPolicy::Latency, staging_bytes: 4096, ..base }),
        ("chunked", PlanOptions { host_chunk_mask: 1, ..base }),
    ]
}

/// Stream devices that are led to each engine of the planner, in each order of memory.
pub(crate) fn stream_rigs() -> Vec<Rig> {
    let orders = [(Order::PageFirst, false), (Order::LayerFirst, false), (Order::LayerFirst, true)];
    let each = |(name, options)| orders.map(|(order, table)| Rig::stream(name, options, order, table));
    plan_options().into_iter().flat_map(each).collect()
}

/// The planes of an arena as a device sees them, and the tables that some of them need.
pub(crate) fn planes_of(
    memory: &HostArena,
    order: Order,
    table: bool,
    base_of: impl Fn(PlaneId) -> u64,
) -> (Vec<DevicePlane>, Vec<Vec<u64>>) {
    let mut tables = Vec::new();
    let plane = |id: PlaneId| {
        let p = &memory.geometry().planes()[usize::from(id.0)];
        let base = base_of(id);
        let n = u64::from(DEVICE_PAGES);
        let (page_step, layer_step, part_step) = match order {
            Order::PageFirst => (p.page_bytes(), p.layer_bytes(), p.part_bytes()),
            Order::LayerFirst => (p.part_bytes(), n * p.layer_bytes(), n * p.part_bytes()),
        };
        if !table {
            return DevicePlane {
                side: Side { base, page_step, layer_step, part_step, table: 0 },
                bases: None,
            };
        }
        let runs = u64::from(p.layers() * p.parts());
        let list: Vec<u64> = (0..runs).map(|i| base + i * part_step).collect();
        let address = list.as_ptr() as u64;
        let bases = Some(list.clone().into_boxed_slice());
        tables.push(list);
        // With a table the base and the inner distances are not used; wrong ones would show.
        let side = Side { base: 0xDEAD, page_step, layer_step: 0xBAD, part_step: 0xBAD, table: address };
        DevicePlane { side, bases }
    };
    let planes = memory.regions().map(|(id, _)| id).map(plane).collect();
    (planes, tables)
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
        let base = |id: PlaneId| {
            memory.regions().nth(usize::from(id.0)).map_or(0, |(_, region)| region.base().as_ptr() as u64)
        };
        let (planes, tables) = planes_of(&memory, order, table, base);
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
        if options.host_chunk_mask != u32::MAX {
            device.options_mut().host_chunk_mask = options.host_chunk_mask;
        }
        let name = format!("stream {name} {order:?} table {table}");
        let kind = Kind::Stream(device, driver, memory);
        Rig { name, geometry, kind, arena, next_op: 1, random: Random(2), _keep: (staging, tables) }
    }

    #[cfg(feature = "cuda")]
    fn cuda(name: &str, options: PlanOptions, order: Order, table: bool) -> Rig {
        let geometry = geometry();
        let mut cuda = crate::cuda::Cuda::new(&geometry, options, order, table);
        let arena = Arc::new(HostArena::new(Arc::clone(&geometry), capacities(HOST_PAGES)).unwrap());
        cuda.device.attach_host(Arc::clone(&arena)).unwrap();
        if options.host_chunk_mask != u32::MAX {
            cuda.device.options_mut().host_chunk_mask = options.host_chunk_mask;
        }
        let name = format!("cuda {name} {order:?} table {table}");
        let kind = Kind::Cuda(Box::new(cuda));
        Rig { name, geometry, kind, arena, next_op: 1, random: Random(3), _keep: Default::default() }
    }

    pub(crate) fn device(&mut self) -> &mut dyn Device {
        match &mut self.kind {
            Kind::Soft(device) => device,
            Kind::Stream(device, ..) => device.as_mut(),
            #[cfg(feature = "cuda")]
            Kind::Cuda(cuda) => &mut cuda.device,
        }
    }

    /// Another host arena in place of the one that was detached.
    pub(crate) fn exchange_arena(&mut self) {
        let arena = Arc::new(HostArena::new(Arc::clone(&self.geometry), capacities(HOST_PAGES)).unwrap());
        self.device().attach_host(Arc::clone(&arena)).unwrap();
        self.arena = arena;
    }

    /// Pieces of host memory that the driver knows; only the fake one tells.
    pub(crate) fn registered(&self) -> usize {
        match &self.kind {
            Kind::Stream(_, driver, _) => driver.registered(),
            _ => 0,
        }
    }

    pub(crate) fn is_soft(&self) -> bool {
        matches!(self.kind, Kind::Soft(_))
    }

    pub(crate) fn soft_device(&self) -> &SoftDevice {
        match &self.kind {
            Kind::Soft(device) => device,
            _ => panic!("{} is no soft device", self.name),
        }
    }

    pub(crate) fn stream_device(&mut self) -> (&mut StreamDevice<FakeDriver>, &FakeDriver) {
        match &mut self.kind {
            Kind::Stream(device, driver, _) => (device, driver),
            _ => panic!("{} is no stream device", self.name),
        }
    }

    pub(crate) fn device_memory(&self) -> &HostArena {
        match &self.kind {
            Kind::Soft(device) => device.memory(),
            Kind::Stream(_, _, memory) => memory,
            #[cfg(feature = "cuda")]
            Kind::Cuda(cuda) => &cuda.memory,
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
            #[cfg(feature = "cuda")]
            Kind::Cuda(_) => {}
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
            #[cfg(feature = "cuda")]
            Kind::Cuda(_) => {
                // It runs by itself; some operations meet it in flight, some find it done.
                if random.below(4) == 0 {
                    std::thread::sleep(std::time::Duration::from_micros(50));
                }
            }
        }
    }

    pub(crate) fn compute_begin(&mut self) -> Fence {
        match &mut self.kind {
            Kind::Soft(device) => device.compute_begin(),
            Kind::Stream(device, driver, _) => {
                driver.gate(device.launched().number() + 1);
                device.note_compute(COMPUTE).unwrap()
            }
            #[cfg(feature = "cuda")]
            Kind::Cuda(cuda) => cuda.compute_begin(),
        }
    }

    pub(crate) fn compute_end(&mut self, piece: Fence) {
        match &mut self.kind {
            Kind::Soft(device) => device.compute_end(piece),
            Kind::Stream(_, driver, _) => driver.open(piece.number()),
            #[cfg(feature = "cuda")]
            Kind::Cuda(cuda) => cuda.open_gate(piece.number()),
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
