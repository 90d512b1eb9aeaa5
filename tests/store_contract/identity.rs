//! Nothing that changes the meaning of bytes may leave the key unchanged (scenarios I1 to I11, sgl#33268,
//! sgl#36376, sgl#26747, sgl#24638), and nothing on the medium may pass for what it is not.

use std::collections::BTreeSet;
use std::slice::from_ref;

use sapwood::backend::identity::{
    ByteOrder, Content, Descriptor, DescriptorError, Dtype, NamespaceDigest, Plane, Shard, StoreKey,
};
use sapwood::backend::store::mem::MemStore;
use sapwood::backend::store::{Call, Item, Outcome, Store};

use crate::kit::{Arena, Rng, bytes_of, descriptor, page};

/// Stores a page under `written`, looks it up under `read`: whatever differs, it must be a plain miss.
fn misses(written: &Descriptor, read: &Descriptor) {
    let store = MemStore::new(1 << 20);
    let a = Arena::new(&store, 8192);
    let ns = NamespaceDigest::DEFAULT;
    a.write(0, &bytes_of(1, 4096));
    let put = Item::one(&written.space(ns).unwrap(), &page(1), a.span(0, 4096));
    assert!(store.put(from_ref(&put), &Call::unbounded())[0].is_ok());
    let get = Item::one(&read.space(ns).unwrap(), &page(1), a.span(4096, 4096));
    assert_eq!(store.query(&[get.key], &Call::unbounded()), [Outcome::Missing]);
    assert_eq!(store.get(&[get], &Call::unbounded()), [Outcome::Missing]);
    assert_eq!(store.get(&[put], &Call::unbounded()), [Outcome::Ok(4096)]);
}

fn changed(change: impl FnOnce(&mut Descriptor)) -> Descriptor {
    let mut d = descriptor();
    change(&mut d);
    assert_ne!(d, descriptor());
    d
}

fn rank(tensor: (u32, u32)) -> Shard {
    Shard::Rank { tensor, pipeline: (0, 1), context: (0, 1) }
}

#[test]
fn i1_another_topology_misses() {
    let tp4 = changed(|d| d.shard = rank((0, 4)));
    let tp2 = changed(|d| d.shard = rank((0, 2)));
    misses(&tp4, &tp2);
    misses(&tp4, &changed(|d| d.shard = rank((1, 4))));
    misses(&tp4, &changed(|d| d.shard = Shard::Rank { tensor: (0, 4), pipeline: (1, 2), context: (0, 1) }));
    misses(&tp4, &changed(|d| d.shard = Shard::Rank { tensor: (0, 4), pipeline: (0, 1), context: (1, 2) }));
    let range = |layers, heads| changed(|d| d.shard = Shard::Range { layers, heads });
    misses(&range((0, 12), (0, 8)), &range((12, 24), (0, 8)));
    misses(&range((0, 24), (0, 4)), &range((0, 24), (4, 8)));
}

#[test]
fn i2_another_byte_order_misses() {
    let orders = [
        ByteOrder::PageLayerKv,
        ByteOrder::LayerFirst,
        ByteOrder::PageFirst,
        ByteOrder::PageFirstDirect,
        ByteOrder::HeadSplit,
    ];
    for &a in &orders {
        for &b in orders.iter().filter(|&&b| b != a) {
            misses(&Descriptor { order: a, ..descriptor() }, &Descriptor { order: b, ..descriptor() });
        }
    }
}

#[test]
fn i3_another_element_type_misses_also_of_one_size() {
    misses(&descriptor(), &changed(|d| d.dtype = Dtype::F16));
    misses(&changed(|d| d.dtype = Dtype::Fp8E4m3), &changed(|d| d.dtype = Dtype::Fp8E5m2));
}

