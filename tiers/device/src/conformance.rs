//! What every block device promises, as checks that any implementation can be put through.
//!
//! Each function panics with what broke. [`all`] runs them all on a device of at least [`CAPACITY_BYTES_MIN`], whose content is
//! lost. [`close`] is apart, since the device is of no use afterwards.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use ebbtide_core::{BlockDevice, BoxFuture, Done, Error, ErrorKind, Op, Result};
use ebbtide_mem::{Buf, BufMut};
use parking_lot::Mutex;

use crate::direct::DirectDevice;

/// The smallest device that the suite runs on.
pub const CAPACITY_BYTES_MIN: u64 = 32 << 20;

const PAGE: usize = ebbtide_mem::PAGE_BYTES;
const MIB: u64 = 1 << 20;

/// A device under test and its surroundings.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    /// The device; its content is lost.
    pub device: &'a Arc<dyn BlockDevice>,
    /// Makes buffers of so many bytes: from a registered arena, from the heap, of one span or of several.
    pub make: &'a (dyn Fn(usize) -> BufMut + Sync),
    /// Runs a future to its end: [`ebbtide_core::block_on`] for real devices, the simulator's executor for simulated ones.
    pub block_on: &'a (dyn Fn(BoxFuture<'static, ()>) + Sync),
    /// Whether several threads may run futures at once (not in a simulation).
    pub threads: bool,
}

/// Runs every check.
pub fn all(subject: Subject<'_>) {
    assert!(subject.device.info().capacity_bytes >= CAPACITY_BYTES_MIN, "the suite needs a larger device");
    reads_what_was_written(subject);
    gathers(subject);
    reads_into_lent_memory(subject);
    refuses(subject);
    keeps_the_order_of_a_batch(subject);
    survives_dropped_batches(subject);
    checks_once(subject);
    takes_more_than_its_depth(subject);
    serves_threads(subject);
    flushes_and_discards(subject);
}

/// Every size from a page to 5 MiB comes back as it was written, and its neighbours stay as they were.
pub fn reads_what_was_written(subject: Subject<'_>) {
    let sizes =
        [1, PAGE, PAGE + 1, 3 * PAGE, 64 << 10, 100_000, 1 << 20, (1 << 20) + PAGE, 3_274_752, 5 << 20];
    for (turn, size) in sizes.into_iter().enumerate() {
        let seed = turn as u64 + 1;
        let offset = 2 * MIB + (turn * PAGE) as u64;
        let padded = size.next_multiple_of(PAGE) as u64;
        subject.write(offset - PAGE as u64, vec![subject.filled(PAGE, 1000 + seed)]);
        subject.write(offset + padded, vec![subject.filled(PAGE, 2000 + seed)]);
        subject.write(offset, vec![subject.filled(size, seed)]);
        assert_filled(&subject.read(offset, size), seed, &format!("{size} bytes at {offset}"));
        assert_filled(&subject.read(offset - PAGE as u64, PAGE), 1000 + seed, "the page before");
        assert_filled(&subject.read(offset + padded, PAGE), 2000 + seed, "the page after");
    }
}

/// One write takes a header and many values; they lie one after the other, each padded to whole pages.
pub fn gathers(subject: Subject<'_>) {
    for count in [2_u64, 17, 1500] {
        let size = if count > 100 { PAGE - 96 } else { 65_000 };
        let padded = size.next_multiple_of(PAGE) as u64;
        let mut from = vec![subject.filled(PAGE, 70)];
        from.extend((0..count).map(|index| subject.filled(size, 100 + index)));
        subject.write(4 * MIB, from);
        assert_filled(&subject.read(4 * MIB, PAGE), 70, "the header of a group");
        for index in [0, 1, count / 2, count - 1] {
            let offset = 4 * MIB + PAGE as u64 + index * padded;
            assert_filled(&subject.read(offset, size), 100 + index, &format!("value {index} of {count}"));
        }
    }
}

