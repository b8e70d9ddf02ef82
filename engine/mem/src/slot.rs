//! Memory handed out: [`BufMut`], which has one owner and is written, and [`Buf`], which is shared and read.
//!
//! All unsafe code that touches bytes of the arena is here; `sys.rs` maps them, `buddy.rs` says which are free.
//! The one rule that makes it sound: a range of pages belongs to exactly one [`Inner`] from the moment the
//! allocator gave it out until that `Inner` is dropped, and only a `BufMut` (unique) ever writes.

use std::alloc::Layout;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use smallvec::SmallVec;

use crate::arena::Shared;
use crate::pool::Counted;
use crate::{PAGE_BYTES, round_up_to_page, sum};

/// One run of contiguous memory in a buffer: what an iovec, a registered buffer or an RDMA descriptor names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawSpan {
    /// Address of the first byte.
    pub address: *mut u8,
    /// Length in bytes. In memory of the arena or the heap a multiple of [`PAGE_BYTES`], so that the whole
    /// of it may be used for direct I/O; in lent memory exactly what the caller lent.
    pub bytes: u32,
    /// The registered piece (see [`Arena::regions`](crate::Arena::regions)) that holds it; `None` outside the arena.
    pub region: Option<u16>,
}

/// Whose memory a buffer stands on, and so what happens when its last owner drops it.
enum Home {
    Arena(Arc<Shared>),
    Heap(Layout),
    Lent(Arc<Gate>),
    /// Some pages of another buffer, which lives on until its last part is gone.
    Part(#[expect(dead_code, reason = "held for its drop alone")] Counted<Inner>),
}

/// The memory behind a `BufMut` or a family of `Buf`s.
pub(crate) struct Inner {
    spans: SmallVec<[RawSpan; 3]>,
    len: usize,
    home: Home,
}

// What `DramTier` counts for it: two cache lines with the head of its slot.
const _: () = assert!(size_of::<Inner>() + 2 * size_of::<usize>() <= 128);

// SAFETY: the spans belong to this Inner alone (promise of the allocator, of the heap and of `lend`), so moving it to
// another thread moves the only way to reach them.
unsafe impl Send for Inner {}
// SAFETY: through a shared Inner bytes are only read; writing needs `&mut BufMut`, which owns its Inner uniquely.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        match &self.home {
            Home::Arena(shared) => shared.give_back(&self.spans),
            Home::Heap(layout) => {
                // SAFETY: `BufMut::heap` allocated exactly this block with this layout and made it the only span.
                unsafe { std::alloc::dealloc(self.spans[0].address, *layout) }
            }
            Home::Lent(gate) => gate.open(),
            Home::Part(_) => {} // the reference it drops next is all it holds
        }
    }
}

/// Unique, writable memory. Turn it into shared, read-only memory with [`freeze`](Self::freeze).
///
/// While an operation is in flight the device owns the `BufMut`, so dropping a future that waits for it frees nothing
/// that the kernel still writes to.
pub struct BufMut(Inner);

/// Shared, read-only memory; cloning counts a reference. The memory is free when the last clone is dropped.
///
/// It carries its length and where its first run starts, so that most reads look at nothing else: a read of a cold object is
/// a chain of cache misses, and this is one less.
#[derive(Clone)]
pub struct Buf {
    inner: Counted<Inner>,
    front: Front,
    len: usize,
}

/// The first run of a buffer's bytes.
#[derive(Clone, Copy)]
struct Front {
    address: *const u8,
    bytes: usize,
}

// SAFETY: a Front is only read through the Buf that holds it, whose Inner owns the bytes; see Inner.
unsafe impl Send for Front {}
// SAFETY: likewise; it is never written through.
unsafe impl Sync for Front {}

impl BufMut {
    /// Takes `spans` (whole pages that the allocator just gave out) as a buffer of `len` bytes.
    pub(crate) fn from_arena(shared: Arc<Shared>, spans: SmallVec<[RawSpan; 3]>, len: usize) -> Self {
        assert!(
            spans.iter().map(|span| span.bytes as usize).sum::<usize>() >= len,
            "spans shorter than the buffer"
        );
        BufMut(Inner { spans, len, home: Home::Arena(shared) })
    }

    /// Page-aligned, zeroed memory outside the arena, for tests and tools. Panics when `len` is 0.
    pub fn heap(len: usize) -> Self {
        assert!(len > 0, "a buffer holds at least one byte");
        let bytes = round_up_to_page(len);
        let layout = Layout::from_size_align(bytes, PAGE_BYTES).expect("page-aligned sizes make a layout");
        // SAFETY: the layout is not empty.
        let address = unsafe { std::alloc::alloc_zeroed(layout) };
        let Some(address) = NonNull::new(address) else { std::alloc::handle_alloc_error(layout) };
        let bytes = u32::try_from(bytes).expect("heap buffers stay under 4 GiB");
        let span = RawSpan { address: address.as_ptr(), bytes, region: None };
        BufMut(Inner { spans: SmallVec::from_elem(span, 1), len, home: Home::Heap(layout) })
    }

