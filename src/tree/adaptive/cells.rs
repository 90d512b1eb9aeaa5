//! The order of one tier: leaves by kind and age, without a key per leaf.
//!
//! A **list** is what leaves of one kind stand in (class of score and level of cost), an **interval** is a stretch of time
//! of last use, and a **cell** is both: a queue, oldest first. All leaves of a cell are worth the same, so the victim is
//! the oldest leaf of the cell that is worth least, and age changes the worth of a cell, not of its leaves: nobody is
//! re-keyed when time passes. Intervals grow with age: neighbours are merged, each cell by joining two queues at their
//! ends, when together they are short beside their age.
//!
//! Neighbours of a cell are linked through the nodes, as those of a list are: a look-up fetches them in time.
//!
//! Entering and leaving is O(1); finding a victim O(intervals), at most 64.

use crate::tree::node::{Links, Node};

use super::age::{Ages, BINS};
use super::mark::{Mark, NIL};

/// Levels of cost, half an octave each.
pub(super) const LEVELS: usize = 10;
/// The level of computing a page at the root. Those below are for what the next tier holds too.
pub(super) const ROOT_LEVEL: u8 = 4;
/// Lists of classes and levels.
pub(super) const LISTS: usize = super::hazard::CLASSES * LEVELS;
/// The list of leaves that are finished: they go first.
pub(super) const FINISHED: u8 = LISTS as u8;
pub(super) const LISTS_ALL: usize = LISTS + 1;
const _: () = assert!(LISTS_ALL <= 128, "a word has a bit for every list");
/// Intervals at a time.
const SLOTS: usize = 64;
/// Neighbours are merged when they span less than 1/3 of their age: finer than the bins of the hazards.
const MERGE_BELOW: u64 = 3;
/// Steps that a leaf of an earlier use looks for its place among the oldest of its cell.
const STEPS_MAX: usize = 16;

/// Worth by list and bin of age.
pub(super) type Gains = [[f32; BINS]; LISTS_ALL];

#[derive(Clone, Copy, Debug)]
struct Interval {
    start: u64,
    slot: u8,
    bin: u8,
}

#[derive(Clone, Copy, Debug)]
struct Queue {
    oldest: u32,
    newest: u32,
}

const EMPTY: Queue = Queue { oldest: NIL, newest: NIL };

/// The cell of the latest victim, which is that of the next one as long as it has leaves and nothing entered that goes before
/// it.
#[derive(Clone, Copy, Debug)]
struct Least {
    slot: usize,
    list: usize,
    /// What it was chosen by; worth `INFINITY` if by age alone.
    rank: Rank,
    /// What was safe then.
    safe: u64,
    /// Leaves used from here on are not victims, or others are older.
    until: u64,
}

/// Cells go by worth, then from the oldest interval on, then by list.
type Rank = (f32, u64, usize);

#[derive(Clone, Debug)]
pub(super) struct Cells {
    ages: Ages,
    /// Oldest first.
    intervals: Vec<Interval>,
    free: u64,
    /// By slot and list.
    queues: Vec<[Queue; LISTS_ALL]>,
    /// By slot: lists that are not empty.
    full: [u128; SLOTS],
    /// Slots whose `best` is out of date.
    dirty: u64,
    /// By slot: the list that is worth least, and its worth.
    best: [(f32, u8); SLOTS],
    /// When intervals are looked at next.
    look_at: u64,
    len: usize,
    /// Leaves that are finished.
    finished: usize,
    /// So many of the oldest intervals are empty, at least.
    empty: usize,
    /// Which interval a leaf left last.
    near: usize,
    /// `None`: it has to be looked for.
    least: Option<Least>,
}

