//! Hand-over of device pages: what the tree lacks becomes its own, what it has goes back.

use crate::base::plant::{Plant, is_planted};
use crate::base::{PageId, Tier};
use crate::key::{Key, PageNames};

use super::node::{NO_PAGE, ROOT, Residency};
use super::walk::{Walk, page_name};
use super::{DeviceLock, InsertComponents, InsertOpts, InsertOut, Inserted, Tree, TreeError};

impl Tree {
    /// Puts the whole pages of `key` into the tree. `pages` has one page per whole page of the key, from the root on;
    /// `pages[..owned_from]` are the tree's (a look-up returned them and a lock held them since), the rest are the
    /// caller's and are handed over. Pages that the tree has on the device already come back in `out.returned`, each
    /// once; `out.canonical` says what the tree holds for `owned_from..`. Nodes that were only on the host take the
    /// caller's pages. Nodes on their way from the host can not: whoever waits for that load has its pages in a page
    /// table, so the insert is refused until the load has ended. The path counts as used. O(tokens + nodes), one allocation at most per list of
    /// a new node.
    ///
    /// # Errors
    /// A key this tree cannot hold, a page list of another length, pages below `owned_from` that the tree does not hold
    /// on the device, or a page that is the tree's own, or a load in flight on the path. Nothing is changed and nothing handed over.
    pub fn insert(
        &mut self,
        key: Key<'_>,
        pages: &[PageId],
        owned_from: u32,
        opts: InsertOpts<'_>,
        out: &mut InsertOut,
    ) -> Result<Inserted, TreeError> {
        self.insert_with(key, pages, owned_from, InsertComponents::default(), opts, out)
    }

    /// [`insert_with`](Tree::insert_with) for a request that holds a lock: the locked prefix is not compared again, except
    /// for its last page. `key` is the whole key and must begin with what was matched when the lock was taken.
    ///
    /// # Errors
    /// As `insert_with`; also a receipt of another tree or of before a reset, or a key that does not continue it.
    #[expect(clippy::too_many_arguments, reason = "the arguments of `insert_with` and the lock")]
    pub fn insert_from(
        &mut self,
        held: &DeviceLock,
        key: Key<'_>,
        pages: &[PageId],
        owned_from: u32,
        components: InsertComponents<'_>,
        opts: InsertOpts<'_>,
        out: &mut InsertOut,
    ) -> Result<Inserted, TreeError> {
        out.returned.clear();
        out.canonical.clear();
        self.check_key(key)?;
        let anchor = self.check_continues(held, key)?;
        self.insert_below(anchor, key, pages, owned_from, components, opts, out)
    }

    /// [`insert`](Tree::insert) with pages of components. Those from `owned_from` on are handed over: they fill what is
    /// missing in the tree, tombstones included; the others become free ([`drain_freed`](Tree::drain_freed)).
    ///
    /// # Errors
    /// As `insert`; also a component that is not configured, a list of another length, the tree's own pages, or a page for a
    /// place that a load in flight brings one to ([`TreeError::LoadInFlight`]): requests may compute on that one already.
    pub fn insert_with(
        &mut self,
        key: Key<'_>,
        pages: &[PageId],
        owned_from: u32,
        components: InsertComponents<'_>,
        opts: InsertOpts<'_>,
        out: &mut InsertOut,
    ) -> Result<Inserted, TreeError> {
        out.returned.clear();
        out.canonical.clear();
        self.check_key(key)?;
        self.insert_below(ROOT, key, pages, owned_from, components, opts, out)
    }

