//! What the session with the real client promises.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use sapwood::backend::region::Sharing;
use sapwood::backend::store::group::Grouped;
use sapwood::backend::store::mooncake::{MooncakeConfig, MooncakeError, MooncakeStore};
use sapwood::backend::store::{Call, Health, Outcome, RegisterError, Store, TransportCause};

use crate::kit::{Arena, Left, StandsStill, alone, assert_left, mapped_by, region, until};
use crate::service::Service;

const MIB: usize = 1 << 20;
const NOTHING: Left = Left { threads: 0, descriptors: 0, mappings: 0 };

fn open(service: &Service) -> MooncakeStore {
    MooncakeStore::open(MooncakeConfig::at(service.address())).unwrap()
}

fn call() -> Call {
    Call::unbounded()
}

#[test]
fn objects_outlive_the_engine() {
    let _alone = alone();
    let Some(service) = Service::start("64 MB") else { return };
    let before = open(&service);
    let a = Arena::new(&before, 4 * MIB);
    let items: Vec<_> = (0..4).map(|n| a.item(n, n as usize * MIB, MIB)).collect();
    (0..4).for_each(|n| a.fill(n, n as usize * MIB, MIB));
    assert_eq!(before.put(&items, &call()), [Outcome::Ok(MIB); 4]);
    before.close(Instant::now() + Duration::from_secs(10)).unwrap();
    drop((before, a));
    let after = open(&service);
    let b = Arena::new(&after, 4 * MIB);
    let items: Vec<_> = (0..4).map(|n| b.item(n, (3 - n as usize) * MIB, MIB)).collect();
    let keys: Vec<_> = items.iter().map(|i| i.key).collect();
    assert_eq!(after.query(&keys, &call()), [Outcome::Ok(MIB); 4]);
    assert_eq!(after.get(&items, &call()), [Outcome::Ok(MIB); 4]);
    assert!((0..4).all(|n| b.holds(n, (3 - n as usize) * MIB, MIB)));
}

/// The real client says that it has put what is there already, whatever its length, so a put has to ask first.
#[test]
fn what_somebody_else_put_is_kept_and_another_length_makes_way() {
    let _alone = alone();
    let Some(service) = Service::start("256 MB") else { return };
    let (ours, theirs) = (open(&service), open(&service));
    for len in [4096, (1 << 20) - 64, 1 << 20, (2 << 20) + 64] {
        let (a, b) = (Arena::new(&ours, 12 * len), Arena::new(&theirs, 12 * (len + 64)));
        let name = |n: usize| (len * 16 + n) as u64;
        // The first four are as we shall put them, the next four are longer.
        let put: Vec<_> = (0..8).map(|n| b.item(name(n), n * (len + 64), len + n / 4 * 64)).collect();
        (0..8).for_each(|n| b.fill(n as u64, n * (len + 64), len + n / 4 * 64));
        assert!(theirs.put(&put, &call()).iter().all(|o| o.is_ok()));
        let items: Vec<_> = (0..12).map(|n| a.item(name(n), n * len, len)).collect();
        (0..12).for_each(|n| a.fill(100 + n as u64, n * len, len));
        let present = || ours.stats().put_present_total;
        let before = present();
        assert_eq!(ours.put(&items, &call()), [Outcome::Ok(len); 12]);
        assert_eq!(present() - before, 4);
        assert_eq!(ours.put(&items, &call()), [Outcome::Ok(len); 12]);
        assert_eq!(present() - before, 16);
        a.clear();
        assert_eq!(ours.get(&items, &call()), [Outcome::Ok(len); 12]);
        for n in 0..12 {
            assert!(a.holds(if n < 4 { n } else { 100 + n } as u64, n * len, len), "object {n} of {len}");
        }
        let keys: Vec<_> = items.iter().map(|i| i.key).collect();
        assert_eq!(open(&service).query(&keys, &call()), [Outcome::Ok(len); 12]);
        let longer: Vec<_> = (0..12).map(|n| b.item(name(n), n * (len + 64), len + 64)).collect();
        b.clear();
        assert_eq!(theirs.get(&longer, &call()), [Outcome::SizeMismatch { stored: len }; 12]);
        assert_eq!(ours.remove(&keys, &call()), [Outcome::Ok(len); 12]);
    }
}

