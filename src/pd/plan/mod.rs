//! The exact planner: which bytes of a prefill rank go where on a decode rank.
//!
//! Entries pair by identity (group, layer, role). Positions, list lengths and divisibility decide nothing:
//! guessing the offset of V from them is how whole layers were exchanged silently (sgl#27740, sgl#33457).
//! A plan is made once per pair of ranks and materialised per chunk. Every element of the decode rank is
//! written by exactly one prefill rank: where several hold a copy, the lowest contacted one is elected.

mod pieces;

use smallvec::SmallVec;

use crate::pd::layout::{Component, Entry, EntryId, Group, Layout, Shape, TokenSplit, pages_of};
use crate::pd::reason::Incompatible;
use crate::pd::topo::{CpSpread, Rank, Topology, contacts, contacts_tp, cp_block};
use pieces::{Strided, pieces_of};

/// A rank with everything the planner looks at.
#[derive(Clone, Copy, Debug)]
pub struct RankView<'a> {
    /// Shape of its instance.
    pub topo: &'a Topology,
    /// Which rank.
    pub rank: Rank,
    /// What it publishes; validated against the two above by [`plan`].
    pub layout: &'a Layout,
}

/// One contiguous copy. Regions are those of the two layouts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Copy {
    /// Region on the prefill side.
    pub src_region: u32,
    /// Offset in it, bytes.
    pub src_off: u64,
    /// Region on the decode side.
    pub dst_region: u32,
    /// Offset in it, bytes.
    pub dst_off: u64,
    /// Bytes.
    pub len: u64,
}

/// Why a chunk could not be materialised. Nothing was appended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The lists of pages have different lengths; truncating one of them would lose tokens silently.
    #[error("{src} source units for {dst} destination units")]
    Length {
        /// Source units.
        src: usize,
        /// Destination units.
        dst: usize,
    },
    /// A source unit does not exist.
    #[error("source unit {0} out of range")]
    SourceRange(u32),
    /// A destination unit does not exist.
    #[error("destination unit {0} out of range")]
    DestRange(u32),
    /// A ring cannot hold the live rows.
    #[error("{live} live rows in a ring of {slots}")]
    Ring {
        /// Rows to move.
        live: u32,
        /// Slots of the smaller ring.
        slots: u32,
    },
    /// The prefix of a token-split destination must end on one of its pages.
    #[error("prefix of {0} pages does not end on a page of the split destination")]
    SplitPrefix(u32),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Pair {
    src: Entry,
    dst: Entry,
    pieces: SmallVec<[Strided; 3]>,
}

/// How the bytes of one prefill rank reach one decode rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerPlan {
    pairs: Vec<Pair>,
    page_tokens: u32,
    split: TokenSplit,
    /// This rank holds page `l` iff `l mod n == r`, as its page `l / n`.
    shard: Option<(u32, u32)>,
    /// This rank sends block `r` of `c` of the page list.
    block: Option<(u32, u32)>,
    src_units: [u32; 4],
    dst_units: [u32; 4],
}

/// Pages of the `Full` component to send: positions count pages of the prompt from 0.
#[derive(Clone, Copy, Debug)]
pub struct FullChunk<'a> {
    /// Position of the first source page.
    pub first: u32,
    /// Source pages, consecutive positions.
    pub src: &'a [u32],
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Pages the decode side already has.
    pub prefix: u32,
    /// Destination pages, from position `prefix` on.
    pub dst: &'a [u32],
}

fn index(c: Component) -> usize {
    match c {
        Component::Full => 0,
        Component::Window => 1,
        Component::State => 2,
        Component::Ring => 3,
    }
}

fn units(l: &Layout) -> [u32; 4] {
    [Component::Full, Component::Window, Component::State, Component::Ring].map(|c| l.units(c))
}

