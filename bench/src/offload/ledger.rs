//! What was put, and what came back wrong or not at all.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ebbtide_core::Object;

use crate::body::{KeyBytes, KeyId, fill, first_wrong};

/// Keeps the books of one run. Shared by all its threads.
pub(crate) struct Ledger {
    run: u64,
    value: u64,
    written: AtomicU64,
    already_stored: AtomicU64,
    verified_bytes: AtomicU64,
    findings: Mutex<Findings>,
}

/// What is not as it should be.
#[derive(Clone, Debug, Default)]
pub(crate) struct Findings {
    pub(crate) wrong: BTreeSet<u64>,
    pub(crate) absent: BTreeSet<u64>,
    /// The first few, in words.
    pub(crate) words: Vec<String>,
}

const WORDS_MAX: usize = 5;

impl Ledger {
    pub(crate) fn new(run: u64, value: u64) -> Self {
        Ledger {
            run,
            value,
            written: AtomicU64::new(0),
            already_stored: AtomicU64::new(0),
            verified_bytes: AtomicU64::new(0),
            findings: Mutex::default(),
        }
    }

    pub(crate) fn key(&self, index: u64) -> KeyBytes {
        self.id(index).bytes()
    }

    /// Writes the value of object `index` over `into`.
    pub(crate) fn body(&self, index: u64, into: &mut [u8]) {
        fill(self.id(index), into);
    }

    /// Objects 0 to here have been put.
    pub(crate) fn written(&self) -> u64 {
        self.written.load(Ordering::Acquire)
    }

    pub(crate) fn set_written(&self, objects: u64) {
        self.written.store(objects, Ordering::Release);
    }

    pub(crate) fn count_already_stored(&self) {
        self.already_stored.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn already_stored(&self) -> u64 {
        self.already_stored.load(Ordering::Relaxed)
    }

    pub(crate) fn verified_bytes(&self) -> u64 {
        self.verified_bytes.load(Ordering::Relaxed)
    }

    /// Compares every byte of what came back as object `index`.
    pub(crate) fn verify(&self, index: u64, object: &Object) {
        if object.length() != self.value {
            let text = format!("object {index} has {} bytes instead of {}", object.length(), self.value);
            self.note(text, |findings| findings.wrong.insert(index));
        } else if let Some(at) = first_wrong(self.id(index), object.value.spans()) {
            self.note(format!("object {index} is wrong from byte {at} on"), |findings| {
                findings.wrong.insert(index)
            });
        }
        self.verified_bytes.fetch_add(object.length(), Ordering::Relaxed);
    }

    /// Object `index` was asked for and is not there.
    pub(crate) fn absent(&self, index: u64) {
        self.findings().absent.insert(index);
    }

    /// Object `index` could not be read.
    pub(crate) fn failed(&self, index: u64, error: &ebbtide_core::Error) {
        self.note(format!("object {index}: {error}"), |findings| findings.absent.insert(index));
    }

    pub(crate) fn found(&self) -> Findings {
        self.findings().clone()
    }

    fn note(&self, words: String, insert: impl FnOnce(&mut Findings) -> bool) {
        let mut findings = self.findings();
        if insert(&mut findings) && findings.words.len() < WORDS_MAX {
            findings.words.push(words);
        }
    }

    fn findings(&self) -> MutexGuard<'_, Findings> {
        self.findings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn id(&self, index: u64) -> KeyId {
        KeyId { run: self.run, index }
    }
}

/// The reasons by which a store may let an object go because it has no room.
const FOR_ROOM: [&str; 3] = ["evicted", "not_admitted", "reclaimed"];

/// How many objects the store says it dropped for room. Absent objects up to this number are evicted, the rest missing.
pub(crate) fn dropped_for_room(dropped: &BTreeMap<&'static str, u64>) -> u64 {
    FOR_ROOM.iter().filter_map(|reason| dropped.get(reason)).sum()
}

/// Splits absent objects into evicted ones and missing ones.
pub(crate) fn explain_absent(absent: u64, dropped: &BTreeMap<&'static str, u64>) -> (u64, u64) {
    let evicted = absent.min(dropped_for_room(dropped));
    (evicted, absent - evicted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_drops_for_room_explain_absent_objects() {
        let dropped = BTreeMap::from([("evicted", 2), ("reclaimed", 3), ("removed", 50), ("corrupt", 70)]);
        assert_eq!(dropped_for_room(&dropped), 5);
        assert_eq!(explain_absent(4, &dropped), (4, 0));
        assert_eq!(explain_absent(9, &dropped), (5, 4));
    }

    #[test]
    fn an_object_that_fails_twice_counts_once() {
        let ledger = Ledger::new(1, 10);
        (0..3).for_each(|_| ledger.failed(7, &ebbtide_core::Error::unavailable("gone")));
        ledger.absent(7);
        ledger.absent(8);
        assert_eq!(ledger.found().absent.len(), 2);
        assert_eq!(ledger.found().words, ["object 7: gone"]);
    }
}
