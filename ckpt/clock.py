"""A clock as an object, so that code which decides by time can run under a manual clock."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """A source of time that can also wait."""

    def now_s(self) -> float:
        """Seconds on a monotonic clock. Only differences have a meaning."""
        ...

    def sleep_s(self, seconds: float) -> None: ...


class SystemClock:
    """The monotonic clock of this host."""

    def now_s(self) -> float:
        return time.monotonic()

    def sleep_s(self, seconds: float) -> None:
        time.sleep(seconds)


class ManualClock:
    """A clock for tests, which only sleeping moves. Thread-safe."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self._lock = threading.Lock()

    def now_s(self) -> float:
        with self._lock:
            return self._now_s

    def sleep_s(self, seconds: float) -> None:
        with self._lock:
            self._now_s += max(0.0, seconds)
