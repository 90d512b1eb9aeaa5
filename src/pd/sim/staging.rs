//! Copies inside one rank: sources into a buffer, blocks out of the ring. They take their time, too.

use super::memory::{BLOCK_BYTES, Owner, STAGE_BYTES, stage_base};
use super::nodes::Machine;
use super::{Ev, World};
use crate::pd::ids::RoomKey;
use crate::pd::layout::Layout;
use crate::pd::plan::Copy;
use crate::pd::receiver::ScatterId;
use crate::pd::staging::{StagingBuffers, StagingRing};

#[derive(Debug)]
pub(super) enum Local {
    Gather { job: u64, copies: Vec<Copy>, room: Option<RoomKey> },
    Scatter { id: ScatterId, copies: Vec<Copy> },
}

impl World {
    pub(super) fn buffers_of(&self, l: &Layout) -> Option<StagingBuffers> {
        let (base, buffers) = (stage_base(l), self.p.buffers);
        debug_assert!(u64::from(buffers) * BLOCK_BYTES <= STAGE_BYTES);
        (self.p.ring > 0).then_some(StagingBuffers {
            region: 0,
            base,
            buffer_bytes: BLOCK_BYTES,
            buffers,
            copies_min: 1,
        })
    }

    pub(super) fn ring_of(&self, l: &Layout) -> Option<StagingRing> {
        let (base, bytes) = (stage_base(l), self.p.ring);
        debug_assert!(bytes <= STAGE_BYTES);
        (bytes > 0).then_some(StagingRing { region: 0, base, bytes, chunks_max: 8 })
    }

    pub(super) fn start_gather(&mut self, n: usize, job: u64, copies: Vec<Copy>) {
        let room = self.source_room(self.nodes[n].mem, &copies);
        if room.is_none() {
            self.violation("I2", format!("node {n} gathers from pages that are not one room's"));
        }
        self.start_local(n, Local::Gather { job, copies, room });
    }

    pub(super) fn start_local(&mut self, n: usize, local: Local) {
        self.next_write += 1;
        let id = self.next_write;
        self.locals.insert(id, local);
        let slow = if !self.calm && self.rng.chance(10) { 3_000_000 } else { 20_000 };
        let (life, wait) = (self.nodes[n].life, self.rng.log(10, slow));
        self.after(wait, Ev::Local { node: n, life, id });
    }

    pub(super) fn local_copy(&mut self, n: usize, life: u32, id: u64) {
        let Some(local) = self.locals.remove(&id) else { return };
        if self.nodes[n].life != life || self.nodes[n].machine.is_none() {
            return;
        }
        self.note(id);
        let (now, mem) = (self.now, self.nodes[n].mem);
        match local {
            Local::Gather { job, copies, room } => {
                if self.source_room(mem, &copies) != room {
                    self.violation("I2", format!("node {n} gathers pages that {room:?} had given back"));
                }
                self.copy_within(mem, &copies);
                let copied = self.calm || !self.rng.chance(self.p.write_fail / 4);
                if let Some(Machine::P(m)) = &mut self.nodes[n].machine {
                    m.handle_gathered(now, job, copied);
                }
            }
            Local::Scatter { id, copies } => {
                for c in &copies {
                    for (component, unit, owner) in self.memories[mem].owners_of(c.dst_off, c.len) {
                        if owner != Owner::Grant(id.chunk.serial) {
                            let what =
                                format!("{id:?} is scattered on {component:?} unit {unit} of {owner:?}");
                            self.violation("I1", what);
                            return;
                        }
                    }
                }
                self.copy_within(mem, &copies);
                copies.iter().for_each(|c| self.memories[mem].leave_ring(c.src_off, c.len));
                self.report.scatters += 1;
                if let Some(Machine::D(m)) = &mut self.nodes[n].machine {
                    m.handle_scattered(now, id);
                }
            }
        }
        self.drain(n);
    }

    fn copy_within(&mut self, mem: usize, copies: &[Copy]) {
        for c in copies {
            let data = self.memories[mem].read(c);
            self.memories[mem].write(c, &data);
        }
    }
}
