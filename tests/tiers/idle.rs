//! A core that nobody uses comes to rest.

use sapwood::base::{NamespaceId, Time};
use sapwood::pool::Capacity;
use sapwood::sim::{Call, Rig};
use sapwood::tiers::{Alloc, CoreConfig, WritePolicy};

/// Writing ahead may not give up one copy to make another, and that one for the first, for ever.
#[test]
fn writing_ahead_comes_to_rest() {
    for (write, exclusive) in [
        (WritePolicy::WriteThrough { threshold: 1 }, true),
        (WritePolicy::WriteThroughSelective, true),
        (WritePolicy::WriteBack, false),
        (WritePolicy::WriteBack, true),
    ] {
        for host_pages in 1..12 {
            let mut rig = Rig::new(CoreConfig {
                host: Capacity::Pages(host_pages),
                write,
                exclusive,
                write_ahead_percent: 100,
                ..CoreConfig::device_only(1, Capacity::Pages(8))
            });
            for i in 0..6 {
                rig.serve(&[i, 10 + i, 20 + i]);
                rig.drain();
            }
            for turn in 0..64 {
                rig.drain();
                rig.tick(Time::from_millis(turn));
            }
            assert!(rig.pending.is_empty(), "{write:?}, exclusive: {exclusive}, {host_pages} host pages");
        }
    }
}

/// Copies to the host that fail again and again may not keep the device's pages from whoever needs them.
#[test]
fn a_host_that_takes_no_copy_does_not_block_the_device() {
    for write in [WritePolicy::WriteBack, WritePolicy::WriteThrough { threshold: 1 }] {
        let mut rig = Rig::new(CoreConfig {
            host: Capacity::Pages(16),
            write,
            ..CoreConfig::device_only(1, Capacity::Pages(4))
        });
        let fail_all = |rig: &mut Rig| {
            while !rig.pending.is_empty() {
                rig.complete(0, &Call::Fails);
            }
        };
        for i in 0..4 {
            let request = rig.request();
            let tokens = [i, 10 + i, 20 + i];
            let mut turns = 0;
            while rig.alloc(request, 3).expect("a live request") != Alloc::Granted {
                fail_all(&mut rig);
                turns += 1;
                assert!(turns < 8, "{write:?}: waits for copies that never end well");
            }
            rig.compute(request, &tokens, NamespaceId::DEFAULT);
            rig.finish(request, &tokens).expect("pages for every token");
            fail_all(&mut rig);
        }
        rig.assert_quiet();
    }
}
