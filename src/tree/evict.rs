//! Eviction. Every victim is a leaf of its tier, found at the end of a list or the top of a heap: the cost is that of what
//! is freed, whatever the size of the tree. The last victim is cut to what is still wanted.

use crate::base::containers::Map;
use crate::base::{NodeId, PageId, Tier};

use super::node::{DEVICE_ORDERS, HOST_ORDERS, Listed, NIL, Node, ROOT, Residency};
use super::order::facts;
use super::{BackupRule, DeviceEviction, HostEviction, Tree, TreeError, Unbacked};

/// Nodes that one [`Tree::evict_host_below`] looks at.
const BELOW_NODES_MAX: usize = 64;

impl Tree {
    /// Frees `want_pages` device pages, or all that nobody holds if that is less. A victim with a host copy is demoted; one
    /// without is deleted together with what hangs below it on the host, or reported, as `unbacked` says. Reported
    /// pages count as found. Appends to `out`. O(nodes freed or reported), times log of the leaves under a heap policy.
    pub fn evict_device(&mut self, want_pages: u32, unbacked: Unbacked, out: &mut DeviceEviction) {
        if self.orders.policy.is_list() {
            self.evict_device_by_list(want_pages, unbacked, out);
        } else {
            self.evict_device_by_heap(want_pages, unbacked, out);
        }
    }

    fn evict_device_by_list(&mut self, want_pages: u32, unbacked: Unbacked, out: &mut DeviceEviction) {
        let mut left = want_pages;
        for listed in DEVICE_ORDERS {
            left = self.evict_device_list(listed, left, unbacked, out);
        }
    }

    /// Returns what is still wanted.
    fn evict_device_list(
        &mut self,
        listed: Listed,
        mut left: u32,
        unbacked: Unbacked,
        out: &mut DeviceEviction,
    ) -> u32 {
        let mut at = self.orders.lists[listed as usize].oldest;
        while left > 0 && at != NIL {
            self.cut_tail(at, left);
            let node = &self.arena.nodes[at as usize];
            let (pages, newer) = (node.pages, node.order.newer);
            self.prefetch_victim(newer);
            self.arena
                .prefetch_node(self.arena.nodes.get(newer as usize).map_or(NIL, |next| next.order.newer));
            // Descendants come first in the list, so a child that is still there was reported.
            let ready = node.host == Residency::Present || !self.reports(node, unbacked);
            if ready && node.kids_device == 0 {
                self.evict_one(at, out);
            } else if unbacked == Unbacked::Report {
                out.needs_backup.push(self.arena.id(at));
                out.needs_backup_pages += pages;
            } else {
                debug_assert!(false, "the oldest node of the device order is a leaf");
                return 0;
            }
            left -= pages;
            at = newer;
        }
        left
    }

    /// The node is next to be evicted: fetches what that reads besides the node, which has been fetched.
    #[inline]
    fn prefetch_victim(&self, at: u32) {
        if let Some(node) = self.arena.nodes.get(at as usize) {
            self.table.prefetch(node.tag);
            self.arena.prefetch_run(node);
            self.arena.prefetch_node(node.parent);
        }
    }

