//! Mooncake as a store: the standalone real client of a node, spoken to from plain Rust.
//!
//! The real client is a process beside the engine. It maps the engine's memory (a memfd handed over on a local
//! socket) and moves bytes between that memory and the pool, one copy each way; calls and answers go over
//! loopback TCP. So every region must be shared memory ([`ArenaNeed::SharedFd`]); there is no pool
//! that could have come from another allocator.
//!
//! - **An unknown release is refused** when the store is opened: each function that carries data is called once
//!   with nothing to do, and the server checks the types ([`MooncakeError::UnknownRelease`]).
//! - **A lost real client** is an epoch: calls fail at once, a thread tries again, hands all regions over anew
//!   under a new client id, and only then calls go on. A call whose connection broke while bytes were being moved
//!   returns when the far side has ended or let go of the memory, not before.
//! - **Every object is sealed** ([`envelope`](super::envelope)) with a header that lies in shared memory of the
//!   store's own; payload and header travel as one object of two pieces, the header last, so nothing is copied to put
//!   them together. Checksums are computed while the call before is under way.
//! - **The pool evicts on its own**, protects what it reported for [`LEASE`], keeps the first of two puts under one
//!   key and loses objects with the client that held them. All of it is a miss here.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

mod calls;
mod conn;
#[cfg(feature = "mooncake-capi")]
pub mod embedded;
mod md5;
mod session;
mod wire;

pub use wire::RELEASE;

use self::calls::Service;
use self::session::{ITEMS_PER_CALL, Session};
use super::batch::{Call, Item, Outcome};
use super::envelope::{HEADER_BYTES, payload_crc};
use super::gate::{Gate, locked};
use super::regions::{RegionToken, RegisterError};
use super::stats::{Counters, Health, OpKind, StoreStats};
use super::{ArenaNeed, Caps, Overwrite, Store, StoreEpoch, StoreError, TransportCause};
use crate::backend::identity::{NamespaceDigest, StoreKey};
use crate::backend::region::{Region, RegionError};
use crate::base::containers::Map;

/// How long the pool protects an object that it has reported present, by default.
pub const LEASE: Duration = Duration::from_secs(10);

/// Objects below this many bytes are bound by work per object: measured at 64 MiB a batch, 64 KiB objects reach
/// 2/3 of the bandwidth of larger ones, 256 KiB all of it.
pub const OBJECT_BYTES_EFFICIENT: usize = 256 << 10;

/// Payload lengths remembered, so that a query need not ask for them. 40 bytes each.
const SIZES_MAX: usize = 1 << 17;

/// Payload bytes of a put that are summed up while the service looks which objects are there: as many as take about that
/// long. The sums of those that are there are of no use.
const SUMMED_WHILE_ASKED_BYTES: usize = 8 << 20;

/// First bytes of every object's name in the pool, which other users share. The number is that of the object's layout: 1 had
/// the header in front.
const NAME_PREFIX: &str = "sapwood2-";

/// Where the real client is and how to treat it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MooncakeConfig {
    /// Address of the real client's RPC port, on this node.
    pub client: SocketAddr,
    /// Name of its local socket without the leading NUL. Default: `@mooncake_client_PORT.sock`.
    pub ipc_name: Option<String>,
    /// Asks the pool to place objects in segments of this node first.
    pub prefer_same_node: bool,
    /// Calls of the store under way at a time, 1 to 256. More wait.
    pub calls_max: usize,
    /// Time for a connection, a hand-over, a ping.
    pub connect_wait_max: Duration,
    /// Time between two pings. The real client forgets who has not pinged for 10 s.
    pub ping_every: Duration,
    /// Time between two attempts to reach a lost real client.
    pub retry_every: Duration,
}

impl MooncakeConfig {
    /// Defaults for the real client at `client`.
    #[must_use]
    pub fn at(client: SocketAddr) -> MooncakeConfig {
        MooncakeConfig {
            client,
            ipc_name: None,
            prefer_same_node: false,
            calls_max: 16,
            connect_wait_max: Duration::from_secs(5),
            ping_every: Duration::from_secs(1),
            retry_every: Duration::from_millis(500),
        }
    }
}

