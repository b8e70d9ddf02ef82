//! Where a run puts its store, and what it cleans up.

use std::ffi::OsString;
use std::fs;
use std::os::linux::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ebbtide_core::ByteSize;

use crate::fail::{Failure, Outcome};
use crate::machine;

/// The directory of a run's store. A fresh one is removed when this is dropped; one that the caller named is kept.
pub(crate) struct Place {
    dir: PathBuf,
    /// Nothing was in it before: all that is in it now is ours.
    owned: bool,
    /// The folder that holds a fresh directory and the files beside it.
    remove: Option<PathBuf>,
    beside: Vec<PathBuf>,
    keep: bool,
}

impl Place {
    /// The directory that was named, or a fresh one.
    pub(crate) fn choose(named: Option<&Path>, keep: bool) -> Outcome<Place> {
        if let Some(dir) = named {
            let owned = fs::read_dir(dir).map_or(true, |mut entries| entries.next().is_none());
            return Ok(Place { dir: dir.to_path_buf(), owned, remove: None, beside: Vec::new(), keep });
        }
        let run = fresh_folder()?;
        let (dir, remove) = (run.join("store"), (!keep).then_some(run));
        Ok(Place { dir, owned: true, remove, beside: Vec::new(), keep })
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Writes down which named shared memory this process has mapped, so that the next run can free it should this one be
    /// killed: a fresh directory goes with its run, and no later start of its store would.
    pub(crate) fn note_memory(&self) {
        if let Some(run) = &self.remove {
            let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
            // Without the note memory would be left behind after a kill, and nothing else goes wrong.
            let _ = fs::write(run.join(MEMORY_NOTE), named_memory(&maps).join("\n"));
        }
    }

    /// True when the directory was empty or missing at the start, so that the run may begin again in it.
    pub(crate) fn owned(&self) -> bool {
        self.owned
    }

    /// A path beside the directory, named after it; what lies there is removed at the end.
    pub(crate) fn beside(&mut self, ending: &str) -> PathBuf {
        let dir = fs::canonicalize(&self.dir).unwrap_or_else(|_| self.dir.clone());
        let mut name = dir.file_name().map_or_else(|| OsString::from("store"), OsString::from);
        name.push(ending);
        let path = dir.with_file_name(name);
        if !self.beside.contains(&path) {
            self.beside.push(path.clone());
        }
        path
    }

    /// Refuses a directory whose neighbours lie on another filesystem: the bare arm's file must lie beside it.
    pub(crate) fn neighbours_share_device(&self) -> Outcome<()> {
        let Ok(dir) = fs::canonicalize(&self.dir) else { return Ok(()) };
        let device = |path: &Path| fs::metadata(path).map(|meta| meta.st_dev()).ok();
        match dir.parent() {
            Some(parent) if device(parent) == device(&dir) => Ok(()),
            _ => {
                Err(Failure::usage(format!("--dir {}: is a mount point; name a folder in it", dir.display())))
            }
        }
    }

    /// Empties the directory. Only when [`owned`](Self::owned), and with no store open in it.
    pub(crate) fn wipe(&self) -> Outcome<()> {
        assert!(self.owned, "only what this run made may be removed by it");
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let path = entry.path();
            let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            removed.map_err(|error| Failure::Broken(format!("remove {}: {error}", path.display())))?;
        }
        Ok(())
    }

    /// The directory, or the nearest one above it that exists: what tells the filesystem.
    pub(crate) fn existing(&self) -> PathBuf {
        if self.dir.is_dir() { self.dir.clone() } else { existing(&self.dir) }
    }

    /// Refuses when `bytes` do not fit beside what lies there already.
    pub(crate) fn needs(&self, bytes: u64, what: &str) -> Outcome<()> {
        let Some(free) = machine::free_bytes(&self.existing()) else { return Ok(()) };
        let room = free + bytes_under(&self.dir);
        if bytes <= room {
            return Ok(());
        }
        let (need, room) = (ByteSize(bytes), ByteSize(room));
        Err(Failure::usage(format!("{}: needs {need} ({what}), has room for {room}", self.dir.display())))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.keep {
            return;
        }
        // What cannot be removed is found by the next run, or lies where the caller put it.
        for path in &self.beside {
            let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        }
        if let Some(folder) = &self.remove {
            let _ = fs::remove_dir_all(folder);
        }
    }
}

