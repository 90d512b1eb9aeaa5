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
    /// A split gives the new upper part of a locked node no lock.
    SplitDropsLock,
    /// A split gives the new upper part of a pinned host copy no pin.
    SplitDropsPin,
    /// An insert keeps quiet about a page that the tree had already.
    KeepDuplicate,
    /// A look-up leaves the end of its path as old as it was.
    StaleTouch,
    /// A host copy is reclaimed though one below it needs it.
    ReclaimUnderChild,
    /// A match is content with one page less of a window than it needs.
    ShortWindow,
    /// A window is evicted alone, and the state at its end stays.
    WindowGoesAlone,
    /// What a session will come back for stops being kept when its last page is evicted.
    SessionDiesWithEnd,
    /// What a waiting request will use is not kept if it comes after the request.
    WaiterStandsStill,
    /// An insert counts no hit on pages that were there.
    ForgetHits,
    /// A load that rests on a failed one is published.
    LoadOnNothing,
    /// An insert fills a place that a load in flight brings a component page to.
    OvertakeLoad,
    /// A load brings component pages that another one in flight brings already.
    LoadTwice,
}

impl Plant {
    /// Those of the tree, which its comparison with the model has to find.
    pub const TREE: [Plant; 14] = [
        Plant::ForgetSplit,
        Plant::SplitDropsLock,
        Plant::SplitDropsPin,
        Plant::KeepDuplicate,
        Plant::StaleTouch,
        Plant::ReclaimUnderChild,
        Plant::ShortWindow,
        Plant::WindowGoesAlone,
        Plant::SessionDiesWithEnd,
        Plant::WaiterStandsStill,
        Plant::ForgetHits,
        Plant::LoadOnNothing,
        Plant::OvertakeLoad,
        Plant::LoadTwice,
    ];

    /// Those that a simulation of the tiers has to find.
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