/// The real client is killed while four threads read and write. Whatever is answered `Ok` is whole; the others are
/// told; nobody hangs; and with the real client back the same memory works again within ten seconds.
#[test]
fn a_killed_real_client_corrupts_nothing_and_is_found_again() {
    let _alone = alone();
    // Several calls a batch, and both connections of a lane at work when it ends.
    let Some(mut service) = Service::start_as("256 MB", true) else { return };
    let store = open(&service);
    let arenas: Vec<_> = (0..4).map(|_| Arena::new(&store, 16 * MIB)).collect();
    let (stop, refused, epoch) = (AtomicBool::new(false), AtomicU64::new(0), store.epoch());
    std::thread::scope(|scope| {
        let _stop = SetOnDrop(&stop);
        for (t, a) in (0_u64..).zip(&arenas) {
            let (store, stop, refused) = (&store, &stop, &refused);
            scope.spawn(move || work(store, a, t * 1_000_000, stop, refused));
        }
        until("some work is done", Duration::from_secs(60), || store.stats().get_ok_total > 50);
        service.kill_client();
        until("the loss is seen", Duration::from_secs(10), || store.health() == Health::Down);
        let (before, told) = (store.stats().get_ok_total, refused.load(Ordering::Relaxed));
        until("somebody notices", Duration::from_secs(10), || refused.load(Ordering::Relaxed) > told);
        assert!(service.start_client());
        // What a thread had got of the batch that the loss met may be counted only now.
        let met = 4 * BATCH;
        until("it works again", Duration::from_secs(10), || store.stats().get_ok_total > before + met);
    });
    assert!(store.epoch() > epoch);
    assert_eq!((store.health(), store.stats().corrupt_total), (Health::Up, 0));
    assert_eq!(mapped_by(service.client_pid()), 1 + arenas.len(), "headers and every arena, mapped once");
    let a = &arenas[0];
    a.fill(7, 0, MIB);
    // Until the master has missed the dead client's pings it may place objects there.
    until("puts work", Duration::from_secs(10), || store.put(&[a.item(7, 0, MIB)], &call())[0].is_ok());
    for a in &arenas {
        store.unregister(a.token).unwrap();
    }
    until("segments are let go", Duration::from_secs(10), || mapped_by(service.client_pid()) == 1);
}

/// Tells threads to stop: also those of a test that fails, which would wait for them for ever.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Items of a batch of [`work`].
const BATCH: u64 = 8;

/// Puts and gets until told to stop, and counts the items that were refused.
fn work(store: &MooncakeStore, a: &Arena, first: u64, stop: &AtomicBool, refused: &AtomicU64) {
    let mut n = first;
    while !stop.load(Ordering::Acquire) {
        n += BATCH;
        (0..BATCH).for_each(|i| a.fill(n + i, i as usize * MIB, MIB));
        let puts: Vec<_> = (0..BATCH).map(|i| a.item(n + i, i as usize * MIB, MIB)).collect();
        let put = store.put(&puts, &call());
        let gets: Vec<_> = (0..BATCH).map(|i| a.item(n + i, (BATCH + i) as usize * MIB, MIB)).collect();
        for ((i, got), put) in (0..BATCH).zip(store.get(&gets, &call())).zip(put) {
            match got {
                Outcome::Ok(MIB) => {
                    assert!(a.holds(n + i, (BATCH + i) as usize * MIB, MIB), "object {}", n + i)
                }
                Outcome::Missing | Outcome::Transport(_) | Outcome::AddressLost => {
                    refused.fetch_add(1, Ordering::Relaxed);
                }
                other => panic!("{other:?}"),
            }
            assert!(put.is_ok() || put.is_transient() || put == Outcome::NoSpace, "{put:?}");
        }
    }
}

