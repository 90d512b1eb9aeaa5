//! Never much worse than LRU: the learned order may lose a small allowance against the shadow, then LRU takes over
//! until the allowance has grown back.

/// Hits, in pages, that the learned order may lose for good, as a share of what LRU would have hit.
const ALLOWED_SHARE: f64 = 0.002;
/// The same as a share of the capacity, so that a start is possible at all.
const ALLOWED_START: f64 = 1.0 / 64.0;
/// Most lead that is remembered, as a share of LRU's hits and of the capacity: yesterday's gain pays for no more.
const LEAD_SHARE_MAX: f64 = 0.01;

#[derive(Clone, Debug)]
pub(super) struct Guard {
    capacity: f64,
    /// Hits of LRU, fading.
    lru_hits: f64,
    /// Own hits minus LRU's, capped above.
    lead: f64,
    learned: bool,
    pub(super) switches: u32,
    /// False: the learned order always rules, for measurements.
    on: bool,
}

impl Guard {
    pub(super) fn new(capacity_pages: u64, on: bool) -> Guard {
        Guard { capacity: capacity_pages as f64, lru_hits: 0.0, lead: 0.0, learned: true, switches: 0, on }
    }

    /// True while the learned order rules.
    #[inline]
    pub(super) fn learned(&self) -> bool {
        self.learned
    }

    pub(super) fn lead_pages(&self) -> i64 {
        self.lead as i64
    }

    /// Takes in a request. O(1).
    pub(super) fn count(&mut self, own_pages: u64, lru_pages: u64) {
        self.lru_hits += lru_pages as f64;
        let most = LEAD_SHARE_MAX * self.lru_hits + 0.25 * self.capacity;
        self.lead = (self.lead + own_pages as f64 - lru_pages as f64).min(most);
        if !self.on {
            return;
        }
        let allowed = ALLOWED_SHARE * self.lru_hits + ALLOWED_START * self.capacity;
        let flip = if self.learned { self.lead < -allowed } else { self.lead > -0.25 * allowed };
        if flip {
            self.learned = !self.learned;
            self.switches += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loss_is_bounded() {
        let mut guard = Guard::new(1_000, true);
        let (mut own, mut lru) = (0u64, 0u64);
        for _ in 0..100_000 {
            // The worst case: nothing hits while the learned order rules.
            let hit = if guard.learned() { 0 } else { 50 };
            guard.count(hit, 50);
            (own, lru) = (own + hit, lru + 50);
        }
        let lost = (lru - own) as f64 / lru as f64;
        assert!(lost < 0.006, "lost {lost}");
        assert!(guard.switches > 4, "it tried again: {}", guard.switches);
    }

    #[test]
    fn an_old_lead_does_not_pay_for_long() {
        let mut guard = Guard::new(1_000, true);
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
        }
        assert!(guard.learned());
    }
}
