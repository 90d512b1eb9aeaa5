//! Who can be evicted, and in which order. The only writer of `listed`, `mirrored` and their links.
//!
//! A node stands in the device order if it has a device copy and no lock, in the host order if it has only a host copy
//! and neither lock nor pin. Locked nodes are not in any list, so a walk never has to skip them. Under a heap policy only
//! leaves of the tier are in; under the adaptive one they stand in its cells.

use std::cmp::Reverse;

use crate::base::Tier;
use crate::base::heap::{HeapKey, IndexHeap};
use crate::base::plant::{Plant, is_planted};

use super::adaptive::{Adaptive, Hint, Leaf, Names};
use super::component::COMPONENTS;
use super::node::{Arena, DEVICE_ORDERS, HOST_ORDERS, Links, Listed, NIL, Node, ROOT, Residency};
use super::policy::{NodeFacts, Policy};
use super::types::BackupRule;
use super::waiting::{Turn, Turns};

/// Ends of an intrusive list.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ends {
    pub(super) oldest: u32,
    pub(super) newest: u32,
}

impl Ends {
    const EMPTY: Ends = Ends { oldest: NIL, newest: NIL };
}

/// Neighbours in a list on their way out of it.
#[derive(Clone, Copy)]
pub(super) struct Stretch {
    oldest: u32,
    /// What lies on the newer side of the newest of them.
    next: u32,
    listed: Listed,
}

impl Stretch {
    pub(super) const EMPTY: Stretch = Stretch { oldest: NIL, next: NIL, listed: Listed::Nowhere };
}

/// Nodes of a path that stand at the newest end of a list, which does not know it yet.
#[derive(Clone, Copy)]
pub(super) struct Entered {
    newest: u32,
    listed: Listed,
}

impl Entered {
    pub(super) const NONE: Entered = Entered { newest: NIL, listed: Listed::Nowhere };
}

/// The two eviction orders and the list of reclaimable mirrors.
#[derive(Clone, Debug)]
pub(super) struct Orders {
    pub(super) policy: Policy,
    /// By [`Listed`]; in use under LRU.
    pub(super) lists: [Ends; 4],
    /// By [`Listed`]; in use under every other policy.
    pub(super) heaps: [IndexHeap; 4],
    /// The order that learns, in place of the heaps.
    pub(super) adaptive: Option<Box<Adaptive>>,
    /// Nodes whose host copy could be given up, by last use.
    pub(super) mirrors: Ends,
    /// Such nodes that were older than the newest mirror when they became one. Key: latest use first.
    pub(super) old_mirrors: IndexHeap,
    /// By component and tier: nodes that have any of it that no session will need, and nodes that have any that one will.
    pub(super) components: [[[IndexHeap; 2]; 2]; COMPONENTS],
    /// Who waits for which kept node.
    pub(super) turns: Turns,
    /// Where a node last went back to its place by age, by [`Listed`]: operations end about in the order in which they
    /// began, so the next place is near. May name anything.
    pub(super) fingers: [u32; 4],
    /// The tree has components; without them no call looks at `components`.
    pub(super) has_components: bool,
    /// Advances once per call, and by the pages of requests where the order learns; the only clock.
    pub(super) tick: u64,
}

/// Which of a node's links a list uses.
type Field = fn(&mut Node) -> &mut Links;

fn order_links(node: &mut Node) -> &mut Links {
    &mut node.order
}

fn mirror_links(node: &mut Node) -> &mut Links {
    &mut node.mirror
}

#[inline]
fn unlink(nodes: &mut [Node], ends: &mut Ends, at: u32, links: Field) {
    let Links { older, newer } = std::mem::replace(links(&mut nodes[at as usize]), Links::NONE);
    match older {
        NIL => ends.oldest = newer,
        _ => links(&mut nodes[older as usize]).newer = newer,
    }
    match newer {
        NIL => ends.newest = older,
        _ => links(&mut nodes[newer as usize]).older = older,
    }
}

