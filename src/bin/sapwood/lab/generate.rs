//! Workloads unlike the published traces, from a seed. Times are in microseconds of the scheduler's clock.
//!
//! Every text is a chain of spans of whole pages, so a follow-up shares exactly what a page-granular cache could share.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::work::{Builder, Span, Work};

/// Which workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Kind {
    /// Multi-turn chats, think times log-normal around 60 s.
    Chats,
    /// Tool agents: bursts of calls seconds apart, then silence, sometimes another burst.
    Agents,
    /// Questions about shared documents of very different popularity.
    Documents,
    /// Sweeps over a fixed set of prompts, again and again, in order: the worst case of LRU.
    Sweeps,
    /// Many system prompts; of some the chats go on, of others they never do.
    Families,
    /// Chats, and as much again of long prompts that never return.
    Scans,
    /// Chats whose habits turn around every so often: long answers mean "goes on", then "is over".
    Flips,
    /// Uniformly random revisits: nothing can be learned.
    Noise,
    /// Prompts come back exactly once, soon, whatever their past: every lesson of an earlier use is wrong.
    Echoes,
    /// All of the first five at once.
    Mixed,
}

/// splitmix64.
#[derive(Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in 0..1.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn below(&mut self, n: u64) -> u64 {
        (self.unit() * n as f64) as u64
    }

    fn chance(&mut self, p: f64) -> bool {
        self.unit() < p
    }

    /// Log-normal by median and sigma of the logarithm.
    fn log_normal(&mut self, median: f64, sigma: f64) -> f64 {
        let (u, v) = (1.0 - self.unit(), self.unit());
        median * (sigma * (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()).exp()
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.unit()).ln()
    }

    /// An item of 0..n, the k-th with weight 1/(k+1).
    fn zipf(&mut self, n: u64) -> u64 {
        (((n + 1) as f64).powf(self.unit()) - 1.0) as u64 % n
    }
}

/// Something that sends requests: what it says next, and when it speaks again.
#[derive(Clone)]
struct Source {
    kind: Kind,
    spans: Vec<Span>,
    turn: u32,
    /// What the source is about: family, document, item of a sweep.
    topic: u64,
    /// Requests left in a burst, or in all.
    left: u32,
    /// Another burst may come.
    again: bool,
}

struct World {
    random: Random,
    fresh: u64,
    page_tokens: u32,
    sources: Vec<Source>,
    /// (time, order of birth, source).
    agenda: BinaryHeap<Reverse<(u64, u64, usize)>>,
    births: u64,
}

const SECOND: f64 = 1e6;
/// Prompts of a sweep, of 60 pages each: 1.5 M tokens with pages of 64.
const SWEEP_ITEMS: u64 = 400;

impl World {
    fn fresh(&mut self, pages: u32) -> Span {
        self.fresh += 1;
        Span { id: self.fresh, pages }
    }

    fn pages(&mut self, median_tokens: f64, sigma: f64) -> u32 {
        let tokens = self.random.log_normal(median_tokens, sigma).min(120_000.0);
        (tokens / f64::from(self.page_tokens)).ceil() as u32
    }

    fn at(&mut self, time: u64, source: usize) {
        self.births += 1;
        self.agenda.push(Reverse((time, self.births, source)));
    }

    /// A shared text: the same id and length each time.
    fn shared(kind: Kind, topic: u64, pages: u32) -> Span {
        Span { id: (1 << 63) | ((kind as u64) << 56) | topic, pages }
    }

