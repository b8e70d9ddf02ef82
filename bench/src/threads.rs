//! The same work on several threads at once.

/// Runs `work` on `threads` threads and returns what each gave. A panic of one is the caller's.
pub(crate) fn on_threads<T: Send>(threads: usize, work: impl Fn() -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(&work)).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, T>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        running.into_iter().map(join).collect()
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[test]
    fn work_runs_on_every_thread() {
        let count = AtomicU64::new(0);
        let mut numbers = on_threads(5, || count.fetch_add(1, Ordering::Relaxed));
        numbers.sort_unstable();
        assert_eq!(numbers, [0, 1, 2, 3, 4]);
    }
}
