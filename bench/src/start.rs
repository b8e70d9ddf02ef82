//! `bench start`: how soon a store with many objects answers, after a clean stop and after a kill, and what they cost in
//! memory.
//!
//! Each start is a process of its own: this program again, with a hidden option. It tells its figures on one line.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use clap::{Args, ValueEnum};
use ebbtide_core::ByteSize;
use ebbtide_node::{Config, Prealloc, Store};
use serde::{Deserialize, Serialize};

use crate::body::{KeyId, fill, first_wrong};
use crate::clock::{self, Stopwatch};
use crate::dice::Dice;
use crate::fail::{Failure, Outcome, Verdict};
use crate::machine;
use crate::place::Place;
use crate::progress::{Progress, Unit};
use crate::report::{Report, Sink, shown};
use crate::store_options::{self, StoreOptions};
use crate::threads::on_threads;

const DRAM: ByteSize = ByteSize(256 << 20);
const KEY_BYTES: usize = 136;
const SAMPLE: u64 = 2000;
const THREADS: usize = 2;

/// Measures how soon a store with many objects on SSD answers its first lookup, and the memory that its index takes.
#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct StartOptions {
    /// Objects, with keys of 136 bytes
    #[arg(long, value_name = "COUNT", default_value_t = 1_000_000)]
    objects: u64,
    /// Bytes of a value
    #[arg(long, value_name = "SIZE", default_value = "4KiB")]
    value: ByteSize,
    /// Write the figures as one JSON object; with - to standard output, and the table to standard error
    #[arg(long, value_name = "FILE|-")]
    json: Option<PathBuf>,
    /// What a process that this command started is to do
    #[arg(long, hide = true, value_enum, requires_all = ["child_dir", "child_run"])]
    child: Option<Role>,
    #[arg(long, hide = true)]
    child_dir: Option<PathBuf>,
    #[arg(long, hide = true)]
    child_run: Option<u64>,
    #[command(flatten)]
    store: StoreOptions,
}

const EXAMPLES: &str = "\
Examples:
  ebbtide bench start
  ebbtide bench start --objects 1000000 --value 4KiB --dir /mnt/nvme/kv --dram 256MiB --ssd 6GiB --json -

Defaults: --dram 256MiB, --ssd what the objects need.
Exit codes: 0 good, 1 objects wrong or missing or the run broke off, 2 wrong use, 3 the figures do not count.";

/// What a started process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Role {
    /// Opens, looks, closes.
    Look,
    /// Opens, puts some more, flushes, says so and waits to be killed.
    Kill,
    /// Opens a store without objects, for comparison.
    Empty,
}

/// What a started process says.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Word {
    open_seconds: f64,
    first_lookup_seconds: f64,
    anonymous_bytes: u64,
    entries: u64,
    sampled: u64,
    missing: u64,
    wrong: u64,
    written: u64,
}

