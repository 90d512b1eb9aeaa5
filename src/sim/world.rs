//! A seeded world: ranks with their own devices and stores, requests that arrive, grow and vanish, and completions in
//! any legal order, with faults.
//!
//! Every rank gets the same calls; what differs is when and how its work ends. The ends go through [`Votes`], so all
//! cores are fed alike and must decide alike: their digests are compared after every step. Each rank's rig checks
//! sanity, conservation and stamps on its own. One line per step says what happened, so that a failing seed reads
//! like a story.

use std::fmt::Write as _;

use super::rig::{Call, Rig};
use super::rng::Rng;
use crate::base::{NamespaceId, Time};
use crate::pool::Capacity;
use crate::tiers::{
    Alloc, CoreConfig, CoreError, HostTier, LoadBack, LoadState, PageOutcome, Prefetch, PrefetchPolicy,
    PrefetchState, Rates, Refusal, RequestId, Stats, StoreConfig, Votes, WritePolicy,
};
use crate::tree::SessionId;

/// How unkind the world is, in percent of the occasions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Weather {
    /// Copies between device and host that fail.
    pub copy_fails: usize,
    /// Store calls that fail as a whole.
    pub call_fails: usize,
    /// Pages of a store batch that go wrong on their own.
    pub page_fails: usize,
    /// Steps in which a store loses a page by its own choice.
    pub store_forgets: usize,
    /// Requests that vanish in any state.
    pub aborts: usize,
    /// How readily all ranks crash; only the stores survive that.
    pub restarts: usize,
}

impl Weather {
    /// Nothing fails.
    pub const FAIR: Weather =
        Weather { copy_fails: 0, call_fails: 0, page_fails: 0, store_forgets: 0, aborts: 2, restarts: 30 };
    /// Everything fails now and then.
    pub const FOUL: Weather =
        Weather { copy_fails: 10, call_fails: 10, page_fails: 10, store_forgets: 3, aborts: 5, restarts: 30 };
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// Waits for its prefetch, then for admission.
    Waiting,
    /// Computes; so many tokens are done.
    Running { done: usize },
}

#[derive(Clone, Debug)]
struct Live {
    id: RequestId,
    namespace: NamespaceId,
    tokens: Vec<u32>,
    phase: Phase,
}

/// The world. Methods panic when a rule is broken, with the story so far.
#[derive(Debug)]
pub struct World {
    config: CoreConfig,
    ranks: Vec<Rig>,
    votes: Votes,
    /// What lives before the last restart saw.
    past: Report,
    rng: Rng,
    weather: Weather,
    page_size: usize,
    namespaces: Vec<NamespaceId>,
    live: Vec<Live>,
    sessions: Vec<SessionId>,
    /// Prompts to come back to.
    history: Vec<(NamespaceId, Vec<u32>)>,
    now: Time,
    story: String,
    steps: u64,
}

/// What a run of the world saw.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// Steps taken.
    pub steps: u64,
    /// Digest of all decisions.
    pub digest: u64,
    /// Tokens matched on device and host.
    pub matched_tokens: u64,
    /// Pages loaded back.
    pub loaded_pages: u64,
    /// Tokens that prefetches brought.
    pub prefetched_tokens: u64,
    /// Pages written to the store.
    pub stored_pages: u64,
    /// Pages of windows and states that prefetches brought.
    pub component_pages: u64,
    /// Prefetches that went back to an earlier stop point.
    pub retreats: u64,
    /// Refills that were dropped whole or in part, in tokens.
    pub dropped_tokens: u64,
    /// Refills that waited for the repair of their anchor.
    pub repairs: u64,
    /// Changes of the write policy that were accepted.
    pub policy_changes: u64,
    /// Host tiers taken away or given, and stores replaced.
    pub attachments: u64,
    /// Crashes of all ranks that left only the stores.
    pub restarts: u64,
}

