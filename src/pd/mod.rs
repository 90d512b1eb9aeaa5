//! Floor 3: prefill to decode. One protocol, sans-I/O: frames, completions and the time go in; frames and
//! actions come out. Transports only move bytes (`backend::transport`); a simulator attacks the rest.
//!
//! | module | holds |
//! |---|---|
//! | [`wire`] | the frame, its bodies, the only constructor from bytes |
//! | [`layout`], [`topo`] | what a rank publishes; which ranks talk to which |
//! | [`plan`] | which bytes go where, by identity, once per peer |
//! | [`grant`] | the contract with the cache: pages leave a grant only by commit or with a proof |
//! | `link` | frames, incarnations, liveness and repeats, the same on both sides |
//! | [`bootstrap`] | the rendezvous registry and the client that waits for it |
//! | [`sender`], [`receiver`] | the prefill and the decode machine |
//! | [`agree`] | decisions of a group of ranks from one agreed vector |
//! | [`staging`] | the ring for packed chunks |
//!
//! `docs/PROTOCOL.md` has the protocol in words.

pub mod agree;
pub mod bootstrap;
mod codec;
mod crc;
pub mod grant;
pub mod ids;
pub mod layout;
mod link;
pub mod plan;
#[doc(hidden)]
pub mod plant;
pub mod reason;
pub mod receiver;
pub mod sender;
#[cfg(feature = "sim")]
pub mod sim;
pub mod staging;
mod tomb;
pub mod topo;
pub mod wire;

pub use ids::{Incarnation, PeerId, RoomKey, Serial, Tag, XferId};
pub use link::{LinkConfig, LinkStats};
pub use reason::{Incompatible, Reason};
