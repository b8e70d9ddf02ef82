//! Reads: one lookup, then exactly one tier. One path for every variant.

use std::sync::atomic::Ordering;

use ebbtide_core::{
    BlockSums, Candidate, Charge, Error, ErrorKind, Fingerprint, Identity, NamespaceId, Object, ReadDone,
    ReadRequest, Result, SharedObject, TierId, block_on, check_key,
};
use ebbtide_mem::{BufMut, lend, sum};
use futures_util::future::{Either, select};

use crate::engine::{Engine, Inner, note_use};
use crate::index::Row;
use crate::reasons::Gone;
use crate::room::Grant;
use crate::touch::Event;

/// Which tier served a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Served {
    /// The arena; nothing was copied or read.
    Dram,
    /// A tier below it.
    Below(TierId),
}

/// An object that was found.
#[derive(Clone, Debug)]
pub struct Hit {
    /// The object; its bytes stay while this is held, whatever happens to the key.
    pub object: SharedObject,
    /// Which tier served it.
    pub tier: Served,
}

/// How often a read looks its row up again after the bytes were not the object's.
const STALE_TRIES_MAX: u32 = 3;

const SSD: TierId = TierId(0);

/// What a lookup finds.
enum Found {
    Miss,
    Resident(SharedObject),
    Below(Row),
}

/// How a read straight into the caller's memory ended.
enum Direct {
    Done(Option<(usize, Served)>),
    /// The row moved on meanwhile.
    LookAgain,
}

/// A read that must go below.
struct Pending<'a> {
    index: usize,
    key: &'a [u8],
    fingerprint: Fingerprint,
    row: Row,
    tries: u32,
}

/// A read below that has its memory.
struct Issued<'a> {
    pending: Pending<'a>,
    charge: Charge,
    /// The charge is one for a resident object.
    resident: bool,
}

impl Engine {
    /// The object under `key`, or `None` when there is none. See [`get_many`](Self::get_many).
    pub async fn get(&self, namespace: NamespaceId, key: &[u8]) -> Result<Option<Hit>> {
        if let Some(answer) = self.try_get(namespace, key) {
            return answer;
        }
        self.get_many(namespace, &[key]).await.pop().expect("one result a key")
    }

    /// The object under `key` when that is known without I/O: it is in DRAM, or nowhere. `None` when it lies below.
    pub fn try_get(&self, namespace: NamespaceId, key: &[u8]) -> Option<Result<Option<Hit>>> {
        if let Err(error) = check_key(key) {
            return Some(Err(error));
        }
        let fingerprint = self.inner.fingerprinter.fingerprint(namespace, key);
        match self.inner.look_up(fingerprint, false) {
            Found::Resident(object) => Some(Ok(Some(self.inner.hit(object)))),
            Found::Miss => Some(Ok(self.inner.miss())),
            Found::Below(_) => None,
        }
    }

    /// The objects under `keys`; result i belongs to key i, a miss is `Ok(None)`.
    ///
    /// What lies in DRAM costs no copy. What lies below is read in one batch into the arena, checked, and made resident
    /// when there is room. Errors a key: Invalid (key), Full (no memory for the result within `read_wait_max`: results held by
    /// callers count against `staging`), Unavailable (the tier did not answer). A copy that proves corrupt is a miss, and
    /// counted. Cancel-safe.
    pub async fn get_many(&self, namespace: NamespaceId, keys: &[&[u8]]) -> Vec<Result<Option<Hit>>> {
        let inner = &self.inner;
        let mut results: Vec<_> = keys.iter().map(|_| Ok(None)).collect();
        let mut below = Vec::new();
        for (index, key) in keys.iter().enumerate() {
            if let Err(error) = check_key(key) {
                results[index] = Err(error);
                continue;
            }
            let fingerprint = inner.fingerprinter.fingerprint(namespace, key);
            match inner.look_up(fingerprint, true) {
                Found::Resident(object) => results[index] = Ok(Some(inner.hit(object))),
                Found::Miss => results[index] = Ok(inner.miss()),
                Found::Below(row) => below.push(Pending { index, key, fingerprint, row, tries: 0 }),
            }
        }
        while !below.is_empty() {
            below = inner.read_below(namespace, below, &mut results).await;
        }
        results
    }

