//! Fields of a body: tag, length, payload, all little-endian. A reader takes the fields it knows and skips
//! the rest, so a newer peer may add some. Counts are checked against the bytes that are there before
//! anything is allocated.

use crate::pd::layout::{
    AXIS_GROUPS_MAX, Component, ENTRIES_MAX, Entry, EntryId, Group, HeadOrder, Layout, REGIONS_MAX, Role,
    Shape, TokenSplit,
};
use crate::pd::staging::StagingRing;
use crate::pd::topo::{CpSpread, Rank, STAGES_MAX, Topology};
use crate::pd::wire::{FrameError, PAGES_MAX};

/// Bytes of one entry inside the layout field. A later version may append to it: the stride is sent.
const ENTRY_BYTES: usize = 68;

pub(super) struct Writer<'a>(pub(super) &'a mut Vec<u8>);

impl Writer<'_> {
    pub(super) fn bytes(&mut self, tag: u16, payload: &[u8]) {
        self.0.extend_from_slice(&tag.to_le_bytes());
        self.0.extend_from_slice(&0u16.to_le_bytes());
        self.0.extend_from_slice(&(payload.len() as u32).to_le_bytes());
        self.0.extend_from_slice(payload);
    }

    pub(super) fn u32(&mut self, tag: u16, v: u32) {
        self.bytes(tag, &v.to_le_bytes());
    }

    pub(super) fn u64(&mut self, tag: u16, v: u64) {
        self.bytes(tag, &v.to_le_bytes());
    }

    /// A list of pages in order, as runs (first, count).
    pub(super) fn pages(&mut self, tag: u16, pages: &[u32]) {
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for &p in pages {
            match runs.last_mut() {
                Some((first, n)) if first.checked_add(*n) == Some(p) => *n += 1,
                _ => runs.push((p, 1)),
            }
        }
        let mut payload = Vec::with_capacity(8 + runs.len() * 8);
        payload.extend_from_slice(&(pages.len() as u32).to_le_bytes());
        payload.extend_from_slice(&(runs.len() as u32).to_le_bytes());
        for (first, n) in runs {
            payload.extend_from_slice(&first.to_le_bytes());
            payload.extend_from_slice(&n.to_le_bytes());
        }
        self.bytes(tag, &payload);
    }

    pub(super) fn rank(&mut self, tag: u16, r: Rank) {
        let mut payload = Vec::with_capacity(16);
        [r.dp, r.pp, r.cp, r.tp].iter().for_each(|v| payload.extend_from_slice(&v.to_le_bytes()));
        self.bytes(tag, &payload);
    }

    pub(super) fn topology(&mut self, tag: u16, t: &Topology) {
        let mut payload = Vec::with_capacity(24 + 4 * t.stage_layers.len());
        let spread = u32::from(t.cp_spread == CpSpread::Block);
        let head = [t.dp, t.cp, t.tp, spread, u32::from(t.page_shard), t.stage_layers.len() as u32];
        head.iter().chain(&t.stage_layers).for_each(|v| payload.extend_from_slice(&v.to_le_bytes()));
        self.bytes(tag, &payload);
    }

    pub(super) fn ring(&mut self, tag: u16, r: &StagingRing) {
        let mut p = Vec::with_capacity(24);
        p.extend_from_slice(&r.region.to_le_bytes());
        p.extend_from_slice(&r.chunks_max.to_le_bytes());
        p.extend_from_slice(&r.base.to_le_bytes());
        p.extend_from_slice(&r.bytes.to_le_bytes());
        self.bytes(tag, &p);
    }

    pub(super) fn layout(&mut self, tag: u16, l: &Layout) {
        let mut p = Vec::with_capacity(40 + 8 * l.regions.len() + ENTRY_BYTES * l.entries.len());
        p.extend_from_slice(&l.model.to_le_bytes());
        let head = [l.page_tokens, l.window_tokens, l.split.size, l.split.rank];
        head.iter().for_each(|v| p.extend_from_slice(&v.to_le_bytes()));
        p.extend_from_slice(&(l.regions.len() as u32).to_le_bytes());
        p.extend_from_slice(&(l.entries.len() as u32).to_le_bytes());
        p.extend_from_slice(&(ENTRY_BYTES as u32).to_le_bytes());
        l.regions.iter().for_each(|v| p.extend_from_slice(&v.to_le_bytes()));
        l.entries.iter().for_each(|e| put_entry(&mut p, e));
        self.bytes(tag, &p);
    }
}

