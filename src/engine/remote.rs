//! The cache at both ends of a remote prefill.
//!
//! On the decode side [`DecodeCache`] owns the cache and keeps to the contract of [`GrantPool`]. The pages of a
//! grant are the own pages of a request, which eviction, demotion and compaction never touch; the request leaves
//! by `commit` and [`DecodeCache::finish`], into the tree, or by `release`, whose argument nobody can make without
//! a proof. What matched on the device, or is being restored from the host, is the prefix that is not sent.
//!
//! On the prefill side a [`Request`] is the read pin: keep it from the first page offered to the sender until
//! [`Event::Unpin`](crate::pd::sender::Event::Unpin), and nothing evicts or moves the sources.

use super::cache::{CacheError, PrefixCache};
use super::request::Request;
use crate::base::containers::Map;
use crate::base::{Fence, NamespaceId, PageId};
use crate::pd::grant::{Committed, Destination, GrantPool, Granted, Released, ReserveRefused, Want};
use crate::pd::layout::{Component, Entry, EntryId, Group, HeadOrder, Layout, Role, Shape, TokenSplit};
use crate::pd::{Incompatible, RoomKey};
use crate::pool::{Geometry, Plane, PlaneKind, PoolKind};
use crate::tiers::{Alloc, Checkpoint, LoadBack, LoadState};

/// What a model says about the planes of a cache that the geometry does not.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ModelShape {
    /// Digest of model, revision, dtype and everything else that must be equal for bytes to mean the same.
    pub model: u64,
    /// Attention heads of K and V in the whole model.
    pub heads_total: u32,
    /// Those that lie in the pages of this rank.
    pub heads_here: u32,
    /// First layer of this rank's pipeline stage.
    pub first_layer: u32,
}

/// The layout to publish for device memory of `pages` pages in layer-first order, one region per plane. Planes
/// outside the pool `Full` and rows that do not split into the heads are refused. O(planes x layers).
pub fn layer_first_layout(g: &Geometry, pages: u32, shape: ModelShape) -> Result<Layout, Incompatible> {
    let (mut regions, mut entries) = (Vec::new(), Vec::new());
    for (region, plane) in (0u32..).zip(g.planes()) {
        if plane.pool() != PoolKind::Full {
            return Err(Incompatible::EntryShape);
        }
        let unit_bytes = plane.part_bytes();
        let mut base = 0;
        for layer in 0..plane.layers() {
            for part in 0..plane.parts() {
                let (id, shape) = entry_of(plane, region, layer, part, shape)?;
                let component = Component::Full;
                entries.push(Entry {
                    id,
                    component,
                    region,
                    base,
                    units: pages,
                    unit_bytes,
                    shape,
                    ring_slots: 0,
                });
                base += unit_bytes * u64::from(pages);
            }
        }
        regions.push(base);
    }
    Ok(Layout {
        model: shape.model,
        page_tokens: g.page_size_tokens(),
        window_tokens: 0,
        split: TokenSplit::NONE,
        regions,
        entries,
    })
}

fn entry_of(
    plane: &Plane,
    index: u32,
    layer: u32,
    part: u32,
    m: ModelShape,
) -> Result<(EntryId, Shape), Incompatible> {
    let group = if plane.kind().is_draft() { Group::Draft } else { Group::Target };
    let first = if plane.kind().is_draft() { 0 } else { m.first_layer };
    let heads = matches!(plane.kind(), PlaneKind::Target | PlaneKind::Draft) && plane.parts() == 2;
    let role = match (plane.kind(), part) {
        (_, 0) if heads => Role::K,
        (_, _) if heads => Role::V,
        (PlaneKind::Latent, 0) => Role::Latent,
        _ => Role::Other((index * plane.parts() + part) as u16),
    };
    let layer = first + plane.model_layer(layer);
    let id = EntryId { group, layer, role };
    if !heads {
        return Ok((id, Shape::Replicated));
    }
    if m.heads_here == 0 || !plane.row_bytes().is_multiple_of(m.heads_here) {
        return Err(Incompatible::HeadSplit);
    }
    let head_bytes = plane.row_bytes() / m.heads_here;
    Ok((id, Shape::Heads { total: m.heads_total, head_bytes, order: HeadOrder::TokenHead }))
}

