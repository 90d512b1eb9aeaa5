//! Plain and summing copies: every kernel, every pair of layouts, per layer and all layers.

use std::collections::HashSet;

use sapwood::backend::device::cpu::{CpuMode, launch_descs};
use sapwood::backend::device::kernels::{DESCS_SMALL, Desc, DescJob, Kernel, PlaneCopy, Ring};
use sapwood::backend::host::page_sum;

use crate::world::{LAYOUTS, Memory, RING, Random, World, distinct, plane, reference, run, shapes};

/// One random shape; `false` if the kernel does not take it.
fn one(kernel: Kernel, random: &mut Random, seen: &mut HashSet<(u8, u8, bool, u8)>) -> bool {
    let unit = match kernel {
        Kernel::Copy16Wide | Kernel::Copy16Narrow | Kernel::CopySum | Kernel::Bulk => 16,
        Kernel::Copy8 => 8,
        Kernel::Copy4 => 4,
        _ => 1,
    };
    let (plane, _) = plane(random, unit);
    let (from, to) = (random.pick(&LAYOUTS), random.pick(&LAYOUTS));
    let pages = 1 + random.below(12) as u32;
    let n = 1 + random.below(u64::from(pages)) as usize;
    let shift = |random: &mut Random| (unit * random.below(128 / unit)) as usize * (random.below(2) as usize);
    let (s_shift, d_shift) = (shift(random), shift(random));
    let mut src = World::new(&plane, from, pages, s_shift, random);
    let mut dst = World::new(&plane, to, pages, d_shift, random);
    let all = kernel == Kernel::CopySum || random.below(2) == 0;
    let one = random.below(u64::from(plane.layers())) as u32;
    let layers = if all { 0..plane.layers() } else { one..one + 1 };
    let copy = PlaneCopy::new(&plane, layers.clone(), &src.address(), &dst.address());
    if u64::from(copy.unit) < unit {
        return false;
    }
    let list = (distinct(random, pages, n), distinct(random, pages, n));
    let want = reference(&src, &dst, (&list.0, &list.1), layers);
    let mut sums = vec![0u64; n];
    let at = if kernel == Kernel::CopySum { sums.as_mut_ptr() as u64 } else { 0 };
    let ring = Ring { stages: 3 + random.below(5) as u32, ..RING };
    let before = src.memory.whole();
    run(kernel, &copy, (&list.0, &list.1), at, random, ring);
    assert!(dst.memory.whole() == want, "{kernel:?} {from:?} to {to:?} {plane:?} {copy:?} {list:?}");
    assert!(src.memory.whole() == before, "the source is only read");
    if kernel == Kernel::CopySum {
        check_sums(&src, &list.0, &sums);
    }
    let position = |l| LAYOUTS.iter().position(|&x| x == l).unwrap() as u8;
    seen.insert((position(from), position(to), all, kind_index(&plane)));
    let _ = (src.memory.addr(), dst.memory.addr());
    true
}

/// The sums must be those of the pages in the default order, whatever the layout was.
fn check_sums(src: &World, pages: &[u32], sums: &[u64]) {
    let n = src.plane.part_bytes() as usize;
    for (&page, &sum) in pages.iter().zip(sums) {
        let mut bytes = Vec::new();
        for layer in 0..src.plane.layers() {
            for part in 0..src.plane.parts() {
                bytes.extend_from_slice(&src.memory.at(src.offset(page, layer, part))[..n]);
            }
        }
        assert_eq!(sum, page_sum(&bytes), "{:?} page {page}", src.layout);
    }
}

/// MHA, MLA, state, other.
fn kind_index(plane: &sapwood::pool::Plane) -> u8 {
    use sapwood::pool::PlaneKind;
    match plane.kind() {
        PlaneKind::Target => 0,
        PlaneKind::Latent => 1,
        PlaneKind::State => 2,
        _ => 3,
    }
}

fn many(kernel: Kernel, seed: u64) {
    let mut random = Random::new(seed);
    let mut seen = HashSet::new();
    let mut done = 0;
    while done < shapes() {
        done += usize::from(one(kernel, &mut random, &mut seen));
    }
    // 36 pairs of layouts x all or one layer x 4 kinds of planes; the summing copy has all layers only.
    let all = if kernel == Kernel::CopySum { 144 } else { 288 };
    assert!(seen.len() * 10 >= all * 9 || shapes() < 2000, "{} of {all} combinations seen", seen.len());
}

