//! `bench dram`: what a resident object costs to hand out, to copy out and to take in, beside plain copies.
//!
//! Source and destination are areas much larger than the caches, touched before, and walked in shuffled order; the
//! arms take turns within each round. Room for puts is made before the clock starts, by removing what the last slice of puts
//! left, so what is measured is the put and not an eviction.

mod lane;

use std::path::PathBuf;

use clap::Args;
use ebbtide_core::ByteSize;
use ebbtide_node::{Served, Store};
use serde_json::Value;

use crate::body::{KeyBytes, KeyId, fill, first_wrong};
use crate::clock;
use crate::dice::Dice;
use crate::fail::{Failure, Outcome, Verdict};
use crate::machine;
use crate::place::Place;
use crate::progress::{Progress, Unit};
use crate::report::{Report, Sink, shown};
use crate::stat::{ROUNDS_MIN, Rounds, SAME_ARM_RANGE};
use crate::store_options::{self, StoreOptions};

use self::lane::{Lane, Walk, address, same_bytes};

const GET_INTO: usize = 0;
const MEMCPY: usize = 1;
const PUT: usize = 2;
const SAME: usize = 3;
const GET: usize = 4;
const ARMS: usize = 5;

/// What one slice copies, and how many gets it makes.
const SLICE_BYTES: usize = 64 << 20;
const GETS: usize = 20_000;
/// The part of the objects that a slice copied which is compared afterwards.
const CHECKED: usize = 16;

/// Measures gets and puts of resident objects beside plain copies of the same bytes.
#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct DramOptions {
    /// Bytes of a value; each of a list
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', default_value = "4KiB,64KiB,1MiB,3274752")]
    value: Vec<ByteSize>,
    /// Bytes that are walked on either side; 128MiB or more a thread
    #[arg(long, value_name = "SIZE", default_value = "512MiB")]
    area: ByteSize,
    /// Threads, each with its part of the areas
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    threads: usize,
    /// Rounds of slices; fewer than 21 make the figures void
    #[arg(long, value_name = "COUNT", default_value_t = ROUNDS_MIN)]
    rounds: usize,
    /// Write the figures as one JSON object; with - to standard output, and the table to standard error
    #[arg(long, value_name = "FILE|-")]
    json: Option<PathBuf>,
    #[command(flatten)]
    store: StoreOptions,
}

const EXAMPLES: &str = "\
Examples:
  ebbtide bench dram
  ebbtide bench dram --value 64KiB,1MiB --threads 2 --json -

Defaults: --dram one and a half times --area, or what that needs; there is no SSD.
Exit codes: 0 good, 1 bytes were wrong or the run broke off, 2 wrong use, 3 the figures do not count.";

/// Runs the command.
pub(crate) fn run(options: &DramOptions) -> Outcome<Verdict> {
    let dram = options.store.dram.unwrap_or(ByteSize(options.area.0 / 4 * 6).max(options.dram_min()));
    options.check(dram)?;
    let sink = Sink::open(options.json.as_deref())?;
    let place = Place::choose(options.store.dir.as_deref(), options.store.keep)?;
    let progress = Progress::start();
    let store = store_options::open(options.store.config(place.dir(), dram, ByteSize(0))?, &progress)?;
    let mut report = Report::new("bench dram");
    report.set("machine", machine::facts(&place.existing()));
    report.set("config", options.store.to_json(dram, ByteSize(0)));
    report.set("config.area_bytes", options.area.0);
    report.set("config.threads", options.threads);
    let (mut wrong, mut zero_copy) = (0, true);
    for value in &options.value {
        let mut bench = Bench::new(&store, options, value.0 as usize, &progress)?;
        let mut rounds = bench.rounds(options.rounds, &progress)?;
        let repeated = missed(&rounds, value.0);
        if repeated {
            // A miss is repeated once with twice the rounds; the second result counts.
            rounds = bench.rounds(2 * options.rounds, &progress)?;
        }
        zero_copy &= bench.hands_out_the_same_bytes()?;
        wrong += bench.wrong;
        bench.clear()?;
        say(&mut report, &size_key(value.0), value.0, &rounds, repeated);
    }
    store.close()?;
    drop(progress);
    report.set("get.zero_copy", zero_copy);
    report.set("wrong_objects", wrong);
    report.row("get copies nothing", if zero_copy { "yes" } else { "no" });
    report.row("objects wrong", wrong.to_string());
    if wrong > 0 || !zero_copy {
        report.wrong();
    }
    sink.emit(&report.to_json(), &report.table())?;
    Ok(report.verdict())
}

