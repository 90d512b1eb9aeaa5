//! The slow model the planner is compared with: every byte of a prompt has a label made of what it *is*
//! (group, layer, role, token, element, byte); source memory is filled and destination memory is checked
//! from the definitions, without any code of the planner.

use sapwood::pd::layout::{
    Component, Entry, EntryId, Group, HeadOrder, Layout, Role, Shape, TokenSplit, window_first_page,
};
use sapwood::pd::plan::{Copy, FullChunk, PeerPlan, RankView, check_coverage, plan};
use sapwood::pd::topo::{CpSpread, Rank, Topology, contacts};

use crate::Rng;

/// One kind of layer buffer of a model.
#[derive(Clone, Debug)]
pub(crate) struct Buffer {
    pub id: EntryId,
    pub component: Component,
    pub shape: Shape,
    /// Bytes of a unit when the shape is replicated.
    pub bytes: u64,
}

/// One side: its topology, what buffers its model has, and its page pool.
#[derive(Clone, Debug)]
pub(crate) struct Side {
    pub topo: Topology,
    pub buffers: Vec<Buffer>,
    pub pages: u32,
    pub ring_slots: u32,
    pub split: u32,
}

#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub p: Side,
    pub d: Side,
    pub page_tokens: u32,
    pub window_tokens: u32,
    pub prompt_tokens: u32,
    pub prefix: u32,
    pub live: u32,
}

fn label(id: EntryId, token: u32, elem: u32, byte: u32) -> u64 {
    let role = match id.role {
        Role::K => 0,
        Role::V => 1,
        Role::Latent => 2,
        Role::Other(n) => 3 + u64::from(n),
    };
    let group = u64::from(id.group == Group::Draft);
    1 | group << 1
        | role << 2
        | u64::from(id.layer) << 8
        | u64::from(token) << 20
        | u64::from(elem) << 36
        | u64::from(byte) << 52
}

/// Heads of a rank, from the definition: with more ranks than heads each head is held by tp/total ranks.
fn heads(total: u32, tp: u32, rank: u32) -> Vec<u32> {
    (0..total)
        .filter(|h| if total >= tp { h / (total / tp) == rank } else { rank / (tp / total) == *h })
        .collect()
}

pub(crate) fn layout_of(side: &Side, rank: Rank, case: &Case, rng: &mut Rng) -> Layout {
    let mut regions = vec![0u64; 1 + rng.below(4) as usize];
    let mut entries = Vec::new();
    let (lo, hi) = side.topo.stage_range(rank.pp);
    for b in &side.buffers {
        let here = match b.id.group {
            Group::Target => (lo..hi).contains(&b.id.layer),
            Group::Draft => rank.pp + 1 == side.topo.pp(),
        };
        if !here {
            continue;
        }
        let unit_bytes = match b.shape {
            Shape::Replicated => {
                let draft = b.component == Component::Full && b.id.group == Group::Draft;
                b.bytes * u64::from(if draft { side.split } else { 1 })
            }
            Shape::Heads { total, head_bytes, .. } => {
                let tokens = case.page_tokens as usize;
                (tokens * heads(total, side.topo.tp, rank.tp).len()) as u64 * u64::from(head_bytes)
            }
            Shape::Axis { groups, outer, elem_bytes } => {
                u64::from(groups.iter().sum::<u32>() / side.topo.tp * outer * elem_bytes)
            }
        };
        let region = rng.below(regions.len() as u32);
        let ring_slots = if b.component == Component::Ring { side.ring_slots } else { 0 };
        let units = match b.component {
            Component::Full if side.topo.page_shard => side.pages.div_ceil(side.topo.tp),
            Component::Full | Component::Window => side.pages,
            Component::State | Component::Ring => 3,
        };
        let base = regions[region as usize] + u64::from(rng.below(3)) * 5;
        let e = Entry {
            id: b.id,
            component: b.component,
            region,
            base,
            units,
            unit_bytes,
            shape: b.shape,
            ring_slots,
        };
        regions[region as usize] = base + e.bytes().unwrap() + 1;
        entries.push(e);
    }
    // Order must mean nothing.
    for i in (1..entries.len()).rev() {
        entries.swap(i, rng.below(i as u32 + 1) as usize);
    }
    let split = TokenSplit { size: side.split, rank: rank.tp % side.split };
    Layout {
        model: 7,
        page_tokens: case.page_tokens,
        window_tokens: case.window_tokens,
        split,
        regions,
        entries,
    }
}

