//! The superblock of a block medium: its bytes, and which of its two copies counts. Pure; no I/O.
//!
//! ```text
//! the superblock area: the first 64 KiB
//!   0 KiB  copy A, 4 KiB        written one after the other, with a flush behind each, so that one is always whole;
//!  32 KiB  copy B, 4 KiB        both say the same but for the time in between, when one has the greater sequence
//!  the rest is zero
//!
//! one copy, little-endian
//!    0  magic "ebbtide\0"                 8
//!    8  checksum: XXH3-64 of bytes 16..   8
//!   16  format version                    4
//!   20  zero                              4
//!   24  incompatible feature bits         8   one that is not known refuses the open
//!   32  compatible feature bits           8   one that is not known is left alone
//!   40  sequence: grows with each change   8
//!   48  store uuid                       16
//!   64  secret of the fingerprints       16   two words
//!   80  incarnation                       4   how often it was opened to write
//!   84  index of the medium in its tier   2
//!   86  media of the tier                 2
//!   88  bytes of a segment                8
//!   96  segments                          4
//!  100  length of the log's state         4   at most 2048
//!  104  offset of segment 0               8
//!  112  created, ms since the Unix epoch  8
//!  120  zero                           1928
//! 2048  the log's own state            2048
//! ```

use std::fmt;

use ebbtide_core::META_BYTES_MAX;
use ebbtide_mem::sum::sum;

/// The bytes in front of the first segment.
pub const AREA_BYTES: u64 = 64 << 10;
/// The bytes of one copy.
pub const COPY_BYTES: usize = 4096;
/// Where the two copies stand.
pub const COPY_OFFSETS: [u64; 2] = [0, 32 << 10];
/// The shortest segment.
pub const SEGMENT_BYTES_MIN: u64 = 1 << 20;
/// The longest segment.
pub const SEGMENT_BYTES_MAX: u64 = 1 << 30;
/// The fewest segments that a log can live on: two in reserve for reclaim, one open, one being sealed, two to choose from.
pub const SEGMENTS_MIN: u32 = 6;
/// The format that this build writes.
pub const VERSION: u32 = 1;
/// The incompatible features that this build knows. Reserved: bit 0, values are encrypted (12 B nonce a record, 16 B tag
/// a block); bit 1, values are compressed.
pub const INCOMPATIBLE_KNOWN: u64 = 0;

const MAGIC: [u8; 8] = *b"ebbtide\0";
const META_AT: usize = 2048;
const _: () = assert!(META_AT + META_BYTES_MAX == COPY_BYTES);
const _: () = assert!(COPY_OFFSETS[1] + COPY_BYTES as u64 <= AREA_BYTES);

/// What a superblock says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Incompatible feature bits.
    pub incompatible: u64,
    /// Compatible feature bits.
    pub compatible: u64,
    /// Grows with every change.
    pub sequence: u64,
    /// The store's uuid.
    pub store: [u8; 16],
    /// The secret of the store's fingerprints.
    pub secret: [u64; 2],
    /// How often the medium was opened to write.
    pub incarnation: u32,
    /// Which medium of its tier this is, from 0.
    pub index: u16,
    /// How many media the tier has.
    pub count: u16,
    /// The bytes of a segment.
    pub segment_bytes: u64,
    /// How many segments there are.
    pub segments: u32,
    /// When it was made, in ms since the Unix epoch.
    pub created_ms: u64,
    /// The log's own state.
    pub meta: Vec<u8>,
}

/// What the superblock area holds.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    /// Nothing but zeros: the medium is new.
    Blank,
    /// A superblock, the newest one that is whole, and which copy it is.
    Valid(Superblock, usize),
    /// No usable superblock; nothing may be written.
    Refused(Refusal),
}

/// Why a medium is not opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It holds something that is not ours.
    Foreign([u8; 8]),
    /// Both copies are damaged; what is wrong with each.
    Damaged([Flaw; 2]),
    /// It was written by a newer build.
    Version(u32),
    /// It uses incompatible features that this build does not know.
    Features(u64),
}

/// What is wrong with one copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// All zeros.
    Blank,
    /// Another magic.
    Magic([u8; 8]),
    /// The checksum does not match.
    Checksum,
    /// The checksum matches, but a field is impossible.
    Field(&'static str),
}

impl fmt::Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Flaw::Blank => f.write_str("all zeros"),
            Flaw::Magic(magic) => write!(f, "starts with \"{}\"", magic.escape_ascii()),
            Flaw::Checksum => f.write_str("checksum does not match"),
            Flaw::Field(name) => write!(f, "impossible {name}"),
        }
    }
}

