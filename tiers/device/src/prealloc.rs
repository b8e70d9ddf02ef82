//! Making files large before they are used.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;

use ebbtide_core::{Error, Result};
use ebbtide_mem::BufMut;

use crate::sys;

/// Since Linux 6.17, where the device can write zeros without being sent them.
const FALLOC_FL_WRITE_ZEROES: i32 = 0x80;
/// How much is made at a time, and so how often progress is told.
const PIECE_BYTES: u64 = 4 << 20;
/// Direct I/O wants whole pages.
const PAGE_BYTES: u64 = ebbtide_mem::PAGE_BYTES as u64;

/// How the space of a new file is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prealloc {
    /// Written with zeros: slow at start, and then every write meets written extents.
    Written,
    /// Reserved: quick, and the space is certain; the first write to each place also changes the file's metadata.
    Reserved,
    /// Only named: quick, and a write may fail for want of space. For tests.
    Sparse,
}

/// Makes the file at `path` (created, readable by its owner only, when missing) at least `bytes` long and returns its
/// size in bytes, which is larger than `bytes` when it was larger before.
///
/// Only ever extends: what is in the file stays as it is. `progress` hears of (bytes made, bytes to make). A block device is
/// left alone; its size is returned. Full when there is no room, in which case the file has its old length; Invalid when
/// `bytes` is not a multiple of 4096 or the file cannot be opened. When the process dies in the middle the file is shorter than
/// `bytes`, never longer than what was made, so that calling again goes on from there.
pub fn preallocate(
    path: &Path,
    bytes: u64,
    how: Prealloc,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<u64> {
    let failed = |error| Error::io(format_args!("preallocate {} bytes in {}", bytes, path.display()), error);
    if !bytes.is_multiple_of(PAGE_BYTES) {
        let name = path.display();
        return Err(Error::invalid(format!(
            "preallocate {bytes} bytes in {name}: need a multiple of {PAGE_BYTES}"
        )));
    }
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let file = options.open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if metadata.file_type().is_block_device() {
        return io::Seek::seek(&mut &file, io::SeekFrom::End(0)).map_err(failed);
    }
    let old = metadata.len();
    if old >= bytes {
        return Ok(old);
    }
    let made = match how {
        Prealloc::Sparse => file.set_len(bytes),
        Prealloc::Reserved => sys::fallocate(&file, 0, old, bytes - old),
        Prealloc::Written => write_zeros(path, &file, old, bytes, progress),
    };
    if let Err(error) = made.and_then(|()| file.sync_all()) {
        // What was reserved behind the old end goes back; what stands before it was never touched.
        if let Err(undo) = file.set_len(old) {
            tracing::warn!(file = %path.display(), error = %undo, "space of a failed preallocation is not freed");
        }
        return Err(failed(error));
    }
    progress(bytes - old, bytes - old);
    Ok(bytes)
}

/// Writes zeros from `old` to `bytes`, by the device itself where it can.
fn write_zeros(
    path: &Path,
    file: &File,
    old: u64,
    bytes: u64,
    progress: &mut dyn FnMut(u64, u64),
) -> io::Result<()> {
    // The whole space first: a full disk shows at once, and the extents are as long as they can be. The length stays,
    // so that a file that ends early ends at the last zero written.
    match sys::fallocate(file, libc::FALLOC_FL_KEEP_SIZE, old, bytes - old) {
        Err(error) if error.raw_os_error() != Some(libc::EOPNOTSUPP) => return Err(error),
        _ => {}
    }
    let mut at = old;
    if old.is_multiple_of(PAGE_BYTES) && device_zeros(file, &mut at, bytes, old, progress)? {
        return Ok(());
    }
    let direct = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(path).ok();
    let zeros = BufMut::heap(PIECE_BYTES as usize).freeze();
    let Some(zeros) = zeros.padded_spans().next() else { return Ok(()) };
    while at < bytes {
        // The first piece ends on a page, so that those after it can be direct.
        let piece = if at.is_multiple_of(PAGE_BYTES) { PIECE_BYTES } else { PAGE_BYTES - at % PAGE_BYTES };
        let piece = piece.min(bytes - at);
        let target = direct.as_ref().filter(|_| at.is_multiple_of(PAGE_BYTES)).unwrap_or(file);
        target.write_all_at(&zeros[..piece as usize], at)?;
        at += piece;
        progress(at - old, bytes - old);
    }
    Ok(())
}

/// Lets the device write the zeros; false when it cannot.
fn device_zeros(
    file: &File,
    at: &mut u64,
    bytes: u64,
    old: u64,
    progress: &mut dyn FnMut(u64, u64),
) -> io::Result<bool> {
    while *at < bytes {
        let piece = (64 * PIECE_BYTES).min(bytes - *at);
        match sys::fallocate(file, FALLOC_FL_WRITE_ZEROES, *at, piece) {
            Ok(()) => *at += piece,
            Err(error) => match error.raw_os_error() {
                Some(libc::EOPNOTSUPP | libc::EINVAL | libc::ENOSYS) => return Ok(false),
                _ => return Err(error),
            },
        }
        progress(*at - old, bytes - old);
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_extends() {
        let path = std::env::temp_dir().join(format!("ebbtide-prealloc-{}", std::process::id()));
        std::fs::write(&path, b"kept").unwrap();
        let mut told = 0;
        for how in [Prealloc::Written, Prealloc::Reserved, Prealloc::Sparse] {
            let old = std::fs::metadata(&path).unwrap().len();
            let bytes = old.next_multiple_of(4096) + (5 << 20);
            assert_eq!(preallocate(&path, bytes, how, &mut |made, of| told = of - made).unwrap(), bytes);
            assert_eq!(told, 0);
            assert_eq!(preallocate(&path, 4096, how, &mut |_, _| panic!("nothing to make")).unwrap(), bytes);
        }
        let content = std::fs::read(&path).unwrap();
        assert_eq!(&content[..4], b"kept");
        assert!(content[4..].iter().all(|byte| *byte == 0));
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_full_disk_leaves_the_old_length() {
        let path = std::env::temp_dir().join(format!("ebbtide-prealloc-full-{}", std::process::id()));
        std::fs::write(&path, b"kept").unwrap();
        let error = preallocate(&path, 1 << 50, Prealloc::Written, &mut |_, _| {}).unwrap_err();
        assert!(error.message().contains("ebbtide-prealloc-full"), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), b"kept");
        std::fs::remove_file(&path).unwrap();
    }
}
