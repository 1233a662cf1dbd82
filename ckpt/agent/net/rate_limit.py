"""How fast bytes may go, so that training's own traffic is not disturbed."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ckpt.clock import Clock, SystemClock
from ckpt.ipc.addresses import PIECE_BYTES

PIECE_BYTES_MIN = 16 << 10
PIECE_S = 0.02  # a piece takes no longer than that, so that a limited flow is even
BURST_S = 0.05  # what was not used before may be made up for: a sleep ends late now and then
SLICE_S = 0.1  # who waits looks that often whether it is to stop


class Bucket:
    """A token bucket that all transfers of one direction share. Thread-safe.

    In any T seconds at most `bytes_per_s * (T + BURST_S)` bytes and one piece are let through."""

    def __init__(self, bytes_per_s: float | None = None, clock: Clock | None = None) -> None:
        """None: no limit."""
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._rate = _checked(bytes_per_s)
        self._paid_until_s = self._clock.now_s()

    def set_rate(self, bytes_per_s: float | None) -> None:
        """Counts for what is taken from now on."""
        with self._lock:
            self._rate = _checked(bytes_per_s)

    @property
    def piece_bytes(self) -> int:
        """How much to move at once."""
        rate = self._rate
        if rate is None:
            return PIECE_BYTES
        return max(PIECE_BYTES_MIN, min(PIECE_BYTES, int(rate * PIECE_S)))

    def take(self, nbytes: int) -> float:
        """Counts them; in how many seconds they may be moved."""
        with self._lock:
            if self._rate is None:
                return 0.0
            now_s = self._clock.now_s()
            begin_s = max(self._paid_until_s, now_s - BURST_S)
            self._paid_until_s = begin_s + nbytes / self._rate
            return max(0.0, begin_s - now_s)

    def wait(self, nbytes: int, stopped: Callable[[], bool]) -> None:
        """Takes them and returns when they may be moved, or within SLICE_S after `stopped` says so."""
        if self._rate is None:
            return
        due_s = self.take(nbytes)
        if due_s <= 0:
            return
        due_s += self._clock.now_s()
        while not stopped() and (left_s := due_s - self._clock.now_s()) > 0:
            self._clock.sleep_s(min(left_s, SLICE_S))


def _checked(bytes_per_s: float | None) -> float | None:
    if bytes_per_s is not None and not 0 < bytes_per_s < float("inf"):
        raise ValueError(f"a bandwidth of {bytes_per_s!r} bytes/s; give more than 0, or None for no limit")
    return bytes_per_s
