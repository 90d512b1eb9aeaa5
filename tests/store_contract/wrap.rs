//! What each wrapper does, with faults below and a clock turned by hand.

use std::slice::from_ref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sapwood::backend::store::clock::{Clock as _, ManualClock};
use sapwood::backend::store::fault::{Fault, Faulty, When};
use sapwood::backend::store::mem::MemStore;
use sapwood::backend::store::stats::OpKind;
use sapwood::backend::store::wrap::{Breaker, Deadlines, Detached, Limit, Retry, Wrapped};
use sapwood::backend::store::{Call, Health, Item, Outcome, Store, StoreError, TransportCause};

use crate::kit::{Arena, bytes_of, item, key, namespace_of};

const LEN: usize = 1000;
const BROKEN: Outcome = Outcome::Transport(TransportCause::Injected);
const PAUSE: Duration = Duration::from_millis(10);

fn faulty() -> Arc<Faulty<MemStore>> {
    Arc::new(Faulty::new(MemStore::new(1 << 20)))
}

fn batch(store: &dyn Store, pages: std::ops::Range<u64>) -> (Arena, Vec<Item>) {
    let a = Arena::new(store, 64 * LEN);
    let items = pages
        .enumerate()
        .map(|(i, n)| {
            a.write(i * LEN, &bytes_of(n, LEN));
            item(n, a.span(i * LEN, LEN))
        })
        .collect();
    (a, items)
}

#[test]
fn a_retry_repeats_what_failed_and_nothing_else() {
    let (inner, clock) = (faulty(), Arc::new(ManualClock::default()));
    let store = Wrapped::new(Arc::clone(&inner), Retry::with_clock(4, PAUSE, clock.clone()));
    let (_a, items) = batch(&store, 0..4);
    // Item 2 fails three times, item 3 once; 1 and 4 never.
    for n in [2, 3, 5, 7] {
        inner.add(OpKind::Put, When::Nth(n), Fault::Fail(BROKEN));
    }
    assert_eq!(store.put(&items, &Call::unbounded()), [Outcome::Ok(LEN); 4]);
    assert_eq!(inner.struck(), 4);
    assert_eq!(store.stats().put_ok_total, 4, "nothing was put twice");
    assert_eq!(clock.slept(), PAUSE * (1 + 2 + 4));
}

#[test]
fn a_retry_ends_with_the_attempts_the_deadline_or_the_cancel() {
    let (inner, clock) = (faulty(), Arc::new(ManualClock::default()));
    let store = Wrapped::new(Arc::clone(&inner), Retry::with_clock(3, PAUSE, clock.clone()));
    let (_a, items) = batch(&store, 0..1);
    inner.add(OpKind::Put, When::From(1), Fault::Fail(Outcome::Busy));
    assert_eq!(store.put(&items, &Call::unbounded()), [Outcome::Busy]);
    assert_eq!((inner.struck(), clock.slept()), (3, PAUSE * 3));
    // No pause is begun that would end after the deadline.
    assert_eq!(store.put(&items, &Call::within(PAUSE / 2)), [Outcome::Busy]);
    assert_eq!((inner.struck(), clock.slept()), (4, PAUSE * 3));
    let call = Call::unbounded();
    call.cancel.cancel();
    assert_eq!(store.put(&items, &call), [Outcome::Busy]);
    assert_eq!(inner.struck(), 5);
}

#[test]
fn what_cannot_get_better_is_not_repeated() {
    for outcome in
        [Outcome::Missing, Outcome::Corrupt, Outcome::NoSpace, Outcome::AddressLost, Outcome::Timeout]
    {
        let inner = faulty();
        let store = Wrapped::new(Arc::clone(&inner), Retry::new(5, PAUSE));
        let (_a, items) = batch(&store, 0..1);
        inner.add(OpKind::Get, When::From(1), Fault::Fail(outcome));
        assert_eq!(store.get(&items, &Call::unbounded()), [outcome]);
        assert_eq!(inner.struck(), 1);
    }
}

