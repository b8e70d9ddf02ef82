//! The simulated `Env`: one thread, virtual time, seeded dice, a run queue that may be shuffled and tasks that may be late.

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use ebbtide_core::{BoxFuture, Env, Monotonic};
use parking_lot::Mutex;

use crate::dice::{Dice, mix};

/// In which order tasks that could run do run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// First woken, first run.
    Fifo,
    /// Any of those that could run, as the dice say; `late_permille` of the wake-ups come late by up to `late_max`, as if
    /// the thread had been taken off its core in between.
    Shuffled {
        /// How many wake-ups of a thousand are late.
        late_permille: u64,
        /// How late, at most.
        late_max: Duration,
    },
}

/// How the simulation was set up.
#[derive(Clone, Copy, Debug)]
pub struct SimOptions {
    /// Determines everything.
    pub seed: u64,
    /// The order of tasks.
    pub schedule: Schedule,
    /// Polls of tasks in one `block_on` before the run counts as hung.
    pub steps_max: u64,
    /// Virtual time in one `block_on` before the run counts as hung.
    pub time_max: Duration,
}

impl SimOptions {
    /// First come, first run; generous bounds.
    pub fn fifo(seed: u64) -> Self {
        SimOptions {
            seed,
            schedule: Schedule::Fifo,
            steps_max: 5_000_000,
            time_max: Duration::from_secs(3600),
        }
    }

    /// A shuffled run queue, one wake-up in twenty late by up to 3 ms: enough to open the window of most races.
    pub fn shuffled(seed: u64) -> Self {
        let schedule = Schedule::Shuffled { late_permille: 50, late_max: Duration::from_millis(3) };
        SimOptions { schedule, ..SimOptions::fifo(seed) }
    }
}

/// Clock, dice and tasks of one simulated process, in one thread. Cloning shares it.
///
/// The same seed and the same calls give the same run, which [`fingerprint`](Self::fingerprint) proves.
#[derive(Clone)]
pub struct SimEnv(Arc<Shared>);

struct Shared {
    options: SimOptions,
    // Never held while a task is polled, woken or dropped.
    state: Mutex<State>,
}

struct State {
    now: u64,
    dice: Dice,
    /// Draws of the scheduler come from dice of their own, so that a test that draws more is not scheduled otherwise.
    scheduler: Dice,
    ready: VecDeque<TaskId>,
    tasks: BTreeMap<TaskId, Task>,
    next_task: TaskId,
    timers: BTreeMap<(u64, u64), Timer>,
    next_timer: u64,
    steps: u64,
    fingerprint: u64,
}

type TaskId = u64;

/// The future that `block_on` drives.
const ROOT: TaskId = 0;

struct Task {
    name: &'static str,
    /// Taken out while it is polled.
    future: Option<BoxFuture<'static, ()>>,
    /// In the run queue, or about to be.
    queued: bool,
}

enum Timer {
    /// Ends a sleep.
    Wake(Waker),
    /// Runs a task whose wake-up came late.
    Run(TaskId),
}

impl SimEnv {
    /// A process at time 0 without tasks.
    pub fn new(options: SimOptions) -> Self {
        let state = State {
            now: 0,
            dice: Dice::new(options.seed),
            scheduler: Dice::new(options.seed ^ 0x5ced),
            ready: VecDeque::new(),
            tasks: BTreeMap::new(),
            next_task: ROOT + 1,
            timers: BTreeMap::new(),
            next_timer: 0,
            steps: 0,
            fingerprint: mix(options.seed),
        };
        SimEnv(Arc::new(Shared { options, state: Mutex::new(state) }))
    }

