//! What an operator asks of a store: what is in it, whether it is whole, and to tidy up.

use super::log::Loc;
use super::rescue::{Reader, Unread};
use super::{FileStore, Inner, StoreError};
use crate::backend::identity::{Space, StoreKey};
use crate::backend::store::batch::Call;
use crate::backend::store::gate::locked;
use crate::base::containers::Map;

/// The pages of one space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct SpaceUse {
    /// Descriptor and namespace.
    pub space: Space,
    /// Pages.
    pub pages: u64,
    /// Their payload bytes.
    pub payload_bytes: u64,
}

/// What a store holds.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Usage {
    /// Segment files.
    pub segments: u64,
    /// Bytes of blocks they hold.
    pub disk_bytes: u64,
    /// Pages.
    pub pages: u64,
    /// Their payload bytes.
    pub payload_bytes: u64,
    /// By space, most bytes first.
    pub spaces: Vec<SpaceUse>,
}

/// How far a verification is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct VerifyProgress {
    /// Pages checked.
    pub pages_done: u64,
    /// Pages to check.
    pub pages_total: u64,
    /// Payload bytes read.
    pub bytes_done: u64,
}

/// What a verification found.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct VerifyReport {
    /// Pages that hold.
    pub good: u64,
    /// Payload bytes of those.
    pub good_bytes: u64,
    /// Pages that were put aside.
    pub corrupt: Vec<StoreKey>,
    /// Pages that could not be read; they were left alone.
    pub unreadable: Vec<StoreKey>,
    /// Pages that were gone when their turn came.
    pub gone: u64,
}

impl FileStore {
    /// What the store holds. O(pages).
    #[must_use]
    pub fn usage(&self) -> Usage {
        let index = locked(&self.inner.log.index);
        let mut by_space: Map<u32, (u64, u64)> = Map::default();
        for loc in index.pages.values() {
            let (pages, bytes) = by_space.entry(loc.space).or_default();
            *pages += 1;
            *bytes += u64::from(loc.payload);
        }
        let mut spaces: Vec<_> = by_space
            .into_iter()
            .filter_map(|(id, (pages, payload_bytes))| {
                Some(SpaceUse { space: index.space(id)?, pages, payload_bytes })
            })
            .collect();
        spaces.sort_unstable_by_key(|s| {
            (u64::MAX - s.payload_bytes, s.space.descriptor().0, s.space.namespace().0)
        });
        Usage {
            segments: index.segments.len() as u64,
            disk_bytes: index.disk_bytes(),
            pages: index.pages.len() as u64,
            payload_bytes: spaces.iter().map(|s| s.payload_bytes).sum(),
            spaces,
        }
    }

    /// Reads every page and checks it, in the order of the disk; puts aside what fails. `progress` is called
    /// after each page.
    pub fn verify(
        &self,
        call: &Call,
        progress: &mut dyn FnMut(VerifyProgress),
    ) -> Result<VerifyReport, StoreError> {
        let _inside = self.inner.gate.enter().ok_or(StoreError::Closed)?;
        let mut pages: Vec<(StoreKey, Loc)> =
            locked(&self.inner.log.index).pages.iter().map(|(k, l)| (*k, *l)).collect();
        pages.sort_unstable_by_key(|(_, l)| (l.segment, l.unit));
        let mut report = VerifyReport::default();
        let mut reader = Reader::default();
        let mut bytes_done = 0;
        for (n, (key, loc)) in pages.iter().enumerate() {
            if let Some(stopped) = call.stopped() {
                return Err(super::stopped_error(stopped));
            }
            self.inner.verify_one(&mut reader, *key, *loc, &mut report)?;
            bytes_done += u64::from(loc.payload);
            progress(VerifyProgress {
                pages_done: n as u64 + 1,
                pages_total: pages.len() as u64,
                bytes_done,
            });
        }
        Ok(report)
    }

    /// Deletes segments in which nothing is found any more, and files that were put aside. Returns how many.
    pub fn gc(&self) -> Result<u64, StoreError> {
        let _inside = self.inner.gate.enter().ok_or(StoreError::Closed)?;
        let log = &self.inner.log;
        let put_aside = || -> std::io::Result<u64> {
            let names = log.root.names()?;
            let bad = names
                .iter()
                .filter(|n| n.strip_prefix("bad-").is_some_and(|log| super::segment::id_of(log).is_some()));
            bad.map(|name| match log.root.unlink(name) {
                // A directory is not ours whatever its name.
                Err(e) if e.kind() == std::io::ErrorKind::IsADirectory => Ok(0),
                unlinked => unlinked.map(|()| 1),
            })
            .sum()
        };
        let tidied = log.drop_dead().and_then(|n| Ok(n + put_aside()?));
        tidied.map_err(|source| StoreError::Io { op: "gc", source })
    }
}

impl Inner {
    fn verify_one(
        &self,
        reader: &mut Reader,
        key: StoreKey,
        loc: Loc,
        report: &mut VerifyReport,
    ) -> Result<(), StoreError> {
        let held = {
            let index = locked(&self.log.index);
            let same = index.pages.get(&key) == Some(&loc);
            let segment = index.segments.get(&loc.segment).cloned();
            if same { segment.zip(index.space(loc.space)) } else { None }
        };
        let Some((segment, space)) = held else {
            report.gone += 1;
            return Ok(());
        };
        match reader.read(segment, key, space, loc) {
            Err(Unread::Medium) => report.unreadable.push(key),
            Err(Unread::NoMemory) => {
                let source = std::io::ErrorKind::OutOfMemory.into();
                return Err(StoreError::Io { op: "verify", source });
            }
            read => {
                if read.is_ok() {
                    report.good += 1;
                    report.good_bytes += u64::from(loc.payload);
                } else {
                    self.put_aside(&key, space, loc);
                    report.corrupt.push(key);
                }
            }
        }
        Ok(())
    }
}
