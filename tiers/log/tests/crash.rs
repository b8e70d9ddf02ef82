//! Power cuts at every write of a workload that puts, overwrites, removes, flushes and reclaims.
//!
//! What holds afterwards: what a flush covered is found and reads right, what was removed and flushed is gone, nothing that
//! reads has wrong bytes, and the tier that was opened works and closes.

#![allow(clippy::unwrap_used, reason = "a test may end here")]

mod lab;

use std::collections::BTreeMap;
use std::sync::Arc;

use ebbtide_core::{Generation, Tier};
use lab::device::{Dice, MemDevice};
use lab::{Lab, MIB};

const KEYS: u64 = 40;

/// What may be said of a key after a cut.
#[derive(Clone, Copy, Debug, Default)]
struct Promise {
    /// The version that a flush covered; `None` when it covered none or a removal.
    flushed: Option<Generation>,
    /// True when it was written anew since: the flushed version or a later one is found.
    overwritten: bool,
    /// True when it was removed or dropped since: it need not be found.
    dropped: bool,
    /// Versions up to this one were removed, and a flush covered that.
    gone: Generation,
    /// Removed up to this one, not flushed yet.
    going: Generation,
}

struct Workload {
    lab: Lab,
    devices: Vec<Arc<MemDevice>>,
    dice: Dice,
    promises: BTreeMap<Vec<u8>, Promise>,
}

impl Workload {
    fn new(devices: Vec<Arc<MemDevice>>, seed: u64) -> Workload {
        let lab = Lab::open(&devices, seed).unwrap();
        Workload { lab, devices, dice: Dice(seed), promises: BTreeMap::new() }
    }

    fn key(&mut self) -> Vec<u8> {
        format!("key {}", self.dice.roll(KEYS)).into_bytes()
    }

    fn promise(&mut self, key: &[u8]) -> &mut Promise {
        self.promises.entry(key.to_vec()).or_default()
    }

    /// One step; an error means that the power is gone.
    fn step(&mut self) -> ebbtide_core::Result<()> {
        while self.lab.tier.wants_reclaim() {
            let keys: Vec<_> = self.lab.rows.keys().cloned().collect();
            // Rows move or go; what is dropped need not be found any more.
            let seed = self.dice.next();
            let mut dice = Dice(seed);
            let before = self.lab.rows.clone();
            let result = self.lab.reclaim(|_| dice.roll(3) > 0);
            for key in keys {
                if self.lab.rows.get(&key) != before.get(&key) && !self.lab.rows.contains_key(&key) {
                    self.promise(&key).dropped = true;
                }
            }
            if result?.is_none() {
                break;
            }
        }
        match self.dice.roll(20) {
            0..=11 => {
                let mut batch = Vec::new();
                for _ in 0..=self.dice.roll(3) {
                    let key = self.key();
                    if batch.iter().any(|(other, _)| *other == key) {
                        continue;
                    }
                    let length = match self.dice.roll(10) {
                        0 => 300_000 + self.dice.roll(300_000),
                        1..=4 => 1 + self.dice.roll(5000),
                        _ => 10_000 + self.dice.roll(100_000),
                    };
                    self.promise(&key).overwritten = true;
                    batch.push((key, length as usize));
                }
                let batch: Vec<_> = batch.iter().map(|(key, length)| (key.as_slice(), *length)).collect();
                self.lab.put(&batch)?;
            }
            12..=14 => {
                let key = self.key();
                self.promise(&key).dropped = true;
                if let Some(generation) = self.lab.remove(&key)? {
                    self.promise(&key).going = generation;
                }
            }
            15..=17 => {
                self.lab.flush()?;
                for promise in self.promises.values_mut() {
                    *promise = Promise { gone: promise.going, going: promise.going, ..Promise::default() };
                }
                for (key, row) in self.lab.rows.clone() {
                    self.promise(&key).flushed = Some(row.generation);
                }
            }
            _ => self.lab.env.settle(),
        }
        Ok(())
    }

