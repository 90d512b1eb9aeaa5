//! Opening a directory: what is in it, from the index files or, where there is none, from the headers.
//!
//! Work is bounded: an index file is read once (48 bytes a page); only a segment without one is scanned, and
//! a power cut leaves one or two of those. Payloads are not read; they are checked when they are got.

use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::FileConfig;
use super::log::{Index, Loc, segment_ids};
use super::root::{OpenError, Root};
use super::segment::{Entry, HEAD_BYTES, Head, Segment, Unusable, decode_index, index_name, log_name};
use crate::backend::identity::{LINKS, NamespaceDigest, StoreKey};
use crate::backend::store::envelope::{HEADER_BYTES, Header, Kind, MAGIC};
use crate::base::containers::Map;

/// What opening found, for logs and tests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Recovery {
    /// Pages found.
    pub pages: u64,
    /// Segments read from their index file.
    pub segments_indexed: u64,
    /// Segments scanned header by header.
    pub segments_scanned: u64,
    /// Files that looked like segments and were put aside as `bad-*`.
    pub files_put_aside: u64,
}

/// Reads the directory. Changes nothing if a segment of another version is in it.
pub(super) fn load(root: &Root, config: &FileConfig) -> Result<(Index, Recovery), OpenError> {
    let failed = |op| {
        let path = root.path().to_owned();
        move |source| OpenError::Io { op, path, source }
    };
    let names = root.names().map_err(failed("list"))?;
    let heads = read_heads(root, &names)?;
    let mut found = Recovery::default();
    sweep(root, &names, &heads, &mut found).map_err(failed("tidy up"))?;
    let mut loaded = Loading::default();
    for (id, head) in heads {
        let Ok(head) = head else { continue };
        loaded.segment(root, config, id, head, &mut found).map_err(failed("read a segment of"))?;
    }
    let index = loaded.finish();
    found.pages = index.pages.len() as u64;
    Ok((index, found))
}

/// The head of each log file, oldest first.
type Heads = Vec<(u32, Result<Head, Unusable>)>;

fn read_heads(root: &Root, names: &[String]) -> Result<Heads, OpenError> {
    let mut heads = Heads::new();
    for id in segment_ids(names) {
        let name = log_name(id);
        let mut bytes = [0; HEAD_BYTES];
        let read = root.open_file(&name).and_then(|f| match f.read_exact_at(&mut bytes, 0) {
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof && f.metadata()?.len() == 0 => Ok(()),
            read => read,
        });
        let head = match read.map(|()| Head::decode(&bytes)) {
            Ok(Ok(head)) if head.id == id => Ok(head),
            Ok(Err(Unusable::Version(found))) => return Err(OpenError::Version { name, found }),
            Ok(Err(why)) => Err(why),
            _ => Err(Unusable::Damaged),
        };
        heads.push((id, head));
    }
    Ok(heads)
}

/// Removes what an interrupted run left half-made, and puts aside what is not ours to delete.
fn sweep(
    root: &Root,
    names: &[String],
    heads: &[(u32, Result<Head, Unusable>)],
    found: &mut Recovery,
) -> io::Result<()> {
    for name in names {
        let orphan = name.strip_suffix(".idx").is_some_and(|stem| {
            stem.starts_with("seg-") && !names.iter().any(|n| n.strip_suffix(".log") == Some(stem))
        });
        if orphan || (name.starts_with("tmp-") && name.ends_with(".idx")) {
            root.unlink(name)?;
        }
    }
    for (id, head) in heads {
        let name = log_name(*id);
        match head {
            Ok(_) => {}
            Err(Unusable::Blank) => root.unlink(&name)?,
            Err(_) => {
                tracing::warn!(file = %name, "not a segment of this store, put aside");
                root.rename(&name, &format!("bad-{name}"))?;
                found.files_put_aside += 1;
            }
        }
    }
    Ok(())
}

#[derive(Default)]
struct Loading {
    index: Index,
    cleared: Map<NamespaceDigest, (u32, u32)>,
}

impl Loading {
    fn segment(
        &mut self,
        root: &Root,
        config: &FileConfig,
        id: u32,
        head: Head,
        found: &mut Recovery,
    ) -> io::Result<()> {
        let name = log_name(id);
        let file = root.open_file(&name)?;
        let disk_bytes = file.metadata()?.blocks().saturating_mul(512);
        let direct = config.io == super::IoMode::Direct;
        let segment = Arc::new(Segment::of(root, head, name, file, disk_bytes, direct));
        self.index.segments.insert(id, Arc::clone(&segment));
        let from_index = root.read(&index_name(id)).ok().and_then(|b| {
            segment.disk_bytes.fetch_add(b.len().next_multiple_of(4096) as u64, Relaxed);
            decode_index(&head, b)
        });
        match from_index {
            Some(entries) => {
                found.segments_indexed += 1;
                self.apply(&segment, &entries);
            }
            None => {
                found.segments_scanned += 1;
                let (entries, used) = scan(&segment)?;
                self.apply(&segment, &entries);
                segment.restore_committed(entries);
                // The next opening shall not scan again. Failing is harmless: it scans again.
                if let Err(error) = segment.seal(root, used) {
                    tracing::warn!(file = %segment.name, %error, "cannot write the index of a segment");
                }
            }
        }
        Ok(())
    }