#[inline]
fn link_newest(nodes: &mut [Node], ends: &mut Ends, at: u32, links: Field) {
    let older = std::mem::replace(&mut ends.newest, at);
    *links(&mut nodes[at as usize]) = Links { older, newer: NIL };
    match older {
        NIL => ends.oldest = at,
        _ => links(&mut nodes[older as usize]).newer = at,
    }
}

/// Puts `at` at the oldest end.
fn link_oldest(nodes: &mut [Node], ends: &mut Ends, at: u32, links: Field) {
    let newer = std::mem::replace(&mut ends.oldest, at);
    *links(&mut nodes[at as usize]) = Links { older: NIL, newer };
    match newer {
        NIL => ends.newest = at,
        _ => links(&mut nodes[newer as usize]).older = at,
    }
}

/// Puts `at` right on the newer side of `below`, which is linked.
fn link_above(nodes: &mut [Node], ends: &mut Ends, at: u32, below: u32, links: Field) {
    let newer = std::mem::replace(&mut links(&mut nodes[below as usize]).newer, at);
    *links(&mut nodes[at as usize]) = Links { older: below, newer };
    match newer {
        NIL => ends.newest = at,
        _ => links(&mut nodes[newer as usize]).older = at,
    }
}

/// What lists are sorted by. Of nodes with one tick, which lie on one path, the deepest is the oldest.
fn age(node: &Node) -> (u64, Reverse<u32>) {
    (node.tick, Reverse(node.depth))
}

/// Most nodes that [`place_by_age`] looks at. Operations end near an end of the order or near one another; one that does
/// not would have to pass over thousands of nodes, a cache miss each, for the sake of a place that nobody could tell from
/// another.
const PLACES_MAX: u32 = 768;

/// The node behind which one of age `mine` belongs, `NIL` for the oldest end, `None` if it lies too far; and how many nodes
/// were looked at. Looks from both ends and from `near` at once, which costs the shortest of the three ways. The newest
/// node is newer than `mine`.
fn place_by_age(nodes: &[Node], ends: Ends, near: u32, mine: (u64, Reverse<u32>)) -> (Option<u32>, u32) {
    let (mut low, mut high, mut near) = (ends.oldest, ends.newest, near);
    for looked_at in (3..=PLACES_MAX).step_by(3) {
        if age(&nodes[low as usize]) > mine {
            return (Some(nodes[low as usize].order.older), looked_at);
        }
        low = nodes[low as usize].order.newer;
        let next = nodes[high as usize].order.older;
        if next == NIL || age(&nodes[next as usize]) < mine {
            return (Some(next), looked_at);
        }
        high = next;
        let (links, older) = (nodes[near as usize].order, age(&nodes[near as usize]) < mine);
        let next = if older { links.newer } else { links.older };
        if next == NIL || (age(&nodes[next as usize]) < mine) != older {
            return (Some(if older { near } else { next }), looked_at);
        }
        near = next;
    }
    (None, PLACES_MAX)
}

/// The same for a heap that yields the latest first.
pub(super) fn mirror_key(node: &Node) -> HeapKey {
    (!node.tick, u64::from(node.depth))
}

pub(super) fn facts(node: &Node) -> NodeFacts {
    NodeFacts {
        hits: node.hits,
        priority: node.priority,
        used: node.tick,
        created: node.created,
        depth_pages: node.depth,
        node_pages: node.pages,
        reach_pages: node.reach,
    }
}

/// Whether the tier below the one whose order a leaf stands in holds all of it: the host what the device evicts, the store what
/// the host does. O(1) on the device, O(pages / 64) on the host.
pub(super) fn is_copied(arena: &Arena, at: u32) -> bool {
    let node = &arena.nodes[at as usize];
    match node.device {
        Residency::Present => node.host == Residency::Present,
        _ => node.host == Residency::Present && arena.is_stored(at),
    }
}

