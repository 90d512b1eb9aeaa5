//! Conservation check: every page of a pool has exactly one owner.

use crate::base::invariant::Violation as V;
use crate::base::{PageId, Violation};

use super::PagePool;

/// One owner found for a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LedgerRow {
    /// The page.
    pub page: PageId,
    /// Who says it owns it, e.g. `"tree n5.0"` or `"op3"`.
    pub owner: String,
}

/// Collects owners and compares them with a pool. For tests, idle checks and incident dumps: O(pages), allocates.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    rows: Vec<LedgerRow>,
}

impl Ledger {
    /// An empty ledger.
    #[must_use]
    pub fn new() -> Ledger {
        Ledger::default()
    }

    /// Enters `owner` for `page`.
    pub fn own(&mut self, page: PageId, owner: impl Into<String>) {
        self.rows.push(LedgerRow { page, owner: owner.into() });
    }

    /// Every page with two owners, owned while free, or out without an owner.
    #[must_use]
    pub fn check(&self, pool: &PagePool) -> Vec<Violation> {
        let mut rows: Vec<&LedgerRow> = self.rows.iter().collect();
        rows.sort_by_key(|row| row.page);
        let mut found = Vec::new();
        for pair in rows.windows(2) {
            if pair[0].page == pair[1].page {
                let detail =
                    format!("{:?} owned by {} and by {}", pair[0].page, pair[0].owner, pair[1].owner);
                found.push(V { rule: "one-owner", detail });
            }
        }
        for row in &rows {
            if pool.is_free(row.page) {
                found.push(V {
                    rule: "owned-is-out",
                    detail: format!("{:?} of {} is free", row.page, row.owner),
                });
            }
        }
        rows.dedup_by_key(|row| row.page);
        if found.is_empty() && rows.len() as u32 != pool.used_pages() {
            let detail = format!("{} pages out, {} with an owner", pool.used_pages(), rows.len());
            found.push(V { rule: "conservation", detail });
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_double_owners_free_owners_and_leaks() {
        let mut pool = PagePool::new(4);
        let mut pages = Vec::new();
        assert!(pool.alloc(3, &mut pages));
        let mut good = Ledger::new();
        pages.iter().for_each(|&p| good.own(p, "tree"));
        assert_eq!(good.check(&pool), []);
        let rules = |ledger: &Ledger| ledger.check(&pool).iter().map(|v| v.rule).collect::<Vec<_>>();
        let mut twice = good.clone();
        twice.own(PageId(1), "op1");
        assert_eq!(rules(&twice), ["one-owner"]);
        assert_eq!(twice.check(&pool)[0].detail, "p1 owned by tree and by op1");
        let mut free = good.clone();
        free.own(PageId(3), "op1");
        assert_eq!(rules(&free), ["owned-is-out"]);
        let mut leak = Ledger::new();
        leak.own(PageId(0), "tree");
        assert_eq!(rules(&leak), ["conservation"]);
    }
}
