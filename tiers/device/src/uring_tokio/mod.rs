//! The same device on tokio-uring, kept to be measured beside the raw ring (`docs/adr/0003-raw-io-uring.md`).
//!
//! One thread runs tokio-uring's runtime; each operation is a task of it. Registered memory and files do not fit its API (its
//! fixed buffers own their memory whole, and it registers no files), so neither is used.

#[allow(unsafe_code, reason = "buffers for tokio-uring")]
mod sys;

use std::collections::VecDeque;
use std::fmt;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use ebbtide_core::{
    Batch, BlockDevice, BoxFuture, Check, DeviceCounters, DeviceInfo, Done, Error, Op, Result,
};
use ebbtide_mem::{Buf, BufMut, Region};
use parking_lot::{Condvar, Mutex};
use tokio::sync::{Notify, Semaphore};
use tokio_uring::fs::File;

use crate::batch::{self, Sort, Tally, Ticket};
use crate::direct::Overdue;
use crate::file::{self, Opened};
use crate::uring::UringOptions;
use crate::{run_check, shape};
use sys::{ReadWindow, WriteWindow};

/// A file or block device on tokio-uring. The options are those of the raw ring; SQPOLL is not offered.
pub struct UringTokioDevice {
    queue: Arc<Queue>,
    thread: Mutex<Option<JoinHandle<()>>>,
    info: DeviceInfo,
    block: bool,
    tally: Arc<Tally>,
    closed: AtomicBool,
}

struct Job {
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

struct Queue {
    jobs_max: usize,
    state: Mutex<State>,
    room: Condvar,
    work: Notify,
}

struct State {
    jobs: VecDeque<Job>,
    closed: bool,
}

impl UringTokioDevice {
    /// Opens a file or block device on a runtime and a thread of its own. Invalid when the path cannot be opened.
    pub fn open(path: &Path, options: &UringOptions) -> Result<UringTokioDevice> {
        let opened = file::open(path, options.direct)?;
        let Opened { file, name, block, capacity_bytes, align_bytes, memory_align_bytes, mut degraded } =
            opened;
        degraded.push("registered memory and files: tokio-uring has none that fit".to_owned());
        let tally = Arc::new(Tally::default());
        let state = Mutex::new(State { jobs: VecDeque::new(), closed: false });
        let (room, work) = (Condvar::new(), Notify::new());
        let queue = Arc::new(Queue { jobs_max: options.queue_ops_max, state, room, work });
        let runner = (Arc::clone(&queue), Arc::clone(&tally), options.clone(), name.clone());
        let thread = std::thread::Builder::new().name("ebb-tokio-uring".to_owned()).spawn(move || {
            let (queue, tally, options, name) = runner;
            let target = Target { file: File::from_std(file), name, tally, options };
            tokio_uring::builder().entries(256).start(serve(queue, Rc::new(target)));
        });
        let thread = thread.map_err(|error| Error::io("start a thread", error))?;
        let info = DeviceInfo {
            name,
            kind: "uring-tokio",
            capacity_bytes,
            align_bytes,
            memory_align_bytes,
            queue_depth: options.queue_depth,
            degraded,
        };
        let (thread, closed) = (Mutex::new(Some(thread)), AtomicBool::new(false));
        Ok(UringTokioDevice { queue, thread, info, block, tally, closed })
    }

    /// What became of operations that the kernel did not answer in time.
    pub fn overdue(&self) -> Overdue {
        self.tally.overdue()
    }

    /// Refuses new operations from here on, and waits until those in flight were answered.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.tally.wait_idle();
    }

    fn refusal(&self) -> Option<Error> {
        self.closed
            .load(Ordering::Acquire)
            .then(|| Error::closed(format!("device {} is closed", self.info.name)))
    }
}

