//! The KV of a draft model (EAGLE, multi-token prediction) in the tiers.

use crate::backend::identity::{Descriptor, Shard};
use crate::pool::{Geometry, Plane, PlaneKind};

/// Where the draft model's KV lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum DraftPlan {
    /// There is none, or it is not kept.
    None,
    /// The draft's layers are the last layers of the target's pages. They come and go with them; the number is
    /// part of the name, so that servers with and without a draft never read each other's pages.
    Packed {
        /// Trailing layers that are the draft's.
        layers: u32,
    },
    /// The draft has planes of its own, which follow the target page by page.
    Sidecar {
        /// The part of the draft model that this rank holds, if it is cut in another way than the target (an MHA
        /// draft beside an MLA target). Default: as the target.
        shard: Option<Shard>,
        /// Whether a page without its draft is no page. Default is no: the target runs without, and only
        /// acceptance falls, which [`PrefixCache::missing_planes`](super::PrefixCache::missing_planes) tells.
        required: bool,
    },
}

/// Why a draft plan does not go with a geometry.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DraftPlanError {
    /// Planes of a draft, and a plan without.
    #[error("the geometry has planes of a draft model, the plan {plan:?} has none")]
    UnexpectedPlanes {
        /// The plan.
        plan: DraftPlan,
    },
    /// A sidecar without planes.
    #[error("a sidecar draft needs a plane of its own")]
    NoPlanes,
    /// More packed layers than a target has beside its own, or none.
    #[error("{layers} packed draft layers do not leave a target in {target_layers} layers")]
    PackedLayers {
        /// Asked for.
        layers: u32,
        /// Layers of the target's plane.
        target_layers: u32,
    },
}

impl DraftPlan {
    /// What a geometry suggests: a sidecar that is not required if it has planes of a draft.
    #[must_use]
    pub fn of(geometry: &Geometry) -> DraftPlan {
        match geometry.planes().iter().any(|p| p.kind().is_draft()) {
            true => DraftPlan::Sidecar { shard: None, required: false },
            false => DraftPlan::None,
        }
    }

    /// Whether the plan goes with the geometry.
    pub fn check(self, geometry: &Geometry) -> Result<(), DraftPlanError> {
        let planes = geometry.planes().iter();
        let has_planes = planes.clone().any(|p| p.kind().is_draft());
        match self {
            DraftPlan::Sidecar { .. } if !has_planes => Err(DraftPlanError::NoPlanes),
            DraftPlan::None | DraftPlan::Packed { .. } if has_planes => {
                Err(DraftPlanError::UnexpectedPlanes { plan: self })
            }
            DraftPlan::Packed { layers } => {
                let target_layers = planes.filter(|p| is_target(p)).map(Plane::layers).min().unwrap_or(0);
                match layers == 0 || layers >= target_layers {
                    true => Err(DraftPlanError::PackedLayers { layers, target_layers }),
                    false => Ok(()),
                }
            }
            DraftPlan::Sidecar { .. } | DraftPlan::None => Ok(()),
        }
    }

    /// Whether the pages of `kind` may be missing without harm.
    pub(super) fn may_miss(self, kind: PlaneKind) -> bool {
        kind.is_draft()
            && self != DraftPlan::None
            && !matches!(self, DraftPlan::Sidecar { required: true, .. })
    }

    /// Puts what the plan says into the name of a plane's pages.
    pub(super) fn name(self, plane: &Plane, descriptor: &mut Descriptor) {
        match self {
            DraftPlan::Packed { layers } if is_target(plane) => descriptor.draft_layers = layers,
            DraftPlan::Sidecar { shard: Some(shard), .. } if plane.kind().is_draft() => {
                descriptor.shard = shard;
            }
            _ => {}
        }
    }
}

fn is_target(plane: &Plane) -> bool {
    matches!(plane.kind(), PlaneKind::Target | PlaneKind::Latent)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::ModelIdentity;

    fn geometry(draft: bool) -> Geometry {
        let g = Geometry::builder(4).plane(Plane::target(4, 64));
        if draft { g.plane(Plane::draft(1, 64)) } else { g }.build().unwrap()
    }

    #[test]
    fn a_plan_that_does_not_fit_is_refused_by_name() {
        let (plain, side) = (geometry(false), geometry(true));
        let sidecar = DraftPlan::Sidecar { shard: None, required: false };
        assert_eq!((DraftPlan::of(&plain), DraftPlan::of(&side)), (DraftPlan::None, sidecar));
        assert_eq!(sidecar.check(&plain), Err(DraftPlanError::NoPlanes));
        assert_eq!(sidecar.check(&side), Ok(()));
        let unexpected = Err(DraftPlanError::UnexpectedPlanes { plan: DraftPlan::None });
        assert_eq!(DraftPlan::None.check(&side), unexpected);
        assert!(DraftPlan::Packed { layers: 1 }.check(&side).is_err());
        for (layers, ok) in [(0, false), (1, true), (3, true), (4, false)] {
            assert_eq!(DraftPlan::Packed { layers }.check(&plain).is_ok(), ok, "{layers}");
        }
    }

    /// Two deployments that differ in the draft only never share a name, planes of one never do, and ranks of a
    /// draft that is cut while its target is not have names of their own.
    #[test]
    fn names_tell_drafts_apart() {
        let (plain, side) = (geometry(false), geometry(true));
        let identity = ModelIdentity::whole("m", "r");
        let digest = |g: &Geometry, plane: usize, plan: DraftPlan| {
            let mut d = identity.descriptor(g, &g.planes()[plane]);
            plan.name(&g.planes()[plane], &mut d);
            d.digest().unwrap()
        };
        let rank = |r| Shard::Rank { tensor: (r, 2), pipeline: (0, 1), context: (0, 1) };
        let cut = |r| DraftPlan::Sidecar { shard: Some(rank(r)), required: false };
        let target = digest(&plain, 0, DraftPlan::None);
        assert_ne!(target, digest(&plain, 0, DraftPlan::Packed { layers: 1 }));
        assert_eq!(target, digest(&side, 0, cut(0)), "the target's pages are the same with a sidecar");
        let all = [
            target,
            digest(&side, 1, cut(0)),
            digest(&side, 1, cut(1)),
            digest(&side, 1, DraftPlan::of(&side)),
        ];
        for (i, a) in all.iter().enumerate() {
            assert!(all[i + 1..].iter().all(|b| a != b), "{i}");
        }
    }
}
