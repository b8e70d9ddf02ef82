//! From what was measured to what is said.

use ebbtide_core::ByteSize;
use ebbtide_node::Stats;
use serde_json::json;

use super::bare::{BareArm, FLUSH_EVERY_BYTES};
use super::cpu::CpuCost;
use super::ledger::{Ledger, explain_absent};
use super::options::Plan;
use super::read::ReadBack;
use super::write::{BARE, SAME, STORE, Written};
use crate::report::{Report, number, shown};
use crate::stat::{Latencies, ROUNDS_MIN, Rounds, SAME_ARM_RANGE, median};

/// The least share of the SSD-served bytes that the device must have read.
const DEVICE_READS_SHARE_MIN: f64 = 0.95;
/// Slices shorter than this are remarked on.
const SLICE_SECONDS_MIN: f64 = 0.05;

/// All that a run measured.
pub(crate) struct Measured {
    pub(crate) written: Written,
    pub(crate) read: ReadBack,
    pub(crate) write_repeated: bool,
    pub(crate) read_repeated: bool,
    pub(crate) dram_us: Latencies,
    pub(crate) ssd_us: Latencies,
    pub(crate) cpu: Option<CpuCost>,
    pub(crate) absent: u64,
    pub(crate) at_look: Stats,
    pub(crate) at_end: Stats,
    pub(crate) status: String,
    pub(crate) ssd_usage_max_bytes: u64,
}

impl Measured {
    pub(crate) fn report(&self, plan: &Plan, ledger: &Ledger, bare: &BareArm) -> Report {
        let mut report = Report::new("bench offload");
        report.set("config", plan.to_json());
        report.set("status", self.status.as_str());
        report.row("value", ByteSize(plan.value).to_string());
        report.row("threads", plan.threads.to_string());
        self.speed(&mut report, bare);
        self.device(&mut report);
        self.latency(&mut report);
        self.objects(&mut report, plan, ledger);
        self.store(&mut report, plan);
        self.validity(&mut report, plan);
        report
    }

    fn speed(&self, report: &mut Report, bare: &BareArm) {
        let (written, read) = (&self.written, &self.read);
        let put = written.bytes as f64 / written.seconds / 1e9;
        let get = read.below_bytes as f64 / read.seconds / 1e9;
        report.measure("put.gb_per_s", put);
        report.measure("put.seconds", written.seconds);
        report.set("put.bytes", written.bytes);
        report.measure("get.ssd.gb_per_s", get);
        report.measure("get.ssd.seconds", read.seconds);
        report.set("get.ssd.bytes", read.below_bytes);
        report.set("get.dram.bytes", read.dram_bytes);
        for (name, rounds, slices, repeated) in [
            ("write", &written.rounds, &written.slice_seconds, self.write_repeated),
            ("read", &read.rounds, &read.slice_seconds, self.read_repeated),
        ] {
            report.measure(&format!("ratio.{name}"), rounds.ratio(STORE, BARE));
            report.measure(&format!("same_arm.{name}"), rounds.ratio(SAME, BARE));
            report.set(&format!("rounds.{name}"), rounds.len());
            report.set(&format!("repeated.{name}"), repeated);
            report.measure(&format!("slice_ms.{name}"), median(slices.iter().copied()) * 1e3);
            report.measure(&format!("slice.{name}_gb_per_s"), rounds.rate(STORE) / 1e9);
            report.measure(&format!("device.{name}_gb_per_s"), rounds.rate(BARE) / 1e9);
            report.set(&format!("rates.{name}.store"), rounds.rates(STORE));
            report.set(&format!("rates.{name}.bare"), rounds.rates(BARE));
            report.set(&format!("rates.{name}.same"), rounds.rates(SAME));
        }
        if self.at_end.tiers.iter().any(|tier| tier.segment_bytes != FLUSH_EVERY_BYTES) {
            report.note("segments are not of 64 MiB: store and bare arm flush at different bytes, so ratio.write is not comparable");
        }
        report.set("bare.write", bare.sweeps.writes.to_json());
        report.set("bare.read", bare.sweeps.reads.to_json());
        report.row("put GB/s", shown(put, 2));
        report.row("get from SSD GB/s", shown(get, 2));
        report.row("bare write GB/s", shown(written.rounds.rate(BARE) / 1e9, 2));
        report.row("bare read GB/s", shown(read.rounds.rate(BARE) / 1e9, 2));
        report.row("write ÷ bare", with_same(&written.rounds));
        report.row("read ÷ bare", with_same(&read.rounds));
    }

    fn device(&self, report: &mut Report) {
        let (written, read) = (&self.written, &self.read);
        let admitted = written.admitted_bytes as f64;
        let amplification = written.tier_written_bytes as f64 / admitted;
        report.measure("write_amplification", amplification);
        report.set("device.written_bytes", written.device_bytes);
        report.set("device.read_bytes", read.device_bytes);
        let by_device = written.device_bytes.map(|bytes| number(bytes as f64 / admitted));
        report.set("write_amplification_device", by_device);
        report.set("device.read_share", self.device_read_share().map(number));
        report.set("tier.admitted_value_bytes", written.admitted_bytes);
        report.set("tier.written_bytes", written.tier_written_bytes);
        report.set("tier.reinserted_value_bytes", written.reinserted_bytes);
        report.row("write amplification", shown(amplification, 3));
    }

