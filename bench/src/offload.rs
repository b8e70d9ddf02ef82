//! `bench offload`: a working set larger than DRAM goes down to SSD and comes back, beside the bare device.

mod bare;
mod cpu;
mod journal;
mod ledger;
mod options;
mod outcome;
mod read;
mod write;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use comfy_table::Table;
use comfy_table::presets::UTF8_BORDERS_ONLY;
use ebbtide_core::ByteSize;
use ebbtide_node::{Stats, Store};
use serde_json::Value;

use crate::diskstats::DiskStats;
use crate::fail::{Outcome, Verdict};
use crate::machine;
use crate::place::Place;
use crate::progress::Progress;
use crate::report::{Report, Sink};
use crate::stat::SAME_ARM_RANGE;
use crate::store_options;

use self::bare::{BareArm, Sweeps};
use self::journal::Journal;
use self::ledger::Ledger;
pub use self::options::OffloadOptions;
use self::options::Plan;
use self::outcome::Measured;
use self::read::{Keys, ReadBack, ReadPass};
use self::write::{BARE, SAME, STORE, WritePass, Written};

/// Runs the command.
pub(crate) fn run(options: &OffloadOptions) -> Outcome<Verdict> {
    if let Some(path) = &options.verify_journal {
        return journal::verify(options, path);
    }
    let plans = options.plans()?;
    let sink = Sink::open(options.json.as_deref())?;
    let mut reports = Vec::with_capacity(plans.len());
    for (number, plan) in plans.iter().enumerate() {
        if plans.len() > 1 {
            let (value, threads) = (ByteSize(plan.value), plan.threads);
            eprintln!("run {} of {}: value {value}, {threads} threads", number + 1, plans.len());
        }
        reports.push(run_one(plan)?);
    }
    let (report, table) = match reports.len() {
        1 => {
            let report = reports.remove(0);
            let table = report.table();
            (report, table)
        }
        _ => sweep(&reports),
    };
    sink.emit(&report.to_json(), &table)?;
    Ok(report.verdict())
}

/// One run from a place to put the store to its figures.
fn run_one(plan: &Plan) -> Outcome<Report> {
    let options = &plan.options;
    let mut place = Place::choose(options.store.dir.as_deref(), options.store.keep)?;
    let what = format!("--ssd {}, --bare {}", plan.ssd, ByteSize(plan.bare_bytes));
    place.needs(plan.ssd.0 + plan.bare_bytes + (64 << 20), &what)?;
    let progress = Progress::start();
    let mut journal = match &options.journal {
        Some(path) => Some(Journal::create(path, plan)?),
        None => None,
    };
    let mut session = Session::open(plan, &mut place, None, &progress)?;
    let disk = DiskStats::of(place.dir());
    let mut ledger = Ledger::new(plan.run, plan.value);
    let mut keys = Keys::new(plan);

    let mut written = session.write(plan, &ledger, &mut keys, journal.as_mut(), disk.as_ref(), &progress)?;
    let mut write_repeated = false;
    // A miss is repeated once with twice the rounds; the second result counts. Each half starts on an empty store.
    if journal.is_none() && place.owned() && missed(&written.rounds, plan.goals().write) {
        write_repeated = true;
        let mut halves: Option<Written> = None;
        for _ in 0..2 {
            let known = session.abandon(&progress);
            place.wipe()?;
            session = Session::open(plan, &mut place, Some(known), &progress)?;
            ledger = Ledger::new(plan.run, plan.value);
            let half = session.write(plan, &ledger, &mut keys, None, disk.as_ref(), &progress)?;
            match &mut halves {
                Some(first) => first.extend(half),
                None => halves = Some(half),
            }
        }
        written = halves.unwrap_or(written);
    }

    let mut read = session.read(plan, &ledger, &mut keys, disk.as_ref(), &progress, 1)?;
    let read_repeated = missed(&read.rounds, plan.goals().read);
    if read_repeated {
        read = session.read(plan, &ledger, &mut keys, disk.as_ref(), &progress, 2)?;
    }
    let (dram_us, ssd_us) = read::sample_latencies(&session.store, &ledger, plan)?;
    let absent = session.absent(&ledger, plan);
    let before_cpu = session.store.stats();
    let cpu = match options.cpu.is_on() && journal.is_none() {
        true => Some(cpu::measure(&session.store, &mut session.bare, plan, &ledger, &progress)?),
        false => None,
    };
    let measured = Measured {
        written,
        read,
        write_repeated,
        read_repeated,
        dram_us,
        ssd_us,
        cpu,
        absent,
        // The counters that explain absent objects: those at the time they were looked for.
        at_look: before_cpu,
        at_end: session.store.stats(),
        status: session.store.status().to_string(),
        ssd_usage_max_bytes: session.usage_max.load(Ordering::Relaxed),
    };
    let mut report = measured.report(plan, &ledger, &session.bare);
    report.set("machine", machine::facts(place.dir()));
    session.close(&progress)?;
    Ok(report)
}

