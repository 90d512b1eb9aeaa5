//! What a power cut leaves: a recorded history is cut after every change, what was not synced is lost, torn
//! or reordered, and the store is opened on the result. It must never serve a wrong byte, lose nothing that
//! it reported durable, and bring nothing back that was durably removed.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::{Arc, Mutex};

use sapwood::backend::store::file::{DiskEvent, FileConfig, FileStore, Witness};
use sapwood::backend::store::{Call, Item, Outcome, Store};

use crate::kit::{Arena, Rng, bytes_of, namespace_of, page, space_of};

#[derive(Clone, Debug)]
enum Event {
    Create(String),
    SetLen(String, u64),
    Write(String, u64, Vec<u8>),
    Punch(String, u64, u64),
    SyncFile(String),
    Rename(String, String),
    Unlink(String),
    SyncDir,
}

#[derive(Debug, Default)]
struct Recorder(Mutex<Vec<Event>>);

impl Witness for Recorder {
    fn saw(&self, event: DiskEvent<'_>) {
        let event = match event {
            DiskEvent::Create { name } => Event::Create(name.into()),
            DiskEvent::SetLen { name, len } => Event::SetLen(name.into(), len),
            DiskEvent::Write { name, offset, bytes } => Event::Write(name.into(), offset, bytes.to_vec()),
            DiskEvent::Punch { name, offset, len } => Event::Punch(name.into(), offset, len),
            DiskEvent::SyncFile { name } => Event::SyncFile(name.into()),
            DiskEvent::Rename { from, to } => Event::Rename(from.into(), to.into()),
            DiskEvent::Unlink { name } => Event::Unlink(name.into()),
            DiskEvent::SyncDir => Event::SyncDir,
            _ => panic!("an event this test does not know"),
        };
        self.0.lock().unwrap().push(event);
    }
}

/// A file on the simulated disk: what is certain, and what the cache still holds.
#[derive(Clone, Default)]
struct Inode {
    durable: Vec<u8>,
    pending: Vec<Event>,
}

impl Inode {
    fn apply(bytes: &mut Vec<u8>, event: &Event, keep_sector: &mut dyn FnMut() -> bool) {
        match event {
            Event::SetLen(_, len) => bytes.resize(*len as usize, 0),
            Event::Write(_, offset, new) => {
                let end = *offset as usize + new.len();
                if bytes.len() < end {
                    bytes.resize(end, 0);
                }
                for (i, sector) in new.chunks(512).enumerate() {
                    if keep_sector() {
                        let at = *offset as usize + i * 512;
                        bytes[at..at + sector.len()].copy_from_slice(sector);
                    }
                }
            }
            Event::Punch(_, offset, len) => {
                let end = bytes.len().min((offset + len) as usize);
                bytes[(*offset as usize).min(end)..end].fill(0);
            }
            _ => {}
        }
    }

    fn sync(&mut self) {
        for e in std::mem::take(&mut self.pending) {
            Inode::apply(&mut self.durable, &e, &mut || true);
        }
    }

    /// One thing that may be on the disk: each pending change lost, whole, or torn by sectors.
    fn image(&self, rng: &mut Rng) -> Vec<u8> {
        let mut bytes = self.durable.clone();
        for e in &self.pending {
            match rng.below(3) {
                0 => {}
                1 => Inode::apply(&mut bytes, e, &mut || true),
                _ => Inode::apply(&mut bytes, e, &mut || rng.below(2) == 0),
            }
        }
        bytes
    }
}

/// The disk: inodes, and the names that are certain and those that are not yet.
#[derive(Clone, Default)]
struct Disk {
    inodes: Vec<Inode>,
    now: BTreeMap<String, usize>,
    durable: BTreeMap<String, usize>,
    pending: Vec<BTreeMap<String, usize>>,
}

