//! What every device owes its owner, asked of every device there is.
#![cfg(feature = "host")]
#![expect(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]
#![expect(unsafe_code, reason = "a driver made for tests moves memory by address")]

mod alloc;
#[cfg(feature = "cuda")]
mod cuda;
mod fake;
mod null;
mod rig;
mod streams;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use sapwood::backend::device::{
    CopyFault, CopyJob, CopyPart, Device, DeviceError, Direction, JobError, Mode, Outcome, Refusal,
    SoftDevice, SoftFault, SoftOptions, Step, Submit, Transfer, TransferState,
};
use sapwood::backend::host::{HostArena, MemoryError, Order};
use sapwood::base::{Fence, OpId, PageId, Tier};
use sapwood::pool::{Geometry, Plane, PlaneId, PlaneSet, PoolKind};

use rig::{
    DEVICE_PAGES, HOST_PAGES, Random, Rig, capacities, cuda_rigs, geometry, ids, in_pool, rigs, stamped,
    stream_rigs,
};

#[test]
fn pages_of_all_pools_go_out_and_come_back() {
    for mut rig in rigs() {
        for (i, pool) in PoolKind::ALL.into_iter().enumerate() {
            for page in 0..4 {
                rig.stamp(Tier::Device, pool, page, 100 * i as u64 + u64::from(page));
            }
            (0..HOST_PAGES).for_each(|p| rig.stamp(Tier::Host, pool, p, 7));
        }
        let (src, dst) = (ids(&[2, 0, 3]), ids(&[39, 5, 6]));
        let parts = PoolKind::ALL.map(|pool| in_pool(pool, &src, &dst));
        let out = rig.submit(Direction::DeviceToHost, &parts, false);
        let ended = rig.wait(1);
        assert_eq!((ended[0].transfer, ended[0].outcome), (out.id(), Outcome::Done));
        assert_eq!(out.state(), TransferState::Done);
        assert_eq!(out.layers_ready(), rig.geometry.model_layers());
        assert_eq!(ended[0].parked, None);
        let page: u64 = PoolKind::ALL.iter().map(|&p| rig.geometry.page_bytes(p)).sum();
        assert_eq!(ended[0].bytes, 3 * page);

        PoolKind::ALL.iter().for_each(|&pool| rig.device_memory().poison(pool, PageId(2)).unwrap());
        let back = ids(&[20, 2, 11]);
        let parts = PoolKind::ALL.map(|pool| in_pool(pool, &dst, &back));
        let load = rig.submit(Direction::HostToDevice, &parts, true);
        assert_eq!(rig.wait(1)[0].outcome, Outcome::Done);
        assert_eq!(load.layers_ready(), 4);
        for (i, pool) in PoolKind::ALL.into_iter().enumerate() {
            for (at, from) in [(20, 2), (2, 0), (11, 3), (0, 0), (1, 1), (3, 3)] {
                rig.assert_stamp(Tier::Device, pool, at, 100 * i as u64 + from);
            }
            for page in (0..HOST_PAGES).filter(|p| ![39, 5, 6].contains(p)) {
                rig.assert_stamp(Tier::Host, pool, page, 7);
            }
        }
    }
}

#[test]
fn pages_move_inside_the_device_and_planes_can_be_chosen() {
    for mut rig in rigs() {
        rig.stamp(Tier::Device, PoolKind::Full, 1, 1);
        rig.stamp(Tier::Device, PoolKind::Full, 9, 9);
        let (src, dst) = (ids(&[1]), ids(&[9]));
        let part = CopyPart { planes: PlaneSet::one(PlaneId(1)), ..CopyPart::full(&src, &dst) };
        let _t = rig.submit(Direction::DeviceToDevice, &[part], false);
        assert_eq!(rig.wait(1)[0].bytes, rig.geometry.planes()[1].page_bytes());
        let mut got = vec![0; 128];
        rig.device_memory().read(PlaneId(1), PageId(9), 0, &mut got).unwrap();
        assert_eq!(got, stamped(1, PlaneId(1), 128));
        let mut got = vec![0; 1152];
        rig.device_memory().read(PlaneId(0), PageId(9), 0, &mut got).unwrap();
        assert_eq!(got, stamped(9, PlaneId(0), 1152), "{}", rig.name);
    }
}

