//! The same device, driven bare: on the same ring, on a file beside the store that was written before.

use std::iter::Cycle;
use std::path::Path;
use std::time::Duration;
use std::vec::IntoIter;

use ebbtide_core::ErrorKind;
use ebbtide_node::{Bare, BareResult, BareSpec, Store};
use serde_json::{Value, json};

use super::options::Plan;
use crate::clock;
use crate::dice::Dice;
use crate::fail::Outcome;
use crate::progress::{Progress, Unit};
use crate::report::number;
use crate::stat::median;

/// How often the bare arm flushes: as the store does when it seals a segment.
pub(crate) const FLUSH_EVERY_BYTES: u64 = 64 << 20;
const SMALL_IO_BYTES: u64 = 256 << 10;
const DEPTHS: [u32; 3] = [8, 16, 32];
/// Slices of each setting in the sweep that finds the best.
const SWEEP_SLICES: usize = 3;
const SWEEP_SLICE_BYTES: u64 = 128 << 20;
/// A slice of the sweep, and one of a round, ends after this time too.
const SWEEP_TIME_MAX: Duration = Duration::from_millis(150);
pub(crate) const SLICE_TIME_MAX: Duration = Duration::from_secs(2);
/// How often a bare run is tried while the store still has something in flight.
const TRIES_MAX: u32 = 500;
const TRY_AGAIN_AFTER: Duration = Duration::from_millis(2);
const PAGE_BYTES: u64 = 4096;

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Read,
    Write,
}

/// How the device is driven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) io_bytes: u64,
    pub(crate) depth: u32,
}

/// One bare run: about `bytes`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Drive {
    pub(crate) way: Way,
    pub(crate) shape: Shape,
    pub(crate) bytes: u64,
    pub(crate) flush: Flush,
    pub(crate) time_max: Duration,
}

/// When a bare run flushes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Flush {
    Never,
    /// So often, spread evenly over the run.
    Times(u64),
    /// Once per 64 MiB, and first where a log with so many bytes in its open segment would seal it.
    AfterOpen(u64),
}

impl Flush {
    /// The bytes between two flushes and those before the first, in a run over `bytes`.
    fn periods(self, bytes: u64) -> (u64, u64) {
        match self {
            Flush::Never | Flush::Times(0) => (0, 0),
            // Not at its end: period × flushes is less than the whole, period × (flushes + 1) more.
            Flush::Times(flushes) => (2 * bytes / (2 * flushes + 1), 0),
            Flush::AfterOpen(open) => (FLUSH_EVERY_BYTES, FLUSH_EVERY_BYTES - open % FLUSH_EVERY_BYTES),
        }
    }
}

/// The bare arm.
pub(crate) struct BareArm {
    store: Store,
    bare: Bare,
    /// The store's own file, once it is full of what the store reads, and the bytes of it that are.
    own: Option<(Bare, u64)>,
    depth_max: u32,
    bytes: u64,
    dice: Dice,
    /// Offsets of reads of one length, in random order: no place is read again before all others were.
    order: (u64, Cycle<IntoIter<u64>>),
    pub(crate) sweeps: Sweeps,
}

/// Where the log of a store's file starts.
const SUPERBLOCK_BYTES: u64 = 64 << 10;

/// The store moves memory that no cache holds, so the bare arm does: it goes round in buffers of so many bytes in all.
const COLD_BYTES: u64 = 64 << 20;

/// What the sweeps found, for either way.
#[derive(Clone, Debug)]
pub(crate) struct Sweeps {
    pub(crate) reads: Sweep,
    pub(crate) writes: Sweep,
}

/// Rates of all shapes that were tried, and the best of them.
#[derive(Clone, Debug)]
pub(crate) struct Sweep {
    pub(crate) best: Shape,
    rates: Vec<(Shape, f64)>,
}

impl BareArm {
    /// Lays the file and finds the best shape for either way, unless it is known.
    pub(crate) fn new(
        store: &Store,
        path: &Path,
        plan: &Plan,
        known: Option<Sweeps>,
        progress: &Progress,
    ) -> Outcome<Self> {
        progress.stage("lay the bare file", 0, Unit::Bytes);
        let mut arm = BareArm {
            store: store.clone(),
            bare: store.bare(path, plan.bare_bytes)?,
            own: None,
            depth_max: 0,
            bytes: plan.bare_bytes,
            dice: Dice::new(plan.run ^ 0xba5e),
            order: (0, Vec::new().into_iter().cycle()),
            sweeps: Sweeps { reads: Sweep::none(), writes: Sweep::none() },
        };
        arm.depth_max = arm.bare.depth_max();
        arm.sweeps = match known {
            Some(known) => known,
            None => {
                let slices = (shapes(plan.value, arm.depth_max).len() * SWEEP_SLICES * 2) as u64;
                progress.stage("bare sweep", slices, Unit::Things);
                let writes = arm.sweep(Way::Write, plan.value, progress)?;
                Sweeps { writes, reads: arm.sweep(Way::Read, plan.value, progress)? }
            }
        };
        Ok(arm)
    }

