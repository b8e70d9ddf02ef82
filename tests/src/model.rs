//! What each answer may be: the versions of every key, and what was promised of them.
//!
//! An object is written once, so a key's history is a row of versions. A version may be answered while it may be there:
//! from the start of its put until something acknowledged says that it is gone. Time is counted in events.

use std::collections::BTreeMap;

use ebbtide_core::{Error, ErrorKind, Location, Object};
use ebbtide_engine::{Engine, Explanation, Gone, Put, Whereabouts};

use crate::body::{body_of, is_body, key_of, length_of};
use crate::workload::NAMESPACE;
use crate::world::Crash;

/// A point in the order of events.
pub type Tick = u64;

/// One write of a key.
#[derive(Clone, Debug)]
struct Version {
    number: u32,
    length: usize,
    began: Tick,
    /// When it was acknowledged as stored.
    acked: Option<Tick>,
    /// Its put was refused, or found another object: it can never be there.
    refused: bool,
    /// Gone for this run of the process, from then on.
    gone: Option<Tick>,
    /// A removal of it was acknowledged: gone over a kill as well.
    removed: Option<Tick>,
    /// And a flush after that: gone over a power cut as well.
    removal_flushed: bool,
    /// A removal may have hit it: nothing is promised of it any more.
    doubtful: bool,
    /// Where it stood when a flush after its put had ended: there over a power cut.
    flushed_at: Option<Location>,
}

#[derive(Default)]
struct Key {
    versions: Vec<Version>,
    next: u32,
    puts_in_flight: u32,
    removes_in_flight: u32,
    last_removal: Tick,
}

/// What was there when the process ended, by the engine's own word.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Standing {
    below: Option<Location>,
    present: bool,
}

/// A flush under way: when it began, and what stood where.
pub struct Flush {
    began: Tick,
    places: BTreeMap<u32, Location>,
    reclaimed: u64,
}

/// What the model counts, to be compared with the engine's counters. Since the last start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Rows that the start found.
    pub recovered: u64,
    /// Puts answered Stored.
    pub stored: u64,
    /// Puts answered AlreadyStored.
    pub present: u64,
    /// Puts refused as full.
    pub full: u64,
    /// Reads that found something.
    pub hits: u64,
    /// Reads that found nothing.
    pub misses: u64,
    /// Reads that failed.
    pub errors: u64,
    /// Reads that found nothing although the object was there: it moved again and again.
    pub unlucky: u64,
    /// Flushes that succeeded, and that failed.
    pub flushes: u64,
    /// See `flushes`.
    pub flush_errors: u64,
    /// Removals that the engine could not write down.
    pub remove_errors: u64,
}

/// The map that the store should be.
#[derive(Default)]
pub struct Model {
    keys: BTreeMap<u32, Key>,
    now: Tick,
    /// Since the last start.
    pub counts: Counts,
    /// Faults are on: refusals and errors may come.
    pub faulty: bool,
    lengths: (u64, u64),
    standing: BTreeMap<u32, Standing>,
}

impl Model {
    /// A model of an empty store with values of `lengths`, the shortest to the longest.
    pub fn new(lengths: (u64, u64), faulty: bool) -> Self {
        Model { lengths, faulty, ..Model::default() }
    }

    fn tick(&mut self) -> Tick {
        self.now += 1;
        self.now
    }

    /// A put begins: the version to write, its length, and when it is.
    pub fn begin_put(&mut self, key: u32) -> (u32, usize) {
        let (began, lengths) = (self.tick(), self.lengths);
        let entry = self.keys.entry(key).or_default();
        entry.next += 1;
        entry.puts_in_flight += 1;
        let (number, length) = (entry.next, length_of(key, entry.next, lengths));
        entry.versions.push(Version {
            number,
            length,
            began,
            acked: None,
            refused: false,
            gone: None,
            removed: None,
            removal_flushed: false,
            doubtful: false,
            flushed_at: None,
        });
        (number, length)
    }

