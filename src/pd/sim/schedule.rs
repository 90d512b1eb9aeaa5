//! The schedulers on both sides: requests, pages, producers, aborts. They behave as an embedder should, at
//! random times.

use super::memory::{Owner, pages, window_first};
use super::nodes::{Machine, name};
use super::{Ev, Faults, World};
use crate::pd::grant::{Destination, Granted, Released, Want};
use crate::pd::ids::{RoomKey, Serial};
use crate::pd::layout::Component;
use crate::pd::receiver::{self, Arrived, RecvSpec};
use crate::pd::sender::{self, SendSpec, Tail};
use crate::pd::wire::Prompt;

#[derive(Debug, Clone)]
pub(super) struct Request {
    pub(super) p_inst: usize,
    pub(super) tokens: u32,
    pub(super) prefix: u32,
    pub(super) restore: bool,
}

/// Source pages of a room on one prefill node.
#[derive(Debug, Clone, Default)]
pub(super) struct Sources {
    pub(super) full: Vec<u32>,
    window: Vec<u32>,
    state: Vec<u32>,
    /// Pages offered before the producer of the rest has finished.
    early: u32,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Clone)]
pub(super) enum Step {
    NewRequest,
    PrefillOpen { n: usize, life: u32, key: RoomKey },
    PrefillRun { n: usize, life: u32, key: RoomKey },
    PrefillReady { n: usize, life: u32, key: RoomKey },
    PrefillAbort { n: usize, life: u32, key: RoomKey },
    DecodeOpen { n: usize, life: u32, key: RoomKey },
    DecodeGrant { n: usize, life: u32, key: RoomKey, tries: u32 },
    Restored { n: usize, life: u32, key: RoomKey },
    DecodeAbort { n: usize, life: u32, key: RoomKey },
    FreeTree { n: usize, life: u32, units: Vec<(u8, u32)> },
}

const EVENT: u64 = 1;

impl World {
    pub(super) fn scheduler(&mut self, step: Step) {
        match step {
            Step::NewRequest => self.new_request(),
            Step::PrefillOpen { n, life, key } if self.is(n, life) => self.prefill_open(n, key),
            Step::PrefillRun { n, life, key } if self.is(n, life) => self.prefill_run(n, key),
            Step::PrefillReady { n, life, key } if self.is(n, life) => self.prefill_ready(n, key),
            Step::PrefillAbort { n, life, key } if self.is(n, life) => {
                let now = self.now;
                if let Some(Machine::P(m)) = &mut self.nodes[n].machine
                    && m.abort(now, key).is_ok()
                {
                    self.say(&name(true, n), || format!("gives up {key:?}"));
                }
                self.drain(n);
            }
            Step::DecodeOpen { n, life, key } if self.is(n, life) => self.decode_open(n, key),
            Step::DecodeGrant { n, life, key, tries } if self.is(n, life) => self.decode_grant(n, key, tries),
            Step::Restored { n, life, key } if self.is(n, life) => self.restored(n, key),
            Step::DecodeAbort { n, life, key } if self.is(n, life) => self.decode_abort(n, key),
            Step::FreeTree { n, life, units } if self.is(n, life) => {
                for (c, u) in units {
                    let c = [Component::Full, Component::Window, Component::State][usize::from(c)];
                    self.reuse(n, c, &[u]);
                }
            }
            _ => {}
        }
    }

    fn is(&self, n: usize, life: u32) -> bool {
        self.nodes[n].life == life && self.nodes[n].machine.is_some()
    }

    /// The page goes back to the pool, and the next user overwrites it.
    fn reuse(&mut self, n: usize, c: Component, units: &[u32]) {
        let noise = self.rng.next();
        let mem = &mut self.memories[self.nodes[n].mem];
        mem.set_owner(c, units, Owner::Free);
        mem.scramble(c, units, noise);
    }

