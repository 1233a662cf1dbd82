"""A start is waited for as long as it gets further, however long that takes, and no longer: the agent says so, and the
trainer believes it."""

from __future__ import annotations

import functools
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest

from ckpt.agent.net.progress import Progress
from ckpt.agent.node.startup import Startup
from ckpt.agent.node.startup_state import Start
from ckpt.agent.runtime.coroutines import spawn
from ckpt.errors import AgentError, NoCheckpoint
from ckpt.ipc import client, messages
from ckpt.threads import Tasks
from ckpt.trainer.loop.entry import StartDecision, _request_decision
from ckpt.trainer.loop.saver import Saver
from tests.agent.parts import bare_context

BOUND_S = 60.0


class Agent:
    """The other end of a trainer's connection, played by the test. `heard`: the newest request."""

    def __init__(self, tasks: Tasks) -> None:
        near, self.sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(BOUND_S)
        greeted = tasks.submit(self._greet)
        self.connection = client.Connection(near, tasks, lambda message: message.close(), lambda why: None)
        greeted.result(BOUND_S)

    def _greet(self) -> None:
        self.say({"t": "reply", "id": self.hear(), "incarnation": "x", "pid": 1, "secret": None})

    def hear(self) -> int:
        message = messages.receive(self.sock)
        assert message is not None
        return int(message.fields["id"])

    def say(self, fields: dict[str, Any]) -> None:
        messages.send(self.sock, fields)

    def close(self) -> None:
        self.connection.close()
        self.sock.close()


@pytest.fixture
def agent() -> Iterator[Agent]:
    with Tasks("waiting", pool_size=2) as tasks:
        made = Agent(tasks)
        yield made
        made.close()


@pytest.mark.parametrize(
    "wait",
    [
        lambda connection: connection.request("save"),
        lambda connection: connection.start_request("begin").wait_while_progressing(BOUND_S),
    ],
)
def test_a_time_limit_of_the_users_comes_as_it_is(agent: Agent, wait: Callable[[client.Connection], object]) -> None:
    """As what is usual in a handler of SIGALRM: not as the agent's silence, which is another thing."""

    def ring(number: int, frame: object) -> None:
        raise TimeoutError("of the user's")

    def kill() -> None:
        agent.hear()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(kill)
            with pytest.raises(TimeoutError, match="of the user's"):
                wait(agent.connection)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_request_that_is_said_to_move_is_waited_for_and_one_that_stands_still_is_an_error(agent: Agent) -> None:
    pending = agent.connection.start_request("begin")
    number = agent.hear()
    for _ in range(3):
        agent.say({"t": "progress", "id": number})
        assert pending.progress.wait(BOUND_S)
        assert pending.wait_while_progressing(0.0) is None
    agent.say({"t": "progress", "id": number + 1})  # of another one
    agent.say({"t": "progress"})
    with pytest.raises(AgentError, match="did not answer 'begin' and made no progress"):
        pending.wait_while_progressing(0.05)
    agent.say({"t": "reply", "id": number, "epoch": "e"})
    answer = pending.wait_while_progressing(BOUND_S)
    assert answer is not None
    assert answer.fields["epoch"] == "e"


def test_what_a_request_is_refused_with_is_raised_by_whoever_waits_for_it(agent: Agent) -> None:
    pending = agent.connection.start_request("begin")
    agent.say(messages.error_fields(agent.hear(), NoCheckpoint("none")))
    with pytest.raises(NoCheckpoint):
        pending.wait_while_progressing(BOUND_S)
    lost = agent.connection.start_request("begin")
    agent.sock.close()
    with pytest.raises(AgentError, match="ended before it answered"):
        lost.wait_while_progressing(BOUND_S)


class Together:
    """A rank of two that are threads."""

    world = 2

    def __init__(self, rank: int, said: list[bytes], barrier: Barrier) -> None:
        self.rank, self._said, self._barrier = rank, said, barrier
        self.gathers = 0

    def gather(self, data: bytes) -> list[bytes]:
        self.gathers += 1
        self._said[self.rank] = data
        self._barrier.wait(BOUND_S)
        found = list(self._said)
        self._barrier.wait(BOUND_S)
        return found


