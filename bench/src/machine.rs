//! What the figures were measured on.

use std::fs;
use std::os::linux::fs::MetadataExt;
use std::path::Path;

use serde_json::{Value, json};

use crate::clock;
use crate::diskstats::DiskStats;

/// The processors that this process may use.
pub(crate) fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Facts of this machine, and of the filesystem that holds `dir`.
pub(crate) fn facts(dir: &Path) -> Value {
    let mount = mount_of(dir);
    json!({
        "cpu": field("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown".to_string()),
        "cores": processors(),
        "memory_bytes": field("/proc/meminfo", "MemTotal").and_then(|text| kib(&text)),
        "kernel": fs::read_to_string("/proc/sys/kernel/osrelease").map(|text| text.trim().to_string()).ok(),
        "filesystem": mount.as_ref().map(|mount| mount.filesystem.as_str()),
        "mounted_from": mount.as_ref().map(|mount| mount.source.as_str()),
        "device": DiskStats::of(dir).map(|device| device.name().to_string()),
        "date": date(clock::wall_ns() / 1_000_000_000),
        "version": env!("CARGO_PKG_VERSION"),
    })
}

/// Anonymous memory of this process that is resident, in bytes: the heap, not the arena (which is shared memory).
pub(crate) fn anonymous_bytes() -> Option<u64> {
    field("/proc/self/status", "RssAnon").and_then(|text| kib(&text))
}

/// Bytes that a user may still write to the filesystem that holds `dir`; `None` where it has no such number (/proc).
pub(crate) fn free_bytes(dir: &Path) -> Option<u64> {
    let room = rustix::fs::statvfs(dir).ok().filter(|room| room.f_blocks > 0)?;
    Some(room.f_bavail.saturating_mul(room.f_frsize))
}

/// True when what is written under `dir` stays in memory.
pub(crate) fn is_memory(dir: &Path) -> bool {
    mount_of(dir).is_none_or(|mount| matches!(mount.filesystem.as_str(), "tmpfs" | "ramfs"))
}

struct Mount {
    filesystem: String,
    source: String,
}

fn mount_of(dir: &Path) -> Option<Mount> {
    let device = fs::metadata(dir).ok()?.st_dev();
    let device = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    find_mount(&fs::read_to_string("/proc/self/mountinfo").ok()?, &device)
}

/// Fields: id, parent, major:minor, root, mount point, options, … "-", filesystem, source (proc(5)).
fn find_mount(text: &str, device: &str) -> Option<Mount> {
    text.lines().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        before.split(' ').nth(2).filter(|number| *number == device)?;
        let mut fields = after.split(' ');
        Some(Mount { filesystem: fields.next()?.to_string(), source: fields.next()?.to_string() })
    })
}

fn field(path: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim().to_string())
    })
}

fn kib(text: &str) -> Option<u64> {
    text.strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

/// Seconds since the epoch as "2026-11-30T20:21:54Z".
fn date(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // The civil calendar from a day count, by eras of 400 years that start on the first of March.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_follow_the_calendar() {
        assert_eq!(date(0), "1970-01-01T00:00:00Z");
        assert_eq!(date(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(date(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(date(951_868_800), "2000-03-01T00:00:00Z");
        assert_eq!(date(1_796_069_314), "2026-11-30T20:08:34Z");
    }

    #[test]
    fn finds_the_mount_of_a_device() {
        let text =
            "22 28 0:21 / /proc rw,nosuid - proc proc rw\n28 1 254:0 / / rw shared:1 - ext4 /dev/vda rw\n";
        let mount = find_mount(text, "254:0").unwrap();
        assert_eq!((mount.filesystem.as_str(), mount.source.as_str()), ("ext4", "/dev/vda"));
        assert!(find_mount(text, "254:1").is_none());
    }

    #[test]
    fn this_machine_has_facts() {
        let facts = facts(Path::new("/"));
        assert!(facts["cores"].as_u64().unwrap() > 0);
        assert!(facts["memory_bytes"].as_u64().unwrap() > 1 << 20);
        assert!(anonymous_bytes().unwrap() > 0);
    }
}