/// Calls `f(offset in the unit, token row, element, byte)` for every byte of a unit a rank holds.
fn each_byte(e: &Entry, topo: &Topology, rank: Rank, ps: u32, mut f: impl FnMut(u64, u32, u32, u32)) {
    match e.shape {
        Shape::Replicated => {
            let tokens = if matches!(e.component, Component::State | Component::Ring) { 1 } else { ps };
            let row = (e.unit_bytes / u64::from(tokens)) as u32;
            for t in 0..tokens {
                for b in 0..row {
                    f(u64::from(t * row + b), t, 0, b);
                }
            }
        }
        Shape::Heads { total, head_bytes, order } => {
            let mine = heads(total, topo.tp, rank.tp);
            for (i, &h) in mine.iter().enumerate() {
                for t in 0..ps {
                    let cell = match order {
                        HeadOrder::TokenHead => t * mine.len() as u32 + i as u32,
                        HeadOrder::HeadToken => i as u32 * ps + t,
                    };
                    for b in 0..head_bytes {
                        f(u64::from(cell * head_bytes + b), t, h, b);
                    }
                }
            }
        }
        Shape::Axis { groups, outer, elem_bytes } => {
            let dim: u32 = groups.iter().sum::<u32>() / topo.tp;
            for o in 0..outer {
                let (mut at, mut full) = (0, 0);
                for g in groups {
                    let n = g / topo.tp;
                    for i in 0..n {
                        for b in 0..elem_bytes {
                            let elem = o * 1000 + full + rank.tp * n + i;
                            f(u64::from((o * dim + at + i) * elem_bytes + b), 0, elem, b);
                        }
                    }
                    at += n;
                    full += g;
                }
            }
        }
    }
}

struct Memory(Vec<Vec<u64>>);

impl Memory {
    fn new(l: &Layout) -> Memory {
        Memory(l.regions.iter().map(|&n| vec![0; n as usize]).collect())
    }
}

/// Index lists of a room on one side.
struct Pages {
    full: Vec<u32>,
    window: Vec<u32>,
    state: u32,
    ring: u32,
}

fn fill_source(case: &Case, rank: Rank, l: &Layout, pages: &Pages, first_window: u32) -> Memory {
    let (ps, side) = (case.page_tokens, &case.p);
    let mut m = Memory::new(l);
    let mut put = |e: &Entry, unit: u64, off: u64, v: u64| {
        m.0[e.region as usize][(e.base + unit * e.unit_bytes + off) as usize] = v;
    };
    for e in &l.entries {
        match e.component {
            Component::Full => {
                for (pos, &page) in (0u32..).zip(&pages.full) {
                    let (held, local) = if side.topo.page_shard {
                        (page % side.topo.tp == rank.tp, page / side.topo.tp)
                    } else {
                        (true, page)
                    };
                    if held {
                        each_byte(e, &side.topo, rank, ps, |o, t, el, b| {
                            put(e, u64::from(local), o, label(e.id, pos * ps + t, el, b));
                        });
                    }
                }
            }
            Component::Window => {
                for (pos, &page) in (first_window..).zip(&pages.window) {
                    each_byte(e, &side.topo, rank, ps, |o, t, el, b| {
                        put(e, u64::from(page), o, label(e.id, pos * ps + t, el, b));
                    });
                }
            }
            Component::State => each_byte(e, &side.topo, rank, ps, |o, t, el, b| {
                put(e, u64::from(pages.state), o, label(e.id, t, el, b));
            }),
            Component::Ring => {
                for t in case.prompt_tokens - case.live..case.prompt_tokens {
                    let unit = pages.ring * e.ring_slots + t % e.ring_slots;
                    each_byte(e, &side.topo, rank, ps, |o, _, el, b| {
                        put(e, u64::from(unit), o, label(e.id, t, el, b))
                    });
                }
            }
        }
    }
    m
}