/// Plans the bytes that prefill rank `src` writes into decode rank `dst`. Both layouts are validated here.
/// O(entries log entries). A rank that has nothing to send gets an empty plan.
pub fn plan(src: &RankView<'_>, dst: &RankView<'_>) -> Result<PeerPlan, Incompatible> {
    src.layout.validate(src.topo, src.rank)?;
    dst.layout.validate(dst.topo, dst.rank)?;
    if !contacts(src.topo, dst.topo, dst.rank, src.rank.dp)?.contains(&src.rank) {
        return Err(Incompatible::Rank);
    }
    check_equal(src, dst)?;
    let mut by_id: Vec<&Entry> = src.layout.entries.iter().collect();
    by_id.sort_unstable_by_key(|e| e.id);
    let mut pairs = Vec::new();
    for d in &dst.layout.entries {
        let Ok(at) = by_id.binary_search_by_key(&d.id, |e| e.id) else { continue };
        let s = by_id[at];
        if s.component != d.component {
            return Err(Incompatible::EntryShape);
        }
        let pieces = pieces_of(src, dst, s, d)?;
        // Context-parallel ranks share the page list; what is not paged comes from the first of them.
        let sends = d.component == Component::Full || src.rank.cp == 0;
        if sends && !pieces.is_empty() {
            pairs.push(Pair { src: *s, dst: *d, pieces });
        }
    }
    pairs.sort_by_key(|p| (p.dst.id.group, p.dst.component, p.dst.id.layer, p.dst.id.role));
    Ok(PeerPlan {
        pairs,
        page_tokens: src.layout.page_tokens,
        split: dst.layout.split,
        shard: src.topo.page_shard.then_some((src.topo.tp, src.rank.tp)),
        block: (src.topo.cp_spread == CpSpread::Block).then_some((src.topo.cp, src.rank.cp)),
        src_units: units(src.layout),
        dst_units: units(dst.layout),
    })
}

fn check_equal(src: &RankView<'_>, dst: &RankView<'_>) -> Result<(), Incompatible> {
    if src.layout.model != dst.layout.model {
        return Err(Incompatible::Model);
    }
    if src.layout.page_tokens != dst.layout.page_tokens {
        return Err(Incompatible::PageTokens);
    }
    if src.layout.window_tokens != dst.layout.window_tokens {
        return Err(Incompatible::Window);
    }
    let split = dst.layout.split.size > 1;
    if src.layout.split.size != 1 || (split && (src.topo.cp != 1 || src.topo.page_shard)) {
        return Err(Incompatible::ContextParallel);
    }
    Ok(())
}

/// Checks that the plans of all contacted ranks together write every byte of every target entry of `dst`
/// once. Draft entries may have no source at all (a draft model on the decode side only), but not half of
/// one. O(pairs log pairs).
pub fn check_coverage(dst: &RankView<'_>, p: &Topology, plans: &[&PeerPlan]) -> Result<(), Incompatible> {
    let mut covered: Vec<(EntryId, u64)> = plans
        .iter()
        .flat_map(|plan| plan.pairs.iter().map(|pair| (pair.dst.id, pair.bytes_per_unit())))
        .collect();
    covered.sort_unstable_by_key(|c| c.0);
    let sharers = if p.page_shard { u64::from(p.tp) } else { 1 };
    let blocks = if p.cp_spread == CpSpread::Block { u64::from(p.cp) } else { 1 };
    for e in &dst.layout.entries {
        let from = covered.partition_point(|c| c.0 < e.id);
        let sum: u64 = covered[from..].iter().take_while(|c| c.0 == e.id).map(|c| c.1).sum();
        let times = if e.component == Component::Full { sharers * blocks } else { 1 };
        if sum != e.unit_bytes * times && !(sum == 0 && e.id.group == Group::Draft) {
            return Err(Incompatible::Uncovered);
        }
    }
    Ok(())
}

/// Consecutive pairs of pages as runs (first source, first destination, count). A run breaks where either
/// side jumps.
pub fn group_pages(src: &[u32], dst: &[u32]) -> Result<Vec<(u32, u32, u32)>, PlanError> {
    if src.len() != dst.len() {
        return Err(PlanError::Length { src: src.len(), dst: dst.len() });
    }
    let mut runs: Vec<(u32, u32, u32)> = Vec::new();
    for (&s, &d) in src.iter().zip(dst) {
        match runs.last_mut() {
            Some((s0, d0, n)) if s0.checked_add(*n) == Some(s) && d0.checked_add(*n) == Some(d) => *n += 1,
            _ => runs.push((s, d, 1)),
        }
    }
    Ok(runs)
}

fn push(out: &mut Vec<Copy>, floor: usize, c: Copy) {
    if out.len() > floor
        && let Some(last) = out.last_mut()
        && last.src_region == c.src_region
        && last.dst_region == c.dst_region
        && last.src_off + last.len == c.src_off
        && last.dst_off + last.len == c.dst_off
    {
        last.len += c.len;
        return;
    }
    out.push(c);
}

impl Pair {
    fn bytes_per_unit(&self) -> u64 {
        self.pieces.iter().map(|p| p.len * u64::from(p.rows)).sum()
    }

