//! The decode machine: one rank that gives pages to prefill ranks and takes them back, written or not.
//!
//! Sans-I/O. After every call drain [`Receiver::poll_action`], [`Receiver::poll_transmit`],
//! [`Receiver::poll_event`], in this order: a frame may invite writes that an action lets in.
//!
//! A room and its grant end apart. The room fails at once, for the client. The grant climbs the ladder
//! until every rank it was shown to has evidence: **acked** (nothing posted, nothing will be), **revoked**
//! (the target refuses), **fenced** (the connection is gone and the transport vouches), or **dead** (the
//! operating system says so). Without evidence it is **quarantined**: out of the pool, counted, capped, and
//! at the cap this rank is unhealthy and takes no more rooms. A late proof still releases it; time never does.

mod ladder;
mod rooms;
mod staged;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::base::Time;
use crate::pd::agree::{Ballot, Patience, Vote, WrongLength};
use crate::pd::grant::{Committed, Granted, How, Released, Want};
use crate::pd::ids::{Incarnation, PeerId, RoomKey, Serial, Tag};
use crate::pd::layout::{Component, Layout, pages_of, window_first_page};
use crate::pd::link::{Heard, Link, LinkConfig, LinkStats};
use crate::pd::plan::{Copy, PeerPlan, dst_pages};
use crate::pd::plant::Plant;
use crate::pd::reason::{Incompatible, Reason};
use crate::pd::staging::{Block, ChunkId, StageReceiver, StagingRing};
use crate::pd::tomb::Tombs;
use crate::pd::topo::{Rank, Topology};
use crate::pd::wire::{Body, Prompt};

pub use ladder::Fence;

/// Clocks and bounds of a receiver. Times in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiverConfig {
    /// Frames and liveness.
    pub link: LinkConfig,
    /// Interval of "still queued here" while a room waits for memory.
    pub announce_us: u64,
    /// A published room fails after so long without a sign of progress from some rank.
    pub no_progress_us: u64,
    /// Upper bound on the life of a published room; 0 is none.
    pub room_us_max: u64,
    /// How long a failed grant waits for evidence before it counts as quarantined.
    pub hold_us: u64,
    /// Units in quarantine that make this rank unhealthy.
    pub quarantine_units_max: u32,
    /// Rooms in the table.
    pub rooms_max: usize,
    /// Closed rooms remembered.
    pub tombs_max: usize,
    /// How long.
    pub tomb_us: u64,
    /// The transport can take a grant back at the target.
    pub revoke: bool,
    /// Rooms settle by [`Receiver::propose`] and [`Receiver::decide`] instead of each rank for itself.
    pub collective: bool,
    /// Takes packed chunks in a ring and scatters them into pages.
    pub staging: Option<StagingRing>,
}

impl Default for ReceiverConfig {
    fn default() -> ReceiverConfig {
        ReceiverConfig {
            link: LinkConfig::default(),
            announce_us: 2_000_000,
            no_progress_us: 60_000_000,
            room_us_max: 0,
            hold_us: 30_000_000,
            quarantine_units_max: 1024,
            rooms_max: 65_536,
            tombs_max: 65_536,
            tomb_us: 600_000_000,
            revoke: false,
            collective: false,
            staging: None,
        }
    }
}

/// What the scheduler knows about a request when it queues it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecvSpec {
    /// Its prompt.
    pub prompt: Prompt,
    /// Prefill ranks that serve this rank ([`contacts`](crate::pd::topo::contacts)), by address.
    pub contacts: Vec<PeerId>,
}

