//! Page-wise copies between host memories against one memcpy of the same bytes, and the cost of planning.
//!
//! `cargo bench --bench host_copy`. Copies alternate with the memcpy that they are compared to, over memory
//! larger than the caches; the tables are in docs/performance/device.md.
#![expect(unsafe_code, reason = "compares raw copies")]
#![expect(clippy::unwrap_used, reason = "a benchmark stops where a step fails")]

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sapwood::backend::device::kernels::{PlaneAddress, Side};
use sapwood::backend::device::plan::{CostModel, PlanOptions, PlanePlaces, Planner};
use sapwood::backend::device::{CopyJob, CopyPart, Device, DevicePlane, Direction, StreamDevice};
use sapwood::backend::host::{CopyPool, HostArena, Reuse, Run};
use sapwood::backend::region::{HugePages, Mapping, Region};
use sapwood::base::{Fence, OpId, PageId};
use sapwood::pool::{Capacities, Capacity, Geometry, Plane};

#[path = "../tests/device_contract/null.rs"]
mod null;

use null::Null;

const BYTES: usize = 1 << 30;
const SLICE_MIB: usize = 64;
const SLICE: usize = SLICE_MIB << 20;
const ROUNDS: usize = 3;

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n as u64) as usize
    }
}

fn shuffled(n: usize, random: &mut Random) -> Vec<usize> {
    let mut all: Vec<usize> = (0..n).collect();
    (1..n).for_each(|i| all.swap(i, random.below(i + 1)));
    all
}

/// CPU time of this process: under load of others it says what the copies cost, and a wall clock does not.
fn cpu_time() -> Duration {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a valid out pointer.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut t) };
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

/// Copies one slice of the area after the other, alternating between the peer and the candidates, and keeps
/// the median of each: a slice is short enough that many are undisturbed.
fn copies() {
    let mapping = Mapping { huge_pages: HugePages::Advise, ..Mapping::default() };
    let (a, b) = (Region::map(BYTES, mapping).unwrap(), Region::map(BYTES, mapping).unwrap());
    let (src, dst) = (a.base().as_ptr(), b.base().as_ptr());
    // SAFETY: the regions are BYTES long and used by this thread only. Touches every page.
    unsafe {
        std::ptr::write_bytes(src, 1, BYTES);
        std::ptr::write_bytes(dst, 2, BYTES);
    }
    let pool = CopyPool::new(1).unwrap();
    println!(
        "one thread, {SLICE_MIB} MiB slices of 1 GiB, GB per second of CPU time, median of {}:",
        ROUNDS * BYTES / SLICE
    );
    println!("{:>9} {:>9} {:>9} {:>9} {:>9} {:>9}", "run", "memcpy", "plain", "ratio", "stream", "ratio");
    for run in [4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20] {
        let mut random = Random(7);
        let mut times: [Vec<Duration>; 3] = Default::default();
        for round in 0..ROUNDS * BYTES / SLICE {
            let at = round % (BYTES / SLICE) * SLICE;
            let n = SLICE / run;
            let (from, to) = (shuffled(n, &mut random), shuffled(n, &mut random));
            let of = |(f, t): (&usize, &usize)| {
                // SAFETY: inside the regions.
                unsafe { Run { src: src.add(at + f * run), dst: dst.add(at + t * run), len: run } }
            };
            let runs: Vec<Run> = from.iter().zip(&to).map(of).collect();
            let start = cpu_time();
            // SAFETY: a slice of either region.
            unsafe { std::ptr::copy_nonoverlapping(src.add(at), dst.add(at), SLICE) };
            times[0].push(cpu_time() - start);
            for (i, reuse) in [Reuse::Soon, Reuse::Later].into_iter().enumerate() {
                let start = cpu_time();
                // SAFETY: as above; runs do not overlap.
                unsafe { pool.copy(&runs, reuse) };
                times[i + 1].push(cpu_time() - start);
            }
        }
        let [memcpy, plain, stream] = times.map(|mut t| {
            t.sort();
            SLICE as f64 / t[t.len() / 2].as_secs_f64() / 1e9
        });
        let (p, s) = (plain / memcpy, stream / memcpy);
        println!("{:>8}K {memcpy:>9.2} {plain:>9.2} {p:>9.2} {stream:>9.2} {s:>9.2}", run >> 10);
    }
}

