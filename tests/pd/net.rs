//! A few ranks, a fixed latency, virtual time, and writes that end when the test says so.

use std::collections::VecDeque;

use sapwood::base::Time;
use sapwood::pd::grant::{Destination, Granted, How};
use sapwood::pd::layout::{Component, Entry, EntryId, Group, HeadOrder, Layout, Role, Shape, TokenSplit};
use sapwood::pd::receiver::{self, Fence, Receiver, ReceiverConfig, RecvSpec, ScatterId};
use sapwood::pd::sender::{self, Outcome, SendSpec, Sender, SenderConfig, Tail};
use sapwood::pd::topo::{Rank, Topology, contacts};
use sapwood::pd::wire::{Body, Frame, Prompt};
use sapwood::pd::{Incarnation, PeerId, Reason, RoomKey, Serial, XferId};

pub(crate) const MS: u64 = 1_000;
pub(crate) const SEC: u64 = 1_000_000;
pub(crate) const LATENCY: u64 = MS;
pub(crate) const PAGES: u32 = 64;
const D0: u32 = 100;

/// A posted write of a prefill rank.
#[derive(Clone, Debug)]
pub(crate) struct Post {
    pub(crate) p: usize,
    pub(crate) xfer: XferId,
    pub(crate) bytes: u64,
    pub(crate) dst_pages: Vec<u64>,
}

pub(crate) struct Net {
    pub(crate) now: Time,
    pub(crate) p: Vec<Option<Sender>>,
    pub(crate) d: Vec<Option<Receiver>>,
    pub(crate) p_topo: Topology,
    pub(crate) d_topo: Topology,
    pub(crate) wire: VecDeque<(Time, PeerId, PeerId, Vec<u8>)>,
    /// Frames for which this is true are lost.
    pub(crate) lose: fn(PeerId, PeerId, &Frame) -> bool,
    pub(crate) posts: Vec<Post>,
    pub(crate) gathers: u32,
    /// Blocks being scattered, or scattered if `auto`: rank, which, bytes.
    pub(crate) scatters: Vec<(usize, ScatterId, u64)>,
    /// Writes succeed at once.
    pub(crate) auto: bool,
    pub(crate) fence: Option<Fence>,
    pub(crate) fences: u32,
    pub(crate) p_events: Vec<(usize, sender::Event)>,
    pub(crate) done: Vec<(usize, RoomKey, Result<Vec<u8>, Reason>)>,
    pub(crate) released: Vec<(usize, RoomKey, How, Vec<u32>)>,
    pub(crate) unhealthy: Vec<bool>,
    /// Every frame sent: from, to, frame.
    pub(crate) sent: Vec<(PeerId, PeerId, Frame)>,
    pub(crate) cfg_p: SenderConfig,
    pub(crate) cfg_d: ReceiverConfig,
    next_inc: u64,
}

pub(crate) fn key(room: u64, epoch: u32) -> RoomKey {
    RoomKey { room, epoch }
}

pub(crate) fn prompt(tokens: u32) -> Prompt {
    Prompt { tokens, digest: 77 }
}

pub(crate) fn layout(topo: &Topology, rank: Rank, pages: u32) -> Layout {
    let (lo, hi) = topo.stage_range(rank.pp);
    let unit = u64::from(4 / topo.tp) * 2 * 8;
    let mut entries = Vec::new();
    for layer in lo..hi {
        for role in [Role::K, Role::V] {
            let base = entries.len() as u64 * unit * u64::from(pages);
            entries.push(Entry {
                id: EntryId { group: Group::Target, layer, role },
                component: Component::Full,
                region: 0,
                base,
                units: pages,
                unit_bytes: unit,
                shape: Shape::Heads { total: 4, head_bytes: 8, order: HeadOrder::TokenHead },
                ring_slots: 0,
            });
        }
    }
    let regions = vec![entries.len() as u64 * unit * u64::from(pages)];
    Layout { model: 1, page_tokens: 2, window_tokens: 0, split: TokenSplit::NONE, regions, entries }
}

impl Net {
    pub(crate) fn new(p_topo: Topology, d_topo: Topology, cfg_p: SenderConfig, cfg_d: ReceiverConfig) -> Net {
        let mut net = Net {
            now: Time(1),
            p: Vec::new(),
            d: Vec::new(),
            wire: VecDeque::new(),
            lose: |_, _, _| false,
            posts: Vec::new(),
            gathers: 0,
            scatters: Vec::new(),
            auto: true,
            fence: Some(Fence::Unproven),
            fences: 0,
            p_events: Vec::new(),
            done: Vec::new(),
            released: Vec::new(),
            unhealthy: Vec::new(),
            sent: Vec::new(),
            cfg_p,
            cfg_d,
            next_inc: 10,
            p_topo,
            d_topo,
        };
        for _ in 0..net.p_topo.replica_ranks() {
            net.p.push(None);
        }
        for _ in 0..net.d_topo.replica_ranks() {
            net.d.push(None);
        }
        (0..net.p.len()).for_each(|i| net.start_p(i));
        (0..net.d.len()).for_each(|i| net.start_d(i));
        net
    }

