"""A probe by two machines: how late one machine's new object shows in the other's listing.

No clocks are compared. Each machine puts a ping, answers the pings that it lists, and times its own ping until the
answer is listed. That time is the lateness of both directions together.

    machine A                    store                     machine B
    put A.1                 ->   A.1
                                 A.1                  ->   lists A.1
                                 A.1, A.1.B           <-   puts A.1.B
    lists A.1.B             <-   A.1, A.1.B

The first round trip is not counted: it may have waited for the other machine to begin. A machine has measured after
`ROUNDS` round trips more, or after a late one. It then puts A.done, and goes on to answer until it lists
the other's.
"""

from __future__ import annotations

import secrets
import time

from ckpt.errors import StorageError
from ckpt.storage.contract import Backend

FOLDER = "doctor/pair/"
ROUNDS = 3
LATE_S = 3.0  # a store without a cache needs two puts, two listings and two pauses
PAUSE_S = 0.25


class PairProbe:
    """The part of one machine, without I/O. `me`: its name in keys, without a dot. `before`: the names that it lists
    at the beginning: another doctor may have left them."""

    def __init__(self, me: str, before: set[str]) -> None:
        self.round_trips_s: list[float] = []
        self._me = me
        self._old_done = {name for name in before if name.endswith(".done")}
        self._ping, self._pinged_s = 0, 0.0  # number of the ping that waits for its answer, and when it was put
        self._put: set[str] = set()
        self._other_done = ""

    @property
    def is_finished(self) -> bool:
        """Whether this machine has measured, and the other one needs no more answers."""
        return self._has_measured and self._other_done != ""

    @property
    def _has_measured(self) -> bool:
        return len(self.round_trips_s) >= ROUNDS or max(self.round_trips_s, default=0.0) > LATE_S

    def turn(self, names: set[str], now_s: float) -> list[str]:
        """The names to put, after a listing that shows `names`. `now_s`: in seconds, of any monotonic clock."""
        is_answered = any(name.startswith(f"{self._me}.{self._ping}.") for name in names)
        if not self._has_measured and (self._ping == 0 or is_answered):
            if self._ping > 1:
                self.round_trips_s.append(now_s - self._pinged_s)
            self._ping, self._pinged_s = self._ping + 1, now_s
        wanted = [f"{self._me}.done" if self._has_measured else f"{self._me}.{self._ping}"]
        for name in sorted(names):
            asker, _, rest = name.partition(".")
            if asker != self._me and rest.isdecimal():
                wanted.append(f"{name}.{self._me}")
            elif asker != self._me and rest == "done" and name not in self._old_done:
                self._other_done = name
        new = [name for name in wanted if name not in self._put]
        self._put.update(new)
        return new

    def is_spent(self, name: str) -> bool:
        """Whether this machine deletes the name when it leaves: its own pings with their answers, and the other
        machine's last word. The other one has still to list this machine's."""
        return name == self._other_done or (name.startswith(f"{self._me}.") and not name.endswith(".done"))


def probe_pair(backend: Backend, timeout_s: float) -> list[float]:
    """The round trips in seconds, measured together with the machine that does the same at the same store.

    Errors: StorageError if no other machine answered within `timeout_s`; those of the backend."""

    def listed() -> set[str]:
        return {info.key.removeprefix(FOLDER) for info in backend.list(FOLDER)}

    ended_s, names = time.monotonic() + timeout_s, listed()
    machine = PairProbe(secrets.token_hex(8), names)
    try:
        while not machine.is_finished and time.monotonic() < ended_s:
            for name in machine.turn(names, time.monotonic()):
                backend.put(FOLDER + name, [b"ckpt doctor"])
            time.sleep(PAUSE_S)
            names = listed()
    finally:
        backend.delete([FOLDER + name for name in listed() if machine.is_spent(name)])
    if not machine.round_trips_s:
        raise StorageError(
            f"no other machine answered for {timeout_s:g} s: run `ckpt doctor URL --pair` on two machines at once"
        )
    return machine.round_trips_s
