//! Decisions of a group of ranks. Each tick every rank proposes one vector of fixed length for the same list
//! of rooms; the embedder combines the vectors (element-wise minimum, any all-reduce will do) and gives the
//! result back. What is decided is what was agreed: local state is not read again in between, because a
//! second look is how stages of one pipeline parted (sgl#31030, sgl#31869).

use crate::pd::ids::RoomKey;
use crate::pd::reason::Reason;

/// How far a rank is with a room. The order is that of the minimum: one failure fails all, one laggard
/// delays all.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Vote {
    /// Failed here.
    Failed = 0,
    /// Unknown here, or not finished.
    Pending = 1,
    /// Complete here.
    Done = 2,
}

impl Vote {
    /// From its number; unknown numbers hold the room back.
    #[must_use]
    pub fn from_u8(v: u8) -> Vote {
        match v {
            0 => Vote::Failed,
            2 => Vote::Done,
            _ => Vote::Pending,
        }
    }
}

/// One tick of one rank: which rooms it proposed, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a ballot is applied with the agreed vector"]
pub struct Ballot {
    keys: Vec<RoomKey>,
    votes: Vec<Vote>,
}

/// The agreed vector does not fit the ballot; nothing was decided.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("agreed on {got} rooms, proposed {want}")]
pub struct WrongLength {
    /// Rooms proposed.
    pub want: usize,
    /// Rooms in the answer.
    pub got: usize,
}

impl Ballot {
    pub(super) fn new(keys: Vec<RoomKey>, votes: Vec<Vote>) -> Ballot {
        Ballot { keys, votes }
    }

    /// What this rank says, in the order of the list it was asked about.
    #[must_use]
    pub fn votes(&self) -> &[Vote] {
        &self.votes
    }

    /// Pairs the rooms with the agreed votes; a length that differs is a mix-up of ticks and is refused.
    pub(super) fn decided(self, agreed: &[Vote]) -> Result<Vec<(RoomKey, Vote)>, WrongLength> {
        if agreed.len() != self.keys.len() {
            return Err(WrongLength { want: self.keys.len(), got: agreed.len() });
        }
        Ok(self.keys.into_iter().zip(agreed.iter().copied()).collect())
    }
}

/// How long a rank that is complete waits for the rest of its group.
///
/// While the peer it had its part from is there, without end. Once that peer is gone, ranks that are not
/// complete may be waiting for a successor that never heard of the room, and nothing they see tells them. So
/// the group gets the ballot that follows, in which it may turn out complete, and then this rank fails it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Patience {
    #[default]
    Endless,
    OneBallot,
    Over,
}

impl Patience {
    pub(super) fn peer_gone(&mut self) {
        if *self == Patience::Endless {
            *self = Patience::OneBallot;
        }
    }

    pub(super) fn still_pending(&mut self) {
        if *self == Patience::OneBallot {
            *self = Patience::Over;
        }
    }

    /// What the rank says of a room that ended so for itself.
    pub(super) fn vote(self, local: Option<Result<(), Reason>>) -> Vote {
        match local {
            None => Vote::Pending,
            Some(Ok(())) if self != Patience::Over => Vote::Done,
            Some(_) => Vote::Failed,
        }
    }
}

/// The element-wise minimum: what an all-reduce over the group computes. `None` if the lengths differ.
#[must_use]
pub fn combine(a: &[Vote], b: &[Vote]) -> Option<Vec<Vote>> {
    (a.len() == b.len()).then(|| a.iter().zip(b).map(|(x, y)| *x.min(y)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_failure_fails_all_and_one_laggard_delays_all() {
        use Vote::{Done, Failed, Pending};
        assert_eq!(combine(&[Done, Done, Done], &[Done, Pending, Failed]), Some(vec![Done, Pending, Failed]));
        assert_eq!(combine(&[Done], &[]), None);
        for v in [Failed, Pending, Done] {
            assert_eq!(Vote::from_u8(v as u8), v);
        }
        let b = Ballot::new(vec![RoomKey::default()], vec![Done]);
        assert_eq!(b.decided(&[]), Err(WrongLength { want: 1, got: 0 }));
    }
}
