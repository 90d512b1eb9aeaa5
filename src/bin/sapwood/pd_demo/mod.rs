//! `sapwood pd-demo`: prefill and decode processes on this host, real bytes between them, faults on request.
//!
//! Each process is a rank with the whole cache: prefill computes what its cache does not have, decode grants pages
//! of its own, and what matches there, on the device or on the host, is not sent.
//!
//! The parent is the router: it starts the processes and a rendezvous for each prefill instance, hands out
//! rooms, aborts some, kills and restarts a prefill process if asked, and prints what came of it. The
//! children are `prefill` and `decode`, ordinary drivers of the two machines. Exit code 0 means that every
//! room ended, no byte differed and no page was lost.

mod decode;
mod prefill;
mod shared;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::ValueEnum;
use sapwood::backend::transport::rendezvous::{Client, Rendezvous, Server};
use sapwood::pd::topo::Rank;

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    Tcp,
    Shm,
    /// Needs the feature `nixl` and `libnixl_capi.so` (`SAPWOOD_NIXL` says where).
    Nixl,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Tcp => "tcp",
            Kind::Shm => "shm",
            Kind::Nixl => "nixl",
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Role {
    Router,
    Prefill,
    Decode,
}

/// Move KV pages between prefill and decode processes on this host.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Prefill instances.
    #[arg(long, default_value_t = 2)]
    prefill: usize,
    /// Decode processes.
    #[arg(long, default_value_t = 2)]
    decode: usize,
    /// Rooms.
    #[arg(long, default_value_t = 200)]
    rooms: u64,
    /// Rooms aborted by the decode side, in percent.
    #[arg(long, default_value_t = 5)]
    abort_rate: u64,
    /// Kill a prefill process in the middle and start it again.
    #[arg(long)]
    kill: bool,
    /// How bytes move.
    #[arg(long, value_enum, default_value = "tcp")]
    pub(crate) transport: Kind,
    /// Two processes per prefill instance, each with half of the heads, while decode processes hold all. Their slices
    /// go as blocks through a ring on the decode side.
    #[arg(long)]
    pub(crate) staging: bool,
    /// Layers of the model.
    #[arg(long, default_value_t = 8)]
    pub(crate) layers: u32,
    /// Pages of each pool. A room takes up to 32 on either side; with room for the whole window nobody waits
    /// for pages that somebody holds who waits, too.
    #[arg(long, default_value_t = 512)]
    pub(crate) pages: u32,
    /// Rooms under way at once.
    #[arg(long, default_value_t = 16)]
    window: usize,
    /// Seed of prompts and aborts.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// What this process is; the router starts the others.
    #[arg(long, value_enum, default_value = "router", hide = true)]
    role: Role,
    /// Rendezvous of this prefill process.
    #[arg(long, hide = true)]
    pub(crate) rendezvous: Option<std::net::SocketAddr>,
    /// Its instance: when that was started, in microseconds.
    #[arg(long, hide = true, default_value_t = 0)]
    pub(crate) instance: u64,
    /// Its rank there.
    #[arg(long, hide = true, default_value_t = 0)]
    pub(crate) rank: u32,
}

pub(crate) fn main(args: &Args) -> ExitCode {
    let result = match args.role {
        Role::Router => route(args),
        Role::Prefill => prefill::run(args).map(|()| true),
        Role::Decode => decode::run(args).map(|()| true),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("pd-demo: {e}");
            ExitCode::FAILURE
        }
    }
}

