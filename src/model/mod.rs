//! The literal model of the tree: what it must do, said as plainly as it can be said.
//!
//! One record per page, found by walking children in a list; no nodes, no splits, no counters, no lists of candidates:
//! every question is answered by looking at every page. It shares no code with the tree. Property tests drive both with
//! the same calls and compare results, sizes, residency and order of eviction after every step; an embedder can do the
//! same with a tree of its own.
//!
//! Pages are named by number ([`At`]); 0 is the root. Where the tree takes a node, the model takes the node's last page
//! and, if it matters, how many pages the node has.

mod components;
mod ops;
mod sessions;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

pub use components::{Copy, Hold};
pub use ops::{Settled, SettledKind};

/// A page of the model; 0 is the root.
pub type At = usize;

/// Order of eviction. Ties go to the deeper page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// Least recently used.
    Lru,
    /// Fewest hits.
    Lfu,
    /// Oldest.
    Fifo,
    /// Most recently used.
    Mru,
    /// Newest.
    Filo,
    /// Below so many hits first.
    Slru(u32),
    /// Lowest priority.
    Priority,
    /// Pages from `max(reach + .1 - .0, 0)` on first.
    TailTrim(u32, u32),
}

/// A copy of a page on one tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Slot {
    /// No copy.
    Empty,
    /// The page belongs to an operation in flight.
    Flying {
        /// Page id.
        page: u32,
        /// Operation.
        op: u64,
    },
    /// A copy that counts.
    There(u32),
}

impl Slot {
    fn there(self) -> bool {
        matches!(self, Slot::There(_))
    }

    fn page(self) -> Option<u32> {
        match self {
            Slot::Empty => None,
            Slot::Flying { page, .. } | Slot::There(page) => Some(page),
        }
    }
}

#[derive(Clone, Debug)]
struct Page {
    parent: At,
    ns: u32,
    /// Raw tokens of the page, the boundary token of the bigram view included.
    tokens: Vec<u32>,
    depth: u32,
    device: Slot,
    host: Slot,
    hits: u32,
    priority: i32,
    reach: u32,
    used: u64,
    created: u64,
    stored: bool,
    /// Page by component and tier.
    components: [[Option<u32>; 2]; 2],
}

/// What a look-up finds.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Found {
    /// Device pages, from the root.
    pub device: Vec<u32>,
    /// Pages right below them with a host copy.
    pub host_pages: u32,
    /// Those of them that are being loaded.
    pub loading_pages: u32,
    /// The loads, in order of appearance.
    pub loading: Vec<u64>,
    /// Pages of the key that are known, cut by no component.
    pub full_pages: u32,
}

/// What an insert does.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Put {
    /// Pages given back.
    pub returned: Vec<u32>,
    /// The pages that count, from `owned_from` on.
    pub canonical: Vec<u32>,
    /// Pages that were on the device.
    pub matched: u32,
    /// Pages that were not and whose prefix was known.
    pub revived: u32,
    /// New pages.
    pub new: u32,
    /// End of the deepest page that is due for a backup.
    pub due: Option<u32>,
}

/// What an eviction does.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Gone {
    /// Device pages freed.
    pub device: BTreeSet<u32>,
    /// Host pages freed.
    pub host: BTreeSet<u32>,
    /// Device pages that were left for the caller to back up.
    pub reported: BTreeSet<u32>,
    /// Of `device`: the host copy stayed.
    pub demoted: u32,
}

/// What a refill does.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Refilled {
    /// Pages adopted by pages without a host copy.
    pub refilled: u32,
    /// Pages attached as new.
    pub attached: u32,
    /// Pages given back.
    pub returned: Vec<u32>,
}

/// The model. Every call is O(pages x depth) or worse.
#[derive(Clone, Debug)]
pub struct Model {
    page_size: usize,
    overlap: usize,
    /// Host copies only below a page that has one.
    pub backed_up_parent: bool,
    order: Order,
    write_threshold: u32,
    pages: BTreeMap<At, Page>,
    next: At,
    clock: u64,
    /// Ends of locked paths.
    locks: Vec<At>,
    /// Ends of pinned paths.
    pins: Vec<At>,
    ops: BTreeMap<u64, ops::Op>,
    /// Pages of a match that must have the component; 0: not configured.
    spans: [u32; 2],
    holds: Vec<Hold>,
    /// Ends of open sessions, oldest first.
    sessions: BTreeMap<u64, Vec<At>>,
    /// Prompts of requests that wait.
    waiting: BTreeMap<u64, (u32, Vec<u32>)>,
    /// By component and tier.
    freed: [[Vec<u32>; 2]; 2],
}

