//! TCP: the writer sends records, the target copies them into granted pages and acknowledges.
//!
//! A record is 56 bytes of header and its payload. The target holds the grant table while it, or the system for it,
//! copies one piece (at most 256 KiB), never while it waits for a socket, so a revocation waits for one memory copy
//! and not for the peer. Large records go from the socket straight into the page: two thirds of what a byte costs
//! here are its copies, and the one through a buffer was the third. A batch is spread over [`STREAMS`] connections and is done when all of them have
//! acknowledged their part. A broken connection leaves its batches *unknown*: bytes may be on their way into
//! the target still. They settle when the peer attaches anew, which it does only after a fence. Their sources are free
//! earlier, when the threads that read them have stopped.
#![expect(unsafe_code, reason = "copies between registered memory; each block says why it is sound")]

use std::collections::{BTreeMap, VecDeque};
use std::io::{IoSlice, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, unbounded};
use rustix::event::{PollFd, PollFlags, poll};

use super::grants::{Grants, Span};
use super::memory::Memory;
use super::{Caps, Done, Revoked, Target, TransportError, Writer};
use crate::base::containers::Map;
use crate::pd::ids::{Incarnation, PeerId, Serial, Tag, XferId};
use crate::pd::plan::Copy;
use crate::pd::receiver::Fence;
use crate::pd::sender::Outcome;

/// Connections per peer. One loopback stream reaches about half of what four do.
pub const STREAMS: usize = 4;
const HELLO_MAGIC: u64 = u64::from_le_bytes(*b"SWPDTCP1");
const RECORD_MAGIC: u32 = u32::from_le_bytes(*b"SPR1");
const HEAD_BYTES: usize = 56;
/// What is copied under one admission at most, and read ahead of small records.
const BUFFER_BYTES: usize = 256 << 10;
/// The system copies from this on straight into the page. Below, a record shares a system call with others.
const DIRECT_BYTES: u64 = 32 << 10;
/// Records of one vectored write.
const VECTOR: usize = 64;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a writer thread may wait for a target that reads nothing.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);

const CAPS: Caps = Caps {
    name: "tcp",
    copies_max: usize::MAX,
    visible_on_ok: true,
    revoke: true,
    fence: true,
    exit_proves_quiet: false,
    cancel_proves_quiet: false,
    retry_is_safe: true,
};

