//! The options that every command with a store takes.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use ebbtide_core::ByteSize;
use ebbtide_node::{Config, DeviceKind, Policy, Prealloc, Store};
use serde_json::{Value, json};

use crate::fail::{Failure, Outcome};
use crate::progress::{Progress, Unit};

/// On or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    On,
    Off,
}

impl Switch {
    pub(crate) fn is_on(self) -> bool {
        self == Switch::On
    }
}

/// How the store is set up.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Store")]
pub(crate) struct StoreOptions {
    /// Directory of the store; it is kept. Without it a fresh one is made and removed at the end
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,
    /// Keep the fresh directory and the files beside it
    #[arg(long)]
    pub(crate) keep: bool,
    /// Bytes of DRAM for objects, for example 512MiB [default: see below]
    #[arg(long, value_name = "SIZE")]
    pub(crate) dram: Option<ByteSize>,
    /// Bytes of SSD; 0 for none [default: see below]
    #[arg(long, value_name = "SIZE")]
    pub(crate) ssd: Option<ByteSize>,
    /// Eviction policy: lru or s3fifo
    #[arg(long, value_name = "NAME", default_value = "lru")]
    pub(crate) policy: String,
    /// How the SSD is driven: auto, uring or psync
    #[arg(long, value_name = "KIND", default_value = "auto")]
    pub(crate) device: String,
    /// Let a kernel thread poll the submission queue
    #[arg(long)]
    pub(crate) sqpoll: bool,
    /// Operations that the device keeps in flight [default: 128]
    #[arg(long, value_name = "COUNT")]
    pub(crate) queue_depth: Option<u32>,
    /// How the tier's files are laid: written, reserved or sparse
    #[arg(long, value_name = "HOW", default_value = "written")]
    pub(crate) prealloc: String,
    /// Bytes of a segment of the log [default: 64MiB, less under 2GiB of SSD]
    #[arg(long, value_name = "SIZE")]
    pub(crate) segment: Option<ByteSize>,
    /// Verify the checksum of each read from below DRAM
    #[arg(long, value_enum, default_value = "on")]
    pub(crate) checksums: Switch,
    /// Share of the written bytes that reclaim may write again; 0 for none [default: 0.15]
    #[arg(long, value_name = "SHARE")]
    pub(crate) reinsert_share: Option<f64>,
    /// Make objects that were read below DRAM resident again
    #[arg(long, value_enum, default_value = "on")]
    pub(crate) promote: Switch,
}

impl StoreOptions {
    /// The configuration of a store at `dir` with these sizes.
    pub(crate) fn config(&self, dir: &Path, dram: ByteSize, ssd: ByteSize) -> Outcome<Config> {
        let mut config = Config::new(dir);
        config.dram = dram;
        config.ssd = ssd;
        config.policy = parse::<Policy>("--policy", &self.policy)?;
        config.device = parse::<DeviceKind>("--device", &self.device)?;
        config.sqpoll = self.sqpoll;
        if let Some(depth) = self.queue_depth.filter(|depth| !(1..=4096).contains(depth)) {
            return Err(Failure::usage(format!("--queue-depth {depth}: give 1 to 4096")));
        }
        config.queue_depth = self.queue_depth;
        config.prealloc = parse::<Prealloc>("--prealloc", &self.prealloc)?;
        config.verify_reads = self.checksums.is_on();
        config.promote = self.promote.is_on();
        config.namespace = "ebbtide-bench".to_string();
        config.segment_bytes = self.segment;
        if let Some(share) = self.reinsert_share {
            if !(0.0..=0.9).contains(&share) {
                return Err(Failure::usage(format!("--reinsert-share {share}: give 0 to 0.9")));
            }
            config.reinsert_share_max = share;
        }
        Ok(config)
    }

    /// What was chosen, for the report.
    pub(crate) fn to_json(&self, dram: ByteSize, ssd: ByteSize) -> Value {
        json!({
            "dram_bytes": dram.0,
            "ssd_bytes": ssd.0,
            "policy": self.policy,
            "device": self.device,
            "sqpoll": self.sqpoll,
            "queue_depth": self.queue_depth,
            "prealloc": self.prealloc,
            "segment_bytes": self.segment.map(|size| size.0),
            "checksums": self.checksums.is_on(),
            "reinsert_share": self.reinsert_share,
            "promote": self.promote.is_on(),
        })
    }
}

/// Opens a store and shows how far it is.
pub(crate) fn open(config: Config, progress: &Progress) -> Outcome<Store> {
    progress.stage("open", 0, Unit::Things);
    let last = std::cell::Cell::new("");
    let show = |at: ebbtide_node::Progress| {
        if last.replace(at.stage) != at.stage {
            progress.stage(at.stage, at.total, Unit::Bytes);
        }
        progress.set(at.done);
    };
    Store::open_with_progress(config, &show).map_err(Failure::opening)
}

fn parse<T: std::str::FromStr>(option: &str, text: &str) -> Outcome<T>
where
    T::Err: std::fmt::Display,
{
    text.parse().map_err(|error| Failure::usage(format!("{option} {text}: {error}")))
}
