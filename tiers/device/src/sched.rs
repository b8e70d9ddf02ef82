//! A short time slice for threads that do little at a time and hold others up when they wait for a processor.

use std::io;

/// The shortest slice that the kernel grants (kernel/sched/syscalls.c: 0.1 to 100 ms).
const SLICE_NS: u64 = 100_000;

/// `struct sched_attr` as of its first version, `man 2 sched_setattr`.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// Asks for a short slice for the calling thread: its share stays, but it runs sooner after it wakes while busy threads hold
/// the processors.
///
/// Needs no privilege. Kernels before 6.12 take it and do nothing; an error means that a sandbox refuses it. Either way all
/// works, only later.
pub fn short_slice() -> io::Result<()> {
    let size = size_of::<Attributes>() as u32; // 48
    let mut attributes = Attributes { size, ..Attributes::default() };
    let at = &raw mut attributes;
    // SAFETY: the kernel writes at most `size` bytes there; 0 is the calling thread.
    let got = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, at, size, 0) };
    if got != 0 {
        return Err(io::Error::last_os_error());
    }
    if attributes.policy != libc::SCHED_OTHER as u32 {
        // Somebody gave this process a policy of its own.
        return Ok(());
    }
    (attributes.size, attributes.runtime) = (size, SLICE_NS);
    // SAFETY: the kernel reads `size` bytes there.
    match unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_keeps_its_policy_and_its_share() {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // SAFETY: neither touches memory of ours; 0 is the calling thread.
                let facts =
                    || unsafe { (libc::sched_getscheduler(0), libc::getpriority(libc::PRIO_PROCESS, 0)) };
                let before = facts();
                // A sandbox may refuse it: then too, nothing changes.
                let _ = short_slice();
                assert_eq!(facts(), before);
            });
        });
    }
}
