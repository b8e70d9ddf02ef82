//! The real clock, dice and spawn: two threads of tokio for timers and movement.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ebbtide_core::{BoxFuture, Env, Error, Monotonic, Result};
use tokio::runtime::{Builder, Handle, Runtime};

/// Threads that run movement, timers and seals. Bytes are moved by the devices' threads and the callers'.
const THREADS: usize = 2;

/// The process's clock, dice and spawn.
pub(crate) struct RealEnv {
    start: Instant,
    handle: Handle,
}

/// The threads behind a [`RealEnv`]; dropping it ends their tasks where they wait.
pub(crate) struct Threads(Option<Runtime>);

impl RealEnv {
    pub(crate) fn start() -> Result<(Arc<RealEnv>, Threads)> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("ebbtide-move")
            // Devices wait for what these choose to write. Refused, all works the same.
            .on_thread_start(|| drop(ebbtide_device::short_slice()))
            .enable_time()
            .build()
            .map_err(|error| Error::io("start threads", error))?;
        #[expect(clippy::disallowed_methods, reason = "this is the Env that everything else asks")]
        let start = Instant::now();
        let env = RealEnv { start, handle: runtime.handle().clone() };
        Ok((Arc::new(env), Threads(Some(runtime))))
    }
}

impl Env for RealEnv {
    fn now(&self) -> Monotonic {
        Monotonic(u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    #[expect(clippy::disallowed_methods, reason = "this is the Env that everything else asks")]
    fn wall_ms(&self) -> u64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    }

    fn sleep(&self, time: Duration) -> BoxFuture<'static, ()> {
        let handle = self.handle.clone();
        Box::pin(async move {
            // Callers park threads of their own, so the timer must be told which runtime keeps it.
            let sleep = {
                let _inside = handle.enter();
                #[expect(clippy::disallowed_methods, reason = "this is the Env that everything else asks")]
                tokio::time::sleep(time)
            };
            sleep.await;
        })
    }

    fn random(&self) -> u64 {
        getrandom::u64().expect("the kernel gives random numbers")
    }

    fn spawn(&self, _name: &'static str, task: BoxFuture<'static, ()>) {
        self.handle.spawn(task);
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        let Some(runtime) = self.0.take() else { return };
        // From a thread of its own: a runtime must not be dropped where tasks run, and its user may be in one.
        let end = std::thread::Builder::new().name("ebbtide-end".into());
        match end.spawn(move || runtime.shutdown_timeout(Duration::from_secs(10))) {
            Ok(thread) => drop(thread.join()),
            Err(error) => tracing::warn!(%error, "no thread to end the others in order"),
        }
    }
}
