//! Carries out actions and brings back events. Decides nothing.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use smallvec::SmallVec;

use super::delivery::{Delivery, Lane, Moment, Schedule};
use super::gaps::{Gaps, Part, parts_of};
use super::lane::{Ended, Gap, LaneConfig, StoreLane};
use super::registration::{RankVotes, RegistrationError};
use super::report::StoreReport;
use crate::backend::device::{
    Completion, CopyJob, CopyPart, Device, DeviceError, Direction, Outcome, Submit, Transfer,
};
use crate::backend::host::HostArena;
use crate::backend::store::Store;
use crate::base::containers::Map;
use crate::base::{Fence, NamespaceId, OpId, PageId, Time};
use crate::key::PageHash;
use crate::pool::{Geometry, PlaneSet, PoolKind};
use crate::tiers::{Action, EndKey, Event, PagePair, StoreItem};

/// How long a modelled delivery waits for the real copy before it calls the executor stuck.
const STUCK_AFTER: Duration = Duration::from_secs(120);

/// Calls that wait for a worker of the store, above which it is not told what was used.
const TOUCH_WAITING_MAX: usize = 16;

/// Wakes the thread that waits for completions, and the embedder's.
#[derive(Clone)]
pub(super) struct Bell {
    ring: Sender<()>,
    hook: Option<Arc<dyn Fn() + Send + Sync>>,
}

impl std::fmt::Debug for Bell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Bell")
    }
}

impl Bell {
    pub(super) fn new(hook: Option<Arc<dyn Fn() + Send + Sync>>) -> (Bell, Receiver<()>) {
        let (ring, heard) = bounded(1);
        (Bell { ring, hook }, heard)
    }

    pub(super) fn ring(&self) {
        // A full channel means that it rings already.
        let _ = self.ring.try_send(());
        if let Some(hook) = &self.hook {
            hook();
        }
    }
}

/// Bytes moved so far, per direction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BytesMoved {
    /// Device to host.
    pub d2h: u64,
    /// Host to device.
    pub h2d: u64,
    /// Written to the store.
    pub store_put: u64,
    /// Read from the store.
    pub store_get: u64,
}

/// A copy that the device did not take yet.
#[derive(Debug)]
struct Copy {
    op: OpId,
    direction: Direction,
    parts: Vec<Part>,
    after: Fence,
}

/// A copy the device runs.
#[derive(Debug)]
struct InFlight {
    transfer: Transfer,
    layers_told: u32,
    parts: Vec<Part>,
}

pub(super) struct Executor {
    device: Box<dyn Device>,
    lane: Option<StoreLane>,
    lane_config: LaneConfig,
    /// The store that was taken away last; keeps its address from being used again.
    last_store: Option<Weak<dyn Store>>,
    votes: Box<dyn RankVotes>,
    /// Seeds of the namespaces that are known, for the next lane.
    namespaces: BTreeMap<NamespaceId, Option<[u8; 32]>>,
    gaps: Gaps,
    geometry: Arc<Geometry>,
    waiting: [VecDeque<Copy>; 2],
    /// How many of the copies to the host, from the back, wait for [`flush`](Executor::flush).
    held: usize,
    copies: BTreeMap<OpId, InFlight>,
    schedule: Option<Schedule>,
    /// Real ends that wait for their moment (modelled delivery).
    arrived: Map<EndKey, Event>,
    /// Events to hand out next.
    ready: VecDeque<Event>,
    completions: Vec<Completion>,
    heard: Receiver<()>,
    bytes: BytesMoved,
    device_faults: u64,
}

impl std::fmt::Debug for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executor")
            .field("copies", &self.copies)
            .field("lane", &self.lane)
            .finish_non_exhaustive()
    }
}

/// The real end of an operation did not come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stuck {
    pub(super) op: OpId,
}

