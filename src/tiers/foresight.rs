//! What the scheduler knows of the future and no cache could guess: who will come back, and who will not.

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

    /// The request waits in a queue, behind all that were told before it, and will use the prefix of `tokens` when it is let in:
    /// what is cached of it, now or later, is evicted after all that nobody keeps, the end of the queue first under the
    /// order that learns. It ends with the first pages that the request is granted or publishes, or with the request; another
    /// call takes its place, at the end of the queue. Costs 8 bytes a page. O(tokens).
    ///
    /// # Errors
    /// Unknown request or namespace.
    pub fn expect_prefix(&mut self, id: RequestId, tokens: &[u32]) -> Result<(), CoreError> {
        self.record(|| Op::ExpectPrefix(id, tokens.to_vec()));
        let namespace = self.request_ref(id)?.namespace;
        self.let_in(id);
        let waiter = self.tree.wait_for(Key::new(namespace, tokens))?;
        self.request_mut(id)?.waiter = Some(waiter);
        Ok(())
    }

    /// The request no longer waits.
    pub(super) fn let_in(&mut self, id: RequestId) {
        let waiter = self.requests.get_mut(id.0).and_then(|request| request.waiter.take());
        if let Some(waiter) = waiter
            && self.tree.stop_waiting(waiter).is_err()
        {
            self.violation("a request waits that the tree does not know");
        }
    }

    /// The answer had so many tokens, where those that are published at the end do not say so: what was thought, or is said to
    /// nobody, is no part of the next prompt and not worth a page, but how long it was tells who comes back. Void under an order
    /// that does not learn. O(1).
    ///
    /// # Errors
    /// Unknown request.
    pub fn answered(&mut self, id: RequestId, tokens: u32) -> Result<(), CoreError> {
        self.record(|| Op::Answered(id, tokens));
        self.request_mut(id)?.answer_tokens = Some(tokens);
        Ok(())
    }

    /// A request has finished with so many tokens: what that says of who comes back.
    pub(super) fn foretell(&mut self, id: RequestId, tokens: usize) {
        let Some(request) = self.requests.get(id.0) else { return };
        let Some(node) = request.node.filter(|_| request.counted > 0) else { return };
        let said = (tokens as u32).saturating_sub(request.prompt_tokens);
        let answer = request.answer_tokens.unwrap_or(said);
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
