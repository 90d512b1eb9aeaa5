//! Public bug reports as scenarios, with the ends they should have had. S7 and S8 (layouts) are in `plan`.

use sapwood::base::Time;
use sapwood::pd::agree::{Vote, combine};
use sapwood::pd::grant::{Destination, Granted, How};
use sapwood::pd::receiver::{Fence, ReceiverConfig, RecvSpec, Refused};
use sapwood::pd::sender::{Event, Outcome, SendSpec, SenderConfig, Tail};
use sapwood::pd::staging::{StagingBuffers, StagingRing};
use sapwood::pd::topo::Topology;
use sapwood::pd::wire::{Body, Frame, Head, Metadata, Quiet, Register, Status};
use sapwood::pd::{Incarnation, PeerId, Reason, Serial};

use crate::net::{LATENCY, MS, Net, PAGES, SEC, key, layout, prompt};

const OK: fn(&Frame) -> bool = |f| matches!(f.body, Body::AbortReply(Quiet::Drained));

#[test]
fn a_room_arrives_and_everything_comes_back() {
    let mut n = Net::simple();
    n.prefill(key(1, 1), 9);
    n.decode(0, key(1, 1), 9, 10);
    n.run(SEC);
    assert_eq!(n.outcome(0, key(1, 1)), Some(&Ok(vec![1, 1])));
    assert_eq!(
        n.p_events,
        [(0, Event::Done { key: key(1, 1), outcome: Ok(()) }), (0, Event::Unpin { key: key(1, 1) })]
    );
    let (p, d) = (n.ps(0).stats(), n.ds(0).stats());
    assert_eq!((p.rooms, p.in_flight, d.rooms, d.grants), (0, 0, 0, 0));
    assert_eq!(p.bytes_written, 5 * 4 * 2 * 4 * 8);
}

/// S1 (sgl#24527, sgl#32564, sgl#35049): pages of an aborted room stay out while its write is under way.
#[test]
fn s1_no_page_is_reused_before_the_write_ends() {
    let mut n = Net::simple();
    n.auto = false;
    n.prefill(key(1, 1), 62);
    n.decode(0, key(1, 1), 62, 15);
    n.run(100 * MS);
    assert_eq!(n.posts.len(), 1);
    n.run(2 * SEC);
    n.abort(0, key(1, 1));
    assert_eq!(n.outcome(0, key(1, 1)), Some(&Err(Reason::AbortedByDecode)));
    n.run(4 * SEC);
    assert!(n.released.is_empty(), "released with the write under way");
    let post = n.posts[0].clone();
    let ended = n.now;
    n.finish_ok(&post);
    n.run(3 * LATENCY);
    assert_eq!(n.released_how(0, key(1, 1)), Some(How::Acked));
    assert!(n.now.since(ended) <= 3 * LATENCY);
}

/// S2 (sgl#38961, sgl#40645): two decode ranks share a prefill rank; each is acknowledged once, after the end.
#[test]
fn s2_every_rank_gets_its_acknowledgement_after_the_write() {
    let d = Topology { tp: 2, ..Topology::single(2) };
    let mut n = Net::new(Topology::single(2), d, SenderConfig::default(), ReceiverConfig::default());
    n.auto = false;
    n.prefill(key(1, 1), 8);
    n.decode(0, key(1, 1), 8, 0);
    n.decode(1, key(1, 1), 8, 0);
    n.run(50 * MS);
    assert_eq!(n.posts.len(), 2);
    n.abort(0, key(1, 1));
    n.run(SEC);
    // The room is over on the prefill side and cleared for the scheduler; the second ABORT comes after.
    assert!(n.p_events.iter().any(|e| matches!(e.1, Event::Done { .. })));
    n.run(SEC);
    let posts = n.posts.clone();
    n.finish_ok(&posts[0]);
    n.run(10 * MS);
    assert_eq!(n.released.len(), 1);
    n.finish_ok(&posts[1]);
    n.run(10 * MS);
    assert_eq!(n.released.len(), 2);
    assert!(n.released.iter().all(|r| r.2 == How::Acked));
    assert!(matches!(n.p_events.last(), Some((0, Event::Unpin { .. }))));
}

/// S3 (sgl#36033, sgl#36612, sgl#30329): a failed write reaches every destination at once, and latecomers.
#[test]
fn s3_a_prefill_failure_is_pushed_with_its_reason() {
    let d = Topology { tp: 2, ..Topology::single(2) };
    let cfg = SenderConfig { chunk_pages_max: 2, retries_max: 0, ..SenderConfig::default() };
    let mut n = Net::new(Topology::single(2), d, cfg, ReceiverConfig::default());
    n.auto = false;
    n.prefill(key(1, 1), 12);
    n.decode(0, key(1, 1), 12, 0);
    n.decode(1, key(1, 1), 12, 0);
    n.run(50 * MS);
    let posts = n.posts.clone();
    n.finish_ok(&posts[0]);
    n.finish(&posts[1], Outcome::FailedQuiet);
    let at = n.now;
    n.run(2 * LATENCY);
    for rank in 0..2 {
        assert_eq!(n.outcome(rank, key(1, 1)), Some(&Err(Reason::TransferFailed)));
    }
    assert!(n.now.since(at) < SEC);
    // A second request for the same room after its end is told at once.
    let late = n.saved(|b| matches!(b, Body::Metadata(_)));
    let before = n.sent.len();
    n.hand(late[0].0, late[0].1, &late[0].2);
    let reply = &n.sent[before..];
    assert!(reply.iter().any(|s| matches!(s.2.body, Body::Status(Status::Failed(_)))), "{reply:?}");
}

