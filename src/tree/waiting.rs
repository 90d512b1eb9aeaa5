//! Waiting requests: a scheduler's queue, as far as it was told.
//!
//! What a waiting request will use is kept (see `kept`) from the root to the deepest page of its prompt that the tree knows.
//! That end goes down when the prompt's next pages come, from whomever, and recedes when its node is deleted. The order
//! that learns lets what is used last go first: with 512 requests in the queue and room for the prefixes of 80, the other
//! way round hits 27 % of the tokens of a public trace, and this way 38.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::NamespaceId;
use crate::base::plant::{Plant, is_planted};
use crate::key::Key;

use super::node::{NIL, ROOT};
use super::sanity::Report;
use super::walk::page_name;
use super::{Tree, TreeError};

/// A request that waits. Ids are never used again, so a late call for one that has gone is refused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct WaiterId(u64);

/// Place in the queue; grows with every arrival.
pub(super) type Turn = u64;

#[derive(Clone, Debug)]
struct Waiter {
    /// Of all whole pages of its prompt: 8 bytes a page.
    names: Box<[u64]>,
    /// Slot of the node that its known prefix ends with; the root if nothing is known.
    end: u32,
    /// Pages of that prefix.
    pages: u32,
}

impl Waiter {
    /// The page that would carry it on: depth and name.
    fn wants(&self) -> Option<(u32, u64)> {
        self.names.get(self.pages as usize).map(|&name| (self.pages, name))
    }
}

/// The queue.
#[derive(Clone, Debug, Default)]
pub(super) struct Waiting {
    queue: BTreeMap<Turn, Waiter>,
    /// Who waits for which page: depth, name, turn.
    wants: BTreeSet<(u32, u64, Turn)>,
    next: Turn,
}

impl Waiting {
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// A request comes, of which nothing is known so far.
    fn push(&mut self, names: Box<[u64]>) -> Turn {
        let turn = self.next;
        self.next += 1;
        self.queue.insert(turn, Waiter { names, end: ROOT, pages: 0 });
        self.set_end(turn, ROOT, 0);
        turn
    }

    /// The only writer of ends.
    fn set_end(&mut self, turn: Turn, end: u32, pages: u32) {
        let Some(waiter) = self.queue.get_mut(&turn) else { return };
        if let Some((depth, name)) = waiter.wants() {
            self.wants.remove(&(depth, name, turn));
        }
        (waiter.end, waiter.pages) = (end, pages);
        if let Some((depth, name)) = waiter.wants() {
            self.wants.insert((depth, name, turn));
        }
    }

    fn remove(&mut self, turn: Turn) -> Option<Waiter> {
        let waiter = self.queue.remove(&turn)?;
        if let Some((depth, name)) = waiter.wants() {
            self.wants.remove(&(depth, name, turn));
        }
        Some(waiter)
    }

    /// Turns of those that end at `end` and go on with this page.
    fn who_wants(&self, end: u32, depth: u32, name: u64) -> Vec<Turn> {
        let wanted = self.wants.range((depth, name, 0)..=(depth, name, Turn::MAX));
        let is_here = |turn: &Turn| self.queue.get(turn).is_some_and(|waiter| waiter.end == end);
        wanted.map(|&(_, _, turn)| turn).filter(is_here).collect()
    }

    /// The tree is empty; requests wait on.
    pub(super) fn forget_ends(&mut self) {
        let turns: Vec<Turn> = self.queue.keys().copied().collect();
        turns.into_iter().for_each(|turn| self.set_end(turn, ROOT, 0));
    }

    pub(super) fn ends_at(&self, at: u32) -> u32 {
        self.queue.values().filter(|waiter| waiter.end == at).count() as u32
    }
}

/// Who waits for which node, ends and what lies above them: slot and turn.
#[derive(Clone, Debug, Default)]
pub(super) struct Turns(BTreeSet<(u32, Turn)>);

impl Turns {
    /// The turn of the first request that will use a node. O(log waiting).
    pub(super) fn first(&self, at: u32) -> Option<Turn> {
        self.of(at).next()
    }

    fn of(&self, at: u32) -> impl Iterator<Item = Turn> + '_ {
        self.0.range((at, 0)..=(at, Turn::MAX)).map(|&(_, turn)| turn)
    }

    /// `prefix` was split off `suffix`. O(waiting for it).
    pub(super) fn split(&mut self, prefix: u32, suffix: u32) {
        let both: Vec<Turn> = self.of(suffix).collect();
        self.0.extend(both.into_iter().map(|turn| (prefix, turn)));
    }

    /// The node is merged into its only child, for which the same requests wait. O(waiting for it).
    pub(super) fn merged(&mut self, at: u32) {
        let gone: Vec<Turn> = self.of(at).collect();
        gone.into_iter().for_each(|turn| _ = self.0.remove(&(at, turn)));
    }
}

