//! Copies between host memories at the speed of the memory: a private pool of threads, and stores that
//! bypass the cache where the destination will not be read soon.
//!
//! A plain copy reads the destination's lines before it overwrites them and pushes useful lines out of the
//! cache. Non-temporal stores do neither, which is worth a third or more on copies larger than the cache; for
//! small runs, and for bytes that are read next, plain copies win.
#![expect(unsafe_code, reason = "copies raw runs; vector stores behind run-time detection")]

use std::sync::Arc;
use std::sync::OnceLock;

use super::arena::{HostArena, MemoryError};
use super::claim::Access;
use super::copy::copy_layers;
use crate::base::PageId;
use crate::pool::{PlaneSet, PoolKind};

/// Shortest run for non-temporal stores; below, their set-up and fence cost more than they save.
const STREAM_BYTES_MIN: usize = 4 << 10;
/// Least work for a thread: a few times the cost of waking it.
const TASK_BYTES: usize = 256 << 10;

/// What happens to the destination after the copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reuse {
    /// It is read soon, by this machine's processors.
    Soon,
    /// It is not: a store, a network card or a device takes it, or nobody.
    Later,
}

/// One run to copy.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// First byte read.
    pub src: *const u8,
    /// First byte written.
    pub dst: *mut u8,
    /// Bytes.
    pub len: usize,
}

// SAFETY: a run is three numbers; who copies it vouches for the memory.
unsafe impl Send for Run {}
// SAFETY: as above.
unsafe impl Sync for Run {}

/// Why a pool of threads could not be made.
#[derive(Debug, thiserror::Error)]
#[error("cannot start copy threads: {source}")]
pub struct CopyPoolError {
    /// What rayon said.
    #[from]
    source: rayon::ThreadPoolBuildError,
}

/// Threads that copy. Private, so that copies neither wait for nor hold up anybody's other work.
pub struct CopyPool {
    pool: Option<rayon::ThreadPool>,
    threads: usize,
}

impl CopyPool {
    /// A pool of `threads` threads; 0 takes half of the processors, at least 1 and at most 8, which is
    /// where memory is saturated. One thread is the caller itself.
    pub fn new(threads: usize) -> Result<CopyPool, CopyPoolError> {
        let threads = if threads == 0 { default_threads() } else { threads };
        let build = || {
            rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("sapwood-copy-{i}"))
        };
        let pool = if threads > 1 { Some(build().build()?) } else { None };
        Ok(CopyPool { pool, threads })
    }

    /// Threads.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Copies the runs, in any order. Returns when all are done and visible to whoever is told next.
    ///
    /// # Safety
    /// Sources are readable and destinations writable for the whole call, no destination overlaps another
    /// run, and nobody else writes the ones or touches the others meanwhile.
    pub unsafe fn copy(&self, runs: &[Run], reuse: Reuse) {
        let total: usize = runs.iter().map(|r| r.len).sum();
        let tasks = (total / TASK_BYTES).min(self.threads * 4);
        match &self.pool {
            Some(pool) if tasks > 1 => {
                let share = total.div_ceil(tasks).next_multiple_of(64);
                pool.scope(|scope| {
                    let mut cursor = Cursor { runs, offset: 0 };
                    while let Some(task) = cursor.split(share) {
                        // SAFETY: the caller's promise; tasks are disjoint.
                        scope.spawn(move |_| unsafe { task.copy(share, reuse) });
                    }
                });
            }
            // SAFETY: the caller's promise.
            _ => unsafe { Cursor { runs, offset: 0 }.copy(total, reuse) },
        }
    }

    /// Copies whole pages from one arena to another, `src[i]` to `dst[i]`, under claims.
    pub fn copy_pages(
        &self,
        (from, src): (&Arc<HostArena>, &[PageId]),
        (to, dst): (&Arc<HostArena>, &[PageId]),
        (pool, planes): (PoolKind, PlaneSet),
        reuse: Reuse,
    ) -> Result<(), MemoryError> {
        if from.geometry() != to.geometry() {
            return Err(MemoryError::OtherGeometry);
        }
        if src.len() != dst.len() {
            return Err(MemoryError::Range { offset: 0, len: src.len() as u64, limit: dst.len() as u64 });
        }
        let _src = from.claim(pool, src, Access::Shared)?;
        let _dst = to.claim(pool, dst, Access::Exclusive)?;
        let mut runs = Vec::new();
        for (id, plane) in from.geometry().planes_of(pool, planes) {
            for (&s, &d) in src.iter().zip(dst) {
                let (Ok(a), Ok(b)) = (from.range(id, s), to.range(id, d)) else {
                    // Another order on one side: short runs, copied here.
                    // SAFETY: the claims are held to the end of the function.
                    unsafe { copy_layers((from, s), (to, d), id, 0..plane.layers())? };
                    continue;
                };
                let (src, dst) = (a.region.base().as_ptr(), b.region.base().as_ptr());
                // SAFETY: ranges lie inside their regions.
                runs.push(unsafe { Run { src: src.add(a.offset), dst: dst.add(b.offset), len: a.len } });
            }
        }
        // SAFETY: the claims are held, destinations are different pages.
        unsafe { self.copy(&runs, reuse) };
        Ok(())
    }
}

