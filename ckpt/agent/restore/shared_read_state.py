"""The state of a shared read: which node waits for which frame of which home. Pure, without I/O.

A node asks the home of each frame that it wants (layout/read_sharding.py). The home reads the frame once, and tells
each waiting node that it has the frame, or cannot have it. `Given` is the home's side, `HomeRequest` a node's side
towards one home.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckpt.types import OWN_NODE

ALIVE_S = 1.0  # between messages to a waiting node for which nothing was read


class Given:
    """The home's side: frames that this node reads for all. Each frame is read once, and each waiting node is told of
    it once."""

    def __init__(self) -> None:
        self.read_frames: set[int] = set()
        self._unavailable_frames: set[int] = set()
        self._waiters_by_frame: dict[int, set[str]] = {}  # by frame that is being read
        self._reports_by_node: dict[str, tuple[list[int], list[int]]] = {}
        self._last_reported_s: dict[str, float] = {}

    def add_requests(self, frames: Iterable[int], who: str) -> list[int]:
        """Adds a node's requests. Returns the frames that are to be read for them now."""
        new: list[int] = []
        for frame in frames:
            if frame in self.read_frames or frame in self._unavailable_frames:
                self._add_report(who, frame)
                continue
            if frame not in self._waiters_by_frame:
                new.append(frame)
            self._waiters_by_frame.setdefault(frame, set()).add(who)
        return new

    def mark_read(self, frame: int) -> None:
        self.read_frames.add(frame)
        self._finish_frame(frame)

    def mark_unavailable(self, frame: int) -> None:
        """No effect if the frame was read."""
        if frame not in self.read_frames:
            self._unavailable_frames.add(frame)
            self._finish_frame(frame)

    def take_reports(self, now_s: float) -> dict[str, tuple[list[int], list[int]]]:
        """By waiting node: (frames read, frames that cannot be had) since the last call. Both are empty if
        only the sign of life is due, every ALIVE_S."""
        told, self._reports_by_node = self._reports_by_node, {}
        for who in {who for waiting in self._waiters_by_frame.values() for who in waiting} - {OWN_NODE}:
            if now_s >= self._last_reported_s.get(who, 0.0) + ALIVE_S:
                told.setdefault(who, ([], []))
        self._last_reported_s.update(dict.fromkeys(told, now_s))
        return told

    def _finish_frame(self, frame: int) -> None:
        for who in sorted(self._waiters_by_frame.pop(frame, ())):
            self._add_report(who, frame)

    def _add_report(self, who: str, frame: int) -> None:
        here, lacking = self._reports_by_node.setdefault(who, ([], []))
        (here if frame in self.read_frames else lacking).append(frame)


class HomeRequest:
    """A node's side: the frames requested of one home. `given_up`: none is requested any more. `pending_frames`: those
    that are not here yet. `unanswered_frames`: those of them that the home has not answered for. `attempts`: how often
    the home was asked again."""

    def __init__(self, now_s: float) -> None:
        self.given_up = False
        self.pending_frames: set[int] = set()
        self.unanswered_frames: set[int] = set()
        self.attempts = 0
        self._last_heard_s = now_s

    def add_frames(self, frames: Iterable[int], now_s: float) -> list[int]:
        """Adds frames. Returns the new ones, which are to be requested now. Not allowed after `give_up`."""
        if not self.unanswered_frames:
            self._last_heard_s = now_s  # the home owed no answer until now
        new = sorted(set(frames) - self.pending_frames)
        self.pending_frames.update(new)
        self.unanswered_frames.update(new)
        return new

    def record_contact(self, now_s: float) -> None:
        self._last_heard_s = now_s

    def record_answer(self, here: Iterable[int], lacking: Iterable[int], now_s: float) -> tuple[list[int], list[int]]:
        """Takes a home's message: frames that it has, and frames that it cannot have. Returns those to be fetched, and
        those that the home does not give. Frames that were not requested, or were answered for before, are ignored."""
        self._last_heard_s = now_s
        lost = sorted(self.unanswered_frames & set(lacking))
        self.unanswered_frames.difference_update(lost)
        self.pending_frames.difference_update(lost)
        ready = [frame for frame in dict.fromkeys(here) if frame in self.unanswered_frames]
        self.unanswered_frames.difference_update(ready)
        return ready, lost

    def give_up(self) -> list[int]:
        """Gives the home up. Returns the frames that are not here, which come from the next source."""
        self.given_up = True
        left = sorted(self.pending_frames)
        self.pending_frames.clear()
        self.unanswered_frames.clear()
        return left

    def silent_s(self, now_s: float) -> float:
        """Seconds since the home's last message; 0 while it owes no answer."""
        return now_s - self._last_heard_s if self.unanswered_frames else 0.0
