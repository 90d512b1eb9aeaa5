//! One host, two processes: the target's regions are memfds, and the writer copies straight into them.
//!
//! A memfd of its own is the header: magic, owner, and one word per grant slot. A grant lives in slot
//! `serial mod SLOTS` as `serial (32 bits) | revoked (1) | copies under way (31)`. A writer enters a
//! block by adding one to the word it expects and leaves by taking one away; revoking sets the bit, and is
//! proven when the count is zero. A writer that dies inside a block leaves its count behind: then only the
//! operating system can say it is gone.
//!
//! The mapping reaches every region whole, so the writer is trusted to keep to its copies; the header
//! protects against late writes, not against malice.
#![expect(unsafe_code, reason = "maps shared memory and copies into it; each block says why it is sound")]

use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, unbounded};
use rustix::fs::{Mode, OFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use super::grants::Span;
use super::memory::{Bytes, Memory};
use super::{Caps, Done, Revoked, Target, TransportError, Writer};
use crate::backend::region::{Mapping, Region, Sharing};
use crate::base::containers::Map;
use crate::pd::ids::{Incarnation, PeerId, Tag, XferId};
use crate::pd::plan::Copy;
use crate::pd::receiver::Fence;
use crate::pd::sender::Outcome;

const MAGIC: u64 = u64::from_le_bytes(*b"SWPDSHM2");
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

/// Regions of one target; a rank has one per plane.
const REGIONS_MAX: u64 = 256;

/// Memory of another process.
#[derive(Debug)]
struct Foreign {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to the value, not to a thread; access is under the contract of `Bytes`.
unsafe impl Send for Foreign {}
// SAFETY: as above.
unsafe impl Sync for Foreign {}

// SAFETY: mapped in `open`, unmapped in `drop`.
unsafe impl Bytes for Foreign {
    fn base(&self) -> NonNull<u8> {
        self.base
    }

    fn len(&self) -> usize {
        self.len
    }
}

impl Foreign {
    /// Maps descriptor `fd` of process `pid`, with the permissions of the user.
    fn open(pid: u64, fd: u64, len: u64) -> Result<Foreign, TransportError> {
        let sys = |what| move |e: rustix::io::Errno| TransportError::System { what, source: e.into() };
        let bad = || TransportError::Descriptor { bytes: len as usize };
        let path = format!("/proc/{pid}/fd/{fd}");
        let file = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(sys("open of the peer's memory"))?;
        // A file that is shorter, or can become so, would fault on access instead of failing here.
        let stat = rustix::fs::fstat(&file).map_err(sys("fstat of the peer's memory"))?;
        let sealed = rustix::fs::fcntl_get_seals(&file).is_ok_and(|s| s.contains(SealFlags::SHRINK));
        let n = usize::try_from(len).map_err(|_| bad())?;
        if !sealed || n == 0 || u64::try_from(stat.st_size).unwrap_or(0) < len {
            return Err(bad());
        }
        Foreign::map(&file, n)
    }

    fn map(file: &OwnedFd, len: usize) -> Result<Foreign, TransportError> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh shared mapping at an address the kernel chooses aliases nothing of ours.
        let p = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, file, 0) };
        let p = p.map_err(|e| TransportError::System { what: "mmap", source: e.into() })?;
        let zero = || TransportError::System { what: "mmap", source: std::io::Error::other("address zero") };
        Ok(Foreign { base: NonNull::new(p.cast::<u8>()).ok_or_else(zero)?, len })
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: our own mapping, unmapped once; no slice outlives the value.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap of our own mapping");
    }
}

/// The words in front of the regions, in this process's memory or the other's.
#[derive(Debug)]
struct Header<B>(B);

impl<B: Bytes> Header<B> {
    fn word(&self, index: usize) -> &AtomicU64 {
        debug_assert!((index + 1) * 8 <= HEADER_BYTES && self.0.len() >= HEADER_BYTES);
        // SAFETY: inside the header, eight-byte aligned (the mapping is page-aligned), and every access to
        // the header by any process is atomic.
        unsafe { &*self.0.base().as_ptr().cast::<AtomicU64>().add(index) }
    }

    fn slot(&self, tag: Tag) -> &AtomicU64 {
        self.word(512 + (tag.serial().0 % SLOTS) as usize)
    }
}

fn word_of(tag: Tag) -> u64 {
    (tag.serial().0 & 0xFFFF_FFFF) << 32
}

