//! Memory on both sides, the timed paths over it, and the table.

use std::ffi::c_void;
use std::fmt::Debug;
use std::time::Instant;

use sapwood::backend::device::Direction;
use sapwood::backend::device::cuda::CudaDriver;
use sapwood::backend::device::driver::{Driver, DriverError, StreamId};
use sapwood::backend::device::kernels::{
    Kernel, PAIRS_LARGE, PageJob, PageJobLarge, PlaneAddress, PlaneCopy, RING_STAGE_BYTES, Ring, Side,
};
use sapwood::backend::region::Region;
use sapwood::pool::{Geometry, Plane, PlaneKind};

pub(crate) struct Rig {
    driver: CudaDriver,
    host: Region,
    mapped: u64,
    device: [u64; 2],
    sums: u64,
    pub(crate) bytes: usize,
    link_us: [Option<f64>; 3],
}

/// A permutation of `0..n` that no prefetcher follows.
fn scattered(n: usize) -> Vec<u32> {
    let mut all: Vec<u32> = (0..n as u32).collect();
    let mut x = 0x9E37_79B9_u64;
    for i in (1..n).rev() {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        all.swap(i, (x % (i as u64 + 1)) as usize);
    }
    all
}

/// Small copies timed per neighbour: 2,000, or what `SAPWOOD_GPU_ROUNDS` says.
fn rounds() -> usize {
    std::env::var("SAPWOOD_GPU_ROUNDS").ok().and_then(|s| s.parse().ok()).unwrap_or(2000)
}

fn plane(run: usize) -> Plane {
    let geometry = Geometry::builder(1).plane(Plane::new(PlaneKind::Other(0), 1, 1, run as u32)).build();
    geometry.unwrap().planes()[0].clone()
}

fn at(base: u64, page_step: usize) -> PlaneAddress<'static> {
    PlaneAddress { side: Side { base, page_step: page_step as u64, ..Side::default() }, bases: None }
}

impl Rig {
    pub(crate) fn new(mut driver: CudaDriver, bytes: usize) -> Rig {
        let host = Region::anonymous(bytes).unwrap();
        // SAFETY: the region is ours and `bytes` long.
        unsafe { std::ptr::write_bytes(host.base().as_ptr(), 0x5A, bytes) };
        let mapped = driver.register_host(host.base(), bytes).unwrap();
        let device = [driver.alloc(bytes).unwrap(), driver.alloc(bytes).unwrap()];
        let sums = driver.alloc(PAIRS_LARGE * 8).unwrap();
        Rig { driver, host, mapped, device, sums, bytes, link_us: [None; 3] }
    }

    pub(crate) fn processors(&self) -> u32 {
        self.driver.info().processors
    }

    pub(crate) fn ring(&self) -> Option<Ring> {
        self.driver.capabilities().ring
    }

    pub(crate) fn set_link(&mut self, direction: Direction, us: f64) {
        self.link_us[direction.index()] = Some(us);
    }

    pub(crate) fn link(&self, direction: Direction) -> Option<f64> {
        self.link_us[direction.index()]
    }

    /// Source and destination as kernels see them.
    fn ends(&self, direction: Direction) -> (u64, u64) {
        match direction {
            Direction::DeviceToHost => (self.device[0], self.mapped),
            Direction::HostToDevice => (self.mapped, self.device[0]),
            Direction::DeviceToDevice => (self.device[0], self.device[1]),
        }
    }

    /// Source and destination as the copy engine is told.
    fn engine_ends(&self, direction: Direction) -> (u64, u64) {
        let host = self.host.base().as_ptr() as u64;
        match direction {
            Direction::DeviceToHost => (self.device[0], host),
            Direction::HostToDevice => (host, self.device[0]),
            Direction::DeviceToDevice => (self.device[0], self.device[1]),
        }
    }

    /// One copy of everything by the copy engine.
    pub(crate) fn large(&mut self, direction: Direction) -> f64 {
        let (from, to) = self.engine_ends(direction);
        let bytes = self.bytes;
        let work = |d: &mut CudaDriver| copy(d, direction, &mut [from], &mut [to], &mut [bytes]);
        self.driver.best_us(direction, work).unwrap()
    }

