//! The log tier from outside: what is put is read, packed and in order; what is full is sealed, reclaimed and written anew.

#![allow(clippy::unwrap_used, reason = "a test may end here")]

mod lab;

use std::sync::Arc;
use std::task::Poll;

use ebbtide_core::{ErrorKind, Intent, Location, SegmentId, Tier};
use lab::device::MemDevice;
use lab::{Lab, MIB};

fn keys(count: usize) -> Vec<Vec<u8>> {
    (0..count).map(|n| format!("key {n}").into_bytes()).collect()
}

#[test]
fn values_of_all_sizes_come_back() {
    let mut lab = Lab::open(&[MemDevice::new(40 * MIB)], 1).unwrap();
    let sizes =
        [1, 100, 4095, 4096, 4097, 65536, 131_071, 131_072, 131_073, 262_144, 300_000, 900_000, 3_274_752];
    let keys = keys(sizes.len());
    let batch: Vec<_> = keys.iter().map(Vec::as_slice).zip(sizes).collect();
    lab.put(&batch).unwrap();
    assert_eq!(lab.check(), 0);
    lab.assert_counts();
    let usage = lab.tier.usage();
    assert_eq!(usage.admitted_value_bytes, sizes.iter().sum::<usize>() as u64);
    for key in keys {
        lab.remove(&key).unwrap();
    }
    lab.assert_counts();
    assert_eq!(lab.tier.usage().live_records, 0);
}

#[test]
fn small_values_share_a_write() {
    let device = MemDevice::new(40 * MIB);
    let mut lab = Lab::open(std::slice::from_ref(&device), 1).unwrap();
    let before = device.journal().len();
    let keys = keys(32);
    let batch: Vec<_> = keys.iter().map(|key| (key.as_slice(), 16 << 10)).collect();
    lab.put(&batch).unwrap();
    let written = &device.journal()[before..];
    assert_eq!(written.len(), 1, "32 x 16 KiB are one group: {written:?}");
    assert_eq!(written[0].1, (32 * 16 + 4 + 4) << 10, "the segment's header, a page of records, and no more");
    let pages: Vec<u32> = keys.iter().map(|key| lab.rows[key].location.page).collect();
    assert!(pages.windows(2).all(|pair| pair[0] < pair[1]), "not in order");
}

#[test]
fn writing_costs_little_more_than_the_values() {
    for value in [64 << 10, MIB] {
        let device = MemDevice::new(260 * MIB);
        let mut lab = Lab::open(std::slice::from_ref(&device), 1).unwrap();
        let per_batch = 4 * MIB / value;
        for batch in 0..20 {
            let keys: Vec<_> = (0..per_batch).map(|n| format!("{batch} {n}").into_bytes()).collect();
            let batch: Vec<_> = keys.iter().map(|key| (key.as_slice(), value)).collect();
            lab.put(&batch).unwrap();
        }
        lab.env.settle();
        let usage = lab.tier.usage();
        let amplification = usage.written_bytes as f64 / usage.admitted_value_bytes as f64;
        assert!(amplification < 1.01, "{value}: {amplification}");
        println!("value {value}: write amplification {amplification:.4}");
        assert!(usage.written_bytes + 3 * 4096 >= usage.device.written_bytes);
    }
}

#[test]
fn a_full_tier_waits_and_reclaim_makes_room() {
    let device = MemDevice::new(9 * MIB);
    let mut lab = Lab::open(std::slice::from_ref(&device), 1).unwrap();
    let segments = lab.tier.usage().segments;
    for n in 0..200_u32 {
        while lab.tier.wants_reclaim() {
            let before = lab.tier.usage().segments_free;
            if lab.reclaim(|key| key.ends_with(b"0")).unwrap().is_none() {
                lab.env.settle();
            }
            assert!(lab.tier.usage().segments_free >= before);
        }
        lab.put(&[(format!("k{n}").as_bytes(), 200_000)]).unwrap();
        lab.assert_counts();
        assert_eq!(lab.tier.usage().segments, segments);
    }
    assert_eq!(lab.check(), 0);
    let usage = lab.tier.usage();
    assert!(usage.segments_reclaimed > 20 && usage.reinserted_value_bytes > 0);
    assert_eq!(usage.accounted_bytes, 9 * MIB as u64);
}

