"""Threads with owners: the only place that starts a thread.

A `Tasks` owns named daemon threads; closing it asks them to stop, joins them outside any lock, with a deadline, and
fails loudly if one does not end. No thread outlives its owner unnoticed.

Where the training thread waits for other threads of ours, or hands them jobs, it does so by a `Condition`, `Flag` or
`Outcome` from here: Ctrl-C, or what a handler of a signal raises, may come at any moment. Python's own are left locked
by what comes between two of their lines, and the next who wants the lock waits for ever; or they end in an error of the
lock's, which hides it (docs/decisions/0020).
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

BEGIN_S = 5.0  # for a new thread's first line
LOOKS = 10  # within that


class Condition(_thread.RLock, threading.Condition):  # type: ignore[misc]
    """`with` is the lock's, which has no lines. Who waits holds it once."""

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
            self._acquire_restore(held)  # nothing interrupts that
            if waiter in self._waiters:  # nobody has told it
                self._waiters.remove(waiter)
        return is_told


class Flag(threading.Event):
    def __init__(self) -> None:
        super().__init__()
        self._cond = Condition()


class _Begun(Flag):
    """Whether a thread has begun. One that gets no memory for its first line ends without a word to who started it,
    and Python's own wait for that one would never end. A look that takes far longer than it should does not count: the
    process stood still, or another thread has held the GIL, without which none begins."""

    def wait(self, timeout: float | None = None) -> bool:
        left, look_s = LOOKS, BEGIN_S / LOOKS
        while left:
            began_s = time.monotonic()
            if super().wait(look_s) or self.is_set():
                return True
            left -= time.monotonic() - began_s < 2 * look_s
        raise RuntimeError(f"it has not begun within {BEGIN_S:g} s")


class Outcome(Future[T]):
    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()

    def settle(self) -> None:
        """Waits until nobody is at it any more, whatever came of it. Of several: concurrent.futures.wait leaves locked
        what it was interrupted in."""
        with suppress(CancelledError):
            self.exception()


