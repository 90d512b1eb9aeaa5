//! Agreement between ranks: several cores that hold shards of the same model must decide alike.
//!
//! A core is a function of its inputs, so ranks agree if they are fed alike. Calls are alike because the scheduler
//! makes them on every rank; what differs is when copies and store calls end, and how. So ends go through an
//! [`Agreement`] first: an end reaches the cores when it has happened on *all* ranks, in one order, with the worst
//! outcome of any rank. The core needs to know nothing of ranks, no collective sits in a poll path, and an operation
//! that failed or was cancelled on one rank still has its vote, because every action has exactly one end.
//!
//! Three things are asked of the embedder, whatever carries the votes: every rank makes the same calls with the same
//! arguments in the same order (a dropped request is dropped between the same two calls everywhere), time is one of those
//! arguments (rank 0's clock, sent along with its decisions), and a rank that fails takes the group down: the others hold
//! shards of the same pages.
//!
//! # Over a collective
//!
//! `engine::group` does it for the ranks of one process. An implementation over a collective (NCCL, gloo, MPI, a ring of
//! sockets) has to
//!
//! 1. gather, once per round, one message of every rank: its digest, and what ended on it since its last message (the
//!    events of [`Event`], layers included). An all-gather of variable length; two of fixed length, sizes first, will do.
//! 2. compare the digests. All equal, or [`AgreeError::Diverged`]: no further decision may be made.
//! 3. cast all votes into a [`Votes`] of its own in rank order, and settle once. Every rank does that for itself, on the
//!    same messages, and so comes to the same list in the same order; nothing has to be sent back.
//! 4. deliver round *n* with round *n + 1*, as the trait says: then the gather of a round runs beside the computation of
//!    the step, and no poll path waits for it. A slower rank delays what is agreed, never a decision.
//! 5. skip the gather where no rank has an operation in flight and none is owed. All ranks know that alike, since their
//!    cores are alike; none may skip for a reason of its own.
//! 6. bound the wait for the slowest rank ([`AgreeError::Absent`]). There is no way to go on without it.
//!
//! Votes must not be lost or doubled; messages may not be re-ordered between rounds. A rank's own ends are its votes and
//! nothing more: it must not act on them before they come back.

use std::collections::BTreeMap;

use super::action::{EndKey, Event, PageOutcome};
use crate::base::OpId;

/// Why a round did not happen. The ranks can not go on together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgreeError {
    /// A rank did not come to the round in time.
    #[error("rank {rank} did not come to round {round}")]
    Absent {
        /// The rank.
        rank: u32,
        /// The round.
        round: u64,
    },
    /// Two ranks decided differently up to this round.
    #[error("rank {rank} has another digest in round {round}")]
    Diverged {
        /// The first rank that differs from rank 0.
        rank: u32,
        /// The round.
        round: u64,
    },
}

/// One member of a group of ranks. See the module page.
pub trait Agreement: Send + std::fmt::Debug {
    /// One round. Takes what ended on this rank, and this rank's digest of decisions; appends what has ended on all
    /// ranks by the round before, in the same order on every rank.
    fn exchange(
        &mut self,
        digest: u64,
        ended: &mut Vec<Event>,
        agreed: &mut Vec<Event>,
    ) -> Result<(), AgreeError>;

    /// Another round will bring something even if nothing more ends.
    fn owes(&self) -> bool;

    /// Ranks of the group.
    fn ranks(&self) -> u32;
}

/// A group of one: everything is agreed at once.
#[derive(Clone, Copy, Debug, Default)]
pub struct Solo;

impl Agreement for Solo {
    fn exchange(
        &mut self,
        _: u64,
        ended: &mut Vec<Event>,
        agreed: &mut Vec<Event>,
    ) -> Result<(), AgreeError> {
        agreed.append(ended);
        Ok(())
    }

    fn owes(&self) -> bool {
        false
    }

    fn ranks(&self) -> u32 {
        1
    }
}

#[derive(Debug)]
struct Vote {
    ranks: u32,
    event: Event,
}

/// Counts the ends that ranks report, and merges them.
#[derive(Debug)]
pub struct Votes {
    ranks: u32,
    open: BTreeMap<EndKey, Vote>,
    /// Layers each rank has copied, per load.
    layers: BTreeMap<OpId, Vec<u32>>,
}

impl Votes {
    /// For a group of `ranks`.
    #[must_use]
    pub fn new(ranks: u32) -> Votes {
        Votes { ranks: ranks.max(1), open: BTreeMap::new(), layers: BTreeMap::new() }
    }

