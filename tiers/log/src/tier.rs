//! The tier as the engine sees it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ebbtide_core::{
    BoxFuture, Charge, CheckpointRow, DeviceCounters, Env, Error, Generation, Intent, Location, Medium,
    NamespaceId, ReadDone, ReadRequest, Recovered, RecoverySummary, Result, SegmentId, SharedObject, Tier,
    TierInfo, TierUsage, Victims,
};
use ebbtide_mem::BufMut;

use crate::format::{PAGE, pages_in};
use crate::headers::HeaderPool;
use crate::log::{Counters, Geometry, Log};
use crate::reclaim::Grave;
use crate::room::Purpose;

/// The longest value, whatever the room.
const OBJECT_BYTES_MAX: u64 = 4 << 30;
/// One object takes at most this share of the tier.
const OBJECT_SHARE: u64 = 4;
/// Media are counted in eight bits.
const MEDIA_MAX: usize = 256;

/// How a log tier is opened.
pub struct LogOptions {
    /// "ssd", "pool", "cold".
    pub name: String,
    /// Clock, dice and spawn.
    pub env: Arc<dyn Env>,
    /// Memory that headers and footers are written from, of equal lengths (64 KiB, and 64 of them, are plenty), best of
    /// the arena. With fewer, or none, the heap serves: right, but not registered with the device.
    pub headers: Vec<(BufMut, Charge)>,
}

/// Objects in a log of segments, on one or several media.
pub struct LogTier {
    log: Arc<Log>,
}

impl LogTier {
    /// A tier on `media`, which are opened and belong together: one store, one segment size. Writes nothing; call
    /// [`recover`](Tier::recover) before anything else.
    ///
    /// Invalid: no medium, too many, of different stores or with segments of different sizes.
    pub fn open(media: Vec<Arc<dyn Medium>>, options: LogOptions) -> Result<LogTier> {
        let LogOptions { name, env, headers } = options;
        let Some(first) = media.first().filter(|_| media.len() <= MEDIA_MAX) else {
            return Err(Error::invalid(format!(
                "tier {name}: {} media, 1 to {MEDIA_MAX} are possible",
                media.len()
            )));
        };
        let (identity, segment_bytes) = (first.identity(), first.info().segment_bytes);
        for medium in &media {
            let MediumIdentityOf { store, bytes, on } = MediumIdentityOf::of(&**medium);
            if store != identity.store {
                return Err(Error::invalid(format!(
                    "tier {name}: {on} belongs to another store than its first medium"
                )));
            }
            if bytes != segment_bytes {
                return Err(Error::invalid(format!(
                    "tier {name}: {on} has segments of {bytes} bytes, its first medium of {segment_bytes}"
                )));
            }
        }
        let infos = || media.iter().map(|medium| medium.info());
        let capacity_bytes = infos().map(|info| u64::from(info.segments_max) * segment_bytes).sum();
        let incarnation = media.iter().map(|medium| medium.identity().incarnation).max().unwrap_or(0);
        let info = TierInfo {
            name,
            on: infos().map(|info| format!("{} {}", info.kind, info.name)).collect::<Vec<_>>().join(", "),
            capacity_bytes,
            segment_bytes,
            object_bytes_max: OBJECT_BYTES_MAX.min(capacity_bytes / OBJECT_SHARE),
            direct_align_bytes: infos()
                .map(|info| info.align_bytes.max(info.memory_align_bytes))
                .max()
                .unwrap_or(1),
            queue_depth: infos().map(|info| info.queue_depth).sum(),
            store: identity.store,
            incarnation,
            secret: identity.secret,
        };
        let counters = infos().map(|info| (0..info.segments_max).map(|_| Counters::default()).collect());
        let log = Log {
            geometry: Geometry::new(segment_bytes),
            counters: counters.collect(),
            stats: Default::default(),
            headers: HeaderPool::new(headers),
            parts: Default::default(),
            state: parking_lot::Mutex::new(Log::new_state(&media, incarnation)),
            info,
            env,
            media,
        };
        Ok(LogTier { log: Arc::new(log) })
    }
}

/// What must be equal among the media of a tier.
struct MediumIdentityOf<'m> {
    store: [u8; 16],
    bytes: u64,
    on: &'m str,
}

impl<'m> MediumIdentityOf<'m> {
    fn of(medium: &'m dyn Medium) -> Self {
        MediumIdentityOf {
            store: medium.identity().store,
            bytes: medium.info().segment_bytes,
            on: &medium.info().name,
        }
    }
}

impl Tier for LogTier {
    fn info(&self) -> &TierInfo {
        &self.log.info
    }

