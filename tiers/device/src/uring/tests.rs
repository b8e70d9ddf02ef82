//! What happens when the kernel is slow to answer, which files never are: a pipe stands in for the device. A read of it
//! stays in the kernel until somebody writes to the other end.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::mpsc;

use ebbtide_core::{ErrorKind, block_on};
use ebbtide_mem::BufMut;

use super::*;

const PAGE: usize = 4096;

fn on_pipe(options: &UringOptions) -> (UringDevice, File) {
    let (reader, writer) = std::io::pipe().unwrap();
    let opened = Opened {
        file: File::from(OwnedFd::from(reader)),
        name: "pipe".to_owned(),
        block: false,
        capacity_bytes: 1 << 20,
        align_bytes: PAGE as u32,
        memory_align_bytes: 1,
        degraded: Vec::new(),
    };
    let ring = Arc::new(RingHandle::start(options).unwrap());
    (UringDevice::on_ring(ring, opened).unwrap(), File::from(OwnedFd::from(writer)))
}

fn quick() -> UringOptions {
    UringOptions { io_timeout: Duration::from_millis(40), queue_depth: 2, ..Default::default() }
}

fn read(into: BufMut) -> Op {
    Op::Read { offset: 0, into, check: None }
}

#[test]
fn a_timed_out_read_keeps_its_memory_until_the_kernel_lets_go() {
    let (device, mut writer) = on_pipe(&quick());
    let mut memory = vec![0_u8; PAGE];
    let (told, hears) = mpsc::channel();
    std::thread::scope(|scope| {
        let (device, memory) = (&device, &mut memory);
        scope.spawn(move || {
            ebbtide_mem::lend(memory, |into| {
                let done = block_on(device.submit(vec![read(into)])).pop().unwrap();
                assert_eq!(done.result.unwrap_err().kind(), ErrorKind::Unavailable);
                assert!(done.buf.is_none(), "the kernel still has the buffer");
                told.send("answered").unwrap();
            });
            told.send("let go").unwrap();
        });
        assert_eq!(hears.recv().unwrap(), "answered");
        assert_eq!(device.overdue(), Overdue { timeouts: 1, quarantined: 1 });
        // The loan lasts as long as the read lies in the kernel.
        assert!(hears.recv_timeout(Duration::from_millis(150)).is_err(), "memory was let go of too early");
        writer.write_all(&[7; PAGE]).unwrap();
        assert_eq!(hears.recv().unwrap(), "let go");
    });
    assert!(memory.iter().all(|byte| *byte == 7), "the late read went where it was meant to go");
    assert_eq!(device.overdue(), Overdue { timeouts: 1, quarantined: 0 });
    assert_eq!(device.counters().errors, 1);
}

#[test]
fn what_waits_behind_a_silent_device_is_answered_too() {
    let (device, mut writer) = on_pipe(&quick());
    let batch = device.submit((0..10).map(|_| read(BufMut::heap(PAGE))).collect());
    let done = block_on(batch);
    for (index, done) in done.iter().enumerate() {
        assert_eq!(done.result.as_ref().unwrap_err().kind(), ErrorKind::Unavailable, "{index}");
        // Two lay in the kernel; the others never left us.
        assert_eq!(done.buf.is_some(), index >= 2, "{index}");
    }
    assert_eq!(device.overdue().quarantined, 2);
    // Once the device speaks again, it serves again.
    writer.write_all(&[1; 2 * PAGE]).unwrap();
    while device.overdue().quarantined > 0 {
        std::thread::yield_now();
    }
    let batch = device.submit(vec![read(BufMut::heap(PAGE))]);
    writer.write_all(&[2; PAGE]).unwrap();
    block_on(batch).pop().unwrap().result.unwrap();
}

