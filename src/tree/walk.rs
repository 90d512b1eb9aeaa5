//! Look-ups. One walk serves them all: find the child by a tag of its first page, confirm it by comparing tokens.

use smallvec::SmallVec;

use crate::base::plant::{Plant, is_planted};
use crate::base::{NamespaceId, NodeId, PageId, Tier};
use crate::key::Key;

use super::node::{NIL, ROOT, Residency};
use super::{DeviceLock, HostPin, Matched, Tree, TreeError};

/// Where a walk ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Walk {
    /// Pages matched from the start of the walk.
    pub(super) pages: u32,
    /// Deepest node reached; the start if none.
    pub(super) last: u32,
    /// Pages of `last` past the match.
    pub(super) spare: u32,
}

/// Length of the common run of two token rows of one length that differ.
fn common_tokens(a: &[u32], b: &[u32]) -> usize {
    // The differing block is found at memcmp speed, the token inside it by a short scan.
    const BLOCK: usize = 64;
    let same = a.chunks(BLOCK).zip(b.chunks(BLOCK)).take_while(|(x, y)| x == y).count() * BLOCK;
    same + a[same..].iter().zip(&b[same..]).take_while(|(x, y)| x == y).count()
}

/// Both halves of a product, folded into one.
#[inline]
pub(super) fn fold(a: u64, b: u64) -> u64 {
    let wide = u128::from(a) * u128::from(b);
    wide as u64 ^ (wide >> 64) as u64
}

const K: u64 = 0x9E37_79B9_7F4A_7C15;

/// Name of a page, wherever it lies: a hash of its namespace and tokens.
#[inline]
pub(super) fn page_name(ns: NamespaceId, page: &[u32]) -> u64 {
    let mut a = u64::from(ns.0) ^ K;
    let mut b = a ^ 0x243F_6A88_85A3_08D3;
    // Two lanes, so that the multiplications of a page overlap.
    let mut quads = page.chunks_exact(4);
    for q in &mut quads {
        a = fold(a ^ (u64::from(q[0]) | u64::from(q[1]) << 32), 0xA076_1D64_78BD_642F);
        b = fold(b ^ (u64::from(q[2]) | u64::from(q[3]) << 32), 0xE703_7ED1_A0B4_28DB);
    }
    for &t in quads.remainder() {
        a = fold(a ^ u64::from(t), 0x8EBC_6AF0_9C88_C6E3);
    }
    fold(a ^ b.rotate_left(29), K)
}

/// Tag of a child: its parent's slot and the name of its first page.
#[inline]
pub(super) fn tag_of(parent: u32, first_page: u64) -> u32 {
    fold(first_page ^ u64::from(parent) << 32, K) as u32 & TAG_MASK
}

/// Tests of this crate keep eight bits, so that tags collide often and only the token comparison tells children apart.
#[cfg(test)]
const TAG_MASK: u32 = 0xFF;
#[cfg(not(test))]
const TAG_MASK: u32 = u32::MAX;

impl Tree {
    /// Walks down from `start` along the whole pages of `key` and shows every node reached to `visit`, with the pages
    /// of it that match (all of them, except perhaps for the last).
    #[inline]
    pub(super) fn walk(&self, start: u32, key: Key<'_>, mut visit: impl FnMut(u32, u32)) -> Walk {
        let p = self.page_size as usize;
        let overlap = self.view.overlap();
        let whole = key.pages(self.page_size);
        let mut rest = &key.tokens[..whole as usize * p + overlap.min(key.tokens.len())];
        let mut at = start;
        let mut pos = 0;
        while pos < whole {
            // An only child needs no table.
            let here = &self.arena.nodes[at as usize];
            let found = match here.kids {
                0 => None,
                1 => self.confirm(at, here.first_child, key.ns, rest),
                _ => {
                    let tag = tag_of(at, page_name(key.ns, &rest[..p + overlap]));
                    self.table.find(tag, |child| {
                        self.arena.prefetch_match(child);
                        self.orders.prefetch_match(child);
                        self.confirm(at, child, key.ns, rest)
                    })
                }
            };
            let Some((child, pages, spare)) = found else { break };
            visit(child, pages);
            pos += pages;
            at = child;
            if spare > 0 {
                return Walk { pages: pos, last: at, spare };
            }
            rest = &rest[pages as usize * p..];
        }
        Walk { pages: pos, last: at, spare: 0 }
    }

