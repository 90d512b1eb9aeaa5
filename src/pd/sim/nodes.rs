//! Ranks and instances: start, frames, clocks, crashes, the votes of a group, and the checks at the end.

use std::collections::{BTreeMap, BTreeSet};

use super::memory::{Memory, Model, Owner, layout};
use super::schedule::Step;
use super::staging::Local;
use super::{Ev, Faults, Options, Params, Rng, Strength, World};
use crate::base::Time;
use crate::pd::agree::{Ballot, Vote, combine};
use crate::pd::grant::How;
use crate::pd::ids::{Incarnation, PeerId, RoomKey, Serial};
use crate::pd::link::LinkConfig;
use crate::pd::receiver::{self, Receiver, ReceiverConfig};
use crate::pd::sender::{self, Sender, SenderConfig};
use crate::pd::topo::{Rank, Topology, contacts};

#[derive(Debug)]
pub(super) enum Machine {
    P(Box<Sender>),
    D(Box<Receiver>),
}

#[derive(Debug)]
pub(super) struct Node {
    pub(super) peer: PeerId,
    pub(super) instance: usize,
    pub(super) rank: Rank,
    pub(super) life: u32,
    pub(super) inc: Incarnation,
    pub(super) machine: Option<Machine>,
    pub(super) mem: usize,
    timer_at: Time,
    /// Attachments of each incarnation that can no longer land here.
    pub(super) fenced: BTreeMap<u64, u32>,
    /// Grants the target lets in, when it mediates.
    pub(super) allowed: BTreeSet<u64>,
    /// Rooms this life opened, and when; and how they ended.
    pub(super) opened: BTreeMap<RoomKey, Time>,
    pub(super) refused: BTreeSet<RoomKey>,
    pub(super) done: BTreeMap<RoomKey, bool>,
    /// Where the prefix of a room ends now, after top-ups.
    pub(super) prefix: BTreeMap<RoomKey, u32>,
    pub(super) sources: BTreeMap<RoomKey, super::schedule::Sources>,
    /// Grants of rooms, and those that have ended: nothing may land for them, in the ring either.
    pub(super) granted: BTreeMap<RoomKey, Serial>,
    pub(super) ended: BTreeSet<Serial>,
}

#[derive(Debug)]
pub(super) struct Instance {
    pub(super) prefill: bool,
    pub(super) topo: Topology,
    pub(super) nodes: Vec<usize>,
    pub(super) up: bool,
    pub(super) deciding: usize,
}

/// A ballot with the result it will be applied with.
#[derive(Debug)]
pub(super) struct Sealed {
    ballot: Option<Ballot>,
    agreed: Vec<Vote>,
}

impl World {
    pub(super) fn new(o: Options) -> World {
        let mut rng = Rng(o.seed.wrapping_mul(0x2545_F491_4F6C_DD1D) ^ 0xD1CE);
        let f = o.faults;
        let on = |b: bool, v: u64| if b { v } else { 0 };
        let p = Params {
            loss: on(f.loss, if rng.chance(30) { 0 } else { rng.below(31) }),
            dup: on(f.duplication, rng.below(21)),
            delay_max: if f.delay { rng.log(5_000, 60_000_000) } else { 3_000 },
            strength: o.strength.unwrap_or(match rng.below(3) {
                0 => Strength::Weakest,
                1 => Strength::Fencing,
                _ => Strength::Strongest,
            }),
            write_fail: on(f.transport, rng.below(25)),
            abort: on(f.abort, 5 + rng.below(30)),
            model: Model {
                layers: 2 + rng.below(3) as u32,
                state: rng.chance(40),
                window: rng.chance(40),
                draft_on_decode: rng.chance(40),
            },
            pages: if f == Faults::NONE { 40 } else { 8 + rng.below(12) as u32 },
            slots: if f == Faults::NONE { 16 } else { 4 + rng.below(4) as u32 },
            tombs: if rng.chance(50) { 1 } else { 1000 },
            in_flight: 1 + rng.below(6) as usize,
            quarantine_units_max: if rng.chance(30) { 8 } else { 1000 },
            // From one block to four; whole cells.
            ring: if rng.chance(50) { 512 + 8 * rng.below(193) } else { 0 },
            buffers: 1 + rng.below(4) as u32,
        };
        World {
            o,
            rng,
            p,
            now: Time(1),
            seq: 0,
            queue: Default::default(),
            nodes: Vec::new(),
            instances: Vec::new(),
            memories: Vec::new(),
            writes: BTreeMap::new(),
            next_write: 0,
            locals: BTreeMap::new(),
            reasons: Default::default(),
            requests: BTreeMap::new(),
            epochs: BTreeMap::new(),
            ballots: BTreeMap::new(),
            next_ballot: 0,
            cuts: BTreeSet::new(),
            old_frames: Vec::new(),
            calm: false,
            report: Default::default(),
            digest: Default::default(),
        }
    }

