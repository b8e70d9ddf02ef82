//! Writing objects below: chosen ahead of need, in batches, several in flight; and the two calls that wait for it.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ebbtide_core::{Cost, Error, Intent, Location, Rank, Result};
use futures_util::future::{Either, select};
use parking_lot::Mutex;
use tracing::warn;

use crate::engine::{Dropped, End, Engine, Inner, Outgoing, start_writing};
use crate::index::{Place, State};
use crate::reasons::Gone;
use crate::settings::Settings;
use crate::wait::{Bell, Signal};

/// How often a batch that takes long looks whether reclaim should run.
const ROOM_CHECK: Duration = Duration::from_millis(20);

/// Rounds of writing dirty objects in one flush.
pub(crate) const WRITE_ROUNDS_MAX: usize = 64;

/// What waits to be written below, and what is being written.
#[derive(Default)]
pub(crate) struct Mover {
    /// Raised when there may be something to choose or to write.
    pub(crate) signal: Signal,
    /// Rung when a batch has ended.
    pub(crate) ended: Bell,
    backlog_bytes: AtomicU64,
    /// Held while dirty objects are marked and queued, so that two flushes never see each other's half.
    marking: Mutex<()>,
    /// Why the last object that could not be written was not.
    last_failure: Mutex<String>,
    backlog: Mutex<Backlog>,
}

#[derive(Default)]
struct Backlog {
    waiting: VecDeque<Outgoing>,
    /// The number of the first in `waiting`; objects are numbered as they come.
    first: u64,
    /// The first numbers of batches that are being written.
    unfinished: BTreeSet<u64>,
    in_flight_bytes: u64,
}

struct Batch {
    first: u64,
    bytes: u64,
    outgoing: Vec<Outgoing>,
}

impl Mover {
    /// Bytes that wait or are being written.
    pub(crate) fn backlog_bytes(&self) -> u64 {
        self.backlog_bytes.load(Ordering::Acquire)
    }

    /// Whether more may be chosen.
    pub(crate) fn has_room(&self, settings: &Settings) -> bool {
        self.backlog_bytes() < settings.demote_bytes_in_flight_max
    }

    /// Queues objects that were marked as being written.
    pub(crate) fn add(&self, outgoing: Vec<Outgoing>) {
        if outgoing.is_empty() {
            return;
        }
        let bytes = outgoing.iter().map(|out| out.object.charge.bytes()).sum();
        self.backlog_bytes.fetch_add(bytes, Ordering::AcqRel);
        self.backlog.lock().waiting.extend(outgoing);
        self.signal.raise();
    }

    /// Takes the next batch, unless enough is in flight.
    fn next_batch(&self, settings: &Settings) -> Option<Batch> {
        let mut backlog = self.backlog.lock();
        if backlog.in_flight_bytes >= settings.demote_bytes_in_flight_max {
            return None;
        }
        let (mut count, mut bytes, mut value_bytes) = (0, 0, 0);
        for out in &backlog.waiting {
            if count > 0 && value_bytes + out.object.length() > settings.demote_batch_bytes {
                break;
            }
            count += 1;
            bytes += out.object.charge.bytes();
            value_bytes += out.object.length();
        }
        if count == 0 {
            return None;
        }
        let first = backlog.first;
        backlog.first += count as u64;
        backlog.unfinished.insert(first);
        backlog.in_flight_bytes += bytes;
        Some(Batch { first, bytes, outgoing: backlog.waiting.drain(..count).collect() })
    }

    fn end_batch(&self, first: u64, bytes: u64) {
        let mut backlog = self.backlog.lock();
        backlog.unfinished.remove(&first);
        backlog.in_flight_bytes -= bytes;
        drop(backlog);
        self.backlog_bytes.fetch_sub(bytes, Ordering::AcqRel);
    }

    /// The number of the last object that was queued, plus one.
    fn queued(&self) -> u64 {
        let backlog = self.backlog.lock();
        backlog.first + backlog.waiting.len() as u64
    }

    /// Whether all objects with numbers under `number` have been written, or failed to be.
    fn written_to(&self, number: u64) -> bool {
        let backlog = self.backlog.lock();
        backlog.first >= number && backlog.unfinished.first().is_none_or(|first| *first >= number)
    }

    fn is_idle(&self) -> bool {
        let backlog = self.backlog.lock();
        backlog.waiting.is_empty() && backlog.unfinished.is_empty() && self.signal.is_idle()
    }
}