class Waits:
    """A request whose waits end in these, one after the other."""

    def __init__(self, *found: messages.Message | AgentError | None) -> None:
        self._found = list(found)
        self.forgotten = 0

    def wait_while_progressing(self, timeout_s: float) -> messages.Message | None:
        found = self._found.pop(0)
        if isinstance(found, AgentError):
            raise found
        return found

    def forget(self) -> None:
        self.forgotten += 1


@pytest.mark.parametrize("ends_well", [True, False])
def test_all_ranks_wait_as_long_as_the_start_moves_and_end_alike(ends_well: bool) -> None:
    answer = messages.Message({"t": "reply", "id": 1, "epoch": "e"}, [], [b"manifest"])
    waits = Waits(None, None, None, answer if ends_well else AgentError("it stands still"))
    asked: list[str] = []

    def ask(kind: str, fields: dict[str, Any], blobs: Any) -> Waits:
        asked.append(kind)
        return waits

    savers = [SimpleNamespace(link=SimpleNamespace(connection=SimpleNamespace(start_request=ask))), None]
    said, barrier = [b"", b""], Barrier(2)
    groups = [Together(rank, said, barrier) for rank in range(2)]

    def enter(rank: int) -> StartDecision | AgentError:
        try:
            return _request_decision(groups[rank], cast(Saver, savers[rank]), "begin", {})
        except AgentError as exc:
            return exc

    with ThreadPoolExecutor(2) as ranks:
        found = list(ranks.map(enter, range(2)))
    for each in found:
        if ends_well:
            assert isinstance(each, StartDecision)
            assert (each.epoch, each.manifest) == ("e", b"manifest")
        else:
            assert "stands still" in str(each)
    assert (asked, waits.forgotten) == (["begin"], 1)
    assert groups[0].gathers == groups[1].gathers > 4, "none of them waits for the whole of it"


class Starting:
    """An agent at whose start the test turns. `look` is when it would say that it moves."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []
        self._timers: list[Callable[[], None]] = []
        peer = SimpleNamespace(send=self.said.append)
        self.start = Start(cast(Any, peer), 7, "launch", 1, False)
        self.copies, self.network = SimpleNamespace(progress=Progress()), SimpleNamespace(progress=Progress())
        server = SimpleNamespace(call_later=lambda delay_s, what: self._timers.append(what))
        context, nothing = bare_context(network=self.network, server=server), cast(Any, None)
        self.jobs = context.jobs
        self.jobs.start = self.start
        memory, coordinator = SimpleNamespace(replicas=self.copies), SimpleNamespace(memory_nodes=None)
        startup = Startup(context, cast(Any, memory), cast(Any, coordinator), nothing, nothing)
        spawn(startup.report_progress(self.start), functools.partial(self.jobs.guard_start, self.start))

    def look(self) -> list[int]:
        """Of which requests it is said."""
        due, found = list(self._timers), len(self.said)
        self._timers.clear()
        for each in due:
            each()
        assert all(each["t"] == "progress" for each in self.said[found:])
        return [each["id"] for each in self.said[found:]]


def test_a_start_is_said_to_move_when_something_of_it_has() -> None:
    starting = Starting()
    assert starting.look() == []
    for each in (starting.network, starting.copies, starting.start):
        each.progress.advance()
        assert starting.look() == [7]
        assert starting.look() == [], "it stands still"


def test_nothing_is_said_where_nobody_waits_nor_after_the_start() -> None:
    starting = Starting()
    starting.start.request_id = None  # the ranks restore
    starting.start.progress.advance()
    assert starting.look() == []
    starting.start.request_id = 8  # the candidate has failed, and the next is waited for
    starting.start.progress.advance()
    assert starting.look() == [8]
    starting.jobs.start = None
    starting.start.progress.advance()
    assert starting.look() == starting.look() == []
    assert not starting._timers


def test_a_decision_is_never_taken_for_a_word_that_it_goes_on() -> None:
    assert StartDecision.encode(messages.Message({}, [], [])) != b""
    assert msgpack.unpackb(StartDecision.encode(messages.Message({}, [], []))) == [{}, b""]
