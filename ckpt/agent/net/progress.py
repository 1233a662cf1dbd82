"""Requests that take as long as they have bytes: who has asked waits as long as it is told that they get further.

Whoever works on one says so every SAY_S in which something has moved (message `moving`); who has asked gives it up once
ANSWER_S have gone by since the question, or since the last such word. So no size is too large, and what is stuck ends.
An agent that is gone or hangs is noticed by its connection, and a transfer that stands still by itself, much earlier.
Main thread only, but for `Progress.moved`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt.agent.net.channel import Channel
    from ckpt.ipc.messages import Message

ANSWER_S = 600.0  # more than any piece of work takes that says nothing
SAY_S = 20.0
LOOK_S = 20.0  # how often who has asked looks at the time

Then = Callable[["Message | None", str], None]


class Progress:
    """How far some kind of work has come, in pieces of any size: whether it moves is all that is read of it."""

    def __init__(self) -> None:
        self.count = 0

    def moved(self, _: object = None) -> None:
        """Any thread. Two at once may count as one."""
        self.count += 1


class ProgressReport:
    """Says that a request goes on, until `end`, or until its connection has ended. `progress`: of all work of that kind
    here, so that one which waits for its turn goes on as long as others do."""

    def __init__(
        self, channel: Channel, request_id: int, progress: Progress, later: Callable[[float, Callable[[], None]], None]
    ) -> None:
        self._channel, self._id, self._progress, self._later = channel, request_id, progress, later
        self._over = False
        self._said = progress.count
        later(SAY_S, self._say)

    def end(self) -> None:
        """It is answered."""
        self._over = True

    def _say(self) -> None:
        if self._over or not self._channel.open:
            return
        if self._progress.count != self._said:
            self._said = self._progress.count
            self._channel.send({"t": "moving", "id": self._id})
        self._later(SAY_S, self._say)


@dataclass(slots=True)
class PeerRequest:
    """A question to an agent. `then` hears its answer. `due_s`: when it is given up."""

    channel: Channel
    then: Then
    due_s: float

    def moves(self, now_s: float) -> None:
        self.due_s = now_s + ANSWER_S