/// Memory that a caller lends is read straight into; what direct I/O cannot use is refused and stays whole.
pub fn reads_into_lent_memory(subject: Subject<'_>) {
    let align = subject.device.info().memory_align_bytes as usize;
    subject.write(MIB, vec![subject.filled(64 << 10, 7)]);
    let mut memory = vec![0_u8; (64 << 10) + 2 * PAGE];
    let start = memory.as_ptr().align_offset(PAGE);
    for skew in [0, align, 1] {
        let target = &mut memory[start + skew..start + skew + (64 << 10)];
        target.fill(0xEE);
        let done = ebbtide_mem::lend(target, |into| {
            let mut done = subject.submit(vec![Op::Read { offset: MIB, into, check: None }]);
            let done = done.pop().expect("one operation, one answer");
            assert!(done.buf.is_some(), "the buffer comes back");
            done.result
        });
        if !skew.is_multiple_of(align) {
            assert_eq!(done.expect_err("memory is misaligned").kind(), ErrorKind::Invalid);
            assert!(target.iter().all(|byte| *byte == 0xEE), "a refused read wrote to its buffer");
            continue;
        }
        done.expect("lent memory is read into");
        let mut want = vec![0; target.len()];
        fill_slice(&mut want, 0, 7);
        assert!(*target == want, "lent memory at {skew} has other bytes");
    }
    // 100 bytes are read as one page, and lent memory has no padding to take it.
    let short = ebbtide_mem::lend(&mut memory[start..start + 100], |into| {
        subject.submit(vec![Op::Read { offset: MIB, into, check: None }]).pop().map(|done| done.result)
    });
    let error = short.expect("one answer").expect_err("a page does not fit 100 bytes");
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
}

/// Misaligned and out-of-range operations are refused, say where, and give their buffer back.
pub fn refuses(subject: Subject<'_>) {
    let info = subject.device.info();
    let end = info.capacity_bytes;
    for offset in [1, 512, PAGE as u64 + 7, end, end - PAGE as u64, u64::MAX - 4095] {
        let into = (subject.make)(2 * PAGE);
        let from = vec![subject.filled(2 * PAGE, 1)];
        if info.align_bytes <= 512 && offset == 512 {
            continue;
        }
        let done = subject.submit(vec![Op::Read { offset, into, check: None }, Op::Write { offset, from }]);
        for done in &done {
            let error = done.result.as_ref().expect_err("refused");
            assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
            assert!(error.message().contains(&offset.to_string()), "{error} does not say {offset}");
        }
        assert!(done[0].buf.is_some(), "a refused read gives its buffer back");
    }
    let last = subject.filled(PAGE, 3);
    subject.write(end - PAGE as u64, vec![last]);
    assert_filled(&subject.read(end - PAGE as u64, PAGE), 3, "the last page");
    let empty = subject.submit(vec![Op::Write { offset: 0, from: Vec::new() }]);
    assert_eq!(empty[0].result.as_ref().expect_err("nothing to write").kind(), ErrorKind::Invalid);
    assert!(subject.submit(Vec::new()).is_empty());
}

/// Result i belongs to operation i, whichever ends first and whichever fails.
pub fn keeps_the_order_of_a_batch(subject: Subject<'_>) {
    let count = 40_u64;
    let place = |index: u64| 8 * MIB + index * 2 * PAGE as u64;
    let writes = (0..count)
        .map(|index| Op::Write { offset: place(index), from: vec![subject.filled(PAGE, 500 + index)] })
        .collect();
    subject.submit(writes).into_iter().for_each(|done| done.result.expect("written"));
    let reads = (0..count)
        .map(|index| {
            let size = if index % 5 == 0 { 2 << 20 } else { PAGE };
            let wrong = u64::from(index % 7 == 3);
            Op::Read { offset: place(index) + wrong, into: (subject.make)(size), check: None }
        })
        .collect();
    let done = subject.submit(reads);
    assert_eq!(done.len() as u64, count);
    for (index, done) in (0..count).zip(done) {
        if index % 7 == 3 {
            let error = done.result.expect_err("misaligned");
            assert!(error.message().contains(&(place(index) + 1).to_string()), "{index}: {error}");
            continue;
        }
        done.result.expect("read");
        let mut buf = done.buf.expect("a read gives its buffer back");
        assert_eq!(buf.len(), if index % 5 == 0 { 2 << 20 } else { PAGE });
        buf.set_len(PAGE);
        assert_filled(&buf, 500 + index, &format!("operation {index} of the batch"));
    }
}

