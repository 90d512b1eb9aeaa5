//! `sapwood replay`: drives the cache with a workload as a scheduler would, with real bytes in every page.
//!
//! ```text
//! trace / workload -> jobs -> sched -> calls -> cache          (decisions, bytes between tiers)
//!                      |        `----> model -> device memory  (stamps in the place of KV)
//!                    oracle     `----> report, chart
//! ```

mod args;
mod calls;
mod chart;
mod error;
mod hist;
mod model;
mod oracle;
mod queue;
mod report;
mod saved;
mod sched;
mod session;
mod setup;
mod stamp;
mod store_url;
mod tokens;
mod trace;
mod workload;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use sapwood::base::Tier;
use sapwood::engine::PrefixCache;
use sapwood::tree::Component;

pub(crate) use args::Args;
use error::{InputError, RunError};
use report::{Bytes, Pages, PerTier, Report};
use sched::Scheduler;
use setup::Input;

/// How long copies may take to end when everything else is done.
const CLOSE_WAIT_MAX: Duration = Duration::from_secs(60);

/// Runs a replay. Exit code 0: all well, 1: something is wrong with the cache, 2: bad input.
pub(crate) fn main(args: &Args) -> ExitCode {
    let start = Instant::now();
    let input = match setup::input(args) {
        Ok(input) => input,
        Err(error) => return failed(2, &error),
    };
    match run(args, &input, start) {
        Ok(faults) if faults.is_empty() => ExitCode::SUCCESS,
        Ok(faults) => {
            faults.iter().for_each(|fault| complain(fault));
            ExitCode::from(1)
        }
        Err(Stop::Input(error)) => failed(2, &error),
        Err(Stop::Run(error)) => failed(1, &error),
    }
}

/// Why a replay stopped before its end.
enum Stop {
    Input(InputError),
    Run(RunError),
}

impl From<InputError> for Stop {
    fn from(error: InputError) -> Stop {
        Stop::Input(error)
    }
}

impl<E: Into<RunError>> From<E> for Stop {
    fn from(error: E) -> Stop {
        Stop::Run(error.into())
    }
}

fn failed(code: u8, error: &dyn std::error::Error) -> ExitCode {
    complain(&error.to_string());
    ExitCode::from(code)
}

/// One line to standard error; a closed standard error is no reason to stop.
fn complain(line: &str) {
    let _ = writeln!(std::io::stderr(), "sapwood: {line}");
}

fn run(args: &Args, input: &Input, start: Instant) -> Result<Vec<String>, Stop> {
    // Created before the run, so that a path that cannot be written is told at once.
    let json = create(args.json.as_deref())?;
    let chart = create(args.chart.as_deref())?;
    let machine = setup::machine(args, &input.jobs)?;
    let mut scheduler = Scheduler::new(args, &input.jobs, machine.calls, machine.models);
    let bar = progress_bar(input.jobs.len());
    scheduler.run(|ended| bar.set_position(ended))?;
    scheduler.drain()?;
    bar.finish_and_clear();
    let mut report = report(args, input, &scheduler);
    report.violations.extend(machine.scrub_faults.take());
    let ranks = scheduler.calls.ranks_mut().iter_mut();
    let unfinished: u32 = ranks.map(|cache| cache.close(CLOSE_WAIT_MAX)).sum();
    if unfinished > 0 {
        report.violations.push(format!("{unfinished} copies did not end"));
    }
    report.wall_s = start.elapsed().as_secs_f64();
    report.peak_rss_bytes = report::peak_rss_bytes();

    // A reader that went away (`| head`) is no fault of the cache.
    let _ = report.print(&mut std::io::stdout().lock());
    if let Some((mut file, path)) = json {
        let mut text = serde_json::to_string_pretty(&report).map_err(std::io::Error::from);
        text = text.map(|text| text + "\n");
        let written = text.and_then(|text| file.write_all(text.as_bytes()));
        written.map_err(|source| RunError::Output { path: path.to_owned(), source })?;
    }
    if let Some((mut file, path)) = chart {
        let svg = chart::draw(&scheduler.timeline, &title(args, input), &setup::capacities(args));
        file.write_all(svg.as_bytes())
            .map_err(|source| RunError::Output { path: path.to_owned(), source })?;
    }
    Ok(report.faults())
}

fn create(path: Option<&Path>) -> Result<Option<(File, &Path)>, InputError> {
    let Some(path) = path else { return Ok(None) };
    let file = File::create(path).map_err(|source| InputError::Output { path: path.to_owned(), source })?;
    Ok(Some((file, path)))
}

/// A bar on a terminal, nothing elsewhere.
fn progress_bar(requests: usize) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(Some(requests as u64), ProgressDrawTarget::stderr_with_hz(10));
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} requests, {elapsed} elapsed, {eta} to go");
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// One line that says what was replayed.
fn title(args: &Args, input: &Input) -> String {
    let what = match &args.trace {
        Some(path) => path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned(),
        None => format!("built-in workload, seed {}", args.seed),
    };
    let policy = clap::ValueEnum::to_possible_value(&args.write_policy);
    let policy = policy.map_or(String::new(), |p| p.get_name().to_owned());
    format!("{what}: {} requests, pages of {} tokens, {policy}", input.jobs.len(), args.page_size)
}

