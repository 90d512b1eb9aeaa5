//! The scheduler: continuous batching with chunked prefill, as an engine around the cache would do it, in virtual
//! time. A step computes up to a chunk of prompt tokens and one token of every answer; its length comes from the
//! cost model. Nothing here reads a clock to decide.

use std::collections::VecDeque;

use sapwood::base::{Fence, Time};
use sapwood::tiers::{Alloc, LoadBack, LoadState, PrefetchState};

use super::args::{Args, DevicePages};
use super::calls::{Calls, OnRanks};
use super::chart::Timeline;
use super::error::RunError;
use super::model::{Mismatch, Model};
use super::queue::Queue;
use super::report::Hits;
use super::saved::Saved;
use super::session::{Abort, Session, Waiting, end_tokens};
use super::tokens::expand;
use super::workload::Job;

/// Mismatches told in words; the rest is counted.
const DETAILS_MAX: usize = 20;
/// Waiting requests that are looked at: prefetched for, and passed over while their prefetch is pending.
const SCAN_MAX: usize = 32;
/// Virtual time for transfers to end after the last request: two hours, enough to write a million tokens to a slow
/// store.
const DRAIN_MAX_US: u64 = 7_200_000_000;
/// Samples of occupancy over the whole run, about: each counts pages one by one.
const SAMPLES: u64 = 500;

/// What the scheduler counted.
#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) finished: u64,
    pub(crate) aborted: u64,
    pub(crate) rejected: u64,
    pub(crate) retracted: u64,
    pub(crate) input_tokens: u64,
    pub(crate) hits: Hits,
    pub(crate) saved: Saved,
    pub(crate) computed_tokens: u64,
    pub(crate) decoded_tokens: u64,
    pub(crate) mismatches: u64,
    pub(crate) mismatch_details: Vec<String>,
    pub(crate) steps: u64,
}

impl Counts {
    /// Requests that have come to an end.
    pub(crate) fn ended(&self) -> u64 {
        self.finished + self.aborted + self.rejected
    }

    fn wrong(&mut self, request: usize, mismatch: &Mismatch) {
        self.mismatches += 1;
        if self.mismatch_details.len() < DETAILS_MAX {
            self.mismatch_details.push(format!("request {request}: {mismatch}"));
        }
    }
}

/// Tokens `kv..to` of one session in a step.
struct Planned {
    session: usize,
    to: usize,
}

/// What became of an attempt to start a request.
enum Start {
    /// It runs, or never will.
    Ended,
    /// There is no room for it; worth another attempt when somebody has left.
    NoRoom(Waiting),
    /// Its load was refused while others are on their way; worth another attempt soon.
    Later(Waiting),
}

/// See the module.
pub(crate) struct Scheduler<'a> {
    args: &'a Args,
    jobs: &'a [Job],
    /// Order of arrival.
    order: Vec<usize>,
    arrived: usize,
    page_tokens: usize,
    pub(crate) calls: Calls,
    /// One for each rank.
    pub(crate) models: Vec<Model>,
    pub(crate) now: Time,
    pub(crate) counts: Counts,
    pub(crate) timeline: Timeline,
    waiting: VecDeque<Waiting>,
    queue: Queue,
    running: Vec<Session>,
    /// The first in the queue found no room; it is not tried again before somebody leaves.
    full: bool,
    /// Samples taken or passed over.
    sampled: u64,
    scratch: Vec<u32>,
}

