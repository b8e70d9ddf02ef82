//! A hash table of row numbers: open addressing, eight bytes a slot, so that a lookup touches one cache line before it knows
//! which row to look at.
//!
//! A slot holds the row's number and 32 bits of its hash, which tell strangers apart without a look at their rows. Removal
//! moves what follows back, so there are no tombstones and the table never decays.

/// A slot: the hash's upper half and the number, or `VACANT`.
type Slot = u64;

/// No row has this number.
const VACANT: Slot = u64::MAX;
/// The smallest table.
const SLOTS_MIN: usize = 16;

/// Row numbers by 64-bit hashes, which are taken to be well mixed. Several rows may have one hash.
#[derive(Default)]
pub(crate) struct Table {
    slots: Box<[Slot]>,
    len: usize,
}

impl Table {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The row of `hash` that is the `same` one.
    pub(crate) fn find(&self, hash: u64, same: impl Fn(u32) -> bool) -> Option<u32> {
        if self.slots.is_empty() {
            return None;
        }
        let mask = self.slots.len() - 1;
        let mut at = self.home(hash);
        loop {
            let slot = self.slots[at];
            if slot == VACANT {
                return None;
            }
            if slot >> 32 == hash >> 32 && same(number_of(slot)) {
                return Some(number_of(slot));
            }
            at = (at + 1) & mask;
        }
    }

    /// Adds row `number`, which is not in it and not `u32::MAX`.
    pub(crate) fn insert(&mut self, hash: u64, number: u32) {
        // Grown at seven eighths: probes stay short, and a slot costs 9 to 18 bytes a row.
        if (self.len + 1) * 8 > self.slots.len() * 7 {
            self.grow();
        }
        self.place(slot_of(hash, number));
        self.len += 1;
    }

    /// Takes row `number` out.
    pub(crate) fn remove(&mut self, hash: u64, number: u32) {
        if self.slots.is_empty() {
            return;
        }
        let mask = self.slots.len() - 1;
        let mut hole = self.home(hash);
        while self.slots[hole] != slot_of(hash, number) {
            if self.slots[hole] == VACANT {
                return;
            }
            hole = (hole + 1) & mask;
        }
        self.len -= 1;
        // What stands behind the hole moves into it, unless that would put it in front of its home.
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            let slot = self.slots[at];
            if slot == VACANT {
                break;
            }
            let from_home = at.wrapping_sub(self.home_of(slot)) & mask;
            if from_home >= at.wrapping_sub(hole) & mask {
                self.slots[hole] = slot;
                hole = at;
            }
        }
        self.slots[hole] = VACANT;
    }

    /// Where a hash's probes start. From the upper half, since that is what a slot keeps of it.
    fn home(&self, hash: u64) -> usize {
        self.home_of(slot_of(hash, 0))
    }

    fn home_of(&self, slot: Slot) -> usize {
        (slot >> 32) as usize & (self.slots.len() - 1)
    }

    fn place(&mut self, slot: Slot) {
        let mask = self.slots.len() - 1;
        let mut at = self.home_of(slot);
        while self.slots[at] != VACANT {
            at = (at + 1) & mask;
        }
        self.slots[at] = slot;
    }

    fn grow(&mut self) {
        let slots = (self.slots.len() * 2).max(SLOTS_MIN);
        let old = std::mem::replace(&mut self.slots, vec![VACANT; slots].into_boxed_slice());
        old.iter().filter(|slot| **slot != VACANT).for_each(|slot| self.place(*slot));
    }
}

fn slot_of(hash: u64, number: u32) -> Slot {
    (hash >> 32 << 32) | u64::from(number)
}

fn number_of(slot: Slot) -> u32 {
    slot as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// Few distinct hashes, so that probes collide, wrap round and cross each other.
    #[test]
    fn behaves_like_a_map_under_collisions() {
        let (mut table, mut model, mut seed) = (Table::default(), BTreeMap::new(), 1u64);
        let mut dice = move |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % below
        };
        for _ in 0..50_000 {
            let number = dice(300) as u32;
            let hash = u64::from(number % 37) << 32 | (u64::from(number % 5) * 3) << 60;
            match model.remove(&number) {
                Some(hash) => table.remove(hash, number),
                None => {
                    table.insert(hash, number);
                    model.insert(number, hash);
                }
            }
            let asked = dice(300) as u32;
            let hash = u64::from(asked % 37) << 32 | (u64::from(asked % 5) * 3) << 60;
            let found = table.find(hash, |number| number == asked);
            assert_eq!(found, model.contains_key(&asked).then_some(asked));
            assert_eq!(table.len(), model.len());
        }
    }
}
