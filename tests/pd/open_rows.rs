//! Rows of the comparison of transports that are open elsewhere, where no scenario covers them; `docs/PROTOCOL.md`
//! has the whole table.

use sapwood::pd::receiver::ReceiverConfig;
use sapwood::pd::sender::{Outcome, SenderConfig};
use sapwood::pd::topo::Topology;
use sapwood::pd::wire::{Body, Frame, Head, Metadata, Quiet, Status};
use sapwood::pd::{PeerId, Reason, Serial};

use crate::net::{LATENCY, MS, Net, SEC, key, prompt};
use crate::scenarios::staged;

/// A prefill rank gives a room up, or its clock runs out: the other side hears it at once, with the reason, before
/// and after its METADATA, and so does a rank that comes later (sgl#30329, sgl#39428).
#[test]
fn prefill_aborts_and_timeouts_are_pushed() {
    let mut n = Net::simple();
    n.auto = false;
    n.decode(0, key(9, 1), 4, 40);
    n.run(SEC);
    for granted in [false, true] {
        let k = key(u64::from(granted), 1);
        n.prefill(k, 8);
        n.queue(0, k, 8);
        if granted {
            n.give(0, k, 8, 0, 0, false);
        }
        n.run(50 * MS);
        let now = n.now;
        n.ps(0).abort(now, k).unwrap();
        n.drain();
        n.run(LATENCY);
        assert_eq!(n.outcome(0, k), Some(&Err(Reason::AbortedByPrefill)), "granted: {granted}");
    }
    let cfg = SenderConfig { bootstrap_us: 5 * SEC, ..SenderConfig::default() };
    let d = Topology { tp: 2, ..Topology::single(2) };
    let mut n = Net::new(Topology::single(2), d, cfg, ReceiverConfig::default());
    n.prefill(key(1, 1), 8);
    n.decode(0, key(1, 1), 8, 0);
    n.run(8 * SEC);
    assert_eq!(n.outcome(0, key(1, 1)), Some(&Err(Reason::BootstrapTimeout)));
    n.decode(1, key(1, 1), 8, 0);
    n.run(100 * MS);
    assert_eq!(n.outcome(1, key(1, 1)), Some(&Err(Reason::BootstrapTimeout)));
    assert!(n.posts.is_empty());
}

fn one_of_each() -> Vec<Body> {
    vec![
        Body::Announce,
        Body::Metadata(Box::new(Metadata { prompt: prompt(2), full: vec![3], ..Metadata::default() })),
        Body::MetadataAck,
        Body::Abort { floor: Serial(0) },
        Body::AbortReply(Quiet::Drained),
        Body::Status(Status::Working),
        Body::Status(Status::Done { bytes: 1, checksum: 2, aux: vec![3] }),
        Body::Status(Status::Failed(Reason::NoSender)),
        Body::StatusAck,
        Body::Topup { from: 0, pages: vec![1], window: vec![2] },
        Body::Ping { stamp: 1, floor: Serial(0) },
        Body::Pong { stamp: 1 },
        Body::StageAsk { chunk: 0, first: 0, pages: 1, bytes: 64 },
        Body::StageGrant { chunk: 0, at: 0, tail: 0 },
        Body::StageReady { chunk: 0 },
        Body::StageTaken { chunk: 0, tail: 100 },
    ]
}

/// Whatever comes before anything else meets a machine that is complete: there is no thread that could be started
/// before a table it needs (the `_staging_ctx` and `transfer_queues` rows).
#[test]
fn any_kind_of_frame_may_come_first() {
    for body in one_of_each() {
        let mut n = staged();
        let (to_p, to_d) = (n.ps(0).incarnation(), n.ds(0).incarnation());
        let head = |from, to| Head { from, to, sequence: 1, key: key(1, 1), serial: Serial(1) };
        let from_d = Frame { head: head(to_d, to_p), body: body.clone() }.to_bytes();
        let from_p = Frame { head: head(to_p, to_d), body: body.clone() }.to_bytes();
        n.hand(Net::d_peer(0), PeerId(0), &from_d);
        n.hand(PeerId(0), Net::d_peer(0), &from_p);
        n.run(50 * MS);
        // Another room, as the frame may have ended this one for good.
        n.prefill(key(2, 1), 8);
        n.decode(0, key(2, 1), 8, 10);
        n.run(2 * SEC);
        assert_eq!(n.outcome(0, key(2, 1)), Some(&Ok(vec![1, 2])), "{body:?}");
    }
}

/// A transport that fails one write fails one room; the queue behind it goes on ("worker exception isolated").
#[test]
fn a_failed_write_fails_only_its_room() {
    let cfg = SenderConfig { retries_max: 0, in_flight_max: 1, ..SenderConfig::default() };
    let mut n = Net::new(Topology::single(2), Topology::single(2), cfg, ReceiverConfig::default());
    n.auto = false;
    for r in 0..4 {
        n.prefill(key(r, 1), 4);
        n.decode(0, key(r, 1), 4, 4 * r as u32);
    }
    n.run(100 * MS);
    for at in 0..4 {
        let post = n.posts[at].clone();
        n.finish(&post, if at == 1 { Outcome::FailedQuiet } else { Outcome::Ok { bytes: post.bytes } });
        n.run(50 * MS);
    }
    for r in 0..4 {
        let want = if r == 1 { Err(Reason::TransferFailed) } else { Ok(vec![1, r as u8]) };
        assert_eq!(n.outcome(0, key(r, 1)), Some(&want), "room {r}");
    }
}

/// METADATA again changes nothing; METADATA under another grant for the same rank is refused and leaves the room alone
/// ("duplicate or late METADATA").
#[test]
fn repeated_metadata_is_one_and_another_is_refused() {
    let mut n = Net::simple();
    n.auto = false;
    n.prefill(key(1, 1), 8);
    n.decode(0, key(1, 1), 8, 0);
    n.run(50 * MS);
    let mut saved = n.sent.clone();
    saved.retain(|s| matches!(s.2.body, Body::Metadata(_)));
    let (from, to, mut frame) = saved[0].clone();
    for _ in 0..3 {
        n.hand(from, to, &frame.to_bytes());
    }
    n.run(50 * MS);
    assert_eq!(n.posts.len(), 1);
    frame.head.serial = Serial(99);
    n.hand(from, to, &frame.to_bytes());
    let last = n.sent.last().unwrap();
    assert_eq!(last.2.head.serial, Serial(99));
    assert_eq!(last.2.body, Body::Status(Status::Failed(Reason::SecondOwner)));
    let post = n.posts[0].clone();
    n.finish_ok(&post);
    n.run(SEC);
    assert_eq!((n.posts.len(), n.outcome(0, key(1, 1))), (1, Some(&Ok(vec![1, 1]))));
}
