//! The arena: memory, the allocator of its pages, and the lock between them.
//!
//! The lock is held for the bookkeeping of pages alone, never while bytes are touched.
#![forbid(unsafe_code)]

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

use crate::backing::{self, Backing};
use crate::buddy::{Buddy, CHUNK_PAGES, CHUNKS_MAX, REGION_PAGES, Run, Runs};
use crate::pool::Pool;
use crate::slot::{BufMut, Inner, RawSpan};
use crate::sys::Memory;
use crate::{CHUNK_BYTES, PAGE_BYTES, REGION_BYTES};

/// One region of memory that buffers are taken from. Clones share it; it is given back when the last clone and the last
/// buffer are dropped.
///
/// ```
/// let arena = ebbtide_mem::Arena::heap(2 << 20);
/// let mut buf = arena.alloc(5).expect("the arena is empty");
/// buf.write_at(0, b"value");
/// assert_eq!(buf.freeze().to_vec(), b"value");
/// assert_eq!(arena.used_bytes(), 0);
/// ```
#[derive(Clone)]
pub struct Arena(Arc<Shared>);

/// What [`Arena::open`] makes.
#[derive(Clone, Debug)]
pub struct ArenaOptions {
    /// Names the file, `ebbtide-<name>`: the store's uuid. Letters, digits, `-`, `_` and `.` only.
    pub name: String,
    /// Size, rounded up to whole chunks of 2 MiB; under 16 TiB.
    pub bytes: u64,
    /// Threads that touch the pages at open. 0 leaves that to the first use, which is slower than it looks.
    pub prefault_threads: usize,
    /// Tries huge pages: hugetlbfs first, else transparent ones.
    pub huge_pages: bool,
    /// Keeps the name until the arena is closed, so that the next start finds what a killed process left. Off for memory that
    /// nobody will look for: it ends with the process.
    pub keep_name: bool,
}

/// A piece of the arena, to be registered as one buffer with io_uring (or a NIC).
///
/// `Send` and `Sync`: it names memory and reaches none of it. The address is good as long as the arena lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its place in [`Arena::regions`]; [`RawSpan::region`] refers to it.
    pub index: u16,
    /// Address of its first byte.
    pub address: *mut u8,
    /// Length: whole chunks, at most [`REGION_BYTES`].
    pub bytes: u64,
}

impl Arena {
    /// Makes the arena, prefaulted, from the best memory there is; what is less than wished is in
    /// [`degraded`](Self::degraded).
    ///
    /// A file of the same name is removed first: the caller must own the store, so that it is nobody's.
    /// Errors: `InvalidInput` for a name or size that cannot be, `OutOfMemory` or `StorageFull` when there is no room.
    pub fn open(options: &ArenaOptions) -> io::Result<Self> {
        let chunks = check(options)?;
        let opened = backing::open(options, chunks as usize * CHUNK_BYTES)?;
        Ok(Self::new(opened.memory, chunks, opened.backing, opened.degraded))
    }

    /// An arena of ordinary memory, `bytes` rounded up to whole chunks, for tests, Miri and the simulator.
    /// Panics for 0 and from 16 TiB on.
    pub fn heap(bytes: u64) -> Self {
        let chunks = chunks_of(bytes).expect("an arena holds a byte at least, and less than 16 TiB");
        Self::new(Memory::heap(chunks as usize * CHUNK_BYTES), chunks, Backing::Heap, Vec::new())
    }

    fn new(memory: Memory, chunks: u32, backing: Backing, degraded: Vec<String>) -> Self {
        let buddy = Buddy::new(chunks);
        Arena(Arc::new(Shared {
            free_pages: AtomicU32::new(buddy.free_pages()),
            buddy: Mutex::new(buddy),
            pages: chunks * CHUNK_PAGES,
            regions: cut(memory.address(), u64::from(chunks) * CHUNK_BYTES as u64),
            backing,
            degraded,
            pool: Pool::new(),
            memory,
        }))
    }

    /// A buffer of `len` bytes, with whatever was in that memory before. `None` exactly when fewer than
    /// `len` / 4096 (rounded up) pages are free, or `len` is 0.
    pub fn alloc(&self, len: usize) -> Option<BufMut> {
        let pages = u32::try_from(len.div_ceil(PAGE_BYTES)).ok()?;
        if pages == 0 {
            return None;
        }
        let mut runs = Runs::new();
        if !self.0.take(pages, &mut runs) {
            return None;
        }
        let spans = runs.iter().map(|run| self.0.span(*run)).collect();
        Some(BufMut::from_arena(Arc::clone(&self.0), spans, len))
    }

