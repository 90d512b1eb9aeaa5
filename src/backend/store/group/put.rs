//! Puts: first groups and pages by themselves, then the links of the groups that are in.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::link::{self, Group, Member};
use super::{Found, Grouped, Names};
use crate::backend::identity::{Space, StoreKey};
use crate::backend::store::Store;
use crate::backend::store::batch::{Call, Item, Outcome};
use crate::backend::store::envelope::payload_crc;
use crate::backend::store::gate::locked;
use crate::backend::store::regions::HeldSpans;
use crate::base::containers::Map;

/// A group in the making.
#[derive(Default)]
struct Open {
    items: Vec<usize>,
    bytes: usize,
}

impl<S: Store> Grouped<S> {
    pub(super) fn put_all(&self, items: &[Item], call: &Call) -> Vec<Outcome> {
        let mut out: Vec<Outcome> = vec![Outcome::AddressLost; items.len()];
        let memory: Vec<Option<HeldSpans>> =
            items.iter().map(|i| self.regions.resolve(&i.spans).ok()).collect();
        // Of two puts of one key the second shares the fate of the first.
        let mut first: Map<StoreKey, usize> = Map::default();
        let lead: Vec<usize> = (0..items.len()).map(|i| *first.entry(items[i].key).or_insert(i)).collect();
        let todo = (0..items.len()).filter(|&i| lead[i] == i && memory[i].is_some());
        let (small, mut plain): (Vec<usize>, Vec<usize>) = todo.partition(|&i| self.is_small(items[i].len()));
        {
            // What is large lies by itself from now on.
            let mut index = locked(&self.index);
            plain.iter().for_each(|&i| index.forget(&items[i].key));
        }
        let missing = self.missing(items, &small, call, &mut plain, &mut out);
        let groups = self.form(items, &memory, &missing, &mut plain);
        self.write(items, &plain, &groups, call, &mut out);
        for i in 0..items.len() {
            if memory[i].is_some() {
                out[i] = out[lead[i]];
            }
        }
        out
    }

    /// The small pages that are to be written. What is in the way of their links is removed.
    fn missing(
        &self,
        items: &[Item],
        small: &[usize],
        call: &Call,
        plain: &mut Vec<usize>,
        out: &mut [Outcome],
    ) -> Vec<usize> {
        if small.is_empty() {
            return vec![];
        }
        let keys: Vec<StoreKey> = small.iter().map(|&i| items[i].key).collect();
        let found = self.locate(&keys, call);
        let there = self.groups_there(&found, call);
        let (mut missing, mut stale, mut left) = (Vec::new(), Vec::new(), Vec::new());
        for (&i, found) in small.iter().zip(found) {
            let (item, len) = (&items[i], items[i].len());
            match found {
                Found::Not(Outcome::Missing) | Found::Moved(_) => missing.push(i),
                // Whether it is the same page, the inner store finds out.
                Found::Plain(n) if n == len => plain.push(i),
                Found::Linked(group, at) if group.is(at, item) => {
                    match there.get(&group.key).copied().unwrap_or(Outcome::Missing) {
                        Outcome::Ok(_) => {
                            self.counters.put_present.fetch_add(1, Relaxed);
                            out[i] = Outcome::Ok(len);
                        }
                        o if o.is_miss() => {
                            stale.push(item.key);
                            missing.push(i);
                        }
                        other => out[i] = other,
                    }
                }
                Found::Linked(group, _) => {
                    left.push(group);
                    stale.push(item.key);
                    missing.push(i);
                }
                Found::Plain(_) => {
                    stale.push(item.key);
                    missing.push(i);
                }
                Found::Not(o) if o.is_miss() => {
                    stale.push(item.key);
                    missing.push(i);
                }
                Found::Not(other) => out[i] = other,
            }
        }
        if !stale.is_empty() {
            // A store that keeps what is there would keep a link to nowhere, and say that all is well.
            let _ = self.inner.remove(&stale, call);
            let mut index = locked(&self.index);
            stale.iter().for_each(|key| index.forget(key));
        }
        self.release(left, call);
        missing
    }

