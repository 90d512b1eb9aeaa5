//! Rendezvous: how a decode rank finds the prefill ranks. [`Registry`] is the table behind it, pure; an
//! embedded HTTP front is in `backend::transport::rendezvous`, and an embedder may put its own in front.
//! [`Resolver`] is the client that waits until the table is complete.
//!
//! Registration is idempotent: it is keyed by rank and incarnation, so a repeated one changes nothing. Every
//! topology field is compared with what the instance said before. Ready means that the *set* of ranks is
//! complete; counting calls is how a repeated call once hid a missing rank.

use std::collections::{BTreeMap, VecDeque};

use crate::base::Time;
use crate::pd::ids::Incarnation;
use crate::pd::topo::{Rank, Topology};

/// Longest control address in bytes.
pub const ADDRESS_BYTES_MAX: usize = 256;
/// Rooms whose replica is remembered.
pub const ROOMS_MAX: usize = 1 << 20;
/// How long, in microseconds.
pub const ROOM_TTL_US: u64 = 120_000_000;

/// What must be equal on all ranks of an instance, and what decode compares with its own.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Face {
    /// Shape of the instance.
    pub topo: Topology,
    /// Model digest ([`Layout::model`](crate::pd::layout::Layout::model)).
    pub model: u64,
    /// Tokens of a page.
    pub page_tokens: u32,
    /// Tokens of the window.
    pub window_tokens: u32,
    /// Lowest and highest protocol version spoken.
    pub versions: (u16, u16),
}

/// One rank announces itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Registration {
    /// Instance, and when it was started: a later start replaces the instance as a whole.
    pub instance: u64,
    /// Microseconds since some epoch that restarts do not reset (wall clock of the starter).
    pub started_us: u64,
    /// Common face.
    pub face: Face,
    /// Which rank.
    pub rank: Rank,
    /// Its process.
    pub incarnation: Incarnation,
    /// Where its control channel listens.
    pub address: String,
}

/// A field of the face that differs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Field {
    /// Shape.
    Topology,
    /// Model digest.
    Model,
    /// Page size.
    PageTokens,
    /// Window size.
    WindowTokens,
    /// Protocol versions.
    Versions,
}

/// Why a registration was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterRefused {
    /// Another rank of the instance said otherwise.
    #[error("{0:?} differs from what the instance registered before")]
    Differs(Field),
    /// A later start of the instance is registered.
    #[error("an instance that started later is registered")]
    Stale,
    /// Another instance is registered under this rendezvous, started at the same time.
    #[error("another instance is registered")]
    OtherInstance,
    /// The rank is outside the topology, or the topology is not valid.
    #[error("rank or topology out of range")]
    Range,
    /// The address is empty or too long.
    #[error("address of {0} bytes")]
    Address(usize),
}

/// What a registration did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Registered {
    /// A new rank.
    New,
    /// The same process again.
    Again,
    /// A new process behind a known rank.
    Replaced(Incarnation),
}

/// A rank that can be asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Endpoint {
    /// Its process.
    pub incarnation: Incarnation,
    /// Where its control channel listens.
    pub address: String,
}

/// Why there is no answer yet, or never.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LookupRefused {
    /// Ranks are missing.
    #[error("{have} of {want} ranks are registered")]
    NotReady {
        /// Ranks registered.
        have: usize,
        /// Ranks of the topology.
        want: usize,
    },
    /// No such rank in the topology.
    #[error("no such rank")]
    Unknown,
}

#[derive(Debug)]
struct Current {
    instance: u64,
    started_us: u64,
    face: Face,
    ranks: BTreeMap<Rank, Endpoint>,
}

/// The table of one prefill instance.
#[derive(Debug, Default)]
pub struct Registry {
    current: Option<Current>,
    replicas: BTreeMap<u64, (u32, Time)>,
    ages: VecDeque<(Time, u64)>,
}

fn difference(a: &Face, b: &Face) -> Option<Field> {
    let checks = [
        (a.topo == b.topo, Field::Topology),
        (a.model == b.model, Field::Model),
        (a.page_tokens == b.page_tokens, Field::PageTokens),
        (a.window_tokens == b.window_tokens, Field::WindowTokens),
        (a.versions == b.versions, Field::Versions),
    ];
    checks.iter().find(|c| !c.0).map(|c| c.1)
}

impl Registry {
    /// An empty table.
    #[must_use]
    pub fn new() -> Registry {
        Registry::default()
    }

