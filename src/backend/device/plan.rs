//! The planner: turns a copy of pages into copy-engine descriptors and kernel launches.
//!
//! Two engines move pages. The copy engine costs nothing to the model but a fixed time per descriptor;
//! kernels do not mind small runs but take processors away from the model. The planner merges what is
//! contiguous on both sides, then compares times from three measured numbers per device. It decides by
//! integer arithmetic on its inputs alone and does not allocate once its buffers have grown.

use std::ops::Range;

use super::job::{CopyJob, CopyPart, Direction};
use super::kernels::{Head, Kernel, PAIRS_LARGE, PAIRS_SMALL, PlaneAddress, PlaneCopy, Ring, Side};
use crate::base::PageId;
use crate::pool::{Geometry, Plane};

/// What the device can do, measured once and overridable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CostModel {
    /// Rate of one large copy by the copy engine, bytes per microsecond (= MB/s).
    pub link_bytes_per_us: u32,
    /// Time of one descriptor of a batch, nanoseconds.
    pub descriptor_ns: u32,
    /// Rate of a copy kernel at the quota, bytes per microsecond.
    pub kernel_bytes_per_us: u32,
}

impl CostModel {
    /// PCIe generation 4, 16 lanes.
    pub const PCIE4: CostModel =
        CostModel { link_bytes_per_us: 25_200, descriptor_ns: 180, kernel_bytes_per_us: 24_500 };
    /// PCIe generation 5, 16 lanes.
    pub const PCIE5: CostModel =
        CostModel { link_bytes_per_us: 55_000, descriptor_ns: 180, kernel_bytes_per_us: 52_000 };
    /// NVLink-C2C.
    pub const C2C: CostModel =
        CostModel { link_bytes_per_us: 200_000, descriptor_ns: 180, kernel_bytes_per_us: 185_000 };
}

/// What a copy should be good at.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CopyPolicy {
    /// The shortest time.
    Throughput,
    /// The least disturbance of a model that decodes beside it: the copy engine from runs of 32 KiB on.
    Latency,
    /// The copy engine, or staging, where it is at most a twentieth slower; else a kernel.
    #[default]
    Auto,
}

/// How the planner decides.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PlanOptions {
    /// What to be good at.
    pub policy: CopyPolicy,
    /// The device's numbers towards the host.
    pub to_host: CostModel,
    /// The device's numbers from the host.
    pub to_device: CostModel,
    /// Blocks of a register kernel across the link. Two saturate PCIe; full grids have stalled models.
    pub quota_blocks: u32,
    /// Blocks of the ring across the link.
    pub quota_ring_blocks: u32,
    /// Blocks of a kernel inside the device.
    pub local_blocks: u32,
    /// Bytes of one launch or batch, so that an urgent load waits at most about a millisecond.
    pub slice_bytes: u64,
    /// Whether kernels can be launched at all; without them the copy engine does everything.
    pub kernels: bool,
    /// The ring, where the device has it.
    pub ring: Option<Ring>,
    /// Bytes of device memory for staged write-back; 0 for none.
    pub staging_bytes: u64,
    /// Address of that memory.
    pub staging: u64,
    /// Whether launches take 32 KiB of parameters.
    pub large_params: bool,
    /// Pages of host memory that one registration covers, a power of two, minus one: no copy spans two.
    /// `u32::MAX` if one covers all.
    pub host_chunk_mask: u32,
}

impl Default for PlanOptions {
    fn default() -> PlanOptions {
        PlanOptions {
            policy: CopyPolicy::Auto,
            to_host: CostModel::PCIE5,
            to_device: CostModel::PCIE5,
            quota_blocks: 2,
            quota_ring_blocks: 1,
            local_blocks: 132,
            slice_bytes: 64 << 20,
            kernels: true,
            ring: None,
            staging_bytes: 0,
            staging: 0,
            large_params: true,
            host_chunk_mask: u32::MAX,
        }
    }
}

