//! An eviction order that learns who comes back.
//!
//! LRU asks when a prefix was used last. This asks what a page still brings: the chance that its conversation, document
//! or system prompt is used again, per volume of work that the page would have to wait. Both come from the history of
//! this very cache, hits and misses alike, through a few small tables:
//!
//! | file | holds |
//! |---|---|
//! | `mark` | what is kept of a node |
//! | `signal` | what is known of a use: turn, lengths of prompt and answer, gaps, place in the tree |
//! | `score` | an additive model from signals to "is used again", and the classes its scores are cut into |
//! | `hazard` | per class and age: the measured hazard, and the gain that orders the victims |
//! | `samples` | uses that are followed, for the lessons |
//! | `cells` | the order of one tier: leaves by class, cost and age |
//! | `ghosts` | evicted nodes |
//! | `shadow` | what LRU would hold in the same memory |
//! | `guard` | how much of the memory the learned order rules: what it gained over the shadow decides |
//! | `age` | bins of age, in volume of work |
//!
//! **Cost.** Only leaves are ordered, so only leaves are scored, when they enter an order; a look-up, a touch or a lock of the
//! nodes above costs nothing but the shadow's count. Lessons come from samples. Everything is O(1) but the choice of a
//! victim, which is O(64). Deterministic: no clock, no random number, no transcendental function, no map order.
//!
//! **Time** is the volume of work: the tree's tick advances by the pages of a request. A page that waits for a volume of V
//! keeps V other pages out.

mod age;
mod cells;
mod ghosts;
mod guard;
mod hazard;
mod mark;
mod samples;
mod score;
mod shadow;
mod signal;

pub(super) use signal::Leaf;
pub use signal::SIGNAL_NAMES;

use crate::base::NamespaceId;
use crate::base::Tier;
use crate::base::heap::IndexHeap;
use crate::base::prefetch::prefetch;
use crate::tree::node::Node;
use crate::tree::walk::{fold, page_name};

use age::{Ages, half_octave};
use cells::{Cells, FINISHED, Gains, LEVELS, ROOT_LEVEL};
use ghosts::{Ghost, Ghosts, NO_SAMPLE};
use guard::Guard;
use hazard::{CLASSES, Hazards};
use mark::Mark;
use samples::{Sample, Samples};
use score::Scorer;
use shadow::Shadow;
use signal::{SIGNALS, Signals};

use super::waiting::Turn;

/// New uses between two looks at the tables: 1/32 of those so far, within these bounds.
const REBUILD_MIN: u64 = 64;
const REBUILD_MAX: u64 = 512;
/// What 64 uses leave of old evidence: half is gone after 9,000. And of the count of scores, since these move with the
/// weights.
const FADE: f64 = 0.995;
const FADE_SCORES: f64 = 0.9;
/// `Mark::list` of a leaf that is kept: it stands in no cell.
const KEPT: u8 = u8::MAX;
/// Requests that run and are in the middle of a ghost.
const CARRIED_MAX: usize = 256;

const ROOT_2: f64 = std::f64::consts::SQRT_2;

/// Where attention doubles the cost of a token in a model of 8 B parameters with 32 layers of 4,096: 1.6e10 FLOP against
/// 524,288 per position before it.
const KNEE_TOKENS: u32 = 1 << 15;

/// What fetching a page costs, in thousandths of computing one at the root, by tier that it comes to: 131,072 bytes a token
/// over 25 GB/s from the host, and 4 GB/s more from a store, against 20 us. See docs/EVICTION.md.
const FETCH_PERMILLE: [u32; 2] = [262, 1_900];

/// Of two tiers at most one page in so many is room that LRU would not have either, as it lies on both. Under LRU 1 to 4 % of
/// exclusive tiers do, under this order 2 to 5 %; what is more is its own fault.
const DOUBLED_ONE_IN: u64 = 32;

/// The pages of a new node by name.
#[derive(Clone, Copy)]
pub(super) struct Names<'a> {
    pub(super) ns: NamespaceId,
    /// Of the first page, which is known.
    pub(super) first: u64,
    pub(super) tokens: &'a [u32],
    pub(super) page_size: usize,
    pub(super) overlap: usize,
}

