//! The tree and its literal model under the same calls. A property test and a fuzz target choose the calls.

use std::collections::BTreeSet;

use sapwood::base::{NamespaceId, NodeId, OpId, PageId, Tier};
use sapwood::key::{Key, KeyView, Namespace, hash_pages};
use sapwood::model::{At, Hold, Model, Order, SettledKind, Slot};
use sapwood::pool::{Extent, PagePool};
use sapwood::tree::*;

const DEVICE: u32 = 28;
const HOST: u32 = 40;

/// A key out of a small family: `pages` pages and a bit, leaving the trunk of its namespace at page `fork`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    pub(crate) ns: bool,
    pub(crate) pages: u32,
    pub(crate) fork: u32,
    pub(crate) branch: u32,
    pub(crate) inside: u32,
}

/// One call.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    Insert {
        row: Row,
        priority: i32,
        count: bool,
        chunked: bool,
    },
    InsertBlind(Row),
    Match(Row),
    Lock(Row),
    Unlock(usize),
    Backup(Row),
    Load(Row),
    /// All but so many pages, and then all of it; the first of the two may fail at once.
    LoadTwice(Row, u32, bool),
    /// Windows and states are backed up and lost, are loaded, twice and the second time with so many pages less, and are
    /// computed again before they have come.
    Overtake(Row, u32),
    End(usize, bool),
    Evict(u32, bool),
    EvictHost(u32),
    Reclaim(u32),
    Refill(Row, u32),
    Store(Row),
    EndStore(u32),
    Demote(Row),
    DeleteLeaf(Row),
    EvictComponent(bool, bool, u32),
    AdoptHost(Row, bool, u32),
    ReleaseWindow(usize),
    Refer(usize, Row),
    CloseSession(usize),
    WaitFor(Row),
    StopWaiting(usize),
}

/// What both are made with.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) page_size: u32,
    pub(crate) bigram: bool,
    pub(crate) free_rule: bool,
    pub(crate) order: Order,
    pub(crate) write_threshold: u32,
    pub(crate) hashing: bool,
    pub(crate) merge: bool,
    pub(crate) window: Option<u32>,
    pub(crate) state: bool,
}

fn policy(order: Order) -> Policy {
    match order {
        Order::Lru => Policy::Lru,
        Order::Lfu => Policy::Lfu,
        Order::Fifo => Policy::Fifo,
        Order::Mru => Policy::Mru,
        Order::Filo => Policy::Filo,
        Order::Slru(protected_hits) => Policy::Slru { protected_hits },
        Order::Priority => Policy::Priority,
        Order::TailTrim(spare_pages, next_prompt_pages) => {
            Policy::TailTrim { spare_pages, next_prompt_pages }
        }
    }
}

fn ids(pages: &[PageId]) -> Vec<u32> {
    pages.iter().map(|p| p.0).collect()
}

fn set(pages: &[PageId]) -> BTreeSet<u32> {
    pages.iter().map(|p| p.0).collect()
}

/// A plan in two slices and its commit do what the one call does.
fn evict_by_plan(tree: &mut Tree, want: u32, unbacked: Unbacked, same: &DeviceEviction) {
    let mut plan = EvictionPlan::default();
    let first = tree.plan_eviction(want / 2, unbacked, &mut plan).unwrap();
    let more = tree.plan_eviction(want - first, unbacked, &mut plan).unwrap();
    assert_eq!(first + more, same.freed_device.len() as u32 + same.needs_backup_pages);
    let pages = |e: &Extent| e.first.0..e.first.0 + e.pages;
    assert_eq!(plan.frees.iter().flat_map(pages).collect::<BTreeSet<u32>>(), set(&same.freed_device));
    assert_eq!(plan.free_pages as usize, same.freed_device.len());
    assert_eq!(plan.victims.iter().map(|v| v.pages).sum::<u32>(), plan.free_pages);
    let backups: Vec<PageId> =
        plan.backups.iter().flat_map(|&node| tree.device_pages(node).unwrap()).copied().collect();
    let mut out = DeviceEviction::default();
    tree.commit_eviction(&mut plan, &mut out).unwrap();
    assert_eq!(
        (set(&out.freed_device), set(&out.freed_host)),
        (set(&same.freed_device), set(&same.freed_host))
    );
    assert_eq!((backups.len() as u32, plan.backup_pages), (same.needs_backup_pages, same.needs_backup_pages));
    assert_eq!((out.demoted_pages, out.deleted_pages), (same.demoted_pages, same.deleted_pages));
    let found = tree.sanity();
    assert!(found.is_empty(), "{found:#?}");
}

struct Held {
    lock: DeviceLock,
    pin: Option<HostPin>,
    lock_at: At,
    pin_at: At,
    pin_locked: bool,
    lock_holds: Vec<Hold>,
    pin_holds: Vec<Hold>,
}

