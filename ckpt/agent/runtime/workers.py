"""The agent's threads: what takes long is done here, its outcome comes back to the main thread.

Lanes are separate so that nothing waits for what it does not depend on: a heartbeat not for a commit, a restore not
for either. All but what a start waits for, and memory that goes, run at the lowest priority, since the training on this
machine comes first.
"""

from __future__ import annotations

import enum
import functools
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

from ckpt.agent.runtime import memory_plan
from ckpt.errors import CkptError
from ckpt.ipc.arena import Arena
from ckpt.threads import Tasks

T = TypeVar("T")

NICE = 19
MESSAGE_MAX = 2000


class Lane(enum.Enum):
    FRONT = "front"  # what a starting job waits for: listings, reads
    MEMORY = "memory"  # arenas, divisions, hashing
    CLOSING = "closing"  # arenas that go
    COMMIT = "commit"  # one commit after the other
    PART = "part"  # this node's part of a commit of its own, which waits for it, or for who writes it sooner
    STORE = "store"  # small objects: claim, heartbeat, end
    PARITY = "parity"  # waits for other nodes' bytes
    REBUILD = "rebuild"  # the same, where a start waits for what comes of it


PARITY_THREADS = 4  # each works in memory of its own
_THREADS = {
    Lane.FRONT: 4,
    Lane.MEMORY: 2,
    Lane.CLOSING: 1,
    Lane.COMMIT: 1,
    Lane.PART: 1,
    Lane.STORE: 2,
    Lane.PARITY: PARITY_THREADS,
    Lane.REBUILD: PARITY_THREADS,
}
_NOT_BEGUN = 1 << 62  # bytes
_NOT_NICE = (Lane.FRONT, Lane.REBUILD, Lane.CLOSING)


class Workers:
    """Owns the threads. `post`: runs a function on the main thread, soon; may be called from any thread."""

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        self._local = threading.local()
        self._lanes = {lane: Tasks(f"agent-{lane.value}", pool_size=threads) for lane, threads in _THREADS.items()}
        self._closing: dict[Arena, int] = {}  # and what was free before it began to go

    def run(self, lane: Lane, work: Callable[[], T], then: Callable[[Future[T]], None]) -> None:
        """Runs `work` in that lane, and `then` with its settled future on the main thread, also where there is no
        thread for it."""
        future: Future[T]
        try:
            future = self._lanes[lane].submit(self._nicely, lane, work)
        except CkptError as exc:
            future = Future()
            future.set_exception(exc)
        future.add_done_callback(lambda done: self._post(lambda: then(done)))

    def close_arenas(self, arenas: Iterable[Arena]) -> None:
        """See Arena.close. The kernel needs 0.2 s for each GiB, and a main thread that is silent for as long as a
        hundred of them need is taken for gone by other nodes. Main thread only."""
        for arena in arenas:
            self._closing[arena] = _NOT_BEGUN
            close = functools.partial(self._close, arena)
            self.run(Lane.CLOSING, close, lambda done, close=close: close() if failure(done) else None)  # type: ignore[misc]

    @property
    def closing_bytes(self) -> int:
        """Of arenas that are being closed. Any thread."""
        return sum(arena.bytes for arena in list(self._closing))

    def free_bytes(self) -> int:
        """What may still be taken on this machine: what is being closed, too, of which the kernel gives back a bit at
        a time. (What others take meanwhile counts as if it were there, up to what was given back.)"""
        closing = self._closing.copy()  # before what is free is read: what has gone in between is in both
        free = memory_plan.free_bytes()
        return free + sum(max(0, arena.bytes - max(0, free - before)) for arena, before in closing.items())

    def _close(self, arena: Arena) -> None:
        self._closing[arena] = memory_plan.free_bytes()
        try:
            arena.close()
        finally:
            self._closing.pop(arena, None)

    def close(self) -> None:
        for tasks in self._lanes.values():
            tasks.close()
        for arena in self._closing:  # whose turn has not come
            arena.close()

    def _nicely(self, lane: Lane, work: Callable[[], T]) -> T:
        if lane not in _NOT_NICE and not getattr(self._local, "nice", False):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # threads that it starts inherit it
            self._local.nice = True
        return work()


def failure(done: Future[T]) -> str:
    """What went wrong, in words fit for a message; "" when nothing did."""
    return told(done.exception())


def told(error: BaseException | None) -> str:
    """As `failure`, of what came of it."""
    if error is None:
        return ""
    text = str(error) if isinstance(error, CkptError) else f"{type(error).__name__}: {error}"
    return text[:MESSAGE_MAX] or type(error).__name__
