//! Block devices on io_uring: one ring and one completion thread, which also submits.

mod bare;
mod queue;
#[allow(unsafe_code, reason = "all that talks to io_uring")]
mod sys;
#[cfg(test)]
mod tests;
mod worker;

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use ebbtide_core::{Batch, BlockDevice, BoxFuture, DeviceCounters, DeviceInfo, Done, Error, Op, Result};
use ebbtide_mem::Region;
use parking_lot::Mutex;

use crate::batch::{self, Sort, Tally};
use crate::direct::{BareDrive, BareResult, BareSpec, DirectDevice, Overdue};
use crate::file::{self, Opened};
use crate::psync::PsyncOptions;
use crate::{Prealloc, preallocate, shape};
use queue::{Command, Queue, Request, Work, name_of};
use sys::{FileId, Ring, RingSetup};
use worker::{Limits, Worker};

/// Settings of a ring. The defaults are what the machine of `docs/adr/0003-raw-io-uring.md` did best with.
#[derive(Clone, Debug)]
pub struct UringOptions {
    /// Kernel operations in flight at most; 1 to 4096, default 128: as many of 64 KiB as
    /// `inflight_bytes_max` lets in.
    pub queue_depth: u32,
    /// Bytes in flight at most (one operation more is let in below it); default 8 MiB. More only makes large operations queue
    /// in the device, which its tail latency shows.
    pub inflight_bytes_max: u64,
    /// Larger operations are split into kernel operations of this size; a multiple of 4096 up to 1 GiB, default 2 MiB: a value
    /// of 1 MiB and the header before it go together.
    pub io_bytes_max: u64,
    /// Operations that wait for the ring at most, default 4096; beyond that `submit` blocks its caller.
    pub queue_ops_max: usize,
    /// An operation without an answer for so long is answered Unavailable; default 30 s.
    pub io_timeout: Duration,
    /// Has a kernel thread poll for submissions, which goes to sleep after so long without any. Off by default: it saves system
    /// calls and costs a core.
    pub sqpoll_idle: Option<Duration>,
    /// Past the page cache; on by default.
    pub direct: bool,
}

impl Default for UringOptions {
    fn default() -> Self {
        UringOptions {
            queue_depth: 128,
            inflight_bytes_max: 8 << 20,
            io_bytes_max: 2 << 20,
            queue_ops_max: 4096,
            io_timeout: Duration::from_secs(30),
            sqpoll_idle: None,
            direct: true,
        }
    }
}

impl UringOptions {
    /// The same bounds for positional I/O.
    pub fn psync(&self) -> PsyncOptions {
        PsyncOptions { queue_ops_max: self.queue_ops_max, direct: self.direct, ..PsyncOptions::default() }
    }

    fn check(&self) -> Result<()> {
        let refuse = |what: &str| Err(Error::invalid(format!("uring options: {what}")));
        if self.queue_depth == 0 || self.queue_depth > 4096 {
            return refuse("queue_depth is not within 1 and 4096");
        }
        if self.io_bytes_max == 0 || !self.io_bytes_max.is_multiple_of(4096) || self.io_bytes_max > 1 << 30 {
            return refuse("io_bytes_max is not a multiple of 4096 up to 1 GiB");
        }
        if self.inflight_bytes_max == 0 || self.queue_ops_max == 0 || self.io_timeout.is_zero() {
            return refuse("inflight_bytes_max, queue_ops_max and io_timeout are more than 0");
        }
        Ok(())
    }
}

/// A file or block device on io_uring.
///
/// Dropping the last device of a ring waits until its operations in flight have ended or timed out, and joins its thread.
pub struct UringDevice {
    ring: Arc<RingHandle>,
    file: FileId,
    info: DeviceInfo,
    /// A block device, which can be told of space that is not needed.
    block: bool,
    tally: Arc<Tally>,
    closed: AtomicBool,
}

