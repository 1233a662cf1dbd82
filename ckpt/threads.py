"""Threads with owners. This is the only module that starts threads.

A `Tasks` owns named daemon threads. Closing it asks them to stop, joins them outside any lock, and raises if one does
not end in time. So no thread outlives its owner unnoticed.

The training thread waits for other ckpt threads, or hands them jobs, only by a `Condition`, `Flag` or `Outcome` from
here. Ctrl-C, or an exception of a signal handler, may come at any moment. If it comes between two lines of Python's own
classes, their lock stays locked and the next waiter hangs; or an error of the lock hides the exception
(docs/decisions/0020).
"""

from __future__ import annotations

import _thread
import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from ckpt.errors import CkptError

T = TypeVar("T")

THREAD_START_S = 5.0  # until a new thread's first line has run
START_CHECKS = 10  # how often that is checked


class Condition(_thread.RLock, threading.Condition):  # type: ignore[misc]
    """A condition that no exception from outside leaves locked. Its `with` is that of the interpreter's RLock, which
    has no Python lines. A waiter must hold the lock exactly once."""

    _release_save: Callable[[], object]
    _acquire_restore: Callable[[tuple[int, int]], None]

    def __init__(self) -> None:
        self._waiters: deque[Any] = deque()

    def wait(self, timeout: float | None = None) -> bool:
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        held = 1, threading.get_ident()
        try:
            self._release_save()
            is_told = waiter.acquire(timeout=-1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX))
        finally:
            # One call, which nothing interrupts.
            self._acquire_restore(held)
            # A waiter that was not notified is still in the queue.
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        return is_told


class Flag(threading.Event):
    """An Event that no exception from outside leaves locked."""

    def __init__(self) -> None:
        super().__init__()
        self._cond = Condition()


class _Begun(Flag):
    """Whether a thread has begun. A thread that gets no memory for its first line ends without a report, and Python's
    own wait for it would never end. A look that takes far longer than planned does not count: the process was stopped,
    or another thread held the GIL, without which no thread begins."""

    def wait(self, timeout: float | None = None) -> bool:
        left, look_s = START_CHECKS, THREAD_START_S / START_CHECKS
        while left:
            began_s = time.monotonic()
            if super().wait(look_s) or self.is_set():
                return True
            left -= time.monotonic() - began_s < 2 * look_s
        raise RuntimeError(f"it has not begun within {THREAD_START_S:g} s")


