//! One host, two processes: the target's pool is a memfd, and the writer copies straight into it.
//!
//! The memfd starts with a page-aligned header: magic, owner, and one word per grant slot. A grant lives in
//! slot `serial mod SLOTS` as `serial (32 bits) | revoked (1) | copies under way (31)`. A writer enters a
//! block by adding one to the word it expects and leaves by taking one away; revoking sets the bit, and is
//! proven when the count is zero. A writer that dies inside a block leaves its count behind: then only the
//! operating system can say it is gone.
//!
//! The mapping reaches the whole pool, so the writer is trusted to keep to its copies; the header protects
//! against late writes, not against malice.
#![expect(unsafe_code, reason = "maps shared memory and copies into it; each block says why it is sound")]

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, unbounded};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use super::grants::Span;
use super::memory::{Bytes, Memory};
use super::{Caps, Done, Revoked, Target, TransportError, Writer};
use crate::base::containers::Map;
use crate::pd::ids::{Incarnation, PeerId, Tag, XferId};
use crate::pd::plan::Copy;
use crate::pd::receiver::Fence;
use crate::pd::sender::Outcome;

const MAGIC: u64 = u64::from_le_bytes(*b"SWPDSHM1");
/// Grants alive at once. A slot is a word, so the header is half a megabyte.
const SLOTS: u64 = 1 << 16;
const HEADER_BYTES: usize = 4096 + SLOTS as usize * 8;
const REVOKED: u64 = 1 << 31;
const COUNT: u64 = REVOKED - 1;
/// Bytes copied between two looks at the grant.
const BLOCK_BYTES: u64 = 1 << 20;

const CAPS: Caps = Caps {
    name: "shm",
    copies_max: usize::MAX,
    visible_on_ok: true,
    revoke: true,
    fence: false,
    exit_proves_quiet: true,
    cancel_proves_quiet: false,
    retry_is_safe: true,
};

const _: () = assert!(HEADER_BYTES.is_multiple_of(4096));

/// A shared mapping with the header in front.
#[derive(Debug)]
pub struct Segment {
    base: NonNull<u8>,
    len: usize,
    fd: OwnedFd,
}

// SAFETY: the mapping belongs to the value, not to a thread; the header is accessed by atomics only, the
// rest under the contract of `Bytes` and grants.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

// SAFETY: mapped in `map`, unmapped in `drop`; the pool lies behind the header.
unsafe impl Bytes for Segment {
    fn base(&self) -> NonNull<u8> {
        // SAFETY: the mapping is longer than the header (checked in `map`).
        unsafe { self.base.add(HEADER_BYTES) }
    }

    fn len(&self) -> usize {
        self.len - HEADER_BYTES
    }
}

impl Segment {
    fn map(fd: OwnedFd, len: usize) -> Result<Segment, TransportError> {
        if len < HEADER_BYTES {
            return Err(TransportError::Descriptor { bytes: len });
        }
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh shared mapping at an address the kernel chooses aliases nothing of ours.
        let p = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, fd.as_fd(), 0) };
        let p = p.map_err(|e| TransportError::System { what: "mmap", source: e.into() })?;
        match NonNull::new(p.cast::<u8>()) {
            Some(base) => Ok(Segment { base, len, fd }),
            None => {
                Err(TransportError::System { what: "mmap", source: std::io::Error::other("address zero") })
            }
        }
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        debug_assert!((index + 1) * 8 <= HEADER_BYTES);
        // SAFETY: inside the header, eight-byte aligned (the mapping is page-aligned), and every access to
        // the header by any process is atomic.
        unsafe { &*self.base.as_ptr().cast::<AtomicU64>().add(index) }
    }

    fn slot(&self, tag: Tag) -> &AtomicU64 {
        self.word(512 + (tag.serial().0 % SLOTS) as usize)
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: our own mapping, unmapped once; no slice outlives the value.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap of our own mapping");
    }
}