/// Why the store could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MooncakeError {
    /// Nobody answers, or not in time.
    #[error("no real client of Mooncake at {address}: {cause}")]
    Unreachable {
        /// Where it should be.
        address: SocketAddr,
        /// What happened.
        cause: TransportCause,
    },
    /// The real client has other functions or types.
    #[error("the real client is not of release {RELEASE}: {function}: {cause}")]
    UnknownRelease {
        /// Function that was refused.
        function: &'static str,
        /// Answer of the server: remote error 4 is another type, 11 no such function.
        cause: TransportCause,
    },
    /// The real client did not map a segment.
    #[error("the real client refused a segment of {bytes} bytes with code {code}")]
    SegmentRefused {
        /// Bytes of the segment.
        bytes: u64,
        /// Code of the real client.
        code: i32,
    },
    /// A region of private memory, which no other process can map.
    #[error("a region of {bytes} bytes is not shared memory")]
    NotShared {
        /// Bytes of the region.
        bytes: u64,
    },
    /// The library can not be loaded, or lacks a function.
    #[error("cannot use {path:?}: {reason}")]
    Library {
        /// The library.
        path: std::path::PathBuf,
        /// What the loader said.
        reason: String,
    },
    /// The library could not join the pool.
    #[error("the library could not be set up, code {code}")]
    Setup {
        /// Its code.
        code: i32,
    },
    /// Memory for the headers could not be had.
    #[error("shared memory: {0}")]
    Memory(#[from] RegionError),
    /// The keeper thread could not be started, or the system gave no random number.
    #[error("cannot start: {0}")]
    Thread(std::io::Error),
}

/// A store in a Mooncake pool. See the [module](self).
#[derive(Debug)]
pub struct MooncakeStore {
    session: Arc<Session>,
    prefer_same_node: bool,
    counters: Counters,
    gate: Gate,
    /// Payload lengths by key, as last seen.
    sizes: Mutex<Map<StoreKey, usize>>,
}

impl MooncakeStore {
    /// Connects to the real client. Blocks for at most a few times `connect_wait_max`.
    pub fn open(config: MooncakeConfig) -> Result<MooncakeStore, MooncakeError> {
        let prefer_same_node = config.prefer_same_node;
        Ok(MooncakeStore {
            session: Session::open(config)?,
            prefer_same_node,
            counters: Counters::default(),
            gate: Gate::default(),
            sizes: Mutex::default(),
        })
    }