/// A batch that nobody waits for is done all the same, and its buffers are freed only then.
pub fn survives_dropped_batches(subject: Subject<'_>) {
    for turn in 0..20_u64 {
        let writes = (0..8)
            .map(|index| {
                let offset = 12 * MIB + (turn * 8 + index) * (64 << 10);
                Op::Write { offset, from: vec![subject.filled(64 << 10, 900 + turn * 8 + index)] }
            })
            .collect();
        drop(subject.device.submit(writes));
        let into = (subject.make)(1 << 20);
        drop(subject.device.submit(vec![Op::Read { offset: 12 * MIB, into, check: None }]));
        // Memory that was freed too early would be handed out again here, and lose these bytes to the read.
        let guard = subject.filled(1 << 20, turn);
        subject.settle();
        guard.spans().enumerate().for_each(|(index, span)| {
            let mut want = vec![0; span.len()];
            if index == 0 {
                fill_slice(&mut want, 0, turn);
                assert!(span == want, "a dropped read wrote to memory that was not its own");
            }
        });
    }
    for index in 0..160_u64 {
        let offset = 12 * MIB + index * (64 << 10);
        assert_filled(&subject.read(offset, 64 << 10), 900 + index, "a write whose batch was dropped");
    }
}

/// A check sees what was read, once; its error becomes the result; one that panics fails its operation alone.
pub fn checks_once(subject: Subject<'_>) {
    subject.write(0, vec![subject.filled(64 << 10, 11)]);
    let calls = Arc::new(AtomicU32::new(0));
    let read = |offset: u64, verdict: fn(&BufMut) -> Result<()>| {
        let calls = Arc::clone(&calls);
        let check = move |buf: &BufMut| {
            calls.fetch_add(1, Ordering::SeqCst);
            verdict(buf)
        };
        Op::Read { offset, into: (subject.make)(64 << 10), check: Some(Box::new(check)) }
    };
    let right: fn(&BufMut) -> Result<()> = |buf| {
        assert_filled(buf, 11, "what a check sees");
        Ok(())
    };
    let done = subject.submit(vec![
        read(0, right),
        read(0, |_| Err(Error::corrupt("not what was written"))),
        read(1, right),
        read(0, |_| panic!("a check that panics on purpose")),
    ]);
    let kinds: Vec<_> = done.iter().map(|done| done.result.as_ref().map_err(Error::kind)).collect();
    let want = [Ok(&()), Err(ErrorKind::Corrupt), Err(ErrorKind::Invalid), Err(ErrorKind::Internal)];
    assert_eq!(kinds, want);
    assert!(done.iter().all(|done| done.buf.is_some()), "buffers come back whatever a check says");
    assert_eq!(calls.load(Ordering::SeqCst), 3, "a check runs once, and not for a read that failed");
    assert_filled(&subject.read(0, 64 << 10), 11, "a read after a check that panicked");
}

/// More operations than the device keeps in flight wait their turn.
pub fn takes_more_than_its_depth(subject: Subject<'_>) {
    let count = u64::from(subject.device.info().queue_depth) * 10 + 3;
    let count = count.min(4000);
    let place = |index: u64| (index * 7 % count) * PAGE as u64;
    // 7 does not divide the count, so that every place is used once.
    let count = if count.is_multiple_of(7) { count + 1 } else { count };
    let writes =
        (0..count).map(|index| Op::Write { offset: place(index), from: vec![subject.filled(PAGE, index)] });
    subject.submit(writes.collect()).into_iter().for_each(|done| done.result.expect("written"));
    let reads =
        (0..count).map(|index| Op::Read { offset: place(index), into: (subject.make)(PAGE), check: None });
    for (index, done) in (0..count).zip(subject.submit(reads.collect())) {
        done.result.expect("read");
        assert_filled(&done.buf.expect("a buffer"), index, "one of many small operations");
    }
    assert_eq!(subject.device.in_flight(), 0);
}

/// Several threads use a device at once, each in a place of its own.
pub fn serves_threads(subject: Subject<'_>) {
    if !subject.threads {
        return;
    }
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            scope.spawn(move || {
                for turn in 0..30_u64 {
                    let offset = (16 + thread * 4) * MIB + turn % 10 * (128 << 10);
                    let seed = thread * 1000 + turn;
                    subject.write(offset, vec![subject.filled(100_000, seed)]);
                    assert_filled(&subject.read(offset, 100_000), seed, "what this thread wrote");
                }
            });
        }
    });
}

