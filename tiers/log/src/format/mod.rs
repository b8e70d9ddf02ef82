//! The bytes of a segment. Pure functions over slices; no I/O, no panics on any bytes, no allocation from lengths found in
//! them. All integers are little-endian. `docs/format.md` draws the whole.
//!
//! ```text
//! page 0          1 ..                                   .. last - 1        last page
//! ┌────────────┬──────────────────────────┬──────┬───────┬─────────────────┬─────────┐
//! │  segment   │ group: header run,       │group │ free  │ footer: the     │ trailer │
//! │  header    │ values, each on a page   │ ...  │       │ records again   │         │
//! └────────────┴──────────────────────────┴──────┴───────┴─────────────────┴─────────┘
//! ```

pub mod checkpoint;
pub mod group;
pub mod meta;
pub mod record;
pub mod segment;

use ebbtide_mem::PAGE_BYTES;
use ebbtide_mem::sum::sum;

/// A page, as offsets in a segment count it.
pub const PAGE: u64 = PAGE_BYTES as u64;

/// How many pages `bytes` take.
pub const fn pages_in(bytes: u64) -> u64 {
    bytes.div_ceil(PAGE)
}

/// Writes `bytes` at `at`.
fn put<const N: usize>(target: &mut [u8], at: usize, bytes: [u8; N]) {
    target[at..at + N].copy_from_slice(&bytes);
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("the range has N bytes")
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array(bytes, at))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}

/// Sets the checksum at byte 8, which covers everything behind it.
fn seal(bytes: &mut [u8]) {
    let checksum = sum(&bytes[16..]);
    put(bytes, 8, checksum.to_le_bytes());
}

/// True when the checksum at byte 8 matches what is behind it.
fn sealed(bytes: &[u8]) -> bool {
    u64_at(bytes, 8) == sum(&bytes[16..])
}

#[cfg(test)]
pub(crate) mod dice {
    /// Small dice for tests that damage bytes.
    pub(crate) struct Dice(pub(crate) u64);

    impl Dice {
        pub(crate) fn roll(&mut self, sides: usize) -> usize {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) as usize % sides
        }

        /// `good` with a few bytes changed, and sometimes cut short.
        pub(crate) fn damage(&mut self, good: &[u8]) -> Vec<u8> {
            let mut bytes = good.to_vec();
            for _ in 0..=self.roll(6) {
                let at = self.roll(bytes.len());
                bytes[at] = self.roll(256) as u8;
            }
            if self.roll(4) == 0 {
                bytes.truncate(self.roll(bytes.len() + 1));
            }
            bytes
        }
    }
}
