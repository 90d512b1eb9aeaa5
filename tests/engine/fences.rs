//! Computation that was launched is never overtaken, also where a request loses its pages in passing.

use std::sync::Arc;

use sapwood::backend::device::{CopyFault, Device, SoftDevice, SoftFault};
use sapwood::base::{Fence, NamespaceId, Time};
use sapwood::engine::PrefixCache;
use sapwood::pool::{Capacities, Capacity, Geometry, Plane, PlaneId};
use sapwood::tiers::{Alloc, LoadBack, LoadState, WritePolicy};

/// A scheduler may compute on the layers that a load has brought while the rest of it runs. When the load then fails,
/// the request matches again and its own pages go back to the pool, but the computation on them may still run: a copy
/// into one of them has to wait for it.
#[test]
fn pages_of_a_request_whose_load_failed_come_back_behind_its_computation() {
    let geometry = Arc::new(Geometry::builder(2).plane(Plane::target(1, 4)).build().unwrap());
    let pages = Capacities::full(Capacity::Pages(2));
    let device = SoftDevice::manual(Arc::clone(&geometry), pages).unwrap();
    let mut cache = PrefixCache::builder(geometry)
        .device(device.clone())
        .host_pages(Capacity::Pages(8))
        .write_policy(WritePolicy::WriteThrough { threshold: 1 })
        .build()
        .unwrap();
    // A page of a prompt that lies on the host only.
    let prompt = [1, 2];
    let mut first = cache.request(NamespaceId::DEFAULT);
    assert_eq!(cache.alloc(&mut first, 1).unwrap(), Alloc::Granted);
    cache.finish(first, &prompt, Fence::SETTLED).unwrap();
    cache.tick(Time(1)).unwrap();
    device.finish_all();
    cache.tick(Time(2)).unwrap();
    let mut all = cache.request(NamespaceId::DEFAULT);
    assert_eq!(cache.alloc(&mut all, 2).unwrap(), Alloc::Granted);
    cache.abort(all, Fence::SETTLED).unwrap();

    // A load that fails, and computation launched on a page of the request meanwhile.
    device.inject(SoftFault { skip_jobs: 0, after_units: 0, fault: CopyFault { code: 7, quiescent: true } });
    let mut request = cache.request(NamespaceId::DEFAULT);
    assert_eq!(cache.match_prefix(&mut request, &prompt).unwrap().host_tokens, 2);
    assert!(matches!(cache.load_back(&mut request).unwrap(), LoadBack::Started { tokens: 2 }));
    assert_eq!(cache.alloc(&mut request, 1).unwrap(), Alloc::Granted);
    let own = cache.pages(&request).unwrap()[1];
    let work = device.compute_begin();
    device.finish_all();
    assert_eq!(cache.load_state(&request).unwrap(), LoadState::Failed);

    // Somebody takes the page of the failed load, so the next load goes into the other one.
    let mut other = cache.request(NamespaceId::DEFAULT);
    assert_eq!(cache.alloc(&mut other, 1).unwrap(), Alloc::Granted);
    assert_eq!(cache.match_prefix(&mut request, &prompt).unwrap().host_tokens, 2);
    assert!(matches!(cache.load_back(&mut request).unwrap(), LoadBack::Started { tokens: 2 }));
    assert_eq!(cache.pages(&request).unwrap(), [own]);
    assert_eq!(device.runnable(), [], "a copy runs beside computation on {own:?}");
    device.write_rows(PlaneId(0), own, 0, 0, &[9; 16]).unwrap();
    device.compute_end(work);
    device.finish_all();
    assert_eq!(cache.load_state(&request).unwrap(), LoadState::Ready);
}

/// Every submission costs the scheduler's thread a wake-up or a launch, so the backups of a step leave together, at its
/// tick; but a scheduler that waits for the room they make does not have to know that.
#[test]
fn backups_leave_at_the_tick_or_when_their_room_is_asked_for() {
    let geometry = Arc::new(Geometry::builder(2).plane(Plane::target(1, 4)).build().unwrap());
    let pages = Capacities::full(Capacity::Pages(2));
    let device = SoftDevice::manual(Arc::clone(&geometry), pages).unwrap();
    let (ring, rung) = std::sync::mpsc::sync_channel(1);
    let mut cache = PrefixCache::builder(geometry)
        .device(device.clone())
        .host_pages(Capacity::Pages(8))
        .write_policy(WritePolicy::WriteThrough { threshold: 1 })
        .waker(Arc::new(move || {
            let _ = ring.try_send(());
        }))
        .build()
        .unwrap();
    let publish = |cache: &mut PrefixCache, prompt: [u32; 2]| {
        let mut request = cache.request(NamespaceId::DEFAULT);
        assert_eq!(cache.alloc(&mut request, 1).unwrap(), Alloc::Granted);
        cache.finish(request, &prompt, Fence::SETTLED).unwrap();
    };
    publish(&mut cache, [1, 2]);
    publish(&mut cache, [3, 4]);
    assert_eq!((device.in_flight(), cache.next_due()), (0, Some(Time::ZERO)));
    assert!(rung.try_recv().is_ok(), "an owner that waits to be woken is woken");
    cache.tick(Time(1)).unwrap();
    assert_eq!(cache.next_due(), None);
    assert_eq!(device.in_flight(), 2);
    device.finish_all();
    cache.tick(Time(2)).unwrap();

    publish(&mut cache, [5, 6]);
    publish(&mut cache, [7, 8]);
    assert_eq!(device.in_flight(), 0);
    let mut next = cache.request(NamespaceId::DEFAULT);
    let refused = cache.alloc(&mut next, 1).unwrap();
    assert_eq!(refused, Alloc::Refused { short_pages: 1, coming_pages: 2 });
    device.finish_all();
    assert_eq!(cache.alloc(&mut next, 1).unwrap(), Alloc::Granted);
}
