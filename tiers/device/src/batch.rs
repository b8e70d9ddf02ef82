//! The two ends of a batch: the future that the caller holds, and one [`Ticket`] for each of its operations.
//!
//! A ticket answers exactly once. One that is dropped unanswered (its ring died) answers Unavailable, so no batch waits
//! for ever. The last answer wakes the caller, once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ebbtide_core::{Batch, BoxFuture, DeviceCounters, Done, Error, Result};
use futures_channel::oneshot;
use parking_lot::{Condvar, Mutex};

use crate::direct::Overdue;

/// What an operation counts as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sort {
    Read,
    Write,
    Flush,
    Discard,
}

/// What a device has done, counted by its tickets.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
    reads: AtomicU64,
    writes: AtomicU64,
    flushes: AtomicU64,
    errors: AtomicU64,
    in_flight: AtomicU64,
    idle: (Mutex<()>, Condvar),
    /// Operations that were answered because the device did not.
    pub(crate) timeouts: AtomicU64,
    /// Operations answered by timeout whose memory the kernel may still use.
    pub(crate) quarantined: AtomicU64,
}

impl Tally {
    pub(crate) fn counters(&self) -> DeviceCounters {
        DeviceCounters {
            read_bytes: self.read_bytes.load(Relaxed),
            written_bytes: self.written_bytes.load(Relaxed),
            reads: self.reads.load(Relaxed),
            writes: self.writes.load(Relaxed),
            flushes: self.flushes.load(Relaxed),
            errors: self.errors.load(Relaxed),
        }
    }

    pub(crate) fn in_flight(&self) -> u64 {
        self.in_flight.load(Relaxed)
    }

    pub(crate) fn overdue(&self) -> Overdue {
        Overdue { timeouts: self.timeouts.load(Relaxed), quarantined: self.quarantined.load(Relaxed) }
    }

    /// Waits until every operation was answered.
    pub(crate) fn wait_idle(&self) {
        let (lock, changed) = &self.idle;
        let mut guard = lock.lock();
        while self.in_flight() > 0 {
            changed.wait(&mut guard);
        }
    }

    /// An operation was answered.
    fn leave(&self) {
        if self.in_flight.fetch_sub(1, Relaxed) == 1 {
            // Taken so that a waiter is either before its look at the count or already waiting.
            drop(self.idle.0.lock());
            self.idle.1.notify_all();
        }
    }

    fn count(&self, sort: Sort, bytes: u64, done: &Done) {
        self.leave();
        if done.result.is_err() {
            self.errors.fetch_add(1, Relaxed);
            return;
        }
        let (operations, moved) = match sort {
            Sort::Read => (&self.reads, Some(&self.read_bytes)),
            Sort::Write => (&self.writes, Some(&self.written_bytes)),
            Sort::Flush => (&self.flushes, None),
            Sort::Discard => return,
        };
        operations.fetch_add(1, Relaxed);
        if let Some(moved) = moved {
            moved.fetch_add(bytes, Relaxed);
        }
    }
}

struct Cell {
    tally: Arc<Tally>,
    state: Mutex<State>,
}

struct State {
    done: Vec<Option<Done>>,
    left: usize,
    answer: Option<oneshot::Sender<Vec<Done>>>,
}

/// The duty to answer one operation of a batch.
pub(crate) struct Ticket {
    cell: Arc<Cell>,
    index: usize,
    sort: Sort,
    bytes: u64,
    answered: bool,
}

