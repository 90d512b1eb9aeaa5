//! Sessions: conversations that will come back.
//!
//! A session refers to the ends of what it has computed; everything on the way to them is kept (see `kept`). Under pressure
//! an end whose node is deleted recedes to the parent.

use std::fmt;

use smallvec::SmallVec;

use crate::base::NodeId;
use crate::base::containers::Map;
use crate::base::plant::{Plant, is_planted};
use crate::base::slab::{Slab, SlabKey};

use super::node::{NIL, ROOT};
use super::sanity::Report;
use super::{Tree, TreeError};

/// Most ends of one session; one more lets go of the oldest.
const ENDS_MAX: usize = 16;

/// An open session. Ids are never used again, so a late call for a closed session is refused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub(crate) SlabKey);

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s{}.{}", self.0.index, self.0.generation)
    }
}

/// Open sessions and where they end, both ways.
#[derive(Clone, Debug, Default)]
pub(super) struct Sessions {
    /// Slots of the end nodes, oldest first.
    open: Slab<SmallVec<[u32; 2]>>,
    /// By slot of the node.
    at: Map<u32, SmallVec<[SlabKey; 1]>>,
}

impl Sessions {
    /// No session ends anywhere.
    pub(super) fn is_empty(&self) -> bool {
        self.at.is_empty()
    }

    pub(super) fn ends_at(&self, at: u32) -> u32 {
        self.at.get(&at).map_or(0, |keys| keys.len() as u32)
    }

    /// Slots of all end nodes, one for each session that ends there.
    pub(super) fn ends(&self) -> impl Iterator<Item = u32> + '_ {
        self.open.iter().flat_map(|(_, ends)| ends.iter().copied())
    }

    /// The tree is empty; sessions stay open.
    pub(super) fn forget_ends(&mut self) {
        let keys: Vec<SlabKey> = self.open.iter().map(|(key, _)| key).collect();
        for key in keys {
            if let Some(ends) = self.open.get_mut(key) {
                ends.clear();
            }
        }
        self.at.clear();
    }

    fn add(&mut self, key: SlabKey, at: u32) {
        if let Some(ends) = self.open.get_mut(key) {
            ends.push(at);
            self.at.entry(at).or_default().push(key);
        }
    }

    fn take(&mut self, key: SlabKey, at: u32) {
        if let Some(ends) = self.open.get_mut(key) {
            ends.retain(|end| *end != at);
        }
        if let Some(keys) = self.at.get_mut(&at) {
            keys.retain(|k| *k != key);
            if keys.is_empty() {
                self.at.remove(&at);
            }
        }
    }
}

impl Tree {
    /// Opens a session.
    pub fn open_session(&mut self) -> SessionId {
        SessionId(self.sessions.open.insert(SmallVec::new()))
    }

    /// Sessions that are open.
    #[must_use]
    pub fn open_sessions(&self) -> usize {
        self.sessions.open.len()
    }

    /// The session will come back for the path to the end of `node`. An end above it is replaced; an end at or below it
    /// says it already. The path counts as used. O(nodes of the path, times ends of the session).
    ///
    /// # Errors
    /// Unknown session (closed ones included), unknown node.
    pub fn refer(&mut self, session: SessionId, node: NodeId) -> Result<(), TreeError> {
        let at = self.slot(node)?;
        let ends = self.sessions.open.get(session.0).ok_or(TreeError::UnknownSession(session))?.clone();
        self.tick();
        let known = ends.iter().any(|&end| self.is_on_path(at, end));
        if at != ROOT && !known {
            self.sessions.add(session.0, at);
            self.ref_path(at);
            let replaced = ends.iter().copied().filter(|&end| self.is_on_path(end, at));
            let excess = ends.first().copied().filter(|_| ends.len() == ENDS_MAX);
            let gone: Option<u32> = replaced.chain(excess).next();
            if let Some(end) = gone {
                self.drop_end(session, end);
            }
        }
        self.touch_path(at);
        Ok(())
    }

    /// Ends a session. What only it referred to goes by its last use from here on.
    ///
    /// # Errors
    /// Unknown session (closed ones included).
    pub fn close_session(&mut self, session: SessionId) -> Result<(), TreeError> {
        let ends = self.sessions.open.get(session.0).ok_or(TreeError::UnknownSession(session))?.clone();
        for end in ends {
            self.drop_end(session, end);
        }
        self.sessions.open.remove(session.0);
        Ok(())
    }

    fn drop_end(&mut self, session: SessionId, end: u32) {
        self.sessions.take(session.0, end);
        self.unref_path(end);
        self.try_merge(end);
    }

    /// True if `upper` is `lower` or above it.
    fn is_on_path(&self, upper: u32, lower: u32) -> bool {
        let depth = self.arena.nodes[upper as usize].depth;
        let mut at = lower;
        while at != ROOT && self.arena.nodes[at as usize].depth > depth {
            at = self.arena.nodes[at as usize].parent;
        }
        at == upper
    }

    /// Sessions that end at a leaf which is about to be deleted end at its parent from now on.
    pub(super) fn recede_sessions(&mut self, leaf: u32) {
        let parent = self.arena.nodes[leaf as usize].parent;
        for key in self.sessions.at.get(&leaf).cloned().unwrap_or_default() {
            self.keep_spans(leaf, false);
            self.sessions.take(key, leaf);
            // Another end of the session may say so already, at the parent or below it.
            let ends = self.sessions.open.get(key).cloned().unwrap_or_default();
            let recedes = parent != ROOT && !is_planted(Plant::SessionDiesWithEnd);
            if recedes && !ends.iter().any(|&end| self.is_on_path(parent, end)) {
                self.sessions.add(key, parent);
                self.arena.nodes[parent as usize].refs += 1;
                self.keep_spans(parent, true);
            }
        }
    }