    /// The insert proper; the path to `start` is known to be the key's.
    #[expect(clippy::too_many_arguments, reason = "the arguments of `insert_with` and the start")]
    fn insert_below(
        &mut self,
        start: u32,
        key: Key<'_>,
        pages: &[PageId],
        owned_from: u32,
        components: InsertComponents<'_>,
        opts: InsertOpts<'_>,
        out: &mut InsertOut,
    ) -> Result<Inserted, TreeError> {
        let whole = key.pages(self.page_size);
        if pages.len() != whole as usize {
            return Err(TreeError::PageCount { want: whole, got: pages.len() });
        }
        let mut path = std::mem::take(&mut self.path);
        path.clear();
        let mut at = start;
        while at != ROOT {
            path.push(at);
            at = self.arena.nodes[at as usize].parent;
        }
        path.reverse();
        let known = self.arena.nodes[start as usize].end();
        let mut walk = self.walk(start, key.from_page(known, self.page_size), |at, _| path.push(at));
        walk.pages += known;
        let checked = self
            .check_insert(&path, walk, pages, owned_from)
            .and_then(|()| self.check_components(&path, walk.pages, whole, owned_from, components));
        if checked.is_ok() {
            self.tick();
            self.split_spare(walk, &mut path);
        }
        let result =
            checked.map(|()| self.commit_insert(key, pages, owned_from, opts, walk.pages, &mut path, out));
        self.path = path;
        let inserted = result?;
        if self.has_components() {
            self.adopt_components(inserted.node.index, whole, owned_from, components);
        }
        if inserted.new_pages > 0 {
            self.meet_waiting(inserted.node.index);
        }
        self.try_merge_above(inserted.node.index);
        Ok(inserted)
    }

    fn check_insert(
        &self,
        path: &[u32],
        walk: Walk,
        pages: &[PageId],
        owned_from: u32,
    ) -> Result<(), TreeError> {
        let mut held = 0;
        for &at in path {
            let node = &self.arena.nodes[at as usize];
            // Below a load that failed another one may still fly.
            if node.device == Residency::Absent {
                continue;
            }
            if node.device == Residency::Pending {
                return Err(TreeError::LoadInFlight(self.arena.id(at)));
            }
            let end = node.end().min(walk.pages);
            if node.device == Residency::Present {
                held = end;
            }
            // The caller's own pages cannot be the ones the tree holds, or is loading into, at the same place.
            let from = node.depth.max(owned_from);
            if from < end {
                let mine = &self.arena.pages(at, Tier::Device)[(from - node.depth) as usize..];
                let theirs = &pages[from as usize..end as usize];
                if let Some((&page, _)) = theirs.iter().zip(mine).find(|(a, b)| a == b) {
                    return Err(TreeError::NotYours { page });
                }
            }
        }
        if let Some(&page) =
            pages[pages.len().min(owned_from as usize)..].iter().find(|&&page| page == NO_PAGE)
        {
            return Err(TreeError::NotYours { page });
        }
        if owned_from > held { Err(TreeError::PrefixNotHeld { owned_from, held }) } else { Ok(()) }
    }

    #[expect(clippy::too_many_arguments, reason = "one caller; the two halves of insert share its locals")]
    fn commit_insert(
        &mut self,
        key: Key<'_>,
        pages: &[PageId],
        owned_from: u32,
        opts: InsertOpts<'_>,
        matched: u32,
        path: &mut Vec<u32>,
        out: &mut InsertOut,
    ) -> Inserted {
        let whole = pages.len() as u32;
        self.split_for_hits(opts, path);
        let (mut matched_pages, mut revived_pages) = (0, 0);
        for &at in path.iter() {
            let node = &self.arena.nodes[at as usize];
            let (start, end) = (node.depth, node.end());
            if node.device == Residency::Present {
                matched_pages += end - start;
                let skip = u32::from(is_planted(Plant::KeepDuplicate));
                let from = start.max(owned_from).saturating_add(skip).min(end);
                out.returned.extend_from_slice(&pages[from as usize..end as usize]);
            } else {
                revived_pages += end - start;
                self.revive(at, &pages[start as usize..end as usize]);
            }
            self.count_insert(at, opts, whole);
        }
        let mut last = path.last().copied().unwrap_or(ROOT);
        if matched < whole {
            last = self.add_device_leaf(last, key, pages, matched, opts.names);
            self.count_insert(last, opts, whole);
            path.push(last);
        }
        let mut due = None;
        for &at in path.iter() {
            let node = &self.arena.nodes[at as usize];
            if node.end() > owned_from {
                let skip = owned_from.saturating_sub(node.depth) as usize;
                let list = self.arena.pages(at, Tier::Device);
                out.canonical.extend_from_slice(&list[skip..]);
            }
            if opts.count_hits_from.is_some()
                && self.write_threshold > 0
                && node.hits >= self.write_threshold
                && node.host == Residency::Absent
            {
                due = Some(self.arena.id(at));
            }
        }
        for &at in path.iter().rev() {
            self.orders.touch(&mut self.arena, at);
        }
        let new_pages = whole - matched;
        self.orders.published(last);
        self.orders.pass(new_pages);
        Inserted { node: self.arena.id(last), matched_pages, revived_pages, new_pages, due }
    }

