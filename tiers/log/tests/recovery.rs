//! What a start finds: torn groups, holes, footers that are damaged, checkpoints that are too old, removals that must hold.

#![allow(clippy::unwrap_used, reason = "a test may end here")]

mod lab;

use std::sync::Arc;

use ebbtide_core::{Intent, Tier};
use ebbtide_tier_log::format::meta::Meta;
use lab::device::MemDevice;
use lab::{Lab, MIB, open_media};

const SEGMENT_0: usize = 64 << 10;

fn device() -> Arc<MemDevice> {
    MemDevice::new(12 * MIB)
}

fn again(image: Vec<u8>) -> Lab {
    Lab::open(&[MemDevice::of(image, 1)], 9).unwrap()
}

/// The device offset of a row's value.
fn offset_of(lab: &Lab, key: &[u8]) -> usize {
    let location = lab.rows[key].location;
    SEGMENT_0 + location.segment.slot() as usize * MIB + location.page as usize * 4096
}

fn names(lab: &Lab) -> Vec<String> {
    lab.rows.keys().map(|key| String::from_utf8(key.clone()).unwrap()).collect()
}

#[test]
fn a_new_medium_is_empty() {
    let lab = Lab::open(&[device()], 1).unwrap();
    assert_eq!(lab.summary, Default::default());
    let usage = lab.tier.usage();
    assert_eq!((usage.used_bytes, usage.segments_free, usage.segments), (0, 11, 11));
    assert_eq!(usage.accounted_bytes, 12 * MIB as u64);
}

#[test]
fn a_torn_group_is_dropped_and_what_follows_it_is_found() {
    let device = device();
    let mut lab = Lab::open(std::slice::from_ref(&device), 1).unwrap();
    for key in ["a", "b", "c", "d"] {
        lab.put(&[(key.as_bytes(), 50_000)]).unwrap();
    }
    lab.flush().unwrap();
    let (b, c) = (offset_of(&lab, b"b"), offset_of(&lab, b"c"));
    device.corrupt(b + 49_999); // one bit of a value
    device.zero(c - 4096..c + 53_248); // a whole group that never came
    let lab = again(device.image());
    assert_eq!(names(&lab), ["a", "d"]);
    assert_eq!((lab.summary.segments_walked, lab.summary.records_torn, lab.summary.records), (1, 1, 2));
    assert_eq!(lab.check(), 0);
    lab.assert_counts();
}

/// Nothing is flushed but by sealing. Whatever the power cut leaves of the rest, a row that is found reads right.
#[test]
fn a_trailer_speaks_of_durable_bytes() {
    let device = device();
    let mut lab = Lab::open(std::slice::from_ref(&device), 1).unwrap();
    let mut sealed = 0;
    for n in 0..22 {
        lab.put(&[(format!("k{n:02}").as_bytes(), 200_000)]).unwrap();
        lab.env.turn();
        for seed in 0..3 {
            let cut = again(device.after_power_cut(seed));
            assert_eq!(cut.check(), 0, "a row was believed whose bytes never came");
            sealed = sealed.max(cut.summary.segments_sealed);
        }
    }
    assert!(sealed > 1, "too polite");
}

#[test]
fn a_walked_segment_is_sealed_for_the_next_start() {
    let device = device();
    let mut lab = Lab::open(std::slice::from_ref(&device), 1).unwrap();
    lab.put(&[(b"a", 50_000), (b"b", 60_000)]).unwrap();
    lab.flush().unwrap();
    let second = MemDevice::of(device.durable(), 1);
    let lab = Lab::open(std::slice::from_ref(&second), 2).unwrap();
    assert_eq!((lab.summary.segments_walked, lab.summary.segments_sealed), (1, 0));
    let lab = again(second.image());
    assert_eq!((lab.summary.segments_walked, lab.summary.segments_sealed), (0, 1));
    assert_eq!((names(&lab), lab.check()), (vec!["a".into(), "b".into()], 0));
}

