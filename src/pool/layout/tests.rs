use std::collections::BTreeMap;

use super::*;

const ROWS: [RowShape; 5] = [
    RowShape::Mha { heads: 4, key_bytes: 6, value_bytes: 6 },
    RowShape::Mha { heads: 3, key_bytes: 8, value_bytes: 2 },
    RowShape::Mha { heads: 1, key_bytes: 5, value_bytes: 5 },
    RowShape::KeysOnly { heads: 2, key_bytes: 7 },
    RowShape::Row { bytes: 11 },
];
const PAGE_TOKENS: u32 = 3;
const LAYERS: u32 = 4;
const PAGES: u32 = 5;

fn plane(layout: Layout, row: RowShape) -> PlaneLayout {
    PlaneLayout::new(layout, row, PAGE_TOKENS, LAYERS, PAGES).unwrap()
}

fn heads_of(row: RowShape) -> (u32, Vec<u32>) {
    match row {
        RowShape::Mha { heads, key_bytes, value_bytes } => (heads, vec![key_bytes, value_bytes]),
        RowShape::KeysOnly { heads, key_bytes } => (heads, vec![key_bytes]),
        RowShape::Row { bytes } => (1, vec![bytes]),
    }
}

/// The literal reading of each shape: nested loops in the written order, a cursor that only moves forward.
fn naive(layout: Layout, row: RowShape) -> BTreeMap<At, u64> {
    let (heads, parts) = heads_of(row);
    let parts_n = parts.len() as u32;
    let mut out = BTreeMap::new();
    let mut cursor = 0;
    let mut visit = |page, layer, part: u32, token, head| {
        out.insert(At { page, layer, part, token, head }, cursor);
        cursor += u64::from(parts[part as usize]);
    };
    match layout {
        Layout::PageLayerKv => {
            for p in 0..PAGES {
                for l in 0..LAYERS {
                    for c in 0..parts_n {
                        for o in 0..PAGE_TOKENS {
                            (0..heads).for_each(|h| visit(p, l, c, o, h));
                        }
                    }
                }
            }
        }
        Layout::LayerFirst => {
            for c in 0..parts_n {
                for l in 0..LAYERS {
                    for t in 0..PAGES * PAGE_TOKENS {
                        (0..heads).for_each(|h| visit(t / PAGE_TOKENS, l, c, t % PAGE_TOKENS, h));
                    }
                }
            }
        }
        Layout::PageFirst => {
            for c in 0..parts_n {
                for t in 0..PAGES * PAGE_TOKENS {
                    for l in 0..LAYERS {
                        (0..heads).for_each(|h| visit(t / PAGE_TOKENS, l, c, t % PAGE_TOKENS, h));
                    }
                }
            }
        }
        Layout::PageFirstDirect => {
            for c in 0..parts_n {
                for p in 0..PAGES {
                    for l in 0..LAYERS {
                        for o in 0..PAGE_TOKENS {
                            (0..heads).for_each(|h| visit(p, l, c, o, h));
                        }
                    }
                }
            }
        }
        Layout::HeadSplit => {
            for c in 0..parts_n {
                for p in 0..PAGES {
                    for h in 0..heads {
                        for o in 0..PAGE_TOKENS {
                            (0..LAYERS).for_each(|l| visit(p, l, c, o, h));
                        }
                    }
                }
            }
        }
    }
    out
}

/// A plane in which every byte says which byte it is: its coordinates and its place in the head.
fn labelled(layout: Layout, row: RowShape) -> Vec<(At, u64)> {
    let p = plane(layout, row);
    let mut bytes = vec![None; p.plane_bytes() as usize];
    for (at, offset) in naive(layout, row) {
        for i in 0..p.head_bytes(at.part) {
            let slot = &mut bytes[(offset + i) as usize];
            assert!(slot.replace((at, i)).is_none(), "two heads at one byte");
        }
    }
    bytes.into_iter().map(|b| b.expect("a byte that belongs to nobody")).collect()
}

fn gather(bytes: &[(At, u64)], runs: &[Run]) -> Vec<(At, u64)> {
    runs.iter().flat_map(|r| bytes[r.offset as usize..(r.offset + r.len) as usize].iter().copied()).collect()
}

#[test]
fn every_formula_equals_the_nested_loops() {
    for layout in Layout::ALL {
        for row in ROWS {
            let p = plane(layout, row);
            let naive = naive(layout, row);
            assert!(!naive.is_empty());
            for (&at, &offset) in &naive {
                assert_eq!(p.offset(at), Some(offset), "{layout:?} {row:?} {at:?}");
            }
        }
    }
}

#[test]
fn runs_cover_a_page_exactly_and_are_as_few_as_promised() {
    for layout in Layout::ALL {
        for row in ROWS {
            let p = plane(layout, row);
            let bytes = labelled(layout, row);
            for page in 0..PAGES {
                let runs = p.runs(page);
                let want = match layout {
                    Layout::PageLayerKv => 1,
                    Layout::LayerFirst => p.parts() * LAYERS,
                    _ => p.parts(),
                };
                assert_eq!(runs.len() as u32, want, "{layout:?} {row:?}");
                let mut mine = gather(&bytes, &runs);
                assert_eq!(mine.len() as u64, p.page_bytes());
                assert!(mine.iter().all(|(at, _)| at.page == page));
                mine.sort_unstable();
                mine.dedup();
                assert_eq!(mine.len() as u64, p.page_bytes());
                assert!(runs.windows(2).all(|w| w[0].offset + w[0].len <= w[1].offset));
            }
        }
    }
}

