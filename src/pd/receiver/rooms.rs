//! Rooms: registration, publication, progress, success.

use super::{Arrived, Event, Receiver, Refused, Reg, RegState, Report, Restore, Shown};
use crate::base::Time;
use crate::pd::grant::Granted;
use crate::pd::ids::{Incarnation, PeerId, RoomKey, Serial};
use crate::pd::layout::{Component, pages_of, window_first_page};
use crate::pd::link::Slot;
use crate::pd::plan::{PeerPlan, RankView, check_coverage, plan};
use crate::pd::plant::Plant;
use crate::pd::reason::{Incompatible, Reason};
use crate::pd::topo::{Rank, Topology};
use crate::pd::wire::{Body, Metadata, Register, RegisterReply, Status};

/// What an accepted contact told about itself.
type View<'a> = (&'a PeerPlan, &'a Topology, Rank);

impl Receiver {
    /// Sends our registration unless one is accepted, refused or under way.
    pub(super) fn register(&mut self, now: Time, peer: PeerId) {
        let inc = self.link.incarnation(peer);
        let reg = self.regs.entry(peer).or_insert(Reg {
            inc,
            state: RegState::Asking,
            attach: 0,
            barrier: Serial(0),
            fencing: false,
        });
        if reg.fencing || !matches!(reg.state, RegState::Asking) {
            return;
        }
        let body = Body::Register(Box::new(Register {
            instance: self.instance,
            topo: self.topo.clone(),
            rank: self.rank,
            layout: self.layout.clone(),
            attach: reg.attach,
            floor: reg.barrier.max(self.link.floor),
            blob: self.blob.clone(),
            ring: self.config.staging,
        }));
        self.link.send_until(now, peer, Slot::Register, RoomKey::default(), Serial(0), body);
    }

    pub(super) fn peer_back(&mut self, now: Time, peer: PeerId) {
        let inc = self.link.incarnation(peer);
        if let Some(reg) = self.regs.get_mut(&peer) {
            if reg.inc != inc {
                // Fences of the old life go by its incarnation and need no wait here.
                reg.state = RegState::Asking;
                reg.fencing = false;
            }
            reg.inc = inc;
            if !self.link.is_asking(peer, Slot::Register) {
                self.register(now, peer);
            }
        }
        self.ask_again(now, peer);
    }

    pub(super) fn on_register_reply(&mut self, now: Time, peer: PeerId, r: RegisterReply) {
        let inc = self.link.incarnation(peer);
        let Some(attach) = self.regs.get(&peer).map(|r| r.attach) else { return };
        let state = match r {
            RegisterReply::Refused { why: Incompatible::NotRegistered, .. } => RegState::Asking,
            RegisterReply::Refused { why, .. } => RegState::Refused(why),
            RegisterReply::Accepted { attach: answered, .. } if answered != attach => return,
            RegisterReply::Accepted { topo, rank, layout, .. } => {
                let src = RankView { topo: &topo, rank, layout: &layout };
                let dst = RankView { topo: &self.topo, rank: self.rank, layout: &self.layout };
                match plan(&src, &dst) {
                    Ok(plan) => RegState::Accepted { plan: Box::new(plan), topo, rank },
                    Err(why) => RegState::Refused(why),
                }
            }
        };
        let again = matches!(state, RegState::Asking);
        if let Some(reg) = self.regs.get_mut(&peer) {
            reg.inc = inc;
            reg.state = state;
        }
        self.link.answered(peer, Slot::Register, RoomKey::default(), Serial(0));
        if again {
            self.register(now, peer);
        }
        let waiting: Vec<RoomKey> =
            self.rooms.iter().filter(|(_, r)| r.spec.contacts.contains(&peer)).map(|(k, _)| *k).collect();
        for key in waiting {
            self.check_contacts(now, key);
            self.publish(now, key);
            self.check_complete(now, key);
        }
    }

