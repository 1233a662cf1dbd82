"""Who asks whom for what of the store, when a job of several nodes restores from it: pure, without I/O.

A node asks the home of each frame that it wants (plan.homes); the home reads it once, and says to whoever waits that
it has it, or that it cannot be had. `Given` is the home's side, `Asked` that of a node towards one home. Frames that a
home does not give, for whatever reason, are handed back once, and read by the node itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckpt.types import HERE

ALIVE_S = 1.0  # how often who waits hears that reading goes on, where there is nothing for it


class Given:
    """What this node reads for itself and for others. Every frame is taken to be read once at most, and whoever waits
    for it is told once."""

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
        """What is to be read, and nobody reads yet."""
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
        """It is not connected any more, and asks again if it comes back."""
        self._news.pop(who, None)
        for waiting in self._waiting.values():
            waiting.discard(who)

    def news(self, now_s: float) -> dict[str, tuple[list[int], list[int]]]:
        """By who waits: what is here, and what is not to be had. At times neither: then reading goes on."""
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
    """What this node wants of one home. `given_up`: nothing more is."""

    def __init__(self, now_s: float) -> None:
        self.given_up = False
        self._left: set[int] = set()  # wanted and not here
        self._ready: dict[int, None] = {}  # of these: what the home has, in the order in which it said so
        self._coming: set[int] = set()  # and what is being fetched
        self._heard_s = now_s

    @property
    def waits(self) -> bool:
        """Whether anything is to come from it."""
        return bool(self._left)

    @property
    def open(self) -> list[int]:
        """What the home has not said anything about."""
        return sorted(self._left - self._ready.keys() - self._coming)

    def want(self, frames: Iterable[int], now_s: float) -> list[int]:
        """Those of them that the home is to be asked for now. Not once it was given up."""
        if not self.open:
            self._heard_s = now_s  # it has had nothing to say
        new = sorted(set(frames) - self._left)
        self._left.update(new)
        return new

    def heard(self, now_s: float) -> None:
        self._heard_s = now_s

    def told(self, here: Iterable[int], lacking: Iterable[int], now_s: float) -> list[int]:
        """What the home has, and what it cannot have. Those that are to be had elsewhere. What it was not asked for, or
        has said before, changes nothing."""
        self._heard_s = now_s
        asked = set(self.open)
        lost = sorted(asked & set(lacking))
        self._left.difference_update(lost)
        self._ready.update(dict.fromkeys(frame for frame in here if frame in asked and frame in self._left))
        return lost

    def ready(self) -> int | None:
        """The next that is to be fetched."""
        return next(iter(self._ready), None)

    def take(self, frame: int) -> None:
        """It is being fetched."""
        del self._ready[frame]
        self._coming.add(frame)

    def landed(self, frame: int) -> bool:
        """Whether it was still wanted."""
        self._coming.discard(frame)
        wanted = frame in self._left
        self._left.discard(frame)
        return wanted

    def give_up(self) -> list[int]:
        """This home gives nothing any more: what is left, all of it to be had elsewhere."""
        left = sorted(self._left)
        self.given_up = True
        self._left.clear()
        self._ready.clear()
        return left

    def silent_s(self, now_s: float) -> float:
        """For how long it has said nothing, where it has something to say."""
        return now_s - self._heard_s if self.open else 0.0
