//! A decode process: grants pages, checks what arrives, and drives a [`Receiver`].

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc::TryRecvError;
use std::time::{Duration, Instant};

use sapwood::backend::region::Region;
use sapwood::backend::transport::control::Control;
use sapwood::backend::transport::lease::LeasePool;
use sapwood::backend::transport::shm::ShmTarget;
use sapwood::backend::transport::tcp::TcpTarget;
use sapwood::backend::transport::{Memory, Revoked, Target, spans_of};
use sapwood::base::Time;
use sapwood::pd::grant::{Committed, GrantPool};
use sapwood::pd::receiver::{Action, Event, Receiver, ReceiverConfig, RecvSpec};
use sapwood::pd::topo::Rank;
use sapwood::pd::{RoomKey, Tag};

use super::shared::{Clock, PAGE_TOKENS, commands, equals, incarnation, layout, prompt, room, say, topology};
use super::{Args, DemoError, Kind};

struct Decode {
    clock: Clock,
    receiver: Receiver,
    control: Control,
    target: Box<dyn Target>,
    pool: LeasePool,
    tokens: BTreeMap<RoomKey, u32>,
    waiting: VecDeque<RoomKey>,
    aborts: Vec<(Time, RoomKey)>,
    revoking: Vec<Tag>,
    mismatches: u64,
    page_bytes: u64,
}

pub(super) fn run(args: &Args) -> Result<(), DemoError> {
    let (inc, layout) = (incarnation(), layout(args.layers, args.pages));
    let bytes = layout.regions[0] as usize;
    let (target, memory): (Box<dyn Target>, Memory) = match args.transport {
        Kind::Tcp => {
            let region = Region::anonymous(bytes).map_err(std::io::Error::other)?;
            let memory = Memory::new(vec![Arc::new(region)]);
            (Box::new(TcpTarget::new(inc, IpAddr::V4(Ipv4Addr::LOCALHOST), memory.clone())?), memory)
        }
        Kind::Shm => {
            let target = ShmTarget::new(inc, bytes)?;
            let memory = target.memory();
            (Box::new(target), memory)
        }
    };
    let control = Control::new(IpAddr::V4(Ipv4Addr::LOCALHOST))?;
    say(&format!("up {}", control.address()));
    let config = ReceiverConfig { revoke: target.caps().revoke, ..ReceiverConfig::default() };
    let (topo, blob) = (topology(args.layers), target.descriptor());
    let receiver = Receiver::new(inc, config, inc.0, topo, Rank::default(), layout.clone(), blob)?;
    let page_bytes = layout.entries.iter().map(|e| e.unit_bytes).sum();
    let mut d = Decode {
        clock: Clock::new(),
        receiver,
        control,
        target,
        pool: LeasePool::new(memory, layout),
        tokens: BTreeMap::new(),
        waiting: VecDeque::new(),
        aborts: Vec::new(),
        revoking: Vec::new(),
        mismatches: 0,
        page_bytes,
    };
    d.serve()
}

impl Decode {
    fn serve(&mut self) -> Result<(), DemoError> {
        let commands = commands();
        let mut stop_at = None;
        loop {
            match commands.try_recv() {
                Ok(words) => match words.first().map(String::as_str) {
                    Some("room") => self.open(&words),
                    Some("exited") => {
                        if let Some(a) = words.get(1).and_then(|w| w.parse::<SocketAddr>().ok()) {
                            let peer = self.control.peer(a);
                            let inc = self.receiver.incarnation_of(peer);
                            self.receiver.handle_exited(self.clock.now(), peer, inc);
                        }
                    }
                    Some("stop") => {
                        self.receiver.stop(self.clock.now());
                        stop_at = Some(Instant::now() + Duration::from_secs(40));
                    }
                    _ => {}
                },
                Err(TryRecvError::Disconnected) if stop_at.is_none() => return Ok(()),
                Err(_) => {}
            }
            self.step();
            if stop_at.is_some_and(|at| Instant::now() > at || self.receiver.is_quiet()) {
                self.report();
                return Ok(());
            }
        }
    }

    fn report(&self) {
        let s = self.receiver.stats();
        let (_, held, out) = self.pool.counts();
        say(&format!(
            "stats acked={} revoked={} fenced={} dead={} other={} quarantined={} quarantine_pages={} mismatches={} leaked={}",
            s.released_acked,
            s.released_revoked,
            s.released_fenced,
            s.released_dead,
            s.released_other,
            s.quarantined_total,
            s.quarantine_units,
            self.mismatches,
            held + out - s.quarantine_units as usize,
        ));
    }

