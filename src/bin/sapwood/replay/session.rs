//! A request on its way through the scheduler: waiting, then running.

use super::args::Args;
use super::calls::OnRanks;
use super::stamp::{Prefix, namespace_seed};
use super::tokens::{Rng, expand};
use super::workload::{ADAPTERS, Job};

/// When the client goes away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Abort {
    Never,
    /// Before the request runs.
    Waiting,
    /// As soon as so many tokens have KV.
    AtTokens(usize),
}

impl Abort {
    /// Draws the fate of request `index`: a quarter of the aborts come early, the others anywhere on the way.
    pub(crate) fn draw(args: &Args, index: usize, end: usize) -> Abort {
        let mut rng = Rng::new(args.seed, 1_000 + index as u64);
        if !rng.chance(args.abort_rate) {
            Abort::Never
        } else if rng.chance(0.25) {
            Abort::Waiting
        } else {
            Abort::AtTokens(rng.range(1, end as u64) as usize)
        }
    }
}

/// Tokens of a request that get KV: all but the last one the model says, on which it never computes.
pub(crate) fn end_tokens(job: &Job, decode: bool) -> usize {
    let answer = if decode { job.output_tokens.saturating_sub(1) } else { 0 };
    (job.input_tokens + answer) as usize
}

/// A request that has arrived, or was sent back to the queue.
pub(crate) struct Waiting {
    /// Index of its job.
    pub(crate) job: usize,
    /// Open while a prefetch may be running for it.
    pub(crate) request: Option<OnRanks>,
    /// Tokens known: the prompt, and after a retraction what had been said by then.
    pub(crate) known: usize,
    /// It has not run before; hits are counted once.
    pub(crate) first: bool,
    /// Tokens that its prefetch brought to the host.
    pub(crate) prefetched_tokens: u64,
    pub(crate) abort: Abort,
    /// The store was asked for it, or will not be.
    pub(crate) asked: bool,
}

impl Waiting {
    /// A request that has just arrived.
    pub(crate) fn new(job: usize, known: usize, abort: Abort) -> Waiting {
        Waiting { job, request: None, known, first: true, prefetched_tokens: 0, abort, asked: false }
    }

    /// A request that ran before; what it had is in the cache, if anywhere.
    pub(crate) fn back(job: usize, known: usize, abort: Abort) -> Waiting {
        Waiting { first: false, asked: true, ..Waiting::new(job, known, abort) }
    }
}

/// A running request.
pub(crate) struct Session {
    pub(crate) job: usize,
    pub(crate) request: OnRanks,
    /// All tokens that get KV.
    pub(crate) tokens: Vec<u32>,
    pub(crate) prefix: Prefix,
    /// Tokens whose KV is there, or is being loaded.
    pub(crate) kv: usize,
    /// Pages of the table that belong to the tree: matched or published.
    pub(crate) published: usize,
    /// Tokens to compute before the first token is said.
    pub(crate) prompt_end: usize,
    /// Waits for a load; these pages are verified when it has ended.
    pub(crate) loading: Option<(usize, usize)>,
    pub(crate) abort: Abort,
}

impl Session {
    /// Tokens and stamps of a job.
    pub(crate) fn texts(job: &Job, end: usize, tokens: &mut Vec<u32>) -> Prefix {
        expand(&job.spans(), end as u32, tokens);
        let mut prefix = Prefix::new(namespace_seed(ADAPTERS[job.tenant]));
        prefix.extend(tokens);
        prefix
    }

    /// Prompt tokens still to compute.
    pub(crate) fn backlog(&self) -> usize {
        self.prompt_end.saturating_sub(self.kv)
    }

    pub(crate) fn finished(&self) -> bool {
        self.kv == self.tokens.len()
    }

    pub(crate) fn abort_due(&self) -> bool {
        matches!(self.abort, Abort::AtTokens(n) if self.kv >= n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::tokens::Span;
    use clap::Parser;

    #[test]
    fn the_last_token_said_has_no_kv() {
        let job = |output| {
            let spans = |source, len| vec![Span { source, first: 0, len }];
            Job::new(0, spans(1, 10), spans(2, output))
        };
        let ends: Vec<usize> = [0, 1, 2, 7].iter().map(|&o| end_tokens(&job(o), true)).collect();
        assert_eq!(ends, [10, 10, 11, 16]);
        assert_eq!(end_tokens(&job(7), false), 10);
    }

    #[test]
    fn aborts_follow_the_rate_and_the_seed() {
        let args = |rate: &str| Args::parse_from(["replay", "--abort-rate", rate]);
        let drawn =
            |rate: &str| -> Vec<Abort> { (0..1000).map(|i| Abort::draw(&args(rate), i, 50)).collect() };
        assert!(drawn("0").iter().all(|a| *a == Abort::Never));
        assert!(drawn("1").iter().all(|a| *a != Abort::Never));
        let some = drawn("0.3");
        assert_eq!(some, drawn("0.3"));
        assert!((230..370).contains(&some.iter().filter(|a| **a != Abort::Never).count()));
        assert!(some.contains(&Abort::Waiting));
        assert!(some.iter().all(|a| !matches!(a, Abort::AtTokens(n) if *n == 0 || *n > 50)));
    }
}