    fn sweep(&mut self, way: Way, value: u64, progress: &Progress) -> Outcome<Sweep> {
        let shapes = shapes(value, self.depth_max);
        let mut rates = vec![Vec::new(); shapes.len()];
        for slice in 0..SWEEP_SLICES {
            for step in 0..shapes.len() {
                // There and back, so that a drift of the machine favours none.
                let at = if slice.is_multiple_of(2) { step } else { shapes.len() - 1 - step };
                let flush = match way {
                    Way::Read => Flush::Never,
                    Way::Write => Flush::Times(SWEEP_SLICE_BYTES / FLUSH_EVERY_BYTES),
                };
                let (shape, bytes, time_max) = (shapes[at], SWEEP_SLICE_BYTES, SWEEP_TIME_MAX);
                let done = self.drive(Drive { way, shape, bytes, flush, time_max })?;
                rates[at].push(rate(&done));
                progress.add(1);
            }
        }
        let rates: Vec<_> = shapes.into_iter().zip(rates.into_iter().map(median)).collect();
        let best = rates.iter().max_by(|one, other| one.1.total_cmp(&other.1));
        Ok(Sweep { best: best.map_or(Sweep::none().best, |best| best.0), rates })
    }

    /// The best shape of one way.
    pub(crate) fn best(&self, way: Way) -> Shape {
        match way {
            Way::Read => self.sweeps.reads.best,
            Way::Write => self.sweeps.writes.best,
        }
    }

    /// From here on reads go to the store's own file: the same extents, and as cold for a cache under the device as what the
    /// store reads. A file beside it that is read again and again would be kept there.
    pub(crate) fn read_own(&mut self) -> Outcome<()> {
        let used = self.store.stats().tiers.iter().map(|tier| tier.used_bytes).sum::<u64>();
        self.own = Some((self.store.bare_own()?, used));
        self.order.0 = 0;
        Ok(())
    }

    /// A slice of about `bytes` in the best shape; the rate in bytes a second.
    pub(crate) fn slice(&mut self, way: Way, bytes: u64, flush: Flush) -> Outcome<f64> {
        let drive = Drive { way, shape: self.best(way), bytes, flush, time_max: SLICE_TIME_MAX };
        self.drive(drive).map(|done| rate(&done))
    }

    /// Leaves nothing in the device's cache, so that no arm's flush pays for what another one wrote.
    pub(crate) fn settle(&mut self) -> Outcome<()> {
        let shape = Shape { io_bytes: PAGE_BYTES, depth: 1 };
        let bytes = PAGE_BYTES;
        let flush = Flush::Times(1);
        self.drive(Drive { way: Way::Write, shape, bytes, flush, time_max: SLICE_TIME_MAX }).map(drop)
    }

    /// Moves about as many bytes as it is told, and tells how it went.
    pub(crate) fn drive(&mut self, drive: Drive) -> Outcome<BareResult> {
        let Drive { way, shape, bytes, flush, time_max } = drive;
        let operations = bytes.div_ceil(shape.io_bytes).max(1);
        let bytes = operations * shape.io_bytes;
        let offsets = self.offsets(way, shape.io_bytes, operations);
        let io_bytes = u32::try_from(shape.io_bytes).expect("no operation is as long as 4 GiB");
        let (flush_every_bytes, flush_first_bytes) = flush.periods(bytes);
        // The arms never overlap: a device that still works for the store refuses a bare run.
        let mut tries = 0;
        loop {
            self.store.quiesce();
            let count = (COLD_BYTES / shape.io_bytes).max(u64::from(shape.depth)) as u32; // at most 16,384
            let mut memory = self.bare.buffers(io_bytes, count)?;
            let spec = BareSpec {
                write: way == Way::Write,
                io_bytes,
                depth: shape.depth,
                offsets: Vec::clone(&offsets),
                bytes_max: bytes,
                time_max,
                flush_every_bytes,
                flush_first_bytes,
                buffers: std::mem::take(&mut memory.buffers),
            };
            let file = self.own.as_ref().filter(|_| way == Way::Read).map_or(&self.bare, |(own, _)| own);
            match file.drive(spec) {
                Err(error) if error.kind() == ErrorKind::Full && tries < TRIES_MAX => tries += 1,
                result => return Ok(result?),
            }
            clock::sleep(TRY_AGAIN_AFTER);
        }
    }

