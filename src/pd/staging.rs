//! Staging: one packed block per chunk instead of many small pieces, through a ring on the decode side.
//!
//! The sender gathers its pieces of a chunk into one buffer ([`pack`]), asks for a place in the ring, writes
//! the block when everything older that overlaps it has been taken, and says so; the receiver scatters the
//! block into pages. Each writer has places of its own, so nobody waits for another rank's part. Positions in
//! the ring are absolute (they only grow), so "may I write" is one comparison and no wrap-around can be mistaken
//! for another.
//!
//! Every message carries state and is repeated until its effect is seen, so losing any of them delays a
//! chunk and never wedges the ring (sgl#29978). What was written once is marked and not written again
//! (sgl#36893). A place of a room that failed obeys the same rule as a page: it returns to the ring with a
//! [`Proof`] only. A place whose proof does not come pins the ring; then blocks are refused and chunks go
//! unpacked, which is slower and never stuck.
//!
//! The two halves here know chunks and places; the machines own rooms, guards and the moving of bytes.

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

/// Where the ring of a decode rank lies, as published in its registration.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct StagingRing {
    /// Region of the target.
    pub region: u32,
    /// First byte in it; nothing else uses the ring's bytes.
    pub base: u64,
    /// Bytes.
    pub bytes: u64,
    /// Chunks in it at once.
    pub chunks_max: u32,
}

/// Where a prefill rank gathers blocks before it writes them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct StagingBuffers {
    /// Region on the prefill side.
    pub region: u32,
    /// First byte of the first buffer.
    pub base: u64,
    /// Bytes of one buffer: the largest block.
    pub buffer_bytes: u64,
    /// Buffers: blocks gathered or written at once.
    pub buffers: u32,
    /// A chunk of fewer copies goes unpacked.
    pub copies_min: u32,
}

/// What a writer says about a block when it asks for a place: enough to know what goes where.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Block {
    /// Position of the first page.
    pub first: u32,
    /// Pages.
    pub pages: u32,
    /// Bytes of this writer's part of them.
    pub bytes: u32,
}

#[derive(Debug)]
struct Slot {
    at: u64,
    block: Block,
    scattering: bool,
}

/// The decode side.
#[derive(Debug)]
pub struct StageReceiver {
    ring: Ring,
    slots: BTreeMap<(ChunkId, PeerId), Slot>,
    /// Chunks that were taken, so that a late question does not get a second place. Kept until the grant ends.
    done: BTreeSet<(ChunkId, PeerId)>,
    slots_max: usize,
}