    fn open(&mut self, kind: Kind) -> Source {
        let mut source = Source { kind, spans: Vec::new(), turn: 0, topic: 0, left: 0, again: false };
        match kind {
            Kind::Chats | Kind::Scans | Kind::Flips => source.spans.push(Self::shared(Kind::Chats, 0, 16)),
            Kind::Families => {
                source.topic = self.random.zipf(200);
                source.spans.push(Self::shared(kind, source.topic, 16 + (source.topic * 7 % 96) as u32));
            }
            Kind::Agents => {
                source.spans.push(Self::shared(kind, self.random.below(4), 64));
                source.left = 3 + self.random.exponential(12.0) as u32;
                source.again = self.random.chance(0.3);
            }
            Kind::Documents => {
                source.topic = self.random.zipf(2_000);
                let pages = 100 + (source.topic.wrapping_mul(0x9E37_79B9) >> 7) % 900;
                source.spans.push(Self::shared(kind, source.topic, pages as u32));
            }
            Kind::Echoes => source.left = 1,
            Kind::Sweeps | Kind::Noise | Kind::Mixed => {}
        }
        source
    }

    /// Does a chat of this kind go on, given the answer's length?
    fn goes_on(&mut self, source: &Source, answer: u32, now: u64) -> bool {
        let p = match source.kind {
            Kind::Families => {
                if source.topic.is_multiple_of(3) {
                    0.75
                } else {
                    0.03
                }
            }
            Kind::Flips => {
                // Every 400 s the meaning of a long answer turns around.
                let long_means_more = ((now as f64 / (400.0 * SECOND)) as u64).is_multiple_of(2);
                if (answer > 300) == long_means_more { 0.85 } else { 0.05 }
            }
            _ => (0.35 + 0.08 * f64::from(source.turn)).min(0.8),
        };
        self.random.chance(p)
    }

    /// One request of a source: its new text, its answer's tokens, and after how long it speaks again, if it does.
    fn speak(&mut self, source: &mut Source, now: u64) -> (u32, Option<f64>) {
        match source.kind {
            Kind::Chats | Kind::Families | Kind::Flips | Kind::Scans => {
                let first = source.turn == 0;
                let pages = self.pages(if first { 3_000.0 } else { 300.0 }, if first { 1.3 } else { 1.0 });
                let answer = self.random.log_normal(300.0, 0.8).min(4_000.0) as u32;
                source.spans.push(self.fresh(pages + answer / self.page_tokens));
                let on = self.goes_on(source, answer, now);
                (answer, on.then(|| self.random.log_normal(60.0, 1.1) * SECOND))
            }
            Kind::Agents => {
                let (pages, answer) = (self.pages(1_200.0, 1.0), 40 + self.random.below(200) as u32);
                source.spans.push(self.fresh(pages));
                if source.left > 0 {
                    source.left -= 1;
                    return (answer, Some(self.random.log_normal(3.0, 0.8) * SECOND));
                }
                let again = std::mem::take(&mut source.again);
                source.left = 4;
                (answer, again.then(|| self.random.log_normal(240.0, 0.8) * SECOND))
            }
            Kind::Documents => {
                source.spans.push(self.fresh(2));
                (60 + self.random.below(200) as u32, None)
            }
            Kind::Sweeps => {
                source.spans = vec![Self::shared(Kind::Sweeps, source.topic % SWEEP_ITEMS, 60)];
                source.topic += 1;
                (16, Some(0.4 * SECOND))
            }
            Kind::Noise => {
                source.spans = vec![Self::shared(Kind::Noise, self.random.below(3_000), 60)];
                (100, None)
            }
            Kind::Echoes => {
                if source.left == 1 {
                    let pages = self.pages(4_000.0, 0.7);
                    source.spans.push(self.fresh(pages));
                }
                let again = source.left == 1;
                source.left = 0;
                (100, again.then(|| self.random.log_normal(8.0, 0.4) * SECOND))
            }
            Kind::Mixed => (0, None),
        }
    }
}

/// Seconds between two new sources, which sets the load: 3 to 5 requests a second, as in the conversation trace.
fn pace(kind: Kind) -> f64 {
    match kind {
        Kind::Chats | Kind::Flips => 0.5,
        Kind::Scans => 0.6,
        Kind::Agents => 4.0,
        Kind::Documents | Kind::Noise => 0.3,
        Kind::Families => 0.4,
        Kind::Echoes => 0.5,
        Kind::Sweeps | Kind::Mixed => f64::INFINITY,
    }
}

