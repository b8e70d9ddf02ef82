//! What the parts of the tier share: the table of segments, what is being written, and counters.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use ebbtide_core::{
    BLOCK_BYTES, BoxFuture, Env, Error, KEY_BYTES_MAX, Location, Medium, MediumOp, Result, SegmentId,
    TierInfo,
};
use ebbtide_mem::BufMut;
use futures_channel::oneshot;
use futures_util::future::try_join_all;
use parking_lot::Mutex;

use crate::format::record::Record;
use crate::format::{PAGE, group, pages_in};
use crate::headers::HeaderPool;
use crate::parts::PartsMap;
use crate::reclaim::Grave;
use crate::room::{Purpose, Queue, wake};

/// Free segments that only reclaim and removals may use.
pub(crate) const RESERVED_SEGMENTS: u32 = 2;
/// The most segments of one medium that are being sealed at a time.
pub(crate) const SEALING_MAX: u32 = 2;
/// Values are packed into groups of up to this many bytes; a longer one is a group by itself.
pub(crate) const GROUP_BYTES_MAX: u64 = 1 << 20;
/// A value longer than a quarter of a segment is cut into parts that fill one with four.
const PARTS_PER_SEGMENT: u64 = 4;

/// Sizes that follow from the segment's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    pub(crate) segment_bytes: u64,
    /// Pages of a segment; the first is its header, the last its trailer.
    pub(crate) segment_pages: u32,
    /// The most bytes of a value in one place, whole checksum blocks.
    pub(crate) part_bytes: u64,
}

impl Geometry {
    pub(crate) fn new(segment_bytes: u64) -> Self {
        let record = Record::bytes_for(segment_bytes / PARTS_PER_SEGMENT, KEY_BYTES_MAX);
        let runs = PARTS_PER_SEGMENT * group::run_pages(record);
        let overhead = (2 + runs + pages_in(PARTS_PER_SEGMENT * record as u64)) * PAGE;
        let blocks = (segment_bytes - overhead) / PARTS_PER_SEGMENT / BLOCK_BYTES as u64;
        // Lossless: a segment has at most 2^30 bytes.
        Geometry {
            segment_bytes,
            segment_pages: (segment_bytes / PAGE) as u32,
            part_bytes: blocks * BLOCK_BYTES as u64,
        }
    }

    /// The page of the trailer.
    pub(crate) fn last_page(&self) -> u32 {
        self.segment_pages - 1
    }

    /// How many places a value of `length` bytes takes.
    pub(crate) fn parts_of(&self, length: u64) -> u64 {
        length.div_ceil(self.part_bytes)
    }

    /// True when `stored` bytes at `page` lie between header and trailer.
    pub(crate) fn holds(&self, page: u32, stored: u64) -> bool {
        page >= 2 && u64::from(page) + pages_in(stored) <= u64::from(self.last_page())
    }
}

/// A segment's life. It stays readable until it is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Free,
    /// Taken from the free ones, made ready by the medium.
    Opening,
    Open,
    /// Full; its writes land, then its footer is written.
    Sealing,
    Sealed,
    /// Handed to the engine by `reclaim`.
    Reclaiming,
    /// Its free mark is being written.
    Releasing,
    /// Its header could not be read; left alone until the next start.
    Lost,
}

impl Phase {
    /// True when the segment holds something and is not written any more, or soon will not be.
    pub(crate) fn is_past_open(self) -> bool {
        matches!(self, Phase::Sealing | Phase::Sealed | Phase::Reclaiming | Phase::Releasing)
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub(crate) phase: Phase,
    pub(crate) sequence: u64,
    pub(crate) tombstones: u32,
    /// Objects in parts of which some stand here and that are still being written: not to be reclaimed.
    pub(crate) held: u32,
    /// What it holds could not be read: reclaimed after all others.
    pub(crate) unreadable: bool,
}

impl Segment {
    const FREE: Segment =
        Segment { phase: Phase::Free, sequence: 0, tombstones: 0, held: 0, unreadable: false };
}

/// What the engine says of the values in a segment.
#[derive(Default)]
pub(crate) struct Counters {
    /// Bytes of values that rows point to, in whole pages.
    pub(crate) live_bytes: AtomicU64,
    pub(crate) live_records: AtomicU32,
    /// Bytes asked for, fading with each reclaim.
    pub(crate) wanted_bytes: AtomicU64,
}

/// Whether a segment's header stands on the medium. Groups behind it count only then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeaderState {
    Unsent,
    InFlight,
    Written,
    Failed,
}