/// S4 (sgl#26912, sgl#31030, sgl#31869): stages decide from one vector; what happens after it waits.
#[test]
fn s4_an_abort_after_the_vector_waits_for_the_next() {
    let p = Topology { stage_layers: vec![1, 1], ..Topology::single(2) };
    let cfg_p = SenderConfig { collective: true, ..SenderConfig::default() };
    let mut n = Net::new(p, Topology::single(2), cfg_p, ReceiverConfig::default());
    n.prefill(key(1, 1), 8);
    n.decode(0, key(1, 1), 8, 0);
    n.run(100 * MS);
    assert_eq!(n.outcome(0, key(1, 1)), Some(&Ok(vec![1, 1])));
    let keys = [key(1, 1), key(2, 1)];
    for i in 0..2 {
        let now = n.now;
        n.ps(i).open(now, key(2, 1), SendSpec { prompt: prompt(4) }).unwrap();
    }
    let ballots: Vec<_> = (0..2).map(|i| n.ps(i).propose(&keys)).collect();
    let agreed = combine(ballots[0].votes(), ballots[1].votes()).unwrap();
    assert_eq!(agreed, [Vote::Done, Vote::Pending]);
    // The abort reaches one stage between the vote and the decision.
    let now = n.now;
    n.ps(1).abort(now, key(2, 1)).unwrap();
    for (i, b) in ballots.into_iter().enumerate() {
        n.ps(i).decide(now, b, &agreed).unwrap();
    }
    n.drain();
    let over = |n: &Net, k| {
        n.p_events.iter().filter(|e| matches!(&e.1, Event::Done { key, .. } if *key == k)).count()
    };
    assert_eq!((over(&n, key(1, 1)), over(&n, key(2, 1))), (2, 0));
    let ballots: Vec<_> = (0..2).map(|i| n.ps(i).propose(&keys[1..])).collect();
    let agreed = combine(ballots[0].votes(), ballots[1].votes()).unwrap();
    assert_eq!(agreed, [Vote::Failed]);
    for (i, b) in ballots.into_iter().enumerate() {
        n.ps(i).decide(now, b, &agreed).unwrap();
    }
    n.drain();
    n.run(SEC);
    assert_eq!(over(&n, key(2, 1)), 2);
    assert!((0..2).all(|i| n.ps(i).stats().rooms == 0));
    let now = n.now;
    let b = n.ps(0).propose(&keys);
    assert!(n.ps(0).decide(now, b, &[Vote::Done]).is_err());
}

/// S5 (sgl#31144): a silent prefill rank is found within four intervals; its successor is used at once.
#[test]
fn s5_a_dead_peer_is_found_in_time_and_its_successor_works() {
    let mut n = Net::simple();
    n.auto = false;
    n.prefill(key(1, 1), 8);
    n.decode(0, key(1, 1), 8, 0);
    n.run(500 * MS);
    n.p[0] = None;
    let died = n.now;
    while n.outcome(0, key(1, 1)).is_none() {
        n.run(10 * MS);
        assert!(n.now.since(died) <= 4 * SEC + 20 * MS, "not found in time");
    }
    assert_eq!(n.outcome(0, key(1, 1)), Some(&Err(Reason::PeerDead)));
    // No fence can be proved here, so the pages are quarantined and stay.
    n.run(60 * SEC);
    assert_eq!((n.released.len(), n.ds(0).stats().quarantine_units), (0, 4));
    n.auto = true;
    n.start_p(0);
    n.run(3 * SEC);
    n.prefill(key(2, 1), 8);
    n.decode(0, key(2, 1), 8, 20);
    n.run(SEC);
    assert_eq!(n.outcome(0, key(2, 1)), Some(&Ok(vec![1, 2])));
}

/// I9 in a group: one decode rank has all its bytes of a room, then the prefill instance is replaced, and only
/// now the other rank opens the room, with a process that never heard of it. The rank that is complete knew
/// the one that is gone: it gives the group one tick to end well, and fails the room at the next.
#[test]
fn i9_a_complete_rank_fails_the_room_its_group_cannot_finish() {
    let both = Topology { tp: 2, ..Topology::single(2) };
    let collective = ReceiverConfig { collective: true, ..ReceiverConfig::default() };
    let mut n = Net::new(both.clone(), both, SenderConfig::default(), collective);
    n.prefill(key(1, 1), 8);
    n.decode(0, key(1, 1), 8, 0);
    n.run(100 * MS);
    let tick = |n: &mut Net| {
        let ballots: Vec<_> = (0..2).map(|i| n.ds(i).propose(&[key(1, 1)])).collect();
        let agreed = combine(ballots[0].votes(), ballots[1].votes()).unwrap();
        for (i, b) in ballots.into_iter().enumerate() {
            let now = n.now;
            n.ds(i).decide(now, b, &agreed).unwrap();
        }
        n.drain();
        agreed[0]
    };
    // With the peer there the group waits as long as it takes.
    assert_eq!([tick(&mut n), tick(&mut n), tick(&mut n)], [Vote::Pending; 3]);
    n.p = vec![None, None];
    n.run(500 * MS);
    (0..2).for_each(|i| n.start_p(i));
    n.run(3 * SEC);
    n.decode(1, key(1, 1), 8, 20);
    n.run(100 * MS);
    assert_eq!([tick(&mut n), tick(&mut n)], [Vote::Pending, Vote::Failed]);
    n.run(5 * SEC);
    for rank in 0..2 {
        assert_eq!(n.outcome(rank, key(1, 1)), Some(&Err(Reason::GroupFailed)));
        assert_eq!(n.ds(rank).stats().grants, 0, "rank {rank} keeps the pages");
    }
}

