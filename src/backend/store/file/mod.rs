//! The file store: a log of sealed pages in one directory, owned by one process at a time.
//!
//! - Pages are appended to preallocated **segments**; a full segment gets an index file. The oldest segment
//!   is deleted to make room, so the directory never holds more than its cap and nothing outside has to tidy
//!   it. A page of a deleted segment is a plain miss. Pages of it that were read move to the end of the log
//!   first, as long as they are less than a quarter of it: a first-in-first-out queue with a second chance.
//! - **A put costs no fsync.** What a power cut leaves is found again by checksums: each record says what it
//!   is, where it stands and how its payload sums up. [`Store::sync`] makes acknowledged pages durable; a
//!   full segment is made durable in the background.
//! - Removals and clearings are records too, so they hold after a restart, and the blocks of what was removed
//!   are given back to the file system at once.
//! - A page that fails its checks is taken out of the index for good; its bytes stay for inspection until
//!   the segment goes.
//! - **Two processes**: the second is refused ([`OpenError::InUse`]). Ranks use a directory each.
//! - The directory must belong to the process's user and not be writable for others; files are 0600, opened
//!   relative to the directory and never through links. Names are numbers, nothing of a request is in them.
//!
//! The formats are in [`segment`] and the [envelope](super::envelope).

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;

mod batches;
mod io_threads;
mod log;
mod maintain;
mod recover;
mod rescue;
mod root;
pub mod segment;
#[cfg(feature = "uring")]
mod uring;
mod witness;

pub use maintain::{SpaceUse, Usage, VerifyProgress, VerifyReport};
pub use recover::Recovery;
pub use root::OpenError;
pub use witness::{DiskEvent, Witness};

use super::batch::{Call, Item, Outcome};
use super::envelope::{HEADER_BYTES, Header, Kind};
use super::gate::{Gate, locked};
use super::regions::{RegionToken, Regions, RegisterError};
use super::stats::{Health, OpKind, StoreStats};
use super::{ArenaNeed, Caps, Overwrite, Store, StoreEpoch, StoreError, TransportCause};
use crate::backend::identity::{DescriptorDigest, NamespaceDigest, Space, StoreKey};
use crate::backend::region::Region;
use io_threads::{Engine, Threads};
use log::{Loc, Log, NoPlace, Spent};
use root::Root;
use segment::Entry;

const HEADER: u64 = HEADER_BYTES as u64;

/// How bytes go to and from the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum IoMode {
    /// Through the page cache.
    Buffered,
    /// Past it where memory and length are aligned to 4096 bytes; through it otherwise.
    Direct,
}

/// What moves them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum IoEngine {
    /// Vectored reads and writes on threads.
    Threads,
    /// `io_uring` (feature `uring`); falls back to threads where the system does not offer it.
    Uring,
}

/// Configuration of a file store.
#[derive(Clone, Debug)]
pub struct FileConfig {
    /// Directory. Its last component is made if it is not there.
    pub root: PathBuf,
    /// Cap on the bytes of the directory.
    pub bytes_max: u64,
    /// Bytes that stay free in the file system; pages are dropped rather than going below.
    pub free_bytes_min: u64,
    /// Bytes of a segment: the step in which space is taken and given back.
    pub segment_bytes: u64,
    /// Alignment of records, a power of two from 64 to 65536. Direct I/O needs 4096.
    pub align: u32,
    /// Page cache or not.
    pub io: IoMode,
    /// Threads or ring.
    pub engine: IoEngine,
    /// Transfers in flight in one call.
    pub depth: usize,
    /// Sees every change of the directory; for crash tests.
    pub witness: Option<Arc<dyn Witness>>,
}

