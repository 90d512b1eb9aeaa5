//! Order of eviction.
//!
//! LRU is an intrusive list: a touch moves the whole path, deepest node first, so that an ancestor is never older than
//! its descendants and the oldest node is always a leaf. Every other policy is a heap of leaves.

use std::fmt;
use std::sync::Arc;

use crate::base::heap::HeapKey;

use super::adaptive::AdaptiveConfig;

/// What a policy may know of a victim. Pages and ticks are integers of the tree; no wall clock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NodeFacts {
    /// Inserts counted, saturating at [`EvictionPolicy::hits_cap`] (or the write threshold, if that is more).
    pub hits: u32,
    /// Highest priority inserted through the node.
    pub priority: i32,
    /// Tick of the last touch, end of a request's hold, or demotion.
    pub used: u64,
    /// Tick of creation; a split hands it on.
    pub created: u64,
    /// Pages from the root to the start of the node.
    pub depth_pages: u32,
    /// Pages of the node.
    pub node_pages: u32,
    /// Deepest end of an insert through the node, in pages from the root; survives eviction below the node.
    pub reach_pages: u32,
}

/// A policy of the embedder. Pure: the same facts give the same answer.
pub trait EvictionPolicy: fmt::Debug + Send + Sync {
    /// Smaller goes first. Two leaves with equal keys go in an order that only depends on the history.
    fn key(&self, facts: &NodeFacts) -> HeapKey;

    /// Pages at the end of the node that this key stands for, at least 1; the rest gets a key of its own.
    fn tail_pages(&self, facts: &NodeFacts) -> u32 {
        facts.node_pages
    }

    /// Hits above this make no difference.
    fn hits_cap(&self) -> u32 {
        u32::MAX
    }
}

/// Which victim goes first.
#[derive(Clone, Debug, Default)]
pub enum Policy {
    /// Least recently used.
    #[default]
    Lru,
    /// Fewest hits, then least recently used.
    Lfu,
    /// Oldest.
    Fifo,
    /// Most recently used.
    Mru,
    /// Newest.
    Filo,
    /// Below `protected_hits` hits first (probationary), then the rest; least recently used within each.
    Slru {
        /// Hits that protect.
        protected_hits: u32,
    },
    /// Lowest priority, then least recently used.
    Priority,
    /// Tails first that the next turn would recompute cheaply anyway (T-LRU): pages from
    /// `max(reach + next_prompt_pages - spare_pages, 0)` on, then least recently used.
    TailTrim {
        /// Pages a request may have to compute without hurting its latency goal.
        spare_pages: u32,
        /// Pages the next prompt is expected to add.
        next_prompt_pages: u32,
    },
    /// Learns who comes back: see [`adaptive`](super::adaptive). Components keep least recently used.
    Adaptive(AdaptiveConfig),
    /// A policy of the embedder.
    Custom(Arc<dyn EvictionPolicy>),
}

impl Policy {
    /// True if the order is the list; then there are no keys.
    pub(super) fn is_list(&self) -> bool {
        matches!(self, Policy::Lru)
    }

    pub(super) fn uses_created(&self) -> bool {
        matches!(self, Policy::Fifo | Policy::Filo | Policy::Custom(_))
    }

    pub(super) fn uses_reach(&self) -> bool {
        matches!(self, Policy::TailTrim { .. } | Policy::Adaptive(_) | Policy::Custom(_))
    }

    pub(super) fn hits_cap(&self) -> u32 {
        match self {
            Policy::Lfu => u32::MAX,
            Policy::Slru { protected_hits } => *protected_hits,
            Policy::Custom(policy) => policy.hits_cap(),
            _ => 0,
        }
    }

    pub(super) fn key(&self, facts: &NodeFacts) -> HeapKey {
        let used = facts.used;
        match self {
            Policy::Lru | Policy::Adaptive(_) => (0, used),
            Policy::Lfu => (u64::from(facts.hits), used),
            Policy::Fifo => (facts.created, used),
            Policy::Mru => (!used, 0),
            Policy::Filo => (!facts.created, used),
            Policy::Slru { protected_hits } => (u64::from(facts.hits >= *protected_hits), used),
            Policy::Priority => ((i64::from(facts.priority) - i64::from(i32::MIN)) as u64, used),
            Policy::TailTrim { .. } => (u64::from(self.safe_tail(facts) == 0), used),
            Policy::Custom(policy) => policy.key(facts),
        }
    }

    /// Pages at the end that may go under the current key: 1 to all of the node.
    pub(super) fn tail_pages(&self, facts: &NodeFacts) -> u32 {
        let pages = match self {
            Policy::TailTrim { .. } => match self.safe_tail(facts) {
                0 => facts.node_pages,
                safe => safe,
            },
            Policy::Custom(policy) => policy.tail_pages(facts),
            _ => facts.node_pages,
        };
        pages.clamp(1, facts.node_pages.max(1))
    }

    fn safe_tail(&self, facts: &NodeFacts) -> u32 {
        let Policy::TailTrim { spare_pages, next_prompt_pages } = self else { return 0 };
        let keep = facts.reach_pages.saturating_add(*next_prompt_pages).saturating_sub(*spare_pages);
        (facts.depth_pages + facts.node_pages).saturating_sub(keep.max(facts.depth_pages))
    }
}
