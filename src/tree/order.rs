//! Who can be evicted, and in which order. The only writer of `listed`, `mirrored` and their links.
//!
//! A node stands in the device order if it has a device copy and no lock, in the host order if it has only a host copy
//! and neither lock nor pin. Locked nodes are not in any list, so a walk never has to skip them. Under a heap policy only
//! leaves of the tier are in; under the adaptive one they stand in its cells.

use std::cmp::Reverse;

use crate::base::Tier;
use crate::base::heap::IndexHeap;

use super::adaptive::{Adaptive, Hint, Leaf};
use super::component::COMPONENTS;
use super::node::{Arena, Links, Listed, NIL, Node, ROOT, Residency};
use super::policy::{NodeFacts, Policy};
use super::types::BackupRule;

/// Ends of an intrusive list.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ends {
    pub(super) oldest: u32,
    pub(super) newest: u32,
}

impl Ends {
    const EMPTY: Ends = Ends { oldest: NIL, newest: NIL };
}

/// The two eviction orders and the list of reclaimable mirrors.
#[derive(Clone, Debug)]
pub(super) struct Orders {
    pub(super) policy: Policy,
    pub(super) device: Ends,
    pub(super) host: Ends,
    pub(super) device_heap: IndexHeap,
    pub(super) host_heap: IndexHeap,
    /// The order that learns, in place of the heaps.
    pub(super) adaptive: Option<Box<Adaptive>>,
    /// Nodes whose host copy could be given up, by age.
    pub(super) mirrors: Ends,
    /// By component and tier: nodes that have any of it.
    pub(super) components: [[IndexHeap; 2]; COMPONENTS],
    /// Where a node last went to its place by age, on the device, on the host, and among the mirrors: operations end
    /// about in the order in which they began, so the next place is near. May name anything.
    pub(super) fingers: [u32; 3],
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

/// Links a node behind everything older. O(1) for one that was just used; else a search from both ends of the list and
/// from the place of the last such call at once, which costs the shortest of the three ways.
/// `is_in` says which nodes are in the list.
fn link_by_age(
    nodes: &mut [Node],
    ends: &mut Ends,
    finger: &mut u32,
    at: u32,
    links: Field,
    is_in: impl Fn(&Node) -> bool,
) {
    // Of nodes with one tick, which lie on one path, the deepest is the oldest.
    let age = |node: &Node| (node.tick, Reverse(node.depth));
    let mine = age(&nodes[at as usize]);
    let older = |nodes: &[Node], other: u32| age(&nodes[other as usize]) < mine;
    if ends.newest == NIL || older(nodes, ends.newest) {
        link_newest(nodes, ends, at, links);
        return;
    }
    let (mut low, mut high, mut near) = (ends.oldest, ends.newest, *finger);
    if near == at || nodes.get(near as usize).is_none_or(|node| !is_in(node)) {
        near = high;
    }
    let border = loop {
        let at_low = *links(&mut nodes[low as usize]);
        if !older(nodes, low) {
            break at_low.older;
        }
        low = at_low.newer;
        let next = links(&mut nodes[high as usize]).older;
        if next == NIL || older(nodes, next) {
            break next;
        }
        high = next;
        let (at_near, below) = (*links(&mut nodes[near as usize]), older(nodes, near));
        let next = if below { at_near.newer } else { at_near.older };
        if next == NIL || older(nodes, next) != below {
            break if below { near } else { next };
        }
        near = next;
    };
    *finger = at;
    match border {
        NIL => link_oldest(nodes, ends, at, links),
        _ => link_above(nodes, ends, at, border, links),
    }
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

fn leaf(node: &Node) -> Leaf {
    Leaf {
        tick: node.tick,
        depth: node.depth,
        pages: node.pages,
        reach: node.reach,
        kids: node.kids,
        priority: node.priority,
    }
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
            device: Ends::EMPTY,
            host: Ends::EMPTY,
            device_heap: IndexHeap::default(),
            host_heap: IndexHeap::default(),
            mirrors: Ends::EMPTY,
            components: Default::default(),
            fingers: [NIL; 3],
            has_components,
            tick: 0,
        }
    }

