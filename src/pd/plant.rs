//! Bugs that can be planted on purpose. A simulation that does not find them proves nothing; only the `sim`
//! feature has the setters.

/// One bug.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Plant {
    /// The receiver frees the pages of a failed room when the hold time is over, proof or not.
    FreeOnTimeout,
    /// The sender acknowledges an ABORT while writes are posted.
    AckBeforeQuiet,
    /// The receiver takes a status for any life of the room.
    NoEpochCheck,
    /// The sender posts queued chunks of rooms that are over.
    NoRoomGuard,
    /// The sender takes a destination whose grant was closed before.
    NoClosedGuard,
    /// The sender guesses the offset of V from divisibility.
    GuessedV,
    /// The receiver believes reported success without counting bytes.
    NoByteCount,
    /// The receiver frees pages while it scatters a packed chunk into them.
    ScatterUncounted,
    /// The receiver reuses the staging places of a failed room at once.
    RingWithoutProof,
}

impl Plant {
    /// All of them.
    pub const ALL: [Plant; 9] = [
        Plant::FreeOnTimeout,
        Plant::AckBeforeQuiet,
        Plant::NoEpochCheck,
        Plant::NoRoomGuard,
        Plant::NoClosedGuard,
        Plant::GuessedV,
        Plant::NoByteCount,
        Plant::ScatterUncounted,
        Plant::RingWithoutProof,
    ];
}
