//! The ring itself: all unsafe code that talks to io_uring, behind functions that are safe to call in any order.
//!
//! The one rule that makes it sound: memory is given to [`Ring::hold`], and comes back from [`Ring::release`] only when
//! no kernel operation on it is outstanding. What is still outstanding when the ring is dropped is leaked, never freed.
//! The ring lives and dies on one thread (it holds raw pointers, so it is not `Send`).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use ebbtide_mem::{Buf, BufMut, RawSpan, Region};
use io_uring::squeue::{Entry, Flags};
use io_uring::types::{CancelBuilder, Fd, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{IoUring, Probe, opcode};

/// Most spans in one kernel operation (the kernel's `UIO_MAXIOV`).
const IOV_MAX: usize = 1024;
/// Room in the table of registered files.
pub(super) const FILES_MAX: u32 = 64;
/// `user_data` of the read that waits for a kick, and of cancellations.
const WAKE: u64 = u64::MAX;
const CANCEL: u64 = u64::MAX - 1;
/// Room in the submission queue beside the operations: the wake-up read and a cancellation.
const EXTRA_ENTRIES: u32 = 2;
/// Operations beyond the depth, so that a flush beside a full queue takes nobody's place.
const EXTRA_PIECES: u32 = 2;

/// Memory in the keeping of the ring.
pub(super) enum Memory {
    /// A buffer that may be read into and written from.
    Unique(BufMut),
    /// Buffers that may only be written from.
    Shared(Vec<Buf>),
    /// An operation without memory.
    Nothing,
}

/// Which memory: valid from `hold` to `release`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeldId(u32);

/// Which file: valid from `add_file` to `remove_file`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileId(u32);

impl HeldId {
    pub(super) fn index(self) -> usize {
        self.0 as usize
    }
}

impl FileId {
    pub(super) fn index(self) -> usize {
        self.0 as usize
    }
}

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Read,
    Write,
}

/// One kernel operation that is to start: the bytes `at..at + bytes_max` of the held memory, to or from `offset + at`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Start {
    pub(super) way: Way,
    pub(super) held: HeldId,
    pub(super) file: FileId,
    pub(super) offset: u64,
    pub(super) at: u64,
    pub(super) bytes_max: u64,
}

/// One kernel operation that has ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reaped {
    pub(super) held: HeldId,
    pub(super) at: u64,
    pub(super) bytes: u64,
    /// Bytes moved, or a negative errno.
    pub(super) result: i32,
}

struct Held {
    memory: Memory,
    spans: Vec<RawSpan>,
    in_kernel: u32,
    taken: bool,
}

/// A kernel operation in flight. The iovecs stay in place until its completion was seen.
struct Piece {
    held: HeldId,
    at: u64,
    bytes: u64,
    iovecs: Vec<libc::iovec>,
    busy: bool,
}

/// How a ring is made.
#[derive(Clone, Debug)]
pub(super) struct RingSetup {
    /// Most kernel operations in flight.
    pub(super) depth: u32,
    /// How long a polling kernel thread stays awake; `None` for a ring without one.
    pub(super) sqpoll_idle: Option<Duration>,
}

pub(super) struct Ring {
    ring: IoUring,
    held: Vec<Held>,
    held_free: Vec<u32>,
    pieces: Box<[Piece]>,
    pieces_free: Vec<u32>,
    files: Vec<Option<File>>,
    files_registered: bool,
    /// What is registered, by index.
    regions: Vec<(usize, u64)>,
    vectored_fixed: bool,
    kick: Arc<File>,
    /// Where the kernel puts what it reads from `kick`; leaked while `armed` at the end.
    kick_count: Box<[u8; 8]>,
    armed: bool,
    in_kernel: u32,
}

