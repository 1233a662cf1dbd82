"""The level that each version's checkpoint has reached, as the agent reports it; and waiting for a level."""

from __future__ import annotations

import threading
import time
from numbers import Real
from typing import Literal

from ckpt.errors import NotStaged, SaveFailed, UsageError
from ckpt.threads import Condition
from ckpt.types import Version

Level = Literal["none", "local", "peer", "store"]
LEVEL_ORDER: dict[str, int] = {"none": 0, "local": 1, "peer": 2, "store": 3}
# The levels that fail together with one level.
FAILS_WITH = {"local": ("local", "peer", "store"), "peer": ("peer",), "store": ("store",)}


def check_timeout(timeout_s: object) -> None:
    """Errors: UsageError if `timeout_s` is neither a number of seconds nor None."""
    if not isinstance(timeout_s, Real | None):
        raise UsageError(f"timeout_s={timeout_s!r}: a number of seconds, or None to wait for as long as it takes")


class Levels:
    """Which version has reached or failed which level. Thread-safe.

    A version that has reached the store has reached this host's memory too. A failure to reach other nodes' memory says
    nothing about the store. In the code: no `with` of the lock ends in `return` and a call, since a Ctrl-C between the
    two would leave the lock locked."""

    def __init__(self) -> None:
        self._reached_levels: dict[Version, Level] = {}
        self._failure_messages: dict[tuple[Version, str], str] = {}
        self._pending_versions: set[Version] = set()  # versions taken here that are neither in the store nor given up
        self._changed = Condition()
        self._end_message: str | None = None
        self.committed_s = time.monotonic()  # when a version last reached the store; at first: when training began

    def expect(self, version: Version) -> None:
        """Notes that a snapshot of that version is being taken here."""
        with self._changed:
            self._pending_versions.add(version)

    def fail_unknown(self, known: set[Version], message: str) -> None:
        """The agent was started again and knows only the versions `known`: all others taken here have failed, since it
        will not report them."""
        with self._changed:
            for version in self._pending_versions - known:
                for level in FAILS_WITH["local"]:
                    self._failure_messages.setdefault((version, level), message)
            self._pending_versions &= known
            self._changed.notify_all()

    def begin(self) -> None:
        """Notes that training begins: nothing could reach the store before."""
        with self._changed:
            self.committed_s = time.monotonic()

    def record(self, version: Version, level: Level, ok: bool, message: str = "") -> None:
        """Notes that `version` has reached `level`, or (not `ok`) has failed to."""
        with self._changed:
            if level == "store" or (not ok and level == "local"):
                self._pending_versions.discard(version)
            if ok and LEVEL_ORDER[level] > LEVEL_ORDER[self._reached_levels.get(version, "none")]:
                self._reached_levels[version] = level
                if level == "store":
                    self.committed_s = time.monotonic()
            elif not ok:
                for above in FAILS_WITH[level]:
                    self._failure_messages[version, above] = message
            self._changed.notify_all()

    def forget_failures(self, version: Version) -> None:
        """Notes that `version` is saved again: its earlier failures are forgotten."""
        with self._changed:
            self._failure_messages = {key: why for key, why in self._failure_messages.items() if key[0] != version}

    def fail_all(self, message: str) -> None:
        """Notes that nothing more will be reported. The first message given is kept."""
        with self._changed:
            self._end_message = self._end_message or message
            self._changed.notify_all()

    @property
    def has_pending_versions(self) -> bool:
        """Whether a version that was taken here is neither in the store nor given up, and will still be reported."""
        return bool(self._pending_versions) and self._end_message is None

    def level(self, version: Version) -> Level:
        return self._reached_levels.get(version, "none")

    def newest(self, level: Level) -> Version | None:
        """The newest version that has reached `level`; None if there is none."""
        with self._changed:
            reached = list(self._reached_levels.items())
        return max((version for version, got in reached if LEVEL_ORDER[got] >= LEVEL_ORDER[level]), default=None)

    def wait(self, version: Version, level: Level, timeout_s: float | None) -> None:
        """Waits until `version` has reached `level`. Errors: SaveFailed if it will not, or not within timeout_s;
        UsageError for an unknown level, or a timeout_s that is no time."""
        if level not in LEVEL_ORDER:
            known = '"local" (this host\'s memory), "peer" (other nodes\') or "store"'
            raise UsageError(f"there is no level {level!r}: {known}")
        check_timeout(timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + min(timeout_s, threading.TIMEOUT_MAX / 2)
        with self._changed:
            while LEVEL_ORDER[self._reached_levels.get(version, "none")] < LEVEL_ORDER[level]:
                failure = self._failure_messages.get((version, level)) or self._end_message
                if failure is not None:
                    lost = NotStaged if (version, "local") in self._failure_messages else SaveFailed
                    raise lost(f"step {version.step} did not reach the {level} level: {failure}")
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise SaveFailed(f"step {version.step} did not reach the {level} level within {timeout_s:.4g} s")
                self._changed.wait(left)