impl Executor {
    pub(super) fn new(
        device: Box<dyn Device>,
        (lane, lane_config, votes): (Option<StoreLane>, LaneConfig, Box<dyn RankVotes>),
        geometry: Arc<Geometry>,
        delivery: Delivery,
        heard: Receiver<()>,
    ) -> Self {
        Executor {
            device,
            lane,
            lane_config,
            last_store: None,
            votes,
            namespaces: BTreeMap::new(),
            gaps: Gaps::default(),
            geometry,
            waiting: [VecDeque::new(), VecDeque::new()],
            held: 0,
            copies: BTreeMap::new(),
            schedule: match delivery {
                Delivery::AsCompleted => None,
                Delivery::Modelled(model) => Some(Schedule::new(model)),
            },
            arrived: Map::default(),
            ready: VecDeque::new(),
            completions: Vec::new(),
            heard,
            bytes: BytesMoved::default(),
            device_faults: 0,
        }
    }

    pub(super) fn bytes(&self) -> BytesMoved {
        self.bytes
    }

    pub(super) fn device_faults(&self) -> u64 {
        self.device_faults
    }

    pub(super) fn lane(&self) -> Option<&StoreLane> {
        self.lane.as_ref()
    }

    /// The fence behind all computation launched so far.
    pub(super) fn launched(&self) -> Fence {
        self.device.launched()
    }

    /// See [`Device::note_compute`].
    pub(super) fn note_compute(&mut self, stream: u64) -> Result<Fence, DeviceError> {
        self.device.note_compute(stream)
    }

    /// See [`Device::wait_layer`]. `Ok(false)` also for a load that the device has not taken yet.
    pub(super) fn wait_layer(&mut self, op: OpId, layer: u32, stream: u64) -> Result<bool, DeviceError> {
        match self.copies.get(&op) {
            Some(copy) => self.device.wait_layer(&copy.transfer, layer, stream),
            // Neither running nor waiting: it has ended, and the core will hear how.
            None => Ok(!self.waiting.iter().flatten().any(|copy| copy.op == op)),
        }
    }

    /// What the store has of the planes.
    pub(super) fn report(&self) -> StoreReport {
        self.lane.as_ref().map(StoreLane::report).unwrap_or_default()
    }

    /// Planes that a device page lacks.
    pub(super) fn device_gap(&self, pool: PoolKind, page: PageId) -> PlaneSet {
        self.gaps.device.get(&(pool, page)).copied().unwrap_or(PlaneSet::NONE)
    }

    /// Whether some device page lacks a plane.
    pub(super) fn has_device_gaps(&self) -> bool {
        !self.gaps.device.is_empty()
    }

    /// Pages that the engine will compute: they will lack nothing.
    pub(super) fn handed_out(&mut self, pool: PoolKind, pages: &[PageId]) {
        pages.iter().for_each(|page| {
            self.gaps.device.remove(&(pool, *page));
        });
    }

    /// Pages that will lack planes until they are handed out again.
    pub(super) fn will_lack(
        &mut self,
        pool: PoolKind,
        pages: impl Iterator<Item = PageId>,
        planes: PlaneSet,
    ) {
        self.gaps.device.extend(pages.map(|page| ((pool, page), planes)));
    }

    /// Takes the store away; see [`StoreLane::detach`]. `None` if a call does not end, or if there is none.
    pub(super) fn detach_store(&mut self, until: Instant) -> Option<Arc<dyn Store>> {
        match self.lane.take()?.detach(until) {
            Ok((ended, store)) => {
                self.last_store = Some(Arc::downgrade(&store));
                ended.into_iter().for_each(|e| self.lane_ended(e));
                Some(store)
            }
            Err(lane) => {
                self.lane = Some(*lane);
                None
            }
        }
    }

    /// Gives the cache a store, registered anew. `Ok(false)` if it has one.
    pub(super) fn attach_store(
        &mut self,
        store: Arc<dyn Store>,
        arena: &Arc<HostArena>,
    ) -> Result<bool, RegistrationError> {
        if self.lane.is_some() {
            return Ok(false);
        }
        let registered = self.lane_config.register(arena, store.as_ref(), self.votes.as_mut())?;
        match StoreLane::start(&self.lane_config, Arc::clone(&store), Arc::clone(arena), registered) {
            Ok(mut lane) => {
                self.namespaces.iter().for_each(|(id, seed)| lane.learn(*id, *seed));
                self.lane = Some(lane);
                Ok(true)
            }
            Err(failed) => {
                let (error, registered) = *failed;
                registered.detach(arena, store.as_ref());
                Err(RegistrationError::Thread(error))
            }
        }
    }

