//! What a core is told when it is made.

use crate::base::limits::{PAGE_SIZE_MAX, POOL_PAGES_MAX};
use crate::key::KeyView;
use crate::pool::Capacity;
use crate::tree::adaptive::AdaptiveConfig;
use crate::tree::{BackupRule, Components, Policy, TreeConfig, TreeConfigError};

/// When a node gets a host copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[non_exhaustive]
pub enum WritePolicy {
    /// Back a node up once this many inserts have used it. 1: at once. A node is backed up only under a
    /// backed-up parent.
    WriteThrough {
        /// Inserts, at least 1.
        threshold: u32,
    },
    /// Write-through at the second insert: what is seen once never leaves the device.
    WriteThroughSelective,
    /// Back a node up when it is evicted from the device. No parent rule.
    WriteBack,
    /// The host holds only what the store prefetch brings; nothing is backed up.
    None,
}

impl WritePolicy {
    /// Inserts after which a node is due for a backup; 0: never by hits.
    #[must_use]
    pub fn threshold(self) -> u32 {
        match self {
            WritePolicy::WriteThrough { threshold } => threshold,
            WritePolicy::WriteThroughSelective => 2,
            WritePolicy::WriteBack | WritePolicy::None => 0,
        }
    }

    /// Whether a host copy is allowed only under a backed-up parent.
    #[must_use]
    pub fn needs_backed_parent(self) -> bool {
        matches!(self, WritePolicy::WriteThrough { .. } | WritePolicy::WriteThroughSelective)
    }
}

/// When a request that waits for a store prefetch goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PrefetchPolicy {
    /// With what has arrived when the scheduler first asks.
    BestEffort,
    /// When everything that was found has arrived.
    WaitComplete,
    /// As `WaitComplete`, but at most `base_ms` plus `per_ki_token_ms` for each 1,024 tokens looked up, counted
    /// from the first time the scheduler asks.
    Timeout {
        /// Fixed part of the budget in milliseconds.
        base_ms: u64,
        /// Milliseconds per 1,024 tokens.
        per_ki_token_ms: u64,
    },
    /// Only what the measured [`Rates`] say is faster to load than to compute, and no longer than computing it takes.
    /// Until rates are known, as [`PrefetchPolicy::TIMEOUT_DEFAULT`].
    Adaptive,
}

/// Measured speeds, an input like any other: the same rates at the same moment give the same decisions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rates {
    /// Nanoseconds to compute one token of a prompt.
    pub compute_ns_per_token: u64,
    /// Nanoseconds to read one token from the store and copy it to the device.
    pub load_ns_per_token: u64,
    /// Microseconds until the first page of a read arrives.
    pub load_latency_us: u64,
}

impl Rates {
    /// Whether both speeds were measured.
    #[must_use]
    pub fn are_known(&self) -> bool {
        self.compute_ns_per_token > 0 && self.load_ns_per_token > 0
    }

    /// Microseconds to compute so many tokens.
    #[must_use]
    pub fn compute_us(&self, tokens: u64) -> u64 {
        tokens.saturating_mul(self.compute_ns_per_token) / 1000
    }

    /// Microseconds to load so many tokens.
    #[must_use]
    pub fn load_us(&self, tokens: u64) -> u64 {
        self.load_latency_us.saturating_add(tokens.saturating_mul(self.load_ns_per_token) / 1000)
    }
}

impl PrefetchPolicy {
    /// The numbers the field's reference system uses: 1 s plus 0.25 s per 1,024 tokens.
    pub const TIMEOUT_DEFAULT: PrefetchPolicy =
        PrefetchPolicy::Timeout { base_ms: 1_000, per_ki_token_ms: 250 };
}

/// Store prefetch settings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PrefetchConfig {
    /// When a waiting request goes on.
    pub policy: PrefetchPolicy,
    /// Shorter spans and shorter hits than this many tokens are not worth a load. Rounded up to a page.
    pub threshold_tokens: u32,
    /// Pages of one read batch.
    pub batch_pages: u32,
    /// Read batches of one prefetch in flight at a time.
    pub window_batches: u32,
    /// Host pages that all prefetches together may hold, in percent of the host pool. Charged for what was found, not for
    /// what was looked up.
    pub host_share_percent: u32,
    /// Pause after a prefetch before the same request may ask again, in milliseconds.
    pub retry_ms: u64,
    /// Prefetches of one request, the first included.
    pub attempts_max: u32,
    /// Anchor repair: how long a refill may wait, in milliseconds, for a host copy of a device-only anchor, which is then
    /// made for it. 0: never, the refill is dropped (write-through kinds; under the others nothing is dropped).
    pub repair_ms: u64,
}

