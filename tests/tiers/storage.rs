//! Host to store.

use sapwood::base::{NamespaceId, Time};
use sapwood::sim::{Call, Pending, Rig, Stamp};
use sapwood::tiers::{PageOutcome, StoreConfig, WritePolicy};

use crate::common::{WT1, config, t, with_store};

fn stamps_of(prompt: &str) -> Vec<Stamp> {
    let tokens = t(prompt);
    let mut stamps: Vec<_> =
        (4..=tokens.len()).step_by(4).map(|n| Stamp::of(NamespaceId::DEFAULT, &tokens[..n])).collect();
    stamps.sort();
    stamps
}

fn stored(rig: &Rig) -> Vec<Stamp> {
    let mut stamps = rig.stored();
    stamps.sort();
    stamps
}

#[test]
fn what_is_backed_up_is_stored_once() {
    let mut rig = Rig::new(with_store(config(16, 16, WT1)));
    rig.serve(&t("ABCDE"));
    rig.drain();
    assert_eq!(stored(&rig), stamps_of("ABCDE"));
    assert_eq!(rig.core.stats().store_put_pages, 5);
    rig.serve(&t("ABCDE"));
    rig.drain();
    assert_eq!(rig.core.stats().store_put_pages, 5, "nothing is written twice");
    rig.assert_quiet();
}

/// A store that wears out takes what came back, and what is long enough to be worth reading: a prompt that is seen once costs it
/// nothing, and of one that is continued its second use stores the part that is shared.
#[test]
fn a_store_takes_what_is_used_again_and_long_enough() {
    let with = |uses_min, tokens_min| {
        let mut config = with_store(config(32, 32, WT1));
        config.store = config.store.map(|store| StoreConfig { uses_min, tokens_min, ..store });
        Rig::new(config)
    };
    let mut rig = with(2, 0);
    for (prompt, in_store) in
        [("ABCDE", &[][..]), ("ABCXY", &["ABC"]), ("ABCXYZ", &["ABCXY"]), ("ABCDE", &["ABCXY", "ABCDE"])]
    {
        rig.serve(&t(prompt));
        rig.drain();
        let mut expected: Vec<_> = in_store.iter().flat_map(|prompt| stamps_of(prompt)).collect();
        expected.sort();
        expected.dedup();
        assert_eq!(stored(&rig), expected, "after {prompt}");
    }
    assert_eq!(rig.core.stats().store_not_yet_pages, 5 + 2 + 1);
    rig.assert_quiet();
    rig.assert_stored();

    // Three pages are too short, on their own. The longer prompt brings them along.
    let mut rig = with(1, 16);
    for (prompt, expected) in [("ABC", ""), ("ABCDE", "ABCDE")] {
        rig.serve(&t(prompt));
        rig.drain();
        assert_eq!(stored(&rig), stamps_of(expected));
    }
    rig.assert_quiet();
}

/// A prompt that everybody uses while a slow store has not taken it yet waits in its queue once.
#[test]
fn what_is_used_often_is_queued_once() {
    let mut config = with_store(config(32, 32, WT1));
    config.store = config.store.map(|store| StoreConfig {
        uses_min: 2,
        pages_in_flight_max: 2,
        queue_nodes_max: 2,
        ..store
    });
    let mut rig = Rig::new(config);
    for prompt in ["XYZ", "ABC", "XYZ", "ABC", "ABC", "ABC", "ABC", "ABC"] {
        rig.serve(&t(prompt));
        rig.drain_kind(|p| matches!(p, Pending::ToHost(..)));
    }
    assert_eq!(rig.core.stats().store_queue_full_nodes, 0);
    rig.drain();
    assert_eq!(stored(&rig).len(), 6);
    rig.assert_quiet();
}

/// sgl#38480 (B10): a store write reads host pages in place. A split during the write must not free the fragment's
/// pages, or the store keeps somebody else's bytes for ever.
#[test]
fn b10_a_split_under_a_write_in_flight() {
    for cut in ["A", "AB", "ABC"] {
        let mut rig = Rig::new(with_store(config(16, 4, WritePolicy::WriteThrough { threshold: 1 })));
        rig.serve(&t("ABCD"));
        rig.drain_kind(|p| matches!(p, Pending::ToHost(..)));
        assert!(rig.pending.iter().all(|p| matches!(p, Pending::Put(..))));
        // The split, and a demand for host pages that could only come from the write.
        rig.serve(&t(&format!("{cut}X")));
        rig.serve(&t("YZ"));
        rig.drain();
        let got = stored(&rig);
        for stamp in stamps_of("ABCD") {
            assert!(got.contains(&stamp), "cut after {cut}");
        }
        rig.assert_quiet();
    }
}

