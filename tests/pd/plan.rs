//! The planner: the worked examples, the public bug reports, and random instances against the oracle.

use sapwood::pd::Incompatible;
use sapwood::pd::layout::{Component, Entry, EntryId, Group, HeadOrder, Layout, Role, Shape, TokenSplit};
use sapwood::pd::plan::{Copy, FullChunk, PlanError, RankView, check_coverage, group_pages, plan};
use sapwood::pd::topo::{Rank, Topology, contacts};

use crate::oracle::{Buffer, Case, Side, check, check_with, random_case};
use crate::{Rng, seed};

#[test]
fn random_instances_match_the_labelled_element_oracle() {
    let seed = seed(0x5A9);
    let cases: u64 = std::env::var("SAPWOOD_PLAN_CASES").ok().and_then(|s| s.parse().ok()).unwrap_or(20_000);
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    let share = |t: u64| {
        let mut sums = [0u64; 4];
        for i in (t..cases).step_by(threads as usize) {
            let mut rng = Rng(seed.wrapping_add(i.wrapping_mul(0x1_0001)));
            let case = random_case(&mut rng);
            sums[1] += u64::from(case.p.topo.tp != case.d.topo.tp);
            sums[2] += u64::from(case.p.topo.stage_layers != case.d.topo.stage_layers);
            sums[3] += u64::from(case.p.buffers.len() != case.d.buffers.len());
            match check(&case, &mut rng) {
                Ok(n) => sums[0] += n,
                Err(e) => panic!("case {i} of seed {seed}: {e}\n{case:#?}"),
            }
        }
        sums
    };
    let mut sums = [0u64; 4];
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|t| scope.spawn(move || share(t))).collect();
        for t in all {
            let part = t.join().expect("a case failed; it is printed above");
            sums.iter_mut().zip(part).for_each(|(a, b)| *a += b);
        }
    });
    let [elements, mismatched_tp, mismatched_pp, drafts] = sums;
    println!(
        "{cases} cases, {elements} elements; tp differs {mismatched_tp}, pp {mismatched_pp}, draft {drafts}"
    );
    // The generator must reach what it is for.
    assert!(mismatched_tp > cases / 3 && mismatched_pp > cases / 4 && drafts > cases / 3);
}

fn mha(layers: u32, draft: u32, heads: u32, stages: &[u32], tp: u32) -> Side {
    let mut buffers = Vec::new();
    let shape = Shape::Heads { total: heads, head_bytes: 2, order: HeadOrder::TokenHead };
    for (group, n) in [(Group::Target, layers), (Group::Draft, draft)] {
        for layer in 0..n {
            for role in [Role::K, Role::V] {
                buffers.push(Buffer {
                    id: EntryId { group, layer, role },
                    component: Component::Full,
                    shape,
                    bytes: 0,
                });
            }
        }
    }
    let topo = Topology { tp, stage_layers: stages.to_vec(), ..Topology::single(1) };
    Side { topo, buffers, pages: 4, ring_slots: 2, split: 1 }
}

fn case(p: Side, d: Side) -> Case {
    Case { p, d, page_tokens: 2, window_tokens: 4, prompt_tokens: 5, prefix: 1, live: 0 }
}

/// S7: sgl#27740, sgl#33457, sgl#33497 and the four worked examples of guessed V offsets.
#[test]
fn s7_uneven_stages_and_drafts_pair_by_identity() {
    for (layers, p_draft, d_draft, stages) in [
        (8, 0, 1, vec![4, 4]),
        (15, 0, 0, vec![7, 8]),
        (61, 0, 1, vec![30, 31]),
        (8, 0, 8, vec![4, 4]),
        (8, 1, 1, vec![3, 5]),
    ] {
        let c = case(mha(layers, p_draft, 1, &stages, 1), mha(layers, d_draft, 1, &[layers], 1));
        check(&c, &mut Rng(1)).unwrap();
    }
}

/// The guess of sgl#27740 is wrong exactly where the reports say so, and the oracle sees it.
#[test]
fn s7_a_guessed_v_offset_is_found_by_the_oracle() {
    let guess = |layers: u32, d_draft: u32, stages: &[u32]| {
        let c = case(mha(layers, 0, 1, stages, 1), mha(layers, d_draft, 1, &[layers], 1));
        check_with(&c, &mut Rng(2), &|plan, dst| plan.plant_guessed_v(dst))
    };
    assert!(guess(15, 0, &[7, 8]).is_err());
    assert!(guess(61, 1, &[30, 31]).is_err());
    assert!(guess(8, 0, &[4, 4]).is_ok());
}

