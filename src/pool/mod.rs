//! Floor 1: page numbers. Who hands them out and how runs of them are written down. No bytes here.

mod extents;
mod ledger;
mod pages;

pub use extents::{Extent, extents_of};
pub use ledger::{Ledger, LedgerRow};
pub use pages::{PagePool, PoolError};