#[test]
fn a_damaged_footer_is_replaced_by_a_walk() {
    let device = device();
    let mut lab = Lab::open(std::slice::from_ref(&device), 1).unwrap();
    for n in 0..12 {
        lab.put(&[(format!("k{n:02}").as_bytes(), 150_000)]).unwrap();
    }
    lab.env.settle();
    assert_eq!(lab.tier.usage().segments_sealed, 1);
    let segment = lab.rows[b"k00".as_slice()].location.segment;
    let footer = SEGMENT_0 + (segment.slot() as usize + 1) * MIB - 2 * 4096;
    for at in [footer + 70, footer + 4096 + 50] {
        let broken = MemDevice::of(device.image(), 1);
        broken.corrupt(at);
        let mut lab = Lab::open(std::slice::from_ref(&broken), 2).unwrap();
        // A trailer that is damaged looks like one that was never written.
        assert_eq!(lab.summary.footers_bad, u32::from(at < footer + 4096));
        assert_eq!((lab.rows.len(), lab.check()), (12, 0));
        // And while the tier is open: reclaim walks too.
        broken.corrupt(at);
        let victims = lab.env.run(lab.tier.reclaim()).unwrap().unwrap();
        assert_eq!((victims.segment, victims.records.len()), (segment, 6));
        lab.rows.clear();
    }
}

#[test]
fn a_clean_start_reads_the_checkpoint_and_no_footer() {
    let device = device();
    let mut lab = Lab::open(std::slice::from_ref(&device), 1).unwrap();
    for n in 0..30 {
        lab.put(&[(format!("k{n}").as_bytes(), 100_000)]).unwrap();
    }
    lab.put(&[(b"parts", 2 * MIB)]).unwrap();
    lab.remove(b"k3").unwrap();
    lab.close().unwrap();
    assert!(lab.put(&[(b"late", 10)]).is_err());
    let rows = lab.rows.clone();
    let second = MemDevice::of(device.durable(), 1);
    let mut lab = Lab::open(std::slice::from_ref(&second), 2).unwrap();
    assert!(lab.summary.from_checkpoint);
    assert_eq!((lab.summary.records, lab.summary.segments_sealed), (30, 0));
    assert_eq!((&lab.rows, lab.check()), (&rows, 0));
    lab.assert_counts();
    // The checkpoint counts once: after a crash what happened since is found.
    lab.put(&[(b"new", 5000)]).unwrap();
    lab.remove(b"k4").unwrap();
    lab.flush().unwrap();
    let lab = again(second.durable());
    assert!(!lab.summary.from_checkpoint);
    assert!(lab.rows.contains_key(b"new".as_slice()) && !lab.rows.contains_key(b"k4".as_slice()));
    assert!(!lab.rows.contains_key(b"k3".as_slice()), "its tombstone stands in a footer");
    assert_eq!((lab.rows.len(), lab.check()), (30, 0));
}

/// Also when nothing has been written over the checkpoint yet.
#[test]
fn a_checkpoint_is_void_with_the_first_write() {
    let device = device();
    let mut lab = Lab::open(std::slice::from_ref(&device), 1).unwrap();
    for n in 0..9 {
        lab.put(&[(format!("k{n}").as_bytes(), 240_000)]).unwrap();
    }
    lab.env.settle();
    lab.reclaim(|_| false).unwrap().unwrap(); // slot 0 is free again, behind the one that the checkpoint takes
    lab.close().unwrap();
    let second = MemDevice::of(device.durable(), 1);
    let mut lab = Lab::open(std::slice::from_ref(&second), 2).unwrap();
    assert!(lab.summary.from_checkpoint);
    lab.put(&[(b"new", 5000)]).unwrap();
    assert_eq!(lab.rows[b"new".as_slice()].location.segment.slot(), 0);
    lab.flush().unwrap();
    let lab = again(second.durable());
    assert!(!lab.summary.from_checkpoint && lab.rows.contains_key(b"new".as_slice()), "flushed and lost");
}

