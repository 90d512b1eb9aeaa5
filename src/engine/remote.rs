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
use crate::pool::{Geometry, Plane, PlaneKind, PlaneSet, PoolKind};
use crate::tiers::{Alloc, Checkpoint, LoadBack, LoadState, RequestComponents};

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
    /// Tokens of the sliding window; 0 without one.
    pub window_tokens: u32,
}

/// The layout to publish for device memory in layer-first order, one region per plane, with `pages(pool)` pages of each
/// pool. Refused: rows that do not split into the heads, and states of a rank that holds a part of the model, since
/// only the model knows along which axes they are cut. O(planes x layers).
pub fn layer_first_layout(
    g: &Geometry,
    pages: impl Fn(PoolKind) -> u32,
    shape: ModelShape,
) -> Result<Layout, Incompatible> {
    let (mut regions, mut entries) = (Vec::new(), Vec::new());
    for (region, plane) in (0u32..).zip(g.planes()) {
        let component = match plane.pool() {
            PoolKind::Full => Component::Full,
            PoolKind::Window => Component::Window,
            PoolKind::State if shape.heads_here == shape.heads_total => Component::State,
            PoolKind::State => return Err(Incompatible::EntryShape),
        };
        let (units, unit_bytes) = (pages(plane.pool()), plane.part_bytes());
        let mut base = 0;
        for layer in 0..plane.layers() {
            for part in 0..plane.parts() {
                let (id, shape) = entry_of(plane, region, layer, part, shape)?;
                entries.push(Entry { id, component, region, base, units, unit_bytes, shape, ring_slots: 0 });
                base += unit_bytes * u64::from(units);
            }
        }
        regions.push(base);
    }
    Ok(Layout {
        model: shape.model,
        page_tokens: g.page_size_tokens(),
        window_tokens: shape.window_tokens,
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
    namespace: NamespaceId,
    tokens: Vec<u32>,
    /// Pages that lay on the device when the request matched; no copy can take them back.
    device_pages: u32,
    prefix: u32,
    /// Of a room whose restore failed: matched what is really there, and owns the pages that are topped up.
    again: Option<Request>,
    granted: bool,
}

/// A cache whose requests are filled by prefill ranks elsewhere.
#[derive(Debug)]
pub struct DecodeCache {
    cache: PrefixCache,
    rooms: Map<RoomKey, Room>,
    unsent: PlaneSet,
}

impl DecodeCache {
    /// Takes the cache over; it can be reached by [`Self::cache`].
    #[must_use]
    pub fn new(cache: PrefixCache) -> DecodeCache {
        DecodeCache { cache, rooms: Map::default(), unsent: PlaneSet::NONE }
    }

    /// Planes that the prefill instances do not send: those of a draft that only decodes here. What comes from there is
    /// known to lack them, in every tier ([`PrefixCache::missing_planes`]).
    #[must_use]
    pub fn unsent(mut self, planes: PlaneSet) -> DecodeCache {
        self.unsent = planes;
        self
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
        let room = Room { request, namespace, tokens, device_pages, prefix, again: None, granted: false };
        self.rooms.insert(key, room);
        Ok(Prefix { pages: prefix, restoring })
    }

    /// How the part of the prefix is that comes from the host.
    pub fn restore(&mut self, key: RoomKey) -> Result<Restore, CacheError> {
        let Some(room) = self.rooms.get_mut(&key) else { return Ok(Restore::Ready) };
        match self.cache.load_state(&room.request)? {
            LoadState::Ready => return Ok(Restore::Ready),
            LoadState::Pending { .. } => return Ok(Restore::Pending),
            LoadState::Failed => {}
        }
        let again = match &room.again {
            Some(again) => again,
            None => {
                // With windows or states a request cannot go on just anywhere: the match says where.
                let there = room.device_pages * self.cache.geometry().page_size_tokens();
                let mut again = self.cache.request(room.namespace);
                self.cache.match_prefix(&mut again, &room.tokens[..there as usize])?;
                room.again.insert(again)
            }
        };
        let from = self.cache.pages(again)?.len() as u32;
        // More than the match is there once the gap has its pages.
        Ok(if from < room.prefix { Restore::Failed { from } } else { Restore::Ready })
    }

    /// Takes pages for the gap of a room whose restore failed: so many as
    /// [`Receiver::want_topup`](crate::pd::receiver::Receiver::want_topup) says. They are to be handed to
    /// [`Receiver::handle_restore_failed`](crate::pd::receiver::Receiver::handle_restore_failed).
    pub fn reserve_gap(&mut self, key: RoomKey, want: &Want) -> Result<Granted, ReserveRefused> {
        let Room { again, prefix, .. } = self.rooms.get_mut(&key).ok_or(ReserveRefused::NoPages)?;
        let again = again.as_mut().ok_or(ReserveRefused::NoPages)?;
        let from = self.cache.pages(again).unwrap_or_default().len() as u32;
        if from >= *prefix || want.full != *prefix - from {
            return Err(ReserveRefused::NoPages);
        }
        // Its state stays unused: the room has one.
        let mut dest = self.take(key, true, want)?;
        dest.state.clear();
        Ok(Granted::new(dest))
    }

    /// Pages of its own for the request of a room, or for the one that fills its gap.
    fn take(&mut self, key: RoomKey, gap: bool, want: &Want) -> Result<Destination, ReserveRefused> {
        let room = self.rooms.get_mut(&key).ok_or(ReserveRefused::NoPages)?;
        let request = if gap { room.again.as_mut() } else { Some(&mut room.request) };
        let request = request.ok_or(ReserveRefused::NoPages)?;
        match self.cache.alloc(request, want.full) {
            Ok(Alloc::Granted) => {}
            Ok(Alloc::Refused { .. }) | Err(_) => return Err(ReserveRefused::NoPages),
        }
        let table = self.cache.pages(request).unwrap_or_default();
        let (end, own) = (table.len() as u32, table.len() - want.full as usize);
        let full = numbers(&table[own..]);
        // The rest of the window is not sent, and must not be published.
        let kept = self.cache.let_window_go(request, end.saturating_sub(want.window));
        let Ok(parts) = kept.and_then(|()| self.cache.components(request)) else {
            return Err(ReserveRefused::NoPages);
        };
        let windows = parts.window.len().saturating_sub(want.window as usize);
        let window = if want.window > 0 { numbers(&parts.window[windows..]) } else { Vec::new() };
        let state: Vec<u32> = parts.state.map(|s| s.0).into_iter().collect();
        if self.unsent != PlaneSet::NONE {
            let dest = [(PoolKind::Full, &full), (PoolKind::Window, &window), (PoolKind::State, &state)];
            for (pool, pages) in dest {
                self.cache.will_lack(pool, pages.iter().map(|&page| PageId(page)), self.unsent);
            }
        }
        Ok(Destination { full, window, state, ring: Vec::new() })
    }

    /// Whether the cache has the components that the layout of the rank has.
    fn components_fit(&self, want: &Want) -> bool {
        let config = self.cache.core().config();
        let windows = config.window.is_some() && want.full > 0;
        want.ring == 0 && (want.window > 0) == windows && (want.state > 0) == config.state.is_some()
    }

    /// The page table of a room, prefix first. Its bytes are complete after a commit.
    #[must_use]
    pub fn pages(&self, key: RoomKey) -> Vec<PageId> {
        let Some(room) = self.rooms.get(&key) else { return Vec::new() };
        let mut table = self.cache.pages(&room.request).unwrap_or_default().to_vec();
        if let Some(again) = &room.again {
            // What did not come is not there, whatever the first match said.
            for (to, page) in table.iter_mut().zip(self.cache.pages(again).unwrap_or_default()) {
                *to = *page;
            }
        }
        table
    }

    /// Window pages and state of a room; complete after a commit.
    pub fn components(&self, key: RoomKey) -> Option<RequestComponents> {
        self.cache.components(&self.rooms.get(&key)?.request).ok()
    }

    /// Ends a room whose pages were committed and read: publishes its whole pages with what belongs to them, gives
    /// the rest back. `last_use` is behind the last reader. `None` if there is no such room.
    pub fn finish(&mut self, key: RoomKey, last_use: Fence) -> Result<Option<Checkpoint>, CacheError> {
        let Some(room) = self.rooms.remove(&key) else { return Ok(None) };
        if let Some(again) = room.again {
            self.cache.abort(again, last_use)?;
        }
        Ok(Some(self.cache.finish(room.request, &room.tokens, last_use)?))
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
        for request in std::iter::once(room.request).chain(room.again) {
            if let Err(error) = self.cache.abort(request, Fence::SETTLED) {
                tracing::error!(%error, "sapwood: a room's request is unknown");
            }
        }
    }

    /// The room goes on with the request that filled its gap, which gets what the grant brought behind it.
    fn join(&mut self, key: RoomKey) -> Result<(), CacheError> {
        let Some(room) = self.rooms.get_mut(&key) else { return Ok(()) };
        let Some(mut again) = room.again.take() else { return Ok(()) };
        let taken = self.cache.take_over(&mut again, &mut room.request);
        let failed = std::mem::replace(&mut room.request, again);
        taken?;
        self.cache.abort(failed, Fence::SETTLED)
    }
}

fn numbers(pages: &[PageId]) -> Vec<u32> {
    pages.iter().map(|p| p.0).collect()
}

impl GrantPool for DecodeCache {
    /// The room must be open, and the cache must have the components of the layout. A rank with rings cannot have
    /// its pages from a cache.
    fn reserve(&mut self, key: RoomKey, want: &Want) -> Result<Granted, ReserveRefused> {
        if !self.components_fit(want) {
            return Err(ReserveRefused::NoSuchPool);
        }
        self.rooms.get(&key).filter(|r| !r.granted).ok_or(ReserveRefused::NoPages)?;
        let dest = self.take(key, false, want)?;
        if let Some(room) = self.rooms.get_mut(&key) {
            room.granted = true;
        }
        Ok(Granted::new(dest))
    }

    /// The pages stay with the room until [`DecodeCache::finish`].
    fn commit(&mut self, key: RoomKey, pages: Committed) {
        let d = pages.into_destination();
        if let Some(room) = self.rooms.get_mut(&key) {
            room.granted = false;
            debug_assert!(self.pages(key).ends_with(&d.full.iter().map(|&p| PageId(p)).collect::<Vec<_>>()));
            if let Err(error) = self.join(key) {
                tracing::error!(%error, "sapwood: a topped-up room is not whole");
            }
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
