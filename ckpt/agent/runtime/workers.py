"""The agent's worker threads, in lanes. Slow work runs here, and its result returns to the main thread.

Each lane has threads of its own, so that work waits only for its own kind. A heartbeat never waits for a commit, and a
restore waits for neither. Most lanes run at the lowest priority, since training on this machine comes first. The lanes
that a start waits for, and the one that frees memory, keep normal priority.
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
    FRONT = "front"  # work that a start waits for: listings, reads
    MEMORY = "memory"  # arenas, divisions, hashing
    CLOSING = "closing"  # frees arenas
    COMMIT = "commit"  # one commit after the other
    # This node's part of its own commit. That commit waits for this lane, or for another node that writes the part
    # sooner.
    PART = "part"
    STORE = "store"  # small objects: claim, heartbeat, end
    EXPORT = "export"  # one export after the other
    PARITY = "parity"  # waits for other nodes' bytes
    REBUILD = "rebuild"  # like PARITY, for a rebuild that a start waits for


PARITY_THREADS = 4  # each has scratch memory of its own
_THREADS = {
    Lane.FRONT: 4,
    Lane.MEMORY: 2,
    Lane.CLOSING: 1,
    Lane.COMMIT: 1,
    Lane.PART: 1,
    Lane.STORE: 2,
    Lane.EXPORT: 1,
    Lane.PARITY: PARITY_THREADS,
    Lane.REBUILD: PARITY_THREADS,
}
_NOT_BEGUN = 1 << 62  # bytes
_NORMAL_LANES = (Lane.FRONT, Lane.REBUILD, Lane.CLOSING)


class Workers:
    """Owns the threads. `post`: runs a function on the main thread, soon; any thread may call it."""

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        self._lanes = {
            lane: Tasks(f"agent-{lane.value}", threads, None if lane in _NORMAL_LANES else lower_thread_priority)
            for lane, threads in _THREADS.items()
        }
        # The free bytes before each arena began to close.
        self._closing_arenas: dict[Arena, int] = {}

    def run(self, lane: Lane, work: Callable[[], T], then: Callable[[Future[T]], None]) -> None:
        """Runs `work` in that lane, then `then` with the settled future on the main thread. If the lane takes no work,
        the future holds the error."""
        future: Future[T]
        try:
            future = self._lanes[lane].submit(work)
        except CkptError as exc:
            future = Future()
            future.set_exception(exc)
        future.add_done_callback(lambda done: self._post(lambda: then(done)))

    def close_arenas(self, arenas: Iterable[Arena]) -> None:
        """Closes the arenas on a worker thread (see Arena.close). Main thread only.

        The kernel needs 0.2 s for each GiB. Other nodes would take the main thread for dead if it freed hundreds of GiB
        itself."""
        for arena in arenas:
            self._closing_arenas[arena] = _NOT_BEGUN
            close = functools.partial(self._close, arena)
            self.run(Lane.CLOSING, close, lambda done, close=close: close() if failure(done) else None)  # type: ignore[misc]

    @property
    def closing_bytes(self) -> int:
        """Bytes of the arenas that are being closed. Any thread."""
        return sum(arena.size_bytes for arena in list(self._closing_arenas))

    def free_bytes(self) -> int:
        """Bytes that may still be allocated on this machine, counting arenas that are being closed.

        The kernel frees a closing arena gradually. Memory that other processes take meanwhile hides as much of what was
        freed, so the result may be too large by up to that amount."""
        # Copied before the free memory is read. An arena that closes in between counts in both, for its part.
        closing = self._closing_arenas.copy()
        free = memory_plan.free_bytes()
        return free + sum(max(0, arena.size_bytes - max(0, free - before)) for arena, before in closing.items())

    def _close(self, arena: Arena) -> None:
        self._closing_arenas[arena] = memory_plan.free_bytes()
        try:
            arena.close()
        finally:
            self._closing_arenas.pop(arena, None)

    def close(self) -> None:
        for tasks in self._lanes.values():
            tasks.close()
        # These arenas still wait in the CLOSING lane.
        for arena in self._closing_arenas:
            arena.close()


def lower_thread_priority() -> None:
    """Gives the calling thread the lowest priority. Threads that it starts inherit it."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def failure(done: Future[T]) -> str:
    """The error text of a settled future, fit for a message; "" if it succeeded."""
    return error_text(done.exception())


def error_text(error: BaseException | None) -> str:
    """The text of an exception, fit for a message; "" for None."""
    if error is None:
        return ""
    text = str(error) if isinstance(error, CkptError) else f"{type(error).__name__}: {error}"
    return text[:MESSAGE_MAX] or type(error).__name__
