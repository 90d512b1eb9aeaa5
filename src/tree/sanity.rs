//! Every broken rule of a tree, as a list. Recomputes what the other files maintain; trusts no link.

use std::fmt::Arguments;

use crate::base::containers::Set;
use crate::base::{PageId, Tier, Violation};
use crate::key::{Key, hash_pages};

use super::node::{DEVICE_ORDERS, HOST_ORDERS, Listed, NIL, NO_PAGE, Node, ROOT, Residency};
use super::op::OpKind;
use super::order::{Ends, Orders, facts, is_copied, mirror_key};
use super::walk::{page_name, tag_of};
use super::{BackupRule, Tree, TreeStats};

pub(super) struct Report(Vec<Violation>);

impl Report {
    pub(super) fn must(&mut self, ok: bool, rule: &'static str, detail: Arguments<'_>) {
        if !ok {
            self.0.push(Violation { rule, detail: detail.to_string() });
        }
    }
}

impl Tree {
    /// Every rule that the tree breaks; empty in a sound tree. Never panics, also on a tree with cycles. O(tokens), for
    /// tests, idle checks and incident dumps.
    #[must_use]
    pub fn sanity(&self) -> Vec<Violation> {
        let mut report = Report(Vec::new());
        let sound: Vec<u32> =
            self.arena.live().filter(|&at| at == ROOT || self.check_links(at, &mut report)).collect();
        let mut readable = report.0.is_empty();
        for &at in &sound {
            readable &= self.check_children(at, &mut report);
        }
        // What follows reads through links and ranges; it needs them sound.
        if !readable {
            return report.0;
        }
        for &at in &sound {
            report.0.extend(self.component_faults(at));
        }
        for &at in sound.iter().filter(|&&at| at != ROOT) {
            self.check_state(at, &mut report);
            self.check_payload(at, &mut report);
        }
        self.check_runs(&sound, &mut report);
        self.check_orders(&sound, &mut report);
        self.check_ops(&mut report);
        self.check_sessions(&mut report);
        self.check_waiting(&mut report);
        self.check_counters(&sound, &mut report);
        self.check_pages(&mut report);
        report.0
    }

    fn node(&self, at: u32) -> &Node {
        &self.arena.nodes[at as usize]
    }

    /// Links and ranges of one node. Depths grow strictly downwards, which rules out cycles.
    fn check_links(&self, at: u32, report: &mut Report) -> bool {
        let before = report.0.len();
        let n = self.node(at);
        report.must(n.pages > 0, "node-not-empty", format_args!("node {at} has no page"));
        if !self.arena.is_live(n.parent) {
            report.must(false, "parent-alive", format_args!("node {at} has the dead parent {}", n.parent));
            return false;
        }
        let up = self.node(n.parent);
        report.must(
            u64::from(up.depth) + u64::from(up.pages) == u64::from(n.depth),
            "depth",
            format_args!("node {at} starts at {}, its parent {} ends elsewhere", n.depth, n.parent),
        );
        let same_ns = n.parent == ROOT || up.ns == n.ns;
        report.must(
            same_ns,
            "one-namespace-per-path",
            format_args!("node {at} is {:?} below {:?}", n.ns, up.ns),
        );
        let in_run = self.arena.runs.get(n.run as usize).is_some_and(|run| {
            let units = run.pages as usize * self.page_size as usize;
            u64::from(n.from) + u64::from(n.pages) <= u64::from(run.pages)
                && run.tokens.capacity() >= units + self.view.overlap()
        });
        report.must(in_run, "range-in-run", format_args!("node {at} is not inside run {}", n.run));
        let found = self.table.find(n.tag, |item| (item == at).then_some(()));
        report.must(found.is_some(), "child-table", format_args!("node {at} is not in the child table"));
        report.0.len() == before
    }