/// S8: sgl#23746, sgl#30997, sgl#31968, sgl#19086: head maps with fewer heads than ranks, both ways.
#[test]
fn s8_head_maps_of_the_worked_examples() {
    for (heads, p_tp, d_tp) in [(8, 4, 2), (8, 2, 4), (2, 1, 4), (2, 4, 1), (2, 8, 4), (4, 8, 2)] {
        check(&case(mha(2, 1, heads, &[2], p_tp), mha(2, 0, heads, &[2], d_tp)), &mut Rng(3)).unwrap();
    }
    // Four ranks share two heads: the second holder of a head sends nothing.
    let c = case(mha(1, 0, 2, &[1], 4), mha(1, 0, 2, &[1], 1));
    let mut rng = Rng(4);
    let dl = crate::oracle::layout_of(&c.d, Rank::default(), &c, &mut rng);
    let empty: Vec<bool> = (0..4)
        .map(|tp| {
            let rank = Rank { tp, ..Rank::default() };
            let pl = crate::oracle::layout_of(&c.p, rank, &c, &mut rng);
            let src = RankView { topo: &c.p.topo, rank, layout: &pl };
            plan(&src, &RankView { topo: &c.d.topo, rank: Rank::default(), layout: &dl }).unwrap().is_empty()
        })
        .collect();
    assert_eq!(empty, [false, true, false, true]);
}

fn one(
    component: Component,
    shape: Shape,
    unit_bytes: u64,
    units: u32,
    ring_slots: u32,
    layers: u32,
) -> Layout {
    let id = EntryId { group: Group::Target, layer: 0, role: Role::Latent };
    let mut e = Entry { id, component, region: 0, base: 0, units, unit_bytes, shape, ring_slots };
    let mut entries = Vec::new();
    for layer in 0..layers {
        e.id.layer = layer;
        e.base = u64::from(layer) * e.bytes().unwrap();
        entries.push(e);
    }
    let regions = vec![entries.iter().map(|e| e.bytes().unwrap()).sum()];
    Layout { model: 1, page_tokens: 4, window_tokens: 0, split: TokenSplit::NONE, regions, entries }
}

#[test]
fn pages_group_into_runs() {
    let runs = group_pages(&[10, 11, 12, 20, 21, 5], &[3, 4, 5, 6, 7, 8]).unwrap();
    assert_eq!(runs, [(10, 3, 3), (20, 6, 2), (5, 8, 1)]);
    assert_eq!(group_pages(&[1, 2, 3, 4], &[7, 8, 20, 21]).unwrap(), [(1, 7, 2), (3, 20, 2)]);
    assert_eq!(group_pages(&[1], &[]), Err(PlanError::Length { src: 1, dst: 0 }));
    let (topo, rank) = (Topology::single(1), Rank::default());
    let l = one(Component::Full, Shape::Replicated, 32_768, 32, 0, 1);
    let v = RankView { topo: &topo, rank, layout: &l };
    let mut out = Vec::new();
    plan(&v, &v)
        .unwrap()
        .units(Component::Full, &[10, 11, 12, 20, 21, 5], &[3, 4, 5, 6, 7, 8], &mut out)
        .unwrap();
    assert_eq!(out.iter().map(|c| c.len).collect::<Vec<_>>(), [98_304, 65_536, 32_768]);
}

#[test]
fn ring_rows_of_the_worked_example() {
    let (topo, rank) = (Topology::single(1), Rank::default());
    let p = one(Component::Ring, Shape::Replicated, 100, 10, 6, 1);
    let d = one(Component::Ring, Shape::Replicated, 100, 10, 4, 1);
    let plan = plan(&RankView { topo: &topo, rank, layout: &p }, &RankView { topo: &topo, rank, layout: &d })
        .unwrap();
    let mut out = Vec::new();
    assert_eq!(plan.ring(3, 9, 19, 3, &mut out), Ok(300));
    let at = |src, dst, len| Copy { src_region: 0, src_off: src, dst_region: 0, dst_off: dst, len };
    assert_eq!(out, [at((18 + 4) * 100, 36 * 100, 200), at(18 * 100, (36 + 2) * 100, 100)]);
    assert_eq!(plan.ring(3, 9, 19, 5, &mut out), Err(PlanError::Ring { live: 5, slots: 4 }));
    assert_eq!(plan.ring(3, 10, 19, 3, &mut out), Err(PlanError::DestRange(10)));
}

