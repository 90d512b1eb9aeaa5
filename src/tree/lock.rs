//! Locks and pins.
//!
//! A lock anchors at a node and covers the path from the root to its end. A node's count is its own locks plus the number
//! of children that have any, so taking or releasing a lock walks up only to the first node that stays locked, and a
//! split only has to give the prefix a 1. Host pins follow the same scheme.
//!
//! When a request lets go of a path, that is a use of it; when an operation does, it is none, and nodes return to the
//! place in the order that their last use gave them, or to the newest one if that is too far to look for in a long list. A
//! use that ends below a node which stays held is noted there and carried up when that hold ends, so that an ancestor is
//! never older than its descendants.

use crate::base::NodeId;

use super::node::{Node, ROOT, Residency};
use super::order::{Entered, Stretch};
use super::{BackupRule, DeviceLock, HostPin, Tree, TreeError};

/// Who lets go of a lock or pin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Holder {
    /// A request: the path was used until now.
    Request,
    /// An operation: nobody used the path for its sake.
    Operation,
}

impl Tree {
    /// Locks the path from the root to the end of `node`: nothing on it is evicted, on the device or on the host.
    /// Counted; O(nodes that were not locked).
    ///
    /// # Errors
    /// Unknown node.
    pub fn lock(&mut self, node: NodeId) -> Result<DeviceLock, TreeError> {
        let at = self.slot(node)?;
        Ok(self.take_lock(at))
    }

    /// Gives a lock back. Nodes that nobody locks any more count as used now.
    ///
    /// # Errors
    /// A receipt of another tree, or of before a reset.
    pub fn unlock(&mut self, lock: DeviceLock) -> Result<(), TreeError> {
        let at = self.slot(lock.node)?;
        if self.arena.nodes[at as usize].own_locks == 0 {
            return Err(TreeError::ForeignReceipt(lock.node));
        }
        self.tick();
        self.release_spans(at, lock.held);
        self.unlock_path(at, Holder::Request);
        self.try_merge(at);
        Ok(())
    }

    /// Moves a lock to the end of another node, below where it is as a rule: whoever has it goes on using the path, so nothing
    /// counts as used now, not even what it does not hold any more. O(nodes between).
    ///
    /// # Errors
    /// Unknown node, or a receipt of another tree or of before a reset; the receipt comes back.
    pub fn move_lock(
        &mut self,
        lock: DeviceLock,
        node: NodeId,
    ) -> Result<DeviceLock, (TreeError, DeviceLock)> {
        let (from, to) = match (self.slot(lock.node), self.slot(node)) {
            (Ok(from), Ok(to)) => (from, to),
            (Err(error), _) | (_, Err(error)) => return Err((error, lock)),
        };
        if self.arena.nodes[from as usize].own_locks == 0 {
            return Err((TreeError::ForeignReceipt(lock.node), lock));
        }
        let moved = self.take_lock(to);
        self.release_spans(from, lock.held);
        self.unlock_path(from, Holder::Operation);
        self.try_merge(from);
        Ok(moved)
    }

    /// Pins the host copies on the path from the root to the end of `node`: they are neither evicted nor reclaimed.
    /// Counted; O(nodes that were not pinned).
    ///
    /// # Errors
    /// Unknown node, or one without a published host copy.
    pub fn pin_host(&mut self, node: NodeId) -> Result<HostPin, TreeError> {
        let at = self.slot(node)?;
        if self.arena.nodes[at as usize].host != Residency::Present {
            return Err(TreeError::NotBackedUp(node));
        }
        Ok(self.take_pin(at))
    }

    /// Gives a pin back. Nodes that are only on the host count as used now.
    ///
    /// # Errors
    /// A receipt of another tree, or of before a reset.
    pub fn unpin_host(&mut self, pin: HostPin) -> Result<(), TreeError> {
        self.give_pin_back(pin, Holder::Request)
    }

    /// Gives back a pin that was taken to plan something: nothing counts as used.
    ///
    /// # Errors
    /// A receipt of another tree, or of before a reset.
    pub fn unpin_host_unused(&mut self, pin: HostPin) -> Result<(), TreeError> {
        self.give_pin_back(pin, Holder::Operation)
    }

    fn give_pin_back(&mut self, pin: HostPin, by: Holder) -> Result<(), TreeError> {
        let at = self.slot(pin.node)?;
        let node = &self.arena.nodes[at as usize];
        if node.own_pins == 0 || (pin.locked && node.own_locks == 0) {
            return Err(TreeError::ForeignReceipt(pin.node));
        }
        self.tick();
        self.release_spans(at, pin.held);
        self.unpin_path(at, by);
        if pin.locked {
            self.unlock_path(at, by);
        }
        self.try_merge(at);
        Ok(())
    }

    pub(super) fn take_lock(&mut self, anchor: u32) -> DeviceLock {
        self.lock_path(anchor);
        DeviceLock { node: self.arena.id(anchor), held: self.hold_spans(anchor) }
    }

