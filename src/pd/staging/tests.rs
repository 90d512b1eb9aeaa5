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

/// Two writers, three chunks, a ring for one and a half; the `drop`-th message is lost. Returns steps.
fn exchange(drop: usize, twice: bool) -> usize {
    let mut d = StageReceiver::new(90, 8);
    let mut writers: Vec<StageSender> = (0..2).map(|w| StageSender::new(w, 10)).collect();
    let (mut scattered, mut written): (Vec<u32>, BTreeSet<(PeerId, u32)>) = (Vec::new(), BTreeSet::new());
    for (i, w) in writers.iter_mut().enumerate() {
        w.set_ring(P[i], 90);
        (0..3).for_each(|c| w.ask(Time(0), P[i], id(c), 60));
    }
    let mut sent = 0;
    for step in 0..400u64 {
        let now = Time(step);
        let mut to_d = Vec::new();
        for (i, w) in writers.iter_mut().enumerate() {
            for next in w.poll(now) {
                match next {
                    Next::Send(_, id, body) => to_d.push((i, id, body)),
                    Next::Write(p, id, _) => {
                        assert!(written.insert((p, id.chunk)), "written twice");
                        w.written(now, p, id);
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
        let mut to_p = Vec::new();
        for (i, id, body) in to_d {
            sent += 1;
            if sent == drop {
                continue;
            }
            for _ in 0..if twice { 2 } else { 1 } {
                match body {
                    Body::StageAsk { bytes, .. } => {
                        to_p.extend(d.handle_ask(P[i], id, bytes, true).map(|b| (P[i], id, b)));
                    }
                    Body::StageReady { writer, .. } => match d.handle_ready(id, writer, 2) {
                        Ready::Wait => {}
                        Ready::Taken(body) => to_p.push((P[i], id, body)),
                        Ready::Scatter(s) => {
                            assert!(!scattered.contains(&s.id.chunk), "scattered twice");
                            scattered.push(s.id.chunk);
                            to_p.extend(d.scattered(s.id).into_iter().map(|(p, b)| (p, s.id, b)));
                        }
                    },
                    _ => {}
                }
            }
        }
        for (p, id, body) in to_p {
            sent += 1;
            if sent == drop {
                continue;
            }
            let w = &mut writers[p.0 as usize];
            match body {
                Body::StageGrant { at, tail, .. } => drop_next(w.handle_grant(p, id, at, tail)),
                Body::StageTaken { tail, .. } => drop_next(w.handle_taken(p, id, tail)),
                _ => {}
            }
        }
        if writers.iter().all(StageSender::is_empty) {
            assert_eq!((scattered.len(), d.ring().taken()), (3, 0));
            return step as usize;
        }
    }
    panic!("stalled with message {drop} lost: scattered {scattered:?}");
}

fn drop_next(n: Option<Next>) {
    assert!(!matches!(n, Some(Next::TooLarge(..))));
}

/// sgl#29978: any one control message may be lost.
#[test]
fn any_lost_message_only_delays() {
    for drop in 0..80 {
        exchange(drop, false);
        exchange(drop, true);
    }
}

/// sgl#31217, sgl#36893: a failed room gives its places back, with a proof; others go on.
#[test]
fn an_abandoned_room_frees_the_ring() {
    let mut d = StageReceiver::new(100, 8);
    assert!(matches!(d.handle_ask(P[0], id(0), 70, true), Some(Body::StageGrant { at: 0, .. })));
    let other = ChunkId { serial: Serial(5), ..id(0) };
    let Some(Body::StageGrant { at, tail, .. }) = d.handle_ask(P[0], other, 70, true) else { panic!() };
    assert!(!may_write(at, 70, tail, 100));
    assert_eq!(d.abandon(id(0).key, Serial(4), &Proof::new(Serial(4), How::Acked)), 1);
    assert!(may_write(at, 70, d.ring().tail(), 100));
    // Too large for ever, and a dead grant: both are answered, neither takes a place.
    assert!(matches!(d.handle_ask(P[0], id(7), 101, true), Some(Body::StageGrant { at: u64::MAX, .. })));
    assert!(matches!(d.handle_ask(P[0], id(8), 10, false), Some(Body::StageTaken { .. })));
    assert_eq!(d.ring().taken(), 1);
}

#[test]
fn a_packed_chunk_keeps_every_byte_in_order() {
    let at = |s, d, len| Copy { src_region: 0, src_off: s, dst_region: 1, dst_off: d, len };
    let p = pack(&[at(100, 7, 5), at(3, 50, 2)]);
    assert_eq!(p.gather, [(0, 100, 0, 5), (0, 3, 5, 2)]);
    assert_eq!(p.scatter, [(0, 1, 7, 5), (5, 1, 50, 2)]);
    assert_eq!(p.bytes, 7);
}