impl Default for PrefetchConfig {
    fn default() -> Self {
        PrefetchConfig {
            policy: PrefetchPolicy::TIMEOUT_DEFAULT,
            threshold_tokens: 256,
            batch_pages: 128,
            window_batches: 4,
            host_share_percent: 50,
            retry_ms: 100,
            attempts_max: 8,
            repair_ms: 0,
        }
    }
}

/// Store backup settings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoreConfig {
    /// Pages of one write batch.
    pub batch_pages: u32,
    /// Pages being written at a time; more waits in the queue. Bounds what a slow store can pin.
    pub pages_in_flight_max: u32,
    /// Nodes waiting to be written; more are refused and counted.
    pub queue_nodes_max: u32,
    /// Writes of one node before it is given up.
    pub attempts_max: u32,
    /// First wait before a failed write is tried again, in milliseconds; doubles each time.
    pub retry_ms: u64,
    /// Uses after which a page is worth a write, and the wear of it: 1 writes whatever the host holds, 2 what came back while
    /// the host held it. On public traces most pages are seen once only.
    pub uses_min: u32,
    /// Prompts shorter than this many tokens are not worth a write: they are computed faster than read. Their pages go with
    /// longer prompts that begin with them.
    pub tokens_min: u32,
}

impl Default for StoreConfig {
    fn default() -> Self {
        StoreConfig {
            batch_pages: 128,
            pages_in_flight_max: 1024,
            queue_nodes_max: 65_536,
            attempts_max: 4,
            retry_ms: 100,
            uses_min: 1,
            tokens_min: 0,
        }
    }
}

/// The sliding-window component.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WindowConfig {
    /// The window in pages, rounded up: a request goes on from a prefix if its last so many pages have window pages.
    pub span_pages: u32,
    /// Device pool.
    pub device: Capacity,
    /// Host pool.
    pub host: Capacity,
}

/// The recurrent-state component: one slot at the end of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StateConfig {
    /// Device pool, in slots. A computing request owns one slot and holds the one it started from.
    pub device: Capacity,
    /// Host pool, in slots.
    pub host: Capacity,
}

/// Who leaves a tier first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Eviction {
    /// Least recently used.
    Lru,
    /// Learns who comes back: see [`adaptive`](crate::tree::adaptive). As good as LRU to a per cent where there is nothing to
    /// learn, better where there is.
    #[default]
    Adaptive,
}

/// Settings of a [`Core`](super::Core).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CoreConfig {
    /// Tokens per page, 1 to [`PAGE_SIZE_MAX`].
    pub page_size: u32,
    /// Device pool.
    pub device: Capacity,
    /// Host pool; 0 pages: no host tier, and with it no store tier.
    pub host: Capacity,
    /// Whether a store is attached.
    pub store: Option<StoreConfig>,
    /// Write policy.
    pub write: WritePolicy,
    /// Store prefetch.
    pub prefetch: PrefetchConfig,
    /// Write-through kinds: when host pages are short, give up copies whose node lies on the device before copies
    /// that are the only ones, and write such a node again before it leaves the device. Device and host together
    /// then cache what their sum can hold. Without a store behind it, a full host takes only what is about to leave. Without it a full host holds a
    /// mirror of the device, and what leaves the device without a host copy is gone.
    pub exclusive: bool,
    /// Victims that are next in line for the device's pages are written to the host ahead of need, so many percent
    /// of the device pool deep (write-back, and write-through kinds with `exclusive`). Windows and states on their own, as
    /// deep in their pools, and at least as many as were handed out since the last tick.
    pub write_ahead_percent: u32,
    /// Loads from host to device in flight; more wait for their turn.
    pub loads_in_flight_max: u32,
    /// Sliding-window attention beside full attention.
    pub window: Option<WindowConfig>,
    /// Recurrent state beside full attention.
    pub state: Option<StateConfig>,
    /// Order of eviction, on the device and on the host.
    pub eviction: Eviction,
}

