//! A scheduler: continuous batching over a prefix cache, with everything that can go wrong in one on purpose.

use std::sync::Arc;
use std::time::Duration;

use sapwood::backend::device::{Mode, SoftDevice, SoftOptions};
use sapwood::backend::store::Store;
use sapwood::base::{Fence, NamespaceId, PageId, Tier, Time};
use sapwood::engine::{PrefixCache, Request};
use sapwood::key::Namespace;
use sapwood::pool::{Capacities, Capacity};
use sapwood::tiers::{
    Alloc, LoadBack, LoadState, Prefetch, PrefetchConfig, PrefetchPolicy, PrefetchState, Refusal, Stats,
    WritePolicy,
};

use crate::hardware::Adversary;
use crate::kv::{Paged, geometry};
use crate::model::{ADAPTERS, Model};
use crate::sequence::{Outcome, Progress, Sequence, Work};

/// Any failure: the example has no use for telling them apart.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Who moves the bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hardware {
    /// Threads, one per direction.
    Threads,
    /// One thread that always picks what hurts most; the seed says what that is.
    Adversary(u64),
}

/// How the server is set up.
#[derive(Clone, Debug)]
pub struct Options {
    /// Tokens per page.
    pub page_size: u32,
    /// Device pool.
    pub device_pages: u32,
    /// Host pool; 0: none.
    pub host_pages: u32,
    /// When the host gets a copy.
    pub write: WritePolicy,
    /// Whether device and host together cache what their sum can hold, or the host mirrors the device.
    pub exclusive: bool,
    /// Store, if there is one.
    pub store: Option<Arc<dyn Store>>,
    /// Threads that compute, and threads that call the store.
    pub threads: usize,
    /// Who moves the bytes.
    pub hardware: Hardware,
    /// Publish prefilled pages when their computation is launched, before it has run.
    pub publish_early: bool,
    /// Say of every computation that it has ended already: a mistake, to see that it is noticed.
    pub forget_fences: bool,
    /// Requests computed in one step.
    pub running_max: usize,
    /// Prompt tokens of one request computed in one step.
    pub chunk_tokens: usize,
}

impl Options {
    /// Everything fits.
    pub fn ample() -> Options {
        Options {
            page_size: 4,
            device_pages: 1024,
            host_pages: 0,
            write: WritePolicy::None,
            exclusive: true,
            store: None,
            threads: 1,
            hardware: Hardware::Threads,
            publish_early: false,
            forget_fences: false,
            running_max: 4,
            chunk_tokens: 16,
        }
    }
}

/// What a run showed.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Outcome of each piece of work, in the order given.
    pub outcomes: Vec<Outcome>,
    /// Positions that would be prefilled without a cache.
    pub prompt_tokens: usize,
    /// Positions that were run through the model to prefill.
    pub prefilled_tokens: usize,
    /// Requests that lost their pages to others.
    pub preemptions: usize,
    /// What the cache counted.
    pub stats: Stats,
}

impl Report {
    /// Prefill that the cache saved. Negative: preempted requests cost more than the cache gave.
    pub fn saved_tokens(&self) -> i64 {
        self.prompt_tokens as i64 - self.prefilled_tokens as i64
    }
}

enum Stage {
    Fetching,
    Loading,
    Computing,
}

struct Running {
    work: usize,
    request: Request,
    stage: Stage,
    at: Progress,
}

/// What one request computes in a step.
struct Job {
    running: usize,
    table: Vec<PageId>,
    /// Positions to prefill; `None`: a round.
    prefill_end: Option<usize>,
}

/// Steps in which nothing happened before the server gives up.
const IDLE_STEPS_MAX: u32 = 20_000;

/// A server: model, device, cache, scheduler.
pub struct Server<'m> {
    model: &'m Model,
    options: Options,
    device: SoftDevice,
    adversary: Option<Adversary>,
    cache: PrefixCache,
    namespaces: Vec<NamespaceId>,
    step: u64,
    running: Vec<Running>,
    report: Report,
}

