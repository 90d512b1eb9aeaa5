//! `sapwood doctor`: says what this machine has.

use std::process::ExitCode;

use clap::Parser;
use sapwood::backend::probe::{self, Severity};

/// Say what this machine offers: devices, kernels, memory.
///
/// A device that is missing is reported, not an error: the software device works everywhere.
#[derive(Parser)]
pub(crate) struct Args {
    /// End with code 1 if something is missing.
    #[arg(long)]
    strict: bool,
}

pub(crate) fn main(args: &Args) -> ExitCode {
    let findings = probe::report();
    for finding in &findings {
        let mark = match finding.severity() {
            Severity::Good => "ok     ",
            Severity::Note => "note   ",
            Severity::Missing => "missing",
        };
        println!("{mark}  {finding}");
    }
    let missing = findings.iter().any(|f| f.severity() == Severity::Missing);
    ExitCode::from(u8::from(args.strict && missing))
}
