//! What the scheduler knows of the future and no cache could guess: who will come back, and who will not.

use super::config::Eviction;
use super::core::{Core, CoreError};
use super::oplog::Op;
use super::request::RequestId;
use crate::key::Key;
use crate::tree::SessionId;
use crate::tree::adaptive::Hint;

impl Core {
    /// Opens a session: what its requests publish is evicted after all that no session keeps, until it is closed. A tool call
    /// under way, a conversation whose user is typing. Sessions that are never closed crowd out only one another, least
    /// recently used first. O(1).
    pub fn open_session(&mut self) -> SessionId {
        self.record(|| Op::OpenSession);
        self.tree.open_session()
    }

    /// Ends a session. What only it kept goes by its last use from here on. O(nodes kept).
    ///
    /// # Errors
    /// Unknown session, closed ones included.
    pub fn close_session(&mut self, session: SessionId) -> Result<(), CoreError> {
        self.record(|| Op::CloseSession(session));
        Ok(self.tree.close_session(session)?)
    }

    /// The request is a turn of this session: whatever it publishes from now on, the session will come back for. O(1).
    ///
    /// # Errors
    /// Unknown request. A session that is closed before the request keeps nothing.
    pub fn set_session(&mut self, id: RequestId, session: SessionId) -> Result<(), CoreError> {
        self.record(|| Op::SetSession(id, session));
        self.request_mut(id)?.session = Some(session);
        Ok(())
    }

    /// Nobody will come back for what the request publishes: once it has finished, that goes first. Void when it is used
    /// again, and under an order that does not learn. O(1).
    ///
    /// # Errors
    /// Unknown request.
    pub fn will_not_return(&mut self, id: RequestId) -> Result<(), CoreError> {
        self.record(|| Op::WillNotReturn(id));
        self.request_mut(id)?.last_turn = true;
        Ok(())
    }

    /// The request waits in a queue and will use the prefix of `tokens` when it is let in: what is cached of it is kept longest,
    /// for as long as a capacity's worth of others takes to pass. Void under an order that does not learn. O(tokens).
    ///
    /// # Errors
    /// Unknown request.
    pub fn expect_prefix(&mut self, id: RequestId, tokens: &[u32]) -> Result<(), CoreError> {
        self.record(|| Op::ExpectPrefix(id, tokens.to_vec()));
        let namespace = self.request_ref(id)?.namespace;
        if self.config.eviction == Eviction::Adaptive {
            let found = self.tree.peek(Key::new(namespace, tokens));
            // Nothing is cached at all: the root takes no hint.
            let _ = self.tree.hint(found.node, Hint::Expected);
        }
        Ok(())
    }

    /// A request has finished with so many tokens: what that says of who comes back.
    pub(super) fn foretell(&mut self, id: RequestId, tokens: usize) {
        let Some(request) = self.requests.get(id.0) else { return };
        let Some(node) = request.node.filter(|_| request.counted > 0) else { return };
        let answer = (tokens as u32).saturating_sub(request.prompt_tokens);
        let last_turn = request.last_turn;
        let mut told = self.tree.hint(node, Hint::Answered(answer));
        if last_turn {
            told = told.and(self.tree.hint(node, Hint::Finished));
        }
        if told.is_err() {
            self.violation("the end of a request that holds it is unknown");
        }
    }
}
