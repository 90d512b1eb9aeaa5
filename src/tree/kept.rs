//! What is kept: on the way from the root to the end of a session, or to that of what a waiting request will use.
//!
//! Kept nodes are evicted only after all that nobody keeps. That is a preference, not a lock: under pressure they go too, in
//! their own order. Counts follow the scheme of locks (a node counts its own ends and its kept children), so that a split
//! hands over a 1. Of a component an end keeps what a request there needs.

use super::Tree;
use super::node::{Node, ROOT};

impl Tree {
    /// True if nobody keeps anything.
    pub(super) fn keeps_nothing(&self) -> bool {
        self.sessions.is_empty() && self.waiting.is_empty()
    }

    /// One more end lies at `end`. O(nodes that were not kept).
    pub(super) fn ref_path(&mut self, end: u32) {
        self.keep_spans(end, true);
        let mut at = end;
        while at != ROOT {
            let node = &mut self.arena.nodes[at as usize];
            node.refs += 1;
            if node.refs > 1 {
                return;
            }
            self.refresh(at);
            at = self.arena.nodes[at as usize].parent;
        }
    }

    /// One end less. O(nodes that are no longer kept).
    pub(super) fn unref_path(&mut self, end: u32) {
        self.keep_spans(end, false);
        let mut at = end;
        while at != ROOT {
            let node = &mut self.arena.nodes[at as usize];
            node.refs -= 1;
            if node.refs > 0 {
                return;
            }
            self.refresh(at);
            at = self.arena.nodes[at as usize].parent;
        }
    }

    /// Ends at a leaf which is about to be deleted lie at its parent from now on.
    pub(super) fn recede_ends(&mut self, leaf: u32) {
        if self.arena.nodes[leaf as usize].refs == 0 {
            return;
        }
        self.recede_sessions(leaf);
        self.recede_waiting(leaf);
        let parent = self.arena.nodes[leaf as usize].parent;
        self.arena.nodes[leaf as usize].refs = 0;
        // What ended at the leaf ends at the parent or below it now, so the parent stays kept.
        if parent != ROOT {
            self.arena.nodes[parent as usize].refs -= 1;
        }
    }
}

/// True if an end lies at `upper`, and not only at `lower`, its only child, or below.
pub(super) fn ends_between(upper: &Node, lower: &Node) -> bool {
    upper.refs > u32::from(lower.refs > 0)
}