/// What the destination must hold: (region, offset) to label, `None` where anything or nothing may be
/// written (rows behind the end of the prompt in its last page).
fn expect(
    case: &Case,
    rank: Rank,
    l: &Layout,
    pages: &Pages,
    first_window: u32,
    covered: impl Fn(EntryId) -> bool,
) -> Vec<Vec<Option<u64>>> {
    let (ps, side) = (case.page_tokens, &case.d);
    let mut want: Vec<Vec<Option<u64>>> = l.regions.iter().map(|&n| vec![Some(0); n as usize]).collect();
    let w = side.split;
    for e in l.entries.iter().filter(|e| covered(e.id)) {
        let mut put = |unit: u64, off: u64, v: Option<u64>| {
            want[e.region as usize][(e.base + unit * e.unit_bytes + off) as usize] = v;
        };
        let bounded = |t: u32, v: u64| (t < case.prompt_tokens).then_some(v);
        match e.component {
            Component::Full if w > 1 => {
                let row =
                    (e.unit_bytes / u64::from(ps)) as u32 / if e.id.group == Group::Draft { w } else { 1 };
                for t in case.prefix * ps..case.prompt_tokens {
                    let off = t - case.prefix * ps;
                    let split = e.id.group == Group::Target;
                    if split && off % w != l.split.rank {
                        continue;
                    }
                    let page = u64::from(pages.full[(off / (ps * w)) as usize]);
                    let at = if split { off / w % ps } else { off % (ps * w) };
                    for b in 0..row {
                        put(page, u64::from(at * row + b), Some(label(e.id, t, 0, b)));
                    }
                }
            }
            Component::Full => {
                for (pos, &page) in (case.prefix..).zip(&pages.full) {
                    each_byte(e, &side.topo, rank, ps, |o, t, el, b| {
                        put(u64::from(page), o, bounded(pos * ps + t, label(e.id, pos * ps + t, el, b)));
                    });
                }
            }
            Component::Window => {
                for (pos, &page) in (first_window..).zip(&pages.window) {
                    each_byte(e, &side.topo, rank, ps, |o, t, el, b| {
                        put(u64::from(page), o, bounded(pos * ps + t, label(e.id, pos * ps + t, el, b)));
                    });
                }
            }
            Component::State => each_byte(e, &side.topo, rank, ps, |o, t, el, b| {
                put(u64::from(pages.state), o, Some(label(e.id, t, el, b)));
            }),
            Component::Ring => {
                for t in case.prompt_tokens - case.live..case.prompt_tokens {
                    let unit = u64::from(pages.ring * e.ring_slots + t % e.ring_slots);
                    each_byte(e, &side.topo, rank, ps, |o, _, el, b| {
                        put(unit, o, Some(label(e.id, t, el, b)))
                    });
                }
            }
        }
    }
    want
}

/// Applies copies, counting writes.
fn apply(copies: &[Copy], src: &Memory, dst: &mut Memory, count: &mut [Vec<u8>]) {
    for c in copies {
        let (s, d, n) = (c.src_off as usize, c.dst_off as usize, c.len as usize);
        let from = &src.0[c.src_region as usize][s..s + n];
        dst.0[c.dst_region as usize][d..d + n].copy_from_slice(from);
        for w in &mut count[c.dst_region as usize][d..d + n] {
            *w += 1;
        }
    }
}

/// Runs the planner for every pair of ranks of the case and compares with the model. Returns the number of
/// elements checked.
pub(crate) fn check(case: &Case, rng: &mut Rng) -> Result<u64, String> {
    check_with(case, rng, &|_, _| ())
}

