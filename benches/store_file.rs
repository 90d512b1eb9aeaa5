//! The file store against the disk it lies on, in one run: fio for cold reads and writes, a copy out of a
//! mapping for warm reads, an object per file for the choice of the format, and the time to open.
//!
//! `cargo bench --features uring --bench store_file -- [--dir DIR] [--mib N] [--objects N] [--part P]`
//!
//! Every figure is the best of three rounds; the machine's noise only ever makes things slower. A figure is
//! only comparable to the ones beside it. A row without its peer (fio is not installed) says so.
#![expect(unsafe_code, reason = "the peer of the warm reads is a copy out of a mapping")]
#![expect(clippy::unwrap_used, reason = "a bench that cannot go on shall stop")]

use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sapwood::backend::identity::{DescriptorDigest, NamespaceDigest, Space};
use sapwood::backend::region::Region;
use sapwood::backend::store::file::{FileConfig, FileStore, IoEngine, IoMode};
use sapwood::backend::store::{Call, Item, RegionToken, Span, Store};

const MIB: usize = 1 << 20;
const BATCH: usize = 64;
const DEPTH: usize = 16;
const ROUNDS: usize = 3;

struct Options {
    dir: PathBuf,
    mib: usize,
    objects: usize,
    /// One part only: `cold`, `warm`, `formats` or `opening`.
    part: String,
}

fn options() -> Options {
    let mut o = Options {
        dir: PathBuf::from("target/bench-store"),
        mib: 1024,
        objects: 1_000_000,
        part: String::new(),
    };
    let args: Vec<String> = std::env::args().collect();
    for pair in args.windows(2) {
        match pair[0].as_str() {
            "--dir" => o.dir = PathBuf::from(&pair[1]),
            "--mib" => o.mib = pair[1].parse().unwrap(),
            "--part" => o.part.clone_from(&pair[1]),
            "--objects" => o.objects = pair[1].parse().unwrap(),
            _ => {}
        }
    }
    o
}

fn main() {
    let o = options();
    std::fs::create_dir_all(&o.dir).unwrap();
    println!("{} MiB of objects in {}, batches of {BATCH}, best of {ROUNDS}", o.mib, o.dir.display());
    type Part = (&'static str, fn(&Options));
    let parts: [Part; 4] = [("cold", cold), ("warm", warm), ("formats", formats), ("opening", opening)];
    for (name, run) in parts {
        if o.part.is_empty() || o.part == name {
            run(&o);
        }
    }
}

/// GB/s of the fastest of some rounds.
fn best(bytes: usize, mut round: impl FnMut() -> Duration) -> f64 {
    let fastest = (0..ROUNDS).map(|_| round()).min().unwrap();
    bytes as f64 / fastest.as_secs_f64() / 1e9
}

fn row(what: &str, gb_s: f64, peer: Option<f64>) {
    match peer {
        Some(peer) => println!("{what:<58} {gb_s:>7.2} GB/s   {:>5.2} x of {peer:.2}", gb_s / peer),
        None => println!("{what:<58} {gb_s:>7.2} GB/s"),
    }
}

fn space() -> Space {
    Space::new(DescriptorDigest([1; 32]), NamespaceDigest::DEFAULT)
}

fn page(n: usize) -> [u8; 32] {
    let mut h = [7; 32];
    h[..8].copy_from_slice(&(n as u64).to_le_bytes());
    h
}

fn random_region(bytes: usize) -> Arc<Region> {
    let region = Arc::new(Region::anonymous(bytes).unwrap());
    // SAFETY: nobody else has the region yet.
    let all = unsafe { region.slice_mut(0, bytes) }.unwrap();
    let mut x = 0x9E37_79B9_7F4A_7C15u64;
    for word in all.chunks_exact_mut(8) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        word.copy_from_slice(&x.to_le_bytes());
    }
    region
}

fn fresh(dir: &Path, name: &str) -> PathBuf {
    let path = dir.join(name);
    let _ = std::fs::remove_dir_all(&path);
    path
}

