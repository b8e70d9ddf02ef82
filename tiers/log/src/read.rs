//! Reading: one operation a place; each value is checked by the thread that waits for it, while the device goes on with
//! what others asked for.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ebbtide_core::{BlockSums, Error, Identity, Location, MediumOp, ReadDone, ReadRequest, Result};
use ebbtide_mem::{BufMut, Whole};
use smallvec::SmallVec;

use crate::format::PAGE;
use crate::log::Log;

/// What is needed to end one request.
struct Pending {
    length: u64,
    identity: Identity,
    sum: u64,
    /// Whether its bytes are to be checked.
    verify: bool,
    /// The rest of the destination of a value in several places.
    whole: Option<Whole>,
    /// How many operations belong to it.
    ops: usize,
    /// Why it was not started, with its destination.
    refused: Option<(Error, BufMut)>,
}

impl Log {
    /// Reads whole values; result i belongs to request i.
    pub(crate) async fn get_many(self: Arc<Self>, requests: Vec<ReadRequest>) -> Vec<ReadDone> {
        let mut ops: Vec<Vec<MediumOp>> = self.media.iter().map(|_| Vec::new()).collect();
        let mut media = Vec::with_capacity(requests.len()); // of each operation, in order
        let pending: Vec<Pending> = requests
            .into_iter()
            .map(|request| {
                self.start(request, |medium, op| {
                    ops[medium].push(op);
                    media.push(medium);
                })
            })
            .collect();
        let submit =
            |(medium, ops): (usize, Vec<MediumOp>)| (!ops.is_empty()).then(|| self.media[medium].submit(ops));
        let batches: Vec<_> = ops.into_iter().enumerate().map(submit).collect(); // all started before any is awaited
        let mut done = Vec::with_capacity(batches.len());
        for batch in batches {
            let batch = match batch {
                Some(batch) => batch.await,
                None => Vec::new(),
            };
            done.push(batch.into_iter());
        }
        let mut media = media.into_iter();
        let finish = |pending: Pending| {
            let mut result = Ok(());
            let mut bufs = SmallVec::<[BufMut; 1]>::new();
            for medium in media.by_ref().take(pending.ops) {
                match done[medium].next() {
                    Some(done) => {
                        result = result.and(done.result);
                        bufs.extend(done.buf);
                    }
                    None => result = Err(Error::internal("a read ended with no result")),
                }
            }
            self.finish_read(pending, result, bufs)
        };
        pending.into_iter().map(finish).collect()
    }

    /// Makes the operations of one request.
    fn start(&self, request: ReadRequest, mut add: impl FnMut(usize, MediumOp)) -> Pending {
        let ReadRequest { location, length, identity, sum, verify, into } = request;
        let mut pending = Pending { length, identity, sum, verify, whole: None, ops: 0, refused: None };
        let places = match self.places_of(location, length, into.len()) {
            Ok(places) => places,
            Err(error) => {
                pending.refused = Some((error, into));
                return pending;
            }
        };
        pending.ops = places.len();
        let mut parts = SmallVec::<[BufMut; 1]>::new();
        if places.len() == 1 {
            parts.push(into);
        } else {
            let (split, whole) = into.split(self.geometry.part_bytes as usize); // lossless: within a segment
            parts.extend(split);
            pending.whole = Some(whole);
        }
        for (place, into) in places.into_iter().zip(parts) {
            let (slot, offset) = (place.segment.slot(), u64::from(place.page) * PAGE);
            add(place.segment.medium(), MediumOp::Read { slot, offset, into, check: None });
        }
        pending
    }

    /// Where the value at `location` stands. What comes from a row is not trusted.
    fn places_of(&self, location: Location, length: u64, room: usize) -> Result<SmallVec<[Location; 1]>> {
        if length == 0 || length != room as u64 {
            return Err(Error::invalid(format!("read of {length} bytes into a buffer of {room}")));
        }
        let stale =
            || Error::stale(format!("tier {}: nothing of {length} bytes is at {location:?}", self.info.name));
        let part_bytes = self.geometry.part_bytes;
        if length <= part_bytes {
            return self.holds(location, length).then(|| SmallVec::from_buf([location])).ok_or_else(stale);
        }
        let places = self.parts.lock().get(location).cloned().ok_or_else(stale)?;
        let places: SmallVec<[(Location, u64); 8]> =
            places.with_lengths(location, length, part_bytes).collect();
        let right = places.len() as u64 == self.geometry.parts_of(length)
            && places.iter().all(|(place, stored)| self.holds(*place, *stored));
        right.then(|| places.into_iter().map(|(place, _)| place).collect()).ok_or_else(stale)
    }

    /// The answer to one request, whose operations have all ended.
    fn finish_read(
        &self,
        pending: Pending,
        mut result: Result<()>,
        mut bufs: SmallVec<[BufMut; 1]>,
    ) -> ReadDone {
        if let Some((error, into)) = pending.refused {
            return ReadDone { result: Err(error), buf: Some(into), sums: None };
        }
        let buf = match pending.whole {
            Some(whole) => whole.join(bufs.into_vec()),
            None => bufs.pop(),
        };
        let sums = match &buf {
            Some(value) if pending.verify && result.is_ok() => Some(pending.identity.sums_in(value)),
            _ => None,
        };
        if let Some(sums) = &sums {
            result = compare(pending.identity, pending.length, sums, pending.sum);
        }
        if result.as_ref().is_err_and(|error| error.kind() == ebbtide_core::ErrorKind::Corrupt) {
            self.stats.checksum_mismatches.fetch_add(1, Ordering::Relaxed);
        }
        ReadDone { sums: sums.filter(|_| result.is_ok()), result, buf }
    }
}

fn compare(identity: Identity, length: u64, sums: &BlockSums, sum: u64) -> Result<()> {
    let found = identity.fold(length, sums.0.iter().copied());
    if found == sum {
        return Ok(());
    }
    Err(Error::corrupt(format!("value of {length} bytes has the sum {found:016x}, its row says {sum:016x}")))
}