impl Ring {
    /// Makes a ring with every feature that the kernel has; those that it has not are told to `degraded`.
    /// `kick` is an eventfd: a write to it ends a wait.
    pub(super) fn new(setup: &RingSetup, kick: Arc<File>, degraded: &mut Vec<String>) -> io::Result<Ring> {
        let pieces = setup.depth + EXTRA_PIECES;
        let entries = pieces + EXTRA_ENTRIES;
        let ring = build(entries, setup.sqpoll_idle, degraded)?;
        if !ring.params().is_feature_ext_arg() {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "io_uring is older than Linux 5.11"));
        }
        let mut probe = Probe::new();
        let probed = ring.submitter().register_probe(&mut probe).is_ok();
        let vectored_fixed = probed
            && probe.is_supported(opcode::ReadvFixed::CODE)
            && probe.is_supported(opcode::WritevFixed::CODE);
        if !vectored_fixed {
            degraded.push("vectored operations on registered buffers: need Linux 6.15".to_owned());
        }
        let files_registered = match ring.submitter().register_files_sparse(FILES_MAX) {
            Ok(()) => true,
            Err(error) => {
                degraded.push(format!("registered files: {error}"));
                false
            }
        };
        let piece = || Piece { held: HeldId(0), at: 0, bytes: 0, iovecs: Vec::new(), busy: false };
        Ok(Ring {
            ring,
            held: Vec::new(),
            held_free: Vec::new(),
            pieces: std::iter::repeat_with(piece).take(pieces as usize).collect(),
            pieces_free: (0..pieces).rev().collect(),
            files: Vec::new(),
            files_registered,
            regions: Vec::new(),
            vectored_fixed,
            kick,
            kick_count: Box::new([0; 8]),
            armed: false,
            in_kernel: 0,
        })
    }

    /// Takes `file` into the table.
    pub(super) fn add_file(&mut self, file: File) -> io::Result<FileId> {
        let index = self.files.iter().position(Option::is_none).unwrap_or(self.files.len());
        if index as u32 >= FILES_MAX {
            return Err(io::Error::other(format!("a ring has at most {FILES_MAX} files")));
        }
        if self.files_registered {
            self.ring.submitter().register_files_update(index as u32, &[file.as_raw_fd()])?;
        }
        if index == self.files.len() {
            self.files.push(None);
        }
        self.files[index] = Some(file);
        Ok(FileId(index as u32))
    }

    /// Closes a file. Operations that the kernel has begun keep their own hold on it.
    pub(super) fn remove_file(&mut self, id: FileId) {
        if self.files_registered {
            // The kernel's table keeps the file open otherwise; there is nothing to do when even this fails.
            let _ = self.ring.submitter().register_files_update(id.0, &[-1]);
        }
        if let Some(file) = self.files.get_mut(id.index()) {
            *file = None;
        }
    }

    /// Registers `regions` as fixed buffers, by their indexes. Slow: the kernel pins every page.
    pub(super) fn register_regions(&mut self, regions: &[Region]) -> io::Result<()> {
        let known: Vec<(usize, u64)> =
            regions.iter().map(|region| (region.address as usize, region.bytes)).collect();
        if known == self.regions {
            return Ok(());
        }
        if regions.iter().enumerate().any(|(place, region)| region.index as usize != place) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "regions are not in the order of their indexes",
            ));
        }
        let iovecs: Vec<libc::iovec> = regions
            .iter()
            .map(|region| libc::iovec { iov_base: region.address.cast(), iov_len: region.bytes as usize })
            .collect();
        if !self.regions.is_empty() {
            self.ring.submitter().unregister_buffers()?;
            self.regions.clear();
        }
        // SAFETY: the kernel reads the iovecs during the call and checks that the ranges are mapped. It pins the pages
        // themselves, so an arena that is unmapped later takes nothing away under an operation.
        unsafe { self.ring.submitter().register_buffers(&iovecs)? };
        self.regions = known;
        Ok(())
    }

    /// Takes `memory` into keeping.
    pub(super) fn hold(&mut self, memory: Memory) -> HeldId {
        let id = self.held_free.pop().unwrap_or_else(|| {
            self.held.push(Held { memory: Memory::Nothing, spans: Vec::new(), in_kernel: 0, taken: false });
            (self.held.len() - 1) as u32
        });
        let held = &mut self.held[id as usize];
        held.spans.clear();
        match &memory {
            Memory::Unique(buf) => add_spans(&mut held.spans, buf.raw_spans(), &self.regions),
            Memory::Shared(bufs) => {
                bufs.iter().for_each(|buf| add_spans(&mut held.spans, buf.raw_spans(), &self.regions));
            }
            Memory::Nothing => {}
        }
        held.memory = memory;
        held.taken = true;
        HeldId(id)
    }

    /// Gives memory back, or `None` while the kernel may still use it (and for an id that is not valid).
    pub(super) fn release(&mut self, id: HeldId) -> Option<Memory> {
        let held = self.held.get_mut(id.index()).filter(|held| held.taken && held.in_kernel == 0)?;
        held.taken = false;
        self.held_free.push(id.0);
        Some(std::mem::replace(&mut held.memory, Memory::Nothing))
    }

    /// Prepares one kernel operation and returns how many bytes it takes: fewer than `bytes_max` where the memory changes
    /// from one registered region to another or has too many spans. `None` when there is no room for it.
    pub(super) fn start(&mut self, start: Start) -> Option<u64> {
        let held = self.held.get(start.held.index())?;
        let writable = matches!(held.memory, Memory::Unique(_));
        assert!(held.taken && (start.way == Way::Write || writable), "shared memory is never read into");
        let index = *self.pieces_free.last()?;
        let piece = &mut self.pieces[index as usize];
        let region = gather(&held.spans, start.at, start.bytes_max, &mut piece.iovecs);
        let bytes: usize = piece.iovecs.iter().map(|part| part.iov_len).sum();
        assert!(bytes > 0, "an operation moves at least one byte");
        let vectored = piece.iovecs.len() > 1;
        let region = region.filter(|_| !vectored || self.vectored_fixed);
        let entry = entry(start.way, self.fd(start.file), &self.pieces[index as usize].iovecs, region);
        let entry = entry(start.offset + start.at);
        self.launch(index, entry, start.file, start.held, (start.at, bytes as u64)).then_some(bytes as u64)
    }

    /// Prepares an fdatasync; false when there is no room for it.
    pub(super) fn start_flush(&mut self, held: HeldId, file: FileId) -> bool {
        let entry = opcode::Fsync::new(self.fd(file)).flags(FsyncFlags::DATASYNC).build();
        self.pieces_free.last().copied().is_some_and(|index| self.launch(index, entry, file, held, (0, 0)))
    }

    /// Prepares giving back the space of a range of a block device; false when there is no room for it.
    pub(super) fn start_discard(&mut self, held: HeldId, file: FileId, offset: u64, bytes: u64) -> bool {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let entry = opcode::Fallocate::new(self.fd(file), bytes).offset(offset).mode(mode).build();
        self.pieces_free.last().copied().is_some_and(|index| self.launch(index, entry, file, held, (0, 0)))
    }

    /// The next kernel operation that has ended.
    pub(super) fn reap(&mut self) -> Option<Reaped> {
        loop {
            let entry = self.ring.completion().next()?;
            match entry.user_data() {
                WAKE => self.armed = false,
                CANCEL => {}
                index => {
                    let piece = &mut self.pieces[index as usize];
                    assert!(piece.busy, "a completion belongs to an operation in flight");
                    piece.busy = false;
                    self.pieces_free.push(index as u32);
                    self.held[piece.held.index()].in_kernel -= 1;
                    self.in_kernel -= 1;
                    let Piece { held, at, bytes, .. } = *piece;
                    return Some(Reaped { held, at, bytes, result: entry.result() });
                }
            }
        }
    }

    /// Tells the kernel what was prepared and lets it post what has ended, without waiting. Costs no system call when
    /// there is nothing of either.
    pub(super) fn submit(&mut self) -> io::Result<()> {
        let queue = self.ring.submission();
        if queue.is_empty() && !queue.taskrun() && !queue.cq_overflow() {
            return Ok(());
        }
        drop(queue);
        settle(self.ring.submit())
    }

    /// As `submit`, and waits until an operation has ended, somebody kicked, or `time_max` is over.
    pub(super) fn submit_and_wait(&mut self, time_max: Option<Duration>) -> io::Result<()> {
        self.arm();
        let time = time_max.map(Timespec::from);
        let mut arguments = SubmitArgs::new();
        if let Some(time) = &time {
            arguments = arguments.timespec(time);
        }
        settle(self.ring.submitter().submit_with_args(1, &arguments))
    }

    /// Asks the kernel to end what can be ended.
    pub(super) fn cancel_all(&mut self) {
        let entry = opcode::AsyncCancel2::new(CancelBuilder::any()).build().user_data(CANCEL);
        // SAFETY: the entry names no memory.
        let _ = unsafe { self.ring.submission().push(&entry) };
    }

    /// Kernel operations in flight.
    pub(super) fn in_kernel(&self) -> u32 {
        self.in_kernel
    }

    fn fd(&self, file: FileId) -> Fd {
        if self.files_registered {
            return Fd(file.0 as i32);
        }
        Fd(self.files.get(file.index()).and_then(Option::as_ref).map_or(-1, |file| file.as_raw_fd()))
    }

    fn launch(&mut self, index: u32, entry: Entry, file: FileId, held: HeldId, range: (u64, u64)) -> bool {
        let flags = if self.files_registered { Flags::FIXED_FILE } else { Flags::empty() };
        let entry = entry.flags(flags).user_data(u64::from(index));
        debug_assert!(file.0 < FILES_MAX);
        // SAFETY: what the entry names stays until its completion was seen: the memory because `release` refuses while
        // `in_kernel` is not zero and `drop` leaks it, the iovecs because the piece is busy, the file because the kernel
        // takes its own reference or answers EBADF. `start` made sure that only unique memory is read into.
        if unsafe { self.ring.submission().push(&entry) }.is_err() {
            return false;
        }
        self.pieces_free.pop();
        let piece = &mut self.pieces[index as usize];
        (piece.held, piece.at, piece.bytes, piece.busy) = (held, range.0, range.1, true);
        self.held[held.index()].in_kernel += 1;
        self.in_kernel += 1;
        true
    }

    /// Lets a write to `kick` end the next wait.
    fn arm(&mut self) {
        if self.armed {
            return;
        }
        let target = self.kick_count.as_mut_ptr();
        let entry = opcode::Read::new(Fd(self.kick.as_raw_fd()), target, 8).build().user_data(WAKE);
        // SAFETY: `kick_count` is used for this alone, is not moved (a box), and is leaked when the ring is dropped
        // while `armed`; `kick` is open as long as the ring.
        self.armed = unsafe { self.ring.submission().push(&entry) }.is_ok();
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if self.armed {
            std::mem::forget(std::mem::take(&mut self.kick_count));
        }
        if self.in_kernel > 0 {
            // The kernel may go on using it after the ring's descriptor is closed; a leak is the only safe end.
            std::mem::forget(std::mem::take(&mut self.held));
            std::mem::forget(std::mem::take(&mut self.pieces));
        }
    }
}

