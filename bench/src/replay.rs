//! `bench replay`: a request trace against the store, beside exact LRU and Belady.
//!
//! Of a request's blocks the leading present run is read and counts as hits; present blocks behind the first miss are
//! touched, not counted; then the missing ones are put, in order.

use std::ops::AddAssign;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use ebbtide_core::ByteSize;
use ebbtide_node::{Served, Stats, Store};
use serde_json::json;

use crate::body::{KeyBytes, KeyId, fill, first_wrong};
use crate::clock;
use crate::fail::{Failure, Outcome, Verdict};
use crate::machine;
use crate::oracle::{Blocks, Tally};
use crate::place::Place;
use crate::progress::{Progress, Unit};
use crate::report::{Report, Sink, number, shown};
use crate::stat::Latencies;
use crate::store_options::{self, StoreOptions};
use crate::threads::on_threads;
use crate::trace::{self, BLOCK_TOKENS, Request};

const DRAM: ByteSize = ByteSize(160 << 20);
const SSD: ByteSize = ByteSize(0);
/// Blocks that one get_many asks for, at most, and the share of DRAM that they may hold.
const BATCH_MAX: u64 = 16;
const BATCH_DRAM_SHARE: u64 = 16;

/// Replays a trace of requests and tells what was hit, beside exact LRU and Belady with the same room.
#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct ReplayOptions {
    /// Trace, one {timestamp, input_length, output_length, hash_ids} a line, 512 tokens a block. Without it one is made
    #[arg(value_name = "TRACE.jsonl")]
    trace: Option<PathBuf>,
    /// KV bytes of one token; a block has 512 tokens
    #[arg(long, value_name = "SIZE", default_value = "32")]
    bytes_per_token: ByteSize,
    /// Threads that serve requests; with one the order is the trace's
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    threads: usize,
    /// Keep to the trace's timestamps, X times as fast [default: each request as soon as the one before is done]
    #[arg(long, value_name = "X")]
    speed: Option<f64>,
    /// Requests at most [default: all of a file, 4000 without one]
    #[arg(long, value_name = "COUNT")]
    requests: Option<usize>,
    /// Seed of the trace that is made without a file
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,
    /// Write the figures as one JSON object; with - to standard output, and the table to standard error
    #[arg(long, value_name = "FILE|-")]
    json: Option<PathBuf>,
    #[command(flatten)]
    store: StoreOptions,
}

const EXAMPLES: &str = "\
Examples:
  ebbtide bench replay
  ebbtide bench replay trace.jsonl --bytes-per-token 32 --dram 160MiB --ssd 0 --policy lru --threads 1
  ebbtide bench replay trace.jsonl --dram 512MiB --ssd 4GiB --threads 4 --speed 50 --json -

Defaults: --dram 160MiB --ssd 0.
Exit codes: 0 good, 1 blocks were wrong or the run broke off, 2 wrong use.";

/// Runs the command.
pub(crate) fn run(options: &ReplayOptions) -> Outcome<Verdict> {
    let (dram, ssd) = (options.store.dram.unwrap_or(DRAM), options.store.ssd.unwrap_or(SSD));
    let block_bytes = options.check(dram)?;
    let requests = match &options.trace {
        Some(path) => trace::read(path, options.requests.unwrap_or(usize::MAX))?,
        None => trace::converse(options.seed, options.requests.unwrap_or(4000)),
    };
    let sink = Sink::open(options.json.as_deref())?;
    let place = Place::choose(options.store.dir.as_deref(), options.store.keep)?;
    place.needs(ssd.0, &format!("--ssd {ssd}"))?;
    let progress = Progress::start();
    let store = store_options::open(options.store.config(place.dir(), dram, ssd)?, &progress)?;
    place.note_memory();
    let before = store.stats();
    progress.stage("replay", requests.len() as u64, Unit::Things);
    let replay = Replay {
        store: &store,
        requests: &requests,
        run: clock::wall_ns(),
        block_bytes,
        batch: (dram.0 / BATCH_DRAM_SHARE / block_bytes).clamp(1, BATCH_MAX) as usize,
        speed: options.speed,
        start: clock::now(),
        next: AtomicUsize::new(0),
        progress: &progress,
    };
    let mut sum = Sum::new();
    for part in on_threads(options.threads, || replay.serve()) {
        sum += part?;
    }
    let seconds = clock::now().duration_since(replay.start).as_secs_f64();
    store.quiesce();
    let after = store.stats();
    progress.stage("LRU and Belady", 0, Unit::Things);
    let room = Room::of(&after, block_bytes);
    let blocks = Blocks::new(requests.iter().map(|request| request.hash_ids.as_slice()));
    let oracles = Oracles { lru: blocks.lru(room.blocks), belady: blocks.belady(room.blocks), room };
    store.close()?;
    drop(progress);

    let mut report = Report::new("bench replay");
    report.set("machine", machine::facts(&place.existing()));
    report.set("config", options.store.to_json(dram, ssd));
    report.set("config.trace", options.trace.as_ref().map(|path| path.display().to_string()));
    report.set("config.seed", options.seed);
    report.set("config.threads", options.threads);
    report.set("config.speed", options.speed);
    report.set("config.bytes_per_token", options.bytes_per_token.0);
    report.set("config.block_bytes", block_bytes);
    report.set("requests", requests.len());
    report.set("blocks.distinct", blocks.distinct());
    sum.report(&mut report, seconds, block_bytes);
    oracles.report(&mut report);
    written(&mut report, &before, &after, sum.hits() * block_bytes, sum.hits_below * block_bytes);
    sink.emit(&report.to_json(), &report.table())?;
    Ok(report.verdict())
}

