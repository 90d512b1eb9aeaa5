//! Registering the host memory of all planes with a store: all of it or none, on all ranks or on none. Pure.
//!
//! ```text
//!             all planes of all ranks        +-> Committed --detach--+
//! Allocated --> Registering --votes agreed --+-> FallbackHost -------+--> Allocated
//!     ^             |                        +-> Failed  (pools destroyed)
//!     +-------------+ a failure anywhere: what was registered is unregistered in reverse order
//! ```
//! The machine says what to do next ([`Registration::next`]) and is told how it went; it does nothing itself. So
//! that a buffer can be refused at any point and every end be looked at, see the table in `docs/INVARIANTS.md`.
//!
//! - **Allocated.** The pools are local values. The pre-check compares the memory with what the store needs and asks
//!   whether it can keep that kind of plane at all; nothing outside is called before all of it holds.
//! - **Registering.** Buffers go to the store one by one, and into a journal. Nothing is visible.
//! - **Vote.** Every rank votes, also one that failed. A rank whose vote is not heard counts as a no.
//! - **Publish.** One step hands out the tokens of everything that was agreed.
//!
//! Planes of the draft model are the only ones the others can live without. [`RegistrationPolicy`] says whether
//! they are let go.

use smallvec::SmallVec;

use crate::pool::{PlaneId, PlaneKind, PoolKind};

/// What to do when the store can not take the planes of the draft model.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum RegistrationPolicy {
    /// Nothing is registered and the start fails. Default: whoever asked for a store counts on its hits.
    #[default]
    FailClosed,
    /// The draft keeps its host tier and has no store tier. Reported, never silent.
    AllowDraftStoreFallback,
}

/// Where the memory of a pool comes from, or has to come from.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MemoryDomain {
    /// This process only.
    Private,
    /// A descriptor that other processes map.
    Shared,
    /// Allocated by the store.
    Backend,
}

/// One plane to register.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlaneRequest {
    /// The plane.
    pub plane: PlaneId,
    /// What its bytes are.
    pub kind: PlaneKind,
    /// The pool whose pages it follows.
    pub pool: PoolKind,
    /// Where its memory comes from.
    pub domain: MemoryDomain,
    /// Bytes of each of its buffers, in the order in which they are registered.
    pub buffers: SmallVec<[u64; 1]>,
    /// Whether the store can keep this kind of plane.
    pub supported: bool,
}

impl PlaneRequest {
    /// Whether the other planes can live without it.
    #[must_use]
    pub fn is_draft(&self) -> bool {
        self.kind.is_draft()
    }
}

/// Why a plane can not be registered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// The memory is not of the kind that the store can address. Allocate the arena for this store.
    #[error("the memory is {has:?}, the store addresses only {need:?} memory")]
    Domain {
        /// What the pool has.
        has: MemoryDomain,
        /// What the store needs.
        need: MemoryDomain,
    },
    /// The store can not keep this kind of plane.
    #[error("the store does not keep planes of this kind")]
    Unsupported,
    /// The store refused a buffer; its code.
    #[error("the store refused the buffer with code {code}")]
    Refused {
        /// Code of the backend, 0 if it has none.
        code: i32,
    },
    /// Another rank could not register it.
    #[error("another rank could not register it")]
    OtherRank,
    /// The ranks could not be heard.
    #[error("the ranks did not agree in time")]
    NotAgreed,
}

/// How far a registration had come.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Stage {
    /// Comparing needs and memory.
    PreCheck,
    /// Registering buffers.
    Register,
    /// Waiting for the other ranks.
    Agree,
}

/// Where a registration stands.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RegistrationState {
    /// The pools exist and nobody knows.
    Allocated,
    /// Buffers are being registered, voted on or taken back.
    Registering,
    /// All planes are published.
    Committed,
    /// All planes but the draft's are published; the draft has its host tier only.
    FallbackHost,
    /// Nothing is registered and the pools are destroyed.
    Failed,
}