    /// Whether this is the store that was taken away last.
    pub(super) fn had_store(&self, store: &Arc<dyn Store>) -> bool {
        let address = |store: *const dyn Store| store.cast::<()>();
        self.last_store.as_ref().is_some_and(|last| address(last.as_ptr()) == address(Arc::as_ptr(store)))
    }

    /// Gives the device the memory of a host tier.
    pub(super) fn attach_host(&mut self, arena: &Arc<HostArena>) -> Result<(), DeviceError> {
        self.device.attach_host(Arc::clone(arena))
    }

    /// Takes it away. Nothing is in flight.
    pub(super) fn detach_host(&mut self) -> Result<(), DeviceError> {
        self.gaps.forget_host();
        self.device.detach_host()
    }

    /// Whether there is a store that wants to know what is used.
    pub(super) fn takes_touches(&self) -> bool {
        self.lane.as_ref().is_some_and(StoreLane::takes_touches)
    }

    /// Tells the store of pages that were used. Under modelled delivery what it is told must not depend on how busy it is.
    pub(super) fn touch(&mut self, namespace: NamespaceId, hashes: Vec<PageHash>) {
        let waiting_max = if self.schedule.is_some() { usize::MAX } else { TOUCH_WAITING_MAX };
        if let Some(lane) = &mut self.lane {
            lane.touch(namespace, hashes, waiting_max);
        }
    }

    /// The store is asked under the names of this epoch when it is attached next.
    pub(super) fn set_weights_epoch(&mut self, epoch: u64) {
        self.lane_config.identity.weights_epoch = epoch;
    }

    /// Waits until something has ended, a millisecond at most.
    pub(super) fn wait_a_moment(&self) {
        // The bell ends the wait early; the time-out only covers a device without one.
        let _ = self.heard.recv_timeout(Duration::from_millis(1));
    }

    fn lane_ended(&mut self, ended: Ended) {
        self.gaps.read(&ended.read);
        match &ended.event {
            Event::Got { .. } => self.bytes.store_get += ended.bytes,
            Event::Put { .. } => self.bytes.store_put += ended.bytes,
            _ => {}
        }
        self.ended(ended.event);
    }

    pub(super) fn learn(&mut self, namespace: NamespaceId, seed: Option<[u8; 32]>) {
        self.namespaces.insert(namespace, seed);
        if let Some(lane) = &mut self.lane {
            lane.learn(namespace, seed);
        }
    }

    /// Starts an action at time `now`. Never blocks.
    pub(super) fn start(&mut self, action: Action, now: Time) {
        self.schedule_action(&action, now);
        match action {
            Action::CopyToHost { op, pairs, after } => self.copy(op, Direction::DeviceToHost, &pairs, after),
            Action::CopyToDevice { op, pairs, after } => {
                self.copy(op, Direction::HostToDevice, &pairs, after)
            }
            Action::StoreQuery { op, namespace, hashes, pools } => {
                match self.lane.as_mut().filter(|l| l.is_open()) {
                    Some(lane) => lane.query(op, namespace, hashes, pools),
                    None => self.ended(Event::Queried { op, present: None }),
                }
            }
            Action::StoreGet { op, namespace, batch, items } => {
                match self.lane.as_mut().filter(|l| l.is_open()) {
                    Some(lane) => lane.get(op, namespace, batch, items),
                    None => self.ended(Event::Got { op, batch, outcomes: Vec::new() }),
                }
            }
            Action::StorePut { op, namespace, batch, items } => {
                match self.lane.as_mut().filter(|l| l.is_open()) {
                    Some(lane) => {
                        let gap = |item: &StoreItem| {
                            let (pool, page) = (item.pool, item.host_page);
                            Some(Gap { pool, page, planes: *self.gaps.host.get(&(pool, page))? })
                        };
                        let lacking = items.iter().filter_map(gap).collect();
                        lane.put(op, namespace, batch, items, lacking);
                    }
                    None => self.ended(Event::Put { op, batch, outcomes: Vec::new() }),
                }
            }
            Action::StoreCancel { op } => {
                // Under modelled delivery a call must not end by when the cancel happened to reach it.
                if self.schedule.is_none()
                    && let Some(lane) = &mut self.lane
                {
                    lane.cancel(op);
                }
            }
        }
    }