    /// Copies units `s..s+n` to `d..d+n`. Offsets cannot overflow: both entries lie inside their regions.
    fn copy_units(&self, s: u32, d: u32, n: u32, floor: usize, out: &mut Vec<Copy>) {
        let (su, du) = (self.src.unit_bytes, self.dst.unit_bytes);
        let at = |src_off: u64, dst_off: u64, len: u64| Copy {
            src_region: self.src.region,
            src_off: self.src.base + src_off,
            dst_region: self.dst.region,
            dst_off: self.dst.base + dst_off,
            len,
        };
        let (s, d) = (u64::from(s), u64::from(d));
        if let [one] = self.pieces.as_slice()
            && one.rows == 1
            && one.len == su
            && one.len == du
        {
            push(out, floor, at(s * su, d * du, u64::from(n) * su));
            return;
        }
        for i in 0..u64::from(n) {
            for p in &self.pieces {
                for row in 0..u64::from(p.rows) {
                    let src_off = (s + i) * su + p.src + row * p.src_stride;
                    let dst_off = (d + i) * du + p.dst + row * p.dst_stride;
                    push(out, floor, at(src_off, dst_off, p.len));
                }
            }
        }
    }
}

impl PeerPlan {
    /// Whether this rank has nothing to send.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }

    /// Identities that are paired, with both entries, in plan order.
    pub fn pairs(&self) -> impl Iterator<Item = (&Entry, &Entry)> {
        self.pairs.iter().map(|p| (&p.src, &p.dst))
    }

    fn of(&self, c: Component) -> impl Iterator<Item = &Pair> {
        self.pairs.iter().filter(move |p| p.dst.component == c)
    }

    fn check_units(&self, c: Component, src: &[u32], dst: &[u32]) -> Result<(), PlanError> {
        if let Some(&s) = src.iter().find(|&&s| s >= self.src_units[index(c)]) {
            return Err(PlanError::SourceRange(s));
        }
        if let Some(&d) = dst.iter().find(|&&d| d >= self.dst_units[index(c)]) {
            return Err(PlanError::DestRange(d));
        }
        Ok(())
    }

    /// Appends the copies of whole units (window pages, state slots) and returns their bytes.
    pub fn units(
        &self,
        c: Component,
        src: &[u32],
        dst: &[u32],
        out: &mut Vec<Copy>,
    ) -> Result<u64, PlanError> {
        let runs = group_pages(src, dst)?;
        if self.of(c).next().is_none() {
            return Ok(0);
        }
        self.check_units(c, src, dst)?;
        let floor = out.len();
        for pair in self.of(c) {
            for &(s, d, n) in &runs {
                pair.copy_units(s, d, n, floor, out);
            }
        }
        Ok(out[floor..].iter().map(|c| c.len).sum())
    }

    /// Appends the copies of the full-attention pages of a chunk that this rank sends: positions below the
    /// prefix are skipped, and so is what belongs to another rank of a sharded source. Returns the bytes.
    pub fn full(&self, chunk: &FullChunk<'_>, out: &mut Vec<Copy>) -> Result<u64, PlanError> {
        if self.split.size > 1 {
            return self.split_tokens(chunk, out);
        }
        let total = pages_of(chunk.prompt_tokens, self.page_tokens);
        let (lo, hi) = self.block.map_or((0, total), |(c, r)| cp_block(total, c, r));
        let (mut src, mut dst) = (Vec::with_capacity(chunk.src.len()), Vec::with_capacity(chunk.src.len()));
        for (pos, &page) in (chunk.first..).zip(chunk.src) {
            if pos < chunk.prefix || !(lo..hi).contains(&pos) {
                continue;
            }
            let local = match self.shard {
                Some((n, r)) if page % n != r => continue,
                Some((n, _)) => page / n,
                None => page,
            };
            let to = chunk
                .dst
                .get((pos - chunk.prefix) as usize)
                .ok_or(PlanError::Length { src: (pos - chunk.prefix) as usize + 1, dst: chunk.dst.len() })?;
            src.push(local);
            dst.push(*to);
        }
        self.units(Component::Full, &src, &dst, out)
    }

