//! Opening the file or block device that stands behind a device.

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use ebbtide_core::{Error, Result};

use crate::sys;

/// Offsets and lengths are multiples of this unless the device wants more: the page, the unit of the arena.
const ALIGN_BYTES: u32 = 4096;
/// What direct I/O asks of addresses where the kernel does not say (before 6.1).
const MEMORY_ALIGN_BYTES: u32 = 512;

/// An open file or block device, with what is known of it.
pub(crate) struct Opened {
    pub(crate) file: File,
    pub(crate) name: String,
    /// A block device, not a file.
    pub(crate) block: bool,
    pub(crate) capacity_bytes: u64,
    pub(crate) align_bytes: u32,
    pub(crate) memory_align_bytes: u32,
    pub(crate) degraded: Vec<String>,
}

/// Opens `path` for reading and writing, past the page cache when `direct` and the file system agree.
pub(crate) fn open(path: &Path, direct: bool) -> Result<Opened> {
    let name = path.display().to_string();
    let mut degraded = Vec::new();
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    let mut aligned = None;
    if direct {
        match options.clone().custom_flags(libc::O_DIRECT).open(path) {
            Ok(file) => match sys::direct_alignment(&file) {
                Some((0, _)) => {}
                known => {
                    let (memory, offset) = known.unwrap_or((MEMORY_ALIGN_BYTES, ALIGN_BYTES));
                    aligned = Some((file, memory, offset.max(ALIGN_BYTES)));
                }
            },
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            Err(error) => return Err(Error::io(format_args!("open {name}"), error)),
        }
    }
    let (file, memory_align_bytes, align_bytes) = match aligned {
        Some(aligned) => aligned,
        None => {
            let reason = if direct { "refused by the file system" } else { "switched off" };
            if direct {
                tracing::warn!(device = name, "no direct I/O: the page cache will hold a second copy");
            }
            degraded.push(format!("direct I/O on {name}: {reason}"));
            let file = options.open(path).map_err(|error| Error::io(format_args!("open {name}"), error))?;
            (file, 1, ALIGN_BYTES)
        }
    };
    let (block, bytes) = kind_and_bytes(&file, &name)?;
    let capacity_bytes = bytes - bytes % u64::from(align_bytes);
    if capacity_bytes == 0 {
        return Err(Error::invalid(format!("open {name}: {bytes} bytes, need at least {align_bytes}")));
    }
    Ok(Opened { file, name, block, capacity_bytes, align_bytes, memory_align_bytes, degraded })
}

fn kind_and_bytes(mut file: &File, name: &str) -> Result<(bool, u64)> {
    let failed = |error| Error::io(format_args!("open {name}"), error);
    let metadata = file.metadata().map_err(failed)?;
    if metadata.is_file() {
        return Ok((false, metadata.len()));
    }
    if metadata.file_type().is_block_device() {
        return Ok((true, file.seek(SeekFrom::End(0)).map_err(failed)?));
    }
    Err(Error::invalid(format!("open {name}: neither a file nor a block device")))
}