impl ReplayOptions {
    /// Checks the numbers; the bytes of a block.
    fn check(&self, dram: ByteSize) -> Outcome<u64> {
        let refuse = |message: String| Err(Failure::usage(message));
        if !(1..=1024).contains(&self.threads) {
            return refuse(format!("--threads {}: give 1 to 1024", self.threads));
        }
        if self.speed.is_some_and(|speed| !(speed > 0.0 && speed.is_finite())) {
            return refuse(format!("--speed {}: give more than 0", self.speed.unwrap_or_default()));
        }
        if self.requests == Some(0) {
            return refuse("--requests 0: give 1 or more".to_string());
        }
        let block_bytes = self.bytes_per_token.0.saturating_mul(BLOCK_TOKENS);
        if block_bytes == 0 || block_bytes > dram.0 / 16 {
            let (token, block) = (self.bytes_per_token, ByteSize(block_bytes));
            return refuse(format!(
                "--bytes-per-token {token}: a block of {block} must be at most a 16th of --dram {dram}"
            ));
        }
        Ok(block_bytes)
    }
}

/// What all threads of a replay share.
struct Replay<'a> {
    store: &'a Store,
    requests: &'a [Request],
    run: u64,
    block_bytes: u64,
    batch: usize,
    speed: Option<f64>,
    start: Instant,
    next: AtomicUsize,
    progress: &'a Progress,
}

/// What one thread saw, or all.
struct Sum {
    asked: u64,
    hits_dram: u64,
    hits_below: u64,
    touched: u64,
    put: u64,
    wrong: u64,
    dram: Latencies,
    below: Latencies,
    puts: Latencies,
    lag: Latencies,
    words: Vec<String>,
}

