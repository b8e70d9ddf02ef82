//! Reading: one operation a place, checked on the device's completion thread.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ebbtide_core::{
    BLOCK_BYTES, BlockSums, Check, Error, Identity, Location, MediumOp, ReadDone, ReadRequest, Result,
    blocks_in,
};
use ebbtide_mem::{BufMut, Whole};
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::format::PAGE;
use crate::log::Log;

/// Where the checks of one value leave what they saw: the sums of its blocks, place by place.
type Seen = Arc<[Mutex<BlockSums>]>;

/// What is needed to end one request.
struct Pending {
    length: u64,
    identity: Identity,
    sum: u64,
    /// The sums that were taken; `None` when the bytes are not to be checked.
    seen: Option<Seen>,
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
        let mut pending = Pending { length, identity, sum, seen: None, whole: None, ops: 0, refused: None };
        let places = match self.places_of(location, length, into.len()) {
            Ok(places) => places,
            Err(error) => {
                pending.refused = Some((error, into));
                return pending;
            }
        };
        pending.ops = places.len();
        pending.seen =
            verify.then(|| places.iter().map(|_| Mutex::new(BlockSums(SmallVec::new()))).collect());
        let mut parts = SmallVec::<[BufMut; 1]>::new();
        if places.len() == 1 {
            parts.push(into);
        } else {
            let (split, whole) = into.split(self.geometry.part_bytes as usize); // lossless: within a segment
            parts.extend(split);
            pending.whole = Some(whole);
        }
        let single = (places.len() == 1).then_some((length, sum));
        for (part, (place, into)) in places.into_iter().zip(parts).enumerate() {
            let first_block = part * (self.geometry.part_bytes / BLOCK_BYTES as u64) as usize;
            let check = pending.seen.clone().map(|seen| check(seen, part, identity, first_block, single));
            let offset = u64::from(place.page) * PAGE;
            add(place.segment.medium(), MediumOp::Read { slot: place.segment.slot(), offset, into, check });
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
        let sums = pending.seen.filter(|_| result.is_ok()).map(|seen| {
            let take =
                |sums: &Mutex<BlockSums>| std::mem::replace(&mut *sums.lock(), BlockSums(SmallVec::new())).0;
            match &*seen {
                [only] => BlockSums(take(only)),
                parts => BlockSums(parts.iter().flat_map(take).collect()),
            }
        });
        if let (Some(sums), true) = (&sums, pending.ops > 1) {
            result = compare(pending.identity, pending.length, sums, pending.sum);
        }
        if result.as_ref().is_err_and(|error| error.kind() == ebbtide_core::ErrorKind::Corrupt) {
            self.stats.checksum_mismatches.fetch_add(1, Ordering::Relaxed);
        }
        ReadDone { sums: sums.filter(|_| result.is_ok()), result, buf }
    }
}

/// Sums the blocks of place `part`; where that is the whole value (`single`: its length and sum), compares too.
fn check(
    seen: Seen,
    part: usize,
    identity: Identity,
    first_block: usize,
    single: Option<(u64, u64)>,
) -> Check {
    Box::new(move |buf: &BufMut| {
        let block = |index: usize| {
            let at = index * BLOCK_BYTES;
            identity.block(first_block + index, buf.sum_range(at, BLOCK_BYTES.min(buf.len() - at)))
        };
        let sums = BlockSums((0..blocks_in(buf.len() as u64)).map(block).collect());
        let verdict = single.map_or(Ok(()), |(length, sum)| compare(identity, length, &sums, sum));
        *seen[part].lock() = sums;
        verdict
    })
}

fn compare(identity: Identity, length: u64, sums: &BlockSums, sum: u64) -> Result<()> {
    let found = identity.fold(length, sums.0.iter().copied());
    if found == sum {
        return Ok(());
    }
    Err(Error::corrupt(format!("value of {length} bytes has the sum {found:016x}, its row says {sum:016x}")))
}
