//! The identity-seeded checksum: one sum a 128 KiB block, folded into one for the value.
//!
//! A block's sum is XXH3-64 of its bytes (<https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md>), xored with
//! a word drawn from {namespace id, key, generation, block index}. So a read of the value alone proves both that its
//! bytes are intact and that they are the bytes of this object and this write: another object's block, an older write
//! of the same key, or two blocks swapped give another sum. It guards against faults, not against a forger.

use std::hash::Hasher;

use ebbtide_mem::{Buf, BufMut};
use siphasher::sip::SipHasher13;
use smallvec::SmallVec;

use crate::words::{Generation, NamespaceId};

/// The bytes that one checksum covers.
pub const BLOCK_BYTES: usize = 128 << 10;

/// How many blocks a value of `length` bytes has.
pub fn blocks_in(length: u64) -> usize {
    usize::try_from(length.div_ceil(BLOCK_BYTES as u64)).expect("a value's blocks fit in memory")
}

/// The identity that a checksum covers, as a seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    seed: u64,
}

impl Identity {
    /// The identity of one write: `key` in `namespace` under `generation`. No secret: any node computes the same.
    pub fn new(namespace: NamespaceId, key: &[u8], generation: Generation) -> Self {
        // The two words are the format's constants (ASCII "ebbtide." and "identity").
        let mut hasher = SipHasher13::new_with_keys(0x6562_6274_6964_652e, 0x6964_656e_7469_7479);
        hasher.write(&namespace.0);
        hasher.write(&generation.0.to_le_bytes());
        hasher.write(key);
        Identity { seed: hasher.finish() }
    }

    /// The sum of block `index`, from the plain XXH3-64 of its bytes.
    pub fn block(&self, index: usize, plain: u64) -> u64 {
        plain ^ mix(self.seed.wrapping_add((index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)))
    }

    /// The sum of a value of `length` bytes, from those of its blocks in order.
    pub fn fold(&self, length: u64, blocks: impl IntoIterator<Item = u64>) -> u64 {
        blocks.into_iter().fold(mix(self.seed ^ length), |sum, block| mix(sum ^ block))
    }

    /// The sums of the blocks of `value`.
    pub fn sums_of(&self, value: &Buf) -> BlockSums {
        self.sums(value.len(), |at, len| value.sum_range(at, len))
    }

    /// The sums of the blocks of the value in `value`, which a read just brought.
    pub fn sums_in(&self, value: &BufMut) -> BlockSums {
        self.sums(value.len(), |at, len| value.sum_range(at, len))
    }

    /// Copies `source` into `target` (equal lengths) and sums what was stored, in one pass.
    pub fn fill(&self, target: &mut BufMut, source: &[u8]) -> BlockSums {
        let mut sums = SmallVec::with_capacity(blocks_in(source.len() as u64));
        target.fill_and_sum(source, BLOCK_BYTES, |index, plain| sums.push(self.block(index, plain)));
        BlockSums(sums)
    }

    fn sums(&self, len: usize, plain: impl Fn(usize, usize) -> u64) -> BlockSums {
        let block = |index| {
            let at = index * BLOCK_BYTES;
            self.block(index, plain(at, BLOCK_BYTES.min(len - at)))
        };
        BlockSums((0..blocks_in(len as u64)).map(block).collect())
    }
}

/// The sums of a value's blocks, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockSums(pub SmallVec<[u64; 1]>);

/// The finaliser of SplitMix64: a bijection that spreads every bit.
fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(key: &[u8], generation: u64) -> Identity {
        Identity::new(NamespaceId([7; 16]), key, Generation(generation))
    }

    fn sum(identity: Identity, bytes: &[u8]) -> u64 {
        let mut value = BufMut::heap(bytes.len());
        let sums = identity.fill(&mut value, bytes);
        let folded = identity.fold(bytes.len() as u64, sums.0.iter().copied());
        assert_eq!(sums, identity.sums_in(&value));
        assert_eq!(sums, identity.sums_of(&value.freeze()));
        folded
    }

    #[test]
    fn covers_key_generation_length_and_every_byte() {
        let bytes: Vec<u8> = (0..300_000u32).map(|i| (i % 251) as u8).collect();
        let base = sum(identity(b"a", 1), &bytes);
        assert_ne!(base, sum(identity(b"b", 1), &bytes));
        assert_ne!(base, sum(identity(b"a", 2), &bytes));
        assert_ne!(base, sum(identity(b"a", 1), &bytes[..299_999]));
        for at in [0, 131_071, 131_072, 262_144, 299_999] {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1;
            assert_ne!(base, sum(identity(b"a", 1), &flipped), "a flip at {at} went unseen");
        }
    }

    #[test]
    fn swapped_blocks_are_seen() {
        let (mut one, two) = (vec![1; BLOCK_BYTES], vec![2; BLOCK_BYTES]);
        let mut other = two.clone();
        other.extend_from_slice(&one);
        one.extend_from_slice(&two);
        assert_ne!(sum(identity(b"a", 1), &one), sum(identity(b"a", 1), &other));
    }
}
