//! sgl#19570, sgl#24371: EAGLE keys are pairs of neighbouring tokens; the prefetch path hashed plain tokens and never hit,
//! or cut the key one token short. Pairs must hash as pairs, and a refill must carry the boundary token.

use crate::rig::{P, Rig};
use sapwood::base::{NamespaceId, PageId};
use sapwood::key::{Key, KeyView};
use sapwood::tree::{TreeConfig, TreeError};

#[test]
fn a_refill_meets_what_an_insert_made() {
    let config = TreeConfig { page_size: P, view: KeyView::Bigram, hashing: true, ..TreeConfig::default() };
    let mut rig = Rig::with(config, 16, 16);
    let tokens: Vec<u32> = (100..100 + 4 * P + 1).collect();
    let key = Key::bigram(NamespaceId::DEFAULT, &tokens);
    let half = Key::bigram(NamespaceId::DEFAULT, &tokens[..2 * P as usize + 1]);
    let anchor = rig.insert(half);
    rig.backup(anchor);
    let done = rig.refill(anchor, 2, key);
    assert_eq!((done.attached_pages, rig.tree.peek(key).depth_pages()), (2, 4));
    // The same names that an insert computes.
    let refilled = rig.tree.hashes(done.node).unwrap().to_vec();
    let mut other = Rig::with(
        TreeConfig { page_size: P, view: KeyView::Bigram, hashing: true, ..TreeConfig::default() },
        16,
        16,
    );
    let whole = other.insert(key);
    assert_eq!(other.tree.hashes(whole).unwrap()[2..], refilled);
    // A rest that starts one token too late is refused.
    let late = Key::bigram(NamespaceId::DEFAULT, &tokens[2 * P as usize + 1..]);
    let refused = rig.tree.insert_host(anchor, late, &[PageId(9)], &[refilled[0]], &mut Vec::new());
    assert_eq!(refused, Err(TreeError::NotContinuing));
    rig.check();
}
