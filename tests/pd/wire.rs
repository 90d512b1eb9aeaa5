//! Frames: round trips, every malformation a typed error, nothing allocated for a count that is not there.

use sapwood::pd::layout::{Component, Entry, EntryId, Group, HeadOrder, Layout, Role, Shape, TokenSplit};
use sapwood::pd::staging::StagingRing;
use sapwood::pd::topo::{CpSpread, Rank, Topology};
use sapwood::pd::wire::{
    Body, Frame, FrameError, HEAD_BYTES, Head, Metadata, PAGES_MAX, Prompt, Quiet, Register, RegisterReply,
    Status, frame_len,
};
use sapwood::pd::{Incarnation, Incompatible, Reason, RoomKey, Serial};

use crate::{Rng, seed};

fn layout(rng: &mut Rng) -> Layout {
    let entries = (0..rng.below(6))
        .map(|layer| Entry {
            id: EntryId {
                group: rng.pick(&[Group::Target, Group::Draft]),
                layer,
                role: rng.pick(&[Role::K, Role::V, Role::Latent, Role::Other(9)]),
            },
            component: rng.pick(&[Component::Full, Component::Window, Component::State, Component::Ring]),
            region: rng.below(4),
            base: rng.next(),
            units: rng.below(1 << 30),
            unit_bytes: rng.next(),
            shape: rng.pick(&[
                Shape::Replicated,
                Shape::Heads { total: 8, head_bytes: 256, order: HeadOrder::HeadToken },
                Shape::Axis { groups: [1, 2, 3, 0], outer: 3, elem_bytes: 2 },
            ]),
            ring_slots: rng.below(9),
        })
        .collect();
    Layout {
        model: rng.next(),
        page_tokens: 64,
        window_tokens: rng.below(999),
        split: TokenSplit { size: 2, rank: 1 },
        regions: (0..rng.below(4)).map(|_| rng.next()).collect(),
        entries,
    }
}

fn topology(rng: &mut Rng) -> Topology {
    Topology {
        dp: 2,
        cp: 1 + rng.below(3),
        tp: 8,
        stage_layers: (0..rng.below(5)).map(|_| rng.below(64)).collect(),
        cp_spread: rng.pick(&[CpSpread::Replicated, CpSpread::Block]),
        page_shard: rng.chance(50),
    }
}

fn pages(rng: &mut Rng) -> Vec<u32> {
    let n = rng.below(40);
    rng.distinct(n, 64)
}

fn body(rng: &mut Rng) -> Body {
    let rank = Rank { dp: 1, pp: rng.below(4), cp: 0, tp: rng.below(8) };
    match rng.below(18) {
        0 => Body::Register(Box::new(Register {
            instance: rng.next(),
            topo: topology(rng),
            rank,
            layout: layout(rng),
            attach: rng.below(9),
            floor: Serial(rng.next()),
            blob: vec![7; rng.below(50) as usize],
            ring: rng.chance(50).then(|| StagingRing {
                region: rng.below(3),
                base: rng.next(),
                bytes: rng.next(),
                chunks_max: rng.below(99),
            }),
        })),
        1 => Body::RegisterReply(Box::new(RegisterReply::Accepted {
            topo: topology(rng),
            rank,
            layout: layout(rng),
            attach: 3,
        })),
        2 => Body::RegisterReply(Box::new(RegisterReply::Refused {
            why: Incompatible::PageTokens,
            version: 4,
        })),
        3 => Body::Announce,
        4 | 5 => Body::Metadata(Box::new(Metadata {
            prompt: Prompt { tokens: rng.below(9999), digest: rng.next() },
            prefix: rng.below(9),
            full: pages(rng),
            window: pages(rng),
            state: pages(rng),
            ring: pages(rng),
            floor: Serial(rng.next()),
        })),
        6 => Body::MetadataAck,
        7 => Body::Abort { floor: Serial(rng.next()) },
        8 => Body::AbortReply(rng.pick(&[Quiet::Drained, Quiet::Unprovable, Quiet::Busy])),
        9 => Body::Status(Status::Done {
            bytes: rng.next(),
            checksum: rng.next(),
            aux: vec![1; rng.below(90) as usize],
        }),
        10 => Body::Status(Status::Failed(Reason::from_code(rng.below(99) as u16))),
        11 => Body::Status(Status::Working),
        12 => Body::StatusAck,
        13 => Body::Topup { from: rng.below(99), pages: pages(rng), window: pages(rng) },
        14 => Body::Ping { stamp: rng.next(), floor: Serial(rng.next()) },
        15 => Body::Pong { stamp: rng.next() },
        16 => rng.pick(&[Some(0u64), None]).map_or(
            Body::StageAsk { chunk: 1, first: 3, pages: 4, bytes: 2 },
            |tail| Body::StageTaken { chunk: 5, tail },
        ),
        _ => rng
            .pick(&[0u64, u64::MAX])
            .checked_add(1)
            .map_or(Body::StageReady { chunk: 1 }, |at| Body::StageGrant { chunk: 1, at, tail: 9 }),
    }
}

