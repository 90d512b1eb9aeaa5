//! The copy kernels as the host sees them: names, launch records, and how a copy of pages is put into one.
//!
//! The records mirror `kernels/kv_job.h`; both sides assert the sizes. They travel by value in the launch
//! parameters, so nothing has to be uploaded or kept alive.

use std::ffi::CStr;
use std::ops::Range;

use crate::pool::Plane;

/// Kernels by what they do. The numbers are those of the CPU build's launch function.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u32)]
pub enum Kernel {
    /// 16-byte units, 64 lanes to a segment: runs of 4 KiB and more.
    Copy16Wide = 0,
    /// 16-byte units, 16 lanes to a segment: shorter runs.
    Copy16Narrow = 1,
    /// 8-byte units.
    Copy8 = 2,
    /// 4-byte units.
    Copy4 = 3,
    /// Bytes.
    Copy1 = 4,
    /// As `Copy16Wide`, and adds up each page ([`page_sum`](crate::backend::host::page_sum)).
    CopySum = 5,
    /// bf16 to mx8.
    QuantMx8 = 6,
    /// mx8 to bf16.
    DequantMx8 = 7,
    /// A list of unequal copies.
    CopyDesc = 8,
    /// Bulk copies through shared memory; compute capability 9.0 and later.
    Bulk = 9,
}

impl Kernel {
    /// All kernels, in number order.
    pub const ALL: [Kernel; 10] = [
        Kernel::Copy16Wide,
        Kernel::Copy16Narrow,
        Kernel::Copy8,
        Kernel::Copy4,
        Kernel::Copy1,
        Kernel::CopySum,
        Kernel::QuantMx8,
        Kernel::DequantMx8,
        Kernel::CopyDesc,
        Kernel::Bulk,
    ];

    /// Name of the entry point for short or long lists.
    #[must_use]
    pub const fn symbol(self, large: bool) -> &'static CStr {
        match (self, large) {
            (Kernel::Copy16Wide, false) => c"kvx_copy16_l64_small",
            (Kernel::Copy16Wide, true) => c"kvx_copy16_l64_large",
            (Kernel::Copy16Narrow, false) => c"kvx_copy16_l16_small",
            (Kernel::Copy16Narrow, true) => c"kvx_copy16_l16_large",
            (Kernel::Copy8, false) => c"kvx_copy8_small",
            (Kernel::Copy8, true) => c"kvx_copy8_large",
            (Kernel::Copy4, false) => c"kvx_copy4_small",
            (Kernel::Copy4, true) => c"kvx_copy4_large",
            (Kernel::Copy1, false) => c"kvx_copy1_small",
            (Kernel::Copy1, true) => c"kvx_copy1_large",
            (Kernel::CopySum, false) => c"kvx_copy_sum_small",
            (Kernel::CopySum, true) => c"kvx_copy_sum_large",
            (Kernel::QuantMx8, false) => c"kvx_quant_mx8_small",
            (Kernel::QuantMx8, true) => c"kvx_quant_mx8_large",
            (Kernel::DequantMx8, false) => c"kvx_dequant_mx8_small",
            (Kernel::DequantMx8, true) => c"kvx_dequant_mx8_large",
            (Kernel::CopyDesc, false) => c"kvx_copy_desc_small",
            (Kernel::CopyDesc, true) => c"kvx_copy_desc_large",
            (Kernel::Bulk, false) => c"kvx_bulk_small",
            (Kernel::Bulk, true) => c"kvx_bulk_large",
        }
    }

    /// Threads per block.
    #[must_use]
    pub const fn block_threads(self) -> u32 {
        match self {
            Kernel::QuantMx8 | Kernel::DequantMx8 => 256,
            Kernel::Bulk => 32,
            _ => 1024,
        }
    }

    /// Bytes of a segment: what a group of lanes moves with four loads each.
    #[must_use]
    pub const fn segment_bytes(self) -> u32 {
        match self {
            Kernel::Copy16Wide | Kernel::CopySum | Kernel::CopyDesc => 4096,
            Kernel::Bulk => RING_STAGE_BYTES,
            _ => 1024,
        }
    }
}

/// Bytes of one stage of the ring.
pub const RING_STAGE_BYTES: u32 = 32 << 10;
/// Shared memory before the stages of the ring.
pub const RING_HEAD_BYTES: u32 = 128;
/// Pages in a short list: with the head just under 4 KiB of parameters.
pub const PAIRS_SMALL: usize = 490;
/// Pages in a long list: just under 32,764 bytes.
pub const PAIRS_LARGE: usize = 4072;
/// Descriptors in a short list.
pub const DESCS_SMALL: usize = 170;
/// Descriptors in a long list.
pub const DESCS_LARGE: usize = 1364;

