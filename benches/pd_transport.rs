//! Shared memory against memcpy, TCP against a plain socket loop, in the same run. Prints a table; with
//! `SAPWOOD_BENCH_GATE=1` a ratio below 0.8 fails.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use sapwood::backend::region::Region;
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
const ROUNDS: usize = 9;

/// Source memory, every page touched: reads of untouched memory would all hit one page of zeros.
fn source() -> Memory {
    let entry = Entry {
        id: EntryId { group: Group::Target, layer: 0, role: Role::Latent },
        component: Component::Full,
        region: 0,
        base: 0,
        units: BLOCKS as u32,
        unit_bytes: BLOCK as u64,
        shape: Shape::Replicated,
        ring_slots: 0,
    };
    let layout = Layout {
        model: 1,
        page_tokens: 1,
        window_tokens: 0,
        split: TokenSplit::NONE,
        regions: vec![(BLOCK * BLOCKS) as u64],
        entries: vec![entry],
    };
    let memory = region();
    let mut pool = LeasePool::new(memory.clone(), layout);
    for page in pool.hold(BLOCKS as u32).unwrap_or_default() {
        pool.fill(page, |_, bytes| bytes.fill(page as u8));
    }
    memory
}

fn region() -> Memory {
    Memory::new(vec![Arc::new(Region::anonymous(BLOCK * BLOCKS).expect("memory for the bench"))])
}

/// Where block `i` goes: far from its neighbours.
fn place(i: usize) -> usize {
    i * 37 % BLOCKS
}

/// Best rounds of two ways to move the same bytes, in GB/s. They take turns, so that whatever else the machine
/// does meets both; the first rounds touch memory and do not count.
fn duel(mut a: impl FnMut(), mut b: impl FnMut()) -> (f64, f64) {
    let time = |f: &mut dyn FnMut()| {
        let start = Instant::now();
        f();
        start.elapsed().as_secs_f64()
    };
    a();
    b();
    let mut best = (f64::MAX, f64::MAX);
    for _ in 0..ROUNDS {
        best.0 = best.0.min(time(&mut a));
        best.1 = best.1.min(time(&mut b));
    }
    let rate = |seconds: f64| (BLOCK * BLOCKS) as f64 / seconds / 1e9;
    (rate(best.0), rate(best.1))
}

/// One thread, the same blocks to the same places, in memory of its own.
fn memcpy() -> impl FnMut() {
    let src: Vec<u8> = (0..BLOCK * BLOCKS).map(|i| i as u8).collect();
    let mut dst = vec![1u8; BLOCK * BLOCKS];
    move || {
        for i in 0..BLOCKS {
            let (s, d) = (i * BLOCK, place(i) * BLOCK);
            dst[d..d + BLOCK].copy_from_slice(&src[s..s + BLOCK]);
        }
        std::hint::black_box(&mut dst);
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
        n += 1;
        writer.submit(XferId(n), peer, 0, tag, &copies).expect("an attached peer");
        let mut done = Vec::new();
        while writer.poll(&mut done) == 0 {
            std::thread::sleep(std::time::Duration::from_micros(50));
        }
        assert_eq!(done[0].outcome, Outcome::Ok { bytes: (BLOCK * BLOCKS) as u64 });
    }
}

/// Threads that write blocks to sockets and threads that read them to where they go; nothing else.
fn plain_sockets(streams: usize) -> impl FnMut() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let address = listener.local_addr().expect("its address");
    let mut pairs: Vec<(TcpStream, TcpStream, Vec<u8>, Vec<u8>)> = (0..streams)
        .map(|_| {
            let a = TcpStream::connect(address).expect("loopback");
            let (b, _) = listener.accept().expect("loopback");
            let _ = (a.set_nodelay(true), b.set_nodelay(true));
            let part = BLOCK * BLOCKS / streams;
            (a, b, vec![3u8; part], vec![1u8; part])
        })
        .collect();
    move || {
        std::thread::scope(|s| {
            for (a, b, src, dst) in &mut pairs {
                s.spawn(move || src.chunks(BLOCK).try_for_each(|c| a.write_all(c)).expect("loopback"));
                s.spawn(move || {
                    dst.chunks_mut(BLOCK).rev().try_for_each(|c| b.read_exact(c)).expect("loopback")
                });
            }
        });
    }
}

/// No floor of its own: the library decides how bytes go. In one process it is a copy by the kernel.
#[cfg(feature = "nixl")]
fn nixl(me: Incarnation) {
    use sapwood::backend::transport::nixl::{NixlTarget, NixlWriter};
    let pair = NixlTarget::new(me, None, region())
        .and_then(|t| NixlWriter::new(Incarnation(2), None, source()).map(|w| (t, w)));
    match pair {
        Ok((mut target, mut writer)) => {
            let (rate, _) = duel(transport(&mut writer, &mut target), || ());
            println!("nixl transport              {rate:6.2}");
        }
        Err(e) => println!("nixl transport              not here: {e}"),
    }
}

fn main() -> ExitCode {
    let me = Incarnation(1);
    let mut shm_target = ShmTarget::new(me, BLOCK * BLOCKS).expect("shared memory");
    let mut shm_writer = ShmWriter::new(source()).expect("a thread");
    let (memcpy, shm) = duel(memcpy(), transport(&mut shm_writer, &mut shm_target));
    let mut tcp_target = TcpTarget::new(me, IpAddr::V4(Ipv4Addr::LOCALHOST), region()).expect("a port");
    let mut tcp_writer = TcpWriter::new(me, source());
    let (sockets, tcp) = duel(plain_sockets(STREAMS), transport(&mut tcp_writer, &mut tcp_target));
    let (one, _) = duel(plain_sockets(1), || ());
    println!("128 blocks of 1 MiB, scattered, best of {ROUNDS} rounds in turn, GB/s");
    println!("memcpy, one thread          {memcpy:6.2}");
    println!("shm transport               {shm:6.2}   {:.2} of memcpy", shm / memcpy);
    println!("plain sockets, 1 stream     {one:6.2}");
    println!("plain sockets, {STREAMS} streams    {sockets:6.2}");
    println!("tcp transport, {STREAMS} streams    {tcp:6.2}   {:.2} of plain sockets", tcp / sockets);
    #[cfg(feature = "nixl")]
    nixl(me);
    let gate = std::env::var_os("SAPWOOD_BENCH_GATE").is_some_and(|v| v == "1");
    if gate && (shm < 0.8 * memcpy || tcp < 0.8 * sockets) {
        eprintln!("below 0.8 of the floor");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
