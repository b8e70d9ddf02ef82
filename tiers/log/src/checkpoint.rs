//! The checkpoint: written at close, believed at the next start when the clean mark stands and every chunk is whole.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ebbtide_core::{
    Batch, CheckpointRow, Error, Location, MediumOp, Recovered, RecoverySummary, Result, SegmentId,
};
use ebbtide_mem::{BufMut, round_up_to_page};

use crate::format::PAGE;
use crate::format::checkpoint::{
    CHUNK_BYTES, Chunk, ChunkId, Entry, PartEntry, SegmentEntry, chunk_offset, chunks_per_segment,
    entries_max,
};
use crate::format::meta::{Meta, SEGMENTS_MAX};
use crate::format::segment::{Header, Use};
use crate::log::{Log, Phase, Stage};
use crate::parts::Places;
use crate::recover::{Sink, read_result};

/// Chunks in flight.
const CHUNKS_AHEAD_MAX: usize = 16;

impl Log {
    /// Seals what is open, writes a checkpoint where there is room for it, and sets the clean mark.
    pub(crate) async fn close(
        self: Arc<Self>,
        rows: Box<dyn Iterator<Item = Vec<CheckpointRow>> + Send>,
    ) -> Result<()> {
        let stage = {
            let mut state = self.state.lock();
            let before = state.stage;
            state.close();
            before
        };
        match stage {
            Stage::Running => {}
            Stage::Fresh => return Ok(()), // nothing was told, so nothing may be forgotten
            Stage::Closed => return Err(Error::closed(format!("tier {} is closed", self.info.name))),
        }
        self.seal_all().await;
        let mut writer = Writer::new(&self);
        let meta = match writer.write_all(rows).await {
            Ok(()) => writer.meta,
            Err(error) => {
                tracing::warn!(tier = %self.info.name, %error, "no checkpoint: the next start reads footers");
                Meta { clean: true, ..Meta::default() }
            }
        };
        self.flush().await?;
        self.media[0].write_meta(meta.encode()).await
    }

    /// Reads the checkpoint that `meta` speaks of. False when it is not whole; then nothing was told.
    pub(crate) async fn recover_rows(
        self: &Arc<Self>,
        meta: &Meta,
        sink: &mut Sink<'_>,
        summary: &mut RecoverySummary,
    ) -> Result<bool> {
        let mut rows = 0;
        let seen = self.each_chunk(meta, |chunk| rows += chunk.iter::<CheckpointRow>().count() as u64).await;
        let whole = seen.and_then(|()| match rows == meta.rows {
            true => Ok(()),
            false => Err(Error::corrupt(format!("it has {rows} rows instead of {}", meta.rows))),
        });
        if let Err(error) = whole {
            tracing::warn!(tier = %self.info.name, %error, "checkpoint is not whole: footers are read instead");
            return Ok(false);
        }
        // Only now is anything told: a row must not come from the checkpoint and from a footer too.
        let mut parts = BTreeMap::new();
        let told = self.each_chunk(meta, |chunk| {
            chunk.iter().for_each(|entry| self.take_segment(&entry));
            chunk.iter().for_each(|entry| self.take_part(&entry, &mut parts));
            for row in chunk.iter::<CheckpointRow>() {
                if self.take_row(&row, &mut parts) {
                    summary.records += 1;
                    sink(Recovered::Row(row));
                }
            }
        });
        told.await?;
        summary.from_checkpoint = true;
        Ok(true)
    }

