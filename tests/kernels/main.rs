//! The copy kernels on the CPU against a naive reference, over random shapes, layouts and grids.
//!
//! Every test prints its seed and takes one from `SAPWOOD_SEED`; `SAPWOOD_SHAPES` sets the number of shapes
//! per kernel (default 2,000).
#![cfg(feature = "cpu-kernels")]
#![expect(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]
#![expect(unsafe_code, reason = "the kernels take addresses; each call says what makes them valid")]

mod faults;
mod mx8;
mod shapes;
mod world;
