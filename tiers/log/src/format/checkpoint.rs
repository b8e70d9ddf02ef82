//! A checkpoint: the rows of a closed tier, so that the next start reads no footers.
//!
//! It stands in segments of its own (kind 2 in their headers), in chunks 256 KiB apart from page 1 on; the state in the
//! superblock lists the segments. Chunks of segments come first, then those of parts, then those of rows.
//!
//! ```text
//! chunk                                       row, 48 B                   segment, 16 B
//!  0  magic "ebbchunk"                  8      0  fingerprint  16          0  medium, slot  4
//!  8  XXH3-64 from 16 to the end        8     16  generation    8          4  tombstones    4
//! 16  store uuid                       16     24  length        8          8  sequence      8
//! 32  number of the checkpoint          8     32  sum           8
//! 40  index of the chunk                4     40  location      8         part, 24 B
//! 44  kind: 1 segments 2 parts 3 rows   4                                  0  location of part 0    8
//! 48  bytes of the entries              4     location: medium and slot    8  location of the part  8
//! 52  zero                             12     4, page 4                   16  its index             2
//! 64  entries                                                             18  parts                 2
//!                                                                         20  pages of a part       4
//! ```

use ebbtide_core::{CheckpointRow, Fingerprint, Generation, Location, SegmentId};
use ebbtide_mem::sum::sum;

use super::{PAGE, array, put, u16_at, u32_at, u64_at};

/// The distance of chunks, and the most that one takes.
pub const CHUNK_BYTES: usize = 256 << 10;
const MAGIC: [u8; 8] = *b"ebbchunk";
const FIXED_BYTES: usize = 64;
/// The room for entries in a chunk.
pub const ENTRIES_BYTES_MAX: usize = CHUNK_BYTES - FIXED_BYTES;

/// How many chunks a segment of `segment_pages` holds behind its header.
pub fn chunks_per_segment(segment_pages: u32) -> u32 {
    (segment_pages - 1) / (CHUNK_BYTES as u64 / PAGE) as u32
}

/// Where the chunk `index` of its segment starts, in bytes.
pub fn chunk_offset(index: u32) -> u64 {
    PAGE + u64::from(index) * CHUNK_BYTES as u64
}

/// What the entries of a chunk are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Entries {
    /// [`SegmentEntry`].
    Segments = 1,
    /// [`PartEntry`].
    Parts = 2,
    /// [`CheckpointRow`].
    Rows = 3,
}

/// Whose chunk it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkId {
    /// The store.
    pub store: [u8; 16],
    /// The number of the checkpoint.
    pub checkpoint: u64,
    /// The index of the chunk in it.
    pub index: u32,
}

/// A segment that is not free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentEntry {
    /// Where it lies.
    pub segment: SegmentId,
    /// Tombstones in it.
    pub tombstones: u32,
    /// Its sequence.
    pub sequence: u64,
}

/// A further part of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartEntry {
    /// Where part 0 starts.
    pub first: Location,
    /// Where this part starts.
    pub location: Location,
    /// Which part it is.
    pub part: u16,
    /// How many there are.
    pub parts: u16,
    /// Pages of each but the last.
    pub part_pages: u32,
}

/// An entry of a chunk.
pub trait Entry: Sized {
    /// The bytes of one.
    const BYTES: usize;
    /// What a chunk of them is called.
    const ENTRIES: Entries;
    /// Appends its bytes.
    fn encode(&self, target: &mut Vec<u8>);
    /// Reads exactly [`BYTES`](Self::BYTES) bytes.
    fn decode(bytes: &[u8]) -> Self;
}

fn put_location(location: Location, target: &mut Vec<u8>) {
    target.extend(location.segment.0.to_le_bytes());
    target.extend(location.page.to_le_bytes());
}

fn location_at(bytes: &[u8], at: usize) -> Location {
    Location { segment: SegmentId(u32_at(bytes, at)), page: u32_at(bytes, at + 4) }
}

impl Entry for CheckpointRow {
    const BYTES: usize = 48;
    const ENTRIES: Entries = Entries::Rows;

    fn encode(&self, target: &mut Vec<u8>) {
        for word in [self.fingerprint.high, self.fingerprint.low, self.generation.0, self.length, self.sum] {
            target.extend(word.to_le_bytes());
        }
        put_location(self.location, target);
    }

    fn decode(bytes: &[u8]) -> Self {
        CheckpointRow {
            fingerprint: Fingerprint { high: u64_at(bytes, 0), low: u64_at(bytes, 8) },
            generation: Generation(u64_at(bytes, 16)),
            length: u64_at(bytes, 24),
            sum: u64_at(bytes, 32),
            location: location_at(bytes, 40),
        }
    }
}

impl Entry for SegmentEntry {
    const BYTES: usize = 16;
    const ENTRIES: Entries = Entries::Segments;

    fn encode(&self, target: &mut Vec<u8>) {
        target.extend(self.segment.0.to_le_bytes());
        target.extend(self.tombstones.to_le_bytes());
        target.extend(self.sequence.to_le_bytes());
    }

    fn decode(bytes: &[u8]) -> Self {
        let segment = SegmentId(u32_at(bytes, 0));
        SegmentEntry { segment, tombstones: u32_at(bytes, 4), sequence: u64_at(bytes, 8) }
    }
}

impl Entry for PartEntry {
    const BYTES: usize = 24;
    const ENTRIES: Entries = Entries::Parts;

