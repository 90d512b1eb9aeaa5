//! Shared memory against memcpy, TCP against a plain socket loop, in the same run. Prints a table; with
//! `SAPWOOD_BENCH_GATE=1` a ratio below 0.8 fails.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use rustix::time::{ClockId, clock_gettime};
use sapwood::backend::region::{Mapping, Region, Sharing};
use sapwood::backend::transport::lease::LeasePool;
use sapwood::backend::transport::shm::{ShmTarget, ShmWriter};
use sapwood::backend::transport::tcp::{STREAMS, TcpTarget, TcpWriter};
use sapwood::backend::transport::{Memory, Span, Target, Writer};
use sapwood::pd::layout::{Component, Entry, EntryId, Group, Layout, Role, Shape, TokenSplit};
use sapwood::pd::plan::Copy;
use sapwood::pd::sender::Outcome;
use sapwood::pd::{Incarnation, PeerId, Serial, Tag, XferId};

const BLOCK: usize = 1 << 20;
const BLOCKS: usize = 128;
const ROUNDS: usize = 11;
/// Times that all blocks go in one round: on a busy machine a thread that is woken waits its turn, and one wait must
/// not outweigh the copies.
const TIMES: usize = 4;
/// Between two looks at a write, as `sapwood pd-demo` does it. A sleep costs some microseconds of processor.
const POLL_US: u64 = 200;

fn region() -> Arc<Region> {
    Arc::new(Region::anonymous(BLOCK * BLOCKS).expect("memory for the bench"))
}

/// Memory of one rank as blocks, every page touched: reads of untouched memory would all hit one page of zeros. Both
/// sides of a comparison use this kind of memory, as its pages decide a good part of what a copy costs.
fn blocks(region: Arc<Region>) -> LeasePool {
    let bytes = region.len();
    let entry = Entry {
        id: EntryId { group: Group::Target, layer: 0, role: Role::Latent },
        component: Component::Full,
        region: 0,
        base: 0,
        units: (bytes / BLOCK) as u32,
        unit_bytes: BLOCK as u64,
        shape: Shape::Replicated,
        ring_slots: 0,
    };
    let layout = Layout {
        model: 1,
        page_tokens: 1,
        window_tokens: 0,
        split: TokenSplit::NONE,
        regions: vec![bytes as u64],
        entries: vec![entry],
    };
    let mut pool = LeasePool::new(Memory::new(vec![region]), layout);
    for page in pool.hold((bytes / BLOCK) as u32).unwrap_or_default() {
        pool.fill(page, |_, bytes| bytes.fill(page as u8));
    }
    pool
}

/// Where block `i` goes: far from its neighbours.
fn place(i: usize) -> usize {
    i * 37 % BLOCKS
}

/// What one way to move the bytes costs.
#[derive(Clone, Copy)]
struct Cost {
    /// By the clock.
    seconds: f64,
    /// Of processors, all threads of this process together. On a shared machine the steadier figure.
    processor_seconds: f64,
}

impl Cost {
    fn of(f: &mut dyn FnMut()) -> Cost {
        let processor = || {
            let t = clock_gettime(ClockId::ProcessCPUTime);
            t.tv_sec as f64 + t.tv_nsec as f64 / 1e9
        };
        let (start, from) = (Instant::now(), processor());
        f();
        let (seconds, used) = (start.elapsed().as_secs_f64(), processor() - from);
        Cost { seconds: seconds / TIMES as f64, processor_seconds: used / TIMES as f64 }
    }
}

/// Medians over all rounds of a floor and of ours, and of the ratios of the two rates round by round.
struct Duel {
    floor: Cost,
    ours: Cost,
    ratio: f64,
    processor_ratio: f64,
}