/// Small pages travel as objects of the size at which the real client reaches its bandwidth.
#[test]
fn pages_of_16_kib_become_objects_of_256() {
    const LEN: usize = 16 << 10;
    let _alone = alone();
    let Some(service) = Service::start("64 MB") else { return };
    let store = Grouped::new(open(&service));
    let a = Arena::new(&store, 2 * MIB);
    let items: Vec<_> = (0..64).map(|n| a.item(n, n as usize * LEN, LEN)).collect();
    (0..64).for_each(|n| a.fill(n, n as usize * LEN, LEN));
    assert_eq!(store.put(&items, &call()), [Outcome::Ok(LEN); 64]);
    let objects = store.inner().stats();
    let links = 64 * (80 + 40 * 16);
    assert_eq!(objects.put_ok_total, 64 + 4, "a link a page, and groups of 16");
    assert_eq!(objects.put_bytes_total, 4 * (256 << 10) + links);
    let after = Grouped::new(open(&service));
    let b = Arena::new(&after, 2 * MIB);
    let items: Vec<_> = (0..64).map(|n| b.item(n, (63 - n as usize) * LEN, LEN)).collect();
    assert_eq!(after.get(&items, &call()), [Outcome::Ok(LEN); 64]);
    assert!((0..64).all(|n| b.holds(n, (63 - n as usize) * LEN, LEN)));
    assert_eq!(after.inner().stats().get_ok_total, 4 + 4, "a link a group, and the groups");
}

#[test]
fn memory_that_the_real_client_can_not_use_is_refused() {
    let _alone = alone();
    let Some(service) = Service::start("16 MB") else { return };
    let store = open(&service);
    let private = store.register(&region(MIB, Sharing::Private));
    assert!(matches!(private, Err(RegisterError::WrongArena)), "{private:?}");
    // This answer comes from the real client itself.
    let read_only = store.register(&region(MIB, Sharing::SharedReadOnly));
    assert!(matches!(read_only, Err(RegisterError::Refused { code: -1 })), "{read_only:?}");
    assert_eq!(mapped_by(service.client_pid()), 1, "the headers only");
    let a = Arena::new(&store, MIB);
    a.fill(1, 0, MIB);
    assert_eq!(store.put(&[a.item(1, 0, MIB)], &call()), [Outcome::Ok(MIB)], "the service is well");
}

#[test]
fn a_full_pool_refuses_item_by_item() {
    let _alone = alone();
    let Some(service) = Service::start("16 MB") else { return };
    let store = open(&service);
    let a = Arena::new(&store, 48 * MIB);
    (0..48).for_each(|n| a.fill(n, n as usize * MIB, MIB));
    let items: Vec<_> = (0..48).map(|n| a.item(n, n as usize * MIB, MIB)).collect();
    let outcomes = store.put(&items, &call());
    let (done, full): (Vec<Outcome>, Vec<Outcome>) = outcomes.iter().partition(|o| o.is_ok());
    assert!(!done.is_empty() && !full.is_empty(), "{outcomes:?}");
    assert!(full.iter().all(|o| *o == Outcome::NoSpace), "{outcomes:?}");
    a.clear();
    let got = store.get(&items, &call());
    for ((n, got), put) in (0..).zip(got).zip(&outcomes) {
        // The pool may have made room by dropping what it had taken.
        assert!(got == Outcome::Missing || (got.is_ok() && put.is_ok()), "{n}: {put:?} {got:?}");
        assert!(!got.is_ok() || a.holds(n, n as usize * MIB, MIB));
    }
}

#[test]
fn closing_leaves_no_thread_no_memory_and_no_mapping() {
    let _alone = alone();
    assert_left(NOTHING);
    let Some(service) = Service::start("16 MB") else { return };
    for by_close in [true, false] {
        let store = open(&service);
        let a = Arena::new(&store, MIB);
        a.fill(1, 0, MIB);
        assert_eq!(store.put(&[a.item(1, 0, MIB)], &call()), [Outcome::Ok(MIB)]);
        assert_left(Left { threads: 1, descriptors: 2, mappings: 2 });
        assert_eq!(mapped_by(service.client_pid()), 2);
        drop(a);
        if by_close {
            store.close(Instant::now() + Duration::from_secs(10)).unwrap();
        }
        drop(store);
        assert_left(NOTHING);
        assert_eq!(mapped_by(service.client_pid()), 0);
    }
}