/// As [`check`], with every plan changed by `sabotage` first: the oracle must notice.
pub(crate) fn check_with(
    case: &Case,
    rng: &mut Rng,
    sabotage: &dyn Fn(&mut PeerPlan, &Layout),
) -> Result<u64, String> {
    let ps = case.page_tokens;
    let total = case.prompt_tokens.div_ceil(ps);
    let first_window = window_first_page(case.prefix, case.prompt_tokens, case.window_tokens, ps);
    let src_pages = Pages {
        full: rng.distinct(total, case.p.pages),
        window: rng.distinct(total - first_window.min(total), case.p.pages),
        state: rng.below(3),
        ring: rng.below(3),
    };
    let p_views: Vec<(Rank, Layout)> =
        case.p.topo.ranks(0).map(|r| (r, layout_of(&case.p, r, case, rng))).collect();
    let sources: Vec<Memory> =
        p_views.iter().map(|(r, l)| fill_source(case, *r, l, &src_pages, first_window)).collect();
    let p_ids: Vec<EntryId> = case.p.buffers.iter().map(|b| b.id).collect();
    let mut checked = 0;
    for d_rank in case.d.topo.ranks(0) {
        let layout = layout_of(&case.d, d_rank, case, rng);
        let view = RankView { topo: &case.d.topo, rank: d_rank, layout: &layout };
        let need = (case.prompt_tokens - case.prefix * ps).div_ceil(ps * case.d.split);
        let dst_pages = Pages {
            full: rng.distinct(need, case.d.pages),
            window: rng.distinct(src_pages.window.len() as u32, case.d.pages),
            state: rng.below(3),
            ring: rng.below(3),
        };
        let mut memory = Memory::new(&layout);
        let mut count: Vec<Vec<u8>> = layout.regions.iter().map(|&n| vec![0; n as usize]).collect();
        let mut plans: Vec<PeerPlan> = Vec::new();
        for rank in contacts(&case.p.topo, &case.d.topo, d_rank, 0).map_err(|e| e.to_string())? {
            let at = p_views.iter().position(|(r, _)| *r == rank).unwrap();
            let src = RankView { topo: &case.p.topo, rank, layout: &p_views[at].1 };
            let mut plan = plan(&src, &view).map_err(|e| format!("{rank:?} to {d_rank:?}: {e}"))?;
            sabotage(&mut plan, &layout);
            let mut copies = Vec::new();
            let bytes = materialise(case, &plan, &src_pages, &dst_pages, rng, &mut copies)?;
            let want = copies.iter().map(|c| c.len).sum::<u64>();
            if bytes != want {
                return Err(format!("reported {bytes} bytes, copies have {want}"));
            }
            closed_form(case, &plan, bytes, src_pages.window.len() as u32)?;
            apply(&copies, &sources[at], &mut memory, &mut count);
            plans.push(plan);
        }
        let refs: Vec<&PeerPlan> = plans.iter().collect();
        check_coverage(&view, &case.p.topo, &refs).map_err(|e| e.to_string())?;
        let want = expect(case, d_rank, &layout, &dst_pages, first_window, |id| p_ids.contains(&id));
        checked += compare(d_rank, &want, &memory, &count)?;
    }
    Ok(checked)
}

fn materialise(
    case: &Case,
    plan: &PeerPlan,
    src: &Pages,
    dst: &Pages,
    rng: &mut Rng,
    out: &mut Vec<Copy>,
) -> Result<u64, String> {
    let err = |e: sapwood::pd::plan::PlanError| e.to_string();
    let mut bytes = 0;
    let mut at = 0;
    while at < src.full.len() {
        let n = 1 + rng.below((src.full.len() - at) as u32) as usize;
        let chunk = FullChunk {
            first: at as u32,
            src: &src.full[at..at + n],
            prompt_tokens: case.prompt_tokens,
            prefix: case.prefix,
            dst: &dst.full,
        };
        let from = out.len();
        bytes += plan.full(&chunk, out).map_err(err)?;
        packed_order(case, plan, at as u32, n as u32, &dst.full, &out[from..])?;
        at += n;
    }
    bytes += plan.units(Component::Window, &src.window, &dst.window, out).map_err(err)?;
    bytes += plan.units(Component::State, &[src.state], &[dst.state], out).map_err(err)?;
    bytes += plan.ring(src.ring, dst.ring, case.prompt_tokens, case.live, out).map_err(err)?;
    Ok(bytes)
}

/// A chunk as one block: the decode side, which does not know the source pages, scatters it in the order in which the
/// prefill side gathers it.
fn packed_order(
    case: &Case,
    plan: &PeerPlan,
    first: u32,
    n: u32,
    dst: &[u32],
    copies: &[Copy],
) -> Result<(), String> {
    if first < case.prefix {
        return Ok(());
    }
    let Some(scatter) = plan.scatter(first, n, case.prompt_tokens, case.prefix, dst) else {
        return if plan.packs() { Err("a chunk that cannot be scattered".into()) } else { Ok(()) };
    };
    let runs = |list: &[Copy]| {
        let mut runs: Vec<(u32, u64, u64)> = Vec::new();
        for c in list {
            match runs.last_mut() {
                Some((region, off, len)) if *region == c.dst_region && *off + *len == c.dst_off => {
                    *len += c.len
                }
                _ => runs.push((c.dst_region, c.dst_off, c.len)),
            }
        }
        runs
    };
    if runs(&scatter) == runs(copies) { Ok(()) } else { Err(format!("{scatter:?} for {copies:?}")) }
}

