//! One thread, no clock, dice from a seed.

use std::future::Future;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use ebbtide_core::{BoxFuture, Env, Monotonic};
use parking_lot::Mutex;

use super::device::Dice;

pub struct LabEnv {
    tasks: Mutex<Vec<BoxFuture<'static, ()>>>,
    dice: Mutex<Dice>,
}

impl LabEnv {
    pub fn new(seed: u64) -> Arc<LabEnv> {
        Arc::new(LabEnv { tasks: Mutex::default(), dice: Mutex::new(Dice(seed)) })
    }

    /// Runs `future` and what was spawned meanwhile, in turn; panics when nothing moves.
    pub fn run<F: Future>(&self, future: F) -> F::Output {
        let mut future = std::pin::pin!(future);
        for _ in 0..1_000_000 {
            let mut context = Context::from_waker(Waker::noop());
            if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                return output;
            }
            self.turn();
        }
        panic!("stuck");
    }

    /// Polls `future` once.
    pub fn poll<F: Future + Unpin>(&self, future: &mut F) -> Poll<F::Output> {
        std::pin::Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
    }

    /// Polls each task once.
    pub fn turn(&self) {
        let mut context = Context::from_waker(Waker::noop());
        let mut tasks = std::mem::take(&mut *self.tasks.lock());
        tasks.retain_mut(|task| task.as_mut().poll(&mut context).is_pending());
        self.tasks.lock().append(&mut tasks);
    }

    pub fn settle(&self) {
        while !self.tasks.lock().is_empty() {
            self.turn();
        }
    }
}

impl Env for LabEnv {
    fn now(&self) -> Monotonic {
        Monotonic(0)
    }

    fn wall_ms(&self) -> u64 {
        1_700_000_000_000
    }

    fn sleep(&self, _time: Duration) -> BoxFuture<'static, ()> {
        Box::pin(std::future::ready(()))
    }

    fn random(&self) -> u64 {
        self.dice.lock().next()
    }

    fn spawn(&self, _name: &'static str, task: BoxFuture<'static, ()>) {
        self.tasks.lock().push(task);
    }
}