fn put_entry(p: &mut Vec<u8>, e: &Entry) {
    let (role, other) = match e.id.role {
        Role::K => (0, 0),
        Role::V => (1, 0),
        Role::Latent => (2, 0),
        Role::Other(n) => (3, n),
    };
    let component = match e.component {
        Component::Full => 0,
        Component::Window => 1,
        Component::State => 2,
        Component::Ring => 3,
    };
    let (shape, words) = match e.shape {
        Shape::Replicated => (0u8, [0u32; 6]),
        Shape::Heads { total, head_bytes, order } => {
            (1, [total, head_bytes, u32::from(order == HeadOrder::HeadToken), 0, 0, 0])
        }
        Shape::Axis { groups: [a, b, c, d], outer, elem_bytes } => (2, [a, b, c, d, outer, elem_bytes]),
    };
    p.extend_from_slice(&[u8::from(e.id.group == Group::Draft), role, component, shape]);
    p.extend_from_slice(&u32::from(other).to_le_bytes());
    [e.id.layer, e.region, e.units, e.ring_slots].iter().for_each(|v| p.extend_from_slice(&v.to_le_bytes()));
    p.extend_from_slice(&e.base.to_le_bytes());
    p.extend_from_slice(&e.unit_bytes.to_le_bytes());
    words.iter().for_each(|v| p.extend_from_slice(&v.to_le_bytes()));
    p.extend_from_slice(&0u32.to_le_bytes());
}

/// The fields of a body, each at most once.
pub(super) struct Reader<'a> {
    fields: Vec<(u16, &'a [u8])>,
}

/// Bytes of one payload, taken from the front.
struct Cursor<'a> {
    tag: u16,
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], FrameError> {
        let (head, rest) = self.rest.split_at_checked(n).ok_or(FrameError::Field { tag: self.tag })?;
        self.rest = rest;
        Ok(head)
    }

    fn u8(&mut self) -> Result<u8, FrameError> {
        Ok(self.take(1)?[0])
    }

    fn u32(&mut self) -> Result<u32, FrameError> {
        let b = self.take(4)?;
        Ok(u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
    }

    fn u64(&mut self) -> Result<u64, FrameError> {
        let b = self.take(8)?;
        Ok(u64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]))
    }

    fn bad(&self) -> FrameError {
        FrameError::Field { tag: self.tag }
    }

    /// A count of items of `each` bytes: within the limit and within the bytes that follow.
    fn count(&mut self, each: usize, max: usize) -> Result<usize, FrameError> {
        let n = self.u32()? as usize;
        if n > max || n.checked_mul(each).is_none_or(|bytes| bytes > self.rest.len()) {
            return Err(FrameError::Count { tag: self.tag, count: n as u32 });
        }
        Ok(n)
    }
}

impl<'a> Reader<'a> {
    pub(super) fn new(mut body: &'a [u8]) -> Result<Reader<'a>, FrameError> {
        let mut fields: Vec<(u16, &[u8])> = Vec::new();
        while !body.is_empty() {
            let (head, rest) = body.split_at_checked(8).ok_or(FrameError::FieldHead)?;
            let tag = u16::from_le_bytes([head[0], head[1]]);
            let len = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
            let (payload, rest) = rest.split_at_checked(len).ok_or(FrameError::Field { tag })?;
            // The largest body has under 16 fields; a longer list is noise, and the check below is quadratic.
            if fields.len() == 64 || fields.iter().any(|f| f.0 == tag) {
                return Err(FrameError::Repeated { tag });
            }
            fields.push((tag, payload));
            body = rest;
        }
        Ok(Reader { fields })
    }

    pub(super) fn find(&self, tag: u16) -> Option<&'a [u8]> {
        self.fields.iter().find(|f| f.0 == tag).map(|f| f.1)
    }