/// A ring and its thread, as its devices share them.
struct RingHandle {
    queue: Arc<Queue>,
    options: UringOptions,
    degraded: Arc<Mutex<Vec<String>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl UringDevice {
    /// Opens a file or block device on a ring and a thread of its own.
    ///
    /// Unsupported when this kernel has no io_uring (or one older than 5.11, or forbidden); Invalid when the path cannot be opened
    /// or the options are out of bounds.
    pub fn open(path: &Path, options: &UringOptions) -> Result<UringDevice> {
        options.check()?;
        let opened = file::open(path, options.direct)?;
        UringDevice::on_ring(Arc::new(RingHandle::start(options)?), opened)
    }

    /// Opens a second file or block device on the same ring; see [`DirectDevice::open_beside`].
    pub fn open_beside(&self, path: &Path, create_bytes: Option<u64>) -> Result<UringDevice> {
        if let Some(bytes) = create_bytes {
            preallocate(path, bytes, Prealloc::Written, &mut |_, _| {})?;
        }
        let opened = file::open(path, self.ring.options.direct)?;
        UringDevice::on_ring(Arc::clone(&self.ring), opened)
    }

    fn on_ring(ring: Arc<RingHandle>, opened: Opened) -> Result<UringDevice> {
        let Opened { file, name, block, capacity_bytes, align_bytes, memory_align_bytes, degraded } = opened;
        let tally = Arc::new(Tally::default());
        let (known, counted) = (name_of(Path::new(&name)), Arc::clone(&tally));
        let file = ring.queue.call(|reply| Command::AddFile { file, name: known, tally: counted, reply })?;
        let info = DeviceInfo {
            name,
            kind: "uring",
            capacity_bytes,
            align_bytes,
            memory_align_bytes,
            queue_depth: ring.options.queue_depth,
            degraded,
        };
        Ok(UringDevice { ring, file, info, block, tally, closed: AtomicBool::new(false) })
    }

    fn refusal(&self) -> Option<Error> {
        self.closed
            .load(Ordering::Acquire)
            .then(|| Error::closed(format!("device {} is closed", self.info.name)))
    }
}

impl BlockDevice for UringDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn register(&self, regions: &[Region]) -> Result<()> {
        let regions = regions.to_vec();
        self.ring.queue.call(|reply| Command::Register { regions, reply })
    }

    fn submit(&self, ops: Vec<Op>) -> Batch {
        if ops.is_empty() {
            return Box::pin(std::future::ready(Vec::new()));
        }
        let refusal = self.refusal();
        let (mut tickets, batch) = batch::open(ops.len(), &self.tally);
        let mut requests = Vec::with_capacity(ops.len());
        for op in ops {
            let shape = refusal.clone().map_or_else(|| shape::check(&self.info, &op), Err);
            let (sort, offset, work) = match op {
                Op::Read { offset, into, check } => (Sort::Read, offset, Work::Read { into, check }),
                Op::Write { offset, from } => (Sort::Write, offset, Work::Write { from }),
            };
            let ticket = tickets.draw(sort, *shape.as_ref().unwrap_or(&0));
            match shape {
                Ok(bytes) => requests.push(Request { file: self.file, offset, bytes, work, ticket }),
                Err(error) => {
                    let buf = if let Work::Read { into, .. } = work { Some(into) } else { None };
                    ticket.answer(Done { result: Err(error), buf });
                }
            }
        }
        if !requests.is_empty() {
            self.ring.queue.push(requests);
        }
        batch
    }

    fn flush(&self) -> BoxFuture<'static, Result<()>> {
        if let Some(error) = self.refusal() {
            return batch::ready(Err(error));
        }
        let (ticket, answer) = batch::open_one(Sort::Flush, &self.tally);
        self.ring.queue.push_first(Request {
            file: self.file,
            offset: 0,
            bytes: 1,
            work: Work::Flush,
            ticket,
        });
        answer
    }

    /// Gives space back to a block device. A file keeps its own, so that later writes never fail for want of space.
    fn discard(&self, offset: u64, length: u64) -> BoxFuture<'static, Result<()>> {
        let allowed = shape::check_place(&self.info, "discard", offset, length);
        if let Some(error) = self.refusal().or(allowed.err()) {
            return batch::ready(Err(error));
        }
        if !self.block || length == 0 {
            return batch::ready(Ok(()));
        }
        let (ticket, answer) = batch::open_one(Sort::Discard, &self.tally);
        self.ring.queue.push(vec![Request {
            file: self.file,
            offset,
            bytes: length,
            work: Work::Discard,
            ticket,
        }]);
        answer
    }

    fn counters(&self) -> DeviceCounters {
        self.tally.counters()
    }

    fn degraded(&self) -> Vec<String> {
        let mut degraded = self.info.degraded.clone();
        degraded.extend(self.ring.degraded.lock().iter().cloned());
        degraded
    }

    fn in_flight(&self) -> u64 {
        self.tally.in_flight()
    }
}

