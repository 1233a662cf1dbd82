"""Waiting for an object that a listing or a record has named, since some stores show a new object late."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from ckpt.clock import Clock, SystemClock
from ckpt.errors import NotFound

T = TypeVar("T")

# An attribute cache of a file system, or a gateway, shows a new object up to this late.
LATE_S = 3.0
PAUSE_FIRST_S = 0.1


class Patience:
    """Reads a missing object again, until LATE_S after the first miss of any object. All objects share one LATE_S: if
    one was deleted, the others are gone too, and waiting for each would take long. Thread-safe."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._deadline_s: float | None = None
        self._lock = threading.Lock()

    def retry_missing(self, read: Callable[[], T]) -> T:
        """The result of `read`. Errors: NotFound if time is up; all other errors of `read`."""
        pause_s = PAUSE_FIRST_S
        while True:
            try:
                return read()
            except NotFound:
                left_s = self._remaining_s()
                if left_s <= 0:
                    raise
            self._clock.sleep_s(min(pause_s, left_s))
            pause_s *= 2

    def _remaining_s(self) -> float:
        now_s = self._clock.now_s()
        with self._lock:
            if self._deadline_s is None:
                self._deadline_s = now_s + LATE_S
            return self._deadline_s - now_s
