//! The words of the field as types: keys, fingerprints, generations, places.

use std::fmt;
use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher13};

use crate::error::{Error, Result};

/// The longest key, in bytes.
pub const KEY_BYTES_MAX: usize = 1024;

/// Refuses a key that is empty or longer than [`KEY_BYTES_MAX`].
pub fn check_key(key: &[u8]) -> Result<()> {
    match key.len() {
        0 => Err(Error::invalid("key is empty: a key is 1 to 1024 bytes")),
        1..=KEY_BYTES_MAX => Ok(()),
        len => Err(Error::invalid(format!("key of {len} bytes is too long: a key is 1 to 1024 bytes"))),
    }
}

/// Names the namespace that an object lives in: the first 128 bits of a hash of what makes its bytes comparable.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamespaceId(pub [u8; 16]);

impl fmt::Debug for NamespaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A 128-bit keyed hash of namespace id and key. Rows are found by it; they hold no keys.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint {
    /// The upper half; chooses the shard.
    pub high: u64,
    /// The lower half; chooses the place in the shard's table.
    pub low: u64,
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}{:016x}", self.high, self.low)
    }
}

/// Computes fingerprints under one secret (SipHash-1-3 with 128-bit output), so that nobody who lacks the secret can
/// make two keys collide.
#[derive(Clone)]
pub struct Fingerprinter {
    secret: [u64; 2],
}

impl Fingerprinter {
    /// A fingerprinter under `secret`, which never stands on shared media.
    pub fn new(secret: [u64; 2]) -> Self {
        Fingerprinter { secret }
    }

    /// The fingerprint of `key` in `namespace`.
    pub fn fingerprint(&self, namespace: NamespaceId, key: &[u8]) -> Fingerprint {
        let mut hasher = SipHasher13::new_with_keys(self.secret[0], self.secret[1]);
        hasher.write(&namespace.0);
        hasher.write(key);
        let hash = hasher.finish128();
        Fingerprint { high: hash.h1, low: hash.h2 }
    }
}

impl fmt::Debug for Fingerprinter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Fingerprinter(secret not shown)")
    }
}

/// The number of a write: later writes have greater ones, in every incarnation of a store. Zero is never given out.
///
/// The upper 24 bits are the incarnation, the lower 40 count the writes in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation(pub u64);

impl Generation {
    const COUNT_BITS: u32 = 40;

    /// The `count`-th generation of `incarnation`.
    pub fn new(incarnation: u32, count: u64) -> Self {
        debug_assert!(count < 1 << Self::COUNT_BITS && incarnation < 1 << 24);
        Generation((u64::from(incarnation) << Self::COUNT_BITS) | count)
    }
}

/// A tier below DRAM, counted from the top: 0 is the one right below DRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TierId(pub u8);

/// A segment of a log tier: the medium it lies on (upper 8 bits) and its slot there (lower 24 bits).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentId(pub u32);

impl SegmentId {
    /// The slots that one medium may have.
    pub const SLOTS_MAX: u32 = 1 << 24;

    /// Slot `slot` of medium `medium`.
    pub fn new(medium: u8, slot: u32) -> Self {
        debug_assert!(slot < Self::SLOTS_MAX);
        SegmentId((u32::from(medium) << 24) | slot)
    }

    /// Which of the tier's media.
    pub fn medium(self) -> usize {
        (self.0 >> 24) as usize
    }

    /// The slot on that medium.
    pub fn slot(self) -> u32 {
        self.0 & (Self::SLOTS_MAX - 1)
    }
}

impl fmt::Debug for SegmentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.medium(), self.slot())
    }
}

/// Where a value starts in a log tier: a segment and a 4 KiB page in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Location {
    /// The segment.
    pub segment: SegmentId,
    /// The page of the value's first byte, counted from the start of the segment.
    pub page: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_bounded() {
        assert!(check_key(b"").is_err());
        assert!(check_key(&[0; 1024]).is_ok());
        assert!(check_key(&[0; 1025]).is_err());
    }

    #[test]
    fn fingerprints_depend_on_secret_namespace_and_key() {
        let one = Fingerprinter::new([1, 2]);
        let base = one.fingerprint(NamespaceId([0; 16]), b"k");
        assert_eq!(base, one.fingerprint(NamespaceId([0; 16]), b"k"));
        assert_ne!(base, one.fingerprint(NamespaceId([1; 16]), b"k"));
        assert_ne!(base, one.fingerprint(NamespaceId([0; 16]), b"l"));
        assert_ne!(base, Fingerprinter::new([1, 3]).fingerprint(NamespaceId([0; 16]), b"k"));
    }

    #[test]
    fn generations_order_by_incarnation_first() {
        assert!(Generation::new(2, 0) > Generation::new(1, (1 << 40) - 1));
    }
}