    pub(super) fn take_pin(&mut self, anchor: u32) -> HostPin {
        self.pin_path(anchor);
        let backed_up = self.arena.nodes[anchor as usize].host == Residency::Present;
        let locked = self.rule == BackupRule::Free || !backed_up;
        if locked {
            self.lock_path(anchor);
        }
        HostPin { node: self.arena.id(anchor), locked, held: self.hold_spans(anchor) }
    }

    pub(super) fn lock_path(&mut self, anchor: u32) {
        let own = &mut self.arena.nodes[anchor as usize].own_locks;
        *own = own.saturating_add(1);
        let (mut at, mut on_device_pages, mut stretch) = (anchor, 0, Stretch::EMPTY);
        loop {
            let node = &mut self.arena.nodes[at as usize];
            let before = node.locks;
            node.locks = before.saturating_add(1);
            if before > 0 {
                break;
            }
            let parent = node.parent;
            if node.device == Residency::Present && at != ROOT {
                on_device_pages += node.pages;
            }
            self.orders.leave_with(&mut self.arena, at, &mut stretch);
            if at == ROOT {
                break;
            }
            at = parent;
        }
        self.orders.leave_together(&mut self.arena, stretch);
        self.stats.device_pages_evictable -= on_device_pages;
        self.stats.device_pages_protected += on_device_pages;
    }

    /// Takes one lock off the path to `anchor`. O(nodes that nobody locks any more).
    pub(super) fn unlock_path(&mut self, anchor: u32, by: Holder) {
        self.arena.nodes[anchor as usize].own_locks -= 1;
        let mut used = self.end_of_use(by);
        let (mut reached_device, mut on_device_pages, mut entered) = (false, 0, Entered::NONE);
        let mut at = anchor;
        let held = loop {
            let node = &self.arena.nodes[at as usize];
            let (parent, pages, on_device) = (node.parent, node.pages, node.device == Residency::Present);
            if on_device && !reached_device {
                // The age of a host copy says nothing of the device copies above it.
                (reached_device, used) = (true, self.end_of_use(by));
            }
            used = node.tick.max(used);
            self.orders.take_tick(&mut self.arena, at, used);
            let node = &mut self.arena.nodes[at as usize];
            node.locks -= 1;
            if node.locks > 0 || at == ROOT {
                break at;
            }
            if on_device {
                on_device_pages += pages;
            }
            self.orders.unlocked(&mut self.arena, at, &mut entered);
            at = parent;
        };
        self.orders.entered(entered);
        self.stats.device_pages_evictable += on_device_pages;
        self.stats.device_pages_protected -= on_device_pages;
        self.tell_use(held, used, by, |_| true);
    }

    fn end_of_use(&self, by: Holder) -> u64 {
        match by {
            Holder::Request => self.orders.tick,
            Holder::Operation => 0,
        }
    }

    /// A use has ended below `at`, which stays held. Who holds it carries the news on, later; but the order of
    /// components has the held nodes in it, and what is being loaded may be on the device by then, where a pin says nothing:
    /// so there it is told at once, to those that `counts` for. O(path) with components, or while anything is loaded.
    fn tell_use(&mut self, at: u32, used: u64, by: Holder, counts: fn(&Node) -> bool) {
        let mut at = at;
        let at_once = self.has_components() || self.stats.device_pages_loading > 0;
        while at_once && by == Holder::Request && at != ROOT {
            if counts(&self.arena.nodes[at as usize]) {
                self.orders.take_tick(&mut self.arena, at, used);
            }
            at = self.arena.nodes[at as usize].parent;
        }
    }

    pub(super) fn pin_path(&mut self, anchor: u32) {
        let own = &mut self.arena.nodes[anchor as usize].own_pins;
        *own = own.saturating_add(1);
        let mut at = anchor;
        loop {
            let node = &mut self.arena.nodes[at as usize];
            node.pins = node.pins.saturating_add(1);
            if node.pins > 1 {
                return;
            }
            self.refresh(at);
            if at == ROOT {
                return;
            }
            at = self.arena.nodes[at as usize].parent;
        }
    }

    /// Takes one pin off the path to `anchor`. A pin is a use only of what lies on the host alone: the order of the device
    /// does not depend on pins.
    pub(super) fn unpin_path(&mut self, anchor: u32, by: Holder) {
        // A node that is being loaded may yet fall back on its host copy.
        let host_only: fn(&Node) -> bool = |node| node.device != Residency::Present;
        self.arena.nodes[anchor as usize].own_pins -= 1;
        let mut used = self.end_of_use(by);
        let mut at = anchor;
        loop {
            if host_only(&self.arena.nodes[at as usize]) {
                used = self.arena.nodes[at as usize].tick.max(used);
                self.orders.take_tick(&mut self.arena, at, used);
            }
            let node = &mut self.arena.nodes[at as usize];
            node.pins -= 1;
            if node.pins > 0 {
                return self.tell_use(at, used, by, host_only);
            }
            self.refresh(at);
            if at == ROOT {
                return;
            }
            at = self.arena.nodes[at as usize].parent;
        }
    }
}
