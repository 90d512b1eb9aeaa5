//! What became readable where: the raw stream of residency, one event per node and change.
//!
//! Written only where presence is written, so an index that follows the stream holds exactly what the tree holds. Splits
//! and merges change no residency and say nothing.

use crate::base::{NamespaceId, Tier};
use crate::key::PageHash;

use super::Tree;

/// One change of residency. Pages in flight are not resident.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TreeEvent {
    /// Pages became readable on a tier.
    Stored {
        /// Device or host.
        tier: Tier,
        /// Namespace of the path.
        namespace: NamespaceId,
        /// Hash of the page before; `None` for the first page of a prompt.
        parent: Option<PageHash>,
        /// Place of the first page, counted from the root.
        first_page: u32,
        /// Hash of each page.
        hashes: Vec<PageHash>,
        /// Raw tokens of the pages: one more than their units in the bigram view.
        tokens: Vec<u32>,
    },
    /// Pages are no longer readable on a tier.
    Removed {
        /// Device or host.
        tier: Tier,
        /// Hash of each page.
        hashes: Vec<PageHash>,
    },
    /// Nothing is readable anywhere.
    Cleared,
}

impl Tree {
    /// Moves the events since the last call to the end of `into`. None without [`TreeConfig::events`](super::TreeConfig).
    pub fn take_events(&mut self, into: &mut Vec<TreeEvent>) {
        into.append(&mut self.events);
    }

    /// Notes that a node became readable on a tier, or stopped being so.
    pub(super) fn note(&mut self, at: u32, tier: Tier, was: bool, is: bool) {
        if !self.with_events || was == is {
            return;
        }
        let node = &self.arena.nodes[at as usize];
        let hashes = self.arena.hashes(at).unwrap_or_default().to_vec();
        self.events.push(if is {
            TreeEvent::Stored {
                tier,
                namespace: node.ns,
                parent: self.last_hash_of(node.parent),
                first_page: node.depth,
                hashes,
                tokens: self.tokens_of(at).to_vec(),
            }
        } else {
            TreeEvent::Removed { tier, hashes }
        });
    }
}
