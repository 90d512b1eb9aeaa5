//! Pages of a copy by pool, and the planes that pages lack.

use super::lane::Gap;
use crate::backend::device::{CopyPart, Direction};
use crate::base::PageId;
use crate::base::containers::Map;
use crate::pool::{PlaneSet, PoolKind};
use crate::tiers::PagePair;

/// Pages of one pool: read and written.
#[derive(Debug)]
pub(super) struct Part {
    pool: PoolKind,
    sources: Vec<PageId>,
    targets: Vec<PageId>,
}

impl Part {
    pub(super) fn all_planes(&self) -> CopyPart<'_> {
        CopyPart { pool: self.pool, src: &self.sources, dst: &self.targets, planes: PlaneSet::ALL }
    }
}

pub(super) fn parts_of(pairs: &[PagePair]) -> Vec<Part> {
    let part = |pool| {
        let pages = pairs.iter().filter(|pair| pair.pool == pool).count();
        let mut part = Part { pool, sources: Vec::with_capacity(pages), targets: Vec::with_capacity(pages) };
        for pair in pairs.iter().filter(|pair| pair.pool == pool) {
            part.sources.push(pair.source);
            part.targets.push(pair.target);
        }
        (pages > 0).then_some(part)
    };
    PoolKind::ALL.into_iter().filter_map(part).collect()
}

/// Planes that pages lack, per tier. Travels with the bytes: a copy of a page lacks what the page lacks.
#[derive(Debug, Default)]
pub(super) struct Gaps {
    pub(super) device: Map<(PoolKind, PageId), PlaneSet>,
    pub(super) host: Map<(PoolKind, PageId), PlaneSet>,
}

impl Gaps {
    pub(super) fn copied(&mut self, direction: Direction, parts: &[Part]) {
        let (from, to) = match direction {
            Direction::DeviceToHost => (&self.device, &mut self.host),
            Direction::HostToDevice => (&self.host, &mut self.device),
            Direction::DeviceToDevice => return,
        };
        if from.is_empty() && to.is_empty() {
            return;
        }
        for Part { pool, sources, targets } in parts {
            for (source, target) in sources.iter().zip(targets) {
                match from.get(&(*pool, *source)) {
                    Some(&gap) => to.insert((*pool, *target), gap),
                    None => to.remove(&(*pool, *target)),
                };
            }
        }
    }

    /// The host tier is gone.
    pub(super) fn forget_host(&mut self) {
        self.host.clear();
    }

    pub(super) fn read(&mut self, read: &[Gap]) {
        for &Gap { pool, page, planes } in read {
            if planes == PlaneSet::NONE {
                self.host.remove(&(pool, page));
            } else {
                self.host.insert((pool, page), planes);
            }
        }
    }
}
