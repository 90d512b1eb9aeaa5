//! What the calls of the core answer.

use crate::base::{NodeId, OpId, PageId};

/// Why something was not done although nothing went wrong.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum Refusal {
    /// Not enough device pages can be freed now.
    NoDevicePages,
    /// Not enough window pages or state slots can be freed now.
    NoComponentPages,
    /// Not enough host pages can be freed now.
    NoHostPages,
    /// The request may not take so many device pages now.
    OverBudget,
    /// Too many loads are in flight.
    LoadsInFlight,
    /// The span, or what the store holds of it, is too short to be worth a load.
    BelowThreshold,
    /// The node that a refill would hang under holds no host copy.
    AnchorNotBackedUp,
    /// The node that a refill would hang under is gone.
    AnchorGone,
    /// A node on the way has a backup in flight; its children wait for that.
    BackupInFlight,
    /// All prefetches together hold as much of the host pool as they may.
    PrefetchShare,
    /// The store holds nothing of it.
    NotInStore,
    /// The store did not answer, or a page could not be read.
    StoreFailed,
    /// The store holds it, but no window or state to go on from at its end.
    NotRestorable,
    /// No store is attached.
    NoStore,
    /// The request has a prefetch already.
    AlreadyPrefetching,
    /// The request asked the store a moment ago.
    Paced,
    /// The request has asked the store as often as it may.
    AttemptsUsed,
    /// Loading it is predicted to take longer than computing it.
    SlowerThanCompute,
    /// The request waits for a load, or another request's load brings what it would publish.
    LoadPending,
    /// The time allowed for the prefetch ran out.
    OutOfTime,
    /// The request went away.
    Aborted,
    /// Evicted from the device without a host copy, as the write policy has it.
    NotBackedUp,
    /// Evicted from the device without a host copy: what it hangs under was used since and would need more host pages
    /// than it is worth.
    Outlived,
    /// Evicted from the host.
    HostEvicted,
}

impl Refusal {
    /// Stable lower-case name, used in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Refusal::NoDevicePages => "no_device_pages",
            Refusal::NoComponentPages => "no_component_pages",
            Refusal::NoHostPages => "no_host_pages",
            Refusal::OverBudget => "over_budget",
            Refusal::LoadsInFlight => "loads_in_flight",
            Refusal::BelowThreshold => "below_threshold",
            Refusal::AnchorNotBackedUp => "anchor_not_backed_up",
            Refusal::AnchorGone => "anchor_gone",
            Refusal::BackupInFlight => "backup_in_flight",
            Refusal::PrefetchShare => "prefetch_share",
            Refusal::NotInStore => "not_in_store",
            Refusal::StoreFailed => "store_failed",
            Refusal::NotRestorable => "not_restorable",
            Refusal::NoStore => "no_store",
            Refusal::AlreadyPrefetching => "already_prefetching",
            Refusal::Paced => "paced",
            Refusal::AttemptsUsed => "attempts_used",
            Refusal::SlowerThanCompute => "slower_than_compute",
            Refusal::LoadPending => "load_pending",
            Refusal::OutOfTime => "out_of_time",
            Refusal::Aborted => "aborted",
            Refusal::NotBackedUp => "not_backed_up",
            Refusal::Outlived => "outlived",
            Refusal::HostEvicted => "host_evicted",
        }
    }
}

/// What a match found and now holds for the request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MatchInfo {
    /// Tokens whose pages lie on the device; they are the head of the request's page table.
    pub device_tokens: u64,
    /// Tokens right behind them that a load can restore from the host.
    pub host_tokens: u64,
    /// The deepest node of the match.
    pub node: NodeId,
    /// Tokens that were there when the last prefetch of this request ended and are gone by now: asking the store again
    /// may be worth it, and is allowed at once.
    pub lost_tokens: u64,
}

