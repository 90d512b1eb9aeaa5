//! Floor 1: what names a prefix. Namespaces, token keys, page hashes.
//!
//! A key is borrowed from the caller and never copied until a node is made of it. Everything is counted in
//! pages of `page_size` logical units: one token each, or one pair of neighbouring tokens in the bigram view.

mod event;
mod hash;
mod names;
mod namespace;
mod tokens;

pub use event::{block_id, event_seed, framed_block_id};
pub use hash::{PageHash, hash_pages};
pub use names::{PageNames, extend_hashes};
pub use namespace::{Namespace, NamespaceError, Namespaces};
pub use tokens::{Key, KeyView, TokenError, tokens_from_i64};
