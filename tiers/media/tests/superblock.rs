//! Opening a block medium: what is new is made, what is whole is found, and what cannot be read is left untouched.

#![allow(clippy::unwrap_used, reason = "a test may end here")]

#[path = "../../log/tests/lab/device.rs"]
#[allow(dead_code, unreachable_pub, missing_docs, reason = "shared with the tests of the log")]
mod device;
#[path = "../../log/tests/lab/env.rs"]
#[allow(dead_code, unreachable_pub, missing_docs, reason = "shared with the tests of the log")]
mod env;

use std::sync::Arc;

use device::MemDevice;
use ebbtide_core::{BlockDevice, ErrorKind, Medium, MediumOp, Result};
use ebbtide_media::{BlockMedium, BlockOptions, superblock};
use ebbtide_mem::BufMut;
use env::LabEnv;

const MIB: usize = 1 << 20;

fn options(device: &MemDevice) -> BlockOptions {
    let capacity_bytes = device.info().capacity_bytes;
    BlockOptions { capacity_bytes, segment_bytes: None, store: None, index: 0, count: 1 }
}

fn open_with(device: &Arc<MemDevice>, options: BlockOptions) -> Result<BlockMedium> {
    let env = LabEnv::new(1);
    let device: Arc<dyn BlockDevice> = device.clone();
    env.run(BlockMedium::open(device, options, &*env))
}

fn open(device: &Arc<MemDevice>) -> Result<BlockMedium> {
    open_with(device, options(device))
}

/// The error of an open that must not write.
fn refused(device: &Arc<MemDevice>, options: BlockOptions) -> ebbtide_core::Error {
    let before = device.image();
    let error = open_with(device, options).err().expect("it was opened");
    assert!(device.image() == before, "it was written to");
    error
}

#[test]
fn a_new_medium_is_made_and_found_again() {
    let device = MemDevice::new(40 * MIB + 5000 * 4096);
    let first = open(&device).unwrap();
    assert!(first.identity().created);
    assert_eq!((first.identity().incarnation, first.info().segment_bytes), (1, MIB as u64));
    assert_eq!(first.info().segments_max, 59);
    assert_eq!(first.info().overhead_bytes + 59 * MIB as u64, device.info().capacity_bytes);
    let second = open(&MemDevice::of(device.durable(), 1)).unwrap();
    let identity = ebbtide_core::MediumIdentity { created: false, incarnation: 2, ..first.identity() };
    assert_eq!(second.identity(), identity);
    assert_ne!(identity.secret, [0, 0]);
}

#[test]
fn segments_are_as_large_as_32_of_them_allow() {
    for (bytes, segment, segments) in
        [(6 * MIB + 65536, MIB, 6), (100 * MIB, 2 * MIB, 49), (600 * MIB, 16 * MIB, 37)]
    {
        let medium = open(&MemDevice::new(bytes)).unwrap();
        assert_eq!(medium.info().segment_bytes, segment as u64, "{bytes}");
        assert_eq!(medium.info().segments_max, segments, "{bytes}");
    }
}

#[test]
fn the_state_of_the_log_is_all_or_nothing() {
    let device = MemDevice::new(10 * MIB);
    let env = LabEnv::new(1);
    let medium = open(&device).unwrap();
    assert!(medium.read_meta().is_empty());
    env.run(medium.write_meta(b"one".to_vec())).unwrap();
    let writes = device.journal().len();
    // Two at once: one after the other, and never both copies at a time.
    let (one, two) = (medium.write_meta(vec![1; 2048]), medium.write_meta(vec![2; 2048]));
    env.run(async {
        one.await.unwrap();
        two.await.unwrap();
    });
    let offsets: Vec<u64> = device.journal()[writes..].iter().map(|(offset, _)| *offset).collect();
    assert_eq!(offsets.len(), 4);
    assert!(offsets.windows(2).step_by(2).all(|pair| pair[0] != pair[1]), "{offsets:?}");
    assert!(env.run(medium.write_meta(vec![0; 2049])).is_err());
    for seed in 0..20 {
        let device = MemDevice::of(device.durable(), seed);
        let medium = open(&device).unwrap();
        device.cut_after(1);
        assert!(env.run(medium.write_meta(b"three".to_vec())).is_err());
        let cut = open(&MemDevice::of(device.after_power_cut(seed), 1)).unwrap();
        assert_eq!(cut.read_meta(), vec![2; 2048]);
        let device = MemDevice::of(cut_in_flight(&device, seed), 1);
        let meta = open(&device).unwrap().read_meta();
        assert!(meta == vec![2; 2048] || meta == b"three");
    }
}

/// A copy that is half written when the power goes.
fn cut_in_flight(device: &MemDevice, seed: u64) -> Vec<u8> {
    let device = MemDevice::of(device.durable(), seed);
    let env = LabEnv::new(1);
    let medium = open(&device).unwrap();
    let mut write = medium.write_meta(b"three".to_vec());
    let _ = env.poll(&mut write);
    device.after_power_cut(seed)
}

