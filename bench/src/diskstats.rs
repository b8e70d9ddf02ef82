//! What the block device under a directory really moved, by the kernel's own count.

use std::fs;
use std::os::linux::fs::MetadataExt;
use std::path::Path;

const SECTOR_BYTES: u64 = 512;

/// Watches the device that holds one directory.
#[derive(Clone, Debug)]
pub(crate) struct DiskStats {
    major: u32,
    minor: u32,
    name: String,
}

/// Bytes moved since the machine was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moved {
    pub(crate) read_bytes: u64,
    pub(crate) written_bytes: u64,
}

impl DiskStats {
    /// The device that holds `dir`; `None` when /proc/diskstats has no line for it (tmpfs, overlays, network).
    pub(crate) fn of(dir: &Path) -> Option<Self> {
        let device = fs::metadata(dir).ok()?.st_dev();
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let text = fs::read_to_string("/proc/diskstats").ok()?;
        let (name, _) = find(&text, major, minor)?;
        Some(DiskStats { major, minor, name: name.to_string() })
    }

    /// The device's name: "vda", "nvme0n1p2".
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// What it moved so far; zeroes should the line have gone.
    pub(crate) fn moved(&self) -> Moved {
        let text = fs::read_to_string("/proc/diskstats").unwrap_or_default();
        find(&text, self.major, self.minor).map(|(_, moved)| moved).unwrap_or_default()
    }
}

impl Moved {
    pub(crate) fn since(self, earlier: Moved) -> Moved {
        Moved {
            read_bytes: self.read_bytes.saturating_sub(earlier.read_bytes),
            written_bytes: self.written_bytes.saturating_sub(earlier.written_bytes),
        }
    }
}

/// Fields: major, minor, name, reads, reads merged, sectors read, ms reading, writes, writes merged, sectors written, …
/// (the kernel's Documentation/admin-guide/iostats.rst).
fn find(text: &str, major: u32, minor: u32) -> Option<(&str, Moved)> {
    text.lines().find_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        let same = fields.next()?.parse() == Ok(major) && fields.next()?.parse() == Ok(minor);
        let name = fields.next().filter(|_| same)?;
        let counts: Vec<u64> = fields.map_while(|field| field.parse().ok()).collect();
        let bytes = |at: usize| counts.get(at).map(|sectors| sectors * SECTOR_BYTES);
        Some((name, Moved { read_bytes: bytes(2)?, written_bytes: bytes(6)? }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "   7       0 loop0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
 254       0 vda 48732 21995 6918682 86089 4550 25100 1763520 8872 0 44828 96057 4707 85 94344 1012 149 82
 254       1 vda1 1 2 3 4 5 6 7 8 9 10 11
 259       0 cut 1 2 3
";

    #[test]
    fn reads_the_sectors_of_the_right_line() {
        let (name, moved) = find(TEXT, 254, 0).unwrap();
        assert_eq!(name, "vda");
        assert_eq!(moved, Moved { read_bytes: 6_918_682 * 512, written_bytes: 1_763_520 * 512 });
        assert_eq!(find(TEXT, 254, 1).unwrap().1, Moved { read_bytes: 3 * 512, written_bytes: 7 * 512 });
    }

    #[test]
    fn says_so_when_there_is_no_such_line() {
        assert!(find(TEXT, 0, 42).is_none());
        assert!(find(TEXT, 25, 40).is_none());
        assert!(find(TEXT, 259, 0).is_none(), "a line that is cut short");
        assert!(find("", 254, 0).is_none());
    }
}
