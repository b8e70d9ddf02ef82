//! The ring thread: takes requests, keeps the kernel's queue full, answers.
//!
//! Each turn reaps what has ended, fills the queue again, tells the kernel, and only then runs checks and wakes callers, so
//! that the device never waits for a checksum. Without a check to run it tells the kernel as it goes to sleep, in one
//! system call.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ebbtide_core::{Check, Done, Error};
use parking_lot::Mutex;

use super::queue::{Command, Queue, Request, Work};
use super::sys::{FileId, HeldId, Memory, Reaped, Ring, Start, Way};
use crate::batch::{Tally, Ticket};
use crate::clock::now;
use crate::run_check;

/// How often a piece that the kernel answers with EAGAIN or EINTR is tried again.
const RETRIES_MAX: u32 = 64;
/// How often in a row the kernel may refuse to take operations (no memory for them) before the ring counts as dead.
const REFUSALS_MAX: u32 = 1000;
/// After so many checked bytes the queue is filled again.
const CHECK_BYTES_MAX: u64 = 512 << 10;
/// How long the end of the ring waits for operations that were cancelled.
const CANCEL_TIME_MAX: Duration = Duration::from_secs(1);

/// The bounds of a ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) depth: u32,
    pub(super) inflight_bytes_max: u64,
    pub(super) io_bytes_max: u64,
    pub(super) io_timeout: Duration,
}

enum TaskKind {
    Move(Way),
    Flush,
    Discard,
}

/// One operation that the kernel has at least a part of.
struct Task {
    kind: TaskKind,
    file: FileId,
    offset: u64,
    bytes: u64,
    /// How much of it the kernel was given; the rest follows.
    issued: u64,
    /// Kernel operations in flight or to be tried again.
    out: u32,
    retries: u32,
    failed: Option<Error>,
    check: Option<Check>,
    /// `None` once it was answered by timeout; then the task only keeps the memory.
    ticket: Option<Ticket>,
    deadline: Instant,
}

/// The rest of a kernel operation that moved less than asked for, or that is tried again.
struct Again {
    held: HeldId,
    at: u64,
    bytes: u64,
}

struct Finished {
    task: Task,
    memory: Memory,
}

struct KnownFile {
    name: Arc<str>,
    tally: Arc<Tally>,
}

pub(super) struct Worker {
    ring: Ring,
    queue: Arc<Queue>,
    limits: Limits,
    degraded: Arc<Mutex<Vec<String>>>,
    files: Vec<Option<KnownFile>>,
    /// Files whose devices are gone and whose operations are not.
    leaving: Vec<FileId>,
    waiting: VecDeque<Request>,
    /// By the index of their memory.
    tasks: Vec<Option<Task>>,
    /// The task that the kernel has not all of yet.
    partial: Option<HeldId>,
    again: VecDeque<Again>,
    finished: VecDeque<Finished>,
    kernel_bytes: u64,
    refusals: u32,
    now: Instant,
    heard: Instant,
    scan: Instant,
    closing: Option<Instant>,
}

impl Worker {
    pub(super) fn new(
        ring: Ring,
        queue: Arc<Queue>,
        limits: Limits,
        degraded: Arc<Mutex<Vec<String>>>,
    ) -> Worker {
        let now = now();
        Worker {
            ring,
            queue,
            limits,
            degraded,
            files: Vec::new(),
            leaving: Vec::new(),
            waiting: VecDeque::new(),
            tasks: Vec::new(),
            partial: None,
            again: VecDeque::new(),
            finished: VecDeque::new(),
            kernel_bytes: 0,
            refusals: 0,
            now,
            heard: now,
            scan: now,
            closing: None,
        }
    }

