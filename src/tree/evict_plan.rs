//! Device eviction in two calls, for an embedder that has to do something between knowing the victims and losing them.
//!
//! A plan names nodes, not places in an order: it holds nothing, and a tree that has moved on refuses the commit instead of
//! evicting something else. Going on with a plan costs nothing extra under LRU (it remembers where it stopped), and
//! O(log leaves) per victim planned so far under a heap policy.

use crate::base::containers::{Map, Set};
use crate::base::{NodeId, PageId, Tier};
use crate::pool::{Extent, extents_of};

use super::node::{DEVICE_ORDERS, Listed, NIL, ROOT, Residency};
use super::order::facts;
use super::{DeviceEviction, Tree, TreeError, Unbacked};

/// What a commit does with a victim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// The host copy stays.
    Demote,
    /// The node goes, with what hangs below it on the host.
    Delete,
}

/// One node that goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Victim {
    /// Whole; a node of which only the tail is wanted has been split.
    pub node: NodeId,
    /// Its pages.
    pub pages: u32,
    /// What becomes of it.
    pub fate: Fate,
    /// Tick of its last use.
    used: u64,
}

/// A batch of device eviction that has not happened yet, and the token to go on planning. Reuse one and
/// [`clear`](EvictionPlan::clear) it.
#[derive(Clone, Debug, Default)]
pub struct EvictionPlan {
    /// In the order in which they go: no node before a descendant of it.
    pub victims: Vec<Victim>,
    /// Device pages that the commit will free, neighbours as one.
    pub frees: Vec<Extent>,
    /// How many they are.
    pub free_pages: u32,
    /// Nodes that would be next but have no host copy, or lie above such: back them up and demote them, in this order.
    pub backups: Vec<NodeId>,
    /// Their device pages. They count as found.
    pub backup_pages: u32,
    /// Slots of victims and backups.
    slots: Set<u32>,
    /// Children that are victims, by parent slot.
    gone: Map<u32, u32>,
    /// Children that are victims or backups, by parent slot.
    planned: Map<u32, u32>,
    /// Where an LRU plan stopped: the next node and its tick then.
    next: Option<(NodeId, u64)>,
}

impl EvictionPlan {
    /// Empties the plan, keeps its memory.
    pub fn clear(&mut self) {
        self.victims.clear();
        self.frees.clear();
        self.backups.clear();
        (self.free_pages, self.backup_pages, self.next) = (0, 0, None);
        self.slots.clear();
        self.gone.clear();
        self.planned.clear();
    }

    fn nodes(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.victims.iter().map(|victim| victim.node).chain(self.backups.iter().copied())
    }

    fn free(&mut self, pages: &[PageId]) {
        for extent in extents_of(pages) {
            match self.frees.last_mut() {
                Some(last)
                    if u64::from(last.first.0) + u64::from(last.pages) == u64::from(extent.first.0) =>
                {
                    last.pages += extent.pages;
                }
                _ => self.frees.push(extent),
            }
        }
        self.free_pages += pages.len() as u32;
    }
}

impl Tree {
    /// Plans the eviction of `want_pages` more device pages, or of all that nobody holds if that is less: the victims that
    /// [`evict_device`](Tree::evict_device) would take, appended to what the plan has. Nothing leaves its place; a node of
    /// which only the tail is wanted is split. Returns the pages found. O(nodes found), times log of the leaves under a
    /// heap policy.
    ///
    /// # Errors
    /// [`TreeError::StalePlan`] if a node of the plan was evicted, merged or used in between: clear it and plan anew.
    pub fn plan_eviction(
        &mut self,
        want_pages: u32,
        unbacked: Unbacked,
        plan: &mut EvictionPlan,
    ) -> Result<u32, TreeError> {
        if let Some(node) = plan.nodes().find(|&node| !self.is_idle(node)) {
            return Err(TreeError::StalePlan(node));
        }
        Ok(if self.orders.policy.is_list() {
            self.plan_by_list(want_pages, unbacked, plan)
        } else {
            self.plan_by_heap(want_pages, unbacked, plan)
        })
    }

    /// On the device and in nobody's hands.
    fn is_idle(&self, node: NodeId) -> bool {
        self.slot_below_root(node).is_ok_and(|at| {
            let n = &self.arena.nodes[at as usize];
            n.device == Residency::Present && n.locks == 0
        })
    }

