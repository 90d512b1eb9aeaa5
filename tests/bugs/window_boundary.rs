//! sgl#25065: an insert that straddled the window's border was split in two; the child's backup was skipped because its new
//! parent had none, and eviction then deleted the child. Whatever is due is backed up with its ancestors, windows included.

use crate::rig::{P, Rig, key, row};
use sapwood::base::{PageId, Tier};
use sapwood::tree::*;

fn windowed() -> Rig {
    let components = Components { window_pages: Some(2), state: true };
    Rig::with(TreeConfig { page_size: P, components, ..TreeConfig::default() }, 16, 16)
}

/// Inserts with a window from page `from` on and a state at the end; the pages are numbered from `first`.
fn insert(rig: &mut Rig, text: &str, from: u32, first: u32) -> Inserted {
    let tokens = row(text);
    let mut pages = Vec::new();
    let (found, lock, pin) = rig.tree.match_and_lock(key(&tokens), &mut pages);
    assert!(rig.device.alloc(key(&tokens).pages(P) - found.device_pages, &mut pages));
    let window: Vec<PageId> = (from..text.len() as u32).map(|i| PageId(first + i)).collect();
    let given = InsertComponents { window_from: from, window: &window, state: Some(PageId(first + 90)) };
    let opts = InsertOpts { priority: 0, count_hits_from: Some(0), names: None };
    let mut out = InsertOut::default();
    let owned = found.device_pages;
    let done = rig.tree.insert_with(key(&tokens), &pages, owned, given, opts, &mut out).unwrap();
    rig.device.free(&out.returned).unwrap();
    rig.tree.unlock(lock).unwrap();
    pin.into_iter().for_each(|pin| rig.tree.unpin_host(pin).unwrap());
    rig.check();
    done
}

#[test]
fn both_sides_of_the_border_reach_the_host() {
    let mut rig = windowed();
    let done = insert(&mut rig, "ABCDEF", 4, 100);
    // A prefix without window or state cannot be used, and says why.
    let cut = rig.hit("ABCX");
    assert_eq!((cut.device_pages, cut.full_pages, cut.cut_by), (0, 3, Some(Component::Window)));
    rig.tree.match_prefix(key(&row("ABCD")), &mut Vec::new());
    let due = done.due.unwrap();
    let mut plan = BackupPlan::default();
    rig.tree.plan_backup(due, &mut plan).unwrap();
    assert_eq!((plan.device_pages.len(), plan.copies.len()), (6, 3));
    let mut host = Vec::new();
    assert!(rig.host.alloc(6, &mut host));
    let op = rig.op();
    let given = vec![PageId(1), PageId(2), PageId(3)];
    rig.tree.begin_backup_with(op, &plan, host, given).unwrap();
    rig.end_backup(op, true);
    assert_eq!(rig.evict(6, Unbacked::Delete).demoted_pages, 6);
    let mut freed = ComponentPages::default();
    rig.tree.drain_freed(&mut freed);
    assert_eq!((freed.device[0].len(), freed.device[1].len(), freed.host), (2, 1, Default::default()));
    let found = rig.hit("ABCDEF");
    assert_eq!((found.device_pages, found.host_pages), (0, 6));
    // The load brings the window and the state back with the rest.
    let mut load = LoadPlan::default();
    rig.tree.plan_load(found.node, &mut load).unwrap();
    assert_eq!((load.host_pages.len(), load.copies.len()), (6, 3));
    let mut device = Vec::new();
    assert!(rig.device.alloc(6, &mut device));
    let op = rig.op();
    rig.tree.begin_load_with(op, &load, device, vec![PageId(7), PageId(8), PageId(9)]).unwrap();
    rig.tree.end_load(op, true, &mut Vec::new()).unwrap();
    rig.check();
    assert_eq!(rig.hit("ABCDEF").device_pages, 6);
    let (mut window, mut state) = (Vec::new(), Vec::new());
    rig.tree.component_device_pages(found.node, Component::Window, &mut window).unwrap();
    rig.tree.component_device_pages(found.node, Component::State, &mut state).unwrap();
    assert_eq!((window, state), (vec![PageId(7), PageId(8)], vec![PageId(9)]));
}

#[test]
fn an_insert_repairs_tombstones_and_a_held_window_stays() {
    let mut rig = windowed();
    insert(&mut rig, "ABCD", 2, 100);
    let (found, mut lock, _) = rig.tree.match_and_lock(key(&row("ABCD")), &mut Vec::new());
    assert_eq!(found.device_pages, 4);
    assert_eq!(rig.tree.evict_component(Component::Window, Tier::Device, 9), 0);
    rig.tree.release_component(&mut lock, Component::Window).unwrap();
    rig.tree.release_component(&mut lock, Component::Window).unwrap();
    assert_eq!(rig.tree.evict_component(Component::Window, Tier::Device, 1), 1);
    assert_eq!(rig.tree.evict_component(Component::State, Tier::Device, 1), 0, "the state is still held");
    rig.tree.unlock(lock).unwrap();
    rig.check();
    assert_eq!((rig.hit("ABCD").device_pages, rig.hit("ABCD").cut_by), (0, Some(Component::Window)));
    // Computed again: the hole is filled, the rest comes back.
    insert(&mut rig, "ABCD", 2, 200);
    let mut freed = ComponentPages::default();
    rig.tree.drain_freed(&mut freed);
    assert_eq!(freed.device, [vec![PageId(102), PageId(203)], vec![PageId(290)]]);
    assert_eq!(rig.hit("ABCD").device_pages, 4);
}

#[test]
fn states_on_a_path_are_capped_from_the_shallow_end() {
    let components = Components { window_pages: None, state: true };
    let mut rig = Rig::with(TreeConfig { page_size: P, components, ..TreeConfig::default() }, 16, 16);
    let mut last = None;
    for (n, text) in ["AB", "ABCD", "ABCDEF", "ABCDEFGH"].into_iter().enumerate() {
        let tokens = row(text);
        let mut pages = Vec::new();
        let (found, lock, _) = rig.tree.match_and_lock(key(&tokens), &mut pages);
        assert!(rig.device.alloc(2, &mut pages));
        let state = Some(PageId(n as u32));
        let given = InsertComponents { state, ..InsertComponents::default() };
        let mut out = InsertOut::default();
        let opts = InsertOpts::default();
        let done =
            rig.tree.insert_with(key(&tokens), &pages, found.device_pages, given, opts, &mut out).unwrap();
        rig.tree.unlock(lock).unwrap();
        last = Some(done.node);
    }
    assert_eq!(rig.tree.cap_states(last.unwrap(), 2), Ok(2));
    let mut freed = ComponentPages::default();
    rig.tree.drain_freed(&mut freed);
    assert_eq!(freed.device[1], [PageId(0), PageId(1)]);
    let hits = ["AB", "ABCD", "ABCDEF", "ABCDEFGH"].map(|text| rig.hit(text).device_pages);
    assert_eq!(hits, [0, 0, 6, 8]);
    rig.check();
}
