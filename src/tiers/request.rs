//! What a running request holds.

use smallvec::SmallVec;

use super::core::CoreError;
use super::outcome::PrefetchEnd;
use crate::base::slab::SlabKey;
use crate::base::{NamespaceId, NodeId, OpId, PageId, Time};
use crate::key::PageNames;
use crate::tree::{DeviceLock, HostPin, SessionId, WaiterId};

/// Name of a request inside a core.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RequestId(pub(super) SlabKey);

/// The restorable part of a match: host copies below the device part, kept by a pin until they are loaded or
/// the request goes.
#[derive(Debug)]
pub(super) struct HostPart {
    pub(super) pin: HostPin,
    pub(super) node: NodeId,
    pub(super) pages: u32,
}

/// State of one request. `pages[..shared]` belong to the tree and are kept by `lock`; `pages[shared..]` belong
/// to the request.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) namespace: NamespaceId,
    pub(super) pages: Vec<PageId>,
    pub(super) shared: u32,
    /// Pages whose nodes this request has counted a hit on.
    pub(super) counted: u32,
    pub(super) lock: Option<DeviceLock>,
    pub(super) host: Option<HostPart>,
    /// Deepest node of the match.
    pub(super) node: Option<NodeId>,
    /// Loads this request waits for.
    pub(super) loads: SmallVec<[OpId; 2]>,
    pub(super) load_failed: bool,
    /// When its match ends by itself.
    pub(super) holds_until: Option<Time>,
    /// It did; the request holds nothing.
    pub(super) match_ended: bool,
    /// Own window pages, those of the last pages of the table: one per own page, fewer where the request let some go,
    /// none without the component.
    pub(super) window: Vec<PageId>,
    /// Own state slot.
    pub(super) state: Option<PageId>,
    /// Names of the pages that its last prefetch looked for; kept so that publishing them does not hash them again.
    pub(super) names: Option<PageNames>,
    /// Tokens of its prompt, as far as it was told.
    pub(super) prompt_tokens: u32,
    /// Tokens of its answer, if it was told.
    pub(super) answer_tokens: Option<u32>,
    /// Session whose turn it is.
    pub(super) session: Option<SessionId>,
    /// Nobody will come back for what it publishes.
    pub(super) last_turn: bool,
    /// Its place in the queue, if the scheduler has told it and it has not been let in.
    pub(super) waiter: Option<WaiterId>,
    pub(super) prefetch: Option<OpId>,
    pub(super) prefetch_end: Option<PrefetchEnd>,
    /// Prefetches started.
    pub(super) prefetch_attempts: u32,
    /// No further prefetch before.
    pub(super) prefetch_not_before: Time,
    /// Tokens from the root that were on device or host when the last prefetch ended.
    pub(super) counted_on_tokens: u64,
    /// When the scheduler first had to wait for a prefetch of this request.
    pub(super) blocked_since: Option<Time>,
}

impl Request {
    pub(super) fn new(namespace: NamespaceId) -> Self {
        Request {
            namespace,
            pages: Vec::new(),
            shared: 0,
            counted: 0,
            lock: None,
            host: None,
            node: None,
            loads: SmallVec::new(),
            load_failed: false,
            holds_until: None,
            match_ended: false,
            window: Vec::new(),
            state: None,
            names: None,
            prompt_tokens: 0,
            answer_tokens: None,
            session: None,
            last_turn: false,
            waiter: None,
            prefetch: None,
            prefetch_end: None,
            prefetch_attempts: 0,
            prefetch_not_before: Time::ZERO,
            counted_on_tokens: 0,
            blocked_since: None,
        }
    }

    /// A request that lost what it rests on must match again.
    pub(super) fn check_usable(&self) -> Result<(), CoreError> {
        match (self.load_failed, self.match_ended) {
            (true, _) => Err(CoreError::LoadFailed),
            (_, true) => Err(CoreError::MatchEnded),
            _ => Ok(()),
        }
    }

    /// Pages that belong to the request itself.
    pub(super) fn own(&self) -> &[PageId] {
        &self.pages[self.shared as usize..]
    }

    /// Place of the first own window page.
    pub(super) fn own_window_from(&self) -> u32 {
        (self.pages.len() - self.window.len()) as u32
    }
}