impl Model {
    /// An empty model. `overlap` is 1 in the bigram view; `spans` are those of window and state, 0 for none.
    #[must_use]
    pub fn new(
        page_size: usize,
        overlap: usize,
        backed_up_parent: bool,
        order: Order,
        write_threshold: u32,
        spans: [u32; 2],
    ) -> Model {
        let root = Page {
            parent: 0,
            ns: 0,
            tokens: Vec::new(),
            depth: 0,
            device: Slot::There(u32::MAX),
            host: Slot::There(u32::MAX),
            hits: 0,
            priority: i32::MAX,
            reach: 0,
            used: 0,
            created: 0,
            stored: true,
            components: [[None; 2]; 2],
        };
        Model {
            page_size,
            overlap,
            backed_up_parent,
            order,
            write_threshold,
            pages: BTreeMap::from([(0, root)]),
            next: 1,
            clock: 0,
            locks: Vec::new(),
            pins: Vec::new(),
            ops: BTreeMap::new(),
            spans,
            holds: Vec::new(),
            sessions: BTreeMap::new(),
            waiting: BTreeMap::new(),
            freed: Default::default(),
        }
    }

    // ---- questions ----

    fn cut<'a>(&self, tokens: &'a [u32]) -> Vec<&'a [u32]> {
        let count = tokens.len().saturating_sub(self.overlap) / self.page_size;
        (0..count).map(|i| &tokens[i * self.page_size..][..self.page_size + self.overlap]).collect()
    }

    fn child(&self, at: At, ns: u32, tokens: &[u32]) -> Option<At> {
        let found = |(_, p): &(&At, &Page)| p.depth > 0 && p.parent == at && p.ns == ns && p.tokens == tokens;
        self.pages.iter().find(found).map(|(&i, _)| i)
    }

    /// The known pages of a key, from the root.
    #[must_use]
    pub fn path(&self, ns: u32, tokens: &[u32]) -> Vec<At> {
        self.path_from(0, ns, tokens)
    }

    fn path_from(&self, start: At, ns: u32, tokens: &[u32]) -> Vec<At> {
        let mut path = Vec::new();
        let mut at = start;
        for page in self.cut(tokens) {
            let Some(child) = self.child(at, ns, page) else { break };
            path.push(child);
            at = child;
        }
        path
    }

    /// A page and everything above it, the page first, without the root.
    fn up(&self, at: At) -> Vec<At> {
        let mut found = Vec::new();
        let mut at = at;
        while at != 0 {
            found.push(at);
            at = self.pages[&at].parent;
        }
        found
    }

    fn children(&self, at: At) -> Vec<At> {
        self.pages.iter().filter(|(i, p)| **i != 0 && p.parent == at).map(|(&i, _)| i).collect()
    }

    fn covered(&self, ends: &[At]) -> BTreeSet<At> {
        ends.iter().flat_map(|&end| self.up(end)).collect()
    }

    /// Copies on the device (`.0`) and the host (`.1`) of a page.
    #[must_use]
    pub fn copies(&self, at: At) -> (Slot, Slot) {
        (self.pages[&at].device, self.pages[&at].host)
    }

    /// True if the page is marked as stored.
    #[must_use]
    pub fn is_stored(&self, at: At) -> bool {
        self.pages[&at].stored
    }

    /// What a look-up finds, without its effects.
    #[must_use]
    pub fn peek(&self, ns: u32, tokens: &[u32]) -> Found {
        let path = self.path(ns, tokens);
        let mut found = Found { full_pages: path.len() as u32, ..Found::default() };
        let on_device = path.iter().take_while(|at| self.pages[at].device.there()).count();
        let device = self.usable(&path[..on_device], false);
        for (i, &at) in path[..self.usable(&path, true)].iter().enumerate() {
            match self.pages[&at].device {
                Slot::There(page) if i < device => found.device.push(page),
                Slot::There(_) | Slot::Empty => found.host_pages += 1,
                Slot::Flying { op, .. } => {
                    found.host_pages += 1;
                    found.loading_pages += 1;
                    if !found.loading.contains(&op) {
                        found.loading.push(op);
                    }
                }
            }
        }
        found
    }

    /// Sizes: device evictable, protected, loading; host there, flying, mirrored.
    #[must_use]
    pub fn sizes(&self) -> [u32; 6] {
        let locked = self.covered(&self.locks);
        let mut sizes = [0; 6];
        for (at, p) in self.pages.iter().filter(|(at, _)| **at != 0) {
            match p.device {
                Slot::There(_) if locked.contains(at) => sizes[1] += 1,
                Slot::There(_) => sizes[0] += 1,
                Slot::Flying { .. } => sizes[2] += 1,
                Slot::Empty => {}
            }
            match p.host {
                Slot::There(_) => sizes[3] += 1,
                Slot::Flying { .. } => sizes[4] += 1,
                Slot::Empty => {}
            }
            sizes[5] += u32::from(p.device.there() && p.host.there());
        }
        sizes
    }

    /// Every page id held on the device and on the host, flying ones included.
    #[must_use]
    pub fn held(&self) -> (BTreeSet<u32>, BTreeSet<u32>) {
        let known = || self.pages.iter().filter(|(at, _)| **at != 0).map(|(_, p)| p);
        (known().filter_map(|p| p.device.page()).collect(), known().filter_map(|p| p.host.page()).collect())
    }

    // ---- calls ----

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn page(&mut self, at: At) -> &mut Page {
        self.pages.get_mut(&at).expect("the model only names pages it knows")
    }

    fn touch(&mut self, at: At) {
        let now = self.tick();
        for i in self.up(at) {
            self.page(i).used = now;
        }
    }

    /// A look-up: the path counts as used.
    pub fn look_up(&mut self, ns: u32, tokens: &[u32]) -> Found {
        let path = self.path(ns, tokens);
        let depth = self.usable(&path, true);
        self.touch(path[..depth].last().copied().unwrap_or(0));
        self.peek(ns, tokens)
    }

    /// Locks the path to a page.
    pub fn lock(&mut self, at: At) {
        self.locks.push(at);
    }

    /// A request unlocks it: the path counts as used.
    pub fn unlock(&mut self, at: At) {
        self.drop_lock(at);
        self.touch(at);
    }

    /// An operation unlocks it: nothing counts as used.
    pub fn drop_lock(&mut self, at: At) {
        let i = self.locks.iter().position(|&l| l == at).expect("unlock what was locked");
        self.locks.remove(i);
    }

    /// Pins the host copies of the path to a page. True if that takes a lock, too: where a page of the path may have no
    /// host copy.
    pub fn pin(&mut self, at: At) -> bool {
        self.pins.push(at);
        let locked = !self.backed_up_parent || !self.pages[&at].host.there();
        if locked {
            self.lock(at);
        }
        locked
    }

    /// A request unpins them: pages that are only on the host count as used.
    pub fn unpin(&mut self, at: At, locked: bool) {
        self.drop_pin(at);
        let now = self.tick();
        for i in self.up(at) {
            if !self.pages[&i].device.there() {
                self.page(i).used = now;
            }
        }
        if locked {
            self.unlock(at);
        }
    }

    /// An operation, or a plan, unpins them: nothing counts as used.
    pub fn unpin_unused(&mut self, at: At, locked: bool) {
        self.drop_pin(at);
        if locked {
            self.drop_lock(at);
        }
    }

    pub(super) fn drop_pin(&mut self, at: At) {
        let i = self.pins.iter().position(|&l| l == at).expect("unpin what was pinned");
        self.pins.remove(i);
    }

    fn add(&mut self, parent: At, ns: u32, tokens: &[u32]) -> At {
        let at = self.next;
        self.next += 1;
        let (depth, now) = (self.pages[&parent].depth + 1, self.clock);
        let page = Page {
            parent,
            ns,
            tokens: tokens.to_vec(),
            depth,
            device: Slot::Empty,
            host: Slot::Empty,
            hits: 0,
            priority: i32::MIN,
            reach: 0,
            used: now,
            created: now,
            stored: false,
            components: [[None; 2]; 2],
        };
        self.pages.insert(at, page);
        at
    }

    /// True if an insert of the key has to wait, because a page on its path is being loaded.
    #[must_use]
    pub fn must_wait(&self, ns: u32, tokens: &[u32]) -> bool {
        self.path(ns, tokens).iter().any(|at| matches!(self.pages[at].device, Slot::Flying { .. }))
    }

    /// An insert of all whole pages of a key; `pages[owned_from..]` are the caller's.
    pub fn insert(
        &mut self,
        ns: u32,
        tokens: &[u32],
        pages: &[u32],
        owned_from: u32,
        priority: i32,
        count_hits_from: Option<u32>,
    ) -> Put {
        self.tick();
        let known = self.path(ns, tokens);
        let mut put = Put { returned: vec![], canonical: vec![], matched: 0, revived: 0, new: 0, due: None };
        let cut: Vec<Vec<u32>> = self.cut(tokens).into_iter().map(<[u32]>::to_vec).collect();
        let total = cut.len() as u32;
        // New pages count as one: all, if any of them is to be counted.
        let new_counts = count_hits_from.is_some_and(|from| total > from);
        let mut at = 0;
        for (i, page_tokens) in cut.iter().enumerate() {
            let counts = match known.get(i) {
                Some(&next) => {
                    at = next;
                    count_hits_from.is_some_and(|from| i as u32 >= from)
                }
                None => {
                    at = self.add(at, ns, page_tokens);
                    put.new += 1;
                    new_counts
                }
            };
            match self.pages[&at].device {
                Slot::There(_) => {
                    put.matched += 1;
                    if i as u32 >= owned_from {
                        put.returned.push(pages[i]);
                    }
                }
                _ => {
                    put.revived += u32::from(i < known.len());
                    self.page(at).device = Slot::There(pages[i]);
                }
            }
            let page = self.page(at);
            page.hits += u32::from(counts);
            page.priority = page.priority.max(priority);
            page.reach = page.reach.max(total);
            if i as u32 >= owned_from {
                put.canonical.extend(page.device.page());
            }
            let (hits, host) = (page.hits, page.host);
            if count_hits_from.is_some()
                && self.write_threshold > 0
                && hits >= self.write_threshold
                && host == Slot::Empty
            {
                put.due = Some(i as u32 + 1);
            }
        }
        self.touch(at);
        put
    }

    /// A refill below `anchor`, whose next pages are `tokens`.
    pub fn refill(&mut self, anchor: At, ns: u32, tokens: &[u32], pages: &[u32]) -> Refilled {
        let mut done = Refilled::default();
        if self.backed_up_parent && !self.pages[&anchor].host.there() {
            done.returned = pages.to_vec();
            return done;
        }
        let cut: Vec<Vec<u32>> = self.cut(tokens).into_iter().map(<[u32]>::to_vec).collect();
        let mut at = anchor;
        for (i, page_tokens) in cut.iter().enumerate() {
            let may = !self.backed_up_parent || self.pages[&at].host.there();
            match self.child(at, ns, page_tokens) {
                Some(next) if self.pages[&next].host != Slot::Empty || !self.backed_up_parent => {
                    done.returned.push(pages[i]);
                    at = next;
                }
                Some(next) if may => {
                    self.page(next).host = Slot::There(pages[i]);
                    done.refilled += 1;
                    at = next;
                }
                None if may => {
                    let (priority, end) =
                        (self.pages[&at].priority, self.pages[&anchor].depth + cut.len() as u32);
                    let inherited = if at == 0 { 0 } else { priority };
                    at = self.add(at, ns, page_tokens);
                    let page = self.page(at);
                    (page.host, page.priority, page.reach) = (Slot::There(pages[i]), inherited, end);
                    done.attached += 1;
                }
                _ => {
                    done.returned.extend(&pages[i..]);
                    break;
                }
            }
        }
        self.touch(at);
        done
    }

    // ---- eviction ----

    fn key(&self, kept: &BTreeSet<At>, at: At) -> (bool, u64, u64, Reverse<u32>) {
        let p = &self.pages[&at];
        let (class, age) = match self.order {
            Order::Lru => (0, p.used),
            Order::Lfu => (u64::from(p.hits), p.used),
            Order::Fifo => (p.created, p.used),
            Order::Mru => (u64::MAX - p.used, 0),
            Order::Filo => (u64::MAX - p.created, p.used),
            Order::Slru(protect) => (u64::from(p.hits >= protect), p.used),
            Order::Priority => ((i64::from(p.priority) - i64::from(i32::MIN)) as u64, p.used),
            Order::TailTrim(spare, next) => {
                let keep = (i64::from(p.reach) + i64::from(next) - i64::from(spare)).max(0);
                (u64::from(i64::from(p.depth) <= keep), p.used)
            }
        };
        (kept.contains(&at), class, age, Reverse(p.depth))
    }

    /// Device eviction of `want` pages, page by page. With `report`, pages without a host copy (and those above them) stay
    /// and are reported.
    pub fn evict_device(&mut self, want: u32, report: bool) -> Gone {
        let locked = self.covered(&self.locks);
        let mut gone = Gone::default();
        let mut reported: BTreeSet<At> = BTreeSet::new();
        for _ in 0..want {
            let kept = self.kept();
            let victim = self
                .pages
                .iter()
                .filter(|(at, p)| {
                    **at != 0 && p.device.there() && !locked.contains(at) && !reported.contains(at)
                })
                .map(|(&at, _)| at)
                .filter(|&at| {
                    let left = |c: &At| self.pages[c].device != Slot::Empty && !reported.contains(c);
                    !self.children(at).iter().any(left)
                })
                .min_by_key(|&at| self.key(&kept, at));
            let Some(victim) = victim else { break };
            let page = self.pages[&victim].device.page().expect("a victim is there");
            let blocked = self.children(victim).iter().any(|c| reported.contains(c));
            if self.pages[&victim].host.there() && !blocked {
                gone.device.insert(page);
                gone.demoted += 1;
                self.demote(victim);
            } else if blocked || report && self.pages[&victim].hits >= self.write_threshold {
                gone.reported.insert(page);
                reported.insert(victim);
            } else {
                gone.device.insert(page);
                gone.host.extend(self.delete(victim));
            }
        }
        gone
    }

    /// Gives up the device copy of a page.
    pub fn demote(&mut self, at: At) {
        let now = self.tick();
        let page = self.page(at);
        (page.device, page.used) = (Slot::Empty, now);
        self.drop_components(at, 0);
    }

    /// Deletes a page and everything below it; the host pages.
    pub fn delete(&mut self, at: At) -> Vec<u32> {
        let mut freed = Vec::new();
        for child in self.children(at) {
            freed.extend(self.delete(child));
        }
        freed.extend(self.remove(at));
        freed
    }

    fn remove(&mut self, at: At) -> Option<u32> {
        self.drop_components(at, 0);
        self.drop_components(at, 1);
        self.recede_sessions(at, self.pages[&at].parent);
        self.pages.remove(&at).and_then(|p| p.host.page())
    }

    /// Host eviction of `want` pages, page by page.
    pub fn evict_host(&mut self, want: u32) -> BTreeSet<u32> {
        let locked = self.covered(&self.locks);
        let pinned = self.covered(&self.pins);
        let mut freed = BTreeSet::new();
        for _ in 0..want {
            let kept = self.kept();
            let victim = self
                .pages
                .iter()
                .filter(|(at, p)| {
                    **at != 0 && p.device == Slot::Empty && p.host.there() && !locked.contains(at)
                })
                .map(|(&at, _)| at)
                .filter(|at| !pinned.contains(at) && self.children(*at).is_empty())
                .min_by_key(|&at| self.key(&kept, at));
            let Some(victim) = victim else { break };
            freed.extend(self.remove(victim));
        }
        freed
    }

    /// Pages whose host copy may be given up now.
    #[must_use]
    pub fn mirrors(&self) -> BTreeSet<u32> {
        let pinned = self.covered(&self.pins);
        let free = |at: &At| {
            let p = &self.pages[at];
            let children = self.children(*at);
            *at != 0
                && p.device.there()
                && p.host.there()
                && !pinned.contains(at)
                && (!self.backed_up_parent || children.iter().all(|c| self.pages[c].host == Slot::Empty))
        };
        self.pages.keys().filter(|at| free(at)).filter_map(|at| self.pages[at].host.page()).collect()
    }

    /// Gives up one mirror by its host page. False if it must not go, or if another one that nobody locks was used
    /// later. (A locked one has not been used for the last time; it may go before or after.)
    pub fn reclaim(&mut self, host_page: u32) -> bool {
        let mirrors = self.mirrors();
        let locked = self.covered(&self.locks);
        let found = self.pages.iter().find(|(_, p)| p.depth > 0 && p.host == Slot::There(host_page));
        let Some((&at, page)) = found.filter(|_| mirrors.contains(&host_page)) else { return false };
        let later = |(other, p): (&At, &Page)| {
            let waits = p.host.page().is_some_and(|page| mirrors.contains(&page));
            *other != 0 && waits && !locked.contains(other) && p.used > page.used
        };
        if self.pages.iter().any(later) {
            return false;
        }
        self.page(at).host = Slot::Empty;
        true
    }
}
