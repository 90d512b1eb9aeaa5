//! When completions reach the core: as they come, or at moments that a cost model sets.
//!
//! A replay must decide the same whatever the machine does. Under [`Delivery::Modelled`] every operation gets its
//! moment when it is issued, from sizes and rates alone; the event is delivered at that moment of virtual time, and
//! if the real copy is later than that, the driver waits for it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::base::{OpId, Time};
use crate::tiers::EndKey;

/// When completions reach the core.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Delivery {
    /// As soon as they are known.
    #[default]
    AsCompleted,
    /// At the moment the model gives, in virtual time. Needs executors that run by themselves (not a device driven
    /// by hand).
    Modelled(CostModel),
}

/// Rates and latencies of a machine that is only imagined.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CostModel {
    /// Device to host, bytes per second.
    pub d2h_bytes_per_s: u64,
    /// Host to device, bytes per second.
    pub h2d_bytes_per_s: u64,
    /// Store reads, bytes per second.
    pub store_get_bytes_per_s: u64,
    /// Store writes, bytes per second.
    pub store_put_bytes_per_s: u64,
    /// Start of a copy, microseconds.
    pub copy_latency_us: u64,
    /// Start of a store call, microseconds.
    pub store_latency_us: u64,
}

impl Default for CostModel {
    /// A PCIe 5 x16 link (50 GB/s each way) and one fast SSD (6 GB/s reading, 3 GB/s writing).
    fn default() -> Self {
        CostModel {
            d2h_bytes_per_s: 50_000_000_000,
            h2d_bytes_per_s: 50_000_000_000,
            store_get_bytes_per_s: 6_000_000_000,
            store_put_bytes_per_s: 3_000_000_000,
            copy_latency_us: 20,
            store_latency_us: 200,
        }
    }
}

/// What runs one after the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Lane {
    ToHost,
    ToDevice,
    Get,
    Put,
}

impl CostModel {
    fn cost_us(&self, lane: Lane, bytes: u64) -> (u64, u64) {
        let (latency, rate) = match lane {
            Lane::ToHost => (self.copy_latency_us, self.d2h_bytes_per_s),
            Lane::ToDevice => (self.copy_latency_us, self.h2d_bytes_per_s),
            Lane::Get => (self.store_latency_us, self.store_get_bytes_per_s),
            Lane::Put => (self.store_latency_us, self.store_put_bytes_per_s),
        };
        let transfer = u128::from(bytes) * 1_000_000 / u128::from(rate.max(1));
        (latency, u64::try_from(transfer).unwrap_or(u64::MAX))
    }
}

/// What is delivered at a moment. Ordered so that equal moments keep the order of issue.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Moment {
    /// Layers `0..layers` of a load, once its copy has really ended.
    Layers { op: OpId, layers: u32 },
    /// The end itself.
    End(EndKey),
}

/// The schedule of modelled moments.
#[derive(Debug)]
pub(super) struct Schedule {
    model: CostModel,
    lane_free_at: [Time; 4],
    moments: BinaryHeap<Reverse<(Time, u64, Moment)>>,
    issued: u64,
}

impl Schedule {
    pub(super) fn new(model: CostModel) -> Self {
        Schedule { model, lane_free_at: [Time::ZERO; 4], moments: BinaryHeap::new(), issued: 0 }
    }

    /// Gives the action its moment: behind what its lane still has to do, then latency, then transfer. `layers`
    /// above 1 adds a moment per layer of a load.
    pub(super) fn issue(&mut self, now: Time, lane: Lane, bytes: u64, end: EndKey, layers: u32) {
        let (latency, transfer) = self.model.cost_us(lane, bytes);
        let start = self.lane_free_at[lane as usize].max(now);
        // The latency of the next action overlaps this transfer: lanes are pipelined.
        self.lane_free_at[lane as usize] = start + transfer;
        if let EndKey::Copy(op) = end {
            for done in 1..layers {
                let share = transfer / u64::from(layers) * u64::from(done);
                self.push(start + latency + share, Moment::Layers { op, layers: done });
            }
        }
        self.push(start + latency + transfer, Moment::End(end));
    }

    fn push(&mut self, at: Time, moment: Moment) {
        self.issued += 1;
        self.moments.push(Reverse((at, self.issued, moment)));
    }

    pub(super) fn next_due(&self) -> Option<Time> {
        self.moments.peek().map(|Reverse((at, _, _))| *at)
    }

    /// The next moment that is due by `now`.
    pub(super) fn pop_due(&mut self, now: Time) -> Option<(Time, Moment)> {
        if self.next_due()? > now {
            return None;
        }
        self.moments.pop().map(|Reverse((at, _, moment))| (at, moment))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_is_a_pipeline_and_lanes_do_not_wait_for_each_other() {
        let model = CostModel {
            d2h_bytes_per_s: 1_000_000,
            h2d_bytes_per_s: 1_000_000,
            copy_latency_us: 5,
            ..CostModel::default()
        };
        let mut s = Schedule::new(model);
        s.issue(Time(100), Lane::ToHost, 50, EndKey::Copy(OpId(1)), 1);
        s.issue(Time(100), Lane::ToHost, 50, EndKey::Copy(OpId(2)), 1);
        s.issue(Time(100), Lane::ToDevice, 40, EndKey::Copy(OpId(3)), 4);
        let mut seen = Vec::new();
        while let Some((at, moment)) = s.pop_due(Time(1000)) {
            seen.push((at.0, moment));
        }
        let layer = |layers| Moment::Layers { op: OpId(3), layers };
        let end = |op| Moment::End(EndKey::Copy(OpId(op)));
        assert_eq!(
            seen,
            [(115, layer(1)), (125, layer(2)), (135, layer(3)), (145, end(3)), (155, end(1)), (205, end(2))]
        );
    }
}