impl Disk {
    fn apply(&mut self, event: &Event) {
        match event {
            Event::Create(name) => {
                self.inodes.push(Inode::default());
                self.now.insert(name.clone(), self.inodes.len() - 1);
                self.pending.push(self.now.clone());
            }
            Event::Rename(from, to) => {
                let inode = self.now.remove(from).unwrap();
                self.now.insert(to.clone(), inode);
                self.pending.push(self.now.clone());
            }
            Event::Unlink(name) => {
                self.now.remove(name).unwrap();
                self.pending.push(self.now.clone());
            }
            Event::SyncDir => {
                self.durable = self.now.clone();
                self.pending.clear();
            }
            Event::SyncFile(name) => {
                if let Some(&i) = self.now.get(name) {
                    self.inodes[i].sync();
                }
            }
            Event::SetLen(name, _) | Event::Write(name, ..) | Event::Punch(name, ..) => {
                if let Some(&i) = self.now.get(name) {
                    self.inodes[i].pending.push(event.clone());
                }
            }
        }
    }

    /// Writes one possible state after a power cut. Changes of names become durable in their order.
    fn crash(&self, into: &Path, rng: &mut Rng) {
        std::fs::DirBuilder::new().mode(0o700).create(into).unwrap();
        let kept = rng.below(self.pending.len() + 1);
        let names = if kept == 0 { &self.durable } else { &self.pending[kept - 1] };
        for (name, &i) in names {
            let mut file = std::fs::OpenOptions::new();
            file.write(true).create_new(true).mode(0o600);
            let bytes = self.inodes[i].image(rng);
            std::io::Write::write_all(&mut file.open(into.join(name)).unwrap(), &bytes).unwrap();
        }
    }
}

fn config(root: &Path) -> FileConfig {
    let mut c = FileConfig::new(root, 8 << 20);
    c.segment_bytes = 48 << 10;
    c.align = 512;
    c.free_bytes_min = 0;
    c
}

/// Pages are (namespace, number); the length follows from the number.
type Page = (u8, u64);

fn len_of((_, n): Page) -> usize {
    100 + 700 * (n as usize % 9)
}

fn item(p: Page, a: &Arena) -> Item {
    Item::one(&space_of(p.0), &page(p.1), a.span(0, len_of(p)))
}

fn content(p: Page) -> Vec<u8> {
    bytes_of(p.1 + 1000 * u64::from(p.0), len_of(p))
}

/// What the store had promised after so many events.
#[derive(Clone, Debug, Default)]
struct Promise {
    events: usize,
    /// These are found.
    present: BTreeSet<Page>,
    /// These are not.
    absent: BTreeSet<Page>,
}

/// Runs a random history and returns the events and the promises, in order.
fn history(rng: &mut Rng, steps: usize) -> (Vec<Event>, Vec<Promise>) {
    let dir = tempfile::tempdir().unwrap();
    let recorder = Arc::new(Recorder::default());
    let mut c = config(&dir.path().join("store"));
    c.witness = Some(Arc::clone(&recorder) as Arc<dyn Witness>);
    let store = FileStore::open(c).unwrap();
    let a = Arena::new(&store, 16 << 10);
    let all: Vec<Page> = (0..2).flat_map(|ns| (0..20).map(move |n| (ns, n))).collect();
    let mut present = BTreeSet::new();
    let mut promises = vec![Promise::default()];
    let events = || recorder.0.lock().unwrap().len();
    for _ in 0..steps {
        let p = all[rng.below(all.len())];
        // A page that is about to change is promised neither way from here until the next sync.
        let mut loosened = promises.last().cloned().unwrap_or_default();
        loosened.events = events();
        let touched: BTreeSet<Page>;
        match rng.below(12) {
            0..7 => {
                touched = [p].into();
                promises.push(loosen(loosened, &touched));
                a.write(0, &content(p));
                assert!(store.put(&[item(p, &a)], &Call::unbounded())[0].is_ok());
                present.insert(p);
            }
            7 | 8 => {
                touched = [p].into();
                promises.push(loosen(loosened, &touched));
                let outcome = store.remove(&[item(p, &a).key], &Call::unbounded())[0];
                assert_eq!(outcome.is_ok(), present.remove(&p));
            }
            9 if rng.below(4) == 0 => {
                touched = all.iter().filter(|q| q.0 == p.0).copied().collect();
                promises.push(loosen(loosened, &touched));
                store.clear(namespace_of(p.0), &Call::unbounded()).unwrap();
                present.retain(|q| q.0 != p.0);
            }
            _ => {
                store.sync(&Call::unbounded()).unwrap();
                let absent = all.iter().filter(|p| !present.contains(p)).copied().collect();
                promises.push(Promise { events: events(), present: present.clone(), absent });
            }
        }
    }
    // Closing writes index files; cuts among those count too, so the events end here, not before.
    drop(store);
    let events = recorder.0.lock().unwrap().clone();
    (events, promises)
}