/// A position in a list of runs.
#[derive(Clone, Copy)]
struct Cursor<'a> {
    runs: &'a [Run],
    offset: usize,
}

impl Cursor<'_> {
    /// Moves on by `bytes` and returns where it was; `None` at the end.
    fn split(&mut self, mut bytes: usize) -> Option<Self> {
        if self.runs.is_empty() {
            return None;
        }
        let here = *self;
        while let Some(run) = self.runs.first() {
            let left = run.len - self.offset;
            if bytes < left {
                self.offset += bytes;
                break;
            }
            bytes -= left;
            (self.runs, self.offset) = (&self.runs[1..], 0);
        }
        Some(here)
    }

    /// Copies the next `bytes`, or what is left.
    ///
    /// # Safety
    /// As for [`CopyPool::copy`].
    unsafe fn copy(mut self, mut bytes: usize, reuse: Reuse) {
        let mut streamed = false;
        while let Some(run) = self.runs.first() {
            let n = (run.len - self.offset).min(bytes);
            // SAFETY: inside the run; the caller's promise.
            streamed |= unsafe { copy_run(run.src.add(self.offset), run.dst.add(self.offset), n, reuse) };
            bytes -= n;
            if bytes == 0 {
                break;
            }
            (self.runs, self.offset) = (&self.runs[1..], 0);
        }
        if streamed {
            fence();
        }
    }
}

/// Copies one run; whether it used stores that need a fence.
///
/// # Safety
/// As for [`CopyPool::copy`].
unsafe fn copy_run(src: *const u8, dst: *mut u8, len: usize, reuse: Reuse) -> bool {
    if reuse == Reuse::Later && len >= STREAM_BYTES_MIN && non_temporal() {
        // SAFETY: the instructions were detected.
        unsafe { stream_copy(src, dst, len) };
        return true;
    }
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, len) };
    false
}

/// Whether non-temporal stores are used on this machine.
fn non_temporal() -> bool {
    static DETECTED: OnceLock<bool> = OnceLock::new();
    *DETECTED.get_or_init(detect)
}

#[cfg(target_arch = "x86_64")]
fn detect() -> bool {
    std::arch::is_x86_feature_detected!("avx2")
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> bool {
    false
}

/// Copies with 32-byte non-temporal stores, 128 bytes at a time. AVX-512 was measured and gains nothing.
///
/// # Safety
/// As for [`CopyPool::copy`], and the processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn stream_copy(src: *const u8, dst: *mut u8, len: usize) {
    use std::arch::x86_64::{__m256i, _mm256_loadu_si256, _mm256_stream_si256};
    let head = dst.align_offset(32).min(len);
    // SAFETY: every access lies in 0..len of the runs; streamed addresses are 32-byte aligned by the head.
    unsafe {
        std::ptr::copy_nonoverlapping(src, dst, head);
        let mut at = head;
        while at + 128 <= len {
            let (s, d) = (src.add(at).cast::<__m256i>(), dst.add(at).cast::<__m256i>());
            let a = _mm256_loadu_si256(s);
            let b = _mm256_loadu_si256(s.add(1));
            let c = _mm256_loadu_si256(s.add(2));
            let e = _mm256_loadu_si256(s.add(3));
            _mm256_stream_si256(d, a);
            _mm256_stream_si256(d.add(1), b);
            _mm256_stream_si256(d.add(2), c);
            _mm256_stream_si256(d.add(3), e);
            at += 128;
        }
        std::ptr::copy_nonoverlapping(src.add(at), dst.add(at), len - at);
    }
}

