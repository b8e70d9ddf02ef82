//! A workload from a seed: overlapping operations on a store that crashes, and after each step what must hold.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use ebbtide_core::{Env, HotTier, NamespaceId, Object};
use ebbtide_device::Faults;
use ebbtide_engine::{Engine, Policy, Whereabouts};
use parking_lot::Mutex;

use crate::body::{body_of, is_body, key_of};
use crate::faketier::FakeOptions;
use crate::model::{Counts, Model, whereabouts};
use crate::world::{BelowOptions, Crash, World, WorldOptions};
use crate::{Dice, SimEnv, SimOptions};

/// The namespace of all objects here.
pub const NAMESPACE: NamespaceId = NamespaceId([0xeb; 16]);

/// Clients at work at a time.
const CLIENTS_MAX: u32 = 12;
/// Virtual time that an idle store may take to come to rest.
const REST_MAX: Duration = Duration::from_secs(120);

/// What a run does. All of it follows from its seed, but a test may change some.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The seed.
    pub seed: u64,
    /// Operations.
    pub steps: u32,
    /// Keys.
    pub keys: u32,
    /// The shortest and the longest value.
    pub lengths: (u64, u64),
    /// The world.
    pub world: WorldOptions,
    /// Whether tasks run in the order in which they were woken.
    pub fifo: bool,
    /// Of a thousand steps, how many cut the power, kill, and restart.
    pub crashes_permille: u64,
}

impl Plan {
    /// The plan of `seed`: sizes, devices and policy vary; nothing fails but by crashes.
    pub fn new(seed: u64, steps: u32) -> Self {
        let mut dice = Dice::new(seed ^ 0x91a4);
        let (disks, segments) = (*dice.pick(&[1, 1, 2]), dice.between(8, 20) as u32);
        let below = match dice.below(10) {
            0..2 => BelowOptions::Fake(FakeOptions { segments, ..FakeOptions::default() }),
            _ if disks == 2 => BelowOptions::Log { disks, segments: segments.div_ceil(2).max(6) },
            _ => BelowOptions::Log { disks, segments },
        };
        let world = WorldOptions {
            // Of the segments some are in reserve or being written; the rest holds what DRAM holds, and more.
            dram_bytes: dice.between(3, u64::from(segments) - 4) << 19,
            staging_bytes: 5 << 20,
            below,
            policy: *dice.pick(&[Policy::Lru, Policy::S3Fifo]),
            // Slow is not a fault: one operation in so many is overtaken by everything else.
            faults: {
                let (spikes, ms) = *dice.pick(&[(0.03, 30), (0.03, 30), (0.15, 200)]);
                Faults { spikes, spike: Duration::from_millis(ms), ..Faults::default() }
            },
        };
        Plan {
            seed,
            steps,
            keys: dice.between(20, 250) as u32,
            lengths: *dice.pick(&[
                (1, 16 << 10),
                (1, 120 << 10),
                (1, 600 << 10),
                (30 << 10, 600 << 10),
                (100 << 10, 600 << 10),
                (1, 1000 << 10),
            ]),
            world,
            fifo: dice.permille(200),
            crashes_permille: *dice.pick(&[0, 15, 15, 60]),
        }
    }

    /// The same with devices that fail, flip bits and are slow at times.
    pub fn faulty(seed: u64, steps: u32) -> Self {
        let mut plan = Plan::new(seed, steps);
        let mut dice = Dice::new(seed ^ 0xfa17);
        let mut rate = |most: u64| dice.below(most) as f64 / 1000.0;
        plan.world.faults = Faults {
            read_error: rate(30),
            write_error: rate(30),
            torn_write: 0.0,
            flush_error: rate(20),
            bit_flip: rate(20),
            ..plan.world.faults
        };
        if let BelowOptions::Fake(options) = &mut plan.world.below {
            options.put_failures_permille = 40;
        }
        plan
    }

    fn is_faulty(&self) -> bool {
        let fails =
            matches!(&self.world.below, BelowOptions::Fake(options) if options.put_failures_permille > 0);
        let Faults { read_error, write_error, flush_error, bit_flip, .. } = self.world.faults;
        fails || read_error + write_error + flush_error + bit_flip > 0.0
    }
}

/// What a run came to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// See [`SimEnv::fingerprint`].
    pub fingerprint: u64,
    /// Counts of all runs of the process together.
    pub counts: Counts,
    /// Crashes and clean restarts.
    pub restarts: u32,
    /// Segments that were reclaimed.
    pub reclaimed: u64,
    /// Objects that reclaim wrote again.
    pub reinserted: u64,
    /// Reads served from below.
    pub hits_below: u64,
    /// Puts that waited.
    pub puts_waited: u64,
    /// Reads that met a row that had moved on.
    pub stale_reads: u64,
    /// Objects dropped for any reason but removal.
    pub evicted: u64,
}

