//! The first and the last page of a segment: its header, and the trailer that seals it.
//!
//! ```text
//! header, page 0                                trailer, the last page
//!  0  magic "ebbsegmt"              8            0  magic "ebbtrail"               8
//!  8  checksum of bytes 16..4096    8            8  checksum of bytes 16..4096     8
//! 16  store uuid (the writer's)    16           16  store uuid                    16
//! 32  format version                2           32  sequence                       8
//! 34  kind: 1 log, 2 checkpoint     1           40  first page of the footer       4
//! 35  state: 1 open, 2 free         1           44  bytes of the footer            4
//! 36  incarnation of the writer     4           48  XXH3-64 of the footer          8
//! 40  sequence                      8           56  records in it                  4
//! 48  medium (8 bits), slot (24)    4           60  tombstones among them          4
//! 52  zero                          4           64  bytes of values, in pages      8
//! 56  created, ms since 1970        8           72  medium, slot                   4
//! 64  zero                       4032           76  zero                        4020
//! ```
//!
//! A sequence is given out once in the life of a store: incarnation << 40 | count. A trailer belongs to the header only when
//! their sequences are equal: a slot that is written anew makes the old trailer void by its header alone. What is not zero
//! in a header fits one 512-byte sector, so a power cut leaves the old or the new one.

use ebbtide_core::SegmentId;
use ebbtide_mem::PAGE_BYTES;

use super::{array, put, seal, sealed, u16_at, u32_at, u64_at};

const HEADER_MAGIC: [u8; 8] = *b"ebbsegmt";
const TRAILER_MAGIC: [u8; 8] = *b"ebbtrail";
const VERSION: u16 = 1;
const HEADER_USED_BYTES: usize = 64;
const TRAILER_USED_BYTES: usize = 76;
const _: () = assert!(HEADER_USED_BYTES <= 512 && TRAILER_USED_BYTES <= 512);

/// What a segment is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Use {
    /// Objects.
    Log = 1,
    /// A piece of a checkpoint.
    Checkpoint = 2,
}

/// The first page of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The writer's store.
    pub store: [u8; 16],
    /// What it is used for.
    pub used_for: Use,
    /// True once nothing in it is needed.
    pub free: bool,
    /// The incarnation that wrote it.
    pub incarnation: u32,
    /// Its number in the life of the store.
    pub sequence: u64,
    /// Where it lies.
    pub segment: SegmentId,
    /// When it was opened, in ms since the Unix epoch.
    pub created_ms: u64,
}

impl Header {
    /// The bytes of the page.
    pub fn encode(&self) -> [u8; PAGE_BYTES] {
        let mut page = [0; PAGE_BYTES];
        put(&mut page, 0, HEADER_MAGIC);
        put(&mut page, 16, self.store);
        put(&mut page, 32, VERSION.to_le_bytes());
        put(&mut page, 34, [self.used_for as u8, if self.free { 2 } else { 1 }]);
        put(&mut page, 36, self.incarnation.to_le_bytes());
        put(&mut page, 40, self.sequence.to_le_bytes());
        put(&mut page, 48, self.segment.0.to_le_bytes());
        put(&mut page, 56, self.created_ms.to_le_bytes());
        seal(&mut page);
        page
    }

    /// The header in `page`; `None` when there is none.
    pub fn decode(page: &[u8]) -> Option<Header> {
        let page = page.get(..PAGE_BYTES)?;
        if array(page, 0) != HEADER_MAGIC || !sealed(page) || u16_at(page, 32) != VERSION {
            return None;
        }
        Some(Header {
            store: array(page, 16),
            used_for: match page[34] {
                1 => Use::Log,
                2 => Use::Checkpoint,
                _ => return None,
            },
            free: match page[35] {
                1 => false,
                2 => true,
                _ => return None,
            },
            incarnation: u32_at(page, 36),
            sequence: u64_at(page, 40),
            segment: SegmentId(u32_at(page, 48)),
            created_ms: u64_at(page, 56),
        })
    }
}