/// A fence of a peer that lives, for the sake of another room: what is complete here has all its bytes, and its sibling
/// may still get its own, so the group waits on.
#[test]
fn a_fence_of_a_living_peer_fails_no_room_that_is_complete_here() {
    let both = Topology { tp: 2, ..Topology::single(2) };
    let collective = ReceiverConfig { collective: true, ..ReceiverConfig::default() };
    let mut n = Net::new(both.clone(), both, SenderConfig::default(), collective);
    n.prefill(key(1, 1), 8);
    n.decode(0, key(1, 1), 8, 0);
    n.run(100 * MS);
    let (now, inc) = (n.now, n.ds(0).incarnation_of(PeerId(0)));
    n.ds(0).handle_fence(now, PeerId(0), inc, Fence::Proven);
    n.drain();
    for _ in 0..3 {
        let ballot = n.ds(0).propose(&[key(1, 1)]);
        assert_eq!(ballot.votes(), [Vote::Done]);
        n.ds(0).decide(now, ballot, &[Vote::Pending]).unwrap();
    }
}

/// The other end of it: what all ranks have when the peer goes is a success, whenever the group meets.
#[test]
fn a_room_that_is_complete_everywhere_outlives_its_peer() {
    let both = Topology { tp: 2, ..Topology::single(2) };
    let collective = ReceiverConfig { collective: true, ..ReceiverConfig::default() };
    let mut n = Net::new(both.clone(), both, SenderConfig::default(), collective);
    n.prefill(key(1, 1), 8);
    for rank in 0..2 {
        n.decode(rank, key(1, 1), 8, 0);
    }
    n.run(100 * MS);
    n.p = vec![None, None];
    n.run(10 * SEC);
    let ballots: Vec<_> = (0..2).map(|i| n.ds(i).propose(&[key(1, 1)])).collect();
    for (i, b) in ballots.into_iter().enumerate() {
        let now = n.now;
        n.ds(i).decide(now, b, &[Vote::Done]).unwrap();
    }
    n.drain();
    for rank in 0..2 {
        assert!(matches!(n.outcome(rank, key(1, 1)), Some(Ok(_))));
    }
}

/// The same with a transport that can fence: the pages come back with that proof.
#[test]
fn a_fence_releases_what_a_dead_peer_held() {
    let mut n = Net::simple();
    n.auto = false;
    n.fence = Some(Fence::Proven);
    n.prefill(key(1, 1), 8);
    n.decode(0, key(1, 1), 8, 0);
    n.run(500 * MS);
    n.p[0] = None;
    n.run(5 * SEC);
    assert_eq!(n.released_how(0, key(1, 1)), Some(How::Fenced));
}

/// I10: a peer whose scheduler does nothing for minutes is alive while its control channel answers.
#[test]
fn a_slow_peer_is_not_dead() {
    let mut n = Net::simple();
    n.auto = false;
    n.prefill(key(1, 1), 8);
    n.decode(0, key(1, 1), 8, 0);
    n.run(300 * SEC);
    assert_eq!(n.outcome(0, key(1, 1)), None);
    assert_eq!((n.ds(0).stats().link.deaths, n.ps(0).stats().link.deaths), (0, 0));
}

/// S6 (sgl#31966): bad frames are counted and touch nothing; a peer that does not fit affects itself only.
#[test]
fn s6_malformed_frames_and_an_incompatible_peer() {
    let mut n = Net::simple();
    let mut bad = 0u64;
    for r in 0..100 {
        n.prefill(key(r, 1), 2);
        n.decode(0, key(r, 1), 2, (r % 64) as u32);
        let good = n.sent[n.sent.len() - 1].2.to_bytes();
        let mut bytes = good.clone();
        bytes[30] ^= 1;
        for b in [&b"x"[..], &bytes, &good[..good.len() - 1], &[0xFF; 300]] {
            n.hand(Net::d_peer(0), PeerId(0), b);
            n.hand(PeerId(0), Net::d_peer(0), b);
            bad += 1;
        }
        n.run(5 * MS);
    }
    let stranger = Topology::single(2);
    let mut l = layout(&stranger, Default::default(), PAGES);
    l.page_tokens = 4;
    l.entries.iter_mut().for_each(|e| e.unit_bytes *= 2);
    l.regions[0] *= 2;
    let body = Body::Register(Box::new(Register {
        instance: 9,
        topo: stranger,
        rank: Default::default(),
        layout: l,
        attach: 0,
        floor: Serial(0),
        blob: Vec::new(),
        ring: None,
    }));
    let head = Head { from: Incarnation(4242), sequence: 1, ..Head::default() };
    let from = PeerId(300);
    let before = n.sent.len();
    let now = n.now;
    n.ps(0).handle_frame(now, from, &Frame { head, body }.to_bytes());
    let reply = n.ps(0).poll_transmit().map(|(to, b)| (to, Frame::decode(&b).unwrap().body));
    assert!(
        matches!(&reply, Some((to, Body::RegisterReply(r))) if *to == from && format!("{r:?}").contains("PageTokens")),
        "{reply:?}"
    );
    assert_eq!(n.sent.len(), before);
    n.run(SEC);
    assert_eq!(n.done.iter().filter(|d| d.2.is_ok()).count(), 100);
    assert_eq!((n.ps(0).stats().link.malformed, n.ds(0).stats().link.malformed), (bad, bad));
    assert_eq!(n.ps(0).stats().peers_refused, 1);
}