fn closed_form(case: &Case, plan: &PeerPlan, bytes: u64, window: u32) -> Result<(), String> {
    if let Some(full) = plan.full_bytes(case.prompt_tokens, case.prefix) {
        let rest = plan.unit_bytes(Component::Window, window)
            + plan.unit_bytes(Component::State, 1)
            + plan.unit_bytes(Component::Ring, case.live);
        if full + rest != bytes {
            return Err(format!("closed form {} for {bytes} bytes", full + rest));
        }
    }
    Ok(())
}

fn compare(rank: Rank, want: &[Vec<Option<u64>>], memory: &Memory, count: &[Vec<u8>]) -> Result<u64, String> {
    let mut checked = 0;
    for (r, region) in want.iter().enumerate() {
        for (at, w) in region.iter().enumerate() {
            let (got, n) = (memory.0[r][at], count[r][at]);
            let ok = match w {
                Some(0) => got == 0 && n == 0,
                Some(v) => got == *v && n == 1,
                None => n <= 1,
            };
            if !ok {
                return Err(format!(
                    "{rank:?} region {r} offset {at}: want {w:x?}, got {got:x} written {n} times"
                ));
            }
            checked += u64::from(n);
        }
    }
    Ok(checked)
}

fn split_layers(layers: u32, stages: u32, rng: &mut Rng) -> Vec<u32> {
    let mut v = vec![1; stages as usize];
    for _ in stages..layers {
        let at = rng.below(stages) as usize;
        v[at] += 1;
    }
    v
}

/// A random pair of instances, and a prompt.
pub(crate) fn random_case(rng: &mut Rng) -> Case {
    let ps = rng.pick(&[1, 2, 2, 3, 4]);
    let kind = rng.below(3); // MHA, MLA, hybrid
    let (p_tp, d_tp) = if rng.chance(10) {
        rng.pick(&[(3, 6), (6, 3), (1, 3), (3, 1), (6, 2)])
    } else {
        (1 << rng.below(4), 1 << rng.below(4))
    };
    let p_pp = rng.pick(&[1, 1, 2, 3, 4, 8]);
    let d_pp = rng.pick(&[1, 1, 1, p_pp, 2, 4]);
    let layers = p_pp.max(d_pp) + rng.below(4);
    let same_split = rng.chance(50) && p_pp == d_pp;
    let p_split = split_layers(layers, p_pp, rng);
    let d_split = if same_split { p_split.clone() } else { split_layers(layers, d_pp, rng) };
    let total_heads =
        if p_tp % 3 == 0 || d_tp % 3 == 0 { rng.pick(&[6, 12, 3]) } else { rng.pick(&[1, 2, 4, 8, 8]) };
    let total_heads = if divides(total_heads, p_tp) && divides(total_heads, d_tp) { total_heads } else { 24 };
    let split = if kind == 1 && rng.chance(20) { rng.pick(&[1, 2, d_tp]).min(d_tp) } else { 1 };
    let shard = kind == 1 && split == 1 && rng.chance(20);
    let cp = if split == 1 && !shard { rng.pick(&[1, 1, 1, 2, 3]) } else { 1 };
    let cp_spread = if rng.chance(60) && cp > 1 { CpSpread::Block } else { CpSpread::Replicated };
    let target = target_buffers(
        kind,
        layers,
        total_heads,
        p_tp.max(d_tp) * if p_tp % 3 == 0 || d_tp % 3 == 0 { 4 } else { 1 },
        ps,
        split == 1 && !shard,
        rng,
    );
    let with_draft = |n: u32, rng: &mut Rng, order| -> Vec<Buffer> {
        let _ = &rng;
        let mut v = target.clone();
        for layer in 0..n {
            draft_layer(kind, layer, total_heads, ps, &mut v);
        }
        reorder(&mut v, order);
        v
    };
    let orders = [HeadOrder::TokenHead, HeadOrder::HeadToken];
    let (po, d_o) = (rng.pick(&orders), rng.pick(&orders));
    let (pn, dn) = (rng.below(5), rng.below(5));
    let p_buffers = with_draft(pn, rng, po);
    let d_buffers = with_draft(dn, rng, d_o);
    let total = 1 + rng.below(5);
    let prompt_tokens = (total - 1) * ps + 1 + rng.below(ps);
    let prefix = rng.below(total) / split * split;
    let ring = (2 + rng.below(5), 2 + rng.below(5));
    let topo = |tp, cp, stage_layers, cp_spread, page_shard| Topology {
        dp: 1,
        cp,
        tp,
        stage_layers,
        cp_spread,
        page_shard,
    };
    Case {
        p: Side {
            topo: topo(p_tp, cp, p_split, cp_spread, shard),
            buffers: p_buffers,
            pages: total + 2,
            ring_slots: ring.0,
            split: 1,
        },
        d: Side {
            topo: topo(d_tp, 1, d_split, CpSpread::Replicated, false),
            buffers: d_buffers,
            pages: total + 1,
            ring_slots: ring.1,
            split,
        },
        page_tokens: ps,
        window_tokens: ps * (1 + rng.below(3)),
        prompt_tokens,
        prefix,
        live: rng.below(ring.0.min(ring.1).min(prompt_tokens) + 1),
    }
}

