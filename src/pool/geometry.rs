//! What a page holds: page size, planes, layers, bytes. Numbers only; no address, no layout but the default.
//!
//! A *pool* numbers pages; a *plane* is one kind of bytes kept for every page of a pool (K and V of the
//! target, those of a draft model, an index, scales). All planes of a pool share its page numbers: page 7
//! of the pool is page 7 of each of its planes.
//!
//! The default order of bytes is (page, layer, part, token, row). One page of a plane is one block, one
//! layer of it one run, one part (K or V) of that run the rows of the page's tokens in order.

use std::fmt;

use smallvec::SmallVec;

use crate::base::limits::{LAYERS_MAX, PAGE_BYTES_MAX, PAGE_SIZE_MAX, PLANES_MAX};

/// Which page numbering a plane follows.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum PoolKind {
    /// Full attention: one page per `page_size_tokens` tokens of the prefix.
    Full,
    /// Sliding window: pages of the same size, kept for the trailing window only.
    Window,
    /// Recurrent state: one slot per stop point; a "page" is one slot.
    State,
}

impl PoolKind {
    /// All kinds, in index order.
    pub const ALL: [PoolKind; 3] = [PoolKind::Full, PoolKind::Window, PoolKind::State];

    /// Position in [`PoolKind::ALL`].
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// How many pages a pool has in one tier.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Capacity {
    /// That many.
    Pages(u32),
    /// As many as are asked for; memory is committed when first touched.
    Unlimited,
}

/// A capacity for each pool.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Capacities {
    /// Pool `Full`.
    pub full: Capacity,
    /// Pool `Window`.
    pub window: Capacity,
    /// Pool `State`.
    pub state: Capacity,
}

impl Capacities {
    /// Only the pool `Full` has pages.
    #[must_use]
    pub const fn full(capacity: Capacity) -> Capacities {
        Capacities { full: capacity, window: Capacity::Pages(0), state: Capacity::Pages(0) }
    }

    /// The capacity of one pool.
    #[must_use]
    pub const fn of(self, pool: PoolKind) -> Capacity {
        match pool {
            PoolKind::Full => self.full,
            PoolKind::Window => self.window,
            PoolKind::State => self.state,
        }
    }
}

/// What the bytes of a plane are. Tells planes apart in identities, reports and file names.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum PlaneKind {
    /// K and V of the target model.
    Target,
    /// The joint latent of MLA.
    Latent,
    /// K and V of a draft model.
    Draft,
    /// Index keys of sparse attention.
    Index,
    /// Index keys of a draft model.
    DraftIndex,
    /// Scales of a quantised plane.
    Scale,
    /// Recurrent or convolution state.
    State,
    /// Anything else; the number is the embedder's.
    Other(u8),
}

impl PlaneKind {
    /// Whether the plane belongs to a draft model: without it the target answers the same, only slower.
    #[must_use]
    pub const fn is_draft(self) -> bool {
        matches!(self, PlaneKind::Draft | PlaneKind::DraftIndex)
    }
}

impl fmt::Display for PlaneKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PlaneKind::Target => f.write_str("target"),
            PlaneKind::Latent => f.write_str("latent"),
            PlaneKind::Draft => f.write_str("draft"),
            PlaneKind::Index => f.write_str("index"),
            PlaneKind::DraftIndex => f.write_str("draft-index"),
            PlaneKind::Scale => f.write_str("scale"),
            PlaneKind::State => f.write_str("state"),
            PlaneKind::Other(n) => write!(f, "other{n}"),
        }
    }
}

/// A plane of a geometry: index into [`Geometry::planes`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PlaneId(pub u8);

/// A set of planes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PlaneSet(u32);

impl PlaneSet {
    /// Every plane of the pool at hand.
    pub const ALL: PlaneSet = PlaneSet(u32::MAX);
    /// No plane.
    pub const NONE: PlaneSet = PlaneSet(0);

    /// The set of one plane.
    #[must_use]
    pub const fn one(plane: PlaneId) -> PlaneSet {
        PlaneSet(1u32.wrapping_shl(plane.0 as u32))
    }