fn metadata(from: Incarnation, to: Incarnation, room: u64, serial: u64) -> Vec<u8> {
    let m = Metadata {
        prompt: prompt(2),
        full: vec![(room % 64) as u32],
        floor: Serial(1),
        ..Metadata::default()
    };
    let head = Head { from, to, sequence: 0, key: key(room, 1), serial: Serial(serial) };
    Frame { head, body: Body::Metadata(Box::new(m)) }.to_bytes()
}

/// S10 (sgl#39428, sgl#39623): a million rooms nobody opens.
#[test]
fn s10_orphans_are_bounded_and_told() {
    let mut n = Net::simple();
    n.prefill(key(1 << 40, 1), 2);
    n.decode(0, key(1 << 40, 1), 2, 0);
    n.run(SEC);
    let (d, p) = (n.ds(0).incarnation(), n.ps(0).incarnation());
    let now = n.now;
    for i in 0..1_000_000u64 {
        let bytes = metadata(d, p, i, i + 10);
        let m = n.ps(0);
        m.handle_frame(now, Net::d_peer(0), &bytes);
        while m.poll_transmit().is_some() {}
    }
    let s = n.ps(0).stats();
    assert!(s.orphans <= 4096 && s.tombs <= 65_536 && s.rooms == 0, "{s:?}");
    // One of those that are kept still works when the sender comes within the grace.
    n.prefill_on(0, key(7, 1), 2);
    assert_eq!(n.posts.len(), 2);
    n.run(31 * SEC);
    assert_eq!(n.ps(0).stats().orphans, 0);
    // After the grace the room is closed: who asks is told at once.
    let late = metadata(d, p, 8, 2_000_000);
    let now = n.now;
    n.ps(0).handle_frame(now, Net::d_peer(0), &late);
    let mut answers = Vec::new();
    while let Some((_, b)) = n.ps(0).poll_transmit() {
        answers.push(Frame::decode(&b).unwrap().body);
    }
    assert!(answers.contains(&Body::Status(Status::Failed(Reason::NoSender))), "{answers:?}");
}

/// S11 (sgl#33789, sgl#34289): another process behind a stable address, inside the heartbeat window.
#[test]
fn s11_a_replaced_peer_is_noticed_by_its_incarnation() {
    let mut n = Net::simple();
    n.auto = false;
    n.prefill(key(1, 1), 8);
    n.decode(0, key(1, 1), 8, 0);
    n.run(200 * MS);
    n.start_p(0);
    n.run(1500 * MS);
    assert_eq!(n.outcome(0, key(1, 1)), Some(&Err(Reason::PeerReplaced)));
    n.auto = true;
    n.prefill(key(2, 1), 8);
    n.decode(0, key(2, 1), 8, 20);
    n.run(SEC);
    assert_eq!(n.outcome(0, key(2, 1)), Some(&Ok(vec![1, 2])));
}

/// The other way round: frames of earlier processes that were long under way, of any kind, replace nobody on either side.
#[test]
fn s11_a_late_frame_of_an_earlier_life_replaces_nobody() {
    let mut n = Net::simple();
    n.prefill(key(1, 1), 8);
    n.decode(0, key(1, 1), 8, 0);
    n.run(2 * SEC);
    let old = n.saved(|_| true);
    n.start_p(0);
    n.start_d(0);
    n.auto = false;
    n.prefill(key(2, 1), 8);
    n.decode(0, key(2, 1), 8, 20);
    n.run(1500 * MS);
    let deaths = (n.ps(0).stats().link.deaths, n.ds(0).stats().link.deaths);
    assert!(old.len() > 10);
    for (from, to, bytes) in &old {
        n.hand(*from, *to, bytes);
    }
    n.run(1500 * MS);
    assert_eq!((n.ps(0).stats().link.deaths, n.ds(0).stats().link.deaths), deaths);
    assert_eq!(n.outcome(0, key(2, 1)), None);
    let post = n.posts.last().unwrap().clone();
    n.finish_ok(&post);
    n.run(100 * MS);
    assert_eq!(n.outcome(0, key(2, 1)), Some(&Ok(vec![1, 2])));
}

/// S12 (sgl#27374, sgl#26394) and I7, I8: nothing of an earlier life acts on a later one of the same room.
#[test]
fn s12_a_late_success_of_another_life_is_not_believed() {
    let mut n = Net::simple();
    n.prefill(key(1, 1), 8);
    n.decode(0, key(1, 1), 8, 0);
    n.run(SEC);
    let old = n.saved(|b| !matches!(b, Body::Ping { .. } | Body::Pong { .. }));
    n.auto = false;
    n.prefill(key(1, 2), 8);
    n.decode(0, key(1, 2), 8, 20);
    n.run(100 * MS);
    for (from, to, bytes) in &old {
        n.hand(*from, *to, bytes);
    }
    n.run(100 * MS);
    assert_eq!(n.outcome(0, key(1, 2)), None);
    assert!(n.ds(0).stats().status_stale > 0);
    let post = n.posts.last().unwrap().clone();
    n.finish_ok(&post);
    n.run(100 * MS);
    assert_eq!(n.outcome(0, key(1, 2)), Some(&Ok(vec![2, 1])));
}