/// Runs `plan`. Panics when something is not as it must be.
pub fn run(plan: &Plan) -> Outcome {
    let options = if plan.fifo { SimOptions::fifo(plan.seed) } else { SimOptions::shuffled(plan.seed) };
    let env = SimEnv::new(SimOptions { time_max: REST_MAX * 4, ..options });
    let mut driver = Driver {
        world: World::new(env.clone(), plan.world.clone()),
        model: Arc::new(Mutex::new(Model::new(plan.lengths, plan.is_faulty()))),
        clients: Arc::default(),
        dice: Dice::new(plan.seed ^ 0xd21e),
        plan,
        outcome: Outcome::default(),
        env,
    };
    driver.start();
    for _ in 0..plan.steps {
        driver.step();
    }
    driver.finish()
}

struct Driver<'p> {
    plan: &'p Plan,
    env: SimEnv,
    world: World,
    model: Arc<Mutex<Model>>,
    clients: Arc<AtomicU32>,
    dice: Dice,
    outcome: Outcome,
}

/// What a client task needs.
#[derive(Clone)]
struct Client {
    env: SimEnv,
    engine: Engine,
    model: Arc<Mutex<Model>>,
}

impl Driver<'_> {
    fn start(&mut self) {
        let world = &mut self.world;
        let started = self.env.block_on(async { world.start().await });
        started.unwrap_or_else(|error| panic!("the store does not start: {error:?}"));
    }

    fn step(&mut self) {
        if self.dice.permille(self.plan.crashes_permille) {
            return match self.dice.below(3) {
                0 => self.crash(Crash::Kill),
                1 => self.crash(Crash::Power),
                _ => self.restart(),
            };
        }
        match self.dice.below(1000) {
            0..10 => self.check(),
            10..20 => self.check_empty(),
            _ => (0..self.dice.between(1, 4)).for_each(|_| self.operate()),
        }
        let pause = if self.dice.permille(30) { 20_000 } else { self.dice.below(400) };
        self.env.block_on(self.env.sleep(Duration::from_micros(pause)));
    }

    /// Starts one client, waiting first when many are at work.
    fn operate(&mut self) {
        let clients = Arc::clone(&self.clients);
        self.env.block_on(wait_under(&self.env, &clients, CLIENTS_MAX));
        let client = Client {
            env: self.env.clone(),
            engine: self.world.engine().clone(),
            model: Arc::clone(&self.model),
        };
        let key = self.key();
        let choice = self.dice.below(100);
        let many: Vec<u32> = (0..self.dice.between(1, 8)).map(|_| self.key()).collect();
        let hold = Duration::from_micros(self.dice.log_uniform(1, 60_000));
        clients.fetch_add(1, Ordering::Relaxed);
        let task = async move {
            match choice {
                0..46 => client.put(key).await,
                46..50 => client.try_put(key),
                50..67 => client.get(key, Duration::ZERO).await,
                67..72 => client.get(key, hold).await,
                72..79 => client.get_many(&many, hold).await,
                79..91 => client.remove(key).await,
                91..94 => client.exists(&many),
                94..96 => client.touch(&many),
                96..99 => client.flush().await,
                _ => client.drop_hot().await,
            }
            drop(client);
            clients.fetch_sub(1, Ordering::Relaxed);
        };
        self.env.spawn("client", Box::pin(task));
    }

    /// Some keys are asked for more than others.
    fn key(&mut self) -> u32 {
        let keys = u64::from(self.plan.keys);
        let few = (keys / 8).max(1);
        if self.dice.permille(400) { self.dice.below(few) as u32 } else { self.dice.below(keys) as u32 }
    }

    fn crash(&mut self, crash: Crash) {
        self.take_counts();
        self.model.lock().note_standing(self.world.engine());
        self.world.crash(crash);
        self.clients = Arc::default();
        self.start();
        self.model.lock().restarted_after(crash, self.world.engine());
        self.after_start();
        if crash == Crash::Power {
            // Whatever a torn disk made the store believe shows when it is read.
            self.read_all();
            self.check();
        }
    }

    fn restart(&mut self) {
        self.rest();
        self.take_counts();
        let engine = self.world.engine().clone();
        let closed = self.env.block_on(engine.close());
        self.model.lock().note_standing(&engine);
        if let Err(error) = &closed {
            assert!(self.plan.is_faulty(), "close failed: {error:?} while the tier below works");
        }
        drop(engine);
        self.world.stop();
        assert_eq!(self.env.waiting(), Vec::<&str>::new(), "tasks outlive the store");
        self.start();
        match closed {
            Ok(()) => self.model.lock().reopened(self.world.engine()),
            Err(_) => self.model.lock().restarted_after(Crash::Kill, self.world.engine()),
        }
        self.after_start();
    }

    fn after_start(&mut self) {
        self.outcome.restarts += 1;
        if self.dice.permille(500) {
            self.check();
        }
        if self.dice.permille(300) {
            self.read_all();
        }
    }

    /// Waits for all clients and for the store to come to rest.
    fn rest(&mut self) {
        let (env, clients, engine) =
            (self.env.clone(), Arc::clone(&self.clients), self.world.engine().clone());
        self.env.block_on(async move {
            wait_under(&env, &clients, 1).await;
            engine.quiesce().await;
        });
    }

    fn read_all(&mut self) {
        let keys = self.model.lock().keys();
        let client = Client {
            env: self.env.clone(),
            engine: self.world.engine().clone(),
            model: Arc::clone(&self.model),
        };
        self.env.block_on(async move {
            for key in keys {
                client.get(key, Duration::ZERO).await;
            }
        });
    }

    /// At rest, every account agrees with a recount.
    fn check(&mut self) {
        self.rest();
        let (engine, hot) = (self.world.engine(), self.world.hot_usage());
        let stats = engine.stats();
        let (mut entries, mut resident, mut hot_bytes, mut live_bytes) = (0, 0, 0, 0);
        for key in self.model.lock().keys() {
            let explanation = whereabouts(engine, key);
            let Some(length) = explanation.length else { continue };
            entries += 1;
            let (in_dram, below) = match explanation.whereabouts {
                Whereabouts::Dram { below, .. } => (true, below.is_some()),
                _ => (false, true),
            };
            resident += u64::from(in_dram);
            if in_dram {
                hot_bytes += self.world.hot().object_bytes(length as usize, key_of(key).len());
            }
            if below {
                live_bytes += self.world.tier().map_or(0, |tier| tier.stored_bytes(length));
            }
        }
        let seed = self.plan.seed;
        assert_eq!(stats.entries, entries, "seed {seed}: rows");
        assert_eq!(stats.hot_objects, resident, "seed {seed}: objects in DRAM");
        assert_eq!(hot.objects_bytes, hot_bytes, "seed {seed}: bytes of objects in DRAM");
        assert_eq!(hot.staging_bytes, self.world.staging_floor(), "seed {seed}: bytes of staging");
        assert_eq!(
            (stats.backlog_bytes, stats.puts_waiting_bytes),
            (0, 0),
            "seed {seed}: nothing is on its way"
        );
        for tier in &stats.tiers {
            assert_eq!(tier.live_bytes, live_bytes, "seed {seed}: live bytes below");
            let capacity = self.world.tier().map_or(0, |tier| tier.info().capacity_bytes);
            assert!(tier.used_bytes <= capacity, "seed {seed}: {} of {capacity} bytes used", tier.used_bytes);
        }
        assert!(
            self.plan.is_faulty() || stats.corrupt_reads == 0,
            "seed {seed}: corrupt reads, and no disk was"
        );
        let counts = self.model.lock().counts;
        let gone: u64 = stats.dropped_by_reason.values().sum();
        assert_eq!(
            counts.recovered + stats.puts,
            stats.entries + gone,
            "seed {seed}: all that was is there or counted"
        );
        assert_eq!((stats.puts, stats.puts_present), (counts.stored, counts.present), "seed {seed}: puts");
        let hits = stats.hits_dram + stats.hits_below.iter().sum::<u64>();
        assert_eq!(
            (hits, stats.misses),
            (counts.hits, counts.misses),
            "seed {seed}: each read is counted once"
        );
        assert_eq!(stats.puts_refused, counts.full, "seed {seed}: refused puts");
    }

    /// With DRAM emptied, none of its memory is in use.
    fn check_empty(&mut self) {
        self.rest();
        let engine = self.world.engine().clone();
        let dropped = self.env.block_on(engine.drop_hot());
        assert!(dropped.is_ok() || self.plan.is_faulty(), "drop_hot failed: {dropped:?}");
        self.check();
        if dropped.is_ok() {
            let usage = self.world.hot_usage();
            assert_eq!(usage.objects_bytes, 0, "seed {}: memory leaked", self.plan.seed);
        }
    }

    fn take_counts(&mut self) {
        let stats = self.world.engine().stats();
        let counts = self.model.lock().counts;
        let outcome = &mut self.outcome;
        let sum = &mut outcome.counts;
        sum.stored += counts.stored;
        sum.present += counts.present;
        sum.full += counts.full;
        sum.hits += counts.hits;
        sum.misses += counts.misses;
        sum.errors += counts.errors;
        sum.unlucky += counts.unlucky;
        sum.flushes += counts.flushes;
        sum.flush_errors += counts.flush_errors;
        sum.remove_errors += counts.remove_errors;
        outcome.reclaimed += stats.tiers.iter().map(|tier| tier.segments_reclaimed).sum::<u64>();
        outcome.reinserted += stats.reinserted;
        outcome.hits_below += stats.hits_below.iter().sum::<u64>();
        outcome.puts_waited += stats.puts_waited;
        outcome.stale_reads += stats.stale_reads;
        outcome.evicted += stats.evicted();
    }

    fn finish(mut self) -> Outcome {
        self.check_empty();
        self.restart();
        self.read_all();
        self.check_empty();
        self.take_counts();
        self.outcome.fingerprint = self.env.fingerprint();
        self.outcome
    }
}

