//! Floor 1: page numbers. Who hands them out, how runs of them are written down, how large a page is. No bytes here.

mod extents;
mod geometry;
mod ledger;
mod pages;

pub use extents::{Extent, extents_of};
pub use geometry::*;
pub use ledger::{Ledger, LedgerRow};
pub use pages::{PagePool, PoolError};
