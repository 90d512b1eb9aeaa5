//! NIXL: a one-sided fabric (UCX here), loaded at run time from `libnixl_capi.so`.
//!
//! The writer puts bytes into the memory of the target; nobody there looks at grants. So nothing can be
//! revoked or fenced, a write that failed may still land, and its memory stays pinned and its pages out of
//! the pool: the protocol lives on *acked* and quarantine. The end of the writing process proves nothing
//! either, as a message may wait in the target's queue.
//!
//! With the package nixl-cu12 1.5.1 a process must have `UCX_MODULES=^ib` in its environment where there is no
//! InfiniBand: its copy of libnl crashes in an exit handler once that module has been loaded, in any program.
//!
//! A write in doubt may read its sources for as long as the agent lives that posted it. So when nothing else is under
//! way the agent is torn down and a new one takes its place; then the sources are free
//! ([`Outcome::SourcesFree`]). What the target's side still gets stays unknown.
//!
//! A missing library, function or plugin is an error value. Whoever holds a handle of a write that has not
//! ended when the writer is dropped keeps the agent and the memory for good instead of giving them back under it.
#![expect(unsafe_code, reason = "hands memory to a C library; each block says why it stays good")]

mod api;
#[cfg(test)]
mod tests;

use std::ffi::CString;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};

use super::grants::Span;
use super::memory::Memory;
use super::{Caps, Done, Revoked, Target, TransportError, Writer};
use crate::base::containers::Map;
use crate::pd::ids::{Incarnation, PeerId, Tag, XferId};
use crate::pd::plan::Copy;
use crate::pd::receiver::Fence;
use crate::pd::sender::Outcome;
use api::{Agent, Api, IN_PROGRESS, Request, SUCCESS};

/// Between two looks at posted writes: a 64 KiB write over shared memory takes about as long.
const POLL_PAUSE: Duration = Duration::from_micros(20);
/// How long the end of a writer waits for writes that are under way.
const CLOSE_MAX: Duration = Duration::from_secs(5);

const CAPS: Caps = Caps {
    name: "nixl",
    copies_max: 1 << 16,
    visible_on_ok: true,
    revoke: false,
    fence: false,
    exit_proves_quiet: false,
    cancel_proves_quiet: false,
    retry_is_safe: true,
};

/// Why NIXL cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NixlError {
    /// The library, or a function of it, is missing.
    #[error("{}: {reason}", path.display())]
    Library {
        /// Where it was looked for.
        path: PathBuf,
        /// What the loader said.
        reason: String,
    },
    /// A call failed.
    #[error("nixl could not {call} (status {code})")]
    Call {
        /// Which.
        call: &'static str,
        /// Its status.
        code: i32,
    },
    /// A thread could not be started.
    #[error("spawn: {0}")]
    Thread(std::io::ErrorKind),
}

/// Whether NIXL with UCX works in this process: loads the library, makes an agent and its plugin, and gives both
/// back. `library` as for [`NixlTarget::new`].
pub fn probe(library: Option<&Path>) -> Result<(), NixlError> {
    let api = Api::load(&api::library(library))?;
    Agent::new(api, "sapwood-probe").map(drop)
}

fn agent(library: Option<&Path>, name: &str, memory: &Memory) -> Result<Agent, NixlError> {
    let mut agent = Agent::new(Api::load(&api::library(library))?, name)?;
    for (base, len) in memory.ranges() {
        // SAFETY: whoever gets the agent keeps `memory` next to it and drops the agent first.
        unsafe { agent.register(base, len)? };
    }
    Ok(agent)
}

fn name_of(inc: Incarnation) -> String {
    format!("sapwood-{:016x}", inc.0)
}

/// The decode side: registered memory and a thread of the library that moves what arrives.
#[derive(Debug)]
pub struct NixlTarget {
    // Dropped in order: the agent lets go of the memory before the memory goes.
    _agent: Agent,
    descriptor: Vec<u8>,
    _memory: Memory,
}

impl NixlTarget {
    /// Registers `memory` for writes by others. `library` is `libnixl_capi.so` or its folder; without, the
    /// environment variable `SAPWOOD_NIXL` says where it is, or the system finds it.
    pub fn new(me: Incarnation, library: Option<&Path>, memory: Memory) -> Result<NixlTarget, NixlError> {
        let agent = agent(library, &name_of(me), &memory)?;
        let mut descriptor = Vec::new();
        let ranges: Vec<(usize, usize)> = memory.ranges().collect();
        descriptor.extend((ranges.len() as u64).to_le_bytes());
        for (base, len) in ranges {
            descriptor.extend((base as u64).to_le_bytes());
            descriptor.extend((len as u64).to_le_bytes());
        }
        descriptor.extend(agent.metadata()?);
        Ok(NixlTarget { _agent: agent, descriptor, _memory: memory })
    }
}

impl Target for NixlTarget {
    fn caps(&self) -> Caps {
        CAPS
    }

    /// Number of regions, address and length of each, then the metadata of the agent.
    fn descriptor(&self) -> Vec<u8> {
        self.descriptor.clone()
    }

