//! Operations in flight.
//!
//! An operation names what it owns by its deepest node and a range of depths. The deepest node is locked or pinned, keeps
//! its id when it is split, and never dies under the operation; so splits need no hand-over: the fragments are found by
//! walking up from it.

use crate::base::containers::Map;
use crate::base::{OpId, PageId, Tier};

use super::component::{COMPONENTS, Component, ComponentCopy, PerComponent};
use super::node::{Arena, NIL};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum OpKind {
    Backup,
    Load,
    Store,
}

#[derive(Clone, Debug)]
pub(super) struct Op {
    pub(super) id: OpId,
    pub(super) kind: OpKind,
    /// Slot of the deepest node.
    pub(super) node: u32,
    /// Pages from the root to the first page it owns.
    pub(super) first: u32,
    /// The copy is done, but a parent's is not: waits to be settled.
    pub(super) waiting: bool,
    /// Operations that wait for this one, in order of arrival.
    pub(super) waiters: Vec<u32>,
    /// Component pages to read, and the pages that take them.
    pub(super) copies: Vec<(ComponentCopy, PageId)>,
    /// Pages of a store write, counted from the root.
    pub(super) positions: Vec<u32>,
    /// A store write that took a lock beside its pin.
    pub(super) locked: bool,
    /// Component pages held by it besides `copies`.
    pub(super) held: PerComponent<u32>,
}

impl Op {
    /// The tier it copies to.
    pub(super) fn target(&self) -> Tier {
        match self.kind {
            OpKind::Backup => Tier::Host,
            OpKind::Load => Tier::Device,
            OpKind::Store => Tier::Store,
        }
    }
}

/// Place of a component page: component, run, page in the run. An operation that names one locks its node, so the node may be
/// split but not merged (nodes under a lock are merged only where there are no components), and a split leaves run and page as they are.
pub(super) type Place = (Component, u32, u32);

/// Slots of operations.
#[derive(Clone, Debug, Default)]
pub(super) struct Ops {
    slots: Vec<Option<Op>>,
    free: Vec<u32>,
    by_id: Map<OpId, u32>,
    /// Store writes by node slot, every fragment of a split node under its own. Such nodes are pinned.
    storing: Map<u32, u32>,
    /// Component pages that loads in flight bring: the load's slot and the device page. No place has two, and none has
    /// a device page already.
    coming: Map<Place, (u32, PageId)>,
}

impl Ops {
    pub(super) fn find(&self, id: OpId, kind: OpKind) -> Option<u32> {
        let slot = *self.by_id.get(&id)?;
        self.slots[slot as usize].as_ref().is_some_and(|op| op.kind == kind).then_some(slot)
    }

    /// The store write in flight for a node.
    pub(super) fn storing(&self, node: u32) -> u32 {
        self.storing.get(&node).copied().unwrap_or(NIL)
    }

    /// Notes or forgets (`NIL`) it.
    pub(super) fn set_storing(&mut self, node: u32, slot: u32) {
        if slot == NIL {
            self.storing.remove(&node);
        } else {
            self.storing.insert(node, slot);
        }
    }

    /// What a load in flight brings to a place: the load's slot and the device page.
    pub(super) fn coming(&self, place: Place) -> Option<(u32, PageId)> {
        self.coming.get(&place).copied()
    }

    /// How many places loads in flight bring a component page to.
    pub(super) fn places_coming(&self) -> usize {
        self.coming.len()
    }

    /// Notes or forgets (`None`) what a load brings to a place.
    pub(super) fn set_coming(&mut self, place: Place, what: Option<(u32, PageId)>) {
        match what {
            Some(what) => _ = self.coming.insert(place, what),
            None => _ = self.coming.remove(&place),
        }
    }

    pub(super) fn contains(&self, id: OpId) -> bool {
        self.by_id.contains_key(&id)
    }

    pub(super) fn add(&mut self, id: OpId, kind: OpKind, node: u32, first: u32) -> u32 {
        let op = Op {
            id,
            kind,
            node,
            first,
            waiting: false,
            waiters: Vec::new(),
            copies: Vec::new(),
            positions: Vec::new(),
            locked: false,
            held: [0; COMPONENTS],
        };
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                self.slots.push(None);
                self.slots.len() as u32 - 1
            }
        };
        self.slots[slot as usize] = Some(op);
        self.by_id.insert(id, slot);
        slot
    }

    pub(super) fn get(&self, slot: u32) -> &Op {
        self.slots[slot as usize]
            .as_ref()
            .expect("a node's mark names a live operation: set and cleared with it")
    }

    pub(super) fn get_mut(&mut self, slot: u32) -> &mut Op {
        self.slots[slot as usize]
            .as_mut()
            .expect("a node's mark names a live operation: set and cleared with it")
    }

    pub(super) fn is_live(&self, slot: u32) -> bool {
        self.slots.get(slot as usize).is_some_and(Option::is_some)
    }

    pub(super) fn remove(&mut self, slot: u32) -> Op {
        let op =
            self.slots[slot as usize].take().expect("removed once, by the call that settles the operation");
        self.by_id.remove(&op.id);
        self.free.push(slot);
        op
    }

    /// In slot order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Op> + '_ {
        self.slots.iter().flatten()
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    /// The nodes of an operation, root first.
    pub(super) fn fragments(&self, arena: &Arena, slot: u32) -> Vec<u32> {
        let op = self.get(slot);
        let mut found = Vec::new();
        let mut at = op.node;
        loop {
            let node = &arena.nodes[at as usize];
            if node.pages == 0 || node.depth < op.first {
                break;
            }
            found.push(at);
            at = node.parent;
        }
        found.reverse();
        found
    }
}