/// Makes the ring with the best flags that the kernel takes.
fn build(entries: u32, sqpoll_idle: Option<Duration>, degraded: &mut Vec<String>) -> io::Result<IoUring> {
    if let Some(idle) = sqpoll_idle {
        let idle = u32::try_from(idle.as_millis()).unwrap_or(u32::MAX);
        match IoUring::builder().setup_clamp().setup_single_issuer().setup_sqpoll(idle).build(entries) {
            Ok(ring) => return Ok(ring),
            Err(error) => degraded.push(format!("a polling kernel thread (SQPOLL): {error}")),
        }
    }
    let mut best = IoUring::builder();
    best.setup_clamp().setup_single_issuer().setup_defer_taskrun().setup_coop_taskrun().setup_taskrun_flag();
    let error = match best.build(entries) {
        Ok(ring) => return Ok(ring),
        Err(error) => error,
    };
    let mut good = IoUring::builder();
    if let Ok(ring) = good.setup_clamp().setup_coop_taskrun().setup_taskrun_flag().build(entries) {
        degraded.push(format!("completions on our own time (DEFER_TASKRUN): {error}"));
        return Ok(ring);
    }
    let ring = IoUring::builder().setup_clamp().build(entries)?;
    degraded.push(format!("completions without interrupting us (COOP_TASKRUN): {error}"));
    Ok(ring)
}