    /// A put has ended.
    pub fn end_put(&mut self, key: u32, number: u32, result: Result<Put, Error>) {
        let now = self.tick();
        let faulty = self.faulty;
        let entry = self.keys.get_mut(&key).expect("a put that ends has begun");
        entry.puts_in_flight -= 1;
        let mine = entry.versions.iter().position(|version| version.number == number).expect("it is kept");
        let began = entry.versions[mine].began;
        match result {
            Ok(Put::Stored) => {
                self.counts.stored += 1;
                entry.versions[mine].acked = Some(now);
                // Whatever was acknowledged before this put began was gone when it was stored.
                for version in &mut entry.versions {
                    if version.number != number && version.acked.is_some_and(|acked| acked < began) {
                        version.gone.get_or_insert(now);
                        version.flushed_at = None;
                    }
                }
            }
            Ok(Put::AlreadyStored) => {
                self.counts.present += 1;
                entry.versions[mine].refused = true;
                let other = |version: &Version| {
                    version.number != number
                        && !version.refused
                        && version.gone.is_none_or(|gone| gone > began)
                };
                assert!(
                    entry.versions.iter().any(other),
                    "key {key}: AlreadyStored, but nothing can be there"
                );
            }
            Err(error) => {
                self.counts.full += u64::from(error.kind() == ErrorKind::Full);
                entry.versions[mine].refused = true;
                assert!(
                    faulty && error.kind() == ErrorKind::Full,
                    "key {key}: put refused: {error:?} while the tier below works"
                );
            }
        }
    }

    /// A put that would have had to wait was not made.
    pub fn withdraw_put(&mut self, key: u32, number: u32) {
        self.tick();
        let entry = self.keys.get_mut(&key).expect("a put that ends has begun");
        entry.puts_in_flight -= 1;
        entry
            .versions
            .iter_mut()
            .filter(|version| version.number == number)
            .for_each(|version| version.refused = true);
    }

    /// A read has failed.
    pub fn failed(&mut self, key: u32, error: &Error) {
        self.tick();
        self.counts.errors += 1;
        assert!(self.faulty, "key {key}: read failed: {error:?} while the tier below works");
    }

    /// A read begins.
    pub fn begin(&mut self) -> Tick {
        self.tick()
    }

    /// A read has found `object`: it must be a version that may be there.
    pub fn found(&mut self, key: u32, began: Tick, object: &Object) {
        self.tick();
        self.counts.hits += 1;
        assert!(*object.key == *key_of(key), "key {key}: another key's object was answered");
        let entry = self.keys.get(&key).unwrap_or_else(|| panic!("key {key} was never put, and found"));
        let right = |version: &&Version| is_body(object, key, version.number, version.length);
        let candidates: Vec<_> = entry.versions.iter().filter(right).collect();
        assert!(
            !candidates.is_empty(),
            "key {key}: wrong bytes: {}",
            diagnosis(object, key, &entry.versions)
        );
        let may = |version: &&Version| !version.refused && version.gone.is_none_or(|gone| gone > began);
        assert!(candidates.iter().any(may), "key {key}: answered what is gone or never was: {candidates:?}");
    }

    /// A read has found nothing: the engine must be able to say why.
    pub fn missed(&mut self, key: u32, began: Tick, engine: &Engine) {
        self.counts.misses += 1;
        self.explain_absence(key, began, engine);
    }

    /// `exists` has said no.
    pub fn explain_absence(&mut self, key: u32, began: Tick, engine: &Engine) {
        let now = self.tick();
        let Some(entry) = self.keys.get_mut(&key) else { return };
        let quiet = entry.puts_in_flight == 0 && entry.removes_in_flight == 0 && entry.last_removal < began;
        let mut expected = entry.versions.iter_mut().filter(|version| {
            let acked = version.acked.is_some_and(|acked| acked < began);
            acked && !version.refused && version.gone.is_none() && !version.doubtful
        });
        let Some(version) = expected.next().filter(|_| quiet) else { return };
        match whereabouts(engine, key).whereabouts {
            Whereabouts::Gone { why: Gone::Corrupt, .. } if !self.faulty => {
                panic!("key {key}: corrupt, and no disk was: {version:?}")
            }
            Whereabouts::Gone { why, .. } if why != Gone::Removed => {
                version.gone = Some(now);
                version.flushed_at = None;
            }
            Whereabouts::Dram { .. } | Whereabouts::Below { .. } => self.counts.unlucky += 1,
            other => panic!("key {key}: {version:?} vanished without a reason: {other:?}"),
        }
    }