/// True when noise decided, or the ratio is under its goal.
fn missed(rounds: &crate::stat::Rounds<3>, goal: f64) -> bool {
    !SAME_ARM_RANGE.contains(&rounds.ratio(SAME, BARE)) || rounds.ratio(STORE, BARE) < goal
}

/// An open store with the bare arm beside it.
struct Session {
    store: Store,
    bare: BareArm,
    usage_max: Arc<AtomicU64>,
}

impl Session {
    /// Opens a store and lays the bare file. `known`: what an earlier sweep found.
    fn open(plan: &Plan, place: &mut Place, known: Option<Sweeps>, progress: &Progress) -> Outcome<Session> {
        let mut config = plan.options.store.config(place.dir(), plan.dram, plan.ssd)?;
        // The bare arm takes its buffers from it.
        config.staging = Some(ByteSize(config.staging_bytes().max(bare::staging_bytes(plan.value))));
        let store = store_options::open(config, progress)?;
        place.note_memory();
        place.neighbours_share_device()?;
        let bare = BareArm::new(&store, &place.beside(".ebbtide-bare"), plan, known, progress)?;
        let usage_max = Arc::new(AtomicU64::new(0));
        let (watched, most) = (store.clone(), Arc::clone(&usage_max));
        progress.watch(Some(Box::new(move || {
            most.fetch_max(used_bytes(&watched.stats()), Ordering::Relaxed);
        })));
        Ok(Session { store, bare, usage_max })
    }

    fn write(
        &mut self,
        plan: &Plan,
        ledger: &Ledger,
        keys: &mut Keys,
        journal: Option<&mut Journal>,
        disk: Option<&DiskStats>,
        progress: &Progress,
    ) -> Outcome<Written> {
        let bare = &mut self.bare;
        let pass = WritePass { store: &self.store, bare, plan, ledger, keys, journal, disk, progress };
        let written = pass.run();
        self.usage_max.fetch_max(used_bytes(&self.store.stats()), Ordering::Relaxed);
        written
    }

    fn read(
        &mut self,
        plan: &Plan,
        ledger: &Ledger,
        keys: &mut Keys,
        disk: Option<&DiskStats>,
        progress: &Progress,
        times: usize,
    ) -> Outcome<ReadBack> {
        let bare = &mut self.bare;
        ReadPass { store: &self.store, bare, plan, ledger, keys, disk, progress }.run(times)
    }

    /// Ends without a clean stop; what the sweeps found stays good.
    fn abandon(self, progress: &Progress) -> Sweeps {
        progress.watch(None);
        self.bare.sweeps
    }

    fn close(self, progress: &Progress) -> Outcome<()> {
        progress.watch(None);
        let Session { store, bare, .. } = self;
        drop(bare);
        Ok(store.close()?)
    }

    /// How many objects of the run are not there: those that a read did not find, and those that no read asked for.
    fn absent(&self, ledger: &Ledger, plan: &Plan) -> u64 {
        const KEYS: u64 = 4096;
        let mut absent = ledger.found().absent;
        for start in (0..plan.objects).step_by(KEYS as usize) {
            let indexes: Vec<u64> = (start..(start + KEYS).min(plan.objects)).collect();
            let names: Vec<_> = indexes.iter().map(|index| ledger.key(*index)).collect();
            let names: Vec<&[u8]> = names.iter().map(|name| name.as_slice()).collect();
            let there = self.store.exists(&names);
            absent.extend(indexes.iter().zip(there).filter(|(_, there)| !there).map(|(index, _)| *index));
        }
        absent.len() as u64
    }
}

fn used_bytes(stats: &Stats) -> u64 {
    stats.tiers.iter().map(|tier| tier.used_bytes).sum()
}

/// The figures of the first run at the top, all runs in `runs`, and one line a run for people.
fn sweep(reports: &[Report]) -> (Report, String) {
    let mut report = Report::new("bench offload");
    let mut table = Table::new();
    table.load_style(UTF8_BORDERS_ONLY);
    let Some(first) = reports.first() else { return (report, String::new()) };
    report.adopt(first);
    report.set("machine", first.to_json()["machine"].clone());
    report.set("runs", reports.iter().map(Report::to_json).collect::<Vec<Value>>());
    for run in reports {
        let json = run.to_json();
        let name = format!("value {}, threads {}", json["config"]["value_bytes"], json["config"]["threads"]);
        if let Some(reason) = json["invalid_reason"].as_str() {
            report.void(format!("{name}: {reason}"));
        }
        if run.verdict() == Verdict::Wrong {
            report.wrong();
        }
    }
    table.set_header(first.rows().iter().map(|(label, _)| label.as_str()));
    for run in reports {
        table.add_row(run.rows().iter().map(|(_, value)| value.as_str()));
    }
    let text = format!("{table}\n{}", report.remarks());
    (report, text)
}