    fn evict_device_by_heap(&mut self, want_pages: u32, unbacked: Unbacked, out: &mut DeviceEviction) {
        let mut left = want_pages;
        // Reported nodes, and how many children of a node were reported: with all of them it is next in line.
        let mut aside = Vec::new();
        let mut reported: Map<u32, u32> = Map::default();
        while left > 0 {
            let Some(at) = self.orders.heap_top(&mut self.arena, DEVICE_ORDERS) else { break };
            let tail = self.orders.policy.tail_pages(&facts(&self.arena.nodes[at as usize]));
            self.cut_tail(at, left.min(tail));
            let node = &self.arena.nodes[at as usize];
            let (parent, pages) = (node.parent, node.pages);
            left -= pages;
            let heap = &self.orders.heaps[Listed::Device as usize];
            self.prefetch_victim(heap.second().unwrap_or(NIL));
            heap.near_top().for_each(|soon| self.arena.prefetch_node(soon));
            let ready = node.host == Residency::Present || !self.reports(node, unbacked);
            if ready && node.kids_device == 0 {
                self.evict_one(at, out);
            } else {
                out.needs_backup.push(self.arena.id(at));
                out.needs_backup_pages += pages;
                self.orders.take_from_device_heaps(&mut self.arena, at);
                aside.push(at);
                *reported.entry(parent).or_insert(0) += 1;
            }
            let up = &self.arena.nodes[parent as usize];
            let all_reported = up.kids_device > 0 && reported.get(&parent) == Some(&up.kids_device);
            if all_reported && parent != ROOT && up.locks == 0 {
                self.orders.put_in_device_heap(&mut self.arena, parent);
                aside.push(parent);
            }
        }
        // Back to what their states say.
        for at in aside {
            self.orders.take_from_device_heaps(&mut self.arena, at);
            self.orders.rekey(&mut self.arena, at);
        }
    }

    /// Whether an un-backed victim is reported: only what the write threshold finds worth a copy.
    pub(super) fn reports(&self, node: &Node, unbacked: Unbacked) -> bool {
        unbacked == Unbacked::Report && node.hits >= self.write_threshold
    }

    /// Splits a node so that it keeps at most its last `pages` pages.
    pub(super) fn cut_tail(&mut self, at: u32, pages: u32) {
        let all = self.arena.nodes[at as usize].pages;
        if all > pages {
            self.split(at, all - pages);
            self.orders.cut(at);
        }
    }

    /// Demotes or deletes an unlocked device leaf. A tick of its own, so that no two leaves are equally old.
    pub(super) fn evict_one(&mut self, at: u32, out: &mut DeviceEviction) {
        self.tick();
        let node = &self.arena.nodes[at as usize];
        let pages = node.pages;
        if node.host == Residency::Present {
            if self.orders.adaptive.is_none() {
                self.arena.nodes[at as usize].tick = self.orders.tick;
            }
            self.drop_device(at, &mut out.freed_device);
            out.demoted_pages += pages;
            self.try_merge(at);
            return;
        }
        let doomed = if node.kids == 0 { Vec::new() } else { self.subtree(at) };
        for &low in doomed.iter().skip(1).rev() {
            self.drop_host(low, &mut out.freed_host);
            self.remove_leaf(low);
            out.deleted_nodes += 1;
        }
        self.drop_device(at, &mut out.freed_device);
        self.remove_leaf(at);
        out.deleted_pages += pages;
        out.deleted_nodes += 1;
    }

    /// Frees the device copy of a leaf of the device tier whose host copy stays. Appends to `out`.
    ///
    /// # Errors
    /// Unknown node, the root, not on the device, locked, a child on the device, or no published host copy.
    pub fn demote(&mut self, node: NodeId, out: &mut DeviceEviction) -> Result<(), TreeError> {
        let at = self.check_device_leaf(node)?;
        if self.arena.nodes[at as usize].host != Residency::Present {
            return Err(TreeError::NotBackedUp(node));
        }
        self.evict_one(at, out);
        Ok(())
    }

    /// Deletes a leaf of the device tier without a host copy, and what hangs below it on the host. Appends to `out`.
    ///
    /// # Errors
    /// Unknown node, the root, not on the device, locked, a child on the device, a host copy (demote it instead), or
    /// something below it in use.
    pub fn delete_leaf(&mut self, node: NodeId, out: &mut DeviceEviction) -> Result<(), TreeError> {
        let at = self.check_device_leaf(node)?;
        let n = &self.arena.nodes[at as usize];
        if n.host != Residency::Absent {
            return Err(TreeError::AlreadyBackedUp(node));
        }
        if n.pins > 0 {
            return Err(TreeError::InUse(node));
        }
        self.evict_one(at, out);
        Ok(())
    }