#[test]
fn i4_a_longer_or_shorter_object_is_not_loaded() {
    let store = MemStore::new(1 << 20);
    let a = Arena::new(&store, 8192);
    let item = Item::one(&descriptor().space(NamespaceDigest::DEFAULT).unwrap(), &page(1), a.span(0, 4096));
    for change in [
        (|b| b.extend_from_slice(&[0; 64])) as fn(&mut Vec<u8>),
        |b| b.truncate(b.len() - 1),
        |b| b.truncate(128),
        |b| b.truncate(127),
        Vec::clear,
    ] {
        assert!(store.put(from_ref(&item), &Call::unbounded())[0].is_ok());
        assert!(store.tamper(&item.key, change));
        let before = store.stats().corrupt_total;
        assert_eq!(store.get(from_ref(&item), &Call::unbounded()), [Outcome::Corrupt]);
        assert_eq!(store.stats().corrupt_total, before + 1);
        assert_eq!(store.get(from_ref(&item), &Call::unbounded()), [Outcome::Missing], "put aside");
    }
}

#[test]
fn i5_a_packed_draft_toggled_misses() {
    let packed = changed(|d| {
        d.layers = 25;
        d.draft_layers = 1;
    });
    misses(&descriptor(), &packed);
    misses(&packed, &Descriptor { draft_layers: 0, ..packed.clone() });
}

#[test]
fn i6_another_page_in_the_place_of_this_one_is_found_out() {
    let store = MemStore::new(1 << 20);
    let a = Arena::new(&store, 8192);
    let space = descriptor().space(NamespaceDigest::DEFAULT).unwrap();
    let [one, two] = [1, 2].map(|n| Item::one(&space, &page(n), a.span(0, 4096)));
    for item in [&one, &two] {
        assert!(store.put(from_ref(item), &Call::unbounded())[0].is_ok());
    }
    let sealed = store.sealed(&two.key).unwrap();
    assert!(store.tamper(&one.key, |b| *b = sealed));
    assert_eq!(store.get(&[one], &Call::unbounded()), [Outcome::Corrupt]);
    assert_eq!(store.get(&[two], &Call::unbounded()), [Outcome::Ok(4096)]);
}

/// I7 torn by a concurrent rewrite, I8 zero-filled by a crash, I9 a flipped bit: at every sector and bit.
#[test]
fn i7_i8_i9_torn_zeroed_and_flipped_bytes_are_found_out() {
    let store = MemStore::new(1 << 20);
    let a = Arena::new(&store, 8192);
    let space = descriptor().space(NamespaceDigest::DEFAULT).unwrap();
    let item = Item::one(&space, &page(1), a.span(0, 4096));
    a.write(0, &bytes_of(1, 4096));
    let try_with = |what: &str, change: &dyn Fn(&mut Vec<u8>)| {
        a.write(0, &bytes_of(1, 4096));
        assert!(store.put(from_ref(&item), &Call::unbounded())[0].is_ok());
        assert!(store.tamper(&item.key, change));
        assert_eq!(store.get(from_ref(&item), &Call::unbounded()), [Outcome::Corrupt], "{what}");
    };
    let other = bytes_of(2, 4096 + 128);
    for sector in 0..8 {
        let range = sector * 512..(sector + 1) * 512;
        try_with("torn", &|b| b[range.clone()].copy_from_slice(&other[range.clone()]));
        try_with("zeroed", &|b| b[range.clone()].fill(0));
    }
    try_with("all zero", &|b| b.fill(0));
    let mut rng = Rng::seeded(9);
    for _ in 0..200 {
        let bit = rng.below((4096 + 128) * 8);
        // The version field with a repaired sum is a matter of its own; here nothing is repaired.
        try_with("flipped", &|b| b[bit / 8] ^= 1 << (bit % 8));
    }
}

