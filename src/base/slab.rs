//! A slab: values under small keys that are never recycled into an alias.

/// Key of a value in a [`Slab`]: slot and the generation of the slot.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SlabKey {
    /// Slot.
    pub index: u32,
    /// Generation of the slot when the value was put in.
    pub generation: u32,
}

/// Values in slots; freed slots are reused under a new generation. All operations O(1); iteration in slot
/// order, so it may decide.
#[derive(Clone, Debug)]
pub struct Slab<T> {
    slots: Vec<(u32, Option<T>)>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Slab { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    /// Puts a value in.
    pub fn insert(&mut self, value: T) -> SlabKey {
        if let Some(index) = self.free.pop() {
            let slot = &mut self.slots[index as usize];
            slot.1 = Some(value);
            return SlabKey { index, generation: slot.0 };
        }
        let index = u32::try_from(self.slots.len()).expect("four billion values do not fit in memory");
        self.slots.push((0, Some(value)));
        SlabKey { index, generation: 0 }
    }

    /// The value, unless it was taken out.
    #[must_use]
    pub fn get(&self, key: SlabKey) -> Option<&T> {
        self.slots.get(key.index as usize).filter(|s| s.0 == key.generation).and_then(|s| s.1.as_ref())
    }

    /// The value, to change.
    pub fn get_mut(&mut self, key: SlabKey) -> Option<&mut T> {
        self.slots.get_mut(key.index as usize).filter(|s| s.0 == key.generation).and_then(|s| s.1.as_mut())
    }

    /// Takes the value out; the key is dead from then on.
    pub fn remove(&mut self, key: SlabKey) -> Option<T> {
        let slot = self.slots.get_mut(key.index as usize).filter(|s| s.0 == key.generation)?;
        let value = slot.1.take()?;
        slot.0 = slot.0.wrapping_add(1);
        self.free.push(key.index);
        Some(value)
    }

    /// Values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether there is no value.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All values in slot order.
    pub fn iter(&self) -> impl Iterator<Item = (SlabKey, &T)> {
        self.slots.iter().enumerate().filter_map(|(index, (generation, value))| {
            value.as_ref().map(|v| (SlabKey { index: index as u32, generation: *generation }, v))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_dies_with_its_value() {
        let mut slab = Slab::default();
        let a = slab.insert("a");
        assert_eq!(slab.remove(a), Some("a"));
        let b = slab.insert("b");
        assert_eq!((a.index, a.generation + 1), (b.index, b.generation));
        assert_eq!(slab.remove(a), None);
        assert_eq!((slab.get(a), slab.get(b)), (None, Some(&"b")));
        assert_eq!(slab.iter().map(|(k, v)| (k, *v)).collect::<Vec<_>>(), [(b, "b")]);
    }
}
