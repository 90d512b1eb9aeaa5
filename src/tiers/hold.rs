//! Matches with an end. A match holds what it found until the request uses it or goes; a scheduler that may forget a request
//! sets a time after which it holds nothing any more (lmc#1034, lmc#2017: look-ups whose pins stayed filled the pool).

use std::collections::BTreeSet;

use super::core::{Core, CoreError};
use super::oplog::Op;
use super::request::RequestId;
use crate::base::Time;

/// Matches that end by themselves, soonest first.
#[derive(Debug, Default)]
pub(super) struct Holds(BTreeSet<(Time, RequestId)>);

impl Holds {
    pub(super) fn next_end(&self) -> Option<Time> {
        self.0.first().map(|&(at, _)| at)
    }
}

impl Core {
    /// Ends the request's match at `until`, unless a load or pages are granted to it before: then it is in use. A request
    /// whose match has ended holds nothing; its calls fail with [`CoreError::MatchEnded`] until it matches again or is
    /// aborted. A later call replaces the time; the next match starts without one. O(log requests).
    pub fn hold_until(&mut self, id: RequestId, until: Time) -> Result<(), CoreError> {
        self.record(|| Op::HoldUntil(id, until));
        let request = self.request_ref(id)?;
        if request.lock.is_none() || !request.own().is_empty() || !request.loads.is_empty() {
            return Ok(());
        }
        self.hold_on(id);
        self.holds.0.insert((until, id));
        self.request_mut(id)?.holds_until = Some(until);
        Ok(())
    }

    /// The match has no end any more. O(log requests) if it had one.
    pub(super) fn hold_on(&mut self, id: RequestId) {
        if let Some(until) = self.requests.get_mut(id.0).and_then(|request| request.holds_until.take()) {
            self.holds.0.remove(&(until, id));
        }
    }

    /// Ends the matches whose time has come.
    pub(super) fn end_holds(&mut self) {
        while let Some(&(until, id)) = self.holds.0.first()
            && until <= self.now
        {
            if self.release_holdings(id).is_err() {
                self.violation("a match that ends is unknown");
            }
            self.holds.0.remove(&(until, id));
            if let Some(request) = self.requests.get_mut(id.0) {
                request.match_ended = true;
            }
            self.stats.matches_ended += 1;
            self.digest.mix(until.0);
        }
    }
}
