//! The contract of block storage.

use ebbtide_mem::{Buf, BufMut, Region};

use crate::env::BoxFuture;
use crate::error::Result;

/// What a device is and can do.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Its path or address, for messages.
    pub name: String,
    /// The implementation: "uring", "psync", "sim", …
    pub kind: &'static str,
    /// Its size in bytes.
    pub capacity_bytes: u64,
    /// Offsets and lengths are multiples of this.
    pub align_bytes: u32,
    /// Addresses of memory for direct reads are multiples of this.
    pub memory_align_bytes: u32,
    /// How many operations it keeps in flight.
    pub queue_depth: u32,
    /// Optional features that are not in force, each with its reason.
    pub degraded: Vec<String>,
}

/// What a device has done since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceCounters {
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Read operations as the caller gave them (one may have taken several of the kernel's).
    pub reads: u64,
    /// Write operations, likewise.
    pub writes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Operations that failed, timeouts included.
    pub errors: u64,
}

/// Looks at what a read brought, on the device's completion thread, after the queue was filled again.
///
/// Its verdict becomes the operation's result. It must not block and takes no lock of the engine.
pub type Check = Box<dyn FnOnce(&BufMut) -> Result<()> + Send>;

/// One operation. While it is in flight the device owns its buffers.
pub enum Op {
    /// Fills `into` from `offset` on: its length rounded up to `align_bytes`, which its memory must have room for.
    Read {
        /// Where, in bytes from the start of the device; aligned.
        offset: u64,
        /// The destination; comes back in [`Done::buf`].
        into: BufMut,
        /// Looked at before the operation counts as done.
        check: Option<Check>,
    },
    /// Writes the padded spans of all of `from`, one after the other, from `offset` on.
    Write {
        /// Where, in bytes from the start of the device; aligned.
        offset: u64,
        /// The sources, each a whole number of pages with its padding.
        from: Vec<Buf>,
    },
}

/// How one operation ended.
#[derive(Debug)]
pub struct Done {
    /// Success, or why not: Unavailable (I/O error, timeout, device gone), Invalid (misaligned, out of range), Closed, or
    /// what the check said.
    pub result: Result<()>,
    /// The destination of a read. `None` for writes, and for a read that timed out: the device keeps the memory until
    /// the kernel has let go of it.
    pub buf: Option<BufMut>,
}

/// Ends when every operation of a batch has; result i belongs to operation i.
///
/// Dropping it neither stops the operations nor frees their buffers.
pub type Batch = BoxFuture<'static, Vec<Done>>;

/// Block storage: flat bytes, read and written in aligned pieces, durable after a flush.
pub trait BlockDevice: Send + Sync + 'static {
    /// What it is and can do.
    fn info(&self) -> &DeviceInfo;

    /// Tells the device of memory that buffers will come from, once, before the first operation. A device that cannot
    /// register it works without and says so through [`degraded`](Self::degraded).
    fn register(&self, regions: &[Region]) -> Result<()>;

    /// Starts `ops` at once, whether or not the batch is ever polled; waits in the device's own bounded queue when it is full.
    /// No order among operations, not even of one batch.
    fn submit(&self, ops: Vec<Op>) -> Batch;

    /// Makes every write that was done before this call durable.
    fn flush(&self) -> BoxFuture<'static, Result<()>>;

    /// Says that `length` bytes at `offset` are not needed any more. A hint; what they read as afterwards is undefined.
    fn discard(&self, offset: u64, length: u64) -> BoxFuture<'static, Result<()>>;

    /// What it has done since it was opened.
    fn counters(&self) -> DeviceCounters;

    /// Optional features that are not in force now, each with its reason.
    fn degraded(&self) -> Vec<String> {
        self.info().degraded.clone()
    }

    /// Operations taken and not yet done.
    fn in_flight(&self) -> u64;
}
