//! What the engine counts.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use ebbtide_core::{Budget, Charge, HotUsage, TierInfo, TierUsage};

use crate::engine::Engine;

/// Counters that are not on the path of every get.
pub(crate) struct Counters {
    pub(crate) puts_waited: AtomicU64,
    pub(crate) puts_refused: AtomicU64,
    pub(crate) reads_waited: AtomicU64,
    pub(crate) hits_below: AtomicU64,
    pub(crate) hit_bytes_below: AtomicU64,
    pub(crate) stale_reads: AtomicU64,
    pub(crate) corrupt_reads: AtomicU64,
    pub(crate) promotions: AtomicU64,
    pub(crate) demoted: AtomicU64,
    pub(crate) demote_failures: AtomicU64,
    pub(crate) reinserted: AtomicU64,
    heap: Budget,
}

impl Default for Counters {
    fn default() -> Self {
        Counters {
            puts_waited: AtomicU64::default(),
            puts_refused: AtomicU64::default(),
            reads_waited: AtomicU64::default(),
            hits_below: AtomicU64::default(),
            hit_bytes_below: AtomicU64::default(),
            stale_reads: AtomicU64::default(),
            corrupt_reads: AtomicU64::default(),
            promotions: AtomicU64::default(),
            demoted: AtomicU64::default(),
            demote_failures: AtomicU64::default(),
            reinserted: AtomicU64::default(),
            heap: Budget::new(u64::MAX),
        }
    }
}

impl Counters {
    /// A charge for memory of the heap: counted, not bounded here (reclaim reads a bounded batch).
    pub(crate) fn heap_charge(&self, bytes: u64) -> Charge {
        self.heap.try_charge(bytes).expect("the heap's count has no bound")
    }
}

/// A reading of all counters.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// DRAM.
    pub hot: HotUsage,
    /// The tiers below, top down.
    pub tiers: Vec<TierUsage>,
    /// Objects anywhere.
    pub entries: u64,
    /// Objects in DRAM.
    pub hot_objects: u64,
    /// The most that were ever in DRAM.
    pub hot_objects_peak: u64,
    /// Puts that stored.
    pub puts: u64,
    /// Bytes that they stored.
    pub put_bytes: u64,
    /// Puts of keys that were present.
    pub puts_present: u64,
    /// Puts that waited for room.
    pub puts_waited: u64,
    /// Puts refused as full.
    pub puts_refused: u64,
    /// Bytes of puts that wait now.
    pub puts_waiting_bytes: u64,
    /// Reads that waited for memory.
    pub reads_waited: u64,
    /// Reads served from DRAM.
    pub hits_dram: u64,
    /// Their bytes.
    pub hit_bytes_dram: u64,
    /// Reads served below, by tier.
    pub hits_below: Vec<u64>,
    /// Their bytes.
    pub hit_bytes_below: Vec<u64>,
    /// Reads that found nothing.
    pub misses: u64,
    /// Reads that met a row that moved on, and looked again.
    pub stale_reads: u64,
    /// Copies that were not what was written; each is gone and counted in `dropped_by_reason` too, unless DRAM had another.
    pub corrupt_reads: u64,
    /// Objects that reads made resident.
    pub promotions: u64,
    /// Objects written below.
    pub demoted: u64,
    /// Writes below that failed (each is tried again, or counted in `dropped_by_reason`).
    pub demote_failures: u64,
    /// Objects that reclaim wrote again.
    pub reinserted: u64,
    /// Uses that the policy did not hear of, since a ring was full.
    pub touches_dropped: u64,
    /// Objects that are gone, by reason.
    pub dropped_by_reason: BTreeMap<&'static str, u64>,
    /// Bytes on their way below.
    pub backlog_bytes: u64,
}

impl Stats {
    /// Objects that are gone for any reason but removal by the caller.
    pub fn evicted(&self) -> u64 {
        self.dropped_by_reason
            .iter()
            .filter(|(reason, _)| **reason != "removed")
            .map(|(_, count)| count)
            .sum()
    }
}

impl Engine {
    /// What the tiers below are, top down.
    pub fn tier_infos(&self) -> Vec<TierInfo> {
        self.inner.tiers.iter().map(|tier| tier.info().clone()).collect()
    }

    /// A reading of all counters: each right, not all of one moment.
    pub fn stats(&self) -> Stats {
        let inner = &self.inner;
        let counters = &inner.counters;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let touches = &inner.touches;
        Stats {
            hot: inner.hot.usage(),
            tiers: inner.tiers.iter().map(|tier| tier.usage()).collect(),
            entries: inner.index.len(),
            hot_objects: inner.index.residents(),
            hot_objects_peak: inner.index.residents_peak(),
            puts: touches.sum(|mine| &mine.puts),
            put_bytes: touches.sum(|mine| &mine.put_bytes),
            puts_present: touches.sum(|mine| &mine.put_present),
            puts_waited: get(&counters.puts_waited),
            puts_refused: get(&counters.puts_refused),
            puts_waiting_bytes: inner.objects.waiting_bytes(),
            reads_waited: get(&counters.reads_waited),
            hits_dram: touches.sum(|mine| &mine.hits),
            hit_bytes_dram: touches.sum(|mine| &mine.hit_bytes),
            hits_below: inner.tiers.iter().map(|_| get(&counters.hits_below)).collect(),
            hit_bytes_below: inner.tiers.iter().map(|_| get(&counters.hit_bytes_below)).collect(),
            misses: touches.sum(|mine| &mine.misses),
            stale_reads: get(&counters.stale_reads),
            corrupt_reads: get(&counters.corrupt_reads),
            promotions: get(&counters.promotions),
            demoted: get(&counters.demoted),
            demote_failures: get(&counters.demote_failures),
            reinserted: get(&counters.reinserted),
            touches_dropped: get(&touches.dropped),
            dropped_by_reason: inner.departures.counts(),
            backlog_bytes: inner.mover.backlog_bytes(),
        }
    }
}
