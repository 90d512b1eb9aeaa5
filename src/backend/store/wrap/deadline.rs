//! A deadline for every call.

use std::time::{Duration, Instant};

use super::{Around, Down, Passing};
use crate::backend::store::StoreError;
use crate::backend::store::batch::{Call, Outcome};

/// Bounds calls that have no deadline, or a later one. It stops them between steps; a step that hangs is
/// [`Detached`](super::Detached)'s matter.
#[derive(Clone, Copy, Debug)]
pub struct Deadlines {
    budget: Duration,
}

impl Deadlines {
    /// At most `budget` per call.
    #[must_use]
    pub fn new(budget: Duration) -> Deadlines {
        Deadlines { budget }
    }

    fn bound(&self, call: &Call) -> Call {
        let ours = Instant::now().checked_add(self.budget);
        let deadline = match (call.deadline, ours) {
            (Some(theirs), Some(ours)) => Some(theirs.min(ours)),
            (theirs, ours) => theirs.or(ours),
        };
        Call { deadline, cancel: call.cancel.clone() }
    }
}

impl Around for Deadlines {
    fn batch(&self, batch: &Passing<'_>, down: &mut Down<'_>) -> Vec<Outcome> {
        down(&batch.every(), &self.bound(batch.call))
    }

    fn admit(&self, call: &Call) -> Result<Call, StoreError> {
        Ok(self.bound(call))
    }
}
