//! An eviction order that learns who comes back.
//!
//! LRU asks when a prefix was used last. This asks what a page still brings: the chance that its conversation, document
//! or system prompt is used again, per volume of work that the page would have to wait. Both come from the history of
//! this very cache, hits and misses alike, through three small tables:
//!
//! | file | holds |
//! |---|---|
//! | `signal` | what is known of a use: turn, lengths of prompt and answer, gaps, place in the tree |
//! | `score` | an additive model from signals to "is used again" |
//! | `hazard` | per class of score and age: the measured hazard, and the gain that orders the victims |
//! | `history` | recent uses in order, ghosts included; the shadow of LRU |
//! | `guard` | falls back to LRU when the shadow is ahead |
//! | `age` | bins of age, in volume of work |
//!
//! Deterministic: no clock, no random number, no transcendental function, no map order. Sizes: 40 bytes a node
//! ([`Mark`]), 56 bytes a remembered use, 40 more a ghost. Cost: O(log n) a decision (the caller's heap), O(bins) a use
//! over its life. `docs/EVICTION.md` has the results.
//!
//! The caller keeps one [`Mark`] per node and a heap of evictable leaves by [`Adaptive::key`], and per request calls
//! [`Adaptive::request`], drains [`Adaptive::next_due`] (re-key those nodes), then [`Adaptive::touch`] for each node of
//! the path, deepest first.

mod age;
mod guard;
mod hazard;
mod history;
mod score;
mod signal;

pub use signal::{Place, Request, SIGNAL_NAMES};

use std::collections::VecDeque;

use crate::base::heap::HeapKey;

use age::{Ages, BINS};
use guard::Guard;
use hazard::{CLASSES, Hazards};
use history::{Answered, History};
use score::Scorer;
use signal::{SIGNALS, Signals};

/// Requests between two looks at the tables. At 50 and 200 the results are the same.
const REBUILD_REQUESTS: u64 = 64;
/// What a rebuild leaves of old evidence: half is gone after 9,000 requests.
const FADE: f64 = 0.995;
/// One in so many passed octaves teaches the scorer. 1 and 2 order alike; at 4 the synthetic trace loses 1 point.
const LESSON_EVERY: f64 = 2.0;
/// Scores from which the quantiles are taken.
const SCORES: usize = 2_048;

/// Where attention doubles the cost of a token in a model of 8 B parameters with 32 layers of 4,096: 1.6e10 FLOP against
/// 524,288 per position before it.
const KNEE_TOKENS: u32 = 1 << 15;

/// How to order victims.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AdaptiveConfig {
    /// Pages of the tier that is ordered.
    pub capacity_pages: u64,
    /// Most uses remembered. Enough is a few times the nodes that the tier holds.
    pub history_max: usize,
    /// Depth, in pages, at which a page costs twice as much to compute again as at the root, because attention looks
    /// back over all of it. What is maximised is work saved. 0: all pages cost the same, hits are maximised.
    pub cost_knee_pages: u32,
    /// False: no fall-back to LRU.
    pub guard: bool,
    /// Bit `i` silences signal `i` of [`SIGNAL_NAMES`], for ablations. 0 in service.
    pub silenced: u16,
}

impl AdaptiveConfig {
    /// The defaults for a tier of `capacity_pages`.
    #[must_use]
    pub fn new(capacity_pages: u64, page_tokens: u32) -> AdaptiveConfig {
        let cost_knee_pages = (KNEE_TOKENS / page_tokens.max(1)).max(1);
        AdaptiveConfig { capacity_pages, history_max: 1 << 18, cost_knee_pages, guard: true, silenced: 0 }
    }
}

/// What a node remembers of its uses. The caller stores it and hands it back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mark {
    /// Number of the latest use.
    number: u64,
    /// Volume at the first and at the latest use.
    born: u64,
    last: u64,
    /// Volume between the latest two uses.
    gap: u64,
    uses: u32,
    turn: u16,
    class: u8,
}

