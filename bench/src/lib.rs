//! The bench: what every promise about speed is measured with.
//!
//! What it is: trace replay, the offload harness and two smaller measurements, as subcommands of the one binary. What it
//! is not: it knows the store only from outside, through `ebbtide-node`.
//! The decision that shaped it: a store's rate means nothing on a noisy machine, so each is set beside a bare arm in
//! adjacent slices, and a bare arm beside itself says whether noise decided.

#![forbid(unsafe_code)]

mod body;
mod clock;
mod dice;
mod diskstats;
mod dram;
mod fail;
mod machine;
mod offload;
mod oracle;
mod place;
mod progress;
mod replay;
mod report;
mod start;
mod stat;
mod store_options;
mod threads;
mod trace;

use clap::Subcommand;

pub use dram::DramOptions;
pub use fail::{Failure, Verdict};
pub use offload::OffloadOptions;
pub use replay::ReplayOptions;
pub use start::StartOptions;

/// The subcommands of `ebbtide bench`.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Write more than DRAM holds, read it back, check every byte; beside the bare device
    Offload(Box<OffloadOptions>),
    /// Replay a request trace; hit rates beside exact LRU and Belady
    Replay(Box<ReplayOptions>),
    /// Gets and puts of resident objects beside plain copies
    Dram(Box<DramOptions>),
    /// Time to the first answer with many objects on SSD, after a clean stop and after a kill
    Start(Box<StartOptions>),
}

/// Runs one.
///
/// Errors: Usage for wrong use or bad input, Broken when the run broke off.
pub fn run(command: BenchCommand) -> Result<Verdict, Failure> {
    match command {
        BenchCommand::Offload(options) => offload::run(&options),
        BenchCommand::Replay(options) => replay::run(&options),
        BenchCommand::Dram(options) => dram::run(&options),
        BenchCommand::Start(options) => start::run(&options),
    }
}