    fn cursor(&self, tag: u16) -> Result<Cursor<'a>, FrameError> {
        Ok(Cursor { tag, rest: self.find(tag).ok_or(FrameError::Missing { tag })? })
    }

    pub(super) fn bytes(&self, tag: u16, max: usize) -> Result<Vec<u8>, FrameError> {
        let payload = self.find(tag).unwrap_or_default();
        if payload.len() > max {
            return Err(FrameError::Count { tag, count: payload.len() as u32 });
        }
        Ok(payload.to_vec())
    }

    pub(super) fn u32(&self, tag: u16) -> Result<u32, FrameError> {
        self.cursor(tag)?.u32()
    }

    pub(super) fn u64(&self, tag: u16) -> Result<u64, FrameError> {
        self.cursor(tag)?.u64()
    }

    /// A list of pages; an absent field is an empty list.
    pub(super) fn pages(&self, tag: u16) -> Result<Vec<u32>, FrameError> {
        if self.find(tag).is_none() {
            return Ok(Vec::new());
        }
        let mut c = self.cursor(tag)?;
        let total = c.u32()? as usize;
        if total > PAGES_MAX {
            return Err(FrameError::Count { tag, count: total as u32 });
        }
        let runs = c.count(8, PAGES_MAX)?;
        let mut pages = Vec::with_capacity(total.min(runs.saturating_mul(64)));
        for _ in 0..runs {
            let (first, n) = (c.u32()?, c.u32()?);
            let end = first.checked_add(n).ok_or(c.bad())?;
            if n == 0 || pages.len() + n as usize > total {
                return Err(FrameError::Count { tag, count: n });
            }
            pages.extend(first..end);
        }
        if pages.len() == total { Ok(pages) } else { Err(FrameError::Count { tag, count: total as u32 }) }
    }

    pub(super) fn rank(&self, tag: u16) -> Result<Rank, FrameError> {
        let mut c = self.cursor(tag)?;
        Ok(Rank { dp: c.u32()?, pp: c.u32()?, cp: c.u32()?, tp: c.u32()? })
    }

    pub(super) fn topology(&self, tag: u16) -> Result<Topology, FrameError> {
        let mut c = self.cursor(tag)?;
        let (dp, cp, tp, spread, shard) = (c.u32()?, c.u32()?, c.u32()?, c.u32()?, c.u32()?);
        let cp_spread = match spread {
            0 => CpSpread::Replicated,
            1 => CpSpread::Block,
            _ => return Err(c.bad()),
        };
        let page_shard = match shard {
            0 | 1 => shard == 1,
            _ => return Err(c.bad()),
        };
        let n = c.count(4, STAGES_MAX)?;
        let stage_layers = (0..n).map(|_| c.u32()).collect::<Result<_, _>>()?;
        Ok(Topology { dp, cp, tp, stage_layers, cp_spread, page_shard })
    }

    /// A ring; an absent field is none.
    pub(super) fn ring(&self, tag: u16) -> Result<Option<StagingRing>, FrameError> {
        if self.find(tag).is_none() {
            return Ok(None);
        }
        let mut c = self.cursor(tag)?;
        let (region, chunks_max, base, bytes) = (c.u32()?, c.u32()?, c.u64()?, c.u64()?);
        Ok(Some(StagingRing { region, base, bytes, chunks_max }))
    }

    pub(super) fn layout(&self, tag: u16) -> Result<Layout, FrameError> {
        let mut c = self.cursor(tag)?;
        let model = c.u64()?;
        let (page_tokens, window_tokens) = (c.u32()?, c.u32()?);
        let split = TokenSplit { size: c.u32()?, rank: c.u32()? };
        let (regions, entries, stride) = (c.u32()? as usize, c.u32()? as usize, c.u32()? as usize);
        let bytes = entries.checked_mul(stride).and_then(|b| b.checked_add(regions.checked_mul(8)?));
        let fits = bytes.is_some_and(|b| b <= c.rest.len());
        if regions > REGIONS_MAX || entries > ENTRIES_MAX || stride < ENTRY_BYTES || !fits {
            return Err(FrameError::Count { tag, count: entries as u32 });
        }
        let regions = (0..regions).map(|_| c.u64()).collect::<Result<_, _>>()?;
        let entries = (0..entries)
            .map(|_| entry(&mut Cursor { tag, rest: c.take(stride)? }))
            .collect::<Result<_, _>>()?;
        Ok(Layout { model, page_tokens, window_tokens, split, regions, entries })
    }
}

fn entry(c: &mut Cursor<'_>) -> Result<Entry, FrameError> {
    let (group, role, component, shape) = (c.u8()?, c.u8()?, c.u8()?, c.u8()?);
    let other = u16::try_from(c.u32()?).map_err(|_| c.bad())?;
    let (layer, region, units, ring_slots) = (c.u32()?, c.u32()?, c.u32()?, c.u32()?);
    let (base, unit_bytes) = (c.u64()?, c.u64()?);
    let mut words = [0; AXIS_GROUPS_MAX + 2];
    for w in &mut words {
        *w = c.u32()?;
    }
    let [a, b, third, d, e, f] = words;
    let shape = match shape {
        0 => Shape::Replicated,
        1 => Shape::Heads {
            total: a,
            head_bytes: b,
            order: match third {
                0 => HeadOrder::TokenHead,
                1 => HeadOrder::HeadToken,
                _ => return Err(c.bad()),
            },
        },
        2 => Shape::Axis { groups: [a, b, third, d], outer: e, elem_bytes: f },
        _ => return Err(c.bad()),
    };
    let group = match group {
        0 => Group::Target,
        1 => Group::Draft,
        _ => return Err(c.bad()),
    };
    let role = match role {
        0 => Role::K,
        1 => Role::V,
        2 => Role::Latent,
        3 => Role::Other(other),
        _ => return Err(c.bad()),
    };
    let component = match component {
        0 => Component::Full,
        1 => Component::Window,
        2 => Component::State,
        3 => Component::Ring,
        _ => return Err(c.bad()),
    };
    Ok(Entry {
        id: EntryId { group, layer, role },
        component,
        region,
        base,
        units,
        unit_bytes,
        shape,
        ring_slots,
    })
}
