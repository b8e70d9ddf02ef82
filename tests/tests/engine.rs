//! The story: a tier below that fails, hangs, is slow and is killed, one sickness at a time. Each test names what an engine
//! got wrong somewhere: objects that vanished with a failed write, puts that starved, keys that came back from the dead.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::sync::Arc;
use std::time::Duration;

use ebbtide_core::{Env, ErrorKind, HotTier};
use ebbtide_engine::{Engine, Hit, Put};
use ebbtide_sim::body::{body_of, key_of};
use ebbtide_sim::faketier::FakeOptions;
use ebbtide_sim::workload::{NAMESPACE, check_object};
use ebbtide_sim::world::{BelowOptions, Crash, World, WorldOptions};
use ebbtide_sim::{Dice, SimEnv, SimOptions};
use parking_lot::Mutex;

const LENGTH: usize = 200 << 10;

fn world(seed: u64, below: BelowOptions) -> (SimEnv, World) {
    let env = SimEnv::new(SimOptions::shuffled(seed));
    let mut world = World::new(env.clone(), WorldOptions { below, ..WorldOptions::default() });
    env.block_on(async { world.start().await }).unwrap();
    (env, world)
}

fn on_fake(seed: u64) -> (SimEnv, World) {
    world(seed, BelowOptions::Fake(FakeOptions::default()))
}

async fn put(engine: &Engine, key: u32, length: usize) -> ebbtide_core::Result<Put> {
    engine.put(NAMESPACE, &key_of(key), &body_of(key, 1, length)).await
}

/// Puts objects of `LENGTH` until DRAM has no room; returns how many.
fn fill(world: &World) -> u32 {
    let mut count = 0;
    while let Some(put) = world.engine().try_put(NAMESPACE, &key_of(count), &body_of(count, 1, LENGTH)) {
        put.unwrap();
        count += 1;
    }
    count
}

fn restart(env: &SimEnv, world: &mut World, crash: Crash) {
    world.crash(crash);
    env.block_on(async { world.start().await }).unwrap();
}

#[test]
fn a_demotion_that_fails_is_tried_again() {
    let (env, mut world) = on_fake(1);
    let engine = world.engine().clone();
    env.block_on(put(&engine, 1, LENGTH)).unwrap();
    world.fake().unwrap().fail_puts(2);
    env.block_on(engine.flush()).unwrap();
    assert_eq!((engine.stats().demote_failures, engine.stats().demoted), (2, 1));
    drop(engine);
    restart(&env, &mut world, Crash::Power);
    let hit = env.block_on(world.engine().get(NAMESPACE, &key_of(1))).unwrap().unwrap();
    check_object(&hit.object, 1, 1, LENGTH);
}

#[test]
fn a_demotion_that_goes_on_failing_is_counted_and_makes_room() {
    let (env, world) = on_fake(2);
    world.fake().unwrap().fail_puts(u32::MAX);
    let engine = world.engine().clone();
    let count = fill(&world);
    for key in count..count + 20 {
        env.block_on(put(&engine, key, LENGTH)).unwrap();
    }
    env.block_on(engine.quiesce());
    let stats = engine.stats();
    assert_eq!(stats.entries + stats.dropped_by_reason["demote_failed"], u64::from(count) + 20);
    assert!(env.block_on(engine.flush()).is_err(), "a flush that could not write says so");
}

#[test]
fn puts_that_wait_are_served_in_order() {
    let env = SimEnv::new(SimOptions::fifo(1));
    let below = BelowOptions::Fake(FakeOptions::default());
    let mut world = World::new(env.clone(), WorldOptions { below, ..WorldOptions::default() });
    env.block_on(async { world.start().await }).unwrap();
    world.fake().unwrap().close_gate();
    let count = fill(&world);
    let served = Arc::new(Mutex::new(Vec::new()));
    // The large one in front is not overtaken by small ones that would fit.
    let lengths = [900 << 10, 1, 400 << 10, 4096, 4096, 700 << 10, 1, 1];
    for (key, length) in (count..).zip(lengths) {
        let (engine, served) = (world.engine().clone(), Arc::clone(&served));
        let task = async move {
            put(&engine, key, length).await.unwrap();
            served.lock().push(key);
        };
        env.spawn("put", Box::pin(task));
        env.block_on(env.sleep(Duration::from_millis(1)));
    }
    assert!(served.lock().is_empty(), "a gate that is closed lets nobody through");
    world.fake().unwrap().open_gate();
    env.block_on(env.sleep(Duration::from_secs(1)));
    assert_eq!(*served.lock(), (count..count + 8).collect::<Vec<_>>());
    assert_eq!(world.engine().stats().puts_waited, 8);
}

