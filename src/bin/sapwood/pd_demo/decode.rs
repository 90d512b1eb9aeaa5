//! A decode process: grants pages of its cache, checks what arrives, and drives a [`Receiver`].

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::mpsc::TryRecvError;
use std::time::{Duration, Instant};

use sapwood::backend::device::SoftDevice;
use sapwood::backend::region::Sharing;
use sapwood::backend::transport::control::Control;
use sapwood::backend::transport::shm::ShmTarget;
use sapwood::backend::transport::tcp::TcpTarget;
use sapwood::backend::transport::{Memory, Revoked, Target, spans_of};
use sapwood::base::{Fence, NamespaceId, Tier, Time};
use sapwood::engine::CacheError;
use sapwood::engine::remote::{DecodeCache, Restore};
use sapwood::pd::grant::{Committed, GrantPool};
use sapwood::pd::layout::Layout;
use sapwood::pd::receiver::{Action, Event, Receiver, ReceiverConfig, RecvSpec};
use sapwood::pd::staging::StagingRing;
use sapwood::pd::topo::Rank as RankName;
use sapwood::pd::{Incarnation, RoomKey, Tag};
use sapwood::pool::PoolKind;

use super::shared::{
    Clock, PAGE_TOKENS, Rank, STAGE_BYTES, commands, equals, incarnation, page_hashes, prompt, room, say,
    tokens_of, topology,
};
use super::{Args, DemoError, Kind};

/// After so long without evidence a grant counts as quarantined. Short, so that the end of a run can say so.
const HOLD_US: u64 = 5_000_000;

struct Decode {
    clock: Clock,
    receiver: Receiver,
    control: Control,
    target: Box<dyn Target>,
    memory: Memory,
    device: SoftDevice,
    pool: DecodeCache,
    layout: Layout,
    tokens: BTreeMap<RoomKey, Vec<u32>>,
    waiting: VecDeque<RoomKey>,
    restoring: BTreeSet<RoomKey>,
    aborts: Vec<(Time, RoomKey)>,
    revoking: Vec<Tag>,
    buffer: Vec<u8>,
    mismatches: u64,
    reused: u64,
    restored: u64,
}

fn target(args: &Args, inc: Incarnation, rank: &Rank) -> Result<Box<dyn Target>, DemoError> {
    let memory = rank.memory.clone();
    Ok(match args.transport {
        Kind::Tcp => Box::new(TcpTarget::new(inc, IpAddr::V4(Ipv4Addr::LOCALHOST), memory)?),
        Kind::Shm => {
            let regions = rank.device.memory().regions().map(|(_, r)| r.clone());
            let regions = regions.chain(rank.stage.clone()).collect();
            Box::new(ShmTarget::over(inc, regions)?)
        }
        #[cfg(feature = "nixl")]
        Kind::Nixl => Box::new(sapwood::backend::transport::nixl::NixlTarget::new(inc, None, memory)?),
        #[cfg(not(feature = "nixl"))]
        Kind::Nixl => return Err(DemoError::NotBuilt("nixl")),
    })
}

