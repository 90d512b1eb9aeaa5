//! Seeds of the simulated world. `SAPWOOD_SEED=n` runs that seed alone; `SAPWOOD_SEEDS=n` sets how many.

use sapwood::pool::Capacity;
use sapwood::sim::{Report, Weather, World};
use sapwood::tiers::{CoreConfig, PrefetchConfig, PrefetchPolicy, StoreConfig, WritePolicy};

const STEPS: u64 = 400;
const SEEDS: u64 = 2_000;

/// Seeds that found a fault once. They run every time.
const REGRESSIONS: &[u64] = &[];

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
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
    let policy = match pick(8, 3) {
        0 => PrefetchPolicy::BestEffort,
        1 => PrefetchPolicy::WaitComplete,
        _ => PrefetchPolicy::Timeout { base_ms: 5, per_ki_token_ms: 20 },
    };
    let page_size = [1, 4, 16][pick(16, 3) as usize];
    let config = CoreConfig {
        host: Capacity::Pages(4 + pick(24, 28) as u32),
        write,
        store: (pick(32, 4) > 0).then_some(StoreConfig {
            batch_pages: 1 + pick(36, 3) as u32,
            pages_in_flight_max: 6,
            queue_nodes_max: 8,
            attempts_max: 3,
            retry_ms: 2,
        }),
        prefetch: PrefetchConfig {
            policy,
            threshold_tokens: page_size,
            batch_pages: 1 + pick(40, 3) as u32,
            window_batches: 1 + pick(44, 3) as u32,
            host_share_percent: [50, 100][pick(48, 2) as usize],
        },
        exclusive: pick(54, 2) == 1,
        write_ahead_percent: [0, 20][pick(55, 2) as usize],
        loads_in_flight_max: 1 + pick(52, 4) as u32,
        ..CoreConfig::device_only(page_size, Capacity::Pages(8 + pick(56, 20) as u32))
    };
    let ranks = [1, 2, 4][pick(60, 3) as usize];
    let weather = if seed.is_multiple_of(3) { Weather::FAIR } else { Weather::FOUL };
    World::new(seed, ranks, config, weather).run(STEPS)
}

#[test]
fn seeds() {
    if let Some(seed) = number("SAPWOOD_SEED") {
        println!("seed {seed}: {:?}", run(seed));
        return;
    }
    let seeds = number("SAPWOOD_SEEDS").unwrap_or(SEEDS);
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    let sums = std::thread::scope(|scope| {
        let work: Vec<_> = (0..threads)
            .map(|t| {
                scope.spawn(move || {
                    let mine = REGRESSIONS.iter().copied().chain(0..seeds).skip(t as usize);
                    let mut sum = Report::default();
                    for seed in mine.step_by(threads as usize) {
                        let report = run(seed);
                        sum.steps += report.steps;
                        sum.matched_tokens += report.matched_tokens;
                        sum.loaded_pages += report.loaded_pages;
                        sum.prefetched_tokens += report.prefetched_tokens;
                        sum.stored_pages += report.stored_pages;
                    }
                    sum
                })
            })
            .collect();
        work.into_iter().map(|w| w.join().expect("a rule was broken; the story is above")).collect::<Vec<_>>()
    });
    println!("{sums:?}");
    // A world in which nothing happens would prove nothing.
    for (what, least) in [
        (sums.iter().map(|s| s.matched_tokens).sum::<u64>(), seeds),
        (sums.iter().map(|s| s.loaded_pages).sum(), seeds / 2),
        (sums.iter().map(|s| s.prefetched_tokens).sum(), seeds / 2),
        (sums.iter().map(|s| s.stored_pages).sum(), seeds),
    ] {
        assert!(what >= least, "{sums:?}");
    }
}

/// The same seed tells the same story.
#[test]
fn a_seed_is_the_whole_truth() {
    for seed in [3, 17, 4242] {
        assert_eq!(run(seed), run(seed));
    }
}