    fn check_device_leaf(&self, node: NodeId) -> Result<u32, TreeError> {
        let at = self.slot_below_root(node)?;
        let n = &self.arena.nodes[at as usize];
        if n.device != Residency::Present {
            Err(TreeError::NotOnDevice(node))
        } else if n.locks > 0 {
            Err(TreeError::InUse(node))
        } else if n.kids_device > 0 {
            Err(TreeError::NotLeaf(node))
        } else {
            Ok(at)
        }
    }

    /// Frees `want_pages` host pages of nodes that are only on the host, or all that nobody holds if that is less. The
    /// pages are appended to `out`. O(nodes freed), times log of the leaves under a heap policy.
    pub fn evict_host(&mut self, want_pages: u32, out: &mut Vec<PageId>) -> HostEviction {
        self.tick();
        let mut done = HostEviction::default();
        while done.freed_pages < want_pages {
            let Some(at) = self.orders.first_host(&mut self.arena) else { break };
            let node = &self.arena.nodes[at as usize];
            if node.kids > 0 || !HOST_ORDERS.contains(&node.listed) {
                debug_assert!(false, "the oldest node of the host order is a leaf");
                break;
            }
            let tail = self.orders.policy.tail_pages(&facts(node));
            self.cut_tail(at, tail.min(want_pages - done.freed_pages));
            done.freed_pages += self.arena.nodes[at as usize].pages;
            done.deleted_nodes += 1;
            self.drop_host(at, out);
            self.remove_leaf(at);
        }
        done
    }

    /// Gives up every host copy: the host tier is being detached. The pages are appended to `out`. O(nodes).
    ///
    /// # Errors
    /// An operation in flight, or a pinned host copy, or a locked node that is only on the host. Nothing is changed.
    pub fn detach_host(&mut self, out: &mut Vec<PageId>) -> Result<(), TreeError> {
        if self.stats.ops > 0 {
            return Err(TreeError::OpsInFlight(self.stats.ops));
        }
        let held = self.arena.live().filter(|&at| at != ROOT).find(|&at| {
            let node = &self.arena.nodes[at as usize];
            node.own_pins > 0 || node.device != Residency::Present && node.own_locks > 0
        });
        if let Some(at) = held {
            return Err(TreeError::InUse(self.arena.id(at)));
        }
        self.evict_host(u32::MAX, out);
        self.reclaim_mirrors(u32::MAX, 0, out);
        for at in 1..self.arena.nodes.len() as u32 {
            if self.arena.is_live(at) {
                self.drop_components(at, Tier::Host);
            }
        }
        Ok(())
    }

    /// Lists the nodes without a host copy, and worth one, among the first `within_pages` pages of the device order: what will have to
    /// be written when room is made, so that it can be written before. Nodes with a backup in flight are not listed.
    /// Returns what [`reclaim_mirrors`](Tree::reclaim_mirrors) needs to spare that range: when its last used node was used.
    /// Under a heap policy nothing is known ahead, nothing is listed and 0 is returned; under the adaptive one only leaves are
    /// listed, and the tree remembers them. O(nodes in that range).
    pub fn unbacked_ahead(&mut self, within_pages: u32, out: &mut Vec<NodeId>) -> u64 {
        let (mut left, mut used) = (within_pages, 0);
        if let Some(adaptive) = &self.orders.adaptive {
            let mut ahead = std::mem::take(&mut self.ahead);
            ahead.clear();
            adaptive.ahead(&self.arena.nodes, Tier::Device, |at| {
                let node = &self.arena.nodes[at as usize];
                ahead.push(self.arena.id(at));
                if node.host == Residency::Absent && self.reports(node, Unbacked::Report) {
                    out.push(self.arena.id(at));
                }
                left = left.saturating_sub(node.pages);
                left > 0
            });
            self.ahead = ahead;
            return 1;
        }
        for listed in DEVICE_ORDERS {
            let mut at = self.orders.lists[listed as usize].oldest;
            while left > 0 && at != NIL {
                let node = &self.arena.nodes[at as usize];
                if node.host == Residency::Absent && self.reports(node, Unbacked::Report) {
                    out.push(self.arena.id(at));
                }
                left = left.saturating_sub(node.pages);
                (used, at) = (node.tick.max(used), node.order.newer);
            }
        }
        used
    }

