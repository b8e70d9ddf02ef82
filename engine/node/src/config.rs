//! What a store is opened with. Data only: components are chosen in `open.rs`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use ebbtide_core::{ByteSize, Error, Result};
use ebbtide_engine::Policy;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};

/// How a store is opened.
///
/// From TOML by [`from_toml`](Self::from_toml); unknown keys are refused by name.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The store's directory: its lock, and the SSD tier's files unless `devices` names others. Created when missing.
    pub dir: PathBuf,
    /// Bytes of DRAM for objects, their keys and headers included.
    #[serde(deserialize_with = "from_text")]
    pub dram: ByteSize,
    /// Bytes of DRAM for reads on their way and log headers, besides `dram`. Default: an eighth of `dram`, 32 MiB to
    /// 1 GiB; results that callers hold and that did not become resident count against it.
    #[serde(deserialize_with = "from_text_or_none")]
    pub staging: Option<ByteSize>,
    /// Bytes of the SSD tier, over all its devices; 0 for none, else at least `dram`: what is dirty there must find room at a
    /// flush.
    #[serde(deserialize_with = "from_text")]
    pub ssd: ByteSize,
    /// Files or block devices of the SSD tier, of equal size, used in turn. Default: one file in `dir`.
    pub devices: Vec<PathBuf>,
    /// The order in which objects leave DRAM.
    #[serde(deserialize_with = "from_text")]
    pub policy: Policy,
    /// How the SSD is driven.
    #[serde(deserialize_with = "from_text")]
    pub device: DeviceKind,
    /// Lets a kernel thread poll for submissions (io_uring's SQPOLL): fewer system calls for a busy core.
    pub sqpoll: bool,
    /// Operations in flight on each device. Default 128.
    pub queue_depth: Option<u32>,
    /// How new files of the SSD tier get their space. `written` costs one pass of writing at the first start and makes every
    /// later write as fast as the device; `reserved` is quick now and slower in the first round through the log.
    #[serde(deserialize_with = "from_text")]
    pub prealloc: Prealloc,
    /// The size of a log segment, for a new SSD tier. Default: the largest power of two up to 64 MiB of which 32 fit.
    #[serde(deserialize_with = "from_text_or_none")]
    pub segment_bytes: Option<ByteSize>,
    /// Whether values read from SSD are checked. Off only to measure what the check costs.
    pub verify_reads: bool,
    /// The share of re-inserted bytes in all value bytes written to SSD, at most; 0 to 0.9.
    pub reinsert_share_max: f64,
    /// Whether values read from SSD become resident again.
    pub promote: bool,
    /// The name of the store's namespace. Its identity is kept by the client: see `docs/semantics.md`.
    pub namespace: String,
    /// Whether the arena asks for huge pages.
    pub huge_pages: bool,
    /// The longest value. Default 256 MiB, and never more than half of `dram`.
    #[serde(deserialize_with = "from_text")]
    pub object_bytes_max: ByteSize,
    /// How long a put waits for room before it is refused, in milliseconds.
    pub put_wait_ms_max: u64,
    /// Bytes of values that wait for room, at most.
    #[serde(deserialize_with = "from_text")]
    pub put_waiting_bytes_max: ByteSize,
    /// Bytes at the cold end of DRAM kept free or already written to SSD, so that puts seldom wait. Default: an eighth
    /// of `dram`, at most 64 MiB.
    #[serde(deserialize_with = "from_text_or_none")]
    pub clean_ahead: Option<ByteSize>,
    /// An operation that the device has not answered within this many milliseconds counts as failed.
    pub io_timeout_ms_max: u64,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            dir: PathBuf::from("ebbtide-data"),
            dram: ByteSize(512 << 20),
            staging: None,
            ssd: ByteSize(0),
            devices: Vec::new(),
            policy: Policy::Lru,
            device: DeviceKind::Auto,
            sqpoll: false,
            queue_depth: None,
            prealloc: Prealloc::Reserved,
            segment_bytes: None,
            verify_reads: true,
            reinsert_share_max: 0.15,
            promote: true,
            namespace: "default".into(),
            huge_pages: true,
            object_bytes_max: ByteSize(256 << 20),
            put_wait_ms_max: 10_000,
            put_waiting_bytes_max: ByteSize(256 << 20),
            clean_ahead: None,
            io_timeout_ms_max: 30_000,
        }
    }
}