fn config(root: PathBuf, io: IoMode, engine: IoEngine, depth: usize) -> FileConfig {
    let mut c = FileConfig::new(root, 1 << 40);
    (c.io, c.engine, c.depth, c.free_bytes_min) = (io, engine, depth, 0);
    c
}

fn items(token: RegionToken, numbers: &[usize], len: usize) -> Vec<Item> {
    let one = |(i, &n): (usize, &usize)| {
        Item::one(&space(), &page(n), Span { region: token, offset: i * len, len })
    };
    numbers.iter().enumerate().map(one).collect()
}

fn put_all(store: &dyn Store, token: RegionToken, objects: usize, len: usize) -> Duration {
    let numbers: Vec<usize> = (0..objects).collect();
    let batches: Vec<_> = numbers.chunks(BATCH).map(|b| items(token, b, len)).collect();
    let start = Instant::now();
    for b in &batches {
        assert!(store.put(b, &Call::unbounded()).iter().all(|o| o.is_ok()));
    }
    store.sync(&Call::unbounded()).unwrap();
    start.elapsed()
}

/// Reads all objects once, in an order that is not the written one.
fn get_all(store: &dyn Store, token: RegionToken, objects: usize, len: usize) -> Duration {
    let numbers: Vec<usize> = (0..objects).map(|i| i * 7919 % objects).collect();
    let batches: Vec<_> = numbers.chunks(BATCH).map(|b| items(token, b, len)).collect();
    let start = Instant::now();
    for b in &batches {
        assert!(store.get(b, &Call::unbounded()).iter().all(|o| o.is_ok()));
    }
    start.elapsed()
}

/// Forgets the page cache. `false` if this process may not.
fn drop_caches() -> bool {
    let _ = Command::new("sync").status();
    std::fs::write("/proc/sys/vm/drop_caches", "3").is_ok()
}

/// GB/s of one fio run, `None` without fio.
fn fio(dir: &Path, rw: &str, mib: usize, direct: bool) -> Option<f64> {
    let write = rw.contains("write");
    let out = Command::new("fio")
        .args(["--name=peer", "--ioengine=io_uring", "--bs=1m", "--output-format=terse", "--terse-version=3"])
        .arg(format!("--rw={rw}"))
        .arg(format!("--iodepth={DEPTH}"))
        .arg(format!("--size={mib}m"))
        .arg(format!("--direct={}", u8::from(direct)))
        .arg(format!("--end_fsync={}", u8::from(write)))
        .arg(format!("--filename={}", dir.join("fio.dat").display()))
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let fields: Vec<&str> = text.lines().last()?.split(';').collect();
    // Terse version 3: KiB/s of reads is field 7, of writes field 48; run time in ms beside it.
    let kib_s: f64 = fields.get(if write { 47 } else { 6 })?.parse().ok()?;
    (kib_s > 0.0).then_some(kib_s * 1024.0 / 1e9)
}

fn best_fio(dir: &Path, rw: &str, mib: usize, direct: bool) -> Option<f64> {
    let runs = (0..ROUNDS).filter_map(|_| {
        if rw == "write" {
            let _ = std::fs::remove_file(dir.join("fio.dat"));
        }
        if !direct && rw != "write" {
            drop_caches();
        }
        fio(dir, rw, mib, direct)
    });
    runs.reduce(f64::max)
}