impl FileConfig {
    /// Defaults for a directory and a cap: segments of an eighth of the cap, from 1 to 256 MiB.
    #[must_use]
    pub fn new(root: impl Into<PathBuf>, bytes_max: u64) -> FileConfig {
        FileConfig {
            root: root.into(),
            bytes_max,
            free_bytes_min: 1 << 30,
            segment_bytes: (bytes_max / 8).clamp(1 << 20, 256 << 20) / 65_536 * 65_536,
            align: 4096,
            io: IoMode::Buffered,
            engine: IoEngine::Threads,
            depth: 4,
            witness: None,
        }
    }

    fn check(&self) -> Result<(), OpenError> {
        let wrong = |field, value, why| Err(OpenError::Config { field, value, why });
        let align = u64::from(self.align);
        if !align.is_power_of_two() || !(64..=65_536).contains(&align) {
            return wrong("align", align, "it must be a power of two from 64 to 65536");
        }
        if self.io == IoMode::Direct && !align.is_multiple_of(io_threads::DIRECT_ALIGN as u64) {
            return wrong("align", align, "direct I/O needs a multiple of 4096");
        }
        if self.segment_bytes < 16 * align.max(HEADER) || !self.segment_bytes.is_multiple_of(align) {
            return wrong(
                "segment_bytes",
                self.segment_bytes,
                "it must be a multiple of `align`, at least 16",
            );
        }
        if self.segment_bytes / align > u64::from(u32::MAX) {
            return wrong("segment_bytes", self.segment_bytes, "it must be below 2^32 alignment units");
        }
        if self.bytes_max / 2 < self.segment_bytes {
            return wrong("bytes_max", self.bytes_max, "it must be at least two segments");
        }
        Ok(())
    }
}

/// A store in a directory. See the module.
#[derive(Debug)]
pub struct FileStore {
    inner: Arc<Inner>,
    /// Not part of `inner`, which helpers of the engine may be the last to let go.
    engine: Box<dyn Engine>,
    janitor: Mutex<Option<Janitor>>,
    recovery: Recovery,
}

#[derive(Debug)]
struct Inner {
    log: Log,
    regions: Regions,
    gate: Gate,
    to_seal: Mutex<Option<Sender<Spent>>>,
    degraded: AtomicBool,
}

/// Seals full segments.
#[derive(Debug)]
struct Janitor(JoinHandle<()>);

impl FileStore {
    /// Opens or makes the store. Reads 48 bytes a page, from the index files.
    pub fn open(config: FileConfig) -> Result<FileStore, OpenError> {
        config.check()?;
        let root = Root::open(&config.root, config.witness.clone())?;
        let (index, recovery) = recover::load(&root, &config)?;
        let engine = engine_of(&config)?;
        let inner = Arc::new(Inner {
            log: Log::new(root, config, index),
            regions: Regions::default(),
            gate: Gate::default(),
            to_seal: Mutex::default(),
            degraded: AtomicBool::new(false),
        });
        let store = FileStore { inner, engine, janitor: Mutex::default(), recovery };
        store.start_janitor()?;
        tracing::info!(root = %store.inner.log.root.path().display(), ?recovery, "file store open");
        Ok(store)
    }

    /// What moves the bytes: the engine asked for, or threads where it is not to be had.
    #[must_use]
    pub fn engine(&self) -> IoEngine {
        self.engine.kind()
    }

    /// What opening found.
    #[must_use]
    pub fn recovery(&self) -> Recovery {
        self.recovery
    }

    fn start_janitor(&self) -> Result<(), OpenError> {
        let (tx, rx) = crossbeam_channel::unbounded::<Spent>();
        let inner = Arc::clone(&self.inner);
        let work = move || rx.iter().for_each(|spent| inner.seal(&spent));
        let spawned = std::thread::Builder::new().name("store-janitor".into()).spawn(work);
        let path = self.inner.log.root.path().to_owned();
        let thread = spawned.map_err(|source| OpenError::Io { op: "start a thread for", path, source })?;
        *locked(&self.inner.to_seal) = Some(tx);
        *locked(&self.janitor) = Some(Janitor(thread));
        Ok(())
    }
}

