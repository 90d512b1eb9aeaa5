//! Chunks, posted writes, and who is quiet.
//!
//! Before a chunk is posted three guards look at it: its room is live (else its sources may be gone), its
//! destination is still bound to the room under the same serial, and the serial is not closed for the
//! incarnation that is registered now. The pages come from the chunk's own snapshot, never from a table.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::{Action, Dest, Outcome, Sender, Tail};
use crate::base::Time;
use crate::pd::ids::{Incarnation, PeerId, RoomKey, Serial, Tag, XferId};
use crate::pd::layout::{Component, pages_of, window_first_page};
use crate::pd::link::Slot;
use crate::pd::plan::{Copy, FullChunk, PeerPlan, PlanError};
use crate::pd::plant::Plant;
use crate::pd::reason::Reason;
use crate::pd::staging::ChunkId;
use crate::pd::wire::{Body, Metadata, Quiet, Status};

#[derive(Clone, Debug)]
enum Part {
    /// Full-attention pages from this position on.
    Full(u32, Box<[u32]>),
    /// Everything else, once per destination.
    Tail(Arc<Tail>),
    /// Window pages in front of those that went with the tail: position and number.
    Window(Arc<Tail>, u32, u32),
}

#[derive(Clone, Debug)]
pub(super) struct Chunk {
    pub(super) key: RoomKey,
    pub(super) peer: PeerId,
    pub(super) inc: Incarnation,
    pub(super) serial: Serial,
    dest: Arc<Metadata>,
    part: Part,
    pub(super) tries: u8,
    /// The other side has no place for it as a block.
    pub(super) unpacked: bool,
}

impl Chunk {
    /// First position and number of pages, if it is one of full-attention pages.
    pub(super) fn span(&self) -> Option<(u32, u32)> {
        match &self.part {
            Part::Full(first, pages) => Some((*first, pages.len() as u32)),
            _ => None,
        }
    }
}

#[derive(Debug)]
struct Flight {
    chunk: Chunk,
    bytes: u64,
    /// The end could not be proved.
    unproven: bool,
    /// It is unproven, and nobody reads its sources any more.
    let_go: bool,
    /// It is a packed block of this name. With a buffer it reads that one, and no source.
    block: Option<(ChunkId, Option<u32>)>,
}

#[derive(Debug, Default)]
struct Busy {
    posted: u32,
    unproven: u32,
    /// An ABORT waits for the answer, about this room.
    wanted: Option<RoomKey>,
}

#[derive(Debug, Default)]
pub(super) struct Writes {
    queue: VecDeque<Chunk>,
    flights: BTreeMap<XferId, Flight>,
    unproven: usize,
    /// Of them those that may still read their sources.
    pinning: usize,
    busy: BTreeMap<(PeerId, Incarnation, Serial), Busy>,
    next: u64,
}

impl Writes {
    pub(super) fn in_flight(&self) -> usize {
        self.flights.len() - self.unproven
    }

    pub(super) fn unproven(&self) -> usize {
        self.unproven
    }

    pub(super) fn pinning(&self) -> usize {
        self.pinning
    }

    pub(super) fn refers_to(&self, peer: PeerId) -> bool {
        self.busy.keys().any(|k| k.0 == peer) || self.queue.iter().any(|c| c.peer == peer)
    }

    /// How quiet a closed grant is; `None` while writes are posted, and then the answer is sent when the last
    /// of them settles.
    pub(super) fn quiet(
        &mut self,
        peer: PeerId,
        inc: Incarnation,
        serial: Serial,
        key: RoomKey,
    ) -> Option<Quiet> {
        match self.busy.get_mut(&(peer, inc, serial)) {
            None => Some(Quiet::Drained),
            Some(b) => {
                b.wanted = Some(key);
                (b.posted == 0).then_some(Quiet::Unprovable)
            }
        }
    }

    /// Queues positions of a destination in chunks and returns how many.
    pub(super) fn queue_full(&mut self, key: RoomKey, d: &Dest, first: u32, pages: &[u32], max: u32) -> u32 {
        let mut at = first;
        let mut n = 0;
        for part in pages.chunks(max.max(1) as usize) {
            self.queue.push_back(chunk(key, d, Part::Full(at, part.into())));
            (at, n) = (at + part.len() as u32, n + 1);
        }
        n
    }

    /// Queues window pages that a tail of before did not carry, and returns how many chunks that are.
    pub(super) fn queue_window(
        &mut self,
        key: RoomKey,
        d: &Dest,
        tail: &Arc<Tail>,
        first: u32,
        n: u32,
    ) -> u32 {
        self.queue.push_back(chunk(key, d, Part::Window(tail.clone(), first, n)));
        1
    }