fn word_of(tag: Tag) -> u64 {
    (tag.serial().0 & 0xFFFF_FFFF) << 32
}

/// The decode side. Its memory is one region.
#[derive(Debug)]
pub struct ShmTarget {
    segment: Arc<Segment>,
}

impl ShmTarget {
    /// A pool of `bytes` for the process `me`.
    pub fn new(me: Incarnation, bytes: usize) -> Result<ShmTarget, TransportError> {
        let sys = |what| move |e: rustix::io::Errno| TransportError::System { what, source: e.into() };
        let fd = rustix::fs::memfd_create("sapwood-pd", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(sys("memfd_create"))?;
        let len = HEADER_BYTES.checked_add(bytes).ok_or(TransportError::Descriptor { bytes })?;
        rustix::fs::ftruncate(&fd, len as u64).map_err(sys("ftruncate"))?;
        // A file that cannot shrink cannot fault in a writer that has checked its length.
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).map_err(sys("seal"))?;
        let segment = Segment::map(fd, len)?;
        segment.word(1).store(me.0, Ordering::Relaxed);
        segment.word(0).store(MAGIC, Ordering::Release);
        Ok(ShmTarget { segment: Arc::new(segment) })
    }

    /// The pool, as the only region of a layout.
    #[must_use]
    pub fn memory(&self) -> Memory {
        Memory::new(vec![self.segment.clone()])
    }
}

impl Target for ShmTarget {
    fn caps(&self) -> Caps {
        CAPS
    }

    /// Process, descriptor number and length: the writer opens it through /proc, with the permissions of the
    /// user.
    fn descriptor(&self) -> Vec<u8> {
        let words =
            [u64::from(std::process::id()), self.segment.fd.as_raw_fd() as u64, self.segment.len as u64];
        words.iter().flat_map(|w| w.to_le_bytes()).collect()
    }

