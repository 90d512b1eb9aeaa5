//! Open, closing, closed: counts the calls inside a store, so that closing can wait for them.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::StoreError;

/// A lock that a panicking holder does not take with it: every structure here is valid between statements.
pub(super) fn locked<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug, Default)]
struct State {
    closing: bool,
    inside: usize,
}

/// Counts the calls inside.
#[derive(Debug, Default)]
pub(super) struct Gate {
    state: Mutex<State>,
    left: Condvar,
}

/// One call inside; leaves on drop.
#[derive(Debug)]
pub(super) struct Inside<'a>(&'a Gate);

impl Gate {
    /// Enters, unless the store is closing.
    pub(super) fn enter(&self) -> Option<Inside<'_>> {
        let mut s = locked(&self.state);
        if s.closing {
            return None;
        }
        s.inside += 1;
        Some(Inside(self))
    }

    /// Whether new calls are refused.
    pub(super) fn is_closed(&self) -> bool {
        locked(&self.state).closing
    }

    /// Refuses new calls and waits for those inside.
    pub(super) fn close(&self, deadline: Instant) -> Result<(), StoreError> {
        let mut s = locked(&self.state);
        s.closing = true;
        while s.inside > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(StoreError::Timeout);
            }
            s = self.left.wait_timeout(s, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        let mut s = locked(&self.0.state);
        s.inside -= 1;
        if s.inside == 0 {
            self.0.left.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_waits_for_those_inside_and_lets_nobody_in() {
        let gate = Gate::default();
        let inside = gate.enter();
        assert!(inside.is_some());
        assert!(matches!(gate.close(Instant::now()), Err(StoreError::Timeout)));
        assert!(gate.enter().is_none());
        std::thread::scope(|s| {
            s.spawn(|| drop(inside));
            assert!(gate.close(Instant::now() + std::time::Duration::from_secs(60)).is_ok());
        });
    }
}
