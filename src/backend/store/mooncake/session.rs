//! The session with the real client: who we are to it, what it has mapped, and whether it is there.
//!
//! A session has an epoch. When the real client is lost, calls fail at once; a thread tries again, under a new
//! client id, hands every region over again, and only then opens the next epoch. Nothing that began in one epoch
//! goes on in another: its addresses may mean nothing there.

use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::conn::{CallError, Conn, Peer, hand_over};
use super::wire::{self, ClientId, Function, Request};
use super::{MooncakeConfig, MooncakeError};
use crate::backend::region::{Mapping, Region, Sharing};
use crate::backend::store::envelope::HEADER_BYTES;
use crate::backend::store::gate::locked;
use crate::backend::store::regions::{HeldSpans, RegionToken, Regions, RegisterError};
use crate::backend::store::{Health, Outcome, Span, TransportCause};

/// Objects of one call to the service.
pub(super) const ITEMS_PER_CALL: usize = 64;
/// Calls of a lane under way at a time: one on each connection, and one whose answer is being looked at.
pub(super) const CALLS_AHEAD: usize = 3;
const SLOTS_PER_LANE: usize = ITEMS_PER_CALL * CALLS_AHEAD;

/// Where the session stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Up,
    Down,
    Closed,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    epoch: u64,
    client: ClientId,
    peer: Arc<Peer>,
    /// Somebody met an answer that a forgotten session would give: ask now.
    doubted: bool,
}

/// Connections and the header slots that go with them. One call of the store at a time holds it.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) conn: Conn,
    /// Made by [`Session::widen`]. The real client runs the calls of one connection one after the other, and between
    /// two of them it talks to the master while nothing is copied.
    second: Option<Conn>,
    pub(super) epoch: u64,
    pub(super) client: ClientId,
    slots: usize,
    peer: Arc<Peer>,
}

impl Lane {
    /// The connection that carries a batch's call number `index`.
    pub(super) fn conn_of(&mut self, index: usize) -> &mut Conn {
        match &mut self.second {
            Some(second) if !index.is_multiple_of(2) => second,
            _ => &mut self.conn,
        }
    }
}

#[derive(Debug, Default)]
struct Lanes {
    idle: Vec<Lane>,
    /// Slot blocks of no lane.
    free: Vec<usize>,
}

/// A segment that the real client has mapped, or shall have mapped.
#[derive(Debug)]
struct Segment {
    token: RegionToken,
    region: Arc<Region>,
    holds: usize,
}

/// What callers and the keeper thread share.
#[derive(Debug)]
pub(super) struct Session {
    config: MooncakeConfig,
    ipc_name: String,
    state: Mutex<State>,
    /// Rings when the phase changes.
    changed: Condvar,
    lanes: Mutex<Lanes>,
    lane_free: Condvar,
    pub(super) regions: Regions,
    /// Locked while segments are handed over, so that no region misses a new epoch.
    segments: Mutex<Vec<Segment>>,
    headers: Arc<Region>,
    header_spans: Regions,
    header_token: RegionToken,
    keeper: Mutex<Option<JoinHandle<()>>>,
}

impl Session {
    pub(super) fn open(config: MooncakeConfig) -> Result<Arc<Session>, MooncakeError> {
        let lanes = config.calls_max.clamp(1, 256);
        let mapping = Mapping { sharing: Sharing::Shared, ..Mapping::default() };
        let headers = Arc::new(Region::map(lanes * SLOTS_PER_LANE * HEADER_BYTES, mapping)?);
        let header_spans = Regions::default();
        let header_token = header_spans.register(&headers);
        let ipc_name = config
            .ipc_name
            .clone()
            .unwrap_or_else(|| format!("@mooncake_client_{}.sock", config.client.port()));
        let state = State {
            phase: Phase::Down,
            epoch: 0,
            client: ClientId::default(),
            peer: Arc::new(Peer::unknown()),
            doubted: false,
        };
        let session = Arc::new(Session {
            config,
            ipc_name,
            state: Mutex::new(state),
            changed: Condvar::new(),
            lanes: Mutex::new(Lanes { idle: Vec::new(), free: (0..lanes).collect() }),
            lane_free: Condvar::new(),
            regions: Regions::default(),
            segments: Mutex::default(),
            headers,
            header_spans,
            header_token,
            keeper: Mutex::default(),
        });
        session.connect()?;
        let kept = Arc::clone(&session);
        let keeper = std::thread::Builder::new()
            .name("sapwood-mooncake".to_owned())
            .spawn(move || kept.keep())
            .map_err(MooncakeError::Thread)?;
        *locked(&session.keeper) = Some(keeper);
        Ok(session)
    }