/// Both, and the two pools.
pub(crate) struct Pair {
    tree: Tree,
    model: Model,
    device: PagePool,
    host: PagePool,
    /// By component and tier.
    pools: [[PagePool; 2]; 2],
    spans: [u32; 2],
    page_size: u32,
    view: KeyView,
    other: NamespaceId,
    held: Vec<Held>,
    flying: Vec<(u64, bool)>,
    storing: Vec<(u64, At, Vec<At>, Vec<Hold>)>,
    sessions: Vec<(SessionId, u64)>,
    waiting: Vec<(WaiterId, u64)>,
    next_op: u64,
}

impl Pair {
    pub(crate) fn new(setup: &Setup) -> Pair {
        let view = if setup.bigram { KeyView::Bigram } else { KeyView::Plain };
        let rule = if setup.free_rule { BackupRule::Free } else { BackupRule::BackedUpParent };
        let config = TreeConfig {
            page_size: setup.page_size,
            view,
            rule,
            policy: policy(setup.order),
            components: Components { window_pages: setup.window, state: setup.state },
            hits_counted: 0,
            write_threshold: setup.write_threshold,
            hashing: setup.hashing,
            events: false,
            merge: setup.merge,
        };
        let spans = [setup.window.unwrap_or(0), u32::from(setup.state)];
        let mut tree = Tree::new(config).unwrap();
        let other = tree.intern(&Namespace { salt: Some("t".into()), ..Namespace::default() }).unwrap();
        let model = Model::new(
            setup.page_size as usize,
            view.overlap(),
            !setup.free_rule,
            setup.order,
            setup.write_threshold,
            spans,
        );
        Pair {
            tree,
            model,
            device: PagePool::new(DEVICE),
            host: PagePool::new(HOST),
            pools: [16, 8].map(|n| [PagePool::new(n), PagePool::new(n + 4)]),
            spans,
            page_size: setup.page_size,
            view,
            other,
            held: vec![],
            flying: vec![],
            storing: vec![],
            sessions: vec![],
            waiting: vec![],
            next_op: 1,
        }
    }

    fn tokens(&self, row: Row) -> (NamespaceId, Vec<u32>) {
        let p = self.page_size;
        let units = row.pages * p + row.inside % p + self.view.overlap() as u32;
        // The fork is inside a page now and then.
        let fork = row.fork * p + row.inside % 2;
        let token = |i: u32| if i >= fork { 1000 * (row.branch + 1) + i } else { i };
        (if row.ns { self.other } else { NamespaceId::DEFAULT }, (0..units).map(token).collect())
    }

