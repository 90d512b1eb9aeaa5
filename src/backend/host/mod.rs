//! Host memory: arenas of pages, the claims that guard them, and the copies between two arenas.

mod arena;
pub mod budget;
mod bulk;
mod claim;
mod copy;
mod sum;

pub use arena::{HostArena, MemoryError, MemoryPlan, Order, POISON_BYTE, PageRange};
pub use budget::{Budget, BudgetError};
pub use bulk::{CopyPool, CopyPoolError, Reuse, Run, copy_means};
pub use claim::{Access, PageClaim};
pub(crate) use copy::copy_layers;
pub use sum::page_sum;
