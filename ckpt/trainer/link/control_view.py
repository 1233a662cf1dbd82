"""The control page as one rank uses it: the appointments that it reads there, and the position that it shows there.

The step path reads a few words of shared memory and never waits for the agent.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from ckpt.ipc.control_page import SLOTS_MAX, ControlPage, ControlWord, RankPlace

_NOTHING_APPOINTED = memoryview(bytearray(8 * SLOTS_MAX)).cast("Q")


class ControlView:
    """The pages of the present agent and of those before it. `words`: the present control words; all zero while there
    is no agent. The training thread reads them and shows its position. Another thread brings the page of a new
    agent."""

    def __init__(self) -> None:
        self.words = _NOTHING_APPOINTED
        self.page: ControlPage | None = None
        self._rank = 0
        self._old_pages: list[ControlPage] = []
        self._position: tuple[int, int] = (0, 0)
        self._last_boundary: tuple[int, int, list[int]] = (0, 0, [])  # with the control words that were seen there
        self._old_leave_attempt = 0  # the save attempt after which an agent that has died told the ranks to leave
        self._lock = threading.Lock()

    def use(self, page: ControlPage, rank: int) -> None:
        """Takes over the page of a new agent, and shows the position of `rank` on it. The rank may not come to another
        step, where the other ranks wait for that agent. The training thread may enter a step meanwhile, so this repeats
        until the position stands."""
        with self._lock:
            old, self.page, self._rank = self.page, page, rank
            self.words = page.control_words
            if old is not None:
                self._old_leave_attempt = old.leave_attempt() or self._old_leave_attempt
                # Closed later: the training thread may be reading it.
                self._old_pages.append(old)
        told = (0, 0)
        while told != self._position:
            told = self._position
            page.publish_step(rank, *told)

    def drop_appointments(self) -> None:
        """The agent is gone: nothing is appointed until another page comes."""
        self.words = _NOTHING_APPOINTED

    def enter(self, step: int, sub: int = 0) -> None:
        """Shows that this rank is in `step`, and how often it has polled or saved since the step before."""
        self._position = step, sub
        if (page := self.page) is not None:
            page.publish_step(self._rank, step, sub)

    def read_words(self, step: int, sub: int) -> list[int]:
        """The control words at that boundary, after `enter`."""
        words: list[int] = self.words.tolist()
        self._last_boundary = step, sub, words
        return words

    def find_missed(self, word: int) -> ControlWord | None:
        """The appointment of a control word, if this rank is past it and has not seen it; else None."""
        step, sub, seen = self._last_boundary
        told = ControlWord.unpack(word)
        is_missed = told is not None and word not in seen and told.place_for(step, sub) is not RankPlace.EARLY
        return told if is_missed else None

    @property
    def leave_attempt(self) -> int:
        """The save attempt after which an agent, dead or alive, has told the ranks to leave; 0: none has."""
        with self._lock:
            return (self.page.leave_attempt() if self.page is not None else 0) or self._old_leave_attempt

    @contextlib.contextmanager
    def training_paused(self) -> Iterator[None]:
        """In the block, while training stands still, the agent's threads that prepare arenas pause."""
        page = self.page
        try:
            if page is not None:
                page.publish_copying(self._rank, True)
            yield
        finally:
            if page is not None:
                page.publish_copying(self._rank, False)

    def close(self) -> None:
        self.drop_appointments()
        for page in (*self._old_pages, *([self.page] if self.page is not None else [])):
            page.close()
        self._old_pages, self.page = [], None

    def abandon_in_child(self) -> None:
        """In a forked child: the pages belong to the parent."""
        self.drop_appointments()
        self.page = None