#[test]
fn bad_jobs_are_errors_and_change_nothing() {
    for mut rig in rigs() {
        let d2h = Direction::DeviceToHost;
        let (a, b, two) = (ids(&[0]), ids(&[1]), ids(&[2, 3]));
        let try_one =
            |rig: &mut Rig, parts: &[CopyPart<'_>]| match rig.try_submit(d2h, parts, false, Fence::SETTLED) {
                Err(DeviceError::Job(e)) => e,
                other => panic!("{other:?}"),
            };
        assert_eq!(try_one(&mut rig, &[CopyPart::full(&a, &two)]), JobError::Unpaired { src: 1, dst: 2 });
        let again = [CopyPart::full(&a, &b), CopyPart::full(&two, &two)];
        assert_eq!(try_one(&mut rig, &again), JobError::PoolTwice { pool: PoolKind::Full });
        let past = ids(&[DEVICE_PAGES]);
        assert!(matches!(
            try_one(&mut rig, &[CopyPart::full(&past, &b)]),
            JobError::NoSuchPage { tier: Tier::Device, page: PageId(DEVICE_PAGES), pages: DEVICE_PAGES, .. }
        ));
        let past = ids(&[u32::MAX]);
        assert!(matches!(
            try_one(&mut rig, &[CopyPart::full(&a, &past)]),
            JobError::NoSuchPage { tier: Tier::Host, .. }
        ));
        // The same destination twice: the second part fails, the first part's claims are undone.
        let twice = ids(&[8, 8]);
        let parts = [in_pool(PoolKind::State, &a, &b), CopyPart::full(&two, &twice)];
        assert!(matches!(
            try_one(&mut rig, &parts),
            JobError::PageBusy { tier: Tier::Host, page: PageId(8), pool: PoolKind::Full }
        ));
        for pool in [PoolKind::State, PoolKind::Full] {
            (0..10).for_each(|p| rig.stamp(Tier::Host, pool, p, 1));
            (0..10).for_each(|p| rig.stamp(Tier::Device, pool, p, 1));
        }
        assert!(matches!(
            rig.try_submit(d2h, &[CopyPart::full(&a, &b)], false, Fence::after(1)),
            Err(DeviceError::FenceAhead { fence: 1, last: 0 })
        ));
        assert_eq!(rig.device().in_flight(), 0);
        assert!(matches!(
            {
                let arena = Arc::clone(&rig.arena);
                rig.device().attach_host(arena)
            },
            Err(DeviceError::HostArenaTwice)
        ));
    }
    let g = geometry();
    let mut device = SoftDevice::inline(Arc::clone(&g), capacities(2)).unwrap();
    let other = Arc::new(Geometry::builder(4).plane(Plane::target(3, 48)).build().unwrap());
    let other = Arc::new(HostArena::new(other, capacities(2)).unwrap());
    assert!(matches!(device.attach_host(other), Err(DeviceError::GeometryMismatch)));
    let (a, b) = (ids(&[0]), ids(&[1]));
    let parts = [CopyPart::full(&a, &b)];
    let job = CopyJob { op: OpId(1), direction: Direction::HostToDevice, parts: &parts, by_layer: false };
    assert!(matches!(device.submit(&job, Fence::SETTLED), Err(DeviceError::NoHostArena)));
    let inside = CopyJob { direction: Direction::DeviceToDevice, ..job };
    assert!(matches!(device.submit(&inside, Fence::SETTLED), Ok(Submit::Started(_))));
}

#[test]
fn a_full_queue_refuses_and_takes_again_after_a_poll() {
    for mut rig in rigs() {
        let work = rig.compute_begin();
        let limit = rig.device().room(Direction::DeviceToHost);
        let page = ids(&[4]);
        let parts = [CopyPart::full(&page, &page)];
        let mut held = Vec::new();
        for i in 0..=limit {
            assert_eq!(rig.device().room(Direction::DeviceToHost), limit - i);
            let parts = if i == limit { &parts[..] } else { &[] };
            match rig.try_submit(Direction::DeviceToHost, parts, false, work).unwrap() {
                Submit::Started(t) => held.push(t),
                Submit::Refused(r) => assert_eq!((i, r), (limit, Refusal::QueueFull { limit })),
            }
        }
        assert_eq!(held.len(), limit as usize);
        rig.stamp(Tier::Host, PoolKind::Full, 4, 1);
        assert_eq!(rig.device().room(Direction::HostToDevice), limit, "directions have queues of their own");
        rig.compute_end(work);
        let order: Vec<_> = rig.wait(held.len()).into_iter().map(|c| c.transfer).collect();
        assert_eq!(order, held.iter().map(Transfer::id).collect::<Vec<_>>(), "in order");
        assert_eq!(rig.device().room(Direction::DeviceToHost), limit);
    }
}