    fn allow(&mut self, _tag: Tag, _spans: Vec<Span>) -> Result<(), TransportError> {
        Ok(())
    }

    fn revoke(&mut self, _tag: Tag) -> Revoked {
        Revoked::Pending
    }

    fn forget(&mut self, _tag: Tag) {}

    fn fence(&mut self, _inc: Incarnation, _attach: u32) -> Fence {
        Fence::Unproven
    }
}

/// Address and length of each region.
type Regions = Vec<(u64, u64)>;

fn parse(blob: &[u8]) -> Option<(Regions, &[u8])> {
    let (n, rest) = blob.split_first_chunk::<8>()?;
    let n = usize::try_from(u64::from_le_bytes(*n)).ok()?;
    let (table, metadata) = rest.split_at_checked(n.checked_mul(16)?)?;
    let word = |b: &[u8]| b.first_chunk::<8>().map(|w| u64::from_le_bytes(*w));
    let regions: Option<Regions> = table.chunks_exact(16).map(|c| Some((word(c)?, word(&c[8..])?))).collect();
    Some((regions?, metadata))
}

#[derive(Debug)]
struct Peer {
    attach: u32,
    name: Arc<CString>,
    regions: Regions,
    /// To introduce it to the next agent.
    metadata: Vec<u8>,
}

#[derive(Debug)]
struct Job {
    xfer: XferId,
    to: Arc<CString>,
    copies: Vec<(usize, usize, usize)>,
    bytes: u64,
}

/// What owner and worker share: the agent of now, and whom it knows.
#[derive(Debug)]
struct Shared {
    // Dropped in order: the agent lets go of the memory before the memory goes.
    agent: Arc<Agent>,
    peers: Map<PeerId, Peer>,
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    // Every change is one insertion or one assignment, so a panic elsewhere leaves nothing half done.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The prefill side: a thread posts writes and asks how they are.
#[derive(Debug)]
pub struct NixlWriter {
    shared: Arc<Mutex<Shared>>,
    memory: Memory,
    jobs: Option<Sender<Job>>,
    done: Receiver<Done>,
    worker: Option<JoinHandle<()>>,
}

impl NixlWriter {
    /// A writer of incarnation `me` over this memory. `library` as for [`NixlTarget::new`].
    pub fn new(me: Incarnation, library: Option<&Path>, memory: Memory) -> Result<NixlWriter, NixlError> {
        let agent = Arc::new(agent(library, &name_of(me), &memory)?);
        let shared = Arc::new(Mutex::new(Shared { agent: agent.clone(), peers: Map::default() }));
        let (jobs, work) = unbounded();
        let (report, done) = unbounded();
        let next = Next { library: library.map(Path::to_path_buf), name: name_of(me), made: 0 };
        let (s, m) = (shared.clone(), memory.clone());
        let worker =
            Worker { agent, next, shared: s, memory: m, active: Vec::new(), lost: Vec::new(), report };
        let worker = std::thread::Builder::new()
            .name("sapwood-nixl".into())
            .spawn(move || worker.run(&work))
            .map_err(|e| NixlError::Thread(e.kind()))?;
        Ok(NixlWriter { shared, memory, jobs: Some(jobs), done, worker: Some(worker) })
    }
}

impl Writer for NixlWriter {
    fn caps(&self) -> Caps {
        CAPS
    }

    fn attach(
        &mut self,
        peer: PeerId,
        inc: Incarnation,
        attach: u32,
        blob: &[u8],
    ) -> Result<(), TransportError> {
        let bad = || TransportError::Descriptor { bytes: blob.len() };
        let (regions, metadata) = parse(blob).ok_or_else(bad)?;
        let mut shared = lock(&self.shared);
        let name = shared.agent.load_remote(metadata).map_err(|_| bad())?;
        if name.to_bytes() != name_of(inc).as_bytes() {
            shared.agent.forget_remote(&name);
            return Err(bad());
        }
        let metadata = metadata.to_vec();
        let old = shared.peers.insert(peer, Peer { attach, name: Arc::new(name), regions, metadata });
        // Not while a write to the old one is under way, or ended without proof.
        if let Some(old) = old
            && Arc::strong_count(&old.name) == 1
            && *old.name.as_bytes() != *name_of(inc).as_bytes()
        {
            shared.agent.forget_remote(&old.name);
        }
        Ok(())
    }

    fn submit(
        &mut self,
        xfer: XferId,
        peer: PeerId,
        attach: u32,
        _tag: Tag,
        copies: &[Copy],
    ) -> Result<(), TransportError> {
        let shared = lock(&self.shared);
        let p = shared.peers.get(&peer).filter(|p| p.attach == attach);
        let p = p.ok_or(TransportError::NotAttached(peer))?;
        let mut job = Job { xfer, to: p.name.clone(), copies: Vec::with_capacity(copies.len()), bytes: 0 };
        for c in copies {
            let from = self.memory.at(c.src_region, c.src_off, c.len)?;
            let range = TransportError::Range { region: c.dst_region, offset: c.dst_off, len: c.len };
            let to = p.regions.get(c.dst_region as usize).and_then(|(base, len)| {
                let end = c.dst_off.checked_add(c.len)?;
                (end <= *len).then_some(base.checked_add(c.dst_off)?)
            });
            job.copies.push((from.as_ptr() as usize, to.ok_or(range)? as usize, c.len as usize));
            job.bytes += c.len;
        }
        let jobs = self.jobs.as_ref().ok_or(TransportError::Closed)?;
        jobs.send(job).map_err(|_| TransportError::Closed)
    }

