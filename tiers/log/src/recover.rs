//! Recovery: what the media hold, told to the engine.
//!
//! After a clean close from the checkpoint. Otherwise from footers, and segments that have none are walked and their values
//! verified; nothing of a segment is believed but what a checksum vouches for. Removals are told last: then no order of
//! segments can bring an object back that was removed.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use ebbtide_core::{
    Batch, Done, Error, Generation, Location, MediumOp, NamespaceId, Recovered, RecoverySummary, Result,
    SegmentId,
};
use ebbtide_mem::BufMut;

use crate::format::PAGE;
use crate::format::meta::Meta;
use crate::format::record::{Kind, Record, Records};
use crate::format::segment::{Header, Trailer, Use};
use crate::log::{Log, Phase, Stage};
use crate::scan::{footer_place, whole_footer};

/// Slots whose first and last pages are read at a time.
const SLOTS_AT_A_TIME: usize = 128;
/// Footers that are read ahead.
const FOOTERS_AHEAD_MAX: usize = 8;

/// Whom recovery tells.
pub(crate) type Sink<'s> = dyn for<'b> FnMut(Recovered<'b>) + Send + 's;

/// A segment that holds something.
struct Found {
    id: SegmentId,
    sequence: u64,
    /// `None` when it was not sealed.
    trailer: Option<Trailer>,
}

impl Log {
    pub(crate) async fn recover(self: &Arc<Self>, sink: &mut Sink<'_>) -> Result<RecoverySummary> {
        if self.state.lock().stage != Stage::Fresh {
            return Err(Error::internal(format!("tier {}: recovered twice", self.info.name)));
        }
        let meta = Meta::decode(&self.media[0].read_meta()).filter(|meta| meta.clean);
        let mut summary = RecoverySummary::default();
        let mut unsealed = Vec::new();
        let from_checkpoint = match &meta {
            Some(meta) if meta.chunks > 0 => self.recover_rows(meta, sink, &mut summary).await?,
            _ => false,
        };
        if !from_checkpoint {
            self.scan(sink, &mut summary, &mut unsealed).await?;
        }
        if meta.is_some() {
            // Before anything is written: from here on a start must not believe the checkpoint.
            self.media[0].write_meta(Meta::default().encode()).await?;
        }
        for (id, sequence, records) in unsealed {
            if let Err(error) = self.write_footer(id, sequence, &records).await {
                tracing::warn!(tier = %self.info.name, segment = ?id, %error, "segment was not sealed after its walk");
            }
        }
        self.let_writers_in();
        Ok(summary)
    }

    fn let_writers_in(&self) {
        let mut state = self.state.lock();
        let free: Vec<SegmentId> =
            state.segments().filter(|(_, segment)| segment.phase == Phase::Free).map(|(id, _)| id).collect();
        free.into_iter().for_each(|id| state.set_free(id));
        state.stage = Stage::Running;
        state.stir();
    }

    /// Reads footers, oldest segment first, and walks segments that have none.
    async fn scan(
        self: &Arc<Self>,
        sink: &mut Sink<'_>,
        summary: &mut RecoverySummary,
        unsealed: &mut Vec<(SegmentId, u64, Vec<u8>)>,
    ) -> Result<()> {
        let mut found = Vec::new();
        for medium in 0..self.media.len() {
            self.find(medium, &mut found).await?;
        }
        found.sort_unstable_by_key(|found| (found.sequence, found.id));
        let mut teller = Teller { log: self, sink, summary, sets: BTreeMap::new(), graves: Vec::new() };
        let mut ahead = VecDeque::new();
        let mut found = found.into_iter();
        loop {
            while ahead.len() < FOOTERS_AHEAD_MAX
                && let Some(next) = found.next()
            {
                let footer = next.trailer.and_then(|trailer| self.read_footer(next.id, &trailer));
                ahead.push_back((next, footer));
            }
            let Some((Found { id, sequence, trailer }, footer)) = ahead.pop_front() else { break };
            let footer = match (footer, trailer) {
                (Some(batch), Some(trailer)) => {
                    read_result(batch.await).ok().and_then(|b| whole_footer(b, &trailer))
                }
                _ => None,
            };
            if let Some(footer) = footer {
                teller.summary.segments_sealed += 1;
                teller.tell(id, sequence, footer.spans().next().unwrap_or(&[]));
                continue;
            }
            teller.summary.footers_bad += u32::from(trailer.is_some());
            teller.summary.segments_walked += 1;
            match self.walk(id, sequence).await {
                Ok(walked) => {
                    teller.summary.records_torn += walked.torn;
                    if !walked.records.is_empty() {
                        teller.tell(id, sequence, &walked.records);
                        unsealed.push((id, sequence, walked.records));
                    }
                }
                Err(error) => self.lose(id, &error),
            }
        }
        teller.tell_removals();
        Ok(())
    }

    fn read_footer(&self, id: SegmentId, trailer: &Trailer) -> Option<Batch> {
        let bytes = footer_place(trailer, self.geometry)?;
        let into = BufMut::heap(bytes as usize); // lossless: within a segment
        let offset = u64::from(trailer.footer_page) * PAGE;
        Some(self.media[id.medium()].submit(vec![MediumOp::Read {
            slot: id.slot(),
            offset,
            into,
            check: None,
        }]))
    }

    /// Reads first and last pages of the slots of a medium.
    async fn find(&self, medium: usize, found: &mut Vec<Found>) -> Result<()> {
        if self.media[medium].identity().created {
            return Ok(());
        }
        let slots = self.media[medium].list().await?;
        for slots in slots.chunks(SLOTS_AT_A_TIME) {
            let read = |slot: u32, page: u32| MediumOp::Read {
                slot,
                offset: u64::from(page) * PAGE,
                into: BufMut::heap(PAGE as usize),
                check: None,
            };
            let last = self.geometry.last_page();
            let ops = slots.iter().flat_map(|slot| [read(*slot, 0), read(*slot, last)]).collect();
            let mut done = self.media[medium].submit(ops).await.into_iter();
            for slot in slots {
                let id = SegmentId::new(medium as u8, *slot);
                let (header, trailer) = (done.next(), done.next());
                let header = match read_result(header.into_iter().collect()) {
                    Ok(page) => page,
                    Err(error) => {
                        self.lose(id, &error);
                        continue;
                    }
                };
                let header = self.header_of(id, header.spans().next().unwrap_or(&[]));
                let Some(header) = header.filter(|header| header.used_for == Use::Log && !header.free) else {
                    continue;
                };
                let trailer = read_result(trailer.into_iter().collect()).ok();
                let trailer = trailer.and_then(|page| page.spans().next().and_then(Trailer::decode));
                let trailer = trailer.filter(|trailer| trailer.seals(&header));
                found.push(Found { id, sequence: header.sequence, trailer });
            }
        }
        Ok(())
    }

    /// The header of a slot, when it is one of this store in this place. Anything else is free space, said aloud unless it
    /// is blank.
    fn header_of(&self, id: SegmentId, page: &[u8]) -> Option<Header> {
        let header = Header::decode(page);
        let ours = header.filter(|header| (header.store, header.segment) == (self.info.store, id));
        if ours.is_none() && page.iter().any(|byte| *byte != 0) {
            let what = if header.is_some() { "another store's or slot's" } else { "unreadable" };
            tracing::warn!(tier = %self.info.name, segment = ?id, what, "segment header: its slot counts as free");
        }
        ours
    }

    /// Leaves a segment alone that the device does not give out.
    fn lose(&self, id: SegmentId, error: &Error) {
        tracing::warn!(tier = %self.info.name, segment = ?id, %error, "segment could not be read: it is left alone");
        let mut state = self.state.lock();
        let segment = state.segment(id);
        // What it holds may come back: as old as can be, so that no removal is forgotten.
        (segment.phase, segment.sequence) = (Phase::Lost, 1);
    }
}

pub(crate) fn read_result(done: Vec<Done>) -> Result<BufMut> {
    let done = done.into_iter().next().ok_or_else(|| Error::internal("a read ended with no result"))?;
    done.result?;
    done.buf.ok_or_else(|| Error::unavailable("the device kept the buffer of a read"))
}

/// One write: namespace, generation and key.
type Write = (NamespaceId, Generation, Box<[u8]>);

/// Tells records to the engine and counts them.
struct Teller<'t, 's> {
    log: &'t Log,
    sink: &'t mut Sink<'s>,
    summary: &'t mut RecoverySummary,
    /// Values of which not all parts have been seen.
    sets: BTreeMap<Write, Vec<Option<Location>>>,
    /// The records of removals, to be told last.
    graves: Vec<u8>,
}

impl Teller<'_, '_> {
    fn tell(&mut self, id: SegmentId, sequence: u64, records: &[u8]) {
        let mut tombstones = 0;
        for (record, encoded) in Records::new(records) {
            match record.kind {
                Kind::Tombstone => {
                    tombstones += 1;
                    self.graves.extend_from_slice(encoded);
                }
                _ if !self.log.geometry.holds(record.page, u64::from(record.stored)) => {} // not ours: we never wrote so
                Kind::Value => self.record(&record, Location { segment: id, page: record.page }, &[]),
                Kind::Part => self.part(&record, Location { segment: id, page: record.page }),
            }
        }
        let mut state = self.log.state.lock();
        let segment = state.segment(id);
        (segment.phase, segment.sequence, segment.tombstones) = (Phase::Sealed, sequence, tombstones);
    }

    /// Tells a value that is complete.
    fn record(&mut self, record: &Record<'_>, location: Location, further: &[Location]) {
        let (length, part_bytes) = (record.length, self.log.geometry.part_bytes);
        for (part, place) in std::iter::once(&location).chain(further).enumerate() {
            self.log.count_live(place.segment, part_bytes.min(length - part as u64 * part_bytes));
        }
        if !further.is_empty() {
            self.log.parts.lock().insert(location, further.into());
        }
        self.summary.records += 1;
        (self.sink)(Recovered::Record {
            namespace: record.namespace,
            key: record.key,
            generation: record.generation,
            length,
            sum: record.sum,
            location,
        });
    }

    /// Adds a part to its value, and tells the value when it was the last one missing.
    fn part(&mut self, record: &Record<'_>, location: Location) {
        let (part, part_bytes) = (u64::from(record.part), self.log.geometry.part_bytes);
        let parts = self.log.geometry.parts_of(record.length);
        let stored = record.length.checked_sub(part * part_bytes).map(|left| left.min(part_bytes));
        if u64::from(record.parts) != parts || stored != Some(u64::from(record.stored)) {
            return; // of another cut than this store's: dead space
        }
        let key = (record.namespace, record.generation, Box::from(record.key));
        let set = self.sets.entry(key.clone()).or_insert_with(|| vec![None; usize::from(record.parts)]);
        if set.len() != usize::from(record.parts) {
            return;
        }
        set[usize::from(record.part)] = Some(location);
        if set.iter().all(Option::is_some) {
            let places: Vec<Location> = set.drain(..).flatten().collect();
            self.sets.remove(&key);
            self.record(record, places[0], &places[1..]);
        }
    }

    fn tell_removals(&mut self) {
        for (record, _) in Records::new(&self.graves) {
            let Record { namespace, key, generation, .. } = record;
            (self.sink)(Recovered::Tombstone { namespace, key, generation });
        }
    }
}