    /// Both directions at once, by the wall clock of the host.
    pub(crate) fn both_ways(&mut self) -> f64 {
        let directions = [Direction::DeviceToHost, Direction::HostToDevice];
        let done = directions.map(|_| self.driver.create_event().unwrap());
        let mut best = f64::INFINITY;
        // Two halves of the host area, so that the two do not touch the same bytes.
        let half = self.bytes / 2;
        for _ in 0..5 {
            let start = Instant::now();
            for round in 0..2 {
                for (direction, done) in directions.into_iter().zip(done) {
                    let (mut from, mut to) = self.engine_ends(direction);
                    let shift = if direction == Direction::DeviceToHost { 0 } else { half as u64 };
                    (from, to) = (from + shift, to + shift);
                    copy(&mut self.driver, direction, &mut [from], &mut [to], &mut [half]).unwrap();
                    if round == 1 {
                        self.driver.record(done, StreamId::Copy(direction)).unwrap();
                    }
                }
            }
            while !done.iter().all(|&e| self.driver.is_done(e).unwrap()) {}
            best = best.min(start.elapsed().as_secs_f64() * 1e6);
        }
        best
    }

    /// The launch records that copy everything as scattered pages of one run each.
    fn records(&self, direction: Direction, kernel: Kernel, run: usize) -> Vec<Box<PageJobLarge>> {
        let (from, to) = self.ends(direction);
        let plane_copy = PlaneCopy::new(&plane(run), 0..1, &at(from, run), &at(to, run));
        let segment = if kernel == Kernel::Bulk {
            self.ring().map_or(RING_STAGE_BYTES, |r| r.stage_bytes)
        } else {
            kernel.segment_bytes()
        };
        let n = self.bytes / run;
        let (src, dst) = (scattered(n), scattered(n).into_iter().rev().collect::<Vec<_>>());
        let mut jobs = Vec::new();
        for (s, d) in src.chunks(PAIRS_LARGE).zip(dst.chunks(PAIRS_LARGE)) {
            let to_host = direction == Direction::DeviceToHost;
            let mut head = plane_copy.launch(kernel, s.len() as u32, to_host, segment);
            head.sums = if kernel == Kernel::CopySum { self.sums } else { 0 };
            let mut job = Box::new(PageJob::<PAIRS_LARGE> { head, ..Default::default() });
            job.src[..s.len()].copy_from_slice(s);
            job.dst[..d.len()].copy_from_slice(d);
            jobs.push(job);
        }
        jobs
    }

    /// Everything as scattered pages by a kernel.
    pub(crate) fn pages(&mut self, direction: Direction, kernel: Kernel, run: usize, grid: u32) -> f64 {
        let kernel = match kernel {
            Kernel::Copy16Wide if run < 4096 => Kernel::Copy16Narrow,
            kernel => kernel,
        };
        let mut jobs = self.records(direction, kernel, run);
        let ring = if kernel == Kernel::Bulk { self.ring() } else { None };
        let work = |d: &mut CudaDriver| launch_all(d, direction, kernel, &mut jobs, ring, grid);
        self.driver.best_us(direction, work).unwrap()
    }

    fn lists(&self, direction: Direction, run: usize) -> (Vec<u64>, Vec<u64>, Vec<usize>) {
        let (from, to) = self.engine_ends(direction);
        let n = self.bytes / run;
        let address = |base: u64, pages: Vec<u32>| {
            pages.into_iter().map(|p| base + u64::from(p) * run as u64).collect::<Vec<_>>()
        };
        let reversed = scattered(n).into_iter().rev().collect();
        (address(from, scattered(n)), address(to, reversed), vec![run; n])
    }

    /// Everything as scattered runs by batches of the copy engine, 64 MiB each.
    pub(crate) fn batch(&mut self, direction: Direction, run: usize) -> f64 {
        let (mut src, mut dst, mut len) = self.lists(direction, run);
        let per = ((64 << 20) / run).max(1);
        let work = |d: &mut CudaDriver| {
            let lists = src.chunks_mut(per).zip(dst.chunks_mut(per)).zip(len.chunks_mut(per));
            lists.into_iter().try_for_each(|((s, t), l)| copy(d, direction, s, t, l))
        };
        self.driver.best_us(direction, work).unwrap()
    }

    /// The same, one call per run.
    pub(crate) fn loop_of_copies(&mut self, direction: Direction, run: usize) -> f64 {
        let (mut src, mut dst, mut len) = self.lists(direction, run);
        let work = |d: &mut CudaDriver| {
            let lists = src.chunks_mut(1).zip(dst.chunks_mut(1)).zip(len.chunks_mut(1));
            lists.into_iter().try_for_each(|((s, t), l)| copy(d, direction, s, t, l))
        };
        self.driver.best_us(direction, work).unwrap()
    }

