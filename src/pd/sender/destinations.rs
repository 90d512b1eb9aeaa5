//! Peers, destinations, aborts: what decode ranks ask of a sender.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::{Action, Dest, Orphan, Reg, Sender};
use crate::base::Time;
use crate::pd::ids::{Incarnation, PeerId, RoomKey, Serial};
use crate::pd::layout::{Component, pages_of, window_first_page};
use crate::pd::link::Slot;
use crate::pd::plan::{PeerPlan, RankView, plan};
use crate::pd::plant::Plant;
use crate::pd::reason::{Incompatible, Reason};
use crate::pd::topo::{Rank, destinations};
use crate::pd::wire::{Body, Metadata, Quiet, Register, RegisterReply, Status, VERSION};

impl Sender {
    pub(super) fn on_register(&mut self, now: Time, peer: PeerId, inc: Incarnation, r: Register) {
        let known = self.regs.get(&peer).is_some_and(|k| k.inc == inc && k.attach >= r.attach);
        if !known {
            let verdict = self.judge(&r);
            if verdict.is_err() {
                self.stats.peers_refused += 1;
            }
            let old = self.regs.remove(&peer).filter(|k| k.inc == inc);
            let (floor, closed) = old.map_or((Serial(0), BTreeSet::new()), |k| (k.floor, k.closed));
            let (expect, plan) = match verdict {
                Ok((expect, plan)) => (expect, Ok(Arc::new(plan))),
                Err(why) => (Vec::new(), Err(why)),
            };
            if plan.is_ok() {
                self.actions.push_back(Action::Attach { peer, inc, attach: r.attach, blob: r.blob });
            }
            let reg = Reg {
                inc,
                instance: r.instance,
                rank: r.rank,
                expect,
                plan,
                attach: r.attach,
                floor,
                closed,
                ring: r.ring.filter(|r| r.bytes > 0),
            };
            if let Some(ring) = reg.ring {
                self.staging.set_ring(peer, ring.bytes);
            }
            self.regs.insert(peer, reg);
        }
        self.raise_floor(peer, r.floor);
        self.fail_below_floor(now, peer);
        let Some(reg) = self.regs.get(&peer) else { return };
        let reply = match &reg.plan {
            Ok(_) => RegisterReply::Accepted {
                topo: self.topo.clone(),
                rank: self.rank,
                layout: self.layout.clone(),
                attach: reg.attach,
            },
            Err(why) => RegisterReply::Refused { why: *why, version: VERSION },
        };
        self.link.send(peer, RoomKey::default(), Serial(0), Body::RegisterReply(Box::new(reply)));
    }

