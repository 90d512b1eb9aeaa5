//! Faults of other caches, replayed against the tree: one story a file, each opening with what happened there. Those that
//! concern the tiers are in `tests/tiers`; `docs/TESTING.md` has the list of all.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod accounting;
mod bigram_refill;
mod component_cascades;
#[cfg(feature = "host")]
mod decode_only;
mod eviction_cost;
mod host_events;
mod host_full;
mod lock_covers_match;
mod namespaces;
mod refused;
mod restore_races;
mod rig;
mod split_during_backup;
mod split_during_store;
mod unbacked_anchor;
mod window_boundary;
