//! What a rank publishes about its memory: regions, and in them entries. An entry is one buffer of one
//! layer; its identity is (group, layer, role), never its position.

use crate::base::limits::{LAYERS_MAX, PAGE_SIZE_MAX};
use crate::pd::reason::Incompatible;
use crate::pd::topo::{Rank, Topology, heads_of};

/// Most entries of one rank.
pub const ENTRIES_MAX: usize = 8192;
/// Most regions of one rank.
pub const REGIONS_MAX: usize = 8192;
/// Most sub-axes of a sharded state (q, k, v and one spare).
pub const AXIS_GROUPS_MAX: usize = 4;
/// Largest page, slot or row in bytes (1 GiB).
pub const UNIT_BYTES_MAX: u64 = 1 << 30;

/// What an entry holds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Role {
    /// Keys.
    K,
    /// Values.
    V,
    /// Compressed latent (MLA).
    Latent,
    /// Anything else, numbered by the model: index keys, scales, convolution state, recurrent state.
    Other(u16),
}

/// Whose layer it is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Group {
    /// The model.
    Target,
    /// The draft model of speculative decoding; its layers count from 0 again.
    Draft,
}

/// Who an entry is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct EntryId {
    /// Target or draft.
    pub group: Group,
    /// Layer number within the whole model of its group, not within the stage.
    pub layer: u32,
    /// Which buffer of the layer.
    pub role: Role,
}

/// By which index list an entry is addressed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Component {
    /// Pages of the whole prompt.
    Full,
    /// Pages of the trailing window.
    Window,
    /// One slot per request.
    State,
    /// One row of slots per request, used round and round.
    Ring,
}

/// Order of tokens and heads inside a page.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum HeadOrder {
    /// (token, head, byte), "NHD".
    TokenHead,
    /// (head, token, byte), "HND".
    HeadToken,
}

/// How the unit of an entry (page, slot or ring slot) is spread over tensor-parallel ranks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Shape {
    /// Every rank holds the same bytes.
    Replicated,
    /// Attention heads, `total` in the whole model (never heads per rank times ranks).
    Heads {
        /// Heads of the model.
        total: u32,
        /// Bytes of one head of one token.
        head_bytes: u32,
        /// Order inside the page.
        order: HeadOrder,
    },
    /// A sharded axis made of sub-axes laid one after the other (`[q|k|v]`), each split evenly over the
    /// ranks, repeated `outer` times.
    Axis {
        /// Full length of each sub-axis; unused ones are 0.
        groups: [u32; AXIS_GROUPS_MAX],
        /// Rows.
        outer: u32,
        /// Bytes of one element.
        elem_bytes: u32,
    },
}

/// One buffer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Entry {
    /// Who it is.
    pub id: EntryId,
    /// Which index list addresses it.
    pub component: Component,
    /// Region it lies in.
    pub region: u32,
    /// Offset of unit 0 in the region, in bytes.
    pub base: u64,
    /// Pages, slots or rows. A ring row has `ring_slots` units.
    pub units: u32,
    /// Bytes of one unit.
    pub unit_bytes: u64,
    /// Spread over tensor-parallel ranks.
    pub shape: Shape,
    /// Slots of a ring row; 0 for other components.
    pub ring_slots: u32,
}

impl Entry {
    /// Bytes from the base to the end of the last unit, if they can be counted.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        let per_unit = if self.component == Component::Ring { u64::from(self.ring_slots) } else { 1 };
        u64::from(self.units).checked_mul(per_unit)?.checked_mul(self.unit_bytes)
    }
}

/// A decode side that spreads tokens over `size` ranks: rank k holds every token with `t mod size == k`,
/// packed, so one of its pages covers `page_tokens * size` tokens.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TokenSplit {
    /// Ranks; 1 is no split.
    pub size: u32,
    /// This rank.
    pub rank: u32,
}

impl TokenSplit {
    /// No split.
    pub const NONE: TokenSplit = TokenSplit { size: 1, rank: 0 };
}

/// What one rank publishes.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Layout {
    /// Digest of model, revision, dtype and everything else that must be equal for bytes to mean the same.
    pub model: u64,
    /// Tokens of a page.
    pub page_tokens: u32,
    /// Tokens of the sliding window; 0 without one.
    pub window_tokens: u32,
    /// Token split of a decode rank.
    pub split: TokenSplit,
    /// Length of each region in bytes.
    pub regions: Vec<u64>,
    /// The buffers, in any order.
    pub entries: Vec<Entry>,
}

