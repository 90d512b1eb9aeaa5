//! The policies that are compared, each as an order of leaves.

use sapwood::base::heap::HeapKey;
use sapwood::tree::Policy as Order;
use sapwood::tree::adaptive::{AdaptiveConfig, SIGNAL_NAMES};

use super::optimum;
use super::sim::{Now, Policy};
use super::work::{Step, Work};

/// Which policy, as named on the command line.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    /// Least recently used: SGLang, vLLM, KVBM.
    Lru,
    /// The same in the tree itself, where whole nodes count as used.
    TreeLru,
    /// In order of arrival on the tier.
    Fifo,
    /// Fewest uses while resident, then LRU.
    Lfu,
    /// The same with ageing: a newcomer starts at the count of the last victim.
    LfuAged,
    /// Used twice before used once, then LRU.
    Slru,
    /// By the use before the last, so that one use counts little.
    Lru2,
    /// Ours.
    Adaptive(Options),
    /// Knows of each node whether it is used again, but not when; LRU among equals. What a perfect guess of *who*
    /// would bring.
    Whether,
    /// LRU, but what the next requests will use is kept: what a scheduler's queue of that length tells.
    Queue(u32),
    /// The same with our order in the place of LRU.
    AdaptiveQueue(u32),
}

/// Variants of ours, for measurements.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub(crate) struct Options {
    pub(crate) unguarded: bool,
    /// Every page counts the same, whatever it costs to compute again.
    pub(crate) flat: bool,
    /// Bit by signal.
    pub(crate) silenced: u16,
}

/// Why a name is no policy.
#[derive(Debug, thiserror::Error)]
#[error(
    "no policy {0:?}; there are lru, tree-lru, fifo, lfu, lfu-aged, slru, lru2, adaptive, adaptive-unguarded, adaptive-flat, \
     adaptive-without-SIGNAL ({signals}), whether, queue-N and adaptive-queue-N", signals = SIGNAL_NAMES.join(", ")
)]
pub(crate) struct UnknownPolicy(String);

impl std::str::FromStr for Kind {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Kind, UnknownPolicy> {
        let unknown = || UnknownPolicy(name.to_owned());
        let length = |n: &str| n.parse().ok().filter(|&n| n <= 65_536).ok_or_else(unknown);
        Ok(match name {
            "lru" => Kind::Lru,
            "tree-lru" => Kind::TreeLru,
            "fifo" => Kind::Fifo,
            "lfu" => Kind::Lfu,
            "lfu-aged" => Kind::LfuAged,
            "slru" => Kind::Slru,
            "lru2" => Kind::Lru2,
            "whether" => Kind::Whether,
            "adaptive" => Kind::Adaptive(Options::default()),
            "adaptive-unguarded" => Kind::Adaptive(Options { unguarded: true, ..Options::default() }),
            "adaptive-flat" => Kind::Adaptive(Options { flat: true, ..Options::default() }),
            _ => {
                if let Some(signal) = name.strip_prefix("adaptive-without-") {
                    let at = SIGNAL_NAMES.iter().position(|&s| s == signal).ok_or_else(unknown)?;
                    Kind::Adaptive(Options { silenced: 1 << at, ..Options::default() })
                } else if let Some(n) = name.strip_prefix("adaptive-queue-") {
                    Kind::AdaptiveQueue(length(n)?)
                } else {
                    Kind::Queue(name.strip_prefix("queue-").map_or(Err(unknown()), length)?)
                }
            }
        })
    }
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Kind::Lru => f.write_str("lru"),
            Kind::TreeLru => f.write_str("tree-lru"),
            Kind::Fifo => f.write_str("fifo"),
            Kind::Lfu => f.write_str("lfu"),
            Kind::LfuAged => f.write_str("lfu-aged"),
            Kind::Slru => f.write_str("slru"),
            Kind::Lru2 => f.write_str("lru2"),
            Kind::Whether => f.write_str("whether"),
            Kind::Queue(n) => write!(f, "queue-{n}"),
            Kind::AdaptiveQueue(n) => write!(f, "adaptive-queue-{n}"),
            Kind::Adaptive(o) => {
                f.write_str("adaptive")?;
                if o.unguarded {
                    f.write_str("-unguarded")?;
                }
                if o.flat {
                    f.write_str("-flat")?;
                }
                match o.silenced.checked_ilog2() {
                    Some(at) => write!(f, "-without-{}", SIGNAL_NAMES[at as usize]),
                    None => Ok(()),
                }
            }
        }
    }
}

/// The order and the length of the queue of a policy that runs in the tree itself; `None` for those of the simulation.
pub(crate) fn live(kind: Kind, work: &Work, capacity: u64, knee_pages: u32) -> Option<(Order, usize)> {
    let adaptive = |options: Options| {
        Order::Adaptive(AdaptiveConfig {
            guard: !options.unguarded,
            cost_knee_pages: if options.flat { 0 } else { knee_pages },
            silenced: options.silenced,
            ..AdaptiveConfig::new(capacity, work.page_tokens)
        })
    };
    match kind {
        Kind::TreeLru => Some((Order::Lru, 0)),
        Kind::Adaptive(options) => Some((adaptive(options), 0)),
        Kind::AdaptiveQueue(length) => Some((adaptive(Options::default()), length as usize)),
        _ => None,
    }
}