#[test]
fn a_breaker_opens_probes_and_closes() {
    let (inner, clock) = (faulty(), Arc::new(ManualClock::default()));
    let store = Wrapped::new(Arc::clone(&inner), Breaker::with_clock(3, PAUSE, clock.clone()));
    let (_a, items) = batch(&store, 0..2);
    let get = || store.get(&items, &Call::unbounded());
    assert_eq!(get(), [Outcome::Missing; 2], "a miss is no failure");
    inner.add(OpKind::Get, When::From(1), Fault::Fail(BROKEN));
    for n in 1..=3 {
        assert_eq!(store.health(), Health::Up);
        assert_eq!(get(), [BROKEN; 2]);
        assert_eq!(inner.struck(), 2 * n);
    }
    assert_eq!(store.health(), Health::Down);
    assert_eq!(get(), [Outcome::Busy; 2]);
    assert!(matches!(store.sync(&Call::unbounded()), Err(StoreError::Busy)));
    assert_eq!(inner.struck(), 6, "nothing got through");
    assert_eq!(store.stats().busy_total, 2);
    // The probe fails: shut for another pause.
    clock.advance(PAUSE);
    assert_eq!(get(), [BROKEN; 2]);
    assert_eq!(get(), [Outcome::Busy; 2]);
    clock.advance(PAUSE);
    inner.heal();
    assert_eq!(get(), [Outcome::Missing; 2]);
    assert_eq!(store.health(), Health::Up);
    // And it takes three failures in a row again, not three in all.
    inner.add(OpKind::Put, When::Nth(1), Fault::Fail(BROKEN));
    inner.add(OpKind::Put, When::Nth(5), Fault::Fail(BROKEN));
    for _ in 0..3 {
        let _ = store.put(&items, &Call::unbounded());
    }
    assert_eq!(store.health(), Health::Up);
}

/// A caller in a hurry finds a busy store too slow for it. That says nothing about the store: the others go on.
#[test]
fn a_hurried_caller_does_not_open_the_breaker() {
    let (inner, clock) = (faulty(), Arc::new(ManualClock::default()));
    // Calls take as long as `slow` says, and then nobody has answered if `inner` says so.
    let slow = Arc::new(Faulty::with_clock(Arc::clone(&inner), clock.clone()));
    let breaker = Breaker::with_clock(2, PAUSE, clock.clone()).with_patience(PAUSE * 10);
    let store = Wrapped::new(Arc::clone(&slow), breaker);
    let (_a, items) = batch(&store, 0..2);
    let get = || store.get(&items, &Call::unbounded());
    let silent = |calls: u32, took: Duration| {
        slow.add(OpKind::Get, When::Key(key(0)), Fault::Delay(took));
        inner.add(OpKind::Get, When::From(1), Fault::Fail(Outcome::Timeout));
        (0..calls).for_each(|_| assert_eq!(get(), [Outcome::Timeout; 2]));
        slow.heal();
        inner.heal();
    };
    for _ in 0..5 {
        silent(19, PAUSE);
        assert_eq!(store.health(), Health::Up);
        assert_eq!(get(), [Outcome::Missing; 2], "others go on");
    }
    // Some items done before the time was up: it works.
    slow.add(OpKind::Get, When::Key(key(0)), Fault::Delay(PAUSE));
    inner.add(OpKind::Get, When::Key(key(1)), Fault::Fail(Outcome::Timeout));
    (0..50).for_each(|_| assert_eq!(get(), [Outcome::Missing, Outcome::Timeout]));
    assert_eq!(store.health(), Health::Up);
    slow.heal();
    inner.heal();
    // Nobody has had an answer for twice its patience: it is dead to hurried callers, too.
    silent(20, PAUSE);
    assert_eq!(store.health(), Health::Down);
    // A hurried probe finds nothing out, and the next call may probe.
    clock.advance(PAUSE);
    silent(1, PAUSE / 2);
    assert_eq!(store.health(), Health::Down);
    assert_eq!(get(), [Outcome::Missing; 2]);
    assert_eq!(store.health(), Health::Up);
    // A patient caller without an answer is a failure at once.
    silent(2, PAUSE * 10);
    assert_eq!(store.health(), Health::Down);
}

/// Nobody was asked, or the caller went away: a probe that ends so closes nothing.
#[test]
fn a_cancelled_probe_closes_no_breaker() {
    let (inner, clock) = (faulty(), Arc::new(ManualClock::default()));
    let store = Wrapped::new(Arc::clone(&inner), Breaker::with_clock(1, PAUSE, clock.clone()));
    let (_a, items) = batch(&store, 0..1);
    inner.add(OpKind::Get, When::Nth(1), Fault::Fail(BROKEN));
    assert_eq!(store.get(&items, &Call::unbounded()), [BROKEN]);
    clock.advance(PAUSE);
    inner.add(OpKind::Get, When::Nth(2), Fault::Fail(Outcome::Cancelled));
    assert_eq!(store.get(&items, &Call::unbounded()), [Outcome::Cancelled]);
    assert_eq!(store.health(), Health::Down);
    assert_eq!(store.get(&items, &Call::unbounded()), [Outcome::Missing]);
    assert_eq!(store.health(), Health::Up);
}