    /// Runs until the queue is closed and all is done. The ring's death answers everything with Unavailable.
    pub(super) fn run(mut self) {
        let ended = catch_unwind(AssertUnwindSafe(|| self.work()));
        let error = match ended {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error),
            Err(_) => Some(std::io::Error::other("the ring thread panicked")),
        };
        if let Some(error) = &error {
            tracing::error!(%error, "a ring died: its devices are unavailable");
        }
        self.queue.die();
        // Answers all that is left: a dropped ticket says Unavailable.
        self.waiting.clear();
        self.finished.clear();
        self.tasks.iter_mut().flatten().for_each(|task| task.ticket = None);
        self.end_kernel_operations();
    }

    fn work(&mut self) -> std::io::Result<()> {
        while self.turn()? {}
        Ok(())
    }

    /// One turn; false when there is nothing left to do.
    fn turn(&mut self) -> std::io::Result<bool> {
        self.now = now();
        while let Some(reaped) = self.ring.reap() {
            self.take_back(reaped);
        }
        let taken = self.queue.take(&mut self.waiting, self.limits.depth as usize);
        if !taken.commands.is_empty() {
            taken.commands.into_iter().for_each(|command| self.obey(command));
        }
        self.refill();
        if self.now >= self.scan {
            self.time_out();
            self.close_files();
        }
        if self.finished.iter().any(|finished| finished.task.check.is_some()) {
            let submitted = self.ring.submit();
            self.hear(submitted)?;
        }
        self.finish_some();
        if !self.finished.is_empty() {
            return Ok(true);
        }
        let idle = self.ring.in_kernel() == 0 && self.waiting.is_empty();
        if taken.drained && self.is_over(idle) {
            return Ok(false);
        }
        let hungry = self.waiting.is_empty() && self.partial.is_none() && self.has_room();
        if !self.queue.fall_asleep(hungry, taken.closed) {
            let submitted = self.ring.submit();
            self.hear(submitted)?;
            return Ok(true);
        }
        let time_max = (!idle).then(|| self.scan.saturating_duration_since(self.now));
        let waited = self.ring.submit_and_wait(time_max);
        self.hear(waited)?;
        Ok(true)
    }

    /// Bounded patience with a kernel that takes no operations for the moment.
    fn hear(&mut self, result: std::io::Result<()>) -> std::io::Result<()> {
        match result {
            Ok(()) => self.refusals = 0,
            Err(error) => match error.raw_os_error() {
                Some(libc::EAGAIN | libc::EBUSY) if self.refusals < REFUSALS_MAX => {
                    self.refusals += 1;
                    std::thread::park_timeout(Duration::from_millis(1));
                }
                _ => return Err(error),
            },
        }
        Ok(())
    }

    /// Whether a closed ring may end: all is done, or only what will never be.
    fn is_over(&mut self, idle: bool) -> bool {
        let since = *self.closing.get_or_insert(self.now);
        let answered =
            self.waiting.is_empty() && self.tasks.iter().flatten().all(|task| task.ticket.is_none());
        idle || answered || self.now.duration_since(since) > self.limits.io_timeout * 2
    }

    fn has_room(&self) -> bool {
        self.ring.in_kernel() < self.limits.depth && self.kernel_bytes < self.limits.inflight_bytes_max
    }

    /// Gives the kernel as much as the bounds allow.
    fn refill(&mut self) {
        while self.has_room() {
            if let Some(again) = self.again.pop_front() {
                self.start_again(again);
            } else if let Some(held) = self.partial {
                self.start_more(held);
            } else if let Some(request) = self.waiting.pop_front() {
                self.admit(request);
            } else {
                return;
            }
        }
    }

    /// Takes the memory of a request into the ring's keeping and starts its first piece.
    fn admit(&mut self, request: Request) {
        let Request { file, offset, bytes, work, ticket } = request;
        let (kind, memory, check) = match work {
            Work::Read { into, check } => (TaskKind::Move(Way::Read), Memory::Unique(into), check),
            Work::Write { from } => (TaskKind::Move(Way::Write), Memory::Shared(from), None),
            Work::Flush => (TaskKind::Flush, Memory::Nothing, None),
            Work::Discard => (TaskKind::Discard, Memory::Nothing, None),
        };
        let held = self.ring.hold(memory);
        if self.tasks.len() <= held.index() {
            self.tasks.resize_with(held.index() + 1, || None);
        }
        if self.ring.in_kernel() == 0 {
            self.heard = self.now;
        }
        self.tasks[held.index()] = Some(Task {
            kind,
            file,
            offset,
            bytes,
            issued: 0,
            out: 0,
            retries: 0,
            failed: None,
            check,
            ticket: Some(ticket),
            deadline: self.now + self.limits.io_timeout,
        });
        self.partial = Some(held);
        self.start_more(held);
    }

    /// Starts the next piece of a task.
    fn start_more(&mut self, held: HeldId) {
        let Some(task) = self.tasks[held.index()].as_mut() else {
            self.partial = None;
            return;
        };
        let started = match task.kind {
            TaskKind::Flush => self.ring.start_flush(held, task.file).then_some(task.bytes),
            TaskKind::Discard => {
                self.ring.start_discard(held, task.file, task.offset, task.bytes).then_some(task.bytes)
            }
            TaskKind::Move(way) => {
                let bytes_max = (task.bytes - task.issued).min(self.limits.io_bytes_max);
                let (file, offset, at) = (task.file, task.offset, task.issued);
                let started = self.ring.start(Start { way, held, file, offset, at, bytes_max });
                self.kernel_bytes += started.unwrap_or(0);
                started
            }
        };
        if let Some(bytes) = started {
            task.issued += bytes;
            task.out += 1;
        }
        if task.issued >= task.bytes {
            self.partial = None;
        }
    }

    fn start_again(&mut self, again: Again) {
        let Again { held, at, bytes } = again;
        let Some(task) = self.tasks[held.index()].as_mut() else { return };
        task.out -= 1;
        if task.failed.is_some() || task.ticket.is_none() {
            self.retire(held);
            return;
        }
        let started = match task.kind {
            TaskKind::Flush => self.ring.start_flush(held, task.file).then_some(bytes),
            TaskKind::Discard => {
                self.ring.start_discard(held, task.file, task.offset, task.bytes).then_some(bytes)
            }
            TaskKind::Move(way) => {
                let start = Start { way, held, file: task.file, offset: task.offset, at, bytes_max: bytes };
                let started = self.ring.start(start);
                self.kernel_bytes += started.unwrap_or(0);
                started
            }
        };
        task.out += u32::from(started.is_some());
        let left = bytes - started.unwrap_or(0);
        if left > 0 || started.is_none() {
            task.out += 1;
            self.again.push_back(Again { held, at: at + bytes - left, bytes: left });
        }
    }

    /// Takes one kernel operation back.
    fn take_back(&mut self, reaped: Reaped) {
        let Reaped { held, at, bytes, result } = reaped;
        self.kernel_bytes -= bytes;
        self.heard = self.now;
        let Some(task) = self.tasks[held.index()].as_mut() else { return };
        task.out -= 1;
        task.deadline = self.now + self.limits.io_timeout;
        let moved = u64::try_from(result).unwrap_or(0).min(bytes);
        let temporary = matches!(-result, libc::EAGAIN | libc::EINTR) && task.retries < RETRIES_MAX;
        if temporary || (moved > 0 && moved < bytes) {
            task.retries += u32::from(temporary);
            task.out += 1;
            self.again.push_back(Again { held, at: at + moved, bytes: bytes - moved });
            return;
        }
        let discard_refused = matches!(task.kind, TaskKind::Discard) && -result == libc::EOPNOTSUPP;
        if (result < 0 && !discard_refused) || moved < bytes {
            let name = self.files[task.file.index()].as_ref().map_or("a closed file", |file| &*file.name);
            let offset = task.offset + at;
            let what = match task.kind {
                TaskKind::Move(Way::Read) => format!("read {name} at {offset}, {bytes} bytes"),
                TaskKind::Move(Way::Write) => format!("write {name} at {offset}, {bytes} bytes"),
                TaskKind::Flush => format!("flush {name}"),
                TaskKind::Discard => format!("discard {name} at {offset}"),
            };
            let error = if result < 0 {
                Error::io(what, std::io::Error::from_raw_os_error(-result))
            } else {
                Error::unavailable(format!("{what}: the device ends before"))
            };
            task.failed.get_or_insert(error);
            task.issued = task.bytes;
            if self.partial == Some(held) {
                self.partial = None;
            }
        }
        self.retire(held);
    }

    /// Ends a task that the kernel has nothing of any more.
    fn retire(&mut self, held: HeldId) {
        let slot = &mut self.tasks[held.index()];
        if slot.as_ref().is_none_or(|task| task.out > 0 || task.issued < task.bytes) {
            return;
        }
        let Some(memory) = self.ring.release(held) else { return };
        let Some(task) = slot.take() else { return };
        if task.ticket.is_none()
            && let Some(file) = &self.files[task.file.index()]
        {
            file.tally.quarantined.fetch_sub(1, std::sync::atomic::Ordering::Relaxed);
        }
        self.finished.push_back(Finished { task, memory });
    }

    /// Checks and answers finished operations: at least one, then no more than `CHECK_BYTES_MAX` to check.
    fn finish_some(&mut self) {
        let mut checked = 0;
        while checked < CHECK_BYTES_MAX
            && let Some(Finished { task, memory }) = self.finished.pop_front()
        {
            checked += if task.check.is_some() { task.bytes } else { 0 };
            // A waker or the owner of a buffer may panic; that is not the ring's affair.
            if catch_unwind(AssertUnwindSafe(|| finish(task, memory))).is_err() {
                tracing::error!("answering an operation panicked");
            }
        }
    }

    /// Answers operations that the kernel has had for too long, and those that wait behind a kernel that says nothing.
    fn time_out(&mut self) {
        let limit = self.limits.io_timeout;
        self.scan = self.now + (limit / 8).max(Duration::from_millis(1));
        for index in 0..self.tasks.len() {
            let Some(task) = self.tasks[index].as_mut() else { continue };
            if self.now < task.deadline || task.ticket.is_none() {
                continue;
            }
            let Some(file) = &self.files[task.file.index()] else { continue };
            let (name, offset) = (&file.name, task.offset);
            let error = Error::unavailable(format!("{name} at {offset}: no answer within {limit:?}"));
            file.tally.timeouts.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            file.tally.quarantined.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            tracing::warn!(device = %name, offset, "an operation timed out; its memory waits for the kernel");
            task.issued = task.bytes;
            if let Some(ticket) = task.ticket.take() {
                ticket.fail(error);
            }
            if self.partial.is_some_and(|held| held.index() == index) {
                self.partial = None;
            }
        }
        let silent = self.ring.in_kernel() > 0 && self.now.duration_since(self.heard) >= limit;
        if silent {
            for request in std::mem::take(&mut self.waiting) {
                request.refuse(Error::unavailable(format!("the device has said nothing for {limit:?}")));
            }
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::AddFile { file, name, tally, reply } => {
                let added = self.ring.add_file(file);
                if let Ok(id) = added {
                    if self.files.len() <= id.index() {
                        self.files.resize_with(id.index() + 1, || None);
                    }
                    self.files[id.index()] = Some(KnownFile { name: Arc::clone(&name), tally });
                }
                let _ = reply.send(added.map_err(|error| Error::io(format_args!("open {name}"), error)));
            }
            Command::RemoveFile { file } => {
                self.leaving.push(file);
                self.close_files();
            }
            Command::Register { regions, reply } => {
                if let Err(error) = self.ring.register_regions(&regions) {
                    tracing::warn!(%error, "memory is not registered: each operation pins its pages");
                    self.degraded.lock().push(format!("registered memory: {error}"));
                }
                let _ = reply.send(Ok(()));
            }
            #[cfg(test)]
            Command::Panic => panic!("a ring thread that panics on purpose"),
            Command::Drive { file, spec, reply } => {
                let busy = self.ring.in_kernel() > 0 || !self.waiting.is_empty() || !self.finished.is_empty();
                let result = match self.files[file.index()].as_ref() {
                    Some(known) if !busy => super::bare::drive(&mut self.ring, file, &known.name, *spec),
                    _ => Err(Error::full("a bare run needs a device without operations in flight")),
                };
                let _ = reply.send(result);
            }
        }
    }

    /// Closes the files whose devices are gone, but for those that operations still refer to.
    fn close_files(&mut self) {
        let mut leaving = std::mem::take(&mut self.leaving);
        leaving.retain(|file| {
            let used = self.tasks.iter().flatten().any(|task| task.file == *file)
                || self.waiting.iter().any(|request| request.file == *file)
                || self.finished.iter().any(|finished| finished.task.file == *file);
            if !used {
                self.ring.remove_file(*file);
                self.files[file.index()] = None;
            }
            used
        });
        self.leaving = leaving;
    }

    /// After the last answer: gives the kernel a bounded time to let go of what it still has.
    fn end_kernel_operations(&mut self) {
        if self.ring.in_kernel() == 0 {
            return;
        }
        self.ring.cancel_all();
        let end = now() + CANCEL_TIME_MAX;
        while self.ring.in_kernel() > 0 && now() < end {
            if self.ring.submit_and_wait(Some(Duration::from_millis(20))).is_err() {
                break;
            }
            while let Some(reaped) = self.ring.reap() {
                drop(self.ring.release(reaped.held));
            }
        }
        if self.ring.in_kernel() > 0 {
            tracing::error!(
                operations = self.ring.in_kernel(),
                "the kernel keeps operations: their memory is leaked"
            );
        }
    }
}

/// Runs the check and answers.
fn finish(task: Task, memory: Memory) {
    let Task { failed, check, ticket, .. } = task;
    let Some(ticket) = ticket else { return };
    let buf = match memory {
        Memory::Unique(buf) => Some(buf),
        Memory::Shared(_) | Memory::Nothing => None,
    };
    let result = match (failed, check, &buf) {
        (Some(error), ..) => Err(error),
        (None, Some(check), Some(buf)) => run_check(check, buf),
        _ => Ok(()),
    };
    ticket.answer(Done { result, buf });
}
