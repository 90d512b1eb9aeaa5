//! The prefill machine: one rank that writes the KV of its rooms into the memory of decode ranks.
//!
//! Sans-I/O. Events go in through `handle_*` and the calls of the scheduler ([`Sender::open`],
//! [`Sender::offer`], [`Sender::finish`], [`Sender::abort`]); work comes out of [`Sender::poll_transmit`],
//! [`Sender::poll_action`] and [`Sender::poll_event`], to be drained in this order after every call. Time is
//! an argument and never goes back. [`Sender::poll_timeout`] says when [`Sender::handle_timeout`] is due.
//!
//! A room is terminal when its outcome is an event; its *sources* are free later, when [`Event::Unpin`] says
//! that no posted write reads them. A destination is quiescent when nothing is posted for its serial and
//! the serial is closed; only then is an ABORT acknowledged. The two are counted apart from the room table,
//! so no clearing, reuse or late frame of a room can forge an acknowledgement.

mod destinations;
mod staged;
mod writes;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use crate::base::Time;
use crate::pd::agree::{Ballot, Patience, Vote, WrongLength};
use crate::pd::ids::{Incarnation, PeerId, RoomKey, Serial, Tag, XferId};
use crate::pd::layout::Layout;
use crate::pd::link::{Heard, Link, LinkConfig, LinkStats, Slot};
use crate::pd::plan::{Copy, PeerPlan};
use crate::pd::plant::Plant;
use crate::pd::reason::{Incompatible, Reason};
use crate::pd::staging::{ChunkId, StagingBuffers, StagingRing};
use crate::pd::tomb::Tombs;
use crate::pd::topo::{Rank, Topology};
use crate::pd::wire::{Body, Metadata, Prompt, Status};

/// Clocks and bounds of a sender. Times in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SenderConfig {
    /// Frames and liveness.
    pub link: LinkConfig,
    /// A room without all destinations fails after so long without a sign that a decode rank still queues it.
    pub bootstrap_us: u64,
    /// A destination nobody opens a room for is told so after this grace.
    pub orphan_us: u64,
    /// How long sources of a complete room wait for the other side to confirm.
    pub source_hold_us: u64,
    /// Interval of "still working" to the destinations.
    pub working_us: u64,
    /// Upper bound on the life of a room; 0 is none.
    pub room_us_max: u64,
    /// Pages of one write at most.
    pub chunk_pages_max: u32,
    /// Writes posted at once, all peers together.
    pub in_flight_max: usize,
    /// Times a chunk is written again after a failure that is known to be over.
    pub retries_max: u8,
    /// Destinations that wait for a room.
    pub orphans_max: usize,
    /// Closed rooms remembered, to tell latecomers why.
    pub tombs_max: usize,
    /// How long they are remembered.
    pub tomb_us: u64,
    /// Closed grants remembered per peer above its floor; beyond it an ABORT is answered "busy".
    pub closed_max: usize,
    /// Rooms settle by [`Sender::propose`] and [`Sender::decide`] instead of each rank for itself.
    pub collective: bool,
    /// Gathers chunks of many small pieces into blocks, for peers that take them.
    pub staging: Option<StagingBuffers>,
}

impl Default for SenderConfig {
    fn default() -> SenderConfig {
        SenderConfig {
            link: LinkConfig::default(),
            bootstrap_us: 60_000_000,
            orphan_us: 30_000_000,
            source_hold_us: 30_000_000,
            working_us: 2_000_000,
            room_us_max: 0,
            chunk_pages_max: 512,
            in_flight_max: 64,
            retries_max: 2,
            orphans_max: 4096,
            tombs_max: 65_536,
            tomb_us: 600_000_000,
            closed_max: 65_536,
            collective: false,
            staging: None,
        }
    }
}

/// What the scheduler knows about a request when it opens the room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendSpec {
    /// Its prompt.
    pub prompt: Prompt,
}

/// What ends a room on the prefill side.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tail {
    /// Source pages of the trailing window, by position in the prompt; those a destination has are skipped.
    pub window: Vec<u32>,
    /// Position of the first of them.
    pub window_first: u32,
    /// Source slots of the state component.
    pub state: Vec<u32>,
    /// Source row of the ring component, and its live rows.
    pub ring: Option<(u32, u32)>,
    /// Auxiliary row, handed to the other side with the success.
    pub aux: Vec<u8>,
    /// Checksum of the content, 0 if none.
    pub checksum: u64,
}

