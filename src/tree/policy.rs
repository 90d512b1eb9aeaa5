//! Order of eviction.

/// Which victim goes first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Policy {
    /// Least recently used.
    #[default]
    Lru,
}