async fn wait_under(env: &SimEnv, clients: &AtomicU32, most: u32) {
    while clients.load(Ordering::Relaxed) >= most {
        env.sleep(Duration::from_micros(50)).await;
    }
}

impl Client {
    async fn put(&self, key: u32) {
        let (version, length) = self.model.lock().begin_put(key);
        let value = body_of(key, version, length);
        let result = self.engine.put(NAMESPACE, &key_of(key), &value).await;
        self.model.lock().end_put(key, version, result);
    }

    fn try_put(&self, key: u32) {
        let (version, length) = self.model.lock().begin_put(key);
        let value = body_of(key, version, length);
        let result = self.engine.try_put(NAMESPACE, &key_of(key), &value);
        let mut model = self.model.lock();
        match result {
            Some(result) => model.end_put(key, version, result),
            None => model.withdraw_put(key, version),
        }
    }

    async fn get(&self, key: u32, hold: Duration) {
        let began = self.model.lock().begin();
        let result = self.engine.get(NAMESPACE, &key_of(key)).await;
        match result {
            Ok(Some(hit)) => {
                self.model.lock().found(key, began, &hit.object);
                self.hold(&hit.object, key, hold).await;
            }
            Ok(None) => self.model.lock().missed(key, began, &self.engine),
            Err(error) => self.model.lock().failed(key, &error),
        }
    }