/// The last page of a sealed segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trailer {
    /// The writer's store.
    pub store: [u8; 16],
    /// The sequence of the segment that it seals.
    pub sequence: u64,
    /// Where the segment lies.
    pub segment: SegmentId,
    /// The first page of the footer.
    pub footer_page: u32,
    /// The length of the footer; it ends where its last record does.
    pub footer_bytes: u32,
    /// The checksum of the footer.
    pub footer_sum: u64,
    /// Records in the footer.
    pub records: u32,
    /// Tombstones among them.
    pub tombstones: u32,
    /// Bytes of values, rounded up to pages.
    pub value_bytes: u64,
}

impl Trailer {
    /// The bytes of the page.
    pub fn encode(&self) -> [u8; PAGE_BYTES] {
        let mut page = [0; PAGE_BYTES];
        put(&mut page, 0, TRAILER_MAGIC);
        put(&mut page, 16, self.store);
        put(&mut page, 32, self.sequence.to_le_bytes());
        put(&mut page, 40, self.footer_page.to_le_bytes());
        put(&mut page, 44, self.footer_bytes.to_le_bytes());
        put(&mut page, 48, self.footer_sum.to_le_bytes());
        put(&mut page, 56, self.records.to_le_bytes());
        put(&mut page, 60, self.tombstones.to_le_bytes());
        put(&mut page, 64, self.value_bytes.to_le_bytes());
        put(&mut page, 72, self.segment.0.to_le_bytes());
        seal(&mut page);
        page
    }

    /// The trailer in `page`; `None` when there is none.
    pub fn decode(page: &[u8]) -> Option<Trailer> {
        let page = page.get(..PAGE_BYTES)?;
        if array(page, 0) != TRAILER_MAGIC || !sealed(page) {
            return None;
        }
        Some(Trailer {
            store: array(page, 16),
            sequence: u64_at(page, 32),
            segment: SegmentId(u32_at(page, 72)),
            footer_page: u32_at(page, 40),
            footer_bytes: u32_at(page, 44),
            footer_sum: u64_at(page, 48),
            records: u32_at(page, 56),
            tombstones: u32_at(page, 60),
            value_bytes: u64_at(page, 64),
        })
    }

    /// True when this trailer seals the segment of `header`.
    pub fn seals(&self, header: &Header) -> bool {
        (self.store, self.sequence, self.segment) == (header.store, header.sequence, header.segment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::dice::Dice;

    const HEADER: Header = Header {
        store: [3; 16],
        used_for: Use::Log,
        free: false,
        incarnation: 2,
        sequence: 2 << 40 | 7,
        segment: SegmentId(5),
        created_ms: 1_700_000_000_000,
    };
    const TRAILER: Trailer = Trailer {
        store: [3; 16],
        sequence: 2 << 40 | 7,
        segment: SegmentId(5),
        footer_page: 200,
        footer_bytes: 9000,
        footer_sum: 1,
        records: 40,
        tombstones: 2,
        value_bytes: 1 << 19,
    };

    #[test]
    fn what_is_encoded_is_decoded() {
        assert_eq!(Header::decode(&HEADER.encode()), Some(HEADER));
        let free = Header { free: true, used_for: Use::Checkpoint, ..HEADER };
        assert_eq!(Header::decode(&free.encode()), Some(free));
        assert_eq!(Trailer::decode(&TRAILER.encode()), Some(TRAILER));
        assert!(TRAILER.seals(&HEADER));
        assert!(!Trailer { sequence: 2 << 40 | 6, ..TRAILER }.seals(&HEADER));
        assert_eq!(Header::decode(&[0; PAGE_BYTES]), None);
        assert_eq!(Trailer::decode(&HEADER.encode()), None);
    }

    #[test]
    fn damage_is_seen_and_never_panics() {
        let mut dice = Dice(2);
        for _ in 0..3000 {
            let (header, trailer) = (HEADER.encode(), TRAILER.encode());
            let damaged = dice.damage(&header);
            assert!(damaged == header || Header::decode(&damaged).is_none());
            let damaged = dice.damage(&trailer);
            assert!(damaged == trailer || Trailer::decode(&damaged).is_none());
        }
    }
}
