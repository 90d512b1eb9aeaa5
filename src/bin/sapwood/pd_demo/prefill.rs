//! A prefill process: computes what its cache does not have, and drives a [`Sender`].

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::mpsc::TryRecvError;
use std::time::{Duration, Instant};

use sapwood::backend::device::SoftDevice;
use sapwood::backend::region::Sharing;
use sapwood::backend::transport::control::Control;
use sapwood::backend::transport::rendezvous::{Client, Rendezvous};
use sapwood::backend::transport::shm::ShmWriter;
use sapwood::backend::transport::tcp::TcpWriter;
use sapwood::backend::transport::{Done, Memory, Writer};
use sapwood::base::{Fence, NamespaceId, Tier};
use sapwood::engine::{CacheError, PrefixCache, Request};
use sapwood::pd::bootstrap::{Face, Registration};
use sapwood::pd::sender::{Action, Event, Outcome, SendSpec, Sender, SenderConfig, Tail};
use sapwood::pd::staging::StagingBuffers;
use sapwood::pd::topo::Rank as RankName;
use sapwood::pd::wire::VERSION;
use sapwood::pd::{Incarnation, RoomKey};
use sapwood::pool::PoolKind;
use sapwood::tiers::{Alloc, LoadState};

use super::shared::{
    Clock, PAGE_TOKENS, Rank, STAGE_BYTES, STAGE_PAGES, commands, fill, incarnation, page_hashes,
    prefill_ranks, prompt, room, say, tokens_of, topology,
};
use super::{Args, DemoError, Kind};

/// The producer of pages that come back from the host tier.
const LOADED: u64 = 1;

/// A room whose sources are pinned: the request is the pin.
struct Running {
    request: Request,
    tokens: Vec<u32>,
    last_use: Fence,
}

struct Prefill {
    clock: Clock,
    sender: Sender,
    control: Control,
    writer: Box<dyn Writer>,
    memory: Memory,
    /// Which rank of how many.
    part: (u32, u32),
    device: SoftDevice,
    cache: PrefixCache,
    running: BTreeMap<RoomKey, Running>,
    loading: BTreeSet<RoomKey>,
    waiting: VecDeque<(RoomKey, u32)>,
    buffer: Vec<u8>,
    pages: u64,
    hits: u64,
}

fn writer(args: &Args, inc: Incarnation, memory: Memory) -> Result<Box<dyn Writer>, DemoError> {
    Ok(match args.transport {
        Kind::Tcp => Box::new(TcpWriter::new(inc, memory)),
        Kind::Shm => Box::new(ShmWriter::new(memory)?),
        #[cfg(feature = "nixl")]
        Kind::Nixl => Box::new(sapwood::backend::transport::nixl::NixlWriter::new(inc, None, memory)?),
        #[cfg(not(feature = "nixl"))]
        Kind::Nixl => return Err(DemoError::NotBuilt("nixl")),
    })
}

pub(super) fn run(args: &Args) -> Result<(), DemoError> {
    let ranks = prefill_ranks(args);
    let (inc, topo, rank) =
        (incarnation(), topology(args, ranks), RankName { tp: args.rank, ..RankName::default() });
    let Rank { device, cache, layout, memory, .. } = Rank::new(args, ranks, Sharing::Private)?;
    let writer = writer(args, inc, memory.clone())?;
    let control = Control::new(IpAddr::V4(Ipv4Addr::LOCALHOST))?;
    if let Some(at) = args.rendezvous {
        Client::new(at).register(&Registration {
            instance: args.instance,
            started_us: args.instance,
            face: Face {
                topo: topo.clone(),
                model: layout.model,
                page_tokens: PAGE_TOKENS,
                window_tokens: 0,
                versions: (VERSION, VERSION),
            },
            rank,
            incarnation: inc,
            address: control.address().to_string(),
        })?;
    }
    say(&format!("up {}", control.address()));
    let staging = args.staging.then_some(StagingBuffers {
        region: layout.regions.len() as u32,
        base: 0,
        buffer_bytes: STAGE_BYTES / 8,
        buffers: 8,
        copies_min: 2,
    });
    let plain = SenderConfig::default();
    let pages_max = if args.staging { STAGE_PAGES } else { plain.chunk_pages_max };
    let config = SenderConfig { staging, chunk_pages_max: pages_max, ..plain };
    let sender = Sender::new(inc, config, topo, rank, layout)?;
    let buffer = vec![0; cache.geometry().page_bytes(PoolKind::Full) as usize];
    let mut p = Prefill {
        clock: Clock::new(),
        sender,
        control,
        writer,
        memory,
        part: (args.rank, ranks),
        device,
        cache,
        running: BTreeMap::new(),
        loading: BTreeSet::new(),
        waiting: VecDeque::new(),
        buffer,
        pages: 0,
        hits: 0,
    };
    p.serve()
}

impl Prefill {
    fn serve(&mut self) -> Result<(), DemoError> {
        let commands = commands();
        let mut stop_at = None;
        loop {
            match commands.try_recv() {
                Ok(words) if words.first().is_some_and(|w| w == "room") => {
                    self.waiting.extend(room(&words));
                }
                Ok(words) if words.first().is_some_and(|w| w == "stop") => {
                    self.sender.stop(self.clock.now());
                    self.waiting.clear();
                    stop_at = Some(Instant::now() + Duration::from_secs(30));
                }
                Err(TryRecvError::Disconnected) if stop_at.is_none() => return Ok(()),
                _ => {}
            }
            self.cache.tick(self.clock.now())?;
            self.open_waiting()?;
            self.step()?;
            let quiet = self.sender.is_quiet() && self.running.is_empty() && self.cache.is_idle();
            if stop_at.is_some_and(|at| Instant::now() > at || quiet) {
                self.report();
                return Ok(());
            }
        }
    }

