//! Hours in a box: random load with aborts, faults of the store, restarts under other write policies and `kill -9`,
//! while memory stays flat, every page keeps one owner and no read shows a wrong byte.
//!
//! `SAPWOOD_SOAK_S` is the length of each test in seconds (4 unless told; nightly runs take 1200), `SAPWOOD_SEED` the
//! seed. The load runs in child processes of this test, so that one can be killed and the memory of the other is its
//! own.
#![expect(clippy::unwrap_used, reason = "a test that meets None or Err fails, which is what it is for")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use sapwood::backend::device::SoftDevice;
use sapwood::backend::store::fault::{Fault, Faulty, When};
use sapwood::backend::store::file::{FileConfig, FileStore};
use sapwood::backend::store::stats::OpKind;
use sapwood::backend::store::{Outcome, Store};
use sapwood::base::{Digest, NamespaceId, Tier, Time};
use sapwood::engine::{CacheError, ModelIdentity, PrefixCache, Request};
use sapwood::key::Namespace;
use sapwood::pool::{Capacities, Capacity, Geometry, Plane, PlaneId};
use sapwood::tiers::{
    Alloc, CoreError, LoadBack, LoadState, Prefetch, PrefetchConfig, PrefetchPolicy, PrefetchState,
    StoreConfig, WritePolicy,
};
use sapwood::tree::TreeError;

const PAGE: usize = 4;
const PAGE_BYTES: usize = 2 * PAGE * 16;
const DEVICE_PAGES: u32 = 96;
const HOST_PAGES: u32 = 160;
/// Requests between two restarts of the cache.
const EPOCH_REQUESTS: usize = 400;
/// Requests between two switches of a running cache.
const SWITCH_REQUESTS: usize = 40;

const POLICIES: [WritePolicy; 3] =
    [WritePolicy::WriteThrough { threshold: 1 }, WritePolicy::WriteThroughSelective, WritePolicy::WriteBack];

struct Rng(u64);

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % n
    }
}

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

/// The bytes of the page that ends `prefix`: every byte of it says which prefix it belongs to.
fn content(namespace: NamespaceId, prefix: &[u32]) -> [u8; PAGE_BYTES] {
    let mut digest = Digest::default();
    digest.mix(u64::from(namespace.0));
    prefix.iter().for_each(|&t| digest.mix(u64::from(t)));
    let mut bytes = [0; PAGE_BYTES];
    for word in bytes.chunks_mut(8) {
        digest.mix(1);
        word.copy_from_slice(&digest.value().to_le_bytes());
    }
    bytes
}

enum Stage {
    Fetching,
    Loading,
    Computing,
}

struct Live {
    request: Request,
    namespace: NamespaceId,
    tokens: Vec<u32>,
    stage: Stage,
    checked: bool,
    /// Turns after which it vanishes, in whatever state it is then.
    turns_left: Option<usize>,
}

/// A cache with load on it.
struct Load {
    cache: PrefixCache,
    device: SoftDevice,
    namespaces: [NamespaceId; 2],
    live: Vec<Live>,
    rng: Rng,
    started: Instant,
    verified_pages: u64,
    /// Of the policy, and of the store.
    switches: [u64; 2],
}

impl Load {
    fn new(store: Arc<dyn Store>, write: WritePolicy, seed: u64) -> Load {
        let geometry = Geometry::builder(PAGE as u32).plane(Plane::target(1, 16)).build().unwrap();
        let geometry = Arc::new(geometry);
        let pages = Capacities::full(Capacity::Pages(DEVICE_PAGES));
        let device = SoftDevice::threaded(Arc::clone(&geometry), pages).unwrap();
        let mut cache = PrefixCache::builder(geometry)
            .device(device.clone())
            .host_pages(Capacity::Pages(HOST_PAGES))
            .store(store)
            .store_config(StoreConfig { batch_pages: 8, retry_ms: 1, ..StoreConfig::default() })
            .store_call_budget(Some(Duration::from_secs(5)))
            .identity(ModelIdentity::whole("soak", "1"))
            .write_policy(write)
            .prefetch(PrefetchConfig {
                policy: PrefetchPolicy::WaitComplete,
                threshold_tokens: PAGE as u32,
                batch_pages: 4,
                window_batches: 2,
                host_share_percent: 60,
                ..PrefetchConfig::default()
            })
            .build()
            .unwrap();
        let salt = Namespace { salt: Some("tenant".to_owned()), ..Namespace::default() };
        let namespaces = [NamespaceId::DEFAULT, cache.namespace(&salt).unwrap()];
        let (live, rng, started) = (Vec::new(), Rng(seed), Instant::now());
        Load { cache, device, namespaces, live, rng, started, verified_pages: 0, switches: [0; 2] }
    }