    fn plan_by_list(&mut self, want_pages: u32, unbacked: Unbacked, plan: &mut EvictionPlan) -> u32 {
        let mut left = want_pages;
        let (first, mut at) = self.resume_list(plan);
        plan.next = None;
        for listed in DEVICE_ORDERS.into_iter().skip_while(|&listed| listed != first) {
            if listed != first {
                at = self.orders.lists[listed as usize].oldest;
            }
            while at != NIL {
                if left == 0 {
                    plan.next = Some((self.arena.id(at), self.arena.nodes[at as usize].tick));
                    return want_pages;
                }
                if !plan.slots.contains(&at) {
                    self.cut_tail(at, left);
                    left -= self.add_victim(at, unbacked, plan);
                }
                at = self.arena.nodes[at as usize].order.newer;
            }
        }
        want_pages - left
    }

    /// Where the plan stopped, if that node is where it was; else the old end, from where planned nodes are passed over.
    fn resume_list(&self, plan: &EvictionPlan) -> (Listed, u32) {
        if let Some((node, tick)) = plan.next
            && let Some(at) = self.arena.slot(node)
        {
            let n = &self.arena.nodes[at as usize];
            if n.tick == tick && DEVICE_ORDERS.contains(&n.listed) {
                return (n.listed, at);
            }
        }
        (Listed::Device, self.orders.lists[Listed::Device as usize].oldest)
    }

    fn plan_by_heap(&mut self, want_pages: u32, unbacked: Unbacked, plan: &mut EvictionPlan) -> u32 {
        let mut left = want_pages;
        // What is planned steps aside, so that what comes next stands at the top.
        let mut aside: Vec<u32> = plan.nodes().map(|node| node.index).collect();
        for &at in &aside {
            self.orders.take_from_device_heaps(&mut self.arena, at);
        }
        for at in aside.clone() {
            self.offer_parent(at, plan, &mut aside);
        }
        while left > 0 {
            let Some(at) = self.orders.heap_top(&mut self.arena, DEVICE_ORDERS) else { break };
            let tail = self.orders.policy.tail_pages(&facts(&self.arena.nodes[at as usize]));
            self.cut_tail(at, left.min(tail));
            left -= self.add_victim(at, unbacked, plan);
            self.orders.take_from_device_heaps(&mut self.arena, at);
            aside.push(at);
            self.offer_parent(at, plan, &mut aside);
        }
        for at in aside {
            self.orders.take_from_device_heaps(&mut self.arena, at);
            self.orders.rekey(&mut self.arena, at);
        }
        want_pages - left
    }

    /// With all its children on the device planned, a node is next in line as if it were a leaf.
    fn offer_parent(&mut self, at: u32, plan: &EvictionPlan, aside: &mut Vec<u32>) {
        let parent = self.arena.nodes[at as usize].parent;
        let up = &self.arena.nodes[parent as usize];
        let all = plan.planned.get(&parent) == Some(&up.kids_device);
        if parent != ROOT && up.locks == 0 && all && !plan.slots.contains(&parent) {
            self.orders.put_in_device_heap(&mut self.arena, parent);
            aside.push(parent);
        }
    }

    /// Adds a node to the plan; its pages.
    fn add_victim(&self, at: u32, unbacked: Unbacked, plan: &mut EvictionPlan) -> u32 {
        let node = &self.arena.nodes[at as usize];
        let (id, pages) = (self.arena.id(at), node.pages);
        let alone = node.kids_device == plan.gone.get(&at).copied().unwrap_or(0);
        let fate = if node.host == Residency::Present { Fate::Demote } else { Fate::Delete };
        if alone && (fate == Fate::Demote || !self.reports(node, unbacked)) {
            plan.victims.push(Victim { node: id, pages, fate, used: node.tick });
            plan.free(self.arena.pages(at, Tier::Device));
            *plan.gone.entry(node.parent).or_insert(0) += 1;
        } else {
            plan.backups.push(id);
            plan.backup_pages += pages;
        }
        plan.slots.insert(at);
        *plan.planned.entry(node.parent).or_insert(0) += 1;
        pages
    }

