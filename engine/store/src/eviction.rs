//! Eviction policies: the order in which objects leave DRAM.

mod list;
mod lru;
mod s3fifo;

pub use lru::Lru;
pub use s3fifo::S3Fifo;

use std::fmt;
use std::str::FromStr;

use ebbtide_core::{Error, Eviction};

/// The policies that come with the engine, by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Least recently used first; exact with one thread.
    #[default]
    Lru,
    /// S3-FIFO: a small queue that one-hit objects leave soon, a main queue, and a memory of those that left.
    S3Fifo,
}

impl Policy {
    /// The policy, for a tier of `capacity_bytes`.
    pub fn build(self, capacity_bytes: u64) -> Box<dyn Eviction> {
        match self {
            Policy::Lru => Box::new(Lru::new()),
            Policy::S3Fifo => Box::new(S3Fifo::new(capacity_bytes)),
        }
    }
}

impl FromStr for Policy {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        match name.to_ascii_lowercase().as_str() {
            "lru" => Ok(Policy::Lru),
            "s3fifo" | "s3-fifo" => Ok(Policy::S3Fifo),
            _ => Err(Error::invalid(format!("eviction policy \"{name}\" is not known: use lru or s3fifo"))),
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Policy::Lru => "lru",
            Policy::S3Fifo => "s3fifo",
        })
    }
}
