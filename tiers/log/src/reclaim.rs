//! Reclaim: a segment is picked, its records are told to the engine, and once nothing in it is needed it is free.
//!
//! A removal must outlive what it removed: a tombstone is written again unless every segment that could hold an older record
//! of its key is gone, durably. That is why which segments are gone is asked before the flush that precedes each free mark.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ebbtide_core::{Error, Generation, NamespaceId, Result, SegmentId, VictimRecord, Victims};

use crate::format::record::{Kind, Record, Records};
use crate::log::{Log, Phase, Segment, State};
use crate::room::Purpose;
use crate::scan::Contents;

/// A removal.
#[derive(Clone, Debug)]
pub(crate) struct Grave {
    pub(crate) namespace: NamespaceId,
    pub(crate) key: Box<[u8]>,
    pub(crate) generation: Generation,
    /// What it voids stands in segments with sequences up to this one; `None` for one that is written for the first time.
    pub(crate) barrier: Option<u64>,
}

impl Grave {
    /// Appends its record.
    pub(crate) fn encode(&self, barrier: u64, target: &mut Vec<u8>) {
        let record = Record {
            kind: Kind::Tombstone,
            namespace: self.namespace,
            key: &self.key,
            generation: self.generation,
            length: 0,
            sum: self.barrier.unwrap_or(barrier),
            stored: 0,
            page: 0,
            part: 0,
            parts: 0,
            first_block: 0,
            sums: &[],
        };
        record.encode(target);
    }
}

impl Log {
    /// Picks a segment and reads what stands in it.
    pub(crate) async fn reclaim(self: Arc<Self>) -> Result<Option<Victims>> {
        if self.free_empty().await? && !self.wants_reclaim() {
            return Ok(None);
        }
        let (segment, sequence) = loop {
            match self.pick() {
                Some(picked) => break picked,
                // What is being sealed now is the candidate that is missing.
                None => match self.wait_sealing() {
                    Some(sealed) => drop(sealed.await),
                    None => return Ok(None),
                },
            }
        };
        match self.contents(segment, sequence).await {
            Ok(contents) => Ok(Some(self.victims(segment, &contents))),
            Err(error) => {
                let mut state = self.state.lock();
                state.segment(segment).phase = Phase::Sealed;
                state.segment(segment).unreadable = true;
                Err(error.context(format!("reclaim segment {segment:?} of tier {}", self.info.name)))
            }
        }
    }

    /// Marks the best sealed segment as being reclaimed.
    fn pick(&self) -> Option<(SegmentId, u64)> {
        let mut state = self.state.lock();
        let cost = |(id, segment): (SegmentId, &Segment)| {
            let counters = self.counters(id);
            let live = counters.live_bytes.load(Ordering::Relaxed);
            let wanted = counters.wanted_bytes.load(Ordering::Relaxed).min(live);
            ((segment.unreadable, wanted, live, segment.sequence), id)
        };
        let sealed =
            state.segments().filter(|(_, segment)| segment.phase == Phase::Sealed && segment.held == 0);
        let (cost, id) = sealed.map(cost).min()?;
        state.segment(id).phase = Phase::Reclaiming;
        // What was wanted long ago fades, so that a segment is not kept for what it once was.
        for (other, _) in state.segments() {
            let wanted = &self.counters(other).wanted_bytes;
            wanted.store(wanted.load(Ordering::Relaxed) / 2, Ordering::Relaxed);
        }
        Some((id, cost.3))
    }

    /// Frees sealed segments in which nothing is live and no removal stands. True when there was one.
    async fn free_empty(&self) -> Result<bool> {
        let empty: Vec<(SegmentId, u64)> = {
            let mut state = self.state.lock();
            let is_empty = |(id, segment): &(SegmentId, &Segment)| {
                segment.phase == Phase::Sealed
                    && (segment.held, segment.tombstones) == (0, 0)
                    && self.counters(*id).live_records.load(Ordering::Relaxed) == 0
            };
            let found: Vec<_> =
                state.segments().filter(is_empty).map(|(id, segment)| (id, segment.sequence)).collect();
            found.iter().for_each(|(id, _)| state.segment(*id).phase = Phase::Releasing);
            found
        };
        if empty.is_empty() {
            return Ok(false);
        }
        let mut flushed = self.flush().await;
        for (id, sequence) in empty {
            let freed = match flushed.clone() {
                Ok(()) => self.set_free(id, sequence).await,
                Err(error) => Err(error),
            };
            if let Err(error) = freed {
                self.state.lock().segment(id).phase = Phase::Sealed;
                flushed = Err(error);
            }
        }
        flushed.map(|()| true)
    }

