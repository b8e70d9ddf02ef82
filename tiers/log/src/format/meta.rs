//! The log's own state in the superblock: whether the tier was closed cleanly, and where its checkpoint is.
//!
//! ```text
//!  0  version: 1                            2
//!  2  clean: 1 after a close, 0 while open  1
//!  3  zero                                  1
//!  4  segments of the checkpoint            4
//!  8  chunks in them                        4
//! 12  zero                                  4
//! 16  rows in them                          8
//! 24  number of the checkpoint              8   stands in each of its chunks
//! 32  its segments, in order                4 each: medium (8 bits), slot (24)
//! ```
//!
//! Zero chunks: closed cleanly, but without a checkpoint. An empty state: never closed.

use ebbtide_core::{META_BYTES_MAX, SegmentId};

use super::{array, put, u16_at, u32_at, u64_at};

const FIXED_BYTES: usize = 32;
const VERSION: u16 = 1;
/// The most segments that a checkpoint may take.
pub const SEGMENTS_MAX: usize = (META_BYTES_MAX - FIXED_BYTES) / 4;

/// The log's own state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    /// True from a close to the next start.
    pub clean: bool,
    /// Chunks of the checkpoint; 0 when there is none.
    pub chunks: u32,
    /// Rows in them.
    pub rows: u64,
    /// The number that stands in each chunk.
    pub checkpoint: u64,
    /// Where they are, in order.
    pub segments: Vec<SegmentId>,
}

impl Meta {
    /// Its bytes, at most [`META_BYTES_MAX`].
    pub fn encode(&self) -> Vec<u8> {
        assert!(self.segments.len() <= SEGMENTS_MAX, "the writer of a checkpoint bounds its segments");
        let mut bytes = vec![0; FIXED_BYTES];
        put(&mut bytes, 0, VERSION.to_le_bytes());
        put(&mut bytes, 2, [u8::from(self.clean)]);
        put(&mut bytes, 4, (self.segments.len() as u32).to_le_bytes());
        put(&mut bytes, 8, self.chunks.to_le_bytes());
        put(&mut bytes, 16, self.rows.to_le_bytes());
        put(&mut bytes, 24, self.checkpoint.to_le_bytes());
        self.segments.iter().for_each(|segment| bytes.extend(segment.0.to_le_bytes()));
        bytes
    }

    /// The state in `bytes`; `None` for an empty one and for one that this build does not know.
    pub fn decode(bytes: &[u8]) -> Option<Meta> {
        let (fixed, rest) = bytes.split_at_checked(FIXED_BYTES)?;
        let segments = rest.get(..(u32_at(fixed, 4) as usize).checked_mul(4)?)?;
        (u16_at(fixed, 0) == VERSION).then(|| Meta {
            clean: fixed[2] == 1,
            chunks: u32_at(fixed, 8),
            rows: u64_at(fixed, 16),
            checkpoint: u64_at(fixed, 24),
            segments: segments
                .chunks_exact(4)
                .map(|id| SegmentId(u32::from_le_bytes(array(id, 0))))
                .collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::dice::Dice;

    #[test]
    fn what_is_encoded_is_decoded_and_damage_never_panics() {
        let meta = Meta {
            clean: true,
            chunks: 9,
            rows: 1 << 33,
            checkpoint: 5,
            segments: vec![SegmentId(7); SEGMENTS_MAX],
        };
        let bytes = meta.encode();
        assert!(bytes.len() <= META_BYTES_MAX);
        assert_eq!(Meta::decode(&bytes), Some(meta));
        assert_eq!(Meta::decode(&[]), None);
        let mut dice = Dice(4);
        for _ in 0..2000 {
            Meta::decode(&dice.damage(&bytes[..60]));
        }
    }
}
