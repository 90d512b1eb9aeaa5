//! A segment: a preallocated file that is filled once, front to back, and deleted whole.
//!
//! ```text
//! seg-0000002a.log   | segment header | record | record | ... | zero |
//! record             | envelope header, padded to `align` | payload, padded to `align` |
//! seg-0000002a.idx   every record of the full segment: written once, after the segment is on the disk
//! ```
//! Each segment has a random nonce, and each record's *place* is the checksum of nonce and offset. A reader
//! that has lost the record boundaries can thus look for the next header without being fooled by payloads.

use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt as _};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};

use rustix::fs::FallocateFlags;

use super::root::Root;
use super::witness::{DiskEvent, Witness};
use crate::backend::identity::{DescriptorDigest, NamespaceDigest, Space, StoreKey};
use crate::backend::store::envelope::Kind;
use crate::backend::store::gate::locked;
use crate::base::containers::Map;

/// Version of segments and index files written, and the only one read.
pub const VERSION: u16 = 1;

const MAGIC: [u8; 8] = *b"SAPWOODS";
const INDEX_MAGIC: [u8; 8] = *b"SAPWOODI";
/// Used bytes of a segment header; it occupies one alignment unit, at least this many bytes.
pub(super) const HEAD_BYTES: usize = 64;

/// Bytes that a header takes with this alignment, of the segment or of a record.
pub(super) fn head_bytes(align: u32) -> u64 {
    super::HEADER.next_multiple_of(u64::from(align))
}

/// The part of a segment that its header holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Head {
    pub(super) id: u32,
    pub(super) align: u32,
    pub(super) nonce: [u8; 16],
}

/// Why a segment header or an index file cannot be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Unusable {
    Damaged,
    /// Nothing in it: its making was interrupted.
    Blank,
    Version(u16),
}

impl Head {
    pub(super) fn new(id: u32, align: u32) -> Head {
        let mut nonce = [0; 16];
        for half in nonce.chunks_exact_mut(8) {
            // The standard library's per-process keys are the random numbers at hand; they need to be
            // unguessable by whoever makes payloads, not more.
            let mut h = RandomState::new().build_hasher();
            h.write_u32(id);
            half.copy_from_slice(&h.finish().to_le_bytes());
        }
        Head { id, align, nonce }
    }

    pub(super) fn encode(&self) -> [u8; HEAD_BYTES] {
        let mut out = [0; HEAD_BYTES];
        out[..8].copy_from_slice(&MAGIC);
        out[8..10].copy_from_slice(&VERSION.to_le_bytes());
        out[16..20].copy_from_slice(&self.id.to_le_bytes());
        out[20..24].copy_from_slice(&self.align.to_le_bytes());
        out[24..40].copy_from_slice(&self.nonce);
        let crc = crc32c::crc32c(&out);
        out[60..].copy_from_slice(&crc.to_le_bytes());
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Head, Unusable> {
        let bytes: &[u8; HEAD_BYTES] = bytes.first_chunk().ok_or(Unusable::Damaged)?;
        if bytes.iter().all(|&b| b == 0) {
            return Err(Unusable::Blank);
        }
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let mut plain = *bytes;
        plain[60..].fill(0);
        if bytes[..8] != MAGIC || word(60) != crc32c::crc32c(&plain) {
            return Err(Unusable::Damaged);
        }
        let version = u16::from_le_bytes([bytes[8], bytes[9]]);
        if version != VERSION {
            return Err(Unusable::Version(version));
        }
        let mut nonce = [0; 16];
        nonce.copy_from_slice(&bytes[24..40]);
        let head = Head { id: word(16), align: word(20), nonce };
        if !head.align.is_power_of_two() || !(64..=65_536).contains(&head.align) {
            return Err(Unusable::Damaged);
        }
        Ok(head)
    }

    /// What the header of a record at `offset` must hold.
    pub(super) fn place(&self, offset: u64) -> u32 {
        crc32c::crc32c_append(crc32c::crc32c(&self.nonce), &offset.to_le_bytes())
    }

    pub(super) fn units(&self, bytes: u64) -> u64 {
        bytes.div_ceil(u64::from(self.align))
    }

    /// Bytes that a header takes, of the segment or of a record.
    pub(super) fn header_bytes(&self) -> u64 {
        head_bytes(self.align)
    }

    /// Bytes that a record takes.
    pub(super) fn record_bytes(&self, payload: u64) -> u64 {
        self.header_bytes().saturating_add(self.units(payload).saturating_mul(u64::from(self.align)))
    }
}

/// One record, as the index file keeps it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Entry {
    pub(super) key: StoreKey,
    pub(super) space: Space,
    pub(super) unit: u32,
    pub(super) payload: u32,
    pub(super) kind: Kind,
}

