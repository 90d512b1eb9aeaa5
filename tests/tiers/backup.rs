//! Device to host.

use sapwood::base::{Fence, Tier, Time};
use sapwood::sim::{Call, Pending, Rig};
use sapwood::tiers::{Alloc, Refusal, WritePolicy};

use crate::common::{WT1, WT2, config, found, t};

/// A node is backed up with its ancestors, parents first, and only a copy that has ended counts.
#[test]
fn write_through_publishes_when_the_copy_has_ended() {
    let mut rig = Rig::new(config(8, 8, WT1));
    rig.serve(&t("AB"));
    assert_eq!(rig.pending.len(), 1);
    assert_eq!(rig.core.stats().backed_up_pages, 0);
    rig.drain();
    assert_eq!(rig.core.stats().backed_up_pages, 2);
    rig.assert_quiet();
}

/// Below the threshold nothing is written; the insert that crosses it at a deep node writes the ancestors too.
#[test]
fn the_second_insert_backs_up_the_whole_chain() {
    let mut rig = Rig::new(config(8, 8, WT2));
    rig.serve(&t("AB"));
    assert!(rig.pending.is_empty());
    rig.serve(&t("ABCD"));
    rig.drain();
    // AB was used twice, CD once.
    assert_eq!(rig.core.stats().backed_up_pages, 2);
    rig.serve(&t("ABCD"));
    rig.drain();
    assert_eq!(rig.core.stats().backed_up_pages, 4);
    rig.assert_quiet();
}

/// A copy that fails publishes nothing, gives its host pages back, and the node can be backed up later.
#[test]
fn a_failed_copy_leaves_no_trace() {
    let mut rig = Rig::new(config(8, 8, WT1));
    rig.serve(&t("AB"));
    rig.complete(0, &Call::Fails);
    assert_eq!(rig.core.page_counts(Tier::Host).free_pages, 8);
    assert_eq!(rig.core.stats().backup_failed_pages, 2);
    rig.serve(&t("AB"));
    rig.drain();
    assert_eq!(rig.core.stats().backed_up_pages, 2);
    rig.assert_quiet();
}

/// sgl#16946 (B36): a node is split while its copy is in flight. The copy's end must publish every fragment.
#[test]
fn b36_a_split_under_a_copy_in_flight_loses_nothing() {
    for cut in ["A", "AB", "ABC", "ABCDE"] {
        let mut rig = Rig::new(config(32, 32, WT1));
        rig.serve(&t("ABCDEF"));
        let prompt = format!("{cut}X");
        rig.serve(&t(&prompt));
        rig.drain();
        let flushed = rig.request();
        assert!(matches!(rig.alloc(flushed, 32), Ok(Alloc::Granted)));
        rig.abort(flushed).unwrap();
        assert_eq!(found(&rig, "ABCDEF"), (0, 6), "cut after {cut}");
        rig.assert_quiet();
    }
}

/// Copies may end in any order. A child's copy that ends first waits for its parent's, and shares its fate.
#[test]
fn a_child_is_never_published_before_its_parent() {
    for parent_ok in [true, false] {
        let mut rig = Rig::new(config(16, 16, WT1));
        rig.serve(&t("AB"));
        rig.serve(&t("ABCD"));
        assert_eq!(rig.pending.len(), 2);
        rig.complete(1, &Call::Well);
        assert_eq!(rig.core.stats().backed_up_pages, 0, "the parent is still on its way");
        rig.complete(0, if parent_ok { &Call::Well } else { &Call::Fails });
        assert_eq!(rig.core.stats().backed_up_pages, if parent_ok { 4 } else { 0 });
        rig.assert_quiet();
    }
}

/// sgl#20049 (B05): acknowledgements were drained only by the prefill path; a decode-only stretch locked
/// everything. Here an end frees its pins at once, and nothing but the event is needed.
#[test]
fn b05_ends_release_their_pins_without_a_tick() {
    let mut rig = Rig::new(config(8, 8, WT1));
    for prompt in ["AB", "CD", "EF", "GH"] {
        rig.serve(&t(prompt));
    }
    rig.drain();
    let request = rig.request();
    assert_eq!(rig.alloc(request, 8), Ok(Alloc::Granted));
    rig.abort(request).unwrap();
    rig.assert_quiet();
}

