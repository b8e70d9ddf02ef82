//! Writing: objects are cut into pieces, pieces packed into groups, groups placed in open segments and sent.
//!
//! Placing is quick and under the lock; sending and landing are not. A group counts when its write and that of its
//! segment's header are done.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ebbtide_core::{
    BLOCK_BYTES, Batch, Error, Intent, KEY_BYTES_MAX, Location, MediumOp, Object, Result, SegmentId,
};
use ebbtide_mem::{Buf, round_up_to_page};
use futures_channel::oneshot;
use smallvec::SmallVec;

use crate::format::group::{self, Group, Place};
use crate::format::record::{Kind, Record};
use crate::format::segment::{Header, Use};
use crate::format::{PAGE, pages_in};
use crate::log::{
    GROUP_BYTES_MAX, HeaderState, Log, Phase, RESERVED_SEGMENTS, SEALING_MAX, Stage, State, Writing,
};
use crate::reclaim::Grave;
use crate::room::{Purpose, Ticket, wake};

/// What one record will stand for.
struct Piece {
    body: Body,
    /// Bytes of a value; 0 for a tombstone.
    stored: u64,
    record_bytes: usize,
}

enum Body {
    /// Part `part` of `parts` of the object with this index in its batch.
    Value {
        object: usize,
        part: u16,
        parts: u16,
    },
    Grave(Grave),
}

/// Room for a group.
struct Placement {
    segment: SegmentId,
    sequence: u64,
    /// The greatest sequence given out by now: the barrier of tombstones.
    latest: u64,
    page: u32,
    run_pages: u32,
    pages: u32,
    /// Pieces that fit.
    count: usize,
    /// True for the first group of a segment, which carries its header.
    first: bool,
}

/// What a writer does next.
enum Step {
    Placed(Placement),
    /// Makes `segment` ready; `full` is sealed.
    Open {
        segment: SegmentId,
        full: Option<SegmentId>,
    },
    Wait(oneshot::Receiver<()>),
}

/// What one medium offers.
enum OnMedium {
    Step(Step),
    /// A segment is being opened, or too many are being sealed.
    Busy,
    NoRoom,
}

impl Log {
    /// Writes `objects`; result i belongs to object i.
    pub(crate) async fn put_many(
        self: Arc<Self>,
        objects: Vec<Arc<Object>>,
        intent: Intent,
    ) -> Vec<Result<Location>> {
        let purpose = match intent {
            Intent::Demote => Purpose::Demote,
            Intent::Reinsert => Purpose::Reinsert,
        };
        let mut results: Vec<Option<Error>> = Vec::new();
        let mut pieces = Vec::with_capacity(objects.len());
        for (index, object) in objects.iter().enumerate() {
            results.push(self.cut(index, object, &mut pieces).err());
        }
        let mut flights: Vec<Flight> = Vec::new();
        let mut next = 0;
        while next < pieces.len() {
            match self.place(&pieces[next..], purpose, &mut flights).await {
                Ok(placement) => {
                    let group = &pieces[next..next + placement.count];
                    next += group.len();
                    flights.push(self.send(placement, group, &objects));
                }
                Err(error) => {
                    for piece in &pieces[next..] {
                        let Body::Value { object, .. } = piece.body else { continue };
                        results[object] = Some(error.clone());
                    }
                    break;
                }
            }
        }
        let mut places: Vec<SmallVec<[Location; 1]>> = vec![SmallVec::new(); objects.len()];
        let mut sent = pieces.iter();
        for flight in &mut flights {
            let landed = flight.land().await;
            for (location, piece) in flight.locations.iter().zip(sent.by_ref()) {
                let Body::Value { object, .. } = piece.body else { continue };
                match &landed {
                    Ok(()) => places[object].push(*location),
                    Err(error) => results[object] = Some(error.clone()),
                }
            }
        }
        let finish = |((object, places), error): ((&Arc<Object>, SmallVec<_>), Option<Error>)| match error {
            Some(error) => Err(error), // parts of it that did land are dead space
            None => Ok(self.finish(object, &places, intent)),
        };
        // The flights, and with them the holds on their segments, end behind the last count.
        objects.iter().zip(places).zip(results).map(finish).collect()
    }