pub(super) fn log_name(id: u32) -> String {
    format!("seg-{id:08x}.log")
}

pub(super) fn index_name(id: u32) -> String {
    format!("seg-{id:08x}.idx")
}

/// The id in the name of a log file.
pub(super) fn id_of(name: &str) -> Option<u32> {
    let digits = name.strip_prefix("seg-")?.strip_suffix(".log")?;
    let id = u32::from_str_radix(digits, 16).ok()?;
    (log_name(id) == name).then_some(id)
}

/// An open segment.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) head: Head,
    pub(super) name: String,
    pub(super) file: File,
    /// Bypasses the page cache.
    pub(super) direct: Option<File>,
    witness: Option<Arc<dyn Witness>>,
    /// Bytes of blocks that it holds, its index file included.
    pub(super) disk_bytes: AtomicU64,
    /// Pages in it that are still found.
    pub(super) live: AtomicU64,
    /// Removals and clearings in it: they must outlive the records they are about.
    pub(super) marks: AtomicU64,
    writing: Mutex<Writing>,
    quiet: Condvar,
    /// One bit an alignment unit: whether the page that begins there was read. Made with the first read.
    read: OnceLock<Box<[AtomicU64]>>,
}

#[derive(Debug, Default)]
struct Writing {
    open: usize,
    /// Records committed so far; taken when the segment is sealed.
    entries: Vec<Entry>,
}

