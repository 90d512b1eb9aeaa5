//! Small pages in large objects: a wrapper for stores that are bound by work per object.
//!
//! A put of consecutive pages of one space, each smaller than half of [`Caps::object_bytes_efficient`], becomes
//! objects of about that size. Every page keeps its own name: under it lies a *link* (some hundred bytes) that names
//! the object and, of every page in it, key, length and checksum. So a page is found, got, checked and removed by its
//! own key, by any process, whatever became of its neighbours.
//!
//! ```text
//! page key  -->  link  -->  group object: page | page | page ...
//! ```
//! - A page whose link or whose group is gone is a miss; putting it again writes what is missing.
//! - A group goes with the last of its links. Links and groups go when their namespace is cleared.
//! - A link that was read names the neighbours too, and is remembered, so reading a chain of pages costs one link and
//!   one object a group. Presence is asked for page by page all the same.
//! - Getting one page of a group reads the group; what was not asked for lands in memory of the wrapper.
//! - A damaged group costs all its pages.
//!
//! Pages that are large enough pass unchanged, so the wrapper costs them nothing.
//!
//! A link a page costs as many objects as there were pages. [`Names::FirstPage`] saves them: only the first page of a
//! group leaves a link, and its neighbours are found by whoever has read it. Whoever asks for chains of pages from their
//! beginning, as a prefix cache does, loses nothing; who asks a new process for a page in the middle alone misses it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Instant;

mod get;
mod index;
mod link;
mod put;

use self::index::{Index, Trust};
use self::link::Group;
use super::batch::{Call, Item, Outcome};
use super::gate::locked;
use super::regions::{RegionToken, Regions, RegisterError};
use super::stage::{Stage, Stages};
use super::stats::{Counters, Health, OpKind, StoreStats};
use super::{Caps, Store, StoreEpoch, StoreError};
use crate::backend::identity::{NamespaceDigest, StoreKey};
use crate::backend::region::Region;
use crate::base::containers::Map;

/// Objects smaller than this are not worth grouping up to: a link has up to 2640 bytes.
const OBJECT_BYTES_MIN: usize = 8 << 10;

/// Which pages of a group leave a link.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Names {
    /// All: each is found by its own name, alone, by any process.
    #[default]
    EveryPage,
    /// The first: the others are found by a process that has met it, in the same batch or before, or that has put them.
    /// Removing one page removes its group.
    FirstPage,
}

/// A store whose small pages lie in groups. See the [module](self).
#[derive(Debug)]
pub struct Grouped<S: Store> {
    inner: Arc<S>,
    object_bytes: usize,
    names: Names,
    stages: Stages<S>,
    /// Memory of the callers, under the tokens of the inner store.
    regions: Regions,
    index: Mutex<Index>,
    /// Pages of the group met last, 0 before the first: of so many keys in a row, one link tells about all.
    stride: AtomicU64,
    epoch: AtomicU64,
    counters: Counters,
    closed: AtomicBool,
}

/// Where a page is.
#[derive(Clone, Debug)]
enum Found {
    /// In a group, at this position.
    Linked(Arc<Group>, usize),
    /// By itself; payload bytes.
    Plain(usize),
    /// Nowhere, or not known.
    Not(Outcome),
    /// Replaced while it was looked at; or gone, or of another identity, after it was there with so many bytes.
    Moved(Option<usize>),
}

/// Looks at a page that others replace meanwhile; then it counts as missing, which it was for a moment.
const LOOKS_MAX: usize = 4;

impl<S: Store> Grouped<S> {
    /// Groups up to what the store says is its smallest efficient object.
    #[must_use]
    pub fn new(inner: S) -> Grouped<S> {
        let object_bytes = inner.caps().object_bytes_efficient;
        Grouped::with_object_bytes(inner, object_bytes)
    }

