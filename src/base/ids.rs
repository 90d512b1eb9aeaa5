//! Names of things. Every id is a small copyable number with its own type, so that a page cannot be
//! passed where a node is meant.

use std::fmt;

/// One page of KV in one tier: `page_size` tokens, all layers, all planes. An index into a pool.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(pub u32);

/// A namespace, interned by [`Namespaces`](crate::key::Namespaces). `NamespaceId::DEFAULT` is the one
/// whose fields are all absent.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamespaceId(pub u32);

impl NamespaceId {
    /// The namespace without adapter, salt and user key.
    pub const DEFAULT: NamespaceId = NamespaceId(0);
}

/// An operation in flight. Never reused within the life of a core.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(pub u64);

/// A node of the tree: slot index and the generation of that slot. A slot that is freed gets a new
/// generation, so an old id can never name a new node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId {
    /// Slot in the arena.
    pub index: u32,
    /// Generation of the slot when this id was made.
    pub generation: u32,
}

/// Where a copy of a page can lie.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Tier {
    /// Memory the model computes on.
    Device,
    /// Host memory.
    Host,
    /// Everything behind a [`Store`](crate::backend::store::Store): files, Redis, object storage.
    Store,
}

impl fmt::Debug for PageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "p{}", self.0)
    }
}

impl fmt::Debug for NamespaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ns{}", self.0)
    }
}

impl fmt::Debug for OpId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "op{}", self.0)
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "n{}.{}", self.index, self.generation)
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index, self.generation)
    }
}
