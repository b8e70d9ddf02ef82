//! The contract of what a segment log lies on. Shaped like 3FS's USRBIO: register memory once, submit in batches, reap.

use ebbtide_mem::{Buf, BufMut, Region};

use crate::device::{Batch, Check, DeviceCounters};
use crate::env::BoxFuture;
use crate::error::Result;

/// What a medium is and can do.
#[derive(Clone, Debug)]
pub struct MediumInfo {
    /// Its address, for messages.
    pub name: String,
    /// The implementation under it, for people: "block(uring)", …
    pub kind: String,
    /// The size of a segment.
    pub segment_bytes: u64,
    /// How many segments it holds.
    pub segments_max: u32,
    /// Offsets and lengths of reads are multiples of this; writes are whole pages.
    pub align_bytes: u32,
    /// Addresses of memory for direct reads are multiples of this.
    pub memory_align_bytes: u32,
    /// How many operations it keeps in flight.
    pub queue_depth: u32,
    /// Bytes of it that no segment can use: superblock and remainder.
    pub overhead_bytes: u64,
}

/// Whose medium it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MediumIdentity {
    /// The store's uuid.
    pub store: [u8; 16],
    /// How often it was opened to write; this opening included.
    pub incarnation: u32,
    /// The secret of the store's fingerprints, where the medium is the store's own.
    pub secret: [u64; 2],
    /// True when this opening made the medium.
    pub created: bool,
}

/// One operation on a segment; slots are the medium's own, counted from 0.
pub enum MediumOp {
    /// Fills `into` from `offset` of segment `slot` on.
    Read {
        /// The segment.
        slot: u32,
        /// Bytes from the start of the segment; aligned.
        offset: u64,
        /// The destination.
        into: BufMut,
        /// See [`Check`].
        check: Option<Check>,
    },
    /// Writes the padded spans of `from` at `offset` of segment `slot`.
    Write {
        /// The segment.
        slot: u32,
        /// Bytes from the start of the segment; aligned.
        offset: u64,
        /// The sources.
        from: Vec<Buf>,
    },
}

/// A place for segments. It knows nothing of what is in them.
pub trait Medium: Send + Sync + 'static {
    /// What it is and can do.
    fn info(&self) -> &MediumInfo;

    /// Whose it is.
    fn identity(&self) -> MediumIdentity;

    /// Tells it of memory that buffers will come from, once, before the first operation.
    fn register(&self, regions: &[Region]) -> Result<()>;

    /// Starts `ops`; the rules of [`BlockDevice::submit`](crate::BlockDevice::submit).
    fn submit(&self, ops: Vec<MediumOp>) -> Batch;

    /// Makes every write that was done before this call durable.
    fn flush(&self) -> BoxFuture<'static, Result<()>>;

    /// Makes segment `slot` ready to be written from the start.
    fn create(&self, slot: u32) -> BoxFuture<'static, Result<()>>;

    /// Says that segment `slot` is complete and flushed.
    fn seal(&self, slot: u32) -> BoxFuture<'static, Result<()>>;

    /// Says that segment `slot` holds nothing that is needed.
    fn remove(&self, slot: u32) -> BoxFuture<'static, Result<()>>;

    /// The segments that may hold something. A block medium answers all of its slots: only their headers tell.
    fn list(&self) -> BoxFuture<'static, Result<Vec<u32>>>;

    /// The log's own small state (at most [`META_BYTES_MAX`] bytes), as last written; empty on a new medium.
    fn read_meta(&self) -> Vec<u8>;

    /// Replaces the log's own small state: all or nothing, durable on return.
    fn write_meta(&self, meta: Vec<u8>) -> BoxFuture<'static, Result<()>>;

    /// What the devices under it have done.
    fn counters(&self) -> DeviceCounters;

    /// Optional features that are not in force, each with its reason.
    fn degraded(&self) -> Vec<String>;
}

/// The most bytes that [`Medium::write_meta`] takes.
pub const META_BYTES_MAX: usize = 2048;
