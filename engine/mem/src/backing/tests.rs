//! Each step down from the best memory, forced by hand.

use super::*;
use crate::Arena;

fn places(name: &str, shared: &str) -> Places {
    let file_name = format!("ebbtide-test-{}-{name}", std::process::id());
    Places { huge: Vec::new(), shared: PathBuf::from(shared), file_name }
}

fn options() -> ArenaOptions {
    ArenaOptions {
        name: "unused".to_owned(),
        bytes: 2 << 20,
        prefault_threads: 1,
        huge_pages: false,
        keep_name: true,
    }
}

#[test]
#[cfg_attr(miri, ignore = "maps a file")]
fn without_dev_shm_it_is_a_memfd_and_says_so() {
    let opened = places("none", "/nowhere").open(&options(), 2 << 20).unwrap();
    assert_eq!(opened.backing, Backing::Memfd);
    let said = opened.degraded.join("; ");
    assert!(said.starts_with("warm restart: statvfs /nowhere: entity not found"), "{said}");
}

#[test]
#[cfg_attr(miri, ignore = "maps a file")]
fn a_place_that_is_too_small_is_passed_over() {
    // /proc has no room and makes no files, as a full /dev/shm does.
    let opened = places("full", "/proc").open(&options(), 2 << 20).unwrap();
    assert_eq!(opened.backing, Backing::Memfd);
    assert!(opened.degraded[0].contains("/proc has 0 of 2 MiB free"), "{:?}", opened.degraded);
}

#[test]
#[cfg_attr(miri, ignore = "maps a file")]
fn a_directory_in_the_way_is_an_error() {
    let places = places("directory", "/dev/shm");
    let path = places.shared.join(&places.file_name);
    if std::fs::create_dir(&path).is_err() {
        return eprintln!("skipped: no /dev/shm to write to");
    }
    let error = places.open(&options(), 2 << 20).map(|_| ()).unwrap_err();
    std::fs::remove_dir(&path).unwrap();
    assert!(error.to_string().ends_with("remove it by hand"), "{error}");
}

#[test]
#[cfg_attr(miri, ignore = "maps a file")]
fn a_failure_on_the_way_leaves_no_file() {
    let places = places("fails", "/dev/shm");
    let path = places.shared.join(&places.file_name);
    let Ok(file) = sys::create_file(&path) else { return eprintln!("skipped: no /dev/shm to write to") };
    // More address space than there is.
    assert!(Memory::map(file, Some(path.clone()), 1 << 60).is_err());
    assert!(!path.exists());
}

#[test]
fn reads_what_the_kernel_writes() {
    let mounts = "proc /proc proc rw 0 0\nhugetlbfs /dev/huge\\040pages hugetlbfs rw,pagesize=2M 0 0\nx /y ext4 rw 0 0\n";
    assert_eq!(huge_page_mounts(mounts), [PathBuf::from("/dev/huge pages")]);
    assert_eq!(available_bytes("MemTotal: 9 kB\nMemAvailable:   12 kB\n"), Some(12 << 10));
    assert_eq!(available_bytes(""), None);
    let smaps = "7f0000000000-7f0000400000 rw-s 0 00:19 3 /dev/shm/a\nShmemPmdMapped:     2048 kB\nVmFlags: rd\n\
                 7f0000400000-7f0000800000 rw-s 0 00:19 4 /dev/shm/b\nRss: 4 kB\nVmFlags: rd\n";
    assert_eq!(huge_bytes_of(smaps, 0x7f00_0000_0000), 2 << 20);
    assert_eq!(huge_bytes_of(smaps, 0x7f00_0040_0000), 0, "not the neighbour's");
    assert_eq!(huge_bytes_of(smaps, 0x1000), 0);
}

#[test]
fn backings_have_names_for_people() {
    assert_eq!(Arena::heap(1).backing().to_string(), "heap");
    assert_eq!(Backing::SharedMemoryFile.to_string(), "shared memory file");
}

#[test]
#[cfg_attr(miri, ignore = "maps a file")]
fn shared_memory_is_collapsed_into_huge_pages() {
    let options = ArenaOptions { huge_pages: true, ..options() };
    let places = places("collapsed", "/dev/shm");
    if sys::room(&places.shared).is_err() {
        return eprintln!("skipped: no /dev/shm");
    }
    let bytes = 4 << 20;
    let memory = places.on_shared_memory(bytes, 1, options.huge_pages).unwrap();
    match huge_bytes_of(&read("/proc/self/smaps"), memory.address().addr()) {
        0 => eprintln!(
            "skipped: this kernel gives no transparent huge pages for shared memory (MADV_COLLAPSE, Linux 6.1)"
        ),
        huge => assert_eq!(huge, bytes as u64),
    }
}