/// How a write ended, as far as the transport knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// All bytes are visible at the target.
    Ok {
        /// Bytes.
        bytes: u64,
    },
    /// Failed, and nothing of it will land from now on.
    FailedQuiet,
    /// Failed or timed out; it may still land. A second report for the same write may settle it.
    FailedUnknown,
    /// After [`Outcome::FailedUnknown`]: nobody reads the sources of the write any more, as what would have is gone. It
    /// may still land, so this proves nothing to the other side.
    SourcesFree,
}

/// Work for the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// A peer registered: make its memory reachable under `attach` and forget earlier attachments.
    Attach {
        /// Address.
        peer: PeerId,
        /// Its incarnation.
        inc: Incarnation,
        /// Attachment.
        attach: u32,
        /// Descriptor of its transport.
        blob: Vec<u8>,
    },
    /// Copy within this rank's memory, sources into a staging buffer. Ends with [`Sender::handle_gathered`].
    Gather {
        /// Name of the piece of work.
        job: u64,
        /// What; both regions are ours.
        copies: Vec<Copy>,
    },
    /// Copy. Ends with [`Sender::handle_done`], exactly one terminal report per write.
    Write {
        /// Name of the write.
        xfer: XferId,
        /// Target.
        peer: PeerId,
        /// Its attachment.
        attach: u32,
        /// Grant at the target.
        tag: Tag,
        /// What.
        copies: Vec<Copy>,
    },
}

/// News for the scheduler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The room is over. Exactly once per room.
    Done {
        /// Which.
        key: RoomKey,
        /// How.
        outcome: Result<(), Reason>,
    },
    /// No posted write reads the sources of the room; drop the read pin. Exactly once, after `Done`.
    Unpin {
        /// Which.
        key: RoomKey,
    },
}

/// Why a call of the scheduler was refused. An ordinary outcome; nothing changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Refused {
    /// No such room, or it is over.
    NoRoom,
    /// The room and epoch were used before.
    Used,
    /// Pages must be offered in order and within the prompt.
    OutOfOrder,
    /// A source page or slot does not exist.
    SourceRange,
    /// Too large.
    Limit,
    /// The rank is shutting down.
    Stopped,
}

/// Rooms and tables, for metrics and for bounds in tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SenderStats {
    /// Frames.
    pub link: LinkStats,
    /// Rooms that ended well.
    pub rooms_done: u64,
    /// Rooms that failed.
    pub rooms_failed: u64,
    /// Bytes written and settled.
    pub bytes_written: u64,
    /// Writes posted again.
    pub retries: u64,
    /// Chunks that went as one packed block.
    pub chunks_packed: u64,
    /// Chunks dropped by a guard before they were posted.
    pub chunks_dropped: u64,
    /// Completions for writes that are not known; ignored.
    pub completions_ignored: u64,
    /// Peers refused.
    pub peers_refused: u64,
    /// Rooms in the table, with those that only wait for their sources.
    pub rooms: usize,
    /// Destinations waiting for a room.
    pub orphans: usize,
    /// Writes posted.
    pub in_flight: usize,
    /// Packed chunks under way, and gathers.
    pub staged: usize,
    /// Writes whose end could not be proved.
    pub unproven: usize,
    /// Of them those whose sources stay pinned, as they may still be read.
    pub unproven_pinning: usize,
    /// Closed rooms remembered.
    pub tombs: usize,
    /// Closed grants remembered, all peers.
    pub closed: usize,
}

#[derive(Debug)]
struct Reg {
    inc: Incarnation,
    instance: u64,
    rank: Rank,
    /// The decode ranks a room of this instance must hear from.
    expect: Vec<Rank>,
    plan: Result<Arc<PeerPlan>, Incompatible>,
    attach: u32,
    floor: Serial,
    closed: BTreeSet<Serial>,
    ring: Option<StagingRing>,
}

