//! A bar with rates on a terminal; elsewhere a line every two seconds. Always on standard error.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ebbtide_core::ByteSize;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::clock;

const TICK: Duration = Duration::from_millis(100);
const LINE_EVERY: Duration = Duration::from_secs(2);

/// What a stage counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    Bytes,
    Things,
}

/// Shows how far a run is. Counting costs one atomic addition; a thread of its own does the drawing.
pub(crate) struct Progress {
    shared: Arc<Shared>,
    ticker: Option<JoinHandle<()>>,
}

struct Shared {
    done: AtomicU64,
    stop: AtomicBool,
    paused: AtomicBool,
    stage: Mutex<Stage>,
    watch: Mutex<Option<Box<dyn FnMut() + Send>>>,
}

#[derive(Clone)]
struct Stage {
    number: u64,
    name: String,
    total: u64,
    unit: Unit,
    start: Instant,
}

impl Progress {
    /// Starts to show. Without a thread to do so nothing is shown, and the run goes on.
    pub(crate) fn start() -> Self {
        let shared = Arc::new(Shared::new());
        let drawn = Arc::clone(&shared);
        let ticker = std::thread::Builder::new().name("progress".to_string()).spawn(move || drawn.run()).ok();
        Progress { shared, ticker }
    }

    /// Counts and shows nothing.
    pub(crate) fn silent() -> Self {
        Progress { shared: Arc::new(Shared::new()), ticker: None }
    }

    /// Begins a stage of `total` bytes or things; zero when nobody knows.
    pub(crate) fn stage(&self, name: impl Into<String>, total: u64, unit: Unit) {
        let mut stage = self.shared.stage();
        *stage = Stage { number: stage.number + 1, name: name.into(), total, unit, start: clock::now() };
        self.shared.done.store(0, Ordering::Relaxed);
    }

    /// Counts `amount` as done.
    pub(crate) fn add(&self, amount: u64) {
        self.shared.done.fetch_add(amount, Ordering::Relaxed);
    }

    /// Says how much of the stage is done.
    pub(crate) fn set(&self, done: u64) {
        self.shared.done.store(done, Ordering::Relaxed);
    }

    /// Calls `watch` at each tick, until the next call or the end. It must be quick.
    pub(crate) fn watch(&self, watch: Option<Box<dyn FnMut() + Send>>) {
        *self.shared.watch.lock().unwrap_or_else(PoisonError::into_inner) = watch;
    }

    /// Does `work` without drawing or watching meanwhile: for measurements of CPU time.
    pub(crate) fn paused<T>(&self, work: impl FnOnce() -> T) -> T {
        self.shared.paused.store(true, Ordering::Relaxed);
        let result = work();
        self.shared.paused.store(false, Ordering::Relaxed);
        result
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(ticker) = self.ticker.take() {
            ticker.thread().unpark();
            // A panic of the ticker cost the picture, not the run.
            drop(ticker.join());
        }
    }
}

impl Shared {
    fn new() -> Self {
        let stage =
            Stage { number: 0, name: String::new(), total: 0, unit: Unit::Things, start: clock::now() };
        Shared {
            done: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            stage: Mutex::new(stage),
            watch: Mutex::new(None),
        }
    }

    fn stage(&self) -> std::sync::MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let terminal = std::io::stderr().is_terminal();
        let mut drawn: Option<(u64, ProgressBar)> = None;
        let mut line_at = clock::now();
        while !self.stop.load(Ordering::Relaxed) {
            std::thread::park_timeout(TICK);
            if self.paused.load(Ordering::Relaxed) {
                continue;
            }
            if let Some(watch) = &mut *self.watch.lock().unwrap_or_else(PoisonError::into_inner) {
                watch();
            }
            let (stage, done) = (self.stage().clone(), self.done.load(Ordering::Relaxed));
            if stage.number == 0 {
                continue;
            }
            if terminal {
                if drawn.as_ref().is_none_or(|(number, _)| *number != stage.number) {
                    drawn.take().inspect(|(_, bar)| bar.finish_and_clear());
                    drawn = Some((stage.number, bar(&stage)));
                }
                drawn.as_ref().inspect(|(_, bar)| bar.set_position(done));
            } else if clock::now().duration_since(line_at) >= LINE_EVERY {
                line_at = clock::now();
                eprintln!("{}", line(&stage, done, line_at.duration_since(stage.start)));
            }
        }
        drawn.inspect(|(_, bar)| bar.finish_and_clear());
    }
}

fn bar(stage: &Stage) -> ProgressBar {
    let template = match (stage.unit, stage.total) {
        (Unit::Bytes, 0) => "{msg:24} {spinner} {binary_bytes} {binary_bytes_per_sec} {elapsed}",
        (Unit::Bytes, _) => {
            "{msg:24} [{bar:30}] {binary_bytes} of {binary_total_bytes} {binary_bytes_per_sec} {eta} left"
        }
        (Unit::Things, 0) => "{msg:24} {spinner} {human_pos} {per_sec} {elapsed}",
        (Unit::Things, _) => "{msg:24} [{bar:30}] {human_pos} of {human_len} {per_sec} {eta} left",
    };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = match stage.total {
        0 => ProgressBar::no_length(),
        total => ProgressBar::new(total),
    };
    bar.set_draw_target(ProgressDrawTarget::stderr());
    bar.with_style(style.progress_chars("=> ")).with_message(stage.name.clone())
}

fn line(stage: &Stage, done: u64, elapsed: Duration) -> String {
    let rate = done as f64 / elapsed.as_secs_f64().max(0.001);
    let of = |text: String| if stage.total > 0 { format!(" of {text}") } else { String::new() };
    match stage.unit {
        Unit::Bytes => {
            let (done, total) = (ByteSize(done), of(ByteSize(stage.total).to_string()));
            format!("{}: {done}{total}, {:.2} GB/s", stage.name, rate / 1e9)
        }
        Unit::Things => format!("{}: {done}{}, {rate:.0}/s", stage.name, of(stage.total.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_names_stage_amount_and_rate() {
        let stage = Stage {
            number: 1,
            name: "write".to_string(),
            total: 4 << 30,
            unit: Unit::Bytes,
            start: clock::now(),
        };
        assert_eq!(line(&stage, 2 << 30, Duration::from_secs(2)), "write: 2GiB of 4GiB, 1.07 GB/s");
        let stage = Stage { total: 0, unit: Unit::Things, ..stage };
        assert_eq!(line(&stage, 500, Duration::from_secs(5)), "write: 500, 100/s");
    }
}
