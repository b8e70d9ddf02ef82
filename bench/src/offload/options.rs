//! What `bench offload` can be told, and what follows from it.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use ebbtide_core::ByteSize;
use serde_json::{Value, json};

use crate::clock;
use crate::fail::{Failure, Outcome};
use crate::machine;
use crate::stat::ROUNDS_MIN;
use crate::store_options::{StoreOptions, Switch};

const DRAM: ByteSize = ByteSize(512 << 20);
const SSD: ByteSize = ByteSize(3 << 30);
const MIB: u64 = 1 << 20;
/// More are not used unless told to.
const THREADS_MAX: usize = 16;
/// The bare arm's file: no larger than this, no smaller than the least.
const BARE_BYTES_MAX: u64 = 1 << 30;
const BARE_BYTES_MIN: u64 = 128 * MIB;

/// Writes more than DRAM holds, reads it all back, checks every byte, and sets it beside the bare device.
#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct OffloadOptions {
    /// Bytes of a value; a list runs each
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', default_value = "1MiB")]
    pub(crate) value: Vec<ByteSize>,
    /// Bytes of values in all
    #[arg(long, value_name = "SIZE", default_value = "2.25GiB")]
    pub(crate) total: ByteSize,
    /// Threads that put and read; a list runs each [default: two a processor, 16 at most]
    #[arg(long, value_name = "COUNT,…", value_delimiter = ',')]
    pub(crate) threads: Vec<usize>,
    /// Keys of one get_many [default: 2 to 64, by value and threads]
    #[arg(long, value_name = "COUNT")]
    pub(crate) batch: Option<usize>,
    /// Rounds of slices, at least; fewer than 21 make the figures void [default: 21, and 31 for reads of 1 MiB and more]
    #[arg(long, value_name = "COUNT")]
    pub(crate) rounds: Option<usize>,
    /// Which keys are read: each once in random order, or some much more often than others
    #[arg(long, value_enum, default_value = "uniform")]
    pub(crate) reads: Reads,
    /// How much more often: the exponent of --reads zipf
    #[arg(long, value_name = "EXPONENT", default_value_t = 0.99)]
    pub(crate) zipf: f64,
    /// Bytes of the bare arm's file [default: --total, between 128MiB and 1GiB]
    #[arg(long, value_name = "SIZE")]
    pub(crate) bare: Option<ByteSize>,
    /// Check every byte that was read; off makes the figures void
    #[arg(long, value_enum, default_value = "on")]
    pub(crate) verify: Switch,
    /// Measure CPU time per operation too
    #[arg(long, value_enum, default_value = "on")]
    pub(crate) cpu: Switch,
    /// Seed of keys and orders [default: drawn]
    #[arg(long, value_name = "NUMBER")]
    pub(crate) seed: Option<u64>,
    /// Flush each 64 MiB of puts and append the range to FILE
    #[arg(long, value_name = "FILE", conflicts_with = "verify_journal")]
    pub(crate) journal: Option<PathBuf>,
    /// Write nothing: open the store again and check each object that FILE names
    #[arg(long, value_name = "FILE", requires = "dir")]
    pub(crate) verify_journal: Option<PathBuf>,
    /// Write the figures as one JSON object; with - to standard output, and the table to standard error
    #[arg(long, value_name = "FILE|-")]
    pub(crate) json: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) store: StoreOptions,
}

const EXAMPLES: &str = "\
Examples:
  ebbtide bench offload
  ebbtide bench offload --dir /mnt/nvme/kv --dram 512MiB --ssd 6GiB --value 1MiB --total 4GiB
  ebbtide bench offload --value 64KiB,1MiB --threads 1,4 --json sweep.json
  ebbtide bench offload --dram 512MiB --ssd 6GiB --total 18GiB --reads zipf
  ebbtide bench offload --dir kv --journal kv.journal      (kill it at any time, then:)
  ebbtide bench offload --dir kv --verify-journal kv.journal

Defaults: --dram 512MiB --ssd 3GiB.
Exit codes: 0 good, 1 objects wrong or missing or the run broke off, 2 wrong use, 3 the figures do not count.";

/// Which keys are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Reads {
    Uniform,
    Zipf,
}

/// One run: the options with one value size and one number of threads, and what follows from them.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) options: OffloadOptions,
    pub(crate) dram: ByteSize,
    pub(crate) ssd: ByteSize,
    pub(crate) value: u64,
    pub(crate) threads: usize,
    pub(crate) batch: usize,
    pub(crate) objects: u64,
    pub(crate) bare_bytes: u64,
    pub(crate) run: u64,
}

impl OffloadOptions {
    pub(crate) fn dram(&self) -> ByteSize {
        self.store.dram.unwrap_or(DRAM)
    }

    pub(crate) fn ssd(&self) -> ByteSize {
        self.store.ssd.unwrap_or(SSD)
    }