fn leaf(turns: &Turns, at: u32, arena: &Arena) -> Leaf {
    let node = &arena.nodes[at as usize];
    Leaf {
        tick: node.tick,
        depth: node.depth,
        pages: node.pages,
        reach: node.reach,
        kids: node.kids,
        priority: node.priority,
        copied: is_copied(arena, at),
        kept: (node.refs > 0).then(|| turns.first(at).unwrap_or(Turn::MAX)),
    }
}

/// The tier of an order.
fn tier_of(listed: Listed) -> Tier {
    if DEVICE_ORDERS.contains(&listed) { Tier::Device } else { Tier::Host }
}

impl Orders {
    pub(super) fn new(policy: Policy, has_components: bool) -> Orders {
        let adaptive = match &policy {
            Policy::Adaptive(config) => Some(Box::new(Adaptive::new(*config))),
            _ => None,
        };
        Orders {
            adaptive,
            policy,
            lists: [Ends::EMPTY; 4],
            heaps: Default::default(),
            mirrors: Ends::EMPTY,
            old_mirrors: IndexHeap::default(),
            components: Default::default(),
            turns: Turns::default(),
            fingers: [NIL; 4],
            has_components,
            tick: 0,
        }
    }

    /// First node to go of the host order.
    pub(super) fn first_host(&mut self, arena: &mut Arena) -> Option<u32> {
        if !self.policy.is_list() {
            return self.heap_top(arena, HOST_ORDERS);
        }
        HOST_ORDERS.iter().map(|&listed| self.lists[listed as usize].oldest).find(|&at| at != NIL)
    }

    /// First node to go of a tier's two heaps.
    pub(super) fn heap_top(&mut self, arena: &mut Arena, orders: [Listed; 2]) -> Option<u32> {
        if let Some(adaptive) = &mut self.adaptive {
            return adaptive.first(&mut arena.nodes, tier_of(orders[0]), self.tick);
        }
        orders.iter().find_map(|&listed| self.heaps[listed as usize].peek())
    }

    /// Takes a node out of the device heaps for the duration of one eviction.
    pub(super) fn take_from_device_heaps(&mut self, arena: &mut Arena, at: u32) {
        for listed in DEVICE_ORDERS {
            self.set_aside(arena, listed, at);
        }
    }

    /// Where a node belongs, from its state alone. `sanity` asks the same question.
    #[inline]
    pub(super) fn place(&self, at: u32, node: &Node) -> Listed {
        let leaf_only = !self.policy.is_list();
        let kept = usize::from(node.refs > 0);
        if at == ROOT || node.locks > 0 {
            Listed::Nowhere
        } else if node.device == Residency::Present {
            if leaf_only && node.kids_device > 0 { Listed::Nowhere } else { DEVICE_ORDERS[kept] }
        } else if node.host == Residency::Present && node.pins == 0 {
            if leaf_only && node.kids > 0 { Listed::Nowhere } else { HOST_ORDERS[kept] }
        } else {
            Listed::Nowhere
        }
    }

    /// True if the host copy of a node on the device may be given up.
    pub(super) fn is_mirror(rule: BackupRule, at: u32, node: &Node) -> bool {
        at != ROOT
            && node.device == Residency::Present
            && node.host == Residency::Present
            && node.pins == 0
            && (rule == BackupRule::Free || node.kids_host == 0 || is_planted(Plant::ReclaimUnderChild))
    }

    /// Brings list membership in line with the state of a node. A node that enters an order enters where its tick
    /// belongs. O(log leaves) under a heap policy; in a list O(1) for a node that was just used, and for one that an
    /// operation gives back as far as its place is from the nearest end or from the last such place, up to a limit.
    pub(super) fn refresh(&mut self, arena: &mut Arena, rule: BackupRule, at: u32) {
        let node = &mut arena.nodes[at as usize];
        let want = self.place(at, node);
        let mirror = Self::is_mirror(rule, at, node);
        if mirror != node.mirrored {
            if mirror { self.add_mirror(arena, at) } else { self.remove_mirror(arena, at) }
        }
        if arena.nodes[at as usize].listed != want {
            self.leave(arena, at);
            self.enter(arena, at, want);
        } else if want != Listed::Nowhere {
            self.restand(arena, at);
        }
        if self.has_components {
            self.rekey_components(arena, at);
        }
    }