impl Replay<'_> {
    /// Serves requests until there are none left.
    fn serve(&self) -> ebbtide_core::Result<Sum> {
        let mut sum = Sum::new();
        let mut value = vec![0; self.block_bytes as usize];
        while let Some(request) = self.requests.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            if let Some(speed) = self.speed {
                sum.lag.record(self.wait_for(request.timestamp / speed));
            }
            self.request(request, &mut value, &mut sum).inspect_err(|_| {
                self.next.fetch_max(self.requests.len(), Ordering::Relaxed);
            })?;
            self.progress.add(1);
        }
        Ok(sum)
    }

    /// Waits until `due_ms` after the start; returns by how much that had passed already.
    fn wait_for(&self, due_ms: f64) -> Duration {
        let due = Duration::from_secs_f64(due_ms / 1e3);
        let passed = clock::now().duration_since(self.start);
        if let Some(left) = due.checked_sub(passed) {
            clock::sleep(left);
        }
        clock::now().duration_since(self.start).saturating_sub(due)
    }

    fn request(&self, request: &Request, value: &mut [u8], sum: &mut Sum) -> ebbtide_core::Result<()> {
        let names: Vec<KeyBytes> = request.hash_ids.iter().map(|id| self.id(*id).bytes()).collect();
        let names: Vec<&[u8]> = names.iter().map(|name| name.as_slice()).collect();
        sum.asked += names.len() as u64;
        let mut present = self.store.exists(&names);
        let run = present.iter().take_while(|present| **present).count();
        // A block of the run may be gone by the time it is read: the run ends there.
        let read = self.read(&request.hash_ids[..run], &names[..run], sum)?;
        present[read..run].fill(false);
        let behind: Vec<&[u8]> = (read..names.len()).filter(|at| present[*at]).map(|at| names[at]).collect();
        if !behind.is_empty() {
            let touched = self.store.touch(&behind);
            sum.touched += touched.iter().filter(|there| **there).count() as u64;
        }
        for (at, id) in request.hash_ids.iter().enumerate().filter(|(at, _)| !present[*at]) {
            fill(self.id(*id), value);
            let start = clock::now();
            self.store.put(names[at], value)?;
            sum.puts.record(clock::now().duration_since(start));
            sum.put += 1;
        }
        Ok(())
    }

    /// Reads the leading run in batches; returns how many blocks of it were there.
    fn read(&self, ids: &[u64], names: &[&[u8]], sum: &mut Sum) -> ebbtide_core::Result<usize> {
        let mut read = 0;
        for (ids, names) in ids.chunks(self.batch).zip(names.chunks(self.batch)) {
            let start = clock::now();
            let answers = self.store.get_many(names);
            let time = clock::now().duration_since(start);
            let mut hits = Vec::with_capacity(answers.len());
            for answer in answers {
                let Some(hit) = answer? else { break };
                hits.push(hit);
            }
            read += hits.len();
            sum.time(time, &hits.iter().map(|hit| hit.tier).collect::<Vec<_>>());
            for (id, hit) in ids.iter().zip(&hits) {
                self.verify(*id, &hit.object, sum);
            }
            if hits.len() < names.len() {
                break;
            }
        }
        Ok(read)
    }

    fn verify(&self, id: u64, object: &ebbtide_core::Object, sum: &mut Sum) {
        let wrong = first_wrong(self.id(id), object.value.spans());
        if object.length() != self.block_bytes || wrong.is_some() {
            sum.wrong += 1;
            let at = wrong.unwrap_or_default();
            sum.words.push(format!("block {id}: wrong from byte {at} on, {} bytes", object.length()));
        }
    }

    fn id(&self, block: u64) -> KeyId {
        KeyId { run: self.run, index: block }
    }
}

impl Sum {
    fn new() -> Self {
        Sum {
            asked: 0,
            hits_dram: 0,
            hits_below: 0,
            touched: 0,
            put: 0,
            wrong: 0,
            dram: Latencies::new(),
            below: Latencies::new(),
            puts: Latencies::new(),
            lag: Latencies::new(),
            words: Vec::new(),
        }
    }

    /// Books one batch. Of a batch that was all in DRAM each block took its share; in one that was not, each block from
    /// below took as long as the batch, since that is when it could be used.
    fn time(&mut self, time: Duration, tiers: &[Served]) {
        let below = tiers.iter().filter(|tier| **tier != Served::Dram).count();
        self.hits_below += below as u64;
        self.hits_dram += (tiers.len() - below) as u64;
        if below == 0 && !tiers.is_empty() {
            let share = time / tiers.len() as u32;
            tiers.iter().for_each(|_| self.dram.record(share));
        }
        (0..below).for_each(|_| self.below.record(time));
    }

    fn hits(&self) -> u64 {
        self.hits_dram + self.hits_below
    }

