//! Buffers of one and of many spans, what lies behind their end, and memory lent for the length of a call.

use super::*;
use crate::Arena;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// A full arena of one chunk in which every second page is free again, and the buffers that hold the rest.
fn crumbs() -> (Arena, Vec<BufMut>) {
    let arena = Arena::heap(2 << 20);
    let pages: Vec<_> = (0..512).map(|_| arena.alloc(4096).unwrap()).collect();
    let held =
        pages.into_iter().enumerate().filter_map(|(index, page)| (index % 2 == 1).then_some(page)).collect();
    (arena, held)
}

fn body(len: usize) -> Vec<u8> {
    (0..len).map(|index| (index * 31 + index / 251) as u8).collect()
}

#[test]
fn a_buffer_of_many_spans_reads_as_it_was_written() {
    let (arena, _held) = crumbs();
    let source = body(5 * 4096 + 77);
    let mut buf = arena.alloc(source.len()).unwrap();
    assert_eq!(buf.raw_spans().len(), 6);
    buf.write_at(0, &source);
    buf.write_at(4000, &source[4000..9000]);
    for (at, len) in
        [(0, 1), (4095, 2), (4096, 4096), (100, 20_000), (source.len() - 1, 1), (source.len(), 0)]
    {
        let mut target = vec![0; len];
        buf.read_at(at, &mut target);
        assert_eq!(target, source[at..at + len], "{len} bytes at {at}");
        assert_eq!(buf.sum_range(at, len), sum::sum(&source[at..at + len]));
    }
    let buf = buf.freeze();
    assert_eq!(buf.to_vec(), source);
    assert_eq!(buf.sum_range(3000, 9000), sum::sum(&source[3000..12_000]));
    assert_eq!(buf.spans().map(<[u8]>::len).collect::<Vec<_>>(), [4096, 4096, 4096, 4096, 4096, 77]);
    assert_eq!(buf.padded_spans().map(<[u8]>::len).sum::<usize>(), 6 * 4096);
}

#[test]
fn sums_do_not_depend_on_where_the_spans_end() {
    let source = body(3 * 4096 + 500);
    let (arena, _held) = crumbs();
    let mut sums = Vec::new();
    for mut buf in [arena.alloc(source.len()).unwrap(), BufMut::heap(source.len())] {
        let mut blocks = Vec::new();
        buf.fill_and_sum(&source, 5000, |index, sum| blocks.push((index, sum)));
        assert_eq!(buf.freeze().to_vec(), source);
        sums.push(blocks);
    }
    assert_eq!(sums[0], sums[1]);
    let expected: Vec<_> = source.chunks(5000).map(sum::sum).enumerate().collect();
    assert_eq!(sums[0], expected);
}

#[test]
fn padding_carries_nothing_of_who_was_there_before() {
    let arena = Arena::heap(2 << 20);
    let mut secret = arena.alloc(3 * 4096).unwrap();
    secret.padded_spans_mut().for_each(|span| span.fill(0xff));
    let place = secret.raw_spans()[0].address;
    drop(secret);
    let mut buf = arena.alloc(2 * 4096 + 10).unwrap();
    assert_eq!(buf.raw_spans()[0].address, place, "the same memory again");
    buf.fill_and_sum(&body(2 * 4096 + 10), 4096, |_, _| ());
    let buf = buf.freeze();
    let all: Vec<u8> = buf.padded_spans().flatten().copied().collect();
    assert_eq!(all.len(), 3 * 4096);
    assert_eq!(all[..2 * 4096 + 10], body(2 * 4096 + 10));
    assert!(
        all[2 * 4096 + 10..].iter().all(|byte| *byte == 0),
        "the padding still holds another object's bytes"
    );
}

#[test]
fn padding_is_cleared_across_spans() {
    let (arena, _held) = crumbs();
    let mut buf = arena.alloc(3 * 4096).unwrap();
    buf.padded_spans_mut().for_each(|span| span.fill(0xff));
    buf.set_len(4096 + 1);
    buf.zero_padding();
    let buf = buf.freeze();
    let all: Vec<u8> = buf.padded_spans().flatten().copied().collect();
    assert!(all[..4097].iter().all(|byte| *byte == 0xff));
    assert!(all[4097..].iter().all(|byte| *byte == 0));
}

#[test]
fn a_buffer_can_be_shortened_and_grow_into_its_padding() {
    let mut buf = BufMut::heap(5000);
    buf.set_len(1);
    assert_eq!((buf.len(), buf.spans().count()), (1, 1));
    buf.set_len(8192);
    assert!(catch_unwind(AssertUnwindSafe(|| buf.set_len(8193))).is_err());
    assert!(catch_unwind(AssertUnwindSafe(|| buf.set_len(0))).is_err());
}

#[test]
fn what_does_not_fit_panics() {
    let mut buf = BufMut::heap(10);
    for (at, len) in [(0, 11), (10, 1), (usize::MAX, 1), (usize::MAX - 1, 2)] {
        let mut bytes = vec![0; len];
        assert!(catch_unwind(AssertUnwindSafe(|| buf.write_at(at, &bytes))).is_err(), "write {len} at {at}");
        assert!(
            catch_unwind(AssertUnwindSafe(|| buf.read_at(at, &mut bytes))).is_err(),
            "read {len} at {at}"
        );
        assert!(catch_unwind(AssertUnwindSafe(|| buf.sum_range(at, len))).is_err(), "sum {len} at {at}");
    }
}

