//! The op log: every input of a core as a line of text, so that an incident can be replayed, checked at every step,
//! and shrunk.
//!
//! The first line holds the configuration, each further line one call or event. A log is complete from the making of
//! the core on; replaying it gives the same actions and the same digest. Recording costs a copy of the arguments.

use std::fmt::{self, Write as _};
use std::str::FromStr;

use super::action::{Event, PageOutcome};
use super::attach::HostTier;
use super::config::{
    CoreConfig, Eviction, PrefetchConfig, PrefetchPolicy, Rates, StateConfig, StoreConfig, WindowConfig,
    WritePolicy,
};
use super::core::Core;
use super::request::RequestId;
use crate::base::slab::SlabKey;
use crate::base::{Fence, NamespaceId, OpId, Time, Violation};
use crate::key::Namespace;
use crate::pool::Capacity;
use crate::tree::SessionId;

/// One input of a core.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Op {
    /// [`Core::namespace`].
    Namespace(Namespace),
    /// [`Core::request`].
    Request(NamespaceId),
    /// [`Core::match_prefix`].
    Match(RequestId, Vec<u32>),
    /// [`Core::prefetch`].
    Prefetch(RequestId, Vec<u32>),
    /// [`Core::poll_prefetch`].
    PollPrefetch(RequestId),
    /// [`Core::load_back_within`].
    LoadBack(RequestId, u32),
    /// [`Core::alloc`].
    Alloc(RequestId, u32),
    /// [`Core::checkpoint`].
    Checkpoint(RequestId, Vec<u32>, Fence),
    /// [`Core::finish`].
    Finish(RequestId, Vec<u32>, Fence),
    /// [`Core::abort`].
    Abort(RequestId, Fence),
    /// [`Core::launched`].
    Launched(Fence),
    /// [`Core::let_window_go`].
    LetWindowGo(RequestId, u32),
    /// [`Core::hold_until`].
    HoldUntil(RequestId, Time),
    /// [`Core::reset`].
    Reset,
    /// [`Core::open_session`].
    OpenSession,
    /// [`Core::close_session`].
    CloseSession(SessionId),
    /// [`Core::set_session`].
    SetSession(RequestId, SessionId),
    /// [`Core::will_not_return`].
    WillNotReturn(RequestId),
    /// [`Core::answered`].
    Answered(RequestId, u32),
    /// [`Core::expect_prefix`].
    ExpectPrefix(RequestId, Vec<u32>),
    /// [`Core::detach_host`].
    DetachHost,
    /// [`Core::attach_host`].
    AttachHost(HostTier),
    /// [`Core::new_store`].
    NewStore(StoreConfig),
    /// [`Core::take_over`].
    TakeOver(RequestId, RequestId),
    /// [`Core::set_rates`].
    Rates(Rates),
    /// [`Core::set_prefetch_policy`].
    PrefetchPolicy(PrefetchPolicy),
    /// [`Core::set_write_policy`].
    WritePolicy(WritePolicy, bool),
    /// [`Core::tick`].
    Tick(Time),
    /// [`Core::handle`].
    Event(Event),
}

/// Why a line is not an op.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("line {line}: {what}")]
pub struct OpLogError {
    /// Line of the log, counted from 1; 0 for a single line parsed on its own.
    pub line: usize,
    /// What is wrong with it.
    pub what: &'static str,
}

/// The first step of a replay at which a rule was broken.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Broken {
    /// Index of the op after which it was.
    pub step: usize,
    /// The rules.
    pub violations: Vec<Violation>,
}

/// A configuration and the inputs since.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OpLog {
    /// What the core was made with.
    pub config: CoreConfig,
    /// Its inputs, in order.
    pub ops: Vec<Op>,
}