    /// Pages of `page` bytes in runs of `run`, layer-first on the device, gathered into staging and copied
    /// whole: microseconds of all of it and of the gathering alone.
    pub(crate) fn staged(&mut self, page: usize, run: usize) -> (f64, f64) {
        let (n, layers) = (self.bytes / page, page / run);
        let p = Geometry::builder(1).plane(Plane::new(PlaneKind::Other(0), layers as u32, 1, run as u32));
        let p = p.build().unwrap().planes()[0].clone();
        let layer_first = Side {
            base: self.device[0],
            page_step: run as u64,
            layer_step: (n * run) as u64,
            part_step: run as u64,
            table: 0,
        };
        let whole = |base| Side {
            base,
            page_step: page as u64,
            layer_step: run as u64,
            part_step: run as u64,
            table: 0,
        };
        let chunk = (64usize << 20) / page;
        let kernel = Kernel::Copy16Wide;
        let grid = self.processors();
        let pages = scattered(n);
        let host = self.host.base().as_ptr() as u64;
        let staging = self.device[1];
        let mut jobs: Vec<Box<PageJobLarge>> = Vec::new();
        for list in pages.chunks(chunk) {
            let from = PlaneAddress { side: layer_first, bases: None };
            let to = PlaneAddress { side: whole(staging), bases: None };
            let copy = PlaneCopy::new(&p, 0..layers as u32, &from, &to);
            let head = copy.launch(kernel, list.len() as u32, true, kernel.segment_bytes());
            let mut job = Box::new(PageJob::<PAIRS_LARGE> { head, ..Default::default() });
            for (i, &page) in list.iter().enumerate() {
                (job.src[i], job.dst[i]) = (page, i as u32);
            }
            jobs.push(job);
        }
        let direction = Direction::DeviceToHost;
        let gather =
            self.driver.best_us(direction, |d| launch_all(d, direction, kernel, &mut jobs, None, grid));
        let all = self.driver.best_us(direction, |d| {
            for (job, list) in jobs.iter_mut().zip(pages.chunks(chunk)) {
                launch_all(d, direction, kernel, std::slice::from_mut(job), None, grid)?;
                let mut src: Vec<u64> = (0..list.len()).map(|i| staging + (i * page) as u64).collect();
                let mut dst: Vec<u64> = list.iter().map(|&p| host + u64::from(p) * page as u64).collect();
                copy(d, direction, &mut src, &mut dst, &mut vec![page; list.len()])?;
            }
            Ok(())
        });
        (all.unwrap(), gather.unwrap())
    }

    /// A load of `layers` layers in runs of `run`: in one piece, one launch and event per layer, and the
    /// time of the submitting thread per layer.
    pub(crate) fn by_layer(&mut self, layers: usize, run: usize) -> (f64, f64, f64) {
        let direction = Direction::HostToDevice;
        let (kernel, ring) = match self.ring() {
            Some(ring) => (Kernel::Bulk, Some(ring)),
            None => (Kernel::Copy16Wide, None),
        };
        let mut all = self.records(direction, kernel, run);
        let one_piece =
            self.driver.best_us(direction, |d| launch_all(d, direction, kernel, &mut all, ring, 2));
        let n = self.bytes / run;
        let pages = (n / layers).min(PAIRS_LARGE);
        let mut jobs = Vec::new();
        for layer in 0..layers {
            let mut job = self.records(direction, kernel, run).swap_remove(0);
            job.head.pairs = pages as u32;
            for i in 0..pages {
                (job.src[i], job.dst[i]) = ((i * layers + layer) as u32, (layer * pages + i) as u32);
            }
            jobs.push(job);
        }
        let events: Vec<_> = jobs.iter().map(|_| self.driver.create_event().unwrap()).collect();
        let mut host_us = f64::INFINITY;
        let by_layer = self.driver.best_us(direction, |d| {
            let start = Instant::now();
            for (job, &event) in jobs.iter_mut().zip(&events) {
                launch_all(d, direction, kernel, std::slice::from_mut(job), ring, 2)?;
                d.record(event, StreamId::Copy(direction))?;
            }
            host_us = host_us.min(start.elapsed().as_secs_f64() * 1e6 / layers as f64);
            Ok(())
        });
        let scale = n as f64 / (pages * layers) as f64;
        (one_piece.unwrap(), by_layer.unwrap() * scale, host_us)
    }

    /// bf16 pages to mx8 pages on the host.
    pub(crate) fn quantised(&mut self, run: usize, quota: u32) -> f64 {
        let direction = Direction::DeviceToHost;
        let mut jobs = self.records(direction, Kernel::Copy16Wide, run);
        for job in &mut jobs {
            job.head.dst.page_step = (run / 2 + run / 64) as u64;
            job.head.scales = (run / 2) as u64;
        }
        let work = |d: &mut CudaDriver| launch_all(d, direction, Kernel::QuantMx8, &mut jobs, None, quota);
        self.driver.best_us(direction, work).unwrap()
    }