    /// Copies the value under `key` to the front of `into`; its length and the tier that served it, or `None`.
    ///
    /// Blocks the calling thread; not for tasks. A value below goes straight into `into` where address and length allow it,
    /// else by way of the arena. Bytes behind the value are never touched. Errors: Invalid (`into` is too short; nothing is
    /// written), and those of [`get_many`](Self::get_many).
    pub fn get_into(
        &self,
        namespace: NamespaceId,
        key: &[u8],
        into: &mut [u8],
    ) -> Result<Option<(usize, Served)>> {
        check_key(key)?;
        // The lookup waits for memory; what the copy will need comes meanwhile.
        sum::expect_write(into);
        let fingerprint = self.inner.fingerprinter.fingerprint(namespace, key);
        for _ in 0..STALE_TRIES_MAX {
            match self.inner.look_up(fingerprint, true) {
                Found::Miss => return Ok(self.inner.miss()),
                Found::Resident(object) => {
                    let hit = self.inner.hit(object);
                    return copy_out(&hit, into).map(Some);
                }
                Found::Below(row) if self.inner.reads_directly(&row, into) => {
                    match self.inner.read_directly(namespace, key, fingerprint, &row, into)? {
                        Direct::Done(answer) => return Ok(answer),
                        Direct::LookAgain => {}
                    }
                }
                Found::Below(row) => {
                    let pending = Pending { index: 0, key, fingerprint, row, tries: 0 };
                    return self.get_into_by_arena(namespace, pending, into);
                }
            }
        }
        Ok(self.inner.miss())
    }

    fn get_into_by_arena(
        &self,
        namespace: NamespaceId,
        pending: Pending<'_>,
        into: &mut [u8],
    ) -> Result<Option<(usize, Served)>> {
        if pending.row.length() > into.len() as u64 {
            return Err(too_short(pending.row.length(), into.len()));
        }
        let mut results = vec![Ok(None)];
        let mut below = vec![pending];
        while !below.is_empty() {
            below = block_on(self.inner.read_below(namespace, below, &mut results));
        }
        let hit = results.pop().expect("one result a key")?;
        hit.map(|hit| copy_out(&hit, into)).transpose()
    }
}

fn too_short(length: u64, room: usize) -> Error {
    Error::invalid(format!("the value has {length} bytes, the buffer only {room}"))
}

fn copy_out(hit: &Hit, into: &mut [u8]) -> Result<(usize, Served)> {
    let length = hit.object.value.len();
    let room = into.len();
    let target = into.get_mut(..length).ok_or_else(|| too_short(length as u64, room))?;
    hit.object.value.read_at(0, target);
    Ok((length, hit.tier))
}

impl Inner {
    /// Finds an object and notes its use. `wanted`: a row below counts as read (else the caller looks again).
    fn look_up(&self, fingerprint: Fingerprint, wanted: bool) -> Found {
        let shard_number = self.index.shard_of(fingerprint);
        let mut shard = self.index.lock(shard_number);
        let Some(slot) = shard.find(fingerprint) else { return Found::Miss };
        if let Some(hot) = shard.hot_mut(slot) {
            let object = hot.object.clone();
            let (in_order, seat) = (note_use(hot), hot.seat);
            drop(shard);
            if wanted {
                object.value.expect_read();
            }
            if in_order {
                self.announce(Event::Touch(self.index.object_id(shard_number, seat)));
            }
            return Found::Resident(object);
        }
        let first = wanted && shard.row_mut(slot).count_read();
        let row = *shard.row(slot);
        drop(shard);
        self.tell_wanted(&row, first);
        Found::Below(row)
    }

    fn hit(&self, object: SharedObject) -> Hit {
        let mine = self.touches.mine();
        mine.hits.fetch_add(1, Ordering::Relaxed);
        mine.hit_bytes.fetch_add(object.length(), Ordering::Relaxed);
        Hit { object, tier: Served::Dram }
    }