    /// Where the order learns, a leaf whose copy on the next tier has come or gone costs another price.
    #[inline]
    fn restand(&mut self, arena: &mut Arena, at: u32) {
        if self.adaptive.as_ref().is_some_and(|a| !a.stands_as(at, is_copied(arena, at))) {
            self.rekey(arena, at);
        }
    }

    #[inline]
    fn enter(&mut self, arena: &mut Arena, at: u32, want: Listed) {
        let node = &mut arena.nodes[at as usize];
        node.listed = want;
        if want == Listed::Nowhere {
            return;
        }
        if self.policy.is_list() {
            self.link_by_age(arena, at, want);
        } else {
            self.rekey(arena, at);
        }
    }

    /// Links a node behind everything older. O(1) for one that was just used.
    #[inline]
    fn link_by_age(&mut self, arena: &mut Arena, at: u32, want: Listed) {
        let ends = &mut self.lists[want as usize];
        let mine = age(&arena.nodes[at as usize]);
        match arena.nodes.get_mut(ends.newest as usize) {
            Some(newest) if age(newest) >= mine => return self.link_back(arena, at, want),
            Some(newest) => newest.order.newer = at,
            None => ends.oldest = at,
        }
        arena.nodes[at as usize].order = Links { older: ends.newest, newer: NIL };
        ends.newest = at;
    }

    /// The rest of `link_by_age`: the place is looked for. If it is too far from where it should be, the node and what lies
    /// above it count as used now. O([`PLACES_MAX`]), or O(path) then.
    #[inline(never)]
    fn link_back(&mut self, arena: &mut Arena, at: u32, want: Listed) {
        let nodes = &mut arena.nodes;
        let mine = age(&nodes[at as usize]);
        let ends = &mut self.lists[want as usize];
        let finger = self.fingers[want as usize];
        let near = if nodes.get(finger as usize).is_some_and(|node| node.listed == want && finger != at) {
            finger
        } else {
            ends.newest
        };
        match place_by_age(nodes, *ends, near, mine).0 {
            Some(NIL) => link_oldest(nodes, ends, at, order_links),
            Some(below) => link_above(nodes, ends, at, below, order_links),
            None => {
                link_newest(nodes, ends, at, order_links);
                self.tick += 1;
                let mut up = at;
                while up != ROOT {
                    self.touch(arena, up);
                    up = arena.nodes[up as usize].parent;
                }
            }
        }
        self.fingers[want as usize] = at;
    }

    /// A node lost its last lock: it may enter an order, where its tick belongs. Mirrors do not depend on locks. `below` is
    /// what entered just before on the same path, further down; [`entered`](Orders::entered) ends it.
    #[inline]
    pub(super) fn unlocked(&mut self, arena: &mut Arena, at: u32, below: &mut Entered) {
        let node = &mut arena.nodes[at as usize];
        if node.device != Residency::Present || !self.policy.is_list() || self.has_components {
            self.entered(*below);
            *below = Entered::NONE;
            let want = self.place(at, &arena.nodes[at as usize]);
            self.enter(arena, at, want);
            if self.has_components {
                self.rekey_components(arena, at);
            }
            return;
        }
        let want = DEVICE_ORDERS[usize::from(node.refs > 0)];
        node.listed = want;
        if below.listed == want {
            // Used no earlier than what lies below it, which is the newest of all.
            node.order = Links { older: below.newest, newer: NIL };
            arena.nodes[below.newest as usize].order.newer = at;
            below.newest = at;
            return;
        }
        self.entered(*below);
        self.link_by_age(arena, at, want);
        let is_newest = self.lists[want as usize].newest == at;
        *below = if is_newest { Entered { newest: at, listed: want } } else { Entered::NONE };
    }

