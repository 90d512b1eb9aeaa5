//! sgl#27108: write-back eviction ignored that the backup had written nothing, because the host was full of locked pages,
//! and demoted the node as if it had a copy. Without a copy the node must go outright.

use crate::rig::{Rig, key, row};
use sapwood::tree::{BackupRule, DeviceEviction, TreeError, Unbacked};

#[test]
fn a_victim_without_a_host_copy_cannot_be_demoted() {
    let mut rig = Rig::new(BackupRule::Free, 4, 2);
    let ab = rig.ins("AB");
    rig.backup(ab);
    let pin = rig.tree.pin_host(ab).unwrap();
    rig.ins("CD");
    let out = rig.evict(2, Unbacked::Report);
    assert_eq!((out.needs_backup.len(), out.needs_backup_pages), (1, 2));
    let cd = out.needs_backup[0];
    assert_eq!((rig.host.free_pages(), rig.evict_host(2)), (0, 0), "nothing to be had on the host");
    let mut out = DeviceEviction::default();
    assert_eq!(rig.tree.demote(cd, &mut out), Err(TreeError::NotBackedUp(cd)));
    rig.tree.delete_leaf(cd, &mut out).unwrap();
    rig.free(&out);
    rig.check();
    assert_eq!((rig.hit("CD").depth_pages(), rig.tree.peek(key(&row("AB"))).device_pages), (0, 2));
    rig.tree.unpin_host(pin).unwrap();
    rig.check();
}