    /// Runs `future` and everything that was spawned until `future` ends.
    ///
    /// Panics, with the seed and the names of the tasks that wait, when it cannot end: nothing can run and no timer is
    /// set, or the bounds of the options are met.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        let mut future = std::pin::pin!(future);
        let waker = self.begin("root");
        let (steps_end, time_end) = self.bounds();
        loop {
            match self.step(steps_end, time_end) {
                Step::Root => {
                    let mut context = Context::from_waker(&waker);
                    if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                        self.0.state.lock().tasks.remove(&ROOT);
                        return output;
                    }
                }
                Step::Ran => {}
                Step::Idle => self.hang("nothing can run and no timer is set"),
            }
        }
    }

    /// Runs what was spawned until nothing can run and no timer is set.
    pub fn run_until_idle(&self) {
        let (steps_end, time_end) = self.bounds();
        while matches!(self.step(steps_end, time_end), Step::Ran) {}
    }

    /// Drops every task and timer, as a crash of the process does. Time and dice go on.
    ///
    /// What is dropped may leave a task behind that sees it to its end; such tasks run, on devices that are dead.
    pub fn kill_tasks(&self) {
        for _ in 0..8 {
            let (tasks, timers) = {
                let mut state = self.0.state.lock();
                state.ready.clear();
                (std::mem::take(&mut state.tasks), std::mem::take(&mut state.timers))
            };
            if tasks.is_empty() && timers.is_empty() {
                return;
            }
            drop((tasks, timers));
            self.run_until_idle();
        }
        self.hang("tasks that are dropped spawn others without end");
    }

    /// Mixes something that was observed into the fingerprint.
    pub fn note(&self, observed: u64) {
        self.0.state.lock().mix(observed);
    }

    /// A hash over every decision so far: which task ran when, every throw of the dice, everything noted.
    pub fn fingerprint(&self) -> u64 {
        self.0.state.lock().fingerprint
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.0.options.seed
    }

    /// Polls of tasks so far.
    pub fn steps(&self) -> u64 {
        self.0.state.lock().steps
    }

    /// Tasks that have not ended, by name.
    pub fn waiting(&self) -> Vec<&'static str> {
        self.0.state.lock().tasks.values().map(|task| task.name).collect()
    }

    fn begin(&self, name: &'static str) -> Waker {
        let mut state = self.0.state.lock();
        assert!(!state.tasks.contains_key(&ROOT), "block_on inside block_on");
        state.tasks.insert(ROOT, Task { name, future: None, queued: true });
        state.ready.push_back(ROOT);
        Waker::from(Arc::new(TaskWaker { env: self.clone(), task: ROOT }))
    }

    fn bounds(&self) -> (u64, u64) {
        let state = self.0.state.lock();
        let time = u64::try_from(self.0.options.time_max.as_nanos()).unwrap_or(u64::MAX);
        (state.steps.saturating_add(self.0.options.steps_max), state.now.saturating_add(time))
    }

    /// Runs one task, moving time on when none can run now.
    fn step(&self, steps_end: u64, time_end: u64) -> Step {
        let next = loop {
            let mut state = self.0.state.lock();
            if state.steps >= steps_end || state.now > time_end {
                drop(state);
                self.hang("the bound on steps or on virtual time is met");
            }
            if let Some(task) = state.next_ready(self.0.options.schedule) {
                break task;
            }
            let Some(((at, _), timer)) = state.timers.pop_first() else { return Step::Idle };
            state.now = state.now.max(at);
            match timer {
                Timer::Run(task) => state.ready.push_back(task),
                Timer::Wake(waker) => {
                    drop(state);
                    waker.wake();
                }
            }
        };
        if next == ROOT {
            return Step::Root;
        }
        self.run(next);
        Step::Ran
    }

    fn run(&self, id: TaskId) {
        let taken = self.0.state.lock().tasks.get_mut(&id).and_then(|task| task.future.take());
        let Some(mut future) = taken else { return };
        let waker = Waker::from(Arc::new(TaskWaker { env: self.clone(), task: id }));
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(()) => {
                self.0.state.lock().tasks.remove(&id);
            }
            Poll::Pending => {
                if let Some(task) = self.0.state.lock().tasks.get_mut(&id) {
                    task.future = Some(future);
                }
            }
        }
    }

    fn wake(&self, id: TaskId) {
        let mut state = self.0.state.lock();
        let Some(task) = state.tasks.get_mut(&id) else { return };
        if std::mem::replace(&mut task.queued, true) {
            return;
        }
        if let Schedule::Shuffled { late_permille, late_max } = self.0.options.schedule
            && state.scheduler.permille(late_permille)
        {
            let late = state.scheduler.below(late_max.as_nanos() as u64 + 1);
            state.set_timer(late, Timer::Run(id));
            return;
        }
        state.ready.push_back(id);
    }

    fn hang(&self, why: &str) -> ! {
        let (now, steps, waiting) = {
            let state = self.0.state.lock();
            (Duration::from_nanos(state.now), state.steps, state.names())
        };
        panic!(
            "seed {}: hung: {why} (at {now:?} after {steps} steps). Tasks that wait: {waiting}",
            self.0.options.seed
        );
    }
}

enum Step {
    Root,
    Ran,
    Idle,
}

impl State {
    fn next_ready(&mut self, schedule: Schedule) -> Option<TaskId> {
        let at = match (schedule, self.ready.len() as u64) {
            (_, 0) => return None,
            (Schedule::Fifo, _) => 0,
            (Schedule::Shuffled { .. }, ready) => self.scheduler.below(ready) as usize,
        };
        let task = self.ready.remove(at)?;
        // Woken while it runs, it runs again.
        if let Some(task) = self.tasks.get_mut(&task) {
            task.queued = false;
        }
        self.steps += 1;
        let (now, steps) = (self.now, self.steps);
        self.mix(task ^ now.rotate_left(20) ^ steps.rotate_left(40));
        Some(task)
    }

    fn set_timer(&mut self, after: u64, timer: Timer) -> (u64, u64) {
        let key = (self.now.saturating_add(after), self.next_timer);
        self.next_timer += 1;
        self.timers.insert(key, timer);
        key
    }