impl Tree {
    /// A request waits that will use the prefix of `key`, after all that were told before it: what is known of it, now or later,
    /// is evicted after all that nobody keeps, until [`stop_waiting`](Tree::stop_waiting). Nothing counts as used. Costs 8 bytes a page.
    /// O(tokens + nodes x log waiting).
    ///
    /// # Errors
    /// A key this tree cannot hold.
    pub fn wait_for(&mut self, key: Key<'_>) -> Result<WaiterId, TreeError> {
        self.check_key(key)?;
        let names = page_names(key.ns, key.tokens, self.page_size, self.view.overlap()).collect();
        self.path = self.walk_and_split(ROOT, key);
        let end = self.path.last().copied().unwrap_or(ROOT);
        let turn = self.waiting.push(names);
        self.move_waiter(turn, ROOT, end);
        Ok(WaiterId(turn))
    }

    /// The request has been let in, or has gone. What only it kept goes by its last use from here on. O(nodes x log waiting).
    ///
    /// # Errors
    /// Unknown, or it has stopped before.
    pub fn stop_waiting(&mut self, waiter: WaiterId) -> Result<(), TreeError> {
        let WaiterId(turn) = waiter;
        let Waiter { end, .. } = self.waiting.remove(turn).ok_or(TreeError::UnknownWaiter(waiter))?;
        let path = self.path_between(ROOT, end);
        path.iter().for_each(|&at| _ = self.orders.turns.0.remove(&(at, turn)));
        self.unref_path(end);
        path.iter().for_each(|&at| self.orders.rekey(&mut self.arena, at));
        self.try_merge(end);
        Ok(())
    }

    /// Requests that wait.
    #[must_use]
    pub fn waiting_requests(&self) -> usize {
        self.waiting.queue.len()
    }

    /// Nodes below `upper` on the way to `lower`, deepest first.
    fn path_between(&self, upper: u32, lower: u32) -> Vec<u32> {
        let mut path = Vec::new();
        let mut at = lower;
        while at != upper && at != ROOT {
            path.push(at);
            at = self.arena.nodes[at as usize].parent;
        }
        path
    }

    /// Moves an end down from `from` to `to`.
    fn move_waiter(&mut self, turn: Turn, from: u32, to: u32) {
        if from == to {
            return;
        }
        let pages = self.arena.nodes[to as usize].end();
        self.waiting.set_end(turn, to, pages);
        let path = self.path_between(from, to);
        path.iter().for_each(|&at| _ = self.orders.turns.0.insert((at, turn)));
        // What lies above both stays kept throughout.
        self.ref_path(to);
        self.unref_path(from);
        path.iter().for_each(|&at| self.orders.rekey(&mut self.arena, at));
    }

    /// A leaf is new: those who wait for its pages end there now, or where it goes on otherwise than their prompts, which splits
    /// it. O(log waiting) if nobody wants its first page, else O(pages x those who do).
    pub(super) fn meet_waiting(&mut self, leaf: u32) {
        if self.waiting.is_empty() || is_planted(Plant::WaiterStandsStill) {
            return;
        }
        let (parent, depth) = (self.arena.nodes[leaf as usize].parent, self.arena.nodes[leaf as usize].depth);
        let Some(name) = self.names_of(leaf).next() else { return };
        let turns = self.waiting.who_wants(parent, depth, name);
        // Common pages of the leaf and each prompt, fewest first, so that what is left of the leaf is what others share.
        let mut shared: Vec<(u32, Turn)> =
            turns.into_iter().map(|turn| (self.common_pages(turn, leaf), turn)).collect();
        shared.sort_unstable();
        let (mut end, mut done) = (parent, 0);
        for (pages, turn) in shared {
            if pages > done {
                let rest = pages - done;
                end =
                    if rest < self.arena.nodes[leaf as usize].pages { self.split(leaf, rest) } else { leaf };
                done = pages;
            }
            self.move_waiter(turn, parent, end);
        }
    }

    /// Pages at the start of a node that are the next ones of a waiting prompt.
    fn common_pages(&self, turn: Turn, at: u32) -> u32 {
        let Some(waiter) = self.waiting.queue.get(&turn) else { return 0 };
        let next = waiter.names.iter().skip(waiter.pages as usize);
        self.names_of(at).zip(next).take_while(|(mine, wanted)| mine == *wanted).count() as u32
    }

