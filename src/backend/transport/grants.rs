//! Grants at the target: which tag may write where. Copiers hold the table for reading while they copy one
//! block; taking a tag back holds it for writing, so when that returns no byte of the tag can land.

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::base::containers::Map;
use crate::pd::grant::Destination;
use crate::pd::ids::{Incarnation, Tag};
use crate::pd::layout::{Component, Layout};

/// A range of a region.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Span {
    /// Region.
    pub region: u32,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// The spans of what a grant covers: pages, slots and rows under a layout, and places in a staging ring (region, first
/// byte, bytes). Sorted and joined. O(entries x units).
#[must_use]
pub fn spans_of(layout: &Layout, d: &Destination, ring: &[(u32, u64, u64)]) -> Vec<Span> {
    let mut spans: Vec<Span> =
        ring.iter().map(|&(region, offset, len)| Span { region, offset, len }).collect();
    for e in &layout.entries {
        let (units, bytes) = match e.component {
            Component::Full => (&d.full, e.unit_bytes),
            Component::Window => (&d.window, e.unit_bytes),
            Component::State => (&d.state, e.unit_bytes),
            Component::Ring => (&d.ring, e.unit_bytes * u64::from(e.ring_slots)),
        };
        let span = |&u: &u32| Span { region: e.region, offset: e.base + u64::from(u) * bytes, len: bytes };
        spans.extend(units.iter().map(span));
    }
    join(spans)
}

fn join(mut spans: Vec<Span>) -> Vec<Span> {
    spans.sort_unstable();
    let mut out: Vec<Span> = Vec::with_capacity(spans.len());
    for s in spans {
        match out.last_mut() {
            Some(l) if l.region == s.region && l.offset + l.len >= s.offset => {
                l.len = l.len.max(s.offset + s.len - l.offset);
            }
            _ => out.push(s),
        }
    }
    out
}

#[derive(Debug, Default)]
struct Table {
    spans: Map<Tag, Vec<Span>>,
    /// Attachments of an incarnation below this one are fenced.
    fenced: Map<Incarnation, u32>,
}

/// The table of one target.
#[derive(Debug, Default)]
pub struct Grants {
    table: RwLock<Table>,
}

/// Held while one block is copied.
#[derive(Debug)]
pub struct Admission<'a> {
    table: RwLockReadGuard<'a, Table>,
}

impl Admission<'_> {
    /// Whether this range is granted to the tag, and the writer not fenced.
    #[must_use]
    pub fn allows(&self, inc: Incarnation, attach: u32, tag: Tag, s: Span) -> bool {
        if self.table.fenced.get(&inc).is_some_and(|min| attach < *min) {
            return false;
        }
        let Some(spans) = self.table.spans.get(&tag) else { return false };
        let at = spans.partition_point(|g| (g.region, g.offset) <= (s.region, s.offset));
        let Some(g) = at.checked_sub(1).and_then(|i| spans.get(i)) else { return false };
        g.region == s.region && s.offset.checked_add(s.len).is_some_and(|end| end <= g.offset + g.len)
    }
}

impl Grants {
    /// Admits one block; nothing can be taken back until it is dropped. Copy and drop.
    pub fn admit(&self) -> Admission<'_> {
        // A panic of another thread cannot leave the maps half-changed: each change is one call.
        Admission { table: self.table.read().unwrap_or_else(PoisonError::into_inner) }
    }

    fn change(&self) -> RwLockWriteGuard<'_, Table> {
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a tag write these spans, instead of those it had.
    pub fn allow(&self, tag: Tag, spans: Vec<Span>) {
        self.change().spans.insert(tag, join(spans));
    }

    /// Takes a tag back. When this returns, nothing of it can land.
    pub fn revoke(&self, tag: Tag) {
        self.change().spans.remove(&tag);
    }

    /// Refuses an incarnation up to an attachment. When this returns, nothing of it can land.
    pub fn fence(&self, inc: Incarnation, attach: u32) {
        let mut t = self.change();
        let min = t.fenced.entry(inc).or_insert(0);
        *min = (*min).max(attach.saturating_add(1));
    }

    /// Tags admitted.
    #[must_use]
    pub fn len(&self) -> usize {
        self.admit().table.spans.len()
    }

    /// Whether no tag is admitted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pd::ids::Serial;

    #[test]
    fn a_tag_reaches_its_spans_and_nothing_else() {
        let (g, inc) = (Grants::default(), Incarnation(9));
        let tag = Tag::new(Incarnation(1), Serial(1));
        let s = |region, offset, len| Span { region, offset, len };
        g.allow(tag, vec![s(0, 64, 64), s(0, 128, 64), s(1, 0, 10)]);
        let ok = |attach, tag, span| g.admit().allows(inc, attach, tag, span);
        assert!(ok(0, tag, s(0, 64, 128)) && ok(0, tag, s(1, 3, 7)));
        for bad in [s(0, 63, 2), s(0, 64, 129), s(1, 3, 8), s(2, 0, 1), s(0, u64::MAX, 2)] {
            assert!(!ok(0, tag, bad), "{bad:?}");
        }
        assert!(!ok(0, Tag::new(Incarnation(2), Serial(1)), s(0, 64, 1)));
        g.fence(inc, 0);
        assert!(!ok(0, tag, s(0, 64, 1)) && ok(1, tag, s(0, 64, 1)));
        g.revoke(tag);
        assert!(!ok(1, tag, s(0, 64, 1)) && g.is_empty());
    }
}
