//! sgl#10637, sgl#35270, mllm#656: counters that used the key's length in one place and the value's in another drifted
//! until an idle check killed a healthy server; keys shorter than a page walked the tree with length zero.

use crate::rig::{P, Rig, key, row};
use sapwood::tree::{BackupRule, InsertOpts, InsertOut, Unbacked};

#[test]
fn keys_shorter_than_a_page_own_nothing() {
    let mut rig = Rig::new(BackupRule::BackedUpParent, 16, 0);
    for len in [0, 1, 3, 4, 5, 7, 8u32] {
        let tokens: Vec<u32> = (0..len).collect();
        rig.insert(key(&tokens));
        assert_eq!(rig.tree.peek(key(&tokens)).device_pages, len / P);
    }
    assert_eq!(rig.device.used_pages(), 2);
}

#[test]
fn the_duplicate_page_comes_back_exactly_once() {
    let mut rig = Rig::new(BackupRule::BackedUpParent, 16, 0);
    let tokens = row("AB");
    let (mut one, mut two) = (Vec::new(), Vec::new());
    assert!(rig.device.alloc(2, &mut one) && rig.device.alloc(2, &mut two));
    let mut out = InsertOut::default();
    rig.tree.insert(key(&tokens), &one, 0, InsertOpts::default(), &mut out).unwrap();
    assert_eq!(out.returned, []);
    rig.tree.insert(key(&tokens), &two, 0, InsertOpts::default(), &mut out).unwrap();
    assert_eq!((&out.returned, &out.canonical), (&two, &one));
    rig.device.free(&out.returned).unwrap();
    rig.check();
}

#[test]
fn splits_of_evictable_and_locked_nodes_move_no_counter() {
    let mut rig = Rig::new(BackupRule::BackedUpParent, 16, 0);
    let node = rig.ins("ABCDEF");
    let sizes = |rig: &Rig| {
        let s = rig.tree.stats();
        (s.device_pages_evictable, s.device_pages_protected)
    };
    rig.tree.match_prefix(key(&row("ABCD")), &mut Vec::new());
    assert_eq!((sizes(&rig), rig.tree.stats().splits), ((6, 0), 1));
    let lock = rig.tree.lock(node).unwrap();
    assert_eq!(sizes(&rig), (0, 6));
    rig.tree.match_prefix(key(&row("AB")), &mut Vec::new());
    rig.tree.match_prefix(key(&row("ABCDE")), &mut Vec::new());
    assert_eq!((sizes(&rig), rig.tree.stats().splits), ((0, 6), 3));
    rig.check();
    rig.tree.unlock(lock).unwrap();
    assert_eq!(sizes(&rig), (6, 0));
    assert_eq!(rig.evict(99, Unbacked::Delete).deleted_pages, 6);
}
