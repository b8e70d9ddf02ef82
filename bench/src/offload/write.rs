//! The write pass: DRAM is filled, and then each round sets a slice of puts beside slices of the bare device.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use ebbtide_node::{Put, Stats, Store};

use super::bare::{BareArm, FLUSH_EVERY_BYTES, Flush, Way};
use super::journal::Journal;
use super::ledger::Ledger;
use super::options::{Plan, Reads};
use super::read::Keys;
use crate::clock;
use crate::diskstats::DiskStats;
use crate::fail::Outcome;
use crate::progress::{Progress, Unit};
use crate::stat::Rounds;
use crate::threads::on_threads;

/// Arms of a round, in their order there (and back in every second round).
pub(crate) const SAME: usize = 0;
pub(crate) const BARE: usize = 1;
pub(crate) const STORE: usize = 2;

/// More than the headers and the footer of a segment of 64 MiB take.
const SEGMENT_HEADERS_BYTES: u64 = 1 << 20;

/// What the open segment should hold when a slice begins: so little that the flush comes near the end of the slice, so much that
/// it comes.
const OPEN_BYTES_MIN: u64 = 3 << 19;
const OPEN_BYTES_MAX: u64 = 4 << 20;

/// How often it is tried to bring the log to the start of a segment.
const OPEN_TRIES_MAX: usize = 8;

/// Of the bytes that a write slice put, the share that is read between slices under `--reads zipf`.
const READS_BETWEEN_SHARE: u64 = 4;

/// What a write pass measured.
pub(crate) struct Written {
    pub(crate) rounds: Rounds<3>,
    /// From the first put to the return of the flush after the last, less the bare slices.
    pub(crate) seconds: f64,
    pub(crate) bytes: u64,
    pub(crate) slice_seconds: Vec<f64>,
    /// What the tier took and wrote, by its own count.
    pub(crate) admitted_bytes: u64,
    pub(crate) tier_written_bytes: u64,
    pub(crate) reinserted_bytes: u64,
    /// What the device wrote during it, by the kernel's count, bare slices left out.
    pub(crate) device_bytes: Option<u64>,
}

/// What a write pass works with.
pub(crate) struct WritePass<'a> {
    pub(crate) store: &'a Store,
    pub(crate) bare: &'a mut BareArm,
    pub(crate) plan: &'a Plan,
    pub(crate) ledger: &'a Ledger,
    pub(crate) keys: &'a mut Keys,
    pub(crate) journal: Option<&'a mut Journal>,
    pub(crate) disk: Option<&'a DiskStats>,
    pub(crate) progress: &'a Progress,
}

/// Runs the clock and the counters of the store's own part.
struct Account<'a> {
    disk: Option<&'a DiskStats>,
    start: Instant,
    left_out: f64,
    device_bytes: u64,
}