#[test]
fn one_damaged_copy_is_survived_and_two_are_not() {
    let device = MemDevice::new(10 * MIB);
    open(&device).unwrap();
    open(&device).unwrap();
    let [a, b] = superblock::COPY_OFFSETS.map(|at| at as usize);
    for at in [a, b] {
        let broken = MemDevice::of(device.image(), 1);
        broken.corrupt(at + 48);
        assert_eq!(open(&broken).unwrap().identity().incarnation, 3, "an incarnation was given twice");
        assert_eq!(open(&broken).unwrap().identity().incarnation, 4, "the damaged copy was not mended");
    }
    device.corrupt(a + 48);
    device.corrupt(b + 48);
    let error = refused(&device, options(&device));
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    let message = error.message();
    assert!(message.starts_with("superblock of mem is not readable (both copies)"), "{message}");
    assert!(message.contains("nothing was changed"), "{message}");
}

#[test]
fn what_is_not_ours_is_left_alone() {
    let foreign = MemDevice::of(vec![0x5a; 10 * MIB], 1);
    let error = refused(&foreign, options(&foreign));
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.message().contains("not ebbtide's"), "{error}");
    // Only its first bytes are zero.
    let mut image = vec![0; 10 * MIB];
    image[60_000] = 1;
    let foreign = MemDevice::of(image, 1);
    assert_eq!(refused(&foreign, options(&foreign)).kind(), ErrorKind::Invalid);

    let device = MemDevice::new(10 * MIB);
    let medium = open(&device).unwrap();
    for (change, text) in [
        (superblock::Superblock { incompatible: 1 << 7, ..medium.superblock() }, "bit 7"),
        (superblock::Superblock { incompatible: 1, ..medium.superblock() }, "bit 0"),
    ] {
        let mut image = vec![0; 10 * MIB];
        image[..4096].copy_from_slice(&change.encode());
        let newer = MemDevice::of(image, 1);
        let error = refused(&newer, options(&newer));
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains(text), "{error}");
    }
}

#[test]
fn sizes_and_places_that_do_not_fit_are_named() {
    let small = MemDevice::new(6 * MIB);
    let error = refused(&small, options(&small));
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.message().contains("6.06MiB") && error.message().contains("6MiB"), "{error}");

    let device = MemDevice::new(20 * MIB);
    let odd = BlockOptions { segment_bytes: Some(3 << 20), ..options(&device) };
    assert!(refused(&device, odd).message().contains("3MiB"));
    let error = refused(&device, BlockOptions { segment_bytes: Some(4 << 20), ..options(&device) });
    assert!(error.message().contains("24.06MiB"), "{error}");
    let medium = open_with(&device, BlockOptions { store: Some([9; 16]), ..options(&device) }).unwrap();
    assert_eq!(medium.identity().store, [9; 16]);
    for (wrong, text) in [
        (BlockOptions { segment_bytes: Some(2 << 20), ..options(&device) }, "2MiB"),
        (BlockOptions { store: Some([8; 16]), ..options(&device) }, "another store"),
        (BlockOptions { index: 1, count: 2, ..options(&device) }, "medium 0 of 1"),
    ] {
        let error = refused(&device, wrong);
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.message().contains(text), "{error}");
    }
    let truncated = MemDevice::of(device.image()[..10 * MIB].to_vec(), 1);
    assert!(refused(&truncated, options(&truncated)).message().contains("truncated"));
    let mut grown = device.image();
    grown.resize(30 * MIB, 0);
    let grown = open(&MemDevice::of(grown, 1)).unwrap();
    assert_eq!(grown.info().segments_max, 19);
    assert_eq!(grown.info().overhead_bytes, 11 * MIB as u64);
}

#[test]
fn operations_stay_in_their_segment() {
    let device = MemDevice::new(10 * MIB);
    let medium = open(&device).unwrap();
    let env = LabEnv::new(1);
    let read = |slot, offset| MediumOp::Read { slot, offset, into: BufMut::heap(8192), check: None };
    let write = |slot, offset| MediumOp::Write { slot, offset, from: vec![BufMut::heap(4096).freeze()] };
    let ops = vec![
        read(0, 0),
        read(9, 0),
        read(0, MIB as u64 - 4096),
        write(8, MIB as u64),
        write(8, 0),
        read(8, 0),
    ];
    let done = env.run(medium.submit(ops));
    assert_eq!(
        done.iter().map(|done| done.result.is_ok()).collect::<Vec<_>>(),
        [true, false, false, false, true, true]
    );
    assert!([0, 1, 2, 5].iter().all(|index| done[*index].buf.is_some()), "a buffer is lost");
}
