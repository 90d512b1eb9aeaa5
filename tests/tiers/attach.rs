//! The host tier and the store come and go while the device serves.

use sapwood::base::Tier;
use sapwood::pool::Capacity;
use sapwood::sim::{Pending, Rig};
use sapwood::tiers::{ConfigError, CoreError, HostTier, Prefetch, StoreConfig, WritePolicy};
use sapwood::tree::TreeError;

use crate::common::{WT1, config, flush_device, found, t, t1, with_store};

/// What the device holds is served on, under a request as well, though its host copies go. What only the host holds is
/// forgotten, but not under the request that matched it.
#[test]
fn the_device_serves_on_without_a_host() {
    let mut rig = Rig::new(with_store(config(8, 8, WT1)));
    rig.serve(&t("AB"));
    assert!(matches!(rig.detach_host(), Err(CoreError::InUse { .. })), "a copy is in flight");
    rig.drain();
    flush_device(&mut rig, 8);
    rig.serve(&t("CD"));
    rig.drain();
    let reads_device = rig.request();
    assert_eq!(rig.match_prefix(reads_device, &t("CDX")).unwrap().device_tokens, 8);
    let reads_host = rig.request();
    assert_eq!(rig.match_prefix(reads_host, &t("ABX")).unwrap().host_tokens, 8);
    assert!(matches!(rig.detach_host(), Err(CoreError::Tree(TreeError::InUse(_)))));
    rig.abort(reads_host).unwrap();
    let was = rig.detach_host().unwrap();
    assert_eq!((was.pages, was.write), (Capacity::Pages(8), WT1));
    assert_eq!((found(&rig, "AB"), found(&rig, "CD")), ((0, 0), (2, 0)));
    assert_eq!(rig.core.page_counts(Tier::Host).capacity_pages, 0);
    rig.verify(reads_device, &t("CDX"));
    rig.abort(reads_device).unwrap();
    // No tier below: nothing is copied, nothing is asked.
    rig.serve(&t("EF"));
    let asks = rig.request();
    assert!(matches!(rig.prefetch(asks, &t1("ABCD")), Ok(Prefetch::Refused(_))));
    rig.abort(asks).unwrap();
    assert!(rig.pending.is_empty());
    rig.assert_quiet();
}

/// A host tier comes to a cache that never had one; what is used from then on is copied, parents first, and stored under
/// the names that it would have had from the start.
#[test]
fn a_cache_gets_the_tiers_it_was_built_without() {
    let mut rig = Rig::new(config(8, 0, WritePolicy::None));
    rig.serve(&t("ABC"));
    let tier = HostTier {
        pages: Capacity::Pages(8),
        window: Capacity::Pages(0),
        state: Capacity::Pages(0),
        write: WT1,
        exclusive: false,
        store: Some(StoreConfig::default()),
    };
    let none = HostTier { pages: Capacity::Pages(0), ..tier };
    assert_eq!(rig.attach_host(none), Err(CoreError::Config(ConfigError::NoHostPages)));
    rig.attach_host(tier).unwrap();
    assert_eq!(rig.attach_host(tier), Err(CoreError::HostPresent));
    rig.serve(&t("ABCD"));
    rig.drain();
    assert_eq!(rig.core.tree().stats().host_pages_mirrored, 4);
    let mut always = Rig::new(with_store(config(8, 8, WT1)));
    always.serve(&t("ABCD"));
    always.drain();
    assert_eq!(rig.stored(), always.stored());
    assert_eq!(rig.stored().len(), 4);
    rig.assert_quiet();
    rig.assert_stored();
}

/// Another store: what the old one had counts for nothing, and the host's copies are written to the new one.
#[test]
fn another_store_gets_what_the_host_holds() {
    let mut rig = Rig::new(with_store(config(8, 8, WT1)));
    for prompt in ["ABC", "ABD"] {
        rig.serve(&t(prompt));
    }
    rig.drain_kind(|p| matches!(p, Pending::ToHost(..)));
    assert!(
        matches!(rig.new_store(StoreConfig::default()), Err(CoreError::InUse { .. })),
        "a write is in flight"
    );
    rig.drain();
    assert_eq!(rig.stored().len(), 4);
    rig.new_store(StoreConfig::default()).unwrap();
    assert_eq!(rig.stored().len(), 0);
    rig.drain();
    assert_eq!(rig.stored().len(), 4);
    rig.assert_stored();
    rig.detach_host().unwrap();
    let none = Err(CoreError::Config(ConfigError::NoHostPages));
    assert_eq!(rig.new_store(StoreConfig::default()), none);
    rig.assert_quiet();
}
