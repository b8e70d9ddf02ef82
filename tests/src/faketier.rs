//! A tier in memory for tests of the engine alone: it is slow, fails, hangs and reorders on request, reuses its places as
//! soon as they are free, and its disk outlives it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ebbtide_core::{
    BlockSums, BoxFuture, CheckpointRow, Env, Error, Generation, Intent, Location, NamespaceId, ReadDone,
    ReadRequest, Recovered, RecoverySummary, Result, SegmentId, SharedObject, Tier, TierInfo, TierUsage,
    VictimRecord, Victims,
};
use futures_channel::oneshot;
use parking_lot::Mutex;

use crate::SimEnv;

const PAGE: u64 = 4096;
/// Segments that only reclaim may use.
const RESERVED: usize = 2;

/// What a [`FakeTier`] is to do.
#[derive(Clone, Debug)]
pub struct FakeOptions {
    /// The size of a segment.
    pub segment_bytes: u64,
    /// How many there are.
    pub segments: u32,
    /// Each operation takes up to this, in two halves: what it does happens in between.
    pub latency_max: Duration,
    /// How many of a thousand writes of one object fail; half of those have reached the disk all the same.
    pub put_failures_permille: u64,
}

impl Default for FakeOptions {
    fn default() -> Self {
        FakeOptions {
            segment_bytes: 1 << 20,
            segments: 16,
            latency_max: Duration::from_micros(500),
            put_failures_permille: 0,
        }
    }
}

/// What outlives the tier.
#[derive(Clone, Default)]
pub struct FakeDisk(Arc<Mutex<Stored>>);

#[derive(Clone, Default)]
struct Stored {
    incarnation: u32,
    records: BTreeMap<Location, Record>,
    /// Segments in use, with the order in which they were opened.
    opened: BTreeMap<u32, u64>,
    openings: u64,
    buried: Vec<(NamespaceId, Box<[u8]>, Generation)>,
    /// The same as of the last flush; `None` inside itself.
    durable: Option<Box<Stored>>,
}

#[derive(Clone)]
struct Record {
    namespace: NamespaceId,
    key: Box<[u8]>,
    generation: Generation,
    sum: u64,
    bytes: Arc<[u8]>,
}

impl FakeDisk {
    /// Loses what was not flushed.
    pub fn cut_power(&self) {
        let mut stored = self.0.lock();
        if let Some(durable) = stored.durable.take() {
            let incarnation = stored.incarnation;
            *stored = Stored { durable: Some(durable.clone()), incarnation, ..*durable };
        } else {
            *stored = Stored { incarnation: stored.incarnation, ..Stored::default() };
        }
    }

    fn make_durable(&self) {
        let mut stored = self.0.lock();
        let now = Stored { durable: None, ..stored.clone() };
        stored.durable = Some(Box::new(now));
    }
}

/// A tier in memory.
#[derive(Clone)]
pub struct FakeTier(Arc<Inner>);

struct Inner {
    env: SimEnv,
    options: FakeOptions,
    info: TierInfo,
    disk: FakeDisk,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    usage: TierUsage,
    open: Option<(u32, u64)>,
    /// Bytes and records that rows may point to, by segment.
    live: BTreeMap<u32, (u64, u64)>,
    /// Writes under way, by segment.
    writing: BTreeMap<u32, u32>,
    /// Writes that the next calls fail, whatever the dice say.
    fail_puts: u32,
    slow_read: Option<Duration>,
    /// Operations wait while it is closed.
    closed_gate: bool,
    waiting: Vec<oneshot::Sender<()>>,
}

impl FakeTier {
    /// A tier on `disk`, which belonged to another before, or to none.
    pub fn open(env: SimEnv, disk: FakeDisk, options: FakeOptions) -> Self {
        let incarnation = {
            let mut stored = disk.0.lock();
            stored.incarnation += 1;
            stored.incarnation
        };
        let info = TierInfo {
            name: "ssd".into(),
            on: "memory".into(),
            capacity_bytes: u64::from(options.segments) * options.segment_bytes,
            segment_bytes: options.segment_bytes,
            object_bytes_max: options.segment_bytes,
            direct_align_bytes: 4096,
            queue_depth: 32,
            store: [7; 16],
            incarnation,
            secret: [3, 4],
        };
        FakeTier(Arc::new(Inner { env, options, info, disk, state: Mutex::default() }))
    }

