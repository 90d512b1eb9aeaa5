//! Where each byte of a page lies: index formulas for the orders that engines use, and the contiguous runs
//! that follow from them. Numbers only; the memory is somebody else's.
//!
//! ```text
//! symbols    p page, o token in page, t = p*P + o, l layer, c part (K, V), h head; P, L, H their counts
//! PageLayerKv      (p, l, c, o, h)   the crate's default: a page is one run, so is a layer of it
//! LayerFirst       (c, l, t, h)      2*L runs a page
//! PageFirst        (c, t, l, h)      2 runs a page, token-major inside
//! PageFirstDirect  (c, p, l, o, h)   2 runs a page, layer-major inside
//! HeadSplit        (c, p, h, o, l)   2 runs a page, a range of heads is one run of each
//! ```
//! A latent row (MLA), a row of a side plane and an opaque state have one part and one head, so each order
//! above also says where they lie.
//!
//! Whatever the order in memory, [`PlaneLayout::object_runs`] lists the pieces of a page in the default order:
//! an object written from one layout can be read into another.

use smallvec::{SmallVec, smallvec};

/// Order of the bytes of a plane. See the module.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Layout {
    /// (page, layer, K/V, token, head).
    PageLayerKv,
    /// (K/V, layer, token, head).
    LayerFirst,
    /// (K/V, token, layer, head).
    PageFirst,
    /// (K/V, page, layer, token, head).
    PageFirstDirect,
    /// (K/V, page, head, token, layer).
    HeadSplit,
}

impl Layout {
    /// All of them.
    pub const ALL: [Layout; 5] = [
        Layout::PageLayerKv,
        Layout::LayerFirst,
        Layout::PageFirst,
        Layout::PageFirstDirect,
        Layout::HeadSplit,
    ];
}

/// What one token holds in one layer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum RowShape {
    /// Keys and values, `heads` of each.
    Mha {
        /// KV heads.
        heads: u32,
        /// Bytes of one key head.
        key_bytes: u32,
        /// Bytes of one value head.
        value_bytes: u32,
    },
    /// Keys only, as index planes of some models have.
    KeysOnly {
        /// Heads.
        heads: u32,
        /// Bytes of one head.
        key_bytes: u32,
    },
    /// One row: a latent row, or a row of a side plane (scales, index keys).
    Row {
        /// Bytes.
        bytes: u32,
    },
}

/// Why there is no such layout.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// A count or size is zero.
    #[error("{field} is zero")]
    Zero {
        /// Field.
        field: &'static str,
    },
    /// The plane does not fit into 2^63 bytes.
    #[error("the plane has more than 2^63 bytes")]
    TooLarge,
}

/// A contiguous run of bytes in a plane.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Run {
    /// First byte, from the beginning of the plane.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// One of the parts of a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Part {
    /// Bytes of one head.
    head_bytes: u64,
    /// Bytes before this part: of the row, and by the same factor of everything larger.
    row_before: u64,
}

/// The coordinates of one head of one token.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct At {
    /// Page.
    pub page: u32,
    /// Layer.
    pub layer: u32,
    /// 0 is K or the only part, 1 is V.
    pub part: u32,
    /// Token in the page.
    pub token: u32,
    /// Head.
    pub head: u32,
}

/// The index formulas of one plane. All methods are O(1) unless they return lists, which cost their length.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PlaneLayout {
    layout: Layout,
    parts: [Part; 2],
    part_count: u32,
    heads: u32,
    page_tokens: u32,
    layers: u32,
    pages: u32,
    row_bytes: u64,
}