impl Op {
    /// Gives the op to a core. Refusals and errors are part of the story and ignored here.
    pub fn apply(&self, core: &mut Core) {
        match self {
            Op::Namespace(namespace) => drop(core.namespace(namespace)),
            Op::Request(namespace) => drop(core.request(*namespace)),
            Op::Match(id, tokens) => drop(core.match_prefix(*id, tokens)),
            Op::Prefetch(id, tokens) => drop(core.prefetch(*id, tokens)),
            Op::PollPrefetch(id) => drop(core.poll_prefetch(*id)),
            Op::LoadBack(id, budget_pages) => drop(core.load_back_within(*id, *budget_pages)),
            Op::Alloc(id, pages) => drop(core.alloc(*id, *pages)),
            Op::Checkpoint(id, tokens, fence) => drop(core.checkpoint(*id, tokens, *fence)),
            Op::Finish(id, tokens, fence) => drop(core.finish(*id, tokens, *fence)),
            Op::Abort(id, fence) => drop(core.abort(*id, *fence)),
            Op::Launched(fence) => core.launched(*fence),
            Op::LetWindowGo(id, first) => drop(core.let_window_go(*id, *first)),
            Op::HoldUntil(id, until) => drop(core.hold_until(*id, *until)),
            Op::Reset => drop(core.reset()),
            Op::OpenSession => drop(core.open_session()),
            Op::CloseSession(session) => drop(core.close_session(*session)),
            Op::SetSession(id, session) => drop(core.set_session(*id, *session)),
            Op::WillNotReturn(id) => drop(core.will_not_return(*id)),
            Op::Answered(id, tokens) => drop(core.answered(*id, *tokens)),
            Op::ExpectPrefix(id, tokens) => drop(core.expect_prefix(*id, tokens)),
            Op::DetachHost => drop(core.detach_host()),
            Op::AttachHost(tier) => drop(core.attach_host(*tier)),
            Op::NewStore(store) => drop(core.new_store(*store)),
            Op::TakeOver(to, from) => drop(core.take_over(*to, *from)),
            Op::Rates(rates) => core.set_rates(*rates),
            Op::PrefetchPolicy(policy) => core.set_prefetch_policy(*policy),
            Op::WritePolicy(write, exclusive) => drop(core.set_write_policy(*write, *exclusive)),
            Op::Tick(now) => core.tick(*now),
            Op::Event(event) => core.handle(event.clone()),
        }
    }
}

impl OpLog {
    /// Runs the log on a fresh core. With `check`, every rule is looked at after every op.
    pub fn replay(&self, check: bool) -> Result<Core, Broken> {
        let Ok(mut core) = Core::new(self.config) else {
            let violation = Violation { rule: "config", detail: format!("{:?} is refused", self.config) };
            return Err(Broken { step: 0, violations: vec![violation] });
        };
        for (step, op) in self.ops.iter().enumerate() {
            op.apply(&mut core);
            core.take_actions();
            if check {
                let violations = core.sanity();
                if !violations.is_empty() {
                    return Err(Broken { step, violations });
                }
            }
        }
        Ok(core)
    }

    /// The shortest log found for which `fails` still holds: ever smaller runs of ops are left out (delta debugging).
    /// O(n log n) replays on a friendly log, O(n^2) at worst.
    #[must_use]
    pub fn shrink(&self, mut fails: impl FnMut(&OpLog) -> bool) -> OpLog {
        let mut kept = self.clone();
        let mut run = kept.ops.len().div_ceil(2);
        while run > 0 {
            let mut at = 0;
            while at < kept.ops.len() {
                let mut less = kept.clone();
                less.ops.drain(at..(at + run).min(less.ops.len()));
                if fails(&less) {
                    kept = less;
                } else {
                    at += run;
                }
            }
            run = if run == 1 { 0 } else { run.div_ceil(2) };
        }
        kept
    }
}

// ---- text ----

fn words(out: &mut String, items: impl IntoIterator<Item = impl fmt::Display>) {
    for item in items {
        let _ = write!(out, " {item}");
    }
}

fn key_text(key: SlabKey) -> String {
    format!("{}.{}", key.index, key.generation)
}

fn id_text(id: RequestId) -> String {
    key_text(id.0)
}

fn field_text(field: Option<&str>) -> String {
    // Hex, so that any text is one word; `-` is absent, `=` is empty.
    match field {
        None => "-".to_owned(),
        Some(text) => text.bytes().fold("=".to_owned(), |mut out, byte| {
            let _ = write!(out, "{byte:02x}");
            out
        }),
    }
}

