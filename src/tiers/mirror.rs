//! Mirrors: host copies of what lies on the device too, and what they cost an exclusive host tier.
//!
//! Whatever has a host copy needs one of every ancestor (the rule of backed-up parents). Ancestors that are still in use
//! lie on the device as well, so their copies are mirrors that serve nobody but what hangs below: a turn of a session that
//! was not taken up again, say, keeps a second copy of the whole session. Two rules weigh the one against the other, page
//! by page. A node that leaves the device goes without a host copy if its ancestors' would need more pages than it has
//! (and than those have that went this way below the same parent before it, so that what many share is paid for in the
//! end). And what keeps a larger mirror in place on the host is given up for it when host pages are short.
//!
//! Only where host copies are the last ones: with a store behind it the host is a stage on the way there.

use std::collections::VecDeque;

use super::core::Core;
use super::outcome::Refusal;
use crate::base::NodeId;
use crate::base::containers::{Map, Set};
use crate::tree::BackupPlan;

/// Nodes with pages given up below them that are remembered: beyond that, all start anew. Also the most candidates.
const REMEMBERED_MAX: usize = 4096;
/// Candidates that one call looks at. With 8, the synthetic trace of Mooncake hit 44.09 % in 1 and 4 million tokens; with 64,
/// and more, 44.24 %.
const LOOKS: usize = 64;

/// What is known of mirrors beyond what the tree says.
#[derive(Debug, Default)]
pub(super) struct Mirrors {
    /// Pages given up below a node for the sake of its mirror. Only looked up.
    given_up: Map<NodeId, u32>,
    /// Nodes that may be mirrored only for the sake of what lies below them; the last is the likeliest.
    blocked: VecDeque<NodeId>,
    is_blocked: Set<NodeId>,
}

impl Mirrors {
    fn given_up_below(&self, node: NodeId) -> u32 {
        self.given_up.get(&node).copied().unwrap_or(0)
    }

    fn give_up(&mut self, below: NodeId, pages: u32) {
        if self.given_up.len() >= REMEMBERED_MAX {
            self.given_up.clear();
        }
        let sum = self.given_up.entry(below).or_insert(0);
        *sum = sum.saturating_add(pages);
    }
}

impl Core {
    /// Whether a node that is next to leave the device, or `leaves` it now, is not worth the mirrors of its ancestors: of
    /// those that were used since it was, and so will stay. O(nodes of the path without a host copy).
    pub(super) fn is_outlived(&mut self, node: NodeId, leaves: bool) -> bool {
        if !self.config.host_copies_are_last() {
            return false;
        }
        let mut plan = BackupPlan::default();
        let Ok(used) = self.tree.last_used(node) else { return false };
        let Ok(Some(parent)) = self.tree.parent(node) else { return false };
        if self.tree.plan_backup(node, &mut plan).is_err() {
            return false;
        }
        let (mut mirrors, mut own) = (0, 0);
        for (&at, &pages) in plan.nodes.iter().zip(&plan.node_pages) {
            let stays = self.tree.last_used(at).is_ok_and(|last| last > used);
            *(if stays { &mut mirrors } else { &mut own }) += pages;
        }
        if mirrors <= self.mirrors.given_up_below(parent).saturating_add(own) {
            return false;
        }
        if leaves {
            self.mirrors.give_up(parent, own);
        }
        true
    }

    /// Something below `node` left the device, or stayed on the host when `node` came back.
    pub(super) fn note_blocked(&mut self, node: NodeId) {
        let mirrors = &mut self.mirrors;
        if !self.config.host_copies_are_last() || !mirrors.is_blocked.insert(node) {
            return;
        }
        if mirrors.blocked.len() >= REMEMBERED_MAX
            && let Some(first) = mirrors.blocked.pop_front()
        {
            mirrors.is_blocked.remove(&first);
        }
        mirrors.blocked.push_back(node);
    }

    /// Frees up to `want` host pages by giving up what keeps larger mirrors in place. Looks at a few candidates; the
    /// others wait for the next call. O(1) nodes and the pages freed.
    pub(super) fn unblock_mirrors(&mut self, want: u32) {
        for _ in 0..LOOKS {
            if self.host.free_pages() >= want {
                break;
            }
            let Some(node) = self.mirrors.blocked.pop_back() else { break };
            let Ok(own) = self.tree.node_pages(node) else {
                self.mirrors.is_blocked.remove(&node);
                continue;
            };
            // Of what that frees, at most four fifths were the only copy: a trunk that many hang on keeps its mirror. (Two
            // thirds: 44.24 %; without a bound 44.29 %, and the branches of a short trunk would go for it.)
            let most = own.saturating_mul(4).saturating_sub(self.mirrors.given_up_below(node));
            let mut pages = Vec::new();
            match self.tree.evict_host_below(node, most, &mut pages) {
                Ok(Some(0)) => self.mirrors.blocked.push_front(node),
                Ok(Some(freed)) => {
                    self.mirrors.is_blocked.remove(&node);
                    self.mirrors.give_up(node, freed);
                    self.stats.host_evicted_pages += u64::from(freed);
                    let tokens = self.tokens_of(freed);
                    self.stats.drop_tokens(Refusal::Outlived, tokens);
                    self.free_host(&pages);
                    self.reclaim_mirrors(want, self.ahead_used);
                    if let Ok(Some(above)) = self.tree.parent(node) {
                        self.note_blocked(above);
                    }
                }
                Ok(None) | Err(_) => _ = self.mirrors.is_blocked.remove(&node),
            }
        }
    }
}