#[test]
fn nobody_there_is_an_error_and_leaves_nothing() {
    let _alone = alone();
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
    let refused = MooncakeStore::open(MooncakeConfig::at(port));
    assert!(matches!(refused, Err(MooncakeError::Unreachable { .. })), "{refused:?}");
    drop(refused);
    assert_left(NOTHING);
}

/// A server that answers every call with `answer(function)`: error number and body.
fn fake(answer: impl Fn(u32) -> (u8, Vec<u8>) + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            while let Some((function, request)) = request(&mut stream) {
                let (error, body) = answer(function);
                let mut reply = vec![21, 0, error, 0];
                reply.extend_from_slice(&request[4..8]);
                reply.extend_from_slice(&(body.len() as u32).to_le_bytes());
                reply.extend_from_slice(&[0; 4]);
                reply.extend_from_slice(&body);
                // The caller may have gone, having heard enough.
                if stream.write_all(&reply).is_err() {
                    break;
                }
            }
        }
    });
    address
}

/// The next request of a connection, and the function that it calls; nothing at the end.
fn request(stream: &mut TcpStream) -> Option<(u32, Vec<u8>)> {
    let mut request = vec![0; 20];
    stream.read_exact(&mut request).ok()?;
    let word = |at: usize| u32::from_le_bytes(request[at..at + 4].try_into().unwrap());
    let (function, body_bytes) = (word(8), word(12) as usize);
    request.resize(20 + body_bytes, 0);
    stream.read_exact(&mut request[20..]).ok()?;
    Some((function, request))
}

/// A way to the real client on which `passing(function)` is done before each request goes on.
fn way_to(client: SocketAddr, passing: impl Fn(u32) + Clone + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        while let Ok((mut near, _)) = listener.accept() {
            let Ok(mut far) = TcpStream::connect(client) else { continue };
            let (mut answers, mut back) = (far.try_clone().unwrap(), near.try_clone().unwrap());
            let passing = passing.clone();
            std::thread::spawn(move || {
                while let Some((function, request)) = request(&mut near) {
                    passing(function);
                    if far.write_all(&request).is_err() {
                        break;
                    }
                }
                // Either may be closed already.
                let _ = far.shutdown(Shutdown::Both);
            });
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut answers, &mut back);
                let _ = back.shutdown(Shutdown::Both);
            });
        }
    });
    address
}

const READY: u32 = u32::from_le_bytes([0xc8, 0xf9, 0x33, 0xe8]);
const GET: u32 = u32::from_le_bytes([0x9c, 0x10, 0x18, 0x06]);

fn done() -> Vec<u8> {
    vec![0xcd, 0x68, 0x28, 0xaf, 0x04, 0x87, 0xfa, 0x01, 0x00, 0x01]
}

/// A release whose put takes other options answers "invalid argument"; one without the function says so; one whose
/// answers are of another type is found out by the type.
#[test]
fn another_release_is_refused_by_name() {
    let _alone = alone();
    let cases: [(u8, Vec<u8>, TransportCause); 3] = [
        (4, vec![], TransportCause::Remote(4)),
        (11, vec![], TransportCause::Remote(11)),
        (0, done(), TransportCause::Protocol),
    ];
    for (error, body, want) in cases {
        let address =
            fake(move |function| if function == READY { (0, done()) } else { (error, body.clone()) });
        match MooncakeStore::open(MooncakeConfig::at(address)) {
            Err(MooncakeError::UnknownRelease { function, cause }) => {
                assert!(function.ends_with("batch_put_from_multi_buffers_dummy_helper"), "{function}");
                assert_eq!(cause, want);
            }
            other => panic!("{other:?}"),
        }
        assert_left(NOTHING);
    }
}

