//! Packed chunks on their way: a place in the ring of the other side, a buffer here, gather, write, taken.
//!
//! A block holds a buffer only while it is gathered and written, and is gathered only when its place may be
//! written: nobody who holds a buffer waits for a peer. Guards look again before the gather, before the write, and
//! before every message, as the room may end at any of these moments.

use std::collections::BTreeMap;

use super::writes::Chunk;
use super::{Action, Sender};
use crate::base::Time;
use crate::pd::ids::{PeerId, RoomKey};
use crate::pd::plan::{Copy, PeerPlan};
use crate::pd::reason::Reason;
use crate::pd::staging::{Answer, Block, ChunkId, Next, StageSender, StagingBuffers, pack};

#[derive(Debug)]
struct Staged {
    chunk: Chunk,
    bytes: u64,
    copies: Vec<Copy>,
}

#[derive(Debug)]
struct Gather {
    peer: PeerId,
    id: ChunkId,
    at: u64,
    buffer: u32,
    bytes: u64,
    chunk: Chunk,
}

#[derive(Debug)]
pub(super) struct Staging {
    buffers: Option<StagingBuffers>,
    free: Vec<u32>,
    /// Buffers of writes that ended without proof.
    lost: u32,
    stager: StageSender,
    staged: BTreeMap<(PeerId, ChunkId), Staged>,
    gathers: BTreeMap<u64, Gather>,
    next_job: u64,
}

impl Staging {
    pub(super) fn new(buffers: Option<StagingBuffers>, repeat_us: u64) -> Staging {
        Staging {
            buffers,
            free: buffers.map_or(Vec::new(), |b| (0..b.buffers).rev().collect()),
            lost: 0,
            stager: StageSender::new(repeat_us),
            staged: BTreeMap::new(),
            gathers: BTreeMap::new(),
            next_job: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.staged.len()
    }

    pub(super) fn gathering(&self) -> usize {
        self.gathers.len()
    }

    pub(super) fn set_ring(&mut self, peer: PeerId, bytes: u64) {
        self.staged.retain(|k, _| k.0 != peer);
        self.stager.set_ring(peer, bytes);
    }

    pub(super) fn drop_room(&mut self, key: RoomKey) {
        self.staged.retain(|k, _| k.1.key != key);
        self.stager.drop_if(|_, id| id.key == key);
    }

    pub(super) fn drop_peer(&mut self, peer: PeerId) {
        self.staged.retain(|k, _| k.0 != peer);
        self.stager.drop_if(|p, _| p == peer);
    }

    fn drop_chunk(&mut self, peer: PeerId, id: ChunkId) -> Option<Staged> {
        self.stager.drop_if(|p, i| (p, i) == (peer, id));
        self.staged.remove(&(peer, id))
    }

    pub(super) fn free_buffer(&mut self, buffer: u32) {
        self.free.push(buffer);
    }

    /// A write of a block ended without proof: its buffer is out of use until it is settled.
    pub(super) fn lose_block(&mut self, peer: PeerId, id: ChunkId) {
        self.lost += 1;
        self.drop_chunk(peer, id);
    }

    /// One of those was settled.
    pub(super) fn find_buffer(&mut self) {
        self.lost = self.lost.saturating_sub(1);
    }

    fn all_lost(&self) -> bool {
        self.buffers.is_some_and(|b| self.lost >= b.buffers)
    }

    pub(super) fn written(&mut self, now: Time, peer: PeerId, id: ChunkId) {
        self.stager.written(now, peer, id);
    }

    pub(super) fn poll_timeout(&self) -> Option<Time> {
        self.stager.poll_timeout()
    }
}

impl Sender {
    /// Whether a chunk is worth a block, and the other side can place it.
    pub(super) fn packs(&self, plan: &PeerPlan, c: &Chunk, copies: usize, bytes: u64) -> bool {
        let (Some(b), Some(ring)) = (self.staging.buffers, self.regs.get(&c.peer).and_then(|r| r.ring))
        else {
            return false;
        };
        // Those that wait for a place must not hold up what needs none.
        let waiting = self.staging.len() >= self.config.in_flight_max.max(1);
        let fits = bytes <= b.buffer_bytes.min(ring.bytes).min(u64::from(u32::MAX));
        !c.unpacked
            && !waiting
            && !self.staging.all_lost()
            && c.span().is_some()
            && plan.packs()
            && fits
            && copies >= b.copies_min as usize
    }

    pub(super) fn stage(&mut self, now: Time, chunk: Chunk, bytes: u64, copies: Vec<Copy>) {
        let Some((first, pages)) = chunk.span() else { return };
        let Some(room) = self.rooms.get_mut(&chunk.key) else { return };
        let Some(d) = room.dests.iter_mut().find(|d| (d.peer, d.serial) == (chunk.peer, chunk.serial)) else {
            return;
        };
        let id = ChunkId { key: chunk.key, serial: chunk.serial, chunk: d.packed };
        d.packed += 1;
        let peer = chunk.peer;
        self.stats.chunks_packed += 1;
        self.staging.staged.insert((peer, id), Staged { chunk, bytes, copies });
        self.staging.stager.ask(now, peer, id, Block { first, pages, bytes: bytes as u32 });
    }