impl Default for Mark {
    fn default() -> Self {
        Mark { number: u64::MAX, born: 0, last: 0, gap: 0, uses: 0, turn: 0, class: 0 }
    }
}

impl Mark {
    /// Turn of the request that used the node last, from 0.
    #[must_use]
    pub fn turn(&self) -> u32 {
        self.turn.into()
    }

    fn mean_gap(&self) -> u64 {
        if self.uses < 2 { 0 } else { (self.last - self.born) / u64::from(self.uses - 1) }
    }
}

/// What the order says about itself.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AdaptiveStats {
    /// Uses remembered.
    pub uses: usize,
    /// Evicted nodes remembered.
    pub ghosts: usize,
    /// True while the learned order rules, false while LRU does.
    pub learned: bool,
    /// Changes between the two.
    pub switches: u32,
    /// Pages hit more than LRU would have, capped above; see `guard`.
    pub lead_pages: i64,
    /// Pages hit so far.
    pub hit_pages: u64,
    /// Pages that LRU would have hit in the same memory.
    pub lru_hit_pages: u64,
    /// Spread of the weights of each signal of [`SIGNAL_NAMES`]: how much it tells.
    pub spreads: [f32; SIGNALS],
    /// Gain of a fresh page of the least and of the most promising class, in uses per million pages of volume.
    pub gain_fresh: (f32, f32),
}

/// The order. See the module.
#[derive(Clone, Debug)]
pub struct Adaptive {
    config: AdaptiveConfig,
    ages: Ages,
    scorer: Scorer,
    hazards: Hazards,
    history: History,
    guard: Guard,
    scores: VecDeque<(f64, u32)>,
    quantiles: [f64; CLASSES - 1],
    request: Request,
    /// Volume so far, in pages.
    now: u64,
    requests: u64,
    shadow_pages: u64,
    hit_pages: u64,
    lru_hit_pages: u64,
    due: Vec<u32>,
}

impl Adaptive {
    /// An order that knows nothing yet and therefore is LRU.
    #[must_use]
    pub fn new(config: AdaptiveConfig) -> Adaptive {
        let ages = Ages::new(config.capacity_pages);
        Adaptive {
            ages,
            scorer: Scorer::new(),
            hazards: Hazards::new(config.capacity_pages, ages),
            history: History::new(config.capacity_pages, config.history_max),
            guard: Guard::new(config.capacity_pages, config.guard),
            scores: VecDeque::new(),
            quantiles: [f64::INFINITY; CLASSES - 1],
            request: Request::default(),
            now: 0,
            requests: 0,
            shadow_pages: 0,
            hit_pages: 0,
            lru_hit_pages: 0,
            due: Vec::new(),
            config,
        }
    }

    /// A request comes; time passes by its pages. Afterwards drain [`Self::next_due`], then touch its path.
    /// Amortised O(bins) per node touched before.
    pub fn request(&mut self, request: Request) {
        self.guard.count(self.request.hit_pages.into(), self.shadow_pages);
        self.hit_pages += u64::from(request.hit_pages);
        self.lru_hit_pages += self.shadow_pages;
        self.shadow_pages = 0;
        self.history.settle_lru();
        self.now += u64::from(request.prompt_pages);
        self.request = request;
        self.requests += 1;
        let Adaptive { history, hazards, scorer, due, .. } = self;
        history.cross(self.now, self.ages, |crossing| {
            hazards.passed(crossing.class, crossing.bin, crossing.pages);
            if teaches(crossing.number, crossing.bin) {
                scorer.learn(&crossing.signals, crossing.bin, crossing.pages, LESSON_EVERY, false);
            }
            due.extend(crossing.owner);
        });
        if self.requests.is_multiple_of(REBUILD_REQUESTS) {
            self.rebuild();
        }
    }

    /// A node whose age has changed: give it its new key if it is in an order. Call until `None`.
    pub fn next_due(&mut self) -> Option<u32> {
        self.due.pop()
    }