/// What became of a request to load.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LoadBack {
    /// Everything matched lies on the device.
    Nothing,
    /// The pages are in the request's page table, and the windows and states among its components; see [`LoadState`] for
    /// when they may be read.
    Started {
        /// Tokens being restored for this request, also those that an earlier load already brings.
        tokens: u64,
    },
    /// Nothing changed.
    Refused(Refusal),
}

/// Progress of the loads that a request waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LoadState {
    /// Every page of the request, of all pools, may be read on every layer.
    Ready,
    /// Layers `0..layers` may be read, in all pools.
    Pending {
        /// Layers that have arrived on all pages; more than there are once all have, and only the end is awaited.
        layers: u32,
    },
    /// A copy failed. The request must match again; its own pages hold results that rest on what did not come.
    Failed,
}

/// What became of a request for pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Alloc {
    /// The pages are at the end of the request's table.
    Granted,
    /// Nothing changed.
    Refused {
        /// Pages missing.
        short_pages: u32,
        /// Pages that copies in flight hold and that can go when those have ended: worth a retry after the next
        /// completion.
        coming_pages: u32,
    },
}

/// What a request has of windows and states: while its loads are in flight, what it will have when they have ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RequestComponents {
    /// Place of the first page of `window`, counted in pages from the root.
    pub window_from: u32,
    /// Place of the first one that is the request's own.
    pub own_window_from: u32,
    /// Everything is listed, what loads in flight bring included: [`LoadState`] says on which layers that may be read. False
    /// when a load failed that the request rests on: what it shares is gone, only its own is listed, and it must match
    /// again.
    pub complete: bool,
    /// Window pages up to the end of the request's table: those of the shared prefix that it needs, then its own.
    pub window: Vec<PageId>,
    /// Slot with the state at the end of the shared prefix: to be read, never written.
    pub state_in: Option<PageId>,
    /// The request's own slot: to be written.
    pub state: Option<PageId>,
}

/// What a checkpoint published.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Checkpoint {
    /// Tokens of the request that the tree now holds, from the first one.
    pub published_tokens: u64,
    /// Pages of the request that the tree had already: they went back to the pool, and the table names the
    /// tree's pages instead.
    pub duplicate_pages: u32,
    /// Set when nothing was published this time; the request keeps its pages.
    pub refused: Option<Refusal>,
}

/// What became of a request to prefetch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Prefetch {
    /// The store is being asked.
    Started {
        /// The operation.
        op: OpId,
        /// Tokens looked up.
        tokens: u64,
    },
    /// Nothing was started.
    Refused(Refusal),
}

/// How a prefetch ended. `hit_tokens` is what the store said it holds; it is the sum of the other numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PrefetchEnd {
    /// Tokens the store holds, from the anchor on.
    pub hit_tokens: u64,
    /// Tokens that now lie on the host because of this prefetch.
    pub loaded_tokens: u64,
    /// Tokens that the tree had got in the meantime; their pages went back.
    pub redundant_tokens: u64,
    /// Tokens that were found and not kept.
    pub lost_tokens: u64,
    /// Why they were not kept, or why nothing was found.
    pub reason: Option<Refusal>,
}

/// State of the prefetch of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PrefetchState {
    /// None was started.
    Idle,
    /// The policy says wait.
    Pending,
    /// It has ended; match again to use what it brought.
    Ended(PrefetchEnd),
}

/// Pages of one pool, by owner. The first four add up to `capacity_pages`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PageCounts {
    /// Size of the pool (an unlimited pool: pages ever handed out).
    pub capacity_pages: u32,
    /// Owned by the pool.
    pub free_pages: u32,
    /// Owned by the tree.
    pub cached_pages: u32,
    /// Owned by requests.
    pub request_pages: u32,
    /// Owned by operations in flight.
    pub in_flight_pages: u32,
    /// Owned by nobody: `capacity - (free + cached + request + in flight)`. Anything but zero is a bug.
    pub leaked_pages: i64,
}