    /// Adds the pieces of an object.
    fn cut(&self, index: usize, object: &Object, pieces: &mut Vec<Piece>) -> Result<()> {
        let length = object.length();
        if length > self.info.object_bytes_max || object.key.len() > KEY_BYTES_MAX || object.key.is_empty() {
            let max = self.info.object_bytes_max;
            return Err(Error::invalid(format!(
                "tier {}: value of {length} bytes, at most {max}",
                self.info.name
            )));
        }
        let part_bytes = self.geometry.part_bytes;
        // Lossless: 4 GiB in parts of at least 128 KiB are 32768.
        let parts = self.geometry.parts_of(length) as u16;
        pieces.extend((0..parts).map(|part| {
            let stored = part_bytes.min(length - u64::from(part) * part_bytes);
            let record_bytes = Record::bytes_for(stored, object.key.len());
            Piece { body: Body::Value { object: index, part, parts }, stored, record_bytes }
        }));
        Ok(())
    }

    /// Counts an object whose groups have landed, and answers where it starts.
    fn finish(&self, object: &Object, places: &[Location], intent: Intent) -> Location {
        let (length, part_bytes) = (object.length(), self.geometry.part_bytes);
        for (part, place) in places.iter().enumerate() {
            self.count_live(place.segment, part_bytes.min(length - part as u64 * part_bytes));
        }
        let written = match intent {
            Intent::Demote => &self.stats.admitted_value_bytes,
            Intent::Reinsert => &self.stats.reinserted_value_bytes,
        };
        written.fetch_add(length, Ordering::Relaxed);
        if places.len() > 1 {
            self.parts.lock().insert(places[0], places[1..].into());
        }
        places[0]
    }

    /// Writes tombstones. On return they survive the process.
    pub(crate) async fn bury(self: Arc<Self>, graves: Vec<Grave>, purpose: Purpose) -> Result<()> {
        let piece = |grave: Grave| {
            let record_bytes = Record::bytes_for(0, grave.key.len());
            Piece { body: Body::Grave(grave), stored: 0, record_bytes }
        };
        let pieces: Vec<Piece> = graves.into_iter().map(piece).collect();
        let mut flights: Vec<Flight> = Vec::new();
        let mut next = 0;
        while next < pieces.len() {
            let placement = self.place(&pieces[next..], purpose, &mut flights).await?;
            let group = &pieces[next..next + placement.count];
            next += group.len();
            flights.push(self.send(placement, group, &[]));
        }
        for flight in &mut flights {
            flight.land().await?;
        }
        Ok(())
    }

    /// Finds room for as many of `pieces` as make a group. Waits in line for it, and lets `flights` land meanwhile: what it
    /// waits for may be the sealing of their segments.
    async fn place(
        self: &Arc<Self>,
        pieces: &[Piece],
        purpose: Purpose,
        flights: &mut [Flight],
    ) -> Result<Placement> {
        let mut ticket = Ticket::new(Arc::clone(self), purpose);
        loop {
            let step = {
                let mut state = self.state.lock();
                self.step(&mut state, pieces, purpose, &mut ticket.number)?
            };
            match step {
                Step::Placed(placement) => return Ok(placement),
                Step::Open { segment, full } => {
                    full.into_iter().for_each(|full| self.spawn_seal(full));
                    self.open(segment).await?;
                }
                Step::Wait(woken) => {
                    for flight in &mut *flights {
                        let _ = flight.land().await; // asked for again at the end
                    }
                    if !flights.is_empty() && self.waits_for_itself() {
                        return Err(Error::full(format!(
                            "tier {}: the batch takes all of it",
                            self.info.name
                        )));
                    }
                    let _ = woken.await; // a sender that is gone says the same: try again
                }
            }
        }
    }

    /// True when every segment that reclaim could free is held by batches that have not ended, of which this is one.
    fn waits_for_itself(&self) -> bool {
        let state = self.state.lock();
        let free = state.free_segments > RESERVED_SEGMENTS;
        let opening = state.lanes.iter().any(|lane| lane.opening);
        !free
            && !opening
            && !state.segments().any(|(_, segment)| segment.phase.is_past_open() && segment.held == 0)
    }