    /// One attempt at a new epoch: dial, probe the release, hand over all segments, say that we live.
    fn connect(&self) -> Result<(), MooncakeError> {
        let wait_max = self.config.connect_wait_max;
        let unreachable = |cause: CallError| MooncakeError::Unreachable {
            address: self.config.client,
            cause: cause.cause(),
        };
        let mut conn = Conn::dial(self.config.client, wait_max).map_err(unreachable)?;
        let client = new_client_id()?;
        let until = Some(Instant::now() + wait_max);
        probe(&mut conn, client, until)?;
        let segments = locked(&self.segments);
        let peer = self.map(client, &self.headers)?;
        for segment in segments.iter() {
            self.map(client, &segment.region)?;
        }
        self.ask(&mut conn, client, until).map_err(unreachable)?;
        let mut state = locked(&self.state);
        if state.phase != Phase::Closed {
            let (epoch, peer) = (state.epoch + 1, Arc::new(peer));
            *state = State { phase: Phase::Up, epoch, client, peer, doubted: false };
            tracing::info!(epoch = state.epoch, client = %self.config.client, "sapwood: mooncake session is up");
        }
        drop(segments);
        self.changed.notify_all();
        Ok(())
    }

    /// Hands one region over.
    fn map(&self, client: ClientId, region: &Region) -> Result<Peer, MooncakeError> {
        let bytes = region.mapped_bytes() as u64;
        let fd = region.fd().ok_or(MooncakeError::NotShared { bytes })?;
        let base = region.base().as_ptr() as u64;
        match hand_over(&self.ipc_name, client, base, bytes, fd, self.config.connect_wait_max) {
            Ok(Ok(peer)) => Ok(peer),
            Ok(Err(code)) => Err(MooncakeError::SegmentRefused { bytes, code }),
            Err(e) => Err(MooncakeError::Unreachable { address: self.config.client, cause: e.cause() }),
        }
    }

    /// The keeper thread: pings while the session is up, tries again while it is down.
    fn keep(&self) {
        let mut pings: Option<(u64, Conn)> = None;
        loop {
            let (epoch, client) = {
                let state = locked(&self.state);
                let wait = match state.phase {
                    Phase::Closed => return,
                    Phase::Up => self.config.ping_every,
                    Phase::Down => self.config.retry_every,
                };
                let phase = state.phase;
                let (mut state, _) = self
                    .changed
                    .wait_timeout_while(state, wait, |s| s.phase == phase && !s.doubted)
                    .unwrap_or_else(std::sync::PoisonError::into_inner);
                state.doubted = false;
                match state.phase {
                    Phase::Closed => return,
                    Phase::Up => (state.epoch, state.client),
                    Phase::Down => (0, state.client),
                }
            };
            if epoch == 0 {
                pings = None;
                if let Err(error) = self.connect() {
                    tracing::debug!(%error, "sapwood: mooncake is still away");
                }
            } else if let Err(error) = self.ping(epoch, client, &mut pings) {
                self.lose(epoch, error);
            }
        }
    }

    fn ping(&self, epoch: u64, client: ClientId, pings: &mut Option<(u64, Conn)>) -> Result<(), CallError> {
        let wait_max = self.config.connect_wait_max;
        if pings.as_ref().is_none_or(|(e, _)| *e != epoch) {
            *pings = Some((epoch, Conn::dial(self.config.client, wait_max)?));
        }
        let Some((_, conn)) = pings else { return Err(CallError::Protocol) };
        self.ask(conn, client, Some(Instant::now() + wait_max))
    }