    /// The verdicts of all contacts, once they are there.
    fn verdict(&self, contacts: &[PeerId]) -> Option<Result<Vec<View<'_>>, Incompatible>> {
        let mut views = Vec::with_capacity(contacts.len());
        for peer in contacts {
            match self.regs.get(peer).map(|r| &r.state) {
                Some(RegState::Accepted { plan, topo, rank }) => views.push((plan.as_ref(), topo, *rank)),
                Some(RegState::Refused(why)) => return Some(Err(*why)),
                Some(RegState::Asking) | None => return None,
            }
        }
        let first = views.first()?;
        let plans: Vec<&PeerPlan> = views.iter().map(|v| v.0).collect();
        let dst = RankView { topo: &self.topo, rank: self.rank, layout: &self.layout };
        if views.iter().any(|v| v.1 != first.1) {
            return Some(Err(Incompatible::Instance));
        }
        Some(check_coverage(&dst, first.1, &plans).map(|()| views))
    }

    pub(super) fn check_contacts(&mut self, now: Time, key: RoomKey) {
        let Some(room) = self.rooms.get(&key) else { return };
        if let Some(Err(_)) = self.verdict(&room.spec.contacts) {
            self.fail(now, key, Reason::Incompatible);
        }
    }

    /// Shows the destination to all contacts at once, when all of them have accepted us.
    pub(super) fn publish(&mut self, now: Time, key: RoomKey) {
        let Some(room) = self.rooms.get(&key) else { return };
        let Some(serial) = room.serial.filter(|_| !room.published && room.local.is_none()) else { return };
        if !matches!(self.verdict(&room.spec.contacts), Some(Ok(_))) {
            return;
        }
        let Some(grant) = self.grants.get_mut(&serial) else { return };
        let d = grant.pages.destination();
        let meta = Metadata {
            prompt: room.spec.prompt,
            prefix: room.prefix,
            full: d.full.clone(),
            window: d.window.clone(),
            state: d.state.clone(),
            ring: d.ring.clone(),
            floor: self.link.floor,
        };
        for shown in &mut grant.shown {
            shown.inc = self.link.incarnation(shown.peer);
            let body = Body::Metadata(Box::new(meta.clone()));
            self.link.send_until(now, shown.peer, Slot::Metadata, key, serial, body);
        }
        if let Some(room) = self.rooms.get_mut(&key) {
            room.published = true;
            room.heard.iter_mut().for_each(|h| *h = now);
            self.wakes.remove(&(room.wake, key));
            room.wake = now + self.config.announce_us.min(self.config.no_progress_us);
            self.wakes.insert((room.wake, key));
        }
    }

    fn heard_of(&mut self, now: Time, peer: PeerId, key: RoomKey) {
        if let Some(room) = self.rooms.get_mut(&key) {
            for (h, _) in room.heard.iter_mut().zip(&room.spec.contacts).filter(|(_, p)| **p == peer) {
                *h = now;
            }
        }
    }

    pub(super) fn on_metadata_ack(&mut self, now: Time, peer: PeerId, key: RoomKey, serial: Serial) {
        self.link.answered(peer, Slot::Metadata, key, serial);
        if self.rooms.get(&key).is_some_and(|r| r.serial == Some(serial)) {
            self.heard_of(now, peer, key);
        }
    }

    pub(super) fn on_status(
        &mut self,
        now: Time,
        peer: PeerId,
        key: RoomKey,
        serial: Serial,
        status: Status,
    ) {
        let mut key = key;
        if self.plant == Some(Plant::NoEpochCheck) {
            let range = RoomKey { room: key.room, epoch: 0 }..=RoomKey { room: key.room, epoch: u32::MAX };
            key = self.rooms.range(range).next_back().map_or(key, |(k, _)| *k);
        }
        let room = self.rooms.get(&key);
        let ours = room.is_some_and(|r| {
            // Before the destination is out a room is known by its name only.
            let same = r.serial == Some(serial) || (serial == Serial(0) && !r.published);
            r.spec.contacts.contains(&peer) && (same || self.plant == Some(Plant::NoEpochCheck))
        });
        if !ours {
            self.stats.status_stale += 1;
            if !matches!(status, Status::Working) {
                self.link.send(peer, key, serial, Body::StatusAck);
            }
            return;
        }
        self.heard_of(now, peer, key);
        self.link.answered(peer, Slot::Metadata, key, serial);
        match status {
            Status::Working => {}
            Status::Failed(reason) => {
                self.fail(now, key, reason);
                self.link.send(peer, key, serial, Body::StatusAck);
            }
            Status::Done { bytes, checksum, aux } => {
                if let Some(room) = self.rooms.get_mut(&key) {
                    let at = room.spec.contacts.iter().position(|p| *p == peer);
                    let report = Some(Report { bytes, checksum, aux });
                    if let Some(slot) = at.and_then(|i| room.reported.get_mut(i))
                        && *slot != report
                    {
                        *slot = report;
                        room.progressed = now;
                    }
                }
                self.check_complete(now, key);
                // Not confirmed while the restore is pending: the source may still be needed.
                if self.rooms.get(&key).is_none_or(|r| r.local.is_some()) {
                    self.link.send(peer, key, serial, Body::StatusAck);
                }
            }
        }
    }

    /// Bytes expected from each contact (`None`: only the sum is known) and from all of them.
    fn expected(&self, key: RoomKey) -> Option<(Vec<Option<u64>>, u64)> {
        let room = self.rooms.get(&key)?;
        let views = self.verdict(&room.spec.contacts)?.ok()?;
        let (tokens, prefix, ps) = (room.spec.prompt.tokens, room.prefix, self.layout.page_tokens);
        let window = pages_of(tokens, ps).saturating_sub(window_first_page(
            prefix,
            tokens,
            self.layout.window_tokens,
            ps,
        ));
        let mut each = Vec::with_capacity(views.len());
        let mut sum = 0;
        for (plan, topo, rank) in views {
            let rest = plan.unit_bytes(Component::Window, window) + plan.unit_bytes(Component::State, 1);
            // Live rows of a ring are known to the prefill side only.
            let ring = plan.unit_bytes(Component::Ring, 1) > 0;
            let full = plan.full_bytes(tokens, prefix);
            each.push(full.filter(|_| !ring).map(|f| f + rest));
            let shared = topo.page_shard && rank.tp != 0;
            sum += rest + if shared { 0 } else { plan.full_bytes_unsharded(tokens, prefix) };
        }
        Some((each, sum))
    }

    fn rings(&self, key: RoomKey) -> bool {
        self.rooms.contains_key(&key) && self.layout.has(Component::Ring)
    }

    /// Success: every contact reported, the bytes are those that were planned, the prefix is in place.
    pub(super) fn check_complete(&mut self, now: Time, key: RoomKey) {
        let Some(room) = self.rooms.get(&key) else { return };
        let scattering = room.serial.and_then(|s| self.grants.get(&s)).is_some_and(|g| g.scattering > 0);
        if room.local.is_some() || room.restore == Restore::Pending || !room.published || scattering {
            return;
        }
        let reports: Vec<u64> = room.reported.iter().flatten().map(|r| r.bytes).collect();
        if reports.len() != room.spec.contacts.len() && self.plant != Some(Plant::NoByteCount) {
            return;
        }
        if reports.is_empty() {
            return;
        }
        if self.plant != Some(Plant::NoByteCount) {
            let Some((each, sum)) = self.expected(key) else { return };
            // A report from before a top-up is short; the next one will not be.
            let short = each.iter().zip(&reports).any(|(want, got)| want.is_some_and(|w| *got < w));
            let total: u64 = reports.iter().sum();
            let wrong = each.iter().zip(&reports).any(|(want, got)| want.is_some_and(|w| *got > w));
            if wrong || (!self.rings(key) && total > sum) {
                self.fail(now, key, Reason::ByteCount);
                return;
            }
            if short || (!self.rings(key) && total < sum) {
                return;
            }
        }
        if let Some(room) = self.rooms.get_mut(&key) {
            room.local = Some(Ok(()));
        }
        if !self.config.collective {
            self.conclude(now, key, Ok(()));
        }
    }

    /// Ends a room, once. A success hands its pages over.
    pub(super) fn conclude(&mut self, now: Time, key: RoomKey, outcome: Result<(), Reason>) {
        let Some(room) = self.rooms.get(&key) else { return };
        let outcome = match (room.local, outcome) {
            (None, _) => return,
            (Some(Err(first)), _) => Err(first),
            (Some(Ok(())), group) => group,
        };
        let Some(room) = self.rooms.remove(&key) else { return };
        self.wakes.remove(&(room.wake, key));
        self.tombs.insert(now, key, outcome.err().unwrap_or(Reason::Closed));
        let ack: Vec<(PeerId, Serial)> = match (room.local, room.serial) {
            (Some(Ok(())), Some(serial)) => room.spec.contacts.iter().map(|p| (*p, serial)).collect(),
            _ => Vec::new(),
        };
        for &(peer, serial) in &ack {
            self.link.answered(peer, Slot::Topup, key, serial);
            self.link.send(peer, key, serial, Body::StatusAck);
        }
        match outcome {
            Ok(()) => {
                if let (Some(stage), Some(serial)) = (&mut self.stage, room.serial) {
                    stage.close(key, serial);
                }
                let Some(pages) = room.serial.and_then(|s| self.commit(s)) else { return };
                self.stats.rooms_done += 1;
                let aux = room.reported.iter().flatten().map(|r| &r.aux).find(|a| !a.is_empty());
                let arrived = Arrived {
                    pages,
                    aux: aux.cloned().unwrap_or_default(),
                    checksums: room.reported.iter().map(|r| r.as_ref().map_or(0, |r| r.checksum)).collect(),
                };
                self.events.push_back(Event::Done { key, outcome: Ok(arrived) });
            }
            Err(reason) => {
                self.stats.rooms_failed += 1;
                self.events.push_back(Event::Done { key, outcome: Err(reason) });
                if let (Some(Ok(())), Some(serial)) = (room.local, room.serial) {
                    self.settle(now, serial);
                }
            }
        }
    }

    /// Fails a room here: the client hears it now, the pages climb the ladder.
    pub(super) fn fail(&mut self, now: Time, key: RoomKey, reason: Reason) {
        let Some(room) = self.rooms.get_mut(&key) else { return };
        if room.local.is_some() {
            return;
        }
        room.local = Some(Err(reason));
        let serial = room.serial;
        let contacts = room.spec.contacts.clone();
        if let Some(serial) = serial {
            for &peer in &contacts {
                self.link.answered(peer, Slot::Metadata, key, serial);
                self.link.answered(peer, Slot::Topup, key, serial);
            }
            self.hold(now, key, serial);
        }
        if !self.config.collective {
            self.conclude(now, key, Err(reason));
        }
    }

    pub(super) fn wake_room(&mut self, now: Time, key: RoomKey) {
        let c = self.config;
        let Some(room) = self.rooms.get(&key) else { return };
        if room.local.is_none() {
            let silent = |since: Time| now.since(since) >= c.no_progress_us;
            let waits = room.heard.iter().zip(&room.reported).any(|(h, r)| r.is_none() && silent(*h));
            // All reported and still short: a top-up is under way, or never will be.
            let short = room.reported.iter().all(Option::is_some)
                && room.restore == Restore::Ready
                && silent(room.progressed);
            let unpublished = room.serial.is_some() && !room.published && silent(room.granted_at);
            let quiet = unpublished || (room.published && (waits || short));
            let old =
                c.room_us_max > 0 && room.serial.is_some() && now.since(room.granted_at) >= c.room_us_max;
            if old || quiet {
                self.fail(now, key, Reason::NoProgress);
            } else if !room.published {
                for peer in room.spec.contacts.clone() {
                    self.link.send(peer, key, Serial(0), Body::Announce);
                }
            }
        }
        if let Some(room) = self.rooms.get_mut(&key) {
            let step = c.announce_us.min(c.no_progress_us).max(1);
            room.wake = now + step;
            self.wakes.insert((room.wake, key));
        }
    }

    pub(super) fn topup(
        &mut self,
        now: Time,
        key: RoomKey,
        from: u32,
        pages: Granted,
    ) -> Result<(), (Refused, Granted)> {
        let want = self.want_topup(key, from);
        let Some(room) = self.rooms.get_mut(&key) else { return Err((Refused::NoRoom, pages)) };
        let Some(serial) = room.serial else { return Err((Refused::NoRoom, pages)) };
        let Some(grant) = self.grants.get_mut(&serial) else { return Err((Refused::NoRoom, pages)) };
        let d = pages.destination();
        let got = [&d.full, &d.window, &d.state, &d.ring].map(|l| l.len() as u32);
        let inside = d.full.iter().all(|&p| p < self.layout.units(Component::Full))
            && d.window.iter().all(|&p| p < self.layout.units(Component::Window));
        let whole_split = from.is_multiple_of(self.layout.split.size);
        if want.is_none_or(|w| got != [w.full, w.window, 0, 0]) || !inside || !whole_split {
            return Err((Refused::WrongPages, pages));
        }
        grant.pages.prepend(pages);
        room.prefix = from;
        room.restore = Restore::Ready;
        room.progressed = now;
        let d = grant.pages.destination();
        let body = Body::Topup { from, pages: d.full.clone(), window: d.window.clone() };
        let published = room.published;
        let contacts = room.spec.contacts.clone();
        self.allow(serial);
        for peer in contacts.into_iter().filter(|_| published) {
            self.link.send_until(now, peer, Slot::Topup, key, serial, body.clone());
        }
        Ok(())
    }
}

impl Shown {
    /// Whether the pages may be known to this rank.
    pub(super) fn is_out(&self) -> bool {
        self.inc != Incarnation::UNKNOWN
    }
}