    fn poll(&mut self, out: &mut Vec<Done>) -> usize {
        let before = out.len();
        out.extend(self.done.try_iter());
        out.len() - before
    }
}

impl Drop for NixlWriter {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(worker) = self.worker.take() {
            let _ = worker.join();
        }
    }
}

/// How to make the next agent.
struct Next {
    library: Option<PathBuf>,
    name: String,
    made: u64,
}

struct Worker {
    agent: Arc<Agent>,
    next: Next,
    shared: Arc<Mutex<Shared>>,
    memory: Memory,
    active: Vec<(Job, Request)>,
    /// Ended without proof: they may read our memory and write the other side's for as long as the agent lives.
    lost: Vec<(Job, Request)>,
    report: Sender<Done>,
}

impl Worker {
    fn run(mut self, work: &Receiver<Job>) {
        let mut closing: Option<Instant> = None;
        loop {
            let wait = if self.active.is_empty() { Duration::from_secs(1) } else { POLL_PAUSE };
            if closing.is_none() {
                match work.recv_timeout(wait) {
                    Ok(job) => {
                        self.start(job);
                        work.try_iter().for_each(|job| self.start(job));
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => closing = Some(Instant::now() + CLOSE_MAX),
                }
            } else {
                std::thread::sleep(POLL_PAUSE);
            }
            self.look();
            if self.active.is_empty() && !self.lost.is_empty() && closing.is_none() {
                self.renew();
            }
            if closing.is_some_and(|limit| self.active.is_empty() || Instant::now() > limit) {
                break;
            }
        }
        if !(self.active.is_empty() && self.lost.is_empty()) {
            // Something may still use them.
            let _ = ManuallyDrop::new((self.agent, self.shared, self.memory, self.active, self.lost));
        }
    }

    /// Tears the agent down that writes in doubt were posted with, and puts another in its place. Without another
    /// everything stays as it is, and the sources pinned; the next write in doubt is the next occasion.
    fn renew(&mut self) {
        self.next.made += 1;
        let name = format!("{}-{}", self.next.name, self.next.made);
        let fresh = match agent(self.next.library.as_deref(), &name, &self.memory) {
            Ok(fresh) => Arc::new(fresh),
            Err(error) => {
                tracing::warn!(%error, "sapwood: writes in doubt keep their sources, as there is no second agent");
                return;
            }
        };
        let mut shared = lock(&self.shared);
        for peer in shared.peers.values() {
            // To one that is not known any more a write fails before it is posted.
            let _ = fresh.load_remote(&peer.metadata);
        }
        shared.agent = fresh.clone();
        drop(shared);
        let old = std::mem::replace(&mut self.agent, fresh);
        let mut free = Vec::new();
        for (job, request) in self.lost.drain(..) {
            old.release(request);
            free.push(job.xfer);
        }
        // The last one: nobody clones it but under the lock, and gives it back there.
        debug_assert_eq!(Arc::strong_count(&old), 1);
        drop(old);
        free.into_iter().for_each(|xfer| self.end(xfer, Outcome::SourcesFree));
    }

    fn end(&self, xfer: XferId, outcome: Outcome) {
        // Nobody is left to hear it when the writer is being dropped.
        let _ = self.report.send(Done { xfer, outcome });
    }

    fn start(&mut self, job: Job) {
        if job.copies.is_empty() {
            return self.end(job.xfer, Outcome::Ok { bytes: 0 });
        }
        let Ok(request) = self.agent.prepare(&job.to, &job.copies) else {
            return self.end(job.xfer, Outcome::FailedQuiet);
        };
        // SAFETY: the sources lie in `memory`, which is registered and kept, and are pinned by whoever submitted
        // the write until it is reported.
        let status = unsafe { self.agent.post(&request) };
        #[cfg(test)]
        let status = if tests::DOUBT.with_value(job.xfer) { -1 } else { status };
        self.settle(job, request, status);
    }

    fn settle(&mut self, job: Job, request: Request, status: i32) {
        match status {
            IN_PROGRESS => self.active.push((job, request)),
            SUCCESS => {
                self.agent.release(request);
                self.end(job.xfer, Outcome::Ok { bytes: job.bytes });
            }
            _ => {
                // One part has failed; the others may be under way.
                self.end(job.xfer, Outcome::FailedUnknown);
                self.lost.push((job, request));
            }
        }
    }

    fn look(&mut self) {
        for (job, request) in std::mem::take(&mut self.active) {
            let status = self.agent.status(&request);
            self.settle(job, request, status);
        }
    }
}
