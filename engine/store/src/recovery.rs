//! Start and stop: rows from what the tiers hold, and back to a checkpoint.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ebbtide_core::{
    CheckpointRow, Error, Fingerprint, Generation, Location, Recovered, RecoverySummary, Result,
};
use hashbrown::HashTable;

use crate::engine::{Engine, Inner};
use crate::index::Row;
use crate::mover::WRITE_ROUNDS_MAX;

/// What recovery met that must go once everything was seen.
#[derive(Default)]
struct Aftermath {
    /// Copies that another copy of the same object, or a later write, supersedes.
    superseded: Vec<(Location, u64)>,
    /// Removals: the latest removed write of each key.
    removed: HashTable<(Fingerprint, Generation)>,
}

impl Engine {
    /// Finds what the tiers below hold. Once, before anything else; lookups work from its return on.
    ///
    /// Errors: those of the tier. Rows are entered as they are met, so that a failed recovery leaves an engine to drop.
    pub async fn recover(&self) -> Result<RecoverySummary> {
        let inner = &self.inner;
        let Some(tier) = inner.tiers.first() else { return Ok(RecoverySummary::default()) };
        let mut aftermath = Aftermath::default();
        let summary = {
            let mut sink = |found: Recovered<'_>| inner.enter(found, &mut aftermath);
            tier.recover(&mut sink).await?
        };
        for (fingerprint, generation) in &aftermath.removed {
            let mut shard = inner.index.lock_for(*fingerprint);
            let removed = shard.find(*fingerprint).filter(|slot| shard.row(*slot).generation <= *generation);
            if let Some(slot) = removed {
                let (row, _) = shard.remove(slot);
                aftermath.superseded.extend(row.below().map(|at| (at, row.length())));
            }
        }
        for (location, length) in aftermath.superseded {
            tier.free(location, length);
        }
        if tier.wants_reclaim() {
            inner.reclaimer.signal.raise();
        }
        Ok(summary)
    }

    /// Ends the engine cleanly: what is only in DRAM is written below, then a checkpoint of all rows.
    ///
    /// Puts are refused as Closed from the call on; reads should have ended. Unavailable when something could not be written:
    /// the rest is safe all the same, and the next start reads footers instead of the checkpoint.
    pub async fn close(&self) -> Result<()> {
        let inner = &self.inner;
        if inner.closed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let Some(tier) = inner.tiers.first() else { return Ok(()) };
        let mut written = Ok(());
        for _ in 0..WRITE_ROUNDS_MAX {
            written = inner.write_down().await;
            self.quiesce().await;
            // Reclaim may have taken copies away meanwhile whose objects are in DRAM. Written again, they may cost others
            // theirs; what is not in DRAM any more cannot lose its copy without a count.
            match inner.dirty_objects(u64::MAX) {
                (0, _) => break,
                (left, _) if written.is_ok() => {
                    inner.evict(u64::MAX);
                    written =
                        Err(Error::unavailable(format!("{left} objects lost their copies below again")));
                }
                _ => break,
            }
        }
        let rows = Rows { inner: Arc::clone(inner), shard: 0 };
        tier.close(Box::new(rows)).await?;
        written
    }
}

/// The rows for a checkpoint, a shard at a time.
struct Rows {
    inner: Arc<Inner>,
    shard: usize,
}

impl Iterator for Rows {
    type Item = Vec<CheckpointRow>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.shard == self.inner.index.shards() {
            return None;
        }
        let shard = self.inner.index.lock(self.shard);
        self.shard += 1;
        let entry = |row: &Row| {
            let location = row.below()?;
            let length = row.length();
            Some(CheckpointRow {
                fingerprint: row.fingerprint,
                generation: row.generation,
                length,
                sum: row.sum,
                location,
            })
        };
        Some(shard.all().filter_map(entry).collect())
    }
}

impl Inner {
    fn enter(&self, found: Recovered<'_>, aftermath: &mut Aftermath) {
        let (fingerprint, generation, length, sum, location) = match found {
            Recovered::Record { namespace, key, generation, length, sum, location } => {
                (self.fingerprinter.fingerprint(namespace, key), generation, length, sum, location)
            }
            Recovered::Row(row) => (row.fingerprint, row.generation, row.length, row.sum, row.location),
            Recovered::Tombstone { namespace, key, generation } => {
                return aftermath.bury(self.fingerprinter.fingerprint(namespace, key), generation);
            }
        };
        if length == 0 || length > 1 << 32 {
            return;
        }
        let mut shard = self.index.lock_for(fingerprint);
        let mut row = Row::new(fingerprint, generation, length, sum);
        row.set_below(Some(location));
        let Some(slot) = shard.find(fingerprint) else {
            shard.insert(row);
            return;
        };
        let present = *shard.row(slot);
        // Of two copies of one write either is right; the one met later lies in the younger segment.
        let loser =
            if generation >= present.generation { std::mem::replace(shard.row_mut(slot), row) } else { row };
        aftermath.superseded.extend(loser.below().map(|at| (at, loser.length())));
    }
}

impl Aftermath {
    fn bury(&mut self, fingerprint: Fingerprint, generation: Generation) {
        match self.removed.find_mut(fingerprint.low, |(other, _)| *other == fingerprint) {
            Some((_, latest)) => *latest = generation.max(*latest),
            None => {
                self.removed
                    .insert_unique(fingerprint.low, (fingerprint, generation), |(other, _)| other.low);
            }
        }
    }
}
