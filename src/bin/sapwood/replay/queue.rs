//! `--queue`: the cache is told what the next requests will use, as a scheduler tells of those that wait.

use std::collections::{BTreeSet, VecDeque};

use super::calls::{Calls, OnRanks};
use super::error::RunError;
use super::tokens::expand;
use super::workload::Job;

/// The requests that were told of and have not started, in order of arrival. Each has a request of its own at the cache,
/// which does nothing but wait.
#[derive(Default)]
pub(crate) struct Queue {
    waiting: VecDeque<(usize, OnRanks)>,
    told: usize,
    /// Those that left before they were told of.
    gone: BTreeSet<usize>,
    scratch: Vec<u32>,
}

impl Queue {
    /// Tells of the next jobs of `order` until `most` wait.
    pub(crate) fn fill(
        &mut self,
        most: usize,
        jobs: &[Job],
        order: &[usize],
        calls: &mut Calls,
    ) -> Result<(), RunError> {
        while self.waiting.len() < most
            && let Some(&job) = order.get(self.told)
        {
            self.told += 1;
            if self.gone.remove(&job) {
                continue;
            }
            expand(&jobs[job].input, jobs[job].input_tokens, &mut self.scratch);
            let mut request = calls.request(jobs[job].tenant);
            calls.expect_prefix(&mut request, &self.scratch)?;
            self.waiting.push_back((job, request));
        }
        Ok(())
    }

    /// The job has started, or never will.
    pub(crate) fn leave(&mut self, job: usize, calls: &mut Calls) -> Result<(), RunError> {
        let at = self.waiting.iter().position(|(waits, _)| *waits == job);
        match at.and_then(|at| self.waiting.remove(at)) {
            Some((_, request)) => calls.abort(request)?,
            None => _ = self.gone.insert(job),
        }
        Ok(())
    }
}