/// Runs the command.
pub(crate) fn run(options: &StartOptions) -> Outcome<Verdict> {
    if let (Some(role), Some(dir), Some(run)) = (options.child, &options.child_dir, options.child_run) {
        return child(options, role, dir, run);
    }
    options.check()?;
    let sink = Sink::open(options.json.as_deref())?;
    let mut place = Place::choose(options.store.dir.as_deref(), options.store.keep)?;
    place.needs(options.ssd().0, &format!("--ssd {}", options.ssd()))?;
    let (run, progress) = (clock::wall_ns(), Progress::start());
    let store = store_options::open(options.config(place.dir())?, &progress)?;
    place.note_memory();
    progress.stage("write", options.objects * options.value.0, Unit::Bytes);
    options.put(&store, run, 0, options.objects, &progress)?;
    progress.stage("close", 0, Unit::Things);
    store.close()?;
    let empty_dir = place.beside(".empty");

    progress.stage("start after a clean stop", 0, Unit::Things);
    let clean = ask(Role::Look, place.dir(), run, 0)?;
    progress.stage("start of an empty store", 0, Unit::Things);
    let empty = ask(Role::Empty, &empty_dir, run, 0)?;
    progress.stage("kill", 0, Unit::Things);
    let extra = kill(place.dir(), run)?;
    progress.stage("start after a kill", 0, Unit::Things);
    let killed = ask(Role::Look, place.dir(), run, extra)?;
    drop(progress);

    let mut report = Report::new("bench start");
    report.set("machine", machine::facts(place.dir()));
    report.set("config", options.store.to_json(options.dram(), options.ssd()));
    report.set("config.objects", options.objects);
    report.set("config.value_bytes", options.value.0);
    report.set("config.key_bytes", KEY_BYTES);
    let each =
        |word: &Word| word.anonymous_bytes.saturating_sub(empty.anonymous_bytes) as f64 / word.entries as f64;
    for (name, word) in [("clean", &clean), ("kill", &killed)] {
        report.measure(&format!("start.{name}_s"), word.first_lookup_seconds);
        report.measure(&format!("start.{name}_open_s"), word.open_seconds);
        report.measure(&format!("index_bytes_per_entry_after.{name}"), each(word));
        report.set(&format!("entries_after.{name}"), word.entries);
        report.row(format!("first lookup after a {name} stop, s"), shown(word.first_lookup_seconds, 2));
    }
    report.set("entries", clean.entries);
    report.measure("index_bytes_per_entry", each(&clean));
    report.set("sampled_objects", clean.sampled + killed.sampled);
    report.set("missing_objects", clean.missing + killed.missing);
    report.set("wrong_objects", clean.wrong + killed.wrong);
    report.row("entries", clean.entries.to_string());
    report.row("index bytes an entry", shown(each(&clean), 1));
    let (wrong, missing) = (clean.wrong + killed.wrong, clean.missing + killed.missing);
    report.row("objects wrong / missing, of the sample", format!("{wrong} / {missing}"));
    if clean.entries < options.objects {
        report
            .note(format!("{} of {} objects are there: --ssd is too small", clean.entries, options.objects));
        report.void("not all objects are there");
    }
    if wrong + missing > 0 {
        report.wrong();
    }
    sink.emit(&report.to_json(), &report.table())?;
    Ok(report.verdict())
}

impl StartOptions {
    fn check(&self) -> Outcome<()> {
        if self.objects == 0 || self.value.0 == 0 || self.value.0 > self.dram().0 / 16 {
            let (value, dram) = (self.value, self.dram());
            return Err(Failure::usage(format!(
                "--objects and --value: give 1 or more; a value of {value} must be at most a 16th of --dram {dram}"
            )));
        }
        Ok(())
    }

    fn dram(&self) -> ByteSize {
        self.store.dram.unwrap_or(DRAM)
    }

    /// Room for the objects, their headers and what reclaim keeps free.
    fn ssd(&self) -> ByteSize {
        const STEP: u64 = 64 << 20;
        let bytes = self.objects * (self.value.0.next_multiple_of(4096) + 512);
        self.store
            .ssd
            .unwrap_or(ByteSize((bytes + bytes / 8 + 8 * STEP).next_multiple_of(STEP)).max(self.dram()))
    }

    fn config(&self, dir: &Path) -> Outcome<Config> {
        self.store.config(dir, self.dram(), self.ssd())
    }

    /// Puts objects `start` to `end`.
    fn put(
        &self,
        store: &Store,
        run: u64,
        start: u64,
        end: u64,
        progress: &Progress,
    ) -> ebbtide_core::Result<()> {
        let next = AtomicU64::new(start);
        let putter = || {
            let mut value = vec![0; self.value.0 as usize];
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= end {
                    return Ok(());
                }
                fill(KeyId { run, index }, &mut value);
                store.put(&long_key(run, index), &value)?;
                progress.add(self.value.0);
            }
        };
        on_threads(THREADS, putter).into_iter().collect()
    }

    /// How many objects a process that will be killed puts beforehand.
    fn extra(&self) -> u64 {
        (self.objects / 100).clamp(16, 100_000)
    }
}

/// A key of 136 bytes, as long as those of serving engines: digits and a tail that is always the same.
fn long_key(run: u64, index: u64) -> [u8; KEY_BYTES] {
    let mut key = [b'.'; KEY_BYTES];
    let short = KeyId { run, index }.bytes();
    key[..short.len()].copy_from_slice(&short);
    key
}

/// Starts this program again with the same options, as `role`.
fn spawn(role: Role, dir: &Path, run: u64, extra: u64) -> Outcome<Child> {
    let fail = |error: std::io::Error| Failure::Broken(format!("start this program again: {error}"));
    let program = std::env::current_exe().map_err(fail)?;
    let name = role.to_possible_value().map(|value| value.get_name().to_string()).unwrap_or_default();
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).args(["--child", &name]).arg("--child-dir").arg(dir);
    command.args(["--child-run", &run.to_string()]).env(EXTRA, extra.to_string());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map_err(fail)
}

