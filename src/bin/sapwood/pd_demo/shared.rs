//! What both children share: the model, the content of pages, the clock, and the lines of the router.

use std::hash::{BuildHasher, Hasher};
use std::io::{BufRead, Write};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use sapwood::backend::device::{Mode, SoftDevice, SoftOptions};
use sapwood::backend::region::{Mapping, Region, Sharing};
use sapwood::backend::transport::Memory;
use sapwood::base::{PageId, Time};
use sapwood::engine::PrefixCache;
use sapwood::engine::remote::{ModelShape, layer_first_layout};
use sapwood::pd::layout::Layout;
use sapwood::pd::topo::Topology;
use sapwood::pd::wire::Prompt;
use sapwood::pd::{Incarnation, RoomKey};
use sapwood::pool::{Capacities, Capacity, Geometry, Plane, PlaneId};
use sapwood::tiers::WritePolicy;

use super::{Args, DemoError};

pub(super) const PAGE_TOKENS: u32 = 16;
const HEADS: u32 = 8;
const HEAD_BYTES: u32 = 128;
/// Conversations that rooms continue; each has a text of its own from the first token on.
const CONVERSATIONS: u64 = 12;

/// A staging ring on decode, and as much in buffers on prefill.
pub(super) const STAGE_BYTES: u64 = 16 << 20;
/// Pages of a block: half of the heads of 8 pages are a MiB with 8 layers.
pub(super) const STAGE_PAGES: u32 = 8;

/// Tensor-parallel ranks of a prefill instance. Decode ranks hold all heads.
pub(super) fn prefill_ranks(args: &Args) -> u32 {
    if args.staging { 2 } else { 1 }
}

/// The shape of the instances of a role.
pub(super) fn topology(args: &Args, ranks: u32) -> Topology {
    Topology { tp: ranks, ..Topology::single(args.layers) }
}

/// A rank: the device whose memory is written or read by others, the cache over it, and what is published.
pub(super) struct Rank {
    pub(super) device: SoftDevice,
    pub(super) cache: PrefixCache,
    pub(super) layout: Layout,
    /// The device, and behind its regions one for staging.
    pub(super) memory: Memory,
    /// That one.
    pub(super) stage: Option<Arc<Region>>,
}

impl Rank {
    /// One of `ranks` ranks: K and V of every layer with its part of the heads, 32 KiB per page and layer altogether; a
    /// host tier of the same size behind it.
    pub(super) fn new(args: &Args, ranks: u32, sharing: Sharing) -> Result<Rank, DemoError> {
        let heads = HEADS / ranks;
        let plane = Plane::target(args.layers, heads * HEAD_BYTES);
        let geometry = Arc::new(Geometry::builder(PAGE_TOKENS).plane(plane).build()?);
        let mapping = Mapping { sharing, ..Mapping::PRIVATE };
        let options = SoftOptions { mapping, ..SoftOptions::new(Mode::Threaded) };
        let pages = Capacity::Pages(args.pages);
        let device = SoftDevice::new(geometry.clone(), Capacities::full(pages), options)?;
        let shape =
            ModelShape { model: 1, heads_total: HEADS, heads_here: heads, first_layer: 0, window_tokens: 0 };
        let layout = layer_first_layout(&geometry, |pool| device.memory().pages(pool), shape)?;
        let cache = PrefixCache::builder(geometry)
            .device(device.clone())
            .host_pages(pages)
            .write_policy(WritePolicy::WriteThrough { threshold: 1 })
            .build()?;
        let mut memory = Memory::of(device.memory());
        let stage =
            args.staging.then(|| Region::map(STAGE_BYTES as usize, mapping)).transpose()?.map(Arc::new);
        if let Some(region) = &stage {
            memory = memory.with(region.clone());
        }
        Ok(Rank { device, cache, layout, memory, stage })
    }
}