    /// Hits are counted per page: a node that lies on both sides of the first page to count is split there.
    fn split_for_hits(&mut self, opts: InsertOpts<'_>, path: &mut Vec<u32>) {
        let Some(from) = opts.count_hits_from else { return };
        let crossing = path.iter().position(|&at| {
            let node = &self.arena.nodes[at as usize];
            node.depth < from && from < node.end() && node.hits < self.hits_cap
        });
        if let Some(i) = crossing {
            let keep = from - self.arena.nodes[path[i] as usize].depth;
            let prefix = self.split(path[i], keep);
            path.insert(i, prefix);
        }
    }

    fn count_insert(&mut self, at: u32, opts: InsertOpts<'_>, end: u32) {
        let uses_reach = self.orders.policy.uses_reach();
        let node = &mut self.arena.nodes[at as usize];
        // A new leaf counts whole if any page of it does; walked nodes were split at the border.
        let counted = opts
            .count_hits_from
            .is_some_and(|from| node.depth >= from || node.hits == 0 && node.end() > from);
        if counted && node.hits < self.hits_cap && !(is_planted(Plant::ForgetHits) && node.hits > 0) {
            node.hits += 1;
        }
        node.priority = node.priority.max(opts.priority);
        if uses_reach {
            node.reach = node.reach.max(end);
        }
    }

    fn add_device_leaf(
        &mut self,
        parent: u32,
        key: Key<'_>,
        pages: &[PageId],
        from: u32,
        names: Option<&PageNames>,
    ) -> u32 {
        let p = self.page_size as usize;
        let (from, whole) = (from as usize, pages.len());
        let range = from * p..whole * p + self.view.overlap();
        let rest = Key { tokens: &key.tokens[range.clone()], ..key };
        let first = page_name(key.ns, &rest.tokens[..p + self.view.overlap()]);
        self.orders.foresee(first, from as u32);
        let run = match names.filter(|names| self.are_named(parent, rest, names)) {
            Some(names) => self.arena.add_run_of(names, range, from as u32..whole as u32, parent),
            None => {
                let run = self.arena.add_run(rest.tokens, (whole - from) as u32);
                if self.hashing {
                    let mut hashes = std::mem::take(&mut self.hashed);
                    self.stats.hashed_pages += self.hash_below(parent, rest, names, &mut hashes);
                    self.arena.set_hashes(run, 0, &hashes);
                    self.hashed = hashes;
                }
                run
            }
        };
        let at = self.add_leaf(parent, key.ns, run, first);
        self.arena.set_pages(at, Tier::Device, &pages[from..]);
        self.arena.nodes[at as usize].priority = i32::MIN;
        self.set_device(at, Residency::Present);
        at
    }

    /// A node that has only a host copy takes device pages from an insert.
    fn revive(&mut self, at: u32, pages: &[PageId]) {
        self.arena.set_pages(at, Tier::Device, pages);
        self.set_device(at, Residency::Present);
    }
}
