//! Whole clusters in one thread, under a seeded schedule of faults: several prefill and decode instances,
//! frames that are lost, doubled, reordered and delayed, one-way partitions, crashes and restarts, and
//! writes whose landing has nothing to do with when or how they are reported.
//!
//! The oracle watches memory: a landing on a page that changed its owner, a read of a source that was
//! given back, a committed page with a wrong cell, a room that ends twice or never, a page that is nowhere.
//! [`run`] is a function of its arguments; a failing seed is a story to be read ([`Report::story`]).

mod memory;
mod nodes;
mod reasons;
mod schedule;
mod staging;
mod transport;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use crate::base::{Digest, Time};
use crate::pd::ids::{PeerId, RoomKey};
use crate::pd::plant::Plant;
use memory::{Memory, Model};
use nodes::{Instance, Node};
use schedule::Request;

/// What the transport of a run can do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Strength {
    /// No cancel, no revoke, no fence: every doubt ends in quarantine.
    Weakest,
    /// Connections can be fenced.
    Fencing,
    /// The target mediates: grants can be revoked, connections fenced.
    Strongest,
}

/// Which kinds of faults a run may have. All on by default.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Faults {
    /// Frames lost.
    pub loss: bool,
    /// Frames doubled.
    pub duplication: bool,
    /// Long delays (up to a minute) and so reordering.
    pub delay: bool,
    /// One-way partitions.
    pub partition: bool,
    /// Crashes and restarts of whole instances.
    pub crash: bool,
    /// Writes that fail, stall, or land after they were reported failed.
    pub transport: bool,
    /// Aborts by the schedulers.
    pub abort: bool,
    /// Garbage on the control socket.
    pub garbage: bool,
}

impl Faults {
    /// Everything.
    pub const ALL: Faults = Faults {
        loss: true,
        duplication: true,
        delay: true,
        partition: true,
        crash: true,
        transport: true,
        abort: true,
        garbage: true,
    };
    /// Nothing.
    pub const NONE: Faults = Faults {
        loss: false,
        duplication: false,
        delay: false,
        partition: false,
        crash: false,
        transport: false,
        abort: false,
        garbage: false,
    };
}

/// One run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// Everything random comes from it.
    pub seed: u64,
    /// Faults allowed.
    pub faults: Faults,
    /// Transport; `None` draws one.
    pub strength: Option<Strength>,
    /// A bug to plant.
    pub plant: Option<Plant>,
    /// Keep the story.
    pub story: bool,
}

impl Options {
    /// Everything on, nothing planted.
    #[must_use]
    pub fn new(seed: u64) -> Options {
        Options { seed, faults: Faults::ALL, strength: None, plant: None, story: false }
    }
}

/// What happened.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Broken rules, with the time. Empty is good.
    pub violations: Vec<String>,
    /// One line per event, if asked for.
    pub story: Vec<String>,
    /// Requests made.
    pub requests: u64,
    /// Rooms that arrived whole, counted per decode rank.
    pub arrived: u64,
    /// Rooms that failed, counted per decode rank.
    pub failed: u64,
    /// Grants by the rung they left on: acked, revoked, fenced, other.
    pub released: [u64; 4],
    /// Grants that were quarantined.
    pub quarantined: u64,
    /// Units still in quarantine at the end.
    pub quarantine_units: u64,
    /// Frames delivered.
    pub frames: u64,
    /// Writes landed, whole or in part.
    pub landings: u64,
    /// Prefixes that broke and were topped up.
    pub topups: u64,
    /// Of them those that reached into the window.
    pub window_topups: u64,
    /// Packed chunks scattered.
    pub scatters: u64,
    /// Digest of everything that happened: equal runs have equal digests.
    pub digest: u64,
}

