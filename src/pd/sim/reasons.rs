//! I20: a room has one reason on a prefill rank, the first, and a decode rank gives its client that one or one of
//! its own making, never one that nobody had.

use std::collections::{BTreeMap, BTreeSet};

use super::World;
use crate::pd::ids::{Incarnation, PeerId, RoomKey};
use crate::pd::reason::Reason;
use crate::pd::wire::{Body, Frame, Status};

#[derive(Debug, Default)]
pub(super) struct Reasons {
    /// The reason of a room on a prefill rank, by the process.
    first: BTreeMap<(Incarnation, RoomKey), Reason>,
    /// Everything any prefill rank ever said about a room.
    told: BTreeSet<(RoomKey, Reason)>,
}

/// Said to one destination about its own message or its own top-up; the room itself may be well.
const TO_ONE: [Reason; 8] = [
    Reason::Closed,
    Reason::SecondOwner,
    Reason::TableFull,
    Reason::NoSender,
    Reason::Incompatible,
    Reason::SourceReleased,
    Reason::BadDestination,
    Reason::GroupFailed,
];

/// What a decode rank finds out on its own.
const OF_DECODE: [Reason; 12] = [
    Reason::AbortedByDecode,
    Reason::PeerDead,
    Reason::PeerReplaced,
    Reason::Superseded,
    Reason::Incompatible,
    Reason::ByteCount,
    Reason::RestoreFailed,
    Reason::Unhealthy,
    Reason::Stopped,
    Reason::NoProgress,
    Reason::GroupFailed,
    Reason::TableFull,
];

/// Where the kind stands in a frame, and the kind of STATUS.
const KIND_AT: usize = 6;
const STATUS: u8 = 8;

impl World {
    /// Looks at every frame that is sent.
    pub(super) fn watch_reason(&mut self, from: PeerId, bytes: &[u8]) {
        if bytes.get(KIND_AT) != Some(&STATUS) {
            return;
        }
        let Ok(Frame { head, body: Body::Status(Status::Failed(reason)) }) = Frame::decode(bytes) else {
            return;
        };
        self.reasons.told.insert((head.key, reason));
        // Before a room is opened and after it has ended its reason is only as good as the table of tombs, which
        // forgets.
        let node = self.nodes.get(from.0 as usize);
        let live = node.is_some_and(|n| n.opened.contains_key(&head.key) && !n.done.contains_key(&head.key));
        if TO_ONE.contains(&reason) || !live {
            return;
        }
        let first = *self.reasons.first.entry((head.from, head.key)).or_insert(reason);
        // A top-up that broke after the room was well has a cause of its own.
        let broke = [Reason::TransferFailed, Reason::TransferUnknown].contains(&reason);
        if first != reason && !broke {
            self.violation(
                "I20",
                format!("{from:?} gives {reason:?} for {:?}, and gave {first:?}", head.key),
            );
        }
    }

    /// A prefill rank ended a room.
    pub(super) fn check_sender_reason(&mut self, inc: Incarnation, key: RoomKey, reason: Reason) {
        let first = self.reasons.first.get(&(inc, key)).copied();
        if first.is_some_and(|f| f != reason) && !TO_ONE.contains(&reason) {
            self.violation("I20", format!("{inc:?} ends {key:?} with {reason:?}, and told {first:?}"));
        }
    }

    /// A decode rank ended a room.
    pub(super) fn check_receiver_reason(&mut self, n: usize, key: RoomKey, reason: Reason) {
        if !OF_DECODE.contains(&reason) && !self.reasons.told.contains(&(key, reason)) {
            self.violation("I20", format!("node {n} ends {key:?} with {reason:?}, which nobody told it"));
        }
    }
}
