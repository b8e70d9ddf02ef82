//! A block device in memory that can be cut off between any two writes: what was flushed is kept, what was not is kept
//! sector by sector as the dice fall.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use ebbtide_core::{Batch, BlockDevice, BoxFuture, DeviceCounters, DeviceInfo, Done, Error, Op, Result};
use ebbtide_mem::{BufMut, Region};
use parking_lot::Mutex;

const SECTOR: usize = 512;

/// A small generator of dice.
pub struct Dice(pub u64);

impl Dice {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    pub fn roll(&mut self, sides: u64) -> u64 {
        self.next() % sides
    }
}

struct Pending {
    id: u64,
    offset: usize,
    bytes: Vec<u8>,
    done: bool,
}

struct Disk {
    cached: Vec<u8>,
    durable: Vec<u8>,
    pending: Vec<Pending>,
    next_id: u64,
    /// Writes until the power goes.
    writes_left: Option<u64>,
    /// Ranges of offsets whose next write or read fails.
    fail_writes: Vec<std::ops::Range<u64>>,
    fail_reads: Vec<std::ops::Range<u64>>,
    dice: Dice,
    counters: DeviceCounters,
    /// Each write: offset and bytes.
    journal: Vec<(u64, u64)>,
}

pub struct MemDevice {
    info: DeviceInfo,
    disk: Arc<Mutex<Disk>>,
}

impl MemDevice {
    pub fn new(bytes: usize) -> Arc<MemDevice> {
        Self::of(vec![0; bytes], 1)
    }

    pub fn of(image: Vec<u8>, seed: u64) -> Arc<MemDevice> {
        let info = DeviceInfo {
            name: "mem".into(),
            kind: "mem",
            capacity_bytes: image.len() as u64,
            align_bytes: 4096,
            memory_align_bytes: 4096,
            queue_depth: 32,
            degraded: Vec::new(),
        };
        let disk = Disk {
            durable: image.clone(),
            cached: image,
            pending: Vec::new(),
            next_id: 0,
            writes_left: None,
            fail_writes: Vec::new(),
            fail_reads: Vec::new(),
            dice: Dice(seed),
            counters: DeviceCounters::default(),
            journal: Vec::new(),
        };
        Arc::new(MemDevice { info, disk: Arc::new(Mutex::new(disk)) })
    }

    /// Cuts the power before the write after the next `writes`.
    pub fn cut_after(&self, writes: u64) {
        self.disk.lock().writes_left = Some(writes);
    }

    /// What reads now see.
    pub fn image(&self) -> Vec<u8> {
        self.disk.lock().cached.clone()
    }

    /// What a power cut leaves: durable sectors, and of the others those that the dice let through.
    pub fn after_power_cut(&self, seed: u64) -> Vec<u8> {
        let disk = self.disk.lock();
        let (mut image, mut dice) = (disk.durable.clone(), Dice(seed));
        // Sometimes all of a write, sometimes none, sometimes a few sectors of it: devices reorder.
        for pending in &disk.pending {
            let mood = dice.roll(3);
            for (index, sector) in pending.bytes.chunks(SECTOR).enumerate() {
                if mood == 0 || (mood == 1 && dice.roll(2) == 0) {
                    let at = pending.offset + index * SECTOR;
                    image[at..at + sector.len()].copy_from_slice(sector);
                }
            }
        }
        image
    }

    /// Only what was flushed.
    pub fn durable(&self) -> Vec<u8> {
        self.disk.lock().durable.clone()
    }

    pub fn fail_writes(&self, range: std::ops::Range<u64>) {
        self.disk.lock().fail_writes.push(range);
    }

    pub fn fail_reads(&self, range: std::ops::Range<u64>) {
        self.disk.lock().fail_reads.push(range);
    }

    pub fn corrupt(&self, at: usize) {
        let mut disk = self.disk.lock();
        disk.cached[at] ^= 0x40;
        disk.durable[at] ^= 0x40;
    }

    pub fn zero(&self, range: std::ops::Range<usize>) {
        let mut disk = self.disk.lock();
        disk.cached[range.clone()].fill(0);
        disk.durable[range].fill(0);
    }

    pub fn journal(&self) -> Vec<(u64, u64)> {
        self.disk.lock().journal.clone()
    }
}