def end_all(ends: list[Callable[[], object]]) -> None:
    """Calls each, the last first, and takes it off the list once it is over: a second call goes on with the rest. One
    that Ctrl-C ends, maybe before its first line, is called once more. Errors: Ctrl-C, or else the first."""
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
    """Named threads and one bounded pool, closed together.

    `start` runs a long-lived loop, which should watch `stopping`; `submit` runs a short job in the pool.
    Thread-safe. After `close` both raise. What is at work when the interpreter ends is waited for, as in `close`: torch
    aborts the process where a thread is stopped in the midst of it. A forked child has none of the threads or jobs.
    """

    def __init__(self, name: str, pool_size: int = 0, begin: Callable[[], None] | None = None) -> None:
        """`begin`: what each thread of the pool does first. What it raises is the error of the job that is next."""
        self.name = name
        self.stopping = Flag()
        self._pool_size = pool_size
        self._begin = begin
        self._forget()
        _ALL.add(self)

    def _forget(self) -> None:
        self._lock = Condition()  # also told when a job comes, and when a thread ends
        self._threads: list[threading.Thread] = []  # which run, or will once the lock is free
        self._workers: list[threading.Thread] = []  # of the pool, the same
        self._idle = 0  # so many of them wait for a job, or were told of one and have not taken it
        self._jobs: deque[tuple[Outcome[Any], Callable[..., Any], tuple[Any, ...]]] = deque()

    def start(self, label: str, target: Callable[[], None]) -> threading.Thread:
        """Errors: CkptError once it is closed, and where no more threads are to be had."""
        with self._lock:
            if self.stopping.is_set():
                raise CkptError(f"{self.name} is closed")
            return self._start(label, target, self._threads)

    def _start(self, label: str, target: Callable[[], None], among: list[threading.Thread]) -> threading.Thread:
        def run() -> None:
            with self._lock:
                if thread not in among:  # Ctrl-C came while it was started, or it comes too late
                    return
            try:
                target()
            finally:
                with self._lock:
                    among.remove(thread)
                    self._lock.notify_all()

        thread = threading.Thread(target=run, name=f"ckpt-{self.name}-{label}", daemon=True)
        thread._started = _Begun()  # type: ignore[attr-defined]  # who starts it waits for that
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
        """Where the pool gets no further thread, those that it has do it. `into`: gets the job before it can begin, so
        that the caller knows of it where Ctrl-C keeps this from returning it. Errors: as `start`, where it has none;
        what has not begun when this raises never does."""
        job = Outcome[T]()
        try:
            if into is not None:
                into.append(job)
            with self._lock:
                if self.stopping.is_set() or not self._pool_size:
                    raise CkptError(f"{self.name} is closed, or has no pool")
                if self._idle <= len(self._jobs) and len(self._workers) < self._pool_size:
                    try:
                        self._start(str(len(self._workers)), self._work, self._workers)
                    except CkptError:
                        if not self._workers:
                            raise
                self._lock.notify()
                self._jobs.append((job, fn, args))
        except BaseException:
            job.cancel()
            raise
        return job

    def _work(self) -> None:
        begin = self._begin
        while True:
            with self._lock:
                while not (self._jobs or self.stopping.is_set()):
                    self._idle += 1
                    self._lock.wait()
                    self._idle -= 1
                if self.stopping.is_set():
                    return
                job = self._jobs.popleft()
            begin = _do(begin, *job)
            del job  # it may be long until the next

    def close(self, timeout_s: float = 10.0) -> None:
        """Sets `stopping`, drops jobs that have not begun, and waits. Raises if a thread is still alive then."""
        deadline = time.monotonic() + timeout_s
        self._end_pool()
        alive = self._join(self._threads, max(0.0, deadline - time.monotonic()))
        if alive:
            raise CkptError(f"threads did not end within {timeout_s:g} s: {', '.join(t.name for t in alive)}")

    def _end_pool(self) -> None:
        self.stopping.set()
        with self._lock:  # from here on nobody takes a job
            self._lock.notify_all()
        for job, _, _ in list(self._jobs):
            job.cancel()
        self._jobs.clear()
        self._join(self._workers)

    def _join(self, threads: list[threading.Thread], timeout_s: float | None = None) -> list[threading.Thread]:
        """Those that have not ended by then. (What Ctrl-C ends a Thread.join of is taken for dead, up to Python
        3.12.)"""
        with self._lock:
            others = [t for t in threads if t is not threading.current_thread()]
            self._lock.wait_for(lambda: set(others).isdisjoint(threads), timeout_s)
            alive = [t for t in others if t in threads]
        for thread in others:
            if thread not in alive:
                thread.join()  # its last lines
        return alive

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        end_all([self.close])


def _do(
    begin: Callable[[], None] | None, job: Outcome[T], fn: Callable[..., T], args: tuple[Any, ...]
) -> Callable[[], None] | None:
    """`begin`, unless it is None, and then the job. Returns what is still to be done before the next."""
    if not job.set_running_or_notify_cancel():
        return begin
    try:
        if begin is not None:
            begin()
            begin = None
        result = fn(*args)
    except BaseException as exc:
        job.set_exception(exc)
        del job, fn, args  # the error knows this frame: it would keep itself alive, and the memory that `fn` had
    else:
        job.set_result(result)
    return begin


_ALL: weakref.WeakSet[Tasks] = weakref.WeakSet()


@atexit.register
def _end_pools() -> None:
    for tasks in list(_ALL):
        if tasks._pool_size:  # also one that has done nothing yet
            tasks._end_pool()


def _in_child() -> None:
    for tasks in list(_ALL):
        tasks.stopping._at_fork_reinit()  # type: ignore[attr-defined]  # a thread that is not there may have held it
        tasks._forget()


os.register_at_fork(after_in_child=_in_child)
