//! The way of a grant back to the pool. Each rank it was shown to needs evidence of its own.

use super::{Action, Event, Phase, Receiver, RegState};
use crate::base::Time;
use crate::pd::grant::{Committed, How, Proof};
use crate::pd::ids::{Incarnation, PeerId, RoomKey, Serial, Tag};
use crate::pd::link::Slot;
use crate::pd::plant::Plant;
use crate::pd::reason::Reason;
use crate::pd::wire::{Body, Quiet};

/// What the transport can say about a destroyed connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fence {
    /// Nothing of it can land any more.
    Proven,
    /// It cannot tell.
    Unproven,
}

impl Receiver {
    pub(super) fn refresh_floor(&mut self) {
        self.link.floor = self.grants.keys().next().copied().unwrap_or(Serial(self.next_serial));
    }

    /// Pages of a successful room. Every contact reported its writes settled, so nothing can land.
    pub(super) fn commit(&mut self, serial: Serial) -> Option<Committed> {
        let mut grant = self.grants.remove(&serial)?;
        self.refresh_floor();
        self.forget_tag(serial);
        let n = grant.pages.destination().full.len();
        grant.pages.commit(0..n)
    }

    fn forget_tag(&mut self, serial: Serial) {
        if self.config.revoke {
            self.actions.push_back(Action::Forget { tag: Tag::new(self.link.me(), serial) });
        }
    }

    /// Starts the ladder of a failed grant.
    pub(super) fn hold(&mut self, now: Time, key: RoomKey, serial: Serial) {
        let Some(grant) = self.grants.get_mut(&serial) else { return };
        grant.phase = Phase::Held(now);
        if let Some(stage) = self.stage.as_mut().filter(|_| self.plant == Some(Plant::RingWithoutProof)) {
            stage.close(key, serial);
        }
        self.holds.insert((now + self.config.hold_us, serial));
        let mut ask = Vec::new();
        for shown in &mut grant.shown {
            if shown.is_out() {
                ask.push((shown.peer, shown.inc));
            } else {
                shown.evidence = Some(How::Unpublished);
            }
        }
        if self.config.revoke && !ask.is_empty() {
            self.actions.push_back(Action::Revoke { tag: Tag::new(self.link.me(), serial) });
        }
        for (peer, inc) in ask {
            if self.link.incarnation(peer) == inc && self.link.is_alive(peer) {
                let body = Body::Abort { floor: self.link.floor };
                self.link.send_until(now, peer, Slot::Abort, key, serial, body);
            } else {
                self.fence(peer, inc);
            }
        }
        self.try_release(serial);
    }

    fn fence(&mut self, peer: PeerId, inc: Incarnation) {
        match self.regs.get_mut(&peer) {
            Some(reg) if reg.inc == inc => {
                if !std::mem::replace(&mut reg.fencing, true) {
                    self.actions.push_back(Action::Fence { peer, inc, attach: reg.attach });
                }
            }
            // An earlier life: nothing of ours will be asked of it again.
            _ => self.actions.push_back(Action::Fence { peer, inc, attach: u32::MAX }),
        }
    }

    pub(super) fn on_abort_reply(&mut self, peer: PeerId, key: RoomKey, serial: Serial, quiet: Quiet) {
        let inc = self.link.incarnation(peer);
        let held = self.grants.get(&serial).is_some_and(|g| {
            g.key == key && g.phase != Phase::Live && g.shown.iter().any(|s| s.peer == peer && s.inc == inc)
        });
        match quiet {
            Quiet::Busy => {}
            Quiet::Drained => {
                self.link.answered(peer, Slot::Abort, key, serial);
                if held {
                    self.prove(serial, How::Acked, |p, i| p == peer && i == inc);
                }
            }
            // Asked again all the same: a late completion over there may still settle it.
            Quiet::Unprovable => {
                if held {
                    self.hold_over(serial);
                } else {
                    self.link.answered(peer, Slot::Abort, key, serial);
                }
            }
        }
    }