fn report(args: &Args, input: &Input, scheduler: &Scheduler<'_>) -> Report {
    let cache = scheduler.calls.cache();
    let (counts, stats, bytes) = (&scheduler.counts, cache.stats(), cache.bytes_moved());
    let named = |list: &sapwood::tiers::stats::TokensByReason| {
        list.iter().map(|(reason, n)| (reason.name().to_owned(), *n)).collect()
    };
    let violations = scheduler.calls.ranks().iter().enumerate().flat_map(violations).collect();
    let oracle = || oracle::hit_tokens(&input.jobs, args.page_size, !args.no_decode);
    Report {
        requests: input.jobs.len() as u64,
        finished: counts.finished,
        aborted: counts.aborted,
        rejected: counts.rejected,
        retracted: counts.retracted,
        input_tokens: counts.input_tokens,
        hit_tokens: counts.hits,
        saved: counts.saved,
        computed_tokens: counts.computed_tokens,
        decoded_tokens: counts.decoded_tokens,
        evicted_pages: PerTier {
            device: stats.demoted_pages + stats.deleted_pages,
            host: stats.host_evicted_pages,
        },
        dropped_tokens: named(&stats.dropped_tokens),
        refusals: named(&stats.refused_calls),
        bytes: Bytes {
            d2h: bytes.d2h,
            h2d: bytes.h2d,
            store_put: bytes.store_put,
            store_get: bytes.store_get,
        },
        counters: counters(cache),
        pages_verified: scheduler.models.iter().map(|model| model.pages_verified).sum(),
        mismatches: counts.mismatches,
        mismatch_details: counts.mismatch_details.clone(),
        violations,
        pages: PerTier { device: pages(cache, Tier::Device), host: pages(cache, Tier::Host) },
        call_us: scheduler.calls.quantiles(),
        digest: format!("{:016x}", cache.digest()),
        rank_digests: scheduler.calls.ranks().iter().map(|c| format!("{:016x}", c.digest())).collect(),
        order: cache.eviction_stats().map(|s| report::Order {
            stake: s.stake,
            hit_pages: s.hit_pages,
            lru_hit_pages: s.lru_hit_pages,
        }),
        oracle_hit_tokens: args.oracle.then(oracle),
        oracle_is_exact: args.oracle_is_exact(),
        skipped_lines: input.skipped_lines as u64,
        steps: counts.steps,
        virtual_s: scheduler.now.0 as f64 / 1e6,
        wall_s: 0.0,
        peak_rss_bytes: 0,
    }
}

/// What is wrong with the cache of a rank when everything has ended.
fn violations((rank, cache): (usize, &PrefixCache)) -> Vec<String> {
    let mut found: Vec<String> = cache.sanity().iter().map(ToString::to_string).collect();
    if cache.stats().violations > 0 {
        found.push(format!("{} broken rules were met on the way", cache.stats().violations));
    }
    if !cache.is_idle() {
        found.push("operations are left that nothing will end".to_owned());
    }
    for (name, tier) in [("device", Tier::Device), ("host", Tier::Host)] {
        let leaked = pages(cache, tier).leaked;
        // Those of rank 0 are in the report.
        if rank > 0 && leaked > 0 {
            found.push(format!("{name}: {leaked} pages are neither free nor cached"));
        }
    }
    found.into_iter().map(|line| if rank > 0 { format!("rank {rank}: {line}") } else { line }).collect()
}

fn counters(cache: &PrefixCache) -> BTreeMap<&'static str, u64> {
    let stats = cache.stats();
    BTreeMap::from([
        ("allocated_pages", stats.allocated_pages),
        ("demoted_pages", stats.demoted_pages),
        ("deleted_pages", stats.deleted_pages),
        ("mirror_reclaimed_pages", stats.mirror_reclaimed_pages),
        ("backed_up_pages", stats.backed_up_pages),
        ("backup_failed_pages", stats.backup_failed_pages),
        ("loaded_pages", stats.loaded_pages),
        ("load_failed_pages", stats.load_failed_pages),
        ("component_evicted_pages", stats.component_evicted_pages),
        ("component_unsaved_pages", stats.component_unsaved_pages),
        ("component_prefetched_pages", stats.component_prefetched_pages),
        ("store_put_pages", stats.store_put_pages),
        ("store_not_yet_pages", stats.store_not_yet_pages),
        ("store_put_failed_pages", stats.store_put_failed_pages),
        ("store_put_dropped_pages", stats.store_put_dropped_pages),
        ("store_queue_full_nodes", stats.store_queue_full_nodes),
        ("store_got_pages", stats.store_got_pages),
        ("store_corrupt_pages", stats.store_corrupt_pages),
        ("prefetches", stats.prefetches),
        ("prefetch_hit_tokens", stats.prefetch_hit_tokens),
        ("prefetch_loaded_tokens", stats.prefetch_loaded_tokens),
        ("prefetch_redundant_tokens", stats.prefetch_redundant_tokens),
        ("stray_events", stats.stray_events),
        ("device_faults", cache.device_faults()),
    ])
}

/// What is neither free nor cached when nothing runs any more is lost, whoever the cache thinks owns it.
fn pages(cache: &PrefixCache, tier: Tier) -> Pages {
    let mut all = Pages { capacity: 0, free: 0, cached: 0, leaked: 0 };
    let components = [Component::Window, Component::State].map(|c| cache.component_counts(c, tier));
    for counts in std::iter::once(cache.page_counts(tier)).chain(components) {
        all.capacity += u64::from(counts.capacity_pages);
        all.free += u64::from(counts.free_pages);
        all.cached += u64::from(counts.cached_pages);
    }
    all.leaked = all.capacity.saturating_sub(all.free + all.cached);
    all
}