/// sgl#16946 (B36), the store's side: fragments of a split reach the store, whenever the split happens.
#[test]
fn b36_every_fragment_is_stored() {
    for steps in 0..4 {
        let mut rig = Rig::new(with_store(config(32, 32, WT1)));
        rig.serve(&t("ABCDEFGH"));
        for _ in 0..steps {
            if !rig.pending.is_empty() {
                rig.complete(0, &Call::Well);
            }
        }
        rig.serve(&t("ABCX"));
        rig.serve(&t("ABCDEY"));
        rig.drain();
        let got = stored(&rig);
        for prompt in ["ABCDEFGH", "ABCX", "ABCDEY"] {
            assert!(stamps_of(prompt).iter().all(|s| got.contains(s)), "{prompt} after {steps} steps");
        }
        rig.assert_quiet();
    }
}

/// sgl#39444 (B37): a failed batch ended the whole write, which was acknowledged all the same. Here a transient
/// failure is tried again until all pages are there.
#[test]
fn b37_a_transient_failure_loses_nothing() {
    let mut rig = Rig::new(with_store(config(16, 16, WT1)));
    rig.serve(&t("ABCDEFGHIJ"));
    rig.drain_kind(|p| matches!(p, Pending::ToHost(..)));
    assert_eq!(rig.pending.len(), 5);
    rig.complete(2, &Call::Fails);
    rig.drain();
    assert_eq!(rig.stored().len(), 8);
    assert!(!rig.core.writes_are_idle());
    rig.tick(rig.core.next_timeout().expect("a retry is due"));
    rig.drain();
    assert_eq!(stored(&rig), stamps_of("ABCDEFGHIJ"));
    assert_eq!((rig.core.stats().store_put_pages, rig.core.stats().store_put_failed_pages), (10, 2));
    rig.assert_quiet();
}

/// A permanent failure is given up after a bounded number of attempts, counted, and pins nothing.
#[test]
fn b37_a_permanent_failure_is_bounded() {
    let mut rig = Rig::new(with_store(config(16, 16, WT1)));
    rig.serve(&t("ABCD"));
    rig.drain_kind(|p| matches!(p, Pending::ToHost(..)));
    let mut attempts = 0;
    let mut now = Time::ZERO;
    loop {
        while !rig.pending.is_empty() {
            rig.complete(0, &Call::Each(vec![PageOutcome::Refused; 2]));
        }
        attempts += 1;
        let Some(due) = rig.core.next_timeout() else { break };
        assert!(due > now, "waits grow");
        now = due;
        rig.tick(now);
    }
    assert_eq!(attempts, 4);
    assert_eq!(rig.core.stats().store_put_dropped_pages, 4);
    rig.assert_quiet();
}

/// Every node is tried a bounded number of times, however many entries lie below it.
#[test]
fn a_store_that_refuses_is_not_stormed() {
    let trunk: String = ('A'..='T').collect();
    let mut slow = with_store(config(256, 256, WT1));
    if let Some(store) = &mut slow.store {
        store.pages_in_flight_max = 2;
    }
    let mut rig = Rig::new(slow);
    // A branch at every page, so that every page of the trunk is a node of its own.
    for depth in 1..=trunk.len() {
        rig.serve(&t(&format!("{}z", &trunk[..depth])));
    }
    let mut now = Time::ZERO;
    while let Some(first) = rig.pending.first() {
        let call = match first {
            Pending::Put(..) => Call::Each(vec![PageOutcome::Refused; 2]),
            _ => Call::Well,
        };
        rig.complete(0, &call);
        // Writes end one after the other, so their retries are due one after the other.
        now = now + 1_000;
        if rig.pending.is_empty() {
            now = rig.core.next_timeout().map_or(now, |due| due.max(now));
        }
        rig.tick(now);
    }
    let (pages, attempts) = (20 + 20, 4);
    let failed = rig.core.stats().store_put_failed_pages;
    assert!((attempts..=pages * attempts).contains(&failed), "{failed} failed writes");
    rig.assert_quiet();
}

/// A store that is slow pins a bounded number of host pages, and the rest waits in the queue.
#[test]
fn a_slow_store_has_a_bounded_share() {
    let mut slow = with_store(config(64, 64, WT1));
    if let Some(store) = &mut slow.store {
        store.pages_in_flight_max = 4;
    }
    let mut rig = Rig::new(slow);
    for prompt in ["ABCD", "EFGH", "IJKL", "MNOP"] {
        rig.serve(&t(prompt));
    }
    rig.drain_kind(|p| matches!(p, Pending::ToHost(..)));
    let in_flight: usize =
        rig.pending.iter().map(|p| if let Pending::Put(_, _, i) = p { i.len() } else { 0 }).sum();
    assert_eq!(in_flight, 4);
    rig.drain();
    assert_eq!(rig.stored().len(), 16);
    rig.assert_quiet();
}

