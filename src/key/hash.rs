//! The page-hash chain: the name of a page in every store.
//!
//! `digest(i) = SHA-256(digest(i - 1) or the namespace seed or nothing, then the page's words)`. A word is a token as
//! four little-endian bytes; a bigram unit is two words. Byte-compatible with the field's reference for ids up to
//! `u32::MAX` (its wide form for larger ids cannot occur here: keys are checked at the border).

use std::fmt;

use sha2::{Digest as _, Sha256};

use super::{Key, KeyView};

/// SHA-256 name of a page and, through the chain, of everything before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageHash(pub [u8; 32]);

impl fmt::Display for PageHash {
    /// 64 lower-case hex digits, the form the reference's stores use.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for PageHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..4].iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

/// Appends the hashes of the whole pages of `key` to `out`. `prior` is the hash of the page before, or the namespace
/// seed, or `None` for the first page of the default namespace. One SHA-256 per page (124 ns for 16 tokens).
pub fn hash_pages(key: Key<'_>, page_size: u32, prior: Option<[u8; 32]>, out: &mut Vec<PageHash>) {
    let units = page_size as usize;
    let mut prior = prior;
    let mut bytes: Vec<u8> = Vec::with_capacity(8 * units);
    for page in 0..key.pages(page_size) as usize {
        bytes.clear();
        match key.view {
            KeyView::Plain => {
                let words = &key.tokens[page * units..][..units];
                words.iter().for_each(|t| bytes.extend_from_slice(&t.to_le_bytes()));
            }
            KeyView::Bigram => {
                for pair in key.tokens[page * units..][..=units].windows(2) {
                    pair.iter().for_each(|t| bytes.extend_from_slice(&t.to_le_bytes()));
                }
            }
        }
        let mut hasher = Sha256::new();
        if let Some(prior) = prior {
            hasher.update(prior);
        }
        hasher.update(&bytes);
        let digest: [u8; 32] = hasher.finalize().into();
        out.push(PageHash(digest));
        prior = Some(digest);
    }
}