    fn open(&mut self, words: &[String]) {
        let Some((key, tokens)) = room(words) else { return };
        let address = words.get(4).and_then(|w| w.parse::<SocketAddr>().ok());
        let abort = words.get(5).and_then(|w| w.parse::<i64>().ok()).unwrap_or(-1);
        let Some(address) = address else { return };
        let now = self.clock.now();
        let spec = RecvSpec { prompt: prompt(key, tokens), contacts: vec![self.control.peer(address)] };
        if let Err(why) = self.receiver.open(now, key, spec) {
            say(&format!("done {} {} fail {why:?}", key.room, key.epoch));
            return;
        }
        self.tokens.insert(key, tokens);
        self.waiting.push_back(key);
        if abort >= 0 {
            self.aborts.push((now + abort as u64, key));
        }
    }

    fn grant_waiting(&mut self) {
        while let Some(&key) = self.waiting.front() {
            let Some(&tokens) = self.tokens.get(&key) else {
                self.waiting.pop_front();
                continue;
            };
            let want = self.receiver.want(tokens, 0);
            let Ok(pages) = self.pool.reserve(key, &want) else { return };
            self.waiting.pop_front();
            if let Err((_, pages)) = self.receiver.grant(self.clock.now(), key, pages, 0, false) {
                // Never shown to anyone: it goes back the way it came.
                let (mut pages, n) = (pages, want.full as usize);
                if let Some(c) = pages.commit(0..n) {
                    let full = c.destination().full.clone();
                    self.pool.commit(key, c);
                    self.pool.free(&full);
                }
            }
        }
    }

    fn step(&mut self) {
        let mut wait = Duration::from_micros(200);
        while let Some((peer, frame)) = self.control.receive(wait) {
            self.receiver.handle_frame(self.clock.now(), peer, &frame);
            wait = Duration::ZERO;
        }
        let now = self.clock.now();
        let (due, later) = self.aborts.drain(..).partition(|a| a.0 <= now);
        self.aborts = later;
        let due: Vec<(Time, RoomKey)> = due;
        for (_, key) in due {
            // A room that is over by now stays as it ended.
            let _ = self.receiver.abort(now, key);
        }
        if self.receiver.poll_timeout().is_some_and(|t| t <= now) {
            self.receiver.handle_timeout(now);
        }
        self.grant_waiting();
        for tag in std::mem::take(&mut self.revoking) {
            self.revoke(tag);
        }
        while let Some((to, frame)) = self.receiver.poll_transmit() {
            self.control.send(to, frame);
        }
        while let Some(action) = self.receiver.poll_action() {
            match action {
                Action::Allow { tag, dest } => {
                    if let Err(e) = self.target.allow(tag, spans_of(self.pool.layout(), &dest)) {
                        eprintln!("pd-demo: {e}");
                    }
                }
                Action::Revoke { tag } => self.revoke(tag),
                Action::Forget { tag } => self.target.forget(tag),
                Action::Fence { peer, inc, attach } => {
                    let how = self.target.fence(inc, attach);
                    self.receiver.handle_fence(now, peer, inc, how);
                }
            }
        }
        while let Some(event) = self.receiver.poll_event() {
            self.event(event);
        }
    }

    fn revoke(&mut self, tag: Tag) {
        match self.target.revoke(tag) {
            Revoked::Proven => self.receiver.handle_revoked(tag.serial()),
            Revoked::Pending => self.revoking.push(tag),
        }
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Done { key, outcome } => {
                let tokens = self.tokens.remove(&key).unwrap_or(0);
                match outcome {
                    Ok(arrived) => {
                        let bytes = arrived.pages.destination().full.len() as u64 * self.page_bytes;
                        self.check(key, tokens, arrived.pages);
                        say(&format!("done {} {} ok {bytes}", key.room, key.epoch));
                    }
                    Err(why) => {
                        let text = why.to_string().replace(' ', "_");
                        say(&format!("done {} {} fail {text}", key.room, key.epoch));
                    }
                }
            }
            Event::Released { key, pages } => self.pool.release(key, pages),
            Event::Unhealthy(full) => eprintln!("pd-demo: quarantine full: {full}"),
        }
    }

    fn check(&mut self, key: RoomKey, tokens: u32, pages: Committed) {
        let full = pages.destination().full.clone();
        if full.len() as u32 != tokens.div_ceil(PAGE_TOKENS) {
            self.mismatches += 1;
        }
        self.pool.commit(key, pages);
        for (pos, &page) in (0u32..).zip(&full) {
            let mut good = true;
            let read = self.pool.read(page, |e, bytes| good &= equals(key, e, pos, bytes));
            self.mismatches += u64::from(!read || !good);
        }
        self.pool.free(&full);
    }
}
