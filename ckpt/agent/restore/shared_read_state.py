"""The state of a shared read: which node waits for which frame of which home. Pure, without I/O.

A node asks the home of each frame that it wants (layout/read_sharding.py). The home reads the frame once, and tells
each waiting node that it has the frame, or cannot have it. `Given` is the home's side, `HomeRequest` a node's side
towards one home. Frames that a home does not give are handed back once; the node then reads them itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckpt.types import HERE

ALIVE_S = 1.0  # between messages to a waiting node for which nothing was read


class Given:
    """The home's side: frames that this node reads for all. Each frame is taken for reading at most once, and each
    waiting node is told of it once. `here`: frames that were read."""

    def __init__(self) -> None:
        self.here: set[int] = set()
        self._lacking: set[int] = set()
        self._reading: set[int] = set()
        self._waiting: dict[int, set[str]] = {}
        self._news: dict[str, tuple[list[int], list[int]]] = {}
        self._told_s: dict[str, float] = {}

    def want(self, frames: Iterable[int], who: str) -> None:
        for frame in frames:
            if frame in self.here or frame in self._lacking:
                self._note(who, frame)
            else:
                self._waiting.setdefault(frame, set()).add(who)

    def take(self) -> list[int]:
        """The requested frames that are not being read yet; they count as being read from now on."""
        taken = sorted(self._waiting.keys() - self._reading)
        self._reading.update(taken)
        return taken

    def read(self, frame: int) -> None:
        self.here.add(frame)
        self._end(frame)

    def lacks(self, frame: int) -> None:
        if frame not in self.here:
            self._lacking.add(frame)
            self._end(frame)

    def gone(self, who: str) -> None:
        """Forgets a node that has disconnected; it asks again if it comes back."""
        self._news.pop(who, None)
        for waiting in self._waiting.values():
            waiting.discard(who)

    def news(self, now_s: float) -> dict[str, tuple[list[int], list[int]]]:
        """By waiting node: (frames read, frames that cannot be had) since the last call. Both are empty if
        only the sign of life is due, every ALIVE_S."""
        told, self._news = self._news, {}
        for who in {who for waiting in self._waiting.values() for who in waiting} - {HERE}:
            if now_s >= self._told_s.get(who, 0.0) + ALIVE_S:
                told.setdefault(who, ([], []))
        self._told_s.update(dict.fromkeys(told, now_s))
        return told

    def _end(self, frame: int) -> None:
        self._reading.discard(frame)
        for who in sorted(self._waiting.pop(frame, ())):
            self._note(who, frame)

    def _note(self, who: str, frame: int) -> None:
        here, lacking = self._news.setdefault(who, ([], []))
        (here if frame in self.here else lacking).append(frame)


class HomeRequest:
    """A node's side: the frames requested of one home. `given_up`: none is requested any more."""

    def __init__(self, now_s: float) -> None:
        self.given_up = False
        self._left: set[int] = set()  # requested and not here yet
        self._ready: dict[int, None] = {}  # frames in `_left` that the home has, in its order
        self._coming: set[int] = set()  # frames that are being fetched
        self._heard_s = now_s

    @property
    def waits(self) -> bool:
        """Whether any frame is still to come."""
        return bool(self._left)

    @property
    def open(self) -> list[int]:
        """The frames that the home has not answered for."""
        return sorted(self._left - self._ready.keys() - self._coming)

    def want(self, frames: Iterable[int], now_s: float) -> list[int]:
        """Adds frames. Returns the new ones, which are to be requested now. Not allowed after `give_up`."""
        if not self.open:
            self._heard_s = now_s  # the home owed no answer until now
        new = sorted(set(frames) - self._left)
        self._left.update(new)
        return new

    def heard(self, now_s: float) -> None:
        self._heard_s = now_s

    def told(self, here: Iterable[int], lacking: Iterable[int], now_s: float) -> list[int]:
        """Takes a home's message: frames that it has, and frames that it cannot have. Returns the latter, for this
        node to read. Frames that were not requested, or were answered for before, are ignored."""
        self._heard_s = now_s
        asked = set(self.open)
        lost = sorted(asked & set(lacking))
        self._left.difference_update(lost)
        self._ready.update(dict.fromkeys(frame for frame in here if frame in asked and frame in self._left))
        return lost

    def ready(self) -> int | None:
        """The next frame to fetch; None: none is ready."""
        return next(iter(self._ready), None)

    def take(self, frame: int) -> None:
        """The fetch of a ready frame has begun."""
        del self._ready[frame]
        self._coming.add(frame)

    def landed(self, frame: int) -> bool:
        """A fetched frame has arrived. Returns whether it was still wanted."""
        self._coming.discard(frame)
        wanted = frame in self._left
        self._left.discard(frame)
        return wanted

    def give_up(self) -> list[int]:
        """Gives the home up. Returns the frames that are left, which this node reads itself."""
        left = sorted(self._left)
        self.given_up = True
        self._left.clear()
        self._ready.clear()
        return left

    def silent_s(self, now_s: float) -> float:
        """Seconds since the home's last message; 0 while it owes no answer."""
        return now_s - self._heard_s if self.open else 0.0