    /// Gives up what lies only on the host below `node`, which is on the device, if it is all that keeps the node's own
    /// host copy from being reclaimed, is fewer than `below_pages` pages, and nobody holds any of it. The pages are
    /// appended to `out`. Returns how many; 0 if there are more, or if looking further would cost more than 64 nodes;
    /// `None` if nothing below keeps the copy.
    ///
    /// # Errors
    /// Unknown node.
    pub fn evict_host_below(
        &mut self,
        node: NodeId,
        below_pages: u32,
        out: &mut Vec<PageId>,
    ) -> Result<Option<u32>, TreeError> {
        let at = self.slot(node)?;
        let n = &self.arena.nodes[at as usize];
        if at == ROOT || n.device != Residency::Present || n.host != Residency::Present || n.kids_host == 0 {
            return Ok(None);
        }
        // Parents before children.
        let (mut doomed, mut pages) = (Vec::new(), 0u32);
        let (mut next, mut seen, mut up) = (0, 0, at);
        loop {
            let mut child = self.arena.nodes[up as usize].first_child;
            while child != NIL {
                let low = &self.arena.nodes[child as usize];
                let held = low.locks > 0 || low.pins > 0 || low.op != NIL;
                if low.host != Residency::Absent {
                    pages = pages.saturating_add(low.pages);
                    if low.device != Residency::Absent || held || pages >= below_pages {
                        return Ok(Some(0));
                    }
                    doomed.push(child);
                }
                seen += 1;
                if seen > BELOW_NODES_MAX {
                    return Ok(Some(0));
                }
                child = low.sibling.newer;
            }
            let Some(&deeper) = doomed.get(next) else { break };
            (up, next) = (deeper, next + 1);
        }
        self.tick();
        for &low in doomed.iter().rev() {
            self.drop_host(low, out);
            self.remove_leaf(low);
        }
        Ok(Some(pages))
    }

    /// Frees up to `want_pages` host pages of nodes that are on the device too: the most recently used go first, since
    /// they will leave the device last, and only such as were used after tick `used_after` go at all (under the adaptive policy,
    /// where it is not 0: such as were not in the range that [`unbacked_ahead`](Tree::unbacked_ahead) was asked about last).
    /// Under `BackedUpParent` only where no child holds or awaits a host copy; never where one is pinned or in flight. The
    /// pages are appended to `out`. Components stay on the host, in orders of their own. O(nodes freed), and those of that
    /// range.
    pub fn reclaim_mirrors(
        &mut self,
        want_pages: u32,
        used_after: u64,
        out: &mut Vec<PageId>,
    ) -> HostEviction {
        self.tick();
        let spared = if used_after > 0 { self.set_ahead_aside() } else { Vec::new() };
        let mut done = HostEviction::default();
        while done.freed_pages < want_pages
            && let Some(mut at) = self.orders.latest_mirror(&self.arena)
            && self.arena.nodes[at as usize].tick > used_after
        {
            let (left, all) = (want_pages - done.freed_pages, self.arena.nodes[at as usize].pages);
            match self.rule {
                BackupRule::Free if all > left => at = self.split(at, left),
                // The rest has no child with a host copy only once the tail has none.
                _ => self.cut_tail(at, left),
            }
            done.freed_pages += self.arena.nodes[at as usize].pages;
            self.drop_host(at, out);
        }
        spared.into_iter().for_each(|at| self.orders.refresh(&mut self.arena, self.rule, at));
        done
    }

    /// Takes the mirrors of what is next to leave the device out of their order, where the order of eviction is not that of
    /// use. They were written for that, and the latest use is no sign that they stay.
    fn set_ahead_aside(&mut self) -> Vec<u32> {
        let mut aside = Vec::new();
        for i in 0..self.ahead.len() {
            if let Ok(at) = self.slot(self.ahead[i])
                && self.arena.nodes[at as usize].mirrored
            {
                self.orders.remove_mirror(&mut self.arena, at);
                aside.push(at);
            }
        }
        aside
    }
}
