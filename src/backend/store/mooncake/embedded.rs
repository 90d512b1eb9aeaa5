//! Mooncake inside this process: a client library that the user built, loaded at run time.
//!
//! The library has a C interface of 19 functions; no registry carries it, so it is named by path and probed when
//! the store is opened: a missing file or function is an error value. Any memory will do, but it has to be
//! registered, also where the transport would not care: with RDMA it would.
//!
//! The interface moves one piece of memory per object, so a page is two objects: the payload under its name, from
//! and to the caller's memory, and its envelope under the name with `-h` behind it. Only both are a page. A payload
//! in several pieces passes through memory of the store.
#![expect(unsafe_code, reason = "calls a C library; each block says why its pointers are good")]

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::PathBuf;
use std::ptr;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use libloading::Library;

use super::{LEASE, MooncakeError, OBJECT_BYTES_EFFICIENT, name_of, outcome_of_code};
use crate::backend::identity::{NamespaceDigest, StoreKey};
use crate::backend::region::Region;
use crate::backend::store::batch::{Call, Item, Outcome, Span};
use crate::backend::store::envelope::{HEADER_BYTES, Header, payload_crc};
use crate::backend::store::gate::{Gate, locked};
use crate::backend::store::regions::{HeldSpans, RegionToken, Regions, RegisterError};
use crate::backend::store::sealed::outcome_of;
use crate::backend::store::stats::{Counters, Health, OpKind, StoreStats};
use crate::backend::store::{ArenaNeed, Caps, Overwrite, Store, StoreEpoch, StoreError, TransportCause};

/// Objects of one call to the library.
const ITEMS_PER_CALL: usize = 64;

/// Where the library is and what it is set up with.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EmbeddedConfig {
    /// `libmooncake_store.so`.
    pub library: PathBuf,
    /// Name of this host to the others, with a port.
    pub local_hostname: String,
    /// Metadata server; `P2PHANDSHAKE` for none.
    pub metadata_server: String,
    /// Address of the master.
    pub master: String,
    /// `tcp` or `rdma`.
    pub protocol: String,
    /// Devices for `rdma`.
    pub device: String,
    /// Memory that this process gives to the pool, in bytes.
    pub segment_bytes: u64,
    /// Memory the library keeps for itself, in bytes.
    pub local_buffer_bytes: u64,
    /// Calls under way at a time; more wait.
    pub calls_max: usize,
    /// Bytes of a payload in several pieces, at most.
    pub scattered_bytes_max: usize,
}

impl EmbeddedConfig {
    /// TCP, no metadata server, 1 GiB for the pool.
    #[must_use]
    pub fn at(library: impl Into<PathBuf>, local_hostname: &str, master: &str) -> EmbeddedConfig {
        EmbeddedConfig {
            library: library.into(),
            local_hostname: local_hostname.to_owned(),
            metadata_server: "P2PHANDSHAKE".to_owned(),
            master: master.to_owned(),
            protocol: "tcp".to_owned(),
            device: String::new(),
            segment_bytes: 1 << 30,
            local_buffer_bytes: 64 << 20,
            calls_max: 4,
            scattered_bytes_max: 8 << 20,
        }
    }
}

type Handle = *mut c_void;
type Names = *const *const c_char;

/// The functions that are used, by the names of the library. They stay good while `_library` is loaded.
struct Api {
    destroy: unsafe extern "C" fn(Handle),
    put: unsafe extern "C" fn(
        Handle,
        Names,
        *const *mut c_void,
        *const usize,
        usize,
        *const c_void,
        *mut c_int,
    ) -> c_int,
    get: unsafe extern "C" fn(Handle, Names, *const *mut c_void, *const usize, usize, *mut i64) -> c_int,
    exist: unsafe extern "C" fn(Handle, Names, usize, *mut c_int) -> c_int,
    size: unsafe extern "C" fn(Handle, *const c_char) -> i64,
    remove: unsafe extern "C" fn(Handle, *const c_char, c_int) -> c_int,
    remove_matching: unsafe extern "C" fn(Handle, *const c_char, c_int) -> i64,
    register: unsafe extern "C" fn(Handle, *mut c_void, usize) -> c_int,
    unregister: unsafe extern "C" fn(Handle, *mut c_void) -> c_int,
    health: unsafe extern "C" fn(Handle) -> c_int,
    handle: Handle,
    _library: Library,
}

