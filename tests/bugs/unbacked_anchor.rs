//! sgl#31902, sgl#30106: a prefetch froze its anchor when it was issued; when the data came, the anchor was a device node
//! without a host copy, and a backed-up child under it later broke eviction. The refill must be dropped whole, unless the
//! anchor got its copy in time.

use crate::rig::{Rig, key, row};
use sapwood::tree::{BackupRule, DropReason, Unbacked};

#[test]
fn nothing_is_attached_and_everything_comes_back() {
    let mut rig = Rig::new(BackupRule::BackedUpParent, 8, 8);
    let anchor = rig.ins("AB");
    let done = rig.refill(anchor, 2, key(&row("ABCD")));
    assert_eq!((done.dropped, done.dropped_pages), (Some(DropReason::AnchorNotBackedUp), 2));
    assert_eq!((rig.host.used_pages(), rig.tree.stats().nodes), (0, 1));
    assert_eq!(rig.tree.stats().refill_pages_dropped, 2);
    assert_eq!(rig.evict(2, Unbacked::Delete).deleted_pages, 2);
    assert_eq!(rig.tree.stats().nodes, 0);
}

#[test]
fn a_device_child_below_the_anchor_is_not_stamped_either() {
    let mut rig = Rig::new(BackupRule::BackedUpParent, 8, 8);
    let anchor = rig.ins("AB");
    let deep = rig.ins("ABCD");
    // The two may have become one node; then the anchor is gone, which is a drop as well.
    let done = rig.refill(anchor, 2, key(&row("ABCD")));
    assert_eq!((done.refilled_pages, done.attached_pages, done.dropped_pages), (0, 0, 2));
    assert_eq!(rig.tree.is_backed_up(deep), Ok(false));
    assert_eq!(rig.evict(4, Unbacked::Delete).deleted_pages, 4);
}

#[test]
fn write_back_keeps_it() {
    let mut rig = Rig::new(BackupRule::Free, 8, 8);
    let anchor = rig.ins("AB");
    assert_eq!(rig.refill(anchor, 2, key(&row("ABCD"))).attached_pages, 2);
    assert_eq!((rig.hit("ABCD").device_pages, rig.hit("ABCD").host_pages), (2, 2));
}

#[test]
fn a_backup_between_issue_and_arrival_keeps_it() {
    let mut rig = Rig::new(BackupRule::BackedUpParent, 8, 8);
    let anchor = rig.ins("AB");
    let op = rig.begin_backup(anchor);
    let done = rig.refill(anchor, 2, key(&row("ABCD")));
    assert_eq!(done.dropped, Some(DropReason::BackupInFlight), "a copy in flight does not count yet");
    rig.end_backup(op, true);
    assert_eq!(rig.refill(anchor, 2, key(&row("ABCD"))).attached_pages, 2);
}

#[test]
fn a_split_anchor_is_still_its_deep_end_and_an_evicted_one_is_gone() {
    let mut rig = Rig::new(BackupRule::BackedUpParent, 8, 8);
    let anchor = rig.ins("AB");
    rig.backup(anchor);
    rig.tree.match_prefix(key(&row("A")), &mut Vec::new());
    assert_eq!(rig.tree.node_pages(anchor), Ok(1));
    assert_eq!(rig.refill(anchor, 2, key(&row("ABC"))).attached_pages, 1);
    rig.evict(2, Unbacked::Delete);
    assert_eq!(rig.evict_host(8), 3);
    let done = rig.refill(anchor, 2, key(&row("ABCD")));
    assert_eq!((done.dropped, done.dropped_pages), (Some(DropReason::AnchorGone), 2));
}