    /// Says that we live, and asks whether our memory is mapped: a client that was forgotten is still told that it is
    /// well, but its segments are gone.
    fn ask(&self, conn: &mut Conn, client: ClientId, until: Option<Instant>) -> Result<(), CallError> {
        let ping = Request::new(&wire::PING, 0).client(client);
        if conn.call(&wire::PING, ping, until, |r| r.ping())? != Ok(CLIENT_IS_WELL) {
            return Err(CallError::Protocol);
        }
        let base = self.headers.base().as_ptr() as u64;
        let mapped = Request::new(&wire::IS_MAPPED, 0).number(base).client(client);
        match conn.call(&wire::IS_MAPPED, mapped, until, |r| r.yes())? {
            Ok(true) => Ok(()),
            Ok(false) | Err(_) => Err(CallError::Lost(0)),
        }
    }

    /// An address of ours was not known there. The keeper asks at once, and starts over if that is how it is.
    pub(super) fn doubt(&self) {
        locked(&self.state).doubted = true;
        self.changed.notify_all();
    }

    /// The real client of `epoch` is lost. Does nothing if a later epoch has begun.
    pub(super) fn lose(&self, epoch: u64, error: CallError) {
        let mut state = locked(&self.state);
        if state.phase == Phase::Up && state.epoch == epoch {
            state.phase = Phase::Down;
            tracing::warn!(epoch, %error, "sapwood: mooncake is lost; calls fail until it is back");
            drop(state);
            self.changed.notify_all();
            let mut lanes = locked(&self.lanes);
            while let Some(lane) = lanes.idle.pop() {
                lanes.free.push(lane.slots);
            }
            self.lane_free.notify_all();
        }
    }

    pub(super) fn epoch(&self) -> u64 {
        locked(&self.state).epoch
    }

    pub(super) fn health(&self) -> Health {
        match locked(&self.state).phase {
            Phase::Up => Health::Up,
            Phase::Down => Health::Down,
            Phase::Closed => Health::Closed,
        }
    }

    /// A lane of the present epoch. Waits while all are in use, until `until`.
    pub(super) fn lane(&self, until: Option<Instant>) -> Result<Lane, Outcome> {
        let lost = Outcome::Transport(TransportCause::Disconnected);
        let slots = {
            let mut lanes = locked(&self.lanes);
            loop {
                let epoch = match *locked(&self.state) {
                    State { phase: Phase::Up, epoch, .. } => epoch,
                    State { phase: Phase::Down, .. } => return Err(lost),
                    State { phase: Phase::Closed, .. } => return Err(Outcome::Closed),
                };
                match lanes.idle.pop() {
                    Some(lane) if lane.epoch == epoch => return Ok(lane),
                    Some(stale) => lanes.free.push(stale.slots),
                    None => {}
                }
                if let Some(slots) = lanes.free.pop() {
                    break slots;
                }
                let left = until.map(|at| at.saturating_duration_since(Instant::now()));
                if left.is_some_and(|left| left.is_zero()) {
                    return Err(Outcome::Timeout);
                }
                let wait = left.unwrap_or(Duration::from_secs(1));
                lanes = self
                    .lane_free
                    .wait_timeout(lanes, wait)
                    .unwrap_or_else(std::sync::PoisonError::into_inner)
                    .0;
            }
        };
        let (epoch, client, peer) = {
            let state = locked(&self.state);
            (state.epoch, state.client, Arc::clone(&state.peer))
        };
        match Conn::dial(self.config.client, self.config.connect_wait_max) {
            Ok(conn) => Ok(Lane { conn, second: None, epoch, client, slots, peer }),
            Err(error) => {
                self.free_slots(slots);
                self.lose(epoch, error);
                Err(Outcome::Transport(error.cause()))
            }
        }
    }

    /// Gives a lane its second connection. Without one it does its calls in turn; if the real client is lost, the
    /// first connection tells.
    pub(super) fn widen(&self, lane: &mut Lane) {
        if lane.second.is_none() {
            lane.second = Conn::dial(self.config.client, self.config.connect_wait_max).ok();
        }
    }

    /// Gives a lane back for the next call.
    pub(super) fn keep_lane(&self, lane: Lane) {
        let mut lanes = locked(&self.lanes);
        match locked(&self.state).epoch == lane.epoch {
            true => lanes.idle.push(lane),
            false => lanes.free.push(lane.slots),
        }
        drop(lanes);
        self.lane_free.notify_one();
    }

