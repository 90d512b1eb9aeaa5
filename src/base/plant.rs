//! Faults that can be planted on purpose. A simulation that does not find them proves nothing. Only the `sim` feature
//! can plant one; without it the question compiles to `false`.

/// One fault.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Plant {
    /// A refill is put below its anchor whatever the anchor holds.
    NoAnchorCheck,
    /// Pages of a store read go back to the pool when it is given up, though it may still write them.
    FreeOnSubmit,
    /// A write that the store refused counts as stored.
    AckFailedPut,
    /// A dropped refill forgets the pages of its components.
    SkipComponentOnDrop,
    /// The end of a backup reaches the node it was started for, and not what a split made of it.
    ForgetSplit,
}

impl Plant {
    /// All of them.
    pub const ALL: [Plant; 5] = [
        Plant::NoAnchorCheck,
        Plant::FreeOnSubmit,
        Plant::AckFailedPut,
        Plant::SkipComponentOnDrop,
        Plant::ForgetSplit,
    ];
}

#[cfg(feature = "sim")]
thread_local! {
    static PLANTED: std::cell::Cell<Option<Plant>> = const { std::cell::Cell::new(None) };
}

/// Plants a fault in everything that this thread runs from now on, or takes it out.
#[cfg(feature = "sim")]
pub fn plant(fault: Option<Plant>) {
    PLANTED.set(fault);
}

/// Whether the fault is planted.
#[cfg(feature = "sim")]
#[must_use]
pub fn is_planted(fault: Plant) -> bool {
    PLANTED.get() == Some(fault)
}

/// Whether the fault is planted: never.
#[cfg(not(feature = "sim"))]
#[must_use]
#[inline]
pub const fn is_planted(_: Plant) -> bool {
    false
}
