//! Never much worse than LRU.
//!
//! The learned order starts (without evidence it is LRU) and may lose a small allowance against the shadow before LRU
//! takes over. It is tried again after a long wait, twice as long each time, because a change of order by itself costs
//! hits: the memory is full of what the other order likes. And only if the uses that are followed speak for it: each, when
//! it is answered, is asked whether it would have been a hit under either order, by the tables as they were before.

/// Hits, in pages, that the learned order may lose for good, as a share of what LRU would have hit.
const ALLOWED_SHARE: f64 = 0.003;
/// The same as a share of the capacity, so that a start is possible at all: some requests' worth.
const ALLOWED_START: f64 = 1.0 / 64.0;
/// Most lead that is remembered, as a share of LRU's hits and of the capacity: yesterday's gain pays for no more.
const LEAD_SHARE_MAX: f64 = 0.01;
/// Hits of followed uses, as a multiple of LRU's, from which a trial starts and below which one ends.
const TRIED_START: f64 = 1.08;
const TRIED_END: f64 = 1.01;
/// Hits of followed uses, in capacities, before that says anything.
const EVIDENCE: f64 = 0.5;
/// Volume until the next trial after the first fall-back, in capacities; doubles each time.
const WAIT_START: f64 = 64.0;
const WAIT_MAX: f64 = 1024.0;

#[derive(Clone, Debug)]
pub(super) struct Guard {
    capacity: f64,
    /// Hits of LRU.
    lru_hits: f64,
    /// Own hits minus LRU's, capped above.
    lead: f64,
    learned: bool,
    pub(super) switches: u32,
    /// False: the learned order always rules, for measurements.
    on: bool,
    /// Hits of followed uses, fading: by gain, by age.
    tried: (f64, f64),
    /// Volume until the next trial.
    wait: f64,
    next_wait: f64,
}

impl Guard {
    pub(super) fn new(capacity_pages: u64, on: bool) -> Guard {
        let capacity = capacity_pages as f64;
        let next_wait = WAIT_START * capacity;
        Guard {
            capacity,
            lru_hits: 0.0,
            lead: 0.0,
            learned: true,
            switches: 0,
            on,
            tried: (0.0, 0.0),
            wait: 0.0,
            next_wait,
        }
    }

    /// True while the learned order rules.
    #[inline]
    pub(super) fn learned(&self) -> bool {
        self.learned
    }

    pub(super) fn lead_pages(&self) -> i64 {
        self.lead as i64
    }

    /// Takes in hits. O(1).
    #[inline]
    pub(super) fn count(&mut self, own_pages: u64, lru_pages: u64) {
        self.lru_hits += lru_pages as f64;
        let most = LEAD_SHARE_MAX * self.lru_hits + 0.25 * self.capacity;
        self.lead = (self.lead + own_pages as f64 - lru_pages as f64).min(most);
        if self.learned && self.on && self.lead < -self.allowed() {
            self.change(false);
            self.wait = self.next_wait;
            self.next_wait = (2.0 * self.next_wait).min(WAIT_MAX * self.capacity);
        }
    }

    /// A followed use was answered: pages hit by gain, and by age. O(1).
    #[inline]
    pub(super) fn tried(&mut self, by_gain: f64, by_age: f64) {
        self.tried.0 += by_gain;
        self.tried.1 += by_age;
    }

    /// Hits of followed uses as a multiple of what LRU would have hit of them; 1 before there are enough.
    pub(super) fn advantage(&self) -> f64 {
        let (by_gain, by_age) = self.tried;
        if by_gain.max(by_age) < EVIDENCE * self.capacity { 1.0 } else { by_gain / by_age.max(1.0) }
    }

    /// Decides who rules, after so much volume. `fade` is what is left of old evidence. O(1).
    pub(super) fn decide(&mut self, fade: f64, volume: u64) {
        self.wait = (self.wait - volume as f64).max(0.0);
        let known = self.tried.0.max(self.tried.1) >= EVIDENCE * self.capacity;
        let advantage = self.advantage();
        self.tried = (self.tried.0 * fade, self.tried.1 * fade);
        if !self.on || !known {
            return;
        }
        if self.learned && advantage < TRIED_END && self.lead <= 0.0 {
            self.change(false);
        } else if !self.learned && advantage > TRIED_START && self.wait == 0.0 && self.lead > -self.allowed()
        {
            self.change(true);
        }
    }

    fn change(&mut self, learned: bool) {
        self.learned = learned;
        self.switches += 1;
    }

    fn allowed(&self) -> f64 {
        ALLOWED_SHARE * self.lru_hits + ALLOWED_START * self.capacity
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn promise(guard: &mut Guard, times: f64) {
        guard.tried = (times * 1e4, 1e4);
        guard.decide(1.0, 100);
    }

    #[test]
    fn the_loss_is_bounded() {
        let mut guard = Guard::new(1_000, true);
        let (mut own, mut lru) = (0u64, 0u64);
        for _ in 0..100_000 {
            // The worst case: the followed uses promise much and nothing hits while the learned order rules.
            promise(&mut guard, 2.0);
            let hit = if guard.learned() { 0 } else { 50 };
            guard.count(hit, 50);
            (own, lru) = (own + hit, lru + 50);
        }
        let lost = (lru - own) as f64 / lru as f64;
        assert!(lost < 0.004, "lost {lost}");
        assert!(guard.switches > 4, "it tried again: {}", guard.switches);
    }

    #[test]
    fn nothing_is_tried_again_without_a_reason() {
        let mut guard = Guard::new(1_000, true);
        promise(&mut guard, 0.9);
        assert!(!guard.learned(), "no lead and no promise");
        promise(&mut guard, 1.05);
        assert!(!guard.learned());
        guard.tried = (100.0, 1.0);
        guard.decide(1.0, 100);
        assert!(!guard.learned(), "too little is known");
        promise(&mut guard, 1.1);
        assert!(guard.learned());
        guard.count(60, 50);
        promise(&mut guard, 0.9);
        assert!(guard.learned(), "it leads, whatever the followed uses say");
        assert_eq!(guard.switches, 2);
    }

    #[test]
    fn an_old_lead_does_not_pay_for_long() {
        let mut guard = Guard::new(1_000, true);
        promise(&mut guard, 2.0);
        for _ in 0..10_000 {
            guard.count(60, 50);
        }
        let mut lost = 0;
        while guard.learned() {
            guard.count(0, 50);
            lost += 50;
        }
        assert!(lost < 9_000 && lost > 1_000, "{lost}");
    }

    #[test]
    fn off_means_off() {
        let mut guard = Guard::new(1_000, false);
        for _ in 0..10_000 {
            guard.count(0, 50);
            promise(&mut guard, 0.5);
        }
        assert!(guard.learned());
    }
}