    /// Reads the chunks of a checkpoint in order, some ahead.
    async fn each_chunk(&self, meta: &Meta, mut each: impl FnMut(Chunk<'_>)) -> Result<()> {
        let per_segment = chunks_per_segment(self.geometry.segment_pages);
        let mut ahead: VecDeque<Batch> = VecDeque::new();
        let mut next = 0;
        for index in 0..meta.chunks {
            while next < meta.chunks && ahead.len() < CHUNKS_AHEAD_MAX {
                let segment = meta.segments.get((next / per_segment) as usize);
                let known = segment.filter(|id| self.knows(**id));
                let id = *known.ok_or_else(|| Error::corrupt(format!("chunk {next} has no segment")))?;
                let (offset, into) = (chunk_offset(next % per_segment), BufMut::heap(CHUNK_BYTES));
                let op = MediumOp::Read { slot: id.slot(), offset, into, check: None };
                ahead.push_back(self.media[id.medium()].submit(vec![op]));
                next += 1;
            }
            let Some(batch) = ahead.pop_front() else { break };
            let buf = read_result(batch.await)?;
            let id = ChunkId { store: self.info.store, checkpoint: meta.checkpoint, index };
            let chunk = buf.spans().next().and_then(|bytes| Chunk::decode(bytes, id));
            each(chunk.ok_or_else(|| Error::corrupt(format!("chunk {index} is damaged")))?);
        }
        Ok(())
    }

    fn knows(&self, id: SegmentId) -> bool {
        self.counters.get(id.medium()).is_some_and(|slots| (id.slot() as usize) < slots.len())
    }

    fn take_segment(&self, entry: &SegmentEntry) {
        if self.knows(entry.segment) {
            let mut state = self.state.lock();
            let segment = state.segment(entry.segment);
            (segment.phase, segment.sequence) = (Phase::Sealed, entry.sequence);
            segment.tombstones = entry.tombstones;
        }
    }

    fn take_part(&self, entry: &PartEntry, parts: &mut BTreeMap<Location, Vec<Location>>) {
        let further = parts.entry(entry.first).or_default();
        let next = further.len() + 1 == usize::from(entry.part);
        if next && u64::from(entry.part_pages) * PAGE == self.geometry.part_bytes {
            further.push(entry.location);
        }
    }

    /// Counts a row as live; false when it points nowhere.
    fn take_row(&self, row: &CheckpointRow, parts: &mut BTreeMap<Location, Vec<Location>>) -> bool {
        let part_bytes = self.geometry.part_bytes;
        let further = match row.length > part_bytes {
            true => parts.remove(&row.location).unwrap_or_default(),
            false => Vec::new(),
        };
        if row.length == 0 || self.geometry.parts_of(row.length) != further.len() as u64 + 1 {
            return false;
        }
        let places = Places(further.into_boxed_slice());
        let each = || places.with_lengths(row.location, row.length, part_bytes);
        if !each().all(|(place, stored)| self.holds(place, stored)) {
            return false;
        }
        each().for_each(|(place, stored)| self.count_live(place.segment, stored));
        if !places.0.is_empty() {
            self.parts.lock().insert(row.location, places.0);
        }
        true
    }
}

/// Writes chunks into free segments.
struct Writer<'l> {
    log: &'l Log,
    /// What the next start will be told.
    meta: Meta,
    flying: VecDeque<Batch>,
}

impl<'l> Writer<'l> {
    fn new(log: &'l Log) -> Self {
        let checkpoint = log.state.lock().next_sequence();
        Writer { log, meta: Meta { clean: true, checkpoint, ..Meta::default() }, flying: VecDeque::new() }
    }

    /// Writes segments, parts and rows. Full when the free segments do not hold them.
    async fn write_all(&mut self, rows: Box<dyn Iterator<Item = Vec<CheckpointRow>> + Send>) -> Result<()> {
        let (segments, parts) = (self.segments(), self.parts());
        self.write_entries(std::iter::once(segments)).await?;
        self.write_entries(std::iter::once(parts)).await?;
        self.meta.rows = self.write_entries(rows).await?;
        while let Some(batch) = self.flying.pop_front() {
            written(batch).await?;
        }
        Ok(())
    }

    fn segments(&self) -> Vec<SegmentEntry> {
        let state = self.log.state.lock();
        let used = state.segments().filter(|(_, segment)| segment.phase != Phase::Free);
        used.map(|(id, segment)| SegmentEntry {
            segment: id,
            tombstones: segment.tombstones,
            sequence: segment.sequence,
        })
        .collect()
    }