impl Cells {
    pub(super) fn new(ages: Ages) -> Cells {
        Cells {
            ages,
            intervals: Vec::with_capacity(SLOTS),
            free: u64::MAX,
            queues: Vec::new(),
            full: [0; SLOTS],
            dirty: 0,
            best: [(0.0, 0); SLOTS],
            look_at: 0,
            len: 0,
            finished: 0,
            empty: 0,
            near: 0,
            least: None,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The worths have changed.
    pub(super) fn all_dirty(&mut self) {
        self.dirty = u64::MAX;
        self.least = None;
    }

    /// Files a leaf under its mark's list and tick. O(1), O(log intervals) for an earlier use.
    pub(super) fn enter(&mut self, nodes: &mut [Node], marks: &[Mark], at: u32, now: u64, gains: &Gains) {
        if now >= self.look_at {
            self.look(nodes, now);
        }
        let (tick, list) = (marks[at as usize].tick, marks[at as usize].list);
        let interval = self.interval_to_enter(nodes, tick);
        let slot = usize::from(interval.slot);
        let queue = self.queues[slot][usize::from(list)];
        self.len += 1;
        self.finished += usize::from(list == FINISHED);
        if queue.oldest == NIL {
            self.oldest_is_new(interval, list, tick, gains);
            self.queues[slot][usize::from(list)] = Queue { oldest: at, newest: at };
            nodes[at as usize].order = Links::NONE;
            if self.full[slot] == 0 && self.intervals.last().is_some_and(|i| usize::from(i.slot) != slot) {
                self.empty = 0;
            }
            self.full[slot] |= 1 << list;
            self.dirty |= 1 << slot;
            return;
        }
        // Right above the newest leaf that is not younger.
        let mut below = queue.newest;
        if marks[below as usize].tick > tick {
            below = NIL;
            let mut next = queue.oldest;
            for _ in 0..STEPS_MAX {
                if marks[next as usize].tick > tick {
                    break;
                }
                (below, next) = (next, nodes[next as usize].order.newer);
            }
        }
        let above = if below == NIL { queue.oldest } else { nodes[below as usize].order.newer };
        nodes[at as usize].order = Links { older: below, newer: above };
        let ends = &mut self.queues[slot][usize::from(list)];
        match below {
            NIL => ends.oldest = at,
            _ => nodes[below as usize].order.newer = at,
        }
        match above {
            NIL => ends.newest = at,
            _ => nodes[above as usize].order.older = at,
        }
        if below == NIL {
            self.oldest_is_new(interval, list, tick, gains);
        }
    }

    /// A leaf that entered is the oldest of its cell. The cell of the victims stays the same if this is it or goes before it, or if
    /// the leaf was used too late to be a victim. (While worth was not compared here, two of three victims of chats in a short memory
    /// had to be looked for.)
    #[inline]
    fn oldest_is_new(&mut self, interval: Interval, list: u8, tick: u64, gains: &Gains) {
        let (slot, list) = (usize::from(interval.slot), usize::from(list));
        let rank = (gains[list][usize::from(interval.bin)], interval.start, list);
        self.least = self.least.filter(|least| {
            (least.slot, least.list) == (slot, list)
                || tick >= least.until && list < LISTS
                || rank > least.rank
        });
    }

    /// Takes a leaf out; its mark is as it was when it entered. O(1), O(log intervals) at the end of a cell.
    pub(super) fn leave(&mut self, nodes: &mut [Node], mark: &Mark, at: u32) {
        let (Mark { tick, list, .. }, Links { older, newer }) = (*mark, nodes[at as usize].order);
        self.len -= 1;
        self.finished -= usize::from(list == FINISHED);
        if older != NIL {
            nodes[older as usize].order.newer = newer;
        }
        if newer != NIL {
            nodes[newer as usize].order.older = older;
        }
        if older != NIL && newer != NIL {
            return;
        }
        let slot = match self.least {
            Some(Least { slot, list, .. }) if self.queues[slot][list].oldest == at => slot,
            _ => self.slot_to_leave(tick),
        };
        let queue = &mut self.queues[slot][usize::from(list)];
        if older == NIL {
            queue.oldest = newer;
        }
        if newer == NIL {
            queue.newest = older;
        }
        if queue.oldest == NIL {
            self.full[slot] &= !(1 << list);
            self.dirty |= 1 << slot;
        }
    }

    /// The victim: the oldest leaf of the cell that is worth least, of those last used before `safe`. If there is none, the
    /// least recently used leaf. O(1) where it stands in the cell of the last one; O(intervals).
    #[inline]
    pub(super) fn first(
        &mut self,
        nodes: &mut [Node],
        marks: &[Mark],
        now: u64,
        gains: &Gains,
        safe: u64,
    ) -> Option<u32> {
        if now >= self.look_at {
            self.look(nodes, now);
        }
        if let Some(least) = self.least.filter(|least| least.safe == safe) {
            let oldest = self.queues[least.slot][least.list].oldest;
            if marks.get(oldest as usize).is_some_and(|mark| mark.tick < least.until) {
                return Some(oldest);
            }
        }
        self.look_for_first(marks, gains, safe)
    }

    #[inline(never)]
    fn look_for_first(&mut self, marks: &[Mark], gains: &Gains, safe: u64) -> Option<u32> {
        self.least = None;
        if self.len == 0 {
            return None;
        }
        // Of W4 some forty, which have not merged yet.
        let is_empty = |interval: &Interval| self.full[usize::from(interval.slot)] == 0;
        self.empty += self.intervals[self.empty..].iter().take_while(|i| is_empty(i)).count();
        let (mut least, mut found, mut fallback) = (f32::INFINITY, None, None);
        for (order, interval) in self.intervals.iter().enumerate().skip(self.empty) {
            if interval.start >= safe && (found.is_some() || fallback.is_some()) && self.finished == 0 {
                // All that follows is safe: with 7/8 of the memory safe these are most of the intervals.
                break;
            }
            let slot = usize::from(interval.slot);
            if self.full[slot] == 0 {
                continue;
            }
            let end = self.intervals.get(order + 1).map_or(u64::MAX, |next| next.start);
            if interval.start < safe && safe < end {
                // Partly safe; it may be long. What is safe of it is found by the leaves themselves.
                for list in lists(self.full[slot]) {
                    let worth = gains[list][usize::from(interval.bin)];
                    let oldest = self.queues[slot][list].oldest;
                    if worth >= least && found.is_some() {
                        fallback = fallback.or(Some((interval, end)).filter(|_| is_ranked(worth)));
                    } else if is_ranked(worth) && marks[oldest as usize].tick >= safe {
                        fallback = fallback.or(Some((interval, end)));
                    } else {
                        (least, found) = (worth, Some((interval, list)));
                    }
                }
                continue;
            }
            if self.dirty >> slot & 1 == 1 {
                self.best[slot] = best(self.full[slot], usize::from(interval.bin), gains);
                self.dirty &= !(1 << slot);
            }
            let (worth, list) = self.best[slot];
            if interval.start >= safe && is_ranked(worth) {
                fallback = fallback.or(Some((interval, end)));
            } else if worth < least || found.is_none() {
                (least, found) = (worth, Some((interval, usize::from(list))));
            }
        }
        let (interval, list, worth, until) = match (found, fallback) {
            (Some((interval, list)), _) => (interval, list, least, safe),
            (None, Some((interval, end))) => {
                let (list, until) = self.oldest(marks, interval, end)?;
                (interval, list, f32::INFINITY, until)
            }
            (None, None) => return None,
        };
        let (slot, rank) = (usize::from(interval.slot), (worth, interval.start, list));
        self.least = (list < LISTS).then_some(Least { slot, list, rank, safe, until });
        Some(self.queues[slot][list].oldest)
    }

    /// Where the least recently used leaf of an interval stands: its list, and the time of use of the oldest in the other lists,
    /// or the end of the interval. O(lists).
    fn oldest(&self, marks: &[Mark], interval: &Interval, end: u64) -> Option<(usize, u64)> {
        let slot = usize::from(interval.slot);
        let (mut found, mut oldest, mut second) = (None, u64::MAX, end);
        for list in lists(self.full[slot]) {
            let tick = marks[self.queues[slot][list].oldest as usize].tick;
            if tick < oldest || found.is_none() {
                (found, oldest, second) = (Some(list), tick, oldest.min(end));
            } else {
                second = second.min(tick);
            }
        }
        found.map(|list| (list, second))
    }

    /// Shows cells from the least worth on, each leaf from the oldest on, until `show` says stop; true if it never does. For
    /// looking ahead; O(cells log cells + leaves shown).
    pub(super) fn ahead(
        &self,
        nodes: &[Node],
        gains: &Gains,
        safe: u64,
        show: &mut impl FnMut(u32) -> bool,
    ) -> bool {
        let mut cells: Vec<(f32, usize, u8)> = Vec::new();
        for (order, interval) in self.intervals.iter().enumerate() {
            for list in (0..LISTS_ALL as u8).filter(|l| self.full[usize::from(interval.slot)] >> l & 1 == 1) {
                let worth = gains[usize::from(list)][usize::from(interval.bin)];
                // What is safe goes after the rest, by age alone.
                let is_safe = interval.start >= safe && is_ranked(worth);
                cells.push((if is_safe { f32::INFINITY } else { worth }, order, list));
            }
        }
        cells.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2)));
        for (_, order, list) in cells {
            let mut at = self.queues[usize::from(self.intervals[order].slot)][usize::from(list)].oldest;
            while at != NIL {
                if !show(at) {
                    return false;
                }
                at = nodes[at as usize].order.newer;
            }
        }
        true
    }

    /// The slot of the interval that a tick lies in.
    #[inline]
    fn slot_of(&self, tick: u64) -> usize {
        self.intervals[self.interval_of(tick)].slot.into()
    }

    /// The interval that a tick lies in. What is older than all intervals counts to the oldest.
    #[inline]
    fn interval_of(&self, tick: u64) -> usize {
        // Victims stand in the oldest that is not empty, as a rule.
        let newest = self.intervals.len().saturating_sub(1);
        match self.intervals.get(newest) {
            Some(last) if tick >= last.start => newest,
            _ if self.holds(self.empty, tick) => self.empty,
            _ => self.intervals.partition_point(|i| i.start <= tick).saturating_sub(1),
        }
    }

    /// True if a tick lies in an interval, and that is not the newest.
    #[inline]
    fn holds(&self, interval: usize, tick: u64) -> bool {
        let pair = self.intervals.get(interval..interval + 2);
        pair.is_some_and(|pair| pair[0].start <= tick && tick < pair[1].start)
    }

    /// The slot of a leaf at an end of its cell. What is used in the same order again and again leaves one cell from its oldest
    /// leaf to its newest: a search for each was a tenth of such a look-up.
    #[inline]
    fn slot_to_leave(&mut self, tick: u64) -> usize {
        if !self.holds(self.near, tick) {
            self.near = self.interval_of(tick);
        }
        self.intervals[self.near].slot.into()
    }

    #[inline]
    fn interval_to_enter(&mut self, nodes: &mut [Node], tick: u64) -> Interval {
        let fits = |newest: &Interval| tick < newest.start + self.ages.quantum();
        if self.intervals.last().is_some_and(fits) {
            return self.intervals[self.interval_of(tick)];
        }
        if self.free == 0 {
            self.merge(nodes, 0);
        }
        let slot = self.free.trailing_zeros() as usize;
        self.free &= !(1 << slot);
        if self.queues.len() <= slot {
            self.queues.resize(slot + 1, [EMPTY; LISTS_ALL]);
        }
        self.full[slot] = 0;
        let start = tick & !(self.ages.quantum() - 1);
        let interval = Interval { start, slot: slot as u8, bin: 0 };
        self.intervals.push(interval);
        interval
    }

    /// Joins an interval and the next: the younger leaves go behind the older ones, list by list.
    fn merge(&mut self, nodes: &mut [Node], at: usize) {
        let gone = self.intervals.remove(at + 1);
        (self.empty, self.least) = (0, None);
        let (to, from) = (usize::from(self.intervals[at].slot), usize::from(gone.slot));
        let mut lists = std::mem::take(&mut self.full[from]);
        self.full[to] |= lists;
        self.dirty |= 1 << to;
        while lists != 0 {
            let list = lists.trailing_zeros() as usize;
            lists &= lists - 1;
            let more = std::mem::replace(&mut self.queues[from][list], EMPTY);
            let queue = &mut self.queues[to][list];
            if queue.oldest == NIL {
                *queue = more;
                continue;
            }
            nodes[queue.newest as usize].order.newer = more.oldest;
            nodes[more.oldest as usize].order.older = queue.newest;
            queue.newest = more.newest;
        }
        self.free |= 1 << from;
    }

    /// Every beat of two quanta: merges what has become old enough, and tells the ages of intervals anew. The older an interval
    /// the longer it stays what it is: of an age of 16 to 32 beats it is looked at every other one, of 32 to 64 every fourth.
    /// (All of them every time were a tenth of an eviction in a small memory.) O(intervals looked at).
    #[inline(never)]
    fn look(&mut self, nodes: &mut [Node], now: u64) {
        let beat = 2 * self.ages.quantum();
        let (this, last) = (now / beat, self.look_at.saturating_sub(1) / beat);
        let rarest = (this ^ last).max(1).ilog2();
        let reach = (16 * beat).saturating_mul(1 << rarest);
        let from = self.intervals.partition_point(|i| i.start < now.saturating_sub(reach));
        self.look_at = (this + 1) * beat;
        self.least = None;
        let mut at = from;
        while at + 2 < self.intervals.len() {
            let end = self.intervals[at + 2].start;
            let span = end - self.intervals[at].start;
            if span.saturating_mul(MERGE_BELOW) <= now.saturating_sub(end) {
                self.merge(nodes, at);
            } else {
                at += 1;
            }
        }
        let mut end = now;
        for interval in self.intervals[from..].iter_mut().rev() {
            let middle = interval.start + end.saturating_sub(interval.start) / 2;
            let bin = self.ages.bin(now.saturating_sub(middle)) as u8;
            if std::mem::replace(&mut interval.bin, bin) != bin {
                self.dirty |= 1 << interval.slot;
            }
            end = interval.start;
        }
    }

    /// Every leaf filed, with the list it stands in: for `sanity`.
    pub(super) fn for_each(&self, nodes: &[Node], marks: &[Mark], mut f: impl FnMut(u32, bool)) {
        for interval in &self.intervals {
            let slot = usize::from(interval.slot);
            for list in 0..LISTS_ALL {
                let queue = self.queues[slot][list];
                let mut sound = (queue.oldest != NIL) == (self.full[slot] >> list & 1 == 1);
                let (mut at, mut older, mut steps) = (queue.oldest, NIL, 0);
                while at != NIL && steps <= self.len {
                    let (mark, links) = (&marks[at as usize], nodes[at as usize].order);
                    sound &= links.older == older && usize::from(mark.list) == list;
                    sound &= self.slot_of(mark.tick) == slot;
                    f(at, sound);
                    (older, at, steps) = (at, links.newer, steps + 1);
                }
            }
        }
    }
}