    pub(super) fn start(&mut self) {
        let (np, nd) = (1 + self.rng.below(2), 1 + self.rng.below(2));
        for i in 0..np + nd {
            let prefill = i < np;
            let layers = self.p.model.layers;
            let tp = if self.rng.chance(50) { 2 } else { 1 };
            let pp = if prefill && self.rng.chance(50) { 2 } else { 1 };
            let stage_layers = if pp == 2 {
                let first = self.rng.within(1, u64::from(layers) - 1) as u32;
                vec![first, layers - first]
            } else {
                vec![layers]
            };
            let topo = Topology { tp, stage_layers, ..Topology::single(layers) };
            let at = self.instances.len();
            let nodes: Vec<usize> = topo
                .ranks(0)
                .map(|rank| {
                    let peer = PeerId(self.nodes.len() as u32);
                    self.nodes.push(Node {
                        peer,
                        instance: at,
                        rank,
                        life: 0,
                        inc: Incarnation::UNKNOWN,
                        machine: None,
                        mem: 0,
                        timer_at: Time(u64::MAX),
                        fenced: BTreeMap::new(),
                        allowed: BTreeSet::new(),
                        opened: BTreeMap::new(),
                        refused: BTreeSet::new(),
                        done: BTreeMap::new(),
                        prefix: BTreeMap::new(),
                        sources: BTreeMap::new(),
                        granted: BTreeMap::new(),
                        ended: BTreeSet::new(),
                    });
                    self.nodes.len() - 1
                })
                .collect();
            self.instances.push(Instance { prefill, topo, nodes, up: false, deciding: 0 });
            self.restart(at);
            self.after(50_000, Ev::Ballot { instance: at });
        }
        let p = self.p.clone();
        self.say("world", || format!("{p:?}"));
        self.plan_faults();
        self.after(1_000, Ev::Schedule(Step::NewRequest));
    }

    fn plan_faults(&mut self) {
        let f: Faults = self.o.faults;
        if f.crash {
            for _ in 0..self.rng.below(4) {
                let instance = self.rng.below(self.instances.len() as u64) as usize;
                let at = Time(self.rng.within(1_000_000, 28_000_000));
                self.at(at, Ev::Crash { instance });
            }
        }
        if f.partition {
            for _ in 0..self.rng.below(3) {
                let n = self.nodes.len() as u64;
                let (from, to) = (PeerId(self.rng.below(n) as u32), PeerId(self.rng.below(n) as u32));
                let at = Time(self.rng.within(1_000_000, 25_000_000));
                let len = self.rng.log(500_000, 20_000_000);
                self.at(at, Ev::Cut { from, to, on: true });
                self.at(at + len, Ev::Cut { from, to, on: false });
            }
        }
        if f.garbage {
            self.after(10_000, Ev::Garbage);
        }
    }

    fn sender_config(&self, collective: bool) -> SenderConfig {
        SenderConfig {
            link: LinkConfig::default(),
            bootstrap_us: 15_000_000,
            orphan_us: 10_000_000,
            source_hold_us: 10_000_000,
            working_us: 1_000_000,
            chunk_pages_max: 2,
            in_flight_max: self.p.in_flight,
            tombs_max: self.p.tombs,
            orphans_max: 64,
            collective,
            ..SenderConfig::default()
        }
    }

    fn receiver_config(&self, collective: bool) -> ReceiverConfig {
        ReceiverConfig {
            no_progress_us: 20_000_000,
            hold_us: 6_000_000,
            tombs_max: 64,
            quarantine_units_max: self.p.quarantine_units_max,
            revoke: self.p.strength == Strength::Strongest,
            collective,
            ..ReceiverConfig::default()
        }
    }