    /// Length in bytes: what was asked for, not what was rounded up to.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Never: a buffer holds at least one byte.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Makes the buffer `len` bytes long, within the memory that it has. Panics when that is too little, or for 0.
    pub fn set_len(&mut self, len: usize) {
        let room: usize = self.0.spans.iter().map(|span| span.bytes as usize).sum();
        assert!(len > 0 && len <= room, "length {len} does not fit the {room} bytes of the buffer");
        self.0.len = len;
    }

    /// The memory as the kernel or a NIC is told of it, rounded up to whole pages (lent memory: as lent).
    pub fn raw_spans(&self) -> &[RawSpan] {
        &self.0.spans
    }

    /// The bytes, span by span, `len()` in all.
    pub fn spans(&self) -> impl Iterator<Item = &[u8]> {
        self.0.read_spans()
    }

    /// The bytes, span by span, to write.
    pub fn spans_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        let mut left = self.0.len;
        self.0.spans.iter().map_while(move |span| {
            let take = left.min(span.bytes as usize);
            left -= take;
            // SAFETY: the span belongs to this buffer alone and `&mut self` is held for the life of the slice; spans
            // do not overlap, so the slices that this iterator yields do not either.
            (take > 0).then(|| unsafe { std::slice::from_raw_parts_mut(span.address, take) })
        })
    }

    /// All the memory, with the padding behind `len()` up to the whole page, to write.
    pub fn padded_spans_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        self.0.spans.iter().map(|span| {
            // SAFETY: as in `spans_mut`; the padding belongs to the buffer too.
            unsafe { std::slice::from_raw_parts_mut(span.address, span.bytes as usize) }
        })
    }

    /// Asks for the first KiB of the memory, which will be written soon: see [`sum::expect_write`].
    pub fn expect_write(&mut self) {
        self.spans_mut().take(1).for_each(sum::expect_write);
    }

    /// Copies `source` to byte `at`. Panics when it does not fit.
    pub fn write_at(&mut self, at: usize, source: &[u8]) {
        assert!(fits(at, source.len(), self.len()), "write past the end of a buffer");
        let (mut skip, mut source) = (at, source);
        for span in self.spans_mut() {
            if skip >= span.len() {
                skip -= span.len();
                continue;
            }
            let take = source.len().min(span.len() - skip);
            sum::copy(&mut span[skip..skip + take], &source[..take]);
            source = &source[take..];
            skip = 0;
            if source.is_empty() {
                break;
            }
        }
    }

    /// Copies the whole of `source` in (equal lengths; panics otherwise), zeroes the padding and calls `block` with the
    /// index and the sum of each block of `block_bytes` bytes (the last may be shorter), in order.
    ///
    /// What was summed is what was stored, so a source that changes meanwhile cannot make the two differ.
    pub fn fill_and_sum(&mut self, source: &[u8], block_bytes: usize, mut block: impl FnMut(usize, u64)) {
        assert_eq!(self.len(), source.len(), "source and buffer differ in length");
        for (index, part) in source.chunks(block_bytes).enumerate() {
            let at = index * block_bytes;
            match self.contiguous_mut(at, part.len()) {
                Some(target) => block(index, sum::copy_and_sum(target, part)),
                None => {
                    self.write_at(at, part);
                    block(index, self.0.sum_range(at, part.len()));
                }
            }
        }
        self.zero_padding();
    }

    /// Zeroes what lies behind `len()` in the last page, so that no other object's bytes reach a device with it.
    pub fn zero_padding(&mut self) {
        let mut left = self.0.len;
        for span in self.padded_spans_mut() {
            let used = left.min(span.len());
            left -= used;
            span[used..].fill(0);
        }
    }

    /// The sum of the bytes `at..at + len`.
    pub fn sum_range(&self, at: usize, len: usize) -> u64 {
        self.0.sum_range(at, len)
    }

    /// Copies the bytes from `at` on into `target`. Panics when there are fewer.
    pub fn read_at(&self, at: usize, target: &mut [u8]) {
        self.0.read_at(at, target);
    }

    /// Ends writing: the memory is shared and read-only from here on.
    pub fn freeze(self) -> Buf {
        Buf::over(self.0)
    }

    /// Cuts the buffer into parts of `part_bytes` (whole pages; the last part may be shorter), each with one owner, so that
    /// a value that lies in several places is read into one buffer. [`Whole::join`] makes them one again.
    ///
    /// Panics when `part_bytes` is 0 or not whole pages.
    pub fn split(self, part_bytes: usize) -> (Vec<BufMut>, Whole) {
        assert!(part_bytes > 0, "a part holds at least one page");
        let whole = self.0.share();
        let parts = (0..whole.len).step_by(part_bytes).map(|at| {
            let len = part_bytes.min(whole.len - at);
            BufMut(Inner { spans: whole.cut(at, len), len, home: Home::Part(whole.clone()) })
        });
        (parts.collect(), Whole(whole))
    }

    fn contiguous_mut(&mut self, at: usize, len: usize) -> Option<&mut [u8]> {
        let mut start = 0;
        for span in self.spans_mut() {
            if at < start + span.len() {
                return span.get_mut(at - start..at - start + len);
            }
            start += span.len();
        }
        None
    }
}

