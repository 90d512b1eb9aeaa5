//! Packed chunks with real bytes: two prefill ranks with half of the heads each write over TCP into the ring of one
//! decode rank with all of them. Whatever is not in the ring's places or the granted pages is refused at the target.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::tcp::{TcpTarget, TcpWriter};
use super::{Memory, Target, Writer, spans_of};
use crate::backend::region::Region;
use crate::base::Time;
use crate::pd::grant::{Destination, Granted};
use crate::pd::layout::{Component, Entry, EntryId, Group, HeadOrder, Layout, Role, Shape, TokenSplit};
use crate::pd::receiver::{self, Receiver, ReceiverConfig, RecvSpec};
use crate::pd::sender::{self, Outcome, SendSpec, Sender, SenderConfig, Tail};
use crate::pd::staging::{StagingBuffers, StagingRing};
use crate::pd::topo::{Rank, Topology};
use crate::pd::wire::Prompt;
use crate::pd::{Incarnation, PeerId, RoomKey};

const HEADS: u32 = 4;
const HEAD_BYTES: u32 = 8;
const PAGE_TOKENS: u32 = 2;
const PAGES: u32 = 16;
const D: PeerId = PeerId(9);
const KEY: RoomKey = RoomKey { room: 1, epoch: 1 };
const STAGE_BYTES: u64 = 4096;

fn layout(topo: &Topology) -> Layout {
    let unit_bytes = u64::from(PAGE_TOKENS * HEADS / topo.tp * HEAD_BYTES);
    let mut entries: Vec<Entry> = Vec::new();
    for layer in 0..2 {
        for role in [Role::K, Role::V] {
            entries.push(Entry {
                id: EntryId { group: Group::Target, layer, role },
                component: Component::Full,
                region: 0,
                base: entries.len() as u64 * unit_bytes * u64::from(PAGES),
                units: PAGES,
                unit_bytes,
                shape: Shape::Heads { total: HEADS, head_bytes: HEAD_BYTES, order: HeadOrder::TokenHead },
                ring_slots: 0,
            });
        }
    }
    let bytes = entries.len() as u64 * unit_bytes * u64::from(PAGES);
    Layout {
        model: 1,
        page_tokens: PAGE_TOKENS,
        window_tokens: 0,
        split: TokenSplit::NONE,
        regions: vec![bytes],
        entries,
    }
}

fn memory(l: &Layout) -> Memory {
    let region = |n: u64| Arc::new(Region::anonymous(n as usize).unwrap());
    Memory::new(vec![region(l.regions[0]), region(STAGE_BYTES)])
}

/// What a head of a token holds.
fn label(e: &Entry, token: u32, head: u32) -> [u8; HEAD_BYTES as usize] {
    let role = u8::from(e.id.role == Role::V);
    [1, e.id.layer as u8, role, token as u8, head as u8, 0xA5, (token * 7 + head * 3) as u8, 0xFF]
}

/// Calls `f(region offset, entry, token, head)` for every head of every token of a list of pages.
fn each_head(l: &Layout, tp: u32, rank: u32, pages: &[u32], mut f: impl FnMut(u64, &Entry, u32, u32)) {
    let here = HEADS / tp;
    for e in &l.entries {
        for (pos, &page) in (0u32..).zip(pages) {
            for t in 0..PAGE_TOKENS {
                for h in 0..here {
                    let within = u64::from((t * here + h) * HEAD_BYTES);
                    f(
                        e.base + u64::from(page) * e.unit_bytes + within,
                        e,
                        pos * PAGE_TOKENS + t,
                        rank * here + h,
                    );
                }
            }
        }
    }
}

struct Prefill {
    sender: Sender,
    writer: TcpWriter,
    memory: Memory,
}

fn prefill(tp: u32) -> Prefill {
    let topo = Topology { tp: 2, ..Topology::single(2) };
    let l = layout(&topo);
    let memory = memory(&l);
    let sources: Vec<u32> = (0..8).rev().collect();
    each_head(&l, 2, tp, &sources, |at, e, token, head| memory.poke(0, at, &label(e, token, head)));
    let staging = StagingBuffers { region: 1, base: 64, buffer_bytes: 512, buffers: 2, copies_min: 2 };
    let config = SenderConfig { staging: Some(staging), chunk_pages_max: 3, ..SenderConfig::default() };
    let inc = Incarnation(u64::from(tp) + 1);
    let mut sender = Sender::new(inc, config, topo, Rank { tp, ..Rank::default() }, l).unwrap();
    sender.open(Time(1), KEY, SendSpec { prompt: Prompt { tokens: 16, digest: 3 } }).unwrap();
    sender.offer(Time(1), KEY, &sources, None).unwrap();
    sender.finish(Time(1), KEY, Tail::default()).unwrap();
    Prefill { sender, writer: TcpWriter::new(inc, memory.clone()), memory }
}

