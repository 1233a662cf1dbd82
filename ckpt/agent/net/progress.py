"""The progress of long requests between agents: a request may take as long as it makes progress.

The agent that works on a request sends `progress` every REPORT_INTERVAL_S in which some work was done. The agent that
asked gives the request up ANSWER_TIMEOUT_S after the request or the last `progress`. So no size is too large, and a
stuck request ends. Two failures are noticed much earlier: a dead or hanging agent by its connection, and a stalled
transfer by itself. Main thread only, except `Progress.advance`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt.agent.runtime.coroutines import EXPECTED, CallLater, Coro, Promise, Task
from ckpt.agent.runtime.workers import error_text
from ckpt.errors import AgentError

if TYPE_CHECKING:
    from ckpt.agent.net.channel import Channel
    from ckpt.clock import Clock
    from ckpt.ipc.messages import Message

ANSWER_TIMEOUT_S = 600.0  # longer than any work that does not report progress
REPORT_INTERVAL_S = 20.0
CHECK_INTERVAL_S = 20.0  # between two looks for requests that are overdue


class Progress:
    """A counter of finished pieces of one kind of work. Readers only check whether it changes; pieces have any size."""

    def __init__(self) -> None:
        self.count = 0

    def advance(self, _: object = None) -> None:
        """Counts one piece. Any thread; two concurrent calls may count as one."""
        self.count += 1


Answer = tuple[dict[str, Any], Sequence[bytes]]  # the body and the blobs


def serve_request(
    work: Callable[[Channel, Message], Coro[Answer]],
    progress: Progress,
    later: CallLater,
    channel: Channel,
    message: Message,
) -> None:
    """Answers another agent's request with the result of `work`, or refuses it with the error. Errors: those of `work`
    before its first wait; the caller refuses the request then.

    Sends the message `progress` meanwhile, until the connection has ended. The argument `progress` counts all work of
    that kind on this agent. So a request that waits for its turn stays alive while others make progress."""
    request_id, reported_count, is_ended = int(message.fields["id"]), progress.count, False
    answer = Task(work(channel, message))

    def end() -> None:
        nonlocal is_ended
        is_ended = True
        try:
            channel.reply(request_id, *answer.result())
        except Exception as exc:  # Also of the reply itself: it may be too large for a message.
            channel.refuse(request_id, AgentError(error_text(exc)))
            if not isinstance(exc, EXPECTED):
                raise

    def report() -> None:
        nonlocal reported_count
        if is_ended or not channel.is_open:
            return
        if progress.count != reported_count:
            reported_count = progress.count
            channel.send({"t": "progress", "id": request_id})
        later(REPORT_INTERVAL_S, report)

    if answer.is_settled:
        answer.result()
    answer.when_settled(end)
    later(REPORT_INTERVAL_S, report)


@dataclass(slots=True)
class PeerRequest:
    """A request to another agent. `deadline_s`: when the request is given up."""

    channel: Channel
    deadline_s: float
    answer: Promise[Message] = field(default_factory=Promise)


class PeerRequests:
    """The requests to other agents that are not answered yet. `progress`: advances with each answer and report."""

    def __init__(self, progress: Progress, later: CallLater, clock: Clock) -> None:
        self._progress, self._call_later, self._clock = progress, later, clock
        self._requests_by_id: dict[int, PeerRequest] = {}
        self._is_check_scheduled = False
        self._numbers = itertools.count(1)

    def send(self, channel: Channel, fields: dict[str, Any], blobs: Sequence[bytes]) -> Promise[Message]:
        """Sends a request. Returns the promise of its answer. Errors of the promise: AgentError."""
        number = next(self._numbers)
        asked = self._requests_by_id[number] = PeerRequest(channel, self._clock.now_s() + ANSWER_TIMEOUT_S)
        channel.send({**fields, "id": number}, blobs)
        self._schedule_timeout_check()
        return asked.answer

    def handle_answer(self, channel: Channel, message: Message) -> None:
        """Ends the request that a `reply` or an `error` answers. Errors: ValueError if another agent was asked."""
        number = int(message.fields["id"])
        if number in self._requests_by_id and self._requests_by_id[number].channel is not channel:
            raise ValueError(f"it answers request {number}, which another agent was asked")
        error = str(message.fields.get("message", ""))[:2000] or "refused"
        self._finish(number, *((message, "") if message.kind == "reply" else (None, error)))

    def extend(self, channel: Channel, number: int) -> None:
        """The agent at that channel works on a request: extends its deadline."""
        asked = self._requests_by_id.get(number)
        if asked is not None and asked.channel is channel:
            asked.deadline_s = self._clock.now_s() + ANSWER_TIMEOUT_S
            self._progress.advance()

    def fail(self, channel: Channel, why: AgentError) -> None:
        """Fails the requests on that channel."""
        for number in [number for number, asked in self._requests_by_id.items() if asked.channel is channel]:
            self._finish(number, None, str(why))

    def clear(self) -> None:
        """Forgets all requests. Their promises are never settled."""
        self._requests_by_id.clear()

    def _finish(self, number: int, message: Message | None, error: str) -> None:
        asked = self._requests_by_id.pop(number, None)
        if asked is not None:
            self._progress.advance()
            asked.answer.set_outcome(message, error)

    def _schedule_timeout_check(self) -> None:
        """Starts the timer for overdue requests. One timer serves all, since there may be many requests a second."""
        if not self._is_check_scheduled:
            self._is_check_scheduled = True
            self._call_later(CHECK_INTERVAL_S, self._check_timeouts)

    def _check_timeouts(self) -> None:
        self._is_check_scheduled = False
        now_s = self._clock.now_s()
        late = [number for number, asked in self._requests_by_id.items() if asked.deadline_s <= now_s]
        if len(self._requests_by_id) > len(late):
            self._schedule_timeout_check()
        for number in late:
            asked = self._requests_by_id.get(number)
            if asked is not None:
                self._finish(number, None, f"agent {asked.channel.peer} has not answered in time")
