//! The io_uring device passes the suite, in each of its configurations.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Scratch, on_heap};
use ebbtide_core::{BlockDevice, ErrorKind};
use ebbtide_device::conformance::{self, CAPACITY_BYTES_MIN, Subject};
use ebbtide_device::{
    BareSpec, DirectDevice, PsyncDevice, PsyncOptions, UringDevice, UringOptions, open_best,
};
use ebbtide_mem::{Arena, ArenaOptions, BufMut};

fn conform(options: &UringOptions) -> Vec<String> {
    let scratch = Scratch::new(CAPACITY_BYTES_MIN);
    let device = Arc::new(UringDevice::open(&scratch.0, options).unwrap());
    let block: Arc<dyn BlockDevice> = device.clone();
    conformance::all(on_heap(&block));
    let degraded = block.degraded();
    let direct: Arc<dyn DirectDevice> = device;
    conformance::close(&direct, on_heap(&block));
    degraded
}

#[test]
fn conforms() {
    assert_eq!(conform(&UringOptions::default()), Vec::<String>::new());
}

#[test]
fn conforms_with_a_polling_kernel_thread() {
    let options = UringOptions { sqpoll_idle: Some(Duration::from_millis(5)), ..Default::default() };
    conform(&options);
}

#[test]
fn conforms_in_small_pieces() {
    conform(&UringOptions { io_bytes_max: 12 << 10, queue_depth: 3, ..Default::default() });
}

#[test]
fn conforms_one_at_a_time() {
    conform(&UringOptions {
        io_bytes_max: 64 << 10,
        queue_depth: 1,
        inflight_bytes_max: 1,
        queue_ops_max: 1,
        ..Default::default()
    });
}

#[test]
fn conforms_through_the_page_cache() {
    let degraded = conform(&UringOptions { direct: false, ..Default::default() });
    assert_eq!(degraded.len(), 1, "{degraded:?}");
}

fn arena(bytes: u64) -> Arena {
    let name = format!("device-test-{}-{bytes}", std::process::id());
    Arena::open(&ArenaOptions { name, bytes, prefault_threads: 1, huge_pages: false, keep_name: false })
        .unwrap()
}

/// An arena whose free memory is in pieces of 16 KiB, so that larger buffers have many spans.
fn fragment(arena: &Arena) -> Vec<BufMut> {
    let mut all: Vec<_> = std::iter::from_fn(|| arena.alloc(16 << 10)).collect();
    let mut keep = Vec::new();
    for (index, buf) in all.drain(..).enumerate() {
        if index % 2 == 0 {
            keep.push(buf);
        }
    }
    keep
}

#[test]
fn conforms_in_a_registered_arena() {
    for fragmented in [false, true] {
        let arena = arena(if fragmented { 130 << 20 } else { 66 << 20 });
        let kept = if fragmented { fragment(&arena) } else { Vec::new() };
        let make = |len| arena.alloc(len).unwrap();
        assert_eq!(make(1 << 20).raw_spans().len() > 1, fragmented);
        let scratch = Scratch::new(CAPACITY_BYTES_MIN);
        let device = Arc::new(UringDevice::open(&scratch.0, &UringOptions::default()).unwrap());
        let block: Arc<dyn BlockDevice> = device.clone();
        block.register(arena.regions()).unwrap();
        block.register(arena.regions()).unwrap();
        assert_eq!(block.degraded(), Vec::<String>::new());
        let subject = Subject { make: &make, ..on_heap(&block) };
        conformance::all(subject);
        let direct: Arc<dyn DirectDevice> = device;
        conformance::close(&direct, subject);
        drop(kept);
    }
}

#[test]
fn memory_of_another_arena_is_only_slower() {
    let (registered, other) = (arena(4 << 20), arena(8 << 20));
    let scratch = Scratch::new(CAPACITY_BYTES_MIN);
    let block: Arc<dyn BlockDevice> =
        Arc::new(UringDevice::open(&scratch.0, &UringOptions::default()).unwrap());
    block.register(registered.regions()).unwrap();
    conformance::checks_once(Subject { make: &|len| other.alloc(len).unwrap(), ..on_heap(&block) });
}

