//! Rows: the short lists of nodes, cut out of large segments, so that a node costs no allocation of its own.
//!
//! A segment is memory for equal blocks. Block sizes grow by quarters, so at most a fifth of a row is idle. A segment of a
//! size is made about as large as all before it together, up to [`SEGMENT_BYTES_MAX`], and given back when its last row goes,
//! unless it is the only one of its size with room. Their memory comes in powers of two, and a little of each is kept for
//! the next segment that is made, of whatever blocks: a cache at capacity makes one as often as it gives one back. A row that
//! does not fit is a segment of its own.
//!
//! A row may also be a range of memory that somebody else made and nobody changes, a prompt that was named as a whole say:
//! then nothing is copied, and the memory stays until the last row in it goes. What is held beyond the rows is bounded: see
//! [`Rows::share`].

use std::ops::Range;
use std::sync::Arc;

/// 256 KiB: few enough segments that their table stays in the near cache, small enough to be given back.
const SEGMENT_BYTES_MAX: usize = 256 * 1024;
/// Pieces of memory of a length that are kept for later, at most 4 MiB in all: filling fresh memory was a tenth of an
/// insert at capacity.
const SPARE_MAX: usize = 8;
/// Smallest block, in elements.
const BLOCK_MIN: usize = 4;
/// Class of a segment that is one row.
const ALONE: u32 = u32::MAX;
/// Class of a segment that is memory of somebody else.
const SHARED: u32 = u32::MAX - 1;
/// Bytes of others' memory that are held in any case.
const SHARED_BYTES_MIN: usize = 1 << 20;
/// Segment without a place in the list of those with room.
const NOT_OPEN: u32 = u32::MAX;

/// Where a list lies. Says nothing about how much of it is in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Row {
    segment: u32,
    at: u32,
    cap: u32,
}

impl Row {
    /// No list.
    pub(super) const NONE: Row = Row { segment: 0, at: 0, cap: 0 };

    pub(super) fn is_none(self) -> bool {
        self.cap == 0
    }

    /// Elements that it has room for.
    pub(super) fn capacity(self) -> usize {
        self.cap as usize
    }
}

#[derive(Clone, Debug, Default)]
struct Segment {
    class: u32,
    /// Elements per block.
    block: u32,
    /// Blocks in use.
    live: u32,
    /// Blocks that were never in use start here.
    fresh: u32,
    blocks: u32,
    /// Starts of blocks that were given back.
    free: Vec<u32>,
    /// Place in the list of its class, or `NOT_OPEN`.
    place: u32,
}

/// Blocks of one class.
#[derive(Clone, Debug, Default)]
struct Class {
    /// Segments with room.
    open: Vec<u32>,
    /// Blocks in all its segments.
    blocks: usize,
}

/// Memory of segments. What is read much and may be shared is an `Arc`: reading it costs what reading a `Box` does, and
/// writing it some twenty instructions more, to know that nobody else has it.
pub(super) trait Memory<T>: std::ops::Deref<Target = [T]> + Default + Clone + FromIterator<T> {
    /// To be written; nobody else holds it, unless the whole was cloned.
    fn write(&mut self) -> &mut [T];
}

impl<T: Clone> Memory<T> for Box<[T]> {
    fn write(&mut self) -> &mut [T] {
        self
    }
}

impl<T: Clone> Memory<T> for Arc<[T]> {
    fn write(&mut self) -> &mut [T] {
        Arc::make_mut(self)
    }
}

/// All rows of one element type.
#[derive(Clone, Debug)]
pub(super) struct Rows<T, M = Box<[T]>> {
    /// By segment. Apart from `segments`, because every look-up reads it.
    data: Vec<M>,
    segments: Vec<Segment>,
    unused: Vec<u32>,
    classes: Vec<Class>,
    /// Memory of segments that went, of any content, by the logarithm of its length.
    spare: Vec<Vec<M>>,
    /// Elements of our own memory, and of others'.
    own: usize,
    shared: usize,
    fill: T,
}