    /// Groups up to about so many bytes (at least 8 KiB).
    #[must_use]
    pub fn with_object_bytes(inner: S, object_bytes: usize) -> Grouped<S> {
        let inner = Arc::new(inner);
        let largest = inner.caps().object_bytes_max / 2;
        Grouped {
            object_bytes: object_bytes.max(OBJECT_BYTES_MIN).min(largest),
            names: Names::default(),
            stages: Stages::new(Arc::clone(&inner)),
            regions: Regions::default(),
            index: Mutex::default(),
            stride: AtomicU64::new(0),
            epoch: AtomicU64::new(inner.epoch().0),
            counters: Counters::default(),
            closed: AtomicBool::new(false),
            inner,
        }
    }

    /// The same with other links. Processes that share a store may differ in it: one that looks for a link a page misses
    /// the pages of one that leaves fewer.
    #[must_use]
    pub fn with_names(self, names: Names) -> Grouped<S> {
        Grouped { names, ..self }
    }

    fn trust(&self) -> Trust {
        match self.names {
            Names::EveryPage => Trust::OwnLink,
            Names::FirstPage => Trust::Neighbours,
        }
    }

    /// The wrapped store.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    /// Whether pages of this size are grouped.
    fn is_small(&self, page_bytes: usize) -> bool {
        page_bytes <= self.object_bytes / 2 && link::members_max(page_bytes) >= 2
    }

    /// Whether a page of this size may lie in a group, by whomever it was put.
    fn may_be_linked(&self, page_bytes: usize) -> bool {
        page_bytes <= self.object_bytes / 2
    }

    /// Runs a batch: not when closed, and with nothing remembered from before a reconnect.
    fn batch<T>(&self, op: OpKind, of: &[T], run: impl FnOnce() -> Vec<Outcome>) -> Vec<Outcome> {
        if of.is_empty() {
            return vec![];
        }
        if self.closed.load(Relaxed) {
            return vec![Outcome::Closed; of.len()];
        }
        let epoch = self.inner.epoch().0;
        if self.epoch.swap(epoch, Relaxed) != epoch {
            locked(&self.index).clear();
        }
        let out = run();
        self.counters.count(op, &out);
        out
    }

    /// Where each page is, by what lies under its own name. A group may be gone all the same.
    fn locate(&self, keys: &[StoreKey], call: &Call) -> Vec<Found> {
        let mut found = self.look(keys, call);
        for _ in 1..LOOKS_MAX {
            let moved: Vec<usize> =
                (0..keys.len()).filter(|&i| matches!(found[i], Found::Moved(_))).collect();
            if moved.is_empty() {
                break;
            }
            let again: Vec<StoreKey> = moved.iter().map(|&i| keys[i]).collect();
            moved.into_iter().zip(self.look(&again, call)).for_each(|(i, f)| found[i] = f);
        }
        for f in &mut found {
            match *f {
                // Still there and still not to be read: a page of another identity.
                Found::Moved(Some(bytes)) => *f = Found::Plain(bytes),
                Found::Moved(None) => *f = Found::Not(Outcome::Missing),
                _ => {}
            }
        }
        found
    }

