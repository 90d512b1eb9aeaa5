//! Staging: one packed block per chunk instead of many small pieces, through a ring on the decode side.
//!
//! The sender gathers its pieces of a chunk into one buffer ([`pack`]), asks for a place in the ring, writes
//! the block when everything older that overlaps it has been taken, and says so; the receiver scatters the
//! block into pages when all writers of the chunk have reported. Positions in the ring are absolute (they
//! only grow), so "may I write" is one comparison and no wrap-around can be mistaken for another.
//!
//! Every message carries state and is repeated until its effect is seen, so losing any of them delays a
//! chunk and never wedges the ring (sgl#29978). What was written once is marked and not written again, and
//! arrivals are sets of writers (sgl#36893). A slot of a room that failed obeys the same rule as a page: it
//! returns to the ring with a [`Proof`] only.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::Time;
use crate::pd::grant::Proof;
use crate::pd::ids::{PeerId, RoomKey, Serial};
use crate::pd::plan::Copy;
use crate::pd::wire::Body;

/// A chunk of a room under one grant.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ChunkId {
    /// Room.
    pub key: RoomKey,
    /// Grant.
    pub serial: Serial,
    /// Chunk of the room.
    pub chunk: u32,
}

/// A chunk as one block: what to gather into it, and what to scatter from it. Offsets inside the block start
/// at 0; the order is that of the copies, so the receiver can compute the scatter list on its own.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Packed {
    /// Source region, offset there, offset in the block, bytes.
    pub gather: Vec<(u32, u64, u64, u64)>,
    /// Offset in the block, destination region, offset there, bytes.
    pub scatter: Vec<(u64, u32, u64, u64)>,
    /// Bytes of the block.
    pub bytes: u64,
}

/// Packs copies in order. O(copies).
#[must_use]
pub fn pack(copies: &[Copy]) -> Packed {
    let mut p = Packed::default();
    for c in copies {
        p.gather.push((c.src_region, c.src_off, p.bytes, c.len));
        p.scatter.push((p.bytes, c.dst_region, c.dst_off, c.len));
        p.bytes += c.len;
    }
    p
}

/// Whether a block may be written, seen from a tail that may be old: the tail only grows, so yes is final.
#[must_use]
pub fn may_write(at: u64, bytes: u64, tail: u64, size: u64) -> bool {
    at.checked_add(bytes).is_some_and(|end| end <= tail.saturating_add(size))
}

/// The ring, in absolute positions. Allocation always succeeds for what fits at all; writing waits.
#[derive(Debug)]
pub struct Ring {
    size: u64,
    head: u64,
    live: BTreeMap<u64, u64>,
}

impl Ring {
    /// A ring of `size` bytes.
    #[must_use]
    pub fn new(size: u64) -> Ring {
        Ring { size, head: 0, live: BTreeMap::new() }
    }

    /// Bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Everything below is free for reuse.
    #[must_use]
    pub fn tail(&self) -> u64 {
        self.live.keys().next().copied().unwrap_or(self.head)
    }

    /// A contiguous place. `None` if it can never fit.
    pub fn alloc(&mut self, bytes: u64) -> Option<u64> {
        if bytes == 0 || bytes > self.size {
            return None;
        }
        let in_lap = self.head % self.size;
        if in_lap + bytes > self.size {
            self.head += self.size - in_lap;
        }
        let at = self.head;
        self.live.insert(at, bytes);
        self.head += bytes;
        Some(at)
    }

    /// Gives a place back. False if it is not taken.
    pub fn free(&mut self, at: u64) -> bool {
        self.live.remove(&at).is_some()
    }

    /// Places taken.
    #[must_use]
    pub fn taken(&self) -> usize {
        self.live.len()
    }
}

#[derive(Debug)]
struct Slot {
    at: Option<u64>,
    asked: BTreeSet<PeerId>,
    writers: BTreeSet<u32>,
    scattering: bool,
}

/// The decode side.
#[derive(Debug)]
pub struct StageReceiver {
    ring: Ring,
    slots: BTreeMap<ChunkId, Slot>,
    /// Chunks that were taken, so that a late question does not get a second place. Kept until the room closes.
    done: BTreeSet<ChunkId>,
    slots_max: usize,
}

/// What a report leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ready {
    /// Other writers are missing, or the block is being scattered.
    Wait,
    /// All writers have reported.
    Scatter(Scatter),
    /// It was taken before; answer this.
    Taken(Body),
}