fn engine_of(config: &FileConfig) -> Result<Box<dyn Engine>, OpenError> {
    #[cfg(feature = "uring")]
    if config.engine == IoEngine::Uring {
        match uring::Uring::new(config.depth) {
            Ok(ring) => return Ok(Box::new(ring)),
            // Containers often forbid it. The threads do the same work.
            Err(error) => tracing::warn!(%error, "io_uring is not available, using threads"),
        }
    }
    let failed = |source| OpenError::Io { op: "start a thread for", path: config.root.clone(), source };
    Ok(Box::new(Threads::new(config.depth).map_err(failed)?))
}

impl Inner {
    fn seal(&self, spent: &Spent) {
        let segment = &spent.segment;
        let evicted = || !locked(&self.log.index).segments.contains_key(&segment.head.id);
        if evicted() {
            return;
        }
        let sealed = segment.seal(&self.log.root, spent.used);
        if evicted() {
            // Evicted while it was sealed: its index file may have come after the deletion.
            let _ = self.log.root.unlink(&segment::index_name(segment.head.id));
        } else if let Err(error) = sealed {
            self.degraded.store(true, Relaxed);
            tracing::warn!(file = %segment.name, %error, "cannot seal a segment");
        }
    }

    fn seal_later(&self, spent: Option<Spent>) {
        if let Some(spent) = spent
            && let Some(tx) = &*locked(&self.to_seal)
        {
            // The janitor lives as long as the sender; if it died, the segment is scanned at the next opening.
            let _ = tx.send(spent);
        }
    }

    /// Appends a record without payload.
    fn mark(&self, kind: Kind, key: StoreKey, space: Space) -> Result<(), NoPlace> {
        use std::os::unix::fs::FileExt as _;
        let (place, spent) = self.log.place(0)?;
        self.seal_later(spent);
        let segment = &place.segment;
        let header = Header { place: segment.head.place(place.offset), ..Header::mark(kind, key, space) };
        let mut block = vec![0; segment.head.header_bytes() as usize];
        block[..HEADER_BYTES].copy_from_slice(&header.encode());
        let written = segment.file.write_all_at(&block, place.offset);
        if written.is_ok() {
            segment.saw(DiskEvent::Write { name: &segment.name, offset: place.offset, bytes: &block });
            segment.marks.fetch_add(1, Relaxed);
        }
        let unit = (place.offset / u64::from(segment.head.align)) as u32;
        let entry = Entry { key, space, unit, payload: 0, kind };
        segment.end_write(written.is_ok().then_some(entry));
        written.map_err(NoPlace::Io)
    }

    /// Gives the blocks of a page back.
    fn punch(&self, loc: Loc) {
        let segment = locked(&self.log.index).segments.get(&loc.segment).cloned();
        if let Some(s) = segment {
            let offset = u64::from(loc.unit) * u64::from(s.head.align);
            s.punch(offset, s.head.record_bytes(u64::from(loc.payload)));
        }
    }

    fn remove_one(&self, key: &StoreKey) -> Outcome {
        let found = {
            let index = locked(&self.log.index);
            index.pages.get(key).copied().and_then(|loc| Some((loc, index.space(loc.space)?)))
        };
        let Some((loc, space)) = found else { return Outcome::Missing };
        if let Err(no_place) = self.mark(Kind::Removal, *key, space) {
            return outcome_of(no_place);
        }
        locked(&self.log.index).remove(key);
        self.punch(loc);
        Outcome::Ok(loc.payload as usize)
    }

    /// Takes a page that failed its checks out of the index, for good if there is room for the mark.
    fn put_aside(&self, key: &StoreKey, space: Space, bad: Loc) {
        // A reader does not wait for writers. Without the mark the page is found, and put aside, again after a
        // restart; a mark made while a put of this key is on its way could take that one out instead.
        let alone = self.log.barrier.try_write();
        {
            let mut index = locked(&self.log.index);
            if index.pages.get(key) != Some(&bad) {
                return;
            }
            index.remove(key);
        }
        tracing::warn!(?key, segment = bad.segment, "a page failed its checks and was put aside");
        if alone.is_ok() {
            let _ = self.mark(Kind::Removal, *key, space);
        }
    }

