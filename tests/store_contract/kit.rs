//! Memory, keys, bytes and seeds for the suite.
#![expect(unsafe_code, reason = "the tests own the regions and touch them from one thread at a time")]

use std::any::Any;
use std::sync::Arc;

use sapwood::backend::identity::{
    ByteOrder, Content, Descriptor, Dtype, NamespaceDigest, Plane, Shard, Space, StoreKey,
};
use sapwood::backend::region::{Mapping, Region, Sharing};
use sapwood::backend::store::{ArenaNeed, Item, RegionToken, Span, Store};

/// A store and what must live as long as it.
pub(crate) struct Fixture {
    pub(crate) store: Arc<dyn Store>,
    _keep: Vec<Box<dyn Any>>,
}

impl Fixture {
    pub(crate) fn new(store: impl Store + 'static) -> Fixture {
        Fixture { store: Arc::new(store), _keep: vec![] }
    }

    pub(crate) fn keeping(mut self, what: impl Any) -> Fixture {
        self._keep.push(Box::new(what));
        self
    }
}

/// A registered region.
pub(crate) struct Arena {
    region: Arc<Region>,
    pub(crate) token: RegionToken,
}

impl Arena {
    pub(crate) fn new(store: &dyn Store, bytes: usize) -> Arena {
        let region = region_for(store, bytes);
        let token = store.register(&region).unwrap();
        Arena { region, token }
    }

    pub(crate) fn span(&self, offset: usize, len: usize) -> Span {
        Span { region: self.token, offset, len }
    }

    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        // SAFETY: no call is running on this range; the tests give every thread its own range.
        unsafe { self.region.slice_mut(offset, bytes.len()).unwrap().copy_from_slice(bytes) }
    }

    pub(crate) fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        // SAFETY: as above.
        unsafe { self.region.slice(offset, len).unwrap().to_vec() }
    }
}

/// Memory that the store can address.
pub(crate) fn region_for(store: &dyn Store, bytes: usize) -> Arc<Region> {
    let sharing = match store.caps().arena {
        ArenaNeed::SharedFd => Sharing::Shared,
        _ => Sharing::Private,
    };
    Arc::new(Region::map(bytes, Mapping { sharing, ..Mapping::default() }).unwrap())
}

/// A small seeded generator (xorshift64*).
pub(crate) struct Rng(u64);

impl Rng {
    /// From `SAPWOOD_SEED`, or `default`; prints what it uses.
    pub(crate) fn seeded(default: u64) -> Rng {
        let seed = std::env::var("SAPWOOD_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(default);
        println!("SAPWOOD_SEED={seed}");
        Rng(seed | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

pub(crate) fn descriptor() -> Descriptor {
    Descriptor {
        model: "test/model-1b".into(),
        revision: "abc123".into(),
        weights_epoch: 0,
        dtype: Dtype::Bf16,
        content: Content::Mha { heads: 8, key_dim: 128, value_dim: 128 },
        order: ByteOrder::PageLayerKv,
        plane: Plane::Target,
        shard: Shard::Rank { tensor: (0, 1), pipeline: (0, 1), context: (0, 1) },
        page_tokens: 16,
        layers: 24,
        draft_layers: 0,
    }
}

pub(crate) fn space() -> Space {
    space_of(0)
}

/// The space of the n-th namespace.
pub(crate) fn space_of(namespace: u8) -> Space {
    descriptor().space(namespace_of(namespace)).unwrap()
}

pub(crate) fn namespace_of(n: u8) -> NamespaceDigest {
    NamespaceDigest([n; 32])
}

/// A page hash by number.
pub(crate) fn page(n: u64) -> [u8; 32] {
    let mut h = [0x5A; 32];
    h[..8].copy_from_slice(&n.to_le_bytes());
    h
}

pub(crate) fn key(n: u64) -> StoreKey {
    space().key(&page(n))
}

pub(crate) fn item(n: u64, span: Span) -> Item {
    Item::one(&space(), &page(n), span)
}

/// Bytes that only page `n` has.
pub(crate) fn bytes_of(n: u64, len: usize) -> Vec<u8> {
    let mut rng = Rng(n.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    (0..len).map(|_| rng.next() as u8).collect()
}

/// A test that cannot run here says so; where everything must run (`SAPWOOD_REQUIRE_SERVICES`), it fails.
pub(crate) fn skip(what: &str) {
    assert!(std::env::var_os("SAPWOOD_REQUIRE_SERVICES").is_none(), "needs {what}");
    println!("SKIPPED: needs {what}");
}