/// What a report leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ready {
    /// Nothing to do: never asked for, or being scattered.
    Wait,
    /// Copy the block at this absolute position into its pages, then call [`StageReceiver::scattered`].
    Scatter(u64, Block),
    /// It was taken before; answer this.
    Taken(Body),
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

    /// Whose place pins the tail of the ring.
    #[must_use]
    pub fn oldest(&self) -> Option<Serial> {
        let tail = self.ring.tail();
        self.slots.iter().find(|(_, s)| s.at == tail).map(|(id, _)| id.0.serial)
    }

    /// The answer to a chunk that has to go unpacked.
    #[must_use]
    pub fn refuse(&self, id: ChunkId) -> Body {
        Body::StageGrant { chunk: id.chunk, at: u64::MAX, tail: self.ring.tail() }
    }

    /// A writer asks for the place of a chunk of a live grant; asking again gives the same place and the newest
    /// tail. The flag says whether the place is new. `None`: no answer, it will ask again.
    pub fn handle_ask(&mut self, peer: PeerId, id: ChunkId, block: Block) -> Option<(Body, bool)> {
        if self.done.contains(&(id, peer)) {
            return Some((self.taken(id), false));
        }
        let mut fresh = false;
        if !self.slots.contains_key(&(id, peer)) {
            if self.slots.len() >= self.slots_max {
                return None;
            }
            let Some(at) = self.ring.alloc(u64::from(block.bytes)) else {
                return Some((self.refuse(id), false));
            };
            self.slots.insert((id, peer), Slot { at, block, scattering: false });
            fresh = true;
        }
        let at = self.slots.get(&(id, peer))?.at;
        Some((Body::StageGrant { chunk: id.chunk, at, tail: self.ring.tail() }, fresh))
    }

    fn taken(&self, id: ChunkId) -> Body {
        Body::StageTaken { chunk: id.chunk, tail: self.ring.tail() }
    }

    /// A writer reports its block. It is to be scattered, once.
    pub fn handle_ready(&mut self, peer: PeerId, id: ChunkId) -> Ready {
        if self.done.contains(&(id, peer)) {
            return Ready::Taken(self.taken(id));
        }
        let Some(slot) = self.slots.get_mut(&(id, peer)).filter(|s| !s.scattering) else {
            return Ready::Wait;
        };
        slot.scattering = true;
        Ready::Scatter(slot.at, slot.block)
    }

    /// The block is in its pages, its place is free. The answer goes to the writer; `None` if the grant has ended
    /// meanwhile.
    pub fn scattered(&mut self, peer: PeerId, id: ChunkId) -> Option<Body> {
        let slot = self.slots.remove(&(id, peer))?;
        self.done.insert((id, peer));
        self.ring.free(slot.at);
        Some(self.taken(id))
    }

    /// Places of a grant: absolute position and bytes.
    pub fn places(&self, key: RoomKey, serial: Serial) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.slots.range(chunks_of(key, serial)).map(|(_, s)| (s.at, u64::from(s.block.bytes)))
    }

    /// Nothing can land for a grant any more: its places return. How many that were.
    pub fn abandon(&mut self, key: RoomKey, serial: Serial, proof: &Proof) -> usize {
        let _ = proof;
        self.end(key, serial)
    }

    /// Every writer reported the room complete and settled: places it asked for and did not use return.
    pub(super) fn close(&mut self, key: RoomKey, serial: Serial) {
        self.end(key, serial);
    }

    fn end(&mut self, key: RoomKey, serial: Serial) -> usize {
        let range = chunks_of(key, serial);
        let ids: Vec<(ChunkId, PeerId)> = self.slots.range(range.clone()).map(|(id, _)| *id).collect();
        for id in &ids {
            if let Some(slot) = self.slots.remove(id) {
                self.ring.free(slot.at);
            }
        }
        self.done.retain(|id| !range.contains(id));
        ids.len()
    }
}

type ChunkRange = std::ops::RangeInclusive<(ChunkId, PeerId)>;

fn chunks_of(key: RoomKey, serial: Serial) -> ChunkRange {
    (ChunkId { key, serial, chunk: 0 }, PeerId(0))
        ..=(ChunkId { key, serial, chunk: u32::MAX }, PeerId(u32::MAX))
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Asking,
    Placed { at: u64 },
    Writing,
    Written,
}

#[derive(Debug)]
struct Want {
    block: Block,
    stage: Stage,
    repeat_at: Time,
}

#[derive(Clone, Copy, Debug, Default)]
struct RingState {
    size: u64,
    tail: u64,
}

/// The prefill side.
#[derive(Debug)]
pub struct StageSender {
    wants: BTreeMap<(PeerId, ChunkId), Want>,
    rings: BTreeMap<PeerId, RingState>,
    repeat_us: u64,
}

/// What a staged chunk needs next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Send a message.
    Send(PeerId, ChunkId, Body),
    /// Gather and write the block at this absolute position, then call [`StageSender::written`] or
    /// [`StageSender::again`].
    Write(PeerId, ChunkId, u64),
}

/// What an answer leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Perhaps something can be written now.
    Poll,
    /// It has to go unpacked.
    Unpacked,
    /// Taken; nothing is left to do.
    Done,
}

impl StageSender {
    /// Repeats itself every `repeat_us`.
    #[must_use]
    pub fn new(repeat_us: u64) -> StageSender {
        StageSender { wants: BTreeMap::new(), rings: BTreeMap::new(), repeat_us }
    }

