//! Pages in a Redis server, spoken to directly: values go between the socket and the pages with one copy.
//!
//! A key is `PREFIX:` and 64 hex digits; a value is a sealed object. A value that fails its checks is renamed
//! to `PREFIX:bad:` and its digits, and expires after a day. Whether objects survive the server, and what it
//! throws away when its memory is full, is the server's configuration: this store promises neither.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

mod link;

pub use link::RedisAddress;

use link::{Link, LinkError, Refusal, Reply};

use super::batch::{Call, Item, Outcome};
use super::envelope::{HEADER_BYTES, Header, payload_crc};
use super::gate::{Gate, locked};
use super::regions::{HeldSpans, RegionToken, Regions, RegisterError};
use super::sealed::outcome_of;
use super::stats::{Counters, Health, OpKind, StoreStats};
use super::{ArenaNeed, Caps, Overwrite, Store, StoreEpoch, StoreError, TransportCause};
use crate::backend::identity::{NamespaceDigest, StoreKey};
use crate::backend::region::Region;

/// Configuration of a Redis store.
#[derive(Clone, Debug)]
pub struct RedisConfig {
    /// Server.
    pub address: RedisAddress,
    /// First part of every key: letters, digits, `.`, `-`, `_`; at most 64.
    pub prefix: String,
    /// Password of `user`, if the server wants one.
    pub password: Option<String>,
    /// User, if it is not the default one.
    pub user: Option<String>,
    /// Number of the database.
    pub database: u32,
    /// Bound on a call that has no deadline of its own, connecting included.
    pub call_max: Duration,
}

impl RedisConfig {
    /// Defaults for a server.
    #[must_use]
    pub fn new(address: RedisAddress) -> RedisConfig {
        RedisConfig {
            address,
            prefix: "sapwood".into(),
            password: None,
            user: None,
            database: 0,
            call_max: Duration::from_secs(10),
        }
    }
}

/// Commands written before their replies are read. The replies to as many SETs fit into any socket buffer,
/// so that neither side can wait for the other.
const WINDOW: usize = 64;

/// A Redis store. See the module.
#[derive(Debug)]
pub struct RedisStore {
    config: RedisConfig,
    idle: Mutex<Vec<Link>>,
    regions: Regions,
    counters: Counters,
    gate: Gate,
    up: AtomicBool,
    epoch: AtomicU64,
}

impl RedisStore {
    /// Connects once, to find out whether the server answers and lets us in.
    pub fn open(config: RedisConfig) -> Result<RedisStore, StoreError> {
        let fine = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        if config.prefix.is_empty() || config.prefix.len() > 64 || !config.prefix.chars().all(fine) {
            let source = std::io::Error::from_raw_os_error(libc::EINVAL);
            return Err(StoreError::Io { op: "check the prefix", source });
        }
        let store = RedisStore {
            config,
            idle: Mutex::default(),
            regions: Regions::default(),
            counters: Counters::default(),
            gate: Gate::default(),
            up: AtomicBool::new(true),
            epoch: AtomicU64::new(1),
        };
        let link = store.link(&Call::unbounded()).map_err(|e| error_of("connect", e))?;
        store.give_back(link);
        Ok(store)
    }

    fn deadline(&self, call: &Call) -> Instant {
        let ours = Instant::now() + self.config.call_max;
        call.deadline.map_or(ours, |theirs| theirs.min(ours))
    }

    fn link(&self, call: &Call) -> Result<Link, LinkError> {
        let deadline = self.deadline(call);
        if let Some(mut link) = locked(&self.idle).pop() {
            link.until(deadline);
            return Ok(link);
        }
        let made = self.connect(deadline);
        if made.is_ok() && !self.up.swap(true, Relaxed) {
            // The server may have been restarted, without what it held.
            self.epoch.fetch_add(1, Relaxed);
        }
        made
    }

    fn connect(&self, deadline: Instant) -> Result<Link, LinkError> {
        let mut link = Link::connect(&self.config.address, deadline)?;
        let database = self.config.database.to_string();
        match (&self.config.user, &self.config.password) {
            (Some(user), Some(p)) => link.command(&[b"AUTH", user.as_bytes(), p.as_bytes()]),
            (None, Some(p)) => link.command(&[b"AUTH", p.as_bytes()]),
            (_, None) => link.command(&[b"PING"]),
        }
        link.command(&[b"SELECT", database.as_bytes()]);
        link.flush()?;
        link.reply()?;
        link.reply()?;
        Ok(link)
    }

    fn give_back(&self, link: Link) {
        locked(&self.idle).push(link);
    }

    /// Ends what is left of a batch after `why`, and decides about the connection.
    fn settle(&self, link: Link, out: &mut [Option<Outcome>], result: Result<(), LinkError>) {
        match result {
            Ok(()) => self.give_back(link),
            Err(why) => self.fail(out, why),
        }
    }