fn frame(rng: &mut Rng) -> Frame {
    let head = Head {
        from: Incarnation(rng.next()),
        to: Incarnation(rng.next()),
        sequence: rng.next(),
        key: RoomKey { room: rng.next(), epoch: rng.below(u32::MAX) },
        serial: Serial(rng.next()),
    };
    Frame { head, body: body(rng) }
}

/// Recomputes the checksum, so that damage reaches the parser behind it.
fn seal(bytes: &mut [u8]) {
    let mut copy = bytes.to_vec();
    copy[12..16].fill(0);
    let crc = crc32c::crc32c(&copy);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
}

#[test]
fn frames_come_back_as_they_went() {
    let mut rng = Rng(seed(1));
    for _ in 0..3000 {
        let f = frame(&mut rng);
        let bytes = f.to_bytes();
        assert_eq!(frame_len(&bytes), Ok(Some(bytes.len())));
        assert_eq!(Frame::decode(&bytes), Ok(f));
    }
}

/// Pins the format: these bytes must never change within version 1.
#[test]
fn the_bytes_of_a_frame_are_fixed() {
    let head = Head {
        from: Incarnation(0x1122),
        to: Incarnation(0x3344),
        sequence: 5,
        key: RoomKey { room: 0xABCD, epoch: 2 },
        serial: Serial(9),
    };
    let bytes =
        Frame { head, body: Body::Topup { from: 3, pages: vec![7, 8, 1], window: Vec::new() } }.to_bytes();
    let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
    let want = concat!(
        "53575044",
        "0100",
        "0a00",
        "2c000000",
        "CRC_____",
        "2211000000000000",
        "4433000000000000",
        "0500000000000000",
        "cdab000000000000",
        "02000000",
        "00000000",
        "0900000000000000",
        "0100",
        "0000",
        "04000000",
        "03000000",
        "0200",
        "0000",
        "18000000",
        "03000000",
        "02000000",
        "07000000",
        "02000000",
        "01000000",
        "01000000",
    );
    assert_eq!(hex[..24], want[..24]);
    assert_eq!(hex[32..], want[32..]);
    assert_eq!(Frame::decode(&bytes).map(|f| f.head), Ok(head));
}

#[test]
fn every_cut_and_every_flipped_bit_is_an_error() {
    let mut rng = Rng(seed(2));
    for _ in 0..40 {
        let bytes = frame(&mut rng).to_bytes();
        for cut in 0..bytes.len() {
            assert!(Frame::decode(&bytes[..cut]).is_err());
        }
        let mut longer = bytes.clone();
        longer.push(0);
        assert!(Frame::decode(&longer).is_err());
        for _ in 0..200 {
            let mut bad = bytes.clone();
            let at = rng.below(bad.len() as u32 * 8) as usize;
            bad[at / 8] ^= 1 << (at % 8);
            assert!(Frame::decode(&bad).is_err(), "bit {at}");
        }
    }
}