    /// Carries out a plan: its victims go. What is left of the plan are its backups. Appends to `out`. O(nodes).
    ///
    /// # Errors
    /// [`TreeError::StalePlan`] names a node that was used, locked, split or backed up since, or that has got a child on the
    /// device. Nothing is changed.
    pub fn commit_eviction(
        &mut self,
        plan: &mut EvictionPlan,
        out: &mut DeviceEviction,
    ) -> Result<(), TreeError> {
        for victim in &plan.victims {
            let at = self.slot_below_root(victim.node)?;
            let n = &self.arena.nodes[at as usize];
            let fits = match victim.fate {
                Fate::Demote => n.host == Residency::Present,
                Fate::Delete => n.host == Residency::Absent && n.pins == 0,
            };
            let alone = n.kids_device == plan.gone.get(&at).copied().unwrap_or(0);
            let same = (n.pages, n.tick) == (victim.pages, victim.used);
            if !(fits && alone && same && self.is_idle(victim.node)) {
                return Err(TreeError::StalePlan(victim.node));
            }
        }
        for victim in &plan.victims {
            self.evict_one(victim.node.index, out);
        }
        let backups = std::mem::take(&mut plan.backups);
        let backup_pages = plan.backup_pages;
        plan.clear();
        for &node in &backups {
            plan.slots.insert(node.index);
            *plan.planned.entry(self.arena.nodes[node.index as usize].parent).or_insert(0) += 1;
        }
        (plan.backups, plan.backup_pages) = (backups, backup_pages);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::NamespaceId;
    use crate::key::Key;
    use crate::tree::{InsertOpts, InsertOut, Policy, TreeConfig};

    fn three_prompts(policy: Policy) -> (Tree, Vec<NodeId>) {
        let mut tree =
            Tree::new(TreeConfig { page_size: 1, policy, ..TreeConfig::default() }).expect("sound");
        let put = |i: u32| {
            let pages = [PageId(2 * i), PageId(2 * i + 1)];
            let key = [10 * i, 10 * i + 1];
            let (opts, out) = (InsertOpts::default(), &mut InsertOut::default());
            tree.insert(Key::new(NamespaceId::DEFAULT, &key), &pages, 0, opts, out).expect("sound").node
        };
        let nodes = (0..3).map(put).collect();
        (tree, nodes)
    }

    #[test]
    fn a_plan_holds_nothing_and_is_refused_whole_when_the_tree_has_moved_on() {
        for policy in [Policy::Lru, Policy::Fifo] {
            let (mut tree, nodes) = three_prompts(policy);
            let mut plan = EvictionPlan::default();
            assert_eq!(tree.plan_eviction(3, Unbacked::Delete, &mut plan), Ok(3));
            // The tail of the second prompt was split off; both prompts are neighbours in memory.
            assert_eq!(
                plan.frees,
                [Extent { first: PageId(0), pages: 2 }, Extent { first: PageId(3), pages: 1 }]
            );
            let before = tree.clone();
            let lock = tree.lock(nodes[1]).expect("alive");
            let mut out = DeviceEviction::default();
            assert_eq!(tree.commit_eviction(&mut plan, &mut out), Err(TreeError::StalePlan(nodes[1])));
            assert_eq!(
                tree.plan_eviction(1, Unbacked::Delete, &mut plan),
                Err(TreeError::StalePlan(nodes[1]))
            );
            assert_eq!((tree.stats().nodes, out), (before.stats().nodes, DeviceEviction::default()));
            tree.unlock(lock).expect("ours");
            let again = tree.commit_eviction(&mut plan, &mut DeviceEviction::default());
            assert_eq!(again, Err(TreeError::StalePlan(nodes[1])), "used since it was planned");
            let mut twin = before;
            twin.commit_eviction(&mut plan, &mut DeviceEviction::default())
                .expect("nothing has changed there");
            assert_eq!(twin.stats().device_pages_evictable, 3);
            assert!(twin.sanity().is_empty() && plan.victims.is_empty());
        }
    }

    #[test]
    fn planning_goes_on_past_what_was_used_meanwhile() {
        let (mut tree, nodes) = three_prompts(Policy::Lru);
        let mut plan = EvictionPlan::default();
        assert_eq!(tree.plan_eviction(2, Unbacked::Delete, &mut plan), Ok(2));
        let lock = tree.lock(nodes[1]).expect("alive");
        tree.unlock(lock).expect("ours");
        assert_eq!(tree.plan_eviction(9, Unbacked::Delete, &mut plan), Ok(4));
        let order: Vec<NodeId> = plan.victims.iter().map(|victim| victim.node).collect();
        assert_eq!(order, [nodes[0], nodes[2], nodes[1]]);
    }
}