#[test]
fn files_lie_beside_each_other_on_one_ring() {
    let (first, second) = (Scratch::new(CAPACITY_BYTES_MIN), Scratch::new(4096));
    let device = open_best(&first.0, &UringOptions::default()).unwrap();
    assert_eq!(device.info().kind, "uring");
    let beside = device.open_beside(&second.0, Some(CAPACITY_BYTES_MIN)).unwrap();
    assert_eq!(beside.info().capacity_bytes, CAPACITY_BYTES_MIN);
    let (first_block, second_block): (Arc<dyn BlockDevice>, Arc<dyn BlockDevice>) =
        (device.clone(), beside.clone());
    conformance::reads_what_was_written(on_heap(&first_block));
    conformance::keeps_the_order_of_a_batch(on_heap(&second_block));
    conformance::close(&device, on_heap(&first_block));
    drop((device, first_block));
    // The ring lives on with its other file, and has room for more than 64 in turn.
    conformance::gathers(on_heap(&second_block));
    for _ in 0..70 {
        drop(beside.open_beside(&first.0, None).unwrap());
    }
    let missing = beside.open_beside(std::path::Path::new("/nowhere/at/all"), None).err().unwrap();
    assert!(missing.message().contains("/nowhere/at/all"), "{missing}");
}

#[test]
fn drives_bare() {
    let arena = arena(64 << 20);
    let scratch = Scratch::new(CAPACITY_BYTES_MIN);
    let uring: Arc<dyn DirectDevice> =
        Arc::new(UringDevice::open(&scratch.0, &UringOptions::default()).unwrap());
    uring.register(arena.regions()).unwrap();
    let psync: Arc<dyn DirectDevice> =
        Arc::new(PsyncDevice::open(&scratch.0, &PsyncOptions::default()).unwrap());
    for device in [uring, psync] {
        // With a first flush of its own there is exactly one before the second would be due.
        let runs =
            [(true, 4 << 20, 0), (true, 64 << 20, 8 << 20), (true, 64 << 20, 0), (true, 0, 0), (false, 0, 0)];
        for (write, flush_every_bytes, flush_first_bytes) in runs {
            let depth = device.info().queue_depth.min(16);
            let mut buffers: Vec<_> = (0..20).map(|_| arena.alloc(64 << 10).unwrap()).collect();
            buffers.iter_mut().for_each(|buf| buf.write_at(0, &[9; 64 << 10]));
            let offsets = (0..128).map(|index| index * (64 << 10)).collect();
            let spec = BareSpec {
                write,
                io_bytes: 64 << 10,
                depth,
                offsets,
                bytes_max: 20 << 20,
                time_max: Duration::from_secs(60),
                flush_every_bytes,
                flush_first_bytes,
                buffers,
            };
            let result = device.drive(spec).unwrap();
            assert_eq!((result.bytes, result.operations), (20 << 20, 320));
            match (flush_every_bytes, flush_first_bytes) {
                (0, _) | (0x400_0000, 0) => assert_eq!(result.flushes, 0),
                (_, 0) => assert!(result.flushes > 0),
                _ => assert_eq!(result.flushes, 1),
            }
            assert_eq!(result.buffers.len(), 20);
            assert!(result.seconds > 0.0 && result.cpu_seconds > 0.0);
            let read = result.buffers[0].spans().all(|span| span.iter().all(|byte| *byte == 9));
            assert!(read, "a bare run moves the bytes of its buffers");
        }
        let spec = BareSpec {
            write: false,
            io_bytes: 4096,
            depth: 4,
            offsets: vec![CAPACITY_BYTES_MIN],
            bytes_max: 1,
            time_max: Duration::ZERO,
            flush_every_bytes: 0,
            flush_first_bytes: 0,
            buffers: (0..4).map(|_| BufMut::heap(4096)).collect(),
        };
        assert_eq!(device.drive(spec).unwrap_err().kind(), ErrorKind::Invalid);
    }
}

/// Loses the content of the device that `EBBTIDE_TEST_DEVICE` names, for example a loop device.
#[test]
fn conforms_on_a_block_device() {
    let Ok(path) = std::env::var("EBBTIDE_TEST_DEVICE") else {
        eprintln!("skipped: EBBTIDE_TEST_DEVICE names no block device");
        return;
    };
    let path = std::path::Path::new(&path);
    let uring: Arc<dyn BlockDevice> = Arc::new(UringDevice::open(path, &UringOptions::default()).unwrap());
    conformance::all(on_heap(&uring));
    drop(uring);
    let psync: Arc<dyn BlockDevice> = Arc::new(PsyncDevice::open(path, &PsyncOptions::default()).unwrap());
    conformance::all(on_heap(&psync));
}
