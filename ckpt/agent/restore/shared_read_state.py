"""The state of a shared read: which node waits for which frame of which home. Pure, without I/O.

A node asks the home of each frame that it wants (layout/read_sharding.py). The home reads the frame once, and tells
each waiting node that it has the frame, or cannot have it. `Given` is the home's side, `HomeRequest` a node's side
towards one home. Frames that a home does not give are handed back once; the node then reads them itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckpt.types import OWN_NODE

ALIVE_S = 1.0  # between messages to a waiting node for which nothing was read


class Given:
    """The home's side: frames that this node reads for all. Each frame is taken for reading at most once, and each
    waiting node is told of it once. `here`: frames that were read."""

    def __init__(self) -> None:
        self.read_frames: set[int] = set()
        self._unavailable_frames: set[int] = set()
        self._frames_being_read: set[int] = set()
        self._waiters_by_frame: dict[int, set[str]] = {}
        self._reports_by_node: dict[str, tuple[list[int], list[int]]] = {}
        self._last_reported_s: dict[str, float] = {}

    def add_requests(self, frames: Iterable[int], who: str) -> None:
        for frame in frames:
            if frame in self.read_frames or frame in self._unavailable_frames:
                self._add_report(who, frame)
            else:
                self._waiters_by_frame.setdefault(frame, set()).add(who)

    def take_requested(self) -> list[int]:
        """The requested frames that are not being read yet; they count as being read from now on."""
        taken = sorted(self._waiters_by_frame.keys() - self._frames_being_read)
        self._frames_being_read.update(taken)
        return taken

    def mark_read(self, frame: int) -> None:
        self.read_frames.add(frame)
        self._finish_frame(frame)

    def mark_unavailable(self, frame: int) -> None:
        if frame not in self.read_frames:
            self._unavailable_frames.add(frame)
            self._finish_frame(frame)

    def drop_waiter(self, who: str) -> None:
        """Forgets a node that has disconnected; it asks again if it comes back."""
        self._reports_by_node.pop(who, None)
        for waiting in self._waiters_by_frame.values():
            waiting.discard(who)

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
        self._frames_being_read.discard(frame)
        for who in sorted(self._waiters_by_frame.pop(frame, ())):
            self._add_report(who, frame)

    def _add_report(self, who: str, frame: int) -> None:
        here, lacking = self._reports_by_node.setdefault(who, ([], []))
        (here if frame in self.read_frames else lacking).append(frame)


class HomeRequest:
    """A node's side: the frames requested of one home. `given_up`: none is requested any more."""

    def __init__(self, now_s: float) -> None:
        self.given_up = False
        self._pending_frames: set[int] = set()  # requested and not here yet
        self._ready_frames: dict[int, None] = {}  # frames in `_pending_frames` that the home has, in its order
        self._fetching_frames: set[int] = set()  # frames that are being fetched
        self._last_heard_s = now_s

    @property
    def has_pending(self) -> bool:
        """Whether any frame is still to come."""
        return bool(self._pending_frames)

    @property
    def unanswered_frames(self) -> list[int]:
        """The frames that the home has not answered for."""
        return sorted(self._pending_frames - self._ready_frames.keys() - self._fetching_frames)

    def add_frames(self, frames: Iterable[int], now_s: float) -> list[int]:
        """Adds frames. Returns the new ones, which are to be requested now. Not allowed after `give_up`."""
        if not self.unanswered_frames:
            self._last_heard_s = now_s  # the home owed no answer until now
        new = sorted(set(frames) - self._pending_frames)
        self._pending_frames.update(new)
        return new

    def record_contact(self, now_s: float) -> None:
        self._last_heard_s = now_s

    def record_answer(self, here: Iterable[int], lacking: Iterable[int], now_s: float) -> list[int]:
        """Takes a home's message: frames that it has, and frames that it cannot have. Returns the latter, for this
        node to read. Frames that were not requested, or were answered for before, are ignored."""
        self._last_heard_s = now_s
        asked = set(self.unanswered_frames)
        lost = sorted(asked & set(lacking))
        self._pending_frames.difference_update(lost)
        self._ready_frames.update(
            dict.fromkeys(frame for frame in here if frame in asked and frame in self._pending_frames)
        )
        return lost

    def next_ready_frame(self) -> int | None:
        """The next frame to fetch; None: none is ready."""
        return next(iter(self._ready_frames), None)

    def begin_fetch(self, frame: int) -> None:
        """The fetch of a ready frame has begun."""
        del self._ready_frames[frame]
        self._fetching_frames.add(frame)

    def end_fetch(self, frame: int) -> bool:
        """A fetched frame has arrived. Returns whether it was still wanted."""
        self._fetching_frames.discard(frame)
        wanted = frame in self._pending_frames
        self._pending_frames.discard(frame)
        return wanted

    def give_up(self) -> list[int]:
        """Gives the home up. Returns the frames that are left, which this node reads itself."""
        left = sorted(self._pending_frames)
        self.given_up = True
        self._pending_frames.clear()
        self._ready_frames.clear()
        return left

    def silent_s(self, now_s: float) -> float:
        """Seconds since the home's last message; 0 while it owes no answer."""
        return now_s - self._last_heard_s if self.unanswered_frames else 0.0