/// Adds `from` to `spans`, joining neighbours, with only those regions that are registered.
fn add_spans(spans: &mut Vec<RawSpan>, from: &[RawSpan], regions: &[(usize, u64)]) {
    for span in from {
        let region = span.region.filter(|index| {
            let start = span.address as usize;
            regions.get(*index as usize).is_some_and(|(address, bytes)| {
                start >= *address && start - address + span.bytes as usize <= *bytes as usize
            })
        });
        if let Some(last) = spans.last_mut()
            && last.region == region
            && last.address.wrapping_add(last.bytes as usize) == span.address
            && let Some(bytes) = last.bytes.checked_add(span.bytes)
        {
            last.bytes = bytes;
            continue;
        }
        spans.push(RawSpan { region, ..*span });
    }
}

/// Fills `iovecs` with the bytes from `at` on, at most `bytes_max`, as long as they lie in the same region, which is
/// returned.
fn gather(spans: &[RawSpan], at: u64, bytes_max: u64, iovecs: &mut Vec<libc::iovec>) -> Option<u16> {
    iovecs.clear();
    let (mut skip, mut left) = (at, bytes_max);
    let mut region = None;
    for span in spans {
        if skip >= u64::from(span.bytes) {
            skip -= u64::from(span.bytes);
            continue;
        }
        if left == 0 || iovecs.len() == IOV_MAX || (!iovecs.is_empty() && span.region != region) {
            break;
        }
        region = span.region;
        let bytes = left.min(u64::from(span.bytes) - skip);
        let address = span.address.wrapping_add(skip as usize);
        iovecs.push(libc::iovec { iov_base: address.cast(), iov_len: bytes as usize });
        left -= bytes;
        skip = 0;
    }
    region
}

