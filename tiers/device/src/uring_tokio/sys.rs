//! Buffers as tokio-uring wants them: windows onto one span, which own the memory while the runtime has them.

use std::sync::Arc;

use ebbtide_mem::{Buf, BufMut};
use tokio_uring::buf::{IoBuf, IoBufMut};

/// The bytes `at..at + bytes` of one span of a buffer that is read into.
pub(super) struct ReadWindow {
    pub(super) buf: BufMut,
    pub(super) span: usize,
    pub(super) at: usize,
    pub(super) bytes: usize,
}

/// The bytes `at..at + bytes` of one span of a buffer that is written from.
pub(super) struct WriteWindow {
    pub(super) from: Arc<Vec<Buf>>,
    pub(super) buf: usize,
    pub(super) span: usize,
    pub(super) at: usize,
    pub(super) bytes: usize,
}

impl ReadWindow {
    fn pointer(&self) -> *mut u8 {
        let span = self.buf.raw_spans()[self.span];
        assert!(self.at + self.bytes <= span.bytes as usize, "a window lies within its span");
        span.address.wrapping_add(self.at)
    }
}

// SAFETY: the memory of a `BufMut` does not move with it and lives as long as it, which the window owns; it is initialised
// from the start (the allocator hands out zeroed or written pages); `pointer` checks the bounds.
unsafe impl IoBuf for ReadWindow {
    fn stable_ptr(&self) -> *const u8 {
        self.pointer()
    }
    fn bytes_init(&self) -> usize {
        self.bytes
    }
    fn bytes_total(&self) -> usize {
        self.bytes
    }
}

// SAFETY: as above, and a `BufMut` has one owner, so nobody else reads or writes while the window is with the runtime.
unsafe impl IoBufMut for ReadWindow {
    fn stable_mut_ptr(&mut self) -> *mut u8 {
        self.pointer()
    }
    // SAFETY: (of the caller) nothing to promise here, since all bytes are initialised already.
    unsafe fn set_init(&mut self, _: usize) {}
}

// SAFETY: the memory of a `Buf` is shared and read-only, does not move, and lives as long as any clone; the window holds one.
unsafe impl IoBuf for WriteWindow {
    fn stable_ptr(&self) -> *const u8 {
        let span = self.from[self.buf].raw_spans()[self.span];
        assert!(self.at + self.bytes <= span.bytes as usize, "a window lies within its span");
        span.address.wrapping_add(self.at)
    }
    fn bytes_init(&self) -> usize {
        self.bytes
    }
    fn bytes_total(&self) -> usize {
        self.bytes
    }
}
