//! What one thread of `bench dram` does: its part of the areas, walked in shuffled order, and the arms on it.

use ebbtide_node::{Hit, Served, Store};

use super::{CHECKED, GET, GET_INTO, PUT};
use crate::body::KeyBytes;
use crate::dice::Dice;

/// What one thread works on.
pub(super) struct Lane {
    pub(super) size: usize,
    pub(super) source: Vec<u8>,
    pub(super) target: Vec<u8>,
    pub(super) from: Walk,
    pub(super) to: Walk,
    /// Resident objects, and the order in which they are asked for.
    pub(super) keys: Vec<(u64, KeyBytes)>,
    pub(super) ask: Walk,
    /// The keys of the next slice, one after the other, so that finding a key costs no arm a cache miss.
    pub(super) asks: Vec<(u64, KeyBytes)>,
    /// What the next slice of puts will put, and what the last one did: key and slot of the source.
    pub(super) puts: Vec<(KeyBytes, usize)>,
    /// The last copies of a slice of get_into: object and slot of the target.
    pub(super) copied: Vec<(u64, usize)>,
}

/// Slots in shuffled order, over and over.
pub(super) struct Walk {
    order: Vec<u32>,
    at: usize,
}

impl Walk {
    pub(super) fn new(slots: usize, dice: &mut Dice) -> Self {
        let mut order: Vec<u32> = (0..slots as u32).collect();
        dice.shuffle(&mut order);
        Walk { order, at: 0 }
    }

    pub(super) fn next(&mut self) -> usize {
        self.at = if self.at + 1 < self.order.len() { self.at + 1 } else { 0 };
        self.order[self.at] as usize
    }
}

impl Lane {
    /// Names what the next slice of gets asks for.
    pub(super) fn prepare(&mut self, operations: usize) {
        self.asks.clear();
        self.asks.extend((0..operations).map(|_| self.keys[self.ask.next()]));
    }

    pub(super) fn work(&mut self, store: &Store, arm: usize, operations: usize) -> ebbtide_core::Result<()> {
        match arm {
            GET_INTO => self.get_into(store, operations),
            PUT => self.put(store),
            GET => self.get(store, operations),
            _ => {
                self.memcpy(operations);
                Ok(())
            }
        }
    }

    fn memcpy(&mut self, operations: usize) {
        for _ in 0..operations {
            let (from, to) = (self.from.next() * self.size, self.to.next() * self.size);
            self.target[to..to + self.size].copy_from_slice(&self.source[from..from + self.size]);
        }
    }

    fn get_into(&mut self, store: &Store, operations: usize) -> ebbtide_core::Result<()> {
        for (left, (index, key)) in (0..operations).rev().zip(&self.asks) {
            let slot = self.to.next();
            let into = &mut self.target[slot * self.size..(slot + 1) * self.size];
            let copied = store.get_into(key, into)?;
            if copied != Some((self.size, Served::Dram)) {
                let text = format!("get_into of a resident object gave {copied:?}");
                return Err(ebbtide_core::Error::internal(text));
            }
            if left < CHECKED.min(self.to.order.len()) {
                self.copied.push((*index, slot));
            }
        }
        Ok(())
    }

    fn put(&mut self, store: &Store) -> ebbtide_core::Result<()> {
        for (key, slot) in &self.puts {
            store.put(key, &self.source[slot * self.size..(slot + 1) * self.size])?;
        }
        Ok(())
    }

    fn get(&mut self, store: &Store, operations: usize) -> ebbtide_core::Result<()> {
        for (_, key) in self.asks.iter().take(operations) {
            if store.get(key)?.is_none() {
                return Err(ebbtide_core::Error::internal("get of a resident object was a miss"));
            }
        }
        Ok(())
    }
}

pub(super) fn address(hit: &Hit) -> Option<*const u8> {
    hit.object.value.spans().next().map(<[u8]>::as_ptr)
}

pub(super) fn same_bytes(hit: &Hit, expect: &[u8]) -> bool {
    let mut rest = expect;
    let same = hit.object.value.spans().all(|span| match rest.split_at_checked(span.len()) {
        Some((head, tail)) => {
            rest = tail;
            head == span
        }
        None => false,
    });
    same && rest.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_walk_visits_every_slot_once_a_turn() {
        let mut walk = Walk::new(100, &mut Dice::new(1));
        let mut seen: Vec<usize> = (0..100).map(|_| walk.next()).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..100).collect::<Vec<_>>());
    }
}
