//! Values are dropped once, slots are used again, and blocks outlive the pool as long as a value does.

use super::*;
use std::sync::atomic::AtomicU32;

struct Tally(Arc<AtomicU32>);

impl Drop for Tally {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn the_last_owner_drops_the_value_and_its_slot_is_used_again() {
    let (pool, dropped) = (Pool::new(), Arc::new(AtomicU32::new(0)));
    let one = pool.keep(Tally(Arc::clone(&dropped)));
    let place = one.slot;
    let other = one.clone();
    drop(one);
    assert_eq!((dropped.load(Ordering::Relaxed), Counted::owners(&other)), (0, 1));
    drop(other);
    assert_eq!(dropped.load(Ordering::Relaxed), 1);
    assert!(pool.keep(Tally(dropped)).slot == place);
}

#[test]
fn values_outlive_their_pool() {
    let kept: Vec<_> = {
        let pool = Pool::new();
        (0..100_u64).map(|n| pool.keep(n.to_string())).collect()
    };
    assert!(kept.iter().enumerate().all(|(n, value)| **value == n.to_string()));
}

#[test]
fn slots_are_whole_lines_and_never_shared() {
    let pool = Pool::new();
    let count = if cfg!(miri) { 700 } else { 50_000 };
    let mut kept: Vec<_> = (0..count).map(|n| pool.keep([n; 9])).collect();
    let step = 7;
    for n in (0..count).step_by(step) {
        kept[n] = pool.keep([n; 9]);
    }
    let mut places: Vec<_> = kept.iter().map(|value| value.slot.as_ptr().addr()).collect();
    assert!(places.iter().all(|place| place % LINE_BYTES == 0));
    assert!(kept.iter().enumerate().all(|(n, value)| **value == [n; 9]));
    places.sort_unstable();
    places.dedup();
    assert_eq!(places.len(), count);
}

#[test]
fn the_only_owner_may_write_and_take() {
    let mut owned = Pool::new().own(1);
    *owned += 1;
    assert_eq!(*owned, 2);
    for value in [Counted::new(1), Pool::new().keep(1)] {
        let other = value.clone();
        let value = Counted::try_unwrap(value).unwrap_err();
        drop(other);
        assert_eq!(Counted::try_unwrap(value).unwrap(), 1);
    }
    let dropped = Arc::new(AtomicU32::new(0));
    let taken = Counted::try_unwrap(Counted::new(Tally(Arc::clone(&dropped)))).ok();
    assert_eq!(dropped.load(Ordering::Relaxed), 0, "taken, not dropped");
    drop(taken);
    assert_eq!(dropped.load(Ordering::Relaxed), 1);
}

#[test]
fn a_value_that_holds_its_own_pool_ends_it() {
    // As a buffer's memory holds the arena, which holds the pool that the buffer's entry lies in.
    struct Ring {
        _pool: Pool<Ring>,
        _tally: Tally,
    }
    let (pool, dropped) = (Pool::new(), Arc::new(AtomicU32::new(0)));
    let value = pool.keep(Ring { _pool: pool.clone(), _tally: Tally(Arc::clone(&dropped)) });
    let blocks = Arc::downgrade(&pool.blocks);
    drop(pool);
    drop(value);
    assert_eq!((dropped.load(Ordering::Relaxed), blocks.strong_count()), (1, 0));
}

#[test]
fn owners_on_many_threads() {
    let (pool, dropped) = (Pool::new(), Arc::new(AtomicU32::new(0)));
    let rounds = if cfg!(miri) { 20 } else { 5_000 };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..rounds {
                    let one = pool.keep(Tally(Arc::clone(&dropped)));
                    let other = one.clone();
                    scope.spawn(move || drop(one)).join().unwrap();
                    drop(other);
                }
            });
        }
    });
    assert_eq!(dropped.load(Ordering::Relaxed), 4 * rounds);
}