#[test]
fn a_put_is_refused_when_the_tier_hangs_and_the_next_one_is_not() {
    let (env, world) = on_fake(3);
    let engine = world.engine().clone();
    world.fake().unwrap().close_gate();
    let count = fill(&world);
    let began = env.now();
    let refused = env.block_on(put(&engine, count, LENGTH)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Full);
    let waited = env.now().since(began);
    assert!(waited >= Duration::from_secs(10) && waited < Duration::from_secs(11), "{waited:?}");
    assert_eq!(engine.exists(NAMESPACE, &[&key_of(count)]), [false], "a refused put has no effect");
    assert_eq!(
        (engine.stats().puts_refused, engine.stats().puts_waiting_bytes),
        (1, 0),
        "nobody waits any more"
    );
    world.fake().unwrap().open_gate();
    env.block_on(put(&engine, count, LENGTH)).unwrap();
}

#[test]
fn a_small_put_does_not_wait_for_a_large_one_that_gave_up() {
    let (env, world) = on_fake(4);
    let engine = world.engine().clone();
    world.fake().unwrap().close_gate();
    fill(&world);
    let free = world.hot().objects_free_bytes();
    assert!(free > 16 << 10, "{free} bytes are free");
    let large = engine.clone();
    env.spawn("large", Box::pin(async move { assert!(put(&large, 900, LENGTH).await.is_err()) }));
    env.block_on(env.sleep(Duration::from_secs(5)));
    // Behind the large one at first; alone from the tenth second on, five before its own deadline.
    env.block_on(put(&engine, 901, 4096)).unwrap();
}

#[test]
fn a_reader_delays_the_put_that_needs_its_memory_and_no_more() {
    let (env, world) = world(5, BelowOptions::None);
    let engine = world.engine().clone();
    let length = world.hot().objects_bytes_max() as usize - (64 << 10);
    env.block_on(put(&engine, 1, length)).unwrap();
    let hit = env.block_on(engine.get(NAMESPACE, &key_of(1))).unwrap().unwrap();
    let reader = {
        let env = env.clone();
        async move {
            env.sleep(Duration::from_secs(2)).await;
            check_object(&hit.object, 1, 1, length);
            drop(hit);
        }
    };
    env.spawn("reader", Box::pin(reader));
    let began = env.now();
    env.block_on(put(&engine, 2, length)).unwrap();
    let waited = env.now().since(began);
    assert!(waited >= Duration::from_secs(2) && waited < Duration::from_millis(2100), "{waited:?}");
    assert_eq!(engine.stats().dropped_by_reason["evicted"], 1);
}

#[test]
fn a_flush_waits_for_writes_in_flight() {
    let (env, mut world) = on_fake(6);
    let engine = world.engine().clone();
    world.fake().unwrap().close_gate();
    for key in 0..10 {
        env.block_on(put(&engine, key, LENGTH)).unwrap();
    }
    let flushed = Arc::new(Mutex::new(0));
    for _ in 0..2 {
        let (engine, flushed) = (engine.clone(), Arc::clone(&flushed));
        let task = async move {
            engine.flush().await.unwrap();
            *flushed.lock() += 1;
        };
        env.spawn("flush", Box::pin(task));
        env.block_on(env.sleep(Duration::from_secs(1)));
    }
    assert_eq!(*flushed.lock(), 0);
    world.fake().unwrap().open_gate();
    env.block_on(env.sleep(Duration::from_secs(1)));
    assert_eq!(*flushed.lock(), 2);
    drop(engine);
    restart(&env, &mut world, Crash::Power);
    for key in 0..10 {
        let hit = env.block_on(world.engine().get(NAMESPACE, &key_of(key))).unwrap().unwrap();
        check_object(&hit.object, key, 1, LENGTH);
    }
}

