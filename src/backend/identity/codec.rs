//! Canonical bytes of a [`Descriptor`]: records of (tag `u8`, length `u16`, value), little endian, every tag
//! exactly once and ascending. One descriptor has one encoding; reading refuses anything else, so a field
//! that this build does not know can not be lost silently.

use super::{ByteOrder, Content, Descriptor, Dtype, IDENTITY_VERSION, NAME_BYTES_MAX, Plane, Shard};

/// Why a descriptor is not valid, or its bytes are not.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DescriptorError {
    /// A name is longer than allowed.
    #[error("{field} has {bytes} bytes, at most {NAME_BYTES_MAX} are allowed")]
    NameTooLong {
        /// Field.
        field: &'static str,
        /// Its bytes.
        bytes: usize,
    },
    /// A name is empty.
    #[error("{field} is empty")]
    NameEmpty {
        /// Field.
        field: &'static str,
    },
    /// A number is outside what makes sense.
    #[error("{field} is {value}")]
    OutOfRange {
        /// Field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// Written by another version.
    #[error("identity version {found}, this build reads {IDENTITY_VERSION}")]
    Version {
        /// Version found.
        found: u16,
    },
    /// A field this build does not know.
    #[error("unknown field {tag}")]
    UnknownField {
        /// Tag of the field.
        tag: u8,
    },
    /// A field is missing, twice, or out of order.
    #[error("field {tag} is missing or out of order")]
    FieldOrder {
        /// Tag that was expected.
        tag: u8,
    },
    /// A value cannot be read.
    #[error("field {tag} has a bad value")]
    BadValue {
        /// Tag of the field.
        tag: u8,
    },
    /// The bytes end inside a field.
    #[error("cut short")]
    Truncated,
}

const TAG_VERSION: u8 = 1;
const TAG_MODEL: u8 = 2;
const TAG_REVISION: u8 = 3;
const TAG_WEIGHTS_EPOCH: u8 = 4;
const TAG_DTYPE: u8 = 5;
const TAG_CONTENT: u8 = 6;
const TAG_ORDER: u8 = 7;
const TAG_PLANE: u8 = 8;
const TAG_SHARD: u8 = 9;
const TAG_PAGE_TOKENS: u8 = 10;
const TAG_LAYERS: u8 = 11;
const TAG_DRAFT_LAYERS: u8 = 12;

fn dtype_code(d: Dtype) -> u8 {
    match d {
        Dtype::Bf16 => 1,
        Dtype::F16 => 2,
        Dtype::F32 => 3,
        Dtype::Fp8E4m3 => 4,
        Dtype::Fp8E5m2 => 5,
        Dtype::Int8 => 6,
        Dtype::Mxfp8 => 7,
        Dtype::Nvfp4 => 8,
        Dtype::Opaque => 9,
    }
}

fn dtype_of(code: u8) -> Option<Dtype> {
    [
        Dtype::Bf16,
        Dtype::F16,
        Dtype::F32,
        Dtype::Fp8E4m3,
        Dtype::Fp8E5m2,
        Dtype::Int8,
        Dtype::Mxfp8,
        Dtype::Nvfp4,
        Dtype::Opaque,
    ]
    .into_iter()
    .find(|&d| dtype_code(d) == code)
}

fn order_code(o: ByteOrder) -> u8 {
    match o {
        ByteOrder::PageLayerKv => 1,
        ByteOrder::LayerFirst => 2,
        ByteOrder::PageFirst => 3,
        ByteOrder::PageFirstDirect => 4,
        ByteOrder::HeadSplit => 5,
    }
}

fn order_of(code: u8) -> Option<ByteOrder> {
    [
        ByteOrder::PageLayerKv,
        ByteOrder::LayerFirst,
        ByteOrder::PageFirst,
        ByteOrder::PageFirstDirect,
        ByteOrder::HeadSplit,
    ]
    .into_iter()
    .find(|&o| order_code(o) == code)
}

fn plane_code(p: Plane) -> (u8, u16) {
    match p {
        Plane::Target => (1, 0),
        Plane::Window => (2, 0),
        Plane::State => (3, 0),
        Plane::Draft => (4, 0),
        Plane::DraftWindow => (5, 0),
        Plane::Index => (6, 0),
        Plane::DraftIndex => (7, 0),
        Plane::Scale => (8, 0),
        Plane::Other(n) => (9, n),
    }
}

fn plane_of(code: u8, n: u16) -> Option<Plane> {
    [
        Plane::Target,
        Plane::Window,
        Plane::State,
        Plane::Draft,
        Plane::DraftWindow,
        Plane::Index,
        Plane::DraftIndex,
        Plane::Scale,
        Plane::Other(n),
    ]
    .into_iter()
    .find(|&p| plane_code(p) == (code, n))
}

