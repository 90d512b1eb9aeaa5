//! sgl#16946: a first request's backup of a node was in flight when a second one split it; only the suffix was published,
//! and the prefix never had a host copy. The acknowledgement must publish every fragment, parents first.

use crate::rig::{Rig, key, row};
use sapwood::tree::{BackupOutcome, BackupRule};

#[test]
fn the_end_publishes_every_fragment() {
    let mut rig = Rig::new(BackupRule::BackedUpParent, 16, 16);
    let node = rig.ins("ABCDEF");
    let op = rig.begin_backup(node);
    rig.ins("ABX");
    rig.tree.match_prefix(key(&row("ABCD")), &mut Vec::new());
    rig.check();
    let ended = rig.end_backup(op, true);
    let BackupOutcome::Published { nodes } = &ended[0].outcome else { panic!("published") };
    assert_eq!(nodes.iter().map(|&n| rig.tree.depth_pages(n).unwrap()).collect::<Vec<_>>(), [2, 4, 6]);
    assert!(nodes.iter().all(|&n| rig.tree.is_backed_up(n).unwrap()));
    assert_eq!(rig.tree.stats().host_pages, 6);
}

#[test]
fn a_failure_gives_back_every_page_of_every_fragment() {
    let mut rig = Rig::new(BackupRule::BackedUpParent, 16, 16);
    let node = rig.ins("ABCDEF");
    let op = rig.begin_backup(node);
    rig.ins("ABX");
    let ended = rig.end_backup(op, false);
    assert!(matches!(&ended[0].outcome, BackupOutcome::Failed { returned } if returned.len() == 6));
    assert_eq!(rig.host.used_pages(), 0);
    // Nothing is stuck: the same backup can be planned again, and so can eviction.
    assert_eq!(rig.plan(node).device_pages.len(), 6);
}