fn outcome_char(outcome: PageOutcome) -> char {
    match outcome {
        PageOutcome::Done => 'd',
        PageOutcome::Missing => 'm',
        PageOutcome::Corrupt => 'c',
        PageOutcome::Refused => 'r',
        PageOutcome::Failed => 'f',
    }
}

fn outcomes_text(outcomes: &[PageOutcome]) -> String {
    std::iter::once('=').chain(outcomes.iter().map(|&o| outcome_char(o))).collect()
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = String::new();
        let with = |name: &str, id: &RequestId| format!("{name} {}", id_text(*id));
        match self {
            Op::Namespace(n) => {
                line.push_str("namespace");
                words(
                    &mut line,
                    [&n.adapter, &n.salt, &n.user_key].map(|field| field_text(field.as_deref())),
                );
            }
            Op::Request(namespace) => line = format!("request {}", namespace.0),
            Op::Match(id, tokens) => {
                line = with("match", id);
                words(&mut line, tokens);
            }
            Op::Prefetch(id, tokens) => {
                line = with("prefetch", id);
                words(&mut line, tokens);
            }
            Op::PollPrefetch(id) => line = with("poll", id),
            Op::LoadBack(id, budget_pages) => line = format!("{} {budget_pages}", with("load", id)),
            Op::Alloc(id, pages) => line = format!("{} {pages}", with("alloc", id)),
            Op::Checkpoint(id, tokens, fence) => {
                line = format!("{} {}", with("checkpoint", id), fence.number());
                words(&mut line, tokens);
            }
            Op::Finish(id, tokens, fence) => {
                line = format!("{} {}", with("finish", id), fence.number());
                words(&mut line, tokens);
            }
            Op::Abort(id, fence) => line = format!("{} {}", with("abort", id), fence.number()),
            Op::Launched(fence) => line = format!("launched {}", fence.number()),
            Op::LetWindowGo(id, first) => line = format!("{} {first}", with("let-window-go", id)),
            Op::HoldUntil(id, until) => line = format!("{} {}", with("hold-until", id), until.0),
            Op::Reset => line.push_str("reset"),
            Op::OpenSession => line.push_str("open-session"),
            Op::CloseSession(session) => line = format!("close-session {}", key_text(session.0)),
            Op::SetSession(id, session) => {
                line = format!("{} {}", with("set-session", id), key_text(session.0));
            }
            Op::WillNotReturn(id) => line = with("will-not-return", id),
            Op::Answered(id, tokens) => line = format!("{} {tokens}", with("answered", id)),
            Op::ExpectPrefix(id, tokens) => {
                line = with("expect", id);
                words(&mut line, tokens);
            }
            Op::DetachHost => line.push_str("detach-host"),
            Op::AttachHost(t) => {
                line.push_str("attach-host");
                words(&mut line, [t.pages, t.window, t.state].map(capacity_text));
                words(&mut line, [write_policy_text(t.write), u8::from(t.exclusive).to_string()]);
                store_text(t.store.as_ref(), &mut line);
            }
            Op::NewStore(store) => {
                line.push_str("new-store");
                store_text(Some(store), &mut line);
            }
            Op::TakeOver(to, from) => line = format!("{} {}", with("take-over", to), id_text(*from)),
            Op::Rates(r) => {
                line =
                    format!("rates {} {} {}", r.compute_ns_per_token, r.load_ns_per_token, r.load_latency_us);
            }
            Op::PrefetchPolicy(policy) => line = format!("prefetch-policy {}", prefetch_policy_text(*policy)),
            Op::WritePolicy(write, exclusive) => {
                line = format!("write-policy {} {}", write_policy_text(*write), u8::from(*exclusive));
            }
            Op::Tick(now) => line = format!("tick {}", now.0),
            Op::Event(event) => event_text(event, &mut line),
        }
        f.write_str(&line)
    }
}

