//! Seeds of the simulated world. `SAPWOOD_SEED=n` runs that seed alone; `SAPWOOD_SEEDS=n` sets how many,
//! `SAPWOOD_SEED_FROM=n` where they begin, and `SAPWOOD_STEPS=n` how long each world lives.

use sapwood::base::plant::{Plant, plant};
use sapwood::pool::Capacity;
use sapwood::sim::{Report, Weather, World};
use sapwood::tiers::{
    CoreConfig, Eviction, PrefetchConfig, PrefetchPolicy, StateConfig, StoreConfig, WindowConfig, WritePolicy,
};

const STEPS: u64 = 400;
const SEEDS: u64 = 2_000;

/// Seeds that found a fault once. They run every time.
const REGRESSIONS: &[u64] = &[46];

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

/// Components of the model that is served.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hybrid {
    Full,
    Window,
    State,
    All,
}

/// Everything about a run follows from its seed.
fn run(seed: u64) -> Report {
    let pick = |shift: u32, n: u64| (seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> shift) % n;
    let write = match seed % 5 {
        0 => WritePolicy::WriteThrough { threshold: 1 },
        1 => WritePolicy::WriteThrough { threshold: 3 },
        2 => WritePolicy::WriteThroughSelective,
        3 => WritePolicy::WriteBack,
        _ => WritePolicy::None,
    };
    let policy = match pick(8, 4) {
        0 => PrefetchPolicy::BestEffort,
        1 => PrefetchPolicy::WaitComplete,
        2 => PrefetchPolicy::Adaptive,
        _ => PrefetchPolicy::Timeout { base_ms: 5, per_ki_token_ms: 20 },
    };
    let hybrid = [Hybrid::Full, Hybrid::Window, Hybrid::State, Hybrid::All][pick(50, 4) as usize];
    let page_size = [1, 4, 16][pick(16, 3) as usize];
    let config = CoreConfig {
        eviction: [Eviction::Lru, Eviction::Adaptive][pick(52, 2) as usize],
        host: Capacity::Pages(4 + pick(24, 28) as u32),
        write,
        store: (pick(32, 4) > 0).then_some(StoreConfig {
            batch_pages: 1 + pick(36, 3) as u32,
            pages_in_flight_max: 6,
            queue_nodes_max: 8,
            attempts_max: 3,
            retry_ms: 2,
            uses_min: 1 + pick(56, 3) as u32 / 2,
            tokens_min: [0, 2 * page_size][pick(58, 4) as usize / 3],
        }),
        prefetch: PrefetchConfig {
            policy,
            threshold_tokens: page_size,
            batch_pages: 1 + pick(40, 3) as u32,
            window_batches: 1 + pick(44, 3) as u32,
            host_share_percent: [50, 100][pick(48, 2) as usize],
            retry_ms: pick(20, 3),
            attempts_max: 4,
            repair_ms: [0, 4][pick(12, 2) as usize],
        },
        exclusive: pick(54, 2) == 1,
        write_ahead_percent: [0, 20][pick(55, 2) as usize],
        loads_in_flight_max: 1 + pick(52, 4) as u32,
        window: [Hybrid::Window, Hybrid::All].contains(&hybrid).then_some(WindowConfig {
            span_pages: 1 + pick(28, 3) as u32,
            device: Capacity::Pages(6 + pick(30, 16) as u32),
            host: Capacity::Pages(pick(34, 24) as u32),
        }),
        state: [Hybrid::State, Hybrid::All].contains(&hybrid).then_some(StateConfig {
            device: Capacity::Pages(4 + pick(38, 12) as u32),
            host: Capacity::Pages(pick(42, 12) as u32),
        }),
        ..CoreConfig::device_only(page_size, Capacity::Pages(8 + pick(56, 20) as u32))
    };
    let ranks = [1, 2, 4][pick(60, 3) as usize];
    let weather = if seed.is_multiple_of(3) { Weather::FAIR } else { Weather::FOUL };
    // What takes long to go wrong needs worlds that live long.
    let steps = if seed % 25 == 24 { 10 * STEPS } else { STEPS };
    World::new(seed, ranks, config, weather).run(number("SAPWOOD_STEPS").unwrap_or(steps))
}

#[test]
fn seeds() {
    if let Some(seed) = number("SAPWOOD_SEED") {
        println!("seed {seed}: {:?}", run(seed));
        return;
    }
    let seeds = number("SAPWOOD_SEEDS").unwrap_or(SEEDS);
    let from = number("SAPWOOD_SEED_FROM").unwrap_or(0);
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    let sums = std::thread::scope(|scope| {
        let work: Vec<_> = (0..threads)
            .map(|t| {
                scope.spawn(move || {
                    let mine = REGRESSIONS.iter().copied().chain(from..from + seeds).skip(t as usize);
                    let mut sum = Report::default();
                    for seed in mine.step_by(threads as usize) {
                        let report = run(seed);
                        sum.merge(&report);
                    }
                    sum
                })
            })
            .collect();
        work.into_iter().map(|w| w.join().expect("a rule was broken; the story is above")).collect::<Vec<_>>()
    });
    let mut sum = Report::default();
    sums.iter().for_each(|s| sum.merge(s));
    println!("{sum:?}");
    // A world in which nothing happens would prove nothing.
    for (what, least) in [
        (sum.matched_tokens, 50 * seeds),
        (sum.loaded_pages, seeds),
        (sum.prefetched_tokens, seeds),
        (sum.stored_pages, seeds),
        (sum.component_pages, seeds / 10),
        (sum.dropped_tokens, seeds / 20),
        (sum.repairs, seeds / 100),
        (sum.retreats, seeds / 100),
        (sum.policy_changes, seeds / 4),
        (sum.attachments, seeds / 4),
        (sum.restarts, seeds / 4),
    ] {
        assert!(what >= least, "{sum:?}");
    }
}

/// A simulation that does not find the faults of others proves nothing: each is planted, and must be found.
#[test]
fn planted_faults_are_found() {
    for fault in Plant::ALL {
        let found = std::thread::scope(|scope| {
            let search = scope.spawn(move || {
                plant(Some(fault));
                (0..200).find(|&seed| std::panic::catch_unwind(|| run(seed)).is_err())
            });
            search.join().expect("a panic of the world is caught")
        });
        println!("{fault:?}: found by seed {found:?}");
        assert!(found.is_some(), "{fault:?} is not found within 200 seeds");
    }
}

/// The same seed tells the same story.
#[test]
fn a_seed_is_the_whole_truth() {
    for seed in [3, 17, 4242] {
        assert_eq!(run(seed), run(seed));
    }
}
