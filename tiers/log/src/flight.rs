//! A group between its write and the moment when it counts.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ebbtide_core::{Batch, Error, Location, Result, SegmentId};
use futures_channel::oneshot;

use crate::log::{HeaderState, Log, Phase};
use crate::place::{Placement, detach};
use crate::room::wake;

/// A group on its way. It holds its segment from reclaim until it is dropped; when that is before it has landed, the
/// landing goes on by itself.
pub(crate) struct Flight {
    log: Arc<Log>,
    segment: SegmentId,
    page: u32,
    first: bool,
    tombstones: u32,
    records: Box<[u8]>,
    /// Where its values stand, in order.
    pub(crate) locations: Vec<Location>,
    batch: Option<Batch>,
    outcome: Result<()>,
    landed: Option<Result<()>>,
    /// It lands by itself already. When that is dropped too, the tasks of this process have ended, and so has the log.
    alone: bool,
}

impl Flight {
    pub(crate) fn new(
        log: Arc<Log>,
        placement: &Placement,
        batch: Batch,
        records: Vec<u8>,
        locations: Vec<Location>,
        tombstones: u32,
    ) -> Flight {
        Flight {
            log,
            segment: placement.segment,
            page: placement.page,
            first: placement.first,
            tombstones,
            records: records.into_boxed_slice(),
            locations,
            batch: Some(batch),
            outcome: Ok(()),
            landed: None,
            alone: false,
        }
    }

    /// Waits until the group counts, or does not: its write and that of its segment's header must be done. Can be asked
    /// again.
    pub(crate) async fn land(&mut self) -> Result<()> {
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
        match self.landed {
            Some(Ok(())) => return self.log.state.lock().segment(self.segment).held -= 1,
            Some(Err(_)) => return,
            None if self.alone => return,
            None => {}
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
            alone: true,
        };
        let landing = async move {
            let _ = rest.land().await; // nobody is left to tell
        };
        self.log.env.spawn("land a group", Box::pin(landing));
    }
}

impl Log {
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
            match failed {
                true => segment.held -= 1, // before it can be given up and written anew
                false => segment.tombstones += flight.tombstones,
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
