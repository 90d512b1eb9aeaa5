//! Faults on demand: a wrapper that makes a store fail, lie, dawdle or hang, item by item.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::batch::{Call, Item, Outcome};
use super::clock::{Clock, SystemClock};
use super::gate::locked;
use super::regions::{RegionToken, Regions, RegisterError};
use super::stats::{Health, OpKind, StoreStats};
use super::{Caps, Store, StoreEpoch, StoreError};
use crate::backend::identity::{NamespaceDigest, StoreKey};
use crate::backend::region::Region;

/// What happens to an item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Fault {
    /// It is not done and ends so.
    Fail(Outcome),
    /// It is done, but the answer is lost: the caller sees this.
    LostAnswer(Outcome),
    /// `put`, `remove`: it is not done, but the caller sees `Ok`.
    LostWrite,
    /// The call waits first.
    Delay(Duration),
    /// The call waits until [`Faulty::release`].
    Hang,
    /// `get`: the destination is scribbled over and the checks find it: `Corrupt`.
    Corrupt,
    /// `get`: the destination is scribbled over and the caller sees `Ok`: what no store may do, for tests of
    /// whoever claims to notice.
    Lie,
    /// `get`: only the first bytes arrive, the rest of the destination keeps scribble; the caller sees
    /// `Ok` with the short length.
    Short(usize),
}

/// Which items a rule hits. Items are counted per operation from 1, over the life of the wrapper.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum When {
    /// One item.
    Nth(u64),
    /// Every n-th item; 0 is never.
    Every(u64),
    /// All from the n-th on.
    From(u64),
    /// Items of one key.
    Key(StoreKey),
}

/// A fault and when it strikes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rule {
    /// Operation.
    pub op: OpKind,
    /// Items.
    pub when: When,
    /// What happens.
    pub fault: Fault,
}

#[derive(Debug, Default)]
struct Plan {
    rules: Vec<Rule>,
    seen: [u64; 4],
    struck: u64,
    released: bool,
    waiting: usize,
    /// Registrations to come before the one that is refused, and its code.
    refusal: Option<(u64, i32)>,
    registered: usize,
}

/// A store with faults. Calls without a matching rule pass unchanged.
#[derive(Debug)]
pub struct Faulty<S> {
    inner: S,
    plan: Mutex<Plan>,
    changed: Condvar,
    regions: Regions,
    clock: Arc<dyn Clock>,
}

const SCRIBBLE: u8 = 0xA5;

impl<S: Store> Faulty<S> {
    /// Wraps `inner`, without faults.
    #[must_use]
    pub fn new(inner: S) -> Faulty<S> {
        Faulty::with_clock(inner, Arc::new(SystemClock))
    }

    /// The same, delays spent on `clock`.
    #[must_use]
    pub fn with_clock(inner: S, clock: Arc<dyn Clock>) -> Faulty<S> {
        let (plan, changed, regions) = (Mutex::default(), Condvar::new(), Regions::default());
        Faulty { inner, plan, changed, regions, clock }
    }

    /// Adds a rule. The first rule that matches an item decides.
    pub fn add(&self, op: OpKind, when: When, fault: Fault) {
        locked(&self.plan).rules.push(Rule { op, when, fault });
    }

    /// Refuses the `nth` registration from now on, counted from 1, with a code of the backend.
    pub fn refuse_registration(&self, nth: u64, code: i32) {
        locked(&self.plan).refusal = Some((nth, code));
    }

    /// Registrations that stand.
    pub fn registrations(&self) -> usize {
        locked(&self.plan).registered
    }

    /// Removes all rules; items in a hang go on.
    pub fn heal(&self) {
        locked(&self.plan).rules.clear();
        self.release();
    }

    /// Lets everything that hangs, now or later, go on.
    pub fn release(&self) {
        locked(&self.plan).released = true;
        self.changed.notify_all();
    }

    /// Items struck so far.
    pub fn struck(&self) -> u64 {
        locked(&self.plan).struck
    }

