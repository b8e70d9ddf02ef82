//! The contracts of tiers: places that keep objects. They store, read and free; they never decide.

use ebbtide_mem::{BufMut, Region};

use crate::budget::Charge;
use crate::checksum::{BlockSums, Identity};
use crate::device::DeviceCounters;
use crate::env::BoxFuture;
use crate::error::Result;
use crate::object::SharedObject;
use crate::words::{Fingerprint, Generation, Location, NamespaceId, SegmentId};

/// The tier of objects that stay in the arena: memory under two budgets.
///
/// *Objects* is what may be resident; *staging* is what reads from below and log headers use meanwhile. The arena holds
/// both, so a charge that was granted always finds its memory.
pub trait HotTier: Send + Sync + 'static {
    /// Memory for a resident value of `length` bytes with a key of `key_bytes`; `None` when the budget has no room.
    fn alloc_object(&self, length: usize, key_bytes: usize) -> Option<(BufMut, Charge)>;

    /// Memory for bytes on their way; `None` when the staging budget has no room.
    fn alloc_staging(&self, length: usize) -> Option<(BufMut, Charge)>;

    /// Moves memory of `length` bytes from staging to objects; gives the staging charge back when objects have no room.
    fn adopt(&self, staging: Charge, length: usize, key_bytes: usize) -> std::result::Result<Charge, Charge>;

    /// What `alloc_object` would charge.
    fn object_bytes(&self, length: usize, key_bytes: usize) -> u64;

    /// Bytes that objects may take.
    fn objects_bytes_max(&self) -> u64;

    /// Bytes that objects may still take.
    fn objects_free_bytes(&self) -> u64;

    /// Calls `hook` whenever object memory came back. Once, at start.
    fn on_room(&self, hook: Box<dyn Fn() + Send + Sync>);

    /// Calls `hook` whenever staging memory came back. Once, at start.
    fn on_staging(&self, hook: Box<dyn Fn() + Send + Sync>);

    /// The arena, for registration.
    fn regions(&self) -> Vec<Region>;

    /// What is in use.
    fn usage(&self) -> HotUsage;
}

/// What the arena holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HotUsage {
    /// Bytes that objects may take: values, rounded up to pages, and their keys and headers.
    pub objects_bytes_max: u64,
    /// Bytes that they take.
    pub objects_bytes: u64,
    /// The most they ever took.
    pub objects_bytes_peak: u64,
    /// Bytes that may be on their way.
    pub staging_bytes_max: u64,
    /// Bytes that are.
    pub staging_bytes: u64,
    /// Where the memory comes from: "file in /dev/shm", …
    pub backing: String,
    /// Optional features that are not in force, each with its reason.
    pub degraded: Vec<String>,
}

/// What a tier below DRAM is.
#[derive(Clone, Debug)]
pub struct TierInfo {
    /// "ssd", "pool", "cold".
    pub name: String,
    /// What it lies on, for people.
    pub on: String,
    /// Bytes of segments, those in reserve for reclaim included.
    pub capacity_bytes: u64,
    /// The size of a segment.
    pub segment_bytes: u64,
    /// The longest value it takes.
    pub object_bytes_max: u64,
    /// An address that is a multiple of this, and a length likewise, can be read into directly.
    pub direct_align_bytes: u32,
    /// Operations that keep its devices busy.
    pub queue_depth: u32,
    /// The store's uuid and the incarnation of this opening.
    pub store: [u8; 16],
    /// See [`MediumIdentity`](crate::MediumIdentity).
    pub incarnation: u32,
    /// The secret of fingerprints that the tier keeps for its store.
    pub secret: [u64; 2],
}

/// What a tier below DRAM holds, and what it did since it was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TierUsage {
    /// Bytes of segments that are not free.
    pub used_bytes: u64,
    /// Bytes of values that rows point to (by what the engine told the tier), rounded up to pages.
    pub live_bytes: u64,
    /// Records behind them.
    pub live_records: u64,
    /// Free segments.
    pub segments_free: u32,
    /// All segments.
    pub segments: u32,
    /// Bytes of one of them.
    pub segment_bytes: u64,
    /// Every byte of the tier under the store's root: superblocks, segments in use and free, remainders.
    pub accounted_bytes: u64,
    /// Bytes of values admitted (demotions).
    pub admitted_value_bytes: u64,
    /// Bytes of values written again by reclaim.
    pub reinserted_value_bytes: u64,
    /// Bytes written to devices for any reason.
    pub written_bytes: u64,
    /// Bytes in the segments that are still being filled.
    pub open_bytes: u64,
    /// Segments sealed.
    pub segments_sealed: u64,
    /// Segments reclaimed.
    pub segments_reclaimed: u64,
    /// Reads whose bytes did not match their sum.
    pub checksum_mismatches: u64,
    /// Write operations that failed.
    pub write_errors: u64,
    /// What the devices did.
    pub device: DeviceCounters,
    /// Optional features that are not in force, each with its reason.
    pub degraded: Vec<String>,
}

/// Why objects are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    /// They come from above. Waits when only the segments in reserve are left.
    Demote,
    /// They come from a segment that is being reclaimed. May use the segments in reserve.
    Reinsert,
}

/// A read of one whole value.
pub struct ReadRequest {
    /// Where it starts.
    pub location: Location,
    /// Its length.
    pub length: u64,
    /// Whose bytes they should be.
    pub identity: Identity,
    /// The sum they should have.
    pub sum: u64,
    /// False leaves the bytes unchecked.
    pub verify: bool,
    /// The destination, of `length` bytes, with room up to the device's alignment.
    pub into: BufMut,
}