fn take(ranges: &mut Vec<std::ops::Range<u64>>, offset: u64, bytes: u64) -> bool {
    let hit = ranges.iter().position(|range| range.start < offset + bytes && offset < range.end);
    hit.map(|index| ranges.remove(index)).is_some()
}

impl Disk {
    fn dead(&self) -> bool {
        self.writes_left == Some(0)
    }

    fn write(&mut self, offset: u64, bytes: Vec<u8>) -> Result<u64> {
        if let Some(left) = &mut self.writes_left {
            *left = left.saturating_sub(1);
        }
        if self.dead() || take(&mut self.fail_writes, offset, bytes.len() as u64) {
            return Err(Error::unavailable("no power"));
        }
        self.counters.writes += 1;
        self.counters.written_bytes += bytes.len() as u64;
        self.journal.push((offset, bytes.len() as u64));
        let at = offset as usize;
        self.cached[at..at + bytes.len()].copy_from_slice(&bytes);
        self.next_id += 1;
        self.pending.push(Pending { id: self.next_id, offset: at, bytes, done: false });
        Ok(self.next_id)
    }

    fn read(&mut self, offset: u64, into: &mut BufMut) -> Result<()> {
        if self.dead() || take(&mut self.fail_reads, offset, into.len() as u64) {
            return Err(Error::unavailable("no power"));
        }
        self.counters.reads += 1;
        self.counters.read_bytes += into.len() as u64;
        let mut at = offset as usize;
        for span in into.spans_mut() {
            span.copy_from_slice(&self.cached[at..at + span.len()]);
            at += span.len();
        }
        Ok(())
    }
}

impl BlockDevice for MemDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn register(&self, _regions: &[Region]) -> Result<()> {
        Ok(())
    }

    fn submit(&self, ops: Vec<Op>) -> Batch {
        let mut disk = self.disk.lock();
        let mut done = Vec::new();
        let mut written = Vec::new();
        for op in ops {
            match op {
                Op::Read { offset, mut into, check } => {
                    assert!(offset % 4096 == 0);
                    let mut result = disk.read(offset, &mut into);
                    if let (Ok(()), Some(check)) = (&result, check) {
                        result = check(&into);
                    }
                    done.push(Done { result, buf: Some(into) });
                }
                Op::Write { offset, from } => {
                    assert!(offset % 4096 == 0);
                    let mut bytes = Vec::new();
                    from.iter()
                        .flat_map(|buf| buf.padded_spans())
                        .for_each(|span| bytes.extend_from_slice(span));
                    assert!(bytes.len() % 4096 == 0);
                    let result = disk.write(offset, bytes).map(|id| written.push(id));
                    done.push(Done { result, buf: None });
                }
            }
        }
        // Not done at once, so that things overlap.
        let mut polls = disk.dice.roll(6);
        let disk = Arc::clone(&self.disk);
        let mut done = Some(done);
        Box::pin(poll_fn(move |_| {
            if polls > 0 {
                polls -= 1;
                return Poll::Pending;
            }
            let mut disk = disk.lock();
            disk.pending.iter_mut().filter(|p| written.contains(&p.id)).for_each(|p| p.done = true);
            Poll::Ready(done.take().expect("polled after its end"))
        }))
    }

    fn flush(&self) -> BoxFuture<'static, Result<()>> {
        let mut disk = self.disk.lock();
        // Only what was done before this call.
        let covered: Vec<u64> = disk.pending.iter().filter(|p| p.done).map(|p| p.id).collect();
        let mut polls = disk.dice.roll(4);
        let disk = Arc::clone(&self.disk);
        Box::pin(poll_fn(move |_| {
            if polls > 0 {
                polls -= 1;
                return Poll::Pending;
            }
            let mut disk = disk.lock();
            if disk.dead() {
                return Poll::Ready(Err(Error::unavailable("no power")));
            }
            disk.counters.flushes += 1;
            let Disk { pending, durable, .. } = &mut *disk;
            for p in pending.iter().filter(|p| covered.contains(&p.id)) {
                durable[p.offset..p.offset + p.bytes.len()].copy_from_slice(&p.bytes);
            }
            pending.retain(|p| !covered.contains(&p.id));
            Poll::Ready(Ok(()))
        }))
    }

    fn discard(&self, _offset: u64, _length: u64) -> BoxFuture<'static, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn counters(&self) -> DeviceCounters {
        self.disk.lock().counters
    }

    fn in_flight(&self) -> u64 {
        0
    }
}