impl BlockDevice for UringTokioDevice {
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
        let mut jobs = Vec::with_capacity(ops.len());
        for op in ops {
            let shape = refusal.clone().map_or_else(|| shape::check(&self.info, &op), Err);
            let (sort, offset, work) = match op {
                Op::Read { offset, into, check } => (Sort::Read, offset, Work::Read { into, check }),
                Op::Write { offset, from } => (Sort::Write, offset, Work::Write { from }),
            };
            let ticket = tickets.draw(sort, *shape.as_ref().unwrap_or(&0));
            match shape {
                Ok(bytes) => jobs.push(Job { offset, bytes, work, ticket }),
                Err(error) => {
                    let buf = if let Work::Read { into, .. } = work { Some(into) } else { None };
                    ticket.answer(Done { result: Err(error), buf });
                }
            }
        }
        self.queue.push(jobs);
        batch
    }

    fn flush(&self) -> BoxFuture<'static, Result<()>> {
        if let Some(error) = self.refusal() {
            return batch::ready(Err(error));
        }
        let (ticket, answer) = batch::open_one(Sort::Flush, &self.tally);
        self.queue.push(vec![Job { offset: 0, bytes: 0, work: Work::Flush, ticket }]);
        answer
    }

    fn discard(&self, offset: u64, length: u64) -> BoxFuture<'static, Result<()>> {
        let allowed = shape::check_place(&self.info, "discard", offset, length);
        if let Some(error) = self.refusal().or(allowed.err()) {
            return batch::ready(Err(error));
        }
        if !self.block || length == 0 {
            return batch::ready(Ok(()));
        }
        let (ticket, answer) = batch::open_one(Sort::Discard, &self.tally);
        self.queue.push(vec![Job { offset, bytes: length, work: Work::Discard, ticket }]);
        answer
    }

    fn counters(&self) -> DeviceCounters {
        self.tally.counters()
    }

    fn in_flight(&self) -> u64 {
        self.tally.in_flight()
    }
}

impl Queue {
    /// Queues jobs, and first waits while the queue is full.
    fn push(&self, jobs: Vec<Job>) {
        let mut state = self.state.lock();
        while state.jobs.len() >= self.jobs_max && !state.closed {
            self.room.wait(&mut state);
        }
        // Tickets of jobs that come too late answer Unavailable by being dropped.
        if !state.closed {
            state.jobs.extend(jobs);
            drop(state);
            self.work.notify_one();
        }
    }

    /// The next job; `None` when there will be none.
    async fn next(&self) -> Option<Job> {
        loop {
            {
                let mut state = self.state.lock();
                if let Some(job) = state.jobs.pop_front() {
                    self.room.notify_one();
                    return Some(job);
                }
                if state.closed {
                    return None;
                }
            }
            self.work.notified().await;
        }
    }
}

impl Drop for UringTokioDevice {
    fn drop(&mut self) {
        self.queue.state.lock().closed = true;
        self.queue.work.notify_one();
        let Some(thread) = self.thread.lock().take() else { return };
        if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
            tracing::error!("a tokio-uring thread panicked");
        }
    }
}

/// What the tasks of one device share.
struct Target {
    file: File,
    name: String,
    tally: Arc<Tally>,
    options: UringOptions,
}

/// Runs jobs, each as a task, at most `queue_depth` at once, until the queue is closed and all are answered.
async fn serve(queue: Arc<Queue>, target: Rc<Target>) {
    let depth = target.options.queue_depth;
    let places = Arc::new(Semaphore::new(depth as usize));
    while let Some(job) = queue.next().await {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let target = Rc::clone(&target);
        tokio_uring::spawn(async move {
            target.run(job).await;
            drop(place);
        });
    }
    // All places free: all answered. What is stuck in the kernel for longer than the timeout is cancelled with the runtime.
    let _ = tokio::time::timeout(target.options.io_timeout, places.acquire_many(depth)).await;
}