impl CoreConfig {
    /// A configuration without host and store tier.
    #[must_use]
    pub fn device_only(page_size: u32, device: Capacity) -> Self {
        CoreConfig {
            page_size,
            device,
            host: Capacity::Pages(0),
            store: None,
            write: WritePolicy::None,
            prefetch: PrefetchConfig::default(),
            exclusive: false,
            write_ahead_percent: 2,
            loads_in_flight_max: 64,
            window: None,
            state: None,
            eviction: Eviction::default(),
        }
    }

    fn eviction_policy(&self) -> Policy {
        // Without limit nothing is evicted; any scale will do.
        let pages = |capacity: Capacity| match capacity {
            Capacity::Pages(pages) => u64::from(pages),
            Capacity::Unlimited => 1 << 20,
        };
        let (device, host) = (pages(self.device), pages(self.host));
        match self.eviction {
            Eviction::Lru => Policy::Lru,
            Eviction::Adaptive => {
                let kept = if self.prefers_sole_copies() { device + host } else { device.max(host) };
                let config = AdaptiveConfig::new(kept, self.page_size);
                Policy::Adaptive(AdaptiveConfig { device_pages: device, host_pages: host, ..config })
            }
        }
    }

    /// Whether a device page without a host copy is written before it leaves.
    #[must_use]
    pub fn backs_up_on_eviction(&self) -> bool {
        match self.write {
            WritePolicy::WriteBack => true,
            WritePolicy::WriteThrough { .. } | WritePolicy::WriteThroughSelective => self.exclusive,
            WritePolicy::None => false,
        }
    }

    /// Whether host copies of what lies on the device go before copies that are the only ones.
    #[must_use]
    pub fn prefers_sole_copies(&self) -> bool {
        self.exclusive || self.write == WritePolicy::WriteBack
    }

    /// Whether the host tier is exclusive, and what leaves it is gone.
    #[must_use]
    pub fn host_copies_are_last(&self) -> bool {
        self.exclusive && self.store.is_none() && self.write.needs_backed_parent()
    }

    /// The part of it that concerns the tree.
    #[must_use]
    pub fn tree_config(&self) -> TreeConfig {
        TreeConfig {
            page_size: self.page_size,
            view: KeyView::Plain,
            rule: match self.write.needs_backed_parent() {
                true => BackupRule::BackedUpParent,
                false => BackupRule::Free,
            },
            policy: self.eviction_policy(),
            write_threshold: self.write.threshold(),
            // One more than the deciding use, which is to be known from those after it.
            hits_counted: self.store.filter(|s| s.uses_min > 1).map_or(0, |s| s.uses_min.saturating_add(1)),
            hashing: self.store.is_some(),
            components: Components {
                window_pages: self.window.map(|w| w.span_pages),
                state: self.state.is_some(),
            },
            ..TreeConfig::default()
        }
    }

    /// Checks every bound.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if self.page_size == 0 || self.page_size > PAGE_SIZE_MAX {
            return Err(ConfigError::PageSize { tokens: self.page_size });
        }
        let components = [
            self.window.map(|w| [("window device", w.device), ("window host", w.host)]),
            self.state.map(|s| [("state device", s.device), ("state host", s.host)]),
        ];
        let pools = components.into_iter().flatten().flatten();
        for (tier, capacity) in [("device", self.device), ("host", self.host)].into_iter().chain(pools) {
            if let Capacity::Pages(pages) = capacity
                && pages > POOL_PAGES_MAX
            {
                return Err(ConfigError::PoolTooLarge { tier, pages });
            }
        }
        if self.device == Capacity::Pages(0) {
            return Err(ConfigError::NoDevicePages);
        }
        // A request owns what it computes on and holds what it started from.
        if self.state.is_some_and(|s| matches!(s.device, Capacity::Pages(0..2)))
            || self.window.is_some_and(|w| matches!(w.device, Capacity::Pages(n) if n <= w.span_pages))
        {
            return Err(ConfigError::ComponentPages);
        }
        if self.host == Capacity::Pages(0) && (self.store.is_some() || self.write != WritePolicy::None) {
            return Err(ConfigError::NoHostPages);
        }
        if self.write == (WritePolicy::WriteThrough { threshold: 0 }) {
            return Err(ConfigError::ZeroThreshold);
        }
        let p = &self.prefetch;
        if p.batch_pages == 0 || p.window_batches == 0 || p.host_share_percent > 100 || p.attempts_max == 0 {
            return Err(ConfigError::Prefetch);
        }
        if let Some(s) = &self.store
            && (s.batch_pages == 0
                || s.pages_in_flight_max < s.batch_pages
                || s.attempts_max == 0
                || s.uses_min == 0)
        {
            return Err(ConfigError::Store);
        }
        if self.loads_in_flight_max == 0 || self.write_ahead_percent > 100 {
            return Err(ConfigError::Limits);
        }
        Ok(())
    }
}

