//! What a request costs under the order that learns, and under LRU: both take turns every few milliseconds in one process, so
//! that what disturbs the machine disturbs both. Processor time of one thread.
//!
//! `cargo bench --bench policy_cost [-- NAME...]` prints, per workload, microseconds per request, the ratio of the sums, and the
//! ratios of a slice of one to the next of the other: the median, and what nine in ten lie between.

use std::time::Duration;

use sapwood::tree::Policy;

mod common;

use common::{Cache, Chats, Misses, cpu_now, mix, policy_of, session};

/// Requests of one policy until it is the other's turn.
const SLICE: usize = 2_000;
const SLICES: usize = 120;

/// Requests that go on for ever.
trait Work {
    /// Processor time of the next requests.
    fn run(&mut self, requests: usize) -> Duration;
}

fn timed(work: impl FnOnce()) -> Duration {
    let start = cpu_now();
    work();
    cpu_now() - start
}

/// W2. Where it lasts, chats that have ended are followed by others, and the cache stays; otherwise it is emptied then.
struct ChatTurns {
    cache: Cache,
    chats: Chats,
    policy: Policy,
    capacity: usize,
    lasts: bool,
    at: usize,
    passes: u32,
}

impl ChatTurns {
    fn new(learns: bool, capacity: usize, lasts: bool) -> ChatTurns {
        let policy = policy_of(learns, capacity);
        let cache = Cache::new(16, true, policy.clone(), capacity);
        let mut work = ChatTurns { cache, chats: Chats::new(), policy, capacity, lasts, at: 0, passes: 0 };
        if lasts {
            // Past the first lessons.
            work.run(5 * work.chats.turns.len());
        }
        work
    }

    fn begin_again(&mut self) {
        self.cache.check();
        (self.at, self.passes) = (0, self.passes + 1);
        if self.lasts {
            self.chats.rows.iter_mut().for_each(|row| row[Chats::SYSTEM_LEN] = self.passes);
        } else {
            self.cache = Cache::new(16, true, self.policy.clone(), self.capacity);
        }
    }
}

impl Work for ChatTurns {
    fn run(&mut self, requests: usize) -> Duration {
        let (mut spent, mut left) = (Duration::ZERO, requests);
        while left > 0 {
            if self.at == self.chats.turns.len() {
                self.begin_again();
            }
            let to = self.chats.turns.len().min(self.at + left);
            let turns = &self.chats.turns[self.at..to];
            spent += timed(|| turns.iter().for_each(|&turn| self.cache.turn(self.chats.prompt(turn))));
            left -= to - self.at;
            self.at = to;
        }
        spent
    }
}

/// W4.
struct MissTurns {
    cache: Cache,
    misses: Misses,
}

impl MissTurns {
    fn new(learns: bool) -> MissTurns {
        let capacity = 1 << 20;
        let cache = Cache::new(16, true, policy_of(learns, capacity), capacity);
        let mut work = MissTurns { cache, misses: Misses::new() };
        work.run(40_000);
        work
    }
}

impl Work for MissTurns {
    fn run(&mut self, requests: usize) -> Duration {
        let spent = timed(|| (0..requests).for_each(|_| self.cache.turn(self.misses.next())));
        self.cache.check();
        spent
    }
}

/// W5: look-ups of 4,000 sessions.
struct LookUps {
    cache: Cache,
    picked: Vec<Vec<u32>>,
    next: usize,
}

impl LookUps {
    fn new(learns: bool, steps: u64) -> LookUps {
        // Of the largest of them, as in the bench of the tree.
        let capacity = 1_000_000 * 32 + (1 << 16);
        let mut cache = Cache::new(16, true, policy_of(learns, capacity), capacity);
        for which in 0..steps / 10 {
            let row = session(which);
            (1..=10).for_each(|step| cache.turn(&row[..step * 32]));
        }
        let picked = (0..4_000).map(|i| session(mix(steps + i) % (steps / 10))).collect();
        LookUps { cache, picked, next: 0 }
    }
}

impl Work for LookUps {
    fn run(&mut self, requests: usize) -> Duration {
        timed(|| {
            for _ in 0..requests {
                self.next = (self.next + 1) % self.picked.len();
                assert_eq!(self.cache.find(&self.picked[self.next]), 20);
            }
        })
    }
}

fn compare<W: Work>(name: &str, make: impl Fn(bool) -> W) {
    let mut works = [make(false), make(true)];
    let (mut sums, mut ratios) = ([Duration::ZERO; 2], Vec::new());
    for slice in 0..SLICES {
        let mut spent = [Duration::ZERO; 2];
        // Who goes first changes too.
        for which in [slice % 2, 1 - slice % 2] {
            spent[which] = works[which].run(SLICE);
            sums[which] += spent[which];
        }
        ratios.push(spent[1].as_secs_f64() / spent[0].as_secs_f64());
    }
    ratios.sort_unstable_by(f64::total_cmp);
    let us = sums.map(|sum| sum.as_secs_f64() * 1e6 / (SLICE * SLICES) as f64);
    println!(
        "{name:<24} lru {:7.3} us   learned {:7.3} us   ratio {:.3}   median {:.3} ({:.2} to {:.2})",
        us[0],
        us[1],
        us[1] / us[0],
        ratios[SLICES / 2],
        ratios[SLICES / 20],
        ratios[SLICES - 1 - SLICES / 20],
    );
}

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|other| other == name);
    for (name, capacity, lasts) in [
        ("chat-turn", 1 << 23, false),
        ("chat-turn-short", 1 << 21, false),
        ("chat-turn-short-lasting", 1 << 21, true),
    ] {
        if is_wanted(name) {
            compare(name, |learns| ChatTurns::new(learns, capacity, lasts));
        }
    }
    if is_wanted("miss-evict-insert") {
        compare("miss-evict-insert", MissTurns::new);
    }
    for steps in [10_000, 100_000, 1_000_000] {
        let name = format!("look-up-{steps}");
        if is_wanted(&name) {
            compare(&name, |learns| LookUps::new(learns, steps));
        }
    }
}