    fn usage(&self) -> TierUsage {
        let log = &*self.log;
        let segments: u64 = log.counters.iter().map(|slots| slots.len() as u64).sum();
        let (free, open_bytes) = {
            let state = log.state.lock();
            let open = state.open_segments().filter_map(|id| state.writing.get(&id));
            (u64::from(state.free_segments), open.map(|segment| u64::from(segment.cursor) * PAGE).sum())
        };
        let overhead: u64 = log.media.iter().map(|medium| medium.info().overhead_bytes).sum();
        let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        TierUsage {
            used_bytes: (segments - free) * log.info.segment_bytes,
            live_bytes: get(&log.stats.live_bytes),
            live_records: get(&log.stats.live_records),
            // Lossless: at most 256 media of 2^24 slots, and more than 4 billion segments are not built.
            segments_free: free as u32,
            segments: segments as u32,
            segment_bytes: log.info.segment_bytes,
            accounted_bytes: log.info.capacity_bytes + overhead,
            admitted_value_bytes: get(&log.stats.admitted_value_bytes),
            reinserted_value_bytes: get(&log.stats.reinserted_value_bytes),
            written_bytes: get(&log.stats.written_bytes),
            open_bytes,
            segments_sealed: get(&log.stats.segments_sealed),
            segments_reclaimed: get(&log.stats.segments_reclaimed),
            checksum_mismatches: get(&log.stats.checksum_mismatches),
            write_errors: get(&log.stats.write_errors),
            device: log
                .media
                .iter()
                .fold(DeviceCounters::default(), |sum, medium| add(sum, medium.counters())),
            degraded: log.media.iter().flat_map(|medium| medium.degraded()).collect(),
        }
    }

    fn stored_bytes(&self, length: u64) -> u64 {
        pages_in(length) * PAGE
    }

    fn put_many(
        &self,
        objects: Vec<SharedObject>,
        intent: Intent,
    ) -> BoxFuture<'static, Vec<Result<Location>>> {
        Box::pin(Arc::clone(&self.log).put_many(objects, intent))
    }

    fn get_many(&self, requests: Vec<ReadRequest>) -> BoxFuture<'static, Vec<ReadDone>> {
        Box::pin(Arc::clone(&self.log).get_many(requests))
    }

    fn wanted(&self, location: Location, length: u64) {
        self.log.wanted(location, length);
    }

    fn free(&self, location: Location, length: u64) {
        self.log.free(location, length);
    }

    fn bury(&self, removals: Vec<(NamespaceId, Box<[u8]>, Generation)>) -> BoxFuture<'static, Result<()>> {
        let grave = |(namespace, key, generation)| Grave { namespace, key, generation, barrier: None };
        let graves = removals.into_iter().map(grave).collect();
        Box::pin(Arc::clone(&self.log).bury(graves, Purpose::Bury))
    }

    fn wants_reclaim(&self) -> bool {
        self.log.wants_reclaim()
    }

    fn reclaim(&self) -> BoxFuture<'static, Result<Option<Victims>>> {
        Box::pin(Arc::clone(&self.log).reclaim())
    }

    fn release(&self, segment: SegmentId) -> BoxFuture<'static, Result<()>> {
        Box::pin(Arc::clone(&self.log).release(segment))
    }

    fn recover<'a>(
        &'a self,
        sink: &'a mut (dyn for<'b> FnMut(Recovered<'b>) + Send),
    ) -> BoxFuture<'a, Result<RecoverySummary>> {
        Box::pin(async move { self.log.recover(sink).await })
    }

    fn settle(&self) -> BoxFuture<'static, ()> {
        let log = Arc::clone(&self.log);
        Box::pin(async move {
            while let Some(busy) = log.wait_sealing() {
                let _ = busy.await;
            }
        })
    }

    fn flush(&self) -> BoxFuture<'static, Result<()>> {
        let log = Arc::clone(&self.log);
        Box::pin(async move { log.flush().await })
    }

    fn close(
        &self,
        rows: Box<dyn Iterator<Item = Vec<CheckpointRow>> + Send>,
    ) -> BoxFuture<'static, Result<()>> {
        Box::pin(Arc::clone(&self.log).close(rows))
    }
}

fn add(sum: DeviceCounters, more: DeviceCounters) -> DeviceCounters {
    DeviceCounters {
        read_bytes: sum.read_bytes + more.read_bytes,
        written_bytes: sum.written_bytes + more.written_bytes,
        reads: sum.reads + more.reads,
        writes: sum.writes + more.writes,
        flushes: sum.flushes + more.flushes,
        errors: sum.errors + more.errors,
    }
}
