//! Planted faults for the sanitizers, one per kind of mistake a planner could make.
//!
//! They are ignored because they are undefined behaviour on purpose: `.ci/parts/kernels` runs each under the
//! sanitizer that must stop it, and fails if it does not.

use sapwood::backend::device::cpu::{CpuMode, launch_pages};
use sapwood::backend::device::kernels::{Kernel, PAIRS_SMALL, PageJob, PlaneCopy};

use crate::world::{Layout, RING, Random, World};

fn launch(threads: bool, edit: impl FnOnce(&mut PageJob<PAIRS_SMALL>)) {
    let mut random = Random(1);
    let g = sapwood::pool::Geometry::builder(16).plane(sapwood::pool::Plane::target(2, 256)).build().unwrap();
    let mut src = World::new(&g.planes()[0], Layout::PageFirst, 4, 0, &mut random);
    let mut dst = World::new(&g.planes()[0], Layout::PageFirst, 4, 0, &mut random);
    let copy = PlaneCopy::new(&g.planes()[0], 0..2, &src.address(), &dst.address());
    let kernel = Kernel::Copy16Wide;
    let head = copy.launch(kernel, 4, false, kernel.segment_bytes());
    let mut job = PageJob::<PAIRS_SMALL> { head, ..Default::default() };
    job.src[..4].copy_from_slice(&[3, 2, 1, 0]);
    job.dst[..4].copy_from_slice(&[0, 1, 2, 3]);
    edit(&mut job);
    // SAFETY: none; that is the point. The process is expected to be stopped.
    assert!(unsafe { launch_pages(kernel, &job, 4, 64, RING, CpuMode { threads, ..CpuMode::default() }) });
    let _ = (src.memory.addr(), dst.memory.addr());
}

#[test]
#[ignore = "run by .ci/parts/kernels under the address sanitizer, which must stop it"]
fn page_past_the_pool() {
    launch(false, |job| job.dst[2] = 4);
}

#[test]
#[ignore = "run by .ci/parts/kernels under the address sanitizer, which must stop it"]
fn run_longer_than_the_page() {
    launch(false, |job| {
        job.head.run_bytes += 4096;
        job.head.segments += 1;
    });
}

#[test]
#[ignore = "run by .ci/parts/kernels under the undefined-behaviour sanitizer, which must stop it"]
fn misaligned_base() {
    launch(false, |job| job.head.src.base += 8);
}

#[test]
#[ignore = "run by .ci/parts/kernels under the thread sanitizer, which must report it"]
fn two_blocks_on_one_page() {
    launch(true, |job| job.dst[1] = 0);
}

#[test]
fn the_same_launch_without_a_fault_is_clean() {
    launch(false, |_| {});
    launch(true, |_| {});
}