    fn new_request(&mut self) {
        if !self.calm {
            let lo = if self.o.faults == Faults::NONE { 1_000_000 } else { 50_000 };
            let wait = self.rng.log(lo, 2_000_000);
            self.after(wait, Ev::Schedule(Step::NewRequest));
        } else {
            return;
        }
        let of = |prefill: bool, w: &World| -> Vec<usize> {
            (0..w.instances.len()).filter(|&i| w.instances[i].prefill == prefill).collect()
        };
        let (ps, ds) = (of(true, self), of(false, self));
        let p_inst = ps[self.rng.below(ps.len() as u64) as usize];
        let d_inst = ds[self.rng.below(ds.len() as u64) as usize];
        // Few rooms, so that numbers are reused while their old lives still drain.
        let calm = self.o.faults == Faults::NONE;
        let room = if calm { self.report.requests } else { self.rng.below(6) };
        let epoch = self.epochs.entry(room).or_insert(0);
        *epoch += 1;
        let key = RoomKey { room, epoch: *epoch };
        let tokens = self.rng.within(1, 9) as u32;
        let prefix =
            if self.rng.chance(50) { 0 } else { self.rng.below(u64::from(pages(tokens)) + 1) as u32 };
        let restore = prefix > 0 && self.rng.chance(50);
        self.requests.insert(key, Request { p_inst, tokens, prefix, restore });
        self.report.requests += 1;
        self.say("router", || {
            format!("{key:?}: {tokens} tokens from instance {p_inst} to {d_inst}, prefix {prefix}")
        });
        let spread = self.rng.log(1_000, 3_000_000);
        let never = !calm && self.rng.chance(3);
        for n in self.instances[p_inst].nodes.clone() {
            if never {
                break;
            }
            // Now and then the prefill side queues for long, and opens after the other side has given up.
            let late = if !calm && self.rng.chance(15) { self.rng.log(1_000_000, 12_000_000) } else { 0 };
            let (life, wait) = (self.nodes[n].life, late + self.rng.below(spread));
            self.after(wait, Ev::Schedule(Step::PrefillOpen { n, life, key }));
        }
        for n in self.instances[d_inst].nodes.clone() {
            let (life, wait) = (self.nodes[n].life, self.rng.below(spread));
            self.after(wait, Ev::Schedule(Step::DecodeOpen { n, life, key }));
        }
        if self.rng.chance(self.p.abort) {
            let nodes = self.instances[d_inst].nodes.clone();
            let n = nodes[self.rng.below(nodes.len() as u64) as usize];
            let (life, wait) = (self.nodes[n].life, self.rng.log(1_000, 5_000_000));
            self.after(wait, Ev::Schedule(Step::DecodeAbort { n, life, key }));
        }
        if self.rng.chance(self.p.abort / 2) {
            let nodes = self.instances[p_inst].nodes.clone();
            let n = nodes[self.rng.below(nodes.len() as u64) as usize];
            let (life, wait) = (self.nodes[n].life, self.rng.log(1_000, 5_000_000));
            self.after(wait, Ev::Schedule(Step::PrefillAbort { n, life, key }));
        }
    }

    fn prompt(&self, key: RoomKey) -> Prompt {
        let tokens = self.requests.get(&key).map_or(0, |r| r.tokens);
        Prompt { tokens, digest: key.room << 32 | u64::from(key.epoch) }
    }

    // ---- prefill ----

    fn prefill_open(&mut self, n: usize, key: RoomKey) {
        if self.nodes[n].done.contains_key(&key) {
            return;
        }
        let tokens = self.requests[&key].tokens;
        let prompt = self.prompt(key);
        let owner = Owner::Source(key);
        let (total, first) = (pages(tokens), window_first(0, tokens));
        let mem = &mut self.memories[self.nodes[n].mem];
        let mut s = Sources::default();
        let mut lists = [(Component::Full, total), (Component::Window, total - first), (Component::State, 1)]
            .map(|(c, k)| if mem.has(c) { (c, mem.take(c, k, owner)) } else { (c, Some(Vec::new())) });
        // Ranks without paged attention layers still follow the prompt page by page.
        if !mem.has(Component::Full) {
            lists[0].1 = Some(vec![0; total as usize]);
        }
        let now = self.now;
        let enough = lists.iter().all(|l| l.1.is_some());
        let opened = enough
            && match &mut self.nodes[n].machine {
                Some(Machine::P(m)) => m.open(now, key, SendSpec { prompt }).is_ok(),
                _ => false,
            };
        if !opened {
            for (c, units) in lists {
                if self.memories[self.nodes[n].mem].has(c) {
                    self.reuse(n, c, &units.unwrap_or_default());
                }
            }
            self.nodes[n].refused.insert(key);
            self.say(&name(true, n), || format!("cannot open {key:?}"));
            self.drain(n);
            return;
        }
        let [(_, full), (_, window), (_, state)] = lists;
        (s.full, s.window, s.state) =
            (full.unwrap_or_default(), window.unwrap_or_default(), state.unwrap_or_default());
        s.early = self.rng.below(u64::from(total) + 1) as u32;
        self.say(&name(true, n), || format!("opens {key:?}, sources {:?}", s.full));
        self.nodes[n].opened.insert(key, now);
        self.nodes[n].sources.insert(key, s);
        let (life, wait) = (self.nodes[n].life, self.rng.log(100, 2_000_000));
        self.after(wait, Ev::Schedule(Step::PrefillRun { n, life, key }));
        self.drain(n);
    }