impl WritePass<'_> {
    /// Puts all objects of the plan.
    pub(crate) fn run(mut self) -> Outcome<Written> {
        let plan = self.plan;
        self.progress.stage("write", plan.total_bytes(), Unit::Bytes);
        let before = self.store.stats();
        let mut account = Account { disk: self.disk, start: clock::now(), left_out: 0.0, device_bytes: 0 };
        let fill = self.fill_dram(&before);
        account.store(|| self.put(0..fill))?;
        let mut rounds = Rounds::new();
        let mut slice_seconds = Vec::new();
        // What a segment holds beside its headers: each slice of each arm has one flush, near its end. A flush may cost as
        // much as the writes before it, and what is written behind it is paid for by nobody.
        let step = ((FLUSH_EVERY_BYTES - SEGMENT_HEADERS_BYTES) / plan.value).max(1);
        let (rounds_max, slice) = slices(plan.objects - fill, step, plan.write_rounds_min());
        let mut next = fill;
        for index in 0..rounds_max {
            // Rounds are spread over the pass, whole segments apart.
            let due = fill + (plan.objects - fill) * index as u64 / rounds_max as u64;
            let rest = next..next + due.saturating_sub(next) / step * step;
            next = rest.end;
            account.store(|| self.put_down(rest))?;
            let open = match slice < step {
                // Too few objects for that.
                true => self.open_bytes(),
                false => self.open_a_segment(&mut next, slice, &mut account)?,
            };
            if next + slice > plan.objects {
                break;
            }
            let slice = next..next + slice;
            next = slice.end;
            // The first arm's flush would pay for what was put unmeasured.
            account.store(|| self.bare.settle())?;
            let mut rates = [0.0; 3];
            for arm in Rounds::<3>::order(index) {
                rates[arm] = if arm == STORE {
                    let (rate, seconds) = account.store(|| self.store_slice(slice.clone()))?;
                    slice_seconds.push(seconds);
                    rate
                } else {
                    let bytes = (slice.end - slice.start) * plan.value;
                    account.leave_out(|| self.bare.slice(Way::Write, bytes, Flush::AfterOpen(open)))?
                };
                // What the store wrote counts until it is durable; what the bare arm wrote does not count.
                if arm == STORE {
                    account.store(|| self.bare.settle())?;
                } else {
                    account.leave_out(|| self.bare.settle())?;
                }
            }
            rounds.push(rates);
            if plan.options.reads == Reads::Zipf {
                let count = (slice.end - slice.start) / READS_BETWEEN_SHARE;
                account.leave_out(|| self.keys.read_between(self.store, self.ledger, count));
            }
        }
        account.store(|| self.put(next..plan.objects))?;
        account.store(|| {
            self.store.flush()?;
            self.store.quiesce();
            Outcome::Ok(())
        })?;
        let (seconds, device_bytes) = account.close();
        let after = self.store.stats();
        let tier = |count: fn(&ebbtide_core::TierUsage) -> u64| {
            let sum = |stats: &Stats| stats.tiers.iter().map(count).sum::<u64>();
            sum(&after) - sum(&before)
        };
        Ok(Written {
            rounds,
            seconds,
            bytes: plan.total_bytes(),
            slice_seconds,
            admitted_bytes: tier(|usage| usage.admitted_value_bytes),
            tier_written_bytes: tier(|usage| usage.written_bytes),
            reinserted_bytes: tier(|usage| usage.reinserted_value_bytes),
            device_bytes: self.disk.map(|_| device_bytes),
        })
    }

    /// Puts objects from `next` on, while as many as `spare` are left, until the log has just begun a segment; the bytes in it.
    fn open_a_segment(&mut self, next: &mut u64, spare: u64, account: &mut Account<'_>) -> Outcome<u64> {
        let plan = self.plan;
        for _ in 0..OPEN_TRIES_MAX {
            let open = self.open_bytes();
            let segment = self
                .store
                .stats()
                .tiers
                .iter()
                .map(|tier| tier.segment_bytes)
                .max()
                .unwrap_or(FLUSH_EVERY_BYTES);
            let left = plan.objects.saturating_sub(*next + spare);
            let missing = match open {
                ..OPEN_BYTES_MIN => OPEN_BYTES_MIN - open,
                _ if open < OPEN_BYTES_MAX.max(OPEN_BYTES_MIN + plan.value) => return Ok(open),
                _ => segment.saturating_sub(open) + OPEN_BYTES_MIN,
            };
            let objects = missing.div_ceil(plan.value).min(left);
            if objects == 0 {
                return Ok(open);
            }
            account.store(|| self.put_down(*next..*next + objects))?;
            *next += objects;
        }
        Ok(self.open_bytes())
    }

    /// Puts `objects` and waits until nothing is in flight, so that what they made the store write counts as its own.
    fn put_down(&mut self, objects: Range<u64>) -> Outcome<()> {
        self.put(objects)?;
        self.store.quiesce();
        Ok(())
    }

    /// The bytes in the log's open segments; nothing is in flight.
    fn open_bytes(&self) -> u64 {
        self.store.stats().tiers.iter().map(|tier| tier.open_bytes).sum()
    }

    /// How many objects fill DRAM, so that every put after them waits for a demotion.
    fn fill_dram(&self, before: &Stats) -> u64 {
        before.hot.objects_bytes_max.div_ceil(self.plan.value).min(self.plan.objects)
    }

    /// A slice of puts: they end, and then nothing is in flight. Its rate counts the value bytes that reached the device.
    fn store_slice(&mut self, slice: Range<u64>) -> Outcome<(f64, f64)> {
        let admitted = |stats: &Stats| stats.tiers.iter().map(|tier| tier.admitted_value_bytes).sum::<u64>();
        let before = admitted(&self.store.stats());
        let start = clock::now();
        self.put(slice)?;
        self.store.quiesce();
        let seconds = clock::now().duration_since(start).as_secs_f64();
        let bytes = admitted(&self.store.stats()) - before;
        Ok((bytes as f64 / seconds, seconds))
    }

    /// Puts `objects`; with a journal in ranges, each flushed and then written to it.
    fn put(&mut self, objects: Range<u64>) -> Outcome<()> {
        let Some(journal) = &mut self.journal else {
            put_range(self.store, self.ledger, self.plan, objects.clone(), self.progress)?;
            self.ledger.set_written(objects.end);
            return Ok(());
        };
        for range in journal.ranges(objects) {
            put_range(self.store, self.ledger, self.plan, range.clone(), self.progress)?;
            self.ledger.set_written(range.end);
            self.store.flush()?;
            journal.append(range)?;
        }
        Ok(())
    }
}

impl Account<'_> {
    fn store<T, E>(&mut self, work: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let before = self.disk.map(DiskStats::moved);
        let result = work();
        if let (Some(disk), Some(before)) = (self.disk, before) {
            self.device_bytes += disk.moved().since(before).written_bytes;
        }
        result
    }

    fn leave_out<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let start = clock::now();
        let result = work();
        self.left_out += clock::now().duration_since(start).as_secs_f64();
        result
    }

    fn close(self) -> (f64, u64) {
        (clock::now().duration_since(self.start).as_secs_f64() - self.left_out, self.device_bytes)
    }
}