    fn parts(&self) -> Vec<PartEntry> {
        let part_pages = (self.log.geometry.part_bytes / PAGE) as u32; // lossless: within a segment
        let map = self.log.parts.lock();
        let entries = map.iter().flat_map(|(first, places)| {
            let parts = places.0.len() as u16 + 1; // lossless: at most 32768
            let entry = move |(at, location): (usize, &Location)| PartEntry {
                first,
                location: *location,
                part: at as u16 + 1,
                parts,
                part_pages,
            };
            places.0.iter().enumerate().map(entry)
        });
        entries.collect()
    }

    /// Writes what `batches` bring in full chunks, and the rest in a last one. Returns how many entries that were.
    async fn write_entries<E: Entry>(&mut self, batches: impl Iterator<Item = Vec<E>>) -> Result<u64> {
        let (mut waiting, mut count) = (Vec::new(), 0);
        for batch in batches {
            count += batch.len() as u64;
            waiting.extend(batch);
            let full = waiting.len() / entries_max::<E>() * entries_max::<E>();
            for chunk in waiting[..full].chunks(entries_max::<E>()) {
                self.write_chunk(chunk).await?;
            }
            waiting.drain(..full);
        }
        if !waiting.is_empty() {
            self.write_chunk(&waiting).await?;
        }
        Ok(count)
    }

    async fn write_chunk<E: Entry>(&mut self, entries: &[E]) -> Result<()> {
        let per_segment = chunks_per_segment(self.log.geometry.segment_pages);
        let place = self.meta.chunks % per_segment;
        if place == 0 {
            self.next_segment().await?;
        }
        let id = *self.meta.segments.last().ok_or_else(|| Error::internal("a chunk has no segment"))?;
        let chunk_id =
            ChunkId { store: self.log.info.store, checkpoint: self.meta.checkpoint, index: self.meta.chunks };
        self.meta.chunks += 1;
        let chunk = Chunk::encode(chunk_id, entries);
        let mut buf = BufMut::heap(round_up_to_page(chunk.len()));
        buf.write_at(0, &chunk);
        self.log.stats.written_bytes.fetch_add(buf.len() as u64, Ordering::Relaxed);
        let op = MediumOp::Write { slot: id.slot(), offset: chunk_offset(place), from: vec![buf.freeze()] };
        self.flying.push_back(self.log.media[id.medium()].submit(vec![op]));
        if self.flying.len() >= CHUNKS_AHEAD_MAX
            && let Some(first) = self.flying.pop_front()
        {
            written(first).await?;
        }
        Ok(())
    }

    /// Takes a free segment and writes its header.
    async fn next_segment(&mut self) -> Result<()> {
        let taken = {
            let mut state = self.log.state.lock();
            let turn = self.meta.segments.len() % state.lanes.len();
            let mut lanes = (0..state.lanes.len()).map(|lane| (lane + turn) % self.log.media.len());
            let slot = lanes.find_map(|lane| Some((lane, state.lanes[lane].free.pop_front()?)));
            slot.map(|(lane, slot)| (SegmentId::new(lane as u8, slot), state.next_sequence()))
        };
        let (segment, sequence) =
            taken.ok_or_else(|| Error::full("the free segments do not hold the rows"))?;
        if self.meta.segments.len() == SEGMENTS_MAX {
            return Err(Error::full(format!("the rows do not fit {SEGMENTS_MAX} segments")));
        }
        self.meta.segments.push(segment);
        self.log.media[segment.medium()].create(segment.slot()).await?;
        let header = Header {
            store: self.log.info.store,
            used_for: Use::Checkpoint,
            free: false,
            incarnation: self.log.info.incarnation,
            sequence,
            segment,
            created_ms: self.log.env.wall_ms(),
        };
        self.log.write(segment, 0, &header.encode()).await
    }
}

async fn written(batch: Batch) -> Result<()> {
    let done = batch.await.pop().ok_or_else(|| Error::internal("a write ended with no result"))?;
    done.result
}
