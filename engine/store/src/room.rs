//! Puts that wait for room: first come, first served, bounded, each with the memory handed to it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ebbtide_core::{Charge, HotTier};
use ebbtide_mem::BufMut;
use futures_channel::oneshot;
use parking_lot::Mutex;

/// Memory for one object.
pub(crate) type Grant = (BufMut, Charge);

/// The kinds of memory that callers queue for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum For {
    /// A resident object.
    Object,
    /// Bytes on their way.
    Staging,
}

/// A queue for memory of one kind.
pub(crate) struct Room {
    kind: For,
    hot: Arc<dyn HotTier>,
    waiting: AtomicUsize,
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    tickets: VecDeque<Ticket>,
    bytes: u64,
}

struct Ticket {
    length: usize,
    key_bytes: usize,
    grant: oneshot::Sender<Grant>,
}

impl Room {
    pub(crate) fn new(kind: For, hot: Arc<dyn HotTier>) -> Self {
        Room { kind, hot, waiting: AtomicUsize::new(0), queue: Mutex::default() }
    }

    /// Memory at once, unless others wait for it or there is none.
    pub(crate) fn try_take(&self, length: usize, key_bytes: usize) -> Option<Grant> {
        if self.waiting.load(Ordering::Acquire) > 0 {
            return None;
        }
        self.alloc(length, key_bytes)
    }

    /// A place in the queue; `None` when `waiting_bytes_max` bytes wait already.
    pub(crate) fn enqueue(
        &self,
        length: usize,
        key_bytes: usize,
        waiting_bytes_max: u64,
    ) -> Option<oneshot::Receiver<Grant>> {
        let mut queue = self.queue.lock();
        if queue.bytes + length as u64 > waiting_bytes_max && queue.bytes > 0 {
            return None;
        }
        let (grant, granted) = oneshot::channel();
        queue.tickets.push_back(Ticket { length, key_bytes, grant });
        queue.bytes += length as u64;
        self.waiting.fetch_add(1, Ordering::Release);
        drop(queue);
        // Memory may have come back between the caller's try and the ticket.
        self.serve();
        Some(granted)
    }

    /// Hands memory to those who wait, in order, while there is some. Quick; called whenever memory comes back.
    pub(crate) fn serve(&self) {
        while self.waiting.load(Ordering::Acquire) > 0 {
            // Dropped after the lock: a grant that nobody takes any more gives its memory back, which comes here again.
            let _unclaimed: Option<Grant>;
            let mut queue = self.queue.lock();
            let Some(front) = queue.tickets.front() else { return };
            let grant = if front.grant.is_canceled() {
                None
            } else {
                let Some(grant) = self.alloc(front.length, front.key_bytes) else { return };
                Some(grant)
            };
            let Some(ticket) = queue.tickets.pop_front() else { return };
            queue.bytes -= ticket.length as u64;
            self.waiting.fetch_sub(1, Ordering::AcqRel);
            drop(queue);
            _unclaimed = grant.and_then(|grant| ticket.grant.send(grant).err());
        }
    }

    /// Bytes that the first in the queue needs; 0 when nobody waits.
    pub(crate) fn wanted_first(&self) -> u64 {
        if self.waiting.load(Ordering::Acquire) == 0 {
            return 0;
        }
        let queue = self.queue.lock();
        queue.tickets.front().map_or(0, |front| self.hot.object_bytes(front.length, front.key_bytes))
    }

    /// Bytes of values that wait.
    pub(crate) fn waiting_bytes(&self) -> u64 {
        if self.waiting.load(Ordering::Acquire) == 0 { 0 } else { self.queue.lock().bytes }
    }

    fn alloc(&self, length: usize, key_bytes: usize) -> Option<Grant> {
        match self.kind {
            For::Object => self.hot.alloc_object(length, key_bytes),
            For::Staging => self.hot.alloc_staging(length),
        }
    }
}