impl Names<'_> {
    fn page(&self, page: u32) -> &[u32] {
        let start = page as usize * self.page_size;
        &self.tokens[start..start + self.page_size + self.overlap]
    }

    /// Name of a page, by its number from the start of the node.
    #[inline]
    fn of(&self, page: u32) -> u64 {
        if page == 0 { self.first } else { page_name(self.ns, self.page(page)) }
    }

    /// What a page that ends something is known by.
    #[inline]
    fn end(&self, page: u32) -> u32 {
        end_name(self.page(page))
    }
}

/// What a page that ends something is known by: its last tokens are enough to tell a whole return from a part. Never 0.
#[inline]
pub(super) fn end_name(page: &[u32]) -> u32 {
    let last = &page[page.len().saturating_sub(4)..];
    let pair = |i: usize| {
        let token = |i: usize| u64::from(last.get(i).copied().unwrap_or(0));
        token(i) | token(i + 1) << 32
    };
    (fold(pair(0) ^ 0xA076_1D64_78BD_642F, pair(2) ^ 0xE703_7ED1_A0B4_28DB) as u32).max(1)
}

/// How to order victims.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AdaptiveConfig {
    /// Most pages of memory that the tree's order decides about: those of the device, or with a host tier those of the host
    /// (inclusive) or of both (exclusive, or write-back). Ages are seen on this scale, and LRU in this much memory is what is never
    /// lost against.
    pub capacity_pages: u64,
    /// Pages of the device alone.
    pub device_pages: u64,
    /// Pages of the host tier; what lies on both is room that neither this order nor LRU has.
    pub host_pages: u64,
    /// Most evicted nodes remembered, where the memory holds a quarter as many leaves or more; otherwise they are about four times
    /// those leaves, 2,048 at least.
    pub ghosts_max: usize,
    /// Depth, in pages, at which a page costs twice as much to compute again as at the root, because attention looks
    /// back over all of it. What is maximised is work saved. 0: all pages cost the same, hits are maximised.
    pub cost_knee_pages: u32,
    /// What bringing a page to the device and to the host from the next tier costs, in thousandths of computing a page at the
    /// root. A leaf of the device that the host holds counts for that share, a quarter at least, of what one does that would have to
    /// be computed: the host may have lost it by the time it is asked for. A leaf of the host that the store holds is worth
    /// no more than a fetch.
    pub fetch_permille: [u32; 2],
    /// False: the learned order rules everything always.
    pub guard: bool,
    /// Bit `i` silences signal `i` of [`SIGNAL_NAMES`], for ablations. 0 in service.
    pub silenced: u16,
}

impl AdaptiveConfig {
    /// The defaults for `capacity_pages` of memory on one tier.
    #[must_use]
    pub fn new(capacity_pages: u64, page_tokens: u32) -> AdaptiveConfig {
        AdaptiveConfig {
            capacity_pages,
            device_pages: capacity_pages,
            host_pages: 0,
            ghosts_max: 1 << 17,
            cost_knee_pages: (KNEE_TOKENS / page_tokens.max(1)).max(1),
            fetch_permille: FETCH_PERMILLE,
            guard: true,
            silenced: 0,
        }
    }
}

/// What the scheduler knows of the use of a prefix.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hint {
    /// Tokens of the answer that was given.
    Answered(u32),
    /// The session is over: evicted first. Void when it is used again.
    Finished,
}

/// What the order says about itself.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AdaptiveStats {
    /// Leaves in the orders of device and host, those kept included.
    pub leaves: [usize; 2],
    /// Evicted nodes remembered.
    pub ghosts: usize,
    /// Uses that are followed.
    pub samples: usize,
    /// One in 2^k uses is a sample.
    pub sample_stage: u32,
    /// Share of the memory that the learned order rules, 0 to 1; in the rest LRU does.
    pub stake: f64,
    /// Pages hit more than LRU would have, capped above; see `guard`.
    pub lead_pages: i64,
    /// Pages hit so far, on any tier.
    pub hit_pages: u64,
    /// Pages that LRU would have hit in the same memory.
    pub lru_hit_pages: u64,
    /// Spread of the weights of each signal of [`SIGNAL_NAMES`]: how much it tells.
    pub spreads: [f32; SIGNALS],
    /// Gain of a fresh page of the least and of the most promising class, in uses per million pages of volume.
    pub gain_fresh: (f32, f32),
}

/// A ghost that a request has come upon and not yet gone through: its chunks are shorter.
#[derive(Clone, Copy, Debug)]
struct Carried {
    /// The newest chunk of the request.
    at: u32,
    ghost: Ghost,
    /// Pages of it that the request has, and how many of them LRU held.
    passed: u32,
    lru: u32,
}

