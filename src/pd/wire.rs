//! The frame: one header for every message, and a body of tagged fields.
//!
//! ```text
//!  0  magic u32      "SWPD"          24  to u64          incarnation, 0 unknown
//!  4  version u16                    32  sequence u64    per sender incarnation
//!  6  kind u16                       40  room u64
//!  8  length u32     body bytes      48  epoch u32
//! 12  crc32c u32     head and body   52  reserved u32    sent 0, ignored
//! 16  from u64       incarnation     56  serial u64      grant, 0 none
//! 64  body
//! ```
//! The header is frozen for all versions: a peer of another version can be told so. [`Frame::decode`] is
//! the only way from bytes to a frame, and what it returns has been checked.

use crate::pd::codec::{Reader, Writer};
use crate::pd::crc::crc32c;
use crate::pd::ids::{Incarnation, RoomKey, Serial};
use crate::pd::layout::Layout;
use crate::pd::reason::{Incompatible, Reason};
use crate::pd::staging::StagingRing;
use crate::pd::topo::{Rank, Topology};

/// Version spoken here. A peer with another one is refused with [`Incompatible::Version`].
pub const VERSION: u16 = 1;
/// Bytes of the header.
pub const HEAD_BYTES: usize = 64;
/// Largest body. A METADATA of 2^20 scattered pages needs 8 MiB.
pub const BODY_BYTES_MAX: usize = 16 << 20;
/// Most pages in one list.
pub const PAGES_MAX: usize = 1 << 20;
/// Largest transport descriptor.
pub const BLOB_BYTES_MAX: usize = 1 << 20;
/// Largest auxiliary row: first token, log probabilities, hidden state of one request.
pub const AUX_BYTES_MAX: usize = 1 << 18;

const MAGIC: u32 = u32::from_le_bytes(*b"SWPD");

const _: () = assert!(PAGES_MAX * 8 + AUX_BYTES_MAX < BODY_BYTES_MAX);

/// Why bytes are not a frame. Counted and dropped; nothing else happens.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// Shorter than a header, or not the length it says.
    #[error("{len} bytes are not a whole frame")]
    Length {
        /// Bytes there.
        len: usize,
    },
    /// Not a frame of this protocol.
    #[error("wrong magic")]
    Magic,
    /// The checksum does not match.
    #[error("wrong checksum")]
    Checksum,
    /// The body is longer than allowed.
    #[error("body of {0} bytes")]
    TooLong(u32),
    /// A frame of another version; the header can be read.
    #[error("version {version}")]
    Version {
        /// The peer's version.
        version: u16,
        /// Its incarnation.
        from: Incarnation,
    },
    /// No message of this version.
    #[error("kind {0}")]
    Kind(u16),
    /// A field head is cut off.
    #[error("cut field head")]
    FieldHead,
    /// A field is too short, cut off or has a value without meaning.
    #[error("field {tag}")]
    Field {
        /// Tag.
        tag: u16,
    },
    /// A field occurs twice, or there are too many.
    #[error("field {tag} repeated")]
    Repeated {
        /// Tag.
        tag: u16,
    },
    /// A mandatory field is absent.
    #[error("field {tag} missing")]
    Missing {
        /// Tag.
        tag: u16,
    },
    /// A count exceeds its limit or the bytes that are there.
    #[error("count {count} in field {tag}")]
    Count {
        /// Tag.
        tag: u16,
        /// Count.
        count: u32,
    },
}

/// Who says it, to whom, about what.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Head {
    /// Life of the sender.
    pub from: Incarnation,
    /// Life of the receiver it is meant for.
    pub to: Incarnation,
    /// Counts the frames of the sender. Tells signs of life from echoes; no other rule relies on order.
    pub sequence: u64,
    /// Room and epoch; zero where the message is about a peer.
    pub key: RoomKey,
    /// Grant; zero where there is none.
    pub serial: Serial,
}

/// What both sides must agree on before any byte of a room moves.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Prompt {
    /// Tokens.
    pub tokens: u32,
    /// Digest of the prompt and its namespace (the end of the page-hash chain serves).
    pub digest: u64,
}

/// D to P: who I am and what my memory looks like.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Register {
    /// Instance the rank belongs to; ranks of one instance share it.
    pub instance: u64,
    /// Shape of the instance.
    pub topo: Topology,
    /// Which rank.
    pub rank: Rank,
    /// Its memory.
    pub layout: Layout,
    /// Counts fences: a writer must attach anew after each.
    pub attach: u32,
    /// No grant below this serial is alive any more; a fence raises it past every grant of before.
    pub floor: Serial,
    /// What the transport needs; opaque here.
    pub blob: Vec<u8>,
    /// Where packed chunks may be put, if the rank takes any.
    pub ring: Option<StagingRing>,
}

