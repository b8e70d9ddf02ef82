//! Who waits for room in the log, first come first served.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_channel::oneshot;

use crate::log::Log;

/// Why a group is written: which segments it may use, and with whom it waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Objects from above: leaves the segments in reserve alone.
    Demote,
    /// Objects and tombstones of a segment under reclaim: may use the reserve, and fails rather than waits when there is
    /// nothing left, since only reclaim itself makes room.
    Reinsert,
    /// Tombstones: may use the reserve.
    Bury,
}

/// One line of waiting writers. Only the first of them tries.
#[derive(Default)]
pub(crate) struct Queue {
    next: u64,
    waiting: BTreeMap<u64, Option<oneshot::Sender<()>>>,
}

impl Queue {
    /// True when the holder of `ticket` need not wait for others.
    pub(crate) fn may_try(&self, ticket: Option<u64>) -> bool {
        match self.waiting.first_key_value() {
            Some((first, _)) => ticket == Some(*first),
            None => true,
        }
    }

    /// Lines up, or stays where it stood; the receiver ends when it is worth trying again.
    pub(crate) fn wait(&mut self, ticket: &mut Option<u64>) -> oneshot::Receiver<()> {
        let number = *ticket.get_or_insert_with(|| {
            self.next += 1;
            self.next
        });
        let (sender, receiver) = oneshot::channel();
        self.waiting.insert(number, Some(sender));
        receiver
    }

    /// Lets the first one try.
    pub(crate) fn wake_first(&mut self) {
        if let Some(mut first) = self.waiting.first_entry()
            && let Some(sender) = first.get_mut().take()
        {
            let _ = sender.send(()); // who is gone has left the line or is about to
        }
    }

    /// Lets all try: the tier closes.
    pub(crate) fn wake_all(&mut self) {
        wake(&mut self.waiting.values_mut().filter_map(Option::take).collect());
    }

    fn leave(&mut self, number: u64) {
        self.waiting.remove(&number);
        self.wake_first();
    }
}

/// Wakes all of `waiters`. Who does not listen any more needs no word.
pub(crate) fn wake(waiters: &mut Vec<oneshot::Sender<()>>) {
    for waiter in waiters.drain(..) {
        let _ = waiter.send(());
    }
}

/// A place in a line; dropping it lets the next one try.
pub(crate) struct Ticket {
    log: Arc<Log>,
    purpose: Purpose,
    pub(crate) number: Option<u64>,
}

impl Ticket {
    pub(crate) fn new(log: Arc<Log>, purpose: Purpose) -> Self {
        Ticket { log, purpose, number: None }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            self.log.state.lock().queue(self.purpose).leave(number);
        }
    }
}