    fn prove(&mut self, serial: Serial, how: How, of: impl Fn(PeerId, Incarnation) -> bool) {
        if let Some(grant) = self.grants.get_mut(&serial) {
            for s in
                grant.shown.iter_mut().filter(|s| s.is_out() && s.evidence.is_none() && of(s.peer, s.inc))
            {
                s.evidence = Some(how);
            }
            self.try_release(serial);
        }
    }

    /// The target refuses writes of the grant from now on.
    pub fn handle_revoked(&mut self, serial: Serial) {
        if self.grants.get(&serial).is_some_and(|g| g.phase != Phase::Live) {
            self.prove(serial, How::Revoked, |_, _| true);
        }
    }

    /// The answer to [`Action::Fence`]. A proven fence closes every grant this incarnation was shown: the
    /// live ones fail, and the peer must attach anew before it can write again. The registration that lets
    /// it carries a floor above all of them, so that a sender which never heard of the failure cannot go on.
    pub fn handle_fence(&mut self, now: Time, peer: PeerId, inc: Incarnation, fence: Fence) {
        let current = self.regs.get(&peer).is_some_and(|r| r.inc == inc);
        if fence == Fence::Unproven {
            if let Some(reg) = self.regs.get_mut(&peer).filter(|r| r.inc == inc) {
                reg.fencing = false;
            }
            let hopeless: Vec<Serial> = self.waiting_for(peer, inc);
            for serial in hopeless {
                self.quarantine(serial);
            }
            return;
        }
        if current {
            let barrier = Serial(self.next_serial);
            self.fail_rooms_of(now, peer, Reason::PeerDead);
            if let Some(reg) = self.regs.get_mut(&peer) {
                reg.barrier = barrier;
                reg.attach += 1;
                reg.fencing = false;
                reg.state = RegState::Asking;
            }
            if self.link.is_alive(peer) {
                self.register(now, peer);
            }
        }
        for serial in self.waiting_for(peer, inc) {
            self.prove(serial, How::Fenced, |p, i| p == peer && i == inc);
        }
    }

    /// The operating system says that this incarnation is gone, on this host, where death ends its writes.
    pub fn handle_exited(&mut self, now: Time, peer: PeerId, inc: Incarnation) {
        if self.link.incarnation(peer) == inc {
            self.fail_rooms_of(now, peer, Reason::PeerDead);
        }
        for serial in self.waiting_for(peer, inc) {
            self.prove(serial, How::Dead, |p, i| p == peer && i == inc);
        }
    }

    fn waiting_for(&self, peer: PeerId, inc: Incarnation) -> Vec<Serial> {
        let waits = |g: &super::Grant| {
            g.phase != Phase::Live
                && g.shown.iter().any(|s| s.peer == peer && s.inc == inc && s.evidence.is_none())
        };
        self.grants.iter().filter(|(_, g)| waits(g)).map(|(s, _)| *s).collect()
    }

    fn fail_rooms_of(&mut self, now: Time, peer: PeerId, reason: Reason) {
        let hit: Vec<RoomKey> = self
            .rooms
            .iter()
            .filter(|(_, r)| r.local.is_none() && r.spec.contacts.contains(&peer))
            .map(|(k, _)| *k)
            .collect();
        hit.into_iter().for_each(|key| self.fail(now, key, reason));
    }

    pub(super) fn peer_gone(&mut self, now: Time, peer: PeerId, inc: Incarnation, reason: Reason) {
        for room in self.rooms.values_mut().filter(|r| r.spec.contacts.contains(&peer)) {
            room.patience.peer_gone();
        }
        self.fail_rooms_of(now, peer, reason);
        if !self.waiting_for(peer, inc).is_empty() {
            self.fence(peer, inc);
        }
    }

