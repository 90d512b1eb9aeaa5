//! Which page is in which group, as far as it is remembered. Forgetting costs a look at the page's link.

use std::sync::Arc;

use super::link::Group;
use crate::backend::identity::StoreKey;
use crate::base::containers::Map;

/// Entries of a generation. An entry takes about 100 bytes with its share of the group.
const ENTRIES_MAX: usize = 1 << 18;

/// Whose word is enough.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Trust {
    OwnLink,
    Neighbours,
}

#[derive(Clone, Debug)]
struct Entry {
    group: Arc<Group>,
    /// The link of this very page was seen; a page that is only named by its neighbour's may have been removed.
    seen: bool,
}

/// Two generations: what was not asked for since the young one began goes with the old one.
#[derive(Debug, Default)]
pub(super) struct Index {
    young: Map<StoreKey, Entry>,
    old: Map<StoreKey, Entry>,
}

impl Index {
    fn entry(&mut self, key: &StoreKey) -> Option<&Entry> {
        if let Some(entry) = self.old.remove(key) {
            self.insert(*key, entry);
        }
        self.young.get(key)
    }

    fn insert(&mut self, key: StoreKey, entry: Entry) {
        if self.young.len() >= ENTRIES_MAX {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(key, entry);
    }

    /// The group of a page: as its own link says, or also as that of a neighbour does.
    pub(super) fn get(&mut self, key: &StoreKey, trust: Trust) -> Option<Arc<Group>> {
        self.entry(key).filter(|e| e.seen || trust == Trust::Neighbours).map(|e| Arc::clone(&e.group))
    }

    /// The group of a page under whose name lies something of the length of a link.
    pub(super) fn see(&mut self, key: &StoreKey, link_bytes: usize) -> Option<Arc<Group>> {
        let group =
            self.entry(key).filter(|e| e.group.link_bytes() == link_bytes).map(|e| Arc::clone(&e.group))?;
        self.insert(*key, Entry { group: Arc::clone(&group), seen: true });
        Some(group)
    }

    /// A link of the group was read: it names its neighbours too.
    pub(super) fn learn(&mut self, group: &Arc<Group>) {
        for member in &group.members {
            if self.entry(&member.key).is_none() {
                self.insert(member.key, Entry { group: Arc::clone(group), seen: false });
            }
        }
    }

    /// The link of this page leads to this group.
    pub(super) fn set(&mut self, key: StoreKey, group: &Arc<Group>) {
        self.old.remove(&key);
        self.insert(key, Entry { group: Arc::clone(group), seen: true });
    }

    pub(super) fn forget(&mut self, key: &StoreKey) {
        self.young.remove(key);
        self.old.remove(key);
    }

    /// Nothing of the group is where it was.
    pub(super) fn forget_group(&mut self, group: &Group) {
        for member in &group.members {
            if self.entry(&member.key).is_some_and(|e| e.group.key == group.key) {
                self.forget(&member.key);
            }
        }
    }

    pub(super) fn clear(&mut self) {
        *self = Index::default();
    }
}
