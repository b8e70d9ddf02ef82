//! A record: what a group's header run and a segment's footer say of one value, or of a removal.
//!
//! ```text
//!  0  namespace id                              16
//! 16  generation                                 8
//! 24  length of the whole value                  8   0 for a tombstone
//! 32  sum of the whole value                     8   for a tombstone: its barrier, see below
//! 40  bytes of it stored here                    4   0 for a tombstone
//! 44  page of the first of them in the segment   4   0 for a tombstone
//! 48  length of the key                          2   1 to 1024
//! 50  kind: 1 value, 2 part, 3 tombstone         1
//! 51  codec: 0                                   1   reserved
//! 52  key id: 0                                  4   reserved
//! 56  index of the part                          2
//! 58  parts of the value                         2   1 for a whole value, 0 for a tombstone
//! 60  index of the first block stored here       4
//! 64  sums of the blocks stored here       8 a block
//!     room for a nonce, 12 B, and tags, 16 B a block: only under the superblock's feature bit 0; not in v1
//!     key, then zeros up to a multiple of 8
//! ```
//!
//! The barrier of a tombstone is the greatest segment sequence given out when it was first written: what it voids stands in
//! segments up to there, so it is needed as long as one of those lives.

use ebbtide_core::{BLOCK_BYTES, Generation, KEY_BYTES_MAX, NamespaceId, blocks_in};

use super::{array, put, u16_at, u32_at, u64_at};

/// The bytes of a record in front of its block sums.
pub const FIXED_BYTES: usize = 64;
/// Records start on a multiple of this.
const ALIGN_BYTES: usize = 8;
/// The most bytes one record stores: its blocks are counted in 32 bits and its group in pages of 32 bits.
pub const STORED_BYTES_MAX: u64 = u32::MAX as u64;

const _: () = assert!(FIXED_BYTES.is_multiple_of(ALIGN_BYTES) && KEY_BYTES_MAX <= u16::MAX as usize);

/// What a record stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A whole value.
    Value = 1,
    /// A part of a value that is too long for one place.
    Part = 2,
    /// A removal.
    Tombstone = 3,
}

/// A record, as decoded; key and sums stay where they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// What it stands for.
    pub kind: Kind,
    /// The namespace.
    pub namespace: NamespaceId,
    /// The full key.
    pub key: &'a [u8],
    /// The write that made it.
    pub generation: Generation,
    /// The length of the whole value.
    pub length: u64,
    /// The sum of the whole value; the barrier of a tombstone.
    pub sum: u64,
    /// How many bytes of the value stand here.
    pub stored: u32,
    /// Where they start, in pages from the start of the segment.
    pub page: u32,
    /// Which part of the value they are.
    pub part: u16,
    /// How many parts the value has.
    pub parts: u16,
    /// The index of the first block stored here.
    pub first_block: u32,
    /// The sums of the blocks stored here, eight bytes each.
    pub sums: &'a [u8],
}

impl<'a> Record<'a> {
    /// The bytes that a record takes for `stored` bytes under a key of `key_len`.
    pub fn bytes_for(stored: u64, key_len: usize) -> usize {
        (FIXED_BYTES + 8 * blocks_in(stored) + key_len).next_multiple_of(ALIGN_BYTES)
    }

    /// Appends the record's bytes to `target`.
    pub fn encode(&self, target: &mut Vec<u8>) {
        let start = target.len();
        target.resize(start + Self::bytes_for(u64::from(self.stored), self.key.len()), 0);
        let bytes = &mut target[start..];
        put(bytes, 0, self.namespace.0);
        put(bytes, 16, self.generation.0.to_le_bytes());
        put(bytes, 24, self.length.to_le_bytes());
        put(bytes, 32, self.sum.to_le_bytes());
        put(bytes, 40, self.stored.to_le_bytes());
        put(bytes, 44, self.page.to_le_bytes());
        put(bytes, 48, (self.key.len() as u16).to_le_bytes()); // lossless: at most KEY_BYTES_MAX
        put(bytes, 50, [self.kind as u8, 0]);
        put(bytes, 56, self.part.to_le_bytes());
        put(bytes, 58, self.parts.to_le_bytes());
        put(bytes, 60, self.first_block.to_le_bytes());
        bytes[FIXED_BYTES..FIXED_BYTES + self.sums.len()].copy_from_slice(self.sums);
        let key_at = FIXED_BYTES + self.sums.len();
        bytes[key_at..key_at + self.key.len()].copy_from_slice(self.key);
    }

