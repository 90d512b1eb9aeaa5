//! Floor 3: what moves between device, host and store, and when. Pure.
//!
//! [`Core`] joins the tree and the page pools. It is told what happens and answers with decisions; see
//! `docs/ARCHITECTURE.md` for the rules and [`action`] for the contract with the executors.

pub mod action;
pub mod agree;
mod attach;
mod calls;
mod components;
pub mod config;
pub mod core;
mod foresight;
mod hold;
mod load;
mod mirror;
pub mod oplog;
pub mod outcome;
mod prefetch;
pub mod registration;
mod request;
mod room;
pub mod stats;
mod storage;
mod write;

pub use self::core::{Core, CoreError, Freed};
pub use action::{Action, EndKey, Event, PageOutcome, PagePair, PoolKind, StoreItem};
pub use agree::{AgreeError, Agreement, Solo, Votes};
pub use attach::HostTier;
pub use config::{
    ConfigError, CoreConfig, Eviction, PrefetchConfig, PrefetchPolicy, Rates, StateConfig, StoreConfig,
    WindowConfig, WritePolicy,
};
pub use oplog::{Op, OpLog, OpLogError};
pub use outcome::{
    Alloc, Checkpoint, LoadBack, LoadState, MatchInfo, PageCounts, Prefetch, PrefetchEnd, PrefetchState,
    Refusal, RequestComponents,
};
pub use registration::{Registration, RegistrationPolicy, RegistrationState};
pub use request::RequestId;
pub use stats::Stats;
