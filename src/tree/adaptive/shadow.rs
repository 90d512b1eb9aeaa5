//! What LRU would hold in the same memory, without simulating it.
//!
//! LRU holds the pages used last, so all it takes is the volume of pages by time of last use, from the newest back until
//! the capacity is full. Uses are summed in buckets of 1/256 of the capacity; a page moves from the bucket of its last use
//! to the newest. No entry per node or ghost exists, and a walk down a path whose nodes were last used together looks
//! its bucket up once, from where its span of time began.

use std::collections::VecDeque;

/// Buckets that the capacity is cut into; the error at the border is half of one.
const BUCKETS: u64 = 256;
/// More than so many are merged where they have emptied.
const BUCKETS_MAX: usize = 1_024;
/// Spans of time of half a bucket's volume whose first bucket is known: two capacities. What was used before is searched for.
const SPANS: usize = 1 << 10;

#[derive(Clone, Copy, Debug)]
struct Bucket {
    start: u64,
    pages: u64,
}

#[derive(Clone, Debug)]
pub(super) struct Shadow {
    capacity: u64,
    width: u64,
    /// Oldest first; starts ascend.
    buckets: VecDeque<Bucket>,
    total: u64,
    /// Tick of the latest use.
    last: u64,
    /// The latest look-up: tick and bucket.
    memo: Option<(u64, usize)>,
    /// By span, in a ring: the number of the bucket that was the newest when the span began. A search among 1,024 starts
    /// was a tenth of a look-up.
    began: Vec<u64>,
    /// Ticks to spans.
    shift: u32,
    /// The latest span.
    span: u64,
    /// Number of the oldest bucket.
    first: u64,
}

impl Shadow {
    pub(super) fn new(capacity_pages: u64) -> Shadow {
        let width = (capacity_pages / BUCKETS).max(1);
        Shadow {
            capacity: capacity_pages,
            width,
            buckets: VecDeque::new(),
            total: 0,
            last: 0,
            memo: None,
            began: vec![0; SPANS],
            shift: (width / 2).max(1).ilog2(),
            span: 0,
            first: 0,
        }
    }

    /// The bucket that a tick lies in; none if it is older than all. O(1) for one of the spans that are known, if few
    /// buckets were opened within it.
    #[inline]
    fn bucket_of(&self, tick: u64) -> Option<usize> {
        // Uses of the newest bucket may be later than the latest span.
        let span = (tick >> self.shift).min(self.span);
        if span + (SPANS as u64) <= self.span {
            // What was evicted long ago comes back: there is nothing to search.
            self.buckets.front().filter(|oldest| oldest.start <= tick)?;
            return self.buckets.partition_point(|b| b.start <= tick).checked_sub(1);
        }
        let mut at = self.began[span as usize % SPANS].saturating_sub(self.first) as usize;
        while self.buckets.get(at + 1).is_some_and(|next| next.start <= tick) {
            at += 1;
        }
        self.buckets.get(at).filter(|b| b.start <= tick).map(|_| at)
    }

    /// Time has come to `now`: the spans until then begin in the newest bucket.
    #[inline]
    fn pass(&mut self, now: u64) {
        let span = now >> self.shift;
        if span > self.span {
            self.begin(span);
        }
    }

    fn begin(&mut self, span: u64) {
        let newest = self.first + (self.buckets.len() as u64).saturating_sub(1);
        for span in (self.span + 1).max(span.saturating_sub(SPANS as u64 - 1))..=span {
            self.began[span as usize % SPANS] = newest;
        }
        self.span = span;
    }

    /// Pages are used now. O(1) amortised.
    #[inline]
    pub(super) fn add(&mut self, now: u64, pages: u32) {
        self.pass(now);
        match self.buckets.back_mut() {
            // Uses of one tick share a bucket, so that a tick names one.
            Some(newest) if newest.pages < self.width || now == self.last => newest.pages += u64::from(pages),
            _ => self.open(now, pages),
        }
        self.last = now;
        self.total += u64::from(pages);
    }

    fn open(&mut self, now: u64, pages: u32) {
        self.settle();
        if self.buckets.len() >= BUCKETS_MAX {
            self.compact();
        }
        self.buckets.push_back(Bucket { start: now, pages: pages.into() });
        self.memo = None;
    }