impl DramOptions {
    /// What holds the objects of the area, each with some bytes more than its value, and a slice of puts beside them.
    fn dram_min(&self) -> ByteSize {
        let least = self.area.0 + self.area.0 / 8 + self.threads as u64 * SLICE_BYTES as u64;
        ByteSize(least.next_multiple_of(1 << 20))
    }

    fn check(&self, dram: ByteSize) -> Outcome<()> {
        let refuse = |message: String| Err(Failure::usage(message));
        if !(1..=256).contains(&self.threads) || self.rounds == 0 {
            return refuse("--threads and --rounds: give 1 or more, and 256 threads at most".to_string());
        }
        if self.area.0 / (self.threads as u64) < 2 * SLICE_BYTES as u64 {
            return refuse(format!("--area {}: give 128MiB or more a thread", self.area));
        }
        if let Some(value) = self.value.iter().find(|value| value.0 == 0 || value.0 > 16 << 20) {
            return refuse(format!("--value {value}: give 1 byte to 16MiB"));
        }
        let least = self.dram_min();
        if dram < least {
            return refuse(format!("--dram {dram}: give {least} or more for --area {}", self.area));
        }
        if self.store.ssd.is_some_and(|ssd| ssd.0 > 0) {
            return refuse("--ssd: this bench has DRAM alone; leave it out".to_string());
        }
        Ok(())
    }
}

/// One value size: resident objects, and a lane for each thread.
struct Bench<'a> {
    store: &'a Store,
    size: usize,
    run: u64,
    lanes: Vec<Lane>,
    next_put: u64,
    wrong: u64,
}

impl<'a> Bench<'a> {
    fn new(store: &'a Store, options: &DramOptions, size: usize, progress: &Progress) -> Outcome<Self> {
        let run = clock::wall_ns();
        let mut dice = Dice::new(run);
        let slots = options.area.0 as usize / options.threads / size;
        let name = format!("fill, {}", ByteSize(size as u64));
        progress.stage(name, (slots * options.threads * size) as u64, Unit::Bytes);
        let mut lanes = Vec::with_capacity(options.threads);
        let mut value = vec![0; size];
        for lane in 0..options.threads as u64 {
            let keys: Vec<(u64, KeyBytes)> = (0..slots as u64)
                .map(|slot| {
                    (lane * slots as u64 + slot, KeyId { run, index: lane * slots as u64 + slot }.bytes())
                })
                .collect();
            for (index, key) in &keys {
                fill(KeyId { run, index: *index }, &mut value);
                store.put(key, &value)?;
                progress.add(size as u64);
            }
            let mut source = vec![0; slots * size];
            fill(KeyId { run: lane, index: u64::MAX }, &mut source);
            lanes.push(Lane {
                size,
                source,
                // Not zeroes, which the system might give without memory behind them.
                target: vec![1; slots * size],
                from: Walk::new(slots, &mut dice),
                to: Walk::new(slots, &mut dice),
                keys,
                ask: Walk::new(slots, &mut dice),
                asks: Vec::new(),
                puts: Vec::new(),
                copied: Vec::new(),
            });
        }
        Ok(Bench { store, size, run, lanes, next_put: 1 << 40, wrong: 0 })
    }