    /// Whether `child` is the child of `at` that goes on with `rest`: the pages of it that match, at least one, and the
    /// pages of it that do not. Inlined in both places, because saving registers costs as much as it does.
    #[inline(always)]
    fn confirm(&self, at: u32, child: u32, ns: NamespaceId, rest: &[u32]) -> Option<(u32, u32, u32)> {
        let node = &self.arena.nodes[child as usize];
        if node.parent != at || (at == ROOT && node.ns != ns) {
            return None;
        }
        let mine = self.tokens_of(child);
        if !mine.is_empty() && rest.len() >= mine.len() && rest[..mine.len()] == *mine {
            // The usual case, without a division.
            return Some((child, node.pages, 0));
        }
        self.confirm_part(child, mine, rest)
    }

    #[inline(never)]
    fn confirm_part(&self, child: u32, mine: &[u32], rest: &[u32]) -> Option<(u32, u32, u32)> {
        let len = mine.len().min(rest.len());
        let common = match mine[..len] == rest[..len] {
            true => len,
            false => common_tokens(&mine[..len], &rest[..len]),
        };
        let pages = (common.saturating_sub(self.view.overlap()) / self.page_size as usize) as u32;
        (pages > 0).then(|| (child, pages, self.arena.nodes[child as usize].pages - pages))
    }

    fn empty_match(&self) -> Matched {
        let root = self.root();
        Matched {
            node: root,
            device_node: root,
            device_pages: 0,
            host_pages: 0,
            loading: SmallVec::new(),
            loading_pages: 0,
            full_pages: 0,
            cut_by: None,
            spare_pages: 0,
        }
    }

    /// Adds one node of a walk to a match; `on_device` says that its components allow it to count for the device.
    #[inline]
    fn extend_match(&self, found: &mut Matched, at: u32, pages: u32, on_device: bool) {
        let node = &self.arena.nodes[at as usize];
        found.node = self.arena.id(at);
        if node.device == Residency::Present && on_device {
            found.device_node = found.node;
            found.device_pages += pages;
            return;
        }
        found.host_pages += pages;
        if node.device == Residency::Pending {
            found.loading_pages += pages;
            if node.op != NIL {
                let op = self.ops.get(node.op).id;
                if found.loading.last() != Some(&op) && !found.loading.contains(&op) {
                    found.loading.push(op);
                }
            }
        }
    }

    /// Longest prefix of the whole pages of `key`, read only: no split, no touch. A key of another view or of an unknown
    /// namespace matches nothing. O(tokens matched + nodes).
    #[must_use]
    pub fn peek(&self, key: Key<'_>) -> Matched {
        let mut found = self.empty_match();
        if self.check_key(key).is_ok() {
            if self.has_components() {
                return self.peek_components(key);
            }
            let walk = self.walk(ROOT, key, |at, pages| self.extend_match(&mut found, at, pages, true));
            (found.spare_pages, found.full_pages) = (walk.spare, walk.pages);
        }
        found
    }

    /// The same with components: where they cut the match is known only at its end.
    fn peek_components(&self, key: Key<'_>) -> Matched {
        let mut found = self.empty_match();
        let mut path: SmallVec<[(u32, u32); 16]> = SmallVec::new();
        let walk = self.walk(ROOT, key, |at, pages| path.push((at, pages)));
        let on_device =
            path.iter().take_while(|(at, _)| self.arena.nodes[*at as usize].device == Residency::Present);
        let full_device = on_device.map(|(_, pages)| pages).sum();
        let (device, _) = self.usable(walk.last, full_device, false);
        let (any, cut_by) = self.usable(walk.last, walk.pages, true);
        (found.full_pages, found.cut_by) = (walk.pages, cut_by);
        for (at, pages) in path {
            let node = &self.arena.nodes[at as usize];
            // A node on both sides of the device border counts on each for what lies there.
            let to_device = device.clamp(node.depth, node.depth + pages) - node.depth;
            let to_any = any.clamp(node.depth, node.depth + pages) - node.depth;
            if to_device > 0 {
                self.extend_match(&mut found, at, to_device, true);
                found.spare_pages = node.pages - to_device;
            }
            if to_any > to_device {
                self.extend_match(&mut found, at, to_any - to_device, false);
                found.spare_pages = node.pages - to_any;
            }
        }
        found
    }

    /// Longest prefix of the whole pages of `key`. Splits a node that matches in part, so that what is reported is
    /// exactly what a lock on the reported nodes covers; marks the path as used; appends the device pages to `pages`.
    /// O(tokens matched + nodes), no allocation once `pages` is large enough.
    pub fn match_prefix(&mut self, key: Key<'_>, pages: &mut Vec<PageId>) -> Matched {
        let mut found = self.empty_match();
        if self.check_key(key).is_ok() {
            self.tick();
            let path = self.match_path(&mut found, key, pages);
            for &at in path.iter().rev().skip(usize::from(is_planted(Plant::StaleTouch))) {
                self.orders.touch(&mut self.arena, at);
            }
            self.path = path;
        }
        found
    }

