//! Which ranks talk to which: pure functions of the two topologies. Every division must be exact; a pair
//! of topologies that does not divide is refused instead of guessed at.

use crate::pd::reason::Incompatible;

/// Most ranks along one axis.
pub const AXIS_MAX: u32 = 256;
/// Most pipeline stages.
pub const STAGES_MAX: usize = 64;

/// One rank of an instance.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Rank {
    /// Data-parallel replica.
    pub dp: u32,
    /// Pipeline stage.
    pub pp: u32,
    /// Context-parallel rank.
    pub cp: u32,
    /// Tensor-parallel rank.
    pub tp: u32,
}

/// Which pages of the prompt the context-parallel ranks of a prefill instance send.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum CpSpread {
    /// All ranks hold everything; rank 0 sends.
    #[default]
    Replicated,
    /// Rank r sends the r-th block of the page list, larger blocks first.
    Block,
}

/// The shape of an instance.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Topology {
    /// Data-parallel replicas.
    pub dp: u32,
    /// Context-parallel ranks.
    pub cp: u32,
    /// Tensor-parallel ranks.
    pub tp: u32,
    /// Target layers of each pipeline stage, in order; the number of stages is its length.
    pub stage_layers: Vec<u32>,
    /// Whose pages a context-parallel rank sends.
    pub cp_spread: CpSpread,
    /// Full-attention pages are spread over the tensor-parallel ranks (page `l` on rank `l mod tp`).
    pub page_shard: bool,
}

impl Topology {
    /// One rank holding `layers` layers.
    #[must_use]
    pub fn single(layers: u32) -> Topology {
        Topology {
            dp: 1,
            cp: 1,
            tp: 1,
            stage_layers: vec![layers],
            cp_spread: CpSpread::Replicated,
            page_shard: false,
        }
    }

    /// Pipeline stages.
    #[must_use]
    pub fn pp(&self) -> u32 {
        self.stage_layers.len() as u32
    }

    /// Target layers of a stage as a half-open range; empty outside.
    #[must_use]
    pub fn stage_range(&self, pp: u32) -> (u32, u32) {
        let start: u32 = self.stage_layers.iter().take(pp as usize).fold(0, |a, &n| a.saturating_add(n));
        let len = self.stage_layers.get(pp as usize).copied().unwrap_or(0);
        (start, start.saturating_add(len))
    }

    /// Whether every axis is within its limits.
    pub fn validate(&self) -> Result<(), Incompatible> {
        let axes = [self.dp, self.cp, self.tp];
        let layers: u64 = self.stage_layers.iter().map(|&n| u64::from(n)).sum();
        if axes.iter().any(|&n| n == 0 || n > AXIS_MAX)
            || self.stage_layers.is_empty()
            || self.stage_layers.len() > STAGES_MAX
            || layers > u64::from(crate::base::limits::LAYERS_MAX)
        {
            return Err(Incompatible::Limit);
        }
        Ok(())
    }

    /// Whether the rank exists.
    pub fn check_rank(&self, r: Rank) -> Result<(), Incompatible> {
        if r.dp < self.dp && r.pp < self.pp() && r.cp < self.cp && r.tp < self.tp {
            Ok(())
        } else {
            Err(Incompatible::Rank)
        }
    }

    /// All ranks of one data-parallel replica, in order.
    pub fn ranks(&self, dp: u32) -> impl Iterator<Item = Rank> + '_ {
        let (pp, cp, tp) = (self.pp(), self.cp, self.tp);
        (0..pp).flat_map(move |pp| (0..cp).flat_map(move |cp| (0..tp).map(move |tp| Rank { dp, pp, cp, tp })))
    }

    /// Ranks of one replica.
    #[must_use]
    pub fn replica_ranks(&self) -> usize {
        self.pp() as usize * self.cp as usize * self.tp as usize
    }
}

/// The tensor-parallel ranks of prefill that a decode rank is served by, ascending.
pub fn contacts_tp(p: &Topology, d: &Topology, d_tp_rank: u32) -> Result<std::ops::Range<u32>, Incompatible> {
    if p.page_shard {
        Ok(0..p.tp)
    } else if d.tp >= p.tp {
        if !d.tp.is_multiple_of(p.tp) {
            return Err(Incompatible::TensorParallel);
        }
        let t = d_tp_rank / (d.tp / p.tp);
        Ok(t..t + 1)
    } else {
        if !p.tp.is_multiple_of(d.tp) {
            return Err(Incompatible::TensorParallel);
        }
        let r = p.tp / d.tp;
        Ok(d_tp_rank * r..(d_tp_rank + 1) * r)
    }
}

