//! The only clock, sleep, dice and spawn. The simulator replaces it, and the devices and transports, and nothing else.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Duration;

/// A future on the heap that any thread may run.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A point on the monotonic clock, in nanoseconds since some start of the process or of the simulation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Monotonic(pub u64);

impl Monotonic {
    /// The time from `earlier` to here; zero when `earlier` is later.
    pub fn since(self, earlier: Monotonic) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// The point `after` from here.
    pub fn plus(self, after: Duration) -> Monotonic {
        Monotonic(self.0.saturating_add(u64::try_from(after.as_nanos()).unwrap_or(u64::MAX)))
    }
}

/// Clock, sleep, dice and spawn of one process, or of one simulated one.
pub trait Env: Send + Sync + 'static {
    /// Now, on the monotonic clock.
    fn now(&self) -> Monotonic;
    /// Now, in milliseconds since the Unix epoch. For people and files, never for deadlines.
    fn wall_ms(&self) -> u64;
    /// Ends after `time`. Cancel-safe.
    fn sleep(&self, time: Duration) -> BoxFuture<'static, ()>;
    /// Sixty-four random bits.
    fn random(&self) -> u64;
    /// Runs `task` beside the caller. The caller keeps what it needs to know that the task has ended.
    fn spawn(&self, name: &'static str, task: BoxFuture<'static, ()>);
}

/// Runs `future` on this thread, parking it while there is nothing to do.
///
/// For callers that are threads of their own; never inside a task of an [`Env`].
pub fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
        fn wake_by_ref(self: &Arc<Self>) {
            self.0.unpark();
        }
    }
    let mut future = std::pin::pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}
