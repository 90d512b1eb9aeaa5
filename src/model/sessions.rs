//! Sessions in the model: each has a list of ends, pages that it will come back for.

use std::collections::BTreeSet;

use super::{At, Model};

impl Model {
    /// Opens a session.
    pub fn open_session(&mut self, session: u64) {
        self.sessions.insert(session, vec![]);
    }

    /// The session will come back for the path to a page.
    pub fn refer(&mut self, session: u64, at: At) {
        let ends = self.sessions[&session].clone();
        if at != 0 && !ends.iter().any(|&end| self.up(end).contains(&at)) {
            let above = self.up(at);
            let kept = ends.into_iter().filter(|end| !above.contains(end)).chain([at]).collect();
            self.sessions.insert(session, kept);
        }
        self.touch(at);
    }

    /// Ends a session.
    pub fn close_session(&mut self, session: u64) {
        self.sessions.remove(&session);
    }

    /// Everything on the way to the end of a session.
    pub(super) fn kept(&self) -> BTreeSet<At> {
        self.sessions.values().flat_map(|ends| self.covered(ends)).collect()
    }

    /// Pages of which a session will need a component.
    pub(super) fn kept_of(&self, c: usize) -> BTreeSet<At> {
        self.sessions.values().flatten().flat_map(|&end| self.needed(end, c)).collect()
    }

    /// Sessions that end at a page which goes away end above it, unless they end there or below it anyway.
    pub(super) fn recede_sessions(&mut self, gone: At, parent: At) {
        for session in self.sessions.keys().copied().collect::<Vec<_>>() {
            let ends = self.sessions[&session].clone();
            if !ends.contains(&gone) {
                continue;
            }
            let mut left: Vec<At> = ends.into_iter().filter(|&end| end != gone).collect();
            if parent != 0 && !left.iter().any(|&end| self.up(end).contains(&parent)) {
                left.push(parent);
            }
            self.sessions.insert(session, left);
        }
    }
}
