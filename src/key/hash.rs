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
    let words = match key.view {
        KeyView::Plain => units,
        KeyView::Bigram => 2 * units,
    };
    // The message of one page: what it is chained to, then its words. Filled in place, so that the copy is a block copy.
    let mut message = vec![0; 32 + 4 * words];
    let mut start = if prior.is_some() { 0 } else { 32 };
    if let Some(prior) = prior {
        message[..32].copy_from_slice(&prior);
    }
    for page in 0..key.pages(page_size) as usize {
        let tokens = &key.tokens[page * units..];
        match key.view {
            KeyView::Plain => put_words(&mut message[32..], &tokens[..units]),
            KeyView::Bigram => {
                let pairs = message[32..].chunks_exact_mut(8).zip(tokens[..=units].windows(2));
                pairs.for_each(|(bytes, pair)| put_words(bytes, pair));
            }
        }
        let digest: [u8; 32] = Sha256::digest(&message[start..]).into();
        out.push(PageHash(digest));
        message[..32].copy_from_slice(&digest);
        start = 0;
    }
}

fn put_words(bytes: &mut [u8], words: &[u32]) {
    bytes.chunks_exact_mut(4).zip(words).for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_le_bytes()));
}