/// Work for the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Let writes with this tag reach these pages (target-mediated transports).
    Allow {
        /// Grant.
        tag: Tag,
        /// Pages, slots and rows it covers.
        dest: crate::pd::grant::Destination,
        /// Places in the staging ring it covers: region, first byte, bytes.
        ring: Vec<(u32, u64, u64)>,
    },
    /// Copy a block out of the staging ring into pages, then call [`Receiver::handle_scattered`].
    Scatter {
        /// Which.
        id: ScatterId,
        /// What; both regions are ours.
        copies: Vec<Copy>,
    },
    /// Refuse writes with this tag from now on, then call [`Receiver::handle_revoked`].
    Revoke {
        /// Grant.
        tag: Tag,
    },
    /// The grant is settled, its tag may be forgotten.
    Forget {
        /// Grant.
        tag: Tag,
    },
    /// Destroy the way by which this incarnation reaches our memory, then call [`Receiver::handle_fence`].
    Fence {
        /// Address.
        peer: PeerId,
        /// Incarnation.
        inc: Incarnation,
        /// Attachments up to this one; a later one may be in use already.
        attach: u32,
    },
}

/// A block being scattered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ScatterId {
    /// Its writer.
    pub peer: PeerId,
    /// Its chunk.
    pub chunk: ChunkId,
}

/// News for the scheduler and the cache.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// The room is over. Exactly once per room. On success the pages come along.
    Done {
        /// Which.
        key: RoomKey,
        /// How.
        outcome: Result<Arrived, Reason>,
    },
    /// The pages of a failed room may be reused.
    Released {
        /// Which.
        key: RoomKey,
        /// Pages and proof.
        pages: Released,
    },
    /// The quarantine is full (true), or no longer (false).
    Unhealthy(bool),
}

/// What came with a successful room.
#[derive(Debug, PartialEq, Eq)]
pub struct Arrived {
    /// Pages whose bytes are complete, for the tree.
    pub pages: Committed,
    /// Auxiliary row.
    pub aux: Vec<u8>,
    /// Checksum reported by each contacted rank, in the order of the contacts; 0 is none.
    pub checksums: Vec<u64>,
}

/// Why a call of the scheduler was refused. An ordinary outcome; nothing changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Refused {
    /// No such room, or not in this state.
    NoRoom,
    /// The room and epoch were used before.
    Used,
    /// The destination does not have the pages the room needs.
    WrongPages,
    /// The quarantine is full.
    Unhealthy,
    /// The table is full.
    TableFull,
    /// The rank is shutting down.
    Stopped,
}

/// Counters and sizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceiverStats {
    /// Frames.
    pub link: LinkStats,
    /// Rooms that ended well.
    pub rooms_done: u64,
    /// Rooms that failed.
    pub rooms_failed: u64,
    /// Grants released because every rank acknowledged.
    pub released_acked: u64,
    /// Because the target refuses.
    pub released_revoked: u64,
    /// Because the connection is gone.
    pub released_fenced: u64,
    /// Because the process is gone.
    pub released_dead: u64,
    /// Never published, or settled before the group failed.
    pub released_other: u64,
    /// Grants that ever entered quarantine.
    pub quarantined_total: u64,
    /// Grants that left it, with a late proof.
    pub quarantine_proven: u64,
    /// Units in quarantine now.
    pub quarantine_units: u32,
    /// Packed chunks scattered.
    pub chunks_scattered: u64,
    /// Statuses for other lives of a room or other grants; ignored.
    pub status_stale: u64,
    /// Live rooms.
    pub rooms: usize,
    /// Grants whose pages are still out.
    pub grants: usize,
    /// Places taken in the staging ring.
    pub ring_places: usize,
}

#[derive(Debug)]
enum RegState {
    Asking,
    Accepted { plan: Box<PeerPlan>, topo: Topology, rank: Rank },
    Refused(Incompatible),
}

#[derive(Debug)]
struct Reg {
    inc: Incarnation,
    state: RegState,
    /// Attachment that the peer must use; counts fences.
    attach: u32,
    /// Every grant below was closed by a fence of this peer.
    barrier: Serial,
    fencing: bool,
}

#[derive(Debug)]
struct Shown {
    peer: PeerId,
    /// Incarnation the destination was sent to; unknown if it never was.
    inc: Incarnation,
    evidence: Option<How>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// May become a success.
    Live,
    /// Waits for evidence since.
    Held(Time),
    /// Waited long enough to be counted.
    Quarantined,
}

