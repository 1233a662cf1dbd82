"""The rate limit of transfers: leaves bandwidth to the traffic of the training itself."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ckpt.clock import Clock, SystemClock
from ckpt.ipc.addresses import PIECE_BYTES

PIECE_BYTES_MIN = 16 << 10
PIECE_S = 0.02  # the longest time of one piece, so that a limited flow is even
BURST_S = 0.05  # unused time that may be made up for, since a sleep can end late
SLICE_S = 0.1  # between a waiter's checks whether to stop


class Bucket:
    """A token bucket that all transfers of one direction share. Thread-safe. In any T seconds it lets through at most
    `bytes_per_s * (T + BURST_S)` bytes plus one piece."""

    def __init__(self, bytes_per_s: float | None = None, clock: Clock | None = None) -> None:
        """`bytes_per_s`: the limit; None: no limit. Errors: ValueError if it is not positive and finite."""
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._rate = _checked_rate(bytes_per_s)
        self._paid_until_s = self._clock.now_s()

    def set_rate(self, bytes_per_s: float | None) -> None:
        """Changes the limit for bytes that are taken from now on. Errors: ValueError, as in the constructor."""
        with self._lock:
            self._rate = _checked_rate(bytes_per_s)

    @property
    def piece_bytes(self) -> int:
        """How many bytes to move with one call."""
        rate = self._rate
        if rate is None:
            return PIECE_BYTES
        return max(PIECE_BYTES_MIN, min(PIECE_BYTES, int(rate * PIECE_S)))

    def reserve_bytes(self, nbytes: int) -> float:
        """Counts `nbytes`; returns the seconds until they may be moved."""
        with self._lock:
            if self._rate is None:
                return 0.0
            now_s = self._clock.now_s()
            begin_s = max(self._paid_until_s, now_s - BURST_S)
            self._paid_until_s = begin_s + nbytes / self._rate
            return max(0.0, begin_s - now_s)

    def wait(self, nbytes: int, stopped: Callable[[], bool]) -> None:
        """Counts `nbytes` and blocks until they may be moved, or until at most SLICE_S after `stopped()` is true."""
        if self._rate is None:
            return
        due_s = self.reserve_bytes(nbytes)
        if due_s <= 0:
            return
        due_s += self._clock.now_s()
        while not stopped() and (left_s := due_s - self._clock.now_s()) > 0:
            self._clock.sleep_s(min(left_s, SLICE_S))


def _checked_rate(bytes_per_s: float | None) -> float | None:
    if bytes_per_s is not None and not 0 < bytes_per_s < float("inf"):
        raise ValueError(f"a bandwidth of {bytes_per_s!r} bytes/s; give more than 0, or None for no limit")
    return bytes_per_s
