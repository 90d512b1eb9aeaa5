//! Instructions per operation: exact on a noisy machine, so a change can be held to them.
//!
//! `counts` runs every case under callgrind and compares with `baseline.tsv`; more than 2 % apart, up or down, is a
//! failure. `counts write` makes a new baseline, to be committed with the change that explains it. `counts one NAME`
//! is what callgrind runs: it prepares the case, and only what [`measured`] calls is counted.
#![expect(clippy::unwrap_used, reason = "a bench that cannot go on should stop")]

mod cases;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use cases::CASES;

/// Most a count may differ from the baseline, in percent.
const APART_PERCENT_MAX: f64 = 2.0;

/// The counted part of a case. Never inlined: callgrind starts and stops at this name.
#[inline(never)]
pub(crate) fn measured<R>(f: impl FnOnce() -> R) -> R {
    std::hint::black_box(f())
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["one", name] => match CASES.iter().find(|case| case.name == name) {
            Some(case) => {
                (case.run)();
                ExitCode::SUCCESS
            }
            None => ExitCode::from(2),
        },
        [] => compare(),
        ["write"] => {
            let mut table = String::from("case\toperations\tinstructions\n");
            for case in CASES {
                writeln!(table, "{}\t{}\t{}", case.name, case.operations, count(case.name)).unwrap();
            }
            std::fs::write(baseline_path(), table).unwrap();
            ExitCode::SUCCESS
        }
        _ => {
            eprintln!("usage: counts [write]");
            ExitCode::from(2)
        }
    }
}

fn is_apart(now: u64, then: u64) -> bool {
    (now as f64 / then as f64 - 1.0).abs() * 100.0 > APART_PERCENT_MAX
}

fn baseline_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("baseline.tsv")
}

fn compare() -> ExitCode {
    let text = std::fs::read_to_string(baseline_path()).unwrap_or_default();
    let baseline: BTreeMap<&str, u64> = text
        .lines()
        .skip(1)
        .filter_map(|line| line.split('\t').next().zip(line.rsplit('\t').next()?.parse().ok()))
        .collect();
    let floor = CASES[0].name;
    if let Some(&then) = baseline.get(floor)
        && is_apart(count(floor), then)
    {
        // Only the C library runs there. Where it picks other routines, the other counts mean nothing.
        println!(
            "{floor}: {} here, {then} in the baseline: another processor, nothing to compare",
            count(floor)
        );
        return ExitCode::SUCCESS;
    }
    println!("{:<34} {:>12} {:>12} {:>9}", "case", "per op", "baseline", "apart");
    let mut failed = baseline.len() != CASES.len();
    for case in CASES {
        let now = count(case.name);
        let per_op = |n: u64| n as f64 / f64::from(case.operations);
        let Some(&then) = baseline.get(case.name) else {
            println!("{:<34} {:>12.1} {:>12} {:>9}", case.name, per_op(now), "none", "FAILED");
            failed = true;
            continue;
        };
        let apart = (now as f64 / then as f64 - 1.0) * 100.0;
        let bad = is_apart(now, then);
        failed |= bad;
        let mark = if bad { "  FAILED" } else { "" };
        println!("{:<34} {:>12.1} {:>12.1} {apart:>+8.2}%{mark}", case.name, per_op(now), per_op(then));
    }
    if failed {
        println!(
            "Counts and baseline differ. If the change explains it: `counts write`, and commit the table."
        );
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// Instructions of one case, by callgrind.
fn count(name: &str) -> u64 {
    let out = std::env::temp_dir().join(format!("sapwood-counts-{}-{name}", std::process::id()));
    let run = Command::new("valgrind")
        .args(["--tool=callgrind", "--collect-atstart=no", "--toggle-collect=*measured*", "--cache-sim=no"])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(std::env::current_exe().unwrap())
        .args(["one", name])
        // glibc picks its routines by the processor; one choice for all keeps the counts equal.
        .env("GLIBC_TUNABLES", "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-ERMS,-FSRM")
        .output()
        .expect("valgrind is installed");
    assert!(run.status.success(), "{name}: {}", String::from_utf8_lossy(&run.stderr));
    let text = std::fs::read_to_string(&out).unwrap();
    std::fs::remove_file(&out).unwrap();
    let total =
        text.lines().rev().find_map(|line| line.strip_prefix("totals: ")).expect("callgrind writes totals");
    let total = total.trim().parse().expect("callgrind writes a number");
    assert!(total > 0, "{name}: nothing was counted");
    total
}
