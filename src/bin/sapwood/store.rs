//! `sapwood store`: looks after the directory of a file store that nobody has open.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Subcommand;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use sapwood::backend::identity::NamespaceDigest;
use sapwood::backend::store::file::{FileConfig, FileStore, OpenError, Usage, VerifyReport};
use sapwood::backend::store::{Call, Store, StoreError};
use serde::Serialize;

/// Look into, check and tidy the directory of a file store
#[derive(clap::Args)]
#[command(after_help = "Exit code: 0 done and all well, 1 damaged pages or a failing disk, 2 bad input.")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Say what is in it
    Stat {
        /// Directory of the store
        dir: PathBuf,
        /// One JSON object instead of a table
        #[arg(long)]
        json: bool,
    },
    /// Read and check every page; take out what is damaged
    Verify {
        /// Directory of the store
        dir: PathBuf,
    },
    /// Delete segments in which no page is left, and files that were put aside as damaged
    Gc {
        /// Directory of the store
        dir: PathBuf,
    },
    /// Remove every page of one namespace, of every model and plane, and no page of another
    Clear {
        /// Directory of the store
        dir: PathBuf,
        /// `default`, or the digits that `stat` prints; at least 8, if only one namespace begins with them
        #[arg(long, value_name = "DIGITS|default")]
        namespace: String,
    },
}

/// Why nothing could be done.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("{} is not the directory of a store", .0.display())]
    NotAStore(PathBuf),
    #[error("cannot use store directory {}: {error}", path.display())]
    Open { path: PathBuf, error: OpenError },
    #[error("{0:?} is no namespace: `default` or at least 8 of 64 lower-case hex digits")]
    NoDigits(String),
    #[error("no namespace in the store begins with {0}")]
    Unknown(String),
    #[error("{count} namespaces in the store begin with {digits}")]
    Ambiguous { digits: String, count: usize },
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Failure {
    fn exit_code(&self) -> u8 {
        match self {
            Failure::Store(_) => 1,
            _ => 2,
        }
    }
}

/// How long sealing the last segment may take.
const CLOSE_WAIT_MAX: Duration = Duration::from_secs(600);
/// Damaged pages told by name; the rest is counted.
const NAMES_MAX: usize = 20;

pub(crate) fn main(args: &Args) -> ExitCode {
    match run(&args.command) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(failure) => {
            // A closed standard error is no reason to end otherwise.
            let _ = writeln!(std::io::stderr(), "sapwood: {failure}");
            ExitCode::from(failure.exit_code())
        }
    }
}

/// Does it; `false` if pages are damaged.
fn run(command: &Command) -> Result<bool, Failure> {
    match command {
        Command::Stat { dir, json } => stat(dir, *json).map(|()| true),
        Command::Verify { dir } => verify(dir),
        Command::Gc { dir } => gc(dir).map(|()| true),
        Command::Clear { dir, namespace } => clear(dir, namespace).map(|()| true),
    }
}

/// Opens a store that is there. Nothing is made where there is none, and nothing is evicted.
fn open(dir: &Path) -> Result<FileStore, Failure> {
    // Every store has had a lock file from its first opening on; other directories are left alone.
    if !dir.join("LOCK").is_file() {
        return Err(Failure::NotAStore(dir.to_owned()));
    }
    let mut config = FileConfig::new(dir, 1 << 62);
    // A removal needs room for one small record even where the disk is full.
    (config.segment_bytes, config.free_bytes_min) = (1 << 20, 0);
    FileStore::open(config).map_err(|error| Failure::Open { path: dir.to_owned(), error })
}

fn close(store: &FileStore) -> Result<(), Failure> {
    Ok(store.close(Instant::now() + CLOSE_WAIT_MAX)?)
}

/// One line to standard output; a reader that went away (`| head`) is no failure.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// What `stat --json` prints. Field names are an interface.
#[derive(Serialize)]
struct Stat {
    pages: u64,
    payload_bytes: u64,
    segments: u64,
    disk_bytes: u64,
    segments_scanned: u64,
    files_put_aside: u64,
    spaces: Vec<StatSpace>,
}

#[derive(Serialize)]
struct StatSpace {
    namespace: String,
    descriptor: String,
    pages: u64,
    payload_bytes: u64,
}

