//! Peer behaviour: two real machines, a network that does what the input says, and a peer that lies. Nothing
//! panics, no page comes back twice, tables stay bounded.

#![no_main]

use std::collections::{BTreeSet, VecDeque};

use libfuzzer_sys::fuzz_target;
use sapwood::base::Time;
use sapwood::pd::grant::{Destination, Granted};
use sapwood::pd::layout::{Component, Entry, EntryId, Group, Layout, Role, Shape, TokenSplit};
use sapwood::pd::receiver::{self, Fence, Receiver, ReceiverConfig, RecvSpec, ScatterId};
use sapwood::pd::sender::{self, Outcome, SendSpec, Sender, SenderConfig, Tail};
use sapwood::pd::staging::{StagingBuffers, StagingRing};
use sapwood::pd::topo::{Rank, Topology};
use sapwood::pd::wire::{Body, Frame, Head, Metadata, Prompt, Quiet, Status};
use sapwood::pd::{Incarnation, PeerId, Reason, RoomKey, Serial, XferId};

const PAGES: u32 = 32;
const P: PeerId = PeerId(1);
const D: PeerId = PeerId(2);

fn layout() -> Layout {
    let id = EntryId { group: Group::Target, layer: 0, role: Role::Latent };
    let e = Entry {
        id,
        component: Component::Full,
        region: 0,
        base: 0,
        units: PAGES,
        unit_bytes: 16,
        shape: Shape::Replicated,
        ring_slots: 0,
    };
    Layout {
        model: 1,
        page_tokens: 2,
        window_tokens: 0,
        split: TokenSplit::NONE,
        regions: vec![u64::from(PAGES) * 16],
        entries: vec![e],
    }
}

struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn small(&mut self, n: u64) -> u64 {
        u64::from(self.byte().unwrap_or(0)) % n
    }
}

struct World {
    now: Time,
    life: u64,
    p: Sender,
    d: Receiver,
    to_p: VecDeque<Vec<u8>>,
    to_d: VecDeque<Vec<u8>>,
    posted: Vec<(XferId, u64)>,
    fences: Vec<(PeerId, Incarnation)>,
    gathers: Vec<u64>,
    scatters: Vec<ScatterId>,
    out: BTreeSet<u32>,
}

/// Packs every chunk, so that staging is most of what happens.
fn sender(life: u64) -> Sender {
    let staging = StagingBuffers { region: 1, base: 0, buffer_bytes: 64, buffers: 2, copies_min: 1 };
    let c = SenderConfig {
        staging: Some(staging),
        chunk_pages_max: 2,
        in_flight_max: 3,
        tombs_max: 4,
        orphans_max: 4,
        closed_max: 8,
        ..SenderConfig::default()
    };
    Sender::new(Incarnation(life * 2 + 1), c, Topology::single(1), Rank::default(), layout())
        .expect("a valid layout")
}

fn receiver(life: u64, ring: u64) -> Receiver {
    let staging = (ring > 0).then_some(StagingRing { region: 1, base: 0, bytes: ring * 16, chunks_max: 4 });
    let c =
        ReceiverConfig { staging, quarantine_units_max: 16, tombs_max: 4, ..ReceiverConfig::default() };
    let blob = Vec::new();
    Receiver::new(Incarnation(life * 2 + 2), c, 1, Topology::single(1), Rank::default(), layout(), blob)
        .expect("a valid layout")
}

fn key(i: &mut Input<'_>) -> RoomKey {
    RoomKey { room: i.small(3), epoch: i.small(4) as u32 }
}

