//! Vectored reads and writes between files and regions: the work of one batch, spread over threads.
#![expect(unsafe_code, reason = "hands addresses of region memory to preadv and pwritev")]

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender};

use super::segment::Segment;
use super::witness::DiskEvent;
use crate::backend::store::gate::locked;
use crate::backend::store::regions::HeldSpans;

/// Bytes that are read before they are summed up: they fit into the second-level cache of a server's core (1 MiB).
const SUM_BYTES: usize = 512 << 10;

/// The alignment that every O_DIRECT device of today accepts for addresses and lengths.
pub(super) const DIRECT_ALIGN: usize = 4096;

#[repr(align(4096))]
#[derive(Clone, Copy, Debug)]
struct Block([u8; DIRECT_ALIGN]);

/// A small buffer that O_DIRECT accepts: a header and its padding.
#[derive(Debug)]
pub(super) struct Head {
    blocks: Box<[Block]>,
    len: usize,
}

impl Head {
    /// `len` zero bytes beginning with `bytes`.
    pub(super) fn new(bytes: &[u8], len: usize) -> Head {
        let mut blocks = vec![Block([0; DIRECT_ALIGN]); len.div_ceil(DIRECT_ALIGN).max(1)].into_boxed_slice();
        let n = bytes.len().min(len).min(DIRECT_ALIGN);
        blocks[0].0[..n].copy_from_slice(&bytes[..n]);
        Head { blocks, len }
    }

    /// Its first block.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.blocks[0].0[..self.len.min(DIRECT_ALIGN)]
    }
}

/// Which way the bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Way {
    /// From the file.
    Read,
    /// To the file.
    Write,
}

/// A transfer of a record: its header block, then the payload.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) segment: Arc<Segment>,
    pub(super) way: Way,
    pub(super) offset: u64,
    pub(super) head: Head,
    pub(super) payload: HeldSpans,
}

/// How far a transfer has come.
pub(super) struct Course {
    pub(super) fd: RawFd,
    pub(super) offset: u64,
    vectors: Vec<libc::iovec>,
    first: usize,
}

impl Op {
    /// The transfer from its beginning, in vectors of at most `piece` bytes.
    pub(super) fn course(&self, piece: usize) -> Course {
        let head =
            libc::iovec { iov_base: self.head.blocks.as_ptr().cast_mut().cast(), iov_len: self.head.len };
        let spans = self.payload.spans().iter().filter(|s| s.len > 0);
        let aligned = |v: &libc::iovec| {
            (v.iov_base as usize).is_multiple_of(DIRECT_ALIGN) && v.iov_len.is_multiple_of(DIRECT_ALIGN)
        };
        let pieces = spans.flat_map(|s| {
            (0..s.len).step_by(piece).map(move |at| libc::iovec {
                iov_base: s.as_ptr().wrapping_add(at).cast(),
                iov_len: piece.min(s.len - at),
            })
        });
        let vectors: Vec<_> = std::iter::once(head).chain(pieces).collect();
        let file = match &self.segment.direct {
            Some(direct) if vectors.iter().all(aligned) => direct,
            _ => &self.segment.file,
        };
        Course { fd: file.as_raw_fd(), offset: self.offset, vectors, first: 0 }
    }

    /// Runs it to its end on this thread. A read through the page cache is summed up piece by piece, while
    /// each piece is still in the core's cache; the sum of the payload is the value then.
    pub(super) fn run(&self) -> io::Result<Option<u32>> {
        let sum = self.way == Way::Read && self.segment.direct.is_none();
        let mut course = self.course(if sum { SUM_BYTES } else { usize::MAX });
        let (mut seen, mut crc) = (0usize, 0);
        while let Some((vectors, count)) = course.rest(if sum { SUM_BYTES } else { usize::MAX }) {
            let offset = course.offset as libc::off_t;
            // SAFETY: `vectors` points at `count` descriptors, of the head, owned by `self`, or of a range of a region that
            // `self.payload` holds, both alive here. The kernel writes them only for a read: the caller of the store owns
            // the ranges during the call, and the head is written only here, before anybody reads it.
            let n = unsafe {
                match self.way {
                    Way::Read => libc::preadv(course.fd, vectors, count, offset),
                    Way::Write => libc::pwritev(course.fd, vectors, count, offset),
                }
            };
            match usize::try_from(n) {
                Ok(n) => {
                    course.advance(n)?;
                    if sum {
                        let before = seen.saturating_sub(self.head.len);
                        seen += n;
                        crc = self.payload.crc32c(before, seen.saturating_sub(self.head.len) - before, crc);
                    }
                }
                Err(_) => {
                    let e = io::Error::last_os_error();
                    if e.kind() != io::ErrorKind::Interrupted {
                        return Err(e);
                    }
                }
            }
        }
        Ok(sum.then_some(crc))
    }