    /// A run for each value size and number of threads.
    pub(crate) fn plans(&self) -> Outcome<Vec<Plan>> {
        let mut plans = Vec::new();
        let usual = [machine::processors().saturating_mul(2).min(THREADS_MAX)];
        let threads = if self.threads.is_empty() { &usual } else { &self.threads[..] };
        for value in &self.value {
            for threads in threads {
                plans.push(self.plan(value.0, *threads)?);
            }
        }
        match (plans.len(), &self.journal) {
            (0, _) => Err(Failure::usage("--value needs at least one size")),
            (2.., Some(_)) => {
                Err(Failure::usage("--journal goes with one value size and one number of threads"))
            }
            _ => Ok(plans),
        }
    }

    fn plan(&self, value: u64, threads: usize) -> Outcome<Plan> {
        let refuse = |message: String| Err(Failure::usage(message));
        let (dram, ssd) = (self.dram(), self.ssd());
        if !(1..=1024).contains(&threads) {
            return refuse(format!("--threads {threads}: give 1 to 1024"));
        }
        if self.rounds == Some(0) {
            return refuse("--rounds 0: give 1 or more".to_string());
        }
        if self.batch == Some(0) {
            return refuse("--batch 0: give 1 or more".to_string());
        }
        if value == 0 || value > dram.0 / 16 {
            let value = ByteSize(value);
            return refuse(format!(
                "--value {value}: give 1 byte or more, and a 16th of --dram {dram} at most"
            ));
        }
        if ssd.0 == 0 {
            return refuse("--ssd 0: nothing to offload to".to_string());
        }
        if ssd.0 < dram.0 + dram.0 / 2 {
            return refuse(format!(
                "--ssd {ssd}: too small: give at least one and a half times --dram {dram}"
            ));
        }
        if !(0.0..=4.0).contains(&self.zipf) {
            return refuse(format!("--zipf {}: give 0 to 4", self.zipf));
        }
        let objects = self.total.0 / value;
        if self.total.0 < dram.0 + dram.0 / 4 || objects > u64::from(u32::MAX) {
            return refuse(format!("--total {}: give at least 1.25 times --dram {dram}", self.total));
        }
        if self.journal.is_some() && self.total.0 + self.total.0 / 8 > ssd.0 {
            let total = self.total;
            return refuse(format!(
                "--journal needs --total {total} and an eighth to fit in --ssd {ssd}: what is evicted would look lost"
            ));
        }
        let batch = self.batch.unwrap_or((16 * MIB / value / threads as u64).clamp(2, 64) as usize);
        let bare_bytes = self.bare.map_or(self.total.0.clamp(BARE_BYTES_MIN, BARE_BYTES_MAX), |bare| bare.0);
        if bare_bytes < BARE_BYTES_MIN {
            return refuse(format!("--bare {}: give 128MiB or more", ByteSize(bare_bytes)));
        }
        let run = self.seed.unwrap_or_else(clock::wall_ns);
        let options = self.clone();
        Ok(Plan { options, dram, ssd, value, threads, batch, objects, bare_bytes, run })
    }
}

impl Plan {
    /// Value bytes in all.
    pub(crate) fn total_bytes(&self) -> u64 {
        self.objects * self.value
    }

    /// How large the held results of a read slice may get: they occupy DRAM until they were verified.
    pub(crate) fn read_slice_bytes_max(&self) -> u64 {
        // Results that do not become resident stay in staging, of which there is an eighth of DRAM or more.
        if self.options.store.promote.is_on() { self.dram.0 / 4 } else { self.dram.0 / 16 }
    }

    pub(crate) fn write_rounds_min(&self) -> usize {
        self.options.rounds.unwrap_or(ROUNDS_MIN)
    }

    pub(crate) fn read_rounds_min(&self) -> usize {
        // Reads of large values are the noisiest arm.
        let usual = if self.value >= MIB { 31 } else { ROUNDS_MIN };
        self.options.rounds.unwrap_or(usual)
    }

    /// Whether segments will have to be reclaimed for room.
    pub(crate) fn reclaims(&self) -> bool {
        self.total_bytes() > self.ssd.0 / 10 * 9
    }

    /// The ratios that the project promises; a run under them is repeated once.
    pub(crate) fn goals(&self) -> Goals {
        let write = if self.reclaims() { 0.80 } else { 0.90 };
        Goals { write, read: if self.value >= MIB { 0.90 } else { 0.88 } }
    }

    pub(crate) fn to_json(&self) -> Value {
        let mut config = self.options.store.to_json(self.dram, self.ssd);
        let own = json!({
            "value_bytes": self.value,
            "total_bytes": self.total_bytes(),
            "threads": self.threads,
            "batch": self.batch,
            "rounds_min": {"write": self.write_rounds_min(), "read": self.read_rounds_min()},
            "verify": self.options.verify.is_on(),
            "reads": if self.options.reads == Reads::Zipf { "zipf" } else { "uniform" },
            "zipf": self.options.zipf,
            "bare_bytes": self.bare_bytes,
            "seed": self.run,
            "journal": self.options.journal.is_some(),
        });
        if let (Value::Object(config), Value::Object(own)) = (&mut config, own) {
            config.extend(own);
        }
        config
    }
}

/// The least ratios.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Goals {
    pub(crate) write: f64,
    pub(crate) read: f64,
}