fn median(of: impl Iterator<Item = f64>) -> f64 {
    let mut of: Vec<f64> = of.collect();
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

/// They take turns, so that whatever else the machine does meets both; the first rounds touch memory and do not count.
fn duel(mut floor: impl FnMut(), mut ours: impl FnMut()) -> Duel {
    floor();
    ours();
    let rounds: Vec<(Cost, Cost)> =
        (0..ROUNDS).map(|_| (Cost::of(&mut floor), Cost::of(&mut ours))).collect();
    let of = |f: fn(&(Cost, Cost)) -> f64| median(rounds.iter().map(f));
    Duel {
        floor: Cost { seconds: of(|r| r.0.seconds), processor_seconds: of(|r| r.0.processor_seconds) },
        ours: Cost { seconds: of(|r| r.1.seconds), processor_seconds: of(|r| r.1.processor_seconds) },
        ratio: of(|r| r.0.seconds / r.1.seconds),
        processor_ratio: of(|r| r.0.processor_seconds / r.1.processor_seconds),
    }
}

fn line(name: &str, cost: Cost, against: &str) {
    let (seconds, processor) = (cost.seconds, cost.processor_seconds);
    let gb = (BLOCK * BLOCKS) as f64 / 1e9;
    println!("{name:26}{:7.2} GB/s {:7.1} processor ms/GB   {against}", gb / seconds, processor * 1e3 / gb);
}

fn lines(names: [&str; 2], d: &Duel) {
    line(names[0], d.floor, "");
    line(names[1], d.ours, &format!("{:.2} x, by processor time {:.2} x", d.ratio, d.processor_ratio));
}

/// One thread, the same blocks to the same places, in shared memory of its own.
fn memcpy() -> impl FnMut() {
    let shared = Mapping { sharing: Sharing::Shared, ..Mapping::PRIVATE };
    let src = blocks(region());
    let mut dst = blocks(Arc::new(Region::map(BLOCK * BLOCKS, shared).expect("shared memory")));
    move || {
        for i in (0..TIMES).flat_map(|_| 0..BLOCKS) {
            src.read(i as u32, |_, from| {
                dst.fill(place(i) as u32, |_, to| to.copy_from_slice(from));
            });
        }
    }
}

fn transport<'a>(writer: &'a mut dyn Writer, target: &mut dyn Target) -> impl FnMut() + 'a {
    let (me, peer) = (Incarnation(1), PeerId(0));
    writer.attach(peer, me, 0, &target.descriptor()).expect("a target of this process");
    let copies: Vec<Copy> = (0..BLOCKS)
        .map(|i| Copy {
            src_region: 0,
            src_off: (i * BLOCK) as u64,
            dst_region: 0,
            dst_off: (place(i) * BLOCK) as u64,
            len: BLOCK as u64,
        })
        .collect();
    let tag = Tag::new(me, Serial(1));
    target
        .allow(tag, vec![Span { region: 0, offset: 0, len: (BLOCK * BLOCKS) as u64 }])
        .expect("an empty table");
    let mut n = 0;
    move || {
        for _ in 0..TIMES {
            n += 1;
            writer.submit(XferId(n), peer, 0, tag, &copies).expect("an attached peer");
        }
        let mut done = Vec::new();
        while done.len() < TIMES {
            writer.poll(&mut done);
            std::thread::sleep(std::time::Duration::from_micros(POLL_US));
        }
        assert!(done.iter().all(|d| d.outcome == Outcome::Ok { bytes: (BLOCK * BLOCKS) as u64 }));
    }
}

/// Threads that write blocks to sockets and threads that read them to where they go; nothing else.
fn plain_sockets() -> impl FnMut() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let address = listener.local_addr().expect("its address");
    let src = blocks(region());
    let share = BLOCKS / STREAMS;
    let part = |_| blocks(Arc::new(Region::anonymous(BLOCK * share).expect("memory for the bench")));
    let mut dst: Vec<LeasePool> = (0..STREAMS).map(part).collect();
    let mut pairs: Vec<(TcpStream, TcpStream)> = (0..STREAMS)
        .map(|_| {
            let a = TcpStream::connect(address).expect("loopback");
            let (b, _) = listener.accept().expect("loopback");
            let _ = (a.set_nodelay(true), b.set_nodelay(true));
            (a, b)
        })
        .collect();
    move || {
        std::thread::scope(|s| {
            for (n, ((a, b), dst)) in pairs.iter_mut().zip(&mut dst).enumerate() {
                let src = &src;
                s.spawn(move || {
                    for i in (0..TIMES).flat_map(|_| n * share..(n + 1) * share) {
                        src.read(i as u32, |_, block| a.write_all(block).expect("loopback"));
                    }
                });
                s.spawn(move || {
                    for i in (0..TIMES).flat_map(|_| 0..share) {
                        dst.fill((i * 37 % share) as u32, |_, block| b.read_exact(block).expect("loopback"));
                    }
                });
            }
        });
    }
}

/// No floor of its own: the library decides how bytes go. In one process it is a copy by the kernel.
#[cfg(feature = "nixl")]
fn nixl(me: Incarnation) {
    use sapwood::backend::transport::nixl::{NixlTarget, NixlWriter};
    let pair = NixlTarget::new(me, None, blocks(region()).memory())
        .and_then(|t| NixlWriter::new(Incarnation(2), None, blocks(region()).memory()).map(|w| (t, w)));
    match pair {
        Ok((mut target, mut writer)) => {
            line("nixl transport", duel(|| (), transport(&mut writer, &mut target)).ours, "");
        }
        Err(e) => println!("nixl transport            not here: {e}"),
    }
}

fn main() -> ExitCode {
    let me = Incarnation(1);
    let mut shm_target = ShmTarget::new(me, BLOCK * BLOCKS).expect("shared memory");
    let mut shm_writer = ShmWriter::new(blocks(region()).memory()).expect("a thread");
    let shm = duel(memcpy(), transport(&mut shm_writer, &mut shm_target));
    let mut tcp_target =
        TcpTarget::new(me, IpAddr::V4(Ipv4Addr::LOCALHOST), blocks(region()).memory()).expect("a port");
    let mut tcp_writer = TcpWriter::new(me, blocks(region()).memory());
    let tcp = duel(plain_sockets(), transport(&mut tcp_writer, &mut tcp_target));
    println!("{BLOCKS} blocks of 1 MiB, scattered, {TIMES} times, medians of {ROUNDS} rounds in turn");
    lines(["memcpy, one thread", "shm transport"], &shm);
    lines([&format!("plain sockets, {STREAMS} streams"), &format!("tcp transport, {STREAMS} streams")], &tcp);
    #[cfg(feature = "nixl")]
    nixl(me);
    let gate = std::env::var_os("SAPWOOD_BENCH_GATE").is_some_and(|v| v == "1");
    if gate && (shm.ratio < 0.8 || tcp.ratio < 0.8) {
        eprintln!("below 0.8 of the floor");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