/// Cut segments at 128-byte lines of the destination instead of the source.
pub const LINES_OF_DST: u32 = 1;
/// Cut segments at multiples of their size from the start of the run.
pub const LINES_OFF: u32 = 2;

/// One side of a page copy: page `p`, layer `l`, part `q` starts at
/// `base + p * page_step + l * layer_step + q * part_step`, or with a table at
/// `table[(first_layer + l) * table_parts + q] + p * page_step`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Side {
    /// Address.
    pub base: u64,
    /// Bytes.
    pub page_step: u64,
    /// Bytes.
    pub layer_step: u64,
    /// Bytes.
    pub part_step: u64,
    /// Address of the table on the device, or 0.
    pub table: u64,
}

/// What a launch copies, without its pages.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Head {
    /// Side that is read.
    pub src: Side,
    /// Side that is written.
    pub dst: Side,
    /// Contiguous bytes per (page, layer, part); of the bf16 side when quantising.
    pub run_bytes: u64,
    /// Address of one u64 per pair, for the summing copy.
    pub sums: u64,
    /// Offset of the scales from the start of a quantised page.
    pub scales: u64,
    /// Pages in the launch.
    pub pairs: u32,
    /// Layers per page.
    pub layers: u32,
    /// Parts per layer.
    pub parts: u32,
    /// Segments per run.
    pub segments: u32,
    /// Bytes of a segment.
    pub segment_bytes: u32,
    /// First layer, of the tables.
    pub first_layer: u32,
    /// Entries per layer of the tables.
    pub table_parts: u32,
    /// `LINES_*`.
    pub flags: u32,
}

/// The parameters of a page kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PageJob<const N: usize> {
    /// What is copied.
    pub head: Head,
    /// Pages read.
    pub src: [u32; N],
    /// Pages written.
    pub dst: [u32; N],
}

impl<const N: usize> Default for PageJob<N> {
    fn default() -> Self {
        PageJob { head: Head::default(), src: [0; N], dst: [0; N] }
    }
}

/// Parameters with a short list.
pub type PageJobSmall = PageJob<PAIRS_SMALL>;
/// Parameters with a long list.
pub type PageJobLarge = PageJob<PAIRS_LARGE>;

/// One copy of a descriptor list.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Desc {
    /// Address read.
    pub src: u64,
    /// Address written.
    pub dst: u64,
    /// Bytes.
    pub bytes: u32,
    /// Segments of all descriptors before this one.
    pub first_segment: u32,
}

/// The parameters of the descriptor kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DescJob<const N: usize> {
    /// Descriptors used.
    pub descs: u32,
    /// Segments of all of them.
    pub segments: u32,
    /// Bytes of a segment.
    pub segment_bytes: u32,
    /// Zero.
    pub reserved: u32,
    /// The descriptors.
    pub list: [Desc; N],
}

/// Stages and stage size of the ring, its second parameter.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ring {
    /// 3 to 16.
    pub stages: u32,
    /// A multiple of 128.
    pub stage_bytes: u32,
}

impl Ring {
    /// The ring that fits `shared_bytes` of shared memory per block, if any does. At most 6 stages: 192 KiB
    /// in flight saturate every link there is.
    #[must_use]
    pub fn fitting(shared_bytes: u32) -> Option<Ring> {
        let room = shared_bytes.checked_sub(RING_HEAD_BYTES)?;
        let full = room / RING_STAGE_BYTES;
        if full >= 6 {
            return Some(Ring { stages: 6, stage_bytes: RING_STAGE_BYTES });
        }
        let half = room / (RING_STAGE_BYTES / 2);
        (half >= 3).then_some(Ring { stages: half.min(6), stage_bytes: RING_STAGE_BYTES / 2 })
    }

    /// Shared memory that a block needs.
    #[must_use]
    pub const fn shared_bytes(self) -> u32 {
        RING_HEAD_BYTES + self.stages * self.stage_bytes
    }
}

const _: () = assert!(size_of::<Head>() == 136);
const _: () = assert!(size_of::<PageJobSmall>() + size_of::<Ring>() <= 4096);
const _: () = assert!(size_of::<PageJobLarge>() + size_of::<Ring>() <= 32_764);
const _: () = assert!(size_of::<DescJob<DESCS_SMALL>>() == 16 + 24 * DESCS_SMALL);
const _: () = assert!(size_of::<DescJob<DESCS_SMALL>>() <= 4096);
const _: () = assert!(size_of::<DescJob<DESCS_LARGE>>() <= 32_764);

