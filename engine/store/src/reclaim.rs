//! Reclaim: the tier proposes a segment, the engine says what of it is written again, and only then is it free.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ebbtide_core::{
    Candidate, Charge, Fingerprint, Identity, Intent, Location, Object, ReadRequest, Result, Tier,
    VictimRecord, Victims,
};
use ebbtide_mem::BufMut;
use tracing::warn;

use crate::engine::Inner;
use crate::index::{Row, State};
use crate::reasons::Gone;
use crate::wait::Signal;

/// Bytes of values that are read again at once.
const REINSERT_BATCH_BYTES: u64 = 8 << 20;

/// The pause after a reclaim that freed nothing.
const RETRY_PAUSE: Duration = Duration::from_millis(10);

/// The task that keeps segments free.
#[derive(Default)]
pub(crate) struct Reclaimer {
    /// Raised when the tier may want a segment back.
    pub(crate) signal: Signal,
}

impl Reclaimer {
    pub(crate) fn is_idle(&self) -> bool {
        self.signal.is_idle()
    }
}

/// A live row of a segment under reclaim.
struct Keeper {
    fingerprint: Fingerprint,
    row: Row,
    record: VictimRecord,
}

impl Inner {
    pub(crate) fn start_reclaimer(self: &Arc<Self>) {
        let (weak, reclaimer, mover) =
            (Arc::downgrade(self), Arc::clone(&self.reclaimer), Arc::clone(&self.mover));
        let task = async move {
            loop {
                reclaimer.signal.raised().await;
                let Some(inner) = weak.upgrade() else { break };
                inner.reclaim_while_wanted().await;
                reclaimer.signal.rest();
                mover.ended.ring();
            }
        };
        self.env.spawn("reclaimer", Box::pin(task));
    }

    /// Also while the engine closes: what it writes down then may need the room.
    async fn reclaim_while_wanted(&self) {
        let tier = &self.tiers[0];
        while tier.wants_reclaim() {
            let freed = match tier.reclaim().await {
                Ok(Some(victims)) => self.reclaim_segment(tier, victims).await.map(|()| true),
                Ok(None) => Ok(false),
                Err(error) => Err(error),
            };
            match freed {
                Ok(true) => continue,
                Ok(false) => {}
                Err(error) => warn!(%error, "a segment could not be reclaimed"),
            }
            // Writers that wait for room wait for this task alone, so it tries again as long as there are some.
            if self.mover.backlog_bytes() == 0 {
                return;
            }
            self.env.sleep(RETRY_PAUSE).await;
        }
    }

