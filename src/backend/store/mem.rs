//! Objects in a map: the reference for the contract, and a store for tests.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::batch::{Call, Item, Outcome};
use super::envelope::{HEADER_BYTES, Header};
use super::gate::{Gate, locked};
use super::regions::{RegionToken, Regions, RegisterError};
use super::sealed::{seal, unseal};
use super::stats::{Counters, Health, OpKind, StoreStats};
use super::{ArenaNeed, Caps, Overwrite, Store, StoreEpoch, StoreError};
use crate::backend::identity::{NamespaceDigest, StoreKey};
use crate::backend::region::Region;
use crate::base::containers::Map;

#[derive(Debug, Default)]
struct Objects {
    by_key: Map<StoreKey, Arc<Vec<u8>>>,
    bytes: usize,
}

/// A store in this process's memory. Keeps everything until it is full, then answers `NoSpace`.
#[derive(Debug)]
pub struct MemStore {
    bytes_max: usize,
    objects: Mutex<Objects>,
    regions: Regions,
    counters: Counters,
    gate: Gate,
    epoch: AtomicU64,
}

impl MemStore {
    /// A store of at most `bytes_max` bytes, envelopes included.
    #[must_use]
    pub fn new(bytes_max: usize) -> MemStore {
        MemStore {
            bytes_max,
            objects: Mutex::default(),
            regions: Regions::default(),
            counters: Counters::default(),
            gate: Gate::default(),
            epoch: AtomicU64::new(1),
        }
    }

    /// Changes the sealed bytes of an object, for tests: flip, cut, extend, replace. `false` without it.
    pub fn tamper(&self, key: &StoreKey, change: impl FnOnce(&mut Vec<u8>)) -> bool {
        let mut o = locked(&self.objects);
        let Some(sealed) = o.by_key.get_mut(key) else { return false };
        let before = sealed.len();
        change(Arc::make_mut(sealed));
        let after = sealed.len();
        o.bytes = o.bytes - before + after;
        true
    }

    /// Sealed bytes of an object, for tests.
    #[must_use]
    pub fn sealed(&self, key: &StoreKey) -> Option<Vec<u8>> {
        locked(&self.objects).by_key.get(key).map(|s| s.to_vec())
    }

    /// Behaves as after a reconnect to a far side that lost everything.
    pub fn lose_everything(&self) {
        *locked(&self.objects) = Objects::default();
        self.epoch.fetch_add(1, Relaxed);
    }

    fn each<T>(&self, op: OpKind, of: &[T], call: &Call, mut one: impl FnMut(&T) -> Outcome) -> Vec<Outcome> {
        let Some(_inside) = self.gate.enter() else { return vec![Outcome::Closed; of.len()] };
        let out: Vec<_> = of.iter().map(|x| call.stopped().unwrap_or_else(|| one(x))).collect();
        self.counters.count(op, &out);
        out
    }

    fn get_one(&self, item: &Item) -> Outcome {
        let memory = match self.regions.resolve(&item.spans) {
            Ok(m) => m,
            Err(lost) => return lost,
        };
        let Some(sealed) = locked(&self.objects).by_key.get(&item.key).cloned() else {
            return Outcome::Missing;
        };
        let outcome = unseal(&sealed, item, &memory);
        if outcome == Outcome::Corrupt {
            self.put_aside(&item.key, &sealed);
        }
        outcome
    }

    /// Drops an object that failed its checks, unless it was replaced meanwhile.
    fn put_aside(&self, key: &StoreKey, bad: &Arc<Vec<u8>>) {
        let mut o = locked(&self.objects);
        if o.by_key.get(key).is_some_and(|now| Arc::ptr_eq(now, bad)) {
            o.by_key.remove(key);
            o.bytes -= bad.len();
        }
    }

    fn put_one(&self, item: &Item) -> Outcome {
        let memory = match self.regions.resolve(&item.spans) {
            Ok(m) => m,
            Err(lost) => return lost,
        };
        let sealed_bytes = HEADER_BYTES.saturating_add(memory.len());
        if locked(&self.objects).by_key.get(&item.key).is_some_and(|s| s.len() == sealed_bytes) {
            self.counters.put_present.fetch_add(1, Relaxed);
            return Outcome::Ok(memory.len());
        }
        let sealed = Arc::new(seal(item, &memory));
        let mut o = locked(&self.objects);
        if o.bytes.saturating_add(sealed.len()) > self.bytes_max {
            return Outcome::NoSpace;
        }
        o.bytes += sealed.len();
        if let Some(old) = o.by_key.insert(item.key, sealed) {
            o.bytes -= old.len();
        }
        Outcome::Ok(memory.len())
    }
}

impl Store for MemStore {
    fn caps(&self) -> Caps {
        Caps {
            name: "mem",
            zero_copy: false,
            align: 1,
            object_bytes_efficient: 1,
            object_bytes_max: usize::MAX - HEADER_BYTES,
            batch_items_efficient: 1,
            overwrite: Overwrite::KeepsOld,
            lease: None,
            evicts: false,
            durable: false,
            shared: false,
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
        self.each(OpKind::Query, keys, call, |key| match locked(&self.objects).by_key.get(key) {
            Some(sealed) => Outcome::Ok(sealed.len().saturating_sub(HEADER_BYTES)),
            None => Outcome::Missing,
        })
    }

    fn get(&self, items: &[Item], call: &Call) -> Vec<Outcome> {
        self.each(OpKind::Get, items, call, |item| self.get_one(item))
    }

    fn put(&self, items: &[Item], call: &Call) -> Vec<Outcome> {
        self.each(OpKind::Put, items, call, |item| self.put_one(item))
    }

    fn remove(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
        self.each(OpKind::Remove, keys, call, |key| {
            let mut o = locked(&self.objects);
            match o.by_key.remove(key) {
                Some(sealed) => {
                    o.bytes -= sealed.len();
                    Outcome::Ok(sealed.len().saturating_sub(HEADER_BYTES))
                }
                None => Outcome::Missing,
            }
        })
    }

    fn clear(&self, namespace: NamespaceDigest, _call: &Call) -> Result<u64, StoreError> {
        let _inside = self.gate.enter().ok_or(StoreError::Closed)?;
        let mut o = locked(&self.objects);
        let before = o.by_key.len();
        // An object whose header is damaged belongs to nobody; its key's tag still says whose it was.
        o.by_key.retain(|key, sealed| match Header::decode(sealed) {
            Ok(h) => !h.space.is_cleared_with(key, &namespace),
            Err(_) => key.tag() != namespace.tag(),
        });
        o.bytes = o.by_key.values().map(|s| s.len()).sum();
        let removed = (before - o.by_key.len()) as u64;
        self.counters.removed.fetch_add(removed, Relaxed);
        Ok(removed)
    }

    fn sync(&self, _call: &Call) -> Result<(), StoreError> {
        self.gate.enter().map(drop).ok_or(StoreError::Closed)
    }

    fn health(&self) -> Health {
        if self.gate.is_closed() { Health::Closed } else { Health::Up }
    }

    fn stats(&self) -> StoreStats {
        let o = locked(&self.objects);
        StoreStats {
            objects: o.by_key.len() as u64,
            bytes: o.bytes as u64,
            bytes_max: self.bytes_max as u64,
            ..self.counters.snapshot()
        }
    }

    fn epoch(&self) -> StoreEpoch {
        StoreEpoch(self.epoch.load(Relaxed))
    }

    fn close(&self, deadline: Instant) -> Result<(), StoreError> {
        self.gate.close(deadline)?;
        self.regions.clear();
        Ok(())
    }
}