#[test]
fn token_split_of_the_worked_example() {
    let topo_d = Topology { tp: 2, ..Topology::single(1) };
    let topo_p = Topology::single(1);
    let mut p = one(Component::Full, Shape::Replicated, 4, 16, 0, 1);
    let mut d = p.clone();
    // A draft entry keeps all tokens: its page is twice as long.
    let draft =
        Entry { id: EntryId { group: Group::Draft, layer: 0, role: Role::Latent }, base: 64, ..p.entries[0] };
    p.entries.push(draft);
    p.regions = vec![128];
    d.entries.push(Entry { unit_bytes: 8, ..draft });
    d.regions = vec![192];
    d.split = TokenSplit { size: 2, rank: 1 };
    let d_rank = Rank { tp: 1, ..Rank::default() };
    let plan = plan(
        &RankView { topo: &topo_p, rank: Rank::default(), layout: &p },
        &RankView { topo: &topo_d, rank: d_rank, layout: &d },
    )
    .unwrap();
    let mut out = Vec::new();
    let chunk = FullChunk { first: 0, src: &[7, 9], prompt_tokens: 7, prefix: 0, dst: &[4] };
    assert_eq!(plan.full(&chunk, &mut out), Ok(3 + 7));
    let (target, draft): (Vec<&Copy>, Vec<&Copy>) = out.iter().partition(|c| c.src_off < 64);
    let rows: Vec<(u64, u64)> = target.iter().map(|c| (c.src_off, c.dst_off)).collect();
    assert_eq!(rows, [(29, 16), (31, 17), (37, 18)]);
    let runs: Vec<(u64, u64, u64)> = draft.iter().map(|c| (c.src_off - 64, c.dst_off - 64, c.len)).collect();
    assert_eq!(runs, [(28, 32, 4), (36, 36, 3)]);
    let bad = FullChunk { prefix: 1, ..chunk };
    assert_eq!(plan.full(&bad, &mut out), Err(PlanError::SplitPrefix(1)));
}

#[test]
fn page_shard_of_the_worked_example() {
    let topo_p = Topology { tp: 4, page_shard: true, ..Topology::single(1) };
    let (topo_d, d_rank) = (Topology::single(1), Rank::default());
    let p = one(Component::Full, Shape::Replicated, 4, 4, 0, 1);
    let d = one(Component::Full, Shape::Replicated, 4, 32, 0, 1);
    let rank = Rank { tp: 1, ..Rank::default() };
    let plan = plan(
        &RankView { topo: &topo_p, rank, layout: &p },
        &RankView { topo: &topo_d, rank: d_rank, layout: &d },
    )
    .unwrap();
    let mut out = Vec::new();
    let dst: Vec<u32> = (10..16).collect();
    plan.full(
        &FullChunk { first: 0, src: &[4, 5, 6, 7, 12, 13], prompt_tokens: 24, prefix: 0, dst: &dst },
        &mut out,
    )
    .unwrap();
    let moved: Vec<(u64, u64)> = out.iter().map(|c| (c.src_off / 4, c.dst_off / 4)).collect();
    assert_eq!(moved, [(1, 11), (3, 15)]);
    assert_eq!(plan.full_bytes(24, 0), None);
}

/// S8: convolution state `[q|k|v]`: three pieces, not one (sgl#30997).
#[test]
fn s8_sub_axes_of_the_worked_example() {
    let shape = Shape::Axis { groups: [8, 8, 16, 0], outer: 3, elem_bytes: 2 };
    let (one_tp, two_tp) = (Topology::single(1), Topology { tp: 2, ..Topology::single(1) });
    let full = one(Component::State, shape, 192, 2, 0, 1);
    let half = one(Component::State, shape, 96, 2, 0, 1);
    let r1 = Rank { tp: 1, ..Rank::default() };
    let mut out = Vec::new();
    let wide = RankView { topo: &one_tp, rank: Rank::default(), layout: &full };
    let narrow = RankView { topo: &two_tp, rank: r1, layout: &half };
    plan(&wide, &narrow).unwrap().units(Component::State, &[0], &[0], &mut out).unwrap();
    let mut got: Vec<(u64, u64, u64)> = out.iter().map(|c| (c.src_off, c.dst_off, c.len)).collect();
    got.sort_unstable();
    let mut want: Vec<(u64, u64, u64)> = (0..3)
        .flat_map(|o| [(o * 64 + 8, o * 32, 8), (o * 64 + 24, o * 32 + 8, 8), (o * 64 + 48, o * 32 + 16, 16)])
        .collect();
    want.sort_unstable();
    assert_eq!(got, want);
    out.clear();
    plan(&narrow, &wide).unwrap().units(Component::State, &[0], &[0], &mut out).unwrap();
    let mut back: Vec<(u64, u64, u64)> = out.iter().map(|c| (c.dst_off, c.src_off, c.len)).collect();
    back.sort_unstable();
    assert_eq!(back, want);
}

