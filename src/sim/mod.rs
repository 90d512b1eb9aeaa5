//! Worlds to test in: cores, memories that hold stamps instead of bytes, and devices and stores whose work is done
//! when the test or a seed says so, in any order, with faults.
//!
//! Public (feature `sim`) so that embedders can test their scheduler against it.

pub mod rig;
pub mod rng;
pub mod world;

pub use rig::{Call, Pending, Rig, Stamp};
pub use rng::Rng;
pub use world::{Report, Weather, World};