#[test]
fn short_reads_go_on_and_an_end_inside_is_an_error() {
    let (device, mut writer) = on_pipe(&UringOptions::default());
    let batch = device.submit(vec![read(BufMut::heap(3 * PAGE))]);
    for part in [1000, PAGE, 2 * PAGE - 1000] {
        writer.write_all(&vec![part as u8; part]).unwrap();
        std::thread::park_timeout(Duration::from_millis(5));
    }
    let done = block_on(batch).pop().unwrap();
    done.result.unwrap();
    let buf = done.buf.unwrap().freeze().to_vec();
    assert!(buf[..1000].iter().all(|byte| *byte == 1000_usize as u8));
    assert!(buf[1000..1000 + PAGE].iter().all(|byte| *byte == PAGE as u8));

    let batch = device.submit(vec![read(BufMut::heap(2 * PAGE))]);
    writer.write_all(&[1; PAGE]).unwrap();
    drop(writer);
    let error = block_on(batch).pop().unwrap().result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(error.message(), "read pipe at 4096, 4096 bytes: the device ends before");
}

#[test]
fn dropping_a_device_with_a_stuck_read_ends_and_frees_nothing_early() {
    let (device, writer) = on_pipe(&quick());
    let batch = device.submit(vec![read(BufMut::heap(PAGE))]);
    // The read is cancelled at the end; a device that cannot be cancelled would leak its memory.
    drop(device);
    assert_eq!(block_on(batch).pop().unwrap().result.unwrap_err().kind(), ErrorKind::Unavailable);
    drop(writer);
}

#[test]
fn the_last_owner_may_be_a_check_on_the_ring_thread() {
    let (device, mut writer) = on_pipe(&UringOptions::default());
    let device = Arc::new(device);
    let (owner, (told, hears)) = (Arc::clone(&device), mpsc::channel());
    let check: ebbtide_core::Check = Box::new(move |_| {
        while Arc::strong_count(&owner) > 1 {
            std::thread::yield_now();
        }
        drop(owner);
        told.send(()).unwrap();
        Ok(())
    });
    let batch = device.submit(vec![Op::Read { offset: 0, into: BufMut::heap(PAGE), check: Some(check) }]);
    writer.write_all(&[1; PAGE]).unwrap();
    drop(device);
    hears.recv().unwrap();
    block_on(batch).pop().unwrap().result.unwrap();
}

#[test]
fn a_dead_ring_answers_everything() {
    let (device, _writer) = on_pipe(&UringOptions::default());
    let waiting = device.submit(vec![read(BufMut::heap(PAGE))]);
    device.ring.queue.tell(Command::Panic);
    assert_eq!(block_on(waiting).pop().unwrap().result.unwrap_err().kind(), ErrorKind::Unavailable);
    let later = block_on(device.submit(vec![read(BufMut::heap(PAGE))])).pop().unwrap();
    assert_eq!(later.result.unwrap_err().kind(), ErrorKind::Unavailable);
    assert!(later.buf.is_some());
    assert_eq!(block_on(device.flush()).unwrap_err().kind(), ErrorKind::Unavailable);
    assert_eq!(device.in_flight(), 0);
}

#[test]
fn options_out_of_bounds_are_refused() {
    let path = Path::new("/nowhere");
    for options in [
        UringOptions { queue_depth: 0, ..Default::default() },
        UringOptions { io_bytes_max: 5000, ..Default::default() },
        UringOptions { io_timeout: Duration::ZERO, ..Default::default() },
    ] {
        let error = UringDevice::open(path, &options).unwrap_err();
        assert!(error.message().starts_with("uring options: "), "{error}");
    }
    let error = UringDevice::open(path, &UringOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.message().contains("/nowhere"), "{error}");
}

#[test]
fn a_check_may_submit_to_a_full_queue() {
    let options = UringOptions { queue_depth: 1, queue_ops_max: 1, ..Default::default() };
    let (device, mut writer) = on_pipe(&options);
    let device = Arc::new(device);
    let (inner, (told, hears)) = (Arc::clone(&device), mpsc::channel());
    let check: ebbtide_core::Check = Box::new(move |_| {
        for _ in 0..3 {
            told.send(inner.submit(vec![read(BufMut::heap(PAGE))])).unwrap();
        }
        Ok(())
    });
    let batch = device.submit(vec![Op::Read { offset: 0, into: BufMut::heap(PAGE), check: Some(check) }]);
    writer.write_all(&[1; 4 * PAGE]).unwrap();
    block_on(batch).pop().unwrap().result.unwrap();
    for _ in 0..3 {
        block_on(hears.recv().unwrap()).pop().unwrap().result.unwrap();
    }
}
