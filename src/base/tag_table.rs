//! A hash table from a 32-bit tag to `u32` items. It keeps no keys: the caller confirms each candidate, so equal
//! tags cost a comparison and never a wrong answer. Eight bytes a slot, one cache miss a look-up.

use super::prefetch::prefetch;

#[derive(Clone, Copy, Debug)]
struct Slot {
    tag: u32,
    item: u32,
}

const EMPTY: Slot = Slot { tag: 0, item: u32::MAX };

/// Open-addressing multimap, linear probing, at most three quarters full. `u32::MAX` is not an item.
#[derive(Clone, Debug)]
pub struct TagTable {
    slots: Vec<Slot>,
    len: usize,
}

impl Default for TagTable {
    fn default() -> Self {
        TagTable { slots: vec![EMPTY; 16], len: 0 }
    }
}

impl TagTable {
    /// Items held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if it holds nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn mask(&self) -> usize {
        self.slots.len() - 1
    }

    /// First `Some` that `confirm` returns for the items under `tag`, in probe order. O(1) expected.
    #[inline]
    pub fn find<T>(&self, tag: u32, mut confirm: impl FnMut(u32) -> Option<T>) -> Option<T> {
        let mut at = tag as usize & self.mask();
        loop {
            let slot = self.slots[at];
            if slot.item == EMPTY.item {
                return None;
            }
            if slot.tag == tag
                && let Some(found) = confirm(slot.item)
            {
                return Some(found);
            }
            at = (at + 1) & self.mask();
        }
    }

    /// A call for an item under `tag` will follow soon.
    #[inline]
    pub fn prefetch(&self, tag: u32) {
        prefetch(&self.slots[tag as usize & self.mask()]);
    }

    /// Adds an item. Amortised O(1).
    pub fn insert(&mut self, tag: u32, item: u32) {
        if (self.len + 1) * 4 > self.slots.len() * 3 {
            let bigger = vec![EMPTY; self.slots.len() * 2];
            for slot in std::mem::replace(&mut self.slots, bigger) {
                if slot.item != EMPTY.item {
                    self.place(slot);
                }
            }
        }
        self.place(Slot { tag, item });
        self.len += 1;
    }

    fn place(&mut self, slot: Slot) {
        let mut at = slot.tag as usize & self.mask();
        while self.slots[at].item != EMPTY.item {
            at = (at + 1) & self.mask();
        }
        self.slots[at] = slot;
    }

    fn position(&self, tag: u32, item: u32) -> Option<usize> {
        let mut at = tag as usize & self.mask();
        loop {
            let slot = self.slots[at];
            if slot.item == EMPTY.item {
                return None;
            }
            if slot.tag == tag && slot.item == item {
                return Some(at);
            }
            at = (at + 1) & self.mask();
        }
    }

    /// Puts `new` in the place of `old`. False if `old` is not there.
    pub fn replace(&mut self, tag: u32, old: u32, new: u32) -> bool {
        let found = self.position(tag, old);
        if let Some(at) = found {
            self.slots[at].item = new;
        }
        found.is_some()
    }

    /// Takes an item out, closing the gap behind it (no tombstones). False if it is not there.
    pub fn remove(&mut self, tag: u32, item: u32) -> bool {
        let Some(mut gap) = self.position(tag, item) else { return false };
        let mask = self.mask();
        let mut at = gap;
        loop {
            at = (at + 1) & mask;
            let slot = self.slots[at];
            if slot.item == EMPTY.item {
                break;
            }
            // Distance from home, going round: the slot may move to the gap only if its home is not past it.
            let home = slot.tag as usize & mask;
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(gap) & mask {
                self.slots[gap] = slot;
                gap = at;
            }
        }
        self.slots[gap] = EMPTY;
        self.len -= 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every operation against a plain list, with tags that collide on purpose.
    #[test]
    fn agrees_with_a_list() {
        let mut table = TagTable::default();
        let mut list: Vec<(u32, u32)> = Vec::new();
        let mut x = 7u64;
        let mut next = |n: u64| {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (x >> 33) % n
        };
        for step in 0..20_000u32 {
            let tag = (next(40) * 0x0100_0001) as u32;
            match next(3) {
                0 | 1 if list.len() < 500 => {
                    table.insert(tag, step);
                    list.push((tag, step));
                }
                _ if !list.is_empty() => {
                    let (tag, item) = list.swap_remove(next(list.len() as u64) as usize);
                    assert!(table.remove(tag, item));
                    assert!(!table.remove(tag, item));
                }
                _ => {}
            }
            let mut got = Vec::new();
            assert_eq!(
                table.find(tag, |item| {
                    got.push(item);
                    None::<()>
                }),
                None
            );
            let mut want: Vec<u32> = list.iter().filter(|e| e.0 == tag).map(|e| e.1).collect();
            got.sort_unstable();
            want.sort_unstable();
            assert_eq!(got, want, "step {step}");
            assert_eq!(table.len(), list.len());
        }
        let (tag, item) = list[0];
        assert!(table.replace(tag, item, 99_999) && !table.replace(tag, item, 1));
        assert_eq!(table.find(tag, |i| (i == 99_999).then_some(i)), Some(99_999));
    }
}
