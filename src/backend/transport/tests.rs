//! The same questions to every transport: do the right bytes land, and does nothing land afterwards.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::inproc::{InprocTarget, InprocWriter};
use super::shm::{ShmTarget, ShmWriter};
use super::tcp::{TcpTarget, TcpWriter};
use super::{Done, Memory, Revoked, Span, Target, TransportError, Writer};
use crate::backend::region::Region;
use crate::pd::plan::Copy;
use crate::pd::receiver::Fence;
use crate::pd::sender::Outcome;
use crate::pd::{Incarnation, PeerId, Serial, Tag, XferId};

/// splitmix64.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u32) -> u32 {
        (((self.next() >> 32) * u64::from(n)) >> 32) as u32
    }
}

fn seed(default: u64) -> u64 {
    let seed = std::env::var("SAPWOOD_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(default);
    println!("SAPWOOD_SEED={seed}");
    seed
}

const D: Incarnation = Incarnation(0xD);
const P: Incarnation = Incarnation(0xA);
const PEER: PeerId = PeerId(3);
const POOL: usize = 4 << 20;

struct Pair {
    writer: Box<dyn Writer>,
    target: Box<dyn Target>,
    src: Memory,
    dst: Memory,
}

fn region(bytes: usize) -> Memory {
    Memory::new(vec![Arc::new(Region::anonymous(bytes).unwrap())])
}

#[expect(unsafe_code, reason = "one thread, between writes")]
fn bytes(m: &Memory, at: u64, len: u64) -> Vec<u8> {
    let mut out = vec![0; len as usize];
    // SAFETY: no write is under way when the tests look.
    unsafe { m.read(0, at, &mut out).unwrap() };
    out
}

#[expect(unsafe_code, reason = "one thread, before writes")]
fn fill(m: &Memory, rng: &mut Rng) {
    let noise: Vec<u8> = (0..POOL / 8).flat_map(|_| rng.next().to_le_bytes()).collect();
    // SAFETY: nothing else uses the memory yet.
    unsafe { m.write(0, 0, &noise).unwrap() };
}

fn pairs(rng: &mut Rng) -> Vec<Pair> {
    let mut out = Vec::new();
    let src = || region(POOL);
    let (s, d) = (src(), region(POOL));
    let target = InprocTarget::new(d.clone());
    let mut writer = InprocWriter::new(P, s.clone()).unwrap();
    writer.introduce(PEER, target.door());
    out.push(Pair { writer: Box::new(writer), target: Box::new(target), src: s, dst: d });
    let s = src();
    let target = ShmTarget::new(D, POOL).unwrap();
    let dst = target.memory();
    out.push(Pair {
        writer: Box::new(ShmWriter::new(s.clone()).unwrap()),
        target: Box::new(target),
        src: s,
        dst,
    });
    let (s, d) = (src(), region(POOL));
    let target = TcpTarget::new(D, IpAddr::V4(Ipv4Addr::LOCALHOST), d.clone()).unwrap();
    out.push(Pair {
        writer: Box::new(TcpWriter::new(P, s.clone())),
        target: Box::new(target),
        src: s,
        dst: d,
    });
    for p in &mut out {
        fill(&p.src, rng);
        let blob = p.target.descriptor();
        p.writer.attach(PEER, D, 0, &blob).unwrap();
    }
    out
}

/// Waits for `n` outcomes. The limit is for a hang only; nothing is measured.
fn wait(w: &mut dyn Writer, n: usize) -> Vec<Done> {
    let (mut done, limit) = (Vec::new(), Instant::now() + Duration::from_secs(60));
    while done.len() < n {
        w.poll(&mut done);
        assert!(Instant::now() < limit, "no outcome: {done:?}");
        std::thread::sleep(Duration::from_micros(200));
    }
    done
}

fn tag(serial: u64) -> Tag {
    Tag::new(D, Serial(serial))
}

fn whole(at: u64, len: u64) -> Vec<Span> {
    vec![Span { region: 0, offset: at, len }]
}

#[test]
fn granted_bytes_land_and_nothing_else_changes() {
    let mut rng = Rng(seed(7));
    for mut p in pairs(&mut rng) {
        let name = p.writer.caps().name;
        let mut want = vec![0u8; POOL];
        for round in 1..=12u64 {
            let (mut copies, mut spans, mut at) = (Vec::new(), Vec::new(), u64::from(rng.below(4096)));
            for _ in 0..1 + rng.below(90) {
                let len = 1 + u64::from(rng.below(60_000));
                let src_off = u64::from(rng.below((POOL as u64 - len) as u32));
                if at + len > POOL as u64 {
                    break;
                }
                copies.push(Copy { src_region: 0, src_off, dst_region: 0, dst_off: at, len });
                spans.push(Span { region: 0, offset: at, len });
                want[at as usize..(at + len) as usize].copy_from_slice(&bytes(&p.src, src_off, len));
                at += len + u64::from(rng.below(300));
            }
            p.target.allow(tag(round), spans).unwrap();
            p.writer.submit(XferId(round), PEER, 0, tag(round), &copies).unwrap();
            let total = copies.iter().map(|c| c.len).sum();
            assert_eq!(
                wait(&mut *p.writer, 1),
                [Done { xfer: XferId(round), outcome: Outcome::Ok { bytes: total } }],
                "{name}"
            );
            p.target.forget(tag(round));
        }
        assert!(bytes(&p.dst, 0, POOL as u64) == want, "{name}");
    }
}

#[test]
fn a_revoked_or_unknown_tag_lands_nowhere() {
    let mut rng = Rng(seed(8));
    for mut p in pairs(&mut rng) {
        let name = p.writer.caps().name;
        let copy = [Copy { src_region: 0, src_off: 0, dst_region: 0, dst_off: 4096, len: 1 << 20 }];
        p.target.allow(tag(1), whole(4096, 1 << 20)).unwrap();
        assert_eq!(p.target.revoke(tag(1)), Revoked::Proven, "{name}");
        for (x, t) in [(1, tag(1)), (2, tag(2)), (3, Tag::new(D, Serial(1 + (1 << 16))))] {
            p.writer.submit(XferId(x), PEER, 0, t, &copy).unwrap();
            assert_eq!(
                wait(&mut *p.writer, 1),
                [Done { xfer: XferId(x), outcome: Outcome::FailedQuiet }],
                "{name}"
            );
        }
        assert!(bytes(&p.dst, 0, POOL as u64).iter().all(|b| *b == 0), "{name}");
        // The next grant in the same place works, also where slots are shared.
        p.target.allow(tag(1 + (1 << 16)), whole(4096, 1 << 20)).unwrap();
        p.writer.submit(XferId(9), PEER, 0, tag(1 + (1 << 16)), &copy).unwrap();
        assert_eq!(wait(&mut *p.writer, 1)[0].outcome, Outcome::Ok { bytes: 1 << 20 }, "{name}");
    }
}

/// Takes grants back in the middle of writes, again and again: what is there when the revocation returns
/// never changes afterwards.
#[test]
fn nothing_lands_after_a_proven_revocation() {
    let mut rng = Rng(seed(9));
    for mut p in pairs(&mut rng) {
        let name = p.writer.caps().name;
        let (mut cut, mut whole_writes) = (0, 0);
        // Until some writes were cut in the middle, however fast the machine is.
        for round in 1..=4000u64 {
            if round > 40 && cut > 2 {
                break;
            }
            let len = 3 << 20;
            let copies = [Copy { src_region: 0, src_off: round % 1000 * 64, dst_region: 0, dst_off: 0, len }];
            p.target.allow(tag(round), whole(0, len)).unwrap();
            p.writer.submit(XferId(round), PEER, 0, tag(round), &copies).unwrap();
            std::thread::sleep(Duration::from_micros(u64::from(rng.below(1500))));
            while p.target.revoke(tag(round)) == Revoked::Pending {
                std::thread::yield_now();
            }
            let before = bytes(&p.dst, 0, len);
            let done = wait(&mut *p.writer, 1);
            assert!(bytes(&p.dst, 0, len) == before, "{name} round {round}: landed after it was revoked");
            match done[0].outcome {
                Outcome::Ok { .. } => whole_writes += 1,
                Outcome::FailedQuiet => cut += 1,
                Outcome::FailedUnknown | Outcome::SourcesFree => panic!("{name}: nothing here is unknown"),
            }
        }
        println!("{name}: {cut} cut, {whole_writes} whole");
        assert!(cut > 0, "{name}: no write was ever cut");
    }
}

#[test]
fn a_copy_outside_the_grant_is_refused_where_the_target_mediates() {
    let mut rng = Rng(seed(10));
    for mut p in pairs(&mut rng) {
        if p.target.caps().name == "shm" {
            continue; // The writer maps the pool and is trusted there; the module says so.
        }
        p.target.allow(tag(1), whole(4096, 4096)).unwrap();
        for (x, at, len) in [(1, 4095, 2), (2, 4096, 4097), (3, POOL as u64 - 8, 8)] {
            let copy = [Copy { src_region: 0, src_off: 0, dst_region: 0, dst_off: at, len }];
            p.writer.submit(XferId(x), PEER, 0, tag(1), &copy).unwrap();
            assert_eq!(wait(&mut *p.writer, 1)[0].outcome, Outcome::FailedQuiet);
        }
        assert!(bytes(&p.dst, 8192, 4096).iter().all(|b| *b == 0));
        // One that begins inside its grant and leaves it, and one that never was inside; the next is none the worse.
        p.target.allow(tag(1), whole(1 << 20, 1 << 20)).unwrap();
        for (x, at, len) in [(4, 1 << 20, 3 << 20), (5, 0, 3 << 20)] {
            let copy = [Copy { src_region: 0, src_off: 0, dst_region: 0, dst_off: at, len }];
            p.writer.submit(XferId(x), PEER, 0, tag(1), &copy).unwrap();
            assert_eq!(wait(&mut *p.writer, 1)[0].outcome, Outcome::FailedQuiet);
            let outside = [bytes(&p.dst, 8192, (1 << 20) - 8192), bytes(&p.dst, 2 << 20, 2 << 20)];
            assert!(outside.iter().flatten().all(|b| *b == 0));
        }
        let copy = [Copy { src_region: 0, src_off: 9, dst_region: 0, dst_off: 1 << 20, len: 1 << 20 }];
        p.writer.submit(XferId(6), PEER, 0, tag(1), &copy).unwrap();
        assert_eq!(wait(&mut *p.writer, 1)[0].outcome, Outcome::Ok { bytes: 1 << 20 });
        assert!(bytes(&p.dst, 1 << 20, 1 << 20) == bytes(&p.src, 9, 1 << 20));
    }
}

#[test]
fn a_fence_ends_the_old_way_and_a_new_attachment_settles_it() {
    let (src, dst) = (region(POOL), region(POOL));
    let mut target = TcpTarget::new(D, IpAddr::V4(Ipv4Addr::LOCALHOST), dst.clone()).unwrap();
    let mut writer = TcpWriter::new(P, src);
    writer.attach(PEER, D, 0, &target.descriptor()).unwrap();
    target.allow(tag(1), whole(0, POOL as u64)).unwrap();
    let copy = [Copy { src_region: 0, src_off: 0, dst_region: 0, dst_off: 0, len: POOL as u64 }];
    writer.submit(XferId(1), PEER, 0, tag(1), &copy).unwrap();
    assert_eq!(wait(&mut writer, 1)[0].outcome, Outcome::Ok { bytes: POOL as u64 });
    assert_eq!(target.fence(P, 0), Fence::Proven);
    writer.submit(XferId(2), PEER, 0, tag(1), &copy).unwrap();
    let mut done = wait(&mut writer, 1);
    let first = done[0].outcome;
    assert!(matches!(first, Outcome::FailedUnknown | Outcome::FailedQuiet), "{first:?}");
    if first == Outcome::FailedUnknown && done.len() == 1 {
        done.extend(wait(&mut writer, 1));
    }
    // The threads that read the sources have stopped, whatever became of the bytes.
    assert!(done.iter().skip(1).all(|d| d.outcome == Outcome::SourcesFree), "{done:?}");
    writer.attach(PEER, D, 1, &target.descriptor()).unwrap();
    if first == Outcome::FailedUnknown {
        assert_eq!(wait(&mut writer, 1), [Done { xfer: XferId(2), outcome: Outcome::FailedQuiet }]);
    }
    assert!(matches!(writer.submit(XferId(3), PEER, 0, tag(1), &copy), Err(TransportError::NotAttached(_))));
    writer.submit(XferId(4), PEER, 1, tag(1), &copy).unwrap();
    assert_eq!(wait(&mut writer, 1)[0].outcome, Outcome::Ok { bytes: POOL as u64 });
}

/// The target is gone for good in the middle of writes: their end stays unknown, and their sources come back.
#[test]
fn sources_come_back_from_writes_to_a_target_that_is_gone() {
    let mut unknown = 0;
    for round in 0..400u64 {
        let target = TcpTarget::new(D, IpAddr::V4(Ipv4Addr::LOCALHOST), region(POOL)).unwrap();
        let mut writer = TcpWriter::new(P, region(POOL));
        writer.attach(PEER, D, 0, &target.descriptor()).unwrap();
        let copy = [Copy { src_region: 0, src_off: 0, dst_region: 0, dst_off: 0, len: POOL as u64 }];
        writer.submit(XferId(1), PEER, 0, tag(1), &copy).unwrap();
        std::thread::sleep(Duration::from_micros(round % 40 * 100));
        drop(target);
        match wait(&mut writer, 1)[..] {
            [Done { outcome: Outcome::FailedUnknown, .. }] => {
                unknown += 1;
                assert_eq!(wait(&mut writer, 1), [Done { xfer: XferId(1), outcome: Outcome::SourcesFree }]);
            }
            [Done { outcome: Outcome::FailedUnknown, .. }, Done { outcome: Outcome::SourcesFree, .. }] => {
                unknown += 1
            }
            ref settled => assert_eq!(settled.len(), 1),
        }
        if round > 20 && unknown > 3 {
            return;
        }
    }
    panic!("no write was cut in 400 rounds");
}

/// Descriptors come from a peer: none of them may do more than fail.
#[test]
fn odd_descriptors_and_copies_are_errors() {
    let mut rng = Rng(seed(11));
    for mut p in pairs(&mut rng) {
        let name = p.writer.caps().name;
        if name != "inproc" {
            let garbage: [&[u8]; 5] = [b"", b"x", &[255; 24], b"999.1.1.1:80", &[0; 32]];
            for blob in garbage {
                assert!(p.writer.attach(PeerId(8), D, 0, blob).is_err(), "{name} {blob:?}");
            }
        }
        let far = [Copy { src_region: 0, src_off: u64::MAX - 3, dst_region: 0, dst_off: 0, len: 8 }];
        p.target.allow(tag(1), whole(0, 64)).unwrap();
        let refused = p.writer.submit(XferId(1), PEER, 0, tag(1), &far).is_err()
            || wait(&mut *p.writer, 1)[0].outcome == Outcome::FailedQuiet;
        assert!(refused, "{name}");
        assert!(p.writer.submit(XferId(2), PeerId(77), 0, tag(1), &far).is_err(), "{name}");
    }
    // A process that is not the one the descriptor was made for.
    let target = ShmTarget::new(D, 4096).unwrap();
    let mut w = ShmWriter::new(region(64)).unwrap();
    assert!(w.attach(PEER, Incarnation(99), 0, &target.descriptor()).is_err());
}