    /// The current request uses a node; call for its whole path, deepest node first, new nodes included. `owner` is
    /// what [`Self::next_due`] will say; `mark` is the node's own, or that of its ghost, or `None` for a node never
    /// seen. O(signals).
    #[must_use]
    pub fn touch(&mut self, owner: u32, mark: Option<Mark>, place: Place) -> Mark {
        if let Some(answered) = mark.and_then(|m| self.history.answer(m.number)) {
            self.account(&answered);
        }
        let mut signals = Signals::new(&self.request, &place, mark.as_ref());
        for signal in (0..SIGNALS).filter(|s| self.config.silenced >> s & 1 == 1) {
            signals.silence(signal);
        }
        let score = self.scorer.score(&signals);
        if self.scores.len() == SCORES {
            self.scores.pop_front();
        }
        self.scores.push_back((score, place.pages));
        let class = self.quantiles.iter().filter(|&&q| score > q).count() as u8;
        let number = self.history.push(self.now, owner, place.pages, class, signals);
        let (now, turn) = (self.now, self.request.turn.min(u16::MAX.into()) as u16);
        match mark {
            None => Mark { number, born: now, last: now, gap: 0, uses: 1, turn, class },
            Some(m) => {
                let gap = now.saturating_sub(m.last);
                Mark { number, born: m.born, last: now, gap, uses: m.uses.saturating_add(1), turn, class }
            }
        }
    }

    /// Where a node stands: the smallest key goes first. O(1).
    #[must_use]
    pub fn key(&self, mark: &Mark, depth_pages: u32) -> HeapKey {
        let bin = self.ages.bin(self.now.saturating_sub(mark.last));
        let gain = if self.guard.learned() {
            self.hazards.gain(mark.class, bin) * self.cost(depth_pages)
        } else {
            // LRU on the same scale, so that nodes keyed before a change and after it mix without a sweep.
            self.hazards.gain(CLASSES as u8 - 1, 0) / (bin + 1) as f64
        };
        // The bits of floats that are not negative order like the floats.
        (gain.max(0.0).to_bits(), mark.number)
    }

    /// A node was evicted; `key` names its content, and is asked for when the content comes back. O(1).
    pub fn evicted(&mut self, mark: Mark, key: u64) {
        self.history.bury(mark, key);
    }

    /// The mark that an evicted node left, if it is still remembered. O(1).
    pub fn revive(&mut self, key: u64) -> Option<Mark> {
        self.history.dig(key)
    }

    /// A node was removed and is not expected back: nothing is learned from it. O(1).
    pub fn removed(&mut self, mark: Mark) {
        self.history.forget(mark.number);
    }

    /// The first `upper_pages` of a node become a node of their own because the current request goes on differently
    /// from there. Touch the upper node next, with the mark that this returns. O(1).
    #[must_use]
    pub fn split(&mut self, mark: &Mark, upper_pages: u32) -> Mark {
        if let Some(part) = self.history.divide(mark.number, upper_pages) {
            self.account(&part);
        }
        // The use stays with the lower node; the upper one has been answered.
        Mark { number: u64::MAX, ..*mark }
    }

    /// How it is going. O(weights).
    #[must_use]
    pub fn stats(&self) -> AdaptiveStats {
        let fresh = |class| (self.hazards.gain(class, 0) * 1e6) as f32;
        AdaptiveStats {
            uses: self.history.len(),
            ghosts: self.history.ghosts(),
            learned: self.guard.learned(),
            switches: self.guard.switches,
            lead_pages: self.guard.lead_pages(),
            hit_pages: self.hit_pages,
            lru_hit_pages: self.lru_hit_pages + self.shadow_pages,
            spreads: self.scorer.spreads(),
            gain_fresh: (fresh(0), fresh(CLASSES as u8 - 1)),
        }
    }