impl Report {
    /// Adds what another run saw.
    pub fn merge(&mut self, other: &Report) {
        self.steps += other.steps;
        self.matched_tokens += other.matched_tokens;
        self.loaded_pages += other.loaded_pages;
        self.prefetched_tokens += other.prefetched_tokens;
        self.stored_pages += other.stored_pages;
        self.component_pages += other.component_pages;
        self.retreats += other.retreats;
        self.dropped_tokens += other.dropped_tokens;
        self.repairs += other.repairs;
        self.policy_changes += other.policy_changes;
        self.attachments += other.attachments;
        self.restarts += other.restarts;
    }

    fn add(&mut self, stats: &Stats) {
        self.matched_tokens += stats.matched_device_tokens + stats.matched_host_tokens;
        self.loaded_pages += stats.loaded_pages;
        self.prefetched_tokens += stats.prefetch_loaded_tokens;
        self.stored_pages += stats.store_put_pages;
        self.component_pages += stats.component_prefetched_pages;
        self.repairs += stats.anchor_repairs;
        self.retreats += stats.prefetch_retreats;
        for reason in [Refusal::AnchorNotBackedUp, Refusal::AnchorGone, Refusal::BackupInFlight] {
            self.dropped_tokens += stats.dropped_tokens.get(&reason).copied().unwrap_or(0);
        }
    }
}

/// Fresh cores, and the namespaces of all of them.
fn boot(ranks: u32, config: CoreConfig) -> (Vec<Rig>, Vec<NamespaceId>) {
    let mut ranks: Vec<Rig> = (0..ranks).map(|_| Rig::new(config).ticked_by_hand()).collect();
    ranks[0].core.start_log();
    let mut namespaces = vec![NamespaceId::DEFAULT];
    for rig in &mut ranks {
        namespaces.truncate(1);
        namespaces.push(rig.namespace("tenant"));
    }
    (ranks, namespaces)
}

const WRITES: [WritePolicy; 5] = [
    WritePolicy::WriteThrough { threshold: 1 },
    WritePolicy::WriteThrough { threshold: 2 },
    WritePolicy::WriteThroughSelective,
    WritePolicy::WriteBack,
    WritePolicy::None,
];

const STORY_BYTES_MAX: usize = 1 << 16;

impl World {
    /// `ranks` cores of one configuration.
    ///
    /// # Panics
    /// If the configuration is refused.
    #[must_use]
    pub fn new(seed: u64, ranks: u32, config: CoreConfig, weather: Weather) -> World {
        let (ranks, namespaces) = boot(ranks.max(1), config);
        World {
            config,
            votes: Votes::new(ranks.len() as u32),
            past: Report::default(),
            ranks,
            rng: Rng::new(seed),
            weather,
            page_size: config.page_size as usize,
            namespaces,
            live: Vec::new(),
            sessions: Vec::new(),
            history: Vec::new(),
            now: Time::ZERO,
            story: format!("seed {seed}, {config:?}, {weather:?}\n"),
            steps: 0,
        }
    }

    /// Takes `steps` random steps, then lets everything end and checks that nothing is held.
    ///
    /// # Panics
    /// If a rule is broken.
    pub fn run(mut self, steps: u64) -> Report {
        let guard = StoryOnPanic;
        for _ in 0..steps {
            self.step();
        }
        self.settle_down();
        let log = self.ranks[0].core.log().expect("rank 0 records");
        let text = log.to_string();
        assert_eq!(text.parse().as_ref(), Ok(&log), "the log survives its text");
        let again = log.replay(false).expect("the log of a healthy core is healthy");
        assert_eq!(again.digest(), self.ranks[0].core.digest(), "the log tells the whole story");
        std::mem::forget(guard);
        let mut report = Report { steps: self.steps, digest: self.ranks[0].core.digest(), ..self.past };
        report.add(self.ranks[0].core.stats());
        report
    }

    /// One random step.
    pub fn step(&mut self) {
        self.steps += 1;
        match self.rng.below(100) {
            0..15 if self.live.len() < 6 => self.arrive(),
            0..45 => self.advance(),
            // An end counts when it has come on all ranks.
            45..90 => (0..self.ranks.len()).for_each(|_| self.end_something()),
            90..95 => self.pass_time(),
            _ => self.world_acts(),
        }
        self.compare();
    }

