//! The guard of a running request.

use crossbeam_channel::Sender;

use crate::tiers::RequestId;

/// A request of a [`PrefixCache`](super::PrefixCache): pages, lock, pins and prefetch are released when it is
/// finished or dropped. Dropping never blocks and needs no cache: the next call of the cache takes in what was
/// dropped and holds the pages back until the computation launched by then has ended.
#[derive(Debug)]
#[must_use = "dropping a request aborts it"]
pub struct Request {
    id: RequestId,
    dropped: Option<Sender<RequestId>>,
}

impl Request {
    pub(super) fn new(id: RequestId, dropped: Sender<RequestId>) -> Self {
        Request { id, dropped: Some(dropped) }
    }

    /// Its name, for logs.
    #[must_use]
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Ends the guard without an abort.
    pub(super) fn disarm(mut self) -> RequestId {
        self.dropped = None;
        self.id
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if let Some(dropped) = self.dropped.take() {
            // An error means that the cache is gone, and the pages with it.
            let _ = dropped.send(self.id);
        }
    }
}