impl<'a> Scheduler<'a> {
    pub(crate) fn new(args: &'a Args, jobs: &'a [Job], calls: Calls, models: Vec<Model>) -> Scheduler<'a> {
        let mut order: Vec<usize> = (0..jobs.len()).collect();
        if !args.sequential {
            order.sort_by_key(|&job| jobs[job].arrival_us);
        }
        Scheduler {
            args,
            jobs,
            order,
            arrived: 0,
            page_tokens: args.page_size as usize,
            calls,
            models,
            now: Time::ZERO,
            counts: Counts::default(),
            timeline: Timeline::default(),
            waiting: VecDeque::new(),
            queue: Queue::default(),
            running: Vec::new(),
            full: false,
            sampled: 0,
            scratch: Vec::new(),
        }
    }

    /// Runs everything to its end; calls `progress` with the number of requests that have ended.
    pub(crate) fn run(&mut self, mut progress: impl FnMut(u64)) -> Result<(), RunError> {
        loop {
            self.calls.tick(self.now)?;
            self.arrive();
            self.tell_queue()?;
            self.prefetch()?;
            self.admit()?;
            self.end_loads()?;
            let plan = self.plan()?;
            if plan.is_empty() {
                if !self.wait()? {
                    return Ok(());
                }
            } else {
                self.step(&plan)?;
            }
            progress(self.counts.ended());
        }
    }

    /// Lets all transfers end; nothing must be running. What has not ended after [`DRAIN_MAX_US`] never will: the
    /// report calls it a violation.
    pub(crate) fn drain(&mut self) -> Result<(), RunError> {
        let until = self.now + DRAIN_MAX_US;
        while let Some(due) = self.calls.next_due().filter(|due| *due <= until) {
            self.now = due.max(self.now);
            self.calls.tick(self.now)?;
        }
        Ok(())
    }

    /// When something will happen although nothing is computed: a transfer ends, or a prefetch has used up its time.
    fn next_due(&self) -> Option<Time> {
        let asking = self.waiting.iter().take(SCAN_MAX).filter_map(|w| w.request.as_ref());
        let deadlines = asking.filter_map(|request| self.calls.prefetch_deadline(request));
        deadlines.chain(self.calls.next_due()).min()
    }

    fn arrival(&self) -> Option<(usize, Time)> {
        let job = *self.order.get(self.arrived)?;
        if self.args.sequential {
            let idle = self.waiting.is_empty() && self.running.is_empty();
            return idle.then_some((job, self.now));
        }
        Some((job, Time((self.jobs[job].arrival_us as f64 / self.args.speedup) as u64)))
    }

    /// Takes in what has arrived.
    fn arrive(&mut self) {
        while let Some((index, _)) = self.arrival().filter(|(_, at)| *at <= self.now) {
            self.arrived += 1;
            let job = &self.jobs[index];
            let known = job.input_tokens as usize;
            self.counts.input_tokens += known as u64;
            let abort = Abort::draw(self.args, index, end_tokens(job, !self.args.no_decode));
            self.waiting.push_back(Waiting::new(index, known, abort));
        }
    }

    /// Tells the cache of who waits: of what has arrived, or where requests come one by one, of those that are next.
    fn tell_queue(&mut self) -> Result<(), RunError> {
        let known = if self.args.sequential { self.order.len() } else { self.arrived };
        self.queue.fill(self.args.queue, self.jobs, &self.order[..known], &mut self.calls)
    }

    /// Has the store asked for what the other tiers lack of the next requests. Not of all that wait: what is fetched
    /// too early is evicted again before its request runs.
    fn prefetch(&mut self) -> Result<(), RunError> {
        if self.calls.cache().store().is_none() {
            return Ok(());
        }
        for waiting in self.waiting.iter_mut().take(SCAN_MAX).filter(|w| !w.asked) {
            waiting.asked = true;
            let job = &self.jobs[waiting.job];
            expand(&job.input, job.input_tokens, &mut self.scratch);
            let mut request = self.calls.request(job.tenant);
            if self.calls.prefetch(&mut request, &self.scratch)? {
                waiting.request = Some(request);
            } else {
                self.calls.abort(request)?;
            }
        }
        Ok(())
    }

    /// Starts waiting requests while there is room in the batch and the chunk.
    fn admit(&mut self) -> Result<(), RunError> {
        self.full &= !self.running.is_empty();
        let mut at = 0;
        while at < self.waiting.len().min(SCAN_MAX) {
            if self.waiting[at].abort == Abort::Waiting {
                let gone = self.waiting.remove(at);
                if let Some(Waiting { job, request, .. }) = gone {
                    self.queue.leave(job, &mut self.calls)?;
                    request.map_or(Ok(()), |request| self.calls.abort(request))?;
                }
                self.counts.aborted += 1;
                continue;
            }
            let backlog: usize = self.running.iter().map(Session::backlog).sum();
            if self.running.len() >= self.args.max_running
                || backlog >= self.args.chunk_tokens as usize
                || self.full
            {
                return Ok(());
            }
            if self.prefetch_pending(at)? {
                at += 1;
                continue;
            }
            let Some(waiting) = self.waiting.remove(at) else { return Ok(()) };
            let job = waiting.job;
            match self.start(waiting)? {
                Start::Ended => self.queue.leave(job, &mut self.calls)?,
                Start::NoRoom(waiting) => {
                    self.waiting.insert(at, waiting);
                    self.full = true;
                }
                Start::Later(waiting) => {
                    self.waiting.insert(at, waiting);
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn prefetch_pending(&mut self, at: usize) -> Result<bool, RunError> {
        let waiting = &mut self.waiting[at];
        let Some(request) = &mut waiting.request else { return Ok(false) };
        match self.calls.poll_prefetch(request)? {
            PrefetchState::Pending => Ok(true),
            PrefetchState::Ended(end) => {
                waiting.prefetched_tokens = end.loaded_tokens;
                Ok(false)
            }
            _ => Ok(false),
        }
    }

    /// Matches, loads back and takes the pages of the first chunk.
    fn start(&mut self, mut waiting: Waiting) -> Result<Start, RunError> {
        let job = &self.jobs[waiting.job];
        let end = end_tokens(job, !self.args.no_decode);
        if let DevicePages::Pages(pages) = self.args.device_pages
            && end.div_ceil(self.page_tokens) > pages as usize
        {
            if let Some(request) = waiting.request {
                self.calls.abort(request)?;
            }
            self.counts.rejected += 1;
            return Ok(Start::Ended);
        }
        let mut tokens = Vec::with_capacity(end);
        let prefix = Session::texts(job, end, &mut tokens);
        let mut request = match waiting.request.take() {
            Some(request) => request,
            None => self.calls.request(job.tenant),
        };
        // At least one token is computed: the model has to say something.
        let found = self.calls.match_prefix(&mut request, &tokens[..waiting.known - 1])?;
        let device = found.device_tokens as usize;
        let loaded = match self.calls.load_back(&mut request)? {
            LoadBack::Started { tokens } => tokens as usize,
            // What is on its way will make room, or end the loads that are too many: cheaper than to compute again.
            LoadBack::Refused(_) if self.calls.cache().core().operations() > 0 => {
                self.calls.abort(request)?;
                return Ok(Start::Later(waiting));
            }
            _ => 0,
        };
        let kv = device + loaded;
        let chunk = (waiting.known - kv).min(self.args.chunk_tokens as usize);
        if !self.grow(&mut request, kv + chunk)? {
            self.calls.abort(request)?;
            return Ok(Start::NoRoom(waiting));
        }
        let mut session = Session {
            job: waiting.job,
            request,
            tokens,
            prefix,
            kv,
            prompt_end: waiting.known,
            published: kv / self.page_tokens,
            loading: None,
            abort: waiting.abort,
        };
        if loaded > 0 {
            session.loading = Some((device / self.page_tokens, kv / self.page_tokens));
        }
        if waiting.first {
            let store = waiting.prefetched_tokens.min(loaded as u64);
            let hits = Hits { device: device as u64, host: loaded as u64 - store, store };
            self.counts.hits.device += hits.device;
            self.counts.hits.host += hits.host;
            self.counts.hits.store += hits.store;
            self.counts.saved.admit(self.args, u64::from(job.input_tokens), hits);
            self.timeline.admit(self.now.0, u64::from(job.input_tokens), hits);
        }
        self.running.push(session);
        self.verify(self.running.len() - 1, 0, device / self.page_tokens)?;
        Ok(Start::Ended)
    }

    /// Pages for the first `tokens` tokens. `false`: there is no room.
    fn grow(&mut self, request: &mut OnRanks, tokens: usize) -> Result<bool, RunError> {
        let missing = tokens.div_ceil(self.page_tokens).saturating_sub(self.calls.pages(request)?.len());
        let enough = missing == 0 && !self.calls.lacks_state(request)?;
        Ok(enough || self.calls.alloc(request, missing as u32)? == Alloc::Granted)
    }

    /// Compares pages `from..to` of a running request with what its tokens demand.
    fn verify(&mut self, at: usize, from: usize, to: usize) -> Result<(), RunError> {
        let session = &self.running[at];
        let (counts, job) = (&mut self.counts, session.job);
        for (model, places) in self.models.iter_mut().zip(self.calls.places(&session.request)) {
            let mut places = places?;
            if session.loading.is_some() {
                // They lie where the load in flight brings them, and are looked at when it has ended.
                places.components = None;
            }
            model.verify(&places, &session.prefix, from, to, |wrong| counts.wrong(job, &wrong))?;
        }
        Ok(())
    }

    /// Looks at the loads that running requests wait for.
    fn end_loads(&mut self) -> Result<(), RunError> {
        let mut at = 0;
        while at < self.running.len() {
            let Some((from, to)) = self.running[at].loading else {
                at += 1;
                continue;
            };
            match self.calls.load_state(&mut self.running[at].request)? {
                LoadState::Ready => {
                    self.running[at].loading = None;
                    self.verify(at, from, to)?;
                    at += 1;
                }
                LoadState::Failed => self.send_back(at)?,
                _ => at += 1,
            }
        }
        Ok(())
    }

    /// Chooses what the next step computes: prompt tokens up to a chunk, one token of each answer.
    fn plan(&mut self) -> Result<Vec<Planned>, RunError> {
        let mut plan = Vec::with_capacity(self.running.len());
        let mut budget = self.args.chunk_tokens as usize;
        let mut at = 0;
        while at < self.running.len() {
            let session = &self.running[at];
            let backlog = session.backlog();
            let tokens = if backlog > 0 { backlog.min(budget) } else { 1 };
            if session.loading.is_none() && tokens > 0 && self.room_for(at, tokens)? {
                budget -= if backlog > 0 { tokens } else { 0 };
                plan.push(Planned { session: at, to: self.running[at].kv + tokens });
            }
            at += 1;
        }
        Ok(plan)
    }

    /// Pages for `tokens` more tokens of a session. An answer that cannot grow sends the newest requests back to
    /// the queue, unless copies in flight will free enough pages; a prompt waits.
    fn room_for(&mut self, at: usize, tokens: usize) -> Result<bool, RunError> {
        loop {
            let (want, answering) = (self.running[at].kv + tokens, self.running[at].backlog() == 0);
            let request = &mut self.running[at].request;
            let missing = want.div_ceil(self.page_tokens).saturating_sub(self.calls.pages(request)?.len());
            if missing == 0 && !self.calls.lacks_state(request)? {
                return Ok(true);
            }
            let enough_coming = match self.calls.alloc(request, missing as u32)? {
                Alloc::Granted => return Ok(true),
                Alloc::Refused { short_pages, coming_pages } => coming_pages >= short_pages,
            };
            let newest = self.running.len() - 1;
            if !answering || enough_coming || newest <= at {
                return Ok(false);
            }
            self.retract(newest)?;
        }
    }

    /// Sends a running request back so that older ones find room. Nobody is admitted before one of them has left:
    /// the request would take hold of its cached pages again, and the two would take turns for ever.
    fn retract(&mut self, at: usize) -> Result<(), RunError> {
        self.full = true;
        self.counts.retracted += 1;
        self.send_back(at)
    }

    /// Sends a running request back to the head of the queue. What it has published stays cached.
    fn send_back(&mut self, at: usize) -> Result<(), RunError> {
        let session = self.running.remove(at);
        let known = session.prompt_end.max((session.kv + 1).min(session.tokens.len()));
        self.calls.abort(session.request)?;
        self.waiting.push_front(Waiting::back(session.job, known, session.abort));
        Ok(())
    }

    /// Computes what was planned, lets its time pass, and publishes.
    fn step(&mut self, plan: &[Planned]) -> Result<(), RunError> {
        let (mut prompt_tokens, mut answers) = (0, 0);
        let mut fences = Vec::with_capacity(plan.len());
        for p in plan {
            let session = &self.running[p.session];
            match session.backlog() {
                0 => answers += 1,
                _ => prompt_tokens += p.to - session.kv,
            }
            let mut done = Vec::with_capacity(self.models.len());
            for (model, places) in self.models.iter_mut().zip(self.calls.places(&session.request)) {
                done.push(model.compute(&places?, &session.prefix, session.kv, p.to)?);
            }
            fences.push(done);
        }
        self.now = self.now + self.step_us(prompt_tokens, answers);
        self.counts.steps += 1;
        self.counts.computed_tokens += prompt_tokens as u64;
        self.counts.decoded_tokens += answers as u64;
        self.calls.tick(self.now)?;
        // From the back, so that sessions that leave do not move those still to be looked at.
        for (p, fence) in plan.iter().zip(fences).rev() {
            let session = &mut self.running[p.session];
            let prefilling = session.backlog() > 0;
            session.kv = p.to;
            if session.finished() {
                let mut session = self.running.remove(p.session);
                if self.args.no_decode {
                    self.calls.answered(&mut session.request, self.jobs[session.job].output_tokens)?;
                }
                self.calls.finish(session.request, &session.tokens, &fence)?;
                self.counts.finished += 1;
                self.full = false;
            } else if session.abort_due() {
                let session = self.running.remove(p.session);
                self.calls.abort(session.request)?;
                self.counts.aborted += 1;
                self.full = false;
            } else if prefilling {
                self.checkpoint(p.session, &fence)?;
            }
        }
        self.sample();
        Ok(())
    }

    /// Publishes what is computed so far. Where the tree had a page already, the table now names the tree's, so the
    /// bytes that the request goes on with are somebody else's and are verified.
    fn checkpoint(&mut self, at: usize, fences: &[Fence]) -> Result<(), RunError> {
        let session = &mut self.running[at];
        let tokens = &session.tokens[..session.kv];
        let done = self.calls.checkpoint(&mut session.request, tokens, fences)?;
        let from = session.published;
        session.published = done.published_tokens as usize / self.page_tokens;
        if done.duplicate_pages == 0 {
            return Ok(());
        }
        self.verify(at, from, self.running[at].published)
    }

    fn sample(&mut self) {
        let due = self.counts.ended() * SAMPLES / self.jobs.len() as u64;
        if due >= self.sampled {
            self.sampled = due + 1;
            let (device, host) = self.calls.pages_in_use();
            self.timeline.sample(self.now.0, device, host);
        }
    }

    fn step_us(&self, prompt_tokens: usize, answers: usize) -> u64 {
        let decode = if answers == 0 {
            0.0
        } else {
            self.args.decode_us_per_step + answers as f64 * self.args.decode_us_per_request
        };
        ((prompt_tokens as f64 * self.args.prefill_us_per_token + decode) as u64).max(1)
    }

    /// Nothing can be computed now: goes to the next moment at which something happens. `false`: all is done.
    fn wait(&mut self) -> Result<bool, RunError> {
        let due = self.next_due();
        let idle = self.running.is_empty() && self.waiting.is_empty();
        let arrival = self.arrival().map(|(_, at)| at);
        if let Some(next) = due.into_iter().chain(arrival).min().filter(|_| idle || due.is_some()) {
            self.now = next.max(self.now + 1);
            return Ok(true);
        }
        // Nothing is on its way and nobody can go on: somebody has to give up pages.
        if self.running.len() > 1 {
            self.retract(self.running.len() - 1)?;
        } else if let Some(session) = self.running.pop() {
            self.calls.abort(session.request)?;
            self.counts.rejected += 1;
        } else if let Some(waiting) = self.waiting.pop_front() {
            self.queue.leave(waiting.job, &mut self.calls)?;
            if let Some(request) = waiting.request {
                self.calls.abort(request)?;
            }
            self.counts.rejected += 1;
        } else {
            return Ok(false);
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::setup;
    use crate::replay::workload::built_in;
    use clap::Parser;
    use sapwood::backend::host::HostArena;
    use sapwood::base::PageId;
    use sapwood::pool::{PlaneId, PoolKind};

    const LINE: &str = "--store none --device-pages 300 --host-pages 2000 --layers 3";

    /// Runs 150 requests; `damage` sees device and host memory once, when a quarter of them have ended.
    fn run(damage: impl FnOnce(&HostArena, &HostArena)) -> Counts {
        let args = Args::parse_from(["replay"].into_iter().chain(LINE.split_whitespace()));
        let jobs = built_in(150, 7);
        let machine = setup::machine(&args, &jobs).unwrap();
        let (device, host) = (machine.device.clone(), machine.calls.cache().host_memory().clone());
        let mut scheduler = Scheduler::new(&args, &jobs, machine.calls, machine.models);
        let mut damage = Some(damage);
        let hook = |ended| {
            if let Some(damage) = damage.take_if(|_| ended >= 40) {
                damage(device.memory(), &host);
            }
        };
        scheduler.run(hook).unwrap();
        scheduler.drain().unwrap();
        assert_eq!(scheduler.counts.finished, 150);
        scheduler.counts
    }

    /// Flips one bit of token 3, layer 2, K, in every page that no transfer holds.
    fn flip(arena: &HostArena) {
        for page in (0..arena.pages(PoolKind::Full)).map(PageId) {
            let offset = arena.geometry().planes()[0].row_offset(2, 0, 3);
            let mut byte = [0];
            if arena.read(PlaneId(0), page, offset, &mut byte).is_ok() {
                // A page in flight refuses; it is one of many.
                let _ = arena.write(PlaneId(0), page, offset, &[byte[0] ^ 4]);
            }
        }
    }

    #[test]
    fn an_undamaged_run_finds_nothing_wrong() {
        let counts = run(|_, _| {});
        assert_eq!((counts.mismatches, counts.mismatch_details.len()), (0, 0));
        assert!(counts.hits.device > 0 && counts.hits.host > 0);
    }

    #[test]
    fn a_flipped_bit_on_the_device_is_named() {
        let counts = run(|device, _| flip(device));
        assert!(counts.mismatches > 0);
        let named =
            counts.mismatch_details.iter().all(|d| d.contains("layer 2, part 0, from token 3 of the page"));
        assert!(named, "{:?}", counts.mismatch_details);
    }

    #[test]
    fn a_flipped_bit_on_the_host_is_found_after_load_back() {
        let counts = run(|_, host| flip(host));
        assert!(counts.mismatches > 0);
        assert!(counts.mismatch_details.len() as u64 <= counts.mismatches.min(DETAILS_MAX as u64));
    }
}