    /// Takes one report of `rank`. A second report of the same end by the same rank is the executor's fault and
    /// would count twice.
    pub fn cast(&mut self, rank: u32, event: Event) {
        let Some(key) = event.end_key() else {
            if let Event::LayerCopied { op, layers } = event {
                let of_rank = self.layers.entry(op).or_insert_with(|| vec![0; self.ranks as usize]);
                if let Some(seen) = of_rank.get_mut(rank as usize) {
                    *seen = layers.max(*seen);
                }
            }
            return;
        };
        match self.open.get_mut(&key) {
            Some(vote) => {
                vote.ranks += 1;
                merge(&mut vote.event, event);
            }
            None => {
                self.open.insert(key, Vote { ranks: 1, event });
            }
        }
    }

    /// Appends what all ranks have reported, in the order of operations; then progress of loads.
    pub fn settle(&mut self, agreed: &mut Vec<Event>) {
        let ranks = self.ranks;
        let done: Vec<EndKey> =
            self.open.iter().filter(|(_, v)| v.ranks >= ranks).map(|(key, _)| *key).collect();
        for key in done {
            if let EndKey::Copy(op) = key {
                self.layers.remove(&op);
            }
            agreed.extend(self.open.remove(&key).map(|vote| vote.event));
        }
        for (&op, of_rank) in &mut self.layers {
            let layers = of_rank.iter().copied().min().unwrap_or(0);
            if layers > 0 {
                agreed.push(Event::LayerCopied { op, layers });
            }
        }
    }

    /// Ends that some ranks have reported and some have not.
    #[must_use]
    pub fn open(&self) -> usize {
        self.open.len()
    }
}

/// Merges the report of one more rank into what the others said: the worst of both.
fn merge(all: &mut Event, one: Event) {
    match (all, one) {
        (Event::Copied { ok, .. }, Event::Copied { ok: other, .. }) => *ok &= other,
        (Event::Queried { present, .. }, Event::Queried { present: other, .. }) => {
            match (present.as_mut(), other) {
                (Some(present), Some(other)) => {
                    present.truncate(other.len());
                    present.iter_mut().zip(other).for_each(|(a, b)| *a &= b);
                }
                _ => *present = None,
            }
        }
        (Event::Got { outcomes, .. }, Event::Got { outcomes: other, .. })
        | (Event::Put { outcomes, .. }, Event::Put { outcomes: other, .. }) => worst(outcomes, &other),
        // Keys are equal, so kinds are.
        _ => {}
    }
}

fn worst(all: &mut Vec<PageOutcome>, other: &[PageOutcome]) {
    all.truncate(other.len());
    all.iter_mut().zip(other).for_each(|(a, b)| *a = (*a).max(*b));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_agreed_when_the_last_rank_has_it_and_the_worst_counts() {
        let mut votes = Votes::new(2);
        let mut agreed = Vec::new();
        let op = OpId(1);
        votes.cast(0, Event::Copied { op, ok: true });
        votes.cast(1, Event::Queried { op: OpId(2), present: Some(vec![true, true, false]) });
        votes.settle(&mut agreed);
        assert!(agreed.is_empty());
        votes.cast(0, Event::Queried { op: OpId(2), present: Some(vec![true, false, true]) });
        votes.cast(1, Event::Copied { op, ok: false });
        votes.settle(&mut agreed);
        assert_eq!(
            agreed,
            [
                Event::Copied { op, ok: false },
                Event::Queried { op: OpId(2), present: Some(vec![true, false, false]) }
            ]
        );
        assert_eq!(votes.open(), 0);
    }

    #[test]
    fn a_short_answer_of_one_rank_shortens_all() {
        use PageOutcome::{Corrupt, Done, Missing};
        let mut votes = Votes::new(2);
        let mut agreed = Vec::new();
        votes.cast(1, Event::Got { op: OpId(1), batch: 0, outcomes: vec![Done, Corrupt] });
        votes.cast(0, Event::Got { op: OpId(1), batch: 0, outcomes: vec![Missing, Done, Done] });
        votes.settle(&mut agreed);
        assert_eq!(agreed, [Event::Got { op: OpId(1), batch: 0, outcomes: vec![Missing, Corrupt] }]);
    }

    #[test]
    fn layers_are_the_minimum_of_the_ranks() {
        let mut votes = Votes::new(2);
        let op = OpId(1);
        let mut agreed = Vec::new();
        votes.cast(0, Event::LayerCopied { op, layers: 3 });
        votes.settle(&mut agreed);
        assert!(agreed.is_empty());
        votes.cast(1, Event::LayerCopied { op, layers: 2 });
        votes.settle(&mut agreed);
        assert_eq!(agreed, [Event::LayerCopied { op, layers: 2 }]);
    }
}