/// Drawn by the seed that the standard library gives each process.
pub(super) fn incarnation() -> Incarnation {
    Incarnation(std::collections::hash_map::RandomState::new().build_hasher().finish() | 1)
}

/// The prompt of a room: the beginning of a conversation, then something of its own.
pub(super) fn tokens_of(key: RoomKey, n: u32) -> Vec<u32> {
    let mixed = key.room.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let conversation = ((mixed >> 33) % CONVERSATIONS) as u32;
    let shared = (mixed >> 45) as u32 % (n + 1);
    let word = |i: u32| {
        let own = i >= shared;
        let salt = if own { key.room as u32 * 31 + key.epoch + 5000 } else { conversation };
        (salt.wrapping_mul(0x85EB_CA6B) ^ i.wrapping_mul(0x9E37_79B1)) & 0x7FFF_FFFF
    };
    (0..n).map(word).collect()
}

pub(super) fn prompt(key: RoomKey, tokens: u32) -> Prompt {
    Prompt { tokens, digest: key.room.wrapping_mul(31).wrapping_add(u64::from(key.epoch)) }
}

/// What the KV of a page depends on: every token up to its end.
pub(super) fn page_hashes(tokens: &[u32]) -> Vec<u64> {
    let mut h = 0u64;
    let fold = |h: u64, t: &u32| (h ^ u64::from(*t)).wrapping_mul(0x0000_0100_0000_01B3).rotate_left(23);
    tokens
        .chunks(PAGE_TOKENS as usize)
        .map(|page| {
            h = page.iter().fold(h, fold);
            h
        })
        .collect()
}

fn word(hash: u64, index: u64) -> [u8; 8] {
    (hash ^ index.wrapping_mul(0x9E37_79B9_7F4A_7C15)).wrapping_mul(0xBF58_476D_1CE4_E5B9).to_le_bytes()
}

/// Writes the part of a page that one of `ranks` ranks holds, as the model would: of every row its own heads. False if
/// the memory refuses.
pub(super) fn fill(
    device: &SoftDevice,
    page: PageId,
    hash: u64,
    (rank, ranks): (u32, u32),
    buffer: &mut [u8],
) -> bool {
    let row_words = u64::from(HEADS * HEAD_BYTES / 8);
    let part_words = row_words / u64::from(ranks);
    for (i, w) in (0u64..).zip(buffer.chunks_exact_mut(8)) {
        let (row, within) = (i / part_words, i % part_words);
        w.copy_from_slice(&word(hash, row * row_words + u64::from(rank) * part_words + within));
    }
    device.memory().write(PlaneId(0), page, 0, buffer).is_ok()
}

/// Whether a page holds what the model would have written.
pub(super) fn equals(device: &SoftDevice, page: PageId, hash: u64, buffer: &mut [u8]) -> bool {
    device.memory().read(PlaneId(0), page, 0, buffer).is_ok()
        && (0u64..).zip(buffer.chunks_exact(8)).all(|(i, w)| w == word(hash, i))
}

pub(super) struct Clock(Instant);

impl Clock {
    pub(super) fn new() -> Clock {
        Clock(Instant::now())
    }

    pub(super) fn now(&self) -> Time {
        Time(self.0.elapsed().as_micros() as u64 + 1)
    }
}

/// Tells the router. When it is gone its end of the other pipe is, too, and the loop ends by that.
pub(super) fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// Lines of the router. The channel ends with the router.
pub(super) fn commands() -> Receiver<Vec<String>> {
    let (tx, rx) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            if tx.send(line.split_whitespace().map(str::to_string).collect()).is_err() {
                return;
            }
        }
    });
    rx
}

/// `room R E TOKENS ..`.
pub(super) fn room(words: &[String]) -> Option<(RoomKey, u32)> {
    let n = |i: usize| words.get(i)?.parse::<u64>().ok();
    Some((RoomKey { room: n(1)?, epoch: n(2)? as u32 }, n(3)? as u32))
}
