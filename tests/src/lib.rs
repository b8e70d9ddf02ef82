//! A whole store in one thread from one seed.
//!
//! What it is: a simulated [`Env`](ebbtide_core::Env), a world of arena, tiers, devices and engine in it that crashes and
//! starts again, and a model that knows what each answer may be. What it is not: it measures nothing, and nothing
//! but tests imports it.
//! The decision that shaped it: an object's bytes follow from its key and version, and a run follows from its seed. So
//! every answer checks itself, and every failure is one number.

#![forbid(unsafe_code)]

pub mod body;
mod dice;
mod env;
pub mod faketier;
pub mod model;
pub mod workload;
pub mod world;

pub use dice::Dice;
pub use env::{Schedule, SimEnv, SimOptions};