/// The entry for one read or write at an offset.
fn entry(way: Way, fd: Fd, iovecs: &[libc::iovec], region: Option<u16>) -> impl FnOnce(u64) -> Entry {
    let (list, count) = (iovecs.as_ptr(), iovecs.len() as u32);
    let (address, bytes) = (iovecs[0].iov_base.cast::<u8>(), iovecs[0].iov_len as u32);
    move |offset| match (way, count, region) {
        (Way::Read, 1, Some(index)) => {
            opcode::ReadFixed::new(fd, address, bytes, index).offset(offset).build()
        }
        (Way::Read, 1, None) => opcode::Read::new(fd, address, bytes).offset(offset).build(),
        (Way::Read, _, Some(index)) => opcode::ReadvFixed::new(fd, list, count, index).offset(offset).build(),
        (Way::Read, _, None) => opcode::Readv::new(fd, list, count).offset(offset).build(),
        (Way::Write, 1, Some(index)) => {
            opcode::WriteFixed::new(fd, address, bytes, index).offset(offset).build()
        }
        (Way::Write, 1, None) => opcode::Write::new(fd, address, bytes).offset(offset).build(),
        (Way::Write, _, Some(index)) => {
            opcode::WritevFixed::new(fd, list, count, index).offset(offset).build()
        }
        (Way::Write, _, None) => opcode::Writev::new(fd, list, count).offset(offset).build(),
    }
}

/// A wait that ended without an event is no error.
fn settle(result: io::Result<usize>) -> io::Result<()> {
    match result {
        Ok(_) => Ok(()),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR)) => Ok(()),
        Err(error) => Err(error),
    }
}