/// sgl#27108 (B02): write-back ignored that the backup wrote nothing and demoted the node all the same.
#[test]
fn b02_a_victim_without_host_pages_is_dropped() {
    let mut rig = Rig::new(config(4, 2, WritePolicy::WriteBack));
    rig.serve(&t("AB"));
    // AB goes to the host, and a request pins it there.
    let request = rig.request();
    assert!(matches!(rig.alloc(request, 4), Ok(Alloc::Refused { coming_pages: 2, .. })));
    rig.drain();
    let reader = rig.request();
    assert_eq!(rig.match_prefix(reader, &t("AB")).unwrap().host_tokens, 8);
    rig.serve(&t("CD"));
    let other = rig.request();
    assert_eq!(rig.alloc(other, 4), Ok(Alloc::Granted), "CD is dropped, not demoted");
    assert_eq!(found(&rig, "CD"), (0, 0));
    assert_eq!(rig.core.stats().dropped_tokens[&Refusal::NoHostPages], 8);
    for id in [request, reader, other] {
        rig.abort(id).unwrap();
    }
    rig.assert_quiet();
}

/// Write-back: eviction asks for the copy and frees the device pages when it has ended, not before.
#[test]
fn write_back_frees_after_the_copy() {
    let mut rig = Rig::new(config(4, 8, WritePolicy::WriteBack));
    rig.serve(&t("ABCD"));
    let request = rig.request();
    let refused = rig.alloc(request, 2).unwrap();
    let Alloc::Refused { short_pages: 2, coming_pages } = refused else { panic!("{refused:?}") };
    assert!(coming_pages >= 2);
    let copies = rig.pending.len();
    // Asking again does not write more.
    let _ = rig.alloc(request, 2).unwrap();
    assert_eq!(rig.pending.len(), copies);
    rig.drain();
    assert_eq!(rig.alloc(request, 2), Ok(Alloc::Granted));
    rig.abort(request).unwrap();
    let (device, host) = found(&rig, "ABCD");
    assert_eq!(device + host, 4);
    rig.assert_quiet();
}

/// A node that is used again while it is being written back stays on the device.
#[test]
fn write_back_spares_what_is_used_meanwhile() {
    let mut rig = Rig::new(config(4, 8, WritePolicy::WriteBack));
    rig.serve(&t("ABCD"));
    let hungry = rig.request();
    assert!(matches!(rig.alloc(hungry, 4), Ok(Alloc::Refused { .. })));
    let reader = rig.request();
    assert_eq!(rig.match_prefix(reader, &t("ABCD")).unwrap().device_tokens, 16);
    rig.drain();
    assert_eq!(found(&rig, "ABCD").0, 4);
    rig.abort(reader).unwrap();
    assert_eq!(rig.alloc(hungry, 4), Ok(Alloc::Granted));
    assert_eq!(found(&rig, "ABCD"), (0, 4));
    rig.abort(hungry).unwrap();
    rig.assert_quiet();
}

/// sgl#33862 (B20): a host pool smaller than the device pool fills with mirrors that nobody may reclaim, and the
/// store starves. Mirrors go when host pages are short, children before parents.
#[test]
fn b20_mirrors_make_room() {
    let mut rig = Rig::new(config(8, 4, WT1));
    for prompt in ["AB", "CD", "EF", "GH"] {
        rig.serve(&t(prompt));
        rig.drain();
    }
    assert_eq!(rig.core.stats().backed_up_pages, 8);
    assert!(rig.core.stats().mirror_reclaimed_pages >= 4);
    for prompt in ["AB", "CD", "EF", "GH"] {
        assert_eq!(found(&rig, prompt).0, 2, "{prompt} is on the device still");
    }
    rig.assert_quiet();
}

/// sgl#36738 and vllm#45704 (B11, B12): copies issued behind computation carry its fence, in both directions.
#[test]
fn b11_every_copy_carries_the_last_use_it_was_told_of() {
    use sapwood::tiers::Action;
    let mut core = sapwood::tiers::Core::new(config(8, 8, WT1)).unwrap();
    let request = core.request(sapwood::base::NamespaceId::DEFAULT);
    core.alloc(request, 2).unwrap();
    core.finish(request, &t("AB"), Fence::after(41)).unwrap();
    core.tick(Time(1));
    let actions = core.take_actions();
    assert!(
        matches!(&actions[..], [Action::CopyToHost { after, .. }] if *after == Fence::after(41)),
        "{actions:?}"
    );
}