#[test]
fn writers_wait_in_line_and_the_reserve_is_left_alone() {
    let mut lab = Lab::open(&[MemDevice::new(9 * MIB)], 1).unwrap();
    let mut n = 0;
    loop {
        n += 1;
        let generation = lab.next_generation();
        let object = lab.object(format!("k{n}").as_bytes(), generation, 200_000);
        let mut put = lab.tier.put_many(vec![object.clone()], Intent::Demote);
        let mut ended = None;
        for _ in 0..1000 {
            if let Poll::Ready(results) = lab.env.poll(&mut put) {
                ended = Some(results);
                break;
            }
            lab.env.turn();
        }
        match ended {
            Some(mut results) => lab.set_row(&object, results.pop().unwrap().unwrap()),
            None => {
                assert_eq!(lab.tier.usage().segments_free, 2, "waits while the reserve is there");
                // One behind it, which must not overtake; then one that goes away.
                let later = lab.object(b"later", object.generation, 100);
                let mut later = lab.tier.put_many(vec![later], Intent::Demote);
                assert!(lab.env.poll(&mut later).is_pending());
                lab.reclaim(|_| false).unwrap();
                assert!(lab.env.poll(&mut later).is_pending(), "overtaken");
                assert!(lab.env.run(put).pop().unwrap().is_ok());
                assert!(lab.env.run(later).pop().unwrap().is_ok());
                return;
            }
        }
    }
}

#[test]
fn a_put_that_is_dropped_leaves_the_log_whole() {
    let device = MemDevice::new(9 * MIB);
    let mut lab = Lab::open(std::slice::from_ref(&device), 1).unwrap();
    for n in 0..40_u32 {
        while lab.tier.wants_reclaim() {
            lab.reclaim(|_| false).unwrap();
            lab.env.settle();
        }
        let generation = lab.next_generation();
        let objects =
            (0..4_u32).map(|m| lab.object(format!("{n} {m}").as_bytes(), generation, 90_000)).collect();
        let mut put = lab.tier.put_many(objects, Intent::Demote);
        assert!(lab.env.poll(&mut put).is_pending());
        drop(put);
    }
    lab.env.settle();
    lab.assert_counts();
    lab.put(&[(b"last", 1000)]).unwrap();
    lab.close().unwrap();
    let lab = Lab::open(&[device], 2).unwrap();
    assert_eq!((lab.rows.len(), lab.check()), (1, 0));
}

/// A bench that took its clock before the seal had ended left the flush of it out.
#[test]
fn a_tier_is_settled_when_its_seals_have_ended() {
    let mut lab = Lab::open(&[MemDevice::new(9 * MIB)], 1).unwrap();
    let mut open = 0;
    for n in 0..100 {
        let generation = lab.next_generation();
        let object = lab.object(format!("k{n}").as_bytes(), generation, 150_000);
        // Polled once, so that the task that seals has not run when a segment has just become full.
        let mut put = lab.tier.put_many(vec![object], Intent::Demote);
        let ended = lab.env.poll(&mut put).is_ready();
        let usage = lab.tier.usage();
        if usage.open_bytes < open {
            assert_eq!(usage.segments_sealed, 0, "sealed before it could be");
            lab.env.run(lab.tier.settle());
            assert_eq!(lab.tier.usage().segments_sealed, 1);
            return;
        }
        if !ended {
            lab.env.run(put);
        }
        open = lab.tier.usage().open_bytes;
    }
    panic!("no segment became full");
}

#[test]
fn an_object_without_sums_is_written_with_them() {
    let device = MemDevice::new(40 * MIB);
    let mut lab = Lab::open(std::slice::from_ref(&device), 1).unwrap();
    for (key, length) in [(b"small".as_slice(), 100), (b"large", 900_000)] {
        let generation = lab.next_generation();
        let whole = lab.object(key, generation, length);
        let bare = lab.unsummed(&whole);
        let location = lab.env.run(lab.tier.put_many(vec![bare], Intent::Demote)).pop().unwrap().unwrap();
        lab.set_row(&whole, location);
    }
    // The rows have the sums of the put: what was written and what a recovery reads must agree with them.
    assert_eq!(lab.check(), 0);
    lab.close().unwrap();
    let lab = Lab::open(&[MemDevice::of(device.image(), 1)], 2).unwrap();
    assert_eq!((lab.rows.len(), lab.check()), (2, 0));
}