    /// `exists` has said yes.
    pub fn explain_presence(&mut self, key: u32, began: Tick) {
        self.tick();
        let entry = self.keys.get(&key).unwrap_or_else(|| panic!("key {key} was never put, and exists"));
        let may = |version: &Version| !version.refused && version.gone.is_none_or(|gone| gone > began);
        assert!(entry.versions.iter().any(may), "key {key} exists, and is gone: {:?}", entry.versions);
    }

    /// A removal begins.
    pub fn begin_remove(&mut self, key: u32) -> Tick {
        let now = self.tick();
        let entry = self.keys.entry(key).or_default();
        entry.removes_in_flight += 1;
        entry.last_removal = now;
        for version in &mut entry.versions {
            version.doubtful |= version.gone.is_none();
            version.flushed_at = None;
        }
        now
    }

    /// A removal has ended.
    pub fn end_remove(&mut self, key: u32, began: Tick, result: Result<bool, Error>) {
        let now = self.tick();
        let faulty = self.faulty;
        let entry = self.keys.get_mut(&key).expect("a removal that ends has begun");
        entry.removes_in_flight -= 1;
        entry.last_removal = now;
        if let Err(error) = &result {
            assert!(faulty, "key {key}: removal failed: {error:?}");
            self.counts.remove_errors += 1;
        }
        for version in &mut entry.versions {
            version.doubtful |= version.gone.is_none() && version.acked.is_none_or(|acked| acked > began);
            version.flushed_at = None;
            if version.acked.is_some_and(|acked| acked < began) && !version.refused {
                version.gone.get_or_insert(now);
                if matches!(result, Ok(true)) {
                    version.removed.get_or_insert(now);
                }
            }
        }
    }

    /// A flush begins.
    pub fn begin_flush(&mut self, engine: &Engine) -> Flush {
        let places =
            self.keys.keys().filter_map(|key| Some((*key, below(&whereabouts(engine, *key))?))).collect();
        Flush { began: self.tick(), places, reclaimed: reclaimed(engine) }
    }

    /// A flush has ended well: what was acknowledged before it is durable, where it stands.
    ///
    /// Where reclaim took a copy away meanwhile, nobody can say from outside whether the next one came in time.
    pub fn flushed(&mut self, flush: &Flush, engine: &Engine) {
        self.tick();
        self.counts.flushes += 1;
        let Flush { began, places, reclaimed: before } = flush;
        let calm = reclaimed(engine) == *before;
        for (key, entry) in &mut self.keys {
            let place = below(&whereabouts(engine, *key));
            for version in &mut entry.versions {
                version.removal_flushed |= version.removed.is_some_and(|removed| removed < *began);
                let promised = version.acked.is_some_and(|acked| acked < *began)
                    && !version.refused
                    && version.gone.is_none()
                    && !version.doubtful;
                let stays = places.get(key).map_or(calm, |before| Some(before) == place.as_ref());
                if promised && stays {
                    version.flushed_at = place;
                }
            }
        }
    }

    /// A flush has failed.
    pub fn flush_failed(&mut self, error: &Error) {
        self.tick();
        self.counts.flush_errors += 1;
        assert!(self.faulty, "flush failed: {error:?} while the tier below works");
    }

    /// The process is about to end: notes what is where.
    pub fn note_standing(&mut self, engine: &Engine) {
        self.standing = self
            .keys
            .keys()
            .map(|key| {
                let explanation = whereabouts(engine, *key);
                let present = explanation.length.is_some();
                (*key, Standing { below: below(&explanation), present })
            })
            .collect();
    }

    /// The store runs again on what a crash left: what must be there is.
    pub fn restarted_after(&mut self, crash: Crash, engine: &Engine) {
        let now = self.tick();
        let standing = std::mem::take(&mut self.standing);
        for (key, entry) in &mut self.keys {
            let stood = standing.get(key).and_then(|stood| stood.below);
            let found = whereabouts(engine, *key).length.is_some();
            if crash == Crash::Kill && stood.is_some() && entry.removes_in_flight == 0 {
                assert!(
                    found,
                    "key {key}: not found after a kill, and stood at {stood:?}: {:?}",
                    entry.versions
                );
            }
            let mut current = entry.current().filter(|_| stood.is_some() && crash == Crash::Kill);
            for version in &mut entry.versions {
                let over = match crash {
                    Crash::Kill => version.removed.is_some(),
                    Crash::Power => version.removal_flushed,
                };
                let promised = version.flushed_at.is_some() && version.flushed_at == stood;
                assert!(
                    !promised || found,
                    "key {key}: not found after a {crash:?}, and was flushed where it stood: {version:?}"
                );
                current = current.or(promised.then_some(version.began));
                // What was in flight may have been stored; what fell out of the index may be met again.
                version.gone = version.gone.filter(|_| over);
                version.removed = version.removed.filter(|_| over);
                version.acked = version.acked.or((!version.refused).then_some(now));
                version.flushed_at = version.flushed_at.filter(|_| promised);
                version.doubtful = true;
            }
            entry.settle(*key, found, current, now);
        }
        self.begin_run(engine);
    }