/// Anything that ends the demo early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DemoError {
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("{0}")]
    Transport(#[from] sapwood::backend::transport::TransportError),
    #[error("{0}")]
    Rendezvous(#[from] sapwood::backend::transport::rendezvous::RendezvousError),
    #[error("{0}")]
    Layout(#[from] sapwood::pd::Incompatible),
    #[error("{0}")]
    Cache(#[from] sapwood::engine::CacheError),
    #[error("{0}")]
    Build(#[from] sapwood::engine::BuildError),
    #[error("{0}")]
    Device(#[from] sapwood::backend::device::DeviceError),
    #[error("{0}")]
    Region(#[from] sapwood::backend::region::RegionError),
    #[error("{0}")]
    Geometry(#[from] sapwood::pool::GeometryError),
    #[cfg(feature = "nixl")]
    #[error("{0}")]
    Nixl(#[from] sapwood::backend::transport::nixl::NixlError),
    #[cfg(not(feature = "nixl"))]
    #[error("built without the feature `{0}`")]
    NotBuilt(&'static str),
    #[error("a process said nothing for {0} s")]
    Silent(u64),
    #[error("a process ended early")]
    Ended,
}

struct Process {
    child: Child,
    stdin: ChildStdin,
    address: String,
}

enum Line {
    From(usize, String),
    Ended(usize),
}

struct Router<'a> {
    args: &'a Args,
    processes: BTreeMap<usize, Process>,
    lines_in: Sender<Line>,
    lines: Receiver<Line>,
    servers: Vec<Server>,
    rng: u64,
}

#[derive(Default)]
struct Table {
    arrived: u64,
    failed: BTreeMap<String, u64>,
    bytes: u64,
    sums: BTreeMap<String, u64>,
}

fn route(args: &Args) -> Result<bool, DemoError> {
    let (lines_in, lines) = channel();
    let mut r =
        Router { args, processes: BTreeMap::new(), lines_in, lines, servers: Vec::new(), rng: args.seed };
    for _ in 0..args.prefill {
        r.servers.push(Server::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0)?);
    }
    for i in 0..args.prefill {
        r.start_instance(i)?;
    }
    for i in r.prefill_processes()..r.prefill_processes() + args.decode {
        r.start(i, 0)?;
    }
    let mut table = Table::default();
    let start = Instant::now();
    r.rooms(&mut table)?;
    let seconds = start.elapsed().as_secs_f64();
    r.finish(&mut table)?;
    Ok(print(args, &table, seconds))
}

impl Router<'_> {
    fn next(&mut self) -> u64 {
        self.rng = self.rng.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.rng;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn ranks(&self) -> usize {
        shared::prefill_ranks(self.args) as usize
    }

    /// They come first, those of an instance together, then decode.
    fn prefill_processes(&self) -> usize {
        self.args.prefill * self.ranks()
    }

    /// Starts the processes of a prefill instance, and asks its rendezvous for them, as a decode instance would.
    fn start_instance(&mut self, instance: usize) -> Result<(), DemoError> {
        let ranks = self.ranks();
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as u64;
        for i in instance * ranks..(instance + 1) * ranks {
            self.start(i, started)?;
        }
        let mut client = Client::new(self.servers[instance].address());
        for (tp, i) in (0u32..).zip(instance * ranks..(instance + 1) * ranks) {
            let end = client.endpoint(Rank { tp, ..Rank::default() })?;
            if let Some(p) = self.processes.get_mut(&i) {
                p.address = end.address;
            }
        }
        Ok(())
    }

    /// Starts process `i` and waits until it says where it is.
    fn start(&mut self, i: usize, instance: u64) -> Result<(), DemoError> {
        let (prefill, ranks) = (i < self.prefill_processes(), self.ranks());
        let mut c = Command::new(std::env::current_exe()?);
        c.arg("pd-demo").args(["--role", if prefill { "prefill" } else { "decode" }]);
        c.args(["--transport", self.args.transport.name()]);
        if self.args.transport == Kind::Nixl && std::env::var_os("UCX_MODULES").is_none() {
            // Nobody here needs InfiniBand, and the package crashes at exit once it has looked for it.
            c.env("UCX_MODULES", "^ib");
        }
        c.args(["--layers", &self.args.layers.to_string(), "--pages", &self.args.pages.to_string()]);
        if self.args.staging {
            c.arg("--staging");
        }
        if let Some(s) = self.servers.get(i / ranks).filter(|_| prefill) {
            c.args(["--rendezvous", &s.address().to_string()]);
            c.args(["--instance", &instance.to_string(), "--rank", &(i % ranks).to_string()]);
        }
        let mut child = c.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(DemoError::Ended);
        };
        let lines = self.lines_in.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if lines.send(Line::From(i, line)).is_err() {
                    return;
                }
            }
            let _ = lines.send(Line::Ended(i));
        });
        self.processes.insert(i, Process { child, stdin, address: String::new() });
        let limit = Instant::now() + Duration::from_secs(30);
        let mut later = Vec::new();
        while self.processes.get(&i).is_some_and(|p| p.address.is_empty()) {
            match self.lines.recv_timeout(Duration::from_millis(100)) {
                Ok(Line::From(n, line)) => {
                    if let (Some(a), Some(p)) = (line.strip_prefix("up "), self.processes.get_mut(&n)) {
                        p.address = a.to_string();
                    } else {
                        // News of rooms during a restart.
                        later.push(Line::From(n, line));
                    }
                }
                // The end of the life before is no news; that of this one is.
                Ok(Line::Ended(n)) if n == i => {
                    let over =
                        self.processes.get_mut(&i).is_none_or(|p| !matches!(p.child.try_wait(), Ok(None)));
                    if over {
                        return Err(DemoError::Ended);
                    }
                }
                _ if Instant::now() > limit => return Err(DemoError::Silent(30)),
                _ => {}
            }
        }
        for line in later {
            let _ = self.lines_in.send(line);
        }
        Ok(())
    }

    fn tell(&mut self, i: usize, line: &str) {
        if let Some(p) = self.processes.get_mut(&i) {
            // A process that is gone is noticed by its end.
            let _ = writeln!(p.stdin, "{line}").and_then(|()| p.stdin.flush());
        }
    }

    fn rooms(&mut self, table: &mut Table) -> Result<(), DemoError> {
        let (np, nd, ranks) = (self.prefill_processes(), self.args.decode, self.ranks());
        let (mut opened, mut open) = (0u64, 0usize);
        let mut killed = false;
        let mut heard = Instant::now();
        while opened < self.args.rooms || open > 0 {
            while opened < self.args.rooms && open < self.args.window {
                let (p, d) = (self.next() as usize % self.args.prefill, np + self.next() as usize % nd);
                let tokens = 16 * (1 + self.next() % 32) - self.next() % 16;
                let abort =
                    if self.next() % 100 < self.args.abort_rate { (self.next() % 20_000) as i64 } else { -1 };
                let mut room = format!("room {opened} 1 {tokens} {abort}");
                for i in p * ranks..(p + 1) * ranks {
                    self.tell(i, &format!("room {opened} 1 {tokens}"));
                    room = format!("{room} {}", self.processes[&i].address);
                }
                self.tell(d, &room);
                (opened, open) = (opened + 1, open + 1);
            }
            if self.args.kill && !killed && opened > self.args.rooms / 3 {
                killed = true;
                self.kill(0)?;
            }
            match self.lines.recv_timeout(Duration::from_secs(1)) {
                Ok(Line::From(n, line)) if n >= np => {
                    let words: Vec<&str> = line.split_whitespace().collect();
                    if let ["done", _, _, outcome, value] = words.as_slice() {
                        heard = Instant::now();
                        open -= 1;
                        if *outcome == "ok" {
                            table.arrived += 1;
                            table.bytes += value.parse::<u64>().unwrap_or(0);
                        } else {
                            *table.failed.entry(value.replace('_', " ")).or_insert(0) += 1;
                        }
                    }
                }
                Ok(Line::Ended(n)) if n >= np => return Err(DemoError::Ended),
                _ if heard.elapsed() > Duration::from_secs(120) => return Err(DemoError::Silent(120)),
                _ => {}
            }
        }
        Ok(())
    }

    /// All ranks of an instance, as one that loses a rank is of no use.
    fn kill(&mut self, instance: usize) -> Result<(), DemoError> {
        let (np, ranks) = (self.prefill_processes(), self.ranks());
        for i in instance * ranks..(instance + 1) * ranks {
            let Some(mut p) = self.processes.remove(&i) else { continue };
            p.child.kill()?;
            p.child.wait()?;
            eprintln!("pd-demo: prefill process {i} killed");
            if self.args.transport == Kind::Shm {
                // The parent has waited for it, so it is gone, and with it every copy it was making. Over TCP and
                // NIXL bytes may still be under way; a fence helps with the first, nothing with the second.
                for d in np..np + self.args.decode {
                    self.tell(d, &format!("exited {}", p.address));
                }
            }
        }
        self.start_instance(instance)?;
        eprintln!("pd-demo: prefill instance {instance} started again");
        Ok(())
    }

    /// Stops everyone and collects their sums.
    fn finish(&mut self, table: &mut Table) -> Result<(), DemoError> {
        let all: Vec<usize> = self.processes.keys().copied().collect();
        all.iter().for_each(|&i| self.tell(i, "stop"));
        let (mut left, limit) = (all.len(), Instant::now() + Duration::from_secs(90));
        while left > 0 {
            match self.lines.recv_timeout(Duration::from_secs(1)) {
                Ok(Line::From(_, line)) => {
                    for (k, v) in line
                        .strip_prefix("stats ")
                        .iter()
                        .flat_map(|s| s.split(' '))
                        .filter_map(|w| w.split_once('='))
                    {
                        *table.sums.entry(k.to_string()).or_insert(0) += v.parse::<u64>().unwrap_or(0);
                    }
                    left -= usize::from(line.starts_with("stats "));
                }
                _ if Instant::now() > limit => return Err(DemoError::Silent(90)),
                _ => {}
            }
        }
        for p in self.processes.values_mut() {
            p.child.wait()?;
        }
        Ok(())
    }
}

fn print(args: &Args, t: &Table, seconds: f64) -> bool {
    let sum = |k: &str| t.sums.get(k).copied().unwrap_or(0);
    let failed: u64 = t.failed.values().sum();
    let kind = args.transport.name();
    println!(
        "rooms          {:>10}   over {kind}, {} prefill and {} decode processes",
        t.arrived + failed,
        args.prefill * shared::prefill_ranks(args) as usize,
        args.decode
    );
    println!("arrived        {:>10}", t.arrived);
    for (why, n) in &t.failed {
        println!("failed         {n:>10}   {why}");
    }
    println!(
        "bytes          {:>10}   {:.2} GB/s over {seconds:.1} s, checks included",
        t.bytes,
        t.bytes as f64 / seconds / 1e9
    );
    for rung in ["acked", "revoked", "fenced", "dead", "other"] {
        println!("released       {:>10}   {rung}", sum(rung));
    }
    println!("quarantined    {:>10}   ever; {} pages now", sum("quarantined"), sum("quarantine_pages"));
    println!(
        "prefix pages   {:>10}   reused on decode ({} restores from the host), {} hit and {} computed on prefill",
        sum("reused"),
        sum("restored"),
        sum("prefill_hits"),
        sum("computed")
    );
    if args.staging {
        println!("blocks         {:>10}   packed, {} scattered", sum("packed"), sum("scattered"));
    }
    println!("mismatches     {:>10}", sum("mismatches"));
    println!("leaked pages   {:>10}", sum("leaked"));
    if sum("broken") > 0 {
        println!("broken rules   {:>10}", sum("broken"));
    }
    let good = sum("mismatches") + sum("leaked") + sum("broken") == 0
        && t.arrived + failed == args.rooms
        && (!args.staging || sum("scattered") > 0);
    println!("{}", if good { "ok" } else { "NOT OK" });
    good
}