impl Buf {
    fn over(inner: Inner) -> Self {
        let (len, first) = (inner.len, inner.spans[0]);
        let front = Front { address: first.address, bytes: len.min(first.bytes as usize) };
        Buf { inner: inner.share(), front, len }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: a buffer holds at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The memory as the kernel or a NIC is told of it, rounded up to whole pages.
    pub fn raw_spans(&self) -> &[RawSpan] {
        &self.inner.spans
    }

    /// The bytes, span by span, `len()` in all.
    pub fn spans(&self) -> impl Iterator<Item = &[u8]> {
        self.inner.read_spans()
    }

    /// All the memory with its padding, span by span: what a device writes.
    pub fn padded_spans(&self) -> impl Iterator<Item = &[u8]> {
        self.inner.spans.iter().map(|span| {
            // SAFETY: as in `Inner::read_spans`.
            unsafe { std::slice::from_raw_parts(span.address, span.bytes as usize) }
        })
    }

    /// Copies the bytes from `at` on into `target`. Panics when there are fewer.
    pub fn read_at(&self, at: usize, target: &mut [u8]) {
        match self.front().get(at..).and_then(|rest| rest.get(..target.len())) {
            Some(source) => sum::copy(target, source),
            None => self.inner.read_at(at, target),
        }
    }

    /// Asks for the front of the memory, which will be read soon: see [`sum::expect_read`].
    pub fn expect_read(&self) {
        sum::expect_read(self.front());
    }

    fn front(&self) -> &[u8] {
        // SAFETY: `over` took it from the first span, which belongs to the Inner that this Buf keeps alive; through a Buf
        // bytes are only read.
        unsafe { std::slice::from_raw_parts(self.front.address, self.front.bytes) }
    }

    /// The sum of the bytes `at..at + len`.
    pub fn sum_range(&self, at: usize, len: usize) -> u64 {
        self.inner.sum_range(at, len)
    }

    /// A copy of the bytes on the heap.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.len());
        self.spans().for_each(|span| bytes.extend_from_slice(span));
        bytes
    }

    /// How many owners the memory has, this one and slices of it included.
    pub fn owners(&self) -> usize {
        Counted::owners(&self.inner)
    }

    /// The bytes `at..at + len` as a buffer of their own that shares this one's memory: what a device is given when only
    /// some pages are to be written. Panics when `at` is not a page boundary, `len` is 0 or the range is too long.
    pub fn slice(&self, at: usize, len: usize) -> Buf {
        Buf::over(Inner { spans: self.inner.cut(at, len), len, home: Home::Part(self.inner.clone()) })
    }

    /// Makes the memory writable again when this is its only owner; gives the buffer back otherwise, and for a slice.
    pub fn thaw(self) -> Result<BufMut, Buf> {
        if matches!(self.inner.home, Home::Part(_)) {
            return Err(self); // the pages belong to the buffer that it was cut from too
        }
        let Buf { inner, front, len } = self;
        Counted::try_unwrap(inner).map(BufMut).map_err(|inner| Buf { inner, front, len })
    }
}

/// What is left of a buffer that was [split](BufMut::split): the right to become whole again.
pub struct Whole(Counted<Inner>);

impl Whole {
    /// Takes the parts back. `None` when one of them is missing: then the memory is free when its last part is gone.
    pub fn join(self, parts: Vec<BufMut>) -> Option<BufMut> {
        drop(parts);
        Counted::try_unwrap(self.0).ok().map(BufMut)
    }
}

impl Inner {
    /// As a value of several owners; that of an arena's memory lies in the arena's pool.
    fn share(self) -> Counted<Inner> {
        match &self.home {
            Home::Arena(shared) => shared.pool().clone().into_keep(self),
            Home::Heap(_) | Home::Lent(_) | Home::Part(_) => Counted::new(self),
        }
    }