    fn apply(&mut self, segment: &Segment, entries: &[Entry]) {
        let id = segment.head.id;
        self.index.pages.reserve(entries.len());
        // Neighbours are mostly of one space.
        let mut last = None;
        for e in entries {
            match e.kind {
                Kind::Page => {
                    let space = match last {
                        Some((space, id)) if space == e.space => id,
                        _ => self.index.space_id(e.space),
                    };
                    last = Some((e.space, space));
                    let loc = Loc { segment: id, unit: e.unit, payload: e.payload, space };
                    self.index.insert_in(segment, e.key, loc);
                }
                Kind::Removal => {
                    segment.marks.fetch_add(1, Relaxed);
                    self.index.remove(&e.key);
                }
                Kind::Clearing => {
                    segment.marks.fetch_add(1, Relaxed);
                    self.cleared.insert(e.space.namespace(), (id, e.unit));
                }
            }
        }
    }

    /// Applies the clearings in one pass, however many there were.
    fn finish(mut self) -> Index {
        if !self.cleared.is_empty() {
            let tags: Map<[u8; 8], (u32, u32)> = self.cleared.iter().map(|(n, at)| (n.tag(), *at)).collect();
            let cleared_at = |key: &StoreKey, loc: &Loc| match self.index.space(loc.space)? {
                space if space.descriptor() == LINKS => tags.get(&key.tag()).copied(),
                space => self.cleared.get(&space.namespace()).copied(),
            };
            let gone: Vec<_> = (self.index.pages.iter())
                .filter(|(k, l)| cleared_at(k, l).is_some_and(|at| (l.segment, l.unit) < at))
                .map(|(k, _)| *k)
                .collect();
            for key in gone {
                self.index.remove(&key);
            }
        }
        self.index
    }
}

const CHUNK_BYTES: usize = 1 << 20;

/// Finds every record whose header holds, and the end of the last one.
///
/// A hole (a write that never reached the disk) does not end the scan: records behind it may have been made
/// durable. Their headers are found again at the next multiple of the alignment with the right place.
fn scan(segment: &Segment) -> io::Result<(Vec<Entry>, u64)> {
    let len = segment.file.metadata()?.len();
    let align = u64::from(segment.head.align);
    let mut entries = Vec::new();
    let mut at = segment.head.header_bytes();
    let mut used = at;
    let mut chunk = Chunk::default();
    while at.saturating_add(HEADER_BYTES as u64) <= len {
        let Some(bytes) = chunk.header_at(segment, at)? else { break };
        match header_of(segment, at, bytes, len) {
            Some((header, end)) => {
                if let Ok(unit) = u32::try_from(at / align) {
                    entries.push(Entry {
                        key: header.key,
                        space: header.space,
                        unit,
                        payload: u32::try_from(header.payload_bytes).unwrap_or(u32::MAX),
                        kind: header.kind,
                    });
                }
                at = end;
                used = end;
            }
            None => {
                at += align;
                if let Some(data) = next_data(segment, at, len) {
                    at = data.next_multiple_of(align).max(at);
                } else {
                    break;
                }
            }
        }
    }
    Ok((entries, used))
}

fn header_of(segment: &Segment, at: u64, bytes: &[u8], len: u64) -> Option<(Header, u64)> {
    if bytes.get(..8) != Some(&MAGIC[..]) {
        return None;
    }
    let header = Header::decode(bytes).ok()?;
    let end = at.checked_add(segment.head.record_bytes(header.payload_bytes))?;
    let fits = end <= len && header.payload_bytes <= u64::from(u32::MAX);
    (fits && header.place == segment.head.place(at)).then_some((header, end))
}

/// The next byte at or after `at` that may not be zero. File systems that do not know say `at`.
fn next_data(segment: &Segment, at: u64, len: u64) -> Option<u64> {
    if at >= len {
        return None;
    }
    match rustix::fs::seek(&segment.file, rustix::fs::SeekFrom::Data(at)) {
        Ok(data) => Some(data),
        Err(rustix::io::Errno::NXIO) => None,
        Err(_) => Some(at),
    }
}

/// A window on the file, so that small records and resynchronising do not cost a read each.
#[derive(Default)]
struct Chunk {
    at: u64,
    bytes: Vec<u8>,
    held: usize,
    hops: u32,
}

impl Chunk {
    /// The header bytes at `at`; `None` at the end of the file.
    fn header_at(&mut self, segment: &Segment, at: u64) -> io::Result<Option<&[u8]>> {
        let inside = at >= self.at && at + HEADER_BYTES as u64 <= self.at + self.held as u64;
        if !inside {
            // Large records: read headers only. Small ones, or a search: read ahead.
            let near = at.saturating_sub(self.at) < CHUNK_BYTES as u64;
            self.hops = if near { self.hops + 1 } else { 0 };
            let want = if self.hops > 1 { CHUNK_BYTES } else { HEADER_BYTES };
            self.bytes.resize(CHUNK_BYTES, 0);
            self.held = read_some(segment, &mut self.bytes[..want], at)?;
            self.at = at;
            if self.held < HEADER_BYTES {
                return Ok(None);
            }
        }
        let from = (at - self.at) as usize;
        Ok(self.bytes.get(from..from + HEADER_BYTES))
    }
}

fn read_some(segment: &Segment, into: &mut [u8], at: u64) -> io::Result<usize> {
    let mut n = 0;
    while n < into.len() {
        match segment.file.read_at(&mut into[n..], at + n as u64) {
            Ok(0) => break,
            Ok(more) => n += more,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(n)
}
