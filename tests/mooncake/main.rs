//! The store over Mooncake against the real service, and the caches above it.
//!
//! The tests look at what processes leave behind, so they run one after the other ([`kit::alone`]).
#![expect(clippy::unwrap_used, reason = "a test helper that cannot go on has failed")]

mod engine;
mod kit;
mod matrix;
#[path = "../engine/kit.rs"]
#[expect(dead_code, reason = "the tests of the engine use more of it")]
mod pools;
mod refusing;
mod service;
mod session;
#[cfg(feature = "mooncake-capi")]
mod stand_in;
mod throughput;
