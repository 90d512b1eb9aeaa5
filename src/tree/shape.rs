//! Links between nodes: add, split, merge, remove. The only writer of parents, children, tags and ranges.

use crate::base::plant::{Plant, is_planted};
use crate::base::{NamespaceId, Tier};

use super::Tree;
use super::adaptive::{Names, end_name};
use super::kept::ends_between;
use super::node::{Links, Listed, NIL, Node, ROOT, Residency};
use super::walk::{page_name, tag_of};

impl Tree {
    /// Name of the first page of a node.
    #[inline]
    fn first_name(&self, at: u32) -> u64 {
        let first = self.page_size as usize + self.view.overlap();
        page_name(self.arena.nodes[at as usize].ns, &self.tokens_of(at)[..first])
    }

    fn link_child(&mut self, parent: u32, at: u32) {
        let next = std::mem::replace(&mut self.arena.nodes[parent as usize].first_child, at);
        self.arena.nodes[at as usize].sibling = Links { older: NIL, newer: next };
        if next != NIL {
            self.arena.nodes[next as usize].sibling.older = at;
        }
    }

    fn unlink_child(&mut self, parent: u32, at: u32) {
        let Links { older, newer } =
            std::mem::replace(&mut self.arena.nodes[at as usize].sibling, Links::NONE);
        match older {
            NIL => self.arena.nodes[parent as usize].first_child = newer,
            _ => self.arena.nodes[older as usize].sibling.newer = newer,
        }
        if newer != NIL {
            self.arena.nodes[newer as usize].sibling.older = older;
        }
    }

    /// Adds `run`, whose first page has the name `first`, as a new leaf without a copy on any tier; the caller gives it one.
    /// O(1).
    pub(super) fn add_leaf(&mut self, parent: u32, ns: NamespaceId, run: u32, first: u64) -> u32 {
        let up = &self.arena.nodes[parent as usize];
        let node = Node {
            parent,
            run,
            pages: self.arena.runs[run as usize].pages,
            depth: up.end(),
            ns,
            device: Residency::Absent,
            host: Residency::Absent,
            tick: self.orders.tick,
            created: if self.orders.policy.uses_created() { self.orders.tick } else { 0 },
            ..Node::root()
        };
        let at = self.arena.add_node(node);
        let tag = tag_of(parent, first);
        self.arena.nodes[at as usize].tag = tag;
        self.table.insert(tag, at);
        self.link_child(parent, at);
        self.arena.nodes[parent as usize].kids += 1;
        let (page_size, overlap) = (self.page_size as usize, self.view.overlap());
        let names = Names { ns, first, tokens: self.arena.run_tokens(run), page_size, overlap };
        self.orders.created(&self.arena, at, names);
        // Under a heap policy the parent may have been a host leaf.
        self.refresh(parent);
        at
    }

    /// Cuts a node after `keep` pages (0 < keep < its pages). The new node is the prefix; the suffix keeps its id, so
    /// that locks, anchors and operations stay at the deep end. Copies no page and no token. O(1).
    pub(super) fn split(&mut self, at: u32, keep: u32) -> u32 {
        let old = &self.arena.nodes[at as usize];
        debug_assert!(at != ROOT && 0 < keep && keep < old.pages, "a split leaves pages on both sides");
        let (parent, tag, run, old_kept) = (old.parent, old.tag, old.run, old.refs > 0);
        let prefix = Node {
            pages: keep,
            listed: Listed::Nowhere,
            mirrored: false,
            order: Links::NONE,
            mirror: Links::NONE,
            first_child: at,
            sibling: Links::NONE,
            kids: 1,
            kids_device: u32::from(old.device != Residency::Absent),
            kids_host: u32::from(old.host != Residency::Absent),
            locks: u32::from(old.locks > 0 && !is_planted(Plant::SplitDropsLock)),
            own_locks: 0,
            pins: u32::from(old.pins > 0 && !is_planted(Plant::SplitDropsPin)),
            refs: u32::from(old.refs > 0),
            own_pins: 0,
            ..old.clone()
        };
        let prefix = self.arena.add_node(prefix);
        self.arena.runs[run as usize].nodes += 1;
        if self.arena.nodes[at as usize].pins > 0 {
            self.ops.set_storing(prefix, self.ops.storing(at));
        }
        self.table.replace(tag, at, prefix);
        self.unlink_child(parent, at);
        self.link_child(parent, prefix);

        let node = &mut self.arena.nodes[at as usize];
        node.parent = prefix;
        node.from += keep;
        node.pages -= keep;
        node.depth += keep;
        let first = self.first_name(at);
        let tag = tag_of(prefix, first);
        self.arena.nodes[at as usize].tag = tag;
        self.table.insert(tag, at);
        if self.orders.adaptive.is_some() {
            self.split_marks(prefix, at, first);
        }
        if old_kept {
            self.orders.turns.split(prefix, at);
        }
        self.orders.split(&mut self.arena, self.rule, prefix, at);
        self.stats.splits += 1;
        prefix
    }