    fn step(
        &self,
        state: &mut State,
        pieces: &[Piece],
        purpose: Purpose,
        ticket: &mut Option<u64>,
    ) -> Result<Step> {
        match state.stage {
            Stage::Running => {}
            Stage::Fresh => {
                return Err(Error::internal(format!("tier {}: not recovered yet", self.info.name)));
            }
            Stage::Closed => return Err(Error::closed(format!("tier {} is closed", self.info.name))),
        }
        if !state.queue(purpose).may_try(*ticket) {
            return Ok(Step::Wait(state.queue(purpose).wait(ticket)));
        }
        let mut on_its_way = false;
        let media = state.lanes.len();
        for medium in (state.turn..state.turn + media).map(|turn| turn % media) {
            match self.step_on(medium, state, pieces, purpose) {
                OnMedium::Step(step) => {
                    // The next group goes to the next medium; who opens a segment comes back to it.
                    state.turn = medium + usize::from(matches!(step, Step::Placed(_)));
                    return Ok(step);
                }
                OnMedium::Busy => on_its_way = true,
                OnMedium::NoRoom => {}
            }
        }
        if purpose == Purpose::Reinsert && !on_its_way {
            return Err(Error::full(format!("tier {}: no free segment is left for reclaim", self.info.name)));
        }
        Ok(Step::Wait(state.queue(purpose).wait(ticket)))
    }

    /// Places a group in the open segment of a medium, or takes the next segment there.
    fn step_on(&self, medium: usize, state: &mut State, pieces: &[Piece], purpose: Purpose) -> OnMedium {
        let free = state.free_segments;
        let open = state.lanes[medium].open.map(|slot| SegmentId::new(medium as u8, slot));
        if let Some(id) = open {
            let sequences = (state.segment(id).sequence, state.sequence);
            let writing = state.writing.get_mut(&id).expect("an open segment is being written");
            // What was opened from the reserve is for reclaim, until reclaim has made up for it.
            let may_append = purpose != Purpose::Demote || !writing.from_reserve || free >= RESERVED_SEGMENTS;
            if may_append && let Some(placement) = self.fit(id, sequences, writing, pieces) {
                state.segment(id).held += 1;
                return OnMedium::Step(Step::Placed(placement));
            }
        }
        let lane = &mut state.lanes[medium];
        if lane.opening || (open.is_some() && lane.sealing >= SEALING_MAX) {
            return OnMedium::Busy;
        }
        if free <= if purpose == Purpose::Demote { RESERVED_SEGMENTS } else { 0 } {
            return OnMedium::NoRoom;
        }
        let Some(slot) = lane.free.pop_front() else { return OnMedium::NoRoom };
        lane.opening = true;
        if let Some(id) = open {
            detach(state, id);
        }
        let segment = SegmentId::new(medium as u8, slot);
        state.segment(segment).phase = Phase::Opening;
        state.free_segments -= 1;
        OnMedium::Step(Step::Open { segment, full: open })
    }

    /// Takes room for a group in a segment; `None` when not even the first piece fits.
    fn fit(
        &self,
        segment: SegmentId,
        (sequence, latest): (u64, u64),
        writing: &mut Writing,
        pieces: &[Piece],
    ) -> Option<Placement> {
        let (mut records, mut values, mut value_bytes) = (0, 0, 0);
        let mut fits = None;
        for (index, piece) in pieces.iter().enumerate() {
            records += piece.record_bytes;
            values += pages_in(piece.stored);
            value_bytes += piece.stored;
            let pages = group::run_pages(records) + values;
            let footer = pages_in((writing.footer_bytes + records) as u64);
            let end = u64::from(writing.cursor) + pages + footer;
            let too_long = index > 0 && value_bytes.max(records as u64) > GROUP_BYTES_MAX;
            if too_long || end > u64::from(self.geometry.last_page()) {
                break;
            }
            fits = Some((index + 1, records, pages));
        }
        let (count, records, pages) = fits?;
        let placement = Placement {
            segment,
            sequence,
            latest,
            page: writing.cursor,
            // Lossless: within a segment of at most 2^18 pages.
            run_pages: group::run_pages(records) as u32,
            pages: pages as u32,
            count,
            first: writing.header == HeaderState::Unsent,
        };
        writing.cursor += placement.pages;
        writing.footer_bytes += records;
        writing.in_flight += 1;
        if placement.first {
            writing.header = HeaderState::InFlight;
        }
        Some(placement)
    }

