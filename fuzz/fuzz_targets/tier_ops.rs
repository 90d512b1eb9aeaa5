//! The core of the tiers on a rig with symbolic memories: any calls of a scheduler, sensible or not, and any end of
//! any piece of work in any order, chosen by the input. After every step the rig checks sanity, conservation and the
//! stamps of what was handed out; at the end everything must come to rest.
#![no_main]

#[path = "bounded.rs"]
mod bounded;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;

use bounded::Int;
use sapwood::base::{NamespaceId, OpId, Time};
use sapwood::pool::Capacity;
use sapwood::sim::{Call, Rig};
use sapwood::tiers::{
    Alloc, CoreConfig, Event, Eviction, HostTier, PageOutcome, PrefetchConfig, PrefetchPolicy, RequestId,
    StoreConfig, WritePolicy,
};
use sapwood::tree::SessionId;

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Write {
    Through(Int<1, 3>),
    Selective,
    Back,
    Never,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Wait {
    BestEffort,
    Complete,
    Budget(Int<0, 5>, Int<0, 50>),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
struct Store {
    batch_pages: Int<1, 3>,
    queue_nodes_max: Int<1, 4>,
    attempts_max: Int<1, 3>,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
struct Setup {
    page_size: Int<1, 3>,
    device_pages: Int<4, 20>,
    host_pages: Int<2, 24>,
    write: Write,
    store: Option<Store>,
    wait: Wait,
    threshold_pages: Int<0, 2>,
    batch_pages: Int<1, 3>,
    window_batches: Int<1, 2>,
    share_percent: Int<20, 100>,
    loads_in_flight_max: Int<1, 3>,
    exclusive: bool,
    write_ahead_percent: Int<0, 100>,
    learns: bool,
}

/// Tokens out of a small family: so many pages and a bit, leaving the trunk at page `fork`.
#[derive(Arbitrary, Clone, Copy, Debug)]
struct Prompt {
    other: bool,
    pages: Int<0, 8>,
    inside: Int<0, 2>,
    fork: Int<0, 8>,
    branch: Int<0, 2>,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Outcome {
    Done,
    Missing,
    Corrupt,
    Refused,
    Failed,
}

#[derive(Arbitrary, Clone, Debug)]
enum Ending {
    Well,
    Fails,
    Each([Outcome; 3], Int<0, 3>),
}

#[derive(Arbitrary, Clone, Debug)]
enum Op {
    Open(Prompt),
    Match(u8),
    Prefetch(u8),
    Poll(u8),
    LoadBack(u8),
    Alloc(u8, Int<0, 12>),
    /// Computes what has pages and publishes up to so many pages and tokens.
    Publish(u8, Int<0, 9>, Int<0, 2>),
    Finish(u8),
    Abort(u8),
    /// Does all of a request's life at once.
    Serve(Prompt),
    End(u8, Ending),
    EndAll,
    Wait(Int<0, 2000>),
    /// An event that no action asked for.
    Stray(Int<0, 40>, u8),
    ForgetStore,
    SetPolicy(Write, bool),
    DetachHost,
    AttachHost {
        pages: Int<0, 24>,
        write: Write,
        exclusive: bool,
        store: Option<Store>,
    },
    NewStore(Store),
    /// It waits in the queue.
    Expect(u8),
    Answered(u8, Int<0, 9>),
    WillNotReturn(u8),
    /// It is a turn of the session, which is opened if it is not open.
    OfSession(u8),
    CloseSession,
}

#[derive(Arbitrary, Debug)]
struct Input {
    setup: Setup,
    ops: Vec<Op>,
}

struct Live {
    id: RequestId,
    namespace: NamespaceId,
    tokens: Vec<u32>,
}

struct World {
    rig: Rig,
    page_size: usize,
    other: NamespaceId,
    live: Vec<Live>,
    session: Option<SessionId>,
    now: Time,
}

fn write(of: Write) -> WritePolicy {
    match of {
        Write::Through(threshold) => WritePolicy::WriteThrough { threshold: threshold.0 },
        Write::Selective => WritePolicy::WriteThroughSelective,
        Write::Back => WritePolicy::WriteBack,
        Write::Never => WritePolicy::None,
    }
}

fn store(of: Store) -> StoreConfig {
    StoreConfig {
        batch_pages: of.batch_pages.0,
        pages_in_flight_max: 2 * of.batch_pages.0,
        queue_nodes_max: of.queue_nodes_max.0,
        attempts_max: of.attempts_max.0,
        retry_ms: 1,
        ..StoreConfig::default()
    }
}

fn config(setup: &Setup) -> CoreConfig {
    let policy = match setup.wait {
        Wait::BestEffort => PrefetchPolicy::BestEffort,
        Wait::Complete => PrefetchPolicy::WaitComplete,
        Wait::Budget(base, each) => {
            PrefetchPolicy::Timeout { base_ms: base.0.into(), per_ki_token_ms: each.0.into() }
        }
    };
    CoreConfig {
        host: Capacity::Pages(setup.host_pages.0),
        write: write(setup.write),
        store: setup.store.map(store),
        prefetch: PrefetchConfig {
            policy,
            threshold_tokens: setup.threshold_pages.0 * setup.page_size.0,
            batch_pages: setup.batch_pages.0,
            window_batches: setup.window_batches.0,
            host_share_percent: setup.share_percent.0,
            retry_ms: 0,
            ..PrefetchConfig::default()
        },
        loads_in_flight_max: setup.loads_in_flight_max.0,
        exclusive: setup.exclusive,
        write_ahead_percent: setup.write_ahead_percent.0,
        eviction: if setup.learns { Eviction::Adaptive } else { Eviction::Lru },
        ..CoreConfig::device_only(setup.page_size.0, Capacity::Pages(setup.device_pages.0))
    }
}

fn outcome(of: Outcome) -> PageOutcome {
    match of {
        Outcome::Done => PageOutcome::Done,
        Outcome::Missing => PageOutcome::Missing,
        Outcome::Corrupt => PageOutcome::Corrupt,
        Outcome::Refused => PageOutcome::Refused,
        Outcome::Failed => PageOutcome::Failed,
    }
}

impl World {
    fn prompt(&self, prompt: Prompt) -> (NamespaceId, Vec<u32>) {
        let page = self.page_size as u32;
        let tokens = prompt.pages.0 * page + prompt.inside.0;
        let token = |i: u32| if i >= prompt.fork.0 * page { 100 * (prompt.branch.0 + 1) + i } else { i };
        let namespace = if prompt.other { self.other } else { NamespaceId::DEFAULT };
        (namespace, (0..tokens).map(token).collect())
    }

    fn pick(&self, which: u8) -> Option<usize> {
        (!self.live.is_empty()).then(|| usize::from(which) % self.live.len())
    }

    fn open(&mut self, prompt: Prompt) -> usize {
        let (namespace, tokens) = self.prompt(prompt);
        let id = self.rig.core.request(namespace);
        self.live.push(Live { id, namespace, tokens });
        self.live.len() - 1
    }

    fn publish(&mut self, at: usize, tokens: usize) {
        let Live { id, namespace, tokens: all } = &self.live[at];
        self.rig.compute(*id, all, *namespace);
        // Refusals are part of the contract: too few pages, fewer tokens than before, a failed load.
        let _ = self.rig.checkpoint(*id, &all[..tokens.min(all.len())]);
    }

    fn close(&mut self, at: usize, finish: bool) {
        let Live { id, namespace, tokens } = self.live.swap_remove(at);
        if finish {
            self.rig.compute(id, &tokens, namespace);
            if self.rig.finish(id, &tokens).is_ok() {
                return;
            }
        }
        assert_eq!(self.rig.abort(id), Ok(()));
    }

    fn serve(&mut self, prompt: Prompt) {
        let at = self.open(prompt);
        let Live { id, tokens, .. } = &self.live[at];
        let id = *id;
        let (all, head) = (tokens.len(), tokens[..tokens.len().saturating_sub(1)].to_vec());
        self.rig.match_prefix(id, &head).expect("a fresh request owns nothing");
        self.rig.load_back(id).expect("a fresh match");
        let have = self.rig.core.pages(id).expect("a live request").len();
        let want = all.div_ceil(self.page_size).saturating_sub(have) as u32;
        let granted = self.rig.alloc(id, want).expect("a live request");
        self.close(at, granted == Alloc::Granted);
    }

    fn run(&mut self, op: &Op) {
        match op {
            Op::Open(prompt) if self.live.len() < 6 => {
                self.open(*prompt);
            }
            Op::Open(_) => {}
            Op::Serve(prompt) => self.serve(*prompt),
            Op::End(which, how) if !self.rig.pending.is_empty() => {
                let how = match how {
                    Ending::Well => Call::Well,
                    Ending::Fails => Call::Fails,
                    Ending::Each(each, n) => {
                        Call::Each(each[..n.0 as usize].iter().map(|&o| outcome(o)).collect())
                    }
                };
                let index = usize::from(*which) % self.rig.pending.len();
                self.rig.complete(index, &how);
            }
            Op::End(..) => {}
            Op::EndAll => self.rig.drain(),
            Op::Wait(ms) => {
                self.now = self.now + u64::from(ms.0) * 1000;
                self.rig.tick(self.now);
            }
            Op::Stray(number, kind) => self.stray(u64::from(number.0), *kind),
            Op::ForgetStore => self.rig.clear_store(),
            Op::SetPolicy(to, exclusive) => drop(self.rig.set_write_policy(write(*to), *exclusive)),
            Op::DetachHost => drop(self.rig.detach_host()),
            Op::AttachHost { pages, write: policy, exclusive, store: behind } => {
                let of_component = Capacity::Pages(0);
                drop(self.rig.attach_host(HostTier {
                    pages: Capacity::Pages(pages.0),
                    window: of_component,
                    state: of_component,
                    write: write(*policy),
                    exclusive: *exclusive,
                    store: behind.map(store),
                }));
            }
            Op::NewStore(to) => drop(self.rig.new_store(store(*to))),
            Op::CloseSession => {
                let closed = self.session.take().map(|session| self.rig.core.close_session(session));
                assert!(closed.is_none_or(|closed| closed.is_ok()));
            }
            Op::Match(which)
            | Op::Prefetch(which)
            | Op::Poll(which)
            | Op::LoadBack(which)
            | Op::Alloc(which, _)
            | Op::Publish(which, ..)
            | Op::Expect(which)
            | Op::Answered(which, _)
            | Op::WillNotReturn(which)
            | Op::OfSession(which)
            | Op::Finish(which)
            | Op::Abort(which) => {
                if let Some(at) = self.pick(*which) {
                    self.of_request(op, at);
                }
            }
        }
    }

    fn of_request(&mut self, op: &Op, at: usize) {
        let Live { id, tokens, .. } = &self.live[at];
        let (id, tokens) = (*id, tokens.clone());
        // Every call may be refused, none may break a rule; the rig looks after each.
        match op {
            Op::Match(_) => drop(self.rig.match_prefix(id, &tokens)),
            Op::Prefetch(_) => drop(self.rig.prefetch(id, &tokens)),
            Op::Poll(_) => {
                let _ = self.rig.core.poll_prefetch(id);
                self.rig.tick(self.now);
            }
            Op::LoadBack(_) => drop(self.rig.load_back(id)),
            Op::Alloc(_, pages) => drop(self.rig.alloc(id, pages.0)),
            Op::Publish(_, pages, inside) => {
                self.publish(at, pages.0 as usize * self.page_size + inside.0 as usize);
            }
            Op::Expect(_) => assert_eq!(self.rig.core.expect_prefix(id, &tokens), Ok(())),
            Op::Answered(_, said) => assert_eq!(self.rig.core.answered(id, said.0), Ok(())),
            Op::WillNotReturn(_) => assert_eq!(self.rig.core.will_not_return(id), Ok(())),
            Op::OfSession(_) => {
                let session = *self.session.get_or_insert_with(|| self.rig.core.open_session());
                assert_eq!(self.rig.core.set_session(id, session), Ok(()));
            }
            Op::Finish(_) => self.close(at, true),
            _ => self.close(at, false),
        }
    }

    fn stray(&mut self, number: u64, kind: u8) {
        let op = OpId(number);
        // An end of work that runs would be a lie of the executor; those come from `End` alone.
        if self.rig.core.is_in_flight(op) {
            return;
        }
        let batch = u32::from(kind / 5);
        let outcomes = vec![PageOutcome::Done; usize::from(kind / 5)];
        self.rig.core.handle(match kind % 5 {
            0 => Event::Copied { op, ok: true },
            1 => Event::LayerCopied { op, layers: u32::from(kind) },
            2 => Event::Queried { op, present: Some(vec![true; usize::from(kind)]) },
            3 => Event::Got { op, batch, outcomes },
            _ => Event::Put { op, batch, outcomes },
        });
        self.rig.tick(self.now);
    }

    /// Lets everything end. What is left then is a leak.
    fn rest(mut self) {
        while !self.live.is_empty() {
            self.close(0, false);
        }
        for _ in 0..64 {
            self.rig.drain();
            self.now = self.now + 60_000_000;
            self.rig.tick(self.now);
        }
        self.rig.assert_quiet();
        assert_eq!(self.rig.core.stats().violations, 0);
    }
}

fuzz_target!(|input: Input| {
    let mut rig = Rig::new(config(&input.setup)).ticked_by_hand();
    let other = rig.namespace("other");
    let page_size = input.setup.page_size.0 as usize;
    let mut world = World { rig, page_size, other, live: Vec::new(), session: None, now: Time::ZERO };
    for op in input.ops.iter().take(200) {
        world.run(op);
    }
    world.rest();
});
