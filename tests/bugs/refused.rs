//! Caller mistakes that other cores answered with a poisoned lock, a broken tree or silence. Each is a typed refusal here,
//! and the tree is bit for bit what it was before.

use crate::rig::{P, Rig, key, pages, row};
use sapwood::base::{NamespaceId, NodeId, OpId, PageId};
use sapwood::key::{Key, PageHash};
use sapwood::tree::*;

/// Everything that can be seen, without the count of hashes: a refusal may have to compute some to find out.
fn seen(tree: &Tree) -> (String, TreeStats) {
    (tree.dump_text(), TreeStats { hashed_pages: 0, ..tree.stats() })
}

/// Runs a call that must be refused and compares everything that can be seen before and after.
fn refused<T: std::fmt::Debug>(
    rig: &mut Rig,
    want: TreeError,
    call: impl FnOnce(&mut Tree) -> Result<T, TreeError>,
) {
    let before = seen(&rig.tree);
    let got = call(&mut rig.tree);
    assert_eq!(got.map(|_| ()).unwrap_err(), want);
    assert_eq!(seen(&rig.tree), before);
    rig.check();
}

fn insert(tree: &mut Tree, key: Key<'_>, pages: &[PageId], owned: u32) -> Result<Inserted, TreeError> {
    let mut out = InsertOut::default();
    let done = tree.insert(key, pages, owned, InsertOpts::default(), &mut out);
    assert!(done.is_ok() || out.returned.is_empty() && out.canonical.is_empty());
    done
}

fn rig() -> (Rig, NodeId) {
    let config = TreeConfig { page_size: P, hashing: true, merge: false, ..TreeConfig::default() };
    let mut rig = Rig::with(config, 32, 32);
    let node = rig.ins("ABCD");
    (rig, node)
}

const NOWHERE: NodeId = NodeId { index: 77, generation: 0 };

#[test]
fn unknown_nodes() {
    let (mut rig, node) = rig();
    let stale = NodeId { generation: node.generation + 1, ..node };
    for id in [NOWHERE, stale, NodeId { index: u32::MAX, generation: 9 }] {
        let want = || TreeError::UnknownNode(id);
        refused(&mut rig, want(), |t| t.lock(id));
        refused(&mut rig, want(), |t| t.pin_host(id));
        refused(&mut rig, want(), |t| t.plan_backup(id, &mut BackupPlan::default()));
        refused(&mut rig, want(), |t| t.plan_load(id, &mut LoadPlan::default()));
        refused(&mut rig, want(), |t| t.demote(id, &mut DeviceEviction::default()));
        refused(&mut rig, want(), |t| t.delete_leaf(id, &mut DeviceEviction::default()));
        refused(&mut rig, want(), |t| t.begin_store(OpId(1), id));
        refused(&mut rig, want(), |t| t.mark_stored(id, true));
        refused(&mut rig, want(), |t| t.hashes(id).map(<[PageHash]>::len));
        refused(&mut rig, want(), |t| t.depth_pages(id));
        refused(&mut rig, want(), |t| t.tokens(id).map(<[u32]>::len));
        refused(&mut rig, want(), |t| t.parent(id));
    }
}

#[test]
fn the_root_has_nothing_to_give() {
    let (mut rig, _) = rig();
    let root = rig.tree.root();
    refused(&mut rig, TreeError::Root, |t| t.plan_backup(root, &mut BackupPlan::default()));
    refused(&mut rig, TreeError::Root, |t| t.plan_load(root, &mut LoadPlan::default()));
    refused(&mut rig, TreeError::Root, |t| t.demote(root, &mut DeviceEviction::default()));
    refused(&mut rig, TreeError::Root, |t| t.delete_leaf(root, &mut DeviceEviction::default()));
    refused(&mut rig, TreeError::Root, |t| t.begin_store(OpId(1), root));
    let lock = rig.tree.lock(root).unwrap();
    rig.tree.unlock(lock).unwrap();
    assert_eq!(rig.tree.tokens(root), Ok(&[][..]));
}

#[test]
fn receipts_of_another_tree_or_another_life() {
    let (mut rig, node) = rig();
    let (mut other, same) = self::rig();
    assert_eq!(node, same);
    let foreign = other.tree.lock(same).unwrap();
    refused(&mut rig, TreeError::ForeignReceipt(node), |t| t.unlock(foreign));
    other.backup(same);
    let foreign = other.tree.pin_host(same).unwrap();
    refused(&mut rig, TreeError::ForeignReceipt(node), |t| t.unpin_host(foreign));
    let old = rig.tree.lock(node).unwrap();
    let (mut device, mut host) = (Vec::new(), Vec::new());
    rig.tree.reset(&mut device, &mut host).unwrap();
    rig.device.free(&device).unwrap();
    assert_eq!((device.len(), host.len(), rig.tree.stats().nodes), (4, 0, 0));
    refused(&mut rig, TreeError::UnknownNode(node), |t| t.unlock(old));
}