#[test]
fn a_start_that_ends_before_it_wrote_leaves_the_checkpoint_valid() {
    let device = device();
    let mut lab = Lab::open(std::slice::from_ref(&device), 1).unwrap();
    lab.put(&[(b"k", 5000)]).unwrap();
    lab.close().unwrap();
    let second = MemDevice::of(device.durable(), 1);
    let env = lab::env::LabEnv::new(3);
    let media = open_media(&env, std::slice::from_ref(&second)).unwrap();
    assert!(Meta::decode(&media[0].read_meta()).unwrap().clean);
    assert!(again(second.durable()).summary.from_checkpoint);
}

#[test]
fn a_damaged_checkpoint_is_not_believed() {
    let device = device();
    let mut lab = Lab::open(std::slice::from_ref(&device), 1).unwrap();
    for n in 0..20 {
        lab.put(&[(format!("k{n}").as_bytes(), 30_000)]).unwrap();
    }
    lab.close().unwrap();
    let env = lab::env::LabEnv::new(3);
    let copy = MemDevice::of(device.image(), 1);
    let meta = Meta::decode(&open_media(&env, &[copy]).unwrap()[0].read_meta()).unwrap();
    assert_eq!((meta.chunks, meta.rows, meta.segments.len()), (2, 20, 1));
    let chunks = SEGMENT_0 + meta.segments[0].slot() as usize * MIB + 4096;
    for at in [chunks + 70, chunks + (256 << 10) + 300] {
        let broken = MemDevice::of(device.image(), 1);
        broken.corrupt(at);
        let lab = Lab::open(&[broken], 2).unwrap();
        assert!(!lab.summary.from_checkpoint);
        assert_eq!((lab.rows.len(), lab.check()), (20, 0));
        lab.assert_counts();
    }
}

#[test]
fn without_room_for_a_checkpoint_the_close_is_clean_all_the_same() {
    let device = MemDevice::new(7 * MIB);
    let mut lab = Lab::open(std::slice::from_ref(&device), 1).unwrap();
    for n in 0..4 {
        lab.put(&[(format!("k{n}").as_bytes(), 700_000)]).unwrap();
    }
    lab.env.settle();
    while lab.tier.usage().segments_free > 0 {
        let generation = lab.next_generation();
        let object = lab.object(format!("more {generation:?}").as_bytes(), generation, 700_000);
        let put = lab.tier.put_many(vec![object.clone()], Intent::Reinsert);
        let location = lab.env.run(put).pop().unwrap().unwrap();
        let key = &object.key[..object.key.len().min(16)];
        assert!(key.len() <= 16);
        lab.set_row(&object, location);
    }
    let count = lab.rows.len();
    lab.rows.retain(|key, _| key.len() <= 16);
    lab.env.run(lab.tier.close(Box::new(std::iter::empty()))).unwrap();
    let lab = again(device.durable());
    assert!(!lab.summary.from_checkpoint);
    assert_eq!((lab.summary.segments_walked, lab.rows.len(), lab.check()), (0, count, 0));
}

#[test]
fn only_whole_sets_of_parts_count() {
    let device = MemDevice::new(40 * MIB);
    let mut lab = Lab::open(std::slice::from_ref(&device), 1).unwrap();
    lab.put(&[(b"one", 2 * MIB + 7), (b"two", 3 * MIB)]).unwrap();
    lab.flush().unwrap();
    let whole = again(device.image());
    assert_eq!((names(&whole), whole.check()), (vec!["one".into(), "two".into()], 0));
    whole.assert_counts();
    let broken = MemDevice::of(device.image(), 1);
    broken.corrupt(offset_of(&lab, b"one"));
    // Its first part stands in a segment that is sealed, so it is only seen when it is read.
    let lab = again(broken.image());
    assert_eq!(lab.check(), 1);
    let last = whole.rows[b"two".as_slice()].location.segment.slot() as usize + 3;
    let at = SEGMENT_0 + last * MIB;
    let broken = MemDevice::of(device.image(), 1);
    broken.zero(at..at + 4096);
    let lab = again(broken.image());
    assert_eq!((names(&lab), lab.check()), (vec!["one".into()], 0));
    lab.assert_counts();
}

