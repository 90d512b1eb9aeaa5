//! Runs of neighbouring pages. A copy of a run is one descriptor instead of many.

use crate::base::PageId;

/// `pages` neighbouring pages from `first` on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// First page.
    pub first: PageId,
    /// Length in pages, at least 1.
    pub pages: u32,
}

/// The maximal ascending runs of `pages`, in order. O(n), allocates nothing.
pub fn extents_of(pages: &[PageId]) -> impl Iterator<Item = Extent> + '_ {
    let mut rest = pages;
    std::iter::from_fn(move || {
        let first = *rest.first()?;
        let len = rest.iter().zip(first.0..=u32::MAX).take_while(|(p, want)| p.0 == *want).count();
        rest = &rest[len..];
        Some(Extent { first, pages: len as u32 })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_maximal_and_in_order() {
        let ids = [3, 4, 5, 9, 8, 7, 8, u32::MAX - 1, u32::MAX].map(PageId);
        let got: Vec<_> = extents_of(&ids).map(|e| (e.first.0, e.pages)).collect();
        assert_eq!(got, [(3, 3), (9, 1), (8, 1), (7, 2), (u32::MAX - 1, 2)]);
        assert_eq!(extents_of(&[]).count(), 0);
        let back: Vec<_> =
            extents_of(&ids).flat_map(|e| (0..e.pages).map(move |i| PageId(e.first.0 + i))).collect();
        assert_eq!(back, ids);
    }
}