    fn prefill_run(&mut self, n: usize, key: RoomKey) {
        let Some(s) = self.nodes[n].sources.get(&key).cloned() else { return };
        let early = s.early as usize;
        let now = self.now;
        self.fill(n, key, Component::Full, &s.full[..early], 0);
        if let Some(Machine::P(m)) = &mut self.nodes[n].machine {
            let _ = m.offer(now, key, &s.full[..early], None);
            // The forward pass of these has been queued, not run.
            let _ = m.offer(now, key, &s.full[early..], Some(EVENT));
            let tokens = self.requests[&key].tokens;
            let tail = Tail {
                window: s.window.clone(),
                window_first: window_first(0, tokens),
                state: s.state.clone(),
                ring: None,
                aux: key.epoch.to_le_bytes().to_vec(),
                checksum: 0,
            };
            let _ = m.finish(now, key, tail);
        }
        let (life, wait) = (self.nodes[n].life, self.rng.log(100, 1_000_000));
        self.after(wait, Ev::Schedule(Step::PrefillReady { n, life, key }));
        self.drain(n);
    }

    fn fill(&mut self, n: usize, key: RoomKey, c: Component, units: &[u32], first: u32) {
        let mem = &mut self.memories[self.nodes[n].mem];
        if mem.has(c) {
            mem.fill(key, c, units, first);
        }
    }

    fn prefill_ready(&mut self, n: usize, key: RoomKey) {
        // Given back already: the producer of a dead room must not write into pages of others.
        let Some(s) = self.nodes[n].sources.get(&key).cloned() else { return };
        let tokens = self.requests[&key].tokens;
        self.fill(n, key, Component::Full, &s.full[s.early as usize..], s.early);
        self.fill(n, key, Component::Window, &s.window, window_first(0, tokens));
        self.fill(n, key, Component::State, &s.state, 0);
        let now = self.now;
        if let Some(Machine::P(m)) = &mut self.nodes[n].machine {
            m.handle_event(now, key, EVENT);
        }
        self.drain(n);
    }

    pub(super) fn sender_event(&mut self, n: usize, e: sender::Event) {
        match e {
            sender::Event::Done { key, outcome } => {
                self.say(&name(true, n), || format!("{key:?} ends: {outcome:?}"));
                if let Err(reason) = outcome {
                    self.check_sender_reason(self.nodes[n].inc, key, reason);
                }
                if self.nodes[n].done.insert(key, outcome.is_ok()).is_some() {
                    self.violation("I3", format!("node {n} ended {key:?} twice"));
                }
            }
            sender::Event::Unpin { key } => {
                self.say(&name(true, n), || format!("{key:?} gives its sources back"));
                let Some(s) = self.nodes[n].sources.remove(&key) else {
                    self.violation("I3", format!("node {n} unpinned {key:?} twice"));
                    return;
                };
                for (c, units) in
                    [(Component::Full, s.full), (Component::Window, s.window), (Component::State, s.state)]
                {
                    if self.memories[self.nodes[n].mem].has(c) {
                        self.reuse(n, c, &units);
                    }
                }
            }
        }
    }

    // ---- decode ----

    fn decode_open(&mut self, n: usize, key: RoomKey) {
        if self.nodes[n].done.contains_key(&key) {
            return;
        }
        let spec =
            RecvSpec { prompt: self.prompt(key), contacts: self.contacts_of(n, self.requests[&key].p_inst) };
        let now = self.now;
        let opened = match &mut self.nodes[n].machine {
            Some(Machine::D(m)) => m.open(now, key, spec),
            _ => Err(receiver::Refused::NoRoom),
        };
        self.say(&name(false, n), || format!("opens {key:?}: {opened:?}"));
        if opened.is_err() {
            self.nodes[n].refused.insert(key);
        } else {
            self.nodes[n].opened.insert(key, now);
            let (life, wait) = (self.nodes[n].life, self.rng.log(100, 1_000_000));
            self.after(wait, Ev::Schedule(Step::DecodeGrant { n, life, key, tries: 0 }));
        }
        self.drain(n);
    }