    pub(super) fn restart(&mut self, instance: usize) {
        if self.instances[instance].up {
            return;
        }
        self.instances[instance].up = true;
        let (prefill, topo) = (self.instances[instance].prefill, self.instances[instance].topo.clone());
        let life_tag = self.rng.next();
        for n in self.instances[instance].nodes.clone() {
            let rank = self.nodes[n].rank;
            let (pages, slots) = (self.p.pages, self.p.slots);
            let l = layout(&self.p.model, &topo, rank, pages, slots, !prefill);
            let inc = Incarnation(self.rng.next() | 1);
            let collective = topo.replica_ranks() > 1;
            let machine = if prefill {
                let c = SenderConfig { staging: self.buffers_of(&l), ..self.sender_config(collective) };
                let mut m = Sender::new(inc, c, topo.clone(), rank, l.clone())
                    .expect("the layouts of the simulator are valid");
                m.plant(self.o.plant);
                Machine::P(Box::new(m))
            } else {
                let c = ReceiverConfig { staging: self.ring_of(&l), ..self.receiver_config(collective) };
                let mut m = Receiver::new(inc, c, life_tag, topo.clone(), rank, l.clone(), vec![n as u8])
                    .expect("the layouts of the simulator are valid");
                m.plant(self.o.plant);
                Machine::D(Box::new(m))
            };
            self.memories.push(Memory::new(l, topo.clone(), rank, pages, slots));
            let mem = self.memories.len() - 1;
            let node = &mut self.nodes[n];
            node.life += 1;
            node.inc = inc;
            node.machine = Some(machine);
            node.mem = mem;
            node.timer_at = Time(u64::MAX);
            node.fenced.clear();
            node.allowed.clear();
            node.opened.clear();
            node.refused.clear();
            node.done.clear();
            node.prefix.clear();
            node.sources.clear();
            node.granted.clear();
            node.ended.clear();
            self.say("world", || format!("{} starts as {inc:?}", name(prefill, n)));
            self.drain(n);
        }
    }

    pub(super) fn crash(&mut self, instance: usize) {
        if !self.instances[instance].up || self.calm {
            return;
        }
        self.instances[instance].up = false;
        self.instances[instance].deciding = 0;
        let prefill = self.instances[instance].prefill;
        for n in self.instances[instance].nodes.clone() {
            self.say("world", || format!("{} dies", name(prefill, n)));
            self.bank_stats(n);
            self.nodes[n].machine = None;
        }
        let life = self.nodes[self.instances[instance].nodes[0]].life;
        let wait = self.rng.log(100_000, 30_000_000);
        self.after(wait, Ev::Restart { instance });
        if prefill {
            let bound = self.p.delay_max.max(20_000) + LinkConfig::default().dead_us() + 1_500_000;
            self.after(bound, Ev::CheckDead { instance, life });
        }
    }

    /// A peer that died before this long is noticed by everyone who had a room with it.
    pub(super) fn check_dead(&mut self, instance: usize, life: u32) {
        let _ = life;
        let bound = self.p.delay_max.max(20_000) + LinkConfig::default().dead_us() + 1_500_000;
        let died = Time(self.now.0.saturating_sub(bound));
        for n in 0..self.nodes.len() {
            if !matches!(self.nodes[n].machine, Some(Machine::D(_))) {
                continue;
            }
            let late: Vec<RoomKey> = self.nodes[n]
                .opened
                .iter()
                .filter(|(k, at)| **at < died && !self.nodes[n].done.contains_key(k))
                .filter(|(k, _)| self.requests.get(k).is_some_and(|r| r.p_inst == instance))
                .map(|(k, _)| *k)
                .collect();
            for key in late {
                self.violation(
                    "I9",
                    format!("node {n} still waits in {key:?} for instance {instance} that died at {died:?}"),
                );
            }
        }
    }

    /// Addresses of the prefill ranks that serve a decode node.
    pub(super) fn contacts_of(&self, n: usize, p_inst: usize) -> Vec<PeerId> {
        let d = &self.instances[self.nodes[n].instance];
        let p = &self.instances[p_inst];
        let ranks = contacts(&p.topo, &d.topo, self.nodes[n].rank, 0).unwrap_or_default();
        let find =
            |r: &Rank| p.nodes.iter().find(|&&i| self.nodes[i].rank == *r).map(|&i| self.nodes[i].peer);
        ranks.iter().filter_map(find).collect()
    }