/// S13 (sgl#13054, sgl#25287, sgl#35823): one failure blacklists nobody; a retry is enough.
#[test]
fn s13_a_healthy_pair_recovers_without_registering_again() {
    let mut n = Net::simple();
    n.auto = false;
    n.prefill(key(1, 1), 8);
    n.decode(0, key(1, 1), 8, 0);
    n.run(50 * MS);
    let post = n.posts[0].clone();
    n.finish(&post, Outcome::FailedQuiet);
    let again = n.posts.last().unwrap().clone();
    assert_ne!(again.xfer, post.xfer);
    n.finish_ok(&again);
    n.run(50 * MS);
    assert_eq!(n.outcome(0, key(1, 1)), Some(&Ok(vec![1, 1])));
    assert_eq!(n.count(|f| matches!(f.body, Body::Register(_))), 1);
}

/// S14 (sgl#33920, sgl#32579): a write that never ends does not stop the others.
#[test]
fn s14_a_stuck_write_holds_up_only_itself() {
    let mut n = Net::simple();
    n.auto = false;
    n.prefill(key(1, 1), 8);
    n.decode(0, key(1, 1), 8, 0);
    n.run(50 * MS);
    n.auto = true;
    for r in 2..200 {
        n.prefill(key(r, 1), 4);
        n.decode(0, key(r, 1), 4, 10);
        n.run(5 * MS);
        assert_eq!(n.outcome(0, key(r, 1)), Some(&Ok(vec![1, r as u8])));
    }
    assert_eq!(n.ps(0).stats().in_flight, 1);
}

/// S15 (vllm#56104): the first failed write of a room frees nothing while its siblings write.
#[test]
fn s15_siblings_of_a_failed_write_keep_the_pages() {
    let cfg = SenderConfig { chunk_pages_max: 2, retries_max: 0, ..SenderConfig::default() };
    let mut n = Net::new(Topology::single(2), Topology::single(2), cfg, ReceiverConfig::default());
    n.auto = false;
    n.prefill(key(1, 1), 12);
    n.decode(0, key(1, 1), 12, 0);
    n.run(50 * MS);
    let posts = n.posts.clone();
    assert_eq!(posts.len(), 3);
    n.finish(&posts[0], Outcome::FailedQuiet);
    n.run(SEC);
    assert_eq!(n.outcome(0, key(1, 1)), Some(&Err(Reason::TransferFailed)));
    assert!(n.released.is_empty());
    n.finish_ok(&posts[1]);
    n.run(SEC);
    assert!(n.released.is_empty() && !n.p_events.iter().any(|e| matches!(e.1, Event::Unpin { .. })));
    n.finish_ok(&posts[2]);
    n.run(SEC);
    assert_eq!(n.released_how(0, key(1, 1)), Some(How::Acked));
    assert!(n.p_events.iter().any(|e| matches!(e.1, Event::Unpin { .. })));
}

/// S16 (sgl#39417), I24: pages are not read before their producer has finished.
#[test]
fn s16_early_pages_wait_for_their_event() {
    let mut n = Net::simple();
    n.decode(0, key(1, 1), 8, 0);
    let now = n.now;
    n.ps(0).open(now, key(1, 1), SendSpec { prompt: prompt(8) }).unwrap();
    n.ps(0).offer(now, key(1, 1), &[0, 1], Some(5)).unwrap();
    n.ps(0).offer(now, key(1, 1), &[2, 3], None).unwrap();
    n.ps(0).finish(now, key(1, 1), Tail::default()).unwrap();
    n.run(SEC);
    assert!(n.posts.is_empty());
    let now = n.now;
    n.ps(0).handle_event(now, key(1, 1), 4);
    n.run(SEC);
    assert!(n.posts.is_empty());
    let now = n.now;
    n.ps(0).handle_event(now, key(1, 1), 5);
    n.run(SEC);
    assert_eq!(n.posts.len(), 1);
    assert_eq!(n.outcome(0, key(1, 1)), Some(&Ok(vec![])));
}

/// S17 (TokenSpeed#1427): waiting for memory on the decode side is not death.
#[test]
fn s17_the_bootstrap_clock_does_not_measure_the_other_queue() {
    let cfg = SenderConfig { bootstrap_us: 5 * SEC, ..SenderConfig::default() };
    let mut n = Net::new(Topology::single(2), Topology::single(2), cfg, ReceiverConfig::default());
    n.prefill(key(1, 1), 8);
    n.queue(0, key(1, 1), 8);
    n.run(120 * SEC);
    assert!(n.p_events.is_empty());
    n.give(0, key(1, 1), 8, 0, 0, false);
    n.run(SEC);
    assert_eq!(n.outcome(0, key(1, 1)), Some(&Ok(vec![1, 1])));
    // Without anybody in the queue it is.
    n.prefill(key(2, 1), 8);
    n.run(10 * SEC);
    assert!(
        n.p_events.contains(&(0, Event::Done { key: key(2, 1), outcome: Err(Reason::BootstrapTimeout) }))
    );
}

/// H1: an acknowledgement for a second life while the first one's write is under way.
#[test]
fn h1_a_reused_room_cannot_forge_an_acknowledgement() {
    let mut n = Net::simple();
    n.auto = false;
    n.prefill(key(1, 1), 8);
    n.decode(0, key(1, 1), 8, 0);
    n.run(50 * MS);
    n.abort(0, key(1, 1));
    n.run(50 * MS);
    n.prefill(key(1, 2), 8);
    n.decode(0, key(1, 2), 8, 10);
    n.run(50 * MS);
    let posts = n.posts.clone();
    n.finish_ok(&posts[0]);
    n.run(50 * MS);
    assert_eq!(n.released_how(0, key(1, 1)), Some(How::Acked));
    n.abort(0, key(1, 2));
    n.run(SEC);
    assert_eq!(n.released_how(0, key(1, 2)), None);
    n.finish_ok(&posts[1]);
    n.run(SEC);
    assert_eq!(n.released_how(0, key(1, 2)), Some(How::Acked));
}