    fn decode_grant(&mut self, n: usize, key: RoomKey, tries: u32) {
        if self.nodes[n].done.contains_key(&key) {
            return;
        }
        let r = self.requests[&key].clone();
        let now = self.now;
        let Some(Machine::D(m)) = &self.nodes[n].machine else { return };
        let want = m.want(r.tokens, r.prefix);
        let asked =
            [(Component::Full, want.full), (Component::Window, want.window), (Component::State, want.state)];
        let hold = Owner::Grant(Serial(0));
        let mem = &mut self.memories[self.nodes[n].mem];
        let lists = asked.map(|(c, k)| (c, if k > 0 { mem.take(c, k, hold) } else { Some(Vec::new()) }));
        if lists.iter().any(|l| l.1.is_none()) {
            for (c, units) in lists {
                mem.set_owner(c, &units.unwrap_or_default(), Owner::Free);
            }
            let life = self.nodes[n].life;
            let step = if tries < 40 {
                Step::DecodeGrant { n, life, key, tries: tries + 1 }
            } else {
                Step::DecodeAbort { n, life, key }
            };
            self.after(250_000, Ev::Schedule(step));
            return;
        }
        let [(_, full), (_, window), (_, state)] = lists;
        let dest = Destination {
            full: full.unwrap_or_default(),
            window: window.unwrap_or_default(),
            state: state.unwrap_or_default(),
            ring: Vec::new(),
        };
        let Some(Machine::D(m)) = &mut self.nodes[n].machine else { return };
        match m.grant(now, key, Granted::new(dest.clone()), r.prefix, r.restore) {
            Ok(serial) => {
                self.own(n, &dest, Owner::Grant(serial));
                self.nodes[n].granted.insert(key, serial);
                self.nodes[n].prefix.insert(key, r.prefix);
                self.say(&name(false, n), || format!("grants {serial:?} to {key:?}: {dest:?}"));
                if r.restore {
                    let (life, wait) = (self.nodes[n].life, self.rng.log(1_000, 4_000_000));
                    self.after(wait, Ev::Schedule(Step::Restored { n, life, key }));
                }
            }
            Err(_) => {
                self.own(n, &dest, Owner::Free);
                let life = self.nodes[n].life;
                self.after(1, Ev::Schedule(Step::DecodeAbort { n, life, key }));
            }
        }
        self.drain(n);
    }

    fn own(&mut self, n: usize, d: &Destination, owner: Owner) {
        let mem = &mut self.memories[self.nodes[n].mem];
        for (c, units) in
            [(Component::Full, &d.full), (Component::Window, &d.window), (Component::State, &d.state)]
        {
            mem.set_owner(c, units, owner);
        }
    }

    fn restored(&mut self, n: usize, key: RoomKey) {
        let now = self.now;
        let prefix = self.nodes[n].prefix.get(&key).copied().unwrap_or(0);
        if self.nodes[n].done.contains_key(&key) {
            return;
        }
        let breaks = self.rng.chance(40);
        let from = self.rng.below(u64::from(prefix.max(1))) as u32;
        let Some(Machine::D(m)) = &mut self.nodes[n].machine else { return };
        if !breaks {
            m.handle_restored(now, key);
            self.drain(n);
            return;
        }
        let gap = m.want_topup(key, from).and_then(|want| self.take_gap(n, want));
        let given = gap.clone().map(Granted::new);
        let Some(Machine::D(m)) = &mut self.nodes[n].machine else { return };
        match (m.handle_restore_failed(now, key, from, given), gap) {
            (Ok(()), Some(d)) => {
                self.nodes[n].prefix.insert(key, from);
                self.report.topups += 1;
                self.report.window_topups += u64::from(!d.window.is_empty());
                let serial = self.serial_of(n, key);
                self.own(n, &d, Owner::Grant(serial));
                self.say(&name(false, n), || {
                    format!("prefix of {key:?} broke at page {from}, tops up {d:?}")
                });
            }
            (Ok(()), None) => {}
            (Err(_), gap) => {
                self.own(n, &gap.unwrap_or_default(), Owner::Free);
                if let Some(Machine::D(m)) = &mut self.nodes[n].machine {
                    let _ = m.handle_restore_failed(now, key, from, None);
                }
            }
        }
        self.drain(n);
    }