    fn check_after(&self, images: Vec<Vec<u8>>, seed: u64) {
        let devices: Vec<_> = images.into_iter().map(|image| MemDevice::of(image, seed)).collect();
        let mut lab = Lab::open(&devices, seed).unwrap();
        for (key, promise) in &self.promises {
            let found = lab.rows.get(key).copied();
            let reads = found.map(|row| lab.read(key, row));
            if let (Some(row), Some(Ok(bytes))) = (found, &reads) {
                assert!(*bytes == lab::body(key, row.generation, row.length as usize), "wrong bytes");
                assert!(row.generation > promise.gone, "{} came back", key.escape_ascii());
            }
            if let (Some(flushed), false) = (promise.flushed, promise.dropped) {
                let row = found.unwrap_or_else(|| panic!("{} was flushed and is lost", key.escape_ascii()));
                let right = row.generation == flushed || (promise.overwritten && row.generation > flushed);
                assert!(right, "{} is not as flushed", key.escape_ascii());
                reads.unwrap().unwrap();
            }
        }
        lab.assert_counts();
        // What stands works: a put, a clean close, and all of it is there again.
        let readable: Vec<_> = lab.rows.iter().filter(|(key, row)| lab.read(key, **row).is_ok()).collect();
        let readable: BTreeMap<_, _> = readable.into_iter().map(|(key, row)| (key.clone(), *row)).collect();
        while lab.tier.wants_reclaim() && lab.reclaim(|_| false).unwrap().is_some() {}
        lab.put(&[(b"after", 70_000)]).unwrap();
        lab.close().unwrap();
        let rows = lab.rows.clone();
        let again = Lab::open(&devices, seed + 1).unwrap();
        assert_eq!(again.rows, rows);
        let expected = rows.keys().filter(|key| readable.contains_key(*key) || *key == b"after").count();
        assert_eq!(again.rows.len() - again.check(), expected);
    }
}

fn cut_everywhere(media: usize, bytes: usize, steps: u64, seed: u64, stride: u64) {
    let run = |cut: Option<u64>| {
        let devices: Vec<_> = (0..media).map(|_| MemDevice::of(vec![0; bytes], seed)).collect();
        let mut work = Workload::new(devices, seed);
        if let Some(cut) = cut {
            work.devices.iter().for_each(|device| device.cut_after(cut));
        }
        for _ in 0..steps {
            if work.step().is_err() {
                break;
            }
        }
        work
    };
    let whole = run(None);
    assert_eq!(whole.lab.check(), 0);
    assert!(whole.lab.tier.usage().segments_reclaimed > 3, "too polite");
    assert!(whole.lab.tier.usage().reinserted_value_bytes > 0, "too polite");
    let writes = whole.devices.iter().map(|device| device.journal().len() as u64).max().unwrap();
    for cut in (0..writes).step_by(stride as usize) {
        let work = run(Some(cut + seed % stride));
        let durable = work.devices.iter().map(|device| device.durable()).collect();
        work.check_after(durable, cut + 1);
        let torn = work.devices.iter().map(|device| device.after_power_cut(cut)).collect();
        work.check_after(torn, cut + 2);
    }
}

#[test]
fn a_cut_at_any_write_loses_nothing_flushed() {
    for seed in 1..=3 {
        cut_everywhere(1, 9 * MIB, 200, seed, 9);
    }
}

#[test]
fn a_cut_of_two_media_loses_nothing_flushed() {
    for seed in 11..=12 {
        cut_everywhere(2, 7 * MIB, 250, seed, 13);
    }
}

/// The same bytes on the devices from the same seed: what the simulator stands on.
#[test]
fn same_seed_same_bytes() {
    let run = || {
        let mut work = Workload::new(vec![MemDevice::of(vec![0; 11 * MIB], 5)], 5);
        for _ in 0..150 {
            work.step().unwrap();
        }
        work.devices[0].image()
    };
    assert!(run() == run());
}