    /// This set and `plane`.
    #[must_use]
    pub const fn with(self, plane: PlaneId) -> PlaneSet {
        PlaneSet(self.0 | PlaneSet::one(plane).0)
    }

    /// Whether `plane` is in the set.
    #[must_use]
    pub const fn contains(self, plane: PlaneId) -> bool {
        self.0 & PlaneSet::one(plane).0 != 0
    }
}

impl fmt::Debug for PlaneSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == PlaneSet::ALL {
            return f.write_str("{all}");
        }
        f.debug_set().entries((0..PLANES_MAX as u8).filter(|&i| self.contains(PlaneId(i)))).finish()
    }
}

/// One plane. Made by the constructors, checked by [`GeometryBuilder::build`].
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Plane {
    kind: PlaneKind,
    pool: PoolKind,
    layers: u32,
    parts: u32,
    row_bytes: u32,
    /// Model layer of each layer of the plane, when it is not the identity.
    model_layers: Option<Box<[u32]>>,
    /// Filled in by the builder: rows per part and layer in one page.
    rows: u32,
}

impl Plane {
    /// A plane of `layers` layers in the pool `Full`, each with `parts` rows of `row_bytes` bytes per token.
    #[must_use]
    pub fn new(kind: PlaneKind, layers: u32, parts: u32, row_bytes: u32) -> Plane {
        Plane { kind, pool: PoolKind::Full, layers, parts, row_bytes, model_layers: None, rows: 0 }
    }

    /// K and V of the target model, `row_bytes` bytes each per token and layer.
    #[must_use]
    pub fn target(layers: u32, row_bytes: u32) -> Plane {
        Plane::new(PlaneKind::Target, layers, 2, row_bytes)
    }

    /// An MLA latent, `row_bytes` bytes per token and layer.
    #[must_use]
    pub fn latent(layers: u32, row_bytes: u32) -> Plane {
        Plane::new(PlaneKind::Latent, layers, 1, row_bytes)
    }

    /// K and V of a draft model.
    #[must_use]
    pub fn draft(layers: u32, row_bytes: u32) -> Plane {
        Plane::new(PlaneKind::Draft, layers, 2, row_bytes)
    }

    /// Recurrent state, `state_bytes` bytes per slot and layer, in the pool `State`.
    #[must_use]
    pub fn state(layers: u32, state_bytes: u32) -> Plane {
        Plane::new(PlaneKind::State, layers, 1, state_bytes).in_pool(PoolKind::State)
    }

    /// The same plane following the pages of another pool.
    #[must_use]
    pub fn in_pool(mut self, pool: PoolKind) -> Plane {
        self.pool = pool;
        self
    }

    /// The same plane with its layers belonging to the given layers of the model, in increasing order. A
    /// load signals model layer `i` when every plane has the layers that belong to it. Without this, layer
    /// `i` of the plane belongs to layer `i` of the model.
    #[must_use]
    pub fn on_model_layers(mut self, layers: impl IntoIterator<Item = u32>) -> Plane {
        self.model_layers = Some(layers.into_iter().collect());
        self
    }

    /// What the bytes are.
    #[must_use]
    pub fn kind(&self) -> PlaneKind {
        self.kind
    }

    /// The pool whose pages the plane follows.
    #[must_use]
    pub fn pool(&self) -> PoolKind {
        self.pool
    }

    /// Layers of the plane.
    #[must_use]
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// Rows per token and layer: 2 for K and V, 1 for a latent or a state.
    #[must_use]
    pub fn parts(&self) -> u32 {
        self.parts
    }

    /// Bytes of one row: one token (or one state), one layer, one part.
    #[must_use]
    pub fn row_bytes(&self) -> u32 {
        self.row_bytes
    }

    /// Rows of one part of one layer in one page: the page size, or 1 in the pool `State`.
    #[must_use]
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// Bytes per token and layer over all parts.
    #[must_use]
    pub fn bytes_per_token_layer(&self) -> u64 {
        u64::from(self.parts) * u64::from(self.row_bytes)
    }

    /// Bytes of one part of one layer of one page.
    #[must_use]
    pub fn part_bytes(&self) -> u64 {
        u64::from(self.rows) * u64::from(self.row_bytes)
    }

