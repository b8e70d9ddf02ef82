//! The kernel calls of the arena: files of shared memory, their mapping, and the first touch of their pages.
//!
//! All unsafe code that makes or ends memory is here; `slot.rs` has what reads and writes it. Which file to take, and
//! what to say when there is none, is in `backing.rs`.

use std::alloc::Layout;
use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::arena::Region;
use crate::{CHUNK_BYTES, PAGE_BYTES};

/// What one thread prefaults at a time: large enough to be rare, small enough that no thread ends long after the rest.
const SLICE_BYTES: usize = 64 << 20;

/// The memory of an arena: whole chunks, zeroed by whom it came from, given back when dropped.
pub(crate) struct Memory {
    address: *mut u8,
    bytes: usize,
    origin: Origin,
}

/// How the memory came and so how it goes.
enum Origin {
    Mapped { file: File, path: Option<PathBuf> },
    Heap { block: *mut u8, layout: Layout },
}

// SAFETY: `Memory` only owns the range; it reads and writes it through `&mut self` alone (prefault). Who may touch which
// bytes of it is ruled by the allocator and `slot.rs`.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

// SAFETY: a `Region` names memory by address and size and reaches none of it; to use the address needs unsafe code of
// the user, who answers for it.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Memory {
    /// `bytes` (whole chunks) of zeroed heap memory, at a page-aligned address.
    pub(crate) fn heap(bytes: usize) -> Self {
        // With the alignment of malloc this is calloc, which takes fresh pages as they are; a page-aligned layout
        // would be filled with zeroes by hand, and so be resident at once.
        let layout =
            Layout::from_size_align(bytes + PAGE_BYTES, 16).expect("an arena is smaller than isize::MAX");
        // SAFETY: the layout is not empty.
        let block = unsafe { std::alloc::alloc_zeroed(layout) };
        if block.is_null() {
            std::alloc::handle_alloc_error(layout);
        }
        let address = block.wrapping_add(block.addr().next_multiple_of(PAGE_BYTES) - block.addr());
        Memory { address, bytes, origin: Origin::Heap { block, layout } }
    }

    /// Maps the first `bytes` (whole chunks) of `file`, shared, at an address aligned to a chunk.
    ///
    /// `path` is the file's name: it is unlinked when the memory is dropped.
    pub(crate) fn map(file: File, path: Option<PathBuf>, bytes: usize) -> io::Result<Self> {
        // Owns the name from here on, so that it is unlinked whatever fails below.
        let mut memory =
            Memory { address: std::ptr::null_mut(), bytes: 0, origin: Origin::Mapped { file, path } };
        let Origin::Mapped { file, .. } = &memory.origin else { unreachable!("made above") };
        file.set_len(bytes as u64)?;
        let fd = file.as_raw_fd();
        let room = mmap(
            std::ptr::null_mut(),
            bytes + CHUNK_BYTES,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
        )?;
        let before = room.addr().next_multiple_of(CHUNK_BYTES) - room.addr();
        let address = room.wrapping_add(before);
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let mapped = mmap(address, bytes, protection, libc::MAP_SHARED | libc::MAP_FIXED, fd);
        if mapped.is_err() {
            munmap(room, bytes + CHUNK_BYTES);
        }
        memory.address = mapped?;
        memory.bytes = bytes;
        munmap(room, before);
        munmap(address.wrapping_add(bytes), CHUNK_BYTES - before);
        memory.advise(0..bytes, libc::MADV_DONTDUMP).ok(); // A core file without values is a wish, not a promise.
        Ok(memory)
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.address
    }

    /// Asks for transparent huge pages.
    pub(crate) fn ask_huge_pages(&self) -> io::Result<()> {
        self.advise(0..self.bytes, libc::MADV_HUGEPAGE)
    }

    /// Makes all pages present and writable with `threads` threads; with 0 only gives the file its room. With `huge`, as
    /// transparent huge pages where the kernel has them.
    ///
    /// After it no touch of the memory can fail for lack of room (SIGBUS): that is an error here.
    pub(crate) fn prefault(&mut self, threads: usize, huge: bool) -> io::Result<()> {
        let can_populate = match self.advise(0..PAGE_BYTES, libc::MADV_POPULATE_WRITE) {
            Ok(()) => true,
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => false, // before Linux 5.14
            Err(error) => return Err(no_room(error)),
        };
        // Not when the pages are populated: without a mapping to look at, fallocate takes small pages only.
        if !can_populate || threads == 0 {
            self.allocate()?;
        }
        let (memory, next) = (&*self, AtomicUsize::new(0));
        let work = || -> io::Result<()> {
            loop {
                let start = next.fetch_add(SLICE_BYTES, Ordering::Relaxed);
                if start >= memory.bytes {
                    return Ok(());
                }
                let slice = start..memory.bytes.min(start + SLICE_BYTES);
                if huge && can_populate {
                    memory.collapse(slice.clone());
                }
                if !can_populate {
                    memory.touch(slice);
                } else if let Err(error) = memory.advise(slice, libc::MADV_POPULATE_WRITE) {
                    next.store(memory.bytes, Ordering::Relaxed); // the others need not go on
                    return Err(no_room(error));
                }
            }
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("prefaulting does not panic"))
        })
    }

    /// Makes huge pages of the chunks of `range` one by one, also where the system's settings for shared memory give none:
    /// MADV_COLLAPSE is a wish of the process. It takes an empty chunk as soon as one page of it is there.
    ///
    /// Stops at the first chunk that cannot be had (before Linux 6.1, or no free huge page is left): the rest of the range is
    /// populated with small pages.
    fn collapse(&self, range: Range<usize>) {
        for start in range.step_by(CHUNK_BYTES) {
            let one = self.advise(start..start + PAGE_BYTES, libc::MADV_POPULATE_WRITE);
            if one.and_then(|()| self.advise(start..start + CHUNK_BYTES, libc::MADV_COLLAPSE)).is_err() {
                return; // what it brought is read from smaps, and said
            }
        }
    }

    /// Gives the file its room.
    fn allocate(&self) -> io::Result<()> {
        let Origin::Mapped { file, .. } = &self.origin else { return Ok(()) };
        // SAFETY: a plain call on an open descriptor.
        retry(|| unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, self.bytes as libc::off_t) })
    }

    /// Writes a byte of each page. Called by `prefault` alone, which holds the memory by `&mut`.
    fn touch(&self, range: Range<usize>) {
        for at in range.step_by(PAGE_BYTES) {
            // SAFETY: `at` lies in the mapping, `prefault` holds it uniquely, each slice goes to one thread, and the
            // file has its room, so the page can be had. A fresh page holds zeroes already.
            unsafe { self.address.add(at).write_volatile(0) };
        }
    }

    fn advise(&self, range: Range<usize>, advice: libc::c_int) -> io::Result<()> {
        let address = self.address.wrapping_add(range.start);
        // SAFETY: the range lies in our own mapping, and no advice used here (DONTDUMP, HUGEPAGE, COLLAPSE, POPULATE_WRITE)
        // changes what the memory holds.
        retry(|| unsafe { libc::madvise(address.cast(), range.len(), advice) })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        match &self.origin {
            Origin::Heap { block, layout } => {
                // SAFETY: `heap` allocated exactly this block with this layout; all buffers in it are gone, since each
                // holds the arena that owns this memory.
                unsafe { std::alloc::dealloc(*block, *layout) }
            }
            Origin::Mapped { file, path } => {
                if let Some(path) = path
                    && is_same_file(file, path)
                {
                    std::fs::remove_file(path).ok(); // What stays is found by name and removed at the next start.
                }
                munmap(self.address, self.bytes);
            }
        }
    }
}