    fn account(&mut self, answered: &Answered) {
        let bin = self.ages.bin(self.now.saturating_sub(answered.at));
        self.hazards.used(answered.class, bin, answered.pages);
        let octave = if bin == 0 { 0 } else { (bin | 1).min(BINS - 1) };
        self.scorer.learn(&answered.signals, octave, answered.pages, 1.0, true);
        if answered.in_lru {
            self.shadow_pages += u64::from(answered.pages);
        }
    }

    fn cost(&self, depth_pages: u32) -> f64 {
        match self.config.cost_knee_pages {
            0 => 1.0,
            knee => 1.0 + f64::from(depth_pages) / f64::from(knee),
        }
    }

    fn rebuild(&mut self) {
        self.hazards.fade(FADE);
        self.scorer.fade(FADE);
        self.hazards.rebuild(self.ages);
        if self.scores.len() >= 64 {
            self.quantiles = quantiles(self.scores.iter().copied().collect());
        }
    }
}

/// Whether a use that passed a bin unused is a lesson. The model looks at whole octaves, and at one in
/// [`LESSON_EVERY`] of the many uses that pass one, with the weight of all. Answers are few: all of them count.
fn teaches(number: u64, bin: usize) -> bool {
    (bin % 2 == 1 || bin == 0) && (number + bin as u64 / 2).is_multiple_of(LESSON_EVERY as u64)
}

