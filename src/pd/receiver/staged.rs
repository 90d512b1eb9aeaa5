//! Packed chunks on their way in: a place in the ring, the block, scatter, taken.
//!
//! Where the bytes of a block go is planned here, from the writer's layout and the grant, never taken from the
//! writer: it says which pages, and how many bytes it is about to send, and both must agree with the plan.

use super::{Action, Phase, Receiver, RegState, ScatterId};
use crate::base::Time;
use crate::pd::ids::{PeerId, Serial, Tag};
use crate::pd::plan::Copy;
use crate::pd::staging::{Block, ChunkId, Ready, pack};

impl Receiver {
    /// Lets writes of a grant reach its pages and its places in the ring, and nothing else.
    pub(super) fn allow(&mut self, serial: Serial) {
        let Some(grant) = self.grants.get(&serial).filter(|_| self.config.revoke) else { return };
        let mut ring = Vec::new();
        if let (Some(stage), Some(r)) = (&self.stage, self.config.staging) {
            let places = stage.places(grant.key, serial);
            ring.extend(places.map(|(at, bytes)| (r.region, r.base + at % r.bytes, bytes)));
        }
        let dest = grant.pages.destination().clone();
        self.actions.push_back(Action::Allow { tag: Tag::new(self.link.me(), serial), dest, ring });
    }

    /// Where a block goes: offsets in the block, then destinations. `None` if it is not one of ours.
    fn scatter_of(&self, peer: PeerId, id: ChunkId, block: Block) -> Option<Vec<Copy>> {
        let grant = self.grants.get(&id.serial).filter(|g| g.key == id.key && g.phase == Phase::Live)?;
        let inc = self.link.incarnation(peer);
        grant.shown.iter().find(|s| s.peer == peer && s.inc == inc && s.is_out())?;
        let room = self.rooms.get(&id.key).filter(|r| r.local.is_none())?;
        let Some(RegState::Accepted { plan, .. }) = self.regs.get(&peer).map(|r| &r.state) else {
            return None;
        };
        let tokens = room.spec.prompt.tokens;
        // One name per chunk, and no more chunks than pages, twice for a top-up: what is remembered is bounded.
        if id.chunk > 2 * tokens {
            return None;
        }
        let full = &grant.pages.destination().full;
        let copies = plan.scatter(block.first, block.pages, tokens, room.prefix, full)?;
        (copies.iter().map(|c| c.len).sum::<u64>() == u64::from(block.bytes)).then_some(copies)
    }

    pub(super) fn on_stage_ask(&mut self, _now: Time, peer: PeerId, id: ChunkId, block: Block) {
        // The place of a grant that waits for its proof, perhaps for ever, pins everything behind it.
        let oldest = self.stage.as_ref().and_then(|s| s.oldest()).and_then(|s| self.grants.get(&s));
        let pinned = oldest.is_some_and(|g| g.phase != Phase::Live);
        let fits = self.scatter_of(peer, id, block).is_some();
        let live = self.grants.get(&id.serial).is_some_and(|g| g.key == id.key && g.phase == Phase::Live);
        let Some(stage) = self.stage.as_mut().filter(|_| live) else { return };
        if !fits || pinned {
            let body = stage.refuse(id);
            self.link.send(peer, id.key, id.serial, body);
            return;
        }
        let Some((body, fresh)) = stage.handle_ask(peer, id, block) else { return };
        if fresh {
            self.allow(id.serial);
        }
        self.link.send(peer, id.key, id.serial, body);
    }

    pub(super) fn on_stage_ready(&mut self, _now: Time, peer: PeerId, id: ChunkId) {
        let live = self.grants.get(&id.serial).is_some_and(|g| g.key == id.key && g.phase == Phase::Live);
        let (Some(stage), Some(r)) = (self.stage.as_mut().filter(|_| live), self.config.staging) else {
            return;
        };
        match stage.handle_ready(peer, id) {
            Ready::Wait => {}
            Ready::Taken(body) => self.link.send(peer, id.key, id.serial, body),
            Ready::Scatter(at, block) => {
                let Some(copies) = self.scatter_of(peer, id, block) else { return };
                let base = r.base + at % r.bytes;
                let from_ring = |&(off, dst_region, dst_off, len): &(u64, u32, u64, u64)| Copy {
                    src_region: r.region,
                    src_off: base + off,
                    dst_region,
                    dst_off,
                    len,
                };
                let copies = pack(&copies).scatter.iter().map(from_ring).collect();
                if let Some(grant) = self.grants.get_mut(&id.serial) {
                    grant.scattering += 1;
                }
                self.actions.push_back(Action::Scatter { id: ScatterId { peer, chunk: id }, copies });
            }
        }
    }

    /// A block is in its pages. Exactly once per [`Action::Scatter`].
    pub fn handle_scattered(&mut self, now: Time, id: ScatterId) {
        let ScatterId { peer, chunk } = id;
        let Some(grant) =
            self.grants.get_mut(&chunk.serial).filter(|g| g.key == chunk.key && g.scattering > 0)
        else {
            return;
        };
        grant.scattering -= 1;
        let live = grant.phase == Phase::Live;
        if let Some(body) = self.stage.as_mut().filter(|_| live).and_then(|s| s.scattered(peer, chunk)) {
            self.stats.chunks_scattered += 1;
            self.link.send(peer, chunk.key, chunk.serial, body);
            self.allow(chunk.serial);
        }
        if let Some(room) = self.rooms.get_mut(&chunk.key).filter(|r| r.serial == Some(chunk.serial)) {
            room.progressed = now;
        }
        self.check_complete(now, chunk.key);
        self.try_release(chunk.serial);
    }
}