    /// What the engine is told of a segment; its tombstones are kept for its release.
    fn victims(&self, segment: SegmentId, contents: &Contents) -> Victims {
        let mut records = Vec::new();
        let mut graves = Vec::new();
        let mut told = BTreeSet::new(); // values of which a part has been told
        let parts = self.parts.lock();
        for (record, _) in Records::new(contents.records()) {
            let here = ebbtide_core::Location { segment, page: record.page };
            let location = match record.kind {
                Kind::Tombstone => {
                    graves.push(Grave {
                        namespace: record.namespace,
                        key: record.key.into(),
                        generation: record.generation,
                        barrier: Some(record.sum),
                    });
                    continue;
                }
                Kind::Value => here,
                Kind::Part => {
                    // A part that belongs to no value that is whole is dead.
                    let first = if parts.get(here).is_some() { Some(here) } else { parts.first_of(here) };
                    match first {
                        Some(first) if told.insert(first) => first,
                        _ => continue,
                    }
                }
            };
            records.push(VictimRecord {
                namespace: record.namespace,
                key: record.key.into(),
                generation: record.generation,
                length: record.length,
                location,
            });
        }
        drop(parts);
        self.state.lock().graves.insert(segment, graves);
        Victims { segment, records }
    }

    /// Frees a segment that was picked.
    pub(crate) async fn release(self: Arc<Self>, id: SegmentId) -> Result<()> {
        let (sequence, graves, needed) = {
            let mut state = self.state.lock();
            let known =
                self.counters.get(id.medium()).is_some_and(|slots| (id.slot() as usize) < slots.len());
            if !known || state.segment(id).phase != Phase::Reclaiming {
                return Err(Error::invalid(format!(
                    "segment {id:?} of tier {} is not reclaimed",
                    self.info.name
                )));
            }
            let live = self.counters(id).live_records.load(Ordering::Relaxed);
            if live > 0 {
                // A row that came in between points into it: to be picked again, and its records told again.
                state.segment(id).phase = Phase::Sealed;
                state.graves.remove(&id);
                return Err(Error::stale(format!(
                    "segment {id:?} of tier {}: {live} records are live",
                    self.info.name
                )));
            }
            state.segment(id).phase = Phase::Releasing;
            let graves = state.graves.remove(&id).unwrap_or_default();
            (state.segment(id).sequence, graves, oldest_beside(&state, id))
        };
        let released = async {
            let is_needed =
                |grave: &Grave| needed.is_some_and(|oldest| grave.barrier.is_none_or(|at| oldest <= at));
            let needed: Vec<Grave> = graves.into_iter().filter(is_needed).collect();
            if !needed.is_empty() {
                Arc::clone(&self).bury(needed, Purpose::Reinsert).await?;
            }
            self.flush().await?;
            self.set_free(id, sequence).await
        };
        let result = released.await;
        if result.is_err() {
            self.state.lock().segment(id).phase = Phase::Sealed;
        }
        result.map_err(|error| error.context(format!("release segment {id:?} of tier {}", self.info.name)))
    }

    /// Writes the free mark of a segment and gives its slot back. Durable by the next flush; until then a power cut brings
    /// back what stood in it, which was right.
    async fn set_free(&self, id: SegmentId, sequence: u64) -> Result<()> {
        self.write(id, 0, &self.header(id, sequence, true)).await?;
        self.media[id.medium()].remove(id.slot()).await?;
        self.counters(id).wanted_bytes.store(0, Ordering::Relaxed);
        self.state.lock().set_free(id);
        self.stats.segments_reclaimed.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// The lowest sequence of the segments that may hold records, `id` left out.
fn oldest_beside(state: &State, id: SegmentId) -> Option<u64> {
    let others = state.segments().filter(|(other, segment)| *other != id && segment.phase != Phase::Free);
    others.filter(|(_, segment)| segment.sequence > 0).map(|(_, segment)| segment.sequence).min()
}