/// vllm#46278: a copy to the host must not run ahead of the compute that writes its source. sgl#36738: a
/// copy to the device must not be overtaken by compute that was launched before it.
#[test]
fn no_copy_overtakes_its_fence() {
    for mut rig in rigs() {
        rig.stamp(Tier::Device, PoolKind::Full, 1, 111);
        rig.stamp(Tier::Host, PoolKind::Full, 6, 666);
        let (first, second) = (rig.compute_begin(), rig.compute_begin());
        assert_eq!(rig.device().launched(), second);
        let lists = [ids(&[1]), ids(&[0]), ids(&[6]), ids(&[2])];
        let behind = |rig: &mut Rig, direction, src, dst| match rig.try_submit(
            direction,
            &[CopyPart::full(src, dst)],
            false,
            second,
        ) {
            Ok(Submit::Started(t)) => t,
            other => panic!("{other:?}"),
        };
        let backup = behind(&mut rig, Direction::DeviceToHost, &lists[0], &lists[1]);
        let load = behind(&mut rig, Direction::HostToDevice, &lists[2], &lists[3]);
        let mut out = Vec::new();
        for piece in [second, first] {
            for _ in 0..20 {
                rig.drive();
                rig.device().poll(&mut out).unwrap();
                std::thread::yield_now();
            }
            assert!(out.is_empty(), "{}: an earlier piece is still open", rig.name);
            assert_eq!((backup.state(), load.state()), (TransferState::Pending, TransferState::Pending));
            assert!(!rig.is_soft() || rig.soft_device().runnable().is_empty());
            rig.compute_end(piece);
        }
        let ended = rig.wait(2);
        assert!(ended.iter().all(|c| c.outcome == Outcome::Done));
        rig.assert_stamp(Tier::Host, PoolKind::Full, 0, 111);
        rig.assert_stamp(Tier::Device, PoolKind::Full, 2, 666);
    }
}

/// sgl#36738 once more: a fence that is too early is refused where the device knows better.
#[test]
fn a_fence_before_the_last_known_use_is_refused() {
    let mut rig = Rig::soft(SoftOptions::new(Mode::Manual));
    let device = rig.soft_device().clone();
    let earlier = device.compute_begin();
    let last = device.compute_begin_on(&[(PoolKind::Full, PageId(7))]);
    let (host, page) = (ids(&[0]), ids(&[7]));
    let load = [CopyPart::full(&host, &page)];
    for fence in [Fence::SETTLED, earlier] {
        match rig.try_submit(Direction::HostToDevice, &load, false, fence) {
            Err(DeviceError::Job(JobError::FenceTooEarly { page: PageId(7), last_use, .. })) => {
                assert_eq!(last_use, last.number());
            }
            other => panic!("{other:?}"),
        }
    }
    let backup = [CopyPart::full(&page, &host)];
    assert!(rig.try_submit(Direction::DeviceToHost, &backup, false, earlier).is_err());
    let started = rig.try_submit(Direction::HostToDevice, &load, false, last).unwrap();
    device.compute_end(last);
    assert!(device.runnable().is_empty(), "an earlier piece is open");
    device.compute_end(earlier);
    rig.wait(1);
    drop(started);
    let settled = rig.try_submit(Direction::DeviceToHost, &backup, false, Fence::SETTLED);
    assert!(matches!(settled, Ok(Submit::Started(_))), "the use is over");
}