/// Opens a batch of `count` operations, at least one. The tickets are drawn with [`Tickets::draw`].
pub(crate) fn open(count: usize, tally: &Arc<Tally>) -> (Tickets, Batch) {
    let (answer, answered) = oneshot::channel();
    let done = std::iter::repeat_with(|| None).take(count).collect();
    let state = Mutex::new(State { done, left: count, answer: Some(answer) });
    tally.in_flight.fetch_add(count as u64, Relaxed);
    let tickets = Tickets { cell: Arc::new(Cell { tally: Arc::clone(tally), state }), next: 0, count };
    let batch = Box::pin(async move {
        // A ticket answers even when it is dropped, so the channel cannot close without an answer.
        let lost = || Done { result: Err(Error::internal("a batch was lost")), buf: None };
        answered.await.unwrap_or_else(|_| std::iter::repeat_with(lost).take(count).collect())
    });
    (tickets, batch)
}

/// Opens a batch of one operation that has no buffer: a flush or a discard.
pub(crate) fn open_one(sort: Sort, tally: &Arc<Tally>) -> (Ticket, BoxFuture<'static, Result<()>>) {
    let (mut tickets, batch) = open(1, tally);
    let ticket = tickets.draw(sort, 0);
    let answer = Box::pin(async move { batch.await.pop().map_or(Ok(()), |done| done.result) });
    (ticket, answer)
}

/// An answer that is known at once.
pub(crate) fn ready(result: Result<()>) -> BoxFuture<'static, Result<()>> {
    Box::pin(std::future::ready(result))
}

/// Hands out the tickets of one batch, in the order of its operations.
pub(crate) struct Tickets {
    cell: Arc<Cell>,
    next: usize,
    count: usize,
}

impl Tickets {
    /// The ticket of the next operation, which moves `bytes`.
    pub(crate) fn draw(&mut self, sort: Sort, bytes: u64) -> Ticket {
        assert!(self.next < self.count, "a batch has one ticket for each operation");
        let index = self.next;
        self.next += 1;
        Ticket { cell: Arc::clone(&self.cell), index, sort, bytes, answered: false }
    }
}

impl Ticket {
    /// Answers the operation.
    pub(crate) fn answer(mut self, done: Done) {
        self.settle(done);
    }

    /// Answers an operation without a buffer to give back.
    pub(crate) fn fail(self, error: Error) {
        self.answer(Done { result: Err(error), buf: None });
    }

    fn settle(&mut self, done: Done) {
        self.answered = true;
        self.cell.tally.count(self.sort, self.bytes, &done);
        let mut state = self.cell.state.lock();
        state.done[self.index] = Some(done);
        state.left -= 1;
        if state.left > 0 {
            return;
        }
        let done: Vec<Done> = std::mem::take(&mut state.done).into_iter().flatten().collect();
        let answer = state.answer.take();
        drop(state);
        if let Some(answer) = answer {
            // Nobody waits any more: the buffers are freed here.
            drop(answer.send(done));
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.answered {
            self.settle(Done { result: Err(Error::unavailable("the device is gone")), buf: None });
        }
    }
}

#[cfg(test)]
mod tests {
    use ebbtide_core::{ErrorKind, block_on};

    use super::*;

    #[test]
    fn answers_come_in_the_order_of_the_operations() {
        let tally = Arc::new(Tally::default());
        let (mut tickets, batch) = open(2, &tally);
        let (first, second) = (tickets.draw(Sort::Read, 10), tickets.draw(Sort::Write, 20));
        second.answer(Done { result: Ok(()), buf: None });
        assert_eq!(tally.in_flight(), 1);
        first.fail(Error::invalid("first"));
        let done = block_on(batch);
        assert_eq!(done[0].result.as_ref().unwrap_err().message(), "first");
        assert!(done[1].result.is_ok());
        let counters = tally.counters();
        assert_eq!((counters.errors, counters.writes, counters.written_bytes, counters.reads), (1, 1, 20, 0));
    }

    #[test]
    fn a_dropped_ticket_answers() {
        let tally = Arc::new(Tally::default());
        let (ticket, answer) = open_one(Sort::Flush, &tally);
        drop(ticket);
        assert_eq!(block_on(answer).unwrap_err().kind(), ErrorKind::Unavailable);
        assert_eq!(tally.in_flight(), 0);
    }
}