    fn say(&mut self, line: std::fmt::Arguments<'_>) {
        if self.story.len() < STORY_BYTES_MAX {
            let _ = writeln!(self.story, "{:>6} {:>10} {line}", self.steps, self.now.0);
        }
        STORY.with_borrow_mut(|story| story.clone_from(&self.story));
    }

    /// The same call on every rank; answers must be equal.
    fn all<T: PartialEq + std::fmt::Debug>(&mut self, mut call: impl FnMut(&mut Rig) -> T) -> T {
        let first = call(&mut self.ranks[0]);
        for rig in &mut self.ranks[1..] {
            assert_eq!(call(rig), first, "ranks answer differently");
        }
        first
    }

    /// All ranks have taken the same decisions.
    fn compare(&self) {
        let first = self.ranks[0].core.digest();
        for (rank, rig) in self.ranks.iter().enumerate() {
            assert_eq!(rig.core.digest(), first, "rank {rank} diverged");
        }
    }

    /// A new request: a continuation, a branch, or something new, over few distinct pages so that paths meet.
    fn arrive(&mut self) {
        let (namespace, mut tokens) = if self.history.is_empty() || self.rng.chance(25) {
            (self.namespaces[self.rng.below(self.namespaces.len())], Vec::new())
        } else {
            self.history[self.rng.below(self.history.len())].clone()
        };
        if self.rng.chance(40) {
            let keep = self.rng.below(tokens.len() / self.page_size + 1) * self.page_size;
            tokens.truncate(keep);
        }
        for _ in 0..1 + self.rng.below(4) {
            let letter = self.rng.below(3) as u32;
            tokens.extend((0..self.page_size as u32).map(|i| letter * 64 + i));
        }
        tokens.truncate(self.page_size * 7);
        tokens.extend((0..self.rng.below(self.page_size) as u32).map(|i| 900 + i));
        let id = self.all(|rig| rig.core.request(namespace));
        self.foretell(id, &tokens);
        let started = self.all(|rig| rig.prefetch(id, &tokens));
        let looks = matches!(started, Ok(Prefetch::Started { .. }));
        self.say(format_args!("arrive {id:?} {namespace:?} {} tokens, prefetch {looks}", tokens.len()));
        self.history.push((namespace, tokens.clone()));
        if self.history.len() > 12 {
            self.history.remove(0);
        }
        self.live.push(Live { id, namespace, tokens, phase: Phase::Waiting });
    }

    /// What its scheduler knows of a request, right or wrong.
    fn foretell(&mut self, id: RequestId, tokens: &[u32]) {
        match self.rng.below(10) {
            0 => {
                let session = self.all(|rig| rig.core.open_session());
                self.sessions.push(session);
                self.all(|rig| rig.core.set_session(id, session)).expect("both are known");
            }
            1 if !self.sessions.is_empty() => {
                let session = self.sessions[self.rng.below(self.sessions.len())];
                self.all(|rig| rig.core.set_session(id, session)).expect("the request is known");
            }
            2 if !self.sessions.is_empty() => {
                let session = self.sessions.swap_remove(self.rng.below(self.sessions.len()));
                self.all(|rig| rig.core.close_session(session)).expect("it is open");
            }
            3 => self.all(|rig| rig.core.will_not_return(id)).expect("it is known"),
            4 | 5 => self.all(|rig| rig.core.expect_prefix(id, tokens)).expect("it is known"),
            6 => self.all(|rig| rig.core.answered(id, 100)).expect("it is known"),
            _ => {}
        }
    }

    fn advance(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let at = self.rng.below(self.live.len());
        if self.rng.chance(self.weather.aborts) {
            return self.vanish(at);
        }
        match self.live[at].phase {
            Phase::Waiting => self.admit(at),
            Phase::Running { done } => self.compute(at, done),
        }
    }

    fn vanish(&mut self, at: usize) {
        let live = self.live.swap_remove(at);
        let gone = self.all(|rig| rig.abort(live.id));
        assert_eq!(gone, Ok(()));
        self.say(format_args!("abort {:?} in {:?}", live.id, live.phase));
    }

