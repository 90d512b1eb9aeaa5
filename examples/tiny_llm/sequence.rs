//! One sequence: prefill in chunks, then rounds of draft and verify.
//!
//! The state between two steps is the same in both phases: `computed` positions have K and V in both planes, and one
//! token behind them is known and not computed. So a sequence that lost its pages just prefills again.

use sapwood::base::Digest;

use crate::model::{DIM, Kv, Model, Span, greedy};

/// Tokens that a round drafts.
pub const DRAFTS: usize = 3;

/// What a sequence came to. Equal outcomes mean equal tokens and equal bits of every score that chose them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// Prompt and answer.
    pub tokens: Vec<u32>,
    /// Of the bits of all scores, the draft's included.
    pub digest: u64,
    /// Tokens drafted.
    pub drafted: usize,
    /// Of these, right.
    pub accepted: usize,
}

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Work {
    /// Adapter; part of the namespace.
    pub adapter: usize,
    /// The prompt, at least one token.
    pub prompt: Vec<u32>,
    /// Tokens to generate.
    pub answer_tokens: usize,
    /// Step at which it arrives.
    pub arrives: u64,
}

/// A sequence being worked on.
#[derive(Clone)]
pub struct Sequence {
    /// Adapter.
    pub adapter: usize,
    /// Prompt and answer so far.
    pub tokens: Vec<u32>,
    want: usize,
    digest: Digest,
    drafted: usize,
    accepted: usize,
}

/// How far a sequence is computed into its present pages.
#[derive(Clone, Default)]
pub struct Progress {
    /// Positions with K and V.
    pub computed: usize,
    /// Hidden state of the last of them, if it is known. A prefix found in the cache comes without.
    pub feature: Option<Vec<f32>>,
}

impl Sequence {
    /// A sequence that was not started.
    pub fn new(work: &Work) -> Sequence {
        Sequence {
            adapter: work.adapter,
            tokens: work.prompt.clone(),
            want: work.prompt.len() + work.answer_tokens,
            digest: Digest::default(),
            drafted: 0,
            accepted: 0,
        }
    }

    /// Whether the answer is complete.
    pub fn is_done(&self) -> bool {
        self.tokens.len() >= self.want
    }

    /// Positions that have to be computed before the next token can be chosen.
    pub fn prefill_end(&self) -> usize {
        self.tokens.len() - 1
    }

    /// Whether something has to be computed before a round. Also when every position was found in the cache: the
    /// draft head needs the hidden state of the last one.
    pub fn needs_prefill(&self, at: &Progress) -> bool {
        at.computed < self.prefill_end() || (at.feature.is_none() && at.computed > 0)
    }

    /// Positions that the next round may write, if it starts behind `computed`.
    pub fn round_end(&self, computed: usize) -> usize {
        computed + 1 + self.drafts()
    }

    fn drafts(&self) -> usize {
        DRAFTS.min(self.want - self.tokens.len() - 1)
    }

    /// The result.
    pub fn outcome(&self) -> Outcome {
        Outcome {
            tokens: self.tokens.clone(),
            digest: self.digest.value(),
            drafted: self.drafted,
            accepted: self.accepted,
        }
    }

    /// Computes positions up to `end`. Returns how many it ran through the model: behind a cached prefix one more,
    /// because the draft head needs the hidden state of the position before its first.
    pub fn prefill<K: Kv>(
        &self,
        model: &Model,
        kv: &mut K,
        at: &mut Progress,
        end: usize,
    ) -> Result<usize, K::Error> {
        let from = at.computed;
        let first = if at.feature.is_none() { from.saturating_sub(1) } else { from };
        let span = Span { tokens: &self.tokens[first..end], first, write_from: from };
        let hidden = model.target(self.adapter, kv, &span)?;
        let before = match at.feature.take() {
            Some(feature) => feature,
            None if from == 0 => vec![0.0; DIM],
            None => hidden[0].clone(),
        };
        let new = &hidden[from - first..];
        let features: Vec<Vec<f32>> = std::iter::once(&before).chain(new).take(new.len()).cloned().collect();
        let span = Span { tokens: &self.tokens[from..end], first: from, write_from: from };
        model.draft(self.adapter, kv, &span, &features)?;
        *at = Progress { computed: end, feature: hidden.last().cloned() };
        Ok(end - first)
    }

    /// Drafts, verifies, and keeps what was right and the token behind it.
    pub fn round<K: Kv>(&mut self, model: &Model, kv: &mut K, at: &mut Progress) -> Result<(), K::Error> {
        let start = at.computed;
        let before = at.feature.clone().unwrap_or_else(|| vec![0.0; DIM]);
        let mut guess = vec![self.tokens[start]];
        let mut feature = before.clone();
        for i in 0..self.drafts() {
            let span = Span { tokens: &guess[i..], first: start + i, write_from: start + i };
            feature = model.draft(self.adapter, kv, &span, &[feature])?.swap_remove(0);
            guess.push(self.choose(&model.logits(&feature)));
        }
        self.drafted += guess.len() - 1;
        let span = Span { tokens: &guess, first: start, write_from: start };
        let hidden = model.target(self.adapter, kv, &span)?;
        let mut right = 0;
        loop {
            let next = self.choose(&model.logits(&hidden[right]));
            self.tokens.push(next);
            if guess.get(right + 1) != Some(&next) {
                break;
            }
            right += 1;
        }
        self.accepted += right;
        // The draft's K and V again, from true features in the place of guessed ones.
        let features: Vec<Vec<f32>> =
            std::iter::once(&before).chain(&hidden).take(right + 1).cloned().collect();
        let span = Span { tokens: &guess[..=right], first: start, write_from: start };
        model.draft(self.adapter, kv, &span, &features)?;
        *at = Progress { computed: start + right + 1, feature: Some(hidden[right].clone()) };
        Ok(())
    }

    fn choose(&mut self, logits: &[f32]) -> u32 {
        logits.iter().for_each(|l| self.digest.mix(u64::from(l.to_bits())));
        greedy(logits)
    }
}

/// The answer without any cache.
pub fn alone<K: Kv + Default>(model: &Model, work: &Work) -> Result<Outcome, K::Error> {
    let mut sequence = Sequence::new(work);
    let (mut kv, mut at) = (K::default(), Progress::default());
    if sequence.needs_prefill(&at) {
        let end = sequence.prefill_end();
        sequence.prefill(model, &mut kv, &mut at, end)?;
    }
    while !sequence.is_done() {
        sequence.round(model, &mut kv, &mut at)?;
    }
    Ok(sequence.outcome())
}
