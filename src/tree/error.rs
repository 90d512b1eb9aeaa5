//! What the tree refuses. Every refusal happens before any mutation.

use crate::base::{NamespaceId, NodeId, OpId, PageId, Violation};

use super::{SessionId, WaiterId};

/// A request that the tree did not carry out, and why. The tree is as it was before the call.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TreeError {
    /// The id names no node: it was evicted, merged, or never made here.
    #[error("node {0} does not exist")]
    UnknownNode(NodeId),
    /// The root cannot be demoted, deleted, backed up, loaded or stored.
    #[error("the root has no pages")]
    Root,
    /// The namespace was not interned in this tree.
    #[error("namespace {0:?} is unknown")]
    UnknownNamespace(NamespaceId),
    /// The key continues a node of another namespace.
    #[error("key of {key:?} under a node of {node:?}")]
    NamespaceMismatch {
        /// Of the key.
        key: NamespaceId,
        /// Of the node.
        node: NamespaceId,
    },
    /// The key counts its units in another way than the tree.
    #[error("key view differs from the tree's")]
    ViewMismatch,
    /// The key does not start with the boundary token of its anchor (bigram view).
    #[error("key does not continue its anchor")]
    NotContinuing,
    /// A page list has the wrong length.
    #[error("{got} pages for {want}")]
    PageCount {
        /// Pages needed.
        want: u32,
        /// Pages given.
        got: usize,
    },
    /// A hash list has the wrong length.
    #[error("{got} hashes for {want} pages")]
    HashCount {
        /// Hashes needed.
        want: u32,
        /// Hashes given.
        got: usize,
    },
    /// A hash is not that of its page under this anchor.
    #[error("hash of page {page} is not the page's")]
    HashMismatch {
        /// Which page of the list.
        page: u32,
    },
    /// `pages[..owned_from]` should lie on the device in this tree, and do not (any more).
    #[error("caller owns pages from {owned_from} on, the tree holds {held} on the device")]
    PrefixNotHeld {
        /// Said by the caller.
        owned_from: u32,
        /// Pages of the key that the tree holds on the device.
        held: u32,
    },
    /// The caller hands over a page that the tree already owns at that very place.
    #[error("{page:?} is the tree's own page")]
    NotYours {
        /// The page.
        page: PageId,
    },
    /// A node, or something below it, is locked, pinned or part of an operation.
    #[error("node {0} is in use")]
    InUse(NodeId),
    /// The node holds nothing on the device.
    #[error("node {0} is not on the device")]
    NotOnDevice(NodeId),
    /// The node is on the device, or on its way there.
    #[error("node {0} is already on the device or loading")]
    AlreadyOnDevice(NodeId),
    /// The node, or a component page in it, is being loaded from the host; try again when that has ended.
    #[error("node {0} is being loaded")]
    LoadInFlight(NodeId),
    /// The node has no published host copy.
    #[error("node {0} is not backed up")]
    NotBackedUp(NodeId),
    /// The node has a host copy, published or pending.
    #[error("node {0} already has a host copy")]
    AlreadyBackedUp(NodeId),
    /// The parent must hold a host copy first.
    #[error("the parent of node {0} is not backed up")]
    ParentNotBackedUp(NodeId),
    /// The node has a child on the device.
    #[error("node {0} is not a leaf of the device tier")]
    NotLeaf(NodeId),
    /// A receipt that this tree did not issue, or that was used up.
    #[error("node {0} holds no such lock or pin")]
    ForeignReceipt(NodeId),
    /// No session of that id is open.
    #[error("session {0:?} is not open")]
    UnknownSession(SessionId),
    /// The waiting request has stopped waiting, or never did.
    #[error("{0:?} does not wait")]
    UnknownWaiter(WaiterId),
    /// No operation of that id is in flight.
    #[error("{0:?} is not in flight")]
    UnknownOp(OpId),
    /// The id is in use by an operation in flight.
    #[error("{0:?} is already in flight")]
    OpInFlight(OpId),
    /// The plan lists nothing.
    #[error("the plan is empty")]
    EmptyPlan,
    /// The tree changed since the plan was made.
    #[error("the plan is stale at node {0}")]
    StalePlan(NodeId),
    /// A store write of this node is in flight.
    #[error("node {0} is being stored")]
    AlreadyStoring(NodeId),
    /// Every page of the node is in the store.
    #[error("node {0} is already stored")]
    AlreadyStored(NodeId),
    /// Hashes are off, or not known for this node.
    #[error("node {0} has no hashes")]
    NoHashes(NodeId),
    /// Operations in flight own pages; end them first.
    #[error("{0} operations in flight")]
    OpsInFlight(u32),
    /// The tree cannot change the rule: node {0} has a host copy below a parent without one.
    #[error("node {0} has a host copy below a parent without one")]
    RuleNotMet(NodeId),
    /// The operation needs a component that this tree does not have.
    #[error("component is not configured")]
    NoComponent,
    /// A count would pass its limit.
    #[error("limit of {0} reached")]
    Limit(&'static str),
    /// A bug of ours was found before it did harm.
    #[error(transparent)]
    Violation(#[from] Violation),
}

/// A configuration that makes no sense.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TreeConfigError {
    /// Not in 1..=PAGE_SIZE_MAX.
    #[error("page size {0} is out of range")]
    PageSize(u32),
    /// A window of no pages.
    #[error("window of 0 pages")]
    Window,
    /// The bigram view and the State component exclude each other, as in the reference.
    #[error("bigram view with the State component")]
    BigramState,
}
