//! The arena as its users see it: counts, spans in regions, clean files, and errors that say what to do.

use super::*;
use std::path::{Path, PathBuf};

fn options(name: &str) -> ArenaOptions {
    let name = format!("test-{}-{name}", std::process::id());
    ArenaOptions { name, bytes: 3 << 20, prefault_threads: 2, huge_pages: false, keep_name: true }
}

fn path(options: &ArenaOptions) -> PathBuf {
    Path::new("/dev/shm").join(format!("ebbtide-{}", options.name))
}

#[test]
fn counts_whole_pages() {
    let arena = Arena::heap(2 << 20);
    assert_eq!((arena.capacity_bytes(), arena.used_bytes()), (2 << 20, 0));
    let buf = arena.alloc(4097).unwrap();
    assert_eq!((buf.len(), arena.used_bytes(), arena.free_bytes()), (4097, 8192, (2 << 20) - 8192));
    let shared = buf.freeze();
    let other = shared.clone();
    drop(shared);
    assert_eq!(arena.used_bytes(), 8192, "a clone still holds the memory");
    drop(other);
    assert_eq!(arena.used_bytes(), 0);
    assert_eq!(Arena::heap(1).capacity_bytes(), CHUNK_BYTES as u64);
}

#[test]
fn refuses_only_nothing_and_too_much() {
    let arena = Arena::heap(4 << 20);
    assert!(arena.alloc(0).is_none());
    assert!(arena.alloc((4 << 20) + 1).is_none());
    assert!(arena.alloc(usize::MAX).is_none());
    let all = arena.alloc(4 << 20).expect("all of it is free");
    assert_eq!(arena.free_bytes(), 0);
    assert!(arena.alloc(1).is_none());
    drop(all);
    assert!(arena.alloc(1).is_some());
}

#[test]
fn new_memory_is_zero() {
    let arena = Arena::heap(2 << 20);
    let buf = arena.alloc(if cfg!(miri) { 8192 } else { 2 << 20 }).unwrap().freeze();
    assert!(buf.spans().all(|span| span.iter().all(|byte| *byte == 0)));
}

#[test]
#[cfg_attr(miri, ignore = "3 GiB are much for Miri")]
fn spans_lie_in_the_region_they_name() {
    let arena = Arena::heap(2 * REGION_BYTES + 1);
    let regions = arena.regions();
    assert_eq!(regions.iter().map(|region| region.bytes).sum::<u64>(), arena.capacity_bytes());
    assert_eq!(regions.len(), 3);
    let half: Vec<_> = (0..5).map(|_| arena.alloc(400 << 20).unwrap()).collect();
    for span in half.iter().flat_map(|buf| buf.raw_spans()) {
        let region = regions[span.region.unwrap() as usize];
        let start = span.address.addr() - region.address.addr();
        assert!(start as u64 + u64::from(span.bytes) <= region.bytes);
        assert_eq!(span.address.addr() % PAGE_BYTES, 0);
    }
}

#[test]
fn a_buffer_outlives_the_handle_of_its_arena() {
    let arena = Arena::heap(2 << 20);
    let mut buf = arena.alloc(3).unwrap();
    drop(arena);
    buf.write_at(0, b"abc");
    assert_eq!(buf.freeze().to_vec(), b"abc");
}

#[test]
fn threads_share_it() {
    let arena = Arena::heap(8 << 20);
    let rounds = if cfg!(miri) { 5 } else { 2000 };
    std::thread::scope(|scope| {
        for thread in 0..4u8 {
            let arena = arena.clone();
            scope.spawn(move || {
                for round in 0..rounds {
                    let Some(mut buf) = arena.alloc(4096 * (1 + (round * 7 + thread as usize) % 30)) else {
                        continue;
                    };
                    buf.spans_mut().for_each(|span| span[0] = thread);
                    let buf = buf.freeze();
                    assert!(buf.spans().all(|span| span[0] == thread), "two owners of one page");
                }
            });
        }
    });
    assert_eq!(arena.used_bytes(), 0);
}

#[test]
#[should_panic(expected = "another arena")]
fn a_span_of_another_arena_is_caught() {
    let (ours, theirs) = (Arena::heap(2 << 20), Arena::heap(2 << 20));
    let buf = theirs.alloc(1).unwrap();
    ours.0.give_back(buf.raw_spans());
}