    fn health(&self) -> Health {
        match (self.gate.is_closed(), self.degraded.load(Relaxed)) {
            (true, _) => Health::Closed,
            (false, true) => Health::Degraded,
            (false, false) => Health::Up,
        }
    }
}

fn outcome_of(no_place: NoPlace) -> Outcome {
    match no_place {
        NoPlace::Full => Outcome::NoSpace,
        NoPlace::Io(e) => io_outcome(&e),
    }
}

fn io_outcome(e: &io::Error) -> Outcome {
    if log::is_full(e) {
        return Outcome::NoSpace;
    }
    Outcome::Transport(e.raw_os_error().map_or(TransportCause::Protocol, TransportCause::Errno))
}

fn stopped_error(stopped: Outcome) -> StoreError {
    if stopped == Outcome::Cancelled { StoreError::Cancelled } else { StoreError::Timeout }
}

impl Store for FileStore {
    fn caps(&self) -> Caps {
        let config = &self.inner.log.config;
        let direct = config.io == IoMode::Direct;
        let head = segment::head_bytes(config.align);
        Caps {
            name: "file",
            zero_copy: true,
            align: if direct { io_threads::DIRECT_ALIGN } else { 1 },
            object_bytes_efficient: 256 << 10,
            object_bytes_max: usize::try_from(config.segment_bytes - 2 * head).unwrap_or(usize::MAX),
            batch_items_efficient: 32,
            overwrite: Overwrite::KeepsOld,
            lease: None,
            evicts: true,
            durable: true,
            shared: false,
            arena: ArenaNeed::AnyMemory,
        }
    }

    fn register(&self, region: &Arc<Region>) -> Result<RegionToken, RegisterError> {
        let _inside = self.inner.gate.enter().ok_or(RegisterError::Closed)?;
        Ok(self.inner.regions.register(region))
    }

    fn unregister(&self, token: RegionToken) -> Result<(), RegisterError> {
        self.inner.regions.unregister(token)
    }

    fn query(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
        let Some(_inside) = self.inner.gate.enter() else { return vec![Outcome::Closed; keys.len()] };
        let out = match call.stopped() {
            Some(stopped) => vec![stopped; keys.len()],
            None => {
                let index = locked(&self.inner.log.index);
                let one =
                    |k| index.pages.get(k).map_or(Outcome::Missing, |l| Outcome::Ok(l.payload as usize));
                keys.iter().map(one).collect()
            }
        };
        self.inner.log.counters.count(OpKind::Query, &out);
        out
    }

    fn touch(&self, keys: &[StoreKey], call: &Call) {
        let inside = self.inner.gate.enter();
        if inside.is_none() || call.stopped().is_some() {
            return;
        }
        let index = locked(&self.inner.log.index);
        let found = keys.iter().filter_map(|key| {
            let loc = index.pages.get(key)?;
            Some((index.segments.get(&loc.segment).cloned()?, loc.unit))
        });
        let found: Vec<_> = found.collect();
        drop(index);
        found.iter().for_each(|(segment, unit)| segment.touch(*unit));
    }

    fn get(&self, items: &[Item], call: &Call) -> Vec<Outcome> {
        let Some(_inside) = self.inner.gate.enter() else { return vec![Outcome::Closed; items.len()] };
        let out = batches::get(&*self.engine, &self.inner, items, call);
        self.inner.log.counters.count(OpKind::Get, &out);
        out
    }

    fn put(&self, items: &[Item], call: &Call) -> Vec<Outcome> {
        let Some(_inside) = self.inner.gate.enter() else { return vec![Outcome::Closed; items.len()] };
        let out = batches::put(&*self.engine, &self.inner, items, call);
        self.inner.log.counters.count(OpKind::Put, &out);
        out
    }

