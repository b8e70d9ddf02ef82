//! What an alloc and a free cost, and how full the arena gets, in the mixes that the README of the crate promises for.
//!
//! `cargo run --release -p ebbtide-mem --example allocator -- [--json -|FILE]`
//!
//! The memory itself is never touched (it is a lazy heap arena): this measures the allocator with its lock, the list of
//! spans and the reference count of the arena.

use std::time::{Duration, Instant};

use ebbtide_mem::{Arena, BufMut};

const BIG: usize = 3_274_752;
const SMALL: usize = 658_432;
const SEEDS: u64 = 7;

/// One line of the table. Nanoseconds are the median of the seeds; the rest their mean, or largest.
struct Line {
    mix: &'static str,
    arena_gib: u64,
    objects: usize,
    alloc_ns: f64,
    free_ns: f64,
    utilisation: f64,
    spans_mean: f64,
    spans_max: usize,
}

/// What one life of an arena counted.
#[derive(Default)]
struct Tally {
    alloc: Duration,
    allocs: usize,
    free: Duration,
    frees: usize,
    used: f64,
    fills: usize,
    objects: usize,
    spans: usize,
    spanned: usize,
    spans_max: usize,
}

/// SplitMix64.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.roll()) * bound as u128) >> 64) as usize
    }
}

/// The sizes that a mix puts, one after the other.
type Sizes = fn(&mut Dice, usize) -> usize;

const MIXES: [(&str, Sizes); 3] = [
    ("3274752", |_, _| BIG),
    ("3274752 + 658432", |_, index| if index.is_multiple_of(2) { BIG } else { SMALL }),
    ("4 KiB to 32 MiB", |dice, _| {
        (12.0 + 13.0 * (dice.roll() >> 11) as f64 / (1u64 << 53) as f64).exp2() as usize
    }),
];

fn main() -> std::io::Result<()> {
    let mut lines = Vec::new();
    for arena_gib in [1, 16] {
        for (mix, sizes) in MIXES {
            let mut tallies: Vec<Tally> = (0..SEEDS).map(|seed| live(arena_gib, sizes, seed)).collect();
            lines.push(line(mix, arena_gib, &mut tallies));
        }
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => print_table(&lines),
        ["--json", "-"] => println!("{}", json(&lines)),
        ["--json", path] => std::fs::write(path, json(&lines) + "\n")?,
        _ => return Err(std::io::Error::other("usage: allocator [--json -|FILE]")),
    }
    Ok(())
}

/// Fills an arena until a put is refused, evicts 5 % at random, fills again, and so on.
fn live(arena_gib: u64, sizes: Sizes, seed: u64) -> Tally {
    let (arena, mut dice) = (Arena::heap(arena_gib << 30), Dice(seed));
    let mut live: Vec<BufMut> = Vec::with_capacity(1 << 18);
    let mut tally = Tally::default();
    let mut index = 0;
    while tally.allocs < 60_000 {
        fill(
            &arena,
            &mut live,
            &mut tally,
            |dice| {
                index += 1;
                sizes(dice, index)
            },
            &mut dice,
        );
        tally.used += live.iter().map(BufMut::len).sum::<usize>() as f64 / arena.capacity_bytes() as f64;
        tally.fills += 1;
        tally.objects = live.len();
        for spans in live.iter().map(|buf| buf.raw_spans().len()) {
            tally.spans += spans;
            tally.spanned += 1;
            tally.spans_max = tally.spans_max.max(spans);
        }
        let victims = live.len().div_ceil(20);
        let victims: Vec<_> = (0..victims).map(|_| live.swap_remove(dice.below(live.len()))).collect();
        tally.frees += victims.len();
        tally.free += timed(|| drop(victims));
    }
    tally
}

/// Puts until one is refused; the sizes are rolled outside of the clock, in batches.
fn fill(
    arena: &Arena,
    live: &mut Vec<BufMut>,
    tally: &mut Tally,
    mut size: impl FnMut(&mut Dice) -> usize,
    dice: &mut Dice,
) {
    let mut full = false;
    while !full {
        let batch: [usize; 16] = std::array::from_fn(|_| size(dice));
        tally.alloc += timed(|| {
            for len in batch {
                tally.allocs += 1; // the refused one too: it is part of the price of a full arena
                let Some(buf) = arena.alloc(len) else {
                    full = true;
                    break;
                };
                live.push(buf);
            }
        });
    }
}

#[expect(clippy::disallowed_methods, reason = "a benchmark measures real time; no simulator runs it")]
fn timed(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

fn line(mix: &'static str, arena_gib: u64, tallies: &mut [Tally]) -> Line {
    let count = tallies.len() as f64;
    Line {
        mix,
        arena_gib,
        objects: tallies[0].objects,
        alloc_ns: median(tallies, |tally| tally.alloc.as_nanos() as f64 / tally.allocs as f64),
        free_ns: median(tallies, |tally| tally.free.as_nanos() as f64 / tally.frees as f64),
        utilisation: tallies.iter().map(|tally| tally.used / tally.fills as f64).sum::<f64>() / count,
        spans_mean: tallies.iter().map(|tally| tally.spans as f64 / tally.spanned as f64).sum::<f64>()
            / count,
        spans_max: tallies.iter().map(|tally| tally.spans_max).max().unwrap_or(0),
    }
}

fn median(tallies: &mut [Tally], of: impl Fn(&Tally) -> f64) -> f64 {
    tallies.sort_by(|a, b| of(a).total_cmp(&of(b)));
    of(&tallies[tallies.len() / 2])
}

fn print_table(lines: &[Line]) {
    println!("arena   objects  alloc ns  free ns  utilisation  spans mean  max  mix");
    for line in lines {
        println!(
            "{:>2} GiB {:>9} {:>9.1} {:>8.1} {:>12.4} {:>11.2} {:>4}  {}",
            line.arena_gib,
            line.objects,
            line.alloc_ns,
            line.free_ns,
            line.utilisation,
            line.spans_mean,
            line.spans_max,
            line.mix
        );
    }
}

fn json(lines: &[Line]) -> String {
    let object = |line: &Line| {
        format!(
            concat!(
                r#"{{"mix": "{}", "arena_gib": {}, "objects": {}, "alloc_ns": {:.1}, "free_ns": {:.1}, "#,
                r#""utilisation": {:.4}, "spans_mean": {:.2}, "spans_max": {}}}"#
            ),
            line.mix,
            line.arena_gib,
            line.objects,
            line.alloc_ns,
            line.free_ns,
            line.utilisation,
            line.spans_mean,
            line.spans_max
        )
    };
    format!("[{}]", lines.iter().map(object).collect::<Vec<_>>().join(", "))
}