/// Writes and cold reads of 1 MiB objects against fio at the same depth.
fn cold(o: &Options) {
    println!("\n1 MiB objects, depth {DEPTH}, on the disk (writes include the sync at the end)");
    let region = random_region(BATCH * MIB);
    for (name, io, direct) in [("direct", IoMode::Direct, true), ("buffered", IoMode::Buffered, false)] {
        let fio_write = best_fio(&o.dir, "write", o.mib, direct);
        let fio_read = best_fio(&o.dir, "randread", o.mib, direct);
        if fio_write.is_none() {
            println!("  (no fio on this machine: rows without a peer)");
        }
        for engine in [IoEngine::Uring, IoEngine::Threads] {
            let root = o.dir.join("cold");
            let write = best(o.mib * MIB, || {
                fresh(&o.dir, "cold");
                let store = FileStore::open(config(root.clone(), io, engine, DEPTH)).unwrap();
                let token = store.register(&region).unwrap();
                put_all(&store, token, o.mib, MIB)
            });
            row(&format!("put, {name}, {engine:?}"), write, fio_write);
            let store = FileStore::open(config(root.clone(), io, engine, DEPTH)).unwrap();
            let token = store.register(&region).unwrap();
            let cold = direct || drop_caches();
            let read = best(o.mib * MIB, || {
                if !direct {
                    drop_caches();
                }
                get_all(&store, token, o.mib, MIB)
            });
            let label = if cold { "" } else { " (page cache not dropped)" };
            row(&format!("get cold, {name}, {engine:?}{label}"), read, fio_read);
        }
    }
    let _ = std::fs::remove_file(o.dir.join("fio.dat"));
    fresh(&o.dir, "cold");
}

/// Warm reads: what is in the page cache, out of the store and out of a mapping of the same segment.
fn warm(o: &Options) {
    let objects = 192;
    println!("\n1 MiB objects in the page cache ({objects} MiB)");
    let region = random_region(BATCH * MIB);
    let root = fresh(&o.dir, "warm");
    let open =
        |engine, depth| FileStore::open(config(root.clone(), IoMode::Buffered, engine, depth)).unwrap();
    let store = open(IoEngine::Threads, 1);
    let token = store.register(&region).unwrap();
    put_all(&store, token, objects, MIB);
    drop(store);
    let segment = root.join("seg-00000001.log");
    for threads in [1, 2] {
        let store = open(IoEngine::Threads, threads);
        let token = store.register(&region).unwrap();
        // Taken in turns, so that the noise of the machine falls on all of them.
        let mut best = [Cost::MAX; 3];
        for _ in 0..6 * ROUNDS {
            let costs = [
                mapped_copy(&segment, &region, objects, threads),
                pread_copy(&segment, &region, objects, threads),
                Cost::of(|| get_all(&store, token, objects, MIB)),
            ];
            best.iter_mut().zip(costs).for_each(|(best, cost)| *best = best.min(cost));
        }
        for (what, cost) in
            ["copy out of a mapping, unchecked", "pread, unchecked", "get, checked"].iter().zip(best)
        {
            cost.row(&format!("{what}, {threads} thread(s)"), objects * MIB, best[0]);
        }
    }
    fresh(&o.dir, "warm");
}

/// Time by the clock, and time on the cores of all threads of this process. The second does not count what others on
/// the machine take away, except from the memory bus.
#[derive(Clone, Copy)]
struct Cost {
    wall: Duration,
    cores: Duration,
}

impl Cost {
    const MAX: Cost = Cost { wall: Duration::MAX, cores: Duration::MAX };

    fn of(run: impl FnOnce() -> Duration) -> Cost {
        let before = process_cpu();
        let wall = run();
        Cost { wall, cores: process_cpu() - before }
    }

    fn min(self, other: Cost) -> Cost {
        Cost { wall: self.wall.min(other.wall), cores: self.cores.min(other.cores) }
    }

    fn row(self, what: &str, bytes: usize, peer: Cost) {
        let rate = |t: Duration| bytes as f64 / t.as_secs_f64() / 1e9;
        let ratio = |a: Duration, b: Duration| a.as_secs_f64() / b.as_secs_f64();
        println!(
            "{what:<46} {:>6.2} GB/s {:>5.2} x   a core: {:>6.2} GB/s {:>5.2} x",
            rate(self.wall),
            ratio(peer.wall, self.wall),
            rate(self.cores),
            ratio(peer.cores, self.cores)
        );
    }
}

fn process_cpu() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