#[derive(Debug)]
struct Grant {
    key: RoomKey,
    pages: Granted,
    shown: Vec<Shown>,
    phase: Phase,
    /// Scatters of ours that write its pages. Until they end no proof about others frees anything.
    scattering: u32,
    /// Its chunks go unpacked from now on.
    unpacked: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Restore {
    Ready,
    Pending,
}

#[derive(Debug)]
struct Room {
    spec: RecvSpec,
    prefix: u32,
    serial: Option<Serial>,
    restore: Restore,
    /// Destinations were sent.
    published: bool,
    granted_at: Time,
    heard: Vec<Time>,
    /// Last new report, top-up or restore.
    progressed: Time,
    reported: Vec<Option<Report>>,
    local: Option<Result<(), Reason>>,
    patience: Patience,
    wake: Time,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Report {
    bytes: u64,
    checksum: u64,
    aux: Vec<u8>,
}

/// See the module.
#[derive(Debug)]
pub struct Receiver {
    config: ReceiverConfig,
    instance: u64,
    topo: Topology,
    rank: Rank,
    layout: Layout,
    blob: Vec<u8>,
    link: Link,
    regs: BTreeMap<PeerId, Reg>,
    rooms: BTreeMap<RoomKey, Room>,
    wakes: BTreeSet<(Time, RoomKey)>,
    grants: BTreeMap<Serial, Grant>,
    holds: BTreeSet<(Time, Serial)>,
    next_serial: u64,
    stage: Option<StageReceiver>,
    tombs: Tombs,
    actions: VecDeque<Action>,
    events: VecDeque<Event>,
    stats: ReceiverStats,
    unhealthy: bool,
    stopped: bool,
    plant: Option<Plant>,
}

impl Receiver {
    /// A rank that can answer from its first frame on. `me` must be fresh for every process start,
    /// `instance` is shared by the ranks of one instance; `blob` is what the transport of the other side
    /// needs to reach our memory.
    pub fn new(
        me: Incarnation,
        config: ReceiverConfig,
        instance: u64,
        topo: Topology,
        rank: Rank,
        layout: Layout,
        blob: Vec<u8>,
    ) -> Result<Receiver, Incompatible> {
        layout.validate(&topo, rank)?;
        Ok(Receiver {
            link: Link::new(me, config.link),
            tombs: Tombs::new(config.tombs_max, config.tomb_us),
            config,
            instance,
            topo,
            rank,
            layout,
            blob,
            regs: BTreeMap::new(),
            rooms: BTreeMap::new(),
            wakes: BTreeSet::new(),
            grants: BTreeMap::new(),
            holds: BTreeSet::new(),
            next_serial: 1,
            stage: config.staging.map(|r| StageReceiver::new(r.bytes, r.chunks_max as usize)),
            actions: VecDeque::new(),
            events: VecDeque::new(),
            stats: ReceiverStats::default(),
            unhealthy: false,
            stopped: false,
            plant: None,
        })
    }

    /// Plants a bug.
    #[cfg(any(test, feature = "sim"))]
    pub fn plant(&mut self, plant: Option<Plant>) {
        self.plant = plant;
    }

    /// This process.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        self.link.me()
    }

    /// Counters and sizes.
    #[must_use]
    pub fn stats(&self) -> ReceiverStats {
        ReceiverStats {
            link: self.link.stats,
            rooms: self.rooms.len(),
            grants: self.grants.len(),
            ring_places: self.stage.as_ref().map_or(0, |s| s.ring().taken()),
            ..self.stats
        }
    }

    /// Whether the quarantine is full.
    #[must_use]
    pub fn is_unhealthy(&self) -> bool {
        self.unhealthy
    }

    /// Replaces the transport descriptor; used by registrations from now on (after a fence).
    pub fn set_blob(&mut self, blob: Vec<u8>) {
        self.blob = blob;
    }

    // ---- the scheduler ----