    /// Child lists and what is counted over them. False if a list cannot be followed.
    fn check_children(&self, at: u32, report: &mut Report) -> bool {
        let n = self.node(at);
        let (mut kids, mut device, mut host, mut locks, mut pins, mut refs) = (0, 0, 0, 0, 0, 0);
        let (mut child, mut older) = (n.first_child, NIL);
        while child != NIL {
            if !self.arena.is_live(child) || child == ROOT || kids as usize > self.arena.nodes.len() {
                report.must(false, "children", format_args!("node {at} lists {child}, or lists in a circle"));
                return false;
            }
            let c = self.node(child);
            report.must(
                c.parent == at && c.sibling.older == older,
                "children",
                format_args!("node {child} is listed by {at} but linked elsewhere"),
            );
            kids += 1;
            device += u32::from(c.device != Residency::Absent);
            host += u32::from(c.host != Residency::Absent);
            locks += u32::from(c.locks > 0);
            pins += u32::from(c.pins > 0);
            refs += u32::from(c.refs > 0);
            (older, child) = (child, c.sibling.newer);
        }
        report.must(
            (n.kids, n.kids_device, n.kids_host) == (kids, device, host),
            "child-counters",
            format_args!(
                "node {at}: {:?}, found {:?}",
                (n.kids, n.kids_device, n.kids_host),
                (kids, device, host)
            ),
        );
        report.must(
            n.locks == n.own_locks + locks && n.pins == n.own_pins + pins,
            "path-counts",
            format_args!(
                "node {at}: locks {} = {} + {locks}, pins {} = {} + {pins}?",
                n.locks, n.own_locks, n.pins, n.own_pins
            ),
        );
        let own = self.sessions.ends_at(at) + self.waiting.ends_at(at);
        report.must(
            at == ROOT || n.refs == own + refs,
            "kept-refs",
            format_args!("node {at}: {} = {own} + {refs}?", n.refs),
        );
        true
    }

    fn check_state(&self, at: u32, report: &mut Report) {
        let n = self.node(at);
        let up = self.node(n.parent);
        use Residency::{Absent, Pending, Present};
        report.must(
            n.device == Present || n.host == Present,
            "not-dead",
            format_args!("node {at} is {:?}/{:?}", n.device, n.host),
        );
        // A load whose upper part failed goes on below a parent without a copy; it fails when it ends.
        let closed = match n.device {
            Present => up.device == Present,
            Pending => n.locks > 0 && n.pins > 0,
            Absent => true,
        };
        report.must(
            closed,
            "device-root-closed",
            format_args!("node {at} {:?} under {:?}", n.device, up.device),
        );
        report.must(
            n.host != Pending || n.locks > 0,
            "pins",
            format_args!("node {at} pending and not locked"),
        );
        let backed = match n.host {
            // A pending copy may have lost its parent's to a failure; it fails when it ends.
            Absent | Pending => true,
            Present => self.rule == BackupRule::Free || up.host == Present,
        };
        report.must(backed, "backed-up-parent", format_args!("node {at} under {} ({:?})", n.parent, up.host));
        report.must(
            n.parent == ROOT || up.priority >= n.priority,
            "priority",
            format_args!("node {at} has {} under {}", n.priority, up.priority),
        );
        let marked = n.device == Pending || n.host == Pending;
        report.must(marked == (n.op != NIL), "op-marks", format_args!("node {at}: op {}", n.op));
        let storing = self.ops.storing(at);
        for (op, kinds) in [(n.op, &[OpKind::Backup, OpKind::Load][..]), (storing, &[OpKind::Store][..])] {
            let fits = op == NIL || (self.ops.is_live(op) && kinds.contains(&self.ops.get(op).kind));
            report.must(fits, "op-marks", format_args!("node {at} names no operation that fits"));
        }
        report.must(storing == NIL || n.pins > 0, "pins", format_args!("node {at} stored and not pinned"));
    }

    fn check_payload(&self, at: u32, report: &mut Report) {
        let n = self.node(at);
        for (state, tier) in [(n.device, Tier::Device), (n.host, Tier::Host)] {
            let pages = self.arena.pages(at, tier);
            let all = pages.len() == n.pages as usize && pages.iter().all(|&page| page != NO_PAGE);
            let ok = state == Residency::Absent || all;
            report.must(ok, "page-list", format_args!("node {at} lacks {tier:?} pages"));
        }
        // The walk must come back here, and so finds siblings that share a first page.
        let first = &self.tokens_of(at)[..self.page_size as usize + self.view.overlap()];
        let walk = self.walk(n.parent, Key { ns: n.ns, tokens: first, view: self.view }, |_, _| {});
        let found = walk.last == at && n.tag == tag_of(n.parent, page_name(n.ns, first));
        report.must(found, "reachable", format_args!("a walk to node {at} ends at {}", walk.last));
        if self.hashing {
            let mut want = Vec::new();
            let key = Key { ns: n.ns, tokens: self.tokens_of(at), view: self.view };
            hash_pages(key, self.page_size, self.prior_hash(n.parent, n.ns), &mut want);
            let ok = self.arena.hashes(at) == Some(&want[..]);
            report.must(ok, "hash-chain", format_args!("node {at} has wrong hashes"));
        }
    }