/// A block is complete: copy it into its pages, then call [`StageReceiver::scattered`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Scatter {
    /// Which chunk.
    pub id: ChunkId,
    /// Absolute position; modulo the ring size it is the offset.
    pub at: u64,
}

impl StageReceiver {
    /// A ring of `size` bytes with at most `slots_max` chunks in it.
    #[must_use]
    pub fn new(size: u64, slots_max: usize) -> StageReceiver {
        StageReceiver { ring: Ring::new(size), slots: BTreeMap::new(), done: BTreeSet::new(), slots_max }
    }

    /// The ring.
    #[must_use]
    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    /// A writer asks for the place of a chunk; asking again gives the same place and the newest tail.
    /// `live` says whether the grant is live: the receiver machine knows.
    pub fn handle_ask(&mut self, peer: PeerId, id: ChunkId, bytes: u32, live: bool) -> Option<Body> {
        let tail = self.ring.tail();
        if !self.slots.contains_key(&id) {
            if !live || self.done.contains(&id) {
                return Some(Body::StageTaken { chunk: id.chunk, tail });
            }
            if self.slots.len() >= self.slots_max {
                return None;
            }
            let at = self.ring.alloc(u64::from(bytes));
            let slot = Slot { at, asked: BTreeSet::new(), writers: BTreeSet::new(), scattering: false };
            self.slots.insert(id, slot);
        }
        let tail = self.ring.tail();
        let slot = self.slots.get_mut(&id)?;
        slot.asked.insert(peer);
        Some(Body::StageGrant { chunk: id.chunk, at: slot.at.unwrap_or(u64::MAX), tail })
    }

    /// A writer reports its part. When all `writers_want` have, the block is to be scattered, once.
    pub fn handle_ready(&mut self, id: ChunkId, writer: u32, writers_want: u32) -> Ready {
        let tail = self.ring.tail();
        let Some(slot) = self.slots.get_mut(&id) else {
            return Ready::Taken(Body::StageTaken { chunk: id.chunk, tail });
        };
        let Some(at) = slot.at.filter(|_| writer < writers_want) else { return Ready::Wait };
        slot.writers.insert(writer);
        if slot.writers.len() as u32 == writers_want && !std::mem::replace(&mut slot.scattering, true) {
            return Ready::Scatter(Scatter { id, at });
        }
        Ready::Wait
    }

    /// The block is in its pages. Everyone who asked hears that the place is free.
    pub fn scattered(&mut self, id: ChunkId) -> Vec<(PeerId, Body)> {
        let Some(slot) = self.slots.remove(&id) else { return Vec::new() };
        self.done.insert(id);
        if let Some(at) = slot.at {
            self.ring.free(at);
        }
        let tail = self.ring.tail();
        slot.asked.into_iter().map(|p| (p, Body::StageTaken { chunk: id.chunk, tail })).collect()
    }

    /// A room failed, and nothing can land for its grant any more: its places return.
    pub fn abandon(&mut self, key: RoomKey, serial: Serial, proof: &Proof) -> usize {
        let _ = proof;
        let ids: Vec<ChunkId> = self.slots.range(chunks_of(key, serial)).map(|(id, _)| *id).collect();
        for id in &ids {
            self.scattered(*id);
        }
        self.close(key, serial);
        ids.len()
    }

    /// The room is over and took all of its chunks: what was remembered about them goes.
    pub fn close(&mut self, key: RoomKey, serial: Serial) {
        let range = chunks_of(key, serial);
        self.done.retain(|id| !range.contains(id));
    }
}

fn chunks_of(key: RoomKey, serial: Serial) -> std::ops::RangeInclusive<ChunkId> {
    ChunkId { key, serial, chunk: 0 }..=ChunkId { key, serial, chunk: u32::MAX }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Asking,
    Placed { at: u64 },
    Writing { at: u64 },
    Written,
}

#[derive(Debug)]
struct Want {
    bytes: u32,
    stage: Stage,
    repeat_at: Time,
}

/// The prefill side, for one writer (its index among the contacts of a decode rank).
#[derive(Debug)]
pub struct StageSender {
    wants: BTreeMap<(PeerId, ChunkId), Want>,
    tails: BTreeMap<PeerId, u64>,
    ring_size: BTreeMap<PeerId, u64>,
    writer: u32,
    repeat_us: u64,
}

