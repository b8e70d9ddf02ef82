//! S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023).
//!
//! New objects enter a small queue of a tenth of the bytes. What leaves it unused is remembered only by its tag; what was
//! used, or comes back while remembered, enters the main queue, where an object that was used since it last came to the
//! end goes round again.

use std::collections::VecDeque;

use ebbtide_core::{Cost, Eviction, ObjectId, Rank};
use hashbrown::HashTable;

use super::list::{List, Nodes};

const SMALL: u8 = 1;
const MAIN: u8 = 2;
/// Uses are counted up to this.
const USES_MAX: u8 = 3;

/// S3-FIFO.
pub struct S3Fifo {
    nodes: Nodes,
    small: List,
    main: List,
    ghost: Ghost,
    small_bytes_max: u64,
}

impl S3Fifo {
    /// An empty order for a tier of `capacity_bytes`.
    pub fn new(capacity_bytes: u64) -> Self {
        S3Fifo {
            nodes: Nodes::default(),
            small: List::new(SMALL),
            main: List::new(MAIN),
            ghost: Ghost::default(),
            small_bytes_max: capacity_bytes / 10,
        }
    }

    /// Takes one object out of the small queue; true when it is a victim.
    fn pass_small(&mut self, id: ObjectId) -> Option<Cost> {
        let used = self.nodes.get(id).is_some_and(|node| node.mark > 0);
        let cost = self.small.unlink(&mut self.nodes, id);
        if used {
            self.main.push_newest(&mut self.nodes, id, cost);
            return None;
        }
        self.ghost.remember(cost.tag, self.main.len.max(self.small.len).max(64));
        Some(cost)
    }

    /// Takes one object out of the main queue; puts it back with a use less when it was used.
    fn pass_main(&mut self, id: ObjectId) -> Option<Cost> {
        let uses = self.nodes.get(id).map_or(0, |node| node.mark);
        let cost = self.main.unlink(&mut self.nodes, id);
        if uses == 0 {
            return Some(cost);
        }
        self.main.push_newest(&mut self.nodes, id, cost);
        if let Some(node) = self.nodes.get_mut(id) {
            node.mark = uses - 1;
        }
        None
    }
}

impl Eviction for S3Fifo {
    fn name(&self) -> &'static str {
        "s3fifo"
    }

    fn insert(&mut self, id: ObjectId, cost: Cost, rank: Rank) {
        if self.nodes.get(id).is_some() {
            return;
        }
        match rank {
            Rank::New if self.ghost.forget(cost.tag) => self.main.push_newest(&mut self.nodes, id, cost),
            Rank::New => self.small.push_newest(&mut self.nodes, id, cost),
            Rank::Hot => self.main.push_newest(&mut self.nodes, id, cost),
            Rank::Cold => self.small.push_oldest(&mut self.nodes, id, cost),
        }
    }

    fn expect(&self, id: ObjectId) {
        self.nodes.expect(id);
    }

    fn touch(&mut self, id: ObjectId) {
        if let Some(node) = self.nodes.get_mut(id) {
            node.mark = (node.mark + 1).min(USES_MAX);
        }
    }

    fn remove(&mut self, id: ObjectId) -> Option<Rank> {
        let list = self.nodes.get(id)?.list;
        let queue = if list == SMALL { &mut self.small } else { &mut self.main };
        queue.unlink(&mut self.nodes, id);
        Some(if list == SMALL { Rank::New } else { Rank::Hot })
    }

    fn victims(&mut self, bytes: u64, out: &mut Vec<ObjectId>) -> u64 {
        let mut freed = 0;
        while freed < bytes {
            let small_first = self.small.bytes > self.small_bytes_max || self.main.len == 0;
            let (small, main) = (self.small.oldest(), self.main.oldest());
            // Every pass takes a use off an object or an object off a queue, so this ends.
            let (id, gone) = match (small, main) {
                (Some(id), _) if small_first => (id, self.pass_small(id)),
                (_, Some(id)) => (id, self.pass_main(id)),
                (Some(id), None) => (id, self.pass_small(id)),
                (None, None) => break,
            };
            if let Some(cost) = gone {
                freed += cost.bytes;
                out.push(id);
            }
        }
        freed
    }

    fn len(&self) -> usize {
        self.small.len + self.main.len
    }
}

/// The tags of objects that left the small queue unused, oldest forgotten first.
#[derive(Default)]
struct Ghost {
    order: VecDeque<u64>,
    known: HashTable<u64>,
}

impl Ghost {
    fn remember(&mut self, tag: u64, tags_max: usize) {
        if self.known.find(tag, |other| *other == tag).is_none() {
            self.known.insert_unique(tag, tag, |tag| *tag);
        }
        self.order.push_back(tag);
        // A tag that was forgotten early leaves its place in the order, so the order bounds the table, not the reverse.
        while self.order.len() > tags_max
            && let Some(oldest) = self.order.pop_front()
        {
            self.forget(oldest);
        }
    }

    fn forget(&mut self, tag: u64) -> bool {
        self.known.find_entry(tag, |other| *other == tag).map(|entry| entry.remove()).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(tag: u64) -> Cost {
        Cost { bytes: 10, tag }
    }

    fn evict(policy: &mut S3Fifo, bytes: u64) -> Vec<u32> {
        let mut out = Vec::new();
        policy.victims(bytes, &mut out);
        out.into_iter().map(|id| id.0).collect()
    }

    #[test]
    fn one_hit_objects_leave_before_used_ones() {
        let mut policy = S3Fifo::new(100);
        (0..10).for_each(|id| policy.insert(ObjectId(id), cost(u64::from(id)), Rank::New));
        policy.touch(ObjectId(0));
        policy.touch(ObjectId(1));
        assert_eq!(evict(&mut policy, 30), [2, 3, 4]);
        assert_eq!(policy.len(), 7);
        // 2 comes back while it is remembered, so it enters the main queue and outlives the new 20.
        policy.insert(ObjectId(2), cost(2), Rank::New);
        policy.insert(ObjectId(20), cost(20), Rank::New);
        assert_eq!(evict(&mut policy, 50), [5, 6, 7, 8, 9]);
        assert_eq!(
            evict(&mut policy, 10),
            [0],
            "the small queue is short now: the oldest of the main one goes"
        );
    }

    #[test]
    fn all_leave_in_the_end_and_uses_are_bounded() {
        let mut policy = S3Fifo::new(1000);
        (0..100).for_each(|id| policy.insert(ObjectId(id), cost(u64::from(id)), Rank::New));
        (0..1000).for_each(|n| policy.touch(ObjectId(n % 100)));
        let mut all = evict(&mut policy, u64::MAX);
        all.sort_unstable();
        assert_eq!(all, (0..100).collect::<Vec<_>>());
        assert!(policy.is_empty());
    }
}