fn lock<T>(m: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // The values behind are valid after any single operation, so a panic elsewhere does not matter.
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

fn le64(b: &[u8], at: usize) -> u64 {
    let mut w = [0; 8];
    w.copy_from_slice(&b[at..at + 8]);
    u64::from_le_bytes(w)
}

fn le32(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

#[derive(Clone, Copy, Debug)]
struct Head {
    end: bool,
    region: u32,
    xfer: u64,
    tag: Tag,
    offset: u64,
    len: u64,
}

impl Head {
    fn encode(&self) -> [u8; HEAD_BYTES] {
        let mut b = [0; HEAD_BYTES];
        b[..4].copy_from_slice(&RECORD_MAGIC.to_le_bytes());
        b[4..8].copy_from_slice(&u32::from(self.end).to_le_bytes());
        b[8..16].copy_from_slice(&self.xfer.to_le_bytes());
        b[16..32].copy_from_slice(&self.tag.0);
        b[32..36].copy_from_slice(&self.region.to_le_bytes());
        b[40..48].copy_from_slice(&self.offset.to_le_bytes());
        b[48..56].copy_from_slice(&self.len.to_le_bytes());
        b
    }

    fn decode(b: &[u8]) -> Option<Head> {
        let kind = le32(b, 4);
        if le32(b, 0) != RECORD_MAGIC || kind > 1 {
            return None;
        }
        let tag = Tag::new(Incarnation(le64(b, 16)), Serial(le64(b, 24)));
        Some(Head {
            end: kind == 1,
            region: le32(b, 32),
            xfer: le64(b, 8),
            tag,
            offset: le64(b, 40),
            len: le64(b, 48),
        })
    }
}

// ---- target ----

#[derive(Debug)]
struct Shared {
    me: Incarnation,
    memory: Memory,
    grants: Grants,
    stop: AtomicBool,
    /// Open connections by number, with the incarnation and attachment behind them.
    connections: Mutex<BTreeMap<u64, (Incarnation, u32, TcpStream)>>,
    next: AtomicU64,
}

/// The decode side: a listener, and a thread per connection.
#[derive(Debug)]
pub struct TcpTarget {
    shared: Arc<Shared>,
    address: SocketAddr,
}

impl TcpTarget {
    /// Listens on a free port of `ip` for writes into `memory`.
    pub fn new(me: Incarnation, ip: IpAddr, memory: Memory) -> Result<TcpTarget, TransportError> {
        let listener = TcpListener::bind((ip, 0)).map_err(TransportError::system("bind"))?;
        let address = listener.local_addr().map_err(TransportError::system("local_addr"))?;
        let shared = Arc::new(Shared {
            me,
            memory,
            grants: Grants::default(),
            stop: AtomicBool::new(false),
            connections: Mutex::new(BTreeMap::new()),
            next: AtomicU64::new(0),
        });
        let s = shared.clone();
        std::thread::Builder::new()
            .name("sapwood-tcp-accept".into())
            .spawn(move || accept(&listener, &s))
            .map_err(TransportError::system("spawn"))?;
        Ok(TcpTarget { shared, address })
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    for stream in listener.incoming() {
        if shared.stop.load(Ordering::Acquire) {
            return;
        }
        let Ok(stream) = stream else { continue };
        let s = shared.clone();
        // Without a thread the connection is dropped, and its writer sees that.
        let _ =
            std::thread::Builder::new().name("sapwood-tcp-target".into()).spawn(move || serve(stream, &s));
    }
}

fn serve(mut stream: TcpStream, shared: &Shared) {
    let mut hello = [0; 32];
    let _ = stream.set_nodelay(true);
    if stream.read_exact(&mut hello).is_err()
        || le64(&hello, 0) != HELLO_MAGIC
        || le64(&hello, 8) != shared.me.0
    {
        return;
    }
    let (inc, attach) = (Incarnation(le64(&hello, 16)), le32(&hello, 24));
    let Ok(handle) = stream.try_clone() else { return };
    let number = shared.next.fetch_add(1, Ordering::Relaxed);
    lock(&shared.connections).insert(number, (inc, attach, handle));
    let _ = receive(&stream, shared, inc, attach);
    let _ = stream.shutdown(Shutdown::Both);
    lock(&shared.connections).remove(&number);
}

/// What has come through a socket and is not used yet.
struct Intake<'a> {
    stream: &'a TcpStream,
    buffer: Vec<u8>,
    lo: usize,
    hi: usize,
    /// How much to read ahead: behind a large record only the next head, as another one may follow it.
    ahead: usize,
}

impl Intake<'_> {
    /// Waits for more bytes, into the buffer, which may hold `end` then. False when the connection has ended.
    fn more(&mut self, end: usize) -> std::io::Result<bool> {
        self.buffer.copy_within(self.lo..self.hi, 0);
        (self.lo, self.hi) = (0, self.hi - self.lo);
        let n = (&mut &*self.stream).read(&mut self.buffer[self.hi..end])?;
        self.hi += n;
        Ok(n > 0)
    }

    fn head(&mut self) -> std::io::Result<Option<Head>> {
        while self.hi - self.lo < HEAD_BYTES {
            if !self.more(self.ahead)? {
                return Ok(None);
            }
        }
        let head = Head::decode(&self.buffer[self.lo..self.lo + HEAD_BYTES]);
        self.lo += HEAD_BYTES;
        Ok(head)
    }

    /// Takes what has arrived of `len` bytes straight to `to`, and the next head behind them if `last`; never
    /// waits. The buffer must be empty. How many of the `len`; 0 when nothing has arrived.
    ///
    /// # Safety
    /// `to` has room for `len` bytes, and nobody else uses them until this returns.
    unsafe fn land(&mut self, to: NonNull<u8>, len: usize, last: bool) -> std::io::Result<u64> {
        let vector = |base: *mut u8, len| libc::iovec { iov_base: base.cast(), iov_len: len };
        let behind = if last { HEAD_BYTES } else { 0 };
        let mut parts = [vector(to.as_ptr(), len), vector(self.buffer.as_mut_ptr(), behind)];
        // SAFETY: all zeros is an empty message header.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        (message.msg_iov, message.msg_iovlen) = (parts.as_mut_ptr(), parts.len());
        // SAFETY: both parts may be written by contract and by `&mut self`; the rest of the header is empty.
        let n = unsafe { libc::recvmsg(self.stream.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
        let Ok(n) = usize::try_from(n) else {
            let e = std::io::Error::last_os_error();
            let again = matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted);
            return if again { Ok(0) } else { Err(e) };
        };
        (self.lo, self.hi) = (0, n.saturating_sub(len));
        if n == 0 { Err(std::io::ErrorKind::UnexpectedEof.into()) } else { Ok(n.min(len) as u64) }
    }

    /// Waits until something has arrived, or the connection has ended.
    fn wait(&self) -> std::io::Result<()> {
        let mut fds = [PollFd::new(self.stream, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Takes the payload of a record, a piece at a time, each under an admission of its own. How much of it was
    /// allowed and landed.
    fn payload(&mut self, shared: &Shared, way: (Incarnation, u32), head: &Head) -> std::io::Result<u64> {
        let (mut at, mut landed) = (0, 0);
        let large = head.len >= DIRECT_BYTES;
        self.ahead = if large { HEAD_BYTES } else { BUFFER_BYTES };
        while at < head.len {
            let (rest, offset) = (head.len - at, head.offset.saturating_add(at));
            let direct = large && self.lo == self.hi;
            if self.lo == self.hi && !direct && !self.more(BUFFER_BYTES)? {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            let most = if direct { BUFFER_BYTES } else { self.hi - self.lo } as u64;
            let len = rest.min(most);
            let admission = shared.grants.admit();
            let allowed = admission.allows(way.0, way.1, head.tag, Span { region: head.region, offset, len });
            let n = match shared.memory.at(head.region, offset, len).ok().filter(|_| allowed) {
                Some(to) if direct => {
                    // SAFETY: in the region, granted to this tag, and the admission keeps it so meanwhile.
                    let n = unsafe { self.land(to, len as usize, len == rest)? };
                    drop(admission);
                    if n == 0 {
                        self.wait()?;
                    }
                    landed += n;
                    n
                }
                Some(to) => {
                    let from = &self.buffer[self.lo..self.lo + len as usize];
                    // SAFETY: as above; the buffer is ours.
                    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), from.len()) };
                    landed += len;
                    self.lo += len as usize;
                    len
                }
                None => {
                    drop(admission);
                    if direct && !self.more(BUFFER_BYTES)? {
                        return Err(std::io::ErrorKind::UnexpectedEof.into());
                    }
                    let skip = rest.min((self.hi - self.lo) as u64);
                    self.lo += skip as usize;
                    skip
                }
            };
            at += n;
        }
        Ok(landed)
    }
}

/// Takes records until the connection ends.
fn receive(stream: &TcpStream, shared: &Shared, inc: Incarnation, attach: u32) -> std::io::Result<()> {
    let mut intake = Intake { stream, buffer: vec![0u8; BUFFER_BYTES], lo: 0, hi: 0, ahead: BUFFER_BYTES };
    let (mut bytes, mut refused) = (0u64, false);
    while let Some(head) = intake.head()? {
        if head.end {
            let mut ack = [0; 24];
            ack[..8].copy_from_slice(&head.xfer.to_le_bytes());
            ack[8..16].copy_from_slice(&bytes.to_le_bytes());
            ack[16] = u8::from(refused);
            (&mut &*stream).write_all(&ack)?;
            (bytes, refused) = (0, false);
        } else {
            let landed = intake.payload(shared, (inc, attach), &head)?;
            bytes += landed;
            refused |= landed < head.len;
        }
    }
    Ok(())
}

impl Target for TcpTarget {
    fn caps(&self) -> Caps {
        CAPS
    }

    fn descriptor(&self) -> Vec<u8> {
        self.address.to_string().into_bytes()
    }

    fn allow(&mut self, tag: Tag, spans: Vec<Span>) -> Result<(), TransportError> {
        self.shared.grants.allow(tag, spans);
        Ok(())
    }

    fn revoke(&mut self, tag: Tag) -> Revoked {
        self.shared.grants.revoke(tag);
        Revoked::Proven
    }

    fn forget(&mut self, tag: Tag) {
        self.shared.grants.revoke(tag);
    }

    fn fence(&mut self, inc: Incarnation, attach: u32) -> Fence {
        // First the table, which proves it; then the sockets, which tell the writer.
        self.shared.grants.fence(inc, attach);
        for c in lock(&self.shared.connections).values().filter(|c| c.0 == inc && c.1 <= attach) {
            let _ = c.2.shutdown(Shutdown::Both);
        }
        Fence::Proven
    }
}

impl Drop for TcpTarget {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        // Wakes the accept loop; the connection threads end with their sockets.
        let _ = TcpStream::connect_timeout(&self.address, CONNECT_TIMEOUT);
        for c in lock(&self.shared.connections).values() {
            let _ = c.2.shutdown(Shutdown::Both);
        }
    }
}

// ---- writer ----

struct Job {
    xfer: XferId,
    tag: Tag,
    copies: Vec<Copy>,
}

/// How one stream's part of a batch ended.
enum Part {
    Acked {
        bytes: u64,
        refused: bool,
    },
    /// Never begun.
    Quiet,
    Unknown,
    /// Not an end: its sources are read no more.
    Read,
}

#[derive(Debug)]
struct Batch {
    peer: PeerId,
    inc: Incarnation,
    attach: u32,
    left: usize,
    /// Parts whose sources may be read.
    reading: usize,
    bytes: u64,
    want: u64,
    failed: bool,
    unknown: bool,
}

#[derive(Debug)]
struct Link {
    inc: Incarnation,
    attach: u32,
    streams: Vec<Sender<Job>>,
}

/// The prefill side: two threads per stream and peer.
#[derive(Debug)]
pub struct TcpWriter {
    me: Incarnation,
    memory: Memory,
    links: Map<PeerId, Link>,
    batches: Map<XferId, Batch>,
    parts_in: Sender<(XferId, Part)>,
    parts: Receiver<(XferId, Part)>,
    settled: Vec<Done>,
}

impl std::fmt::Debug for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Part::Acked { .. } => "acked",
            Part::Quiet => "quiet",
            Part::Unknown => "unknown",
            Part::Read => "read",
        })
    }
}