/// peg#403: memory in flight belongs to the transfer, whatever happened to whoever asked for it.
#[test]
fn pages_in_flight_refuse_everybody_and_a_dropped_handle_parks_them() {
    for mut rig in rigs() {
        (0..4).for_each(|p| rig.stamp(Tier::Device, PoolKind::Full, p, u64::from(p)));
        let work = rig.compute_begin();
        let (src, dst) = (ids(&[1, 2]), ids(&[10, 11]));
        let parts = [CopyPart::full(&src, &dst)];
        let started = rig.try_submit(Direction::DeviceToHost, &parts, false, work).unwrap();
        drop(started);
        let row = vec![0; 96];
        // The memory behind a stream is not ours to guard.
        if rig.is_soft() {
            let early = rig.device_memory().write_rows(PlaneId(0), PageId(2), 0, 0, &row);
            assert!(matches!(early, Err(MemoryError::Busy { page: PageId(2), .. })));
        }
        rig.device_memory().read_rows(PlaneId(0), PageId(2), 0, 0, &mut [0; 96]).unwrap();
        assert!(rig.arena.read(PlaneId(0), PageId(10), 0, &mut [0]).is_err());
        assert!(rig.arena.poison(PoolKind::Full, PageId(11)).is_err());
        let (other, free) = (ids(&[10]), ids(&[5]));
        let clash =
            rig.try_submit(Direction::HostToDevice, &[CopyPart::full(&other, &free)], false, Fence::SETTLED);
        assert!(matches!(
            clash,
            Err(DeviceError::Job(JobError::PageBusy { tier: Tier::Host, page: PageId(10), .. }))
        ));
        rig.compute_end(work);
        let ended = rig.wait(1);
        let parked = ended[0].parked.as_ref().expect("the handle was dropped");
        assert_eq!(parked.parts, [(PoolKind::Full, src.clone(), dst.clone())]);
        rig.assert_stamp(Tier::Host, PoolKind::Full, 10, 1);
        rig.device_memory().write_rows(PlaneId(0), PageId(2), 0, 0, &row).unwrap();
    }
}

#[test]
fn a_failed_copy_is_reported_once_and_frees_its_pages_only_if_it_is_over() {
    for mut rig in rigs().into_iter().filter(Rig::is_soft) {
        for (quiescent, after_units) in [(true, 0), (true, 1), (true, 2), (false, 1)] {
            let fault = CopyFault { code: 77, quiescent };
            rig.soft_device().inject(SoftFault { skip_jobs: 1, after_units, fault });
            let (src, dst) = (ids(&[1, 2]), ids(&[10, 11]));
            let parts = [CopyPart::full(&src, &dst)];
            let good = rig.submit(Direction::HostToDevice, &[], false);
            let bad = rig.submit(Direction::DeviceToHost, &parts, false);
            let ended = rig.wait(2);
            let of = |t: &Transfer| ended.iter().find(|c| c.transfer == t.id()).unwrap().outcome;
            assert_eq!(of(&good), Outcome::Done);
            assert_eq!(of(&bad), Outcome::Failed(fault));
            assert_eq!((bad.state(), bad.layers_ready()), (TransferState::Failed, 0));
            assert_eq!(rig.arena.read(PlaneId(0), PageId(10), 0, &mut [0]).is_ok(), quiescent);
            assert_eq!(rig.device().in_flight(), 0);
        }
    }
}

/// A host tier that goes and comes: not under a job, and then with everything the driver knew of it.
#[test]
fn the_host_arena_can_be_exchanged() {
    for mut rig in rigs() {
        let work = rig.compute_begin();
        let (src, dst) = (ids(&[1]), ids(&[10]));
        let parts = [CopyPart::full(&src, &dst)];
        let held = rig.try_submit(Direction::DeviceToHost, &parts, false, work).unwrap();
        assert!(matches!(rig.device().detach_host(), Err(DeviceError::HostInUse { jobs: 1 })));
        rig.compute_end(work);
        rig.wait(1);
        drop(held);
        rig.device().detach_host().unwrap();
        rig.device().detach_host().unwrap();
        assert_eq!(rig.registered(), 0, "{}", rig.name);
        let refused = rig.try_submit(Direction::DeviceToHost, &parts, false, Fence::SETTLED);
        assert!(matches!(refused, Err(DeviceError::NoHostArena)), "{}", rig.name);
        rig.exchange_arena();
        rig.stamp(Tier::Device, PoolKind::Full, 1, 5);
        let copy = rig.submit(Direction::DeviceToHost, &parts, false);
        assert_eq!(rig.wait(1)[0].transfer, copy.id());
        rig.assert_stamp(Tier::Host, PoolKind::Full, 10, 5);
    }
}

