//! What callers and the ring thread share: a bounded queue, and the knowledge of whether the thread sleeps.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::ThreadId;

use ebbtide_core::{Check, Error, Result};
use ebbtide_mem::{Buf, BufMut, Region};
use parking_lot::{Condvar, Mutex};

use super::sys::FileId;
use crate::batch::{Tally, Ticket};
use crate::direct::{BareResult, BareSpec};
use crate::sys;

/// One operation on its way to the ring.
pub(super) struct Request {
    pub(super) file: FileId,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) work: Work,
    pub(super) ticket: Ticket,
}

pub(super) enum Work {
    Read { into: BufMut, check: Option<Check> },
    Write { from: Vec<Buf> },
    Flush,
    Discard,
}

/// What is asked of the ring thread beside operations.
pub(super) enum Command {
    AddFile {
        file: File,
        name: Arc<str>,
        tally: Arc<Tally>,
        reply: Sender<Result<FileId>>,
    },
    RemoveFile {
        file: FileId,
    },
    Register {
        regions: Vec<Region>,
        reply: Sender<Result<()>>,
    },
    Drive {
        file: FileId,
        spec: Box<BareSpec>,
        reply: Sender<Result<BareResult>>,
    },
    /// Kills the thread, to see what becomes of the rest.
    #[cfg(test)]
    Panic,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Life {
    Open,
    Closed,
    Dead,
}

struct State {
    life: Life,
    requests: VecDeque<Request>,
    commands: VecDeque<Command>,
    /// The ring thread waits in the kernel.
    asleep: bool,
    /// …and has room, so that a request should wake it. A full ring hears of its next completion anyway.
    hungry: bool,
    blocked: u32,
}

/// The queue of one ring.
pub(super) struct Queue {
    requests_max: usize,
    state: Mutex<State>,
    room: Condvar,
    kick: Arc<File>,
    /// The ring thread, which must never wait for itself.
    server: OnceLock<ThreadId>,
}

/// What the ring thread found in the queue.
#[derive(Default)]
pub(super) struct Taken {
    pub(super) commands: VecDeque<Command>,
    /// Nothing new comes any more.
    pub(super) closed: bool,
    /// …and all that came was taken.
    pub(super) drained: bool,
}

impl Queue {
    pub(super) fn new(requests_max: usize) -> Result<Queue> {
        let kick = sys::eventfd().map_err(|error| Error::io("make an eventfd", error))?;
        let state = State {
            life: Life::Open,
            requests: VecDeque::new(),
            commands: VecDeque::new(),
            asleep: false,
            hungry: false,
            blocked: 0,
        };
        Ok(Queue {
            requests_max,
            state: Mutex::new(state),
            room: Condvar::new(),
            kick: Arc::new(kick),
            server: OnceLock::new(),
        })
    }

    /// Says that this thread is the one that serves the queue.
    pub(super) fn serve_here(&self) {
        let _ = self.server.set(std::thread::current().id());
    }

    fn is_served_here(&self) -> bool {
        self.server.get().is_some_and(|server| *server == std::thread::current().id())
    }

    /// The eventfd that ends the ring's wait.
    pub(super) fn kick_file(&self) -> Arc<File> {
        Arc::clone(&self.kick)
    }

    /// Queues `requests`, and first waits while the queue is full, unless this is the ring thread (a waker or a
    /// check that submits). A batch is taken whole. The tickets of what is not
    /// taken are answered with the reason.
    pub(super) fn push(&self, requests: Vec<Request>) {
        let mut state = self.state.lock();
        while state.life == Life::Open && state.requests.len() >= self.requests_max && !self.is_served_here()
        {
            state.blocked += 1;
            self.room.wait(&mut state);
            state.blocked -= 1;
        }
        if state.life != Life::Open {
            let error = state.life.refusal();
            drop(state);
            requests.into_iter().for_each(|request| request.refuse(error.clone()));
            return;
        }
        state.requests.extend(requests);
        self.wake(state, false);
    }