class Outcome(Future[T]):
    """A Future that no exception from outside leaves locked."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()

    def wait_until_done(self) -> None:
        """Waits until the job is over, whatever its result. Use it for several jobs too: an interrupted
        concurrent.futures.wait leaves their locks locked."""
        with suppress(CancelledError):
            self.exception()


def run_cleanups(ends: list[Callable[[], object]]) -> None:
    """Calls each function, the last first, and removes it from the list when it is over; a second call goes on with the
    rest. A function that Ctrl-C ends, maybe before its first line, is called once more. Errors: Ctrl-C, or else the
    first error."""
    failure: BaseException | None = None
    while ends:
        try:
            try:
                ends[-1]()
            except KeyboardInterrupt:
                ends[-1]()
                raise
        except BaseException as exc:
            if failure is None or isinstance(exc, KeyboardInterrupt):
                failure = exc
        ends.pop()
    if failure is not None:
        raise failure


class Tasks:
    """Named threads and one bounded pool, which are closed together.

    `start` runs a long-lived loop, which should watch `stopping`; `submit` runs a short job in the pool. Thread-safe.
    After `close` both raise. When the interpreter ends, running jobs are waited for, as in `close`: torch aborts the
    process if a thread is stopped in the middle of its code. A forked child has none of the threads or jobs."""

    def __init__(self, name: str, pool_size: int = 0, begin: Callable[[], None] | None = None) -> None:
        """`begin`: runs first on each thread of the pool. If it raises, the thread's next job fails with that error."""
        self.name = name
        self.stopping = Flag()
        self._pool_size = pool_size
        self._on_thread_start = begin
        self._reset()
        _ALL_TASKS.add(self)

    def _reset(self) -> None:
        # Also notified when a job comes and when a thread ends.
        self._lock = Condition()
        # Threads of `start`, and those of the pool, which run or will run once the lock is free.
        self._threads: list[threading.Thread] = []
        self._workers: list[threading.Thread] = []
        # How many pool threads wait for a job, or were notified of one and have not taken it.
        self._idle_count = 0
        self._jobs: deque[tuple[Outcome[Any], Callable[..., Any], tuple[Any, ...]]] = deque()

    def start(self, label: str, target: Callable[[], None]) -> threading.Thread:
        """Starts a thread. Errors: CkptError after `close`, or if the system gives no more threads."""
        with self._lock:
            if self.stopping.is_set():
                raise CkptError(f"{self.name} is closed")
            return self._start_thread(label, target, self._threads)

    def _start_thread(self, label: str, target: Callable[[], None], among: list[threading.Thread]) -> threading.Thread:
        def run() -> None:
            with self._lock:
                # Not listed: Ctrl-C interrupted the start, or the start took too long.
                if thread not in among:
                    return
            try:
                target()
            finally:
                with self._lock:
                    among.remove(thread)
                    self._lock.notify_all()

        thread = threading.Thread(target=run, name=f"ckpt-{self.name}-{label}", daemon=True)
        # `Thread.start` waits for this event.
        thread._started = _Begun()  # type: ignore[attr-defined]
        try:
            among.append(thread)
            thread.start()
        except BaseException as exc:
            if thread in among:
                among.remove(thread)
            if isinstance(exc, RuntimeError):
                why = "memory is used up, as many run as the control group allows (pids.max), or Python ends"
                raise CkptError(f"{self.name} got no further thread ({exc}): {why}") from exc
            raise
        return thread

    def submit(self, fn: Callable[..., T], *args: Any, into: list[Outcome[T]] | None = None) -> Outcome[T]:
        """Queues a job. If the pool gets no further thread, its present threads do the job. `into`: gets the job before
        it can begin, so that the caller knows of it even if Ctrl-C interrupts this call. Errors: as `start`, if the
        pool has no thread. A job that has not begun when this raises never begins."""
        job = Outcome[T]()
        try:
            if into is not None:
                into.append(job)
            with self._lock:
                if self.stopping.is_set() or not self._pool_size:
                    raise CkptError(f"{self.name} is closed, or has no pool")
                if self._idle_count <= len(self._jobs) and len(self._workers) < self._pool_size:
                    try:
                        self._start_thread(str(len(self._workers)), self._run_jobs, self._workers)
                    except CkptError:
                        if not self._workers:
                            raise
                self._lock.notify()
                self._jobs.append((job, fn, args))
        except BaseException:
            job.cancel()
            raise
        return job

    def _run_jobs(self) -> None:
        begin = self._on_thread_start
        while True:
            with self._lock:
                while not (self._jobs or self.stopping.is_set()):
                    self._idle_count += 1
                    self._lock.wait()
                    self._idle_count -= 1
                if self.stopping.is_set():
                    return
                job = self._jobs.popleft()
            begin = _run_job(begin, *job)
            # The next job may be long in coming: this one's memory is freed now.
            del job

    def close(self, timeout_s: float = 10.0) -> None:
        """Sets `stopping`, drops jobs that have not begun, and waits. Running pool jobs are waited for without a limit.
        Errors: CkptError if a thread of `start` is alive after timeout_s."""
        deadline = time.monotonic() + timeout_s
        self._end_pool()
        alive = self._join_threads(self._threads, max(0.0, deadline - time.monotonic()))
        if alive:
            raise CkptError(f"threads did not end within {timeout_s:g} s: {', '.join(t.name for t in alive)}")

    def _end_pool(self) -> None:
        self.stopping.set()
        # From here on no thread takes a job.
        with self._lock:
            self._lock.notify_all()
        for job, _, _ in list(self._jobs):
            job.cancel()
        self._jobs.clear()
        self._join_threads(self._workers)

    def _join_threads(self, threads: list[threading.Thread], timeout_s: float | None = None) -> list[threading.Thread]:
        """Waits for the threads, and returns those that have not ended by then. It does not rely on Thread.join: up to
        Python 3.12 a thread whose join was interrupted by Ctrl-C counts as dead."""
        with self._lock:
            others = [t for t in threads if t is not threading.current_thread()]
            self._lock.wait_for(lambda: set(others).isdisjoint(threads), timeout_s)
            alive = [t for t in others if t in threads]
        for thread in others:
            if thread not in alive:
                # Its last lines may still run.
                thread.join()
        return alive

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        run_cleanups([self.close])


def _run_job(
    begin: Callable[[], None] | None, job: Outcome[T], fn: Callable[..., T], args: tuple[Any, ...]
) -> Callable[[], None] | None:
    """Runs `begin`, unless it is None, and then the job. Returns the `begin` that the next job still has to run."""
    if not job.set_running_or_notify_cancel():
        return begin
    try:
        if begin is not None:
            begin()
            begin = None
        result = fn(*args)
    except BaseException as exc:
        job.set_exception(exc)
        # The error refers to this frame: it would keep itself alive, and the memory that `fn` used.
        del job, fn, args
    else:
        job.set_result(result)
    return begin


_ALL_TASKS: weakref.WeakSet[Tasks] = weakref.WeakSet()


@atexit.register
def _end_pools() -> None:
    for tasks in list(_ALL_TASKS):
        # Also a pool that has done nothing yet.
        if tasks._pool_size:
            tasks._end_pool()


def _reset_in_child() -> None:
    for tasks in list(_ALL_TASKS):
        # A thread that does not exist in the child may have held the lock.
        tasks.stopping._at_fork_reinit()  # type: ignore[attr-defined]
        tasks._reset()


os.register_at_fork(after_in_child=_reset_in_child)
