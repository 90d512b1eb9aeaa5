//! Floor 1: pages as numbers. Pure.

pub mod geometry;

pub use geometry::{
    Capacities, Capacity, Geometry, GeometryError, Plane, PlaneId, PlaneKind, PlaneSet, PoolKind,
};