    fn rounds(&mut self, count: usize, progress: &Progress) -> Outcome<Rounds<ARMS>> {
        progress.stage(ByteSize(self.size as u64).to_string(), count as u64, Unit::Things);
        let mut rounds = Rounds::new();
        let copies = (SLICE_BYTES / self.lanes.len() / self.size).max(4);
        // One round to warm up.
        for round in 0..=count {
            let mut seconds = [0.0; ARMS];
            for arm in Rounds::<ARMS>::order(round) {
                seconds[arm] = self.slice(arm, copies)?;
            }
            if round > 0 {
                rounds.push(seconds);
                progress.add(1);
            }
        }
        Ok(rounds)
    }

    /// Seconds an operation of one arm.
    fn slice(&mut self, arm: usize, copies: usize) -> Outcome<f64> {
        let store = self.store;
        let operations = if arm == GET { GETS } else { copies };
        match arm {
            PUT => self.make_room(copies)?,
            GET | GET_INTO => self.lanes.iter_mut().for_each(|lane| lane.prepare(operations)),
            _ => {}
        }
        let start = clock::now();
        let ends: Vec<ebbtide_core::Result<()>> = std::thread::scope(|scope| {
            let lanes = self.lanes.iter_mut();
            let running: Vec<_> =
                lanes.map(|lane| scope.spawn(move || lane.work(store, arm, operations))).collect();
            running
                .into_iter()
                .map(|lane| lane.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect()
        });
        let seconds = clock::now().duration_since(start).as_secs_f64();
        ends.into_iter().collect::<ebbtide_core::Result<()>>()?;
        match arm {
            GET_INTO => self.check_copies(),
            PUT => self.check_puts()?,
            _ => {}
        }
        Ok(seconds / (operations * self.lanes.len()) as f64)
    }

    /// Removes what the last slice of puts left, and names what the next one puts.
    fn make_room(&mut self, copies: usize) -> Outcome<()> {
        for lane in &mut self.lanes {
            for (key, _) in lane.puts.drain(..) {
                self.store.remove(&key)?;
            }
            for _ in 0..copies {
                let key = KeyId { run: self.run, index: self.next_put }.bytes();
                self.next_put += 1;
                let slot = lane.from.next();
                lane.puts.push((key, slot));
            }
        }
        Ok(())
    }

    fn check_copies(&mut self) {
        for lane in &mut self.lanes {
            for (index, slot) in lane.copied.drain(..) {
                let bytes = &lane.target[slot * self.size..(slot + 1) * self.size];
                self.wrong += u64::from(first_wrong(KeyId { run: self.run, index }, [bytes]).is_some());
            }
        }
    }

    fn check_puts(&mut self) -> Outcome<()> {
        for lane in &self.lanes {
            for (key, slot) in lane.puts.iter().rev().take(CHECKED) {
                let expect = &lane.source[slot * self.size..(slot + 1) * self.size];
                let right = self.store.get(key)?.is_some_and(|hit| same_bytes(&hit, expect));
                self.wrong += u64::from(!right);
            }
        }
        Ok(())
    }

    /// True when two gets of an object give the same memory.
    fn hands_out_the_same_bytes(&self) -> Outcome<bool> {
        for lane in &self.lanes {
            for (_, key) in lane.keys.iter().take(CHECKED) {
                let (one, other) = (self.store.get(key)?, self.store.get(key)?);
                let same = one.zip(other).is_some_and(|(one, other)| {
                    one.tier == Served::Dram && address(&one).is_some() && address(&one) == address(&other)
                });
                if !same {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Removes all that it put.
    fn clear(mut self) -> Outcome<()> {
        self.make_room(0)?;
        for (_, key) in self.lanes.iter().flat_map(|lane| &lane.keys) {
            self.store.remove(key)?;
        }
        Ok(())
    }
}

/// The least ratios that the project promises: get_into and put, by size.
fn goals(size: u64) -> (f64, f64) {
    match size {
        0..0x10000 => (0.0, 0.70),
        0x10000..0x10_0000 => (0.90, 0.85),
        _ => (0.95, 0.85),
    }
}

/// The rounds hold seconds an operation, so a ratio of rates is the other way round.
fn missed(rounds: &Rounds<ARMS>, size: u64) -> bool {
    let (get_into, put) = goals(size);
    !SAME_ARM_RANGE.contains(&rounds.ratio(MEMCPY, SAME))
        || rounds.ratio(MEMCPY, GET_INTO) < get_into
        || rounds.ratio(MEMCPY, PUT) < put
}

fn say(report: &mut Report, key: &str, size: u64, rounds: &Rounds<ARMS>, repeated: bool) {
    let gb_per_s = |arm: usize| size as f64 / rounds.rate(arm) / 1e9;
    let (get_into, put) = (rounds.ratio(MEMCPY, GET_INTO), rounds.ratio(MEMCPY, PUT));
    let same = rounds.ratio(MEMCPY, SAME);
    let overhead_us = rounds.difference(GET_INTO, MEMCPY) * 1e6;
    report.measure(&format!("memcpy.gb_per_s.{key}"), gb_per_s(MEMCPY));
    report.measure(&format!("get_into.gb_per_s.{key}"), gb_per_s(GET_INTO));
    report.measure(&format!("get_into.ratio.{key}"), get_into);
    report.measure(&format!("get_into.overhead_us.{key}"), overhead_us);
    report.measure(&format!("put.gb_per_s.{key}"), gb_per_s(PUT));
    report.measure(&format!("put.ratio.{key}"), put);
    report.measure(&format!("put.overhead_us.{key}"), rounds.difference(PUT, MEMCPY) * 1e6);
    report.measure(&format!("get.ns.{key}"), rounds.rate(GET) * 1e9);
    report.measure(&format!("same_arm.{key}"), same);
    report.set(&format!("rounds.{key}"), rounds.len());
    report.set(&format!("repeated.{key}"), Value::Bool(repeated));
    if rounds.len() < ROUNDS_MIN {
        report.void(format!("{} rounds at {key}, {ROUNDS_MIN} are needed", rounds.len()));
    } else if !SAME_ARM_RANGE.contains(&same) {
        report.void(format!("noise: memcpy against itself at {key} gives {}", shown(same, 3)));
    }
    report.row(
        format!("{key}: memcpy GB/s"),
        format!("{} (÷ itself {})", shown(gb_per_s(MEMCPY), 2), shown(same, 3)),
    );
    report.row(format!("{key}: get_into ÷ memcpy"), format!("{} ({overhead_us:+.2} µs)", shown(get_into, 3)));
    report.row(format!("{key}: put ÷ memcpy"), shown(put, 3));
    report.row(format!("{key}: get ns"), shown(rounds.rate(GET) * 1e9, 0));
}

/// "64KiB" for whole units, else the number of bytes: a key must not have a dot.
fn size_key(bytes: u64) -> String {
    match ByteSize(bytes).to_string() {
        text if text.contains('.') => bytes.to_string(),
        text => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_sizes_have_no_dots() {
        assert_eq!(size_key(4096), "4KiB");
        assert_eq!(size_key(1 << 20), "1MiB");
        assert_eq!(size_key(3_274_752), "3274752");
        assert_eq!(size_key(1_500_001), "1500001");
    }

    #[test]
    fn ratios_are_of_rates_not_of_times() {
        let mut rounds = Rounds::new();
        // get_into takes a quarter longer, put twice as long.
        rounds.push([1.25, 1.0, 2.0, 1.0, 0.1]);
        let mut report = Report::new("bench dram");
        say(&mut report, "1MiB", 1 << 20, &rounds, false);
        let json = report.to_json();
        assert_eq!(json["get_into"]["ratio"]["1MiB"], 0.8);
        assert_eq!(json["put"]["ratio"]["1MiB"], 0.5);
        assert!(missed(&rounds, 1 << 20));
    }
}