impl PlaneLayout {
    /// The plane of `pages` pages of `page_tokens` tokens in `layers` layers.
    pub fn new(
        layout: Layout,
        row: RowShape,
        page_tokens: u32,
        layers: u32,
        pages: u32,
    ) -> Result<PlaneLayout, LayoutError> {
        let (heads, key, value, part_count) = match row {
            RowShape::Mha { heads, key_bytes, value_bytes } => (heads, key_bytes, value_bytes, 2),
            RowShape::KeysOnly { heads, key_bytes } => (heads, key_bytes, 0, 1),
            RowShape::Row { bytes } => (1, bytes, 0, 1),
        };
        let counts = [
            ("heads", heads),
            ("bytes", key),
            ("page_tokens", page_tokens),
            ("layers", layers),
            ("pages", pages),
        ];
        if let Some((field, _)) = counts.iter().find(|(_, n)| *n == 0) {
            return Err(LayoutError::Zero { field });
        }
        if part_count == 2 && value == 0 {
            return Err(LayoutError::Zero { field: "value_bytes" });
        }
        let key_row = u64::from(heads) * u64::from(key);
        let row_bytes = key_row + u64::from(heads) * u64::from(value);
        let total = [page_tokens, layers, pages]
            .iter()
            .try_fold(row_bytes, |n, &f| n.checked_mul(u64::from(f)))
            .filter(|&n| i64::try_from(n).is_ok())
            .ok_or(LayoutError::TooLarge)?;
        debug_assert!(total > 0, "all factors are positive");
        let parts = [
            Part { head_bytes: u64::from(key), row_before: 0 },
            Part { head_bytes: u64::from(value), row_before: key_row },
        ];
        Ok(PlaneLayout { layout, parts, part_count, heads, page_tokens, layers, pages, row_bytes })
    }

    /// A plane of opaque blocks, one per page: recurrent state.
    pub fn opaque(block_bytes: u64, pages: u32) -> Result<PlaneLayout, LayoutError> {
        if block_bytes == 0 || pages == 0 {
            return Err(LayoutError::Zero { field: if pages == 0 { "pages" } else { "block_bytes" } });
        }
        let total = block_bytes.checked_mul(u64::from(pages)).filter(|&n| i64::try_from(n).is_ok());
        total.ok_or(LayoutError::TooLarge)?;
        let part = Part { head_bytes: block_bytes, row_before: 0 };
        Ok(PlaneLayout {
            layout: Layout::PageLayerKv,
            parts: [part, Part { head_bytes: 0, row_before: block_bytes }],
            part_count: 1,
            heads: 1,
            page_tokens: 1,
            layers: 1,
            pages,
            row_bytes: block_bytes,
        })
    }

    /// The order.
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Pages.
    #[must_use]
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// Parts of a row: 2 for keys and values, else 1.
    #[must_use]
    pub fn parts(&self) -> u32 {
        self.part_count
    }