    fn look(&self, keys: &[StoreKey], call: &Call) -> Vec<Found> {
        let present = self.inner.query(keys, call);
        let mut found = Vec::with_capacity(keys.len());
        let mut unread = Vec::new();
        {
            let mut index = locked(&self.index);
            for (i, (key, outcome)) in keys.iter().zip(present).enumerate() {
                found.push(match outcome {
                    Outcome::Ok(n) if link::is_length(n) => match seen(&mut index, key, n) {
                        Some(linked) => linked,
                        None => {
                            unread.push((i, n));
                            Found::Plain(n)
                        }
                    },
                    Outcome::Ok(n) => {
                        index.forget(key);
                        Found::Plain(n)
                    }
                    other => {
                        if other.is_miss() && self.names == Names::EveryPage {
                            index.forget(key);
                        }
                        Found::Not(other)
                    }
                });
            }
        }
        found.resize(keys.len(), Found::Not(Outcome::Missing));
        // Neighbours tell about each other: the first says how many do, then one link of every so many is read, then
        // what is still unknown.
        let mut step = match (self.names, self.stride.load(Relaxed)) {
            (Names::FirstPage, _) => 1,
            (Names::EveryPage, 0) => usize::MAX,
            (Names::EveryPage, known) => known as usize,
        };
        while !unread.is_empty() {
            let now: Vec<(usize, usize)> = unread.iter().copied().step_by(step).collect();
            self.read_links(keys, &now, call, &mut found);
            unread.retain(|one| !now.contains(one));
            let mut index = locked(&self.index);
            unread.retain(|&(i, n)| match seen(&mut index, &keys[i], n) {
                Some(linked) => {
                    found[i] = linked;
                    false
                }
                None => true,
            });
            step = match step {
                usize::MAX => (self.stride.load(Relaxed) as usize).max(1),
                _ => 1,
            };
        }
        if self.names == Names::FirstPage {
            // What has no name of its own may be a neighbour of what has.
            let mut index = locked(&self.index);
            for (key, f) in keys.iter().zip(&mut found) {
                if matches!(f, Found::Not(Outcome::Missing))
                    && let Some(group) = index.get(key, Trust::Neighbours)
                    && let Some(at) = group.position(key)
                {
                    *f = Found::Linked(group, at);
                }
            }
        }
        found
    }

    /// Reads what may be links. What is none is a page of that length.
    fn read_links(&self, keys: &[StoreKey], which: &[(usize, usize)], call: &Call, found: &mut [Found]) {
        let total = which.iter().map(|(_, n)| n).sum();
        let stage = match self.stages.take(total) {
            Ok(stage) => stage,
            Err(why) => return which.iter().for_each(|&(i, _)| found[i] = Found::Not(why)),
        };
        let mut at = 0;
        let mut items = Vec::with_capacity(which.len());
        for &(i, n) in which {
            let spans = [stage.span(at, n)].into_iter().collect();
            items.push(Item { key: keys[i], space: link::space(), spans });
            at += n;
        }
        let outcomes = self.inner.get(&items, call);
        let mut at = 0;
        for (&(i, n), outcome) in which.iter().zip(outcomes) {
            found[i] = match outcome {
                Outcome::Ok(_) => match read_link(&stage, at, n, &keys[i]) {
                    Some(group) => self.learned(&keys[i], group),
                    // Sealed as a link and none: of a later release, or damaged before it was sealed.
                    None => Found::Not(Outcome::Corrupt),
                },
                // Of another identity, a page; or removed since it was found.
                Outcome::Missing => Found::Moved(Some(n)),
                Outcome::SizeMismatch { .. } => Found::Moved(None),
                other => Found::Not(other),
            };
            at += n;
        }
        self.stages.give_back(stage);
    }

    fn learned(&self, key: &StoreKey, group: Group) -> Found {
        let Some(position) = group.position(key) else { return Found::Not(Outcome::Corrupt) };
        let group = Arc::new(group);
        self.stride.store(group.members.len() as u64, Relaxed);
        let mut index = locked(&self.index);
        index.learn(&group);
        index.set(*key, &group);
        Found::Linked(group, position)
    }

    /// Which of the groups of `found` are there, by name.
    fn groups_there(&self, found: &[Found], call: &Call) -> Map<StoreKey, Outcome> {
        let mut groups: Map<StoreKey, Arc<Group>> = Map::default();
        for f in found {
            if let Found::Linked(group, _) = f {
                groups.entry(group.key).or_insert_with(|| Arc::clone(group));
            }
        }
        let keys: Vec<StoreKey> = groups.keys().copied().collect();
        if keys.is_empty() {
            return Map::default();
        }
        let outcomes = self.inner.query(&keys, call);
        let mut there = Map::default();
        for (key, outcome) in keys.into_iter().zip(outcomes) {
            let group = &groups[&key];
            let outcome = match outcome {
                Outcome::Ok(n) if n != group.bytes() => Outcome::Missing,
                other => other,
            };
            if outcome.is_miss() {
                locked(&self.index).forget_group(group);
            }
            there.insert(key, outcome);
        }
        there
    }