    pub(super) fn deliver(&mut self, to: PeerId, from: PeerId, bytes: &[u8]) {
        let n = to.0 as usize;
        let now = self.now;
        self.report.frames += 1;
        self.note(u64::from(to.0) << 32 | bytes.len() as u64);
        match &mut self.nodes[n].machine {
            Some(Machine::P(m)) => m.handle_frame(now, from, bytes),
            Some(Machine::D(m)) => m.handle_frame(now, from, bytes),
            None => return,
        }
        if self.o.story
            && let Ok(f) = crate::pd::wire::Frame::decode(bytes)
            && !matches!(f.body, crate::pd::wire::Body::Ping { .. } | crate::pd::wire::Body::Pong { .. })
        {
            let text = format!("{:?}", f.body);
            let short: String = text.chars().take(90).collect();
            let who = name(self.instances[self.nodes[n].instance].prefill, n);
            self.say(&who, || format!("hears {from:?}: {:?} {:?} {short}", f.head.key, f.head.serial));
        }
        self.drain(n);
    }

    pub(super) fn timer(&mut self, n: usize, life: u32) {
        if self.nodes[n].life != life {
            return;
        }
        let now = self.now;
        if self.nodes[n].timer_at <= now {
            self.nodes[n].timer_at = Time(u64::MAX);
        }
        match &mut self.nodes[n].machine {
            Some(Machine::P(m)) => m.handle_timeout(now),
            Some(Machine::D(m)) => m.handle_timeout(now),
            None => return,
        }
        self.drain(n);
    }

    /// Takes all work out of a node and sets its clock.
    pub(super) fn drain(&mut self, n: usize) {
        loop {
            let from = self.nodes[n].peer;
            let (frame, p_act, d_act, p_ev, d_ev) = match &mut self.nodes[n].machine {
                Some(Machine::P(m)) => {
                    let f = m.poll_transmit();
                    let a = if f.is_none() { m.poll_action() } else { None };
                    let e = if f.is_none() && a.is_none() { m.poll_event() } else { None };
                    (f, a, None, e, None)
                }
                Some(Machine::D(m)) => {
                    let a = m.poll_action();
                    let f = if a.is_none() { m.poll_transmit() } else { None };
                    let e = if f.is_none() && a.is_none() { m.poll_event() } else { None };
                    (f, None, a, None, e)
                }
                None => return,
            };
            if let Some((to, bytes)) = frame {
                self.post(from, to, bytes);
            } else if let Some(a) = p_act {
                match a {
                    sender::Action::Write { xfer, peer, attach, tag, copies } => {
                        self.post_write(n, xfer, peer, attach, tag, copies);
                    }
                    sender::Action::Gather { job, copies } => self.start_gather(n, job, copies),
                    sender::Action::Attach { .. } => {}
                }
            } else if let Some(a) = d_act {
                self.target_action(n, a);
            } else if let Some(e) = p_ev {
                self.sender_event(n, e);
            } else if let Some(e) = d_ev {
                self.receiver_event(n, e);
            } else {
                break;
            }
        }
        let next = match &self.nodes[n].machine {
            Some(Machine::P(m)) => m.poll_timeout(),
            Some(Machine::D(m)) => m.poll_timeout(),
            None => None,
        };
        if let Some(at) = next
            && at < self.nodes[n].timer_at
        {
            let at = at.max(self.now);
            self.nodes[n].timer_at = at;
            let life = self.nodes[n].life;
            self.at(at, Ev::Timer { node: n, life });
        }
    }

    fn target_action(&mut self, n: usize, a: receiver::Action) {
        let life = self.nodes[n].life;
        match a {
            receiver::Action::Allow { tag, .. } => {
                self.nodes[n].allowed.insert(tag.serial().0);
            }
            receiver::Action::Scatter { id, copies } => self.start_local(n, Local::Scatter { id, copies }),
            receiver::Action::Forget { tag } => {
                self.nodes[n].allowed.remove(&tag.serial().0);
            }
            receiver::Action::Revoke { tag } => {
                let wait = self.rng.below(2_000);
                self.after(wait, Ev::Revoke { node: n, life, serial: tag.serial().0 });
            }
            receiver::Action::Fence { peer, inc, attach } => {
                self.say("fence", || format!("node {n} wants {peer:?} {inc:?} fenced"));
                let wait = self.rng.log(1_000, 500_000);
                self.after(wait, Ev::Fence { node: n, life, peer, inc: inc.0, attach });
            }
        }
    }