    /// The last node of a path has entered.
    #[inline]
    pub(super) fn entered(&mut self, path: Entered) {
        if path.listed != Listed::Nowhere {
            self.lists[path.listed as usize].newest = path.newest;
        }
    }

    /// Takes a node out of its eviction order.
    #[inline]
    pub(super) fn leave(&mut self, arena: &mut Arena, at: u32) {
        let listed = std::mem::replace(&mut arena.nodes[at as usize].listed, Listed::Nowhere);
        match (listed, self.policy.is_list()) {
            (Listed::Nowhere, _) => {}
            (_, true) => unlink(&mut arena.nodes, &mut self.lists[listed as usize], at, order_links),
            (_, false) => self.set_aside(arena, listed, at),
        }
    }

    /// Takes a node out of its order as the next of a path that goes up. Such nodes are neighbours in a list, and leave it
    /// together when [`leave_together`](Orders::leave_together) is told that there are no more.
    #[inline]
    pub(super) fn leave_with(&mut self, arena: &mut Arena, at: u32, stretch: &mut Stretch) {
        let node = &mut arena.nodes[at as usize];
        let listed = std::mem::replace(&mut node.listed, Listed::Nowhere);
        if listed == Listed::Nowhere {
            return;
        }
        if !self.policy.is_list() {
            return self.set_aside(arena, listed, at);
        }
        let newer = node.order.newer;
        if (stretch.next, stretch.listed) != (at, listed) {
            self.leave_together(arena, *stretch);
            (stretch.oldest, stretch.listed) = (at, listed);
        }
        stretch.next = newer;
    }

    /// Takes neighbours out of their list.
    #[inline]
    pub(super) fn leave_together(&mut self, arena: &mut Arena, stretch: Stretch) {
        let Stretch { oldest, next: newer, listed } = stretch;
        if listed == Listed::Nowhere {
            return;
        }
        let older = arena.nodes[oldest as usize].order.older;
        let ends = &mut self.lists[listed as usize];
        match older {
            NIL => ends.oldest = newer,
            _ => arena.nodes[older as usize].order.newer = newer,
        }
        match newer {
            NIL => ends.newest = older,
            _ => arena.nodes[newer as usize].order.older = older,
        }
    }

    /// Takes a leaf out of an order, or not if it is not in; never of a list.
    fn set_aside(&mut self, arena: &mut Arena, listed: Listed, at: u32) {
        match &mut self.adaptive {
            Some(adaptive) => adaptive.leave(&mut arena.nodes, tier_of(listed), at),
            None => _ = self.heaps[listed as usize].remove(at),
        }
    }

    /// Puts a leaf into an order, at the place that is right for it now; never of a list.
    fn put(&mut self, arena: &mut Arena, listed: Listed, at: u32) {
        let Some(adaptive) = &mut self.adaptive else {
            let key = self.policy.key(&facts(&arena.nodes[at as usize]));
            return self.heaps[listed as usize].set(at, key);
        };
        let (tier, copied) = (tier_of(listed), is_copied(arena, at));
        let Node { tick, refs, .. } = arena.nodes[at as usize];
        adaptive.leave(&mut arena.nodes, tier, at);
        if refs > 0 || !adaptive.enter_again(&mut arena.nodes, tier, at, (tick, copied), self.tick) {
            let leaf = leaf(&self.turns, at, arena);
            adaptive.enter(&mut arena.nodes, tier, at, &leaf, self.tick);
        }
    }

    /// Puts a node into the device heap that it belongs to, as if it were a leaf.
    pub(super) fn put_in_device_heap(&mut self, arena: &mut Arena, at: u32) {
        let kept = arena.nodes[at as usize].refs > 0;
        self.put(arena, DEVICE_ORDERS[usize::from(kept)], at);
    }