// SAFETY: the interface may be used from any thread and from several at a time (its own bindings release the
// interpreter around every call); the handle is freed once, when nobody can call any more.
unsafe impl Send for Api {}
// SAFETY: as above.
unsafe impl Sync for Api {}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api").field("handle", &self.handle).finish_non_exhaustive()
    }
}

impl Drop for Api {
    fn drop(&mut self) {
        // SAFETY: made by the library, freed once, the library is still loaded.
        unsafe { (self.destroy)(self.handle) };
    }
}

fn text(s: &str) -> Result<CString, MooncakeError> {
    CString::new(s).map_err(|_| MooncakeError::Thread(std::io::ErrorKind::InvalidInput.into()))
}

impl Api {
    fn load(config: &EmbeddedConfig) -> Result<Api, MooncakeError> {
        let path = &config.library;
        let no_library =
            |e: libloading::Error| MooncakeError::Library { path: path.clone(), reason: e.to_string() };
        // SAFETY: the user names the library; its initialisers are as trusted as this program.
        let library = unsafe { Library::new(path) }.map_err(no_library)?;
        macro_rules! function {
            ($name:literal) => {{
                // SAFETY: declared as in the header of the library.
                let symbol = unsafe { library.get($name) };
                *symbol.map_err(no_library)?
            }};
        }
        let create: unsafe extern "C" fn() -> Handle = function!(b"mooncake_store_create\0");
        let setup: unsafe extern "C" fn(
            Handle,
            *const c_char,
            *const c_char,
            u64,
            u64,
            *const c_char,
            *const c_char,
            *const c_char,
        ) -> c_int = function!(b"mooncake_store_setup\0");
        let (host, metadata) = (text(&config.local_hostname)?, text(&config.metadata_server)?);
        let (protocol, device, master) =
            (text(&config.protocol)?, text(&config.device)?, text(&config.master)?);
        let mut api = Api {
            destroy: function!(b"mooncake_store_destroy\0"),
            put: function!(b"mooncake_store_batch_put_from\0"),
            get: function!(b"mooncake_store_batch_get_into\0"),
            exist: function!(b"mooncake_store_batch_is_exist\0"),
            size: function!(b"mooncake_store_get_size\0"),
            remove: function!(b"mooncake_store_remove\0"),
            remove_matching: function!(b"mooncake_store_remove_by_regex\0"),
            register: function!(b"mooncake_store_register_buffer\0"),
            unregister: function!(b"mooncake_store_unregister_buffer\0"),
            health: function!(b"mooncake_store_health_check\0"),
            handle: ptr::null_mut(),
            _library: library,
        };
        // SAFETY: no arguments.
        api.handle = unsafe { create() };
        if api.handle.is_null() {
            return Err(MooncakeError::Setup { code: 0 });
        }
        // SAFETY: a live handle and NUL-terminated texts that live to the end of the call.
        let code = unsafe {
            setup(
                api.handle,
                host.as_ptr(),
                metadata.as_ptr(),
                config.segment_bytes,
                config.local_buffer_bytes,
                protocol.as_ptr(),
                device.as_ptr(),
                master.as_ptr(),
            )
        };
        if code == 0 { Ok(api) } else { Err(MooncakeError::Setup { code }) }
    }

    /// Puts objects of one piece each. One code per object.
    fn put(&self, pieces: &[Piece]) -> Vec<i32> {
        let (names, buffers, sizes) = columns(pieces);
        let mut codes = vec![TRANSFER_FAILED as c_int; pieces.len()];
        // SAFETY: as many names, buffers, sizes and codes as the count says; names live through `pieces`; the
        // buffers are held and registered, and nobody writes them during the call.
        let all = unsafe {
            (self.put)(
                self.handle,
                names.as_ptr(),
                buffers.as_ptr(),
                sizes.as_ptr(),
                pieces.len(),
                ptr::null(),
                codes.as_mut_ptr(),
            )
        };
        if all != 0 && codes.iter().all(|&c| c == 0) {
            codes.fill(all);
        }
        codes
    }