    fn service(&self) -> Service<'_> {
        Service { session: &self.session, prefer_same_node: self.prefer_same_node }
    }

    fn remember(&self, key: StoreKey, payload_bytes: usize) {
        let mut sizes = locked(&self.sizes);
        if sizes.len() >= SIZES_MAX {
            sizes.clear();
        }
        sizes.insert(key, payload_bytes);
    }

    /// Payload lengths of objects that are there, asked for only where they are not remembered.
    fn sizes_of(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
        let known: Vec<Option<usize>> = {
            let sizes = locked(&self.sizes);
            keys.iter().map(|k| sizes.get(k).copied()).collect()
        };
        let ask: Vec<StoreKey> =
            keys.iter().zip(&known).filter(|(_, n)| n.is_none()).map(|(k, _)| *k).collect();
        let mut asked = self.service().sizes(&ask, call).into_iter();
        let mut out = Vec::with_capacity(keys.len());
        for (key, known) in keys.iter().zip(known) {
            out.push(match known {
                Some(n) => Outcome::Ok(n),
                None => {
                    let outcome = asked.next().unwrap_or(Outcome::Transport(TransportCause::Protocol));
                    if let Outcome::Ok(n) = outcome {
                        self.remember(*key, n);
                    }
                    outcome
                }
            });
        }
        out
    }

    fn query_all(&self, keys: &[StoreKey], call: &Call, meanwhile: impl FnOnce()) -> Vec<Outcome> {
        let mut out = self.service().exist(keys, call, meanwhile);
        let there: Vec<StoreKey> =
            keys.iter().zip(&out).filter(|(_, o)| o.is_ok()).map(|(k, _)| *k).collect();
        let mut sizes = self.sizes_of(&there, call).into_iter();
        for o in out.iter_mut().filter(|o| o.is_ok()) {
            *o = sizes.next().unwrap_or(Outcome::Transport(TransportCause::Protocol));
        }
        out
    }

    /// Puts what is not there yet. An object of another length under the key makes way.
    fn put_all(&self, items: &[Item], call: &Call) -> Vec<Outcome> {
        // The pool takes two puts of one key in one batch and keeps neither whole: the first goes, the second
        // shares its fate.
        let mut first: Map<StoreKey, usize> = Map::default();
        let leads: Vec<usize> = (0..items.len()).map(|i| *first.entry(items[i].key).or_insert(i)).collect();
        let mut out: Vec<Outcome> = vec![Outcome::Cancelled; items.len()];
        let mut work = Vec::with_capacity(items.len());
        for (i, item) in items.iter().enumerate().filter(|(i, _)| leads[*i] == *i) {
            match self.session.regions.resolve(&item.spans) {
                Ok(memory) => work.push((i, memory)),
                Err(lost) => out[i] = lost,
            }
        }
        let keys: Vec<StoreKey> = work.iter().map(|(i, _)| items[*i].key).collect();
        let mut stale = Vec::new();
        let mut sums = Map::default();
        let sum_first = || {
            let mut bytes = 0_usize;
            for (i, memory) in &work {
                bytes = bytes.saturating_add(memory.len());
                if bytes > SUMMED_WHILE_ASKED_BYTES {
                    break;
                }
                sums.insert(items[*i].key, payload_crc(memory.runs()));
            }
        };
        let mut present = self.query_all(&keys, call, sum_first).into_iter();
        work.retain(|(i, memory)| match present.next().unwrap_or(Outcome::Missing) {
            Outcome::Ok(n) if n == memory.len() => {
                self.counters.put_present.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                out[*i] = Outcome::Ok(n);
                false
            }
            Outcome::Ok(_) => {
                stale.push(items[*i].key);
                true
            }
            Outcome::Missing => true,
            other => {
                out[*i] = other;
                false
            }
        });
        let _ = self.forget(&stale, call);
        let objects: Vec<_> = work.iter().map(|(i, memory)| (&items[*i], memory)).collect();
        for ((i, _), outcome) in work.iter().zip(self.service().put(&objects, &sums, call)) {
            if let Outcome::Ok(n) = outcome {
                self.remember(items[*i].key, n);
            }
            out[*i] = outcome;
        }
        for i in 0..items.len() {
            out[i] = out[leads[i]];
        }
        out
    }

    fn get_all(&self, items: &[Item], call: &Call) -> Vec<Outcome> {
        let mut out: Vec<Outcome> = vec![Outcome::Cancelled; items.len()];
        let mut work = Vec::with_capacity(items.len());
        for (i, item) in items.iter().enumerate() {
            match self.session.regions.resolve(&item.spans) {
                Ok(memory) => work.push((i, memory)),
                Err(lost) => out[i] = lost,
            }
        }
        let objects: Vec<_> = work.iter().map(|(i, memory)| (&items[*i], memory)).collect();
        let mut got = self.service().get(&objects, call);
        // A replacement or a removal may have run into the read. What is damaged is so the second time too.
        for (object, outcome) in objects.iter().zip(&mut got).filter(|(_, o)| **o == Outcome::Corrupt) {
            *outcome = self.service().get(std::slice::from_ref(object), call)[0];
        }
        let mut bad = Vec::new();
        for ((i, _), outcome) in work.iter().zip(got) {
            match outcome {
                Outcome::Ok(n) => self.remember(items[*i].key, n),
                Outcome::SizeMismatch { stored } => self.remember(items[*i].key, stored),
                Outcome::Corrupt => bad.push(items[*i].key),
                _ => {}
            }
            out[*i] = outcome;
        }
        let _ = self.forget(&bad, call);
        out
    }

    /// Removes objects, leased or not, and what is remembered of them.
    fn forget(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
        let out = self.service().remove(keys, call);
        let mut sizes = locked(&self.sizes);
        keys.iter().for_each(|k| {
            sizes.remove(k);
        });
        out
    }

    fn remove_all(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
        let sizes = self.query_all(keys, call, || ());
        let there: Vec<StoreKey> =
            keys.iter().zip(&sizes).filter(|(_, o)| o.is_ok()).map(|(k, _)| *k).collect();
        let mut removed = self.forget(&there, call).into_iter();
        sizes
            .into_iter()
            .map(|size| match size {
                Outcome::Ok(n) => match removed.next() {
                    Some(Outcome::Ok(_)) => Outcome::Ok(n),
                    Some(other) => other,
                    None => Outcome::Transport(TransportCause::Protocol),
                },
                other => other,
            })
            .collect()
    }

    /// Enters the store, runs a batch, counts what came out. Nothing is done once the call has stopped.
    fn batch<T>(
        &self,
        op: OpKind,
        of: &[T],
        call: &Call,
        run: impl FnOnce() -> Vec<Outcome>,
    ) -> Vec<Outcome> {
        let Some(_inside) = self.gate.enter() else { return vec![Outcome::Closed; of.len()] };
        let out = match call.stopped() {
            Some(stopped) => vec![stopped; of.len()],
            None if of.is_empty() => Vec::new(),
            None => run(),
        };
        self.counters.count(op, &out);
        out
    }
}