/// The order. See the module. Nodes are named by their slots; times are ticks of the tree.
#[derive(Clone, Debug)]
pub(super) struct Adaptive {
    config: AdaptiveConfig,
    ages: Ages,
    scorer: Scorer,
    hazards: Hazards,
    samples: Samples,
    shadow: Shadow,
    guard: Guard,
    ghosts: Ghosts,
    /// Of the requests that run.
    carried: Vec<Carried>,
    marks: Vec<Mark>,
    tiers: [Cells; 2],
    /// By tier: leaves that are kept, the last to be used first.
    kept: [IndexHeap; 2],
    gains: Box<Gains>,
    /// Depths at which the next level of cost starts.
    levels: [u32; LEVELS - 1 - ROOT_LEVEL as usize],
    /// Levels that a copy on the host makes a leaf of the device cheaper.
    host_saves: u8,
    /// The dearest level of a leaf of the host that the store holds.
    store_level: u8,
    /// New uses so far.
    uses: u64,
    next_rebuild: u64,
    rebuilt_uses: u64,
    /// When samples are looked at next.
    look_at: u64,
    stake: f64,
    /// By tier: what was used from here on is safe from the learned order.
    safe: [u64; 2],
    hit_pages: u64,
    lru_hit_pages: u64,
    /// Share of a leaf that is used when it is not used whole.
    part: f32,
}

impl Adaptive {
    /// An order that knows nothing yet and therefore is LRU.
    pub(super) fn new(config: AdaptiveConfig) -> Adaptive {
        let ages = Ages::new(config.capacity_pages);
        let cells = Cells::new(ages);
        let knee = u64::from(config.cost_knee_pages);
        let [host, store] = config.fetch_permille.map(level_of);
        let mut adaptive = Adaptive {
            config,
            ages,
            scorer: Scorer::new(),
            hazards: Hazards::new(config.capacity_pages, ages),
            samples: Samples::new(),
            shadow: Shadow::new(config.capacity_pages),
            guard: Guard::new(config.capacity_pages, config.guard),
            ghosts: Ghosts::new(config.ghosts_max),
            carried: Vec::new(),
            marks: Vec::new(),
            tiers: [cells.clone(), cells],
            kept: Default::default(),
            gains: Box::new([[0.0; age::BINS]; cells::LISTS_ALL]),
            // Level k starts where a page costs 2^(k/2): knee * (2^(k/2) - 1).
            levels: [414, 1_000, 1_828, 3_000, 4_657].map(|m| (knee * m / 1_000).min(u32::MAX.into()) as u32),
            host_saves: ROOT_LEVEL.saturating_sub(host),
            store_level: store,
            uses: 0,
            next_rebuild: REBUILD_MIN,
            rebuilt_uses: 0,
            look_at: 0,
            stake: 0.0,
            safe: [0; 2],
            hit_pages: 0,
            lru_hit_pages: 0,
            part: 0.5,
        };
        adaptive.weigh();
        adaptive
    }

    // ---- what happens to nodes ----

    /// A node whose first page has this name will be made at this depth: its ghost is fetched, which took 7 % of a request
    /// that evicts and inserts.
    #[inline]
    pub(super) fn foresee(&self, first: u64, depth: u32) {
        self.ghosts.prefetch(place(first, depth));
    }

    /// A node was made below `parent` (`None`: the root). O(1) and the ghosts found.
    pub(super) fn created(&mut self, at: u32, parent: Option<u32>, leaf: &Leaf, names: Names<'_>) {
        if self.marks.len() <= at as usize {
            self.marks.resize(at as usize + 1, Mark::default());
        }
        let first = names.first;
        let up = parent.map_or(Mark::default(), |p| self.marks[p as usize]);
        let (known, past) = self.revive(at, parent, leaf, &names);
        let new_pages = (leaf.pages - known).min(u16::MAX.into()) as u16;
        let mut mark = Mark {
            start: place(first, leaf.depth),
            end: names.end(leaf.pages - 1),
            family: if parent.is_some() { up.family } else { 1 + (first >> 32) as u8 % 255 },
            fresh: true,
            uses: 1,
            base: leaf.depth,
            new_pages,
            ..Mark::default()
        };
        if let Some(past) = past {
            mark.uses = past.uses.saturating_add(1);
            mark.turn = past.turn.saturating_add(1);
            mark.mean_gap = mean_gap(past.mean_gap, past.uses, leaf.tick.saturating_sub(past.tick));
        }
        if let Some(parent) = parent {
            self.published(parent);
            // What goes on from a node that nobody has matched is the same request in chunks.
            let turn = if up.fresh { up.turn } else { up.turn.saturating_add(1) };
            mark.turn = mark.turn.max(turn);
            if up.fresh {
                mark.new_pages = up.new_pages.saturating_add(new_pages);
                mark.base = up.base;
                mark.answer = up.answer;
                mark.counted = up.counted;
                mark.sample = std::mem::replace(&mut self.marks[parent as usize].sample, NO_SAMPLE);
                if up.uses >= mark.uses {
                    (mark.uses, mark.mean_gap) = (up.uses, up.mean_gap);
                }
            }
        }
        self.marks[at as usize] = mark;
        self.shadow.add(leaf.tick, leaf.pages);
    }