    /// Sends what is due and starts what may be written.
    pub(super) fn drive_staging(&mut self, now: Time) {
        if self.staging.all_lost() {
            // Nobody knows when a buffer comes back.
            let hopeless = self.staging.stager.give_up();
            let some = !hopeless.is_empty();
            hopeless.into_iter().rev().for_each(|(peer, id)| self.unpack(peer, id));
            if some {
                self.pump(now);
                return;
            }
        }
        for next in self.staging.stager.poll(now, self.staging.free.len()) {
            let (Next::Send(peer, id, _) | Next::Write(peer, id, _)) = next;
            let live = self.staging.staged.get(&(peer, id)).is_some_and(|s| self.guards(&s.chunk));
            if !live {
                self.stats.chunks_dropped += 1;
                self.staging.drop_chunk(peer, id);
                continue;
            }
            match next {
                Next::Send(peer, id, body) => self.link.send(peer, id.key, id.serial, body),
                Next::Write(peer, id, at) => self.gather(peer, id, at),
            }
        }
    }

    fn gather(&mut self, peer: PeerId, id: ChunkId, at: u64) {
        let s = &mut self.staging;
        let (Some(b), Some(staged)) = (s.buffers, s.staged.get(&(peer, id))) else { return };
        let Some(buffer) = s.free.pop() else { return };
        let base = b.base + u64::from(buffer) * b.buffer_bytes;
        let to_buffer = |&(src_region, src_off, off, len): &(u32, u64, u64, u64)| Copy {
            src_region,
            src_off,
            dst_region: b.region,
            dst_off: base + off,
            len,
        };
        let copies = pack(&staged.copies).gather.iter().map(to_buffer).collect();
        s.next_job += 1;
        let job = s.next_job;
        let gather = Gather { peer, id, at, buffer, bytes: staged.bytes, chunk: staged.chunk.clone() };
        if let Some(room) = self.rooms.get_mut(&id.key) {
            room.reading += 1;
        }
        s.gathers.insert(job, gather);
        self.actions.push_back(Action::Gather { job, copies });
    }

    /// A gather ended; if it failed, the room does. Exactly once per [`Action::Gather`].
    pub fn handle_gathered(&mut self, now: Time, job: u64, copied: bool) {
        let Some(g) = self.staging.gathers.remove(&job) else {
            self.stats.completions_ignored += 1;
            return;
        };
        if let Some(room) = self.rooms.get_mut(&g.id.key) {
            room.reading -= 1;
        }
        let wanted = self.staging.staged.contains_key(&(g.peer, g.id)) && self.guards(&g.chunk);
        let reg = self.regs.get(&g.peer).filter(|_| wanted && copied);
        match (reg.and_then(|r| Some((r.ring?, r.attach))), self.staging.buffers) {
            (Some((ring, attach)), Some(b)) => {
                let copy = Copy {
                    src_region: b.region,
                    src_off: b.base + u64::from(g.buffer) * b.buffer_bytes,
                    dst_region: ring.region,
                    dst_off: ring.base.saturating_add(g.at % ring.bytes),
                    len: g.bytes,
                };
                self.post_as(g.chunk, attach, g.bytes, vec![copy], Some((g.id, g.buffer)));
            }
            _ => {
                self.staging.free_buffer(g.buffer);
                self.staging.drop_chunk(g.peer, g.id);
                if wanted {
                    self.fail_or_tell(now, g.id.key, g.peer, g.id.serial, Reason::TransferFailed);
                }
            }
        }
        self.try_unpin(now, g.id.key);
        self.drive_staging(now);
    }

    /// A block failed, and nothing of it lands any more: once more, from the beginning. False if it may not.
    pub(super) fn block_again(&mut self, now: Time, c: &Chunk, id: ChunkId) -> bool {
        let max = self.config.retries_max;
        let again = self.guards(c)
            && self.staging.staged.get_mut(&(c.peer, id)).is_some_and(|s| {
                s.chunk.tries += 1;
                s.chunk.tries <= max
            });
        if again {
            self.stats.retries += 1;
            self.staging.stager.again(now, c.peer, id);
        } else {
            self.staging.drop_chunk(c.peer, id);
        }
        again
    }

    pub(super) fn on_stage_grant(&mut self, now: Time, peer: PeerId, id: ChunkId, at: u64, tail: u64) {
        if self.staging.stager.handle_grant(peer, id, at, tail) == Answer::Unpacked {
            self.unpack(peer, id);
        }
        self.pump(now);
    }

    /// Puts a chunk back into the queue, to go piece by piece.
    fn unpack(&mut self, peer: PeerId, id: ChunkId) {
        if let Some(Staged { mut chunk, .. }) = self.staging.drop_chunk(peer, id) {
            self.stats.chunks_packed -= 1;
            chunk.unpacked = true;
            self.writes.requeue(chunk);
        }
    }

    pub(super) fn on_stage_taken(&mut self, now: Time, peer: PeerId, id: ChunkId, tail: u64) {
        if self.staging.stager.handle_taken(peer, id, tail) == Answer::Done
            && let Some(s) = self.staging.drop_chunk(peer, id)
        {
            self.complete(now, &s.chunk, s.bytes);
        }
        self.pump(now);
    }
}
