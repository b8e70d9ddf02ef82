//! The simulated disk under a minimal simulator: one thread, virtual time, dice from a seed.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Weak;
use std::task::{Context, Poll, Wake, Waker};

use ebbtide_core::ErrorKind;

use super::*;
use crate::conformance::{self, Subject};

const PAGE: usize = 4096;

/// Tasks, timers and dice of one simulation.
struct TestEnv(Mutex<Inner>, Weak<TestEnv>);

struct Inner {
    now: u64,
    dice: u64,
    next: u64,
    tasks: BTreeMap<u64, BoxFuture<'static, ()>>,
    ready: VecDeque<u64>,
    timers: BTreeMap<(u64, u64), Waker>,
}

struct Ready(Weak<TestEnv>, u64);

impl Wake for Ready {
    fn wake(self: Arc<Self>) {
        if let Some(env) = self.0.upgrade() {
            env.0.lock().ready.push_back(self.1);
        }
    }
}

impl TestEnv {
    fn new(seed: u64) -> Arc<TestEnv> {
        Arc::new_cyclic(|this| {
            let (tasks, ready, timers) = (BTreeMap::new(), VecDeque::new(), BTreeMap::new());
            TestEnv(Mutex::new(Inner { now: 0, dice: seed, next: 1, tasks, ready, timers }), this.clone())
        })
    }

    /// Runs `main` to its end, or panics when nothing can ever happen again.
    fn run<T>(&self, main: impl Future<Output = T>) -> T {
        let waker = |task| Waker::from(Arc::new(Ready(self.1.clone(), task)));
        let mut main = std::pin::pin!(main);
        self.0.lock().ready.push_back(0);
        loop {
            let next = self.0.lock().ready.pop_front();
            match next {
                Some(0) => {
                    if let Poll::Ready(output) = main.as_mut().poll(&mut Context::from_waker(&waker(0))) {
                        return output;
                    }
                }
                Some(task) => {
                    let Some(mut future) = self.0.lock().tasks.remove(&task) else { continue };
                    if future.as_mut().poll(&mut Context::from_waker(&waker(task))).is_pending() {
                        self.0.lock().tasks.insert(task, future);
                    }
                }
                None => {
                    let ((at, _), timer) = self.0.lock().timers.pop_first().expect("the simulation hangs");
                    self.0.lock().now = at;
                    timer.wake();
                }
            }
        }
    }
}

