//! What is replayed: a list of requests, read from a trace or generated.

use super::tokens::{Rng, Span, generated_source, push, total};

/// One request of a workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Job {
    /// Arrival in microseconds of virtual time.
    pub(crate) arrival_us: u64,
    /// Whose prefix cache it uses: index into [`ADAPTERS`].
    pub(crate) tenant: usize,
    /// Prompt.
    pub(crate) input: Vec<Span>,
    /// What the model will say.
    pub(crate) output: Vec<Span>,
    /// Tokens of the prompt; at least one.
    pub(crate) input_tokens: u32,
    /// Tokens of the answer.
    pub(crate) output_tokens: u32,
}

impl Job {
    /// A request of the given spans.
    pub(crate) fn new(arrival_us: u64, input: Vec<Span>, output: Vec<Span>) -> Job {
        let (input_tokens, output_tokens) = (total(&input), total(&output));
        Job { arrival_us, tenant: 0, input, output, input_tokens, output_tokens }
    }

    /// Prompt and answer as one list.
    pub(crate) fn spans(&self) -> Vec<Span> {
        let mut spans = Vec::with_capacity(self.input.len() + self.output.len());
        self.input.iter().chain(&self.output).for_each(|&s| push(&mut spans, s));
        spans
    }
}

/// Adapters (LoRA) of the tenants; each has a namespace. Traces know only the first.
pub(crate) const ADAPTERS: &[Option<&str>] = &[None, Some("oak"), Some("ash")];

/// Requests of the built-in workload when `--requests` says nothing.
pub(crate) const BUILT_IN_REQUESTS: usize = 600;

/// Generates the built-in workload: multi-turn chats over a few shared system prompts, then tool agents that
/// share a long tool description and grow by tool results in quick turns. A turn's prompt is everything said
/// before, so turn n + 1 finds the prompt and the answer of turn n. Tenants share system prompts word for word and
/// must not share their KV. Same seed, same workload.
pub(crate) fn built_in(requests: usize, seed: u64) -> Vec<Job> {
    let chats = requests * 6 / 10;
    let mut maker = Maker { rng: Rng::new(seed, 1), sources: mix_base(seed), jobs: Vec::new() };
    maker.sessions(chats, &CHAT, 0);
    let agents_from = maker.jobs.iter().map(|j| j.arrival_us).max().unwrap_or(0);
    maker.sessions(requests, &AGENT, agents_from);
    let mut jobs = maker.jobs;
    jobs.sort_by_key(|j| j.arrival_us);
    jobs
}

/// Sources of different seeds must not meet, or a store would carry hits from one seed to another.
fn mix_base(seed: u64) -> u64 {
    (super::tokens::mix(seed) >> 3) & !0xFF_FFFF
}

/// Shape of one kind of session; ranges are inclusive.
struct Shape {
    heads: usize,
    head_tokens: (u64, u64),
    turns: (u64, u64),
    said_tokens: (u64, u64),
    answer_tokens: (u64, u64),
    start_gap_us: (u64, u64),
    turn_gap_us: (u64, u64),
}

const CHAT: Shape = Shape {
    heads: 4,
    head_tokens: (400, 2_000),
    turns: (2, 8),
    said_tokens: (30, 500),
    answer_tokens: (40, 400),
    start_gap_us: (50_000, 900_000),
    turn_gap_us: (8_000_000, 40_000_000),
};

const AGENT: Shape = Shape {
    heads: 2,
    head_tokens: (3_000, 6_000),
    turns: (5, 16),
    said_tokens: (150, 1_500),
    answer_tokens: (15, 90),
    start_gap_us: (200_000, 1_500_000),
    turn_gap_us: (1_500_000, 5_000_000),
};

struct Maker {
    rng: Rng,
    sources: u64,
    jobs: Vec<Job>,
}

impl Maker {
    fn span(&mut self, tokens: (u64, u64)) -> Span {
        self.sources += 1;
        let len = self.rng.range(tokens.0, tokens.1) as u32;
        Span { source: generated_source(self.sources & ((1 << 61) - 1)), first: 0, len }
    }

    /// Adds sessions of one shape until there are `until` requests in all.
    fn sessions(&mut self, until: usize, shape: &Shape, from_us: u64) {
        let heads: Vec<Span> = (0..shape.heads).map(|_| self.span(shape.head_tokens)).collect();
        let mut start_us = from_us;
        while self.jobs.len() < until {
            start_us += self.rng.range(shape.start_gap_us.0, shape.start_gap_us.1);
            let mut said = vec![heads[self.rng.range(0, shape.heads as u64 - 1) as usize]];
            let tenant = self.rng.range(0, ADAPTERS.len() as u64 - 1) as usize;
            let mut now_us = start_us;
            for _ in 0..self.rng.range(shape.turns.0, shape.turns.1) {
                if self.jobs.len() == until {
                    return;
                }
                said.push(self.span(shape.said_tokens));
                let answer = self.span(shape.answer_tokens);
                self.jobs.push(Job { tenant, ..Job::new(now_us, said.clone(), vec![answer]) });
                said.push(answer);
                now_us += self.rng.range(shape.turn_gap_us.0, shape.turn_gap_us.1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_seed_same_workload_and_as_many_as_asked() {
        for n in [1, 2, 5, 97, 600] {
            let jobs = built_in(n, 3);
            assert_eq!(jobs.len(), n);
            assert_eq!(jobs, built_in(n, 3));
            assert!(jobs.windows(2).all(|w| w[0].arrival_us <= w[1].arrival_us));
            assert!(jobs.iter().all(|j| j.input_tokens > 0 && j.output_tokens > 0));
        }
        assert_ne!(built_in(50, 3), built_in(50, 4));
    }

    #[test]
    fn a_later_turn_repeats_prompt_and_answer_of_the_turn_before() {
        let jobs = built_in(200, 1);
        let continued = jobs
            .iter()
            .filter(|earlier| {
                let whole = earlier.spans();
                jobs.iter()
                    .any(|later| later.arrival_us > earlier.arrival_us && later.input.starts_with(&whole))
            })
            .count();
        assert!(continued > 100, "{continued} of 200 requests are continued");
    }

    #[test]
    fn seeds_share_no_source() {
        let sources = |seed| -> std::collections::BTreeSet<u64> {
            built_in(100, seed).iter().flat_map(|j| j.spans()).map(|s| s.source).collect()
        };
        assert!(sources(1).is_disjoint(&sources(2)));
    }
}
