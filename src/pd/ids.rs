//! Names of the protocol. A room alone names nothing: every frame, chunk, grant and completion carries the
//! room, its epoch and, where memory is concerned, the serial of the grant.

use std::fmt;

/// One life of one process, drawn at random when it starts. 0 means "not known yet".
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Incarnation(pub u64);

impl Incarnation {
    /// Not known yet; only registrations and probes may be addressed to it.
    pub const UNKNOWN: Incarnation = Incarnation(0);
}

/// The address of another rank, numbered by the driver. It outlives the incarnations behind it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId(pub u32);

/// One attempt at one request. The router picks both halves; an epoch is never used twice for a room.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct RoomKey {
    /// Request number.
    pub room: u64,
    /// Attempt. A later attempt has a larger epoch.
    pub epoch: u32,
}

/// A grant of one decode rank. Counts up within an incarnation and is never reused, so a frame that names
/// a serial can never mean a later grant, whatever happens to room numbers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Serial(pub u64);

/// One write posted to a transport. Never reused within the life of a sender.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct XferId(pub u64);

/// What a transport and the target of a write know a grant by: the incarnation and the serial.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(pub [u8; 16]);

impl Tag {
    /// The tag of a grant of the decode process `owner`.
    #[must_use]
    pub fn new(owner: Incarnation, serial: Serial) -> Tag {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&owner.0.to_le_bytes());
        bytes[8..].copy_from_slice(&serial.0.to_le_bytes());
        Tag(bytes)
    }

    /// The incarnation inside: a target that is another process must refuse.
    #[must_use]
    pub fn owner(self) -> Incarnation {
        let mut half = [0; 8];
        half.copy_from_slice(&self.0[..8]);
        Incarnation(u64::from_le_bytes(half))
    }

    /// The serial inside.
    #[must_use]
    pub fn serial(self) -> Serial {
        let mut half = [0; 8];
        half.copy_from_slice(&self.0[8..]);
        Serial(u64::from_le_bytes(half))
    }
}

impl fmt::Debug for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "i{:x}", self.0)
    }
}

impl fmt::Debug for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "peer{}", self.0)
    }
}

impl fmt::Debug for RoomKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "r{}.{}", self.room, self.epoch)
    }
}

impl fmt::Debug for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "g{}", self.0)
    }
}

impl fmt::Debug for XferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "x{}", self.0)
    }
}

impl fmt::Debug for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tag:{:?}", self.serial())
    }
}