    /// Pages last used at `tick` are used now or forgotten; how many of them LRU holds. O(1) where the caller repeats a
    /// tick, O(log) otherwise.
    #[inline]
    pub(super) fn take(&mut self, tick: u64, pages: u32) -> u32 {
        let at = match self.memo {
            Some((of, at)) if of == tick => at,
            _ => {
                let Some(at) = self.bucket_of(tick) else { return 0 };
                self.memo = Some((tick, at));
                at
            }
        };
        let over = self.total.saturating_sub(self.capacity);
        let bucket = &mut self.buckets[at];
        let before = bucket.pages;
        let taken = before.min(u64::from(pages));
        bucket.pages -= taken;
        self.total -= taken;
        // LRU has evicted some of its oldest bucket, of a path the end. Walks start at the root and find what is kept. (Of
        // each node a share instead was 3 % too little where prompts fill half of the memory.)
        let kept = if at == 0 { before.saturating_sub(over) } else { before };
        taken.min(kept) as u32
    }

    /// Moves a use to a later time. O(1) if it is in the newest bucket already.
    #[inline]
    pub(super) fn renew(&mut self, ticks: (u64, u64), pages: u32) {
        match self.buckets.back() {
            Some(newest) if ticks.0 >= newest.start => {}
            Some(_) if ticks.1 < self.last => self.shift(ticks, pages),
            _ => {
                self.take(ticks.0, pages);
                self.add(ticks.1, pages);
            }
        }
    }

    /// Moves pages from one time of use to another that is known. O(1) as a rule.
    pub(super) fn shift(&mut self, ticks: (u64, u64), pages: u32) {
        if ticks.0 == ticks.1 {
            return;
        }
        let (from, to) = (self.bucket_of(ticks.0), self.bucket_of(ticks.1));
        if let (Some(from), Some(to)) = (from, to) {
            let taken = self.buckets[from].pages.min(pages.into());
            self.buckets[from].pages -= taken;
            self.buckets[to].pages += taken;
        }
    }

    /// Lets go of what LRU would have evicted from so many pages: between requests, since a running request is pinned.
    pub(super) fn settle_in(&mut self, capacity_pages: u64) {
        self.capacity = capacity_pages;
        self.settle();
    }

    fn settle(&mut self) {
        while let Some(oldest) = self.buckets.front().filter(|b| self.total - b.pages >= self.capacity) {
            self.total -= oldest.pages;
            self.buckets.pop_front();
            self.first += 1;
            self.memo = None;
        }
    }

    /// The use from which on LRU in `pages` of memory holds everything. O(buckets), from the nearer end.
    pub(super) fn newest(&self, pages: u64) -> u64 {
        if pages > self.total / 2 {
            return self.newest_from_oldest(pages);
        }
        let (mut left, mut from) = (pages, u64::MAX);
        for bucket in self.buckets.iter().rev() {
            if bucket.pages > left {
                return from;
            }
            left -= bucket.pages;
            from = bucket.start;
        }
        0
    }

    /// The same, counted from the oldest bucket on: of a full memory with 7/8 of it safe 32 buckets instead of 224.
    fn newest_from_oldest(&self, pages: u64) -> u64 {
        let mut over = self.total.saturating_sub(pages);
        if over == 0 {
            return 0;
        }
        for bucket in &self.buckets {
            if over == 0 {
                return bucket.start;
            }
            over = over.saturating_sub(bucket.pages);
        }
        u64::MAX
    }

