//! The one index: rows by fingerprint, sharded, short locks, no keys.
//!
//! A row stands for one object wherever it is. With what the object needs while it is resident it fills one cache line
//! (64 bytes), in slabs of chunks that never move; a table of 8-byte slots finds it. So an object below DRAM costs 73 to 83
//! bytes of memory, and a lookup touches two lines before it knows all that there is to know.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ebbtide_core::{Fingerprint, Generation, Location, ObjectId, SegmentId, SharedObject};
use ebbtide_mem::{Owned, Pool, sum};
use parking_lot::{Mutex, MutexGuard};

use crate::table::Table;

/// Rows in one chunk of a shard's slab.
const CHUNK_ROWS: usize = 256;
const NONE: u32 = u32::MAX;

/// How often a row below DRAM was asked for is counted up to this.
pub(crate) const READS_MAX: u8 = 3;

/// One object: what is known of it, and where its copy below DRAM is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    pub(crate) fingerprint: Fingerprint,
    pub(crate) generation: Generation,
    pub(crate) sum: u64,
    /// Segment and page of the copy below DRAM; `segment` is `NONE` when there is none. In a free row, `page` is the next
    /// free one.
    segment: u32,
    page: u32,
    /// Length − 1, since a value has 1 byte to 4 GiB.
    length_less_one: u32,
    /// Reads since the copy below was written, up to [`READS_MAX`].
    pub(crate) reads: u8,
    used: bool,
}

impl Row {
    const VACANT: Row = Row {
        fingerprint: Fingerprint { high: 0, low: 0 },
        generation: Generation(0),
        sum: 0,
        segment: NONE,
        page: 0,
        length_less_one: 0,
        reads: 0,
        used: false,
    };

    pub(crate) fn new(fingerprint: Fingerprint, generation: Generation, length: u64, sum: u64) -> Self {
        let length_less_one =
            u32::try_from(length - 1).expect("a value has at most 4 GiB, checked at put and recovery");
        Row { fingerprint, generation, sum, segment: NONE, page: 0, length_less_one, reads: 0, used: true }
    }

    pub(crate) fn length(&self) -> u64 {
        u64::from(self.length_less_one) + 1
    }

    /// Where its copy below DRAM is.
    pub(crate) fn below(&self) -> Option<Location> {
        (self.segment != NONE).then_some(Location { segment: SegmentId(self.segment), page: self.page })
    }

    pub(crate) fn set_below(&mut self, location: Option<Location>) {
        (self.segment, self.page) = location.map_or((NONE, 0), |at| (at.segment.0, at.page));
        self.reads = 0;
    }

    /// Counts a read of the copy below; true for the first since it was written.
    pub(crate) fn count_read(&mut self) -> bool {
        self.reads = (self.reads + 1).min(READS_MAX);
        self.reads == 1
    }
}

/// What the copy in DRAM is to the copy below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// There is no copy below.
    Dirty,
    /// It is being written below.
    Writing,
    /// The row names a copy below that is complete.
    Clean,
}

/// Where a resident object stands with the eviction policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// In the policy's order, or on its way there in a touch ring.
    InOrder,
    /// Taken out of it, and being written.
    Out,
    /// Taken out of it, clean, still readable: next to be dropped when room is needed.
    Departing,
}

/// An object in DRAM.
pub(crate) struct Hot {
    pub(crate) object: SharedObject,
    pub(crate) seat: Seat,
    pub(crate) state: State,
    pub(crate) place: Place,
    /// Read while it was out of the order.
    pub(crate) touched: bool,
    /// Demotions of it that failed in a row.
    pub(crate) failures: u8,
}

/// A row and, while its object is resident, what that takes.
#[repr(align(64))]
struct Entry {
    row: Row,
    hot: Option<Hot>,
}

const _: () = assert!(std::mem::size_of::<Entry>() == 64);

/// Entries that lie side by side.
type Chunk = [Entry; CHUNK_ROWS];

/// A row's place in its shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowSlot(u32);

/// What the policy knows a resident object by, within its shard: dense, reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seat(u32);

/// Who sits in a seat; `stay` tells this stay from earlier ones.
#[derive(Clone, Copy)]
struct Seated {
    row: u32,
    stay: u32,
}

/// One shard of the index.
pub(crate) struct Shard {
    table: Table,
    rows: Vec<Owned<Chunk>>,
    chunks: Pool<Chunk>,
    rows_made: u32,
    row_free: u32,
    seats: Vec<Seated>,
    seats_free: Vec<u32>,
    stays: u32,
    residents: Arc<Residents>,
}

impl Shard {
    fn new(residents: Arc<Residents>, chunks: Pool<Chunk>) -> Self {
        Shard {
            table: Table::default(),
            rows: Vec::new(),
            chunks,
            rows_made: 0,
            row_free: NONE,
            seats: Vec::new(),
            seats_free: Vec::new(),
            stays: 0,
            residents,
        }
    }