/// What a staged chunk needs next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Send a message.
    Send(PeerId, ChunkId, Body),
    /// Write the block at this absolute position, then call [`StageSender::written`].
    Write(PeerId, ChunkId, u64),
    /// It can never fit; send it unpacked.
    TooLarge(PeerId, ChunkId),
    /// Taken; nothing is left to do.
    Done(PeerId, ChunkId),
}

impl StageSender {
    /// A writer that repeats itself every `repeat_us`.
    #[must_use]
    pub fn new(writer: u32, repeat_us: u64) -> StageSender {
        StageSender {
            wants: BTreeMap::new(),
            tails: BTreeMap::new(),
            ring_size: BTreeMap::new(),
            writer,
            repeat_us,
        }
    }

    /// How large the ring of a peer is.
    pub fn set_ring(&mut self, peer: PeerId, size: u64) {
        self.ring_size.insert(peer, size);
    }

    /// Chunks under way.
    #[must_use]
    pub fn len(&self) -> usize {
        self.wants.len()
    }

    /// Whether no chunk is under way.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.wants.is_empty()
    }

    /// Wants a place for a packed chunk. Asking twice is asking once.
    pub fn ask(&mut self, now: Time, peer: PeerId, id: ChunkId, bytes: u32) {
        self.wants.entry((peer, id)).or_insert(Want { bytes, stage: Stage::Asking, repeat_at: now });
    }

    /// Forgets the chunks of a room that is over.
    pub fn drop_room(&mut self, key: RoomKey) {
        self.wants.retain(|(_, id), _| id.key != key);
    }

    fn raise(&mut self, peer: PeerId, tail: u64) {
        let t = self.tails.entry(peer).or_insert(0);
        *t = (*t).max(tail);
    }

    /// The place of a chunk, or a newer tail.
    pub fn handle_grant(&mut self, peer: PeerId, id: ChunkId, at: u64, tail: u64) -> Option<Next> {
        self.raise(peer, tail);
        let want = self.wants.get_mut(&(peer, id))?;
        if at == u64::MAX {
            self.wants.remove(&(peer, id));
            return Some(Next::TooLarge(peer, id));
        }
        if want.stage == Stage::Asking {
            want.stage = Stage::Placed { at };
        }
        None
    }

    /// The block is written and settled at its place.
    pub fn written(&mut self, now: Time, peer: PeerId, id: ChunkId) {
        if let Some(want) = self.wants.get_mut(&(peer, id))
            && let Stage::Writing { .. } = want.stage
        {
            want.stage = Stage::Written;
            want.repeat_at = now;
        }
    }

    /// The chunk is taken.
    pub fn handle_taken(&mut self, peer: PeerId, id: ChunkId, tail: u64) -> Option<Next> {
        self.raise(peer, tail);
        // A block that is being written is not done, whatever an old message says.
        match self.wants.get(&(peer, id)).map(|w| w.stage) {
            Some(Stage::Writing { .. }) | None => None,
            Some(_) => {
                self.wants.remove(&(peer, id));
                Some(Next::Done(peer, id))
            }
        }
    }

    /// What is due, in the order of chunks.
    pub fn poll(&mut self, now: Time) -> Vec<Next> {
        let mut out = Vec::new();
        for (&(peer, id), want) in &mut self.wants {
            let tail = self.tails.get(&peer).copied().unwrap_or(0);
            let size = self.ring_size.get(&peer).copied().unwrap_or(0);
            match want.stage {
                Stage::Placed { at } if may_write(at, u64::from(want.bytes), tail, size) => {
                    want.stage = Stage::Writing { at };
                    out.push(Next::Write(peer, id, at));
                }
                // Asking again is also how a lost tail is learnt.
                Stage::Asking | Stage::Placed { .. } if now >= want.repeat_at => {
                    want.repeat_at = now + self.repeat_us;
                    let body = Body::StageAsk { chunk: id.chunk, bytes: want.bytes };
                    out.push(Next::Send(peer, id, body));
                }
                Stage::Written if now >= want.repeat_at => {
                    want.repeat_at = now + self.repeat_us;
                    let body = Body::StageReady { chunk: id.chunk, writer: self.writer };
                    out.push(Next::Send(peer, id, body));
                }
                _ => {}
            }
        }
        out
    }
}

#[cfg(test)]
mod tests;