#[test]
fn closing_takes_no_more_and_counts_what_is_left() {
    for mut rig in rigs() {
        let work = rig.compute_begin();
        let (src, dst) = (ids(&[1]), ids(&[10]));
        let parts = [CopyPart::full(&src, &dst)];
        let held = rig.try_submit(Direction::DeviceToHost, &parts, false, work).unwrap();
        assert_eq!(rig.device().close(Duration::from_millis(1)).unfinished, 1, "{}", rig.name);
        let (src, dst) = (ids(&[2]), ids(&[12]));
        let more =
            rig.try_submit(Direction::DeviceToHost, &[CopyPart::full(&src, &dst)], false, Fence::SETTLED);
        assert!(matches!(more, Err(DeviceError::Closed)));
        assert_eq!(rig.device().room(Direction::DeviceToHost), 0);
        rig.compute_end(work);
        rig.drive();
        assert_eq!(rig.device().close(Duration::from_secs(60)).unfinished, 0);
        assert_eq!(rig.wait(1)[0].outcome, Outcome::Done);
        drop(held);
    }
}

#[test]
fn the_last_handle_can_go_with_jobs_in_flight() {
    for mut rig in rigs() {
        let work = rig.compute_begin();
        let (src, dst) = (ids(&[1]), ids(&[10]));
        let held = rig.try_submit(Direction::DeviceToHost, &[CopyPart::full(&src, &dst)], true, work);
        let arena = Arc::clone(&rig.arena);
        drop(rig);
        assert!(arena.read(PlaneId(0), PageId(10), 0, &mut [0]).is_err(), "nobody proved an end");
        drop(held);
    }
}

#[test]
fn the_waker_is_called_at_every_end() {
    for mut rig in rigs() {
        let calls = Arc::new(AtomicU32::new(0));
        let seen = Arc::clone(&calls);
        rig.device().set_waker(Some(Arc::new(move || {
            seen.fetch_add(1, Ordering::SeqCst);
        })));
        let (src, dst) = (ids(&[1]), ids(&[10]));
        let _a = rig.submit(Direction::DeviceToHost, &[CopyPart::full(&src, &dst)], false);
        let _b = rig.submit(Direction::HostToDevice, &[], true);
        rig.wait(2);
        while calls.load(Ordering::SeqCst) < 2 {
            std::thread::yield_now();
        }
        assert_eq!(calls.load(Ordering::SeqCst), 2);
    }
}

/// sgl#22811: a layer may be used when every plane of it is there, and not before.
#[test]
fn layers_become_ready_one_by_one_in_all_planes() {
    let mut rig = Rig::soft(SoftOptions::new(Mode::Manual));
    for pool in PoolKind::ALL {
        rig.stamp(Tier::Host, pool, 3, 3);
        rig.stamp(Tier::Host, pool, 4, 4);
    }
    let (src, dst) = (ids(&[3, 4]), ids(&[0, 1]));
    let parts = PoolKind::ALL.map(|pool| in_pool(pool, &src, &dst));
    let load = rig.submit(Direction::HostToDevice, &parts, true);
    let mut random = Random::new(5);
    let mut steps = 0;
    loop {
        let before = load.layers_ready();
        let step = rig.soft_device().step(load.id(), random.next());
        steps += 1;
        if step == Step::Ended {
            break;
        }
        assert_eq!(step, Step::Copied { left: 4 * 6 - steps });
        assert!(load.layers_ready() == before || load.layers_ready() == before + 1);
        assert_eq!(u64::from(load.layers_ready()), steps / 6);
    }
    assert_eq!(steps, 24, "four layers of the model, three pools, two pages");
    rig.wait(1);
    PoolKind::ALL.iter().for_each(|&pool| rig.assert_stamp(Tier::Device, pool, 1, 4));
}