    /// Digs up what was evicted of a new node: pages known, and the past of its first part. A ghost that is longer than the
    /// node is carried on to the next chunk of the request.
    fn revive(
        &mut self,
        at: u32,
        parent: Option<u32>,
        leaf: &Leaf,
        names: &Names<'_>,
    ) -> (u32, Option<Ghost>) {
        let (mut known, mut past) = (0, None);
        let mut carried = parent.and_then(|parent| self.take_carried(parent));
        while known < leaf.pages {
            let mut on = match carried.take() {
                Some(carried) => Carried { at, ..carried },
                None => {
                    let start = place(names.of(known), leaf.depth + known);
                    let Some(ghost) = self.ghosts.dig(start) else { break };
                    past = past.or(Some(ghost));
                    Carried { at, ghost, passed: 0, lru: 0 }
                }
            };
            let pages = (on.ghost.pages - on.passed).min(leaf.pages - known);
            on.lru += self.shadow.take(on.ghost.tick, pages);
            on.passed += pages;
            known += pages;
            if on.passed < on.ghost.pages {
                self.carried.push(on);
            } else if on.ghost.end == 0 || names.end(known - 1) == on.ghost.end {
                self.returned(&on, on.passed, leaf.tick);
            } else {
                known -= on.passed.min(known) - self.returned_in_part(&on, leaf.tick).min(known);
                break;
            }
        }
        (known, past)
    }

    /// So many pages of what was evicted are back, of those that the request went through.
    fn returned(&mut self, on: &Carried, pages: u32, now: u64) {
        let lru = u64::from(on.lru) * u64::from(pages) / u64::from(on.passed.max(1));
        self.lru_hit_pages += lru;
        self.guard.count(0, lru);
        self.answer(on.ghost.sample, now, pages as f32 / on.ghost.pages.max(1) as f32);
    }

    /// The start of what was evicted is back, nobody knows how much of it. Returns how many pages are supposed.
    fn returned_in_part(&mut self, on: &Carried, now: u64) -> u32 {
        let pages = ((on.ghost.pages as f32 * self.part) as u32).clamp(1, on.passed.max(1));
        self.returned(on, pages, now);
        pages
    }

    fn take_carried(&mut self, at: u32) -> Option<Carried> {
        let found = self.carried.iter().position(|c| c.at == at)?;
        Some(self.carried.swap_remove(found))
    }

    /// The node's request goes on no further.
    fn drop_carried(&mut self, at: u32, now: u64) {
        if let Some(on) = self.take_carried(at) {
            self.returned_in_part(&on, now);
        }
    }

    /// The same for all requests that are over: their last chunk is a leaf that can go.
    fn drop_all_carried(&mut self, now: u64) {
        let mut next = 0;
        while let Some(&on) = self.carried.get(next) {
            if self.marks[on.at as usize].standing || next >= CARRIED_MAX {
                self.carried.swap_remove(next);
                self.returned_in_part(&on, now);
            } else {
                next += 1;
            }
        }
    }

    /// A request's look-up used a node: the last use was at `tick`. Returns the pages that LRU would have hit. O(1).
    #[inline]
    pub(super) fn used(&mut self, tick: u64, now: u64, pages: u32) -> u32 {
        let lru = self.shadow.take(tick, pages);
        self.shadow.add(now, pages);
        lru
    }

    /// The node is a leaf of an order and was used: its use is answered. O(1).
    #[inline]
    pub(super) fn answered(&mut self, at: u32, now: u64) {
        let mark = &mut self.marks[at as usize];
        (mark.filed, mark.counted, mark.finished) = (false, false, false);
        let sample = std::mem::replace(&mut mark.sample, NO_SAMPLE);
        if sample != NO_SAMPLE {
            self.answer(sample, now, 1.0);
        }
    }