/// A segment that is written: open or being sealed.
pub(crate) struct Writing {
    /// The next free page.
    pub(crate) cursor: u32,
    /// What the footer will take, records in flight included.
    pub(crate) footer_bytes: usize,
    pub(crate) in_flight: u32,
    pub(crate) header: HeaderState,
    /// Opened for reclaim when only the reserve was left.
    pub(crate) from_reserve: bool,
    /// The records of landed groups, by their page.
    pub(crate) landed: BTreeMap<u32, Box<[u8]>>,
    /// Woken when the header's fate is known.
    pub(crate) header_waiters: Vec<oneshot::Sender<()>>,
    /// Woken when nothing is in flight.
    pub(crate) drained: Option<oneshot::Sender<()>>,
}

/// One medium.
pub(crate) struct Lane {
    pub(crate) segments: Vec<Segment>,
    /// Oldest first, so that a slot rests before it is written again.
    pub(crate) free: VecDeque<u32>,
    pub(crate) open: Option<u32>,
    pub(crate) opening: bool,
    pub(crate) sealing: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Not recovered yet.
    Fresh,
    Running,
    Closed,
}

pub(crate) struct State {
    pub(crate) stage: Stage,
    pub(crate) lanes: Vec<Lane>,
    /// The medium whose turn it is.
    pub(crate) turn: usize,
    pub(crate) free_segments: u32,
    /// The sequence given out last.
    pub(crate) sequence: u64,
    pub(crate) writing: BTreeMap<SegmentId, Writing>,
    /// Tombstones of segments under reclaim.
    pub(crate) graves: BTreeMap<SegmentId, Vec<Grave>>,
    queues: [Queue; 3],
    /// Woken at the end of each sealing and opening.
    pub(crate) idle: Vec<oneshot::Sender<()>>,
}

impl State {
    pub(crate) fn segment(&mut self, id: SegmentId) -> &mut Segment {
        &mut self.lanes[id.medium()].segments[id.slot() as usize]
    }

    pub(crate) fn queue(&mut self, purpose: Purpose) -> &mut Queue {
        &mut self.queues[purpose as usize]
    }

    /// Something changed that waiting writers may need.
    pub(crate) fn stir(&mut self) {
        self.queues.iter_mut().for_each(Queue::wake_first);
        wake(&mut self.idle);
    }

    pub(crate) fn close(&mut self) {
        self.stage = Stage::Closed;
        self.queues.iter_mut().for_each(Queue::wake_all);
    }

    /// Gives a slot back.
    pub(crate) fn set_free(&mut self, id: SegmentId) {
        *self.segment(id) = Segment::FREE;
        self.lanes[id.medium()].free.push_back(id.slot());
        self.free_segments += 1;
        self.stir();
    }

    /// The next sequence: greater than all before, in this incarnation and earlier ones.
    pub(crate) fn next_sequence(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence
    }

    /// The segments that are open.
    pub(crate) fn open_segments(&self) -> impl Iterator<Item = SegmentId> {
        let lanes = self.lanes.iter().enumerate();
        lanes.filter_map(|(medium, lane)| lane.open.map(|slot| SegmentId::new(medium as u8, slot)))
    }