impl BareDrive for UringDevice {
    fn drive(&self, spec: BareSpec) -> Result<BareResult> {
        spec.check(&self.info)?;
        if let Some(error) = self.refusal() {
            return Err(error);
        }
        let spec = Box::new(spec);
        self.ring.queue.call(|reply| Command::Drive { file: self.file, spec, reply })
    }
}

impl DirectDevice for UringDevice {
    fn open_beside(&self, path: &Path, create_bytes: Option<u64>) -> Result<Arc<dyn DirectDevice>> {
        Ok(Arc::new(UringDevice::open_beside(self, path, create_bytes)?))
    }

    fn overdue(&self) -> Overdue {
        self.tally.overdue()
    }

    fn close(&self) {
        self.closed.store(true, Ordering::Release);
        // The ring answers every operation within its timeout, so this ends.
        self.tally.wait_idle();
    }
}

impl Drop for UringDevice {
    fn drop(&mut self) {
        self.ring.queue.tell(Command::RemoveFile { file: self.file });
    }
}

impl RingHandle {
    fn start(options: &UringOptions) -> Result<RingHandle> {
        static RINGS: AtomicU32 = AtomicU32::new(0);
        let queue = Arc::new(Queue::new(options.queue_ops_max)?);
        let degraded = Arc::new(Mutex::new(Vec::new()));
        let (reply, answer) = channel();
        let job = {
            let (queue, degraded, options) = (Arc::clone(&queue), Arc::clone(&degraded), options.clone());
            move || {
                // Operations wait for this thread, also while busy threads hold the processors. Refused, all works the same.
                let _ = crate::sched::short_slice();
                run(queue, degraded, &options, &reply);
            }
        };
        let name = format!("ebb-ring-{}", RINGS.fetch_add(1, Ordering::Relaxed));
        let thread = std::thread::Builder::new().name(name).spawn(job);
        let thread = thread.map_err(|error| Error::io("start a ring thread", error))?;
        let made = answer.recv().unwrap_or_else(|_| Err(Error::internal("the ring thread ended at once")));
        made.map(|()| RingHandle {
            queue,
            options: options.clone(),
            degraded,
            thread: Mutex::new(Some(thread)),
        })
    }
}

/// The ring thread. The ring is made here, since it belongs to the thread that makes it.
fn run(
    queue: Arc<Queue>,
    degraded: Arc<Mutex<Vec<String>>>,
    options: &UringOptions,
    reply: &Sender<Result<()>>,
) {
    let setup = RingSetup { depth: options.queue_depth, sqpoll_idle: options.sqpoll_idle };
    let limits = Limits {
        depth: options.queue_depth,
        inflight_bytes_max: options.inflight_bytes_max,
        io_bytes_max: options.io_bytes_max,
        io_timeout: options.io_timeout,
    };
    let ring = Ring::new(&setup, queue.kick_file(), &mut degraded.lock());
    match ring {
        Ok(ring) => {
            let _ = reply.send(Ok(()));
            queue.serve_here();
            Worker::new(ring, queue, limits, degraded).run();
        }
        Err(error) => {
            let message = format!("make an io_uring: {error}");
            let _ = reply.send(Err(Error::unsupported(message).with_source(error)));
        }
    }
}

impl Drop for RingHandle {
    fn drop(&mut self) {
        self.queue.close();
        let Some(thread) = self.thread.lock().take() else { return };
        // The last owner may be a callback on the ring thread itself, which cannot wait for its own end.
        if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
            tracing::error!("a ring thread panicked");
        }
    }
}

impl fmt::Debug for UringDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UringDevice({}, {} bytes)", self.info.name, self.info.capacity_bytes)
    }
}