    /// [`match_prefix`](Tree::match_prefix), with what it reports locked and pinned: the device path under the lock, the
    /// host copies below it under the pin, if there are any.
    pub fn match_and_lock(
        &mut self,
        key: Key<'_>,
        pages: &mut Vec<PageId>,
    ) -> (Matched, DeviceLock, Option<HostPin>) {
        if self.has_components() {
            let found = self.match_prefix(key, pages);
            return self.hold_match(found);
        }
        let mut found = self.empty_match();
        if self.check_key(key).is_ok() {
            // The whole path leaves its orders now and counts as used when it comes back, so a touch would be lost.
            self.tick();
            self.path = self.match_path(&mut found, key, pages);
        }
        self.hold_match(found)
    }

    fn hold_match(&mut self, found: Matched) -> (Matched, DeviceLock, Option<HostPin>) {
        let lock = self.take_lock(found.device_node.index);
        let pin = (found.host_pages > 0).then(|| self.take_pin(found.node.index));
        (found, lock, pin)
    }

    /// The walk of a match: splits, cuts, adds up. Returns the path.
    fn match_path(&mut self, found: &mut Matched, key: Key<'_>, pages: &mut Vec<PageId>) -> Vec<u32> {
        let path = if self.has_components() {
            let mut path = self.walk_and_split(ROOT, key);
            let device_end = self.cut_match(found, &mut path);
            let on_device = path.iter().take_while(|&&at| {
                let node = &self.arena.nodes[at as usize];
                node.device == Residency::Present && node.end() <= device_end
            });
            let on_device = on_device.count();
            for &at in &path[..on_device] {
                pages.extend_from_slice(self.arena.pages(at, Tier::Device));
            }
            self.add_up(found, &path, on_device);
            path
        } else {
            self.match_below(ROOT, found, key, pages)
        };
        let pages = found.depth_pages();
        self.orders.matched(&mut self.arena, &path, pages, self.stats.doubled_pages());
        path
    }

    /// The walk of a match without components below a node on the device: the pages are written while the nodes are at
    /// hand.
    #[inline]
    fn match_below(
        &mut self,
        start: u32,
        found: &mut Matched,
        key: Key<'_>,
        pages: &mut Vec<PageId>,
    ) -> Vec<u32> {
        let mut path = std::mem::take(&mut self.path);
        path.clear();
        let mut on_device = 0;
        let walk = self.walk(start, key, |at, matched| {
            if self.arena.nodes[at as usize].device == Residency::Present && on_device == path.len() {
                on_device += 1;
                let list = self.arena.pages(at, Tier::Device);
                pages.extend_from_slice(list.get(..matched as usize).unwrap_or_default());
            }
            path.push(at);
        });
        found.full_pages = self.arena.nodes[start as usize].end() + walk.pages;
        self.split_spare(walk, &mut path);
        self.add_up(found, &path, on_device);
        path
    }

    /// Adds a path to a match; its first `on_device` nodes count for the device.
    #[inline]
    fn add_up(&self, found: &mut Matched, path: &[u32], on_device: usize) {
        let (on_device, below) = path.split_at(on_device);
        if let Some(&last) = on_device.last() {
            found.node = self.arena.id(last);
            found.device_node = found.node;
            found.device_pages = self.arena.nodes[last as usize].end();
        }
        for &at in below {
            self.extend_match(found, at, self.arena.nodes[at as usize].pages, false);
        }
    }

    /// A look-up that goes on where `held` ends, for a request that holds the lock of an earlier one: the locked prefix is
    /// neither walked nor compared, except for its last page, and its pages are not written again. `key` is the whole key, and
    /// must begin with the tokens of the earlier one. The match counts from the root; only the device pages past the lock
    /// are appended. O(tokens past the lock), with components O(tokens).
    ///
    /// # Errors
    /// A receipt of another tree or of before a reset, or a key that does not continue it.
    pub fn match_from(
        &mut self,
        held: &DeviceLock,
        key: Key<'_>,
        pages: &mut Vec<PageId>,
    ) -> Result<Matched, TreeError> {
        self.check_key(key)?;
        let anchor = self.check_continues(held, key)?;
        let node = &self.arena.nodes[anchor as usize];
        let depth = node.end();
        if anchor == ROOT || self.has_components() || node.device != Residency::Present {
            let from = pages.len();
            let found = self.match_prefix(key, pages);
            let known = (depth as usize).min(pages.len() - from);
            pages.drain(from..from + known);
            return Ok(found);
        }
        self.tick();
        let mut found = self.empty_match();
        (found.node, found.device_node, found.device_pages) = (held.node, held.node, depth);
        let path = self.match_below(anchor, &mut found, key.from_page(depth, self.page_size), pages);
        let pages = found.depth_pages() - depth;
        self.orders.matched(&mut self.arena, &path, pages, self.stats.doubled_pages());
        // The locked nodes stand in no order; their release counts as their use.
        for &at in path.iter().rev() {
            self.orders.touch(&mut self.arena, at);
        }
        self.path = path;
        Ok(found)
    }