/// All pairs: a page written from one layout arrives whole and in place in any other.
#[test]
fn a_page_moves_between_any_two_layouts() {
    for row in ROWS {
        for from in Layout::ALL {
            for to in Layout::ALL {
                let (a, b) = (plane(from, row), plane(to, row));
                let (source, target) = (labelled(from, row), labelled(to, row));
                for page in 0..PAGES {
                    let sent = gather(&source, &a.object_runs(page));
                    let wanted = gather(&target, &b.object_runs(page));
                    assert!(sent == wanted, "{from:?} to {to:?} of {row:?}");
                    assert_eq!(sent.len() as u64, a.page_bytes());
                }
            }
        }
    }
}

#[test]
fn the_default_order_is_the_object_order_and_a_layer_is_one_run() {
    for row in ROWS {
        let p = plane(Layout::PageLayerKv, row);
        for page in 0..PAGES {
            assert_eq!(p.object_runs(page), p.runs(page).to_vec());
            let layers: Vec<Run> = (0..LAYERS).flat_map(|l| p.layer_runs(page, l)).collect();
            assert_eq!(layers.len(), LAYERS as usize);
            assert!(layers.windows(2).all(|w| w[0].offset + w[0].len == w[1].offset));
        }
    }
}

#[test]
fn head_ranges_tile_a_page_and_are_whole_runs_where_heads_are_outside() {
    let row = RowShape::Mha { heads: 4, key_bytes: 6, value_bytes: 6 };
    for layout in Layout::ALL {
        let p = plane(layout, row);
        let bytes = labelled(layout, row);
        let halves: Vec<_> = [(0, 2), (2, 4)].map(|(a, b)| gather(&bytes, &p.head_runs(1, a, b))).into();
        assert!(halves[0].iter().all(|(at, _)| at.head < 2) && halves[1].iter().all(|(at, _)| at.head >= 2));
        assert_eq!(p.split_runs(1, 0, 2).is_some(), layout == Layout::HeadSplit);
        for (half, (from, to)) in halves.iter().zip([(0, 2), (2, 4)]) {
            if let Some(runs) = p.split_runs(1, from, to) {
                assert_eq!(runs.len(), 2);
                let (mut split, mut half) = (gather(&bytes, &runs), half.clone());
                split.sort_unstable();
                half.sort_unstable();
                assert_eq!(split, half);
            }
        }
        let mut all = halves.concat();
        all.sort_unstable();
        let mut whole = gather(&bytes, &p.object_runs(1));
        whole.sort_unstable();
        assert_eq!(all, whole, "{layout:?}");
    }
}

#[test]
fn a_state_is_one_block_a_page() {
    let p = PlaneLayout::opaque(1000, 7).unwrap();
    assert_eq!((p.page_bytes(), p.plane_bytes()), (1000, 7000));
    assert_eq!(p.runs(3).to_vec(), [Run { offset: 3000, len: 1000 }]);
    assert_eq!(p.object_runs(6), [Run { offset: 6000, len: 1000 }]);
}

#[test]
fn outside_is_nothing_and_nonsense_is_refused() {
    let p = plane(Layout::LayerFirst, ROWS[0]);
    let at = At { page: 0, layer: 0, part: 0, token: 0, head: 0 };
    for bad in [
        At { page: PAGES, ..at },
        At { layer: LAYERS, ..at },
        At { part: 2, ..at },
        At { token: PAGE_TOKENS, ..at },
        At { head: 4, ..at },
    ] {
        assert_eq!(p.offset(bad), None, "{bad:?}");
    }
    assert!(p.runs(PAGES).is_empty() && p.object_runs(PAGES).is_empty());
    assert!(p.layer_runs(0, LAYERS).is_empty() && p.head_runs(0, 2, 2).is_empty());
    assert!(p.head_runs(0, 0, 5).is_empty());
    let row = RowShape::Row { bytes: u32::MAX };
    assert_eq!(PlaneLayout::new(Layout::PageFirst, row, 512, 1024, u32::MAX), Err(LayoutError::TooLarge));
    assert_eq!(
        PlaneLayout::new(Layout::PageFirst, row, 0, 1, 1),
        Err(LayoutError::Zero { field: "page_tokens" })
    );
    let no_value = RowShape::Mha { heads: 1, key_bytes: 1, value_bytes: 0 };
    assert_eq!(
        PlaneLayout::new(Layout::PageFirst, no_value, 1, 1, 1),
        Err(LayoutError::Zero { field: "value_bytes" })
    );
    assert_eq!(PlaneLayout::opaque(0, 1), Err(LayoutError::Zero { field: "block_bytes" }));
}