    fn judge(&self, r: &Register) -> Result<(Vec<Rank>, PeerPlan), Incompatible> {
        let src = RankView { topo: &self.topo, rank: self.rank, layout: &self.layout };
        let dst = RankView { topo: &r.topo, rank: r.rank, layout: &r.layout };
        #[cfg_attr(
            not(any(test, feature = "sim")),
            expect(unused_mut, reason = "changed by planted bugs only")
        )]
        let mut plan = plan(&src, &dst)?;
        #[cfg(any(test, feature = "sim"))]
        if self.plant == Some(Plant::GuessedV) {
            plan.plant_guessed_v(&r.layout);
        }
        Ok((destinations(&self.topo, &r.topo, self.rank, r.rank.dp)?, plan))
    }

    pub(super) fn raise_floor(&mut self, peer: PeerId, floor: Serial) {
        if let Some(reg) = self.regs.get_mut(&peer)
            && floor > reg.floor
        {
            reg.floor = floor;
            reg.closed = reg.closed.split_off(&floor);
        }
    }

    /// A fence on the other side closed every grant of before; their rooms cannot succeed.
    fn fail_below_floor(&mut self, now: Time, peer: PeerId) {
        let Some(floor) = self.regs.get(&peer).map(|r| r.floor) else { return };
        let hit: Vec<RoomKey> = self
            .rooms
            .iter()
            .filter(|(_, r)| r.local.is_none() && r.dests.iter().any(|d| d.peer == peer && d.serial < floor))
            .map(|(k, _)| *k)
            .collect();
        hit.into_iter().for_each(|key| self.fail(now, key, Reason::PeerDead));
    }

    /// Whether a grant may not be written any more, for the incarnation that is registered now.
    pub(super) fn is_closed(&self, peer: PeerId, serial: Serial) -> bool {
        self.regs.get(&peer).is_none_or(|r| serial < r.floor || r.closed.contains(&serial))
    }

    fn registered(&mut self, peer: PeerId, inc: Incarnation) -> bool {
        if self.regs.get(&peer).is_some_and(|r| r.inc == inc) {
            return true;
        }
        let why = RegisterReply::Refused { why: Incompatible::NotRegistered, version: VERSION };
        self.link.send(peer, RoomKey::default(), Serial(0), Body::RegisterReply(Box::new(why)));
        false
    }

    /// The other side queues the request: the clock of the room starts again.
    pub(super) fn on_announce(&mut self, now: Time, peer: PeerId, key: RoomKey) {
        match self.rooms.get_mut(&key) {
            Some(room) if room.local.is_none() => {
                room.heard = now;
                // One set entry per peer, and peers are bounded.
                room.announced.insert(peer);
            }
            _ => {
                if let Some(reason) = self.tombs.get(key) {
                    self.link.send(peer, key, Serial(0), Body::Status(Status::Failed(reason)));
                }
            }
        }
    }

    pub(super) fn on_metadata(
        &mut self,
        now: Time,
        peer: PeerId,
        inc: Incarnation,
        key: RoomKey,
        serial: Serial,
        meta: Metadata,
    ) {
        if !self.registered(peer, inc) {
            return;
        }
        self.raise_floor(peer, meta.floor);
        if self.is_closed(peer, serial) && self.plant != Some(Plant::NoClosedGuard) {
            // The other side has given the grant up; this frame was under way for long.
            self.link.send(peer, key, serial, Body::Status(Status::Failed(Reason::Closed)));
            return;
        }
        if let Err(reason) = self.check_metadata(peer, &meta) {
            self.link.send(peer, key, serial, Body::Status(Status::Failed(reason)));
            return;
        }
        let meta = Arc::new(meta);
        if self.rooms.contains_key(&key) {
            self.add_destination(now, peer, inc, key, serial, meta);
        } else if let Some(reason) = self.tombs.get(key) {
            self.link.send(peer, key, serial, Body::Status(Status::Failed(reason)));
        } else {
            self.add_orphan(now, key, Orphan { since: now, peer, inc, serial, meta });
        }
    }

    fn check_metadata(&self, peer: PeerId, m: &Metadata) -> Result<(), Reason> {
        let reg = self.regs.get(&peer).ok_or(Reason::Closed)?;
        let plan = reg.plan.as_ref().map_err(|_| Reason::Incompatible)?;
        let ps = self.layout.page_tokens;
        let total = pages_of(m.prompt.tokens, ps);
        let first = window_first_page(m.prefix, m.prompt.tokens, self.layout.window_tokens, ps);
        let has = |c| plan.dst_units(c) > 0;
        let one = |c| usize::from(has(c));
        let full =
            if has(Component::Full) { plan.full_dst_pages(m.prompt.tokens, m.prefix) as usize } else { 0 };
        let window = if has(Component::Window) { total.saturating_sub(first) as usize } else { 0 };
        let lists = [
            (Component::Full, &m.full, full),
            (Component::Window, &m.window, window),
            (Component::State, &m.state, one(Component::State)),
            (Component::Ring, &m.ring, one(Component::Ring)),
        ];
        let fits = lists
            .iter()
            .all(|(c, list, want)| list.len() == *want && list.iter().all(|&p| p < plan.dst_units(*c)));
        if m.prefix <= total && fits { Ok(()) } else { Err(Reason::BadDestination) }
    }

    pub(super) fn add_destination(
        &mut self,
        now: Time,
        peer: PeerId,
        inc: Incarnation,
        key: RoomKey,
        serial: Serial,
        meta: Arc<Metadata>,
    ) {
        let closed = self.is_closed(peer, serial) && self.plant != Some(Plant::NoClosedGuard);
        let Some(reg) = self.regs.get(&peer).filter(|r| r.inc == inc && !closed) else { return };
        let (rank, instance, expect) = (reg.rank, reg.instance, reg.expect.clone());
        let Some(room) = self.rooms.get_mut(&key) else { return };
        let refuse = if let Some(outcome) = room.local {
            let again = room.dests.iter().any(|d| (d.peer, d.serial) == (peer, serial));
            match outcome {
                Ok(()) if again => return,
                Ok(()) => Some(Reason::Closed),
                Err(reason) => Some(reason),
            }
        } else if room.instance.is_some_and(|i| i != instance) {
            // The first owner of a room keeps it; the second is told, the room is not touched.
            Some(Reason::SecondOwner)
        } else if room.spec.prompt != meta.prompt {
            None
        } else if let Some(d) = room.dests.iter().find(|d| d.rank == rank) {
            (d.peer != peer || d.serial != serial).then_some(Reason::SecondOwner)
        } else {
            None
        };
        if let Some(reason) = refuse {
            self.link.send(peer, key, serial, Body::Status(Status::Failed(reason)));
            return;
        }
        room.heard = now;
        if !room.dests.iter().any(|d| d.rank == rank) {
            room.instance = Some(instance);
            room.expect = expect;
            room.dests.push(Dest {
                peer,
                inc,
                serial,
                rank,
                next: meta.prefix,
                meta: meta.clone(),
                open_chunks: 0,
                packed: 0,
                tail_queued: false,
                bytes: 0,
                told: false,
                acked: false,
            });
        }
        if room.spec.prompt != meta.prompt {
            // Two requests under one name: writing either into the other would be silent corruption.
            self.fail(now, key, Reason::PromptMismatch);
            return;
        }
        self.link.send(peer, key, serial, Body::MetadataAck);
        self.advance(now, key);
    }

    pub(super) fn on_status_ack(&mut self, now: Time, peer: PeerId, key: RoomKey, serial: Serial) {
        self.link.answered(peer, Slot::Status, key, serial);
        if let Some(room) = self.rooms.get_mut(&key) {
            for d in room.dests.iter_mut().filter(|d| d.peer == peer && d.serial == serial) {
                d.acked = d.told || room.local.is_some_and(|o| o.is_err());
            }
            self.try_unpin(now, key);
        }
    }

    /// From here on nothing may be posted for the grant; the answer says when nothing is posted any more.
    pub(super) fn on_abort(&mut self, now: Time, peer: PeerId, key: RoomKey, serial: Serial, floor: Serial) {
        let inc = self.link.incarnation(peer);
        if !self.registered(peer, inc) {
            return;
        }
        self.raise_floor(peer, floor);
        if !self.is_closed(peer, serial) {
            let max = self.config.closed_max;
            let Some(reg) = self.regs.get_mut(&peer) else { return };
            if reg.closed.len() >= max {
                // Without a place to remember it the grant is not closed, so it must not be acknowledged.
                self.link.send(peer, key, serial, Body::AbortReply(Quiet::Busy));
                return;
            }
            reg.closed.insert(serial);
        }
        self.drop_orphan(key, peer, serial);
        self.link.answered(peer, Slot::Status, key, serial);
        if self.rooms.contains_key(&key) {
            self.fail(now, key, Reason::AbortedByDecode);
        } else {
            self.tombs.insert(now, key, Reason::AbortedByDecode);
        }
        if let Some(room) = self.rooms.get_mut(&key) {
            room.dests
                .iter_mut()
                .filter(|d| d.peer == peer && d.serial == serial)
                .for_each(|d| d.acked = true);
        }
        self.try_unpin(now, key);
        self.answer_abort(peer, inc, key, serial);
    }

    fn answer_abort(&mut self, peer: PeerId, inc: Incarnation, key: RoomKey, serial: Serial) {
        let quiet = if self.plant == Some(Plant::AckBeforeQuiet) {
            Some(Quiet::Drained)
        } else {
            self.writes.quiet(peer, inc, serial, key)
        };
        if let Some(quiet) = quiet {
            self.link.send(peer, key, serial, Body::AbortReply(quiet));
        }
    }

    pub(super) fn on_topup(
        &mut self,
        now: Time,
        peer: PeerId,
        key: RoomKey,
        serial: Serial,
        from: u32,
        (pages, window): (Vec<u32>, Vec<u32>),
    ) {
        if self.is_closed(peer, serial) {
            return;
        }
        let Some(plan) = self.regs.get(&peer).and_then(|r| r.plan.as_ref().ok()).cloned() else { return };
        let Some(room) = self.rooms.get_mut(&key).filter(|r| r.local.is_none_or(|o| o.is_ok())) else {
            self.link.send(peer, key, serial, Body::Status(Status::Failed(Reason::SourceReleased)));
            return;
        };
        let (tokens, ps) = (room.spec.prompt.tokens, self.layout.page_tokens);
        let Some(d) = room.dests.iter_mut().find(|d| d.peer == peer && d.serial == serial) else { return };
        if from >= d.meta.prefix {
            return;
        }
        let first = |prefix| window_first_page(prefix, tokens, self.layout.window_tokens, ps);
        let has = |c| plan.dst_units(c) > 0;
        let window_want = if has(Component::Window) {
            pages_of(tokens, ps).saturating_sub(first(from)) as usize
        } else {
            0
        };
        let fits = |list: &[u32], want: usize, old: &[u32], c| {
            list.len() == want && list.ends_with(old) && list.iter().all(|&p| p < plan.dst_units(c))
        };
        let full_want = if has(Component::Full) { plan.full_dst_pages(tokens, from) as usize } else { 0 };
        if !fits(&pages, full_want, &d.meta.full, Component::Full)
            || !fits(&window, window_want, &d.meta.window, Component::Window)
        {
            self.fail(now, key, Reason::BadDestination);
            return;
        }
        let old = d.meta.prefix;
        let meta = Metadata { prefix: from, full: pages, window, ..(*d.meta).clone() };
        d.meta = Arc::new(meta);
        d.told = false;
        d.acked = false;
        self.link.answered(peer, Slot::Status, key, serial);
        if d.next == old {
            d.next = from;
        } else {
            // Everything below `next` was ready when it was queued, so the missing front is ready, too.
            let pages = &room.pages[from as usize..old as usize];
            d.open_chunks += self.writes.queue_full(key, d, from, pages, self.config.chunk_pages_max);
        }
        // A tail that is queued, or gone, carries the window from where it began then; the rest goes alone.
        let gap = first(old) - first(from);
        if let Some(tail) = room.tail.as_ref().filter(|_| d.tail_queued && gap > 0 && window_want > 0) {
            d.open_chunks += self.writes.queue_window(key, d, tail, first(from), gap);
        }
        self.advance(now, key);
    }

    // ---- destinations without a room ----

    fn add_orphan(&mut self, now: Time, key: RoomKey, o: Orphan) {
        let list = self.orphans.entry(key).or_default();
        if list.iter().any(|k| (k.peer, k.serial) == (o.peer, o.serial)) {
            return;
        }
        if self.orphan_count >= self.config.orphans_max {
            if list.is_empty() {
                self.orphans.remove(&key);
            }
            self.link.send(o.peer, key, o.serial, Body::Status(Status::Failed(Reason::TableFull)));
            return;
        }
        if list.is_empty() {
            self.orphan_ages.insert((now, key));
        }
        let (peer, serial) = (o.peer, o.serial);
        list.push(o);
        self.orphan_count += 1;
        self.link.send(peer, key, serial, Body::MetadataAck);
    }

    pub(super) fn take_orphans(&mut self, key: RoomKey) -> Vec<Orphan> {
        let list = self.orphans.remove(&key).unwrap_or_default();
        if let Some(first) = list.iter().map(|o| o.since).min() {
            self.orphan_ages.remove(&(first, key));
        }
        self.orphan_count -= list.len();
        list
    }

    fn keep_orphans(&mut self, key: RoomKey, keep: Vec<Orphan>) {
        if let Some(first) = keep.iter().map(|o| o.since).min() {
            self.orphan_ages.insert((first, key));
            self.orphan_count += keep.len();
            self.orphans.insert(key, keep);
        }
    }

    fn drop_orphan(&mut self, key: RoomKey, peer: PeerId, serial: Serial) {
        if self.orphans.contains_key(&key) {
            let mut list = self.take_orphans(key);
            list.retain(|o| (o.peer, o.serial) != (peer, serial));
            self.keep_orphans(key, list);
        }
    }

    pub(super) fn drop_orphans_of(&mut self, peer: PeerId) {
        let keys: Vec<RoomKey> =
            self.orphans.iter().filter(|(_, l)| l.iter().any(|o| o.peer == peer)).map(|(k, _)| *k).collect();
        for key in keys {
            let mut list = self.take_orphans(key);
            list.retain(|o| o.peer != peer);
            self.keep_orphans(key, list);
        }
    }

    pub(super) fn expire_orphans(&mut self, now: Time) {
        while let Some(&(since, key)) = self.orphan_ages.first()
            && now.since(since) >= self.config.orphan_us
        {
            for o in self.take_orphans(key) {
                self.link.send(o.peer, key, o.serial, Body::Status(Status::Failed(Reason::NoSender)));
            }
            self.tombs.insert(now, key, Reason::NoSender);
        }
    }
}
