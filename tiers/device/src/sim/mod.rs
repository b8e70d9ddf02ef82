//! A block device for the simulator: bytes in memory, time and dice from [`Env`], and crashes between cache and disk.
//!
//! No clock, no thread, no order of its own: the same seed gives the same run.

mod disk;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ebbtide_core::{
    Batch, BlockDevice, BoxFuture, Check, DeviceCounters, DeviceInfo, Done, Env, Error, Monotonic, Op, Result,
};
use ebbtide_mem::{BufMut, Region};
use parking_lot::Mutex;

use crate::batch::{self, Sort, Tally, Ticket};
use crate::direct::Overdue;
use crate::{run_check, shape};
use disk::Content;

/// How a simulated disk is made.
#[derive(Clone, Debug)]
pub struct SimOptions {
    /// For messages.
    pub name: String,
    /// Size in bytes, a multiple of 4096. Memory is taken only for what is written.
    pub capacity_bytes: u64,
    /// Addresses of memory are multiples of this; 1 by default, since addresses differ from run to run.
    pub memory_align_bytes: u32,
    /// What is said of the queue; the simulated disk takes any number of operations.
    pub queue_depth: u32,
    /// An operation takes between these…
    pub latency_min: Duration,
    /// …two, evenly drawn, so that operations overtake each other,
    pub latency_max: Duration,
    /// …and waits for its turn on a channel of so many bytes a second.
    pub bytes_per_second: u64,
    /// An operation that is held up for so long is answered Unavailable.
    pub io_timeout: Duration,
    /// Of each write only the first so many bytes are kept; the rest reads as it was. For tests of indexes that are larger
    /// than the memory for the bodies.
    pub keep_bytes_max: u64,
}

impl Default for SimOptions {
    fn default() -> Self {
        SimOptions {
            name: "sim".to_owned(),
            capacity_bytes: 1 << 30,
            memory_align_bytes: 1,
            queue_depth: 32,
            latency_min: Duration::from_micros(20),
            latency_max: Duration::from_micros(400),
            bytes_per_second: 2 << 30,
            io_timeout: Duration::from_secs(30),
            keep_bytes_max: u64::MAX,
        }
    }
}

/// What goes wrong, and how often: probabilities from 0 to 1 an operation. Nothing by default.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Faults {
    /// A read fails with Unavailable.
    pub read_error: f64,
    /// A write fails with Unavailable, and some of its sectors are written.
    pub write_error: f64,
    /// A write is said to be done, and only some of its sectors are written.
    pub torn_write: f64,
    /// A flush fails with Unavailable, and nothing is durable.
    pub flush_error: f64,
    /// A read brings one wrong bit; the disk has the right one.
    pub bit_flip: f64,
    /// An operation takes longer by `spike`.
    pub spikes: f64,
    /// How much longer.
    pub spike: Duration,
    /// Nothing is answered while this is set. What was held up is done when it is cleared, even when it has timed out.
    pub stopped: bool,
}

/// How often each fault has struck.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultCounts {
    /// Reads that failed.
    pub read_errors: u64,
    /// Writes that failed.
    pub write_errors: u64,
    /// Writes that were silently torn.
    pub torn_writes: u64,
    /// Flushes that failed.
    pub flush_errors: u64,
    /// Reads with a wrong bit.
    pub bit_flips: u64,
    /// Operations that took longer.
    pub spikes: u64,
    /// Operations that timed out while the disk was stopped.
    pub timeouts: u64,
    /// Crashes.
    pub crashes: u64,
}

/// A simulated disk, which outlives the devices that are opened on it. Clones share it.
#[derive(Clone)]
pub struct SimDisk {
    state: Arc<Mutex<State>>,
    options: Arc<SimOptions>,
}

struct State {
    content: Content,
    /// Counts crashes and kills: a device that was opened before the last one is dead.
    epoch: u64,
    faults: Faults,
    counts: FaultCounts,
    /// When the channel is free again.
    free_at: Monotonic,
}

/// A device on a [`SimDisk`], until the disk crashes.
pub struct SimDevice {
    core: Arc<Core>,
    info: DeviceInfo,
}

/// What the running operations of a device share.
struct Core {
    env: Arc<dyn Env>,
    disk: SimDisk,
    epoch: u64,
    tally: Arc<Tally>,
}

enum Work {
    Read { offset: u64, bytes: u64, into: BufMut, check: Option<Check> },
    Write { number: u64, bytes: u64, offset: u64 },
    Flush { mark: u64 },
}

impl SimDisk {
    /// An empty disk: it reads as zeros.
    pub fn new(options: SimOptions) -> SimDisk {
        let state = State {
            content: Content::default(),
            epoch: 0,
            faults: Faults::default(),
            counts: FaultCounts::default(),
            free_at: Monotonic(0),
        };
        SimDisk { state: Arc::new(Mutex::new(state)), options: Arc::new(options) }
    }

