//! Two tiers, device and host.
//!
//! *Inclusive*: write-through as it is built everywhere. The host sees every request and keeps what its own order likes;
//! the device holds copies. *Exclusive*: a page is on one tier; the device demotes, the host evicts. What a
//! cache gains that drops the host copies of what the device holds anyway lies between the two.

use sapwood::base::heap::IndexHeap;

use super::sim::{self, Now, Policy, Residents};
use super::work::{Step, Work};

/// What came out, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    /// Found on the device.
    pub(crate) device: u64,
    /// Found on the host and loaded.
    pub(crate) loaded: u64,
}

impl Outcome {
    pub(crate) fn total(&self) -> u64 {
        self.device + self.loaded
    }
}

/// Both tiers on their own: what one policy hits with the memory of the device, and with that of the host.
pub(crate) fn inclusive(device: &sim::Outcome, host: &sim::Outcome) -> Outcome {
    let mut outcome = Outcome::default();
    for (&d, &h) in device.hits.iter().zip(&host.hits) {
        outcome.device += u64::from(d);
        outcome.loaded += u64::from(h.saturating_sub(d));
    }
    outcome
}

/// Each page on one tier, one policy for both orders.
pub(crate) fn exclusive(work: &Work, policy: &mut dyn Policy, device_pages: u64, host_pages: u64) -> Outcome {
    let mut tiers = Tiers {
        work,
        device: Residents::new(work),
        all: Residents::new(work),
        host: IndexHeap::default(),
        outcome: Outcome::default(),
    };
    let mut due = Vec::new();
    for (number, job) in work.jobs.iter().enumerate() {
        let path = work.path(job);
        if u64::from(job.pages) >= device_pages || path.is_empty() {
            continue;
        }
        tiers.serve(number, path, policy, &mut due, device_pages);
        tiers.shrink_host(policy, host_pages);
    }
    tiers.outcome
}

struct Tiers<'a> {
    work: &'a Work,
    /// What is on the device, and what is on either tier.
    device: Residents,
    all: Residents,
    /// Ends of branches with pages on the host only.
    host: IndexHeap,
    outcome: Outcome,
}

impl Tiers<'_> {
    fn serve(
        &mut self,
        number: usize,
        path: &[Step],
        policy: &mut dyn Policy,
        due: &mut Vec<u32>,
        device_pages: u64,
    ) {
        let (on_device, missing) = self.device.find(path);
        let (found, _) = self.all.find(path);
        self.outcome.device += u64::from(on_device);
        self.outcome.loaded += u64::from(found - on_device);
        let now = Now { work: self.work, number, path };
        policy.request(&now, due);
        self.device.pin(path);
        path.iter().for_each(|s| _ = self.host.remove(s.node));
        for node in due.drain(..) {
            if self.device.leaves.key(node).is_some() {
                self.device.leaves.set(node, policy.key(self.work, node));
            }
            if self.host.key(node).is_some() {
                self.host.set(node, policy.key(self.work, node));
            }
        }
        path.iter().rev().for_each(|step| policy.touch(&now, step));
        while self.device.used + u64::from(missing) > device_pages {
            let Some(victim) = self.device.leaves.peek() else { break };
            let most = self.device.used + u64::from(missing) - device_pages;
            self.device.trim(self.work, victim, most, path, policy);
            self.place(victim, policy);
        }
        self.device.fill(self.work, path);
        self.all.fill(self.work, path);
        self.device.unpin(self.work, path, policy);
        path.iter().for_each(|s| self.place(s.node, policy));
    }

    /// Puts a node into the host's order if it belongs there.
    fn place(&mut self, node: u32, policy: &dyn Policy) {
        let at = node as usize;
        if self.all.is_end(node) && self.all.pages[at] > self.device.pages[at] {
            self.host.set(node, policy.key(self.work, node));
        } else {
            self.host.remove(node);
        }
    }

    fn shrink_host(&mut self, policy: &mut dyn Policy, host_pages: u64) {
        while self.all.used - self.device.used > host_pages {
            let Some(victim) = self.host.peek() else { break };
            let at = victim as usize;
            let only_here = u64::from(self.all.pages[at] - self.device.pages[at]);
            let most = only_here.min(self.all.used - self.device.used - host_pages);
            self.all.trim(self.work, victim, most, &[], policy);
            if self.all.pages[at] == 0 {
                policy.evicted(victim);
                self.host.remove(victim);
                let parent = self.work.nodes[at].parent;
                if parent != 0 {
                    self.place(parent, policy);
                }
            } else {
                self.place(victim, policy);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::generate::{self, generate};
    use crate::lab::policies::{self, Kind};

    #[test]
    fn exclusive_lru_is_lru_of_the_sum() {
        let work = generate(generate::Kind::Chats, 3, 2_000, 64);
        let lru = |capacity| sim::run(&work, capacity, 1e9, &mut *policies::make(Kind::Lru, &work)).pages();
        let mut policy = policies::make(Kind::Lru, &work);
        let two = exclusive(&work, &mut *policy, 4_000, 8_000);
        let (device, sum) = (lru(4_000), lru(12_000));
        assert_eq!(two.device, device, "the device of two tiers is that of one");
        let off = two.total().abs_diff(sum) as f64 / sum as f64;
        assert!(off < 0.01, "{} against {sum}", two.total());
    }

    #[test]
    fn inclusive_lru_is_lru_of_the_host() {
        let work = generate(generate::Kind::Agents, 3, 2_000, 64);
        let run = |pages| sim::run(&work, pages, 1e9, &mut *policies::make(Kind::Lru, &work));
        let (device, host) = (run(4_000), run(12_000));
        assert_eq!(inclusive(&device, &host).total(), host.pages());
    }
}