#[test]
fn only_one_call_probes() {
    let (inner, clock) = (faulty(), Arc::new(ManualClock::default()));
    let store = Wrapped::new(Arc::clone(&inner), Breaker::with_clock(1, PAUSE, clock.clone()));
    let (_a, items) = batch(&store, 0..1);
    inner.add(OpKind::Get, When::Nth(1), Fault::Fail(BROKEN));
    inner.add(OpKind::Get, When::Nth(2), Fault::Hang);
    assert_eq!(store.get(&items, &Call::unbounded()), [BROKEN]);
    clock.advance(PAUSE);
    std::thread::scope(|s| {
        let probe = s.spawn(|| store.get(&items, &Call::unbounded()));
        inner.wait_for_hanging(1);
        assert_eq!(store.get(&items, &Call::unbounded()), [Outcome::Busy]);
        assert_eq!(store.health(), Health::Down);
        inner.release();
        assert_eq!(probe.join().unwrap(), [Outcome::Missing]);
    });
    assert_eq!(store.health(), Health::Up);
}

#[test]
fn a_limit_makes_calls_wait_for_their_bytes() {
    let clock = Arc::new(ManualClock::default());
    // 1000 bytes a second to put, gets free; no credit.
    let limit = Limit::with_clock(0, 1000, Duration::ZERO, clock.clone());
    let store = Wrapped::new(MemStore::new(1 << 20), limit);
    let (_a, items) = batch(&store, 0..3);
    assert_eq!(store.put(&items[..2], &Call::unbounded()), [Outcome::Ok(LEN); 2]);
    assert_eq!(clock.slept(), Duration::ZERO, "the first is paid afterwards");
    assert_eq!(store.put(&items[2..], &Call::unbounded()), [Outcome::Ok(LEN)]);
    assert_eq!(clock.slept(), Duration::from_secs(2));
    // Whoever cannot wait so long is turned away and has used nothing.
    assert_eq!(store.put(&items[..1], &Call::within(PAUSE)), [Outcome::Busy]);
    assert_eq!(store.stats().busy_total, 1);
    assert_eq!(store.get(&items, &Call::within(Duration::from_secs(60))), [Outcome::Ok(LEN); 3]);
    // Nor does a cancelled caller wait.
    let (call, slept) = (Call::unbounded(), clock.slept());
    call.cancel.cancel();
    assert_eq!(store.put(&items[..1], &call), [Outcome::Cancelled]);
    assert_eq!(clock.slept(), slept);
    clock.advance(Duration::from_secs(1));
    assert_eq!(store.put(&items[..1], &Call::within(PAUSE)), [Outcome::Ok(LEN)]);
}

#[test]
fn idle_time_is_credit_up_to_the_burst() {
    let clock = Arc::new(ManualClock::default());
    let limit = Limit::with_clock(1000, 0, Duration::from_secs(2), clock.clone());
    let store = Wrapped::new(MemStore::new(1 << 20), limit);
    let (_a, items) = batch(&store, 0..1);
    store.get(&items, &Call::unbounded());
    clock.advance(Duration::from_secs(100));
    for _ in 0..3 {
        store.get(&items, &Call::unbounded());
    }
    assert_eq!(clock.slept(), Duration::ZERO, "two from credit, the third is paid afterwards");
    store.get(&items, &Call::unbounded());
    assert_eq!(clock.slept(), Duration::from_secs(1));
}

#[test]
fn deadlines_bound_what_is_unbounded_and_never_extend() {
    let store = Wrapped::new(MemStore::new(1 << 20), Deadlines::new(Duration::ZERO));
    let (_a, items) = batch(&store, 0..1);
    assert_eq!(store.put(&items, &Call::unbounded()), [Outcome::Timeout]);
    let store = Wrapped::new(MemStore::new(1 << 20), Deadlines::new(Duration::from_secs(600)));
    let (_a, items) = batch(&store, 0..1);
    assert_eq!(store.put(&items, &Call::unbounded()), [Outcome::Ok(LEN)]);
    let late = Call { deadline: Some(Instant::now()), ..Call::default() };
    assert_eq!(store.put(&items, &late), [Outcome::Timeout]);
}