/// Reads the superblock area (its first [`AREA_BYTES`]; a shorter one counts as zeros behind its end).
pub fn find(area: &[u8]) -> Found {
    if area.iter().all(|byte| *byte == 0) {
        return Found::Blank;
    }
    let copies = COPY_OFFSETS.map(|at| {
        // Lossless: offsets within 64 KiB.
        area.get(at as usize..at as usize + COPY_BYTES).map_or(Err(Copy::Flawed(Flaw::Blank)), decode)
    });
    let sequence_of = |copy: &Result<Superblock, Copy>| match copy {
        Ok(superblock) => Some(superblock.sequence),
        Err(Copy::Refused { sequence, .. }) => Some(*sequence),
        Err(Copy::Flawed(_)) => None,
    };
    let [a, b] = copies;
    match if sequence_of(&a) >= sequence_of(&b) { (a, b, 0) } else { (b, a, 1) } {
        (Ok(superblock), _, which) => Found::Valid(superblock, which),
        (Err(Copy::Refused { refusal, .. }), _, _) => Found::Refused(refusal),
        (Err(Copy::Flawed(one)), Err(Copy::Flawed(other)), which) => {
            Found::Refused(refusal_of(if which == 0 { [one, other] } else { [other, one] }))
        }
        (Err(Copy::Flawed(_)), _, _) => unreachable!("a copy with a sequence was chosen over one without"),
    }
}

/// Two copies without our magic are somebody else's bytes; with it they are ours and damaged.
fn refusal_of(flaws: [Flaw; 2]) -> Refusal {
    match flaws {
        [Flaw::Magic(magic), Flaw::Magic(_) | Flaw::Blank] | [Flaw::Blank, Flaw::Magic(magic)] => {
            Refusal::Foreign(magic)
        }
        [Flaw::Blank, Flaw::Blank] => Refusal::Foreign([0; 8]),
        flaws => Refusal::Damaged(flaws),
    }
}

/// Why one copy does not count.
enum Copy {
    Flawed(Flaw),
    /// Whole, but not for this build.
    Refused {
        refusal: Refusal,
        sequence: u64,
    },
}

fn decode(page: &[u8]) -> Result<Superblock, Copy> {
    let flaw = |flaw| Err(Copy::Flawed(flaw));
    let magic: [u8; 8] = array(page, 0);
    if magic != MAGIC {
        return flaw(if page.iter().all(|byte| *byte == 0) { Flaw::Blank } else { Flaw::Magic(magic) });
    }
    if u64_at(page, 8) != sum(&page[16..]) {
        return flaw(Flaw::Checksum);
    }
    let sequence = u64_at(page, 40);
    let refused = |refusal| Err(Copy::Refused { refusal, sequence });
    if u32_at(page, 16) != VERSION {
        return refused(Refusal::Version(u32_at(page, 16)));
    }
    let unknown = u64_at(page, 24) & !INCOMPATIBLE_KNOWN;
    if unknown != 0 {
        return refused(Refusal::Features(unknown));
    }
    let meta_bytes = u32_at(page, 100) as usize;
    let superblock = Superblock {
        incompatible: u64_at(page, 24),
        compatible: u64_at(page, 32),
        sequence,
        store: array(page, 48),
        secret: [u64_at(page, 64), u64_at(page, 72)],
        incarnation: u32_at(page, 80),
        index: u16::from_le_bytes(array(page, 84)),
        count: u16::from_le_bytes(array(page, 86)),
        segment_bytes: u64_at(page, 88),
        segments: u32_at(page, 96),
        created_ms: u64_at(page, 112),
        meta: page.get(META_AT..META_AT + meta_bytes).map(<[u8]>::to_vec).unwrap_or_default(),
    };
    if meta_bytes > META_BYTES_MAX {
        return flaw(Flaw::Field("length of the log's state"));
    }
    if !segment_bytes_ok(superblock.segment_bytes) {
        return flaw(Flaw::Field("segment size"));
    }
    if superblock.segments < SEGMENTS_MIN || superblock.segments >= ebbtide_core::SegmentId::SLOTS_MAX {
        return flaw(Flaw::Field("number of segments"));
    }
    if u64_at(page, 104) != AREA_BYTES {
        return flaw(Flaw::Field("offset of segment 0"));
    }
    Ok(superblock)
}

/// True for the sizes that a segment may have: powers of two between the bounds.
pub fn segment_bytes_ok(bytes: u64) -> bool {
    bytes.is_power_of_two() && (SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX).contains(&bytes)
}

