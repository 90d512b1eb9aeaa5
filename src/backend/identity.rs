//! What the bytes of a stored page are, in full: one typed descriptor, hashed in one place.
//!
//! A store key names content. Everything that changes what the bytes mean is in the descriptor, so two
//! deployments that differ in any field never meet under one key:
//!
//! ```text
//! descriptor --encode--> bytes --SHA-256--> descriptor digest (32)
//! key = namespace tag (8) | SHA-256("sapwood-key-v1" | descriptor | namespace | page hash)[..24]
//! ```
//! The tag only makes a namespace listable (files, key scans). It is never trusted: the envelope of an
//! object holds both full digests, and they are compared before a page matches or is cleared.
//!
//! Keys are a documented function of bytes: no process seed, no pointer width, no byte order of the machine.

use sha2::{Digest as _, Sha256};

mod codec;

pub use crate::pool::layout::Layout as ByteOrder;
pub use codec::DescriptorError;

/// Version of the descriptor encoding, the key derivation and the page-hash chain together.
pub const IDENTITY_VERSION: u16 = 1;

/// Longest model or revision name in bytes.
pub const NAME_BYTES_MAX: usize = 1024;

/// Element type of the stored bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Dtype {
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// IEEE single.
    F32,
    /// FP8, 4 exponent bits.
    Fp8E4m3,
    /// FP8, 5 exponent bits.
    Fp8E5m2,
    /// 8-bit integers with scales beside them.
    Int8,
    /// Microscaled FP8.
    Mxfp8,
    /// NVIDIA 4-bit float with block scales.
    Nvfp4,
    /// Bytes whose meaning only the model knows (packed rows, recurrent state).
    Opaque,
}

/// What a page of this plane holds per layer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Content {
    /// Keys and values.
    Mha {
        /// KV heads in the object.
        heads: u32,
        /// Elements of one key head.
        key_dim: u32,
        /// Elements of one value head.
        value_dim: u32,
    },
    /// One latent row per token.
    Mla {
        /// Bytes of a row.
        row_bytes: u32,
    },
    /// One row of bytes per token that follows another plane (index keys, scales).
    Rows {
        /// Bytes of a row.
        row_bytes: u32,
    },
    /// One block of state per page end.
    State {
        /// Bytes of the block, all layers.
        state_bytes: u64,
    },
}

/// Which of the caches of a model the page belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Plane {
    /// The target model's full attention.
    Target,
    /// Sliding-window layers.
    Window,
    /// Recurrent state.
    State,
    /// Draft model's full attention.
    Draft,
    /// Draft model's sliding-window layers.
    DraftWindow,
    /// Sparse-attention index keys.
    Index,
    /// Draft model's index keys.
    DraftIndex,
    /// Scales that belong to quantised pages.
    Scale,
    /// A plane of the embedder's own, told apart by number.
    Other(u16),
}

/// Which part of the model the object holds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Shard {
    /// What one rank of one topology holds; only the same topology can read it.
    Rank {
        /// Tensor-parallel rank and size; `(0, 1)` where ranks hold equal bytes.
        tensor: (u32, u32),
        /// Pipeline rank and size.
        pipeline: (u32, u32),
        /// Context-parallel rank and size.
        context: (u32, u32),
    },
    /// An absolute part of the model; any topology that tiles can read it.
    Range {
        /// First layer and the layer after the last.
        layers: (u32, u32),
        /// First KV head and the head after the last.
        heads: (u32, u32),
    },
}

/// The identity of the objects of one plane.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Descriptor {
    /// Model, as the operator names it.
    pub model: String,
    /// Revision of the model's files.
    pub revision: String,
    /// Bumped when weights change in place: a logical clear.
    pub weights_epoch: u64,
    /// Element type.
    pub dtype: Dtype,
    /// What a page holds.
    pub content: Content,
    /// Order of the bytes.
    pub order: ByteOrder,
    /// Plane.
    pub plane: Plane,
    /// Part of the model.
    pub shard: Shard,
    /// Tokens of a page.
    pub page_tokens: u32,
    /// Layers in the object, packed draft layers included.
    pub layers: u32,
    /// Trailing layers of `layers` that belong to a draft model.
    pub draft_layers: u32,
}

/// SHA-256 of a descriptor's encoding.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DescriptorDigest(pub [u8; 32]);

/// Identity of a namespace: the digest that seeds its page-hash chain, all zero for the default one.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct NamespaceDigest(pub [u8; 32]);

/// Name of an object in a store.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StoreKey([u8; 32]);

/// One plane of one namespace: what keys are made from. Make it once, keep it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Space {
    descriptor: DescriptorDigest,
    namespace: NamespaceDigest,
}

/// Stands for the descriptor of links: objects that say where the bytes of a page are
/// ([`group`](crate::backend::store::group)). No descriptor has this digest.
pub const LINKS: DescriptorDigest = DescriptorDigest(*b"sapwood-links-v1 ...............");