#[test]
fn wide() {
    many(Kernel::Copy16Wide, 1);
}

#[test]
fn narrow() {
    many(Kernel::Copy16Narrow, 2);
}

#[test]
fn units_of_8() {
    many(Kernel::Copy8, 3);
}

#[test]
fn units_of_4() {
    many(Kernel::Copy4, 4);
}

#[test]
fn bytes() {
    many(Kernel::Copy1, 5);
}

#[test]
fn summing() {
    many(Kernel::CopySum, 6);
}

#[test]
fn ring() {
    many(Kernel::Bulk, 7);
}

#[test]
fn the_chosen_kernel_takes_the_shape_it_was_chosen_for() {
    let mut random = Random::new(8);
    for _ in 0..shapes() / 4 {
        let unit = random.pick(&[1, 2, 4, 8, 16]);
        let (plane, _) = plane(&mut random, unit);
        let mut src = World::new(&plane, random.pick(&LAYOUTS), 3, random.below(64) as usize, &mut random);
        let mut dst = World::new(&plane, random.pick(&LAYOUTS), 3, random.below(64) as usize, &mut random);
        let copy = PlaneCopy::new(&plane, 0..plane.layers(), &src.address(), &dst.address());
        let pages = ([0, 2], [1, 0]);
        let want = reference(&src, &dst, (&pages.0, &pages.1), 0..plane.layers());
        run(copy.register_kernel(), &copy, (&pages.0, &pages.1), 0, &mut random, RING);
        assert!(dst.memory.whole() == want, "{copy:?}");
        let _ = (src.memory.addr(), dst.memory.addr());
    }
}

#[test]
fn a_merged_copy_is_one_run_per_page() {
    let mut random = Random::new(9);
    let (plane, _) = plane(&mut random, 16);
    let a = World::new(&plane, crate::world::Layout::PageFirst, 4, 0, &mut random);
    let b = World::new(&plane, crate::world::Layout::PageFirst, 4, 0, &mut random);
    let copy = PlaneCopy::new(&plane, 0..plane.layers(), &a.address(), &b.address());
    assert_eq!((copy.head.layers, copy.head.parts, copy.head.run_bytes), (1, 1, plane.page_bytes()));
    assert!(copy.pages_merge);
}

#[test]
fn descriptors() {
    let mut random = Random::new(10);
    for _ in 0..shapes() {
        let n = 1 + random.below(12) as usize;
        let unit = random.pick(&[1u64, 16]);
        let sizes: Vec<u64> = (0..n).map(|_| unit * (1 + random.below(9000 / unit))).collect();
        let total: u64 = sizes.iter().sum();
        let mut src = Memory::new(total as usize, 0, &mut random);
        let mut dst = Memory::new(total as usize + 64, 0, &mut random);
        let mut want = dst.whole();
        let start = dst.start();
        let zero = Desc::default();
        let mut job = DescJob {
            descs: n as u32,
            segments: 0,
            segment_bytes: 4096,
            reserved: 0,
            list: [zero; DESCS_SMALL],
        };
        // Sources in order, destinations in reverse order.
        let (mut from, mut to) = (0, total);
        for (desc, &bytes) in job.list.iter_mut().zip(&sizes) {
            to -= bytes;
            let (s, d) = (src.addr() + from, dst.addr() + to);
            *desc = Desc { src: s, dst: d, bytes: bytes as u32, first_segment: job.segments };
            job.segments += bytes.div_ceil(4096) as u32;
            want[start + to as usize..][..bytes as usize]
                .copy_from_slice(&src.at(from as usize)[..bytes as usize]);
            from += bytes;
        }
        let mode = CpuMode { threads: random.below(4) == 0, ..CpuMode::default() };
        // SAFETY: the descriptors stay inside the two memories, which are alive and not borrowed.
        assert!(unsafe { launch_descs(&job, 1 + random.below(3) as u32, 128, mode) });
        assert!(dst.whole() == want, "{sizes:?}");
        let _ = src.at_mut(0);
    }
}