/// Runs `one` for each object, spread over threads.
fn spread(objects: usize, threads: usize, one: impl Fn(usize) + Sync) -> Duration {
    let start = Instant::now();
    std::thread::scope(|s| {
        for t in 0..threads {
            let one = &one;
            s.spawn(move || (t..objects).step_by(threads).for_each(|i| one(i * 7919 % objects)));
        }
    });
    start.elapsed()
}

const RECORD: usize = MIB + 4096;

fn mapped_copy(segment: &Path, region: &Region, objects: usize, threads: usize) -> Cost {
    let file = std::fs::File::open(segment).unwrap();
    let len = file.metadata().unwrap().len() as usize;
    let flags = rustix::mm::MapFlags::SHARED | rustix::mm::MapFlags::POPULATE;
    // SAFETY: a fresh mapping of a file that nobody changes during the bench.
    let base =
        unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, rustix::mm::ProtFlags::READ, flags, &file, 0) };
    let base = base.unwrap() as usize;
    let one = |n: usize| {
        let from = base + 4096 + n * RECORD + 4096;
        assert!(from + MIB <= base + len);
        let to = region.base().as_ptr().wrapping_add(n % BATCH * MIB);
        // SAFETY: in bounds of the mapping and of the region; two threads never have the same `n % BATCH`
        // at a time for long, and torn bytes of a bench buffer are read by nobody.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to, MIB) };
    };
    // The time to map is not part of it.
    let cost = Cost::of(|| spread(objects, threads, one));
    // SAFETY: the mapping made above, used by nobody any more.
    unsafe { rustix::mm::munmap(base as *mut _, len) }.unwrap();
    cost
}

fn pread_copy(segment: &Path, region: &Region, objects: usize, threads: usize) -> Cost {
    let file = std::fs::File::open(segment).unwrap();
    let one = |n: usize| {
        // SAFETY: as for the mapping.
        let to = unsafe { region.slice_mut(n % BATCH * MIB, MIB) }.unwrap();
        file.read_exact_at(to, (4096 + n * RECORD + 4096) as u64).unwrap();
    };
    Cost::of(|| spread(objects, threads, one))
}

/// The log against an object per file: temporary name, rename, two levels of directories, the same checks.
fn formats(o: &Options) {
    println!("\nThe log against an object per file (buffered, one thread, page cache warm, no sync)");
    for len in [4096, 65_536, MIB] {
        let objects = (o.mib * MIB / 4 / len).min(16_384);
        let region = random_region(BATCH * MIB);
        let root = o.dir.join("format");
        let open = || FileStore::open(config(root.clone(), IoMode::Buffered, IoEngine::Threads, 1)).unwrap();
        let (mut put, mut get) = (f64::MIN, f64::MIN);
        let (mut file_put, mut file_get) = (f64::MIN, f64::MIN);
        for _ in 0..ROUNDS {
            fresh(&o.dir, "format");
            let store = open();
            let token = store.register(&region).unwrap();
            let gb = (objects * len) as f64 / 1e9;
            let batches: Vec<_> =
                (0..objects).collect::<Vec<_>>().chunks(BATCH).map(|b| items(token, b, len)).collect();
            let start = Instant::now();
            for b in &batches {
                assert!(store.put(b, &Call::unbounded()).iter().all(|o| o.is_ok()));
            }
            put = put.max(gb / start.elapsed().as_secs_f64());
            get = get.max(gb / get_all(&store, token, objects, len).as_secs_f64());
            drop(store);
            let per_file = PerFile(fresh(&o.dir, "per-file"));
            let start = Instant::now();
            (0..objects).for_each(|n| per_file.put(n, &region, len));
            file_put = file_put.max(gb / start.elapsed().as_secs_f64());
            let start = Instant::now();
            (0..objects).for_each(|i| per_file.get(i * 7919 % objects, &region, len));
            file_get = file_get.max(gb / start.elapsed().as_secs_f64());
        }
        row(&format!("put {objects} x {len}, log"), put, Some(file_put));
        row(&format!("get {objects} x {len}, log"), get, Some(file_get));
    }
    fresh(&o.dir, "format");
    fresh(&o.dir, "per-file");
}

