//! Block devices on plain positional reads and writes, each on one of a few threads. Works everywhere; costs a system call and
//! two thread switches an operation.

use std::collections::VecDeque;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ebbtide_core::{
    Batch, BlockDevice, BoxFuture, Check, DeviceCounters, DeviceInfo, Done, Error, Op, Result,
};
use ebbtide_mem::{Buf, BufMut, Region};
use parking_lot::{Condvar, Mutex};

use crate::batch::{self, Sort, Tally, Ticket};
use crate::clock::now;
use crate::direct::{BareDrive, BareResult, BareSpec, DirectDevice, Overdue};
use crate::file::{self, Opened};
use crate::{Prealloc, preallocate, run_check, shape, sys};

/// Settings of positional I/O.
#[derive(Clone, Debug)]
pub struct PsyncOptions {
    /// Threads, and so operations in flight; 1 to 256, default 8.
    pub threads: u32,
    /// Operations that wait for a thread at most, default 4096; beyond that `submit` blocks its caller.
    pub queue_ops_max: usize,
    /// Past the page cache; on by default.
    pub direct: bool,
    /// What is known to be missing before the device is opened; shows in `degraded()`.
    pub degraded: Vec<String>,
}

impl Default for PsyncOptions {
    fn default() -> Self {
        PsyncOptions { threads: 8, queue_ops_max: 4096, direct: true, degraded: Vec::new() }
    }
}

/// A file or block device on positional reads and writes.
///
/// An operation that the kernel does not answer is not timed out: its thread waits with it. Dropping the last device of a pool
/// waits for what is queued and joins the threads.
pub struct PsyncDevice {
    pool: Arc<Pool>,
    target: Arc<Target>,
    info: DeviceInfo,
    block: bool,
    tally: Arc<Tally>,
    closed: AtomicBool,
}

struct Target {
    file: File,
    name: String,
}

struct Job {
    target: Arc<Target>,
    offset: u64,
    bytes: u64,
    work: Work,
    ticket: Ticket,
}

enum Work {
    Read { into: BufMut, check: Option<Check> },
    Write { from: Vec<Buf> },
    Flush,
    Discard,
}

struct Pool {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    options: PsyncOptions,
}

struct Shared {
    jobs_max: usize,
    state: Mutex<State>,
    work: Condvar,
    room: Condvar,
}

struct State {
    jobs: VecDeque<Job>,
    closed: bool,
}

impl PsyncDevice {
    /// Opens a file or block device on threads of its own. Invalid when the path cannot be opened or the options are out of bounds.
    pub fn open(path: &Path, options: &PsyncOptions) -> Result<PsyncDevice> {
        if options.threads == 0 || options.threads > 256 || options.queue_ops_max == 0 {
            return Err(Error::invalid("psync options: threads within 1 and 256, queue_ops_max more than 0"));
        }
        let opened = file::open(path, options.direct)?;
        Ok(PsyncDevice::on_pool(Arc::new(Pool::start(options)?), opened))
    }

    fn on_pool(pool: Arc<Pool>, opened: Opened) -> PsyncDevice {
        let Opened { file, name, block, capacity_bytes, align_bytes, memory_align_bytes, degraded } = opened;
        let mut all = pool.options.degraded.clone();
        all.extend(degraded);
        all.push("registered memory and timeouts: positional I/O has none".to_owned());
        let info = DeviceInfo {
            name: name.clone(),
            kind: "psync",
            capacity_bytes,
            align_bytes,
            memory_align_bytes,
            queue_depth: pool.options.threads,
            degraded: all,
        };
        let target = Arc::new(Target { file, name });
        PsyncDevice { pool, target, info, block, tally: Arc::default(), closed: AtomicBool::new(false) }
    }

    fn refusal(&self) -> Option<Error> {
        self.closed
            .load(Ordering::Acquire)
            .then(|| Error::closed(format!("device {} is closed", self.info.name)))
    }

    fn job(&self, offset: u64, bytes: u64, work: Work, ticket: Ticket) -> Job {
        Job { target: Arc::clone(&self.target), offset, bytes, work, ticket }
    }
}