#[derive(Debug)]
struct Dest {
    peer: PeerId,
    inc: Incarnation,
    serial: Serial,
    rank: Rank,
    meta: Arc<Metadata>,
    /// Next position to queue.
    next: u32,
    /// Chunks queued or posted.
    open_chunks: u32,
    /// Chunks packed so far: the name of the next.
    packed: u32,
    tail_queued: bool,
    bytes: u64,
    /// Success was sent for the bytes above.
    told: bool,
    acked: bool,
}

#[derive(Debug)]
struct Room {
    spec: SendSpec,
    opened: Time,
    heard: Time,
    wake: Time,
    instance: Option<u64>,
    expect: Vec<Rank>,
    dests: Vec<Dest>,
    announced: BTreeSet<PeerId>,
    /// Source pages from position 0; ready up to `ready`.
    pages: Vec<u32>,
    ready: u32,
    /// Offers whose producer has not finished: (end position, event).
    waits: VecDeque<(u32, u64)>,
    tail: Option<Arc<Tail>>,
    /// Set once; everything after it is clean-up.
    local: Option<Result<(), Reason>>,
    patience: Patience,
    settled_at: Time,
    reported: bool,
    /// Posted or unproven writes that read the sources.
    reading: u32,
}

#[derive(Debug)]
struct Orphan {
    since: Time,
    peer: PeerId,
    inc: Incarnation,
    serial: Serial,
    meta: Arc<Metadata>,
}

/// See the module.
#[derive(Debug)]
pub struct Sender {
    config: SenderConfig,
    topo: Topology,
    rank: Rank,
    layout: Layout,
    link: Link,
    regs: BTreeMap<PeerId, Reg>,
    rooms: BTreeMap<RoomKey, Room>,
    wakes: BTreeSet<(Time, RoomKey)>,
    orphans: BTreeMap<RoomKey, Vec<Orphan>>,
    orphan_ages: BTreeSet<(Time, RoomKey)>,
    orphan_count: usize,
    tombs: Tombs,
    writes: writes::Writes,
    staging: staged::Staging,
    actions: VecDeque<Action>,
    events: VecDeque<Event>,
    stats: SenderStats,
    stopped: bool,
    plant: Option<Plant>,
}