#[test]
fn inserts_that_do_not_fit() {
    let (mut rig, _) = rig();
    let tokens = row("ABXY");
    let k = key(&tokens);
    let fresh = pages(20..24);
    let unknown = NamespaceId(9);
    refused(&mut rig, TreeError::PageCount { want: 4, got: 3 }, |t| insert(t, k, &fresh[..3], 0));
    refused(&mut rig, TreeError::PageCount { want: 4, got: 0 }, |t| insert(t, k, &[], 0));
    refused(&mut rig, TreeError::ViewMismatch, |t| {
        insert(t, Key::bigram(NamespaceId::DEFAULT, &tokens), &fresh, 0)
    });
    refused(&mut rig, TreeError::UnknownNamespace(unknown), |t| {
        insert(t, Key::new(unknown, &tokens), &fresh, 0)
    });
    // "The tree has the first three pages": it has two.
    refused(&mut rig, TreeError::PrefixNotHeld { owned_from: 3, held: 2 }, |t| insert(t, k, &fresh, 3));
    refused(&mut rig, TreeError::PrefixNotHeld { owned_from: u32::MAX, held: 2 }, |t| {
        insert(t, k, &fresh, u32::MAX)
    });
    // Pages of the tree, handed over as the caller's own: they would come back as duplicates and be freed.
    let held = pages(0..4);
    let same = row("ABCD");
    refused(&mut rig, TreeError::NotYours { page: PageId(0) }, |t| insert(t, key(&same), &held, 0));
    refused(&mut rig, TreeError::NotYours { page: PageId(2) }, |t| insert(t, key(&same), &held, 2));
    refused(&mut rig, TreeError::NotYours { page: PageId(u32::MAX) }, |t| {
        insert(t, k, &[PageId(20), PageId(21), PageId(u32::MAX), PageId(22)], 0)
    });
}

#[test]
fn backups_that_do_not_fit() {
    let (mut rig, node) = rig();
    let plan = rig.plan(node);
    let op = OpId(50);
    let begin = |t: &mut Tree, op: OpId, plan: &BackupPlan, pages: Vec<PageId>| {
        let given = pages.clone();
        t.begin_backup(op, plan, pages).map_err(|(why, back)| {
            assert_eq!(back, given, "the pages come back");
            why
        })
    };
    refused(&mut rig, TreeError::EmptyPlan, |t| begin(t, op, &BackupPlan::default(), vec![]));
    refused(&mut rig, TreeError::PageCount { want: 4, got: 3 }, |t| begin(t, op, &plan, pages(0..3)));
    refused(&mut rig, TreeError::UnknownOp(op), |t| t.end_backup(op, true, &mut Vec::new()));
    // The tree changed since the plan.
    rig.tree.match_prefix(key(&row("AB")), &mut Vec::new());
    refused(&mut rig, TreeError::StalePlan(node), |t| begin(t, op, &plan, pages(0..4)));
    let low = BackupPlan { nodes: vec![node], node_pages: vec![2], ..plan.clone() };
    refused(&mut rig, TreeError::ParentNotBackedUp(node), |t| begin(t, op, &low, pages(0..2)));
    let started = rig.begin_backup(node);
    let again = BackupPlan { nodes: vec![node], node_pages: vec![2], ..plan };
    refused(&mut rig, TreeError::OpInFlight(started), |t| begin(t, started, &again, pages(20..22)));
    refused(&mut rig, TreeError::AlreadyBackedUp(node), |t| begin(t, op, &again, pages(20..22)));
    refused(&mut rig, TreeError::UnknownOp(started), |t| t.end_load(started, true, &mut Vec::new()));
    refused(&mut rig, TreeError::UnknownOp(started), |t| t.end_store(started, &[]));
    refused(&mut rig, TreeError::OpsInFlight(1), |t| t.reset(&mut Vec::new(), &mut Vec::new()));
    rig.end_backup(started, true);
    refused(&mut rig, TreeError::UnknownOp(started), |t| t.end_backup(started, true, &mut Vec::new()));
}

#[test]
fn an_operation_that_waits_for_another_cannot_end_twice() {
    let (mut rig, top) = rig();
    let low = rig.ins("ABCDE");
    let (first, second) = (rig.begin_backup(top), rig.begin_backup(low));
    assert_eq!(rig.end_backup(second, true), []);
    refused(&mut rig, TreeError::UnknownOp(second), |t| t.end_backup(second, false, &mut Vec::new()));
    assert_eq!(rig.end_backup(first, true).len(), 2);
}

