//! Floor 0: ids, time, invariants, digest, small containers. Pure; imports nothing of the crate.

pub mod containers;
pub mod digest;
pub mod fence;
pub mod heap;
pub mod ids;
pub mod invariant;
pub mod limits;
pub mod plant;
pub mod prefetch;
pub mod slab;
pub mod tag_table;
pub mod time;

pub use digest::Digest;
pub use fence::Fence;
pub use ids::{NamespaceId, NodeId, OpId, PageId, Tier};
pub use invariant::Violation;
pub use time::Time;
