//! The model that the replay pretends to run: it writes stamps where KV would be written, and reads them back
//! wherever KV would be read.

use std::fmt;
use std::sync::Arc;

use sapwood::backend::device::SoftDevice;
use sapwood::backend::host::{MemoryError, POISON_BYTE};
use sapwood::base::{Fence, PageId};
use sapwood::pool::{Geometry, PlaneId, PoolKind};
use sapwood::tiers::RequestComponents;

use super::stamp::{Prefix, fill, first_wrong, salt};
use super::tokens::mix;

/// Where the pages of a request lie.
pub(crate) struct Places<'a> {
    /// One page for each page of tokens.
    pub(crate) table: &'a [PageId],
    /// Window pages and states, where the model has any.
    pub(crate) components: Option<RequestComponents>,
}

/// One plane as the loops below need it.
struct PlaneShape {
    id: PlaneId,
    pool: PoolKind,
    layers: u32,
    parts: usize,
    row_bytes: usize,
}

/// A page whose bytes are not those of its prefix.
#[derive(Clone, Debug)]
pub(crate) struct Mismatch {
    page: PageId,
    /// Position of the page in its request.
    index: usize,
    plane: u8,
    layer: u32,
    part: usize,
    /// Token of the page that is wrong first.
    token: usize,
    /// The row holds the pattern of freed pages.
    poison: bool,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "device page {} (page {} of the request), plane {}, layer {}, part {}, from token {} of the page{}",
            self.page.0,
            self.index,
            self.plane,
            self.layer,
            self.part,
            self.token,
            if self.poison { ": the pattern of a freed page" } else { "" }
        )
    }
}

/// See the module.
pub(crate) struct Model {
    device: SoftDevice,
    /// Every rank holds other bytes of the same page.
    rank_salt: u64,
    page_tokens: usize,
    planes: Vec<PlaneShape>,
    rows: Vec<u8>,
    /// Pages that were compared, all planes and layers of each.
    pub(crate) pages_verified: u64,
}

impl Model {
    pub(crate) fn new(device: SoftDevice, geometry: &Arc<Geometry>, rank: usize) -> Model {
        let planes = geometry.planes().iter().enumerate().map(|(i, p)| PlaneShape {
            id: PlaneId(i as u8),
            pool: p.pool(),
            layers: p.layers(),
            parts: p.parts() as usize,
            row_bytes: p.row_bytes() as usize,
        });
        let planes = planes.collect();
        let page_tokens = geometry.page_size_tokens() as usize;
        let rank_salt = mix(rank as u64);
        Model { device, rank_salt, page_tokens, planes, rows: Vec::new(), pages_verified: 0 }
    }

    /// Writes the KV of tokens `from..to` of a request with these pages, and its state. The fence lies behind the work.
    pub(crate) fn compute(
        &mut self,
        places: &Places<'_>,
        prefix: &Prefix,
        from: usize,
        to: usize,
    ) -> Result<Fence, MemoryError> {
        let fence = self.device.compute_begin();
        let result = self.write(places, prefix, from, to);
        self.device.compute_end(fence);
        result.map(|()| fence)
    }

    fn write(
        &mut self,
        places: &Places<'_>,
        prefix: &Prefix,
        from: usize,
        to: usize,
    ) -> Result<(), MemoryError> {
        let mut at = from;
        while at < to {
            let (page, first) = (at / self.page_tokens, at % self.page_tokens);
            let end = to.min((page + 1) * self.page_tokens);
            let states = prefix.range(at, end);
            self.write_page(PoolKind::Full, places.table[page], first, states)?;
            if let Some(parts) = &places.components
                && let Some(&page) =
                    page.checked_sub(parts.window_from as usize).and_then(|i| parts.window.get(i))
            {
                self.write_page(PoolKind::Window, page, first, states)?;
            }
            at = end;
        }
        match places.components.as_ref().and_then(|parts| parts.state) {
            Some(slot) if to > from => self.write_page(PoolKind::State, slot, 0, prefix.range(to - 1, to)),
            _ => Ok(()),
        }
    }

    /// Writes one row for each state into a page, from row `first` on.
    fn write_page(
        &mut self,
        pool: PoolKind,
        page: PageId,
        first: usize,
        states: &[u64],
    ) -> Result<(), MemoryError> {
        for plane in self.planes.iter().filter(|plane| plane.pool == pool) {
            let part_bytes = states.len() * plane.row_bytes;
            self.rows.resize(part_bytes * plane.parts, 0);
            for layer in 0..plane.layers {
                for (part, rows) in self.rows.chunks_exact_mut(part_bytes).enumerate() {
                    let salt = self.rank_salt ^ salt(plane.id.0, layer, part);
                    fill(states, salt, plane.row_bytes, rows);
                }
                self.device.write_rows(plane.id, page, layer, first as u32, &self.rows)?;
            }
        }
        Ok(())
    }

