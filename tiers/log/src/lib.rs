//! Objects in a log of segments: the one tier below DRAM, on whatever medium it is given.
//!
//! What it is: appending, reading, reclaiming and finding again. Records and values are packed into groups, a group is one
//! write; a full segment is sealed with a footer, and freed as a whole. What it is not: it has no index and no policy. Which
//! records are live, which are worth keeping, and when to flush is the engine's to say.
//! The decision that shaped it: everything on the medium vouches for itself (sequence, place, checksum over identity and
//! value), so recovery believes what it can verify and needs no order among writes but one: data is durable before the
//! footer that lists it.

#![forbid(unsafe_code)]

mod append;
mod checkpoint;
mod flight;
pub mod format;
mod headers;
mod log;
mod parts;
mod place;
mod read;
mod reclaim;
mod recover;
mod room;
mod scan;
mod seal;
mod tier;

pub use tier::{LogOptions, LogTier};