    /// True if a look-up that ends here repeats one that has led to nothing yet: a scheduler asks until a request can run.
    #[inline]
    pub(super) fn repeats(&self, at: u32) -> bool {
        self.marks[at as usize].looked_up
    }

    /// A request has published what it computed from the end of this node on, or up to it.
    #[inline]
    pub(super) fn published(&mut self, at: u32) {
        self.marks[at as usize].looked_up = false;
    }

    /// A look-up ended in this node; before that it was used at `tick`. O(1).
    #[inline]
    pub(super) fn ended(&mut self, at: u32, tick: u64, now: u64) {
        let mark = &mut self.marks[at as usize];
        (mark.fresh, mark.looked_up) = (false, true);
        mark.mean_gap = mean_gap(mark.mean_gap, mark.uses, now.saturating_sub(tick));
        mark.uses = mark.uses.saturating_add(1);
    }

    /// A look-up is over: pages that it hit, and that LRU would have hit; and pages that lie on both tiers now. O(1); lessons
    /// are amortised.
    pub(super) fn request(&mut self, now: u64, own_pages: u32, lru_pages: u32, doubled_pages: u32) {
        self.drop_all_carried(now);
        let AdaptiveConfig { capacity_pages, device_pages, host_pages, .. } = self.config;
        let memory = device_pages.saturating_add(host_pages);
        let doubled = u64::from(doubled_pages).min(memory / DOUBLED_ONE_IN);
        self.shadow.settle_in(capacity_pages.min(memory - doubled).max(1));
        self.hit_pages += u64::from(own_pages);
        self.lru_hit_pages += u64::from(lru_pages);
        self.guard.count(own_pages.into(), lru_pages.into());
        if now >= self.look_at {
            self.look_at = now + 2 * self.ages.quantum();
            self.teach(now);
            self.stake(now);
        }
        if self.uses >= self.next_rebuild {
            self.rebuild();
        }
    }

    /// What is safe from the learned order by now.
    fn stake(&mut self, now: u64) {
        self.stake = self.guard.stake(now);
        let AdaptiveConfig { capacity_pages, device_pages, .. } = self.config;
        let safe = |pages: u64| self.shadow.newest((pages as f64 * (1.0 - self.stake)) as u64);
        let device = safe(device_pages);
        self.safe = [device, if capacity_pages == device_pages { device } else { safe(capacity_pages) }];
    }

    /// A touch or the release of a lock moves a node's last use from one time to a later one. O(1), O(log) where that is
    /// in the past.
    #[inline]
    pub(super) fn renew(&mut self, ticks: (u64, u64), pages: u32) {
        self.shadow.renew(ticks, pages);
    }

    /// `prefix` has become the first `leaf.pages` pages of what was `suffix`; `name` is that of the first page of the
    /// suffix, `end` what the last page of the prefix is known by. The prefix is in no order, the
    /// suffix stays where it is. O(1).
    pub(super) fn split(&mut self, prefix: u32, suffix: u32, suffix_depth: u32, name: u64, end: u32) {
        if self.marks.len() <= prefix as usize {
            self.marks.resize(prefix as usize + 1, Mark::default());
        }
        let old = &mut self.marks[suffix as usize];
        // Of a prompt that nobody has matched the rest is scored again. With its class kept the guard did not hold on the
        // synthetic trace at 1M: 15.20 against 15.36 of LRU.
        let filed = old.filed && !old.fresh;
        let upper = Mark { end, standing: false, cut: false, tail: 0, looked_up: false, filed, ..*old };
        // The use goes with the part that is used or stays.
        old.sample = NO_SAMPLE;
        old.start = place(name, suffix_depth);
        self.marks[prefix as usize] = upper;
    }

    /// Only the first `kept` of `all` pages of a leaf are used: they have become `prefix`. O(1).
    pub(super) fn used_in_part(&mut self, prefix: u32, suffix: u32, kept: u32, all: u32) {
        let part = kept as f32 / all.max(1) as f32;
        self.part += 0.05 * (part - self.part);
        if let Some(sample) = self.samples.get(self.marks[prefix as usize].sample) {
            sample.pages = ((sample.pages as f32 * part) as u32).max(1);
        }
        let rest = &mut self.marks[suffix as usize];
        (rest.filed, rest.counted) = (false, false);
    }