    /// Consecutive pages of one space become groups; a page that is left over lies by itself.
    fn form(
        &self,
        items: &[Item],
        memory: &[Option<HeldSpans>],
        missing: &[usize],
        plain: &mut Vec<usize>,
    ) -> Vec<(Arc<Group>, Vec<usize>)> {
        let mut groups = Vec::new();
        let mut open: Map<Space, Open> = Map::default();
        let mut order: Vec<Space> = Vec::new();
        let close = |space: Space, open: Open, groups: &mut Vec<_>, plain: &mut Vec<usize>| match open.items[..]
        {
            [] => {}
            [one] => plain.push(one),
            _ => {
                let member = |&i: &usize| Member {
                    key: items[i].key,
                    // Small enough, or it would not be here.
                    payload_bytes: items[i].len() as u32,
                    payload_crc: memory[i].as_ref().map_or(0, |m| payload_crc(m.runs())),
                };
                let members = open.items.iter().map(member).collect();
                groups.push((Arc::new(Group::of(space, members)), open.items));
            }
        };
        for &i in missing {
            let (space, len) = (items[i].space, items[i].len());
            let group = open.entry(space).or_insert_with(|| {
                order.push(space);
                Open::default()
            });
            if group.items.len() >= link::members_max(len) {
                close(space, std::mem::take(group), &mut groups, plain);
            }
            group.items.push(i);
            group.bytes += len;
            if group.bytes >= self.object_bytes {
                close(space, std::mem::take(group), &mut groups, plain);
            }
        }
        for space in order {
            if let Some(rest) = open.remove(&space) {
                close(space, rest, &mut groups, plain);
            }
        }
        groups
    }

    fn write(
        &self,
        items: &[Item],
        plain: &[usize],
        groups: &[(Arc<Group>, Vec<usize>)],
        call: &Call,
        out: &mut [Outcome],
    ) {
        let mut batch: Vec<Item> = plain.iter().map(|&i| items[i].clone()).collect();
        batch.extend(groups.iter().map(|(group, pages)| Item {
            key: group.key,
            space: group.space,
            spans: pages.iter().flat_map(|&i| items[i].spans.iter().copied()).collect(),
        }));
        let mut outcomes = self.inner.put(&batch, call).into_iter();
        let mut next = || outcomes.next().unwrap_or(Outcome::Missing);
        plain.iter().for_each(|&i| out[i] = next());
        let mut written = Vec::new();
        for (group, pages) in groups {
            let outcome = next();
            pages.iter().for_each(|&i| out[i] = outcome);
            if outcome.is_ok() {
                written.push((group, pages));
            }
        }
        self.write_links(items, &written, call, out);
    }

    /// Only with its link a page is found, so only then it is in.
    fn write_links(
        &self,
        items: &[Item],
        groups: &[(&Arc<Group>, &Vec<usize>)],
        call: &Call,
        out: &mut [Outcome],
    ) {
        if groups.is_empty() {
            return;
        }
        let pages = || groups.iter().flat_map(|(group, pages)| pages.iter().map(move |&i| (*group, i)));
        let named = match self.names {
            Names::EveryPage => usize::MAX,
            Names::FirstPage => 1,
        };
        let total = groups.iter().map(|(g, _)| g.link_bytes()).sum();
        let stage = match self.stages.take(total) {
            Ok(stage) => stage,
            Err(why) => return pages().for_each(|(_, i)| out[i] = why),
        };
        let (mut at, mut batch) = (0, Vec::new());
        for (group, pages) in groups {
            let span = stage.span(at, group.link_bytes());
            if let Ok(held) = stage.held(at, group.link_bytes()) {
                held.fill(0, &group.link());
            }
            batch.extend(pages.iter().take(named).map(|&i| Item {
                key: items[i].key,
                space: link::space(),
                spans: [span].into_iter().collect(),
            }));
            at += group.link_bytes();
        }
        let mut outcomes = self.inner.put(&batch, call).into_iter();
        let mut index = locked(&self.index);
        for (group, pages) in groups {
            let mut outcome = Outcome::Missing;
            for (n, &i) in pages.iter().enumerate() {
                // A page without a link of its own shares the fate of the first.
                if n < named {
                    outcome = outcomes.next().unwrap_or(Outcome::Missing);
                }
                out[i] = match outcome {
                    Outcome::Ok(_) => {
                        index.set(items[i].key, group);
                        Outcome::Ok(items[i].len())
                    }
                    other => other,
                };
            }
        }
        drop(index);
        self.stages.give_back(stage);
    }
}
