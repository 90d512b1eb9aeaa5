//! The proof: one workload under many set-ups, and the answers are the same to the last bit.

use std::convert::Infallible;
use std::sync::Arc;

use sapwood::backend::store::mem::MemStore;
use sapwood::tiers::WritePolicy;

use crate::kv::Flat;
use crate::model::{Model, VOCAB};
use crate::sequence::{Outcome, Work, alone};
use crate::server::{Failure, Hardware, Options, Report, Server};

/// What a set-up must have done to have shown anything.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Shows {
    /// Device pages were demoted and loaded back.
    pub tiers: bool,
    /// Pages came from the store.
    pub store: bool,
}

/// One set-up.
pub struct Setup {
    /// For reports.
    pub name: String,
    /// The server.
    pub options: Options,
    /// Stop and start the server after half of the work, with only the store surviving.
    pub restart: bool,
    /// What it must show.
    pub shows: Shows,
}

const THROUGH: WritePolicy = WritePolicy::WriteThrough { threshold: 1 };

/// Every set-up. `threads` compute, and as many call the store.
pub fn setups(threads: usize) -> Vec<Setup> {
    let ample = Options { threads, ..Options::ample() };
    let tiny = Options { device_pages: 56, host_pages: 160, ..ample.clone() };
    let store = || Some(Arc::new(MemStore::new(64 << 20)) as _);
    let (tiers, fetches) = (Shows { tiers: true, store: false }, Shows { tiers: false, store: true });
    let setup = |name: &str, options: Options, shows: Shows| Setup {
        name: format!("{name}, {threads} threads"),
        restart: false,
        options,
        shows,
    };
    let mut all = vec![
        setup("device only", ample.clone(), Shows::default()),
        setup("device only, tiny", Options { host_pages: 0, ..tiny.clone() }, Shows::default()),
        setup("write-through", Options { write: THROUGH, ..tiny.clone() }, tiers),
        setup(
            "write-through selective",
            Options { write: WritePolicy::WriteThroughSelective, ..tiny.clone() },
            tiers,
        ),
        setup("write-back", Options { write: WritePolicy::WriteBack, ..tiny.clone() }, tiers),
        setup("inclusive", Options { write: THROUGH, exclusive: false, ..tiny.clone() }, tiers),
        setup("tiny host too", Options { write: THROUGH, host_pages: 60, ..tiny.clone() }, Shows::default()),
        setup(
            "store",
            Options { write: THROUGH, host_pages: 80, store: store(), ..tiny.clone() },
            Shows::default(),
        ),
    ];
    for (name, host_pages) in [("store and restart", 400), ("store and restart, tiny host", 70)] {
        let options = Options { write: THROUGH, host_pages, store: store(), ..tiny.clone() };
        all.push(Setup { restart: true, ..setup(name, options, fetches) });
    }
    all
}

/// The set-ups in which a seeded adversary moves the bytes.
pub fn adversarial(seed: u64) -> Vec<Setup> {
    let setup = |name: &str, write: WritePolicy, host_pages: u32| Setup {
        name: format!("{name}, adversary {seed}"),
        restart: false,
        options: Options {
            device_pages: 56,
            host_pages,
            write,
            hardware: Hardware::Adversary(seed),
            publish_early: seed.is_multiple_of(2),
            ..Options::ample()
        },
        // Where many copies fail, little may come back from a tiny host.
        shows: Shows { tiers: !seed.is_multiple_of(3), store: false },
    };
    vec![
        setup("write-through", THROUGH, 160),
        setup("write-back", WritePolicy::WriteBack, 160),
        setup("write-back, tiny host", WritePolicy::WriteBack, 64),
    ]
}

/// Chats over a few shared system prompts, some of them in an adapter's namespace, some asked twice.
pub fn workload() -> Vec<Work> {
    let mut state = 7u64;
    let mut roll = move |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let mut text = |tokens: u64| -> Vec<u32> { (0..tokens).map(|_| roll(u64::from(VOCAB)) as u32).collect() };
    let systems = [text(41), text(32), text(23)];
    let mut work: Vec<Work> = Vec::new();
    for i in 0..28usize {
        let again = i % 4 == 3;
        let mut prompt = if again { work[i / 2].prompt.clone() } else { systems[i % 3].clone() };
        let tail = 1 + i as u64 * 7 % 20;
        prompt.extend(text(tail));
        work.push(Work {
            adapter: usize::from(i % 5 == 4),
            prompt,
            answer_tokens: 6 + i % 9,
            arrives: i as u64 * 3,
        });
    }
    // The first ones come again, unchanged, when their pages may have gone.
    let again: Vec<Work> = work[..8].iter().map(|w| Work { arrives: w.arrives + 100, ..w.clone() }).collect();
    work.extend(again);
    work
}

/// The answers without a cache.
pub fn without_cache(model: &Model, work: &[Work]) -> Vec<Outcome> {
    work.iter()
        .map(|w| match alone::<Flat>(model, w) {
            Ok(outcome) => outcome,
            Err(never) => absurd(never),
        })
        .collect()
}

fn absurd(never: Infallible) -> ! {
    match never {}
}

/// Runs one set-up and compares it with the answers without a cache.
pub fn run(model: &Model, setup: &Setup, work: &[Work], want: &[Outcome]) -> Result<Report, Failure> {
    let mut server = Server::new(model, setup.options.clone())?;
    let mut report = server.run(work)?;
    compare(&report.outcomes, want)?;
    if setup.restart {
        drop(server);
        report = Server::new(model, setup.options.clone())?.run(work)?;
        compare(&report.outcomes, want)?;
    }
    let stats = &report.stats;
    if setup.shows.tiers && (stats.demoted_pages == 0 || stats.loaded_pages == 0) {
        return Err(format!("nothing was demoted and loaded back: {stats:?}").into());
    }
    if setup.shows.store && stats.prefetch_loaded_tokens == 0 {
        return Err(format!("nothing came from the store: {stats:?}").into());
    }
    Ok(report)
}

fn compare(have: &[Outcome], want: &[Outcome]) -> Result<(), Failure> {
    match have.iter().zip(want).position(|(h, w)| h != w) {
        None => Ok(()),
        Some(i) => Err(format!("answer {i} differs:\n  have {:?}\n  want {:?}", have[i], want[i]).into()),
    }
}