    fn mix(&mut self, observed: u64) {
        self.fingerprint = mix(self.fingerprint.rotate_left(1) ^ observed);
    }

    /// The names of the tasks, each with how many there are.
    fn names(&self) -> String {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for task in self.tasks.values() {
            *counts.entry(task.name).or_default() += 1;
        }
        let named =
            |(name, count): (&str, usize)| if count == 1 { name.into() } else { format!("{name} x{count}") };
        counts.into_iter().map(named).collect::<Vec<String>>().join(", ")
    }
}

struct TaskWaker {
    env: SimEnv,
    task: TaskId,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.env.wake(self.task);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.env.wake(self.task);
    }
}

impl Env for SimEnv {
    fn now(&self) -> Monotonic {
        Monotonic(self.0.state.lock().now)
    }

    fn wall_ms(&self) -> u64 {
        // 2026-01-01, so that files of a simulation look like files.
        1_767_225_600_000 + self.0.state.lock().now / 1_000_000
    }

    fn sleep(&self, time: Duration) -> BoxFuture<'static, ()> {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let end = self.0.state.lock().now.saturating_add(nanos);
        Box::pin(Sleep { env: self.clone(), end, timer: None })
    }

    fn random(&self) -> u64 {
        let mut state = self.0.state.lock();
        let thrown = state.dice.roll();
        state.mix(thrown);
        thrown
    }

    fn spawn(&self, name: &'static str, task: BoxFuture<'static, ()>) {
        let id = {
            let mut state = self.0.state.lock();
            let id = state.next_task;
            state.next_task += 1;
            state.tasks.insert(id, Task { name, future: Some(task), queued: false });
            id
        };
        self.wake(id);
    }
}

struct Sleep {
    env: SimEnv,
    end: u64,
    timer: Option<(u64, u64)>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let env = self.env.clone();
        let mut state = env.0.state.lock();
        let old = self.timer.take().and_then(|timer| state.timers.remove(&timer));
        let ended = state.now >= self.end;
        if !ended {
            let after = self.end - state.now;
            self.timer = Some(state.set_timer(after, Timer::Wake(context.waker().clone())));
        }
        drop(state);
        drop(old);
        if ended { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        let old = self.timer.take().and_then(|timer| self.env.0.state.lock().timers.remove(&timer));
        drop(old);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_moves_only_when_nothing_can_run() {
        let env = SimEnv::new(SimOptions::fifo(1));
        let log = Arc::new(Mutex::new(Vec::new()));
        for (name, ms) in [("slow", 30), ("quick", 10), ("middle", 20)] {
            let (env_, log) = (env.clone(), Arc::clone(&log));
            let task = async move {
                env_.sleep(Duration::from_millis(ms)).await;
                log.lock().push((name, env_.now().0 / 1_000_000));
            };
            env.spawn(name, Box::pin(task));
        }
        env.run_until_idle();
        assert_eq!(*log.lock(), [("quick", 10), ("middle", 20), ("slow", 30)]);
        assert!(env.waiting().is_empty());
    }

    #[test]
    #[should_panic(expected = "seed 9: hung: nothing can run and no timer is set")]
    fn a_deadlock_is_named() {
        let env = SimEnv::new(SimOptions::fifo(9));
        env.spawn("stuck", Box::pin(std::future::pending()));
        env.block_on(std::future::pending::<()>());
    }

    #[test]
    #[should_panic(expected = "the bound on steps or on virtual time is met")]
    fn a_livelock_is_named() {
        let env = SimEnv::new(SimOptions { steps_max: 1000, ..SimOptions::shuffled(9) });
        env.block_on(async {
            loop {
                env.sleep(Duration::from_millis(1)).await;
            }
        });
    }

    #[test]
    fn a_killed_task_is_dropped_with_what_it_holds() {
        let env = SimEnv::new(SimOptions::fifo(1));
        let held = Arc::new(());
        let task = {
            let (env, held) = (env.clone(), Arc::clone(&held));
            async move {
                env.sleep(Duration::from_secs(1)).await;
                drop(held);
            }
        };
        env.spawn("holder", Box::pin(task));
        env.block_on(env.sleep(Duration::from_millis(1)));
        env.kill_tasks();
        assert_eq!((Arc::strong_count(&held), env.waiting().len()), (1, 0));
    }

    #[test]
    fn a_seed_determines_the_run() {
        let run = |seed| {
            let env = SimEnv::new(SimOptions::shuffled(seed));
            for n in 0..20 {
                let task = {
                    let env = env.clone();
                    async move {
                        for _ in 0..10 {
                            let nanos = env.random() % 1000;
                            env.sleep(Duration::from_nanos(nanos * n)).await;
                        }
                    }
                };
                env.spawn("walker", Box::pin(task));
            }
            env.run_until_idle();
            env.fingerprint()
        };
        assert_eq!(run(3), run(3));
        assert_ne!(run(3), run(4));
    }
}
