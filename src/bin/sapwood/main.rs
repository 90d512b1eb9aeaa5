//! The `sapwood` command-line tool: argument parsing and exit codes. Each subcommand is a module.

mod lab;
mod replay;

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
    Lab(Box<lab::Args>),
    Replay(Box<replay::Args>),
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Lab(args) => lab::main(&args),
        Command::Replay(args) => replay::main(&args),
    }
}
