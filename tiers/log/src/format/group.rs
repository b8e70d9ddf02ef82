//! A group: records written in one piece with the values that they speak of.
//!
//! ```text
//! ┌─────────────── header run, whole pages ──────────────┬─ values, each on a page ─┐
//! │ fixed, 64 B │ record │ record │ ... │ zeros           │ value │ value │ ...      │
//! └──────────────────────────────────────────────────────┴──────────────────────────┘
//!  0  magic "ebbgroup"                       8
//!  8  checksum: XXH3-64 of the run from 16   8
//! 16  store uuid (the writer's)             16
//! 32  sequence of the segment                8
//! 40  page of this run in the segment        4
//! 44  pages of the run                       4
//! 48  pages of the group, run included       4
//! 52  records                                4
//! 56  bytes of the records                   4
//! 60  incarnation of the writer              4
//! 64  records
//! ```
//!
//! A run proves where it belongs: store, sequence and page are those of the place it is read from, so neither what an
//! earlier use of the slot left behind nor a copy inside a value counts.

use ebbtide_mem::PAGE_BYTES;

use super::record::Records;
use super::{array, pages_in, put, seal, sealed, u32_at, u64_at};

const MAGIC: [u8; 8] = *b"ebbgroup";
/// The bytes of a run in front of its records.
pub const FIXED_BYTES: usize = 64;

/// How many pages the header run of `records_bytes` takes.
pub fn run_pages(records_bytes: usize) -> u64 {
    pages_in((FIXED_BYTES + records_bytes) as u64)
}

/// Where a group stands, and whose it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The writer's store.
    pub store: [u8; 16],
    /// The sequence of its segment.
    pub sequence: u64,
    /// Its first page, counted from the start of the segment.
    pub page: u32,
}

/// The header run of a group.
#[derive(Clone, Copy, Debug)]
pub struct Group<'a> {
    /// Pages of the run.
    pub run_pages: u32,
    /// Pages of the group.
    pub pages: u32,
    /// How many records it has.
    pub count: u32,
    /// Their bytes.
    pub records: &'a [u8],
}

impl<'a> Group<'a> {
    /// The bytes of the run, whole pages.
    pub fn encode(&self, place: Place, incarnation: u32) -> Vec<u8> {
        let mut run = vec![0; self.run_pages as usize * PAGE_BYTES];
        put(&mut run, 0, MAGIC);
        put(&mut run, 16, place.store);
        put(&mut run, 32, place.sequence.to_le_bytes());
        put(&mut run, 40, place.page.to_le_bytes());
        put(&mut run, 44, self.run_pages.to_le_bytes());
        put(&mut run, 48, self.pages.to_le_bytes());
        put(&mut run, 52, self.count.to_le_bytes());
        put(&mut run, 56, (self.records.len() as u32).to_le_bytes()); // lossless: within a segment of at most 1 GiB
        put(&mut run, 60, incarnation.to_le_bytes());
        run[FIXED_BYTES..FIXED_BYTES + self.records.len()].copy_from_slice(self.records);
        seal(&mut run);
        run
    }

    /// The run at the start of `bytes`, which reach to the end of what the group may cover; `None` unless it belongs to
    /// `place` and is whole.
    pub fn decode(bytes: &'a [u8], place: Place) -> Option<Group<'a>> {
        let fixed = bytes.get(..FIXED_BYTES)?;
        if array(fixed, 0) != MAGIC {
            return None; // by far the most frequent: a scan looks at every page
        }
        let here = Place { store: array(fixed, 16), sequence: u64_at(fixed, 32), page: u32_at(fixed, 40) };
        let (run_pages, pages) = (u32_at(fixed, 44), u32_at(fixed, 48));
        let run = bytes.get(..run_pages as usize * PAGE_BYTES).filter(|run| run.len() >= PAGE_BYTES)?;
        let fits = run_pages <= pages && u64::from(pages) <= bytes.len() as u64 / PAGE_BYTES as u64;
        if here != place || !fits || !sealed(run) {
            return None;
        }
        let records = run.get(FIXED_BYTES..)?.get(..u32_at(fixed, 56) as usize)?;
        Some(Group { run_pages, pages, count: u32_at(fixed, 52), records })
    }

    /// Its records.
    pub fn records(&self) -> Records<'a> {
        Records::new(self.records)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::dice::Dice;

    const PLACE: Place = Place { store: [4; 16], sequence: 9, page: 17 };

    fn run() -> Vec<u8> {
        let records = vec![5; 5000];
        let group = Group { run_pages: 2, pages: 4, count: 1, records: &records };
        let mut bytes = group.encode(PLACE, 1);
        bytes.resize(4 * PAGE_BYTES, 6);
        bytes
    }

    #[test]
    fn a_run_counts_only_in_its_place() {
        let bytes = run();
        let group = Group::decode(&bytes, PLACE).unwrap();
        assert_eq!((group.run_pages, group.pages, group.count, group.records.len()), (2, 4, 1, 5000));
        assert!(Group::decode(&bytes, Place { page: 18, ..PLACE }).is_none());
        assert!(Group::decode(&bytes, Place { sequence: 8, ..PLACE }).is_none());
        assert!(Group::decode(&bytes, Place { store: [5; 16], ..PLACE }).is_none());
        assert!(
            Group::decode(&bytes[..4 * PAGE_BYTES - 1], PLACE).is_none(),
            "its values end behind the segment"
        );
    }

    #[test]
    fn damage_is_seen_and_never_panics() {
        let (good, mut dice) = (run(), Dice(3));
        for _ in 0..3000 {
            let bytes = dice.damage(&good[..2 * PAGE_BYTES]);
            let mut padded = bytes.clone();
            padded.resize(4 * PAGE_BYTES, 0);
            assert!(
                padded[..2 * PAGE_BYTES] == good[..2 * PAGE_BYTES] || Group::decode(&padded, PLACE).is_none()
            );
            Group::decode(&bytes, PLACE);
        }
    }
}