    fn remove(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
        let Some(_inside) = self.inner.gate.enter() else { return vec![Outcome::Closed; keys.len()] };
        let out: Vec<_> = match self.inner.log.alone(call) {
            Ok(_alone) => {
                keys.iter().map(|key| call.stopped().unwrap_or_else(|| self.inner.remove_one(key))).collect()
            }
            Err(stopped) => vec![stopped; keys.len()],
        };
        self.inner.log.counters.count(OpKind::Remove, &out);
        out
    }

    fn clear(&self, namespace: NamespaceDigest, call: &Call) -> Result<u64, StoreError> {
        let _inside = self.inner.gate.enter().ok_or(StoreError::Closed)?;
        let log = &self.inner.log;
        let _alone = log.alone(call).map_err(stopped_error)?;
        let pages = log.pages_of(namespace);
        if pages.is_empty() {
            return Ok(0);
        }
        let space = Space::new(DescriptorDigest([0; 32]), namespace);
        self.inner.mark(Kind::Clearing, StoreKey::from_bytes([0; 32]), space).map_err(|e| match e {
            NoPlace::Full => {
                StoreError::Io { op: "clear", source: io::Error::from_raw_os_error(libc::ENOSPC) }
            }
            NoPlace::Io(source) => StoreError::Io { op: "clear", source },
        })?;
        for (key, loc) in &pages {
            locked(&log.index).remove(key);
            self.inner.punch(*loc);
        }
        log.counters.removed.fetch_add(pages.len() as u64, Relaxed);
        log.drop_dead().map_err(|source| StoreError::Io { op: "clear", source })?;
        Ok(pages.len() as u64)
    }

    fn sync(&self, call: &Call) -> Result<(), StoreError> {
        let _inside = self.inner.gate.enter().ok_or(StoreError::Closed)?;
        if let Some(stopped) = call.stopped() {
            return Err(stopped_error(stopped));
        }
        self.inner.log.sync().map_err(|source| {
            // After a failed sync the kernel may have dropped the pages: nothing written before is certain.
            self.inner.degraded.store(true, Relaxed);
            StoreError::Io { op: "sync", source }
        })
    }

    fn health(&self) -> Health {
        self.inner.health()
    }

    fn stats(&self) -> StoreStats {
        let index = locked(&self.inner.log.index);
        StoreStats {
            objects: index.pages.len() as u64,
            bytes: index.disk_bytes(),
            bytes_max: self.inner.log.config.bytes_max,
            ..self.inner.log.counters.snapshot()
        }
    }

    fn epoch(&self) -> StoreEpoch {
        StoreEpoch(1)
    }

    fn close(&self, deadline: Instant) -> Result<(), StoreError> {
        self.inner.gate.close(deadline)?;
        self.inner.seal_later(self.inner.log.take_active());
        *locked(&self.inner.to_seal) = None;
        let mut janitor = locked(&self.janitor);
        while janitor.as_ref().is_some_and(|j| !j.0.is_finished()) {
            if Instant::now() >= deadline {
                return Err(StoreError::Timeout);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        if janitor.take().is_some_and(|j| j.0.join().is_err()) {
            tracing::error!("the janitor of a file store panicked");
        }
        drop(janitor);
        let synced = self.inner.log.sync().map_err(|source| StoreError::Io { op: "sync", source });
        self.inner.regions.clear();
        self.inner.log.root.unlock();
        synced
    }
}

impl Drop for FileStore {
    /// Closes, so that the next opening does not have to scan. Waits for one segment to be written at most.
    fn drop(&mut self) {
        if let Err(error) = self.close(Instant::now() + Duration::from_secs(30)) {
            tracing::warn!(%error, "a file store was dropped without closing it cleanly");
        }
    }
}
