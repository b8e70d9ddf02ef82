//! The media under a log of segments. Here: block storage, a file or a device.
//!
//! What it is: geometry, ownership facts (store, incarnation, secret) and the log's own small state in a superblock, and
//! segments as slots behind it. What it is not: it knows nothing of what is in a segment, and it locks nothing: who owns
//! a file or device is settled before it is opened.
//! The decision that shaped it: the superblock is the only thing a medium writes by itself, always the older of two
//! copies, and a superblock that it cannot read is never overwritten.

#![forbid(unsafe_code)]

mod block;
pub mod superblock;

pub use block::{BlockMedium, BlockOptions, geometry};
pub use superblock::{SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, SEGMENTS_MIN};