    /// Enters a rank. A refused one changes nothing.
    pub fn register(&mut self, r: Registration) -> Result<Registered, RegisterRefused> {
        if r.address.is_empty() || r.address.len() > ADDRESS_BYTES_MAX {
            return Err(RegisterRefused::Address(r.address.len()));
        }
        let valid = r.face.topo.validate().and_then(|()| r.face.topo.check_rank(r.rank));
        if valid.is_err() || r.incarnation == Incarnation::UNKNOWN {
            return Err(RegisterRefused::Range);
        }
        if let Some(c) = &self.current {
            if r.instance == c.instance {
                if let Some(field) = difference(&c.face, &r.face) {
                    return Err(RegisterRefused::Differs(field));
                }
            } else if r.started_us < c.started_us {
                return Err(RegisterRefused::Stale);
            } else if r.started_us == c.started_us {
                return Err(RegisterRefused::OtherInstance);
            } else {
                // A whole restart: nothing of the old life is an answer any more.
                self.current = None;
            }
        }
        let c = self.current.get_or_insert_with(|| Current {
            instance: r.instance,
            started_us: r.started_us,
            face: r.face.clone(),
            ranks: BTreeMap::new(),
        });
        let end = Endpoint { incarnation: r.incarnation, address: r.address };
        Ok(match c.ranks.insert(r.rank, end.clone()) {
            None => Registered::New,
            Some(old) if old.incarnation == end.incarnation => Registered::Again,
            Some(old) => Registered::Replaced(old.incarnation),
        })
    }

    /// The instance, once all of its ranks are there.
    pub fn face(&self) -> Result<(u64, &Face), LookupRefused> {
        let c = self.current.as_ref().ok_or(LookupRefused::NotReady { have: 0, want: 1 })?;
        let want = c.face.topo.replica_ranks() * c.face.topo.dp as usize;
        if c.ranks.len() < want {
            return Err(LookupRefused::NotReady { have: c.ranks.len(), want });
        }
        Ok((c.instance, &c.face))
    }

    /// One rank of a complete instance.
    pub fn endpoint(&self, rank: Rank) -> Result<&Endpoint, LookupRefused> {
        self.face()?;
        self.current.as_ref().and_then(|c| c.ranks.get(&rank)).ok_or(LookupRefused::Unknown)
    }

    /// Remembers which replica serves a room. At the bound the oldest is forgotten.
    pub fn note_replica(&mut self, now: Time, room: u64, dp: u32) {
        self.expire(now);
        if self.replicas.len() >= ROOMS_MAX
            && let Some((_, oldest)) = self.ages.pop_front()
        {
            self.replicas.remove(&oldest);
        }
        if self.replicas.insert(room, (dp, now)).is_none() {
            self.ages.push_back((now, room));
        }
    }

    /// The replica of a room.
    #[must_use]
    pub fn replica(&self, room: u64) -> Option<u32> {
        self.replicas.get(&room).map(|r| r.0)
    }

    /// Forgets rooms that are too old. A room noted again meanwhile stays.
    pub fn expire(&mut self, now: Time) {
        while let Some(&(at, room)) = self.ages.front()
            && now.since(at) >= ROOM_TTL_US
        {
            self.ages.pop_front();
            match self.replicas.get(&room) {
                Some(&(_, noted)) if now.since(noted) < ROOM_TTL_US => self.ages.push_back((noted, room)),
                _ => {
                    self.replicas.remove(&room);
                }
            }
        }
    }
}

/// Clock of a [`Resolver`], in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResolverConfig {
    /// Wait between questions.
    pub every_us: u64,
    /// Questions before it gives up.
    pub tries_max: u32,
}

impl Default for ResolverConfig {
    fn default() -> ResolverConfig {
        ResolverConfig { every_us: 1_000_000, tries_max: 15 }
    }
}

/// Where a resolver stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Resolving {
    /// Ask now; count the answer with [`Resolver::handle`].
    Ask,
    /// Ask at this time.
    Wait(Time),
    /// The instance answered.
    Ready,
    /// It did not, in all tries.
    GaveUp,
}

/// Waits for an instance: how often to ask, and when to stop. The caller does the asking.
#[derive(Clone, Copy, Debug)]
pub struct Resolver {
    config: ResolverConfig,
    tries: u32,
    next: Time,
    asked: bool,
    ready: bool,
}

impl Resolver {
    /// Starts now.
    #[must_use]
    pub fn new(now: Time, config: ResolverConfig) -> Resolver {
        Resolver { config, tries: 0, next: now, asked: false, ready: false }
    }