fn event_text(event: &Event, line: &mut String) {
    *line = match event {
        Event::Copied { op, ok } => format!("copied {} {}", op.0, u8::from(*ok)),
        Event::LayerCopied { op, layers } => format!("layers {} {layers}", op.0),
        Event::Queried { op, present: None } => format!("queried {} -", op.0),
        Event::Queried { op, present: Some(present) } => {
            let bits: String = present.iter().map(|&p| if p { '1' } else { '0' }).collect();
            format!("queried {} ={bits}", op.0)
        }
        Event::Got { op, batch, outcomes } => format!("got {} {batch} {}", op.0, outcomes_text(outcomes)),
        Event::Put { op, batch, outcomes } => format!("put {} {batch} {}", op.0, outcomes_text(outcomes)),
    };
}

/// Words of one line, taken from the left.
struct Words<'a>(std::str::SplitAsciiWhitespace<'a>);

impl<'a> Words<'a> {
    fn word(&mut self) -> Result<&'a str, OpLogError> {
        self.0.next().ok_or(OpLogError { line: 0, what: "a word is missing" })
    }

    fn number<T: FromStr>(&mut self) -> Result<T, OpLogError> {
        self.word()?.parse().map_err(|_| OpLogError { line: 0, what: "a number is malformed" })
    }

    fn rest<T: FromStr>(&mut self) -> Result<Vec<T>, OpLogError> {
        self.0
            .by_ref()
            .map(|w| w.parse().map_err(|_| OpLogError { line: 0, what: "a token is malformed" }))
            .collect()
    }

    fn key(&mut self) -> Result<SlabKey, OpLogError> {
        let bad = OpLogError { line: 0, what: "an id is malformed" };
        let (index, generation) = self.word()?.split_once('.').ok_or(bad)?;
        Ok(SlabKey {
            index: index.parse().map_err(|_| bad)?,
            generation: generation.parse().map_err(|_| bad)?,
        })
    }

    fn id(&mut self) -> Result<RequestId, OpLogError> {
        self.key().map(RequestId)
    }

    fn op(&mut self) -> Result<OpId, OpLogError> {
        Ok(OpId(self.number()?))
    }

    fn fence(&mut self) -> Result<Fence, OpLogError> {
        Ok(Fence::after(self.number()?))
    }

    fn field(&mut self) -> Result<Option<String>, OpLogError> {
        let bad = OpLogError { line: 0, what: "a namespace field is malformed" };
        match self.word()? {
            "-" => Ok(None),
            word => {
                let hex = word
                    .strip_prefix('=')
                    .filter(|h| h.len().is_multiple_of(2) && h.is_ascii())
                    .ok_or(bad)?;
                let bytes: Result<Vec<u8>, _> =
                    (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16)).collect();
                let text = bytes.ok().and_then(|b| String::from_utf8(b).ok());
                text.map(Some).ok_or(bad)
            }
        }
    }

    fn outcomes(&mut self) -> Result<Vec<PageOutcome>, OpLogError> {
        let bad = OpLogError { line: 0, what: "outcomes are malformed" };
        let letters = self.word()?.strip_prefix('=').ok_or(bad)?;
        letters
            .chars()
            .map(|c| match c {
                'd' => Ok(PageOutcome::Done),
                'm' => Ok(PageOutcome::Missing),
                'c' => Ok(PageOutcome::Corrupt),
                'r' => Ok(PageOutcome::Refused),
                'f' => Ok(PageOutcome::Failed),
                _ => Err(bad),
            })
            .collect()
    }

    fn capacity(&mut self) -> Result<Capacity, OpLogError> {
        capacity_of(self.word()?)
    }

    fn store(&mut self) -> Result<Option<StoreConfig>, OpLogError> {
        let bad = OpLogError { line: 0, what: "a store is malformed" };
        Ok(match self.word()? {
            "-" => None,
            batch_pages => Some(StoreConfig {
                batch_pages: batch_pages.parse().map_err(|_| bad)?,
                pages_in_flight_max: self.number()?,
                queue_nodes_max: self.number()?,
                attempts_max: self.number()?,
                retry_ms: self.number()?,
                uses_min: self.number()?,
                tokens_min: self.number()?,
            }),
        })
    }

    fn write_policy(&mut self) -> Result<WritePolicy, OpLogError> {
        let bad = OpLogError { line: 0, what: "a write policy is malformed" };
        Ok(match self.word()?.split(':').collect::<Vec<_>>()[..] {
            ["write-through", n] => WritePolicy::WriteThrough { threshold: n.parse().map_err(|_| bad)? },
            ["write-through-selective"] => WritePolicy::WriteThroughSelective,
            ["write-back"] => WritePolicy::WriteBack,
            ["none"] => WritePolicy::None,
            _ => return Err(bad),
        })
    }

    fn prefetch_policy(&mut self) -> Result<PrefetchPolicy, OpLogError> {
        let bad = OpLogError { line: 0, what: "a prefetch policy is malformed" };
        Ok(match self.word()?.split(':').collect::<Vec<_>>()[..] {
            ["best-effort"] => PrefetchPolicy::BestEffort,
            ["wait-complete"] => PrefetchPolicy::WaitComplete,
            ["timeout", base, per] => PrefetchPolicy::Timeout {
                base_ms: base.parse().map_err(|_| bad)?,
                per_ki_token_ms: per.parse().map_err(|_| bad)?,
            },
            ["adaptive"] => PrefetchPolicy::Adaptive,
            _ => return Err(bad),
        })
    }

    fn end(&mut self) -> Result<(), OpLogError> {
        match self.0.next() {
            None => Ok(()),
            Some(_) => Err(OpLogError { line: 0, what: "there are too many words" }),
        }
    }
}

