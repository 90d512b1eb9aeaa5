//! What both machines share: frames out and in, incarnations, liveness, and repeats until an answer.
//!
//! A peer is probed every [`LinkConfig::ping_us`] and is dead when nothing valid was heard from it for four
//! intervals. After the first silent interval probes go out four times as often, so that a lossy network
//! does not look like a dead peer. Any valid frame that is newer than the last counts as a sign of life: a slow
//! scheduler behind a live control thread is alive. A new incarnation behind an address is the death of the old one.
//!
//! But a frame of another incarnation may as well be one of an earlier process that was long under way. What tells them
//! apart is an answer to a probe that we sent after the current one was first heard: whoever was gone by then cannot
//! give it. So the first frame is answered with a probe, and only the answer replaces anyone; before there is somebody,
//! any process is believed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::base::Time;
use crate::pd::ids::{Incarnation, PeerId, RoomKey, Serial};
use crate::pd::reason::Incompatible;
use crate::pd::wire::{Body, Frame, FrameError, Head, RegisterReply, VERSION};

/// Most peers of one rank.
pub(super) const PEERS_MAX: usize = 1 << 16;
/// Frames waiting for the driver; beyond it new ones are dropped and counted, as if the network had.
const OUT_MAX: usize = 1 << 16;

/// Clocks of the link, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkConfig {
    /// Interval of probes. A peer is dead after four of them.
    pub ping_us: u64,
    /// First repeat of a frame that wants an answer; doubles up to `resend_us_max`.
    pub resend_us: u64,
    /// Slowest repeat.
    pub resend_us_max: u64,
}

impl Default for LinkConfig {
    fn default() -> LinkConfig {
        LinkConfig { ping_us: 1_000_000, resend_us: 200_000, resend_us_max: 2_000_000 }
    }
}

impl LinkConfig {
    /// Silence after which a peer is dead.
    #[must_use]
    pub fn dead_us(&self) -> u64 {
        self.ping_us.saturating_mul(4)
    }
}

/// Frames by fate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkStats {
    /// Frames sent.
    pub sent: u64,
    /// Of them repeats.
    pub repeats: u64,
    /// Valid frames received.
    pub received: u64,
    /// Not a frame; dropped.
    pub malformed: u64,
    /// Of another protocol version; answered with a refusal.
    pub other_version: u64,
    /// From another incarnation than the one that answers, or meant for one of ours; dropped.
    pub stale: u64,
    /// Dropped because a table or the queue to the driver was full.
    pub overflow: u64,
    /// Peers found dead.
    pub deaths: u64,
}

/// Which answer ends a repeat.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Slot {
    Register,
    Metadata,
    Abort,
    Status,
    Topup,
}

/// What hearing a frame said about the peer behind it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Heard {
    /// Nothing new.
    Same,
    /// First frame of this address, or of one that was dead.
    Back,
    /// Another process answers; the old one is dead.
    Replaced(Incarnation),
}

#[derive(Debug)]
struct Peer {
    inc: Incarnation,
    /// When it was first heard.
    since: Time,
    /// The last other incarnation that was asked whether it is the one now.
    asked: Incarnation,
    /// Highest sequence of this incarnation. Only newer frames are signs of life: one that was under way for
    /// a minute, or comes a second time, says nothing about now.
    newest: u64,
    heard: Time,
    probe_at: Time,
    alive: bool,
    told_version: Incarnation,
}

type ResendKey = (PeerId, Slot, RoomKey, Serial);

#[derive(Debug)]
struct Resend {
    body: Body,
    at: Time,
    interval: u64,
}

#[derive(Debug)]
pub(super) struct Link {
    config: LinkConfig,
    me: Incarnation,
    sequence: u64,
    peers: BTreeMap<PeerId, Peer>,
    probes: BTreeSet<(Time, PeerId)>,
    resend: BTreeMap<ResendKey, Resend>,
    resend_at: BTreeSet<(Time, ResendKey)>,
    out: VecDeque<(PeerId, Vec<u8>)>,
    pub(super) floor: Serial,
    pub(super) stats: LinkStats,
}

impl Link {
    pub(super) fn new(me: Incarnation, config: LinkConfig) -> Link {
        Link {
            config,
            me,
            sequence: 0,
            peers: BTreeMap::new(),
            probes: BTreeSet::new(),
            resend: BTreeMap::new(),
            resend_at: BTreeSet::new(),
            out: VecDeque::new(),
            floor: Serial(0),
            stats: LinkStats::default(),
        }
    }

