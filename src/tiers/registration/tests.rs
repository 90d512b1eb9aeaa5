use std::collections::BTreeSet;

use smallvec::smallvec;

use super::*;

/// What goes wrong, on one rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    Nothing,
    /// The plane at this position has private memory, the store needs shared memory.
    Domain(usize),
    /// The store does not keep the plane at this position.
    Unsupported(usize),
    /// The store refuses this buffer, counted over all planes.
    Buffer(usize),
    /// The votes of the ranks are not heard.
    Votes,
}

/// A store and a pool as one rank sees them.
#[derive(Debug, Default)]
struct Rank {
    registered: Vec<(usize, usize)>,
    order: Vec<(usize, usize)>,
    undone: Vec<(usize, usize)>,
    calls: usize,
    visible: BTreeSet<usize>,
    destroyed: u32,
    /// Every unregister answers with this code.
    undo_code: Option<i32>,
}

impl Rank {
    /// Follows the machine up to its vote, or to its end.
    fn run(&mut self, machine: &mut Registration, fault: Fault) -> Option<Vote> {
        for _ in 0..1000 {
            match machine.next() {
                Step::Register { index, buffer } => {
                    self.calls += 1;
                    if fault == Fault::Buffer(self.calls - 1) {
                        machine.registered(Err(Cause::Refused { code: -1 }));
                    } else {
                        assert!(!self.registered.contains(&(index, buffer)), "registered twice");
                        assert!(self.destroyed == 0, "registers a pool that is gone");
                        self.registered.push((index, buffer));
                        self.order.push((index, buffer));
                        machine.registered(Ok(()));
                    }
                }
                Step::Vote(vote) => return Some(vote),
                Step::Unregister { index, buffer } => {
                    assert!(self.visible.is_empty(), "unregisters what is visible");
                    assert_eq!(self.registered.pop(), Some((index, buffer)), "not in reverse order");
                    self.undone.push((index, buffer));
                    machine.unregistered(self.undo_code.map_or(Ok(()), Err));
                }
                Step::Destroy => {
                    assert!(self.registered.is_empty(), "destroys a pool that is registered");
                    self.destroyed += 1;
                    machine.destroyed();
                }
                Step::Publish => {
                    machine.published();
                    self.visible = machine.published_planes().collect();
                }
                Step::Withdraw => {
                    self.visible.clear();
                    machine.withdrawn();
                }
                Step::Done => return None,
            }
        }
        panic!("does not end: {machine:?}");
    }
}

fn plane(n: u8, kind: PlaneKind, buffers: usize) -> PlaneRequest {
    PlaneRequest {
        plane: PlaneId(n),
        kind,
        pool: PoolKind::Full,
        domain: MemoryDomain::Shared,
        buffers: smallvec![4096; buffers],
        supported: true,
    }
}

fn beside(n: u8, kind: PlaneKind, pool: PoolKind, buffers: usize) -> PlaneRequest {
    PlaneRequest { pool, ..plane(n, kind, buffers) }
}

/// Plans of planes, with the draft in different places.
fn plans() -> Vec<Vec<PlaneRequest>> {
    use PlaneKind::{Draft, DraftIndex, Index, Latent, Scale, State, Target};
    use PoolKind::{State as Slots, Window};
    vec![
        vec![plane(0, Target, 1)],
        vec![plane(0, Target, 1), plane(1, Draft, 1)],
        vec![plane(0, Draft, 3), plane(1, Target, 2)],
        vec![
            plane(0, Latent, 1),
            plane(1, Draft, 2),
            plane(2, Index, 1),
            plane(3, DraftIndex, 1),
            plane(4, Scale, 1),
            beside(5, State, Slots, 2),
        ],
        // Planes of every pool, each with its draft's.
        vec![
            beside(0, Draft, Window, 1),
            plane(1, Target, 1),
            beside(2, Target, Window, 1),
            beside(3, DraftIndex, Window, 1),
            beside(4, State, Slots, 1),
            beside(5, Draft, Slots, 1),
            plane(6, Draft, 1),
        ],
        // Windows are the draft's alone.
        vec![plane(0, Target, 1), beside(1, Draft, Window, 2), beside(2, DraftIndex, Window, 1)],
    ]
}

/// The table of `docs/INVARIANTS.md`: the same end on every rank.
fn expected(draft_failed: Option<bool>, votes_lost: bool, policy: RegistrationPolicy) -> RegistrationState {
    match (votes_lost, draft_failed, policy) {
        (true, _, _) => RegistrationState::Failed,
        (false, None, _) => RegistrationState::Committed,
        (false, Some(true), RegistrationPolicy::AllowDraftStoreFallback) => RegistrationState::FallbackHost,
        (false, Some(_), _) => RegistrationState::Failed,
    }
}

