//! Values in slots of huge pages: [`Pool`], [`Counted`] and [`Owned`].
//!
//! What it is: an `Arc` whose values of one type lie side by side in blocks of 2 MiB that ask for transparent huge pages.
//! The bookkeeping of a million objects is walked at random, and on small pages each step of such a walk costs a page walk
//! before it costs a cache miss. What it is not: a general allocator; a slot is used again for the same type alone, and blocks
//! go back to the system with the last value and the pool.
//!
//! The rule that makes it sound: a slot belongs to one value from the moment `Blocks::take` gave it out until the last
//! [`Counted`] of it has dropped that value and given the slot back, and the blocks live as long as any slot is out.

use std::alloc::Layout;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering, fence};

use parking_lot::Mutex;

use crate::{CHUNK_BYTES, sum, sys};

/// The first block is small, for pools that stay so.
const FIRST_BLOCK_BYTES: usize = 64 << 10;
/// So much of the next vacant slot is asked for ahead of need.
const EXPECTED_BYTES_MAX: usize = 256;
/// Slots start on cache lines.
const LINE_BYTES: usize = 64;
/// More owners than memory could hold; a count beyond it is a leak in a loop.
const OWNERS_MAX: usize = isize::MAX as usize;

/// Where values of one type are kept. Clones share it.
///
/// ```
/// let pool = ebbtide_mem::Pool::new();
/// let one = pool.keep("value".to_string());
/// let other = one.clone();
/// assert_eq!(*other, "value");
/// ```
pub struct Pool<T> {
    blocks: Arc<Blocks>,
    values: PhantomData<fn(T) -> T>,
}

/// A value with several owners, as with `Arc`; the last one drops it. Kept in a [`Pool`], or alone on the heap.
pub struct Counted<T> {
    slot: NonNull<Slot<T>>,
    owns: PhantomData<Slot<T>>,
}

// SAFETY: as for Arc: owners on several threads read the value (T: Sync), and the last of them drops it (T: Send).
unsafe impl<T: Send + Sync> Send for Counted<T> {}
// SAFETY: likewise.
unsafe impl<T: Send + Sync> Sync for Counted<T> {}

/// A value of a [`Pool`] with one owner, as with `Box`.
pub struct Owned<T>(Counted<T>);

/// A value where it lies. The count stands first, so that the front of the value is on its cache line.
#[repr(C)]
struct Slot<T> {
    owners: AtomicUsize,
    /// Whose slot it is; `None` on the heap.
    home: Option<Arc<Blocks>>,
    value: T,
}

/// A slot that nobody has.
struct Vacant {
    next: Option<NonNull<Vacant>>,
}

/// The memory of a pool.
struct Blocks {
    slot: Layout,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    vacant: Option<NonNull<Vacant>>,
    /// What was never given out of the last block: the next slot, and how many there are.
    fresh: Option<NonNull<u8>>,
    fresh_slots: usize,
    blocks: Vec<(NonNull<u8>, Layout)>,
}

// SAFETY: the pointers name memory that the pool owns, and are reached under the lock alone.
unsafe impl Send for State {}

impl<T> Pool<T> {
    /// A pool without memory; it takes some with the first value.
    pub fn new() -> Self {
        let slot =
            Layout::new::<Slot<T>>().align_to(LINE_BYTES).expect("a slot aligned to a line is a layout");
        let slot = slot.pad_to_align();
        assert!(slot.align() == LINE_BYTES && slot.size() <= CHUNK_BYTES / 4, "values of a pool are small");
        Pool { blocks: Arc::new(Blocks { slot, state: Mutex::default() }), values: PhantomData }
    }

    /// Keeps `value`.
    pub fn keep(&self, value: T) -> Counted<T> {
        self.clone().into_keep(value)
    }

    /// Keeps `value` for one owner.
    pub fn own(&self, value: T) -> Owned<T> {
        Owned(self.keep(value))
    }

    /// As [`keep`](Self::keep), for who has a clone to spare.
    pub(crate) fn into_keep(self, value: T) -> Counted<T> {
        let slot = self.blocks.take().cast::<Slot<T>>();
        let content = Slot { owners: AtomicUsize::new(1), home: Some(self.blocks), value };
        // SAFETY: `take` gave this slot, which has the size and alignment of one, to nobody else.
        unsafe { slot.write(content) };
        Counted { slot, owns: PhantomData }
    }
}

impl<T> Default for Pool<T> {
    fn default() -> Self {
        Pool::new()
    }
}

impl<T> Clone for Pool<T> {
    fn clone(&self) -> Self {
        Pool { blocks: Arc::clone(&self.blocks), values: PhantomData }
    }
}

impl Blocks {
    fn take(&self) -> NonNull<u8> {
        let mut state = self.state.lock();
        if let Some(vacant) = state.vacant {
            // SAFETY: what is in the list was given back by `give`, which wrote a Vacant there, and is nobody's.
            state.vacant = unsafe { vacant.read().next };
            // The next one to come is on its way into the cache meanwhile.
            if let Some(next) = state.vacant {
                sum::expect_write_at(next.as_ptr().cast(), self.slot.size().min(EXPECTED_BYTES_MAX));
            }
            return vacant.cast();
        }
        if state.fresh_slots == 0 {
            state.grow(self.slot.size());
        }
        state.fresh_slots -= 1;
        let slot = state.fresh.take().expect("a block that was just made has a slot");
        // SAFETY: the block has room for the slots that `grow` counted, of which this was not the last, or it is the block's
        // end, which a pointer may name.
        state.fresh = Some(unsafe { slot.add(self.slot.size()) });
        slot
    }