    /// The anchor of a lock, if the key goes on behind it.
    pub(super) fn check_continues(&self, held: &DeviceLock, key: Key<'_>) -> Result<u32, TreeError> {
        let anchor = self.slot(held.node)?;
        let node = &self.arena.nodes[anchor as usize];
        if node.own_locks == 0 {
            return Err(TreeError::ForeignReceipt(held.node));
        }
        if anchor != ROOT && (node.ns != key.ns || !self.ends_in(anchor, key)) {
            return Err(TreeError::NotContinuing);
        }
        Ok(anchor)
    }

    /// True if the key has the tokens of the node's last page in their place.
    fn ends_in(&self, at: u32, key: Key<'_>) -> bool {
        let last = self.page_size as usize + self.view.overlap();
        let end =
            self.arena.nodes[at as usize].end() as usize * self.page_size as usize + self.view.overlap();
        let mine = self.tokens_of(at);
        key.tokens.get(end - last..end) == Some(&mine[mine.len() - last..])
    }

    /// Shortens a path to what its components allow, with nodes ending at both borders. Returns the end of the device
    /// part.
    fn cut_match(&mut self, found: &mut Matched, path: &mut Vec<u32>) -> u32 {
        let Some(&last) = path.last() else { return 0 };
        let full = self.arena.nodes[last as usize].end();
        let on_device =
            path.iter().take_while(|&&at| self.arena.nodes[at as usize].device == Residency::Present);
        let full_device = on_device.map(|&at| self.arena.nodes[at as usize].pages).sum();
        let (device, _) = self.usable(last, full_device, false);
        let (any, cut_by) = self.usable(last, full, true);
        (found.full_pages, found.cut_by) = (full, cut_by);
        for border in [device, any] {
            if let Some(i) = path.iter().position(|&at| {
                let node = &self.arena.nodes[at as usize];
                node.depth < border && border < node.end()
            }) {
                let prefix = self.split(path[i], border - self.arena.nodes[path[i] as usize].depth);
                path.insert(i, prefix);
            }
        }
        path.retain(|&at| self.arena.nodes[at as usize].end() <= any);
        device
    }

    /// The node that ends where the whole pages of `key` end, whatever it holds on which tier and whatever its components
    /// say; a node that goes on is split there. The root for a key shorter than a page. Touches nothing. `None`: the tree
    /// does not know the key. O(tokens + nodes).
    pub fn node_at(&mut self, key: Key<'_>) -> Option<NodeId> {
        self.check_key(key).ok()?;
        let whole = key.pages(self.page_size);
        let walk = self.walk(ROOT, key, |_, _| {});
        if walk.pages != whole {
            return None;
        }
        let mut path = [walk.last];
        self.split_spare(walk, &mut path);
        Some(self.arena.id(path[0]))
    }

    /// Walks, splits the last node if it matches in part, and returns the path (the scratch list of the tree).
    pub(super) fn walk_and_split(&mut self, start: u32, key: Key<'_>) -> Vec<u32> {
        let mut path = std::mem::take(&mut self.path);
        path.clear();
        let walk = self.walk(start, key, |at, _| path.push(at));
        self.split_spare(walk, &mut path);
        path
    }

    /// Splits off the part of the last node of a walk that the key does not cover.
    pub(super) fn split_spare(&mut self, walk: Walk, path: &mut [u32]) {
        if walk.spare > 0
            && let Some(last) = path.last_mut()
        {
            let all = self.arena.nodes[*last as usize].pages;
            let keep = all - walk.spare;
            let suffix = std::mem::replace(last, self.split(*last, keep));
            if let Some(adaptive) = &mut self.orders.adaptive {
                adaptive.used_in_part(*last, suffix, keep, all);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_run_is_exact_at_every_length() {
        let a: Vec<u32> = (0..300).collect();
        for at in 0..300 {
            let mut b = a.clone();
            b[at] ^= 1 << 31;
            assert_eq!(common_tokens(&a, &b), at);
            assert_eq!(common_tokens(&a[..=at], &b[..=at]), at);
        }
    }
}