/// Scores that cut the pages into classes of equal size. By pages, not by nodes: a system prompt in every path would
/// fill a third of the classes by itself.
fn quantiles(mut scores: Vec<(f64, u32)>) -> [f64; CLASSES - 1] {
    scores.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    let total: u64 = scores.iter().map(|s| u64::from(s.1)).sum();
    let mut cuts = [f64::INFINITY; CLASSES - 1];
    let (mut cut, mut pages) = (0, 0);
    for (score, more) in scores {
        pages += u64::from(more);
        while cut < cuts.len() && pages * CLASSES as u64 >= total * (cut as u64 + 1) {
            cuts[cut] = score;
            cut += 1;
        }
    }
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cache of single-node prompts of 10 pages, driven through the interface.
    struct Toy {
        order: Adaptive,
        marks: Vec<Option<Mark>>,
        resident: Vec<bool>,
        hits: u32,
    }

    impl Toy {
        fn new(capacity_pages: u64, guard: bool) -> Toy {
            let config = AdaptiveConfig { guard, ..AdaptiveConfig::new(capacity_pages, 64) };
            Toy {
                order: Adaptive::new(config),
                marks: vec![None; 4_096],
                resident: vec![false; 4_096],
                hits: 0,
            }
        }

        fn serve(&mut self, node: u32, answer_tokens: u32) {
            let at = node as usize;
            self.hits += u32::from(self.resident[at]);
            let hit_pages = if self.resident[at] { 10 } else { 0 };
            let mark = self.marks[at].or_else(|| self.order.revive(node.into()));
            let turn = mark.map_or(0, |m| m.turn() + 1);
            let new_pages = if mark.is_some() { 0 } else { 10 };
            let request =
                Request { prompt_pages: 10, new_pages, hit_pages, answer_tokens, turn, ..Request::default() };
            self.order.request(request);
            while self.order.next_due().is_some() {}
            self.resident[at] = true;
            self.marks[at] = Some(self.order.touch(node, mark, Place { pages: 10, ..Place::default() }));
            while self.resident.iter().filter(|r| **r).count() as u64 * 10 > self.order.config.capacity_pages
            {
                self.evict(node);
            }
        }

        fn evict(&mut self, except: u32) {
            let keyed = |at: usize| self.marks[at].map(|m| self.order.key(&m, 0));
            let residents = (0..self.marks.len()).filter(|&at| self.resident[at] && at as u32 != except);
            let victim = residents.min_by_key(|&at| keyed(at)).unwrap();
            self.resident[victim] = false;
            self.order.evicted(self.marks[victim].take().unwrap(), victim as u64);
        }
    }

    #[test]
    fn at_first_it_is_lru() {
        let mut toy = Toy::new(100, true);
        for node in 0..10 {
            toy.serve(node, 1);
        }
        toy.serve(0, 1);
        toy.serve(10, 1);
        assert!(toy.resident[0] && !toy.resident[1], "node 1 was the oldest");
    }

    #[test]
    fn it_learns_who_comes_back() {
        // Short answers come back after 30 others, which is more than fit; long ones never do.
        let mut toy = Toy::new(200, true);
        for round in 0..3_000u32 {
            toy.serve(2_000 + round % 2_000, 500);
            if round >= 30 {
                toy.serve((round - 30) % 2_000, 4);
            }
            toy.serve(round % 2_000, 4);
        }
        let stats = toy.order.stats();
        assert!(stats.learned && stats.lead_pages > 0, "{stats:?}");
        assert!(stats.hit_pages > 4 * stats.lru_hit_pages.max(1_000), "{stats:?}");
    }

    #[test]
    fn the_shadow_is_lru() {
        let (mut toy, mut lru, mut lru_hits) = (Toy::new(150, true), Vec::new(), 0);
        let mut state = 7u64;
        for _ in 0..5_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let node = (state >> 33) as u32 % 40;
            let at = lru.iter().position(|&n| n == node);
            if let Some(at) = at {
                lru_hits += 10;
                lru.remove(at);
            }
            lru.push(node);
            if lru.len() > 15 {
                lru.remove(0);
            }
            toy.serve(node, 1);
        }
        assert_eq!(toy.order.stats().lru_hit_pages, lru_hits);
    }

    #[test]
    fn memory_is_bounded_and_ghosts_leave_with_their_use() {
        let config = AdaptiveConfig { history_max: 100, ..AdaptiveConfig::new(1_000, 64) };
        let mut order = Adaptive::new(config);
        for node in 0..1_000 {
            order.request(Request { prompt_pages: 1, new_pages: 1, ..Request::default() });
            let mark = order.touch(node, None, Place { pages: 1, ..Place::default() });
            order.evicted(mark, node.into());
        }
        let stats = order.stats();
        assert_eq!((stats.uses, stats.ghosts), (100, 100));
        assert!(order.revive(5).is_none() && order.revive(999).is_some());
    }

    #[test]
    fn a_split_counts_the_upper_part_once() {
        let mut order = Adaptive::new(AdaptiveConfig::new(1_000, 64));
        let use_of = |order: &mut Adaptive| {
            order.request(Request { prompt_pages: 10, ..Request::default() });
        };
        use_of(&mut order);
        let lower = order.touch(1, None, Place { pages: 10, ..Place::default() });
        use_of(&mut order);
        let upper = order.split(&lower, 4);
        let upper = order.touch(2, Some(upper), Place { pages: 4, ..Place::default() });
        assert_eq!(order.stats().lru_hit_pages, 4);
        assert_eq!(upper.uses, 2);
        use_of(&mut order);
        let _ = order.touch(1, Some(lower), Place { pages: 6, ..Place::default() });
        assert_eq!(order.stats().lru_hit_pages, 10);
    }

    #[test]
    fn strange_calls_do_no_harm() {
        let mut order = Adaptive::new(AdaptiveConfig { history_max: 0, ..AdaptiveConfig::new(0, 64) });
        let huge = Request {
            prompt_pages: u32::MAX,
            hit_pages: u32::MAX,
            new_pages: u32::MAX,
            ..Request::default()
        };
        let place = Place { pages: u32::MAX, depth_pages: u32::MAX, after_pages: u32::MAX, kids: u32::MAX };
        let mut mark = Mark::default();
        for _ in 0..300 {
            order.request(huge);
            mark = order.touch(0, Some(mark), place);
            order.removed(Mark::default());
            order.evicted(Mark::default(), 1);
            let _ = order.split(&mark, u32::MAX);
            assert!(order.key(&mark, u32::MAX).0 < 1 << 63);
        }
        order.removed(mark);
        assert!(order.revive(77).is_none());
    }
}