    /// A peer registered a ring of this size, empty as far as we know; what was under way to it is forgotten.
    pub fn set_ring(&mut self, peer: PeerId, size: u64) {
        self.drop_if(|p, _| p == peer);
        self.rings.insert(peer, RingState { size, tail: 0 });
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
    pub fn ask(&mut self, now: Time, peer: PeerId, id: ChunkId, block: Block) {
        self.wants.entry((peer, id)).or_insert(Want { block, stage: Stage::Asking, repeat_at: now });
    }

    /// Forgets chunks.
    pub fn drop_if(&mut self, mut f: impl FnMut(PeerId, ChunkId) -> bool) {
        self.wants.retain(|(peer, id), _| !f(*peer, *id));
    }

    /// Gives up on blocks that are not being written and were not: they are to go unpacked.
    pub fn give_up(&mut self) -> Vec<(PeerId, ChunkId)> {
        let open = |w: &Want| matches!(w.stage, Stage::Asking | Stage::Placed { .. });
        let ids: Vec<_> = self.wants.iter().filter(|(_, w)| open(w)).map(|(id, _)| *id).collect();
        ids.iter().for_each(|id| {
            self.wants.remove(id);
        });
        ids
    }

    fn raise(&mut self, peer: PeerId, tail: u64) {
        let ring = self.rings.entry(peer).or_default();
        ring.tail = ring.tail.max(tail);
    }

    /// The place of a chunk, or a newer tail, or that there is none.
    pub fn handle_grant(&mut self, peer: PeerId, id: ChunkId, at: u64, tail: u64) -> Answer {
        self.raise(peer, tail);
        let Some(want) = self.wants.get_mut(&(peer, id)) else { return Answer::Poll };
        match want.stage {
            // A block that is being written is not sent a second way, whatever an old message says.
            Stage::Asking | Stage::Placed { .. } if at == u64::MAX => {
                self.wants.remove(&(peer, id));
                Answer::Unpacked
            }
            Stage::Asking => {
                want.stage = Stage::Placed { at };
                Answer::Poll
            }
            _ => Answer::Poll,
        }
    }

    /// The block is written and settled at its place.
    pub fn written(&mut self, now: Time, peer: PeerId, id: ChunkId) {
        if let Some(want) = self.wants.get_mut(&(peer, id))
            && want.stage == Stage::Writing
        {
            want.stage = Stage::Written;
            want.repeat_at = now;
        }
    }

    /// The write failed, quietly: the block is to be written again, at the same place.
    pub fn again(&mut self, now: Time, peer: PeerId, id: ChunkId) {
        if let Some(want) = self.wants.get_mut(&(peer, id))
            && want.stage == Stage::Writing
        {
            want.stage = Stage::Asking;
            want.repeat_at = now;
        }
    }

    /// The chunk is taken.
    pub fn handle_taken(&mut self, peer: PeerId, id: ChunkId, tail: u64) -> Answer {
        self.raise(peer, tail);
        // Only what was written can have been taken.
        if self.wants.get(&(peer, id)).is_none_or(|w| w.stage != Stage::Written) {
            return Answer::Poll;
        }
        self.wants.remove(&(peer, id));
        Answer::Done
    }

    /// What is due, in the order of chunks, with at most `writes_max` writes. O(chunks under way).
    pub fn poll(&mut self, now: Time, writes_max: usize) -> Vec<Next> {
        let mut out = Vec::new();
        let mut writes = 0;
        for (&(peer, id), want) in &mut self.wants {
            let ring = self.rings.get(&peer).copied().unwrap_or_default();
            match want.stage {
                Stage::Placed { at }
                    if writes < writes_max
                        && may_write(at, u64::from(want.block.bytes), ring.tail, ring.size) =>
                {
                    want.stage = Stage::Writing;
                    writes += 1;
                    out.push(Next::Write(peer, id, at));
                }
                // Asking again is also how a lost tail is learnt.
                Stage::Asking | Stage::Placed { .. } if now >= want.repeat_at => {
                    want.repeat_at = now + self.repeat_us;
                    let Block { first, pages, bytes } = want.block;
                    out.push(Next::Send(peer, id, Body::StageAsk { chunk: id.chunk, first, pages, bytes }));
                }
                Stage::Written if now >= want.repeat_at => {
                    want.repeat_at = now + self.repeat_us;
                    out.push(Next::Send(peer, id, Body::StageReady { chunk: id.chunk }));
                }
                _ => {}
            }
        }
        out
    }

    /// When [`Self::poll`] has something to repeat.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        self.wants.values().filter(|w| w.stage != Stage::Writing).map(|w| w.repeat_at).min()
    }
}

#[cfg(test)]
mod tests;