/// Cost of one launch from the host, nanoseconds. Only has to be of the right size.
const LAUNCH_NS: u64 = 3_000;
/// Runs from which on the copy engine is used under [`CopyPolicy::Latency`].
const LATENCY_RUN_BYTES: u64 = 32 << 10;
/// Shortest run for the ring: below, one operation per run costs more than register loads.
const RING_RUN_BYTES: u64 = 512;
/// Device memory rate in link rates; only decides whether staging pays, and it nearly always does.
const LOCAL_PER_LINK: u64 = 20;

/// Where a plane lies on the device and on the host.
#[derive(Clone, Copy, Debug)]
pub struct PlanePlaces<'a> {
    /// On the device.
    pub device: PlaneAddress<'a>,
    /// On the host, as the copy engine is told.
    pub host: PlaneAddress<'a>,
    /// On the host, as a kernel sees it. Equal to `host` on most systems.
    pub host_mapped: PlaneAddress<'a>,
}

/// Which pages of a launch its lists hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lists {
    /// The job's pages.
    Pages,
    /// The job's pages on the source side, 0, 1, 2.. on the destination side: into staging.
    ToStaging,
}

/// One piece of work for a stream.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum PlanStep {
    /// Descriptors `first..first + count`, one batch for the copy engine.
    Batch {
        /// First descriptor.
        first: usize,
        /// Descriptors.
        count: usize,
    },
    /// One kernel launch.
    Launch {
        /// Which.
        kernel: Kernel,
        /// Its ring, for [`Kernel::Bulk`].
        ring: Option<Ring>,
        /// Blocks.
        grid: u32,
        /// Part of the job whose pages it copies.
        part: usize,
        /// First pair of that part.
        first_pair: usize,
        /// What is in the lists.
        lists: Lists,
        /// What it copies; `pairs` says how many.
        head: Head,
    },
    /// All layers below this one are complete when the work up to here is.
    LayersDone(u32),
}

/// A plan and its descriptors, as three lists because that is what the batched copy call takes.
#[derive(Debug, Default)]
pub struct Plan {
    /// The work, in order.
    pub steps: Vec<PlanStep>,
    /// Addresses read.
    pub src: Vec<u64>,
    /// Addresses written.
    pub dst: Vec<u64>,
    /// Bytes.
    pub len: Vec<usize>,
}

impl Plan {
    fn clear(&mut self) {
        self.steps.clear();
        self.src.clear();
        self.dst.clear();
        self.len.clear();
    }

    fn reserve(&mut self, descriptors: usize) {
        self.src.reserve(descriptors);
        self.dst.reserve(descriptors);
        self.len.reserve(descriptors);
    }

    fn descriptor(&mut self, from: u64, to: u64, bytes: u64) {
        self.src.push(from);
        self.dst.push(to);
        self.len.push(bytes as usize);
    }
}

/// Engines to choose from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Engine {
    Copier,
    Kernel,
    Staged,
}

/// Plans copies. Keeps the buffers of its plan.
#[derive(Debug, Default)]
pub struct Planner {
    options: PlanOptions,
    plan: Plan,
}

/// One plane of one part of the job under planning.
struct Piece<'a> {
    direction: Direction,
    part: usize,
    pages: CopyPart<'a>,
    plane: &'a Plane,
    copy: PlaneCopy,
    /// The same with the host as a kernel sees it.
    kernel_copy: PlaneCopy,
    src: PlaneAddress<'a>,
    dst: PlaneAddress<'a>,
}

impl Planner {
    /// A planner.
    #[must_use]
    pub fn new(options: PlanOptions) -> Planner {
        Planner { options, plan: Plan::default() }
    }

    /// How it decides.
    #[must_use]
    pub fn options(&self) -> &PlanOptions {
        &self.options
    }

    /// How it decides, to change.
    pub fn options_mut(&mut self) -> &mut PlanOptions {
        &mut self.options
    }

