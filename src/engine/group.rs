//! Ranks of one process that decide alike, one cache each: in threads of their own, or driven in turn by one.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::tiers::{AgreeError, Agreement, Event, Votes};

/// One member of a group: what a rank reports is taken in at once, and what all have reported comes with the round after.
/// So ranks that are driven in turn by one thread never wait; ranks in threads wait for the slowest of the round before.
///
/// A group that failed stays failed: the ranks hold shards of the same pages and can not go on apart.
#[derive(Debug)]
pub struct Member {
    rank: u32,
    /// Rounds this member has come to.
    round: u64,
    wait_max: Duration,
    group: Arc<Group>,
}

#[derive(Debug)]
struct Group {
    ranks: u32,
    state: Mutex<State>,
    came: Condvar,
}

#[derive(Debug)]
struct State {
    votes: Votes,
    /// Rounds that not all members have taken the result of, oldest first.
    rounds: VecDeque<Round>,
    /// Number of the first of them.
    first: u64,
    failed: Option<AgreeError>,
}

/// What came to one round.
#[derive(Debug)]
struct Round {
    /// Digest and reports, by rank.
    reports: Vec<Option<(u64, Vec<Event>)>>,
    /// What is agreed after it.
    agreed: Option<Vec<Event>>,
    taken: u32,
}

impl Round {
    fn new(ranks: u32) -> Round {
        Round { reports: (0..ranks).map(|_| None).collect(), agreed: None, taken: 0 }
    }

    fn missing(&self) -> Option<u32> {
        self.reports.iter().position(Option::is_none).map(|rank| rank as u32)
    }
}

/// The members of a group of `ranks`, by rank. Who does not come to a round within `wait_max` after another member has
/// asked for its result ends the group.
#[must_use]
pub fn group(ranks: u32, wait_max: Duration) -> Vec<Member> {
    let ranks = ranks.max(1);
    let state = State { votes: Votes::new(ranks), rounds: VecDeque::new(), first: 0, failed: None };
    let group = Arc::new(Group { ranks, state: Mutex::new(state), came: Condvar::new() });
    (0..ranks).map(|rank| Member { rank, round: 0, wait_max, group: Arc::clone(&group) }).collect()
}

impl Group {
    fn state(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere leaves nothing half-done in here.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn at(&mut self, round: u64, ranks: u32) -> &mut Round {
        let index = round.saturating_sub(self.first) as usize;
        while self.rounds.len() <= index {
            self.rounds.push_back(Round::new(ranks));
        }
        &mut self.rounds[index]
    }

    fn fail(&mut self, error: AgreeError) -> AgreeError {
        *self.failed.get_or_insert(error)
    }

    /// Counts the votes of a round that all have come to, once.
    fn settle(&mut self, round: u64, ranks: u32) -> Result<(), AgreeError> {
        let all = self.at(round, ranks);
        if all.agreed.is_some() {
            return Ok(());
        }
        let reports: Vec<(u64, Vec<Event>)> =
            all.reports.iter_mut().flat_map(Option::as_mut).map(std::mem::take).collect();
        let first = reports.first().map(|report| report.0);
        if let Some(rank) = reports.iter().position(|report| Some(report.0) != first) {
            return Err(self.fail(AgreeError::Diverged { rank: rank as u32, round }));
        }
        for (rank, (_, ended)) in (0..).zip(reports) {
            ended.into_iter().for_each(|event| self.votes.cast(rank, event));
        }
        let mut agreed = Vec::new();
        self.votes.settle(&mut agreed);
        self.at(round, ranks).agreed = Some(agreed);
        Ok(())
    }
}

impl Agreement for Member {
    fn exchange(
        &mut self,
        digest: u64,
        ended: &mut Vec<Event>,
        agreed: &mut Vec<Event>,
    ) -> Result<(), AgreeError> {
        let (ranks, round) = (self.group.ranks, self.round);
        let mut state = self.group.state();
        if let Some(error) = state.failed {
            return Err(error);
        }
        self.round += 1;
        state.at(round, ranks).reports[self.rank as usize] = Some((digest, std::mem::take(ended)));
        self.group.came.notify_all();
        let Some(before) = round.checked_sub(1) else { return Ok(()) };
        let until = Instant::now() + self.wait_max;
        while state.at(before, ranks).agreed.is_none()
            && let Some(rank) = state.at(before, ranks).missing()
        {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let error = state.fail(AgreeError::Absent { rank, round: before });
                self.group.came.notify_all();
                return Err(error);
            }
            state = self.group.came.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            if let Some(error) = state.failed {
                return Err(error);
            }
        }
        if let Err(error) = state.settle(before, ranks) {
            self.group.came.notify_all();
            return Err(error);
        }
        let settled = state.at(before, ranks);
        agreed.extend(settled.agreed.iter().flatten().cloned());
        settled.taken += 1;
        if settled.taken == ranks {
            state.rounds.pop_front();
            state.first += 1;
        }
        Ok(())
    }