    /// Reads objects of one piece each: bytes, or a code below zero.
    fn get(&self, pieces: &[Piece]) -> Vec<i64> {
        let (names, buffers, sizes) = columns(pieces);
        let mut answers = vec![i64::from(TRANSFER_FAILED); pieces.len()];
        // SAFETY: as for `put`, and nobody else touches the buffers during the call.
        let _ = unsafe {
            (self.get)(
                self.handle,
                names.as_ptr(),
                buffers.as_ptr(),
                sizes.as_ptr(),
                pieces.len(),
                answers.as_mut_ptr(),
            )
        };
        answers
    }

    fn exist(&self, names: &[CString]) -> Vec<i32> {
        let pointers: Vec<_> = names.iter().map(|n| n.as_ptr()).collect();
        let mut answers = vec![TRANSFER_FAILED as c_int; names.len()];
        // SAFETY: as many names and answers as the count says.
        let _ = unsafe { (self.exist)(self.handle, pointers.as_ptr(), names.len(), answers.as_mut_ptr()) };
        answers
    }

    fn size(&self, name: &CString) -> i64 {
        // SAFETY: a live handle and a NUL-terminated name.
        unsafe { (self.size)(self.handle, name.as_ptr()) }
    }

    fn remove(&self, name: &CString) -> i32 {
        // SAFETY: as above.
        unsafe { (self.remove)(self.handle, name.as_ptr(), 1) }
    }

    fn register(&self, region: &Region) -> i32 {
        // SAFETY: the region is kept until it is unregistered or the library is closed.
        unsafe { (self.register)(self.handle, region.base().as_ptr().cast(), region.mapped_bytes()) }
    }

    fn unregister(&self, region: &Region) -> i32 {
        // SAFETY: registered with this address.
        unsafe { (self.unregister)(self.handle, region.base().as_ptr().cast()) }
    }
}

/// Answer of an object that the library said nothing about.
const TRANSFER_FAILED: i32 = -800;

/// A name and one run of memory.
struct Piece {
    name: CString,
    at: *mut u8,
    len: usize,
}

fn columns(pieces: &[Piece]) -> (Vec<*const c_char>, Vec<*mut c_void>, Vec<usize>) {
    let names = pieces.iter().map(|p| p.name.as_ptr()).collect();
    let buffers = pieces.iter().map(|p| p.at.cast()).collect();
    (names, buffers, pieces.iter().map(|p| p.len).collect())
}

/// Names of payload and envelope. A name is hexadecimal digits, so it holds no NUL.
fn names(key: &StoreKey) -> (CString, CString) {
    let payload = name_of(key);
    let envelope = format!("{payload}-h");
    (CString::new(payload).unwrap_or_default(), CString::new(envelope).unwrap_or_default())
}

/// Memory of the store for envelopes and scattered payloads: one block per call under way.
#[derive(Debug)]
struct Blocks {
    region: Arc<Region>,
    spans: Regions,
    token: RegionToken,
    block_bytes: usize,
    free: Mutex<Vec<usize>>,
    freed: Condvar,
    /// Guards the room for one envelope behind the last block.
    peek: Mutex<()>,
}

impl Blocks {
    fn span(&self, block: usize, offset: usize, len: usize) -> Result<HeldSpans, Outcome> {
        let offset = block * self.block_bytes + offset;
        self.spans.resolve(&[Span { region: self.token, offset, len }])
    }

    fn take(&self, call: &Call) -> Result<usize, Outcome> {
        let mut free = locked(&self.free);
        loop {
            if let Some(block) = free.pop() {
                return Ok(block);
            }
            if let Some(stopped) = call.stopped() {
                return Err(stopped);
            }
            let wait = call.left().unwrap_or(Duration::from_secs(1)).min(Duration::from_millis(50));
            free = self.freed.wait_timeout(free, wait).unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }

    fn give(&self, block: usize) {
        locked(&self.free).push(block);
        self.freed.notify_one();
    }
}

/// See the [module](self).
#[derive(Debug)]
pub struct EmbeddedStore {
    /// Before everything it may still use: fields are dropped in order.
    api: Api,
    blocks: Blocks,
    regions: Regions,
    held: Mutex<Vec<(RegionToken, Arc<Region>, usize)>>,
    scattered_bytes_max: usize,
    counters: Counters,
    gate: Gate,
}

/// An item, its memory, and the two runs that the library is given.
struct Object<'a> {
    item: &'a Item,
    memory: HeldSpans,
    envelope: HeldSpans,
    /// The payload in memory of the store, if the caller's is in several pieces.
    bounce: Option<HeldSpans>,
}

