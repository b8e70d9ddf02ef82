//! The clocks of the bench: it measures the machine and is never simulated, so it may read them. Nothing else here does.
#![expect(clippy::disallowed_methods, reason = "the bench measures the machine; it is not simulated")]

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

/// Now, for spans of time.
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// Stops this thread for `time`.
pub(crate) fn sleep(time: Duration) {
    std::thread::sleep(time);
}

/// Nanoseconds since the Unix epoch, for people and for run ids.
pub(crate) fn wall_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// User and system time of all threads of this process, those that the kernel started for its rings included.
pub(crate) fn process_cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Measures wall clock and CPU of one piece of work.
pub(crate) struct Stopwatch {
    start: Instant,
    cpu: Duration,
}

impl Stopwatch {
    pub(crate) fn start() -> Self {
        Stopwatch { cpu: process_cpu(), start: now() }
    }

    /// Wall-clock seconds so far.
    pub(crate) fn seconds(&self) -> f64 {
        now().duration_since(self.start).as_secs_f64()
    }

    /// CPU seconds of the process so far.
    pub(crate) fn cpu_seconds(&self) -> f64 {
        process_cpu().saturating_sub(self.cpu).as_secs_f64()
    }
}