/// How many objects behind the usual ones a process is to look for.
const EXTRA: &str = "EBBTIDE_BENCH_EXTRA";

/// Reads the one line that a started process says.
fn listen(child: &mut Child) -> Outcome<Word> {
    let mut line = String::new();
    if let Some(stdout) = child.stdout.take() {
        let read = BufReader::new(stdout).read_line(&mut line);
        read.map_err(|error| Failure::Broken(format!("listen to a started process: {error}")))?;
    }
    serde_json::from_str(&line)
        .map_err(|_| Failure::Broken("a started process broke off; see above".to_string()))
}

fn ask(role: Role, dir: &Path, run: u64, extra: u64) -> Outcome<Word> {
    let mut child = spawn(role, dir, run, extra)?;
    let word = listen(&mut child);
    let end =
        child.wait().map_err(|error| Failure::Broken(format!("wait for a started process: {error}")))?;
    let word = word?;
    if !end.success() {
        return Err(Failure::Broken(format!("a started process ended with {end}")));
    }
    Ok(word)
}

/// Has a process put and flush, and kills it. Returns how many objects it put.
fn kill(dir: &Path, run: u64) -> Outcome<u64> {
    let mut child = spawn(Role::Kill, dir, run, 0)?;
    let word = listen(&mut child);
    // SIGKILL: nothing in the process runs any more.
    let killed = child.kill().and_then(|()| child.wait());
    killed.map_err(|error| Failure::Broken(format!("kill a started process: {error}")))?;
    word.map(|word| word.written)
}

fn child(options: &StartOptions, role: Role, dir: &Path, run: u64) -> Outcome<Verdict> {
    let mut config = options.config(dir)?;
    if role == Role::Empty {
        config.prealloc = Prealloc::Sparse;
    }
    let watch = Stopwatch::start();
    let store = Store::open(config).map_err(Failure::opening)?;
    let open_seconds = watch.seconds();
    let first = store.get(&long_key(run, 0))?;
    let mut word = Word { open_seconds, first_lookup_seconds: watch.seconds(), ..Word::default() };
    drop(first);
    word.anonymous_bytes = machine::anonymous_bytes().unwrap_or_default();
    word.entries = store.stats().entries;
    match role {
        Role::Empty => {}
        Role::Look => look(options, &store, run, &mut word)?,
        Role::Kill => {
            let (start, extra) = (options.objects, options.extra());
            options.put(&store, run, start, start + extra, &Progress::silent())?;
            store.flush()?;
            word.written = extra;
            say(&word)?;
            clock::sleep(Duration::from_secs(60));
            return Err(Failure::Broken("was to be killed and was not".to_string()));
        }
    }
    store.close()?;
    say(&word)?;
    Ok(Verdict::Good)
}

fn say(word: &Word) -> Outcome<()> {
    let mut text = serde_json::to_string(word).expect("a word is numbers");
    text.push('\n');
    let mut stdout = std::io::stdout();
    let said = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    said.map_err(|error| Failure::Broken(format!("tell the figures: {error}")))
}

/// Reads a sample of the objects, and all that a killed process had flushed.
fn look(options: &StartOptions, store: &Store, run: u64, word: &mut Word) -> Outcome<()> {
    let extra: u64 = std::env::var(EXTRA).ok().and_then(|text| text.parse().ok()).unwrap_or_default();
    let mut dice = Dice::new(run);
    let sample = (0..SAMPLE).map(|_| dice.below(options.objects));
    for index in sample.chain(options.objects..options.objects + extra) {
        word.sampled += 1;
        match store.get(&long_key(run, index))? {
            None => word.missing += 1,
            Some(hit) => {
                let right = hit.object.length() == options.value.0
                    && first_wrong(KeyId { run, index }, hit.object.value.spans()).is_none();
                word.wrong += u64::from(!right);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_keys_differ_and_have_their_length() {
        assert_eq!(long_key(1, 2).len(), 136);
        assert_ne!(long_key(1, 2), long_key(1, 3));
        assert_ne!(long_key(1, 2), long_key(2, 2));
    }
}
