//! A store directory that somebody has been at: cut, flipped, overwritten, mixed up, filled with foreign files. Opening
//! it may fail with an error; whatever it then says it holds must be the bytes that were put.
#![no_main]

#[path = "bounded.rs"]
mod bounded;

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;

use bounded::Int;
use sapwood::backend::identity::{DescriptorDigest, NamespaceDigest, Space};
use sapwood::backend::region::Region;
use sapwood::backend::store::file::{FileConfig, FileStore};
use sapwood::backend::store::{Call, Item, Outcome, Span, Store};

const PAGES: u32 = 24;
const PAYLOAD_BYTES_MAX: u32 = 700;

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Op {
    Put(Int<0, 23>),
    Get(Int<0, 23>),
    Remove(Int<0, 23>),
    Clear(bool),
    Sync,
    Reopen,
}

/// What happens to the n-th file of the directory. Places count from the end of the file too.
#[derive(Arbitrary, Clone, Debug)]
enum Damage {
    Flip(u8, u16, u8),
    Cut(u8, u16),
    Grow(u8, u16),
    Write(u8, u16, [u8; 9]),
    /// Copies so many bytes inside a file.
    Move(u8, u16, u16, u8),
    Delete(u8),
    /// Puts a copy under the name of another segment, or of its index.
    Copy(u8, Int<0, 6>, bool),
    Foreign(Int<0, 6>, bool, Vec<u8>),
}

#[derive(Arbitrary, Debug)]
struct Input {
    align: Int<0, 3>,
    before: Vec<Op>,
    damage: Vec<Damage>,
    after: Vec<Op>,
}

struct Bench {
    config: FileConfig,
    store: Option<FileStore>,
    region: Arc<Region>,
    spaces: [Space; 2],
}

fn payload(page: u32) -> Vec<u8> {
    let bytes = page.wrapping_mul(2_654_435_761) % PAYLOAD_BYTES_MAX;
    (0..bytes).map(|i| (i.wrapping_mul(31) ^ page.wrapping_mul(97)) as u8).collect()
}

impl Bench {
    /// `false`: the directory was refused.
    fn open(&mut self) -> bool {
        self.store = None;
        self.store = FileStore::open(self.config.clone()).ok();
        self.store.is_some()
    }

    fn item(&self, store: &FileStore, page: u32) -> Item {
        let region = store.register(&self.region).expect("room for one region");
        let hash = [page as u8; 32];
        Item::one(
            &self.spaces[page as usize % 2],
            &hash,
            Span { region, offset: 0, len: payload(page).len() },
        )
    }

    fn run(&mut self, op: Op) -> bool {
        let Some(store) = &self.store else { return false };
        let call = Call::unbounded();
        match op {
            Op::Put(page) => {
                let bytes = payload(page.0);
                // SAFETY: one thread, no call runs.
                unsafe { self.region.slice_mut(0, bytes.len()).expect("inside").copy_from_slice(&bytes) };
                store.put(&[self.item(store, page.0)], &call);
            }
            Op::Get(page) => self.get(store, page.0),
            Op::Remove(page) => {
                store.remove(&[self.item(store, page.0).key], &call);
            }
            Op::Clear(other) => {
                let _ = store.clear(NamespaceDigest([u8::from(other); 32]), &call);
            }
            Op::Sync => {
                let _ = store.sync(&call);
            }
            Op::Reopen => return self.open(),
        }
        true
    }

    fn get(&self, store: &FileStore, page: u32) {
        let want = payload(page);
        // SAFETY: one thread, no call runs.
        unsafe { self.region.slice_mut(0, want.len()).expect("inside").fill(0xEE) };
        if let [Outcome::Ok(len)] = store.get(&[self.item(store, page)], &Call::unbounded())[..] {
            assert_eq!(len, want.len());
            // SAFETY: as above.
            assert_eq!(unsafe { self.region.slice(0, len).expect("inside") }, want, "page {page}");
        }
    }
}

