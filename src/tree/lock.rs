//! Locks and pins.
//!
//! A lock anchors at a node and covers the path from the root to its end. A node's count is its own locks plus the number
//! of children that have any, so taking or releasing a lock walks up only to the first node that stays locked, and a
//! split only has to give the prefix a 1. Host pins follow the same scheme.

use crate::base::NodeId;

use super::node::{ROOT, Residency};
use super::{BackupRule, DeviceLock, HostPin, Tree, TreeError};

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
        self.unlock_path(at);
        self.try_merge(at);
        Ok(())
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

    /// Gives a pin back.
    ///
    /// # Errors
    /// A receipt of another tree, or of before a reset.
    pub fn unpin_host(&mut self, pin: HostPin) -> Result<(), TreeError> {
        let at = self.slot(pin.node)?;
        let node = &self.arena.nodes[at as usize];
        if node.own_pins == 0 || (pin.locked && node.own_locks == 0) {
            return Err(TreeError::ForeignReceipt(pin.node));
        }
        self.tick();
        self.release_spans(at, pin.held);
        self.unpin_path(at);
        if pin.locked {
            self.unlock_path(at);
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
        let mut at = anchor;
        loop {
            let locks = self.arena.nodes[at as usize].locks;
            if locks > 0 {
                self.arena.nodes[at as usize].locks = locks.saturating_add(1);
                return;
            }
            let node = &mut self.arena.nodes[at as usize];
            node.locks = 1;
            let (parent, pages, on_device) = (node.parent, node.pages, node.device == Residency::Present);
            self.orders.leave(&mut self.arena, at);
            if at == ROOT {
                return;
            }
            if on_device {
                self.stats.device_pages_evictable -= pages;
                self.stats.device_pages_protected += pages;
            }
            at = parent;
        }
    }

    pub(super) fn unlock_path(&mut self, anchor: u32) {
        self.arena.nodes[anchor as usize].own_locks -= 1;
        let mut at = anchor;
        loop {
            if self.arena.nodes[at as usize].locks > 1 {
                self.arena.nodes[at as usize].locks -= 1;
                return;
            }
            self.arena.nodes[at as usize].locks = 0;
            if at == ROOT {
                return;
            }
            self.orders.stamp(&mut self.arena, at);
            let node = &self.arena.nodes[at as usize];
            let (parent, pages, on_device) = (node.parent, node.pages, node.device == Residency::Present);
            if on_device {
                self.stats.device_pages_evictable += pages;
                self.stats.device_pages_protected -= pages;
            }
            self.orders.unlocked(&mut self.arena, at);
            at = parent;
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

    pub(super) fn unpin_path(&mut self, anchor: u32) {
        self.arena.nodes[anchor as usize].own_pins -= 1;
        let mut at = anchor;
        loop {
            let node = &mut self.arena.nodes[at as usize];
            node.pins -= 1;
            if node.pins > 0 {
                return;
            }
            // A host-only node enters its order now, unless a lock still holds it.
            if node.device == Residency::Absent && node.locks == 0 {
                self.orders.stamp(&mut self.arena, at);
            }
            self.refresh(at);
            if at == ROOT {
                return;
            }
            at = self.arena.nodes[at as usize].parent;
        }
    }
}