/// The other format, as small as it can be.
struct PerFile(PathBuf);

impl PerFile {
    fn path(&self, n: usize) -> PathBuf {
        let hex: String = space().key(&page(n)).hex();
        self.0.join(&hex[16..18]).join(&hex[18..20]).join(hex)
    }

    fn put(&self, n: usize, region: &Region, len: usize) {
        // SAFETY: one thread.
        let bytes = unsafe { region.slice(n % BATCH * len, len) }.unwrap();
        let path = self.path(n);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let tmp = path.with_extension("tmp");
        let mut file = std::fs::File::create_new(&tmp).unwrap();
        let mut header = [0u8; 128];
        header[..4].copy_from_slice(&crc32c::crc32c(bytes).to_le_bytes());
        let slices = [std::io::IoSlice::new(&header), std::io::IoSlice::new(bytes)];
        assert_eq!(file.write_vectored(&slices).unwrap(), len + 128);
        std::fs::rename(&tmp, &path).unwrap();
    }

    fn get(&self, n: usize, region: &Region, len: usize) {
        // SAFETY: one thread.
        let bytes = unsafe { region.slice_mut(n % BATCH * len, len) }.unwrap();
        let mut header = [0u8; 128];
        let file = std::fs::File::open(self.path(n)).unwrap();
        let mut slices = [std::io::IoSliceMut::new(&mut header), std::io::IoSliceMut::new(bytes)];
        assert_eq!(std::io::Read::read_vectored(&mut &file, &mut slices).unwrap(), len + 128);
        assert_eq!(header[..4], crc32c::crc32c(bytes).to_le_bytes());
    }
}

/// The time to open a store of many objects, which depends on their number and that of the segments, not on
/// their size: the payloads are small, so that the bench is done in a minute.
fn opening(o: &Options) {
    println!("\nOpening {} objects in segments of 1000", o.objects);
    let root = fresh(&o.dir, "opening");
    let mut c = config(root, IoMode::Buffered, IoEngine::Threads, 1);
    (c.align, c.segment_bytes) = (64, 128 + 1000 * 192);
    c.segment_bytes = c.segment_bytes.next_multiple_of(64);
    let region = random_region(MIB);
    let store = FileStore::open(c.clone()).unwrap();
    let token = store.register(&region).unwrap();
    let numbers: Vec<usize> = (0..o.objects).collect();
    for b in numbers.chunks(10_000) {
        let b: Vec<Item> = b
            .iter()
            .map(|&n| Item::one(&space(), &page(n), Span { region: token, offset: 0, len: 64 }))
            .collect();
        assert!(store.put(&b, &Call::unbounded()).iter().all(|o| o.is_ok()));
    }
    store.close(Instant::now() + Duration::from_secs(600)).unwrap();
    drop(store);
    for (what, cold) in [("page cache warm", false), ("page cache dropped", true)] {
        let dropped = cold && drop_caches();
        let before = resident_mib();
        let (start, cpu) = (Instant::now(), cpu_s());
        let store = FileStore::open(c.clone()).unwrap();
        let (time, cpu) = (start.elapsed(), cpu_s() - cpu);
        let recovery = store.recovery();
        assert_eq!(recovery.pages as usize, o.objects);
        println!(
            "{what:<58} {:>7.2} s      of these {cpu:.2} s on a core, {} segments, {:.0} MiB of memory{}",
            time.as_secs_f64(),
            recovery.segments_indexed + recovery.segments_scanned,
            resident_mib() - before,
            if cold && !dropped { " (not permitted: warm)" } else { "" }
        );
    }
    fresh(&o.dir, "opening");
}

/// Seconds that this thread has had a core: what is left of a time on a machine shared with others.
fn cpu_s() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split(' ').next().and_then(|ns| ns.parse::<f64>().ok()).unwrap_or(0.0) / 1e9
}

fn resident_mib() -> f64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    text.split(' ').nth(1).and_then(|p| p.parse::<f64>().ok()).unwrap_or(0.0) * 4096.0 / MIB as f64
}