impl Object<'_> {
    fn payload(&self) -> &HeldSpans {
        self.bounce.as_ref().unwrap_or(&self.memory)
    }

    /// The envelope, then the payload if there is one.
    fn pieces(&self) -> impl Iterator<Item = Piece> {
        let (payload, envelope) = names(&self.item.key);
        let piece = |name: &CString, held: &HeldSpans| {
            let run = held.spans().iter().find(|s| s.len > 0)?;
            Some(Piece { name: name.clone(), at: run.as_ptr(), len: run.len })
        };
        [piece(&envelope, &self.envelope), piece(&payload, self.payload())].into_iter().flatten()
    }
}

impl EmbeddedStore {
    /// Loads the library and joins the pool.
    pub fn open(config: &EmbeddedConfig) -> Result<EmbeddedStore, MooncakeError> {
        let blocks = config.calls_max.clamp(1, 64);
        let block_bytes = (ITEMS_PER_CALL * HEADER_BYTES + config.scattered_bytes_max).next_multiple_of(4096);
        let region = Arc::new(Region::anonymous(blocks * block_bytes + HEADER_BYTES)?);
        let api = Api::load(config)?;
        let code = api.register(&region);
        if code != 0 {
            return Err(MooncakeError::SegmentRefused { bytes: region.len() as u64, code });
        }
        let spans = Regions::default();
        let token = spans.register(&region);
        let free = Mutex::new((0..blocks).collect());
        Ok(EmbeddedStore {
            api,
            blocks: Blocks {
                region,
                spans,
                token,
                block_bytes,
                free,
                freed: Condvar::new(),
                peek: Mutex::default(),
            },
            regions: Regions::default(),
            held: Mutex::default(),
            scattered_bytes_max: config.scattered_bytes_max,
            counters: Counters::default(),
            gate: Gate::default(),
        })
    }

    /// Payload bytes of a key, or why there is no page.
    fn look(&self, key: &StoreKey, there: i32) -> Outcome {
        match there {
            1 => {}
            0 => return Outcome::Missing,
            code => return outcome_of_code(code),
        }
        match self.api.size(&names(key).0) {
            n if n >= 0 => Outcome::Ok(n as usize),
            // Only the envelope: a page without bytes, or half a page that somebody is writing or removing.
            -704 => self.look_inside(key),
            code => outcome_of_code(code as i32),
        }
    }

    /// Whether the envelope without a payload is that of a page without bytes.
    fn look_inside(&self, key: &StoreKey) -> Outcome {
        let _peek = locked(&self.blocks.peek);
        let offset = self.blocks.region.len() - HEADER_BYTES;
        let span = Span { region: self.blocks.token, offset, len: HEADER_BYTES };
        let Ok(held) = self.blocks.spans.resolve(&[span]) else { return Outcome::Missing };
        let at = held.spans()[0].as_ptr();
        let answer = self.api.get(&[Piece { name: names(key).1, at, len: HEADER_BYTES }]);
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        held.append_to(&mut bytes);
        match (answer[0] == HEADER_BYTES as i64, Header::decode(&bytes)) {
            (true, Ok(header)) if header.key == *key && header.payload_bytes == 0 => Outcome::Ok(0),
            _ => Outcome::Missing,
        }
    }

    fn query_all(&self, keys: &[StoreKey]) -> Vec<Outcome> {
        let envelopes: Vec<CString> = keys.iter().map(|k| names(k).1).collect();
        let there = self.api.exist(&envelopes);
        keys.iter().zip(there).map(|(key, there)| self.look(key, there)).collect()
    }

