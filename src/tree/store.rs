//! Page hashes and store presence.
//!
//! A hash is computed once per page, when its node is made or when hashing is turned on, and is kept as 32 bytes in the
//! run, so a split never rehashes. A stored mark is one bit per page of the run.

use crate::base::{NamespaceId, NodeId, OpId, Tier};
use crate::key::{Key, PageHash, PageNames, extend_hashes, hash_pages};

use super::lock::Holder;
use super::node::{NIL, ROOT, Residency, Run};
use super::op::OpKind;
use super::{BackupRule, ComponentPut, StorePlan, Tree, TreeError};

impl Tree {
    /// True if the tree keeps page hashes.
    #[must_use]
    pub fn hashing(&self) -> bool {
        self.hashing
    }

    /// Turns hashes on and computes those of every node, parents before children: a chain that started at a node whose
    /// parent has none would name another prompt. One-way. O(tokens of the tree) the first time.
    pub fn set_hashing(&mut self) {
        if std::mem::replace(&mut self.hashing, true) {
            return;
        }
        let mut nodes: Vec<u32> = self.arena.live().filter(|&at| at != ROOT).collect();
        nodes.sort_by_key(|&at| (self.arena.nodes[at as usize].depth, at));
        for at in nodes {
            let node = &self.arena.nodes[at as usize];
            let (run, from, ns) = (node.run, node.from, node.ns);
            let prior = self.prior_hash(node.parent, ns);
            let mut hashes = std::mem::take(&mut self.hashed);
            hashes.clear();
            let key = Key { ns, tokens: self.tokens_of(at), view: self.view };
            hash_pages(key, self.page_size, prior, &mut hashes);
            self.stats.hashed_pages += hashes.len() as u64;
            self.arena.set_hashes(run, from, &hashes);
            self.hashed = hashes;
        }
    }

    /// Hash of a node's last page; `None` for the root or without hashes.
    pub(super) fn last_hash_of(&self, at: u32) -> Option<PageHash> {
        if at == ROOT { None } else { self.arena.hashes(at)?.last().copied() }
    }

    /// What the hash of the first page below `parent` is chained to.
    pub(super) fn prior_hash(&self, parent: u32, ns: NamespaceId) -> Option<[u8; 32]> {
        if parent == ROOT { self.namespaces.seed(ns) } else { self.last_hash_of(parent).map(|hash| hash.0) }
    }

    /// Hashes of the pages of `rest`, which continues behind `parent`, into `out`: what `names` knows, the others
    /// computed. Returns how many those are.
    pub(super) fn hash_below(
        &self,
        parent: u32,
        rest: Key<'_>,
        names: Option<&PageNames>,
        out: &mut Vec<PageHash>,
    ) -> u64 {
        let prior = self.prior_hash(parent, rest.ns);
        let first = self.arena.nodes[parent as usize].end();
        out.clear();
        u64::from(extend_hashes(rest, self.page_size, first, prior, names, out))
    }

    /// Whether hashes are wanted and `names` has those of all pages of `rest`, so that it also has their tokens. O(tokens).
    pub(super) fn are_named(&self, parent: u32, rest: Key<'_>, names: &PageNames) -> bool {
        let first = self.arena.nodes[parent as usize].end();
        let known = || names.of_rest(rest, first, self.prior_hash(parent, rest.ns)).len();
        self.hashing && known() == rest.pages(self.page_size) as usize
    }

    /// Page hashes of a node; empty for the root.
    ///
    /// # Errors
    /// Unknown node, or hashes are off.
    pub fn hashes(&self, node: NodeId) -> Result<&[PageHash], TreeError> {
        let at = self.slot(node)?;
        if at == ROOT {
            return Ok(&[]);
        }
        self.arena.hashes(at).ok_or(TreeError::NoHashes(node))
    }

    /// Hash of the last page of a node; `None` for the root.
    ///
    /// # Errors
    /// Unknown node, or hashes are off.
    pub fn last_hash(&self, node: NodeId) -> Result<Option<PageHash>, TreeError> {
        Ok(self.hashes(node)?.last().copied())
    }

    /// Starts writing the pages of `node` that are not stored yet. Their host copies stay in place until
    /// [`end_store`](Tree::end_store).
    ///
    /// # Errors
    /// The id is in flight; unknown node, the root, no published host copy, no hashes, a write in flight, or nothing to
    /// write.
    pub fn begin_store(&mut self, op: OpId, node: NodeId) -> Result<StorePlan, TreeError> {
        if self.ops.contains(op) {
            return Err(TreeError::OpInFlight(op));
        }
        let at = self.slot_below_root(node)?;
        let n = &self.arena.nodes[at as usize];
        if n.host != Residency::Present {
            return Err(TreeError::NotBackedUp(node));
        }
        if self.ops.storing(at) != NIL {
            return Err(TreeError::AlreadyStoring(node));
        }
        let run = &self.arena.runs[n.run as usize];
        let hashes = self.arena.hashes(at).ok_or(TreeError::NoHashes(node))?;
        let host = self.arena.pages(at, Tier::Host);
        let mut plan = StorePlan { node, positions: Vec::new(), host_pages: Vec::new(), hashes: Vec::new() };
        for i in (0..hashes.len()).filter(|&i| !run.is_stored(n.from as usize + i)) {
            plan.positions.push(n.depth + i as u32);
            plan.host_pages.push(host[i]);
            plan.hashes.push(hashes[i]);
        }
        if plan.positions.is_empty() {
            return Err(TreeError::AlreadyStored(node));
        }
        let first = n.depth;
        let slot = self.ops.add(op, OpKind::Store, at, first);
        self.ops.get_mut(slot).positions.clone_from(&plan.positions);
        self.stats.ops += 1;
        self.ops.set_storing(at, slot);
        self.pin_path(at);
        self.ops.get_mut(slot).held = self.hold_spans(at);
        if self.rule == BackupRule::Free {
            self.ops.get_mut(slot).locked = true;
            self.lock_path(at);
        }
        Ok(plan)
    }