    /// Both directions of the table agree, and every end is alive.
    pub(super) fn check_sessions(&self, report: &mut Report) {
        for end in self.sessions.ends() {
            let ok = end != NIL && end != ROOT && self.arena.is_live(end) && self.sessions.ends_at(end) > 0;
            report.must(ok, "session-ends", format_args!("a session ends at {end}"));
        }
        let one = self.sessions.ends().count();
        let other: usize = self.sessions.at.values().map(|keys| keys.len()).sum();
        report.must(one == other, "session-ends", format_args!("{one} ends of sessions, {other} at nodes"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{NamespaceId, PageId, Tier};
    use crate::key::Key;
    use crate::tree::tests::{evict, put};
    use crate::tree::{Component, Components, InsertComponents, InsertOpts, InsertOut, TreeConfig};

    #[test]
    fn what_a_session_will_come_back_for_goes_last_and_its_end_recedes() {
        let mut tree = Tree::new(TreeConfig { page_size: 1, ..TreeConfig::default() }).expect("sound");
        let session = tree.open_session();
        let old = put(&mut tree, &[1, 2, 3], 10);
        tree.refer(session, old).expect("both are known");
        put(&mut tree, &[7, 8], 20);
        assert_eq!(evict(&mut tree, 3), [20, 21, 12]);
        // The end lies at the second page now, and still goes after what is used later.
        put(&mut tree, &[9], 30);
        assert_eq!(evict(&mut tree, 1), [30]);
        tree.close_session(session).expect("open");
        put(&mut tree, &[9], 30);
        assert_eq!(evict(&mut tree, 1), [11], "without the session it is older");
        assert_eq!(tree.refer(session, tree.root()), Err(TreeError::UnknownSession(session)));
        assert_eq!(tree.close_session(session), Err(TreeError::UnknownSession(session)));
    }

    /// Ten million steps beside the model (seed 5935117) found it: the nodes that sessions keep stand in a list of their own,
    /// so two that are neighbours there need not be equally old, and must not become one node.
    #[test]
    fn neighbours_among_what_is_kept_may_differ_in_age() {
        let mut tree = Tree::new(TreeConfig { page_size: 1, ..TreeConfig::default() }).expect("sound");
        let session = tree.open_session();
        let kept = put(&mut tree, &[1, 2], 10);
        tree.refer(session, kept).expect("both are known");
        put(&mut tree, &[7, 8], 20);
        let first = Key::new(NamespaceId::DEFAULT, &[1]);
        let (_, lock, _) = tree.match_and_lock(first, &mut Vec::new());
        tree.unlock(lock).expect("it is ours");
        tree.close_session(session).expect("open");
        assert_eq!(evict(&mut tree, 1), [11], "used before the others");

        // The other way round: what is kept belongs between two neighbours.
        let mut tree = Tree::new(TreeConfig { page_size: 1, ..TreeConfig::default() }).expect("sound");
        let session = tree.open_session();
        put(&mut tree, &[1, 2], 10);
        let kept = put(&mut tree, &[7, 8], 20);
        tree.refer(session, kept).expect("both are known");
        let (_, lock, _) = tree.match_and_lock(first, &mut Vec::new());
        tree.unlock(lock).expect("it is ours");
        tree.close_session(session).expect("open");
        assert_eq!(evict(&mut tree, 2), [11, 21]);
    }

    /// Seed 249 of the simulated world: windows that fill the holes of a node one after the other, one place kept for a session
    /// and one not, left the node in one of its two orders only.
    #[test]
    fn windows_beside_a_kept_one_can_be_evicted() {
        let components = Components { window_pages: Some(1), state: false };
        let config = TreeConfig { page_size: 1, merge: false, components, ..TreeConfig::default() };
        let mut tree = Tree::new(config).expect("sound");
        let (session, kept) = (tree.open_session(), put(&mut tree, &[1, 2], 10));
        tree.refer(session, kept).expect("both are known");
        let window = [PageId(0), PageId(1), PageId(2)];
        let given = InsertComponents { window_from: 0, window: &window, state: None };
        let key = Key::new(NamespaceId::DEFAULT, &[1, 2, 3]);
        let out = &mut InsertOut::default();
        let pages = [PageId(20), PageId(21), PageId(22)];
        tree.insert_with(key, &pages, 0, given, InsertOpts::default(), out).expect("a sound insert");
        assert_eq!(tree.sanity(), []);
        assert_eq!(tree.evict_component(Component::Window, Tier::Device, 3), 3);
    }

    #[test]
    fn an_end_is_replaced_by_a_deeper_one_and_kept_by_a_shallower_one() {
        let mut tree =
            Tree::new(TreeConfig { page_size: 1, merge: false, ..TreeConfig::default() }).expect("sound");
        let session = tree.open_session();
        let up = put(&mut tree, &[1], 10);
        let low = put(&mut tree, &[1, 2], 20);
        for node in [up, low, up] {
            tree.refer(session, node).expect("both are known");
        }
        assert_eq!(tree.sessions.ends().collect::<Vec<_>>(), [low.index]);
        // More ends than a session may have: the oldest is let go.
        for i in 0..ENDS_MAX as u32 {
            let node = put(&mut tree, &[100 + i], 100 + i);
            tree.refer(session, node).expect("both are known");
        }
        assert_eq!(tree.sessions.ends().count(), ENDS_MAX);
        assert_eq!(tree.arena.nodes[low.index as usize].refs, 0);
        assert!(tree.sanity().is_empty());
    }
}