impl TcpWriter {
    /// A writer of incarnation `me` over this memory.
    #[must_use]
    pub fn new(me: Incarnation, memory: Memory) -> TcpWriter {
        let (parts_in, parts) = unbounded();
        TcpWriter {
            me,
            memory,
            links: Map::default(),
            batches: Map::default(),
            parts_in,
            parts,
            settled: Vec::new(),
        }
    }
}

/// One stream: connects, sends what it is given, and has a second thread for the acknowledgements. A batch
/// that was begun is reported by the second thread only.
fn stream(
    address: SocketAddr,
    hello: [u8; 32],
    memory: &Memory,
    jobs: &Receiver<Job>,
    parts: &Sender<(XferId, Part)>,
) {
    let begun: Arc<Mutex<Begun>> = Arc::default();
    let socket = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT).and_then(|mut s| {
        s.set_nodelay(true)?;
        s.set_write_timeout(Some(SEND_TIMEOUT))?;
        s.write_all(&hello)?;
        let (reader, begun, parts) = (s.try_clone()?, begun.clone(), parts.clone());
        let run = move || acknowledgements(reader, &begun, &parts);
        std::thread::Builder::new().name("sapwood-tcp-acks".into()).spawn(run)?;
        Ok(s)
    });
    let mut socket = socket.ok();
    for job in jobs {
        let Some(s) = &mut socket else {
            let _ = parts.send((job.xfer, Part::Quiet));
            continue;
        };
        if !Begun::push(&begun, job.xfer) {
            let _ = parts.send((job.xfer, Part::Quiet));
            socket = None;
            continue;
        }
        let sent = send_job(s, memory, &job);
        let _ = parts.send((job.xfer, Part::Read));
        if sent.is_err() {
            // The other thread sees the end and reports everything that was begun.
            let _ = s.shutdown(Shutdown::Both);
            socket = None;
        }
    }
    if let Some(s) = socket {
        let _ = s.shutdown(Shutdown::Both);
    }
}