    fn offsets(&mut self, way: Way, io_bytes: u64, operations: u64) -> Vec<u64> {
        let (start, bytes) = match (&self.own, way) {
            (Some((_, used)), Way::Read) => (SUPERBLOCK_BYTES, *used),
            _ => (0, self.bytes),
        };
        let slots = (bytes / io_bytes).max(1);
        if way == Way::Write {
            // One after the other, as a log writes; from a random place, so that no arm has places of its own.
            let first = self.dice.below(slots);
            return (0..operations).map(|at| (first + at) % slots * io_bytes).collect();
        }
        if self.order.0 != io_bytes {
            let mut order: Vec<u64> = (0..slots).map(|slot| start + slot * io_bytes).collect();
            self.dice.shuffle(&mut order);
            self.order = (io_bytes, order.into_iter().cycle());
        }
        self.order.1.by_ref().take(operations as usize).collect()
    }
}

impl Sweep {
    /// One that tried nothing yet.
    fn none() -> Self {
        Sweep { best: Shape { io_bytes: SMALL_IO_BYTES, depth: DEPTHS[0] }, rates: Vec::new() }
    }

    /// The rate of the best shape, in bytes a second.
    pub(crate) fn best_rate(&self) -> f64 {
        self.rates.iter().map(|(_, rate)| *rate).fold(0.0, f64::max)
    }

    pub(crate) fn to_json(&self) -> Value {
        let rates = self.rates.iter().map(|(shape, rate)| {
            json!({"io_bytes": shape.io_bytes, "depth": shape.depth, "gb_per_s": number(rate / 1e9)})
        });
        json!({
            "best": {"io_bytes": self.best.io_bytes, "depth": self.best.depth},
            "rates": rates.collect::<Vec<_>>(),
        })
    }
}

fn rate(done: &BareResult) -> f64 {
    done.bytes as f64 / done.seconds
}

/// The size of a value on the device.
pub(crate) fn io_bytes_of(value: u64) -> u64 {
    value.next_multiple_of(PAGE_BYTES)
}

/// The staging memory that the deepest shape needs, and some more.
pub(crate) fn staging_bytes(value: u64) -> u64 {
    let depth = DEPTHS.into_iter().max().unwrap_or_default();
    ((u64::from(depth) + 2) * io_bytes_of(value).max(SMALL_IO_BYTES)).max(2 * COLD_BYTES)
}

/// The shapes that are tried. No depth is deeper than what the store's device was told to keep.
fn shapes(value: u64, depth_max: u32) -> Vec<Shape> {
    let mut sizes = vec![SMALL_IO_BYTES, io_bytes_of(value)];
    sizes.dedup();
    let mut depths = DEPTHS.map(|depth| depth.min(depth_max)).to_vec();
    depths.dedup();
    let shape = |io_bytes| depths.iter().map(move |depth| Shape { io_bytes, depth: *depth });
    sizes.into_iter().flat_map(shape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bare_arm_flushes_where_the_store_would_seal() {
        assert_eq!(Flush::Never.periods(100), (0, 0));
        assert_eq!(Flush::Times(1).periods(63), (42, 0));
        assert_eq!(Flush::AfterOpen(0).periods(1), (FLUSH_EVERY_BYTES, FLUSH_EVERY_BYTES));
        let open = FLUSH_EVERY_BYTES - (1 << 20);
        assert_eq!(Flush::AfterOpen(open).periods(1), (FLUSH_EVERY_BYTES, 1 << 20));
    }

    #[test]
    fn the_sweep_tries_both_sizes_at_each_depth() {
        assert_eq!(shapes(1 << 20, u32::MAX).len(), 6);
        assert_eq!(shapes(256 << 10, u32::MAX).len(), 3);
        assert_eq!(shapes(1 << 20, 12).len(), 4);
        assert!(shapes(3_274_752, u32::MAX).iter().all(|shape| shape.io_bytes % PAGE_BYTES == 0));
        assert_eq!(io_bytes_of(3_274_752), 3_276_800);
    }
}