    /// Opens a device on it.
    pub fn open(&self, env: &Arc<dyn Env>) -> SimDevice {
        let epoch = self.state.lock().epoch;
        let info = DeviceInfo {
            name: self.options.name.clone(),
            kind: "sim",
            capacity_bytes: self.options.capacity_bytes,
            align_bytes: 4096,
            memory_align_bytes: self.options.memory_align_bytes,
            queue_depth: self.options.queue_depth,
            degraded: Vec::new(),
        };
        let core = Core { env: Arc::clone(env), disk: self.clone(), epoch, tally: Arc::default() };
        SimDevice { core: Arc::new(core), info }
    }

    /// The power goes and comes back. Of each write that was not flushed, and of each that was in flight, any sectors of 512 bytes
    /// may be there or not. Devices that were opened before answer Unavailable from here on and write nothing.
    pub fn crash(&self, env: &dyn Env) {
        let mut state = self.state.lock();
        state.content.crash(&mut || env.random());
        state.epoch += 1;
        state.counts.crashes += 1;
    }

    /// The process goes, the power stays: what was written is there, flushed or not; of each write that was in flight, any sectors.
    /// Devices that were opened before answer Unavailable from here on and write nothing.
    pub fn kill(&self, env: &dyn Env) {
        let mut state = self.state.lock();
        state.content.interrupt(&mut || env.random());
        state.epoch += 1;
    }

    /// Changes what goes wrong from here on.
    pub fn set_faults(&self, faults: Faults) {
        self.state.lock().faults = faults;
    }

    /// What goes wrong now.
    pub fn faults(&self) -> Faults {
        self.state.lock().faults
    }

    /// How often what has gone wrong.
    pub fn fault_counts(&self) -> FaultCounts {
        self.state.lock().counts
    }

    /// What a read would bring now, without time or faults.
    pub fn peek(&self, offset: u64, target: &mut [u8]) {
        self.state.lock().content.read(offset, target, &mut || 0);
    }

    /// Puts bytes on the disk, as damage does. Flushes what was done before.
    pub fn poke(&self, offset: u64, bytes: &[u8]) {
        self.state.lock().content.poke(offset, bytes);
    }

    /// Bytes of memory that its content takes, about.
    pub fn memory_bytes(&self) -> u64 {
        self.state.lock().content.bytes()
    }
}

impl SimDevice {
    /// Operations that were held up for longer than the timeout.
    pub fn overdue(&self) -> Overdue {
        self.core.tally.overdue()
    }

    fn start(&self, work: Work, bytes: u64, ticket: Ticket) {
        let delay = self.core.delay(bytes);
        let core = Arc::clone(&self.core);
        let task = async move { core.serve(work, delay, ticket).await };
        self.core.env.spawn("sim-device-operation", Box::pin(task));
    }
}

impl BlockDevice for SimDevice {
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
        let (mut tickets, batch) = batch::open(ops.len(), &self.core.tally);
        for op in ops {
            let shape = self.core.alive().and_then(|()| shape::check(&self.info, &op));
            let sort = if matches!(op, Op::Read { .. }) { Sort::Read } else { Sort::Write };
            let ticket = tickets.draw(sort, *shape.as_ref().unwrap_or(&0));
            match (shape, op) {
                (Ok(bytes), Op::Read { offset, into, check }) => {
                    self.start(Work::Read { offset, bytes, into, check }, bytes, ticket);
                }
                (Ok(bytes), Op::Write { offset, from }) => {
                    let number = self.core.disk.state.lock().content.begin(offset, &from);
                    self.start(Work::Write { number, bytes, offset }, bytes, ticket);
                }
                (Err(error), op) => {
                    let buf = if let Op::Read { into, .. } = op { Some(into) } else { None };
                    ticket.answer(Done { result: Err(error), buf });
                }
            }
        }
        batch
    }

    fn flush(&self) -> BoxFuture<'static, Result<()>> {
        if let Err(error) = self.core.alive() {
            return batch::ready(Err(error));
        }
        let (ticket, answer) = batch::open_one(Sort::Flush, &self.core.tally);
        let mark = self.core.disk.state.lock().content.mark();
        self.start(Work::Flush { mark }, 0, ticket);
        answer
    }

    fn discard(&self, offset: u64, length: u64) -> BoxFuture<'static, Result<()>> {
        let allowed = shape::check_place(&self.info, "discard", offset, length);
        batch::ready(self.core.alive().and(allowed))
    }

    fn counters(&self) -> DeviceCounters {
        self.core.tally.counters()
    }

    fn in_flight(&self) -> u64 {
        self.core.tally.in_flight()
    }
}

/// While a disk is stopped, what is held up looks again so often.
const STOPPED_STEP: Duration = Duration::from_millis(100);

impl Core {
    fn alive(&self) -> Result<()> {
        if self.disk.state.lock().epoch == self.epoch {
            return Ok(());
        }
        Err(Error::unavailable(format!("device {} has crashed", self.disk.options.name)))
    }

    fn chance(&self, probability: f64) -> bool {
        // No draw for what cannot happen, so that a fault that is off changes nothing in a run.
        let drawn = || (self.env.random() >> 11) as f64 / (1_u64 << 53) as f64;
        probability > 0.0 && drawn() < probability
    }