    /// Fails the next `count` writes.
    pub fn fail_puts(&self, count: u32) {
        self.0.state.lock().fail_puts = count;
    }

    /// Makes the next read take so long; it looks at the disk at the end of that.
    pub fn slow_next_read(&self, time: Duration) {
        self.0.state.lock().slow_read = Some(time);
    }

    /// Takes the record of a dead write off the disk, as the next use of its place would.
    pub fn overwrite(&self, generation: Generation) {
        self.0.disk.0.lock().records.retain(|_, record| record.generation != generation);
    }

    /// Holds every operation until the gate is opened again.
    pub fn close_gate(&self) {
        self.0.state.lock().closed_gate = true;
    }

    /// Lets what waits go on.
    pub fn open_gate(&self) {
        self.0.state.lock().closed_gate = false;
        self.0.stir();
    }
}

impl Inner {
    /// Wakes whoever waits, to look again.
    fn stir(&self) {
        let waiting = std::mem::take(&mut self.state.lock().waiting);
        for waiting in waiting {
            let _ = waiting.send(()); // who is gone does not wait
        }
    }

    async fn until<T>(&self, mut ready: impl FnMut(&mut State, &Stored) -> Option<T>) -> T {
        loop {
            let stirred = {
                let mut state = self.state.lock();
                if let Some(value) = ready(&mut state, &self.disk.0.lock()) {
                    return value;
                }
                let (waiting, stirred) = oneshot::channel();
                state.waiting.push(waiting);
                stirred
            };
            let _ = stirred.await;
        }
    }

    /// Half an operation's time.
    async fn pass(&self) {
        self.until(|state, _| (!state.closed_gate).then_some(())).await;
        let most = (self.options.latency_max.as_nanos() as u64 / 2).max(1);
        // One in fifty is overtaken by everything else.
        let most = if self.env.random().is_multiple_of(50) { most * 50 } else { most };
        self.env.sleep(Duration::from_nanos(self.env.random() % most)).await;
        self.until(|state, _| (!state.closed_gate).then_some(())).await;
    }

    /// A place for `length` bytes; waits for a free segment.
    async fn place(&self, length: u64, intent: Intent) -> Location {
        let pages = length.div_ceil(PAGE);
        let reserved = if intent == Intent::Demote { RESERVED } else { 0 };
        let (segment, page) = self
            .until(|state, stored| {
                let room = |(_, page): &(u32, u64)| (page + pages) * PAGE <= self.options.segment_bytes;
                if let Some((segment, page)) = state.open.filter(room) {
                    state.open = Some((segment, page + pages));
                    return Some((segment, page));
                }
                let free: Vec<_> =
                    (0..self.options.segments).filter(|slot| !stored.opened.contains_key(slot)).collect();
                let slot = free.first().filter(|_| free.len() > reserved).copied()?;
                state.open = Some((slot, pages));
                Some((slot, 0))
            })
            .await;
        let mut stored = self.disk.0.lock();
        if !stored.opened.contains_key(&segment) {
            stored.openings += 1;
            let opening = stored.openings;
            stored.opened.insert(segment, opening);
        }
        drop(stored);
        let mut state = self.state.lock();
        let live = state.live.entry(segment).or_default();
        live.0 += pages * PAGE;
        live.1 += 1;
        *state.writing.entry(segment).or_default() += 1;
        Location { segment: SegmentId(segment), page: page as u32 }
    }