    fn admit(&mut self, at: usize) {
        let Live { id, tokens, .. } = self.live[at].clone();
        let state = self.all(|rig| rig.poll_prefetch(id));
        if state == Ok(PrefetchState::Pending) && self.rng.chance(95) {
            return;
        }
        if let Ok(PrefetchState::Ended(end)) = state {
            let ends = end.loaded_tokens + end.redundant_tokens + end.lost_tokens;
            assert_eq!(end.hit_tokens, ends, "every token found has one end");
        }
        if matches!(state, Ok(PrefetchState::Ended(end)) if end.lost_tokens > 0) && self.rng.chance(40) {
            let again = self.all(|rig| rig.prefetch(id, &tokens));
            self.say(format_args!("{id:?} asks the store again: {again:?}"));
            return;
        }
        let head = &tokens[..tokens.len() - 1];
        let found = self.all(|rig| rig.match_prefix(id, head));
        let found = found.expect("a waiting request owns nothing");
        let budget = if self.rng.chance(10) { self.rng.below(4) as u32 } else { u32::MAX };
        let load = self.all(|rig| rig.load_back_within(id, budget)).expect("a fresh match");
        self.say(format_args!(
            "admit {id:?}: {} device, {} host tokens, {load:?}",
            found.device_tokens, found.host_tokens
        ));
        let mut done = found.device_tokens as usize;
        if let LoadBack::Started { tokens } = load {
            done += tokens as usize;
        }
        self.live[at].phase = Phase::Running { done };
    }

    fn compute(&mut self, at: usize, done: usize) {
        let Live { id, namespace, tokens, .. } = self.live[at].clone();
        match self.all(|rig| rig.core.load_state(id)).expect("a live request") {
            LoadState::Pending { .. } if self.rng.chance(80) => return,
            LoadState::Failed => {
                self.say(format_args!("{id:?} starts over"));
                self.live[at].phase = Phase::Waiting;
                return;
            }
            _ => {}
        }
        if done >= tokens.len() {
            return self.finish(at);
        }
        let chunk = (1 + self.rng.below(3)) * self.page_size;
        let end = (done / self.page_size * self.page_size + chunk).min(tokens.len());
        let have = self.ranks[0].core.pages(id).expect("a live request").len();
        let want = end.div_ceil(self.page_size).saturating_sub(have);
        let granted = self.all(|rig| rig.alloc(id, want as u32)).expect("a live request");
        if granted != Alloc::Granted {
            self.say(format_args!("{id:?} waits for {want} pages"));
            // Somebody has to give way, or all wait for each other.
            if self.rng.chance(30) {
                self.vanish(at);
            }
            return;
        }
        for rig in &mut self.ranks {
            rig.compute(id, &tokens[..end], namespace);
        }
        let published = self.all(|rig| rig.checkpoint(id, &tokens[..end]));
        self.say(format_args!("compute {id:?} to {end}: {published:?}"));
        if published == Err(CoreError::LoadFailed) {
            self.live[at].phase = Phase::Waiting;
            return;
        }
        self.live[at].phase = Phase::Running { done: end };
    }

    fn finish(&mut self, at: usize) {
        let live = self.live.swap_remove(at);
        let done = self.all(|rig| rig.finish(live.id, &live.tokens));
        self.say(format_args!("finish {:?}: {done:?}", live.id));
        if done.is_err() {
            let gone = self.all(|rig| rig.abort(live.id));
            assert_eq!(gone, Ok(()));
        }
    }

    /// One piece of work ends on one rank.
    fn end_something(&mut self) {
        let rank = self.rng.below(self.ranks.len());
        let pending = self.ranks[rank].pending.len();
        if pending == 0 {
            return;
        }
        let index = self.rng.below(pending);
        let how = self.fate(rank, index);
        self.end(rank, index, &how);
    }

