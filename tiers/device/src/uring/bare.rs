//! The bare arm: a closed loop on the ring thread, without batches, closures or wake-ups.

use std::collections::VecDeque;
use std::time::Instant;

use ebbtide_core::{Error, Result};

use super::sys::{FileId, HeldId, Memory, Reaped, Ring, Start, Way};
use crate::clock::now;
use crate::direct::{BareResult, BareSpec};
use crate::sys::thread_cpu_time;

/// The state of one bare run.
struct Run<'a> {
    ring: &'a mut Ring,
    file: FileId,
    name: &'a str,
    way: Way,
    io_bytes: u64,
    bytes_max: u64,
    deadline: Instant,
    flush_every_bytes: u64,
    /// Memory of the flush, which has none.
    flush: HeldId,
    flushing: bool,
    flush_at: u64,
    started_bytes: u64,
    result: BareResult,
    failed: Option<Error>,
}

/// Runs `spec`, which fits the device, on a ring with nothing in flight, and leaves it so.
pub(super) fn drive(ring: &mut Ring, file: FileId, name: &str, mut spec: BareSpec) -> Result<BareResult> {
    let depth = spec.depth as usize;
    let held: Vec<HeldId> = spec.buffers.drain(..).map(|buf| ring.hold(Memory::Unique(buf))).collect();
    let flush = ring.hold(Memory::Nothing);
    let (begin, cpu) = (now(), thread_cpu_time());
    let mut run = Run {
        ring,
        file,
        name,
        way: if spec.write { Way::Write } else { Way::Read },
        io_bytes: u64::from(spec.io_bytes),
        bytes_max: spec.bytes_max,
        deadline: begin + spec.time_max,
        flush_every_bytes: spec.flush_every_bytes,
        flush,
        flushing: false,
        flush_at: spec.first_flush(),
        started_bytes: 0,
        result: BareResult {
            bytes: 0,
            operations: 0,
            flushes: 0,
            seconds: 0.0,
            cpu_seconds: 0.0,
            buffers: Vec::new(),
        },
        failed: None,
    };
    let mut offsets = spec.offsets.iter().copied().cycle();
    run.turn(depth, &held, &mut offsets);
    run.result.seconds = now().duration_since(begin).as_secs_f64();
    run.result.cpu_seconds = thread_cpu_time().saturating_sub(cpu).as_secs_f64();
    run.end(held)
}

impl Run<'_> {
    fn turn(&mut self, depth: usize, held: &[HeldId], offsets: &mut dyn Iterator<Item = u64>) {
        // In turn, so that a run with more buffers than depth moves memory as cold as there are many.
        let mut idle: VecDeque<HeldId> = held.iter().copied().collect();
        for held in idle.drain(..depth.min(held.len())) {
            self.start(held, offsets);
        }
        while self.ring.in_kernel() > 0 {
            if let Err(error) = self.ring.submit_and_wait(None)
                && !matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY))
            {
                self.failed = Some(Error::io(format_args!("drive {}", self.name), error));
                return;
            }
            let late = now() >= self.deadline;
            while let Some(reaped) = self.ring.reap() {
                let again = self.count(reaped);
                if !again {
                    continue;
                }
                idle.push_back(reaped.held);
                if !late && let Some(next) = idle.pop_front() {
                    self.start(next, offsets);
                }
            }
        }
    }

    /// Counts what has ended; true when its buffer may go on.
    fn count(&mut self, reaped: Reaped) -> bool {
        let Reaped { held, at, bytes, result } = reaped;
        if result < 0 || result as u64 != bytes {
            let error = if result < 0 {
                std::io::Error::from_raw_os_error(-result)
            } else {
                std::io::ErrorKind::UnexpectedEof.into()
            };
            let what = format!("drive {}: {bytes} bytes ({at} from the start of an operation)", self.name);
            self.failed.get_or_insert(Error::io(what, error));
            return false;
        }
        if held == self.flush {
            self.flushing = false;
            self.result.flushes += 1;
            return false;
        }
        self.result.bytes += bytes;
        self.result.operations += 1;
        if self.flush_every_bytes > 0 && self.result.bytes >= self.flush_at && !self.flushing {
            self.flush_at += self.flush_every_bytes;
            self.flushing = self.ring.start_flush(self.flush, self.file);
        }
        self.failed.is_none()
    }

    fn start(&mut self, held: HeldId, offsets: &mut dyn Iterator<Item = u64>) {
        if self.started_bytes >= self.bytes_max {
            return;
        }
        let Some(offset) = offsets.next() else { return };
        let (way, file, bytes_max) = (self.way, self.file, self.io_bytes);
        match self.ring.start(Start { way, held, file, offset, at: 0, bytes_max }) {
            Some(bytes) if bytes == self.io_bytes => self.started_bytes += bytes,
            _ => {
                let why = format!("drive {}: a buffer does not fit one kernel operation", self.name);
                self.failed = Some(Error::invalid(why));
            }
        }
    }

    fn end(self, held: Vec<HeldId>) -> Result<BareResult> {
        let Run { ring, flush, mut result, failed, .. } = self;
        ring.release(flush);
        for held in held {
            match ring.release(held) {
                Some(Memory::Unique(buf)) => result.buffers.push(buf),
                _ => return Err(failed.unwrap_or_else(|| Error::internal("a bare run lost a buffer"))),
            }
        }
        failed.map_or(Ok(result), Err)
    }
}