/// The first failure, and the ones met while undoing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RegistrationFailure {
    /// The plane that failed first on this rank, if it was a plane.
    pub plane: Option<PlaneId>,
    /// How far it had come.
    pub stage: Stage,
    /// Why.
    pub cause: Cause,
    /// Codes of buffers that could not be unregistered, in the order tried. They never hide the first cause.
    pub undo_codes: Vec<i32>,
}

/// What a rank has to say about its own planes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Vote {
    /// All planes but the draft's are registered.
    pub required: bool,
    /// All planes of the draft are registered.
    pub draft: bool,
}

impl Vote {
    /// What two ranks can do together.
    #[must_use]
    pub fn and(self, other: Vote) -> Vote {
        Vote { required: self.required && other.required, draft: self.draft && other.draft }
    }
}

/// What to do next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Register a buffer; answer with [`Registration::registered`].
    Register {
        /// Position of the plane in the requests.
        index: usize,
        /// Its buffer.
        buffer: usize,
    },
    /// Tell the other ranks and hear them; answer with [`Registration::agreed`].
    Vote(Vote),
    /// Unregister a buffer; answer with [`Registration::unregistered`].
    Unregister {
        /// Position of the plane in the requests.
        index: usize,
        /// Its buffer.
        buffer: usize,
    },
    /// Give up the pools of all planes, once; answer with [`Registration::destroyed`].
    Destroy,
    /// Make all registered planes visible in one step; answer with [`Registration::published`].
    Publish,
    /// Make all planes invisible in one step; answer with [`Registration::withdrawn`].
    Withdraw,
    /// Nothing: [`Registration::state`] is final until [`Registration::attach`] or [`Registration::detach`].
    Done,
}

/// What the machine is in the middle of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Registering {
        index: usize,
        buffer: usize,
    },
    Voting,
    /// Taking back the journal down to this length, then going where `after` says.
    Undoing {
        keep: usize,
        after: After,
    },
    Destroying,
    Publishing,
    Withdrawing,
    Resting,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum After {
    Publish,
    Destroy,
    Rest,
}

/// One transition, for the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transition {
    /// State before.
    pub from: RegistrationState,
    /// State after.
    pub to: RegistrationState,
}

/// The registration of one rank. See the [module](self).
#[derive(Debug)]
pub struct Registration {
    /// Required planes first, then the draft's: undoing the draft is undoing the end of the journal.
    requests: Vec<PlaneRequest>,
    need: MemoryDomain,
    policy: RegistrationPolicy,
    state: RegistrationState,
    phase: Phase,
    /// Buffers registered, in order.
    journal: Vec<(usize, usize)>,
    failure: Option<RegistrationFailure>,
    transitions: Vec<Transition>,
}

impl Registration {
    /// A registration of these planes with a store that addresses memory of `need`. Nothing has happened yet.
    #[must_use]
    pub fn new(
        mut requests: Vec<PlaneRequest>,
        need: Option<MemoryDomain>,
        policy: RegistrationPolicy,
    ) -> Registration {
        requests.sort_by_key(PlaneRequest::is_draft);
        Registration {
            requests,
            need: need.unwrap_or(MemoryDomain::Private),
            policy,
            state: RegistrationState::Allocated,
            phase: Phase::Resting,
            journal: Vec::new(),
            failure: None,
            transitions: Vec::new(),
        }
    }

    /// The planes, in the order that [`Step`] counts them.
    #[must_use]
    pub fn requests(&self) -> &[PlaneRequest] {
        &self.requests
    }

    /// Where it stands.
    #[must_use]
    pub fn state(&self) -> RegistrationState {
        self.state
    }

    /// The first failure since the last [`Registration::attach`], if there was one.
    #[must_use]
    pub fn failure(&self) -> Option<&RegistrationFailure> {
        self.failure.as_ref()
    }