/// P to D: the verdict on a registration, with the mirror image of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RegisterReply {
    /// Accepted.
    Accepted {
        /// Shape of the prefill instance.
        topo: Topology,
        /// Which rank.
        rank: Rank,
        /// Its memory; the receiver plans too, to know what bytes to expect.
        layout: Layout,
        /// The registration this answers.
        attach: u32,
    },
    /// Refused; affects this peer only.
    Refused {
        /// Why.
        why: Incompatible,
        /// Version of the refusing side.
        version: u16,
    },
}

/// D to P: the destination of a room.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Metadata {
    /// Prompt the pages are for.
    pub prompt: Prompt,
    /// Pages of the prompt already there.
    pub prefix: u32,
    /// Destination pages from `prefix` on.
    pub full: Vec<u32>,
    /// Destination pages of the trailing window.
    pub window: Vec<u32>,
    /// Destination slots of the state component.
    pub state: Vec<u32>,
    /// Destination row of the ring component.
    pub ring: Vec<u32>,
    /// No grant below this serial is alive any more.
    pub floor: Serial,
}

/// How a prefill rank stands to an ABORT.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Quiet {
    /// No write for the grant is posted, and none will be: the pages may be reused.
    Drained,
    /// A write ended without proof of its state. Only a fence or a revocation helps.
    Unprovable,
    /// The table of closed grants is full; ask again.
    Busy,
}

/// P to D: where a room stands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Status {
    /// Alive; refreshes the clock of the other side.
    Working,
    /// Everything is written and settled. This is the commit record.
    Done {
        /// Bytes written to this destination.
        bytes: u64,
        /// Checksum of the content, if the prefill side computed one; 0 if not.
        checksum: u64,
        /// Auxiliary row of the request.
        aux: Vec<u8>,
    },
    /// Failed, first cause.
    Failed(Reason),
}

/// The body of a frame.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Body {
    /// D to P.
    Register(Box<Register>),
    /// P to D.
    RegisterReply(Box<RegisterReply>),
    /// D to P: the request waits for memory; refreshes the clock of the other side.
    Announce,
    /// D to P.
    Metadata(Box<Metadata>),
    /// P to D: the destination is known.
    MetadataAck,
    /// D to P: write no more for this grant, and say when nothing is posted.
    Abort {
        /// No grant below this serial is alive any more.
        floor: Serial,
    },
    /// P to D.
    AbortReply(Quiet),
    /// P to D.
    Status(Status),
    /// D to P: the terminal status arrived, the source is no longer needed.
    StatusAck,
    /// D to P: the promised prefix broke; send pages from `from` on, too.
    Topup {
        /// First page, the new prefix.
        from: u32,
        /// All destination pages from there on, the ones that were known among them.
        pages: Vec<u32>,
        /// Likewise of the trailing window, which may begin earlier now.
        window: Vec<u32>,
    },
    /// Either way.
    Ping {
        /// Comes back in the answer.
        stamp: u64,
        /// No grant below this serial is alive any more.
        floor: Serial,
    },
    /// Either way.
    Pong {
        /// From the question.
        stamp: u64,
    },
    /// P to D: a packed chunk wants room in the ring.
    StageAsk {
        /// Chunk of the room.
        chunk: u32,
        /// Position of its first page.
        first: u32,
        /// Pages.
        pages: u32,
        /// Bytes of this rank's part.
        bytes: u32,
    },
    /// D to P: the place of a chunk, as absolute position in the ring.
    StageGrant {
        /// Chunk of the room.
        chunk: u32,
        /// First byte; `u64::MAX` means that it has to go unpacked.
        at: u64,
        /// Everything below this is free for reuse.
        tail: u64,
    },
    /// P to D: the chunk has been written by this rank.
    StageReady {
        /// Chunk of the room.
        chunk: u32,
    },
    /// D to P: the chunk is scattered or dropped; nothing about it need be repeated.
    StageTaken {
        /// Chunk of the room.
        chunk: u32,
        /// Everything below this is free for reuse.
        tail: u64,
    },
}

/// A checked message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Frame {
    /// Header.
    pub head: Head,
    /// Body.
    pub body: Body,
}

fn le_u16(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}

