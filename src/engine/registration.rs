//! Carries out a [`Registration`]: calls the store, hears the ranks, keeps the tokens.

use smallvec::smallvec;

use super::draft::DraftPlan;
use super::lane::StoredPlane;
use crate::backend::host::HostArena;
use crate::backend::identity::{DescriptorDigest, DescriptorError};
use crate::backend::region::Sharing;
use crate::backend::store::envelope::HEADER_BYTES;
use crate::backend::store::{ArenaNeed, RegionToken, RegisterError, Store};
use crate::pool::{Geometry, PlaneId, PlaneKind, PoolKind};
use crate::tiers::registration::{Cause, MemoryDomain, PlaneRequest, RegistrationFailure, Step, Vote};
use crate::tiers::{Registration, RegistrationPolicy, RegistrationState};

/// The ranks that register together. Called once per registration, on every rank, also on one that failed.
pub trait RankVotes: Send {
    /// Tells the other ranks this rank's vote and hears theirs: all of them together, or `None` if some were not
    /// heard. May block for as long as the start may take.
    fn exchange(&mut self, vote: Vote) -> Option<Vote>;
}

/// A rank without others.
#[derive(Clone, Copy, Debug, Default)]
pub struct AloneVotes;

impl RankVotes for AloneVotes {
    fn exchange(&mut self, vote: Vote) -> Option<Vote> {
        Some(vote)
    }
}

/// Why no plane is registered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistrationError {
    /// The transaction failed and was undone.
    #[error(
        "store {store} ({domain:?} memory, needs {need:?}): {} failed at {:?}: {}",
        plane.map_or("registration".to_owned(), |(k, p)| format!("plane {k} of {p:?}")), failure.stage, failure.cause
    )]
    Failed {
        /// Name of the store.
        store: &'static str,
        /// Kind and pool of the plane that failed first, if it was one of this rank.
        plane: Option<(PlaneKind, PoolKind)>,
        /// Where the pools' memory comes from.
        domain: MemoryDomain,
        /// What the store addresses.
        need: ArenaNeed,
        /// What happened, with the failures while undoing.
        failure: RegistrationFailure,
    },
    /// The identity can not be written down.
    #[error("identity: {0}")]
    Identity(#[from] DescriptorError),
    /// No worker thread could be started; what was registered was given back.
    #[error("cannot start a worker thread: {0}")]
    Thread(std::io::Error),
}

/// A registration and the tokens of its buffers.
#[derive(Debug)]
pub(super) struct Registered {
    machine: Registration,
    /// By position of the plane in the machine's requests; one buffer each.
    tokens: Vec<Option<RegionToken>>,
    descriptors: Vec<DescriptorDigest>,
    may_miss: Vec<bool>,
}

impl Registered {
    /// Registers the memory of every plane that has any, on all ranks or on none.
    pub(super) fn attach(
        (geometry, arena): (&Geometry, &HostArena),
        store: &dyn Store,
        name: impl Fn(PlaneId) -> Result<DescriptorDigest, DescriptorError>,
        draft: DraftPlan,
        policy: RegistrationPolicy,
        votes: &mut dyn RankVotes,
    ) -> Result<Registered, RegistrationError> {
        let caps = store.caps();
        let domain = domain_of(arena);
        let requests = arena
            .regions()
            .filter_map(|(plane, region)| {
                let shape = geometry.plane(plane).filter(|_| !region.is_empty())?;
                let object_bytes = shape.page_bytes().saturating_add(HEADER_BYTES as u64);
                Some(PlaneRequest {
                    plane,
                    kind: shape.kind(),
                    pool: shape.pool(),
                    domain,
                    buffers: smallvec![region.len() as u64],
                    supported: object_bytes <= caps.object_bytes_max as u64,
                })
            })
            .collect();
        let need = match caps.arena {
            ArenaNeed::AnyMemory => None,
            ArenaNeed::SharedFd => Some(MemoryDomain::Shared),
            ArenaNeed::BackendAllocated => Some(MemoryDomain::Backend),
        };
        let mut machine = Registration::new(requests, need, policy);
        let descriptors = machine.requests().iter().map(|r| name(r.plane)).collect::<Result<Vec<_>, _>>()?;
        let may_miss = machine.requests().iter().map(|r| draft.may_miss(r.kind)).collect();
        let tokens = vec![None; descriptors.len()];
        machine.attach();
        let mut this = Registered { machine, tokens, descriptors, may_miss };
        this.run(arena, store, votes);
        if let Some(failure) = this.machine.failure()
            && this.machine.state() == RegistrationState::Failed
        {
            let failed = this.machine.requests().iter().find(|r| Some(r.plane) == failure.plane);
            return Err(RegistrationError::Failed {
                store: caps.name,
                plane: failed.map(|r| (r.kind, r.pool)),
                domain,
                need: caps.arena,
                failure: failure.clone(),
            });
        }
        Ok(this)
    }