    /// Puts a chunk back in front of the queue.
    pub(super) fn requeue(&mut self, chunk: Chunk) {
        self.queue.push_front(chunk);
    }
}

fn chunk(key: RoomKey, d: &Dest, part: Part) -> Chunk {
    let (dest, tries, unpacked) = (d.meta.clone(), 0, false);
    Chunk { key, peer: d.peer, inc: d.inc, serial: d.serial, dest, part, tries, unpacked }
}

impl Sender {
    /// Queues what has become possible for a room.
    pub(super) fn advance(&mut self, now: Time, key: RoomKey) {
        let max = self.config.chunk_pages_max;
        let Some(room) = self.rooms.get_mut(&key) else { return };
        let complete = !room.expect.is_empty() && room.dests.len() == room.expect.len();
        if !complete || room.local.is_some_and(|o| o.is_err()) {
            return;
        }
        let total = room.pages.len() as u32;
        for d in &mut room.dests {
            if d.next < room.ready {
                let pages = &room.pages[d.next as usize..room.ready as usize];
                d.open_chunks += self.writes.queue_full(key, d, d.next, pages, max);
                d.next = room.ready;
            }
            if let Some(tail) = &room.tail
                && room.waits.is_empty()
                && d.next.max(d.meta.prefix) >= total
                && !std::mem::replace(&mut d.tail_queued, true)
            {
                self.writes.queue.push_back(chunk(key, d, Part::Tail(tail.clone())));
                d.open_chunks += 1;
            }
        }
        self.pump(now);
    }

    /// Posts queued chunks while there is room for them.
    pub(super) fn pump(&mut self, now: Time) {
        while self.writes.in_flight() < self.config.in_flight_max.max(1)
            && let Some(chunk) = self.writes.queue.pop_front()
        {
            if !self.guards(&chunk) {
                self.stats.chunks_dropped += 1;
                continue;
            }
            let Some(plan) = self.regs.get(&chunk.peer).and_then(|r| r.plan.as_ref().ok()).cloned() else {
                continue;
            };
            let attach = self.regs.get(&chunk.peer).map_or(0, |r| r.attach);
            let mut copies = Vec::new();
            match self.materialise(&plan, &chunk, &mut copies) {
                Err(_) => self.fail(now, chunk.key, Reason::BadDestination),
                Ok(0) => self.complete(now, &chunk, 0),
                Ok(bytes) if self.packs(&plan, &chunk, copies.len(), bytes) => {
                    self.stage(now, chunk, bytes, copies);
                }
                Ok(bytes) => self.post(chunk, attach, bytes, copies),
            }
        }
        self.drive_staging(now);
    }

    pub(super) fn guards(&self, c: &Chunk) -> bool {
        let room = self.rooms.get(&c.key);
        let live = room.is_some_and(|r| r.local.is_none_or(|o| o.is_ok()));
        if self.plant == Some(Plant::NoRoomGuard) {
            return self.regs.contains_key(&c.peer);
        }
        let bound = room
            .is_some_and(|r| r.dests.iter().any(|d| (d.peer, d.inc, d.serial) == (c.peer, c.inc, c.serial)));
        let same_life = self.regs.get(&c.peer).is_some_and(|r| r.inc == c.inc);
        let open = !self.is_closed(c.peer, c.serial) || self.plant == Some(Plant::NoClosedGuard);
        live && bound && same_life && open
    }