    /// All segments with their ids.
    pub(crate) fn segments(&self) -> impl Iterator<Item = (SegmentId, &Segment)> {
        self.lanes.iter().enumerate().flat_map(|(medium, lane)| {
            // Lossless: at most 256 media, and slots are counted in 24 bits.
            let id = move |slot: usize| SegmentId::new(medium as u8, slot as u32);
            lane.segments.iter().enumerate().map(move |(slot, segment)| (id(slot), segment))
        })
    }
}

#[derive(Default)]
pub(crate) struct Stats {
    pub(crate) live_bytes: AtomicU64,
    pub(crate) live_records: AtomicU64,
    pub(crate) admitted_value_bytes: AtomicU64,
    pub(crate) reinserted_value_bytes: AtomicU64,
    pub(crate) written_bytes: AtomicU64,
    pub(crate) segments_sealed: AtomicU64,
    pub(crate) segments_reclaimed: AtomicU64,
    pub(crate) checksum_mismatches: AtomicU64,
    pub(crate) write_errors: AtomicU64,
}

/// The tier's inside.
pub(crate) struct Log {
    pub(crate) info: TierInfo,
    pub(crate) env: Arc<dyn Env>,
    pub(crate) media: Vec<Arc<dyn Medium>>,
    pub(crate) geometry: Geometry,
    pub(crate) counters: Vec<Box<[Counters]>>,
    pub(crate) stats: Stats,
    pub(crate) headers: HeaderPool,
    pub(crate) parts: Mutex<PartsMap>,
    /// Short critical sections only; never held across an await or a call of another lock's owner.
    pub(crate) state: Mutex<State>,
}

impl Log {
    pub(crate) fn new_state(media: &[Arc<dyn Medium>], incarnation: u32) -> State {
        let lanes = media.iter().map(|medium| Lane {
            segments: vec![Segment::FREE; medium.info().segments_max as usize],
            free: VecDeque::new(),
            open: None,
            opening: false,
            sealing: 0,
        });
        State {
            stage: Stage::Fresh,
            lanes: lanes.collect(),
            turn: 0,
            free_segments: 0,
            sequence: u64::from(incarnation) << 40,
            writing: BTreeMap::new(),
            graves: BTreeMap::new(),
            queues: Default::default(),
            idle: Vec::new(),
        }
    }

    pub(crate) fn counters(&self, id: SegmentId) -> &Counters {
        &self.counters[id.medium()][id.slot() as usize]
    }

    /// True when `location` can be the start of `stored` bytes.
    pub(crate) fn holds(&self, location: Location, stored: u64) -> bool {
        let slots = self.counters.get(location.segment.medium());
        slots.is_some_and(|slots| (location.segment.slot() as usize) < slots.len())
            && self.geometry.holds(location.page, stored)
    }