    /// A look-up will find this node.
    #[inline]
    pub(super) fn prefetch_match(&self, at: u32) {
        if let Some(adaptive) = &self.adaptive {
            adaptive.prefetch(at);
        }
    }

    /// A node whose first page has this name will be made, but its tokens are copied first.
    #[inline]
    pub(super) fn foresee(&self, first_page: u64, depth: u32) {
        if let Some(adaptive) = &self.adaptive {
            adaptive.foresee(first_page, depth);
        }
    }

    /// A node was made.
    #[inline]
    pub(super) fn created(&mut self, arena: &Arena, at: u32, names: Names<'_>) {
        if let Some(adaptive) = &mut self.adaptive {
            let node = &arena.nodes[at as usize];
            let leaf = leaf(&self.turns, at, arena);
            adaptive.created(at, (node.parent != ROOT).then_some(node.parent), &leaf, names);
        }
    }

    /// A look-up found this path, `pages` in all, while `doubled` pages lie on both tiers: where the order learns, its uses are
    /// answered and time passes. The nodes stay where they stand; a touch or a lock moves them.
    #[inline]
    pub(super) fn matched(&mut self, arena: &mut Arena, path: &[u32], pages: u32, doubled: u32) {
        if let Some(adaptive) = &mut self.adaptive {
            if path.last().is_some_and(|&at| adaptive.repeats(at)) {
                // The touch or the release that follows is all there is to it.
                return;
            }
            let (now, mut lru_pages, mut last) = (self.tick, 0, None);
            for &at in path {
                let node = &arena.nodes[at as usize];
                lru_pages += adaptive.used(node.tick, now, node.pages);
                if node.listed != Listed::Nowhere {
                    adaptive.answered(at, now);
                }
                last = Some((at, node.tick));
            }
            if let Some((at, tick)) = last {
                adaptive.answered(at, now);
                adaptive.ended(at, tick, now);
            }
            adaptive.request(now, pages, lru_pages, doubled);
            path.iter().rev().for_each(|&at| self.set_tick(arena, at, now));
            self.tick += u64::from(pages);
        }
    }

    /// What the scheduler knows of a node.
    pub(super) fn hint(&mut self, arena: &mut Arena, at: u32, hint: Hint) {
        let Some(adaptive) = &mut self.adaptive else { return };
        let tier = match arena.nodes[at as usize].listed {
            Listed::Nowhere => return adaptive.hint(at, hint),
            listed => tier_of(listed),
        };
        adaptive.leave(&mut arena.nodes, tier, at);
        adaptive.hint(at, hint);
        let leaf = leaf(&self.turns, at, arena);
        adaptive.enter(&mut arena.nodes, tier, at, &leaf, self.tick);
    }

    /// An insert brought nothing new: it ended in this node.
    pub(super) fn published(&mut self, at: u32) {
        if let Some(adaptive) = self.adaptive.as_mut().filter(|_| at != ROOT) {
            adaptive.published(at);
        }
    }

    /// A node was cut off its parent to be evicted by itself.
    pub(super) fn cut(&mut self, at: u32) {
        if let Some(adaptive) = &mut self.adaptive {
            adaptive.cut(at);
        }
    }

    /// Time passes by so many pages, where time is volume.
    pub(super) fn pass(&mut self, pages: u32) {
        if self.adaptive.is_some() {
            self.tick += u64::from(pages);
        }
    }

    /// Takes a node out of everything, before it is deleted. `evicted`: it may come back; otherwise it has been merged
    /// into its child.
    pub(super) fn forget(&mut self, arena: &mut Arena, at: u32, evicted: bool) {
        self.leave(arena, at);
        if let Some(adaptive) = self.adaptive.as_mut().filter(|_| evicted) {
            let node = &arena.nodes[at as usize];
            adaptive.evicted(at, (node.parent != ROOT).then_some(node.parent), node.tick, node.pages);
        }
        if self.has_components {
            self.forget_components(at);
        }
        self.remove_mirror(arena, at);
    }

