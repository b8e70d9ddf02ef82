//! What the tests of the log stand on: a device that loses power, an `Env` on one thread, and a small engine that keeps
//! rows in a map.

#![allow(dead_code, unreachable_pub, missing_docs, reason = "each test uses its share")]

pub mod device;
pub mod env;

use std::collections::BTreeMap;
use std::sync::Arc;

use device::{Dice, MemDevice};
use ebbtide_core::{
    BlockDevice, BlockSums, Budget, CheckpointRow, Fingerprint, Generation, Identity, Intent, Location,
    Medium, NamespaceId, Object, ReadRequest, Recovered, RecoverySummary, Result, SharedObject, Tier,
};
use ebbtide_media::{BlockMedium, BlockOptions};
use ebbtide_mem::BufMut;
use ebbtide_tier_log::{LogOptions, LogTier};
use env::LabEnv;

pub const NAMESPACE: NamespaceId = NamespaceId([0xab; 16]);
pub const MIB: usize = 1 << 20;

/// A row as the engine keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    pub generation: Generation,
    pub length: u64,
    pub sum: u64,
    pub location: Location,
}

/// A tier with the rows that point into it.
pub struct Lab {
    pub env: Arc<LabEnv>,
    pub tier: LogTier,
    pub rows: BTreeMap<Vec<u8>, Row>,
    pub summary: RecoverySummary,
    pub writes: u64,
    budget: Budget,
}