    /// `upper` and `lower` have become `lower`; they were used last at these ticks. O(1).
    pub(super) fn merged(&mut self, upper: u32, lower: u32, pages: u32, ticks: (u64, u64)) {
        self.drop_carried(upper, ticks.1);
        let up = self.marks[upper as usize];
        let low = &mut self.marks[lower as usize];
        if low.sample == NO_SAMPLE {
            low.sample = up.sample;
        } else {
            self.samples.close(up.sample);
        }
        low.start = up.start;
        low.turn = low.turn.max(up.turn);
        if up.uses > low.uses {
            (low.uses, low.mean_gap) = (up.uses, up.mean_gap);
        }
        self.shadow.shift(ticks, pages);
    }

    /// True if two times of use are too close to be told apart.
    pub(super) fn alike(&self, a: u64, b: u64) -> bool {
        a.abs_diff(b) < self.ages.quantum()
    }

    /// The node was cut off what lies above it, to be evicted by itself. O(1).
    pub(super) fn cut(&mut self, at: u32) {
        self.marks[at as usize].cut = true;
    }

    /// A node is gone from all tiers. It is in no order. Of what is evicted piece by piece there is one ghost. O(1).
    pub(super) fn evicted(&mut self, at: u32, parent: Option<u32>, tick: u64, pages: u32) {
        self.drop_carried(at, tick);
        let Mark { start, end, tail, cut, sample, mean_gap, uses, turn, .. } = self.marks[at as usize];
        if start != 0 {
            let mut ghost = Ghost { tick, end, pages, sample, mean_gap, uses, turn, ..Ghost::NONE };
            if tail != 0
                && let Some(more) = self.ghosts.dig_if(tail, |more| more.tick == tick)
            {
                (ghost.pages, ghost.end) = (pages.saturating_add(more.pages), more.end);
            }
            let leaves = self.leaves().iter().sum();
            self.ghosts.bury(start, ghost, leaves);
            if let Some(parent) = parent.filter(|_| cut) {
                self.marks[parent as usize].tail = start;
            }
        }
        self.marks[at as usize] = Mark::default();
    }

    /// What the scheduler knows of a node. It is in no order: it leaves before and enters after. O(1).
    pub(super) fn hint(&mut self, at: u32, hint: Hint) {
        let mark = &mut self.marks[at as usize];
        match hint {
            Hint::Answered(tokens) => {
                let answer = half_octave(tokens.into()) as u8;
                mark.filed &= answer == mark.answer;
                mark.answer = answer;
            }
            Hint::Finished => mark.finished = true,
        }
    }

    // ---- the orders ----

    /// Files a leaf in the order of a tier. A use that is new is scored, and followed if its turn comes. O(signals).
    pub(super) fn enter(&mut self, nodes: &mut [Node], tier: Tier, at: u32, leaf: &Leaf, now: u64) {
        if !self.marks[at as usize].filed {
            self.file(at, leaf, now);
        }
        if leaf.kept.is_none() && self.enter_again(nodes, tier, at, (leaf.tick, leaf.copied), now) {
            return;
        }
        let mark = &mut self.marks[at as usize];
        (mark.tick, mark.standing, mark.copied, mark.filed) = (leaf.tick, true, leaf.copied, false);
        if let Some(turn) = leaf.kept {
            mark.list = KEPT;
            return self.kept[index(tier)].set(at, (Turn::MAX - turn, leaf.tick));
        }
        mark.list = FINISHED;
        self.tiers[index(tier)].enter(nodes, &self.marks, at, now, &self.gains);
    }

    /// The same for a leaf that nothing keeps, last used at a tick and held by the next tier or not, if nothing has to be learned
    /// of it. False if there has. O(1).
    #[inline]
    pub(super) fn enter_again(
        &mut self,
        nodes: &mut [Node],
        tier: Tier,
        at: u32,
        (tick, copied): (u64, bool),
        now: u64,
    ) -> bool {
        let mark = &mut self.marks[at as usize];
        if !mark.filed || mark.finished {
            return false;
        }
        (mark.tick, mark.standing, mark.copied) = (tick, true, copied);
        let level = match tier {
            _ if !copied => mark.level,
            Tier::Device => mark.level.saturating_sub(self.host_saves),
            _ => mark.level.min(self.store_level),
        };
        mark.list = mark.class * LEVELS as u8 + level;
        self.tiers[index(tier)].enter(nodes, &self.marks, at, now, &self.gains);
        true
    }

