//! One suite over every store and every wrapper, and what only single stores promise.
#![expect(clippy::unwrap_used, reason = "a test helper that cannot go on has failed")]

mod contract;
mod crash;
mod file;
mod group;
mod identity;
mod kit;
mod rates;
mod remote;
#[cfg(feature = "mooncake")]
#[path = "../mooncake/service.rs"]
mod service;
#[cfg(any(feature = "redis", feature = "object"))]
mod services;
#[cfg(feature = "mooncake-capi")]
#[path = "../mooncake/stand_in.rs"]
mod stand_in;
mod wrap;
