//! Operations in flight, in the model.

use super::{At, Copy, Model, Slot};

#[derive(Clone, Debug)]
pub(super) struct Op {
    pub(super) load: bool,
    /// Root first; none if it only copies components.
    pages: Vec<At>,
    /// End of the path it holds.
    end: At,
    pub(super) copies: Vec<(Copy, u32)>,
    waiting: bool,
    waiters: Vec<u64>,
}

/// How an operation ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Settled {
    /// Which.
    pub op: u64,
    /// How.
    pub kind: SettledKind,
}

/// See [`Settled`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SettledKind {
    /// The copies count.
    Published,
    /// Nothing counts; pages given back.
    Failed(Vec<u32>),
}

impl Model {
    /// Pages to copy so that the page is backed up, root first; `node_pages` is what the caller takes as one piece when
    /// ancestors do not matter.
    #[must_use]
    pub fn plan_backup(&self, at: At, node_pages: u32) -> Vec<At> {
        let missing = |i: &At| self.pages[i].host == Slot::Empty;
        let limit = if self.backed_up_parent { usize::MAX } else { node_pages as usize };
        let mut plan: Vec<At> = self.up(at).into_iter().take_while(missing).take(limit).collect();
        plan.reverse();
        plan
    }

    /// Pages to copy so that the page is on the device, root first. Loads in flight are left out.
    #[must_use]
    pub fn plan_load(&self, at: At) -> Vec<At> {
        let above: Vec<At> = self.up(at).into_iter().take_while(|i| !self.pages[i].device.there()).collect();
        let top = above.iter().rev().skip_while(|i| self.pages[i].device != Slot::Empty);
        top.take_while(|i| self.pages[i].device == Slot::Empty).copied().collect()
    }

    /// Starts a backup (or a load) of `pages` into `into`; `end` is the page to be reached.
    pub fn begin(&mut self, op: u64, load: bool, end: At, pages: &[At], into: &[u32]) {
        for (&at, &page) in pages.iter().zip(into) {
            let flying = Slot::Flying { page, op };
            if load { self.page(at).device = flying } else { self.page(at).host = flying }
        }
        self.lock(end);
        if load {
            self.pins.push(end);
        }
        let record = Op { load, pages: pages.to_vec(), end, copies: vec![], waiting: false, waiters: vec![] };
        self.ops.insert(op, record);
    }

    /// Ends an operation; what is settled by that.
    pub fn end(&mut self, op: u64, ok: bool) -> Vec<Settled> {
        let mut settled = Vec::new();
        let mut queue = vec![(op, ok)];
        let mut next = 0;
        while let Some(&(op, ok)) = queue.get(next) {
            next += 1;
            let load = self.ops[&op].load;
            let side = |model: &Model, at: At| {
                if load { model.pages[&at].device } else { model.pages[&at].host }
            };
            let mine = self.ops[&op].pages.clone();
            let ruled = load || self.backed_up_parent;
            // A load of components alone rests on the page that it is for.
            let above = match mine.first() {
                Some(top) => side(self, self.pages[top].parent),
                None if load => side(self, self.ops[&op].end),
                None => Slot::There(0),
            };
            let publish = match above {
                _ if !ok => false,
                Slot::Flying { op: on, .. } if ruled => {
                    self.ops.get_mut(&op).expect("in flight").waiting = true;
                    self.ops.get_mut(&on).expect("in flight").waiters.push(op);
                    continue;
                }
                Slot::Empty if ruled => false,
                _ => true,
            };
            let done = self.ops.remove(&op).expect("in flight");
            let mut back = Vec::new();
            for &at in &mine {
                let page = side(self, at).page().expect("flying");
                let to = if publish { Slot::There(page) } else { Slot::Empty };
                if !publish {
                    back.push(page);
                }
                if load { self.page(at).device = to } else { self.page(at).host = to }
            }
            self.end_copies(load, &done.copies, publish);
            let end = done.end;
            if load {
                self.drop_pin(end);
            }
            self.drop_lock(end);
            let kind = if publish { SettledKind::Published } else { SettledKind::Failed(back) };
            settled.push(Settled { op, kind });
            queue.extend(done.waiters.iter().map(|&waiter| (waiter, true)));
        }
        settled
    }

    /// True if the operation has ended and waits for another.
    #[must_use]
    pub fn is_waiting(&self, op: u64) -> bool {
        self.ops.get(&op).is_some_and(|op| op.waiting)
    }

    /// Marks a page as stored or not.
    pub fn mark_stored(&mut self, at: At, stored: bool) {
        self.page(at).stored = stored;
    }
}