    pub(crate) fn find(&self, fingerprint: Fingerprint) -> Option<RowSlot> {
        let same = |slot| self.row(RowSlot(slot)).fingerprint == fingerprint;
        self.table.find(fingerprint.low, same).map(RowSlot)
    }

    pub(crate) fn row(&self, slot: RowSlot) -> &Row {
        &self.entry(slot).row
    }

    pub(crate) fn row_mut(&mut self, slot: RowSlot) -> &mut Row {
        &mut self.entry_mut(slot).row
    }

    /// What a row's object takes while it is resident.
    pub(crate) fn hot(&self, slot: RowSlot) -> Option<&Hot> {
        self.entry(slot).hot.as_ref()
    }

    pub(crate) fn hot_mut(&mut self, slot: RowSlot) -> Option<&mut Hot> {
        self.entry_mut(slot).hot.as_mut()
    }

    /// Adds a row for a fingerprint that has none.
    pub(crate) fn insert(&mut self, row: Row) -> RowSlot {
        let slot = self.take_row_slot();
        *self.row_mut(slot) = row;
        self.table.insert(row.fingerprint.low, slot.0);
        slot
    }

    /// Takes a row out, with its hot part if it has one.
    pub(crate) fn remove(&mut self, slot: RowSlot) -> (Row, Option<Hot>) {
        let hot = self.cool(slot);
        let row = *self.row(slot);
        self.table.remove(row.fingerprint.low, slot.0);
        let free = self.row_free;
        let vacant = self.row_mut(slot);
        vacant.used = false;
        vacant.page = free;
        self.row_free = slot.0;
        (row, hot)
    }

    /// Makes the object of a row resident.
    pub(crate) fn warm(&mut self, slot: RowSlot, object: SharedObject, state: State) -> Seat {
        debug_assert!(self.hot(slot).is_none());
        self.stays = self.stays.wrapping_add(1);
        let seated = Seated { row: slot.0, stay: self.stays };
        let seat = match self.seats_free.pop() {
            Some(seat) => {
                self.seats[seat as usize] = seated;
                Seat(seat)
            }
            None => {
                self.seats.push(seated);
                Seat(u32::try_from(self.seats.len() - 1).expect("fewer than 2^32 objects in DRAM"))
            }
        };
        let hot = Hot { object, seat, state, place: Place::InOrder, touched: false, failures: 0 };
        self.entry_mut(slot).hot = Some(hot);
        let residents = self.residents.now.fetch_add(1, Ordering::Relaxed) + 1;
        if residents > self.residents.peak.load(Ordering::Relaxed) {
            self.residents.peak.fetch_max(residents, Ordering::Relaxed);
        }
        seat
    }

    /// Ends the residence of a row's object.
    pub(crate) fn cool(&mut self, slot: RowSlot) -> Option<Hot> {
        let hot = self.entry_mut(slot).hot.take()?;
        self.seats[hot.seat.0 as usize].row = NONE;
        self.seats_free.push(hot.seat.0);
        self.residents.now.fetch_sub(1, Ordering::Relaxed);
        Some(hot)
    }

    /// Who sits in a seat that a policy named, and which stay it is, if anyone does still.
    pub(crate) fn seated(&mut self, seat: Seat) -> Option<(RowSlot, u32, &mut Hot)> {
        let Seated { row, stay } = *self.seats.get(seat.0 as usize).filter(|seated| seated.row != NONE)?;
        let hot = self.entry_mut(RowSlot(row)).hot.as_mut().expect("who has a seat is resident");
        Some((RowSlot(row), stay, hot))
    }

    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    /// The seats of all resident objects.
    pub(crate) fn all_seats(&self) -> Vec<Seat> {
        let taken = self.seats.iter().enumerate().filter(|(_, seated)| seated.row != NONE);
        taken.filter_map(|(seat, _)| u32::try_from(seat).ok().map(Seat)).collect()
    }

    /// All rows.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Row> {
        let made = self.rows.iter().flat_map(|chunk| chunk.iter()).take(self.rows_made as usize);
        made.map(|entry| &entry.row).filter(|row| row.used)
    }

    fn entry(&self, slot: RowSlot) -> &Entry {
        &self.rows[slot.0 as usize / CHUNK_ROWS][slot.0 as usize % CHUNK_ROWS]
    }

    fn entry_mut(&mut self, slot: RowSlot) -> &mut Entry {
        &mut self.rows[slot.0 as usize / CHUNK_ROWS][slot.0 as usize % CHUNK_ROWS]
    }

    fn take_row_slot(&mut self) -> RowSlot {
        if self.row_free != NONE {
            let slot = RowSlot(self.row_free);
            self.row_free = self.row(slot).page;
            if self.row_free != NONE {
                // The next one to come is on its way into the cache meanwhile.
                sum::expect(self.row(RowSlot(self.row_free)));
            }
            return slot;
        }
        if self.rows_made as usize == self.rows.len() * CHUNK_ROWS {
            self.rows.push(self.chunks.own([const { Entry { row: Row::VACANT, hot: None } }; CHUNK_ROWS]));
        }
        self.rows_made += 1;
        RowSlot(self.rows_made - 1)
    }
}

