//! Two sides with pages in some layout, and a reference that copies byte by byte.

use sapwood::backend::device::cpu::{CpuMode, launch_pages};
use sapwood::backend::device::kernels::{
    Kernel, PAIRS_LARGE, PAIRS_SMALL, PageJob, PlaneAddress, PlaneCopy, Ring, Side,
};
use sapwood::pool::{Geometry, Plane};

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

    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}

pub(crate) fn shapes() -> usize {
    std::env::var("SAPWOOD_SHAPES").ok().and_then(|s| s.parse().ok()).unwrap_or(2000)
}

/// Orders of bytes that serving systems use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Layout {
    /// (page, layer, part, row).
    PageFirst,
    /// (layer, part, page, row).
    LayerFirst,
    /// (part, page, layer, row): K and V in two halves of one buffer.
    PartFirst,
    /// (page, part, layer, row).
    PartInPage,
    /// As `LayerFirst`, each (layer, part) an allocation of its own, reached through a table.
    Table,
    /// As `PageFirst` with a gap after every page.
    Padded,
}

pub(crate) const LAYOUTS: [Layout; 6] = [
    Layout::PageFirst,
    Layout::LayerFirst,
    Layout::PartFirst,
    Layout::PartInPage,
    Layout::Table,
    Layout::Padded,
];

/// Memory whose first byte is 128-byte aligned plus `shift`.
pub(crate) struct Memory {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Memory {
    pub(crate) fn new(len: usize, shift: usize, random: &mut Random) -> Memory {
        let mut bytes = vec![0u8; len + 128 + shift];
        for chunk in bytes.chunks_mut(8) {
            let word = random.next().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
        let start = bytes.as_ptr().align_offset(128) + shift;
        Memory { bytes, start, len }
    }

    pub(crate) fn addr(&mut self) -> u64 {
        self.bytes[self.start..].as_mut_ptr() as u64
    }

    pub(crate) fn at(&self, offset: usize) -> &[u8] {
        &self.bytes[self.start + offset..self.start + self.len]
    }

    pub(crate) fn at_mut(&mut self, offset: usize) -> &mut [u8] {
        &mut self.bytes[self.start + offset..]
    }

    pub(crate) fn whole(&self) -> Vec<u8> {
        self.bytes.clone()
    }

    pub(crate) fn start(&self) -> usize {
        self.start
    }
}

pub(crate) struct World {
    pub(crate) plane: Plane,
    pub(crate) layout: Layout,
    pub(crate) memory: Memory,
    pub(crate) table: Vec<u64>,
    pub(crate) side: Side,
}

impl World {
    pub(crate) fn new(plane: &Plane, layout: Layout, pages: u32, shift: usize, random: &mut Random) -> World {
        let (part, layer, page) = (plane.part_bytes(), plane.layer_bytes(), plane.page_bytes());
        let (n, layers, parts) = (u64::from(pages), u64::from(plane.layers()), u64::from(plane.parts()));
        let (page_step, layer_step, part_step) = match layout {
            Layout::PageFirst => (page, layer, part),
            Layout::LayerFirst | Layout::Table => (part, parts * n * part, n * part),
            Layout::PartFirst => (layers * part, part, n * layers * part),
            Layout::PartInPage => (page, part, layers * part),
            Layout::Padded => (page + 48, layer, part),
        };
        let bytes = n * page_step.max(page) + if layout == Layout::Padded { 48 } else { 0 };
        let mut memory = Memory::new(bytes as usize, shift, random);
        let base = memory.addr();
        let mut table = Vec::new();
        if layout == Layout::Table {
            for l in 0..layers {
                table.extend((0..parts).map(|q| base + l * layer_step + q * part_step));
            }
        }
        let side = Side {
            base: if layout == Layout::Table { 0xDEAD_0000 } else { base },
            page_step,
            layer_step: if layout == Layout::Table { 0xBAD } else { layer_step },
            part_step: if layout == Layout::Table { 0xBAD } else { part_step },
            table: table.as_ptr() as u64 * u64::from(layout == Layout::Table),
        };
        World { plane: plane.clone(), layout, memory, table, side }
    }

    pub(crate) fn address(&self) -> PlaneAddress<'_> {
        let bases = (self.layout == Layout::Table).then_some(&self.table[..]);
        PlaneAddress { side: self.side, bases }
    }