    /// The record at the start of `bytes`, and how many bytes it takes. `None` when there is none that makes sense.
    fn decode(bytes: &'a [u8]) -> Option<(Record<'a>, usize)> {
        let fixed = bytes.get(..FIXED_BYTES)?;
        let kind = match fixed[50] {
            1 => Kind::Value,
            2 => Kind::Part,
            3 => Kind::Tombstone,
            _ => return None,
        };
        let (stored, key_len) = (u32_at(fixed, 40), usize::from(u16_at(fixed, 48)));
        let size = Self::bytes_for(u64::from(stored), key_len);
        let key_at = FIXED_BYTES + 8 * blocks_in(u64::from(stored));
        let whole = bytes.get(..size)?;
        let record = Record {
            kind,
            namespace: NamespaceId(array(fixed, 0)),
            key: &whole[key_at..key_at + key_len],
            generation: Generation(u64_at(fixed, 16)),
            length: u64_at(fixed, 24),
            sum: u64_at(fixed, 32),
            stored,
            page: u32_at(fixed, 44),
            part: u16_at(fixed, 56),
            parts: u16_at(fixed, 58),
            first_block: u32_at(fixed, 60),
            sums: &whole[FIXED_BYTES..key_at],
        };
        let reserved_unused = fixed[51] == 0 && u32_at(fixed, 52) == 0;
        (reserved_unused && record.makes_sense()).then_some((record, size))
    }

    fn makes_sense(&self) -> bool {
        let from = u64::from(self.first_block) * BLOCK_BYTES as u64;
        let end = from + u64::from(self.stored);
        (1..=KEY_BYTES_MAX).contains(&self.key.len())
            && match self.kind {
                Kind::Value => {
                    self.parts == 1 && self.part == 0 && from == 0 && end == self.length && end > 0
                }
                Kind::Part => {
                    self.part < self.parts && self.parts > 1 && self.stored > 0 && end <= self.length
                }
                Kind::Tombstone => self.stored == 0 && self.length == 0,
            }
    }

    /// The sum of the `index`-th block stored here.
    pub fn block_sum(&self, index: usize) -> Option<u64> {
        self.sums.get(index * 8..index * 8 + 8).map(|bytes| u64_at(bytes, 0))
    }
}

/// Goes through records that stand one behind the other.
#[derive(Clone, Debug)]
pub struct Records<'a> {
    left: &'a [u8],
}

impl<'a> Records<'a> {
    /// The records in `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Records { left: bytes }
    }

    /// True when all bytes made sense, once the iterator has ended.
    pub fn at_end(&self) -> bool {
        self.left.is_empty()
    }
}

impl<'a> Iterator for Records<'a> {
    /// A record and its bytes.
    type Item = (Record<'a>, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let (record, size) = Record::decode(self.left)?;
        let (bytes, left) = self.left.split_at(size);
        self.left = left;
        Some((record, bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::dice::Dice;

    fn records() -> Vec<u8> {
        let mut bytes = Vec::new();
        let base = Record {
            kind: Kind::Value,
            namespace: NamespaceId([9; 16]),
            key: b"a key",
            generation: Generation::new(3, 4),
            length: 300_000,
            sum: 77,
            stored: 300_000,
            page: 5,
            part: 0,
            parts: 1,
            first_block: 0,
            sums: &[1; 24],
        };
        base.encode(&mut bytes);
        let part = Record { kind: Kind::Part, part: 1, parts: 2, stored: 1, first_block: 2, ..base };
        Record { length: 262_145, sums: &[2; 8], ..part }.encode(&mut bytes);
        let grave =
            Record { kind: Kind::Tombstone, length: 0, stored: 0, page: 0, parts: 0, sums: &[], ..base };
        Record { key: &[7; KEY_BYTES_MAX], ..grave }.encode(&mut bytes);
        bytes
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        let bytes = records();
        let mut found = Records::new(&bytes);
        let all: Vec<_> = found.by_ref().map(|(record, _)| record).collect();
        assert!(found.at_end());
        assert_eq!(all.len(), 3);
        assert_eq!(
            (all[0].key, all[0].length, all[0].block_sum(2)),
            (&b"a key"[..], 300_000, Some(0x0101_0101_0101_0101))
        );
        assert_eq!(all[0].block_sum(3), None);
        assert_eq!((all[1].part, all[1].parts, all[1].first_block), (1, 2, 2));
        assert_eq!((all[2].kind, all[2].key.len()), (Kind::Tombstone, KEY_BYTES_MAX));
    }

    #[test]
    fn no_bytes_make_it_panic() {
        let (good, mut dice) = (records(), Dice(1));
        for _ in 0..20_000 {
            let bytes = dice.damage(&good);
            for (record, bytes) in Records::new(&bytes) {
                assert!(record.key.len() <= bytes.len());
                assert!(record.block_sum(usize::from(record.parts)).is_none_or(|_| record.stored > 0));
            }
        }
    }
}