    fn materialise(&self, plan: &PeerPlan, c: &Chunk, out: &mut Vec<Copy>) -> Result<u64, PlanError> {
        let tokens = c.dest.prompt.tokens;
        match &c.part {
            Part::Full(first, src) => {
                let chunk = FullChunk {
                    first: *first,
                    src,
                    prompt_tokens: tokens,
                    prefix: c.dest.prefix,
                    dst: &c.dest.full,
                };
                plan.full(&chunk, out)
            }
            Part::Tail(t) => {
                let ps = self.layout.page_tokens;
                let first = window_first_page(c.dest.prefix, tokens, self.layout.window_tokens, ps);
                let skip = first.checked_sub(t.window_first).unwrap_or(u32::MAX) as usize;
                let have = pages_of(tokens, ps).saturating_sub(first) as usize;
                let window = t.window.get(skip.min(t.window.len())..).unwrap_or_default();
                debug_assert!(c.dest.window.is_empty() || c.dest.window.len() == have);
                let mut bytes = 0;
                if plan.unit_bytes(Component::Window, 1) > 0 {
                    bytes += plan.units(Component::Window, window, &c.dest.window, out)?;
                }
                if plan.unit_bytes(Component::State, 1) > 0 {
                    bytes += plan.units(Component::State, &t.state, &c.dest.state, out)?;
                }
                if let (Some((row, live)), [dst]) = (t.ring, c.dest.ring.as_slice()) {
                    bytes += plan.ring(row, *dst, tokens, live, out)?;
                }
                Ok(bytes)
            }
            Part::Window(t, first, n) => {
                if plan.unit_bytes(Component::Window, 1) == 0 {
                    return Ok(0);
                }
                // Sources that the prefill side did not keep come out as a length that does not fit.
                let skip = first.checked_sub(t.window_first).unwrap_or(u32::MAX) as usize;
                let src = t.window.get(skip.min(t.window.len())..).unwrap_or_default();
                let n = *n as usize;
                let dst = c.dest.window.get(..n).unwrap_or_default();
                plan.units(Component::Window, src.get(..n).unwrap_or_default(), dst, out)
            }
        }
    }

    fn post(&mut self, chunk: Chunk, attach: u32, bytes: u64, copies: Vec<Copy>) {
        if let Some(room) = self.rooms.get_mut(&chunk.key) {
            room.reading += 1;
        }
        self.post_as(chunk, attach, bytes, copies, None);
    }

    /// Posts a write. Without a buffer it reads sources, which the caller has counted.
    pub(super) fn post_as(
        &mut self,
        chunk: Chunk,
        attach: u32,
        bytes: u64,
        copies: Vec<Copy>,
        block: Option<(ChunkId, Option<u32>)>,
    ) {
        self.writes.next += 1;
        let xfer = XferId(self.writes.next);
        self.writes.busy.entry((chunk.peer, chunk.inc, chunk.serial)).or_default().posted += 1;
        let tag = Tag::new(chunk.inc, chunk.serial);
        self.actions.push_back(Action::Write { xfer, peer: chunk.peer, attach, tag, copies });
        self.writes.flights.insert(xfer, Flight { chunk, bytes, unproven: false, let_go: false, block });
    }

    /// A write ended. A second report of one that ended without proof settles it; everything else that is
    /// not expected is ignored and counted.
    pub fn handle_done(&mut self, now: Time, xfer: XferId, outcome: Outcome) {
        let Some(flight) = self.writes.flights.get_mut(&xfer) else {
            self.stats.completions_ignored += 1;
            return;
        };
        let was_unproven = flight.unproven;
        if outcome == Outcome::SourcesFree {
            return self.sources_free(now, xfer);
        }
        if outcome == Outcome::FailedUnknown {
            if was_unproven {
                self.stats.completions_ignored += 1;
                return;
            }
            flight.unproven = true;
            if let Some((id, buffer)) = flight.block {
                self.staging.lose_block(flight.chunk.peer, id, buffer.is_some());
            }
            let key = flight.chunk.key;
            let slot = (flight.chunk.peer, flight.chunk.inc, flight.chunk.serial);
            self.writes.unproven += 1;
            self.writes.pinning += 1;
            if let Some(b) = self.writes.busy.get_mut(&slot) {
                b.posted -= 1;
                b.unproven += 1;
            }
            self.answer_if_quiet(slot);
            self.fail_or_tell(now, key, slot.0, slot.2, Reason::TransferUnknown);
            self.pump(now);
            return;
        }
        let Some(flight) = self.writes.flights.remove(&xfer) else { return };
        let (c, block) = (flight.chunk, flight.block);
        let slot = (c.peer, c.inc, c.serial);
        if was_unproven {
            self.writes.unproven -= 1;
        }
        if let Some(b) = self.writes.busy.get_mut(&slot) {
            if was_unproven { b.unproven -= 1 } else { b.posted -= 1 }
        }
        if !flight.let_go {
            self.let_go(c.key, block, was_unproven);
        }
        match outcome {
            _ if was_unproven => {}
            Outcome::Ok { bytes } if bytes == flight.bytes => {
                self.stats.bytes_written += bytes;
                match block {
                    // Complete when the other side has taken it out of the ring.
                    Some((id, _)) => self.staging.written(now, c.peer, id),
                    None => self.complete(now, &c, bytes),
                }
            }
            _ if block.is_some_and(|(id, _)| self.block_again(now, &c, id)) => {}
            _ if block.is_none() && c.tries < self.config.retries_max && self.guards(&c) => {
                self.stats.retries += 1;
                self.writes.queue.push_front(Chunk { tries: c.tries + 1, ..c.clone() });
            }
            _ => self.fail_or_tell(now, c.key, c.peer, c.serial, Reason::TransferFailed),
        }
        self.answer_if_quiet(slot);
        self.try_unpin(now, c.key);
        self.pump(now);
    }

