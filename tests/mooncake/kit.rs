//! Memory, keys and bytes; and one test at a time.
#![expect(unsafe_code, reason = "the tests own the regions and touch them from one thread at a time")]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sapwood::backend::identity::{DescriptorDigest, NamespaceDigest, Space};
use sapwood::backend::region::{Mapping, Region, Sharing};
use sapwood::backend::store::{Item, RegionToken, Span, Store};

use crate::service::Service;

/// A test that cannot run here says so; where everything must run (`SAPWOOD_REQUIRE_SERVICES`), it fails.
pub(crate) fn skip(what: &str) {
    assert!(std::env::var_os("SAPWOOD_REQUIRE_SERVICES").is_none(), "needs {what}");
    println!("SKIPPED: needs {what}");
}

static ALONE: Mutex<()> = Mutex::new(());

/// Held by every test that starts processes or counts what is open.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Asks again until it is so, and fails after `limit`.
pub(crate) fn until(what: &str, limit: Duration, mut so: impl FnMut() -> bool) {
    let end = Instant::now() + limit;
    while !so() {
        assert!(Instant::now() < end, "not within {limit:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn shared_region(bytes: usize) -> Arc<Region> {
    region(bytes, Sharing::Shared)
}

pub(crate) fn region(bytes: usize, sharing: Sharing) -> Arc<Region> {
    Arc::new(Region::map(bytes, Mapping { sharing, ..Mapping::default() }).unwrap())
}

/// A registered region.
pub(crate) struct Arena {
    pub(crate) region: Arc<Region>,
    pub(crate) token: RegionToken,
}

impl Arena {
    pub(crate) fn new(store: &dyn Store, bytes: usize) -> Arena {
        let region = shared_region(bytes);
        let token = store.register(&region).unwrap();
        Arena { region, token }
    }

    pub(crate) fn item(&self, n: u64, offset: usize, len: usize) -> Item {
        let space = Space::new(DescriptorDigest([3; 32]), NamespaceDigest([4; 32]));
        let mut hash = [0x5A; 32];
        hash[..8].copy_from_slice(&n.to_le_bytes());
        Item::one(&space, &hash, Span { region: self.token, offset, len })
    }

    pub(crate) fn fill(&self, n: u64, offset: usize, len: usize) {
        // SAFETY: no call is running on this range; every thread has its own arena.
        let bytes = unsafe { self.region.slice_mut(offset, len).unwrap() };
        for (i, chunk) in bytes.chunks_mut(8).enumerate() {
            chunk.copy_from_slice(&word_of(n, i)[..chunk.len()]);
        }
    }

    pub(crate) fn clear(&self) {
        // SAFETY: as above.
        unsafe { self.region.slice_mut(0, self.region.len()).unwrap() }.fill(0xEE);
    }

    pub(crate) fn holds(&self, n: u64, offset: usize, len: usize) -> bool {
        // SAFETY: as above.
        let bytes = unsafe { self.region.slice(offset, len).unwrap() };
        bytes.chunks(8).enumerate().all(|(i, chunk)| *chunk == word_of(n, i)[..chunk.len()])
    }
}

/// Bytes `8 * i` and on of object `n`.
fn word_of(n: u64, i: usize) -> [u8; 8] {
    (n.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ i as u64).wrapping_mul(0xD6E8_FEB8_6659_FD93).to_le_bytes()
}

/// What this process holds that a store of Mooncake could leave behind: its threads, and shared memory of ours by
/// descriptor and by mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Left {
    pub(crate) threads: usize,
    pub(crate) descriptors: usize,
    pub(crate) mappings: usize,
}

/// That so much is left. A thread has its name only when it runs, and is listed for a moment after its end.
pub(crate) fn assert_left(want: Left) {
    let end = Instant::now() + Duration::from_secs(10);
    while left() != want {
        assert!(Instant::now() < end, "{:?} is left, not {want:?}", left());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn left() -> Left {
    let names = std::fs::read_dir("/proc/self/task").unwrap().filter_map(|t| {
        // A thread may end while we look.
        std::fs::read_to_string(t.unwrap().path().join("comm")).ok()
    });
    let links = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|f| {
        let link = std::fs::read_link(f.unwrap().path()).ok()?;
        link.to_str().map(str::to_owned)
    });
    Left {
        threads: names.filter(|n| n.starts_with("sapwood")).count(),
        descriptors: links.filter(|l| l.contains("memfd:sapwood")).count(),
        mappings: mapped_by(std::process::id()),
    }
}

/// Mappings of our shared memory in a process.
pub(crate) fn mapped_by(pid: u32) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    maps.lines().filter(|l| l.contains("memfd:sapwood")).count()
}

impl Service {
    /// Process id of the real client.
    pub(crate) fn client_pid(&self) -> u32 {
        self.client.as_ref().unwrap().id()
    }
}

/// A process that stands still, until this is dropped: also by a test that fails, which would wait for it for ever.
pub(crate) struct StandsStill(u32);

impl StandsStill {
    /// Stops a process. A signal is only left with it, and its threads work on until one of them takes it up: this returns
    /// when all have stopped.
    pub(crate) fn stop(pid: u32) -> StandsStill {
        signal(pid, "STOP");
        let stopped = StandsStill(pid);
        until("it stands still", Duration::from_secs(20), || states(pid).iter().all(|state| *state == 'T'));
        stopped
    }
}

impl Drop for StandsStill {
    fn drop(&mut self) {
        signal(self.0, "CONT");
    }
}

fn signal(pid: u32, name: &str) {
    let sent = std::process::Command::new("kill").args(["-s", name, &pid.to_string()]).status().unwrap();
    assert!(sent.success());
}

/// What each thread of a process does, by the letters of proc(5).
fn states(pid: u32) -> Vec<char> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    threads
        .filter_map(|t| {
            // A thread may end while we look. Its name stands in parentheses and may have any letter.
            let stat = std::fs::read_to_string(t.unwrap().path().join("stat")).ok()?;
            stat.rsplit_once(')')?.1.trim_start().chars().next()
        })
        .collect()
}
