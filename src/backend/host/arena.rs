//! An arena: the memory behind the pages of all planes, addressed by (plane, page, layer, part, row).
#![expect(
    unsafe_code,
    reason = "page bytes are reached through regions; claims make the safe functions sound"
)]

use std::sync::Arc;

use super::budget::{Budget, BudgetError, Promise};
use super::claim::{Access, Guards, PageClaim};
use crate::backend::region::{Mapping, Region, RegionError, Sharing};
use crate::base::PageId;
use crate::base::limits::POOL_PAGES_MAX;
use crate::pool::{Capacities, Capacity, Geometry, Plane, PlaneId, PlaneSet, PoolKind};

/// What a poisoned page is full of.
pub const POISON_BYTE: u8 = 0xDB;

/// Address space asked for by an unlimited pool. Only what is touched is committed.
const RESERVE_BYTES: u64 = 1 << 40;

/// Order of the bytes of a plane over all its pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// (page, layer, part, row): a page is one block. What the host and the store use.
    PageFirst,
    /// (layer, part, page, row): a layer is one block, as most models hold it on a device.
    LayerFirst,
}

/// Why memory could not be had or touched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The geometry has no such plane, or it follows another pool.
    #[error("no plane {plane:?}")]
    NoSuchPlane {
        /// The plane.
        plane: PlaneId,
    },
    /// The pool has no such page.
    #[error("no page {page:?} in pool {pool:?}, which has {pages}")]
    NoSuchPage {
        /// The pool.
        pool: PoolKind,
        /// The page.
        page: PageId,
        /// Pages there are.
        pages: u32,
    },
    /// Bytes past the end of a page, rows past its last, or not whole rows.
    #[error("{len} bytes at {offset} do not fit the {limit} bytes there are, or are not whole rows")]
    Range {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Bytes there are.
        limit: u64,
    },
    /// Somebody else holds a claim on the page.
    #[error("page {page:?} of pool {pool:?} is claimed by an access in flight")]
    Busy {
        /// The pool.
        pool: PoolKind,
        /// The page.
        page: PageId,
    },
    /// A page of the plane is not one block in this arena.
    #[error("a page of plane {plane:?} is not one block here")]
    Scattered {
        /// The plane.
        plane: PlaneId,
    },
    /// The two arenas of a copy have different geometries.
    #[error("the arenas have different geometries")]
    OtherGeometry,
    /// The pages do not fit an address space.
    #[error("{pages} pages of {page_bytes} bytes are more than can be addressed")]
    TooLarge {
        /// Pages asked for.
        pages: u32,
        /// Bytes of one.
        page_bytes: u64,
    },
    /// Shared or committed memory for as many pages as are asked for: all of what is reserved would be taken.
    #[error("a pool that is shared or committed at once needs a number of pages")]
    UnlimitedCommitted,
    /// The ranks of the node have promised the memory to others.
    #[error(transparent)]
    Budget(#[from] BudgetError),
    /// The system refused memory, or a range was wrong.
    #[error(transparent)]
    Region(#[from] RegionError),
}

/// Where the memory of an arena comes from. One plan holds for all planes: a plane can not be somewhere else.
#[derive(Clone, Debug, Default)]
pub struct MemoryPlan {
    /// Sharing, page size, NUMA node.
    pub mapping: Mapping,
    /// Threads that commit all pages before the arena is handed out; 0: pages are committed when first used.
    pub touch_threads: usize,
    /// What the ranks of the node may take together; `None`: whatever the system grants.
    pub budget: Option<Budget>,
}

impl MemoryPlan {
    fn shared(&self) -> bool {
        self.mapping.sharing != Sharing::Private
    }
}

/// Where one page of one plane lies, as one block.
#[derive(Clone, Copy, Debug)]
pub struct PageRange<'a> {
    /// The memory.
    pub region: &'a Arc<Region>,
    /// First byte in it.
    pub offset: usize,
    /// Bytes.
    pub len: usize,
}