    /// What the decode side has to scatter of a packed chunk of this rank: where its bytes go, in the order in which
    /// they lie in the block. Sources are left out. `None` where the order depends on page numbers that only the
    /// prefill side knows (a page-sharded source), or where the chunk does not fit the destination.
    #[must_use]
    pub fn scatter(
        &self,
        first: u32,
        pages: u32,
        tokens: u32,
        prefix: u32,
        dst: &[u32],
    ) -> Option<Vec<Copy>> {
        let total = pages_of(tokens, self.page_tokens);
        if self.shard.is_some() || first.checked_add(pages).is_none_or(|end| end > total) || first < prefix {
            return None;
        }
        // Any source page does: only the destinations and lengths are used, and their order is that of positions.
        let src = vec![0; pages as usize];
        let mut out = Vec::new();
        self.full(&FullChunk { first, src: &src, prompt_tokens: tokens, prefix, dst }, &mut out).ok()?;
        Some(out)
    }

    /// Whether chunks of this rank may be packed.
    #[must_use]
    pub fn packs(&self) -> bool {
        self.shard.is_none()
    }

    /// The token-split destination: token `t` goes to rank `t mod size`; draft entries are not split.
    fn split_tokens(&self, chunk: &FullChunk<'_>, out: &mut Vec<Copy>) -> Result<u64, PlanError> {
        let (ps, w, k) = (self.page_tokens, self.split.size, self.split.rank);
        if !chunk.prefix.is_multiple_of(w) {
            return Err(PlanError::SplitPrefix(chunk.prefix));
        }
        self.check_units(Component::Full, chunk.src, chunk.dst)?;
        let start = chunk.first.saturating_mul(ps).max(chunk.prefix * ps);
        let end =
            (chunk.first.saturating_add(chunk.src.len() as u32)).saturating_mul(ps).min(chunk.prompt_tokens);
        let floor = out.len();
        let need = end.saturating_sub(chunk.prefix * ps).div_ceil(ps * w) as usize;
        if start < end && need > chunk.dst.len() {
            return Err(PlanError::Length { src: need, dst: chunk.dst.len() });
        }
        for pair in self.of(Component::Full) {
            let row = u64::from(self.row_bytes(pair));
            let split = pair.dst.id.group == Group::Target;
            for t in start..end {
                let off = t - chunk.prefix * ps;
                if split && off % w != k {
                    continue;
                }
                let src =
                    u64::from(chunk.src[(t / ps - chunk.first) as usize]) * u64::from(ps) + u64::from(t % ps);
                let page = u64::from(chunk.dst[(off / (ps * w)) as usize]);
                let dst = if split {
                    page * u64::from(ps) + u64::from(off / w % ps)
                } else {
                    page * u64::from(ps * w) + u64::from(off % (ps * w))
                };
                push(
                    out,
                    floor,
                    Copy {
                        src_region: pair.src.region,
                        src_off: pair.src.base + src * row,
                        dst_region: pair.dst.region,
                        dst_off: pair.dst.base + dst * row,
                        len: row,
                    },
                );
            }
        }
        Ok(out[floor..].iter().map(|c| c.len).sum())
    }

    fn row_bytes(&self, pair: &Pair) -> u32 {
        (pair.src.unit_bytes / u64::from(self.page_tokens)) as u32
    }

    /// Appends the copies of the last `live` rows of a ring, for a prompt of `tokens`: the slot of a token is
    /// its position modulo the ring, and the two rings may differ. Returns the bytes.
    pub fn ring(
        &self,
        src_row: u32,
        dst_row: u32,
        tokens: u32,
        live: u32,
        out: &mut Vec<Copy>,
    ) -> Result<u64, PlanError> {
        if self.of(Component::Ring).next().is_none() {
            return Ok(0);
        }
        self.check_units(Component::Ring, &[src_row], &[dst_row])?;
        let floor = out.len();
        for pair in self.of(Component::Ring) {
            let slots = pair.src.ring_slots.min(pair.dst.ring_slots);
            if live > slots || live > tokens {
                out.truncate(floor);
                return Err(PlanError::Ring { live, slots });
            }
            let unit = pair.src.unit_bytes;
            for t in tokens - live..tokens {
                let slot = |row: u32, ring: u32| u64::from(row) * u64::from(ring) + u64::from(t % ring);
                push(
                    out,
                    floor,
                    Copy {
                        src_region: pair.src.region,
                        src_off: pair.src.base + slot(src_row, pair.src.ring_slots) * unit,
                        dst_region: pair.dst.region,
                        dst_off: pair.dst.base + slot(dst_row, pair.dst.ring_slots) * unit,
                        len: unit,
                    },
                );
            }
        }
        Ok(out[floor..].iter().map(|c| c.len).sum())
    }