    /// Ends a lane that owes an answer nobody waits for. Its connections end with it, and the answer.
    pub(super) fn drop_lane(&self, lane: Lane) {
        self.free_slots(lane.slots);
    }

    fn free_slots(&self, slots: usize) {
        locked(&self.lanes).free.push(slots);
        self.lane_free.notify_one();
    }

    /// Ends a lane of which a connection failed. If bytes were being moved, returns only when nobody moves them any
    /// more: the process at the other end has ended, or it has let go of our segments, which it does only when no
    /// transfer is using them.
    pub(super) fn give_up_lane(&self, lane: Lane, error: CallError, moving: bool) {
        self.lose(lane.epoch, error);
        if moving {
            let mut waited = Duration::ZERO;
            while !self.let_go(&lane) {
                std::thread::sleep(SETTLE_STEP);
                waited += SETTLE_STEP;
                if waited.as_millis().is_multiple_of(10_000) {
                    tracing::warn!(
                        epoch = lane.epoch,
                        "sapwood: the real client may still use our memory; waiting"
                    );
                }
            }
        }
        self.free_slots(lane.slots);
    }

    fn let_go(&self, lane: &Lane) -> bool {
        if lane.peer.has_ended() == Some(true) {
            return true;
        }
        let wait_max = self.config.connect_wait_max;
        match Conn::dial(self.config.client, wait_max) {
            Ok(mut conn) => {
                let request = Request::new(&wire::UNMAP, 0).client(lane.client);
                // Any answer was given under the lock that excludes transfers.
                conn.call(&wire::UNMAP, request, Some(Instant::now() + wait_max), |r| r.done()).is_ok()
            }
            // Nobody listens: where the system can not say so itself, that is the end of the process.
            Err(CallError::Lost(errno)) => {
                errno == rustix::io::Errno::CONNREFUSED.raw_os_error() && lane.peer.has_ended().is_none()
            }
            Err(_) => false,
        }
    }

    /// Header slot `index` of a lane.
    pub(super) fn slot(&self, lane: &Lane, index: usize) -> Result<HeldSpans, Outcome> {
        let offset = (lane.slots * SLOTS_PER_LANE + index) * HEADER_BYTES;
        self.header_spans.resolve(&[Span { region: self.header_token, offset, len: HEADER_BYTES }])
    }

    pub(super) fn register(&self, region: &Arc<Region>) -> Result<RegionToken, RegisterError> {
        let mut segments = locked(&self.segments);
        if let Some(known) = segments.iter_mut().find(|s| Arc::ptr_eq(&s.region, region)) {
            known.holds += 1;
            return Ok(known.token);
        }
        if region.fd().is_none() || region.is_empty() {
            return Err(RegisterError::WrongArena);
        }
        let (phase, epoch, client) = {
            let state = locked(&self.state);
            (state.phase, state.epoch, state.client)
        };
        match phase {
            Phase::Closed => return Err(RegisterError::Closed),
            Phase::Down => return Err(RegisterError::Refused { code: wire::code::RPC }),
            Phase::Up => {}
        }
        match self.map(client, region) {
            Ok(_) => {}
            Err(MooncakeError::SegmentRefused { code, .. }) => return Err(RegisterError::Refused { code }),
            Err(_) => {
                drop(segments);
                self.lose(epoch, CallError::Lost(0));
                return Err(RegisterError::Refused { code: wire::code::RPC });
            }
        }
        let token = self.regions.register(region);
        segments.push(Segment { token, region: Arc::clone(region), holds: 1 });
        Ok(token)
    }

    pub(super) fn unregister(&self, token: RegionToken) -> Result<(), RegisterError> {
        let mut segments = locked(&self.segments);
        let at = segments.iter().position(|s| s.token == token).ok_or(RegisterError::Unknown(token))?;
        segments[at].holds -= 1;
        if segments[at].holds > 0 {
            return Ok(());
        }
        let segment = segments.swap_remove(at);
        self.regions.unregister(token)?;
        let (up, client) = {
            let state = locked(&self.state);
            (state.phase == Phase::Up, state.client)
        };
        // A real client that is away has nothing mapped, and one that does not answer will find out that we
        // are gone; either way the region is not ours any more.
        if up && let Ok(mut conn) = Conn::dial(self.config.client, self.config.connect_wait_max) {
            let base = segment.region.base().as_ptr() as u64;
            let request = Request::new(&wire::UNREGISTER, 0).number(base).client(client);
            let until = Some(Instant::now() + self.config.connect_wait_max);
            if let Err(error) = conn.call(&wire::UNREGISTER, request, until, |r| r.done()) {
                tracing::warn!(%error, "sapwood: mooncake did not confirm that a segment is unmapped");
            }
        }
        Ok(())
    }

