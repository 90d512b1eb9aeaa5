//! A device that copies in the order that hurts most.

use sapwood::backend::device::{CopyFault, SoftDevice, SoftFault, TransferId};

/// Drives a manual device between two steps of the scheduler.
pub struct Adversary {
    state: u64,
    mood: u64,
    faults: bool,
    turns: u64,
}

impl Adversary {
    /// An adversary; the seed sets its mood.
    pub fn new(seed: u64) -> Adversary {
        Adversary { state: seed, mood: seed % 4, faults: seed.is_multiple_of(3), turns: 0 }
    }

    fn roll(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Copies a few pages, of some transfers, in some order: any direction at random, the oldest or the youngest
    /// transfer last of all, or nothing for a long time and then everything. Under every third seed many copies fail.
    pub fn act(&mut self, device: &SoftDevice) {
        self.turns += 1;
        if self.faults && self.turns.is_multiple_of(20) {
            let after_units = (self.roll() % 3) as u32;
            let fault = CopyFault { code: 700, quiescent: true };
            device.inject(SoftFault { skip_jobs: self.roll() % 8, after_units, fault });
        }
        if self.mood == 3 {
            if self.turns.is_multiple_of(13) {
                device.finish_all();
            }
            return;
        }
        for _ in 0..self.roll() % 6 {
            let ids = device.runnable();
            let Some(id) = self.pick(&ids) else { return };
            let choice = self.roll();
            device.step(id, choice);
        }
    }

    fn pick(&mut self, ids: &[TransferId]) -> Option<TransferId> {
        match self.mood {
            0 => ids.iter().min().copied(),
            1 => ids.iter().max().copied(),
            _ => ids.get(self.roll() as usize % ids.len().max(1)).copied(),
        }
    }
}
