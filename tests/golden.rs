//! Bytes that other programs must agree with: page digests, namespace seeds, event block ids. The values were taken from
//! the field's reference (page size 4).
#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use sapwood::base::NamespaceId;
use sapwood::key::*;

fn hex(bytes: &[u8; 32]) -> String {
    PageHash(*bytes).to_string()
}

fn ns(adapter: Option<&str>, salt: Option<&str>) -> Namespace {
    Namespace { adapter: adapter.map(str::to_owned), salt: salt.map(str::to_owned), user_key: None }
}

fn seed(adapter: Option<&str>, salt: Option<&str>) -> Option<[u8; 32]> {
    let mut table = Namespaces::new();
    let id = table.intern(&ns(adapter, salt)).unwrap();
    table.seed(id)
}

fn chain(key: Key<'_>, prior: Option<[u8; 32]>) -> Vec<PageHash> {
    let mut out = Vec::new();
    hash_pages(key, 4, prior, &mut out);
    out
}

const FIVE: [u32; 5] = [0, 1, 2, 3, 4];

#[test]
fn page_digests() {
    let plain = Key::new(NamespaceId::DEFAULT, &FIVE);
    let pairs = Key::bigram(NamespaceId::DEFAULT, &FIVE);
    for (key, adapter, salt, want) in [
        (plain, None, None, "baed642339816affb3fe8719792d0e4ce82f12db72b7373d244eaa65445800fe"),
        (pairs, None, None, "920cac7cd1509ca7892cd8c228d89d76948b24a6f5d74b3f1ee5104630ac803f"),
        (plain, Some("lora"), None, "4d22bd757fa916c8848fbb4419a4a5c96cc830eaf0139d3f028bad2f78b66088"),
        (plain, None, Some("salt"), "92a794f97a4944d9f9f549fa425766d8351c1004589f4e0ab78626cc0649aeca"),
    ] {
        assert_eq!(chain(key, seed(adapter, salt))[0].to_string(), want);
    }
}

#[test]
fn namespace_seeds() {
    assert_eq!(seed(None, None), None);
    for (adapter, salt, head, tail) in [
        (Some("lora"), None, "5dc32b0c", "ab742c"),
        (None, Some("salt"), "43601f36", "293f8d6e"),
        (Some("bc"), Some("a"), "1d3e5b5c", "99231400"),
        (Some("c"), Some("ab"), "071e0e90", "16615722"),
    ] {
        let text = hex(&seed(adapter, salt).unwrap());
        assert!(text.starts_with(head) && text.ends_with(tail), "{text}");
    }
}

#[test]
fn event_block_ids() {
    let tokens: Vec<u32> = (0..8).collect();
    let branch: Vec<u32> = (0..4).chain([9; 4]).collect();
    let ids = |key: Key<'_>, ns: &Namespace| -> Vec<i64> {
        chain(key, event_seed(ns)).iter().map(block_id).collect()
    };
    let key = Key::new(NamespaceId::DEFAULT, &tokens);
    let none = ns(None, None);
    assert_eq!(ids(key, &none), [-4_977_211_910_723_114_241, 90_435_953_025_800_507]);
    assert_eq!(ids(Key::new(NamespaceId::DEFAULT, &branch), &none)[1], 7_107_752_202_012_750_893);
    let salted = ids(key, &ns(None, Some("salt")));
    assert_eq!(salted, [5_170_201_306_406_648_467, -8_261_497_029_413_854_613]);
    let dynamo: Vec<i64> = salted.iter().map(|&id| framed_block_id(None, Some("salt"), id)).collect();
    assert_eq!(dynamo, [-3_723_018_304_881_945_303, 1_781_788_779_540_910_673]);
    let lora: Vec<i64> = ids(key, &ns(Some("lora-x"), None))
        .iter()
        .map(|&id| framed_block_id(Some("lora-x"), None, id))
        .collect();
    assert_eq!(lora, [4_434_067_369_403_581_215, -1_219_880_779_688_304_861]);
    let nine: Vec<u32> = (0..9).collect();
    let pairs = ids(Key::bigram(NamespaceId::DEFAULT, &nine), &none);
    assert_eq!(pairs, [-7_922_767_992_363_901_785, 6_119_353_427_122_020_733]);
}