/// Distances in bytes between neighbours along each axis of a plane. Rows of one part are adjacent in every
/// order, so `part_bytes` is always one run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Steps {
    pub(crate) page: u64,
    pub(crate) layer: u64,
    pub(crate) part: u64,
}

impl Steps {
    pub(crate) fn of(plane: &Plane, order: Order, pages: u32) -> Steps {
        match order {
            Order::PageFirst => {
                Steps { page: plane.page_bytes(), layer: plane.layer_bytes(), part: plane.part_bytes() }
            }
            Order::LayerFirst => {
                let part = plane.part_bytes() * u64::from(pages);
                Steps { page: plane.part_bytes(), layer: part * u64::from(plane.parts()), part }
            }
        }
    }
}

/// The memory of one plane.
#[derive(Debug)]
pub(crate) struct PlaneMemory {
    pub(crate) region: Arc<Region>,
    pub(crate) steps: Steps,
}

/// Pages of all planes of a geometry. Shared by the owner, devices and store workers through an `Arc`.
///
/// The safe functions take a claim for the time they run and answer [`MemoryError::Busy`] when a transfer
/// or another claim owns the page. [`HostArena::range`] hands out plain memory for zero-copy users, who
/// should hold a [`PageClaim`] meanwhile.
#[derive(Debug)]
pub struct HostArena {
    geometry: Arc<Geometry>,
    order: Order,
    pages: [u32; 3],
    planes: Vec<PlaneMemory>,
    guards: [Guards; 3],
    mapping: Mapping,
    /// Given back after the memory: fields are dropped in order.
    _promise: Option<Promise>,
}

impl HostArena {
    /// Maps memory for the pages, nothing committed. A pool without planes gets no pages.
    ///
    /// An unlimited pool reserves address space, up to 1 TiB together and less where the system grants
    /// less; [`HostArena::pages`] says how many pages that is.
    pub fn new(geometry: Arc<Geometry>, capacities: Capacities) -> Result<HostArena, MemoryError> {
        HostArena::with_order(geometry, capacities, Order::PageFirst)
    }

    /// The same with all of its memory from where the plan says. The budget is asked before anything is mapped.
    pub fn with_plan(
        geometry: Arc<Geometry>,
        capacities: Capacities,
        plan: &MemoryPlan,
    ) -> Result<HostArena, MemoryError> {
        HostArena::build(geometry, capacities, Order::PageFirst, plan)
    }

    /// The same with another order of bytes.
    pub fn with_order(
        geometry: Arc<Geometry>,
        capacities: Capacities,
        order: Order,
    ) -> Result<HostArena, MemoryError> {
        HostArena::build(geometry, capacities, order, &MemoryPlan::default())
    }

    pub(crate) fn build(
        geometry: Arc<Geometry>,
        capacities: Capacities,
        order: Order,
        plan: &MemoryPlan,
    ) -> Result<HostArena, MemoryError> {
        let unlimited = PoolKind::ALL
            .iter()
            .any(|&p| capacities.of(p) == Capacity::Unlimited && geometry.page_bytes(p) > 0);
        if unlimited && (plan.shared() || plan.touch_threads > 0) {
            return Err(MemoryError::UnlimitedCommitted);
        }
        let promise = match &plan.budget {
            Some(budget) if !unlimited => Some(budget.promise(bytes_of(&geometry, capacities))?),
            _ => None,
        };
        let mut reserve = RESERVE_BYTES;
        loop {
            let pages = PoolKind::ALL.map(|pool| pages_of(&geometry, pool, capacities.of(pool), reserve));
            match map_planes(&geometry, &pages, order, plan) {
                Ok(planes) => {
                    let [full, window, state] = pages;
                    let guards = [Guards::new(full)?, Guards::new(window)?, Guards::new(state)?];
                    let mapping = plan.mapping;
                    return Ok(HostArena {
                        geometry,
                        order,
                        pages,
                        planes,
                        guards,
                        mapping,
                        _promise: promise,
                    });
                }
                Err(e) => {
                    if !unlimited || reserve <= 1 << 20 {
                        return Err(e);
                    }
                    reserve /= 2;
                }
            }
        }
    }