    pub(super) fn me(&self) -> Incarnation {
        self.me
    }

    pub(super) fn incarnation(&self, peer: PeerId) -> Incarnation {
        self.peers.get(&peer).map_or(Incarnation::UNKNOWN, |p| p.inc)
    }

    pub(super) fn is_alive(&self, peer: PeerId) -> bool {
        self.peers.get(&peer).is_some_and(|p| p.alive)
    }

    /// Starts to care about an address. It has four intervals to answer.
    pub(super) fn watch(&mut self, now: Time, peer: PeerId) -> bool {
        if self.peers.contains_key(&peer) {
            return true;
        }
        if self.peers.len() >= PEERS_MAX {
            self.stats.overflow += 1;
            return false;
        }
        let p = Peer {
            inc: Incarnation::UNKNOWN,
            since: now,
            asked: Incarnation::UNKNOWN,
            newest: 0,
            heard: now,
            probe_at: now,
            alive: true,
            told_version: Incarnation::UNKNOWN,
        };
        self.probes.insert((p.probe_at, peer));
        self.peers.insert(peer, p);
        true
    }

    /// Stops to care; repeats to it end.
    pub(super) fn forget(&mut self, peer: PeerId) {
        if let Some(p) = self.peers.remove(&peer) {
            self.probes.remove(&(p.probe_at, peer));
        }
        self.drop_repeats(peer);
    }

    fn drop_repeats(&mut self, peer: PeerId) {
        let low = (peer, Slot::Register, RoomKey::default(), Serial(0));
        let keys: Vec<ResendKey> =
            self.resend.range(low..).map(|(k, _)| *k).take_while(|k| k.0 == peer).collect();
        for k in keys {
            self.answered(k.0, k.1, k.2, k.3);
        }
    }

    pub(super) fn send(&mut self, peer: PeerId, key: RoomKey, serial: Serial, body: Body) {
        self.send_as(peer, self.incarnation(peer), key, serial, body);
    }

    /// To one incarnation, whoever we think is there.
    fn send_as(&mut self, peer: PeerId, to: Incarnation, key: RoomKey, serial: Serial, body: Body) {
        if self.out.len() >= OUT_MAX {
            self.stats.overflow += 1;
            return;
        }
        self.sequence += 1;
        self.stats.sent += 1;
        let head = Head { from: self.me, to, sequence: self.sequence, key, serial };
        self.out.push_back((peer, Frame { head, body }.to_bytes()));
    }

    /// Sends now and again until [`Self::answered`] or the peer is dead.
    pub(super) fn send_until(
        &mut self,
        now: Time,
        peer: PeerId,
        slot: Slot,
        key: RoomKey,
        serial: Serial,
        body: Body,
    ) {
        self.answered(peer, slot, key, serial);
        self.send(peer, key, serial, body.clone());
        let k = (peer, slot, key, serial);
        let at = now + self.config.resend_us;
        self.resend_at.insert((at, k));
        self.resend.insert(k, Resend { body, at, interval: self.config.resend_us });
    }

    /// Ends the repeats of a frame. Returns whether there were any.
    pub(super) fn answered(&mut self, peer: PeerId, slot: Slot, key: RoomKey, serial: Serial) -> bool {
        let k = (peer, slot, key, serial);
        match self.resend.remove(&k) {
            Some(r) => self.resend_at.remove(&(r.at, k)),
            None => false,
        }
    }

    /// Whether a frame is being repeated.
    pub(super) fn is_asking(&self, peer: PeerId, slot: Slot) -> bool {
        self.resend.contains_key(&(peer, slot, RoomKey::default(), Serial(0)))
    }

    pub(super) fn poll_transmit(&mut self) -> Option<(PeerId, Vec<u8>)> {
        self.out.pop_front()
    }

    /// Checks a frame and notes the sign of life. `None`: dropped and counted. Probes are answered here.
    pub(super) fn receive(&mut self, now: Time, peer: PeerId, bytes: &[u8]) -> Option<(Frame, Heard)> {
        let frame = match Frame::decode(bytes) {
            Ok(f) => f,
            Err(FrameError::Version { from, .. }) => {
                self.stats.other_version += 1;
                self.refuse_version(now, peer, from);
                return None;
            }
            Err(_) => {
                self.stats.malformed += 1;
                return None;
            }
        };
        if frame.head.from == Incarnation::UNKNOWN || !self.watch(now, peer) {
            self.stats.malformed += 1;
            return None;
        }
        if let Body::Ping { stamp, .. } = frame.body {
            let pong = Body::Pong { stamp };
            self.send_as(peer, frame.head.from, RoomKey::default(), Serial(0), pong);
        }
        // A probe and a registration may be meant for our predecessor: the answer introduces us.
        let anyone = matches!(frame.body, Body::Ping { .. } | Body::Register(_));
        let heard = if frame.head.to == self.me || anyone { self.hear(now, peer, &frame) } else { None };
        match heard {
            Some(heard) => {
                self.stats.received += 1;
                Some((frame, heard))
            }
            None => {
                self.stats.stale += 1;
                None
            }
        }
    }