    /// Bytes of `n` units of a component that is not `Full`, in closed form.
    #[must_use]
    pub fn unit_bytes(&self, c: Component, n: u32) -> u64 {
        self.of(c).map(|p| p.bytes_per_unit() * u64::from(n)).sum()
    }

    /// Bytes this rank sends for full-attention pages `prefix..`, in closed form: what the decode side
    /// compares with what is reported. `None` for a page-sharded source, where it depends on page numbers
    /// only the prefill side knows; the sum over its ranks is known all the same
    /// ([`Self::full_bytes_unsharded`]).
    #[must_use]
    pub fn full_bytes(&self, prompt_tokens: u32, prefix: u32) -> Option<u64> {
        if self.shard.is_some() { None } else { Some(self.full_bytes_unsharded(prompt_tokens, prefix)) }
    }

    /// As [`Self::full_bytes`], as if this rank held every page of its block.
    #[must_use]
    pub fn full_bytes_unsharded(&self, prompt_tokens: u32, prefix: u32) -> u64 {
        if self.split.size > 1 {
            let (w, k) = (self.split.size, self.split.rank);
            let n = prompt_tokens.saturating_sub(prefix.saturating_mul(self.page_tokens));
            let mine = n.saturating_sub(k).div_ceil(w);
            return self
                .of(Component::Full)
                .map(|p| {
                    let tokens = if p.dst.id.group == Group::Target { mine } else { n };
                    u64::from(tokens) * u64::from(self.row_bytes(p))
                })
                .sum();
        }
        let total = pages_of(prompt_tokens, self.page_tokens);
        let (lo, hi) = self.block.map_or((0, total), |(c, r)| cp_block(total, c, r));
        let n = hi.saturating_sub(lo.max(prefix));
        self.unit_bytes(Component::Full, n)
    }

    /// Destination pages that full-attention positions `prefix..` of a prompt need.
    #[must_use]
    pub fn full_dst_pages(&self, prompt_tokens: u32, prefix: u32) -> u32 {
        dst_pages(self.page_tokens, self.split, prompt_tokens, prefix)
    }

    /// Units of a component on the decode side: destinations must be below it.
    #[must_use]
    pub fn dst_units(&self, c: Component) -> u32 {
        self.dst_units[index(c)]
    }

    /// Units of a component on the prefill side.
    #[must_use]
    pub fn src_units(&self, c: Component) -> u32 {
        self.src_units[index(c)].saturating_mul(match (c, self.shard) {
            (Component::Full, Some((n, _))) => n,
            _ => 1,
        })
    }

    /// Replaces the destinations of V as if its offset were guessed from divisibility; the bug of
    /// sgl#27740, for a simulator that must find it.
    #[cfg(any(test, feature = "sim"))]
    pub fn plant_guessed_v(&mut self, dst: &Layout) {
        use crate::pd::layout::Role;
        let order = |role: Role| {
            let mut v: Vec<Entry> = dst.entries.iter().filter(|e| e.id.role == role).copied().collect();
            v.sort_by_key(|e| e.id);
            v
        };
        let list: Vec<Entry> = order(Role::K).into_iter().chain(order(Role::V)).collect();
        let n = self.pairs.iter().filter(|p| p.dst.id.role == Role::K).count();
        let half = list.len() / 2;
        if n == 0 || n >= half {
            return;
        }
        let v_base = if !half.is_multiple_of(n) { n * (half / n) } else { half };
        for p in self.pairs.iter_mut().filter(|p| p.dst.id.role == Role::V) {
            if let Some(wrong) = list.get(v_base + p.dst.id.layer as usize) {
                p.dst = *wrong;
            }
        }
    }
}

/// Destination pages of a rank with the given split for positions `prefix..` of a prompt.
#[must_use]
pub fn dst_pages(page_tokens: u32, split: TokenSplit, prompt_tokens: u32, prefix: u32) -> u32 {
    let tokens = prompt_tokens.saturating_sub(prefix.saturating_mul(page_tokens));
    tokens.div_ceil(page_tokens.saturating_mul(split.size).max(1))
}

/// Whether this rank is the one that sends what several contacted ranks hold alike.
fn elected_replica(src: &RankView<'_>, dst: &RankView<'_>) -> Result<bool, Incompatible> {
    Ok(contacts_tp(src.topo, dst.topo, dst.rank.tp)?.start == src.rank.tp)
}

/// Whether the shape of an entry lets it follow a token split or a page shard.
fn is_token_rows(e: &Entry) -> bool {
    e.shape == Shape::Replicated && e.component == Component::Full
}