    /// Offset in the memory of the first row of (page, layer, part).
    pub(crate) fn offset(&self, page: u32, layer: u32, part: u32) -> usize {
        let base = self.memory.bytes[self.memory.start..].as_ptr() as u64;
        (self.address().at(page, layer, part, self.plane.parts()).unwrap() - base) as usize
    }
}

/// A random plane: MHA, MLA, state or something odd.
pub(crate) fn plane(random: &mut Random, unit: u64) -> (Plane, u32) {
    let row = |random: &mut Random, most: u64| (unit * (1 + random.below(most / unit))) as u32;
    let (plane, page_size) = match random.below(4) {
        0 => {
            let r = random.pick(&[128, 256, 1024]);
            (Plane::target(1 + random.below(5) as u32, r), random.pick(&[1, 2, 16, 64]))
        }
        1 => {
            let r = random.pick(&[576, 656, 1152]);
            (Plane::latent(1 + random.below(5) as u32, r), random.pick(&[1, 4, 64]))
        }
        2 => (Plane::state(1 + random.below(3) as u32, row(random, 20_000)), 1),
        _ => {
            let parts = 1 + random.below(3) as u32;
            let kind = sapwood::pool::PlaneKind::Other(1);
            (
                Plane::new(kind, 1 + random.below(4) as u32, parts, row(random, 400)),
                1 + random.below(40) as u32,
            )
        }
    };
    let geometry = Geometry::builder(page_size).plane(plane).build().unwrap();
    (geometry.planes()[0].clone(), page_size)
}

/// Different page numbers, `n` out of `pages`.
pub(crate) fn distinct(random: &mut Random, pages: u32, n: usize) -> Vec<u32> {
    let mut all: Vec<u32> = (0..pages).collect();
    if random.below(3) == 0 {
        let first = random.below(u64::from(pages) - n as u64 + 1) as usize;
        return all[first..first + n].to_vec();
    }
    for i in 0..n {
        let j = i + random.below((all.len() - i) as u64) as usize;
        all.swap(i, j);
    }
    all.truncate(n);
    all
}

pub(crate) const RING: Ring = Ring { stages: 4, stage_bytes: 2048 };

/// Launches a page kernel with a random grid over the given pages.
pub(crate) fn run(
    kernel: Kernel,
    copy: &PlaneCopy,
    (src, dst): (&[u32], &[u32]),
    sums: u64,
    random: &mut Random,
    ring: Ring,
) {
    let segment = if kernel == Kernel::Bulk { ring.stage_bytes } else { kernel.segment_bytes() };
    let mut head = copy.launch(kernel, src.len() as u32, random.below(2) == 0, segment);
    head.sums = sums;
    let grid = 1 + random.below(4) as u32;
    let mode = CpuMode {
        threads: random.below(4) == 0,
        late_loads: random.below(2) == 0,
        late_stores: random.below(2) == 0,
    };
    // A block is a multiple of the lanes of a group.
    let block = if kernel == Kernel::Bulk { 32 } else { 64 * (1 + random.below(3) as u32) };
    let ran = if src.len() <= PAIRS_SMALL && random.below(4) != 0 {
        let mut job = PageJob::<PAIRS_SMALL> { head, ..Default::default() };
        job.src[..src.len()].copy_from_slice(src);
        job.dst[..dst.len()].copy_from_slice(dst);
        // SAFETY: the record was made from two worlds whose memory is alive and not borrowed elsewhere.
        unsafe { launch_pages(kernel, &job, grid, block, ring, mode) }
    } else {
        let mut job = Box::new(PageJob::<PAIRS_LARGE> { head, ..Default::default() });
        job.src[..src.len()].copy_from_slice(src);
        job.dst[..dst.len()].copy_from_slice(dst);
        // SAFETY: as above.
        unsafe { launch_pages(kernel, &job, grid, block, ring, mode) }
    };
    assert!(ran);
}

/// Copies byte by byte what the kernel should have, into a copy of the destination's memory.
pub(crate) fn reference(
    src: &World,
    dst: &World,
    pages: (&[u32], &[u32]),
    layers: std::ops::Range<u32>,
) -> Vec<u8> {
    let mut want = dst.memory.whole();
    let n = src.plane.part_bytes() as usize;
    for (&s, &d) in pages.0.iter().zip(pages.1) {
        for layer in layers.clone() {
            for part in 0..src.plane.parts() {
                let from = &src.memory.at(src.offset(s, layer, part))[..n];
                let to = dst.memory.start() + dst.offset(d, layer, part);
                want[to..to + n].copy_from_slice(from);
            }
        }
    }
    want
}
