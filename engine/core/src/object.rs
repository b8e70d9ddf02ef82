//! An object in memory: immutable bytes with the identity and the sums that travel with them.

use std::borrow::Cow;

use ebbtide_mem::{Buf, Counted};

use crate::budget::Charge;
use crate::checksum::{BlockSums, Identity};
use crate::words::{Generation, NamespaceId};

/// An object whose bytes are in memory. Immutable; readers share it, and its memory is free when the last one is gone.
///
/// Laid out as written: what a read looks at stands beside the reference count, on the same cache line where it can.
#[derive(Debug)]
#[repr(C)]
pub struct Object {
    /// The bytes. Declared before the charge, so that memory is free before its budget says so.
    pub value: Buf,
    /// What the bytes count against.
    pub charge: Charge,
    /// The namespace.
    pub namespace: NamespaceId,
    /// The full key.
    pub key: Box<[u8]>,
    /// The write that made it.
    pub generation: Generation,
    /// The sums of its blocks, seeded with its identity; none when they were not taken (it was read unverified).
    pub sums: BlockSums,
}

/// An object as those who use it hold it.
pub type SharedObject = Counted<Object>;

impl Object {
    /// Its identity.
    pub fn identity(&self) -> Identity {
        Identity::new(self.namespace, &self.key, self.generation)
    }

    /// Its length in bytes.
    pub fn length(&self) -> u64 {
        self.value.len() as u64
    }

    /// The sum of the whole value.
    pub fn sum(&self) -> u64 {
        self.identity().fold(self.length(), self.block_sums().0.iter().copied())
    }

    /// The sums of its blocks; taken now when they were not before.
    pub fn block_sums(&self) -> Cow<'_, BlockSums> {
        match self.sums.0.is_empty() {
            false => Cow::Borrowed(&self.sums),
            true => Cow::Owned(self.identity().sums_of(&self.value)),
        }
    }
}
