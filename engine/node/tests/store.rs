//! The embedded store on a real directory: a working set larger than DRAM comes back right, through SSD, a clean stop and a
//! dropped process; and what cannot be opened is refused with one line and left as it was.

#![expect(clippy::unwrap_used, reason = "a test: helpers outside of `#[test]` too")]

use std::path::{Path, PathBuf};

use ebbtide_node::{ByteSize, Config, DeviceKind, ErrorKind, Prealloc, Put, Served, Store, Whereabouts};

const MIB: u64 = 1 << 20;

/// A directory that is gone when the test ends.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("ebbtide-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        Dir(path)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn config(dir: &Path) -> Config {
    Config {
        dram: ByteSize(16 * MIB),
        ssd: ByteSize(128 * MIB),
        prealloc: Prealloc::Reserved,
        huge_pages: false,
        ..Config::new(dir)
    }
}

fn key(n: u64) -> Vec<u8> {
    format!("model/block/{n:08}").into_bytes()
}

/// A body that only this key has, of a length that is its own too.
fn body(n: u64) -> Vec<u8> {
    let length = [1, 4095, 4096, 5000, 65_536, 131_072, 200_001, 1 << 20_u64][n as usize % 8];
    let byte =
        |at: u64| (((n << 32) | at) ^ 0x5bd1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(21) as u8;
    (0..length).map(byte).collect()
}

fn value(store: &Store, n: u64) -> Option<(Vec<u8>, Served)> {
    store.get(&key(n)).unwrap().map(|hit| (hit.object.value.to_vec(), hit.tier))
}

fn put_all(store: &Store, count: u64) {
    for n in 0..count {
        assert_eq!(store.put(&key(n), &body(n)).unwrap(), Put::Stored, "{n}");
    }
}

fn assert_all(store: &Store, count: u64) {
    for n in 0..count {
        let (bytes, _) = value(store, n).unwrap_or_else(|| panic!("{n} is gone: {}", store.explain(&key(n))));
        assert!(bytes == body(n), "{n} is wrong");
    }
}

#[test]
fn a_working_set_larger_than_dram_just_works() {
    for device in [DeviceKind::Auto, DeviceKind::Psync] {
        let dir = Dir::new(&format!("larger-{device}"));
        let store = Store::open(Config { device, ..config(&dir.0) }).unwrap();
        put_all(&store, 300);
        assert_eq!(store.put(&key(7), b"other").unwrap(), Put::AlreadyStored);
        assert_all(&store, 300);
        assert_all(&store, 300);
        let stats = store.stats();
        assert!(stats.hits_below[0] > 100 && stats.demoted > 100, "{stats:?}");
        assert_eq!((stats.corrupt_reads, stats.evicted(), stats.puts_refused), (0, 0, 0), "{stats:?}");
        assert!(value(&store, 301).is_none());
        assert!(store.remove(&key(3)).unwrap() && !store.remove(&key(3)).unwrap());
        assert!(value(&store, 3).is_none());
    }
}

#[test]
fn get_into_serves_every_tier_and_touches_no_byte_behind_the_value() {
    let dir = Dir::new("into");
    let store = Store::open(config(&dir.0)).unwrap();
    put_all(&store, 64);
    store.drop_hot().unwrap();
    assert_eq!(store.stats().hot_objects, 0);
    for round in 0..3 {
        for n in 0..64 {
            let expected = body(n);
            let mut memory = vec![0xa5; (2 << 20) + 4096];
            // Aligned, where the value is read straight in, and not, where it is copied.
            let aligned = memory.as_ptr().align_offset(4096);
            for start in [aligned, aligned + 1] {
                let target = &mut memory[start..start + expected.len() + 100];
                target.fill(0xa5);
                let (length, _) = store.get_into(&key(n), target).unwrap().unwrap();
                assert_eq!(length, expected.len());
                assert!(target[..length] == expected, "{n} is wrong in round {round}");
                assert!(target[length..].iter().all(|byte| *byte == 0xa5), "{n} wrote behind its value");
            }
        }
    }
    let error = store.get_into(&key(7), &mut [0; 100]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[test]
fn batches_keep_their_order_with_misses_and_duplicates() {
    let dir = Dir::new("batch");
    let store = Store::open(config(&dir.0)).unwrap();
    put_all(&store, 100);
    let wanted = [5, 999, 5, 80, 1000, 0, 99, 99];
    let keys: Vec<_> = wanted.iter().map(|n| key(*n)).collect();
    let keys: Vec<_> = keys.iter().map(Vec::as_slice).collect();
    for (n, result) in wanted.iter().zip(store.get_many(&keys)) {
        let bytes = result.unwrap().map(|hit| hit.object.value.to_vec());
        assert!(bytes == (*n < 100).then(|| body(*n)), "{n}");
    }
    assert_eq!(store.exists(&keys), wanted.map(|n| n < 100));
}

#[test]
fn everything_is_found_after_a_clean_stop_and_what_was_flushed_after_a_kill() {
    let dir = Dir::new("restart");
    let store = Store::open(config(&dir.0)).unwrap();
    put_all(&store, 200);
    store.remove(&key(11)).unwrap();
    store.close().unwrap();

    let store = Store::open(config(&dir.0)).unwrap();
    assert!(store.status().recovery.from_checkpoint);
    assert!(value(&store, 11).is_none());
    (0..200)
        .filter(|n| *n != 11)
        .for_each(|n| assert!(value(&store, n).is_some_and(|(bytes, _)| bytes == body(n))));
    store.put(&key(500), &body(500)).unwrap();
    store.remove(&key(12)).unwrap();
    store.flush().unwrap();
    drop(store);

    let store = Store::open(config(&dir.0)).unwrap();
    assert!(!store.status().recovery.from_checkpoint);
    assert!(value(&store, 11).is_none() && value(&store, 12).is_none());
    assert!(value(&store, 500).is_some_and(|(bytes, _)| bytes == body(500)));
    let kept = (0..200).filter(|n| ![11, 12].contains(n));
    kept.for_each(|n| assert!(value(&store, n).is_some_and(|(bytes, _)| bytes == body(n)), "{n}"));
}

#[test]
fn usage_stays_under_the_cap_and_every_loss_has_a_reason() {
    let dir = Dir::new("cap");
    let store = Store::open(config(&dir.0)).unwrap();
    put_all(&store, 2000);
    store.quiesce();
    let (stats, mut present) = (store.stats(), 0);
    assert!(stats.tiers[0].used_bytes <= 128 * MIB);
    for n in 0..2000 {
        match value(&store, n) {
            Some((bytes, _)) => {
                assert!(bytes == body(n), "{n} is wrong");
                present += 1;
            }
            None => assert!(matches!(store.explain(&key(n)).whereabouts, Whereabouts::Gone { .. }), "{n}"),
        }
    }
    let stats = store.stats();
    assert_eq!(present + stats.evicted(), 2000, "{:?}", stats.dropped_by_reason);
    let files: u64 =
        std::fs::read_dir(&dir.0).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
    assert_eq!(stats.accounted_bytes, files);
}

#[test]
fn a_flipped_bit_is_a_miss_and_counted() {
    let dir = Dir::new("flip");
    let store = Store::open(config(&dir.0)).unwrap();
    put_all(&store, 64);
    store.close().unwrap();
    let path = dir.0.join("ssd-0.ebb");
    let mut bytes = std::fs::read(&path).unwrap();
    let needle = &body(7)[4096..8192];
    let at = bytes.windows(needle.len()).step_by(4096).position(|window| window == needle).unwrap() * 4096;
    bytes[at + 100] ^= 4;
    std::fs::write(&path, bytes).unwrap();
    let store = Store::open(config(&dir.0)).unwrap();
    assert!(value(&store, 7).is_none());
    assert_eq!(store.stats().corrupt_reads, 1);
    assert!(store.explain(&key(7)).to_string().contains("corrupt"));
    assert!(value(&store, 8).is_some());
}

#[test]
fn several_devices_share_the_load() {
    let dir = Dir::new("several");
    std::fs::create_dir_all(&dir.0).unwrap();
    let devices = vec![dir.0.join("one"), dir.0.join("two")];
    let config = || Config { devices: devices.clone(), ..config(&dir.0) };
    let store = Store::open(config()).unwrap();
    put_all(&store, 300);
    store.close().unwrap();
    let store = Store::open(config()).unwrap();
    assert_all(&store, 300);
    assert!(store.status().foreign_files.is_empty());
}

#[test]
fn a_store_without_ssd_evicts_like_any_cache() {
    let store = Store::open(Config { ssd: ByteSize(0), ..config(Path::new("/nonexistent")) }).unwrap();
    put_all(&store, 300);
    let present =
        (0..300).filter(|n| value(&store, *n).is_some_and(|(bytes, _)| bytes == body(*n))).count() as u64;
    let stats = store.stats();
    assert_eq!((present + stats.evicted(), present), (300, stats.hot_objects));
    assert!(stats.hot.objects_bytes > 14 * MIB, "DRAM is used to the end: {stats:?}");
    assert_eq!(store.flush().unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn what_cannot_be_opened_is_named_and_left_alone() {
    let dir = Dir::new("refused");
    let store = Store::open(config(&dir.0)).unwrap();
    let error = Store::open(config(&dir.0)).map(drop).unwrap_err();
    assert!(error.message().contains("in use by pid"), "{error}");
    drop(store);

    let path = dir.0.join("ssd-0.ebb");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[..65_536].fill(0x55);
    std::fs::write(&path, &bytes).unwrap();
    let error = Store::open(config(&dir.0)).map(drop).unwrap_err();
    assert!(error.message().contains("superblock of") && error.message().contains("ssd-0.ebb"), "{error}");
    assert!(std::fs::read(&path).unwrap() == bytes, "a store that was refused was changed");

    // A start that was wiped makes no new store of what holds data.
    bytes[..65_536].fill(0);
    bytes[65_536 + 3 * 1_048_576] = 1;
    std::fs::write(&path, &bytes).unwrap();
    let error = Store::open(config(&dir.0)).map(drop).unwrap_err();
    assert!(error.message().contains("data follows it") && error.message().contains("ssd-0.ebb"), "{error}");
    assert!(std::fs::read(&path).unwrap() == bytes, "a store that was refused was changed");

    let small = Dir::new("small");
    let error = Store::open(Config { ssd: ByteSize(2 * MIB), ..config(&small.0) }).map(drop).unwrap_err();
    assert!(error.message().contains("too small"), "{error}");
    assert!(!small.0.join("ssd-0.ebb").exists());
    // Larger than a device must be, smaller than what a flush may have to find room for.
    let error = Store::open(Config { ssd: ByteSize(12 * MIB), ..config(&small.0) }).map(drop).unwrap_err();
    assert!(error.message().contains("too small") && error.message().contains("16MiB"), "{error}");

    let error = Store::open(config(Path::new("/proc/ebbtide"))).map(drop).unwrap_err();
    assert!(error.message().contains("/proc/ebbtide"), "{error}");
}
