use super::*;
use crate::pd::grant::How;

#[test]
fn the_worked_example_of_the_ring() {
    let mut r = Ring::new(100);
    let (a, b, c) = (r.alloc(60).unwrap(), r.alloc(30).unwrap(), r.alloc(20).unwrap());
    assert_eq!((a, b, c), (0, 60, 100));
    assert!(!may_write(c, 20, r.tail(), 100));
    r.free(a);
    assert!(may_write(c, 20, r.tail(), 100));
    let d = r.alloc(50).unwrap();
    assert!(!may_write(d, 50, r.tail(), 100));
    r.free(b);
    assert!(may_write(d, 50, r.tail(), 100));
    r.free(c);
    r.free(d);
    // An empty ring is writable, whatever happened before (sgl#37166).
    let e = r.alloc(70).unwrap();
    assert!(may_write(e, 70, r.tail(), 100));
    assert_eq!((r.alloc(101), r.alloc(0)), (None, None));
}

/// Small rings, every order of frees: two places that are both writable never overlap, and whoever is alone
/// may write.
#[test]
fn writable_places_never_overlap() {
    for size in 1..=8u64 {
        for script in 0..4096u32 {
            let mut r = Ring::new(size);
            let mut live: Vec<(u64, u64)> = Vec::new();
            let mut bits = script;
            for _ in 0..6 {
                let (op, arg) = (bits & 1, u64::from(bits >> 1 & 1));
                bits >>= 2;
                if op == 0 || live.is_empty() {
                    let bytes = 1 + (arg * 2 + u64::from(bits & 1)) % size;
                    live.push((r.alloc(bytes).unwrap(), bytes));
                } else {
                    let at = (arg as usize) % live.len();
                    r.free(live.remove(at).0);
                }
                let tail = r.tail();
                let writable: Vec<_> = live.iter().filter(|l| may_write(l.0, l.1, tail, size)).collect();
                for (i, x) in writable.iter().enumerate() {
                    for y in &writable[i + 1..] {
                        let (xs, ys) = (x.0 % size, y.0 % size);
                        assert!(xs + x.1 <= ys || ys + y.1 <= xs, "{size} {script} {x:?} {y:?}");
                    }
                }
                if let Some(first) = live.iter().min() {
                    assert!(may_write(first.0, first.1, tail, size));
                }
            }
        }
    }
}

const P: [PeerId; 2] = [PeerId(0), PeerId(1)];

fn id(chunk: u32) -> ChunkId {
    ChunkId { key: RoomKey { room: 1, epoch: 1 }, serial: Serial(4), chunk }
}

fn block(bytes: u32) -> Block {
    Block { first: 0, pages: 1, bytes }
}

/// Two writers, three chunks each, a ring for one and a half; the `drop`-th message is lost. Returns steps.
fn exchange(drop: usize, twice: bool) -> usize {
    let mut d = StageReceiver::new(90, 8);
    let mut p = StageSender::new(10);
    let mut scattered: BTreeSet<(PeerId, u32)> = BTreeSet::new();
    let mut written: BTreeSet<(PeerId, u32)> = BTreeSet::new();
    for peer in P {
        p.set_ring(peer, 90);
        (0..3).for_each(|c| p.ask(Time(0), peer, id(c), block(60)));
    }
    let mut sent = 0;
    for step in 0..900u64 {
        let now = Time(step);
        let mut to_d = Vec::new();
        for next in p.poll(now, 1) {
            match next {
                Next::Send(peer, id, body) => to_d.push((peer, id, body)),
                Next::Write(peer, id, _) => {
                    assert!(written.insert((peer, id.chunk)), "written twice");
                    p.written(now, peer, id);
                }
            }
        }
        let mut to_p = Vec::new();
        for (peer, id, body) in to_d {
            sent += 1;
            if sent == drop {
                continue;
            }
            for _ in 0..if twice { 2 } else { 1 } {
                match body {
                    Body::StageAsk { bytes, .. } => {
                        to_p.extend(d.handle_ask(peer, id, block(bytes)).map(|a| (peer, id, a.0)));
                    }
                    Body::StageReady { .. } => match d.handle_ready(peer, id) {
                        Ready::Wait => {}
                        Ready::Taken(body) => to_p.push((peer, id, body)),
                        Ready::Scatter(..) => {
                            assert!(scattered.insert((peer, id.chunk)), "scattered twice");
                            to_p.extend(d.scattered(peer, id).map(|b| (peer, id, b)));
                        }
                    },
                    _ => {}
                }
            }
        }
        for (peer, id, body) in to_p {
            sent += 1;
            if sent == drop {
                continue;
            }
            match body {
                Body::StageGrant { at, tail, .. } => {
                    assert_eq!(p.handle_grant(peer, id, at, tail), Answer::Poll);
                }
                Body::StageTaken { tail, .. } => {
                    p.handle_taken(peer, id, tail);
                }
                _ => {}
            }
        }
        if p.is_empty() {
            assert_eq!((scattered.len(), d.ring().taken()), (6, 0));
            return step as usize;
        }
    }
    panic!("stalled with message {drop} lost: scattered {scattered:?}");
}

