//! The store tier: one trait over files, Redis, object storage and shared pools.
//!
//! A store keeps sealed objects under 32-byte keys. One object is one plane of one page. Calls block and are
//! made from worker threads; nothing here is called on the scheduler's thread.
//!
//! # Rules of the trait
//! - **Per item.** A batch never succeeds or fails as a whole: every item has its own [`Outcome`], in order.
//! - **Memory.** Items address registered regions by token. The caller owns the addressed ranges from the
//!   call until it returns: nobody writes the source of a `put`, nobody reads or writes the destination of a
//!   `get`. When the call returns, the store no longer touches them, whatever the outcome. A deadline
//!   therefore stops a call between steps and never abandons a running transfer; whoever needs a bounded
//!   return from a backend that may hang uses [`wrap::Detached`], which reads through its own memory.
//! - **Destinations are born unverified.** After any outcome of a `get` but `Ok` the bytes of that item's
//!   destination are unspecified.
//! - **`Ok` is checked.** Magic, version, identity, key, length and checksum of the envelope were verified
//!   (see [`envelope`]); a mismatch is `Corrupt`, counted, and the object is put aside, not read again.
//! - **Presence is a hint.** An object may vanish between `query` and `get`.
//! - **Durability.** `put` is ordered and crash-consistent, not durable; [`Store::sync`] makes everything
//!   acknowledged before it durable where [`Caps::durable`] says so.
//! - Two items of one batch with one key, or overlapping destinations, are the caller's fault: the first is
//!   served, and the store stays sound.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub mod batch;
pub mod clock;
pub mod envelope;
pub mod fault;
pub mod file;
mod gate;
pub mod group;
pub mod mem;
#[cfg(feature = "mooncake")]
pub mod mooncake;
#[cfg(feature = "object")]
pub mod object;
#[cfg(feature = "redis")]
pub mod redis;
pub mod regions;
mod sealed;
mod stage;
pub mod stats;
pub mod wrap;

pub use batch::{Call, Cancel, Item, Outcome, Span};
pub use regions::{RegionToken, RegisterError};
pub use stats::{Health, StoreStats};

use crate::backend::identity::{NamespaceDigest, StoreKey};
use crate::backend::region::Region;

/// What a `put` of a key that is already there does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Overwrite {
    /// Keeps the old bytes and answers `Ok`: safe because a key names its content.
    KeepsOld,
    /// Writes the new bytes.
    Replaces,
}

/// Where memory must come from for a store to address it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ArenaNeed {
    /// Any mapping of the process.
    AnyMemory,
    /// A shared file descriptor (memfd) that another process maps.
    SharedFd,
    /// Only memory that the backend allocated.
    BackendAllocated,
}

/// What a store can do. Constant for the life of the store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Caps {
    /// Name for logs and metrics.
    pub name: &'static str,
    /// Bytes go between the region and the medium without a copy in user space.
    pub zero_copy: bool,
    /// Alignment in bytes of offsets and lengths for the zero-copy path; others are served by a copy.
    pub align: usize,
    /// Smallest object in bytes at which the store reaches its bandwidth. Smaller ones work, slower.
    pub object_bytes_efficient: usize,
    /// Largest object in bytes.
    pub object_bytes_max: usize,
    /// Items per call beyond which nothing is gained. Larger batches work.
    pub batch_items_efficient: usize,
    /// Behaviour of `put` on a present key.
    pub overwrite: Overwrite,
    /// How long the store protects an object it has reported, if it does.
    pub lease: Option<Duration>,
    /// The store removes objects on its own.
    pub evicts: bool,
    /// After `sync`, objects survive a power cut of this machine.
    pub durable: bool,
    /// Other processes see the objects.
    pub shared: bool,
    /// Memory it can address.
    pub arena: ArenaNeed,
}

/// Changes when the far side may have lost what it knew (reconnect, re-open). Presence learned under an
/// older epoch is void, and so are registrations where the backend holds them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct StoreEpoch(pub u64);

/// Why a call that has no items failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The deadline passed; what was done stays done.
    #[error("deadline passed")]
    Timeout,
    /// Cancelled by the caller; what was done stays done.
    #[error("cancelled")]
    Cancelled,
    /// The store is closed.
    #[error("store is closed")]
    Closed,
    /// The store is shedding load or its breaker is open.
    #[error("store is busy")]
    Busy,
    /// The backend cannot do it.
    #[error("{op} is not supported by this store")]
    Unsupported {
        /// The operation.
        op: &'static str,
    },
    /// The medium failed.
    #[error("{op}: {source}")]
    Io {
        /// What was being done.
        op: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// The far side answered with an error.
    #[error("{op}: {cause}")]
    Remote {
        /// What was being done.
        op: &'static str,
        /// Kind of failure.
        cause: TransportCause,
    },
}

