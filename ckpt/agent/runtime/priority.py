"""The scheduling priority of the agent's process: as low as possible, so that training on this machine comes first.

While a job must be saved before a deadline, the agent competes like any other process. The low priority returns when
the deadline has passed or the notice is withdrawn.
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

SESSION_NICE = 10
CHECK_INTERVAL_S = 0.5

# Reads as "/autogroup-NUMBER nice N", for the session of this process.
_SESSION = Path("/proc/self/autogroup")
_THREADS = Path("/proc/self/task")


class Priority:
    """Sets the niceness of the session and of worker threads. The main thread calls it and keeps its own niceness.

    If the scheduler groups processes by session (autogroup), thread niceness counts only within this session. So the
    session gets a niceness too. It is a milder one, since the main thread, which appoints snapshots, is in the session.
    Without autogroup the threads' niceness counts. Only a process with CAP_SYS_NICE can lower it."""

    def __init__(self) -> None:
        # The former niceness of threads that a deadline made less nice.
        self._former_niceness: dict[int, int] = {}
        self._session_niceness: int | None = 0  # as it is now; None: it cannot be set
        self._is_urgent, self._next_check_s = False, -math.inf

    def apply_priority(self, hurries: bool, now_s: float) -> float | None:
        """Applies the priority and returns the time for the next call; None: no call needed. `hurries`: there is a
        deadline to meet.

        Calls repeat since threads begin and end meanwhile. The kernel accepts at most ten session changes a second in
        total."""
        wanted = 0 if hurries else SESSION_NICE
        if not hurries and not self._former_niceness and self._session_niceness in (None, wanted):
            return None
        if hurries == self._is_urgent and now_s < self._next_check_s:
            return self._next_check_s
        self._is_urgent, self._next_check_s = hurries, now_s + CHECK_INTERVAL_S
        if self._session_niceness not in (None, wanted):
            self._session_niceness = self._set_session(wanted)
        if hurries:
            self._raise_threads()
        else:
            self._lower_threads()
        return self._next_check_s

    def _set_session(self, nice: int) -> int | None:
        """The session's niceness after the change; None: this kernel does not let it be set."""
        try:
            _SESSION.write_text(str(nice))
        except BlockingIOError:
            return self._session_niceness
        except OSError:
            return None
        return nice

    def _raise_threads(self) -> None:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        for thread in map(int, os.listdir(_THREADS)):
            with contextlib.suppress(OSError):  # the thread has ended, or the right is missing
                nice = os.getpriority(os.PRIO_PROCESS, thread)
                if nice > own:
                    os.setpriority(os.PRIO_PROCESS, thread, own)
                    self._former_niceness[thread] = nice

    def _lower_threads(self) -> None:
        there = set(map(int, os.listdir(_THREADS)))
        for thread, nice in self._former_niceness.items():
            if thread in there:
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, thread, nice)
        self._former_niceness.clear()
