//! Within one process: a worker thread per writer copies, block by block, under the grants of the target.
#![expect(unsafe_code, reason = "copies between registered memory; each block says why it is sound")]

use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, unbounded};

use super::grants::{Grants, Span};
use super::memory::Memory;
use super::{Caps, Done, Revoked, Target, TransportError, Writer};
use crate::base::containers::Map;
use crate::pd::ids::{Incarnation, PeerId, Tag, XferId};
use crate::pd::plan::Copy;
use crate::pd::receiver::Fence;
use crate::pd::sender::Outcome;

/// Bytes copied under one admission: 1 MiB takes about 150 us, which is what a revocation may have to wait.
const BLOCK_BYTES: u64 = 1 << 20;

const CAPS: Caps = Caps {
    name: "inproc",
    copies_max: usize::MAX,
    visible_on_ok: true,
    revoke: true,
    fence: true,
    exit_proves_quiet: true,
    cancel_proves_quiet: false,
    retry_is_safe: true,
};

/// The decode side: memory and its grants, shared with writers by [`InprocTarget::door`].
#[derive(Debug)]
pub struct InprocTarget {
    door: Arc<Door>,
}

/// What a writer holds of a target.
#[derive(Debug)]
pub struct Door {
    memory: Memory,
    grants: Grants,
}

impl InprocTarget {
    /// A target over this memory.
    #[must_use]
    pub fn new(memory: Memory) -> InprocTarget {
        InprocTarget { door: Arc::new(Door { memory, grants: Grants::default() }) }
    }

    /// The way in, for writers of the same process.
    #[must_use]
    pub fn door(&self) -> Arc<Door> {
        self.door.clone()
    }
}

impl Target for InprocTarget {
    fn caps(&self) -> Caps {
        CAPS
    }

    fn descriptor(&self) -> Vec<u8> {
        Vec::new()
    }

    fn allow(&mut self, tag: Tag, spans: Vec<Span>) -> Result<(), TransportError> {
        self.door.grants.allow(tag, spans);
        Ok(())
    }

    fn revoke(&mut self, tag: Tag) -> Revoked {
        self.door.grants.revoke(tag);
        Revoked::Proven
    }

    fn forget(&mut self, tag: Tag) {
        self.door.grants.revoke(tag);
    }

    fn fence(&mut self, inc: Incarnation, attach: u32) -> Fence {
        self.door.grants.fence(inc, attach);
        Fence::Proven
    }
}

struct Job {
    xfer: XferId,
    door: Arc<Door>,
    attach: u32,
    tag: Tag,
    copies: Vec<Copy>,
}

/// The prefill side.
#[derive(Debug)]
pub struct InprocWriter {
    doors: Map<PeerId, (u32, Arc<Door>)>,
    known: Map<PeerId, Arc<Door>>,
    jobs: Option<Sender<Job>>,
    done: Receiver<Done>,
    worker: Option<JoinHandle<()>>,
}

impl InprocWriter {
    /// A writer of incarnation `me` over this memory. The worker ends when the writer is dropped.
    pub fn new(me: Incarnation, memory: Memory) -> Result<InprocWriter, TransportError> {
        let (jobs, work) = unbounded::<Job>();
        let (report, done) = unbounded();
        let run = move || {
            for job in work {
                let outcome = copy_all(me, &memory, &job);
                if report.send(Done { xfer: job.xfer, outcome }).is_err() {
                    return;
                }
            }
        };
        let spawned = std::thread::Builder::new().name("sapwood-inproc".into()).spawn(run);
        let worker = spawned.map_err(TransportError::system("spawn"))?;
        Ok(InprocWriter {
            doors: Map::default(),
            known: Map::default(),
            jobs: Some(jobs),
            done,
            worker: Some(worker),
        })
    }

    /// Makes the target of a peer known; [`Writer::attach`] opens it.
    pub fn introduce(&mut self, peer: PeerId, door: Arc<Door>) {
        self.known.insert(peer, door);
    }
}

fn copy_all(me: Incarnation, src: &Memory, job: &Job) -> Outcome {
    let mut bytes = 0;
    for c in &job.copies {
        let mut at = 0;
        while at < c.len {
            let n = BLOCK_BYTES.min(c.len - at);
            let to = Span { region: c.dst_region, offset: c.dst_off + at, len: n };
            let admission = job.door.grants.admit();
            if !admission.allows(me, job.attach, job.tag, to) {
                // Blocks before this one have landed; none will.
                return Outcome::FailedQuiet;
            }
            // SAFETY: the sources are pinned until this write is reported, so nobody writes them; the
            // destination is granted to this tag, and the admission keeps it so while we copy.
            let copied = unsafe {
                src.slice(c.src_region, c.src_off + at, n)
                    .and_then(|from| job.door.memory.write(to.region, to.offset, from))
            };
            if copied.is_err() {
                return Outcome::FailedQuiet;
            }
            at += n;
        }
        bytes += c.len;
    }
    Outcome::Ok { bytes }
}

impl Writer for InprocWriter {
    fn caps(&self) -> Caps {
        CAPS
    }

    fn attach(
        &mut self,
        peer: PeerId,
        _inc: Incarnation,
        attach: u32,
        _blob: &[u8],
    ) -> Result<(), TransportError> {
        let door = self.known.get(&peer).ok_or(TransportError::NotAttached(peer))?;
        self.doors.insert(peer, (attach, door.clone()));
        Ok(())
    }

    fn submit(
        &mut self,
        xfer: XferId,
        peer: PeerId,
        attach: u32,
        tag: Tag,
        copies: &[Copy],
    ) -> Result<(), TransportError> {
        let door = match self.doors.get(&peer) {
            Some((a, door)) if *a == attach => door.clone(),
            _ => return Err(TransportError::NotAttached(peer)),
        };
        let job = Job { xfer, door, attach, tag, copies: copies.to_vec() };
        let jobs = self.jobs.as_ref().ok_or(TransportError::Closed)?;
        jobs.send(job).map_err(|_| TransportError::Closed)
    }

    fn poll(&mut self, out: &mut Vec<Done>) -> usize {
        let before = out.len();
        out.extend(self.done.try_iter());
        out.len() - before
    }
}

impl Drop for InprocWriter {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(worker) = self.worker.take() {
            // A panicked worker has nothing more to say; its writes were never reported.
            let _ = worker.join();
        }
    }
}