    /// Pages, slots and rows a room of `tokens` needs when `prefix` pages are already here.
    #[must_use]
    pub fn want(&self, tokens: u32, prefix: u32) -> Want {
        let (l, ps) = (&self.layout, self.layout.page_tokens);
        let first = window_first_page(prefix, tokens, l.window_tokens, ps);
        let when = |c: Component, n: u32| if l.has(c) { n } else { 0 };
        Want {
            full: when(Component::Full, dst_pages(ps, l.split, tokens, prefix)),
            window: when(Component::Window, pages_of(tokens, ps).saturating_sub(first)),
            state: when(Component::State, 1),
            ring: when(Component::Ring, 1),
        }
    }

    /// Queues a room. The prefill ranks are told that it is alive, so that waiting for memory here is not
    /// taken for death there.
    pub fn open(&mut self, now: Time, key: RoomKey, spec: RecvSpec) -> Result<(), Refused> {
        if self.stopped {
            return Err(Refused::Stopped);
        }
        if self.unhealthy {
            return Err(Refused::Unhealthy);
        }
        if self.rooms.len() >= self.config.rooms_max {
            return Err(Refused::TableFull);
        }
        if spec.contacts.is_empty() {
            return Err(Refused::NoRoom);
        }
        if self.rooms.contains_key(&key) || self.tombs.get(key).is_some() {
            return Err(Refused::Used);
        }
        let range = RoomKey { room: key.room, epoch: 0 }..key;
        let older: Vec<RoomKey> = self.rooms.range(range).map(|(k, _)| *k).collect();
        for k in older {
            self.fail(now, k, Reason::Superseded);
        }
        let contacts = spec.contacts.clone();
        let n = contacts.len();
        let wake = now + self.config.announce_us;
        self.wakes.insert((wake, key));
        self.rooms.insert(
            key,
            Room {
                spec,
                prefix: 0,
                serial: None,
                restore: Restore::Ready,
                published: false,
                granted_at: now,
                heard: vec![now; n],
                progressed: now,
                reported: vec![None; n],
                local: None,
                patience: Patience::default(),
                wake,
            },
        );
        for &peer in &contacts {
            let known = self.link.incarnation(peer) != Incarnation::UNKNOWN;
            if !self.link.watch(now, peer) {
                self.fail(now, key, Reason::TableFull);
            } else if known && !self.link.is_alive(peer) {
                self.fail(now, key, Reason::PeerDead);
            } else {
                self.register(now, peer);
                self.link.send(peer, key, Serial(0), Body::Announce);
            }
        }
        self.check_contacts(now, key);
        Ok(())
    }

    /// Gives a queued room its pages and says how much of the prompt is here already; with
    /// `restore_pending` the room succeeds only after [`Self::handle_restored`]. On refusal the pages come
    /// back.
    pub fn grant(
        &mut self,
        now: Time,
        key: RoomKey,
        pages: Granted,
        prefix: u32,
        restore_pending: bool,
    ) -> Result<Serial, (Refused, Granted)> {
        let Some(room) = self.rooms.get(&key).filter(|r| r.local.is_none() && r.serial.is_none()) else {
            return Err((Refused::NoRoom, pages));
        };
        let tokens = room.spec.prompt.tokens;
        let want = self.want(tokens, prefix);
        let d = pages.destination();
        let got = [&d.full, &d.window, &d.state, &d.ring].map(|l| l.len() as u32);
        let comps = [Component::Full, Component::Window, Component::State, Component::Ring];
        let lists = [&d.full, &d.window, &d.state, &d.ring];
        let inside = comps.iter().zip(lists).all(|(&c, l)| l.iter().all(|&p| p < self.layout.units(c)));
        let whole_split = prefix.is_multiple_of(self.layout.split.size);
        if got != [want.full, want.window, want.state, want.ring]
            || !inside
            || !whole_split
            || prefix > pages_of(tokens, self.layout.page_tokens)
        {
            return Err((Refused::WrongPages, pages));
        }
        if self.unhealthy {
            return Err((Refused::Unhealthy, pages));
        }
        let serial = Serial(self.next_serial);
        self.next_serial += 1;
        let contacts = room.spec.contacts.clone();
        let shown =
            contacts.iter().map(|&peer| Shown { peer, inc: Incarnation::UNKNOWN, evidence: None }).collect();
        if self.config.revoke {
            let tag = Tag::new(self.link.me(), serial);
            let dest = pages.destination().clone();
            self.actions.push_back(Action::Allow { tag, dest, ring: Vec::new() });
        }
        self.grants
            .insert(serial, Grant { key, pages, shown, phase: Phase::Live, scattering: 0, unpacked: false });
        self.refresh_floor();
        if let Some(room) = self.rooms.get_mut(&key) {
            room.serial = Some(serial);
            room.prefix = prefix;
            room.granted_at = now;
            room.heard.iter_mut().for_each(|h| *h = now);
            room.restore = if restore_pending { Restore::Pending } else { Restore::Ready };
        }
        self.publish(now, key);
        Ok(serial)
    }

