//! What is kept of a node, beside the tree's own: a cache line, of leaves and of the deepest node of a match only.

use super::ghosts::NO_SAMPLE;

/// No node.
pub(super) const NIL: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct Mark {
    /// Time of use that it is filed under.
    pub(super) tick: u64,
    /// Name of its first page at its depth, and of its last page (0: unknown).
    pub(super) start: u64,
    pub(super) end: u32,
    /// Name of the end that was cut off and evicted; 0: none.
    pub(super) tail: u64,
    /// Its use among the samples.
    pub(super) sample: u32,
    /// Mean volume between uses that ended here.
    pub(super) mean_gap: u32,
    /// Depth at which what its request brought starts: that of the first chunk, where it came in chunks.
    pub(super) base: u32,
    /// Pages that its request brought.
    pub(super) new_pages: u16,
    /// List that it is filed under: of its class and its cost.
    pub(super) list: u8,
    /// Of its latest use.
    pub(super) class: u8,
    /// Level of what computing it again costs.
    pub(super) level: u8,
    /// Requests that ended their match here, and the one that made it.
    pub(super) uses: u8,
    /// Requests before the last one in its conversation.
    pub(super) turn: u8,
    /// Bucket of what prompts of its kind share.
    pub(super) family: u8,
    /// Hint: length of the answer, in half octaves.
    pub(super) answer: u8,
    /// `class` is that of its latest use.
    pub(super) filed: bool,
    /// Its latest use is counted, and drawn as a sample or not.
    pub(super) counted: bool,
    /// Nobody has matched it: what goes on from it is the same request.
    pub(super) fresh: bool,
    /// A look-up ended here, and nothing was published from here since: another one is the same request, asking again.
    pub(super) looked_up: bool,
    /// Hint: the session is over.
    pub(super) finished: bool,
    /// It stands in an order.
    pub(super) standing: bool,
    /// It stands there as what the next tier holds too.
    pub(super) copied: bool,
    /// It was cut off what lies above it to be evicted.
    pub(super) cut: bool,
}

impl Default for Mark {
    fn default() -> Mark {
        Mark {
            tick: 0,
            start: 0,
            end: 0,
            tail: 0,
            sample: NO_SAMPLE,
            mean_gap: 0,
            base: 0,
            new_pages: 0,
            list: 0,
            class: 0,
            level: 0,
            uses: 0,
            turn: 0,
            family: 0,
            answer: 0,
            filed: false,
            counted: false,
            fresh: false,
            looked_up: false,
            finished: false,
            standing: false,
            copied: false,
            cut: false,
        }
    }
}

const _: () = assert!(size_of::<Mark>() == 64);