/// Whether `path` still names `file`, and not the arena of a later incarnation of the store.
fn is_same_file(file: &File, path: &Path) -> bool {
    let identity = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
    match (file.metadata(), std::fs::symlink_metadata(path)) {
        (Ok(ours), Ok(named)) => identity(ours) == identity(named),
        _ => false,
    }
}

/// Asks for transparent huge pages under a block of bookkeeping; a wish, which the kernel may not grant.
pub(crate) fn wish_huge_pages(block: std::ptr::NonNull<u8>, bytes: usize) {
    if cfg!(miri) {
        return;
    }
    // SAFETY: the caller owns the block, and the advice does not change what it holds.
    unsafe { libc::madvise(block.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
}

/// The kernel says EFAULT where a touch would be SIGBUS.
fn no_room(error: io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(libc::EFAULT) => io::Error::from_raw_os_error(libc::ENOSPC),
        _ => error,
    }
}

/// Creates the file `path`, which must not exist, for its owner alone.
pub(crate) fn create_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)
}

/// Creates a file of shared memory without a place in the file system.
pub(crate) fn create_memfd(name: &str) -> io::Result<File> {
    let name = CString::new(name)?;
    // SAFETY: the name is a C string; the answer is checked.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made this descriptor and nobody else has it.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// What a file system has.
pub(crate) struct Room {
    /// Bytes free to us; meaningless on hugetlbfs.
    pub(crate) free_bytes: u64,
    /// The size of its pages.
    pub(crate) page_bytes: u64,
}

/// Asks what the file system at `path` has.
pub(crate) fn room(path: &Path) -> io::Result<Room> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: the struct is plain numbers, for which zeroes are a value.
    let mut room: libc::statvfs64 = unsafe { std::mem::zeroed() };
    // SAFETY: a C string and a struct to fill in, both alive for the call.
    retry(|| unsafe { libc::statvfs64(path.as_ptr(), &mut room) })?;
    Ok(Room { free_bytes: room.f_bavail.saturating_mul(room.f_frsize), page_bytes: room.f_bsize })
}

fn mmap(
    address: *mut u8,
    bytes: usize,
    protection: libc::c_int,
    flags: libc::c_int,
    fd: libc::c_int,
) -> io::Result<*mut u8> {
    // SAFETY: `map` is the only caller. It passes either no address, or MAP_FIXED with one inside the range that it
    // reserved a moment before, so no memory in use is replaced.
    let mapped = unsafe { libc::mmap(address.cast(), bytes, protection, flags, fd, 0) };
    if mapped == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(mapped.cast())
}

/// Unmaps a range that `map` mapped, and of which no reference is left.
fn munmap(address: *mut u8, bytes: usize) {
    if bytes > 0 {
        // SAFETY: callers pass ranges of their own mapping that nothing uses (any more): the margins of a fresh one, or
        // all of it at the end, when no buffer is left, since each holds the arena.
        let answer = unsafe { libc::munmap(address.cast(), bytes) };
        assert!(answer == 0, "munmap of the arena: {}", io::Error::last_os_error());
    }
}

/// Calls until no signal interrupts the call.
fn retry(mut call: impl FnMut() -> libc::c_int) -> io::Result<()> {
    loop {
        if call() == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
