//! sgl#20049, sgl#35869: finished writes kept their nodes locked until somebody drained the acknowledgements, and only the
//! prefill path did. In a stretch of decoding nothing was evictable any more. Here whoever asks for pages drains first.

use std::sync::Arc;

use sapwood::backend::device::SoftDevice;
use sapwood::base::{Fence, NamespaceId};
use sapwood::engine::PrefixCache;
use sapwood::pool::{Capacities, Capacity, Geometry, Plane};
use sapwood::tiers::{Alloc, WritePolicy};

#[test]
fn an_allocation_drains_what_has_ended() {
    let geometry = Arc::new(Geometry::builder(2).plane(Plane::target(1, 4)).build().unwrap());
    let pages = Capacities::full(Capacity::Pages(8));
    let device = SoftDevice::manual(Arc::clone(&geometry), pages).unwrap();
    let mut cache = PrefixCache::builder(geometry)
        .device(device.clone())
        .host_pages(Capacity::Pages(8))
        .write_policy(WritePolicy::WriteThrough { threshold: 1 })
        .build()
        .unwrap();
    for prompt in 0..4u32 {
        let mut request = cache.request(NamespaceId::DEFAULT);
        assert_eq!(cache.alloc(&mut request, 2).unwrap(), Alloc::Granted);
        let tokens: Vec<u32> = (0..4).map(|i| prompt * 10 + i).collect();
        cache.finish(request, &tokens, Fence::SETTLED).unwrap();
    }
    let mut decoding = cache.request(NamespaceId::DEFAULT);
    let refused = cache.alloc(&mut decoding, 8).unwrap();
    assert_eq!(refused, Alloc::Refused { short_pages: 8, coming_pages: 8 }, "the copies run");
    // They end, and nobody calls `tick`.
    device.finish_all();
    assert_eq!(cache.alloc(&mut decoding, 8).unwrap(), Alloc::Granted);
    assert_eq!(cache.stats().demoted_pages, 8);
}