fn le_u32(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

fn le_u64(b: &[u8], at: usize) -> u64 {
    u64::from(le_u32(b, at)) | u64::from(le_u32(b, at + 4)) << 32
}

/// Bytes of the whole frame whose header starts `bytes`, for readers of a stream. `None` until the header is
/// there; an error means the stream is lost.
pub fn frame_len(bytes: &[u8]) -> Result<Option<usize>, FrameError> {
    if bytes.len() < HEAD_BYTES {
        return Ok(None);
    }
    if le_u32(bytes, 0) != MAGIC {
        return Err(FrameError::Magic);
    }
    let body = le_u32(bytes, 8);
    if body as usize > BODY_BYTES_MAX {
        return Err(FrameError::TooLong(body));
    }
    Ok(Some(HEAD_BYTES + body as usize))
}

impl Frame {
    /// Appends the frame to `out`. O(bytes).
    pub fn encode(&self, out: &mut Vec<u8>) {
        let at = out.len();
        out.resize(at + HEAD_BYTES, 0);
        let kind = self.body.encode(&mut Writer(out));
        let len = (out.len() - at - HEAD_BYTES) as u32;
        let mut head = [0u8; HEAD_BYTES];
        head[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        head[4..6].copy_from_slice(&VERSION.to_le_bytes());
        head[6..8].copy_from_slice(&kind.to_le_bytes());
        head[8..12].copy_from_slice(&len.to_le_bytes());
        head[16..24].copy_from_slice(&self.head.from.0.to_le_bytes());
        head[24..32].copy_from_slice(&self.head.to.0.to_le_bytes());
        head[32..40].copy_from_slice(&self.head.sequence.to_le_bytes());
        head[40..48].copy_from_slice(&self.head.key.room.to_le_bytes());
        head[48..52].copy_from_slice(&self.head.key.epoch.to_le_bytes());
        head[56..64].copy_from_slice(&self.head.serial.0.to_le_bytes());
        let crc = crc32c(&[&head, &out[at + HEAD_BYTES..]]);
        head[12..16].copy_from_slice(&crc.to_le_bytes());
        out[at..at + HEAD_BYTES].copy_from_slice(&head);
    }

    /// The frame as bytes of its own.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(128);
        self.encode(&mut out);
        out
    }

    /// Reads one whole frame. Allocates no more than a small multiple of `bytes.len()`, and lists of pages
    /// up to [`PAGES_MAX`].
    pub fn decode(bytes: &[u8]) -> Result<Frame, FrameError> {
        let len = frame_len(bytes)?.ok_or(FrameError::Length { len: bytes.len() })?;
        if len != bytes.len() {
            return Err(FrameError::Length { len: bytes.len() });
        }
        let zero_crc = [0u8; 4];
        if crc32c(&[&bytes[..12], &zero_crc, &bytes[16..]]) != le_u32(bytes, 12) {
            return Err(FrameError::Checksum);
        }
        let from = Incarnation(le_u64(bytes, 16));
        let version = le_u16(bytes, 4);
        if version != VERSION {
            return Err(FrameError::Version { version, from });
        }
        let head = Head {
            from,
            to: Incarnation(le_u64(bytes, 24)),
            sequence: le_u64(bytes, 32),
            key: RoomKey { room: le_u64(bytes, 40), epoch: le_u32(bytes, 48) },
            serial: Serial(le_u64(bytes, 56)),
        };
        let body = Body::decode(le_u16(bytes, 6), &Reader::new(&bytes[HEAD_BYTES..])?)?;
        Ok(Frame { head, body })
    }
}

impl Body {
    fn encode(&self, w: &mut Writer<'_>) -> u16 {
        match self {
            Body::Register(r) => {
                w.u64(1, r.instance);
                w.topology(2, &r.topo);
                w.rank(3, r.rank);
                w.layout(4, &r.layout);
                w.u32(5, r.attach);
                w.bytes(6, &r.blob);
                w.u64(7, r.floor.0);
                if let Some(ring) = &r.ring {
                    w.ring(8, ring);
                }
                1
            }
            Body::RegisterReply(r) => {
                match r.as_ref() {
                    RegisterReply::Accepted { topo, rank, layout, attach } => {
                        w.u32(1, 0);
                        w.topology(2, topo);
                        w.rank(3, *rank);
                        w.layout(4, layout);
                        w.u32(5, *attach);
                    }
                    RegisterReply::Refused { why, version } => {
                        w.u32(1, u32::from(why.code()));
                        w.u32(7, u32::from(*version));
                    }
                }
                2
            }
            Body::Announce => 3,
            Body::Metadata(m) => {
                w.u32(1, m.prompt.tokens);
                w.u64(2, m.prompt.digest);
                w.u32(3, m.prefix);
                w.pages(4, &m.full);
                w.pages(5, &m.window);
                w.pages(6, &m.state);
                w.pages(7, &m.ring);
                w.u64(8, m.floor.0);
                4
            }
            Body::MetadataAck => 5,
            Body::Abort { floor } => {
                w.u64(1, floor.0);
                6
            }
            Body::AbortReply(q) => {
                w.u32(
                    1,
                    match q {
                        Quiet::Drained => 0,
                        Quiet::Unprovable => 1,
                        Quiet::Busy => 2,
                    },
                );
                7
            }
            Body::Status(s) => {
                match s {
                    Status::Working => w.u32(1, 0),
                    Status::Done { bytes, checksum, aux } => {
                        w.u32(1, 1);
                        w.u64(2, *bytes);
                        w.u64(3, *checksum);
                        w.bytes(4, aux);
                    }
                    Status::Failed(reason) => {
                        w.u32(1, 2);
                        w.u32(5, u32::from(reason.code()));
                    }
                }
                8
            }
            Body::StatusAck => 9,
            Body::Topup { from, pages, window } => {
                w.u32(1, *from);
                w.pages(2, pages);
                if !window.is_empty() {
                    w.pages(3, window);
                }
                10
            }
            Body::Ping { stamp, floor } => {
                w.u64(1, *stamp);
                w.u64(2, floor.0);
                11
            }
            Body::Pong { stamp } => {
                w.u64(1, *stamp);
                12
            }
            Body::StageAsk { chunk, first, pages, bytes } => {
                w.u32(1, *chunk);
                w.u32(2, *bytes);
                w.u32(3, *first);
                w.u32(4, *pages);
                13
            }
            Body::StageGrant { chunk, at, tail } => {
                w.u32(1, *chunk);
                w.u64(2, *at);
                w.u64(3, *tail);
                14
            }
            Body::StageReady { chunk } => {
                w.u32(1, *chunk);
                15
            }
            Body::StageTaken { chunk, tail } => {
                w.u32(1, *chunk);
                w.u64(2, *tail);
                16
            }
        }
    }

    fn decode(kind: u16, r: &Reader<'_>) -> Result<Body, FrameError> {
        Ok(match kind {
            1 => Body::Register(Box::new(Register {
                instance: r.u64(1)?,
                topo: r.topology(2)?,
                rank: r.rank(3)?,
                layout: r.layout(4)?,
                attach: r.u32(5)?,
                blob: r.bytes(6, BLOB_BYTES_MAX)?,
                floor: Serial(r.u64(7)?),
                ring: r.ring(8)?,
            })),
            2 => Body::RegisterReply(Box::new(decode_register_reply(r)?)),
            3 => Body::Announce,
            4 => Body::Metadata(Box::new(Metadata {
                prompt: Prompt { tokens: r.u32(1)?, digest: r.u64(2)? },
                prefix: r.u32(3)?,
                full: r.pages(4)?,
                window: r.pages(5)?,
                state: r.pages(6)?,
                ring: r.pages(7)?,
                floor: Serial(r.u64(8)?),
            })),
            5 => Body::MetadataAck,
            6 => Body::Abort { floor: Serial(r.u64(1)?) },
            7 => Body::AbortReply(match r.u32(1)? {
                0 => Quiet::Drained,
                1 => Quiet::Unprovable,
                2 => Quiet::Busy,
                _ => return Err(FrameError::Field { tag: 1 }),
            }),
            8 => Body::Status(decode_status(r)?),
            9 => Body::StatusAck,
            10 => Body::Topup { from: r.u32(1)?, pages: r.pages(2)?, window: r.pages(3)? },
            11 => Body::Ping { stamp: r.u64(1)?, floor: Serial(r.u64(2)?) },
            12 => Body::Pong { stamp: r.u64(1)? },
            13 => Body::StageAsk { chunk: r.u32(1)?, first: r.u32(3)?, pages: r.u32(4)?, bytes: r.u32(2)? },
            14 => Body::StageGrant { chunk: r.u32(1)?, at: r.u64(2)?, tail: r.u64(3)? },
            15 => Body::StageReady { chunk: r.u32(1)? },
            16 => Body::StageTaken { chunk: r.u32(1)?, tail: r.u64(2)? },
            other => return Err(FrameError::Kind(other)),
        })
    }
}

fn decode_register_reply(r: &Reader<'_>) -> Result<RegisterReply, FrameError> {
    let code = u16::try_from(r.u32(1)?).map_err(|_| FrameError::Field { tag: 1 })?;
    if code != 0 {
        let version = u16::try_from(r.u32(7)?).map_err(|_| FrameError::Field { tag: 7 })?;
        return Ok(RegisterReply::Refused { why: Incompatible::from_code(code), version });
    }
    Ok(RegisterReply::Accepted {
        topo: r.topology(2)?,
        rank: r.rank(3)?,
        layout: r.layout(4)?,
        attach: r.u32(5)?,
    })
}

fn decode_status(r: &Reader<'_>) -> Result<Status, FrameError> {
    Ok(match r.u32(1)? {
        0 => Status::Working,
        1 => Status::Done { bytes: r.u64(2)?, checksum: r.u64(3)?, aux: r.bytes(4, AUX_BYTES_MAX)? },
        2 => {
            let code = u16::try_from(r.u32(5)?).map_err(|_| FrameError::Field { tag: 5 })?;
            Status::Failed(Reason::from_code(code))
        }
        _ => return Err(FrameError::Field { tag: 1 }),
    })
}