impl Target {
    async fn run(&self, job: Job) {
        let Job { offset, bytes, work, ticket } = job;
        let mut ticket = Some(ticket);
        let mut work = std::pin::pin!(self.perform(offset, bytes, work));
        let limit = self.options.io_timeout;
        let done = match tokio::time::timeout(limit, work.as_mut()).await {
            Ok(done) => done,
            Err(_) => {
                self.give_up(offset, limit, ticket.take());
                let done = work.await;
                self.tally.quarantined.fetch_sub(1, Ordering::Relaxed);
                done
            }
        };
        if let Some(ticket) = ticket {
            ticket.answer(done);
        }
    }

    fn give_up(&self, offset: u64, limit: Duration, ticket: Option<Ticket>) {
        self.tally.timeouts.fetch_add(1, Ordering::Relaxed);
        self.tally.quarantined.fetch_add(1, Ordering::Relaxed);
        if let Some(ticket) = ticket {
            let name = &self.name;
            ticket.fail(Error::unavailable(format!("{name} at {offset}: no answer within {limit:?}")));
        }
    }

    async fn perform(&self, offset: u64, bytes: u64, work: Work) -> Done {
        match work {
            Work::Read { into, check } => {
                let (read, into) = self.read(offset, bytes, into).await;
                let result = read.and_then(|()| check.map_or(Ok(()), |check| run_check(check, &into)));
                Done { result, buf: Some(into) }
            }
            Work::Write { from } => Done { result: self.write(offset, from).await, buf: None },
            Work::Flush => {
                let flushed = self.file.sync_data().await;
                let result = flushed.map_err(|error| Error::io(format_args!("flush {}", self.name), error));
                Done { result, buf: None }
            }
            Work::Discard => {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                // A hint: what the device refuses stays as it is.
                let _ = self.file.fallocate(offset, bytes, mode).await;
                Done { result: Ok(()), buf: None }
            }
        }
    }

    async fn read(&self, mut offset: u64, bytes: u64, mut buf: BufMut) -> (Result<()>, BufMut) {
        let mut left = bytes as usize;
        for span in 0..buf.raw_spans().len() {
            let (mut at, end) = (0, left.min(buf.raw_spans()[span].bytes as usize));
            while at < end {
                let bytes = (end - at).min(self.options.io_bytes_max as usize);
                let (read, window) = self.file.read_at(ReadWindow { buf, span, at, bytes }, offset).await;
                buf = window.buf;
                let moved = match read {
                    Ok(0) => {
                        let what =
                            format!("read {} at {offset}, {bytes} bytes: the device ends before", self.name);
                        return (Err(Error::unavailable(what)), buf);
                    }
                    Ok(moved) => moved,
                    Err(error) => {
                        let what = format!("read {} at {offset}, {bytes} bytes", self.name);
                        return (Err(Error::io(what, error)), buf);
                    }
                };
                at += moved;
                offset += moved as u64;
            }
            left -= end;
            if left == 0 {
                break;
            }
        }
        (Ok(()), buf)
    }

    async fn write(&self, mut offset: u64, from: Vec<Buf>) -> Result<()> {
        let from = Arc::new(from);
        for buf in 0..from.len() {
            for span in 0..from[buf].raw_spans().len() {
                let (mut at, end) = (0, from[buf].raw_spans()[span].bytes as usize);
                while at < end {
                    let bytes = (end - at).min(self.options.io_bytes_max as usize);
                    let window = WriteWindow { from: Arc::clone(&from), buf, span, at, bytes };
                    let (written, _) = self.file.write_at(window, offset).submit().await;
                    let moved = written.map_err(|error| {
                        Error::io(format_args!("write {} at {offset}, {bytes} bytes", self.name), error)
                    })?;
                    if moved == 0 {
                        let what = format!("write {} at {offset}, {bytes} bytes: nothing moved", self.name);
                        return Err(Error::unavailable(what));
                    }
                    at += moved;
                    offset += moved as u64;
                }
            }
        }
        Ok(())
    }
}

impl fmt::Debug for UringTokioDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UringTokioDevice({}, {} bytes)", self.info.name, self.info.capacity_bytes)
    }
}