    fn schedule_action(&mut self, action: &Action, now: Time) {
        let Some(schedule) = &mut self.schedule else { return };
        let page_bytes = PoolKind::ALL.map(|pool| self.geometry.page_bytes(pool));
        let copied = |pairs: &[PagePair]| pairs.iter().map(|pair| page_bytes[pair.pool.index()]).sum();
        let stored = |items: &[StoreItem]| items.iter().map(|item| page_bytes[item.pool.index()]).sum();
        match action {
            Action::CopyToHost { op, pairs, .. } => {
                schedule.issue(now, Lane::ToHost, copied(pairs), EndKey::Copy(*op), 1);
            }
            Action::CopyToDevice { op, pairs, .. } => {
                let layers = self.geometry.model_layers();
                schedule.issue(now, Lane::ToDevice, copied(pairs), EndKey::Copy(*op), layers);
            }
            Action::StoreQuery { op, .. } => schedule.issue(now, Lane::Get, 0, EndKey::Query(*op), 1),
            Action::StoreGet { op, batch, items, .. } => {
                schedule.issue(now, Lane::Get, stored(items), EndKey::Get(*op, *batch), 1);
            }
            Action::StorePut { op, batch, items, .. } => {
                schedule.issue(now, Lane::Put, stored(items), EndKey::Put(*op, *batch), 1);
            }
            Action::StoreCancel { .. } => {}
        }
    }

    fn copy(&mut self, op: OpId, direction: Direction, pairs: &[PagePair], after: Fence) {
        let copy = Copy { op, direction, parts: parts_of(pairs), after };
        if direction == Direction::HostToDevice {
            // The pages of a load are shown from its start.
            self.gaps.copied(direction, &copy.parts);
        }
        let queue = queue_of(direction);
        self.waiting[queue].push_back(copy);
        // Nobody waits for a backup, and a device wants few large submissions (its wake-up or launch costs the scheduler's
        // thread 5 to 10 us): those of a step leave together. A load is waited for.
        if queue == TO_HOST {
            self.held += 1;
            if self.held == 1 {
                // Whoever only ticks when it is woken has to be.
                self.ring();
            }
        } else {
            self.submit_waiting();
        }
    }

    /// Wakes the owner.
    pub(super) fn ring(&self) {
        self.lane_config.bell.ring();
    }

    /// Whether copies to the host wait for [`flush`](Executor::flush).
    pub(super) fn holds(&self) -> bool {
        self.held > 0
    }

    /// Hands the device the copies to the host that were decided since the last time.
    pub(super) fn flush(&mut self) {
        if std::mem::take(&mut self.held) > 0 {
            self.submit_waiting();
        }
    }

