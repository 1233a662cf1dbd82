"""Notices that this machine will go away: the values, what each listener promises, and what a source has reported.

A notice is named by its `source` and its `key`. A later notice with the same name replaces the earlier one: the source
has moved the time. An unchanged notice is reported only once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ckpt.preemption.poll import Fault

T = TypeVar("T")

# If a key is seen again after a gap this long, its event may have ended in between: the deadline starts anew.
STALE_S = 600.0
# A time that moves by less is the same: services give whole seconds, and replies take a moment.
MOVED_S = 3.0


@dataclass(frozen=True, slots=True)
class Notice:
    """This machine goes away at `deadline_s`, or is then interrupted in a way that loses its memory.

    `deadline_s`: Unix time by this host's clock. If the service sends its own time, the clock difference is already
    removed, on the early side. It may be days ahead, or past: then the event may happen at any moment. If the source
    names no time, the deadline is the earliest one that its documentation allows.
    `certain`: False if the machine may well stay (a recommendation, a pause). Such a notice asks for care, not for
    leaving.
    `key`: names the event within its source. `message`: one line for people.
    """

    deadline_s: float
    source: str
    certain: bool
    key: str
    message: str

    @property
    def remaining_s(self) -> float:
        """Seconds from now until the deadline; negative if it is past. Correct until this host's clock is changed: to
        wait for it, add it to the monotonic clock at once."""
        return self.deadline_s - time.time()


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The notice (source, key) no longer stands: the event was cancelled, or is over and the machine stayed."""

    source: str
    key: str


NoticeChange = Notice | Withdrawn
# By source and key: the deadlines that count from when an event without a time was first seen.
FirstDeadlines = dict[str, dict[str, float]]
OnNoticeChange = Callable[[NoticeChange], None]


class Listener(Protocol):
    """One source of notices."""

    name: str

    def listen(self, stop: threading.Event, tell: OnNoticeChange) -> None:
        """Listens until `stop` is set, then returns within about a second. One call at a time, on any thread.

        `tell` is called on this thread, must not block for long, and must not raise. The listener survives every fault
        of the source (refusals, failures, hangs, invalid or too much data). It asks again after a pause that grows to
        ten seconds; a fault neither makes nor withdraws a notice. While a name is being resolved, the return may take
        as long as the resolver does. Each call begins anew: standing notices are reported again.
        """
        ...


class KnownNotices:
    """The notices that one source has reported and not withdrawn. Belongs to the listening thread. `first`: by source,
    the deadlines that `earliest_deadline` recorded. The next listener of the source continues with them."""

    def __init__(self, source: str, tell: OnNoticeChange, first: FirstDeadlines | None = None) -> None:
        self.source = source
        self._on_change = tell
        self._reported_by_key: dict[str, Notice] = {}
        self.first_deadlines = {} if first is None else first.setdefault(source, {})

    def earliest_deadline(self, key: str, deadline_s: float) -> float:
        """The deadline of an event that names no time: the earlier of `deadline_s` and the recorded one."""
        told, first_s = self._reported_by_key.get(key), self.first_deadlines.get(key, deadline_s)
        if told is not None:
            return min(told.deadline_s, deadline_s)
        self.first_deadlines[key] = min(first_s, deadline_s) if deadline_s - first_s <= STALE_S else deadline_s
        return self.first_deadlines[key]

    def set_standing(self, notices: Iterable[Notice]) -> None:
        """Sets which notices stand now. Reports those that are new, have moved or are gone."""
        now = {each.key: each for each in notices}
        for key in [key for key in {**self._reported_by_key, **self.first_deadlines} if key not in now]:
            self._reported_by_key.pop(key, None)
            self.first_deadlines.pop(key, None)
            self._on_change(Withdrawn(self.source, key))
        for notice in now.values():
            self._report_notice(notice)

    def set_from_entries(self, entries: Iterable[T], read: Callable[[T], Notice | None]) -> None:
        """Like `set_standing`, with the notices that `read` returns for a list's entries; None: the entry does not
        count.

        An entry that cannot be read does not hide the others, but then no notice is withdrawn. Errors: the first Fault
        is raised after the readable notices were reported.
        """
        notices: list[Notice] = []
        faults: list[Fault] = []
        for entry in entries:
            try:
                if (notice := read(entry)) is not None:
                    notices.append(notice)
            except Fault as exc:
                faults.append(exc)
        if not faults:
            self.set_standing(notices)
            return
        for notice in notices:
            self._report_notice(notice)
        raise faults[0]

    def _report_notice(self, notice: Notice) -> None:
        told = self._reported_by_key.get(notice.key)
        if told and told.certain == notice.certain and abs(told.deadline_s - notice.deadline_s) <= MOVED_S:
            return
        self._reported_by_key[notice.key] = notice
        self._on_change(notice)