impl Layout {
    /// Checks everything a peer will rely on: identities unique, bounds inside regions, unit sizes equal to
    /// what shape and rank imply, layers inside the stage, draft entries on the last stage only.
    /// O(entries log entries).
    pub fn validate(&self, topo: &Topology, rank: Rank) -> Result<(), Incompatible> {
        topo.validate()?;
        topo.check_rank(rank)?;
        if self.entries.len() > ENTRIES_MAX || self.regions.len() > REGIONS_MAX {
            return Err(Incompatible::Limit);
        }
        if self.page_tokens == 0 || self.page_tokens > PAGE_SIZE_MAX {
            return Err(Incompatible::PageTokens);
        }
        if self.split.size == 0 || self.split.size > topo.tp || self.split.rank >= self.split.size {
            return Err(Incompatible::ContextParallel);
        }
        let mut ids: Vec<EntryId> = self.entries.iter().map(|e| e.id).collect();
        ids.sort_unstable();
        if ids.windows(2).any(|w| w[0] == w[1]) {
            return Err(Incompatible::DuplicateEntry);
        }
        let stage = topo.stage_range(rank.pp);
        self.entries.iter().try_for_each(|e| self.validate_entry(e, topo, rank, stage))
    }

    fn validate_entry(
        &self,
        e: &Entry,
        topo: &Topology,
        rank: Rank,
        stage: (u32, u32),
    ) -> Result<(), Incompatible> {
        let inside = match e.id.group {
            Group::Target => (stage.0..stage.1).contains(&e.id.layer),
            Group::Draft => rank.pp + 1 == topo.pp() && e.id.layer < LAYERS_MAX,
        };
        if !inside {
            return Err(Incompatible::LayerOutsideStage);
        }
        if e.unit_bytes == 0 || e.unit_bytes > UNIT_BYTES_MAX {
            return Err(Incompatible::Limit);
        }
        if (e.component == Component::Ring) != (e.ring_slots > 0) {
            return Err(Incompatible::Ring);
        }
        let region = self.regions.get(e.region as usize).ok_or(Incompatible::RegionBounds)?;
        let end = e.bytes().and_then(|b| b.checked_add(e.base)).ok_or(Incompatible::RegionBounds)?;
        if end > *region {
            return Err(Incompatible::RegionBounds);
        }
        let implied = match e.shape {
            Shape::Replicated => return Ok(()),
            Shape::Heads { total, head_bytes, .. } => {
                let (_, heads) = heads_of(total, topo.tp, rank.tp).ok_or(Incompatible::HeadSplit)?;
                let tokens = if e.component == Component::State { 1 } else { self.page_tokens };
                u64::from(tokens) * u64::from(heads) * u64::from(head_bytes)
            }
            Shape::Axis { groups, outer, elem_bytes } => {
                if groups.iter().any(|g| g % topo.tp != 0) {
                    return Err(Incompatible::HeadSplit);
                }
                let dim: u64 = groups.iter().map(|&g| u64::from(g / topo.tp)).sum();
                dim.checked_mul(u64::from(outer))
                    .and_then(|n| n.checked_mul(u64::from(elem_bytes)))
                    .ok_or(Incompatible::Limit)?
            }
        };
        if e.component == Component::Ring || implied != e.unit_bytes {
            return Err(Incompatible::EntryBytes);
        }
        Ok(())
    }

    /// Most pages, slots or rows that every entry of a component has; 0 when it has no entry.
    #[must_use]
    pub fn units(&self, c: Component) -> u32 {
        self.entries.iter().filter(|e| e.component == c).map(|e| e.units).min().unwrap_or(0)
    }

    /// Whether any entry belongs to the component.
    #[must_use]
    pub fn has(&self, c: Component) -> bool {
        self.entries.iter().any(|e| e.component == c)
    }
}

/// First page of the trailing window when `prefix_pages` are already there and the prompt has `tokens`. Both
/// sides compute it, from the same numbers.
#[must_use]
pub fn window_first_page(prefix_pages: u32, tokens: u32, window_tokens: u32, page_tokens: u32) -> u32 {
    (tokens.saturating_sub(window_tokens) / page_tokens.max(1)).max(prefix_pages)
}

/// Pages of a prompt.
#[must_use]
pub fn pages_of(tokens: u32, page_tokens: u32) -> u32 {
    tokens.div_ceil(page_tokens.max(1))
}