/// The decode side.
#[derive(Debug)]
pub struct ShmTarget {
    header: Header<Region>,
    regions: Vec<Arc<Region>>,
}

impl ShmTarget {
    /// A pool of `bytes`, one region, for the process `me`.
    pub fn new(me: Incarnation, bytes: usize) -> Result<ShmTarget, TransportError> {
        ShmTarget::over(me, vec![Arc::new(shared(bytes)?)])
    }

    /// Over regions that are there already, of a device or an arena. They must be shared.
    pub fn over(me: Incarnation, regions: Vec<Arc<Region>>) -> Result<ShmTarget, TransportError> {
        if regions.iter().any(|r| r.fd().is_none() || r.mapping().sharing != Sharing::Shared) {
            return Err(TransportError::NotShared);
        }
        let header = Header(shared(HEADER_BYTES)?);
        header.word(1).store(me.0, Ordering::Relaxed);
        header.word(0).store(MAGIC, Ordering::Release);
        Ok(ShmTarget { header, regions })
    }

    /// The regions, in the order of the layout.
    #[must_use]
    pub fn memory(&self) -> Memory {
        Memory::new(self.regions.iter().map(|r| r.clone() as Arc<dyn Bytes>).collect())
    }
}

fn shared(bytes: usize) -> Result<Region, TransportError> {
    let mapping = Mapping { sharing: Sharing::Shared, ..Mapping::default() };
    Region::map(bytes, mapping)
        .map_err(|e| TransportError::System { what: "shared memory", source: std::io::Error::other(e) })
}

impl Target for ShmTarget {
    fn caps(&self) -> Caps {
        CAPS
    }

    /// Process and number of regions, then descriptor number and length of the header and of each.
    fn descriptor(&self) -> Vec<u8> {
        let mut words = vec![u64::from(std::process::id()), self.regions.len() as u64];
        for r in std::iter::once(&self.header.0).chain(self.regions.iter().map(Arc::as_ref)) {
            words.push(r.fd().map_or(u64::MAX, |fd| fd.as_raw_fd() as u64));
            words.push(r.len() as u64);
        }
        words.iter().flat_map(|w| w.to_le_bytes()).collect()
    }

    fn allow(&mut self, tag: Tag, _spans: Vec<Span>) -> Result<(), TransportError> {
        let slot = self.header.slot(tag);
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
        let slot = self.header.slot(tag);
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

/// Memory of one target, as this process sees it.
#[derive(Debug)]
struct Mapped {
    header: Header<Foreign>,
    pool: Memory,
}

struct Job {
    xfer: XferId,
    to: Arc<Mapped>,
    tag: Tag,
    copies: Vec<Copy>,
}

/// The prefill side.
#[derive(Debug)]
pub struct ShmWriter {
    peers: Map<PeerId, (u32, Arc<Mapped>)>,
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
    let slot = job.to.header.slot(job.tag);
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
                    .and_then(|from| job.to.pool.write(c.dst_region, c.dst_off + at, from))
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
        let bad = || TransportError::Descriptor { bytes: blob.len() };
        let (words, []) = blob.as_chunks::<8>() else { return Err(bad()) };
        let words: Vec<u64> = words.iter().map(|w| u64::from_le_bytes(*w)).collect();
        let [pid, n, header_fd, header_len, rest @ ..] = words.as_slice() else { return Err(bad()) };
        if *n > REGIONS_MAX || rest.len() as u64 != 2 * n || *header_len != HEADER_BYTES as u64 {
            return Err(bad());
        }
        let header = Header(Foreign::open(*pid, *header_fd, *header_len)?);
        let ours = header.word(0).load(Ordering::Acquire) == MAGIC
            && header.word(1).load(Ordering::Relaxed) == inc.0;
        if !ours {
            return Err(bad());
        }
        let open = |r: &[u64]| Foreign::open(*pid, r[0], r[1]).map(|f| Arc::new(f) as Arc<dyn Bytes>);
        let pool = rest.chunks_exact(2).map(open).collect::<Result<_, _>>()?;
        self.peers.insert(peer, (attach, Arc::new(Mapped { header, pool: Memory::new(pool) })));
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
        let to = match self.peers.get(&peer) {
            Some((a, s)) if *a == attach => s.clone(),
            _ => return Err(TransportError::NotAttached(peer)),
        };
        let job = Job { xfer, to, tag, copies: copies.to_vec() };
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