    fn report(&self, report: &mut Report, seconds: f64, block_bytes: u64) {
        let rate = |hits: u64| Tally { hits, asked: self.asked }.rate();
        report.measure("hit_rate.total", rate(self.hits()));
        report.measure("hit_rate.dram", rate(self.hits_dram));
        report.measure("hit_rate.ssd", rate(self.hits_below));
        report.set("blocks.asked", self.asked);
        report.set("blocks.hit_dram", self.hits_dram);
        report.set("blocks.hit_ssd", self.hits_below);
        report.set("blocks.touched", self.touched);
        report.set("blocks.put", self.put);
        report.measure("seconds", seconds);
        report.measure("put.gb_per_s", (self.put * block_bytes) as f64 / seconds / 1e9);
        report.measure("get.gb_per_s", (self.hits() * block_bytes) as f64 / seconds / 1e9);
        report.set("latency_us.dram", self.dram.to_json());
        report.set("latency_us.ssd", self.below.to_json());
        report.set("latency_us.put", self.puts.to_json());
        report.set("wrong_objects", self.wrong);
        let lag = |percent| number(self.lag.percentile_us(percent) / 1e3);
        report.set("lag_ms", json!({"p50": lag(50.0), "p99": lag(99.0), "max": lag(100.0)}));
        report.row("blocks asked for", self.asked.to_string());
        report.row("hit rate", shown(rate(self.hits()), 4));
        report.row(
            "  from DRAM / SSD",
            format!("{} / {}", shown(rate(self.hits_dram), 4), shown(rate(self.hits_below), 4)),
        );
        let both = |times: &Latencies| {
            format!("{} / {}", shown(times.percentile_us(50.0), 1), shown(times.percentile_us(99.0), 1))
        };
        report.row("get µs p50 / p99, DRAM", both(&self.dram));
        report.row("get µs p50 / p99, SSD", both(&self.below));
        report.row("put µs p50 / p99", both(&self.puts));
        if self.lag.count() > 0 {
            let (p99, max) = (self.lag.percentile_us(99.0) / 1e3, self.lag.percentile_us(100.0) / 1e3);
            report.row("lag ms p99 / max", format!("{} / {}", shown(p99, 1), shown(max, 1)));
        }
        report.row("blocks wrong", self.wrong.to_string());
        self.words.iter().take(5).for_each(|words| report.note(words));
        if self.wrong > 0 {
            report.wrong();
        }
    }
}

impl AddAssign for Sum {
    fn add_assign(&mut self, other: Sum) {
        self.asked += other.asked;
        self.hits_dram += other.hits_dram;
        self.hits_below += other.hits_below;
        self.touched += other.touched;
        self.put += other.put;
        self.wrong += other.wrong;
        self.dram.add(&other.dram);
        self.below.add(&other.below);
        self.puts.add(&other.puts);
        self.lag.add(&other.lag);
        self.words.extend(other.words);
    }
}

/// How many blocks had room: the most that were resident, and what the tiers below can hold.
struct Room {
    hot_blocks: u64,
    blocks: u64,
}

impl Room {
    fn of(stats: &Stats, block_bytes: u64) -> Room {
        const PAGE_BYTES: u64 = 4096;
        let bytes: u64 = stats.tiers.iter().map(|tier| tier.accounted_bytes).sum();
        let hot_blocks = stats.hot_objects_peak;
        Room { hot_blocks, blocks: hot_blocks + bytes / block_bytes.next_multiple_of(PAGE_BYTES) }
    }
}

struct Oracles {
    lru: Tally,
    belady: Tally,
    room: Room,
}

impl Oracles {
    fn report(&self, report: &mut Report) {
        report.measure("lru_hit_rate", self.lru.rate());
        report.measure("belady_hit_rate", self.belady.rate());
        report.set("capacity_blocks.dram", self.room.hot_blocks);
        report.set("capacity_blocks.total", self.room.blocks);
        report.row("exact LRU", shown(self.lru.rate(), 4));
        report.row("Belady", shown(self.belady.rate(), 4));
        report.row("blocks resident at most", self.room.hot_blocks.to_string());
        report.row("blocks with room in all", self.room.blocks.to_string());
    }
}

fn written(report: &mut Report, before: &Stats, after: &Stats, hit_bytes: u64, hit_bytes_below: u64) {
    let sum = |stats: &Stats| stats.tiers.iter().map(|tier| tier.written_bytes).sum::<u64>();
    let bytes = sum(after) - sum(before);
    let per = |hits: u64| if hits == 0 { f64::NAN } else { bytes as f64 / hits as f64 };
    report.set("ssd.written_bytes", bytes);
    report.measure("ssd.written_per_hit_byte", per(hit_bytes));
    report.measure("ssd.written_per_ssd_hit_byte", per(hit_bytes_below));
    report.set("store.dropped", json!(after.dropped_by_reason));
    report.set("store.touches_dropped", after.touches_dropped);
    report.set("store.puts_waited", after.puts_waited);
    if !after.tiers.is_empty() {
        report.row("SSD bytes written a byte hit", shown(per(hit_bytes), 3));
    }
}