/// Class of a length and the elements of its blocks: 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ...
fn class_of(len: usize) -> (usize, usize) {
    let len = len.max(BLOCK_MIN);
    // With 2^k <= len - 1 < 2^(k+1), blocks are multiples of 2^(k-2).
    let k = (len - 1).max(1).ilog2() as usize;
    let step = 1 << k.saturating_sub(2);
    let quarters = len.div_ceil(step);
    (4 * k + quarters, quarters * step)
}

impl<T: Copy, M: Memory<T>> Rows<T, M> {
    /// `fill` is what fresh memory holds.
    pub(super) fn new(fill: T) -> Rows<T, M> {
        let (segments, unused, classes) = (Vec::new(), Vec::new(), Vec::new());
        let (data, spare) = (Vec::new(), Vec::new());
        Rows { data, segments, unused, classes, spare, own: 0, shared: 0, fill }
    }

    fn elements_max() -> usize {
        SEGMENT_BYTES_MAX / size_of::<T>()
    }

    /// A row with room for `len` elements, of any content. Amortised O(1).
    pub(super) fn alloc(&mut self, len: usize) -> Row {
        let (class, block) = class_of(len);
        if block * 2 > Self::elements_max() {
            let segment = self.add_segment(ALONE, len, 1);
            self.segments[segment as usize].live = 1;
            return Row { segment, at: 0, cap: len as u32 };
        }
        if self.classes.len() <= class {
            self.classes.resize(class + 1, Class::default());
        }
        let segment = match self.classes[class].open.last() {
            Some(&segment) => segment,
            None => self.open_segment(class, block),
        };
        let s = &mut self.segments[segment as usize];
        let at = s.free.pop().unwrap_or_else(|| {
            s.fresh += 1;
            (s.fresh - 1) * s.block
        });
        s.live += 1;
        if s.live == s.blocks {
            s.place = NOT_OPEN;
            self.classes[class].open.pop();
        }
        Row { segment, at, cap: block as u32 }
    }

    fn open_segment(&mut self, class: usize, block: usize) -> u32 {
        let room = Self::elements_max() / block;
        let blocks = self.classes[class].blocks.clamp(1, room);
        // What the rounding of its memory adds is of use, too.
        let blocks = (block * blocks).next_power_of_two() / block;
        let segment = self.add_segment(class as u32, block, blocks);
        let class = &mut self.classes[class];
        class.blocks += blocks;
        self.segments[segment as usize].place = class.open.len() as u32;
        class.open.push(segment);
        segment
    }

    pub(super) fn is_shared(&self, row: Row) -> bool {
        !row.is_none() && self.segments[row.segment as usize].class == SHARED
    }

    /// Makes `row`, of which `used` elements are in use, go on with `next` from its element `skip` on, if both are ranges
    /// of the same shared memory and that continues the one with the other. `next` is none then. O(1).
    pub(super) fn join(&mut self, row: &mut Row, used: usize, next: &mut Row, skip: usize) -> bool {
        let adjacent = row.at as usize + used == next.at as usize + skip;
        if !self.is_shared(*row) || next.is_none() || row.segment != next.segment || !adjacent {
            return false;
        }
        row.cap = next.at + next.cap - row.at;
        self.free(next);
        true
    }

    fn add_segment(&mut self, class: u32, block: usize, blocks: usize) -> u32 {
        let data = match class {
            ALONE => std::iter::repeat_n(self.fill, block).collect(),
            _ => self.memory_for(block * blocks),
        };
        self.own += data.len();
        self.put_segment(class, block, blocks, data)
    }

    fn put_segment(&mut self, class: u32, block: usize, blocks: usize, data: M) -> u32 {
        let new = Segment {
            class,
            block: block as u32,
            blocks: blocks as u32,
            place: NOT_OPEN,
            ..Segment::default()
        };
        match self.unused.pop() {
            Some(segment) => {
                self.data[segment as usize] = data;
                self.segments[segment as usize] = new;
                segment
            }
            None => {
                self.data.push(data);
                self.segments.push(new);
                self.data.len() as u32 - 1
            }
        }
    }

