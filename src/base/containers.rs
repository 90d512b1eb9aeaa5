//! The containers used inside the crate, chosen in one place.

use std::collections::{HashMap, HashSet};
use std::hash::BuildHasher;

/// Hasher state of internal maps. The seeds are fixed: a cache must decide the same on every rank and in
/// every replay. Maps with caller-chosen keys are bounded by what the caller owns, and nothing iterates a
/// map to decide.
#[derive(Clone)]
pub struct FixedState(ahash::RandomState);

impl Default for FixedState {
    fn default() -> Self {
        // Digits of pi; any constants do.
        FixedState(ahash::RandomState::with_seeds(
            0x243F_6A88_85A3_08D3,
            0x1319_8A2E_0370_7344,
            0xA409_3822_299F_31D0,
            0x082E_FA98_EC4E_6C89,
        ))
    }
}

impl BuildHasher for FixedState {
    type Hasher = ahash::AHasher;

    fn build_hasher(&self) -> ahash::AHasher {
        self.0.build_hasher()
    }
}

/// Hash map with a fixed seed. Its iteration order must not reach a decision.
pub type Map<K, V> = HashMap<K, V, FixedState>;
/// Hash set with a fixed seed.
pub type Set<K> = HashSet<K, FixedState>;
