//! sgl#27631, sgl#31427: restoring a host prefix allocated device pages, which evicted, which freed the very host pages
//! that were being restored; and the anchor was unlocked when the copy was submitted, not when it was done.

use crate::rig::{Rig, key, row};
use sapwood::tree::{BackupRule, InsertOpts, InsertOut, LoadOutcome, LoadPlan, TreeError, Unbacked};

#[test]
fn no_host_page_of_a_load_goes_before_its_copy_is_done() {
    for rule in [BackupRule::BackedUpParent, BackupRule::Free] {
        let mut rig = Rig::new(rule, 4, 4);
        let node = rig.ins("ABCD");
        rig.backup(node);
        assert_eq!(rig.evict(4, Unbacked::Delete).demoted_pages, 4);
        let (found, lock, pin) = rig.tree.match_and_lock(key(&row("ABCD")), &mut Vec::new());
        assert_eq!(found.host_pages, 4);
        // What a re-entrant eviction would do between the look-up and the copy.
        assert_eq!(rig.evict_host(4), 0);
        let mut plan = LoadPlan::default();
        rig.tree.plan_load(found.node, &mut plan).unwrap();
        let mut pages = Vec::new();
        assert!(rig.device.alloc(4, &mut pages));
        let op = rig.op();
        rig.tree.begin_load(op, &plan, pages).unwrap();
        rig.tree.unlock(lock).unwrap();
        rig.tree.unpin_host(pin.unwrap()).unwrap();
        // The look-up is over, the copy is not.
        assert_eq!((rig.evict_host(4), rig.evict(4, Unbacked::Delete).freed_device.len()), (0, 0));
        assert_eq!(rig.tree.reclaim_mirrors(4, 0, &mut Vec::new()).freed_pages, 0);
        let mut out = Vec::new();
        rig.tree.end_load(op, true, &mut out).unwrap();
        assert!(matches!(&out[0].outcome, LoadOutcome::Published { .. }));
        rig.check();
        assert_eq!(rig.evict(4, Unbacked::Delete).demoted_pages, 4);
        assert_eq!(rig.evict_host(4), 4);
    }
}

#[test]
fn a_failed_load_leaves_the_host_copy_and_gives_every_page_back() {
    let mut rig = Rig::new(BackupRule::BackedUpParent, 8, 8);
    let node = rig.ins("ABCD");
    rig.backup(node);
    rig.evict(4, Unbacked::Delete);
    let mut plan = LoadPlan::default();
    rig.tree.plan_load(node, &mut plan).unwrap();
    let mut pages = Vec::new();
    assert!(rig.device.alloc(4, &mut pages));
    let op = rig.op();
    rig.tree.begin_load(op, &plan, pages).unwrap();
    // A second look-up joins the load instead of starting its own.
    let mut again = LoadPlan::default();
    rig.tree.plan_load(node, &mut again).unwrap();
    assert_eq!((again.nodes.len(), &again.joins[..]), (0, &[op][..]));
    let mut out = Vec::new();
    rig.tree.end_load(op, false, &mut out).unwrap();
    let LoadOutcome::Failed { returned } = &out[0].outcome else { panic!("failed") };
    rig.device.free(returned).unwrap();
    rig.check();
    assert_eq!((rig.device.used_pages(), rig.hit("ABCD").host_pages), (0, 4));
}

/// Found by ten million calls beside the model: the upper of two loads had failed while the lower one still flew, and an
/// insert took the place of pages that a copy was writing.
#[test]
fn an_insert_waits_for_a_load_below_one_that_failed() {
    let mut rig = Rig::new(BackupRule::BackedUpParent, 8, 8);
    let node = rig.ins("AB");
    rig.backup(node);
    rig.evict(2, Unbacked::Delete);
    let (mut ops, mut plan) = (Vec::new(), LoadPlan::default());
    for text in ["A", "AB"] {
        let end = rig.tree.node_at(key(&row(text))).unwrap();
        rig.tree.plan_load(end, &mut plan).unwrap();
        let (mut pages, op) = (Vec::new(), rig.op());
        assert!(rig.device.alloc(1, &mut pages));
        rig.tree.begin_load(op, &plan, pages).unwrap();
        ops.push(op);
    }
    let end = |rig: &mut Rig, op| {
        let mut out = Vec::new();
        rig.tree.end_load(op, false, &mut out).unwrap();
        for end in out {
            let LoadOutcome::Failed { returned } = end.outcome else { panic!("failed") };
            rig.device.free(&returned).unwrap();
        }
        rig.check();
    };
    end(&mut rig, ops[0]);
    let mut pages = Vec::new();
    assert!(rig.device.alloc(2, &mut pages));
    let mut out = InsertOut::default();
    let got = rig.tree.insert(key(&row("AB")), &pages, 0, InsertOpts::default(), &mut out);
    assert_eq!(got, Err(TreeError::LoadInFlight(node)));
    rig.device.free(&pages).unwrap();
    end(&mut rig, ops[1]);
    rig.ins("AB");
    assert_eq!(rig.hit("AB").device_pages, 2);
}