/// Name of an object in the pool.
fn name_of(key: &StoreKey) -> String {
    let mut name = String::with_capacity(NAME_PREFIX.len() + 64);
    name.push_str(NAME_PREFIX);
    name.push_str(&key.hex());
    name
}

/// What the names of a namespace's objects look like.
fn pattern_of(namespace: &NamespaceDigest) -> String {
    let tag: String = namespace.tag().iter().map(|b| format!("{b:02x}")).collect();
    format!("^{NAME_PREFIX}{tag}.*")
}

/// What a code of the pool means for an item.
fn outcome_of_code(code: i32) -> Outcome {
    match code {
        wire::code::MISSING | wire::code::NOT_READY => Outcome::Missing,
        wire::code::NO_SPACE => Outcome::NoSpace,
        wire::code::LEASED => Outcome::Busy,
        wire::code::INVALID => Outcome::AddressLost,
        other => Outcome::Transport(TransportCause::Remote(other)),
    }
}

impl Store for MooncakeStore {
    fn caps(&self) -> Caps {
        Caps {
            name: "mooncake",
            zero_copy: true,
            align: 1,
            object_bytes_efficient: OBJECT_BYTES_EFFICIENT,
            object_bytes_max: (u32::MAX as usize) - HEADER_BYTES,
            batch_items_efficient: ITEMS_PER_CALL,
            overwrite: Overwrite::KeepsOld,
            lease: Some(LEASE),
            evicts: true,
            durable: false,
            shared: true,
            arena: ArenaNeed::SharedFd,
        }
    }

    fn register(&self, region: &Arc<Region>) -> Result<RegionToken, RegisterError> {
        let _inside = self.gate.enter().ok_or(RegisterError::Closed)?;
        self.session.register(region)
    }

    fn unregister(&self, token: RegionToken) -> Result<(), RegisterError> {
        self.session.unregister(token)
    }

    fn query(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
        self.batch(OpKind::Query, keys, call, || self.query_all(keys, call, || ()))
    }

    /// The pool protects for [`LEASE`] what it reports present, and evicts first what has been unprotected for longest.
    fn touch(&self, keys: &[StoreKey], call: &Call) {
        if let Some(_inside) = self.gate.enter()
            && call.stopped().is_none()
        {
            self.service().exist(keys, call, || ());
        }
    }

    fn get(&self, items: &[Item], call: &Call) -> Vec<Outcome> {
        self.batch(OpKind::Get, items, call, || self.get_all(items, call))
    }

    fn put(&self, items: &[Item], call: &Call) -> Vec<Outcome> {
        self.batch(OpKind::Put, items, call, || self.put_all(items, call))
    }

    fn remove(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
        self.batch(OpKind::Remove, keys, call, || self.remove_all(keys, call))
    }

    /// Names begin with the tag of the namespace, 8 bytes of a digest; two namespaces of one tag would be cleared
    /// together.
    fn clear(&self, namespace: NamespaceDigest, call: &Call) -> Result<u64, StoreError> {
        let _inside = self.gate.enter().ok_or(StoreError::Closed)?;
        let removed = self.service().remove_matching(&pattern_of(&namespace), call)?;
        locked(&self.sizes).clear();
        self.counters.removed.fetch_add(removed, std::sync::atomic::Ordering::Relaxed);
        Ok(removed)
    }

    fn sync(&self, _call: &Call) -> Result<(), StoreError> {
        self.gate.enter().map(drop).ok_or(StoreError::Closed)
    }

    fn health(&self) -> Health {
        if self.gate.is_closed() { Health::Closed } else { self.session.health() }
    }

    fn stats(&self) -> StoreStats {
        self.counters.snapshot()
    }

    fn epoch(&self) -> StoreEpoch {
        StoreEpoch(self.session.epoch())
    }

    fn close(&self, deadline: Instant) -> Result<(), StoreError> {
        self.gate.close(deadline)?;
        self.session.close();
        Ok(())
    }
}

impl Drop for MooncakeStore {
    fn drop(&mut self) {
        // Nobody is inside: a call borrows the store.
        self.session.close();
    }
}