    fn key<'a>(&self, ns: NamespaceId, tokens: &'a [u32]) -> Key<'a> {
        Key { ns, tokens, view: self.view }
    }

    fn op(&mut self) -> OpId {
        self.next_op += 1;
        OpId(self.next_op)
    }

    /// A look-up in both. Returns the match and the model's path.
    fn look_up(&mut self, ns: NamespaceId, tokens: &[u32]) -> (Matched, Vec<At>, Vec<PageId>) {
        let mut pages = Vec::new();
        let found = self.tree.match_prefix(self.key(ns, tokens), &mut pages);
        let want = self.model.look_up(ns.0, tokens);
        assert_eq!(ids(&pages), want.device);
        self.same_match(&found, &want);
        let path = self.model.path(ns.0, tokens);
        assert_eq!(found.full_pages as usize, path.len());
        assert_eq!(self.tree.depth_pages(found.node), Ok(found.depth_pages()));
        (found, path, pages)
    }

    fn same_match(&self, found: &Matched, want: &sapwood::model::Found) {
        assert_eq!(found.device_pages as usize, want.device.len());
        assert_eq!((found.host_pages, found.loading_pages), (want.host_pages, want.loading_pages));
        assert_eq!(found.full_pages, want.full_pages);
        assert_eq!(found.cut_by.is_some(), found.depth_pages() < found.full_pages);
        assert_eq!(found.loading.iter().map(|op| op.0).collect::<Vec<_>>(), want.loading);
    }

    fn end_of(path: &[At], pages: u32) -> At {
        pages.checked_sub(1).map_or(0, |i| path[i as usize])
    }

    fn lock(&mut self, ns: NamespaceId, tokens: &[u32]) -> (Held, Matched, Vec<PageId>) {
        let mut pages = Vec::new();
        let key = Key { ns, tokens, view: self.view };
        let (found, lock, pin) = self.tree.match_and_lock(key, &mut pages);
        let want = self.model.look_up(ns.0, tokens);
        assert_eq!(ids(&pages), want.device);
        self.same_match(&found, &want);
        let path = self.model.path(ns.0, tokens);
        let lock_at = Self::end_of(&path, found.device_pages);
        let pin_at = Self::end_of(&path, found.depth_pages());
        self.model.lock(lock_at);
        let pin_locked = pin.is_some() && self.model.pin(pin_at);
        let lock_holds = self.model.hold(lock_at);
        let pin_holds = if pin.is_some() { self.model.hold(pin_at) } else { vec![] };
        (Held { lock, pin, lock_at, pin_at, pin_locked, lock_holds, pin_holds }, found, pages)
    }

    fn unlock(&mut self, held: Held) {
        self.tree.unlock(held.lock).unwrap();
        self.model.release(&held.lock_holds);
        self.model.unlock(held.lock_at);
        if let Some(pin) = held.pin {
            self.tree.unpin_host(pin).unwrap();
            self.model.release(&held.pin_holds);
            self.model.unpin(held.pin_at, held.pin_locked);
        }
    }

    /// Moves a lock to the end of what was inserted.
    fn move_lock(&mut self, held: Held, ns: NamespaceId, tokens: &[u32]) -> Held {
        let found = self.tree.peek(self.key(ns, tokens));
        let path = self.model.path(ns.0, tokens);
        let lock_at = Self::end_of(&path, found.device_pages);
        let lock = self.tree.move_lock(held.lock, found.node).unwrap();
        self.model.lock(lock_at);
        let lock_holds = self.model.hold(lock_at);
        self.model.release(&held.lock_holds);
        self.model.drop_lock(held.lock_at);
        Held { lock, lock_at, lock_holds, ..held }
    }

    fn evict(&mut self, want: u32, report: bool) {
        let mut out = DeviceEviction::default();
        let unbacked = if report { Unbacked::Report } else { Unbacked::Delete };
        let mut twin = self.tree.clone();
        self.tree.evict_device(want, unbacked, &mut out);
        evict_by_plan(&mut twin, want, unbacked, &out);
        let gone = self.model.evict_device(want, report);
        assert_eq!(set(&out.freed_device), gone.device);
        assert_eq!(set(&out.freed_host), gone.host);
        assert_eq!(out.demoted_pages, gone.demoted);
        assert_eq!(out.demoted_pages + out.deleted_pages, gone.device.len() as u32);
        let mut reported = BTreeSet::new();
        for &node in &out.needs_backup {
            reported.extend(ids(self.tree.device_pages(node).unwrap()));
        }
        assert_eq!(reported, gone.reported);
        assert_eq!(out.needs_backup_pages, gone.reported.len() as u32);
        self.device.free(&out.freed_device).unwrap();
        self.host.free(&out.freed_host).unwrap();
    }

    fn alloc_device(&mut self, n: u32, pages: &mut Vec<PageId>) -> bool {
        let short = n.saturating_sub(self.device.free_pages());
        if short > 0 {
            self.evict(short, false);
        }
        self.device.alloc(n, pages)
    }

    fn alloc_host(&mut self, n: u32, pages: &mut Vec<PageId>) -> bool {
        let short = n.saturating_sub(self.host.free_pages());
        if short > 0 {
            self.evict_host(short);
        }
        self.host.alloc(n, pages)
    }

    fn evict_host(&mut self, want: u32) {
        let mut freed = Vec::new();
        let done = self.tree.evict_host(want, &mut freed);
        assert_eq!(done.freed_pages as usize, freed.len());
        assert_eq!(set(&freed), self.model.evict_host(want));
        self.host.free(&freed).unwrap();
    }

    fn reclaim(&mut self, want: u32) {
        let mut freed = Vec::new();
        self.tree.reclaim_mirrors(want, 0, &mut freed);
        self.host.free(&freed).unwrap();
        let mut left = ids(&freed);
        // Node by node, the end of each first: what is named first goes as soon as it may. In any other order the parent of one
        // that is named last, used later, would come to stand before what the tree gave up before it (seed 4242).
        while !left.is_empty() {
            let next = left.iter().position(|&page| self.model.reclaim(page));
            left.remove(next.unwrap_or_else(|| panic!("mirrors that may not go: {left:?}")));
        }
        assert!(freed.len() as u32 == want || self.model.mirrors().is_empty());
    }

    fn insert_blind(&mut self, row: Row) {
        let (ns, tokens) = self.tokens(row);
        let mut pages = Vec::new();
        if self.alloc_device(self.key(ns, &tokens).pages(self.page_size), &mut pages) {
            self.insert(ns, &tokens, &pages, 0, 0, Some(0), None);
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the arguments of the call under test")]
    fn insert(
        &mut self,
        ns: NamespaceId,
        tokens: &[u32],
        pages: &[PageId],
        owned: u32,
        priority: i32,
        hits: Option<u32>,
        held: Option<&DeviceLock>,
    ) {
        let mut out = InsertOut::default();
        let opts = InsertOpts { priority, count_hits_from: hits, names: None };
        // The request keeps a window of its last pages, and a state at its end.
        let whole = pages.len() as u32;
        let window_from = whole - whole.min(self.spans[0] + hits.unwrap_or(0) % 2);
        let mine = window_from.max(owned);
        let mut window = vec![PageId(u32::MAX); (mine - window_from) as usize];
        let windowed =
            self.spans[0] > 0 && mine < whole && self.alloc_component(0, 0, whole - mine, &mut window);
        if !windowed {
            window.clear();
        }
        let mut state = Vec::new();
        let stated = self.spans[1] > 0 && owned < whole && self.alloc_component(1, 0, 1, &mut state);
        let given = InsertComponents { window_from, window: &window, state: state.first().copied() };
        let key = self.key(ns, tokens);
        let done = match held {
            Some(lock) => self.tree.insert_from(lock, key, pages, owned, given, opts, &mut out),
            None => self.tree.insert_with(key, pages, owned, given, opts, &mut out),
        };
        let path = self.model.path(ns.0, tokens);
        let known = path.len() as u32;
        let comes = |i: u32, c| self.model.coming(path[i as usize], c).is_some();
        let overtakes = windowed && (mine..whole.min(known)).any(|i| comes(i, 0))
            || stated && whole <= known && comes(whole - 1, 1);
        if self.model.must_wait(ns.0, tokens) || overtakes {
            assert!(matches!(done, Err(TreeError::LoadInFlight(_))), "{done:?}");
            self.device.free(&pages[owned as usize..]).unwrap();
            if windowed {
                self.pools[0][0].free(&window[(mine - window_from) as usize..]).unwrap();
            }
            self.pools[1][0].free(&state).unwrap();
            return;
        }
        let done = done.unwrap();
        let want = self.model.insert(ns.0, tokens, &ids(pages), owned, priority, hits);
        assert_eq!((ids(&out.returned), ids(&out.canonical)), (want.returned, want.canonical));
        assert_eq!(
            (done.matched_pages, done.revived_pages, done.new_pages),
            (want.matched, want.revived, want.new)
        );
        assert_eq!(done.due.map(|node| self.tree.depth_pages(node).unwrap()), want.due);
        self.device.free(&out.returned).unwrap();
        let path = self.model.path(ns.0, tokens);
        if windowed {
            for i in mine..whole {
                self.model.adopt(path[i as usize], 0, 0, window[(i - window_from) as usize].0);
            }
        }
        if stated {
            self.model.adopt(path[whole as usize - 1], 1, 0, state[0].0);
        }
    }

    fn alloc_component(&mut self, c: usize, tier: usize, n: u32, into: &mut Vec<PageId>) -> bool {
        let short = n.saturating_sub(self.pools[c][tier].free_pages());
        self.evict_component(c, tier, short);
        self.pools[c][tier].alloc(n, into)
    }

    fn evict_component(&mut self, c: usize, tier: usize, want: u32) {
        self.drain();
        let component = [Component::Window, Component::State][c];
        let victims = self.model.component_victims(c, tier);
        let freed = self.tree.evict_component(component, [Tier::Device, Tier::Host][tier], want);
        assert_eq!(freed, want.min(victims.len() as u32));
        let mut out = ComponentPages::default();
        self.tree.drain_freed(&mut out);
        let gone = if tier == 0 { &out.device[c] } else { &out.host[c] };
        if tier == 0 {
            // On the host a node is as old as its demotion, page by page in the model, so only the number is compared.
            assert_eq!(ids(gone), victims[..freed as usize]);
        }
        for page in gone {
            assert!(victims.contains(&page.0));
            self.model.evict_component(c, tier, page.0);
        }
        self.give_back(&out);
    }

    /// Component pages that became free, in both.
    pub(crate) fn drain(&mut self) {
        let mut out = ComponentPages::default();
        self.tree.drain_freed(&mut out);
        self.give_back(&out);
    }

    fn give_back(&mut self, freed: &ComponentPages) {
        for (c, want) in self.model.drain_freed().into_iter().enumerate() {
            for (tier, pages) in [&freed.device[c], &freed.host[c]].into_iter().enumerate() {
                assert_eq!(set(pages), want[tier]);
                self.pools[c][tier].free(pages).unwrap();
            }
        }
    }

    fn adopt_host(&mut self, row: Row, c: usize, n: u32) {
        let (ns, tokens) = self.tokens(row);
        let path = self.model.path(ns.0, &tokens);
        let (found, ..) = self.look_up(ns, &tokens);
        let depth = found.depth_pages();
        let n = n.min(depth);
        let mut pages = Vec::new();
        if self.spans[c] == 0 || n == 0 || !self.alloc_component(c, 1, n, &mut pages) {
            return;
        }
        let component = [Component::Window, Component::State][c];
        self.tree.adopt_component_host(found.node, component, &pages).unwrap();
        let places = &path[(depth - n) as usize..depth as usize];
        let backed = places.iter().all(|&at| matches!(self.model.copies(at).1, Slot::There(_)));
        for (&at, page) in places.iter().zip(&pages) {
            if backed {
                self.model.adopt(at, c, 1, page.0);
            } else {
                self.pools[c][1].free(&[*page]).unwrap();
            }
        }
        if !backed {
            let mut out = ComponentPages::default();
            self.tree.drain_freed(&mut out);
            assert_eq!(set(&out.host[c]), set(&pages));
        }
    }

    fn refer(&mut self, i: usize, row: Row) {
        let (ns, tokens) = self.tokens(row);
        if i % 4 >= self.sessions.len() {
            let OpId(name) = self.op();
            self.sessions.push((self.tree.open_session(), name));
            self.model.open_session(name);
        }
        let (session, name) = self.sessions[i % self.sessions.len()];
        let (found, path, _) = self.look_up(ns, &tokens);
        self.tree.refer(session, found.node).unwrap();
        self.model.refer(name, Self::end_of(&path, found.depth_pages()));
    }

    fn close_session(&mut self, i: usize) {
        if !self.sessions.is_empty() {
            let (session, name) = self.sessions.swap_remove(i % self.sessions.len());
            self.tree.close_session(session).unwrap();
            self.model.close_session(name);
            assert_eq!(self.tree.close_session(session), Err(TreeError::UnknownSession(session)));
        }
    }

    fn wait_for(&mut self, row: Row) {
        if self.waiting.len() == 4 {
            self.stop_waiting(row.pages as usize);
        }
        let (ns, tokens) = self.tokens(row);
        let OpId(name) = self.op();
        let waiter = self.tree.wait_for(Key { ns, tokens: &tokens, view: self.view }).unwrap();
        self.model.wait_for(name, ns.0, &tokens);
        self.waiting.push((waiter, name));
    }

    fn stop_waiting(&mut self, i: usize) {
        if !self.waiting.is_empty() {
            let (waiter, name) = self.waiting.swap_remove(i % self.waiting.len());
            self.tree.stop_waiting(waiter).unwrap();
            self.model.stop_waiting(name);
            assert_eq!(self.tree.stop_waiting(waiter), Err(TreeError::UnknownWaiter(waiter)));
        }
    }

    fn begin(&mut self, load: bool, row: Row) {
        let (ns, tokens) = self.tokens(row);
        let (found, path, _) = self.look_up(ns, &tokens);
        let node = if load { found.node } else { found.device_node };
        let depth = if load { found.depth_pages() } else { found.device_pages };
        if depth == 0 {
            return;
        }
        let at = Self::end_of(&path, depth);
        let op = self.op();
        let (mut backup, mut bring) = (BackupPlan::default(), LoadPlan::default());
        let mut pages = Vec::new();
        let want = if load {
            self.tree.plan_load(node, &mut bring).unwrap();
            let want = self.model.plan_load(at);
            let from = |at: &At| self.model.copies(*at).1;
            assert_eq!(
                bring.host_pages.iter().map(|p| Slot::There(p.0)).collect::<Vec<_>>(),
                want.iter().map(from).collect::<Vec<_>>()
            );
            want
        } else {
            self.tree.plan_backup(node, &mut backup).unwrap();
            let want = self.model.plan_backup(at, self.tree.node_pages(node).unwrap());
            let from = |at: &At| self.model.copies(*at).0;
            assert_eq!(
                backup.device_pages.iter().map(|p| Slot::There(p.0)).collect::<Vec<_>>(),
                want.iter().map(from).collect::<Vec<_>>()
            );
            want
        };
        let n = want.len() as u32;
        let copies = if load { &bring.copies } else { &backup.copies };
        let same = if load {
            let joins: BTreeSet<u64> = bring.joins.iter().map(|op| op.0).collect();
            assert_eq!(joins, self.model.joins(at));
            self.model.plan_component_load(at, &want)
        } else {
            self.model.plan_component_backup(&want)
        };
        let plain =
            |copy: &ComponentCopy| (copy.component as usize, path[copy.position as usize], copy.source.0);
        assert_eq!(copies.iter().map(plain).collect::<Vec<_>>(), same);
        let pool = if load { &mut self.device } else { &mut self.host };
        if n == 0 && same.is_empty() || !pool.alloc(n, &mut pages) {
            return;
        }
        let mut extra = Vec::new();
        let tier = usize::from(!load);
        let fits = same.iter().all(|copy| self.pools[copy.0][tier].alloc(1, &mut extra));
        if !fits {
            for (copy, page) in same.iter().zip(&extra) {
                self.pools[copy.0][tier].free(&[*page]).unwrap();
            }
            extra.clear();
            if n == 0 {
                return;
            }
        }
        // Without room for the components the Full pages go alone.
        let end = if load && fits { at } else { want[want.len() - 1] };
        match (load, fits) {
            (true, true) => self.tree.begin_load_with(op, &bring, pages.clone(), extra.clone()).unwrap(),
            (true, false) => self.tree.begin_load(op, &bring, pages.clone()).unwrap(),
            (false, true) => self.tree.begin_backup_with(op, &backup, pages.clone(), extra.clone()).unwrap(),
            (false, false) => self.tree.begin_backup(op, &backup, pages.clone()).unwrap(),
        }
        self.model.begin(op.0, load, end, &want, &ids(&pages));
        if fits {
            self.model.begin_copies(op.0, &same, &ids(&extra));
        }
        self.flying.push((op.0, load));
        if load && fits && bring.later_pages == 0 {
            bring.joins.push(op);
            self.same_view(node, at, &bring.joins);
        }
    }

    /// What a request is shown at the end of its path if it waits for `loads`, and if it waits for none.
    fn same_view(&self, node: NodeId, at: At, loads: &[OpId]) {
        for (c, component) in [Component::Window, Component::State].into_iter().enumerate() {
            for loads in [loads, &[]].into_iter().filter(|_| self.spans[c] > 0) {
                let mut pages = Vec::new();
                let done = self.tree.component_device_pages_with(node, component, loads, &mut pages);
                let names: Vec<u64> = loads.iter().map(|op| op.0).collect();
                assert_eq!(done.ok().map(|()| ids(&pages)), self.model.shown(at, c, &names));
            }
        }
    }

    fn end(&mut self, i: usize, ok: bool) {
        let ready: Vec<(u64, bool)> =
            self.flying.iter().copied().filter(|&(op, _)| !self.model.is_waiting(op)).collect();
        if ready.is_empty() {
            return;
        }
        let (op, load) = ready[i % ready.len()];
        self.end_op(op, load, ok);
    }

    fn end_op(&mut self, op: u64, load: bool, ok: bool) {
        let mut got: Vec<(u64, bool, Vec<PageId>)> = Vec::new();
        if load {
            let mut out = Vec::new();
            self.tree.end_load(OpId(op), ok, &mut out).unwrap();
            for end in out {
                match end.outcome {
                    LoadOutcome::Published { .. } => got.push((end.op.0, true, vec![])),
                    LoadOutcome::Failed { returned } => got.push((end.op.0, false, returned)),
                }
            }
        } else {
            let mut out = Vec::new();
            self.tree.end_backup(OpId(op), ok, &mut out).unwrap();
            for end in out {
                match end.outcome {
                    BackupOutcome::Published { .. } => got.push((end.op.0, true, vec![])),
                    BackupOutcome::Failed { returned } => got.push((end.op.0, false, returned)),
                }
            }
        }
        let want = self.model.end(op, ok);
        assert_eq!(got.len(), want.len());
        for ((op, published, back), want) in got.iter().zip(&want) {
            let (pages, good) = match &want.kind {
                SettledKind::Published => (&[][..], true),
                SettledKind::Failed(pages) => (&pages[..], false),
            };
            assert_eq!((*op, *published, set(back)), (want.op, good, pages.iter().copied().collect()));
            if load {
                self.device.free(back).unwrap()
            } else {
                self.host.free(back).unwrap()
            }
            self.flying.retain(|(flying, _)| flying != op);
        }
    }

    fn refill(&mut self, row: Row, anchor: u32) {
        let (ns, tokens) = self.tokens(row);
        let p = self.page_size;
        // A look-up of a shorter key gives the anchor.
        let cut = (anchor * p) as usize + self.view.overlap();
        let (found, path, _) = self.look_up(ns, &tokens[..cut.min(tokens.len())]);
        let depth = found.depth_pages();
        let key = self.key(ns, &tokens);
        let rest = key.from_page(depth, p);
        let mut pages = Vec::new();
        if !self.host.alloc(rest.pages(p), &mut pages) {
            return;
        }
        let mut hashes = Vec::new();
        if self.tree.hashing() {
            hash_pages(key, p, self.tree.namespaces().seed(ns), &mut hashes);
            hashes.drain(..depth as usize);
        }
        let mut back = Vec::new();
        let done = self.tree.insert_host(found.node, rest, &pages, &hashes, &mut back).unwrap();
        let want = self.model.refill(Self::end_of(&path, depth), ns.0, rest.tokens, &ids(&pages));
        assert_eq!((done.refilled_pages, done.attached_pages), (want.refilled, want.attached));
        assert_eq!(ids(&back), want.returned);
        self.host.free(&back).unwrap();
    }

    fn store(&mut self, row: Row) {
        let (ns, tokens) = self.tokens(row);
        let (found, path, _) = self.look_up(ns, &tokens);
        let op = self.op();
        if let Ok(plan) = self.tree.begin_store(op, found.node) {
            let depth = found.depth_pages();
            let first = depth - self.tree.node_pages(found.node).unwrap();
            let want: Vec<u32> =
                (first..depth).filter(|&i| !self.model.is_stored(path[i as usize])).collect();
            assert_eq!(plan.positions, want);
            let at = Self::end_of(&path, depth);
            assert_eq!(self.model.pin(at), !self.model.backed_up_parent);
            let holds = self.model.hold(at);
            self.storing.push((op.0, at, want.iter().map(|&i| path[i as usize]).collect(), holds));
        }
    }

    fn end_store(&mut self, mask: u32) {
        if self.storing.is_empty() {
            return;
        }
        let (op, at, pages, holds) = self.storing.remove(0);
        let outcomes: Vec<bool> = (0..pages.len()).map(|i| mask >> (i % 32) & 1 == 1).collect();
        let marked = self.tree.end_store(OpId(op), &outcomes).unwrap();
        assert_eq!(marked as usize, outcomes.iter().filter(|ok| **ok).count());
        for (page, _) in pages.iter().zip(&outcomes).filter(|(_, ok)| **ok) {
            self.model.mark_stored(*page, true);
        }
        self.model.release(&holds);
        self.model.unpin_unused(at, !self.model.backed_up_parent);
    }

    fn demote(&mut self, row: Row, delete: bool) {
        let (ns, tokens) = self.tokens(row);
        let (found, path, _) = self.look_up(ns, &tokens);
        let node = found.device_node;
        let pages = self.tree.node_pages(node).unwrap();
        let mut out = DeviceEviction::default();
        let result =
            if delete { self.tree.delete_leaf(node, &mut out) } else { self.tree.demote(node, &mut out) };
        let mine: Vec<At> = (found.device_pages.saturating_sub(pages)..found.device_pages)
            .map(|i| path[i as usize])
            .collect();
        if result.is_err() {
            assert_eq!(out, DeviceEviction::default());
            return;
        }
        assert_eq!(out.freed_device.len() as u32, pages);
        if delete {
            let freed: BTreeSet<u32> = self.model.delete(mine[0]).into_iter().collect();
            assert_eq!(set(&out.freed_host), freed);
        } else {
            mine.iter().rev().for_each(|&at| self.model.demote(at));
        }
        self.device.free(&out.freed_device).unwrap();
        self.host.free(&out.freed_host).unwrap();
    }

    pub(crate) fn run(&mut self, step: Step) {
        match step {
            Step::Insert { row, priority, count, chunked } => {
                let (ns, tokens) = self.tokens(row);
                let (held, found, mut pages) = self.lock(ns, &tokens);
                let need = self.key(ns, &tokens).pages(self.page_size) - found.device_pages;
                if self.alloc_device(need, &mut pages) {
                    let from = if chunked { found.device_pages } else { 0 };
                    // The held lock saves the second walk, and must not change anything.
                    let lock = (priority == 1).then_some(&held.lock);
                    self.insert(
                        ns,
                        &tokens,
                        &pages,
                        found.device_pages,
                        priority,
                        count.then_some(from),
                        lock,
                    );
                    // As a request that publishes chunk by chunk.
                    let now = self.tree.peek(self.key(ns, &tokens));
                    let all_here = now.device_pages == now.depth_pages();
                    if priority == 1 && chunked && all_here && self.held.len() < 5 {
                        let held = self.move_lock(held, ns, &tokens);
                        self.held.push(held);
                        return;
                    }
                }
                self.unlock(held);
            }
            Step::InsertBlind(row) => self.insert_blind(row),
            Step::Overtake(row, less) => {
                self.insert_blind(row);
                let flying = self.flying.len();
                self.begin(false, row);
                if let Some(&(op, load)) = self.flying.get(flying) {
                    self.end_op(op, load, true);
                }
                self.evict_component(0, 0, DEVICE);
                self.evict_component(1, 0, DEVICE);
                self.begin(true, row);
                self.begin(true, Row { pages: row.pages.saturating_sub(less), ..row });
                self.insert_blind(row);
            }
            Step::Match(row) => {
                let (ns, tokens) = self.tokens(row);
                self.look_up(ns, &tokens);
            }
            Step::Lock(row) if self.held.len() < 5 => {
                let (ns, tokens) = self.tokens(row);
                let (held, ..) = self.lock(ns, &tokens);
                // Going on where the lock ends finds what a look-up finds.
                let key = Key { ns, tokens: &tokens, view: self.view };
                let (mut more, mut all) = (Vec::new(), Vec::new());
                let again = self.tree.match_from(&held.lock, key, &mut more).unwrap();
                let whole = self.tree.match_prefix(key, &mut all);
                self.model.look_up(ns.0, &tokens);
                self.model.look_up(ns.0, &tokens);
                assert_eq!((&again, &more[..]), (&whole, &all[again.device_pages as usize - more.len()..]));
                self.held.push(held);
            }
            Step::Unlock(i) if !self.held.is_empty() => {
                let held = self.held.swap_remove(i % self.held.len());
                self.unlock(held);
            }
            Step::Lock(_) | Step::Unlock(_) => {}
            Step::Backup(row) => self.begin(false, row),
            Step::Load(row) => self.begin(true, row),
            Step::LoadTwice(row, less, fails) => {
                let flying = self.flying.len();
                self.begin(true, Row { pages: row.pages.saturating_sub(less), ..row });
                let first = self.flying.get(flying).map(|&(op, _)| op);
                self.begin(true, row);
                if let Some(op) = first.filter(|_| fails) {
                    self.end_op(op, true, false);
                }
            }
            Step::End(i, ok) => self.end(i, ok),
            Step::Evict(n, report) => self.evict(n, report),
            Step::EvictHost(n) => self.evict_host(n),
            Step::Reclaim(n) => self.reclaim(n),
            Step::Refill(row, anchor) => {
                let mut room = Vec::new();
                if self.alloc_host(row.pages, &mut room) {
                    self.host.free(&room).unwrap();
                    self.refill(row, anchor);
                }
            }
            Step::Store(row) => self.store(row),
            Step::EndStore(mask) => self.end_store(mask),
            Step::Demote(row) => self.demote(row, false),
            Step::DeleteLeaf(row) => self.demote(row, true),
            Step::EvictComponent(c, tier, n) => self.evict_component(usize::from(c), usize::from(tier), n),
            Step::AdoptHost(row, c, n) => self.adopt_host(row, usize::from(c), n),
            Step::Refer(i, row) => self.refer(i, row),
            Step::CloseSession(i) => self.close_session(i),
            Step::WaitFor(row) => self.wait_for(row),
            Step::StopWaiting(i) => self.stop_waiting(i),
            Step::ReleaseWindow(i) => {
                if !self.held.is_empty() {
                    let i = i % self.held.len();
                    let held = &mut self.held[i];
                    self.tree.release_component(&mut held.lock, Component::Window).unwrap();
                    let (window, rest): (Vec<Hold>, Vec<Hold>) =
                        held.lock_holds.iter().partition(|hold| hold.0 == 0);
                    self.model.release(&window);
                    held.lock_holds = rest;
                }
            }
        }
    }

    pub(crate) fn compare(&self, step: Step) {
        let found = self.tree.sanity();
        assert!(found.is_empty(), "{found:#?}\n{}", self.tree.dump_text());
        let mut device = BTreeSet::new();
        self.tree.for_each_page(Tier::Device, |_, page| assert!(device.insert(page.0)));
        let mut host = BTreeSet::new();
        self.tree.for_each_page(Tier::Host, |_, page| assert!(host.insert(page.0)));
        assert_eq!((&device, &host), (&self.model.held().0, &self.model.held().1));
        assert_eq!(
            device.len() as u32,
            self.device.used_pages(),
            "device pages in the tree + free = capacity"
        );
        assert_eq!(host.len() as u32, self.host.used_pages(), "host pages in the tree + free = capacity");
        for (c, component) in [Component::Window, Component::State].into_iter().enumerate() {
            for (tier, name) in [Tier::Device, Tier::Host].into_iter().enumerate() {
                let mut pages = BTreeSet::new();
                self.tree.for_each_component_page(component, name, |page| assert!(pages.insert(page.0)));
                assert_eq!(pages, self.model.component_held(c, tier));
                assert_eq!(pages.len() as u32, self.pools[c][tier].used_pages(), "{component:?} {name:?}");
            }
        }
        let s = self.tree.stats();
        let sizes = [
            s.device_pages_evictable,
            s.device_pages_protected,
            s.device_pages_loading,
            s.host_pages,
            s.host_pages_pending,
            s.host_pages_mirrored,
        ];
        assert_eq!(sizes, self.model.sizes());
        if let Step::Insert { row, .. } | Step::Match(row) | Step::Store(row) | Step::Refill(row, _) = step {
            let (ns, tokens) = self.tokens(row);
            let found = self.tree.peek(self.key(ns, &tokens));
            self.same_match(&found, &self.model.peek(ns.0, &tokens));
        }
    }

    /// Ends everything; nothing may be left.
    pub(crate) fn finish(mut self) {
        while !self.flying.is_empty() {
            self.end(0, true);
        }
        while !self.storing.is_empty() {
            self.end_store(u32::MAX);
        }
        while let Some(held) = self.held.pop() {
            self.unlock(held);
        }
        self.evict(DEVICE, false);
        self.evict_host(HOST);
        self.drain();
        assert_eq!((self.device.used_pages(), self.host.used_pages(), self.tree.stats().nodes), (0, 0, 0));
        assert!(self.pools.iter().flatten().all(|pool| pool.used_pages() == 0));
    }
}