    /// A write reads its sources, or its buffer, no more.
    fn let_go(&mut self, key: RoomKey, block: Option<(ChunkId, Option<u32>)>, was_unproven: bool) {
        self.writes.pinning -= usize::from(was_unproven);
        match block {
            Some((_, Some(buffer))) => {
                if was_unproven {
                    self.staging.find_buffer();
                }
                self.staging.free_buffer(buffer);
            }
            Some((_, None)) | None => {
                if let Some(room) = self.rooms.get_mut(&key) {
                    room.reading -= 1;
                }
            }
        }
    }

    /// The sources of an unproven write are free, while its end stays in doubt: the other side hears nothing of it.
    fn sources_free(&mut self, now: Time, xfer: XferId) {
        let Some(flight) = self.writes.flights.get_mut(&xfer).filter(|f| f.unproven && !f.let_go) else {
            self.stats.completions_ignored += 1;
            return;
        };
        flight.let_go = true;
        let (key, block) = (flight.chunk.key, flight.block);
        self.let_go(key, block, true);
        self.try_unpin(now, key);
        self.pump(now);
    }

    /// Our side of the connection to a peer is destroyed and the transport vouches that no posted write of
    /// that incarnation reads or lands any more: what was unproven is settled.
    pub fn handle_fenced(&mut self, now: Time, peer: PeerId, inc: Incarnation) {
        let hit: Vec<XferId> = self
            .writes
            .flights
            .iter()
            .filter(|(_, f)| f.chunk.peer == peer && f.chunk.inc == inc)
            .map(|(x, _)| *x)
            .collect();
        hit.into_iter().for_each(|xfer| self.handle_done(now, xfer, Outcome::FailedQuiet));
    }

    /// Fails the room, or tells the one destination if the room has succeeded already (a top-up broke).
    pub(super) fn fail_or_tell(
        &mut self,
        now: Time,
        key: RoomKey,
        peer: PeerId,
        serial: Serial,
        reason: Reason,
    ) {
        if self.rooms.get(&key).is_some_and(|r| r.local == Some(Ok(()))) && !self.is_closed(peer, serial) {
            self.link.send_until(now, peer, Slot::Status, key, serial, Body::Status(Status::Failed(reason)));
        } else {
            self.fail(now, key, reason);
        }
    }

    fn answer_if_quiet(&mut self, slot: (PeerId, Incarnation, Serial)) {
        let Some(b) = self.writes.busy.get_mut(&slot) else { return };
        if b.posted > 0 {
            return;
        }
        let (unproven, wanted) = (b.unproven, b.wanted);
        if unproven == 0 {
            self.writes.busy.remove(&slot);
        }
        if let Some(key) = wanted
            && self.link.incarnation(slot.0) == slot.1
        {
            let quiet = if unproven == 0 { Quiet::Drained } else { Quiet::Unprovable };
            self.link.send(slot.0, key, slot.2, Body::AbortReply(quiet));
        }
    }

    pub(super) fn complete(&mut self, now: Time, c: &Chunk, bytes: u64) {
        let Some(room) = self.rooms.get_mut(&c.key) else { return };
        let Some(d) = room.dests.iter_mut().find(|d| (d.peer, d.serial) == (c.peer, c.serial)) else {
            return;
        };
        d.open_chunks = d.open_chunks.saturating_sub(1);
        d.bytes += bytes;
        let Some(tail) = room.tail.clone() else { return };
        let complete = !room.expect.is_empty() && room.dests.len() == room.expect.len();
        let all = complete && room.dests.iter().all(|d| d.tail_queued && d.open_chunks == 0);
        if !all || room.local.is_some_and(|o| o.is_err()) {
            return;
        }
        let tell: Vec<(PeerId, Serial, u64)> =
            room.dests.iter().filter(|d| !d.told).map(|d| (d.peer, d.serial, d.bytes)).collect();
        room.dests.iter_mut().for_each(|d| d.told = true);
        for (peer, serial, bytes) in tell {
            let status = Status::Done { bytes, checksum: tail.checksum, aux: tail.aux.clone() };
            self.link.send_until(now, peer, Slot::Status, c.key, serial, Body::Status(status));
        }
        self.succeed(now, c.key);
    }
}