struct Writer(Vec<u8>);

impl Writer {
    /// Values are names of at most [`NAME_BYTES_MAX`] bytes or a few numbers; the length always fits.
    fn field(&mut self, tag: u8, value: &[u8]) {
        let len = u16::try_from(value.len()).unwrap_or(u16::MAX);
        self.0.push(tag);
        self.0.extend_from_slice(&len.to_le_bytes());
        self.0.extend_from_slice(value);
    }
}

fn words(tag: u8, numbers: &[u32]) -> Vec<u8> {
    let mut out = vec![tag];
    numbers.iter().for_each(|n| out.extend_from_slice(&n.to_le_bytes()));
    out
}

fn encode_content(c: Content) -> Vec<u8> {
    match c {
        Content::Mha { heads, key_dim, value_dim } => words(1, &[heads, key_dim, value_dim]),
        Content::Mla { row_bytes } => words(2, &[row_bytes]),
        Content::Rows { row_bytes } => words(3, &[row_bytes]),
        Content::State { state_bytes } => {
            let mut out = vec![4];
            out.extend_from_slice(&state_bytes.to_le_bytes());
            out
        }
    }
}

fn decode_content(v: &[u8]) -> Option<Content> {
    let (&kind, rest) = v.split_first()?;
    Some(match kind {
        1 => {
            let [heads, key_dim, value_dim] = numbers(rest)?;
            Content::Mha { heads, key_dim, value_dim }
        }
        2 => Content::Mla { row_bytes: numbers::<1>(rest)?[0] },
        3 => Content::Rows { row_bytes: numbers::<1>(rest)?[0] },
        4 => Content::State { state_bytes: u64::from_le_bytes(rest.try_into().ok()?) },
        _ => return None,
    })
}

fn encode_shard(s: Shard) -> Vec<u8> {
    match s {
        Shard::Rank { tensor, pipeline, context } => {
            words(1, &[tensor.0, tensor.1, pipeline.0, pipeline.1, context.0, context.1])
        }
        Shard::Range { layers, heads } => words(2, &[layers.0, layers.1, heads.0, heads.1]),
    }
}

fn decode_shard(v: &[u8]) -> Option<Shard> {
    let (&kind, rest) = v.split_first()?;
    Some(match kind {
        1 => {
            let n = numbers::<6>(rest)?;
            Shard::Rank { tensor: (n[0], n[1]), pipeline: (n[2], n[3]), context: (n[4], n[5]) }
        }
        2 => {
            let n = numbers::<4>(rest)?;
            Shard::Range { layers: (n[0], n[1]), heads: (n[2], n[3]) }
        }
        _ => return None,
    })
}

fn numbers<const N: usize>(bytes: &[u8]) -> Option<[u32; N]> {
    if bytes.len() != N * 4 {
        return None;
    }
    let mut out = [0; N];
    for (o, c) in out.iter_mut().zip(bytes.chunks_exact(4)) {
        *o = u32::from_le_bytes(c.try_into().ok()?);
    }
    Some(out)
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn field(&mut self, tag: u8) -> Result<&'a [u8], DescriptorError> {
        let (&found, rest) = self.0.split_first().ok_or(DescriptorError::Truncated)?;
        if found > TAG_DRAFT_LAYERS || found == 0 {
            return Err(DescriptorError::UnknownField { tag: found });
        }
        if found != tag {
            return Err(DescriptorError::FieldOrder { tag });
        }
        let (len, rest) = rest.split_first_chunk::<2>().ok_or(DescriptorError::Truncated)?;
        let len = usize::from(u16::from_le_bytes(*len));
        if rest.len() < len {
            return Err(DescriptorError::Truncated);
        }
        let (value, rest) = rest.split_at(len);
        self.0 = rest;
        Ok(value)
    }

    fn read<T>(&mut self, tag: u8, of: impl Fn(&[u8]) -> Option<T>) -> Result<T, DescriptorError> {
        of(self.field(tag)?).ok_or(DescriptorError::BadValue { tag })
    }
}