    /// What a frame for us says about who is there; nothing if it is of someone else, as far as we know.
    fn hear(&mut self, now: Time, peer: PeerId, frame: &Frame) -> Option<Heard> {
        let (from, sequence) = (frame.head.from, frame.head.sequence);
        let p = self.peers.get_mut(&peer)?;
        let old = p.inc;
        if old == from {
            if sequence <= p.newest {
                return Some(Heard::Same);
            }
            p.newest = sequence;
            p.heard = p.heard.max(now);
            let back = !std::mem::replace(&mut p.alive, true);
            return Some(if back { Heard::Back } else { Heard::Same });
        }
        let answers = match frame.body {
            Body::Pong { stamp } => stamp > p.since.0 && stamp <= now.0,
            _ => false,
        };
        if old != Incarnation::UNKNOWN && !answers {
            if std::mem::replace(&mut p.asked, from) != from {
                let (stamp, floor) = (now.0, self.floor);
                self.send_as(peer, from, RoomKey::default(), Serial(0), Body::Ping { stamp, floor });
            }
            return None;
        }
        (p.inc, p.since, p.newest) = (from, now, sequence);
        p.heard = p.heard.max(now);
        p.alive = true;
        if old == Incarnation::UNKNOWN {
            return Some(Heard::Back);
        }
        self.stats.deaths += 1;
        self.drop_repeats(peer);
        Some(Heard::Replaced(old))
    }

    fn refuse_version(&mut self, now: Time, peer: PeerId, from: Incarnation) {
        if from == Incarnation::UNKNOWN || !self.watch(now, peer) {
            return;
        }
        let told = self.peers.get_mut(&peer).map(|p| std::mem::replace(&mut p.told_version, from));
        if told != Some(from) {
            let why = RegisterReply::Refused { why: Incompatible::Version, version: VERSION };
            self.send(peer, RoomKey::default(), Serial(0), Body::RegisterReply(Box::new(why)));
        }
    }

    /// The next time [`Self::handle_timeout`] has work.
    pub(super) fn poll_timeout(&self) -> Option<Time> {
        let probe = self.probes.first().map(|p| p.0);
        let resend = self.resend_at.first().map(|r| r.0);
        probe.into_iter().chain(resend).min()
    }

    /// Sends what is due and returns who died.
    pub(super) fn handle_timeout(&mut self, now: Time) -> Vec<(PeerId, Incarnation)> {
        let mut dead = Vec::new();
        while let Some(&(at, peer)) = self.probes.first()
            && at <= now
        {
            self.probes.remove(&(at, peer));
            let Some(p) = self.peers.get_mut(&peer) else { continue };
            let silent = now.since(p.heard);
            if p.alive && silent >= self.config.dead_us() {
                p.alive = false;
                dead.push((peer, p.inc));
            }
            let wait = if p.alive && silent >= self.config.ping_us {
                self.config.ping_us / 4
            } else {
                self.config.ping_us
            };
            // Never past the moment of death, so that it is found on time and not at the next probe.
            let death = p.heard + self.config.dead_us();
            let next = if p.alive { (now + wait).min(death.max(now + 1)) } else { now + wait };
            p.probe_at = next;
            self.probes.insert((next, peer));
            let (stamp, floor) = (now.0, self.floor);
            self.send(peer, RoomKey::default(), Serial(0), Body::Ping { stamp, floor });
        }
        for &(peer, _) in &dead {
            self.stats.deaths += 1;
            self.drop_repeats(peer);
        }
        while let Some(&(at, k)) = self.resend_at.first()
            && at <= now
        {
            self.resend_at.remove(&(at, k));
            let Some(r) = self.resend.get_mut(&k) else { continue };
            r.interval = (r.interval * 2).min(self.config.resend_us_max);
            r.at = now + r.interval;
            let body = r.body.clone();
            self.resend_at.insert((r.at, k));
            self.stats.repeats += 1;
            self.send(k.0, k.2, k.3, body);
        }
        dead
    }
}