/// Under write-back a child can be on the host while its parent is not: storing it would make a hole that no
/// look-up crosses. It is not stored, and that is counted.
#[test]
fn nothing_is_stored_below_a_hole() {
    let mut rig = Rig::new(with_store(config(4, 8, WritePolicy::WriteBack)));
    rig.serve(&t("ABCD"));
    let reader = rig.request();
    rig.match_prefix(reader, &t("AB")).unwrap();
    let hungry = rig.request();
    rig.alloc(hungry, 2).unwrap();
    rig.drain();
    assert_eq!(rig.peek(&t("ABCD")), (2, 2));
    assert!(rig.stored().is_empty());
    assert_eq!(rig.core.stats().store_put_dropped_pages, 2);
    rig.abort(reader).unwrap();
    rig.abort(hungry).unwrap();
    rig.assert_quiet();
}

/// Late, doubled and foreign events change nothing.
#[test]
fn stray_events_are_counted() {
    use sapwood::base::OpId;
    use sapwood::tiers::Event;
    let mut rig = Rig::new(with_store(config(8, 8, WT1)));
    rig.serve(&t("AB"));
    let op = rig.pending[0].op();
    rig.drain();
    for event in [
        Event::Copied { op, ok: true },
        Event::LayerCopied { op, layers: 1 },
        Event::Queried { op, present: None },
        Event::Got { op, batch: 0, outcomes: vec![] },
        Event::Put { op, batch: 0, outcomes: vec![] },
        Event::Put { op: OpId(999), batch: 7, outcomes: vec![PageOutcome::Done] },
    ] {
        rig.core.handle(event);
        rig.check();
    }
    assert_eq!(rig.core.stats().stray_events, 6);
    rig.assert_quiet();
}

/// A write of AB fails and waits for its retry under AB's name; CD below it is stored. If the two became one node then, the
/// name would die and nobody would write AB until somebody used the path again.
#[test]
fn a_node_that_waits_for_its_retry_is_not_merged_away() {
    let mut rig = Rig::new(with_store(config(16, 16, WT1)));
    rig.serve(&t("AB"));
    rig.drain_kind(|p| matches!(p, Pending::ToHost(..)));
    rig.serve(&t("ABCD"));
    rig.drain_kind(|p| matches!(p, Pending::ToHost(..)));
    assert_eq!(rig.pending.len(), 2);
    rig.complete(1, &Call::Well);
    rig.complete(0, &Call::Fails);
    // A look at AB makes it and CD neighbours in age: all that a merge needs.
    let reader = rig.request();
    rig.match_prefix(reader, &t("AB")).unwrap();
    rig.abort(reader).unwrap();
    rig.tick(rig.core.next_timeout().expect("a retry is due"));
    rig.drain();
    assert_eq!(stored(&rig), stamps_of("ABCD"));
    // Then they may.
    let reader = rig.request();
    rig.match_prefix(reader, &t("AB")).unwrap();
    rig.abort(reader).unwrap();
    assert_eq!(rig.core.tree().stats().merges, 1, "the story is about a merge");
    rig.assert_quiet();
}

/// AB was given up, CD below it came from the store. What is computed below CD is not written: a look-up that starts at the
/// root would never get there.
#[test]
fn what_came_from_the_store_does_not_hide_a_hole_above_it() {
    let mut stubborn = with_store(config(16, 16, WT1));
    if let Some(store) = &mut stubborn.store {
        store.attempts_max = 1;
    }
    let mut rig = Rig::new(stubborn);
    rig.serve(&t("AB"));
    rig.complete(0, &Call::Well);
    rig.complete(0, &Call::Fails);
    assert_eq!(rig.core.stats().store_put_dropped_pages, 2);
    let mut pages = 0;
    rig.store_from_elsewhere(NamespaceId::DEFAULT, &t("ABCD"), || {
        pages += 1;
        pages <= 2 * 3
    });
    let request = rig.request();
    assert!(rig.prefetch(request, &[&t("ABCD")[..], &[7]].concat()).is_ok());
    rig.drain();
    rig.abort(request).unwrap();
    assert_eq!(rig.core.stats().prefetch_loaded_tokens, 8);
    rig.serve(&t("ABCDE"));
    rig.drain();
    let below = Stamp::of(NamespaceId::DEFAULT, &t("ABCDE"));
    assert!(!stored(&rig).contains(&below), "E lies below a hole");
    rig.assert_quiet();
}
