//! The `sapwood` command-line tool: argument parsing and exit codes. Each subcommand is a module.

mod check;
mod doctor;
mod lab;
mod pd_demo;
mod replay;
mod store;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// A prefix cache for LLM serving, driven from the command line.
#[derive(Parser)]
#[command(name = "sapwood", version, subcommand_required = true, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Check(check::Args),
    Doctor(doctor::Args),
    Lab(Box<lab::Args>),
    PdDemo(Box<pd_demo::Args>),
    Replay(Box<replay::Args>),
    Store(store::Args),
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Check(args) => check::main(&args),
        Command::Doctor(args) => doctor::main(&args),
        Command::Lab(args) => lab::main(&args),
        Command::PdDemo(args) => pd_demo::main(&args),
        Command::Replay(args) => replay::main(&args),
        Command::Store(args) => store::main(&args),
    }
}
