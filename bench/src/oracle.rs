//! What exact policies would have hit on the same requests: LRU, and Belady's, which knows the future.
//!
//! Both follow the replay's semantics. Of a request's blocks the leading present run counts as hits; every present block
//! is touched, in order; then the missing ones are put, in order.

use std::collections::BTreeSet;

/// Hits of a policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) hits: u64,
    pub(crate) asked: u64,
}

impl Tally {
    /// Hits ÷ blocks asked for; 0 when none was.
    pub(crate) fn rate(self) -> f64 {
        if self.asked == 0 { 0.0 } else { self.hits as f64 / self.asked as f64 }
    }
}

/// The requests of a trace with its block ids made dense, so that tables are plain arrays.
pub(crate) struct Blocks {
    requests: Vec<Vec<u32>>,
    distinct: usize,
}

impl Blocks {
    pub(crate) fn new<'a>(requests: impl Iterator<Item = &'a [u64]> + Clone) -> Self {
        let mut ids: Vec<u64> = requests.clone().flatten().copied().collect();
        ids.sort_unstable();
        ids.dedup();
        let dense = |id: &u64| {
            u32::try_from(ids.partition_point(|other| other < id)).expect("fewer than 2^32 blocks")
        };
        let requests = requests.map(|blocks| blocks.iter().map(dense).collect()).collect();
        Blocks { requests, distinct: ids.len() }
    }

    /// How many different blocks there are.
    pub(crate) fn distinct(&self) -> usize {
        self.distinct
    }

    /// What exact LRU hits with room for `capacity` blocks.
    pub(crate) fn lru(&self, capacity: u64) -> Tally {
        self.run(&mut Lru::new(self.distinct, capacity))
    }

    /// What Belady's policy hits with room for `capacity` blocks: the block that is used again last leaves first, and a
    /// block that would leave at once is not taken in.
    pub(crate) fn belady(&self, capacity: u64) -> Tally {
        self.run(&mut Belady::new(self, capacity))
    }

    fn run(&self, cache: &mut dyn Cache) -> Tally {
        let mut tally = Tally::default();
        let mut position = 0;
        let mut present = Vec::new();
        for blocks in &self.requests {
            present.clear();
            present.extend(blocks.iter().map(|block| cache.contains(*block)));
            tally.asked += blocks.len() as u64;
            tally.hits += present.iter().take_while(|present| **present).count() as u64;
            for wanted in [true, false] {
                for (at, block) in blocks.iter().enumerate().filter(|(at, _)| present[*at] == wanted) {
                    cache.take(*block, position + at);
                }
            }
            position += blocks.len();
        }
        tally
    }
}

trait Cache {
    fn contains(&self, block: u32) -> bool;
    /// Uses `block` at `position` of the trace, after putting it where it is not present.
    fn take(&mut self, block: u32, position: usize);
}

const NONE: u32 = u32::MAX;

/// A list through two arrays: the head is the next to leave.
struct Lru {
    before: Vec<u32>,
    after: Vec<u32>,
    present: Vec<bool>,
    coldest: u32,
    hottest: u32,
    len: u64,
    capacity: u64,
}

impl Lru {
    fn new(distinct: usize, capacity: u64) -> Self {
        Lru {
            before: vec![NONE; distinct],
            after: vec![NONE; distinct],
            present: vec![false; distinct],
            coldest: NONE,
            hottest: NONE,
            len: 0,
            capacity,
        }
    }

    fn unlink(&mut self, block: u32) {
        let (before, after) = (self.before[block as usize], self.after[block as usize]);
        match before {
            NONE => self.coldest = after,
            before => self.after[before as usize] = after,
        }
        match after {
            NONE => self.hottest = before,
            after => self.before[after as usize] = before,
        }
        self.present[block as usize] = false;
        self.len -= 1;
    }

    fn link(&mut self, block: u32) {
        self.before[block as usize] = self.hottest;
        self.after[block as usize] = NONE;
        match self.hottest {
            NONE => self.coldest = block,
            hottest => self.after[hottest as usize] = block,
        }
        self.hottest = block;
        self.present[block as usize] = true;
        self.len += 1;
    }
}

impl Cache for Lru {
    fn contains(&self, block: u32) -> bool {
        self.present[block as usize]
    }

    fn take(&mut self, block: u32, _: usize) {
        if self.present[block as usize] {
            self.unlink(block);
        }
        self.link(block);
        if self.len > self.capacity {
            self.unlink(self.coldest);
        }
    }
}

/// Present blocks in the order of their next use.
struct Belady {
    /// For each position of the trace, the next one that uses the same block.
    next_use: Vec<usize>,
    /// For each block the position of its next use while it is present.
    due: Vec<Option<usize>>,
    order: BTreeSet<(usize, u32)>,
    capacity: u64,
}