#[test]
#[should_panic(expected = "did not give out")]
fn a_shifted_span_is_caught() {
    let arena = Arena::heap(2 << 20);
    let buf = arena.alloc(2 << 20).unwrap();
    let mut span = buf.raw_spans()[0];
    span.address = span.address.wrapping_add(512);
    span.bytes -= 4096;
    arena.0.give_back(&[span]);
}

#[test]
#[cfg_attr(miri, ignore = "maps a file")]
fn a_file_arena_is_private_and_leaves_nothing() {
    let options = options("file");
    let arena = Arena::open(&options).unwrap();
    assert_eq!(arena.capacity_bytes(), 4 << 20);
    assert_eq!(arena.regions()[0].address.addr() % CHUNK_BYTES, 0);
    if arena.backing() == Backing::SharedMemoryFile {
        use std::os::unix::fs::MetadataExt;
        let file = std::fs::metadata(path(&options)).unwrap();
        assert_eq!((file.mode() & 0o777, file.len()), (0o600, 4 << 20));
        assert_eq!(file.blocks() * 512, 4 << 20, "all of it has its room");
        assert!(arena.degraded().is_empty(), "{:?}", arena.degraded());
    } else {
        assert!(!arena.degraded().is_empty(), "what is missing is said");
    }
    let mut buf = arena.alloc(4 << 20).unwrap();
    buf.write_at((4 << 20) - 5, b"value");
    drop(arena);
    assert!(buf.freeze().to_vec().ends_with(b"\0\0value"));
    assert!(!path(&options).exists());
}

#[test]
#[cfg_attr(miri, ignore = "maps a file")]
fn without_prefaulting_the_file_still_has_its_room() {
    let options = ArenaOptions { prefault_threads: 0, ..options("lazy") };
    let arena = Arena::open(&options).unwrap();
    if arena.backing() == Backing::SharedMemoryFile {
        use std::os::unix::fs::MetadataExt;
        assert_eq!(std::fs::metadata(path(&options)).unwrap().blocks() * 512, 4 << 20);
    }
}

#[test]
#[cfg_attr(miri, ignore = "maps a file")]
fn a_leftover_is_replaced_and_a_successor_is_not_removed() {
    let options = options("again");
    std::fs::write(path(&options), b"left by a killed process").unwrap();
    let first = Arena::open(&options).unwrap();
    // As when a buffer outlives its store and the store is opened again.
    let second = Arena::open(&options).unwrap();
    drop(first);
    assert_eq!(path(&options).exists(), second.backing() == Backing::SharedMemoryFile);
    drop(second);
    assert!(!path(&options).exists());
}

#[test]
#[cfg_attr(miri, ignore = "maps a file")]
fn a_lack_of_huge_pages_is_said() {
    let arena = Arena::open(&ArenaOptions { huge_pages: true, ..options("huge") }).unwrap();
    match arena.backing() {
        Backing::HugetlbFile => assert!(arena.degraded().is_empty()),
        _ => assert!(
            arena.degraded().iter().any(|text| text.starts_with("huge pages: ")),
            "{:?}",
            arena.degraded()
        ),
    }
}

#[test]
#[cfg_attr(miri, ignore = "reads /proc")]
fn errors_name_the_thing_and_what_to_do() {
    let too_large = Arena::open(&ArenaOptions { bytes: 8 << 40, ..options("large") }).unwrap_err();
    assert_eq!(too_large.kind(), io::ErrorKind::OutOfMemory);
    let text = too_large.to_string();
    assert!(text.starts_with("arena of 8388608 MiB: ") && text.contains("make the arena smaller"), "{text}");
    for (name, bytes) in [("", 1), ("a/b", 1), ("a", 0), ("a", 16 << 40), ("a", u64::MAX)] {
        let options = ArenaOptions {
            name: name.to_owned(),
            bytes,
            prefault_threads: 1,
            huge_pages: false,
            keep_name: true,
        };
        let error = Arena::open(&options).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
        assert!(error.to_string().contains("need"), "{error}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "needs files and mmap")]
fn memory_without_a_name_leaves_no_file() {
    let options = ArenaOptions { keep_name: false, ..options("nameless") };
    let arena = Arena::open(&options).unwrap();
    assert_eq!(arena.backing(), Backing::Memfd);
    assert!(!path(&options).exists());
    assert!(arena.degraded().is_empty(), "{:?}", arena.degraded());
}