struct World {
    machines: Vec<Registration>,
    ranks: Vec<Rank>,
}

impl World {
    fn new(
        plan: &[PlaneRequest],
        ranks: usize,
        at: usize,
        fault: Fault,
        policy: RegistrationPolicy,
    ) -> World {
        let machines = (0..ranks)
            .map(|rank| {
                // Positions count the planes as the machine orders them.
                let mut plan = plan.to_vec();
                plan.sort_by_key(PlaneRequest::is_draft);
                match fault {
                    Fault::Domain(i) if rank == at => plan[i].domain = MemoryDomain::Private,
                    Fault::Unsupported(i) if rank == at => plan[i].supported = false,
                    _ => {}
                }
                Registration::new(plan, Some(MemoryDomain::Shared), policy)
            })
            .collect();
        World { machines, ranks: (0..ranks).map(|_| Rank::default()).collect() }
    }

    fn attach(&mut self, at: usize, fault: Fault) {
        self.machines.iter_mut().for_each(Registration::attach);
        let of = |rank| if rank == at { fault } else { Fault::Nothing };
        let votes: Vec<Vote> = (0..self.ranks.len())
            .map(|r| self.ranks[r].run(&mut self.machines[r], of(r)).expect("every rank votes"))
            .collect();
        let all = votes.iter().copied().reduce(Vote::and);
        for r in 0..self.ranks.len() {
            assert!(self.ranks[r].visible.is_empty(), "visible before the vote");
            self.machines[r].agreed(all.filter(|_| fault != Fault::Votes));
            assert_eq!(self.ranks[r].run(&mut self.machines[r], Fault::Nothing), None);
        }
    }
}

fn every_fault(plan: &[PlaneRequest]) -> Vec<Fault> {
    let buffers: usize = plan.iter().map(|p| p.buffers.len()).sum();
    let mut faults = vec![Fault::Nothing, Fault::Votes];
    faults.extend((0..plan.len()).flat_map(|i| [Fault::Domain(i), Fault::Unsupported(i)]));
    faults.extend((0..buffers).map(Fault::Buffer));
    faults
}

/// Whether the fault hits a draft plane; `None` if it hits none.
fn hits_draft(plan: &[PlaneRequest], fault: Fault) -> Option<bool> {
    let mut sorted = plan.to_vec();
    sorted.sort_by_key(PlaneRequest::is_draft);
    match fault {
        Fault::Nothing | Fault::Votes => None,
        Fault::Domain(i) | Fault::Unsupported(i) => Some(sorted[i].is_draft()),
        Fault::Buffer(k) => {
            let owners = sorted.iter().flat_map(|p| std::iter::repeat_n(p.is_draft(), p.buffers.len()));
            owners.into_iter().nth(k)
        }
    }
}

/// Every step that can fail, on every plane, under both policies, on every rank of groups of one to three, with
/// and without failures while undoing.
#[test]
fn the_end_is_the_one_of_the_table() {
    let mut cases = 0;
    let policies = [RegistrationPolicy::FailClosed, RegistrationPolicy::AllowDraftStoreFallback];
    for (plan, policy) in plans().iter().flat_map(|plan| policies.map(|p| (plan, p))) {
        for (fault, ranks) in every_fault(plan).into_iter().flat_map(|f| [1, 2, 3].map(|r| (f, r))) {
            for (at, undo_code) in (0..ranks).flat_map(|at| [None, Some(-5)].map(|c| (at, c))) {
                let mut world = World::new(plan, ranks, at, fault, policy);
                world.ranks.iter_mut().for_each(|r| r.undo_code = undo_code);
                world.attach(at, fault);
                let case = (plan, policy, fault, ranks, at, undo_code);
                check(&world, &case, at);
                cases += 1;
            }
        }
    }
    assert!(cases > 1000, "{cases}");
}

type Case<'a> = (&'a Vec<PlaneRequest>, RegistrationPolicy, Fault, usize, usize, Option<i32>);