    fn memory_for(&mut self, elements: usize) -> M {
        let len = elements.next_power_of_two();
        let kept = self.spare.get_mut(len.ilog2() as usize).and_then(Vec::pop);
        kept.unwrap_or_else(|| std::iter::repeat_n(self.fill, len).collect())
    }

    /// Keeps memory for the next segment, if it is that of one and not much is kept.
    fn keep(&mut self, memory: M) {
        if !memory.len().is_power_of_two() || memory.len() > Self::elements_max() {
            return;
        }
        let log = memory.len().ilog2() as usize;
        if self.spare.len() <= log {
            self.spare.resize(log + 1, Vec::new());
        }
        if self.spare[log].len() < SPARE_MAX {
            self.spare[log].push(memory);
        }
    }

    /// Gives a row back; `row` is none from then on. O(1).
    pub(super) fn free(&mut self, row: &mut Row) {
        let Row { segment, at, cap } = std::mem::replace(row, Row::NONE);
        if cap == 0 {
            return;
        }
        let s = &mut self.segments[segment as usize];
        s.live -= 1;
        if s.class == SHARED {
            if s.live == 0 {
                self.shared -= self.data[segment as usize].len();
                self.forget_segment(segment);
            }
            return;
        }
        if s.class == ALONE {
            self.drop_segment(segment);
            return;
        }
        s.free.push(at);
        let (class, live) = (s.class as usize, s.live);
        if s.place == NOT_OPEN {
            s.place = self.classes[class].open.len() as u32;
            self.classes[class].open.push(segment);
        }
        if live == 0 && self.classes[class].open.len() > 1 {
            self.close_segment(class, segment);
        }
    }

    fn close_segment(&mut self, class: usize, segment: u32) {
        let (place, blocks) = (self.segments[segment as usize].place, self.segments[segment as usize].blocks);
        let class = &mut self.classes[class];
        class.blocks -= blocks as usize;
        class.open.swap_remove(place as usize);
        if let Some(&moved) = class.open.get(place as usize) {
            self.segments[moved as usize].place = place;
        }
        self.drop_segment(segment);
    }

    fn drop_segment(&mut self, segment: u32) {
        let memory = self.forget_segment(segment);
        self.own -= memory.len();
        self.keep(memory);
    }

    fn forget_segment(&mut self, segment: u32) -> M {
        let memory = std::mem::take(&mut self.data[segment as usize]);
        self.segments[segment as usize] = Segment { place: NOT_OPEN, ..Segment::default() };
        self.unused.push(segment);
        memory
    }

    /// Makes room for `len` elements; the first `used` stay. Amortised O(1) per element if `len` grows by a share.
    pub(super) fn resize(&mut self, row: &mut Row, used: usize, len: usize) {
        let mut old = *row;
        let new = self.alloc(len);
        self.copy(old, 0..used, new, 0);
        self.free(&mut old);
        *row = new;
    }

    /// Copies a range of one row to a place in another.
    pub(super) fn copy(&mut self, from: Row, range: Range<usize>, to: Row, at: usize) {
        if range.is_empty() {
            return;
        }
        let source = from.at as usize + range.start..from.at as usize + range.end;
        if from.segment == to.segment {
            self.data[from.segment as usize].write().copy_within(source, to.at as usize + at);
            return;
        }
        let (target, len) = (to.at as usize + at, range.len());
        let segments = [from.segment as usize, to.segment as usize];
        if let Ok([from, to]) = self.data.get_disjoint_mut(segments) {
            to.write()[target..target + len].copy_from_slice(&from[source]);
        }
    }