/// The prefill ranks a decode rank contacts, all of replica `p_dp`: later stages first, because they finish
/// last. Equal stage splits pair stage by stage; any other pair contacts all stages, and those without a
/// layer in common send nothing and say so.
pub fn contacts(p: &Topology, d: &Topology, d_rank: Rank, p_dp: u32) -> Result<Vec<Rank>, Incompatible> {
    p.validate()?;
    d.validate()?;
    d.check_rank(d_rank)?;
    if p_dp >= p.dp {
        return Err(Incompatible::Rank);
    }
    if d.cp != 1 || d.page_shard {
        return Err(Incompatible::ContextParallel);
    }
    let tps = contacts_tp(p, d, d_rank.tp)?;
    let stages = if p.stage_layers == d.stage_layers { d_rank.pp..d_rank.pp + 1 } else { 0..p.pp() };
    let cps = match p.cp_spread {
        CpSpread::Replicated => 0..1,
        CpSpread::Block => 0..p.cp,
    };
    let mut out = Vec::with_capacity(stages.len() * cps.len() * tps.len());
    for pp in stages.rev() {
        for cp in cps.clone() {
            out.extend(tps.clone().map(|tp| Rank { dp: p_dp, pp, cp, tp }));
        }
    }
    Ok(out)
}

/// The decode ranks of replica `d_dp` that contact `p_rank`, in order: the destinations a prefill rank waits
/// for. The inverse of [`contacts`].
pub fn destinations(p: &Topology, d: &Topology, p_rank: Rank, d_dp: u32) -> Result<Vec<Rank>, Incompatible> {
    let mut out = Vec::new();
    for r in d.ranks(d_dp) {
        if contacts(p, d, r, p_rank.dp)?.contains(&p_rank) {
            out.push(r);
        }
    }
    Ok(out)
}

/// The heads of a rank when `total` heads are spread over `tp` ranks: (first, count). With more ranks than
/// heads, neighbouring ranks hold the same head (division, never modulo). `None` when they do not divide.
#[must_use]
pub fn heads_of(total: u32, tp: u32, rank: u32) -> Option<(u32, u32)> {
    if total == 0 || tp == 0 {
        None
    } else if total.is_multiple_of(tp) {
        Some((rank * (total / tp), total / tp))
    } else if tp.is_multiple_of(total) {
        Some((rank / (tp / total), 1))
    } else {
        None
    }
}

/// The block of a list of `total` that context-parallel rank `r` of `c` sends.
#[must_use]
pub fn cp_block(total: u32, c: u32, r: u32) -> (u32, u32) {
    let (base, rem) = (total / c.max(1), total % c.max(1));
    let start = r * base + r.min(rem);
    (start, start + base + u32::from(r < rem))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topo(tp: u32, stages: &[u32]) -> Topology {
        Topology { tp, stage_layers: stages.to_vec(), ..Topology::single(1) }
    }

    #[test]
    fn the_worked_example_of_four_endpoints() {
        let (p, d) = (topo(4, &[4, 4]), topo(2, &[8]));
        let got = contacts(&p, &d, Rank { tp: 1, ..Rank::default() }, 0).unwrap();
        let want: Vec<(u32, u32)> = vec![(1, 2), (1, 3), (0, 2), (0, 3)];
        assert_eq!(got.iter().map(|r| (r.pp, r.tp)).collect::<Vec<_>>(), want);
        let dests = destinations(&p, &d, Rank { tp: 3, pp: 0, ..Rank::default() }, 0).unwrap();
        assert_eq!(dests, vec![Rank { tp: 1, ..Rank::default() }]);
    }

    #[test]
    fn sizes_that_do_not_divide_are_refused() {
        let d = topo(3, &[8]);
        assert_eq!(contacts(&topo(2, &[8]), &d, Rank::default(), 0), Err(Incompatible::TensorParallel));
        assert_eq!(contacts(&topo(4, &[8]), &d, Rank::default(), 0), Err(Incompatible::TensorParallel));
        assert_eq!(contacts(&d, &d, Rank { tp: 3, ..Rank::default() }, 0), Err(Incompatible::Rank));
        assert_eq!(contacts(&topo(0, &[8]), &d, Rank::default(), 0), Err(Incompatible::Limit));
    }

    #[test]
    fn contacts_and_destinations_are_inverse() {
        for (ptp, dtp) in [(1, 1), (1, 4), (4, 1), (2, 4), (8, 2), (6, 3)] {
            for (ps, ds) in [(vec![8], vec![8]), (vec![3, 5], vec![8]), (vec![8], vec![5, 3])] {
                let (p, d) = (topo(ptp, &ps), topo(dtp, &ds));
                for dr in d.ranks(0) {
                    for pr in p.ranks(0) {
                        let forward = contacts(&p, &d, dr, 0).unwrap().contains(&pr);
                        let back = destinations(&p, &d, pr, 0).unwrap().contains(&dr);
                        assert_eq!(forward, back);
                    }
                }
            }
        }
    }

    #[test]
    fn heads_and_blocks_of_the_examples() {
        assert_eq!(heads_of(2, 4, 1), Some((0, 1)));
        assert_eq!(heads_of(2, 4, 2), Some((1, 1)));
        assert_eq!(heads_of(8, 4, 3), Some((6, 2)));
        assert_eq!(heads_of(6, 4, 0), None);
        let blocks: Vec<_> = (0..4).map(|r| cp_block(10, 4, r)).collect();
        assert_eq!(blocks, vec![(0, 3), (3, 6), (6, 8), (8, 10)]);
    }
}