/// A real client that stands still in the middle of everything: what moves bytes waits for it, what does not fails,
/// and both go on when it does.
#[test]
fn a_real_client_that_stands_still_is_waited_for_and_loses_nothing() {
    let _alone = alone();
    let Some(service) = Service::start("64 MB") else { return };
    let (client, armed) = (service.client_pid(), Arc::new(AtomicBool::new(false)));
    let (arm, (tell, stands)) = (Arc::clone(&armed), mpsc::channel());
    // The get sets out before the real client stops and gets there after, so it is under way when the loss is seen.
    let way = way_to(service.address(), move |function| {
        if function == GET && armed.swap(false, Ordering::AcqRel) {
            tell.send(StandsStill::stop(client)).unwrap();
        }
    });
    let mut config = MooncakeConfig::at(way);
    config.ipc_name = Some(format!("@mooncake_client_{}.sock", service.address().port()));
    // So long it takes until the loss is seen, and before that a busy machine has to answer every ping in it.
    config.connect_wait_max = Duration::from_secs(2);
    config.ping_every = Duration::from_millis(50);
    let store = MooncakeStore::open(config).unwrap();
    let a = Arena::new(&store, 2 * MIB);
    a.fill(1, 0, MIB);
    assert_eq!(store.put(&[a.item(1, 0, MIB)], &call()), [Outcome::Ok(MIB)]);
    arm.store(true, Ordering::Release);
    std::thread::scope(|scope| {
        let get = scope.spawn(|| store.get(&[a.item(1, MIB, MIB)], &call())[0]);
        let stands = stands.recv_timeout(Duration::from_secs(60)).expect("the get sets out");
        until("the loss is seen", Duration::from_secs(20), || store.health() == Health::Down);
        let query = store.query(&[a.item(1, 0, MIB).key], &Call::within(Duration::from_secs(5)));
        assert_eq!(query, [Outcome::Transport(TransportCause::Disconnected)]);
        assert!(!get.is_finished(), "nobody knows yet whether the memory is still being written");
        drop(stands);
        let got = get.join().unwrap();
        assert!(got != Outcome::Ok(MIB) || a.holds(1, MIB, MIB), "{got:?}");
    });
    until("it works again", Duration::from_secs(10), || {
        store.get(&[a.item(1, MIB, MIB)], &call()) == [Outcome::Ok(MIB)] && a.holds(1, MIB, MIB)
    });
}

/// More callers than connections: they take turns, and a caller that can not wait is told.
#[test]
fn callers_take_turns() {
    let _alone = alone();
    let Some(service) = Service::start("64 MB") else { return };
    let store = MooncakeStore::open(MooncakeConfig { calls_max: 1, ..MooncakeConfig::at(service.address()) })
        .unwrap();
    let arenas: Vec<_> = (0..4).map(|_| Arena::new(&store, 2 * MIB)).collect();
    std::thread::scope(|scope| {
        for (t, a) in (0_u64..).zip(&arenas) {
            let store = &store;
            scope.spawn(move || {
                for n in (0..20).map(|i| t * 1000 + i) {
                    a.fill(n, 0, MIB / 2);
                    assert_eq!(store.put(&[a.item(n, 0, MIB / 2)], &call()), [Outcome::Ok(MIB / 2)]);
                    assert_eq!(store.get(&[a.item(n, MIB, MIB / 2)], &call()), [Outcome::Ok(MIB / 2)]);
                    assert!(a.holds(n, MIB, MIB / 2));
                }
            });
        }
    });
    assert_eq!(store.stats().corrupt_total, 0);
}

/// The real client forgets who has not pinged for ten seconds, and goes on telling it that it is well. The first call
/// that meets an unknown address makes the session start over, long before the next ping.
#[test]
fn a_session_that_was_forgotten_starts_over() {
    let _alone = alone();
    let Some(service) = Service::start("16 MB") else { return };
    let mut config = MooncakeConfig::at(service.address());
    config.ping_every = Duration::from_secs(3600);
    let store = MooncakeStore::open(config).unwrap();
    let a = Arena::new(&store, 2 * MIB);
    a.fill(1, 0, MIB);
    assert_eq!(store.put(&[a.item(1, 0, MIB)], &call()), [Outcome::Ok(MIB)]);
    let epoch = store.epoch();
    until("the segments are unmapped", Duration::from_secs(60), || mapped_by(service.client_pid()) == 0);
    assert_eq!(store.get(&[a.item(1, MIB, MIB)], &call()), [Outcome::AddressLost]);
    until("a new epoch", Duration::from_secs(10), || store.epoch() > epoch);
    assert_eq!(store.get(&[a.item(1, MIB, MIB)], &call()), [Outcome::Ok(MIB)]);
    assert!(a.holds(1, MIB, MIB));
}