/// The sharded index.
pub(crate) struct Index {
    shards: Box<[Mutex<Shard>]>,
    residents: Arc<Residents>,
}

/// How many objects are in DRAM, over all shards.
#[derive(Default)]
struct Residents {
    now: AtomicU64,
    peak: AtomicU64,
}

impl Index {
    /// An index of `shards` shards, a power of two.
    pub(crate) fn new(shards: usize) -> Self {
        assert!(shards.is_power_of_two(), "the number of shards is a power of two");
        let residents = Arc::<Residents>::default();
        let chunks = Pool::new();
        let shard = |_| Mutex::new(Shard::new(Arc::clone(&residents), chunks.clone()));
        let shards = (0..shards).map(shard).collect();
        Index { shards, residents }
    }

    pub(crate) fn shard_of(&self, fingerprint: Fingerprint) -> usize {
        (fingerprint.high >> 32) as usize & (self.shards.len() - 1)
    }

    pub(crate) fn lock(&self, shard: usize) -> MutexGuard<'_, Shard> {
        self.shards[shard].lock()
    }

    /// The shard that holds, or would hold, `fingerprint`.
    pub(crate) fn lock_for(&self, fingerprint: Fingerprint) -> MutexGuard<'_, Shard> {
        self.lock(self.shard_of(fingerprint))
    }

    pub(crate) fn shards(&self) -> usize {
        self.shards.len()
    }

    /// What the eviction policy calls who sits in `seat` of `shard`: dense, since fingerprints spread evenly.
    pub(crate) fn object_id(&self, shard: usize, seat: Seat) -> ObjectId {
        ObjectId(seat.0 * self.shards.len() as u32 + shard as u32)
    }

    /// The inverse of [`object_id`](Self::object_id).
    pub(crate) fn place_of(&self, id: ObjectId) -> (usize, Seat) {
        let shards = self.shards.len() as u32;
        ((id.0 % shards) as usize, Seat(id.0 / shards))
    }

    /// Objects in DRAM now.
    pub(crate) fn residents(&self) -> u64 {
        self.residents.now.load(Ordering::Relaxed)
    }

    /// The most objects that were ever in DRAM.
    pub(crate) fn residents_peak(&self) -> u64 {
        self.residents.peak.load(Ordering::Relaxed)
    }

    pub(crate) fn len(&self) -> u64 {
        self.shards.iter().map(|shard| shard.lock().len() as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fingerprint(n: u64) -> Fingerprint {
        Fingerprint {
            high: n.wrapping_mul(0x9e37_79b9_7f4a_7c15),
            low: n.wrapping_mul(0xd134_2543_de82_ef95),
        }
    }

    #[test]
    fn rows_are_found_removed_and_their_slots_reused() {
        let index = Index::new(4);
        for n in 0..10_000 {
            index.lock_for(fingerprint(n)).insert(Row::new(fingerprint(n), Generation(n), n + 1, n));
        }
        assert_eq!(index.len(), 10_000);
        for n in (0..10_000).step_by(2) {
            let mut shard = index.lock_for(fingerprint(n));
            let slot = shard.find(fingerprint(n)).unwrap();
            let (row, hot) = shard.remove(slot);
            assert!(row.generation == Generation(n) && hot.is_none());
        }
        for n in 0..10_000 {
            let shard = index.lock_for(fingerprint(n));
            let found = shard.find(fingerprint(n)).map(|slot| shard.row(slot).length());
            assert_eq!(found, (n % 2 == 1).then_some(n + 1));
        }
        let chunks = |index: &Index| -> usize { (0..4).map(|shard| index.lock(shard).rows.len()).sum() };
        let before = chunks(&index);
        for n in 10_000..15_000 {
            index.lock_for(fingerprint(n)).insert(Row::new(fingerprint(n), Generation(n), 1, n));
        }
        assert!(chunks(&index) <= before + 4, "freed rows are used again");
        assert_eq!((0..4).map(|shard| index.lock(shard).all().count()).sum::<usize>(), 10_000);
    }

    #[test]
    fn lengths_and_places_survive_the_packing() {
        let mut row = Row::new(fingerprint(1), Generation(1), 1 << 32, 0);
        assert_eq!((row.length(), row.below()), (1 << 32, None));
        let at = Location { segment: SegmentId::new(3, 77), page: 16_383 };
        row.set_below(Some(at));
        assert_eq!(row.below(), Some(at));
        assert!(row.count_read() && !row.count_read());
        row.set_below(None);
        assert_eq!((row.below(), row.reads), (None, 0));
    }

    #[test]
    fn policy_ids_name_shard_and_slot() {
        let index = Index::new(64);
        for (shard, slot) in [(0, 0), (63, 0), (5, 1_000_000)] {
            assert_eq!(index.place_of(index.object_id(shard, Seat(slot))), (shard, Seat(slot)));
        }
    }
}