impl<'m> Server<'m> {
    /// An empty one.
    pub fn new(model: &'m Model, options: Options) -> Result<Server<'m>, Failure> {
        let geometry = geometry(options.page_size)?;
        let pages = Capacity::Pages(options.device_pages);
        let mode = match options.hardware {
            Hardware::Threads => Mode::Threaded,
            Hardware::Adversary(_) => Mode::Manual,
        };
        let device = SoftDevice::new(Arc::clone(&geometry), Capacities::full(pages), SoftOptions::new(mode))?;
        let mut builder = PrefixCache::builder(geometry)
            .device(device.clone())
            .host_pages(Capacity::Pages(options.host_pages))
            .write_policy(options.write)
            .exclusive(options.exclusive)
            .store_threads(options.threads)
            .prefetch(PrefetchConfig {
                policy: PrefetchPolicy::WaitComplete,
                threshold_tokens: options.page_size,
                batch_pages: 3,
                window_batches: 2,
                host_share_percent: 75,
                ..PrefetchConfig::default()
            });
        if !options.publish_early {
            // Pages nobody owns hold garbage. Where computation is launched late it may still need them.
            let memory = device.clone();
            builder = builder.on_free(move |tier, pool, page| {
                if tier == Tier::Device {
                    // A page that cannot be written now is one that a copy is about to write.
                    let _ = memory.poison(pool, page);
                }
            });
        }
        if let Some(store) = &options.store {
            builder = builder.store(Arc::clone(store));
        }
        let mut cache = builder.build()?;
        // The KV of an adapter is its own, so its namespace is too.
        let namespaces = (0..ADAPTERS)
            .map(|a| cache.namespace(&Namespace { adapter: Some(a.to_string()), ..Namespace::default() }))
            .collect::<Result<_, _>>()?;
        let adversary = match options.hardware {
            Hardware::Threads => None,
            Hardware::Adversary(seed) => Some(Adversary::new(seed)),
        };
        let (step, running, report) = (0, Vec::new(), Report::default());
        Ok(Server { model, options, device, adversary, cache, namespaces, step, running, report })
    }

    /// Answers everything.
    pub fn run(&mut self, work: &[Work]) -> Result<Report, Failure> {
        let mut sequences: Vec<Sequence> = work.iter().map(Sequence::new).collect();
        let mut waiting: Vec<usize> = (0..work.len()).rev().collect();
        let (started, mut idle) = (self.step, 0);
        self.report =
            Report { prompt_tokens: work.iter().map(|w| w.prompt.len() - 1).sum(), ..Report::default() };
        while !waiting.is_empty() || !self.running.is_empty() {
            self.tick()?;
            let admitted = self.admit(work, &sequences, &mut waiting, started)?;
            let moved = self.advance(&sequences)?;
            let computed = self.compute(&mut sequences, &mut waiting)?;
            idle = if admitted || moved || computed { 0 } else { idle + 1 };
            if idle > 0 {
                std::thread::sleep(Duration::from_micros(50));
            }
            if idle > IDLE_STEPS_MAX {
                return Err(format!("nothing moves any more: {:?}", self.cache.stats()).into());
            }
        }
        self.settle()?;
        let mut report = std::mem::take(&mut self.report);
        report.outcomes = sequences.iter().map(Sequence::outcome).collect();
        report.stats = self.cache.stats().clone();
        Ok(report)
    }

    fn tick(&mut self) -> Result<(), Failure> {
        self.step += 1;
        if let Some(adversary) = &mut self.adversary {
            adversary.act(&self.device);
        }
        self.cache.tick(Time::from_millis(self.step))?;
        Ok(())
    }

    /// Waits until nothing is in flight, then looks for broken rules and for pages that nobody owns.
    fn settle(&mut self) -> Result<(), Failure> {
        for _ in 0..IDLE_STEPS_MAX {
            self.tick()?;
            if self.cache.is_idle() {
                break;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        let broken = self.cache.sanity();
        let held = [Tier::Device, Tier::Host].map(|tier| self.cache.page_counts(tier));
        let clean = held.iter().all(|c| (c.request_pages, c.in_flight_pages, c.leaked_pages) == (0, 0, 0));
        let quiet = self.cache.is_idle() && self.cache.stats().violations == 0;
        match quiet && broken.is_empty() && clean {
            true => Ok(()),
            false => Err(format!("not clean at the end: {broken:?} {held:?}").into()),
        }
    }

    fn admit(
        &mut self,
        work: &[Work],
        sequences: &[Sequence],
        waiting: &mut Vec<usize>,
        started: u64,
    ) -> Result<bool, Failure> {
        let mut admitted = false;
        while self.running.len() < self.options.running_max
            && let Some(next) = waiting.pop_if(|&mut w| started + work[w].arrives <= self.step)
        {
            let sequence = &sequences[next];
            let mut request = self.cache.request(self.namespaces[sequence.adapter]);
            let stage = match self.cache.prefetch(&mut request, &sequence.tokens)? {
                Prefetch::Started { .. } => Stage::Fetching,
                Prefetch::Refused(_) => Stage::Computing,
            };
            let mut running = Running { work: next, request, stage, at: Progress::default() };
            if matches!(running.stage, Stage::Computing) {
                find(&mut self.cache, &mut running, sequence)?;
            }
            self.running.push(running);
            admitted = true;
        }
        Ok(admitted || waiting.iter().any(|&w| started + work[w].arrives > self.step))
    }

    /// Moves on the requests that waited for the store or for a load.
    fn advance(&mut self, sequences: &[Sequence]) -> Result<bool, Failure> {
        let mut moved = false;
        for running in &mut self.running {
            let again = match running.stage {
                Stage::Fetching => {
                    !matches!(self.cache.poll_prefetch(&mut running.request)?, PrefetchState::Pending)
                }
                Stage::Loading => match self.cache.load_state(&running.request)? {
                    LoadState::Pending { .. } => false,
                    LoadState::Failed => true,
                    LoadState::Ready => {
                        running.stage = Stage::Computing;
                        moved = true;
                        false
                    }
                },
                Stage::Computing => false,
            };
            if again {
                find(&mut self.cache, running, &sequences[running.work])?;
                moved = true;
            }
        }
        Ok(moved)
    }

    /// One step of everybody who can compute.
    fn compute(&mut self, sequences: &mut [Sequence], waiting: &mut Vec<usize>) -> Result<bool, Failure> {
        let jobs = self.plan(sequences, waiting)?;
        if jobs.is_empty() {
            return Ok(false);
        }
        let piece = self.device.compute_begin();
        let last_use = if self.options.forget_fences { Fence::SETTLED } else { piece };
        if self.options.publish_early {
            for job in jobs.iter().filter(|job| job.prefill_end.is_some()) {
                let running = &mut self.running[job.running];
                let end = job.prefill_end.unwrap_or(0);
                self.cache.checkpoint(
                    &mut running.request,
                    &sequences[running.work].tokens[..end],
                    last_use,
                )?;
            }
            self.tick()?;
        }
        self.run_jobs(&jobs, sequences)?;
        self.publish(&jobs, sequences, last_use)?;
        self.device.compute_end(piece);
        Ok(true)
    }

    fn plan(&mut self, sequences: &[Sequence], waiting: &mut Vec<usize>) -> Result<Vec<Job>, Failure> {
        let mut jobs = Vec::new();
        let mut index = 0;
        while index < self.running.len() {
            let running = &mut self.running[index];
            let sequence = &sequences[running.work];
            if matches!(running.stage, Stage::Computing) {
                let prefill_end = sequence
                    .needs_prefill(&running.at)
                    .then(|| sequence.prefill_end().min(running.at.computed + self.options.chunk_tokens));
                let positions = prefill_end.unwrap_or_else(|| sequence.round_end(running.at.computed));
                let want = positions.div_ceil(self.options.page_size as usize);
                let have = self.cache.pages(&running.request)?.len();
                match self.cache.alloc(&mut running.request, want.saturating_sub(have) as u32)? {
                    Alloc::Granted => {
                        let table = self.cache.pages(&running.request)?.to_vec();
                        jobs.push(Job { running: index, table, prefill_end });
                    }
                    // The youngest makes room for those before it, never for itself.
                    Alloc::Refused { coming_pages: 0, .. } if jobs.is_empty() => {
                        self.preempt(index, waiting)?;
                    }
                    Alloc::Refused { .. } => {}
                }
            }
            index += 1;
        }
        Ok(jobs)
    }

    /// Drops the youngest request behind `index`; it starts over later.
    fn preempt(&mut self, index: usize, waiting: &mut Vec<usize>) -> Result<(), Failure> {
        let victim = self.running.len() - 1;
        if victim > index {
            let victim = self.running.remove(victim);
            waiting.push(victim.work);
            self.report.preemptions += 1;
            return Ok(());
        }
        // Alone and still short: pages of requests just dropped come back with the next call.
        let idle = self.cache.is_idle() && index == 0;
        match idle && matches!(self.cache.alloc(&mut self.running[index].request, 1)?, Alloc::Refused { .. })
        {
            true => Err("the device is too small for one request".into()),
            false => Ok(()),
        }
    }

    fn run_jobs(&mut self, jobs: &[Job], sequences: &mut [Sequence]) -> Result<(), Failure> {
        let (model, device, page_size) = (self.model, &self.device, self.options.page_size as usize);
        let mut parts: Vec<(&Job, Sequence, Progress)> = jobs
            .iter()
            .map(|job| {
                let running = &self.running[job.running];
                (job, sequences[running.work].clone(), running.at.clone())
            })
            .collect();
        let one = |(job, sequence, at): &mut (&Job, Sequence, Progress)| -> Result<usize, Failure> {
            let mut kv = Paged { device, table: &job.table, page_size };
            match job.prefill_end {
                Some(end) => Ok(sequence.prefill(model, &mut kv, at, end)?),
                None => sequence.round(model, &mut kv, at).map(|()| 0).map_err(Failure::from),
            }
        };
        let share = parts.len().div_ceil(self.options.threads);
        let ran: Vec<Result<usize, Failure>> = std::thread::scope(|scope| {
            let threads: Vec<_> = parts
                .chunks_mut(share)
                .map(|part| scope.spawn(|| part.iter_mut().map(one).collect::<Vec<_>>()))
                .collect();
            threads
                .into_iter()
                .flat_map(|t| t.join().unwrap_or_else(|_| vec![Err("a panic".into())]))
                .collect()
        });
        for tokens in ran {
            self.report.prefilled_tokens += tokens?;
        }
        for (job, sequence, at) in parts {
            let running = &mut self.running[job.running];
            sequences[running.work] = sequence;
            running.at = at;
        }
        Ok(())
    }

    /// Publishes what was computed and closes what is done.
    fn publish(&mut self, jobs: &[Job], sequences: &[Sequence], last_use: Fence) -> Result<(), Failure> {
        for job in jobs.iter().rev() {
            let sequence = &sequences[self.running[job.running].work];
            let tokens = &sequence.tokens[..self.running[job.running].at.computed];
            if sequence.is_done() {
                let done = self.running.remove(job.running);
                self.cache.finish(done.request, tokens, last_use).map_err(|failed| failed.error)?;
            } else {
                self.cache.checkpoint(&mut self.running[job.running].request, tokens, last_use)?;
            }
        }
        Ok(())
    }
}

/// Looks the sequence up, and starts a load if the host has more of it.
fn find(cache: &mut PrefixCache, running: &mut Running, sequence: &Sequence) -> Result<(), Failure> {
    let found = cache.match_prefix(&mut running.request, &sequence.tokens[..sequence.prefill_end()])?;
    let mut computed = found.device_tokens;
    running.stage = Stage::Computing;
    match cache.load_back(&mut running.request)? {
        LoadBack::Nothing => {}
        LoadBack::Started { tokens } => {
            computed += tokens;
            running.stage = Stage::Loading;
        }
        // Computing it again is always possible.
        LoadBack::Refused(Refusal::NoDevicePages | Refusal::LoadsInFlight) => {}
        LoadBack::Refused(other) => return Err(format!("load refused: {}", other.name()).into()),
    }
    running.at = Progress { computed: computed as usize, feature: None };
    Ok(())
}
