//! What goes into a store call and what comes out of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::TransportCause;
use super::regions::RegionToken;
use crate::backend::identity::{Space, StoreKey};

/// A range of registered memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    /// Region, as registered with the same store.
    pub region: RegionToken,
    /// First byte in the region.
    pub offset: usize,
    /// Bytes.
    pub len: usize,
}

/// One object of a batch. Its payload is the concatenation of the spans.
#[derive(Clone, Debug)]
pub struct Item {
    /// Name of the object.
    pub key: StoreKey,
    /// Identity the object is sealed with and checked against.
    pub space: Space,
    /// Where its bytes lie, or go.
    pub spans: SmallVec<[Span; 1]>,
}

impl Item {
    /// The object of `page_hash` in `space`, in one run of memory.
    #[must_use]
    pub fn one(space: &Space, page_hash: &[u8; 32], span: Span) -> Item {
        Item { key: space.key(page_hash), space: *space, spans: SmallVec::from_buf([span]) }
    }

    /// The object of `page_hash` in `space`, in several runs of memory.
    #[must_use]
    pub fn scattered(space: &Space, page_hash: &[u8; 32], spans: impl IntoIterator<Item = Span>) -> Item {
        Item { key: space.key(page_hash), space: *space, spans: spans.into_iter().collect() }
    }

    /// Payload bytes, saturating.
    #[must_use]
    pub fn len(&self) -> usize {
        self.spans.iter().fold(0, |n, s| n.saturating_add(s.len))
    }

    /// Whether the payload has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What happened to one item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Outcome {
    /// Done; payload bytes of the object.
    Ok(usize),
    /// No object under the key.
    Missing,
    /// The object is there with another payload length. A miss.
    SizeMismatch {
        /// Payload bytes of the stored object.
        stored: usize,
    },
    /// The object failed its checks and was put aside. A miss.
    Corrupt,
    /// The store is full. Drop, or try later.
    NoSpace,
    /// The store sheds load: breaker open, rate limit, object leased. Try later.
    Busy,
    /// A span lies outside its region, or the region is not registered (any more). Register again; do not
    /// retry as it is.
    AddressLost,
    /// The deadline passed before the item was done.
    Timeout,
    /// The caller cancelled before the item was done.
    Cancelled,
    /// The medium or the far side failed.
    Transport(TransportCause),
    /// The object is of a format this build does not read. A miss.
    VersionMismatch {
        /// Format version found.
        found: u16,
    },
    /// The store is closed.
    Closed,
}

impl Outcome {
    /// `Ok`.
    #[must_use]
    pub fn is_ok(self) -> bool {
        matches!(self, Outcome::Ok(_))
    }

    /// The key has no usable object: looking again gives the same answer until somebody puts it.
    #[must_use]
    pub fn is_miss(self) -> bool {
        matches!(
            self,
            Outcome::Missing
                | Outcome::Corrupt
                | Outcome::SizeMismatch { .. }
                | Outcome::VersionMismatch { .. }
        )
    }

    /// The same call may succeed later.
    #[must_use]
    pub fn is_transient(self) -> bool {
        matches!(self, Outcome::Busy | Outcome::Transport(_))
    }

    /// The store itself may be in trouble (as against the item): what a client's health looks at.
    #[must_use]
    pub fn is_store_failure(self) -> bool {
        matches!(self, Outcome::Transport(_) | Outcome::Timeout)
    }
}

/// Cancels calls from another thread. Clones share the flag.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// A flag that is not set.
    #[must_use]
    pub fn new() -> Cancel {
        Cancel::default()
    }

    /// Sets it. Items not yet begun end as `Cancelled`.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether it is set.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Limits of one call.
#[derive(Clone, Debug, Default)]
pub struct Call {
    /// No new step begins after this.
    pub deadline: Option<Instant>,
    /// No new step begins once this is set.
    pub cancel: Cancel,
}

impl Call {
    /// No limits.
    #[must_use]
    pub fn unbounded() -> Call {
        Call::default()
    }

    /// Must begin its last step within `budget` from now.
    #[must_use]
    pub fn within(budget: Duration) -> Call {
        Call { deadline: Instant::now().checked_add(budget), cancel: Cancel::new() }
    }

    /// With the cancel flag of somebody else.
    #[must_use]
    pub fn with_cancel(mut self, cancel: &Cancel) -> Call {
        self.cancel = cancel.clone();
        self
    }

    /// Why no further step may begin, if so.
    #[must_use]
    pub fn stopped(&self) -> Option<Outcome> {
        if self.cancel.is_cancelled() {
            return Some(Outcome::Cancelled);
        }
        match self.deadline {
            Some(at) if Instant::now() >= at => Some(Outcome::Timeout),
            _ => None,
        }
    }

    /// Time left, `None` without a deadline.
    #[must_use]
    pub fn left(&self) -> Option<Duration> {
        self.deadline.map(|at| at.saturating_duration_since(Instant::now()))
    }
}
