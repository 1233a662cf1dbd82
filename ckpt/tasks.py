"""Threads with owners: the only place that starts a thread.

A `Tasks` owns named daemon threads; closing it asks them to stop, joins them outside any lock, with a deadline, and
fails loudly if one does not end. No thread outlives its owner unnoticed.

Where the training thread waits for other threads of ours it does so by a `Condition`, `Flag` or `Outcome` from here
(not yet where it hands jobs to a pool): Ctrl-C, or what a handler of a signal raises, may come at any moment. Python's
own are left locked by what comes between two of their lines, and the next who wants the lock waits for ever; or they
end in an error of the lock's, which hides it (docs/decisions/0020).
"""

from __future__ import annotations

import _thread
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

from ckpt.errors import CkptError

T = TypeVar("T")


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
            is_told = waiter.acquire(timeout=-1 if timeout is None else max(0.0, timeout))
        finally:
            self._acquire_restore(held)  # nothing interrupts that
            if waiter in self._waiters:  # nobody has told it
                self._waiters.remove(waiter)
        return is_told


class Flag(threading.Event):
    def __init__(self) -> None:
        super().__init__()
        self._cond = Condition()


class Outcome(Future[T]):
    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()


def _is_queued(error: RuntimeError) -> bool:
    """Whether a pool has the job, and only lacks a further thread. Else it is broken, or the interpreter ends, and
    nobody will ever do it."""
    return str(error).startswith("can't start")  # as CPython says it


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
    Thread-safe. After `close` both raise.
    """

    def __init__(self, name: str, pool_size: int = 0, begin: Callable[[], None] | None = None) -> None:
        """`begin`: what each thread of the pool does first."""
        self.name = name
        self.stopping = Flag()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(pool_size, f"ckpt-{name}", begin) if pool_size else None
        self._has_pooled = False
        self._queued: list[Future[Any]] = []  # for which there was no thread

    def start(self, label: str, target: Callable[[], None]) -> threading.Thread:
        """Errors: CkptError once it is closed, and where no more threads are to be had."""
        with self._lock:
            if self.stopping.is_set():
                raise CkptError(f"{self.name} is closed")
            thread = threading.Thread(target=target, name=f"ckpt-{self.name}-{label}", daemon=True)
            self._threads = [t for t in self._threads if t.is_alive()]
            self._threads.append(thread)
            try:
                thread.start()
            except RuntimeError as exc:
                raise CkptError(self._no_thread(exc)) from exc
        return thread

    def submit(self, fn: Callable[..., T], *args: Any) -> Future[T]:
        """Where the pool gets no further thread, those that it has do it. Errors: as `start`, where it has none; then
        `fn` is not called."""
        if self._pool is None or self.stopping.is_set():
            raise CkptError(f"{self.name} is closed, or has no pool")
        job: Future[T] = Future()

        def run(job: Future[T]) -> T:
            if not job.set_running_or_notify_cancel():
                raise CkptError(f"{self.name} was to do it when it got no thread for it")
            try:
                result = fn(*args)
            except BaseException as exc:
                job.set_exception(exc)
                del job  # the error knows this frame: it would keep itself alive, and the memory in the frames of `fn`
                raise
            job.set_result(result)
            return result

        try:
            taken = self._pool.submit(run, job)
        except RuntimeError as exc:
            with self._lock:  # so that `close` sees it
                if self.stopping.is_set() or not self._has_pooled or not _is_queued(exc):
                    job.cancel()
                    raise CkptError(self._no_thread(exc)) from exc
                self._queued = [each for each in self._queued if not each.done()] + [job]
            return job
        self._has_pooled = True  # a thread, until the end
        return taken

    def _no_thread(self, error: RuntimeError) -> str:
        if self.stopping.is_set():
            return f"{self.name} is closed"
        if not _is_queued(error):
            return f"{self.name} does nothing any more: {error}"
        why = "memory is used up, or as many run as the control group allows (pids.max)"
        return f"{self.name} got no further thread ({error}): {why}"

    def close(self, timeout_s: float = 10.0) -> None:
        """Sets `stopping`, drops jobs that have not begun, and waits. Raises if a thread is still alive then."""
        self.stopping.set()
        deadline = time.monotonic() + timeout_s
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            queued = self._queued
        for job in queued:
            job.cancel()
        with self._lock:  # one that is not alive has ended, or Ctrl-C came before it was started
            threads = [t for t in self._threads if t.is_alive() and t is not threading.current_thread()]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        alive = [t.name for t in threads if t.is_alive()]
        if alive:
            raise CkptError(f"threads did not end within {timeout_s:g} s: {', '.join(alive)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