    /// Bytes of one layer of one page: one run in the default order.
    #[must_use]
    pub fn layer_bytes(&self) -> u64 {
        self.part_bytes() * u64::from(self.parts)
    }

    /// Bytes of one page: one block in the default order.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.layer_bytes() * u64::from(self.layers)
    }

    /// Model layer that layer `layer` of the plane belongs to.
    #[must_use]
    pub fn model_layer(&self, layer: u32) -> u32 {
        match &self.model_layers {
            Some(map) => map.get(layer as usize).copied().unwrap_or(layer),
            None => layer,
        }
    }

    /// Layers of the plane that belong to layers `first..end` of the model, as a range of its own layers.
    #[must_use]
    pub fn layers_within(&self, first: u32, end: u32) -> std::ops::Range<u32> {
        match &self.model_layers {
            Some(map) => {
                let from = map.partition_point(|&l| l < first);
                from as u32..from.max(map.partition_point(|&l| l < end)) as u32
            }
            None => first.min(self.layers)..end.clamp(first.min(self.layers), self.layers),
        }
    }

    /// Offset in the page, default order, of a row. Not checked against the plane.
    #[must_use]
    pub fn row_offset(&self, layer: u32, part: u32, row: u32) -> u64 {
        u64::from(layer) * self.layer_bytes()
            + u64::from(part) * self.part_bytes()
            + u64::from(row) * u64::from(self.row_bytes)
    }
}

/// Why a geometry was refused. `plane` is the position in the order of [`GeometryBuilder::plane`] calls.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GeometryError {
    /// Page size is 0 or above the limit.
    #[error("page size {page_size_tokens} is not in 1..={PAGE_SIZE_MAX}")]
    PageSize {
        /// What was asked.
        page_size_tokens: u32,
    },
    /// There is no plane, or there are too many.
    #[error("{planes} planes; 1 to {PLANES_MAX} are possible")]
    PlaneCount {
        /// What was asked.
        planes: usize,
    },
    /// Layers, parts or row bytes of a plane are 0, or there are too many layers.
    #[error("plane {plane}: {layers} layers x {parts} parts x {row_bytes} bytes")]
    PlaneShape {
        /// Which plane.
        plane: usize,
        /// Its layers.
        layers: u32,
        /// Its parts.
        parts: u32,
        /// Its row bytes.
        row_bytes: u32,
    },
    /// A page of the plane is larger than the limit.
    #[error("plane {plane}: a page would have more than {PAGE_BYTES_MAX} bytes")]
    PageBytes {
        /// Which plane.
        plane: usize,
    },
    /// The map to model layers has the wrong length, is not increasing or names a layer past the limit.
    #[error("plane {plane}: its map to model layers does not fit its {layers} layers")]
    LayerMap {
        /// Which plane.
        plane: usize,
        /// Its layers.
        layers: u32,
    },
    /// Two planes of one pool have the same kind.
    #[error("plane {plane} repeats {kind} in {pool:?}")]
    Duplicate {
        /// Which plane.
        plane: usize,
        /// The kind.
        kind: PlaneKind,
        /// The pool.
        pool: PoolKind,
    },
}

/// The planes of a cache and the size of its pages. Immutable.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Geometry {
    page_size_tokens: u32,
    planes: SmallVec<[Plane; 2]>,
    model_layers: u32,
}

/// Collects a [`Geometry`].
#[derive(Clone, Debug)]
pub struct GeometryBuilder {
    page_size_tokens: u32,
    planes: SmallVec<[Plane; 2]>,
}

impl GeometryBuilder {
    /// Adds a plane; its [`PlaneId`] is its position.
    #[must_use]
    pub fn plane(mut self, plane: Plane) -> GeometryBuilder {
        self.planes.push(plane);
        self
    }

