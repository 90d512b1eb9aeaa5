//! Where K and V live: in the cache's device pages, or in plain memory for the run without a cache.

use std::convert::Infallible;
use std::sync::Arc;

use sapwood::backend::device::SoftDevice;
use sapwood::backend::host::MemoryError;
use sapwood::base::PageId;
use sapwood::pool::{Geometry, GeometryError, Plane, PlaneId};

use crate::model::{KV_DIM, Kv, LAYERS, Rows};

const TARGET: PlaneId = PlaneId(0);
const DRAFT: PlaneId = PlaneId(1);
const ROW_BYTES: usize = KV_DIM * size_of::<f32>();

/// K and V of the target, and those of the draft head as a plane that follows the same pages. The head runs after
/// the target, so its layer is the model's last.
pub fn geometry(page_size: u32) -> Result<Arc<Geometry>, GeometryError> {
    let draft = Plane::draft(1, ROW_BYTES as u32).on_model_layers([LAYERS as u32]);
    let target = Plane::target(LAYERS as u32, ROW_BYTES as u32);
    Geometry::builder(page_size).plane(target).plane(draft).build().map(Arc::new)
}

/// A request's page table over device memory.
pub struct Paged<'a> {
    /// The device.
    pub device: &'a SoftDevice,
    /// One page per `page_size` tokens.
    pub table: &'a [PageId],
    /// Tokens per page.
    pub page_size: usize,
}

fn place(layer: usize) -> (PlaneId, u32) {
    if layer == LAYERS { (DRAFT, 0) } else { (TARGET, layer as u32) }
}

impl Kv for Paged<'_> {
    type Error = MemoryError;

    fn put(&mut self, layer: usize, position: usize, k: &[f32], v: &[f32]) -> Result<(), MemoryError> {
        let mut bytes = Vec::with_capacity(2 * ROW_BYTES);
        k.iter().chain(v).for_each(|x| bytes.extend_from_slice(&x.to_le_bytes()));
        let (plane, layer) = place(layer);
        let page = self.table[position / self.page_size];
        self.device.write_rows(plane, page, layer, (position % self.page_size) as u32, &bytes)
    }

    fn read(&self, layer: usize, positions: usize, rows: &mut Rows) -> Result<(), MemoryError> {
        let (plane, layer) = place(layer);
        let mut bytes = vec![0; 2 * ROW_BYTES * self.page_size];
        for (i, &page) in self.table[..positions.div_ceil(self.page_size)].iter().enumerate() {
            let tokens = self.page_size.min(positions - i * self.page_size);
            let bytes = &mut bytes[..2 * ROW_BYTES * tokens];
            self.device.read_rows(plane, page, layer, 0, bytes)?;
            let (k, v) = bytes.split_at(ROW_BYTES * tokens);
            rows.k.extend(floats(k));
            rows.v.extend(floats(v));
        }
        Ok(())
    }
}

fn floats(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b))
}

/// Plain memory.
#[derive(Default)]
pub struct Flat {
    rows: [Rows; LAYERS + 1],
}

impl Kv for Flat {
    type Error = Infallible;

    fn put(&mut self, layer: usize, position: usize, k: &[f32], v: &[f32]) -> Result<(), Infallible> {
        let rows = &mut self.rows[layer];
        let at = position * KV_DIM;
        for (to, from) in [(&mut rows.k, k), (&mut rows.v, v)] {
            to.resize(to.len().max(at + KV_DIM), 0.0);
            to[at..at + KV_DIM].copy_from_slice(from);
        }
        Ok(())
    }

    fn read(&self, layer: usize, positions: usize, rows: &mut Rows) -> Result<(), Infallible> {
        rows.k.extend_from_slice(&self.rows[layer].k[..positions * KV_DIM]);
        rows.v.extend_from_slice(&self.rows[layer].v[..positions * KV_DIM]);
        Ok(())
    }
}
