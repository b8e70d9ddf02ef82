//! A store as its user holds it: calls that park their caller.

use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use ebbtide_core::{Error, HotTier, NamespaceId, RecoverySummary, Result, block_on};
use ebbtide_device::DirectDevice;
use ebbtide_engine::{Engine, Explanation, Hit, Put, Served};

use crate::bare::Bare;
use crate::config::Config;
use crate::env::Threads;
use crate::owner::{LOCK_NAME, Owner};
use crate::status::{BUILT_WITH, Status};

/// How far a long start has come.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// What is being done: "prefault", "preallocate", "recover".
    pub stage: &'static str,
    /// Bytes done.
    pub done: u64,
    /// Bytes to do.
    pub total: u64,
}

/// A store, embedded in this process. Cloning shares it; all calls park their caller.
///
/// Dropping the last clone without [`close`](Self::close) leaves the directory as a kill would: what was flushed is found again.
#[derive(Clone)]
pub struct Store {
    shared: Arc<Shared>,
}

/// In the order in which they end: tasks first, ownership last.
pub(crate) struct Shared {
    pub(crate) engine: Engine,
    pub(crate) namespace: NamespaceId,
    pub(crate) config: Config,
    pub(crate) recovery: RecoverySummary,
    pub(crate) hot: Arc<dyn HotTier>,
    pub(crate) devices: Vec<Arc<dyn DirectDevice>>,
    pub(crate) degraded: Vec<String>,
    pub(crate) _threads: Threads,
    pub(crate) owner: Option<Owner>,
}

/// A reading of all counters: the engine's, and what the store has on disk.
#[derive(Clone, Debug)]
pub struct Stats {
    /// The engine's counters.
    pub engine: ebbtide_engine::Stats,
    /// Bytes of every file of the store, reserved and preallocated space included.
    pub accounted_bytes: u64,
}

impl Deref for Stats {
    type Target = ebbtide_engine::Stats;

    fn deref(&self) -> &Self::Target {
        &self.engine
    }
}

impl Store {
    pub(crate) fn new(shared: Shared) -> Self {
        Store { shared: Arc::new(shared) }
    }

    /// Stores `value` under `key`; waits for room. See [`Engine::put`].
    pub fn put(&self, key: &[u8], value: &[u8]) -> Result<Put> {
        let engine = &self.shared.engine;
        match engine.try_put(self.shared.namespace, key, value) {
            Some(answer) => answer,
            None => block_on(engine.put(self.shared.namespace, key, value)),
        }
    }

    /// The object under `key`, or `None`. What is in DRAM is lent, not copied. See [`Engine::get_many`].
    pub fn get(&self, key: &[u8]) -> Result<Option<Hit>> {
        let engine = &self.shared.engine;
        match engine.try_get(self.shared.namespace, key) {
            Some(answer) => answer,
            None => block_on(engine.get(self.shared.namespace, key)),
        }
    }

    /// Copies the value under `key` to the front of `into`. See [`Engine::get_into`].
    pub fn get_into(&self, key: &[u8], into: &mut [u8]) -> Result<Option<(usize, Served)>> {
        self.shared.engine.get_into(self.shared.namespace, key, into)
    }

    /// The objects under `keys`, those below DRAM read in one batch; result i belongs to key i. See [`Engine::get_many`].
    pub fn get_many(&self, keys: &[&[u8]]) -> Vec<Result<Option<Hit>>> {
        block_on(self.shared.engine.get_many(self.shared.namespace, keys))
    }

    /// Whether each key is present. No side effects.
    pub fn exists(&self, keys: &[&[u8]]) -> Vec<bool> {
        self.shared.engine.exists(self.shared.namespace, keys)
    }

    /// Marks present keys as used, without moving a byte; answers which are present.
    pub fn touch(&self, keys: &[&[u8]]) -> Vec<bool> {
        self.shared.engine.touch(self.shared.namespace, keys)
    }

    /// Removes an object from every tier; true when there was one. See [`Engine::remove`].
    pub fn remove(&self, key: &[u8]) -> Result<bool> {
        block_on(self.shared.engine.remove(self.shared.namespace, key))
    }

    /// Makes everything that was acknowledged before the call durable. See [`Engine::flush`].
    pub fn flush(&self) -> Result<()> {
        block_on(self.shared.engine.flush())
    }

    /// Returns when nothing moves between tiers, and nothing is about to.
    pub fn quiesce(&self) {
        block_on(self.shared.engine.quiesce());
    }

    /// Empties DRAM into the tier below. See [`Engine::drop_hot`].
    pub fn drop_hot(&self) -> Result<()> {
        block_on(self.shared.engine.drop_hot())
    }

    /// Says where the object under `key` is, or why it is not.
    pub fn explain(&self, key: &[u8]) -> Explanation {
        self.shared.engine.explain(self.shared.namespace, key)
    }

    /// A reading of all counters.
    pub fn stats(&self) -> Stats {
        let engine = self.shared.engine.stats();
        let tiers: u64 = engine.tiers.iter().map(|tier| tier.accounted_bytes).sum();
        let lock = self.shared.owner.as_ref().map_or(0, Owner::bytes);
        Stats { engine, accounted_bytes: tiers + lock }
    }

    /// What the store is made of, and what of it is degraded.
    pub fn status(&self) -> Status {
        let shared = &self.shared;
        let stats = shared.engine.stats();
        let mut degraded = shared.degraded.clone();
        degraded.extend(stats.hot.degraded.iter().cloned());
        stats.tiers.iter().for_each(|tier| degraded.extend(tier.degraded.iter().cloned()));
        degraded.dedup();
        Status {
            version: env!("CARGO_PKG_VERSION"),
            built_with: BUILT_WITH,
            namespace: shared.config.namespace.clone(),
            tiers: shared.engine.tier_infos().into_iter().zip(stats.tiers).collect(),
            hot: stats.hot,
            recovery: shared.recovery.clone(),
            degraded,
            foreign_files: self.foreign_files(),
        }
    }

    /// Opens a file beside the store to be driven bare on the store's ring, for benches. Unsupported without an SSD tier.
    pub fn bare(&self, path: &Path, bytes: u64) -> Result<Bare> {
        match self.shared.devices.first() {
            Some(device) => Bare::open(device, Arc::clone(&self.shared.hot), path, bytes),
            None => Err(Error::unsupported("bare: the store has no SSD tier")),
        }
    }

    /// The store's own file, to be read bare on the store's ring, for benches: the same extents, as warm or cold for whatever
    /// lies under the device as the store's own reads find them. Unsupported without an SSD tier.
    pub fn bare_own(&self) -> Result<Bare> {
        match self.shared.devices.first() {
            Some(device) => Ok(Bare::own(device, Arc::clone(&self.shared.hot))),
            None => Err(Error::unsupported("bare: the store has no SSD tier")),
        }
    }

    /// Stops the store cleanly: what is only in DRAM is written down, then a checkpoint. See [`Engine::close`].
    pub fn close(self) -> Result<()> {
        block_on(self.shared.engine.close())
    }

    fn foreign_files(&self) -> Vec<String> {
        let Some(owner) = &self.shared.owner else { return Vec::new() };
        let Some(entries) = owner.path().parent().and_then(|dir| std::fs::read_dir(dir).ok()) else {
            return Vec::new();
        };
        let ours = |name: &str| name == LOCK_NAME || crate::open::is_ours(&self.shared.config, name);
        let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
        let mut foreign: Vec<_> = names.filter(|name| !ours(name)).collect();
        foreign.sort();
        foreign
    }
}
