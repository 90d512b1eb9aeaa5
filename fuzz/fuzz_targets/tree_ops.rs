//! The tree beside its literal model: any calls, in any order, with any end of what is in flight.
#![no_main]

#[path = "bounded.rs"]
mod bounded;
#[path = "../../tests/tree_model/pair.rs"]
mod pair;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;

use bounded::Int;
use pair::{Pair, Row, Setup, Step};
use sapwood::model::Order;

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Policy {
    Lru,
    Lfu,
    Fifo,
    Mru,
    Filo,
    Slru(Int<1, 3>),
    Priority,
    TailTrim(Int<0, 3>, Int<0, 2>),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
struct Key {
    other: bool,
    pages: Int<0, 6>,
    fork: Int<0, 6>,
    branch: Int<0, 2>,
    inside: Int<0, 3>,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Call {
    Insert { key: Key, priority: Int<0, 2>, count: bool, chunked: bool },
    InsertBlind(Key),
    Match(Key),
    Lock(Key),
    Unlock(u8),
    Backup(Key),
    Load(Key),
    End(u8, bool),
    Evict(Int<0, 9>, bool),
    EvictHost(Int<0, 5>),
    Reclaim(Int<0, 3>),
    Refill(Key, Int<0, 6>),
    Store(Key),
    EndStore(u8),
    Demote(Key),
    DeleteLeaf(Key),
    EvictComponent(bool, bool, Int<0, 5>),
    AdoptHost(Key, bool, Int<1, 3>),
    ReleaseWindow(u8),
    Refer(u8, Key),
    CloseSession(u8),
    WaitFor(Key),
    StopWaiting(u8),
    LoadTwice(Key, Int<1, 3>, bool),
    Overtake(Key, Int<1, 3>),
}

#[derive(Arbitrary, Debug)]
struct Input {
    page_size: Int<1, 3>,
    bigram: bool,
    free_rule: bool,
    policy: Policy,
    write_threshold: Int<0, 2>,
    hashing: bool,
    merge: bool,
    window: Option<Int<1, 3>>,
    state: bool,
    calls: Vec<Call>,
}

fn row(key: Key) -> Row {
    Row { ns: key.other, pages: key.pages.0, fork: key.fork.0, branch: key.branch.0, inside: key.inside.0 }
}

fn step(call: Call) -> Step {
    match call {
        Call::Insert { key, priority, count, chunked } => {
            Step::Insert { row: row(key), priority: priority.0 as i32, count, chunked }
        }
        Call::InsertBlind(key) => Step::InsertBlind(row(key)),
        Call::Match(key) => Step::Match(row(key)),
        Call::Lock(key) => Step::Lock(row(key)),
        Call::Unlock(i) => Step::Unlock(usize::from(i)),
        Call::Backup(key) => Step::Backup(row(key)),
        Call::Load(key) => Step::Load(row(key)),
        Call::End(i, ok) => Step::End(usize::from(i), ok),
        Call::Evict(n, report) => Step::Evict(n.0, report),
        Call::EvictHost(n) => Step::EvictHost(n.0),
        Call::Reclaim(n) => Step::Reclaim(n.0),
        Call::Refill(key, anchor) => Step::Refill(row(key), anchor.0),
        Call::Store(key) => Step::Store(row(key)),
        Call::EndStore(mask) => Step::EndStore(u32::from(mask)),
        Call::Demote(key) => Step::Demote(row(key)),
        Call::DeleteLeaf(key) => Step::DeleteLeaf(row(key)),
        Call::EvictComponent(state, host, n) => Step::EvictComponent(state, host, n.0),
        Call::AdoptHost(key, state, n) => Step::AdoptHost(row(key), state, n.0),
        Call::ReleaseWindow(i) => Step::ReleaseWindow(usize::from(i)),
        Call::Refer(i, key) => Step::Refer(usize::from(i), row(key)),
        Call::CloseSession(i) => Step::CloseSession(usize::from(i)),
        Call::WaitFor(key) => Step::WaitFor(row(key)),
        Call::StopWaiting(i) => Step::StopWaiting(usize::from(i)),
        Call::LoadTwice(key, less, fails) => Step::LoadTwice(row(key), less.0, fails),
        Call::Overtake(key, less) => Step::Overtake(row(key), less.0),
    }
}

fn order(policy: Policy) -> Order {
    match policy {
        Policy::Lru => Order::Lru,
        Policy::Lfu => Order::Lfu,
        Policy::Fifo => Order::Fifo,
        Policy::Mru => Order::Mru,
        Policy::Filo => Order::Filo,
        Policy::Slru(hits) => Order::Slru(hits.0),
        Policy::Priority => Order::Priority,
        Policy::TailTrim(spare, next) => Order::TailTrim(spare.0, next.0),
    }
}

fuzz_target!(|input: Input| {
    let mut pair = Pair::new(&Setup {
        page_size: input.page_size.0,
        // The tree refuses the two together.
        bigram: input.bigram && !input.state,
        free_rule: input.free_rule,
        order: order(input.policy),
        write_threshold: input.write_threshold.0,
        hashing: input.hashing,
        merge: input.merge,
        window: input.window.map(|pages| pages.0),
        state: input.state,
    });
    for &call in input.calls.iter().take(256) {
        let step = step(call);
        pair.run(step);
        pair.drain();
        pair.compare(step);
    }
    pair.finish();
});
