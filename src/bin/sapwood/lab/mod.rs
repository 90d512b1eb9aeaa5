//! Compares orders of eviction on traces and made-up workloads, without a byte of KV: hit shares over capacity beside
//! the offline optimum, seconds of prefill saved, two tiers, charts, and a guard that fails when ours falls below LRU.

mod chart;
mod generate;
mod live;
mod optimum;
mod policies;
mod report;
mod sim;
mod tiers;
mod trace;
mod work;

use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

use report::{Model, Row, Table};
use work::Work;

/// Arguments of `sapwood lab`.
#[derive(clap::Args)]
#[command(about = "Compare orders of eviction on traces and generated workloads")]
pub(crate) struct Args {
    /// Traces in Mooncake's format.
    traces: Vec<PathBuf>,
    /// Generated workloads.
    #[arg(long, value_enum, value_delimiter = ',')]
    workload: Vec<generate::Kind>,
    /// Orders to compare.
    #[arg(long, value_delimiter = ',', default_value = "lru,adaptive")]
    policies: Vec<policies::Kind>,
    /// Capacities in tokens; K and M are 2^10 and 2^20.
    #[arg(long, value_delimiter = ',', default_value = "256K,1M,4M,16M")]
    capacity: Vec<Tokens>,
    /// Device and host capacity of a two-tier run, in tokens.
    #[arg(long, num_args = 2, value_names = ["DEVICE", "HOST"])]
    two_tier: Vec<Tokens>,
    /// Tokens per page; a divisor of 512.
    #[arg(long, default_value_t = 64, value_parser = page_tokens)]
    page: u32,
    /// First seed of generated workloads.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Seeds per generated workload.
    #[arg(long, default_value_t = 1)]
    seeds: u64,
    /// Requests per generated workload, and most requests read of a trace.
    #[arg(long, default_value_t = 20_000)]
    requests: usize,
    #[command(flatten)]
    model: Model,
    /// Write a chart per workload into this directory.
    #[arg(long)]
    svg: Option<PathBuf>,
    /// Write every figure as a line of JSON.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Let policies say what they learned.
    #[arg(long)]
    say: bool,
    /// Fail if `adaptive` is below `lru` by more than 1 % anywhere, on the mean over seeds.
    #[arg(long)]
    guard: bool,
}

/// A number of tokens such as `256K`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Tokens(u64);

/// Why a text is no number of tokens.
#[derive(Debug, thiserror::Error)]
#[error("not a number of tokens between 1K and 1024M")]
struct NotTokens;

impl FromStr for Tokens {
    type Err = NotTokens;

    fn from_str(text: &str) -> Result<Tokens, NotTokens> {
        let (digits, unit) = match text.strip_suffix('M') {
            Some(digits) => (digits, 1 << 20),
            None => text.strip_suffix('K').map_or((text, 1), |digits| (digits, 1 << 10)),
        };
        let tokens = digits.parse::<f64>().map_err(|_| NotTokens)? * f64::from(unit);
        if (1024.0..=f64::from(1 << 30)).contains(&tokens) {
            Ok(Tokens(tokens as u64))
        } else {
            Err(NotTokens)
        }
    }
}

fn page_tokens(text: &str) -> Result<u32, String> {
    let pages = text.parse().map_err(|_| "not a number".to_owned())?;
    if (1..=512).contains(&pages) && 512 % pages == 0 {
        Ok(pages)
    } else {
        Err("not a divisor of 512".to_owned())
    }
}