    fn split_marks(&mut self, prefix: u32, suffix: u32, start: u64) {
        let page = self.page_size as usize + self.view.overlap();
        let upper = self.tokens_of(prefix);
        let end = end_name(&upper[upper.len() - page..]);
        let depth = self.arena.nodes[suffix as usize].depth;
        if let Some(adaptive) = &mut self.orders.adaptive {
            adaptive.split(prefix, suffix, depth, start, end);
        }
    }

    /// Merges a node into its only child if nothing can tell the difference: same state on both tiers, same counts, used
    /// at the same time, and nobody holds the node. The child keeps its id and the node's is void. Amortised O(pages of
    /// the child), and O(1) where both are ranges of one run.
    pub(super) fn try_merge(&mut self, at: u32) {
        let up = &self.arena.nodes[at as usize];
        if !self.merge || at == ROOT || up.kids != 1 {
            return;
        }
        // Spans of components are held by node, and loads in flight name their places by run.
        if up.locks > 0 && self.has_components() {
            return;
        }
        let child = up.first_child;
        let low = &self.arena.nodes[child as usize];
        // A store write pins its nodes.
        let held = |n: &Node| n.pins != 0 || n.op != NIL;
        // A lock that ends at the upper node would come to hold the lower one; one that ends below holds both anyway. So the
        // chunks of a request that still runs grow together, and what walks its path does not walk all of them.
        let (locked, lock_ends) = (low.locks > 0, up.own_locks > 0);
        // Neighbours in the list are equally old, whatever their ticks say, unless something that stands elsewhere belongs
        // between them: in an operation, or kept for a session. A heap goes by the ticks.
        let in_list = self.orders.policy.is_list() && !self.has_components() && low.listed != Listed::Nowhere;
        let listed = in_list && self.stats.ops == 0 && self.keeps_nothing();
        let close = self.orders.adaptive.as_ref().is_some_and(|a| a.alike(up.tick, low.tick));
        let same_age = up.tick == low.tick || !locked && (close || listed && low.order.newer == at);
        let alike = (up.device, up.host, up.hits, up.priority, up.reach, up.created)
            == (low.device, low.host, low.hits, low.priority, low.reach, low.created);
        // What is kept to the end of the upper node would be kept to that of the lower one.
        let ends_here = ends_between(up, low);
        let (ticks, low_pages) = ((low.tick, up.tick), low.pages);
        if !alike || !same_age || ends_here || lock_ends || held(up) || held(low) {
            return;
        }
        // Whoever waits to write one of them to a store knows it by its id, and the other has nobody waiting.
        if self.arena.is_stored(at) != self.arena.is_stored(child) || !self.join_runs(at, child) {
            return;
        }
        // The child takes the node's place in the shape. Its place in the orders is next to the node's.
        self.orders.forget(&mut self.arena, at, false);
        self.orders.remove_mirror(&mut self.arena, child);
        let up = self.arena.nodes[at as usize].clone();
        if let Some(adaptive) = &mut self.orders.adaptive {
            adaptive.merged(at, child, low_pages, ticks);
        }
        self.table.remove(self.arena.nodes[child as usize].tag, child);
        self.table.replace(up.tag, at, child);
        self.unlink_child(up.parent, at);
        self.link_child(up.parent, child);
        let low = &mut self.arena.nodes[child as usize];
        (low.parent, low.tag, low.depth) = (up.parent, up.tag, up.depth);
        (low.run, low.from) = (up.run, up.from);
        low.pages += up.pages;
        low.tick = up.tick;
        if up.refs > 0 {
            self.orders.turns.merged(at);
        }
        self.arena.remove_node(at);
        self.refresh(child);
        self.orders.rekey(&mut self.arena, child);
        if self.has_components() {
            self.orders.refresh_components(&self.arena, child);
        }
        self.stats.merges += 1;
    }