/// An engine told the removal of an object that was just being written to nobody but its index: the write ended, the
/// process was killed before the engine had settled it, and the key was there again.
#[test]
fn a_removal_holds_however_far_the_demotion_was() {
    for seed in 0..200 {
        for below in [BelowOptions::Fake(FakeOptions::default()), BelowOptions::Log { disks: 1, segments: 8 }]
        {
            let (env, mut world) = world(seed, below);
            let mut dice = Dice::new(seed);
            let engine = world.engine().clone();
            env.block_on(put(&engine, 1, 5000)).unwrap();
            let flusher = engine.clone();
            env.spawn("flush", Box::pin(async move { drop(flusher.flush().await) }));
            env.block_on(env.sleep(Duration::from_micros(dice.below(1500))));
            assert!(env.block_on(engine.remove(NAMESPACE, &key_of(1))).unwrap());
            env.block_on(env.sleep(Duration::from_micros(dice.below(300))));
            drop(engine);
            restart(&env, &mut world, Crash::Kill);
            assert_eq!(world.engine().exists(NAMESPACE, &[&key_of(1)]), [false], "seed {seed}");
        }
    }
}

/// A key that is removed and put again while a read of it is under way. Returns the read's answer, and the world.
fn overtaken(overwritten: bool) -> (SimEnv, World, Hit) {
    let (env, world) = on_fake(8);
    let (engine, fake) = (world.engine().clone(), world.fake().unwrap().clone());
    env.block_on(put(&engine, 1, LENGTH)).unwrap();
    let generation = env.block_on(engine.get(NAMESPACE, &key_of(1))).unwrap().unwrap().object.generation;
    env.block_on(engine.drop_hot()).unwrap();
    fake.slow_next_read(Duration::from_secs(1));
    let answer = Arc::new(Mutex::new(None));
    let task = {
        let (engine, answer) = (engine.clone(), Arc::clone(&answer));
        async move { *answer.lock() = engine.get(NAMESPACE, &key_of(1)).await.unwrap() }
    };
    env.spawn("reader", Box::pin(task));
    env.block_on(async {
        env.sleep(Duration::from_millis(10)).await;
        assert!(engine.remove(NAMESPACE, &key_of(1)).await.unwrap());
        engine.put(NAMESPACE, &key_of(1), &body_of(1, 2, LENGTH)).await.unwrap();
        engine.drop_hot().await.unwrap();
        if overwritten {
            fake.overwrite(generation);
        }
        env.sleep(Duration::from_secs(2)).await;
    });
    let hit = answer.lock().take().expect("the key was there when the read began and when it ended");
    (env, world, hit)
}

/// A read whose place was given to others found wrong bytes there, and called the key missing that lay elsewhere.
#[test]
fn a_read_that_was_overtaken_looks_again() {
    let (_, world, hit) = overtaken(true);
    check_object(&hit.object, 1, 2, LENGTH);
    let stats = world.engine().stats();
    assert_eq!((stats.stale_reads, stats.corrupt_reads, stats.misses), (1, 0, 0));
}

/// A read that brought an older write made it resident in the row of the newer one.
#[test]
fn a_read_that_was_overtaken_does_not_become_resident() {
    let (env, world, hit) = overtaken(false);
    check_object(&hit.object, 1, 1, LENGTH);
    let hit = env.block_on(world.engine().get(NAMESPACE, &key_of(1))).unwrap().unwrap();
    check_object(&hit.object, 1, 2, LENGTH);
}

#[test]
fn memory_is_what_its_parts_add_up_to_and_comes_back() {
    let (env, world) = world(7, BelowOptions::None);
    let engine = world.engine().clone();
    let mut expected = 0;
    for key in 0..40 {
        let length = 1 + key as usize * 1777;
        env.block_on(put(&engine, key, length)).unwrap();
        expected += world.hot().object_bytes(length, key_of(key).len());
        assert_eq!(world.hot_usage().objects_bytes, expected);
    }
    assert_eq!(env.block_on(put(&engine, 3, 1)).unwrap(), Put::AlreadyStored);
    assert_eq!(world.hot_usage().objects_bytes, expected, "a put of a present key keeps nothing");
    let held = env.block_on(engine.get(NAMESPACE, &key_of(39))).unwrap().unwrap();
    assert!(env.block_on(engine.remove(NAMESPACE, &key_of(39))).unwrap());
    assert_eq!(world.hot_usage().objects_bytes, expected, "a reader keeps what it holds");
    drop(held);
    expected -= world.hot().object_bytes(1 + 39 * 1777, key_of(39).len());
    assert_eq!(world.hot_usage().objects_bytes, expected);
    env.block_on(engine.drop_hot()).unwrap();
    assert_eq!((world.hot_usage().objects_bytes, engine.stats().entries), (0, 0));
    assert_eq!(engine.stats().dropped_by_reason["evicted"], 39);
}
