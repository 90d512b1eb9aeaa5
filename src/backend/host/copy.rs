//! Copies of pages between two arenas.
#![expect(unsafe_code, reason = "moves page bytes between regions under the caller's claims")]

use std::ops::Range;

use super::arena::{HostArena, MemoryError};
use crate::base::PageId;
use crate::pool::PlaneId;

/// Copies `layers` of one plane of page `from` of `src` to page `to` of `dst`. The longest runs that are
/// contiguous on both sides go in one piece: all layers, a layer, or a part.
///
/// # Safety
/// Both arenas have the same geometry. Until the call returns, nobody else writes page `from` of `src` or
/// touches page `to` of `dst`, and the two are not the same page.
pub(crate) unsafe fn copy_layers(
    (src, from): (&HostArena, PageId),
    (dst, to): (&HostArena, PageId),
    plane: PlaneId,
    layers: Range<u32>,
) -> Result<(), MemoryError> {
    let (Some(p), Some(s), Some(d)) =
        (src.geometry().plane(plane), src.plane_memory(plane), dst.plane_memory(plane))
    else {
        return Err(MemoryError::NoSuchPlane { plane });
    };
    let (s_base, d_base) = (u64::from(from.0) * s.steps.page, u64::from(to.0) * d.steps.page);
    let merge_parts = s.steps.part == p.part_bytes() && d.steps.part == p.part_bytes();
    let merge_layers = merge_parts && s.steps.layer == p.layer_bytes() && d.steps.layer == p.layer_bytes();
    let (parts, run) = if merge_parts { (1, p.layer_bytes()) } else { (p.parts(), p.part_bytes()) };
    let count = layers.end.saturating_sub(layers.start);
    let (outer, run) = if merge_layers { (count.min(1), run * u64::from(count)) } else { (count, run) };
    for layer in layers.start..layers.start + outer {
        for part in 0..parts {
            let (l, q) = (u64::from(layer), u64::from(part));
            let s_at = (s_base + l * s.steps.layer + q * s.steps.part) as usize;
            let d_at = (d_base + l * d.steps.layer + q * d.steps.part) as usize;
            // SAFETY: the ranges are checked by the regions and lie in pages that the caller claimed.
            unsafe {
                d.region.slice_mut(d_at, run as usize)?.copy_from_slice(s.region.slice(s_at, run as usize)?)
            };
        }
    }
    Ok(())
}