/// # Safety
/// Never called: detection says no.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn stream_copy(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, len) };
}

/// Orders non-temporal stores before what follows.
fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: part of every x86-64 processor.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

fn default_threads() -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    (processors / 2).clamp(1, 8)
}

/// Whether non-temporal stores are used, and how many threads a pool has by default.
#[must_use]
pub fn copy_means() -> (bool, usize) {
    (non_temporal(), default_threads())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::host::Order;
    use crate::pool::{Capacities, Capacity, Geometry, Plane, PlaneId};

    /// Lengths and offsets around every border of the vector loop, both kinds of stores.
    #[test]
    fn runs_of_all_lengths_and_alignments() {
        let pool = CopyPool::new(1).unwrap();
        let src: Vec<u8> = (0..20_000u32).map(|i| ((i * 31) >> 3) as u8).collect();
        for reuse in [Reuse::Soon, Reuse::Later] {
            for len in [0, 1, 31, 4095, 4096, 4097, 4127, 4128, 4129, 4224, 9999] {
                for (from, to) in [(0, 0), (1, 0), (0, 1), (3, 31), (17, 32)] {
                    let mut dst = vec![0xEEu8; 12_000];
                    let run = Run { src: src[from..].as_ptr(), dst: dst[to..].as_mut_ptr(), len };
                    // SAFETY: both vectors are longer than what is copied.
                    unsafe { pool.copy(&[run], reuse) };
                    assert_eq!(dst[to..to + len], src[from..from + len]);
                    assert!(dst[..to].iter().chain(&dst[to + len..]).all(|&b| b == 0xEE));
                }
            }
        }
    }

    #[test]
    fn tasks_share_runs_without_gap_or_overlap() {
        let pool = CopyPool::new(3).unwrap();
        let lens = [1usize, 300_000, 5, 0, 700_001, 64, 64, 250_000, 4096];
        let total: usize = lens.iter().sum();
        let src: Vec<u8> = (0..total).map(|i| (i * 7 + i / 251) as u8).collect();
        let mut dst = vec![0u8; total + 1];
        let (mut runs, mut at) = (Vec::new(), 0);
        for len in lens {
            // Destinations in reverse order.
            let to = total - at - len;
            runs.push(Run { src: src[at..].as_ptr(), dst: dst[to..].as_mut_ptr(), len });
            at += len;
        }
        // SAFETY: runs lie in the two vectors and do not overlap.
        unsafe { pool.copy(&runs, Reuse::Later) };
        let mut want = vec![0u8; total + 1];
        at = 0;
        for len in lens {
            want[total - at - len..total - at].copy_from_slice(&src[at..at + len]);
            at += len;
        }
        assert!(dst == want);
    }

    #[test]
    fn pages_between_arenas_of_any_order_under_claims() {
        let g = Arc::new(Geometry::builder(16).plane(Plane::target(3, 512)).build().unwrap());
        let caps = Capacities::full(Capacity::Pages(8));
        let pool = CopyPool::new(2).unwrap();
        for (a, b) in [(Order::PageFirst, Order::PageFirst), (Order::LayerFirst, Order::PageFirst)] {
            let from = Arc::new(HostArena::with_order(Arc::clone(&g), caps, a).unwrap());
            let to = Arc::new(HostArena::with_order(Arc::clone(&g), caps, b).unwrap());
            let bytes: Vec<u8> = (0..g.page_bytes(PoolKind::Full)).map(|i| ((i * 13) >> 2) as u8).collect();
            from.write(PlaneId(0), PageId(3), 0, &bytes).unwrap();
            let all = (PoolKind::Full, PlaneSet::ALL);
            let (src, dst) = ([PageId(3), PageId(0)], [PageId(5), PageId(6)]);
            pool.copy_pages((&from, &src), (&to, &dst), all, Reuse::Later).unwrap();
            let mut got = vec![0; bytes.len()];
            to.read(PlaneId(0), PageId(5), 0, &mut got).unwrap();
            assert!(got == bytes);
            let held = to.claim(PoolKind::Full, &[PageId(6)], Access::Shared).unwrap();
            let busy = pool.copy_pages((&from, &src), (&to, &dst), all, Reuse::Soon);
            assert!(matches!(busy, Err(MemoryError::Busy { page: PageId(6), .. })));
            drop(held);
            assert!(pool.copy_pages((&from, &src[..1]), (&to, &dst), all, Reuse::Soon).is_err());
        }
    }
}