impl Env for TestEnv {
    fn now(&self) -> Monotonic {
        Monotonic(self.0.lock().now)
    }
    fn wall_ms(&self) -> u64 {
        self.0.lock().now / 1_000_000
    }
    fn sleep(&self, time: Duration) -> BoxFuture<'static, ()> {
        let env = self.1.upgrade().expect("the environment lives");
        let end = env.now().plus(time).0;
        Box::pin(std::future::poll_fn(move |context| {
            let mut inner = env.0.lock();
            if inner.now >= end {
                return Poll::Ready(());
            }
            inner.next += 1;
            let key = (end, inner.next);
            inner.timers.insert(key, context.waker().clone());
            Poll::Pending
        }))
    }
    fn random(&self) -> u64 {
        let mut inner = self.0.lock();
        inner.dice = inner.dice.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (inner.dice ^ (inner.dice >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }
    fn spawn(&self, _name: &'static str, task: BoxFuture<'static, ()>) {
        let mut inner = self.0.lock();
        inner.next += 1;
        let number = inner.next;
        inner.tasks.insert(number, task);
        inner.ready.push_back(number);
    }
}

fn simulation(seed: u64) -> (Arc<TestEnv>, Arc<dyn Env>, SimDisk) {
    let env = TestEnv::new(seed);
    let disk = SimDisk::new(SimOptions { capacity_bytes: 64 << 20, ..Default::default() });
    (env.clone(), env, disk)
}

fn write(offset: u64, byte: u8, bytes: usize) -> Op {
    let mut buf = BufMut::heap(bytes);
    buf.spans_mut().for_each(|span| span.fill(byte));
    Op::Write { offset, from: vec![buf.freeze()] }
}

fn ok(done: Vec<Done>) {
    done.into_iter().for_each(|done| done.result.unwrap());
}

#[test]
fn conforms() {
    let (test, env, disk) = simulation(1);
    let device: Arc<dyn BlockDevice> = Arc::new(disk.open(&env));
    let block_on = |future: BoxFuture<'static, ()>| test.run(future);
    conformance::all(Subject { device: &device, make: &BufMut::heap, block_on: &block_on, threads: false });
}

#[test]
fn a_crash_keeps_what_was_flushed_and_tears_the_rest_at_sectors() {
    let (mut kept, mut lost) = (0, 0);
    for seed in 0..20 {
        let (test, env, disk) = simulation(seed);
        let device = disk.open(&env);
        test.run(async {
            ok(device.submit(vec![write(0, 1, 16 << 10), write(1 << 20, 1, 16 << 10)]).await);
            device.flush().await.unwrap();
            // Overwritten after the flush: the flushed bytes or these, sector by sector.
            ok(device.submit(vec![write(0, 2, 16 << 10)]).await);
        });
        disk.crash(&*env);
        let mut bytes = vec![0; 16 << 10];
        disk.peek(1 << 20, &mut bytes);
        assert!(bytes.iter().all(|byte| *byte == 1), "a crash lost flushed bytes");
        disk.peek(0, &mut bytes);
        for sector in bytes.chunks(512) {
            assert!(sector.iter().all(|byte| *byte == sector[0]), "a sector is torn");
            match sector[0] {
                1 => lost += 1,
                2 => kept += 1,
                other => panic!("a sector of {other}"),
            }
        }
    }
    assert!(kept > 200 && lost > 200, "kept {kept}, lost {lost}");
}

#[test]
fn a_flush_covers_what_was_done_before_its_call_and_no_more() {
    let (mut overtaken, mut lost) = (0, 0);
    for seed in 0..50 {
        let (test, env, disk) = simulation(seed);
        let device = disk.open(&env);
        let write_ended_first = test.run(async {
            let slow = device.submit(vec![write(0, 3, 64 << 10)]);
            let flush = device.flush();
            ok(slow.await);
            let first = device.counters().flushes == 0;
            flush.await.unwrap();
            first
        });
        disk.crash(&*env);
        if write_ended_first {
            let mut bytes = vec![0; 64 << 10];
            disk.peek(0, &mut bytes);
            overtaken += 1;
            lost += usize::from(bytes.contains(&0));
        }
    }
    assert!(
        overtaken > 5 && lost == overtaken,
        "of {overtaken} writes in flight at a flush, {lost} were torn"
    );
}

#[test]
fn a_crash_ends_old_devices_and_what_they_had_in_flight() {
    for kill in [false, true] {
        let mut partly = 0;
        for seed in 0..20 {
            let (test, env, disk) = simulation(seed);
            let old = disk.open(&env);
            let running = old.submit(vec![write(0, 5, 16 << 10)]);
            if kill {
                disk.kill(&*env)
            } else {
                disk.crash(&*env)
            }
            let mut before = vec![0; 16 << 10];
            disk.peek(0, &mut before);
            let sectors = before.chunks(512).filter(|sector| sector[0] == 5).count();
            partly += usize::from((1..32).contains(&sectors));
            let done = test.run(running);
            assert_eq!(done[0].result.as_ref().unwrap_err().kind(), ErrorKind::Unavailable);
            let refused = test.run(old.submit(vec![write(0, 6, PAGE)]));
            assert_eq!(refused[0].result.as_ref().unwrap_err().kind(), ErrorKind::Unavailable);
            assert_eq!(test.run(old.flush()).unwrap_err().kind(), ErrorKind::Unavailable);
            let mut after = vec![0; 16 << 10];
            disk.peek(0, &mut after);
            assert!(before == after, "a dead device wrote");
            let new = disk.open(&env);
            test.run(async { ok(new.submit(vec![write(0, 7, PAGE)]).await) });
        }
        assert!(partly > 10, "writes in flight are torn: {partly}");
    }
}

#[test]
fn a_kill_keeps_what_was_done() {
    let (test, env, disk) = simulation(3);
    let device = disk.open(&env);
    test.run(async { ok(device.submit(vec![write(0, 9, 64 << 10)]).await) });
    disk.kill(&*env);
    let mut bytes = vec![0; 64 << 10];
    disk.peek(0, &mut bytes);
    assert!(bytes.iter().all(|byte| *byte == 9));
}

#[test]
fn faults_strike_and_are_counted() {
    let (test, env, disk) = simulation(4);
    let device = disk.open(&env);
    test.run(async { ok(device.submit(vec![write(0, 1, PAGE)]).await) });
    disk.set_faults(Faults {
        read_error: 0.2,
        write_error: 0.2,
        torn_write: 0.2,
        flush_error: 0.2,
        bit_flip: 0.2,
        spikes: 0.2,
        spike: Duration::from_millis(50),
        stopped: false,
    });
    let (mut errors, mut flips) = (0, 0);
    for _ in 0..200 {
        let read = Op::Read { offset: 0, into: BufMut::heap(PAGE), check: None };
        let done = test.run(device.submit(vec![read, write(1 << 20, 2, PAGE)]));
        errors += done.iter().filter(|done| done.result.is_err()).count() as u64;
        if done[0].result.is_ok() {
            let bytes = done.into_iter().next().unwrap().buf.unwrap().freeze().to_vec();
            let wrong: u32 = bytes.iter().map(|byte| (byte ^ 1).count_ones()).sum();
            assert!(wrong <= 1);
            flips += u64::from(wrong);
        }
        errors += u64::from(test.run(device.flush()).is_err());
    }
    let counts = disk.fault_counts();
    assert_eq!(counts.read_errors + counts.write_errors + counts.flush_errors, errors);
    assert_eq!(counts.bit_flips, flips);
    for count in
        [counts.read_errors, counts.write_errors, counts.torn_writes, counts.bit_flips, counts.spikes]
    {
        assert!((15..200).contains(&count), "{counts:?}");
    }
    assert_eq!(device.counters().errors, errors);
}

#[test]
fn a_stopped_disk_times_out_and_does_the_write_later() {
    let (test, env, disk) = simulation(5);
    let device = disk.open(&env);
    disk.set_faults(Faults { stopped: true, ..Default::default() });
    let read = Op::Read { offset: 0, into: BufMut::heap(PAGE), check: None };
    let done = test.run(device.submit(vec![write(0, 8, PAGE), read]));
    for done in done {
        assert_eq!(done.result.unwrap_err().kind(), ErrorKind::Unavailable);
        assert!(done.buf.is_none());
    }
    assert_eq!(device.overdue(), Overdue { timeouts: 2, quarantined: 2 });
    disk.set_faults(Faults::default());
    test.run(env.sleep(Duration::from_secs(1)));
    assert_eq!(device.overdue(), Overdue { timeouts: 2, quarantined: 0 });
    let mut bytes = [0; PAGE];
    disk.peek(0, &mut bytes);
    assert_eq!(bytes, [8; PAGE], "a write that timed out may still land");
}

#[test]
fn same_seed_same_run() {
    let run = |seed| {
        let (test, env, disk) = simulation(seed);
        let device = disk.open(&env);
        disk.set_faults(Faults { torn_write: 0.3, read_error: 0.3, ..Default::default() });
        let ops = (0..100_u64).map(|index| write(index % 7 * PAGE as u64, index as u8, PAGE)).collect();
        let order = test.run(device.submit(ops)).iter().map(|done| done.result.is_ok()).collect::<Vec<_>>();
        disk.crash(&*env);
        let mut bytes = vec![0; 7 * PAGE];
        disk.peek(0, &mut bytes);
        (order, bytes, env.now(), disk.fault_counts())
    };
    assert!(run(1) == run(1));
    assert!(run(1) != run(2));
}

#[test]
fn bodies_can_be_left_out() {
    let env = TestEnv::new(6);
    let disk = SimDisk::new(SimOptions { keep_bytes_max: PAGE as u64, ..Default::default() });
    let device = disk.open(&(env.clone() as Arc<dyn Env>));
    let writes = (0..50_u64).map(|index| write(index << 20, 1, 1 << 20)).collect();
    env.run(async { ok(device.submit(writes).await) });
    assert_eq!(disk.memory_bytes(), 50 * PAGE as u64);
    let mut bytes = [0; 2 * PAGE];
    disk.peek(3 << 20, &mut bytes);
    assert!(bytes[..PAGE].iter().all(|byte| *byte == 1) && bytes[PAGE..].iter().all(|byte| *byte == 0));
}
