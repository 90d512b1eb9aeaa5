//! A world to test in: a core, memories that hold stamps instead of bytes, and a device and a store whose work is
//! done when the test says so, in any order.
//!
//! Public (feature `sim`) so that embedders can test their scheduler against it.

pub mod rig;

pub use rig::{Call, Pending, Rig, Stamp};
