//! The composition root: [`Store::open`] is the one place that names arena, devices, media and tiers.
//!
//! What it is: construction, ownership of a directory, and calls that park their caller. What it is not: it decides nothing
//! and moves nothing; that is the engine's and the tiers'.
//! The decision that shaped it: a store is opened from data (a [`Config`]) and either is whole or is refused with one line.

#![forbid(unsafe_code)]

mod bare;
mod config;
mod env;
mod open;
mod owner;
mod status;
mod store;

pub use bare::{Bare, BareBuffers};
pub use config::{Config, DeviceKind, Prealloc};
pub use ebbtide_core::{ByteSize, Error, ErrorKind, Object, RecoverySummary, Result, TierId};
pub use ebbtide_device::{BareResult, BareSpec};
pub use ebbtide_engine::{Explanation, Gone, Hit, Policy, Put, Served, Stats as EngineStats, Whereabouts};
pub use status::{BUILT_WITH, Status};
pub use store::{Progress, Stats, Store};
