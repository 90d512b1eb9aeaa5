//! Registered regions: tokens in, checked memory out. Every store uses this table, so that a range outside
//! registered memory is the same outcome everywhere, also where the backend would not care.

use std::sync::{Arc, PoisonError, RwLock};

use smallvec::SmallVec;

use super::batch::{Outcome, Span};
use crate::backend::region::Region;
use crate::base::containers::Map;

/// A registered region of one store. Never reused by that store.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RegionToken(pub u64);

/// Why a region could not be registered or unregistered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The token is not, or no longer, registered.
    #[error("region token {0:?} is not registered")]
    Unknown(RegionToken),
    /// The memory is not of the kind the store needs.
    #[error("this store cannot address the memory of the region")]
    WrongArena,
    /// The region overlaps a registered one.
    #[error("the region overlaps one that is registered")]
    Overlap,
    /// The store is closed.
    #[error("store is closed")]
    Closed,
    /// The backend refused; its code.
    #[error("the backend refused the registration with code {code}")]
    Refused {
        /// Code of the backend.
        code: i32,
    },
}

#[derive(Debug)]
struct Entry {
    region: Arc<Region>,
    holds: usize,
}

#[derive(Debug, Default)]
struct Table {
    last: u64,
    entries: Map<RegionToken, Entry>,
}

/// The table of one store.
#[derive(Debug, Default)]
pub struct Regions(RwLock<Table>);

/// A span whose region is held and whose range was checked.
#[derive(Clone, Debug)]
pub struct Held {
    /// The region.
    pub region: Arc<Region>,
    /// First byte.
    pub offset: usize,
    /// Bytes.
    pub len: usize,
}

/// The memory of one item.
pub type HeldSpans = SmallVec<[Held; 1]>;

impl Regions {
    /// Registers `region`, or counts one more hold on it. O(regions), of which there are few.
    pub fn register(&self, region: &Arc<Region>) -> RegionToken {
        let mut t = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if let Some((token, e)) = t.entries.iter_mut().find(|(_, e)| Arc::ptr_eq(&e.region, region)) {
            e.holds += 1;
            return *token;
        }
        t.last += 1;
        let token = RegionToken(t.last);
        t.entries.insert(token, Entry { region: Arc::clone(region), holds: 1 });
        token
    }

    /// Gives one hold back.
    pub fn unregister(&self, token: RegionToken) -> Result<(), RegisterError> {
        let mut t = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let e = t.entries.get_mut(&token).ok_or(RegisterError::Unknown(token))?;
        e.holds -= 1;
        if e.holds == 0 {
            t.entries.remove(&token);
        }
        Ok(())
    }

    /// Forgets everything, for closing.
    pub fn clear(&self) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).entries.clear();
    }

    /// Holds the memory of `spans`, or `AddressLost`.
    pub fn resolve(&self, spans: &[Span]) -> Result<HeldSpans, Outcome> {
        let t = self.0.read().unwrap_or_else(PoisonError::into_inner);
        spans
            .iter()
            .map(|s| {
                let e = t.entries.get(&s.region).ok_or(Outcome::AddressLost)?;
                e.region.check(s.offset, s.len).map_err(|_| Outcome::AddressLost)?;
                Ok(Held { region: Arc::clone(&e.region), offset: s.offset, len: s.len })
            })
            .collect()
    }
}