    /// The objects of a chunk, each with its envelope slot; `Err` at the place of an item that has no memory.
    fn objects<'a>(&self, block: usize, items: &'a [Item]) -> Vec<Result<Object<'a>, Outcome>> {
        let mut used = ITEMS_PER_CALL * HEADER_BYTES;
        let one = |(slot, item): (usize, &'a Item)| {
            let memory = self.regions.resolve(&item.spans)?;
            let envelope = self.blocks.span(block, slot * HEADER_BYTES, HEADER_BYTES)?;
            let pieces = memory.spans().iter().filter(|s| s.len > 0).count();
            let bounce = match pieces > 1 {
                true if memory.len() > self.scattered_bytes_max => {
                    return Err(Outcome::Transport(TransportCause::Errno(libc::E2BIG)));
                }
                true => {
                    // A chunk has room for one scattered payload of the largest size; see `chunks`.
                    let span = self.blocks.span(block, used, memory.len())?;
                    used += memory.len();
                    Some(span)
                }
                false => None,
            };
            Ok(Object { item, memory, envelope, bounce })
        };
        items.iter().enumerate().map(one).collect()
    }

    /// Cuts a batch so that envelopes and scattered payloads of a chunk fit one block.
    fn chunks<'a>(&self, items: &'a [Item]) -> impl Iterator<Item = &'a [Item]> {
        let max = self.scattered_bytes_max;
        let mut rest = items;
        std::iter::from_fn(move || {
            let (mut n, mut scattered) = (0, 0_usize);
            while n < rest.len().min(ITEMS_PER_CALL) {
                let bytes = if rest[n].spans.len() > 1 { rest[n].len().min(max) } else { 0 };
                if n > 0 && scattered + bytes > max {
                    break;
                }
                scattered += bytes;
                n += 1;
            }
            let (head, tail) = rest.split_at(n);
            rest = tail;
            (!head.is_empty()).then_some(head)
        })
    }

    fn by_chunks(
        &self,
        items: &[Item],
        call: &Call,
        run: impl Fn(&[Result<Object<'_>, Outcome>]) -> Vec<Outcome>,
    ) -> Vec<Outcome> {
        let mut out = Vec::with_capacity(items.len());
        for chunk in self.chunks(items) {
            let stopped = call.stopped().map_or_else(|| self.blocks.take(call), Err);
            match stopped {
                Ok(block) => {
                    out.extend(run(&self.objects(block, chunk)));
                    self.blocks.give(block);
                }
                Err(outcome) => out.extend(std::iter::repeat_n(outcome, chunk.len())),
            }
        }
        out
    }

    fn put_chunk(&self, objects: &[Result<Object<'_>, Outcome>]) -> Vec<Outcome> {
        let mut out: Vec<Outcome> = Vec::with_capacity(objects.len());
        let mut seen: Vec<StoreKey> = Vec::new();
        let mut pieces = Vec::new();
        for object in objects {
            let object = match object {
                Ok(object) => object,
                Err(outcome) => {
                    out.push(*outcome);
                    continue;
                }
            };
            let key = object.item.key;
            let present = self.query_all(std::slice::from_ref(&key))[0];
            let same = present == Outcome::Ok(object.memory.len());
            if same {
                self.counters.put_present.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            } else if present.is_ok() {
                self.forget(&key);
            }
            out.push(Outcome::Ok(object.memory.len()));
            if same || seen.contains(&key) {
                continue;
            }
            seen.push(key);
            if let Some(bounce) = &object.bounce {
                let mut at = 0;
                for run in object.memory.runs() {
                    bounce.fill(at, run);
                    at += run.len();
                }
            }
            let crc = payload_crc(object.memory.runs());
            let header = Header::new(key, object.item.space, object.memory.len() as u64, crc);
            object.envelope.fill(0, &header.encode());
            pieces.extend(object.pieces().map(|p| (out.len() - 1, p)));
        }
        let (owners, pieces): (Vec<usize>, Vec<Piece>) = pieces.into_iter().unzip();
        for (owner, code) in owners.into_iter().zip(self.api.put(&pieces)) {
            if code != 0 && code != -705 && out[owner].is_ok() {
                out[owner] = outcome_of_code(code);
                if let Ok(object) = &objects[owner] {
                    // Half a page helps nobody.
                    self.forget(&object.item.key);
                }
            }
        }
        out
    }

    fn get_chunk(&self, objects: &[Result<Object<'_>, Outcome>]) -> Vec<Outcome> {
        // A payload of another length must not be written, so lengths are compared first.
        let keys: Vec<StoreKey> = objects.iter().flatten().map(|o| o.item.key).collect();
        let mut lengths = self.query_all(&keys).into_iter();
        let mut out: Vec<Outcome> = objects
            .iter()
            .map(|object| match object {
                Err(outcome) => *outcome,
                Ok(object) => match lengths.next().unwrap_or(Outcome::Missing) {
                    Outcome::Ok(stored) if stored != object.memory.len() => Outcome::SizeMismatch { stored },
                    other => other,
                },
            })
            .collect();
        let wanted: Vec<usize> = (0..out.len()).filter(|&i| out[i].is_ok()).collect();
        let pieces: Vec<(usize, Piece)> = wanted
            .iter()
            .filter_map(|&i| Some((i, objects[i].as_ref().ok()?)))
            .flat_map(|(i, object)| object.pieces().map(move |p| (i, p)))
            .collect();
        let (owners, pieces): (Vec<usize>, Vec<Piece>) = pieces.into_iter().unzip();
        let answers = self.api.get(&pieces);
        for ((owner, piece), answer) in owners.iter().zip(&pieces).zip(answers) {
            if answer < 0 {
                out[*owner] = outcome_of_code(answer as i32);
            } else if answer as usize != piece.len {
                out[*owner] = Outcome::Corrupt;
            }
        }
        for i in wanted {
            if let (true, Ok(object)) = (out[i].is_ok(), &objects[i]) {
                out[i] = check(object);
            }
        }
        out
    }

    fn forget(&self, key: &StoreKey) -> i32 {
        let (payload, envelope) = names(key);
        // The envelope first: without it there is no page.
        let code = self.api.remove(&envelope);
        let _ = self.api.remove(&payload);
        code
    }

    fn batch<T>(
        &self,
        op: OpKind,
        of: &[T],
        call: &Call,
        run: impl FnOnce() -> Vec<Outcome>,
    ) -> Vec<Outcome> {
        let Some(_inside) = self.gate.enter() else { return vec![Outcome::Closed; of.len()] };
        let out = match call.stopped() {
            Some(stopped) => vec![stopped; of.len()],
            None if of.is_empty() => Vec::new(),
            None => run(),
        };
        self.counters.count(op, &out);
        out
    }
}

/// Whether what arrived is what was asked for, and in its place.
fn check(object: &Object<'_>) -> Outcome {
    let mut bytes = Vec::with_capacity(HEADER_BYTES);
    object.envelope.append_to(&mut bytes);
    let (item, memory) = (object.item, &object.memory);
    let header = match Header::decode(&bytes).and_then(|h| h.check(&item.key, &item.space).map(|()| h)) {
        Ok(header) => header,
        Err(defect) => return outcome_of(defect),
    };
    if header.payload_bytes != memory.len() as u64
        || header.payload_crc != payload_crc(object.payload().runs())
    {
        return Outcome::Corrupt;
    }
    if let Some(bounce) = &object.bounce {
        bounce.runs().for_each(|run| memory.fill(0, run));
    }
    Outcome::Ok(memory.len())
}

impl Store for EmbeddedStore {
    fn caps(&self) -> Caps {
        Caps {
            name: "mooncake-embedded",
            zero_copy: true,
            align: 1,
            object_bytes_efficient: OBJECT_BYTES_EFFICIENT,
            object_bytes_max: u32::MAX as usize,
            batch_items_efficient: ITEMS_PER_CALL,
            overwrite: Overwrite::KeepsOld,
            lease: Some(LEASE),
            evicts: true,
            durable: false,
            shared: true,
            arena: ArenaNeed::AnyMemory,
        }
    }

    fn register(&self, region: &Arc<Region>) -> Result<RegionToken, RegisterError> {
        let _inside = self.gate.enter().ok_or(RegisterError::Closed)?;
        let mut held = locked(&self.held);
        if let Some((token, _, holds)) = held.iter_mut().find(|(_, r, _)| Arc::ptr_eq(r, region)) {
            *holds += 1;
            return Ok(*token);
        }
        match self.api.register(region) {
            0 => {}
            -600 => return Err(RegisterError::Overlap),
            code => return Err(RegisterError::Refused { code }),
        }
        let token = self.regions.register(region);
        held.push((token, Arc::clone(region), 1));
        Ok(token)
    }

    fn unregister(&self, token: RegionToken) -> Result<(), RegisterError> {
        let mut held = locked(&self.held);
        let at = held.iter().position(|(t, ..)| *t == token).ok_or(RegisterError::Unknown(token))?;
        held[at].2 -= 1;
        if held[at].2 > 0 {
            return Ok(());
        }
        let (_, region, _) = held.swap_remove(at);
        self.regions.unregister(token)?;
        match self.api.unregister(&region) {
            0 => Ok(()),
            code => Err(RegisterError::Refused { code }),
        }
    }

    fn query(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
        self.batch(OpKind::Query, keys, call, || self.query_all(keys))
    }

    fn get(&self, items: &[Item], call: &Call) -> Vec<Outcome> {
        self.batch(OpKind::Get, items, call, || {
            let mut out = self.by_chunks(items, call, |objects| self.get_chunk(objects));
            // A replacement or a removal may have run into the read. What is damaged is so the second time too.
            for (item, outcome) in items.iter().zip(&mut out).filter(|(_, o)| **o == Outcome::Corrupt) {
                *outcome = self.by_chunks(std::slice::from_ref(item), call, |o| self.get_chunk(o))[0];
                if *outcome == Outcome::Corrupt {
                    self.forget(&item.key);
                }
            }
            out
        })
    }

    fn put(&self, items: &[Item], call: &Call) -> Vec<Outcome> {
        self.batch(OpKind::Put, items, call, || {
            self.by_chunks(items, call, |objects| self.put_chunk(objects))
        })
    }

    fn remove(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
        self.batch(OpKind::Remove, keys, call, || {
            let sizes = self.query_all(keys);
            let removed = |(key, size): (&StoreKey, Outcome)| match (size, size.is_ok()) {
                (_, true) => match self.forget(key) {
                    0 => size,
                    code => outcome_of_code(code),
                },
                (other, false) => other,
            };
            keys.iter().zip(sizes).map(removed).collect()
        })
    }

    /// See [`super::MooncakeStore`].
    fn clear(&self, namespace: NamespaceDigest, _call: &Call) -> Result<u64, StoreError> {
        let _inside = self.gate.enter().ok_or(StoreError::Closed)?;
        let mut removed = 0;
        // Envelopes first, and only they are counted.
        for (pattern, counts) in [("-h", true), ("", false)] {
            let pattern = text(&format!("{}{pattern}$", super::pattern_of(&namespace)))
                .map_err(|_| StoreError::Unsupported { op: "clear" })?;
            // SAFETY: a live handle and a NUL-terminated pattern.
            let n = unsafe { (self.api.remove_matching)(self.api.handle, pattern.as_ptr(), 1) };
            match u64::try_from(n) {
                Ok(n) if counts => removed += n,
                Ok(_) => {}
                Err(_) => {
                    let cause = TransportCause::Remote(n as i32);
                    return Err(StoreError::Remote { op: "clear", cause });
                }
            }
        }
        self.counters.removed.fetch_add(removed, std::sync::atomic::Ordering::Relaxed);
        Ok(removed)
    }

    fn sync(&self, _call: &Call) -> Result<(), StoreError> {
        self.gate.enter().map(drop).ok_or(StoreError::Closed)
    }

    fn health(&self) -> Health {
        if self.gate.is_closed() {
            return Health::Closed;
        }
        // SAFETY: a live handle.
        if unsafe { (self.api.health)(self.api.handle) } == 0 { Health::Up } else { Health::Down }
    }

    fn stats(&self) -> StoreStats {
        self.counters.snapshot()
    }

    fn epoch(&self) -> StoreEpoch {
        StoreEpoch(1)
    }

    fn close(&self, deadline: Instant) -> Result<(), StoreError> {
        self.gate.close(deadline)?;
        self.release();
        Ok(())
    }
}

impl EmbeddedStore {
    /// Unregisters everything, last first. Nobody is inside.
    fn release(&self) {
        let mut held = locked(&self.held);
        while let Some((token, region, _)) = held.pop() {
            let code = self.api.unregister(&region);
            let known = self.regions.unregister(token);
            if code != 0 || known.is_err() {
                tracing::warn!(code, "sapwood: mooncake did not let go of a region");
            }
        }
        self.regions.clear();
    }
}

impl Drop for EmbeddedStore {
    fn drop(&mut self) {
        self.release();
        let _ = self.api.unregister(&self.blocks.region);
    }
}
