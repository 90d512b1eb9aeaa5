//! Closed rooms, remembered for a while so that a latecomer is told at once and why. Bounded in number and
//! in time; nothing that protects memory relies on them (that is what serials and floors are for).

use std::collections::{BTreeMap, VecDeque};

use crate::base::Time;
use crate::pd::ids::RoomKey;
use crate::pd::reason::Reason;

#[derive(Debug)]
pub(super) struct Tombs {
    by_key: BTreeMap<RoomKey, Reason>,
    ages: VecDeque<(Time, RoomKey)>,
    max: usize,
    ttl_us: u64,
}

impl Tombs {
    pub(super) fn new(max: usize, ttl_us: u64) -> Tombs {
        Tombs { by_key: BTreeMap::new(), ages: VecDeque::new(), max: max.max(1), ttl_us }
    }

    pub(super) fn len(&self) -> usize {
        self.by_key.len()
    }

    pub(super) fn get(&self, key: RoomKey) -> Option<Reason> {
        self.by_key.get(&key).copied()
    }

    /// The first reason stays.
    pub(super) fn insert(&mut self, now: Time, key: RoomKey, reason: Reason) {
        if self.by_key.contains_key(&key) {
            return;
        }
        if self.ages.len() >= self.max
            && let Some((_, oldest)) = self.ages.pop_front()
        {
            self.by_key.remove(&oldest);
        }
        self.by_key.insert(key, reason);
        self.ages.push_back((now, key));
    }

    pub(super) fn expire(&mut self, now: Time) {
        while let Some(&(at, key)) = self.ages.front()
            && now.since(at) >= self.ttl_us
        {
            self.ages.pop_front();
            self.by_key.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounded_by_count_and_by_age_and_the_first_reason_stays() {
        let key = |room| RoomKey { room, epoch: 0 };
        let mut t = Tombs::new(2, 10);
        t.insert(Time(0), key(1), Reason::PeerDead);
        t.insert(Time(1), key(1), Reason::Closed);
        assert_eq!(t.get(key(1)), Some(Reason::PeerDead));
        t.insert(Time(2), key(2), Reason::Closed);
        t.insert(Time(3), key(3), Reason::Closed);
        assert_eq!((t.len(), t.get(key(1))), (2, None));
        t.expire(Time(12));
        assert_eq!((t.len(), t.get(key(3))), (1, Some(Reason::Closed)));
    }
}