    fn allow(&mut self, tag: Tag, _spans: Vec<Span>) -> Result<(), TransportError> {
        let slot = self.segment.slot(tag);
        let old = slot.load(Ordering::Acquire);
        if old & !COUNT == word_of(tag) {
            return Ok(());
        }
        // Another grant whose revocation is not proven may still be using the word.
        let idle = old == 0 || (old & REVOKED != 0 && old & COUNT == 0);
        let fresh =
            idle && slot.compare_exchange(old, word_of(tag), Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if fresh { Ok(()) } else { Err(TransportError::TableFull(tag)) }
    }

    fn revoke(&mut self, tag: Tag) -> Revoked {
        let slot = self.segment.slot(tag);
        if slot.load(Ordering::Acquire) & !(REVOKED | COUNT) != word_of(tag) {
            return Revoked::Proven;
        }
        let before = slot.fetch_or(REVOKED, Ordering::AcqRel);
        if before & COUNT == 0 { Revoked::Proven } else { Revoked::Pending }
    }

    fn forget(&mut self, tag: Tag) {
        let _ = self.revoke(tag);
    }

    fn fence(&mut self, _inc: Incarnation, _attach: u32) -> Fence {
        Fence::Unproven
    }
}

struct Job {
    xfer: XferId,
    segment: Arc<Segment>,
    tag: Tag,
    copies: Vec<Copy>,
}

/// The prefill side.
#[derive(Debug)]
pub struct ShmWriter {
    peers: Map<PeerId, (u32, Arc<Segment>)>,
    jobs: Option<Sender<Job>>,
    done: Receiver<Done>,
    worker: Option<JoinHandle<()>>,
}

impl ShmWriter {
    /// A writer over this memory. The worker ends when the writer is dropped.
    pub fn new(memory: Memory) -> Result<ShmWriter, TransportError> {
        let (jobs, work) = unbounded::<Job>();
        let (report, done) = unbounded();
        let run = move || {
            for job in work {
                let outcome = copy_all(&memory, &job);
                if report.send(Done { xfer: job.xfer, outcome }).is_err() {
                    return;
                }
            }
        };
        let spawned = std::thread::Builder::new().name("sapwood-shm".into()).spawn(run);
        let worker = spawned.map_err(TransportError::system("spawn"))?;
        Ok(ShmWriter { peers: Map::default(), jobs: Some(jobs), done, worker: Some(worker) })
    }
}

/// Enters a block of a grant: false when it is revoked or gone.
fn enter(slot: &AtomicU64, tag: Tag) -> bool {
    let mut seen = slot.load(Ordering::Acquire);
    loop {
        if seen & !COUNT != word_of(tag) || seen & COUNT == COUNT {
            return false;
        }
        match slot.compare_exchange_weak(seen, seen + 1, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return true,
            Err(now) => seen = now,
        }
    }
}

fn copy_all(src: &Memory, job: &Job) -> Outcome {
    let slot = job.segment.slot(job.tag);
    let pool = Memory::new(vec![job.segment.clone()]);
    let mut bytes = 0;
    for c in &job.copies {
        let mut at = 0;
        while at < c.len {
            let n = BLOCK_BYTES.min(c.len - at);
            if !enter(slot, job.tag) {
                return Outcome::FailedQuiet;
            }
            // SAFETY: the sources are pinned until this write is reported; the destination is granted to the
            // tag, and the count we entered keeps its owner from reusing it while we copy.
            let copied = unsafe {
                src.slice(c.src_region, c.src_off + at, n)
                    .and_then(|from| pool.write(c.dst_region, c.dst_off + at, from))
            };
            slot.fetch_sub(1, Ordering::AcqRel);
            if copied.is_err() {
                return Outcome::FailedQuiet;
            }
            at += n;
        }
        bytes += c.len;
    }
    Outcome::Ok { bytes }
}

impl Writer for ShmWriter {
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
        let bad = TransportError::Descriptor { bytes: blob.len() };
        let (words, []) = blob.as_chunks::<8>() else { return Err(bad) };
        let [pid, fd, len] = words else { return Err(bad) };
        let path = format!("/proc/{}/fd/{}", u64::from_le_bytes(*pid), u64::from_le_bytes(*fd));
        let sys = |e: rustix::io::Errno| TransportError::System {
            what: "open of the peer's memory",
            source: e.into(),
        };
        let fd = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(sys)?;
        let stat = rustix::fs::fstat(&fd).map_err(sys)?;
        let len = usize::try_from(u64::from_le_bytes(*len))
            .map_err(|_| TransportError::Descriptor { bytes: blob.len() })?;
        // A shorter file would fault on access instead of failing here.
        let sealed = rustix::fs::fcntl_get_seals(&fd).is_ok_and(|s| s.contains(SealFlags::SHRINK));
        if !sealed || u64::try_from(stat.st_size).unwrap_or(0) < len as u64 {
            return Err(TransportError::Descriptor { bytes: blob.len() });
        }
        let segment = Segment::map(fd, len)?;
        let ours = segment.word(0).load(Ordering::Acquire) == MAGIC
            && segment.word(1).load(Ordering::Relaxed) == inc.0;
        if !ours {
            return Err(TransportError::Descriptor { bytes: blob.len() });
        }
        self.peers.insert(peer, (attach, Arc::new(segment)));
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
        let segment = match self.peers.get(&peer) {
            Some((a, s)) if *a == attach => s.clone(),
            _ => return Err(TransportError::NotAttached(peer)),
        };
        let job = Job { xfer, segment, tag, copies: copies.to_vec() };
        let jobs = self.jobs.as_ref().ok_or(TransportError::Closed)?;
        jobs.send(job).map_err(|_| TransportError::Closed)
    }

    fn poll(&mut self, out: &mut Vec<Done>) -> usize {
        let before = out.len();
        out.extend(self.done.try_iter());
        out.len() - before
    }
}

impl Drop for ShmWriter {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(worker) = self.worker.take() {
            let _ = worker.join();
        }
    }
}