    /// The memory of `at..at + len`, up to the end of its last page.
    fn cut(&self, at: usize, len: usize) -> SmallVec<[RawSpan; 3]> {
        assert!(at.is_multiple_of(PAGE_BYTES), "a part of a buffer starts on a page");
        assert!(len > 0 && at + len <= self.len, "a part ends within its buffer");
        let (mut skip, mut left) = (at, round_up_to_page(len));
        let mut spans = SmallVec::new();
        for span in &self.spans {
            let bytes = span.bytes as usize;
            if skip >= bytes {
                skip -= bytes;
                continue;
            }
            let take = left.min(bytes - skip);
            // Lossless: no more than the span's own length.
            spans.push(RawSpan {
                address: span.address.wrapping_add(skip),
                bytes: take as u32,
                region: span.region,
            });
            (skip, left) = (0, left - take);
            if left == 0 {
                break;
            }
        }
        spans
    }

    fn read_spans(&self) -> impl Iterator<Item = &[u8]> {
        let mut left = self.len;
        self.spans.iter().map_while(move |span| {
            let take = left.min(span.bytes as usize);
            left -= take;
            // SAFETY: the span belongs to this Inner, was initialised (zeroed by the kernel or the allocator) and is not
            // written while a shared borrow of its owner is held.
            (take > 0).then(|| unsafe { std::slice::from_raw_parts(span.address, take) })
        })
    }

    fn read_at(&self, at: usize, target: &mut [u8]) {
        assert!(fits(at, target.len(), self.len), "read past the end of a buffer");
        let (mut skip, mut done) = (at, 0);
        for span in self.read_spans() {
            if done == target.len() {
                break;
            }
            if skip >= span.len() {
                skip -= span.len();
                continue;
            }
            let take = (target.len() - done).min(span.len() - skip);
            sum::copy(&mut target[done..done + take], &span[skip..skip + take]);
            done += take;
            skip = 0;
        }
    }

    fn sum_range(&self, at: usize, len: usize) -> u64 {
        assert!(fits(at, len, self.len), "sum past the end of a buffer");
        let mut start = 0;
        for span in self.read_spans() {
            if at < start + span.len() {
                if let Some(block) = span.get(at - start..at - start + len) {
                    return sum::sum(block);
                }
                break;
            }
            start += span.len();
        }
        // The block lies in several spans: rare, since spans are as large as the arena had them.
        let mut block = vec![0; len];
        self.read_at(at, &mut block);
        sum::sum(&block)
    }
}

/// Whether `len` bytes from `at` on lie within `total`, for any `at`, however wild.
fn fits(at: usize, len: usize, total: usize) -> bool {
    at.checked_add(len).is_some_and(|end| end <= total)
}

/// Closed while lent memory is in use; opened by the drop of the `Inner` that stood on it.
struct Gate {
    free: Mutex<bool>,
    freed: Condvar,
}

impl Gate {
    fn open(&self) {
        *self.free.lock() = true;
        self.freed.notify_all();
    }
}

/// Lends `target` to `work` as a [`BufMut`], and returns only when nothing owns that buffer any more.
///
/// This is how a device reads straight into a caller's memory: whatever `work` does with the buffer (gives it to a
/// device, drops the future, panics), the borrow of `target` lasts until the last owner is gone. A `work` that leaks the
/// buffer makes this call wait for ever, which is safe. Panics when `target` is empty or 4 GiB and more.
pub fn lend<R>(target: &mut [u8], work: impl FnOnce(BufMut) -> R) -> R {
    struct WaitAtEnd(Arc<Gate>);
    impl Drop for WaitAtEnd {
        fn drop(&mut self) {
            let mut free = self.0.free.lock();
            while !*free {
                self.0.freed.wait(&mut free);
            }
        }
    }
    assert!(!target.is_empty(), "a buffer holds at least one byte");
    let bytes = u32::try_from(target.len()).expect("lent memory stays under 4 GiB");
    let gate = Arc::new(Gate { free: Mutex::new(false), freed: Condvar::new() });
    let span = RawSpan { address: target.as_mut_ptr(), bytes, region: None };
    let buf = BufMut(Inner {
        spans: SmallVec::from_elem(span, 1),
        len: target.len(),
        home: Home::Lent(Arc::clone(&gate)),
    });
    let _wait = WaitAtEnd(gate);
    work(buf)
}

impl fmt::Debug for Whole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Whole({} bytes)", self.0.len)
    }
}

impl fmt::Debug for BufMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufMut({} bytes in {} spans)", self.0.len, self.0.spans.len())
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buf({} bytes in {} spans)", self.len, self.inner.spans.len())
    }
}

#[cfg(test)]
mod tests;
