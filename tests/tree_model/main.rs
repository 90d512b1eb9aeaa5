//! The tree beside its literal model: the same calls, and after every one the same results, sizes, residency and victims.
//!
//! `SAPWOOD_SEED` replays a run, `SAPWOOD_MODEL_OPS` sets its size (200,000 operations unless told; nightly runs take
//! 10 million). A failure is shrunk to a short list of operations.
#![expect(clippy::unwrap_used, reason = "a test that meets None or Err fails, which is what it is for")]

mod pair;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};

use sapwood::base::plant::{Plant, plant};
use sapwood::model::Order;

use pair::{Pair, Row, Setup, Step};

fn row() -> impl Strategy<Value = Row> {
    (prop::bool::weighted(0.2), 0..7u32, 0..7u32, 0..3u32, 0..4u32)
        .prop_map(|(ns, pages, fork, branch, inside)| Row { ns, pages, fork, branch, inside })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (row(), 0..3i32, any::<bool>(), any::<bool>())
            .prop_map(|(row, priority, count, chunked)| Step::Insert { row, priority, count, chunked }),
        2 => row().prop_map(Step::InsertBlind),
        3 => row().prop_map(Step::Match),
        2 => row().prop_map(Step::Lock),
        3 => any::<usize>().prop_map(Step::Unlock),
        3 => row().prop_map(Step::Backup),
        3 => row().prop_map(Step::Load),
        2 => (row(), 1..4u32, any::<bool>()).prop_map(|(row, less, fails)| Step::LoadTwice(row, less, fails)),
        1 => (row(), 1..4u32).prop_map(|(row, less)| Step::Overtake(row, less)),
        4 => (any::<usize>(), prop::bool::weighted(0.8)).prop_map(|(i, ok)| Step::End(i, ok)),
        2 => (0..10u32, any::<bool>()).prop_map(|(n, report)| Step::Evict(n, report)),
        1 => (0..6u32).prop_map(Step::EvictHost),
        1 => (0..4u32).prop_map(Step::Reclaim),
        2 => (row(), 0..7u32).prop_map(|(row, anchor)| Step::Refill(row, anchor)),
        1 => row().prop_map(Step::Store),
        1 => any::<u32>().prop_map(Step::EndStore),
        1 => row().prop_map(Step::Demote),
        1 => row().prop_map(Step::DeleteLeaf),
        2 => (any::<bool>(), any::<bool>(), 0..6u32).prop_map(|(c, t, n)| Step::EvictComponent(c, t, n)),
        1 => (row(), any::<bool>(), 1..4u32).prop_map(|(row, c, n)| Step::AdoptHost(row, c, n)),
        1 => any::<usize>().prop_map(Step::ReleaseWindow),
        1 => (any::<usize>(), row()).prop_map(|(i, row)| Step::Refer(i, row)),
        1 => any::<usize>().prop_map(Step::CloseSession),
        2 => row().prop_map(Step::WaitFor),
        1 => any::<usize>().prop_map(Step::StopWaiting),
    ]
}

fn setup() -> impl Strategy<Value = Setup> {
    let order = prop_oneof![
        4 => Just(Order::Lru),
        1 => Just(Order::Lfu),
        1 => Just(Order::Fifo),
        1 => Just(Order::Mru),
        1 => Just(Order::Filo),
        1 => (1..4u32).prop_map(Order::Slru),
        1 => Just(Order::Priority),
        1 => (0..4u32, 0..3u32).prop_map(|(a, b)| Order::TailTrim(a, b)),
    ];
    let parts = (prop::option::weighted(0.3, 1..4u32), prop::bool::weighted(0.25));
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), prop::bool::weighted(0.7));
    (1..4u32, order, 0..3u32, flags, parts).prop_map(|(page_size, order, write_threshold, flags, parts)| {
        let (bigram, free_rule, hashing, merge) = flags;
        let (window, state) = parts;
        let bigram = bigram && !state;
        Setup { page_size, bigram, free_rule, order, write_threshold, hashing, merge, window, state }
    })
}

const STEPS_MAX: usize = 160;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

type Found = Result<(), TestError<(Setup, Vec<Step>)>>;

/// So many histories of tree and model; the first that differs, made short.
fn compare(seed: u64, cases: u32, shrinks: u32) -> Found {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config = Config { cases, failure_persistence: None, max_shrink_iters: shrinks, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    runner.run(&(setup(), vec(step(), 0..STEPS_MAX)), |(setup, steps)| {
        let mut pair = Pair::new(&setup);
        for step in steps {
            pair.run(step);
            pair.drain();
            pair.compare(step);
        }
        pair.finish();
        Ok(())
    })
}

/// A comparison that finds nothing proves something only if it finds what is there: each fault is planted in the tree,
/// and found.
#[test]
fn planted_faults_are_found() {
    for fault in Plant::TREE {
        let found = std::thread::scope(|scope| {
            let search = scope.spawn(move || {
                plant(Some(fault));
                compare(1, 400, 0)
            });
            search.join().expect("a panic of the pair is caught")
        });
        match found {
            Err(TestError::Fail(why, (_, steps))) => {
                println!("{fault:?}: found in {} steps: {:.120}", steps.len(), why.to_string());
            }
            other => panic!("{fault:?} is not found within 400 histories: {other:?}"),
        }
    }
}

#[test]
fn the_tree_does_what_the_model_says() {
    let seed = number("SAPWOOD_SEED").unwrap_or(0x5A9_00D);
    let ops = number("SAPWOOD_MODEL_OPS").unwrap_or(200_000);
    println!("SAPWOOD_SEED={seed} SAPWOOD_MODEL_OPS={ops}");
    let result = compare(seed, (ops / (STEPS_MAX as u64 / 2)).max(1) as u32, 20_000);
    if let Err(TestError::Fail(why, (setup, steps))) = &result {
        panic!(
            "SAPWOOD_SEED={seed}: {why}\n{setup:?}\n{}",
            steps.iter().map(|s| format!("{s:?}\n")).collect::<String>()
        );
    }
    result.unwrap();
}
