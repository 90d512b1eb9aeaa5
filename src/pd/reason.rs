//! Why a room failed, and why a peer was refused. Both travel on the wire as small numbers, so that the
//! other side logs the first cause and not "failed".

use std::fmt;

macro_rules! wire_enum {
    ($(#[$meta:meta])* $name:ident { $($(#[$vmeta:meta])* $variant:ident = $code:literal, $text:literal;)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[non_exhaustive]
        pub enum $name {
            $($(#[$vmeta])* #[doc = $text] $variant,)+
            /// A reason this version does not know.
            Other(u16),
        }

        impl $name {
            /// Number on the wire.
            #[must_use]
            pub fn code(self) -> u16 {
                match self { $($name::$variant => $code,)+ $name::Other(code) => code }
            }

            /// From the number on the wire; total.
            #[must_use]
            pub fn from_code(code: u16) -> $name {
                match code { $($code => $name::$variant,)+ other => $name::Other(other) }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $($name::$variant => f.write_str($text),)+
                    $name::Other(code) => write!(f, "reason {code}"),
                }
            }
        }
    };
}

wire_enum! {
    /// Why a room failed. The first cause is kept and pushed to the other side; later ones never replace it.
    Reason {
        AbortedByDecode = 1, "aborted on the decode side";
        AbortedByPrefill = 2, "aborted on the prefill side";
        BootstrapTimeout = 3, "no decode rank showed progress on the room";
        NoSender = 4, "the prefill side never opened the room";
        Closed = 5, "the room was closed before";
        TransferFailed = 6, "a write failed";
        TransferUnknown = 7, "a write ended without proof of its state";
        PeerDead = 8, "the peer stopped answering";
        PeerReplaced = 9, "the peer was replaced by a new process";
        PromptMismatch = 10, "the two sides hold different prompts for the room";
        Superseded = 11, "a later epoch of the room was opened";
        Incompatible = 12, "the layouts do not fit";
        ByteCount = 13, "the bytes reported are not the bytes planned";
        RestoreFailed = 14, "the promised prefix could not be restored";
        SourceReleased = 15, "the source pages are gone";
        Unhealthy = 16, "the quarantine is full";
        Stopped = 17, "the rank is shutting down";
        NoProgress = 18, "no progress was heard";
        SecondOwner = 19, "another decode instance owns the room";
        GroupFailed = 20, "another rank of the group failed the room";
        BadDestination = 21, "a destination page is out of range or missing";
        TableFull = 22, "a table of the peer is full";
    }
}

wire_enum! {
    /// Why a registration was refused. A verdict holds for one incarnation of one peer and affects no other.
    Incompatible {
        Version = 1, "protocol version not spoken here";
        Model = 2, "model, revision or dtype differ";
        PageTokens = 3, "page sizes differ";
        Window = 4, "window sizes differ";
        TensorParallel = 5, "tensor-parallel sizes do not divide";
        PipelineParallel = 6, "pipeline stages do not fit";
        ContextParallel = 7, "context-parallel layout not supported";
        HeadSplit = 8, "heads do not divide over the ranks";
        EntryShape = 9, "paired entries have different shapes";
        EntryBytes = 10, "paired entries have different element sizes";
        Uncovered = 11, "an entry of the decode side has no source";
        DuplicateEntry = 12, "two entries share one identity";
        LayerOutsideStage = 13, "an entry lies outside its pipeline stage";
        RegionBounds = 14, "an entry leaves its region";
        Limit = 15, "a count exceeds its limit";
        Ring = 16, "ring sizes do not fit";
        Transport = 17, "no common transport";
        Rank = 18, "rank outside the topology";
        Instance = 19, "rank belongs to another instance";
        NotRegistered = 20, "not registered with this process";
        PageShard = 21, "page sharding not possible for this component";
    }
}

impl std::error::Error for Reason {}
impl std::error::Error for Incompatible {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip() {
        for code in 0..200 {
            assert_eq!(Reason::from_code(code).code(), code);
            assert_eq!(Incompatible::from_code(code).code(), code);
        }
        assert_eq!(Reason::from_code(999), Reason::Other(999));
        assert!(Reason::PeerDead.to_string().contains("answering"));
    }
}
