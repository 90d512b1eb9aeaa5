//! A core that nobody uses comes to rest.

use sapwood::base::Time;
use sapwood::pool::Capacity;
use sapwood::sim::Rig;
use sapwood::tiers::{CoreConfig, WritePolicy};

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