    /// Presence of pages, their groups looked for too.
    fn query_all(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
        let found = self.locate(keys, call);
        let there = self.groups_there(&found, call);
        let one = |f: Found| match f {
            Found::Plain(n) => Outcome::Ok(n),
            Found::Not(outcome) => outcome,
            Found::Moved(_) => Outcome::Missing,
            Found::Linked(group, at) => match there.get(&group.key) {
                Some(Outcome::Ok(_)) => Outcome::Ok(group.members[at].payload_bytes as usize),
                Some(other) => *other,
                None => Outcome::Missing,
            },
        };
        found.into_iter().map(one).collect()
    }

    fn remove_all(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
        let found = self.locate(keys, call);
        let there = self.groups_there(&found, call);
        let mut out: Vec<Outcome> = found
            .iter()
            .map(|f| match f {
                Found::Not(outcome) => *outcome,
                Found::Moved(_) => Outcome::Missing,
                Found::Plain(n) => Outcome::Ok(*n),
                Found::Linked(group, at) => match there.get(&group.key) {
                    Some(Outcome::Ok(_)) => Outcome::Ok(group.members[*at].payload_bytes as usize),
                    // A link to nowhere goes too, but nobody can have got the page.
                    _ => Outcome::Missing,
                },
            })
            .collect();
        if self.names == Names::FirstPage {
            self.remove_groups(keys, &found, call, &mut out);
            return out;
        }
        let named: Vec<usize> =
            (0..keys.len()).filter(|&i| !matches!(found[i], Found::Not(_) | Found::Moved(_))).collect();
        let names: Vec<StoreKey> = named.iter().map(|&i| keys[i]).collect();
        let removed = self.inner.remove(&names, call);
        let mut left = Vec::new();
        for (i, outcome) in named.into_iter().zip(removed) {
            locked(&self.index).forget(&keys[i]);
            match (outcome, &found[i]) {
                (Outcome::Ok(_), Found::Linked(group, _)) => left.push(Arc::clone(group)),
                (Outcome::Ok(_), _) => {}
                (other, _) => out[i] = other,
            }
        }
        self.release(left, call);
        out
    }

    /// Removes pages by themselves, and the groups of the others with the links to them.
    fn remove_groups(&self, keys: &[StoreKey], found: &[Found], call: &Call, out: &mut [Outcome]) {
        let mut groups: Map<StoreKey, Arc<Group>> = Map::default();
        let mut names = Vec::new();
        for (i, f) in found.iter().enumerate() {
            match f {
                Found::Linked(group, _) => {
                    groups.insert(group.key, Arc::clone(group));
                }
                Found::Plain(_) => names.push(i),
                Found::Not(_) | Found::Moved(_) => {}
            }
        }
        let plain: Vec<StoreKey> = names.iter().map(|&i| keys[i]).collect();
        for (i, outcome) in names.into_iter().zip(self.inner.remove(&plain, call)) {
            if !outcome.is_ok() {
                out[i] = outcome;
            }
        }
        for group in groups.values() {
            locked(&self.index).forget_group(group);
            // Where every page has left a link, all of them go.
            let members: Vec<StoreKey> = group.members.iter().map(|m| m.key).collect();
            let _ = self.inner.remove(&[group.key], call);
            let _ = self.inner.remove(&members, call);
        }
    }

    /// Removes groups that no link leads to any more. A group that stays by mistake is found again under its name by
    /// whoever puts the same pages.
    fn release(&self, mut groups: Vec<Arc<Group>>, call: &Call) {
        groups.sort_unstable_by_key(|g| g.key);
        groups.dedup_by_key(|g| g.key);
        for group in groups {
            let keys: Vec<StoreKey> = group.members.iter().map(|m| m.key).collect();
            let gone = self.inner.query(&keys, call).iter().all(|o| *o == Outcome::Missing);
            if gone {
                let _ = self.inner.remove(&[group.key], call);
            }
        }
    }
}