    fn encode(&self, target: &mut Vec<u8>) {
        put_location(self.first, target);
        put_location(self.location, target);
        target.extend(self.part.to_le_bytes());
        target.extend(self.parts.to_le_bytes());
        target.extend(self.part_pages.to_le_bytes());
    }

    fn decode(bytes: &[u8]) -> Self {
        PartEntry {
            first: location_at(bytes, 0),
            location: location_at(bytes, 8),
            part: u16_at(bytes, 16),
            parts: u16_at(bytes, 18),
            part_pages: u32_at(bytes, 20),
        }
    }
}

/// The entries that a chunk holds.
pub fn entries_max<E: Entry>() -> usize {
    ENTRIES_BYTES_MAX / E::BYTES
}

/// A chunk of entries, as decoded.
#[derive(Clone, Copy, Debug)]
pub struct Chunk<'a> {
    /// What they are.
    pub entries: Entries,
    /// Their bytes.
    pub bytes: &'a [u8],
}

impl<'a> Chunk<'a> {
    /// The bytes of a chunk of `entries`, at most [`entries_max`] of them.
    pub fn encode<E: Entry>(id: ChunkId, entries: &[E]) -> Vec<u8> {
        let mut chunk = vec![0; FIXED_BYTES];
        entries.iter().for_each(|entry| entry.encode(&mut chunk));
        assert!(chunk.len() <= CHUNK_BYTES, "the writer of a checkpoint bounds the entries of a chunk");
        put(&mut chunk, 0, MAGIC);
        put(&mut chunk, 16, id.store);
        put(&mut chunk, 32, id.checkpoint.to_le_bytes());
        put(&mut chunk, 40, id.index.to_le_bytes());
        put(&mut chunk, 44, (E::ENTRIES as u32).to_le_bytes());
        let bytes = (chunk.len() - FIXED_BYTES) as u32; // lossless: bounded above
        put(&mut chunk, 48, bytes.to_le_bytes());
        super::seal(&mut chunk);
        chunk
    }

    /// The chunk at the start of `bytes`; `None` unless it is whole and the one that `id` names.
    pub fn decode(bytes: &'a [u8], id: ChunkId) -> Option<Chunk<'a>> {
        let fixed = bytes.get(..FIXED_BYTES)?;
        let end = FIXED_BYTES.checked_add(u32_at(fixed, 48) as usize)?;
        let chunk = bytes.get(..end)?;
        let here =
            ChunkId { store: array(fixed, 16), checkpoint: u64_at(fixed, 32), index: u32_at(fixed, 40) };
        if array(fixed, 0) != MAGIC || here != id || u64_at(fixed, 8) != sum(&chunk[16..]) {
            return None;
        }
        let entries = match u32_at(fixed, 44) {
            1 => Entries::Segments,
            2 => Entries::Parts,
            3 => Entries::Rows,
            _ => return None,
        };
        Some(Chunk { entries, bytes: &chunk[FIXED_BYTES..] })
    }

    /// Its entries, when they are of this sort.
    pub fn iter<E: Entry>(&self) -> impl Iterator<Item = E> + use<'a, E> {
        let bytes = if self.entries == E::ENTRIES { self.bytes } else { &[] };
        bytes.chunks_exact(E::BYTES).map(E::decode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::dice::Dice;

    const ID: ChunkId = ChunkId { store: [8; 16], checkpoint: 3, index: 1 };

    fn row(n: u64) -> CheckpointRow {
        CheckpointRow {
            fingerprint: Fingerprint { high: n, low: !n },
            generation: Generation(n + 1),
            length: n + 2,
            sum: n + 3,
            location: Location { segment: SegmentId::new(1, 4), page: 9 },
        }
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        let rows: Vec<_> = (0..entries_max::<CheckpointRow>() as u64).map(row).collect();
        let bytes = Chunk::encode(ID, &rows);
        let chunk = Chunk::decode(&bytes, ID).unwrap();
        assert_eq!(chunk.iter::<CheckpointRow>().collect::<Vec<_>>(), rows);
        assert_eq!(chunk.iter::<SegmentEntry>().count(), 0);
        assert!(Chunk::decode(&bytes, ChunkId { index: 2, ..ID }).is_none());
        assert!(Chunk::decode(&bytes, ChunkId { checkpoint: 2, ..ID }).is_none());
        let first = Location { segment: SegmentId(1), page: 2 };
        let part =
            PartEntry { first, location: Location { page: 3, ..first }, part: 1, parts: 2, part_pages: 32 };
        let segment = SegmentEntry { segment: SegmentId(1), tombstones: 4, sequence: 5 };
        let bytes = Chunk::encode(ID, &[part]);
        assert_eq!(Chunk::decode(&bytes, ID).unwrap().iter::<PartEntry>().next(), Some(part));
        let bytes = Chunk::encode(ID, &[segment]);
        assert_eq!(Chunk::decode(&bytes, ID).unwrap().iter::<SegmentEntry>().next(), Some(segment));
    }

    #[test]
    fn damage_is_seen_and_never_panics() {
        let (good, mut dice) = (Chunk::encode(ID, &[row(1), row(2)]), Dice(5));
        for _ in 0..5000 {
            let bytes = dice.damage(&good);
            assert!(bytes == good || Chunk::decode(&bytes, ID).is_none());
        }
    }
}
