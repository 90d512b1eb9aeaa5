//! Block ids of KV events, as the field's routers expect them.
//!
//! An id is the first eight bytes of a page digest as a signed big-endian number. Without a namespace the digests are those
//! of the store's chain. With one, events run a chain of their own: seeded by the salt alone, so that routers which know
//! the salt but not the adapter agree. An outer frame can then tell adapters apart.

use sha2::{Digest as _, Sha256};

use super::PageHash;
use super::namespace::{Namespace, frame};

/// Seed of the event chain of a namespace: from the salt alone; `None` without one.
#[must_use]
pub fn event_seed(ns: &Namespace) -> Option<[u8; 32]> {
    let salt = ns.salt.as_deref()?;
    let mut hasher = Sha256::new();
    hasher.update(b"sglang-cache-salt-v1\0");
    hasher.update(salt.as_bytes());
    Some(hasher.finalize().into())
}

/// The id of a block: its digest's first eight bytes, signed, big-endian.
#[must_use]
pub fn block_id(digest: &PageHash) -> i64 {
    let mut first = [0; 8];
    first.copy_from_slice(&digest.0[..8]);
    i64::from_be_bytes(first)
}

/// The outer frame: the id inside a name space of adapter and salt. The reference's default format frames with the adapter
/// alone, and only if it is a registered LoRA name; its "dynamo" format frames with both whenever one is set.
#[must_use]
pub fn framed_block_id(adapter: Option<&str>, salt: Option<&str>, id: i64) -> i64 {
    let mut hasher = Sha256::new();
    hasher.update(b"sglang-kv-event-namespace-v1");
    frame(&mut hasher, adapter);
    frame(&mut hasher, salt);
    let space: [u8; 32] = hasher.finalize().into();
    let mut hasher = Sha256::new();
    hasher.update(space);
    hasher.update(id.to_be_bytes());
    block_id(&PageHash(hasher.finalize().into()))
}
