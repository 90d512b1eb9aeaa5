//! What the store has of a cache's planes, for logs, metrics and admin pages.

use crate::pool::{PlaneKind, PoolKind};
use crate::tiers::RegistrationState;
use crate::tiers::registration::RegistrationFailure;

/// One plane that is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PlaneReport {
    /// What its bytes are.
    pub kind: PlaneKind,
    /// The pool whose pages it follows.
    pub pool: PoolKind,
    /// Whether a page without it is no page.
    pub required: bool,
    /// Pages read.
    pub got_pages: u64,
    /// Pages asked for that did not come.
    pub not_got_pages: u64,
    /// Pages written, or there already.
    pub put_pages: u64,
    /// Pages that could not be written.
    pub not_put_pages: u64,
}

/// A plane that pages of a request lack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MissingPlane {
    /// What its bytes would be.
    pub kind: PlaneKind,
    /// The pool whose pages lack it.
    pub pool: PoolKind,
    /// How many of the request's pages do.
    pub pages: u32,
}

/// The store tier of a cache.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StoreReport {
    /// Name of the store; empty without one.
    pub store: &'static str,
    /// How the registration stands; `None` without a store.
    pub state: Option<RegistrationState>,
    /// What went wrong when it was made, if something did.
    pub failure: Option<RegistrationFailure>,
    /// The planes that are stored.
    pub planes: Vec<PlaneReport>,
    /// Planes that the store was to have and has not, by kind and pool.
    pub not_stored: Vec<(PlaneKind, PoolKind)>,
}

impl StoreReport {
    /// 1 if the draft has no store tier although there is one: the gauge `draft_store_disabled`.
    #[must_use]
    pub fn draft_store_disabled(&self) -> u64 {
        u64::from(self.not_stored.iter().any(|(kind, _)| kind.is_draft()))
    }
}
