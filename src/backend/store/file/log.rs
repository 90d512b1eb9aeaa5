//! The log: where the next record goes, what is where, and what is thrown away for it.
//!
//! Lock order: `barrier`, `syncing`, `tail`, `index`, `dirty`. The index is never held across I/O.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockWriteGuard, TryLockError};
use std::time::Duration;

use super::FileConfig;
use super::root::Root;
use super::segment::{self, Entry, Segment, decode_index, id_of, index_name};
use crate::backend::identity::{NamespaceDigest, Space, StoreKey};
use crate::backend::store::batch::{Call, Outcome};
use crate::backend::store::envelope::Kind;
use crate::backend::store::gate::locked;
use crate::backend::store::stats::Counters;
use crate::base::containers::Map;

/// Where a page lies. 16 bytes, so that a million pages cost about 100 MB with their keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Loc {
    pub(super) segment: u32,
    pub(super) unit: u32,
    pub(super) payload: u32,
    pub(super) space: u32,
}

/// What is where.
#[derive(Debug, Default)]
pub(super) struct Index {
    pub(super) pages: Map<StoreKey, Loc>,
    pub(super) segments: BTreeMap<u32, Arc<Segment>>,
    spaces: Vec<Space>,
    space_ids: Map<Space, u32>,
}

impl Index {
    /// The number of a space; spaces are few and live as long as the store.
    pub(super) fn space_id(&mut self, space: Space) -> u32 {
        *self.space_ids.entry(space).or_insert_with(|| {
            self.spaces.push(space);
            self.spaces.len() as u32 - 1
        })
    }

    pub(super) fn space(&self, id: u32) -> Option<Space> {
        self.spaces.get(id as usize).copied()
    }

    /// Sets or replaces a page, which lies in `segment`, and keeps the live counts.
    pub(super) fn insert_in(&mut self, segment: &Segment, key: StoreKey, loc: Loc) {
        segment.live.fetch_add(1, Relaxed);
        if let Some(old) = self.pages.insert(key, loc) {
            self.live_less(old.segment);
        }
    }

    pub(super) fn remove(&mut self, key: &StoreKey) -> Option<Loc> {
        let loc = self.pages.remove(key)?;
        self.live_less(loc.segment);
        Some(loc)
    }

    fn live_less(&self, segment: u32) {
        if let Some(s) = self.segments.get(&segment) {
            s.live.fetch_sub(1, Relaxed);
        }
    }

    /// Bytes of blocks that all segments hold.
    pub(super) fn disk_bytes(&self) -> u64 {
        self.segments.values().map(|s| s.disk_bytes.load(Relaxed)).sum()
    }
}

/// The end of the log.
#[derive(Debug, Default)]
pub(super) struct Tail {
    active: Option<(Arc<Segment>, u64)>,
    next_id: u32,
}

/// What the next sync has to do.
#[derive(Debug, Default)]
struct Dirty {
    /// Segments written to.
    segments: BTreeMap<u32, Arc<Segment>>,
    names: bool,
}

/// Why there is no place for a record.
#[derive(Debug)]
pub(super) enum NoPlace {
    /// The cap, the free-space floor or the file system.
    Full,
    /// The system failed otherwise.
    Io(io::Error),
}

/// A place that was given out. Whoever has it must end the write.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) segment: Arc<Segment>,
    pub(super) offset: u64,
}

/// A segment to which nothing is added any more, and what of it is used.
#[derive(Debug)]
pub(super) struct Spent {
    pub(super) segment: Arc<Segment>,
    pub(super) used: u64,
}

/// The segment that goes next.
#[derive(Debug)]
pub(super) struct Victim {
    pub(super) segment: Arc<Segment>,
    /// Its pages that were read, in the order of the file.
    pub(super) hot: Vec<(StoreKey, Loc)>,
}

/// The log of one store.
#[derive(Debug)]
pub(super) struct Log {
    pub(super) root: Root,
    pub(super) config: FileConfig,
    /// Puts hold it shared from place to commit, removals alone: so the order of the records of one key is
    /// the order of their effects, also after a restart.
    pub(super) barrier: RwLock<()>,
    tail: Mutex<Tail>,
    dirty: Mutex<Dirty>,
    /// Held by the one who syncs: whoever comes second must not return before what the first took over is
    /// on the disk.
    syncing: Mutex<()>,
    pub(super) index: Mutex<Index>,
    pub(super) counters: Counters,
}

impl Log {
    pub(super) fn new(root: Root, config: FileConfig, index: Index) -> Log {
        let next_id = index.segments.last_key_value().map_or(1, |(&id, _)| id.saturating_add(1));
        Log {
            root,
            config,
            barrier: RwLock::default(),
            tail: Mutex::new(Tail { next_id, ..Tail::default() }),
            dirty: Mutex::default(),
            syncing: Mutex::default(),
            index: Mutex::new(index),
            counters: Counters::default(),
        }
    }

