//! Where the memory of an arena comes from: huge pages, else /dev/shm, else a file without a name.
//!
//! Each step down is said in `degraded`; only when the last fails is that an error. Holds no unsafe code.
#![forbid(unsafe_code)]

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::CHUNK_BYTES;
use crate::arena::ArenaOptions;
use crate::sys::{self, Memory};

/// What the memory of an arena stands on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// A named file on hugetlbfs: huge pages, and found again by its name.
    HugetlbFile,
    /// A named file in /dev/shm: found again by its name.
    SharedMemoryFile,
    /// Shared memory without a name: it ends with the process, so there is no warm restart.
    Memfd,
    /// Ordinary memory of this process, for tests and the simulator.
    Heap,
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Backing::HugetlbFile => "hugetlb file",
            Backing::SharedMemoryFile => "shared memory file",
            Backing::Memfd => "memfd",
            Backing::Heap => "heap",
        })
    }
}

/// The memory that was got, and what it lacks.
pub(crate) struct Opened {
    pub(crate) memory: Memory,
    pub(crate) backing: Backing,
    pub(crate) degraded: Vec<String>,
}

const SHARED_MEMORY: &str = "/dev/shm";

/// Gets `bytes` (whole chunks) of prefaulted memory, from the best place that has them.
///
/// Removes what an earlier process left under the same name: the caller owns the store's lock, so it is nobody's.
pub(crate) fn open(options: &ArenaOptions, bytes: usize) -> io::Result<Opened> {
    let places = Places {
        huge: huge_page_mounts(&read("/proc/mounts")),
        shared: PathBuf::from(SHARED_MEMORY),
        file_name: format!("ebbtide-{}", options.name),
    };
    places.open(options, bytes)
}

/// Where named files may lie, and the name.
struct Places {
    huge: Vec<PathBuf>,
    shared: PathBuf,
    file_name: String,
}

impl Places {
    fn open(&self, options: &ArenaOptions, bytes: usize) -> io::Result<Opened> {
        for place in self.huge.iter().chain([&self.shared]) {
            remove_leftover(&place.join(&self.file_name))?;
        }
        let threads = options.prefault_threads;
        let mut degraded = Vec::new();
        let mut without_huge = None;
        if options.huge_pages && options.keep_name {
            match self.on_huge_pages(bytes, threads) {
                Ok(memory) => return Ok(Opened { memory, backing: Backing::HugetlbFile, degraded }),
                Err(error) => without_huge = Some(error),
            }
        }
        require_available(bytes)?;
        let ask_huge = options.huge_pages;
        if !options.keep_name {
            let memory = self.on_memfd(bytes, threads, ask_huge)?;
            return Ok(Opened { memory, backing: Backing::Memfd, degraded });
        }
        let (memory, backing) = match self.on_shared_memory(bytes, threads, ask_huge) {
            Ok(memory) => (memory, Backing::SharedMemoryFile),
            Err(error) => {
                degraded.push(format!("warm restart: {error}, using a memfd, which ends with the process"));
                (self.on_memfd(bytes, threads, ask_huge)?, Backing::Memfd)
            }
        };
        if let Some(error) = without_huge {
            let instead = match huge_bytes_of(&read("/proc/self/smaps"), memory.address().addr()) {
                0 => "4 KiB pages".to_owned(),
                huge => format!("transparent huge pages for {} of {} MiB", huge >> 20, bytes >> 20),
            };
            degraded.push(format!("huge pages: {error}, using {instead}"));
        }
        Ok(Opened { memory, backing, degraded })
    }

    fn on_huge_pages(&self, bytes: usize, threads: usize) -> io::Result<Memory> {
        let needed = (bytes / CHUNK_BYTES) as u64;
        let free = free_huge_pages();
        if free < needed {
            let free = if free == 0 { "none".to_owned() } else { free.to_string() };
            return Err(full(format!("{free} of {needed} free (set vm.nr_hugepages)")));
        }
        let mut error = full("no hugetlbfs of 2 MiB pages is mounted".to_owned());
        for mount in &self.huge {
            if sys::room(mount).is_ok_and(|room| room.page_bytes != CHUNK_BYTES as u64) {
                continue;
            }
            let path = mount.join(&self.file_name);
            match on_file(&path, bytes, threads, false) {
                Ok(memory) => return Ok(memory),
                Err(found) => error = found,
            }
        }
        Err(error)
    }

    fn on_shared_memory(&self, bytes: usize, threads: usize, ask_huge: bool) -> io::Result<Memory> {
        let free = sys::room(&self.shared).map_err(named("statvfs", &self.shared))?.free_bytes;
        if free < bytes as u64 {
            let (shared, free, bytes) = (self.shared.display(), free >> 20, bytes >> 20);
            return Err(full(format!("{shared} has {free} of {bytes} MiB free (remount it larger)")));
        }
        on_file(&self.shared.join(&self.file_name), bytes, threads, ask_huge)
    }