    fn miss<T>(&self) -> Option<T> {
        self.touches.mine().misses.fetch_add(1, Ordering::Relaxed);
        None
    }

    /// Reads what it can get memory for, at least one; returns what is left to read.
    async fn read_below<'a>(
        &self,
        namespace: NamespaceId,
        mut pending: Vec<Pending<'a>>,
        results: &mut [Result<Option<Hit>>],
    ) -> Vec<Pending<'a>> {
        let mut left = pending.split_off(0).into_iter().peekable();
        let mut issued: Vec<Issued<'a>> = Vec::with_capacity(left.len());
        let mut requests = Vec::with_capacity(left.len());
        while let Some(next) = left.peek() {
            let length = next.row.length() as usize;
            let granted = match self.memory_for_read(next) {
                Some(granted) => Some(granted),
                None if issued.is_empty() => self.wait_for_staging(length).await.map(|grant| (grant, false)),
                None => break,
            };
            let Some(next) = left.next() else { break };
            let Some(((memory, charge), resident)) = granted else {
                let most = self.settings.read_wait_max;
                let text = format!("no memory for a value of {length} bytes within {most:?} (read_wait_max)");
                results[next.index] = Err(Error::full(text));
                continue;
            };
            let Some(request) = self.request(namespace, next.key, &next.row, memory) else {
                results[next.index] = Ok(self.miss());
                continue;
            };
            requests.push(request);
            issued.push(Issued { pending: next, charge, resident });
        }
        let left: Vec<_> = left.collect();
        let mut again = Vec::new();
        if !requests.is_empty() {
            let done = self.tiers[0].get_many(requests).await;
            for (issued, done) in issued.into_iter().zip(done) {
                let index = issued.pending.index;
                match self.finish(namespace, issued, done) {
                    Ok(result) => results[index] = result,
                    Err(pending) => again.push(pending),
                }
            }
        }
        again.extend(left);
        again
    }

    /// Memory for one read, at once: as a resident object when it should become one, else staging.
    fn memory_for_read(&self, pending: &Pending<'_>) -> Option<(Grant, bool)> {
        let length = pending.row.length() as usize;
        let candidate = Candidate { length: pending.row.length(), reads: pending.row.reads };
        if self.placement.promote(&candidate, true)
            && let Some(grant) = self.take_room(length, pending.key.len())
        {
            return Some((grant, true));
        }
        self.staging.try_take(length, 0).map(|grant| (grant, false))
    }

    async fn wait_for_staging(&self, length: usize) -> Option<Grant> {
        let granted = self.staging.enqueue(length, 0, self.settings.put_waiting_bytes_max)?;
        self.counters.reads_waited.fetch_add(1, Ordering::Relaxed);
        match select(granted, self.env.sleep(self.settings.read_wait_max)).await {
            Either::Left((grant, _)) => grant.ok(),
            Either::Right(((), granted)) => {
                drop(granted);
                self.staging.serve();
                None
            }
        }
    }

    fn request(&self, namespace: NamespaceId, key: &[u8], row: &Row, into: BufMut) -> Option<ReadRequest> {
        Some(ReadRequest {
            location: row.below()?,
            length: row.length(),
            identity: Identity::new(namespace, key, row.generation),
            sum: row.sum,
            verify: self.settings.verify_reads,
            into,
        })
    }

    /// Turns an ended read into its result, or gives it back to be tried again.
    fn finish<'a>(
        &self,
        namespace: NamespaceId,
        issued: Issued<'a>,
        done: ReadDone,
    ) -> std::result::Result<Result<Option<Hit>>, Pending<'a>> {
        let Issued { pending, charge, resident } = issued;
        let error = match (done.result, done.buf) {
            (Ok(()), Some(value)) => {
                let object = self.object_of(namespace, &pending, value, charge, done.sums);
                if resident {
                    let warmed = self.warm_read(pending.fingerprint, &object);
                    self.counters.promotions.fetch_add(u64::from(warmed), Ordering::Relaxed);
                }
                self.counters.hits_below.fetch_add(1, Ordering::Relaxed);
                self.counters.hit_bytes_below.fetch_add(object.length(), Ordering::Relaxed);
                return Ok(Ok(Some(Hit { object, tier: Served::Below(SSD) })));
            }
            (Ok(()), None) => Error::internal("a read that succeeded came back without its buffer"),
            (Err(error), _) => error,
        };
        drop(charge);
        self.after_failed_read(pending, error)
    }

    fn object_of(
        &self,
        namespace: NamespaceId,
        pending: &Pending<'_>,
        value: BufMut,
        charge: Charge,
        sums: Option<BlockSums>,
    ) -> SharedObject {
        let (value, generation) = (value.freeze(), pending.row.generation);
        self.object_pool.keep(Object {
            value,
            charge,
            namespace,
            key: pending.key.into(),
            generation,
            sums: sums.unwrap_or_default(),
        })
    }

    /// The row may have moved on under the reader: then it is read where it is now. A row that stands still and does not match
    /// is corrupt: it is dropped and counted, and the read is a miss.
    fn after_failed_read<'a>(
        &self,
        mut pending: Pending<'a>,
        error: Error,
    ) -> std::result::Result<Result<Option<Hit>>, Pending<'a>> {
        let found = self.look_up(pending.fingerprint, false);
        let row = match found {
            Found::Resident(object) => return Ok(Ok(Some(self.hit(object)))),
            Found::Miss => return Ok(Ok(self.miss())),
            Found::Below(row) => row,
        };
        let moved = row.generation != pending.row.generation || row.below() != pending.row.below();
        if moved && pending.tries < STALE_TRIES_MAX {
            self.counters.stale_reads.fetch_add(1, Ordering::Relaxed);
            pending.row = row;
            pending.tries += 1;
            return Err(pending);
        }
        if !matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Stale) {
            return Ok(Err(error));
        }
        if !moved {
            self.quarantine(pending.fingerprint, &row);
        }
        Ok(Ok(self.miss()))
    }

    /// Drops a row whose only copy is not what was written.
    fn quarantine(&self, fingerprint: Fingerprint, row: &Row) {
        self.counters.corrupt_reads.fetch_add(1, Ordering::Relaxed);
        if let Some(row) = self.forget(fingerprint, Some(row.generation), Gone::Corrupt)
            && let Some(location) = row.below()
        {
            self.tiers[0].free(location, row.length());
        }
    }

    /// Whether a value may be read straight into the caller's memory, and is not rather to become resident.
    fn reads_directly(&self, row: &Row, into: &[u8]) -> bool {
        let align = u64::from(self.tiers[0].info().direct_align_bytes.max(1));
        let candidate = Candidate { length: row.length(), reads: row.reads };
        row.length().is_multiple_of(align)
            && (into.as_ptr().addr() as u64).is_multiple_of(align)
            && row.length() <= into.len() as u64
            && !self.placement.promote(&candidate, false)
    }

    /// Reads straight into the caller's memory.
    fn read_directly(
        &self,
        namespace: NamespaceId,
        key: &[u8],
        fingerprint: Fingerprint,
        row: &Row,
        into: &mut [u8],
    ) -> Result<Direct> {
        let length = row.length() as usize;
        let done = lend(&mut into[..length], |memory| {
            let request = self.request(namespace, key, row, memory)?;
            block_on(self.tiers[0].get_many(vec![request])).pop().map(|done| done.result)
        });
        match done {
            Some(Ok(())) => {
                self.counters.hits_below.fetch_add(1, Ordering::Relaxed);
                self.counters.hit_bytes_below.fetch_add(length as u64, Ordering::Relaxed);
                Ok(Direct::Done(Some((length, Served::Below(SSD)))))
            }
            None => Ok(Direct::LookAgain),
            Some(Err(error)) => {
                let pending = Pending { index: 0, key, fingerprint, row: *row, tries: 0 };
                match self.after_failed_read(pending, error) {
                    Err(_) => Ok(Direct::LookAgain),
                    Ok(answer) => answer?.map(|hit| copy_out(&hit, into)).transpose().map(Direct::Done),
                }
            }
        }
    }
}