    /// The store runs again after a clean end: everything that was there is.
    pub fn reopened(&mut self, engine: &Engine) {
        let now = self.tick();
        let standing = std::mem::take(&mut self.standing);
        for (key, entry) in &mut self.keys {
            let found = whereabouts(engine, *key).length.is_some();
            let stood = standing.get(key).is_some_and(|stood| stood.present);
            assert!(found || !stood, "key {key}: lost by a clean restart: {:?}", entry.versions);
            let current = entry.current().filter(|_| stood);
            for version in &mut entry.versions {
                version.gone = version.gone.filter(|_| version.removed.is_some());
                version.removal_flushed |= version.removed.is_some();
                version.doubtful = true;
            }
            entry.settle(*key, found, current, now);
        }
        self.begin_run(engine);
    }

    fn begin_run(&mut self, engine: &Engine) {
        self.counts = Counts { recovered: engine.stats().entries, ..Counts::default() };
    }

    /// The keys that were ever put.
    pub fn keys(&self) -> Vec<u32> {
        self.keys.keys().copied().collect()
    }
}

impl Key {
    /// When the put of the version that is surely the one that is there began.
    fn current(&self) -> Option<Tick> {
        let mut alive = self.versions.iter().filter(|version| !version.refused && version.gone.is_none());
        let version = alive.next()?;
        (alive.next().is_none() && !version.doubtful && version.acked.is_some()).then_some(version.began)
    }

    /// A run begins: nothing is in flight, a key that is not there has no version that could be, and none comes back that
    /// is older than `current`, which is there.
    fn settle(&mut self, key: u32, found: bool, current: Option<Tick>, now: Tick) {
        (self.puts_in_flight, self.removes_in_flight) = (0, 0);
        let older = |version: &Version| current.is_some_and(|current| version.began < current);
        for version in self.versions.iter_mut().filter(|version| !version.refused) {
            if !found || older(version) {
                version.gone.get_or_insert(now);
            }
        }
        let mut alive: Vec<_> =
            self.versions.iter_mut().filter(|version| !version.refused && version.gone.is_none()).collect();
        if let [only] = &mut alive[..] {
            only.doubtful = false;
        }
        let alive = alive.len();
        assert!(!found || alive > 0, "key {key} is there again and was removed: {:?}", self.versions);
    }
}

fn reclaimed(engine: &Engine) -> u64 {
    engine.stats().tiers.iter().map(|tier| tier.segments_reclaimed).sum()
}

/// What a body that is no version's has instead.
fn diagnosis(object: &Object, key: u32, versions: &[Version]) -> String {
    let got = object.value.to_vec();
    let (length, generation) = (got.len(), object.generation);
    let sums = object.identity().sums_of(&object.value) == *object.block_sums();
    let mut text =
        format!("{length} bytes, {generation:?}, {} its sums", if sums { "of" } else { "against" });
    for version in versions.iter().filter(|version| version.length == length) {
        let want = body_of(key, version.number, length);
        let first = got.iter().zip(&want).position(|(got, want)| got != want).unwrap_or(length);
        let wrong = got.iter().zip(&want).filter(|(got, want)| got != want).count();
        text += &format!("; against version {}: {wrong} wrong, the first at {first}", version.number);
    }
    text
}

/// Where the object under `key` is, by the engine's word.
pub fn whereabouts(engine: &Engine, key: u32) -> Explanation {
    engine.explain(NAMESPACE, &key_of(key))
}

fn below(explanation: &Explanation) -> Option<Location> {
    match &explanation.whereabouts {
        Whereabouts::Dram { below, .. } => below.as_ref().map(|(_, at)| *at),
        Whereabouts::Below { location, .. } => Some(*location),
        Whereabouts::Gone { .. } | Whereabouts::Unknown => None,
    }
}