impl Segment {
    /// Makes and preallocates a new segment.
    pub(super) fn create(root: &Root, id: u32, align: u32, bytes: u64, direct: bool) -> io::Result<Segment> {
        let name = log_name(id);
        let file = root.create(&name)?;
        let head = Head::new(id, align);
        let made = (|| {
            rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes)?;
            let seg = Segment::of(root, head, name.clone(), file, bytes, direct);
            seg.saw(DiskEvent::SetLen { name: &name, len: bytes });
            let mut block = vec![0; seg.head.header_bytes() as usize];
            block[..HEAD_BYTES].copy_from_slice(&head.encode());
            seg.file.write_all_at(&block, 0)?;
            seg.saw(DiskEvent::Write { name: &name, offset: 0, bytes: &block });
            Ok(seg)
        })();
        if made.is_err() {
            // Nobody has seen it; leaving it behind would hold the space that was missing.
            let _ = root.unlink(&name);
        }
        made
    }

    /// Opens what [`Segment::create`] left behind. The caller has read and checked the header.
    pub(super) fn of(root: &Root, head: Head, name: String, file: File, bytes: u64, direct: bool) -> Segment {
        let direct = if direct { root.open_direct(&name) } else { None };
        Segment {
            head,
            name,
            file,
            direct,
            witness: root.witness(),
            disk_bytes: AtomicU64::new(bytes),
            live: AtomicU64::new(0),
            marks: AtomicU64::new(0),
            writing: Mutex::default(),
            quiet: Condvar::new(),
            read: OnceLock::new(),
        }
    }

    pub(super) fn saw(&self, event: DiskEvent<'_>) {
        if let Some(w) = &self.witness {
            w.saw(event);
        }
    }

    pub(super) fn is_witnessed(&self) -> bool {
        self.witness.is_some()
    }

    /// Notes that the page at `unit` was read.
    pub(super) fn touch(&self, unit: u32) {
        let bits = self.read.get_or_init(|| {
            let len = self.file.metadata().map_or(0, |m| m.len());
            (0..self.head.units(len).div_ceil(64)).map(|_| AtomicU64::new(0)).collect()
        });
        if let Some(word) = bits.get(unit as usize / 64) {
            word.fetch_or(1 << (unit % 64), Relaxed);
        }
    }

    /// Whether the page at `unit` was read since the segment was opened.
    pub(super) fn was_read(&self, unit: u32) -> bool {
        let word = self.read.get().and_then(|bits| bits.get(unit as usize / 64));
        word.is_some_and(|w| w.load(Relaxed) >> (unit % 64) & 1 == 1)
    }

    /// A writer begins; the segment is not sealed before it ends.
    pub(super) fn begin_write(&self) {
        locked(&self.writing).open += 1;
    }

    /// A writer ends, with the record it has written, if it has.
    pub(super) fn end_write(&self, written: Option<Entry>) {
        let mut w = locked(&self.writing);
        w.open -= 1;
        w.entries.extend(written);
        if w.open == 0 {
            self.quiet.notify_all();
        }
    }

    /// Whether nobody writes to it now.
    pub(super) fn is_quiet(&self) -> bool {
        locked(&self.writing).open == 0
    }

    /// Records that a scan has found, for the index file.
    pub(super) fn restore_committed(&self, entries: Vec<Entry>) {
        locked(&self.writing).entries = entries;
    }

    pub(super) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()?;
        self.saw(DiskEvent::SyncFile { name: &self.name });
        Ok(())
    }

    /// Gives the blocks of a range back. Best effort: not every file system can.
    pub(super) fn punch(&self, offset: u64, len: u64) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if rustix::fs::fallocate(&self.file, flags, offset, len).is_ok() {
            self.disk_bytes.fetch_sub(len.min(self.disk_bytes.load(Relaxed)), Relaxed);
            self.saw(DiskEvent::Punch { name: &self.name, offset, len });
        }
    }

    /// Gives all blocks back at once, although readers may still hold the deleted file: they find its end and
    /// then the page missing. Best effort.
    pub(super) fn release(&self) {
        let _ = self.file.set_len(0);
    }

    /// Cuts the unused end off.
    fn truncate(&self, len: u64) -> io::Result<()> {
        let before = self.file.metadata()?.len();
        if len < before {
            self.file.set_len(len)?;
            let freed = before - len;
            self.disk_bytes.fetch_sub(freed.min(self.disk_bytes.load(Relaxed)), Relaxed);
            self.saw(DiskEvent::SetLen { name: &self.name, len });
        }
        Ok(())
    }

    /// Waits for the writers, cuts the unused end off, makes the segment durable, then writes its index and
    /// forgets the records.
    pub(super) fn seal(&self, root: &Root, used: u64) -> io::Result<()> {
        let mut w = locked(&self.writing);
        while w.open > 0 {
            w = self.quiet.wait(w).unwrap_or_else(PoisonError::into_inner);
        }
        let entries = std::mem::take(&mut w.entries);
        drop(w);
        self.truncate(used)?;
        self.sync()?;
        let bytes = encode_index(&self.head, &entries);
        let (name, tmp) = (index_name(self.head.id), format!("tmp-{:08x}.idx", self.head.id));
        match root.unlink(&tmp) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let file = root.create(&tmp)?;
        file.write_all_at(&bytes, 0)?;
        self.saw(DiskEvent::Write { name: &tmp, offset: 0, bytes: &bytes });
        file.sync_data()?;
        self.saw(DiskEvent::SyncFile { name: &tmp });
        root.rename(&tmp, &name)?;
        self.disk_bytes.fetch_add(file.metadata()?.blocks().saturating_mul(512), Relaxed);
        root.sync()
    }
}

const ENTRY_BYTES: usize = 48;
const INDEX_HEAD_BYTES: usize = 48;

/// Index file: magic 8, version u16, 0 u16, id u32, nonce 16, spaces u32, entries u32, 0 u32, crc u32 of all
/// the rest; then 64 bytes a space; then key 32, unit u32, payload u32, space u32, kind u32 an entry.
fn encode_index(head: &Head, entries: &[Entry]) -> Vec<u8> {
    let mut ids: Map<Space, u32> = Map::default();
    let mut spaces = Vec::new();
    let mut body = Vec::with_capacity(entries.len() * ENTRY_BYTES);
    for e in entries {
        let space = *ids.entry(e.space).or_insert_with(|| {
            spaces.push(e.space);
            spaces.len() as u32 - 1
        });
        body.extend_from_slice(e.key.as_bytes());
        for word in [e.unit, e.payload, space, e.kind as u32] {
            body.extend_from_slice(&word.to_le_bytes());
        }
    }
    let mut out = Vec::with_capacity(INDEX_HEAD_BYTES + spaces.len() * 64 + body.len());
    out.extend_from_slice(&INDEX_MAGIC);
    out.extend_from_slice(&u32::from(VERSION).to_le_bytes());
    out.extend_from_slice(&head.id.to_le_bytes());
    out.extend_from_slice(&head.nonce);
    for word in [spaces.len() as u32, entries.len() as u32, 0, 0] {
        out.extend_from_slice(&word.to_le_bytes());
    }
    for s in &spaces {
        out.extend_from_slice(&s.descriptor().0);
        out.extend_from_slice(&s.namespace().0);
    }
    out.extend_from_slice(&body);
    let crc = crc32c::crc32c(&out);
    out[44..48].copy_from_slice(&crc.to_le_bytes());
    out
}

