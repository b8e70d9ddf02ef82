//! The tier manager: one index, one order of departure, movement between tiers.
//!
//! What it is: the decisions. It knows where every object is, makes room, writes victims below, reads them back. What it is
//! not: it names no concrete tier, does no I/O of its own and has no clock but [`Env`](ebbtide_core::Env).
//! The decision that shaped it: objects at the cold end of DRAM are written below *ahead* of need and stay readable until
//! their room is taken. So a put rarely waits for a device, and nothing that fits is ever pushed out early.
//!
//! Path of a put: check → memory (evicting clean objects on the caller's thread) → copy with checksum → row. Path of a
//! get: one lookup → exactly one tier.

#![forbid(unsafe_code)]

mod engine;
mod eviction;
mod explain;
mod index;
mod mover;
mod placement;
mod read;
mod reasons;
mod reclaim;
mod recovery;
mod room;
mod settings;
mod stats;
mod table;
mod touch;
mod wait;

pub use engine::{Engine, Parts, Put};
pub use eviction::{Lru, Policy, S3Fifo};
pub use explain::{Explanation, Whereabouts};
pub use placement::TidalPlacement;
pub use read::{Hit, Served};
pub use reasons::Gone;
pub use settings::Settings;
pub use stats::Stats;