fn stat(dir: &Path, json: bool) -> Result<(), Failure> {
    let store = open(dir)?;
    let (usage, recovery) = (store.usage(), store.recovery());
    close(&store)?;
    let stat = Stat {
        pages: usage.pages,
        payload_bytes: usage.payload_bytes,
        segments: usage.segments,
        disk_bytes: usage.disk_bytes,
        segments_scanned: recovery.segments_scanned,
        files_put_aside: recovery.files_put_aside,
        spaces: spaces(&usage),
    };
    if json {
        say(&serde_json::to_string_pretty(&stat)
            .map_err(|e| Failure::Store(StoreError::Io { op: "print", source: e.into() }))?);
        return Ok(());
    }
    say(&format!("pages          {} with {} bytes", stat.pages, stat.payload_bytes));
    say(&format!("segments       {} with {} bytes on the disk", stat.segments, stat.disk_bytes));
    say(&format!(
        "opening        {} segments scanned, {} files put aside",
        stat.segments_scanned, stat.files_put_aside
    ));
    for s in &stat.spaces {
        say(&format!(
            "namespace {}  descriptor {}  pages {}  bytes {}",
            &s.namespace[..16],
            &s.descriptor[..16],
            s.pages,
            s.payload_bytes
        ));
    }
    Ok(())
}

fn spaces(usage: &Usage) -> Vec<StatSpace> {
    let one = |s: &sapwood::backend::store::file::SpaceUse| StatSpace {
        namespace: s.space.namespace().hex(),
        descriptor: s.space.descriptor().hex(),
        pages: s.pages,
        payload_bytes: s.payload_bytes,
    };
    usage.spaces.iter().map(one).collect()
}

fn verify(dir: &Path) -> Result<bool, Failure> {
    let store = open(dir)?;
    let bar = progress_bar(store.usage().payload_bytes);
    let report = store.verify(&Call::unbounded(), &mut |p| bar.set_position(p.bytes_done));
    bar.finish_and_clear();
    let report = report?;
    close(&store)?;
    let VerifyReport { good, good_bytes, corrupt, unreadable, gone, .. } = &report;
    say(&format!("good           {good} pages with {good_bytes} bytes"));
    say(&format!("damaged        {} pages, taken out", corrupt.len()));
    say(&format!("unreadable     {} pages, left alone", unreadable.len()));
    if *gone > 0 {
        say(&format!("gone           {gone} pages"));
    }
    for (what, keys) in [("damaged", corrupt), ("unreadable", unreadable)] {
        keys.iter().take(NAMES_MAX).for_each(|key| say(&format!("{what} {}", key.hex())));
        if keys.len() > NAMES_MAX {
            say(&format!("{what} and {} more", keys.len() - NAMES_MAX));
        }
    }
    Ok(corrupt.is_empty() && unreadable.is_empty())
}

/// A bar on a terminal, nothing elsewhere.
fn progress_bar(bytes: u64) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(Some(bytes), ProgressDrawTarget::stderr_with_hz(10));
    let style = ProgressStyle::with_template("{bar:40} {bytes}/{total_bytes}, {bytes_per_sec}, {eta} to go");
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn gc(dir: &Path) -> Result<(), Failure> {
    let store = open(dir)?;
    let before = store.usage().disk_bytes;
    let deleted = store.gc()?;
    let freed = before.saturating_sub(store.usage().disk_bytes);
    close(&store)?;
    say(&format!("deleted        {deleted} files, {freed} bytes of segments"));
    Ok(())
}

fn clear(dir: &Path, namespace: &str) -> Result<(), Failure> {
    let digits = digits(namespace)?;
    let store = open(dir)?;
    let namespace = named(&digits, &store.usage())?;
    let removed = store.clear(namespace, &Call::unbounded())?;
    close(&store)?;
    say(&format!("removed        {removed} pages of namespace {}", &namespace.hex()[..16]));
    Ok(())
}

/// The digits of a namespace, checked before anything is opened.
fn digits(text: &str) -> Result<String, Failure> {
    if text == "default" {
        return Ok(NamespaceDigest::DEFAULT.hex());
    }
    let fine = (8..=64).contains(&text.len()) && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    if fine { Ok(text.to_owned()) } else { Err(Failure::NoDigits(text.to_owned())) }
}

/// The one namespace that begins so. All 64 digits name a namespace also where the store has no page of it.
fn named(digits: &str, usage: &Usage) -> Result<NamespaceDigest, Failure> {
    if let Some(whole) = NamespaceDigest::from_hex(digits) {
        return Ok(whole);
    }
    let mut found: Vec<NamespaceDigest> = Vec::new();
    for space in usage.spaces.iter().map(|s| s.space.namespace()).filter(|n| n.hex().starts_with(digits)) {
        if !found.contains(&space) {
            found.push(space);
        }
    }
    match found.as_slice() {
        [] => Err(Failure::Unknown(digits.to_owned())),
        [one] => Ok(*one),
        more => Err(Failure::Ambiguous { digits: digits.to_owned(), count: more.len() }),
    }
}