    /// Serves so many requests, then lets everything come to rest and looks for what is left.
    fn run(&mut self, requests: usize) {
        let mut opened = 0;
        while opened < requests || !self.live.is_empty() {
            let now = Time(self.started.elapsed().as_micros() as u64);
            self.cache.tick(now).unwrap();
            if opened < requests && self.live.len() < 8 {
                self.open();
                opened += 1;
                if opened % SWITCH_REQUESTS == 0 {
                    self.switch();
                }
            }
            let mut moved = false;
            for at in (0..self.live.len()).rev() {
                moved |= self.step(at);
            }
            if !moved {
                std::thread::sleep(Duration::from_micros(20));
            }
        }
        self.rest();
    }

    /// Another write policy, or the store taken away and given back, while requests are in every state.
    fn switch(&mut self) {
        if self.rng.below(2) == 0 {
            let write = POLICIES[self.rng.below(3)];
            let exclusive = self.rng.below(2) == 0;
            match self.cache.set_write_policy(write, exclusive) {
                Ok(()) => self.switches[0] += 1,
                // The tree still holds what the other policy let in.
                Err(CacheError::Core(CoreError::Tree(TreeError::RuleNotMet(_)))) => {}
                Err(error) => panic!("{write:?}: {error}"),
            }
        } else if let Some(store) = self.cache.detach_store(Duration::from_secs(10)).unwrap() {
            assert!(self.cache.store().is_none());
            assert!(self.cache.attach_store(store).unwrap());
            self.switches[1] += 1;
        }
    }

    fn open(&mut self) {
        let namespace = self.namespaces[self.rng.below(2)];
        // A tree of a few hundred prefixes: more than the host holds.
        let trunk = self.rng.below(6) as u32;
        let pages = 2 + self.rng.below(14);
        let fork = self.rng.below(pages) * PAGE;
        let branch = 100 * (1 + self.rng.below(4) as u32);
        let token = |i: usize| trunk * 1000 + i as u32 + if i >= fork { branch } else { 0 };
        let tokens: Vec<u32> = (0..pages * PAGE + 1 + self.rng.below(PAGE)).map(token).collect();
        let mut request = self.cache.request(namespace);
        // What the scheduler knows of it, right or wrong.
        match self.rng.below(6) {
            0 | 1 => self.cache.expect_prefix(&mut request, &tokens).unwrap(),
            2 => self.cache.answered(&mut request, 7).unwrap(),
            3 => self.cache.will_not_return(&mut request).unwrap(),
            _ => {}
        }
        let stage = match self.cache.prefetch(&mut request, &tokens).unwrap() {
            Prefetch::Started { .. } => Stage::Fetching,
            Prefetch::Refused(_) => Stage::Computing,
        };
        let turns_left = (self.rng.below(8) == 0).then(|| 1 << self.rng.below(8));
        let mut live = Live { request, namespace, tokens, stage, checked: false, turns_left };
        if matches!(live.stage, Stage::Computing) {
            find(&mut self.cache, &mut live);
        }
        self.live.push(live);
    }

    /// Whether anything came of it.
    fn step(&mut self, at: usize) -> bool {
        let live = &mut self.live[at];
        if let Some(turns) = &mut live.turns_left {
            *turns -= 1;
            if *turns == 0 {
                drop(self.live.swap_remove(at));
                return true;
            }
        }
        match live.stage {
            Stage::Fetching => {
                if self.cache.poll_prefetch(&mut live.request).unwrap() == PrefetchState::Pending {
                    return false;
                }
                find(&mut self.cache, live);
            }
            Stage::Loading => match self.cache.load_state(&live.request).unwrap() {
                LoadState::Pending { .. } => return false,
                LoadState::Ready => live.stage = Stage::Computing,
                LoadState::Failed => find(&mut self.cache, live),
            },
            Stage::Computing => return self.compute(at),
        }
        true
    }