    /// Waits until no put is between place and commit, and keeps new ones out; not beyond the limits of the
    /// call, if it has any.
    pub(super) fn alone(&self, call: &Call) -> Result<RwLockWriteGuard<'_, ()>, Outcome> {
        // A put that hangs on the disk holds the barrier. The lock has no timed form; half a millisecond is
        // nothing beside the write that is waited for.
        const LOOK: Duration = Duration::from_micros(500);
        loop {
            if let Some(stopped) = call.stopped() {
                return Err(stopped);
            }
            if call.deadline.is_none() {
                return Ok(self.barrier.write().unwrap_or_else(PoisonError::into_inner));
            }
            match self.barrier.try_write() {
                Ok(alone) => return Ok(alone),
                Err(TryLockError::Poisoned(p)) => return Ok(p.into_inner()),
                Err(TryLockError::WouldBlock) => std::thread::sleep(LOOK),
            }
        }
    }

    /// Gives out the next place of the log. The second value is a segment that became full by it and
    /// is to be sealed.
    pub(super) fn place(&self, payload: u64) -> Result<(Place, Option<Spent>), NoPlace> {
        let whole = segment::head_bytes(self.config.align).saturating_mul(2).saturating_add(payload);
        if whole > self.config.segment_bytes {
            return Err(NoPlace::Full);
        }
        let mut tail = locked(&self.tail);
        let mut spent = None;
        let fits = |(seg, at): &(Arc<Segment>, u64)| {
            at.checked_add(seg.head.record_bytes(payload)).is_some_and(|end| end <= self.config.segment_bytes)
        };
        if !tail.active.as_ref().is_some_and(fits) {
            let fresh = self.new_segment(&mut tail)?;
            let old = tail.active.replace((Arc::clone(&fresh), fresh.head.header_bytes()));
            spent = old.map(|(segment, used)| Spent { segment, used });
        }
        let Some((segment, at)) = tail.active.as_mut() else { return Err(NoPlace::Full) };
        let place = Place { segment: Arc::clone(segment), offset: *at };
        *at += segment.head.record_bytes(payload);
        place.segment.begin_write();
        let segment = Arc::clone(&place.segment);
        locked(&self.dirty).segments.entry(segment.head.id).or_insert(segment);
        Ok((place, spent))
    }

    fn new_segment(&self, tail: &mut Tail) -> Result<Arc<Segment>, NoPlace> {
        let bytes = self.config.segment_bytes;
        let keep = tail.active.as_ref().map(|(s, _)| s.head.id);
        loop {
            let held = locked(&self.index).disk_bytes();
            let free = self.root.free_bytes().map_err(NoPlace::Io)?;
            let over_cap = held.saturating_add(bytes) > self.config.bytes_max;
            let under_floor = free < bytes.saturating_add(self.config.free_bytes_min);
            if !over_cap && !under_floor {
                let made = Segment::create(
                    &self.root,
                    tail.next_id,
                    self.config.align,
                    bytes,
                    self.config.io == super::IoMode::Direct,
                );
                match made {
                    Ok(seg) => {
                        tail.next_id = tail.next_id.checked_add(1).ok_or(NoPlace::Full)?;
                        locked(&self.dirty).names = true;
                        let seg = Arc::new(seg);
                        locked(&self.index).segments.insert(seg.head.id, Arc::clone(&seg));
                        return Ok(seg);
                    }
                    Err(e) if is_full(&e) => {}
                    Err(e) => return Err(NoPlace::Io(e)),
                }
            }
            if !self.evict_oldest(keep).map_err(NoPlace::Io)? {
                return Err(NoPlace::Full);
            }
        }
    }

    /// Deletes the oldest segment but `keep`. `false` if there is none.
    fn evict_oldest(&self, keep: Option<u32>) -> io::Result<bool> {
        let oldest = locked(&self.index).segments.keys().copied().find(|id| Some(*id) != keep);
        let Some(id) = oldest else { return Ok(false) };
        let evicted = self.drop_segment(id)?;
        self.counters.evicted.fetch_add(evicted, Relaxed);
        Ok(true)
    }

    /// The segment that the next rotation will delete, if it will. O(pages).
    pub(super) fn next_victim(&self) -> Option<Victim> {
        let active = locked(&self.tail).active.as_ref().map(|(s, _)| s.head.id);
        let index = locked(&self.index);
        if index.disk_bytes().saturating_add(self.config.segment_bytes) <= self.config.bytes_max {
            return None;
        }
        let victim = index.segments.values().find(|s| Some(s.head.id) != active).cloned()?;
        let mut hot: Vec<(StoreKey, Loc)> = (index.pages.iter())
            .filter(|(_, l)| l.segment == victim.head.id && victim.was_read(l.unit))
            .map(|(k, l)| (*k, *l))
            .collect();
        hot.sort_unstable_by_key(|(_, l)| l.unit);
        Some(Victim { segment: victim, hot })
    }

    /// Forgets the pages of a segment, then deletes its files. Returns how many pages there were.
    pub(super) fn drop_segment(&self, id: u32) -> io::Result<u64> {
        let segment = locked(&self.index).segments.get(&id).cloned();
        let Some(segment) = segment else { return Ok(0) };
        // A full segment has its keys in the index file; without one every page has to be looked at.
        let keys: Option<Vec<StoreKey>> = (self.root.read(&index_name(id)).ok())
            .and_then(|bytes| decode_index(&segment.head, bytes))
            .map(|entries| entries.into_iter().map(|e| e.key).collect());
        let mut index = locked(&self.index);
        let before = index.pages.len();
        match keys {
            Some(keys) => {
                for key in keys {
                    if index.pages.get(&key).is_some_and(|l| l.segment == id) {
                        index.pages.remove(&key);
                    }
                }
            }
            None => index.pages.retain(|_, l| l.segment != id),
        }
        index.segments.remove(&id);
        let dropped = (before - index.pages.len()) as u64;
        drop(index);
        locked(&self.dirty).segments.remove(&id);
        for name in [segment.name.clone(), index_name(id)] {
            match self.root.unlink(&name) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
        segment.release();
        Ok(dropped)
    }

    /// Publishes a written page, unless its segment is already gone.
    pub(super) fn commit(&self, place: &Place, key: StoreKey, space: Space, payload: u32) -> bool {
        // The configuration keeps segments below 2^32 units.
        let unit = (place.offset / u64::from(place.segment.head.align)) as u32;
        let id = place.segment.head.id;
        let published = {
            let mut index = locked(&self.index);
            let there = index.segments.contains_key(&id);
            if there {
                let space = index.space_id(space);
                index.insert_in(&place.segment, key, Loc { segment: id, unit, payload, space });
            }
            there
        };
        place.segment.end_write(Some(Entry { key, space, unit, payload, kind: Kind::Page }));
        published
    }

    /// Makes everything committed durable.
    pub(super) fn sync(&self) -> io::Result<()> {
        let _alone = locked(&self.syncing);
        let todo = std::mem::take(&mut *locked(&self.dirty));
        let synced = (todo.segments.values().try_for_each(|s| s.sync()))
            .and_then(|()| if todo.names { self.root.sync() } else { Ok(()) });
        if synced.is_err() {
            let mut dirty = locked(&self.dirty);
            dirty.names |= todo.names;
            for (id, s) in todo.segments {
                dirty.segments.entry(id).or_insert(s);
            }
        }
        synced
    }

    /// Ends the active segment: nothing is appended to it any more.
    pub(super) fn take_active(&self) -> Option<Spent> {
        locked(&self.tail).active.take().map(|(segment, used)| Spent { segment, used })
    }

    /// Deletes segments in which nothing is found any more. One that holds removals stays until it is the
    /// oldest, because what it removes may still lie in an older one.
    pub(super) fn drop_dead(&self) -> io::Result<u64> {
        let mut dropped = 0;
        let keep = locked(&self.tail).active.as_ref().map(|(s, _)| s.head.id);
        loop {
            let victim = {
                let index = locked(&self.index);
                let oldest = index.segments.keys().next().copied();
                index
                    .segments
                    .values()
                    .find(|s| {
                        s.live.load(Relaxed) == 0
                            && Some(s.head.id) != keep
                            && s.is_quiet()
                            && (s.marks.load(Relaxed) == 0 || Some(s.head.id) == oldest)
                    })
                    .map(|s| s.head.id)
            };
            let Some(id) = victim else { return Ok(dropped) };
            self.drop_segment(id)?;
            dropped += 1;
        }
    }

    /// Pages of a namespace.
    pub(super) fn pages_of(&self, namespace: NamespaceDigest) -> Vec<(StoreKey, Loc)> {
        let index = locked(&self.index);
        let of_it = |key: &StoreKey, loc: &Loc| {
            index.space(loc.space).is_some_and(|space| space.is_cleared_with(key, &namespace))
        };
        index.pages.iter().filter(|(k, l)| of_it(k, l)).map(|(k, l)| (*k, *l)).collect()
    }
}

/// No space, no quota.
pub(super) fn is_full(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG))
}

/// Ids of the log files in a directory listing, oldest first.
pub(super) fn segment_ids(names: &[String]) -> Vec<u32> {
    let mut ids: Vec<u32> = names.iter().filter_map(|n| id_of(n)).collect();
    ids.sort_unstable();
    ids
}
