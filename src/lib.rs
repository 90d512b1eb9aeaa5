//! sapwood: a unified radix-tree prefix cache for LLM serving.
//!
//! See `docs/ARCHITECTURE.md` for the floors and `docs/EMBEDDING.md` for the way in.

pub mod backend;
pub mod base;
pub mod pd;