    /// Mirrors go by their last use, latest first. Those that become one just after their use stand in a list, which is
    /// sorted because it only grows at its newest end; those that become one later stand in a heap. O(1), or O(log) there.
    fn add_mirror(&mut self, arena: &mut Arena, at: u32) {
        arena.nodes[at as usize].mirrored = true;
        match self.mirrors.newest {
            newest
                if newest != NIL && age(&arena.nodes[at as usize]) < age(&arena.nodes[newest as usize]) =>
            {
                self.old_mirrors.set(at, mirror_key(&arena.nodes[at as usize]));
            }
            _ => link_newest(&mut arena.nodes, &mut self.mirrors, at, mirror_links),
        }
    }

    pub(super) fn remove_mirror(&mut self, arena: &mut Arena, at: u32) {
        if std::mem::replace(&mut arena.nodes[at as usize].mirrored, false) && !self.old_mirrors.remove(at) {
            unlink(&mut arena.nodes, &mut self.mirrors, at, mirror_links);
        }
    }

    /// The mirror that was used last.
    pub(super) fn latest_mirror(&self, arena: &Arena) -> Option<u32> {
        let listed = Some(self.mirrors.newest).filter(|&at| at != NIL);
        match (listed, self.old_mirrors.peek()) {
            (Some(a), Some(b)) => {
                Some(if age(&arena.nodes[a as usize]) > age(&arena.nodes[b as usize]) { a } else { b })
            }
            (a, b) => a.or(b),
        }
    }

    /// Changes the tick of a node that stands in no order of eviction, or will stand in the same place of it.
    #[inline]
    pub(super) fn take_tick(&mut self, arena: &mut Arena, at: u32, tick: u64) {
        self.renew(arena, at, tick);
        self.set_tick(arena, at, tick);
    }

    /// Tells the order that learns that a node's last use moves to `tick`.
    #[inline]
    fn renew(&mut self, arena: &Arena, at: u32, tick: u64) {
        if let Some(adaptive) = self.adaptive.as_mut().filter(|_| arena.nodes[at as usize].tick != tick) {
            Self::tell_adaptive(adaptive, arena, at, tick);
        }
    }

    #[inline(never)]
    fn tell_adaptive(adaptive: &mut Adaptive, arena: &Arena, at: u32, tick: u64) {
        if at != ROOT {
            let node = &arena.nodes[at as usize];
            adaptive.renew((node.tick, tick), node.pages);
        }
    }

    #[inline]
    fn set_tick(&mut self, arena: &mut Arena, at: u32, tick: u64) {
        let node = &mut arena.nodes[at as usize];
        if node.mirrored || self.has_components {
            self.set_tick_of_ranked(arena, at, tick);
        } else {
            node.tick = tick;
        }
    }

    /// The same for a node that stands in an order which is not one of eviction.
    #[inline(never)]
    fn set_tick_of_ranked(&mut self, arena: &mut Arena, at: u32, tick: u64) {
        if arena.nodes[at as usize].tick == tick {
            return;
        }
        let mirrored = arena.nodes[at as usize].mirrored;
        self.remove_mirror(arena, at);
        arena.nodes[at as usize].tick = tick;
        if mirrored {
            self.add_mirror(arena, at);
        }
        if self.has_components {
            self.rekey_components(arena, at);
        }
    }

    /// After a change of what the policy looks at.
    pub(super) fn rekey(&mut self, arena: &mut Arena, at: u32) {
        if self.policy.is_list() {
            return;
        }
        let listed = arena.nodes[at as usize].listed;
        if listed != Listed::Nowhere {
            self.put(arena, listed, at);
        }
    }

