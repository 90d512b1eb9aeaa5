//! sapwood: a unified radix-tree prefix cache for LLM serving.
//!
//! See `docs/ARCHITECTURE.md` for the floors and `docs/EMBEDDING.md` for the way in.

pub mod backend;
pub mod base;
#[cfg(feature = "host")]
pub mod engine;
pub mod key;
#[cfg(feature = "sim")]
pub mod model;
pub mod pd;
pub mod pool;
#[cfg(feature = "sim")]
pub mod sim;
pub mod tiers;
pub mod tree;

/// The code of `docs/EMBEDDING.md` is compiled and run with the documentation tests.
#[cfg(all(doctest, feature = "host"))]
#[doc = include_str!("../docs/EMBEDDING.md")]
struct EmbeddingPage;