    pub(super) fn fence(&mut self, n: usize, life: u32, peer: PeerId, inc: u64, attach: u32) {
        if self.nodes[n].life != life {
            return;
        }
        let proven = self.p.strength != Strength::Weakest;
        if proven {
            let at = self.nodes[n].fenced.entry(inc).or_insert(0);
            *at = (*at).max(attach.saturating_add(1));
        }
        let now = self.now;
        let how = if proven { receiver::Fence::Proven } else { receiver::Fence::Unproven };
        if let Some(Machine::D(m)) = &mut self.nodes[n].machine {
            m.handle_fence(now, peer, Incarnation(inc), how);
        }
        self.drain(n);
    }

    pub(super) fn revoked(&mut self, n: usize, life: u32, serial: u64) {
        if self.nodes[n].life != life {
            return;
        }
        self.nodes[n].allowed.remove(&serial);
        if let Some(Machine::D(m)) = &mut self.nodes[n].machine {
            m.handle_revoked(Serial(serial));
        }
        self.drain(n);
    }

    // ---- groups ----

    pub(super) fn ballot(&mut self, instance: usize) {
        self.after(50_000, Ev::Ballot { instance });
        let i = &self.instances[instance];
        if !i.up || i.deciding > 0 || i.topo.replica_ranks() < 2 {
            return;
        }
        let nodes = i.nodes.clone();
        let mut keys = BTreeSet::new();
        for node in nodes.iter().map(|&n| &self.nodes[n]) {
            let known = node.opened.keys().chain(&node.refused);
            keys.extend(known.filter(|k| !node.done.contains_key(k)).copied());
        }
        let keys: Vec<RoomKey> = keys.into_iter().collect();
        if keys.is_empty() {
            return;
        }
        let mut agreed: Option<Vec<Vote>> = None;
        let mut ballots = Vec::new();
        for &n in &nodes {
            let ballot = match &self.nodes[n].machine {
                Some(Machine::P(m)) => m.propose(&keys),
                Some(Machine::D(m)) => m.propose(&keys),
                None => return,
            };
            let votes: Vec<Vote> = ballot
                .votes()
                .iter()
                .zip(&keys)
                .map(|(v, k)| if self.nodes[n].refused.contains(k) { Vote::Failed } else { *v })
                .collect();
            agreed = match agreed {
                None => Some(votes),
                Some(a) => combine(&a, &votes),
            };
            ballots.push((n, ballot));
        }
        let agreed = agreed.unwrap_or_default();
        for (k, v) in keys.iter().zip(&agreed) {
            if *v == Vote::Failed {
                for &n in &nodes {
                    let node = &mut self.nodes[n];
                    if node.refused.remove(k) || !node.opened.contains_key(k) {
                        node.done.insert(*k, false);
                    }
                }
            }
        }
        self.instances[instance].deciding = ballots.len();
        for (n, ballot) in ballots {
            self.next_ballot += 1;
            let id = self.next_ballot;
            self.ballots.insert(id, Sealed { ballot: Some(ballot), agreed: agreed.clone() });
            let wait = self.rng.below(30_000);
            let life = self.nodes[n].life;
            self.after(wait, Ev::Decide { node: n, life, ballot: id });
        }
    }

    pub(super) fn decide(&mut self, n: usize, life: u32, id: u64) {
        let Some(mut sealed) = self.ballots.remove(&id) else { return };
        if self.nodes[n].life != life || self.nodes[n].machine.is_none() {
            return;
        }
        let at = self.nodes[n].instance;
        self.instances[at].deciding = self.instances[at].deciding.saturating_sub(1);
        let now = self.now;
        let Some(ballot) = sealed.ballot.take() else { return };
        let applied = match &mut self.nodes[n].machine {
            Some(Machine::P(m)) => m.decide(now, ballot, &sealed.agreed),
            Some(Machine::D(m)) => m.decide(now, ballot, &sealed.agreed),
            None => Ok(()),
        };
        if applied.is_err() {
            self.violation("I22", format!("node {n} could not apply an agreed vector"));
        }
        self.drain(n);
    }

    // ---- the end ----