    pub(crate) fn simple() -> Net {
        Net::new(Topology::single(2), Topology::single(2), SenderConfig::default(), ReceiverConfig::default())
    }

    fn inc(&mut self) -> Incarnation {
        self.next_inc += 1;
        Incarnation(self.next_inc)
    }

    pub(crate) fn start_p(&mut self, i: usize) {
        let (inc, topo) = (self.inc(), self.p_topo.clone());
        let rank = topo.ranks(0).nth(i).unwrap();
        let l = layout(&topo, rank, PAGES);
        self.p[i] = Some(Sender::new(inc, self.cfg_p, topo, rank, l).unwrap());
    }

    pub(crate) fn start_d(&mut self, i: usize) {
        let (inc, topo) = (self.inc(), self.d_topo.clone());
        let rank = topo.ranks(0).nth(i).unwrap();
        let l = layout(&topo, rank, PAGES);
        self.d[i] = Some(Receiver::new(inc, self.cfg_d, 5, topo, rank, l, vec![1, 2, 3]).unwrap());
    }

    pub(crate) fn ps(&mut self, i: usize) -> &mut Sender {
        self.p[i].as_mut().unwrap()
    }

    pub(crate) fn ds(&mut self, i: usize) -> &mut Receiver {
        self.d[i].as_mut().unwrap()
    }

    pub(crate) fn d_peer(i: usize) -> PeerId {
        PeerId(D0 + i as u32)
    }

    fn contacts(&self, d: usize) -> Vec<PeerId> {
        let rank = self.d_topo.ranks(0).nth(d).unwrap();
        let all: Vec<Rank> = self.p_topo.ranks(0).collect();
        let ranks = contacts(&self.p_topo, &self.d_topo, rank, 0).unwrap();
        ranks.iter().map(|r| PeerId(all.iter().position(|a| a == r).unwrap() as u32)).collect()
    }

    /// Opens on every prefill rank and gives all pages; source pages are `0..n`.
    pub(crate) fn prefill(&mut self, k: RoomKey, tokens: u32) {
        for i in 0..self.p.len() {
            self.prefill_on(i, k, tokens);
        }
    }

    pub(crate) fn prefill_on(&mut self, i: usize, k: RoomKey, tokens: u32) {
        let now = self.now;
        let pages: Vec<u32> = (0..tokens.div_ceil(2)).collect();
        let m = self.ps(i);
        m.open(now, k, SendSpec { prompt: prompt(tokens) }).unwrap();
        m.offer(now, k, &pages, None).unwrap();
        m.finish(now, k, Tail { aux: vec![k.epoch as u8, k.room as u8], ..Tail::default() }).unwrap();
        self.drain();
    }

    pub(crate) fn queue(&mut self, d: usize, k: RoomKey, tokens: u32) {
        let spec = RecvSpec { prompt: prompt(tokens), contacts: self.contacts(d) };
        let now = self.now;
        self.ds(d).open(now, k, spec).unwrap();
        self.drain();
    }

    /// Queues and grants consecutive pages from `first` on.
    pub(crate) fn decode(&mut self, d: usize, k: RoomKey, tokens: u32, first: u32) -> Serial {
        self.queue(d, k, tokens);
        self.give(d, k, tokens, first, 0, false)
    }

    pub(crate) fn give(
        &mut self,
        d: usize,
        k: RoomKey,
        tokens: u32,
        first: u32,
        prefix: u32,
        pending: bool,
    ) -> Serial {
        let n = tokens.div_ceil(2) - prefix;
        let dest = Destination { full: (first..first + n).collect(), ..Destination::default() };
        let now = self.now;
        let serial = self.ds(d).grant(now, k, Granted::new(dest), prefix, pending).map_err(|e| e.0).unwrap();
        self.drain();
        serial
    }

    pub(crate) fn abort(&mut self, d: usize, k: RoomKey) {
        let now = self.now;
        self.ds(d).abort(now, k).unwrap();
        self.drain();
    }

    /// Ends a posted write.
    pub(crate) fn finish(&mut self, post: &Post, outcome: Outcome) {
        let now = self.now;
        self.ps(post.p).handle_done(now, post.xfer, outcome);
        self.drain();
    }

    pub(crate) fn finish_ok(&mut self, post: &Post) {
        self.finish(post, Outcome::Ok { bytes: post.bytes });
    }

    fn transmit(&mut self, from: PeerId, to: PeerId, bytes: Vec<u8>) {
        let frame = Frame::decode(&bytes).unwrap();
        let lost = (self.lose)(from, to, &frame);
        self.sent.push((from, to, frame));
        if !lost {
            self.wire.push_back((self.now + LATENCY, from, to, bytes));
        }
    }