    /// The nodes of a run are a path and tile it from its start.
    fn check_runs(&self, sound: &[u32], report: &mut Report) {
        let mut by_run: Vec<u32> = sound.iter().copied().filter(|&at| at != ROOT).collect();
        by_run.sort_by_key(|&at| (self.node(at).run, self.node(at).from));
        for path in by_run.chunk_by(|&a, &b| self.node(a).run == self.node(b).run) {
            let run = &self.arena.runs[self.node(path[0]).run as usize];
            let mut end = 0;
            let mut ok = run.nodes as usize == path.len();
            for (i, &at) in path.iter().enumerate() {
                let n = self.node(at);
                ok &= n.from == end && (i == 0 || n.parent == path[i - 1]);
                end += n.pages;
            }
            report.must(
                ok && end == run.pages,
                "runs",
                format_args!("run of {path:?}: {end} of {} pages", run.pages),
            );
        }
    }

    fn check_orders(&self, sound: &[u32], report: &mut Report) {
        for &at in sound {
            let n = self.node(at);
            let want = self.orders.place(at, n);
            report.must(
                n.listed == want,
                "order-sets",
                format_args!("node {at}: {:?}, not {want:?}", n.listed),
            );
            let want = Orders::is_mirror(self.rule, at, n);
            report.must(
                n.mirrored == want,
                "mirror-set",
                format_args!("node {at}: {}, not {want}", n.mirrored),
            );
        }
        let mirrors = sound.iter().filter(|&&at| self.node(at).mirrored).count();
        let listed = mirrors.saturating_sub(self.orders.old_mirrors.len());
        self.check_list(self.orders.mirrors, listed, |n| (n.mirror.older, n.mirror.newer), report);
        let (mut at, mut key) = (self.orders.mirrors.oldest, (u64::MAX, u64::MAX));
        for _ in 0..listed {
            let n = self.node(at);
            report.must(mirror_key(n) < key, "mirror-ages", format_args!("mirror {at}: {key:?} before it"));
            (key, at) = (mirror_key(n), n.mirror.newer);
            if at == NIL {
                break;
            }
        }
        for &at in sound {
            let key = self.orders.old_mirrors.key(at);
            let ok = key.is_none_or(|key| key == mirror_key(self.node(at)) && self.node(at).mirrored);
            report.must(ok, "mirror-ages", format_args!("mirror {at} has an old key"));
        }
        for tier in DEVICE_ORDERS.into_iter().chain(HOST_ORDERS) {
            let (ends, heap) = (self.orders.lists[tier as usize], &self.orders.heaps[tier as usize]);
            let members: Vec<u32> =
                sound.iter().copied().filter(|&at| self.node(at).listed == tier).collect();
            if self.orders.policy.is_list() {
                self.check_list(ends, members.len(), |n| (n.order.older, n.order.newer), report);
                self.check_families(ends, tier, report);
                continue;
            }
            if let Some(adaptive) = &self.orders.adaptive {
                if [Listed::DeviceKept, Listed::HostKept].contains(&tier) {
                    continue;
                }
                let orders = if tier == Listed::Device { DEVICE_ORDERS } else { HOST_ORDERS };
                let members: Vec<u32> =
                    sound.iter().copied().filter(|&at| orders.contains(&self.node(at).listed)).collect();
                let tier = if tier == Listed::Device { Tier::Device } else { Tier::Host };
                let found = adaptive.members(&self.arena.nodes, tier);
                let mut standing: Vec<u32> = found.iter().map(|f| f.0).collect();
                standing.sort_unstable();
                report.must(
                    standing == members,
                    "order-sets",
                    format_args!("{tier:?} cells: {standing:?}, not {members:?}"),
                );
                for (at, _) in found.iter().filter(|f| !f.1) {
                    report.must(false, "order-keys", format_args!("node {at} stands in a wrong cell"));
                }
                for at in standing {
                    let copied = is_copied(&self.arena, at);
                    report.must(
                        adaptive.stands_as(at, copied),
                        "order-keys",
                        format_args!("node {at}, on the next tier: {copied}, stands as if it were not so"),
                    );
                }
                continue;
            }
            report.must(
                heap.len() == members.len(),
                "order-sets",
                format_args!("{tier:?} heap: {}", heap.len()),
            );
            for at in members {
                let want = self.orders.policy.key(&facts(self.node(at)));
                report.must(
                    heap.key(at) == Some(want),
                    "order-keys",
                    format_args!("node {at} has an old key"),
                );
            }
        }
    }