#[test]
fn parts_are_reclaimed_with_their_value() {
    let device = MemDevice::new(12 * MIB);
    let mut lab = Lab::open(std::slice::from_ref(&device), 1).unwrap();
    for n in 0..60_u32 {
        while lab.tier.wants_reclaim() {
            if lab.reclaim(|key| key == b"large").unwrap().is_none() {
                lab.env.settle();
            }
        }
        match n {
            1 => lab.put(&[(b"large", 2 * MIB)]).unwrap(),
            _ => lab.put(&[(format!("k{n}").as_bytes(), 240_000)]).unwrap(),
        };
        lab.assert_counts();
    }
    assert!(lab.tier.usage().reinserted_value_bytes >= 2 * MIB as u64, "never moved");
    lab.flush().unwrap();
    let lab = again(device.durable());
    assert!(lab.rows.contains_key(b"large".as_slice()));
    assert_eq!(lab.check(), 0);
}

/// The tombstone's segment is reclaimed while the segment with the removed object's bytes still stands.
#[test]
fn a_removal_outlives_its_segment() {
    let device = MemDevice::new(20 * MIB);
    let mut lab = Lab::open(std::slice::from_ref(&device), 1).unwrap();
    let fill = |lab: &mut Lab, name: &str| {
        for n in 0..4 {
            lab.put(&[(format!("{name}{n}").as_bytes(), 240_000)]).unwrap();
        }
    };
    lab.put(&[(b"gone", 1000)]).unwrap();
    fill(&mut lab, "a");
    fill(&mut lab, "b");
    lab.remove(b"gone").unwrap();
    fill(&mut lab, "c");
    fill(&mut lab, "d");
    lab.env.settle();
    let grave = lab.rows[b"c0".as_slice()].location.segment;
    // Make the segment with the tombstone the one to be picked.
    for name in ["a", "b", "d"] {
        for n in 0..4 {
            let row = lab.rows[format!("{name}{n}").as_bytes()];
            (0..9).for_each(|_| lab.tier.wanted(row.location, row.length));
        }
    }
    let mut segments = Vec::new();
    for _ in 0..2 {
        let victims = lab.env.run(lab.tier.reclaim()).unwrap().unwrap();
        for record in &victims.records {
            if let Some(row) =
                lab.rows.get(&*record.key).copied().filter(|row| row.location == record.location)
            {
                lab.rows.remove(&*record.key);
                lab.tier.free(row.location, row.length);
            }
        }
        lab.env.run(lab.tier.release(victims.segment)).unwrap();
        segments.push(victims.segment);
        if victims.segment == grave {
            break;
        }
    }
    assert!(segments.contains(&grave), "{segments:?} without {grave:?}");
    assert!(lab.rows.contains_key(b"a0".as_slice()), "the removed object's bytes still stand");
    lab.flush().unwrap();
    let lab = again(device.durable());
    assert!(!lab.rows.contains_key(b"gone".as_slice()), "came back with the reclaim of its tombstone");
    assert_eq!(lab.check(), 0);
}

/// With two media the segment of a tombstone may be older than that of what it voids: both are open at the same time.
#[test]
fn a_removal_holds_whichever_segment_was_opened_first() {
    let devices = [MemDevice::new(9 * MIB), MemDevice::new(9 * MIB)];
    let mut lab = Lab::open(&devices, 1).unwrap();
    for n in 0..7 {
        lab.put(&[(format!("a{n}").as_bytes(), 250_000)]).unwrap(); // four in one open segment, three in the other
    }
    lab.put(&[(b"gone", 1000)]).unwrap();
    let younger = lab.rows[b"gone".as_slice()].location.segment;
    lab.remove(b"gone").unwrap();
    let older = lab.rows[b"a0".as_slice()].location.segment;
    assert_ne!(older, younger);
    for n in 0..8 {
        lab.put(&[(format!("b{n}").as_bytes(), 250_000)]).unwrap();
    }
    lab.env.settle();
    for (_, row) in lab.rows.clone() {
        if row.location.segment != older {
            lab.tier.wanted(row.location, row.length);
        }
    }
    lab.reclaim(|_| false).unwrap().unwrap();
    assert!(!lab.rows.contains_key(b"a0".as_slice()), "another segment was picked");
    lab.flush().unwrap();
    let images = devices.each_ref().map(|device| MemDevice::of(device.durable(), 3));
    let lab = Lab::open(&images, 2).unwrap();
    assert!(!lab.rows.contains_key(b"gone".as_slice()), "came back");
}

