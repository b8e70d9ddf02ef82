//! The few calls of the operating system that std does not have, each behind a safe function.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// Memory and offset alignment for direct I/O on `file`, as the kernel tells (6.1 and later); `(0, 0)` when the file
/// system refuses it.
pub(crate) fn direct_alignment(file: &File) -> Option<(u32, u32)> {
    const STATX_DIOALIGN: u32 = 0x2000;
    // SAFETY: all-zero bytes are a valid `statx`, a struct of integers.
    let mut status: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the path is a constant C string, the descriptor is open while `file` is borrowed, and `status` outlives
    // the call.
    let answer = unsafe {
        libc::statx(file.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH, STATX_DIOALIGN, &raw mut status)
    };
    (answer == 0 && status.stx_mask & STATX_DIOALIGN != 0)
        .then_some((status.stx_dio_mem_align, status.stx_dio_offset_align))
}

/// `fallocate(2)`: `mode` is 0 or `FALLOC_FL_*`.
pub(crate) fn fallocate(file: &File, mode: i32, offset: u64, bytes: u64) -> io::Result<()> {
    let too_large = |_| io::Error::from_raw_os_error(libc::EFBIG);
    let offset = i64::try_from(offset).map_err(too_large)?;
    let bytes = i64::try_from(bytes).map_err(too_large)?;
    loop {
        // SAFETY: the descriptor is open while `file` is borrowed; the call takes no memory of ours.
        if unsafe { libc::fallocate64(file.as_raw_fd(), mode, offset, bytes) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// A new eventfd at zero, as a file: reads block until it was written to.
pub(crate) fn eventfd() -> io::Result<File> {
    // SAFETY: the call takes no memory of ours.
    let descriptor = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and belongs to nobody else.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(descriptor) }))
}

/// The processor time that the calling thread has used.
pub(crate) fn thread_cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` outlives the call; the clock exists on every Linux.
    let answer = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    if answer != 0 {
        return Duration::ZERO;
    }
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}