impl Written {
    /// Takes the rounds and sums of `other` too.
    pub(crate) fn extend(&mut self, other: Written) {
        self.rounds.extend(other.rounds);
        self.seconds += other.seconds;
        self.bytes += other.bytes;
        self.slice_seconds.extend(other.slice_seconds);
        self.admitted_bytes += other.admitted_bytes;
        self.tier_written_bytes += other.tier_written_bytes;
        self.reinserted_bytes += other.reinserted_bytes;
        self.device_bytes = self.device_bytes.zip(other.device_bytes).map(|(one, other)| one + other);
    }
}

/// Puts the objects of `range` by all threads of the plan.
pub(crate) fn put_range(
    store: &Store,
    ledger: &Ledger,
    plan: &Plan,
    range: Range<u64>,
    progress: &Progress,
) -> ebbtide_core::Result<()> {
    let next = AtomicU64::new(range.start);
    let putter = || {
        let mut value = vec![0; plan.value as usize];
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= range.end {
                return Ok(());
            }
            ledger.body(index, &mut value);
            let put = store.put(&ledger.key(index), &value).inspect_err(|_| {
                next.fetch_max(range.end, Ordering::Relaxed);
            });
            if put.map_err(|error| error.context(format!("put object {index}")))? == Put::AlreadyStored {
                ledger.count_already_stored();
            }
            progress.add(plan.value);
        }
    };
    on_threads(plan.threads, putter).into_iter().collect()
}

/// How long a slice should take.
const SLICE_SECONDS: f64 = 0.13;

/// How many objects of `value` bytes a slice should have at `rate` bytes a second.
pub(crate) fn slice_objects(value: u64, rate: f64) -> u64 {
    (rate * SLICE_SECONDS / value as f64).round() as u64
}

/// How many rounds of slices of `step` objects fit in `objects`, and the objects of a slice: at least `rounds_min`, with shorter
/// slices where that takes it; twice as many at most, since more rounds only cost time.
fn slices(objects: u64, step: u64, rounds_min: usize) -> (usize, u64) {
    // What is put between two slices to begin a segment, and once before the first.
    let between = step / 16 + 1;
    let fit = (objects.saturating_sub(step) / (step + between)) as usize;
    if fit < rounds_min {
        return (rounds_min, (objects / rounds_min as u64).max(1));
    }
    (fit.min(2 * rounds_min), step)
}

/// Cuts `objects` into a part for each round, and each part into what is moved unmeasured and a slice of about
/// `slice_max` objects. At least `rounds_min` parts; twice as many at most, since more rounds only cost time.
pub(crate) fn parts(objects: Range<u64>, slice_max: u64, rounds_min: usize) -> Vec<(Range<u64>, Range<u64>)> {
    let slice_max = slice_max.max(1);
    let usual = ((objects.end - objects.start) / slice_max) as usize;
    let part = |part: Range<u64>| {
        let edge = part.end - slice_max.min(part.end - part.start);
        (part.start..edge, edge..part.end)
    };
    cut(objects, usual.clamp(rounds_min, 2 * rounds_min)).into_iter().map(part).collect()
}

/// Cuts `range` into `parts` pieces that differ by one at most; fewer when there are not so many objects.
pub(crate) fn cut(range: Range<u64>, parts: usize) -> Vec<Range<u64>> {
    let (count, parts) = (range.end - range.start, parts as u64);
    let edge = |part: u64| range.start + (u128::from(count) * u128::from(part) / u128::from(parts)) as u64;
    (0..parts).map(|part| edge(part)..edge(part + 1)).filter(|piece| !piece.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_the_range_and_differ_by_one() {
        let pieces = cut(10..110, 21);
        assert_eq!(pieces.len(), 21);
        assert_eq!((pieces[0].start, pieces[20].end), (10, 110));
        assert!(pieces.windows(2).all(|pair| pair[0].end == pair[1].start));
        assert!(pieces.iter().all(|piece| (4..=5).contains(&(piece.end - piece.start))));
        assert_eq!(cut(0..3, 21).len(), 3);
        assert_eq!(cut(5..5, 21).len(), 0);
    }

    #[test]
    fn slices_take_their_time_and_rounds_are_bounded() {
        let few = parts(0..1050, 100, 21);
        assert_eq!(few.len(), 21);
        assert!(few.iter().all(|(rest, slice)| rest.is_empty() && slice.end - slice.start == 50));
        assert_eq!(parts(0..3000, 100, 21).len(), 30);
        let many = parts(0..100_000, 100, 21);
        assert_eq!(many.len(), 42);
        assert!(many.iter().all(|(rest, slice)| slice.end - slice.start == 100 && rest.end == slice.start));
        assert_eq!((many[0].0.start, many[41].1.end), (0, 100_000));
        assert!(many.windows(2).all(|pair| pair[0].1.end == pair[1].0.start));
    }

    #[test]
    fn a_slice_is_a_whole_step_where_each_round_has_room_for_one() {
        // 1 MiB values: 2.25 GiB less DRAM, 4 GiB less DRAM, and less than there should be.
        assert_eq!(slices(1792, 63, 21), (25, 63));
        assert_eq!(slices(3584, 63, 21), (42, 63));
        assert_eq!(slices(1000, 63, 21), (21, 47));
        assert_eq!(slices(5, 63, 21), (21, 1));
    }
}
