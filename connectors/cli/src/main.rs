//! The one binary of Ebbtide.

#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::sync::LazyLock;

use clap::error::ErrorKind;
use clap::{Parser, Subcommand};
use ebbtide_bench::BenchCommand;

/// A tiered KV-cache store for LLM serving: hot objects in DRAM, the rest on local SSD.
#[derive(Debug, Parser)]
#[command(name = "ebbtide", version = VERSION.as_str(), after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Measure: offload to SSD and back, trace replay, DRAM, start-up
    #[command(subcommand, after_help = BENCH_EXAMPLES)]
    Bench(BenchCommand),
}

/// The version, and the optional parts that this binary was built with.
static VERSION: LazyLock<String> = LazyLock::new(|| {
    let parts = match ebbtide_node::BUILT_WITH {
        [] => "default parts".to_string(),
        parts => parts.join(", "),
    };
    format!("{} ({parts})", env!("CARGO_PKG_VERSION"))
});

const EXAMPLES: &str = "\
Examples:
  ebbtide bench offload                       write more than DRAM holds, read it back, check every byte
  ebbtide bench replay trace.jsonl            hit rates of a request trace
  ebbtide bench offload --help                all options of one command

Exit codes: 0 good, 1 failed, 2 wrong use or bad input, 3 a measurement that does not count.";

const BENCH_EXAMPLES: &str = "\
Examples:
  ebbtide bench offload --dir /mnt/nvme/kv --dram 512MiB --ssd 6GiB --value 1MiB --total 4GiB
  ebbtide bench replay trace.jsonl --bytes-per-token 32 --dram 160MiB --ssd 0 --policy lru
  ebbtide bench dram --value 64KiB,1MiB
  ebbtide bench start --objects 1000000";

fn main() -> ExitCode {
    let Command::Bench(command) = match Cli::try_parse() {
        Ok(cli) => cli.command,
        Err(error) => return refuse(&error),
    };
    match ebbtide_bench::run(command) {
        Ok(verdict) => verdict.exit_code(),
        Err(failure) => {
            eprintln!("error: {failure}");
            failure.exit_code()
        }
    }
}

/// Shows help and versions as they are, and a misuse as one line.
fn refuse(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        // A reader that went away needs no help any more.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let _ = error.print();
        return ExitCode::from(2);
    }
    eprintln!("{}", one_line(&error.to_string()));
    ExitCode::from(2)
}

/// What clap says before it begins to explain.
fn one_line(text: &str) -> String {
    let said = text.lines().take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more"));
    let words: Vec<&str> = said.map(str::trim).filter(|line| !line.is_empty()).collect();
    format!("{} (--help says more)", words.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(arguments: &[&str]) -> String {
        let arguments = ["ebbtide"].iter().chain(arguments);
        one_line(&Cli::try_parse_from(arguments).unwrap_err().to_string())
    }

    #[test]
    fn a_misuse_is_one_line_that_names_the_thing() {
        for (arguments, named) in [
            (&["bench", "offload", "--nope"][..], "--nope"),
            (&["bench", "offload", "--value", "5parsecs"], "5parsecs"),
            (&["bench", "offload", "--verify-journal", "j"], "--dir"),
            (&["bench", "offload", "--journal", "a", "--verify-journal", "b", "--dir", "c"], "--journal"),
            (&["bnech"], "bnech"),
        ] {
            let line = refused(arguments);
            assert!(line.starts_with("error: ") && line.contains(named) && !line.contains('\n'), "{line}");
        }
    }

    #[test]
    fn the_commands_are_well_formed() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }
}
