//! The contract with the executors: what the core asks for and what it is told.
//!
//! Every action names an operation. The pages in it belong to that operation until the event that ends it,
//! whatever becomes of the request that caused it. An executor answers every action that has an end with
//! exactly one final event, also after a cancel.

use std::sync::Arc;

use crate::base::{Fence, NamespaceId, OpId, PageId};
use crate::key::PageHash;
pub use crate::pool::PoolKind;

/// One copy: `source` in the tier copied from, `target` in the tier copied to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PagePair {
    /// The pool that both pages are of, each on its tier.
    pub pool: PoolKind,
    /// Page read.
    pub source: PageId,
    /// Page written.
    pub target: PageId,
}

/// One page of a store batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoreItem {
    /// The pool of the page. The same content id names one object in each pool.
    pub pool: PoolKind,
    /// Content id of the page.
    pub hash: PageHash,
    /// Host page read (put) or written (get). All planes of the pool travel together.
    pub host_page: PageId,
}

/// What the core asks an executor to do.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Action {
    /// Copy device pages to host pages, all layers and planes. Ends with [`Event::Copied`].
    CopyToHost {
        /// The backup.
        op: OpId,
        /// Device page read, host page written.
        pairs: Vec<PagePair>,
        /// The sources are written once this fence has passed.
        after: Fence,
    },
    /// Copy host pages to device pages, layer by layer. [`Event::LayerCopied`] may tell of progress; ends with
    /// [`Event::Copied`].
    CopyToDevice {
        /// The load.
        op: OpId,
        /// Host page read, device page written.
        pairs: Vec<PagePair>,
        /// Nothing computes on the targets any more once this fence has passed.
        after: Fence,
    },
    /// Ask which of these pages the store holds. Ends with [`Event::Queried`].
    StoreQuery {
        /// The prefetch.
        op: OpId,
        /// Namespace of the pages.
        namespace: NamespaceId,
        /// Content ids, in prefix order.
        hashes: Arc<[PageHash]>,
        /// The pools to look in, Full first.
        pools: Vec<PoolKind>,
    },
    /// Read pages. Ends with [`Event::Got`].
    StoreGet {
        /// The prefetch.
        op: OpId,
        /// Namespace of the pages.
        namespace: NamespaceId,
        /// Which of the operation's batches this is.
        batch: u32,
        /// What to read and where to.
        items: Vec<StoreItem>,
    },
    /// Write pages that the store does not hold yet. Ends with [`Event::Put`].
    StorePut {
        /// The store backup.
        op: OpId,
        /// Namespace of the pages.
        namespace: NamespaceId,
        /// Which of the operation's batches this is.
        batch: u32,
        /// What to write.
        items: Vec<StoreItem>,
    },
    /// The result of this prefetch is not wanted any more. Batches in flight still end with their event; they
    /// may end earlier for this.
    StoreCancel {
        /// The prefetch.
        op: OpId,
    },
}

impl Action {
    /// The operation that the action belongs to.
    #[must_use]
    pub fn op(&self) -> OpId {
        match self {
            Action::CopyToHost { op, .. }
            | Action::CopyToDevice { op, .. }
            | Action::StoreQuery { op, .. }
            | Action::StoreGet { op, .. }
            | Action::StorePut { op, .. }
            | Action::StoreCancel { op } => *op,
        }
    }
}

/// How one page of a store batch ended. Ordered by how bad it is: the outcome of a page is the worst of its planes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[non_exhaustive]
pub enum PageOutcome {
    /// Read and verified, or written.
    Done,
    /// The store does not hold the page.
    Missing,
    /// The bytes are not what was written: wrong size, checksum, version or key. A miss.
    Corrupt,
    /// The store has no room, or refuses for now.
    Refused,
    /// Time-out, transport fault, anything after which the state of the page is unknown.
    Failed,
}

/// What an executor tells the core.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Event {
    /// A copy between device and host has ended. All pages or none.
    Copied {
        /// The operation.
        op: OpId,
        /// Whether every byte of every page arrived.
        ok: bool,
    },
    /// Layers `0..layers` of a copy to the device have arrived.
    LayerCopied {
        /// The load.
        op: OpId,
        /// Layers that may be read.
        layers: u32,
    },
    /// The answer to a query: for each pool asked for, in that order, one flag per hash. `None`: the store did not answer.
    Queried {
        /// The prefetch.
        op: OpId,
        /// Presence, in the order asked. What is missing at the end is not there.
        present: Option<Vec<bool>>,
    },
    /// A read batch has ended: one outcome per item. A shorter list means the rest failed.
    Got {
        /// The prefetch.
        op: OpId,
        /// The batch.
        batch: u32,
        /// Outcomes, in the order of the items.
        outcomes: Vec<PageOutcome>,
    },
    /// A write batch has ended: one outcome per item. A shorter list means the rest failed.
    Put {
        /// The store backup.
        op: OpId,
        /// The batch.
        batch: u32,
        /// Outcomes, in the order of the items.
        outcomes: Vec<PageOutcome>,
    },
}

/// Names the end of one action.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum EndKey {
    /// Of a copy between device and host.
    Copy(OpId),
    /// Of a query.
    Query(OpId),
    /// Of a read batch.
    Get(OpId, u32),
    /// Of a write batch.
    Put(OpId, u32),
}

impl Event {
    /// The end that the event tells of; `None` for progress.
    #[must_use]
    pub fn end_key(&self) -> Option<EndKey> {
        Some(match self {
            Event::Copied { op, .. } => EndKey::Copy(*op),
            Event::Queried { op, .. } => EndKey::Query(*op),
            Event::Got { op, batch, .. } => EndKey::Get(*op, *batch),
            Event::Put { op, batch, .. } => EndKey::Put(*op, *batch),
            Event::LayerCopied { .. } => return None,
        })
    }

    /// The operation that the event belongs to.
    #[must_use]
    pub fn op(&self) -> OpId {
        match self {
            Event::Copied { op, .. }
            | Event::LayerCopied { op, .. }
            | Event::Queried { op, .. }
            | Event::Got { op, .. }
            | Event::Put { op, .. } => *op,
        }
    }
}