/// Makes `requests` requests.
pub(crate) fn generate(kind: Kind, seed: u64, requests: usize, page_tokens: u32) -> Work {
    let seed = seed.wrapping_mul(0x1000_0000_01B3).wrapping_add(kind as u64);
    let mut world = World {
        random: Random::new(seed),
        fresh: 0,
        page_tokens,
        sources: Vec::new(),
        agenda: BinaryHeap::new(),
        births: 0,
    };
    let parts: &[Kind] = match &kind {
        Kind::Mixed => &[Kind::Chats, Kind::Agents, Kind::Documents, Kind::Sweeps, Kind::Families],
        one => std::slice::from_ref(one),
    };
    let spread = parts.len() as f64;
    for &part in parts {
        if part == Kind::Sweeps {
            let source = world.open(part);
            world.sources.push(source);
            world.at(0, world.sources.len() - 1);
        }
    }
    let mut next_birth: Vec<f64> =
        parts.iter().map(|&p| world.random.exponential(pace(p) * spread * SECOND)).collect();
    let mut builder = Builder::new();
    let (mut made, mut spans) = (0, Vec::new());
    while made < requests {
        let soonest = (0..parts.len()).min_by(|&a, &b| next_birth[a].total_cmp(&next_birth[b])).unwrap_or(0);
        let agenda = world.agenda.peek().map_or(f64::INFINITY, |Reverse((at, ..))| *at as f64);
        let (now, id) = if next_birth[soonest] < agenda {
            let now = next_birth[soonest] as u64;
            next_birth[soonest] += world.random.exponential(pace(parts[soonest]) * spread * SECOND);
            let source = world.open(parts[soonest]);
            world.sources.push(source);
            (now, world.sources.len() - 1)
        } else {
            let Some(Reverse((now, _, id))) = world.agenda.pop() else { break };
            (now, id)
        };
        // A long prompt that never returns comes with every request of the scanned chats.
        if parts[0] == Kind::Scans {
            let pages = world.pages(6_000.0, 0.5);
            spans.clear();
            spans.push(world.fresh(pages));
            builder.push(now, pages * page_tokens, 200, &spans);
            made += 1;
        }
        let mut source = std::mem::replace(&mut world.sources[id], blank(kind));
        let (answer, again) = world.speak(&mut source, now);
        let pages: u32 = source.spans.iter().map(|s| s.pages).sum();
        builder.push(now, pages * page_tokens + 1, answer, &source.spans);
        made += 1;
        source.turn += 1;
        if let Some(after) = again.filter(|_| pages * page_tokens < 150_000) {
            world.at(now + after as u64, id);
            world.sources[id] = source;
        }
    }
    let name =
        clap::ValueEnum::to_possible_value(&kind).map_or_else(String::new, |v| v.get_name().to_owned());
    builder.build(&name, page_tokens)
}

fn blank(kind: Kind) -> Source {
    Source { kind, spans: Vec::new(), turn: 0, topic: 0, left: 0, again: false }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    #[test]
    fn a_seed_makes_the_same_workload() {
        for &kind in Kind::value_variants() {
            let digest = |seed| {
                let work = generate(kind, seed, 600, 64);
                let jobs: Vec<_> =
                    work.jobs.iter().map(|j| (j.at_us, j.input_tokens, j.output_tokens)).collect();
                (jobs, work.nodes.len(), work.unlimited())
            };
            assert_eq!(digest(1), digest(1), "{kind:?}");
            if kind != Kind::Sweeps {
                assert_ne!(digest(1), digest(2), "{kind:?}");
            }
        }
    }

    #[test]
    fn arrivals_are_in_order_and_something_returns() {
        for &kind in Kind::value_variants() {
            let work = generate(kind, 7, 3_000, 64);
            assert!(work.jobs.len() >= 3_000);
            assert!(work.jobs.is_sorted_by_key(|j| j.at_us), "{kind:?}");
            let hits = work.percent(work.unlimited());
            assert!((5.0..99.5).contains(&hits), "{kind:?}: {hits}");
        }
    }
}