    /// Whether a draft plane was asked for and the store does not have it: what the gauge shows.
    #[must_use]
    pub fn draft_store_disabled(&self) -> bool {
        self.state == RegistrationState::FallbackHost
    }

    /// Positions of the planes that are visible.
    pub fn published_planes(&self) -> impl Iterator<Item = usize> + '_ {
        let visible = matches!(self.state, RegistrationState::Committed | RegistrationState::FallbackHost);
        let fallback = self.state == RegistrationState::FallbackHost;
        self.requests
            .iter()
            .enumerate()
            .filter(move |(_, p)| visible && !(fallback && p.is_draft()))
            .map(|(i, _)| i)
    }

    /// Transitions since the last call, for the log.
    pub fn take_transitions(&mut self) -> Vec<Transition> {
        std::mem::take(&mut self.transitions)
    }

    /// Begins, or begins again after a detach. Does nothing in another state.
    pub fn attach(&mut self) {
        if self.state != RegistrationState::Allocated {
            return;
        }
        self.failure = None;
        self.enter(RegistrationState::Registering);
        self.phase = Phase::Registering { index: 0, buffer: 0 };
        for at in 0..self.requests.len() {
            if let Some(cause) = self.pre_check(at) {
                self.fail(Some(at), Stage::PreCheck, cause);
                // A draft that can be let go does not keep the others from registering.
                self.phase = match self.draft_can_go(at) {
                    true => self.phase,
                    false => Phase::Voting,
                };
                break;
            }
        }
        self.skip_what_can_not_be();
    }

    /// Takes a published registration back. Does nothing in another state.
    pub fn detach(&mut self) {
        if matches!(self.state, RegistrationState::Committed | RegistrationState::FallbackHost) {
            self.enter(RegistrationState::Registering);
            self.phase = Phase::Withdrawing;
        }
    }

    /// What to do next. Asking again gives the same step until it is answered.
    #[must_use]
    pub fn next(&self) -> Step {
        match self.phase {
            Phase::Registering { index, buffer } => Step::Register { index, buffer },
            Phase::Voting => Step::Vote(self.own_vote()),
            Phase::Undoing { .. } => match self.journal.last() {
                Some(&(index, buffer)) => Step::Unregister { index, buffer },
                None => Step::Done,
            },
            Phase::Destroying => Step::Destroy,
            Phase::Publishing => Step::Publish,
            Phase::Withdrawing => Step::Withdraw,
            Phase::Resting => Step::Done,
        }
    }

    /// How [`Step::Register`] went.
    pub fn registered(&mut self, result: Result<(), Cause>) {
        let Phase::Registering { index, buffer } = self.phase else { return };
        match result {
            Ok(()) => {
                self.journal.push((index, buffer));
                self.phase = Phase::Registering { index, buffer: buffer + 1 };
            }
            Err(cause) => {
                self.fail(Some(index), Stage::Register, cause);
                self.phase = Phase::Voting;
            }
        }
        self.skip_what_can_not_be();
    }

    /// How [`Step::Vote`] went: what all ranks said together, or nothing if some were not heard.
    pub fn agreed(&mut self, all: Option<Vote>) {
        if self.phase != Phase::Voting {
            return;
        }
        let own = self.own_vote();
        let verdict = all.unwrap_or(Vote { required: false, draft: false }).and(own);
        if verdict != own {
            let cause = if all.is_none() { Cause::NotAgreed } else { Cause::OtherRank };
            self.fail(None, Stage::Agree, cause);
        }
        let fallback = self.policy == RegistrationPolicy::AllowDraftStoreFallback;
        let (keep, after) = match verdict {
            Vote { required: true, draft: true } => (self.journal.len(), After::Publish),
            Vote { required: true, draft: false } if fallback && all.is_some() => {
                let of_draft = |&&(index, _): &&(usize, usize)| self.requests[index].is_draft();
                (self.journal.iter().take_while(|entry| !of_draft(entry)).count(), After::Publish)
            }
            _ => (0, After::Destroy),
        };
        self.undo(keep, after);
    }

    /// How [`Step::Unregister`] went. A failure is kept, and the next buffer is tried.
    pub fn unregistered(&mut self, result: Result<(), i32>) {
        let Phase::Undoing { keep, after } = self.phase else { return };
        if let (Err(code), Some(failure)) = (result, &mut self.failure) {
            failure.undo_codes.push(code);
        }
        self.journal.pop();
        self.undo(keep, after);
    }

    /// The pools are gone.
    pub fn destroyed(&mut self) {
        if self.phase == Phase::Destroying {
            self.phase = Phase::Resting;
            self.enter(RegistrationState::Failed);
        }
    }

    /// All planes in the journal are visible.
    pub fn published(&mut self) {
        if self.phase == Phase::Publishing {
            self.phase = Phase::Resting;
            let all = self.own_vote().draft;
            self.enter(if all { RegistrationState::Committed } else { RegistrationState::FallbackHost });
        }
    }

    /// No plane is visible any more.
    pub fn withdrawn(&mut self) {
        if self.phase == Phase::Withdrawing {
            self.undo(0, After::Rest);
        }
    }

    fn pre_check(&self, at: usize) -> Option<Cause> {
        let plane = &self.requests[at];
        let fits = match self.need {
            MemoryDomain::Private => true,
            need => plane.domain == need,
        };
        match (fits, plane.supported) {
            (false, _) => Some(Cause::Domain { has: plane.domain, need: self.need }),
            (true, false) => Some(Cause::Unsupported),
            (true, true) => None,
        }
    }

    fn draft_can_go(&self, at: usize) -> bool {
        self.policy == RegistrationPolicy::AllowDraftStoreFallback && self.requests[at].is_draft()
    }

    /// From a position past the last buffer of a plane to the next buffer there is. A draft that failed is not
    /// tried; what comes behind the last plane is the vote.
    fn skip_what_can_not_be(&mut self) {
        while let Phase::Registering { index, buffer } = self.phase {
            self.phase = match self.requests.get(index) {
                None => Phase::Voting,
                Some(p) if p.is_draft() && self.failure.is_some() => Phase::Voting,
                Some(p) if buffer < p.buffers.len() => return,
                Some(_) => Phase::Registering { index: index + 1, buffer: 0 },
            };
        }
    }

    fn own_vote(&self) -> Vote {
        let complete = |draft: bool| {
            self.requests.iter().enumerate().filter(|(_, p)| p.is_draft() == draft).all(|(i, p)| {
                self.journal.iter().filter(|&&(index, _)| index == i).count() == p.buffers.len()
            })
        };
        let failed_draft = self
            .failure
            .as_ref()
            .is_some_and(|f| self.requests.iter().any(|p| Some(p.plane) == f.plane && p.is_draft()));
        Vote { required: complete(false), draft: complete(true) && !failed_draft }
    }

    fn fail(&mut self, at: Option<usize>, stage: Stage, cause: Cause) {
        let plane = at.map(|at| self.requests[at].plane);
        self.failure.get_or_insert(RegistrationFailure { plane, stage, cause, undo_codes: Vec::new() });
    }

    fn undo(&mut self, keep: usize, after: After) {
        self.phase = match (self.journal.len() > keep, after) {
            (true, _) => Phase::Undoing { keep, after },
            (false, After::Publish) => Phase::Publishing,
            (false, After::Destroy) => Phase::Destroying,
            (false, After::Rest) => Phase::Resting,
        };
        if self.phase == Phase::Resting {
            self.enter(RegistrationState::Allocated);
        }
    }

    fn enter(&mut self, to: RegistrationState) {
        self.transitions.push(Transition { from: self.state, to });
        self.state = to;
    }
}

#[cfg(test)]
mod tests;
