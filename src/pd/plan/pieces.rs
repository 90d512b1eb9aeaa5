//! The part of one unit (page, slot) that one prefill rank writes into one decode rank, as strided pieces.

use smallvec::{SmallVec, smallvec};

use super::{RankView, elected_replica, is_token_rows};
use crate::pd::layout::{Component, Entry, Group, HeadOrder, Shape};
use crate::pd::reason::Incompatible;
use crate::pd::topo::{contacts_tp, heads_of};

/// `rows` runs of `len` bytes; offsets are relative to the unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Strided {
    pub(super) src: u64,
    pub(super) dst: u64,
    pub(super) len: u64,
    pub(super) rows: u32,
    pub(super) src_stride: u64,
    pub(super) dst_stride: u64,
}

type Pieces = SmallVec<[Strided; 3]>;

fn whole(len: u64) -> Pieces {
    smallvec![Strided { src: 0, dst: 0, len, rows: 1, src_stride: 0, dst_stride: 0 }]
}

/// Rows that follow each other on both sides are one longer row.
fn simplify(mut p: Strided) -> Strided {
    if p.rows > 1 && p.len == p.src_stride && p.len == p.dst_stride {
        p.len *= u64::from(p.rows);
        p.rows = 1;
    }
    if p.rows == 1 {
        (p.src_stride, p.dst_stride) = (0, 0);
    }
    p
}

/// What `src` writes of one unit of `d`; empty when another rank is elected or the parts do not meet.
pub(super) fn pieces_of(
    src: &RankView<'_>,
    dst: &RankView<'_>,
    s: &Entry,
    d: &Entry,
) -> Result<Pieces, Incompatible> {
    let split = dst.layout.split.size > 1 && d.component == Component::Full;
    if split && !(is_token_rows(s) && is_token_rows(d)) {
        return Err(Incompatible::ContextParallel);
    }
    let shard = src.topo.page_shard && d.component == Component::Full;
    if shard && !is_token_rows(s) {
        return Err(Incompatible::PageShard);
    }
    match (s.shape, d.shape) {
        (Shape::Replicated, Shape::Replicated) => replicated(src, dst, s, d, split, shard),
        (
            Shape::Heads { total: a, head_bytes: ab, order: ao },
            Shape::Heads { total: b, head_bytes: bb, order: bo },
        ) => {
            if a != b {
                return Err(Incompatible::EntryShape);
            }
            if ab != bb {
                return Err(Incompatible::EntryBytes);
            }
            heads(src, dst, d.component, a, ab, (ao, bo))
        }
        (
            Shape::Axis { groups: a, outer: ao, elem_bytes: ae },
            Shape::Axis { groups: b, outer: bo, elem_bytes: be },
        ) => {
            if a != b || ao != bo {
                return Err(Incompatible::EntryShape);
            }
            if ae != be {
                return Err(Incompatible::EntryBytes);
            }
            Ok(axis(src, dst, &a, ao, ae))
        }
        _ => Err(Incompatible::EntryShape),
    }
}

fn replicated(
    src: &RankView<'_>,
    dst: &RankView<'_>,
    s: &Entry,
    d: &Entry,
    split: bool,
    shard: bool,
) -> Result<Pieces, Incompatible> {
    // A draft entry of a split destination keeps all tokens, so its page is `size` times as long.
    let tokens_dst = if split && d.id.group == Group::Draft { u64::from(dst.layout.split.size) } else { 1 };
    if s.unit_bytes * tokens_dst != d.unit_bytes {
        return Err(Incompatible::EntryBytes);
    }
    if split && !s.unit_bytes.is_multiple_of(u64::from(src.layout.page_tokens)) {
        return Err(Incompatible::EntryBytes);
    }
    if shard || elected_replica(src, dst)? { Ok(whole(d.unit_bytes)) } else { Ok(Pieces::new()) }
}

fn heads(
    src: &RankView<'_>,
    dst: &RankView<'_>,
    component: Component,
    total: u32,
    head_bytes: u32,
    order: (HeadOrder, HeadOrder),
) -> Result<Pieces, Incompatible> {
    let of = |tp: u32, rank: u32| heads_of(total, tp, rank).ok_or(Incompatible::HeadSplit);
    let (s0, sn) = of(src.topo.tp, src.rank.tp)?;
    let (d0, dn) = of(dst.topo.tp, dst.rank.tp)?;
    for other in contacts_tp(src.topo, dst.topo, dst.rank.tp)? {
        if other < src.rank.tp && of(src.topo.tp, other)? == (s0, sn) {
            return Ok(Pieces::new());
        }
    }
    let (lo, hi) = (s0.max(d0), (s0 + sn).min(d0 + dn));
    if lo >= hi {
        return Ok(Pieces::new());
    }
    let tokens = if component == Component::State { 1 } else { src.layout.page_tokens };
    let (hb, ps) = (u64::from(head_bytes), u64::from(tokens));
    let n = u64::from(hi - lo);
    let (s_at, d_at) = (u64::from(lo - s0), u64::from(lo - d0));
    let (sn, dn) = (u64::from(sn), u64::from(dn));
    use HeadOrder::{HeadToken, TokenHead};
    Ok(match order {
        (TokenHead, TokenHead) => smallvec![simplify(Strided {
            src: s_at * hb,
            dst: d_at * hb,
            len: n * hb,
            rows: tokens,
            src_stride: sn * hb,
            dst_stride: dn * hb,
        })],
        (HeadToken, HeadToken) => smallvec![simplify(Strided {
            src: s_at * ps * hb,
            dst: d_at * ps * hb,
            len: n * ps * hb,
            rows: 1,
            src_stride: 0,
            dst_stride: 0,
        })],
        (so, _) => (0..n)
            .map(|h| {
                let token_major = |at: u64| (at + h) * hb;
                let head_major = |at: u64| (at + h) * ps * hb;
                let src_token = so == TokenHead;
                simplify(Strided {
                    src: if src_token { token_major(s_at) } else { head_major(s_at) },
                    dst: if src_token { head_major(d_at) } else { token_major(d_at) },
                    len: hb,
                    rows: tokens,
                    src_stride: if src_token { sn * hb } else { hb },
                    dst_stride: if src_token { hb } else { dn * hb },
                })
            })
            .collect(),
    })
}

fn axis(src: &RankView<'_>, dst: &RankView<'_>, groups: &[u32], outer: u32, elem_bytes: u32) -> Pieces {
    let (p, q) = (u64::from(src.rank.tp), u64::from(dst.rank.tp));
    let (ptp, qtp) = (u64::from(src.topo.tp), u64::from(dst.topo.tp));
    let eb = u64::from(elem_bytes);
    let dim = |tp: u64| groups.iter().map(|&g| u64::from(g) / tp).sum::<u64>() * eb;
    let (mut s_base, mut d_base) = (0, 0);
    let mut out = Pieces::new();
    for &g in groups {
        let (a, b) = (u64::from(g) / ptp, u64::from(g) / qtp);
        let (lo, hi) = ((p * a).max(q * b), ((p + 1) * a).min((q + 1) * b));
        if lo < hi {
            out.push(simplify(Strided {
                src: (s_base + lo - p * a) * eb,
                dst: (d_base + lo - q * b) * eb,
                len: (hi - lo) * eb,
                rows: outer,
                src_stride: dim(ptp),
                dst_stride: dim(qtp),
            }));
        }
        s_base += a;
        d_base += b;
    }
    // One piece that is everything on both sides is a plain copy already; neighbours stay apart, the
    // materialiser joins them.
    out
}
