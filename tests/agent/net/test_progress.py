"""What is asked of another agent is waited for as long as it moves, and no longer. Over real sockets, by a clock that
the test moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckpt.agent.net.channel import Channel
from ckpt.agent.net.framing import MESSAGE_BYTES_MAX
from ckpt.agent.net.peer_network import PeerNetwork
from ckpt.agent.net.progress import (
    ANSWER_TIMEOUT_S,
    CHECK_INTERVAL_S,
    REPORT_INTERVAL_S,
    Answer,
    Progress,
    serve_request,
)
from ckpt.agent.node.snapshot_handlers import SnapshotHandlers
from ckpt.agent.runtime.coroutines import Promise, start
from ckpt.agent.runtime.workers import Workers
from ckpt.clock import ManualClock
from ckpt.ipc.addresses import Address
from ckpt.ipc.messages import Message
from ckpt.ipc.node_list import NodeAt
from tests.agent.net.loop import SECRET, TurnedLoop
from tests.agent.parts import bare_context


class Working:
    """An agent that takes its time. `asked`: what it works on. `number`: the id of the newest request."""

    def __init__(self, loop: TurnedLoop, name: str, clock: ManualClock) -> None:
        self.progress = Progress()
        self.asked: list[Promise[None]] = []
        self.body: dict[str, Any] = {}
        self._loop = loop
        self.workers = Workers(loop.post)
        self.network = PeerNetwork(loop, self.workers, name, self, clock)
        self.at = NodeAt(name, (Address("127.0.0.1", self.network.listen(SECRET, "127.0.0.1:0")[0].port),), ())

    def peer_message(self, channel: Channel, message: Message) -> None:
        self.number = int(message.fields["id"])
        serve_request(self._work, self.progress, self._loop.call_later, channel, message)

    async def _work(self, channel: Channel, message: Message) -> Answer:
        self.asked.append(Promise())
        await self.asked[-1]
        return self.body, ()

    def peer_closed(self, channel: Channel) -> None: ...

    def answer(self) -> None:
        for request in self.asked:
            request.set_result(None)
        self.asked.clear()

    def close(self) -> None:
        self.network.close()
        self.workers.close()


class Pair:
    def __init__(self) -> None:
        self.clock = ManualClock(1000.0)
        self.loop = TurnedLoop(self.clock)
        self.asking, self.working = (Working(self.loop, name, self.clock) for name in ("asking", "working"))
        connected = self.asking.network.connect(self.working.at)
        self.loop.until(lambda: connected.is_settled and self.working.network.channel("asking"))

    def ask(self) -> list[str]:
        heard: list[str] = []
        before = len(self.working.asked)
        start(self.asking.network.request("working", {"t": "any"}), lambda _, error: heard.append(error))
        self.loop.until(lambda: len(self.working.asked) > before)
        return heard

    def go_on(self, seconds: float) -> None:
        """In steps in which whatever is due happens, and what is said arrives."""
        for _ in range(int(seconds / REPORT_INTERVAL_S)):
            self.clock.sleep_s(REPORT_INTERVAL_S)
            for _ in range(4):
                self.loop.turn(0.002)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.asking.close()
    made.working.close()
    made.loop.close()


def test_what_moves_is_waited_for_however_long_it_takes(pair: Pair) -> None:
    heard, counts = pair.ask(), [pair.asking.network.progress.count]
    for _ in range(30):
        pair.working.progress.advance()
        pair.go_on(ANSWER_TIMEOUT_S / 3)
        counts.append(pair.asking.network.progress.count)
    assert heard == []
    pair.working.answer()
    pair.loop.until(lambda: heard)
    assert heard == [""]
    counts.append(pair.asking.network.progress.count)
    assert counts == sorted(set(counts)), "a start that waits for it is said to move by that"


@pytest.mark.parametrize("has_moved", [False, True])
def test_what_does_not_move_is_given_up(has_moved: bool, pair: Pair) -> None:
    heard = pair.ask()
    if has_moved:
        pair.working.progress.advance()
    pair.go_on(ANSWER_TIMEOUT_S - 2 * REPORT_INTERVAL_S)
    assert heard == []
    pair.go_on(4 * REPORT_INTERVAL_S + CHECK_INTERVAL_S)
    assert heard == ["agent working has not answered in time"]
    pair.working.answer()  # too late, and of no harm
    pair.go_on(2 * REPORT_INTERVAL_S)
    assert len(heard) == 1


def test_an_answer_that_is_too_large_for_a_message_is_told_at_once(pair: Pair) -> None:
    pair.working.body = {"text": "x" * MESSAGE_BYTES_MAX}
    heard = pair.ask()
    pair.working.answer()
    pair.loop.until(lambda: heard)
    assert "bytes" in heard[0]


def test_nothing_is_said_of_what_is_answered_and_no_timer_is_left_for_each_question(pair: Pair) -> None:
    before = pair.loop.timers()
    heard = [pair.ask() for _ in range(50)]
    pair.working.answer()
    pair.loop.until(lambda: all(heard))
    pair.go_on(4 * REPORT_INTERVAL_S)
    assert pair.loop.timers() <= before + 1


def test_only_who_was_asked_is_believed_that_it_moves(pair: Pair) -> None:
    with closing(Working(pair.loop, "stranger", pair.clock)) as stranger:
        heard = pair.ask()
        number = pair.working.number
        connected = stranger.network.connect(pair.asking.at)
        pair.loop.until(lambda: connected.is_settled)
        for _ in range(3):
            for each in (number, number + 1):
                stranger.network.notify("asking", {"t": "progress", "id": each})
            pair.go_on(ANSWER_TIMEOUT_S / 2)
        assert heard == ["agent working has not answered in time"]


def test_who_asks_for_copies_or_parity_hears_that_they_move_until_they_are_answered() -> None:
    progress, timers, ended = Progress(), list[Callable[[], None]](), list[Promise[list[bytes]]]()
    said: list[Any] = []

    def serve(fields: object, blobs: object) -> Promise[list[bytes]]:
        ended.append(Promise())
        return ended[-1]

    memory = SimpleNamespace(
        replicas=SimpleNamespace(progress=progress),
        replica_service=SimpleNamespace(serve=serve),
    )
    context = bare_context(server=SimpleNamespace(call_later=lambda delay_s, what: timers.append(what)))
    handlers = SnapshotHandlers(context, cast(Any, memory), cast(Any, None))
    channel = SimpleNamespace(
        is_open=True, peer="x", send=said.append, reply=lambda *given: said.append("done"), refuse=said.append
    )
    about = {"identity": "00000001-0000000000000000-000000000005.0000", "rereplication": True}
    for number, kind in ((7, "replicate"), (8, "rebuild")):
        asked = Message({"t": kind, "id": number, **about}, [], [])
        handlers.serve_request(cast(Channel, channel), asked)

    def look() -> list[Any]:
        due, found = list(timers), len(said)
        timers.clear()
        for each in due:
            each()
        return said[found:]

    assert look() == []
    progress.advance()
    assert look() == [{"t": "progress", "id": 7}, {"t": "progress", "id": 8}]
    assert look() == [], "it stands still"
    for each in ended:
        each.set_result([])
    assert said[-2:] == ["done", "done"]
    progress.advance()
    assert look() == []
    assert timers == []
