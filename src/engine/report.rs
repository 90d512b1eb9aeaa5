//! What the store has of a cache's planes, for logs, metrics and admin pages.

use crate::pool::PlaneKind;
use crate::tiers::RegistrationState;
use crate::tiers::registration::RegistrationFailure;

/// One plane that is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PlaneReport {
    /// What its bytes are.
    pub kind: PlaneKind,
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
    /// Planes that the store was to have and has not.
    pub not_stored: Vec<PlaneKind>,
}

impl StoreReport {
    /// 1 if the draft has no store tier although there is one: the gauge `draft_store_disabled`.
    #[must_use]
    pub fn draft_store_disabled(&self) -> u64 {
        u64::from(self.not_stored.iter().any(|kind| kind.is_draft()))
    }
}