    /// A peer is heard again: what still waits for its word is asked again.
    pub(super) fn ask_again(&mut self, now: Time, peer: PeerId) {
        let inc = self.link.incarnation(peer);
        for serial in self.waiting_for(peer, inc) {
            let Some(key) = self.grants.get(&serial).map(|g| g.key) else { continue };
            let body = Body::Abort { floor: self.link.floor };
            self.link.send_until(now, peer, Slot::Abort, key, serial, body);
        }
    }

    /// All contacts had reported success before the group failed the room: nothing is posted.
    pub(super) fn settle(&mut self, now: Time, serial: Serial) {
        if let Some(grant) = self.grants.get_mut(&serial) {
            grant.phase = Phase::Held(now);
            grant.shown.iter_mut().for_each(|s| s.evidence = Some(How::Settled));
            self.try_release(serial);
        }
    }

    /// The hold time of a grant is over, or a rank cannot prove its writes settled: it counts as quarantined
    /// from now on, and a fence is asked for, which may prove it yet.
    pub(super) fn hold_over(&mut self, serial: Serial) {
        let Some(grant) = self.grants.get(&serial) else { return };
        let open = |s: &&super::Shown| s.is_out() && s.evidence.is_none();
        let missing: Vec<(PeerId, Incarnation)> =
            grant.shown.iter().filter(open).map(|s| (s.peer, s.inc)).collect();
        if self.quarantine(serial) {
            missing.into_iter().for_each(|(peer, inc)| self.fence(peer, inc));
        }
    }

    fn quarantine(&mut self, serial: Serial) -> bool {
        let Some(grant) = self.grants.get_mut(&serial) else { return false };
        let Phase::Held(since) = grant.phase else { return false };
        self.holds.remove(&(since + self.config.hold_us, serial));
        if self.plant == Some(Plant::FreeOnTimeout) {
            grant.shown.iter_mut().for_each(|s| s.evidence = Some(How::Acked));
            self.try_release(serial);
            return false;
        }
        grant.phase = Phase::Quarantined;
        self.stats.quarantined_total += 1;
        self.stats.quarantine_units += grant.pages.destination().units();
        self.refresh_health();
        true
    }

    fn refresh_health(&mut self) {
        let full = self.stats.quarantine_units >= self.config.quarantine_units_max;
        if full != self.unhealthy {
            self.unhealthy = full;
            self.events.push_back(Event::Unhealthy(full));
        }
    }

    /// Releases the pages if every rank has evidence. The weakest rung names the proof.
    pub(super) fn try_release(&mut self, serial: Serial) {
        let Some(grant) = self.grants.get(&serial) else { return };
        let how =
            grant.shown.iter().map(|s| s.evidence).try_fold(How::Unpublished, |a, e| e.map(|e| a.max(e)));
        let Some(how) = how.filter(|_| grant.phase != Phase::Live) else { return };
        if grant.scattering > 0 && self.plant != Some(Plant::ScatterUncounted) {
            return;
        }
        let Some(grant) = self.grants.remove(&serial) else { return };
        match grant.phase {
            Phase::Held(since) => {
                self.holds.remove(&(since + self.config.hold_us, serial));
            }
            Phase::Quarantined => {
                self.stats.quarantine_proven += 1;
                self.stats.quarantine_units -= grant.pages.destination().units();
                self.refresh_health();
            }
            Phase::Live => {}
        }
        match how {
            How::Unpublished | How::Settled => self.stats.released_other += 1,
            How::Acked => self.stats.released_acked += 1,
            How::Revoked => self.stats.released_revoked += 1,
            How::Fenced => self.stats.released_fenced += 1,
            How::Dead => self.stats.released_dead += 1,
        }
        self.refresh_floor();
        self.forget_tag(serial);
        let proof = Proof::new(serial, how);
        if let Some(stage) = &mut self.stage {
            stage.abandon(grant.key, serial, &proof);
        }
        let pages = grant.pages.release(proof);
        self.events.push_back(Event::Released { key: grant.key, pages });
    }
}