pub(super) fn run(args: &Args) -> Result<(), DemoError> {
    let inc = incarnation();
    let sharing = if args.transport == Kind::Shm { Sharing::Shared } else { Sharing::Private };
    let rank = Rank::new(args, 1, sharing)?;
    let target = target(args, inc, &rank)?;
    let Rank { device, cache, layout, memory, .. } = rank;
    let control = Control::new(IpAddr::V4(Ipv4Addr::LOCALHOST))?;
    say(&format!("up {}", control.address()));
    let staging = args.staging.then_some(StagingRing {
        region: layout.regions.len() as u32,
        base: 0,
        bytes: STAGE_BYTES,
        chunks_max: 64,
    });
    let revoke = target.caps().revoke;
    let config = ReceiverConfig { revoke, hold_us: HOLD_US, staging, ..ReceiverConfig::default() };
    let (topo, blob) = (topology(args, 1), target.descriptor());
    let receiver = Receiver::new(inc, config, inc.0, topo, RankName::default(), layout.clone(), blob)?;
    let buffer = vec![0; cache.geometry().page_bytes(PoolKind::Full) as usize];
    let mut d = Decode {
        clock: Clock::new(),
        receiver,
        control,
        target,
        memory,
        device,
        pool: DecodeCache::new(cache),
        layout,
        tokens: BTreeMap::new(),
        waiting: VecDeque::new(),
        restoring: BTreeSet::new(),
        aborts: Vec::new(),
        revoking: Vec::new(),
        buffer,
        mismatches: 0,
        reused: 0,
        restored: 0,
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
            self.pool.cache_mut().tick(self.clock.now())?;
            self.step()?;
            let s = self.receiver.stats();
            // What is in quarantine may stay there for good.
            let settled = s.grants as u64 == s.quarantined_total - s.quarantine_proven;
            if stop_at.is_some_and(|at| Instant::now() > at || (settled && self.pool.cache().is_idle())) {
                self.report();
                return Ok(());
            }
        }
    }

    fn report(&self) {
        let s = self.receiver.stats();
        let c = self.pool.cache().page_counts(Tier::Device);
        let broken = self.pool.cache().sanity().len();
        say(&format!(
            "stats acked={} revoked={} fenced={} dead={} other={} quarantined={} quarantine_pages={} mismatches={} \
             leaked={} broken={broken} reused={} restored={} scattered={}",
            s.released_acked,
            s.released_revoked,
            s.released_fenced,
            s.released_dead,
            s.released_other,
            s.quarantined_total,
            s.quarantine_units,
            self.mismatches,
            // Too few are as wrong as too many.
            (i64::from(c.request_pages + c.in_flight_pages) + c.leaked_pages - i64::from(s.quarantine_units))
                .unsigned_abs(),
            self.reused,
            self.restored,
            s.chunks_scattered,
        ));
    }

    fn open(&mut self, words: &[String]) {
        let Some((key, tokens)) = room(words) else { return };
        let abort = words.get(4).and_then(|w| w.parse::<i64>().ok()).unwrap_or(-1);
        let addresses: Vec<SocketAddr> = words.iter().skip(5).filter_map(|w| w.parse().ok()).collect();
        let contacts = addresses.into_iter().map(|a| self.control.peer(a)).collect();
        let now = self.clock.now();
        let spec = RecvSpec { prompt: prompt(key, tokens), contacts };
        if let Err(why) = self.receiver.open(now, key, spec) {
            say(&format!("done {} {} fail {why:?}", key.room, key.epoch));
            return;
        }
        self.tokens.insert(key, tokens_of(key, tokens));
        self.waiting.push_back(key);
        if abort >= 0 {
            self.aborts.push((now + abort as u64, key));
        }
    }

    /// Matches only when there are pages to go on with: a room that waits must not hold what others wait for.
    fn grant_waiting(&mut self) -> Result<(), CacheError> {
        while let Some(&key) = self.waiting.front() {
            let Some(tokens) = self.tokens.get(&key) else {
                self.waiting.pop_front();
                continue;
            };
            let prefix = self.pool.open(key, NamespaceId::DEFAULT, tokens)?;
            let want = self.receiver.want(tokens.len() as u32, prefix.pages);
            let Ok(pages) = self.pool.reserve(key, &want) else {
                self.pool.give_up(key);
                return Ok(());
            };
            self.waiting.pop_front();
            let now = self.clock.now();
            match self.receiver.grant(now, key, pages, prefix.pages, prefix.restoring) {
                Ok(_) => {
                    self.reused += u64::from(prefix.pages);
                    if prefix.restoring {
                        self.restoring.insert(key);
                    }
                }
                Err((_, mut pages)) => {
                    // Never shown to anyone: they go back the way they came.
                    if let Some(c) = pages.commit(0..want.full as usize) {
                        self.pool.commit(key, c);
                    }
                    self.pool.give_up(key);
                }
            }
        }
        Ok(())
    }

    fn poll_restores(&mut self) -> Result<(), CacheError> {
        for key in self.restoring.clone() {
            let now = self.clock.now();
            match self.pool.restore(key)? {
                Restore::Pending => continue,
                Restore::Ready => {
                    self.restored += 1;
                    self.receiver.handle_restored(now, key);
                }
                Restore::Failed { from } => {
                    let want = self.receiver.want_topup(key, from);
                    let gap = want.and_then(|w| self.pool.reserve_gap(key, &w).ok());
                    if self.receiver.handle_restore_failed(now, key, from, gap).is_err() {
                        // Over already, or it cannot be topped up; then it fails, and pages come back with it.
                        let _ = self.receiver.abort(now, key);
                    }
                }
            }
            self.restoring.remove(&key);
        }
        Ok(())
    }

    fn step(&mut self) -> Result<(), CacheError> {
        let mut wait = Duration::from_micros(200);
        while let Some((peer, frame)) = self.control.receive(wait) {
            self.receiver.handle_frame(self.clock.now(), peer, &frame);
            wait = Duration::ZERO;
        }
        let now = self.clock.now();
        let (due, later): (Vec<_>, Vec<_>) = self.aborts.drain(..).partition(|a| a.0 <= now);
        self.aborts = later;
        for (_, key) in due {
            // A room that is over by now stays as it ended.
            let _ = self.receiver.abort(now, key);
        }
        if self.receiver.poll_timeout().is_some_and(|t| t <= now) {
            self.receiver.handle_timeout(now);
        }
        self.poll_restores()?;
        self.grant_waiting()?;
        for tag in std::mem::take(&mut self.revoking) {
            self.revoke(tag);
        }
        // Before any frame goes out: what it invites must be let in.
        while let Some(action) = self.receiver.poll_action() {
            match action {
                Action::Allow { tag, dest, ring } => {
                    if let Err(e) = self.target.allow(tag, spans_of(&self.layout, &dest, &ring)) {
                        eprintln!("pd-demo: {e}");
                    }
                }
                Action::Scatter { id, copies } => {
                    // The ranges are those of this layout: this cannot fail.
                    if let Err(e) = self.memory.copy_within(&copies) {
                        eprintln!("pd-demo: {e}");
                    }
                    self.receiver.handle_scattered(now, id);
                }
                Action::Revoke { tag } => self.revoke(tag),
                Action::Forget { tag } => self.target.forget(tag),
                Action::Fence { peer, inc, attach } => {
                    let how = self.target.fence(inc, attach);
                    self.receiver.handle_fence(now, peer, inc, how);
                }
            }
        }
        while let Some((to, frame)) = self.receiver.poll_transmit() {
            self.control.send(to, frame);
        }
        while let Some(event) = self.receiver.poll_event() {
            self.event(event)?;
        }
        Ok(())
    }

    fn revoke(&mut self, tag: Tag) {
        match self.target.revoke(tag) {
            Revoked::Proven => self.receiver.handle_revoked(tag.serial()),
            Revoked::Pending => self.revoking.push(tag),
        }
    }

    fn event(&mut self, event: Event) -> Result<(), CacheError> {
        match event {
            Event::Done { key, outcome } => {
                let tokens = self.tokens.remove(&key).unwrap_or_default();
                match outcome {
                    Ok(arrived) => {
                        let bytes = arrived.pages.destination().full.len() * self.buffer.len();
                        self.check(key, &tokens, arrived.pages)?;
                        say(&format!("done {} {} ok {bytes}", key.room, key.epoch));
                    }
                    Err(why) => {
                        self.pool.give_up(key);
                        let text = why.to_string().replace(' ', "_");
                        say(&format!("done {} {} fail {text}", key.room, key.epoch));
                    }
                }
            }
            Event::Released { key, pages } => self.pool.release(key, pages),
            Event::Unhealthy(full) => eprintln!("pd-demo: quarantine full: {full}"),
        }
        Ok(())
    }

    /// Compares every page of the room, those that were here already among them, and publishes them.
    fn check(&mut self, key: RoomKey, tokens: &[u32], pages: Committed) -> Result<(), CacheError> {
        self.pool.commit(key, pages);
        let (table, hashes) = (self.pool.pages(key), page_hashes(tokens));
        if table.len() != tokens.len().div_ceil(PAGE_TOKENS as usize) {
            self.mismatches += 1;
        }
        for (&page, &hash) in table.iter().zip(&hashes) {
            self.mismatches += u64::from(!equals(&self.device, page, hash, &mut self.buffer));
        }
        self.pool.finish(key, Fence::SETTLED)?;
        Ok(())
    }
}