/// Runs the laboratory. Exit code 1: a file cannot be read or written, or the guard failed.
pub(crate) fn main(args: &Args) -> ExitCode {
    match run(args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("sapwood lab: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Why a run ended early.
#[derive(Debug, thiserror::Error)]
enum LabError {
    #[error(transparent)]
    Trace(#[from] trace::TraceError),
    #[error("cannot write {}: {source}", path.display())]
    Write { path: PathBuf, source: std::io::Error },
    #[error("nothing to do: give a trace or --workload")]
    Nothing,
}

fn run(args: &Args) -> Result<bool, LabError> {
    if args.traces.is_empty() && args.workload.is_empty() {
        return Err(LabError::Nothing);
    }
    let mut table = Table::default();
    for path in &args.traces {
        one(args, &trace::read(path, args.page, args.requests)?, 0, &mut table);
    }
    for &kind in &args.workload {
        for seed in args.seed..args.seed.saturating_add(args.seeds) {
            one(args, &generate::generate(kind, seed, args.requests, args.page), seed, &mut table);
        }
    }
    if args.seeds > 1 {
        table.print_means();
    }
    let write = |path: &PathBuf, text: String| {
        std::fs::write(path, text).map_err(|source| LabError::Write { path: path.clone(), source })
    };
    if let Some(path) = &args.json {
        write(path, table.json())?;
    }
    if let Some(directory) = &args.svg {
        for (name, lines) in table.charts() {
            write(&directory.join(format!("{name}.svg")), chart::draw(&name, &lines))?;
        }
    }
    Ok(!args.guard || table.guard_holds())
}

/// All figures of one workload.
fn one(args: &Args, work: &Work, seed: u64, table: &mut Table) {
    let knee = args.model.knee_pages(work.page_tokens);
    let unlimited = work.percent(work.unlimited());
    println!(
        "{} (seed {seed}): {} requests over {} s, {:.1} M prompt tokens, {:.2} % hit without limit",
        work.name,
        work.jobs.len(),
        work.jobs.last().map_or(0, |j| j.at_us / 1_000_000),
        work.input_tokens as f64 / 1e6,
        unlimited
    );
    for &Tokens(tokens) in &args.capacity {
        let pages = tokens / u64::from(work.page_tokens);
        let best = optimum::run(work, pages, knee);
        table.add(Row::new(work, seed, tokens, "optimum".to_owned(), &best, &args.model), None);
        for &kind in &args.policies {
            let (outcome, say) = run_one(kind, work, pages, knee);
            let say = say.filter(|_| args.say);
            table.add(Row::new(work, seed, tokens, kind.to_string(), &outcome, &args.model), say);
        }
    }
    if let [Tokens(device), Tokens(host)] = args.two_tier[..] {
        let pages = |tokens| tokens / u64::from(work.page_tokens);
        for &kind in &args.policies {
            let [d, h] = [pages(device), pages(host)].map(|pages| run_one(kind, work, pages, knee).0);
            report::print_tiers(work, &kind.to_string(), "inclusive", tiers::inclusive(&d, &h), &args.model);
            // The tree with two tiers is run by `sapwood replay`.
            if policies::live(kind, work, 1, 1).is_none() {
                let exclusive =
                    tiers::exclusive(work, &mut *policies::make(kind, work), pages(device), pages(host));
                report::print_tiers(work, &kind.to_string(), "exclusive", exclusive, &args.model);
            }
        }
    }
}

/// One policy with so many pages, in the tree or in the simulation, and what it says about itself.
fn run_one(kind: policies::Kind, work: &Work, pages: u64, knee: f64) -> (sim::Outcome, Option<String>) {
    match policies::live(kind, work, pages, knee as u32) {
        Some((order, ahead)) => {
            let start = std::time::Instant::now();
            let (outcome, stats) = live::run(work, pages, knee, order, ahead);
            let us = start.elapsed().as_secs_f64() * 1e6 / work.jobs.len() as f64;
            (
                outcome,
                Some(format!("{us:.2} us a request, {}", stats.map_or_else(String::new, |s| live::say(&s)))),
            )
        }
        None => {
            let mut policy = policies::make(kind, work);
            let outcome = sim::run(work, pages, knee, &mut *policy);
            (outcome, policy.say())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_have_units() {
        let of = |text: &str| text.parse::<Tokens>().ok().map(|t| t.0);
        assert_eq!(of("256K"), Some(1 << 18));
        assert_eq!(of("0.5M"), Some(1 << 19));
        assert_eq!(of("4096"), Some(4096));
        for bad in ["", "M", "-1M", "1G", "NaN", "infM", "1", "2048M"] {
            assert_eq!(of(bad), None, "{bad}");
        }
    }

    #[test]
    fn pages_divide_blocks() {
        assert!(page_tokens("64").is_ok() && page_tokens("512").is_ok());
        for bad in ["0", "100", "1024", "x"] {
            assert!(page_tokens(bad).is_err(), "{bad}");
        }
    }
}