    /// Makes a segment that was taken from the free ones the open one of its medium.
    async fn open(self: &Arc<Self>, id: SegmentId) -> Result<()> {
        /// Gives the slot back when the writer goes away or the medium refuses.
        struct Undo(Arc<Log>, SegmentId, bool);
        impl Drop for Undo {
            fn drop(&mut self) {
                if self.2 {
                    let mut state = self.0.state.lock();
                    state.lanes[self.1.medium()].opening = false;
                    state.set_free(self.1);
                }
            }
        }
        let mut undo = Undo(Arc::clone(self), id, true);
        self.media[id.medium()].create(id.slot()).await?;
        undo.2 = false;
        let mut state = self.state.lock();
        let sequence = state.next_sequence();
        let segment = state.segment(id);
        (segment.phase, segment.sequence) = (Phase::Open, sequence);
        let from_reserve = state.free_segments < RESERVED_SEGMENTS;
        let writing = Writing {
            cursor: 1,
            footer_bytes: 0,
            in_flight: 0,
            header: HeaderState::Unsent,
            from_reserve,
            landed: Default::default(),
            header_waiters: Vec::new(),
            drained: None,
        };
        state.writing.insert(id, writing);
        state.lanes[id.medium()].open = Some(id.slot());
        state.lanes[id.medium()].opening = false;
        state.stir();
        Ok(())
    }

    /// Encodes a group and starts its write.
    fn send(self: &Arc<Self>, placement: Placement, pieces: &[Piece], objects: &[Arc<Object>]) -> Flight {
        let Placement { segment, sequence, latest, page, run_pages, pages, count, first } = placement;
        let mut records = Vec::with_capacity(pieces.iter().map(|piece| piece.record_bytes).sum());
        let mut values = Vec::with_capacity(pieces.len() + 1);
        let mut locations = Vec::with_capacity(pieces.len());
        let (mut value_page, mut tombstones) = (page + run_pages, 0);
        for piece in pieces {
            match &piece.body {
                Body::Value { object, part, parts } => {
                    let object = &*objects[*object];
                    self.encode_value(object, *part, *parts, piece.stored, value_page, &mut records);
                    values.push(self.stored_part(object, *part, piece.stored));
                    locations.push(Location { segment, page: value_page });
                    value_page += pages_in(piece.stored) as u32; // lossless: within a segment
                }
                Body::Grave(grave) => {
                    grave.encode(latest, &mut records);
                    tombstones += 1;
                }
            }
        }
        let place = Place { store: self.info.store, sequence, page };
        let group = Group { run_pages, pages, count: count as u32, records: &records };
        let run = group.encode(place, self.info.incarnation);
        let header = match first {
            true => [self.header(segment, sequence, false).as_slice(), &run].concat(),
            false => run,
        };
        let start = page - u32::from(first);
        values.insert(0, self.headers.load(&header));
        self.stats.written_bytes.fetch_add(u64::from(page + pages - start) * PAGE, Ordering::Relaxed);
        let op = MediumOp::Write { slot: segment.slot(), offset: u64::from(start) * PAGE, from: values };
        let batch = self.media[segment.medium()].submit(vec![op]);
        Flight {
            log: Arc::clone(self),
            segment,
            page,
            first,
            tombstones,
            records: records.into_boxed_slice(),
            locations,
            batch: Some(batch),
            outcome: Ok(()),
            landed: None,
        }
    }

    /// The header page of a segment.
    pub(crate) fn header(&self, segment: SegmentId, sequence: u64, free: bool) -> [u8; PAGE as usize] {
        let header = Header {
            store: self.info.store,
            used_for: Use::Log,
            free,
            incarnation: self.info.incarnation,
            sequence,
            segment,
            created_ms: self.env.wall_ms(),
        };
        header.encode()
    }

    fn encode_value(
        &self,
        object: &Object,
        part: u16,
        parts: u16,
        stored: u64,
        page: u32,
        target: &mut Vec<u8>,
    ) {
        let blocks_per_part = (self.geometry.part_bytes / BLOCK_BYTES as u64) as usize;
        let first_block = usize::from(part) * blocks_per_part;
        let blocks = ebbtide_core::blocks_in(stored);
        let sums: SmallVec<[u8; 64]> = object.sums.0[first_block..first_block + blocks]
            .iter()
            .flat_map(|sum| sum.to_le_bytes())
            .collect();
        let record = Record {
            kind: if parts == 1 { Kind::Value } else { Kind::Part },
            namespace: object.namespace,
            key: &object.key,
            generation: object.generation,
            length: object.length(),
            sum: object.sum(),
            stored: stored as u32, // lossless: within a segment
            page,
            part,
            parts,
            first_block: first_block as u32,
            sums: &sums,
        };
        record.encode(target);
    }

