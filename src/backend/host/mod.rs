//! Host memory: arenas of pages, the claims that guard them, and the copies between two arenas.

mod arena;
pub mod budget;
mod claim;
mod copy;

pub use arena::{HostArena, MemoryError, MemoryPlan, Order, POISON_BYTE, PageRange};
pub use budget::{Budget, BudgetError};
pub use claim::{Access, PageClaim};
pub(crate) use copy::copy_layers;