impl Descriptor {
    /// The canonical bytes.
    pub fn encode(&self) -> Result<Vec<u8>, DescriptorError> {
        self.check()?;
        let mut w = Writer(Vec::with_capacity(128 + self.model.len() + self.revision.len()));
        w.field(TAG_VERSION, &IDENTITY_VERSION.to_le_bytes());
        w.field(TAG_MODEL, self.model.as_bytes());
        w.field(TAG_REVISION, self.revision.as_bytes());
        w.field(TAG_WEIGHTS_EPOCH, &self.weights_epoch.to_le_bytes());
        w.field(TAG_DTYPE, &[dtype_code(self.dtype)]);
        w.field(TAG_CONTENT, &encode_content(self.content));
        w.field(TAG_ORDER, &[order_code(self.order)]);
        let (plane, n) = plane_code(self.plane);
        w.field(TAG_PLANE, &[plane, n.to_le_bytes()[0], n.to_le_bytes()[1]]);
        w.field(TAG_SHARD, &encode_shard(self.shard));
        w.field(TAG_PAGE_TOKENS, &self.page_tokens.to_le_bytes());
        w.field(TAG_LAYERS, &self.layers.to_le_bytes());
        w.field(TAG_DRAFT_LAYERS, &self.draft_layers.to_le_bytes());
        Ok(w.0)
    }

    /// Reads what [`Descriptor::encode`] wrote and nothing else.
    pub fn decode(bytes: &[u8]) -> Result<Descriptor, DescriptorError> {
        let text = |v: &[u8]| std::str::from_utf8(v).ok().map(str::to_owned);
        let word = |v: &[u8]| v.try_into().ok().map(u32::from_le_bytes);
        let mut r = Reader(bytes);
        let version = r.read(TAG_VERSION, |v| v.try_into().ok().map(u16::from_le_bytes))?;
        if version != IDENTITY_VERSION {
            return Err(DescriptorError::Version { found: version });
        }
        let out = Descriptor {
            model: r.read(TAG_MODEL, text)?,
            revision: r.read(TAG_REVISION, text)?,
            weights_epoch: r.read(TAG_WEIGHTS_EPOCH, |v| v.try_into().ok().map(u64::from_le_bytes))?,
            dtype: r.read(TAG_DTYPE, |v| if let [c] = v { dtype_of(*c) } else { None })?,
            content: r.read(TAG_CONTENT, decode_content)?,
            order: r.read(TAG_ORDER, |v| if let [c] = v { order_of(*c) } else { None })?,
            plane: r.read(TAG_PLANE, |v| match v {
                [c, lo, hi] => plane_of(*c, u16::from_le_bytes([*lo, *hi])),
                _ => None,
            })?,
            shard: r.read(TAG_SHARD, decode_shard)?,
            page_tokens: r.read(TAG_PAGE_TOKENS, word)?,
            layers: r.read(TAG_LAYERS, word)?,
            draft_layers: r.read(TAG_DRAFT_LAYERS, word)?,
        };
        if let Some(&tag) = r.0.first() {
            return Err(DescriptorError::UnknownField { tag });
        }
        out.check()?;
        Ok(out)
    }

    fn check(&self) -> Result<(), DescriptorError> {
        for (field, name) in [("model", &self.model), ("revision", &self.revision)] {
            if name.len() > NAME_BYTES_MAX {
                return Err(DescriptorError::NameTooLong { field, bytes: name.len() });
            }
        }
        if self.model.is_empty() {
            return Err(DescriptorError::NameEmpty { field: "model" });
        }
        let positive = |field, value: u64| match value {
            0 => Err(DescriptorError::OutOfRange { field, value }),
            _ => Ok(()),
        };
        positive("page_tokens", u64::from(self.page_tokens))?;
        positive("layers", u64::from(self.layers))?;
        match self.content {
            Content::Mha { heads, key_dim, value_dim } => {
                positive("heads", u64::from(heads))?;
                positive("key_dim", u64::from(key_dim))?;
                positive("value_dim", u64::from(value_dim))?;
            }
            Content::Mla { row_bytes } | Content::Rows { row_bytes } => {
                positive("row_bytes", u64::from(row_bytes))?;
            }
            Content::State { state_bytes } => positive("state_bytes", state_bytes)?,
        }
        if self.draft_layers > self.layers {
            return Err(DescriptorError::OutOfRange {
                field: "draft_layers",
                value: u64::from(self.draft_layers),
            });
        }
        check_shard(self.shard)
    }
}

fn check_shard(shard: Shard) -> Result<(), DescriptorError> {
    match shard {
        Shard::Rank { tensor, pipeline, context } => {
            for (field, (rank, size)) in
                [("tensor rank", tensor), ("pipeline rank", pipeline), ("context rank", context)]
            {
                if rank >= size {
                    return Err(DescriptorError::OutOfRange { field, value: u64::from(rank) });
                }
            }
        }
        Shard::Range { layers, heads } => {
            for (field, (from, to)) in [("layer range", layers), ("head range", heads)] {
                if from >= to {
                    return Err(DescriptorError::OutOfRange { field, value: u64::from(from) });
                }
            }
        }
    }
    Ok(())
}
