//! Page hashes that are kept, with the tokens they were computed from.

use std::sync::Arc;

use super::{Key, KeyView, PageHash, hash_pages};

/// The hashes of the pages of a token row from some page on. The only way to make one is to hash the row, and what is taken
/// out is compared with the row first: a hash can not come to stand for other tokens. A clone shares everything.
#[derive(Clone, Debug)]
pub struct PageNames {
    row: Arc<[u32]>,
    view: KeyView,
    page_size: u32,
    first_page: u32,
    /// What the first hash is chained to.
    prior: Option<[u8; 32]>,
    hashes: Arc<[PageHash]>,
    computed: u32,
}

impl PageNames {
    /// Hashes the whole pages of `key` from page `first_page` on, except those that `known` has; `prior` as in
    /// [`hash_pages`]. Copies the key. O(tokens).
    #[must_use]
    pub fn new(
        key: Key<'_>,
        page_size: u32,
        first_page: u32,
        prior: Option<[u8; 32]>,
        known: Option<&PageNames>,
    ) -> PageNames {
        let mut hashes = Vec::with_capacity(key.pages(page_size).saturating_sub(first_page) as usize);
        let rest = key.from_page(first_page, page_size);
        let computed = extend_hashes(rest, page_size, first_page, prior, known, &mut hashes);
        let (row, hashes) = (key.tokens.into(), hashes.into());
        PageNames { row, view: key.view, page_size, first_page, prior, hashes, computed }
    }

    /// The row from its first token on.
    #[must_use]
    pub fn row(&self) -> &Arc<[u32]> {
        &self.row
    }

    /// The hashes, from the first page that has one.
    #[must_use]
    pub fn hashes(&self) -> &Arc<[PageHash]> {
        &self.hashes
    }

    /// The page that the first hash is of.
    #[must_use]
    pub fn first_page(&self) -> u32 {
        self.first_page
    }

    /// How many of the hashes were computed for these names: those that were not known before.
    #[must_use]
    pub fn computed(&self) -> u32 {
        self.computed
    }

    /// Hashes of the first pages of `rest`, a row that continues at page `first_page` behind a page of hash `prior`: as many
    /// as are known. Equal priors are equal prefixes, so only `rest` itself is compared. O(tokens compared).
    #[must_use]
    pub fn of_rest(&self, rest: Key<'_>, first_page: u32, prior: Option<[u8; 32]>) -> &[PageHash] {
        let Some(skip) = first_page.checked_sub(self.first_page).map(|skip| skip as usize) else {
            return &[];
        };
        let chained = match skip.checked_sub(1) {
            None => self.prior,
            Some(before) => self.hashes.get(before).map(|hash| hash.0),
        };
        if self.view != rest.view || chained != prior || skip > self.hashes.len() {
            return &[];
        }
        let (p, overlap) = (self.page_size as usize, self.view.overlap());
        let here = &self.row[first_page as usize * p..];
        let page = |at: usize| at * p..(at + 1) * p + overlap;
        let left = &self.hashes[skip..];
        let same = (0..left.len()).take_while(|&at| rest.tokens.get(page(at)) == here.get(page(at))).count();
        &left[..same]
    }
}

/// Appends the hashes of the whole pages of `rest`, which continues at page `first_page` behind a page of hash `prior`: those
/// that `known` has are taken from there. Returns how many were computed. O(tokens).
pub fn extend_hashes(
    rest: Key<'_>,
    page_size: u32,
    first_page: u32,
    prior: Option<[u8; 32]>,
    known: Option<&PageNames>,
    out: &mut Vec<PageHash>,
) -> u32 {
    let known = known.map_or(&[][..], |names| names.of_rest(rest, first_page, prior));
    out.extend_from_slice(known);
    let prior = known.last().map(|hash| hash.0).or(prior);
    let unknown = rest.from_page(known.len() as u32, page_size);
    hash_pages(unknown, page_size, prior, out);
    unknown.pages(page_size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::NamespaceId;

    #[test]
    fn what_is_known_is_what_hashing_says() {
        let row: Vec<u32> = (0..40).collect();
        for key in [Key::new(NamespaceId::DEFAULT, &row), Key::bigram(NamespaceId::DEFAULT, &row)] {
            let mut all = Vec::new();
            hash_pages(key, 4, Some([7; 32]), &mut all);
            let names = PageNames::new(key, 4, 3, Some(all[2].0), None);
            assert_eq!(names.hashes()[..], all[3..]);
            assert_eq!(names.row()[..], row);
            for from in 3..all.len() as u32 {
                let prior = Some(all[from as usize - 1].0);
                assert_eq!(names.of_rest(key.from_page(from, 4), from, prior), &all[from as usize..]);
                let again = PageNames::new(key, 4, from, prior, Some(&names));
                assert_eq!((&again.hashes()[..], again.computed()), (&all[from as usize..], 0));
            }
        }
    }

    #[test]
    fn other_tokens_other_places_and_other_prefixes_are_not_known() {
        let row: Vec<u32> = (0..32).collect();
        let key = Key::new(NamespaceId::DEFAULT, &row);
        let names = PageNames::new(key, 4, 2, Some([1; 32]), None);
        let mut other = row.clone();
        other[17] = 99;
        let changed = Key::new(NamespaceId::DEFAULT, &other);
        let known = |key: Key<'_>, first, prior| names.of_rest(key.from_page(first, 4), first, prior).len();
        assert_eq!(known(key, 2, Some([1; 32])), 6);
        assert_eq!(known(changed, 2, Some([1; 32])), 2, "up to the page of the change");
        assert_eq!(known(key, 2, Some([2; 32])), 0, "behind another prefix");
        assert_eq!(known(key, 2, None), 0);
        assert_eq!(known(key, 1, Some([1; 32])), 0, "before the first");
        assert_eq!(known(key, 9, None), 0, "past the end");
        assert_eq!(names.of_rest(Key::bigram(key.ns, &row[8..]), 2, Some([1; 32])).len(), 0);
        // What a longer row adds is not known.
        let longer: Vec<u32> = (0..48).collect();
        let longer = Key::new(key.ns, &longer);
        assert_eq!(known(longer, 2, Some([1; 32])), 6);
        let mut want = Vec::new();
        hash_pages(longer.from_page(2, 4), 4, Some([1; 32]), &mut want);
        let more = PageNames::new(longer, 4, 2, Some([1; 32]), Some(&names));
        assert_eq!((&more.hashes()[..], more.computed()), (&want[..], 4));
    }
}
