//! The read pass: DRAM starts empty, and each round sets a slice of batched gets beside slices of the bare device.

use std::sync::atomic::{AtomicUsize, Ordering};

use ebbtide_node::{Hit, Served, Store};

use super::bare::{BareArm, Flush, Way};
use super::ledger::Ledger;
use super::options::{Plan, Reads};
use super::write::{STORE, parts, slice_objects};
use crate::clock::{self, Stopwatch};
use crate::dice::{Dice, Zipf};
use crate::diskstats::DiskStats;
use crate::fail::Outcome;
use crate::progress::{Progress, Unit};
use crate::stat::{Latencies, Rounds};
use crate::threads::on_threads;

/// Single gets for the latencies, at most, and the time for them.
const SAMPLE_MAX: usize = 512;
const SAMPLE_SECONDS_MAX: f64 = 3.0;

/// What a read pass measured.
pub(crate) struct ReadBack {
    pub(crate) rounds: Rounds<3>,
    /// Of the store's slices.
    pub(crate) seconds: f64,
    pub(crate) slice_seconds: Vec<f64>,
    pub(crate) below_bytes: u64,
    pub(crate) dram_bytes: u64,
    /// What the device read during the store's slices, by the kernel's count.
    pub(crate) device_bytes: Option<u64>,
}

/// Which keys are read, and in which order.
pub(crate) struct Keys {
    dice: Dice,
    /// Ranks to objects, and how ranks are drawn.
    popular: Option<(Vec<u64>, Zipf)>,
}

impl Keys {
    pub(crate) fn new(plan: &Plan) -> Self {
        let mut dice = Dice::new(plan.run ^ 0x5eed);
        let popular = (plan.options.reads == Reads::Zipf).then(|| {
            let mut objects: Vec<u64> = (0..plan.objects).collect();
            dice.shuffle(&mut objects);
            (objects, Zipf::new(plan.objects, plan.options.zipf))
        });
        Keys { dice, popular }
    }

    /// As many keys as there are objects: each once, or as they are drawn.
    fn pass(&mut self, objects: u64) -> Vec<u64> {
        match &self.popular {
            Some(popular) => (0..objects).map(|_| draw(popular, &mut self.dice)).collect(),
            None => {
                let mut order: Vec<u64> = (0..objects).collect();
                self.dice.shuffle(&mut order);
                order
            }
        }
    }

    /// Reads `count` popular objects of those written so far, one by one, and checks them.
    pub(crate) fn read_between(&mut self, store: &Store, ledger: &Ledger, count: u64) {
        let Some(popular) = &self.popular else { return };
        for _ in 0..count {
            let index = draw(popular, &mut self.dice);
            if index < ledger.written() {
                check(ledger, index, store.get(&ledger.key(index)));
            }
        }
    }
}

fn draw((objects, zipf): &(Vec<u64>, Zipf), dice: &mut Dice) -> u64 {
    objects[zipf.draw(dice) as usize]
}

type Answer = ebbtide_core::Result<Option<Hit>>;

/// What a read pass works with.
pub(crate) struct ReadPass<'a> {
    pub(crate) store: &'a Store,
    pub(crate) bare: &'a mut BareArm,
    pub(crate) plan: &'a Plan,
    pub(crate) ledger: &'a Ledger,
    pub(crate) keys: &'a mut Keys,
    pub(crate) disk: Option<&'a DiskStats>,
    pub(crate) progress: &'a Progress,
}

impl ReadPass<'_> {
    /// Reads all objects `times` times over, each time from an empty DRAM tier.
    pub(crate) fn run(self, times: usize) -> Outcome<ReadBack> {
        let plan = self.plan;
        self.progress.stage("read", times as u64 * plan.total_bytes(), Unit::Bytes);
        let mut back = ReadBack {
            rounds: Rounds::new(),
            seconds: 0.0,
            slice_seconds: Vec::new(),
            below_bytes: 0,
            dram_bytes: 0,
            device_bytes: self.disk.map(|_| 0),
        };
        self.bare.read_own()?;
        for _ in 0..times {
            self.store.drop_hot()?;
            self.store.quiesce();
            let keys = self.keys.pass(plan.objects);
            for (rest, slice) in parts(0..plan.objects, self.slice_objects(), plan.read_rounds_min()) {
                let rest = &keys[rest.start as usize..rest.end as usize];
                let slice = &keys[slice.start as usize..slice.end as usize];
                for piece in rest.chunks((plan.read_slice_bytes_max() / plan.value).max(1) as usize) {
                    self.store_slice(piece, &mut back);
                }
                let mut rates = [0.0; 3];
                for arm in Rounds::<3>::order(back.rounds.len()) {
                    rates[arm] = if arm == STORE {
                        let read = self.store_slice(slice, &mut back);
                        back.slice_seconds.push(read.seconds);
                        read.below_bytes as f64 / read.seconds
                    } else {
                        self.bare.slice(Way::Read, slice.len() as u64 * plan.value, Flush::Never)?
                    };
                }
                back.rounds.push(rates);
            }
        }
        Ok(back)
    }

    /// How many objects a slice should have: no more than what may be held of results.
    fn slice_objects(&self) -> u64 {
        let held_max = self.plan.read_slice_bytes_max() / self.plan.value;
        slice_objects(self.plan.value, self.bare.sweeps.reads.best_rate()).min(held_max)
    }

    fn store_slice(&self, keys: &[u64], back: &mut ReadBack) -> Slice {
        let before = self.disk.map(DiskStats::moved);
        let read = read_slice(self.store, self.ledger, self.plan, keys);
        let device_bytes = self.disk.zip(before).map(|(disk, at)| disk.moved().since(at).read_bytes);
        back.count(&read, device_bytes);
        self.progress.add(keys.len() as u64 * self.plan.value);
        read
    }
}