    fn fail(&self, out: &mut [Option<Outcome>], why: LinkError) {
        if why == LinkError::Broken || why == LinkError::Protocol {
            // Other idle connections are as likely broken; the next call finds out with a fresh one.
            self.up.store(false, Relaxed);
            locked(&self.idle).clear();
        }
        out.iter_mut().filter(|o| o.is_none()).for_each(|o| *o = Some(outcome(why)));
    }

    fn name(&self, key: &StoreKey) -> Vec<u8> {
        format!("{}:{}", self.config.prefix, key.hex()).into_bytes()
    }

    /// Runs a batch in windows over one connection.
    fn batch<T>(
        &self,
        op: OpKind,
        of: &[T],
        call: &Call,
        window: impl Fn(&mut Link, &[T], &mut [Option<Outcome>]) -> Result<(), LinkError>,
    ) -> Vec<Outcome> {
        let Some(_inside) = self.gate.enter() else { return vec![Outcome::Closed; of.len()] };
        let mut out = vec![None; of.len()];
        if let Some(stopped) = call.stopped() {
            out.fill(Some(stopped));
        } else if !of.is_empty() {
            match self.link(call) {
                Err(why) => self.fail(&mut out, why),
                Ok(mut link) => {
                    let mut result = Ok(());
                    for (of, out) in of.chunks(WINDOW).zip(out.chunks_mut(WINDOW)) {
                        if let Some(stopped) = call.stopped() {
                            out.fill(Some(stopped));
                        } else {
                            result = window(&mut link, of, out);
                        }
                        if result.is_err() {
                            break;
                        }
                    }
                    self.settle(link, &mut out, result);
                }
            }
        }
        let out: Vec<_> = out.into_iter().map(|o| o.unwrap_or(outcome(LinkError::Protocol))).collect();
        self.counters.count(op, &out);
        out
    }

    fn lengths(&self, link: &mut Link, keys: &[StoreKey]) -> Result<Vec<Outcome>, LinkError> {
        for key in keys {
            link.command(&[b"STRLEN", &self.name(key)]);
        }
        link.flush()?;
        keys.iter().map(|_| length(link.reply())).collect()
    }

    fn get_window(
        &self,
        link: &mut Link,
        items: &[Item],
        out: &mut [Option<Outcome>],
    ) -> Result<(), LinkError> {
        let memory: Vec<_> = items.iter().map(|i| self.regions.resolve(&i.spans)).collect();
        for (item, _) in items.iter().zip(&memory).filter(|(_, m)| m.is_ok()) {
            link.command(&[b"GET", &self.name(&item.key)]);
        }
        link.flush()?;
        let mut bad = Vec::new();
        for ((item, memory), out) in items.iter().zip(memory).zip(out) {
            *out = Some(match memory {
                Err(lost) => lost,
                Ok(memory) => match link.bulk() {
                    Ok(None) => Outcome::Missing,
                    Ok(Some(len)) => receive(link, len, item, &memory)?,
                    Err(LinkError::Refused(r)) => refused(r),
                    Err(e) => return Err(e),
                },
            });
            if *out == Some(Outcome::Corrupt) {
                bad.push(item.key);
            }
        }
        self.put_aside(link, &bad)
    }