/// sgl#29978: any one control message may be lost.
#[test]
fn any_lost_message_only_delays() {
    for drop in 0..120 {
        exchange(drop, false);
        exchange(drop, true);
    }
}

fn place(d: &mut StageReceiver, id: ChunkId, bytes: u32) -> (u64, u64) {
    match d.handle_ask(P[0], id, block(bytes)) {
        Some((Body::StageGrant { at, tail, .. }, _)) => (at, tail),
        other => panic!("{other:?}"),
    }
}

/// sgl#31217, sgl#36893: a failed room gives its places back, with a proof; others go on.
#[test]
fn an_abandoned_room_frees_the_ring() {
    let mut d = StageReceiver::new(100, 8);
    assert_eq!(place(&mut d, id(0), 70), (0, 0));
    let other = ChunkId { serial: Serial(5), ..id(0) };
    let (at, tail) = place(&mut d, other, 70);
    assert!(!may_write(at, 70, tail, 100));
    assert_eq!(d.oldest(), Some(Serial(4)));
    assert_eq!(d.abandon(id(0).key, Serial(4), &Proof::new(Serial(4), How::Acked)), 1);
    assert!(may_write(at, 70, d.ring().tail(), 100));
    // Too large for ever: answered, and takes no place.
    assert_eq!(place(&mut d, id(7), 101).0, u64::MAX);
    assert_eq!((d.ring().taken(), d.oldest()), (1, Some(Serial(5))));
}

/// What is on its way is not sent a second way, and a quiet failure starts over.
#[test]
fn a_refusal_counts_only_before_the_write() {
    let mut p = StageSender::new(10);
    p.set_ring(P[0], 100);
    p.ask(Time(0), P[0], id(0), block(50));
    assert_eq!(p.handle_grant(P[0], id(0), 0, 0), Answer::Poll);
    assert_eq!(p.poll(Time(1), 0).len(), 1, "no buffer, so it only asks again");
    assert_eq!(p.poll(Time(1), 1), [Next::Write(P[0], id(0), 0)]);
    assert_eq!(p.handle_grant(P[0], id(0), u64::MAX, 0), Answer::Poll);
    assert_eq!(p.handle_taken(P[0], id(0), 0), Answer::Poll, "nothing was written yet");
    p.again(Time(2), P[0], id(0));
    assert!(matches!(p.poll(Time(2), 1)[..], [Next::Send(..)]));
    assert_eq!(p.handle_grant(P[0], id(0), u64::MAX, 0), Answer::Unpacked);
    assert!(p.is_empty() && p.poll_timeout().is_none());
}

#[test]
fn a_packed_chunk_keeps_every_byte_in_order() {
    let at = |s, d, len| Copy { src_region: 0, src_off: s, dst_region: 1, dst_off: d, len };
    let p = pack(&[at(100, 7, 5), at(3, 50, 2)]);
    assert_eq!(p.gather, [(0, 100, 0, 5), (0, 3, 5, 2)]);
    assert_eq!(p.scatter, [(0, 1, 7, 5), (5, 1, 50, 2)]);
    assert_eq!(p.bytes, 7);
}