fn planning() {
    let g = Arc::new(Geometry::builder(64).plane(Plane::target(32, 1024)).build().unwrap());
    let p = &g.planes()[0];
    let n = 1u32 << 16;
    let pages = u64::from(n);
    let side =
        |page_step, layer_step, part_step| Side { base: 1 << 45, page_step, layer_step, part_step, table: 0 };
    let layer_first = side(p.part_bytes(), pages * p.layer_bytes(), pages * p.part_bytes());
    let page_first = side(p.page_bytes(), p.layer_bytes(), p.part_bytes());
    let arena = HostArena::new(Arc::clone(&g), Capacities::full(Capacity::Pages(n))).unwrap();
    let arena = Arc::new(arena);
    let mut random = Random(9);
    let pick = |random: &mut Random| -> Vec<PageId> {
        shuffled(n as usize, random).into_iter().take(4096).map(|i| PageId(i as u32)).collect()
    };
    let scattered = (pick(&mut random), pick(&mut random));
    let in_order: Vec<PageId> = (0..4096).map(PageId).collect();
    let base = PlanOptions { slice_bytes: 1 << 40, ..PlanOptions::default() };
    let slow_engine = CostModel { link_bytes_per_us: 1, ..CostModel::PCIE5 };
    let kernels = PlanOptions { to_host: slow_engine, ..base };
    let sliced = PlanOptions::default();
    let rows = [
        ("scattered pages by kernels", layer_first, &scattered.0, &scattered.1, kernels),
        ("scattered pages by the engine", page_first, &scattered.0, &scattered.1, base),
        ("the same in slices of 64 MiB", page_first, &scattered.0, &scattered.1, sliced),
        ("pages in order, merged", page_first, &in_order, &in_order, base),
    ];
    println!("4,096 pages, one plane, a driver that does nothing; microseconds, best of 3,000:");
    println!("{:>8} {:>8} {:>8} {:>6} {:>6}", "plan", "submit", "poll", "steps", "descr.");
    for (name, device, src, dst, options) in rows {
        let host = side(p.page_bytes(), p.layer_bytes(), p.part_bytes());
        let at = |side| PlaneAddress { side, bases: None };
        let places = [PlanePlaces { device: at(device), host: at(host), host_mapped: at(host) }];
        let parts = [CopyPart::full(src, dst)];
        let job = CopyJob { op: OpId(1), direction: Direction::DeviceToHost, parts: &parts, by_layer: false };
        let mut planner = Planner::new(options);
        let plane = DevicePlane { side: device, bases: None };
        // SAFETY: the driver touches no memory.
        let made =
            unsafe { StreamDevice::new(Null::default(), Arc::clone(&g), [n, 0, 0], vec![plane], options) };
        let mut stream = made.unwrap();
        stream.attach_host(Arc::clone(&arena)).unwrap();
        let mut ended = Vec::with_capacity(4);
        let mut best = [Duration::MAX; 3];
        for _ in 0..3000 {
            let start = Instant::now();
            black_box(planner.plan(black_box(&job), &g, &places));
            best[0] = best[0].min(start.elapsed());
            let start = Instant::now();
            let transfer = stream.submit(black_box(&job), Fence::SETTLED).unwrap();
            best[1] = best[1].min(start.elapsed());
            let start = Instant::now();
            ended.clear();
            stream.poll(&mut ended).unwrap();
            best[2] = best[2].min(start.elapsed());
            drop(black_box(transfer));
        }
        let [plan, submit, poll] = best.map(|t| t.as_secs_f64() * 1e6);
        let made = planner.plan_mut();
        let (steps, descriptors) = (made.steps.len(), made.len.len());
        println!("{plan:>8.2} {submit:>8.2} {poll:>8.2} {steps:>6} {descriptors:>6}  {name}");
    }
    println!();
}

fn main() {
    // `cargo test --benches` passes --test: only see that it starts.
    if std::env::args().any(|a| a == "--test") {
        return;
    }
    planning();
    if !std::env::args().any(|a| a == "planning") {
        copies();
    }
}