    /// The memory of one part, whole pages and no more.
    fn stored_part(&self, object: &Object, part: u16, stored: u64) -> Buf {
        let (at, stored) = (u64::from(part) * self.geometry.part_bytes, stored as usize);
        let bytes: usize = object.value.raw_spans().iter().map(|span| span.bytes as usize).sum();
        match at == 0 && bytes == round_up_to_page(stored) {
            true => object.value.clone(),
            false => object.value.slice(at as usize, stored),
        }
    }

    /// Counts a group as landed; says when to ask again while the segment's header is not there yet.
    fn settle(
        self: &Arc<Self>,
        flight: &mut Flight,
    ) -> std::result::Result<Result<()>, oneshot::Receiver<()>> {
        let mut full = None;
        let result = {
            let mut guard = self.state.lock();
            let state = &mut *guard;
            let id = flight.segment;
            let writing =
                state.writing.get_mut(&id).expect("a segment with groups in flight is being written");
            if flight.first {
                let failed = flight.outcome.is_err();
                writing.header = if failed { HeaderState::Failed } else { HeaderState::Written };
                wake(&mut writing.header_waiters);
            }
            if flight.outcome.is_ok() {
                match writing.header {
                    HeaderState::InFlight | HeaderState::Unsent => {
                        let (sender, receiver) = oneshot::channel();
                        writing.header_waiters.push(sender);
                        return Err(receiver);
                    }
                    HeaderState::Failed => {
                        flight.outcome =
                            Err(Error::unavailable(format!("segment {id:?}: its header was not written")));
                    }
                    HeaderState::Written => {
                        writing.landed.insert(flight.page, std::mem::take(&mut flight.records));
                    }
                }
            }
            writing.in_flight -= 1;
            if writing.in_flight == 0
                && let Some(drained) = writing.drained.take()
            {
                let _ = drained.send(());
            }
            let result = std::mem::replace(&mut flight.outcome, Ok(()));
            let failed = result.is_err();
            let segment = state.segment(id);
            if !failed {
                segment.tombstones += flight.tombstones;
            }
            // Where one write failed the next may too: go on in another segment.
            if failed && segment.phase == Phase::Open {
                detach(state, id);
                full = Some(id);
            }
            result
        };
        if result.is_err() {
            self.stats.write_errors.fetch_add(1, Ordering::Relaxed);
        }
        full.into_iter().for_each(|full| self.spawn_seal(full));
        Ok(result)
    }
}

/// Takes the open segment of its medium out of use, to be sealed.
pub(crate) fn detach(state: &mut State, id: SegmentId) {
    let lane = &mut state.lanes[id.medium()];
    lane.open = None;
    lane.sealing += 1;
    lane.segments[id.slot() as usize].phase = Phase::Sealing;
}

/// A group on its way. It holds its segment from reclaim until it is dropped; when that is before it has landed, the
/// landing goes on by itself.
struct Flight {
    log: Arc<Log>,
    segment: SegmentId,
    page: u32,
    first: bool,
    tombstones: u32,
    records: Box<[u8]>,
    locations: Vec<Location>,
    batch: Option<Batch>,
    outcome: Result<()>,
    landed: Option<Result<()>>,
}

impl Flight {
    /// Waits until the group counts, or does not. Can be asked again.
    async fn land(&mut self) -> Result<()> {
        if let Some(batch) = &mut self.batch {
            let done = batch.await.pop();
            self.batch = None;
            self.outcome = match done {
                Some(done) => done.result.map_err(|error| {
                    let message = format!("write a group to segment {:?}: {error}", self.segment);
                    Error::unavailable(message).with_source(error)
                }),
                None => Err(Error::internal("a write ended with no result")),
            };
        }
        loop {
            if let Some(landed) = &self.landed {
                return landed.clone();
            }
            match Arc::clone(&self.log).settle(self) {
                Ok(result) => self.landed = Some(result),
                Err(header) => drop(header.await),
            }
        }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if self.landed.is_some() {
            self.log.state.lock().segment(self.segment).held -= 1;
            return;
        }
        let mut rest = Flight {
            log: Arc::clone(&self.log),
            segment: self.segment,
            page: self.page,
            first: self.first,
            tombstones: self.tombstones,
            records: std::mem::take(&mut self.records),
            locations: Vec::new(),
            batch: self.batch.take(),
            outcome: std::mem::replace(&mut self.outcome, Ok(())),
            landed: None,
        };
        let landing = async move {
            let _ = rest.land().await; // nobody is left to tell
        };
        self.log.env.spawn("land a group", Box::pin(landing));
    }
}