    /// Submits what the device takes, in order per direction.
    fn submit_waiting(&mut self) {
        for queue in 0..self.waiting.len() {
            let held = if queue == TO_HOST { self.held } else { 0 };
            while self.waiting[queue].len() > held
                && let Some(copy) = self.waiting[queue].pop_front()
            {
                let op = copy.op;
                let submitted = {
                    let parts: SmallVec<[CopyPart<'_>; 3]> =
                        copy.parts.iter().map(Part::all_planes).collect();
                    let by_layer = copy.direction == Direction::HostToDevice;
                    let job = CopyJob { op, direction: copy.direction, parts: &parts, by_layer };
                    self.device.submit(&job, copy.after)
                };
                match submitted {
                    Ok(Submit::Refused(_)) => {
                        self.waiting[queue].push_front(copy);
                        break;
                    }
                    Ok(Submit::Started(transfer)) => {
                        self.copies.insert(op, InFlight { transfer, layers_told: 0, parts: copy.parts });
                    }
                    // Not taken, so the pages were not touched.
                    Err(error) => {
                        tracing::error!(%error, ?op, "sapwood: the device refused a copy");
                        self.device_faults += 1;
                        self.ended(Event::Copied { op, ok: false });
                    }
                }
            }
        }
    }

    /// Takes in what really happened.
    fn collect(&mut self) {
        let mut completions = std::mem::take(&mut self.completions);
        if let Err(error) = self.device.poll(&mut completions) {
            tracing::error!(%error, "sapwood: polling the device failed");
            self.device_faults += 1;
        }
        for completion in completions.drain(..) {
            self.copy_completed(completion);
        }
        self.completions = completions;
        self.submit_waiting();
        let mut ended = Vec::new();
        if let Some(lane) = &mut self.lane {
            lane.drain(|e| ended.push(e));
        }
        ended.into_iter().for_each(|e| self.lane_ended(e));
        if self.schedule.is_none() {
            self.tell_layers();
        }
    }

    fn copy_completed(&mut self, completion: Completion) {
        let copy = self.copies.remove(&completion.op);
        let ok = match completion.outcome {
            Outcome::Done => {
                match completion.direction {
                    Direction::DeviceToHost => self.bytes.d2h += completion.bytes,
                    Direction::HostToDevice => self.bytes.h2d += completion.bytes,
                    Direction::DeviceToDevice => {}
                }
                if let Some(copy) = copy.filter(|_| completion.direction == Direction::DeviceToHost) {
                    self.gaps.copied(completion.direction, &copy.parts);
                }
                true
            }
            Outcome::Failed(fault) => {
                self.device_faults += 1;
                if !fault.quiescent {
                    // The end of the copy is not proved: the operation keeps its pages, for good.
                    tracing::error!(op = ?completion.op, "sapwood: a copy can not be proved to have ended");
                    return;
                }
                false
            }
        };
        self.ended(Event::Copied { op: completion.op, ok });
    }

    /// Progress of loads, as far as it is new.
    fn tell_layers(&mut self) {
        for (&op, copy) in &mut self.copies {
            let layers = copy.transfer.layers_ready();
            if layers > copy.layers_told {
                copy.layers_told = layers;
                self.ready.push_back(Event::LayerCopied { op, layers });
            }
        }
    }

    fn ended(&mut self, event: Event) {
        match (&self.schedule, event.end_key()) {
            (Some(_), Some(key)) => {
                self.arrived.insert(key, event);
            }
            _ => self.ready.push_back(event),
        }
    }

    /// The next event by `now`, with its moment. Under modelled delivery this may wait for a real copy.
    pub(super) fn next_event(&mut self, now: Time) -> Result<Option<(Time, Event)>, Stuck> {
        if self.schedule.is_none() {
            if self.ready.is_empty() {
                self.collect();
            }
            return Ok(self.ready.pop_front().map(|event| (now, event)));
        }
        let Some((at, moment)) = self.schedule.as_mut().and_then(|s| s.pop_due(now)) else { return Ok(None) };
        match moment {
            Moment::Layers { op, layers } => {
                self.wait_for(EndKey::Copy(op))?;
                Ok(Some((at, Event::LayerCopied { op, layers })))
            }
            Moment::End(key) => {
                self.wait_for(key)?;
                Ok(self.arrived.remove(&key).map(|event| (at, event)))
            }
        }
    }

    /// When the next event is due; `None` under real delivery.
    pub(super) fn next_due(&self) -> Option<Time> {
        self.schedule.as_ref().and_then(Schedule::next_due)
    }

    fn wait_for(&mut self, key: EndKey) -> Result<(), Stuck> {
        let until = Instant::now() + STUCK_AFTER;
        self.flush();
        loop {
            self.collect();
            if self.arrived.contains_key(&key) {
                return Ok(());
            }
            if Instant::now() >= until {
                let (EndKey::Copy(op) | EndKey::Query(op) | EndKey::Get(op, _) | EndKey::Put(op, _)) = key;
                return Err(Stuck { op });
            }
            self.wait_a_moment();
        }
    }

    /// An operation has ended for the core.
    pub(super) fn forget(&mut self, op: OpId) {
        if let Some(lane) = &mut self.lane {
            lane.forget(op);
        }
    }

    /// Waits up to `wait_max` for the device; see [`Device::close`].
    pub(super) fn close(&mut self, wait_max: Duration) -> u32 {
        self.device.close(wait_max).unfinished
    }
}

/// Index of the copies to the host in [`Executor::waiting`].
const TO_HOST: usize = 0;

fn queue_of(direction: Direction) -> usize {
    usize::from(direction == Direction::HostToDevice)
}
