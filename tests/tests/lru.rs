//! The story: "about LRU" cannot be told from broken LRU. With one thread and no tier below, every hit and every miss is the
//! one that a reference of twenty lines gives; `exists` moves nothing, `touch` counts as a use, `remove` makes room.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::collections::VecDeque;

use ebbtide_core::HotTier;
use ebbtide_sim::body::{body_of, key_of};
use ebbtide_sim::workload::NAMESPACE;
use ebbtide_sim::world::{BelowOptions, World, WorldOptions};
use ebbtide_sim::{Dice, SimEnv, SimOptions};

/// Least recently used first, in bytes.
struct Reference {
    /// Coldest first.
    order: VecDeque<(u32, u64)>,
    free: u64,
}

impl Reference {
    fn used(&mut self, key: u32) -> bool {
        let Some(at) = self.order.iter().position(|(other, _)| *other == key) else { return false };
        let entry = self.order.remove(at).expect("it was found");
        self.order.push_back(entry);
        true
    }

    fn insert(&mut self, key: u32, bytes: u64) {
        // When it does not fit, what is evicted is what it needs, whatever is free besides.
        let mut freed = if self.free < bytes { 0 } else { bytes };
        while freed < bytes {
            let (_, gone) = self.order.pop_front().expect("it fits an empty cache");
            self.free += gone;
            freed += gone;
        }
        self.free -= bytes;
        self.order.push_back((key, bytes));
    }

    fn remove(&mut self, key: u32) -> bool {
        let Some(at) = self.order.iter().position(|(other, _)| *other == key) else { return false };
        self.free += self.order.remove(at).map_or(0, |(_, bytes)| bytes);
        true
    }
}

fn compare(seed: u64, lengths: (u64, u64)) {
    let env = SimEnv::new(SimOptions::fifo(seed));
    let options = WorldOptions { below: BelowOptions::None, ..WorldOptions::default() };
    let mut world = World::new(env.clone(), options);
    env.block_on(async { world.start().await }).unwrap();
    let (engine, hot) = (world.engine().clone(), world.hot().clone());
    let mut reference = Reference { order: VecDeque::new(), free: hot.objects_bytes_max() };
    let mut dice = Dice::new(seed);
    let mut hits = 0;
    for step in 0..20_000 {
        let key = dice.below(dice.clone().between(50, 2000)) as u32;
        let name = key_of(key);
        let length = Dice::new(u64::from(key)).log_uniform(lengths.0, lengths.1) as usize;
        match dice.below(20) {
            0 => assert_eq!(engine.touch(NAMESPACE, &[&name])[0], reference.used(key), "step {step}: touch"),
            1 => {
                let there = reference.order.iter().any(|(other, _)| *other == key);
                assert_eq!(engine.exists(NAMESPACE, &[&name])[0], there, "step {step}: exists");
            }
            2 => {
                let removed = env.block_on(engine.remove(NAMESPACE, &name)).unwrap();
                assert_eq!(removed, reference.remove(key), "step {step}: remove");
            }
            _ => {
                let hit = env.block_on(engine.get(NAMESPACE, &name)).unwrap().is_some();
                assert_eq!(hit, reference.used(key), "seed {seed}, step {step}: key {key}");
                hits += u32::from(hit);
                if !hit {
                    env.block_on(engine.put(NAMESPACE, &name, &body_of(key, 1, length))).unwrap();
                    reference.insert(key, hot.object_bytes(length, name.len()));
                }
            }
        }
        assert_eq!(hot.objects_free_bytes(), reference.free, "step {step}: free bytes");
    }
    assert!(hits > 1000, "{hits} hits prove little");
    assert!(engine.stats().evicted() > 1000, "few evictions prove little");
    assert_eq!(engine.stats().touches_dropped, 0);
}

#[test]
fn hits_are_those_of_exact_lru() {
    for seed in 0..4 {
        compare(seed, (4096, 4096));
    }
}

#[test]
fn hits_are_those_of_exact_lru_with_mixed_sizes() {
    for seed in 0..4 {
        compare(seed, (1, 60_000));
    }
}