    /// Compares whole pages `from..to` of a page table with what their prefix demands, and the window and the state that
    /// the request goes on from, if it has them all; calls `wrong` once for each page that differs.
    pub(crate) fn verify(
        &mut self,
        places: &Places<'_>,
        prefix: &Prefix,
        from: usize,
        to: usize,
        mut wrong: impl FnMut(Mismatch),
    ) -> Result<(), MemoryError> {
        let full = places.table.iter().enumerate().take(to).skip(from);
        let mut pages: Vec<_> = full.map(|(index, &page)| (PoolKind::Full, index, page)).collect();
        if let Some(parts) = &places.components {
            let shared = parts.window_from as usize..parts.own_window_from as usize;
            let last = shared.end.saturating_sub(1);
            pages.extend(shared.zip(&parts.window).map(|(index, &page)| (PoolKind::Window, index, page)));
            pages.extend(parts.state_in.map(|slot| (PoolKind::State, last, slot)));
        }
        for (pool, index, page) in pages {
            let end = (index + 1) * self.page_tokens;
            let tokens = if pool == PoolKind::State { 1 } else { self.page_tokens };
            self.pages_verified += 1;
            if let Some(mismatch) = self.verify_page(pool, index, page, prefix.range(end - tokens, end))? {
                wrong(mismatch);
            }
        }
        Ok(())
    }

    fn verify_page(
        &mut self,
        pool: PoolKind,
        index: usize,
        page: PageId,
        states: &[u64],
    ) -> Result<Option<Mismatch>, MemoryError> {
        for plane in self.planes.iter().filter(|plane| plane.pool == pool) {
            let part_bytes = states.len() * plane.row_bytes;
            self.rows.resize(part_bytes * plane.parts, 0);
            for layer in 0..plane.layers {
                self.device.read_rows(plane.id, page, layer, 0, &mut self.rows)?;
                for (part, rows) in self.rows.chunks_exact(part_bytes).enumerate() {
                    let salt = self.rank_salt ^ salt(plane.id.0, layer, part);
                    if let Some(token) = first_wrong(states, salt, plane.row_bytes, rows) {
                        let row = &rows[token * plane.row_bytes..(token + 1) * plane.row_bytes];
                        let poison = row.iter().all(|&b| b == POISON_BYTE);
                        let plane = plane.id.0;
                        return Ok(Some(Mismatch { page, index, plane, layer, part, token, poison }));
                    }
                }
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sapwood::pool::{Capacities, Capacity, Plane};

    fn model(page_tokens: u32) -> Model {
        let geometry = Geometry::builder(page_tokens).plane(Plane::target(3, 6)).plane(Plane::draft(1, 16));
        let geometry = Arc::new(geometry.build().unwrap());
        let device = SoftDevice::inline(Arc::clone(&geometry), Capacities::full(Capacity::Pages(8))).unwrap();
        Model::new(device, &geometry, 0)
    }

    fn full(table: &[PageId]) -> Places<'_> {
        Places { table, components: None }
    }

    fn wrong(model: &mut Model, table: &[PageId], prefix: &Prefix, to: usize) -> Vec<Mismatch> {
        let mut found = Vec::new();
        model.verify(&full(table), prefix, 0, to, |m| found.push(m)).unwrap();
        found
    }

    #[test]
    fn what_was_computed_in_pieces_verifies_and_what_was_not_does_not() {
        let mut model = model(16);
        let table = [5, 2, 7].map(PageId);
        let mut prefix = Prefix::new(0);
        prefix.extend(&(0..48).collect::<Vec<u32>>());
        for (from, to) in [(0, 7), (7, 20), (20, 21), (21, 48)] {
            assert!(model.compute(&full(&table), &prefix, from, to).unwrap().number() > 0);
        }
        assert!(wrong(&mut model, &table, &prefix, 3).is_empty());
        assert_eq!(model.pages_verified, 3);
        // Two pages of one request swapped, and a freed page.
        assert_eq!(wrong(&mut model, &[5, 7, 2].map(PageId), &prefix, 3).len(), 2);
        model.device.poison(PoolKind::Full, PageId(2)).unwrap();
        let found = wrong(&mut model, &table, &prefix, 3);
        assert_eq!((found.len(), found[0].index, found[0].token, found[0].poison), (1, 1, 0, true));
        assert!(found[0].to_string().contains("device page 2"));
    }

    #[test]
    fn one_flipped_byte_is_named_to_the_token() {
        let mut model = model(16);
        let table = [PageId(0)];
        let mut prefix = Prefix::new(0);
        prefix.extend(&[9; 16]);
        model.compute(&full(&table), &prefix, 0, 16).unwrap();
        let mut rows = [0; 12];
        model.device.read_rows(PlaneId(0), PageId(0), 2, 11, &mut rows).unwrap();
        rows[7] ^= 1;
        model.device.write_rows(PlaneId(0), PageId(0), 2, 11, &rows).unwrap();
        let found = wrong(&mut model, &table, &prefix, 1);
        assert_eq!((found[0].plane, found[0].layer, found[0].part, found[0].token), (0, 2, 1, 11));
        assert!(!found[0].poison);
    }
}
