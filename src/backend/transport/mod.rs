//! Transports of prefill-to-decode: they move bytes and know nothing of requests.
//!
//! [`Writer`] is the prefill side, [`Target`] the decode side. A transport says what it can do ([`Caps`])
//! and reports every write as one of three outcomes; "failed" and "stopped" are different things, and only
//! one of them frees a page. Tags are opaque: a target that mediates checks them and can take them back.
//!
//! | transport | who copies | revoke | fence | notes |
//! |---|---|---|---|---|
//! | [`inproc`] | a worker thread | proven | proven | the base of tests |
//! | [`shm`] | the writer, into a memfd of the target | proven when the writer's block is over | no; process exit | one host |
//! | [`tcp`] | the target, from its sockets | proven at once | proven at once | real networks |
//! | `nixl` | the fabric (UCX) | no | no | feature `nixl`, library loaded at run time |
//!
//! One-sided fabrics have `revoke: false` and `fence: false`: the destination of a write that cannot be settled ends in
//! quarantine; its sources come back when what may read them is gone ([`Outcome::SourcesFree`]).
//! Mooncake's transfer engine and Mori fit the same traits so. They are not built here: the machine this is
//! tested on has no such device, and no registry carries a library with their C interface.

pub mod control;
pub mod grants;
pub mod inproc;
pub mod lease;
pub mod memory;
#[cfg(feature = "nixl")]
pub mod nixl;
pub mod rendezvous;
pub mod shm;
#[cfg(test)]
mod staged_tests;
pub mod tcp;
#[cfg(test)]
mod tests;

use crate::pd::ids::{Incarnation, PeerId, Tag, XferId};
use crate::pd::plan::Copy;
use crate::pd::receiver::Fence;
use crate::pd::sender::Outcome;

pub use grants::{Span, spans_of};
pub use memory::{Bytes, Memory};

/// What a transport can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Short name.
    pub name: &'static str,
    /// Most copies in one write.
    pub copies_max: usize,
    /// A write reported `Ok` is visible to the target's processors.
    pub visible_on_ok: bool,
    /// The target can refuse a tag from some moment on, provably.
    pub revoke: bool,
    /// The target can destroy the way in of one incarnation, provably.
    pub fence: bool,
    /// When the operating system says that the writing process is gone, nothing of it can land any more.
    pub exit_proves_quiet: bool,
    /// A cancelled write is provably over. False for every transport known.
    pub cancel_proves_quiet: bool,
    /// Writing the same bytes twice is harmless.
    pub retry_is_safe: bool,
}

/// Why a call failed. Nothing was posted unless it says so.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The descriptor of the peer cannot be read.
    #[error("peer descriptor of {bytes} bytes cannot be read")]
    Descriptor {
        /// Its length.
        bytes: usize,
    },
    /// The peer is not attached, or not with this attachment.
    #[error("{0:?} is not attached")]
    NotAttached(PeerId),
    /// A copy leaves a region.
    #[error("copy outside region {region} ({offset}+{len})")]
    Range {
        /// Region.
        region: u32,
        /// Offset.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// The tag cannot be admitted: a table is full.
    #[error("no room for {0:?}")]
    TableFull(Tag),
    /// The system refused.
    #[error("{what}: {source}")]
    System {
        /// Which call.
        what: &'static str,
        /// What it said.
        source: std::io::Error,
    },
    /// A region is private, and the transport needs memory that others can map.
    #[error("a region is not shared")]
    NotShared,
    /// The transport is closed.
    #[error("closed")]
    Closed,
}

impl TransportError {
    pub(crate) fn system(what: &'static str) -> impl FnOnce(std::io::Error) -> TransportError {
        move |source| TransportError::System { what, source }
    }
}

/// One finished write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Done {
    /// Which.
    pub xfer: XferId,
    /// How.
    pub outcome: Outcome,
}

/// The prefill side of a transport. No call waits for the peer.
pub trait Writer: Send {
    /// What it can do.
    fn caps(&self) -> Caps;
    /// Makes a peer reachable. A higher attachment replaces the lower one.
    fn attach(
        &mut self,
        peer: PeerId,
        inc: Incarnation,
        attach: u32,
        blob: &[u8],
    ) -> Result<(), TransportError>;
    /// Posts a write. On an error nothing is posted; on `Ok` exactly one terminal outcome comes out of
    /// [`Writer::poll`], and after `FailedUnknown` perhaps one that frees the sources, and one that settles it.
    fn submit(
        &mut self,
        xfer: XferId,
        peer: PeerId,
        attach: u32,
        tag: Tag,
        copies: &[Copy],
    ) -> Result<(), TransportError>;
    /// Appends finished writes and returns how many.
    fn poll(&mut self, out: &mut Vec<Done>) -> usize;
}

/// Whether a revocation is proven.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Revoked {
    /// No byte of the tag lands from now on.
    Proven,
    /// A block is being copied; ask again.
    Pending,
}

/// The decode side of a transport.
pub trait Target: Send {
    /// What it can do.
    fn caps(&self) -> Caps;
    /// What the other side needs to reach this memory.
    fn descriptor(&self) -> Vec<u8>;
    /// Lets writes of a tag reach these spans, instead of those it had.
    fn allow(&mut self, tag: Tag, spans: Vec<Span>) -> Result<(), TransportError>;
    /// Refuses a tag from now on.
    fn revoke(&mut self, tag: Tag) -> Revoked;
    /// The tag is settled; forget it (writes of it are refused).
    fn forget(&mut self, tag: Tag);
    /// Destroys the way in of an incarnation, up to an attachment.
    fn fence(&mut self, inc: Incarnation, attach: u32) -> Fence;
}