    fn compact(&mut self) {
        let mut kept: VecDeque<Bucket> = VecDeque::with_capacity(BUCKETS_MAX);
        for bucket in self.buckets.drain(..) {
            match kept.back_mut() {
                Some(older) if older.pages + bucket.pages <= self.width => older.pages += bucket.pages,
                _ => kept.push_back(bucket),
            }
        }
        self.buckets = kept;
        self.memo = None;
        let mut at = 0;
        for span in self.span.saturating_sub(SPANS as u64 - 1)..=self.span {
            while self.buckets.get(at + 1).is_some_and(|next| next.start <= span << self.shift) {
                at += 1;
            }
            self.began[span as usize % SPANS] = self.first + at as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_holds_what_lru_holds() {
        // 60 items of 10 pages in room for 40 of them, against a list.
        let (mut shadow, mut lru) = (Shadow::new(400), Vec::new());
        let (mut used, mut state) = ([0u64; 60], 7u64);
        let (mut hits, mut shadow_hits) = (0u64, 0u64);
        for now in 1..20_000u64 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let item = (state >> 33) as usize % 60;
            if let Some(at) = lru.iter().position(|&i| i == item) {
                hits += 10;
                lru.remove(at);
            }
            lru.push(item);
            if lru.len() > 40 {
                lru.remove(0);
            }
            if used[item] > 0 {
                shadow_hits += u64::from(shadow.take(used[item], 10));
            }
            shadow.settle();
            shadow.add(now, 10);
            used[item] = now;
        }
        let off = shadow_hits.abs_diff(hits) as f64 / hits as f64;
        assert!(off < 0.02, "{shadow_hits} against {hits}");
    }

    #[test]
    fn of_a_path_that_is_half_evicted_the_start_is_hit() {
        let mut shadow = Shadow::new(400);
        shadow.add(1, 300);
        shadow.add(2, 200);
        shadow.settle();
        // 100 of the 300 pages are gone: the end of the path, which was used at one time.
        let hits: Vec<u32> = [150, 50, 100].map(|pages| hit(&mut shadow, 1, 3, pages)).into();
        assert_eq!(hits, [150, 50, 0]);
    }

    fn hit(shadow: &mut Shadow, tick: u64, now: u64, pages: u32) -> u32 {
        let hit = shadow.take(tick, pages);
        shadow.add(now, pages);
        hit
    }

    #[test]
    fn it_knows_what_less_memory_would_hold() {
        let mut shadow = Shadow::new(400);
        (1..=40).for_each(|now| shadow.add(now, 10));
        assert_eq!(shadow.newest(0), u64::MAX, "nothing");
        assert_eq!(shadow.newest(100), 31, "what was used at 31 to 40");
        assert_eq!(shadow.newest(400), 0, "all of it");
        assert_eq!(shadow.newest(390), 2, "all but the first");
        assert_eq!(shadow.newest(399), 2, "a bucket counts whole");
        shadow.take(40, 10);
        assert_eq!(shadow.newest(100), 30, "what is used again is not there any more");
    }

    #[test]
    fn buckets_stay_few_when_everything_is_used_again() {
        let mut shadow = Shadow::new(1_000_000);
        let mut used = [0u64; 100];
        for now in 1..100_000u64 {
            let item = (now % 100) as usize;
            shadow.take(used[item], 4_000);
            shadow.add(now, 4_000);
            used[item] = now;
        }
        assert!(shadow.buckets.len() <= BUCKETS_MAX);
        for tick in 0..100_100 {
            let after = shadow.buckets.partition_point(|b| b.start <= tick);
            assert_eq!(shadow.bucket_of(tick), after.checked_sub(1), "{tick}");
        }
        assert_eq!(shadow.total, 400_000);
        assert_eq!(shadow.buckets.iter().map(|b| b.pages).sum::<u64>(), shadow.total);
    }

    #[test]
    fn a_bucket_is_found_from_its_span() {
        let (mut shadow, mut now, mut state) = (Shadow::new(10_000), 0, 7u64);
        let mut ticks = std::collections::VecDeque::new();
        for _ in 0..20_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // Steps of every size, sometimes past all spans.
            now += (state >> 33) % 40 * if state >> 50 & 511 == 0 { 1_000 } else { 1 };
            shadow.settle();
            shadow.add(now, (state >> 40) as u32 % 30);
            ticks.push_back(now);
            if ticks.len() > 300 {
                shadow.take(ticks.pop_front().unwrap_or(0), 12);
            }
            let tick = now.saturating_sub((state >> 20) % 30_000);
            let after = shadow.buckets.partition_point(|b| b.start <= tick);
            assert_eq!(shadow.bucket_of(tick), after.checked_sub(1));
        }
    }

    #[test]
    fn strange_numbers_do_no_harm() {
        let mut shadow = Shadow::new(0);
        shadow.take(5, 5);
        shadow.add(1, u32::MAX);
        shadow.renew((0, 9), 7);
        shadow.renew((0, 3), 7);
        shadow.settle();
        assert_eq!(shadow.take(u64::MAX, u32::MAX), 0);
    }
}
