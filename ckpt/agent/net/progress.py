"""The progress of long requests between agents: a request may take as long as it makes progress.

The agent that works on a request sends `progress` every REPORT_INTERVAL_S in which some work was done. The agent that
asked gives the request up ANSWER_TIMEOUT_S after the request or the last `progress`. So no size is too large, and a
stuck request ends. Two failures are noticed much earlier: a dead or hanging agent by its connection, and a stalled
transfer by itself. Main thread only, except `Progress.advance`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt.agent.net.channel import Channel
    from ckpt.ipc.messages import Message

ANSWER_TIMEOUT_S = 600.0  # longer than any work that does not report progress
REPORT_INTERVAL_S = 20.0
CHECK_INTERVAL_S = 20.0  # between two looks for requests that are overdue

Then = Callable[["Message | None", str], None]


class Progress:
    """A counter of finished pieces of one kind of work. Readers only check whether it changes; pieces have any size."""

    def __init__(self) -> None:
        self.count = 0

    def advance(self, _: object = None) -> None:
        """Counts one piece. Any thread; two concurrent calls may count as one."""
        self.count += 1


class ProgressReport:
    """Sends the message `progress` for one request until `end`, or until the connection has ended. The argument
    `progress` counts all work of that kind on this agent. So a request that waits for its turn stays alive while others
    make progress."""

    def __init__(
        self, channel: Channel, request_id: int, progress: Progress, later: Callable[[float, Callable[[], None]], None]
    ) -> None:
        self._channel, self._id, self._progress, self._call_later = channel, request_id, progress, later
        self._is_ended = False
        self._reported_count = progress.count
        later(REPORT_INTERVAL_S, self._send_report)

    def end(self) -> None:
        """Stops the reports: the request is answered."""
        self._is_ended = True

    def _send_report(self) -> None:
        if self._is_ended or not self._channel.is_open:
            return
        if self._progress.count != self._reported_count:
            self._reported_count = self._progress.count
            self._channel.send({"t": "progress", "id": self._id})
        self._call_later(REPORT_INTERVAL_S, self._send_report)


@dataclass(slots=True)
class PeerRequest:
    """A request to another agent. `on_answer` is called with its answer. `deadline_s`: when the request is given up."""

    channel: Channel
    on_answer: Then
    deadline_s: float