impl Inner {
    pub(crate) fn start_mover(self: &Arc<Self>) {
        let (weak, mover) = (Arc::downgrade(self), Arc::clone(&self.mover));
        let task = async move {
            loop {
                mover.signal.raised().await;
                // The task holds nothing of the engine while it waits, so that a dropped engine is gone.
                let Some(inner) = weak.upgrade() else { break };
                inner.choose_ahead();
                inner.write_waiting();
                mover.signal.rest();
                mover.ended.ring();
            }
        };
        self.env.spawn("mover", Box::pin(task));
    }

    /// Takes objects off the cold end until the watermark is met: clean ones depart, dirty ones are queued to be written.
    fn choose_ahead(&self) {
        let settings = &self.settings;
        while self.mover.has_room(settings) {
            let mut outgoing = Vec::new();
            let mut order = self.order.lock();
            let ready = self.ready_bytes();
            if ready >= settings.clean_ahead_bytes {
                break;
            }
            self.touches.drain(&mut *order.policy);
            if order.policy.is_empty() {
                break;
            }
            let bytes = (settings.clean_ahead_bytes - ready).min(settings.demote_batch_bytes);
            self.take_victims(&mut order, bytes, End::Departing, &mut outgoing);
            self.mover.add(outgoing);
        }
        self.make_room();
    }

    /// Starts batches while there is something to write and not too much in flight.
    fn write_waiting(self: &Arc<Self>) {
        while let Some(batch) = self.mover.next_batch(&self.settings) {
            let inner = Arc::clone(self);
            self.env.spawn("demote", Box::pin(async move { inner.write(batch).await }));
        }
    }

    async fn write(self: Arc<Self>, batch: Batch) {
        let tier = Arc::clone(&self.tiers[0]);
        let objects = batch.outgoing.iter().map(|out| out.object.clone()).collect();
        let mut put = tier.put_many(objects, Intent::Demote);
        let results = loop {
            match select(put, self.env.sleep(ROOM_CHECK)).await {
                Either::Left((results, _)) => break results,
                Either::Right(((), still)) => put = still,
            }
            // It may wait for a segment, and no other batch may be left to end and to ask for one.
            if tier.wants_reclaim() {
                self.reclaimer.signal.raise();
            }
        };
        let lost = self.settle(&batch.outgoing, results);
        // Its row went while it was being written: by a removal, which must hold over a restart as well.
        let removals: Vec<_> =
            lost.iter().map(|out| &out.object).map(|o| (o.namespace, o.key.clone(), o.generation)).collect();
        if !removals.is_empty()
            && let Err(error) = tier.bury(removals).await
        {
            warn!(%error, "a removal could not be written; the object may come back with a restart");
        }
        self.mover.end_batch(batch.first, batch.bytes);
        drop(batch.outgoing);
        self.make_room();
        self.mover.signal.raise();
        self.mover.ended.ring();
        if tier.wants_reclaim() {
            self.reclaimer.signal.raise();
        }
    }