#[test]
fn loads_and_demotions_that_do_not_fit() {
    let (mut rig, node) = rig();
    let mut out = DeviceEviction::default();
    refused(&mut rig, TreeError::NotBackedUp(node), |t| t.demote(node, &mut DeviceEviction::default()));
    refused(&mut rig, TreeError::NotBackedUp(node), |t| t.pin_host(node));
    let wrong = LoadPlan { nodes: vec![node], node_pages: vec![4], ..LoadPlan::default() };
    let load = |t: &mut Tree, plan: &LoadPlan, n: u32| {
        t.begin_load(OpId(60), plan, pages(20..20 + n)).map_err(|(why, _)| why)
    };
    refused(&mut rig, TreeError::AlreadyOnDevice(node), |t| load(t, &wrong, 4));
    let low = rig.ins("ABCDE");
    rig.backup(low);
    refused(&mut rig, TreeError::NotLeaf(node), |t| t.demote(node, &mut DeviceEviction::default()));
    refused(&mut rig, TreeError::NotLeaf(node), |t| t.delete_leaf(node, &mut DeviceEviction::default()));
    refused(&mut rig, TreeError::AlreadyBackedUp(low), |t| {
        t.delete_leaf(low, &mut DeviceEviction::default())
    });
    let lock = rig.tree.lock(low).unwrap();
    refused(&mut rig, TreeError::InUse(low), |t| t.demote(low, &mut DeviceEviction::default()));
    rig.tree.unlock(lock).unwrap();
    for id in [low, node] {
        rig.tree.demote(id, &mut out).unwrap();
        refused(&mut rig_free(&mut rig, &mut out), TreeError::NotOnDevice(id), |t| {
            t.demote(id, &mut DeviceEviction::default())
        });
    }
    refused(&mut rig, TreeError::PageCount { want: 4, got: 2 }, |t| load(t, &wrong, 2));
    let under_nothing = LoadPlan { nodes: vec![low], node_pages: vec![1], ..LoadPlan::default() };
    refused(&mut rig, TreeError::StalePlan(low), |t| load(t, &under_nothing, 1));
    refused(&mut rig, TreeError::NotOnDevice(low), |t| t.plan_backup(low, &mut BackupPlan::default()));
}

/// Frees what an eviction gave back and hands the rig on.
fn rig_free<'a>(rig: &'a mut Rig, out: &mut DeviceEviction) -> impl std::ops::DerefMut<Target = Rig> + 'a {
    rig.free(out);
    out.clear();
    rig
}

#[test]
fn refills_that_do_not_fit() {
    let (mut rig, node) = rig();
    rig.backup(node);
    let tokens = row("EF");
    let k = key(&tokens);
    let host = pages(20..22);
    let none = [PageHash([0; 32]); 2];
    let fill = |t: &mut Tree, k: Key<'_>, pages: &[PageId], hashes: &[PageHash]| {
        let mut out = Vec::new();
        let done = t.insert_host(node, k, pages, hashes, &mut out);
        assert!(out.is_empty());
        done
    };
    refused(&mut rig, TreeError::PageCount { want: 2, got: 1 }, |t| fill(t, k, &host[..1], &none));
    refused(&mut rig, TreeError::HashCount { want: 2, got: 1 }, |t| fill(t, k, &host, &none[..1]));
    refused(&mut rig, TreeError::HashCount { want: 2, got: 0 }, |t| fill(t, k, &host, &[]));
    refused(&mut rig, TreeError::HashMismatch { page: 0 }, |t| fill(t, k, &host, &none));
    let unknown = Key::new(NamespaceId(5), &tokens);
    refused(&mut rig, TreeError::UnknownNamespace(NamespaceId(5)), |t| fill(t, unknown, &host, &none));
}

#[test]
fn store_writes_that_do_not_fit() {
    let (mut rig, node) = rig();
    refused(&mut rig, TreeError::NotBackedUp(node), |t| t.begin_store(OpId(70), node));
    rig.backup(node);
    rig.tree.begin_store(OpId(70), node).unwrap();
    refused(&mut rig, TreeError::OpInFlight(OpId(70)), |t| t.begin_store(OpId(70), node));
    refused(&mut rig, TreeError::AlreadyStoring(node), |t| t.begin_store(OpId(71), node));
    refused(&mut rig, TreeError::PageCount { want: 4, got: 3 }, |t| t.end_store(OpId(70), &[true; 3]));
    rig.tree.end_store(OpId(70), &[true; 4]).unwrap();
    refused(&mut rig, TreeError::UnknownOp(OpId(70)), |t| t.end_store(OpId(70), &[true; 4]));
    refused(&mut rig, TreeError::AlreadyStored(node), |t| t.begin_store(OpId(72), node));
    let mut plain = Rig::new(BackupRule::BackedUpParent, 8, 8);
    let node = plain.ins("A");
    plain.backup(node);
    refused(&mut plain, TreeError::NoHashes(node), |t| t.begin_store(OpId(1), node));
}

#[test]
fn rules_and_configurations_that_do_not_fit() {
    let mut rig = Rig::new(BackupRule::Free, 8, 8);
    rig.ins("AB");
    let top = rig.tree.match_prefix(key(&row("A")), &mut Vec::new()).node;
    let low = rig.tree.match_prefix(key(&row("AB")), &mut Vec::new()).node;
    rig.backup(low);
    refused(&mut rig, TreeError::RuleNotMet(low), |t| t.set_rule(BackupRule::BackedUpParent));
    rig.backup(top);
    rig.tree.set_rule(BackupRule::BackedUpParent).unwrap();
    rig.check();
    for size in [0, 513, u32::MAX] {
        let made = Tree::new(TreeConfig { page_size: size, ..TreeConfig::default() });
        assert_eq!(made.map(|_| ()), Err(TreeConfigError::PageSize(size)));
    }
    assert!(Tree::new(TreeConfig { page_size: 512, ..TreeConfig::default() }).is_ok());
}