    /// Unregisters everything, last first. Codes of what the store refused to let go.
    pub(super) fn detach(mut self, arena: &HostArena, store: &dyn Store) {
        self.machine.detach();
        self.run(arena, store, &mut AloneVotes);
    }

    /// The planes that were agreed on.
    pub(super) fn planes(&self) -> Vec<StoredPlane> {
        let requests = self.machine.requests();
        let mut of_full = self.machine.published_planes().filter(|&i| requests[i].pool == PoolKind::Full);
        // Something has to say whether a prefix is there.
        let only_draft = of_full.all(|i| self.may_miss[i]);
        self.machine
            .published_planes()
            .filter_map(|i| {
                let PlaneRequest { plane, kind, pool, .. } = requests[i];
                Some(StoredPlane {
                    plane,
                    kind,
                    pool,
                    descriptor: self.descriptors[i],
                    region: self.tokens[i]?,
                    required: !self.may_miss[i] || (only_draft && pool == PoolKind::Full),
                })
            })
            .collect()
    }

    pub(super) fn state(&self) -> RegistrationState {
        self.machine.state()
    }

    pub(super) fn failure(&self) -> Option<&RegistrationFailure> {
        self.machine.failure()
    }

    /// Planes that were asked for and are not stored.
    pub(super) fn absent_planes(&self) -> Vec<PlaneId> {
        self.absent().map(|r| r.plane).collect()
    }

    /// Their kinds and pools.
    pub(super) fn not_stored(&self) -> Vec<(PlaneKind, PoolKind)> {
        self.absent().map(|r| (r.kind, r.pool)).collect()
    }

    fn absent(&self) -> impl Iterator<Item = &PlaneRequest> {
        let published: Vec<usize> = self.machine.published_planes().collect();
        let requests = self.machine.requests().iter().enumerate();
        requests.filter(move |(i, _)| !published.contains(i)).map(|(_, r)| r)
    }

    /// Follows the machine to its end. Every answer moves it on, so it ends.
    fn run(&mut self, arena: &HostArena, store: &dyn Store, votes: &mut dyn RankVotes) {
        loop {
            match self.machine.next() {
                Step::Register { index, .. } => {
                    let plane = self.machine.requests()[index].plane;
                    let region = arena.regions().find(|(id, _)| *id == plane);
                    let result = match region.map(|(_, region)| store.register(region)) {
                        Some(Ok(token)) => {
                            self.tokens[index] = Some(token);
                            Ok(())
                        }
                        Some(Err(error)) => Err(cause_of(&error)),
                        None => Err(Cause::Unsupported),
                    };
                    self.machine.registered(result);
                }
                Step::Vote(vote) => {
                    let all = votes.exchange(vote);
                    self.machine.agreed(all);
                }
                Step::Unregister { index, .. } => {
                    let result = match self.tokens[index].take() {
                        Some(token) => store.unregister(token).map_err(|e| code_of(&e)),
                        None => Ok(()),
                    };
                    self.machine.unregistered(result);
                }
                // The arena is the caller's; it goes when the caller hears of the failure.
                Step::Destroy => self.machine.destroyed(),
                Step::Publish => self.machine.published(),
                Step::Withdraw => self.machine.withdrawn(),
                Step::Done => break,
            }
            self.log(arena, store);
        }
        self.log(arena, store);
    }

    fn log(&mut self, arena: &HostArena, store: &dyn Store) {
        for change in self.machine.take_transitions() {
            let requests = self.machine.requests();
            let planes: Vec<String> =
                requests.iter().map(|r| format!("{} of {:?}", r.kind, r.pool)).collect();
            let bytes: u64 = requests.iter().flat_map(|r| &r.buffers).sum();
            let buffers: usize = requests.iter().map(|r| r.buffers.len()).sum();
            let (from, to) = (change.from, change.to);
            let (memory, name) = (domain_of(arena), store.caps().name);
            let planes = planes.join(", ");
            match self.machine.failure() {
                Some(RegistrationFailure { stage, cause, .. }) => tracing::warn!(
                    ?from, ?to, planes, ?memory, store = name, buffers, bytes, ?stage, %cause,
                    "sapwood: store registration"
                ),
                None => tracing::info!(
                    ?from,
                    ?to,
                    planes,
                    ?memory,
                    store = name,
                    buffers,
                    bytes,
                    "sapwood: store registration"
                ),
            }
        }
    }
}

fn domain_of(arena: &HostArena) -> MemoryDomain {
    match arena.mapping().sharing {
        Sharing::Private => MemoryDomain::Private,
        Sharing::Shared | Sharing::SharedReadOnly => MemoryDomain::Shared,
    }
}

fn code_of(error: &RegisterError) -> i32 {
    match error {
        RegisterError::Refused { code } => *code,
        _ => 0,
    }
}

fn cause_of(error: &RegisterError) -> Cause {
    match error {
        RegisterError::WrongArena => Cause::Domain { has: MemoryDomain::Private, need: MemoryDomain::Shared },
        other => Cause::Refused { code: code_of(other) },
    }
}
