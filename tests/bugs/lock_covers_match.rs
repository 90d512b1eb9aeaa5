//! bd#508: a partial match did not split, so the caller locked more than it had matched; a later insert split that node and
//! left leaves locked for ever. A lock must cover exactly what the match reported, before and after any split.

use crate::rig::{Rig, key, row};
use sapwood::tree::{BackupRule, Unbacked};

#[test]
fn the_lock_is_as_long_as_the_match() {
    let mut rig = Rig::new(BackupRule::BackedUpParent, 32, 0);
    rig.ins("ABCDEF");
    let (found, lock, pin) = rig.tree.match_and_lock(key(&row("ABCX")), &mut Vec::new());
    assert_eq!((found.device_pages, found.spare_pages, pin), (3, 0, None));
    assert_eq!(rig.tree.stats().device_pages_protected, 3);
    rig.ins("ABCYZ");
    rig.ins("AQ");
    assert_eq!(rig.tree.stats().device_pages_protected, 3);
    rig.tree.unlock(lock).unwrap();
    let all = rig.device.used_pages();
    assert_eq!(rig.evict(u32::MAX, Unbacked::Delete).deleted_pages, all);
    assert_eq!((rig.device.used_pages(), rig.tree.stats().nodes), (0, 0));
}

#[test]
fn a_read_only_look_up_says_how_much_more_its_node_holds() {
    let mut rig = Rig::new(BackupRule::BackedUpParent, 32, 0);
    let node = rig.ins("ABCDEF");
    let found = rig.hit("ABX");
    assert_eq!((found.node, found.device_pages, found.spare_pages), (node, 2, 4));
    assert_eq!(rig.tree.stats().splits, 0);
}
