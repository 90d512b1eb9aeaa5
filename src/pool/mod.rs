//! Floor 1: page numbers. Who hands them out, how runs of them are written down, how large a page is and how its bytes
//! are ordered. No bytes here.

mod extents;
pub mod geometry;
pub mod layout;
mod ledger;
mod pages;

pub use extents::{Extent, extents_of};
pub use geometry::{
    Capacities, Capacity, Geometry, GeometryBuilder, GeometryError, Plane, PlaneId, PlaneKind, PlaneSet,
    PoolKind,
};
pub use ledger::{Ledger, LedgerRow};
pub use pages::{PagePool, PoolError};