impl FromStr for Op {
    type Err = OpLogError;

    fn from_str(line: &str) -> Result<Op, OpLogError> {
        let mut w = Words(line.split_ascii_whitespace());
        let op = match w.word()? {
            "namespace" => {
                Op::Namespace(Namespace { adapter: w.field()?, salt: w.field()?, user_key: w.field()? })
            }
            "request" => Op::Request(NamespaceId(w.number()?)),
            "match" => Op::Match(w.id()?, w.rest()?),
            "prefetch" => Op::Prefetch(w.id()?, w.rest()?),
            "poll" => Op::PollPrefetch(w.id()?),
            "load" => Op::LoadBack(w.id()?, w.number()?),
            "alloc" => Op::Alloc(w.id()?, w.number()?),
            "checkpoint" => {
                let (id, fence) = (w.id()?, w.fence()?);
                Op::Checkpoint(id, w.rest()?, fence)
            }
            "finish" => {
                let (id, fence) = (w.id()?, w.fence()?);
                Op::Finish(id, w.rest()?, fence)
            }
            "abort" => Op::Abort(w.id()?, w.fence()?),
            "launched" => Op::Launched(w.fence()?),
            "let-window-go" => Op::LetWindowGo(w.id()?, w.number()?),
            "hold-until" => Op::HoldUntil(w.id()?, Time(w.number()?)),
            "reset" => Op::Reset,
            "open-session" => Op::OpenSession,
            "close-session" => Op::CloseSession(SessionId(w.key()?)),
            "set-session" => Op::SetSession(w.id()?, SessionId(w.key()?)),
            "will-not-return" => Op::WillNotReturn(w.id()?),
            "answered" => Op::Answered(w.id()?, w.number()?),
            "expect" => Op::ExpectPrefix(w.id()?, w.rest()?),
            "detach-host" => Op::DetachHost,
            "attach-host" => Op::AttachHost(HostTier {
                pages: w.capacity()?,
                window: w.capacity()?,
                state: w.capacity()?,
                write: w.write_policy()?,
                exclusive: w.number::<u8>()? != 0,
                store: w.store()?,
            }),
            "new-store" => {
                let none = OpLogError { line: 0, what: "the store is missing" };
                Op::NewStore(w.store()?.ok_or(none)?)
            }
            "take-over" => Op::TakeOver(w.id()?, w.id()?),
            "rates" => Op::Rates(Rates {
                compute_ns_per_token: w.number()?,
                load_ns_per_token: w.number()?,
                load_latency_us: w.number()?,
            }),
            "prefetch-policy" => Op::PrefetchPolicy(w.prefetch_policy()?),
            "write-policy" => Op::WritePolicy(w.write_policy()?, w.number::<u8>()? != 0),
            "tick" => Op::Tick(Time(w.number()?)),
            "copied" => Op::Event(Event::Copied { op: w.op()?, ok: w.number::<u8>()? != 0 }),
            "layers" => Op::Event(Event::LayerCopied { op: w.op()?, layers: w.number()? }),
            "queried" => {
                let op = w.op()?;
                let present = match w.word()? {
                    "-" => None,
                    word => Some(word.trim_start_matches('=').chars().map(|c| c == '1').collect()),
                };
                Op::Event(Event::Queried { op, present })
            }
            "got" => Op::Event(Event::Got { op: w.op()?, batch: w.number()?, outcomes: w.outcomes()? }),
            "put" => Op::Event(Event::Put { op: w.op()?, batch: w.number()?, outcomes: w.outcomes()? }),
            _ => return Err(OpLogError { line: 0, what: "no such op" }),
        };
        w.end()?;
        Ok(op)
    }
}