    /// Marks a node as just used.
    #[inline]
    pub(super) fn touch(&mut self, arena: &mut Arena, at: u32) {
        self.renew(arena, at, self.tick);
        arena.nodes[at as usize].tick = self.tick;
        self.freshen_mirror(arena, at);
        if self.has_components {
            self.rekey_components(arena, at);
        }
        let listed = arena.nodes[at as usize].listed;
        if listed == Listed::Nowhere {
            return;
        }
        if !self.policy.is_list() {
            if self.adaptive.as_ref().is_none_or(|a| !a.settled(at, self.tick)) {
                self.put(arena, listed, at);
            }
            return;
        }
        let ends = &mut self.lists[listed as usize];
        if ends.newest != at {
            unlink(&mut arena.nodes, ends, at, order_links);
            link_newest(&mut arena.nodes, ends, at, order_links);
        }
    }

    /// A mirror was used now. O(1), or O(log) the first time.
    fn freshen_mirror(&mut self, arena: &mut Arena, at: u32) {
        if arena.nodes[at as usize].mirrored && self.mirrors.newest != at {
            self.remove_mirror(arena, at);
            arena.nodes[at as usize].mirrored = true;
            link_newest(&mut arena.nodes, &mut self.mirrors, at, mirror_links);
        }
    }

    /// Gives the new prefix of a split the place right above its suffix.
    pub(super) fn split(&mut self, arena: &mut Arena, rule: BackupRule, prefix: u32, suffix: u32) {
        let listed = arena.nodes[suffix as usize].listed;
        if self.policy.is_list() && listed != Listed::Nowhere {
            arena.nodes[prefix as usize].listed = listed;
            link_above(&mut arena.nodes, &mut self.lists[listed as usize], prefix, suffix, order_links);
        } else if self.adaptive.is_none() {
            // The order that learns leaves the suffix where it stands: it is about to go, or to be scored at its next use.
            self.rekey(arena, suffix);
        }
        self.restand(arena, suffix);
        if self.old_mirrors.remove(suffix) {
            self.old_mirrors.set(suffix, mirror_key(&arena.nodes[suffix as usize]));
        } else if Self::is_mirror(rule, prefix, &arena.nodes[prefix as usize]) {
            arena.nodes[prefix as usize].mirrored = true;
            link_above(&mut arena.nodes, &mut self.mirrors, prefix, suffix, mirror_links);
        }
        self.refresh(arena, rule, prefix);
        if self.has_components {
            self.refresh_components(arena, prefix);
            self.refresh_components(arena, suffix);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A list of `count` nodes of ticks 10, 20, 30, ...
    fn list_of(count: u32) -> (Vec<Node>, Ends) {
        let (mut nodes, mut ends) = (Vec::new(), Ends::EMPTY);
        for at in 0..count {
            nodes.push(Node { tick: u64::from(at + 1) * 10, ..Node::root() });
            link_newest(&mut nodes, &mut ends, at, order_links);
        }
        (nodes, ends)
    }

    #[test]
    fn a_place_is_found_from_the_nearest_of_three_or_not_at_all() {
        let (nodes, ends) = list_of(100_000);
        let place = |tick: u64, near: u32| place_by_age(&nodes, ends, near, (tick, Reverse(0)));
        assert_eq!(place(5, ends.newest), (Some(NIL), 3));
        assert_eq!(place(999_995, ends.newest).0, Some(99_998));
        for near in [49_000, 49_900, 50_000, 50_100] {
            let (found, looked_at) = place(500_005, near);
            let far = near.abs_diff(49_999);
            assert_eq!(found, (3 * far < PLACES_MAX).then_some(49_999), "from {near}");
            assert!(looked_at <= PLACES_MAX.min(3 * far + 6), "{looked_at} from {near}");
        }
        assert_eq!(place(500_005, ends.newest), (None, PLACES_MAX));
        // Every place of a short list, from everywhere.
        let (nodes, ends) = list_of(30);
        for place in 0..30u32 {
            for near in 0..30 {
                let mine = (u64::from(place) * 10 + 5, Reverse(0));
                let below = place.checked_sub(1).unwrap_or(NIL);
                assert_eq!(place_by_age(&nodes, ends, near, mine).0, Some(below), "{place} from {near}");
            }
        }
    }
}