#[test]
fn a_failed_write_fails_its_objects_alone() {
    let device = MemDevice::new(9 * MIB);
    let mut lab = Lab::open(std::slice::from_ref(&device), 1).unwrap();
    lab.put(&[(b"one", 50_000)]).unwrap();
    let at = 65536 + u64::from(lab.rows[b"one".as_slice()].location.page) * 4096;
    device.fail_writes(at + 65536..at + 65536 + 4096);
    let error = lab.put(&[(b"two", 50_000)]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    lab.put(&[(b"three", 50_000)]).unwrap();
    assert_ne!(lab.rows[b"three".as_slice()].location.segment, lab.rows[b"one".as_slice()].location.segment);
    lab.env.settle();
    let usage = lab.tier.usage();
    assert_eq!((usage.write_errors, usage.segments_sealed), (1, 1));
    assert_eq!(lab.check(), 0);
    drop(lab);
    let lab = Lab::open(&[MemDevice::of(device.image(), 1)], 2).unwrap();
    assert_eq!((lab.rows.len(), lab.check()), (2, 0));
}

#[test]
fn without_its_header_a_segment_holds_nothing() {
    let device = MemDevice::new(9 * MIB);
    let mut lab = Lab::open(std::slice::from_ref(&device), 1).unwrap();
    device.fail_writes(65536..65537);
    let generation = lab.next_generation();
    let objects: Vec<_> =
        (0..40).map(|n| lab.object(format!("{n}").as_bytes(), generation, 100_000)).collect();
    let results = lab.env.run(lab.tier.put_many(objects.clone(), Intent::Demote));
    // Ten fit the first segment: answered as written they would not be found by recovery.
    assert_eq!(results.iter().take_while(|result| result.is_err()).count(), 10);
    for (object, location) in
        objects.iter().zip(results).filter_map(|(object, result)| Some((object, result.ok()?)))
    {
        lab.set_row(object, location);
    }
    assert_eq!((lab.rows.len(), lab.check()), (30, 0));
    lab.env.settle();
    assert_eq!(
        lab.tier.usage().used_bytes,
        3 * MIB as u64,
        "the segment without a header was not given back"
    );
    lab.put(&[(b"k", 150_000)]).unwrap();
    assert_eq!(lab.check(), 0);
}

#[test]
fn places_that_cannot_be_are_refused() {
    let mut lab = Lab::open(&[MemDevice::new(40 * MIB)], 1).unwrap();
    lab.put(&[(b"k", 1000), (b"large", 3 * MIB)]).unwrap();
    let row = lab.rows[b"k".as_slice()];
    let at = |segment, page| lab::Row { location: Location { segment, page }, ..row };
    for row in [
        at(SegmentId::new(1, 0), 2),
        at(SegmentId::new(0, 5000), 2),
        at(row.location.segment, 255),
        at(row.location.segment, u32::MAX),
        at(row.location.segment, 0),
        lab::Row { length: 5 * MIB as u64, ..row },
    ] {
        assert_eq!(lab.read(b"k", row).unwrap_err().kind(), ErrorKind::Stale, "{row:?}");
    }
    let other = lab::Row { generation: ebbtide_core::Generation(row.generation.0 + 1), ..row };
    assert_eq!(lab.read(b"k", other).unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(lab.read(b"x", row).unwrap_err().kind(), ErrorKind::Corrupt);
    let large = lab.rows[b"large".as_slice()];
    assert_eq!(lab.read(b"x", large).unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(lab.tier.usage().checksum_mismatches, 3);
    assert!(lab.put(&[(b"huge", 11 * MIB)]).is_err_and(|error| error.kind() == ErrorKind::Invalid));
}

#[test]
fn reclaim_prefers_what_is_not_wanted_and_refuses_to_drop_live_records() {
    let mut lab = Lab::open(&[MemDevice::new(20 * MIB)], 1).unwrap();
    for n in 0..24_u32 {
        lab.put(&[(format!("k{n:02}").as_bytes(), 200_000)]).unwrap();
    }
    lab.env.settle();
    for (key, row) in lab.rows.clone() {
        if key.as_slice() < b"k08".as_slice() {
            lab.tier.wanted(row.location, row.length);
        }
    }
    let victims = lab.env.run(lab.tier.reclaim()).unwrap().unwrap();
    assert_eq!(&*victims.records[0].key, b"k10", "the oldest that nobody asked for");
    assert_eq!(victims.records.len(), 5);
    let error = lab.env.run(lab.tier.release(victims.segment)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stale);
    assert_eq!(lab.check(), 0);
    assert_eq!(lab.env.run(lab.tier.release(victims.segment)).unwrap_err().kind(), ErrorKind::Invalid);
    let dropped = lab.reclaim(|_| false).unwrap().unwrap();
    assert_eq!(dropped.len(), 5);
}

#[test]
fn two_media_share_the_work() {
    let devices: [Arc<MemDevice>; 2] = [MemDevice::new(20 * MIB), MemDevice::new(20 * MIB)];
    let mut lab = Lab::open(&devices, 1).unwrap();
    for n in 0..60_u32 {
        lab.put(&[(format!("k{n}").as_bytes(), 150_000)]).unwrap();
    }
    lab.put(&[(b"parts", 2 * MIB)]).unwrap();
    let [one, two] =
        devices.each_ref().map(|device| ebbtide_core::BlockDevice::counters(&**device).written_bytes);
    assert!(one.abs_diff(two) < MIB as u64, "{one} and {two}");
    assert_eq!(lab.check(), 0);
    lab.flush().unwrap();
    let images = devices.each_ref().map(|device| MemDevice::of(device.durable(), 3));
    let lab = Lab::open(&images, 2).unwrap();
    assert_eq!((lab.rows.len(), lab.check()), (61, 0));
    lab.assert_counts();
    let swapped = [MemDevice::of(devices[1].image(), 1), MemDevice::of(devices[0].image(), 1)];
    assert!(Lab::open(&swapped, 3).is_err_and(|error| error.message().contains("medium 1 of 2")));
}