    fn report(&mut self) {
        let c = self.cache.page_counts(Tier::Device);
        let leaked = (i64::from(c.request_pages + c.in_flight_pages) + c.leaked_pages).unsigned_abs();
        let broken = self.cache.sanity().len();
        let (pages, hits) = (self.pages, self.hits);
        let packed = self.sender.stats().chunks_packed;
        say(&format!(
            "stats leaked={leaked} broken={broken} computed={} prefill_hits={hits} packed={packed}",
            pages - hits
        ));
    }

    fn open_waiting(&mut self) -> Result<(), CacheError> {
        while let Some(&(key, tokens)) = self.waiting.front() {
            let prompt_tokens = tokens_of(key, tokens);
            let mut request = self.cache.request(NamespaceId::DEFAULT);
            // One token at least is computed: it makes the first answer.
            self.cache.match_prefix(&mut request, &prompt_tokens[..prompt_tokens.len() - 1])?;
            self.cache.load_back(&mut request)?;
            let cached = self.cache.pages(&request)?.len();
            let total = tokens.div_ceil(PAGE_TOKENS) as usize;
            if self.cache.alloc(&mut request, (total - cached) as u32)? != Alloc::Granted {
                return Ok(());
            }
            self.waiting.pop_front();
            let now = self.clock.now();
            if self.sender.open(now, key, SendSpec { prompt: prompt(key, tokens) }).is_err() {
                // Aborted on the other side before it was opened here.
                continue;
            }
            self.run_model(key, request, prompt_tokens, cached)?;
        }
        Ok(())
    }

    /// Computes the pages that are not cached, publishes them here, and offers everything to the other side.
    fn run_model(
        &mut self,
        key: RoomKey,
        mut request: Request,
        tokens: Vec<u32>,
        cached: usize,
    ) -> Result<(), CacheError> {
        let hashes = page_hashes(&tokens);
        let last_use = self.device.compute_begin();
        let fresh: Vec<_> = self.cache.pages(&request)?[cached..].to_vec();
        let filled = fresh
            .iter()
            .zip(&hashes[cached..])
            .all(|(&page, &hash)| fill(&self.device, page, hash, self.part, &mut self.buffer));
        self.device.compute_end(last_use);
        self.cache.checkpoint(&mut request, &tokens, last_use)?;
        self.pages += hashes.len() as u64;
        self.hits += cached as u64;
        // After the checkpoint: where the tree had a page already, the table names that one now.
        let table: Vec<u32> = self.cache.pages(&request)?.iter().map(|p| p.0).collect();
        let loading = self.cache.load_state(&request)? != LoadState::Ready;
        let now = self.clock.now();
        let offered = self
            .sender
            .offer(now, key, &table[..cached], loading.then_some(LOADED))
            .and_then(|()| self.sender.offer(now, key, &table[cached..], None))
            .and_then(|()| self.sender.finish(now, key, Tail::default()));
        if loading {
            self.loading.insert(key);
        }
        self.running.insert(key, Running { request, tokens, last_use });
        if offered.is_err() || !filled {
            // A destination that did not fit may have ended the room at once; then this changes nothing.
            let _ = self.sender.abort(now, key);
        }
        Ok(())
    }

    fn poll_loads(&mut self) -> Result<(), CacheError> {
        for key in self.loading.clone() {
            let state = match self.running.get(&key) {
                Some(r) => self.cache.load_state(&r.request)?,
                None => LoadState::Ready,
            };
            let now = self.clock.now();
            match state {
                LoadState::Pending { .. } => continue,
                LoadState::Ready => self.sender.handle_event(now, key, LOADED),
                // The room may be over already.
                LoadState::Failed => drop(self.sender.abort(now, key)),
            }
            self.loading.remove(&key);
        }
        Ok(())
    }

    fn step(&mut self) -> Result<(), CacheError> {
        self.poll_loads()?;
        let mut wait = Duration::from_micros(200);
        while let Some((peer, frame)) = self.control.receive(wait) {
            self.sender.handle_frame(self.clock.now(), peer, &frame);
            wait = Duration::ZERO;
        }
        let mut done: Vec<Done> = Vec::new();
        self.writer.poll(&mut done);
        for d in done {
            self.sender.handle_done(self.clock.now(), d.xfer, d.outcome);
        }
        let now = self.clock.now();
        if self.sender.poll_timeout().is_some_and(|t| t <= now) {
            self.sender.handle_timeout(now);
        }
        while let Some((to, frame)) = self.sender.poll_transmit() {
            self.control.send(to, frame);
        }
        while let Some(action) = self.sender.poll_action() {
            match action {
                Action::Attach { peer, inc, attach, blob } => {
                    if let Err(e) = self.writer.attach(peer, inc, attach, &blob) {
                        eprintln!("pd-demo: cannot attach {peer:?}: {e}");
                    }
                }
                Action::Gather { job, copies } => {
                    let copied = self.memory.copy_within(&copies).is_ok();
                    self.sender.handle_gathered(now, job, copied);
                }
                Action::Write { xfer, peer, attach, tag, copies } => {
                    if self.writer.submit(xfer, peer, attach, tag, &copies).is_err() {
                        self.sender.handle_done(now, xfer, Outcome::FailedQuiet);
                    }
                }
            }
        }
        while let Some(event) = self.sender.poll_event() {
            if let Event::Unpin { key } = event
                && let Some(r) = self.running.remove(&key)
            {
                // A request whose load failed is given back instead: the error holds it, and drops it.
                drop(self.cache.finish(r.request, &r.tokens, r.last_use));
            }
        }
        Ok(())
    }
}
