//! What the core counted. Plain integers, handed out as a snapshot.

use super::outcome::Refusal;
use std::collections::BTreeMap;

/// Tokens by reason, in a fixed order.
pub type TokensByReason = BTreeMap<Refusal, u64>;

/// Counters since the core was made. Tokens and pages only grow.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Stats {
    /// Tokens that matches found on the device.
    pub matched_device_tokens: u64,
    /// Tokens that matches found on the host, behind the device part.
    pub matched_host_tokens: u64,
    /// Matches that ended by themselves ([`hold_until`](super::Core::hold_until)).
    pub matches_ended: u64,
    /// Pages handed to requests.
    pub allocated_pages: u64,
    /// Device pages whose content went to the host only.
    pub demoted_pages: u64,
    /// Device pages whose content is gone from device and host.
    pub deleted_pages: u64,
    /// Host pages whose content is gone from the host.
    pub host_evicted_pages: u64,
    /// Host copies given up because the device holds the same page and host pages were short.
    pub mirror_reclaimed_pages: u64,
    /// Pages backed up to the host.
    pub backed_up_pages: u64,
    /// Pages whose backup failed.
    pub backup_failed_pages: u64,
    /// Pages restored from the host.
    pub loaded_pages: u64,
    /// Pages whose restore failed.
    pub load_failed_pages: u64,
    /// Pages of windows and states given up to make room for others.
    pub component_evicted_pages: u64,
    /// Pages of windows and states that found no host page when their prefix was backed up.
    pub component_unsaved_pages: u64,
    /// Prefetches that went back to an earlier stop point because something could not be read.
    pub prefetch_retreats: u64,
    /// Pages of windows and states that prefetches brought to the host.
    pub component_prefetched_pages: u64,
    /// Pages written to the store.
    pub store_put_pages: u64,
    /// Writes of a page that failed, each attempt.
    pub store_put_failed_pages: u64,
    /// Pages given up after the last attempt, or because an ancestor holds no host copy.
    pub store_put_dropped_pages: u64,
    /// Pages that got a host copy and are not written to the store before they are used again, or at all.
    pub store_not_yet_pages: u64,
    /// Nodes not queued for the store because the queue was full.
    pub store_queue_full_nodes: u64,
    /// Pages read from the store and verified.
    pub store_got_pages: u64,
    /// Pages the store returned with wrong bytes.
    pub store_corrupt_pages: u64,
    /// Prefetches started.
    pub prefetches: u64,
    /// Page hashes computed to ask stores; [`TreeStats::hashed_pages`](crate::tree::TreeStats::hashed_pages) has the others.
    pub hashed_pages: u64,
    /// Tokens that stores said they hold.
    pub prefetch_hit_tokens: u64,
    /// Tokens that prefetches brought to the host.
    pub prefetch_loaded_tokens: u64,
    /// Tokens found in the store that the tree had by then.
    pub prefetch_redundant_tokens: u64,
    /// Refills held until their anchor had its host copy, or the bound was over.
    pub anchor_repairs: u64,
    /// Tokens dropped anywhere, by reason.
    pub dropped_tokens: TokensByReason,
    /// Calls refused, by reason.
    pub refused_calls: TokensByReason,
    /// Events for operations that do not exist (late, doubled).
    pub stray_events: u64,
    /// Broken rules that were met in a release build.
    pub violations: u64,
}

impl Stats {
    pub(super) fn drop_tokens(&mut self, reason: Refusal, tokens: u64) {
        if tokens > 0 {
            *self.dropped_tokens.entry(reason).or_default() += tokens;
        }
    }

    pub(super) fn refuse(&mut self, reason: Refusal) -> Refusal {
        *self.refused_calls.entry(reason).or_default() += 1;
        reason
    }
}