fn loosen(mut promise: Promise, touched: &BTreeSet<Page>) -> Promise {
    promise.present.retain(|p| !touched.contains(p));
    promise.absent.retain(|p| !touched.contains(p));
    promise
}

/// Opens an image and holds it against what was promised.
fn check(root: &Path, promise: &Promise, what: &str) {
    let store = FileStore::open(config(root)).unwrap_or_else(|e| panic!("{what}: {e}"));
    let a = Arena::new(&store, 16 << 10);
    for p in (0..2).flat_map(|ns| (0..20).map(move |n| (ns, n))) {
        let outcome = store.get(&[item(p, &a)], &Call::unbounded())[0];
        if outcome.is_ok() {
            assert!(a.read(0, len_of(p)) == content(p), "{what}: wrong bytes of {p:?}");
        } else {
            assert!(outcome.is_miss(), "{what}: {p:?} is {outcome:?}");
        }
        assert!(outcome.is_ok() || !promise.present.contains(&p), "{what}: durable {p:?} is {outcome:?}");
        assert!(!outcome.is_ok() || !promise.absent.contains(&p), "{what}: removed {p:?} came back");
    }
    // It works on: what is lost can be put again and is found.
    let p = (0, 5);
    a.write(0, &content(p));
    assert!(store.put(&[item(p, &a)], &Call::unbounded())[0].is_ok(), "{what}");
    a.write(0, &[0; 16]);
    assert!(store.get(&[item(p, &a)], &Call::unbounded())[0].is_ok(), "{what}");
    assert!(a.read(0, len_of(p)) == content(p), "{what}");
}

#[test]
fn a_cut_after_every_change_loses_no_promise_and_serves_no_wrong_byte() {
    let mut rng = Rng::seeded(0xC0_57);
    let (events, promises) = history(&mut rng, 130);
    let kinds = |f: fn(&Event) -> bool| events.iter().filter(|e| f(e)).count();
    // The history is worth cutting: it has full segments, index files, holes and syncs in it.
    assert!(kinds(|e| matches!(e, Event::Rename(..))) >= 3);
    assert!(kinds(|e| matches!(e, Event::Punch(..))) >= 5);
    assert!(promises.iter().filter(|p| p.present.len() > 5).count() >= 3);
    let mut disk = Disk::default();
    let scratch = tempfile::tempdir().unwrap();
    for cut in 0..=events.len() {
        let promise = promises.iter().rfind(|p| p.events <= cut).unwrap();
        for variant in 0..2 {
            let root = scratch.path().join("image");
            disk.crash(&root, &mut rng);
            check(&root, promise, &format!("cut {cut} variant {variant}"));
            std::fs::remove_dir_all(&root).unwrap();
        }
        if let Some(event) = events.get(cut) {
            disk.apply(event);
        }
    }
}