    /// After an insert the leaf may continue its parent so evenly that both are one.
    pub(super) fn try_merge_above(&mut self, leaf: u32) {
        if leaf != ROOT {
            self.try_merge(self.arena.nodes[leaf as usize].parent);
        }
    }

    /// The same after an operation on `at`. Not where there are components: what a store gets of them are those that a
    /// request at the end of a node needs, so the ends that a request has published stay ends.
    pub(super) fn try_merge_settled(&mut self, at: u32) {
        if !self.has_components() {
            self.try_merge_above(at);
        }
    }

    /// Makes the child's range follow the node's in the node's run. False if that would disturb others.
    fn join_runs(&mut self, at: u32, child: u32) -> bool {
        let (up, low) = (&self.arena.nodes[at as usize], &self.arena.nodes[child as usize]);
        if up.run == low.run {
            return up.from + up.pages == low.from;
        }
        let (to, from) = (up.run as usize, low.run as usize);
        if up.from + up.pages != self.arena.runs[to].pages || self.arena.runs[from].nodes != 1 {
            return false;
        }
        if self.arena.runs[to].hashes.is_none() != self.arena.runs[from].hashes.is_none() {
            return false;
        }
        let (page_size, overlap) = (self.page_size as usize, self.view.overlap());
        self.arena.append_run(to as u32, from as u32, page_size, overlap);
        self.arena.release_run(from as u32);
        self.arena.runs[to].nodes += 1;
        true
    }

    /// Deletes a node without children whose copies are all absent by now. O(1), or O(log leaves).
    pub(super) fn remove_leaf(&mut self, at: u32) {
        let node = &self.arena.nodes[at as usize];
        debug_assert!(
            node.kids == 0 && node.device == Residency::Absent && node.host == Residency::Absent,
            "only an empty leaf is removed"
        );
        let (parent, tag, run, from) = (node.parent, node.tag, node.run, node.from);
        let ends_run = from + node.pages == self.arena.runs[run as usize].pages;
        self.drop_components(at, Tier::Host);
        self.recede_ends(at);
        self.prefetch_victims_after(at);
        self.orders.forget(&mut self.arena, at, true);
        self.table.remove(tag, at);
        self.unlink_child(parent, at);
        self.arena.nodes[parent as usize].kids -= 1;
        if ends_run && from > 0 {
            let tokens = from as usize * self.page_size as usize + self.view.overlap();
            self.arena.truncate_run(run, from, tokens);
        }
        self.arena.remove_node(at);
        self.refresh(parent);
    }

    /// A leaf goes for good. Where the order learns, those behind it in its cell are likely to be next: the one after the
    /// next is fetched, and what evicting the next reads besides the node.
    #[inline]
    fn prefetch_victims_after(&self, at: u32) {
        let Some(adaptive) = &self.orders.adaptive else { return };
        let newer = |at: u32| self.arena.nodes.get(at as usize).map_or(NIL, |node| node.order.newer);
        let next = newer(at);
        let after = newer(next);
        self.arena.prefetch_node(after);
        adaptive.prefetch(after);
        if let Some(node) = self.arena.nodes.get(next as usize) {
            self.table.prefetch(node.tag);
            self.arena.prefetch_run(node);
            self.arena.prefetch_node(node.parent);
        }
    }

    /// The subtree of a node, parents before children; the node first. O(nodes of the subtree).
    pub(super) fn subtree(&self, at: u32) -> Vec<u32> {
        let mut found = vec![at];
        let mut next = 0;
        while let Some(&up) = found.get(next) {
            next += 1;
            let mut child = self.arena.nodes[up as usize].first_child;
            while child != NIL {
                found.push(child);
                child = self.arena.nodes[child as usize].sibling.newer;
            }
        }
        found
    }
}