    /// p50 and p99 in microseconds of small copies inside the device while everything is copied to the host
    /// by `beside`: the copy engine (no kernel), or a kernel with a grid.
    pub(crate) fn neighbour(&mut self, beside: Option<(Option<Kernel>, u32)>) -> (f64, f64) {
        let local = Direction::DeviceToDevice;
        let out = Direction::DeviceToHost;
        let run = 64 << 10;
        let mut work = self.records(local, Kernel::Copy16Wide, run).swap_remove(0);
        work.head.pairs = work.head.pairs.min(256);
        let grid = self.processors();
        let (done, background) = (self.driver.create_event().unwrap(), self.driver.create_event().unwrap());
        let mut jobs = match beside {
            Some((Some(kernel), _)) => self.records(out, kernel, run),
            _ => Vec::new(),
        };
        let (mut src, mut dst, mut len) = self.lists(out, 1 << 20);
        let mut times = Vec::new();
        let mut running = false;
        for _ in 0..rounds() {
            if let Some((kernel, quota)) = beside
                && (!running || self.driver.is_done(background).unwrap())
            {
                match kernel {
                    Some(kernel) => {
                        let ring = if kernel == Kernel::Bulk { self.ring() } else { None };
                        launch_all(&mut self.driver, out, kernel, &mut jobs, ring, quota).unwrap();
                    }
                    None => copy(&mut self.driver, out, &mut src, &mut dst, &mut len).unwrap(),
                }
                self.driver.record(background, StreamId::Copy(out)).unwrap();
                running = true;
            }
            let start = Instant::now();
            launch_all(
                &mut self.driver,
                local,
                Kernel::Copy16Wide,
                std::slice::from_mut(&mut work),
                None,
                grid,
            )
            .unwrap();
            self.driver.record(done, StreamId::Copy(local)).unwrap();
            while !self.driver.is_done(done).unwrap() {}
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
        while running && !self.driver.is_done(background).unwrap() {}
        times.sort_by(f64::total_cmp);
        (times[times.len() / 2], times[times.len() * 99 / 100])
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        // Every path above has waited for its last event.
        let _ = self.driver.unregister_host(self.host.base(), self.bytes);
    }
}

fn copy(
    driver: &mut CudaDriver,
    direction: Direction,
    src: &mut [u64],
    dst: &mut [u64],
    len: &mut [usize],
) -> Result<(), DriverError> {
    // SAFETY: the lists lie in the areas of the rig, which are used for nothing else.
    unsafe { driver.copy(direction, src, dst, len, false) }
}

fn launch_all(
    driver: &mut CudaDriver,
    direction: Direction,
    kernel: Kernel,
    jobs: &mut [Box<PageJobLarge>],
    ring: Option<Ring>,
    grid: u32,
) -> Result<(), DriverError> {
    for job in jobs {
        let record: *mut c_void = (&raw mut **job).cast();
        // SAFETY: long records whose pages lie in the areas of the rig.
        unsafe { driver.launch(direction, kernel, true, record, ring, grid)? };
    }
    Ok(())
}

/// Prints rows and keeps them for the CSV.
pub(crate) struct Table {
    csv: String,
}

impl Table {
    pub(crate) fn new() -> Table {
        println!("{:>2}  {:<42} {:<15} {:>10} {:>8} {:>6}", "", "what", "direction", "us", "GB/s", "ratio");
        Table { csv: "bench,what,direction,bytes,us,gb_per_s,ratio\n".into() }
    }

    /// A row; `against` is the time of the denominator.
    pub(crate) fn row(
        &mut self,
        bench: u32,
        what: &str,
        direction: impl Debug,
        bytes: usize,
        us: f64,
        against: Option<f64>,
    ) {
        let direction = format!("{direction:?}").replace('"', "");
        let rate = bytes as f64 / us / 1e3;
        let ratio = against.map_or(String::new(), |a| format!("{:.3}", a / us));
        println!("{bench:>2}  {what:<42} {direction:<15} {us:>10.0} {rate:>8.1} {ratio:>6}");
        self.csv += &format!("{bench},\"{what}\",{direction},{bytes},{us:.1},{rate:.2},{ratio}\n");
    }

    pub(crate) fn note(&mut self, text: &str) {
        println!("    {text}");
        self.csv += &format!("# {text}\n");
    }

    pub(crate) fn finish(self) {
        let path = std::env::var("SAPWOOD_GPU_CSV").unwrap_or_else(|_| "gpu.csv".into());
        match std::fs::write(&path, self.csv) {
            Ok(()) => println!("\nwritten to {path}"),
            Err(e) => println!("\n{path}: {e}"),
        }
    }
}
