//! What happened to resident objects, on its way to the eviction policy: bounded rings, one for a few threads each.
//!
//! A get or a put leaves an event in its thread's ring, without a shared lock; the owner of the order takes the events out
//! before it picks victims. The events of one thread stay in order, so with one thread the order is exact. Counters that
//! a get increments stand beside the ring, so that they are a thread's own as well.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crossbeam_queue::ArrayQueue;
use ebbtide_core::{Cost, Eviction, ObjectId, Rank};
use smallvec::SmallVec;

/// Events that one ring holds.
const RING_EVENTS_MAX: usize = 1024;

/// Events that are taken out at a time, so that the policy's memory of all of them can be asked for together.
const DRAIN_EVENTS: usize = 16;

/// Something that the eviction policy is to learn of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// An object became resident.
    Insert(ObjectId, Cost),
    /// An object was used.
    Touch(ObjectId),
}

/// One ring with the counters of the threads that use it, on cache lines of its own.
#[repr(align(128))]
pub(crate) struct Stripe {
    events: ArrayQueue<Event>,
    pub(crate) hits: AtomicU64,
    pub(crate) hit_bytes: AtomicU64,
    pub(crate) misses: AtomicU64,
    pub(crate) puts: AtomicU64,
    pub(crate) put_bytes: AtomicU64,
    pub(crate) put_present: AtomicU64,
}

/// All rings.
pub(crate) struct Touches {
    stripes: Box<[Stripe]>,
    pub(crate) dropped: AtomicU64,
}

impl Touches {
    /// `rings` rings, a power of two.
    pub(crate) fn new(rings: usize) -> Self {
        assert!(rings.is_power_of_two(), "the number of rings is a power of two");
        let stripe = |_| Stripe {
            events: ArrayQueue::new(RING_EVENTS_MAX),
            hits: AtomicU64::new(0),
            hit_bytes: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            puts: AtomicU64::new(0),
            put_bytes: AtomicU64::new(0),
            put_present: AtomicU64::new(0),
        };
        Touches { stripes: (0..rings).map(stripe).collect(), dropped: AtomicU64::new(0) }
    }

    /// This thread's ring.
    pub(crate) fn mine(&self) -> &Stripe {
        &self.stripes[thread_number() & (self.stripes.len() - 1)]
    }

    /// Applies what is in the rings to `policy`.
    pub(crate) fn drain(&self, policy: &mut dyn Eviction) {
        let mut batch = SmallVec::<[Event; DRAIN_EVENTS]>::new();
        for stripe in &self.stripes {
            // What is pushed meanwhile waits for the next drain, so that this one ends.
            for _ in 0..RING_EVENTS_MAX / DRAIN_EVENTS {
                batch.extend(std::iter::from_fn(|| stripe.events.pop()).take(DRAIN_EVENTS));
                for event in &batch {
                    let (Event::Insert(id, _) | Event::Touch(id)) = event;
                    policy.expect(*id);
                }
                let last = batch.len() < DRAIN_EVENTS;
                batch.drain(..).for_each(|event| apply(policy, event));
                if last {
                    break;
                }
            }
        }
    }

    /// Sums one counter over all rings.
    pub(crate) fn sum(&self, counter: impl Fn(&Stripe) -> &AtomicU64) -> u64 {
        self.stripes.iter().map(|stripe| counter(stripe).load(Ordering::Relaxed)).sum()
    }
}

impl Stripe {
    /// Leaves an event; gives it back when the ring is full.
    pub(crate) fn push(&self, event: Event) -> Result<(), Event> {
        self.events.push(event)
    }
}

pub(crate) fn apply(policy: &mut dyn Eviction, event: Event) {
    match event {
        Event::Insert(id, cost) => policy.insert(id, cost, Rank::New),
        Event::Touch(id) => policy.touch(id),
    }
}

fn thread_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static MINE: Cell<usize> = const { Cell::new(usize::MAX) };
    }
    MINE.with(|mine| {
        if mine.get() == usize::MAX {
            mine.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        mine.get()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Policy;

    #[test]
    fn events_of_a_thread_keep_their_order() {
        let touches = Touches::new(8);
        let mut lru = Policy::Lru.build(0);
        let cost = Cost { bytes: 1, tag: 0 };
        for event in [
            Event::Insert(ObjectId(0), cost),
            Event::Insert(ObjectId(1), cost),
            Event::Touch(ObjectId(0)),
            Event::Insert(ObjectId(2), cost),
        ] {
            touches.mine().push(event).unwrap();
        }
        touches.drain(&mut *lru);
        let mut out = Vec::new();
        lru.victims(3, &mut out);
        assert_eq!(out, [ObjectId(1), ObjectId(0), ObjectId(2)]);
    }

    #[test]
    fn a_full_ring_gives_the_event_back() {
        let touches = Touches::new(1);
        let pushed =
            (0..2000).take_while(|n| touches.mine().push(Event::Touch(ObjectId(*n))).is_ok()).count();
        assert_eq!(pushed, RING_EVENTS_MAX);
    }
}