    pub(crate) fn drain(&mut self) {
        loop {
            let mut work = false;
            for i in 0..self.p.len() {
                while let Some((to, bytes)) = self.p[i].as_mut().and_then(Sender::poll_transmit) {
                    self.transmit(PeerId(i as u32), to, bytes);
                }
                while let Some(a) = self.p[i].as_mut().and_then(Sender::poll_action) {
                    if let sender::Action::Gather { job, .. } = &a {
                        let now = self.now;
                        self.gathers += 1;
                        self.ps(i).handle_gathered(now, *job, true);
                        work = true;
                    }
                    if let sender::Action::Write { xfer, copies, .. } = a {
                        let bytes = copies.iter().map(|c| c.len).sum();
                        let dst_pages = copies.iter().map(|c| c.dst_off).collect();
                        let post = Post { p: i, xfer, bytes, dst_pages };
                        if self.auto {
                            let now = self.now;
                            self.ps(i).handle_done(now, xfer, Outcome::Ok { bytes });
                        }
                        self.posts.push(post);
                        work = true;
                    }
                }
                while let Some(e) = self.p[i].as_mut().and_then(Sender::poll_event) {
                    self.p_events.push((i, e));
                }
            }
            for i in 0..self.d.len() {
                while let Some(a) = self.d[i].as_mut().and_then(Receiver::poll_action) {
                    work = true;
                    let now = self.now;
                    match a {
                        receiver::Action::Fence { peer, inc, .. } => {
                            self.fences += 1;
                            if let Some(how) = self.fence {
                                self.ds(i).handle_fence(now, peer, inc, how);
                            }
                        }
                        receiver::Action::Scatter { id, copies } => {
                            let bytes = copies.iter().map(|c| c.len).sum();
                            self.scatters.push((i, id, bytes));
                            if self.auto {
                                self.ds(i).handle_scattered(now, id);
                            }
                        }
                        receiver::Action::Revoke { tag } => self.ds(i).handle_revoked(tag.serial()),
                        _ => {}
                    }
                }
                while let Some((to, bytes)) = self.d[i].as_mut().and_then(Receiver::poll_transmit) {
                    self.transmit(Net::d_peer(i), to, bytes);
                }
                while let Some(e) = self.d[i].as_mut().and_then(Receiver::poll_event) {
                    match e {
                        receiver::Event::Done { key, outcome } => {
                            self.done.push((i, key, outcome.map(|a| a.aux)));
                        }
                        receiver::Event::Released { key, pages } => {
                            let how = pages.how();
                            self.released.push((i, key, how, pages.into_destination().full));
                        }
                        receiver::Event::Unhealthy(full) => self.unhealthy.push(full),
                    }
                }
            }
            if !work {
                return;
            }
        }
    }

    /// Lets time pass.
    pub(crate) fn run(&mut self, us: u64) {
        let end = self.now + us;
        loop {
            let timers = self.p.iter().flatten().filter_map(Sender::poll_timeout);
            let more = self.d.iter().flatten().filter_map(Receiver::poll_timeout);
            let frame = self.wire.iter().map(|w| w.0).min();
            let next = timers.chain(more).chain(frame).min();
            match next {
                Some(at) if at <= end => self.now = self.now.max(at),
                _ => {
                    self.now = end;
                    return;
                }
            }
            while let Some(i) = self.wire.iter().position(|w| w.0 <= self.now) {
                let Some((_, from, to, bytes)) = self.wire.remove(i) else { break };
                self.hand(from, to, &bytes);
            }
            let now = self.now;
            self.p.iter_mut().flatten().for_each(|m| m.handle_timeout(now));
            self.d.iter_mut().flatten().for_each(|m| m.handle_timeout(now));
            self.drain();
        }
    }

    pub(crate) fn hand(&mut self, from: PeerId, to: PeerId, bytes: &[u8]) {
        let now = self.now;
        if to.0 >= D0 {
            if let Some(m) = self.d.get_mut((to.0 - D0) as usize).and_then(Option::as_mut) {
                m.handle_frame(now, from, bytes);
            }
        } else if let Some(m) = self.p[to.0 as usize].as_mut() {
            m.handle_frame(now, from, bytes);
        }
        self.drain();
    }

    pub(crate) fn outcome(&self, d: usize, k: RoomKey) -> Option<&Result<Vec<u8>, Reason>> {
        self.done.iter().find(|x| x.0 == d && x.1 == k).map(|x| &x.2)
    }

    pub(crate) fn released_how(&self, d: usize, k: RoomKey) -> Option<How> {
        self.released.iter().find(|x| x.0 == d && x.1 == k).map(|x| x.2)
    }

    pub(crate) fn count(&self, f: impl Fn(&Frame) -> bool) -> usize {
        self.sent.iter().filter(|s| f(&s.2)).count()
    }

    /// The frames of a kind that were sent, with their addresses, as bytes to be sent again.
    pub(crate) fn saved(&self, f: impl Fn(&Body) -> bool) -> Vec<(PeerId, PeerId, Vec<u8>)> {
        self.sent.iter().filter(|s| f(&s.2.body)).map(|s| (s.0, s.1, s.2.to_bytes())).collect()
    }
}
