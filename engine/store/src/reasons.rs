//! Why objects are gone: counted by reason, and remembered for a while by fingerprint.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;

use ebbtide_core::Fingerprint;
use hashbrown::HashTable;
use parking_lot::Mutex;

/// Why an object that was stored is not there any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Gone {
    /// DRAM was full and no tier lies below.
    Evicted,
    /// DRAM was full and the policy did not admit it to the tier below.
    NotAdmitted,
    /// Its segment was reclaimed and it had not been read since it was written there.
    Reclaimed,
    /// The tier below failed to take it, again and again.
    DemoteFailed,
    /// Its only copy was not what was written.
    Corrupt,
    /// It was removed.
    Removed,
}

impl Gone {
    /// Its name in counters.
    pub fn name(self) -> &'static str {
        match self {
            Gone::Evicted => "evicted",
            Gone::NotAdmitted => "not_admitted",
            Gone::Reclaimed => "reclaimed",
            Gone::DemoteFailed => "demote_failed",
            Gone::Corrupt => "corrupt",
            Gone::Removed => "removed",
        }
    }
}

impl fmt::Display for Gone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Gone::Evicted => "evicted from DRAM, and no tier lies below",
            Gone::NotAdmitted => "evicted from DRAM and not admitted to the tier below",
            Gone::Reclaimed => "dropped when its segment was reclaimed for room",
            Gone::DemoteFailed => "dropped after the tier below had failed to take it",
            Gone::Corrupt => "its copy was corrupt",
            Gone::Removed => "removed",
        })
    }
}

/// Departures that are remembered.
const REMEMBERED_MAX: usize = 1 << 16;

/// Counts departures and remembers the latest.
#[derive(Default)]
pub(crate) struct Departures(Mutex<Memory>);

#[derive(Default)]
struct Memory {
    counts: BTreeMap<Gone, u64>,
    bytes: BTreeMap<Gone, u64>,
    recent: VecDeque<Departure>,
    /// Numbers of departures, by fingerprint.
    by_fingerprint: HashTable<u64>,
    first: u64,
}

#[derive(Clone, Copy)]
struct Departure {
    fingerprint: Fingerprint,
    gone: Gone,
    wall_ms: u64,
}

impl Departures {
    pub(crate) fn record(&self, fingerprint: Fingerprint, length: u64, gone: Gone, wall_ms: u64) {
        let mut memory = self.0.lock();
        *memory.counts.entry(gone).or_default() += 1;
        *memory.bytes.entry(gone).or_default() += length;
        memory.remember(Departure { fingerprint, gone, wall_ms });
    }

    /// How often objects left for each reason.
    pub(crate) fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.0.lock().counts.iter().map(|(gone, count)| (gone.name(), *count)).collect()
    }

    /// When (Unix, ms) and why the object last left, if that is remembered.
    pub(crate) fn why(&self, fingerprint: Fingerprint) -> Option<(Gone, u64)> {
        let memory = self.0.lock();
        let number = memory.find(fingerprint)?;
        let departure = memory.recent[(number - memory.first) as usize];
        Some((departure.gone, departure.wall_ms))
    }
}

impl Memory {
    fn find(&self, fingerprint: Fingerprint) -> Option<u64> {
        let same = |number: &u64| self.recent[(*number - self.first) as usize].fingerprint == fingerprint;
        self.by_fingerprint.find(fingerprint.low, same).copied()
    }

    fn remember(&mut self, departure: Departure) {
        if self.recent.len() == REMEMBERED_MAX {
            self.forget_oldest();
        }
        let number = self.first + self.recent.len() as u64;
        self.forget_number_of(departure.fingerprint);
        self.recent.push_back(departure);
        let (recent, first) = (&self.recent, self.first);
        self.by_fingerprint.insert_unique(departure.fingerprint.low, number, |number| {
            recent[(*number - first) as usize].fingerprint.low
        });
    }

    fn forget_oldest(&mut self) {
        let Some(oldest) = self.recent.front().copied() else { return };
        if self.find(oldest.fingerprint) == Some(self.first) {
            self.forget_number_of(oldest.fingerprint);
        }
        self.recent.pop_front();
        self.first += 1;
    }

    fn forget_number_of(&mut self, fingerprint: Fingerprint) {
        let (recent, first) = (&self.recent, self.first);
        let same = |number: &u64| recent[(*number - first) as usize].fingerprint == fingerprint;
        if let Ok(entry) = self.by_fingerprint.find_entry(fingerprint.low, same) {
            entry.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fingerprint(n: u64) -> Fingerprint {
        Fingerprint { high: n, low: n.wrapping_mul(0x9e37_79b9_7f4a_7c15) }
    }

    #[test]
    fn the_latest_reason_is_remembered_and_the_memory_is_bounded() {
        let departures = Departures::default();
        for n in 0..(REMEMBERED_MAX as u64 + 1000) {
            departures.record(fingerprint(n), 1, Gone::Evicted, n);
        }
        departures.record(fingerprint(70_000 - 5000), 1, Gone::Removed, 99);
        assert_eq!(departures.why(fingerprint(5)), None);
        assert_eq!(departures.why(fingerprint(65_000)), Some((Gone::Removed, 99)));
        assert_eq!(departures.why(fingerprint(64_000)), Some((Gone::Evicted, 64_000)));
        assert_eq!(departures.counts()["evicted"], REMEMBERED_MAX as u64 + 1000);
        let memory = departures.0.lock();
        assert!(memory.recent.len() <= REMEMBERED_MAX && memory.by_fingerprint.len() <= REMEMBERED_MAX);
    }
}