    /// What to do at `now`.
    pub fn poll(&mut self, now: Time) -> Resolving {
        if self.ready {
            Resolving::Ready
        } else if self.tries >= self.config.tries_max && !self.asked {
            Resolving::GaveUp
        } else if now < self.next {
            Resolving::Wait(self.next)
        } else {
            self.tries += 1;
            self.asked = true;
            self.next = now + self.config.every_us;
            Resolving::Ask
        }
    }

    /// The answer to the last question.
    pub fn handle(&mut self, ready: bool) {
        self.asked = false;
        self.ready |= ready;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registration(tp: u32, inc: u64) -> Registration {
        Registration {
            instance: 1,
            started_us: 10,
            face: Face {
                topo: Topology { tp: 2, ..Topology::single(4) },
                model: 7,
                page_tokens: 16,
                window_tokens: 0,
                versions: (1, 1),
            },
            rank: Rank { tp, ..Rank::default() },
            incarnation: Incarnation(inc),
            address: "h:1".into(),
        }
    }

    #[test]
    fn a_repeated_call_does_not_hide_a_missing_rank() {
        let mut r = Registry::new();
        assert_eq!(r.register(registration(0, 5)), Ok(Registered::New));
        assert_eq!(r.register(registration(0, 5)), Ok(Registered::Again));
        assert_eq!(r.face(), Err(LookupRefused::NotReady { have: 1, want: 2 }));
        assert_eq!(r.register(registration(1, 6)), Ok(Registered::New));
        assert!(r.face().is_ok());
        assert_eq!(r.register(registration(1, 9)), Ok(Registered::Replaced(Incarnation(6))));
        assert_eq!(r.endpoint(Rank { tp: 1, ..Rank::default() }).map(|e| e.incarnation), Ok(Incarnation(9)));
        assert_eq!(r.endpoint(Rank { tp: 2, ..Rank::default() }), Err(LookupRefused::Unknown));
    }

    #[test]
    fn every_field_is_compared() {
        let mut r = Registry::new();
        r.register(registration(0, 5)).unwrap();
        let with = |f: &dyn Fn(&mut Registration)| {
            let mut x = registration(1, 6);
            f(&mut x);
            x
        };
        let mut refused = |f: &dyn Fn(&mut Registration)| r.register(with(f)).unwrap_err();
        use RegisterRefused::{Address, Differs, OtherInstance, Range, Stale};
        assert_eq!(refused(&|x| x.face.topo.stage_layers = vec![2, 2]), Differs(Field::Topology));
        assert_eq!(refused(&|x| x.face.model = 8), Differs(Field::Model));
        assert_eq!(refused(&|x| x.face.page_tokens = 8), Differs(Field::PageTokens));
        assert_eq!(refused(&|x| x.face.window_tokens = 8), Differs(Field::WindowTokens));
        assert_eq!(refused(&|x| x.face.versions = (1, 2)), Differs(Field::Versions));
        assert_eq!(refused(&|x| x.rank.tp = 2), Range);
        assert_eq!(refused(&|x| x.incarnation = Incarnation(0)), Range);
        assert_eq!(refused(&|x| x.address = String::new()), Address(0));
        assert_eq!(refused(&|x| (x.instance, x.started_us) = (2, 9)), Stale);
        assert_eq!(refused(&|x| x.instance = 2), OtherInstance);
        assert_eq!(r.register(with(&|x| (x.instance, x.started_us) = (2, 11))), Ok(Registered::New));
        assert_eq!(r.face(), Err(LookupRefused::NotReady { have: 1, want: 2 }));
    }

    #[test]
    fn rooms_age_and_a_resolver_gives_up() {
        let mut r = Registry::new();
        r.note_replica(Time(0), 5, 1);
        r.note_replica(Time(ROOM_TTL_US - 1), 5, 2);
        r.expire(Time(ROOM_TTL_US));
        assert_eq!(r.replica(5), Some(2));
        r.expire(Time(2 * ROOM_TTL_US));
        assert_eq!(r.replica(5), None);

        let mut w = Resolver::new(Time(0), ResolverConfig { every_us: 10, tries_max: 2 });
        assert_eq!(w.poll(Time(0)), Resolving::Ask);
        w.handle(false);
        assert_eq!(w.poll(Time(5)), Resolving::Wait(Time(10)));
        assert_eq!(w.poll(Time(10)), Resolving::Ask);
        w.handle(false);
        assert_eq!(w.poll(Time(99)), Resolving::GaveUp);
    }
}