    fn fate(&mut self, rank: usize, index: usize) -> Call {
        use super::rig::Pending;
        let (fails, pages) = match &self.ranks[rank].pending[index] {
            Pending::ToHost(..) | Pending::ToDevice(..) => (self.weather.copy_fails, 0),
            Pending::Query(..) => (self.weather.call_fails, 0),
            Pending::Get(_, _, items) | Pending::Put(_, _, items) => (self.weather.call_fails, items.len()),
        };
        if self.rng.chance(fails) {
            return Call::Fails;
        }
        if pages == 0 || !self.rng.chance(self.weather.page_fails) {
            return Call::Well;
        }
        const FATES: [PageOutcome; 4] =
            [PageOutcome::Missing, PageOutcome::Corrupt, PageOutcome::Refused, PageOutcome::Failed];
        let said = if self.rng.chance(10) { self.rng.below(pages + 1) } else { pages };
        let each =
            (0..said).map(|_| if self.rng.chance(30) { FATES[self.rng.below(4)] } else { PageOutcome::Done });
        Call::Each(each.collect())
    }

    fn end(&mut self, rank: usize, index: usize, how: &Call) {
        let what = format!("{:?}", self.ranks[rank].pending[index]);
        self.say(format_args!("rank {rank} ends {how:?} {what}"));
        let event = self.ranks[rank].perform(index, how);
        self.votes.cast(rank as u32, event);
        let mut agreed = Vec::new();
        self.votes.settle(&mut agreed);
        for event in agreed {
            for rig in &mut self.ranks {
                rig.feed(event.clone());
            }
        }
    }

    fn pass_time(&mut self) {
        let due = self.ranks[0].core.next_timeout();
        self.now = match due {
            Some(due) if self.rng.chance(50) => due.max(self.now),
            _ => self.now + self.rng.below(20_000) as u64,
        };
        let now = self.now;
        self.all(|rig| rig.tick(now));
        self.say(format_args!("tick"));
    }

    /// The world changes on its own.
    fn world_acts(&mut self) {
        match self.rng.below(10) {
            0 if self.rng.chance(self.weather.restarts) => self.restart(),
            0..2 => self.crowd_out(),
            2 => self.store_from_elsewhere(),
            3 => self.change_policy(),
            4 => self.measure(),
            5 if self.rng.chance(20) => self.tiers_come_and_go(),
            _ if self.rng.chance(self.weather.store_forgets * 10) => {
                let rank = self.rng.below(self.ranks.len());
                let n = self.rng.below(32);
                self.ranks[rank].lose_stored(n);
                self.say(format_args!("rank {rank}'s store loses page {n}"));
            }
            _ => {}
        }
    }

    /// A request that takes most of the device and goes away without a result.
    fn crowd_out(&mut self) {
        let id = self.all(|rig| rig.core.request(NamespaceId::DEFAULT));
        let pages = 1 + self.rng.below(24) as u32;
        let granted = self.all(|rig| rig.alloc(id, pages));
        let gone = self.all(|rig| rig.abort(id));
        assert_eq!(gone, Ok(()));
        self.say(format_args!("crowd {id:?} asks for {pages} pages: {granted:?}"));
    }

    /// Another process of the same model stores a prompt that it knows, perhaps with holes, on each rank its own.
    fn store_from_elsewhere(&mut self) {
        if self.history.is_empty() {
            return;
        }
        let (namespace, mut tokens) = self.history[self.rng.below(self.history.len())].clone();
        let letter = self.rng.below(3) as u32;
        tokens.truncate(tokens.len() / self.page_size * self.page_size);
        tokens.extend((0..self.page_size as u32).map(|i| letter * 64 + i));
        let holes = [0, 15, 40][self.rng.below(3)];
        for rig in &mut self.ranks {
            rig.store_from_elsewhere(namespace, &tokens, || self.rng.chance(holes));
        }
        self.say(format_args!("somebody stores {} tokens of {namespace:?}, {holes} % holes", tokens.len()));
    }