/// An object that a later release wrote is whole and not for us: a counted miss, and it stays for whoever reads it.
#[test]
fn an_object_of_a_future_version_is_a_counted_miss_and_stays() {
    let store = MemStore::new(1 << 20);
    let a = Arena::new(&store, 8192);
    let item = Item::one(&descriptor().space(NamespaceDigest::DEFAULT).unwrap(), &page(1), a.span(0, 4096));
    assert!(store.put(from_ref(&item), &Call::unbounded())[0].is_ok());
    let now = store.sealed(&item.key).unwrap();
    let change = |b: &mut Vec<u8>| {
        b[8] = 2;
        b[12..16].fill(0);
        let crc = !b[..128].iter().fold(!0u32, |crc, &byte| {
            (0..8)
                .fold(crc ^ u32::from(byte), |c, _| if c & 1 == 1 { (c >> 1) ^ 0x82F6_3B78 } else { c >> 1 })
        });
        b[12..16].copy_from_slice(&crc.to_le_bytes());
    };
    assert!(store.tamper(&item.key, change));
    for n in 1..=2 {
        let outcome = store.get(from_ref(&item), &Call::unbounded());
        assert_eq!(outcome, [Outcome::VersionMismatch { found: 2 }]);
        assert!(outcome[0].is_miss());
        assert_eq!((store.stats().version_mismatch_total, store.stats().corrupt_total), (n, 0));
    }
    assert!(store.tamper(&item.key, |b| *b = now));
    assert_eq!(store.get(&[item], &Call::unbounded()), [Outcome::Ok(4096)]);
}

#[test]
fn i10_new_weights_or_another_revision_are_a_logical_clear() {
    misses(&descriptor(), &changed(|d| d.weights_epoch = 1));
    misses(&descriptor(), &changed(|d| d.revision = "abc124".into()));
    misses(&descriptor(), &changed(|d| d.model = "test/model-1c".into()));
}

#[test]
fn i11_planes_and_their_own_shards_never_meet() {
    let planes = [
        Plane::Target,
        Plane::Window,
        Plane::State,
        Plane::Draft,
        Plane::DraftWindow,
        Plane::Index,
        Plane::DraftIndex,
        Plane::Scale,
        Plane::Other(0),
        Plane::Other(1),
    ];
    for (i, &a) in planes.iter().enumerate() {
        for &b in &planes[i + 1..] {
            misses(&Descriptor { plane: a, ..descriptor() }, &Descriptor { plane: b, ..descriptor() });
        }
    }
    // An MHA draft is cut by ranks although the MLA target it follows is not.
    let draft = |r| changed(|d| (d.plane, d.shard) = (Plane::Draft, rank(r)));
    misses(&draft((0, 2)), &draft((1, 2)));
}

/// Every field, every variant: the digests are all distinct, and the encodings read back.
#[test]
fn every_field_is_in_the_digest() {
    let contents = [
        Content::Mha { heads: 4, key_dim: 128, value_dim: 128 },
        Content::Mha { heads: 8, key_dim: 64, value_dim: 128 },
        Content::Mha { heads: 8, key_dim: 128, value_dim: 64 },
        Content::Mla { row_bytes: 576 },
        Content::Rows { row_bytes: 576 },
        Content::State { state_bytes: 576 },
    ];
    let mut all = vec![descriptor()];
    all.extend(contents.map(|content| Descriptor { content, ..descriptor() }));
    all.push(changed(|d| d.page_tokens = 32));
    all.push(changed(|d| d.layers = 25));
    all.push(changed(|d| d.draft_layers = 1));
    all.push(changed(|d| d.revision = String::new()));
    // Framing: text moved from one field to the next.
    all.push(changed(|d| (d.model, d.revision) = ("test/model-1ba".into(), "bc123".into())));
    let digests: BTreeSet<_> = all.iter().map(|d| d.digest().unwrap().0).collect();
    assert_eq!(digests.len(), all.len());
    for d in all {
        assert_eq!(Descriptor::decode(&d.encode().unwrap()).as_ref(), Ok(&d));
    }
}

#[test]
fn namespaces_never_meet() {
    let d = descriptor().digest().unwrap();
    let of = |ns: NamespaceDigest| sapwood::backend::identity::Space::new(d, ns).key(&page(1));
    let namespaces = [0u8, 1, 2, 255].map(|b| NamespaceDigest([b; 32]));
    let keys: BTreeSet<StoreKey> = namespaces.map(of).into();
    assert_eq!(keys.len(), 4);
    for ns in namespaces {
        assert_eq!(of(ns).tag(), ns.tag());
        assert_eq!(StoreKey::from_hex(&of(ns).hex()), Some(of(ns)));
    }
    for bad in ["", "00", &"0".repeat(63), &"0".repeat(65), &"G".repeat(64), &"A".repeat(64)] {
        assert_eq!(StoreKey::from_hex(bad), None, "{bad}");
    }
}