/// Batches that a stream has begun to send and that are not acknowledged. Once the connection has ended no
/// more are begun, so every batch is reported by exactly one of the two threads.
#[derive(Debug, Default)]
struct Begun {
    xfers: VecDeque<XferId>,
    ended: bool,
}

impl Begun {
    fn push(this: &Mutex<Begun>, xfer: XferId) -> bool {
        let mut b = lock(this);
        if !b.ended {
            b.xfers.push_back(xfer);
        }
        !b.ended
    }
}

fn acknowledgements(mut s: TcpStream, begun: &Mutex<Begun>, parts: &Sender<(XferId, Part)>) {
    let mut ack = [0; 24];
    while s.read_exact(&mut ack).is_ok() {
        let xfer = XferId(le64(&ack, 0));
        // In order: one stream is one queue. Anything else is not our peer.
        let mut b = lock(begun);
        if b.xfers.front() != Some(&xfer) {
            break;
        }
        b.xfers.pop_front();
        drop(b);
        let _ = parts.send((xfer, Part::Acked { bytes: le64(&ack, 8), refused: ack[16] != 0 }));
    }
    let _ = s.shutdown(Shutdown::Both);
    let mut b = lock(begun);
    b.ended = true;
    for xfer in b.xfers.drain(..) {
        let _ = parts.send((xfer, Part::Unknown));
    }
}

