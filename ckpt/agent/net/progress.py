"""The progress of long requests between agents: a request may take as long as it makes progress.

The agent that works on a request sends `moving` every SAY_S in which some work was done. The agent that asked gives the
request up ANSWER_S after the request or the last `moving`. So no size is too large, and a stuck request ends. Two
failures are noticed much earlier: a dead or hanging agent by its connection, and a stalled transfer by itself. Main
thread only, except `Progress.moved`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt.agent.net.channel import Channel
    from ckpt.ipc.messages import Message

ANSWER_S = 600.0  # longer than any work that does not report progress
SAY_S = 20.0
LOOK_S = 20.0  # between two looks for requests that are overdue

Then = Callable[["Message | None", str], None]


class Progress:
    """A counter of finished pieces of one kind of work. Readers only check whether it changes; pieces have any size."""

    def __init__(self) -> None:
        self.count = 0

    def moved(self, _: object = None) -> None:
        """Counts one piece. Any thread; two concurrent calls may count as one."""
        self.count += 1


class ProgressReport:
    """Sends `moving` for one request until `end`, or until the connection has ended. `progress`: counts all work of
    that kind on this agent. So a request that waits for its turn stays alive while others make progress."""

    def __init__(
        self, channel: Channel, request_id: int, progress: Progress, later: Callable[[float, Callable[[], None]], None]
    ) -> None:
        self._channel, self._id, self._progress, self._later = channel, request_id, progress, later
        self._over = False
        self._said = progress.count
        later(SAY_S, self._say)

    def end(self) -> None:
        """Stops the reports: the request is answered."""
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
    """A request to another agent. `then` is called with its answer. `due_s`: when the request is given up."""

    channel: Channel
    then: Then
    due_s: float

    def moves(self, now_s: float) -> None:
        """Moves the deadline: the peer has reported progress."""
        self.due_s = now_s + ANSWER_S
