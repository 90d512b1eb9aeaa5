//! sgl#38480, sgl#38138: a node was split while a store was reading its host pages; the new prefix did not inherit the
//! host lock, its pages were reclaimed and reused, and the store kept the wrong bytes under the right name.

use crate::rig::{P, Rig, key, row};
use sapwood::tree::{BackupRule, TreeConfig, Unbacked};

#[test]
fn both_halves_stay_pinned_until_the_write_ends() {
    for rule in [BackupRule::BackedUpParent, BackupRule::Free] {
        let config = TreeConfig { page_size: P, rule, hashing: true, ..TreeConfig::default() };
        let mut rig = Rig::with(config, 8, 8);
        let node = rig.ins("ABCD");
        rig.backup(node);
        let op = rig.op();
        let plan = rig.tree.begin_store(op, node).unwrap();
        assert_eq!(plan.host_pages.len(), 4);
        let top = rig.tree.match_prefix(key(&row("AB")), &mut Vec::new()).node;
        assert_ne!(top, node);
        assert_eq!(rig.tree.reclaim_mirrors(4, 0, &mut Vec::new()).freed_pages, 0);
        rig.evict(4, Unbacked::Delete);
        assert_eq!(rig.evict_host(4), 0);
        rig.check();
        // Per-item outcomes land on the right halves.
        assert_eq!(rig.tree.end_store(op, &[true, true, true, false]), Ok(3));
        assert_eq!((rig.tree.is_stored(top), rig.tree.is_stored(node)), (Ok(true), Ok(false)));
        rig.check();
        rig.evict(4, Unbacked::Delete);
        assert_eq!(rig.evict_host(4), 4);
    }
}
