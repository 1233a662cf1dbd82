"""Notices: word that this machine will go away, and when. Values, what every listener promises, and their memory.

A notice is named by its `source` and its `key`. The same pair may be told again when the source has moved the time: the
later word replaces the earlier one. Whatever a source merely repeats is not told a second time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ckpt.preemption.poll import Fault

T = TypeVar("T")

STALE_S = 600.0  # what was seen so long before it is seen again may have ended meanwhile
MOVED_S = 3.0  # a time that moves by less is the same time: services give whole seconds, and replies take a moment


@dataclass(frozen=True, slots=True)
class Notice:
    """This machine goes away at `deadline_s`, or is interrupted then in a way that loses its memory.

    `deadline_s`: Unix time by this host's clock; where the service sends its own time along, its difference to ours is
    already taken out, on the early side. It may be days ahead, or past: then it may happen at any moment. Where the
    source names no time it is the earliest one that its documentation leaves possible.
    `certain`: False if the machine may well stay (a recommendation, a pause); it asks for care, not for leaving.
    `key`: names the event within its source. `message`: one line for people.
    """

    deadline_s: float
    source: str
    certain: bool
    key: str
    message: str

    @property
    def left_s(self) -> float:
        """Until the deadline, from now on; below 0 where it is past. Right until this host's clock is set: who waits
        for it adds this to the monotonic clock at once."""
        return self.deadline_s - time.time()


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """What was told as (source, key) stands no longer: cancelled, or over without the machine having gone."""

    source: str
    key: str


Word = Notice | Withdrawn
First = dict[str, dict[str, float]]  # by source and key: the deadline of what counts from when it was first seen
Tell = Callable[[Word], None]


class Listener(Protocol):
    """One place where notices come from."""

    name: str

    def listen(self, stop: threading.Event, tell: Tell) -> None:
        """Listens until `stop` is set; then returns within about a second. One call at a time, on any thread.

        `tell` is called on this thread, must not block for long, and must not raise. Whatever the source does (refuses,
        fails, hangs, sends garbage or too much) is survived: asked again after a pause that grows to ten seconds, and
        taken neither for a notice nor for the end of one. A name that has to be resolved may keep `stop` waiting for
        as long as the resolver does. Each call begins anew: what stands is told again.
        """
        ...


class KnownNotices:
    """What one source has told and not taken back. Belongs to the thread that listens. `first`: what `earliest` found
    for the source; given to the next one that listens to it, the time goes on from where it was."""

    def __init__(self, tell: Tell, first: dict[str, float] | None = None) -> None:
        self._tell = tell
        self._told: dict[str, Notice] = {}
        self._first = {} if first is None else first

    def earliest(self, key: str, deadline_s: float) -> float:
        """The deadline told for this key, if there is one and it is earlier; for events that name no time."""
        told, first_s = self._told.get(key), self._first.get(key, deadline_s)
        if told is not None:
            return min(told.deadline_s, deadline_s)
        self._first[key] = min(first_s, deadline_s) if deadline_s - first_s <= STALE_S else deadline_s
        return self._first[key]

    def standing(self, source: str, notices: Iterable[Notice]) -> None:
        """These, and no others, stand now: tells what is new, what has moved, and what is gone."""
        now = {each.key: each for each in notices}
        for key in [key for key in {**self._told, **self._first} if key not in now]:
            self._told.pop(key, None)
            self._first.pop(key, None)
            self._tell(Withdrawn(source, key))
        for notice in now.values():
            self._stands(notice)

    def listed(self, source: str, entries: Iterable[T], read: Callable[[T], Notice | None]) -> None:
        """As `standing`, of the notices that `read` makes of a list's entries; None: of no concern.

        An entry that cannot be read does not hide the others, but then nothing is withdrawn. Errors: that Fault, after
        the others were told.
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
            self.standing(source, notices)
            return
        for notice in notices:
            self._stands(notice)
        raise faults[0]

    def _stands(self, notice: Notice) -> None:
        told = self._told.get(notice.key)
        if told and told.certain == notice.certain and abs(told.deadline_s - notice.deadline_s) <= MOVED_S:
            return
        self._told[notice.key] = notice
        self._tell(notice)