    /// Pages for a gap, all or none.
    fn take_gap(&mut self, n: usize, want: Want) -> Option<Destination> {
        let hold = Owner::Grant(Serial(u64::MAX));
        let mem = &mut self.memories[self.nodes[n].mem];
        let full = mem.take(Component::Full, want.full, hold)?;
        let Some(window) = mem.take(Component::Window, want.window, hold) else {
            mem.set_owner(Component::Full, &full, Owner::Free);
            return None;
        };
        Some(Destination { full, window, ..Destination::default() })
    }

    fn serial_of(&self, n: usize, key: RoomKey) -> Serial {
        match &self.nodes[n].machine {
            Some(Machine::D(m)) => m.serial_of(key).unwrap_or_default(),
            _ => Serial(0),
        }
    }

    fn decode_abort(&mut self, n: usize, key: RoomKey) {
        let now = self.now;
        if let Some(Machine::D(m)) = &mut self.nodes[n].machine
            && m.abort(now, key).is_ok()
        {
            self.say(&name(false, n), || format!("aborts {key:?}"));
        }
        self.drain(n);
    }

    pub(super) fn receiver_event(&mut self, n: usize, e: receiver::Event) {
        match e {
            receiver::Event::Done { key, outcome } => {
                let text = outcome.as_ref().map(|_| ()).map_err(|r| *r);
                self.say(&name(false, n), || format!("{key:?} ends: {text:?}"));
                if self.nodes[n].done.insert(key, outcome.is_ok()).is_some() {
                    self.violation("I3", format!("node {n} ended {key:?} twice"));
                }
                match outcome {
                    Ok(arrived) => self.arrived(n, key, arrived),
                    Err(reason) => {
                        self.report.failed += 1;
                        self.check_receiver_reason(n, key, reason);
                    }
                }
            }
            receiver::Event::Released { key, pages } => self.released(n, key, pages),
            receiver::Event::Unhealthy(full) => self.say(&name(false, n), || format!("unhealthy: {full}")),
        }
    }

    fn released(&mut self, n: usize, key: RoomKey, pages: Released) {
        self.count_release(pages.how());
        self.end_grant(n, pages.serial());
        self.say(&name(false, n), || format!("{key:?} gives {:?} back: {:?}", pages.serial(), pages.how()));
        let d = pages.into_destination();
        for (c, units) in
            [(Component::Full, d.full), (Component::Window, d.window), (Component::State, d.state)]
        {
            if self.memories[self.nodes[n].mem].has(c) {
                self.reuse(n, c, &units);
            }
        }
    }

    fn end_grant(&mut self, n: usize, serial: Serial) {
        self.nodes[n].ended.insert(serial);
        self.memories[self.nodes[n].mem].ring.retain(|_, s| *s != serial);
    }

    fn arrived(&mut self, n: usize, key: RoomKey, a: Arrived) {
        self.report.arrived += 1;
        if let Some(serial) = self.nodes[n].granted.get(&key).copied() {
            self.end_grant(n, serial);
        }
        let tokens = self.requests[&key].tokens;
        let prefix = self.nodes[n].prefix.get(&key).copied().unwrap_or(0);
        if a.aux != key.epoch.to_le_bytes() {
            self.violation("I11", format!("node {n}: auxiliary row of {key:?} is another one's"));
        }
        let d = a.pages.into_destination();
        let mem = &self.memories[self.nodes[n].mem];
        let lists = [
            (Component::Full, &d.full, prefix),
            (Component::Window, &d.window, window_first(prefix, tokens)),
            (Component::State, &d.state, 0),
        ];
        let wrong = lists.iter().find_map(|(c, units, first)| mem.verify(key, tokens, *c, units, *first));
        if let Some(what) = wrong {
            self.violation("I12", format!("node {n} committed {key:?} with a wrong cell: {what}"));
        }
        self.own(n, &d, Owner::Tree(key));
        let units: Vec<(u8, u32)> = [&d.full, &d.window, &d.state]
            .into_iter()
            .enumerate()
            .flat_map(|(c, l)| l.iter().map(move |&u| (c as u8, u)))
            .collect();
        let (life, wait) = (self.nodes[n].life, self.rng.log(1_000, 3_000_000));
        self.after(wait, Ev::Schedule(Step::FreeTree { n, life, units }));
    }
}
