//! Floor 5: the cache as a scheduler sees it. [`PrefixCache`] is a [`Core`](crate::tiers::Core) with executors.
//!
//! One thread owns the cache and calls it. Nothing it calls waits for a device, a disk or a socket: copies run on
//! the device's queues, store calls on worker threads, and what has ended is taken in by [`PrefixCache::tick`] and
//! by every call that allocates.

mod builder;
mod cache;
mod delivery;
mod draft;
mod executor;
mod gaps;
mod group;
mod lane;
mod names;
mod registration;
pub mod remote;
mod report;
mod request;

pub use builder::{BuildError, Builder, ModelIdentity};
pub use cache::{CacheError, ComputeError, FinishError, PrefixCache, TierError};
pub use delivery::{CostModel, Delivery};
pub use draft::{DraftPlan, DraftPlanError};
pub use executor::BytesMoved;
pub use group::{Member, group};
pub use registration::{AloneVotes, RankVotes, RegistrationError};
pub use report::{MissingPlane, PlaneReport, StoreReport};
pub use request::Request;
