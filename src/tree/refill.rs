//! Hand-over of host pages that came from a store.
//!
//! The anchor was chosen when the fetch was issued; what counts is its state now. That is read before anything is changed:
//! stamping a host copy below a node without one is the fault this file exists to prevent (sgl#31902).

use crate::base::plant::{Plant, is_planted};
use crate::base::{NodeId, PageId};
use crate::key::{Key, PageHash, PageNames};

use super::node::{ROOT, Residency};
use super::walk::page_name;
use super::{BackupRule, DropReason, HostInsert, Tree, TreeError};

/// Names that come with a refill.
#[derive(Clone, Copy)]
enum Names<'a> {
    /// Somebody says so: to be checked.
    Claimed(&'a [PageHash]),
    /// They can not be those of other tokens.
    Proven(&'a PageNames),
}

impl Tree {
    /// Puts pages from a store below `anchor`. `rest` starts at the anchor's end (in the bigram view with the anchor's last
    /// token), `host_pages` has one page per whole page of it, `hashes` one name per page (may be empty while the tree
    /// keeps none). Walking down, nodes without a host copy adopt the pages and the remainder becomes a host-only node, as
    /// long as the parent is the root or backed up; under [`BackupRule::Free`] nodes on the device keep as they are and
    /// the remainder is always kept. All other pages are appended to `out`. The path counts as used.
    ///
    /// # Errors
    /// A key or list that does not fit, or a hash that is not the page's. Nothing is changed, nothing handed over.
    pub fn insert_host(
        &mut self,
        anchor: NodeId,
        rest: Key<'_>,
        host_pages: &[PageId],
        hashes: &[PageHash],
        out: &mut Vec<PageId>,
    ) -> Result<HostInsert, TreeError> {
        self.refill(anchor, rest, host_pages, Names::Claimed(hashes), out)
    }

    /// [`insert_host`](Tree::insert_host) with names that need no check.
    ///
    /// # Errors
    /// A key or list that does not fit. Nothing is changed, nothing handed over.
    pub fn insert_host_named(
        &mut self,
        anchor: NodeId,
        rest: Key<'_>,
        host_pages: &[PageId],
        names: &PageNames,
        out: &mut Vec<PageId>,
    ) -> Result<HostInsert, TreeError> {
        self.refill(anchor, rest, host_pages, Names::Proven(names), out)
    }

    fn refill(
        &mut self,
        anchor: NodeId,
        rest: Key<'_>,
        host_pages: &[PageId],
        names: Names<'_>,
        out: &mut Vec<PageId>,
    ) -> Result<HostInsert, TreeError> {
        self.check_key(rest)?;
        let whole = rest.pages(self.page_size);
        if host_pages.len() != whole as usize {
            return Err(TreeError::PageCount { want: whole, got: host_pages.len() });
        }
        if let Names::Claimed(hashes) = names
            && hashes.len() != whole as usize
            && (self.hashing || !hashes.is_empty())
        {
            return Err(TreeError::HashCount { want: whole, got: hashes.len() });
        }
        let Some(start) = self.arena.slot(anchor) else {
            return Ok(self.drop_refill(anchor, DropReason::AnchorGone, host_pages, out));
        };
        let (hashes, computed) = self.check_refill(start, rest, names)?;
        self.stats.hashed_pages += computed;
        if self.rule == BackupRule::BackedUpParent && !is_planted(Plant::NoAnchorCheck) {
            match self.arena.nodes[start as usize].host {
                Residency::Present => {}
                Residency::Absent => {
                    return Ok(self.drop_refill(anchor, DropReason::AnchorNotBackedUp, host_pages, out));
                }
                Residency::Pending => {
                    return Ok(self.drop_refill(anchor, DropReason::BackupInFlight, host_pages, out));
                }
            }
        }
        self.tick();
        self.commit_refill(start, rest, host_pages, hashes, out)
    }

    fn drop_refill(
        &mut self,
        anchor: NodeId,
        why: DropReason,
        pages: &[PageId],
        out: &mut Vec<PageId>,
    ) -> HostInsert {
        out.extend_from_slice(pages);
        self.stats.refill_pages_dropped += pages.len() as u64;
        HostInsert {
            node: anchor,
            refilled_pages: 0,
            attached_pages: 0,
            redundant_pages: 0,
            dropped_pages: pages.len() as u32,
            dropped: Some(why),
        }
    }

    /// Checks that `rest` continues the anchor and that the names are the pages'. Returns the hashes of its pages, none if the
    /// tree keeps none, and how many were computed.
    fn check_refill(
        &self,
        start: u32,
        rest: Key<'_>,
        names: Names<'_>,
    ) -> Result<(Vec<PageHash>, u64), TreeError> {
        let (mut own, mut computed) = (Vec::new(), 0);
        if start != ROOT {
            let ns = self.arena.nodes[start as usize].ns;
            if ns != rest.ns {
                return Err(TreeError::NamespaceMismatch { key: rest.ns, node: ns });
            }
            let starts_right = self.view.overlap() == 0
                || rest.tokens.is_empty()
                || self.tokens_of(start).last() == rest.tokens.first();
            if !starts_right {
                return Err(TreeError::NotContinuing);
            }
        }
        if self.hashing {
            match names {
                Names::Proven(names) => computed = self.hash_below(start, rest, Some(names), &mut own),
                Names::Claimed(hashes) => {
                    computed = self.hash_below(start, rest, None, &mut own);
                    if let Some(at) = own.iter().zip(hashes).position(|(a, b)| a != b) {
                        return Err(TreeError::HashMismatch { page: at as u32 });
                    }
                }
            }
        }
        Ok((own, computed))
    }

    fn commit_refill(
        &mut self,
        start: u32,
        rest: Key<'_>,
        host_pages: &[PageId],
        hashes: Vec<PageHash>,
        out: &mut Vec<PageId>,
    ) -> Result<HostInsert, TreeError> {
        let whole = host_pages.len();
        let path = self.walk_and_split(start, rest);
        let mut done = HostInsert {
            node: self.arena.id(start),
            refilled_pages: 0,
            attached_pages: 0,
            redundant_pages: 0,
            dropped_pages: 0,
            dropped: None,
        };
        let (mut at, mut pos) = (start, 0);
        for &next in &path {
            let node = &self.arena.nodes[next as usize];
            let pages = node.pages;
            let mine = &host_pages[pos..pos + pages as usize];
            let adopts = node.host == Residency::Absent && self.rule == BackupRule::BackedUpParent;
            if adopts && !self.may_hold_host(node.parent) {
                done.dropped = Some(DropReason::BackupInFlight);
                break;
            }
            if adopts {
                self.adopt_host(next, mine)?;
                done.refilled_pages += pages;
            } else {
                out.extend_from_slice(mine);
                done.redundant_pages += pages;
            }
            if self.arena.nodes[next as usize].host == Residency::Present {
                done.node = self.arena.id(next);
            }
            (at, pos) = (next, pos + pages as usize);
        }
        let left = (whole - pos) as u32;
        if left > 0 && done.dropped.is_none() && self.may_hold_host(at) {
            at = self.attach_host_leaf(at, rest, pos, host_pages, hashes)?;
            self.meet_waiting(at);
            done.attached_pages = left;
            done.node = self.arena.id(at);
        } else if left > 0 {
            done.dropped = Some(DropReason::BackupInFlight);
            done.dropped_pages = left;
            out.extend_from_slice(&host_pages[pos..]);
            self.stats.refill_pages_dropped += u64::from(left);
        }
        self.touch_path(at);
        self.path = path;
        Ok(done)
    }

    fn attach_host_leaf(
        &mut self,
        parent: u32,
        rest: Key<'_>,
        from: usize,
        host_pages: &[PageId],
        hashes: Vec<PageHash>,
    ) -> Result<u32, TreeError> {
        let p = self.page_size as usize;
        let tokens = &rest.tokens[from * p..host_pages.len() * p + self.view.overlap()];
        let run = self.arena.add_run(tokens, (host_pages.len() - from) as u32);
        if let Some(hashes) = hashes.get(from..)
            && self.hashing
        {
            self.arena.set_hashes(run, 0, hashes);
        }
        let first = page_name(rest.ns, &tokens[..p + self.view.overlap()]);
        let at = self.add_leaf(parent, rest.ns, run, first);
        self.arena.nodes[at as usize].priority = self.arena.nodes[parent as usize].priority;
        if self.orders.policy.uses_reach() {
            self.arena.nodes[at as usize].reach = self.arena.nodes[at as usize].end();
        }
        self.adopt_host(at, &host_pages[from..])?;
        Ok(at)
    }
}