    /// All of a row's room; empty for none.
    #[inline]
    pub(super) fn slice(&self, row: Row) -> &[T] {
        if row.cap == 0 {
            return &[];
        }
        &self.data[row.segment as usize][row.at as usize..(row.at + row.cap) as usize]
    }

    /// A range of a row; empty for none. The range lies within the row's room: that is checked in tests only, so that it
    /// costs a look-up one comparison and not three.
    #[inline]
    pub(super) fn part(&self, row: Row, range: Range<usize>) -> &[T] {
        if row.cap == 0 {
            return &[];
        }
        debug_assert!(range.end <= row.cap as usize, "a part of a row lies in it");
        let (from, to) = (row.at as usize + range.start, row.at as usize + range.end);
        self.data[row.segment as usize].get(from..to).unwrap_or_default()
    }

    /// All of the room of a row that is not shared, to be written.
    #[inline]
    pub(super) fn slice_mut(&mut self, row: Row) -> &mut [T] {
        if row.cap == 0 {
            return &mut [];
        }
        debug_assert!(!self.is_shared(row), "shared rows are not written");
        &mut self.data[row.segment as usize].write()[row.at as usize..(row.at + row.cap) as usize]
    }
}

impl<T: Copy> Rows<T, Arc<[T]>> {
    /// A row that is `range` of `memory`, which holds what the row shall hold and is not written any more. In the segment
    /// of `near` if that is the same memory. `None`: it would hold too much that is in no row, so copy. That is if less than
    /// half of the memory lies from the range on, or if others' memory would become more than half as much as our own: rows
    /// go one by one, and the last may be a small part of what it holds. O(1).
    pub(super) fn share(&mut self, memory: &Arc<[T]>, range: Range<usize>, near: Row) -> Option<Row> {
        let (at, cap) = (u32::try_from(range.start).ok()?, u32::try_from(range.len()).ok()?);
        if cap == 0 || range.end > memory.len() {
            return None;
        }
        let segment = match self.is_shared(near) && Arc::ptr_eq(&self.data[near.segment as usize], memory) {
            true => near.segment,
            false => {
                let most = (self.own / 2).max(SHARED_BYTES_MIN / size_of::<T>());
                if range.start * 2 > memory.len() || self.shared + memory.len() > most {
                    return None;
                }
                self.shared += memory.len();
                self.put_segment(SHARED, 1, memory.len(), Arc::clone(memory))
            }
        };
        self.segments[segment as usize].live += 1;
        Some(Row { segment, at, cap })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_hold_what_was_asked_for_and_waste_little() {
        let mut last = (0, 0);
        for len in 1..100_000 {
            let (class, block) = class_of(len);
            assert!(block >= len && (block <= len + len / 4 || block == BLOCK_MIN), "{len}: {block}");
            assert!(class == last.0 && block == last.1 || class > last.0 && block > last.1, "{len}");
            last = (class, block);
        }
    }

    /// What another holds is not copied, goes with its last row, and is copied when it would be written.
    #[test]
    fn memory_of_others_is_shared_and_let_go() {
        let mut rows: Rows<u32, Arc<[u32]>> = Rows::new(0);
        let prompt: Arc<[u32]> = (0..10_000).collect();
        let mut first = rows.share(&prompt, 0..4000, Row::NONE).unwrap();
        let mut second = rows.share(&prompt, 3999..8000, first).unwrap();
        assert_eq!((second.segment, Arc::strong_count(&prompt)), (first.segment, 2));
        assert_eq!((rows.slice(first), rows.part(second, 1..3)), (&prompt[..4000], &prompt[4000..4002]));

        // Neighbours become one where they meet, and only there.
        let mut apart = rows.share(&prompt, 8001..9000, first).unwrap();
        assert!(!rows.join(&mut first, 4000, &mut apart, 0));
        assert!(rows.join(&mut first, 4000, &mut second, 1) && second.is_none());
        assert_eq!(rows.slice(first), &prompt[..8000]);
        rows.free(&mut apart);

        // What was cut off is not content any more, and what comes instead of it goes into memory of our own.
        rows.resize(&mut first, 100, 200);
        assert!(!rows.is_shared(first));
        rows.slice_mut(first)[100..200].fill(7);
        assert_eq!((&rows.slice(first)[..100], rows.slice(first)[150]), (&prompt[..100], 7));
        assert_eq!((Arc::strong_count(&prompt), rows.shared), (1, 0));
        rows.free(&mut first);
        assert!(rows.segments.iter().all(|s| s.live == 0));
    }

    /// The last row of a prompt may be a small part of it.
    #[test]
    fn what_others_hold_stays_a_share() {
        let mut rows: Rows<u32, Arc<[u32]>> = Rows::new(0);
        let prompt = |tokens: usize| -> Arc<[u32]> { (0..tokens as u32).collect() };
        assert_eq!(
            rows.share(&prompt(1000), 501..1000, Row::NONE),
            None,
            "more than half would be in no row"
        );
        assert!(rows.share(&prompt(1000), 500..1000, Row::NONE).is_some());
        let held = (0..100).filter(|_| rows.share(&prompt(10_000), 0..64, Row::NONE).is_some()).count();
        assert_eq!(held, 26, "1 MiB");
        let own: Vec<Row> = (0..100).map(|_| rows.alloc(16_384)).collect();
        let held = (0..200).filter(|_| rows.share(&prompt(10_000), 0..64, Row::NONE).is_some()).count();
        assert!(rows.shared <= rows.own / 2 && held == 55, "{held}: {} of {}", rows.shared, rows.own);
        own.into_iter().for_each(|mut row| rows.free(&mut row));
        assert_eq!(rows.share(&prompt(10_000), 0..64, Row::NONE), None);
    }

    /// Rows under random calls keep their content and never overlap; memory comes back.
    #[test]
    fn agrees_with_lists() {
        let mut rows: Rows<u32, Arc<[u32]>> = Rows::new(0);
        let mut lists: Vec<(Row, Vec<u32>)> = Vec::new();
        let mut x = 11u64;
        let mut next = |n: u64| {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (x >> 33) % n
        };
        let mut stamp = 0;
        for step in 0..40_000u64 {
            let len = match next(20) {
                0 => 60_000,
                1 => 3_000,
                _ => 1 + next(60) as usize,
            };
            match next(3) {
                0 | 1 if lists.len() < 200 + (step / 200) as usize % 200 => {
                    let list: Vec<u32> = (stamp..stamp + len as u32).collect();
                    stamp += len as u32;
                    let shared = (next(4) == 0).then(|| rows.share(&list[..].into(), 0..len, Row::NONE));
                    let row = shared.flatten().unwrap_or_else(|| {
                        let row = rows.alloc(len);
                        rows.slice_mut(row)[..len].copy_from_slice(&list);
                        row
                    });
                    lists.push((row, list));
                }
                2 if !lists.is_empty() => {
                    let i = next(lists.len() as u64) as usize;
                    let (row, list) = &mut lists[i];
                    let keep = list.len().min(len);
                    rows.resize(row, keep, len);
                    list.truncate(keep);
                }
                _ if !lists.is_empty() => {
                    let (mut row, _) = lists.swap_remove(next(lists.len() as u64) as usize);
                    rows.free(&mut row);
                    assert!(row.is_none() && rows.slice(row).is_empty());
                }
                _ => {}
            }
            if step % 64 == 0 {
                for (row, list) in &lists {
                    assert_eq!(rows.slice(*row)[..list.len()], list[..]);
                }
            }
        }
        for (mut row, _) in lists {
            rows.free(&mut row);
        }
        // One open segment a class may stay.
        let left: usize = rows.data.iter().filter(|data| !data.is_empty()).count();
        assert!(left <= rows.classes.iter().filter(|class| class.open.len() == 1).count());
        assert!(rows.segments.iter().all(|s| s.live == 0));
    }
}