/// How much of a prompt is here already.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Prefix {
    /// Pages that need not be sent.
    pub pages: u32,
    /// Some of them are on their way from the host: ask [`DecodeCache::restore`] before believing them.
    pub restoring: bool,
}

/// What became of the part of a prefix that comes from the host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Restore {
    /// All of it may be read.
    Ready,
    /// Under way.
    Pending,
    /// It will not come. Pages from `from` on are missing: top them up or fail the room.
    Failed {
        /// First page that is not there.
        from: u32,
    },
}

#[derive(Debug)]
struct Room {
    request: Request,
    tokens: Vec<u32>,
    /// Pages that lay on the device when the request matched; no copy can take them back.
    device_pages: u32,
    prefix: u32,
    /// Takes the place of pages `first..prefix` that did not come from the host.
    gap: Option<(u32, Request)>,
    granted: bool,
}

/// A cache whose requests are filled by prefill ranks elsewhere.
#[derive(Debug)]
pub struct DecodeCache {
    cache: PrefixCache,
    rooms: Map<RoomKey, Room>,
}

impl DecodeCache {
    /// Takes the cache over; it can be reached by [`Self::cache`].
    #[must_use]
    pub fn new(cache: PrefixCache) -> DecodeCache {
        DecodeCache { cache, rooms: Map::default() }
    }

    /// The cache.
    #[must_use]
    pub fn cache(&self) -> &PrefixCache {
        &self.cache
    }

    /// The cache, for requests of other kinds and for [`PrefixCache::tick`].
    pub fn cache_mut(&mut self) -> &mut PrefixCache {
        &mut self.cache
    }

    /// Rooms that hold pages here.
    #[must_use]
    pub fn rooms(&self) -> usize {
        self.rooms.len()
    }

    /// Looks the prompt of a room up, holds what is there and starts to restore what lies on the host. The answer
    /// is the prefix to grant with. Opening a room twice starts it anew, unless its pages are out: then it stays
    /// as it is. O(tokens).
    pub fn open(
        &mut self,
        key: RoomKey,
        namespace: NamespaceId,
        tokens: &[u32],
    ) -> Result<Prefix, CacheError> {
        if let Some(room) = self.rooms.get(&key).filter(|r| r.granted) {
            return Ok(Prefix { pages: room.prefix, restoring: true });
        }
        let mut request = self.cache.request(namespace);
        let found = self.cache.match_prefix(&mut request, tokens)?;
        let device_pages = self.cache.pages(&request)?.len() as u32;
        let restoring =
            found.host_tokens > 0 && matches!(self.cache.load_back(&mut request)?, LoadBack::Started { .. });
        let prefix = self.cache.pages(&request)?.len() as u32;
        let tokens = tokens.to_vec();
        let room = Room { request, tokens, device_pages, prefix, gap: None, granted: false };
        self.rooms.insert(key, room);
        Ok(Prefix { pages: prefix, restoring })
    }

    /// How the part of the prefix is that comes from the host.
    pub fn restore(&mut self, key: RoomKey) -> Result<Restore, CacheError> {
        let Some(room) = self.rooms.get(&key) else { return Ok(Restore::Ready) };
        if room.gap.is_some() {
            return Ok(Restore::Ready);
        }
        Ok(match self.cache.load_state(&room.request)? {
            LoadState::Ready => Restore::Ready,
            LoadState::Pending { .. } => Restore::Pending,
            LoadState::Failed => Restore::Failed { from: room.device_pages },
        })
    }

    /// Takes pages for a prefix that broke at `from`, to be handed to
    /// [`Receiver::handle_restore_failed`](crate::pd::receiver::Receiver::handle_restore_failed).
    pub fn reserve_gap(&mut self, key: RoomKey, from: u32) -> Result<Granted, ReserveRefused> {
        let room = self.rooms.get_mut(&key).ok_or(ReserveRefused::NoPages)?;
        if room.gap.is_some() || from >= room.prefix {
            return Err(ReserveRefused::NoPages);
        }
        let mut request = self.cache.request(NamespaceId::DEFAULT);
        match self.cache.alloc(&mut request, room.prefix - from) {
            Ok(Alloc::Granted) => {}
            Ok(Alloc::Refused { .. }) | Err(_) => return Err(ReserveRefused::NoPages),
        }
        let full = numbers(self.cache.pages(&request).unwrap_or_default());
        room.gap = Some((from, request));
        Ok(Granted::new(Destination { full, ..Destination::default() }))
    }

