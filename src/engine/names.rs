//! What a plane of pages is called in a store.

use crate::backend::identity::Plane as StorePlane;
use crate::pool::{PlaneKind, PoolKind};

/// The name of a plane. Planes of one kind in two pools hold other layers under the same page hashes, often in as many
/// bytes, so the pool is part of the name.
pub(super) fn store_plane(kind: PlaneKind, pool: PoolKind) -> StorePlane {
    let (natural, code) = match kind {
        PlaneKind::Target | PlaneKind::Latent => (StorePlane::Target, 1),
        PlaneKind::Draft => (StorePlane::Draft, 2),
        PlaneKind::Index => (StorePlane::Index, 3),
        PlaneKind::DraftIndex => (StorePlane::DraftIndex, 4),
        PlaneKind::Scale => (StorePlane::Scale, 5),
        PlaneKind::State => (StorePlane::State, 6),
        // Numbers of the embedder lie below 0x1000, those of unusual pairs above.
        PlaneKind::Other(n) => return StorePlane::Other(u16::from(n) + 0x100 * pool.index() as u16),
    };
    match (pool, natural) {
        (PoolKind::State, StorePlane::State) => StorePlane::State,
        (PoolKind::Window, StorePlane::Target) => StorePlane::Window,
        (PoolKind::Window, StorePlane::Draft) => StorePlane::DraftWindow,
        (PoolKind::Full, natural) if natural != StorePlane::State => natural,
        _ => StorePlane::Other(0x1000 * (pool.index() as u16 + 1) + code),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn no_two_planes_of_a_geometry_have_one_name() {
        let kinds = [
            PlaneKind::Target,
            PlaneKind::Draft,
            PlaneKind::Index,
            PlaneKind::DraftIndex,
            PlaneKind::Scale,
            PlaneKind::State,
            PlaneKind::Other(0),
            PlaneKind::Other(1),
            PlaneKind::Other(255),
        ];
        let mut seen: BTreeMap<String, (PlaneKind, PoolKind)> = BTreeMap::new();
        for pool in PoolKind::ALL {
            for kind in kinds {
                let name = store_plane(kind, pool);
                if let Some(other) = seen.insert(format!("{name:?}"), (kind, pool)) {
                    panic!("{kind:?} in {pool:?} and {other:?} are both {name:?}");
                }
            }
            // A latent takes the place of K and V; its rows are told apart by their content.
            assert_eq!(store_plane(PlaneKind::Latent, pool), store_plane(PlaneKind::Target, pool));
        }
        assert_eq!(store_plane(PlaneKind::Draft, PoolKind::Window), StorePlane::DraftWindow);
        assert_eq!(store_plane(PlaneKind::Target, PoolKind::Window), StorePlane::Window);
        assert_eq!(store_plane(PlaneKind::Other(7), PoolKind::Full), StorePlane::Other(7));
    }
}