    /// Pages a top-up needs when the prefix of a granted room breaks at `from`; the window may reach into the gap.
    /// `None` if there is no such room, or nothing is missing.
    #[must_use]
    pub fn want_topup(&self, key: RoomKey, from: u32) -> Option<Want> {
        let room = self.rooms.get(&key).filter(|r| r.serial.is_some() && from < r.prefix)?;
        let tokens = room.spec.prompt.tokens;
        let (new, old) = (self.want(tokens, from), self.want(tokens, room.prefix));
        Some(Want { full: new.full - old.full, window: new.window - old.window, state: 0, ring: 0 })
    }

    /// The local part of the prefix is in place.
    pub fn handle_restored(&mut self, now: Time, key: RoomKey) {
        if let Some(room) = self.rooms.get_mut(&key) {
            room.restore = Restore::Ready;
            room.progressed = now;
            self.check_complete(now, key);
        }
    }

    /// The local part of the prefix broke from page `from` on. With pages for the gap the prefill side is
    /// asked to send it, too; without, the room fails. Pages that are refused come back.
    pub fn handle_restore_failed(
        &mut self,
        now: Time,
        key: RoomKey,
        from: u32,
        pages: Option<Granted>,
    ) -> Result<(), (Refused, Option<Granted>)> {
        if self.rooms.get(&key).is_none_or(|r| r.local.is_some() || r.serial.is_none()) {
            return Err((Refused::NoRoom, pages));
        }
        match pages {
            Some(pages) => self.topup(now, key, from, pages).map_err(|(why, p)| (why, Some(p))),
            None => {
                self.fail(now, key, Reason::RestoreFailed);
                Ok(())
            }
        }
    }

    /// Who answers behind an address; unknown before its first frame.
    #[must_use]
    pub fn incarnation_of(&self, peer: PeerId) -> Incarnation {
        self.link.incarnation(peer)
    }

    /// The grant of a room.
    #[must_use]
    pub fn serial_of(&self, key: RoomKey) -> Option<Serial> {
        self.rooms.get(&key).and_then(|r| r.serial)
    }

    /// Gives up a room. Its pages come back later, by [`Event::Released`].
    pub fn abort(&mut self, now: Time, key: RoomKey) -> Result<(), Refused> {
        self.rooms.get(&key).filter(|r| r.local.is_none()).ok_or(Refused::NoRoom)?;
        self.fail(now, key, Reason::AbortedByDecode);
        Ok(())
    }

    /// Fails every room and opens no more. Memory may be deregistered when [`Self::is_quiet`].
    pub fn stop(&mut self, now: Time) {
        self.stopped = true;
        let live: Vec<RoomKey> =
            self.rooms.iter().filter(|(_, r)| r.local.is_none()).map(|(k, _)| *k).collect();
        live.into_iter().for_each(|key| self.fail(now, key, Reason::Stopped));
    }