impl Superblock {
    /// The bytes of one copy.
    pub fn encode(&self) -> Vec<u8> {
        assert!(self.meta.len() <= META_BYTES_MAX, "the log's state is bounded by its caller");
        let mut page = vec![0; COPY_BYTES];
        let mut put = |at: usize, bytes: &[u8]| page[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC);
        put(16, &VERSION.to_le_bytes());
        put(24, &self.incompatible.to_le_bytes());
        put(32, &self.compatible.to_le_bytes());
        put(40, &self.sequence.to_le_bytes());
        put(48, &self.store);
        put(64, &self.secret[0].to_le_bytes());
        put(72, &self.secret[1].to_le_bytes());
        put(80, &self.incarnation.to_le_bytes());
        put(84, &self.index.to_le_bytes());
        put(86, &self.count.to_le_bytes());
        put(88, &self.segment_bytes.to_le_bytes());
        put(96, &self.segments.to_le_bytes());
        put(100, &(self.meta.len() as u32).to_le_bytes());
        put(104, &AREA_BYTES.to_le_bytes());
        put(112, &self.created_ms.to_le_bytes());
        put(META_AT, &self.meta);
        let checksum = sum(&page[16..]);
        page[8..16].copy_from_slice(&checksum.to_le_bytes());
        page
    }

    /// Where segment `slot` starts.
    pub fn offset_of(&self, slot: u32) -> u64 {
        AREA_BYTES + u64::from(slot) * self.segment_bytes
    }

    /// The device bytes that the superblock and all segments take.
    pub fn bytes(&self) -> u64 {
        self.offset_of(self.segments)
    }
}

fn array<const N: usize>(page: &[u8], at: usize) -> [u8; N] {
    page[at..at + N].try_into().expect("the range has N bytes")
}

fn u32_at(page: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(page, at))
}

fn u64_at(page: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(page, at))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn superblock(sequence: u64) -> Superblock {
        Superblock {
            incompatible: 0,
            compatible: 1 << 9,
            sequence,
            store: [7; 16],
            secret: [1, 2],
            incarnation: 3,
            index: 0,
            count: 1,
            segment_bytes: 1 << 20,
            segments: 6,
            created_ms: 1_700_000_000_000,
            meta: b"state".to_vec(),
        }
    }

    fn area(a: Option<&Superblock>, b: Option<&Superblock>) -> Vec<u8> {
        let mut area = vec![0; AREA_BYTES as usize];
        for (at, copy) in COPY_OFFSETS.into_iter().zip([a, b]) {
            if let Some(copy) = copy {
                area[at as usize..at as usize + COPY_BYTES].copy_from_slice(&copy.encode());
            }
        }
        area
    }

    #[test]
    fn the_newer_whole_copy_counts() {
        let (old, new) = (superblock(4), superblock(5));
        assert_eq!(find(&area(None, None)), Found::Blank);
        assert_eq!(find(&area(Some(&old), Some(&new))), Found::Valid(new.clone(), 1));
        assert_eq!(find(&area(Some(&new), Some(&old))), Found::Valid(new.clone(), 0));
        assert_eq!(find(&area(None, Some(&new))), Found::Valid(new.clone(), 1));
        let mut torn = area(Some(&old), Some(&new));
        torn[COPY_OFFSETS[1] as usize + 3000] ^= 1;
        assert_eq!(find(&torn), Found::Valid(old, 0));
    }

    #[test]
    fn what_cannot_be_read_is_refused() {
        let one = superblock(1);
        let mut both = area(Some(&one), Some(&one));
        both[100] ^= 1;
        both[COPY_OFFSETS[1] as usize + 100] ^= 1;
        assert_eq!(find(&both), Found::Refused(Refusal::Damaged([Flaw::Checksum, Flaw::Checksum])));
        let mut foreign = vec![0; AREA_BYTES as usize];
        foreign[..8].copy_from_slice(b"XFSB\0\0\x10\0");
        assert!(matches!(find(&foreign), Found::Refused(Refusal::Foreign(_))));
        foreign[..8].fill(0);
        foreign[1080] = 1; // ext4's superblock starts at 1024
        assert!(matches!(find(&foreign), Found::Refused(Refusal::Foreign(_))));
        let newer = Superblock { incompatible: 1 << 5, sequence: 9, ..one.clone() };
        assert_eq!(find(&area(Some(&one), Some(&newer))), Found::Refused(Refusal::Features(1 << 5)));
        let impossible = Superblock { segment_bytes: 12345, ..one };
        assert!(matches!(find(&area(Some(&impossible), None)), Found::Refused(Refusal::Damaged(_))));
    }

    #[test]
    fn no_bytes_make_it_panic() {
        let good = area(Some(&superblock(4)), Some(&superblock(5)));
        let mut dice = 0x9e37_79b9_7f4a_7c15_u64;
        for round in 0..4000 {
            let mut area = good.clone();
            for _ in 0..=round % 8 {
                dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let at = COPY_OFFSETS[(dice >> 60) as usize % 2] as usize + (dice >> 33) as usize % 160;
                area[at] = (dice >> 20) as u8;
            }
            // A matching checksum, so that the fields behind it are looked at too.
            for at in COPY_OFFSETS {
                let page = &mut area[at as usize..at as usize + COPY_BYTES];
                let checksum = sum(&page[16..]);
                page[8..16].copy_from_slice(&checksum.to_le_bytes());
            }
            find(&area);
            find(&area[..(dice >> 40) as usize % area.len()]);
        }
    }
}
