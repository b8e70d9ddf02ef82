//! One error type: a kind that says what the caller does next, a message that names the thing, a source.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

/// What the caller does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ErrorKind {
    /// Mend the request or the configuration; trying again as it is cannot help.
    Invalid,
    /// No room within the deadline or the bound; try later or elsewhere.
    Full,
    /// The thing is there but cannot be reached or does not answer; try another copy, or later.
    Unavailable,
    /// What was referred to has moved on; look it up again.
    Stale,
    /// Bytes are not what was written; this copy is lost.
    Corrupt,
    /// This build, kernel or device cannot do it.
    Unsupported,
    /// The store or device was closed.
    Closed,
    /// A defect of ours; please report it.
    Internal,
}

/// An error: what to do next ([`kind`](Self::kind)), a message that names the thing, and what caused it.
///
/// A miss is not an error. Cloning shares the source, since one failed device operation can fail a whole batch.
#[derive(Clone)]
pub struct Error {
    kind: ErrorKind,
    message: Box<str>,
    source: Option<Arc<dyn StdError + Send + Sync>>,
}

/// A result with our [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of `kind`; the message is lowercase, has no full stop and names the thing.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Error { kind, message: message.into().into_boxed_str(), source: None }
    }

    /// The same error with what caused it.
    pub fn with_source(mut self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.source = Some(Arc::new(source));
        self
    }

    /// An operating-system error met while doing `what`; the kind follows from the errno.
    pub fn io(what: impl fmt::Display, source: std::io::Error) -> Self {
        use std::io::ErrorKind as Io;
        let kind = match source.kind() {
            Io::NotFound | Io::PermissionDenied | Io::InvalidInput | Io::AlreadyExists | Io::IsADirectory => {
                ErrorKind::Invalid
            }
            Io::ReadOnlyFilesystem | Io::NotADirectory => ErrorKind::Invalid,
            Io::StorageFull | Io::QuotaExceeded | Io::OutOfMemory | Io::FileTooLarge => ErrorKind::Full,
            Io::Unsupported => ErrorKind::Unsupported,
            _ => ErrorKind::Unavailable,
        };
        Error::new(kind, format!("{what}: {source}")).with_source(source)
    }

    /// What the caller does next.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The message alone.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The same error with `what` in front of its message.
    pub fn context(mut self, what: impl fmt::Display) -> Self {
        self.message = format!("{what}: {}", self.message).into_boxed_str();
        self
    }
}

macro_rules! constructors {
    ($($name:ident => $kind:ident),* $(,)?) => {
        impl Error {
            $(
                #[doc = concat!("An error of kind [`", stringify!($kind), "`](ErrorKind::", stringify!($kind), ").")]
                pub fn $name(message: impl Into<String>) -> Self {
                    Error::new(ErrorKind::$kind, message)
                }
            )*
        }
    };
}

constructors! {
    invalid => Invalid, full => Full, unavailable => Unavailable, stale => Stale,
    corrupt => Corrupt, unsupported => Unsupported, closed => Closed, internal => Internal,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.message)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_ref().map(|source| &**source as &(dyn StdError + 'static))
    }
}
