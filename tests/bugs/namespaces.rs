//! sgl#26747, sgl#38577: the store's keys ignored the namespace, so tenants with equal prompts shared pages. sgl#24638,
//! sgl#25351: a free-text key that spelled an adapter's name reached KV computed by that adapter.

use crate::rig::{Rig, row};
use sapwood::base::NamespaceId;
use sapwood::key::{Key, Namespace};
use sapwood::tree::{BackupRule, TreeConfig, TreeError};

fn all() -> Vec<Namespace> {
    let some = |text: &str| Some(text.to_owned());
    let none = Namespace::default();
    vec![
        none.clone(),
        Namespace { salt: some("s1"), ..none.clone() },
        Namespace { salt: some("s2"), ..none.clone() },
        Namespace { adapter: some("a"), ..none.clone() },
        Namespace { adapter: some("a"), salt: some("s1"), ..none.clone() },
        Namespace { user_key: some("a"), ..none.clone() },
        Namespace { adapter: some(""), ..none.clone() },
        Namespace { salt: some(""), ..none.clone() },
        Namespace { user_key: some(""), ..none },
    ]
}

#[test]
fn hits_and_names_lie_on_the_diagonal_only() {
    let config = TreeConfig { page_size: crate::rig::P, hashing: true, ..TreeConfig::default() };
    let mut rig = Rig::with(TreeConfig { rule: BackupRule::BackedUpParent, ..config }, 64, 0);
    let tokens = row("AB");
    let ids: Vec<NamespaceId> = all().iter().map(|ns| rig.tree.intern(ns).unwrap()).collect();
    let mut names = std::collections::BTreeSet::new();
    for (i, &ns) in ids.iter().enumerate() {
        for (j, &other) in ids.iter().enumerate() {
            let hit = rig.tree.peek(Key::new(other, &tokens)).device_pages;
            assert_eq!(hit, if j < i { 2 } else { 0 }, "{i} {j}");
        }
        let node = rig.insert(Key::new(ns, &tokens));
        rig.tree.hashes(node).unwrap().iter().for_each(|hash| assert!(names.insert(*hash)));
    }
    assert_eq!(names.len(), 2 * ids.len());
}

#[test]
fn a_refill_cannot_cross_over() {
    let mut rig = Rig::new(BackupRule::BackedUpParent, 8, 8);
    let other = rig.tree.intern(&all()[1]).unwrap();
    let node = rig.ins("A");
    rig.backup(node);
    let tokens = row("B");
    let refused =
        rig.tree.insert_host(node, Key::new(other, &tokens), &crate::rig::pages(7..8), &[], &mut Vec::new());
    assert_eq!(refused, Err(TreeError::NamespaceMismatch { key: other, node: NamespaceId::DEFAULT }));
    rig.check();
}