/// Planning a backup makes host room, which is a third of what a publication used to cost, and no step waits for it: so it is
/// the tick's. What a request published chunk by chunk in the meantime is one node, and one copy.
#[test]
fn what_is_due_is_planned_at_the_tick() {
    let mut rig = Rig::new(config(8, 8, WT1)).ticked_by_hand();
    let request = rig.request();
    rig.alloc(request, 3).unwrap();
    rig.compute(request, &t("ABC"), sapwood::base::NamespaceId::DEFAULT);
    for chunk in ["A", "AB", "ABC"] {
        rig.checkpoint(request, &t(chunk)).unwrap();
    }
    assert!(rig.pending.is_empty());
    assert!(!rig.core.writes_are_idle());
    assert_eq!(rig.core.next_timeout(), Some(Time::ZERO), "it asks for the tick");
    rig.tick(Time(1));
    assert!(matches!(&rig.pending[..], [Pending::ToHost(_, pairs)] if pairs.len() == 3), "{:?}", rig.pending);
    assert_eq!(rig.core.next_timeout(), None);
    rig.abort(request).unwrap();
    rig.drain();
    assert_eq!(rig.core.stats().backed_up_pages, 3);
    rig.assert_quiet();
}

/// Whoever needs the pages before the tick gets them when they have been written, not instead of it.
#[test]
fn what_is_due_is_written_before_it_leaves() {
    let mut rig = Rig::new(config(4, 8, WT1)).ticked_by_hand();
    rig.serve(&t("AB"));
    let hungry = rig.request();
    assert_eq!(rig.alloc(hungry, 2), Ok(Alloc::Granted));
    assert!(rig.pending.is_empty(), "there was room");
    assert_eq!(rig.alloc(hungry, 2), Ok(Alloc::Refused { short_pages: 2, coming_pages: 2 }));
    rig.drain();
    assert_eq!(rig.alloc(hungry, 2), Ok(Alloc::Granted));
    assert_eq!(found(&rig, "AB"), (0, 2));
    rig.abort(hungry).unwrap();
    rig.assert_quiet();
}

/// The policy that holds when the tick comes decides, and what was thrown away meanwhile is not missed.
#[test]
fn what_is_due_no_more_is_not_written() {
    let mut rig = Rig::new(config(8, 8, WT1)).ticked_by_hand();
    rig.serve(&t("AB"));
    rig.set_write_policy(WritePolicy::WriteBack, false).unwrap();
    rig.tick(Time(1));
    assert!(rig.pending.is_empty());
    rig.set_write_policy(WT1, false).unwrap();
    rig.serve(&t("CD"));
    rig.core.reset().unwrap();
    assert!(rig.core.writes_are_idle());
    rig.serve(&t("EF"));
    let tier = rig.detach_host().unwrap();
    rig.attach_host(tier).unwrap();
    rig.tick(Time(2));
    assert!(rig.pending.is_empty());
    assert_eq!(rig.core.stats().violations, 0);
    rig.assert_quiet();
}

/// Pages of a request that goes away under a copy stay with the copy.
#[test]
fn an_abort_does_not_take_pages_from_a_copy() {
    let mut rig = Rig::new(config(4, 4, WT1));
    let request = rig.request();
    rig.alloc(request, 2).unwrap();
    rig.compute(request, &t("AB"), sapwood::base::NamespaceId::DEFAULT);
    rig.checkpoint(request, &t("AB")).unwrap();
    rig.abort(request).unwrap();
    let hungry = rig.request();
    assert!(matches!(rig.alloc(hungry, 4), Ok(Alloc::Refused { short_pages: 2, .. })));
    assert!(matches!(rig.pending[..], [Pending::ToHost(..)]));
    rig.drain();
    assert_eq!(rig.alloc(hungry, 4), Ok(Alloc::Granted));
    rig.abort(hungry).unwrap();
    rig.assert_quiet();
}