    /// Queues a request before all others and without waiting for room: a flush, which concerns only what is done.
    pub(super) fn push_first(&self, request: Request) {
        let mut state = self.state.lock();
        if state.life != Life::Open {
            let error = state.life.refusal();
            drop(state);
            return request.refuse(error);
        }
        state.requests.push_front(request);
        self.wake(state, false);
    }

    /// Has the ring thread answer a command; waits for the answer.
    pub(super) fn call<T>(&self, command: impl FnOnce(Sender<Result<T>>) -> Command) -> Result<T> {
        let (reply, answer) = channel();
        let mut state = self.state.lock();
        if state.life != Life::Open {
            return Err(state.life.refusal());
        }
        state.commands.push_back(command(reply));
        self.wake(state, true);
        answer.recv().unwrap_or_else(|_| Err(Life::Dead.refusal()))
    }

    /// As `call`, for a command without an answer; one that comes too late is dropped.
    pub(super) fn tell(&self, command: Command) {
        let mut state = self.state.lock();
        if state.life == Life::Open {
            state.commands.push_back(command);
            self.wake(state, true);
        }
    }

    /// Refuses everything from here on; what was taken is still done.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        if state.life == Life::Open {
            state.life = Life::Closed;
        }
        self.room.notify_all();
        self.wake(state, true);
    }

    /// The ring is gone: answers what waits.
    pub(super) fn die(&self) {
        let mut state = self.state.lock();
        if state.life == Life::Open {
            state.life = Life::Dead;
        }
        let requests = std::mem::take(&mut state.requests);
        let commands = std::mem::take(&mut state.commands);
        let error = state.life.refusal();
        self.room.notify_all();
        drop(state);
        drop(commands);
        requests.into_iter().for_each(|request| request.refuse(error.clone()));
    }

    /// For the ring thread: moves requests to `waiting` as long as it has fewer than `waiting_max`.
    pub(super) fn take(&self, waiting: &mut VecDeque<Request>, waiting_max: usize) -> Taken {
        let mut state = self.state.lock();
        state.asleep = false;
        let count = waiting_max.saturating_sub(waiting.len()).min(state.requests.len());
        if waiting.is_empty() && count == state.requests.len() {
            std::mem::swap(waiting, &mut state.requests);
        } else {
            waiting.extend(state.requests.drain(..count));
        }
        if state.blocked > 0 && state.requests.len() < self.requests_max {
            self.room.notify_all();
        }
        Taken {
            commands: std::mem::take(&mut state.commands),
            closed: state.life != Life::Open,
            drained: state.life != Life::Open && state.requests.is_empty(),
        }
    }

    /// For the ring thread, before it waits in the kernel: false when there is something to do first.
    pub(super) fn fall_asleep(&self, hungry: bool, closing: bool) -> bool {
        let mut state = self.state.lock();
        let called = !state.commands.is_empty() || (state.life != Life::Open && !closing);
        if called || (hungry && !state.requests.is_empty()) {
            return false;
        }
        (state.asleep, state.hungry) = (true, hungry);
        true
    }

    fn wake(&self, mut state: parking_lot::MutexGuard<'_, State>, urgent: bool) {
        if !(state.asleep && (urgent || state.hungry)) {
            return;
        }
        state.asleep = false;
        drop(state);
        // An eventfd refuses only when its count is at its end, and then the thread wakes anyway.
        let _ = (&*self.kick).write(&1_u64.to_ne_bytes());
    }
}

impl Life {
    fn refusal(self) -> Error {
        match self {
            Life::Open | Life::Closed => Error::closed("the device is closed"),
            Life::Dead => Error::unavailable("the device's ring is gone"),
        }
    }
}

impl Request {
    /// Answers with `error` and gives a read its buffer back.
    pub(super) fn refuse(self, error: Error) {
        let buf = match self.work {
            Work::Read { into, .. } => Some(into),
            _ => None,
        };
        self.ticket.answer(ebbtide_core::Done { result: Err(error), buf });
    }
}

/// A name for messages.
pub(super) fn name_of(path: &Path) -> Arc<str> {
    path.display().to_string().into()
}