/// Damage with a right checksum: a frame or a typed error, and a frame encodes to something that decodes.
#[test]
fn sealed_garbage_never_panics_and_never_half_parses() {
    let mut rng = Rng(seed(3));
    let (mut parsed, mut refused) = (0, 0);
    for _ in 0..20_000 {
        let mut bytes = frame(&mut rng).to_bytes();
        for _ in 0..1 + rng.below(6) {
            let at = 6 + rng.below(bytes.len() as u32 - 6) as usize;
            bytes[at] = rng.next() as u8;
        }
        if rng.chance(20) {
            bytes.truncate(HEAD_BYTES + rng.below((bytes.len() - HEAD_BYTES) as u32 + 1) as usize);
        }
        let body = (bytes.len() - HEAD_BYTES) as u32;
        bytes[8..12].copy_from_slice(&body.to_le_bytes());
        seal(&mut bytes);
        match Frame::decode(&bytes) {
            Ok(f) => {
                parsed += 1;
                assert_eq!(Frame::decode(&f.to_bytes()), Ok(f));
            }
            Err(_) => refused += 1,
        }
    }
    assert!(parsed > 1000 && refused > 1000, "{parsed} parsed, {refused} refused");
}

#[test]
fn unknown_fields_are_skipped_and_repeated_ones_refused() {
    let f = Frame { head: Head::default(), body: Body::Pong { stamp: 77 } };
    let mut bytes = f.to_bytes();
    bytes.extend_from_slice(&[0x39, 0x30, 0, 0, 3, 0, 0, 0, b'n', b'e', b'w']);
    let body = (bytes.len() - HEAD_BYTES) as u32;
    bytes[8..12].copy_from_slice(&body.to_le_bytes());
    seal(&mut bytes);
    assert_eq!(Frame::decode(&bytes), Ok(f.clone()));
    let again = bytes[HEAD_BYTES..HEAD_BYTES + 16].to_vec();
    bytes.extend_from_slice(&again);
    let body = (bytes.len() - HEAD_BYTES) as u32;
    bytes[8..12].copy_from_slice(&body.to_le_bytes());
    seal(&mut bytes);
    assert_eq!(Frame::decode(&bytes), Err(FrameError::Repeated { tag: 1 }));
}

#[test]
fn another_version_is_recognised_by_its_header() {
    let mut bytes =
        Frame { head: Head { from: Incarnation(5), ..Head::default() }, body: Body::Announce }.to_bytes();
    bytes[4] = 2;
    seal(&mut bytes);
    assert_eq!(Frame::decode(&bytes), Err(FrameError::Version { version: 2, from: Incarnation(5) }));
}

#[test]
fn counts_are_checked_before_anything_is_allocated() {
    let f =
        Frame { head: Head::default(), body: Body::Topup { from: 0, pages: vec![1, 2], window: Vec::new() } };
    let mut bytes = f.to_bytes();
    let at = HEAD_BYTES + 12 + 8;
    let mut with = |total: u32, runs: u32, n: u32| {
        bytes[at..at + 4].copy_from_slice(&total.to_le_bytes());
        bytes[at + 4..at + 8].copy_from_slice(&runs.to_le_bytes());
        bytes[at + 12..at + 16].copy_from_slice(&n.to_le_bytes());
        seal(&mut bytes);
        Frame::decode(&bytes)
    };
    assert!(with(2, 1, 2).is_ok());
    assert!(matches!(with(u32::MAX, 1, u32::MAX), Err(FrameError::Count { .. })));
    assert!(matches!(with(2, u32::MAX, 2), Err(FrameError::Count { .. })));
    assert!(with(PAGES_MAX as u32, 1, u32::MAX).is_err());
    assert!(matches!(with(2, 1, 0), Err(FrameError::Count { .. })));
    assert!(matches!(with(3, 1, 2), Err(FrameError::Count { .. })));
    let mut head = vec![0u8; HEAD_BYTES];
    head[..4].copy_from_slice(b"SWPD");
    head[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(frame_len(&head), Err(FrameError::TooLong(u32::MAX)));
    assert_eq!(frame_len(&head[..10]), Ok(None));
}