/// Random numbers of the run (splitmix64).
#[derive(Clone, Debug)]
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(n.max(1))) >> 64) as u64
    }

    fn within(&mut self, lo: u64, hi: u64) -> u64 {
        lo + self.below(hi.saturating_sub(lo) + 1)
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// Log-uniform in `lo..hi`.
    fn log(&mut self, lo: u64, hi: u64) -> u64 {
        let bits = |v: u64| 63 - v.max(1).leading_zeros() as u64;
        let top = 1u64 << self.within(bits(lo), bits(hi));
        self.within(lo.max(top / 2), hi.min(top).max(lo))
    }
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Ev {
    Frame {
        to: PeerId,
        from: PeerId,
        bytes: Vec<u8>,
    },
    /// A node's clock is due.
    Timer {
        node: usize,
        life: u32,
    },
    Land {
        write: u64,
        part: u32,
    },
    Complete {
        write: u64,
        how: u8,
    },
    /// A gather or a scatter inside one rank is done.
    Local {
        node: usize,
        life: u32,
        id: u64,
    },
    Fence {
        node: usize,
        life: u32,
        peer: PeerId,
        inc: u64,
        attach: u32,
    },
    Revoke {
        node: usize,
        life: u32,
        serial: u64,
    },
    Schedule(schedule::Step),
    Ballot {
        instance: usize,
    },
    Decide {
        node: usize,
        life: u32,
        ballot: u64,
    },
    Crash {
        instance: usize,
    },
    Restart {
        instance: usize,
    },
    Cut {
        from: PeerId,
        to: PeerId,
        on: bool,
    },
    CheckDead {
        instance: usize,
        life: u32,
    },
    Garbage,
}

/// Parameters drawn for a seed.
#[derive(Clone, Debug)]
struct Params {
    loss: u64,
    dup: u64,
    delay_max: u64,
    strength: Strength,
    write_fail: u64,
    abort: u64,
    model: Model,
    pages: u32,
    slots: u32,
    tombs: usize,
    in_flight: usize,
    quarantine_units_max: u32,
    /// Bytes of the staging rings; 0: no staging.
    ring: u64,
    buffers: u32,
}

struct World {
    o: Options,
    rng: Rng,
    p: Params,
    now: Time,
    seq: u64,
    queue: BinaryHeap<Reverse<(Time, u64, Ev)>>,
    nodes: Vec<Node>,
    instances: Vec<Instance>,
    memories: Vec<Memory>,
    writes: BTreeMap<u64, transport::Write>,
    next_write: u64,
    locals: BTreeMap<u64, staging::Local>,
    reasons: reasons::Reasons,
    requests: BTreeMap<RoomKey, Request>,
    epochs: BTreeMap<u64, u32>,
    ballots: BTreeMap<u64, nodes::Sealed>,
    next_ballot: u64,
    cuts: BTreeSet<(PeerId, PeerId)>,
    old_frames: Vec<(PeerId, PeerId, Vec<u8>)>,
    calm: bool,
    report: Report,
    digest: Digest,
}

/// How long faults and requests go on, and how long the calm after them may take to settle everything.
const STORM_US: u64 = 30_000_000;
const CALM_US: u64 = 150_000_000;

/// Runs one seed to its end.
#[must_use]
pub fn run(o: &Options) -> Report {
    let mut w = World::new(*o);
    w.start();
    let storm_end = Time(STORM_US);
    let end = Time(STORM_US + CALM_US);
    while let Some(Reverse((at, _, _))) = w.queue.peek() {
        if *at > end {
            break;
        }
        let Some(Reverse((at, _, ev))) = w.queue.pop() else { break };
        w.now = at;
        if !w.calm && at >= storm_end {
            w.calm_down();
        }
        w.step(ev);
        if w.report.violations.len() >= 3 {
            break;
        }
    }
    if w.report.violations.is_empty() {
        w.now = end;
        w.final_checks();
    }
    w.report.digest = w.digest.value();
    w.report
}

/// Looks for the fewest kinds of faults with which the seed still fails, by leaving one out at a time.
#[must_use]
pub fn shrink(o: &Options) -> Options {
    let mut best = *o;
    let switches: [fn(&mut Faults) -> &mut bool; 8] = [
        |f| &mut f.garbage,
        |f| &mut f.partition,
        |f| &mut f.duplication,
        |f| &mut f.crash,
        |f| &mut f.loss,
        |f| &mut f.delay,
        |f| &mut f.abort,
        |f| &mut f.transport,
    ];
    for s in switches {
        let mut less = best;
        *s(&mut less.faults) = false;
        if !run(&less).violations.is_empty() {
            best = less;
        }
    }
    best
}

impl World {
    fn say(&mut self, who: &str, what: impl FnOnce() -> String) {
        if self.o.story {
            let t = self.now.0;
            self.report.story.push(format!("{:>4}.{:06}  {who:<6} {}", t / 1_000_000, t % 1_000_000, what()));
        }
    }

    fn violation(&mut self, rule: &str, what: String) {
        let line = format!("{rule} at {:?}: {what}", self.now);
        self.say("ORACLE", || line.clone());
        self.report.violations.push(line);
    }

    fn at(&mut self, at: Time, ev: Ev) {
        self.seq += 1;
        self.queue.push(Reverse((at, self.seq, ev)));
    }

    fn after(&mut self, us: u64, ev: Ev) {
        self.at(self.now + us, ev);
    }

    fn note(&mut self, word: u64) {
        self.digest.mix(self.now.0);
        self.digest.mix(word);
    }

    /// Puts a frame on the way.
    fn post(&mut self, from: PeerId, to: PeerId, bytes: Vec<u8>) {
        self.watch_reason(from, &bytes);
        let cut = self.cuts.contains(&(from, to));
        if cut || (!self.calm && self.rng.chance(self.p.loss)) {
            return;
        }
        let copies = if !self.calm && self.rng.chance(self.p.dup) { 2 } else { 1 };
        for _ in 0..copies {
            let max = if self.calm || !self.rng.chance(10) {
                20_000.min(self.p.delay_max)
            } else {
                self.p.delay_max
            };
            let delay = self.rng.log(100, max);
            self.after(delay, Ev::Frame { to, from, bytes: bytes.clone() });
        }
        // Frames that come back much later. A destination is the most dangerous of them.
        const METADATA: u8 = 4;
        let keep = if bytes.get(6) == Some(&METADATA) { 30 } else { 1 };
        if self.o.faults.garbage && self.rng.chance(keep) {
            if self.old_frames.len() < 256 {
                self.old_frames.push((from, to, bytes));
            } else {
                let i = self.rng.below(256) as usize;
                self.old_frames[i] = (from, to, bytes);
            }
        }
    }

    /// Bytes that nobody sent, or that were sent long ago, perhaps to another life.
    fn garbage(&mut self) {
        let n = self.nodes.len() as u64;
        let (from, to) = (PeerId(self.rng.below(n) as u32), PeerId(self.rng.below(n) as u32));
        if self.rng.chance(50) && !self.old_frames.is_empty() {
            let i = self.rng.below(self.old_frames.len() as u64) as usize;
            let (from, to, bytes) = self.old_frames[i].clone();
            self.after(1, Ev::Frame { to, from, bytes });
        } else {
            let len = self.rng.below(200) as usize;
            let bytes: Vec<u8> = (0..len).map(|_| self.rng.next() as u8).collect();
            self.after(1, Ev::Frame { to, from, bytes });
        }
        if !self.calm {
            let wait = self.rng.within(50_000, 2_000_000);
            self.after(wait, Ev::Garbage);
        }
    }

    fn calm_down(&mut self) {
        self.calm = true;
        self.cuts.clear();
        self.say("world", || "faults stop".into());
        for i in 0..self.instances.len() {
            if !self.instances[i].up {
                self.after(1, Ev::Restart { instance: i });
            }
        }
    }

    fn step(&mut self, ev: Ev) {
        match ev {
            Ev::Frame { to, from, bytes } => self.deliver(to, from, &bytes),
            Ev::Timer { node, life } => self.timer(node, life),
            Ev::Land { write, part } => self.land(write, part),
            Ev::Complete { write, how } => self.complete_write(write, how),
            Ev::Local { node, life, id } => self.local_copy(node, life, id),
            Ev::Fence { node, life, peer, inc, attach } => self.fence(node, life, peer, inc, attach),
            Ev::Revoke { node, life, serial } => self.revoked(node, life, serial),
            Ev::Schedule(step) => self.scheduler(step),
            Ev::Ballot { instance } => self.ballot(instance),
            Ev::Decide { node, life, ballot } => self.decide(node, life, ballot),
            Ev::Crash { instance } => self.crash(instance),
            Ev::Restart { instance } => self.restart(instance),
            Ev::Cut { from, to, on } => {
                if on && !self.calm {
                    self.say("net", || format!("{from:?} cannot reach {to:?}"));
                    self.cuts.insert((from, to));
                } else {
                    self.cuts.remove(&(from, to));
                }
            }
            Ev::CheckDead { instance, life } => self.check_dead(instance, life),
            Ev::Garbage => self.garbage(),
        }
    }
}