    /// True if the node stands where a use at `tick` belongs.
    #[inline]
    pub(super) fn settled(&self, at: u32, tick: u64) -> bool {
        let mark = &self.marks[at as usize];
        mark.standing && mark.filed && mark.tick == tick
    }

    /// False if the node stands as what the next tier holds and it does not, or the other way round.
    #[inline]
    pub(super) fn stands_as(&self, at: u32, copied: bool) -> bool {
        self.marks.get(at as usize).is_none_or(|mark| !mark.standing || mark.copied == copied)
    }

    /// Takes a leaf out of the order of a tier, if it stands in it. O(1).
    #[inline]
    pub(super) fn leave(&mut self, nodes: &mut [Node], tier: Tier, at: u32) {
        let mark = &mut self.marks[at as usize];
        if std::mem::replace(&mut mark.standing, false) {
            // The chunks of a request that runs enter one by one, before they are locked; it is the whole that counts.
            mark.filed &= !mark.fresh;
            match mark.list {
                KEPT => _ = self.kept[index(tier)].remove(at),
                _ => self.tiers[index(tier)].leave(nodes, mark, at),
            }
        }
    }

    /// The next victim of a tier. O(1): at most 64 steps.
    pub(super) fn first(&mut self, nodes: &mut [Node], tier: Tier, now: u64) -> Option<u32> {
        let tier = index(tier);
        let found = self.tiers[tier].first(nodes, &self.marks, now, &self.gains, self.safe[tier]);
        found.or_else(|| self.kept[tier].peek())
    }

    /// What is known of a node will be read soon.
    #[inline]
    pub(super) fn prefetch(&self, at: u32) {
        if let Some(mark) = self.marks.get(at as usize) {
            prefetch(mark);
        }
    }

    /// Shows the leaves of a tier in the order in which they would go, until `show` says stop.
    pub(super) fn ahead(&self, nodes: &[Node], tier: Tier, mut show: impl FnMut(u32) -> bool) {
        let tier = index(tier);
        if self.tiers[tier].ahead(nodes, &self.gains, self.safe[tier], &mut show) {
            let _ = self.kept[tier].in_order().all(show);
        }
    }

    /// Leaves of a tier, each with whether it stands where its mark says: for `sanity`.
    pub(super) fn members(&self, nodes: &[Node], tier: Tier) -> Vec<(u32, bool)> {
        let mut found = Vec::new();
        self.tiers[index(tier)].for_each(nodes, &self.marks, |at, sound| found.push((at, sound)));
        let kept = self.kept[index(tier)].in_order();
        found.extend(kept.map(|at| (at, self.marks[at as usize].list == KEPT)));
        found
    }

    fn file(&mut self, at: u32, leaf: &Leaf, now: u64) {
        let mark = &self.marks[at as usize];
        let mut signals = Signals::new(leaf, mark);
        if self.config.silenced != 0 {
            (0..SIGNALS).filter(|s| self.config.silenced >> s & 1 == 1).for_each(|s| signals.silence(s));
        }
        let class = self.scorer.classify(&signals, leaf.pages);
        let level = usize::from(ROOT_LEVEL) + self.levels.iter().filter(|&&start| mark.base > start).count();
        let sample = mark.sample;
        let mark = &mut self.marks[at as usize];
        (mark.class, mark.level, mark.filed) = (class, level as u8, true);
        if let Some(sample) = self.samples.get(sample) {
            // More is known of the use than when it began.
            if sample.octave == 0 {
                (sample.class, sample.signals, sample.pages) = (class, signals, leaf.pages);
            }
        } else if !std::mem::replace(&mut mark.counted, true) {
            self.uses += 1;
            if self.samples.wants() {
                let age = now.saturating_sub(leaf.tick);
                mark.sample = self.samples.push(leaf.tick, age, leaf.pages, class, signals, self.ages);
            }
        }
    }

    /// Leaves in the orders of device and host.
    fn leaves(&self) -> [usize; 2] {
        [0, 1].map(|tier| self.tiers[tier].len() + self.kept[tier].len())
    }

    // ---- lessons ----

    /// `part` of a followed use is used again.
    fn answer(&mut self, sample: u32, now: u64, part: f32) {
        let Some(Sample { pages, tick, signals, class, octave, .. }) = self.samples.close(sample) else {
            return;
        };
        let pages = ((pages as f32 * part) as u32).max(1);
        let bin = self.ages.bin(now.saturating_sub(tick));
        let times = f64::from(pages) * self.times();
        // Bins of its octave that it passed, and lessons that were due but not given yet.
        for passed in first_bin(octave.into())..bin {
            self.hazards.passed(class, passed, times);
        }
        self.hazards.used(class, bin, times);
        self.scorer.learn(&signals, bin.div_ceil(2), pages, true);
    }

