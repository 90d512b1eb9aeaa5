//! Writes: when they land has nothing to do with when, or how, they are reported.

use super::memory::Owner;
use super::nodes::Machine;
use super::{Ev, Strength, World};
use crate::pd::ids::{PeerId, RoomKey, Serial, Tag, XferId};
use crate::pd::plan::Copy;
use crate::pd::sender::Outcome;

#[derive(Debug)]
pub(super) struct Write {
    from: usize,
    life: u32,
    inc: u64,
    xfer: XferId,
    src_mem: usize,
    to: usize,
    dst_mem: usize,
    attach: u32,
    serial: Serial,
    copies: Vec<Copy>,
    parts: u32,
    /// Room the sources belonged to when the write was posted.
    room: Option<RoomKey>,
    /// It reads a staging buffer, not sources.
    packed: bool,
    refused: bool,
}

const OK: u8 = 0;
const QUIET: u8 = 1;
const UNKNOWN: u8 = 2;

impl World {
    pub(super) fn post_write(
        &mut self,
        n: usize,
        xfer: XferId,
        peer: PeerId,
        attach: u32,
        tag: Tag,
        copies: Vec<Copy>,
    ) {
        let to = peer.0 as usize;
        self.next_write += 1;
        let id = self.next_write;
        let mem = self.nodes[n].mem;
        let packed = copies.first().is_some_and(|c| c.src_off >= self.memories[mem].stage_base());
        let room = self.source_room(mem, &copies);
        if room.is_none() && !packed {
            self.violation("I2", format!("node {n} posts {xfer:?} from pages that are not one room's"));
        }
        // Memory of a process is reached by what that process registered, never by its successor's.
        let dst_mem = if self.nodes[to].inc == tag.owner() { self.nodes[to].mem } else { usize::MAX };
        let parts = self.rng.within(1, 3) as u32;
        let w = Write {
            from: n,
            life: self.nodes[n].life,
            inc: self.nodes[n].inc.0,
            xfer,
            src_mem: self.nodes[n].mem,
            to,
            dst_mem,
            attach,
            serial: tag.serial(),
            copies,
            parts,
            room,
            packed,
            refused: false,
        };
        self.say("write", || format!("{xfer:?} from node {n} to node {to} for {:?} of {room:?}", w.serial));
        self.writes.insert(id, w);
        let slow = if !self.calm && self.rng.chance(self.p.write_fail) { 30_000_000 } else { 50_000 };
        let mut times: Vec<u64> = (0..parts).map(|_| self.rng.log(50, slow)).collect();
        times.sort_unstable();
        let last = times.last().copied().unwrap_or(0);
        let fate = if !self.calm && self.rng.chance(self.p.write_fail) { self.rng.below(3) } else { 3 };
        let landed = if fate == 3 { parts } else { self.rng.below(u64::from(parts) + 1) as u32 };
        for (part, at) in times.iter().enumerate().take(landed as usize) {
            self.after(*at, Ev::Land { write: id, part: part as u32 });
        }
        let (at, how) = match fate {
            // Failed, and quiet when it says so.
            0 => (last + self.rng.below(1_000), QUIET),
            // Failed or timed out at some moment of its own; what lands, lands later.
            1 | 2 => (self.rng.log(50, slow), UNKNOWN),
            _ => (last + self.rng.below(1_000), OK),
        };
        self.after(at, Ev::Complete { write: id, how });
        if how == UNKNOWN && self.rng.chance(50) {
            let late = last.max(at) + self.rng.log(1_000, 20_000_000);
            self.after(late, Ev::Complete { write: id, how: QUIET });
        }
        if self.rng.chance(5) {
            self.after(last + at + 10, Ev::Complete { write: id, how });
        }
    }

    pub(super) fn source_room(&self, mem: usize, copies: &[Copy]) -> Option<RoomKey> {
        let mut room = None;
        for c in copies {
            for (_, _, owner) in self.memories[mem].owners_of(c.src_off, c.len) {
                match (owner, room) {
                    (Owner::Source(k), None) => room = Some(k),
                    (Owner::Source(k), Some(r)) if k == r => {}
                    _ => return None,
                }
            }
        }
        room
    }

    pub(super) fn land(&mut self, id: u64, part: u32) {
        let Some(w) = self.writes.get(&id) else { return };
        if self.nodes[w.to].mem != w.dst_mem || self.nodes[w.to].machine.is_none() {
            return;
        }
        let fenced = self.p.strength != Strength::Weakest
            && self.nodes[w.to].fenced.get(&w.inc).is_some_and(|min| w.attach < *min);
        let shut = self.p.strength == Strength::Strongest && !self.nodes[w.to].allowed.contains(&w.serial.0);
        if fenced || shut {
            if let Some(w) = self.writes.get_mut(&id) {
                w.refused = true;
            }
            return;
        }
        let n = w.copies.len();
        let (lo, hi) = (n * part as usize / w.parts as usize, n * (part as usize + 1) / w.parts as usize);
        let copies = w.copies[lo..hi].to_vec();
        let (src, dst, serial, xfer, room) = (w.src_mem, w.dst_mem, w.serial, w.xfer, w.room);
        let (packed, to) = (w.packed, w.to);
        self.report.landings += 1;
        self.note(id << 8 | u64::from(part));
        let whose = self.source_room(src, &copies);
        if !packed && whose.is_none_or(|r| Some(r) != room) && !copies.is_empty() {
            self.violation("I2", format!("{xfer:?} reads pages that {room:?} had given back"));
        }
        for c in &copies {
            if c.dst_off >= self.memories[dst].stage_base() && self.nodes[to].ended.contains(&serial) {
                self.violation(
                    "I1",
                    format!("{xfer:?} for {serial:?} lands in the ring after its grant ended"),
                );
                return;
            }
            if c.dst_off >= self.memories[dst].stage_base()
                && let Some(old) = self.memories[dst].land_in_ring(c.dst_off, c.len, serial)
            {
                let what = format!("{xfer:?} for {serial:?} lands in the ring on a block of {old:?}");
                self.violation("I18", what);
                return;
            }
            for (component, unit, owner) in self.memories[dst].owners_of(c.dst_off, c.len) {
                if owner != Owner::Grant(serial) {
                    let what = format!(
                        "{xfer:?} for {serial:?} lands on {component:?} unit {unit}, owned by {owner:?}"
                    );
                    self.violation("I1", what);
                    return;
                }
            }
            let data = self.memories[src].read(c);
            self.memories[dst].write(c, &data);
        }
    }

    pub(super) fn complete_write(&mut self, id: u64, how: u8) {
        let Some(w) = self.writes.get(&id) else { return };
        let (n, xfer) = (w.from, w.xfer);
        if self.nodes[n].life != w.life {
            return;
        }
        let gone = self.nodes[w.to].mem != w.dst_mem;
        let bytes = w.copies.iter().map(|c| c.len).sum();
        let outcome = match how {
            OK if w.refused || gone => Outcome::FailedQuiet,
            OK => Outcome::Ok { bytes },
            QUIET => Outcome::FailedQuiet,
            _ => Outcome::FailedUnknown,
        };
        self.say("write", || format!("{xfer:?} of node {n} reports {outcome:?}"));
        let now = self.now;
        if let Some(Machine::P(m)) = &mut self.nodes[n].machine {
            m.handle_done(now, xfer, outcome);
        }
        self.drain(n);
    }
}
