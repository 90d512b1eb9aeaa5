//! Gets: pages by themselves and pages out of groups, in one call to the inner store.

use std::sync::Arc;

use super::link::{self, Group};
use super::{Found, Grouped, LOOKS_MAX};
use crate::backend::identity::StoreKey;
use crate::backend::store::Store;
use crate::backend::store::batch::{Call, Item, Outcome};
use crate::backend::store::envelope::payload_crc;
use crate::backend::store::gate::locked;
use crate::backend::store::regions::HeldSpans;
use crate::backend::store::stage::Stage;
use crate::base::containers::Map;

/// A group to read and, by position in it, the items that its pages go to.
struct Wanted {
    group: Arc<Group>,
    items: Vec<Option<usize>>,
    /// Nobody has looked under the names of the pages; they may lie elsewhere by now.
    remembered: bool,
}

/// What is read for the callers.
#[derive(Default)]
struct Plan {
    plain: Vec<usize>,
    groups: Vec<Wanted>,
    by_name: Map<StoreKey, usize>,
    /// A page that was asked for twice: once more, by itself.
    again: Vec<usize>,
}

impl Plan {
    fn add(&mut self, i: usize, group: Arc<Group>, position: usize, remembered: bool) {
        let at = *self.by_name.entry(group.key).or_insert_with(|| {
            let items = vec![None; group.members.len()];
            self.groups.push(Wanted { group, items, remembered });
            self.groups.len() - 1
        });
        match &mut self.groups[at].items[position] {
            Some(_) => self.again.push(i),
            free => *free = Some(i),
        }
    }

    /// Bytes of pages that nobody asked for.
    fn unwanted_bytes(&self) -> usize {
        let of = |w: &Wanted| -> usize {
            let pages = w.group.members.iter().zip(&w.items).filter(|(_, i)| i.is_none());
            pages.map(|(m, _)| m.payload_bytes as usize).sum()
        };
        self.groups.iter().map(of).sum()
    }
}

impl<S: Store> Grouped<S> {
    pub(super) fn get_all(&self, items: &[Item], call: &Call) -> Vec<Outcome> {
        let mut out: Vec<Outcome> = vec![Outcome::AddressLost; items.len()];
        let memory: Vec<Option<HeldSpans>> =
            items.iter().map(|i| self.regions.resolve(&i.spans).ok()).collect();
        let mut todo: Vec<usize> = (0..items.len()).filter(|&i| memory[i].is_some()).collect();
        let mut looks = 0;
        while !todo.is_empty() {
            looks += 1;
            let mut plan = self.plan(items, &todo, looks == 1, call, &mut out);
            todo = std::mem::take(&mut plan.again);
            let moved = self.read(items, &memory, &plan, call, &mut out);
            match looks < LOOKS_MAX {
                true => todo.extend(moved),
                false => moved.into_iter().for_each(|i| out[i] = Outcome::Missing),
            }
        }
        out
    }

    /// Finds out where the pages are: from memory if `trusting`, else under their names. Large ones that are not
    /// remembered lie by themselves, if anywhere.
    fn plan(&self, items: &[Item], todo: &[usize], trusting: bool, call: &Call, out: &mut [Outcome]) -> Plan {
        let mut plan = Plan::default();
        let mut unknown = Vec::new();
        {
            let mut index = locked(&self.index);
            for &i in todo {
                let item = &items[i];
                let remembered =
                    index.get(&item.key, self.trust()).and_then(|g| Some((g.position(&item.key)?, g)));
                match remembered {
                    Some((at, group)) if trusting && group.is(at, item) => plan.add(i, group, at, true),
                    None if !self.may_be_linked(item.len()) => plan.plain.push(i),
                    _ => unknown.push(i),
                }
            }
        }
        if unknown.is_empty() {
            return plan;
        }
        let keys: Vec<StoreKey> = unknown.iter().map(|&i| items[i].key).collect();
        for (i, found) in unknown.into_iter().zip(self.locate(&keys, call)) {
            match found {
                // The inner store says what is wrong with a page of another length or identity.
                Found::Plain(_) => plan.plain.push(i),
                Found::Not(outcome) => out[i] = outcome,
                Found::Moved(_) => out[i] = Outcome::Missing,
                Found::Linked(group, at) if group.is(at, &items[i]) => plan.add(i, group, at, false),
                Found::Linked(group, _) if group.page_space != items[i].space => out[i] = Outcome::Missing,
                Found::Linked(group, at) => {
                    out[i] = Outcome::SizeMismatch { stored: group.members[at].payload_bytes as usize };
                }
            }
        }
        plan
    }

