//! Token keys: a borrowed token row, the namespace it belongs to, and how its units are counted.

use crate::base::NamespaceId;

/// How tokens become logical units.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum KeyView {
    /// One unit per token.
    #[default]
    Plain,
    /// One unit per pair of neighbouring tokens (EAGLE-type drafts): `n` tokens are `n - 1` units, and two
    /// neighbouring pages share their boundary token.
    Bigram,
}

impl KeyView {
    /// Tokens that a run of units needs beyond one per unit: 0 or 1.
    #[must_use]
    pub const fn overlap(self) -> usize {
        match self {
            KeyView::Plain => 0,
            KeyView::Bigram => 1,
        }
    }
}

/// A prefix to look up or to insert. Borrowed and copyable; cut to whole pages by whoever uses it.
#[derive(Clone, Copy, Debug)]
pub struct Key<'a> {
    /// Namespace of the whole row.
    pub ns: NamespaceId,
    /// Raw tokens, one per position.
    pub tokens: &'a [u32],
    /// How the tokens are counted. A tree refuses a key of another view than its own.
    pub view: KeyView,
}

impl<'a> Key<'a> {
    /// A plain key.
    #[must_use]
    pub fn new(ns: NamespaceId, tokens: &'a [u32]) -> Key<'a> {
        Key { ns, tokens, view: KeyView::Plain }
    }

    /// A bigram key over the same raw tokens.
    #[must_use]
    pub fn bigram(ns: NamespaceId, tokens: &'a [u32]) -> Key<'a> {
        Key { ns, tokens, view: KeyView::Bigram }
    }

    /// Logical units: tokens, or pairs of neighbours.
    #[must_use]
    pub fn units(&self) -> usize {
        self.tokens.len().saturating_sub(self.view.overlap())
    }

    /// Whole pages of `page_size` units; 0 for a page size of 0. Saturates at `u32::MAX`.
    #[must_use]
    pub fn pages(&self, page_size: u32) -> u32 {
        if page_size == 0 {
            return 0;
        }
        u32::try_from(self.units() / page_size as usize).unwrap_or(u32::MAX)
    }

    /// The same row from page `from` on (for a key that continues after an anchor). Past the end: empty.
    #[must_use]
    pub fn from_page(&self, from: u32, page_size: u32) -> Key<'a> {
        let at = (from as usize).saturating_mul(page_size as usize).min(self.tokens.len());
        Key { tokens: &self.tokens[at..], ..*self }
    }
}

/// A token id that does not fit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("token {token} at position {position} is not in 0..=u32::MAX")]
pub struct TokenError {
    /// Where in the row.
    pub position: usize,
    /// The value found.
    pub token: i64,
}

/// Narrows `from` into `into` (cleared first). Nothing is kept on error. O(n).
///
/// # Errors
/// The first token that is negative or above `u32::MAX`.
pub fn tokens_from_i64(from: &[i64], into: &mut Vec<u32>) -> Result<(), TokenError> {
    into.clear();
    // One OR over all decides; the second pass only runs to name the culprit.
    let all = from.iter().fold(0, |acc, &t| acc | t);
    if all >> 32 != 0
        && let Some((position, &token)) = from.iter().enumerate().find(|(_, t)| **t >> 32 != 0)
    {
        return Err(TokenError { position, token });
    }
    into.extend(from.iter().map(|&t| t as u32));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_and_pages_of_both_views() {
        let row = [1, 2, 3, 4, 5];
        let plain = Key::new(NamespaceId::DEFAULT, &row);
        let pairs = Key::bigram(NamespaceId::DEFAULT, &row);
        assert_eq!((plain.units(), plain.pages(2), plain.pages(5), plain.pages(6)), (5, 2, 1, 0));
        assert_eq!((pairs.units(), pairs.pages(2), pairs.pages(5)), (4, 2, 0));
        assert_eq!(Key::bigram(NamespaceId::DEFAULT, &[]).units(), 0);
        assert_eq!(plain.pages(0), 0);
        assert_eq!(pairs.from_page(1, 2).tokens, &[3, 4, 5]);
        assert_eq!(plain.from_page(9, 2).tokens, &[] as &[u32]);
    }

    #[test]
    fn the_border_takes_u32_and_nothing_else() {
        let mut out = vec![9];
        assert_eq!(tokens_from_i64(&[0, 7, i64::from(u32::MAX)], &mut out), Ok(()));
        assert_eq!(out, [0, 7, u32::MAX]);
        for bad in [-1, i64::MIN, i64::from(u32::MAX) + 1, i64::MAX] {
            assert_eq!(tokens_from_i64(&[3, bad], &mut out), Err(TokenError { position: 1, token: bad }));
            assert!(out.is_empty());
        }
    }
}