impl World {
    fn drain(&mut self) {
        while let Some((_, b)) = self.p.poll_transmit() {
            self.to_d.push_back(b);
        }
        while let Some((_, b)) = self.d.poll_transmit() {
            self.to_p.push_back(b);
        }
        while let Some(a) = self.p.poll_action() {
            match a {
                sender::Action::Write { xfer, copies, .. } => {
                    self.posted.push((xfer, copies.iter().map(|c| c.len).sum()));
                }
                sender::Action::Gather { job, .. } => self.gathers.push(job),
                sender::Action::Attach { .. } => {}
            }
        }
        while let Some(a) = self.d.poll_action() {
            match a {
                receiver::Action::Fence { peer, inc, .. } => self.fences.push((peer, inc)),
                receiver::Action::Scatter { id, copies } => {
                    let into = copies.iter().map(|c| (c.dst_off / 16) as u32);
                    into.for_each(|page| assert!(self.out.contains(&page), "scatters into page {page} of nobody"));
                    self.scatters.push(id);
                }
                _ => {}
            }
        }
        while self.p.poll_event().is_some() {}
        while let Some(e) = self.d.poll_event() {
            let back = match e {
                receiver::Event::Done { outcome: Ok(a), .. } => a.pages.into_destination(),
                receiver::Event::Released { pages, .. } => {
                    let busy = self.scatters.iter().any(|s| s.chunk.serial == pages.serial());
                    assert!(!busy, "released under a scatter");
                    pages.into_destination()
                }
                _ => Destination::default(),
            };
            back.full.iter().for_each(|p| assert!(self.out.remove(p), "page {p} came back twice"));
        }
        // The network is finite, too.
        self.to_p.truncate(256);
        self.to_d.truncate(256);
    }

    fn forge(&mut self, i: &mut Input<'_>) {
        let from_p = i.small(2) == 0;
        let (from, to) = if from_p {
            (self.p.incarnation(), self.d.incarnation())
        } else {
            (self.d.incarnation(), self.p.incarnation())
        };
        let (k, serial) = (key(i), Serial(i.small(8)));
        let (chunk, tail) = (i.small(4) as u32, i.small(4) * 16);
        let body = match i.small(18) {
            0 => Body::Announce,
            1 => Body::MetadataAck,
            2 => Body::StatusAck,
            3 => Body::Abort { floor: Serial(i.small(8)) },
            4 => Body::AbortReply([Quiet::Drained, Quiet::Unprovable, Quiet::Busy][i.small(3) as usize]),
            5 => Body::Status(Status::Working),
            6 => Body::Status(Status::Failed(Reason::from_code(i.small(30) as u16))),
            7 | 8 => Body::Status(Status::Done { bytes: i.small(6) * 16, checksum: 0, aux: Vec::new() }),
            9 => Body::Topup {
                from: i.small(5) as u32,
                pages: (0..i.small(6)).map(|p| p as u32).collect(),
                window: Vec::new(),
            },
            12 => Body::StageAsk {
                chunk,
                first: i.small(5) as u32,
                pages: i.small(4) as u32,
                bytes: 16 * i.small(5) as u32,
            },
            13 => Body::StageReady { chunk },
            14 => Body::StageGrant { chunk, at: if i.small(4) == 0 { u64::MAX } else { i.small(9) * 16 }, tail },
            15 => Body::StageTaken { chunk, tail },
            10 => Body::Ping { stamp: 0, floor: Serial(i.small(9)) },
            11 => Body::Pong { stamp: 0 },
            _ => Body::Metadata(Box::new(Metadata {
                prompt: Prompt { tokens: i.small(12) as u32, digest: 0 },
                prefix: i.small(4) as u32,
                full: (0..i.small(6)).map(|p| (p * 7 % 40) as u32).collect(),
                floor: Serial(i.small(4)),
                ..Metadata::default()
            })),
        };
        let head = Head { from, to, sequence: i.small(256), key: k, serial };
        let bytes = Frame { head, body }.to_bytes();
        if from_p { self.to_d.push_front(bytes) } else { self.to_p.push_front(bytes) }
    }