/// H2, I6: an ABORT that overtakes its METADATA closes the grant for good.
#[test]
fn h2_metadata_after_its_abort_is_refused() {
    let mut n = Net::simple();
    n.decode(0, key(9, 1), 8, 30);
    n.run(SEC);
    n.lose = |_, _, f| matches!(f.body, Body::Metadata(_));
    n.decode(0, key(1, 1), 8, 0);
    n.run(50 * MS);
    let late = n.saved(|b| matches!(b, Body::Metadata(_)));
    n.lose = |_, _, _| false;
    n.abort(0, key(1, 1));
    n.run(100 * MS);
    assert_eq!(n.released_how(0, key(1, 1)), Some(How::Acked));
    let (from, to, bytes) = late.last().unwrap();
    n.hand(*from, *to, bytes);
    let now = n.now;
    let opened = n.ps(0).open(now, key(1, 1), SendSpec { prompt: prompt(8) });
    assert!(opened.is_err());
    n.run(SEC);
    assert!(n.posts.is_empty());
}

/// I5, I26: doubt ends in quarantine, quarantine is capped, at the cap nothing is taken on; a proof frees it.
#[test]
fn unproven_writes_fill_the_quarantine_and_a_late_proof_empties_it() {
    let cfg = ReceiverConfig { quarantine_units_max: 8, hold_us: SEC, ..ReceiverConfig::default() };
    let mut n = Net::new(Topology::single(2), Topology::single(2), SenderConfig::default(), cfg);
    n.auto = false;
    for r in 1..=2u64 {
        n.prefill(key(r, 1), 8);
        n.decode(0, key(r, 1), 8, 8 * r as u32);
        n.run(50 * MS);
        let post = n.posts.last().unwrap().clone();
        n.finish(&post, Outcome::FailedUnknown);
        n.run(50 * MS);
        assert_eq!(n.outcome(0, key(r, 1)), Some(&Err(Reason::TransferUnknown)));
    }
    n.run(30 * SEC);
    assert_eq!((n.unhealthy.clone(), n.ds(0).stats().quarantine_units, n.released.len()), (vec![true], 8, 0));
    let now = n.now;
    let spec = RecvSpec { prompt: prompt(8), contacts: vec![PeerId(0)] };
    assert_eq!(n.ds(0).open(now, key(5, 1), spec), Err(Refused::Unhealthy));
    // The sources of unproven writes stay pinned, too.
    assert!(!n.p_events.iter().any(|e| matches!(e.1, Event::Unpin { .. })));
    let post = n.posts[0].clone();
    n.finish(&post, Outcome::FailedQuiet);
    n.run(5 * SEC);
    assert_eq!((n.unhealthy.clone(), n.released_how(0, key(1, 1))), (vec![true, false], Some(How::Acked)));
    assert!(n.p_events.contains(&(0, Event::Unpin { key: key(1, 1) })));
    assert_eq!(n.ds(0).stats().quarantine_proven, 1);
}

/// What would have read the sources of a write in doubt is gone: they are unpinned, and nothing else changes. The grant
/// stays in quarantine until somebody proves it, and the proof may come later still.
#[test]
fn sources_of_a_write_in_doubt_come_back_before_its_end() {
    let cfg = ReceiverConfig { hold_us: SEC, ..ReceiverConfig::default() };
    let mut n = Net::new(Topology::single(2), Topology::single(2), SenderConfig::default(), cfg);
    n.auto = false;
    n.prefill(key(1, 1), 8);
    n.decode(0, key(1, 1), 8, 8);
    n.run(50 * MS);
    let post = n.posts.last().unwrap().clone();
    // Of a write that is under way nobody can say it.
    n.finish(&post, Outcome::SourcesFree);
    assert_eq!(n.ps(0).stats().completions_ignored, 1);
    n.finish(&post, Outcome::FailedUnknown);
    n.run(5 * SEC);
    let s = n.ps(0).stats();
    assert_eq!((s.unproven, s.unproven_pinning, n.ps(0).is_quiet()), (1, 1, false));
    for _ in 0..2 {
        n.finish(&post, Outcome::SourcesFree);
        n.run(5 * SEC);
        let unpinned = n.p_events.iter().filter(|e| matches!(e.1, Event::Unpin { .. })).count();
        let s = n.ps(0).stats();
        assert_eq!((unpinned, s.unproven, s.unproven_pinning, n.ps(0).is_quiet()), (1, 1, 0, true));
        assert_eq!((n.ds(0).stats().quarantine_units, n.released.len()), (4, 0));
    }
    n.finish(&post, Outcome::FailedQuiet);
    n.run(5 * SEC);
    assert_eq!((n.ps(0).stats().unproven, n.released_how(0, key(1, 1))), (0, Some(How::Acked)));
}

