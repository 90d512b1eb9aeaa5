//! Change of the write policy on a living cache.

use sapwood::base::Tier;
use sapwood::sim::{Call, Pending, Rig};
use sapwood::tiers::{Alloc, ConfigError, CoreError, WritePolicy};
use sapwood::tree::TreeError;

use crate::common::{WT1, WT2, config, found, t};

const WB: WritePolicy = WritePolicy::WriteBack;

/// From write-back to write-through only where no host copy hangs under a parent without one.
#[test]
fn write_through_needs_backed_up_parents() {
    let mut rig = Rig::new(config(4, 8, WB));
    rig.serve(&t("ABCD"));
    let reader = rig.request();
    rig.match_prefix(reader, &t("AB")).unwrap();
    let hungry = rig.request();
    rig.alloc(hungry, 2).unwrap();
    rig.drain();
    // CD is on the host, AB is not.
    assert_eq!(found(&rig, "ABCD"), (2, 2));
    let refused = rig.set_write_policy(WT1, false);
    assert!(matches!(refused, Err(CoreError::Tree(TreeError::RuleNotMet(_)))), "{refused:?}");
    assert_eq!(rig.core.config().write, WB, "nothing changed");
    rig.abort(reader).unwrap();
    rig.abort(hungry).unwrap();
    // AB follows, and then it is allowed.
    let hungry = rig.request();
    while rig.alloc(hungry, 4).unwrap() != Alloc::Granted {
        rig.drain();
    }
    rig.abort(hungry).unwrap();
    assert_eq!(rig.set_write_policy(WT1, false), Ok(()));
    rig.serve(&t("XY"));
    assert!(matches!(rig.pending[..], [Pending::ToHost(..)]), "written at once from now on");
    rig.drain();
    rig.assert_quiet();
}

/// Copies in flight end by the new rule: one that waited for its parent's need not, one that was to leave leaves.
#[test]
fn copies_in_flight_end_well_across_a_change() {
    for (parent, child) in [(Call::Well, Call::Well), (Call::Fails, Call::Well), (Call::Well, Call::Fails)] {
        let mut rig = Rig::new(config(16, 16, WT1));
        rig.serve(&t("AB"));
        rig.serve(&t("ABCD"));
        assert_eq!(rig.pending.len(), 2);
        rig.complete(1, &child);
        assert_eq!(rig.set_write_policy(WB, false), Ok(()));
        rig.complete(0, &parent);
        let backed = |well: &Call| if *well == Call::Well { 2 } else { 0 };
        assert_eq!(rig.core.page_counts(Tier::Host).cached_pages, backed(&parent) + backed(&child));
        rig.assert_quiet();
    }
}

/// A child is on the host and its parent's copy is on its way. It may fail, so write-through has to wait for its end.
#[test]
fn a_copy_in_flight_is_no_backed_up_parent() {
    for parent in [Call::Well, Call::Fails] {
        let mut rig = Rig::new(config(4, 8, WB));
        rig.serve(&t("ABCD"));
        let reader = rig.request();
        rig.match_prefix(reader, &t("AB")).unwrap();
        let hungry = rig.request();
        rig.alloc(hungry, 2).unwrap();
        rig.drain();
        rig.abort(reader).unwrap();
        rig.abort(hungry).unwrap();
        let hungry = rig.request();
        rig.alloc(hungry, 4).unwrap();
        assert!(matches!(rig.pending[..], [Pending::ToHost(..)]), "{:?}", rig.pending);
        assert!(rig.set_write_policy(WT1, false).is_err());
        rig.complete(0, &parent);
        assert_eq!(rig.set_write_policy(WT1, false), Ok(()), "CD is there only with AB");
        rig.abort(hungry).unwrap();
        rig.assert_quiet();
    }
}

/// Thresholds change with the policy, and every change among the write-through kinds is allowed.
#[test]
fn thresholds_follow() {
    let mut rig = Rig::new(config(16, 16, WT2));
    rig.serve(&t("AB"));
    assert!(rig.pending.is_empty());
    rig.set_write_policy(WT1, true).unwrap();
    rig.serve(&t("CD"));
    assert_eq!(rig.pending.len(), 1);
    rig.set_write_policy(WritePolicy::WriteThroughSelective, false).unwrap();
    rig.serve(&t("EF"));
    assert_eq!(rig.pending.len(), 1);
    rig.set_write_policy(WritePolicy::None, false).unwrap();
    for _ in 0..3 {
        rig.serve(&t("AB"));
    }
    assert_eq!(rig.pending.len(), 1);
    rig.drain();
    rig.assert_quiet();
}

/// What a configuration could not be made with, it can not be changed to.
#[test]
fn a_policy_that_makes_no_sense_is_refused() {
    let mut rig = Rig::new(config(4, 8, WT1));
    let zero = WritePolicy::WriteThrough { threshold: 0 };
    assert_eq!(rig.set_write_policy(zero, false), Err(CoreError::Config(ConfigError::ZeroThreshold)));
    let mut bare = Rig::new(config(4, 0, WritePolicy::None));
    assert_eq!(bare.set_write_policy(WT1, false), Err(CoreError::Config(ConfigError::NoHostPages)));
}

/// Freed pages are told in runs, not one by one.
#[test]
fn freed_pages_come_in_runs() {
    let mut core = sapwood::tiers::Core::new(config(1024, 0, WritePolicy::None)).unwrap();
    core.note_freed();
    let request = core.request(sapwood::base::NamespaceId::DEFAULT);
    core.alloc(request, 1000).unwrap();
    core.abort(request, sapwood::base::Fence::SETTLED).unwrap();
    let freed = core.take_freed();
    assert_eq!(freed.len(), 1, "{freed:?}");
    assert_eq!((freed[0].tier, freed[0].pages.pages), (Tier::Device, 1000));
    assert_eq!(core.take_freed(), []);
}