    fn change_policy(&mut self) {
        const PREFETCHES: [PrefetchPolicy; 4] = [
            PrefetchPolicy::BestEffort,
            PrefetchPolicy::WaitComplete,
            PrefetchPolicy::TIMEOUT_DEFAULT,
            PrefetchPolicy::Adaptive,
        ];
        if !self.rng.chance(30) {
            return;
        }
        let (write, exclusive) = (WRITES[self.rng.below(5)], self.rng.chance(50));
        let prefetch = PREFETCHES[self.rng.below(4)];
        let changed = self.all(|rig| {
            rig.core.set_prefetch_policy(prefetch);
            rig.set_write_policy(write, exclusive)
        });
        self.past.policy_changes += u64::from(changed.is_ok());
        self.say(format_args!("{write:?}, exclusive {exclusive}: {changed:?}; {prefetch:?}"));
    }

    /// The lower tiers are taken away and given back, or another store comes, each after what was in flight has ended: with
    /// requests alive that may hold what would go.
    fn tiers_come_and_go(&mut self) {
        while let Some(rank) = self.busy_rank() {
            self.end(rank, 0, &Call::Well);
        }
        let config = *self.ranks[0].core.config();
        let changed = if config.host == Capacity::Pages(0) {
            let (write, exclusive) = (WRITES[self.rng.below(5)], self.rng.chance(50));
            let store = self.config.store.filter(|_| self.rng.chance(80));
            let tier = HostTier { write, exclusive, store, ..HostTier::of(&self.config) };
            self.say(format_args!("attach {tier:?}"));
            self.all(|rig| rig.attach_host(tier))
        } else if self.rng.chance(50) {
            self.say(format_args!("detach the host"));
            self.all(|rig| rig.detach_host().map(drop))
        } else {
            self.say(format_args!("another store"));
            self.all(|rig| rig.new_store(StoreConfig::default()))
        };
        self.past.attachments += u64::from(changed.is_ok());
        self.say(format_args!("{changed:?}"));
    }

    fn busy_rank(&self) -> Option<usize> {
        (0..self.ranks.len()).find(|&rank| !self.ranks[rank].pending.is_empty())
    }

    fn measure(&mut self) {
        let rates = Rates {
            compute_ns_per_token: 1 + self.rng.below(2_000_000) as u64,
            load_ns_per_token: 1 + self.rng.below(1_000_000) as u64,
            load_latency_us: self.rng.below(5_000) as u64,
        };
        self.all(|rig| rig.core.set_rates(rates));
        self.say(format_args!("{rates:?}"));
    }

    /// Every process dies at once; what the stores hold is all that is left.
    fn restart(&mut self) {
        self.past.add(self.ranks[0].core.stats());
        self.past.restarts += 1;
        let (mut ranks, namespaces) = boot(self.ranks.len() as u32, self.config);
        for (new, old) in ranks.iter_mut().zip(&self.ranks) {
            new.inherit_store(old);
            new.tick(self.now);
        }
        self.votes = Votes::new(ranks.len() as u32);
        (self.ranks, self.namespaces) = (ranks, namespaces);
        self.live.clear();
        self.sessions.clear();
        self.say(format_args!("restart"));
    }

    /// Everybody leaves, everything ends well, and nothing may be held afterwards.
    fn settle_down(&mut self) {
        self.say(format_args!("settle down"));
        while !self.live.is_empty() {
            self.vanish(0);
        }
        for _ in 0..10_000 {
            match self.busy_rank() {
                Some(rank) => self.end(rank, 0, &Call::Well),
                None => match self.ranks[0].core.next_timeout() {
                    Some(due) => {
                        self.now = due.max(self.now);
                        let now = self.now;
                        self.all(|rig| rig.tick(now));
                    }
                    None => break,
                },
            }
            self.compare();
        }
        for rig in &self.ranks {
            rig.assert_quiet();
            rig.assert_stored();
        }
        assert_eq!(self.votes.open(), 0);
    }
}

thread_local! {
    static STORY: std::cell::RefCell<String> = const { std::cell::RefCell::new(String::new()) };
}

/// Prints the story of the world that broke a rule on this thread.
struct StoryOnPanic;

impl Drop for StoryOnPanic {
    fn drop(&mut self) {
        STORY.with_borrow(|story| eprintln!("{story}"));
    }
}
