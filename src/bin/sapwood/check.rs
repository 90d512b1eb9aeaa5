//! `sapwood check`: replays an op log and looks at every rule after every step.

use std::path::PathBuf;
use std::process::ExitCode;

use sapwood::tiers::OpLog;

/// Replay an op log, check every rule after every step, print the digest
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The log, as `Core::log` writes it
    log: PathBuf,
    /// Look only at the end
    #[arg(long)]
    quick: bool,
}

/// Exit code 0: healthy; 1: a rule was broken; 2: the log can not be read.
pub(crate) fn main(args: &Args) -> ExitCode {
    let name = args.log.display();
    let log: OpLog = match std::fs::read_to_string(&args.log).map(|text| text.parse()) {
        Ok(Ok(log)) => log,
        Ok(Err(error)) => {
            eprintln!("sapwood: {name}: {error}");
            return ExitCode::from(2);
        }
        Err(error) => {
            eprintln!("sapwood: cannot read {name}: {error}");
            return ExitCode::from(2);
        }
    };
    let ended = log.replay(!args.quick).and_then(|core| match core.sanity() {
        violations if violations.is_empty() => Ok(core),
        violations => {
            Err(sapwood::tiers::oplog::Broken { step: log.ops.len().saturating_sub(1), violations })
        }
    });
    match ended {
        Ok(core) => {
            println!("{} ops, no rule broken, digest {:016x}", log.ops.len(), core.digest());
            ExitCode::SUCCESS
        }
        Err(broken) => {
            let op = log.ops.get(broken.step).map(ToString::to_string).unwrap_or_default();
            println!("broken after op {} ({op}):", broken.step + 1);
            broken.violations.iter().for_each(|violation| println!("  {violation}"));
            ExitCode::FAILURE
        }
    }
}