    /// Checks everything. O(planes x layers).
    pub fn build(self) -> Result<Geometry, GeometryError> {
        let page_size_tokens = self.page_size_tokens;
        if page_size_tokens == 0 || page_size_tokens > PAGE_SIZE_MAX {
            return Err(GeometryError::PageSize { page_size_tokens });
        }
        let mut planes = self.planes;
        if planes.is_empty() || planes.len() > PLANES_MAX {
            return Err(GeometryError::PlaneCount { planes: planes.len() });
        }
        let mut model_layers = 0;
        for i in 0..planes.len() {
            let repeats = |a: &Plane, b: &Plane| a.kind == b.kind && a.pool == b.pool;
            if planes[..i].iter().any(|p| repeats(p, &planes[i])) {
                return Err(GeometryError::Duplicate {
                    plane: i,
                    kind: planes[i].kind,
                    pool: planes[i].pool,
                });
            }
            let plane = &mut planes[i];
            plane.rows = if plane.pool == PoolKind::State { 1 } else { page_size_tokens };
            check_plane(i, plane)?;
            model_layers = model_layers.max(plane.model_layer(plane.layers - 1) + 1);
        }
        Ok(Geometry { page_size_tokens, planes, model_layers })
    }
}

fn check_plane(plane: usize, p: &Plane) -> Result<(), GeometryError> {
    let (layers, parts, row_bytes) = (p.layers, p.parts, p.row_bytes);
    if layers == 0 || layers > LAYERS_MAX || parts == 0 || parts > 16 || row_bytes == 0 {
        return Err(GeometryError::PlaneShape { plane, layers, parts, row_bytes });
    }
    // 1024 layers x 16 parts x 512 rows x 4 GiB stays below 2^64.
    if p.page_bytes() > PAGE_BYTES_MAX {
        return Err(GeometryError::PageBytes { plane });
    }
    if let Some(map) = &p.model_layers {
        let increasing = map.windows(2).all(|w| w[0] <= w[1]);
        let bounded = map.last().is_some_and(|&l| l < LAYERS_MAX);
        if map.len() != layers as usize || !increasing || !bounded {
            return Err(GeometryError::LayerMap { plane, layers });
        }
    }
    Ok(())
}

impl Geometry {
    /// Starts a geometry with pages of `page_size_tokens` tokens.
    #[must_use]
    pub fn builder(page_size_tokens: u32) -> GeometryBuilder {
        GeometryBuilder { page_size_tokens, planes: SmallVec::new() }
    }

    /// Tokens per page of the pools `Full` and `Window`.
    #[must_use]
    pub fn page_size_tokens(&self) -> u32 {
        self.page_size_tokens
    }

    /// The planes, by [`PlaneId`].
    #[must_use]
    pub fn planes(&self) -> &[Plane] {
        &self.planes
    }

    /// One plane.
    #[must_use]
    pub fn plane(&self, plane: PlaneId) -> Option<&Plane> {
        self.planes.get(usize::from(plane.0))
    }

    /// The planes of a pool that are in `set`, in id order.
    pub fn planes_of(&self, pool: PoolKind, set: PlaneSet) -> impl Iterator<Item = (PlaneId, &Plane)> {
        let ids = self.planes.iter().enumerate().map(|(i, p)| (PlaneId(i as u8), p));
        ids.filter(move |(id, p)| p.pool == pool && set.contains(*id))
    }

    /// Whether any plane follows the pool.
    #[must_use]
    pub fn has_pool(&self, pool: PoolKind) -> bool {
        self.planes.iter().any(|p| p.pool == pool)
    }

    /// Layers of the model: one more than the highest layer that a plane belongs to.
    #[must_use]
    pub fn model_layers(&self) -> u32 {
        self.model_layers
    }

