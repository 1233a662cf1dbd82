"""Waiting for an object that must be there: a listing or a record has named it, and a store may show it late."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from ckpt.clock import Clock, SystemClock
from ckpt.errors import NotFound

T = TypeVar("T")

LATE_S = 3.0  # a file system with an attribute cache, or a gateway, shows a new object that late
PAUSE_FIRST_S = 0.1


class Patience:
    """Asks again for what is not there, until `LATE_S` after the first time, in all: of an object that was deleted the
    others have gone, too, and not each is to be waited for. Thread-safe."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._until_s: float | None = None
        self._lock = threading.Lock()

    def get(self, read: Callable[[], T]) -> T:
        """Errors: NotFound; what `read` raises besides."""
        pause_s = PAUSE_FIRST_S
        while True:
            try:
                return read()
            except NotFound:
                left_s = self._left_s()
                if left_s <= 0:
                    raise
            self._clock.sleep_s(min(pause_s, left_s))
            pause_s *= 2

    def _left_s(self) -> float:
        now_s = self._clock.now_s()
        with self._lock:
            if self._until_s is None:
                self._until_s = now_s + LATE_S
            return self._until_s - now_s