impl BlockDevice for PsyncDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn register(&self, _regions: &[Region]) -> Result<()> {
        Ok(())
    }

    fn submit(&self, ops: Vec<Op>) -> Batch {
        if ops.is_empty() {
            return Box::pin(std::future::ready(Vec::new()));
        }
        let refusal = self.refusal();
        let (mut tickets, batch) = batch::open(ops.len(), &self.tally);
        for op in ops {
            let shape = refusal.clone().map_or_else(|| shape::check(&self.info, &op), Err);
            let (sort, offset, work) = match op {
                Op::Read { offset, into, check } => (Sort::Read, offset, Work::Read { into, check }),
                Op::Write { offset, from } => (Sort::Write, offset, Work::Write { from }),
            };
            let ticket = tickets.draw(sort, *shape.as_ref().unwrap_or(&0));
            match shape {
                Ok(bytes) => self.pool.shared.push(self.job(offset, bytes, work, ticket)),
                Err(error) => ticket.answer(Done { result: Err(error), buf: work.into_buf() }),
            }
        }
        batch
    }

    fn flush(&self) -> BoxFuture<'static, Result<()>> {
        if let Some(error) = self.refusal() {
            return batch::ready(Err(error));
        }
        let (ticket, answer) = batch::open_one(Sort::Flush, &self.tally);
        self.pool.shared.push(self.job(0, 0, Work::Flush, ticket));
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
        self.pool.shared.push(self.job(offset, length, Work::Discard, ticket));
        answer
    }

    fn counters(&self) -> DeviceCounters {
        self.tally.counters()
    }

    fn in_flight(&self) -> u64 {
        self.tally.in_flight()
    }
}

impl DirectDevice for PsyncDevice {
    fn open_beside(&self, path: &Path, create_bytes: Option<u64>) -> Result<Arc<dyn DirectDevice>> {
        if let Some(bytes) = create_bytes {
            preallocate(path, bytes, Prealloc::Written, &mut |_, _| {})?;
        }
        let opened = file::open(path, self.pool.options.direct)?;
        Ok(Arc::new(PsyncDevice::on_pool(Arc::clone(&self.pool), opened)))
    }

    fn overdue(&self) -> Overdue {
        Overdue::default()
    }

    fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.tally.wait_idle();
    }
}

impl BareDrive for PsyncDevice {
    fn drive(&self, mut spec: BareSpec) -> Result<BareResult> {
        spec.check(&self.info)?;
        if let Some(error) = self.refusal() {
            return Err(error);
        }
        if self.in_flight() > 0 {
            return Err(Error::full("a bare run needs a device without operations in flight"));
        }
        let mut buffers = spec.buffers.split_off(spec.depth as usize);
        let driven = std::mem::take(&mut spec.buffers);
        let begin = now();
        let run = BareRun {
            target: &self.target,
            deadline: begin + spec.time_max,
            spec: &spec,
            next: AtomicU64::new(0),
            moved: AtomicU64::new(0),
            flushed: AtomicU64::new(0),
        };
        let ends: Vec<Result<(BufMut, Duration)>> = std::thread::scope(|scope| {
            let threads: Vec<_> = driven.into_iter().map(|buf| scope.spawn(|| run.run(buf))).collect();
            let lost = |_| Err(Error::internal("a bare thread panicked"));
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(lost)).collect()
        });
        let seconds = now().duration_since(begin).as_secs_f64();
        let mut cpu = Duration::ZERO;
        for end in ends {
            let (buf, used) = end?;
            buffers.push(buf);
            cpu += used;
        }
        let bytes = run.moved.into_inner();
        Ok(BareResult {
            bytes,
            operations: bytes / u64::from(spec.io_bytes),
            flushes: run.flushed.into_inner(),
            seconds,
            cpu_seconds: cpu.as_secs_f64(),
            buffers,
        })
    }
}

/// One bare run, shared by its threads.
struct BareRun<'a> {
    target: &'a Target,
    deadline: Instant,
    spec: &'a BareSpec,
    next: AtomicU64,
    moved: AtomicU64,
    flushed: AtomicU64,
}