/// Makes a policy for a tier (or tiers) of `capacity` pages.
pub(crate) fn make(kind: Kind, work: &Work) -> Box<dyn Policy> {
    let simple = |rule| Box::new(Simple::new(work, rule));
    match kind {
        Kind::Lru => simple(Rule::Lru),
        Kind::Fifo => simple(Rule::Fifo),
        Kind::Lfu => simple(Rule::Lfu { aged: false }),
        Kind::LfuAged => simple(Rule::Lfu { aged: true }),
        Kind::Slru => simple(Rule::Slru),
        Kind::Lru2 => simple(Rule::Lru2),
        Kind::Whether => Box::new(Whether { order: Simple::new(work, Rule::Lru), again: again(work) }),
        Kind::Queue(length) => Box::new(Queue::new(work, simple(Rule::Lru), length)),
        // These run in the tree: see `live`.
        Kind::TreeLru | Kind::Adaptive(_) | Kind::AdaptiveQueue(_) => simple(Rule::Lru),
    }
}

#[derive(Clone, Copy)]
enum Rule {
    Lru,
    Fifo,
    Lfu { aged: bool },
    Slru,
    Lru2,
}

/// What the simple orders keep of a node.
#[derive(Clone, Copy, Default)]
struct Past {
    last: u64,
    before: u64,
    came: u64,
    uses: u64,
}

struct Simple {
    rule: Rule,
    past: Vec<Past>,
    tick: u64,
    /// Uses of the last victim.
    floor: u64,
}

impl Simple {
    fn new(work: &Work, rule: Rule) -> Simple {
        Simple { rule, past: vec![Past::default(); work.nodes.len()], tick: 0, floor: 0 }
    }
}

impl Policy for Simple {
    fn request(&mut self, _: &Now<'_>, _: &mut Vec<u32>) {}

    fn touch(&mut self, _: &Now<'_>, step: &Step) {
        self.tick += 1;
        let past = &mut self.past[step.node as usize];
        if past.uses == 0 {
            past.came = self.tick;
            past.uses = if matches!(self.rule, Rule::Lfu { aged: true }) { self.floor } else { 0 };
        }
        (past.before, past.last) = (past.last, self.tick);
        past.uses += 1;
    }

    fn key(&self, _: &Work, node: u32) -> HeapKey {
        let past = &self.past[node as usize];
        match self.rule {
            Rule::Lru => (0, past.last),
            Rule::Fifo => (past.came, past.last),
            Rule::Lfu { .. } => (past.uses, past.last),
            Rule::Slru => (u64::from(past.uses > 1), past.last),
            Rule::Lru2 => (past.before, past.last),
        }
    }

    fn evicted(&mut self, node: u32) {
        let past = &mut self.past[node as usize];
        self.floor = past.uses;
        // LRU-2 keeps its history over an eviction; the others start anew, as the trees that have them do.
        *past = Past { last: past.last, before: past.before, ..Past::default() };
    }
}

/// By request and step: whether the node is used again.
fn again(work: &Work) -> Vec<Vec<bool>> {
    let next = optimum::next_uses(work);
    next.into_iter().map(|uses| uses.into_iter().map(|at| at != u32::MAX).collect()).collect()
}

struct Whether {
    order: Simple,
    again: Vec<Vec<bool>>,
}

impl Policy for Whether {
    fn request(&mut self, _: &Now<'_>, _: &mut Vec<u32>) {}

    fn touch(&mut self, now: &Now<'_>, step: &Step) {
        self.order.touch(now, step);
        let at = now.path.iter().position(|s| s.node == step.node);
        let again = at.is_some_and(|at| self.again[now.number][at]);
        self.order.past[step.node as usize].came = u64::from(again);
    }

    fn key(&self, _: &Work, node: u32) -> HeapKey {
        let past = &self.order.past[node as usize];
        (past.came, past.last)
    }
}

/// Keeps what the next requests use, the nearest longest.
struct Queue {
    inner: Box<dyn Policy>,
    length: u32,
    /// Waiting requests that use a node.
    waiting: Vec<u32>,
    /// Requests taken into `waiting`.
    seen: usize,
}

impl Queue {
    fn new(work: &Work, inner: Box<dyn Policy>, length: u32) -> Queue {
        Queue { inner, length, waiting: vec![0; work.nodes.len()], seen: 0 }
    }
}

impl Policy for Queue {
    fn request(&mut self, now: &Now<'_>, due: &mut Vec<u32>) {
        self.inner.request(now, due);
        for job in now.work.jobs.iter().take(now.number + 1 + self.length as usize).skip(self.seen) {
            for step in now.work.path(job) {
                self.waiting[step.node as usize] += 1;
                due.push(step.node);
            }
            self.seen += 1;
        }
        for step in now.path {
            self.waiting[step.node as usize] -= 1;
        }
    }

    fn touch(&mut self, now: &Now<'_>, step: &Step) {
        self.inner.touch(now, step);
    }

    fn key(&self, work: &Work, node: u32) -> HeapKey {
        let (first, second) = self.inner.key(work, node);
        // Keys of every order stay below 2^63: gains are floats that are not negative, the rest are counts.
        if self.waiting[node as usize] > 0 { (first | 1 << 63, second) } else { (first, second) }
    }

    fn evicted(&mut self, node: u32) {
        self.inner.evicted(node);
    }

    fn say(&self) -> Option<String> {
        self.inner.say()
    }
}
