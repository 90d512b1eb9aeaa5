//! Counters and health of a store.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::batch::Outcome;

/// Whether calls are expected to work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Health {
    /// Yes.
    Up,
    /// Some calls fail, or writes are refused; reads may work.
    Degraded,
    /// Calls are refused until a probe succeeds.
    Down,
    /// Closed for good.
    Closed,
}

/// Counters since opening, gauges now. `*_total` never falls.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct StoreStats {
    /// Objects stored now; 0 where the store cannot know.
    pub objects: u64,
    /// Bytes on the medium now, envelopes and dead space included; 0 where the store cannot know.
    pub bytes: u64,
    /// Limit on `bytes`; 0 is none.
    pub bytes_max: u64,
    /// Items got `Ok`.
    pub get_ok_total: u64,
    /// Items got `Missing`.
    pub get_missing_total: u64,
    /// Items put `Ok`, those that were there already included.
    pub put_ok_total: u64,
    /// Items put `Ok` without writing because the key was there.
    pub put_present_total: u64,
    /// Payload bytes got.
    pub get_bytes_total: u64,
    /// Payload bytes put.
    pub put_bytes_total: u64,
    /// Objects that failed their checks and were put aside.
    pub corrupt_total: u64,
    /// Items whose stored length was not the one asked for.
    pub size_mismatch_total: u64,
    /// Items of a format this build does not read.
    pub version_mismatch_total: u64,
    /// Items refused because the store was full.
    pub no_space_total: u64,
    /// Items refused because of load.
    pub busy_total: u64,
    /// Items outside registered memory.
    pub address_lost_total: u64,
    /// Items past their deadline.
    pub timeout_total: u64,
    /// Items cancelled.
    pub cancelled_total: u64,
    /// Items failed by the medium or the far side.
    pub transport_total: u64,
    /// Objects removed to make room.
    pub evicted_total: u64,
    /// Objects moved out of what was about to be evicted, because they had been read.
    pub rescued_total: u64,
    /// Objects removed by `remove` and `clear`.
    pub removed_total: u64,
}

/// The live counters behind [`StoreStats`].
#[derive(Debug, Default)]
pub struct Counters {
    get_ok: AtomicU64,
    get_missing: AtomicU64,
    put_ok: AtomicU64,
    /// See [`StoreStats::put_present_total`].
    pub(super) put_present: AtomicU64,
    get_bytes: AtomicU64,
    put_bytes: AtomicU64,
    corrupt: AtomicU64,
    size_mismatch: AtomicU64,
    version_mismatch: AtomicU64,
    no_space: AtomicU64,
    busy: AtomicU64,
    address_lost: AtomicU64,
    timeout: AtomicU64,
    cancelled: AtomicU64,
    transport: AtomicU64,
    /// See [`StoreStats::evicted_total`].
    pub(super) evicted: AtomicU64,
    /// See [`StoreStats::rescued_total`].
    pub(super) rescued: AtomicU64,
    /// See [`StoreStats::removed_total`].
    pub(super) removed: AtomicU64,
}

/// Which counters an outcome goes to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpKind {
    /// `query`.
    Query,
    /// `get`.
    Get,
    /// `put`.
    Put,
    /// `remove`.
    Remove,
}

impl Counters {
    /// Counts every outcome of a finished batch. Call it once, at the end.
    pub fn count(&self, op: OpKind, outcomes: &[Outcome]) {
        for &o in outcomes {
            self.count_one(op, o);
        }
    }

    fn count_one(&self, op: OpKind, outcome: Outcome) {
        let cell = match (op, outcome) {
            (OpKind::Get, Outcome::Ok(n)) => {
                self.get_bytes.fetch_add(n as u64, Relaxed);
                &self.get_ok
            }
            (OpKind::Put, Outcome::Ok(n)) => {
                self.put_bytes.fetch_add(n as u64, Relaxed);
                &self.put_ok
            }
            (OpKind::Remove, Outcome::Ok(_)) => &self.removed,
            (OpKind::Get, Outcome::Missing) => &self.get_missing,
            (_, Outcome::Ok(_) | Outcome::Missing | Outcome::Closed) => return,
            (_, Outcome::Corrupt) => &self.corrupt,
            (_, Outcome::SizeMismatch { .. }) => &self.size_mismatch,
            (_, Outcome::VersionMismatch { .. }) => &self.version_mismatch,
            (_, Outcome::NoSpace) => &self.no_space,
            (_, Outcome::Busy) => &self.busy,
            (_, Outcome::AddressLost) => &self.address_lost,
            (_, Outcome::Timeout) => &self.timeout,
            (_, Outcome::Cancelled) => &self.cancelled,
            (_, Outcome::Transport(_)) => &self.transport,
        };
        cell.fetch_add(1, Relaxed);
    }

    /// The counters; gauges are left at zero for the store to fill in.
    #[must_use]
    pub fn snapshot(&self) -> StoreStats {
        let of = |c: &AtomicU64| c.load(Relaxed);
        StoreStats {
            objects: 0,
            bytes: 0,
            bytes_max: 0,
            get_ok_total: of(&self.get_ok),
            get_missing_total: of(&self.get_missing),
            put_ok_total: of(&self.put_ok),
            put_present_total: of(&self.put_present),
            get_bytes_total: of(&self.get_bytes),
            put_bytes_total: of(&self.put_bytes),
            corrupt_total: of(&self.corrupt),
            size_mismatch_total: of(&self.size_mismatch),
            version_mismatch_total: of(&self.version_mismatch),
            no_space_total: of(&self.no_space),
            busy_total: of(&self.busy),
            address_lost_total: of(&self.address_lost),
            timeout_total: of(&self.timeout),
            cancelled_total: of(&self.cancelled),
            transport_total: of(&self.transport),
            evicted_total: of(&self.evicted),
            rescued_total: of(&self.rescued),
            removed_total: of(&self.removed),
        }
    }
}