const HEADER: &str = "sapwood-oplog-3";

impl fmt::Display for OpLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{HEADER}{}", config_text(&self.config))?;
        self.ops.iter().try_for_each(|op| writeln!(f, "{op}"))
    }
}

impl FromStr for OpLog {
    type Err = OpLogError;

    /// Reads a log. Empty lines and lines that start with `#` are skipped.
    fn from_str(text: &str) -> Result<OpLog, OpLogError> {
        let mut lines = text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty() && !l.starts_with('#'));
        let at = |line: usize| move |e: OpLogError| OpLogError { line: line + 1, ..e };
        let (first, header) = lines.next().ok_or(OpLogError { line: 1, what: "the log is empty" })?;
        let config = header
            .strip_prefix(HEADER)
            .ok_or(OpLogError { line: 0, what: "this is not an op log of this version" })
            .and_then(parse_config)
            .map_err(at(first))?;
        let ops = lines.map(|(i, line)| line.parse().map_err(at(i))).collect::<Result<_, _>>()?;
        Ok(OpLog { config, ops })
    }
}

fn capacity_of(word: &str) -> Result<Capacity, OpLogError> {
    match word {
        "unlimited" => Ok(Capacity::Unlimited),
        pages => pages
            .parse()
            .map(Capacity::Pages)
            .map_err(|_| OpLogError { line: 0, what: "a number of pages is malformed" }),
    }
}

fn capacity_text(capacity: Capacity) -> String {
    match capacity {
        Capacity::Pages(pages) => pages.to_string(),
        Capacity::Unlimited => "unlimited".to_owned(),
    }
}

fn write_policy_text(write: WritePolicy) -> String {
    match write {
        WritePolicy::WriteThrough { threshold } => format!("write-through:{threshold}"),
        WritePolicy::WriteThroughSelective => "write-through-selective".to_owned(),
        WritePolicy::WriteBack => "write-back".to_owned(),
        WritePolicy::None => "none".to_owned(),
    }
}

fn prefetch_policy_text(policy: PrefetchPolicy) -> String {
    match policy {
        PrefetchPolicy::BestEffort => "best-effort".to_owned(),
        PrefetchPolicy::WaitComplete => "wait-complete".to_owned(),
        PrefetchPolicy::Timeout { base_ms, per_ki_token_ms } => {
            format!("timeout:{base_ms}:{per_ki_token_ms}")
        }
        PrefetchPolicy::Adaptive => "adaptive".to_owned(),
    }
}

fn store_text(store: Option<&StoreConfig>, out: &mut String) {
    let Some(s) = store else { return words(out, ["-"]) };
    words(out, [s.batch_pages, s.pages_in_flight_max, s.queue_nodes_max, s.attempts_max]);
    words(out, [s.retry_ms, u64::from(s.uses_min), u64::from(s.tokens_min)]);
}

