//! The cache whole: core, executors, devices and stores, with real bytes.

#![expect(clippy::unwrap_used, reason = "a test helper that cannot go on has failed")]

mod calls;
mod components;
mod fences;
mod kit;
mod registration;