/// Upstream W1, F12: a read that hangs holds everybody up, or lands in memory that is somebody else's by then.
#[test]
fn a_hanging_store_costs_one_call_and_never_touches_the_callers_memory() {
    let inner = faulty();
    let store = Detached::new(Arc::clone(&inner), Duration::from_secs(600), 2);
    let (a, items) = batch(&store, 0..2);
    assert_eq!(store.put(&items, &Call::unbounded()), [Outcome::Ok(LEN); 2]);
    inner.add(OpKind::Get, When::Key(key(0)), Fault::Hang);
    let soon = || Call::within(Duration::from_millis(20));
    a.write(0, &[0x55; LEN]);
    assert_eq!(store.get(&items[..1], &soon()), [Outcome::Timeout]);
    inner.wait_for_hanging(1);
    assert_eq!((store.calls_running(), store.abandoned_total()), (1, 1));
    // Others go on.
    assert_eq!(store.get(&items[1..], &Call::unbounded()), [Outcome::Ok(LEN)]);
    // A second hang uses the threads up: calls are refused at once and the store reports itself down.
    assert_eq!(store.get(&items[..1], &soon()), [Outcome::Timeout]);
    inner.wait_for_hanging(2);
    assert_eq!(store.get(&items[1..], &Call::unbounded()), [Outcome::Busy]);
    assert_eq!(store.health(), Health::Down);
    inner.heal();
    while store.calls_running() > 0 {
        std::thread::yield_now();
    }
    assert_eq!(a.read(0, LEN), [0x55; LEN], "the late answer went into the wrapper's memory");
    assert_eq!(store.get(&items[..1], &Call::unbounded()), [Outcome::Ok(LEN)]);
    assert_eq!(a.read(0, LEN), bytes_of(0, LEN));
    assert_eq!(store.health(), Health::Up);
}

#[test]
fn closing_a_hanging_store_is_bounded_too() {
    let inner = faulty();
    let store = Detached::new(Arc::clone(&inner), Duration::from_secs(600), 4);
    let (_a, items) = batch(&store, 0..1);
    inner.add(OpKind::Get, When::From(1), Fault::Hang);
    assert_eq!(store.get(&items, &Call::within(PAUSE)), [Outcome::Timeout]);
    let _ = store.close(Instant::now() + PAUSE);
    assert_eq!(store.get(&items, &Call::unbounded()), [Outcome::Closed]);
    inner.heal();
}

/// Every fault the wrapper can make, as an executor sees it.
#[test]
fn faults_are_what_they_say() {
    let store = faulty();
    let (a, items) = batch(&*store, 0..8);
    assert_eq!(store.put(&items, &Call::unbounded()), [Outcome::Ok(LEN); 8]);
    for (n, fault) in (0..).zip([
        Fault::Fail(Outcome::Busy),
        Fault::LostAnswer(Outcome::Timeout),
        Fault::Corrupt,
        Fault::Lie,
        Fault::Short(10),
        Fault::Delay(Duration::ZERO),
    ]) {
        store.add(OpKind::Get, When::Key(key(n)), fault);
    }
    let want = [
        Outcome::Busy,
        Outcome::Timeout,
        Outcome::Corrupt,
        Outcome::Ok(LEN),
        Outcome::Ok(10),
        Outcome::Ok(LEN),
        Outcome::Ok(LEN),
        Outcome::Ok(LEN),
    ];
    assert_eq!(store.get(&items, &Call::unbounded()), want);
    let right = |n: usize| a.read(n * LEN, LEN) == bytes_of(n as u64, LEN);
    assert_eq!([2, 3, 4, 5, 6].map(right), [false, false, false, true, true]);
    store.add(OpKind::Put, When::Key(key(20)), Fault::LostWrite);
    let lost = item(20, a.span(0, LEN));
    assert_eq!(store.put(from_ref(&lost), &Call::unbounded()), [Outcome::Ok(LEN)]);
    assert_eq!(store.query(&[key(20)], &Call::unbounded()), [Outcome::Missing]);
    store.heal();
    assert_eq!(store.get(&items, &Call::unbounded()), [Outcome::Ok(LEN); 8]);
}

/// sgl#39701: a failed batch must not end the ones behind it, and a lost answer is not a lost page.
#[test]
fn a_far_side_that_forgets_says_so_by_its_epoch() {
    let mem = Arc::new(MemStore::new(1 << 20));
    let store = Wrapped::new(Arc::clone(&mem), Retry::new(2, PAUSE));
    let (_a, items) = batch(&store, 0..2);
    assert_eq!(store.put(&items, &Call::unbounded()), [Outcome::Ok(LEN); 2]);
    let before = store.epoch();
    mem.lose_everything();
    assert!(store.epoch() > before);
    assert_eq!(store.get(&items, &Call::unbounded()), [Outcome::Missing; 2]);
    assert_eq!(store.clear(namespace_of(0), &Call::unbounded()).unwrap(), 0);
}

#[test]
fn a_manual_clock_only_moves_when_told() {
    let clock = ManualClock::default();
    let now = clock.now();
    assert_eq!(clock.now(), now);
    clock.sleep(PAUSE);
    clock.advance(PAUSE);
    assert_eq!((clock.now() - now, clock.slept()), (PAUSE * 2, PAUSE));
}