/// A copy reads when it runs: what compute wrote after the submission and before its fence is copied.
#[test]
fn a_source_is_read_when_the_copy_runs() {
    let mut rig = Rig::soft(SoftOptions::new(Mode::Manual));
    rig.stamp(Tier::Host, PoolKind::Full, 3, 3);
    let (src, dst, on) = (ids(&[3]), ids(&[0]), ids(&[7]));
    let first = rig.submit(Direction::HostToDevice, &[CopyPart::full(&src, &dst)], false);
    let parts = [CopyPart::full(&dst, &on)];
    let early = rig.try_submit(Direction::DeviceToHost, &parts, false, Fence::SETTLED);
    assert!(matches!(early, Err(DeviceError::Job(JobError::PageBusy { tier: Tier::Device, .. }))));
    assert!(rig.soft_device().finish(first.id()));
    assert_eq!(first.state(), TransferState::Pending, "an end shows when it is polled");
    assert_eq!(rig.wait(1)[0].outcome, Outcome::Done);
    let second = rig.submit(Direction::DeviceToHost, &parts, false);
    assert_eq!(rig.soft_device().step(first.id(), 0), Step::NotRunnable);
    assert!(rig.soft_device().finish(second.id()));
    rig.wait(1);
    rig.assert_stamp(Tier::Host, PoolKind::Full, 7, 3);
}

/// Random jobs in random legal orders against a model of the stamps of every page.
#[test]
fn any_legal_order_gives_the_same_bytes() {
    let mut random = Random::new(20_261_129);
    let by_hand = |order| Rig::soft(SoftOptions { order, queue_limit: 3, ..SoftOptions::new(Mode::Manual) });
    let soft = [Order::PageFirst, Order::LayerFirst].map(by_hand);
    for mut rig in soft.into_iter().chain(stream_rigs()).chain(cuda_rigs()) {
        let pages = [DEVICE_PAGES, HOST_PAGES];
        let tiers = [Tier::Device, Tier::Host];
        let mut model: Vec<Vec<u64>> =
            pages.iter().map(|&n| (0..u64::from(n)).map(|p| p + 1000 * u64::from(n)).collect()).collect();
        for side in 0..2 {
            (0..pages[side]).for_each(|p| rig.stamp(tiers[side], PoolKind::Full, p, model[side][p as usize]));
        }
        let mut open: Vec<(Transfer, Direction, Vec<PageId>, Vec<PageId>)> = Vec::new();
        let (mut copied, mut clashed) = (0, 0);
        for _ in 0..3000 {
            if random.below(8) == 0 {
                let direction = Direction::ALL[random.below(3) as usize];
                let side = |t: Tier| usize::from(t == Tier::Host);
                let mut pick = |t: Tier, n: u64| -> Vec<PageId> {
                    (0..n).map(|_| PageId(random.below(u64::from(pages[side(t)])) as u32)).collect()
                };
                let (src, dst) = (pick(direction.source(), 3), pick(direction.destination(), 3));
                let by_layer = copied % 2 == 0;
                let parts = [CopyPart::full(&src, &dst)];
                match rig.try_submit(direction, &parts, by_layer, Fence::SETTLED) {
                    Ok(Submit::Started(t)) => open.push((t, direction, src, dst)),
                    Ok(Submit::Refused(_)) => {}
                    Err(DeviceError::Job(JobError::PageBusy { .. })) => clashed += 1,
                    Err(e) => panic!("{e}"),
                }
            }
            rig.drive_some(&mut random);
            let mut ended = Vec::new();
            rig.device().poll(&mut ended).unwrap();
            for c in ended {
                let at = open.iter().position(|(t, ..)| t.id() == c.transfer).unwrap();
                let (_, direction, src, dst) = open.remove(at);
                let side = |t: Tier| usize::from(t == Tier::Host);
                for (s, d) in src.iter().zip(&dst) {
                    let stamp = model[side(direction.source())][s.0 as usize];
                    model[side(direction.destination())][d.0 as usize] = stamp;
                    copied += 1;
                }
            }
        }
        let left = open.len();
        rig.wait(left).into_iter().for_each(|c| {
            let (_, direction, src, dst) = open.iter().find(|(t, ..)| t.id() == c.transfer).unwrap();
            let side = |t: Tier| usize::from(t == Tier::Host);
            for (s, d) in src.iter().zip(dst) {
                model[side(direction.destination())][d.0 as usize] =
                    model[side(direction.source())][s.0 as usize];
            }
        });
        // A device that runs by itself may have been slow; the bytes below are what counts.
        let by_hand = !rig.name.starts_with("cuda");
        assert!(!by_hand || (copied > 100 && clashed > 20), "{copied} copied, {clashed} clashed");
        for side in 0..2 {
            for p in 0..pages[side] {
                rig.assert_stamp(tiers[side], PoolKind::Full, p, model[side][p as usize]);
            }
        }
    }
}