/// What went wrong below an item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum TransportCause {
    /// The system refused; the errno.
    Errno(i32),
    /// No connection, or it broke.
    Disconnected,
    /// The far side answered with an error of its own; its code, 0 if it has none.
    Remote(i32),
    /// The answer was not what the protocol allows.
    Protocol,
    /// Injected by a test.
    Injected,
}

impl fmt::Display for TransportCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TransportCause::Errno(e) => write!(f, "{}", std::io::Error::from_raw_os_error(*e)),
            TransportCause::Disconnected => f.write_str("disconnected"),
            TransportCause::Remote(code) => write!(f, "remote error {code}"),
            TransportCause::Protocol => f.write_str("answer outside the protocol"),
            TransportCause::Injected => f.write_str("injected"),
        }
    }
}

/// A store of sealed page objects. See the module for the rules every implementation keeps.
pub trait Store: Send + Sync + fmt::Debug {
    /// What it can do.
    fn caps(&self) -> Caps;

    /// Makes a region addressable. Registering one region again gives the same token and counts; the region
    /// lives at least until the last [`Store::unregister`] and the end of every call that uses it.
    fn register(&self, region: &Arc<Region>) -> Result<RegionToken, RegisterError>;

    /// Undoes one registration. An unknown token is an error, not a panic.
    fn unregister(&self, token: RegionToken) -> Result<(), RegisterError>;

    /// Presence of each key, in order: `Ok(payload bytes)`, `Missing`, or why it is not known. O(keys).
    fn query(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome>;

    /// Pages that were used elsewhere, so that a store that evicts by use keeps them. A hint: what is not there is passed
    /// over, and nothing is promised. Default: nothing happens.
    fn touch(&self, keys: &[StoreKey], call: &Call) {
        let _ = (keys, call);
    }

    /// Reads each object into its spans, in order. The sum of the spans must equal the stored payload
    /// length, otherwise `SizeMismatch` and nothing is written.
    fn get(&self, items: &[Item], call: &Call) -> Vec<Outcome>;

    /// Stores the bytes of each item's spans under its key. `Ok(payload bytes)` means a later `get` finds it
    /// (until evicted).
    fn put(&self, items: &[Item], call: &Call) -> Vec<Outcome>;

    /// Removes each key: `Ok(payload bytes)` or `Missing`.
    fn remove(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome>;

    /// Removes every object of one namespace, of every descriptor, and nothing else. Returns the number of
    /// objects removed.
    fn clear(&self, namespace: NamespaceDigest, call: &Call) -> Result<u64, StoreError>;

    /// Makes every acknowledged `put` and `remove` durable. A no-op where [`Caps::durable`] is false.
    fn sync(&self, call: &Call) -> Result<(), StoreError>;

    /// Whether calls are expected to work now. Never blocks.
    fn health(&self) -> Health;

    /// Counters since opening. Never blocks for long.
    fn stats(&self) -> StoreStats;

    /// The epoch.
    fn epoch(&self) -> StoreEpoch;

    /// Refuses new calls, waits for running ones until `deadline`, syncs and releases what the store holds.
    /// Closing again is `Ok`. After `Timeout` the store stays closed to new calls and can be closed again.
    fn close(&self, deadline: Instant) -> Result<(), StoreError>;
}

impl<T: Store + ?Sized> Store for Arc<T> {
    fn caps(&self) -> Caps {
        (**self).caps()
    }

    fn register(&self, region: &Arc<Region>) -> Result<RegionToken, RegisterError> {
        (**self).register(region)
    }

    fn unregister(&self, token: RegionToken) -> Result<(), RegisterError> {
        (**self).unregister(token)
    }

    fn query(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
        (**self).query(keys, call)
    }

    fn touch(&self, keys: &[StoreKey], call: &Call) {
        (**self).touch(keys, call);
    }

    fn get(&self, items: &[Item], call: &Call) -> Vec<Outcome> {
        (**self).get(items, call)
    }

    fn put(&self, items: &[Item], call: &Call) -> Vec<Outcome> {
        (**self).put(items, call)
    }

    fn remove(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
        (**self).remove(keys, call)
    }

    fn clear(&self, namespace: NamespaceDigest, call: &Call) -> Result<u64, StoreError> {
        (**self).clear(namespace, call)
    }

    fn sync(&self, call: &Call) -> Result<(), StoreError> {
        (**self).sync(call)
    }

    fn health(&self) -> Health {
        (**self).health()
    }

    fn stats(&self) -> StoreStats {
        (**self).stats()
    }

    fn epoch(&self) -> StoreEpoch {
        (**self).epoch()
    }

    fn close(&self, deadline: Instant) -> Result<(), StoreError> {
        (**self).close(deadline)
    }
}
