"""How much the agent's process gives way to training on this machine: as far as it can, but for when a job has to be
saved before a deadline. Then it takes the share of a processor that any other process has, until that has passed or the
notice is taken back.
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

SESSION_NICE = 10
LOOK_S = 0.5

_SESSION = Path("/proc/self/autogroup")  # "/autogroup-NUMBER nice N": of the session that this process is in
_THREADS = Path("/proc/self/task")


class Priority:
    """For the main thread, which itself is never nicer than it was started.

    Where the scheduler shares the processor between sessions, the niceness of threads counts only within ours, so the
    session is made nicer too; less so, since the thread that appoints is in it. Where it does not, that of the threads
    counts; they can be made less nice by who has the right to (CAP_SYS_NICE) alone.
    """

    def __init__(self) -> None:
        self._raised: dict[int, int] = {}  # threads that a deadline has made less nice, and what they were
        self._session: int | None = 0  # as it is
        self._hurries, self._look_s = False, -math.inf

    def tend(self, hurries: bool, now_s: float) -> float | None:
        """`hurries`: whether there is a deadline to meet. When to look again: threads begin and end meanwhile, and the
        kernel lets sessions be changed ten times a second at most, all together."""
        wanted = 0 if hurries else SESSION_NICE
        if not hurries and not self._raised and self._session in (None, wanted):
            return None
        if hurries == self._hurries and now_s < self._look_s:
            return self._look_s
        self._hurries, self._look_s = hurries, now_s + LOOK_S
        if self._session not in (None, wanted):
            self._session = self._set_session(wanted)
        if hurries:
            self._raise_threads()
        else:
            self._lower_threads()
        return self._look_s

    def _set_session(self, nice: int) -> int | None:
        """What it is then; None: this kernel does not let it be set."""
        try:
            _SESSION.write_text(str(nice))
        except BlockingIOError:
            return self._session
        except OSError:
            return None
        return nice

    def _raise_threads(self) -> None:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        for thread in map(int, os.listdir(_THREADS)):
            with contextlib.suppress(OSError):  # it has ended, or we must not
                nice = os.getpriority(os.PRIO_PROCESS, thread)
                if nice > own:
                    os.setpriority(os.PRIO_PROCESS, thread, own)
                    self._raised[thread] = nice

    def _lower_threads(self) -> None:
        there = set(map(int, os.listdir(_THREADS)))
        for thread, nice in self._raised.items():
            if thread in there:
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, thread, nice)
        self._raised.clear()
