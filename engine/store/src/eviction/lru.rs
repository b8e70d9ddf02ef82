//! Least recently used first.

use ebbtide_core::{Cost, Eviction, ObjectId, Rank};

use super::list::{List, Nodes};

/// Least recently used first.
pub struct Lru {
    nodes: Nodes,
    order: List,
}

impl Lru {
    /// An empty order.
    pub fn new() -> Self {
        Lru { nodes: Nodes::default(), order: List::new(1) }
    }
}

impl Default for Lru {
    fn default() -> Self {
        Lru::new()
    }
}

impl Eviction for Lru {
    fn name(&self) -> &'static str {
        "lru"
    }

    fn insert(&mut self, id: ObjectId, cost: Cost, rank: Rank) {
        if self.nodes.get(id).is_some() {
            return;
        }
        match rank {
            Rank::New | Rank::Hot => self.order.push_newest(&mut self.nodes, id, cost),
            Rank::Cold => self.order.push_oldest(&mut self.nodes, id, cost),
        }
    }

    fn expect(&self, id: ObjectId) {
        self.nodes.expect(id);
    }

    fn touch(&mut self, id: ObjectId) {
        if self.nodes.get(id).is_some() {
            self.order.renew(&mut self.nodes, id);
        }
    }

    fn remove(&mut self, id: ObjectId) -> Option<Rank> {
        self.nodes.get(id)?;
        self.order.unlink(&mut self.nodes, id);
        Some(Rank::Hot)
    }

    fn victims(&mut self, bytes: u64, out: &mut Vec<ObjectId>) -> u64 {
        let mut freed = 0;
        while freed < bytes
            && let Some(id) = self.order.oldest()
        {
            freed += self.order.unlink(&mut self.nodes, id).bytes;
            out.push(id);
        }
        freed
    }

    fn len(&self) -> usize {
        self.order.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COST: Cost = Cost { bytes: 10, tag: 0 };

    fn order(ids: &[u32]) -> Vec<ObjectId> {
        ids.iter().copied().map(ObjectId).collect()
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let mut lru = Lru::new();
        (0..5).for_each(|id| lru.insert(ObjectId(id), COST, Rank::New));
        lru.touch(ObjectId(0));
        lru.touch(ObjectId(9));
        lru.insert(ObjectId(7), COST, Rank::Cold);
        assert_eq!(lru.remove(ObjectId(3)), Some(Rank::Hot));
        assert_eq!(lru.remove(ObjectId(3)), None);
        let mut out = Vec::new();
        assert_eq!(lru.victims(25, &mut out), 30);
        assert_eq!(out, order(&[7, 1, 2]));
        assert_eq!(lru.victims(1000, &mut out), 20);
        assert_eq!(out, order(&[7, 1, 2, 4, 0]));
        assert!(lru.is_empty());
    }
}