    /// Takes a slot back, whose value is gone.
    fn give(&self, slot: NonNull<u8>) {
        let mut state = self.state.lock();
        let vacant = slot.cast::<Vacant>();
        // SAFETY: the caller was the last to have this slot, which is larger than a Vacant and better aligned.
        unsafe { vacant.write(Vacant { next: state.vacant }) };
        state.vacant = Some(vacant);
    }
}

impl State {
    fn grow(&mut self, slot_bytes: usize) {
        let bytes = if self.blocks.is_empty() { FIRST_BLOCK_BYTES.max(slot_bytes) } else { CHUNK_BYTES };
        let layout = Layout::from_size_align(bytes, bytes.next_power_of_two()).expect("a block is a layout");
        // SAFETY: the layout is not empty.
        let block = unsafe { std::alloc::alloc(layout) };
        let Some(block) = NonNull::new(block) else { std::alloc::handle_alloc_error(layout) };
        if bytes == CHUNK_BYTES {
            sys::wish_huge_pages(block, bytes);
        }
        self.blocks.push((block, layout));
        (self.fresh, self.fresh_slots) = (Some(block), bytes / slot_bytes);
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        for (block, layout) in self.state.get_mut().blocks.drain(..) {
            // SAFETY: `grow` allocated it with this layout; no slot is out, since each holds these Blocks.
            unsafe { std::alloc::dealloc(block.as_ptr(), layout) };
        }
    }
}

impl<T> Counted<T> {
    /// A value alone on the heap.
    pub fn new(value: T) -> Self {
        let slot = Box::new(Slot { owners: AtomicUsize::new(1), home: None, value });
        Counted { slot: NonNull::from(Box::leak(slot)), owns: PhantomData }
    }

    /// How many owners it has.
    pub fn owners(this: &Self) -> usize {
        this.slot().owners.load(Ordering::Acquire)
    }

    /// Takes the value from its only owner; gives the owner back when there are others.
    pub fn try_unwrap(this: Self) -> Result<T, Self> {
        if this.slot().owners.compare_exchange(1, 0, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return Err(this);
        }
        let slot = std::mem::ManuallyDrop::new(this).slot;
        // SAFETY: this was the only owner, and is forgotten; the value is moved out and not dropped by `vacate`.
        let value = unsafe { (&raw const (*slot.as_ptr()).value).read() };
        // SAFETY: as above; the value is gone.
        unsafe { vacate(slot) };
        Ok(value)
    }

    fn slot(&self) -> &Slot<T> {
        // SAFETY: an owner keeps the slot alive, and through owners it is only read (`Owned` has the only one).
        unsafe { self.slot.as_ref() }
    }
}

/// Gives back the memory of a slot.
///
/// # Safety
/// The caller was its last owner and has dropped or moved out the value; nothing else of the slot is touched again.
unsafe fn vacate<T>(slot: NonNull<Slot<T>>) {
    // SAFETY: `home` was written with the slot and is read once, here.
    match unsafe { (&raw const (*slot.as_ptr()).home).read() } {
        Some(blocks) => blocks.give(slot.cast()),
        // SAFETY: `new` made it as a box of this layout; what it held is gone, so only the memory is freed.
        None => unsafe { std::alloc::dealloc(slot.as_ptr().cast(), Layout::new::<Slot<T>>()) },
    }
}

impl<T> Deref for Counted<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.slot().value
    }
}

impl<T> Deref for Owned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for Owned<T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the Counted in an Owned is never cloned, so it is the only one, and it is borrowed mutably.
        unsafe { &mut self.0.slot.as_mut().value }
    }
}

impl<T> Clone for Counted<T> {
    fn clone(&self) -> Self {
        // Relaxed, as in Arc: who clones is an owner, so the value is there and visible to it.
        let before = self.slot().owners.fetch_add(1, Ordering::Relaxed);
        assert!(before < OWNERS_MAX, "a value has more owners than memory holds");
        Counted { slot: self.slot, owns: PhantomData }
    }
}

impl<T> Drop for Counted<T> {
    fn drop(&mut self) {
        if self.slot().owners.fetch_sub(1, Ordering::Release) != 1 {
            return;
        }
        // What other owners did with the value happened before it is dropped.
        fence(Ordering::Acquire);
        let slot = self.slot;
        // SAFETY: this was the last owner; the value was written with the slot and is dropped once, here.
        unsafe { (&raw mut (*slot.as_ptr()).value).drop_in_place() };
        // SAFETY: as above.
        unsafe { vacate(slot) };
    }
}

impl<T: fmt::Debug> fmt::Debug for Counted<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl<T> fmt::Debug for Pool<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Pool({} blocks of slots of {} bytes)",
            self.blocks.state.lock().blocks.len(),
            self.blocks.slot.size()
        )
    }
}

#[cfg(test)]
mod tests;
