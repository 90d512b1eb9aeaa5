//! Rows: the short lists of nodes, cut out of large segments, so that a node costs no allocation of its own.
//!
//! A segment is memory for equal blocks. Block sizes grow by quarters, so at most a fifth of a row is idle. A segment of a
//! size is made about as large as all before it together, up to [`SEGMENT_BYTES_MAX`], and given back when its last row goes,
//! unless it is the only one of its size with room. Their memory comes in powers of two, and a little of each is kept for
//! the next segment that is made, of whatever blocks: a cache at capacity makes one as often as it gives one back. A row that
//! does not fit is a segment of its own.

use std::ops::Range;

/// 256 KiB: few enough segments that their table stays in the near cache, small enough to be given back.
const SEGMENT_BYTES_MAX: usize = 256 * 1024;
/// Pieces of memory of a length that are kept for later, at most 4 MiB in all: filling fresh memory was a tenth of an
/// insert at capacity.
const SPARE_MAX: usize = 8;
/// Smallest block, in elements.
const BLOCK_MIN: usize = 4;
/// Class of a segment that is one row.
const ALONE: u32 = u32::MAX;
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

/// All rows of one element type.
#[derive(Clone, Debug)]
pub(super) struct Rows<T> {
    /// By segment. Apart from `segments`, because every look-up reads it.
    data: Vec<Box<[T]>>,
    segments: Vec<Segment>,
    unused: Vec<u32>,
    classes: Vec<Class>,
    /// Memory of segments that went, of any content, by the logarithm of its length.
    spare: Vec<Vec<Box<[T]>>>,
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

impl<T: Copy> Rows<T> {
    /// `fill` is what fresh memory holds.
    pub(super) fn new(fill: T) -> Rows<T> {
        let (segments, unused, classes) = (Vec::new(), Vec::new(), Vec::new());
        Rows { data: Vec::new(), segments, unused, classes, spare: Vec::new(), fill }
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

    fn add_segment(&mut self, class: u32, block: usize, blocks: usize) -> u32 {
        let data = match class {
            ALONE => vec![self.fill; block].into_boxed_slice(),
            _ => self.memory_for(block * blocks),
        };
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

    fn memory_for(&mut self, elements: usize) -> Box<[T]> {
        let len = elements.next_power_of_two();
        let kept = self.spare.get_mut(len.ilog2() as usize).and_then(Vec::pop);
        kept.unwrap_or_else(|| vec![self.fill; len].into_boxed_slice())
    }

    /// Keeps memory for the next segment, if it is that of one and not much is kept.
    fn keep(&mut self, memory: Box<[T]>) {
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
        let memory = std::mem::take(&mut self.data[segment as usize]);
        self.keep(memory);
        self.segments[segment as usize] = Segment { place: NOT_OPEN, ..Segment::default() };
        self.unused.push(segment);
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
            self.data[from.segment as usize].copy_within(source, to.at as usize + at);
            return;
        }
        let data = std::mem::take(&mut self.data[from.segment as usize]);
        self.slice_mut(to)[at..at + range.len()].copy_from_slice(&data[source]);
        self.data[from.segment as usize] = data;
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

    #[inline]
    pub(super) fn slice_mut(&mut self, row: Row) -> &mut [T] {
        if row.cap == 0 {
            return &mut [];
        }
        &mut self.data[row.segment as usize][row.at as usize..(row.at + row.cap) as usize]
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

    /// Rows under random calls keep their content and never overlap; memory comes back.
    #[test]
    fn agrees_with_lists() {
        let mut rows = Rows::new(0u32);
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
                    let row = rows.alloc(len);
                    let list: Vec<u32> = (stamp..stamp + len as u32).collect();
                    stamp += len as u32;
                    rows.slice_mut(row)[..len].copy_from_slice(&list);
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