/// A fence closes what a sender that never heard of the failure would go on writing.
#[test]
fn after_a_fence_the_sender_cannot_go_on_with_old_grants() {
    let cfg = SenderConfig { chunk_pages_max: 1, in_flight_max: 1, ..SenderConfig::default() };
    let mut n = Net::new(Topology::single(2), Topology::single(2), cfg, ReceiverConfig::default());
    n.auto = false;
    n.fence = Some(Fence::Proven);
    n.prefill(key(1, 1), 8);
    n.decode(0, key(1, 1), 8, 0);
    n.run(50 * MS);
    assert_eq!(n.posts.len(), 1);
    // The prefill rank cannot be heard for a while, and hears no ABORT.
    n.lose = |from, to, f| from == PeerId(0) || (to == PeerId(0) && matches!(f.body, Body::Abort { .. }));
    n.run(10 * SEC);
    assert_eq!(n.released_how(0, key(1, 1)), Some(How::Fenced));
    n.lose = |_, _, f| matches!(f.body, Body::Abort { .. });
    n.run(5 * SEC);
    let post = n.posts[0].clone();
    n.finish(&post, Outcome::FailedQuiet);
    n.run(5 * SEC);
    assert_eq!(n.posts.len(), 1, "wrote on for a grant that a fence had closed");
}

/// I25: a prefix that breaks is topped up, exactly, and the success of before is not believed.
#[test]
fn a_broken_prefix_is_topped_up() {
    let mut n = Net::simple();
    n.prefill(key(1, 1), 16);
    n.queue(0, key(1, 1), 16);
    n.give(0, key(1, 1), 16, 20, 5, true);
    n.run(SEC);
    assert_eq!((n.posts.len(), n.outcome(0, key(1, 1))), (1, None));
    assert!(
        !n.p_events.iter().any(|e| matches!(e.1, Event::Unpin { .. })),
        "sources gone while they may be needed"
    );
    let gap = Granted::new(Destination { full: vec![2, 3, 4], ..Destination::default() });
    let now = n.now;
    n.ds(0).handle_restore_failed(now, key(1, 1), 2, Some(gap)).map_err(|e| e.0).unwrap();
    n.drain();
    n.run(SEC);
    assert_eq!(n.outcome(0, key(1, 1)), Some(&Ok(vec![1, 1])));
    assert_eq!(n.posts.len(), 2);
    let unit = 64;
    assert!(n.posts[1].dst_pages.contains(&(2 * unit)) && !n.posts[1].dst_pages.contains(&(20 * unit)));
    assert!(n.p_events.contains(&(0, Event::Unpin { key: key(1, 1) })));
}

#[test]
fn a_prefix_that_cannot_be_topped_up_fails_the_room() {
    let mut n = Net::simple();
    n.prefill(key(1, 1), 16);
    n.queue(0, key(1, 1), 16);
    n.give(0, key(1, 1), 16, 20, 5, true);
    n.run(SEC);
    let now = n.now;
    n.ds(0).handle_restore_failed(now, key(1, 1), 2, None).map_err(|e| e.0).unwrap();
    n.drain();
    n.run(SEC);
    assert_eq!(n.outcome(0, key(1, 1)), Some(&Err(Reason::RestoreFailed)));
    assert_eq!(n.released_how(0, key(1, 1)), Some(How::Acked));
}

/// Two requests under one name are never mixed.
#[test]
fn different_prompts_under_one_room_fail_on_both_sides() {
    let mut n = Net::simple();
    n.prefill(key(1, 1), 10);
    n.decode(0, key(1, 1), 8, 0);
    n.run(SEC);
    assert_eq!(n.outcome(0, key(1, 1)), Some(&Err(Reason::PromptMismatch)));
    assert!(n.posts.is_empty());
    assert!(n.p_events.contains(&(0, Event::Done { key: key(1, 1), outcome: Err(Reason::PromptMismatch) })));
}

/// A grant that was never shown needs no one's word.
#[test]
fn an_unpublished_grant_comes_back_at_once() {
    let mut n = Net::simple();
    n.lose = |_, _, f| matches!(f.body, Body::RegisterReply(_));
    n.decode(0, key(1, 1), 8, 0);
    n.run(100 * MS);
    n.abort(0, key(1, 1));
    assert_eq!(n.released_how(0, key(1, 1)), Some(How::Unpublished));
}

/// Every single frame of an exchange may be lost once, or come twice, or come last. Returns frames.
fn disturb_each_frame(net: fn() -> Net) -> usize {
    let (mut total, mut drop) = (1, 0);
    while drop < total {
        for twice in [false, true] {
            let mut n = net();
            n.prefill(key(1, 1), 8);
            n.decode(0, key(1, 1), 8, 0);
            let mut seen = 0;
            for _ in 0..4000 {
                n.run(MS);
                let fresh = n.sent.len();
                if seen <= drop && drop < fresh && n.wire.len() >= fresh - drop {
                    let at = n.wire.len() - (fresh - drop);
                    if twice {
                        let copy = n.wire[at].clone();
                        n.wire.push_back((copy.0 + 700 * MS, copy.1, copy.2, copy.3));
                    } else {
                        n.wire.remove(at);
                    }
                }
                seen = fresh;
            }
            assert_eq!(n.outcome(0, key(1, 1)), Some(&Ok(vec![1, 1])), "frame {drop} twice: {twice}");
            for p in 0..n.p.len() {
                let s = n.ps(p).stats();
                assert_eq!((s.rooms, s.staged), (0, 0));
            }
            let s = n.ds(0).stats();
            assert_eq!((s.grants, s.ring_places), (0, 0));
            total = n.count(|f| !matches!(f.body, Body::Ping { .. } | Body::Pong { .. }));
        }
        drop += 1;
    }
    total
}

#[test]
fn any_one_lost_or_doubled_frame_changes_nothing() {
    assert!(disturb_each_frame(Net::simple) >= 6);
}

const BUFFERS: StagingBuffers =
    StagingBuffers { region: 1, base: 0, buffer_bytes: 256, buffers: 1, copies_min: 2 };