fn config_text(c: &CoreConfig) -> String {
    let mut out = format!(" {} {} {}", c.page_size, capacity_text(c.device), capacity_text(c.host));
    let p = &c.prefetch;
    words(&mut out, [write_policy_text(c.write), prefetch_policy_text(p.policy)]);
    words(&mut out, [p.threshold_tokens, p.batch_pages, p.window_batches, p.host_share_percent]);
    words(&mut out, [p.retry_ms, u64::from(p.attempts_max), p.repair_ms]);
    words(&mut out, [u32::from(c.exclusive), c.write_ahead_percent, c.loads_in_flight_max]);
    match c.window {
        None => words(&mut out, ["-"]),
        Some(w) => {
            words(&mut out, [w.span_pages.to_string(), capacity_text(w.device), capacity_text(w.host)])
        }
    }
    match c.state {
        None => words(&mut out, ["-"]),
        Some(s) => words(&mut out, [capacity_text(s.device), capacity_text(s.host)]),
    }
    store_text(c.store.as_ref(), &mut out);
    if c.eviction == Eviction::Adaptive {
        words(&mut out, ["adaptive"]);
    }
    out
}

fn parse_config(text: &str) -> Result<CoreConfig, OpLogError> {
    let bad = OpLogError { line: 0, what: "the configuration is malformed" };
    let mut w = Words(text.split_ascii_whitespace());
    let page_size = w.number()?;
    let (device, host) = (w.capacity()?, w.capacity()?);
    let write = w.write_policy()?;
    let policy = w.prefetch_policy()?;
    let prefetch = PrefetchConfig {
        policy,
        threshold_tokens: w.number()?,
        batch_pages: w.number()?,
        window_batches: w.number()?,
        host_share_percent: w.number()?,
        retry_ms: w.number()?,
        attempts_max: w.number()?,
        repair_ms: w.number()?,
    };
    let exclusive = w.number::<u8>()? != 0;
    let write_ahead_percent = w.number()?;
    let loads_in_flight_max = w.number()?;
    let window = match w.word()? {
        "-" => None,
        span => Some(WindowConfig {
            span_pages: span.parse().map_err(|_| bad)?,
            device: w.capacity()?,
            host: w.capacity()?,
        }),
    };
    let state = match w.word()? {
        "-" => None,
        device => Some(StateConfig { device: capacity_of(device)?, host: w.capacity()? }),
    };
    let store = w.store()?;
    // Logs of before there was a choice end here.
    let eviction = match w.word() {
        Ok("adaptive") => Eviction::Adaptive,
        Ok(_) => return Err(bad),
        Err(_) => Eviction::Lru,
    };
    w.end()?;
    Ok(CoreConfig {
        page_size,
        device,
        host,
        store,
        write,
        prefetch,
        exclusive,
        write_ahead_percent,
        loads_in_flight_max,
        window,
        state,
        eviction,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Op> {
        let id = RequestId(SlabKey { index: 3, generation: 7 });
        let op = OpId(9);
        let outcomes = vec![
            PageOutcome::Done,
            PageOutcome::Missing,
            PageOutcome::Corrupt,
            PageOutcome::Refused,
            PageOutcome::Failed,
        ];
        vec![
            Op::Namespace(Namespace {
                adapter: Some("a b\n=".to_owned()),
                salt: Some(String::new()),
                user_key: None,
            }),
            Op::Request(NamespaceId(1)),
            Op::Match(id, vec![1, 2, u32::MAX]),
            Op::Match(id, vec![]),
            Op::Prefetch(id, vec![5]),
            Op::PollPrefetch(id),
            Op::LoadBack(id, 7),
            Op::Rates(Rates { compute_ns_per_token: 1, load_ns_per_token: 2, load_latency_us: 3 }),
            Op::PrefetchPolicy(PrefetchPolicy::Adaptive),
            Op::WritePolicy(WritePolicy::WriteThrough { threshold: 2 }, true),
            Op::Alloc(id, 4),
            Op::Checkpoint(id, vec![1, 2], Fence::after(8)),
            Op::Finish(id, vec![], Fence::SETTLED),
            Op::Abort(id, Fence::after(u64::MAX)),
            Op::Launched(Fence::after(12)),
            Op::LetWindowGo(id, 2),
            Op::TakeOver(id, RequestId(SlabKey { index: 1, generation: 2 })),
            Op::HoldUntil(id, Time(9)),
            Op::Reset,
            Op::OpenSession,
            Op::CloseSession(SessionId(SlabKey { index: 1, generation: 2 })),
            Op::SetSession(id, SessionId(SlabKey { index: 0, generation: 9 })),
            Op::WillNotReturn(id),
            Op::Answered(id, 70),
            Op::ExpectPrefix(id, vec![4, 5]),
            Op::DetachHost,
            Op::AttachHost(HostTier {
                pages: Capacity::Pages(7),
                window: Capacity::Unlimited,
                state: Capacity::Pages(0),
                write: WritePolicy::WriteThroughSelective,
                exclusive: true,
                store: Some(StoreConfig::default()),
            }),
            Op::AttachHost(HostTier {
                pages: Capacity::Unlimited,
                window: Capacity::Pages(1),
                state: Capacity::Pages(2),
                write: WritePolicy::WriteBack,
                exclusive: false,
                store: None,
            }),
            Op::NewStore(StoreConfig { attempts_max: 9, ..StoreConfig::default() }),
            Op::Tick(Time(77)),
            Op::Event(Event::Copied { op, ok: true }),
            Op::Event(Event::LayerCopied { op, layers: 2 }),
            Op::Event(Event::Queried { op, present: None }),
            Op::Event(Event::Queried { op, present: Some(vec![]) }),
            Op::Event(Event::Queried { op, present: Some(vec![true, false]) }),
            Op::Event(Event::Got { op, batch: 1, outcomes: outcomes.clone() }),
            Op::Event(Event::Put { op, batch: 0, outcomes: vec![] }),
        ]
    }

    #[test]
    fn every_op_and_configuration_survives_the_text() {
        let plain = CoreConfig::device_only(16, Capacity::Unlimited);
        let full = CoreConfig {
            host: Capacity::Pages(5),
            store: Some(StoreConfig::default()),
            write: WritePolicy::WriteThrough { threshold: 3 },
            window: Some(WindowConfig {
                span_pages: 2,
                device: Capacity::Pages(9),
                host: Capacity::Unlimited,
            }),
            state: Some(StateConfig { device: Capacity::Pages(3), host: Capacity::Pages(0) }),
            ..CoreConfig::device_only(1, Capacity::Pages(4))
        };
        let learns = CoreConfig { eviction: Eviction::Adaptive, ..plain };
        for config in [plain, learns, full, CoreConfig { write: WritePolicy::WriteBack, ..full }] {
            let log = OpLog { config, ops: all() };
            assert_eq!(log.to_string().parse::<OpLog>(), Ok(log));
        }
    }

    #[test]
    fn a_bad_line_is_named() {
        let log = OpLog { config: CoreConfig::device_only(4, Capacity::Pages(8)), ops: vec![] };
        for line in [
            "nonsense",
            "alloc 1.2",
            "alloc 1 2",
            "match 0.0 x",
            "tick 1 2",
            "got 1 0 =x",
            "namespace - - =zz",
        ] {
            let text = format!("{log}# a remark\n\n{line}\n");
            let error = text.parse::<OpLog>().unwrap_err();
            assert_eq!(error.line, 4, "{line}: {error}");
        }
        assert_eq!("".parse::<OpLog>().unwrap_err().line, 1);
        assert_eq!("sapwood-oplog-9 1 2".parse::<OpLog>().unwrap_err().line, 1);
    }

    #[test]
    fn shrinking_keeps_what_fails() {
        let config = CoreConfig::device_only(4, Capacity::Pages(8));
        let mut ops: Vec<Op> = (0..100).map(|n| Op::Tick(Time(n))).collect();
        ops.insert(61, Op::Request(NamespaceId(0)));
        let small =
            OpLog { config, ops }.shrink(|log| log.replay(false).is_ok_and(|core| core.requests() == 1));
        assert_eq!(small.ops, [Op::Request(NamespaceId(0))]);
    }
}