/// The lists of a word, in order.
fn lists(mut word: u128) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let list = word.trailing_zeros() as usize;
        (word != 0).then(|| word &= word - 1).map(|()| list)
    })
}

/// True for a worth that was learned, not told.
fn is_ranked(worth: f32) -> bool {
    worth >= 0.0
}

/// The list that is worth least among those that are not empty. O(lists that are not empty).
fn best(mut full: u128, bin: usize, gains: &Gains) -> (f32, u8) {
    let mut least = (f32::INFINITY, 0);
    while full != 0 {
        let list = full.trailing_zeros() as u8;
        let worth = gains[usize::from(list)][bin];
        if worth < least.0 || least.0 == f32::INFINITY {
            least = (worth, list);
        }
        full &= full - 1;
    }
    least
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(worth: impl Fn(usize, usize) -> f32) -> Gains {
        std::array::from_fn(|list| std::array::from_fn(|bin| worth(list, bin)))
    }

    /// Cells with the leaves that may stand in them.
    #[derive(Clone)]
    struct Bed {
        cells: Cells,
        nodes: Vec<Node>,
        marks: Vec<Mark>,
        gains: Gains,
    }

    impl Bed {
        fn new(quantum: u64, leaves: usize, gains: Gains) -> Bed {
            let cells = Cells::new(Ages::new(128 * quantum));
            Bed { cells, nodes: vec![Node::root(); leaves], marks: vec![Mark::default(); leaves], gains }
        }

        fn put(&mut self, at: u32, list: u8, tick: u64, now: u64) {
            (self.marks[at as usize].list, self.marks[at as usize].tick) = (list, tick);
            self.cells.enter(&mut self.nodes, &self.marks, at, now, &self.gains);
        }

        fn leave(&mut self, at: u32) {
            self.cells.leave(&mut self.nodes, &self.marks[at as usize], at);
        }

        fn first(&mut self, now: u64, safe: u64) -> Option<u32> {
            self.cells.first(&mut self.nodes, &self.marks, now, &self.gains, safe)
        }
    }

    #[test]
    fn without_lessons_it_is_lru() {
        // Every list, random removals, against a sorted set.
        let mut bed = Bed::new(4, 300, rule(|_, _| 1.0));
        let mut want = std::collections::BTreeSet::new();
        let mut state = 3u64;
        for now in 1..30_000u64 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let at = (state >> 40) as u32 % 300;
            if want.remove(&(bed.marks[at as usize].tick, at)) {
                bed.leave(at);
            } else {
                bed.put(at, (state >> 50) as u8 % 56, now, now);
                want.insert((now, at));
            }
            assert_eq!(bed.first(now, 0), want.first().map(|w| w.1));
            assert_eq!(bed.cells.len(), want.len());
        }
        let mut seen = 0;
        bed.cells.for_each(&bed.nodes, &bed.marks, |_, sound| {
            seen += 1;
            assert!(sound);
        });
        assert_eq!(seen, want.len());
    }

    #[test]
    fn the_cell_of_the_last_victim_is_that_of_the_next() {
        // Leaves of every list come and go, those with an earlier use too, and what is safe moves.
        let mut bed = Bed::new(4, 300, rule(|list, bin| ((list * 31 + bin * 17) % 41) as f32));
        let (mut state, mut kept) = (3u64, 0);
        let mut inside = [false; 300];
        for now in 1..30_000u64 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let (at, list) = ((state >> 40) as u32 % 300, (state >> 50) as u8 % 57);
            if std::mem::replace(&mut inside[at as usize], true) {
                bed.leave(at);
            }
            bed.put(at, list, now - (state >> 30) % 2 * now.min(200), now);
            for _ in 0..state % 3 {
                let safe = now.saturating_sub(150 + now / 64 % 3 * 40);
                let mut anew = bed.clone();
                anew.cells.least = None;
                kept += u32::from(bed.cells.least.is_some());
                let found = bed.first(now, safe);
                assert_eq!(found, anew.first(now, safe));
                if let Some(at) = found {
                    bed.leave(at);
                    inside[at as usize] = false;
                }
            }
        }
        assert!(kept > 15_000, "{kept} times it was known");
    }

    #[test]
    fn the_least_worth_goes_first() {
        let mut bed = Bed::new(1, 8, rule(|list, bin| list as f32 + 1.0 / (bin + 1) as f32));
        bed.put(0, 5, 10, 10);
        bed.put(1, 2, 11, 11);
        bed.put(2, 2, 12, 12);
        bed.put(3, 2, 90, 90);
        // List 2 is worth less, and the more the older.
        let mut out = Vec::new();
        while let Some(at) = bed.first(100, u64::MAX) {
            out.push(at);
            bed.leave(at);
        }
        assert_eq!(out, [1, 2, 3, 0]);
    }

    #[test]
    fn what_is_finished_goes_first() {
        let mut bed = Bed::new(1, 8, rule(|list, _| if list as u8 == FINISHED { -1.0 } else { 1.0 }));
        bed.put(1, 7, 50, 50);
        bed.put(2, FINISHED, 99, 99);
        assert_eq!(bed.first(100, u64::MAX), Some(2));
        assert_eq!(bed.first(100, 0), Some(2), "whatever is safe");
        bed.leave(2);
        assert_eq!(bed.first(100, 20), Some(1));
    }

    #[test]
    fn what_is_safe_is_spared_whatever_it_is_worth() {
        let mut bed = Bed::new(1, 8, rule(|list, _| list as f32));
        for (at, list, tick) in [(0, 9, 10), (1, 7, 20), (2, 1, 60), (3, 2, 61), (4, 1, 62)] {
            bed.put(at, list, tick, tick);
        }
        let (mut out, mut shown) = (Vec::new(), Vec::new());
        bed.cells.ahead(&bed.nodes, &bed.gains, 50, &mut |at| {
            shown.push(at);
            true
        });
        while let Some(at) = bed.first(100, 50) {
            out.push(at);
            bed.leave(at);
        }
        assert_eq!(out, [1, 0, 2, 3, 4], "by worth, then by age");
        assert_eq!(shown, out);
    }

    #[test]
    fn of_a_long_interval_only_what_is_older_goes() {
        let mut bed = Bed::new(1, 64, rule(|list, _| 60.0 - list as f32));
        // So long ago that these uses share intervals.
        (0..32).for_each(|at| bed.put(at, (at % 4) as u8, u64::from(at), 31));
        bed.put(32, 9, 4_000, 4_000);
        assert!(bed.cells.intervals.len() < 6);
        let mut out = Vec::new();
        while let Some(at) = bed.first(4_000, 16) {
            out.push(at);
            bed.leave(at);
        }
        let (old, new) = out.split_at(16);
        assert!(old.iter().all(|&at| at < 16), "what is not safe goes first: {out:?}");
        assert_eq!(old[0], 3, "that which is worth least");
        assert!(new.is_sorted(), "then by age: {out:?}");
    }

    #[test]
    fn an_earlier_use_finds_its_place() {
        let mut bed = Bed::new(64, 8, rule(|_, _| 1.0));
        for (at, tick) in [(0, 10), (1, 30), (2, 20), (3, 5), (4, 40)] {
            bed.put(at, 0, tick, 50);
        }
        let mut out = Vec::new();
        while let Some(at) = bed.first(50, u64::MAX) {
            out.push(at);
            bed.leave(at);
        }
        assert_eq!(out, [3, 0, 2, 1, 4]);
    }

    #[test]
    fn intervals_stay_few_and_fine() {
        let mut bed = Bed::new(1, 40_000, rule(|_, _| 1.0));
        for at in 0..40_000u32 {
            bed.put(at, (at % 56) as u8, u64::from(at), u64::from(at));
            assert!(bed.cells.intervals.len() <= SLOTS);
        }
        let now = 40_000;
        for pair in bed.cells.intervals.iter().collect::<Vec<_>>().windows(2) {
            let (span, age) = (pair[1].start - pair[0].start, now - pair[1].start);
            assert!(span <= age / 2 + 2, "{span} at age {age}");
        }
        let mut shown = Vec::new();
        bed.cells.ahead(&bed.nodes, &bed.gains, 0, &mut |at| {
            shown.push(at);
            shown.len() < 100
        });
        assert_eq!(shown.len(), 100);
        assert!(shown.iter().all(|&at| at < 10_000), "the oldest: {shown:?}");
    }
}