    /// Keeps the object for a while; its bytes must stay what they are.
    async fn hold(&self, object: &Object, key: u32, time: Duration) {
        if time.is_zero() {
            return;
        }
        let before = object.value.to_vec();
        self.env.sleep(time).await;
        let mut at = 0;
        for span in object.value.spans() {
            assert!(before[at..at + span.len()] == *span, "key {key}: bytes changed under a reader");
            at += span.len();
        }
    }

    async fn get_many(&self, keys: &[u32], hold: Duration) {
        let began = self.model.lock().begin();
        let names: Vec<Vec<u8>> = keys.iter().map(|key| key_of(*key)).collect();
        let names: Vec<&[u8]> = names.iter().map(Vec::as_slice).collect();
        let results = self.engine.get_many(NAMESPACE, &names).await;
        assert_eq!(results.len(), keys.len());
        for (key, result) in keys.iter().zip(&results) {
            match result {
                Ok(Some(hit)) => self.model.lock().found(*key, began, &hit.object),
                Ok(None) => self.model.lock().missed(*key, began, &self.engine),
                Err(error) => self.model.lock().failed(*key, error),
            }
        }
        self.env.sleep(hold).await;
    }

    async fn remove(&self, key: u32) {
        let began = self.model.lock().begin_remove(key);
        let result = self.engine.remove(NAMESPACE, &key_of(key)).await;
        self.model.lock().end_remove(key, began, result);
    }

    fn exists(&self, keys: &[u32]) {
        let began = self.model.lock().begin();
        let names: Vec<Vec<u8>> = keys.iter().map(|key| key_of(*key)).collect();
        let names: Vec<&[u8]> = names.iter().map(Vec::as_slice).collect();
        for (key, there) in keys.iter().zip(self.engine.exists(NAMESPACE, &names)) {
            match there {
                true => self.model.lock().explain_presence(*key, began),
                false => self.model.lock().explain_absence(*key, began, &self.engine),
            }
        }
    }

    fn touch(&self, keys: &[u32]) {
        let names: Vec<Vec<u8>> = keys.iter().map(|key| key_of(*key)).collect();
        let names: Vec<&[u8]> = names.iter().map(Vec::as_slice).collect();
        let there = self.engine.touch(NAMESPACE, &names);
        assert_eq!(there, self.engine.exists(NAMESPACE, &names));
    }

    async fn flush(&self) {
        let flush = self.model.lock().begin_flush(&self.engine);
        match self.engine.flush().await {
            Ok(()) => self.model.lock().flushed(&flush, &self.engine),
            Err(error) => self.model.lock().flush_failed(&error),
        }
    }

    async fn drop_hot(&self) {
        if let Err(error) = self.engine.drop_hot().await {
            self.model.lock().flush_failed(&error);
        }
    }
}

/// Whether `object` is what key and version say; for tests that keep no model.
pub fn check_object(object: &Object, key: u32, version: u32, length: usize) {
    assert!(is_body(object, key, version, length), "key {key}: wrong bytes");
}