    /// Reads what was planned. Which items have to be looked for again, because they are not where they were.
    fn read(
        &self,
        items: &[Item],
        memory: &[Option<HeldSpans>],
        plan: &Plan,
        call: &Call,
        out: &mut [Outcome],
    ) -> Vec<usize> {
        let unwanted = plan.unwanted_bytes();
        let stage = match unwanted {
            0 => None,
            bytes => match self.stages.take(bytes) {
                Ok(stage) => Some(stage),
                Err(why) => {
                    plan.plain.iter().for_each(|&i| out[i] = why);
                    plan.groups.iter().flat_map(|w| w.items.iter().flatten()).for_each(|&i| out[i] = why);
                    return vec![];
                }
            },
        };
        let mut batch: Vec<Item> = plan.plain.iter().map(|&i| items[i].clone()).collect();
        let mut unwanted_at = 0;
        batch.extend(plan.groups.iter().map(|w| whole(w, items, stage.as_ref(), &mut unwanted_at)));
        let mut outcomes = self.inner.get(&batch, call).into_iter();
        let mut next = || outcomes.next().unwrap_or(Outcome::Missing);
        let mut again = Vec::new();
        for &i in &plan.plain {
            out[i] = next();
            // A link has taken the place of the page.
            if matches!(out[i], Outcome::SizeMismatch { stored } if link::is_length(stored)) {
                again.push(i);
            }
        }
        for wanted in &plan.groups {
            let outcome = next();
            if outcome.is_miss() {
                locked(&self.index).forget_group(&wanted.group);
            }
            match outcome == Outcome::Missing && wanted.remembered {
                true => again.extend(wanted.items.iter().flatten()),
                false => self.settle(wanted, outcome, memory, call, out),
            }
        }
        if let Some(stage) = stage {
            self.stages.give_back(stage);
        }
        again
    }

    /// What a group's outcome means for its pages.
    fn settle(
        &self,
        wanted: &Wanted,
        outcome: Outcome,
        memory: &[Option<HeldSpans>],
        call: &Call,
        out: &mut [Outcome],
    ) {
        for (member, i) in wanted.group.members.iter().zip(&wanted.items) {
            let Some(i) = *i else { continue };
            out[i] = match outcome {
                Outcome::Ok(_) => {
                    let crc = memory[i].as_ref().map_or(0, |m| payload_crc(m.runs()));
                    if crc == member.payload_crc {
                        Outcome::Ok(member.payload_bytes as usize)
                    } else {
                        // The group holds and the page does not: the link is about other bytes. Out with it.
                        locked(&self.index).forget(&member.key);
                        let _ = self.inner.remove(&[member.key], call);
                        Outcome::Corrupt
                    }
                }
                Outcome::SizeMismatch { .. } | Outcome::VersionMismatch { .. } => Outcome::Corrupt,
                other => other,
            };
        }
    }
}

/// The object of a group: asked-for pages go where they are wanted, the others out of the way.
fn whole<S: Store>(wanted: &Wanted, items: &[Item], stage: Option<&Stage<S>>, at: &mut usize) -> Item {
    let mut item = Item { key: wanted.group.key, space: wanted.group.space, spans: Default::default() };
    for (member, i) in wanted.group.members.iter().zip(&wanted.items) {
        match (i, stage) {
            (Some(i), _) => item.spans.extend_from_slice(&items[*i].spans),
            (None, Some(stage)) => {
                item.spans.push(stage.span(*at, member.payload_bytes as usize));
                *at += member.payload_bytes as usize;
            }
            // Without a stage every page was asked for.
            (None, None) => {}
        }
    }
    item
}