    async fn put(&self, object: SharedObject, intent: Intent) -> Result<Location> {
        let location = self.place(object.length(), intent).await;
        self.pass().await;
        let fails = {
            let mut state = self.state.lock();
            let told = state.fail_puts > 0;
            state.fail_puts = state.fail_puts.saturating_sub(1);
            told || self.env.random() % 1000 < self.options.put_failures_permille
        };
        if !fails || self.env.random().is_multiple_of(2) {
            let record = Record {
                namespace: object.namespace,
                key: object.key.clone(),
                generation: object.generation,
                sum: object.sum(),
                bytes: object.value.to_vec().into(),
            };
            self.disk.0.lock().records.insert(location, record);
        }
        self.pass().await;
        *self.state.lock().writing.entry(location.segment.0).or_default() -= 1;
        if fails {
            self.give_back(location, object.length());
            self.state.lock().usage.write_errors += 1;
            return Err(Error::unavailable("fake tier: told to fail"));
        }
        let mut state = self.state.lock();
        match intent {
            Intent::Demote => state.usage.admitted_value_bytes += object.length(),
            Intent::Reinsert => state.usage.reinserted_value_bytes += object.length(),
        }
        Ok(location)
    }

    fn give_back(&self, location: Location, length: u64) {
        let mut state = self.state.lock();
        let live = state.live.entry(location.segment.0).or_default();
        live.0 = live.0.checked_sub(length.div_ceil(PAGE) * PAGE).expect("no more is freed than was live");
        live.1 = live.1.checked_sub(1).expect("no more records are freed than were live");
    }

    async fn get(&self, request: ReadRequest) -> ReadDone {
        let slow = self.state.lock().slow_read.take();
        self.env.sleep(slow.unwrap_or_default()).await;
        self.pass().await;
        let ReadRequest { location, length, identity, sum, verify, mut into } = request;
        let bytes = self.disk.0.lock().records.get(&location).map(|record| Arc::clone(&record.bytes));
        match bytes {
            Some(bytes) if bytes.len() as u64 >= length => into.write_at(0, &bytes[..length as usize]),
            _ => into.write_at(0, &vec![0xee; length as usize]),
        }
        self.pass().await;
        let good = !verify || identity.fold(length, identity.sums_in(&into).0) == sum;
        let result = if good { Ok(()) } else { Err(Error::corrupt("fake tier: not the object's bytes")) };
        self.state.lock().usage.checksum_mismatches += u64::from(!good);
        ReadDone { result, buf: Some(into), sums: None::<BlockSums> }
    }
}

impl Tier for FakeTier {
    fn info(&self) -> &TierInfo {
        &self.0.info
    }

    fn usage(&self) -> TierUsage {
        let state = self.0.state.lock();
        let used = self.0.disk.0.lock().opened.len() as u32;
        TierUsage {
            used_bytes: u64::from(used) * self.0.options.segment_bytes,
            live_bytes: state.live.values().map(|live| live.0).sum(),
            live_records: state.live.values().map(|live| live.1).sum(),
            segments: self.0.options.segments,
            segments_free: self.0.options.segments - used,
            segment_bytes: self.0.options.segment_bytes,
            ..state.usage.clone()
        }
    }

    fn stored_bytes(&self, length: u64) -> u64 {
        length.div_ceil(PAGE) * PAGE
    }

