//! What both children share: the model, the content of pages, the clock, and the lines of the router.

use std::hash::{BuildHasher, Hasher};
use std::io::{BufRead, Write};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use sapwood::base::Time;
use sapwood::pd::layout::{Component, Entry, EntryId, Group, HeadOrder, Layout, Role, Shape, TokenSplit};
use sapwood::pd::topo::Topology;
use sapwood::pd::wire::Prompt;
use sapwood::pd::{Incarnation, RoomKey};

pub(super) const PAGE_TOKENS: u32 = 16;
const HEADS: u32 = 8;
const HEAD_BYTES: u32 = 128;

pub(super) fn topology(layers: u32) -> Topology {
    Topology::single(layers)
}

/// K and V of every layer, 16 KiB per page each, in one region.
pub(super) fn layout(layers: u32, pages: u32) -> Layout {
    let unit = u64::from(PAGE_TOKENS * HEADS * HEAD_BYTES);
    let mut entries = Vec::new();
    for role in [Role::K, Role::V] {
        for layer in 0..layers {
            entries.push(Entry {
                id: EntryId { group: Group::Target, layer, role },
                component: Component::Full,
                region: 0,
                base: entries.len() as u64 * unit * u64::from(pages),
                units: pages,
                unit_bytes: unit,
                shape: Shape::Heads { total: HEADS, head_bytes: HEAD_BYTES, order: HeadOrder::TokenHead },
                ring_slots: 0,
            });
        }
    }
    let regions = vec![entries.len() as u64 * unit * u64::from(pages)];
    Layout { model: 1, page_tokens: PAGE_TOKENS, window_tokens: 0, split: TokenSplit::NONE, regions, entries }
}

/// Drawn by the seed that the standard library gives each process.
pub(super) fn incarnation() -> Incarnation {
    Incarnation(std::collections::hash_map::RandomState::new().build_hasher().finish() | 1)
}

pub(super) fn prompt(key: RoomKey, tokens: u32) -> Prompt {
    Prompt { tokens, digest: key.room.wrapping_mul(31).wrapping_add(u64::from(key.epoch)) }
}

/// The word at `index` of a page: a function of what it is.
fn word(key: RoomKey, e: &Entry, position: u32, index: u64) -> u64 {
    let role = u64::from(e.id.role == Role::V);
    let what = key.room << 32
        ^ u64::from(key.epoch) << 24
        ^ u64::from(e.id.layer) << 12
        ^ role << 11
        ^ u64::from(position);
    (what.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ index).wrapping_mul(0xBF58_476D_1CE4_E5B9)
}

pub(super) fn fill(key: RoomKey, e: &Entry, position: u32, bytes: &mut [u8]) {
    for (i, w) in (0u64..).zip(bytes.chunks_exact_mut(8)) {
        w.copy_from_slice(&word(key, e, position, i).to_le_bytes());
    }
}

pub(super) fn equals(key: RoomKey, e: &Entry, position: u32, bytes: &[u8]) -> bool {
    (0u64..).zip(bytes.chunks_exact(8)).all(|(i, w)| w == word(key, e, position, i).to_le_bytes())
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