    fn step(&mut self, op: u8, i: &mut Input<'_>) {
        let now = self.now;
        match op % 18 {
            0 | 1 => {
                if let Some(b) = self.to_d.pop_front() {
                    self.d.handle_frame(now, P, &b);
                }
            }
            2 | 3 => {
                if let Some(b) = self.to_p.pop_front() {
                    self.p.handle_frame(now, D, &b);
                }
            }
            4 => drop(if i.small(2) == 0 { self.to_d.pop_front() } else { self.to_p.pop_front() }),
            5 => {
                let q = if i.small(2) == 0 { &mut self.to_d } else { &mut self.to_p };
                if let Some(b) = q.pop_front() {
                    q.push_back(b.clone());
                    q.push_back(b);
                }
            }
            6 => {
                self.now = now + [1_000, 100_000, 1_000_000, 40_000_000][i.small(4) as usize];
                self.p.handle_timeout(self.now);
                self.d.handle_timeout(self.now);
            }
            7 => {
                let (k, tokens) = (key(i), 1 + i.small(8) as u32);
                let _ = self.p.open(now, k, SendSpec { prompt: Prompt { tokens, digest: 0 } });
                let pages: Vec<u32> = (0..tokens.div_ceil(2)).collect();
                let event = (i.small(2) == 0).then_some(7);
                let _ = self.p.offer(now, k, &pages, event);
                let _ = self.p.finish(now, k, Tail::default());
            }
            8 => {
                let prompt = Prompt { tokens: 1 + i.small(8) as u32, digest: 0 };
                let _ = self.d.open(now, key(i), RecvSpec { prompt, contacts: vec![P] });
            }
            9 => {
                let (k, n, prefix) = (key(i), i.small(5) as u32, i.small(3) as u32);
                let full: Vec<u32> = (0..PAGES).filter(|p| !self.out.contains(p)).take(n as usize).collect();
                let dest = Destination { full: full.clone(), ..Destination::default() };
                if self.d.grant(now, k, Granted::new(dest), prefix, i.small(2) == 0).is_ok() {
                    self.out.extend(full);
                }
            }
            10 => drop(self.d.abort(now, key(i))),
            11 => drop(self.p.abort(now, key(i))),
            12 => {
                if !self.posted.is_empty() {
                    let (x, bytes) = self.posted[i.small(self.posted.len() as u64) as usize];
                    let how = [Outcome::Ok { bytes }, Outcome::FailedQuiet, Outcome::FailedUnknown]
                        [i.small(3) as usize];
                    self.p.handle_done(now, x, how);
                }
            }
            13 => self.forge(i),
            16 => {
                if !self.gathers.is_empty() {
                    let job = self.gathers.remove(i.small(self.gathers.len() as u64) as usize);
                    self.p.handle_gathered(now, job, i.small(8) > 0);
                }
            }
            17 => {
                if !self.scatters.is_empty() {
                    let id = self.scatters.remove(i.small(self.scatters.len() as u64) as usize);
                    self.d.handle_scattered(now, id);
                }
            }
            14 => {
                if let Some((peer, inc)) = self.fences.pop() {
                    let how = if i.small(2) == 0 { Fence::Proven } else { Fence::Unproven };
                    self.d.handle_fence(now, peer, inc, how);
                }
                self.p.handle_event(now, key(i), 7);
            }
            _ => match i.small(4) {
                0 => {
                    self.life += 1;
                    self.p = sender(self.life);
                    self.posted.clear();
                    self.gathers.clear();
                }
                1 => self.d.handle_restored(now, key(i)),
                2 => {
                    let k = key(i);
                    let full: Vec<u32> =
                        (0..PAGES).filter(|p| !self.out.contains(p)).take(i.small(4) as usize).collect();
                    let dest = Destination { full: full.clone(), ..Destination::default() };
                    if self
                        .d
                        .handle_restore_failed(now, k, i.small(4) as u32, Some(Granted::new(dest)))
                        .is_ok()
                    {
                        self.out.extend(full);
                    }
                }
                _ => drop(self.d.handle_restore_failed(now, key(i), 0, None)),
            },
        }
        self.drain();
    }
}

fuzz_target!(|data: &[u8]| {
    let mut i = Input(data);
    let ring = i.small(10);
    let mut w = World {
        now: Time(1),
        life: 1,
        p: sender(1),
        d: receiver(1, ring),
        to_p: VecDeque::new(),
        to_d: VecDeque::new(),
        posted: Vec::new(),
        fences: Vec::new(),
        gathers: Vec::new(),
        scatters: Vec::new(),
        out: BTreeSet::new(),
    };
    while let Some(op) = i.byte() {
        w.step(op, &mut i);
    }
    let (p, d) = (w.p.stats(), w.d.stats());
    assert!(p.orphans <= 4 && p.tombs <= 4 && p.closed <= 8);
    // Blocks are written from two buffers, beside what goes piece by piece.
    assert!(p.in_flight <= 3 + 2);
    // A grant may have no pages, where the whole prompt was here; pages without a grant are lost.
    assert!(d.grants > 0 || w.out.is_empty(), "{} pages are nobody's", w.out.len());
});
