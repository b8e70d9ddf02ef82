//! The arena: one named region of shared memory, lent as [`BufMut`] and [`Buf`].
//!
//! What it is: the only memory that values of hot objects live in. It is registered once with io_uring (and later RDMA
//! and 3FS), cut into 2 MiB chunks, and handed out as short lists of spans by a buddy system inside the chunks.
//! Beside it lie pools of huge pages for the bookkeeping of objects ([`Pool`]).
//! What it is not: it knows no keys, no tiers and no policy; who waits for room waits elsewhere.
//! The decision that shaped it: an object is a list of spans, so n free bytes are always enough for n bytes.

mod arena;
mod backing;
mod buddy;
mod pool;
mod slot;
pub mod sum;
mod sys;

pub use arena::{Arena, ArenaOptions, Region};
pub use backing::Backing;
pub use pool::{Counted, Owned, Pool};
pub use slot::{Buf, BufMut, RawSpan, Whole, lend};

/// The unit of allocation and of direct I/O.
pub const PAGE_BYTES: usize = 4096;
/// The unit of mapping: the largest block of the buddy system, a huge page, and SPDK's unit of registration.
pub const CHUNK_BYTES: usize = 2 << 20;
/// The largest piece that io_uring registers as one buffer; no chunk crosses a piece.
pub const REGION_BYTES: u64 = 1 << 30;

/// `len` rounded up to whole pages.
pub const fn round_up_to_page(len: usize) -> usize {
    len.div_ceil(PAGE_BYTES) * PAGE_BYTES
}