impl Prefill {
    fn step(&mut self, now: Time) {
        while let Some(a) = self.sender.poll_action() {
            match a {
                sender::Action::Attach { peer, inc, attach, blob } => {
                    self.writer.attach(peer, inc, attach, &blob).unwrap();
                }
                sender::Action::Gather { job, copies } => {
                    self.memory.copy_within(&copies).unwrap();
                    self.sender.handle_gathered(now, job, true);
                }
                sender::Action::Write { xfer, peer, attach, tag, copies } => {
                    assert!(copies[0].src_region == 1, "a chunk that was not packed");
                    self.writer.submit(xfer, peer, attach, tag, &copies).unwrap();
                }
            }
        }
        let mut done = Vec::new();
        self.writer.poll(&mut done);
        for d in done {
            assert!(matches!(d.outcome, Outcome::Ok { .. }), "{d:?}");
            self.sender.handle_done(now, d.xfer, d.outcome);
        }
    }
}

#[test]
fn slices_of_heads_arrive_through_the_ring() {
    let mut ps = [prefill(0), prefill(1)];
    let topo = Topology::single(2);
    let l = layout(&topo);
    let target_memory = memory(&l);
    let inc = Incarnation(7);
    let mut target = TcpTarget::new(inc, IpAddr::V4(Ipv4Addr::LOCALHOST), target_memory.clone()).unwrap();
    // Room for one block and a half, so that they take turns.
    let ring = StagingRing { region: 1, base: 128, bytes: 600, chunks_max: 8 };
    let config = ReceiverConfig { revoke: true, staging: Some(ring), ..ReceiverConfig::default() };
    let blob = target.descriptor();
    let mut r = Receiver::new(inc, config, 5, topo, Rank::default(), l.clone(), blob).unwrap();
    let pages: Vec<u32> = vec![3, 4, 5, 12, 9, 1, 0, 15];
    let contacts = vec![PeerId(0), PeerId(1)];
    r.open(Time(1), KEY, RecvSpec { prompt: Prompt { tokens: 16, digest: 3 }, contacts }).unwrap();
    let dest = Destination { full: pages.clone(), ..Destination::default() };
    r.grant(Time(1), KEY, Granted::new(dest), 0, false).map_err(|e| e.0).unwrap();
    let (start, mut arrived) = (Instant::now(), false);
    let mut to_d: VecDeque<(PeerId, Vec<u8>)> = VecDeque::new();
    while !arrived {
        assert!(start.elapsed() < Duration::from_secs(60), "no end: {:?}", r.stats());
        let now = Time(start.elapsed().as_micros() as u64 + 2);
        for (i, p) in (0u32..).zip(&mut ps) {
            p.sender.handle_timeout(now);
            p.step(now);
            while let Some((_, frame)) = p.sender.poll_transmit() {
                to_d.push_back((PeerId(i), frame));
            }
        }
        r.handle_timeout(now);
        while let Some((from, frame)) = to_d.pop_front() {
            r.handle_frame(now, from, &frame);
        }
        while let Some(a) = r.poll_action() {
            match a {
                receiver::Action::Allow { tag, dest, ring } => {
                    target.allow(tag, spans_of(&l, &dest, &ring)).unwrap();
                }
                receiver::Action::Scatter { id, copies } => {
                    target_memory.copy_within(&copies).unwrap();
                    r.handle_scattered(now, id);
                }
                receiver::Action::Forget { tag } => target.forget(tag),
                other => panic!("{other:?}"),
            }
        }
        while let Some((to, frame)) = r.poll_transmit() {
            ps[to.0 as usize].sender.handle_frame(now, D, &frame);
        }
        while let Some(e) = r.poll_event() {
            assert!(matches!(e, receiver::Event::Done { outcome: Ok(_), .. }), "{e:?}");
            arrived = true;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    let mut heads = 0;
    each_head(&l, 1, 0, &pages, |at, e, token, head| {
        let mut got = [0; HEAD_BYTES as usize];
        target_memory.peek(0, at, &mut got);
        assert_eq!(got, label(e, token, head), "{:?} token {token} head {head}", e.id);
        heads += 1;
    });
    assert_eq!(heads, 4 * 16 * HEADS);
    // Three chunks from each of two ranks.
    assert_eq!((r.stats().chunks_scattered, r.stats().ring_places), (6, 0));
}