/// What the index knows of a page under whose name lies something as long as a link.
fn seen(index: &mut Index, key: &StoreKey, link_bytes: usize) -> Option<Found> {
    let group = index.see(key, link_bytes)?;
    let position = group.position(key)?;
    Some(Found::Linked(group, position))
}

fn read_link<S: Store>(stage: &Stage<S>, at: usize, len: usize, key: &StoreKey) -> Option<Group> {
    let mut bytes = Vec::with_capacity(len);
    stage.held(at, len).ok()?.append_to(&mut bytes);
    Group::read(&bytes, key)
}

impl<S: Store> Store for Grouped<S> {
    /// Pages of a sixty-fourth of an efficient object reach it together.
    fn caps(&self) -> Caps {
        let inner = self.inner.caps();
        let least = (self.object_bytes / link::MEMBERS_MAX).max(4096);
        Caps { object_bytes_efficient: inner.object_bytes_efficient.min(least), ..inner }
    }

    fn register(&self, region: &Arc<Region>) -> Result<RegionToken, RegisterError> {
        let token = self.inner.register(region)?;
        self.regions.adopt(token, region);
        Ok(token)
    }

    fn unregister(&self, token: RegionToken) -> Result<(), RegisterError> {
        self.inner.unregister(token)?;
        self.regions.unregister(token)
    }

    fn query(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
        self.batch(OpKind::Query, keys, || self.query_all(keys, call))
    }

    /// The pages' own names, and the groups that are known to hold them.
    fn touch(&self, keys: &[StoreKey], call: &Call) {
        let mut names = keys.to_vec();
        {
            let mut index = locked(&self.index);
            let groups = keys.iter().filter_map(|key| index.get(key, Trust::Neighbours));
            names.extend(groups.map(|group| group.key));
        }
        names.sort_unstable();
        names.dedup();
        self.inner.touch(&names, call);
    }

    fn get(&self, items: &[Item], call: &Call) -> Vec<Outcome> {
        self.batch(OpKind::Get, items, || self.get_all(items, call))
    }

    fn put(&self, items: &[Item], call: &Call) -> Vec<Outcome> {
        self.batch(OpKind::Put, items, || self.put_all(items, call))
    }

    fn remove(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
        self.batch(OpKind::Remove, keys, || self.remove_all(keys, call))
    }

    /// Counts objects as the inner store does: a group is one, and so is each link.
    fn clear(&self, namespace: NamespaceDigest, call: &Call) -> Result<u64, StoreError> {
        locked(&self.index).clear();
        let cleared = self.inner.clear(namespace, call)?;
        self.counters.removed.fetch_add(cleared, Relaxed);
        Ok(cleared)
    }

    fn sync(&self, call: &Call) -> Result<(), StoreError> {
        self.inner.sync(call)
    }

    fn health(&self) -> Health {
        self.inner.health()
    }

    /// Gauges of the inner store, which counts groups and links; outcomes as the callers here saw them.
    fn stats(&self) -> StoreStats {
        let (inner, own) = (self.inner.stats(), self.counters.snapshot());
        StoreStats {
            objects: inner.objects,
            bytes: inner.bytes,
            bytes_max: inner.bytes_max,
            evicted_total: inner.evicted_total,
            rescued_total: inner.rescued_total,
            put_present_total: inner.put_present_total + own.put_present_total,
            ..own
        }
    }

    fn epoch(&self) -> StoreEpoch {
        self.inner.epoch()
    }

    fn close(&self, deadline: Instant) -> Result<(), StoreError> {
        self.stages.clear();
        self.inner.close(deadline)?;
        self.closed.store(true, Relaxed);
        self.regions.clear();
        locked(&self.index).clear();
        Ok(())
    }
}