    /// Tells the witness about a finished write.
    pub(super) fn testify(&self) {
        if self.way == Way::Write && self.segment.is_witnessed() {
            let mut bytes = vec![0; self.head.len];
            bytes[..self.head.bytes().len()].copy_from_slice(self.head.bytes());
            self.payload.append_to(&mut bytes);
            self.segment.saw(DiskEvent::Write {
                name: &self.segment.name,
                offset: self.offset,
                bytes: &bytes,
            });
        }
    }
}

impl Course {
    /// What is left, cut to what one call takes and to little more than `bytes`; `None` at the end.
    pub(super) fn rest(&self, bytes: usize) -> Option<(*const libc::iovec, libc::c_int)> {
        const IOV_MAX: usize = 1024;
        let left = &self.vectors[self.first..];
        let mut sum = 0usize;
        let enough = left.iter().take(IOV_MAX).take_while(|v| {
            let more = sum < bytes;
            sum = sum.saturating_add(v.iov_len);
            more
        });
        match enough.count() {
            0 => None,
            n => Some((left.as_ptr(), n as libc::c_int)),
        }
    }

    /// Notes that `n` bytes were transferred. No bytes at all is the end of the file.
    pub(super) fn advance(&mut self, mut n: usize) -> io::Result<()> {
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.offset += n as u64;
        while n > 0 {
            let Some(v) = self.vectors.get_mut(self.first) else { break };
            if n < v.iov_len {
                v.iov_base = v.iov_base.wrapping_byte_add(n);
                v.iov_len -= n;
                break;
            }
            n -= v.iov_len;
            self.first += 1;
        }
        Ok(())
    }
}

/// The work of one call, item by item.
pub(super) trait Batch: Send + Sync {
    /// Items.
    fn len(&self) -> usize;
    /// Decides on an item: a transfer to make, or nothing because its outcome is known.
    fn begin(&self, i: usize) -> Option<Op>;
    /// A transfer has ended, with the CRC32C of the payload if it was had on the way.
    fn done(&self, i: usize, op: &Op, result: io::Result<Option<u32>>);
}

/// Runs batches. Returns when every item is done.
pub(super) trait Engine: Send + Sync + std::fmt::Debug {
    /// Runs one.
    fn run(&self, batch: Arc<dyn Batch>);

    /// Which it is.
    fn kind(&self) -> super::IoEngine;
}

struct Shared {
    batch: Arc<dyn Batch>,
    next: AtomicUsize,
    left: Mutex<usize>,
    all: Condvar,
}

/// Counts an item as finished, also when finishing it panicked.
struct Finished<'a>(&'a Shared);

impl Drop for Finished<'_> {
    fn drop(&mut self) {
        let mut left = locked(&self.0.left);
        *left -= 1;
        if *left == 0 {
            self.0.all.notify_all();
        }
    }
}

impl Shared {
    fn work(&self) {
        loop {
            let i = self.next.fetch_add(1, Relaxed);
            if i >= self.batch.len() {
                return;
            }
            let _finished = Finished(self);
            if let Some(op) = self.batch.begin(i) {
                let result = op.run();
                self.batch.done(i, &op, result);
            }
        }
    }
}

/// The calling thread and some helpers. Works everywhere.
#[derive(Debug)]
pub(super) struct Threads {
    helpers: Vec<JoinHandle<()>>,
    queue: Option<Sender<Arc<Shared>>>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("len", &self.batch.len()).finish_non_exhaustive()
    }
}

impl Threads {
    /// `depth` transfers at a time in one call, `depth - 1` helpers shared by all calls.
    pub(super) fn new(depth: usize) -> io::Result<Threads> {
        let depth = depth.clamp(1, 64);
        let (tx, rx) = crossbeam_channel::bounded::<Arc<Shared>>(depth * 16);
        let mut all = Threads { helpers: Vec::new(), queue: Some(tx) };
        for n in 1..depth {
            let rx: Receiver<Arc<Shared>> = rx.clone();
            let work = move || rx.iter().for_each(|shared| shared.work());
            all.helpers.push(std::thread::Builder::new().name(format!("store-io-{n}")).spawn(work)?);
        }
        Ok(all)
    }
}

impl Engine for Threads {
    fn run(&self, batch: Arc<dyn Batch>) {
        let len = batch.len();
        let shared =
            Arc::new(Shared { batch, next: AtomicUsize::new(0), left: Mutex::new(len), all: Condvar::new() });
        for _ in 0..self.helpers.len().min(len.saturating_sub(1)) {
            // A full queue means that the helpers are busy; this thread does the work then.
            if self.queue.as_ref().is_none_or(|q| q.try_send(Arc::clone(&shared)).is_err()) {
                break;
            }
        }
        shared.work();
        let mut left = locked(&shared.left);
        while *left > 0 {
            left = shared.all.wait(left).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn kind(&self) -> super::IoEngine {
        super::IoEngine::Threads
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.queue = None;
        for h in self.helpers.drain(..) {
            // A helper that panicked has already counted its item; nothing is left to do about it here.
            let _ = h.join();
        }
    }
}