impl ReadBack {
    fn count(&mut self, read: &Slice, device_bytes: Option<u64>) {
        self.seconds += read.seconds;
        self.below_bytes += read.below_bytes;
        self.dram_bytes += read.dram_bytes;
        self.device_bytes = self.device_bytes.zip(device_bytes).map(|(sum, more)| sum + more);
    }
}

/// How a slice of reads went.
pub(crate) struct Slice {
    pub(crate) seconds: f64,
    pub(crate) cpu_seconds: f64,
    pub(crate) below_bytes: u64,
    pub(crate) dram_bytes: u64,
    pub(crate) below_objects: u64,
}

/// Reads `keys` in batches by all threads of the plan. The clock stops when all have their results; only then is every byte
/// compared, and only then are the results let go.
pub(crate) fn read_slice(store: &Store, ledger: &Ledger, plan: &Plan, keys: &[u64]) -> Slice {
    let next = AtomicUsize::new(0);
    let reader = || {
        let mut answers: Vec<(u64, Answer)> = Vec::with_capacity(keys.len() / plan.threads + plan.batch);
        loop {
            let start = next.fetch_add(plan.batch, Ordering::Relaxed);
            let Some(batch) = keys.get(start..).filter(|rest| !rest.is_empty()) else { return answers };
            let batch = &batch[..batch.len().min(plan.batch)];
            let names: Vec<_> = batch.iter().map(|index| ledger.key(*index)).collect();
            let names: Vec<&[u8]> = names.iter().map(|name| name.as_slice()).collect();
            answers.extend(batch.iter().copied().zip(store.get_many(&names)));
        }
    };
    let watch = Stopwatch::start();
    let answers = on_threads(plan.threads, reader);
    let (seconds, cpu_seconds) = (watch.seconds(), watch.cpu_seconds());
    let mut slice = Slice { seconds, cpu_seconds, below_bytes: 0, dram_bytes: 0, below_objects: 0 };
    for (_, answer) in answers.iter().flatten() {
        let Ok(Some(hit)) = answer else { continue };
        match hit.tier {
            Served::Dram => slice.dram_bytes += hit.object.length(),
            Served::Below(_) => {
                slice.below_bytes += hit.object.length();
                slice.below_objects += 1;
            }
        }
    }
    if plan.options.verify.is_on() {
        let answers = std::sync::Mutex::new(answers);
        on_threads(plan.threads, || {
            let mine = answers.lock().ok().and_then(|mut answers| answers.pop()).unwrap_or_default();
            mine.into_iter().for_each(|(index, answer)| check(ledger, index, answer));
        });
    }
    slice
}

/// Compares an answer with what was put.
pub(crate) fn check(ledger: &Ledger, index: u64, answer: Answer) {
    match answer {
        Ok(Some(hit)) => ledger.verify(index, &hit.object),
        Ok(None) => ledger.absent(index),
        Err(error) => ledger.failed(index, &error),
    }
}

/// Latencies of single gets on one thread: from below DRAM, and then of those that are resident by now.
pub(crate) fn sample_latencies(
    store: &Store,
    ledger: &Ledger,
    plan: &Plan,
) -> Outcome<(Latencies, Latencies)> {
    store.drop_hot()?;
    store.quiesce();
    let mut dice = Dice::new(plan.run ^ 0x1a7e);
    // No more than half of DRAM, so that what was read first is still resident in the second round.
    let count = SAMPLE_MAX.min((plan.dram.0 / 2 / plan.value) as usize).min(plan.objects as usize);
    let keys: Vec<u64> = (0..count).map(|_| dice.below(plan.objects)).collect();
    let (mut dram, mut below) = (Latencies::new(), Latencies::new());
    for _ in 0..2 {
        let watch = Stopwatch::start();
        for index in &keys {
            let key = ledger.key(*index);
            let start = clock::now();
            let answer = store.get(&key);
            let time = clock::now().duration_since(start);
            match answer.as_ref().ok().and_then(Option::as_ref).map(|hit| hit.tier) {
                Some(Served::Dram) => dram.record(time),
                Some(Served::Below(_)) => below.record(time),
                None => {}
            }
            check(ledger, *index, answer);
            if watch.seconds() > SAMPLE_SECONDS_MAX {
                break;
            }
        }
    }
    Ok((dram, below))
}