    fn put_aside(&self, link: &mut Link, bad: &[StoreKey]) -> Result<(), LinkError> {
        for key in bad {
            tracing::warn!(?key, "a value failed its checks and was put aside");
            let to = format!("{}:bad:{}", self.config.prefix, key.hex());
            link.command(&[b"RENAME", &self.name(key), to.as_bytes()]);
            link.command(&[b"EXPIRE", to.as_bytes(), b"86400"]);
        }
        link.flush()?;
        for _ in 0..bad.len() * 2 {
            match link.reply() {
                // Somebody else has removed it.
                Ok(_) | Err(LinkError::Refused(_)) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    fn put_window(
        &self,
        link: &mut Link,
        items: &[Item],
        out: &mut [Option<Outcome>],
    ) -> Result<(), LinkError> {
        let keys: Vec<_> = items.iter().map(|i| i.key).collect();
        let there = self.lengths(link, &keys)?;
        let mut sent = vec![false; items.len()];
        for (((item, there), out), sent) in items.iter().zip(there).zip(&mut *out).zip(&mut sent) {
            match self.regions.resolve(&item.spans) {
                Err(lost) => *out = Some(lost),
                Ok(memory) if there == Outcome::Ok(memory.len()) => {
                    self.counters.put_present.fetch_add(1, Relaxed);
                    *out = Some(there);
                }
                Ok(memory) => {
                    let len = memory.len();
                    let header = Header::new(item.key, item.space, len as u64, payload_crc(memory.runs()));
                    link.set(&self.name(&item.key), &header.encode(), &memory)?;
                    *sent = true;
                }
            }
        }
        link.flush()?;
        for ((item, out), _) in items.iter().zip(out).zip(sent).filter(|(_, sent)| *sent) {
            *out = Some(match link.reply() {
                Ok(Reply::Simple) => Outcome::Ok(item.len()),
                Ok(_) => return Err(LinkError::Protocol),
                Err(LinkError::Refused(r)) => refused(r),
                Err(e) => return Err(e),
            });
        }
        Ok(())
    }

    fn remove_window(
        &self,
        link: &mut Link,
        keys: &[StoreKey],
        out: &mut [Option<Outcome>],
    ) -> Result<(), LinkError> {
        for key in keys {
            link.command(&[b"STRLEN", &self.name(key)]);
            link.command(&[b"UNLINK", &self.name(key)]);
        }
        link.flush()?;
        for out in out {
            let length = length(link.reply())?;
            *out = Some(match link.reply() {
                Ok(Reply::Int(0)) => Outcome::Missing,
                Ok(_) => length,
                Err(LinkError::Refused(r)) => refused(r),
                Err(e) => return Err(e),
            });
        }
        Ok(())
    }

    /// One step of a scan: removes what is of the namespace among the keys found.
    fn clear_step(
        &self,
        link: &mut Link,
        cursor: &[u8],
        namespace: NamespaceDigest,
    ) -> Result<(Vec<u8>, u64), LinkError> {
        let tag: String = namespace.tag().iter().map(|b| format!("{b:02x}")).collect();
        let pattern = format!("{}:{tag}*", self.config.prefix);
        link.command(&[b"SCAN", cursor, b"MATCH", pattern.as_bytes(), b"COUNT", b"1000"]);
        link.flush()?;
        let Reply::List(parts) = link.reply()? else { return Err(LinkError::Protocol) };
        let [Reply::Bulk(Some(next)), Reply::List(found)] = parts.as_slice() else {
            return Err(LinkError::Protocol);
        };
        let names: Vec<&Vec<u8>> =
            found.iter().filter_map(|r| if let Reply::Bulk(Some(n)) = r { Some(n) } else { None }).collect();
        let end = (HEADER_BYTES - 1).to_string();
        for name in &names {
            link.command(&[b"GETRANGE", name, b"0", end.as_bytes()]);
        }
        link.flush()?;
        let mut gone = Vec::new();
        for name in names {
            if let Reply::Bulk(Some(bytes)) = link.reply()? {
                // The tag found it; the digest decides. What has no readable header is nobody else's.
                if Header::decode(&bytes).map_or(true, |h| h.space.is_cleared_with(&h.key, &namespace)) {
                    gone.push(name);
                }
            }
        }
        for name in &gone {
            link.command(&[b"UNLINK", name]);
        }
        link.flush()?;
        let mut removed = 0;
        for _ in &gone {
            if let Reply::Int(n) = link.reply()? {
                removed += u64::try_from(n).unwrap_or(0);
            }
        }
        Ok((next.clone(), removed))
    }
}

/// Reads a value into a page and checks it.
fn receive(link: &mut Link, len: usize, item: &Item, memory: &HeldSpans) -> Result<Outcome, LinkError> {
    let mut head = Vec::with_capacity(HEADER_BYTES);
    link.take(len.min(HEADER_BYTES), |b| head.extend_from_slice(b))?;
    let payload = len - head.len();
    let fits = payload == memory.len();
    let (mut at, mut crc) = (0, 0);
    link.take(payload, |piece| {
        if fits {
            memory.fill(at, piece);
            at += piece.len();
        }
        crc = crate::backend::crc::crc32c_append(crc, piece);
    })?;
    link.take_end()?;
    let checked = Header::decode(&head).and_then(|h| h.check(&item.key, &item.space).map(|()| h));
    Ok(match checked {
        Err(defect) => outcome_of(defect),
        Ok(h) if h.payload_bytes != payload as u64 || h.payload_crc != crc => Outcome::Corrupt,
        Ok(_) if !fits => Outcome::SizeMismatch { stored: payload },
        Ok(_) => Outcome::Ok(payload),
    })
}

/// What a STRLEN says about a sealed object.
fn length(reply: Result<Reply, LinkError>) -> Result<Outcome, LinkError> {
    match reply {
        Ok(Reply::Int(n)) => match usize::try_from(n) {
            Ok(0) => Ok(Outcome::Missing),
            Ok(n) => Ok(Outcome::Ok(n.saturating_sub(HEADER_BYTES))),
            Err(_) => Err(LinkError::Protocol),
        },
        Ok(_) => Err(LinkError::Protocol),
        Err(LinkError::Refused(r)) => Ok(refused(r)),
        Err(e) => Err(e),
    }
}

fn refused(refusal: Refusal) -> Outcome {
    match refusal {
        Refusal::Full => Outcome::NoSpace,
        Refusal::Busy => Outcome::Busy,
        Refusal::Other => Outcome::Transport(TransportCause::Remote(0)),
    }
}

fn outcome(why: LinkError) -> Outcome {
    match why {
        LinkError::Timeout => Outcome::Timeout,
        LinkError::Broken => Outcome::Transport(TransportCause::Disconnected),
        LinkError::Protocol => Outcome::Transport(TransportCause::Protocol),
        LinkError::Refused(r) => refused(r),
    }
}

fn error_of(op: &'static str, why: LinkError) -> StoreError {
    match outcome(why) {
        Outcome::Timeout => StoreError::Timeout,
        Outcome::Busy => StoreError::Busy,
        Outcome::Transport(cause) => StoreError::Remote { op, cause },
        _ => StoreError::Remote { op, cause: TransportCause::Remote(0) },
    }
}

impl Store for RedisStore {
    fn caps(&self) -> Caps {
        Caps {
            name: "redis",
            zero_copy: false,
            align: 1,
            object_bytes_efficient: 64 << 10,
            object_bytes_max: (512 << 20) - HEADER_BYTES,
            batch_items_efficient: WINDOW,
            overwrite: Overwrite::KeepsOld,
            lease: None,
            evicts: true,
            durable: false,
            shared: true,
            arena: ArenaNeed::AnyMemory,
        }
    }

    fn register(&self, region: &Arc<Region>) -> Result<RegionToken, RegisterError> {
        let _inside = self.gate.enter().ok_or(RegisterError::Closed)?;
        Ok(self.regions.register(region))
    }

    fn unregister(&self, token: RegionToken) -> Result<(), RegisterError> {
        self.regions.unregister(token)
    }

    fn query(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
        self.batch(OpKind::Query, keys, call, |link, keys, out| {
            let lengths = self.lengths(link, keys)?;
            out.iter_mut().zip(lengths).for_each(|(out, l)| *out = Some(l));
            Ok(())
        })
    }

    /// Asking for a value's length counts as its use.
    fn touch(&self, keys: &[StoreKey], call: &Call) {
        self.query(keys, call);
    }

    fn get(&self, items: &[Item], call: &Call) -> Vec<Outcome> {
        self.batch(OpKind::Get, items, call, |link, items, out| self.get_window(link, items, out))
    }

    fn put(&self, items: &[Item], call: &Call) -> Vec<Outcome> {
        self.batch(OpKind::Put, items, call, |link, items, out| self.put_window(link, items, out))
    }

    fn remove(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
        self.batch(OpKind::Remove, keys, call, |link, keys, out| self.remove_window(link, keys, out))
    }

    fn clear(&self, namespace: NamespaceDigest, call: &Call) -> Result<u64, StoreError> {
        let _inside = self.gate.enter().ok_or(StoreError::Closed)?;
        let mut link = self.link(call).map_err(|e| error_of("clear", e))?;
        let mut cursor = b"0".to_vec();
        let mut removed = 0;
        loop {
            match call.stopped() {
                Some(Outcome::Cancelled) => return Err(StoreError::Cancelled),
                Some(_) => return Err(StoreError::Timeout),
                None => {}
            }
            // Each step has a bound of its own: a large server takes many.
            link.until(self.deadline(call));
            let (next, n) = self.clear_step(&mut link, &cursor, namespace).map_err(|e| {
                self.fail(&mut [], e);
                error_of("clear", e)
            })?;
            removed += n;
            self.counters.removed.fetch_add(n, Relaxed);
            if next == b"0" {
                self.give_back(link);
                return Ok(removed);
            }
            cursor = next;
        }
    }

    fn sync(&self, _call: &Call) -> Result<(), StoreError> {
        self.gate.enter().map(drop).ok_or(StoreError::Closed)
    }

    fn health(&self) -> Health {
        match (self.gate.is_closed(), self.up.load(Relaxed)) {
            (true, _) => Health::Closed,
            (false, true) => Health::Up,
            (false, false) => Health::Down,
        }
    }

    fn stats(&self) -> StoreStats {
        self.counters.snapshot()
    }

    fn epoch(&self) -> StoreEpoch {
        StoreEpoch(self.epoch.load(Relaxed))
    }

    fn close(&self, deadline: Instant) -> Result<(), StoreError> {
        self.gate.close(deadline)?;
        locked(&self.idle).clear();
        self.regions.clear();
        Ok(())
    }
}