    fn owes(&self) -> bool {
        let mut state = self.group.state();
        let Some(last) = self.round.checked_sub(1) else { return false };
        let round = state.at(last, self.group.ranks);
        let reported =
            |report: &Option<(u64, Vec<Event>)>| report.as_ref().is_some_and(|(_, ended)| !ended.is_empty());
        round.agreed.as_ref().is_some_and(|agreed| !agreed.is_empty()) || round.reports.iter().any(reported)
    }

    fn ranks(&self) -> u32 {
        self.group.ranks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::OpId;

    fn round(member: &mut Member, digest: u64, mut ended: Vec<Event>) -> Result<Vec<Event>, AgreeError> {
        let mut agreed = Vec::new();
        member.exchange(digest, &mut ended, &mut agreed)?;
        Ok(agreed)
    }

    fn copied(op: u64, ok: bool) -> Event {
        Event::Copied { op: OpId(op), ok }
    }

    #[test]
    fn one_thread_drives_all_ranks_in_turn() {
        let mut members = group(3, Duration::ZERO);
        for (rank, member) in members.iter_mut().enumerate() {
            assert_eq!(round(member, 7, vec![copied(1, rank != 1)]), Ok(vec![]));
            assert!(member.owes());
        }
        // All have ended it by the round before; the worst of them counts.
        for (rank, member) in members.iter_mut().enumerate() {
            let late = if rank == 2 { vec![] } else { vec![copied(2, true)] };
            assert_eq!(round(member, 8, late), Ok(vec![copied(1, false)]));
        }
        for member in &mut members {
            assert_eq!(round(member, 9, vec![]), Ok(vec![]));
            assert!(!member.owes());
        }
        assert_eq!(members[0].group.state().votes.open(), 1);
        assert_eq!(round(&mut members[0], 10, vec![]), Ok(vec![]));
        assert_eq!(round(&mut members[1], 10, vec![]), Ok(vec![]));
        assert_eq!(round(&mut members[2], 10, vec![copied(2, true)]), Ok(vec![]));
        assert_eq!(round(&mut members[0], 11, vec![]), Ok(vec![copied(2, true)]));
        assert!(members[0].group.state().rounds.len() <= 2, "old rounds are forgotten");
    }

    #[test]
    fn ranks_in_threads_see_the_same_in_the_same_order() {
        const ROUNDS: u64 = 200;
        let members = group(4, Duration::from_secs(30));
        let seen: Vec<Vec<Event>> = std::thread::scope(|scope| {
            let work: Vec<_> = (0..)
                .zip(members)
                .map(|(rank, mut member): (u64, Member)| {
                    scope.spawn(move || {
                        let mut seen = Vec::new();
                        for at in 0..ROUNDS {
                            // Rank r ends operation n in round n + r.
                            let ended = at.checked_sub(rank).map(|op| copied(op, (op + rank) % 3 > 0));
                            seen.extend(round(&mut member, at, ended.into_iter().collect()).unwrap());
                        }
                        seen
                    })
                })
                .collect();
            work.into_iter().map(|w| w.join().unwrap()).collect()
        });
        assert!(seen.iter().all(|one| *one == seen[0]));
        // With four ranks and every third report bad, none ends well.
        let want: Vec<Event> = (0..ROUNDS - 4).map(|op| copied(op, false)).collect();
        assert_eq!(seen[0], want);
    }

    #[test]
    fn who_decides_otherwise_or_stays_away_ends_the_group() {
        let mut members = group(2, Duration::from_millis(1));
        round(&mut members[0], 1, vec![]).unwrap();
        round(&mut members[1], 2, vec![]).unwrap();
        let diverged = AgreeError::Diverged { rank: 1, round: 0 };
        assert_eq!(round(&mut members[0], 3, vec![]), Err(diverged));
        assert_eq!(round(&mut members[1], 3, vec![]), Err(diverged));

        let mut members = group(2, Duration::from_millis(1));
        round(&mut members[0], 1, vec![]).unwrap();
        let absent = AgreeError::Absent { rank: 1, round: 0 };
        assert_eq!(round(&mut members[0], 1, vec![]), Err(absent));
        assert_eq!(round(&mut members[1], 1, vec![]), Err(absent));
    }
}