    /// Bytes of one page of a pool over all its planes; 0 if no plane follows it.
    #[must_use]
    pub fn page_bytes(&self, pool: PoolKind) -> u64 {
        self.planes_of(pool, PlaneSet::ALL).map(|(_, p)| p.page_bytes()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_follow_the_default_order() {
        let g = Geometry::builder(64).plane(Plane::target(4, 1024)).build().unwrap();
        let p = g.plane(PlaneId(0)).unwrap();
        assert_eq!(p.part_bytes(), 64 * 1024);
        assert_eq!(p.layer_bytes(), 128 * 1024);
        assert_eq!(p.page_bytes(), 512 * 1024);
        assert_eq!(p.row_offset(0, 0, 1), 1024);
        assert_eq!(p.row_offset(0, 1, 0), 64 * 1024);
        assert_eq!(p.row_offset(3, 1, 63), p.page_bytes() - 1024);
        assert_eq!(g.page_bytes(PoolKind::Full), 512 * 1024);
        assert_eq!(g.page_bytes(PoolKind::State), 0);
    }

    #[test]
    fn a_hybrid_has_pools_and_layer_maps() {
        let g = Geometry::builder(16)
            .plane(Plane::target(2, 32).on_model_layers([1, 3]))
            .plane(Plane::target(1, 32).in_pool(PoolKind::Window).on_model_layers([2]))
            .plane(Plane::state(1, 4096))
            .build()
            .unwrap();
        assert_eq!(g.model_layers(), 4);
        assert_eq!(g.planes()[2].rows(), 1);
        assert_eq!(g.planes()[2].page_bytes(), 4096);
        assert!(g.has_pool(PoolKind::State));
        assert_eq!(g.planes()[0].layers_within(0, 1), 0..0);
        assert_eq!(g.planes()[0].layers_within(1, 2), 0..1);
        assert_eq!(g.planes()[0].layers_within(0, 4), 0..2);
        assert_eq!(g.planes()[0].layers_within(2, 3), 1..1);
        assert_eq!(g.planes()[2].layers_within(0, 4), 0..1);
        assert_eq!(g.planes()[2].layers_within(3, 4), 1..1);
        let window: Vec<_> = g.planes_of(PoolKind::Window, PlaneSet::ALL).map(|(id, _)| id).collect();
        assert_eq!(window, [PlaneId(1)]);
        assert_eq!(g.planes_of(PoolKind::Full, PlaneSet::one(PlaneId(1))).count(), 0);
    }

    #[test]
    fn every_layer_lands_in_exactly_one_step() {
        let g = Geometry::builder(1)
            .plane(Plane::target(5, 1))
            .plane(Plane::draft(3, 1).on_model_layers([2, 2, 7]))
            .build()
            .unwrap();
        for p in g.planes() {
            let steps: Vec<u32> =
                (0..g.model_layers()).flat_map(|l| p.layers_within(l, l + 1).collect::<Vec<_>>()).collect();
            assert_eq!(steps, (0..p.layers()).collect::<Vec<_>>());
        }
    }

    #[test]
    fn bad_shapes_are_refused_by_name() {
        let one = |page, plane| Geometry::builder(page).plane(plane).build().unwrap_err();
        assert!(matches!(one(0, Plane::target(1, 1)), GeometryError::PageSize { .. }));
        assert!(matches!(one(513, Plane::target(1, 1)), GeometryError::PageSize { .. }));
        assert!(matches!(Geometry::builder(1).build(), Err(GeometryError::PlaneCount { planes: 0 })));
        for p in [Plane::target(0, 1), Plane::target(1, 0), Plane::target(1025, 1)] {
            assert!(matches!(one(1, p), GeometryError::PlaneShape { plane: 0, .. }));
        }
        assert!(matches!(one(512, Plane::target(1024, u32::MAX)), GeometryError::PageBytes { .. }));
        for map in [vec![0], vec![1, 0], vec![0, 1024]] {
            let p = Plane::target(2, 1).on_model_layers(map);
            assert!(matches!(one(1, p), GeometryError::LayerMap { layers: 2, .. }));
        }
        let twice = Geometry::builder(1).plane(Plane::target(1, 1)).plane(Plane::target(1, 1)).build();
        assert!(matches!(twice, Err(GeometryError::Duplicate { plane: 1, .. })));
    }

    #[test]
    fn plane_sets() {
        let s = PlaneSet::one(PlaneId(3)).with(PlaneId(0));
        assert!(s.contains(PlaneId(0)) && s.contains(PlaneId(3)) && !s.contains(PlaneId(1)));
        assert_eq!(format!("{s:?}"), "{0, 3}");
        assert!(!PlaneSet::NONE.contains(PlaneId(0)));
    }
}