const RING: StagingRing = StagingRing { region: 1, base: 0, bytes: 300, chunks_max: 8 };

/// Two prefill ranks with half the heads each, one decode rank with all: pages come in slices, and are packed.
pub(crate) fn staged() -> Net {
    let p = Topology { tp: 2, ..Topology::single(2) };
    let cfg_p = SenderConfig { staging: Some(BUFFERS), chunk_pages_max: 2, ..SenderConfig::default() };
    let cfg_d = ReceiverConfig { staging: Some(RING), ..ReceiverConfig::default() };
    Net::new(p, Topology::single(2), cfg_p, cfg_d)
}

/// S9 (sgl#29978), I17: the same with packed chunks, a ring for one block, and so with every staging message.
#[test]
fn s9_any_one_lost_or_doubled_staging_frame_changes_nothing() {
    let frames = disturb_each_frame(staged);
    assert!(frames >= 30, "{frames}");
    let mut n = staged();
    n.prefill(key(1, 1), 8);
    n.decode(0, key(1, 1), 8, 0);
    n.run(SEC);
    // Four pages in chunks of two from two ranks: each block once, and nothing else is written.
    assert_eq!((n.posts.len(), n.gathers, n.scatters.len()), (4, 4, 4));
    assert!(n.scatters.iter().all(|s| s.2 == 256));
    assert_eq!((n.ps(0).stats().chunks_packed, n.ds(0).stats().chunks_scattered), (2, 4));
}

/// S9: a block that can never fit, or that is not worth it, goes unpacked.
#[test]
fn s9_without_a_place_chunks_go_unpacked() {
    for (ring, buffers) in [(100, 256), (300, 100)] {
        let mut n = staged();
        n.cfg_d.staging = Some(StagingRing { bytes: ring, ..RING });
        n.cfg_p.staging = Some(StagingBuffers { buffer_bytes: buffers, ..BUFFERS });
        (0..2).for_each(|i| n.start_p(i));
        n.start_d(0);
        n.prefill(key(1, 1), 8);
        n.decode(0, key(1, 1), 8, 0);
        n.run(SEC);
        assert_eq!(n.outcome(0, key(1, 1)), Some(&Ok(vec![1, 1])));
        assert_eq!((n.gathers, n.scatters.len()), (0, 0));
    }
}

/// S9 (sgl#31217), I1: pages of a failed room stay while a block is scattered into them, whatever others prove; its
/// place in the ring comes back with them, and the next room goes through.
#[test]
fn s9_a_failed_room_waits_for_its_scatter_and_frees_the_ring() {
    let mut n = staged();
    n.auto = false;
    n.prefill(key(1, 1), 4);
    n.decode(0, key(1, 1), 4, 0);
    n.run(50 * MS);
    for post in n.posts.clone() {
        n.finish_ok(&post);
    }
    n.run(50 * MS);
    assert!(!n.scatters.is_empty());
    n.abort(0, key(1, 1));
    n.run(SEC);
    assert!(n.released.is_empty(), "released under a scatter");
    let now = n.now;
    for (_, id, _) in n.scatters.clone() {
        n.ds(0).handle_scattered(now, id);
    }
    n.drain();
    n.run(SEC);
    assert_eq!(n.released_how(0, key(1, 1)), Some(How::Acked));
    assert_eq!(n.ds(0).stats().ring_places, 0);
    n.auto = true;
    n.prefill(key(2, 1), 8);
    n.decode(0, key(2, 1), 8, 10);
    n.run(SEC);
    assert_eq!(n.outcome(0, key(2, 1)), Some(&Ok(vec![1, 2])));
}

/// S9: a place that cannot be proved free pins the ring; others then go unpacked instead of waiting for ever.
#[test]
fn s9_a_quarantined_place_does_not_wedge_the_others() {
    let mut n = staged();
    n.cfg_d.hold_us = SEC;
    n.start_d(0);
    n.auto = false;
    n.prefill(key(1, 1), 4);
    n.decode(0, key(1, 1), 4, 0);
    n.run(50 * MS);
    let post = n.posts[0].clone();
    n.finish(&post, Outcome::FailedUnknown);
    n.run(5 * SEC);
    assert!(n.ds(0).stats().quarantine_units > 0 && n.ds(0).stats().ring_places > 0);
    n.auto = true;
    n.prefill(key(2, 1), 8);
    n.decode(0, key(2, 1), 8, 10);
    n.run(SEC);
    assert_eq!(n.outcome(0, key(2, 1)), Some(&Ok(vec![1, 2])));
    assert!(n.scatters.is_empty());
}

/// I23: after `stop` the memory is free to go when nothing is out.
#[test]
fn stop_fails_everything_and_says_when_it_is_quiet() {
    let mut n = Net::simple();
    n.auto = false;
    n.prefill(key(1, 1), 8);
    n.decode(0, key(1, 1), 8, 0);
    n.run(50 * MS);
    let now = n.now;
    n.ps(0).stop(now);
    n.ds(0).stop(now);
    n.drain();
    assert!(!n.ps(0).is_quiet() && !n.ds(0).is_quiet());
    n.run(SEC);
    let post = n.posts[0].clone();
    n.finish_ok(&post);
    n.run(SEC);
    assert!(n.ps(0).is_quiet() && n.ds(0).is_quiet());
    assert!(n.count(OK) >= 1);
    let now = n.now;
    assert!(n.ps(0).open(now, key(2, 1), SendSpec { prompt: prompt(8) }).is_err());
    assert_eq!(n.now.max(Time(0)), n.now);
}