    /// The last plan. Mutable because the batched copy call of the driver takes mutable lists.
    pub fn plan_mut(&mut self) -> &mut Plan {
        &mut self.plan
    }

    /// Plans a job that was checked. `places` has one entry per plane of the geometry. O(pages).
    pub fn plan(&mut self, job: &CopyJob<'_>, geometry: &Geometry, places: &[PlanePlaces<'_>]) -> &Plan {
        self.plan.clear();
        let layers = geometry.model_layers();
        let steps = if job.by_layer { layers } else { 1 };
        for step in 0..steps {
            let range = if job.by_layer { step..step + 1 } else { 0..layers };
            for (part, pages) in job.parts.iter().enumerate() {
                for (id, plane) in geometry.planes_of(pages.pool, pages.planes) {
                    let layers = plane.layers_within(range.start, range.end);
                    let Some(places) = places.get(usize::from(id.0)) else { continue };
                    if !layers.is_empty() && !pages.src.is_empty() {
                        self.piece(&Piece::new(job.direction, part, *pages, plane, layers, places));
                    }
                }
            }
            if job.by_layer {
                self.plan.steps.push(PlanStep::LayersDone(step + 1));
            }
        }
        &self.plan
    }

    fn piece(&mut self, piece: &Piece<'_>) {
        match self.choose(piece) {
            Engine::Copier => self.batches(piece),
            Engine::Kernel => self.launches(piece),
            Engine::Staged => self.staged(piece),
        }
    }

    fn choose(&self, piece: &Piece<'_>) -> Engine {
        let o = &self.options;
        if !o.kernels {
            return Engine::Copier;
        }
        if piece.direction == Direction::DeviceToDevice {
            // The copy engine is slower than kernels inside the device, up to 20 times where it overlaps.
            return Engine::Kernel;
        }
        let cost = if piece.direction == Direction::DeviceToHost { o.to_host } else { o.to_device };
        let pages = piece.pages.src.len() as u64;
        let bytes = pages * piece.copy.page_bytes();
        let descriptors = self.descriptors(piece);
        let rate = |per_us: u32| bytes * 1000 / u64::from(per_us.max(1));
        let link_ns = rate(cost.link_bytes_per_us);
        let engine_ns = link_ns + descriptors * u64::from(cost.descriptor_ns);
        let launches = pages.div_ceil(self.pairs_per_launch(&piece.kernel_copy, piece.kernel()) as u64);
        let kernel_ns = rate(cost.kernel_bytes_per_us) + launches * LAUNCH_NS;
        let staged_ns = piece.can_stage(o.staging_bytes).then(|| {
            let chunks = pages.div_ceil((o.staging_bytes / piece.plane.page_bytes()).max(1));
            let relayout = 2 * link_ns / LOCAL_PER_LINK + chunks * LAUNCH_NS;
            link_ns + relayout + pages * u64::from(cost.descriptor_ns)
        });
        let near = |ns: u64| ns <= kernel_ns + kernel_ns / 20;
        match o.policy {
            CopyPolicy::Throughput => match staged_ns {
                Some(ns) if ns < engine_ns && ns < kernel_ns => Engine::Staged,
                _ if engine_ns <= kernel_ns => Engine::Copier,
                _ => Engine::Kernel,
            },
            CopyPolicy::Latency if bytes / descriptors.max(1) >= LATENCY_RUN_BYTES => Engine::Copier,
            CopyPolicy::Latency if staged_ns.is_some() => Engine::Staged,
            CopyPolicy::Latency => Engine::Kernel,
            CopyPolicy::Auto if near(engine_ns) => Engine::Copier,
            CopyPolicy::Auto if staged_ns.is_some_and(near) => Engine::Staged,
            CopyPolicy::Auto => Engine::Kernel,
        }
    }

    /// Descriptors that the copy engine would need.
    fn descriptors(&self, piece: &Piece<'_>) -> u64 {
        let groups = piece.pages.src.len() - if piece.pages_merge() { self.joints(piece) } else { 0 };
        groups as u64 * piece.copy.runs_per_page()
    }

    /// Pairs that continue the pair before them. No branch: it runs by vectors.
    fn joints(&self, piece: &Piece<'_>) -> usize {
        let (src, dst) = (piece.pages.src, piece.pages.dst);
        let mask = self.options.host_chunk_mask;
        let host = if piece.direction == Direction::HostToDevice { src } else { dst };
        let follows = |w: &[PageId]| w[1].0 == w[0].0.wrapping_add(1);
        let pairs = src.windows(2).zip(dst.windows(2)).zip(host.iter().skip(1));
        let joined = pairs.map(|((s, d), h)| u32::from(follows(s) & follows(d) & (h.0 & mask != 0)));
        joined.sum::<u32>() as usize
    }

    /// Whether pair `i` continues pair `i - 1` on both sides, inside one registration.
    #[inline]
    fn joins(&self, piece: &Piece<'_>, i: usize) -> bool {
        let (src, dst) = (piece.pages.src, piece.pages.dst);
        // Scattered lists fail the first test nearly always.
        src[i].0 == src[i - 1].0.wrapping_add(1)
            && dst[i].0 == dst[i - 1].0.wrapping_add(1)
            && !self.starts_chunk(if piece.direction == Direction::HostToDevice { src[i] } else { dst[i] })
    }

    /// Whether a host page is the first of a registration.
    fn starts_chunk(&self, page: PageId) -> bool {
        page.0 & self.options.host_chunk_mask == 0
    }

    /// Descriptors for all pairs of a piece, in slices.
    fn batches(&mut self, piece: &Piece<'_>) {
        let (src, dst) = (piece.pages.src, piece.pages.dst);
        let head = piece.copy.head;
        let runs = src.len() * head.layers as usize * head.parts as usize;
        self.plan.reserve(runs);
        let merge = piece.pages_merge() && self.joints(piece) > 0;
        if !merge && piece.is_one_run() && head.run_bytes <= self.options.slice_bytes {
            return self.single_runs(piece);
        }
        let mut slice = Slice::begin(&self.plan, self.options.slice_bytes);
        let mut first = 0;
        while first < src.len() {
            let mut end = first + 1;
            while merge && end < src.len() && self.joins(piece, end) {
                end += 1;
            }
            let bytes = head.run_bytes * (end - first) as u64;
            for layer in 0..head.layers {
                for part in 0..head.parts {
                    let from = piece.address(&piece.src, &head.src, src[first], layer, part);
                    let to = piece.address(&piece.dst, &head.dst, dst[first], layer, part);
                    slice.push(&mut self.plan, from, to, bytes);
                }
            }
            first = end;
        }
        slice.end(&mut self.plan);
    }

    /// [`Planner::batches`] where every page is one run and none continues another: list by list.
    fn single_runs(&mut self, piece: &Piece<'_>) {
        let head = piece.copy.head;
        let (plan, n) = (&mut self.plan, piece.pages.src.len());
        let first = plan.len.len();
        let of = |side: Side| move |page: &PageId| side.base + u64::from(page.0) * side.page_step;
        plan.src.extend(piece.pages.src.iter().map(of(head.src)));
        plan.dst.extend(piece.pages.dst.iter().map(of(head.dst)));
        plan.len.resize(first + n, head.run_bytes as usize);
        let per_slice = usize::try_from(self.options.slice_bytes / head.run_bytes).unwrap_or(n).max(1);
        for at in (0..n).step_by(per_slice) {
            plan.steps.push(PlanStep::Batch { first: first + at, count: per_slice.min(n - at) });
        }
    }

    fn pairs_per_launch(&self, copy: &PlaneCopy, kernel: Kernel) -> usize {
        let list = if self.options.large_params { PAIRS_LARGE } else { PAIRS_SMALL };
        let by_bytes = (self.options.slice_bytes / copy.page_bytes().max(1)).max(1);
        let segments = (copy.head.run_bytes / u64::from(kernel.segment_bytes()) + 2) * copy.runs_per_page();
        let by_count = (u64::from(u32::MAX / 2) / segments.max(1)).max(1);
        list.min(usize::try_from(by_bytes.min(by_count)).unwrap_or(list))
    }

    fn launches(&mut self, piece: &Piece<'_>) {
        let local = piece.direction == Direction::DeviceToDevice;
        let ring = self.options.ring.filter(|_| !local && piece.takes_ring());
        let kernel = if ring.is_some() { Kernel::Bulk } else { piece.kernel() };
        let blocks = match (local, ring) {
            (true, _) => self.options.local_blocks,
            (false, Some(_)) => self.options.quota_ring_blocks,
            (false, None) => self.options.quota_blocks,
        };
        let per_launch = self.pairs_per_launch(&piece.kernel_copy, kernel);
        let total = piece.pages.src.len();
        for first in (0..total).step_by(per_launch) {
            let pairs = per_launch.min(total - first) as u32;
            let to_host = piece.direction == Direction::DeviceToHost;
            let segment = ring.map_or(kernel.segment_bytes(), |r| r.stage_bytes);
            let head = piece.kernel_copy.launch(kernel, pairs, to_host, segment);
            self.launch(piece.part, first, kernel, ring, blocks, head, Lists::Pages);
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one plan step")]
    fn launch(
        &mut self,
        part: usize,
        first_pair: usize,
        kernel: Kernel,
        ring: Option<Ring>,
        blocks: u32,
        head: Head,
        lists: Lists,
    ) {
        let segments =
            u64::from(head.pairs) * u64::from(head.layers) * u64::from(head.parts) * u64::from(head.segments);
        let per_block = if ring.is_some() { 1 } else { u64::from(kernel.block_threads()) / 64 };
        let useful = u32::try_from(segments.div_ceil(per_block)).unwrap_or(u32::MAX);
        let grid = blocks.min(useful).max(1);
        self.plan.steps.push(PlanStep::Launch { kernel, ring, grid, part, first_pair, lists, head });
    }

    /// Relayout into staging by a kernel, then whole pages by the copy engine, chunk by chunk. One stream
    /// orders both, so the staging memory needs no fence of its own.
    fn staged(&mut self, piece: &Piece<'_>) {
        let page = piece.plane.page_bytes();
        let stage = Side {
            base: self.options.staging,
            page_step: page,
            layer_step: piece.plane.layer_bytes(),
            part_step: piece.plane.part_bytes(),
            table: 0,
        };
        let staging = PlaneAddress { side: stage, bases: None };
        let into = PlaneCopy::new(piece.plane, 0..piece.plane.layers(), &piece.src, &staging);
        let kernel = into.register_kernel();
        let fit = (self.options.staging_bytes / page.max(1)).max(1);
        let per_chunk = usize::try_from(fit).unwrap_or(1).min(self.pairs_per_launch(&into, kernel));
        let total = piece.pages.src.len();
        for first in (0..total).step_by(per_chunk) {
            let n = per_chunk.min(total - first);
            let head = into.launch(kernel, n as u32, true, kernel.segment_bytes());
            let blocks = self.options.local_blocks;
            self.launch(piece.part, first, kernel, None, blocks, head, Lists::ToStaging);
            let mut slice = Slice::begin(&self.plan, self.options.slice_bytes);
            let mut i = first;
            while i < first + n {
                let mut end = i + 1;
                while end < first + n && self.joins_on_host(piece, end) {
                    end += 1;
                }
                let from = stage.base + (i - first) as u64 * page;
                let to = piece.address(&piece.dst, &piece.copy.head.dst, piece.pages.dst[i], 0, 0);
                slice.push(&mut self.plan, from, to, page * (end - i) as u64);
                i = end;
            }
            slice.end(&mut self.plan);
        }
    }

    fn joins_on_host(&self, piece: &Piece<'_>, i: usize) -> bool {
        let dst = piece.pages.dst;
        piece.copy.head.dst.page_step == piece.plane.page_bytes()
            && dst[i].0 == dst[i - 1].0.wrapping_add(1)
            && !self.starts_chunk(dst[i])
    }
}

/// Cuts descriptors into batches.
struct Slice {
    first: usize,
    bytes: u64,
    limit: u64,
}

impl Slice {
    fn begin(plan: &Plan, limit: u64) -> Slice {
        Slice { first: plan.len.len(), bytes: 0, limit: limit.max(1) }
    }

    #[inline]
    fn push(&mut self, plan: &mut Plan, from: u64, to: u64, bytes: u64) {
        if bytes <= self.limit - self.bytes {
            plan.descriptor(from, to, bytes);
            self.bytes += bytes;
        } else {
            self.push_cut(plan, from, to, bytes);
        }
    }

    #[cold]
    fn push_cut(&mut self, plan: &mut Plan, mut from: u64, mut to: u64, mut left: u64) {
        while left > 0 {
            if self.bytes >= self.limit {
                self.end(plan);
            }
            let n = left.min((self.limit - self.bytes).max(1));
            plan.descriptor(from, to, n);
            self.bytes += n;
            (from, to, left) = (from + n, to + n, left - n);
        }
    }

    fn end(&mut self, plan: &mut Plan) {
        let count = plan.len.len() - self.first;
        if count > 0 {
            plan.steps.push(PlanStep::Batch { first: self.first, count });
        }
        *self = Slice::begin(plan, self.limit);
    }
}

impl<'a> Piece<'a> {
    fn new(
        direction: Direction,
        part: usize,
        pages: CopyPart<'a>,
        plane: &'a Plane,
        layers: Range<u32>,
        places: &PlanePlaces<'a>,
    ) -> Piece<'a> {
        let (src, dst, k_src, k_dst) = match direction {
            Direction::DeviceToHost => (places.device, places.host, places.device, places.host_mapped),
            Direction::HostToDevice => (places.host, places.device, places.host_mapped, places.device),
            Direction::DeviceToDevice => (places.device, places.device, places.device, places.device),
        };
        let copy = PlaneCopy::new(plane, layers.clone(), &src, &dst);
        let kernel_copy = PlaneCopy::new(plane, layers, &k_src, &k_dst);
        Piece { direction, part, pages, plane, copy, kernel_copy, src, dst }
    }

    fn kernel(&self) -> Kernel {
        self.kernel_copy.register_kernel()
    }

    fn takes_ring(&self) -> bool {
        self.kernel_copy.is_16_aligned() && self.kernel_copy.head.run_bytes >= RING_RUN_BYTES
    }

    /// Whether a page is one run at a regular distance from the next.
    fn is_one_run(&self) -> bool {
        self.copy.runs_per_page() == 1 && self.src.bases.is_none() && self.dst.bases.is_none()
    }

    fn pages_merge(&self) -> bool {
        self.copy.pages_merge
    }

    /// Whether staging can serve: to the host, all layers, pages scattered here and one block there.
    fn can_stage(&self, staging_bytes: u64) -> bool {
        let dst = &self.dst;
        self.direction == Direction::DeviceToHost
            && self.copy.runs_per_page() > 1
            && self.copy.page_bytes() == self.plane.page_bytes()
            && dst.bases.is_none()
            && (self.plane.parts() == 1 || dst.side.part_step == self.plane.part_bytes())
            && (self.plane.layers() == 1 || dst.side.layer_step == self.plane.layer_bytes())
            && self.plane.page_bytes() <= staging_bytes
    }

    /// Address of a run: through the table if there is one, else by the merged side of the copy.
    fn address(&self, place: &PlaneAddress<'_>, side: &Side, page: PageId, layer: u32, part: u32) -> u64 {
        let page = u64::from(page.0).wrapping_mul(side.page_step);
        let inner = match place.bases {
            Some(bases) => {
                let row = (self.copy.head.first_layer + layer) as usize * self.plane.parts() as usize;
                bases.get(row + part as usize).copied().unwrap_or(0)
            }
            None => side.base + u64::from(layer) * side.layer_step + u64::from(part) * side.part_step,
        };
        inner.wrapping_add(page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::OpId;

    const PAGES: u32 = 8192;

    /// Sixty-four tokens of 1 KiB rows: the run is 64 KiB per layer and part on a layer-first device.
    fn geometry() -> Geometry {
        Geometry::builder(64).plane(Plane::target(8, 1024)).build().unwrap()
    }

    fn places(g: &Geometry, layer_first: bool) -> [PlanePlaces<'static>; 1] {
        let p = &g.planes()[0];
        let host = Side {
            base: 1 << 40,
            page_step: p.page_bytes(),
            layer_step: p.layer_bytes(),
            part_step: p.part_bytes(),
            table: 0,
        };
        let n = u64::from(PAGES);
        let device = match layer_first {
            false => Side { base: 1 << 44, ..host },
            true => Side {
                base: 1 << 44,
                page_step: p.part_bytes(),
                layer_step: n * p.layer_bytes(),
                part_step: n * p.part_bytes(),
                table: 0,
            },
        };
        let at = |side| PlaneAddress { side, bases: None };
        [PlanePlaces { device: at(device), host: at(host), host_mapped: at(host) }]
    }

    fn pages(n: u32, step: u32) -> Vec<PageId> {
        (0..n).map(|i| PageId(i * step % PAGES)).collect()
    }

    fn plan(
        options: PlanOptions,
        layer_first: bool,
        direction: Direction,
        src: &[PageId],
        dst: &[PageId],
        by_layer: bool,
    ) -> Planner {
        let g = geometry();
        let parts = [CopyPart::full(src, dst)];
        let job = CopyJob { op: OpId(1), direction, parts: &parts, by_layer };
        let mut planner = Planner::new(options);
        planner.plan(&job, &g, &places(&g, layer_first));
        planner
    }

    fn engines(planner: &mut Planner) -> (usize, usize) {
        let steps = &planner.plan_mut().steps;
        let launches = steps.iter().filter(|s| matches!(s, PlanStep::Launch { .. })).count();
        (planner.plan_mut().len.len(), launches)
    }

    #[test]
    fn neighbours_on_both_sides_are_one_descriptor() {
        let (src, dst) = (pages(32, 1), pages(32, 1));
        let options = PlanOptions { slice_bytes: 1 << 30, ..PlanOptions::default() };
        let mut p = plan(options, false, Direction::DeviceToHost, &src, &dst, false);
        assert_eq!(engines(&mut p), (1, 0));
        assert_eq!(p.plan_mut().len, [32 << 20]);
        // A gap on one side ends a run; so does the border of a registration.
        let mut gap = dst.clone();
        gap[16..].iter_mut().for_each(|p| p.0 += 1);
        let mut p = plan(options, false, Direction::DeviceToHost, &src, &gap, false);
        assert_eq!(p.plan_mut().len, [16 << 20, 16 << 20]);
        let chunked = PlanOptions { host_chunk_mask: 7, ..options };
        let mut p = plan(chunked, false, Direction::HostToDevice, &src, &dst, false);
        assert_eq!(p.plan_mut().len, [8 << 20; 4]);
    }

    #[test]
    fn batches_are_cut_into_slices_that_hold_every_byte() {
        let (src, dst) = (pages(100, 3), pages(100, 5));
        let mut p = plan(PlanOptions::default(), false, Direction::DeviceToHost, &src, &dst, false);
        let plan = p.plan_mut();
        assert_eq!(plan.len.iter().sum::<usize>(), 100 << 20);
        let mut next = 0;
        for step in &plan.steps {
            let PlanStep::Batch { first, count } = *step else { panic!("{step:?}") };
            assert_eq!(first, next);
            next += count;
            let bytes: usize = plan.len[first..next].iter().sum();
            assert!(bytes <= 64 << 20);
        }
        assert_eq!((next, plan.steps.len()), (plan.len.len(), 2));
    }

    /// The table of choices for the common shapes on PCIe 5, one row each.
    #[test]
    fn the_choice_of_engine() {
        let (src, dst) = (pages(256, 3), pages(256, 5));
        let base = PlanOptions::default();
        let ring = PlanOptions { ring: Some(Ring { stages: 6, stage_bytes: 32 << 10 }), ..base };
        let staging = PlanOptions { staging_bytes: 64 << 20, ..base };
        let policy = |policy, o: PlanOptions| PlanOptions { policy, ..o };
        let (d2h, h2d) = (Direction::DeviceToHost, Direction::HostToDevice);
        let runs = 256 * 16;
        let rows = [
            // Whole pages of 1 MiB: the copy engine.
            (base, false, d2h, (256, 0)),
            (base, false, h2d, (256, 0)),
            // Runs of 64 KiB: 0.87 of the link by the engine, so a kernel; staged where there is memory.
            (base, true, d2h, (0, 4)),
            (base, true, h2d, (0, 4)),
            (ring, true, h2d, (0, 4)),
            (staging, true, d2h, (256, 4)),
            // A model decodes: no kernel from 32 KiB on.
            (policy(CopyPolicy::Latency, base), true, h2d, (runs, 0)),
            (policy(CopyPolicy::Throughput, base), true, h2d, (0, 4)),
            // No kernels at all.
            (PlanOptions { kernels: false, ..base }, true, h2d, (runs, 0)),
            // Inside the device always a kernel.
            (base, false, Direction::DeviceToDevice, (0, 4)),
        ];
        for (i, (options, layer_first, direction, want)) in rows.into_iter().enumerate() {
            let mut p = plan(options, layer_first, direction, &src, &dst, false);
            assert_eq!(engines(&mut p), want, "row {i}");
            let first = p.plan_mut().steps[0];
            if let PlanStep::Launch { kernel, grid, .. } = first {
                let local = direction == Direction::DeviceToDevice || options.staging_bytes > 0;
                assert_eq!(kernel == Kernel::Bulk, options.ring.is_some(), "row {i}");
                assert!(local || grid <= 2, "row {i}: {grid} blocks across the link");
            }
        }
    }

    #[test]
    fn layers_come_in_order_and_are_marked() {
        let (src, dst) = (pages(10, 3), pages(10, 5));
        let mut p = plan(PlanOptions::default(), true, Direction::HostToDevice, &src, &dst, true);
        let marks: Vec<u32> = p
            .plan_mut()
            .steps
            .iter()
            .filter_map(|s| match s {
                PlanStep::LayersDone(n) => Some(*n),
                _ => None,
            })
            .collect();
        assert_eq!(marks, (1..=8).collect::<Vec<_>>());
        assert!(matches!(p.plan_mut().steps.last(), Some(PlanStep::LayersDone(8))));
    }

    #[test]
    fn the_same_job_gives_the_same_plan_and_no_buffer_grows() {
        let (src, dst) = (pages(4096, 3), pages(4096, 5));
        let g = geometry();
        let parts = [CopyPart::full(&src, &dst)];
        let job = CopyJob { op: OpId(1), direction: Direction::DeviceToHost, parts: &parts, by_layer: false };
        let mut planner = Planner::new(PlanOptions::default());
        let steps = planner.plan(&job, &g, &places(&g, false)).steps.clone();
        let sizes = |p: &Plan| (p.steps.capacity(), p.src.capacity(), p.dst.capacity(), p.len.capacity());
        let before = sizes(planner.plan_mut());
        assert_eq!(planner.plan(&job, &g, &places(&g, false)).steps, steps);
        assert_eq!(sizes(planner.plan_mut()), before);
    }
}