    /// Links agree, all members are in, and ticks never fall towards the newest end.
    fn check_list(&self, ends: Ends, want: usize, links: fn(&Node) -> (u32, u32), report: &mut Report) {
        let (mut at, mut older, mut count, mut tick) = (ends.oldest, NIL, 0, 0);
        while at != NIL && count <= want {
            let n = self.node(at);
            let (back, newer) = links(n);
            report.must(back == older, "list-links", format_args!("node {at} links back to {back}"));
            report.must(n.tick >= tick, "list-ages", format_args!("node {at}: tick {} after {tick}", n.tick));
            count += 1;
            (older, at, tick) = (at, newer, n.tick);
        }
        let ok = count == want && ends.newest == older;
        report.must(ok, "list-links", format_args!("a list of {want} has {count}, ends at {older}"));
    }

    /// In an order of eviction a node comes after its children.
    fn check_families(&self, ends: Ends, tier: Listed, report: &mut Report) {
        let (mut at, mut seen) = (ends.oldest, Set::default());
        while at != NIL && seen.insert(at) {
            let n = self.node(at);
            let above = n.parent != ROOT && seen.contains(&n.parent);
            report.must(!above, "list-ages", format_args!("{tier:?} order: node {at} after its parent"));
            at = n.order.newer;
        }
    }

    fn check_ops(&self, report: &mut Report) {
        report.must(
            self.stats.ops as usize == self.ops.len(),
            "op-count",
            format_args!("{} counted, {} found", self.stats.ops, self.ops.len()),
        );
        for op in self.ops.iter() {
            let live = op.node != ROOT && self.arena.is_live(op.node);
            report.must(
                live,
                "op-anchor",
                format_args!("{:?} is anchored at the dead node {}", op.id, op.node),
            );
            if live {
                let n = self.node(op.node);
                let held = match op.kind {
                    OpKind::Backup => n.own_locks > 0,
                    OpKind::Load => n.own_locks > 0 && n.own_pins > 0,
                    OpKind::Store => n.own_pins > 0 && (!op.locked || n.own_locks > 0),
                };
                report.must(held, "pins", format_args!("{:?} does not hold node {}", op.id, op.node));
            }
        }
    }

    fn check_counters(&self, sound: &[u32], report: &mut Report) {
        let mut s = TreeStats {
            ops: self.stats.ops,
            splits: self.stats.splits,
            merges: self.stats.merges,
            refill_pages_dropped: self.stats.refill_pages_dropped,
            hashed_pages: self.stats.hashed_pages,
            ..TreeStats::default()
        };
        for n in sound.iter().filter(|&&at| at != ROOT).map(|&at| self.node(at)) {
            match n.device {
                Residency::Present if n.locks > 0 => s.device_pages_protected += n.pages,
                Residency::Present => s.device_pages_evictable += n.pages,
                Residency::Pending => s.device_pages_loading += n.pages,
                Residency::Absent => {}
            }
            match n.host {
                Residency::Present => s.host_pages += n.pages,
                Residency::Pending => s.host_pages_pending += n.pages,
                Residency::Absent => {}
            }
            if n.device == Residency::Present && n.host == Residency::Present {
                s.host_pages_mirrored += n.pages;
            }
        }
        report.must(s == self.stats, "counters", format_args!("kept {:?}, found {s:?}", self.stats));
    }

    fn check_pages(&self, report: &mut Report) {
        for tier in [Tier::Device, Tier::Host] {
            let mut seen: Set<PageId> = Set::default();
            self.for_each_page(tier, |id, page| {
                report.must(
                    seen.insert(page),
                    "one-owner",
                    format_args!("{tier:?} {page:?} again under {id}"),
                );
            });
        }
    }
}