    /// Enters the outcome of a batch into the index; returns the objects whose rows are gone.
    fn settle<'a>(&self, outgoing: &'a [Outgoing], results: Vec<Result<Location>>) -> Vec<&'a Outgoing> {
        let mut lost = Vec::new();
        let mut dropped = Dropped::new();
        let mut order = self.order.lock();
        for (out, result) in outgoing.iter().zip(results) {
            let length = out.object.length();
            let (shard_number, slot) = self.index.place_of(out.id);
            let mut shard = self.index.lock(shard_number);
            let Some((row, _, hot)) = shard.seated(slot).filter(|at| at.1 == out.stay) else {
                drop(shard);
                if let Ok(location) = result {
                    self.tiers[0].free(location, length);
                    lost.push(out);
                }
                continue;
            };
            let bytes = out.object.charge.bytes();
            match result {
                Ok(location) => {
                    hot.state = State::Clean;
                    hot.failures = 0;
                    let (place, touched) = (hot.place, std::mem::take(&mut hot.touched));
                    if place == Place::Out {
                        hot.place = if touched { Place::InOrder } else { Place::Departing };
                    }
                    let tag = shard.row(row).fingerprint.low;
                    shard.row_mut(row).set_below(Some(location));
                    drop(shard);
                    self.counters.demoted.fetch_add(1, Ordering::Relaxed);
                    match (place, touched) {
                        (Place::Out, true) => order.policy.insert(out.id, Cost { bytes, tag }, Rank::Hot),
                        (Place::Out, false) => self.depart(&mut order, out.id, out.stay, bytes),
                        (Place::InOrder | Place::Departing, _) => {}
                    }
                }
                Err(error) => {
                    warn!(%error, object = %out.object.key.escape_ascii(), "demote failed");
                    *self.mover.last_failure.lock() = error.to_string();
                    self.counters.demote_failures.fetch_add(1, Ordering::Relaxed);
                    hot.state = State::Dirty;
                    hot.failures = hot.failures.saturating_add(1);
                    // What is in the order, or departs, stays there: who takes it out of there finds it dirty.
                    if hot.place != Place::Out {
                        continue;
                    }
                    hot.place = Place::InOrder;
                    let failures = hot.failures;
                    let tag = shard.row(row).fingerprint.low;
                    if failures >= self.settings.demote_failures_max {
                        dropped.extend(self.drop_unwritten(&mut shard, row, Gone::DemoteFailed));
                    } else {
                        drop(shard);
                        order.policy.insert(out.id, Cost { bytes, tag }, Rank::Cold);
                    }
                }
            }
        }
        lost
    }

    /// Queues every dirty object, in the order of their puts.
    fn queue_dirty(&self) {
        let _marking = self.mover.marking.lock();
        let mut dirty = Vec::new();
        for shard_number in 0..self.index.shards() {
            let mut shard = self.index.lock(shard_number);
            for seat in shard.all_seats() {
                let Some((_, stay, hot)) = shard.seated(seat).filter(|at| at.2.state == State::Dirty) else {
                    continue;
                };
                let (id, place) = (self.index.object_id(shard_number, seat), hot.place);
                dirty.push(start_writing(id, stay, hot, place));
            }
        }
        dirty.sort_unstable_by_key(|out| out.object.generation);
        self.mover.add(dirty);
    }

    /// Objects stored before `before` that are not below, and the most failures that one of them met.
    pub(crate) fn dirty_objects(&self, before: u64) -> (u64, u8) {
        let (mut count, mut failures) = (0, 0);
        for shard_number in 0..self.index.shards() {
            let mut shard = self.index.lock(shard_number);
            for seat in shard.all_seats() {
                let Some((_, _, hot)) = shard.seated(seat) else { continue };
                if hot.state != State::Clean && hot.object.generation.0 <= before {
                    (count, failures) = (count + 1, failures.max(hot.failures));
                }
            }
        }
        (count, failures)
    }

    /// Writes everything that was stored before the call to the tier below. Unavailable when some of it could not be.
    pub(crate) async fn write_down(&self) -> Result<()> {
        let before = self.next_generation().0;
        // One round is enough where nothing fails and reclaim takes no copy away meanwhile.
        for _ in 0..WRITE_ROUNDS_MAX {
            self.queue_dirty();
            let queued = self.mover.queued();
            self.mover.ended.until(|| self.mover.written_to(queued)).await;
            match self.dirty_objects(before) {
                (0, _) => return Ok(()),
                (_, failures) if failures >= self.settings.demote_failures_max => break,
                _ => {}
            }
        }
        let (left, _) = self.dirty_objects(before);
        let (tier, why) = (&self.tiers[0].info().name, self.mover.last_failure.lock().clone());
        Err(Error::unavailable(format!("{left} objects could not be written to tier {tier}: {why}")))
    }
}

impl Engine {
    /// Makes everything that was acknowledged before the call durable.
    ///
    /// Unsupported when no durable tier lies below DRAM; Unavailable when something could not be written or flushed.
    pub async fn flush(&self) -> Result<()> {
        let Some(tier) = self.inner.tiers.first() else {
            return Err(Error::unsupported("flush: no durable tier below DRAM is configured"));
        };
        self.inner.write_down().await?;
        tier.flush().await
    }

    /// Returns when nothing moves between DRAM and the tiers below, and nothing is about to.
    pub async fn quiesce(&self) {
        let inner = &self.inner;
        let at_rest = || inner.mover.is_idle() && inner.reclaimer.is_idle();
        loop {
            inner.mover.ended.until(at_rest).await;
            for tier in &inner.tiers {
                tier.settle().await;
            }
            if at_rest() {
                return;
            }
        }
    }

    /// Empties DRAM: what has no copy below is written there (without a tier below: dropped and counted).
    ///
    /// Objects that readers hold keep their memory until they are done. Unavailable when something could not be written.
    pub async fn drop_hot(&self) -> Result<()> {
        let inner = &self.inner;
        if !inner.tiers.is_empty() {
            inner.write_down().await?;
        }
        loop {
            self.quiesce().await;
            inner.evict(u64::MAX);
            self.quiesce().await;
            if inner.index.residents() == 0 {
                return Ok(());
            }
        }
    }
}
