//! How a run ends, and with which exit code.

use std::fmt;
use std::process::ExitCode;

use ebbtide_core::{Error, ErrorKind};

/// How a run that came to its end went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// The figures count.
    Good,
    /// The figures do not count (`"valid": false`), and nothing was wrong or missing. Exit code 3.
    Void,
    /// Objects were wrong or missing. Exit code 1.
    Wrong,
}

/// Why a run did not come to its end.
#[derive(Debug)]
pub enum Failure {
    /// Wrong use or bad input: one line that names the thing. Exit code 2.
    Usage(String),
    /// The run broke off. Exit code 1.
    Broken(String),
}

/// A result with our [`Failure`].
pub(crate) type Outcome<T> = Result<T, Failure>;

impl Verdict {
    /// The exit code that says so.
    pub fn exit_code(self) -> ExitCode {
        match self {
            Verdict::Good => ExitCode::SUCCESS,
            Verdict::Wrong => ExitCode::from(1),
            Verdict::Void => ExitCode::from(3),
        }
    }
}

impl Failure {
    /// The exit code that says so.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Failure::Usage(_) => ExitCode::from(2),
            Failure::Broken(_) => ExitCode::from(1),
        }
    }

    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Failure::Usage(message.into())
    }

    /// An error that opening a store gave: it is the caller's to mend, but for a defect of ours.
    pub(crate) fn opening(error: Error) -> Self {
        match error.kind() {
            ErrorKind::Internal => Failure::Broken(error.to_string()),
            _ => Failure::Usage(error.to_string()),
        }
    }

    /// An operating-system error met with a file that the caller named.
    pub(crate) fn file(what: impl fmt::Display, error: &std::io::Error) -> Self {
        Failure::Usage(format!("{what}: {error}"))
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::Broken(error.to_string())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // One line, whatever an error brought along.
        let (Failure::Usage(text) | Failure::Broken(text)) = self;
        f.write_str(&text.lines().map(str::trim).collect::<Vec<_>>().join(" "))
    }
}

impl std::error::Error for Failure {}