    /// Planes and page size.
    #[must_use]
    pub fn geometry(&self) -> &Arc<Geometry> {
        &self.geometry
    }

    /// How the memory of every plane was mapped.
    #[must_use]
    pub fn mapping(&self) -> Mapping {
        self.mapping
    }

    /// Order of the bytes.
    #[must_use]
    pub fn order(&self) -> Order {
        self.order
    }

    /// Pages of a pool. Valid page ids are below it.
    #[must_use]
    pub fn pages(&self, pool: PoolKind) -> u32 {
        self.pages[pool.index()]
    }

    /// The memory of every plane, for registration with a driver or a store.
    pub fn regions(&self) -> impl Iterator<Item = (PlaneId, &Arc<Region>)> {
        self.planes.iter().enumerate().map(|(i, p)| (PlaneId(i as u8), &p.region))
    }

    /// Where a page of a plane lies. Only in [`Order::PageFirst`].
    pub fn range(&self, plane: PlaneId, page: PageId) -> Result<PageRange<'_>, MemoryError> {
        let (p, memory) = self.locate(plane, page)?;
        if self.order != Order::PageFirst {
            return Err(MemoryError::Scattered { plane });
        }
        let offset = (u64::from(page.0) * memory.steps.page) as usize;
        Ok(PageRange { region: &memory.region, offset, len: p.page_bytes() as usize })
    }

    /// Claims pages; dropped claims are released. All or none.
    pub fn claim(
        self: &Arc<Self>,
        pool: PoolKind,
        pages: &[PageId],
        access: Access,
    ) -> Result<PageClaim, MemoryError> {
        PageClaim::new(Arc::clone(self), pool, pages, access)
    }

    /// Reads `out.len()` bytes from `offset` of a page, offsets counted in the default order.
    pub fn read(&self, plane: PlaneId, page: PageId, offset: u64, out: &mut [u8]) -> Result<(), MemoryError> {
        let mut rest = out;
        self.for_runs(plane, page, offset, rest.len() as u64, Access::Shared, |region, at, len| {
            let (head, tail) = std::mem::take(&mut rest).split_at_mut(len);
            // SAFETY: `for_runs` holds a shared claim on the page that this run is part of.
            head.copy_from_slice(unsafe { region.slice(at, len)? });
            rest = tail;
            Ok(())
        })
    }

    /// Writes `bytes` at `offset` of a page, offsets counted in the default order.
    pub fn write(&self, plane: PlaneId, page: PageId, offset: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        let mut rest = bytes;
        self.for_runs(plane, page, offset, bytes.len() as u64, Access::Exclusive, |region, at, len| {
            let (head, tail) = rest.split_at(len);
            // SAFETY: `for_runs` holds an exclusive claim on the page that this run is part of.
            unsafe { region.slice_mut(at, len)? }.copy_from_slice(head);
            rest = tail;
            Ok(())
        })
    }

    /// Reads rows of one layer from `first_row` on: the rows of part 0 (K), then those of part 1 (V).
    /// `out` is a whole number of rows of every part.
    pub fn read_rows(
        &self,
        plane: PlaneId,
        page: PageId,
        layer: u32,
        first_row: u32,
        out: &mut [u8],
    ) -> Result<(), MemoryError> {
        let (parts, len) = self.check_rows(plane, page, layer, first_row, out.len())?;
        for (part, chunk) in (0..parts).zip(out.chunks_mut(len.max(1))) {
            let offset = self.row_offset(plane, layer, part, first_row);
            self.read(plane, page, offset, chunk)?;
        }
        Ok(())
    }

    /// Writes rows of one layer, laid out as in [`HostArena::read_rows`].
    pub fn write_rows(
        &self,
        plane: PlaneId,
        page: PageId,
        layer: u32,
        first_row: u32,
        bytes: &[u8],
    ) -> Result<(), MemoryError> {
        let (parts, len) = self.check_rows(plane, page, layer, first_row, bytes.len())?;
        for (part, chunk) in (0..parts).zip(bytes.chunks(len.max(1))) {
            let offset = self.row_offset(plane, layer, part, first_row);
            self.write(plane, page, offset, chunk)?;
        }
        Ok(())
    }

    /// Fills every plane of a page with [`POISON_BYTE`].
    pub fn poison(&self, pool: PoolKind, page: PageId) -> Result<(), MemoryError> {
        self.take(pool, &[page], Access::Exclusive)?;
        let mut result = Ok(());
        for (id, p) in self.geometry.planes_of(pool, PlaneSet::ALL) {
            let memory = &self.planes[usize::from(id.0)];
            for (at, len) in runs(p, memory.steps, page, 0, p.page_bytes()) {
                // SAFETY: the page is claimed exclusively.
                match unsafe { memory.region.slice_mut(at, len) } {
                    Ok(bytes) => bytes.fill(POISON_BYTE),
                    Err(e) => result = Err(e.into()),
                }
            }
        }
        self.give(pool, &[page], Access::Exclusive);
        result
    }

    /// Claims all pages or none.
    pub(crate) fn take(&self, pool: PoolKind, pages: &[PageId], access: Access) -> Result<(), MemoryError> {
        self.guards[pool.index()].take(pages, access).map_err(|at| {
            let (page, limit) = (pages[at], self.pages(pool));
            match page.0 < limit {
                true => MemoryError::Busy { pool, page },
                false => MemoryError::NoSuchPage { pool, page, pages: limit },
            }
        })
    }

    /// Releases what `take` took.
    pub(crate) fn give(&self, pool: PoolKind, pages: &[PageId], access: Access) {
        self.guards[pool.index()].give(pages, access);
    }

    /// The memory of a plane that exists.
    pub(crate) fn plane_memory(&self, plane: PlaneId) -> Option<&PlaneMemory> {
        self.planes.get(usize::from(plane.0))
    }

    fn locate(&self, plane: PlaneId, page: PageId) -> Result<(&Plane, &PlaneMemory), MemoryError> {
        let p = self.geometry.plane(plane).ok_or(MemoryError::NoSuchPlane { plane })?;
        let pages = self.pages(p.pool());
        if page.0 >= pages {
            return Err(MemoryError::NoSuchPage { pool: p.pool(), page, pages });
        }
        Ok((p, &self.planes[usize::from(plane.0)]))
    }

    fn row_offset(&self, plane: PlaneId, layer: u32, part: u32, row: u32) -> u64 {
        self.geometry.plane(plane).map_or(0, |p| p.row_offset(layer, part, row))
    }

    /// Parts of the plane and bytes per part of a rows access, if it fits the page.
    fn check_rows(
        &self,
        plane: PlaneId,
        page: PageId,
        layer: u32,
        first_row: u32,
        len: usize,
    ) -> Result<(u32, usize), MemoryError> {
        let (p, _) = self.locate(plane, page)?;
        let row = u64::from(p.row_bytes());
        let (len, parts) = (len as u64, u64::from(p.parts()));
        let (offset, limit) = (u64::from(first_row) * row, p.part_bytes());
        let whole = len.is_multiple_of(parts * row);
        if layer >= p.layers() || !whole || offset + len / parts > limit {
            return Err(MemoryError::Range { offset, len, limit });
        }
        Ok((p.parts(), (len / parts) as usize))
    }

    /// Calls `f` with region, offset and length of each run of a byte range of a page, under a claim.
    fn for_runs(
        &self,
        plane: PlaneId,
        page: PageId,
        offset: u64,
        len: u64,
        access: Access,
        mut f: impl FnMut(&Region, usize, usize) -> Result<(), MemoryError>,
    ) -> Result<(), MemoryError> {
        let (p, memory) = self.locate(plane, page)?;
        let limit = p.page_bytes();
        if offset.checked_add(len).is_none_or(|end| end > limit) {
            return Err(MemoryError::Range { offset, len, limit });
        }
        self.take(p.pool(), &[page], access)?;
        let result =
            runs(p, memory.steps, page, offset, len).try_for_each(|(at, n)| f(&memory.region, at, n));
        self.give(p.pool(), &[page], access);
        result
    }
}

