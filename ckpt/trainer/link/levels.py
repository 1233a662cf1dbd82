"""The level that each version's checkpoint has reached, as the agent reports it; and waiting for a level."""

from __future__ import annotations

import threading
import time
from numbers import Real
from typing import Literal

from ckpt.errors import NotStaged, SaveFailed, UsageError
from ckpt.threads import Condition
from ckpt.types import Tick

Level = Literal["none", "local", "peer", "store"]
ORDER: dict[str, int] = {"none": 0, "local": 1, "peer": 2, "store": 3}
# The levels that fail together with one level.
ABOVE = {"local": ("local", "peer", "store"), "peer": ("peer",), "store": ("store",)}


def check_time(timeout_s: object) -> None:
    """Errors: UsageError if `timeout_s` is neither a number of seconds nor None."""
    if not isinstance(timeout_s, Real | None):
        raise UsageError(f"timeout_s={timeout_s!r}: a number of seconds, or None to wait for as long as it takes")


class Levels:
    """Which version has reached or failed which level. Thread-safe.

    A version that has reached the store has reached this host's memory too. A failure to reach other nodes' memory says
    nothing about the store. In the code: no `with` of the lock ends in `return` and a call, since a Ctrl-C between the
    two would leave the lock locked."""

    def __init__(self) -> None:
        self._reached: dict[Tick, Level] = {}
        self._failed: dict[tuple[Tick, str], str] = {}
        self._expected: set[Tick] = set()  # versions taken here that are neither in the store nor given up
        self._changed = Condition()
        self._end: str | None = None
        self.committed_s = time.monotonic()  # when a version last reached the store; at first: when training began

    def expect(self, tick: Tick) -> None:
        """Notes that a snapshot of that version is being taken here."""
        with self._changed:
            self._expected.add(tick)

    def fail_unknown(self, known: set[Tick], message: str) -> None:
        """The agent was started again and knows only the versions `known`: all others taken here have failed, since it
        will not report them."""
        with self._changed:
            for tick in self._expected - known:
                for level in ABOVE["local"]:
                    self._failed.setdefault((tick, level), message)
            self._expected &= known
            self._changed.notify_all()

    def begin(self) -> None:
        """Notes that training begins: nothing could reach the store before."""
        with self._changed:
            self.committed_s = time.monotonic()

    def put(self, tick: Tick, level: Level, ok: bool, message: str = "") -> None:
        """Notes that `tick` has reached `level`, or (not `ok`) has failed to."""
        with self._changed:
            if level == "store" or (not ok and level == "local"):
                self._expected.discard(tick)
            if ok and ORDER[level] > ORDER[self._reached.get(tick, "none")]:
                self._reached[tick] = level
                if level == "store":
                    self.committed_s = time.monotonic()
            elif not ok:
                for above in ABOVE[level]:
                    self._failed[tick, above] = message
            self._changed.notify_all()

    def retry(self, tick: Tick) -> None:
        """Notes that `tick` is saved again: its earlier failures are forgotten."""
        with self._changed:
            self._failed = {key: why for key, why in self._failed.items() if key[0] != tick}

    def fail_all(self, message: str) -> None:
        """Notes that nothing more will be reported. The first message given is kept."""
        with self._changed:
            self._end = self._end or message
            self._changed.notify_all()

    @property
    def are_open(self) -> bool:
        """Whether a version that was taken here is neither in the store nor given up, and will still be reported."""
        return bool(self._expected) and self._end is None

    def is_staged(self, tick: Tick) -> bool:
        return self.level(tick) != "none"

    def level(self, tick: Tick) -> Level:
        return self._reached.get(tick, "none")

    def newest(self, level: Level) -> Tick | None:
        """The newest version that has reached `level`; None if there is none."""
        with self._changed:
            reached = list(self._reached.items())
        return max((tick for tick, got in reached if ORDER[got] >= ORDER[level]), default=None)

    def wait(self, tick: Tick, level: Level, timeout_s: float | None) -> None:
        """Waits until `tick` has reached `level`. Errors: SaveFailed if it will not, or not within timeout_s;
        UsageError for an unknown level, or a timeout_s that is no time."""
        if level not in ORDER:
            known = '"local" (this host\'s memory), "peer" (other nodes\') or "store"'
            raise UsageError(f"there is no level {level!r}: {known}")
        check_time(timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + min(timeout_s, threading.TIMEOUT_MAX / 2)
        with self._changed:
            while ORDER[self._reached.get(tick, "none")] < ORDER[level]:
                failure = self._failed.get((tick, level)) or self._end
                if failure is not None:
                    lost = NotStaged if (tick, "local") in self._failed else SaveFailed
                    raise lost(f"step {tick.step} did not reach the {level} level: {failure}")
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise SaveFailed(f"step {tick.step} did not reach the {level} level within {timeout_s:.4g} s")
                self._changed.wait(left)
