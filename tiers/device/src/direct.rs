//! What the devices of this machine have beyond [`BlockDevice`]: a second file beside the first, and a bare run.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ebbtide_core::{BlockDevice, DeviceInfo, Error, Result};
use ebbtide_mem::BufMut;

use crate::psync::PsyncDevice;
use crate::uring::{UringDevice, UringOptions};

/// A device on a file or block device of this machine.
pub trait DirectDevice: BlockDevice + BareDrive {
    /// Opens a second file or block device beside this one, on the same ring or the same threads and with the memory
    /// that is registered there.
    ///
    /// With `create_bytes` the file is first made at least that long, of written extents (see
    /// [`preallocate`](crate::preallocate)). Invalid when it cannot be opened; Full when there is no room.
    fn open_beside(&self, path: &Path, create_bytes: Option<u64>) -> Result<Arc<dyn DirectDevice>>;

    /// What became of operations that the kernel did not answer in time.
    fn overdue(&self) -> Overdue;

    /// Refuses new operations with Closed from here on, and waits until those in flight have ended or timed out. Idempotent.
    fn close(&self);
}

/// Operations that the kernel did not answer within the timeout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overdue {
    /// How many were answered Unavailable for that reason since the device was opened.
    pub timeouts: u64,
    /// How many of them still lie in the kernel, and so keep their memory.
    pub quarantined: u64,
}

/// A closed loop of equal operations in its tightest form: no batches, no closures, no wake-ups.
///
/// What a store on the same device is compared with. Operation i is at `offsets[i % offsets.len()]`.
#[derive(Debug)]
pub struct BareSpec {
    /// Writes, not reads.
    pub write: bool,
    /// Length of each operation in bytes; a multiple of the device's alignment.
    pub io_bytes: u32,
    /// Operations in flight; at most the device's `queue_depth`.
    pub depth: u32,
    /// Where, in order and from the start again; aligned and within the device.
    pub offsets: Vec<u64>,
    /// No operation starts once so many bytes were started.
    pub bytes_max: u64,
    /// No operation starts after this time.
    pub time_max: Duration,
    /// Starts a flush each time so many bytes were moved; 0 for none.
    pub flush_every_bytes: u64,
    /// Where the first flush starts, when earlier than after `flush_every_bytes`; 0 for there.
    pub flush_first_bytes: u64,
    /// At least `depth` buffers of `io_bytes`, which come back in the result. They are used in turn: the more there are, the
    /// colder the memory that is moved.
    pub buffers: Vec<BufMut>,
}

/// What a bare run did.
#[derive(Debug)]
pub struct BareResult {
    /// Bytes moved.
    pub bytes: u64,
    /// Operations done.
    pub operations: u64,
    /// Flushes done.
    pub flushes: u64,
    /// From the first start to the last end, flushes included.
    pub seconds: f64,
    /// Processor time of the threads that drove it (kernel workers are not in it).
    pub cpu_seconds: f64,
    /// The buffers of the [`BareSpec`].
    pub buffers: Vec<BufMut>,
}

/// A device that can be driven bare, for benches.
pub trait BareDrive: Send + Sync {
    /// Runs `spec` and returns when its last operation has ended; blocks the caller.
    ///
    /// Invalid when the specification does not fit the device, Full when other operations are in flight, Unavailable when an
    /// operation fails.
    fn drive(&self, spec: BareSpec) -> Result<BareResult>;
}

impl BareSpec {
    /// The bytes after which the first flush starts, for a run that flushes.
    pub(crate) fn first_flush(&self) -> u64 {
        match self.flush_first_bytes {
            0 => self.flush_every_bytes,
            first => first,
        }
    }

    /// Refuses a specification that does not fit a device.
    pub(crate) fn check(&self, info: &DeviceInfo) -> Result<()> {
        let refuse = |why: String| Err(Error::invalid(format!("drive {}: {why}", info.name)));
        if self.depth == 0 || self.depth > info.queue_depth || self.buffers.len() < self.depth as usize {
            let (depth, buffers, most) = (self.depth, self.buffers.len(), info.queue_depth);
            return refuse(format!("depth {depth} with {buffers} buffers, at most {most}"));
        }
        if self.io_bytes == 0 || !self.io_bytes.is_multiple_of(info.align_bytes) {
            return refuse(format!("{} bytes, need a multiple of {}", self.io_bytes, info.align_bytes));
        }
        if let Some(buf) = self.buffers.iter().find(|buf| buf.len() < self.io_bytes as usize) {
            return refuse(format!("a buffer of {} bytes, need {}", buf.len(), self.io_bytes));
        }
        if self.offsets.is_empty() {
            return refuse("no offsets".to_owned());
        }
        self.offsets.iter().try_for_each(|offset| {
            crate::shape::check_place(info, "drive", *offset, u64::from(self.io_bytes))
        })
    }
}

/// Opens `path` on io_uring, or on threads with positional I/O where this kernel has no io_uring; the latter is warned of
/// and shows in `degraded()`.
///
/// Invalid when the path cannot be opened. The file must exist and have its size: see [`preallocate`](crate::preallocate).
pub fn open_best(path: &Path, options: &UringOptions) -> Result<Arc<dyn DirectDevice>> {
    let error = match UringDevice::open(path, options) {
        Ok(device) => return Ok(Arc::new(device)),
        Err(error) if error.kind() == ebbtide_core::ErrorKind::Unsupported => error,
        Err(error) => return Err(error),
    };
    tracing::warn!(device = %path.display(), %error, "no io_uring: positional I/O on threads instead");
    let mut psync = options.psync();
    psync.degraded.push(format!("io_uring: {error}"));
    Ok(Arc::new(PsyncDevice::open(path, &psync)?))
}