    fn bank_stats(&mut self, n: usize) {
        if let Some(Machine::D(m)) = &self.nodes[n].machine {
            let s = m.stats();
            self.report.quarantined += s.quarantined_total;
        }
    }

    pub(super) fn final_checks(&mut self) {
        for n in 0..self.nodes.len() {
            self.bank_stats(n);
            let who = name(self.instances[self.nodes[n].instance].prefill, n);
            let mut bad: Vec<(&str, String)> = Vec::new();
            let mem = &self.memories[self.nodes[n].mem];
            match &self.nodes[n].machine {
                None => bad.push(("I4", format!("{who} is down"))),
                Some(Machine::P(m)) => {
                    let s = m.stats();
                    let sources = mem.count(|o| matches!(o, Owner::Source(_)));
                    if s.in_flight != 0 {
                        bad.push(("I4", format!("{who} has {} writes posted", s.in_flight)));
                    }
                    if s.unproven == 0 && s.staged != 0 {
                        bad.push(("leak", format!("{who} keeps {} packed chunks", s.staged)));
                    }
                    if s.unproven == 0 && (s.rooms != 0 || sources != 0) {
                        bad.push(("leak", format!("{who} keeps {} rooms and {sources} sources", s.rooms)));
                    }
                    if s.orphans != 0 || s.tombs > self.p.tombs {
                        bad.push(("I19", format!("{who}: {} orphans, {} tombs", s.orphans, s.tombs)));
                    }
                    if self.unfaulted() && s.link.deaths != 0 {
                        bad.push(("I10", format!("{who} declared {} live peers dead", s.link.deaths)));
                    }
                }
                Some(Machine::D(m)) => {
                    let s = m.stats();
                    let out = mem.count(|o| matches!(o, Owner::Grant(_)));
                    let tree = mem.count(|o| matches!(o, Owner::Tree(_)));
                    if s.rooms != 0 {
                        bad.push(("I4", format!("{who} has {} rooms", s.rooms)));
                    }
                    if out == 0 && s.ring_places != 0 {
                        bad.push(("I18", format!("{who} keeps {} places of its ring", s.ring_places)));
                    }
                    if out != s.quarantine_units as usize || tree != 0 {
                        bad.push((
                            "leak",
                            format!(
                                "{who}: {out} granted, {} quarantined, {tree} in the tree",
                                s.quarantine_units
                            ),
                        ));
                    }
                    if out != 0 && self.p.strength != Strength::Weakest {
                        bad.push(("I5", format!("{who} keeps {out} units though it can fence")));
                    }
                    if self.unfaulted() && s.link.deaths != 0 {
                        bad.push(("I10", format!("{who} declared {} live peers dead", s.link.deaths)));
                    }
                    self.report.quarantine_units += u64::from(s.quarantine_units);
                }
            }
            let open: Vec<RoomKey> = self.nodes[n]
                .opened
                .keys()
                .filter(|k| !self.nodes[n].done.contains_key(k))
                .copied()
                .collect();
            if let Some(key) = open.first() {
                bad.push(("I4", format!("{who}: {} rooms never ended, {key:?} first", open.len())));
            }
            bad.into_iter().for_each(|(rule, what)| self.violation(rule, what));
        }
        self.check_groups();
    }

    fn unfaulted(&self) -> bool {
        let f = self.o.faults;
        !(f.loss || f.delay || f.partition || f.crash)
    }

    /// All ranks of a group saw the same end.
    fn check_groups(&mut self) {
        for i in 0..self.instances.len() {
            let nodes = self.instances[i].nodes.clone();
            let keys: BTreeSet<RoomKey> =
                nodes.iter().flat_map(|&n| self.nodes[n].done.keys().copied()).collect();
            for key in keys {
                let ends: BTreeSet<bool> =
                    nodes.iter().filter_map(|&n| self.nodes[n].done.get(&key).copied()).collect();
                if ends.len() > 1 {
                    self.violation("I3", format!("ranks of instance {i} disagree on {key:?}"));
                }
            }
        }
    }

    pub(super) fn count_release(&mut self, how: How) {
        let at = match how {
            How::Acked => 0,
            How::Revoked => 1,
            How::Fenced | How::Dead => 2,
            How::Unpublished | How::Settled => 3,
        };
        self.report.released[at] += 1;
    }
}

pub(super) fn name(prefill: bool, n: usize) -> String {
    format!("{}{n}", if prefill { "P" } else { "D" })
}