fn segment(root: &Path, id: Int<0, 6>, index: bool) -> PathBuf {
    root.join(format!("seg-{:08x}.{}", id.0, if index { "idx" } else { "log" }))
}

fn damage(root: &Path, what: &Damage) -> std::io::Result<()> {
    let mut files: Vec<PathBuf> =
        fs::read_dir(root)?.flatten().map(|e| e.path()).filter(|p| p.is_file()).collect();
    files.sort();
    let pick = |which: &u8| files.get(usize::from(*which) % files.len().max(1)).cloned();
    let open = |path: &PathBuf| OpenOptions::new().read(true).write(true).open(path);
    let (Damage::Flip(which, ..)
    | Damage::Cut(which, _)
    | Damage::Grow(which, _)
    | Damage::Write(which, ..)
    | Damage::Move(which, ..)
    | Damage::Delete(which)
    | Damage::Copy(which, ..)) = what
    else {
        let Damage::Foreign(id, index, bytes) = what else { return Ok(()) };
        return fs::write(segment(root, *id, *index), bytes);
    };
    let Some(path) = pick(which) else { return Ok(()) };
    let bytes = fs::metadata(&path)?.len();
    let place = |at: u16| if bytes == 0 { 0 } else { u64::from(at) % bytes };
    match what {
        Damage::Flip(_, at, mask) => {
            let mut byte = [0];
            let file = open(&path)?;
            file.read_exact_at(&mut byte, place(*at))?;
            file.write_all_at(&[byte[0] ^ mask], place(*at))
        }
        Damage::Cut(_, at) => open(&path)?.set_len(place(*at)),
        Damage::Grow(_, by) => open(&path)?.set_len(bytes + u64::from(*by)),
        Damage::Write(_, at, with) => open(&path)?.write_all_at(with, place(*at)),
        Damage::Move(_, from, to, len) => {
            let mut buffer = vec![0; usize::from(*len) * 8];
            let file = open(&path)?;
            let got = file.read_at(&mut buffer, place(*from))?;
            file.write_all_at(&buffer[..got], place(*to))
        }
        Damage::Delete(_) => fs::remove_file(&path),
        Damage::Copy(_, id, index) => {
            let to = segment(root, *id, *index);
            if to != path { fs::copy(&path, to).map(drop) } else { Ok(()) }
        }
        Damage::Foreign(..) => Ok(()),
    }
}

fuzz_target!(|input: Input| {
    let memory = Path::new("/dev/shm");
    let dir = match memory.is_dir() {
        true => tempfile::tempdir_in(memory),
        false => tempfile::tempdir(),
    }
    .expect("a directory");
    let config = FileConfig {
        free_bytes_min: 0,
        segment_bytes: 16 << 10,
        align: 64 << input.align.0,
        depth: 1,
        ..FileConfig::new(dir.path().join("store"), 80 << 10)
    };
    let space = |n: u8| Space::new(DescriptorDigest([9; 32]), NamespaceDigest([n; 32]));
    let region = Arc::new(Region::anonymous(PAYLOAD_BYTES_MAX as usize).expect("a page of memory"));
    let mut bench = Bench { config, store: None, region, spaces: [space(0), space(1)] };
    assert!(bench.open(), "a fresh directory");
    for op in input.before.iter().take(60) {
        assert!(bench.run(*op), "nothing was damaged yet");
    }
    bench.store = None;
    for what in input.damage.iter().take(8) {
        // Damage that cannot be done is no damage.
        let _ = damage(&bench.config.root, what);
    }
    if !bench.open() {
        return;
    }
    for page in 0..PAGES {
        bench.run(Op::Get(Int(page)));
    }
    for op in input.after.iter().take(60) {
        if !bench.run(*op) {
            return;
        }
    }
    for page in 0..PAGES {
        bench.run(Op::Get(Int(page)));
    }
});