    /// Where a node belongs, from its state alone. `sanity` asks the same question.
    pub(super) fn place(&self, at: u32, node: &Node) -> Listed {
        let leaf_only = !self.policy.is_list();
        if at == ROOT || node.locks > 0 {
            Listed::Nowhere
        } else if node.device == Residency::Present {
            if leaf_only && node.kids_device > 0 { Listed::Nowhere } else { Listed::Device }
        } else if node.host == Residency::Present && node.pins == 0 {
            if leaf_only && node.kids > 0 { Listed::Nowhere } else { Listed::Host }
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
            && (rule == BackupRule::Free || node.kids_host == 0)
    }

    /// Brings list membership in line with the state of a node. A node that enters an order enters where its tick
    /// belongs. O(1), or O(log leaves) under a heap policy.
    pub(super) fn refresh(&mut self, arena: &mut Arena, rule: BackupRule, at: u32) {
        let node = &mut arena.nodes[at as usize];
        let want = self.place(at, node);
        let mirror = Self::is_mirror(rule, at, node);
        if mirror != node.mirrored {
            node.mirrored = mirror;
            if mirror {
                self.link_mirror(arena, at);
            } else {
                unlink(&mut arena.nodes, &mut self.mirrors, at, mirror_links);
            }
        }
        if arena.nodes[at as usize].listed != want {
            self.leave(arena, at);
            self.enter(arena, at, want);
        }
        if self.has_components {
            self.rekey_components(arena, at);
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
            let (ends, finger) = match want {
                Listed::Device => (&mut self.device, &mut self.fingers[0]),
                _ => (&mut self.host, &mut self.fingers[1]),
            };
            link_by_age(&mut arena.nodes, ends, finger, at, order_links, |node| node.listed == want);
        } else {
            self.rekey(arena, at);
        }
    }

    fn link_mirror(&mut self, arena: &mut Arena, at: u32) {
        let (ends, finger) = (&mut self.mirrors, &mut self.fingers[2]);
        link_by_age(&mut arena.nodes, ends, finger, at, mirror_links, |node| node.mirrored);
    }

    /// The tick of a held node was changed; it stands in no order, but perhaps among the mirrors and the components.
    #[inline]
    pub(super) fn aged(&mut self, arena: &mut Arena, at: u32) {
        if arena.nodes[at as usize].mirrored && self.mirrors.newest != at {
            unlink(&mut arena.nodes, &mut self.mirrors, at, mirror_links);
            self.link_mirror(arena, at);
        }
        if self.has_components {
            self.rekey_components(arena, at);
        }
    }

    /// A node lost its last lock: it may enter an order, where its tick belongs. Mirrors do not depend on locks.
    #[inline]
    pub(super) fn unlocked(&mut self, arena: &mut Arena, at: u32) {
        let want = self.place(at, &arena.nodes[at as usize]);
        self.enter(arena, at, want);
        if self.has_components {
            self.rekey_components(arena, at);
        }
    }

    /// Takes a node out of its eviction order.
    #[inline]
    pub(super) fn leave(&mut self, arena: &mut Arena, at: u32) {
        let listed = std::mem::replace(&mut arena.nodes[at as usize].listed, Listed::Nowhere);
        match (listed, self.policy.is_list()) {
            (Listed::Nowhere, _) => {}
            (Listed::Device, true) => unlink(&mut arena.nodes, &mut self.device, at, order_links),
            (Listed::Host, true) => unlink(&mut arena.nodes, &mut self.host, at, order_links),
            (Listed::Device, false) => self.set_aside(Tier::Device, at),
            (Listed::Host, false) => self.set_aside(Tier::Host, at),
        }
    }

    /// Takes a leaf out of the order of a tier, or not if it is not in; never of a list.
    pub(super) fn set_aside(&mut self, tier: Tier, at: u32) {
        match &mut self.adaptive {
            Some(adaptive) => adaptive.leave(tier, at),
            None if tier == Tier::Device => _ = self.device_heap.remove(at),
            None => _ = self.host_heap.remove(at),
        }
    }

    /// Puts a leaf into the order of a tier, at the place that is right for it now; never of a list.
    pub(super) fn put(&mut self, arena: &Arena, tier: Tier, at: u32) {
        let node = &arena.nodes[at as usize];
        match &mut self.adaptive {
            Some(adaptive) => {
                adaptive.leave(tier, at);
                adaptive.enter(tier, at, &leaf(node), self.tick);
            }
            None if tier == Tier::Device => self.device_heap.set(at, self.policy.key(&facts(node))),
            None => self.host_heap.set(at, self.policy.key(&facts(node))),
        }
    }

    /// The next victim of a tier.
    pub(super) fn first(&mut self, tier: Tier) -> Option<u32> {
        match &mut self.adaptive {
            Some(adaptive) => adaptive.first(tier, self.tick),
            None if self.policy.is_list() => {
                let ends = if tier == Tier::Device { self.device } else { self.host };
                (ends.oldest != NIL).then_some(ends.oldest)
            }
            None if tier == Tier::Device => self.device_heap.peek(),
            None => self.host_heap.peek(),
        }
    }

    /// A node was made; `name` names its pages.
    pub(super) fn created(&mut self, arena: &Arena, at: u32, name: impl Fn(u32) -> u64) {
        if let Some(adaptive) = &mut self.adaptive {
            let node = &arena.nodes[at as usize];
            adaptive.created(at, (node.parent != ROOT).then_some(node.parent), &leaf(node), name);
        }
    }

    /// A look-up found this path, `pages` in all: where the order learns, its uses are answered and time passes. The
    /// nodes stay where they stand; a touch or a lock moves them.
    #[inline]
    pub(super) fn matched(&mut self, arena: &mut Arena, path: &[u32], pages: u32) {
        if let Some(adaptive) = &mut self.adaptive {
            let (now, mut lru_pages, mut last) = (self.tick, 0, None);
            for &at in path {
                let node = &mut arena.nodes[at as usize];
                lru_pages += adaptive.used(node.tick, now, node.pages);
                if node.listed != Listed::Nowhere {
                    adaptive.answered(at, now);
                }
                last = Some((at, std::mem::replace(&mut node.tick, now)));
            }
            if let Some((at, tick)) = last {
                adaptive.answered(at, now);
                adaptive.ended(at, tick, now);
            }
            adaptive.request(now, pages, lru_pages);
            path.iter().rev().for_each(|&at| self.aged(arena, at));
            self.tick += u64::from(pages);
        }
    }

    /// What the scheduler knows of a node.
    pub(super) fn hint(&mut self, arena: &mut Arena, at: u32, hint: Hint) {
        let Some(adaptive) = &mut self.adaptive else { return };
        let tier = match arena.nodes[at as usize].listed {
            Listed::Nowhere => return adaptive.hint(at, hint, self.tick),
            Listed::Device => Tier::Device,
            Listed::Host => Tier::Host,
        };
        adaptive.leave(tier, at);
        adaptive.hint(at, hint, self.tick);
        adaptive.enter(tier, at, &leaf(&arena.nodes[at as usize]), self.tick);
    }

    /// Time passes by so many pages, where time is volume.
    pub(super) fn pass(&mut self, pages: u32) {
        if self.adaptive.is_some() {
            self.tick += u64::from(pages);
        }
    }

    /// Makes `tick` the time of a node's last use. Its place in the orders is the caller's business.
    #[inline]
    pub(super) fn stamp(&mut self, arena: &mut Arena, at: u32, tick: u64) {
        let node = &mut arena.nodes[at as usize];
        let old = std::mem::replace(&mut node.tick, tick);
        if let Some(adaptive) = self.adaptive.as_mut().filter(|_| at != ROOT) {
            adaptive.renew((old, tick), node.pages);
        }
    }

    /// Takes a node out of everything, before it is deleted. `evicted`: it may come back; otherwise it has been merged
    /// into its child.
    pub(super) fn forget(&mut self, arena: &mut Arena, at: u32, evicted: bool) {
        self.leave(arena, at);
        if let Some(adaptive) = self.adaptive.as_mut().filter(|_| evicted) {
            let node = &arena.nodes[at as usize];
            adaptive.evicted(at, node.tick, node.pages);
        }
        if self.has_components {
            self.forget_components(at);
        }
        if std::mem::replace(&mut arena.nodes[at as usize].mirrored, false) {
            unlink(&mut arena.nodes, &mut self.mirrors, at, mirror_links);
        }
    }

    /// After a change of what the policy looks at.
    pub(super) fn rekey(&mut self, arena: &Arena, at: u32) {
        if self.policy.is_list() {
            return;
        }
        match arena.nodes[at as usize].listed {
            Listed::Nowhere => {}
            Listed::Device => self.put(arena, Tier::Device, at),
            Listed::Host => self.put(arena, Tier::Host, at),
        }
    }

    /// Marks a node as just used.
    #[inline]
    pub(super) fn touch(&mut self, arena: &mut Arena, at: u32) {
        self.stamp(arena, at, self.tick);
        self.freshen_mirror(arena, at);
        if self.has_components {
            self.rekey_components(arena, at);
        }
        if !self.policy.is_list() {
            if self.adaptive.as_ref().is_none_or(|a| !a.settled(at, self.tick)) {
                self.rekey(arena, at);
            }
            return;
        }
        let ends = match arena.nodes[at as usize].listed {
            Listed::Nowhere => return,
            Listed::Device => &mut self.device,
            Listed::Host => &mut self.host,
        };
        if ends.newest != at {
            unlink(&mut arena.nodes, ends, at, order_links);
            link_newest(&mut arena.nodes, ends, at, order_links);
        }
    }

    /// A mirror that is used goes to the end that is given up first. O(1).
    fn freshen_mirror(&mut self, arena: &mut Arena, at: u32) {
        if arena.nodes[at as usize].mirrored && self.mirrors.newest != at {
            unlink(&mut arena.nodes, &mut self.mirrors, at, mirror_links);
            link_newest(&mut arena.nodes, &mut self.mirrors, at, mirror_links);
        }
    }

    /// Gives the new prefix of a split the place right above its suffix.
    pub(super) fn split(&mut self, arena: &mut Arena, rule: BackupRule, prefix: u32, suffix: u32) {
        let listed = arena.nodes[suffix as usize].listed;
        if self.policy.is_list() && listed != Listed::Nowhere {
            let ends = if listed == Listed::Device { &mut self.device } else { &mut self.host };
            arena.nodes[prefix as usize].listed = listed;
            link_above(&mut arena.nodes, ends, prefix, suffix, order_links);
        } else {
            self.rekey(arena, suffix);
        }
        self.refresh(arena, rule, prefix);
        if self.has_components {
            self.refresh_components(arena, prefix);
            self.refresh_components(arena, suffix);
        }
    }
}