    /// Size of the arena.
    pub fn capacity_bytes(&self) -> u64 {
        u64::from(self.0.pages) * PAGE_BYTES as u64
    }

    /// Bytes given out, in whole pages. Takes no lock; a moment old when other threads allocate.
    pub fn used_bytes(&self) -> u64 {
        self.capacity_bytes() - self.free_bytes()
    }

    /// Bytes not given out; an [`alloc`](Self::alloc) of that many succeeds. Takes no lock.
    pub fn free_bytes(&self) -> u64 {
        u64::from(self.0.free_pages.load(Ordering::Relaxed)) * PAGE_BYTES as u64
    }

    /// The arena in pieces that io_uring can register, ascending and without gaps.
    pub fn regions(&self) -> &[Region] {
        &self.0.regions
    }

    /// What the memory stands on.
    pub fn backing(&self) -> Backing {
        self.0.backing
    }

    /// What was asked for and not had, one sentence each; empty when all is well.
    pub fn degraded(&self) -> &[String] {
        &self.0.degraded
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Arena({} of {} bytes used, {})", self.used_bytes(), self.capacity_bytes(), self.backing())
    }
}

/// What the clones of an arena and its buffers share.
pub(crate) struct Shared {
    buddy: Mutex<Buddy>,
    /// The allocator's count, set under its lock, read without.
    free_pages: AtomicU32,
    pages: u32,
    regions: Vec<Region>,
    backing: Backing,
    degraded: Vec<String>,
    /// Where the buffers' own bookkeeping lies.
    pool: Pool<Inner>,
    memory: Memory,
}

impl Shared {
    pub(crate) fn pool(&self) -> &Pool<Inner> {
        &self.pool
    }

    /// Takes back the memory of a buffer. Panics when `spans` are not given out, or of another arena.
    pub(crate) fn give_back(&self, spans: &[RawSpan]) {
        let mut buddy = self.buddy.lock();
        for span in spans {
            buddy.free(self.run(span));
        }
        self.free_pages.store(buddy.free_pages(), Ordering::Relaxed);
    }

    fn take(&self, pages: u32, runs: &mut Runs) -> bool {
        let mut buddy = self.buddy.lock();
        let taken = buddy.alloc(pages, runs);
        self.free_pages.store(buddy.free_pages(), Ordering::Relaxed);
        taken
    }

    fn span(&self, run: Run) -> RawSpan {
        RawSpan {
            address: self.memory.address().wrapping_add(run.first as usize * PAGE_BYTES),
            bytes: run.pages * PAGE_BYTES as u32, // at most a region of 1 GiB
            region: Some((run.first / REGION_PAGES) as u16),
        }
    }

    fn run(&self, span: &RawSpan) -> Run {
        let offset = span.address.addr().wrapping_sub(self.memory.address().addr());
        let (first, pages) = (offset / PAGE_BYTES, span.bytes / PAGE_BYTES as u32);
        assert!(first < self.pages as usize, "a span of another arena");
        let run = Run { first: first as u32, pages };
        assert!(*span == self.span(run), "a span that the arena did not give out");
        run
    }
}

/// The number of chunks of an arena that can be.
fn check(options: &ArenaOptions) -> io::Result<u32> {
    let invalid = |text: String| io::Error::new(io::ErrorKind::InvalidInput, text);
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let name = &options.name;
    if name.is_empty() || name.len() > 200 || !name.chars().all(allowed) {
        return Err(invalid(format!("arena name {name:?}: need 1 to 200 letters, digits, '-', '_' or '.'")));
    }
    let bytes = options.bytes;
    chunks_of(bytes)
        .ok_or_else(|| invalid(format!("arena of {bytes} bytes: need more than 0 and less than 16 TiB")))
}

fn chunks_of(bytes: u64) -> Option<u32> {
    let chunks = bytes.div_ceil(CHUNK_BYTES as u64);
    (1..=CHUNKS_MAX).contains(&chunks).then_some(chunks as u32)
}

fn cut(address: *mut u8, bytes: u64) -> Vec<Region> {
    let region = |index: u64| {
        let start = index * REGION_BYTES;
        Region {
            index: index as u16, // under 16 TiB there are under 16,384
            address: address.wrapping_add(start as usize),
            bytes: REGION_BYTES.min(bytes - start),
        }
    };
    (0..bytes.div_ceil(REGION_BYTES)).map(region).collect()
}

#[cfg(test)]
mod tests;