#[test]
fn equal_layouts_are_the_identity() {
    let (topo, rank) = (Topology::single(2), Rank::default());
    let l = one(Component::Full, Shape::Replicated, 16, 8, 0, 2);
    let v = RankView { topo: &topo, rank, layout: &l };
    let plan = plan(&v, &v).unwrap();
    let mut out = Vec::new();
    plan.units(Component::Full, &[0, 1, 2, 3], &[0, 1, 2, 3], &mut out).unwrap();
    assert!(out.iter().all(|c| (c.src_region, c.src_off) == (c.dst_region, c.dst_off)));
    check_coverage(&v, &topo, &[&plan]).unwrap();
}

#[test]
fn what_does_not_fit_is_refused_with_a_reason() {
    let (topo, rank) = (Topology::single(2), Rank::default());
    let base = one(Component::Full, Shape::Replicated, 16, 8, 0, 2);
    let against = |l: &Layout| {
        plan(&RankView { topo: &topo, rank, layout: &base }, &RankView { topo: &topo, rank, layout: l })
            .map(|_| ())
    };
    let with = |f: &dyn Fn(&mut Layout)| {
        let mut l = base.clone();
        f(&mut l);
        against(&l)
    };
    assert_eq!(with(&|_| ()), Ok(()));
    assert_eq!(with(&|l| l.model = 2), Err(Incompatible::Model));
    assert_eq!(with(&|l| l.page_tokens = 8), Err(Incompatible::PageTokens));
    assert_eq!(with(&|l| l.page_tokens = 0), Err(Incompatible::PageTokens));
    assert_eq!(with(&|l| l.window_tokens = 8), Err(Incompatible::Window));
    assert_eq!(with(&|l| l.entries[0].unit_bytes = 8), Err(Incompatible::EntryBytes));
    assert_eq!(with(&|l| l.entries[1].id = l.entries[0].id), Err(Incompatible::DuplicateEntry));
    assert_eq!(with(&|l| l.entries[0].id.layer = 2), Err(Incompatible::LayerOutsideStage));
    assert_eq!(with(&|l| l.entries[0].base = u64::MAX), Err(Incompatible::RegionBounds));
    assert_eq!(with(&|l| l.entries[0].units = u32::MAX), Err(Incompatible::RegionBounds));
    assert_eq!(with(&|l| l.entries[0].region = 9), Err(Incompatible::RegionBounds));
    assert_eq!(with(&|l| l.entries[0].component = Component::Window), Err(Incompatible::EntryShape));
    assert_eq!(with(&|l| l.entries[0].component = Component::Ring), Err(Incompatible::Ring));
    assert_eq!(with(&|l| l.split.size = 0), Err(Incompatible::ContextParallel));
    let heads = Shape::Heads { total: 1, head_bytes: 4, order: HeadOrder::TokenHead };
    assert_eq!(with(&|l| l.entries[0].shape = heads), Err(Incompatible::EntryShape));
    // One layer without a source: the pair fits, the coverage does not.
    let mut less = base.clone();
    less.entries.pop();
    let src = RankView { topo: &topo, rank, layout: &less };
    let dst = RankView { topo: &topo, rank, layout: &base };
    let half = plan(&src, &dst).unwrap();
    assert_eq!(check_coverage(&dst, &topo, &[&half]), Err(Incompatible::Uncovered));
    let alien = Rank { tp: 1, ..Rank::default() };
    assert_eq!(contacts(&topo, &topo, alien, 0), Err(Incompatible::Rank));
}
