//! A bound on bytes, and the receipts that hold it.

use std::fmt;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// A bound on bytes in use. Whoever uses some holds a [`Charge`]; dropping it gives the bytes back.
#[derive(Clone)]
pub struct Budget(Arc<Account>);

struct Account {
    used: AtomicU64,
    peak: AtomicU64,
    limit: u64,
    released: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// A receipt for bytes taken from a [`Budget`]; gives them back when dropped.
pub struct Charge {
    account: Arc<Account>,
    bytes: u64,
}

impl Budget {
    /// A budget of `limit` bytes.
    pub fn new(limit: u64) -> Self {
        Budget(Arc::new(Account {
            used: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            limit,
            released: OnceLock::new(),
        }))
    }

    /// Takes `bytes`, or nothing when they do not fit.
    pub fn try_charge(&self, bytes: u64) -> Option<Charge> {
        let take = |used: u64| used.checked_add(bytes).filter(|used| *used <= self.0.limit);
        let before = self.0.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).ok()?;
        if before + bytes > self.0.peak.load(Ordering::Relaxed) {
            self.0.peak.fetch_max(before + bytes, Ordering::Relaxed);
        }
        Some(Charge { account: Arc::clone(&self.0), bytes })
    }

    /// Calls `hook` each time bytes come back. Only the first hook counts. It must be quick and must not charge.
    pub fn on_release(&self, hook: impl Fn() + Send + Sync + 'static) {
        let _ = self.0.released.set(Box::new(hook));
    }

    /// Bytes in use.
    pub fn used(&self) -> u64 {
        self.0.used.load(Ordering::Acquire)
    }

    /// The most bytes that were ever in use.
    pub fn peak(&self) -> u64 {
        self.0.peak.load(Ordering::Relaxed)
    }

    /// The bound.
    pub fn limit(&self) -> u64 {
        self.0.limit
    }

    /// Bytes that may still be taken.
    pub fn free(&self) -> u64 {
        self.limit() - self.used()
    }
}

impl Charge {
    /// The bytes it stands for.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Gives the bytes back without calling the hook: for a charge that found no memory behind it, where the hook would
    /// try the same again.
    pub fn cancel(mut self) {
        self.account.used.fetch_sub(self.bytes, Ordering::AcqRel);
        self.bytes = 0;
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        self.account.used.fetch_sub(self.bytes, Ordering::AcqRel);
        if let Some(released) = self.account.released.get() {
            released();
        }
    }
}

impl fmt::Debug for Charge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Charge({} bytes)", self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_over_the_limit_and_all_comes_back() {
        let budget = Budget::new(100);
        let first = budget.try_charge(60).unwrap();
        assert!(budget.try_charge(41).is_none());
        let second = budget.try_charge(40).unwrap();
        assert_eq!((budget.used(), budget.free(), budget.peak()), (100, 0, 100));
        drop(first);
        assert!(budget.try_charge(u64::MAX).is_none());
        drop(second);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_cancelled_charge_comes_back_without_a_word() {
        let budget = Budget::new(100);
        let told = Arc::new(AtomicU64::new(0));
        let hook = Arc::clone(&told);
        budget.on_release(move || {
            hook.fetch_add(1, Ordering::Relaxed);
        });
        budget.try_charge(60).unwrap().cancel();
        assert_eq!((budget.used(), told.load(Ordering::Relaxed)), (0, 0));
        drop(budget.try_charge(60).unwrap());
        assert_eq!((budget.used(), told.load(Ordering::Relaxed)), (0, 1));
    }
}