    /// Ends the session: the real client lets go of everything, the keeper ends. Idempotent.
    pub(super) fn close(&self) {
        let (was, client) = {
            let mut state = locked(&self.state);
            (std::mem::replace(&mut state.phase, Phase::Closed), state.client)
        };
        self.changed.notify_all();
        self.lane_free.notify_all();
        if let Some(keeper) = locked(&self.keeper).take() {
            // It returns after at most one attempt to connect; a panic of it has nothing to tell.
            let _ = keeper.join();
        }
        if was == Phase::Up
            && let Ok(mut conn) = Conn::dial(self.config.client, self.config.connect_wait_max)
        {
            let request = Request::new(&wire::UNMAP, 0).client(client);
            let until = Some(Instant::now() + self.config.connect_wait_max);
            // Unheard, it unmaps us ten seconds after our last ping.
            let _ = conn.call(&wire::UNMAP, request, until, |r| r.done());
        }
        locked(&self.lanes).idle.clear();
        locked(&self.segments).clear();
        self.regions.clear();
    }
}

/// State in the answer to a ping: it knows us.
const CLIENT_IS_WELL: i32 = 1;
/// Pause between two looks whether the real client has let go of our memory.
const SETTLE_STEP: Duration = Duration::from_millis(20);
/// A key that no object has.
const PROBE_KEY: &str = "sapwood-probe";

/// Calls every function that carries data once, so that it does nothing. A release with other types refuses.
fn probe(conn: &mut Conn, client: ClientId, until: Option<Instant>) -> Result<(), MooncakeError> {
    fn check<T>(function: &Function, result: Result<T, CallError>) -> Result<(), MooncakeError> {
        match result {
            Ok(_) => Ok(()),
            Err(cause) => {
                Err(MooncakeError::UnknownRelease { function: function.name, cause: cause.cause() })
            }
        }
    }
    let none = || std::iter::empty::<&str>();
    let rows = || std::iter::empty::<std::iter::Empty<u64>>();
    check(&wire::READY, conn.call(&wire::READY, Request::new(&wire::READY, 0), until, |r| r.done()))?;
    let put = Request::new(&wire::PUT, 0).texts(none()).numbers(rows()).numbers(rows());
    let put = put.put_options(false).int(0).client(client);
    check(&wire::PUT, conn.call(&wire::PUT, put, until, |r| r.each(0, |v| v.nothing())))?;
    let get = Request::new(&wire::GET, 0).texts(none()).numbers(rows()).numbers(rows());
    let get = get.flag(false).int(0).client(client);
    check(&wire::GET, conn.call(&wire::GET, get, until, |r| r.each(0, |v| v.int64())))?;
    let exist = Request::new(&wire::EXIST, 0).texts(none());
    check(&wire::EXIST, conn.call(&wire::EXIST, exist, until, |r| r.each(0, |v| v.flag())))?;
    let remove = Request::new(&wire::REMOVE, 0).texts(none()).flag(true);
    check(&wire::REMOVE, conn.call(&wire::REMOVE, remove, until, |r| r.each(0, |v| v.nothing())))?;
    let size = Request::new(&wire::SIZE, PROBE_KEY.len()).text(PROBE_KEY);
    check(&wire::SIZE, conn.call(&wire::SIZE, size, until, |r| r.number()))
}

fn new_client_id() -> Result<ClientId, MooncakeError> {
    let mut id = [0; 16];
    let mut at = 0;
    while at < id.len() {
        at += rustix::rand::getrandom(&mut id[at..], rustix::rand::GetRandomFlags::empty())
            .map_err(|e| MooncakeError::Thread(e.into()))?;
    }
    Ok(ClientId(id))
}