/// Runs of `offset..offset + len` (default order) of a page: offset in the plane's memory and length, in
/// order. The range lies inside the page.
fn runs(
    p: &Plane,
    steps: Steps,
    page: PageId,
    offset: u64,
    len: u64,
) -> impl Iterator<Item = (usize, usize)> {
    let (layer_bytes, part_bytes) = (p.layer_bytes(), p.part_bytes());
    let one_block = steps.layer == layer_bytes && steps.part == part_bytes;
    let base = u64::from(page.0) * steps.page;
    let (mut at, end) = (offset, offset + len);
    std::iter::from_fn(move || {
        if at == end {
            return None;
        }
        let (start, n) = if one_block {
            (base + at, end - at)
        } else {
            let (layer, within) = (at / layer_bytes, at % layer_bytes);
            let (part, within) = (within / part_bytes, within % part_bytes);
            let n = (part_bytes - within).min(end - at);
            (base + layer * steps.layer + part * steps.part + within, n)
        };
        at += n;
        Some((start as usize, n as usize))
    })
}

fn pages_of(geometry: &Geometry, pool: PoolKind, capacity: Capacity, reserve: u64) -> u32 {
    match (geometry.page_bytes(pool), capacity) {
        (0, _) => 0,
        (_, Capacity::Pages(n)) => n,
        (page_bytes, Capacity::Unlimited) => {
            u32::try_from(reserve / page_bytes).unwrap_or(POOL_PAGES_MAX).clamp(1, POOL_PAGES_MAX)
        }
    }
}