impl BareRun<'_> {
    fn run(&self, mut buf: BufMut) -> Result<(BufMut, Duration)> {
        let cpu = sys::thread_cpu_time();
        let bytes = u64::from(self.spec.io_bytes);
        let (every, first) = (self.spec.flush_every_bytes, self.spec.first_flush());
        let flushes_due = |moved: u64| if moved < first { 0 } else { (moved - first) / every + 1 };
        loop {
            let turn = self.next.fetch_add(1, Ordering::Relaxed);
            if turn.saturating_mul(bytes) >= self.spec.bytes_max || now() >= self.deadline {
                return Ok((buf, sys::thread_cpu_time().saturating_sub(cpu)));
            }
            let offset = self.spec.offsets[(turn % self.spec.offsets.len() as u64) as usize];
            if self.spec.write {
                write_at(self.target, offset, bytes, buf.padded_spans_mut().map(|span| &*span))?;
            } else {
                read_at(self.target, offset, bytes, &mut buf)?;
            }
            let moved = self.moved.fetch_add(bytes, Ordering::Relaxed) + bytes;
            if every > 0 && flushes_due(moved) > flushes_due(moved - bytes) {
                self.target.flush()?;
                self.flushed.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

impl Work {
    fn into_buf(self) -> Option<BufMut> {
        match self {
            Work::Read { into, .. } => Some(into),
            _ => None,
        }
    }
}

impl Job {
    fn run(self) {
        let Job { target, offset, bytes, work, ticket } = self;
        let (result, buf) = match work {
            Work::Read { mut into, check } => {
                let read = read_at(&target, offset, bytes, &mut into);
                (read.and_then(|()| check.map_or(Ok(()), |check| run_check(check, &into))), Some(into))
            }
            Work::Write { from } => {
                (write_at(&target, offset, bytes, from.iter().flat_map(Buf::padded_spans)), None)
            }
            Work::Flush => (target.flush(), None),
            Work::Discard => (target.discard(offset, bytes), None),
        };
        ticket.answer(Done { result, buf });
    }
}

impl Target {
    fn flush(&self) -> Result<()> {
        self.file.sync_data().map_err(|error| Error::io(format_args!("flush {}", self.name), error))
    }

    fn discard(&self, offset: u64, bytes: u64) -> Result<()> {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        match sys::fallocate(&self.file, mode, offset, bytes) {
            Err(error) if error.raw_os_error() != Some(libc::EOPNOTSUPP) => {
                Err(Error::io(format_args!("discard {} at {offset}, {bytes} bytes", self.name), error))
            }
            _ => Ok(()),
        }
    }
}

fn read_at(target: &Target, mut offset: u64, bytes: u64, into: &mut BufMut) -> Result<()> {
    let mut left = bytes as usize;
    for span in into.padded_spans_mut() {
        let take = left.min(span.len());
        target.file.read_exact_at(&mut span[..take], offset).map_err(|error| {
            Error::io(format_args!("read {} at {offset}, {take} bytes", target.name), error)
        })?;
        offset += take as u64;
        left -= take;
        if left == 0 {
            break;
        }
    }
    Ok(())
}

fn write_at<'a>(
    target: &Target,
    mut offset: u64,
    bytes: u64,
    from: impl Iterator<Item = &'a [u8]>,
) -> Result<()> {
    let mut left = bytes as usize;
    for span in from {
        let span = &span[..left.min(span.len())];
        target.file.write_all_at(span, offset).map_err(|error| {
            Error::io(format_args!("write {} at {offset}, {} bytes", target.name, span.len()), error)
        })?;
        offset += span.len() as u64;
        left -= span.len();
        if left == 0 {
            break;
        }
    }
    Ok(())
}

impl Pool {
    fn start(options: &PsyncOptions) -> Result<Pool> {
        let shared = Arc::new(Shared {
            jobs_max: options.queue_ops_max,
            state: Mutex::new(State { jobs: VecDeque::new(), closed: false }),
            work: Condvar::new(),
            room: Condvar::new(),
        });
        let pool = Pool { shared, threads: Mutex::new(Vec::new()), options: options.clone() };
        for index in 0..options.threads {
            let shared = Arc::clone(&pool.shared);
            let thread = std::thread::Builder::new().name(format!("ebb-psync-{index}"));
            let thread = thread.spawn(move || shared.serve());
            pool.threads.lock().push(thread.map_err(|error| Error::io("start a thread", error))?);
        }
        Ok(pool)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.work.notify_all();
        for thread in self.threads.lock().drain(..) {
            // The last owner may be a callback on one of the threads, which cannot wait for its own end.
            if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
                tracing::error!("a thread of positional I/O panicked");
            }
        }
    }
}

impl Shared {
    /// Queues a job, and first waits while the queue is full.
    fn push(&self, job: Job) {
        let mut state = self.state.lock();
        while state.jobs.len() >= self.jobs_max {
            self.room.wait(&mut state);
        }
        state.jobs.push_back(job);
        drop(state);
        self.work.notify_one();
    }

    fn serve(&self) {
        loop {
            let mut state = self.state.lock();
            while state.jobs.is_empty() && !state.closed {
                self.work.wait(&mut state);
            }
            let Some(job) = state.jobs.pop_front() else { return };
            drop(state);
            self.room.notify_one();
            if catch_unwind(AssertUnwindSafe(|| job.run())).is_err() {
                tracing::error!("answering an operation panicked");
            }
        }
    }
}

impl fmt::Debug for PsyncDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PsyncDevice({}, {} bytes)", self.info.name, self.info.capacity_bytes)
    }
}