#[test]
fn readers_share_a_frozen_buffer() {
    let arena = Arena::heap(2 << 20);
    let mut buf = arena.alloc(9000).unwrap();
    buf.write_at(0, &body(9000));
    let buf = buf.freeze();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            let buf = buf.clone();
            scope.spawn(move || assert_eq!(buf.to_vec(), body(9000)));
        }
    });
    assert_eq!(buf.owners(), 1);
}

#[test]
fn lent_memory_is_written_in_place() {
    let mut target = vec![0; 5000];
    let answer = lend(&mut target[7..4000], |mut buf| {
        assert_eq!((buf.len(), buf.raw_spans()[0].bytes, buf.raw_spans()[0].region), (3993, 3993, None));
        buf.write_at(0, &body(3993));
        "answer"
    });
    assert_eq!(answer, "answer");
    assert_eq!(target[7..4000], body(3993));
    assert!(target[..7].iter().chain(&target[4000..]).all(|byte| *byte == 0));
}

#[test]
fn lend_waits_for_a_device_that_is_late() {
    let mut target = vec![0u8; 100];
    std::thread::scope(|scope| {
        lend(&mut target, |mut buf| {
            scope.spawn(move || {
                pause();
                buf.write_at(0, &[7; 100]);
                let shared = buf.freeze();
                let last = shared.clone();
                drop(shared);
                pause();
                assert_eq!(last.to_vec(), [7; 100]);
            });
        });
        assert_eq!(target, [7; 100], "lend returned while the memory was still written");
        target.fill(1);
    });
    assert_eq!(target, [1; 100]);
}

#[test]
fn lend_waits_even_when_the_work_panics() {
    let mut target = vec![0u8; 100];
    std::thread::scope(|scope| {
        let work = |mut buf: BufMut| {
            scope.spawn(move || {
                pause();
                buf.write_at(0, &[7; 100]);
            });
            panic!("the caller gave up");
        };
        let outcome = catch_unwind(AssertUnwindSafe(|| lend(&mut target, work)));
        assert!(outcome.is_err());
        assert_eq!(target, [7; 100]);
    });
}

#[test]
fn lend_of_nothing_panics() {
    assert!(catch_unwind(|| lend(&mut [], drop)).is_err());
}

/// Gives the other thread a chance to do the wrong thing; the test is right without it.
#[expect(clippy::disallowed_methods, reason = "a test of real threads, which no simulator runs")]
fn pause() {
    std::thread::sleep(Duration::from_millis(if cfg!(miri) { 1 } else { 20 }));
}

#[test]
fn parts_are_written_apart_and_become_whole_again() {
    let (arena, _held) = crumbs();
    let source = body(7 * 4096 + 100);
    for mut buf in [arena.alloc(source.len()).unwrap(), BufMut::heap(source.len())] {
        buf.spans_mut().for_each(|span| span.fill(0));
        let addresses: Vec<_> = buf.raw_spans().to_vec();
        let (mut parts, whole) = buf.split(2 * 4096);
        assert_eq!(parts.iter().map(BufMut::len).collect::<Vec<_>>(), [8192, 8192, 8192, 4196]);
        for (part, source) in parts.iter_mut().zip(source.chunks(8192)) {
            part.write_at(0, source);
            part.zero_padding();
        }
        let buf = whole.join(parts).unwrap();
        assert_eq!(buf.raw_spans(), addresses);
        assert_eq!(buf.freeze().to_vec(), source);
    }
    assert_eq!(arena.used_bytes(), 256 * 4096, "the memory of the parts did not come back once");
}

#[test]
fn a_part_that_is_still_away_keeps_the_memory() {
    let (arena, held) = crumbs();
    drop(held);
    let before = arena.used_bytes();
    let (mut parts, whole) = arena.alloc(3 * 4096).unwrap().split(4096);
    let away = parts.pop();
    assert!(whole.join(parts).is_none());
    assert_eq!(arena.used_bytes(), before + 3 * 4096, "a device may still write to it");
    drop(away);
    assert_eq!(arena.used_bytes(), before);
}

#[test]
fn a_slice_shares_memory_and_nothing_thaws_while_it_is_out() {
    let (arena, _held) = crumbs();
    let source = body(3 * 4096 + 9);
    let mut buf = arena.alloc(source.len()).unwrap();
    buf.write_at(0, &source);
    buf.zero_padding();
    let buf = buf.freeze();
    let slice = buf.slice(4096, 4096 + 10);
    assert_eq!(slice.to_vec(), source[4096..8202]);
    assert_eq!(slice.raw_spans().iter().map(|span| span.bytes).sum::<u32>(), 8192);
    assert_eq!(slice.raw_spans()[0], buf.raw_spans()[1]);
    let buf = buf.thaw().unwrap_err();
    let slice = slice.thaw().unwrap_err();
    drop(buf);
    assert_eq!(slice.to_vec(), source[4096..8202], "freed under its slice");
    let whole = arena.alloc(4096).unwrap().freeze();
    let copy = whole.clone();
    let whole = whole.thaw().unwrap_err();
    drop(copy);
    assert!(whole.thaw().is_ok());
    for (at, len) in [(1, 10), (0, 0), (4096, 10_000)] {
        assert!(catch_unwind(AssertUnwindSafe(|| slice.slice(at, len))).is_err(), "{at} {len}");
    }
}