    /// Bytes of one page in all layers: the length of its object.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.row_bytes * u64::from(self.page_tokens) * u64::from(self.layers)
    }

    /// Bytes of the plane.
    #[must_use]
    pub fn plane_bytes(&self) -> u64 {
        self.page_bytes() * u64::from(self.pages)
    }

    /// Bytes of one head of one token in one part.
    #[must_use]
    pub fn head_bytes(&self, part: u32) -> u64 {
        self.parts.get(part as usize).map_or(0, |p| p.head_bytes)
    }

    /// First byte of one head of one token; `None` outside the plane.
    #[must_use]
    pub fn offset(&self, at: At) -> Option<u64> {
        let inside = at.page < self.pages
            && at.layer < self.layers
            && at.part < self.part_count
            && at.token < self.page_tokens
            && at.head < self.heads;
        inside.then(|| self.offset_inside(at))
    }

    fn offset_inside(&self, at: At) -> u64 {
        let part = self.parts[at.part as usize];
        let [p, l, o, h] = [at.page, at.layer, at.token, at.head].map(u64::from);
        let [tokens, layers, heads] = [self.page_tokens, self.layers, self.heads].map(u64::from);
        let slots = tokens * u64::from(self.pages);
        let (row, head) = (part.head_bytes * heads, h * part.head_bytes);
        // What lies before a part in the whole plane, for the orders that split by part first.
        let plane_before = part.row_before * slots * layers;
        match self.layout {
            Layout::PageLayerKv => {
                let layer_bytes = tokens * self.row_bytes;
                (p * layers + l) * layer_bytes + part.row_before * tokens + o * row + head
            }
            Layout::LayerFirst => plane_before + (l * slots + p * tokens + o) * row + head,
            Layout::PageFirst => plane_before + ((p * tokens + o) * layers + l) * row + head,
            Layout::PageFirstDirect => plane_before + ((p * layers + l) * tokens + o) * row + head,
            Layout::HeadSplit => {
                plane_before + (((p * heads + h) * tokens + o) * layers + l) * part.head_bytes
            }
        }
    }

    /// The longest runs of a page, in address order: what a zero-copy backend registers or moves.
    /// One for the default order, one per part for the page-first family, one per layer and part for
    /// `LayerFirst`.
    #[must_use]
    pub fn runs(&self, page: u32) -> SmallVec<[Run; 2]> {
        if page >= self.pages {
            return smallvec![];
        }
        let first = |layer, part| self.offset_inside(At { page, layer, part, token: 0, head: 0 });
        let part_row = |part: u32| self.head_bytes(part) * u64::from(self.heads);
        let [tokens, layers] = [self.page_tokens, self.layers].map(u64::from);
        let parts = 0..self.part_count;
        match self.layout {
            Layout::PageLayerKv => smallvec![Run { offset: first(0, 0), len: self.page_bytes() }],
            Layout::LayerFirst => parts
                .flat_map(|c| (0..self.layers).map(move |l| (c, l)))
                .map(|(c, l)| Run { offset: first(l, c), len: tokens * part_row(c) })
                .collect(),
            Layout::PageFirst | Layout::PageFirstDirect | Layout::HeadSplit => {
                parts.map(|c| Run { offset: first(0, c), len: tokens * layers * part_row(c) }).collect()
            }
        }
    }

    /// The runs of a range of heads where the heads lie outside the tokens, one per part: what a zero-copy
    /// backend moves for a head-split object. `None` in other orders and outside the plane.
    #[must_use]
    pub fn split_runs(&self, page: u32, from: u32, to: u32) -> Option<SmallVec<[Run; 2]>> {
        let inside = page < self.pages && from < to && to <= self.heads;
        if self.layout != Layout::HeadSplit || !inside {
            return None;
        }
        let run = |part| Run {
            offset: self.offset_inside(At { page, layer: 0, part, token: 0, head: from }),
            len: u64::from(to - from)
                * u64::from(self.page_tokens)
                * u64::from(self.layers)
                * self.head_bytes(part),
        };
        Some((0..self.part_count).map(run).collect())
    }

    /// The runs of one layer of a page, in the default order (K/V, token, head), merged where they touch.
    #[must_use]
    pub fn layer_runs(&self, page: u32, layer: u32) -> Vec<Run> {
        let mut out = Vec::new();
        if page < self.pages && layer < self.layers {
            self.push_layer(page, layer, 0..self.heads, &mut out);
        }
        out
    }

    /// All pieces of a page in the default order, whatever the order in memory, merged where they touch.
    #[must_use]
    pub fn object_runs(&self, page: u32) -> Vec<Run> {
        self.head_runs(page, 0, self.heads)
    }

    /// The same for the heads `from..to` only: the object of a head range, readable by any topology that
    /// tiles the heads.
    #[must_use]
    pub fn head_runs(&self, page: u32, from: u32, to: u32) -> Vec<Run> {
        let mut out = Vec::new();
        if page < self.pages && from < to && to <= self.heads {
            for layer in 0..self.layers {
                self.push_layer(page, layer, from..to, &mut out);
            }
        }
        out
    }

    fn push_layer(&self, page: u32, layer: u32, heads: std::ops::Range<u32>, out: &mut Vec<Run>) {
        for part in 0..self.part_count {
            for token in 0..self.page_tokens {
                let head_bytes = self.head_bytes(part);
                // Only `HeadSplit` keeps the heads of a token apart.
                let step = if self.layout == Layout::HeadSplit { 1 } else { heads.end - heads.start };
                for head in heads.clone().step_by(step as usize) {
                    let offset = self.offset_inside(At { page, layer, part, token, head });
                    let len = head_bytes * u64::from(step);
                    match out.last_mut() {
                        Some(last) if last.offset + last.len == offset => last.len += len,
                        _ => out.push(Run { offset, len }),
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
