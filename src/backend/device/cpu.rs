//! The copy kernels on the CPU: the same source, compiled as C++, for tests and sanitizers.
#![expect(
    unsafe_code,
    reason = "calls the kernels; the caller vouches for the addresses in the launch record"
)]

use std::ffi::c_void;

use super::kernels::{DESCS_LARGE, DESCS_SMALL, DescJob, Kernel, PAIRS_LARGE, PAIRS_SMALL, PageJob, Ring};

/// How blocks run and how asynchronous copies behave.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CpuMode {
    /// Every block on a thread of its own.
    pub threads: bool,
    /// Bulk loads happen at the wait, not at the issue.
    pub late_loads: bool,
    /// Bulk stores happen at the last wait that allows it, not at the commit.
    pub late_stores: bool,
}

unsafe extern "C" {
    fn kvx_cpu_launch(
        kernel: u32,
        large: u32,
        job: *const c_void,
        grid: u32,
        block: u32,
        stages: u32,
        stage_bytes: u32,
        mode: u32,
    );
}

/// Runs a page kernel over `grid` blocks of `block` threads. `false` if the record has neither of the two
/// list lengths or the kernel is the descriptor kernel.
///
/// # Safety
/// Every address that the record leads to is valid for the access, and nobody else touches the bytes.
#[must_use]
pub unsafe fn launch_pages<const N: usize>(
    kernel: Kernel,
    job: &PageJob<N>,
    grid: u32,
    block: u32,
    ring: Ring,
    mode: CpuMode,
) -> bool {
    if (N != PAIRS_SMALL && N != PAIRS_LARGE) || kernel == Kernel::CopyDesc {
        return false;
    }
    // SAFETY: the record has the layout of its C++ mirror (sizes asserted on both sides), its length says
    // which; the addresses are the caller's promise.
    unsafe { launch(kernel, N == PAIRS_LARGE, (&raw const *job).cast(), grid, block, ring, mode) };
    true
}

/// Runs the descriptor kernel. As [`launch_pages`].
///
/// # Safety
/// As [`launch_pages`].
#[must_use]
pub unsafe fn launch_descs<const N: usize>(job: &DescJob<N>, grid: u32, block: u32, mode: CpuMode) -> bool {
    if N != DESCS_SMALL && N != DESCS_LARGE {
        return false;
    }
    let ring = Ring { stages: 0, stage_bytes: 0 };
    // SAFETY: as above.
    unsafe {
        launch(Kernel::CopyDesc, N == DESCS_LARGE, (&raw const *job).cast(), grid, block, ring, mode);
    }
    true
}

/// # Safety
/// `job` points to the record that the kernel and `large` ask for, with valid addresses in it.
unsafe fn launch(
    kernel: Kernel,
    large: bool,
    job: *const c_void,
    grid: u32,
    block: u32,
    ring: Ring,
    mode: CpuMode,
) {
    let bits = u32::from(mode.threads) | u32::from(mode.late_loads) << 1 | u32::from(mode.late_stores) << 2;
    // SAFETY: the caller's promise.
    unsafe {
        kvx_cpu_launch(
            kernel as u32,
            u32::from(large),
            job,
            grid,
            block,
            ring.stages,
            ring.stage_bytes,
            bits,
        );
    }
}