impl Config {
    /// Defaults for a store in `dir`.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Config { dir: dir.into(), ..Config::default() }
    }

    /// Reads a configuration; unknown keys and values out of bounds are refused by name.
    pub fn from_toml(text: &str) -> Result<Self> {
        let config: Config = toml::from_str(text)
            .map_err(|error| Error::invalid(format!("configuration: {}", error.message())))?;
        config.check()?;
        Ok(config)
    }

    /// Refuses values out of bounds.
    pub fn check(&self) -> Result<()> {
        let refuse = |what: String| Err(Error::invalid(what));
        if self.dram.0 < DRAM_BYTES_MIN {
            return refuse(format!("dram = {}: at least {} are needed", self.dram, ByteSize(DRAM_BYTES_MIN)));
        }
        if !(0.0..=0.9).contains(&self.reinsert_share_max) {
            return refuse(format!("reinsert_share_max = {}: must be 0 to 0.9", self.reinsert_share_max));
        }
        if self.namespace.is_empty() {
            return refuse("namespace is empty: name one".into());
        }
        if self.queue_depth.is_some_and(|depth| !(1..=4096).contains(&depth)) {
            return refuse("queue_depth must be 1 to 4096".into());
        }
        if !self.devices.is_empty() && self.ssd.0 == 0 {
            return refuse("devices are named but ssd = 0: say how many bytes of them to use".into());
        }
        if self.devices.len() > 64 {
            return refuse(format!("{} devices: at most 64", self.devices.len()));
        }
        if self.object_bytes_max.0 == 0 || self.object_bytes_max.0 > 4 << 30 {
            return refuse(format!("object_bytes_max = {}: must be 1B to 4GiB", self.object_bytes_max));
        }
        Ok(())
    }

    /// Bytes of staging in force.
    pub fn staging_bytes(&self) -> u64 {
        self.staging.map_or((self.dram.0 / 8).clamp(32 << 20, 1 << 30), |staging| staging.0)
    }
}

/// The least DRAM a store works with.
const DRAM_BYTES_MIN: u64 = 4 << 20;

/// How the SSD is driven.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceKind {
    /// io_uring where the kernel allows it, else positional I/O.
    #[default]
    Auto,
    /// io_uring; refused where the kernel does not allow it.
    Uring,
    /// Positional I/O on a few threads.
    Psync,
}

/// How new files get their space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prealloc {
    /// Written once with zeros.
    Written,
    /// Reserved, not written.
    #[default]
    Reserved,
    /// Neither: the file grows as it is written. Counts as its full size all the same.
    Sparse,
}

macro_rules! named {
    ($type:ident, $what:literal, $($name:literal => $variant:ident),*) => {
        impl FromStr for $type {
            type Err = Error;

            fn from_str(text: &str) -> Result<Self> {
                match text.to_ascii_lowercase().as_str() {
                    $($name => Ok($type::$variant),)*
                    _ => Err(Error::invalid(format!(
                        concat!($what, " \"{}\" is not known: use one of ", $($name, " ",)*), text
                    ).trim_end().to_owned())),
                }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $($type::$variant => $name,)* })
            }
        }
    };
}

named!(DeviceKind, "device", "auto" => Auto, "uring" => Uring, "psync" => Psync);
named!(Prealloc, "prealloc", "written" => Written, "reserved" => Reserved, "sparse" => Sparse);

fn from_text<'de, D: Deserializer<'de>, T: FromStr<Err = Error>>(
    from: D,
) -> std::result::Result<T, D::Error> {
    text_of(from)?.parse().map_err(serde::de::Error::custom)
}

fn from_text_or_none<'de, D: Deserializer<'de>, T: FromStr<Err = Error>>(
    from: D,
) -> std::result::Result<Option<T>, D::Error> {
    from_text(from).map(Some)
}

/// A string, or a number as its decimal form: `ssd = 0` means what `ssd = "0"` does.
fn text_of<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<String, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Text {
        Number(u64),
        Text(String),
    }
    fn read<'de, D: Deserializer<'de>, T: DeserializeOwned>(from: D) -> std::result::Result<T, D::Error> {
        T::deserialize(from)
    }
    Ok(match read::<D, Text>(from)? {
        Text::Number(number) => number.to_string(),
        Text::Text(text) => text,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_docs_show() {
        let text = "dir = \"/srv/kv\"\ndram = \"64GiB\"\nssd = \"2TiB\"\npolicy = \"s3fifo\"\ndevice = \"uring\"\nstaging = 67108864\n";
        let config = Config::from_toml(text).unwrap();
        assert_eq!((config.dram, config.ssd), (ByteSize(64 << 30), ByteSize(2 << 40)));
        assert_eq!((config.policy, config.device), (Policy::S3Fifo, DeviceKind::Uring));
        assert_eq!(config.staging, Some(ByteSize(64 << 20)));
    }

    #[test]
    fn every_misspelt_key_is_refused_by_name() {
        for key in ["drm", "sdd", "devics", "polcy", "sqpol", "prealoc", "namespce"] {
            let error = Config::from_toml(&format!("{key} = \"1GiB\"")).unwrap_err();
            assert!(error.message().contains(key), "{error} does not name {key}");
        }
    }

    #[test]
    fn values_out_of_bounds_are_refused() {
        let bad = [
            "dram = \"1KiB\"",
            "reinsert_share_max = 1.5",
            "namespace = \"\"",
            "queue_depth = 0",
            "devices = [\"/dev/x\"]",
            "ssd = \"plenty\"",
            "device = \"floppy\"",
            "object_bytes_max = \"5GiB\"",
        ];
        for text in bad {
            assert!(Config::from_toml(text).is_err(), "{text} was taken");
        }
    }
}