    /// Ends a store write: `stored` has one outcome per page of the plan, in its order. Returns how many pages are marked
    /// as stored now.
    ///
    /// # Errors
    /// No such write is in flight, or a list of another length (then it stays in flight).
    pub fn end_store(&mut self, op: OpId, stored: &[bool]) -> Result<u32, TreeError> {
        let slot = self.ops.find(op, OpKind::Store).ok_or(TreeError::UnknownOp(op))?;
        let want = self.ops.get(slot).positions.len();
        if stored.len() != want {
            return Err(TreeError::PageCount { want: want as u32, got: stored.len() });
        }
        self.tick();
        let fragments = self.ops.fragments(&self.arena, slot);
        let done = self.ops.remove(slot);
        self.stats.ops -= 1;
        let mut fragments = fragments.iter().copied().peekable();
        let mut marked = 0;
        for (&position, _) in done.positions.iter().zip(stored).filter(|&(_, &ok)| ok) {
            while fragments.peek().is_some_and(|&at| self.arena.nodes[at as usize].end() <= position) {
                fragments.next();
            }
            let Some(&at) = fragments.peek() else { break };
            let node = &self.arena.nodes[at as usize];
            let page = node.from + position - node.depth;
            self.arena.runs[node.run as usize].set_stored(page as usize, true);
            marked += 1;
        }
        let mut at = done.node;
        while at != ROOT && self.ops.storing(at) == slot {
            self.ops.set_storing(at, NIL);
            at = self.arena.nodes[at as usize].parent;
        }
        self.release_spans(done.node, done.held);
        self.unpin_path(done.node, Holder::Operation);
        if done.locked {
            self.unlock_path(done.node, Holder::Operation);
        }
        self.try_merge_settled(done.node);
        Ok(marked)
    }

    /// True if every page of the node is in the store (and for the root).
    ///
    /// # Errors
    /// Unknown node.
    pub fn is_stored(&self, node: NodeId) -> Result<bool, TreeError> {
        Ok(self.arena.is_stored(self.slot(node)?))
    }

    /// Component pages on the host that a request at the end of `node` needs, with the names of their places, shallowest
    /// first: what goes to the store with the node. A write in flight keeps them where they are. Appended to `out`.
    ///
    /// # Errors
    /// Unknown node, or hashes are off.
    pub fn component_store_plan(&self, node: NodeId, out: &mut Vec<ComponentPut>) -> Result<(), TreeError> {
        let end = self.slot(node)?;
        if !self.hashing {
            return Err(TreeError::NoHashes(node));
        }
        for (component, at, page, position) in self.needed_places(end) {
            let run = &self.arena.runs[self.arena.nodes[at as usize].run as usize];
            let host_page = run.component_page(component, Tier::Host, page);
            let hash = self
                .arena
                .hashes(at)
                .and_then(|list| list.get(page - self.arena.nodes[at as usize].from as usize));
            if let (Some(host_page), Some(&hash)) = (host_page, hash) {
                out.push(ComponentPut { component, position, host_page, hash });
            }
        }
        Ok(())
    }

    /// Forgets every stored mark: the store was detached or emptied. O(runs), O(nodes) under the adaptive policy.
    ///
    /// # Errors
    /// A store write is in flight.
    pub fn forget_stored(&mut self) -> Result<(), TreeError> {
        let writing = self.ops.iter().filter(|op| op.kind == OpKind::Store).count();
        if writing > 0 {
            return Err(TreeError::OpsInFlight(writing as u32));
        }
        self.arena.runs.iter_mut().for_each(Run::forget_stored);
        if self.orders.adaptive.is_some() {
            let live: Vec<u32> = self.arena.live().filter(|&at| at != ROOT).collect();
            live.into_iter().for_each(|at| self.refresh(at));
        }
        Ok(())
    }

    /// Lists the nodes with a published host copy below which there is none: between them and the root lies all that the host
    /// holds. O(nodes).
    pub fn host_ends(&self, out: &mut Vec<NodeId>) {
        let is_end = |at: &u32| {
            let node = &self.arena.nodes[*at as usize];
            *at != ROOT && node.host == Residency::Present && node.kids_host == 0
        };
        out.extend(self.arena.live().filter(is_end).map(|at| self.arena.id(at)));
    }

    /// Marks every page of the node as stored or not: a store answered that it has them, or lost them.
    ///
    /// # Errors
    /// Unknown node, the root.
    pub fn mark_stored(&mut self, node: NodeId, stored: bool) -> Result<(), TreeError> {
        let at = self.slot_below_root(node)?;
        let n = &self.arena.nodes[at as usize];
        let run = &mut self.arena.runs[n.run as usize];
        for page in n.range() {
            run.set_stored(page, stored);
        }
        self.refresh(at);
        Ok(())
    }
}
