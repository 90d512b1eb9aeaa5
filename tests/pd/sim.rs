//! Simulated clusters: seeds without a violation, and planted bugs that must be found.

use sapwood::pd::plant::Plant;
use sapwood::pd::sim::{Faults, Options, Report, run, shrink};

use crate::seed;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|s| s.parse().ok()).unwrap_or(default)
}

/// The failing seed as a story: its last lines before the oracle spoke, with the fewest faults that do it.
fn tell(o: &Options) -> String {
    let less = shrink(o);
    let r = run(&Options { story: true, ..less });
    let end = r.story.iter().position(|l| l.contains("ORACLE")).map_or(r.story.len(), |i| i + 1);
    let from = end.saturating_sub(60);
    format!("seed {} with {:?}\n{}\n{:?}", o.seed, less.faults, r.story[from..end].join("\n"), r.violations)
}

fn add(sum: &mut Report, r: &Report) {
    sum.requests += r.requests;
    sum.arrived += r.arrived;
    sum.failed += r.failed;
    sum.quarantined += r.quarantined;
    sum.quarantine_units += r.quarantine_units;
    sum.frames += r.frames;
    sum.landings += r.landings;
    sum.topups += r.topups;
    sum.window_topups += r.window_topups;
    sum.scatters += r.scatters;
    sum.released.iter_mut().zip(r.released).for_each(|(a, b)| *a += b);
}

#[test]
fn seeds_end_without_a_violation() {
    let first = seed(1);
    let seeds = number("SAPWOOD_PD_SEEDS", 150);
    // A run is a function of its seed, so they can share the processors.
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    let share = |t: u64| {
        let mut sum = Report::default();
        for s in (first + t..first + seeds).step_by(threads as usize) {
            let o = Options::new(s);
            let r = run(&o);
            assert!(r.violations.is_empty(), "{}", tell(&o));
            add(&mut sum, &r);
        }
        sum
    };
    let mut sum = Report::default();
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|t| scope.spawn(move || share(t))).collect();
        all.into_iter().for_each(|t| add(&mut sum, &t.join().expect("a seed failed; its story is above")));
    });
    println!("{seeds} seeds: {sum:?}");
    // A run in which nothing works, or nothing goes wrong, shows nothing. A single story need not have it all.
    if seeds < 100 {
        return;
    }
    assert!(sum.arrived > sum.requests / 8, "{sum:?}");
    assert!(sum.failed > sum.requests / 8, "{sum:?}");
    assert!(sum.released.iter().all(|&n| n > 0) && sum.quarantined > 0, "{sum:?}");
    assert!(sum.topups > 0 && sum.window_topups > 0 && sum.scatters > sum.requests / 8, "{sum:?}");
}

/// Seed 361 found a ring pinned by a place that its writer had given up.
#[test]
fn a_place_that_was_taken_is_used() {
    let o = Options::new(361);
    assert!(run(&o).violations.is_empty(), "{}", tell(&o));
}

/// Seeds 17375 and 36284: a rank that had just started took a late frame of an earlier life of its peer for the peer's
/// successor, and heard the living one no more.
#[test]
fn an_earlier_life_is_not_taken_for_the_next() {
    for seed in [17_375, 36_284] {
        let o = Options::new(seed);
        assert!(run(&o).violations.is_empty(), "{}", tell(&o));
    }
}

/// Seed 71207: a decode rank had all its bytes and waited for its sibling, which had opened the room with the successor
/// of the prefill process, until that forgot whom it did not know.
#[test]
fn a_group_does_not_wait_for_who_never_heard_of_the_room() {
    let o = Options::new(71_207);
    assert!(run(&o).violations.is_empty(), "{}", tell(&o));
}

#[test]
fn without_faults_every_room_arrives() {
    let mut sum = Report::default();
    for s in 1..=20 {
        let r = run(&Options { faults: Faults::NONE, ..Options::new(s) });
        assert!(r.violations.is_empty(), "seed {s}: {:?}", r.violations);
        add(&mut sum, &r);
    }
    // Rooms fail here only for want of pages, on either side.
    assert!(sum.arrived > 3 * sum.failed, "{sum:?}");
    assert_eq!(sum.quarantined, 0);
}

#[test]
fn equal_seeds_are_equal_runs() {
    for s in 1..=5 {
        let (a, b) = (run(&Options::new(s)), run(&Options::new(s)));
        assert_eq!((a.digest, a.frames, a.landings), (b.digest, b.frames, b.landings));
    }
    assert_ne!(run(&Options::new(1)).digest, run(&Options::new(2)).digest);
}

/// Every planted bug is found within 200 seeds.
#[test]
fn planted_bugs_are_found() {
    for plant in Plant::ALL {
        let found = (1..=200).find(|&s| {
            let o = Options { plant: Some(plant), ..Options::new(s) };
            !run(&o).violations.is_empty()
        });
        println!("{plant:?}: seed {found:?}");
        assert!(found.is_some(), "{plant:?} was not found in 200 seeds");
    }
}