    fn latency(&self, report: &mut Report) {
        report.set("latency_us.dram", self.dram_us.to_json());
        report.set("latency_us.ssd", self.ssd_us.to_json());
        let both = |latencies: &Latencies| {
            format!(
                "{} / {}",
                shown(latencies.percentile_us(50.0), 1),
                shown(latencies.percentile_us(99.0), 1)
            )
        };
        report.row("get µs p50 / p99, DRAM", both(&self.dram_us));
        report.row("get µs p50 / p99, SSD", both(&self.ssd_us));
        if let Some(cpu) = &self.cpu {
            report.set("cpu_us_per_op", cpu.to_json());
            let (read, write) = cpu.ratios();
            report.row("CPU ÷ bare, read / write", format!("{} / {}", shown(read, 2), shown(write, 2)));
        }
    }

    fn objects(&self, report: &mut Report, plan: &Plan, ledger: &Ledger) {
        let found = ledger.found();
        let (evicted, missing) = explain_absent(self.absent, &self.at_look.dropped_by_reason);
        report.set("objects", plan.objects);
        report.set("wrong_objects", found.wrong.len());
        report.set("missing_objects", missing);
        report.set("evicted_objects", evicted);
        report.set("already_stored_objects", ledger.already_stored());
        report.set("verified_bytes", ledger.verified_bytes());
        report.row("objects wrong / missing", format!("{} / {missing}", found.wrong.len()));
        report.row("objects evicted", evicted.to_string());
        found.words.iter().for_each(|words| report.note(words));
        if missing > 0 || !found.wrong.is_empty() {
            report.wrong();
        }
    }

    fn store(&self, report: &mut Report, plan: &Plan) {
        let stats = &self.at_end;
        report.set("ssd_usage_max_bytes", self.ssd_usage_max_bytes);
        report.set("accounted_bytes", stats.accounted_bytes);
        report.set("store.dropped", json!(stats.dropped_by_reason));
        report.set("store.puts_waited", stats.puts_waited);
        report.set("store.touches_dropped", stats.touches_dropped);
        report.set("store.promotions", stats.promotions);
        report.set("store.demoted_objects", stats.demoted);
        let degraded = stats.hot.degraded.iter().chain(stats.tiers.iter().flat_map(|tier| &tier.degraded));
        report.set("store.degraded", degraded.cloned().collect::<Vec<_>>());
        let segments =
            |count: fn(&ebbtide_core::TierUsage) -> u64| stats.tiers.iter().map(count).sum::<u64>();
        report.set("store.segments_sealed", segments(|tier| tier.segments_sealed));
        report.set("store.segments_reclaimed", segments(|tier| tier.segments_reclaimed));
        if self.ssd_usage_max_bytes > plan.ssd.0 {
            report.note(format!("SSD usage rose to {}, over --ssd", ByteSize(self.ssd_usage_max_bytes)));
            report.wrong();
        }
    }

    fn validity(&self, report: &mut Report, plan: &Plan) {
        if !plan.options.verify.is_on() {
            report.void("verification was skipped");
        }
        if let Some(share) = self.device_read_share().filter(|share| *share < DEVICE_READS_SHARE_MIN) {
            let share = shown(share, 2);
            report.void(format!("the device read only {share} of the bytes that the SSD tier served"));
        }
        for (name, rounds) in [("write", &self.written.rounds), ("read", &self.read.rounds)] {
            let same = rounds.ratio(SAME, BARE);
            if rounds.len() < ROUNDS_MIN {
                report.void(format!("{} {name} rounds, {ROUNDS_MIN} are needed", rounds.len()));
            } else if !SAME_ARM_RANGE.contains(&same) {
                report.void(format!("noise: the bare {name} arm against itself gives {}", shown(same, 3)));
            }
        }
        for (name, slices) in [("write", &self.written.slice_seconds), ("read", &self.read.slice_seconds)] {
            let seconds = median(slices.iter().copied());
            if seconds < SLICE_SECONDS_MIN {
                let ms = shown(seconds * 1e3, 0);
                report.note(format!("{name} slices took {ms} ms: a larger --total makes them steadier"));
            }
        }
    }

    fn device_read_share(&self) -> Option<f64> {
        let served = self.read.below_bytes as f64;
        self.read.device_bytes.map(|bytes| bytes as f64 / served).filter(|share| share.is_finite())
    }
}

/// "0.97 (bare ÷ bare 1.01)".
fn with_same(rounds: &Rounds<3>) -> String {
    format!("{} (bare ÷ itself {})", shown(rounds.ratio(STORE, BARE), 3), shown(rounds.ratio(SAME, BARE), 3))
}