/// The bytes of an object: a function of its key and generation.
pub fn body(key: &[u8], generation: Generation, length: usize) -> Vec<u8> {
    let seed =
        key.iter().fold(generation.0 | 1, |seed, byte| seed.wrapping_mul(31).wrapping_add(u64::from(*byte)));
    let mut dice = Dice(seed);
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        bytes.extend_from_slice(&dice.next().to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

pub fn object(budget: &Budget, key: &[u8], generation: Generation, length: usize) -> SharedObject {
    let mut value = BufMut::heap(length);
    let sums = Identity::new(NAMESPACE, key, generation).fill(&mut value, &body(key, generation, length));
    let charge = budget.try_charge(0).unwrap();
    SharedObject::new(Object {
        value: value.freeze(),
        charge,
        namespace: NAMESPACE,
        key: key.into(),
        generation,
        sums,
    })
}

pub fn open_media(env: &LabEnv, devices: &[Arc<MemDevice>]) -> Result<Vec<Arc<dyn Medium>>> {
    let mut media: Vec<Arc<dyn Medium>> = Vec::new();
    for (index, device) in devices.iter().enumerate() {
        let device: Arc<dyn BlockDevice> = device.clone();
        let options = BlockOptions {
            capacity_bytes: device.info().capacity_bytes,
            segment_bytes: None,
            store: Some([7; 16]),
            index: index as u16,
            count: devices.len() as u16,
        };
        media.push(Arc::new(env.run(BlockMedium::open(device, options, env))?));
    }
    Ok(media)
}

impl Lab {
    /// Opens the tier on `devices` and lets it recover.
    pub fn open(devices: &[Arc<MemDevice>], seed: u64) -> Result<Lab> {
        let env = LabEnv::new(seed);
        let media = open_media(&env, devices)?;
        let budget = Budget::new(u64::MAX);
        let headers = (0..4).map(|_| (BufMut::heap(64 << 10), budget.try_charge(65536).unwrap())).collect();
        let options = LogOptions { name: "ssd".into(), env: env.clone(), headers };
        let tier = LogTier::open(media, options)?;
        let mut rows: BTreeMap<Vec<u8>, Row> = BTreeMap::new();
        let mut removed = false;
        let mut from_checkpoint = BTreeMap::new();
        let summary = env.run(tier.recover(&mut |found| match found {
            Recovered::Record { namespace, key, generation, length, sum, location } => {
                assert_eq!(namespace, NAMESPACE);
                assert!(!removed, "removals are told last");
                let row = Row { generation, length, sum, location };
                let loser = match rows.get(key) {
                    Some(held) if held.generation >= generation => Some(row),
                    _ => rows.insert(key.to_vec(), row),
                };
                loser.into_iter().for_each(|row| tier.free(row.location, row.length));
            }
            Recovered::Row(row) => {
                let CheckpointRow { fingerprint, generation, length, sum, location } = row;
                let row = Row { generation, length, sum, location };
                assert!(from_checkpoint.insert(fingerprint, row).is_none());
            }
            Recovered::Tombstone { key, generation, .. } => {
                removed = true;
                if rows.get(key).is_some_and(|row| row.generation <= generation) {
                    let row = rows.remove(key).unwrap();
                    tier.free(row.location, row.length);
                }
            }
        }))?;
        // The lab's fingerprints are the keys themselves, of up to 16 bytes.
        for (fingerprint, row) in from_checkpoint {
            let mut key = [fingerprint.high.to_be_bytes(), fingerprint.low.to_be_bytes()].concat();
            key.truncate(16 - key.iter().rev().take_while(|byte| **byte == 0).count());
            rows.insert(key, row);
        }
        Ok(Lab { env, tier, rows, summary, writes: 0, budget })
    }

    pub fn object(&self, key: &[u8], generation: Generation, length: usize) -> SharedObject {
        object(&self.budget, key, generation, length)
    }

    /// The same object as a read without checksums makes it.
    pub fn unsummed(&self, object: &Object) -> SharedObject {
        SharedObject::new(Object {
            value: object.value.clone(),
            charge: self.budget.try_charge(0).unwrap(),
            namespace: object.namespace,
            key: object.key.clone(),
            generation: object.generation,
            sums: BlockSums::default(),
        })
    }

    pub fn next_generation(&mut self) -> Generation {
        self.writes += 1;
        Generation::new(self.tier.info().incarnation, self.writes)
    }

    /// Puts objects as one batch; a present key gets a new version.
    pub fn put(&mut self, sizes: &[(&[u8], usize)]) -> Result<Vec<Generation>> {
        let mut objects = Vec::new();
        for (key, length) in sizes {
            let generation = self.next_generation();
            objects.push(self.object(key, generation, *length));
        }
        let results = self.env.run(self.tier.put_many(objects.clone(), Intent::Demote));
        let mut generations = Vec::new();
        let mut failure = None;
        for (object, result) in objects.iter().zip(results) {
            match result {
                Ok(location) => {
                    generations.push(object.generation);
                    self.set_row(object, location);
                }
                Err(error) => failure = Some(error),
            }
        }
        failure.map_or(Ok(generations), Err)
    }

    pub fn set_row(&mut self, object: &Object, location: Location) {
        let row = Row { generation: object.generation, length: object.length(), sum: object.sum(), location };
        if let Some(old) = self.rows.insert(object.key.to_vec(), row) {
            self.tier.free(old.location, old.length);
        }
    }

    pub fn read(&self, key: &[u8], row: Row) -> Result<Vec<u8>> {
        let request = ReadRequest {
            location: row.location,
            length: row.length,
            identity: Identity::new(NAMESPACE, key, row.generation),
            sum: row.sum,
            verify: true,
            into: BufMut::heap(row.length as usize),
        };
        let done = self.env.run(self.tier.get_many(vec![request])).pop().unwrap();
        done.result?;
        let sums = done.sums.unwrap();
        let buf = done.buf.unwrap().freeze();
        assert_eq!(sums, Identity::new(NAMESPACE, key, row.generation).sums_of(&buf));
        Ok(buf.to_vec())
    }

    /// Reads every row and compares; returns how many could not be read.
    pub fn check(&self) -> usize {
        let mut lost = 0;
        for (key, row) in &self.rows {
            match self.read(key, *row) {
                Ok(bytes) => assert!(bytes == body(key, row.generation, row.length as usize), "wrong bytes"),
                Err(_) => lost += 1,
            }
        }
        lost
    }

    pub fn remove(&mut self, key: &[u8]) -> Result<Option<Generation>> {
        let Some(row) = self.rows.remove(key) else { return Ok(None) };
        let removal = vec![(NAMESPACE, Box::from(key), row.generation)];
        let buried = self.env.run(self.tier.bury(removal));
        self.tier.free(row.location, row.length);
        buried.map(|()| Some(row.generation))
    }

    /// Reclaims one segment; rows for which `keep` says so are written again, the others dropped. Returns the dropped keys.
    pub fn reclaim(&mut self, mut keep: impl FnMut(&[u8]) -> bool) -> Result<Option<Vec<Vec<u8>>>> {
        let Some(victims) = self.env.run(self.tier.reclaim())? else { return Ok(None) };
        let mut dropped = Vec::new();
        for record in &victims.records {
            let key = record.key.to_vec();
            let Some(row) = self.rows.get(&key).copied() else { continue };
            if (row.location, row.generation) != (record.location, record.generation) {
                continue;
            }
            if !keep(&key) {
                self.rows.remove(&key);
                self.tier.free(row.location, row.length);
                dropped.push(key);
                continue;
            }
            self.read(&key, row)?;
            let object = self.object(&key, row.generation, row.length as usize);
            let location =
                self.env.run(self.tier.put_many(vec![object.clone()], Intent::Reinsert)).pop().unwrap()?;
            self.set_row(&object, location);
        }
        self.env.run(self.tier.release(victims.segment))?;
        Ok(Some(dropped))
    }

    pub fn flush(&self) -> Result<()> {
        self.env.run(self.tier.flush())
    }

    pub fn close(&mut self) -> Result<()> {
        let row = |(key, row): (&Vec<u8>, &Row)| {
            let mut padded = [0; 16];
            padded[..key.len()].copy_from_slice(key);
            let word = |at: usize| u64::from_be_bytes(padded[at..at + 8].try_into().unwrap());
            CheckpointRow {
                fingerprint: Fingerprint { high: word(0), low: word(8) },
                generation: row.generation,
                length: row.length,
                sum: row.sum,
                location: row.location,
            }
        };
        let rows: Vec<Vec<CheckpointRow>> =
            self.rows.iter().map(row).collect::<Vec<_>>().chunks(7).map(<[_]>::to_vec).collect();
        self.env.run(self.tier.close(Box::new(rows.into_iter())))
    }

    /// What rows say is live is what the tier counts as live.
    pub fn assert_counts(&self) {
        let usage = self.tier.usage();
        let bytes: u64 = self.rows.values().map(|row| row.length.next_multiple_of(4096)).sum();
        assert_eq!(usage.live_bytes, bytes, "live bytes");
    }
}