/// How one read ended.
#[derive(Debug)]
pub struct ReadDone {
    /// Success; Corrupt when the bytes are not those of the identity (a segment that was reused under the reader shows
    /// so too: look the row up again); Unavailable when the device failed or did not answer.
    pub result: Result<()>,
    /// The destination; `None` when the device still holds it.
    pub buf: Option<BufMut>,
    /// The sums of its blocks, where they were taken.
    pub sums: Option<BlockSums>,
}

/// A segment under reclaim.
#[derive(Clone, Debug)]
pub struct Victims {
    /// The segment; until [`Tier::release`] it stays readable.
    pub segment: SegmentId,
    /// What stands in it, dead records included: the engine knows which are live.
    pub records: Vec<VictimRecord>,
}

/// A record of a segment under reclaim.
#[derive(Clone, Debug)]
pub struct VictimRecord {
    /// The namespace.
    pub namespace: NamespaceId,
    /// The full key.
    pub key: Box<[u8]>,
    /// The write that made it.
    pub generation: Generation,
    /// The length of the whole value.
    pub length: u64,
    /// Where the whole value starts: in another segment when this one holds a later part of it.
    pub location: Location,
}

/// What recovery finds.
#[derive(Debug)]
pub enum Recovered<'a> {
    /// A record's header, with its key.
    Record {
        /// The namespace.
        namespace: NamespaceId,
        /// The full key.
        key: &'a [u8],
        /// The write that made it.
        generation: Generation,
        /// The length of the value.
        length: u64,
        /// Its sum.
        sum: u64,
        /// Where it starts.
        location: Location,
    },
    /// A row of the checkpoint.
    Row(CheckpointRow),
    /// A removal: records of this key with a lesser or equal generation are void.
    Tombstone {
        /// The namespace.
        namespace: NamespaceId,
        /// The full key.
        key: &'a [u8],
        /// The removed write.
        generation: Generation,
    },
}

/// A row as a checkpoint keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckpointRow {
    /// The fingerprint, under the store's own secret.
    pub fingerprint: Fingerprint,
    /// The write that made it.
    pub generation: Generation,
    /// The length of the value.
    pub length: u64,
    /// Its sum.
    pub sum: u64,
    /// Where it starts.
    pub location: Location,
}

/// How recovery went.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecoverySummary {
    /// True when a checkpoint was found and used.
    pub from_checkpoint: bool,
    /// Segments whose footers were read.
    pub segments_sealed: u32,
    /// Segments that were open and were walked group by group.
    pub segments_walked: u32,
    /// Records or rows handed to the engine.
    pub records: u64,
    /// Records of walked segments whose bytes did not match, dropped.
    pub records_torn: u64,
    /// Sealed segments whose footer was unreadable and which were walked instead.
    pub footers_bad: u32,
}

/// A place below DRAM that keeps objects.
pub trait Tier: Send + Sync + 'static {
    /// What it is.
    fn info(&self) -> &TierInfo;

    /// What it holds and did.
    fn usage(&self) -> TierUsage;

    /// Bytes that one value of `length` takes in it, shares of headers left out.
    fn stored_bytes(&self, length: u64) -> u64;

    /// Writes `objects`, packed in order, and answers for each where it stands. A location is good for reading from then
    /// on, and durable after the next [`flush`](Self::flush). Waits for a free segment; the caller bounds the wait.
    ///
    /// Not to be dropped before it ends: a location that nobody was told of is dead space until its segment is reclaimed.
    fn put_many(
        &self,
        objects: Vec<SharedObject>,
        intent: Intent,
    ) -> BoxFuture<'static, Vec<Result<Location>>>;

    /// Reads whole values; result i belongs to request i.
    fn get_many(&self, requests: Vec<ReadRequest>) -> BoxFuture<'static, Vec<ReadDone>>;

    /// Says that a value was asked for, so that reclaim knows its segment is wanted.
    fn wanted(&self, location: Location, length: u64);

    /// Says that no row points to the value at `location` any more.
    fn free(&self, location: Location, length: u64);

    /// Writes removals, so that no restart brings the objects back. On return they survive the process; power cuts after
    /// the next flush.
    fn bury(&self, removals: Vec<(NamespaceId, Box<[u8]>, Generation)>) -> BoxFuture<'static, Result<()>>;

    /// True while free segments are few enough that reclaim should run.
    fn wants_reclaim(&self) -> bool;

    /// Picks the sealed segment with the least wanted and then the least live bytes, and reads what stands in it. `None`
    /// when there is none to pick.
    fn reclaim(&self) -> BoxFuture<'static, Result<Option<Victims>>>;

    /// Frees a segment that [`reclaim`](Self::reclaim) picked, once no row points into it. Flushes what was re-inserted first.
    fn release(&self, segment: SegmentId) -> BoxFuture<'static, Result<()>>;

    /// Finds what the tier held, oldest segment first, and calls `sink` for each. Once, before anything else.
    fn recover<'a>(
        &'a self,
        sink: &'a mut (dyn for<'b> FnMut(Recovered<'b>) + Send),
    ) -> BoxFuture<'a, Result<RecoverySummary>>;

    /// Ends when nothing is in flight that the tier began by itself (a segment that is being sealed, for one).
    fn settle(&self) -> BoxFuture<'static, ()>;

    /// Makes everything whose `put_many` has ended durable.
    fn flush(&self) -> BoxFuture<'static, Result<()>>;

    /// Seals what is open, writes a checkpoint of `rows` (batches, until the iterator ends) and marks the medium clean.
    fn close(
        &self,
        rows: Box<dyn Iterator<Item = Vec<CheckpointRow>> + Send>,
    ) -> BoxFuture<'static, Result<()>>;
}