impl Sender {
    /// A rank that can answer from its first frame on: there is nothing to attach or start later. `me` must
    /// be fresh for every process start. The layout is checked here.
    pub fn new(
        me: Incarnation,
        config: SenderConfig,
        topo: Topology,
        rank: Rank,
        layout: Layout,
    ) -> Result<Sender, Incompatible> {
        layout.validate(&topo, rank)?;
        Ok(Sender {
            link: Link::new(me, config.link),
            tombs: Tombs::new(config.tombs_max, config.tomb_us),
            writes: writes::Writes::default(),
            staging: staged::Staging::new(config.staging, config.link.resend_us),
            config,
            topo,
            rank,
            layout,
            regs: BTreeMap::new(),
            rooms: BTreeMap::new(),
            wakes: BTreeSet::new(),
            orphans: BTreeMap::new(),
            orphan_ages: BTreeSet::new(),
            orphan_count: 0,
            actions: VecDeque::new(),
            events: VecDeque::new(),
            stats: SenderStats::default(),
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

    /// What it publishes.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Counters and sizes.
    #[must_use]
    pub fn stats(&self) -> SenderStats {
        SenderStats {
            link: self.link.stats,
            rooms: self.rooms.len(),
            orphans: self.orphan_count,
            in_flight: self.writes.in_flight(),
            staged: self.staging.len() + self.staging.gathering(),
            unproven: self.writes.unproven(),
            unproven_pinning: self.writes.pinning(),
            tombs: self.tombs.len(),
            closed: self.regs.values().map(|r| r.closed.len()).sum(),
            ..self.stats
        }
    }

    // ---- the scheduler ----

    /// Opens a room. Destinations that came early are taken over.
    pub fn open(&mut self, now: Time, key: RoomKey, spec: SendSpec) -> Result<(), Refused> {
        if self.stopped {
            return Err(Refused::Stopped);
        }
        if self.rooms.contains_key(&key) || self.tombs.get(key).is_some() {
            return Err(Refused::Used);
        }
        let older: Vec<RoomKey> = self.live_epochs(key.room).filter(|k| k.epoch < key.epoch).collect();
        for k in older {
            self.fail(now, k, Reason::Superseded);
        }
        let wake = now + self.config.bootstrap_us.min(self.config.working_us);
        self.wakes.insert((wake, key));
        self.rooms.insert(
            key,
            Room {
                spec,
                opened: now,
                heard: now,
                wake,
                instance: None,
                expect: Vec::new(),
                dests: Vec::new(),
                announced: BTreeSet::new(),
                pages: Vec::new(),
                ready: 0,
                waits: VecDeque::new(),
                tail: None,
                local: None,
                patience: Patience::default(),
                settled_at: now,
                reported: false,
                reading: 0,
            },
        );
        for o in self.take_orphans(key) {
            self.add_destination(now, o.peer, o.inc, key, o.serial, o.meta);
        }
        Ok(())
    }

    fn live_epochs(&self, room: u64) -> impl Iterator<Item = RoomKey> + '_ {
        let range = RoomKey { room, epoch: 0 }..=RoomKey { room, epoch: u32::MAX };
        self.rooms.range(range).map(|(k, _)| *k)
    }

    /// Gives the next source pages of the prompt, in order from position 0. With an event the pages are not
    /// read before [`Self::handle_event`] reports it: the forward pass or the load that produces them.
    pub fn offer(
        &mut self,
        now: Time,
        key: RoomKey,
        pages: &[u32],
        event: Option<u64>,
    ) -> Result<(), Refused> {
        let total = |r: &Room, l: &Layout| crate::pd::layout::pages_of(r.spec.prompt.tokens, l.page_tokens);
        let room = self.rooms.get_mut(&key).filter(|r| r.local.is_none()).ok_or(Refused::NoRoom)?;
        let end = room.pages.len() as u64 + pages.len() as u64;
        if room.tail.is_some() || end > u64::from(total(room, &self.layout)) {
            return Err(Refused::OutOfOrder);
        }
        let shards = if self.topo.page_shard { self.topo.tp } else { 1 };
        let units = self.layout.units(crate::pd::layout::Component::Full).saturating_mul(shards);
        let paged = self.layout.has(crate::pd::layout::Component::Full);
        if paged && pages.iter().any(|&p| p >= units) {
            return Err(Refused::SourceRange);
        }
        room.pages.extend_from_slice(pages);
        match event {
            Some(e) => room.waits.push_back((end as u32, e)),
            None if room.waits.is_empty() => room.ready = end as u32,
            // In order behind an offer that waits: ready with it.
            None => {
                if let Some(last) = room.waits.back_mut() {
                    last.0 = end as u32;
                }
            }
        }
        self.advance(now, key);
        Ok(())
    }

    /// Says that everything has been offered and what else the room carries.
    pub fn finish(&mut self, now: Time, key: RoomKey, tail: Tail) -> Result<(), Refused> {
        let room = self.rooms.get_mut(&key).filter(|r| r.local.is_none()).ok_or(Refused::NoRoom)?;
        let total = crate::pd::layout::pages_of(room.spec.prompt.tokens, self.layout.page_tokens);
        if room.tail.is_some() || room.pages.len() as u64 != u64::from(total) {
            return Err(Refused::OutOfOrder);
        }
        if tail.aux.len() > crate::pd::wire::AUX_BYTES_MAX {
            return Err(Refused::Limit);
        }
        room.tail = Some(Arc::new(tail));
        self.advance(now, key);
        Ok(())
    }

    /// Gives up a room; the destinations are told at once.
    pub fn abort(&mut self, now: Time, key: RoomKey) -> Result<(), Refused> {
        self.rooms.get(&key).filter(|r| r.local.is_none()).ok_or(Refused::NoRoom)?;
        self.fail(now, key, Reason::AbortedByPrefill);
        Ok(())
    }

    /// Fails every room and opens no more. The rank keeps answering until [`Self::is_quiet`]; only then may
    /// its memory be deregistered.
    pub fn stop(&mut self, now: Time) {
        self.stopped = true;
        let live: Vec<RoomKey> =
            self.rooms.iter().filter(|(_, r)| r.local.is_none()).map(|(k, _)| *k).collect();
        for key in live {
            self.fail(now, key, Reason::Stopped);
        }
    }

    /// Whether nothing reads our memory: no write is posted, none without a proven end may, nothing is being gathered.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.writes.in_flight() == 0 && self.writes.pinning() == 0 && self.staging.gathering() == 0
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
                Vote::Done => self.report(now, key),
                Vote::Failed => {
                    // Also where it was not opened yet: the group will not vote on it again.
                    self.tombs.insert(now, key, Reason::GroupFailed);
                    self.fail(now, key, Reason::GroupFailed);
                    if let Some(room) = self.rooms.get_mut(&key)
                        && room.local == Some(Ok(()))
                    {
                        room.local = Some(Err(Reason::GroupFailed));
                    }
                    self.report(now, key);
                }
            }
        }
        Ok(())
    }

    /// Stops to care about an address nothing refers to; probes to it end and it must register anew. False
    /// if something does.
    pub fn forget_peer(&mut self, peer: PeerId) -> bool {
        let used = self.rooms.values().any(|r| r.dests.iter().any(|d| d.peer == peer))
            || self.orphans.values().flatten().any(|o| o.peer == peer)
            || self.writes.refers_to(peer);
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
        if let Heard::Replaced(_) = heard {
            self.peer_gone(now, peer, Reason::PeerReplaced);
        }
        let (key, serial) = (frame.head.key, frame.head.serial);
        match frame.body {
            Body::Register(r) => self.on_register(now, peer, frame.head.from, *r),
            Body::Announce => self.on_announce(now, peer, key),
            Body::Metadata(m) => self.on_metadata(now, peer, frame.head.from, key, serial, *m),
            Body::Abort { floor } => self.on_abort(now, peer, key, serial, floor),
            Body::StatusAck => self.on_status_ack(now, peer, key, serial),
            Body::Topup { from, pages, window } => {
                self.on_topup(now, peer, key, serial, from, (pages, window));
            }
            Body::StageGrant { chunk, at, tail } => {
                self.on_stage_grant(now, peer, ChunkId { key, serial, chunk }, at, tail);
            }
            Body::StageTaken { chunk, tail } => {
                self.on_stage_taken(now, peer, ChunkId { key, serial, chunk }, tail);
            }
            Body::Ping { floor, .. } => self.raise_floor(peer, floor),
            // Answers to us, or for the other side: nothing to do.
            _ => {}
        }
    }

    /// A producer finished: pages offered with this event may be read.
    pub fn handle_event(&mut self, now: Time, key: RoomKey, event: u64) {
        let Some(room) = self.rooms.get_mut(&key) else { return };
        for w in room.waits.iter_mut().filter(|w| w.1 == event) {
            w.1 = u64::MAX;
        }
        while let Some(&(end, u64::MAX)) = room.waits.front() {
            room.ready = end;
            room.waits.pop_front();
        }
        self.advance(now, key);
    }

    /// Time passed.
    pub fn handle_timeout(&mut self, now: Time) {
        for (peer, _) in self.link.handle_timeout(now) {
            self.peer_gone(now, peer, Reason::PeerDead);
        }
        self.tombs.expire(now);
        self.expire_orphans(now);
        while let Some(&(at, key)) = self.wakes.first()
            && at <= now
        {
            self.wakes.remove(&(at, key));
            self.wake_room(now, key);
        }
        self.drive_staging(now);
    }

    /// When [`Self::handle_timeout`] is due.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        let orphan = self.orphan_ages.first().map(|o| o.0 + self.config.orphan_us);
        let wake = self.wakes.first().map(|w| w.0);
        let staging = self.staging.poll_timeout();
        self.link.poll_timeout().into_iter().chain(wake).chain(orphan).chain(staging).min()
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

    // ---- rooms ----

    fn wake_room(&mut self, now: Time, key: RoomKey) {
        let c = self.config;
        let Some(room) = self.rooms.get(&key) else { return };
        let complete = !room.expect.is_empty() && room.dests.len() == room.expect.len();
        let too_old = c.room_us_max > 0 && now.since(room.opened) >= c.room_us_max;
        match room.local {
            None if too_old => self.fail(now, key, Reason::NoProgress),
            None if !complete && now.since(room.heard) >= c.bootstrap_us => {
                self.fail(now, key, Reason::BootstrapTimeout);
            }
            None => {
                let to: Vec<(PeerId, Serial)> = room.dests.iter().map(|d| (d.peer, d.serial)).collect();
                for (peer, serial) in to {
                    self.link.send(peer, key, serial, Body::Status(Status::Working));
                }
            }
            Some(_) => self.try_unpin(now, key),
        }
        if let Some(room) = self.rooms.get_mut(&key) {
            let step = if complete { c.working_us } else { c.working_us.min(c.bootstrap_us) };
            room.wake = now + step.max(1);
            self.wakes.insert((room.wake, key));
        }
    }

    /// The first cause decides; everyone who may wait is told at once and again until they answer.
    fn fail(&mut self, now: Time, key: RoomKey, reason: Reason) {
        let Some(room) = self.rooms.get_mut(&key) else { return };
        if room.local.is_some() {
            return;
        }
        room.local = Some(Err(reason));
        room.settled_at = now;
        self.staging.drop_room(key);
        let Some(room) = self.rooms.get_mut(&key) else { return };
        let dests: Vec<(PeerId, Serial)> = room.dests.iter().map(|d| (d.peer, d.serial)).collect();
        let known: BTreeSet<PeerId> = dests.iter().map(|d| d.0).collect();
        let waiting: Vec<PeerId> = room.announced.difference(&known).copied().collect();
        self.tombs.insert(now, key, reason);
        for (peer, serial) in dests {
            if self.link.is_alive(peer) && !self.is_closed(peer, serial) {
                self.link.send_until(
                    now,
                    peer,
                    Slot::Status,
                    key,
                    serial,
                    Body::Status(Status::Failed(reason)),
                );
            }
        }
        for peer in waiting {
            self.link.send(peer, key, Serial(0), Body::Status(Status::Failed(reason)));
        }
        if !self.config.collective {
            self.report(now, key);
        }
        self.try_unpin(now, key);
    }

    fn succeed(&mut self, now: Time, key: RoomKey) {
        if let Some(room) = self.rooms.get_mut(&key)
            && room.local.is_none()
        {
            room.local = Some(Ok(()));
            room.settled_at = now;
            self.tombs.insert(now, key, Reason::Closed);
            if !self.config.collective {
                self.report(now, key);
            }
        }
    }

    fn report(&mut self, now: Time, key: RoomKey) {
        let Some(room) = self.rooms.get_mut(&key) else { return };
        let Some(outcome) = room.local else { return };
        if std::mem::replace(&mut room.reported, true) {
            return;
        }
        match outcome {
            Ok(()) => self.stats.rooms_done += 1,
            Err(_) => self.stats.rooms_failed += 1,
        }
        self.events.push_back(Event::Done { key, outcome });
        self.try_unpin(now, key);
    }

    /// Sources are free when nothing reads them and nobody can ask for more of them.
    fn try_unpin(&mut self, now: Time, key: RoomKey) {
        let Some(room) = self.rooms.get(&key) else { return };
        let confirmed = match room.local {
            None => false,
            Some(Err(_)) => true,
            Some(Ok(())) => {
                room.dests.iter().all(|d| d.acked) || now.since(room.settled_at) >= self.config.source_hold_us
            }
        };
        if !(confirmed && room.reported && room.reading == 0) {
            return;
        }
        if let Some(room) = self.rooms.remove(&key) {
            self.staging.drop_room(key);
            self.wakes.remove(&(room.wake, key));
            if room.local == Some(Ok(())) {
                for d in &room.dests {
                    self.link.answered(d.peer, Slot::Status, key, d.serial);
                }
            }
            self.events.push_back(Event::Unpin { key });
        }
    }

    fn peer_gone(&mut self, now: Time, peer: PeerId, reason: Reason) {
        self.drop_orphans_of(peer);
        let hit: Vec<RoomKey> = self
            .rooms
            .iter()
            .filter(|(_, r)| r.dests.iter().any(|d| d.peer == peer))
            .map(|(k, _)| *k)
            .collect();
        for key in hit {
            self.fail(now, key, reason);
            if let Some(room) = self.rooms.get_mut(&key) {
                room.patience.peer_gone();
                for d in room.dests.iter_mut().filter(|d| d.peer == peer) {
                    d.acked = true;
                }
            }
            self.try_unpin(now, key);
        }
        if reason == Reason::PeerReplaced {
            self.regs.remove(&peer);
            self.staging.drop_peer(peer);
        }
        self.pump(now);
    }
}