fn word_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

/// Reads what [`encode_index`] wrote for this very segment. Any doubt is `None`: the segment is then scanned.
pub(super) fn decode_index(head: &Head, mut bytes: Vec<u8>) -> Option<Vec<Entry>> {
    let crc = word_at(&bytes, 44)?;
    bytes[44..48].fill(0);
    let fits = bytes[..8] == INDEX_MAGIC
        && word_at(&bytes, 8)? == u32::from(VERSION)
        && word_at(&bytes, 12)? == head.id
        && array_at::<16>(&bytes, 16)? == head.nonce
        && crc32c::crc32c(&bytes) == crc;
    if !fits {
        return None;
    }
    let (spaces, entries) = (word_at(&bytes, 32)? as usize, word_at(&bytes, 36)? as usize);
    let body = INDEX_HEAD_BYTES.checked_add(spaces.checked_mul(64)?)?;
    if body.checked_add(entries.checked_mul(ENTRY_BYTES)?)? != bytes.len() {
        return None;
    }
    let space_at = |i: usize| {
        let at = INDEX_HEAD_BYTES + i * 64;
        let descriptor = DescriptorDigest(array_at(&bytes, at)?);
        Some(Space::new(descriptor, NamespaceDigest(array_at(&bytes, at + 32)?)))
    };
    let spaces: Vec<Space> = (0..spaces).map(space_at).collect::<Option<_>>()?;
    (0..entries)
        .map(|i| {
            let at = body + i * ENTRY_BYTES;
            Some(Entry {
                key: StoreKey::from_bytes(array_at(&bytes, at)?),
                unit: word_at(&bytes, at + 32)?,
                payload: word_at(&bytes, at + 36)?,
                space: *spaces.get(word_at(&bytes, at + 40)? as usize)?,
                kind: match word_at(&bytes, at + 44)? {
                    0 => Kind::Page,
                    1 => Kind::Removal,
                    2 => Kind::Clearing,
                    _ => return None,
                },
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries() -> Vec<Entry> {
        (0..100u32)
            .map(|i| {
                let space = Space::new(DescriptorDigest([(i % 3) as u8; 32]), NamespaceDigest([1; 32]));
                let kind = if i % 7 == 0 { Kind::Removal } else { Kind::Page };
                Entry { key: space.key(&[i as u8; 32]), space, unit: i * 5, payload: i, kind }
            })
            .collect()
    }

    #[test]
    fn heads_read_back_and_damage_is_seen() {
        let head = Head::new(42, 4096);
        assert_ne!(head.nonce, Head::new(42, 4096).nonce);
        let good = head.encode();
        assert_eq!(Head::decode(&good), Ok(head));
        for bit in 0..HEAD_BYTES * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Head::decode(&bad).is_err(), "bit {bit}");
        }
        assert_ne!(head.place(4096), head.place(8192));
    }

    #[test]
    fn an_index_reads_back_and_any_damage_is_doubt() {
        let head = Head::new(3, 512);
        let good = encode_index(&head, &entries());
        assert_eq!(decode_index(&head, good.clone()), Some(entries()));
        assert_eq!(decode_index(&Head::new(3, 512), good.clone()), None, "another life of the segment");
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            assert_eq!(decode_index(&head, bad), None, "byte {at}");
            assert_eq!(decode_index(&head, good[..at].to_vec()), None, "cut at {at}");
        }
    }

    #[test]
    fn names_are_strict() {
        assert_eq!(id_of(&log_name(0x2a)), Some(0x2a));
        for bad in ["seg-2a.log", "seg-0000002A.log", "seg-0000002a.idx", "seg-+000002a.log", "x"] {
            assert_eq!(id_of(bad), None, "{bad}");
        }
    }
}