/// Written by an independent implementation (hashlib) of the documented bytes.
#[test]
fn golden_vectors() {
    let d = changed(|d| {
        d.weights_epoch = 7;
        d.shard = rank((1, 2));
    });
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
    assert_eq!(hex(&d.encode().unwrap()), GOLDEN_ENCODING);
    assert_eq!(hex(&d.digest().unwrap().0), GOLDEN_DIGEST);
    let page_hash: [u8; 32] = std::array::from_fn(|i| i as u8);
    assert_eq!(d.space(NamespaceDigest([9; 32])).unwrap().key(&page_hash).hex(), GOLDEN_KEY);
}

#[test]
fn bad_descriptors_are_refused() {
    let bad = [
        changed(|d| d.model = String::new()),
        changed(|d| d.model = "m".repeat(1025)),
        changed(|d| d.revision = "r".repeat(1025)),
        changed(|d| d.page_tokens = 0),
        changed(|d| d.layers = 0),
        changed(|d| d.draft_layers = 25),
        changed(|d| d.content = Content::Mha { heads: 0, key_dim: 1, value_dim: 1 }),
        changed(|d| d.content = Content::Mla { row_bytes: 0 }),
        changed(|d| d.content = Content::State { state_bytes: 0 }),
        changed(|d| d.shard = rank((2, 2))),
        changed(|d| d.shard = Shard::Range { layers: (3, 3), heads: (0, 1) }),
    ];
    for d in bad {
        assert!(d.digest().is_err(), "{d:?}");
    }
}

#[test]
fn unknown_repeated_missing_and_cut_fields_are_refused() {
    let good = descriptor().encode().unwrap();
    let field = |tag: u8, value: &[u8]| {
        let mut f = vec![tag];
        f.extend_from_slice(&(value.len() as u16).to_le_bytes());
        f.extend_from_slice(value);
        f
    };
    let with = |tail: Vec<u8>| [good.clone(), tail].concat();
    assert_eq!(Descriptor::decode(&with(field(13, &[1]))), Err(DescriptorError::UnknownField { tag: 13 }));
    assert_eq!(Descriptor::decode(&with(field(12, &[0; 4]))), Err(DescriptorError::UnknownField { tag: 12 }));
    for cut in 0..good.len() {
        assert!(Descriptor::decode(&good[..cut]).is_err(), "cut at {cut}");
    }
    let mut future = good.clone();
    future[3] = 2;
    assert_eq!(Descriptor::decode(&future), Err(DescriptorError::Version { found: 2 }));
    // The first field left out.
    assert_eq!(Descriptor::decode(&good[5..]), Err(DescriptorError::FieldOrder { tag: 1 }));
}

/// Whatever decodes, encodes to the same bytes: one descriptor, one encoding.
#[test]
fn decoding_is_canonical_and_never_panics() {
    let mut rng = Rng::seeded(0xDE5C);
    let good = descriptor().encode().unwrap();
    for _ in 0..20_000 {
        let mut bytes = good.clone();
        for _ in 0..1 + rng.below(3) {
            let at = rng.below(bytes.len());
            bytes[at] = rng.next() as u8;
        }
        if let Ok(d) = Descriptor::decode(&bytes) {
            assert_eq!(d.encode().as_deref(), Ok(&bytes[..]));
        }
    }
}

const GOLDEN_ENCODING: &str = "\
    0102000100020d00746573742f6d6f64656c2d3162030600616263313233040800070000000000000005010001060d00\
    010800000080000000800000000701000108030001000009190001010000000200000000000000010000000000000001\
    0000000a0400100000000b0400180000000c040000000000";
const GOLDEN_DIGEST: &str = "8e7d4b6cfdc17fb09b24697ffcb5f66d351881aa3d764b272e448066488cf024";
const GOLDEN_KEY: &str = "aa5fce284e801f00cf7b72d93aee19225c2feb8437359361df62a01388b1f41f";
