//! Words, errors and contracts that every other room speaks, and [`Env`], the only clock, dice and spawn.
//!
//! What it is: plain types, pure functions over them, and traits. What it is not: it does no I/O and holds no unsafe.
//! The decision that shaped it: contracts are batch-first and name no implementation, so that the simulator can stand
//! behind each of them.

#![forbid(unsafe_code)]

mod budget;
mod checksum;
mod device;
mod env;
mod error;
mod medium;
mod object;
mod policy;
mod size;
mod tier;
mod words;

pub use budget::{Budget, Charge};
pub use checksum::{BLOCK_BYTES, BlockSums, Identity, blocks_in};
pub use device::{Batch, BlockDevice, Check, DeviceCounters, DeviceInfo, Done, Op};
pub use env::{BoxFuture, Env, Monotonic, block_on};
pub use error::{Error, ErrorKind, Result};
pub use medium::{META_BYTES_MAX, Medium, MediumIdentity, MediumInfo, MediumOp};
pub use object::{Object, SharedObject};
pub use policy::{Candidate, Cost, Eviction, ObjectId, Placement, Rank, TierView};
pub use size::ByteSize;
pub use tier::{
    CheckpointRow, HotTier, HotUsage, Intent, ReadDone, ReadRequest, Recovered, RecoverySummary, Tier,
    TierInfo, TierUsage, VictimRecord, Victims,
};
pub use words::{
    Fingerprint, Fingerprinter, Generation, KEY_BYTES_MAX, Location, NamespaceId, SegmentId, TierId,
    check_key,
};