    async fn reclaim_segment(&self, tier: &Arc<dyn Tier>, victims: Victims) -> Result<()> {
        let keepers = self.sort_out(tier, victims.records);
        let mut rest = keepers.as_slice();
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = |keeper: &&Keeper| {
                bytes += keeper.record.length;
                bytes <= REINSERT_BATCH_BYTES
            };
            let count = rest.iter().take_while(fits).count().max(1);
            let (batch, after) = rest.split_at(count);
            self.reinsert(tier, batch).await;
            rest = after;
        }
        tier.release(victims.segment).await
    }

    /// Drops what is not worth keeping; returns what is, most read first, within what re-insertion may write.
    fn sort_out(&self, tier: &Arc<dyn Tier>, records: Vec<VictimRecord>) -> Vec<Keeper> {
        let mut live: Vec<_> = records.into_iter().filter_map(|record| self.live(tier, record)).collect();
        live.sort_by_key(|keeper| std::cmp::Reverse(keeper.row.reads));
        let mut budget = self.reinsert_budget(tier);
        live.retain(|keeper| {
            let candidate = Candidate { length: keeper.record.length, reads: keeper.row.reads };
            if self.placement.reinsert(&candidate, budget) && candidate.length <= budget {
                budget -= candidate.length;
                return true;
            }
            self.drop_below(tier, keeper, Gone::Reclaimed);
            false
        });
        live
    }

    /// The row of a record, when the row points to it and its object is not in DRAM: such an object becomes dirty again here.
    fn live(&self, tier: &Arc<dyn Tier>, record: VictimRecord) -> Option<Keeper> {
        let fingerprint = self.fingerprinter.fingerprint(record.namespace, &record.key);
        let mut shard = self.index.lock_for(fingerprint);
        let slot = shard.find(fingerprint)?;
        let row = *shard.row(slot);
        if row.below() != Some(record.location) || row.generation != record.generation {
            return None;
        }
        if shard.hot(slot).is_none() {
            return Some(Keeper { fingerprint, row, record });
        }
        // In one step: the copy below is gone, and the one in DRAM is known to be the only one.
        shard.row_mut(slot).set_below(None);
        if let Some(hot) = shard.hot_mut(slot) {
            debug_assert_eq!(hot.state, State::Clean);
            hot.state = State::Dirty;
        }
        drop(shard);
        tier.free(record.location, record.length);
        None
    }

    fn reinsert_budget(&self, tier: &Arc<dyn Tier>) -> u64 {
        let usage = tier.usage();
        let share = self.settings.reinsert_share_max.clamp(0.0, 0.9);
        // Of all value bytes written, `share` may be written again: r <= share * (a + r).
        let most = usage.admitted_value_bytes as f64 * share / (1.0 - share);
        (most as u64).saturating_sub(usage.reinserted_value_bytes)
    }

    /// Drops a row whose only copy lies in the segment under reclaim, unless it moved on meanwhile.
    fn drop_below(&self, tier: &Arc<dyn Tier>, keeper: &Keeper, why: Gone) {
        let mut shard = self.index.lock_for(keeper.fingerprint);
        let Some(slot) = shard.find(keeper.fingerprint) else { return };
        let row = *shard.row(slot);
        if row.below() != keeper.row.below() || row.generation != keeper.row.generation {
            return;
        }
        if let Some(hot) = shard.hot_mut(slot) {
            // It was read into DRAM since.
            hot.state = State::Dirty;
            shard.row_mut(slot).set_below(None);
            drop(shard);
        } else {
            shard.remove(slot);
            drop(shard);
            self.departures.record(keeper.fingerprint, row.length(), why, self.env.wall_ms());
        }
        tier.free(keeper.record.location, row.length());
    }

    /// Reads a batch of values and writes them again elsewhere; what cannot be read or written is dropped and counted.
    async fn reinsert(&self, tier: &Arc<dyn Tier>, batch: &[Keeper]) {
        let (mut requests, mut charges) = (Vec::new(), Vec::new());
        for keeper in batch {
            let (into, charge) = self.memory_for_reinsert(keeper.record.length as usize);
            charges.push(charge);
            requests.push(ReadRequest {
                location: keeper.record.location,
                length: keeper.record.length,
                identity: Identity::new(keeper.record.namespace, &keeper.record.key, keeper.row.generation),
                sum: keeper.row.sum,
                verify: true,
                into,
            });
        }
        let done = tier.get_many(requests).await;
        let (mut objects, mut kept) = (Vec::new(), Vec::new());
        for ((keeper, done), charge) in batch.iter().zip(done).zip(charges) {
            match (done.result, done.buf, done.sums) {
                (Ok(()), Some(value), Some(sums)) => {
                    let VictimRecord { namespace, key, generation, .. } = keeper.record.clone();
                    objects.push(self.object_pool.keep(Object {
                        value: value.freeze(),
                        charge,
                        namespace,
                        key,
                        generation,
                        sums,
                    }));
                    kept.push(keeper);
                }
                (Err(error), ..) => {
                    warn!(%error, object = %keeper.record.key.escape_ascii(), "a live object could not be read again");
                    self.counters.corrupt_reads.fetch_add(1, Ordering::Relaxed);
                    self.drop_below(tier, keeper, Gone::Corrupt);
                }
                _ => self.drop_below(tier, keeper, Gone::Reclaimed),
            }
        }
        let results = tier.put_many(objects, Intent::Reinsert).await;
        let mut overtaken = Vec::new();
        for (keeper, result) in kept.into_iter().zip(results) {
            match result {
                Ok(location) if self.relocate(tier, keeper, location) => {}
                Ok(_) => {
                    let VictimRecord { namespace, key, generation, .. } = &keeper.record;
                    overtaken.push((*namespace, key.clone(), *generation));
                }
                Err(error) => {
                    warn!(%error, object = %keeper.record.key.escape_ascii(), "a live object could not be written again");
                    self.drop_below(tier, keeper, Gone::DemoteFailed);
                }
            }
        }
        // A removal overtook the write: its tombstone may be older than the new copy, so it is said once more.
        if !overtaken.is_empty()
            && let Err(error) = tier.bury(overtaken).await
        {
            warn!(%error, "a removal could not be written; the object may come back with a restart");
        }
    }

    /// Points a row to where its value was written again; false when the row is gone, or points elsewhere by now.
    fn relocate(&self, tier: &Arc<dyn Tier>, keeper: &Keeper, location: Location) -> bool {
        let mut shard = self.index.lock_for(keeper.fingerprint);
        let stands = shard.find(keeper.fingerprint).filter(|slot| {
            let row = shard.row(*slot);
            row.below() == keeper.row.below() && row.generation == keeper.row.generation
        });
        if let Some(slot) = stands {
            shard.row_mut(slot).set_below(Some(location));
        }
        drop(shard);
        let dead = if stands.is_some() { keeper.record.location } else { location };
        tier.free(dead, keeper.record.length);
        self.counters.reinserted.fetch_add(u64::from(stands.is_some()), Ordering::Relaxed);
        stands.is_some()
    }

    /// Staging when there is some; reclaim must go on when there is none, so the heap otherwise.
    fn memory_for_reinsert(&self, length: usize) -> (BufMut, Charge) {
        self.staging
            .try_take(length, 0)
            .unwrap_or_else(|| (BufMut::heap(length), self.counters.heap_charge(length as u64)))
    }
}
