//! Block devices of this machine: on io_uring, on threads with positional I/O, and simulated.
//!
//! What it is: implementations of [`BlockDevice`](ebbtide_core::BlockDevice), and the suite that each of them passes
//! ([`conformance`]). What it is not: it knows no segments, keys or formats; what stands where is the log tier's affair.
//! The decision that shaped it: one ring and one thread a device group, and only that thread talks to the kernel. It fills
//! the kernel's queue before it verifies what came, so a checksum costs processor time and no device time; and it alone
//! frees memory, so that nothing a caller drops is ever freed under an operation.

#![deny(unsafe_code)]

mod batch;
mod clock;
pub mod conformance;
mod direct;
mod file;
mod prealloc;
mod psync;
#[allow(unsafe_code, reason = "calls of the operating system that std does not have")]
mod sched;
mod shape;
mod sim;
#[allow(unsafe_code, reason = "calls of the operating system that std does not have")]
mod sys;
mod uring;
#[cfg(feature = "uring-tokio")]
mod uring_tokio;

pub use direct::{BareDrive, BareResult, BareSpec, DirectDevice, Overdue, open_best};
pub use prealloc::{Prealloc, preallocate};
pub use psync::{PsyncDevice, PsyncOptions};
pub use sched::short_slice;
pub use sim::{FaultCounts, Faults, SimDevice, SimDisk, SimOptions};
pub use uring::{UringDevice, UringOptions};
#[cfg(feature = "uring-tokio")]
pub use uring_tokio::UringTokioDevice;

use std::panic::{AssertUnwindSafe, catch_unwind};

use ebbtide_core::{Check, Error, Result};
use ebbtide_mem::BufMut;

/// Runs a check; one that panics fails its operation, not the device.
fn run_check(check: Check, buf: &BufMut) -> Result<()> {
    catch_unwind(AssertUnwindSafe(|| check(buf))).unwrap_or_else(|_| Err(Error::internal("a check panicked")))
}
