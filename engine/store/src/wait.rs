//! Two small ways to wait: a signal that wakes one task, and a bell that wakes all who wait for a condition.

use std::future::poll_fn;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Poll, Waker};

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;

/// Wakes the one task that waits; raised twice before it looks counts once. Says also whether the task is at work.
#[derive(Default)]
pub(crate) struct Signal {
    state: AtomicU8,
    task: AtomicWaker,
}

const RAISED: u8 = 1;
const AT_WORK: u8 = 2;

impl Signal {
    pub(crate) fn raise(&self) {
        if self.state.fetch_or(RAISED, Ordering::AcqRel) & RAISED == 0 {
            self.task.wake();
        }
    }

    /// Waits for the next raise; from then on the task is at work. Cancel-safe.
    pub(crate) async fn raised(&self) {
        let begin = |state| (state & RAISED != 0).then_some(AT_WORK);
        poll_fn(|context| {
            self.task.register(context.waker());
            match self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, begin) {
                Ok(_) => Poll::Ready(()),
                Err(_) => Poll::Pending,
            }
        })
        .await;
    }

    /// Says that the task has done its work.
    pub(crate) fn rest(&self) {
        self.state.fetch_and(!AT_WORK, Ordering::AcqRel);
    }

    /// Neither raised nor at work.
    pub(crate) fn is_idle(&self) -> bool {
        self.state.load(Ordering::Acquire) == 0
    }
}

/// Wakes all who wait, to look at their condition again.
#[derive(Default)]
pub(crate) struct Bell(Mutex<Vec<Waker>>);

impl Bell {
    pub(crate) fn ring(&self) {
        let waiting = std::mem::take(&mut *self.0.lock());
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Waits until `ready` says so; it is asked at once and after each ring. Cancel-safe.
    pub(crate) async fn until(&self, mut ready: impl FnMut() -> bool) {
        poll_fn(|context| {
            if ready() {
                return Poll::Ready(());
            }
            self.0.lock().push(context.waker().clone());
            // The ring may have come between the look and the place in the queue.
            if ready() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}