/// Flush and discard answer, and the counters know what was done.
pub fn flushes_and_discards(subject: Subject<'_>) {
    subject.settle();
    let before = subject.device.counters();
    subject.write(0, vec![subject.filled(PAGE, 1)]);
    subject.run(subject.device.flush()).expect("flushed");
    subject.read(0, PAGE);
    subject.submit(vec![Op::Read { offset: 5, into: (subject.make)(PAGE), check: None }]);
    let after = subject.device.counters();
    assert_eq!(after.writes - before.writes, 1);
    assert_eq!(after.reads - before.reads, 1);
    assert_eq!(after.flushes - before.flushes, 1);
    assert_eq!(after.errors - before.errors, 1);
    assert_eq!(after.written_bytes - before.written_bytes, PAGE as u64);
    assert_eq!(after.read_bytes - before.read_bytes, PAGE as u64);
    subject.run(subject.device.discard(MIB, MIB)).expect("discarded");
    assert_filled(&subject.read(0, PAGE), 1, "what lies beside a discard");
    let end = subject.device.info().capacity_bytes;
    assert_eq!(
        subject.run(subject.device.discard(end, MIB)).expect_err("no such place").kind(),
        ErrorKind::Invalid
    );
}

/// After `close` what was taken is done, and everything later is refused with Closed.
pub fn close(device: &Arc<dyn DirectDevice>, subject: Subject<'_>) {
    let writes = (0..50_u64)
        .map(|index| Op::Write { offset: index * MIB / 2, from: vec![subject.filled(256 << 10, index)] })
        .collect();
    let batch = device.submit(writes);
    device.close();
    assert_eq!(device.in_flight(), 0, "close waits for what is in flight");
    subject.run(batch).into_iter().for_each(|done| done.result.expect("taken before the close"));
    let done =
        subject.run(device.submit(vec![Op::Read { offset: 0, into: (subject.make)(PAGE), check: None }]));
    assert_eq!(done[0].result.as_ref().expect_err("closed").kind(), ErrorKind::Closed);
    assert!(done[0].buf.is_some());
    assert_eq!(subject.run(device.flush()).expect_err("closed").kind(), ErrorKind::Closed);
    device.close();
}

impl Subject<'_> {
    fn run<T: Send + 'static>(&self, future: impl Future<Output = T> + Send + 'static) -> T {
        let output = Arc::new(Mutex::new(None));
        let target = Arc::clone(&output);
        (self.block_on)(Box::pin(async move {
            let value = future.await;
            *target.lock() = Some(value);
        }));
        let value = output.lock().take();
        value.expect("block_on runs a future to its end")
    }

    fn submit(&self, ops: Vec<Op>) -> Vec<Done> {
        self.run(self.device.submit(ops))
    }

    fn write(&self, offset: u64, from: Vec<Buf>) {
        let done = self.submit(vec![Op::Write { offset, from }]).pop().expect("one answer");
        done.result.expect("written");
        assert!(done.buf.is_none(), "a write has no buffer to give back");
    }

    fn read(&self, offset: u64, size: usize) -> BufMut {
        let into = (self.make)(size);
        let done = self.submit(vec![Op::Read { offset, into, check: None }]).pop().expect("one answer");
        done.result.expect("read");
        done.buf.expect("a read gives its buffer back")
    }

    fn filled(&self, size: usize, seed: u64) -> Buf {
        let mut buf = (self.make)(size);
        let mut at = 0;
        for span in buf.spans_mut() {
            fill_slice(span, at, seed);
            at += span.len();
        }
        buf.zero_padding();
        buf.freeze()
    }

    /// Waits until nothing is in flight, by way of operations that are waited for.
    fn settle(&self) {
        for _ in 0..100_000 {
            if self.device.in_flight() == 0 {
                return;
            }
            self.read(0, PAGE);
        }
        panic!("{} operations stay in flight", self.device.in_flight());
    }
}

/// The byte at `at` of the body with this seed.
fn fill_slice(target: &mut [u8], at: usize, seed: u64) {
    for (index, byte) in target.iter_mut().enumerate() {
        let word = ((at + index) as u64 / 8 + (seed << 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        *byte = (word ^ (word >> 29)).to_le_bytes()[(at + index) % 8];
    }
}

fn assert_filled(buf: &BufMut, seed: u64, what: &str) {
    let mut at = 0;
    for span in buf.spans() {
        let mut want = vec![0; span.len()];
        fill_slice(&mut want, at, seed);
        if let Some(place) = span.iter().zip(&want).position(|(got, want)| got != want) {
            panic!("{what}: byte {} is {}, not {}", at + place, span[place], want[place]);
        }
        at += span.len();
    }
}
