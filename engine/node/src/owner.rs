//! One owner of a store directory at a time, by a lock that the kernel drops with its process.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use ebbtide_core::{Error, Result};

/// The lock's file name in a store directory.
pub(crate) const LOCK_NAME: &str = "LOCK";

/// Ownership of a store directory; ends when dropped.
pub(crate) struct Owner {
    _lock: File,
    path: PathBuf,
    bytes: u64,
}

impl Owner {
    /// Takes `dir`, made when missing. Invalid when it cannot be made or written; Unavailable, naming the holder, when another
    /// process (or another store of this one) has it.
    pub(crate) fn take(dir: &Path) -> Result<Owner> {
        std::fs::create_dir_all(dir)
            .map_err(|error| refuse(error, format_args!("store directory {}", dir.display())))?;
        let path = dir.join(LOCK_NAME);
        let mut options = OpenOptions::new();
        let mut lock =
            options.read(true).write(true).create(true).truncate(false).mode(0o600).open(&path).map_err(
                |error| refuse(error, format_args!("store directory {}: {LOCK_NAME}", dir.display())),
            )?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let holder = read_holder(&mut lock);
                return Err(Error::unavailable(format!("store {} is in use by {holder}", dir.display())));
            }
            Err(TryLockError::Error(error)) => {
                return Err(Error::io(format_args!("lock {}", path.display()), error));
            }
        }
        let text = format!("pid {} on {}\n", std::process::id(), host());
        let written =
            lock.set_len(0).and_then(|()| lock.rewind()).and_then(|()| lock.write_all(text.as_bytes()));
        written.map_err(|error| Error::io(format_args!("write {}", path.display()), error))?;
        Ok(Owner { _lock: lock, path, bytes: text.len() as u64 })
    }

    /// The lock's file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Its length.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

fn refuse(error: std::io::Error, what: std::fmt::Arguments<'_>) -> Error {
    let hint = match error.kind() {
        std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::ReadOnlyFilesystem => {
            ": choose one that is writable"
        }
        _ => "",
    };
    Error::invalid(format!("{what}: {error}{hint}")).with_source(error)
}

fn read_holder(lock: &mut File) -> String {
    let mut text = String::new();
    // What stands there is written by us, but read no more than such a line could be.
    let read = lock.take(512).read_to_string(&mut text);
    match read {
        Ok(_) if !text.trim().is_empty() => text.trim().to_owned(),
        _ => "another process".to_owned(),
    }
}

fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    if name.trim().is_empty() { "an unnamed host".to_owned() } else { name.trim().to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_owner_is_refused_with_the_holders_name() {
        let dir = std::env::temp_dir().join(format!("ebbtide-owner-{}", std::process::id()));
        let first = Owner::take(&dir).unwrap();
        let error = Owner::take(&dir).map(|_| ()).unwrap_err();
        assert!(error.message().contains(&format!("pid {}", std::process::id())), "{error}");
        drop(first);
        Owner::take(&dir).unwrap();
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
