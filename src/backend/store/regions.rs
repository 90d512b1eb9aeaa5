//! Registered regions: tokens in, checked memory out. Every store uses this table, so that a range outside
//! registered memory is the same outcome everywhere, also where the backend would not care.
//!
//! This is the only place of the store tier that turns spans into slices. It may, because of the memory rule
//! of the [trait](super): from the call until it returns, the caller lets nobody else near the ranges.
#![expect(unsafe_code, reason = "slices of regions under the memory rule of the trait")]

use std::sync::{Arc, PoisonError, RwLock};

use smallvec::SmallVec;

use super::batch::{Outcome, Span};
use crate::backend::crc::crc32c_append;
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
#[derive(Clone, Debug, Default)]
pub struct HeldSpans(SmallVec<[Held; 1]>);

impl Held {
    /// First byte, for the kernel or a far side to read or write.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        // `offset` was checked to lie inside the region, so this stays in one mapping.
        self.region.base().as_ptr().wrapping_add(self.offset)
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the range was checked when it was resolved; nobody writes it during the call (rule of the
        // trait), and the store itself does not hold a mutable slice of it at the same time: filling and
        // reading one item are steps of one thread.
        unsafe { self.region.slice(self.offset, self.len) }.unwrap_or_default()
    }
}

impl HeldSpans {
    /// The spans.
    #[must_use]
    pub fn spans(&self) -> &[Held] {
        &self.0
    }

    /// Bytes of all spans, saturating.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.iter().fold(0, |n, s| n.saturating_add(s.len))
    }

    /// Whether there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes, run by run.
    pub fn runs(&self) -> impl Iterator<Item = &[u8]> {
        self.0.iter().map(Held::bytes)
    }

    /// The bytes from `from` on, at most `len` of them, run by run.
    fn pieces(&self, from: usize, len: usize) -> impl Iterator<Item = &[u8]> {
        let (mut skip, mut left) = (from, len);
        self.runs().filter_map(move |run| {
            let Some(run) = run.get(skip..) else {
                skip -= run.len();
                return None;
            };
            skip = 0;
            let piece = &run[..run.len().min(left)];
            left -= piece.len();
            Some(piece)
        })
    }

    /// Continues a CRC32C over `len` bytes beginning with byte `from`.
    #[must_use]
    pub fn crc32c(&self, from: usize, len: usize, crc: u32) -> u32 {
        self.pieces(from, len).fold(crc, crc32c_append)
    }

    /// Copies `from` in, beginning with byte `at` of the item. Stops at the end of either. O(spans + bytes).
    pub fn fill(&self, at: usize, from: &[u8]) {
        let (mut skip, mut from) = (at, from);
        for s in &self.0 {
            if skip >= s.len {
                skip -= s.len;
                continue;
            }
            let n = from.len().min(s.len - skip);
            // SAFETY: range checked when resolved, owned by the caller of the store for the call; `from` is
            // not part of it, because it is memory of the store.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), s.as_ptr().add(skip), n) };
            from = &from[n..];
            skip = 0;
        }
    }

    /// Copies out, beginning with byte `from` of these spans, as many bytes as `into` has.
    pub fn copy_to(&self, from: usize, into: &HeldSpans) {
        self.pieces(from, into.len()).fold(0, |at, piece| {
            into.fill(at, piece);
            at + piece.len()
        });
    }

    /// All bytes, copied. For backends that send one buffer.
    pub fn append_to(&self, out: &mut Vec<u8>) {
        self.runs().for_each(|r| out.extend_from_slice(r));
    }
}

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

    /// Notes a region under the token that another store gave it: for wrappers that touch memory themselves.
    pub fn adopt(&self, token: RegionToken, region: &Arc<Region>) {
        let mut t = self.0.write().unwrap_or_else(PoisonError::into_inner);
        t.entries.entry(token).or_insert_with(|| Entry { region: Arc::clone(region), holds: 0 }).holds += 1;
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
            .collect::<Result<_, _>>()
            .map(HeldSpans)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_region_one_token_and_the_last_hold_frees_it() {
        let regions = Regions::default();
        let a = Arc::new(Region::anonymous(4096).unwrap());
        let b = Arc::new(Region::anonymous(4096).unwrap());
        let t = regions.register(&a);
        assert_eq!(regions.register(&a), t);
        assert_ne!(regions.register(&b), t);
        let span = |offset, len| Span { region: t, offset, len };
        assert!(regions.resolve(&[span(0, 4096)]).is_ok());
        for bad in [span(1, 4096), span(usize::MAX, 2), Span { region: RegionToken(99), offset: 0, len: 1 }] {
            assert_eq!(regions.resolve(&[span(0, 1), bad]).err(), Some(Outcome::AddressLost));
        }
        regions.unregister(t).unwrap();
        assert!(regions.resolve(&[span(0, 1)]).is_ok());
        regions.unregister(t).unwrap();
        assert_eq!(regions.resolve(&[span(0, 1)]).err(), Some(Outcome::AddressLost));
        assert!(matches!(regions.unregister(t), Err(RegisterError::Unknown(_))));
        assert_eq!(Arc::strong_count(&a), 1);
    }

    #[test]
    fn filling_crosses_spans() {
        let regions = Regions::default();
        let token = regions.register(&Arc::new(Region::anonymous(4096).unwrap()));
        let span = |offset, len| Span { region: token, offset, len };
        let held = regions.resolve(&[span(100, 3), span(0, 0), span(7, 4)]).unwrap();
        held.fill(0, &[1; 7]);
        held.fill(2, &[2, 3, 4]);
        held.fill(6, &[9, 9, 9]);
        let mut all = Vec::new();
        held.append_to(&mut all);
        assert_eq!(all, [1, 1, 2, 3, 4, 1, 9]);
        assert_eq!(held.len(), 7);
        for from in 0..=8 {
            for len in 0..=8 {
                let want = crc32c::crc32c(&all[from.min(7)..(from + len).min(7)]);
                assert_eq!(held.crc32c(from, len, 0), want, "{from}+{len}");
            }
        }
        let to = regions.resolve(&[span(500, 2), span(600, 2)]).unwrap();
        held.copy_to(2, &to);
        let mut copied = Vec::new();
        to.append_to(&mut copied);
        assert_eq!(copied, [2, 3, 4, 1]);
    }
}
