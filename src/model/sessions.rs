//! What is kept in the model: each session has a list of ends, pages that it will come back for, and of a waiting request its
//! prompt is remembered.

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

    /// A request waits that will use the prefix of a prompt.
    pub fn wait_for(&mut self, waiter: u64, ns: u32, tokens: &[u32]) {
        self.waiting.insert(waiter, (ns, tokens.to_vec()));
    }

    /// It waits no longer.
    pub fn stop_waiting(&mut self, waiter: u64) {
        self.waiting.remove(&waiter);
    }

    /// Ends of what is kept: those of sessions, and the last known page of every prompt that waits.
    fn ends(&self) -> Vec<At> {
        let known = self.waiting.values().filter_map(|(ns, tokens)| self.path(*ns, tokens).last().copied());
        self.sessions.values().flatten().copied().chain(known).collect()
    }

    /// Everything on the way to an end.
    pub(super) fn kept(&self) -> BTreeSet<At> {
        self.covered(&self.ends())
    }

    /// Pages of which a request at an end will need a component.
    pub(super) fn kept_of(&self, c: usize) -> BTreeSet<At> {
        self.ends().into_iter().flat_map(|end| self.needed(end, c)).collect()
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