/// Why a configuration is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// Page size 0 or above the limit.
    #[error("page size {tokens} is not between 1 and {PAGE_SIZE_MAX} tokens")]
    PageSize {
        /// What was asked for.
        tokens: u32,
    },
    /// More pages than ids.
    #[error("{pages} {tier} pages are more than a pool can number")]
    PoolTooLarge {
        /// Which pool.
        tier: &'static str,
        /// What was asked for.
        pages: u32,
    },
    /// A cache without device pages.
    #[error("a cache needs at least one device page")]
    NoDevicePages,
    /// A component pool that cannot hold what one request needs.
    #[error("a request needs two state slots, and a window and one page more, on the device")]
    ComponentPages,
    /// A write policy or a store without a host pool.
    #[error("a write policy other than none, and a store, need host pages")]
    NoHostPages,
    /// Write-through that backs up before the first insert.
    #[error("the write-through threshold counts inserts and starts at 1")]
    ZeroThreshold,
    /// Prefetch numbers out of range.
    #[error(
        "prefetch needs batches, a window and attempts of at least 1, and a host share of at most 100 percent"
    )]
    Prefetch,
    /// Store numbers out of range.
    #[error(
        "store backup needs batches of at least 1 page, room for one batch in flight, 1 attempt and 1 use"
    )]
    Store,
    /// The tree refuses its part.
    #[error(transparent)]
    Tree(#[from] TreeConfigError),
    /// Other numbers out of range.
    #[error("loads in flight must be at least 1, and the write-ahead share at most 100 percent")]
    Limits,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bound_is_refused_by_name() {
        let ok = CoreConfig {
            host: Capacity::Pages(8),
            store: Some(StoreConfig::default()),
            write: WritePolicy::WriteThrough { threshold: 1 },
            ..CoreConfig::device_only(16, Capacity::Pages(4))
        };
        assert_eq!(ok.validate(), Ok(()));
        let cases = [
            (CoreConfig { page_size: 0, ..ok }, ConfigError::PageSize { tokens: 0 }),
            (CoreConfig { page_size: 513, ..ok }, ConfigError::PageSize { tokens: 513 }),
            (CoreConfig { device: Capacity::Pages(0), ..ok }, ConfigError::NoDevicePages),
            (CoreConfig { host: Capacity::Pages(0), ..ok }, ConfigError::NoHostPages),
            (
                CoreConfig { host: Capacity::Pages(u32::MAX), ..ok },
                ConfigError::PoolTooLarge { tier: "host", pages: u32::MAX },
            ),
            (
                CoreConfig { write: WritePolicy::WriteThrough { threshold: 0 }, ..ok },
                ConfigError::ZeroThreshold,
            ),
            (
                CoreConfig { prefetch: PrefetchConfig { window_batches: 0, ..ok.prefetch }, ..ok },
                ConfigError::Prefetch,
            ),
            (
                CoreConfig { store: Some(StoreConfig { attempts_max: 0, ..StoreConfig::default() }), ..ok },
                ConfigError::Store,
            ),
            (CoreConfig { loads_in_flight_max: 0, ..ok }, ConfigError::Limits),
        ];
        for (config, error) in cases {
            assert_eq!(config.validate(), Err(error));
        }
    }
}
