//! Making room: who goes when pages are short, and what becomes of it.

use super::core::Core;
use super::outcome::Refusal;
use crate::tree::{DeviceEviction, Unbacked};

/// What host pages are wanted for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum HostRoom {
    /// Something that can not be had later.
    Now,
    /// A copy that the write policy asks for, of what will stay on the device.
    Due,
    /// A copy of what is next to leave the device.
    Ahead,
}

impl Core {
    /// Evicts until `want` device pages are free or nothing more can go now. Never waits: under write-back an
    /// un-backed victim frees its pages when its copy has ended.
    pub(super) fn make_device_room(&mut self, want: u32) -> bool {
        let free = self.device.free_pages();
        if free >= want {
            return true;
        }
        let short = want - free;
        // What is due must not leave without a copy because its tick has not come.
        self.write_due();
        let mode = match self.config.backs_up_on_eviction() {
            true => Unbacked::Report,
            false => Unbacked::Delete,
        };
        let mut gone = std::mem::take(&mut self.scratch.gone);
        gone.clear();
        self.tree.evict_device(short, mode, &mut gone);
        self.take_evicted(&gone, Refusal::NotBackedUp);
        if !gone.needs_backup.is_empty() {
            let still_short = want.saturating_sub(self.device.free_pages());
            self.write_back(&gone.needs_backup, still_short);
        }
        self.scratch.gone = gone;
        self.device.free_pages() >= want
    }

    /// Pages of an eviction go back to their pools; what was deleted is counted under `reason`.
    pub(super) fn take_evicted(&mut self, gone: &DeviceEviction, reason: Refusal) {
        self.stats.demoted_pages += u64::from(gone.demoted_pages);
        self.stats.deleted_pages += u64::from(gone.deleted_pages);
        let deleted_tokens = self.tokens_of(gone.deleted_pages);
        self.stats.drop_tokens(reason, deleted_tokens);
        self.free_device(&gone.freed_device);
        self.free_host(&gone.freed_host);
    }

    /// Evicts until `want` host pages are free or nothing more can go now: copies whose node still lies on the device, and
    /// host leaves, in the order that the configuration says. Copies that were written ahead, of nodes that are next to
    /// leave the device, go last, and not at all for another one of that kind.
    pub(super) fn make_host_room(&mut self, want: u32) -> bool {
        self.make_host_room_for(want, HostRoom::Now)
    }

    /// See [`make_host_room`](Core::make_host_room).
    pub(super) fn make_host_room_for(&mut self, want: u32, what: HostRoom) -> bool {
        if self.host.free_pages() >= want {
            return true;
        }
        // A copy of what stays on the device would displace one of what lies nowhere else, or another of its kind.
        if what == HostRoom::Due && self.config.host_copies_are_last() {
            return false;
        }
        if self.config.prefers_sole_copies() {
            self.reclaim_mirrors(want, self.ahead_used);
            self.unblock_mirrors(want);
            self.evict_host(want);
        } else {
            self.evict_host(want);
            self.reclaim_mirrors(want, self.ahead_used);
        }
        if what != HostRoom::Ahead {
            self.reclaim_mirrors(want, 0);
        }
        self.host.free_pages() >= want
    }

    fn evict_host(&mut self, want: u32) {
        let short = want.saturating_sub(self.host.free_pages());
        if short == 0 {
            return;
        }
        let mut pages = std::mem::take(&mut self.scratch.host_pages);
        pages.clear();
        self.tree.evict_host(short, &mut pages);
        let evicted = pages.len() as u32;
        self.stats.host_evicted_pages += u64::from(evicted);
        let tokens = self.tokens_of(evicted);
        self.stats.drop_tokens(Refusal::HostEvicted, tokens);
        self.free_host(&pages);
        self.scratch.host_pages = pages;
    }

    pub(super) fn reclaim_mirrors(&mut self, want: u32, used_after: u64) {
        let short = want.saturating_sub(self.host.free_pages());
        if short == 0 {
            return;
        }
        let mut pages = std::mem::take(&mut self.scratch.host_pages);
        pages.clear();
        self.tree.reclaim_mirrors(short, used_after, &mut pages);
        self.stats.mirror_reclaimed_pages += pages.len() as u64;
        self.free_host(&pages);
        self.scratch.host_pages = pages;
    }

    /// Writes to the host, ahead of need, what is next in line to leave the device without a copy. Only after requests
    /// have done something: room for one copy may come from another, so a core that nobody uses would else write in
    /// circles.
    pub(super) fn write_ahead(&mut self) {
        if !std::mem::take(&mut self.ahead_due) || !self.config.backs_up_on_eviction() {
            return;
        }
        let deep = u64::from(self.device.capacity()) * u64::from(self.config.write_ahead_percent) / 100;
        self.components_ahead();
        // What is free, or on its way out, need not be found any more.
        let found = self.device.free_pages().saturating_add(self.backups.old_pages());
        let mut nodes = Vec::new();
        self.ahead_used = self.tree.unbacked_ahead((deep as u32).saturating_sub(found), &mut nodes);
        for node in nodes {
            if !self.back_up_ahead(node) {
                return;
            }
        }
    }
}
