//! What one object costs in CPU time, beside one operation of the same size on the bare ring.

use ebbtide_node::Store;
use serde_json::{Value, json};

use super::bare::{BareArm, Drive, Flush, SLICE_TIME_MAX, Shape, Way, io_bytes_of};
use super::ledger::Ledger;
use super::options::Plan;
use super::read::read_slice;
use super::write::put_range;
use crate::clock::Stopwatch;
use crate::dice::Dice;
use crate::fail::Outcome;
use crate::progress::{Progress, Unit};
use crate::report::number;
use crate::stat::Rounds;

const ROUNDS: usize = 11;
const SLICE_BYTES_MAX: u64 = 64 << 20;
const BARE: usize = 0;
const STORE: usize = 1;

/// CPU microseconds of the process an object, arm by arm.
pub(crate) struct CpuCost {
    reads: Rounds<2>,
    writes: Rounds<2>,
}

/// Measures both ways, in adjacent slices of equal bytes. The bare arm moves pieces of the size of a value. Writes are those
/// of `flush()`: new objects are put beforehand, outside the measurement, so no copy and no checksum is in it.
pub(crate) fn measure(
    store: &Store,
    bare: &mut BareArm,
    plan: &Plan,
    ledger: &Ledger,
    progress: &Progress,
) -> Outcome<CpuCost> {
    let slice = (plan.dram.0 / 8).min(SLICE_BYTES_MAX);
    let objects = (slice / plan.value).max(1);
    progress.stage("cpu time", 2 * ROUNDS as u64, Unit::Things);
    let mut dice = Dice::new(plan.run ^ 0xc9);
    let mut cost = CpuCost { reads: Rounds::new(), writes: Rounds::new() };
    for round in 0..ROUNDS {
        store.drop_hot()?;
        store.quiesce();
        let keys: Vec<u64> = (0..objects).map(|_| dice.below(plan.objects)).collect();
        let mut costs = [0.0; 2];
        for arm in Rounds::<2>::order(round) {
            costs[arm] = progress.paused(|| match arm {
                STORE => {
                    let read = read_slice(store, ledger, plan, &keys);
                    Ok(read.cpu_seconds / read.below_objects as f64)
                }
                _ => bare_cost(bare, Way::Read, plan, objects),
            })?;
        }
        cost.reads.push(costs.map(|seconds| seconds * 1e6));
        progress.add(1);
    }
    for round in 0..ROUNDS {
        store.drop_hot()?;
        let start = ledger.written();
        put_range(store, ledger, plan, start..start + objects, &Progress::silent())?;
        ledger.set_written(start + objects);
        store.quiesce();
        let mut costs = [0.0; 2];
        for arm in Rounds::<2>::order(round) {
            costs[arm] = progress.paused(|| match arm {
                STORE => {
                    let watch = Stopwatch::start();
                    store.flush()?;
                    Ok(watch.cpu_seconds() / objects as f64)
                }
                _ => bare_cost(bare, Way::Write, plan, objects),
            })?;
        }
        cost.writes.push(costs.map(|seconds| seconds * 1e6));
        progress.set((ROUNDS + round + 1) as u64);
    }
    Ok(cost)
}

fn bare_cost(bare: &mut BareArm, way: Way, plan: &Plan, objects: u64) -> Outcome<f64> {
    let shape = Shape { io_bytes: io_bytes_of(plan.value), depth: bare.best(way).depth };
    let flush = Flush::Times(u64::from(way == Way::Write));
    let bytes = objects * shape.io_bytes;
    let watch = Stopwatch::start();
    let done = bare.drive(Drive { way, shape, bytes, flush, time_max: SLICE_TIME_MAX })?;
    Ok(watch.cpu_seconds() / done.operations as f64)
}

impl CpuCost {
    pub(crate) fn to_json(&self) -> Value {
        let arms = |rounds: &Rounds<2>| {
            json!({
                "store": number(rounds.rate(STORE)),
                "bare": number(rounds.rate(BARE)),
                "ratio": number(rounds.ratio(STORE, BARE)),
            })
        };
        json!({"read": arms(&self.reads), "write": arms(&self.writes)})
    }

    /// CPU time of the store ÷ the bare ring's, for reads and for writes.
    pub(crate) fn ratios(&self) -> (f64, f64) {
        (self.reads.ratio(STORE, BARE), self.writes.ratio(STORE, BARE))
    }
}