/// Recovering writes too; a second cut during or after it changes nothing.
#[test]
fn a_cut_image_survives_a_second_opening() {
    let mut rng = Rng::seeded(0x2C_07);
    let (events, promises) = history(&mut rng, 60);
    let scratch = tempfile::tempdir().unwrap();
    let mut disk = Disk::default();
    for (cut, event) in events.iter().enumerate() {
        disk.apply(event);
        if cut % 9 == 0 {
            let promise = promises.iter().rfind(|p| p.events <= cut + 1).unwrap();
            let root = scratch.path().join(format!("image-{cut}"));
            disk.crash(&root, &mut rng);
            check(&root, promise, &format!("cut {cut} first"));
            check(&root, &loosen(promise.clone(), &[(0, 5)].into()), &format!("cut {cut} second"));
        }
    }
}

/// Bits rot anywhere in any file of a cleanly closed store.
#[test]
fn flipped_bits_are_misses_never_wrong_bytes() {
    let mut rng = Rng::seeded(0xB17);
    let (events, _) = history(&mut rng, 100);
    let mut disk = Disk::default();
    events.iter().for_each(|e| disk.apply(e));
    disk.inodes.iter_mut().for_each(Inode::sync);
    disk.apply(&Event::SyncDir);
    let scratch = tempfile::tempdir().unwrap();
    for round in 0..150 {
        let mut rotten = disk.clone();
        let files: Vec<usize> = rotten.durable.values().copied().collect();
        for _ in 0..1 + rng.below(40) {
            let bytes = &mut rotten.inodes[files[rng.below(files.len())]].durable;
            if !bytes.is_empty() {
                let at = rng.below(bytes.len());
                bytes[at] ^= 1 << rng.below(8);
            }
        }
        let root = scratch.path().join("image");
        rotten.crash(&root, &mut rng);
        check(&root, &Promise::default(), &format!("round {round}"));
        std::fs::remove_dir_all(&root).unwrap();
    }
}

/// A page may contain the very bytes of a record. After a cut that loses the record's own header, the scan
/// must not take the payload's for one.
#[test]
fn a_payload_that_looks_like_a_record_is_not_found_as_one() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("store");
    let recorder = Arc::new(Recorder::default());
    let mut c = config(&root);
    c.witness = Some(Arc::clone(&recorder) as Arc<dyn Witness>);
    let forged = (0, 3);
    let write =
        |events: &[Event], n: usize| match events.iter().filter(|e| matches!(e, Event::Write(..))).nth(n) {
            Some(Event::Write(_, at, bytes)) => (*at, bytes.clone()),
            _ => panic!("no write {n}"),
        };
    let store = FileStore::open(c).unwrap();
    let a = Arena::new(&store, 16 << 10);
    a.write(0, &vec![0xBD; len_of(forged)]);
    assert!(store.put(&[item(forged, &a)], &Call::unbounded())[0].is_ok());
    assert!(store.remove(&[item(forged, &a).key], &Call::unbounded())[0].is_ok());
    // The record of the removed page, as payload of another one.
    let (_, record) = write(&recorder.0.lock().unwrap(), 1);
    a.write(0, &record);
    let carrier = Item::one(&space_of(0), &page(77), a.span(0, record.len()));
    assert!(store.put(&[carrier], &Call::unbounded())[0].is_ok());
    drop(store);
    // The carrier's header is lost; the index file too, so that the segment is scanned.
    let (at, _) = write(&recorder.0.lock().unwrap(), 3);
    let segment = root.join("seg-00000001.log");
    let mut bytes = std::fs::read(&segment).unwrap();
    bytes[at as usize..at as usize + 512].fill(0);
    std::fs::write(&segment, bytes).unwrap();
    std::fs::remove_file(root.join("seg-00000001.idx")).unwrap();
    let store = FileStore::open(config(&root)).unwrap();
    let a = Arena::new(&store, 16 << 10);
    assert_eq!(store.recovery().segments_scanned, 1);
    assert_eq!(store.get(&[item(forged, &a)], &Call::unbounded()), [Outcome::Missing]);
}