fn divides(h: u32, tp: u32) -> bool {
    h.is_multiple_of(tp) || tp.is_multiple_of(h)
}

fn reorder(v: &mut [Buffer], to: HeadOrder) {
    for b in v {
        if let Shape::Heads { order, .. } = &mut b.shape {
            *order = to;
        }
    }
}

fn draft_layer(kind: u32, layer: u32, total: u32, ps: u32, v: &mut Vec<Buffer>) {
    let id = |role| EntryId { group: Group::Draft, layer, role };
    if kind == 1 {
        v.push(Buffer {
            id: id(Role::Latent),
            component: Component::Full,
            shape: Shape::Replicated,
            bytes: u64::from(2 * ps),
        });
    } else {
        let shape = Shape::Heads { total, head_bytes: 1, order: HeadOrder::TokenHead };
        for role in [Role::K, Role::V] {
            v.push(Buffer { id: id(role), component: Component::Full, shape, bytes: 0 });
        }
    }
}

fn target_buffers(
    kind: u32,
    layers: u32,
    total: u32,
    lcm: u32,
    ps: u32,
    others: bool,
    rng: &mut Rng,
) -> Vec<Buffer> {
    let mut v = Vec::new();
    let head_bytes = 1 + rng.below(2);
    let heads = Shape::Heads { total, head_bytes, order: HeadOrder::TokenHead };
    for layer in 0..layers {
        let id = |role| EntryId { group: Group::Target, layer, role };
        let attention = if kind == 2 { rng.below(5) } else { kind };
        match attention {
            0 => v.extend([Role::K, Role::V].map(|r| Buffer {
                id: id(r),
                component: Component::Full,
                shape: heads,
                bytes: 0,
            })),
            1 => v.push(Buffer {
                id: id(Role::Latent),
                component: Component::Full,
                shape: Shape::Replicated,
                bytes: u64::from(3 * ps),
            }),
            2 => v.extend([Role::K, Role::V].map(|r| Buffer {
                id: id(r),
                component: Component::Window,
                shape: heads,
                bytes: 0,
            })),
            3 => {
                let shape =
                    Shape::Axis { groups: [lcm, lcm, 2 * lcm, 0], outer: 1 + rng.below(2), elem_bytes: 1 };
                v.push(Buffer { id: id(Role::Other(0)), component: Component::State, shape, bytes: 0 });
            }
            _ => v.push(Buffer {
                id: id(Role::Other(1)),
                component: Component::State,
                shape: Shape::Replicated,
                bytes: 3,
            }),
        }
        if others && rng.chance(10) {
            v.push(Buffer {
                id: id(Role::Other(2)),
                component: Component::Ring,
                shape: Shape::Replicated,
                bytes: 2,
            });
        }
    }
    v
}
