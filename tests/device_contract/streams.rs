//! What only a stream device can show: its engines, its events, a driver that fails.

use sapwood::backend::device::{CopyPart, Device, DeviceError, Direction, Outcome, Submit, TransferState};
use sapwood::base::{Fence, PageId, Tier};
use sapwood::pool::PoolKind;

use crate::fake::COMPUTE;
use crate::rig::{Rig, ids, rigs, stream_rigs};

fn named(name: &str) -> Rig {
    stream_rigs().into_iter().find(|r| r.name.starts_with(&format!("stream {name} LayerFirst"))).unwrap()
}

#[test]
fn every_engine_is_led_to() {
    let (src, dst) = (ids(&[4, 5, 6]), ids(&[7, 8, 9]));
    let work = |name: &str| {
        let mut rig = named(name);
        let _t = rig.submit(Direction::DeviceToHost, &[CopyPart::full(&src, &dst)], false);
        rig.wait(1);
        rig.stream_device().1.work()
    };
    // Two planes: 3 layers x 2 parts of 3 pages, and 1 layer x 2 parts of 3 pages.
    assert_eq!(work("copy engine"), (24, 0));
    assert_eq!(work("kernels"), (0, 2));
    assert_eq!(work("staged"), (2, 2), "each plane: one relayout, one block of three pages");
    assert!(work("slices").0 >= 24);
    assert!(work("kernel slices").1 > 2);
}

#[test]
fn a_load_is_waited_for_by_the_stream_that_needs_it() {
    for mut rig in stream_rigs() {
        rig.stamp(Tier::Host, PoolKind::Full, 3, 33);
        let (src, dst) = (ids(&[3]), ids(&[2]));
        let load = rig.submit(Direction::HostToDevice, &[CopyPart::full(&src, &dst)], true);
        let (device, _) = rig.stream_device();
        device.wait_layer(&load, 0, COMPUTE).unwrap();
        device.wait_layer(&load, 2, COMPUTE).unwrap();
        // The forward pass behind the waits: a backup behind it must see the loaded bytes.
        let forward = device.note_compute(COMPUTE).unwrap();
        assert_eq!(rig.wait(1)[0].outcome, Outcome::Done);
        let out = ids(&[5]);
        let backup =
            rig.try_submit(Direction::DeviceToHost, &[CopyPart::full(&dst, &out)], false, forward).unwrap();
        rig.wait(1);
        rig.assert_stamp(Tier::Host, PoolKind::Full, 5, 33);
        let (device, _) = rig.stream_device();
        device.wait_layer(&load, 1, COMPUTE).unwrap();
        // The same through the trait, which is what a cache holds.
        let device: &mut dyn Device = device;
        assert!(device.wait_layer(&load, 2, COMPUTE).unwrap());
        assert_eq!(device.note_compute(COMPUTE).unwrap(), device.launched());
        drop(backup);
    }
}

#[test]
fn a_driver_that_fails_ends_the_device_and_proves_nothing() {
    // Wherever the failure comes, every job is reported exactly once, as failed without proof, and its host
    // pages stay out of reach.
    for n in 0..40 {
        for name in ["copy engine", "kernels", "staged"] {
            let mut rig = named(name);
            let lists: Vec<_> = (0..3).map(|i| (ids(&[i]), ids(&[i]))).collect();
            rig.stream_device().1.fail_in(n);
            let (mut held, mut refused, mut ended) = (Vec::new(), 0, Vec::new());
            let mut errors = 0;
            for (src, dst) in &lists {
                let parts = [CopyPart::full(src, dst)];
                match rig.try_submit(Direction::DeviceToHost, &parts, false, Fence::SETTLED) {
                    Ok(Submit::Started(t)) => held.push(t),
                    Ok(Submit::Refused(r)) => panic!("{r:?}"),
                    Err(DeviceError::Driver { code: 700, .. }) => refused += 1,
                    Err(e) => panic!("{e}"),
                }
            }
            for _ in 0..4 {
                errors += u32::from(rig.device().poll(&mut ended).is_err());
            }
            assert_eq!(held.len() + refused, 3);
            if errors == 0 {
                rig.drive();
                errors += u32::from(rig.device().poll(&mut ended).is_err());
            }
            assert_eq!(ended.len(), held.len(), "{name} {n}");
            assert!(errors <= 1, "the failure surfaces once");
            for c in &ended {
                let done = matches!(c.outcome, Outcome::Done);
                let unproved = matches!(c.outcome, Outcome::Failed(f) if !f.quiescent && f.code == 700);
                assert!(done || unproved, "{:?}", c.outcome);
                let page = PageId((c.op.0 - 1) as u32);
                assert_eq!(rig.arena.read(sapwood::pool::PlaneId(0), page, 0, &mut [0]).is_ok(), done);
            }
            for t in &held {
                assert_ne!(t.state(), TransferState::Pending);
            }
            if errors == 1 {
                assert!(rig.device().poll(&mut ended).is_ok());
                let parts = [CopyPart::full(&lists[0].0, &lists[0].1)];
                let more = rig.try_submit(Direction::DeviceToHost, &parts, false, Fence::SETTLED);
                assert!(matches!(more, Err(DeviceError::Driver { .. })));
                assert_eq!(rig.device().room(Direction::DeviceToHost), 0);
            }
        }
    }
}

#[test]
fn buffers_are_used_again() {
    let mut rig = rigs().pop().unwrap();
    for round in 0..200u32 {
        let (src, dst) = (ids(&[round % 24]), ids(&[round % 40]));
        let t = rig.submit(Direction::DeviceToHost, &[CopyPart::full(&src, &dst)], round % 2 == 0);
        let ended = rig.wait(1);
        assert_eq!((ended[0].transfer, ended[0].outcome), (t.id(), Outcome::Done));
        assert_eq!(t.layers_ready(), rig.geometry.model_layers());
    }
}
