"""How far each tick's checkpoint has come, as the agent reports it, and waiting for it."""

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
ABOVE = {"local": ("local", "peer", "store"), "peer": ("peer",), "store": ("store",)}  # what fails with a level


def check_time(timeout_s: object) -> None:
    """Errors: UsageError where that is no time to wait."""
    if not isinstance(timeout_s, Real | None):
        raise UsageError(f"timeout_s={timeout_s!r}: a number of seconds, or None to wait for as long as it takes")


class Levels:
    """Thread-safe; no block under its lock ends with `return` and a call: Ctrl-C between the two would leave it locked.
    A tick that reached the store has reached this host's memory too; that it has failed to reach other
    nodes' memory says nothing of the store."""

    def __init__(self) -> None:
        self._reached: dict[Tick, Level] = {}
        self._failed: dict[tuple[Tick, str], str] = {}
        self._expected: set[Tick] = set()  # taken here, and neither in the store nor given up
        self._changed = Condition()
        self._end: str | None = None
        self.committed_s = time.monotonic()  # when something last reached the store; at first: when this began

    def expect(self, tick: Tick) -> None:
        """A snapshot of that tick is being taken here."""
        with self._changed:
            self._expected.add(tick)

    def fail_unknown(self, known: set[Tick], message: str) -> None:
        """The agent was started again and knows of these ticks; of others that were taken it will say nothing."""
        with self._changed:
            for tick in self._expected - known:
                for level in ABOVE["local"]:
                    self._failed.setdefault((tick, level), message)
            self._expected &= known
            self._changed.notify_all()

    def begin(self) -> None:
        """Training begins now: nothing could reach the store before."""
        with self._changed:
            self.committed_s = time.monotonic()

    def put(self, tick: Tick, level: Level, ok: bool, message: str = "") -> None:
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
        """That tick is saved anew: what failed before says nothing any more."""
        with self._changed:
            self._failed = {key: why for key, why in self._failed.items() if key[0] != tick}

    def fail_all(self, message: str) -> None:
        """Nothing more will be reported. Of several reasons the first is told."""
        with self._changed:
            self._end = self._end or message
            self._changed.notify_all()

    @property
    def are_open(self) -> bool:
        """Whether something that was taken here is neither in the store nor given up, and its fate will be reported."""
        return bool(self._expected) and self._end is None

    def is_staged(self, tick: Tick) -> bool:
        return self.level(tick) != "none"

    def level(self, tick: Tick) -> Level:
        return self._reached.get(tick, "none")

    def newest(self, level: Level) -> Tick | None:
        with self._changed:
            reached = list(self._reached.items())
        return max((tick for tick, got in reached if ORDER[got] >= ORDER[level]), default=None)

    def wait(self, tick: Tick, level: Level, timeout_s: float | None) -> None:
        """Returns when `tick` has reached `level`. Errors: SaveFailed when it will not, or not within timeout_s;
        UsageError for a level that there is not, or a time that is none."""
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