    /// How long an operation of `bytes` takes from now.
    fn delay(&self, bytes: u64) -> Duration {
        let options = &self.disk.options;
        let spread = options.latency_max.saturating_sub(options.latency_min).as_nanos() as u64;
        let latency = options.latency_min + Duration::from_nanos(self.env.random() % (spread + 1));
        let now = self.env.now();
        let mut state = self.disk.state.lock();
        let transfer = bytes.saturating_mul(1_000_000_000) / options.bytes_per_second.max(1);
        state.free_at = state.free_at.max(now).plus(Duration::from_nanos(transfer));
        let mut delay = state.free_at.since(now) + latency;
        if self.chance(state.faults.spikes) {
            state.counts.spikes += 1;
            delay += state.faults.spike;
        }
        delay
    }

    async fn serve(&self, work: Work, delay: Duration, ticket: Ticket) {
        let mut ticket = Some(ticket);
        self.env.sleep(delay).await;
        let deadline = self.env.now().plus(self.disk.options.io_timeout);
        while self.disk.state.lock().faults.stopped && self.alive().is_ok() {
            if self.env.now() >= deadline
                && let Some(ticket) = ticket.take()
            {
                self.give_up(ticket);
            }
            self.env.sleep(STOPPED_STEP).await;
        }
        let quarantined = ticket.is_none();
        let done = match self.alive() {
            Ok(()) => self.perform(work),
            Err(error) => Done { result: Err(error), buf: work.into_buf() },
        };
        match ticket {
            Some(ticket) => ticket.answer(done),
            None => drop(done),
        }
        if quarantined {
            self.tally.quarantined.fetch_sub(1, std::sync::atomic::Ordering::Relaxed);
        }
    }

    fn give_up(&self, ticket: Ticket) {
        let limit = self.disk.options.io_timeout;
        self.disk.state.lock().counts.timeouts += 1;
        self.tally.timeouts.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        self.tally.quarantined.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let name = &self.disk.options.name;
        ticket.fail(Error::unavailable(format!("{name}: no answer within {limit:?}")));
    }

    fn perform(&self, work: Work) -> Done {
        match work {
            Work::Read { offset, bytes, mut into, check } => {
                let read = self.read(offset, bytes, &mut into);
                let result = read.and_then(|()| check.map_or(Ok(()), |check| run_check(check, &into)));
                Done { result, buf: Some(into) }
            }
            Work::Write { number, bytes, offset } => {
                Done { result: self.write(number, bytes, offset), buf: None }
            }
            Work::Flush { mark } => Done { result: self.flush(mark), buf: None },
        }
    }

    fn read(&self, offset: u64, bytes: u64, into: &mut BufMut) -> Result<()> {
        let name = &self.disk.options.name;
        let mut state = self.disk.state.lock();
        if self.chance(state.faults.read_error) {
            state.counts.read_errors += 1;
            return Err(Error::unavailable(format!("read {name} at {offset}, {bytes} bytes: injected")));
        }
        let flip = self.chance(state.faults.bit_flip).then(|| self.env.random() % (bytes * 8));
        state.counts.bit_flips += u64::from(flip.is_some());
        let mut at = 0;
        for span in into.padded_spans_mut() {
            let take = span.len().min((bytes - at) as usize);
            let span = &mut span[..take];
            state.content.read(offset + at, span, &mut || self.env.random());
            if let Some(bit) = flip
                && let Some(byte) = (bit / 8).checked_sub(at).and_then(|place| span.get_mut(place as usize))
            {
                *byte ^= 1 << (bit % 8);
            }
            at += take as u64;
        }
        Ok(())
    }

    fn write(&self, number: u64, bytes: u64, offset: u64) -> Result<()> {
        let (name, keep) = (&self.disk.options.name, self.disk.options.keep_bytes_max);
        let mut state = self.disk.state.lock();
        let failed = self.chance(state.faults.write_error);
        let torn = !failed && self.chance(state.faults.torn_write);
        state.counts.write_errors += u64::from(failed);
        state.counts.torn_writes += u64::from(torn);
        let mut dice = || self.env.random();
        state.content.end(number, keep, if failed || torn { Some(&mut dice) } else { None });
        if failed {
            return Err(Error::unavailable(format!("write {name} at {offset}, {bytes} bytes: injected")));
        }
        Ok(())
    }

    fn flush(&self, mark: u64) -> Result<()> {
        let mut state = self.disk.state.lock();
        if self.chance(state.faults.flush_error) {
            state.counts.flush_errors += 1;
            return Err(Error::unavailable(format!("flush {}: injected", self.disk.options.name)));
        }
        state.content.flush(mark);
        Ok(())
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

impl fmt::Debug for SimDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.lock();
        write!(f, "SimDisk({}, epoch {})", self.options.name, state.epoch)
    }
}

impl fmt::Debug for SimDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimDevice({}, epoch {})", self.info.name, self.core.epoch)
    }
}