    /// Whether no page is out.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.grants.is_empty()
    }

    /// The votes of this rank on the rooms of a tick, for a collective group.
    pub fn propose(&self, keys: &[RoomKey]) -> Ballot {
        let vote = |k: &RoomKey| self.rooms.get(k).map_or(Vote::Pending, |r| r.patience.vote(r.local));
        Ballot::new(keys.to_vec(), keys.iter().map(vote).collect())
    }

    /// Applies what the group agreed on.
    pub fn decide(&mut self, now: Time, ballot: Ballot, agreed: &[Vote]) -> Result<(), WrongLength> {
        for (key, vote) in ballot.decided(agreed)? {
            match vote {
                Vote::Pending => {
                    if let Some(room) = self.rooms.get_mut(&key) {
                        room.patience.still_pending();
                    }
                }
                Vote::Done => self.conclude(now, key, Ok(())),
                Vote::Failed => {
                    // Also where it was not opened yet: the group will not vote on it again.
                    self.tombs.insert(now, key, Reason::GroupFailed);
                    self.fail(now, key, Reason::GroupFailed);
                    self.conclude(now, key, Err(Reason::GroupFailed));
                }
            }
        }
        Ok(())
    }

    /// Stops to care about an address nothing refers to; probes to it end. False if something does.
    pub fn forget_peer(&mut self, peer: PeerId) -> bool {
        let used = self.rooms.values().any(|r| r.spec.contacts.contains(&peer))
            || self.grants.values().any(|g| g.shown.iter().any(|s| s.peer == peer));
        if !used {
            self.regs.remove(&peer);
            self.link.forget(peer);
        }
        !used
    }

    // ---- the outside world ----

    /// A frame arrived from an address.
    pub fn handle_frame(&mut self, now: Time, peer: PeerId, bytes: &[u8]) {
        let Some((frame, heard)) = self.link.receive(now, peer, bytes) else { return };
        match heard {
            Heard::Same => {}
            Heard::Back => self.peer_back(now, peer),
            Heard::Replaced(old) => {
                self.peer_gone(now, peer, old, Reason::PeerReplaced);
                self.peer_back(now, peer);
            }
        }
        let (key, serial) = (frame.head.key, frame.head.serial);
        match frame.body {
            Body::RegisterReply(r) => self.on_register_reply(now, peer, *r),
            Body::MetadataAck => self.on_metadata_ack(now, peer, key, serial),
            Body::AbortReply(q) => self.on_abort_reply(peer, key, serial, q),
            Body::Status(s) => self.on_status(now, peer, key, serial, s),
            Body::StageAsk { chunk, first, pages, bytes } => {
                self.on_stage_ask(now, peer, ChunkId { key, serial, chunk }, Block { first, pages, bytes });
            }
            Body::StageReady { chunk } => self.on_stage_ready(now, peer, ChunkId { key, serial, chunk }),
            _ => {}
        }
    }

    /// Time passed.
    pub fn handle_timeout(&mut self, now: Time) {
        for (peer, inc) in self.link.handle_timeout(now) {
            self.peer_gone(now, peer, inc, Reason::PeerDead);
        }
        self.tombs.expire(now);
        while let Some(&(at, serial)) = self.holds.first()
            && at <= now
        {
            self.holds.remove(&(at, serial));
            self.hold_over(serial);
        }
        while let Some(&(at, key)) = self.wakes.first()
            && at <= now
        {
            self.wakes.remove(&(at, key));
            self.wake_room(now, key);
        }
    }

    /// When [`Self::handle_timeout`] is due.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        let wake = self.wakes.first().map(|w| w.0);
        let hold = self.holds.first().map(|h| h.0);
        self.link.poll_timeout().into_iter().chain(wake).chain(hold).min()
    }

    /// The next frame to send.
    pub fn poll_transmit(&mut self) -> Option<(PeerId, Vec<u8>)> {
        self.link.poll_transmit()
    }

    /// The next piece of work for the transport.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// The next news for the scheduler.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }
}