    /// The names of a node's pages.
    fn names_of(&self, at: u32) -> impl Iterator<Item = u64> + '_ {
        let node = &self.arena.nodes[at as usize];
        page_names(node.ns, self.tokens_of(at), self.page_size, self.view.overlap())
    }

    /// Requests that wait for what ends at a leaf which is about to be deleted wait for its parent from now on.
    pub(super) fn recede_waiting(&mut self, leaf: u32) {
        let parent = self.arena.nodes[leaf as usize].parent;
        let pages = self.arena.nodes[leaf as usize].depth;
        let turns: Vec<Turn> = self.orders.turns.of(leaf).collect();
        for turn in turns {
            self.keep_spans(leaf, false);
            self.orders.turns.0.remove(&(leaf, turn));
            self.waiting.set_end(turn, parent, pages);
            if parent != ROOT {
                self.arena.nodes[parent as usize].refs += 1;
                self.keep_spans(parent, true);
            }
        }
    }

    /// Every end is alive and the deepest known page of its prompt, and everything on the way to it knows who waits.
    pub(super) fn check_waiting(&self, report: &mut Report) {
        let mut turns = BTreeSet::new();
        for (&turn, waiter) in &self.waiting.queue {
            let Waiter { end, pages, .. } = *waiter;
            let live = end == ROOT || self.arena.is_live(end);
            report.must(live, "waiting-ends", format_args!("turn {turn} ends at the dead node {end}"));
            if !live {
                continue;
            }
            turns.extend(self.path_between(ROOT, end).into_iter().map(|at| (at, turn)));
            let depth = self.arena.nodes[end as usize].end();
            report.must(
                pages == depth,
                "waiting-ends",
                format_args!("turn {turn}: {pages} pages, {depth} at {end}"),
            );
            let mut child = self.arena.nodes[end as usize].first_child;
            while child != NIL {
                let goes_on = self.common_pages(turn, child) > 0;
                report.must(
                    !goes_on,
                    "waiting-ends",
                    format_args!("turn {turn} goes on from {end} to {child}"),
                );
                child = self.arena.nodes[child as usize].sibling.newer;
            }
            let wanted =
                waiter.wants().is_none_or(|(depth, name)| self.waiting.wants.contains(&(depth, name, turn)));
            report.must(wanted, "waiting-wants", format_args!("turn {turn} wants nothing"));
        }
        let wants = self.waiting.queue.values().filter(|waiter| waiter.wants().is_some()).count();
        report.must(wants == self.waiting.wants.len(), "waiting-wants", format_args!("{wants} want a page"));
        report.must(turns == self.orders.turns.0, "waiting-turns", format_args!("{} pairs", turns.len()));
    }
}

/// Names of the whole pages of a row of tokens.
fn page_names(
    ns: NamespaceId,
    tokens: &[u32],
    page_size: u32,
    overlap: usize,
) -> impl Iterator<Item = u64> + '_ {
    let p = page_size as usize;
    let pages = tokens.len().saturating_sub(overlap) / p;
    (0..pages).map(move |page| page_name(ns, &tokens[page * p..(page + 1) * p + overlap]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::adaptive::AdaptiveConfig;
    use crate::tree::tests::{evict, put};
    use crate::tree::{Policy, TreeConfig};

    fn key(tokens: &[u32]) -> Key<'_> {
        Key::new(NamespaceId::DEFAULT, tokens)
    }

    fn tree(policy: Policy) -> Tree {
        Tree::new(TreeConfig { page_size: 1, policy, ..TreeConfig::default() }).expect("sound")
    }

    /// The end moves down with what comes, also where what comes goes on otherwise than two prompts, and up with what goes.
    #[test]
    fn an_end_goes_down_with_what_comes_and_up_with_what_goes() {
        let mut tree = tree(Policy::Lru);
        let one = tree.wait_for(key(&[1, 2, 3, 9])).expect("sound");
        let other = tree.wait_for(key(&[1, 2, 8])).expect("sound");
        put(&mut tree, &[1, 2, 3, 4, 5], 10);
        put(&mut tree, &[7], 20);
        assert_eq!(evict(&mut tree, 3), [13, 14, 20], "4 and 5 are nobody's, 3 is the first one's");
        assert_eq!(evict(&mut tree, 1), [12]);
        put(&mut tree, &[1, 2, 3, 9], 30);
        put(&mut tree, &[7], 20);
        assert_eq!(evict(&mut tree, 1), [20], "page 3 is back and waited for, page 9 too");
        tree.stop_waiting(one).expect("it waits");
        assert_eq!(evict(&mut tree, 2), [32, 33]);
        assert_eq!(tree.stop_waiting(one), Err(TreeError::UnknownWaiter(one)));
        assert_eq!(tree.waiting_requests(), 1);
        tree.stop_waiting(other).expect("it waits");
    }

    /// The end of the queue goes first under the order that learns, whatever is older.
    #[test]
    fn what_is_used_last_goes_first() {
        let mut tree = tree(Policy::Adaptive(AdaptiveConfig::new(8, 1)));
        for (token, page) in [(1, 10), (2, 20), (3, 30), (4, 40)] {
            put(&mut tree, &[token], page);
        }
        let queue = [3, 1, 2].map(|token| tree.wait_for(key(&[token])).expect("sound"));
        assert_eq!(evict(&mut tree, 1), [40]);
        assert_eq!(evict(&mut tree, 1), [20]);
        let again = tree.wait_for(key(&[3])).expect("sound");
        tree.stop_waiting(queue[0]).expect("it waits");
        assert_eq!(evict(&mut tree, 1), [30], "it waits at the end now");
        tree.stop_waiting(again).expect("it waits");
        assert_eq!(evict(&mut tree, 1), [10]);
    }
}
