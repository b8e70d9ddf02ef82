//! Where an object is, or why it is not.

use std::fmt;

use ebbtide_core::{Location, NamespaceId};

use crate::engine::Engine;
use crate::index::State;
use crate::reasons::Gone;

/// Where an object is, or why it is not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// Where it is.
    pub whereabouts: Whereabouts,
    /// Its length, when it is anywhere.
    pub length: Option<u64>,
}

/// Where an object is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Whereabouts {
    /// In DRAM, and below as well when a copy was written there.
    Dram {
        /// It is being written below now.
        writing: bool,
        /// The copy below.
        below: Option<(String, Location)>,
    },
    /// In a tier below.
    Below {
        /// The tier's name.
        tier: String,
        /// Where in it.
        location: Location,
        /// How often it was read there, up to 3.
        reads: u8,
    },
    /// It was there and is gone.
    Gone {
        /// Why.
        why: Gone,
        /// When, in milliseconds since the Unix epoch.
        wall_ms: u64,
    },
    /// It was never put, or left longer ago than is remembered.
    Unknown,
}

impl Engine {
    /// Says where the object under `key` is, or why it is not. No side effects.
    pub fn explain(&self, namespace: NamespaceId, key: &[u8]) -> Explanation {
        let inner = &self.inner;
        let fingerprint = inner.fingerprinter.fingerprint(namespace, key);
        let shard = inner.index.lock_for(fingerprint);
        let Some(slot) = shard.find(fingerprint) else {
            drop(shard);
            let gone = inner.departures.why(fingerprint);
            let whereabouts =
                gone.map_or(Whereabouts::Unknown, |(why, wall_ms)| Whereabouts::Gone { why, wall_ms });
            return Explanation { whereabouts, length: None };
        };
        let row = *shard.row(slot);
        let name = || inner.tiers.first().map(|tier| tier.info().name.clone()).unwrap_or_default();
        let whereabouts = match (shard.hot(slot), row.below()) {
            (Some(hot), below) => Whereabouts::Dram {
                writing: hot.state == State::Writing,
                below: below.map(|at| (name(), at)),
            },
            (None, Some(location)) => Whereabouts::Below { tier: name(), location, reads: row.reads },
            (None, None) => Whereabouts::Unknown,
        };
        Explanation { whereabouts, length: Some(row.length()) }
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(length) = self.length {
            write!(f, "{length} bytes, ")?;
        }
        match &self.whereabouts {
            Whereabouts::Dram { writing: true, .. } => f.write_str("in DRAM, being written below"),
            Whereabouts::Dram { below: None, .. } => f.write_str("in DRAM only"),
            Whereabouts::Dram { below: Some((tier, at)), .. } => {
                write!(f, "in DRAM and in {tier} (segment {:?}, page {})", at.segment, at.page)
            }
            Whereabouts::Below { tier, location, reads } => {
                let (segment, page) = (location.segment, location.page);
                write!(f, "in {tier} (segment {segment:?}, page {page}), read {reads} times there")
            }
            Whereabouts::Gone { why, wall_ms } => {
                write!(f, "not there: {why} (at {wall_ms} ms since the epoch)")
            }
            Whereabouts::Unknown => {
                f.write_str("not there: never put, or gone longer ago than is remembered")
            }
        }
    }
}
