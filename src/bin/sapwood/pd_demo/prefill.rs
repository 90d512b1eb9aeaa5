//! A prefill process: fills pages as a model would, and drives a [`Sender`].

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::mpsc::TryRecvError;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use sapwood::backend::region::Region;
use sapwood::backend::transport::control::Control;
use sapwood::backend::transport::lease::LeasePool;
use sapwood::backend::transport::rendezvous::{Client, Rendezvous};
use sapwood::backend::transport::shm::ShmWriter;
use sapwood::backend::transport::tcp::TcpWriter;
use sapwood::backend::transport::{Done, Memory, Writer};
use sapwood::pd::RoomKey;
use sapwood::pd::bootstrap::{Face, Registration};
use sapwood::pd::sender::{Action, Event, Outcome, SendSpec, Sender, SenderConfig, Tail};
use sapwood::pd::topo::Rank;
use sapwood::pd::wire::VERSION;

use super::shared::{Clock, PAGE_TOKENS, commands, fill, incarnation, layout, prompt, room, say, topology};
use super::{Args, DemoError, Kind};

struct Prefill {
    clock: Clock,
    sender: Sender,
    control: Control,
    writer: Box<dyn Writer>,
    pool: LeasePool,
    sources: BTreeMap<RoomKey, Vec<u32>>,
    waiting: VecDeque<(RoomKey, u32)>,
}

pub(super) fn run(args: &Args) -> Result<(), DemoError> {
    let (inc, layout, topo) = (incarnation(), layout(args.layers, args.pages), topology(args.layers));
    let region = Region::anonymous(layout.regions[0] as usize).map_err(std::io::Error::other)?;
    let memory = Memory::new(vec![Arc::new(region)]);
    let writer: Box<dyn Writer> = match args.transport {
        Kind::Tcp => Box::new(TcpWriter::new(inc, memory.clone())),
        Kind::Shm => Box::new(ShmWriter::new(memory.clone())?),
    };
    let control = Control::new(IpAddr::V4(Ipv4Addr::LOCALHOST))?;
    if let Some(at) = args.rendezvous {
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as u64;
        Client::new(at).register(&Registration {
            instance: inc.0,
            started_us: started,
            face: Face {
                topo: topo.clone(),
                model: layout.model,
                page_tokens: PAGE_TOKENS,
                window_tokens: 0,
                versions: (VERSION, VERSION),
            },
            rank: Rank::default(),
            incarnation: inc,
            address: control.address().to_string(),
        })?;
    }
    say(&format!("up {}", control.address()));
    let sender = Sender::new(inc, SenderConfig::default(), topo, Rank::default(), layout.clone())?;
    let pool = LeasePool::new(memory, layout);
    let mut p = Prefill {
        clock: Clock::new(),
        sender,
        control,
        writer,
        pool,
        sources: BTreeMap::new(),
        waiting: VecDeque::new(),
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
            self.open_waiting();
            self.step();
            if stop_at
                .is_some_and(|at| Instant::now() > at || (self.sender.is_quiet() && self.sources.is_empty()))
            {
                let leaked = self.pool.counts().1 + self.pool.counts().2;
                say(&format!("stats leaked={leaked}"));
                return Ok(());
            }
        }
    }

    fn open_waiting(&mut self) {
        while let Some(&(key, tokens)) = self.waiting.front() {
            let Some(pages) = self.pool.hold(tokens.div_ceil(PAGE_TOKENS)) else { return };
            self.waiting.pop_front();
            let now = self.clock.now();
            if self.sender.open(now, key, SendSpec { prompt: prompt(key, tokens) }).is_err() {
                // Aborted on the other side before it was opened here.
                self.pool.free(&pages);
                continue;
            }
            for (pos, &page) in (0u32..).zip(&pages) {
                self.pool.fill(page, |e, bytes| fill(key, e, pos, bytes));
            }
            let offered = self.sender.offer(now, key, &pages, None);
            let finished = self.sender.finish(now, key, Tail::default());
            debug_assert!(offered.is_ok() && finished.is_ok());
            self.sources.insert(key, pages);
        }
    }

    fn step(&mut self) {
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
                Action::Write { xfer, peer, attach, tag, copies } => {
                    if self.writer.submit(xfer, peer, attach, tag, &copies).is_err() {
                        self.sender.handle_done(now, xfer, Outcome::FailedQuiet);
                    }
                }
            }
        }
        while let Some(event) = self.sender.poll_event() {
            if let Event::Unpin { key } = event
                && let Some(pages) = self.sources.remove(&key)
            {
                self.pool.free(&pages);
            }
        }
    }
}