fn send_job(s: &mut TcpStream, memory: &Memory, job: &Job) -> std::io::Result<()> {
    let head = |end, c: &Copy| {
        Head { end, region: c.dst_region, xfer: job.xfer.0, tag: job.tag, offset: c.dst_off, len: c.len }
            .encode()
    };
    for some in job.copies.chunks(VECTOR) {
        let heads: Vec<[u8; HEAD_BYTES]> = some.iter().map(|c| head(false, c)).collect();
        let mut slices = Vec::with_capacity(2 * some.len());
        for (h, c) in heads.iter().zip(some) {
            // SAFETY: the sources are pinned until this write is reported, so nobody writes them.
            let payload = unsafe { memory.slice(c.src_region, c.src_off, c.len) };
            let payload = payload.map_err(|_| std::io::ErrorKind::InvalidInput)?;
            slices.push(IoSlice::new(h));
            slices.push(IoSlice::new(payload));
        }
        send_all(s, &mut slices)?;
    }
    let end = Copy { src_region: 0, src_off: 0, dst_region: 0, dst_off: 0, len: 0 };
    s.write_all(&head(true, &end))
}

fn send_all(s: &mut TcpStream, mut slices: &mut [IoSlice<'_>]) -> std::io::Result<()> {
    IoSlice::advance_slices(&mut slices, 0);
    while !slices.is_empty() {
        match s.write_vectored(slices) {
            Ok(0) => return Err(std::io::ErrorKind::WriteZero.into()),
            Ok(n) => IoSlice::advance_slices(&mut slices, n),
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Splits copies into at most [`STREAMS`] parts of about equal bytes.
fn split(copies: &[Copy]) -> Vec<Vec<Copy>> {
    let total: u64 = copies.iter().map(|c| c.len).sum();
    // Below 64 KiB a second stream costs more than it carries.
    let n = (total / (64 << 10)).clamp(1, STREAMS as u64);
    let share = total.div_ceil(n).max(1);
    let mut parts: Vec<Vec<Copy>> = vec![Vec::new()];
    let mut room = share;
    for c in copies {
        let mut c = *c;
        while c.len > 0 {
            if room == 0 {
                parts.push(Vec::new());
                room = share;
            }
            let take = c.len.min(room);
            if let Some(p) = parts.last_mut() {
                p.push(Copy { len: take, ..c });
            }
            (c.src_off, c.dst_off, c.len) = (c.src_off + take, c.dst_off + take, c.len - take);
            room -= take;
        }
    }
    parts
}

impl Writer for TcpWriter {
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
        let address: SocketAddr = std::str::from_utf8(blob).ok().and_then(|s| s.parse().ok()).ok_or(bad)?;
        let mut hello = [0; 32];
        hello[..8].copy_from_slice(&HELLO_MAGIC.to_le_bytes());
        hello[8..16].copy_from_slice(&inc.0.to_le_bytes());
        hello[16..24].copy_from_slice(&self.me.0.to_le_bytes());
        hello[24..28].copy_from_slice(&attach.to_le_bytes());
        let mut streams = Vec::with_capacity(STREAMS);
        for _ in 0..STREAMS {
            let (jobs, work) = unbounded::<Job>();
            let (memory, parts) = (self.memory.clone(), self.parts_in.clone());
            std::thread::Builder::new()
                .name("sapwood-tcp-writer".into())
                .spawn(move || stream(address, hello, &memory, &work, &parts))
                .map_err(TransportError::system("spawn"))?;
            streams.push(jobs);
        }
        self.links.insert(peer, Link { inc, attach, streams });
        // A peer attaches anew only after it has fenced the old way, or is another process: what was
        // unknown there is over.
        let over: Vec<XferId> = self
            .batches
            .iter()
            .filter(|(_, b)| {
                let other = b.inc != inc || b.attach < attach;
                b.peer == peer && b.unknown && b.left == 0 && b.reading == 0 && other
            })
            .map(|(x, _)| *x)
            .collect();
        for xfer in over {
            self.batches.remove(&xfer);
            self.settled.push(Done { xfer, outcome: Outcome::FailedQuiet });
        }
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
        let link =
            self.links.get(&peer).filter(|l| l.attach == attach).ok_or(TransportError::NotAttached(peer))?;
        for c in copies {
            self.memory.at(c.src_region, c.src_off, c.len)?;
        }
        let parts = split(copies);
        let want = copies.iter().map(|c| c.len).sum();
        let batch = Batch {
            peer,
            inc: link.inc,
            attach,
            left: parts.len(),
            reading: parts.len(),
            bytes: 0,
            want,
            failed: false,
            unknown: false,
        };
        self.batches.insert(xfer, batch);
        for (copies, s) in parts.into_iter().zip(&link.streams) {
            if s.send(Job { xfer, tag, copies }).is_err() {
                let _ = self.parts_in.send((xfer, Part::Quiet));
            }
        }
        Ok(())
    }

    fn poll(&mut self, out: &mut Vec<Done>) -> usize {
        let before = out.len();
        out.append(&mut self.settled);
        for (xfer, part) in self.parts.try_iter() {
            let Some(b) = self.batches.get_mut(&xfer) else { continue };
            b.left -= usize::from(!matches!(part, Part::Read));
            match part {
                Part::Acked { bytes, refused } => {
                    b.bytes += bytes;
                    b.failed |= refused;
                }
                Part::Quiet => (b.failed, b.reading) = (true, b.reading - 1),
                Part::Unknown => b.unknown = true,
                Part::Read => b.reading -= 1,
            }
            if b.left > 0 {
                continue;
            }
            let over = !matches!(part, Part::Read);
            let outcome = match (b.unknown, b.failed || b.bytes != b.want) {
                (true, _) => Outcome::FailedUnknown,
                (false, true) => Outcome::FailedQuiet,
                (false, false) => Outcome::Ok { bytes: b.bytes },
            };
            if over {
                out.push(Done { xfer, outcome });
            }
            if outcome != Outcome::FailedUnknown {
                self.batches.remove(&xfer);
                continue;
            }
            if b.reading > 0 {
                continue;
            }
            let newer = self.links.get(&b.peer).is_some_and(|l| l.inc != b.inc || l.attach > b.attach);
            let outcome = if newer { Outcome::FailedQuiet } else { Outcome::SourcesFree };
            out.push(Done { xfer, outcome });
            if newer {
                self.batches.remove(&xfer);
            }
        }
        out.len() - before
    }
}
