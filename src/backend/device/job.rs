//! Copy jobs: what to copy, said in pages.

use crate::base::{OpId, PageId, Tier};
use crate::pool::{Geometry, PlaneSet, PoolKind};

/// Which way a job copies.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Direction {
    /// Backup.
    DeviceToHost,
    /// Load-back.
    HostToDevice,
    /// Moves inside the device.
    DeviceToDevice,
}

impl Direction {
    /// All directions, in index order.
    pub const ALL: [Direction; 3] =
        [Direction::DeviceToHost, Direction::HostToDevice, Direction::DeviceToDevice];

    /// Position in [`Direction::ALL`].
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Tier that is read.
    #[must_use]
    pub const fn source(self) -> Tier {
        match self {
            Direction::HostToDevice => Tier::Host,
            Direction::DeviceToHost | Direction::DeviceToDevice => Tier::Device,
        }
    }

    /// Tier that is written.
    #[must_use]
    pub const fn destination(self) -> Tier {
        match self {
            Direction::DeviceToHost => Tier::Host,
            Direction::HostToDevice | Direction::DeviceToDevice => Tier::Device,
        }
    }
}

/// Pages of one pool: `src[i]` is copied to `dst[i]`, all `planes` of it.
#[derive(Clone, Copy, Debug)]
pub struct CopyPart<'a> {
    /// The pool that numbers the pages.
    pub pool: PoolKind,
    /// Pages read.
    pub src: &'a [PageId],
    /// Pages written; as many, all different.
    pub dst: &'a [PageId],
    /// Which planes of the pool.
    pub planes: PlaneSet,
}

impl<'a> CopyPart<'a> {
    /// All planes of pages of the pool `Full`.
    #[must_use]
    pub fn full(src: &'a [PageId], dst: &'a [PageId]) -> CopyPart<'a> {
        CopyPart { pool: PoolKind::Full, src, dst, planes: PlaneSet::ALL }
    }
}

/// A copy job. It succeeds or fails as a whole.
#[derive(Clone, Copy, Debug)]
pub struct CopyJob<'a> {
    /// The caller's name for it, handed back in the completion.
    pub op: OpId,
    /// Which way.
    pub direction: Direction,
    /// The pages, at most one part per pool.
    pub parts: &'a [CopyPart<'a>],
    /// Copy layer by layer and report each ([`Transfer::layers_ready`](super::Transfer::layers_ready)).
    /// Costs one launch and one event per layer; without it all layers become ready together.
    pub by_layer: bool,
}

/// What is wrong with a job.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// A part names more pages on one side than on the other.
    #[error("{src} source pages for {dst} destination pages")]
    Unpaired {
        /// Pages read.
        src: usize,
        /// Pages written.
        dst: usize,
    },
    /// Two parts name the same pool.
    #[error("two parts for the pool {pool:?}")]
    PoolTwice {
        /// The pool.
        pool: PoolKind,
    },
    /// The page does not exist on that side.
    #[error("no page {page:?} in pool {pool:?} of tier {tier:?}, which has {pages}")]
    NoSuchPage {
        /// The side.
        tier: Tier,
        /// The pool.
        pool: PoolKind,
        /// The page.
        page: PageId,
        /// Pages there are.
        pages: u32,
    },
    /// The fence does not cover the last use of the page that the device was told of.
    #[error("fence {fence} does not cover use {last_use} of page {page:?} of pool {pool:?}")]
    FenceTooEarly {
        /// The pool.
        pool: PoolKind,
        /// The device page.
        page: PageId,
        /// Number in the fence.
        fence: u64,
        /// Number of the last use.
        last_use: u64,
    },
    /// Another job or access in flight owns the page, or the job names it twice.
    #[error("page {page:?} of pool {pool:?} in tier {tier:?} belongs to an access in flight")]
    PageBusy {
        /// The side.
        tier: Tier,
        /// The pool.
        pool: PoolKind,
        /// The page.
        page: PageId,
    },
}

impl CopyJob<'_> {
    /// Bytes the job moves under `geometry`.
    #[must_use]
    pub fn bytes(&self, geometry: &Geometry) -> u64 {
        let part = |p: &CopyPart<'_>| {
            let page: u64 = geometry.planes_of(p.pool, p.planes).map(|(_, plane)| plane.page_bytes()).sum();
            page * p.src.len() as u64
        };
        self.parts.iter().map(part).sum()
    }

    /// Checks shape and page numbers against the pages of both sides. O(pages).
    pub(crate) fn check(
        &self,
        src_pages: impl Fn(PoolKind) -> u32,
        dst_pages: impl Fn(PoolKind) -> u32,
    ) -> Result<(), JobError> {
        for (i, part) in self.parts.iter().enumerate() {
            if part.src.len() != part.dst.len() {
                return Err(JobError::Unpaired { src: part.src.len(), dst: part.dst.len() });
            }
            if self.parts[..i].iter().any(|p| p.pool == part.pool) {
                return Err(JobError::PoolTwice { pool: part.pool });
            }
            let (from, to) = (self.direction.source(), self.direction.destination());
            for (tier, list, pages) in
                [(from, part.src, src_pages(part.pool)), (to, part.dst, dst_pages(part.pool))]
            {
                // The largest first: that loop has no early exit and runs by vectors.
                let largest = list.iter().copied().max();
                if largest.is_some_and(|p| p.0 >= pages)
                    && let Some(&page) = list.iter().find(|p| p.0 >= pages)
                {
                    return Err(JobError::NoSuchPage { tier, pool: part.pool, page, pages });
                }
            }
        }
        Ok(())
    }
}