    /// Counts `stored` bytes at `id` as live.
    pub(crate) fn count_live(&self, id: SegmentId, stored: u64) {
        let bytes = pages_in(stored) * PAGE;
        let counters = self.counters(id);
        counters.live_bytes.fetch_add(bytes, Ordering::Relaxed);
        counters.live_records.fetch_add(1, Ordering::Relaxed);
        self.stats.live_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.stats.live_records.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts `stored` bytes at `id` as dead. Panics when they were not live: a row was freed twice.
    pub(crate) fn count_dead(&self, id: SegmentId, stored: u64) {
        let bytes = pages_in(stored) * PAGE;
        let counters = self.counters(id);
        let before = counters.live_bytes.fetch_sub(bytes, Ordering::Relaxed);
        assert!(before >= bytes, "segment {id:?} of tier {}: freed more than was live", self.info.name);
        let before = counters.live_records.fetch_sub(1, Ordering::Relaxed);
        assert!(before >= 1, "segment {id:?} of tier {}: freed more records than were live", self.info.name);
        self.stats.live_bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.stats.live_records.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn free(&self, location: Location, length: u64) {
        if length <= self.geometry.part_bytes {
            return self.count_dead(location.segment, length);
        }
        let places = self.parts.lock().remove(location);
        let places =
            places.unwrap_or_else(|| panic!("a value in parts at {location:?} was freed that is not there"));
        for (place, stored) in places.with_lengths(location, length, self.geometry.part_bytes) {
            self.count_dead(place.segment, stored);
        }
    }

    pub(crate) fn wanted(&self, location: Location, length: u64) {
        let add = |id: SegmentId, stored: u64| {
            self.counters(id).wanted_bytes.fetch_add(pages_in(stored) * PAGE, Ordering::Relaxed);
        };
        if length <= self.geometry.part_bytes {
            return add(location.segment, length);
        }
        let places = self.parts.lock().get(location).cloned();
        if let Some(places) = places {
            for (place, stored) in places.with_lengths(location, length, self.geometry.part_bytes) {
                add(place.segment, stored);
            }
        }
    }

    /// Reads `bytes` (whole pages) at `page` of a segment into memory of its own.
    pub(crate) fn read(&self, id: SegmentId, page: u32, bytes: u64) -> BoxFuture<'static, Result<BufMut>> {
        let into = BufMut::heap(bytes as usize); // lossless: within a segment
        let op = MediumOp::Read { slot: id.slot(), offset: u64::from(page) * PAGE, into, check: None };
        let batch = self.media[id.medium()].submit(vec![op]);
        Box::pin(async move {
            let done = batch.await.pop().ok_or_else(|| Error::internal("a read ended with no result"))?;
            done.result?;
            done.buf.ok_or_else(|| Error::unavailable("the device kept the buffer of a read"))
        })
    }

    /// Writes `bytes`, padded to whole pages, at `page` of a segment.
    pub(crate) async fn write(&self, id: SegmentId, page: u32, bytes: &[u8]) -> Result<()> {
        let from = vec![self.headers.load(bytes)];
        self.stats.written_bytes.fetch_add(from[0].len() as u64, Ordering::Relaxed);
        let op = MediumOp::Write { slot: id.slot(), offset: u64::from(page) * PAGE, from };
        let done = self.media[id.medium()].submit(vec![op]).await.pop();
        let result =
            done.map_or_else(|| Err(Error::internal("a write ended with no result")), |done| done.result);
        if result.is_err() {
            self.stats.write_errors.fetch_add(1, Ordering::Relaxed);
        }
        result
    }

    /// Makes all completed writes durable, on all media.
    pub(crate) async fn flush(&self) -> Result<()> {
        try_join_all(self.media.iter().map(|medium| medium.flush())).await.map(drop)
    }

    /// Free segments at which reclaim should run.
    pub(crate) fn low_mark(segments: u32) -> u32 {
        RESERVED_SEGMENTS + (segments * 3 / 100).max(2).min(segments / 8).max(1)
    }

    pub(crate) fn wants_reclaim(&self) -> bool {
        let state = self.state.lock();
        state.free_segments <= Self::low_mark(state.lanes.iter().map(|lane| lane.segments.len() as u32).sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_parts_fill_a_segment() {
        for (segment_bytes, part_bytes) in
            [(1 << 20, 128 << 10), (64 << 20, 16_256 << 10), (1 << 30, 262_016 << 10)]
        {
            let geometry = Geometry::new(segment_bytes);
            assert_eq!(geometry.part_bytes, part_bytes);
            let record = Record::bytes_for(part_bytes, KEY_BYTES_MAX);
            let group = group::run_pages(record) + pages_in(part_bytes);
            let pages = 2 + 4 * group + pages_in(4 * record as u64);
            assert!(pages <= u64::from(geometry.segment_pages), "{segment_bytes}");
        }
    }

    #[test]
    fn reclaim_starts_before_the_reserve_is_all_there_is() {
        for (segments, mark) in [(6, 3), (16, 4), (32, 4), (100, 5), (1000, 32)] {
            assert_eq!(Log::low_mark(segments), mark, "{segments}");
        }
    }
}