    fn compute(&mut self, at: usize) -> bool {
        let live = &mut self.live[at];
        if !live.checked {
            for (i, &page) in self.cache.pages(&live.request).unwrap().iter().enumerate() {
                let mut bytes = [0; PAGE_BYTES];
                self.device.read_rows(PlaneId(0), page, 0, 0, &mut bytes).unwrap();
                let want = content(live.namespace, &live.tokens[..(i + 1) * PAGE]);
                assert!(bytes == want, "page {i} of {:?} has other bytes", live.tokens);
                self.verified_pages += 1;
            }
            live.checked = true;
        }
        let have = self.cache.pages(&live.request).unwrap().len();
        let want = live.tokens.len().div_ceil(PAGE);
        match self.cache.alloc(&mut live.request, (want - have) as u32).unwrap() {
            Alloc::Granted => {}
            Alloc::Refused { .. } => {
                // Others hold the pages: somebody has to go.
                let goes = self.rng.below(32) == 0;
                if goes {
                    drop(self.live.swap_remove(at));
                }
                return goes;
            }
        }
        let work = self.device.compute_begin();
        for (i, &page) in self.cache.pages(&live.request).unwrap().iter().enumerate().skip(have) {
            let prefix = &live.tokens[..((i + 1) * PAGE).min(live.tokens.len())];
            self.device.write_rows(PlaneId(0), page, 0, 0, &content(live.namespace, prefix)).unwrap();
        }
        self.device.compute_end(work);
        let Live { request, tokens, .. } = self.live.swap_remove(at);
        self.cache.finish(request, &tokens, work).unwrap();
        true
    }

    fn rest(&mut self) {
        let until = Instant::now() + Duration::from_secs(60);
        while !self.cache.is_idle() {
            assert!(Instant::now() < until, "does not come to rest: {:?}", self.cache.stats());
            self.cache.tick(Time(self.started.elapsed().as_micros() as u64)).unwrap();
            std::thread::yield_now();
        }
        assert_eq!(self.cache.sanity(), []);
        assert_eq!(self.cache.stats().violations, 0);
        for tier in [Tier::Device, Tier::Host] {
            let c = self.cache.page_counts(tier);
            assert_eq!((c.request_pages, c.in_flight_pages, c.leaked_pages), (0, 0, 0), "{tier:?}: {c:?}");
        }
    }
}

fn find(cache: &mut PrefixCache, live: &mut Live) {
    // A request that owns nothing, or whose load failed, may always match.
    cache.match_prefix(&mut live.request, &live.tokens[..live.tokens.len() - 1]).unwrap();
    live.stage = match cache.load_back(&mut live.request).unwrap() {
        LoadBack::Started { .. } => Stage::Loading,
        LoadBack::Nothing | LoadBack::Refused(_) => Stage::Computing,
    };
    live.checked = false;
}

fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// The load of a child process: epochs of one cache each, over one directory, until the time is up.
fn child(dir: &Path, seed: u64, length: Duration) {
    let started = Instant::now();
    // What is measured against: the process when it has done everything once.
    let warm_after = (length / 10).min(Duration::from_secs(120));
    let (mut warm, mut verified, mut fetched, mut epochs, mut switched) = (None, 0, 0, 0u64, [0; 2]);
    while started.elapsed() < length {
        let config = FileConfig { free_bytes_min: 0, ..FileConfig::new(dir, 4 << 20) };
        let store = Faulty::new(FileStore::open(config).unwrap());
        if epochs % 2 == 1 {
            store.add(OpKind::Get, When::Every(31), Fault::Fail(Outcome::Timeout));
            store.add(OpKind::Get, When::Every(37), Fault::Corrupt);
            store.add(OpKind::Put, When::Every(41), Fault::Fail(Outcome::NoSpace));
            store.add(OpKind::Put, When::Every(43), Fault::LostWrite);
            store.add(OpKind::Query, When::Every(53), Fault::Fail(Outcome::Timeout));
        }
        let write = POLICIES[(epochs / 2 % 3) as usize];
        let mut load = Load::new(Arc::new(store), write, seed.wrapping_add(epochs));
        load.run(EPOCH_REQUESTS);
        verified += load.verified_pages;
        fetched += load.cache.stats().store_got_pages;
        switched = [switched[0] + load.switches[0], switched[1] + load.switches[1]];
        epochs += 1;
        if warm.is_none() && started.elapsed() >= warm_after && epochs >= 6 {
            warm = Some(resident_bytes());
        }
    }
    assert!(epochs < 4 || switched.iter().all(|&n| n > 0), "nothing was switched: {switched:?}");
    println!("{switched:?} switches of the policy and of the store");
    let (first, last) = (warm.unwrap_or_else(resident_bytes), resident_bytes());
    println!("epochs={epochs} verified={verified} fetched={fetched} warm={first} end={last}");
}