impl Belady {
    fn new(blocks: &Blocks, capacity: u64) -> Self {
        let flat: Vec<u32> = blocks.requests.iter().flatten().copied().collect();
        let mut next_use = vec![usize::MAX; flat.len()];
        let mut later = vec![usize::MAX; blocks.distinct];
        for (position, block) in flat.iter().enumerate().rev() {
            next_use[position] = std::mem::replace(&mut later[*block as usize], position);
        }
        Belady { next_use, due: vec![None; blocks.distinct], order: BTreeSet::new(), capacity }
    }
}

impl Cache for Belady {
    fn contains(&self, block: u32) -> bool {
        self.due[block as usize].is_some()
    }

    fn take(&mut self, block: u32, position: usize) {
        let next = self.next_use[position];
        if let Some(due) = self.due[block as usize].replace(next) {
            self.order.remove(&(due, block));
        }
        self.order.insert((next, block));
        if self.order.len() as u64 > self.capacity
            && let Some((_, last)) = self.order.pop_last()
        {
            self.due[last as usize] = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dice::Dice;

    fn blocks(requests: &[&[u64]]) -> Blocks {
        Blocks::new(requests.iter().copied())
    }

    #[test]
    fn lru_by_hand() {
        // Room for two: 1 2 | 1 3 (2 leaves) | 2 (1 leaves) | 3 2.
        let trace = blocks(&[&[10, 20], &[10, 30], &[20], &[30, 20]]);
        assert_eq!(trace.lru(2), Tally { hits: 1 + 2, asked: 7 });
        assert_eq!(trace.distinct(), 3);
        assert_eq!(trace.lru(0).hits, 0);
        assert_eq!(trace.lru(3).hits, 1 + 1 + 2);
    }

    #[test]
    fn only_the_leading_run_counts_but_what_lies_behind_is_touched() {
        // In the third request 1 is missing, so 2 is no hit; but its touch saves it from 4.
        let trace = blocks(&[&[2], &[3], &[1, 2], &[2], &[3]]);
        // Room for two: {2} {2,3}; then 2 is touched, 1 put, 3 leaves; 2 hits; 3 misses.
        assert_eq!(trace.lru(2), Tally { hits: 1, asked: 6 });
    }

    #[test]
    fn belady_by_hand() {
        // The textbook trace with room for three: 7 0 1 2 0 3 0 4 2 3 0 3 2 1 2 0 1 7 0 1 has 9 faults when every block
        // must be taken in; one that is not used again may be passed by here, which saves none in this trace.
        let ids = [7u64, 0, 1, 2, 0, 3, 0, 4, 2, 3, 0, 3, 2, 1, 2, 0, 1, 7, 0, 1];
        let requests: Vec<&[u64]> = ids.chunks(1).collect();
        assert_eq!(blocks(&requests).belady(3).hits, 20 - best_faults(&ids, 3));
        assert!(blocks(&requests).belady(3).hits >= 11);
        assert_eq!(blocks(&requests).lru(3).hits, 8);
    }

    #[test]
    fn belady_is_as_good_as_trying_everything() {
        for seed in 0..60 {
            let mut dice = Dice::new(seed);
            let ids: Vec<u64> = (0..14).map(|_| dice.below(6)).collect();
            let requests: Vec<&[u64]> = ids.chunks(1).collect();
            let trace = blocks(&requests);
            for capacity in 1..4 {
                let best = ids.len() as u64 - best_faults(&ids, capacity);
                assert_eq!(trace.belady(capacity as u64).hits, best, "{ids:?} with room for {capacity}");
                assert!(trace.lru(capacity as u64).hits <= best);
            }
        }
    }

    /// The fewest faults of any way to evict, by trying all.
    fn best_faults(ids: &[u64], capacity: usize) -> u64 {
        let mut states: BTreeSet<(Vec<u64>, u64)> = BTreeSet::from([(Vec::new(), 0)]);
        for id in ids {
            let mut next = BTreeSet::new();
            for (held, faults) in states {
                if held.contains(id) {
                    next.insert((held, faults));
                    continue;
                }
                next.insert((held.clone(), faults + 1)); // passed by
                let with = |mut held: Vec<u64>| {
                    held.push(*id);
                    held.sort_unstable();
                    held
                };
                if held.len() < capacity {
                    next.insert((with(held), faults + 1));
                } else {
                    for leaves in 0..held.len() {
                        let mut kept = held.clone();
                        kept.remove(leaves);
                        next.insert((with(kept), faults + 1));
                    }
                }
            }
            states = next;
        }
        states.into_iter().map(|(_, faults)| faults).min().unwrap()
    }

    #[test]
    fn the_conversation_trace_gives_the_published_rate() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/traces/conversation_trace.jsonl");
        let path = std::path::Path::new(path);
        if !path.exists() {
            println!("skipped: no {}", path.display());
            return;
        }
        let requests = crate::trace::read(path, usize::MAX).unwrap();
        let trace = Blocks::new(requests.iter().map(|request| request.hash_ids.as_slice()));
        let (lru, belady) = (trace.lru(10_000), trace.belady(10_000));
        assert_eq!(format!("{:.4}", lru.rate()), "0.2112");
        assert!(belady.rate() > lru.rate(), "{}", belady.rate());
    }
}