    fn on_memfd(&self, bytes: usize, threads: usize, ask_huge: bool) -> io::Result<Memory> {
        let file = sys::create_memfd(&self.file_name).map_err(named("memfd_create", &self.file_name))?;
        let memory = Memory::map(file, None, bytes).map_err(|error| no_memory(bytes, &error))?;
        ready(memory, threads, ask_huge).map_err(|error| no_memory(bytes, &error))
    }
}

fn on_file(path: &Path, bytes: usize, threads: usize, ask_huge: bool) -> io::Result<Memory> {
    let file = sys::create_file(path).map_err(named("create", path))?;
    let memory = Memory::map(file, Some(path.to_owned()), bytes).map_err(named("map", path))?;
    ready(memory, threads, ask_huge).map_err(named("prefault", path))
}

fn ready(mut memory: Memory, threads: usize, ask_huge: bool) -> io::Result<Memory> {
    if ask_huge {
        memory.ask_huge_pages().ok(); // What it brought is read from smaps, and said.
    }
    memory.prefault(threads, ask_huge)?;
    Ok(memory)
}

fn remove_leftover(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            let path = path.display();
            let text = format!("remove the arena left at {path}: {}; remove it by hand", cause(&error));
            Err(io::Error::new(error.kind(), text))
        }
        _ => Ok(()),
    }
}

/// Refuses what would call the OOM killer: shared memory is promised freely and paid at first touch.
fn require_available(bytes: usize) -> io::Result<()> {
    match available_bytes(&read("/proc/meminfo")) {
        Some(available) if available < bytes as u64 => {
            let (bytes, available) = (bytes >> 20, available >> 20);
            let text = format!(
                "arena of {bytes} MiB: {available} MiB of memory are available; make the arena smaller or free memory"
            );
            Err(io::Error::new(io::ErrorKind::OutOfMemory, text))
        }
        _ => Ok(()),
    }
}

fn no_memory(bytes: usize, error: &io::Error) -> io::Error {
    let text =
        format!("arena of {} MiB: {}; make the arena smaller or free memory", bytes >> 20, cause(error));
    io::Error::new(error.kind(), text)
}

fn full(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::StorageFull, text)
}

fn named(call: &'static str, thing: impl AsRef<Path>) -> impl FnOnce(io::Error) -> io::Error {
    move |error| {
        io::Error::new(error.kind(), format!("{call} {}: {}", thing.as_ref().display(), cause(&error)))
    }
}

/// The system's reason in lower case.
fn cause(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(code) => format!("{} (os error {code})", error.kind()),
        None => error.to_string(),
    }
}

/// A file of /proc or /sys; empty when there is none, which reads as "unknown" everywhere here.
fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// The directories in /proc/mounts on which a hugetlbfs is mounted.
fn huge_page_mounts(mounts: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for line in mounts.lines() {
        let mut words = line.split(' ').skip(1);
        if let (Some(directory), Some("hugetlbfs")) = (words.next(), words.next()) {
            // The kernel writes a space as \040; a mount named so is not worth more than this.
            found.push(PathBuf::from(directory.replace("\\040", " ")));
        }
    }
    found
}

/// Huge pages of 2 MiB that nobody has or was promised, with those that the kernel may still make.
fn free_huge_pages() -> u64 {
    let count = |name: &str| -> u64 {
        read(&format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}")).trim().parse().unwrap_or(0)
    };
    let free = count("free_hugepages").saturating_sub(count("resv_hugepages"));
    free + count("nr_overcommit_hugepages").saturating_sub(count("surplus_hugepages"))
}

/// MemAvailable of /proc/meminfo.
fn available_bytes(meminfo: &str) -> Option<u64> {
    meminfo.lines().find_map(|line| kib_of(line, "MemAvailable:"))
}

/// Bytes of the mapping at `address` that stand on transparent huge pages, from /proc/self/smaps.
fn huge_bytes_of(smaps: &str, address: usize) -> u64 {
    let start = format!("{address:08x}-");
    let ours = smaps.lines().skip_while(|line| !line.starts_with(&start)).skip(1);
    ours.take_while(|line| !line.starts_with("VmFlags"))
        .find_map(|line| kib_of(line, "ShmemPmdMapped:"))
        .unwrap_or(0)
}

fn kib_of(line: &str, name: &str) -> Option<u64> {
    let kib: u64 = line.strip_prefix(name)?.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}

#[cfg(test)]
mod tests;