impl NamespaceDigest {
    /// The namespace without adapter, salt and user key.
    pub const DEFAULT: NamespaceDigest = NamespaceDigest([0; 32]);

    /// First bytes of every key of the namespace.
    #[must_use]
    pub fn tag(&self) -> [u8; 8] {
        let digest = Sha256::new().chain_update(b"sapwood-namespace-tag-v1").chain_update(self.0).finalize();
        let mut tag = [0; 8];
        tag.copy_from_slice(&digest[..8]);
        tag
    }

    /// 64 lower-case hex digits.
    #[must_use]
    pub fn hex(&self) -> String {
        hex(&self.0)
    }

    /// Reads what [`NamespaceDigest::hex`] wrote; anything else is `None`.
    #[must_use]
    pub fn from_hex(text: &str) -> Option<NamespaceDigest> {
        bytes_of_hex(text).map(NamespaceDigest)
    }
}

impl StoreKey {
    /// A key read back from a medium.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 32]) -> StoreKey {
        StoreKey(bytes)
    }

    /// Its bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The tag of its namespace.
    #[must_use]
    pub fn tag(&self) -> [u8; 8] {
        let mut tag = [0; 8];
        tag.copy_from_slice(&self.0[..8]);
        tag
    }

    /// 64 lower-case hex digits.
    #[must_use]
    pub fn hex(&self) -> String {
        hex(&self.0)
    }

    /// Reads what [`StoreKey::hex`] wrote; anything else is `None`.
    #[must_use]
    pub fn from_hex(text: &str) -> Option<StoreKey> {
        bytes_of_hex(text).map(StoreKey)
    }
}

impl DescriptorDigest {
    /// 64 lower-case hex digits.
    #[must_use]
    pub fn hex(&self) -> String {
        hex(&self.0)
    }
}

impl Descriptor {
    /// The digest, after checking the fields.
    pub fn digest(&self) -> Result<DescriptorDigest, DescriptorError> {
        let digest =
            Sha256::new().chain_update(b"sapwood-descriptor-v1").chain_update(self.encode()?).finalize();
        Ok(DescriptorDigest(digest.into()))
    }

    /// The space of this descriptor in one namespace.
    pub fn space(&self, namespace: NamespaceDigest) -> Result<Space, DescriptorError> {
        Ok(Space::new(self.digest()?, namespace))
    }
}

impl Space {
    /// The space of a descriptor and a namespace.
    #[must_use]
    pub const fn new(descriptor: DescriptorDigest, namespace: NamespaceDigest) -> Space {
        Space { descriptor, namespace }
    }

    /// The descriptor.
    #[must_use]
    pub const fn descriptor(&self) -> DescriptorDigest {
        self.descriptor
    }

    /// The namespace.
    #[must_use]
    pub const fn namespace(&self) -> NamespaceDigest {
        self.namespace
    }

    /// Whether an object of this space under `key` goes when `namespace` is cleared. A link only has the tag in its
    /// key to say whose it is; should two namespaces share one, that costs misses and no more.
    #[must_use]
    pub fn is_cleared_with(&self, key: &StoreKey, namespace: &NamespaceDigest) -> bool {
        match self.descriptor == LINKS {
            true => key.tag() == namespace.tag(),
            false => self.namespace == *namespace,
        }
    }

    /// The key of a page. Two SHA-256 compressions and one for the tag.
    #[must_use]
    pub fn key(&self, page_hash: &[u8; 32]) -> StoreKey {
        let digest = Sha256::new()
            .chain_update(b"sapwood-key-v1")
            .chain_update(self.descriptor.0)
            .chain_update(self.namespace.0)
            .chain_update(page_hash)
            .finalize();
        let mut key = [0; 32];
        key[..8].copy_from_slice(&self.namespace.tag());
        key[8..].copy_from_slice(&digest[..24]);
        StoreKey(key)
    }
}

fn hex(bytes: &[u8]) -> String {
    const DIGITS: [char; 16] =
        ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'a', 'b', 'c', 'd', 'e', 'f'];
    let mut out = String::with_capacity(bytes.len() * 2);
    for b in bytes {
        out.push(DIGITS[usize::from(b >> 4)]);
        out.push(DIGITS[usize::from(b & 15)]);
    }
    out
}

fn bytes_of_hex(text: &str) -> Option<[u8; 32]> {
    let text = text.as_bytes();
    if text.len() != 64 {
        return None;
    }
    let digit = |b: u8| match b {
        b'0'..=b'9' => Some(b - b'0'),
        b'a'..=b'f' => Some(b - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; 32];
    for (out, pair) in bytes.iter_mut().zip(text.chunks_exact(2)) {
        *out = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(bytes)
}

macro_rules! debug_as_hex {
    ($($ty:ident: $prefix:literal),+) => {$(
        impl std::fmt::Debug for $ty {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, concat!($prefix, "{}"), &hex(&self.0)[..16])
            }
        }
    )+};
}
debug_as_hex!(DescriptorDigest: "desc:", NamespaceDigest: "ns:", StoreKey: "key:");