/// Where a plane lies on one side, for [`PlaneCopy::new`].
#[derive(Clone, Copy, Debug)]
pub struct PlaneAddress<'a> {
    /// Base and distances. `table` is filled in when `bases` is used.
    pub side: Side,
    /// Bases per (layer, part) when they are not regularly spaced; a copy of the table on the device.
    pub bases: Option<&'a [u64]>,
}

impl PlaneAddress<'_> {
    /// Address of a page, layer and part; `None` past the table.
    #[must_use]
    pub fn at(&self, page: u32, layer: u32, part: u32, parts: u32) -> Option<u64> {
        let page = u64::from(page).wrapping_mul(self.side.page_step);
        let inner = match self.bases {
            Some(bases) => *bases.get(layer as usize * parts as usize + part as usize)?,
            None => {
                let layer = u64::from(layer).wrapping_mul(self.side.layer_step);
                let part = u64::from(part).wrapping_mul(self.side.part_step);
                self.side.base.wrapping_add(layer).wrapping_add(part)
            }
        };
        Some(inner.wrapping_add(page))
    }

    /// Or of everything that decides the alignment of run starts.
    fn bits(&self, layers: &Range<u32>, layer_step: bool, part_step: bool) -> u64 {
        let base = match self.bases {
            Some(bases) => bases.iter().fold(0, |a, b| a | b),
            None => {
                let first = u64::from(layers.start).wrapping_mul(self.side.layer_step);
                let steps = (if layer_step { self.side.layer_step } else { 0 })
                    | (if part_step { self.side.part_step } else { 0 });
                self.side.base.wrapping_add(first) | steps
            }
        };
        base | self.side.page_step
    }
}

/// A copy of pages of one plane, its axes merged: everything but the pages and the engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PlaneCopy {
    /// Sides, run, layers and parts; pairs and segments are filled in by [`PlaneCopy::launch`].
    pub head: Head,
    /// Largest unit that every run start and the run length are multiples of: 1, 2, 4, 8 or 16.
    pub unit: u32,
    /// Whether every run starts on a 128-byte line of the source and of the destination.
    pub lines: (bool, bool),
    /// Whether pages with neighbouring numbers are contiguous on both sides, so that they merge too.
    pub pages_merge: bool,
}