    /// Returns once `n` calls hang.
    pub fn wait_for_hanging(&self, n: usize) {
        let mut plan = locked(&self.plan);
        while plan.waiting < n {
            plan = self.changed.wait(plan).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The wrapped store.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    fn draw(&self, op: OpKind, key: &StoreKey) -> Option<Fault> {
        let mut plan = locked(&self.plan);
        let seen = &mut plan.seen[op as usize];
        *seen += 1;
        let n = *seen;
        let hit = |r: &&Rule| {
            r.op == op
                && match r.when {
                    When::Nth(at) => n == at,
                    When::Every(k) => k != 0 && n.is_multiple_of(k),
                    When::From(at) => n >= at,
                    When::Key(k) => k == *key,
                }
        };
        let fault = plan.rules.iter().find(hit).map(|r| r.fault);
        plan.struck += u64::from(fault.is_some());
        fault
    }

    fn hang(&self) {
        let mut plan = locked(&self.plan);
        plan.waiting += 1;
        self.changed.notify_all();
        while !plan.released {
            plan = self.changed.wait(plan).unwrap_or_else(PoisonError::into_inner);
        }
        plan.waiting -= 1;
    }

    /// Runs a batch: waits, leaves out what fails, passes the rest down in one call, and puts the answers
    /// together.
    fn strike<T: Clone>(
        &self,
        op: OpKind,
        of: &[T],
        key: impl Fn(&T) -> StoreKey,
        down: impl FnOnce(&[T]) -> Vec<Outcome>,
        spoil: impl Fn(&T, Fault, Outcome) -> Outcome,
        bytes: impl Fn(&T) -> usize,
    ) -> Vec<Outcome> {
        let faults: Vec<_> = of.iter().map(|x| self.draw(op, &key(x))).collect();
        for fault in faults.iter().flatten() {
            match fault {
                Fault::Delay(time) => self.clock.sleep(*time),
                Fault::Hang => self.hang(),
                _ => {}
            }
        }
        let skipped = |f: &Option<Fault>| matches!(f, Some(Fault::Fail(_) | Fault::LostWrite));
        let passed: Vec<T> =
            of.iter().zip(&faults).filter(|(_, f)| !skipped(f)).map(|(x, _)| x.clone()).collect();
        let mut answers = if passed.is_empty() { vec![] } else { down(&passed) }.into_iter();
        of.iter()
            .zip(faults)
            .map(|(x, fault)| match fault {
                Some(Fault::Fail(outcome)) => outcome,
                Some(Fault::LostWrite) => Outcome::Ok(bytes(x)),
                other => {
                    let answer =
                        answers.next().unwrap_or(Outcome::Transport(super::TransportCause::Protocol));
                    match other {
                        Some(Fault::LostAnswer(seen)) => seen,
                        Some(fault) => spoil(x, fault, answer),
                        None => answer,
                    }
                }
            })
            .collect()
    }

    fn spoil_get(&self, item: &Item, fault: Fault, answer: Outcome) -> Outcome {
        let Ok(memory) = self.regions.resolve(&item.spans) else { return answer };
        let scribble = vec![SCRIBBLE; memory.len()];
        match (fault, answer) {
            (Fault::Corrupt, Outcome::Ok(_)) => {
                memory.fill(0, &scribble);
                Outcome::Corrupt
            }
            (Fault::Lie, Outcome::Ok(n)) => {
                memory.fill(0, &scribble);
                Outcome::Ok(n)
            }
            (Fault::Short(at), Outcome::Ok(n)) => {
                let at = at.min(n);
                memory.fill(at, &scribble[at..]);
                Outcome::Ok(at)
            }
            (_, answer) => answer,
        }
    }
}

impl<S: Store> Store for Faulty<S> {
    fn caps(&self) -> Caps {
        self.inner.caps()
    }

    fn register(&self, region: &Arc<Region>) -> Result<RegionToken, RegisterError> {
        {
            let mut plan = locked(&self.plan);
            match plan.refusal {
                Some((1, code)) => {
                    plan.refusal = None;
                    return Err(RegisterError::Refused { code });
                }
                Some((nth, code)) => plan.refusal = Some((nth.saturating_sub(1), code)),
                None => {}
            }
        }
        let token = self.inner.register(region)?;
        self.regions.adopt(token, region);
        locked(&self.plan).registered += 1;
        Ok(token)
    }

    fn unregister(&self, token: RegionToken) -> Result<(), RegisterError> {
        self.inner.unregister(token)?;
        locked(&self.plan).registered -= 1;
        self.regions.unregister(token)
    }

    fn query(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
        self.strike(OpKind::Query, keys, |k| *k, |keys| self.inner.query(keys, call), |_, _, a| a, |_| 0)
    }

    fn touch(&self, keys: &[StoreKey], call: &Call) {
        self.inner.touch(keys, call);
    }

    fn get(&self, items: &[Item], call: &Call) -> Vec<Outcome> {
        let down = |items: &[Item]| self.inner.get(items, call);
        self.strike(OpKind::Get, items, |i| i.key, down, |i, f, a| self.spoil_get(i, f, a), Item::len)
    }

    fn put(&self, items: &[Item], call: &Call) -> Vec<Outcome> {
        let down = |items: &[Item]| self.inner.put(items, call);
        self.strike(OpKind::Put, items, |i| i.key, down, |_, _, a| a, Item::len)
    }

    fn remove(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
        self.strike(OpKind::Remove, keys, |k| *k, |keys| self.inner.remove(keys, call), |_, _, a| a, |_| 0)
    }

    fn clear(&self, namespace: NamespaceDigest, call: &Call) -> Result<u64, StoreError> {
        self.inner.clear(namespace, call)
    }

    fn sync(&self, call: &Call) -> Result<(), StoreError> {
        self.inner.sync(call)
    }

    fn health(&self) -> Health {
        self.inner.health()
    }

    fn stats(&self) -> StoreStats {
        self.inner.stats()
    }

    fn epoch(&self) -> StoreEpoch {
        self.inner.epoch()
    }

    fn close(&self, deadline: Instant) -> Result<(), StoreError> {
        self.inner.close(deadline)
    }
}