fn spawn(dir: &Path, seed: u64, length: Duration) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "as_a_child", "--nocapture"])
        .env("SAPWOOD_SOAK_DIR", dir)
        .env("SAPWOOD_SOAK_CHILD_MS", length.as_millis().to_string())
        .env("SAPWOOD_SEED", seed.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits for a child and reads the numbers of its last line.
fn outcome(child: Child) -> [u64; 5] {
    let out = child.wait_with_output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(out.status.success(), "{text}");
    let line = text.lines().find(|l| l.contains("epochs=")).unwrap();
    let of = |name: &str| {
        let at = line.find(name).unwrap() + name.len();
        line[at..].split_whitespace().next().unwrap().parse().unwrap()
    };
    ["epochs=", "verified=", "fetched=", "warm=", "end="].map(of)
}

fn setting() -> (u64, Duration) {
    let seed = variable("SAPWOOD_SEED").unwrap_or(7);
    let length = Duration::from_secs(variable("SAPWOOD_SOAK_S").unwrap_or(4));
    println!("SAPWOOD_SEED={seed} SAPWOOD_SOAK_S={}", length.as_secs());
    (seed, length)
}

/// What the other two start; by itself it has nothing to do.
#[test]
fn as_a_child() {
    if let Some(dir) = std::env::var_os("SAPWOOD_SOAK_DIR") {
        let length = Duration::from_millis(variable("SAPWOOD_SOAK_CHILD_MS").unwrap());
        child(&PathBuf::from(dir), variable("SAPWOOD_SEED").unwrap(), length);
    }
}

#[test]
fn memory_is_flat_and_pages_are_conserved() {
    let (seed, length) = setting();
    let dir = tempfile::tempdir().unwrap();
    let [epochs, verified, fetched, warm, end] = outcome(spawn(dir.path(), seed, length));
    println!(
        "{epochs} epochs, {verified} pages verified, {fetched} fetched, {warm} then {end} bytes resident"
    );
    assert!(verified > 0 && fetched > 0);
    // Two percent over hours; a run of seconds still fills pools of the allocator.
    let slack = if length >= Duration::from_secs(60) { warm / 50 } else { warm / 4 + (8 << 20) };
    assert!(end <= warm + slack, "resident memory grew from {warm} to {end} bytes");
}

#[test]
fn a_killed_process_leaves_a_store_that_tells_the_truth() {
    let (seed, length) = setting();
    let dir = tempfile::tempdir().unwrap();
    let mut rng = Rng(seed);
    let until = Instant::now() + length;
    let mut kills = 0;
    while kills < 3 || Instant::now() < until {
        let mut child = spawn(dir.path(), seed + kills, Duration::from_secs(3600));
        std::thread::sleep(Duration::from_millis(50 + rng.below(700) as u64));
        // A child that met a wrong byte has ended by itself.
        assert!(child.try_wait().unwrap().is_none(), "the child ended: {:?}", child.wait_with_output());
        child.kill().unwrap();
        child.wait().unwrap();
        kills += 1;
    }
    let [_, verified, fetched, ..] = outcome(spawn(dir.path(), seed + kills, Duration::from_secs(1)));
    println!("{kills} kills, then {verified} pages verified, {fetched} fetched");
    assert!(verified > 0 && fetched > 0);
}