/// Once what it removed is gone, a tombstone goes too, or they would fill the tier.
#[test]
fn tombstones_end() {
    let device = MemDevice::new(9 * MIB);
    let mut lab = Lab::open(std::slice::from_ref(&device), 1).unwrap();
    for n in 0..600_u32 {
        while lab.tier.wants_reclaim() {
            if lab.reclaim(|_| false).unwrap().is_none() {
                lab.env.settle();
            }
        }
        let key = format!("k{n}").into_bytes();
        lab.put(&[(&key, 200_000)]).unwrap();
        if n % 2 == 0 {
            lab.remove(&key).unwrap();
        }
    }
    while lab.rows.pop_first().map(|(_, row)| lab.tier.free(row.location, row.length)).is_some() {}
    lab.env.settle();
    lab.flush().unwrap();
    let mut tombstones = 0;
    let env = lab::env::LabEnv::new(3);
    let media = open_media(&env, &[MemDevice::of(device.image(), 1)]).unwrap();
    let options = ebbtide_tier_log::LogOptions { name: "ssd".into(), env: env.clone(), headers: Vec::new() };
    let tier = ebbtide_tier_log::LogTier::open(media, options).unwrap();
    env.run(tier.recover(&mut |found| {
        tombstones += u32::from(matches!(found, ebbtide_core::Recovered::Tombstone { .. }))
    }))
    .unwrap();
    assert!((1..60).contains(&tombstones), "{tombstones} of 300 removals are still written");
}

#[test]
fn what_a_slot_held_before_is_not_believed() {
    let device = device();
    let mut lab = Lab::open(std::slice::from_ref(&device), 1).unwrap();
    for n in 0..14 {
        lab.put(&[(format!("old{n}").as_bytes(), 240_000)]).unwrap();
    }
    lab.env.settle();
    for _ in 0..2 {
        lab.reclaim(|_| false).unwrap().unwrap();
    }
    let freed = again(device.image());
    assert_eq!(names(&freed).len(), lab.rows.len(), "a free mark was not believed");
    // Write the slots anew, a little: old groups, footer and trailer still stand behind.
    while lab.tier.usage().segments_free > 2 {
        let name = format!("new{}", lab.rows.len());
        lab.put(&[(name.as_bytes(), 240_000)]).unwrap();
    }
    lab.env.settle();
    lab.put(&[(b"last", 1)]).unwrap();
    let found = again(device.image());
    assert_eq!((&found.rows, found.check()), (&lab.rows, 0));
}

#[test]
fn a_segment_that_cannot_be_read_does_not_stop_the_start() {
    let device = device();
    let mut lab = Lab::open(std::slice::from_ref(&device), 1).unwrap();
    for n in 0..12 {
        lab.put(&[(format!("k{n:02}").as_bytes(), 150_000)]).unwrap();
    }
    lab.env.settle();
    let second = MemDevice::of(device.image(), 1);
    let first = lab.rows[b"k00".as_slice()].location.segment.slot() as u64;
    let at = SEGMENT_0 as u64 + first * MIB as u64;
    second.fail_reads(at..at + 1);
    let mut lab = Lab::open(&[second], 2).unwrap();
    assert_eq!((lab.rows.len(), lab.check()), (6, 0));
    assert_eq!(lab.tier.usage().used_bytes, 2 * MIB as u64, "it must not be given out");
    lab.put(&[(b"more", 1000)]).unwrap();
}