fn check(world: &World, case: &Case<'_>, at: usize) {
    let (plan, policy, fault, ..) = *case;
    let want = expected(hits_draft(plan, fault), fault == Fault::Votes, policy);
    for (r, (machine, rank)) in world.machines.iter().zip(&world.ranks).enumerate() {
        assert_eq!(machine.state(), want, "rank {r} of {case:?}");
        let published: BTreeSet<usize> = machine.published_planes().collect();
        let wanted: BTreeSet<usize> = (0..plan.len())
            .filter(|&i| match want {
                RegistrationState::Committed => true,
                RegistrationState::FallbackHost => !machine.requests()[i].is_draft(),
                _ => false,
            })
            .collect();
        assert_eq!(published, wanted, "{case:?}");
        assert_eq!(rank.visible, wanted, "{case:?}");
        let registered: BTreeSet<usize> = rank.registered.iter().map(|(i, _)| *i).collect();
        assert_eq!(registered, wanted, "{case:?}");
        assert_eq!(rank.destroyed, u32::from(want == RegistrationState::Failed), "{case:?}");
        assert_eq!(machine.draft_store_disabled(), want == RegistrationState::FallbackHost);
        let reversed: Vec<_> = rank.order.iter().rev().copied().collect();
        assert!(reversed.starts_with(&rank.undone), "{case:?}");
        match (machine.failure(), want) {
            (None, RegistrationState::Committed) => {}
            (Some(failure), RegistrationState::FallbackHost | RegistrationState::Failed) => {
                check_failure(failure, case, r == at, rank.undone.len());
            }
            other => panic!("{other:?} in {case:?}"),
        }
    }
    let failing = &world.ranks[at];
    if let Fault::Domain(i) | Fault::Unsupported(i) = fault {
        let let_go = want == RegistrationState::FallbackHost;
        assert!(let_go || failing.calls == 0, "the store was called before the pre-check held: {case:?}");
        assert!(failing.order.iter().all(|(index, _)| *index != i), "{case:?}");
    }
}

fn check_failure(failure: &RegistrationFailure, case: &Case<'_>, here: bool, undone: usize) {
    let (_, _, fault, _, _, undo_code) = *case;
    let want = match (fault, here) {
        (Fault::Votes, _) => (Stage::Agree, Cause::NotAgreed),
        (_, false) => (Stage::Agree, Cause::OtherRank),
        (Fault::Domain(_), true) => {
            (Stage::PreCheck, Cause::Domain { has: MemoryDomain::Private, need: MemoryDomain::Shared })
        }
        (Fault::Unsupported(_), true) => (Stage::PreCheck, Cause::Unsupported),
        (Fault::Buffer(_), true) => (Stage::Register, Cause::Refused { code: -1 }),
        (Fault::Nothing, _) => panic!("{failure:?} of {case:?}"),
    };
    assert_eq!((failure.stage, failure.cause), want, "the first cause is kept: {case:?}");
    let codes = undo_code.map_or(0, |_| undone);
    assert_eq!(failure.undo_codes.len(), codes, "{case:?}");
    assert_eq!(failure.plane.is_some(), here && fault != Fault::Votes, "{case:?}");
}

#[test]
fn a_detached_registration_leaves_nothing_and_attaches_again() {
    for plan in plans() {
        let mut world = World::new(&plan, 2, 0, Fault::Nothing, RegistrationPolicy::AllowDraftStoreFallback);
        let last_buffer = plan.iter().map(|p| p.buffers.len()).sum::<usize>() - 1;
        let has_draft = plan.iter().any(PlaneRequest::is_draft);
        for fault in [Fault::Nothing, Fault::Buffer(last_buffer), Fault::Nothing] {
            if fault != Fault::Nothing && !has_draft {
                continue;
            }
            world.ranks.iter_mut().for_each(|r| *r = Rank::default());
            world.attach(1, fault);
            let want = expected(hits_draft(&plan, fault), false, RegistrationPolicy::AllowDraftStoreFallback);
            assert!(world.machines.iter().all(|m| m.state() == want));
            for (machine, rank) in world.machines.iter_mut().zip(&mut world.ranks) {
                machine.detach();
                assert_eq!(rank.run(machine, Fault::Nothing), None);
                assert_eq!(machine.state(), RegistrationState::Allocated);
                assert!(rank.registered.is_empty() && rank.visible.is_empty() && rank.destroyed == 0);
                assert_eq!(machine.published_planes().count(), 0);
                assert!(!machine.draft_store_disabled());
            }
        }
    }
}

#[test]
fn answers_that_nobody_asked_for_change_nothing() {
    let plan = vec![plane(0, PlaneKind::Target, 1)];
    let mut machine = Registration::new(plan, Some(MemoryDomain::Shared), RegistrationPolicy::FailClosed);
    let poke = |machine: &mut Registration| {
        machine.unregistered(Ok(()));
        machine.destroyed();
        machine.published();
        machine.withdrawn();
        machine.agreed(Some(Vote { required: true, draft: true }));
    };
    machine.registered(Ok(()));
    machine.detach();
    poke(&mut machine);
    assert_eq!((machine.state(), machine.next()), (RegistrationState::Allocated, Step::Done));
    machine.attach();
    poke(&mut machine);
    machine.attach();
    assert_eq!(machine.next(), Step::Register { index: 0, buffer: 0 });
    machine.registered(Ok(()));
    machine.registered(Ok(()));
    assert_eq!(machine.next(), Step::Vote(Vote { required: true, draft: true }));
    let seen = machine.take_transitions();
    assert_eq!(seen, [Transition { from: RegistrationState::Allocated, to: RegistrationState::Registering }]);
}