    fn put_many(
        &self,
        objects: Vec<SharedObject>,
        intent: Intent,
    ) -> BoxFuture<'static, Vec<Result<Location>>> {
        let inner = Arc::clone(&self.0);
        Box::pin(async move {
            let puts = objects.into_iter().map(|object| inner.put(object, intent));
            futures_util::future::join_all(puts).await
        })
    }

    fn get_many(&self, requests: Vec<ReadRequest>) -> BoxFuture<'static, Vec<ReadDone>> {
        let inner = Arc::clone(&self.0);
        Box::pin(async move {
            let gets = requests.into_iter().map(|request| inner.get(request));
            futures_util::future::join_all(gets).await
        })
    }

    fn wanted(&self, _location: Location, _length: u64) {}

    fn free(&self, location: Location, length: u64) {
        self.0.give_back(location, length);
    }

    fn bury(&self, removals: Vec<(NamespaceId, Box<[u8]>, Generation)>) -> BoxFuture<'static, Result<()>> {
        let inner = Arc::clone(&self.0);
        Box::pin(async move {
            inner.pass().await;
            inner.disk.0.lock().buried.extend(removals);
            inner.pass().await;
            Ok(())
        })
    }

    fn wants_reclaim(&self) -> bool {
        self.usage().segments_free < RESERVED as u32 + 2
    }

    fn reclaim(&self) -> BoxFuture<'static, Result<Option<Victims>>> {
        let inner = Arc::clone(&self.0);
        Box::pin(async move {
            inner.pass().await;
            let state = inner.state.lock();
            let stored = inner.disk.0.lock();
            let open = state.open.map(|(segment, _)| segment);
            let quiet = |segment: u32| state.writing.get(&segment).is_none_or(|writes| *writes == 0);
            let sealed = stored.opened.iter().filter(|(at, _)| Some(**at) != open && quiet(**at));
            let least = sealed.min_by_key(|(segment, opening)| {
                (state.live.get(segment).map_or(0, |live| live.0) / 4, **opening)
            });
            let Some((segment, _)) = least else {
                return Ok(None);
            };
            let segment = SegmentId(*segment);
            let records = stored.records.iter().filter(|(location, _)| location.segment == segment);
            let victim = |(location, record): (&Location, &Record)| VictimRecord {
                namespace: record.namespace,
                key: record.key.clone(),
                generation: record.generation,
                length: record.bytes.len() as u64,
                location: *location,
            };
            let records = records.map(victim).collect();
            Ok(Some(Victims { segment, records }))
        })
    }

    fn release(&self, segment: SegmentId) -> BoxFuture<'static, Result<()>> {
        let inner = Arc::clone(&self.0);
        Box::pin(async move {
            let live = inner.state.lock().live.get(&segment.0).copied().unwrap_or_default();
            if live != (0, 0) {
                return Err(Error::stale("fake tier: a segment with live records cannot be released"));
            }
            inner.pass().await;
            inner.disk.make_durable();
            inner.pass().await;
            {
                let mut state = inner.state.lock();
                state.usage.segments_reclaimed += 1;
                assert_eq!(state.live.remove(&segment.0).unwrap_or_default(), (0, 0), "a row came late");
            }
            {
                let mut stored = inner.disk.0.lock();
                stored.records.retain(|location, _| location.segment != segment);
                stored.opened.remove(&segment.0);
            }
            inner.disk.make_durable();
            inner.stir();
            Ok(())
        })
    }

    fn recover<'a>(
        &'a self,
        sink: &'a mut (dyn for<'b> FnMut(Recovered<'b>) + Send),
    ) -> BoxFuture<'a, Result<RecoverySummary>> {
        Box::pin(async move {
            self.0.pass().await;
            let (records, openings, buried) = {
                let stored = self.0.disk.0.lock();
                (stored.records.clone(), stored.opened.clone(), stored.buried.clone())
            };
            for (location, record) in &records {
                let length = record.bytes.len() as u64;
                let mut state = self.0.state.lock();
                let live = state.live.entry(location.segment.0).or_default();
                live.0 += length.div_ceil(PAGE) * PAGE;
                live.1 += 1;
            }
            let mut oldest_first: Vec<_> = records.iter().collect();
            oldest_first.sort_by_key(|(location, _)| (openings.get(&location.segment.0), **location));
            for (location, Record { namespace, key, generation, sum, bytes }) in oldest_first {
                let (namespace, generation, sum, location) = (*namespace, *generation, *sum, *location);
                let length = bytes.len() as u64;
                sink(Recovered::Record { namespace, key, generation, length, sum, location });
            }
            for (namespace, key, generation) in &buried {
                sink(Recovered::Tombstone { namespace: *namespace, key, generation: *generation });
            }
            Ok(RecoverySummary { records: records.len() as u64, ..RecoverySummary::default() })
        })
    }

    fn settle(&self) -> BoxFuture<'static, ()> {
        Box::pin(std::future::ready(()))
    }

    fn flush(&self) -> BoxFuture<'static, Result<()>> {
        let inner = Arc::clone(&self.0);
        Box::pin(async move {
            inner.pass().await;
            inner.disk.make_durable();
            inner.pass().await;
            Ok(())
        })
    }

    fn close(
        &self,
        rows: Box<dyn Iterator<Item = Vec<CheckpointRow>> + Send>,
    ) -> BoxFuture<'static, Result<()>> {
        let rows: usize = rows.map(|batch| batch.len()).sum();
        self.0.env.note(rows as u64);
        self.flush()
    }
}