impl PlaneCopy {
    /// Layers `layers` of `plane`. Axes that are contiguous on both sides become one run.
    #[must_use]
    pub fn new(
        plane: &Plane,
        layers: Range<u32>,
        src: &PlaneAddress<'_>,
        dst: &PlaneAddress<'_>,
    ) -> PlaneCopy {
        let regular = src.bases.is_none() && dst.bases.is_none();
        let count = layers.end.saturating_sub(layers.start);
        let (mut run, mut parts, mut outer) = (plane.part_bytes(), plane.parts(), count);
        let step_is = |f: fn(&Side) -> u64, n: u64| f(&src.side) == n && f(&dst.side) == n;
        if regular && (parts == 1 || step_is(|s| s.part_step, run)) {
            run *= u64::from(parts);
            parts = 1;
            if outer <= 1 || step_is(|s| s.layer_step, run) {
                run *= u64::from(outer);
                outer = outer.min(1);
            }
        }
        let bits = |a: &PlaneAddress<'_>| a.bits(&layers, outer > 1, parts > 1);
        let align = |bits: u64, most: u64| 1u64 << bits.trailing_zeros().min(most.trailing_zeros());
        let unit = align(bits(src) | bits(dst) | run, 16) as u32;
        let shift = |a: &PlaneAddress<'_>| match a.bases {
            Some(_) => a.side,
            None => Side { base: a.side.base + u64::from(layers.start) * a.side.layer_step, ..a.side },
        };
        let head = Head {
            src: shift(src),
            dst: shift(dst),
            run_bytes: run,
            layers: outer,
            parts,
            first_layer: layers.start,
            table_parts: plane.parts(),
            ..Head::default()
        };
        let lines = (align(bits(src), 128) == 128, align(bits(dst), 128) == 128);
        let pages_merge = outer <= 1 && parts == 1 && regular && step_is(|s| s.page_step, run);
        PlaneCopy { head, unit, lines, pages_merge }
    }

    /// Runs per page.
    #[must_use]
    pub fn runs_per_page(&self) -> u64 {
        u64::from(self.head.layers) * u64::from(self.head.parts)
    }

    /// Bytes per page.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.runs_per_page() * self.head.run_bytes
    }

    /// The register kernel for these runs.
    #[must_use]
    pub fn register_kernel(&self) -> Kernel {
        match self.unit {
            // Shorter runs would leave most of the four loads of each of 64 lanes unused.
            16 if self.head.run_bytes >= 4096 => Kernel::Copy16Wide,
            16 => Kernel::Copy16Narrow,
            8 => Kernel::Copy8,
            4 => Kernel::Copy4,
            _ => Kernel::Copy1,
        }
    }

    /// Whether the ring and the summing copy take these runs.
    #[must_use]
    pub fn is_16_aligned(&self) -> bool {
        self.unit == 16
    }

    /// The head of a launch of `kernel` over `pairs` pages. `dst_lines`: cut segments at lines of the
    /// destination, for a copy to the host.
    #[must_use]
    pub fn launch(&self, kernel: Kernel, pairs: u32, dst_lines: bool, segment_bytes: u32) -> Head {
        let on_lines = if dst_lines { self.lines.1 } else { self.lines.0 };
        // A run that starts inside a line has one segment more at most.
        let skewed = kernel != Kernel::Bulk && !on_lines;
        let reach = self.head.run_bytes + if skewed { 127 } else { 0 };
        let flags = match (skewed, dst_lines) {
            (false, _) => LINES_OFF,
            (true, true) => LINES_OF_DST,
            (true, false) => 0,
        };
        let segments = reach.div_ceil(u64::from(segment_bytes)) as u32;
        Head { pairs, segments, segment_bytes, flags, ..self.head }
    }
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;

    fn read(path: &str) -> String {
        let whole = format!("{}/kernels/{path}", env!("CARGO_MANIFEST_DIR"));
        std::fs::read_to_string(&whole).unwrap_or_else(|e| panic!("{whole}: {e}"))
    }

    #[test]
    fn the_committed_ptx_belongs_to_the_source() {
        let source = ["kv_port.h", "kv_job.h", "kv_copy.cu", "kv_bulk.cu"].map(read).concat();
        let digest: String = Sha256::digest(source.as_bytes()).iter().map(|b| format!("{b:02x}")).collect();
        for (image, version) in [("kv_copy_small", "7.4"), ("kv_copy_large", "8.1"), ("kv_bulk", "8.1")] {
            let ptx = read(&format!("ptx/{image}.ptx"));
            let line = format!("// source sha256 {digest}");
            assert!(ptx.lines().any(|l| l == line), "{image}: run kernels/regenerate");
            assert!(ptx.lines().any(|l| l == format!(".version {version}")), "{image}");
            assert!(!ptx.contains("used_bytes_mask"), "{image}: needs a newer version than it says");
        }
    }

    #[test]
    fn every_kernel_is_in_the_ptx_and_has_figures_without_local_memory() {
        let table = read("ptxas.tsv");
        for kernel in Kernel::ALL {
            for large in [false, true] {
                let symbol = kernel.symbol(large).to_str().unwrap();
                let image = match (kernel, large) {
                    (Kernel::Bulk, _) => "kv_bulk",
                    (_, false) => "kv_copy_small",
                    (_, true) => "kv_copy_large",
                };
                let entry = format!(".entry {symbol}(");
                assert!(read(&format!("ptx/{image}.ptx")).contains(&entry), "{symbol}");
                let archs: &[&str] = match kernel {
                    Kernel::Bulk => &["sm_90", "sm_100", "sm_120"],
                    _ => &["sm_80", "sm_90", "sm_100", "sm_120"],
                };
                for arch in archs {
                    let start = format!("{symbol}\t{arch}\t");
                    let row = table
                        .lines()
                        .find_map(|l| l.strip_prefix(&start))
                        .unwrap_or_else(|| panic!("{start}"));
                    let figures: Vec<u32> = row.split('\t').map(|n| n.parse().unwrap()).collect();
                    assert_eq!(figures[1..], [0, 0, 0], "{symbol} {arch}: stack, spill stores, spill loads");
                    // 65,536 registers per processor must hold a block.
                    assert!(figures[0] * kernel.block_threads() <= 65_536, "{symbol} {arch}");
                }
            }
        }
    }

    #[test]
    fn a_ring_is_as_deep_as_shared_memory_allows() {
        assert_eq!(Ring::fitting(227 << 10), Some(Ring { stages: 6, stage_bytes: 32 << 10 }));
        assert_eq!(Ring::fitting(99 << 10), Some(Ring { stages: 6, stage_bytes: 16 << 10 }));
        assert_eq!(Ring::fitting(48 << 10), None);
        assert_eq!(Ring::fitting(0), None);
        for shared in (0..(256 << 10)).step_by(512) {
            if let Some(ring) = Ring::fitting(shared) {
                assert!(ring.shared_bytes() <= shared && (3..=16).contains(&ring.stages));
            }
        }
    }
}
