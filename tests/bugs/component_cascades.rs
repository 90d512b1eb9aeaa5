//! The rules of SGLang 0.5.23 for what goes with what: a window that goes takes the state at its page with it, since no
//! request could go on there, and a state goes alone; a host copy that is given up because the device has the pages too is
//! that of full attention only, while windows and states on the host stay in orders of their own.

use crate::rig::{P, Rig, key, row};
use sapwood::base::{PageId, Tier};
use sapwood::tree::*;

fn rig_of(rule: BackupRule) -> Rig {
    let components = Components { window_pages: Some(2), state: true };
    Rig::with(TreeConfig { page_size: P, components, rule, ..TreeConfig::default() }, 16, 16)
}

/// `ABCD` with windows 102 and 103 and state 190.
fn four_pages(rig: &mut Rig) -> Inserted {
    let (tokens, mut pages) = (row("ABCD"), Vec::new());
    assert!(rig.device.alloc(4, &mut pages));
    let window = [PageId(102), PageId(103)];
    let given = InsertComponents { window_from: 2, window: &window, state: Some(PageId(190)) };
    let opts = InsertOpts { count_hits_from: Some(0), ..InsertOpts::default() };
    rig.tree.insert_with(key(&tokens), &pages, 0, given, opts, &mut InsertOut::default()).unwrap()
}

fn freed(rig: &mut Rig) -> ComponentPages {
    let mut out = ComponentPages::default();
    rig.tree.drain_freed(&mut out);
    out
}

fn backed_up(rig: &mut Rig, node: sapwood::base::NodeId) {
    let mut plan = BackupPlan::default();
    rig.tree.plan_backup(node, &mut plan).unwrap();
    assert_eq!((plan.device_pages.len(), plan.copies.len()), (4, 3));
    let (mut host, op) = (Vec::new(), rig.op());
    assert!(rig.host.alloc(4, &mut host));
    rig.tree.begin_backup_with(op, &plan, host, vec![PageId(1), PageId(2), PageId(3)]).unwrap();
    rig.end_backup(op, true);
}

#[test]
fn a_window_takes_the_state_at_its_page_with_it_and_a_state_goes_alone() {
    let mut rig = rig_of(BackupRule::BackedUpParent);
    let node = four_pages(&mut rig).node;
    backed_up(&mut rig, node);
    // The shallow page of the window has no state.
    assert_eq!(rig.tree.evict_component(Component::Window, Tier::Device, 1), 1);
    assert_eq!(freed(&mut rig).device, [vec![PageId(102)], vec![]]);
    assert_eq!(rig.tree.evict_component(Component::Window, Tier::Device, 1), 1);
    assert_eq!(freed(&mut rig).device, [vec![PageId(103)], vec![PageId(190)]]);
    rig.check();
    // On the host nothing went, and the state goes without the window.
    assert_eq!(rig.tree.evict_component(Component::State, Tier::Host, 1), 1);
    assert_eq!(freed(&mut rig).host, [vec![], vec![PageId(3)]]);
    assert_eq!(rig.tree.component_pages(Component::Window, Tier::Host), 2);
    rig.check();
    // Somebody holds the state and has let go of the window: it stays.
    let mut rig = rig_of(BackupRule::BackedUpParent);
    four_pages(&mut rig);
    let (_, mut lock, _) = rig.tree.match_and_lock(key(&row("ABCD")), &mut Vec::new());
    rig.tree.release_component(&mut lock, Component::Window).unwrap();
    assert_eq!(rig.tree.evict_component(Component::Window, Tier::Device, 2), 2);
    assert_eq!(freed(&mut rig).device[1], []);
    rig.tree.unlock(lock).unwrap();
    rig.check();
}

#[test]
fn a_reclaimed_mirror_leaves_windows_and_states_on_the_host() {
    for rule in [BackupRule::BackedUpParent, BackupRule::Free] {
        let mut rig = rig_of(rule);
        let node = four_pages(&mut rig).node;
        backed_up(&mut rig, node);
        let mut pages = Vec::new();
        assert_eq!(rig.tree.reclaim_mirrors(4, 0, &mut pages).freed_pages, 4);
        rig.host.free(&pages).unwrap();
        assert_eq!(freed(&mut rig), ComponentPages::default());
        rig.check();
        // What the device loses of them comes back from the host, though full attention has no copy there.
        assert_eq!(rig.tree.evict_component(Component::Window, Tier::Device, 2), 2);
        freed(&mut rig);
        let found = rig.hit("ABCD");
        assert_eq!((found.device_pages, found.host_pages, found.cut_by), (0, 4, None));
        let (_, lock, pin) = rig.tree.match_and_lock(key(&row("ABCD")), &mut Vec::new());
        let mut load = LoadPlan::default();
        rig.tree.plan_load(node, &mut load).unwrap();
        assert_eq!((load.nodes.len(), load.copies.len()), (0, 3));
        let op = rig.op();
        let into = vec![PageId(202), PageId(203), PageId(290)];
        rig.tree.begin_load_with(op, &load, vec![], into).unwrap();
        rig.tree.unlock(lock).unwrap();
        pin.into_iter().for_each(|pin| rig.tree.unpin_host(pin).unwrap());
        rig.tree.end_load(op, true, &mut Vec::new()).unwrap();
        rig.check();
        assert_eq!(rig.hit("ABCD").device_pages, 4);
        // Backed up once more, only full attention is written; and with the node all goes.
        let mut plan = BackupPlan::default();
        rig.tree.plan_backup(node, &mut plan).unwrap();
        assert_eq!((plan.device_pages.len(), plan.copies.len()), (4, 0));
        assert_eq!(rig.evict(4, Unbacked::Delete).deleted_pages, 4);
        let gone = freed(&mut rig);
        assert_eq!((gone.device[0].len(), gone.device[1].len()), (2, 1));
        assert_eq!(gone.host, [vec![PageId(1), PageId(2)], vec![PageId(3)]]);
        rig.check();
    }
}

#[test]
fn a_detached_host_keeps_nothing() {
    let mut rig = rig_of(BackupRule::BackedUpParent);
    let node = four_pages(&mut rig).node;
    backed_up(&mut rig, node);
    let mut pages = Vec::new();
    rig.tree.reclaim_mirrors(2, 0, &mut pages);
    rig.tree.detach_host(&mut pages).unwrap();
    assert_eq!(pages.len(), 4);
    assert_eq!(freed(&mut rig).host, [vec![PageId(1), PageId(2)], vec![PageId(3)]]);
    rig.host.free(&pages).unwrap();
    rig.check();
}