    fn teach(&mut self, now: u64) {
        let times = self.times();
        let Adaptive { samples, hazards, scorer, ages, .. } = self;
        samples.cross(now, *ages, |s| {
            let octave = usize::from(s.octave);
            for bin in first_bin(octave)..first_bin(octave + 1).min(age::BINS) {
                hazards.passed(s.class, bin, f64::from(s.pages) * times);
            }
            scorer.learn(&s.signals, octave, s.pages, false);
        });
    }

    /// Uses that a sample stands for.
    fn times(&self) -> f64 {
        f64::from(1u32 << self.samples.stage())
    }

    fn rebuild(&mut self) {
        let rounds = (self.uses - self.rebuilt_uses).div_ceil(64);
        let (mut fade, mut fade_scores) = (1.0, 1.0);
        (0..rounds).for_each(|_| (fade, fade_scores) = (fade * FADE, fade_scores * FADE_SCORES));
        self.rebuilt_uses = self.uses;
        self.next_rebuild = self.uses + (self.uses / 32).clamp(REBUILD_MIN, REBUILD_MAX);
        self.hazards.fade(fade);
        self.scorer.rebuild(fade as f32, fade_scores as f32);
        self.hazards.rebuild(self.ages);
        self.weigh();
    }

    /// Gains times costs.
    fn weigh(&mut self) {
        let costs = costs(self.config.cost_knee_pages);
        for (list, gains) in self.gains[..cells::LISTS].iter_mut().enumerate() {
            let (class, cost) = (list / LEVELS, costs[list % LEVELS]);
            for (bin, gain) in gains.iter_mut().enumerate() {
                *gain = (self.hazards.gain(class as u8, bin) * cost) as f32;
            }
        }
        self.gains[usize::from(FINISHED)] = [-1.0; age::BINS];
        self.tiers.iter_mut().for_each(Cells::all_dirty);
    }

    /// How it is going. O(ghosts + weights).
    pub(super) fn stats(&self) -> AdaptiveStats {
        let fresh = |class| (self.hazards.gain(class, 0) * 1e6) as f32;
        AdaptiveStats {
            leaves: self.leaves(),
            ghosts: self.ghosts.len(),
            samples: self.samples.len(),
            sample_stage: self.samples.stage(),
            stake: self.stake,
            lead_pages: self.guard.lead_pages(),
            hit_pages: self.hit_pages,
            lru_hit_pages: self.lru_hit_pages,
            spreads: self.scorer.spreads(),
            gain_fresh: (fresh(0), fresh(CLASSES as u8 - 1)),
        }
    }
}

/// What a page costs by level, 1 at the root; without a knee the same at every depth.
fn costs(knee_pages: u32) -> [f64; LEVELS] {
    let mut costs = [1.0; LEVELS];
    (0..usize::from(ROOT_LEVEL)).rev().for_each(|level| costs[level] = costs[level + 1] / ROOT_2);
    if knee_pages > 0 {
        (usize::from(ROOT_LEVEL) + 1..LEVELS).for_each(|level| costs[level] = costs[level - 1] * ROOT_2);
    }
    costs
}

/// The level whose cost is nearest, as a ratio.
fn level_of(permille: u32) -> u8 {
    let cost = f64::from(permille) / 1_000.0;
    let middles = costs(1).windows(2).filter(|pair| cost * cost > pair[0] * pair[1]).count();
    middles as u8
}

fn index(tier: Tier) -> usize {
    usize::from(tier != Tier::Device)
}

/// First bin of an octave.
fn first_bin(octave: usize) -> usize {
    (2 * octave).saturating_sub(1)
}

/// Name of a page at a depth; never 0.
fn place(name: u64, depth: u32) -> u64 {
    (name ^ u64::from(depth).wrapping_mul(0x9E37_79B9_7F4A_7C15)).max(1)
}

/// The mean after one more gap.
fn mean_gap(mean: u32, gaps: u8, gap: u64) -> u32 {
    let gap = gap.min(u32::MAX.into()) as i64;
    let mean = i64::from(mean);
    (mean + (gap - mean) / i64::from(gaps.max(1))) as u32
}