/// A folder of this process's own in the system's temporary directory (the current one where that is memory), after
/// removing those of runs that were killed.
fn fresh_folder() -> Outcome<PathBuf> {
    let temporary = std::env::temp_dir();
    let base = if machine::is_memory(&temporary) { PathBuf::from(".") } else { temporary };
    let user = fs::metadata("/proc/self").map(|own| own.st_uid()).unwrap_or_default();
    let parent = base.join(format!("ebbtide-bench-{user}"));
    let make = |path: &Path| {
        fs::create_dir_all(path).map_err(|error| Failure::file(format!("create {}", path.display()), &error))
    };
    make(&parent)?;
    let own = fs::symlink_metadata(&parent);
    if !own.is_ok_and(|meta| meta.is_dir() && meta.st_uid() == user) {
        return Err(Failure::usage(format!(
            "{}: is not a directory of ours; name one with --dir",
            parent.display()
        )));
    }
    for entry in fs::read_dir(&parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| name.strip_prefix("run-")?.parse::<u32>().ok());
        if process.is_some_and(|process| !Path::new(&format!("/proc/{process}")).exists()) {
            let note = fs::read_to_string(entry.path().join(MEMORY_NOTE)).unwrap_or_default();
            for path in note.lines().filter(|path| is_arena(path)) {
                let _ = fs::remove_file(path);
            }
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    let run = parent.join(format!("run-{}", std::process::id()));
    make(&run)?;
    Ok(run)
}

const MEMORY_NOTE: &str = "memory";

/// The named shared memory of stores in the text of /proc/PID/maps.
fn named_memory(maps: &str) -> Vec<&str> {
    let paths = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
    let mut paths: Vec<&str> = paths.filter(|path| is_arena(path)).collect();
    paths.dedup();
    paths
}

/// Whether a path is that of a store's arena: "/dev/shm/ebbtide-" and the uuid.
fn is_arena(path: &str) -> bool {
    let uuid = path.strip_prefix("/dev/shm/ebbtide-");
    uuid.is_some_and(|uuid| uuid.len() == 32 && uuid.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

fn existing(path: &Path) -> PathBuf {
    let above = path.ancestors().skip(1).find(|above| above.is_dir() && *above != Path::new(""));
    above.map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

fn bytes_under(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let bytes = |entry: fs::DirEntry| match entry.metadata() {
        Ok(meta) if meta.is_dir() => bytes_under(&entry.path()),
        Ok(meta) if meta.is_file() => meta.st_blocks() * 512,
        _ => 0,
    };
    entries.map(bytes).sum()
}

/// The sizes of all files under `dir`, folders below it included.
pub(crate) fn sizes_under(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let bytes = |entry: fs::DirEntry| match entry.metadata() {
        Ok(meta) if meta.is_dir() => sizes_under(&entry.path()),
        Ok(meta) if meta.is_file() => meta.len(),
        _ => 0,
    };
    entries.map(bytes).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_directory_is_kept_and_what_lies_beside_it_goes() {
        let root = std::env::temp_dir().join(format!("ebbtide-place-{}", std::process::id()));
        let dir = root.join("kv");
        fs::create_dir_all(&dir).unwrap();
        let mut place = Place::choose(Some(&dir), false).unwrap();
        assert!(place.owned());
        let bare = place.beside(".ebbtide-bare");
        assert_eq!(bare, root.join("kv.ebbtide-bare"));
        fs::write(&bare, [0; 100]).unwrap();
        fs::write(dir.join("file"), [0; 5000]).unwrap();
        assert_eq!(sizes_under(&root), 5100);
        assert!(!Place::choose(Some(&dir), false).unwrap().owned(), "something lies in it");
        drop(place);
        assert!(dir.join("file").exists() && !bare.exists());
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn only_arenas_are_memory_to_free() {
        let maps = "7f00-7f10 rw-s 00000000 00:1a 5    /dev/shm/ebbtide-0123456789abcdef0123456789abcdef
7f10-7f20 rw-s 00100000 00:1a 5    /dev/shm/ebbtide-0123456789abcdef0123456789abcdef
7f20-7f30 r-xp 00000000 fe:00 9    /usr/lib/x86_64-linux-gnu/libc.so.6
7f30-7f40 rw-s 00000000 00:1a 6    /dev/shm/ebbtide-0123456789abcdef0123456789abcdef (deleted)
7f40-7f50 rw-p 00000000 00:00 0    [heap]
";
        assert_eq!(named_memory(maps), ["/dev/shm/ebbtide-0123456789abcdef0123456789abcdef"]);
        assert!(!is_arena("/dev/shm/ebbtide-../../etc/passwd"));
    }

    #[test]
    fn too_little_room_is_refused_with_the_sizes() {
        let place =
            Place::choose(Some(&std::env::temp_dir().join("ebbtide-never-made/deep")), false).unwrap();
        assert!(place.needs(0, "nothing").is_ok());
        let Err(Failure::Usage(message)) = place.needs(1 << 60, "ssd 1EiB") else { panic!("1 EiB has room") };
        assert!(message.contains("ebbtide-never-made") && message.contains("ssd 1EiB"), "{message}");
    }
}