/// Bytes of all pages of pools that have a number of them.
fn bytes_of(geometry: &Geometry, capacities: Capacities) -> u64 {
    let of = |pool| match capacities.of(pool) {
        Capacity::Pages(n) => geometry.page_bytes(pool).saturating_mul(u64::from(n)),
        Capacity::Unlimited => 0,
    };
    PoolKind::ALL.into_iter().map(of).fold(0, u64::saturating_add)
}

fn map_planes(
    geometry: &Geometry,
    pages: &[u32; 3],
    order: Order,
    plan: &MemoryPlan,
) -> Result<Vec<PlaneMemory>, MemoryError> {
    let map = |p: &Plane| {
        let pages = pages[p.pool().index()];
        let page_bytes = p.page_bytes();
        let too_large = MemoryError::TooLarge { pages, page_bytes };
        let bytes = u64::from(pages).checked_mul(page_bytes).and_then(|n| usize::try_from(n).ok());
        let bytes = bytes.filter(|&n| n <= isize::MAX as usize && pages <= POOL_PAGES_MAX);
        let region = Arc::new(Region::map(bytes.ok_or(too_large)?, plan.mapping)?);
        if plan.touch_threads > 0 {
            region.touch(plan.touch_threads)?;
        }
        Ok(PlaneMemory { region, steps: Steps::of(p, order, pages) })
    };
    geometry.planes().iter().map(map).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arena(order: Order) -> Arc<HostArena> {
        let g = Geometry::builder(4).plane(Plane::target(3, 8)).plane(Plane::state(2, 16)).build().unwrap();
        let caps = Capacities { state: Capacity::Pages(2), ..Capacities::full(Capacity::Pages(5)) };
        Arc::new(HostArena::with_order(Arc::new(g), caps, order).unwrap())
    }

    #[test]
    fn every_byte_of_every_page_has_its_own_place() {
        for order in [Order::PageFirst, Order::LayerFirst] {
            let a = arena(order);
            let page_bytes = 3 * 2 * 4 * 8;
            for page in 0..5u32 {
                let bytes: Vec<u8> = (0..page_bytes).map(|i| (page * 51 + i * 7) as u8).collect();
                a.write(PlaneId(0), PageId(page), 0, &bytes).unwrap();
            }
            for page in 0..5u32 {
                let mut got = vec![0; page_bytes as usize - 9];
                a.read(PlaneId(0), PageId(page), 5, &mut got).unwrap();
                assert!(got.iter().enumerate().all(|(i, &b)| b == (page * 51 + (i as u32 + 5) * 7) as u8));
            }
        }
    }

    #[test]
    fn rows_are_k_then_v_in_both_orders() {
        for order in [Order::PageFirst, Order::LayerFirst] {
            let a = arena(order);
            let rows: Vec<u8> = (0..2 * 2 * 8).collect();
            a.write_rows(PlaneId(0), PageId(3), 1, 2, &rows).unwrap();
            let mut back = vec![0; rows.len()];
            a.read_rows(PlaneId(0), PageId(3), 1, 2, &mut back).unwrap();
            assert_eq!(back, rows);
            let mut v_row = [0; 8];
            let offset = a.geometry().planes()[0].row_offset(1, 1, 2);
            a.read(PlaneId(0), PageId(3), offset, &mut v_row).unwrap();
            assert_eq!(v_row, rows[16..24]);
        }
    }

    #[test]
    fn wrong_places_are_errors() {
        let a = arena(Order::PageFirst);
        let mut b = [0; 16];
        assert!(matches!(a.read(PlaneId(9), PageId(0), 0, &mut b), Err(MemoryError::NoSuchPlane { .. })));
        assert!(matches!(a.read(PlaneId(0), PageId(5), 0, &mut b), Err(MemoryError::NoSuchPage { .. })));
        assert!(matches!(a.read(PlaneId(0), PageId(0), 177, &mut b), Err(MemoryError::Range { .. })));
        assert!(matches!(a.read(PlaneId(0), PageId(0), u64::MAX, &mut b), Err(MemoryError::Range { .. })));
        assert!(a.read_rows(PlaneId(0), PageId(0), 3, 0, &mut b).is_err(), "no layer 3");
        assert!(a.read_rows(PlaneId(0), PageId(0), 0, 4, &mut b).is_err(), "no row 4");
        assert!(a.read_rows(PlaneId(0), PageId(0), 0, 0, &mut b[..8]).is_err(), "half a row pair");
        assert!(a.read_rows(PlaneId(0), PageId(0), 0, u32::MAX, &mut b).is_err());
        let scattered = arena(Order::LayerFirst);
        assert!(matches!(scattered.range(PlaneId(0), PageId(0)), Err(MemoryError::Scattered { .. })));
    }

    #[test]
    fn claims_exclude_each_other_and_roll_back() {
        let a = arena(Order::PageFirst);
        let (p0, p1, p2) = (PageId(0), PageId(1), PageId(2));
        let reader = a.claim(PoolKind::Full, &[p1], Access::Shared).unwrap();
        let second = a.claim(PoolKind::Full, &[p1, p0], Access::Shared).unwrap();
        let mut b = [0; 1];
        a.read(PlaneId(0), p1, 0, &mut b).unwrap();
        assert!(matches!(a.write(PlaneId(0), p1, 0, &b), Err(MemoryError::Busy { page, .. }) if page == p1));
        assert!(a.claim(PoolKind::Full, &[p2, p1], Access::Exclusive).is_err());
        drop((reader, second));
        let mut writer = a.claim(PoolKind::Full, &[p2, p1], Access::Exclusive).unwrap();
        writer.block_mut(PlaneId(0), 1).unwrap()[0] = 9;
        assert_eq!(writer.block(PlaneId(0), 1).unwrap()[0], 9);
        assert!(writer.block(PlaneId(1), 0).is_err(), "a plane of another pool");
        assert!(writer.block(PlaneId(0), 2).is_err());
        assert!(a.read(PlaneId(0), p1, 0, &mut b).is_err());
        writer.quarantine();
        assert!(a.read(PlaneId(0), p2, 0, &mut b).is_err(), "quarantined for good");
        assert!(a.claim(PoolKind::Full, &[p0, p0], Access::Exclusive).is_err(), "twice the same page");
        a.write(PlaneId(0), p0, 0, &b).unwrap();
        let mut reader = a.claim(PoolKind::Full, &[p0], Access::Shared).unwrap();
        assert!(reader.block_mut(PlaneId(0), 0).is_err());
    }

    #[test]
    fn poison_fills_all_planes_of_the_page_only() {
        for order in [Order::PageFirst, Order::LayerFirst] {
            let a = arena(order);
            a.poison(PoolKind::Full, PageId(2)).unwrap();
            for page in 0..5 {
                let mut got = vec![1; 192];
                a.read(PlaneId(0), PageId(page), 0, &mut got).unwrap();
                let want = if page == 2 { POISON_BYTE } else { 0 };
                assert!(got.iter().all(|&b| b == want));
            }
            assert!(a.poison(PoolKind::Window, PageId(0)).is_err());
        }
    }

    #[test]
    fn an_unlimited_pool_reserves_and_commits_nothing() {
        let g = Arc::new(Geometry::builder(64).plane(Plane::target(8, 1024)).build().unwrap());
        let a = HostArena::new(g, Capacities::full(Capacity::Unlimited)).unwrap();
        let last = PageId(a.pages(PoolKind::Full) - 1);
        assert!(last.0 > 1 << 10);
        a.write(PlaneId(0), last, 3, &[7]).unwrap();
        let mut b = [0; 2];
        a.read(PlaneId(0), last, 3, &mut b).unwrap();
        assert_eq!(b, [7, 0]);
    }

    #[test]
    fn more_than_an_address_space_is_an_error() {
        let g = Arc::new(Geometry::builder(512).plane(Plane::target(8, 1 << 18)).build().unwrap());
        let huge = HostArena::new(Arc::clone(&g), Capacities::full(Capacity::Pages(u32::MAX - 1)));
        assert!(matches!(huge, Err(MemoryError::Region(_) | MemoryError::TooLarge { .. })));
        assert!(matches!(
            HostArena::new(g, Capacities::full(Capacity::Pages(u32::MAX))),
            Err(MemoryError::TooLarge { .. })
        ));
    }

    #[test]
    fn one_plan_holds_for_every_plane() {
        let g = Geometry::builder(4)
            .plane(Plane::target(3, 8))
            .plane(Plane::draft(1, 8))
            .plane(Plane::state(2, 16));
        let g = Arc::new(g.build().unwrap());
        let caps = Capacities { state: Capacity::Pages(2), ..Capacities::full(Capacity::Pages(5)) };
        let budget = Budget::of_process(Some(1 << 20));
        let plan = MemoryPlan {
            mapping: Mapping { sharing: Sharing::Shared, ..Mapping::default() },
            touch_threads: 2,
            budget: Some(budget.clone()),
        };
        let a = HostArena::with_plan(Arc::clone(&g), caps, &plan).unwrap();
        assert_eq!(a.regions().count(), 3);
        assert!(a.regions().all(|(_, r)| r.fd().is_some() && r.mapping() == plan.mapping));
        a.write(PlaneId(1), PageId(4), 0, &[7; 64]).unwrap();
        let bytes = bytes_of(&g, caps);
        assert_eq!(bytes, 5 * (3 * 2 * 4 * 8 + 2 * 4 * 8) + 2 * 2 * 16);
        assert!(budget.promise((1 << 20) - bytes + 1).is_err());
        drop(a);
        let _all = budget.promise(1 << 20).unwrap();
        let refused = HostArena::with_plan(Arc::clone(&g), caps, &plan);
        assert!(matches!(refused, Err(MemoryError::Budget(BudgetError::Exceeded { .. }))));
        let unlimited = HostArena::with_plan(g, Capacities::full(Capacity::Unlimited), &plan);
        assert!(matches!(unlimited, Err(MemoryError::UnlimitedCommitted)));
    }
}
