//! Finding room: which segment a group goes to, and who waits for one.

use std::sync::Arc;

use ebbtide_core::{Error, Result, SegmentId};
use futures_channel::oneshot;

use crate::append::Piece;
use crate::flight::Flight;
use crate::format::{group, pages_in};
use crate::log::{
    GROUP_BYTES_MAX, HeaderState, Log, Phase, RESERVED_SEGMENTS, SEALING_MAX, Stage, State, Writing,
};
use crate::room::{Purpose, Ticket};

/// Room for a group.
#[derive(Clone, Copy)]
pub(crate) struct Placement {
    pub(crate) segment: SegmentId,
    pub(crate) sequence: u64,
    /// The greatest sequence given out by now: the barrier of tombstones.
    pub(crate) latest: u64,
    pub(crate) page: u32,
    pub(crate) run_pages: u32,
    pub(crate) pages: u32,
    /// Pieces that fit.
    pub(crate) count: usize,
    /// True for the first group of a segment, which carries its header.
    pub(crate) first: bool,
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
    /// Finds room for as many of `pieces` as make a group. Waits in line for it, and lets `flights` land meanwhile: what it
    /// waits for may be the sealing of their segments.
    pub(crate) async fn place(
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
}

/// Takes the open segment of its medium out of use, to be sealed.
pub(crate) fn detach(state: &mut State, id: SegmentId) {
    let lane = &mut state.lanes[id.medium()];
    lane.open = None;
    lane.sealing += 1;
    lane.segments[id.slot() as usize].phase = Phase::Sealing;
}