    /// The page table of a room, prefix first. Its bytes are complete after a commit.
    #[must_use]
    pub fn pages(&self, key: RoomKey) -> Vec<PageId> {
        let Some(room) = self.rooms.get(&key) else { return Vec::new() };
        let mut table = self.cache.pages(&room.request).unwrap_or_default().to_vec();
        if let Some((from, gap)) = &room.gap {
            let pages = self.cache.pages(gap).unwrap_or_default();
            for (to, page) in table.iter_mut().skip(*from as usize).zip(pages) {
                *to = *page;
            }
        }
        table
    }

    /// Ends a room whose pages were committed and read: publishes its whole pages, gives the rest back.
    /// `last_use` is behind the last reader. A room whose prefix was topped up publishes nothing, as its request
    /// rests on a load that failed. `None` then, and if there is no such room.
    pub fn finish(&mut self, key: RoomKey, last_use: Fence) -> Result<Option<Checkpoint>, CacheError> {
        match self.rooms.remove(&key) {
            None => Ok(None),
            Some(Room { request, tokens, gap: None, .. }) => {
                Ok(Some(self.cache.finish(request, &tokens, last_use)?))
            }
            Some(Room { request, gap: Some((_, gap)), .. }) => {
                self.cache.abort(request, last_use)?;
                self.cache.abort(gap, last_use)?;
                Ok(None)
            }
        }
    }

    /// Ends a room that was never granted. One that was comes back by `commit` or `release` only; false then.
    pub fn give_up(&mut self, key: RoomKey) -> bool {
        if self.rooms.get(&key).is_some_and(|r| r.granted) {
            return false;
        }
        if let Some(room) = self.rooms.remove(&key) {
            self.abort(room);
        }
        true
    }

    /// Nothing writes the pages any more, and nothing has read them.
    fn abort(&mut self, room: Room) {
        for request in std::iter::once(room.request).chain(room.gap.map(|g| g.1)) {
            if let Err(error) = self.cache.abort(request, Fence::SETTLED) {
                tracing::error!(%error, "sapwood: a room's request is unknown");
            }
        }
    }
}

fn numbers(pages: &[PageId]) -> Vec<u32> {
    pages.iter().map(|p| p.0).collect()
}

impl GrantPool for DecodeCache {
    /// The room must be open. Only the pool `Full` is known here.
    fn reserve(&mut self, key: RoomKey, want: &Want) -> Result<Granted, ReserveRefused> {
        if want.window + want.state + want.ring > 0 {
            return Err(ReserveRefused::NoSlots);
        }
        let room = self.rooms.get_mut(&key).filter(|r| !r.granted).ok_or(ReserveRefused::NoPages)?;
        match self.cache.alloc(&mut room.request, want.full) {
            Ok(Alloc::Granted) => {}
            Ok(Alloc::Refused { .. }) | Err(_) => return Err(ReserveRefused::NoPages),
        }
        let table = self.cache.pages(&room.request).unwrap_or_default();
        let full = numbers(table.get(room.prefix as usize..).unwrap_or_default());
        room.granted = true;
        Ok(Granted::new(Destination { full, ..Destination::default() }))
    }

    /// The pages stay with the room until [`DecodeCache::finish`].
    fn commit(&mut self, key: RoomKey, pages: Committed) {
        let d = pages.into_destination();
        if let Some(room) = self.rooms.get_mut(&key) {
            room.granted = false;
            debug_assert!(self.pages(key).ends_with(&d.full.iter().map(|&p| PageId(p)).collect::<Vec<_>>()));
        }
    }

    fn release(&mut self, key: RoomKey, pages: Released) {
        let _ = pages.into_destination();
        if let Some(room) = self.rooms.remove(&key) {
            self.abort(room);
        }
    }
}

#[cfg(test)]
mod tests;
